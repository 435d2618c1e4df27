"""User accesses: bytes through the tables, as loads and stores of the process; and pagemap's view of the tables."""
from libc.stdint cimport int64_t, uint8_t, uint64_t
from mmcore.core.space cimport *

cdef vma_t *access_vma(mm_t *mm, uint64_t addr, bint write) noexcept nogil  # NULL: nothing there, or not allowed
cdef uint64_t access_stop(mm_t *mm, uint64_t start, uint64_t end, bint write) noexcept nogil    # where an access would end in SIGSEGV
cdef int access_bytes(mm_t *mm, uint64_t *addr, uint8_t *data, uint64_t n, bint write) noexcept nogil
cdef int touch_pages(mm_t *mm, uint64_t *addr, uint64_t end, bint write, uint64_t *faults) noexcept nogil
cdef void populate(mm_t *mm, uint64_t start, uint64_t end, uint64_t vm_flags) noexcept nogil   # as far as it goes, without a word
cdef void pagemap_words(mm_t *mm, uint64_t addr, uint64_t *words, uint64_t nr, bint privileged) noexcept nogil
cdef uint64_t page_at_addr(mm_t *mm, uint64_t addr) noexcept nogil          # PFN of what is mapped there, or 0
