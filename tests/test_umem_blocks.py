"""Page sizes and blocks of a umem: the known cases, and brute force over random DMA views."""
from types import SimpleNamespace

import pytest
from hypothesis import given, settings, strategies as st

from mmcore import *
from rdma_support import PAGE, RW, machine, scattered

K4, M2, M4, G1 = 1 << 12, 1 << 21, 1 << 22, 1 << 30
ALL = sum(1 << bit for bit in range(12, 64))
MEM = Memory("16M")


def seen(segments, length=None, address=0, iova=None):
    """What a device sees: DMA segments given by hand, on a table of as many entries."""
    sgt = sg_alloc_table(MEM, len(segments))
    for entry, (at, nbytes) in zip(for_each_sg(sgt), segments):
        sg_set_page(entry, MEM.page(8), PAGE, 0)
        entry.dma_address, entry.dma_length = at, nbytes
    length = sum(n for _, n in segments) if length is None else length
    return SimpleNamespace(sgt=sgt, length=length, address=address, iova=address if iova is None else iova)


BIG = [(0x34401400000 + i * 0xFFFFF000, 0xFFFFF000) for i in range(4)] + [(0x34401400000 + 4 * 0xFFFFF000, 0x4000)]
V = 0x7f0000200000


@pytest.mark.parametrize("bitmap, virt, segments, want", [
    (K4 | M2 | G1, V, [(0x40000000, M2)], M2),
    (K4 | M2 | G1, V, [(0x40001000, M2)], K4),
    (K4 | M2 | G1, V + 0x3000, [(0x40003000, 2 * K4)], M2),            # covers the span
    (ALL, V + 0x2000, [(0x40002000, 2 * K4)], 2 * K4),
    (ALL, V + 0x1000, [(0x40001000, 2 * K4)], 4 * K4),                 # the span crosses an 8K line
    (ALL, V + 0x2000, [(0x40002000, K4), (0x50003000, K4)], K4),
    (ALL, V + 0x4000, [(0x40004000, 2 * K4), (0x50006000, 2 * K4)], 2 * K4),
    (M2, V, [(0x40001000, K4)], 0),
    (K4 | M2 | G1, 0x7f0001400000, BIG, G1),
    (ALL, 0x7f0001400000, BIG, 0x400000000),
    (ALL, 0x7f0000000000, BIG, M4),
])
def test_T61_best_page_size(bitmap, virt, segments, want):
    umem = seen(segments)
    if want == 0:
        # T56: what failed leaves iova
        umem.iova = 77
        assert ib_umem_find_best_pgsz(umem, bitmap, virt) == 0 and umem.iova == 77
    else:
        assert ib_umem_find_best_pgsz(umem, bitmap, virt) == want and umem.iova == virt


def test_T61_blocks_of_a_table_whose_entries_end_anywhere():
    umem = seen(BIG, iova=0x7f0001400000)
    blocks = list(rdma_umem_for_each_dma_block(umem, M2))
    assert len(blocks) == 8192 == ib_umem_num_dma_blocks(umem, M2)
    assert (blocks[0], blocks[-1]) == (0x34401400000, 0x34801200000)
    assert all(b - a == M2 for a, b in zip(blocks, blocks[1:]))
    # One block larger than any entry, and than 32 bits.
    assert list(rdma_umem_for_each_dma_block(umem, 1 << 34)) == [0x34400000000, 0x34800000000][:ib_umem_num_dma_blocks(umem, 1 << 34)]


def test_T60_small_blocks_start_where_the_bytes_do():
    #   a 64K page; the region is its last 12K
    umem = seen([(0x40000000, 0x10000)], length=0x3000, address=0xd000, iova=0xd000)
    big = Memory("16M", page_size=65536)
    umem.sgt = sg_alloc_table(big, 1)
    entry = umem.sgt[0]
    sg_set_page(entry, big.page(8), 65536, 0)
    entry.dma_address, entry.dma_length = 0x40000000, 0x10000
    assert list(rdma_umem_for_each_dma_block(umem, K4)) == [0x4000d000, 0x4000e000, 0x4000f000]


def test_T58_no_bytes_no_pages():
    for virt in (0, PAGE):
        with pytest.raises(InvalidArgument, match="0 bytes"):
            ib_umem_find_best_pgsz(seen([(0x1000, PAGE)], length=0), ALL, virt)


@pytest.mark.parametrize("segments, contiguous", [
    ([(0x40003000, 3 * K4)], True), ([(0x40003000, K4), (0x40004000, K4)], True),
    ([(0x40003000, K4), (0x40005000, K4)], False), ([(0x40003000, K4), (0x40002000, K4)], False)])
def test_contiguous(segments, contiguous):
    umem = seen(segments, iova=5)
    assert ib_umem_is_contiguous(umem) is contiguous and umem.iova == 5


def test_best_pgoff_looks_at_the_bits_of_the_mask():
    umem = seen([(0x40003000, 2 * K4)])
    assert ib_umem_find_best_pgoff(umem, K4 | M2, M2 - 1) == M2 and umem.iova == 0x3000
    assert ib_umem_find_best_pgoff(umem, K4 | M2, 0) == K4 and umem.iova == 0


def fits(segments, offset, length, virt, size):
    """Can one address a page of this size name what every page of it holds? By hand, a byte range at a time."""
    pieces, va = [], virt - offset
    for at, n in segments:
        pieces.append((va, at, n))
        va += n
    frames = {}
    for va, at, n in pieces:
        start, end = max(va, virt), min(va + n, virt + length)
        while start < end:
            page, stop = start // size, min(end, (start // size + 1) * size)
            frames.setdefault(page, set()).add(at + (start - va) - (start - page * size))
            start = stop
    return all(len(bases) == 1 and next(iter(bases)) % size == 0 for bases in frames.values())


@settings(max_examples=400, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 24), st.integers(1, 6), st.booleans()), min_size=1, max_size=5), st.integers(0, PAGE - 1),
       st.integers(0, 40), st.booleans(), st.integers(0, PAGE - 1))
def test_best_page_size_by_brute_force(pieces, offset, virt, congruent, short):
    segments, end = [], 0
    for gap, n, joins in pieces:
        at = end if joins and segments else (end // PAGE + gap + 1) * PAGE
        segments.append((at, n * PAGE))
        end = at + n * PAGE
    length = max(1, sum(n for _, n in segments) - offset - short)
    # What is not congruent starts at a page, so that 4 KiB always do.
    offset = offset if congruent else 0
    virt = virt * PAGE + offset
    umem = seen(segments, length=length, address=offset)
    bitmap = sum(1 << bit for bit in range(12, 22))
    got = ib_umem_find_best_pgsz(umem, bitmap, virt)
    cover = max(1, ((length - 1 + virt) ^ virt).bit_length())
    most = min((1 << bit for bit in range(12, 22) if bit >= cover), default=1 << 21)
    # What it gives can be mapped. It may give less than could be: it looks at where runs start, not at what is covered.
    assert got and got <= most and fits(segments, offset, length, virt, got)
    if all(a + n == b for (a, n), (b, _) in zip(segments, segments[1:])):
        assert not any(fits(segments, offset, length, virt, size) for size in (1 << bit for bit in range(12, 22)) if got < size <= most)
    umem.iova = virt
    blocks = list(rdma_umem_for_each_dma_block(umem, got))
    assert len(blocks) == ib_umem_num_dma_blocks(umem, got) and all(block % got == 0 for block in blocks)


def test_real_umems():
    for iommu in (False, True):
        mem, mm, dev = machine(iommu=iommu)
        addr = scattered(mm, 64)
        umem = ib_umem_get(dev, mm, addr + 10, 63 * PAGE, RW)
        size = ib_umem_find_best_pgsz(umem, ALL, addr + 10)
        assert size >= PAGE
        blocks = list(rdma_umem_for_each_dma_block(umem, PAGE))
        assert len(blocks) == 64 == ib_umem_num_dma_blocks(umem, PAGE)
        assert ib_umem_is_contiguous(umem) is iommu
        ib_umem_release(umem)


@pytest.mark.parametrize("pgsz", [0, 3, -PAGE, "4K", None])
def test_wrong_sizes(pgsz):
    umem = seen([(0x1000, PAGE)])
    with pytest.raises((InvalidArgument, TypeError)):
        ib_umem_num_dma_blocks(umem, pgsz)
    with pytest.raises((InvalidArgument, TypeError)):
        rdma_umem_for_each_dma_block(umem, pgsz)
