"""What the scatterlist tests share."""
import mmcore as mmc
from mmcore import PageList, SGAppendTable

PAGE = 4096
UINT_MAX = 0xffffffff


def rows(sgt):
    """Entries of the CPU view as (pfn, offset, length)."""
    return [(int(row["pfn"]), int(row["offset"]), int(row["length"])) for row in sgt.entries[:sgt.orig_nents]]


def dma_rows(sgt):
    """Segments of the DMA view as (address, length)."""
    return [(int(row["dma_address"]), int(row["dma_length"])) for row in sgt.entries[:sgt.nents]]


def append(sgt, pfns, left=0, *, offset=0, size=None, max_segment=None):
    """Append PFNs; size None: all bytes."""
    pages = PageList(sgt.mem, pfns)
    size = len(pages) * sgt.mem.page_size - offset if size is None else size
    mmc.sg_alloc_append_table_from_pages(sgt, pages, offset, size, max_segment, left)


def build(mem, pfns, *, offset=0, size=None, max_segment=UINT_MAX):
    """Build a table over PFNs at once."""
    pages = PageList(mem, pfns)
    size = len(pages) * mem.page_size - offset if size is None else size
    return mmc.sg_alloc_table_from_pages_segment(pages, offset, size, max_segment)


def entries(mem, wanted):
    """A table with these (pfn, offset, length), set one by one."""
    sgt = mmc.sg_alloc_table(mem, len(wanted))
    for entry, (pfn, offset, length) in zip(mmc.for_each_sg(sgt), wanted):
        mmc.sg_set_page(entry, mem.page(pfn), length, offset)
    return sgt


def snapshot(sgt):
    """Everything of a table that a failed call must leave: entries with DMA fields, counts, chunks."""
    sgt.check()
    total = getattr(sgt, "total_nents", None)
    return (sgt.entries.tobytes(), sgt.nents, sgt.orig_nents, total, sgt.chunks, sgt.mapped)


def alloc(mem, nr):
    """nr pages that are allocated, in PFN order."""
    return mmc.alloc_pages_bulk(mem, nr)


def appendable(mem, **kwargs):
    return SGAppendTable(mem, **kwargs)
