"""PageList and PageRanges, and the unpin family on lists that somebody wrote down."""
import gc
import pickle
import weakref

import numpy as np
import pytest

import mmcore as mmc
from mmcore import BadPage, DevicePages, FOLL_GET, FOLL_PIN, InvalidArgument, Memory, MMError, PageList, PageRanges
from support import refused, released, unchanged

GENERATIONS = ["run", "head", "page"]


@pytest.fixture
def mem():
    return Memory("16M", hugetlb={"2M": 1})


# ---- PageList -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("pfns, expected", [
    ([], []), ([5], [5]), ([5, 0, 7], [5, 0, 7]), ((9, 8, 7), [9, 8, 7]), (range(3, 6), [3, 4, 5]),
    (np.array([4, 4, 4]), [4, 4, 4]), (np.array([4, 2], dtype=np.uint32), [4, 2]), (np.arange(20)[2:20:5], [2, 7, 12, 17]),
    (np.empty(0), []), ({6}, [6]), ((pfn for pfn in (2, 3)), [2, 3]), ([np.uint64(4095)], [4095]), ([None, 3], [0, 3]),
])
def test_lists_of_pfns(mem, pfns, expected):
    pages = PageList(mem, pfns)
    assert pages.pfns.tolist() == expected and len(pages) == len(expected)
    assert pages.pfns.dtype == np.uint64
    assert [page.pfn if page else 0 for page in pages] == expected
    assert pages == PageList(mem, expected)


def test_lists_of_pages_and_folios(mem):
    folio, page = mmc.folio_alloc(mem, 3), mmc.alloc_page(mem)
    pages = PageList(mem, [folio, page, None, mmc.folio_page(folio, 7)])
    assert pages.pfns.tolist() == [folio.pfn, page.pfn, 0, folio.pfn + 7]
    assert PageList(mem, pages) == pages


@pytest.mark.parametrize("pfns, error", [
    ([4096], InvalidArgument), ([2, 4095, 4096], InvalidArgument), ([-1], InvalidArgument), ([1 << 64], InvalidArgument),
    ([1 << 63], InvalidArgument), (np.array([-1]), InvalidArgument), (np.array([[2, 3]]), InvalidArgument),
    (np.array([2.0]), TypeError), (["2"], TypeError), ([2.0], TypeError), ([True], TypeError), (5, TypeError),
    (None, TypeError), ([[2]], TypeError), (np.array(["2"]), TypeError), (np.array(5), InvalidArgument),
    (np.array([4096], dtype=np.uint64), InvalidArgument), (np.array([1 << 63], dtype=np.uint64), InvalidArgument),
])
def test_lists_that_are_refused(mem, pfns, error):
    with refused(mem, error):
        PageList(mem, pfns)


def test_the_error_says_where(mem):
    with pytest.raises(InvalidArgument, match="0x1000 at index 3") as caught:
        PageList(mem, [2, 0, 4095, 4096, 5000])
    assert caught.value.pfn == 4096


def test_pages_of_another_memory_are_refused(mem):
    other = Memory("16M")
    page = mmc.alloc_page(other)
    for wrong in [page], [page.folio], PageList(other, [page]), PageRanges(other, [page], [1]):
        with refused(mem, InvalidArgument, match="another Memory"):
            PageList(mem, wrong)


def test_lists_in_holes_between_devices():
    mem = Memory("16M", devices=[DevicePages("4K"), DevicePages("2M", align="2M")])
    assert len(PageList(mem, [4095, 4096, 4608])) == 3
    for pfn in 4097, 4607, 5120:
        with refused(mem, InvalidArgument, pfn=pfn):
            PageList(mem, [2, pfn])


def test_lists_are_copies(mem):
    pfns = np.array([2, 3, 4], dtype=np.uint64)
    pages = PageList(mem, pfns)
    pfns[:] = 1 << 40
    assert pages.pfns.tolist() == [2, 3, 4]


def test_lists_are_read_only(mem):
    pages = PageList(mem, [2, 3])
    with pytest.raises(ValueError):
        pages.pfns[0] = 9
    with pytest.raises(ValueError):
        pages.pfns.flags.writeable = True
    for attempt in (lambda: pages.__setitem__(0, 9), lambda: setattr(pages, "pfns", [9]), lambda: setattr(pages, "mem", 1)):
        with pytest.raises((TypeError, AttributeError)):
            attempt()
    with pytest.raises(InvalidArgument, match="read-only"):
        pages.__init__(mem, [9])
    with pytest.raises(TypeError):
        memoryview(pages)[0] = 1
    assert pages.pfns.tolist() == [2, 3]


@pytest.mark.parametrize("index, expected", [
    (slice(None), [2, 3, 0, 5, 6]), (slice(1, 4), [3, 0, 5]), (slice(-2, None), [5, 6]), (slice(3, 1), []),
    (slice(None, None, 2), [2, 0, 6]), (slice(None, None, -1), [6, 5, 0, 3, 2]), (slice(10, 20), []),
])
def test_slices(mem, index, expected):
    pages = PageList(mem, [2, 3, 0, 5, 6])
    part = pages[index]
    assert isinstance(part, PageList) and part.pfns.tolist() == expected and len(part) == len(expected)
    assert [page and page.pfn for page in part] == [pfn or None for pfn in expected]


def test_slices_share_memory_and_keep_it(mem):
    pages = PageList(mem, range(2, 1000))
    part = pages[100:200][10:20]
    assert np.shares_memory(part.pfns, pages.pfns)
    view, alive = part.pfns, weakref.ref(mem)
    del pages, part, mem
    gc.collect()
    assert view.tolist() == list(range(112, 122))
    assert alive() is None or alive().nr_pages == 4096


@pytest.mark.parametrize("index, pfn", [(0, 2), (2, None), (-1, 5), (-4, 2), (np.int8(1), 3)])
def test_indices(mem, index, pfn):
    page = PageList(mem, [2, 3, 0, 5])[index]
    assert page == (mem.page(pfn) if pfn else None)


@pytest.mark.parametrize("index, error", [(4, IndexError), (-5, IndexError), (1 << 70, IndexError), ("1", TypeError),
                                          (1.0, TypeError), (None, TypeError)])
def test_wrong_indices(mem, index, error):
    with pytest.raises(error):
        PageList(mem, [2, 3, 0, 5])[index]


def test_sums(mem):
    a, b = PageList(mem, [2, 3]), PageList(mem, [0, 9])
    assert (a + b).pfns.tolist() == [2, 3, 0, 9] and (a + PageList(mem)).pfns.tolist() == [2, 3]
    assert a.pfns.tolist() == [2, 3]
    with pytest.raises(TypeError):
        a + [4]
    with pytest.raises(InvalidArgument):
        a + PageList(Memory("16M"), [2])


def test_lists_of_two_memories_differ(mem):
    assert PageList(mem, [2]) != PageList(Memory("16M"), [2]) and PageList(mem, [2]) != [2]
    with pytest.raises(TypeError):
        hash(PageList(mem, [2]))
    for pages in PageList(mem, [2]), PageRanges(mem, [2], [1]):
        with pytest.raises(TypeError, match="pickle"):
            pickle.dumps(pages)


def test_lists_hold_no_references(mem):
    folio = mmc.folio_alloc(mem, 0)
    pages = PageList(mem, [folio])
    assert folio.refcount == 1
    mmc.folio_put(folio)
    assert mem.vmstat()["nr_free_pages"] == 4094 - 512 and pages[0] == folio.page


# ---- PageRanges -----------------------------------------------------------------------------------------------------
def test_ranges(mem):
    ranges = PageRanges(mem, [8, 0, 100, 3], [4, 1, 2, 1])
    assert ranges.pfns.tolist() == [8, 0, 100, 3] and ranges.counts.tolist() == [4, 1, 2, 1]
    assert (len(ranges), ranges.nr_pages) == (4, 8)
    assert ranges.to_pagelist().pfns.tolist() == [8, 9, 10, 11, 0, 100, 101, 3]
    assert list(ranges) == [(8, 4), (0, 1), (100, 2), (3, 1)]
    for view in ranges.pfns, ranges.counts:
        with pytest.raises(ValueError):
            view[0] = 1


def test_empty_ranges(mem):
    ranges = PageRanges(mem, [], [])
    assert (len(ranges), ranges.nr_pages, ranges.to_pagelist().pfns.tolist()) == (0, 0, [])
    with unchanged(mem):
        mmc.unpin_user_pages(ranges)
        mmc.release_pages(PageList(mem))


@pytest.mark.parametrize("pfns, counts, error", [
    ([8], [0], InvalidArgument), ([8], [4089], InvalidArgument), ([4095], [2], InvalidArgument),
    ([8], [1 << 63], InvalidArgument), ([8], [(1 << 64) - 1], InvalidArgument), ([8], [-1], InvalidArgument),
    ([8, 9], [1], InvalidArgument), ([], [1], InvalidArgument), ([0], [2], InvalidArgument), ([4096], [1], InvalidArgument),
    ([8], ["1"], TypeError), ([8], [1.0], TypeError), ([8], None, TypeError), ([8], 1, TypeError),
    ([1, 2], [1 << 63, 1 << 63], InvalidArgument),
])
def test_ranges_that_are_refused(mem, pfns, counts, error):
    with refused(mem, error):
        PageRanges(mem, pfns, counts)


@pytest.mark.parametrize("first, count, fits", [
    (4096, 8, True), (4096, 9, False), (4608, 512, True), (4608, 513, False), (4100, 1000, False), (5119, 1, True),
])
def test_ranges_in_devices(first, count, fits):
    #   RAM ..4095 | 32K device 4096..4103 | hole | 2M device 4608..5119
    mem = Memory("16M", devices=[DevicePages("32K"), DevicePages("2M", align="2M")])
    if fits:
        assert PageRanges(mem, [first], [count]).nr_pages == count
    else:
        with refused(mem, InvalidArgument):
            PageRanges(mem, [first], [count])


@pytest.mark.parametrize("pfns, runs", [
    ([], []), ([8], [(8, 1)]), ([8, 9, 10], [(8, 3)]), ([8, 9, 11, 12], [(8, 2), (11, 2)]),
    ([9, 8], [(9, 1), (8, 1)]), ([8, 8], [(8, 1), (8, 1)]), ([0, 1, 2], [(0, 1), (1, 2)]), ([0, 0], [(0, 1), (0, 1)]),
    ([8, 0, 9], [(8, 1), (0, 1), (9, 1)]),
])
def test_runs_of_a_list(mem, pfns, runs):
    assert list(PageRanges.from_pagelist(PageList(mem, pfns))) == runs


def test_runs_of_a_list_end_where_a_memory_ends():
    #   RAM ..4095 | device A 4096..4097 | device B 4098..: three memories without a gap
    mem = Memory("16M", devices=[DevicePages("8K"), DevicePages("8K", type="fsdax")])
    pfns = list(range(4090, 4100))
    ranges = PageRanges.from_pagelist(PageList(mem, pfns))
    assert ranges.to_pagelist().pfns.tolist() == pfns


@pytest.mark.parametrize("pfns, n", [([8], 1), ([8, 9, 10, 12], 3), ([8, 7], 1), ([8, 8], 1), ([0, 1], 1), ([8, 0], 1),
                                     (list(range(2, 900)), 898), (list(range(2, 900)) + [2], 898)])
def test_contiguous_pages(mem, pfns, n):
    pages = PageList(mem, pfns)
    assert mmc.num_pages_contiguous(pages) == mmc.num_pages_contiguous(PageRanges.from_pagelist(pages)) == n
    assert mmc.num_pages_contiguous(pages, 1) == 1


def test_contiguous_pages_cross_folios(mem):
    # Frames count, folios do not: 8..15 is one folio, 16 and 17 are two more.
    mmc.folios_alloc_at(mem, [8, 16, 17], [3, 0, 0])
    assert mmc.num_pages_contiguous(PageList(mem, range(12, 18))) == 6


@pytest.mark.parametrize("nr", [0, -1, 4, 1 << 40])
def test_contiguous_pages_of_what_is_not_there(mem, nr):
    for pages in PageList(mem, [8, 9, 10]), PageRanges(mem, [8], [3]):
        with pytest.raises(InvalidArgument):
            mmc.num_pages_contiguous(pages, nr)
    for empty in PageList(mem), PageRanges(mem):
        with pytest.raises(InvalidArgument):
            mmc.num_pages_contiguous(empty)


# ---- the unpin family -----------------------------------------------------------------------------------------------
@pytest.mark.parametrize("release", GENERATIONS)
@pytest.mark.parametrize("debug", [False, True])
def test_gup_unpin_array_with_null(release, debug):
    #   p0 p1 p2 pinned once: 1025 each      unpin [p0, NULL, p2]: 1, 1025, 1; two released
    mem = Memory("4M", debug=debug)
    p0, p1, p2 = (mmc.alloc_page(mem) for _ in range(3))
    mmc.grab_pages(PageList(mem, [p0, p1, p2]))
    assert [page.refcount for page in (p0, p1, p2)] == [1025] * 3
    mmc.unpin_user_pages(PageList(mem, [p0, None, p2]), 3, release=release)
    assert [page.refcount for page in (p0, p1, p2)] == [1, 1025, 1]
    assert mem.vmstat()["nr_foll_pin_released"] == 2
    mem.check()


@pytest.mark.parametrize("release", GENERATIONS)
@pytest.mark.parametrize("dirty", [False, True])
def test_null_anywhere_also_when_dirtying(mem, release, dirty):
    #   [NULL NULL h t1 NULL t2 t3 NULL]: one folio, in two groups
    folio = mmc.folio_alloc(mem, 2)
    h = folio.pfn
    mmc.grab_pages(PageList(mem, [h, 0, h + 1, h + 2, h + 3]))
    pages = PageList(mem, [0, 0, h, h + 1, 0, h + 2, h + 3, 0])
    mem.reset_opstats()
    mmc.unpin_user_pages_dirty_lock(pages, len(pages), dirty, release=release)
    assert (folio.refcount, folio.pincount, folio.dirty, folio.locked) == (1, 0, dirty, False)
    assert mem.opstats()["ref_atomics"] == (4 if release == "page" else 2)
    released(mem)


@pytest.mark.parametrize("release, atomics", [("run", 1), ("head", 1), ("page", 512)])
def test_a_huge_page_costs_one_update(mem, release, atomics):
    folio = mmc.folio_alloc(mem, 9)
    pages = PageList(mem, range(folio.pfn, folio.pfn + 512))
    mem.reset_opstats()
    mmc.grab_pages(pages)
    assert (mem.opstats()["ref_atomics"], mem.opstats()["pincount_atomics"]) == (1, 1)
    assert (folio.refcount, folio.pincount, mem.vmstat()["nr_foll_pin_acquired"]) == (513, 512, 512)
    mem.reset_opstats()
    mmc.unpin_user_pages(pages, release=release)
    ops = mem.opstats()
    assert (ops["ref_atomics"], ops["pincount_atomics"]) == (atomics, atomics)
    assert ops["head_lookups"] == (1 if release == "run" else 512)
    assert folio.refcount == 1
    released(mem)


def test_a_range_costs_one_update_a_folio(mem):
    folios = mmc.folios_alloc_at(mem, [512, 1024, 1028, 1032], [9, 2, 2, 3])
    pages = PageList(mem, range(600, 1036))
    mmc.grab_pages(pages)
    mem.reset_opstats()
    mmc.unpin_user_page_range_dirty_lock(mem.page(600), 436, True)
    ops = mem.opstats()
    assert (ops["ref_atomics"], ops["head_lookups"], ops["folio_locks"]) == (4, 4, 4)
    assert all(folio.dirty and folio.refcount == 1 for folio in folios)
    released(mem)


@pytest.mark.parametrize("release", GENERATIONS)
def test_dirtying_locks_each_folio_once(mem, release):
    #   A A A B B A: three groups, two folios; B was dirty before
    a, b = mmc.folios_alloc_at(mem, [8, 16], [3, 3])
    mmc.folio_mark_dirty(b)
    pages = PageList(mem, [8, 9, 10, 16, 17, 11])
    mmc.grab_pages(pages)
    mem.reset_opstats()
    mmc.unpin_user_pages_dirty_lock(pages, 6, True, release=release)
    assert mem.opstats()["folio_locks"] == 1 and a.dirty and b.dirty
    assert mem.vmstat()["nr_dirty"] == 16
    released(mem)


@pytest.mark.parametrize("release", GENERATIONS)
def test_zero_page_in_a_list(mem, release):
    # Never counted when pinned, never dirtied, never released.
    folio, huge = mmc.folio_alloc(mem, 0), mem.huge_zero_folio
    pages = PageList(mem, [1, folio.pfn, 1, 1, huge.pfn, huge.pfn + 9])
    mmc.grab_pages(pages)
    assert mem.vmstat()["nr_foll_pin_acquired"] == 3 and huge.pincount == 2
    mmc.unpin_user_pages_dirty_lock(pages, 6, True, release=release)
    assert mem.zero_page.refcount == 1 and not mmc.PageDirty(mem.zero_page) and folio.dirty
    released(mem)


@pytest.mark.parametrize("release", ["run", "page"])
def test_release_pages_leaves_the_huge_zero_folio_alone(mem, release):
    #   FOLL_GET counts it, release_pages does not put it: the kernel's references leak, and put_page is what ends them
    huge, page = mem.huge_zero_folio, mmc.alloc_page(mem)
    pages = PageList(mem, [huge.pfn, huge.pfn + 1, page.pfn, 1])
    mmc.grab_pages(pages, FOLL_GET)
    assert (huge.refcount, page.refcount, mem.zero_page.refcount) == (3, 2, 2)
    mmc.release_pages(pages, release=release)
    assert (huge.refcount, page.refcount, mem.zero_page.refcount) == (3, 1, 1)
    with unchanged(mem):
        mmc.folios_put([huge, huge])
    mmc.folio_put_refs(huge, 2)
    mem.check()


@pytest.mark.parametrize("flags", [FOLL_PIN, FOLL_GET])
def test_grab_is_all_or_nothing(mem, flags):
    #   huge zero, small, zero page, large, free page: the last one fails, and all before it go back
    huge, small, large = mem.huge_zero_folio, mmc.folio_alloc(mem, 0), mmc.folio_alloc(mem, 4)
    free = mmc.folio_alloc(mem, 0)
    mmc.folio_put(free)
    pages = PageList(mem, [huge.pfn, huge.pfn + 5, small.pfn, small.pfn, 1, 0, large.pfn + 3, free.pfn, large.pfn])
    with refused(mem, MMError, errno=12, pfn=free.pfn):
        mmc.grab_pages(pages, flags)
    assert (huge.refcount, small.refcount, large.refcount, mem.zero_page.refcount) == (1, 1, 1, 1)


@pytest.mark.parametrize("flags", [0, FOLL_PIN | FOLL_GET, mmc.FOLL_WRITE, -1, 1 << 40])
def test_grab_needs_one_of_its_flags(mem, flags):
    page = mmc.alloc_page(mem)
    with refused(mem, InvalidArgument):
        mmc.grab_pages(PageList(mem, [page]), flags)


@pytest.mark.parametrize("release", GENERATIONS)
def test_a_failed_batch_undoes_itself(mem, release):
    #   good A (last pin: would be freed), good B (made dirty), C is not pinned -> A and B are as before, and not freed
    a, b, c = mmc.folios_alloc_at(mem, [8, 16, 32], [3, 0, 2])
    mmc.grab_pages(PageList(mem, [8, 9, 16]))
    mmc.folio_put(a)
    for dirty in False, True:
        for pages in [8, 16, 9, 32], [32, 8, 9, 16], [8, 9, 16, 33, 32]:
            with refused(mem, BadPage, pfn=32):
                mmc.unpin_user_pages_dirty_lock(PageList(mem, pages), len(pages), dirty, release=release)
            with refused(mem, BadPage, pfn=32):
                mmc.unpin_user_pages_dirty_lock(PageRanges(mem, pages, [1] * len(pages)), len(pages), dirty,
                                                release=release)
    assert not (a.dirty or b.dirty or c.dirty)
    mmc.unpin_user_pages(PageList(mem, [8, 9, 16]), release=release)
    released(mem)


@pytest.mark.parametrize("release", GENERATIONS)
def test_freed_folio_met_again_in_one_batch(mem, release):
    # The last pin goes at the first entry; the third entry is one too many, although the folio is not freed yet.
    a, b = mmc.folios_alloc_at(mem, [8, 16], [0, 0])
    mmc.grab_pages(PageList(mem, [8, 16]))
    mmc.folio_put(a)
    with refused(mem, BadPage, pfn=8):
        mmc.unpin_user_pages(PageList(mem, [8, 16, 8]), release=release)
    assert a.refcount == 1024 and b.pincount == 1


@pytest.mark.parametrize("npages", [0, 1, 3, 4])
@pytest.mark.parametrize("release", GENERATIONS)
def test_the_first_pages_of_a_list(mem, npages, release):
    for make in PageList, lambda m, pfns: PageRanges.from_pagelist(PageList(m, pfns)):
        folio = mmc.folio_alloc(mem, 2)
        pages = make(mem, range(folio.pfn, folio.pfn + 4))
        mmc.grab_pages(pages)
        mmc.unpin_user_pages(pages, npages, release=release)
        assert folio.pincount == 4 - npages
        mmc.unpin_user_folio(folio, 4 - npages)
        mmc.folio_put(folio)
    released(mem)


def test_folios_of_a_list(mem):
    a, b = mmc.folio_alloc(mem, 3), mmc.folio_alloc(mem, 0)
    for folio in a, a, b, a:
        mmc.try_grab_folio(folio, 1)
    mmc.unpin_folios([a, a, None, b, a])
    assert (a.pincount, b.pincount) == (0, 0)
    for folio in a, b:
        mmc.folio_get(folio)
    mmc.folios_put([a, b, None, a, b])
    assert mem.vmstat()["nr_free_pages"] == 4094 - 512
    with unchanged(mem):
        mmc.unpin_folios([])
        mmc.folios_put([])
        mmc.unpin_folios([None])
    released(mem)


def test_hugetlb_folios_go_back_to_their_pool_from_a_batch(mem):
    huge, small = mmc.folio_alloc(mem, 9, hugetlb=True), mmc.folio_alloc(mem, 0)
    pages = PageList(mem, [small.pfn] + list(range(huge.pfn, huge.pfn + 512)))
    mmc.grab_pages(pages)
    mmc.folios_put([huge, small])
    assert mem.hugetlb_pools() == {2 << 20: (1, 0)}
    mmc.unpin_user_pages_dirty_lock(pages, len(pages), True)
    assert mem.hugetlb_pools() == {2 << 20: (1, 1)} and mem.vmstat()["nr_dirty"] == 0
    released(mem)


@pytest.mark.parametrize("kind, after", [("generic", 1), ("fsdax", 0), ("coherent", 0), ("private", 0)])
def test_device_pages_go_back_to_their_device(kind, after):
    mem = Memory("16M", devices=[DevicePages("64K", type=kind, align="32K")])
    folio = mem.folio(mem.devices[0].start_pfn)
    if kind != "generic":
        with refused(mem, MMError, errno=12):
            mmc.grab_pages(PageList(mem, [folio]))
        mmc.zone_device_page_init(folio.page)
    pages = PageList(mem, range(folio.pfn, folio.pfn + 8))
    mmc.grab_pages(pages)
    mmc.folio_put(folio)
    mmc.unpin_user_pages_dirty_lock(pages, 8, True)
    assert (folio.refcount, folio.pincount, folio.dirty, folio.order) == (after, 0, False, 3)
    released(mem)


def test_sequences_of_pages_are_lists(mem):
    pages = [mmc.alloc_page(mem) for _ in range(3)]
    mmc.grab_pages(pages)
    mmc.unpin_user_pages(tuple(pages))
    released(mem)


@pytest.mark.parametrize("call", [mmc.unpin_user_pages, mmc.release_pages, mmc.grab_pages, mmc.folio_runs,
                                  mmc.for_each_compound_head, mmc.num_pages_contiguous])
@pytest.mark.parametrize("pages", [None, 5, "pages", [2, 3], [], np.array([2, 3]), {2: 3}])
def test_what_is_no_list_of_pages(call, pages):
    with pytest.raises(TypeError):
        call(pages)
