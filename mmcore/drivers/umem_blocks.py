"""A umem as blocks of one size, which is what a device's page table holds: which sizes do, and where the blocks are.

Units: page sizes and addresses: bytes; bitmaps of sizes: uint64.
Raises: TypeError, InvalidArgument for sizes that are none, and a umem that is released.
Threads: one at a time a umem.
Kernel: the functions of these names in umem.c and ib_umem.h.
"""
import numpy as np

from ..core.errors import InvalidArgument
from .umem import ib_umem_offset, ib_umem_start_dma_addr

__all__ = ["ib_umem_find_best_pgsz", "ib_umem_find_best_pgoff", "ib_umem_is_contiguous", "ib_umem_num_dma_blocks",
           "rdma_umem_for_each_dma_block"]

_WORD = 1 << 64


def _number(value, what, least=0):
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise TypeError(f"{what} is an int, not {value!r}")
    value = value.__index__()
    if not least <= value < _WORD:
        raise InvalidArgument(f"{what} {value} is not in {least}..2**64-1")
    return value


def _pgsz(pgsz):
    pgsz = _number(pgsz, "pgsz", 1)
    if pgsz & (pgsz - 1):
        raise InvalidArgument(f"pgsz {pgsz} is no power of two")
    return pgsz


def _segments(umem):
    """The DMA view: (addresses, lengths), uint64."""
    if getattr(umem, "released", False):
        raise InvalidArgument("the umem is released", addr=umem.address)
    rows = umem.sgt.entries[:umem.sgt.nents]
    return rows["dma_address"].astype(np.uint64), rows["dma_length"].astype(np.uint64)


def ib_umem_find_best_pgsz(umem, pgsz_bitmap, virt):
    """Return the largest page size of a bitmap that a device can map the umem with when it calls its first byte `virt`; or 0.

    Sets umem.iova to virt, unless the result is 0: then it stays (the kernel has changed it; T56). A size may be larger than
    the umem when it covers it: the smallest supported one that does is the largest that is taken. Raises InvalidArgument
    for a umem without bytes (T58), and for a range that runs over 64 bits.
    """
    bitmap, virt = _number(pgsz_bitmap, "pgsz_bitmap"), _number(virt, "virt")
    if not umem.length:
        raise InvalidArgument("a umem of 0 bytes has no pages")
    if virt + umem.length > _WORD:
        raise InvalidArgument(f"{umem.length} bytes from iova {virt:#x} on run over the end of 64 bits", addr=virt)
    address, length = _segments(umem)
    # The highest bit that changes over the range: a page that covers it all has its boundary above.
    cover = max(1, ((umem.length - 1 + virt) ^ virt).bit_length())
    mask = sum(bit for bit in _bits(bitmap) if bit >= 1 << cover)
    offset = np.uint64(ib_umem_offset(umem))
    # va of each segment: the first begins offset bytes before virt, as far as its page goes.
    with np.errstate(over="ignore"):
        va = np.uint64(virt) + np.concatenate((np.zeros(1, np.uint64), np.cumsum(length, dtype=np.uint64)[:-1] - offset))
        starts = np.ones(len(address), bool)
        starts[1:] = address[1:] != address[:-1] + length[:-1]
        at = address.copy()
        at[0] += offset
    mask |= int(np.bitwise_or.reduce((at ^ va)[starts]))
    starts[0] = False
    if starts.any():
        mask |= int(np.bitwise_or.reduce(va[starts]))
    if mask:
        bitmap &= (mask & -mask) * 2 - 1
    if not bitmap:
        return 0
    umem.iova = virt
    return 1 << (bitmap.bit_length() - 1)


def _bits(bitmap):
    while bitmap:
        yield bitmap & -bitmap
        bitmap &= bitmap - 1


def ib_umem_find_best_pgoff(umem, pgsz_bitmap, pgoff_bitmask):
    """Return the best page size for a device that cares for some bits of the offset only: those of pgoff_bitmask."""
    return ib_umem_find_best_pgsz(umem, pgsz_bitmap, ib_umem_start_dma_addr(umem) & _number(pgoff_bitmask, "pgoff_bitmask"))


def ib_umem_is_contiguous(umem):
    """Tell whether the device sees the umem in one piece. Leaves iova as it is."""
    first, iova = ib_umem_start_dma_addr(umem), umem.iova
    size = 1 << (first ^ (first + umem.length - 1)).bit_length()
    try:
        return ib_umem_find_best_pgoff(umem, size, _WORD - 1) != 0
    finally:
        umem.iova = iova


def ib_umem_num_dma_blocks(umem, pgsz):
    """Return how many blocks of pgsz bytes the umem takes when the device sees it at iova."""
    pgsz = _pgsz(pgsz)
    return -(-(umem.iova + umem.length) // pgsz) - umem.iova // pgsz


def rdma_umem_for_each_dma_block(umem, pgsz):
    """Iterate over the addresses of the blocks, each a multiple of pgsz: ib_umem_num_dma_blocks() of them.

    pgsz is one that ib_umem_find_best_pgsz() gave: a block may go over several segments then, when they follow each other.
    """
    pgsz = _pgsz(pgsz)
    # For sizes below a page: begin at the block that the first byte is in, not at the start of its page (T60).
    skip = ib_umem_offset(umem) & -pgsz
    return _blocks(*_segments(umem), ib_umem_num_dma_blocks(umem, pgsz), pgsz, skip)


def _blocks(addresses, lengths, nr, pgsz, advance):
    i, left = 0, nr
    while left and i < len(addresses):
        length = int(lengths[i])
        if advance >= length:
            advance -= length
            i += 1
            continue
        at = int(addresses[i]) + advance
        yield at & -pgsz
        left -= 1
        advance += pgsz - (at & (pgsz - 1))     # 64-bit, as Python's ints are (T61)
