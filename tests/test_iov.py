"""Extraction of buffers into scatterlists and page lists, and block I/O on them."""
import numpy as np
import pytest
from hypothesis import given, strategies as st

import mmcore as mmc
from mmcore import BadPage, FOLL_WRITE, InvalidArgument, Memory, MMError, PageList
from mmcore.drivers.bio import Bio, bio_release_pages
from mmcore.drivers.iov import (ITER_DEST, ITER_SOURCE, extract_iter_to_sg, iov_iter_bvec, iov_iter_discard,
                                iov_iter_extract_pages, iov_iter_extract_will_pin, iov_iter_folioq, iov_iter_init,
                                iov_iter_kvec, iov_iter_ubuf)
from sg_support import PAGE, snapshot
from support import refused, released

VA = 0x7F0000000000


@pytest.fixture
def mem():
    return Memory("64M")


class User:
    """A user address space in one line: virtual page VA + i is page i of a list. pin() is what a GUP call would be."""

    def __init__(self, mem, nr):
        self.mem, self.pages, self.calls, self.fail_at, self.most = mem, mmc.alloc_pages_bulk(mem, nr), [], None, nr

    def pin(self, addr, nr_pages, gup_flags):
        self.calls.append((addr, nr_pages, int(gup_flags)))
        if self.fail_at == len(self.calls):
            raise MMError(14, "no mapping", addr=addr)
        first = (addr - VA) // PAGE
        pages = self.pages[first:first + min(nr_pages, self.most)]
        if len(pages):
            mmc.grab_pages(pages)
        return pages


def table(mem, nr, nents=0):
    sgt = mmc.sg_init_table(mem, nr)
    sgt.nents = sgt.orig_nents = nents
    return sgt


def held(sgt):
    """What extraction put there: (pfn, offset, length) up to nents."""
    return [(int(row["pfn"]), int(row["offset"]), int(row["length"])) for row in sgt.entries[:sgt.nents]]


def unpin(sgt, first=0):
    for pfn, _, _ in held(sgt)[first:]:
        mmc.unpin_user_page(sgt.mem.page(pfn))


# ---- kernel buffers ---------------------------------------------------------------------------------------------------
def test_t46_kernel_bytes_are_an_entry_a_page(mem):
    pages = mmc.alloc_pages_bulk(mem, 4)
    base = pages[0].pfn
    it = iov_iter_kvec(ITER_SOURCE, mem, [(base * PAGE + 100, 2 * PAGE + 500)])
    sgt = table(mem, 8)
    assert extract_iter_to_sg(it, 1 << 40, sgt, 8) == 2 * PAGE + 500
    assert held(sgt) == [(base, 100, PAGE - 100), (base + 1, 0, PAGE), (base + 2, 0, 600)]
    assert sgt.orig_nents == 0 and it.count == 0                # orig_nents stays, as in the kernel
    # When entries run out, the bytes are those that got one.
    it = iov_iter_kvec(ITER_SOURCE, mem, [(base * PAGE + 100, 2 * PAGE + 500)])
    sgt = table(mem, 8)
    assert extract_iter_to_sg(it, 1 << 40, sgt, 2) == 2 * PAGE - 100 and it.count == 600
    assert extract_iter_to_sg(it, 1 << 40, sgt, 2) == 600 and held(sgt)[2] == (base + 2, 0, 600)


def test_limits_that_end_extraction(mem):
    pages = mmc.alloc_pages_bulk(mem, 4)
    it = iov_iter_kvec(ITER_SOURCE, mem, [(pages[0].pfn * PAGE, 3 * PAGE)])
    sgt = table(mem, 4)
    assert extract_iter_to_sg(it, 0, sgt, 4) == extract_iter_to_sg(it, 100, sgt, 0) == 0 and sgt.nents == 0
    assert extract_iter_to_sg(it, 100, sgt, 4) == 100 and it.count == 3 * PAGE - 100
    with refused(mem, InvalidArgument, "room|left"):
        extract_iter_to_sg(it, 100, sgt, 4)
    for maxsize, sg_max in ((-1, 1), (1, -1), ("1", 1), (1, None)):
        with refused(mem, (InvalidArgument, TypeError)):
            extract_iter_to_sg(it, maxsize, sgt, sg_max)
    with refused(mem, InvalidArgument, "append table"):
        extract_iter_to_sg(it, 100, mmc.SGAppendTable(mem), 1)
    assert held(sgt) == [(pages[0].pfn, 0, 100)]


def test_a_discarding_iterator_has_no_pages(mem):
    it = iov_iter_discard(ITER_DEST, 100)
    with refused(mem, MMError, errno=5):
        extract_iter_to_sg(it, 100, table(mem, 1), 1)
    with refused(mem, MMError, errno=14):
        iov_iter_extract_pages(it, 100, 1, mem=mem)
    assert it.count == 100


def test_kernel_bytes_outside_of_the_memory(mem):
    for at, length in ((mem.nr_pages * PAGE - 1, 2), (1 << 60, 1), (0, 1), (-1, 1), ((1 << 64) - 1, 2)):
        with refused(mem, InvalidArgument):
            iov_iter_kvec(ITER_SOURCE, mem, [(at, length)])
    with refused(mem, InvalidArgument):
        iov_iter_kvec(7, mem, [])


# ---- pieces and folios --------------------------------------------------------------------------------------------------
def test_bvecs_are_an_entry_each(mem):
    folio = mmc.folio_alloc(mem, 3)
    it = iov_iter_bvec(ITER_SOURCE, [(folio.page, 100, 3 * PAGE), (folio.page, 0, 0), (mmc.folio_page(folio, 5), 0, 10)])
    sgt = table(mem, 4)
    assert extract_iter_to_sg(it, 2 * PAGE, sgt, 4) == 2 * PAGE
    assert extract_iter_to_sg(it, 1 << 30, sgt, 3) == PAGE + 10
    assert held(sgt) == [(folio.pfn, 100, 2 * PAGE), (folio.pfn + 2, 100, PAGE), (folio.pfn + 5, 0, 10)]
    assert folio.refcount == 1 and not iov_iter_extract_will_pin(it)


def test_t49_only_the_first_folio_has_the_offset(mem):
    folios = [mmc.folio_alloc(mem, 1) for _ in range(3)]
    it = iov_iter_folioq(ITER_DEST, folios, 5000, 4 * PAGE)
    sgt = table(mem, 4)
    assert extract_iter_to_sg(it, 1 << 30, sgt, 4) == 4 * PAGE
    # The head of the folio and an offset beyond a page would do for the kernel; here the page that it reaches.
    assert held(sgt) == [(folios[0].pfn + 1, 904, PAGE - 904), (folios[1].pfn, 0, 2 * PAGE), (folios[2].pfn, 0, PAGE + 904)]
    for offset, count in ((7 * PAGE, 1), (0, 7 * PAGE), (-1, 1)):
        with refused(mem, InvalidArgument):
            iov_iter_folioq(ITER_DEST, folios, offset, count)


# ---- user buffers -------------------------------------------------------------------------------------------------------
def test_user_pages_are_pinned_an_entry_each(mem):
    user = User(mem, 8)
    pfns = user.pages.pfns.tolist()
    it = iov_iter_ubuf(ITER_DEST, VA + 100, 3 * PAGE)
    assert iov_iter_extract_will_pin(it)
    sgt = table(mem, 8)
    assert extract_iter_to_sg(it, 1 << 40, sgt, 8, pin=user.pin) == 3 * PAGE
    assert held(sgt) == [(pfns[0], 100, PAGE - 100), (pfns[1], 0, PAGE), (pfns[2], 0, PAGE), (pfns[3], 0, 100)]
    assert user.calls == [(VA, 4, int(FOLL_WRITE))]
    assert [page.folio.pincount for page in user.pages] == [1, 1, 1, 1, 0, 0, 0, 0]
    unpin(sgt)
    released(mem)
    # A source is not written to.
    source = iov_iter_ubuf(ITER_SOURCE, VA, 10)
    extract_iter_to_sg(source, 10, sgt, 4, pin=user.pin)
    assert user.calls[-1] == (VA, 1, 0)


def test_user_buffers_need_a_pin(mem):
    it = iov_iter_ubuf(ITER_DEST, VA, PAGE)
    with refused(mem, InvalidArgument, "pin="):
        extract_iter_to_sg(it, PAGE, table(mem, 1), 1)


def test_t47_more_than_the_iterator_has(mem):
    """maxsize beyond what is there: the bytes so far, and nothing is unpinned."""
    user = User(mem, 4)
    it = iov_iter_init(ITER_DEST, [(VA, PAGE), (VA + PAGE, 100)])
    sgt = table(mem, 8)
    assert extract_iter_to_sg(it, 1 << 40, sgt, 8, pin=user.pin) == PAGE + 100
    assert it.count == 0 and sgt.nents == 2 and [page.folio.pincount for page in user.pages] == [1, 1, 0, 0]
    assert extract_iter_to_sg(it, 1 << 40, sgt, 6, pin=user.pin) == 0 and sgt.nents == 2
    unpin(sgt)
    released(mem)


def test_a_short_pin_is_gone_on_with(mem):
    user = User(mem, 8)
    user.most = 2
    it = iov_iter_ubuf(ITER_DEST, VA + 50, 5 * PAGE)
    sgt = table(mem, 8)
    assert extract_iter_to_sg(it, 1 << 40, sgt, 8, pin=user.pin) == 5 * PAGE
    assert [call[:2] for call in user.calls] == [(VA, 6), (VA + 2 * PAGE, 4), (VA + 4 * PAGE, 2)]
    assert len(held(sgt)) == 6 and sum(length for _, _, length in held(sgt)) == 5 * PAGE
    unpin(sgt)
    user.most = 0
    assert extract_iter_to_sg(iov_iter_ubuf(ITER_DEST, VA, PAGE), PAGE, table(mem, 1), 1, pin=user.pin) == 0
    released(mem)


def test_a_pin_that_fails_on_the_way(mem):
    user = User(mem, 8)
    user.most, user.fail_at = 2, 3
    it = iov_iter_ubuf(ITER_DEST, VA, 6 * PAGE)
    sgt = table(mem, 9)
    mmc.sg_set_page(sgt[0], mem.page(9), 1, 2)
    sgt.nents = 1
    with pytest.raises(MMError) as caught:
        extract_iter_to_sg(it, 1 << 40, sgt, 8, pin=user.pin)
    assert caught.value.errno == 14
    assert held(sgt) == [(9, 2, 1)] and it.count == 6 * PAGE     # what was there before stays
    released(mem)


def test_t48_extraction_goes_behind_what_is_there(mem):
    """A table with a live entry, and just the room for the rest: the live one is not overwritten."""
    user = User(mem, 4)
    other = mmc.alloc_page(mem)
    sgt = table(mem, 4)
    mmc.sg_set_page(sgt[0], other, 77, 5)
    sgt.nents = 1
    assert extract_iter_to_sg(iov_iter_ubuf(ITER_DEST, VA, 3 * PAGE), 1 << 40, sgt, 3, pin=user.pin) == 3 * PAGE
    pfns = user.pages.pfns.tolist()
    assert held(sgt) == [(other.pfn, 5, 77), (pfns[0], 0, PAGE), (pfns[1], 0, PAGE), (pfns[2], 0, PAGE)]
    unpin(sgt, 1)
    released(mem)


# ---- lists of pages -------------------------------------------------------------------------------------------------------
def test_pages_of_iterators(mem):
    pages = mmc.alloc_pages_bulk(mem, 8)
    pfns = pages.pfns.tolist()
    it = iov_iter_kvec(ITER_SOURCE, mem, [(pfns[0] * PAGE + 100, 2 * PAGE)])
    n, found, offset = iov_iter_extract_pages(it, 1 << 40, 2)
    assert (n, found.pfns.tolist(), offset) == (2 * PAGE - 100, pfns[:2], 100)
    assert iov_iter_extract_pages(it, 1 << 40, 9)[0] == 100
    # Pieces join at page boundaries only.
    it = iov_iter_bvec(ITER_SOURCE, [(pages[0], 96, PAGE - 96), (pages[1], 0, PAGE), (pages[5], 0, 10), (pages[6], 0, 10)])
    n, found, offset = iov_iter_extract_pages(it, 1 << 40, 9)
    assert (n, found.pfns.tolist(), offset) == (2 * PAGE - 96 + 10, [pfns[0], pfns[1], pfns[5]], 96)
    assert iov_iter_extract_pages(it, 1 << 40, 9)[1].pfns.tolist() == [pfns[6]]
    assert iov_iter_extract_pages(it, 1 << 40, 9)[0] == 0
    folios = [mmc.folio_alloc(mem, 1) for _ in range(2)]
    it = iov_iter_folioq(ITER_SOURCE, folios, 5000, 2 * PAGE)
    n, found, offset = iov_iter_extract_pages(it, 1 << 40, 9)
    assert (n, found.pfns.tolist(), offset) == (2 * PAGE, [folios[0].pfn + 1, folios[1].pfn, folios[1].pfn + 1], 904)


def test_advance_and_revert(mem):
    it = iov_iter_init(ITER_SOURCE, [(VA, 10), (VA + 100, 0), (VA + 200, 10)])
    it.advance(15)
    assert it.segment() == ((VA + 200, 10), 5, 5)
    it.revert(7)
    assert it.segment() == ((VA, 10), 8, 2)
    for call, n in ((it.advance, 13), (it.revert, 9), (it.advance, -1)):
        with pytest.raises(InvalidArgument):
            call(n)


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 4095), st.integers(0, 9000)), min_size=1, max_size=6),
       st.lists(st.tuples(st.integers(1, 20000), st.integers(1, 6)), max_size=10), st.sampled_from(["kvec", "bvec"]))
def test_extraction_names_every_byte_once(segments, steps, kind):
    mem = MEM
    base = POOL.pfns[0]
    if kind == "kvec":
        it = iov_iter_kvec(ITER_SOURCE, mem, [(int(base + page) * PAGE + offset, n) for page, offset, n in segments])
    else:
        it = iov_iter_bvec(ITER_SOURCE, [(mem.page(int(base) + page), offset, n) for page, offset, n in segments])
    wanted = [int(base + page) * PAGE + offset + k for page, offset, n in segments for k in range(0, n, 1)]
    sgt = table(mem, 80)
    done = 0
    for maxsize, sg_max in [*steps, (1 << 40, 0)]:
        before = sgt.nents
        n = extract_iter_to_sg(it, maxsize, sgt, min(sg_max, 80 - before))
        assert n <= maxsize and sgt.nents - before <= sg_max
        done += n
        assert it.count == len(wanted) - done
    named = [pfn * PAGE + offset + k for pfn, offset, length in held(sgt) for k in range(length)]
    assert named == wanted[:done]
    if kind == "kvec":
        assert all(offset + length <= PAGE for _, offset, length in held(sgt))


MEM = Memory("8M")
POOL = mmc.alloc_pages_bulk(MEM, 64)


# ---- reports ----------------------------------------------------------------------------------------------------------------
def test_sg_extract_zero_sized(mem):
    """An empty segment first: it is passed over, and does not end the extraction."""
    pages = mmc.alloc_pages_bulk(mem, 2)
    at = pages[0].pfn * PAGE
    it = iov_iter_kvec(ITER_SOURCE, mem, [(at, 0), (at, 2 * PAGE)])
    n, found, offset = iov_iter_extract_pages(it, 8192, 16)
    assert (n, found, offset, it.count) == (8192, pages, 0, 0)
    it = iov_iter_kvec(ITER_SOURCE, mem, [(at, 0), (at, 2 * PAGE), (at, 0)])
    sgt = table(mem, 4)
    assert extract_iter_to_sg(it, 8192, sgt, 4) == 8192 and len(held(sgt)) == 2


def test_sg_multi_iov_short(mem):
    """The first of two buffers ends within its page: no foreign bytes, and the second one follows."""
    user = User(mem, 4)
    pfns = user.pages.pfns.tolist()
    it = iov_iter_init(ITER_SOURCE, [(VA, 1000), (VA + 2 * PAGE, 3096)])
    sgt = table(mem, 4)
    assert extract_iter_to_sg(it, 4096, sgt, 4, pin=user.pin) == 4096
    assert held(sgt) == [(pfns[0], 0, 1000), (pfns[2], 0, 3096)]
    assert [page.folio.pincount for page in user.pages] == [1, 0, 1, 0]
    unpin(sgt)
    # Both in one page: it is named twice and pinned twice, once an entry, so that unpinning by entry balances.
    it = iov_iter_init(ITER_SOURCE, [(VA, 1000), (VA + 1000, 3096)])
    sgt = table(mem, 4)
    extract_iter_to_sg(it, 4096, sgt, 4, pin=user.pin)
    assert [page.folio.pincount for page in user.pages] == [2, 0, 0, 0]
    unpin(sgt)
    released(mem)


def test_sg_bio_merge_same_page(mem):
    """Two pieces of one page become one, and the second reference goes back at once."""
    page = mmc.alloc_page(mem)
    bio = Bio(mem, pins=False)
    bio.map_page(page, 512, 0)
    bio.map_page(page, 512, 512)
    assert bio.bvecs == [[page.pfn, 0, 1024]] and page.refcount == 2
    sgt = bio.to_sg()
    assert held(sgt) == [(page.pfn, 0, 1024)]
    bio_release_pages(bio)
    assert page.refcount == 1
    # A piece that ends at the end of its page joins the next page's, and both keep their reference.
    pages = mmc.alloc_pages_bulk(mem, 2)
    bio = Bio(mem)
    bio.map_page(pages[0], PAGE - 100, 100)
    bio.map_page(pages[1], 10, 0)
    bio.map_page(pages[1], 10, 10)
    assert bio.bvecs == [[pages[0].pfn, 100, PAGE - 80]] and [page.folio.pincount for page in pages] == [1, 1]
    bio_release_pages(bio, mark_dirty=True)
    assert all(page.folio.dirty for page in pages)
    released(mem)


def test_t57_the_page_of_the_last_byte(mem):
    """A piece that spans a folio and ends in its fourth page, and more of that page: the pin must go back."""
    folio = mmc.folio_alloc(mem, 2)
    bio = Bio(mem)
    for index, offset, length in ((0, 0, PAGE), (1, 0, PAGE), (2, 0, PAGE), (3, 0, 100), (3, 100, 200)):
        bio.map_page(mmc.folio_page(folio, index), length, offset)
    assert bio.bvecs == [[folio.pfn, 0, 3 * PAGE + 300]] and folio.pincount == 4
    bio_release_pages(bio)
    assert folio.pincount == 0
    released(mem)


@pytest.mark.parametrize("offset, length", [(2048, 4096), (4095, 2), (0, 4096), (1, 4095), (2048, 3 * 4096)])
def test_sg_bio_release_unaligned(mem, offset, length):
    """What is given back is counted by the pages that are touched, not by the length."""
    folio = mmc.folio_alloc_at(mem, 32, 2)
    touched = (offset + length - 1) // PAGE + 1
    mmc.try_grab_folio(folio, touched)
    bio = Bio(mem)
    bio.bvecs.append([folio.pfn, offset, length])
    bio_release_pages(bio)
    assert (folio.pincount, folio.refcount) == (0, 1)
    released(mem)


def test_pieces_that_are_none(mem):
    bio, page = Bio(mem), mmc.alloc_page(mem)
    for length, offset in ((0, 0), (PAGE + 1, 0), (2, PAGE - 1), (1, -1)):
        with refused(mem, InvalidArgument):
            bio.map_page(page, length, offset)
    assert bio.bvecs == []


def test_a_table_is_as_it_was_after_a_refusal(mem):
    sgt = table(mem, 2)
    before = snapshot(sgt)
    other = Memory("4M")
    it = iov_iter_bvec(ITER_SOURCE, [(mmc.alloc_page(other), 0, 10), (mmc.alloc_page(other), 0, 10)])
    with refused(mem, InvalidArgument, "another Memory"):
        extract_iter_to_sg(it, 100, sgt, 2)
    assert sgt.nents == 0 and snapshot(sgt)[1:] == before[1:] and it.count == 20
    with pytest.raises(InvalidArgument):
        iov_iter_extract_pages(iov_iter_ubuf(ITER_DEST, VA, 10), 10, 1, pin=lambda *args: PageList(mem))


def test_bvecs_are_pieces_of_folios():
    #   | folio A: pages 1..3 | A: page 0 | B (order 0), behind A in memory | C |
    mem = mmc.Memory("16M")
    a = mmc.folio_alloc_at(mem, 64, 2).pfn
    b, c = mmc.folio_alloc_at(mem, 68, 0).pfn, mmc.folio_alloc_at(mem, 90, 0).pfn
    pfns = [a + 1, a + 2, a + 3, b, a, c]

    def pin(addr, nr, flags):
        pages = mmc.PageList(mem, pfns[addr // PAGE - 16:][:nr])
        mmc.grab_pages(pages)
        return pages
    it = iov_iter_ubuf(mmc.ITER_DEST, 16 * PAGE + 100, 6 * PAGE - 200)
    got, bvecs = mmc.iov_iter_extract_bvecs(it, 1 << 30, 16, mem=mem, pin=pin)
    assert got == 6 * PAGE - 200 and it.count == 0
    assert [(page.pfn, offset, length) for page, offset, length in bvecs] == [
        (a + 1, 100, 3 * PAGE - 100), (b, 0, PAGE), (a, 0, PAGE), (c, 0, PAGE - 100)]
    bio = Bio(mem)
    bio.bvecs = [[page.pfn, offset, length] for page, offset, length in bvecs]
    bio_release_pages(bio)
    released(mem)


def test_bvecs_stop_where_the_device_map_changes():
    mem = mmc.Memory("16M", devices=(mmc.DevicePages("2M"),))
    device, small = mem.devices[0].start_pfn, mmc.alloc_page(mem).pfn

    def pin(addr, nr, flags):
        pages = mmc.PageList(mem, [small, device, device + 1][:nr])
        mmc.grab_pages(pages)
        return pages
    it = iov_iter_ubuf(mmc.ITER_SOURCE, 16 * PAGE, 3 * PAGE)
    got, bvecs = mmc.iov_iter_extract_bvecs(it, 1 << 30, 16, mem=mem, pin=pin)
    assert got == PAGE and [page.pfn for page, *_ in bvecs] == [small] and it.count == 2 * PAGE
    stat = mem.vmstat()
    assert stat["nr_foll_pin_acquired"] - stat["nr_foll_pin_released"] == 1
    mmc.unpin_user_page(mem.page(small))
    released(mem)


def test_bvecs_that_cannot_be():
    mem = mmc.Memory("16M")
    page = mmc.alloc_page(mem)
    for it, mask, error, number in (
            (iov_iter_ubuf(mmc.ITER_DEST, 16 * PAGE, 0), 0, MMError, 14), (mmc.iov_iter_discard(mmc.ITER_DEST, 9), 0, MMError, 14),
            (iov_iter_ubuf(mmc.ITER_DEST, 16 * PAGE + 2, 512), 3, InvalidArgument, 22),
            (mmc.iov_iter_bvec(mmc.ITER_DEST, [(page, 0, 510)]), 511, InvalidArgument, 22)):
        with pytest.raises(error) as caught:
            mmc.iov_iter_extract_bvecs(it, 1 << 20, 4, mem=mem, pin=None, mem_align_mask=mask)
        assert caught.value.errno == number
    got, bvecs = mmc.iov_iter_extract_bvecs(mmc.iov_iter_bvec(mmc.ITER_DEST, [(page, 512, 512)]), 1 << 20, 4, mem=mem, mem_align_mask=511)
    assert got == 512 and bvecs == [(page, 512, 512)] and page.refcount == 1


def test_an_iterator_says_what_is_left_and_which_memory_it_needs(mem):
    it = iov_iter_bvec(ITER_DEST, [(mem.page(20), 0, PAGE), (mem.page(21), 0, PAGE)])
    assert repr(it) == f"<IovIter bvec, {2 * PAGE} bytes left of 2 segments>"
    empty = iov_iter_bvec(ITER_DEST, [])
    with refused(mem, InvalidArgument, "names no Memory: pass mem="):
        iov_iter_extract_pages(empty, PAGE, 1)
    assert iov_iter_extract_pages(empty, PAGE, 1, mem=mem) == (0, PageList(mem), 0)


@pytest.mark.parametrize("wrong", [None, 5, "ab", (1,), (None, 0, 1), (1.5, 1), (True, 1), (-1, 1), (1 << 64, 1)])
def test_segments_that_are_none(mem, wrong):
    page = mmc.alloc_page(mem)
    for make in (lambda: iov_iter_init(ITER_DEST, [(VA, 1), wrong]), lambda: iov_iter_kvec(ITER_DEST, mem, [(PAGE, 1), wrong]),
                 lambda: iov_iter_bvec(ITER_DEST, [(page, 0, 1), wrong]), lambda: iov_iter_folioq(ITER_DEST, [page.folio, wrong], 0, 1),
                 lambda: iov_iter_kvec(ITER_DEST, wrong, []), lambda: extract_iter_to_sg(wrong, 1, table(mem, 1), 1),
                 lambda: extract_iter_to_sg(iov_iter_ubuf(ITER_DEST, VA, 1), 1, wrong, 1),
                 lambda: iov_iter_extract_pages(wrong, 1, 1), lambda: mmc.iov_iter_extract_bvecs(wrong, 1, 1),
                 lambda: mmc.iov_iter_extract_will_pin(wrong)):
        with refused(mem, (TypeError, InvalidArgument)):
            make()


def test_pieces_that_leave_the_memory_or_are_of_two(mem):
    """They are refused when the iterator is made: extraction would name pages that are others', or move on and then fail."""
    last, there = mem.page(mem.nr_pages - 1), mmc.alloc_page(Memory("4M"))
    with refused(mem, InvalidArgument, "leave the Memory"):
        iov_iter_bvec(ITER_SOURCE, [(last, 1, PAGE)])
    assert iov_iter_extract_pages(iov_iter_bvec(ITER_SOURCE, [(last, 0, PAGE)]), PAGE, 1)[0] == PAGE
    for make, segments in ((iov_iter_bvec, ([(last, 0, 1), (there, 0, 1)],)), (iov_iter_folioq, ([last.folio, there.folio], 0, 1))):
        with refused(mem, InvalidArgument, "two Memories"):
            make(ITER_SOURCE, *segments)


@pytest.mark.parametrize("wrong", [1.5, True, None, "1", -1, np.float64(1)])
def test_numbers_that_move_no_iterator(mem, wrong):
    it = iov_iter_ubuf(ITER_DEST, VA, 10)
    it.advance(np.uint8(5))
    for call in (it.advance, it.revert, lambda n: mmc.iov_iter_extract_bvecs(it, 1, 1, mem=mem, mem_align_mask=n)):
        with pytest.raises((TypeError, InvalidArgument)):
            call(wrong)
    assert (it.position, it.count) == (5, 5) and type(it.position) is int


def test_pins_that_were_not_asked_for_are_given_back(mem):
    def pin(of, nr):
        pages = mmc.alloc_pages_bulk(of, nr)
        mmc.grab_pages(pages)
        return pages
    other = Memory("4M")
    for of, nr in ((mem, 3), (other, 1)):
        it = iov_iter_ubuf(ITER_DEST, VA, PAGE)
        with pytest.raises(InvalidArgument, match=f"returned {nr} pages"):
            extract_iter_to_sg(it, PAGE, table(mem, 4), 4, pin=lambda *_: pin(of, nr))
        assert it.count == PAGE and of.vmstat()["nr_foll_pin_acquired"] == of.vmstat()["nr_foll_pin_released"]
    with pytest.raises(TypeError, match="a PageList from pin"):
        iov_iter_extract_pages(iov_iter_ubuf(ITER_DEST, VA, 1), 1, 1, mem=mem, pin=lambda *_: [mem.zero_page])


@pytest.mark.parametrize("pinned", [False, True])
def test_a_bio_is_released_whole_or_not_at_all(mem, pinned):
    bio, pages = Bio(mem, pins=pinned), mmc.alloc_pages_bulk(mem, 3)
    for page in list(pages)[::2]:
        bio.map_page(page, 100, 0)
        bio.map_page(page, 100, 100)
    bvecs = [list(bvec) for bvec in bio.bvecs]
    release = mmc.unpin_user_page if pinned else mmc.put_page
    release(pages[2])
    if not pinned:
        release(pages[2])
    with refused(mem, BadPage):
        bio_release_pages(bio, True)
    assert bio.bvecs == bvecs


@pytest.mark.parametrize("length, offset", [(1.5, 0), (True, 0), ("1", 0), (None, 0), (1, -1), (1, 0.0), (PAGE, 1), (0, 0), (-1, 0)])
def test_pieces_that_are_no_pages(mem, length, offset):
    bio, page, there = Bio(mem), mmc.alloc_page(mem), mmc.alloc_page(Memory("4M"))
    for call in (bio.map_page, bio.add_page):
        if (call, length, offset) != (bio.add_page, PAGE, 1):       # may go on into the next page
            with refused(mem, (TypeError, InvalidArgument)):
                call(page, length, offset)
        for other in (there, None, page.folio):
            with refused(mem, (TypeError, InvalidArgument)):
                call(other, 1, 0)
    for wrong in (None, 5, "mem"):
        with pytest.raises(TypeError):
            Bio(wrong)
        with pytest.raises(TypeError):
            bio_release_pages(wrong)
    assert bio.bvecs == []


def test_a_piece_of_several_pages(mem):
    """What iov_iter_extract_bvecs() names is added as it is; each page of it has its pin."""
    folio = mmc.folio_alloc(mem, 3)
    pages = PageList(mem, range(folio.pfn, folio.pfn + 8))
    mmc.grab_pages(pages)
    bio = Bio(mem)
    mmc.grab_pages(pages[3:4])                          # of two pieces that touch it
    bio.add_page(pages[1], 2 * PAGE + 100, 200)
    bio.add_page(pages[3], PAGE - 300, 300)             # where that one ends
    assert bio.bvecs == [[folio.pfn + 1, 200, 3 * PAGE - 200]] and folio.pincount == 8
    for wrong in ((mem.page(mem.nr_pages - 1), PAGE, 1), (pages[0], 1, PAGE), (pages[0], 1 << 32, 0)):
        with refused(mem, InvalidArgument):
            bio.add_page(*wrong)
    bio_release_pages(bio, True)
    assert folio.pincount == 5 and folio.dirty


def test_a_table_that_cannot_grow_is_refused_before_anything_is_pinned(mem):
    user = User(mem, 4)
    device, behind, it = mmc.Device(mem), table(mem, 1, 1), iov_iter_ubuf(ITER_DEST, VA, 3 * PAGE)
    busy, front, freed = table(mem, 8, 1), table(mem, 8), table(mem, 8, 1)
    for sgt in (busy, front, behind, freed):
        mmc.sg_set_page(sgt[0], user.pages[0], PAGE, 0)
    mmc.dma_map_sgtable(device, busy)
    mmc.sg_chain(front, 2, behind)
    for sgt, error, match in ((busy, MMError, "mapped for DMA"), (front, InvalidArgument, "chained")):
        with refused(mem, error, match):
            extract_iter_to_sg(it, 3 * PAGE, sgt, 3, pin=user.pin)
    assert user.calls == []

    def pin(*args):
        mmc.sg_free_table(freed)
        return user.pin(*args)

    with refused(mem, InvalidArgument):
        extract_iter_to_sg(it, 3 * PAGE, freed, 3, pin=pin)
    assert it.count == 3 * PAGE
    released(mem)


def test_a_pin_that_moves_its_own_iterator(mem):
    """The iterator stands behind what was extracted, and the pins are the caller's, whatever the callback did."""
    user = User(mem, 4)
    it = iov_iter_ubuf(ITER_DEST, VA, 4 * PAGE)

    def pin(addr, nr_pages, gup_flags):
        it.advance(3 * PAGE)
        return user.pin(addr, nr_pages, gup_flags)

    n, pages, offset = iov_iter_extract_pages(it, 2 * PAGE, 8, mem=mem, pin=pin)
    assert (n, len(pages), offset, it.position) == (2 * PAGE, 2, 0, 2 * PAGE)
    mmc.unpin_user_pages(pages)
    released(mem)


def test_an_iterator_of_no_segments_has_none():
    with pytest.raises(InvalidArgument, match="no segments"):
        iov_iter_bvec(ITER_DEST, []).segment()
