"""The kernel's array of pages (struct page **) as a sink: drivers that pin some hundred pages a call fill one.

The array has room for all the pages that the call asks for.
"""
from libc.stdint cimport uint64_t
from mmcore.core.output cimport gup_output_t, leaf_count, leaf_pfn

cdef struct array_output_t:
    gup_output_t base
    uint64_t *pfn               # next to fill

cdef inline uint64_t array_take(gup_output_t *base, const uint64_t *leaf, uint64_t nr) noexcept nogil:
    cdef array_output_t *out = <array_output_t *>base
    cdef uint64_t *at = out.pfn
    cdef uint64_t i, k, pfn, count
    for i in range(nr):
        pfn = leaf_pfn(leaf[i])
        count = leaf_count(leaf[i])
        for k in range(count):
            at[k] = pfn + k
        at += count
    out.pfn = at
    return nr
