"""Memory: sizes, zones, devices, views, life and death, statistics, injected failures."""
import gc
import os
import re
import subprocess
import sys
import textwrap
import threading
import weakref

import numpy as np
import pytest

import mmcore as mmc
from mmcore import DevicePages, InvalidArgument, Memory, MMError
from support import not_under_asan, refused, unchanged

MIB = 1 << 20


def resident():
    with open("/proc/self/status") as status:
        return int(re.search(r"VmRSS:\s+(\d+) kB", status.read()).group(1)) << 10


# ---- sizes ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("size, nr_pages", [
    ("4M", 1024), (4 * MIB, 1024), ("1G", 1 << 18), ("64K", 16), ("0.5M", 128), ("16 MiB", 4096), ("1T", 1 << 28),
    (np.int64(4 * MIB), 1024),
])
def test_size(size, nr_pages):
    with Memory(size) as mem:
        assert mem.nr_pages == nr_pages


@pytest.mark.parametrize("args, kwargs, error, match", [
    (("4 bananas",), {}, InvalidArgument, "bananas"),
    ((-4096,), {}, InvalidArgument, "negative"),
    ((4097,), {}, InvalidArgument, "multiple of the page size"),
    ((0,), {}, InvalidArgument, "at least 4"),
    ((3.5,), {}, TypeError, "float|integer"),
    ((True,), {}, TypeError, "number of bytes"),
    ((None,), {}, TypeError, None),
    (("1.0001K",), {}, InvalidArgument, "whole number"),
    (("8P",), {}, InvalidArgument, "8P"),
    ((1 << 60,), {}, InvalidArgument, "52-bit"),
    (("16M",), dict(page_size=8192), InvalidArgument, "4K, 16K, 64K"),
    (("16M",), dict(movable="16M"), InvalidArgument, "no Normal memory"),
    (("16M",), dict(movable="8M", cma="8M"), InvalidArgument, "no Normal memory"),
    ((16 * MIB + 4096,), dict(movable="2M"), InvalidArgument, "page block"),
    (("16M",), dict(thp="sometimes"), InvalidArgument, "sometimes"),
    (("16M",), dict(shmem_thp="sometimes"), InvalidArgument, "sometimes"),
    (("16M",), dict(mthp=(9,)), InvalidArgument, "mthp"),
    (("16M",), dict(mthp=(1,)), InvalidArgument, "mthp"),
    (("16M",), dict(hugetlb={"3M": 1}), InvalidArgument, "power of two"),
    (("16M",), dict(hugetlb={"4K": 1}), InvalidArgument, "power of two"),
    (("16M",), dict(hugetlb={"2M": -1}), InvalidArgument, "number of pages"),
    (("16M",), dict(hugetlb={"2M": 1.5}), InvalidArgument, "number of pages"),
    (("16M",), dict(hugetlb={"2M": 8}), MMError, "larger Memory"),
    (("16M",), dict(hugetlb={"2M": 1 << 70}), MMError, "larger Memory"),
    (("16M",), dict(hugetlb={"1G": 1}), MMError, "larger Memory"),
    (("16M",), dict(devices=["2M"]), TypeError, "DevicePages"),
    (("16M",), dict(devices=[DevicePages("1M", align="2M")]), InvalidArgument, "multiple of the alignment"),
    (("16M",), dict(devices=[DevicePages(0)]), InvalidArgument, "not 0"),
    (("16M",), dict(devices=[DevicePages("4M", align="3M")]), InvalidArgument, "power of two"),
    (("16M",), dict(devices=[DevicePages("2M")] * 17), InvalidArgument, "16 devices"),
    (("16M",), dict(no_such=1), TypeError, "no_such"),
])
def test_sizes_that_do_not_fit_are_refused(args, kwargs, error, match):
    with pytest.raises(error, match=match):
        Memory(*args, **kwargs)


def test_device_of_unknown_type_is_refused():
    with pytest.raises(InvalidArgument, match="generic, fsdax"):
        DevicePages("2M", type="gpu")


def test_a_memory_is_set_up_once():
    with Memory("4M") as mem:
        with pytest.raises(InvalidArgument):
            mem.__init__("4M")
        assert mem.nr_pages == 1024


@pytest.mark.parametrize("page_size, shift, pmd_order, max_order", [
    ("4K", 12, 9, 10), ("16K", 14, 11, 11), ("64K", 16, 13, 13), (65536, 16, 13, 13),
])
def test_page_sizes(page_size, shift, pmd_order, max_order):
    #   PMD size: 2M at 4K, 32M at 16K, 512M at 64K: one page of 8-byte entries
    mem = Memory("2G", page_size=page_size)
    assert (mem.page_size, mem.nr_pages) == (1 << shift, (2 << 30) >> shift)
    assert (mem.pmd_order, mem.max_order) == (pmd_order, max_order)
    folio = mmc.folio_alloc(mem, max_order)
    assert mmc.folio_size(folio) == mem.page_size << max_order
    assert len(mmc.page_address(mmc.alloc_page(mem))) == mem.page_size
    assert mem.huge_zero_folio.order == pmd_order
    with pytest.raises(InvalidArgument):
        mmc.folio_alloc(mem, max_order + 1)
    mem.check()


def test_a_terabyte_costs_nothing_until_touched():
    if not os.path.exists("/proc/self/status"):
        pytest.skip("no /proc/self/status: not Linux")
    before = resident()
    mem = Memory("1T", movable="256G", cma="1G")
    folios = [mmc.folio_alloc(mem, order, zone=zone) for order in (0, 9, 10) for zone in ("Normal", "Movable", "CMA")]
    assert mem.vmstat()["nr_free_pages"] == (1 << 28) - 2 - 3 * (1 + 512 + 1024)
    assert resident() - before < 16 * MIB
    assert len(folios) == 9


RESERVATION = """
    import resource, sys
    import mmcore
    resource.setrlimit(resource.RLIMIT_AS, (2 << 30, 2 << 30))
    try:
        mmcore.Memory("1T")
    except mmcore.MMError as e:
        assert not isinstance(e, mmcore.InvalidArgument)
        print(e.errno, e)
    with mmcore.Memory("64M") as mem:       # what still fits is not hurt
        mmcore.folio_alloc(mem, 9)
"""


@not_under_asan("any limit of address space is too small")
def test_refused_reservation_names_the_remedy():
    if sys.platform == "darwin":
        pytest.skip("RLIMIT_AS is not enforced here")
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(RESERVATION)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("12 ")
    for word in ("address space", "ulimit -v", "overcommit"):
        assert word in done.stdout


# ---- zones ----------------------------------------------------------------------------------------------------------
#   0 ............................. 40M ............. 48M ............. 64M
#   | 0, 1 reserved |     Normal     |  CMA (Normal)   |    Movable     |
ZONED = dict(movable="16M", cma="8M")


@pytest.mark.parametrize("kwargs, expected", [
    ({}, [("Normal", 0, 16384, 16384, 16382, 16382)]),
    (dict(movable="16M"), [("Normal", 0, 12288, 12288, 12286, 12286), ("Movable", 12288, 16384, 4096, 4096, 4096)]),
    (ZONED, [("Normal", 0, 12288, 12288, 12286, 12286), ("Movable", 12288, 16384, 4096, 4096, 4096)]),
    (dict(movable=1), [("Normal", 0, 15872, 15872, 15870, 15870), ("Movable", 15872, 16384, 512, 512, 512)]),
    (dict(hugetlb={"2M": 2}), [("Normal", 0, 16384, 16384, 16382, 16382 - 1024)]),
    (dict(devices=[DevicePages("4M")]), [("Normal", 0, 16384, 16384, 16382, 16382),
                                         ("Device", 16384, 17408, 1024, 0, 0)]),
])
def test_zones(kwargs, expected):
    with Memory("64M", **kwargs) as mem:
        assert [tuple(zone) for zone in mem.zones] == expected
        assert mem.zone_names == [row[0] for row in expected]
        mem.check()


def test_frames_of_a_zone_add_up():
    with Memory("64M", **ZONED, hugetlb={"2M": 3}) as mem:
        taken = {"Normal": 3 * 512, "Movable": 0}
        for zone, name, order in (("Normal", "Normal", 3), ("CMA", "Normal", 9), ("Movable", "Movable", 10),
                                  (None, "Normal", 0)):
            mmc.folio_alloc(mem, order, zone=zone)
            taken[name] += 1 << order
        for zone in mem.zones:
            assert zone.free + taken[zone.name] == zone.managed
            assert zone.managed + (2 if zone.name == "Normal" else 0) == zone.present == zone.end_pfn - zone.start_pfn
        assert mem.vmstat()["nr_free_pages"] == sum(zone.free for zone in mem.zones)


def test_pages_know_their_zone():
    mem = Memory("64M", **ZONED, devices=[DevicePages("2M")])
    for folio, zone in ((mmc.folio_alloc(mem, 0, zone="Normal"), 2), (mmc.folio_alloc(mem, 3, zone="CMA"), 2),
                        (mmc.folio_alloc(mem, 3, zone="Movable"), 3), (mem.folio(16384), 4)):
        pages = mem.pages[folio.pfn:folio.pfn + folio.nr_pages]
        assert set(map(int, pages["flags"] >> 51 & 7)) == {zone}


def test_reserved_pages():
    with Memory("4M") as mem:
        assert mem.zero_page.pfn == 1
        for pfn in 0, 1:
            assert int(mem.pages["flags"][pfn]) >> 13 & 1
        pfns = [mmc.alloc_page(mem).pfn for _ in range(1022)]
        assert sorted(pfns) == list(range(2, 1024)), "every page but NULL and the zero page"
        with refused(mem, MMError, "0 pages are free", errno=12):
            mmc.alloc_page(mem)


# ---- devices --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("kind, refcount", [("generic", 1), ("fsdax", 0), ("coherent", 0), ("private", 0),
                                            ("pci_p2pdma", 0)])
@pytest.mark.parametrize("align, compound, order", [("4K", True, 0), ("2M", True, 9), ("2M", False, 0)])
def test_device_pages(kind, refcount, align, compound, order):
    mem = Memory("16M", devices=[DevicePages("4M", type=kind, align=align, compound=compound)])
    device = mem.devices[0]
    assert (device.start_pfn, device.nr_pages, device.type) == (4096, 1024, kind)
    assert mem.nr_pages == 4096 + 1024
    heads = range(device.start_pfn, device.start_pfn + 1024, 1 << order)
    assert {mem.folio(pfn).pfn for pfn in range(device.start_pfn, device.start_pfn + 1024)} == set(heads)
    assert {(mem.folio(pfn).order, mem.folio(pfn).refcount) for pfn in heads} == {(order, refcount)}
    assert {int(mem.pages["pgmap"][pfn]) for pfn in heads} == {2}
    mem.check()


def test_devices_are_aligned_and_leave_holes():
    #   RAM 0..4095 | 4K device 4096..4096 | hole | 2M device 4608..5119 | hole | 1G device 262144..524287
    mem = Memory("16M", devices=[DevicePages("4K"), DevicePages("2M", align="2M"), DevicePages("1G", align="1G")])
    assert [(d.start_pfn, d.nr_pages) for d in mem.devices] == [(4096, 1), (4608, 512), (1 << 18, 1 << 18)]
    for pfn, valid in ((4096, True), (4097, False), (4607, False), (4608, True), (5119, True), (5120, False),
                       ((1 << 18) - 1, False), (1 << 18, True), ((1 << 19) - 1, True), (1 << 19, False)):
        assert mem.pfn_valid(pfn) is valid
        if not valid:
            with pytest.raises(InvalidArgument, match="hole"):
                mem.page(pfn)
    assert mem.folio((1 << 19) - 1).order == 18


@pytest.mark.parametrize("pfn, valid", [(0, False), (1, True), (4095, True), (4096, False), (-1, False), (1 << 64, False),
                                        (None, False), ("1", False), (2.0, False), (np.uint64(7), True)])
def test_pfn_valid(pfn, valid):
    with Memory("16M") as mem:
        assert mem.pfn_valid(pfn) is valid
        if not valid:
            with pytest.raises((InvalidArgument, TypeError)):
                mem.page(pfn)
            with pytest.raises((InvalidArgument, TypeError)):
                mem.folio(pfn)


# ---- views ----------------------------------------------------------------------------------------------------------
def test_view_is_live_and_read_only():
    mem = Memory("4M")
    page = mmc.alloc_page(mem)
    view = mem.pages
    assert view["_refcount"][page.pfn] == 1
    mmc.get_page(page)
    assert view["_refcount"][page.pfn] == 2
    for write in (lambda: view.__setitem__(0, view[1]), lambda: view["_refcount"].__setitem__(2, 7)):
        with pytest.raises(ValueError, match="read-only"):
            write()
    with pytest.raises(ValueError):
        view.flags.writeable = True


def test_views_are_made_anew():
    # A view kept in the Memory would be a cycle that never dies.
    mem = Memory("4M")
    assert mem.pages is not mem.pages
    alive = weakref.ref(mem)
    del mem
    assert alive() is None


def test_view_keeps_the_memory_alive_and_open():
    mem = Memory("4M")
    page = mmc.alloc_page(mem)
    view, alive = mem.pages[page.pfn:], weakref.ref(mem)
    with pytest.raises(MMError, match="1 view") as caught:
        mem.close()
    assert caught.value.errno == 16 and not mem.closed
    del mem, page
    gc.collect()
    assert alive() is not None
    assert view["_refcount"][0] == 1, "the bytes are still there"
    del view
    gc.collect()
    assert alive() is None


@pytest.mark.parametrize("look", [lambda mem: mem.pages, lambda mem: memoryview(mem),
                                  lambda mem: mmc.page_address(mmc.alloc_page(mem)),
                                  lambda mem: mmc.folio_address(mmc.folio_alloc(mem, 3))])
def test_close_refuses_while_something_looks(look):
    mem = Memory("4M")
    view = look(mem)
    with pytest.raises(MMError, match="drop them first"):
        mem.close()
    mem.check()
    del view
    mem.close()
    assert mem.closed


def test_close_twice_and_with():
    mem = Memory("4M")
    with mem as same:
        assert same is mem
    assert mem.closed and repr(mem) == "<Memory closed>"
    mem.close()
    with pytest.raises(InvalidArgument, match="closed"):
        mem.__enter__()


def test_a_closed_memory_is_not_set_up_again():
    mem = Memory("4M")
    mm, file = mmc.MM(mem), mmc.File(mem, "64K")
    addr = mm.mmap("64K")
    mm.touch(addr, "64K")
    mem.close()
    # What was made of it would find another machine behind its handles.
    with pytest.raises(InvalidArgument, match="make a new one"):
        mem.__init__("8M")
    for call in (lambda: mm.read(addr, 1), lambda: file.read(0, 1), lambda: mem.page(2)):
        with pytest.raises(InvalidArgument, match="closed"):
            call()


def test_views_end_at_the_frontier():
    mem = Memory("16M")
    assert len(mem.pages) == 2
    folio = mmc.folio_alloc(mem, 3)
    assert len(mem.pages) == folio.pfn + 8
    mmc.folio_put(folio)
    assert len(mem.pages) == folio.pfn + 8, "what was used is looked at for ever"
    mmc.folio_alloc_at(mem, 1000, 0)
    assert len(mem.pages) == 1001
    assert not mem.pages[folio.pfn + 8:1000].tobytes().strip(b"\0"), "never used: zeros"


# ---- bytes ----------------------------------------------------------------------------------------------------------
def test_bytes_of_a_page():
    # alloc -> zeros -> write -> still there -> free -> alloc the same frame -> zeros
    mem = Memory("4M")
    page = mmc.alloc_page(mem)
    view = mmc.page_address(page)
    assert (len(view), view.readonly, bytes(view)) == (4096, False, bytes(4096))
    view[:5] = b"hello"
    assert bytes(mmc.page_address(page)[:6]) == b"hello\0"
    del view
    pfn = page.pfn
    mmc.put_page(page)
    again = mmc.folio_alloc_at(mem, pfn, 0)
    assert bytes(mmc.folio_address(again)) == bytes(4096)


def test_bytes_of_a_folio_are_those_of_its_pages():
    mem = Memory("4M")
    folio = mmc.folio_alloc(mem, 2)
    mmc.page_address(mem.page(folio.pfn + 3))[0] = 7
    whole = mmc.folio_address(folio)
    assert len(whole) == 4 * 4096 and whole[3 * 4096] == 7 and sum(whole) == 7
    whole[4096] = 9
    assert mmc.page_address(mem.page(folio.pfn + 1))[0] == 9


def test_bytes_do_not_come_back_through_a_hugetlb_pool():
    mem = Memory("16M", hugetlb={"2M": 1})
    folio = mmc.folio_alloc(mem, 9, hugetlb=True)
    pfn = folio.pfn
    mmc.folio_address(folio)[::4096] = b"x" * 512
    mmc.folio_put(folio)
    again = mmc.folio_alloc(mem, 9, hugetlb=True)
    assert again.pfn == pfn
    assert not bytes(mmc.folio_address(again)).strip(b"\0")


def test_zero_pages_read_as_zero_and_cannot_be_written():
    mem = Memory("16M")
    for view in mmc.page_address(mem.zero_page), mmc.folio_address(mem.huge_zero_folio):
        assert not bytes(view).strip(b"\0")
        with pytest.raises(TypeError):
            view[0] = 1


def test_huge_zero_folio_is_one_and_stays():
    mem = Memory("16M")
    folio = mem.huge_zero_folio
    assert folio == mem.huge_zero_folio and folio.order == 9 and folio.refcount == 1
    assert mem.vmstat()["nr_free_pages"] == 4094 - 512
    mem.check()
    small = Memory("1M")
    with refused(small, MMError, errno=12):
        small.huge_zero_folio


# ---- statistics -----------------------------------------------------------------------------------------------------
def test_vmstat_names():
    with Memory("4M") as mem:
        stat = mem.vmstat()
        assert {"nr_free_pages", "nr_foll_pin_acquired", "nr_foll_pin_released", "nr_dirty", "nr_writeback"} <= stat.keys()
        assert stat.pop("nr_free_pages") == 1022
        assert set(stat.values()) == {0}


def test_vmstat_follows_threads():
    # Every thread counts in a slot of its own; readers see the sum.
    mem = Memory("4M")
    folio = mmc.folio_alloc(mem, 3)

    def work():
        for _ in range(100):
            mmc.try_grab_folio(folio, 3)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert mem.vmstat()["nr_foll_pin_acquired"] == 4 * 100 * 3 == folio.pincount
    mem.check()


def test_opstats_are_counted_and_reset():
    mem = Memory("16M")
    folio = mmc.folio_alloc(mem, 9)
    assert set(mem.opstats()) >= {"ref_atomics", "pincount_atomics", "head_lookups", "folio_locks", "leaf_walks"}
    mem.reset_opstats()
    assert set(mem.opstats().values()) == {0}
    mmc.try_grab_folio(folio, 512)
    assert (mem.opstats()["ref_atomics"], mem.opstats()["pincount_atomics"]) == (1, 1)
    mmc.folio_lock(folio)
    mmc.folio_unlock(folio)
    assert mem.opstats()["folio_locks"] == 1
    pins = mem.vmstat()["nr_foll_pin_acquired"]
    mem.reset_opstats()
    assert set(mem.opstats().values()) == {0}
    assert mem.vmstat()["nr_foll_pin_acquired"] == pins == 512, "vmstat is not reset"


# ---- injected failures ----------------------------------------------------------------------------------------------
FRAMES = [
    lambda mem: mmc.folio_alloc(mem, 0), lambda mem: mmc.folio_alloc(mem, 9), lambda mem: mmc.alloc_page(mem),
    lambda mem: mmc.folio_alloc(mem, 3, zone="Normal"), lambda mem: mmc.folio_alloc(mem, 9, hugetlb=True),
    lambda mem: mem.huge_zero_folio,
]


@pytest.mark.parametrize("call", FRAMES)
def test_injected_frame_failure(call):
    mem = Memory("16M", hugetlb={"2M": 1})
    with mem.inject("frame"):
        with refused(mem, MMError, errno=12):
            call(mem)
        call(mem)       # the next one works again
    mem.check()


@pytest.mark.parametrize("nth", [1, 2, 5])
def test_the_nth_occurrence_fails(nth):
    mem = Memory("4M")
    with mem.inject("frame", nth):
        results = []
        for _ in range(7):
            try:
                mmc.alloc_page(mem)
                results.append(True)
            except MMError:
                results.append(False)
    assert results == [i + 1 != nth for i in range(7)]


def test_injection_ends_with_its_with_statement():
    mem = Memory("4M")
    with mem.inject("frame", 3):
        mmc.alloc_page(mem)
    for _ in range(5):
        mmc.alloc_page(mem)
    with pytest.raises(ZeroDivisionError), mem.inject("frame"):
        raise ZeroDivisionError
    mmc.alloc_page(mem)


def test_injected_frame_failure_of_bulk_allocation():
    mem = Memory("4M")
    with mem.inject("frame"), refused(mem, MMError, errno=12):
        mmc.alloc_pages_bulk(mem, 10)
    assert len(mmc.alloc_pages_bulk(mem, 10)) == 10


@pytest.mark.parametrize("call", [lambda mem, pfns: mmc.PageList(mem, pfns),
                                  lambda mem, pfns: mmc.PageRanges(mem, pfns, [1] * len(pfns))])
def test_injected_list_failure(call):
    mem = Memory("4M")
    pfns = [mmc.alloc_page(mem).pfn for _ in range(3)]
    with mem.inject("list"), refused(mem, (MMError, MemoryError)):
        call(mem, pfns)
    call(mem, pfns)


RELEASES = [
    lambda pages: mmc.unpin_user_pages(pages), lambda pages: mmc.unpin_user_pages(pages, release="page"),
    lambda pages: mmc.unpin_user_pages_dirty_lock(pages, 3, True), lambda pages: mmc.release_pages(pages),
    lambda pages: mmc.unpin_user_page_range_dirty_lock(pages[0], 3, True), lambda pages: mmc.grab_pages(pages),
    lambda pages: mmc.unpin_user_pages(mmc.PageRanges.from_pagelist(pages)),
]


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize("nth", [1, 2])
def test_injected_failure_of_a_batch(release, nth):
    # A batch notes what it may have to free or to undo before it changes anything; without memory for that it is refused.
    mem = Memory("4M")
    folio = mmc.folio_alloc(mem, 2)
    pages = mmc.PageList(mem, range(folio.pfn, folio.pfn + 3))
    mmc.grab_pages(pages)
    with mem.inject("alloc", nth):
        for _ in range(nth - 1):
            mmc.grab_pages(pages)
        with refused(mem, MMError, errno=12):
            release(pages)
        mmc.unpin_user_pages(pages)
    assert folio.pincount == 3 * (nth - 1)


@pytest.mark.parametrize("site, nth", [("nowhere", 1), ("frame", 0), ("frame", -1), ("frame", 1 << 31), ("frame", "1"),
                                       (None, 1)])
def test_wrong_injections_are_refused(site, nth):
    mem = Memory("4M")
    with pytest.raises((InvalidArgument, TypeError)), mem.inject(site, nth):
        pass
    mmc.alloc_page(mem)


@pytest.mark.parametrize("site", ["frame", "table", "list", "sg", "iommu_map", "iommu_unmap", "migrate", "alloc"])
def test_every_site_can_be_armed(site):
    mem = Memory("4M")
    with mem.inject(site, 1000), unchanged(mem):
        pass
