"""Every public call with wrong arguments: a clear error, nothing changed, every law kept. Then 100,000 at random."""
import contextlib
import pickle
import sys

import pytest

import mmcore as mmc
from calls import (CALLS, CONSTANTS, Count, EXTRACTION, FOLIO, FOLIOS, IN_SPACES, LIVE_FOLIO, LIVE_PAGE, MEMORY, NOT_CALLED,
                   PAGE, PAGES, REGISTRATION, SCATTERLIST, VFIO,
                   arguments, consume, positions)
from mmcore import BadPage, DevicePages, InvalidArgument, Memory, MMError, PageList
from support import refused, unchanged

CLEAR = (MMError, BadPage, TypeError)
LOOKS = {name for name, args in CALLS.items() if not {LIVE_FOLIO, LIVE_PAGE, PAGES, FOLIOS, MEMORY} & {
    a for a in args if isinstance(a, str)}}


@pytest.fixture
def mem():
    return Memory("16M", hugetlb={"2M": 1})


@pytest.fixture
def folio(mem):
    folio = mmc.folio_alloc_at(mem, 8, 3)
    mmc.folio_get(folio)
    mmc.try_grab_folio(folio, 2)
    return folio


def call(name, args):
    return consume(getattr(mmc, name)(*args))


def wrong(name, index, value, mem, folio):
    args = arguments(name, mem, folio)
    args[index] = value
    return args


def test_every_public_name_is_in_the_table():
    public = {name for name in mmc.__all__ if not name.startswith(CONSTANTS)}
    assert public - NOT_CALLED - IN_SPACES - SCATTERLIST - EXTRACTION - REGISTRATION - VFIO - {"live", "bench"} == CALLS.keys()
    assert all(name in dir(mmc) for name in mmc.__all__)
    assert len(mmc.__all__) == len(set(mmc.__all__))


# The arguments are valid but for the one under test: so each test below fails for one reason only.
NEEDS = {"folio_unlock": mmc.folio_lock, "folio_end_writeback": mmc.folio_start_writeback,
         "folio_split": lambda folio: [mmc.unpin_user_folio(folio, 2), mmc.folio_put(folio)],
         "migrate_folio_longterm": lambda folio: [mmc.unpin_user_folio(folio, 2), mmc.folio_put(folio)]}
REFUSES = {"folio_ref_unfreeze": BadPage, "zone_device_page_init": InvalidArgument}


@pytest.mark.parametrize("name", CALLS)
def test_the_good_arguments_are_good(mem, folio, name):
    if name in NEEDS:
        NEEDS[name](folio)
    args = arguments(name, mem, folio)
    if name in ("folio_page_idx", "folio_remaining_pages"):
        assert call(name, args) == {"folio_page_idx": 1, "folio_remaining_pages": 7}[name]
    elif name in REFUSES:
        with refused(mem, REFUSES[name]):
            call(name, args)
    else:
        call(name, args)


# ---- what is none ---------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name, index", positions(FOLIO, LIVE_FOLIO, PAGE, LIVE_PAGE))
@pytest.mark.parametrize("value", [None, 8, "page", 8.0, [], object()], ids=repr)
def test_no_page_where_one_is_wanted(mem, folio, name, index, value):
    with refused(mem, TypeError):
        call(name, wrong(name, index, value, mem, folio))


@pytest.mark.parametrize("name, index", positions(MEMORY))
@pytest.mark.parametrize("value", [None, 8, "16M"], ids=repr)
def test_no_memory_where_one_is_wanted(mem, folio, name, index, value):
    with refused(mem, TypeError):
        call(name, wrong(name, index, value, mem, folio))


@pytest.mark.parametrize("name, index", positions(PAGES, FOLIOS))
@pytest.mark.parametrize("value", [None, 8, "pages", [8, 9], [object()], {8: 9}, b"pages"], ids=repr)
def test_no_list_where_one_is_wanted(mem, folio, name, index, value):
    with refused(mem, TypeError):
        call(name, wrong(name, index, value, mem, folio))


@pytest.mark.parametrize("name, index", positions(FOLIOS))
def test_pages_where_folios_are_wanted(mem, folio, name, index):
    with refused(mem, TypeError):
        call(name, wrong(name, index, PageList(mem, [8]), mem, folio))


@pytest.mark.parametrize("name, index", positions(Count))
@pytest.mark.parametrize("value", [-1, -4095, -(1 << 63), 1 << 31, 1 << 32, 1 << 63, 1 << 64, 1 << 100], ids=hex)
def test_numbers_that_do_not_fit(mem, folio, name, index, value):
    with refused(mem, (InvalidArgument, BadPage)):
        call(name, wrong(name, index, value, mem, folio))


NO_NUMBERS = [(name, index, value) for name, index in positions(Count) for value in ("1", 1.0, None, True, [1], 1j)
              if value is not None or not CALLS[name][index].none]


@pytest.mark.parametrize("name, index, value", NO_NUMBERS)
def test_what_is_no_number(mem, folio, name, index, value):
    with refused(mem, (TypeError, InvalidArgument)):
        call(name, wrong(name, index, value, mem, folio))


@pytest.mark.parametrize("value", [-14, -12, -4095])
def test_an_errno_given_back_as_a_count_is_named(mem, folio, value):
    # unpin_user_pages(pages, ret) after a failed pin: the kernel warns and returns
    with refused(mem, InvalidArgument, match="error of the call before"):
        mmc.unpin_user_pages(PageList(mem, [8, 9]), value)


# ---- the wrong one --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name, index", positions(FOLIO, LIVE_FOLIO))
def test_a_tail_where_a_folio_is_wanted(mem, folio, name, index):
    with refused(mem, InvalidArgument, match="tail|in the folio", pfn=9):
        call(name, wrong(name, index, mem.page(9), mem, folio))


@pytest.mark.parametrize("name, index", positions(FOLIOS))
def test_a_tail_among_folios(mem, folio, name, index):
    with refused(mem, InvalidArgument, match="tail", pfn=9):
        call(name, wrong(name, index, [folio, mem.page(9)], mem, folio))


@pytest.mark.parametrize("name, index", positions(LIVE_FOLIO, LIVE_PAGE))
@pytest.mark.parametrize("used", [False, True])
def test_a_free_page(mem, folio, name, index, used):
    if used:
        mmc.folio_put(mmc.folio_alloc_at(mem, 100, 0))
    with refused(mem, (BadPage, MMError), pfn=100):
        call(name, wrong(name, index, mem.page(100), mem, folio))


@pytest.mark.parametrize("name", LOOKS)
def test_looking_at_a_free_page_changes_nothing(mem, folio, name):
    free = mem.page(100)
    args = [free if isinstance(a, str) else 0 if isinstance(a, Count) else a.good for a in CALLS[name]]
    with unchanged(mem):
        try:
            call(name, args)
        except CLEAR:
            pass


@pytest.mark.parametrize("name", [name for name, _ in positions(FOLIOS)])
def test_folios_of_two_memories(mem, folio, name):
    other = Memory("16M")
    theirs = mmc.folio_alloc(other, 0)
    mmc.try_grab_folio(theirs, 1)
    with refused(mem, InvalidArgument, match="two Memories"), unchanged(other):
        call(name, [[folio, theirs]])


def test_pages_of_two_memories(mem, folio):
    other = Memory("16M")
    theirs = mmc.alloc_page(other)
    for name in "unpin_user_pages", "release_pages", "grab_pages":
        with refused(mem, InvalidArgument, match="another Memory"), unchanged(other):
            call(name, [[folio.page, theirs]])


@pytest.mark.parametrize("name", ["folio_page_idx", "folio_remaining_pages"])
def test_page_of_another_memory(mem, folio, name):
    with refused(mem, InvalidArgument, match="another Memory"):
        call(name, [folio, Memory("16M").page(9)])


@pytest.mark.parametrize("release", ["heads", "", None, 1, "RUN", b"run", ["run"]])
def test_generations_that_do_not_exist(mem, folio, release):
    pages = PageList(mem, [8])
    for use in (lambda: mmc.unpin_user_pages(pages, release=release),
                lambda: mmc.unpin_user_pages_dirty_lock(pages, 1, True, release=release),
                lambda: mmc.release_pages(pages, release=release)):
        with refused(mem, (InvalidArgument, TypeError)):
            use()


@pytest.mark.parametrize("n", [4, 5, 1 << 20])
def test_more_pages_than_the_list_has(mem, folio, n):
    pages = PageList(mem, [8, 9, 0])
    for use in (lambda: mmc.unpin_user_pages(pages, n), lambda: mmc.unpin_user_pages_dirty_lock(pages, n, False),
                lambda: mmc.for_each_compound_head(pages, n), lambda: mmc.num_pages_contiguous(pages, n),
                lambda: mmc.compound_next(pages, n)):
        with refused(mem, InvalidArgument):
            use()


@pytest.mark.parametrize("start, n", [(4095, 18), (8, 4105), (4096, 17), (4111, 2), (4608, 513), (5119, 2), (8, 5112),
                                      (8, 1 << 52)])
def test_ranges_that_leave_their_memory(start, n):
    #   RAM ..4095 | 64K device 4096..4111 | hole | 2M device 4608..5119
    mem = Memory("16M", devices=[DevicePages("64K"), DevicePages("2M", align="2M")])
    page = mem.page(start)
    for use in (lambda: mmc.unpin_user_page_range_dirty_lock(page, n, True),
                lambda: mmc.for_each_compound_range(page, n), lambda: mmc.compound_range_next(page, n, 0)):
        with refused(mem, InvalidArgument, pfn=start):
            use()


# ---- after close ----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", CALLS)
def test_calls_after_close(mem, folio, name):
    if name in NEEDS and name != "folio_split":
        NEEDS[name](folio)
    args = arguments(name, mem, folio)
    mem.close()
    with pytest.raises(InvalidArgument, match="closed"):
        call(name, args)


MEMORY_CALLS = {
    "page": lambda m: m.page(5), "folio": lambda m: m.folio(5), "pfn_valid": lambda m: m.pfn_valid(5),
    "buddyinfo": lambda m: m.buddyinfo(), "vmstat": lambda m: m.vmstat(), "opstats": lambda m: m.opstats(),
    "reset_opstats": lambda m: m.reset_opstats(), "hugetlb_pools": lambda m: m.hugetlb_pools(), "check": lambda m: m.check(),
    "inject": lambda m: m.inject("frame").__enter__(), "memory_failure": lambda m: m.memory_failure(KEPT[0]),
    "save": lambda m: m.save("/nowhere/at/all.npz"), "with": lambda m: m.__enter__(), "buffer": lambda m: memoryview(m),
}
STILL = {"close", "closed", "config", "devices", "load"}    # what a closed Memory answers, or does not need one
KEPT = []


@pytest.mark.parametrize("name", sorted(set(MEMORY_CALLS) | {n for n in dir(Memory) if n[0] != "_"} - STILL))
def test_memory_after_close(name):
    mem = Memory("16M")
    KEPT[:] = [mmc.alloc_page(mem)]
    use = MEMORY_CALLS.get(name, lambda m: getattr(m, name))
    mem.close()
    with pytest.raises(InvalidArgument, match="closed"):
        use(mem)


@pytest.mark.parametrize("kind", ["page", "folio"])
def test_handles_after_close(kind):
    mem = Memory("16M")
    handle = getattr(mem, kind)(5)
    mem.close()
    assert handle.pfn == 5 and handle.mem is mem and "closed" in repr(handle)
    assert handle == handle and hash(handle) == hash(handle)
    for name in set(dir(type(handle))) - {"pfn", "mem"}:
        if name[0] != "_":
            with pytest.raises(InvalidArgument, match="closed"):
                getattr(handle, name)


def test_lists_and_iterators_after_close(mem, folio):
    pages, ranges = PageList(mem, [8, 9, 16]), mmc.PageRanges(mem, [8, 16], [2, 1])
    iterators = [mmc.for_each_compound_head(pages), mmc.for_each_compound_range(mem.page(8), 3)]
    for iterator in iterators:
        next(iterator)
    iterators += [mmc.for_each_compound_head(pages), mmc.for_each_compound_range(mem.page(8), 3)]
    mem.close()
    assert pages.pfns.tolist() == [8, 9, 16] and len(pages) == 3 and ranges.nr_pages == 3
    assert "3" in repr(pages) and "3" in repr(ranges)
    for use in [lambda i=i: list(i) for i in iterators[2:]] + [lambda: pages + pages, lambda: ranges.to_pagelist(),
                                                               lambda: PageList(mem, [2])]:
        with pytest.raises(InvalidArgument, match="closed"):
            use()
    for iterator in iterators[:2]:
        try:
            list(iterator)
        except InvalidArgument:
            pass


# ---- what a call leaves behind in Python ------------------------------------------------------------------------------
@pytest.mark.parametrize("name", CALLS)
def test_calls_keep_no_references_and_count_as_over(mem, folio, name):
    good = arguments(name, mem, folio)
    wrong_ones = [[mem.page(100) if argument in (FOLIO, LIVE_FOLIO, PAGE, LIVE_PAGE) else PageList(mem, [100])
                   if argument == PAGES else [mem.page(100)] if argument == FOLIOS else -1 if isinstance(argument, Count)
                   else value for argument, value in zip(CALLS[name], good)]]
    wrong_ones += [[None] * len(good), []]

    def attempt():
        for args in [good] + wrong_ones:
            if args is good and name == "folio_lock" and folio.locked:
                continue
            try:
                call(name, args)
            except CLEAR:
                pass

    attempt()
    before = sys.getrefcount(mem), sys.getrefcount(folio)
    for _ in range(20):
        attempt()
    assert (sys.getrefcount(mem), sys.getrefcount(folio)) == before
    mem.close()


# ---- errors ---------------------------------------------------------------------------------------------------------
def test_errors_say_what_where_and_how_much(mem, folio):
    with pytest.raises(BadPage) as caught:
        mmc.unpin_user_folio(folio, 3)
    text = str(caught.value)
    assert all(part in text for part in ("unpin_user_folio()", "0x8", "refcount 4", "pincount 2", "3"))
    assert caught.value.law and caught.value.pfn == 8
    with pytest.raises(MMError) as caught:
        mmc.folio_split(folio)
    assert "0x8" in str(caught.value) and "4 references" in str(caught.value)


def test_refused_arguments_are_both_kinds(mem):
    with pytest.raises(ValueError) as caught:
        mem.page(1 << 40)
    assert isinstance(caught.value, MMError) and isinstance(caught.value, OSError) and caught.value.errno == 22


@pytest.mark.parametrize("error", [MMError(12, "no room", pfn=7, addr=4096), InvalidArgument("no", pfn=3)])
def test_errors_can_be_pickled(error):
    # As they must be to come out of a worker process.
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is type(error) and str(again) == str(error)
    assert (again.errno, again.pfn, again.addr) == (error.errno, error.pfn, error.addr)


def test_bad_page_can_be_pickled():
    error = BadPage("refcount underflow", "one put too many", pfn=9)
    again = pickle.loads(pickle.dumps(error))
    assert (str(again), again.law, again.pfn) == (str(error), error.law, error.pfn)


# ---- numbers that are somebody's code ------------------------------------------------------------------------------------
class Closes:
    """A number that closes the Memory when it is looked at."""

    def __init__(self, mem, value):
        self.mem, self.value = mem, value

    def __index__(self):
        self.mem.close()
        return self.value

    def __bool__(self):
        self.mem.close()
        return True


@pytest.mark.parametrize("name, index", [*positions(Count), ("unpin_user_page_range_dirty_lock", 2), ("unpin_user_folio_dirty_locked", 2),
                                         ("folio_remaining_pages", 2)])
@pytest.mark.parametrize("watched", [False, True], ids=["", "watched"])
def test_a_number_that_closes_the_memory(mem, folio, name, index, watched):
    """Refused, or answered from what was known before; nothing looks at a mem_map that is gone."""
    args = arguments(name, mem, folio)
    args[index:index + 1] = [Closes(mem, args[index] if index < len(args) else 1)]
    with mmc.PinLedger(mem) if watched else contextlib.nullcontext(), contextlib.suppress(*CLEAR):
        call(name, args)
