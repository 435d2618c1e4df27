"""Building scatterlists: the append sink, which takes (PFN, pages) runs straight into a table.

Laws
    Builder     no entry is longer than max_segment rounded down to a page, the in-page offset of the first one
                included; two neighbours are contiguous only if the first is full. Pages of two device maps, or of RAM
                and a device map, never share an entry.
    Batches     any number of append calls leaves what one call with all pages leaves, when each call but the last
                covers whole pages and left_pages is exact.
    Failure     a failed call leaves the table as it was: chunks it had allocated are given back, links and lengths are
                what they were. (The kernel restores the merged length and leaves the chunks to the caller.)

Building in one pass
    The kernel counts entries first, since the size of the last chunk depends on their number. Here a chunk is carved
    with all the slots that may be needed, its last slot takes data like any other, and becomes a link only if one more
    entry comes: then the entry in it moves to the next chunk. When the call ends, the last chunk is cut to size. The
    layout is the kernel's, slot for slot, and the list of pages is read once.

    append_begin(&a, m, t, nr_pages, offset, max_segment, left_pages)   max_segment in bytes, at least a page
    append_run(&a, pfn, nr) for each leaf, or append_list(&a, pfns, n)
    append_finish(&a, tail) or append_abort(&a)
Each returns 0, or -ENOMEM or -EINVAL with a.why; after a failure call append_abort(). The caller holds the table's write().
"""
from libc.errno cimport EINVAL, ENOMEM
from libc.stdint cimport uint32_t, uint64_t
from mmcore.core.memory cimport *
from mmcore.core.scatterlist cimport *

cdef enum sg_reason:            # why a builder refused; errors say it in words
    SG_OK
    SG_WHY_NO_MEMORY            # a chunk could not be allocated
    SG_WHY_NULL_PAGE
    SG_WHY_CLOSED               # the last call said that no pages would follow
    SG_WHY_PROMISE              # more entries than left_pages of the calls before allowed for
    SG_WHY_TOO_MANY             # more pages than the sink was opened for

cdef struct append_t:           # pages on their way into a table, from append_begin() to append_finish()
    mem_t *m
    sgtable_t *t
    unsigned shift              # of a page
    uint64_t max_pages          # of an entry
    uint64_t left               # pages that may still come in this call
    uint64_t later              # left_pages: pages that may come in later calls
    uint32_t offset             # of the first entry; 0 once it is made
    sg_t *sg                    # the entry that is being filled, in the last chunk
    sg_t *end                   # last slot of that
    uint64_t next_pfn           # what would extend it; 0: nothing
    uint64_t room               # pages it can still take
    int why                     # sg_reason
    uint64_t bad                # where: index in the list
    # what undoing needs
    sgtable_t before
    uint32_t prv_length
    slab_t *slab
    uint64_t slab_used

cdef void append_begin(append_t *a, mem_t *m, sgtable_t *t, uint64_t nr_pages, uint32_t offset, uint64_t max_segment,
                       uint64_t left_pages) noexcept nogil
cdef int append_next(append_t *a) noexcept nogil            # make room for one more entry: a.sg + 1 becomes writable
cdef int append_mixed(append_t *a, uint64_t pfn, uint64_t nr) noexcept nogil    # a run that reaches ZONE_DEVICE
cdef int append_list(append_t *a, const uint64_t *pfns, uint64_t n) noexcept nogil
cdef int append_finish(append_t *a, uint64_t tail) noexcept nogil   # tail: bytes of the last page that are not meant
cdef void append_abort(append_t *a) noexcept nogil

cdef inline int append_same(append_t *a, uint64_t pfn, uint64_t nr) noexcept nogil:
    """Add a run of one device map, or of none."""
    cdef uint64_t take
    cdef sg_t *sg = a.sg
    cdef int error
    if mm_unlikely(nr > a.left):
        a.why = SG_WHY_TOO_MANY
        return -EINVAL
    if pfn == a.next_pfn:
        take = nr if nr < a.room else a.room
        sg.length += <uint32_t>(take << a.shift)
        a.room -= take
        a.next_pfn += take
        a.left -= take
        pfn += take
        nr -= take
    while nr:
        if mm_unlikely(sg == a.end):
            error = append_next(a)
            if error:
                return error
            sg = a.sg
        take = nr if nr < a.max_pages else a.max_pages
        sg += 1
        write_sg(sg, pfn, a.offset, <uint32_t>((take << a.shift) - a.offset))
        a.offset = 0
        a.sg = sg
        a.left -= take
        a.room = a.max_pages - take
        pfn += take
        nr -= take
        a.next_pfn = pfn
    return 0

cdef inline int append_run(append_t *a, uint64_t pfn, uint64_t nr) noexcept nogil:
    """Add nr pages from PFN on; they extend the last entry where they follow it."""
    if mm_unlikely(pfn + nr > a.m.nr_ram):
        return append_mixed(a, pfn, nr)
    return append_same(a, pfn, nr)
