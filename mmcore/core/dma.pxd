"""DMA: what a device can address, and scatterlists as it sees them.

Laws
    Views       after mapping, the CPU's entries are the first orig_nents and the device's segments the first nents. They
                share slots and nothing else. Unmapping goes by what was mapped, never by the segments.
    Direct      a segment an entry, at its physical address; nothing is merged.
    IOMMU       one range of IOVAs a table. Entries that fill their pages follow each other in it, and make one segment up
                to max_seg_size and to the next multiple of seg_boundary_mask + 1. Spare entries: address ~0, length 0.
    Failure     leaves the CPU fields, nents, the IOMMU's tables and the IOVA space as they were.
"""
from libc.stdint cimport uint32_t, uint64_t
from mmcore.core.memory cimport *
from mmcore.core.scatterlist cimport *
from mmcore.core.iommu cimport *

cdef struct dma_limits_t:
    uint64_t max_seg_size       # bytes
    uint64_t boundary           # seg_boundary_mask: a segment crosses no multiple of boundary + 1
    uint64_t mask               # dma_mask: the highest address

cdef class Device:
    cdef readonly Memory mem
    cdef dma_limits_t limits
    cdef readonly IOMMUDomain domain    # None: direct mapping
    cdef readonly uint64_t mappings     # tables mapped now

    cdef uint64_t iova_alloc(self, uint64_t size) except? 0     # ~0 when there is no room
    cdef void iova_free(self, uint64_t iova)
