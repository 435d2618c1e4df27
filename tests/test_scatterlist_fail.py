"""Building scatterlists that fails: everything is as it was, and what is refused says why."""
import pytest

import mmcore as mmc
from mmcore import InvalidArgument, Memory, MMError, PageList, PageRanges, SGAppendTable
from reference.lists import geometry
from sg_support import PAGE, UINT_MAX, append, build, rows, snapshot
from support import refused


@pytest.fixture
def mem():
    return Memory("8G")


def test_t27_t28_a_failed_append_restores_everything(mem):
    sgt = SGAppendTable(mem)
    append(sgt, [20, 21], 1)                                    # a chunk of 2 slots is too small for what follows
    full = SGAppendTable(mem)
    append(full, range(20, 20 + 2 * 126, 2), 100)               # slots 0..125 of 128
    before = snapshot(full)
    for nth in (1, 2):
        with mem.inject("sg", nth), refused(mem, MMError, "chunk", errno=12):
            append(full, [271, *range(400, 1000, 2)], 0)        # merges one page, then needs 3 more chunks
        assert snapshot(full) == before
    append(full, [271, *range(400, 1000, 2)], 0)
    assert full.orig_nents == 126 + 300 and rows(full)[125] == (270, 0, 2 * PAGE)


def test_t29_an_offset_on_a_table_with_entries(mem):
    sgt = SGAppendTable(mem)
    append(sgt, [20], 5)
    before = snapshot(sgt)
    for pfns in ([21], [40]):
        with refused(mem, InvalidArgument, "offset"):
            append(sgt, pfns, 0, offset=512)
    assert snapshot(sgt) == before


def test_t30_no_pages(mem):
    for pages in (PageList(mem), PageRanges(mem)):
        with refused(mem, InvalidArgument, "empty"):
            mmc.sg_alloc_append_table_from_pages(SGAppendTable(mem), pages, 0, PAGE, UINT_MAX, 0)
        with refused(mem, InvalidArgument, "empty"):
            mmc.sg_alloc_table_from_pages(pages, 0, PAGE)


def test_t31_nothing_that_needs_a_slot_follows_the_end(mem):
    for left in (0, 1):
        sgt = SGAppendTable(mem)
        append(sgt, [20, 21], 0)
        before = snapshot(sgt)
        with refused(mem, InvalidArgument, "left_pages=0"):
            append(sgt, [30], left)
        with refused(mem, InvalidArgument, "left_pages=0"):
            append(sgt, [22, 30], left)                         # the merge is undone
        assert snapshot(sgt) == before
        append(sgt, [22], left)                                 # what merges needs no slot
        assert rows(sgt) == [(20, 0, 3 * PAGE)]
    # Also where the chunk has spare slots behind the end.
    sgt = SGAppendTable(mem)
    append(sgt, [20], 50)
    append(sgt, [30], 0)
    before = snapshot(sgt)
    with refused(mem, InvalidArgument, "left_pages=0"):
        append(sgt, [40], 0)
    assert snapshot(sgt) == before and sgt.chunks == [51]


def test_t32_left_pages_is_an_upper_bound(mem):
    sgt = SGAppendTable(mem)
    append(sgt, [20], 1)
    before = snapshot(sgt)
    with refused(mem, InvalidArgument, "upper bound"):
        append(sgt, [25, 29], 0)                                # two pages where one was announced
    with refused(mem, InvalidArgument, "upper bound"):
        append(sgt, [25], 1)
    assert snapshot(sgt) == before
    append(sgt, [25], 0)
    assert rows(sgt) == [(20, 0, PAGE), (25, 0, PAGE)]


def test_t33_each_kind_of_table_has_its_own_free(mem):
    sgt, plain = SGAppendTable(mem), mmc.sg_alloc_table(mem, 3)
    append(sgt, [20], 300)
    with refused(mem, InvalidArgument, "sg_free_append_table"):
        mmc.sg_free_table(sgt)
    with refused(mem, InvalidArgument, "sg_free_table"):
        mmc.sg_free_append_table(plain)
    assert sgt.chunks == [128] and plain.chunks == [3]


def test_t34_loops_end_at_orig_nents(mem):
    sgt = SGAppendTable(mem)
    append(sgt, [20, 30], 100)                                  # more was announced and never came
    assert sgt.orig_nents == 2 and sgt.total_nents == 102
    assert [entry.pfn for entry in mmc.for_each_sg(sgt)] == [20, 30]
    assert len(sgt.entries) == 2 and mmc.sg_nents(sgt) == 2
    assert mmc.sg_next(sgt[1]) is None
    assert [page.pfn for page in mmc.sg_page_iter(sgt)] == [20, 30]


@pytest.mark.parametrize("n", [1, 128, 129, 256, 1000])
def test_t35_failed_allocation_leaves_nothing(mem, n):
    nth = 1
    while True:
        try:
            with mem.inject("sg", nth):
                sgt = mmc.sg_alloc_table(mem, n)
            break
        except MMError as error:
            assert error.errno == 12
            nth += 1
    assert nth - 1 == len(geometry(n)) and sgt.chunks == geometry(n)


def test_t35_the_same_when_building(mem):
    pfns = range(16, 16 + 2 * 600, 2)
    nth = 1
    while True:
        try:
            with mem.inject("sg", nth):
                sgt = build(mem, pfns)
            break
        except MMError as error:
            assert error.errno == 12
            nth += 1
    assert nth - 1 == len(geometry(600)) and sgt.chunks == geometry(600)


@pytest.mark.parametrize("make", [mmc.sg_alloc_table, mmc.sg_init_table, mmc.sg_alloc_table_chained])
def test_t36_a_table_of_no_entries(mem, make):
    for nents in (0, -1, 1 << 32):
        with refused(mem, InvalidArgument, "nents", errno=22):
            make(mem, nents)


def test_a_table_beyond_the_machine_is_refused(mem):
    with refused(mem, MMError, "memory", errno=12):
        mmc.sg_alloc_table(mem, UINT_MAX)


def test_t38_a_first_chunk_of_one_slot_is_left_out(mem):
    assert mmc.sg_alloc_table_chained(mem, 2, 1).chunks == [2]
    assert mmc.sg_alloc_table_chained(mem, 1, 1).chunks == [1]
    assert mmc.sg_alloc_table_chained(mem, 3, 2).chunks == [2, 2]


@pytest.mark.parametrize("offset", [PAGE, PAGE + 1, 1 << 31, 1 << 32, -1])
def test_an_offset_beyond_the_first_page_is_refused(mem, offset):
    with refused(mem, InvalidArgument, "offset"):
        mmc.sg_alloc_table_from_pages(PageList(mem, [16, 17, 18]), offset, 100)


def test_null_pages_are_refused_with_the_table_as_it_was(mem):
    sgt = SGAppendTable(mem)
    append(sgt, [20], 10)
    before = snapshot(sgt)
    with refused(mem, InvalidArgument, "NULL", pfn=0):
        append(sgt, [21, 40, 0, 41], 0)
    assert snapshot(sgt) == before
    with refused(mem, InvalidArgument, "NULL"):
        mmc.sg_alloc_table_from_pages(PageRanges(mem, [16, 0], [1, 1]), 0, 2 * PAGE)


def test_every_failing_chunk_of_a_long_append(mem):
    """Walk the failure through the whole call, into a table with and without entries; then it succeeds as if new."""
    pfns = [*range(1000, 1000 + 2 * 400, 2)]
    for first in ([], [20, 21, 22]):
        clean = SGAppendTable(mem)
        if first:
            append(clean, first, 1000)
        append(clean, pfns, 7)
        nth = 1
        sgt = SGAppendTable(mem)
        if first:
            append(sgt, first, 1000)
        while True:
            before = snapshot(sgt)
            try:
                with mem.inject("sg", nth):
                    append(sgt, pfns, 7)
                break
            except MMError as error:
                assert error.errno == 12 and snapshot(sgt) == before
                nth += 1
        assert nth > 3
        assert (rows(sgt), sgt.chunks, sgt.total_nents) == (rows(clean), clean.chunks, clean.total_nents)
