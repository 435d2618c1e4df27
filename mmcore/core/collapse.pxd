"""Collapsing base pages into a THP (MADV_COLLAPSE).

The whole PMD entry is taken out first, so that no walker without locks finds the pages any more; then every page that
has a reference nobody can explain ends it, and the table is put back. What was shared with other processes is copied, as
everything is: the old frames go to whoever else maps them, or back.
"""
from libc.stdint cimport uint64_t
from mmcore.core.space cimport *

cdef int collapse_range(mm_t *mm, uint64_t start, uint64_t end, uint64_t *at) noexcept nogil
    # mmap_lock held for writing. 0; -EINVAL (not suitable), -ENOMEM, -EAGAIN (held or pinned). *at: the last that failed
