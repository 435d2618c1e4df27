"""Walks over page lists and ranges by compound head: releasing in batches, acquiring a given list.

Laws
    Every walk leaves exactly the state of one page at a time, for every partition of the pages into folios.
    A batch that fails undoes itself. So it frees only at its end, when nothing can fail any more.
    nr_foll_pin_released grows by base pages, before the counters drop; the zero page is neither counted nor touched.

Generations of the walk over a list
    page    one head look-up and one counter update an entry: the kernel before 2021
    head    one head look-up an entry, one update for neighbours with the same head: the kernel from 2021 on
    run     one look-up a group: the first entry gives head and size of its folio, and the next ones belong to it as
            long as (pfn ^ head) < nr_pages. Folios are naturally aligned, so that this is exact for any order, holes
            and duplicates, and no tail's struct page is loaded.
"""
from libc.stdint cimport int64_t, uint32_t, uint64_t
from mmcore.core.memory cimport *
from mmcore.core.folio cimport *
from mmcore.core.lock cimport *
from mmcore.core.buddy cimport freed_word, free_folios
from mmcore.core.hook cimport pins_add, pins_t
from mmcore.core.pagelist cimport PageList, PageRanges

cdef enum generation:
    GEN_RUN
    GEN_HEAD
    GEN_PAGE

cdef struct group_t:            # neighbours in a list that are in one folio
    uint64_t head               # PFN
    uint64_t nr_pages           # of the folio
    uint64_t count              # entries of the group

cdef struct batch_t:            # one release, from its first page to the freeing at its end
    mem_t *m
    bint pins                   # drop pins; else plain references
    bint make_dirty
    uint64_t skip               # head that is passed over: the zero page for pins, which never counted on it; the huge zero
                                # folio for release_pages; 0 for none
    int64_t frees               # NR_FREES at its start
    bint kept                   # it failed, and what it released before stays released
    uint64_t *freed             # freed_word()s of the folios this batch brought to 0
    uint64_t nr_freed
    uint64_t freed_size         # bytes of the array
    uint64_t *dirtied           # heads this batch found clean and marked dirty
    uint64_t nr_dirtied
    uint64_t dirtied_size
    uint64_t released           # pages whose pins went
    uint64_t ref_atomics        # for opstats
    uint64_t pincount_atomics
    uint64_t head_lookups
    int error                   # a BAD_* code or negative errno
    uint64_t bad_pfn            # the head where it failed
    uint64_t bad_count          # how much it wanted to drop there

# ---- groups --------------------------------------------------------------------------------------------------------
cdef inline uint64_t folio_at(const page_t *map, uint64_t pfn, uint64_t *head) noexcept nogil:
    """Head and size of the folio that holds a page, from one look at that page (and tail 1, when it is the head)."""
    cdef uint64_t word = a64_load_relaxed(&map[pfn].compound_info)
    if word & 1:
        head[0] = head_of(pfn, word)
        return ONE << tail_word_order(word)
    head[0] = pfn
    if page_is_head(&map[pfn]):
        return ONE << (a64_load_relaxed(&as_folio(&map[pfn])._flags_1) & 0xff)
    return 1

cdef inline uint64_t run_length(const uint64_t *pfns, uint64_t n, uint64_t head, uint64_t nr_pages) noexcept nogil:
    """How many entries from pfns[0] on, which is one, lie in [head, head + nr_pages).

    nr_pages is a power of two, so that the OR of differences is below it exactly when each of them is.
    """
    cdef uint64_t i = 1, k, different
    if nr_pages > 16:
        while i + 32 <= n:
            different = 0
            for k in range(32):
                different |= pfns[i + k] ^ head
            if different >= nr_pages:
                break
            i += 32
        while i + 8 <= n:
            different = 0
            for k in range(8):
                different |= pfns[i + k] ^ head
            if different >= nr_pages:
                break
            i += 8
    while i < n and (pfns[i] ^ head) < nr_pages:
        i += 1
    return i

cdef inline void next_run(const page_t *map, const uint64_t *pfns, uint64_t n, group_t *g) noexcept nogil:
    g.nr_pages = folio_at(map, pfns[0], &g.head)
    g.count = run_length(pfns, n, g.head, g.nr_pages)

cdef inline bint next_small(const page_t *map, const uint64_t *pfns, uint64_t n, group_t *g) noexcept nogil:
    """The group at pfns[0] if that is a small folio (or NULL): the same page, repeated. False for a large folio.

    A path of its own, since most lists of small folios have nothing to group: it costs what one page at a time costs.
    """
    cdef uint64_t pfn = pfns[0], i = 1
    if a64_load_relaxed(&map[pfn].compound_info) & 1 or page_is_head(&map[pfn]):
        return False
    while mm_unlikely(i < n and pfns[i] == pfn):
        i += 1
    g.head = pfn
    g.nr_pages = 1
    g.count = i
    return True

cdef inline void next_head(const page_t *map, const uint64_t *pfns, uint64_t n, group_t *g) noexcept nogil:
    """The group as the kernel finds it; g.nr_pages is not looked up."""
    cdef uint64_t i = 1
    g.head = compound_head_pfn(map, pfns[0])
    while i < n and compound_head_pfn(map, pfns[i]) == g.head:
        i += 1
    g.count = i

cdef inline void next_in_range(const page_t *map, uint64_t pfn, uint64_t n, group_t *g) noexcept nogil:
    g.nr_pages = folio_at(map, pfn, &g.head)
    g.count = remaining_pages(g.head, g.nr_pages, pfn, n)

# ---- for those who watch pins: folios and pins of each, NULL and the zero page left out
cdef inline void range_pins(mem_t *m, uint64_t pfn, uint64_t n, pins_t *pins) noexcept nogil:
    cdef group_t g
    if pfn == 0:
        return
    while n:
        next_in_range(m.map, pfn, n, &g)
        if g.head != m.zero_pfn:
            pins_add(pins, g.head, g.count)
        pfn += g.count
        n -= g.count

cdef inline void list_pins(mem_t *m, const uint64_t *pfns, uint64_t n, pins_t *pins) noexcept nogil:
    cdef group_t g
    cdef uint64_t i = 0
    while i < n:
        next_run(m.map, pfns + i, n - i, &g)
        if g.head and g.head != m.zero_pfn:
            pins_add(pins, g.head, g.count)
        i += g.count

# ---- batches: begin, any number of releases, then finish. A batch that failed is undone first, if it may be -------------
# Undoing takes pins again that were dropped a moment ago; that is sound as long as no frame can have been freed and used
# again since. So it is done with the lists of free frames locked, if nobody else gave a frame back since the batch began.
# If somebody did, what was released stays released, and the error says so.
cdef int batch_begin(batch_t *b, mem_t *m, uint64_t nr_pages, bint pins, bint make_dirty) noexcept nogil
cdef uint64_t release_list(batch_t *b, const uint64_t *pfns, uint64_t n, int gen) noexcept nogil   # entries done; < n: b.error
cdef uint64_t release_range(batch_t *b, uint64_t pfn, uint64_t n) noexcept nogil
cdef bint undo_begin(batch_t *b) noexcept nogil             # False, and b.kept, when it may not
cdef void undo_list(batch_t *b, const uint64_t *pfns, uint64_t n) noexcept nogil
cdef void undo_range(batch_t *b, uint64_t pfn, uint64_t n) noexcept nogil
cdef void undo_end(batch_t *b) noexcept nogil               # also of what it dirtied
cdef void batch_finish(batch_t *b) noexcept nogil           # counts, frees

# ---- acquiring: 0, or negative errno with the first `done` pages taken -------------------------------------------------
cdef int grab_list(mem_t *m, const uint64_t *pfns, uint64_t n, unsigned flags, uint64_t *done) noexcept nogil
cdef int grab_range(mem_t *m, uint64_t pfn, uint64_t n, unsigned flags, uint64_t *done) noexcept nogil
