"""Scatterlists against the plain one of reference/lists.py, on random lists, batches, limits and failures."""
import ctypes

import numpy as np
import pytest
from hypothesis import given, strategies as st

import mmcore as mmc
from mmcore import InvalidArgument, Memory, MMError, PageList, PageRanges, SG_MITER_FROM_SG, SGAppendTable
from reference import Refused
from reference.lists import Table, bytes_of, cut, dma_segments, join, pages_of
from sg_support import PAGE, UINT_MAX, append, build, entries, rows, snapshot

MEM = Memory("64M", devices=[mmc.DevicePages("256K", "generic"), mmc.DevicePages("256K", "pci_p2pdma")])
STARTS = [device.start_pfn for device in MEM.devices]
BYTES = Memory("8M")
POOL = mmc.alloc_pages_bulk(BYTES, 64)
BASE = POOL[0].pfn

PAGE_SIZES = {size: Memory("64M", page_size=size) for size in (4096, 16384, 65536)}


@st.composite
def page_lists(draw, most=300):
    """Runs of pages, some of which follow each other, repeat, go down, or lie in ZONE_DEVICE."""
    out = []
    for _ in range(draw(st.integers(1, 12))):
        kind = draw(st.sampled_from(["anywhere", "after", "again", "device", "every other"]))
        length = draw(st.sampled_from([1, 1, 2, 3, 8, 31, 33, 100]))
        if kind == "after" and out and out[-1] + length < MEM.nr_pages:
            start = out[-1] + 1
        elif kind == "again" and out:
            start = out[-1]
        elif kind == "device":
            start = draw(st.sampled_from(STARTS)) - draw(st.integers(0, 3))
        else:
            start = draw(st.integers(16, 4000))
        if kind == "every other":
            out += range(start, start + 2 * length, 2)
        else:
            out += [pfn for pfn in range(start, start + length) if pfn < MEM.nr_pages]
    return out[:most]


SEGMENTS = st.sampled_from([PAGE, PAGE + 1, 2 * PAGE, 3 * PAGE, 16 * PAGE, 65536, 1 << 20, UINT_MAX])


def check(sgt, model):
    """Entries, chunk sizes, slots and marks are the model's."""
    sgt.check()
    assert rows(sgt) == model.entries()
    assert sgt.chunks == model.sizes()
    assert sgt.orig_nents == sgt.nents == model.nents
    assert mmc.sg_nents(sgt) == model.nents
    if isinstance(sgt, SGAppendTable):
        assert sgt.total_nents == model.total_nents >= sgt.orig_nents
        assert sum(sgt.chunks) == sgt.total_nents + len(sgt.chunks) - 1


@given(page_lists(), st.integers(0, PAGE - 1), SEGMENTS, st.data())
def test_one_call(pfns, offset, max_segment, data):
    span = len(pfns) * PAGE
    size = span - offset - data.draw(st.integers(0, PAGE - 1 - (offset if len(pfns) == 1 else 0)))
    model = Table(device_starts=STARTS)
    model.append(pfns, offset, size, max_segment, 0)
    sgt = build(MEM, pfns, offset=offset, size=size, max_segment=max_segment)
    check(sgt, model)
    # Law 1: the bytes are the list's, in order, and no more than asked for.
    assert sum(length for _, _, length in rows(sgt)) == size
    assert join(bytes_of(rows(sgt))) == join(cut([(pfn, 0, PAGE) for pfn in pfns], offset, size))
    assert mmc.sg_page_pfns(sgt).tolist() == pages_of(rows(sgt)) == pfns
    # Law 2: no entry is too long, and neighbours are contiguous only after a full one.
    most = max_segment // PAGE * PAGE
    for i, (pfn, start, length) in enumerate(rows(sgt)):
        assert start + length <= most
        if i and pfn not in STARTS:
            before = rows(sgt)[i - 1]
            if before[0] * PAGE + before[1] + before[2] == pfn * PAGE:
                assert before[1] + before[2] == most


@given(page_lists(), st.integers(0, PAGE - 1), SEGMENTS, st.lists(st.integers(0, 300), max_size=6), st.integers(0, 300),
       st.booleans())
def test_any_split_into_batches_gives_one_layout(pfns, offset, max_segment, cuts, slack, by_runs):
    """Law 3, and against the model after each batch; `slack` over-estimates what is to come, which costs slots only."""
    whole = build(MEM, pfns, offset=offset, max_segment=max_segment)
    edges = [0, *sorted({edge % len(pfns) for edge in cuts} - {0}), len(pfns)]
    sgt, model = SGAppendTable(MEM), Table(device_starts=STARTS)
    for start, stop in zip(edges, edges[1:]):
        left = len(pfns) - stop + (slack if stop < len(pfns) else 0)
        first = offset if start == 0 else 0
        batch = pfns[start:stop]
        model.append(batch, first, len(batch) * PAGE - first, max_segment, left)
        pages = PageList(MEM, batch)
        if by_runs:
            pages = PageRanges.from_pagelist(pages)
        mmc.sg_alloc_append_table_from_pages(sgt, pages, first, len(batch) * PAGE - first, max_segment, left)
        check(sgt, model)
    assert rows(sgt) == rows(whole)
    if not slack:
        assert len(sgt.chunks) >= len(whole.chunks)


@given(st.lists(st.tuples(page_lists(40), st.integers(0, 60), st.integers(0, 2), SEGMENTS), min_size=1, max_size=6), st.data())
def test_wrong_promises_are_refused_as_the_model_refuses(calls, data):
    """left_pages that is too small, offsets and short sizes in the middle: refused with nothing changed, or right."""
    sgt, model = SGAppendTable(MEM), Table(device_starts=STARTS)
    for pfns, left, oddity, max_segment in calls:
        offset = data.draw(st.integers(0, PAGE - 1)) if oddity == 1 else 0
        size = len(pfns) * PAGE - offset - (data.draw(st.integers(0, PAGE)) if oddity == 2 else 0)
        before = snapshot(sgt)
        try:
            model.append(pfns, offset, size, max_segment, left)
            good = True
        except Refused:
            good = False
        try:
            append(sgt, pfns, left, offset=offset, size=size, max_segment=max_segment)
            assert good
        except InvalidArgument:
            assert not good and snapshot(sgt) == before
        if model.nents:
            check(sgt, model)


@given(page_lists(), page_lists(), SEGMENTS, st.integers(0, 200), st.integers(1, 6))
def test_a_failing_chunk_changes_nothing_and_the_retry_is_as_if_new(first, second, max_segment, left, nth):
    sgt, model = SGAppendTable(MEM), Table(device_starts=STARTS)
    for pfns, later in ((first, len(second) + left), (second, left)):
        model.append(pfns, 0, len(pfns) * PAGE, max_segment, later)
        before = snapshot(sgt)
        try:
            with MEM.inject("sg", nth):
                append(sgt, pfns, later, max_segment=max_segment)
        except MMError as error:
            assert error.errno == 12 and snapshot(sgt) == before
            append(sgt, pfns, later, max_segment=max_segment)
        check(sgt, model)


@given(st.sampled_from(list(PAGE_SIZES)), st.lists(st.integers(16, 900), min_size=1, max_size=40), st.integers(0, 4095),
       st.integers(1, 20), st.integers(0, 4095))
def test_other_page_sizes(page, pfns, offset, pages_a_segment, more):
    mem = PAGE_SIZES[page]
    max_segment = pages_a_segment * page + more
    model = Table(page)
    model.append(pfns, offset, len(pfns) * page - offset, max_segment, 0)
    check(build(mem, pfns, offset=offset, max_segment=max_segment), model)


# ---- bytes ------------------------------------------------------------------------------------------------------------
@st.composite
def pieces(draw, overlap=True):
    """Entries within the pages of the pool: any offset, also beyond a page, and empty ones."""
    out = []
    for i in range(draw(st.integers(1, 8))):
        page = draw(st.integers(0, 50)) if overlap else 8 * i
        offset = draw(st.sampled_from([0, 1, 100, 4095, 4096, 5000, 9000]))
        length = draw(st.sampled_from([0, 1, 2, 100, 4095, 4096, 4097, 10000]))
        out.append((BASE + page, offset, length))
    return out


def fill():
    for i, page in enumerate(POOL):
        mmc.page_address(page)[:] = ((np.arange(PAGE) * 7 + i * 13) % 251).astype(np.uint8).tobytes()


def physical(runs):
    """The bytes at physical (address, length) runs."""
    memory = b"".join(bytes(mmc.page_address(page)) for page in POOL)
    return b"".join(memory[at - BASE * PAGE:at - BASE * PAGE + length] for at, length in runs)


@given(pieces(), st.integers(0, 40000), st.integers(0, 40000))
def test_copies_are_the_bytes_that_entries_name(wanted, skip, length):
    fill()
    sgt = entries(BYTES, wanted)
    everything = physical(bytes_of(wanted))
    out = bytearray(length)
    n = mmc.sg_pcopy_to_buffer(sgt, out, skip)
    assert n == max(0, min(length, len(everything) - skip)) and out[:n] == everything[skip:skip + n]
    windows = [bytes(window) for window in mmc.sg_miter(sgt, SG_MITER_FROM_SG)]
    assert b"".join(windows) == everything and all(windows)
    assert len(mmc.sg_page_pfns(sgt)) == len(pages_of(wanted))
    miter = mmc.sg_miter(sgt, SG_MITER_FROM_SG)
    assert miter.skip(skip // 3) is (skip // 3 <= len(everything))
    assert miter.skip(skip - skip // 3) is (skip <= len(everything))
    assert b"".join(bytes(window) for window in miter) == everything[skip:]


@given(pieces(overlap=False), st.binary(min_size=1, max_size=500), st.integers(0, 20000))
def test_what_is_copied_in_comes_out(wanted, data, skip):
    fill()
    before = physical([(BASE * PAGE, 64 * PAGE)])
    sgt = entries(BYTES, wanted)
    n = mmc.sg_pcopy_from_buffer(sgt, data, skip)
    out = bytearray(n)
    assert mmc.sg_pcopy_to_buffer(sgt, out, skip) == n and out == data[:n]
    # Nothing else moved.
    model = bytearray(before)
    at = 0
    for address, length in cut(wanted, skip, n) if n else []:
        model[address - BASE * PAGE:address - BASE * PAGE + length] = data[at:at + length]
        at += length
    assert physical([(BASE * PAGE, 64 * PAGE)]) == bytes(model)


@given(pieces(), st.integers(0, 30000), st.lists(st.integers(1, 9000), min_size=1, max_size=5), st.booleans())
def test_splits_are_the_bytes_in_order(wanted, skip, sizes, mapped):
    sgt = entries(BYTES, wanted)
    device = mmc.Device(BYTES, iommu=True, max_seg_size=8192)
    if mapped:
        mmc.dma_map_sgtable(device, sgt)
    try:
        at, cpu, dma = skip, [], []
        segments = [(int(r["dma_address"]), 0, int(r["dma_length"])) for r in sgt.entries[:sgt.nents]] if mapped else []
        try:
            for size in sizes:
                cpu.append(cut(wanted, at, size))
                if mapped:
                    dma.append(cut(segments, at, size, 1))
                at += size
        except Refused:
            try:
                mmc.sg_split(sgt, skip, sizes)
                raise AssertionError("the sizes are beyond the list")
            except InvalidArgument:
                return
        out = mmc.sg_split(sgt, skip, sizes)
        assert [bytes_of(rows(part)) for part in out] == cpu
        assert all(length for part in out for _, _, length in rows(part))
        if mapped:
            assert [[(int(r["dma_address"]), int(r["dma_length"])) for r in part.entries[:part.nents]] for part in out] == dma
    finally:
        if mapped:
            mmc.dma_unmap_sgtable(device, sgt)
        assert rows(sgt) == wanted


# ---- DMA ----------------------------------------------------------------------------------------------------------------
@given(pieces(), st.sampled_from([1, 4096, 5000, 8192, 65536, UINT_MAX]), st.sampled_from([4095, 8191, 65535, UINT_MAX,
                                                                                        (1 << 64) - 1]),
       st.integers(0, 30))
def test_iommu_mapping(wanted, max_seg, boundary, nth):
    sgt = entries(BYTES, wanted)
    before = rows(sgt)
    device = mmc.Device(BYTES, iommu=True, max_seg_size=max_seg, seg_boundary_mask=boundary)
    segments, size = dma_segments(wanted, PAGE, max_seg, boundary)
    if nth:
        with BYTES.inject("iommu_map", nth):
            try:
                mmc.dma_map_sgtable(device, sgt)
            except MMError as error:
                assert error.errno == 22
                assert (rows(sgt), sgt.nents, sgt.mapped) == (before, len(wanted), False)
                assert device.iova_ranges == [] and device.domain.stats["leaves"] == 0 == device.domain.stats["bytes"]
    if not sgt.mapped:
        mmc.dma_map_sgtable(device, sgt)
    assert rows(sgt) == before                              # the CPU view is what it was
    table = sgt.entries
    if segments:
        (start, end), = device.iova_ranges
        assert end - start == size
        assert [(int(r["dma_address"]) - start, int(r["dma_length"])) for r in table[:sgt.nents]] == segments
    assert sgt.nents == len(segments)
    assert all(int(r["dma_address"]) == (1 << 64) - 1 and r["dma_length"] == 0 for r in table[sgt.nents:])
    # A byte that the device sees is the byte that the CPU sees.
    position = 0
    for r in table[:sgt.nents]:
        for k in range(0, int(r["dma_length"]), 97):
            (at, _), = cut(wanted, position + k, 1)
            assert device.domain.iova_to_phys(int(r["dma_address"]) + k) == at
        position += int(r["dma_length"])
    # Entries that fit between boundaries cross none, merged or not.
    if all(offset % PAGE + length <= boundary + 1 for _, offset, length in wanted):
        for r in table[:sgt.nents]:
            first, last = int(r["dma_address"]), int(r["dma_address"]) + int(r["dma_length"]) - 1
            assert first & ~boundary == last & ~boundary
    mmc.dma_unmap_sgtable(device, sgt)
    assert (rows(sgt), sgt.nents) == (before, len(wanted))
    assert device.iova_ranges == [] and device.domain.stats["leaves"] == 0 and device.domain.stats["tables"] == 1


# ---- tables that were damaged ----------------------------------------------------------------------------------------
FIELDS = ("sgl", "nents", "orig_nents", "total_nents", "prv", "chunk", "nr_chunks", "chunks_room", "slab", "max_ents", "nr_allocs",
          "nr_frees")


class Words:
    """The C struct of a table and its slots, written behind the engine's back: for states that only a bug makes."""

    def __init__(self, sgt):
        words = (ctypes.c_uint64 * 40).from_address(id(sgt))
        counts = [sgt.nents, sgt.orig_nents, getattr(sgt, "total_nents", sgt.capacity)]
        first = next(i for i in range(2, 37) if list(words[i + 1:i + 4]) == counts)
        self.at = {name: (words, first + i) for i, name in enumerate(FIELDS)}

    def __getitem__(self, name):
        words, i = self.at[name]
        return words[i]

    def __setitem__(self, name, value):
        words, i = self.at[name]
        words[i] = value

    def slot(self, i):
        """The four words of a slot of the first chunk; the first is page_link."""
        return (ctypes.c_uint64 * 4).from_address(self["sgl"] + 32 * i)

    def chunk(self, i):
        """sgl, first, nr of a chunk."""
        return (ctypes.c_uint64 * 3).from_address(self["chunk"] + 24 * i)


def damage_chunk(words):
    where = words.chunk(1)
    where[1] += 1
    return where, 1, where[1] - 1


def damage_slot(i, change):
    def damage(words):
        slot = words.slot(i)
        before = slot[0]
        slot[0] = change(before)
        return slot, 0, before
    return damage


def damage_count(name, by=1):
    def damage(words):
        before = words[name]
        words[name] = before + by
        return words, name, before
    return damage


@pytest.mark.parametrize("law, damage", [
    ("chunks follow each other", damage_chunk),
    ("the last slot of a chunk links to the next", damage_slot(127, lambda link: link + 32)),
    ("a link is the last slot of its chunk", damage_slot(5, lambda link: link | 1)),
    ("entries name pages of the Memory", damage_slot(5, lambda link: 1 << 50)),
    ("slots are total_nents and the links", damage_count("total_nents")),
    ("entries fit their slots", damage_count("nents", 1000)),
    ("chunks are freed once", damage_count("nr_frees")),
])
def test_damage_of_a_table_is_found(law, damage):
    mem = Memory("4M")
    sgt = build(mem, range(100, 500, 2))
    assert len(sgt.chunks) == 2
    sgt.check()
    where, name, before = damage(Words(sgt))
    with pytest.raises(mmc.BadPage, match=law):
        sgt.check()
    where[name] = before
    sgt.check()


@pytest.mark.parametrize("law, damage", [
    ("the last slot carries the end mark", lambda words, n: damage_slot(n - 1, lambda link: link & ~2)(words)),
    ("what follows the last entry is blank", lambda words, n: damage_slot(n - 1, lambda link: 100 << 2 | 2)(words)),
    ("the last entry is the one that is extended", lambda words, n: damage_count("prv", 32)(words)),
])
def test_damage_of_an_append_table_is_found(law, damage):
    mem = Memory("4M")
    sgt = mmc.SGAppendTable(mem)
    append(sgt, [100, 102, 104], left=5)
    sgt.check()
    where, name, before = damage(Words(sgt), sgt.total_nents)
    with pytest.raises(mmc.BadPage, match=law):
        sgt.check()
    where[name] = before
    sgt.check()
