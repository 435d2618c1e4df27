"""What the calls on an address space accept, and what they say when they refuse or fail."""
from libc.stdint cimport uint64_t
from mmcore.core.space cimport *

# An aligned address and a length, rounded up to pages, within the address space; else raises InvalidArgument.
cdef int range_arg(const mm_t *mm, object addr, object length, str call, uint64_t *start, uint64_t *end) except -1
cdef object no_frames(Memory mem, str what)                                         # an MMError(ENOMEM)
cdef object access_error(Memory mem, const mm_t *mm, int error, uint64_t addr, bint write, str call)    # -ENOMEM, FAULT_*
cdef object shape_error(const mm_t *mm, int error, str call, uint64_t start, uint64_t end)  # of munmap(), mprotect()
