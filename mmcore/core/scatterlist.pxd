"""Scatterlists: tables of entries (page, offset, length) in chunks of one page, chained by their last slots.

Laws
    Entries     each covers bytes [offset, offset + length) from the start of its page on, within one run of PFNs; an
                entry whose PFN is 0 is blank. Neither folios nor their sizes matter.
    Slots       total_nents + chunks - 1. A chunk has SG_MAX_SINGLE_ALLOC slots, the last one as many as are needed.

A slot
    data        PFN << 2 | SG_END on the last one
    link        address of the first slot of the next chunk | SG_CHAIN; offset and length are 0. Never data, never counted,
                never seen by an iterator. The address never leaves the process: whatever is copied out has PFNs.
    spare       0, or SG_END in the last slot of its chunk

Locks: none; a table belongs to one thread at a time, as in the kernel. `busy` refuses a second one instead of breaking.
"""
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

cdef inline void write_sg(sg_t *sg, uint64_t pfn, uint32_t offset, uint32_t length) noexcept nogil:
    """Write all 32 bytes of a slot."""
    sg.page_link = pfn << SG_PFN_SHIFT
    sg.offset = offset
    sg.length = length
    sg.dma_address = 0
    sg.dma_length = 0
    sg.dma_flags = 0

# ---- tables --------------------------------------------------------------------------------------------------------
cdef int table_alloc(mem_t *m, sgtable_t *t, uint64_t nents, uint64_t max_ents, uint64_t first) noexcept nogil
cdef void table_free(sgtable_t *t) noexcept nogil
cdef sg_t *chunk_alloc(mem_t *m, sgtable_t *t, uint64_t nr, uint64_t most) noexcept nogil  # content undefined; or NULL
cdef void slabs_free(sgtable_t *t, slab_t *until) noexcept nogil
cdef void link_chunk(sg_t *last, sg_t *sgl) noexcept nogil  # the slot becomes the link to a chunk
cdef sg_t *entry_at(sgtable_t *t, uint64_t index) noexcept nogil

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
