"""madvise, clear_refs: what a process says about ranges of its memory."""
from libc.stdint cimport uint64_t
from mmcore.core.space cimport *

# Takes mmap_lock; *at: where it failed.
cdef int do_madvise(mm_t *mm, uint64_t start, uint64_t end, int advice, uint64_t *at) noexcept nogil
cdef void do_clear_refs(mm_t *mm, int what) noexcept nogil          # mmap_lock held for writing
