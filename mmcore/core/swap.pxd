"""Swap: slots that keep the bytes of pages whose frames were taken away.

Laws
    A slot's count is the number of entries (page tables, or a page cache) that name it; at 0 it is free.
    A slot without bytes reads as zero: a page that was never written costs nothing.
There is no swap cache: a page that goes out loses all its mappings at once, and two processes that shared it get two pages
when they come back, as after a swap cache was reclaimed.
"""
from libc.stdint cimport uint64_t
from mmcore.core.memory cimport *

cdef uint64_t swap_store(mem_t *m, uint64_t pfn, uint64_t count) noexcept nogil   # a slot with the page's bytes, or 0
cdef void swap_dup(mem_t *m, uint64_t slot) noexcept nogil
cdef uint64_t swap_count(mem_t *m, uint64_t slot) noexcept nogil
cdef void swap_free(mem_t *m, uint64_t slot, uint64_t count) noexcept nogil
cdef void swap_load(mem_t *m, uint64_t slot, uint64_t pfn) noexcept nogil         # bytes into a page
