"""PageList, the kernel's `struct page **` as PFNs, and PageRanges, the same as runs.

Both are checked once, when they are made, and never change: walks over them check no bounds. PFN 0 stands for NULL.
One that is empty can be given to a pin call, which fills it, once.
"""
from libc.stdint cimport uint64_t
from mmcore.core.memory cimport *

cdef class PageList:
    cdef readonly Memory mem
    cdef const uint64_t *p      # the PFNs
    cdef uint64_t n
    cdef object owner           # whose memory they lie in, when not our own
    cdef uint64_t size          # bytes of our own buffer; 0 when the owner has it

cdef class PageRanges:
    cdef readonly Memory mem
    cdef readonly PageList starts   # first PFN of each run
    cdef const uint64_t *count      # pages of each run
    cdef object count_owner         # the array they lie in
    cdef readonly uint64_t nr_pages

cdef PageList new_pagelist(Memory mem, uint64_t n)          # content is the caller's to fill, through filling()
cdef inline uint64_t *filling(PageList pages) noexcept:
    return <uint64_t *>pages.p
cdef void pagelist_fill(PageList empty, PageList pages, uint64_t n)  # its content from now on: the first n of another list
cdef PageList pagelist_view(PageList pages, uint64_t start, uint64_t n)
cdef object as_pages(object pages)                          # a PageList or PageRanges; takes sequences of Page as well
cdef uint64_t contiguous(const uint64_t *p, uint64_t n) noexcept nogil
