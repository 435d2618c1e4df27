"""MM: the Python face of an address space.

The C side (mm_t) is malloc'ed and belongs to the object; it leaves family and registry when the mm exits.
Each method checks its arguments, takes mmap_lock without the GIL, calls into the files of the nouns, and words errors.
"""
from libc.stdint cimport uint32_t, uint64_t
from mmcore.core.space cimport *

cdef class MM:
    cdef readonly Memory mem
    cdef mm_t *mm
    cdef dict files             # id: File of every file that is mapped; an mm keeps what it maps
    cdef uint32_t keeping       # calls that map, or fork: meanwhile no file goes
    cdef readonly object rlimit_memlock     # bytes, or None
    cdef readonly bint cap_ipc_lock
    cdef readonly str user
    cdef readonly str name      # of what forked: "1", "1.1", ...

    cdef mm_t *ptr(self) except NULL        # raises when the Memory is closed or the mm exited
    cdef mm_t *enter(self) except NULL      # the same, and counts a user of the Memory; leave() undoes
    cdef void leave(self) noexcept

cdef MM new_mm(Memory mem)
cdef object forget_files(MM self, bint all)                                 # those that nothing here maps any more
cdef int check_mlock(MM self, uint64_t flags, uint64_t pages) except -1     # MAP_LOCKED against RLIMIT_MEMLOCK
