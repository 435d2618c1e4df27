"""The folio lock, dirty and writeback.

Laws
    nr_dirty and nr_writeback are the base pages of the folios that carry the flag; anonymous ones do not count as dirty.
    The zero page stays clean.

The lock is one bit, PG_locked: acquire by fetch-or; release by one fetch-and that also takes PG_waiters, since nothing of
the folio may be touched after it is unlocked. Whoever finds it held spins about 100 times, then sleeps on one of 256
conditions. It comes before every other lock (memory.pxd), and its holder has a reference.
"""
from libc.stdint cimport int64_t, uint64_t
from mmcore.core.memory cimport *

cdef inline bint trylock(page_t *head) noexcept nogil:
    return not (a64_fetch_or_acquire(&head.flags, ONE << PG_locked) >> PG_locked) & 1

cdef int lock_wait(mem_t *m, uint64_t pfn) noexcept nogil           # 0, or -EINTR with a Python exception set
cdef void unlock(mem_t *m, uint64_t pfn) noexcept nogil
cdef int raise_pending() except -1                                  # raises what a signal handler raised

cdef bint mark_dirty(mem_t *m, uint64_t pfn) noexcept nogil         # True when it was clean
cdef bint clear_dirty(mem_t *m, uint64_t pfn) noexcept nogil        # True when it was dirty
