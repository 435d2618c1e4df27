"""Taking all mappings of a folio away, and putting them back or swap entries in their place: split, reclaim, migration.

    anonymous   each entry becomes a migration entry, on which faults wait; then remap_folio puts mappings of the same or
                of other frames back, or swap entries
    file        entries become none; the next fault finds what the page cache has then. f.lock is held from the first step
                to the last, so that it finds nothing in between

Laws
    The caller holds the folio lock and one reference more than mappings and caches explain.
    The exclusive mark goes with the entry: taken from the page when its mapping goes (never when it may be pinned: then
    the unmapping fails), given back with it.
"""
from libc.stdint cimport int64_t, uint64_t
from mmcore.core.space cimport *

cdef extern from *:
    """
    #define MM_MIG_YOUNG 0x020ULL
    #define MM_MIG_DIRTY 0x040ULL
    #define MM_MIG_WRITE 0x080ULL
    """
    const uint64_t MIG_YOUNG "MM_MIG_YOUNG"     # beside SWP_SOFT_DIRTY and SWP_EXCLUSIVE
    const uint64_t MIG_DIRTY "MM_MIG_DIRTY"
    const uint64_t MIG_WRITE "MM_MIG_WRITE"

cdef struct remap_t:
    mem_t *m
    uint64_t old                # first PFN that migration entries name
    uint64_t new                # first PFN to map instead; 0: what slot says
    uint64_t slot               # the swap slot; 0: entries that are none
    uint64_t nr                 # pages
    uint64_t done               # entries
    int error

cdef int unmap_folio(mem_t *m, uint64_t head) noexcept nogil        # anonymous: 0, -EBUSY (pinned), -ENOMEM (a leaf to split)
cdef void remap_folio(mem_t *m, uint64_t old, uint64_t new, uint64_t mapping, uint64_t index, uint64_t nr) noexcept nogil
cdef void unmap_file_folio(file_t *f, uint64_t head) noexcept nogil  # f.lock held
cdef int split_mapped(mem_t *m, uint64_t head, unsigned new_order) noexcept nogil
# A small or large folio out: 0; -EBUSY, -EAGAIN, -ENOMEM. Takes the lock by trylock; the caller's reference goes.
cdef int reclaim_folio(mem_t *m, uint64_t head) noexcept nogil
