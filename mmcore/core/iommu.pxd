"""An IOMMU's page tables: IOVA to physical, in leaves of 4 KiB, 2 MiB and 1 GiB.

Laws
    A leaf of size s maps an IOVA and a physical address that are both multiples of s. The largest one that fits is used.
    A table without entries does not exist, except the root: after the last unmap nothing is left.
    A failed map leaves what was there before; mapping over a mapping is refused (-EEXIST) before anything changes.
    Unmapping never splits a leaf: part of one takes all of it, as on hardware without splitting, and says how much went.

A table has as many 8-byte entries as fill a page of the Memory; so with 16 KiB pages the leaves are 16 KiB and 32 MiB,
with 64 KiB pages 64 KiB and 512 MiB. An entry is 0, a leaf (physical address | IOMMU_LEAF | prot), or a table's address.

Locks: one mutex a domain, taken by each call; walks of iova_to_phys take it as well.
"""
from libc.stdint cimport uint32_t, uint64_t
from mmcore.core.memory cimport *

cdef enum:
    IOMMU_READ = 1
    IOMMU_WRITE = 2
    IOMMU_CACHE = 4
    IOMMU_LEAF = 8              # ours: tells a leaf from a table
    IOMMU_LOW = 15
    IOMMU_LEVELS = 6            # at most; enough for 64-bit IOVAs with 4 KiB pages

cdef struct iommu_node_t:
    uint64_t nr_used            # entries that are not 0
    uint64_t *entry

cdef struct iommu_t:
    mem_t *m                    # where failures are injected; NULL until the domain is set up
    pthread_mutex_t lock
    unsigned page_shift         # of the smallest leaf
    unsigned bits               # of IOVA that a level decodes
    int top                     # level of the root; leaves are at levels 0, 1 and 2
    uint64_t page_sizes         # a bit a leaf size (pgsize_bitmap)
    iommu_node_t *root
    # counts
    uint64_t leaves             # mapped now
    uint64_t mapped             # bytes mapped now
    uint64_t maps               # leaves ever written
    uint64_t unmaps             # leaves ever cleared
    uint64_t map_calls          # iommu_map() that succeeded
    uint64_t syncs              # IOTLB flushes
    uint64_t stale              # bytes unmapped since the last flush: a device may still reach them
    uint64_t walks              # iova_to_phys
    uint64_t nodes              # tables, the root included

cdef int iommu_init(iommu_t *d, unsigned page_shift, uint64_t page_sizes) noexcept nogil    # 0 or -ENOMEM
cdef void iommu_destroy(iommu_t *d) noexcept nogil
# 0, -EINVAL (not aligned, wraps), -EEXIST, -ENOMEM (a table), or what was injected; size in bytes
cdef int iommu_map(iommu_t *d, uint64_t iova, uint64_t phys, uint64_t size, unsigned prot) noexcept nogil
# bytes from iova on that went, as far as leaves went without a hole; unmap_fast leaves the flush to the caller
cdef uint64_t iommu_unmap_fast(iommu_t *d, uint64_t iova, uint64_t size) noexcept nogil
cdef uint64_t iommu_unmap(iommu_t *d, uint64_t iova, uint64_t size) noexcept nogil
cdef void iommu_sync(iommu_t *d) noexcept nogil
cdef uint64_t iommu_iova_to_phys(iommu_t *d, uint64_t iova) noexcept nogil                  # ~0: not mapped
# The same for each page from iova on, while they follow each other, at most to iova + size: bytes, 0 when iova is not mapped
cdef uint64_t iommu_phys_run(iommu_t *d, uint64_t iova, uint64_t size, uint64_t *phys) noexcept nogil
cdef uint64_t iommu_leaf_at(iommu_t *d, uint64_t iova) noexcept nogil                       # size of the leaf, 0: none

cdef class IOMMUDomain:
    cdef readonly Memory mem
    cdef iommu_t d
    cdef bint ready
    cdef readonly list windows      # [(first, last)] of IOVAs that it can translate; both inside
    cdef readonly list reserved     # [(first, last, kind)] of IOVAs that are not for DMA mappings
    cdef public object holder       # a weak reference to the container it is attached to, or None
    cdef list closed                # [(first IOVA, one past the last)] of what devices are not given, sorted and apart
    cdef list taken                 # the same of what they were given (dma_map_sgtable()): they share one IOVA space
    cdef object taking              # a lock: of taken

    cdef mem_t *enter(self) except NULL     # for the nogil calls above; leave() ends
    cdef void leave(self) noexcept
