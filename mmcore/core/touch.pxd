"""Touching ranges: what many accesses in a row would fault in, with one lock a table and frames in bulk.

Leaves exactly what one handle_mm_fault() a page leaves, and counts as many faults. mmap_lock is held, the range lies in
the VMA, which allows the access.
"""
from libc.stdint cimport uint64_t
from mmcore.core.space cimport *

cdef int touch_range(mm_t *mm, vma_t *v, uint64_t *addr, uint64_t end, bint write, uint64_t *faults) noexcept nogil
    # *addr: how far it came
