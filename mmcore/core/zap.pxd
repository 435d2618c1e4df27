"""Taking mappings away: ranges of an address space, and splitting the leaves at their ends.

Laws
    A range starts and ends on no leaf's inside: whoever zaps splits there first (split_at), and that is what may fail.
    Frames go back after the entries that named them are gone; a walker that read one before finds no reference to take,
    or finds that the entry changed.
    Dirty entries of files hand their dirt to the folio.
"""
from libc.stdint cimport int64_t, uint64_t
from mmcore.core.space cimport *

cdef enum:
    ZAP_SMALL = 512
    ZAP_HUGE = 32

cdef struct zap_t:              # one zap, from its first entry to the freeing at its end
    mm_t *mm
    mem_t *m
    uint64_t small[ZAP_SMALL]   # frames whose struct pages read as free
    uint64_t nr_small
    uint64_t huge[ZAP_HUGE]     # anonymous folios of PMD order at 0 references
    uint64_t nr_huge
    int64_t anon                # pages that were unmapped, for rss
    int64_t file
    int64_t shmem
    int64_t swapped

cdef inline int vma_level(const mm_t *mm, const vma_t *v) noexcept nogil:
    """The level of this hugetlb VMA's leaves."""
    return 1 if v.order == mm.pgd.bits else 2

cdef void zap_begin(zap_t *z, mm_t *mm) noexcept nogil
cdef void zap_range(zap_t *z, vma_t *v, uint64_t start, uint64_t end) noexcept nogil
cdef void zap_end(zap_t *z) noexcept nogil
cdef int split_leaf(mm_t *mm, vma_t *v, uint64_t addr) noexcept nogil      # a PMD leaf into PTEs, a PUD leaf away; 0, -ENOMEM
cdef int split_at(mm_t *mm, vma_t *v, uint64_t addr) noexcept nogil        # no leaf spans addr after; 0, -ENOMEM
cdef void rss_add(mm_t *mm, uint64_t head, int64_t pages) noexcept nogil   # by what the folio is
cdef int put_mapping(mem_t *m, uint64_t head, uint32_t refs) noexcept nogil
cdef void zap_one(zap_t *z, uint64_t e, int level) noexcept nogil          # an entry that was taken out already
cdef uint64_t hugetlb_missing(mm_t *mm, vma_t *v, uint64_t start, uint64_t end) noexcept nogil   # pages that are not its own
# Of a VMA that stays, under rmap_lock: what it loses, its pool promises it again, or else nothing any more.
cdef void zap_hugetlb(mm_t *mm, vma_t *v, uint64_t start, uint64_t end) noexcept nogil
