"""A replayed capture holds the same folios at the same frames, and takes pins as the kernel would."""

import ctypes
import mmap

import numpy as np
import pytest
from live_support import PAGE, engine_or_skip, linux, or_skip, part_of

from mmcore import live
from mmcore.live import pagemap as pm

pytestmark = linux


def same_layout(snapshot, engine, cached=0):
    """Assert that every page lies in a folio with the real head and the real order."""
    mem = engine.mem
    assert np.array_equal(engine.pages.pfns, snapshot.pfns)
    heads, first = np.unique(snapshot.heads, return_index=True)
    for head, order in zip(heads.tolist(), snapshot.orders[first].tolist()):
        folio = mem.folio(head)
        assert (folio.pfn, folio.order) == (head, order)
        # Each mapping holds a reference, and so does the page cache on each page of a file.
        # What nothing maps is held by whoever claimed it.
        assert folio.refcount == max(folio.mapcount + (cached << order), 1)
    for pfn, head in list(zip(snapshot.pfns.tolist(), snapshot.heads.tolist()))[::97]:
        assert mem.page(pfn).folio.pfn == head
    mem.check()


@pytest.mark.parametrize("backing", ["4k", "thp", "shmem"])
def test_round_trip(backing):
    mmcore = engine_or_skip()
    with live.buffer("8M", backing) as buf:
        snapshot = or_skip(live.capture, buf)
    with snapshot.replay() as engine:
        assert engine.mm is not None and engine.unmapped == 0 and engine.mem.page_size == snapshot.page_size
        cached = backing == "shmem"
        same_layout(snapshot, engine, cached)
        before = {head: engine.mem.folio(head).refcount for head in np.unique(snapshot.heads).tolist()}
        mmcore.grab_pages(engine.pages)
        for head in np.unique(snapshot.heads).tolist():
            n = int(np.count_nonzero(snapshot.heads == head))
            folio = engine.mem.folio(head)
            assert folio.refcount == before[head] + (n if folio.order else 1024 * n)
        mmcore.unpin_user_pages(engine.pages)
        same_layout(snapshot, engine, cached)
        stats = engine.mem.vmstat()
        assert stats["nr_foll_pin_acquired"] == stats["nr_foll_pin_released"] == len(snapshot.pfns)


def test_folio_that_the_buffer_maps_in_part_is_there_whole():
    engine_or_skip()
    with live.buffer("4M", "thp") as buf:
        snapshot = or_skip(live.capture, part_of(buf, 500, 30))
    with snapshot.replay() as engine:
        same_layout(snapshot, engine)


def test_replay_of_a_saved_capture(tmp_path):
    engine_or_skip()
    with live.buffer("4M", "thp") as buf:
        or_skip(live.capture, buf).save(tmp_path / "capture")
    snapshot = live.Capture.load(tmp_path / "capture")
    with snapshot.replay() as engine:
        same_layout(snapshot, engine)


def test_holes_and_zero_pages():
    mmcore = engine_or_skip()
    area = mmap.mmap(-1, 8 * PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    addr = ctypes.addressof(ctypes.c_char.from_buffer(area))
    area[0] = 1
    _ = area[3 * PAGE]
    snapshot = or_skip(live.capture, "self", addr, 8 * PAGE)
    with snapshot.replay() as engine:
        pfns = engine.pages.pfns.tolist()
        assert pfns[0] == snapshot.pfns[0] and pfns[3] == engine.mem.zero_page.pfn
        assert pfns[1:3] == [0, 0] and pfns[4:] == [0] * 4
        mmcore.grab_pages(engine.pages)
        mmcore.unpin_user_pages(engine.pages)
        # The zero page is never counted.
        assert engine.mem.vmstat()["nr_foll_pin_acquired"] == 1
    area.close()


def test_huge_zero_page():
    engine_or_skip()
    huge = 2 << 20
    area = mmap.mmap(-1, 2 * huge, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    area.madvise(mmap.MADV_HUGEPAGE)
    addr = ctypes.addressof(ctypes.c_char.from_buffer(area))
    start = -(-addr // huge) * huge
    _ = area[start - addr]
    snapshot = or_skip(live.capture, "self", start, huge)
    if not np.all(pm.has_flag(snapshot.flags, pm.KPF_ZERO_PAGE) & (snapshot.orders == 9)):
        pytest.skip("this machine did not map the huge zero page")
    with snapshot.replay() as engine:
        first = engine.mem.huge_zero_folio.pfn
        assert engine.pages.pfns.tolist() == list(range(first, first + 512))
    area.close()


def test_gigantic_and_hugetlb_folios_from_a_made_up_capture():
    engine_or_skip()
    n = 512
    pfns = np.arange(4096, 4096 + n, dtype=np.uint64)
    flags = np.full(n, 1 << pm.KPF_HUGE | 1 << pm.KPF_COMPOUND_TAIL, np.uint64)
    flags[0] = 1 << pm.KPF_HUGE | 1 << pm.KPF_COMPOUND_HEAD
    snapshot = made_up(pfns, np.full(n, 4096, np.uint64), np.full(n, 9, np.uint8), flags)
    with snapshot.replay() as engine:
        same_layout(snapshot, engine)


def test_frames_without_a_struct_page_become_holes():
    engine_or_skip()
    pfns = np.array([5000, 1 << 40, 5001], np.uint64)
    flags = np.array([0, 1 << pm.KPF_NOPAGE, 0], np.uint64)
    heads = np.array([5000, 0, 5001], np.uint64)
    snapshot = made_up(pfns, heads, np.zeros(3, np.uint8), flags)
    with snapshot.replay() as engine:
        assert engine.pages.pfns.tolist() == [5000, 0, 5001]


def made_up(pfns, heads, orders, flags):
    """Return a Capture of arrays that no machine has to have."""
    info = {
        "pid": 1,
        "command": "none",
        "kernel": "none",
        "page_size": 4096,
        "moved": 0,
        "vmas": [],
        "not_huge": [],
        "limits": {"pid": 1, "soft": None, "hard": None, "locked": 0, "pinned": 0, "cap_ipc_lock": False},
    }
    return live.Capture(
        info,
        {
            "starts": np.array([1 << 30], np.uint64),
            "counts": np.array([len(pfns)], np.uint64),
            "words": pfns | pm.PM_PRESENT,
            "flags": flags,
            "mapcounts": np.ones(len(pfns), np.uint64),
            "heads": heads,
            "orders": orders,
        },
    )


@pytest.mark.parametrize("backing", ["4k", "thp", "shmem"])
def test_the_address_space_says_what_proc_said(backing):
    """pagemap of the replayed mm: present, PFN, exclusive and file bits are those of the real one, and the content is
    free to be written: what was exclusive is reused."""
    engine_or_skip()
    with live.buffer("4M", backing) as buf:
        snapshot = or_skip(live.capture, buf)
    with snapshot.replay() as engine:
        mm = engine.mm
        assert engine.unmapped == 0
        words = mm.pagemap(snapshot.addr, len(snapshot.pfns))
        told = np.uint64((1 << 63) | (1 << 61) | (1 << 56) | ((1 << 55) - 1))
        assert np.array_equal(words & told, snapshot.words & told)
        page = mm.page_at(snapshot.addr)
        assert page.pfn == snapshot.pfns[0]
        assert (page.folio.mapcount == snapshot.mapcounts[0]) if backing == "4k" else page.folio.mapcount > 0
        mm.write(snapshot.addr, b"x")
        assert mm.page_at(snapshot.addr) == page
        child = mm.fork()
        child.write(snapshot.addr, b"y")
        assert (mm.read(snapshot.addr, 1) == b"x") is (backing != "shmem")
        engine.mem.check()
        child.exit()


def made_up_mapping(vma, pfns, *, orders=0, heads=None, kind=0, mapcounts=1, exclusive=True, file=False):
    """Return a Capture of one mapping, page by page from its start."""
    pfns = np.array(pfns, np.uint64)
    n = len(pfns)
    base = made_up(
        pfns,
        pfns if heads is None else np.array(heads, np.uint64),
        np.broadcast_to(np.uint8(orders), n).copy(),
        np.full(n, kind, np.uint64),
    )
    bits = np.where(exclusive, pm.PM_MMAP_EXCLUSIVE, np.uint64(0)) | np.where(file, pm.PM_FILE, np.uint64(0))
    info = {
        "pid": 1,
        "command": "none",
        "kernel": "none",
        "page_size": 4096,
        "moved": 0,
        "not_huge": [],
        "vmas": [vars(vma)],
        "limits": vars(base.limits),
    }
    return live.Capture(
        info,
        {
            "starts": np.array([vma.start], np.uint64),
            "counts": np.array([n], np.uint64),
            "words": pfns | pm.PM_PRESENT | bits,
            "flags": np.array(base.flags),
            "mapcounts": np.broadcast_to(np.uint64(mapcounts), n).copy(),
            "heads": np.array(base.heads),
            "orders": np.array(base.orders),
        },
    )


ANON_KIND = 1 << pm.KPF_ANON | 1 << pm.KPF_SWAPBACKED
HUGE_AT = 1 << 30


def test_what_others_map_is_mapped_by_others():
    vma = live.Vma(HUGE_AT, HUGE_AT + 4 * PAGE, "rw-p")
    snapshot = made_up_mapping(
        vma, [5000, 5001, 5002, 5003], kind=ANON_KIND, mapcounts=[1, 2, 3, 1], exclusive=[1, 0, 0, 1]
    )
    with snapshot.replay() as engine:
        assert [engine.mem.page(pfn).mapcount for pfn in range(5000, 5004)] == [1, 2, 3, 1] and len(engine.others) == 2
        words = engine.mm.pagemap(HUGE_AT, 4)
        assert ((words & pm.PM_MMAP_EXCLUSIVE) != 0).tolist() == [True, False, False, True]
        engine.mem.check()


def test_no_more_others_than_can_be_stood_in_for():
    vma = live.Vma(HUGE_AT, HUGE_AT + PAGE, "r--p", dev="08:01", inode=7, path="/lib")
    with made_up_mapping(vma, [5000], mapcounts=1000, exclusive=False, file=True).replay() as engine:
        assert len(engine.others) == 64 and engine.mem.page(5000).mapcount == 65
        engine.mem.check()


def test_a_huge_page_that_another_shares_in_part():
    """The other maps single pages of it; this process the whole."""
    vma = live.Vma(HUGE_AT, HUGE_AT + (2 << 20), "rw-p", huge=2 << 20)
    snapshot = made_up_mapping(
        vma,
        range(4096, 4608),
        orders=9,
        heads=[4096] * 512,
        kind=ANON_KIND | 1 << pm.KPF_COMPOUND_HEAD,
        mapcounts=[1] * 256 + [2] * 256,
        exclusive=False,
    )
    with snapshot.replay() as engine:
        (other,) = engine.others
        assert engine.mem.folio(4096).mapcount == 1 + 256 and other.rss == 256
        assert other.page_at(HUGE_AT) is None and other.page_at(HUGE_AT + 256 * PAGE).pfn == 4352
        engine.mem.check()


def test_a_private_mapping_of_a_file_keeps_its_own_pages():
    mmcore = engine_or_skip()
    vma = live.Vma(HUGE_AT, HUGE_AT + 2 * PAGE, "rw-p", dev="08:01", inode=7, path="/data")
    snapshot = made_up_mapping(vma, [5000, 5001], kind=0, file=[True, False])
    with snapshot.replay() as engine:
        assert engine.unmapped == 0
        assert ((engine.mm.pagemap(HUGE_AT, 2) & pm.PM_FILE) != 0).tolist() == [True, False]
        engine.mm.write(HUGE_AT, b"x")
        engine.mm.write(HUGE_AT + PAGE, b"x")
        assert engine.mm.page_at(HUGE_AT).pfn != 5000 and engine.mm.page_at(HUGE_AT + PAGE).pfn == 5001
        assert mmcore.PageFlags.anon_exclusive in engine.mm.page_at(HUGE_AT + PAGE).flags
        engine.mem.check()


def test_shared_hugetlb_pages_are_in_the_cache_of_a_file():
    vma = live.Vma(
        HUGE_AT,
        HUGE_AT + (2 << 20),
        "rw-s",
        inode=7,
        path="/anon_hugepage (deleted)",
        kernel_page_size=2 << 20,
        flags=("ht",),
    )
    snapshot = made_up_mapping(
        vma,
        range(4096, 4608),
        orders=9,
        heads=[4096] * 512,
        kind=1 << pm.KPF_HUGE | 1 << pm.KPF_COMPOUND_HEAD,
        file=True,
    )
    with snapshot.replay() as engine:
        assert engine.unmapped == 0 and engine.mem.folio(4096).mapcount == 1
        engine.mm.write(HUGE_AT + 5, b"x")
        assert engine.mm.page_at(HUGE_AT).pfn == 4096 and int(engine.mm.pagemap(HUGE_AT, 1)[0] & pm.PM_FILE)
        engine.mem.check()


def test_a_leaf_is_only_where_a_whole_one_fits():
    """Two huge pages, one cut by the start of its mapping: the one that smaps counts is the other."""
    vma = live.Vma(HUGE_AT - 8 * PAGE, HUGE_AT + (2 << 20), "rw-p", huge=2 << 20)
    pfns = list(range(4096 + 504, 4096 + 512)) + list(range(4608, 5120))
    snapshot = made_up_mapping(
        vma, pfns, orders=9, heads=[4096] * 8 + [4608] * 512, kind=ANON_KIND | 1 << pm.KPF_COMPOUND_HEAD
    )
    with snapshot.replay() as engine:
        assert (engine.mem.folio(4096).mapcount, engine.mem.folio(4608).mapcount) == (8, 1)
        engine.mem.check()
