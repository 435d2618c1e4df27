"""Outputs: lists, runs, and classes of one's own."""
import errno
import threading

import pytest

from gup_support import *
from support import refused


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


@pytest.mark.parametrize("kind", [PageList, PageRanges])
@pytest.mark.parametrize("call", ALL)
def test_an_empty_object_is_filled_and_returned(mem, mm, call, kind):
    addr, nr = layout(mm)
    pages, given = call(mm, addr, nr, FOLL_WRITE), kind(mem)
    before = (given.pfns, memoryview(given if kind is PageList else given.starts))
    assert call(mm, addr, nr, FOLL_WRITE, output=given) is given
    as_list = given if kind is PageList else given.to_pagelist()
    assert as_list == pages and len(before[0]) == len(before[1]) == 0
    assert (given[:3] if kind is PageList else given.to_pagelist()[:3]) == pages[:3]
    with refused(mem, InvalidArgument, match=f"of {nr} pages: an empty one is filled, once"):
        call(mm, addr, nr, FOLL_WRITE, output=given)
    del before
    give_back(call, given)
    give_back(call, pages)


@pytest.mark.parametrize("kind", [PageList, PageRanges])
def test_an_object_that_cannot_be_filled(mem, mm, kind):
    addr = mm.mmap(2 * PAGE)
    with Memory("16M") as other:
        for given, match in ((kind(other), "of another Memory"), (kind.__new__(kind), "never set up")):
            with refused(mem, InvalidArgument, match=match):
                pin_user_pages_fast(mm, addr, 2, output=given)
    # A call that fails leaves it to be filled, and so does one that takes nothing.
    given = kind(mem)
    with refused(mem, MMError):
        pin_user_pages_fast(mm, 0x1000, 2, output=given)
    assert pin_user_pages_fast(mm, addr, 0, output=given) is given and len(given) == 0
    assert pin_user_pages_fast(mm, addr, 2, output=given) is given and len(given) > 0
    unpin_user_pages(given)


@pytest.mark.parametrize("kind", [PageList, PageRanges])
def test_an_object_that_two_threads_fill(mem, mm, kind):
    """One of them fills it; the others' pins are given back, and they are told."""
    addr, outcomes, gate = mm.mmap(HUGE), [], threading.Barrier(2)
    mm.touch(addr, HUGE)

    def fill():
        gate.wait()
        try:
            outcomes.append(pin_user_pages_fast(mm, addr, 512, output=given) is given)
        except InvalidArgument:
            outcomes.append(False)

    for _ in range(50):
        given = kind(mem)
        threads = [threading.Thread(target=fill) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(outcomes) == [False, True]
        outcomes.clear()
        unpin_user_pages(given)
        assert mem.vmstat()["nr_foll_pin_acquired"] == mem.vmstat()["nr_foll_pin_released"]


@pytest.mark.parametrize("kind", [PageList, PageRanges])
def test_a_ledger_sees_what_an_object_received(mem, mm, kind):
    class Named(kind):
        pass

    addr = mm.mmap(4 * PAGE)
    with PinLedger(mem) as ledger:
        for given in (kind(mem), Named(mem)):
            pin_user_pages_fast(mm, addr, 4, FOLL_WRITE, output=given)
            assert sum(pin.count for pin in ledger.outstanding()) == 4
            unpin_user_pages(given)
        ledger.assert_balanced()


def scattered(mm):
    """Eight pages of which no two neighbours follow each other in memory."""
    addr = mm.mmap(8 * PAGE)
    for i in (0, 2, 4, 6, 1, 3, 5, 7):
        mm.touch(addr + i * PAGE, PAGE)
    return addr


class Asks(Note):
    """Calls back into the engine from its method."""

    def __init__(self, ask, fail_at=None):
        super().__init__(fail_at)
        self.ask, self.refusals = ask, []

    def note(self, name, page, npages):
        try:
            self.ask(self)
        except MMError as refusal:
            self.refusals.append(refusal.errno)
        super().note(name, page, npages)


def test_an_output_is_for_one_call_at_a_time(mem, mm):
    addr = scattered(mm)
    output = Asks(lambda self: pin_user_pages(mm, addr + 4 * PAGE, 4, FOLL_WRITE, output=self))
    pin_user_pages(mm, addr, 4, FOLL_WRITE, output=output)
    assert output.refusals == [errno.EBUSY] * 4
    assert output.pfns() == [mm.page_at(addr + i * PAGE).pfn for i in range(4)]
    with pytest.raises(MMError):
        pin_user_pages(mm, addr - PAGE, 1, output=output)
    # It is free again when the call is over, whatever came of it.
    assert get_user_pages(mm, addr, 1, output=output) is output
    unpin_user_pages(PageList(mem, output.pfns()[:4]))
    put_page(mm.page_at(addr))


@pytest.mark.parametrize("fail_at", [None, 0, 2])
def test_the_memory_stays_open_until_the_output_is_done(mem, mm, fail_at):
    addr = scattered(mm)
    output = Asks(lambda self: mem.close(), fail_at)
    try:
        pin_user_pages(mm, addr, 4, FOLL_WRITE, output=output)
    except RuntimeError:
        assert fail_at is not None
    assert set(output.refusals) == {errno.EBUSY} and not mem.closed
    unpin_user_pages(PageList(mem, output.pfns()))
    assert mem.vmstat()["nr_foll_pin_acquired"] == mem.vmstat()["nr_foll_pin_released"]


@pytest.mark.parametrize("fail_at", [0, 1, 3])
def test_a_ledger_sees_what_an_output_kept_when_its_method_raised(mem, mm, fail_at):
    addr = scattered(mm)
    with PinLedger(mem) as ledger:
        output = Note(fail_at)
        with pytest.raises(RuntimeError):
            pin_user_pages(mm, addr, 4, FOLL_WRITE, output=output)
        assert sum(pin.count for pin in ledger.outstanding()) == output.nr_pages == fail_at
        for pfn in output.pfns():
            unpin_user_page(mem.page(pfn))
        ledger.assert_balanced()


def test_a_ledger_sees_what_an_output_releases_at_once(mem, mm):
    class Streams(GupOutput):
        def gup_output_pages(self, page, npages):
            unpin_user_page_range_dirty_lock(page, npages, True)

    addr, nr = layout(mm)
    with PinLedger(mem) as ledger:
        pin_user_pages_fast(mm, addr, nr, FOLL_WRITE, output=Streams())
        assert ledger.outstanding() == []
        ledger.assert_balanced()
