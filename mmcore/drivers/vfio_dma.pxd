"""A DMA mapping of a VFIO container (struct vfio_dma), and the set of them.

Laws
    Mappings of a container are disjoint, and sorted by IOVA. Ends are inclusive: one may end at 2^64 - 1.
    An external pin is found by its exact IOVA, which may lie inside a page; pins of a mapping are sorted by it.
    locked_vm of a mapping is what it added to its mm's locked_vm, and has not taken back.
    Runs, when they are remembered (runs_whole), are the chunks that were mapped, in order: their sum is the size.

A mapping keeps its MM: the mm_t behind it lives as long, exited or not (mmgrab). The container's lock is held.
"""
from libc.stdint cimport int64_t, uint64_t
from mmcore.core.mm cimport MM
from mmcore.core.memory cimport *
from mmcore.core.space cimport mm_t

cdef enum:
    DMA_READ = 1                # of the IOMMU, and of MAP_DMA's flags
    DMA_WRITE = 2
    DMA_CACHE = 4

cdef struct vpfn_t:             # an external pin (struct vfio_pfn)
    uint64_t iova               # exact
    uint64_t pfn
    uint64_t ref_count

cdef struct run_t:              # pages that follow each other
    uint64_t pfn
    uint64_t nr

cdef struct runs_t:
    run_t *run
    uint64_t n
    uint64_t room

cdef struct dma_t:
    mem_t *m
    mm_t *mm                    # that mapped it, and is charged
    uint64_t limit              # RLIMIT_MEMLOCK of its task in pages; ~0: none
    uint64_t iova
    uint64_t vaddr
    uint64_t size               # bytes
    unsigned prot               # DMA_READ | DMA_WRITE
    bint iommu_mapped           # IOMMUs translate it; else it only lends its pages
    bint lock_cap               # mapped with CAP_IPC_LOCK: charged, never refused
    bint vaddr_invalid
    bint has_rsvd               # held a reserved page or none at all once: released page by page
    int64_t locked_vm           # pages
    vpfn_t *pin
    uint64_t nr_pins
    uint64_t pins_room
    runs_t runs
    bint runs_whole

cdef class VFIODma:
    cdef dma_t d
    cdef readonly MM mm
    cdef public object bitmap   # bytearray while dirty tracking is on

cdef class DmaTree:
    cdef readonly list dmas     # VFIODma, sorted

    cpdef Py_ssize_t first(self, uint64_t start)                # index of the first that ends at or after start
    cpdef VFIODma find(self, uint64_t start, uint64_t last)     # the first that overlaps [start, last], or None

cdef bint add_run(mem_t *m, runs_t *runs, uint64_t pfn, uint64_t nr, bint join) noexcept nogil      # False: no memory
cdef void drop_runs(runs_t *runs) noexcept nogil
cdef int64_t vpfn_pages(const dma_t *d, uint64_t iova, uint64_t nr) noexcept nogil  # external pins of nr pages
cdef vpfn_t *find_vpfn(const dma_t *d, uint64_t iova) noexcept nogil                    # exact, or NULL
cdef int add_vpfn(dma_t *d, uint64_t iova, uint64_t pfn) noexcept nogil                 # with one reference; 0, -ENOMEM
cdef void del_vpfn(dma_t *d, vpfn_t *pin) noexcept nogil

cdef inline bint no_struct_page(mem_t *m, uint64_t pfn) noexcept nogil:
    if mm_likely(pfn < m.nr_ram):
        return False
    return device_of(m, pfn) == NULL

cdef inline bint is_invalid_reserved_pfn(mem_t *m, uint64_t pfn) noexcept nogil:
    """No struct page, or a reserved one: neither pinned nor charged."""
    return no_struct_page(m, pfn) or (a64_load_relaxed(&m.map[pfn].flags) >> PG_reserved) & 1
