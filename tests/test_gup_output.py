"""Outputs: lists, runs, and classes of one's own."""

import pytest

from gup_support import *


class Note(GupOutput):
    """Writes down what it is called with."""

    def __init__(self, fail_at=None):
        self.calls, self.fail_at = [], fail_at

    def note(self, name, page, npages):
        if len(self.calls) == self.fail_at:
            raise RuntimeError("full")
        self.calls.append((name, page.pfn, npages))

    def gup_output_single_page(self, page):
        self.note("single", page, 1)

    def gup_output_pages(self, page, npages):
        self.note("pages", page, npages)

    def pfns(self):
        return [pfn + i for _, pfn, n in self.calls for i in range(n)]


class OnlyPages(GupOutput):
    def __init__(self):
        self.counts = []

    def gup_output_pages(self, page, npages):
        self.counts.append(npages)


def layout(mm):
    """A THP, four pages in a row, and two that are not."""
    addr = mm.mmap(HUGE + 8 * PAGE)
    mm.madvise(addr, HUGE, MADV_HUGEPAGE)
    mm.touch(addr, HUGE + 4 * PAGE)
    mm.touch(addr + HUGE + 5 * PAGE, PAGE)
    mm.touch(addr + HUGE + 4 * PAGE, PAGE)
    return addr, 512 + 6


@pytest.mark.parametrize("acquire", GENERATIONS)
@pytest.mark.parametrize("call", ALL)
def test_every_output_is_told_the_same_pages(mem, mm, call, acquire):
    addr, nr = layout(mm)
    pages = call(mm, addr, nr, FOLL_WRITE, acquire=acquire)
    ranges = call(mm, addr, nr, FOLL_WRITE, acquire=acquire, output=PageRanges)
    note = Note()
    assert call(mm, addr, nr, FOLL_WRITE, acquire=acquire, output=note) is note
    assert note.nr_pages == ranges.nr_pages == nr == len(pages)
    assert note.pfns() == ranges.to_pagelist().pfns.tolist() == pages.pfns.tolist()
    assert {name for name, _, n in note.calls if n == 1} <= {"single"}
    # Runs are the longest there are.
    assert all(a + n != b for (a, n), (b, _) in zip(list(ranges), list(ranges)[1:]))
    give_back(call, pages)
    give_back(call, ranges)
    give_back(call, PageList(mem, note.pfns()))


def test_class_or_object_and_single_page_by_default(mem, mm):
    addr = mm.mmap(4 * PAGE)
    mm.touch(addr, PAGE)
    made = pin_user_pages_fast(mm, addr, 1, output=OnlyPages)
    assert type(made) is OnlyPages and made.counts == [1] and made.nr_pages == 1
    unpin_user_page(mm.page_at(addr))
    again = pin_user_pages_fast(mm, addr, 1, output=made)
    assert again is made and made.counts == [1, 1]
    unpin_user_page(mm.page_at(addr))


@pytest.mark.parametrize("call", PINS)
@pytest.mark.parametrize("fail_at", (0, 1, 2))
def test_output_that_raises_ends_the_call(mem, mm, call, fail_at):
    addr = mm.mmap(6 * PAGE)
    for i in (0, 2, 4, 1, 3, 5):
        mm.touch(addr + i * PAGE, PAGE)                 # no two neighbours follow each other in memory
    note = Note(fail_at)
    with pytest.raises(RuntimeError, match="full"):
        call(mm, addr, 6, FOLL_WRITE, output=note)
    assert note.nr_pages == fail_at == len(note.calls) == pins_of(mem)
    if fail_at:
        unpin_user_pages(PageList(mem, note.pfns()))


def test_output_without_methods(mem, mm):
    class Nothing(GupOutput):
        pass
    addr = mm.mmap(PAGE)
    mm.touch(addr, PAGE)
    with pytest.raises(NotImplementedError):
        pin_user_pages(mm, addr, 1, output=Nothing)


@pytest.mark.parametrize("call", PINS)
def test_empty_and_partial(mem, mm, call):
    addr = mm.mmap(3 * PAGE)
    note = call(mm, addr, 0, output=Note())
    assert note.nr_pages == 0 and note.calls == []
    ranges = call(mm, addr, 10, FOLL_WRITE, output=PageRanges)
    assert ranges.nr_pages == 3
    unpin_user_pages(ranges)
    with pytest.raises(MMError):
        call(mm, 0x1000, 10, output=PageRanges)


def test_runs_do_not_cross_into_a_device(mem, mm):
    """Two devices that follow each other in PFN space, mapped one behind the other: two runs."""
    addr = mm.mmap(2 * HUGE, flags=MAP_SHARED | MAP_ANONYMOUS)
    first, second = mem.devices[0], mem.devices[1]
    assert first.start_pfn + first.nr_pages == second.start_pfn
    mm.mmap(HUGE, flags=MAP_SHARED | MAP_FIXED, file=File(mem, 2 * HUGE, "devdax", device=0), offset=HUGE, addr=addr)
    mm.mmap(HUGE, flags=MAP_SHARED | MAP_FIXED, file=File(mem, HUGE, "devdax", device=1), addr=addr + HUGE)
    mm.touch(addr, 2 * HUGE)
    for call in PINS:
        ranges = call(mm, addr, 1024, FOLL_WRITE, output=PageRanges)
        assert list(ranges) == [(second.start_pfn - 512, 512), (second.start_pfn, 512)]
        unpin_user_pages(ranges)
