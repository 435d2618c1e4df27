"""The kernel as oracle, on memory as it lies: a capture replayed in the engine has the folios, the words of pagemap and
the map counts that the kernel shows, and so does every mapping of another process."""

import ctypes
import os

import numpy as np
import pytest
from live_support import PAGE, linux, or_skip
from oracle_support import HUGE, LAYOUTS, child_that_waits, layout, write

from mmcore import live
from mmcore.live import pagemap as pm

pytestmark = linux
TOLD = np.uint64(1 << 63 | 1 << 61 | 1 << 56)  # present, file, exclusive


def agrees(snapshot):
    """Replay, and compare all that /proc says of each page."""
    with snapshot.replay() as engine:
        mem, mm = engine.mem, engine.mm
        assert engine.unmapped == 0
        zero = pm.has_flag(snapshot.flags, pm.KPF_ZERO_PAGE) & (snapshot.pfns != 0)
        for start, count in zip(snapshot.starts.tolist(), snapshot.counts.tolist()):
            part = (snapshot.addresses >= start) & (snapshot.addresses < start + count * PAGE)
            words, told = mm.pagemap(start, count), snapshot.words[part]
            assert np.array_equal(words & TOLD, told & TOLD), differences(words & TOLD, told & TOLD)
            assert np.array_equal((words & pm.PM_PFN_MASK)[~zero[part]], (told & pm.PM_PFN_MASK)[~zero[part]])
        for pfn, order, count, head in sorted(
            set(
                zip(
                    *(
                        array[(snapshot.pfns != 0) & ~zero].tolist()
                        for array in (snapshot.pfns, snapshot.orders, snapshot.mapcounts, snapshot.heads)
                    )
                )
            )
        ):
            page = mem.page(pfn)
            assert (page.folio.pfn, page.folio.order, mapcount(mem, page)) == (head, order, count), page
        for pfn, order in zip(np.asarray(engine.pages.pfns)[zero].tolist(), snapshot.orders[zero].tolist()):
            assert mem.page(pfn).folio.order == order
        mem.check()


def mapcount(mem, page):
    """What kpagecount shows: mappings of the page and of its folio as a whole."""
    folio = page.folio
    if not folio.order:
        return page.mapcount
    return page.mapcount + 1 + int(mem.pages[folio.pfn + 1 : folio.pfn + 2].view(np.int32)[(88 - 64) // 4])


def differences(ours, theirs):
    at = np.flatnonzero(ours != theirs)
    return [(int(i), hex(int(ours[i])), hex(int(theirs[i]))) for i in at[:5]]


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_replay_is_what_the_kernel_shows(name, request, tmp_path):
    with layout(name, request, tmp_path) as (addr, length):
        agrees(or_skip(live.capture, "self", addr, length))


@pytest.mark.parametrize(
    "name",
    [
        "4 KiB",
        "mTHP 64K",
        "THP",
        "hugetlb",
        "shmem",
        "file private, written",
        "zero page after a read",
        "THP after munmap",
    ],
)
def test_after_fork_both_processes_are_what_the_kernel_shows(name, request, tmp_path):
    with layout(name, request, tmp_path) as (addr, length), child_that_waits() as child:
        # The parent writes again to a part: these pages are its own once more.
        write(addr, length // 4, 7, HUGE if name == "hugetlb" else PAGE)
        for pid in (os.getpid(), child):
            snapshot = or_skip(live.capture, pid, addr, length)
            # A child has no entries yet for what it can fault in again.
            assert name in ("shmem", "zero page after a read") or snapshot.mapcounts[snapshot.pfns != 0].max() > 1
            agrees(snapshot)


def test_a_whole_process_is_what_the_kernel_shows():
    """A child of its own: text, libraries that many map, heap, stack. Others are stood in for by up to 64 address
    spaces."""
    with child_that_waits() as child:
        snapshot = or_skip(live.capture, child)
        with snapshot.replay() as engine:
            mapped = np.asarray(engine.pages.pfns) != 0
            part = np.count_nonzero(mapped)
            # What the engine has no mapping for: device frames, and the kernel's own pages (vdso).
            assert engine.unmapped < part // 20, (engine.unmapped, part)
            assert len(engine.others) <= 64
            heads, first = np.unique(snapshot.heads[mapped], return_index=True)
            orders = snapshot.orders[mapped][first]
            zero = pm.has_flag(snapshot.flags[mapped][first], pm.KPF_ZERO_PAGE)
            assert all(
                engine.mem.folio(head).order == order
                for head, order in zip(heads[~zero].tolist(), orders[~zero].tolist())
            )
            engine.mem.check()


def test_what_others_map_stays_with_them():
    """A write in the replay breaks copy-on-write as in the process: the other's page stays."""
    from oracle_support import Area, base_pages

    area = Area(HUGE)
    addr, length = base_pages(area)
    with child_that_waits():
        snapshot = or_skip(live.capture, "self", addr, length)
        with snapshot.replay() as engine:
            (other,) = engine.others
            before = engine.mm.page_at(addr)
            engine.mm.write(addr, b"x")
            ctypes.memset(addr, ord("x"), 1)
            now = live.capture("self", addr, PAGE)
            assert (engine.mm.page_at(addr) != before) and now.pfns[0] != snapshot.pfns[0]
            assert other.page_at(addr) == before and before.mapcount == 1
            assert int(engine.mm.pagemap(addr, 1)[0] & TOLD) == int(now.words[0] & TOLD)
            engine.mem.check()
    area.close()
