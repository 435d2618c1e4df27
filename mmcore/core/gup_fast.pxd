"""The walk without locks: over entries that are there and allow the access (gup_fast).

It takes what it can and stops at the first entry that is not plain: missing, not allowed, special (both zero pages are),
changed while it looked, to be unshared first, or of a folio that needs a look at its VMA. The slow walk decides there.

Laws
    Between walk_enter and walk_leave no table goes away; a table that was unlinked meanwhile is noticed by the second look
    at the entry that led to it.
    A chunk of leaves is one attempt against fork: write_protect_seq is looked at before and after.

Which folios it may take without a VMA (gup_fast_folio_allowed)
    all but small file folios that may be secretmem; for PIN | LONGTERM | WRITE no file's either, unless it is shmem or
    hugetlb. Generic device memory has no filesystem to be told of writes: it is taken.
"""
from libc.stdint cimport uint64_t
from mmcore.core.gup_walk cimport gup_t

cdef void gup_fast(gup_t *w) noexcept nogil     # from w.addr on, at most w.room leaves; w.addr is how far it came
