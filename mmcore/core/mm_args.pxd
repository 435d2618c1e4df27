"""What the calls on an address space accept, and what they say when they refuse or fail.

Words come after the call, when others may have changed the shape already: they tell what is there now. Whatever makes Python
objects may run anything, a finalizer too, so it does not hold mmap_lock: it works on copies.
"""
from libc.stdint cimport int64_t, uint64_t
from mmcore.core.space cimport *

cdef struct seen_t:             # a VMA as it was while mmap_lock was held
    vma_t v                     # without has_anon; its file is not to be followed: here is what words need of it
    bint there                  # addr is in it; if not, v.start is where the next one starts, 0: none
    uint64_t nr_vmas
    uint64_t granule            # bytes at whose multiples it may be split
    uint64_t file_id
    uint64_t file_size
    int file_kind
    bint file_gone

# These take mmap_lock for reading, so without the GIL.
cdef void vma_see(mm_t *mm, uint64_t addr, seen_t *seen) noexcept nogil
cdef int64_t vma_see_all(mm_t *mm, seen_t **all) noexcept nogil     # how many, in an array to free(); -ENOMEM, -ESRCH
cdef uint64_t hole_seen(mm_t *mm, uint64_t start, uint64_t end) noexcept nogil      # range_hole()

# An aligned address and a length, rounded up to pages, within the address space; else raises InvalidArgument.
cdef int range_arg(const mm_t *mm, object addr, object length, str call, uint64_t *start, uint64_t *end) except -1
cdef object no_frames(Memory mem, str what)                                         # an MMError(ENOMEM)
cdef object access_error(Memory mem, mm_t *mm, int error, uint64_t addr, bint write, str call)    # -ENOMEM, FAULT_*
cdef object shape_error(mm_t *mm, int error, str call, uint64_t start, uint64_t end)  # of munmap(), mprotect()
cdef object mremap_error(int error, uint64_t start, uint64_t end, uint64_t new_size)
cdef object madvise_error(Memory mem, mm_t *mm, int error, str name, int what, uint64_t start, uint64_t end, uint64_t at)
