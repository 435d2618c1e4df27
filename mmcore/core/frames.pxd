"""Frames for address spaces: in bulk, from the zones that user memory goes to, and back the fast way.

Laws
    User memory comes from ZONE_MOVABLE first, then from Normal memory, then from CMA, as the kernel's zone lists have it.
    take_pages and take_huge give frames that nobody can find yet: the caller writes the struct pages, count last.
    What take_huge gives counts one mapping by a leaf, which the caller has to make: the counts lie in the second line of a
    folio, and a ready block keeps them so while it is free. A THP that is faulted in again then costs its first line only.
    give_pages takes frames whose struct pages read as free; give_huge takes folios of PMD order at 0 references.
    Neighbours in a list go back as the largest blocks they fill: a munmap of what one touch brought in costs a block, not
    512 pages.
"""
from libc.stdint cimport int64_t, uint64_t
from mmcore.core.memory cimport *

cdef uint64_t take_pages(mem_t *m, uint64_t *pfns, uint64_t nr) noexcept nogil     # how many; struct pages read as free
cdef void give_pages(mem_t *m, const uint64_t *pfns, uint64_t nr) noexcept nogil
cdef uint64_t take_huge(mem_t *m, uint64_t *pfns, uint64_t nr) noexcept nogil      # folios of PMD order, 0 references, 1 mapping
cdef void give_huge(mem_t *m, const uint64_t *pfns, uint64_t nr) noexcept nogil
cdef uint64_t take_folio(mem_t *m, unsigned order) noexcept nogil                  # 0 references, compound; 0 when none
