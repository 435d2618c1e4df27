"""Walking scatterlists: pages, DMA pages, and pieces of bytes.

A walk goes by count and stops at the end mark as well. Sums are 64-bit: an entry of 4 GiB minus a page at an offset is
not 0 pages. Empty entries have no pages, and an offset beyond the first page starts on the page that it reaches.
"""
from libc.stdint cimport uint32_t, uint64_t
from mmcore.core.memory cimport *
from mmcore.core.scatterlist cimport *

cdef struct page_iter_t:        # struct sg_page_iter
    sg_t *sg                    # the entry under way
    uint64_t nents              # entries left, this one included
    uint64_t pfn                # the page: valid after page_iter_next()
    uint64_t left               # pages left in the entry
    unsigned shift

cdef void page_iter_start(page_iter_t *it, sg_t *sgl, uint64_t nents, unsigned shift, uint64_t pgoffset) noexcept nogil

cdef inline bint page_iter_entry(page_iter_t *it) noexcept nogil:
    """Go to the next entry that has pages: False at the end."""
    cdef sg_t *sg = it.sg
    while it.nents > 1:
        it.nents -= 1
        sg = next_sg(sg)
        if mm_unlikely(sg == NULL):
            break
        it.left = sg_nr_pages(sg, it.shift)
        if mm_likely(it.left != 0):
            it.sg = sg
            it.pfn = sg_first_pfn(sg, it.shift) - 1
            return True
    it.nents = 0
    return False

cdef inline bint page_iter_next(page_iter_t *it) noexcept nogil:
    """Step to the next page (__sg_page_iter_next): False at the end."""
    if mm_unlikely(it.left == 0) and not page_iter_entry(it):
        return False
    it.left -= 1
    it.pfn += 1
    return True

cdef struct piece_t:            # consecutive bytes of a list; see piece_next()
    uint64_t at                 # physical address: PFN << shift, plus the byte
    uint64_t length

cdef struct pieces_t:           # the pieces of [skip, skip + left)
    sg_t *sg
    uint64_t nents
    uint64_t skip               # bytes to pass over before the next piece
    uint64_t left               # bytes still wanted
    unsigned shift

cdef void pieces_start(pieces_t *p, sg_t *sgl, uint64_t nents, unsigned shift, uint64_t skip, uint64_t length) noexcept nogil
cdef bint pieces_next(pieces_t *p, piece_t *piece) noexcept nogil   # neighbours in memory come as one piece
cdef uint64_t total_length(sg_t *sgl, uint64_t nents) noexcept nogil
cdef uint64_t pages_of(SGTable table) except? 0         # of the CPU view; needs read(). Raises for bytes without a page
cdef int still_data(const sg_t *sg) except -1           # raises when an iterator's slot became a link
