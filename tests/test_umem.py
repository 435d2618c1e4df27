"""ib_umem_get() and ib_umem_release(): the order of checks, every failure undone, generations of equal state."""
import errno
import pickle
import threading

import numpy as np
import pytest

import mmcore as mmc
from mmcore import *
from rdma_support import ACQUIRES, HUGE, PAGE, RELEASES, RO, RW, machine, mapped, nothing_kept, pages_of, pins, scattered
from sg_support import rows
from support import state

TOP = 1 << 64


# ---- the order of 3.3 -------------------------------------------------------------------------------------------------------
def test_each_check_comes_before_the_next():
    #   0 bounce -> 1 range -> 2 RLIMIT_MEMLOCK 0 -> 3 ON_DEMAND -> 6 pages -> 7 over the limit -> 9 pin
    # Each call is wrong in all that follows as well; curing the first error shows the second.
    mem = Memory("64M")
    poor, rich = MM(mem, rlimit_memlock=0), MM(mem, rlimit_memlock=PAGE)
    bounced, plain = IBDevice(mem, cc_bounce=True), IBDevice(mem)
    demand = RW | IB_ACCESS.ON_DEMAND
    unmapped = 0x10000
    for call, number in [
            (lambda: ib_umem_get(bounced, poor, TOP - PAGE, 2 * PAGE, demand), errno.EOPNOTSUPP),
            (lambda: ib_umem_get(plain, poor, TOP - PAGE, 2 * PAGE, demand), errno.EINVAL),
            (lambda: ib_umem_get(plain, poor, unmapped, 2 * PAGE, demand), errno.EPERM),
            (lambda: ib_umem_get(plain, rich, unmapped, 2 * PAGE, demand), errno.EOPNOTSUPP),
            (lambda: ib_umem_get(plain, rich, unmapped, 2**45, RW), errno.EINVAL),
            (lambda: ib_umem_get(plain, rich, unmapped, 2 * PAGE, RW), errno.ENOMEM),
            (lambda: ib_umem_get(plain, rich, unmapped, PAGE, RW), errno.EFAULT)]:
        with nothing_kept(mem, rich), pytest.raises(MMError) as caught:
            call()
        assert caught.value.errno == number, caught.value
    assert poor.pinned_vm == 0


@pytest.mark.parametrize("addr, size", [(TOP - PAGE, 2 * PAGE), (TOP - PAGE, PAGE), (TOP - PAGE, PAGE - 1), (1, TOP - 1)])
def test_T52_ranges_that_wrap(addr, size):
    mem, mm, dev = machine()
    with nothing_kept(mem, mm), pytest.raises(InvalidArgument, match="64 bits"):
        ib_umem_get(dev, mm, addr, size, RW)


def test_T52_address_0_is_legal():
    mem, mm, dev = machine()
    with pytest.raises(MMError) as caught:
        ib_umem_get(dev, mm, 0, PAGE, RW)
    assert caught.value.errno == errno.EFAULT       # nothing is mapped there; the address itself is no error


@pytest.mark.parametrize("addr", [0x10000, 0x10800])
def test_T51_no_bytes_are_refused_wherever_they_are(addr):
    mem, mm, dev = machine()
    mm.mmap(HUGE, addr=0x10000, flags=MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED)
    with nothing_kept(mem, mm), pytest.raises(InvalidArgument, match="0 bytes"):
        ib_umem_get(dev, mm, addr, 0, RW)


@pytest.mark.parametrize("acquire", ACQUIRES)
def test_T53_the_limit_itself_is_allowed(acquire):
    mem, mm, dev = machine(rlimit_memlock=16 * PAGE)
    addr = mapped(mm, 32 * PAGE)
    umem = ib_umem_get(dev, mm, addr, 16 * PAGE, RW, acquire=acquire)
    assert mm.pinned_vm == 16
    with nothing_kept(mem, mm), pytest.raises(MMError, match="RLIMIT_MEMLOCK") as caught:
        ib_umem_get(dev, mm, addr + 16 * PAGE, 1, RW, acquire=acquire)
    assert caught.value.errno == errno.ENOMEM
    ib_umem_release(umem)
    with nothing_kept(mem, mm), pytest.raises(MMError):
        ib_umem_get(dev, mm, addr + 1, 16 * PAGE, RW, acquire=acquire)      # 17 pages, for a byte
    assert mm.pinned_vm == 0


def test_capability_lifts_the_limit_and_still_counts():
    mem, mm, dev = machine(rlimit_memlock=PAGE, cap_ipc_lock=True)
    addr = mapped(mm, 8 * PAGE)
    first, again = (ib_umem_get(dev, mm, addr, 8 * PAGE, RW) for _ in range(2))
    assert mm.pinned_vm == 16 and mm.locked_vm == 0     # the same pages count twice
    ib_umem_release(first)
    assert mm.pinned_vm == 8
    ib_umem_release(again)
    assert mm.pinned_vm == 0 and pins(mem) == 0


# ---- what a umem is -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("acquire", ACQUIRES)
@pytest.mark.parametrize("iommu", [False, True])
@pytest.mark.parametrize("offset, size", [(0, PAGE), (100, PAGE), (PAGE - 1, 2), (0, 1500 * PAGE), (700, 1024 * PAGE)])
def test_entries_cover_the_pages_in_order(acquire, iommu, offset, size):
    mem, mm, dev = machine(iommu=iommu)
    addr = scattered(mm, 1600)
    want = pages_of(mm, addr + offset, size)
    umem = ib_umem_get(dev, mm, addr + offset, size, RW, acquire=acquire)
    umem.sgt.check()
    assert [pfn + i for pfn, off, length in rows(umem.sgt) for i in range(length // PAGE)] == want
    assert all(off == 0 and length % PAGE == 0 for _, off, length in rows(umem.sgt))
    assert umem.num_pages == ib_umem_num_pages(umem) == len(want) == mm.pinned_vm == pins(mem)
    assert ib_umem_offset(umem) == (addr + offset) % PAGE and umem.iova == addr + offset
    assert sum(int(n) for n in umem.sgt.entries["dma_length"][:umem.sgt.nents]) == len(want) * PAGE
    assert ib_umem_start_dma_addr(umem) == umem.sgt[0].dma_address + ib_umem_offset(umem)
    assert ib_umem_dma_offset(umem, HUGE) == ib_umem_start_dma_addr(umem) % HUGE
    ib_umem_release(umem)
    assert pins(mem) == 0 and mm.pinned_vm == 0 and dev.mappings == 0
    mem.check()


@pytest.mark.parametrize("max_seg_size", [PAGE, 3 * PAGE + 1, 2**32 - 1])
def test_list_and_sink_leave_one_table(max_seg_size):
    tables = []
    for acquire in ACQUIRES:
        mem, mm, dev = machine(max_seg_size=max_seg_size)
        addr = scattered(mm, 1300)
        umem = ib_umem_get(dev, mm, addr, 1300 * PAGE, RW, acquire=acquire)
        tables.append((rows(umem.sgt), umem.sgt.chunks, state(mem)))
        ib_umem_release(umem)
    assert tables[0] == tables[1]


def all_states(make, use):
    """What each pair of generations leaves of a machine."""
    results = {}
    for acquire in ACQUIRES:
        for release, lists in (*((r, "run") for r in RELEASES), ("array", "head")):
            mem, mm, dev, addr, size, access = make()
            umem = ib_umem_get(dev, mm, addr, size, access, acquire=acquire)
            held = mem.pages.tobytes()
            use(mem, mm)
            ib_umem_release(umem, release=release, lists=lists)
            mem.check()
            results[acquire, release, lists] = held, state(mem), mm.pinned_vm
    return results


@pytest.mark.parametrize("kind", ["base", "thp", "hugetlb", "part of folios", "freed under it"])
@pytest.mark.parametrize("access", [RO, RW])
def test_generations_leave_one_state(kind, access):
    def make():
        mem, mm, dev = machine(thp="always" if kind in ("thp", "part of folios", "freed under it") else "never")
        if kind == "base":
            return mem, mm, dev, scattered(mm, 1100) + 5, 1099 * PAGE, access
        flags = MAP_PRIVATE | MAP_ANONYMOUS | (MAP_HUGETLB if kind == "hugetlb" else 0)
        addr = mapped(mm, 4 * HUGE, flags=flags)
        part = (500 * PAGE, HUGE + 20 * PAGE) if kind == "part of folios" else (0, 4 * HUGE)
        return mem, mm, dev, addr + part[0], part[1], access

    def use(mem, mm):
        if kind == "freed under it":
            mm.exit()       # the pins keep the pages; releasing them frees
    if kind == "freed under it":
        results = {}
        for acquire in ACQUIRES:
            for release in RELEASES:
                mem, mm, dev, addr, size, access = make()
                umem = ib_umem_get(dev, mm, addr, size, access, acquire=acquire)
                mm.exit()
                assert pins(mem) == 4 * HUGE // PAGE
                ib_umem_release(umem, release=release)
                mem.check()
                results[acquire, release] = state(mem)
                assert pins(mem) == 0
    else:
        results = all_states(make, use)
    assert len({repr(value) for value in results.values()}) == 1


def test_T64_only_a_writable_umem_dirties():
    for access, dirty in ((RO, False), (RW, True)):
        for release in RELEASES:
            mem, mm, dev = machine()
            addr = mapped(mm, 4 * PAGE)
            for pfn in pages_of(mm, addr, 4 * PAGE):
                if mem.folio(pfn).dirty:
                    mmc.folio_clear_dirty_for_io(mem.folio(pfn))
            umem = ib_umem_get(dev, mm, addr, 4 * PAGE, access)
            before = [PageDirty(mem.page(pfn)) for pfn in pages_of(mm, addr, 4 * PAGE)]
            ib_umem_release(umem, release=release)
            after = [PageDirty(mem.page(pfn)) for pfn in pages_of(mm, addr, 4 * PAGE)]
            assert after == ([True] * 4 if dirty else before)


@pytest.mark.parametrize("release", RELEASES)
def test_T54_T70_release_goes_by_the_cpus_entries(release):
    #   entries:  many, one a run of PFNs        DMA:  one segment behind the IOMMU
    mem, mm, dev = machine(iommu=True)
    addr = scattered(mm, 300)
    umem = ib_umem_get(dev, mm, addr, 300 * PAGE, RW)
    assert umem.sgt.nents == 1 < umem.sgt.orig_nents
    ib_umem_release(umem, release=release)
    assert pins(mem) == 0 and dev.domain.stats["leaves"] == 0 and dev.iova_ranges == []


@pytest.mark.parametrize("release", RELEASES)
def test_T65_T66_an_entry_over_two_folios(release):
    #   | A: 512 pages .....|500..511| B: 0..7 |......|     20 pages from A's tail page 500 on
    mem, mm, dev = machine(thp="always")
    addr = mapped(mm, 2 * HUGE)
    a, b = mm.page_at(addr), mm.page_at(addr + HUGE)
    umem = ib_umem_get(dev, mm, addr + 500 * PAGE, 20 * PAGE, RW)
    assert (mem.folio(a.pfn).pincount, mem.folio(b.pfn).pincount) == (12, 8)
    if b.pfn == a.pfn + 512:
        assert umem.sgt.orig_nents == 1
    ib_umem_release(umem, release=release)
    assert (mem.folio(a.pfn).pincount, mem.folio(b.pfn).pincount) == (0, 0)


@pytest.mark.parametrize("release", RELEASES)
def test_T67_the_zero_page_is_neither_pinned_nor_dropped(release):
    mem, mm, dev = machine()
    zero = mem.folio(mem.zero_page.pfn)
    count = zero.refcount
    # Pinned short-term, the zero page stays what it is: a table with it, of one page each before and after.
    addr = mapped(mm, 3 * PAGE)
    mm.munmap(addr + PAGE, PAGE)
    mm.mmap(PAGE, addr=addr + PAGE, flags=MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED)
    mm.touch(addr + PAGE, PAGE, write=False)
    assert mm.page_at(addr + PAGE).pfn == zero.pfn
    pages = pin_user_pages(mm, addr, 3)
    assert pages.pfns[1] == zero.pfn and zero.refcount == count
    for page in pages:
        unpin_user_page_range_dirty_lock(page, 1, True)
    assert zero.refcount == count and not zero.dirty
    ro = mm.mmap(4 * PAGE, prot=PROT_READ)
    mm.touch(ro, 4 * PAGE, write=False)
    umem = ib_umem_get(dev, mm, ro, 4 * PAGE, RO)
    ib_umem_release(umem, release=release)
    assert zero.refcount == count and pins(mem) == 0
    mem.check()


@pytest.mark.parametrize("release", RELEASES)
def test_T68_more_entries_than_the_kernel_releases_without_a_break(release):
    mem, mm, dev = machine("128M", max_seg_size=PAGE)
    addr = mapped(mm, 4200 * PAGE)
    umem = ib_umem_get(dev, mm, addr, 4200 * PAGE, RW)
    assert umem.sgt.orig_nents == 4200 > 0x1000
    ib_umem_release(umem, release=release)
    assert pins(mem) == 0
    mem.check()


def test_T50_accounting_goes_by_the_address():
    #   0x1200 .. 0x21ff are two pages; seen from iova 0 the same bytes would be one
    mem, mm, dev = machine()
    addr = mapped(mm, 4 * PAGE) + 0x200
    umem = ib_umem_get(dev, mm, addr, 0x1000, RW)
    assert mm.pinned_vm == 2
    umem.iova = 0
    assert ib_umem_num_pages(umem) == 2 and ib_umem_num_dma_blocks(umem, PAGE) == 1
    ib_umem_release(umem)
    assert mm.pinned_vm == 0 and pins(mem) == 0


# ---- failures ----------------------------------------------------------------------------------------------------------------
SITES = ("frame", "table", "list", "sg", "iommu_map", "alloc", "migrate")


@pytest.mark.parametrize("acquire", ACQUIRES)
@pytest.mark.parametrize("site", SITES)
@pytest.mark.parametrize("populated", [True, False])
def test_T62_T63_a_failure_at_any_step_leaves_nothing(acquire, site, populated):
    # The walk goes on until one call passes untouched: every occurrence of the site has failed once by then.
    hit, passed = 0, False
    for nth in range(1, 400):
        mem, mm, dev = machine("32M", iommu=True, max_seg_size=2 * PAGE)
        addr = scattered(mm, 600) if populated else mm.mmap(600 * PAGE)
        dirty = mem.vmstat()["nr_dirty"]
        with mem.inject(site, nth):
            try:
                umem = ib_umem_get(dev, mm, addr + 9, 590 * PAGE, RW, acquire=acquire)
            except MMError as error:
                assert error.errno in (errno.ENOMEM, errno.EINVAL, errno.EFAULT)
                hit += 1
            else:
                passed = True
        if passed:
            ib_umem_release(umem)
        assert pins(mem) == 0 and mm.pinned_vm == 0 and dev.mappings == 0 and dev.iova_ranges == []
        assert mem.vmstat()["nr_dirty"] == dirty
        mem.check()
        mm.exit()
        mem.check()
        if passed or (site == "frame" and nth > 40):
            break
    expected = {"alloc", "sg", "iommu_map"} | ({"list"} if acquire == "list" else set()) | ({"frame"} if not populated else set())
    assert bool(hit) >= (site in expected)


@pytest.mark.parametrize("acquire", ACQUIRES)
def test_a_hole_behind_pages_that_are_there(acquire):
    mem, mm, dev = machine()
    addr = mapped(mm, 700 * PAGE)
    mm.munmap(addr + 650 * PAGE, PAGE)
    # The slow walk marks what it takes as accessed and dirty, and that stays.
    with nothing_kept(mem, mm, ignore=("flags",)), pytest.raises(MMError, match="nothing is mapped") as caught:
        ib_umem_get(dev, mm, addr, 700 * PAGE, RW, acquire=acquire)
    assert caught.value.errno == errno.EFAULT and caught.value.addr == addr + 650 * PAGE


@pytest.mark.parametrize("release", RELEASES)
def test_release_of_pins_that_somebody_dropped(release):
    mem, mm, dev = machine()
    addr = mapped(mm, 300 * PAGE)
    umem = ib_umem_get(dev, mm, addr, 300 * PAGE, RW)
    page = mm.page_at(addr + 250 * PAGE)
    unpin_user_page(page)
    before = state(mem)
    with pytest.raises(BadPage) as caught:
        ib_umem_release(umem, release=release)
    assert caught.value.pfn == page.pfn and state(mem) == before and mm.pinned_vm == 300 and not umem.released
    grab_pages(PageList(mem, [page.pfn]))
    ib_umem_release(umem, release=release)
    assert pins(mem) == 0 and mm.pinned_vm == 0


@pytest.mark.parametrize("release", RELEASES)
def test_release_without_memory_changes_no_pins(release):
    mem, mm, dev = machine()
    umem = ib_umem_get(dev, mm, mapped(mm, 8 * PAGE), 8 * PAGE, RW)
    before = state(mem)
    with mem.inject("alloc"), pytest.raises(MMError):
        ib_umem_release(umem, release=release)
    assert state(mem) == before and mm.pinned_vm == 8
    ib_umem_release(umem, release=release)
    assert pins(mem) == 0


def test_array_goes_page_by_page_without_its_list():
    mem, mm, dev = machine(thp="always")
    addr = mapped(mm, HUGE)
    updates = []
    for lists_fail in (False, True):
        umem = ib_umem_get(dev, mm, addr, HUGE, RW)
        mem.reset_opstats()
        with mem.inject("list", 1 if lists_fail else 1000):
            ib_umem_release(umem, release="array")
        updates.append(mem.opstats()["ref_atomics"])
        assert pins(mem) == 0
    assert updates == [1, 512]


def test_updates_by_generation():
    # The cost model: 1024 pages in two folios.
    mem, mm, dev = machine(thp="always")
    addr = mapped(mm, 2 * HUGE)
    seen = {}
    for release in RELEASES:
        umem = ib_umem_get(dev, mm, addr, 2 * HUGE, RW)
        mem.reset_opstats()
        ib_umem_release(umem, release=release)
        seen[release] = mem.opstats()["ref_atomics"]
    assert seen == {"range": 2, "array": 2, "page": 1024}


# ---- wrong calls ------------------------------------------------------------------------------------------------------------
def test_wrong_arguments():
    mem, mm, dev = machine()
    addr = mapped(mm, PAGE)
    other = Memory("16M")
    for call, error in [
            (lambda: ib_umem_get(Device(mem), mm, addr, PAGE, RW), TypeError),
            (lambda: ib_umem_get(dev, None, addr, PAGE, RW), TypeError),
            (lambda: ib_umem_get(IBDevice(other), mm, addr, PAGE, RW), InvalidArgument),
            (lambda: ib_umem_get(dev, mm, -1, PAGE, RW), InvalidArgument),
            (lambda: ib_umem_get(dev, mm, addr, 1 << 64, RW), InvalidArgument),
            (lambda: ib_umem_get(dev, mm, "a", PAGE, RW), TypeError),
            (lambda: ib_umem_get(dev, mm, addr, PAGE, RW, acquire="page"), InvalidArgument),
            (lambda: IBUmem(), TypeError),
            (lambda: IBDevice(mem, max_seg_size=PAGE - 1), InvalidArgument),
            (lambda: ib_umem_release(mm), TypeError)]:
        with nothing_kept(mem, mm), pytest.raises((error,)):
            call()
    umem = ib_umem_get(dev, mm, addr, PAGE, RW)
    with pytest.raises(InvalidArgument):
        ib_umem_release(umem, release="run")
    with pytest.raises(InvalidArgument):
        ib_umem_release(umem, release="array", lists="page")
    ib_umem_release(None)
    ib_umem_release(umem)
    with nothing_kept(mem, mm), pytest.raises(InvalidArgument, match="released"):
        ib_umem_release(umem)
    with pytest.raises(InvalidArgument, match="released"):
        ib_umem_copy_from(umem, 0, 1)
    with pytest.raises(InvalidArgument, match="released"):
        ib_umem_find_best_pgsz(umem, PAGE, 0)


def test_an_mm_that_exited():
    mem, mm, dev = machine()
    umem = ib_umem_get(dev, mm, mapped(mm, 8 * PAGE), 8 * PAGE, RW)
    mm.exit()
    with pytest.raises(MMError) as caught:
        ib_umem_get(dev, mm, 0x10000, PAGE, RW)
    assert caught.value.errno == errno.ESRCH
    ib_umem_release(umem)
    assert pins(mem) == 0
    mem.check()


def test_one_of_many_threads_releases():
    mem, mm, dev = machine()
    umem = ib_umem_get(dev, mm, mapped(mm, 512 * PAGE), 512 * PAGE, RW)
    outcomes = []

    def release():
        try:
            ib_umem_release(umem)
            outcomes.append("released")
        except InvalidArgument:
            outcomes.append("refused")
    threads = [threading.Thread(target=release) for _ in range(6)]
    [t.start() for t in threads]
    [t.join() for t in threads]
    assert sorted(outcomes) == ["refused"] * 5 + ["released"] and pins(mem) == 0 and mm.pinned_vm == 0


# ---- content ------------------------------------------------------------------------------------------------------------------
def test_copy_from():
    mem, mm, dev = machine()
    addr = scattered(mm, 5)
    text = bytes(np.random.default_rng(1).integers(0, 256, 5 * PAGE, np.uint8))
    mm.write(addr, text)
    umem = ib_umem_get(dev, mm, addr + 100, 4 * PAGE, RO)
    assert ib_umem_copy_from(umem, 0, 4 * PAGE) == text[100:100 + 4 * PAGE]
    assert ib_umem_copy_from(umem, 4000, 200) == text[4100:4300] and ib_umem_copy_from(umem, 4 * PAGE, 0) == b""
    for offset, length in ((4 * PAGE + 1, 0), (0, 4 * PAGE + 1), (4 * PAGE, 1), (1, TOP - 1)):
        with pytest.raises(InvalidArgument):
            ib_umem_copy_from(umem, offset, length)
    ib_umem_release(umem)


@pytest.mark.slow
def test_T59_copies_of_two_gigabytes_and_more():
    import mmap
    size = (2 << 30) + PAGE
    mem, mm, dev = machine("2200M", thp="always")
    addr = mm.mmap(size)
    mm.write(addr + size - 4, b"last")
    umem = ib_umem_get(dev, mm, addr, size, RO)
    with mmap.mmap(-1, size) as out:
        assert ib_umem_copy_from(umem, 0, size, into=out) is out and out[-4:] == b"last" and out[:4] == bytes(4)
    ib_umem_release(umem)


def test_T59_copies_into_a_buffer():
    mem, mm, dev = machine()
    addr = mapped(mm, 2 * PAGE)
    mm.write(addr, b"abcd")
    umem = ib_umem_get(dev, mm, addr + 1, PAGE, RO)
    out = bytearray(3)
    assert ib_umem_copy_from(umem, 0, 3, into=out) is out and out == b"bcd"
    with pytest.raises(InvalidArgument, match="3 bytes, not 4"):
        ib_umem_copy_from(umem, 0, 4, into=out)
    with pytest.raises(TypeError):
        ib_umem_copy_from(umem, 0, 3, into=5)
    ib_umem_release(umem)


def test_T71_a_direct_mapping_has_a_segment_an_entry():
    mem, mm, dev = machine()
    umem = ib_umem_get(dev, mm, scattered(mm, 40), 40 * PAGE, RW)
    assert umem.sgt.nents == umem.sgt.orig_nents > 1
    assert [int(row["dma_address"]) for row in umem.sgt.entries] == [pfn * PAGE for pfn, _, _ in rows(umem.sgt)]
    ib_umem_release(umem)


# ---- SGAppendTable as an output of the pinning calls ---------------------------------------------------------------------
@pytest.mark.parametrize("thp", ["never", "always"])
def test_output_is_the_table_that_a_list_would_give(thp):
    mem, mm, _ = machine(thp=thp)
    addr = scattered(mm, 900)
    pages = pin_user_pages(mm, addr, 900, FOLL_WRITE)
    table = pin_user_pages(mm, addr, 900, FOLL_WRITE, output=SGAppendTable)
    table.check()
    assert rows(table) == rows(sg_alloc_table_from_pages(pages, 0, 900 * PAGE)) and pins(mem) == 1800
    unpin_user_pages(pages)
    unpin_user_pages(pages)
    mem.check()


def test_output_appends_to_a_table():
    mem, mm, _ = machine()
    addr = scattered(mm, 400)
    table = SGAppendTable(mem, max_segment=2 * PAGE)
    for at in range(0, 400, 100):
        assert pin_user_pages_fast(mm, addr + at * PAGE, 100, output=table) is table
    assert [pfn + i for pfn, _, n in rows(table) for i in range(n // PAGE)] == pages_of(mm, addr, 400 * PAGE)
    table.check()
    unpin_user_pages(PageList(mem, pages_of(mm, addr, 400 * PAGE)))
    assert pins(mem) == 0


def test_output_all_or_nothing():
    mem, mm, _ = machine()
    addr = scattered(mm, 600)
    table = SGAppendTable(mem)
    pin_user_pages(mm, addr, 100, output=table)
    before, kept = rows(table), state(mem)
    for nth in range(1, 50):
        with mem.inject("sg", nth):
            try:
                pin_user_pages(mm, addr + 100 * PAGE, 500, output=table)
                break
            except MMError as error:
                assert error.errno == errno.ENOMEM
        assert rows(table) == before and state(mem) == kept
        table.check()
    assert nth > 1 and pins(mem) == 600


@pytest.mark.parametrize("to", ["umem", "new table", "table with entries"])
def test_a_leaf_that_is_cut_by_a_failure(to):
    #   a leaf of 512 pages, an entry a page: chunks of 128 slots fail in its middle
    hit = 0
    for nth in range(1, 20):
        mem, mm, dev = machine(thp="always", max_seg_size=PAGE)
        addr = mapped(mm, 2 * HUGE)
        table = SGAppendTable(mem, max_segment=PAGE)
        if to == "table with entries":
            pin_user_pages(mm, addr, 130, output=table)
        before, kept = rows(table), pins(mem)
        with mem.inject("sg", nth):
            try:
                if to == "umem":
                    ib_umem_release(ib_umem_get(dev, mm, addr, 2 * HUGE, RW))
                else:
                    pin_user_pages_fast(mm, addr, 1024, output=table)
                break
            except MMError as error:
                assert error.errno == errno.ENOMEM
                hit += 1
        assert rows(table) == before and pins(mem) == kept and mm.pinned_vm == 0
        table.check()
        mem.check()
    assert hit >= 5


def test_output_tables_that_cannot_take_it():
    mem, mm, _ = machine()
    addr = mapped(mm, 8 * PAGE)
    complete = pin_user_pages(mm, addr, 4, output=SGAppendTable)
    with nothing_kept(mem, mm, ignore=("flags",)), pytest.raises(MMError, match="output") as caught:
        pin_user_pages(mm, addr, 4, output=complete)
    assert caught.value.errno == errno.EINVAL
    with nothing_kept(mem, mm), pytest.raises(InvalidArgument):
        pin_user_pages(mm, addr, 4, output=SGAppendTable(Memory("16M")))
    table = SGAppendTable(mem)
    with pytest.raises(MMError):
        pin_user_pages(mm, 0x10000, 4, output=table)
    # A walk that got nothing leaves the table free for the next one.
    pin_user_pages(mm, addr, 4, output=table)
    assert len(table) >= 1


def test_what_a_umem_says():
    mem, mm, dev = machine(iommu=True)
    addr = mapped(mm, 3 * PAGE)
    umem = ib_umem_get(dev, mm, addr, 3 * PAGE, RW)
    assert repr(umem) == f"<IBUmem {addr:#x}+{3 * PAGE:#x} writable 3 pages in {umem.sgt.orig_nents} entries, 1 DMA segments>"
    assert (umem.device, umem.mm, umem.acquire, umem.npages) == (dev, mm, "sink", 3)
    with pytest.raises(TypeError, match="cannot be pickled"):
        pickle.dumps(umem)
    ib_umem_release(umem)
    assert repr(umem) == f"<IBUmem {addr:#x}+{3 * PAGE:#x} released>"
    for ask in (ib_umem_start_dma_addr, ib_umem_is_contiguous, lambda umem: ib_umem_dma_offset(umem, PAGE)):
        with pytest.raises(InvalidArgument, match="is released"):
            ask(umem)
    with pytest.raises(TypeError, match="an IBUmem is wanted"):
        ib_umem_release(addr)
    assert pins(mem) == 0 and mm.pinned_vm == 0


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize("change", [lambda sgt: setattr(sgt[0], "length", PAGE), lambda sgt: setattr(sgt[0], "page", None),
                                    lambda sgt: setattr(sgt[0], "length", 5 * PAGE), mmc.sg_free_append_table])
def test_a_table_that_was_changed_is_not_released_by(change, release):
    mem, mm, dev = machine()
    addr = mapped(mm, 4 * PAGE)
    with mmc.PinLedger(mem) as ledger:
        umem = ib_umem_get(dev, mm, addr, 4 * PAGE, RW)
        mmc.dma_unmap_sgtable(dev, umem.sgt)
        before = rows(umem.sgt)
        change(umem.sgt)
        with nothing_kept(mem, mm), pytest.raises(InvalidArgument):
            ib_umem_release(umem, release=release)
        assert not umem.released and sum(ledger.by_holder().values()) == 4
        if len(umem.sgt) == len(before):
            for entry, (pfn, offset, length) in zip(umem.sgt, before):
                mmc.sg_set_page(entry, mem.page(pfn), length, offset)
            ib_umem_release(umem, release=release)
            assert pins(mem) == 0 and mm.pinned_vm == 0 and not ledger.by_holder()
