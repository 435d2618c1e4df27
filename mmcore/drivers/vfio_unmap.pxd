"""Unmapping a DMA mapping from its IOMMUs, and releasing its pages (vfio_unmap_unpin).

    other domains   all of the range, each with a flush of its own
    first domain    region by region: unmap without flushing, queue; at VFIO_IOMMU_TLB_SYNC_MAX regions, or when one
                    does not go that way, flush once and unpin the queue. A region that the fast way does not take is
                    unmapped and flushed on its own, after the queue.

Laws
    No page is unpinned before the flush that follows its unmapping, in any domain.
    As many pages are unpinned as the IOMMU says it unmapped; the rest of a region is tried again.
    Regions come from remembered runs, or from asking the first domain for every page (as the kernel does).
    What the IOMMU no longer has (somebody unmapped it behind the container's back) is skipped, and named after. With
    remembered runs its pages are unpinned all the same.
"""
from libc.stdint cimport uint64_t
from mmcore.core.iommu cimport IOMMUDomain, iommu_t
from mmcore.drivers.vfio_release cimport *

cdef enum:
    TLB_SYNC_MAX = 512
    MAX_DOMAINS = 64

cdef enum accounting:
    ACCOUNT_NOT                 # z.unlocked says what went
    ACCOUNT_ALL                 # all that went is uncharged: no external pin is left
    ACCOUNT_EACH                # chunk by chunk; what is pinned externally stays charged

cdef struct vfio_region_t:           # struct vfio_regions
    uint64_t iova
    uint64_t pfn
    uint64_t nr                 # pages

cdef struct unmapping_t:
    putting_t u
    dma_t *d
    iommu_t *domain             # the first
    bint each                   # ACCOUNT_EACH
    uint64_t nr_queued
    uint64_t unlocked           # pages released that were charged
    uint64_t lost               # pages that the IOMMU did not have
    uint64_t lost_at            # IOVA of the first
    vfio_region_t queue[TLB_SYNC_MAX]

cdef struct domains_t:
    iommu_t *d[MAX_DOMAINS]
    int n

cdef int domains_in(list domains, domains_t *out) except -1     # of IOMMUDomain
# Unmap and release the first `size` bytes
cdef void unmap_unpin(unmapping_t *z, dma_t *d, const domains_t *domains, uint64_t size, int accounting) noexcept nogil
cdef object tell_pins(VFIODma dma, pins_t *log, int sign)         # the ledger, under the mapping's name
cdef object unmapping_failed(Memory mem, unmapping_t *z)        # raises what went wrong, if anything did
