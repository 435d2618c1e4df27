"""struct page and its overlay: layout, flags, the tail word, and the handles on them."""
import pickle
import re

import numpy as np
import pytest

import mmcore as mmc
from mmcore import FOLIO_DTYPE, PAGE_DTYPE, Memory, PageFlags, PageType

WORD = (1 << 64) - 1


def tail_word(order):
    return (~0 << (order + 6)) & WORD | 1


@pytest.fixture
def mem():
    return Memory("16M", hugetlb={"2M": 1})


# ---- layout ---------------------------------------------------------------------------------------------------------
def test_sizes():
    assert PAGE_DTYPE.itemsize == 64
    assert FOLIO_DTYPE.itemsize == 4 * 64


@pytest.mark.parametrize("names", [
    ("compound_info", "lru_next", "pgmap"),
    ("_mapcount", "page_type"),
])
def test_unions_overlap(names):
    assert len({PAGE_DTYPE.fields[name][1] for name in names}) == 1


def test_page_fields_leave_no_hole():
    covered = set()
    for dtype, offset, *_ in PAGE_DTYPE.fields.values():
        assert offset % dtype.itemsize == 0, "naturally aligned, or no atomics"
        covered.update(range(offset, offset + dtype.itemsize))
    assert covered == set(range(64))


def test_folio_starts_with_its_page():
    for name in PAGE_DTYPE.names:
        assert FOLIO_DTYPE.fields[name][:2] == PAGE_DTYPE.fields[name][:2]


@pytest.mark.parametrize("tail, names", [(1, ("_flags_1", "_head_1")), (2, ("_flags_2", "_head_2")),
                                         (3, ("_flags_3", "_head_3"))])
def test_tails_keep_flags_and_head_words(tail, names):
    for name, of_page in zip(names, ("flags", "compound_info")):
        assert FOLIO_DTYPE.fields[name][1] == tail * 64 + PAGE_DTYPE.fields[of_page][1]


def test_tail_1_keeps_counts_of_the_page():
    # A tail's own _refcount and _mapcount are looked at by whoever takes it for a page: they are not reused.
    assert FOLIO_DTYPE.fields["_mapcount_1"][1] == 64 + PAGE_DTYPE.fields["_mapcount"][1]
    assert FOLIO_DTYPE.fields["_refcount_1"][1] == 64 + PAGE_DTYPE.fields["_refcount"][1]


# ---- a folio as prep_compound_page leaves it ------------------------------------------------------------------------
FRESH = [
    # order, field, value
    (1, "_refcount", 1), (1, "_mapcount", -1), (1, "mapping", 0), (1, "private", 0), (1, "memcg_data", 0),
    (1, "_large_mapcount", -1), (1, "_nr_pages_mapped", 0), (1, "_entire_mapcount", -1), (1, "_pincount", 0),
    (1, "_mapcount_1", -1), (1, "_refcount_1", 0), (1, "_nr_pages", 2), (1, "_head_1", tail_word(1)),
    (2, "_nr_pages", 4), (2, "_head_1", tail_word(2)), (2, "_head_2", tail_word(2)), (2, "_head_3", tail_word(2)),
    (9, "_nr_pages", 512), (9, "_large_mapcount", -1), (9, "_pincount", 0), (9, "_head_3", tail_word(9)),
    (10, "_nr_pages", 1024), (10, "_refcount", 1),
]


@pytest.mark.parametrize("order, field, value", FRESH)
def test_fresh_folio(mem, order, field, value):
    folio = mmc.folio_alloc(mem, order)
    raw = mem.pages[folio.pfn:folio.pfn + 4].tobytes()
    assert int(np.frombuffer(raw, FOLIO_DTYPE)[0][field]) == value


def test_fresh_folio_says_its_order(mem):
    for order in range(1, 11):
        folio = mmc.folio_alloc(mem, order)
        tail = mem.pages[folio.pfn + 1]
        assert int(tail["flags"]) & 0xFF == order
        assert list(np.frombuffer(mem.pages[folio.pfn:folio.pfn + 2].tobytes() + bytes(128), FOLIO_DTYPE)[0]
                    ["_mm_id_mapcount"]) == [-1, -1]


# ---- the tail word --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("order", range(1, 11))
def test_tail_word_gives_head_and_order_of_every_tail(mem, order):
    #   head   tail 1   tail 2  ...  tail 2^order - 1
    #   even   word     word         word               word = mask above order + 6, and bit 0
    folio = mmc.folio_alloc(mem, order)
    words = mem.pages["compound_info"][folio.pfn:folio.pfn + folio.nr_pages]
    assert int(words[0]) & 1 == 0
    for i, word in enumerate(map(int, words[1:]), start=1):
        assert word == tail_word(order)
        mask = ((word & 1) - 1) & WORD | word
        assert (((folio.pfn + i) << 6) & mask) >> 6 == folio.pfn
        rest = word & ~1
        assert (rest & -rest).bit_length() - 1 - 6 == order
        assert mem.page(folio.pfn + i).folio == folio
    assert mem.folio(folio.pfn + folio.nr_pages - 1).pfn == folio.pfn


def test_tail_word_of_gigantic_folios():
    mem = Memory("4G", hugetlb={"1G": 1})
    folio = mmc.folio_alloc(mem, 18, hugetlb=True)
    assert folio.nr_pages == 1 << 18
    words = mem.pages["compound_info"][folio.pfn + 1:folio.pfn + folio.nr_pages]
    assert (words == tail_word(18)).all()
    assert mem.page(folio.pfn + folio.nr_pages - 1).folio.order == 18


def test_tails_of_neighbours_do_not_mix(mem):
    left, right = mmc.folio_alloc_at(mem, 64, 3), mmc.folio_alloc_at(mem, 72, 3)
    assert [mem.folio(pfn).pfn for pfn in range(64, 80)] == [64] * 8 + [72] * 8
    assert left != right


def test_page_that_is_no_tail_masks_with_all_ones(mem):
    page = mmc.alloc_page(mem)
    assert int(mem.pages["compound_info"][page.pfn]) == 0
    assert page.folio.pfn == page.pfn


# ---- flags and types ------------------------------------------------------------------------------------------------
def test_head_flag_only_on_heads(mem):
    folio = mmc.folio_alloc(mem, 4)
    assert PageFlags.head in folio.flags
    assert not any(PageFlags.head in mem.page(folio.pfn + i).flags for i in range(1, 16))
    assert PageFlags.head not in mmc.alloc_page(mem).flags


def test_locked_and_waiters_share_a_byte():
    assert PageFlags.locked == 1 and PageFlags.waiters == 1 << 7 and PageFlags.head == 1 << 6


def test_hugetlb_is_a_type_of_the_head_only(mem):
    folio = mmc.folio_alloc(mem, 9, hugetlb=True)
    types = mem.pages["page_type"][folio.pfn:folio.pfn + 512] >> 24
    assert types[0] == PageType.hugetlb
    assert (types[1:] == 0xFF).all()


def test_folio_hugetlb_test_vs_split(mem):
    # A reader without a reference asks "hugetlb?" of page 513 while the THP at 512 is split.
    #   512..1023 THP | split -> 512 small pages
    # The type is a word of the page itself, so the answer is no before and after, for every page.
    folio = mmc.folio_alloc_at(mem, 512, 9)
    before = mem.pages["page_type"][512:1024] >> 24
    mmc.folio_split(folio)
    after = mem.pages["page_type"][512:1024] >> 24
    assert (before == 0xFF).all() and (after == 0xFF).all()
    assert PageType.hugetlb != 0xFF


# ---- what never holds an address ------------------------------------------------------------------------------------
def test_two_machines_with_one_history_have_equal_bytes():
    def history(mem):
        folios = [mmc.folio_alloc(mem, order) for order in (0, 3, 9, 0, 1)]
        mmc.folio_mark_dirty(folios[1])
        mmc.try_grab_folio(folios[2], 7)
        mmc.folio_put(folios[3])
        mem.huge_zero_folio
        return mem.pages.tobytes()

    args = dict(movable="2M", hugetlb={"2M": 1}, devices=[mmc.DevicePages("2M", align="2M")])
    with Memory("16M", **args) as a, Memory("16M", **args) as b:
        assert history(a) == history(b)


def test_words_are_small_or_marks(mem):
    # Links, mappings and device maps are PFNs or ids; the only large words are masks and marks.
    mmc.folio_alloc(mem, 9)
    mmc.folio_alloc(mem, 9, hugetlb=True)
    for name in ("lru_next", "lru_prev", "mapping", "index", "private"):
        values = {int(v) for v in np.unique(mem.pages[name])}
        assert all(v < 1 << 52 or v >> 48 == 0xDEAD or v >> 48 == 0xFFFF or v >> 32 == 0xFFFFFFFF for v in values), name


# ---- handles --------------------------------------------------------------------------------------------------------
def test_handles_are_equal_when_memory_and_pfn_are(mem):
    a, b = mem.page(5), mem.page(5)
    assert a == b and hash(a) == hash(b) and a is not b
    assert a != mem.page(6) and a != 5 and a != mem.folio(5)
    assert len({a, b, mem.page(6)}) == 2
    assert len({mem.folio(5), mem.folio(5)}) == 1
    with Memory("16M") as other:
        assert other.page(5) != a and other.folio(5) != mem.folio(5)


@pytest.mark.parametrize("make", [lambda mem: mem.page(5), lambda mem: mem.folio(5)])
def test_handles_cannot_be_pickled(mem, make):
    with pytest.raises(TypeError, match="pickle"):
        pickle.dumps(make(mem))


@pytest.mark.parametrize("kind", [mmc.Page, mmc.Folio])
def test_handles_cannot_be_made_up(kind):
    with pytest.raises(TypeError):
        kind(3)


def test_handles_are_read_only(mem):
    page, folio = mem.page(5), mem.folio(5)
    for handle, name in ((page, "pfn"), (page, "mem"), (page, "refcount"), (folio, "order"), (folio, "pincount")):
        with pytest.raises(AttributeError):
            setattr(handle, name, 1)


def test_page_of_a_large_folio_shows_the_folios_references(mem):
    folio = mmc.folio_alloc(mem, 2)
    mmc.folio_get(folio)
    assert [mem.page(folio.pfn + i).refcount for i in range(4)] == [2] * 4
    assert [int(n) for n in mem.pages["_refcount"][folio.pfn:folio.pfn + 4]] == [2, 0, 0, 0]


@pytest.mark.parametrize("order, names", [(0, ["refcount=1", "zone=Normal"]), (3, ["refcount=1", "order=3", "head"])])
def test_repr_looks_like_c(mem, order, names):
    folio = mmc.folio_alloc(mem, order)
    text = repr(folio)
    assert re.match(rf"<struct folio pfn={folio.pfn:#x} ", text)
    assert all(name in text for name in names)
    assert re.match(rf"<struct page pfn={folio.pfn:#x} refcount=1 ", repr(folio.page))


def test_dtype_names_are_what_numpy_shows(mem):
    assert mem.pages.dtype == PAGE_DTYPE
    assert len(mem.pages) <= mem.nr_pages
