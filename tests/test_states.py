"""States that no call of this part makes: mapped, anonymous, in a cache, of another type. They are poked in."""
import pytest

import mmcore as mmc
from mmcore import BadPage, FOLL_GET, Memory, MMError, PageFlags, PageList, PageType
from support import poke, refused, unchanged

ZONE = 2 << 51
ANON, FILE = 1, 4                   # mapping words: bit 0 is anonymous, anything even and not 0 a file's id
SWAPBACKED, SWAPCACHE, PRIVATE, EXCLUSIVE = (1 << bit for bit in (17, 10, 14, 11))


@pytest.fixture
def mem():
    return Memory("16M", hugetlb={"2M": 1})


def flag(mem, pfn, bits):
    poke(mem, pfn, "flags", int(mem.pages["flags"][pfn]) | bits)


# ---- mapped ---------------------------------------------------------------------------------------------------------
#   order, mapping, flags, field of the map count, its value, mappings, expected references
EXPECTED = [
    (0, 0, 0, "_mapcount", -1, 0, 0), (0, ANON, SWAPBACKED, "_mapcount", 2, 3, 3), (0, FILE, 0, "_mapcount", -1, 0, 1),
    (0, FILE, PRIVATE, "_mapcount", 0, 1, 3), (0, ANON, SWAPBACKED | SWAPCACHE, "_mapcount", 0, 1, 2),
    (0, ANON, SWAPCACHE, "_mapcount", 0, 1, 1), (0, ANON, PRIVATE, "_mapcount", -1, 0, 0),
    (3, 0, 0, "_large_mapcount", -1, 0, 0), (3, ANON, SWAPBACKED, "_large_mapcount", 7, 8, 8),
    (3, FILE, 0, "_large_mapcount", 7, 8, 16), (3, FILE, PRIVATE, "_large_mapcount", -1, 0, 9),
    (3, ANON, SWAPBACKED | SWAPCACHE, "_large_mapcount", 3, 4, 12), (9, ANON, SWAPBACKED, "_large_mapcount", 511, 512, 512),
]


@pytest.mark.parametrize("order, mapping, flags, field, value, mappings, expected", EXPECTED)
def test_mappings_and_expected_references(mem, order, mapping, flags, field, value, mappings, expected):
    folio = mmc.folio_alloc(mem, order)
    poke(mem, folio.pfn, "mapping", mapping)
    flag(mem, folio.pfn, flags)
    poke(mem, folio.pfn, field, value)
    assert mmc.folio_mapcount(folio) == folio.mapcount == mappings
    assert mmc.folio_expected_ref_count(folio) == expected


@pytest.mark.parametrize("order, field", [(0, "_mapcount"), (3, "_large_mapcount")])
def test_the_last_reference_stays_while_the_folio_is_mapped(mem, order, field):
    folio = mmc.folio_alloc(mem, order)
    poke(mem, folio.pfn, field, 0)
    with pytest.raises(BadPage, match="mapped") as caught:
        mmc.folio_put(folio)
    assert caught.value.pfn == folio.pfn and folio.refcount == 1
    with refused(mem, MMError):
        mmc.folio_split(folio)
    poke(mem, folio.pfn, field, -1)
    mmc.folio_put(folio)
    mem.check()


def test_mapcount_of_a_page_and_of_a_typed_page(mem):
    folio = mmc.folio_alloc(mem, 2)
    poke(mem, folio.pfn + 1, "_mapcount", 4)
    assert [mem.page(folio.pfn + i).mapcount for i in range(4)] == [0, 5, 0, 0]
    page = mmc.alloc_page(mem)
    poke(mem, page.pfn, "page_type", PageType.table << 24)
    assert page.mapcount == 0 and mmc.folio_mapcount(page) == 0 and mmc.folio_expected_ref_count(page) == 0


# ---- anonymous ------------------------------------------------------------------------------------------------------
def test_dirty_anonymous_pages_are_not_counted(mem):
    folio = mmc.folio_alloc(mem, 3)
    poke(mem, folio.pfn, "mapping", ANON)
    assert mmc.folio_mark_dirty(folio) is True and folio.dirty
    assert mem.vmstat()["nr_dirty"] == 0
    mem.check()
    mmc.try_grab_folio(folio, 1)
    mmc.unpin_user_pages_dirty_lock(PageList(mem, [folio.pfn + 1]), 1, True)
    assert mmc.folio_clear_dirty_for_io(folio) is True
    mmc.try_grab_folio(folio, 1)
    mmc.unpin_user_pages_dirty_lock(PageList(mem, [folio.pfn + 1]), 1, True)
    assert folio.dirty and mem.vmstat()["nr_dirty"] == 0
    mmc.folio_put(folio)
    assert mem.vmstat()["nr_dirty"] == 0
    mem.check()


#   debug=True looks at what is unpinned: pinned anonymous pages were exclusive and stay so
#   kind, flags of the head, flags of the third page, is it fine?
SANE = [
    ("file", 0, 0, True), (0, EXCLUSIVE, 0, True), (0, 0, 0, False), (3, EXCLUSIVE, 0, True), (3, 0, EXCLUSIVE, True),
    (3, 0, 0, False), ("hugetlb", EXCLUSIVE, 0, True), ("hugetlb", 0, EXCLUSIVE, False), ("hugetlb", 0, 0, False),
]


@pytest.mark.parametrize("kind, head, third, fine", SANE)
@pytest.mark.parametrize("release", ["run", "head", "page"])
@pytest.mark.parametrize("dirty", [None, False, True])
def test_sanity_of_pinned_pages(kind, head, third, fine, release, dirty):
    mem = Memory("16M", hugetlb={"2M": 1}, debug=True)
    if kind == "hugetlb":
        folio = mmc.folio_alloc(mem, 9, hugetlb=True)
    else:
        folio = mmc.folio_alloc(mem, 3 if kind == "file" else kind)
    poke(mem, folio.pfn, "mapping", FILE if kind == "file" else ANON)
    flag(mem, folio.pfn, head)
    at = folio.pfn + (2 if folio.order else 0)
    flag(mem, at, third)
    pages = PageList(mem, [0, 1, at])
    mmc.grab_pages(pages)

    def unpin():
        if dirty is None:
            mmc.unpin_user_pages(pages, release=release)
        else:
            mmc.unpin_user_pages_dirty_lock(pages, 3, dirty, release=release)

    if fine:
        unpin()
        assert folio.pincount == 0
    else:
        with refused(mem, BadPage, match="exclusive", pfn=at):
            unpin()
        with refused(mem, BadPage, match="exclusive", pfn=at):
            mmc.unpin_user_page(mem.page(at))
        # The range and folio variants do not look.
        mmc.unpin_user_page_range_dirty_lock(mem.page(at), 1, False)
    mem.check()


def test_without_debug_nobody_looks(mem):
    page = mmc.alloc_page(mem)
    poke(mem, page.pfn, "mapping", ANON)
    mmc.grab_pages([page])
    mmc.unpin_user_pages([page])
    assert page.refcount == 1


# ---- types ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("kind", [PageType.slab, PageType.large_kmalloc])
@pytest.mark.parametrize("order", [0, 3])
def test_slab_pages_are_not_counted(mem, kind, order):
    # get_page warns and put_page is silent: their owner frees them, whoever looked at them
    folio = mmc.folio_alloc(mem, order)
    poke(mem, folio.pfn, "page_type", kind << 24)
    page = mmc.folio_page(folio, (1 << order) - 1)
    with unchanged(mem):
        mmc.get_page(page)
        mmc.put_page(page)
    poke(mem, folio.pfn, "page_type", 0xFFFFFFFF)
    mmc.get_page(page)
    assert folio.refcount == 2


# ---- in a page cache ------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("order, new_order", [(4, 2), (4, 0), (2, 1)])
def test_a_split_shares_the_references_of_the_cache_out(mem, order, new_order):
    #   16 references of the cache + 1 of the caller      ->      4 + 1 on each piece of 4 pages
    folio = mmc.folio_alloc(mem, order)
    poke(mem, folio.pfn, "mapping", FILE)
    poke(mem, folio.pfn, "index", 100)
    with refused(mem, MMError, errno=11):
        mmc.folio_split(folio, new_order)           # the cache's references are missing
    mmc.try_grab_folio(folio, 1 << order, FOLL_GET)
    pieces = mmc.folio_split(folio, new_order)
    assert [piece.refcount for piece in pieces] == [(1 << new_order) + 1] * len(pieces)
    assert [int(mem.pages["mapping"][piece.pfn]) for piece in pieces] == [FILE] * len(pieces)
    assert [int(mem.pages["index"][piece.pfn]) for piece in pieces] == list(range(100, 100 + (1 << order), 1 << new_order))
    free = mem.vmstat()["nr_free_pages"]
    for piece in pieces:
        mmc.folio_put_refs(piece, (1 << new_order) + 1)
    assert mem.vmstat()["nr_free_pages"] == free + (1 << order)
    mem.check()


def test_an_anonymous_split_keeps_exclusive_marks_where_they_are(mem):
    folio = mmc.folio_alloc(mem, 2)
    poke(mem, folio.pfn, "mapping", ANON)
    flag(mem, folio.pfn + 2, EXCLUSIVE)
    flag(mem, folio.pfn, SWAPBACKED)
    pieces = mmc.folio_split(folio)
    assert [PageFlags.anon_exclusive in piece.flags for piece in pieces] == [False, False, True, False]
    assert all(PageFlags.swapbacked in piece.flags for piece in pieces)
    assert [int(mem.pages["mapping"][piece.pfn]) for piece in pieces] == [ANON] * 4


# ---- freed -----------------------------------------------------------------------------------------------------------
def test_nothing_of_a_past_life_is_left_on_a_frame(mem):
    pfn = mmc.folio_alloc(mem, 0).pfn
    clean = mem.pages[pfn].tobytes()
    for field, value in (("mapping", FILE), ("index", 9), ("private", 5), ("memcg_data", 7), ("lru_prev", 3),
                         ("flags", ZONE | 1 << 2 | 1 << 3 | SWAPBACKED | 1 << 11)):
        poke(mem, pfn, field, value)
    mmc.put_page(mem.page(pfn))
    again = mmc.folio_alloc_at(mem, pfn, 0)
    assert mem.pages[again.pfn].tobytes() == clean
    for call in (lambda: mmc.folio_put(again), lambda: mmc.release_pages([again.page])):
        poke(mem, pfn, "private", 77)
        call()
        assert mem.pages["private"][pfn] == 0
        again = mmc.folio_alloc_at(mem, pfn, 0)
    mem.check()
