"""Folios: looking, references, pins, freezing, what a put must not do, long-term pins."""
import errno

import pytest

import mmcore as mmc
from mmcore import BadPage, DevicePages, FOLL_GET, FOLL_PCI_P2PDMA, FOLL_PIN, InvalidArgument, Memory, MMError
from support import refused, released, unchanged

BIAS = 1024
INT_MAX = (1 << 31) - 1
MOST_PINS = (1 << 21) - 1       # 31 - 10 bits: pins of a small folio before its counter turns negative


@pytest.fixture
def mem():
    return Memory("16M", hugetlb={"2M": 1})


def make(mem, kind):
    """A folio by what it is: an order, or a name."""
    if kind == "hugetlb":
        return mmc.folio_alloc(mem, 9, hugetlb=True)
    if kind == "zero":
        return mem.zero_page.folio
    if kind == "huge_zero":
        return mem.huge_zero_folio
    return mmc.folio_alloc(mem, kind)


KINDS = [0, 1, 2, 9, 10, "hugetlb"]


# ---- looking --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("kind, order", [(0, 0), (1, 1), (2, 2), (9, 9), (10, 10), ("hugetlb", 9), ("zero", 0),
                                         ("huge_zero", 9)])
def test_sizes(mem, kind, order):
    folio = make(mem, kind)
    nr = 1 << order
    assert (mmc.folio_order(folio), mmc.folio_nr_pages(folio), mmc.folio_size(folio)) == (order, nr, nr * 4096)
    assert mmc.folio_test_large(folio) is (order > 0)
    last = mmc.folio_page(folio, nr - 1)
    assert last == mmc.pfn_to_page(mem, folio.pfn + nr - 1) and mmc.page_to_pfn(last) == folio.pfn + nr - 1
    assert mmc.folio_page_idx(folio, last) == nr - 1
    assert mmc.page_folio(last) == folio and mmc.compound_head(last) == folio.page
    head = folio.page
    assert (mmc.PageHead(head), mmc.PageTail(head), mmc.PageCompound(head)) == (order > 0, False, order > 0)
    assert (mmc.PageHead(last), mmc.PageTail(last), mmc.PageCompound(last)) == (False, order > 0, order > 0)
    # The head says the size; a tail does not look its head up.
    assert (mmc.compound_order(head), mmc.compound_nr(head)) == (order, nr)
    if order:
        assert (mmc.compound_order(last), mmc.compound_nr(last)) == (0, 1)
    # Helpers take the head as Page as well.
    assert mmc.folio_order(head) == order and mmc.folio_ref_count(head) == folio.refcount


@pytest.mark.parametrize("kind, zero, huge_zero", [(0, False, False), (9, False, False), ("hugetlb", False, False),
                                                   ("zero", True, False), ("huge_zero", False, True)])
def test_zero_pages_are_told_apart(mem, kind, zero, huge_zero):
    folio = make(mem, kind)
    assert mmc.is_zero_page(folio.page) is zero
    assert mmc.is_huge_zero_folio(folio) is huge_zero
    assert mmc.is_huge_zero_page(mmc.folio_page(folio, folio.nr_pages - 1)) is huge_zero


def test_nothing_is_the_huge_zero_folio_before_it_exists(mem):
    assert not mmc.is_huge_zero_folio(mmc.folio_alloc(mem, 9))
    assert not mmc.is_huge_zero_page(mmc.alloc_page(mem))


@pytest.mark.parametrize("order", [0, 1, 3, 9])
def test_remaining_pages_count_the_given_page(mem, order):
    #   head 1 2 3 ... nr-1        from i on: nr - i pages
    folio = mmc.folio_alloc(mem, order)
    nr = folio.nr_pages
    for i in {0, nr // 2, nr - 1}:
        page = mmc.folio_page(folio, i)
        assert mmc.folio_remaining_pages(folio, page) == nr - i
        for most in 0, 1, nr - i, nr - i + 1, 1 << 40:
            assert mmc.folio_remaining_pages(folio, page, most) == min(nr - i, most)


@pytest.mark.parametrize("call", [lambda f, p: mmc.folio_remaining_pages(f, p), lambda f, p: mmc.folio_page_idx(f, p)])
def test_page_of_another_folio_has_no_place(mem, call):
    folio, other = mmc.folio_alloc_at(mem, 64, 3), mmc.folio_alloc_at(mem, 72, 3)
    for page in other.page, mmc.folio_page(other, 7), mem.page(63):
        with refused(mem, InvalidArgument):
            call(folio, page)
    with Memory("16M") as third, refused(mem, InvalidArgument, match="another Memory"):
        call(folio, third.page(65))


@pytest.mark.parametrize("n", [8, -1, 1 << 40, 1 << 70])
def test_folio_page_past_the_end(mem, n):
    folio = mmc.folio_alloc(mem, 3)
    with refused(mem, InvalidArgument):
        mmc.folio_page(folio, n)


# ---- references -----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("kind", KINDS)
def test_get_and_put(mem, kind):
    #   1 --get--> 2 --try_get--> 3 --put_refs 2--> 1 --put--> free
    before = mem.buddyinfo(), mem.hugetlb_pools()
    folio = make(mem, kind)
    mmc.folio_get(folio)
    assert mmc.folio_try_get(folio) is True
    mmc.get_page(mmc.folio_page(folio, folio.nr_pages - 1))
    assert mmc.folio_ref_count(folio) == 4 and folio.pincount == 0
    mmc.put_page(mmc.folio_page(folio, folio.nr_pages // 2))
    mmc.folio_put_refs(folio, 2)
    assert mmc.folio_ref_count(folio) == 1
    mem.check()
    mmc.folio_put(folio)
    assert (mem.buddyinfo(), mem.hugetlb_pools()) == before
    assert released(mem) is None


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("put", [lambda f: mmc.folio_put(f), lambda f: mmc.folio_put_refs(f, 1),
                                 lambda f: mmc.put_page(f.page)])
def test_double_free(mem, kind, put):
    folio = make(mem, kind)
    put(folio)
    with refused(mem, BadPage, pfn=folio.pfn):
        put(folio)


@pytest.mark.parametrize("kind", KINDS)
def test_more_puts_than_references(mem, kind):
    folio = make(mem, kind)
    mmc.folio_get(folio)
    for refs in 3, 1000, INT_MAX:
        with refused(mem, BadPage, pfn=folio.pfn):
            mmc.folio_put_refs(folio, refs)
    assert folio.refcount == 2


def test_zero_refs_are_no_put(mem):
    folio = mmc.folio_alloc(mem, 0)
    with unchanged(mem):
        mmc.folio_put_refs(folio, 0)


@pytest.mark.parametrize("kind", ["zero", "huge_zero"])
def test_zero_pages_are_never_freed(mem, kind):
    folio = make(mem, kind)
    mmc.folio_get(folio)
    mmc.folio_put(folio)
    with refused(mem, BadPage, pfn=folio.pfn):
        mmc.folio_put(folio)
    assert folio.refcount == 1


def test_reference_on_what_is_free(mem):
    folio = mmc.folio_alloc(mem, 3)
    mmc.folio_put(folio)
    assert mmc.folio_try_get(folio) is False
    with refused(mem, BadPage, pfn=folio.pfn):
        mmc.folio_get(folio)
    with refused(mem, BadPage):
        mmc.get_page(folio.page)
    for flags in FOLL_GET, FOLL_PIN:
        with refused(mem, MMError, errno=12, pfn=folio.pfn):
            mmc.try_grab_folio(folio, 1, flags)


def test_folio_nonrefcounted_tail(mem):
    # A page without a count of its own is grabbed by its PFN: "add unless zero" refuses, and nothing is freed later.
    free = mem.vmstat()["nr_free_pages"]
    with unchanged(mem):
        assert mmc.folio_try_get(mem.page(9)) is False
    with refused(mem, MMError, errno=12):
        mmc.grab_pages(mmc.PageList(mem, [9]))
    assert mem.vmstat()["nr_free_pages"] == free
    # A tail is held through its head: 1 -> 2 -> 1, and its own word stays 0.
    folio = mmc.folio_alloc_at(mem, 8, 2)
    mmc.get_page(mem.page(9))
    assert folio.refcount == 2 and mem.pages["_refcount"][9] == 0
    mmc.put_page(mem.page(9))
    assert folio.refcount == 1
    mem.check()


# ---- freezing -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("kind", KINDS)
def test_freeze(mem, kind):
    #   2 --freeze(1)--> no --freeze(2)--> 0: nobody can take it --unfreeze(3)--> 3
    folio = make(mem, kind)
    mmc.folio_get(folio)
    assert mmc.folio_ref_freeze(folio, 1) is False and folio.refcount == 2
    assert mmc.folio_ref_freeze(folio, 2) is True and folio.refcount == 0
    assert mmc.folio_try_get(folio) is False
    with pytest.raises(MMError):
        mmc.try_grab_folio(folio, 1)
    for call in mmc.folio_get, mmc.folio_put:
        with pytest.raises(BadPage):
            call(folio)
    assert folio.refcount == 0
    mmc.folio_ref_unfreeze(folio, 3)
    assert folio.refcount == 3
    mmc.folio_put_refs(folio, 3)
    mem.check()


def test_unfreeze_of_what_is_not_frozen(mem):
    folio = mmc.folio_alloc(mem, 2)
    with refused(mem, BadPage, pfn=folio.pfn):
        mmc.folio_ref_unfreeze(folio, 1)
    mmc.folio_put(folio)
    with refused(mem, BadPage, pfn=folio.pfn):
        mmc.folio_ref_unfreeze(folio, 1)        # free, not frozen: it must not come to life again


def test_unfreeze_of_a_pooled_hugetlb_folio(mem):
    folio = mmc.folio_alloc(mem, 9, hugetlb=True)
    mmc.folio_put(folio)
    with refused(mem, BadPage, pfn=folio.pfn):
        mmc.folio_ref_unfreeze(folio, 1)


@pytest.mark.parametrize("count", [0, -1, 1 << 31, 1 << 40])
def test_counts_that_cannot_be_frozen(mem, count):
    folio = mmc.folio_alloc(mem, 2)
    with refused(mem, InvalidArgument):
        mmc.folio_ref_freeze(folio, count)


# ---- pins -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("pins", [1, 2, 5, 512])
def test_pin_arithmetic(mem, kind, pins):
    #   small: 1 + 1024 * pins, no pincount          large: 1 + pins, pincount = pins
    folio = make(mem, kind)
    mmc.try_grab_folio(folio, pins)
    large = folio.order > 0
    assert folio.refcount == 1 + (pins if large else pins * BIAS)
    assert folio.pincount == pins
    assert mmc.folio_maybe_dma_pinned(folio) is True
    assert mem.vmstat()["nr_foll_pin_acquired"] == pins
    mem.check()
    mmc.unpin_user_folio(folio, pins)
    assert (folio.refcount, folio.pincount, mmc.folio_maybe_dma_pinned(folio)) == (1, 0, False)
    released(mem)


@pytest.mark.parametrize("kind", KINDS)
def test_get_grab_is_a_plain_reference(mem, kind):
    folio = make(mem, kind)
    mmc.try_grab_folio(folio, 3, FOLL_GET)
    assert (folio.refcount, folio.pincount) == (4, 0)
    assert mem.vmstat()["nr_foll_pin_acquired"] == 0
    mmc.folio_put_refs(folio, 4)
    mem.check()


def test_grab_with_neither_flag_does_nothing(mem):
    folio = mmc.folio_alloc(mem, 2)
    with unchanged(mem):
        mmc.try_grab_folio(folio, 3, 0)
    with refused(mem, InvalidArgument):
        mmc.try_grab_folio(folio, 3, FOLL_GET | FOLL_PIN)


def test_zero_page_is_not_pinned_and_huge_zero_folio_is(mem):
    zero, huge = mem.zero_page.folio, mem.huge_zero_folio
    with unchanged(mem):
        mmc.try_grab_folio(zero, 7)
        mmc.unpin_user_page(zero.page)
        mmc.unpin_user_folio(zero, 3)
        mmc.folio_add_pin(zero)
    assert not mmc.folio_maybe_dma_pinned(zero)
    mmc.try_grab_folio(zero, 7, FOLL_GET)
    assert zero.refcount == 8, "plain references are counted"
    mmc.folio_put_refs(zero, 7)
    mmc.try_grab_folio(huge, 7)
    assert (huge.refcount, huge.pincount) == (8, 7) and mmc.folio_maybe_dma_pinned(huge)
    mmc.unpin_user_folio(huge, 7)
    released(mem)


def test_maybe_dma_pinned_is_fooled_by_1024_references_of_a_small_folio(mem):
    #   small: refcount 1023 no, 1024 yes although nothing is pinned        large: never fooled
    small, large = mmc.folio_alloc(mem, 0), mmc.folio_alloc(mem, 1)
    for folio, fooled in ((small, True), (large, False)):
        mmc.try_grab_folio(folio, 1022, FOLL_GET)
        assert folio.refcount == 1023 and mmc.folio_maybe_dma_pinned(folio) is False
        mmc.folio_get(folio)
        assert folio.refcount == 1024 and mmc.folio_maybe_dma_pinned(folio) is fooled
        mem.check()
        mmc.folio_put_refs(folio, 1024)
    released(mem)


def test_most_pins_of_a_small_folio(mem):
    #   1 + 1024 * 2097151 is the last positive count; one pin more turns it negative, and every grab is refused then
    folio = mmc.folio_alloc(mem, 0)
    mmc.try_grab_folio(folio, MOST_PINS)
    assert folio.refcount == 1 + BIAS * MOST_PINS > 0
    mmc.try_grab_folio(folio, 1)
    assert folio.refcount == 1 + BIAS * (MOST_PINS + 1) - (1 << 32) < 0
    assert mmc.folio_maybe_dma_pinned(folio) is True, "the compare is unsigned"
    for flags in FOLL_PIN, FOLL_GET:
        with refused(mem, MMError, errno=12, pfn=folio.pfn):
            mmc.try_grab_folio(folio, 1, flags)
        for pages in mmc.PageList(mem, [folio]), mmc.PageRanges(mem, [folio], [1]):
            with refused(mem, MMError, errno=12, pfn=folio.pfn):
                mmc.grab_pages(pages, flags)
    mmc.unpin_user_folio(folio, MOST_PINS + 1)
    assert folio.refcount == 1
    mmc.folio_put(folio)
    released(mem)


@pytest.mark.parametrize("kind, flags, first, then", [
    (0, FOLL_PIN, 1, INT_MAX), (0, FOLL_PIN, MOST_PINS + 2, 1 << 22), (0, FOLL_GET, INT_MAX, 1),
    (9, FOLL_PIN, INT_MAX, 1), (9, FOLL_GET, INT_MAX, 1),
])
def test_overflow_is_refused(mem, kind, flags, first, then):
    folio = make(mem, kind)
    for refs in first, then:
        try:
            mmc.try_grab_folio(folio, refs, flags)
        except MMError as e:
            assert e.errno == 12
    with refused(mem, MMError, errno=12):
        mmc.try_grab_folio(folio, then, flags)
    mem.check()


@pytest.mark.parametrize("kind", KINDS)
def test_add_pins(mem, kind):
    folio = make(mem, kind)
    for call in (lambda: mmc.folio_add_pin(folio), lambda: mmc.folio_add_pins(folio, 3)):
        with refused(mem, BadPage, pfn=folio.pfn):
            call()
    mmc.try_grab_folio(folio, 1)
    mmc.folio_add_pin(folio)
    mmc.folio_add_pins(folio, 3)
    # The kernel's folio_add_pin forgets to count; here the counters balance.
    assert folio.pincount == 5 == mem.vmstat()["nr_foll_pin_acquired"]
    mem.check()
    for _ in range(5):
        mmc.unpin_folio(folio)
    released(mem)


def test_p2pdma_needs_its_flag():
    mem = Memory("16M", devices=[DevicePages("2M", type="pci_p2pdma"), DevicePages("2M", type="generic")])
    p2p, generic = (mem.folio(device.start_pfn) for device in mem.devices)
    mmc.try_grab_folio(generic, 2)
    assert generic.pincount == 2
    with refused(mem, MMError, errno=12):
        mmc.try_grab_folio(p2p, 1, FOLL_PIN | FOLL_PCI_P2PDMA)      # idle: its driver has not handed it out
    mmc.zone_device_page_init(p2p.page)
    for flags in FOLL_PIN, FOLL_GET, 0:
        with refused(mem, MMError, errno=errno.EREMOTEIO, pfn=p2p.pfn):
            mmc.try_grab_folio(p2p, 1, flags)
    with refused(mem, MMError, errno=errno.EREMOTEIO, pfn=p2p.pfn):
        mmc.grab_pages(mmc.PageList(mem, [generic.pfn, p2p.pfn]))
    for flags in FOLL_PIN | FOLL_PCI_P2PDMA, FOLL_GET | FOLL_PCI_P2PDMA:
        mmc.try_grab_folio(p2p, 1, flags)
    assert (p2p.refcount, p2p.pincount) == (2 + BIAS, 1)
    mmc.unpin_user_folio(generic, 2)
    mmc.unpin_user_folio(p2p, 1)
    released(mem)


@pytest.mark.parametrize("kind", ["fsdax", "coherent", "private", "pci_p2pdma"])
def test_idle_device_pages_are_taken_by_their_driver(kind):
    #   0 idle --init--> 1 --put--> 0 idle --init--> 1
    mem = Memory("16M", devices=[DevicePages("64K", type=kind, align="32K")])
    folio = mem.folio(mem.devices[0].start_pfn)
    for _ in range(2):
        mmc.zone_device_page_init(folio.page)
        assert (folio.refcount, folio.order) == (1, 3)
        with refused(mem, BadPage, pfn=folio.pfn):
            mmc.zone_device_page_init(folio.page)
        mmc.try_grab_folio(folio, 3, FOLL_PIN | FOLL_PCI_P2PDMA)
        mmc.folio_put(folio)
        mmc.unpin_user_folio(folio, 3)
        assert folio.refcount == 0
        with refused(mem, BadPage, pfn=folio.pfn):
            mmc.folio_put(folio)
    for wrong in mmc.alloc_page(mem), mem.page(folio.pfn + 1):
        with refused(mem, InvalidArgument):
            mmc.zone_device_page_init(wrong)
    released(mem)


# ---- what a put must not do -----------------------------------------------------------------------------------------
#   order, plain references beside the first, pins, then puts: does the last put go through?
PUTS = [
    (0, 0, 0, 1, True), (0, 0, 1, 1, True), (0, 0, 1, 2, False), (0, 2, 1, 3, True), (0, 2, 1, 4, False),
    (0, 0, 3, 1, True), (0, 0, 3, 2, False), (0, 500, 1, 501, True), (0, 500, 1, 502, False),
    (1, 0, 1, 1, True), (1, 0, 1, 2, False), (9, 3, 2, 4, True), (9, 3, 2, 5, False), (9, 0, 512, 2, False),
]


@pytest.mark.parametrize("order, plain, pins, puts, through", PUTS)
@pytest.mark.parametrize("at_once", [True, False])
def test_a_put_must_not_eat_a_pin(mem, order, plain, pins, puts, through, at_once):
    folio = mmc.folio_alloc(mem, order)
    for _ in range(plain):
        mmc.folio_get(folio)
    if pins:
        mmc.try_grab_folio(folio, pins)
    if not at_once:
        for _ in range(puts - 1):
            mmc.folio_put(folio)
        puts = 1
    if through:
        mmc.folio_put_refs(folio, puts)
        mem.check()
    else:
        with refused(mem, BadPage, pfn=folio.pfn) as caught:
            mmc.folio_put_refs(folio, puts)
        assert "pin" in caught.value.law
    if pins:
        assert folio.pincount == pins
        mmc.unpin_user_folio(folio, pins)
        released(mem)


@pytest.mark.parametrize("order", [0, 3])
def test_pins_alone_keep_a_folio(mem, order):
    #   alloc (1), pin (+p), put -> only the pin is left, unpin -> free
    free = mem.vmstat()["nr_free_pages"]
    folio = mmc.folio_alloc(mem, order)
    mmc.try_grab_folio(folio, 1)
    mmc.folio_put(folio)
    assert folio.refcount == (1 if order else BIAS) and mem.vmstat()["nr_free_pages"] == free - (1 << order)
    mem.check()
    mmc.unpin_user_folio(folio, 1)
    assert mem.vmstat()["nr_free_pages"] == free
    released(mem)


def test_a_small_folio_with_many_references_cannot_tell(mem):
    # With 512 and more plain references its pins and references may be mixed up: then a put is let through, as the
    # kernel's is. It is the one over-release that cannot be seen.
    folio = mmc.folio_alloc(mem, 0)
    mmc.try_grab_folio(folio, 1)
    for _ in range(600):
        mmc.folio_get(folio)
    assert folio.refcount == 1 + BIAS + 600
    mmc.folio_put_refs(folio, 601)
    mmc.folio_put(folio)
    assert folio.refcount == BIAS - 1
    mmc.folio_get(folio)
    mmc.unpin_user_folio(folio, 1)
    mem.check()
    # The mark does not stay on the frame.
    again = mmc.folio_alloc_at(mem, folio.pfn, 0)
    mmc.try_grab_folio(again, 1)
    mmc.folio_put(again)
    with refused(mem, BadPage):
        mmc.folio_put(again)


@pytest.mark.parametrize("kind", KINDS)
def test_more_unpins_than_pins(mem, kind):
    folio = make(mem, kind)
    mmc.folio_get(folio)
    for pins, drop in ((0, 1), (2, 3), (2, 1 << 21), (2, 1 << 22), (2, INT_MAX)):
        if folio.pincount < pins:
            mmc.try_grab_folio(folio, pins)
        with refused(mem, (BadPage, InvalidArgument)):
            mmc.unpin_user_folio(folio, drop)
    assert folio.pincount == 2


@pytest.mark.parametrize("kind", [0, 3, "hugetlb"])
@pytest.mark.parametrize("hold, let_go, law", [
    (lambda f: mmc.folio_lock(f), lambda f: mmc.folio_unlock(f), "lock"),
    (lambda f: mmc.folio_start_writeback(f), lambda f: mmc.folio_end_writeback(f), "writeback"),
])
@pytest.mark.parametrize("pinned", [False, True])
def test_the_last_reference_stays_while_the_folio_is_in_use(mem, kind, hold, let_go, law, pinned):
    folio = make(mem, kind)
    if pinned:
        mmc.try_grab_folio(folio, 1)
        mmc.folio_put(folio)
    put = (lambda: mmc.unpin_user_folio(folio, 1)) if pinned else (lambda: mmc.folio_put(folio))
    hold(folio)
    with refused(mem, BadPage, match=law, pfn=folio.pfn):
        put()
    let_go(folio)
    put()
    released(mem)


# ---- long-term pins -------------------------------------------------------------------------------------------------
#   Normal | CMA | Movable | devices: CMA and Movable may be migrated, fsdax truncated, coherent memory taken away
LONGTERM = [
    ("Normal", True), ("CMA", False), ("Movable", False), ("hugetlb", True), ("zero", True), ("huge_zero", True),
    ("generic", True), ("fsdax", False), ("coherent", False), ("private", True), ("pci_p2pdma", True),
]


@pytest.mark.parametrize("where, may", LONGTERM)
@pytest.mark.parametrize("order", [0, 3])
def test_longterm_pinnable(where, may, order):
    kinds = ("generic", "fsdax", "coherent", "private", "pci_p2pdma")
    mem = Memory("32M", movable="4M", cma="4M", hugetlb={"2M": 1},
                 devices=[DevicePages("2M", type=kind, align="2M" if order else "4K") for kind in kinds])
    if where in kinds:
        folio = mem.folio(mem.devices[kinds.index(where)].start_pfn)
    elif where in ("hugetlb", "zero", "huge_zero"):
        folio = make(mem, where)
    else:
        folio = mmc.folio_alloc(mem, order, zone=where)
    assert mmc.folio_is_longterm_pinnable(folio) is may


def test_plain_folios_are_not_mapped(mem):
    for kind in KINDS:
        folio = make(mem, kind)
        assert (mmc.folio_mapcount(folio), mmc.folio_expected_ref_count(folio), folio.page.mapcount) == (0, 0, 0)


def test_folio_beyond_eof_refs(mem):
    # An order-4 folio is split into order-2 pieces; the last, beyond the end of the file, holds 4 references.
    #   one put leaves 3 and leaks 4 pages; four bring them back
    free = mem.vmstat()["nr_free_pages"]
    pieces = mmc.folio_split(mmc.folio_alloc_at(mem, 32, 4), 2)
    assert [(piece.pfn, piece.order, piece.refcount) for piece in pieces] == [(32 + 4 * i, 2, 1) for i in range(4)]
    last = pieces[-1]
    mmc.try_grab_folio(last, 3, FOLL_GET)
    mmc.folio_put_refs(last, mmc.folio_nr_pages(last))
    assert mem.vmstat()["nr_free_pages"] == free - 12
    for piece in pieces[:-1]:
        mmc.folio_put(piece)
    assert mem.vmstat()["nr_free_pages"] == free
    mem.check()
