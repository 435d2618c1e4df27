"""Pinning the memory behind a DMA mapping, and mapping it in the IOMMUs (vfio_pin_map_dma).

    gup             a batch of pages a call; with long runs (sink) ever more of them
    chunk           the longest run of pages that follow each other, all reserved or none: across folios and batches
    charge          a chunk at a time; refused beforehand by the caller's limit, and finally by the mapper's
    map             the chunk in every domain; what fails is unmapped in those before it

Generations
    page    512 pages a call; each is compared, looked at (reserved?) and charged on its own (to 6.17)
    batch   512 pages a call; those that follow each other are found and charged at once (6.18, num_pages_contiguous())
    sink    leaves of the walk are joined to runs, and nothing is done a page; a call is as large as runs are long (ours)
All make the same chunks, and leave one state.

Laws
    A chunk is all or nothing. A failed mapping leaves nothing pinned, mapped or charged.
    PFN 0 is no page, so that 0 can mean "no chunk yet" (corner C1).
    A batch never holds more pages than are still wanted, and is empty after a look-up of raw PFNs.
    Raw PFNs (VM_PFNMAP) must be reserved or have no struct page; they are mapped, and neither pinned nor charged.
"""
from libc.stdint cimport int64_t, uint64_t
from mmcore.core.gup_walk cimport gup_t
from mmcore.core.mm cimport MM
from mmcore.core.space cimport mm_t
from mmcore.drivers.vfio_unmap cimport *

cdef enum vfio_acquire:
    ACQUIRE_SINK
    ACQUIRE_BATCH
    ACQUIRE_PAGE

cdef enum pin_why:              # what failed
    PIN_GUP
    PIN_MEMLOCK
    PIN_PFNMAP                  # a raw PFN that has a page, or may not be written
    PIN_MAP
    PIN_NO_MEMORY

cdef struct pinning_t:
    mem_t *m
    dma_t *d
    putting_t u                 # for what is given back
    int acquire
    bint one_page               # disable_hugepages: sampled once a mapping (corner C6)
    mm_t *current               # who calls: whose locked_vm and limit are looked at before a chunk is taken
    uint64_t limit              # pages
    bint remember
    # pages that GUP returned, and nobody took yet (struct vfio_batch)
    uint64_t *page
    uint64_t fallback_page      # when there is no memory for more
    uint64_t capacity
    uint64_t size               # unread
    uint64_t offset             # of the next
    # sink
    runs_t gathered             # runs that are pinned; those before next_run are mapped, the last may still grow
    uint64_t gathered_pages     # pinned so far
    uint64_t wanted_pages       # in all
    uint64_t step               # of the next call
    uint64_t next_run
    bint last_rsvd              # what the last gathered run is
    gup_t w
    # how it ended
    int error                   # negative errno
    int why
    uint64_t at                 # address, or IOVA for PIN_MAP
    uint64_t pfn
    uint64_t wanted             # PIN_MEMLOCK: pages locked, were it granted; PIN_MAP: pages of the chunk
    uint64_t over               # PIN_MEMLOCK: the limit
    int domain                  # PIN_MAP: which

# A call: set up, then without the GIL, then torn down
cdef int setup(pinning_t *p, VFIODma dma, int acquire, int release, bint one_page, bint remember, MM current) except -1
cdef void teardown(pinning_t *p) noexcept nogil
cdef object pin_failed(VFIODma dma, pinning_t *p, str call)     # the error in words
cdef object check_alive(VFIODma dma, str call)                  # raises when the process is gone
cdef int charge(pinning_t *p, int64_t pages) noexcept nogil     # 0, -ENOMEM
cdef int64_t vaddr_get_pfns(pinning_t *p, uint64_t vaddr, uint64_t npages, uint64_t *pfn) noexcept nogil
    # pages into the batch, from vaddr on; or raw PFNs, and the batch stays empty. How many, or a negative errno
cdef void log_chunk(pins_t *log, mem_t *m, uint64_t pfn, uint64_t n) noexcept nogil     # for tell()
