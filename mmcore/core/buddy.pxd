"""The buddy allocator: frames by order, on one bitmap an order with summary levels, out of mem_map.

Laws (under the region's lock)
    A free block of order k starts at a multiple of 2^k, lies within one region, and no page is in two blocks.
    Two buddies are never both free: they are one block of the next order, up to the top order.
        So which frames are free says everything; the bitmaps can be rebuilt from that.
    The lowest free block of the smallest order that fits is taken: mem_map stays dense, and so does its cost.

Who frees: the one who brought _refcount to 0. From then on nobody else may touch the frames; free_folio() writes the
struct pages back to "free" first, and only then makes the block visible to allocation, under the region's lock.
"""
from libc.stdint cimport int64_t, uint64_t
from mmcore.core.memory cimport *

cdef enum:                      # a freed folio as one word: PFN | order << FREED_ORDER_SHIFT | FREED_CLEAN
    FREED_ORDER_SHIFT = 56
    FREED_CLEAN_SHIFT = 55      # a small folio whose struct page already reads as a free one: no need to touch it

cdef inline uint64_t freed_word(uint64_t pfn, unsigned order, bint clean) noexcept nogil:
    return pfn | (<uint64_t>order << FREED_ORDER_SHIFT) | (<uint64_t>clean << FREED_CLEAN_SHIFT)

# ---- under the region's lock; they look at no struct page ----------------------------------------------------------
cdef uint64_t region_take(mem_t *m, region_t *r, unsigned order) noexcept nogil     # lowest block, or 0
cdef uint64_t region_take_ready(mem_t *m, region_t *r, unsigned order) noexcept nogil   # the same; the block may be ready
cdef void forget_ready(mem_t *m, region_t *r, uint64_t pfn, uint64_t nr) noexcept nogil
cdef bint region_take_at(mem_t *m, region_t *r, uint64_t pfn, unsigned order) noexcept nogil
cdef void region_put(mem_t *m, region_t *r, uint64_t pfn, unsigned order) noexcept nogil
cdef bint region_is_free(mem_t *m, region_t *r, uint64_t pfn) noexcept nogil        # is this very page free?

# ---- they take the locks -------------------------------------------------------------------------------------------
cdef uint64_t alloc_frames(mem_t *m, unsigned regions, unsigned order) noexcept nogil   # PFN of a block, or 0
cdef uint64_t alloc_folio(mem_t *m, unsigned regions, unsigned order) noexcept nogil    # a folio with refcount 1, or 0
cdef hstate_t *pool_of(mem_t *m, unsigned order) noexcept nogil                         # NULL: no such pool
cdef int reserve_hugetlb(mem_t *m, unsigned order, int64_t nr) noexcept nogil           # a promise, or (nr < 0) given back; 0, -ENOMEM
cdef uint64_t alloc_hugetlb_reserved(mem_t *m, unsigned order, bint reserved) noexcept nogil   # reserved: redeems a promise
cdef uint64_t alloc_hugetlb(mem_t *m, unsigned order) noexcept nogil                    # from its pool, or 0
cdef uint64_t alloc_pages(mem_t *m, unsigned regions, uint64_t *pfns, uint64_t nr) noexcept nogil   # small folios; how many
cdef int alloc_folio_at(mem_t *m, uint64_t pfn, unsigned order, bint hugetlb) noexcept nogil        # 0, -EBUSY, -EINVAL
cdef void free_folios(mem_t *m, const uint64_t *freed, uint64_t nr) noexcept nogil      # freed_word()s, refcount 0
cdef void dissolve_pooled(mem_t *m, uint64_t pfn, uint64_t broken) noexcept nogil      # a pooled hugetlb folio, but one page
cdef bint frames_hold(mem_t *m, int64_t frees) noexcept nogil
cdef void frames_go(mem_t *m) noexcept nogil
cdef inline void free_folio(mem_t *m, uint64_t pfn, unsigned order) noexcept nogil:
    cdef uint64_t word = freed_word(pfn, order, False)
    free_folios(m, &word, 1)

cdef int regions_of_zone(Memory mem, object zone) except -1     # a bit a region that the name allows
