"""Folio extents, runs and kinds from arrays: no machine is needed."""

import numpy as np
import pytest

from mmcore.live import backing as b
from mmcore.live import pagemap as pm

HEAD = np.uint64(1 << pm.KPF_COMPOUND_HEAD)
TAIL = np.uint64(1 << pm.KPF_COMPOUND_TAIL)


def memory(size, *folios):
    """Return kpageflags of size frames in which (head PFN, order) are folios."""
    words = np.zeros(size, np.uint64)
    for head, order in folios:
        words[head] = HEAD
        words[head + 1:head + (1 << order)] = TAIL
    return words


def span_of(words, asked=None):
    def span(start, stop):
        if asked is not None:
            asked.append((start, stop))
        out = np.zeros(stop - start, np.uint64)
        part = words[start:min(stop, len(words))]
        out[:len(part)] = part
        return out

    return span


def extents(words, pfns):
    pfns = np.array(pfns, np.uint64)
    flags = np.where(pfns != 0, words[pfns], np.uint64(0))
    heads, orders = pm.folio_extents(pfns, flags, span_of(words))
    return heads.tolist(), orders.tolist()


@pytest.mark.parametrize("pfns, heads, orders", [
    ([], [], []),
    ([0, 0], [0, 0], [0, 0]),
    ([5, 7], [5, 7], [0, 0]),
    ([16, 17, 31], [16, 16, 16], [4, 4, 4]),                      # whole, begun, ended
    ([20], [16], [4]),                                            # head and end lie outside
    ([33, 0, 32, 33], [32, 0, 32, 32], [1, 0, 1, 1]),             # hole, any order, duplicates
    ([34, 36], [34, 36], [1, 2]),                                 # neighbours of other orders
    ([512, 1023, 1024], [512, 512, 1024], [9, 9, 9]),             # across a block
    ([3000], [2048], [10]),                                       # larger than a block: tail first
    ([2048], [2048], [10]),                                       # and tails after the block
    ([8191, 8192], [4096, 8192], [12, 0]),
])
def test_folio_extents(pfns, heads, orders):
    words = memory(9000, (16, 4), (32, 1), (34, 1), (36, 2), (512, 9), (1024, 9), (2048, 10), (4096, 12))
    assert extents(words, pfns) == (heads, orders)


def test_gigantic_folio_is_found_from_its_middle():
    words = memory(3 << 18, (1 << 18, 18))
    assert extents(words, [(1 << 18) + 100_000]) == ([1 << 18], [18])


@pytest.mark.parametrize("words", [
    memory(64, (17, 2)),                              # not aligned
    np.where(np.arange(64) == 4, TAIL, HEAD),         # two frames from an odd one
    np.concatenate((memory(16, (8, 2))[:11], np.zeros(53, np.uint64))),   # 3 frames
])
def test_flags_of_a_folio_that_is_being_split_are_refused(words):
    at = [p for p in range(1, 64) if words[p] & TAIL]
    with pytest.raises(ValueError, match="no folio"):
        extents(words, at)


def test_reading_around_goes_by_long_runs():
    words = memory(1 << 14, *((head, 4) for head in range(1024, 1 << 13, 16)))
    asked = []
    pfns = np.arange(1024, 1 << 13, dtype=np.uint64)
    pm.folio_extents(pfns, words[pfns], span_of(words, asked))
    assert len(asked) <= 3


def test_gather(tmp_path):
    words = np.arange(10_000, dtype=np.uint64) * 3
    path = tmp_path / "kpageflags"
    path.write_bytes(words.tobytes())
    file = pm.KPageFile.__new__(pm.KPageFile)
    file.file = open(path, "rb", buffering=0)
    with file:
        pfns = np.array([9999, 0, 5, 5, 4000, 6, 20_000], np.uint64)
        assert file.gather(pfns).tolist() == [29997, 0, 15, 15, 12000, 18, 0]
        assert file.gather(np.zeros(0, np.uint64)).tolist() == []
        assert file.span(9998, 10_002).tolist() == [29994, 29997, 0, 0]


def test_near_runs():
    def runs(*values):
        return list(pm.near_runs(np.array(values, np.uint64), 2))

    assert runs() == []
    assert runs(7) == [(0, 0)]
    assert runs(1, 3, 5, 8, 9, 100) == [(0, 2), (3, 4), (5, 5)]


@pytest.mark.parametrize("pfns, firsts, lengths", [
    ([], [], []),
    ([0, 0], [], []),
    ([5, 6, 7], [0], [3]),
    ([5, 6, 0, 7, 8], [0, 3], [2, 2]),
    ([7, 6, 5], [0, 1, 2], [1, 1, 1]),
    ([5, 5, 6], [0, 1], [1, 2]),
    ([0, 1, 2], [1], [2]),                  # PFN 1 does not follow a hole
])
def test_physical_runs(pfns, firsts, lengths):
    got = b.physical_runs(np.array(pfns, np.uint64))
    assert (got[0].tolist(), got[1].tolist()) == (firsts, lengths)


def test_backing_of_a_mixture():
    pfns = np.array([512, 513, 0, 7, 8, 100], np.uint64)
    heads = np.array([512, 512, 0, 7, 8, 96], np.uint64)
    orders = np.array([9, 9, 0, 0, 0, 4], np.uint8)
    anon = np.uint64(1 << pm.KPF_ANON)
    flags = np.array([anon | HEAD, anon | TAIL, 0, anon, 1 << pm.KPF_ZERO_PAGE, anon | TAIL], np.uint64)
    got = b.describe(pfns, heads, orders, flags, 4096)
    assert (got.pages, got.folios, got.runs, got.sg_segments) == (5, 4, 3, 3)
    assert got.by_size == {2 << 20: 8192, 4096: 8192, 65536: 4096}
    assert got.by_kind == {"anon": 16384, "zero page": 4096}
    assert (got.length, got.present) == (24576, 20480)
    assert "not present: 4 KiB" in str(got)


@pytest.mark.parametrize("npages, segments", [(0xFFFFF, 1), (0x100000, 2), (0x1FFFFE, 2), (0x1FFFFF, 3)])
def test_scatterlist_segments_end_before_4_gib(npages, segments):
    pfns = np.arange(1, npages + 1, dtype=np.uint64)
    got = b.describe(pfns, pfns, np.zeros(npages, np.uint8), np.zeros(npages, np.uint64), 4096)
    assert (got.runs, got.sg_segments) == (1, segments)


def test_each_page_is_of_one_kind():
    def word(*bits):
        return sum(1 << bit for bit in bits)

    flags = np.array([
        word(pm.KPF_ZERO_PAGE), word(pm.KPF_ZERO_PAGE, pm.KPF_COMPOUND_TAIL, pm.KPF_THP),
        word(pm.KPF_HUGE, pm.KPF_COMPOUND_HEAD), word(pm.KPF_ANON, pm.KPF_SWAPBACKED),
        word(pm.KPF_ANON, pm.KPF_KSM), word(pm.KPF_SWAPBACKED), word(pm.KPF_LRU), word(pm.KPF_NOPAGE),
    ], np.uint64)
    assert b.kinds(flags) == {
        "huge zero": 1, "zero page": 1, "no struct page": 1, "hugetlb": 1, "ksm": 1, "anon": 1,
        "shmem": 1, "file": 1,
    }
