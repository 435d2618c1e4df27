# cython: language_level=3, boundscheck=False, wraparound=False
"""A driver's loop over the pages of a table, in Cython on the engine's declarations: bench_sg.py compiles it."""
from libc.stdint cimport uint64_t
from mmcore.core.scatterlist cimport SGTable
from mmcore.core.sgiter cimport page_iter_next, page_iter_start, page_iter_t


def walk(SGTable table):
    """Return the sum of the PFNs of a table, page by page."""
    cdef page_iter_t it
    cdef uint64_t total = 0
    with nogil:
        page_iter_start(&it, table.t.sgl, table.t.orig_nents, table.mem.m.page_shift, 0)
        while page_iter_next(&it):
            total += it.pfn
    return total


def first_slot(SGTable table):
    """Return the address of a table's first slot, for the peers in C."""
    return <uint64_t>table.t.sgl
