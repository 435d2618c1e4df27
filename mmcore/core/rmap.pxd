"""Map counts, and the way back from a page to the entries that map it.

Laws (PAGE_MAPCOUNT, as in Linux up to 6.18)
    small folio           _mapcount is its mappings - 1
    large folio, a PTE    the page's own _mapcount, and _large_mapcount
    large folio, a leaf   _entire_mapcount, and _large_mapcount; hugetlb and huge device folios as well
    _nr_pages_mapped      pages whose own _mapcount is not -1, plus ENTIRELY_MAPPED while a leaf maps it
    Each mapping holds one reference, taken before the map count grows and dropped after it shrank.
    Device memory without compound pages is mapped by huge leaves that count nothing: its device map keeps it.

A small folio's _mapcount and _refcount are one aligned word, so that a mapping and its reference come and go in a single
atomic operation: the word is _refcount << 32 | (uint32_t)_mapcount (little-endian, which every 64-bit Linux of today is).
"""
from libc.stdint cimport int32_t, int64_t, uint32_t, uint64_t
from mmcore.core.memory cimport *
from mmcore.core.space cimport *
from mmcore.core.folio cimport note_plain_refs, ref_add_positive, put_refs, FREED

cdef extern from *:
    """
    #define MM_MAP_ONE 0x100000001ULL
    #define MM_MAPPED_ONCE 0x100000000ULL
    #define MM_UNMAPPED_FREE 0x0ffffffffULL
    """
    const uint64_t MAP_ONE "MM_MAP_ONE"             # a mapping and its reference, in the word of both counts
    const uint64_t MAPPED_ONCE "MM_MAPPED_ONCE"     # one mapping, one reference
    const uint64_t UNMAPPED_FREE "MM_UNMAPPED_FREE"  # none, none

cdef inline void small_map_dup(page_t *page) noexcept nogil:
    """One more mapping of a small folio that is mapped already, with its reference."""
    cdef uint64_t old = a64_fetch_add_relaxed(&page._mapcount, MAP_ONE)
    note_plain_refs(page, <uint32_t>(old >> 32), 1)

cdef inline void small_map_add(page_t *page) noexcept nogil:
    """A mapping of a small folio, mapped or not, with its reference. The caller holds it by another one."""
    cdef uint32_t old = a32_fetch_add_acq_rel(&page._refcount, 1)
    note_plain_refs(page, old, 1)
    a32_fetch_add_relaxed(&page._mapcount, 1)

cdef inline void large_page_map(page_t *head, page_t *page, uint32_t refs) noexcept nogil:
    """Map one page of a large folio by a PTE; refs: 1, or 0 when the caller's reference becomes the mapping's."""
    if refs:
        a32_fetch_add_acq_rel(&head._refcount, refs)
    mark_tails(head)
    if a32_fetch_add_relaxed(&page._mapcount, 1) == <uint32_t>-1:
        a32_fetch_add_relaxed(&as_folio(head)._nr_pages_mapped, 1)
    a32_fetch_add_relaxed(&as_folio(head)._large_mapcount, 1)

cdef inline void large_page_unmap(page_t *head, page_t *page) noexcept nogil:
    a32_fetch_add_relaxed(&as_folio(head)._large_mapcount, <uint32_t>-1)
    if a32_fetch_add_relaxed(&page._mapcount, <uint32_t>-1) == 0:
        a32_fetch_add_relaxed(&as_folio(head)._nr_pages_mapped, <uint32_t>-1)

cdef inline void leaf_map(page_t *head, uint32_t refs) noexcept nogil:
    """Map a whole large folio by a PMD or PUD leaf."""
    if refs:
        a32_fetch_add_acq_rel(&head._refcount, refs)
    if a32_fetch_add_relaxed(&as_folio(head)._entire_mapcount, 1) == <uint32_t>-1:
        a32_fetch_add_relaxed(&as_folio(head)._nr_pages_mapped, ENTIRELY_MAPPED)
    a32_fetch_add_relaxed(&as_folio(head)._large_mapcount, 1)

cdef inline void leaf_unmap(page_t *head) noexcept nogil:
    a32_fetch_add_relaxed(&as_folio(head)._large_mapcount, <uint32_t>-1)
    if a32_fetch_add_relaxed(&as_folio(head)._entire_mapcount, <uint32_t>-1) == 0:
        a32_fetch_add_relaxed(&as_folio(head)._nr_pages_mapped, <uint32_t>-ENTIRELY_MAPPED)

cdef inline void page_map(mem_t *m, uint64_t pfn) noexcept nogil:
    """A PTE's mapping of any page that counts, with its reference; the caller holds the folio by another one."""
    cdef page_t *page = &m.map[pfn]
    cdef uint64_t head = compound_head_pfn(m.map, pfn)
    if page_is_head(&m.map[head]):
        large_page_map(&m.map[head], page, 1)
    else:
        small_map_add(page)

cdef inline bint counts_mappings(mem_t *m, uint64_t pfn) noexcept nogil:
    """Does a huge leaf on this frame count? Base pages of a device behind one do not."""
    return page_is_head(&m.map[compound_head_pfn(m.map, pfn)])

cdef inline int64_t page_mapcount(mem_t *m, uint64_t pfn) noexcept nogil:
    """Mappings of one page, whole-folio mappings included (folio_precise_page_mapcount)."""
    cdef page_t *head = &m.map[compound_head_pfn(m.map, pfn)]
    cdef int32_t own = <int32_t>a32_load_relaxed(&m.map[pfn]._mapcount)
    if not page_is_head(head):
        return own + 1 if own >= -1 else 0
    if own < -1:
        own = -1
    return own + 1 + <int32_t>a32_load_relaxed(&as_folio(head)._entire_mapcount) + 1

cdef inline bint maybe_dma_pinned(const page_t *head) noexcept nogil:
    if page_is_head(head):
        return <int32_t>a32_load_relaxed(&as_folio(head)._pincount) > 0
    return a32_load_relaxed(&head._refcount) >= GUP_PIN_COUNTING_BIAS

# ---- the way back ---------------------------------------------------------------------------------------------------
# Called for each stretch of a VMA that may map pages of the folio: addresses [addr, addr + (nr << page_shift)) are those of
# its pages from `first` on. Under the family's or file's lock and the mm's rmap_lock; it takes table locks itself.
# Nonzero ends the walk.
ctypedef int (*rmap_fn)(mm_t *mm, vma_t *v, uint64_t addr, uint64_t first, uint64_t nr, void *arg) noexcept nogil
cdef int rmap_walk_anon(mem_t *m, uint64_t mapping, uint64_t index, uint64_t nr, rmap_fn fn, void *arg) noexcept nogil
cdef int rmap_walk_file(file_t *f, uint64_t index, uint64_t nr, rmap_fn fn, void *arg) noexcept nogil   # f.lock held
