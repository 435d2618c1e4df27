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
        "pid": 1, "command": "none", "kernel": "none", "page_size": 4096, "moved": 0, "vmas": [],
        "not_huge": [], "limits": {"pid": 1, "soft": None, "hard": None, "locked": 0, "pinned": 0,
                                   "cap_ipc_lock": False},
    }
    return live.Capture(info, {
        "starts": np.array([1 << 30], np.uint64), "counts": np.array([len(pfns)], np.uint64),
        "words": pfns | pm.PM_PRESENT, "flags": flags, "mapcounts": np.ones(len(pfns), np.uint64),
        "heads": heads, "orders": orders,
    })


@pytest.mark.parametrize("backing", ["4k", "thp", "shmem"])
def test_the_address_space_says_what_proc_said(backing):
    """pagemap of the replayed mm: present, PFN, exclusive and file bits are those of the real one, and the content is free
    to be written: what was exclusive is reused."""
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
