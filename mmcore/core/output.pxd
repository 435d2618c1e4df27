"""Output of pinned pages: what a walk hands its leaves to (gup_output, of the review of 2020).

A walk finds leaves: a first page and how many pages from there on follow each other. It knows nothing of where they go.
A sink is a struct of a function and whatever state follows it; the walk calls the function once for many leaves, so that
a leaf of 512 pages and a base page both cost their sink one line of code and no call of their own.

    PageList        a PFN for each page, as the kernel's `struct page **`
    PageRanges      runs; neighbours become one
    others          a struct that starts with gup_output_t, and a GupOutput that makes it: no walk changes

Laws
    A sink takes leaves in the order of the addresses, from the first on, and says how many it took. What it took is its
    caller's to release; what it refused is released by the walk, which ends there as if the pages had not been there.
    A leaf stays within one device or within RAM, and within one call there are at most nr_pages pages.
    Only pages that will stay reach a sink: a walk that loses a race takes its pages back before.

A leaf in one word: PFN in the low LEAF_PFN_BITS bits, pages above. 2^40 struct pages would fill 64 TiB.
"""
from libc.stdint cimport uint64_t
from mmcore.core.memory cimport *
from mmcore.core.pagelist cimport PageList

cdef enum:
    LEAF_PFN_BITS = 40
    LEAF_MAX_PAGES = (1 << 24) - 1      # in one word; longer runs take several

cdef inline uint64_t leaf_word(uint64_t pfn, uint64_t count) noexcept nogil:
    return pfn | (count << LEAF_PFN_BITS)

cdef inline uint64_t leaf_pfn(uint64_t leaf) noexcept nogil:
    return leaf & ((ONE << LEAF_PFN_BITS) - 1)

cdef inline uint64_t leaf_count(uint64_t leaf) noexcept nogil:
    return leaf >> LEAF_PFN_BITS

cdef struct gup_output_t:
    # Takes up to nr leaves and returns how many it took; fewer: `error` says why, as a negative errno.
    uint64_t (*take)(gup_output_t *out, const uint64_t *leaf, uint64_t nr) noexcept nogil
    int error
    uint64_t nr_pages           # taken so far; the walk counts

cdef struct python_output_t:
    gup_output_t base
    mem_t *m
    uint64_t *leaf              # kept until the walk is over: Python code must not run under its locks
    uint64_t n
    uint64_t room

cdef class GupOutput:
    """What Python and Cython code subclass. Python: override gup_output_single_page and gup_output_pages. Cython: override
    begin() to return a struct of your own, whose function is called without the GIL, and finish()."""
    cdef python_output_t leaves
    cdef uint64_t in_use        # a call has it, from begin() to the end of finish()

    cdef gup_output_t *begin(self, Memory mem, uint64_t nr_pages) except NULL
    cdef object finish(self, Memory mem, bint pins)     # what the call returns; after the last take()
    cdef void give_back(self, mem_t *m, bint pins)      # instead of finish(): releases what was taken

# Drop a pin (or a plain reference) of each page of leaves that the same call took: it cannot fail.
cdef void release_leaves(mem_t *m, const uint64_t *leaf, uint64_t nr, bint pins) noexcept nogil

cdef GupOutput output_arg(object output)                    # from a class or an object
cdef void register_output(object kind, object make)         # kind: a class; make(class or object) -> GupOutput
