"""The bytes behind pages, for Python code: views, which take no reference and may outlive the page.

Law: a frame that somebody can write is made no page table, since a wild entry would lead the engine astray. A view is listed
first, then it is looked whether the frame is a table; a table is marked as one first, then the list is looked at.
"""
from libc.stdint cimport uint8_t, uint64_t
from mmcore.core.memory cimport *

cdef class PageBytes:
    """The bytes of one page or folio through the buffer protocol; keeps the Memory open, and is listed, while it is exported."""
    cdef Memory mem
    cdef uint8_t *at
    cdef Py_ssize_t size
    cdef bint readonly
    cdef uint64_t exports
    cdef view_t view

cdef bint in_view(mem_t *m, uint64_t pfn) noexcept nogil    # can Python code write this frame?
