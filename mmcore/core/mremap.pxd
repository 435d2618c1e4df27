"""mremap: growing, shrinking and moving a mapping with its entries."""
from libc.stdint cimport uint64_t
from mmcore.core.space cimport *

cdef int do_mremap(mm_t *mm, uint64_t old, uint64_t old_len, uint64_t new_len, uint64_t *new, bint fixed) noexcept nogil
    # mmap_lock held for writing. 0, -EFAULT, -EINVAL, -ENOMEM; *new: where it is
