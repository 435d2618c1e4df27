"""Releasing pages of DMA mappings, and what they are charged.

Generations
    page    look at each page: reserved or not, its head, its counters (put_pfn; to 6.17)
    folio   one update a folio, for pages that are not reserved (the thread's folio_remaining_pages() and
            unpin_user_folio_dirty_locked(), proposed and not merged)
    range   one update a folio and no look at reserved pages, as long as the mapping never had one (has_rsvd; 6.18)

Laws
    All leave one state: pages of a writable mapping are marked dirty, and then lose one pin each.
    A reserved page, or a PFN without a struct page, is neither unpinned nor uncharged.
    Releasing does not fail. A page that has no pin left to drop (somebody dropped it) is passed over and named after.
    Unpinning follows the flush of the IOTLB: with Memory(debug=True) what comes too early is named as well.
"""
from libc.stdint cimport int64_t, uint64_t
from mmcore.core.hook cimport pins_t
from mmcore.core.iommu cimport iommu_t
from mmcore.core.walk cimport *
from mmcore.drivers.vfio_dma cimport *

cdef enum vfio_release:
    RELEASE_RANGE
    RELEASE_FOLIO
    RELEASE_PAGE

cdef struct putting_t:          # one call that releases
    mem_t *m
    int how                     # vfio_release
    iommu_t *domain             # whose translations must be flushed by now; NULL: none to be flushed
    pins_t *log                 # what goes, for those who watch pins; NULL: nobody does
    uint64_t pages              # pins dropped; added to the counters at the end
    uint64_t updates
    uint64_t large              # of them, of large folios
    uint64_t lookups
    int bad                     # BAD_* of the first page that had no pin, and where
    uint64_t bad_pfn
    uint64_t bad_count
    uint64_t early              # pages unpinned before the flush
    bint interrupted            # a signal handler raised while a folio lock was waited for

cdef void putting_begin(putting_t *u, mem_t *m, int how, pins_t *log) noexcept nogil
cdef void putting_end(putting_t *u) noexcept nogil              # adds the counts
cdef object putting_failed(Memory mem, putting_t *u, str call)  # raises what went wrong, if anything did

cdef int lock_acct(dma_t *d, int64_t npage) noexcept nogil      # 0, or -ENOMEM with nothing changed
cdef uint64_t put_pfns(putting_t *u, const dma_t *d, uint64_t pfn, uint64_t n, int how) noexcept nogil
cdef uint64_t unpin_pages_remote(putting_t *u, dma_t *d, uint64_t iova, uint64_t pfn, uint64_t npage,
                                 bint do_accounting) noexcept nogil
cdef void log_groups(putting_t *u, uint64_t pfn, uint64_t n) noexcept nogil
