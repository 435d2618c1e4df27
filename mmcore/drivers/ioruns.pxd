"""What a registered buffer is made of: runs of pages, the pins they hold, and who uses which large folio."""
from libc.stdint cimport int64_t, uint64_t
from mmcore.core.output cimport gup_output_t
from mmcore.core.walk cimport *

cdef struct buffer_t:
    uint64_t *run               # leaf words: PFN and pages, neighbours joined
    uint64_t nr_runs
    uint64_t room
    uint64_t nr_pages
    uint64_t nr_bvecs           # pins that are held
    bint coalesced

cdef struct runs_output_t:      # a sink that fills one
    gup_output_t base
    mem_t *m
    buffer_t *u

cdef struct uses_t:             # open addressing; 0 is no PFN
    uint64_t *head
    uint64_t *count             # visits of buffers; 0: it was used once
    uint64_t size               # a power of two, or 0
    uint64_t filled

cdef bint add_run(mem_t *m, buffer_t *u, uint64_t pfn, uint64_t count) noexcept nogil      # False: no memory
cdef uint64_t runs_take(gup_output_t *base, const uint64_t *leaf, uint64_t nr) noexcept nogil
cdef bint check_coalesce(const page_t *map, const buffer_t *u, uint64_t *nr_folios, uint64_t *folio_pages, uint64_t *head_pages,
                         uint64_t *first_idx) noexcept nogil
cdef void drop_surplus(mem_t *m, const buffer_t *u) noexcept nogil
cdef uint64_t drop_bvecs(batch_t *b, const buffer_t *u, uint64_t most, bint undo) noexcept nogil
cdef int64_t use_folios(mem_t *m, uses_t *s, const buffer_t *u, uint64_t *visited) noexcept nogil
cdef uint64_t unuse_folios(mem_t *m, uses_t *s, const buffer_t *u, uint64_t visits) noexcept nogil
