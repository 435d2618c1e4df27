"""Longterm pins: which folios must not stay where they are, and moving them.

    may stay        not in a CMA or isolated page block; the zero page; not device-coherent, not fsdax; not in ZONE_MOVABLE
                    (folio.pxd, longterm_pinnable)
    must go         RAM: to a folio of its size in Normal memory outside of CMA; hugetlb: to another one of its pool

Laws
    A folio moves whole: its bytes, flags, map counts, exclusive marks and dirt are the new one's, every entry that mapped it
    maps the new one with the bits it had, and the page cache names the new one. Or nothing changed.
    A folio with a reference that mappings and its page cache do not explain (a pin, an I/O) does not move.
    check_and_migrate keeps all pins (0), or has dropped all of them: -EAGAIN, look and pin again; an errno: some folio could
    neither stay nor go.

How a folio moves
    The kernel puts migration entries in the place of its mappings and lets faults wait for them. Here the tables that map it
    are locked, all at once, for as long as the copy takes: faults wait for the lock, walkers without locks find a frozen
    count, and no entry of a third kind is ever seen by those who unmap, fork or protect meanwhile.
    Locks after the first table's are tried, not waited for: who cannot have all gives all back and comes again. So there is
    no order among tables to break. With all of them held, and a file's lock for its cache, the count is frozen to 0 from
    exactly what is explained; that fails as long as somebody else holds a reference.

Who moves it
    PG_mm_isolated, set by a thread that holds a pin, before it takes the reference that keeps the folio while it moves. Others
    take none: they give their pins back, wait for the flag to go, and look again.

Lock order: the folio lock; a file's lock, or a family's while its mms are visited; an mm's rmap_lock; tables, tried.
"""
from libc.stdint cimport int64_t, uint64_t
from mmcore.core.memory cimport *

cdef int migrate_folio(mem_t *m, uint64_t head, uint64_t *target) noexcept nogil
    # The caller's reference moves with it. 0; -ENOMEM no target; -EAGAIN held or pinned; -EBUSY cannot move;
    # -EINTR with a Python exception set
cdef uint64_t unpinnable(mem_t *m, const uint64_t *leaf, uint64_t nr, bint page_by_page, uint64_t *heads, uint64_t room) noexcept nogil
    # folios (entries, page by page) that must not stay; the first `room` of them into heads
cdef int check_and_migrate(mem_t *m, const uint64_t *leaf, uint64_t nr, bint page_by_page, uint64_t *bad, int *why) noexcept nogil
