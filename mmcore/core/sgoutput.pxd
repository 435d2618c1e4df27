"""Scatterlists as the output of a walk: leaves go straight into an append table, an entry for many of them.

Laws
    A table takes all pages of a call or none: when it cannot, what the call pinned is released, and the table is as it was.
    (A list can end after some pages; entries of a scatterlist may span leaves, so that what is left would depend on them.)
"""
from libc.stdint cimport uint64_t
from mmcore.core.memory cimport *
from mmcore.core.output cimport gup_output_t
from mmcore.core.sgappend cimport *

cdef struct sg_output_t:
    gup_output_t base
    append_t a                  # begun before the walk; finished or aborted after it
    uint64_t pages              # of the leaves that it took whole

cdef uint64_t sg_take(gup_output_t *base, const uint64_t *leaf, uint64_t nr) noexcept nogil     # base.take
# Drop pins (or references) of the first n pages that an append added, before it is finished or aborted; cannot fail.
cdef void append_release(append_t *a, uint64_t n, bint pins) noexcept nogil
# The same of the first n pages of a whole table.
cdef void table_release(mem_t *m, sgtable_t *t, uint64_t n, bint pins) noexcept nogil
# Tell who watches pins of the pages of entries: from `sg` on, without its first `skip` pages, n pages in all.
cdef object tell_entries(Memory mem, sg_t *sg, uint64_t skip, uint64_t n, int sign)
