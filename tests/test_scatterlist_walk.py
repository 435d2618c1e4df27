"""Walking, copying and splitting scatterlists."""
import numpy as np
import pytest

import mmcore as mmc
from mmcore import (BadPage, InvalidArgument, Memory, MMError, PageRanges, SG_MITER_ATOMIC, SG_MITER_FROM_SG, SG_MITER_LOCAL,
                    SG_MITER_TO_SG, SGAppendTable)
from sg_support import PAGE, UINT_MAX, alloc, append, build, dma_rows, entries, rows
from support import refused, unchanged


@pytest.fixture
def mem():
    return Memory("8G")


def pfns(sgt, skip=0):
    """PFNs by the iterator; the bulk form must say the same."""
    by_page = [page.pfn for page in mmc.sg_page_iter(sgt, skip)]
    assert mmc.sg_page_pfns(sgt, skip).tolist() == by_page
    return by_page


def filled(mem, pieces):
    """A table over fresh pages: pieces are (page index, offset, length); the bytes of page i are all i + 1."""
    pages = alloc(mem, 1 + max(page + (offset + length) // PAGE for page, offset, length in pieces))
    for i, page in enumerate(pages):
        mmc.page_address(page)[:] = bytes([(i + 1) & 255]) * PAGE
    return pages, entries(mem, [(pages[page].pfn, offset, length) for page, offset, length in pieces])


# ---- counting -------------------------------------------------------------------------------------------------------
def test_nents_for_len(mem):
    sgt = entries(mem, [(20, 0, 100), (30, 0, 0), (40, 0, 50)])
    assert [mmc.sg_nents_for_len(sgt, n) for n in (0, 1, 100, 101, 150)] == [0, 1, 1, 3, 3]
    with refused(mem, InvalidArgument, errno=22):
        mmc.sg_nents_for_len(sgt, 151)
    with refused(mem, InvalidArgument):
        mmc.sg_nents_for_len(sgt, -1)
    assert mmc.sg_nents(None) == 0


def test_an_empty_table(mem):
    sgt = mmc.SGTable(mem)
    assert list(mmc.for_each_sg(sgt)) == [] and mmc.sg_nents(sgt) == 0 and pfns(sgt) == []
    assert mmc.sg_copy_to_buffer(sgt, bytearray(10)) == 0
    with refused(mem, InvalidArgument):
        mmc.sg_last(sgt)
    with pytest.raises(IndexError):
        sgt[0]
    assert list(mmc.sg_miter(sgt, SG_MITER_FROM_SG)) == []


# ---- pages ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("offset, length, nr", [
    (0, 4096, 1),
    (1, 4096, 2),                   # T20: by the length alone it would be 1
    (4095, 2, 2),
    (0, 0, 0),
    (100, 0, 0),                    # T21: the kernel gives 1
    (0, 0xFFFFF000, 1048575)])
def test_t20_t21_pages_of_an_entry(mem, offset, length, nr):
    sgt = entries(mem, [(16, offset, length)])
    found = mmc.sg_page_pfns(sgt)
    assert len(found) == nr and (not nr or (found[0], found[-1]) == (16, 16 + nr - 1))
    if nr < 10:
        assert pfns(sgt) == list(range(16, 16 + nr))


@pytest.mark.parametrize("length", [0xFFFFF000, 0xFFFFF900])
def test_t22_offset_and_length_beyond_32_bits(mem, length):
    sgt = entries(mem, [(16, 0x800, length)])
    assert len(mmc.sg_page_pfns(sgt)) == -(-(0x800 + length) // PAGE) == 1 << 20 if length == 0xFFFFF000 else (1 << 20) + 1


def test_offsets_beyond_a_page_start_where_the_data_is(mem):
    # The kernel gives 2 pages for (5000, 100), the first of them before the data.
    assert pfns(entries(mem, [(16, 5000, 100)])) == [17]
    assert pfns(entries(mem, [(16, 8192, 4096), (30, 0, 1)])) == [18, 30]


def test_the_start_crosses_entries(mem):
    sgt = entries(mem, [(16, 0, 2 * PAGE), (20, 100, 0), (30, 4000, 200), (40, 0, 1)])
    everything = [16, 17, 30, 31, 40]
    for skip in range(8):
        assert pfns(sgt, skip) == everything[skip:]
    for skip in (1 << 63, (1 << 64) - 1):
        assert pfns(sgt, skip) == []
    with refused(mem, InvalidArgument):
        mmc.sg_page_iter(sgt, -1)
    assert list(mmc.for_each_sg_page(sgt)) == [mem.page(pfn) for pfn in everything]


def test_blank_entries_have_no_pages(mem):
    sgt = mmc.sg_alloc_table(mem, 2)
    assert pfns(sgt) == []
    sgt[1].length = 10
    for call in (mmc.sg_page_iter, mmc.sg_page_pfns):
        with refused(mem, InvalidArgument, "no page"):
            call(sgt)
    with refused(mem, InvalidArgument, "no page"):
        mmc.sg_copy_to_buffer(sgt, bytearray(10))
    with refused(mem, InvalidArgument, "no page"):
        list(mmc.sg_miter(sgt, SG_MITER_TO_SG))


def test_dma_pages(mem):
    sgt = build(mem, [16, 17, 30])
    sgt[0].dma_address, sgt[0].dma_length = 0x10800, 2 * PAGE
    sgt[1].dma_address, sgt[1].dma_length = 0x40000, 1
    assert list(mmc.sg_dma_page_iter(sgt)) == [0x10800, 0x11800, 0x12800, 0x40000]
    assert list(mmc.sg_dma_page_iter(sgt, 2)) == [0x12800, 0x40000]
    assert list(mmc.sg_dma_page_iter(sgt, 9)) == []


# ---- windows ----------------------------------------------------------------------------------------------------------
def test_windows_never_cross_a_page(mem):
    pages, sgt = filled(mem, [(0, 100, 2 * PAGE), (5, 0, 10)])
    windows = [bytes(window) for window in mmc.sg_miter(sgt, SG_MITER_FROM_SG)]
    assert [len(window) for window in windows] == [PAGE - 100, PAGE, 100, 10]
    assert [window[0] for window in windows] == [1, 2, 3, 6]


def test_t39_an_offset_beyond_a_page_is_normalised(mem):
    pages, sgt = filled(mem, [(0, 2 * PAGE + 10, PAGE)])
    miter = mmc.sg_miter(sgt, SG_MITER_FROM_SG)
    window = next(miter)
    assert (len(window), window[0], miter.page) == (PAGE - 10, 3, pages[2])
    window = next(miter)
    assert (len(window), window[0]) == (10, 4)
    out = bytearray(PAGE)
    assert mmc.sg_copy_to_buffer(sgt, out) == PAGE and out == bytes([3]) * (PAGE - 10) + bytes([4]) * 10


def test_consumed_gives_the_rest_again(mem):
    pages, sgt = filled(mem, [(0, 0, PAGE), (1, 0, PAGE)])
    miter = mmc.sg_miter(sgt, SG_MITER_TO_SG | SG_MITER_ATOMIC | SG_MITER_LOCAL)
    window = next(miter)
    window[:] = b"x" * PAGE
    miter.consumed = 96
    assert miter.length == PAGE
    with refused(mem, InvalidArgument):
        miter.consumed = PAGE + 1
    del window
    window = next(miter)
    assert (len(window), miter.consumed, miter.page) == (PAGE - 96, PAGE - 96, pages[0])
    miter.consumed = 0
    miter.stop()
    with pytest.raises(ValueError):
        window[0]                                   # a stopped window is gone
    assert len(next(miter)) == PAGE - 96            # going on after stop()
    assert len(next(miter)) == PAGE
    with pytest.raises(StopIteration):
        next(miter)
    assert bytes(mmc.page_address(pages[0])) == b"x" * PAGE


def test_skipping(mem):
    pages, sgt = filled(mem, [(0, 100, 200), (1, 0, 0), (2, 0, 300)])
    for first in range(0, 501, 25):
        miter = mmc.sg_miter(sgt, SG_MITER_FROM_SG)
        assert miter.skip(first) is True
        assert sum(len(window) for window in miter) == 500 - first
        miter = mmc.sg_miter(sgt, SG_MITER_FROM_SG)
        assert miter.skip(first // 2) and miter.skip(first - first // 2)
        assert sum(len(window) for window in miter) == 500 - first
    miter = mmc.sg_miter(sgt, SG_MITER_FROM_SG)
    assert miter.skip(501) is False and list(miter) == []


def test_t42_skip_tells_the_end_from_beyond(mem):
    pages, sgt = filled(mem, [(0, 0, 500)])
    miter = mmc.sg_miter(sgt, SG_MITER_FROM_SG)
    assert miter.skip(500) is True and list(miter) == []
    assert mmc.sg_miter(sgt, SG_MITER_FROM_SG).skip(501) is False
    assert mmc.sg_pcopy_to_buffer(sgt, bytearray(10), 500) == mmc.sg_pcopy_to_buffer(sgt, bytearray(10), 501) == 0


def test_t41_a_negative_skip_is_refused(mem):
    pages, sgt = filled(mem, [(0, 0, 500)])
    with unchanged(mem):
        with pytest.raises(InvalidArgument):
            mmc.sg_miter(sgt, SG_MITER_FROM_SG).skip(-1)
        for call in (mmc.sg_pcopy_to_buffer, mmc.sg_pcopy_from_buffer):
            with pytest.raises(InvalidArgument):
                call(sgt, bytearray(10), -1)
        for args in ((10, -1), (-1, 0)):
            with pytest.raises(InvalidArgument):
                mmc.sg_zero_buffer(sgt, *args)


def test_windows_go_the_way_that_is_asked(mem):
    pages, sgt = filled(mem, [(0, 0, 10)])
    with refused(mem, InvalidArgument, "which way"):
        mmc.sg_miter(sgt, SG_MITER_ATOMIC)
    with pytest.raises(TypeError):
        next(mmc.sg_miter(sgt, SG_MITER_FROM_SG))[0] = 1
    zero = entries(mem, [(mem.zero_page.pfn, 0, 10)])
    with refused(mem, InvalidArgument, "zero page"):
        next(mmc.sg_miter(zero, SG_MITER_TO_SG))
    assert bytes(next(mmc.sg_miter(zero, SG_MITER_FROM_SG))) == bytes(10)


def test_a_window_keeps_the_memory_open(mem):
    pages, sgt = filled(mem, [(0, 0, 10)])
    miter = mmc.sg_miter(sgt, SG_MITER_FROM_SG)
    window = next(miter)
    with pytest.raises(MMError):
        mem.close()
    miter.stop()
    del window
    mem.close()
    with pytest.raises(InvalidArgument):
        next(miter)


def test_an_array_made_of_a_window_outlives_it(mem):
    pages, sgt = filled(mem, [(0, 0, 10)])
    miter = mmc.sg_miter(sgt, SG_MITER_FROM_SG)
    array = np.frombuffer(next(miter), np.uint8)
    miter.stop()
    assert array.tolist() == [1] * 10


# ---- copies -------------------------------------------------------------------------------------------------------------
def test_copies_are_what_the_windows_hold(mem):
    pages, sgt = filled(mem, [(3, 4000, 200), (0, 1, 1), (1, 0, 0), (1, 17, 2 * PAGE)])
    total = 200 + 1 + 2 * PAGE
    whole = b"".join(bytes(window) for window in mmc.sg_miter(sgt, SG_MITER_FROM_SG))
    assert len(whole) == total
    for skip in (0, 1, 199, 200, 201, 250, total - 1, total, total + 1, 1 << 40):
        for length in (0, 1, 200, total, total + 50):
            out = bytearray(b"\xee" * length)
            n = mmc.sg_pcopy_to_buffer(sgt, out, skip)
            assert n == max(0, min(length, total - skip)) and out == whole[skip:skip + n] + b"\xee" * (length - n)
    data = (np.arange(total) % 251).astype(np.uint8).tobytes()
    assert mmc.sg_copy_from_buffer(sgt, data) == total
    out = np.zeros(total + 7, np.uint8)
    assert mmc.sg_copy_to_buffer(sgt, out) == total and out[:total].tobytes() == data and not out[total:].any()
    assert mmc.sg_pcopy_from_buffer(sgt, b"abc", total - 2) == 2
    assert mmc.sg_zero_buffer(sgt, 10, total - 12) == 10 and mmc.sg_zero_buffer(sgt, 10, total - 2) == 2
    assert mmc.sg_zero_buffer(sgt, 1 << 63, total) == 0
    assert mmc.sg_copy_to_buffer(sgt, out) == total and out[:total].tobytes() == data[:-12] + bytes(12)
    # Nothing outside was touched.
    assert bytes(mmc.page_address(pages[3])[17:4000]) == bytes([4]) * 3983
    assert bytes(mmc.page_address(pages[0])[2:]) == bytes([1]) * (PAGE - 2)
    assert bytes(mmc.page_address(pages[1])[:17]) == bytes([2]) * 17


def test_pages_that_nobody_wrote_read_as_zero(mem):
    pages = alloc(mem, 4)
    mmc.page_address(pages[1])[:] = b"y" * PAGE
    sgt = mmc.sg_alloc_table_from_pages(pages, 100, 4 * PAGE - 100)
    out = bytearray(b"\xee" * (4 * PAGE - 100))
    with unchanged(mem):                                # reading gives no page bytes of its own
        assert mmc.sg_copy_to_buffer(sgt, out) == len(out)
    assert out == bytes(PAGE - 100) + b"y" * PAGE + bytes(2 * PAGE)
    mmc.sg_copy_from_buffer(sgt, b"z", 2 * PAGE)
    assert bytes(mmc.page_address(pages[2]))[100:102] == b"z\0"


def test_free_pages_are_refused_before_a_byte_moves(mem):
    pages = alloc(mem, 3)
    mmc.page_address(pages[0])[:] = b"a" * PAGE
    sgt = mmc.sg_alloc_table_from_pages(pages, 0, 3 * PAGE)
    mmc.put_page(pages[2])
    out = bytearray(3 * PAGE)
    pfn = pages[2].pfn
    for call in (lambda: mmc.sg_copy_to_buffer(sgt, out), lambda: mmc.sg_copy_from_buffer(sgt, b"b" * 3 * PAGE),
                 lambda: mmc.sg_zero_buffer(sgt, 3 * PAGE)):
        with refused(mem, BadPage, "free", pfn=pfn):
            call()
    assert out == bytes(3 * PAGE) and bytes(mmc.page_address(pages[0])) == b"a" * PAGE
    assert mmc.sg_copy_to_buffer(sgt, memoryview(out)[:2 * PAGE]) == 2 * PAGE       # those that are there


def test_zero_pages_are_read_and_not_written(mem):
    for pfn in (mem.zero_page.pfn, mem.huge_zero_folio.pfn + 3):
        sgt = entries(mem, [(pfn, 5, 100)])
        out = bytearray(b"\xee" * 100)
        assert mmc.sg_copy_to_buffer(sgt, out) == 100 and out == bytes(100)
        with refused(mem, InvalidArgument, "zero page"):
            mmc.sg_copy_from_buffer(sgt, b"x")
        with refused(mem, InvalidArgument, "zero page"):
            mmc.sg_zero_buffer(sgt, 1)


@pytest.mark.parametrize("buf", [None, 5, "text", [1, 2]])
def test_buffers_that_are_none(mem, buf):
    pages, sgt = filled(mem, [(0, 0, 10)])
    for call in (mmc.sg_copy_to_buffer, mmc.sg_copy_from_buffer):
        with refused(mem, TypeError):
            call(sgt, buf)
    with refused(mem, (TypeError, BufferError)):
        mmc.sg_copy_to_buffer(sgt, b"read-only")


def test_t40_counts_in_64_bits():
    """More bytes than 32 bits count, of one folio named over and over: all of them are moved, and counted."""
    mem = Memory("16M")
    folio = mmc.folio_alloc(mem, 9)
    sgt = entries(mem, [(folio.pfn, 0, 2 << 20)] * 2049)
    assert mmc.sg_zero_buffer(sgt, 1 << 63) == 2049 * (2 << 20) > 1 << 32
    out = bytearray(10)
    assert mmc.sg_pcopy_to_buffer(sgt, out, 4 << 30) == 10
    assert mmc.sg_pcopy_to_buffer(sgt, out, 2049 * (2 << 20) - 3) == 3
    assert mmc.sg_nents_for_len(sgt, (4 << 30) + 1) == 2049
    miter = mmc.sg_miter(sgt, SG_MITER_FROM_SG)
    assert miter.skip((4 << 30) + 4096) and sum(len(window) for window in miter) == (2 << 20) - 4096


# ---- sgl_alloc ------------------------------------------------------------------------------------------------------------
def test_sgl_alloc(mem):
    before = mem.vmstat()["nr_free_pages"]
    sgt = mmc.sgl_alloc(mem, 2 * PAGE + 1)
    assert [(offset, length) for _, offset, length in rows(sgt)] == [(0, PAGE), (0, PAGE), (0, 1)]
    assert mem.vmstat()["nr_free_pages"] == before - 3
    mmc.sgl_free(sgt)
    assert mem.vmstat()["nr_free_pages"] == before and len(sgt) == 0
    mmc.sgl_free(sgt)
    with refused(mem, InvalidArgument):
        mmc.sgl_alloc(mem, 0)


def test_t37_sgl_alloc_of_four_gigabytes():
    mem = Memory("5G")
    sgt = mmc.sgl_alloc(mem, 4 << 30)
    assert len(sgt) == 1 << 20 and int(sgt.entries["length"].sum(dtype=np.uint64)) == 4 << 30
    mmc.sgl_free(sgt)
    with refused(mem, MMError, "pages are wanted", errno=12):
        mmc.sgl_alloc(mem, 5 << 30)
    with refused(mem, InvalidArgument):
        mmc.sgl_alloc(mem, 1 << 60)
    for site in ("sg", "frame", "list"):
        with mem.inject(site), refused(mem, MMError, errno=12):
            mmc.sgl_alloc(mem, 10 * PAGE)


# ---- splitting --------------------------------------------------------------------------------------------------------------
def parts(mem, pieces, skip, sizes):
    return [rows(part) for part in mmc.sg_split(entries(mem, pieces), skip, sizes)]


def test_t43_a_split_ends_within_an_entry(mem):
    assert parts(mem, [(16, 0, PAGE), (30, 0, PAGE)], 0, [1000]) == [[(16, 0, 1000)]]
    assert parts(mem, [(16, 0, PAGE), (30, 0, PAGE)], 0, [1000, 4000]) == [[(16, 0, 1000)], [(16, 1000, 3096), (30, 0, 904)]]


def test_t44_offsets_of_later_entries_stay(mem):
    assert parts(mem, [(16, 0, PAGE), (30, 512, 100)], 0, [PAGE + 100]) == [[(16, 0, PAGE), (30, 512, 100)]]


def test_t45_no_empty_entry_in_front(mem):
    assert parts(mem, [(16, 0, PAGE), (30, 0, PAGE)], PAGE, [10]) == [[(30, 0, 10)]]
    assert parts(mem, [(16, 0, 10), (20, 5, 0), (30, 0, 10)], 10, [10]) == [[(30, 0, 10)]]


def test_splits_start_on_the_page_they_reach(mem):
    assert parts(mem, [(16, 100, 10 * PAGE)], 5 * PAGE, [PAGE]) == [[(21, 100, PAGE)]]
    assert parts(mem, [(16, 100, 10 * PAGE)], PAGE - 100, [PAGE]) == [[(17, 0, PAGE)]]


@pytest.mark.parametrize("skip, sizes", [(0, [21]), (20, [1]), (1 << 63, [1]), (0, [5, 16]), (0, [0]), (0, [-1]), (-1, [1]),
                                         (0, [1 << 64]), ((1 << 64) - 1, [1]), (0, [(1 << 64) - 1, 5])])
def test_splits_that_are_refused(mem, skip, sizes):
    sgt = entries(mem, [(16, 0, 10), (30, 0, 10)])
    with refused(mem, InvalidArgument):
        mmc.sg_split(sgt, skip, sizes)
    assert rows(sgt) == [(16, 0, 10), (30, 0, 10)]


def test_no_split(mem):
    assert mmc.sg_split(entries(mem, [(16, 0, 10)]), 5, []) == []


def test_failed_allocations_of_a_split(mem):
    sgt = entries(mem, [(16, 0, 10), (30, 0, 10)])
    for nth in (1, 2, 3):
        with mem.inject("sg", nth), refused(mem, MMError, errno=12):
            mmc.sg_split(sgt, 0, [5, 10, 5])
    assert len(mmc.sg_split(sgt, 0, [5, 10, 5])) == 3


def test_a_split_of_a_mapped_list(mem):
    """Both views are cut at the same bytes, and by other entries: the device sees one segment, the CPU three."""
    sgt = build(mem, [16, 30, 40], size=3 * PAGE - 96)
    device = mmc.Device(mem, iommu=True)
    assert mmc.dma_map_sgtable(device, sgt) == 1
    (start, length), = dma_rows(sgt)
    out = mmc.sg_split(sgt, 100, [PAGE, 2 * PAGE - 196])
    assert [rows(part) for part in out] == [[(16, 100, PAGE - 100), (30, 0, 100)], [(30, 100, PAGE - 100), (40, 0, PAGE - 96)]]
    assert [dma_rows(part) for part in out] == [[(start + 100, PAGE)], [(start + 100 + PAGE, 2 * PAGE - 196)]]
    assert [part.nents for part in out] == [1, 1] and not any(part.mapped for part in out)
    mmc.dma_unmap_sgtable(device, sgt)


def test_sg_split_phys_offset(mem):
    """Only the first entry of each output is shifted; the others keep their own offsets."""
    pieces = [(10, 0, 1000), (20, 512, 1000), (30, 256, 1000)]
    assert parts(mem, pieces, 100, [1500, 1400]) == [[(10, 100, 900), (20, 512, 600)], [(20, 1112, 400), (30, 256, 1000)]]


# ---- iterators over what changes ---------------------------------------------------------------------------------------------
def test_entries_and_iterators_after_the_table_is_freed(mem):
    pages, sgt = filled(mem, [(0, 0, PAGE), (1, 0, PAGE)])
    entry, each, fresh, other = sgt[0], mmc.for_each_sg(sgt), mmc.for_each_sg(sgt), iter(sgt)
    next(each)
    page_iter, dma_iter, miter = mmc.sg_page_iter(sgt), mmc.sg_dma_page_iter(sgt), mmc.sg_miter(sgt, SG_MITER_FROM_SG)
    next(page_iter)
    next(miter)
    mmc.sg_free_table(sgt)
    uses = [lambda: entry.length, lambda: mmc.sg_page(entry), lambda: mmc.sg_next(entry), lambda: next(each), lambda: next(fresh),
            lambda: next(other),
            lambda: next(page_iter), lambda: next(miter), lambda: miter.skip(1), lambda: mmc.sg_mark_end(entry),
            lambda: mmc.sg_set_page(entry, pages[0], 1, 0), lambda: setattr(entry, "dma_address", 1)]
    for use in uses:
        with pytest.raises(InvalidArgument, match="freed"):
            use()
    assert list(dma_iter) == [] and "freed" in repr(entry)
    # The same table, filled again: entries from before are still refused.
    again = SGAppendTable(mem)
    append(again, [20], 0)
    old = again[0]
    mmc.sg_free_append_table(again)
    append(again, [30], 0)
    with pytest.raises(InvalidArgument, match="freed"):
        old.length


def test_entries_stay_while_an_append_table_grows(mem):
    sgt = SGAppendTable(mem)
    append(sgt, [20], 1000)
    first, each = sgt[0], mmc.for_each_sg(sgt)
    next(each)
    append(sgt, range(30, 30 + 2 * 1000, 2), 0)
    assert first.pfn == 20 and mmc.sg_next(first).pfn == 30
    assert next(each, None) is None                     # it was started over one entry
    assert [entry.pfn for entry in mmc.for_each_sg(sgt)][-1] == 30 + 2 * 999


def test_a_big_table_by_index(mem):
    pfn = [16 + 2 * i for i in range(3000)]
    sgt = build(mem, pfn)
    assert [sgt[i].pfn for i in range(3000)] == pfn and sgt[-1].pfn == pfn[-1] == mmc.sg_last(sgt).pfn
    for index in (3000, -3001):
        with pytest.raises(IndexError):
            sgt[index]


def test_large_pages():
    for page_size in (16384, 65536):
        mem = Memory("1G", page_size=page_size)
        sgt = build(mem, [16, 17, 30], offset=5000, max_segment=2 * page_size + 100)
        assert rows(sgt) == [(16, 5000, 2 * page_size - 5000), (30, 0, page_size)]
        assert pfns(sgt) == [16, 17, 30]
        assert pfns(entries(mem, [(16, page_size - 1, 2)])) == [16, 17]
        pages = mmc.sgl_alloc(mem, 3 * page_size - 5)
        data = (np.arange(3 * page_size - 5) % 253).astype(np.uint8).tobytes()
        assert mmc.sg_copy_from_buffer(pages, data) == len(data)
        assert b"".join(bytes(window) for window in mmc.sg_miter(pages, SG_MITER_FROM_SG)) == data
        assert UINT_MAX // page_size * page_size == rows(mmc.sg_alloc_table_from_pages(
            PageRanges(Memory("8G", page_size=page_size), [16], [(4 << 30) // page_size]), 0, 4 << 30))[0][2]
