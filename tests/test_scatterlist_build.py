"""Building scatterlists: geometry, merging, appending (failing: test_scatterlist_fail). T numbers name the known traps of kernel code."""
import numpy as np
import pytest

import mmcore as mmc
from mmcore import InvalidArgument, Memory, MMError, PageList, PageRanges, SGAppendTable
from reference.lists import geometry
from sg_support import PAGE, UINT_MAX, append, build, entries, rows, snapshot
from support import refused


@pytest.fixture
def mem():
    return Memory("8G")


def devices_of(mem):
    return [(device.start_pfn, device.nr_pages) for device in mem.devices]


# ---- geometry -------------------------------------------------------------------------------------------------------
GEOMETRY = [(1, [1]), (127, [127]), (128, [128]), (129, [128, 2]), (254, [128, 127]), (255, [128, 128]),
            (256, [128, 128, 2]), (1000, [128] * 7 + [111])]


@pytest.mark.parametrize("n, chunks", GEOMETRY)
def test_chunks_of_a_table(mem, n, chunks):
    sgt = mmc.sg_alloc_table(mem, n)
    assert sgt.chunks == chunks and geometry(n) == chunks
    assert (sgt.nents, sgt.orig_nents, len(sgt)) == (n, n, n)
    assert len(list(mmc.for_each_sg(sgt))) == mmc.sg_nents(sgt) == n
    assert sum(chunks) == n + len(chunks) - 1
    # The same from a list of pages, all at once and one by one.
    pfns = range(16, 16 + 2 * n, 2)
    assert build(mem, pfns).chunks == chunks
    grown = SGAppendTable(mem)
    for i, pfn in enumerate(pfns):
        append(grown, [pfn], n - 1 - i)
    assert (grown.chunks, grown.total_nents, grown.orig_nents) == (chunks, n, n)
    mmc.sg_free_append_table(grown)
    mmc.sg_free_table(sgt)
    assert (sgt.chunks, sgt.orig_nents) == ([], 0)


def test_chunks_after_a_first_one_of_two_slots(mem):
    assert mmc.sg_alloc_table_chained(mem, 130, 2).chunks == [2, 128, 2] == geometry(130, first=2)


@pytest.mark.parametrize("page_size, slots", [("4K", 128), ("16K", 512), ("64K", 2048)])
def test_a_chunk_is_a_page(page_size, slots):
    mem = Memory("64M", page_size=page_size)
    assert mmc.sg_max_single_alloc(mem) == slots
    assert mmc.sg_alloc_table(mem, slots + 1).chunks == [slots, 2]
    # The pool's chunks do not depend on the page.
    assert mmc.sg_alloc_table_chained(mem, 129).chunks == [128, 2]


# ---- worked examples ------------------------------------------------------------------------------------------------
def test_append_that_merges_whole_batches(mem):
    sgt = SGAppendTable(mem)
    append(sgt, [20, 21, 22], 3)
    append(sgt, [23, 24, 25], 0)
    assert rows(sgt) == [(20, 0, 24576)] and (sgt.total_nents, sgt.chunks) == (4, [4])


def test_append_with_an_offset_and_a_merge(mem):
    sgt = SGAppendTable(mem)
    append(sgt, [10, 11], 5, offset=512, size=7680)
    append(sgt, [12], 0)
    assert rows(sgt) == [(10, 512, 11776)]


@pytest.mark.parametrize("offset, first", [(0, (16, 0, 0xFFFFF000)), (0x800, (16, 0x800, 0xFFFFE800))])
def test_t04_four_gigabytes_are_two_entries(mem, offset, first):
    pages = PageList(mem, np.arange(16, 16 + (1 << 20)))
    sgt = mmc.sg_alloc_table_from_pages(pages, offset, (1 << 32) - offset)
    assert rows(sgt) == [first, (16 + 1048575, 0, 0x1000)]
    assert mmc.sg_nents_for_len(sgt, (1 << 32) - offset) == 2


@pytest.mark.parametrize("max_segment, nents, total, chunks", [(UINT_MAX, 1, 128, 1), (65536, 16384, 16384, 129)])
def test_a_gigabyte_in_batches(mem, max_segment, nents, total, chunks):
    pages = PageList(mem, np.arange(1024, 1024 + (1 << 18)))
    sgt = SGAppendTable(mem)
    for i in range(512):
        mmc.sg_alloc_append_table_from_pages(sgt, pages[i * 512:(i + 1) * 512], 0, 512 * PAGE, max_segment, (511 - i) * 512)
    assert (sgt.orig_nents, sgt.total_nents, len(sgt.chunks)) == (nents, total, chunks)


# ---- max_segment ----------------------------------------------------------------------------------------------------
def test_t01_max_segment_is_rounded_down(mem):
    for max_segment in (4097, 5000, 8191):
        assert rows(build(mem, [16, 17, 18], max_segment=max_segment)) == [(16, 0, PAGE), (17, 0, PAGE), (18, 0, PAGE)]


@pytest.mark.parametrize("max_segment", [0, 1, 100, 4095])
def test_t02_max_segment_below_a_page_is_refused(mem, max_segment):
    sgt = SGAppendTable(mem)
    append(sgt, [16], 3)
    before = snapshot(sgt)
    with refused(mem, InvalidArgument, "max_segment", errno=22):
        append(sgt, [17], 0, max_segment=max_segment)
    with refused(mem, InvalidArgument, "max_segment"):
        build(mem, [16], max_segment=max_segment)
    assert snapshot(sgt) == before
    with refused(mem, InvalidArgument):
        SGAppendTable(mem, max_segment=max_segment)


def test_t03_uint_max_is_rounded_down_too(mem):
    sgt = mmc.sg_alloc_table_from_pages(PageRanges(mem, [16], [1 << 20]), 0, 1 << 32)
    assert rows(sgt)[0][2] == 0xFFFFF000


@pytest.mark.parametrize("max_segment", [1 << 32, 1 << 64, -1, "64K", 1.5, None, True])
def test_max_segment_that_no_kernel_caller_could_pass(mem, max_segment):
    with refused(mem, (InvalidArgument, TypeError)):
        mmc.sg_alloc_table_from_pages_segment(PageList(mem, [16]), 0, PAGE, max_segment)


def test_t06_the_limit_counts_pages_and_not_bytes(mem):
    sgt = build(mem, [16, 17, 18, 19], offset=0x800, max_segment=2 * PAGE)
    assert rows(sgt) == [(16, 0x800, 2 * PAGE - 0x800), (18, 0, 2 * PAGE)]


def test_t07_a_single_byte(mem):
    assert rows(build(mem, [16], size=1)) == [(16, 0, 1)]
    assert rows(build(mem, [16], offset=4095, size=1)) == [(16, 4095, 1)]
    assert rows(build(mem, [16, 17], offset=4095, size=2)) == [(16, 4095, 2)]


# ---- what merges ------------------------------------------------------------------------------------------------------
def test_t08_descending_pages_are_apart(mem):
    assert rows(build(mem, [17, 16])) == [(17, 0, PAGE), (16, 0, PAGE)]


def test_t09_a_page_twice_is_two_entries(mem):
    assert rows(build(mem, [25, 25])) == [(25, 0, PAGE), (25, 0, PAGE)]


def test_t10_device_maps_are_never_merged():
    devices = [mmc.DevicePages("1M", "generic", "4K"), mmc.DevicePages("1M", "coherent", "4K")]
    mem = Memory("16M", devices=devices)
    (first, nr), (second, _) = devices_of(mem)
    assert second == first + nr                                 # neighbours in PFN space, and RAM before them
    pfns = list(range(first - 2, second + 2))
    wanted = [(first - 2, 0, 2 * PAGE), (first, 0, nr * PAGE), (second, 0, 2 * PAGE)]
    assert rows(build(mem, pfns)) == wanted
    assert rows(mmc.sg_alloc_table_from_pages(PageRanges(mem, [first - 2], [len(pfns)]), 0, len(pfns) * PAGE)) == wanted
    # Nor across calls.
    sgt = SGAppendTable(mem)
    for i, pfn in enumerate(pfns):
        append(sgt, [pfn], len(pfns) - 1 - i)
    assert rows(sgt) == wanted


def test_t11_folios_do_not_matter(mem):
    first, second = mmc.folio_alloc_at(mem, 512, 9), mmc.folio_alloc_at(mem, 1024, 9)
    pfns = range(first.pfn, second.pfn + 512)
    assert rows(build(mem, pfns)) == [(512, 0, 1024 * PAGE)]
    # And one folio may be split over entries.
    assert len(build(mem, pfns, max_segment=256 * PAGE)) == 4


def test_t12_only_the_page_after_extends(mem):
    sgt = SGAppendTable(mem)
    append(sgt, [30, 31, 32], 4)
    append(sgt, [29], 3)                                        # the page before: not merged
    append(sgt, [30], 2)                                        # the page after that
    assert rows(sgt) == [(30, 0, 3 * PAGE), (29, 0, 2 * PAGE)]


def test_t13_the_last_page_of_the_entry_counts(mem):
    sgt = SGAppendTable(mem)
    append(sgt, [30, 31, 32], 3)
    append(sgt, [31], 2)                                        # after the first page, not after the last
    append(sgt, [32, 33], 0)
    assert rows(sgt) == [(30, 0, 3 * PAGE), (31, 0, 3 * PAGE)]


def test_t14_append_across_a_gap(mem):
    sgt = SGAppendTable(mem)
    append(sgt, [20, 21, 22], 3)
    append(sgt, [24, 25, 26], 0)
    assert rows(sgt) == [(20, 0, 3 * PAGE), (24, 0, 3 * PAGE)]


def test_t15_a_full_entry_is_not_extended(mem):
    sgt = SGAppendTable(mem, max_segment=2 * PAGE)
    append(sgt, [20, 21], 3)
    append(sgt, [22, 23, 24], 0)
    assert rows(sgt) == [(20, 0, 2 * PAGE), (22, 0, 2 * PAGE), (24, 0, PAGE)]
    # A smaller limit later on does not shrink what is there.
    other = SGAppendTable(mem)
    append(other, [20, 21, 22], 2)
    append(other, [23, 24], 0, max_segment=PAGE)
    assert rows(other) == [(20, 0, 3 * PAGE), (23, 0, PAGE), (24, 0, PAGE)]


# ---- slots ------------------------------------------------------------------------------------------------------------
def test_t16_links_are_not_entries(mem):
    sgt = mmc.sg_alloc_table(mem, 129)
    assert (sgt.nents, mmc.sg_nents(sgt), len(sgt.entries)) == (129, 129, 129)
    assert [entry.index for entry in mmc.for_each_sg(sgt)] == list(range(129))
    scattered = build(mem, range(16, 16 + 2 * 129, 2))
    assert rows(scattered) == [(pfn, 0, PAGE) for pfn in range(16, 16 + 2 * 129, 2)]


def test_t17_a_merged_append_table_is_freed_by_its_slots(mem):
    sgt = SGAppendTable(mem)
    append(sgt, range(16, 528), 200 * 512)
    append(sgt, range(528, 1040), 0)
    assert (sgt.orig_nents, sgt.total_nents, sgt.chunks) == (1, 128, [128])
    mmc.sg_free_append_table(sgt)
    assert (sgt.orig_nents, sgt.total_nents, sgt.chunks) == (0, 0, [])
    mmc.sg_free_append_table(sgt)                               # the second time does nothing
    append(sgt, [16], 0)                                        # and it can be filled again
    assert rows(sgt) == [(16, 0, PAGE)]


def test_t18_the_end_mark_never_hits_a_link(mem):
    sgt = mmc.sg_alloc_table(mem, 3)
    other = mmc.sg_alloc_table(mem, 2)
    slot = sgt[2]
    mmc.sg_chain(sgt, 3, other)
    with refused(mem, InvalidArgument, "chain link"):
        mmc.sg_mark_end(slot)
    assert mmc.sg_nents(sgt) == 4
    mmc.sg_mark_end(sgt[1])
    assert mmc.sg_nents(sgt) == 2 and mmc.sg_next(sgt[1]) is None


# ---- sizes that do not fit the pages ------------------------------------------------------------------------------------
@pytest.mark.parametrize("pfns, offset, size", [
    ([16, 18], 0, 100),                 # T23: the kernel gives lengths 100 and 4096
    ([16, 18], 0, PAGE), ([16], 0, PAGE + 1), ([16], 0, 0), ([16], 0, -1), ([16], 4095, 2), ([16, 17], 100, 3996),
    ([16], 0, 1 << 64), ([16], 0, (1 << 64) - 1)])
def test_t23_the_size_must_end_in_the_last_page(mem, pfns, offset, size):
    with refused(mem, InvalidArgument, "size"):
        build(mem, pfns, offset=offset, size=size)


def test_t24_nothing_follows_a_part_of_a_page(mem):
    sgt = SGAppendTable(mem)
    with refused(mem, InvalidArgument, "within a page"):
        append(sgt, [16], 1, size=100)
    append(sgt, [16], 0, size=100)
    before = snapshot(sgt)
    with refused(mem, InvalidArgument, "left_pages=0"):
        append(sgt, [16], 0)
    assert snapshot(sgt) == before and rows(sgt) == [(16, 0, 100)]


def test_t25_nor_the_page_after(mem):
    sgt = SGAppendTable(mem)
    append(sgt, [16, 17], 0, size=5000)
    before = snapshot(sgt)
    with refused(mem, InvalidArgument):
        append(sgt, [18], 0)
    assert snapshot(sgt) == before


def test_t26_merged_pages_reduce_the_size(mem):
    sgt = SGAppendTable(mem)
    append(sgt, [16, 17], 3)
    append(sgt, [18, 19, 25], 0, size=2 * PAGE + 96)
    assert rows(sgt) == [(16, 0, 4 * PAGE), (25, 0, 96)]
    merged = SGAppendTable(mem)
    append(merged, [16], 1)
    append(merged, [17], 0, size=1)
    assert rows(merged) == [(16, 0, PAGE + 1)]


# ---- chains -----------------------------------------------------------------------------------------------------------
def test_chained_tables_are_one_list(mem):
    front, back = mmc.sg_init_table(mem, 5), mmc.sg_alloc_table(mem, 200)
    for i, entry in enumerate(mmc.for_each_sg(back)):
        mmc.sg_set_page(entry, mem.page(100 + 2 * i), PAGE, 0)
    for i in range(4):
        mmc.sg_set_page(front[i], mem.page(16 + i), 100, i)
    mmc.sg_chain(front, 5, back)
    assert (front.orig_nents, mmc.sg_nents(front), back.orig_nents) == (204, 204, 200)
    assert rows(front)[:5] == [(16, 0, 100), (17, 1, 100), (18, 2, 100), (19, 3, 100), (100, 0, PAGE)]
    assert front[204 - 1].pfn == 100 + 2 * 199 == mmc.sg_last(front).pfn
    assert front.chunks == [5] and back.chunks == [128, 73]
    with refused(mem, MMError, "chained", errno=16):
        mmc.sg_free_table(back)
    front.check(), back.check()
    mmc.sg_free_table(front)
    assert back.orig_nents == 200
    # A front that is dropped, not freed, lets go as well.
    front = mmc.sg_init_table(mem, 5)
    mmc.sg_chain(front, 2, back)
    del front
    mmc.sg_free_table(back)


def test_chains_that_are_refused(mem):
    a, b = mmc.sg_init_table(mem, 3), mmc.sg_init_table(mem, 3)
    mmc.sg_set_page(a[2], mem.page(16), 10, 0)
    with refused(mem, InvalidArgument, "overwrite"):
        mmc.sg_chain(a, 3, b)
    with refused(mem, InvalidArgument, "ring"):
        mmc.sg_chain(a, 2, a)
    mmc.sg_chain(b, 3, a)
    with refused(mem, InvalidArgument, "ring"):
        mmc.sg_chain(a, 2, b)
    with refused(mem, InvalidArgument, "first array"):
        mmc.sg_chain(mmc.sg_init_table(mem, 3), 4, mmc.sg_init_table(mem, 1))
    with refused(mem, InvalidArgument, "two Memories"):
        mmc.sg_chain(mmc.sg_init_table(mem, 3), 3, mmc.sg_init_table(Memory("4M"), 1))
    with refused(mem, InvalidArgument):
        mmc.sg_chain(mmc.sg_init_table(mem, 3), 1, mmc.sg_init_table(mem, 1))
    open_ended = SGAppendTable(mem)
    append(open_ended, [20], 5)
    with refused(mem, InvalidArgument, "not complete"):
        mmc.sg_chain(mmc.sg_init_table(mem, 3), 3, open_ended)


# ---- entries ------------------------------------------------------------------------------------------------------------
def test_a_driver_reads_and_sets_entries(mem):
    sgt = mmc.sg_alloc_table(mem, 2)
    first = sgt[0]
    assert first.page is None and first.length == 0 and mmc.sg_page(first) is None
    mmc.sg_set_page(first, mem.page(20), 5000, 100)
    assert (first.page, first.offset, first.length) == (mem.page(20), 100, 5000)
    first.length, first.offset, first.page = 10, 20, mem.page(30)
    first.dma_address, first.dma_length = (1 << 64) - 1, UINT_MAX
    assert (first.pfn, first.offset, first.length) == (30, 20, 10)
    assert (mmc.sg_dma_address(first), mmc.sg_dma_len(first)) == ((1 << 64) - 1, UINT_MAX)
    assert mmc.sg_phys(first) == 30 * PAGE + 20
    assert not mmc.sg_is_last(first) and mmc.sg_is_last(mmc.sg_next(first)) and mmc.sg_last(sgt) == sgt[1]
    mmc.sg_set_page(sgt[1], mem.page(5), 1, 0)
    assert mmc.sg_is_last(sgt[1])                               # setting a page keeps the mark
    assert mmc.sg_next(sgt[1]) is None
    first.page = None
    assert first.page is None


@pytest.mark.parametrize("field, value", [("offset", -1), ("offset", 1 << 32), ("length", -1), ("length", 1 << 32),
                                          ("dma_address", 1 << 64), ("dma_length", 1 << 32), ("length", 1.0),
                                          ("page", 20), ("page", "page")])
def test_values_that_do_not_fit_an_entry(mem, field, value):
    sgt = entries(mem, [(20, 1, 2)])
    before = snapshot(sgt)
    with refused(mem, (InvalidArgument, TypeError)):
        setattr(sgt[0], field, value)
    assert snapshot(sgt) == before


def test_entries_never_leave_the_memory():
    mem = Memory("4M")
    last = mem.nr_pages - 1
    sgt = mmc.sg_alloc_table(mem, 1)
    entry = sgt[0]
    with refused(mem, InvalidArgument, "leave"):
        mmc.sg_set_page(entry, mem.page(last), PAGE + 1, 0)
    with refused(mem, InvalidArgument, "leave"):
        mmc.sg_set_page(entry, mem.page(last), 0, PAGE)
    mmc.sg_set_page(entry, mem.page(last), PAGE, 0)
    for field, value in (("offset", 1), ("length", PAGE + 1), ("offset", UINT_MAX), ("length", UINT_MAX)):
        with refused(mem, InvalidArgument, "leave"):
            setattr(entry, field, value)
    with refused(mem, InvalidArgument, "another Memory"):
        mmc.sg_set_page(entry, Memory("4M").page(5), 1, 0)
    assert rows(sgt) == [(last, 0, PAGE)]


def test_t05_a_folio_beyond_32_bits_is_refused():
    mem = Memory("20G", hugetlb={"4G": 2})
    folio = mmc.folio_alloc(mem, 20, hugetlb=True)
    entry = mmc.sg_alloc_table(mem, 1)[0]
    for length, offset in ((1 << 33, 0), (1 << 32, 0), (PAGE, 1 << 32), (UINT_MAX, 2)):
        with refused(mem, InvalidArgument):
            mmc.sg_set_folio(entry, folio, length, offset)
    mmc.sg_set_folio(entry, folio, UINT_MAX, 1)
    assert (entry.pfn, entry.offset, entry.length) == (folio.pfn, 1, UINT_MAX)


def test_t19_a_folio_offset_becomes_page_and_offset(mem):
    folio = mmc.folio_alloc(mem, 2)
    sgt = mmc.sg_alloc_table(mem, 1)
    mmc.sg_set_folio(sgt[0], folio, 4096, 8192)
    assert (sgt[0].pfn, sgt[0].offset) == (folio.pfn + 2, 0)
    assert [page.pfn for page in mmc.sg_page_iter(sgt)] == [folio.pfn + 2]
    mmc.sg_set_folio(sgt[0], folio, 2, 4095)
    assert [page.pfn for page in mmc.sg_page_iter(sgt)] == [folio.pfn, folio.pfn + 1]
    with refused(mem, InvalidArgument, "leave"):
        mmc.sg_set_folio(sgt[0], folio, 2, 4 * PAGE - 1)


# ---- the sink ---------------------------------------------------------------------------------------------------------
def test_runs_build_what_pages_build(mem):
    starts, counts = [512, 1024, 4096, 9000, 9003], [512, 512, 1, 3, 5]
    ranges = PageRanges(mem, starts, counts)
    size = ranges.nr_pages * PAGE
    for max_segment in (UINT_MAX, 65536, 5 * PAGE, PAGE):
        by_page = mmc.sg_alloc_table_from_pages_segment(ranges.to_pagelist(), 0, size, max_segment)
        by_run = mmc.sg_alloc_table_from_pages_segment(ranges, 0, size, max_segment)
        assert rows(by_run) == rows(by_page) and by_run.chunks == by_page.chunks


def test_a_terabyte_in_runs():
    mem = Memory("2T")
    nr = 1 << 28
    sgt = mmc.sg_alloc_table_from_pages(PageRanges(mem, [1 << 20], [nr]), 0, nr * PAGE)
    assert len(sgt) == -(-nr // 0xFFFFF) and sum(length for _, _, length in rows(sgt)) == 1 << 40
    assert mmc.sg_nents_for_len(sgt, 1 << 40) == len(sgt)
    with refused(mem, InvalidArgument):
        mmc.sg_nents_for_len(sgt, (1 << 40) + 1)


def test_the_drawing(mem):
    sgt = build(mem, [20, 21, 30, 19], size=3 * PAGE + 1)
    text = mmc.sg_draw(sgt)
    assert text.splitlines() == [
        "virtual   |AABC|",
        "physical  |CAA|  from PFN 0x13",
        "physical  |B|  from PFN 0x1e",
        "segment   A 0: PFN 0x14 + 0, 8192 bytes (8K)",
        "segment   B 1: PFN 0x1e + 0, 4096 bytes (4K)",
        "segment   C 2: PFN 0x13 + 0, 1 bytes (1)"]
    with refused(mem, InvalidArgument):
        mmc.sg_draw(sgt, max_pages=3)
    for width in (0, -1):
        with refused(mem, InvalidArgument, "at least one page"):
            mmc.sg_draw(sgt, width=width)
    assert mmc.sg_draw(sgt, width=3).splitlines()[:2] == ["virtual   |AAB|", "virtual   |C|"]


def test_the_numpy_copy_is_a_copy(mem):
    sgt = build(mem, [20, 21, 30])
    array = sgt.entries
    assert array.dtype == mmc.SG_DTYPE and array.dtype.itemsize == 32
    array["length"] = 0
    assert rows(sgt) == [(20, 0, 2 * PAGE), (30, 0, PAGE)]


# ---- reports ------------------------------------------------------------------------------------------------------------
def test_sg_append_error_restores_length(mem):
    """An entry of 4 pages; 4 more, 2 of which extend it, and no memory for the chunk that the others need."""
    sgt = SGAppendTable(mem)
    append(sgt, [20, 21, 22, 23], 4)
    full = SGAppendTable(mem)
    # Fill a chunk so that the next entry needs another one.
    append(full, [*range(100, 100 + 2 * 126, 2), 20, 21, 22, 23], 4)
    before = snapshot(full)
    with mem.inject("sg"), refused(mem, MMError, errno=12):
        append(full, [24, 25, 29, 30], 0 + 1)
    assert snapshot(full) == before and rows(full)[-1] == (20, 0, 16384)
    with refused(mem, InvalidArgument):
        append(sgt, [24], 3, offset=1)
    with refused(mem, InvalidArgument):
        append(sgt, [24], 3, max_segment=100)
    assert rows(sgt) == [(20, 0, 16384)]


def test_sg_desc_array_exact_fit(mem):
    """Six descriptors fill the array exactly; the padding one makes a seventh, and no neighbour is overwritten."""
    neighbour = mmc.sg_alloc_table(mem, 6)
    for used in (5, 6):
        sgt = SGAppendTable(mem)
        append(sgt, range(20, 20 + 2 * used, 2), 1)
        append(sgt, [90], 0)
        assert [pfn for pfn, _, _ in rows(sgt)] == [*range(20, 20 + 2 * used, 2), 90]
        assert sgt.total_nents == used + 1
    # At the end of a full chunk a chunk is added.
    sgt = SGAppendTable(mem)
    append(sgt, range(20, 20 + 2 * 127, 2), 1)
    assert sgt.chunks == [128]
    append(sgt, [9000], 0)
    assert sgt.chunks == [128] and sgt.orig_nents == 128
    assert rows(neighbour) == [(0, 0, 0)] * 6
