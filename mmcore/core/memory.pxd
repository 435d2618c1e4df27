"""Memory: a machine's frames. mem_map, zones, page blocks, statistics, and the bytes behind the pages.

Laws
    Frames      per zone: free + allocated == managed and managed + reserved == present
    Identity    PFN 0 is reserved and never handed out; in lists it stands for NULL
    mem_map     mmap'ed without reserve: a frame that was never touched costs nothing. `frontier` of a region is one
                past the highest PFN ever handed out there; from there on the struct pages are 64 zero bytes.
    Ready       a free block of PMD order whose struct pages still read as those of a folio with no reference is `ready`:
                a THP that is faulted in again need not write 512 of them. Whoever takes any frame of such a block for
                anything else has them written back to free first (buddy.pyx, under the region's lock)
    Bytes       a page's bytes count as zero until PG_mm_written is set; so neither allocation nor faults clear them

Lock order, outermost first. A thread that holds one takes only locks further down:
    1. the folio lock (PG_locked; sleeps)
    2. a hugetlb pool's lock (hstate_t.lock)
    3. a region's lock (region_t.lock); never two regions at once, but for frames_hold()
    4. mem_t.bytes_lock, and the buckets of the folio lock's wait table
Counters of folios (_refcount, _pincount, map counts) and flags are atomics and need no lock.
"""
from libc.stdint cimport int32_t, int64_t, uint8_t, uint32_t, uint64_t
from libc.stdlib cimport calloc, malloc, realloc
from mmcore.core.bitmap cimport *
from mmcore.core.buffer cimport *
from mmcore.core.page cimport *
from mmcore.core.pthread cimport *

cdef enum:
    NR_ORDERS = 14              # 0..13: 13 is the PMD order at 64 KiB pages
    NR_STAT_SLOTS = 64          # a power of two
    MAX_REGIONS = 3
    MAX_POOLS = 4
    MAX_DEVICES = 16

cdef enum stat_item:
    # event and state counters under /proc/vmstat's names; in base pages unless said otherwise
    NR_FOLL_PIN_ACQUIRED
    NR_FOLL_PIN_RELEASED
    NR_DIRTY
    NR_WRITEBACK
    NR_DIRTIED
    NR_WRITTEN
    PGALLOC
    PGFREE
    NR_POISONED
    # opstats: what an algorithm cost, in operations
    OP_REF_ATOMICS
    OP_PINCOUNT_ATOMICS
    OP_HEAD_LOOKUPS
    OP_FOLIO_LOCKS
    OP_LEAF_WALKS
    NR_FREES                    # calls that gave frames back, counted before any frame is free
    NR_STAT_ITEMS = 16          # two cache lines a slot

cdef enum inject_site:
    INJECT_FRAME
    INJECT_TABLE
    INJECT_LIST
    INJECT_SG
    INJECT_IOMMU_MAP
    INJECT_MIGRATE
    INJECT_ALLOC
    INJECT_IOMMU_UNMAP
    NR_INJECT_SITES

cdef enum device_type:          # enum memory_type of the kernel, in our order
    DEVICE_GENERIC
    DEVICE_FSDAX
    DEVICE_COHERENT
    DEVICE_PRIVATE
    DEVICE_PCI_P2PDMA

cdef struct region_t:           # a run of PFNs with its own free blocks: one zone, one migrate type
    pthread_mutex_t lock
    uint64_t start              # first PFN
    uint64_t end                # one past the last
    uint64_t base               # start rounded down to a block of the top order: bit 0 of each bitmap
    uint64_t zone_flags         # the zone bits of its pages' flags
    unsigned zone
    unsigned migratetype
    uint64_t managed            # pages
    uint64_t nr_free            # pages, written under the lock
    uint64_t nr_blocks[NR_ORDERS]   # free blocks by order, written under the lock
    uint64_t frontier           # one past the highest PFN ever handed out
    bitmap_t free[NR_ORDERS]    # the free blocks of each order, under the lock
    uint8_t *ready              # a byte a block of PMD order: 1 when it is free and its struct pages still make a folio
    uint64_t nr_ready           # of them
    void *bits                  # the mapping that all bitmaps lie in
    uint64_t bits_size

cdef struct hstate_t:           # a hugetlb pool
    pthread_mutex_t lock
    unsigned order
    uint64_t nr                 # folios of the pool
    uint64_t nr_free
    uint64_t nr_resv            # of them promised to mappings; nr_resv <= nr_free
    uint64_t *free              # their PFNs, a stack

cdef struct device_t:           # a ZONE_DEVICE range; its id in struct page is (index + 1) << 1
    uint64_t start
    uint64_t end
    int type                    # device_type
    unsigned order              # of its folios; 0 when not compound
    unsigned leaf_order         # what page tables map it with

cdef struct stat_slot_t:
    uint64_t v[NR_STAT_ITEMS]

cdef struct view_t:             # bytes that Python code can write as long as it likes, whoever owns the frames by then
    view_t *next
    uint64_t start              # first PFN
    uint64_t end                # one past the last

cdef struct mem_t:
    page_t *map                 # mem_map; NULL after close()
    uint64_t nr_pages           # of mem_map, ZONE_DEVICE included
    uint64_t nr_ram             # without ZONE_DEVICE
    unsigned page_shift
    unsigned max_order          # of buddy blocks
    unsigned pmd_order
    unsigned pageblock_order
    bint debug                  # the kernel's DEBUG_VM checks
    uint64_t zero_pfn
    uint64_t huge_zero_pfn      # 0 until somebody asks for it
    uint64_t nr_reserved
    int nr_regions
    region_t region[MAX_REGIONS]
    int nr_pools
    hstate_t pool[MAX_POOLS]
    int nr_devices
    device_t device[MAX_DEVICES]
    uint8_t *bytes              # the bytes behind the pages
    pthread_mutex_t bytes_lock  # clears a page's bytes at first sight; the list of views
    view_t *views               # NULL: none
    uint8_t *blocktype          # migrate type by page block
    stat_slot_t *stats          # by thread: no counter is shared by the threads of a benchmark
    uint32_t inject[NR_INJECT_SITES]    # occurrences until one fails; 0 is off
    uint32_t inject_armed
    void *spaces                # address spaces, files, swap: of the modules above (spaces_t); NULL until there is one
    void (*spaces_free)(mem_t *m) noexcept nogil    # what close() calls for them
    int (*split_mapped)(mem_t *m, uint64_t pfn, unsigned new_order) noexcept nogil  # splits what page tables map

# ---- statistics: relaxed adds into the thread's own slot; readers sum the slots ------------------------------------
cdef inline void stat_add(mem_t *m, int item, int64_t delta) noexcept nogil:
    a64_fetch_add_relaxed(&m.stats[thread_slot(NR_STAT_SLOTS)].v[item], <uint64_t>delta)

cdef inline int64_t stat_sum(const mem_t *m, int item) noexcept nogil:
    cdef int slot
    cdef uint64_t total = 0
    for slot in range(NR_STAT_SLOTS):
        total += a64_load_relaxed(&m.stats[slot].v[item])
    return <int64_t>total

cdef bint inject_hit(mem_t *m, int site) noexcept nogil
cdef inline bint inject_fails(mem_t *m, int site) noexcept nogil:
    """True when this occurrence was asked to fail; one load when nothing is armed."""
    if mm_likely(not a32_load_relaxed(&m.inject_armed)):
        return False
    return inject_hit(m, site)

# ---- memory of the engine itself: as malloc, calloc and realloc, and with failures on demand
cdef inline void *mem_malloc(mem_t *m, uint64_t size) noexcept nogil:
    return NULL if mm_unlikely(inject_fails(m, INJECT_ALLOC)) else malloc(size)

cdef inline void *mem_calloc(mem_t *m, uint64_t nr, uint64_t size) noexcept nogil:
    return NULL if mm_unlikely(inject_fails(m, INJECT_ALLOC)) else calloc(nr, size)

cdef inline void *mem_realloc(mem_t *m, void *at, uint64_t size) noexcept nogil:
    return NULL if mm_unlikely(inject_fails(m, INJECT_ALLOC)) else realloc(at, size)

# ---- where a PFN belongs -------------------------------------------------------------------------------------------
cdef inline region_t *region_of(mem_t *m, uint64_t pfn) noexcept nogil:
    """The region of a RAM PFN; NULL for ZONE_DEVICE."""
    cdef int i
    for i in range(m.nr_regions):
        if pfn < m.region[i].end:
            return &m.region[i]
    return NULL

cdef inline device_t *device_of(mem_t *m, uint64_t pfn) noexcept nogil:
    cdef int i
    for i in range(m.nr_devices):
        if m.device[i].start <= pfn < m.device[i].end:
            return &m.device[i]
    return NULL

cdef inline bint run_valid(mem_t *m, uint64_t first, uint64_t last) noexcept nogil:
    """Are all of [first, last] pages? RAM has no holes; device ranges may have some between them."""
    cdef device_t *d
    if first > last or last >= m.nr_pages:
        return False
    while last >= m.nr_ram:
        d = device_of(m, last)
        if d == NULL:
            return False
        if first >= d.start:
            return True
        last = d.start - 1
    return True

cdef inline unsigned pageblock_migratetype(const mem_t *m, uint64_t pfn) noexcept nogil:
    return m.blocktype[pfn >> m.pageblock_order]

cdef inline uint64_t frontier_of(const mem_t *m) noexcept nogil:
    """One past the highest PFN that was ever in use."""
    cdef int i
    cdef uint64_t last = 2
    for i in range(m.nr_regions):
        if m.region[i].frontier > last:
            last = m.region[i].frontier
    for i in range(m.nr_devices):
        if m.device[i].end > last:
            last = m.device[i].end
    return last

# ---- bytes ---------------------------------------------------------------------------------------------------------
cdef uint8_t *page_bytes_slow(mem_t *m, uint64_t pfn) noexcept nogil
cdef inline uint8_t *page_bytes(mem_t *m, uint64_t pfn) noexcept nogil:
    """The bytes of a page, for reading and writing; cleared at first sight since the page was allocated."""
    if mm_likely((a64_load_acquire(&m.map[pfn].flags) >> PG_mm_written) & 1):
        return m.bytes + (pfn << m.page_shift)
    return page_bytes_slow(m, pfn)

# ---- the Python face -----------------------------------------------------------------------------------------------
cdef class Memory:
    cdef mem_t m
    cdef object __weakref__
    cdef uint32_t users         # calls inside a nogil part, and exported views; close() refuses while there are any
    cdef uint32_t views
    cdef Py_ssize_t export_len  # what a view of mem_map shows
    cdef readonly tuple devices
    cdef readonly object config     # the arguments that made it, for save() and repr()

    cdef mem_t *ptr(self) except NULL       # raises when closed
    cdef mem_t *enter(self) except NULL     # the same, and counts a user; leave() undoes
    cdef void leave(self) noexcept
    cdef uint64_t check_pfn(self, object pfn) except 0  # a PFN of this memory, 0 < pfn < nr_pages, or raises

cdef class Page:
    """A handle: this memory, this PFN."""
    cdef readonly Memory mem
    cdef readonly uint64_t pfn

cdef class Folio:
    """A handle on the folio with this head."""
    cdef readonly Memory mem
    cdef readonly uint64_t pfn

cdef extern from "Python.h":
    long long PyLong_AsLongLongAndOverflow(object number, int *overflow) except? -1

# The value of an int (no bool, no subclass) that is not negative and fits; else -1, for the slow and careful way.
cdef inline int64_t plain_int(object number) except? -2:
    cdef int overflow = 0
    cdef int64_t value = -1
    if type(number) is int:
        value = PyLong_AsLongLongAndOverflow(number, &overflow)
        if overflow or value < 0:
            value = -1
    return value

cdef inline Page page_handle(Memory mem, uint64_t pfn):
    cdef Page page = Page.__new__(Page)
    page.mem = mem
    page.pfn = pfn
    return page

cdef inline Folio folio_handle(Memory mem, uint64_t pfn):
    cdef Folio folio = Folio.__new__(Folio)
    folio.mem = mem
    folio.pfn = pfn
    return folio
