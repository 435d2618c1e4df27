"""Scatterlists: tables of entries (page, offset, length) in chunks of one page, chained by their last slots.

Laws
    Entries     each covers bytes [offset, offset + length) from the start of its page on, within one run of PFNs; an
                entry whose PFN is 0 is blank. Neither folios nor their sizes matter.
    Builder     no entry is longer than max_segment rounded down to a page, the in-page offset of the first one
                included; two neighbours are contiguous only if the first is full. Pages of two device maps, or of RAM
                and a device map, never share an entry.
    Slots       total_nents + chunks - 1. A chunk has SG_MAX_SINGLE_ALLOC slots, the last one as many as are needed.
    Batches     any number of append calls leaves what one call with all pages leaves, when each call but the last
                covers whole pages and left_pages is exact.
    Failure     a failed call leaves the table as it was: chunks it had allocated are given back, links and lengths are
                what they were. (The kernel restores the merged length and leaves the chunks to the caller.)

A slot
    data        PFN << 2 | SG_END on the last one
    link        address of the first slot of the next chunk | SG_CHAIN; offset and length are 0. Never data, never counted,
                never seen by an iterator. The address never leaves the process: whatever is copied out has PFNs.
    spare       0, or SG_END in the last slot of its chunk

Building in one pass
    The kernel counts entries first, since the size of the last chunk depends on their number. Here a chunk is carved
    with all the slots that may be needed, its last slot takes data like any other, and becomes a link only if one more
    entry comes: then the entry in it moves to the next chunk. When the call ends, the last chunk is cut to size. The
    layout is the kernel's, slot for slot, and the list of pages is read once.

Locks: none; a table belongs to one thread at a time, as in the kernel. `busy` refuses a second one instead of breaking.
"""
from libc.errno cimport EINVAL, ENOMEM
from libc.stdint cimport uint8_t, uint32_t, uint64_t
from mmcore.core.memory cimport *

cdef extern from *:
    """
    #ifndef MMCORE_SCATTERLIST
    #define MMCORE_SCATTERLIST
    #include <stdint.h>
    struct mm_scatterlist {         /* struct scatterlist with CONFIG_NEED_SG_DMA_LENGTH and _FLAGS: x86-64, arm64 */
        uint64_t page_link;
        uint32_t offset;            /* bytes from the start of the page; may exceed it */
        uint32_t length;            /* bytes */
        uint64_t dma_address;
        uint32_t dma_length;
        uint32_t dma_flags;         /* SG_DMA_* */
    };
    _Static_assert(sizeof(struct mm_scatterlist) == 32, "a chunk of SG_MAX_SINGLE_ALLOC entries is one page");
    #endif
    """
    ctypedef struct sg_t "struct mm_scatterlist":
        uint64_t page_link
        uint32_t offset
        uint32_t length
        uint64_t dma_address
        uint32_t dma_length
        uint32_t dma_flags

cdef enum:
    SG_CHAIN = 1
    SG_END = 2
    SG_PFN_SHIFT = 2
    SG_DMA_BUS_ADDRESS = 1
    SG_DMA_SWIOTLB = 2

cdef enum sg_reason:            # why a builder refused; errors say it in words
    SG_OK
    SG_WHY_NO_MEMORY            # a chunk could not be allocated
    SG_WHY_NULL_PAGE
    SG_WHY_CLOSED               # the last call said that no pages would follow
    SG_WHY_PROMISE              # more entries than left_pages of the calls before allowed for
    SG_WHY_TOO_MANY             # more pages than the sink was opened for

cdef struct slab_t:             # memory that chunks are cut from, front to back; freed with the table
    slab_t *prev
    uint64_t size               # bytes, this header included
    uint64_t used
    uint64_t unused_            # chunks start at a multiple of 32

cdef struct chunk_t:
    sg_t *sgl
    uint64_t first              # index of its first slot's entry in the list
    uint64_t nr                 # slots, the link included

cdef struct sgtable_t:
    sg_t *sgl                   # first slot; NULL while there is no chunk
    uint64_t nents              # entries of the DMA view
    uint64_t orig_nents         # entries of the CPU view
    uint64_t total_nents        # slots that can hold entries: links are not counted
    sg_t *prv                   # append tables: the last entry that holds pages
    chunk_t *chunk
    uint64_t nr_chunks
    uint64_t chunks_room
    slab_t *slab
    uint64_t max_ents           # slots of a full chunk
    uint64_t nr_allocs          # chunks ever allocated and given back, for tests of "freed exactly once"
    uint64_t nr_frees

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

# ---- walking -------------------------------------------------------------------------------------------------------
cdef inline bint sg_is_chain(const sg_t *sg) noexcept nogil:
    return sg.page_link & SG_CHAIN

cdef inline sg_t *sg_chain_ptr(const sg_t *sg) noexcept nogil:
    return <sg_t *>(sg.page_link & ~<uint64_t>3)

cdef inline uint64_t sg_pfn(const sg_t *sg) noexcept nogil:
    return sg.page_link >> SG_PFN_SHIFT

cdef inline sg_t *next_sg(sg_t *sg) noexcept nogil:
    """The entry after this one (sg_next); NULL after the one that is marked as the end."""
    if mm_unlikely(sg.page_link & SG_END):
        return NULL
    sg += 1
    if mm_unlikely(sg_is_chain(sg)):
        return sg_chain_ptr(sg)
    return sg

cdef inline void assign_pfn(sg_t *sg, uint64_t pfn) noexcept nogil:
    """Change the page and keep the end mark (sg_assign_page)."""
    sg.page_link = (pfn << SG_PFN_SHIFT) | (sg.page_link & 3)

cdef inline uint64_t sg_first_pfn(const sg_t *sg, unsigned shift) noexcept nogil:
    """The page its first byte is in: offsets may exceed a page."""
    return sg_pfn(sg) + (sg.offset >> shift)

cdef inline uint64_t sg_nr_pages(const sg_t *sg, unsigned shift) noexcept nogil:
    """Pages its bytes touch, 64-bit throughout; none for an empty entry."""
    cdef uint64_t mask = (ONE << shift) - 1
    if sg.length == 0:
        return 0
    return ((sg.offset & mask) + <uint64_t>sg.length + mask) >> shift

# ---- tables --------------------------------------------------------------------------------------------------------
cdef int table_alloc(mem_t *m, sgtable_t *t, uint64_t nents, uint64_t max_ents, uint64_t first) noexcept nogil
cdef void table_free(sgtable_t *t) noexcept nogil
cdef void link_chunk(sg_t *last, sg_t *sgl) noexcept nogil  # the slot becomes the link to a chunk
cdef sg_t *entry_at(sgtable_t *t, uint64_t index) noexcept nogil

# ---- the append sink: (PFN, pages) runs straight into a table ---------------------------------------------------------
#   append_begin(&a, m, t, nr_pages, offset, max_segment, left_pages)   max_segment in bytes, at least a page
#   append_run(&a, pfn, nr) for each leaf, or append_list(&a, pfns, n)
#   append_finish(&a, tail) or append_abort(&a)
# Each returns 0 or -ENOMEM or -EINVAL with a.why; after a failure call append_abort().
cdef void append_begin(append_t *a, mem_t *m, sgtable_t *t, uint64_t nr_pages, uint32_t offset, uint64_t max_segment,
                       uint64_t left_pages) noexcept nogil
cdef int append_next(append_t *a) noexcept nogil            # make room for one more entry: a.sg + 1 becomes writable
cdef int append_mixed(append_t *a, uint64_t pfn, uint64_t nr) noexcept nogil    # a run that reaches ZONE_DEVICE
cdef int append_list(append_t *a, const uint64_t *pfns, uint64_t n) noexcept nogil
cdef int append_finish(append_t *a, uint64_t tail) noexcept nogil   # tail: bytes of the last page that are not meant
cdef void append_abort(append_t *a) noexcept nogil

cdef inline void write_sg(sg_t *sg, uint64_t pfn, uint32_t offset, uint32_t length) noexcept nogil:
    """Write all 32 bytes of a slot."""
    sg.page_link = pfn << SG_PFN_SHIFT
    sg.offset = offset
    sg.length = length
    sg.dma_address = 0
    sg.dma_length = 0
    sg.dma_flags = 0

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

# ---- the Python face -----------------------------------------------------------------------------------------------
cdef class SGTable:
    cdef readonly Memory mem
    cdef sgtable_t t
    cdef uint32_t busy          # readers inside a call; ~0 while one call changes the table
    cdef uint64_t generation    # grows when the chunks go: handles of entries from before are refused
    cdef list chained           # tables that sg_chain() linked behind this one
    cdef uint32_t nr_users      # tables that are chained in front of this one
    cdef object mapping         # of the device that maps it, or None

    cdef mem_t *read(self) except NULL          # begin to look at it; done() ends
    cdef void read_done(self) noexcept
    cdef mem_t *write(self, bint structure) except NULL     # begin to change it; structure: its chunks
    cdef void write_done(self) noexcept

cdef class SGAppendTable(SGTable):
    cdef readonly uint64_t max_segment

cdef class SGEntry:
    """A handle on one entry of a table."""
    cdef readonly SGTable table
    cdef readonly uint64_t index
    cdef uint64_t generation
    cdef sg_t *sg

    cdef sg_t *ptr(self) except NULL
    cdef int put(self, uint64_t pfn, uint64_t offset, uint64_t length) except -1
    cdef sg_t copy(self) except *

cdef SGTable table_arg(object table)
cdef SGEntry entry_handle(SGTable table, sg_t *sg, uint64_t index)
cdef SGTable new_table(Memory mem)
cdef bint entry_fits(mem_t *m, uint64_t pfn, uint64_t nr) noexcept nogil     # nr pages of one map, all there
