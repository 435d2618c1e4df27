"""File: files and devices as Python sees them; reading and writing, writeback, truncation, unplugging.

Law (under file_t.lock; filemap.pxd has the others)
    What is truncated is unmapped first, then loses mapping, dirt and the cache's references. Pinned pages live on
    without a file, as in the kernel.
"""
from libc.stdint cimport int64_t, uint8_t, uint64_t
from mmcore.core.space cimport *

cdef class File:
    cdef readonly Memory mem
    cdef file_t *f
    cdef readonly str kind      # "tmpfs", "ext4", ...
    cdef readonly object device

    cdef file_t *ptr(self) except NULL

cdef File new_file(Memory mem, uint64_t size, int kind, unsigned order)
