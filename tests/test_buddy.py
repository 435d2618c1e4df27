"""The page allocator: blocks by order, splitting and merging, zones, hugetlb pools, folios at given frames."""
import random

import numpy as np
import pytest
from hypothesis import given, strategies as st

import mmcore as mmc
from mmcore import DevicePages, InvalidArgument, Memory, MMError
from support import canonical_blocks, refused, unchanged


def row(mem, zone="Normal"):
    return mem.buddyinfo()[zone]


# ---- shape of a fresh machine ---------------------------------------------------------------------------------------
@pytest.mark.parametrize("size, expected", [
    # 16 pages: 2-3, 4-7, 8-15
    ("64K", [0, 1, 1, 1, 0, 0, 0, 0, 0, 0, 0]),
    # 4 MiB: 2-3, 4-7, ..., 512-1023
    ("4M", [0, 1, 1, 1, 1, 1, 1, 1, 1, 1, 0]),
    ("16M", [0, 1, 1, 1, 1, 1, 1, 1, 1, 1, 3]),
    # the end is ragged: 1024 + 8 + 4 + 1 pages
    (1037 * 4096, [1, 1, 2, 2, 1, 1, 1, 1, 1, 1, 0]),
])
def test_fresh_blocks(size, expected):
    with Memory(size) as mem:
        assert row(mem) == expected
        assert sum(n << order for order, n in enumerate(expected)) == mem.vmstat()["nr_free_pages"]
        mem.check()


def test_fresh_zones_are_whole_blocks():
    with Memory("32M", movable="8M", cma="4M") as mem:
        assert row(mem, "Movable") == [0] * 10 + [2]
        assert sum(n << order for order, n in enumerate(row(mem))) == 6144 - 2
        assert set(mem.buddyinfo()) == {"Normal", "Movable"}


# ---- splitting and merging ------------------------------------------------------------------------------------------
def test_split_ladder():
    #   one block of 1024 from 1024 on:  take order 0 -> 1024 taken, 1025, 1026-27, 1028-31, ... 1536-2047 are left
    mem = Memory("8M")
    low = [mmc.folio_alloc(mem, order) for order in range(9, -1, -1) if row(mem)[order]]
    assert row(mem) == [0] * 10 + [1] and sum(f.nr_pages for f in low) == 1022
    page = mmc.alloc_page(mem)
    assert page.pfn == 1024 and row(mem) == [1] * 10 + [0]
    mmc.put_page(page)
    assert row(mem) == [0] * 10 + [1], "it merges up to the top order"


@pytest.mark.parametrize("order", range(11))
def test_every_order_comes_and_goes(order):
    mem = Memory("16M")
    before = mem.buddyinfo()
    folio = mmc.folio_alloc(mem, order)
    assert (folio.order, folio.nr_pages, folio.refcount) == (order, 1 << order, 1)
    assert folio.pfn % (1 << order) == 0 and folio.pfn
    assert mem.vmstat()["nr_free_pages"] == 4094 - (1 << order)
    mem.check()
    mmc.folio_put(folio)
    assert mem.buddyinfo() == before
    mem.check()


def test_the_lowest_block_of_the_smallest_order_is_taken():
    # 2-3 | 4-7 | 8-15 | ... : mem_map stays dense
    mem = Memory("4M")
    assert [mmc.alloc_page(mem).pfn for _ in range(8)] == list(range(2, 10))
    for pfn in 2, 5, 4:
        mmc.put_page(mem.page(pfn))
    assert [mmc.alloc_page(mem).pfn for _ in range(4)] == [2, 4, 5, 10]


def test_buddies_merge_and_neighbours_that_are_none_do_not():
    #   8 9 10 11   free 9 and 10: neighbours, no buddies.  free 8: 8-9 merge.  free 11: 10-11, then 8-11.
    mem = Memory("64K")
    pages = {pfn: mmc.folio_alloc_at(mem, pfn, 0) for pfn in range(2, 16)}
    assert row(mem) == [0] * 11
    for pfn, expected in ((9, [1]), (10, [2]), (8, [1, 1]), (11, [0, 0, 1])):
        mmc.folio_put(pages[pfn])
        assert row(mem) == expected + [0] * (11 - len(expected))
        mem.check()


def test_alloc_split_large_buddy_last_pfn():
    # The last blocks of memory are taken and freed: merging must not look past the last PFN.
    #   ... 3072-3583 | 3584-4095 | end of memory
    mem = Memory("16M")
    last = [mmc.folio_alloc_at(mem, 3584, 9), mmc.folio_alloc_at(mem, 3072, 9)]
    for folio in last:
        mmc.folio_put(folio)
        mem.check()
    assert row(mem)[10] == 3
    # And where memory ends in the middle of a block: 512 pages, then nothing.
    mem = Memory(1536 * 4096)
    folio = mmc.folio_alloc_at(mem, 1024, 9)
    mmc.folio_put(folio)
    mem.check()
    assert row(mem)[9] == 2 and len(mem.pages) == 1536


def test_alloc_free_noncompound_with_extra_ref():
    # A reader raises the count of an order-3 folio; the owner frees it; the reader puts it.
    #   ref 1 -> 2 (reader) -> 1 (owner) -> 0: all 8 pages come back, none earlier
    mem = Memory("64K")
    folio = mmc.folio_alloc_at(mem, 8, 3)
    free = mem.vmstat()["nr_free_pages"]
    assert mmc.folio_try_get(folio)
    mmc.folio_put(folio)
    assert mem.vmstat()["nr_free_pages"] == free and folio.refcount == 1
    mmc.put_page(mem.page(8))
    assert mem.vmstat()["nr_free_pages"] == free + 8
    assert row(mem)[3] == 1
    mem.check()


# ---- any history against a set of free frames -----------------------------------------------------------------------
@given(st.data())
def test_free_blocks_are_what_the_set_of_free_frames_says(data):
    nr = data.draw(st.sampled_from([64, 256, 300, 1030]))
    mem = Memory(nr * 4096)
    free, held = set(range(2, nr)), []
    for _ in range(data.draw(st.integers(1, 40))):
        if held and data.draw(st.booleans()):
            folio = held.pop(data.draw(st.integers(0, len(held) - 1)))
            free.update(range(folio.pfn, folio.pfn + folio.nr_pages))
            mmc.folio_put(folio)
        else:
            order = data.draw(st.integers(0, 6))
            fits = [pfn for pfn in range(0, nr, 1 << order) if free.issuperset(range(pfn, pfn + (1 << order)))]
            if not fits:
                with pytest.raises(MMError):
                    mmc.folio_alloc(mem, order)
                continue
            if data.draw(st.booleans()):
                folio = mmc.folio_alloc(mem, order)
                assert folio.pfn in fits
            else:
                folio = mmc.folio_alloc_at(mem, data.draw(st.sampled_from(fits)), order)
            free.difference_update(range(folio.pfn, folio.pfn + folio.nr_pages))
            held.append(folio)
        assert row(mem) == canonical_blocks(free, 10)
        assert mem.vmstat()["nr_free_pages"] == len(free)
    mem.check()


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("kwargs", [{}, dict(movable="4M", cma="4M"), dict(page_size="16K"), dict(page_size="64K")])
def test_everything_merges_back(seed, kwargs):
    mem = Memory("32M", **kwargs)
    fresh, rng, held = mem.buddyinfo(), random.Random(seed), []
    while True:
        try:
            held.append(mmc.folio_alloc(mem, rng.choice([0, 0, 0, 1, 2, 3, 5, 9])))
        except MMError:
            break
    rng.shuffle(held)
    mem.check()
    for folio in held[:len(held) // 2]:
        mmc.folio_put(folio)
    mem.check()
    for folio in held[len(held) // 2:]:
        mmc.folio_put(folio)
    assert mem.buddyinfo() == fresh
    mem.check()


# ---- zones ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("zone, low, high", [("Normal", 2, 2048), ("CMA", 2048, 3072), ("Movable", 3072, 4096)])
def test_a_zone_gives_its_own_frames_and_then_none(zone, low, high):
    mem = Memory("16M", movable="4M", cma="4M")
    pfns = []
    with pytest.raises(MMError, match=zone) as caught:
        while True:
            pfns.append(mmc.folio_alloc(mem, 0, zone=zone).pfn)
    assert caught.value.errno == 12
    assert sorted(pfns) == list(range(low, high))
    mem.check()


def test_any_zone_falls_back():
    mem = Memory("16M", movable="4M", cma="4M")
    pfns = [mmc.folio_alloc(mem, 0).pfn for _ in range(4094)]
    assert sorted(pfns) == list(range(2, 4096))
    assert pfns[:2046] == sorted(pfns[:2046]) and max(pfns[:2046]) < 2048, "Normal memory first"


@pytest.mark.parametrize("kwargs, zone", [({}, "Movable"), ({}, "CMA"), (dict(movable="4M"), "CMA"), ({}, "DMA"),
                                          ({}, "normal"), ({}, 1)])
def test_zones_that_do_not_exist(kwargs, zone):
    mem = Memory("16M", **kwargs)
    with refused(mem, InvalidArgument, match="zone|Memory"):
        mmc.folio_alloc(mem, 0, zone=zone)


def test_zones_do_not_merge_across_their_border():
    # Normal ends at 512, in the middle of what would be a block of 1024.
    mem = Memory("4M", movable="2M")
    a, b = mmc.folio_alloc_at(mem, 256, 8), mmc.folio_alloc_at(mem, 512, 9)
    mmc.folio_put(a)
    mmc.folio_put(b)
    assert row(mem)[8] == 1 and row(mem, "Movable") == [0] * 9 + [1, 0]
    mem.check()


@pytest.mark.parametrize("order, error", [(11, InvalidArgument), (-1, InvalidArgument), (64, InvalidArgument),
                                          (1 << 40, InvalidArgument), (1.0, TypeError), ("1", TypeError),
                                          (True, TypeError), (None, TypeError)])
def test_orders_that_do_not_exist(order, error):
    mem = Memory("16M")
    with refused(mem, error):
        mmc.folio_alloc(mem, order)
    with refused(mem, (InvalidArgument, TypeError)):
        mmc.folio_alloc(mem, order, hugetlb=True)


def test_fragmentation_is_named():
    #   every other page is taken: half is free, and no two frames together
    mem = Memory("64K")
    pages = [mmc.alloc_page(mem) for _ in range(14)]
    for page in pages[::2]:
        mmc.put_page(page)
    with refused(mem, MMError, match="smaller blocks", errno=12):
        mmc.folio_alloc(mem, 1)


# ---- hugetlb pools --------------------------------------------------------------------------------------------------
def test_hugetlb_pool_round_trip():
    #   pool 2M: [A B]   take, take, refused, put A, take -> A again
    mem = Memory("16M", hugetlb={"2M": 2})
    free = mem.vmstat()["nr_free_pages"]
    assert mem.hugetlb_pools() == {2 << 20: (2, 2)} and free == 4094 - 1024
    a, b = (mmc.folio_alloc(mem, 9, hugetlb=True) for _ in range(2))
    assert {a.order, b.order} == {9} and a != b and mem.hugetlb_pools() == {2 << 20: (2, 0)}
    with refused(mem, MMError, match="pool", errno=12):
        mmc.folio_alloc(mem, 9, hugetlb=True)
    mmc.folio_mark_dirty(a)
    mmc.folio_put(a)
    assert mem.hugetlb_pools() == {2 << 20: (2, 1)}
    assert mem.vmstat()["nr_free_pages"] == free and mem.vmstat()["nr_dirty"] == 0
    mem.check()
    again = mmc.folio_alloc(mem, 9, hugetlb=True)
    assert again.pfn == a.pfn and not again.dirty and again.refcount == 1
    mem.check()


def test_pools_of_several_sizes():
    with Memory("4G", hugetlb={"2M": 3, "1G": 2, "32M": 1, "64K": 4}) as mem:
        assert mem.hugetlb_pools() == {2 << 20: (3, 3), 1 << 30: (2, 2), 32 << 20: (1, 1), 64 << 10: (4, 4)}
        held = [mmc.folio_alloc(mem, order, hugetlb=True) for order in (18, 9, 13, 4, 18, 9, 4)]
        for folio in held:
            assert folio.pfn % folio.nr_pages == 0
        assert mem.hugetlb_pools() == {2 << 20: (3, 1), 1 << 30: (2, 0), 32 << 20: (1, 0), 64 << 10: (4, 2)}
        mem.check()
        for folio in held:
            mmc.folio_put(folio)
        assert all(nr == left for nr, left in mem.hugetlb_pools().values())
        mem.check()


def test_surplus_hugetlb_folio_is_broken_up():
    # The pool is full when this one is freed: its pages go to the allocator.
    mem = Memory("16M", hugetlb={"2M": 1})
    fresh = mem.buddyinfo()
    folio = mmc.folio_alloc_at(mem, 512, 9, hugetlb=True)
    mem.check()
    mmc.folio_put(folio)
    assert mem.buddyinfo() == fresh and mem.hugetlb_pools() == {2 << 20: (1, 1)}
    mem.check()


def test_hugetlb_folio_of_no_pool_is_broken_up():
    mem = Memory("16M")
    fresh = mem.buddyinfo()
    folio = mmc.folio_alloc_at(mem, 2048, 11, hugetlb=True)
    assert folio.order == 11
    mem.check()
    mmc.folio_put(folio)
    assert mem.buddyinfo() == fresh
    mem.check()


@pytest.mark.parametrize("kwargs, match", [(dict(hugetlb=True), "pools are of none"),
                                           (dict(hugetlb=True, zone="Normal"), "pool")])
def test_wrong_hugetlb_allocations(kwargs, match):
    mem = Memory("16M") if "zone" not in kwargs else Memory("16M", hugetlb={"2M": 1})
    with refused(mem, InvalidArgument, match=match):
        mmc.folio_alloc(mem, 9, **kwargs)


# ---- bulk -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("nr", [0, 1, 2, 31, 1000, 4094])
def test_bulk(nr):
    mem = Memory("16M")
    pages = mmc.alloc_pages_bulk(mem, nr)
    pfns = list(map(int, pages.pfns))
    assert len(pages) == nr == len(set(pfns)) and 0 not in pfns and 1 not in pfns
    assert {(mem.page(pfn).refcount, mem.folio(pfn).order) for pfn in pfns} <= {(1, 0)}
    assert mem.vmstat()["nr_free_pages"] == 4094 - nr
    mem.check()
    mmc.release_pages(pages)
    assert mem.vmstat()["nr_free_pages"] == 4094 and row(mem) == [0] + [1] * 9 + [3]
    mem.check()


def test_bulk_is_shorter_when_memory_runs_out():
    mem = Memory("64K")
    pages = mmc.alloc_pages_bulk(mem, 16)
    assert sorted(map(int, pages.pfns)) == list(range(2, 16))
    with refused(mem, MMError, errno=12):
        mmc.alloc_pages_bulk(mem, 1)


def test_alloc_bulk_already_full():
    # Nothing is asked for where nothing is missing: 0 pages are no error, also when memory is full.
    mem = Memory("64K")
    first = mmc.alloc_pages_bulk(mem, 14)
    with unchanged(mem):
        assert len(mmc.alloc_pages_bulk(mem, 0)) == 0
    mmc.release_pages(first[:3])
    assert sorted(map(int, mmc.alloc_pages_bulk(mem, 8).pfns)) == sorted(map(int, first[:3].pfns)), "only what is missing"


@pytest.mark.parametrize("nr, error", [(-1, InvalidArgument), (1 << 70, (InvalidArgument, MMError)), ("3", TypeError),
                                       (2.0, TypeError)])
def test_wrong_bulk(nr, error):
    mem = Memory("64K")
    with refused(mem, error):
        mmc.alloc_pages_bulk(mem, nr)


# ---- folios at given frames -----------------------------------------------------------------------------------------
@pytest.mark.parametrize("pfn, order", [(2, 0), (2, 1), (4, 2), (512, 9), (1024, 10), (4095, 0), (3072, 10)])
def test_alloc_at(pfn, order):
    mem = Memory("16M")
    folio = mmc.folio_alloc_at(mem, pfn, order)
    assert (folio.pfn, folio.order, folio.refcount) == (pfn, order, 1)
    free = set(range(2, 4096)) - set(range(pfn, pfn + (1 << order)))
    assert row(mem) == canonical_blocks(free, 10)
    mem.check()
    with refused(mem, MMError, errno=16, pfn=pfn):
        mmc.folio_alloc_at(mem, pfn, order)


@pytest.mark.parametrize("pfn, order, error", [
    (3, 1, InvalidArgument), (513, 9, InvalidArgument), (0, 0, InvalidArgument), (0, 10, InvalidArgument),
    (-1, 0, InvalidArgument), (4096, 0, InvalidArgument), (1 << 64, 0, InvalidArgument), (2, -1, InvalidArgument),
    (2048, 11, InvalidArgument), (512, 64, InvalidArgument), (1, 0, MMError), ("2", 0, (InvalidArgument, TypeError)),
    (2.5, 0, (InvalidArgument, TypeError)), (None, 0, (InvalidArgument, TypeError)),
    (2, "0", (InvalidArgument, TypeError)), (4096 + 512, 9, InvalidArgument),
])
def test_wrong_places(pfn, order, error):
    mem = Memory("16M", devices=[DevicePages("4M")])
    with refused(mem, error):
        mmc.folio_alloc_at(mem, pfn, order)


def test_folios_at_all_or_nothing():
    #   8..15 order 3 | 16..19 order 2 | 20 taken | 20 again: all is taken back
    mem = Memory("16M")
    mmc.folio_put(mmc.folio_alloc_at(mem, 0x10, 4))     # a frame used before reads otherwise than one never used
    mmc.folio_put(mmc.folio_alloc_at(mem, 8, 3))
    mmc.folio_alloc_at(mem, 20, 0)
    with refused(mem, MMError, errno=16, pfn=20):
        mmc.folios_alloc_at(mem, [8, 16, 20], [3, 2, 0])
    folios = mmc.folios_alloc_at(mem, np.array([8, 16, 24]), [3, 2, 0])
    assert [(f.pfn, f.order) for f in folios] == [(8, 3), (16, 2), (24, 0)]
    assert [f.order for f in mmc.folios_alloc_at(mem, [1024, 1026], 1)] == [1, 1]
    assert mmc.folios_alloc_at(mem, [], []) == []
    mem.check()


def test_alloc_gigantic_prep_speculative_ref():
    # A gigantic folio is wanted where one page is in use: nothing is converted, and the page keeps its two references.
    mem = Memory("16M")
    page = mmc.folio_alloc_at(mem, 2048 + 700, 0)
    mmc.folio_get(page)
    with refused(mem, MMError, errno=16):
        mmc.folio_alloc_at(mem, 2048, 11, hugetlb=True)
    assert page.refcount == 2
    mmc.folio_put_refs(page, 2)
    assert mmc.folio_alloc_at(mem, 2048, 11, hugetlb=True).order == 11
    mem.check()


def test_hugetlb_folios_have_four_pages_at_least():
    """Their own words lie in the fourth struct page: of order 1, those of the neighbour would be overwritten."""
    mem = Memory("1M")
    neighbour = mmc.folio_alloc_at(mem, 4, 1)
    mmc.try_grab_folio(neighbour, 3)
    for order in (0, 1):
        with refused(mem, InvalidArgument, "four pages"):
            mmc.folio_alloc_at(mem, 2, order, hugetlb=True)
    assert neighbour.pincount == 3
    with pytest.raises(InvalidArgument, match="at least 4 pages"):
        Memory("16M", hugetlb={"8K": 1})
    with Memory("16M", hugetlb={"16K": 2}) as other:
        assert mmc.folio_alloc(other, 2, hugetlb=True).order == 2
        other.check()
