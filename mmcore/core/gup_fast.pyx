"""The walk without locks."""
from mmcore.core.gup_walk cimport *
from mmcore.core.output cimport release_leaves
from mmcore.core.pgtable cimport *
from mmcore.core.rmap cimport counts_mappings
from mmcore.core.space cimport FILE_SECRETMEM, FILE_TMPFS, mm_t

cdef enum:
    AHEAD = 64                  # entries whose struct pages are fetched in advance
    AHEAD_LEAVES = 16           # also beyond the end of the range: who asks for 512 pages will ask for the next

cdef extern from *:
    """
    #define MM_PFN_STEP (1ULL << 12)
    """
    const uint64_t PFN_STEP "MM_PFN_STEP"      # between the entries of neighbours

cdef inline uint64_t needed_bits(const gup_t *w) noexcept nogil:
    """What an entry must have for the access (pte_access_permitted)."""
    return PTE_PRESENT | PTE_USER | (PTE_RW if w.flags & FOLL_WRITE else 0)

cdef bint file_allowed(gup_t *w, const page_t *head, bint large, bint reject_files) noexcept nogil:
    """gup_fast_folio_allowed for a folio that is neither anonymous nor hugetlb."""
    cdef uint64_t mapping = a64_load_relaxed(&head.mapping)     # read once: truncation may clear it meanwhile
    cdef device_t *d
    if page_zone(head) == ZONE_DEVICE:
        d = device_of(w.m, <uint64_t>(head - w.m.map))
        return d != NULL and (d.type == DEVICE_GENERIC or d.type == DEVICE_PCI_P2PDMA or not reject_files)
    if not reject_files and large:
        return True
    if mapping == 0:
        return False
    if mapping & FOLIO_MAPPING_ANON:
        return True
    if mapping != w.seen_mapping:
        w.seen_kind = kind_of_file(w.m, mapping)
        w.seen_mapping = mapping
    if reject_files:
        return w.seen_kind == FILE_TMPFS
    return w.seen_kind >= 0 and w.seen_kind != FILE_SECRETMEM

cdef inline bint folio_allowed(gup_t *w, const page_t *head, bint large) noexcept nogil:
    cdef bint reject_files = w.flags & (FOLL_PIN | FOLL_LONGTERM | FOLL_WRITE) == (FOLL_PIN | FOLL_LONGTERM | FOLL_WRITE)
    if mm_likely(a64_load_relaxed(&head.mapping) & FOLIO_MAPPING_ANON) or folio_is_hugetlb(head):
        return True
    return file_allowed(w, head, large, reject_files)

cdef inline bint must_unshare(const gup_t *w, const page_t *head, const page_t *page) noexcept nogil:
    """gup_must_unshare without a VMA, for an entry that is not writable. page carries the exclusive mark."""
    if w.flags & (FOLL_PIN | FOLL_WRITE) != FOLL_PIN:
        return False
    if not a64_load_relaxed(&head.mapping) & FOLIO_MAPPING_ANON:
        return (w.flags & FOLL_LONGTERM) != 0
    return not test_flag(page, PG_owner_2)

cdef inline bint stays(gup_t *w, uint64_t head) noexcept nogil:
    """A longterm pin takes only what may stay where it is; the rest is for the slow walk to migrate."""
    return not w.flags & FOLL_LONGTERM or longterm_pinnable(w.m, head)

cdef inline void set_referenced(page_t *head) noexcept nogil:
    if mm_unlikely(not test_flag(head, PG_referenced)):
        set_flag(head, PG_referenced)

# ---- PTEs -------------------------------------------------------------------------------------------------------------
cdef bint fast_pte(gup_t *w, const uint64_t *entry, uint64_t e, const uint64_t *pmd, uint64_t pmd_was) noexcept nogil:
    """The page of one PTE, whatever its folio is. False: not taken."""
    cdef mem_t *m = w.m
    cdef uint64_t pfn = pte_pfn(e), head
    cdef page_t *page
    cdef bint large
    if grab_leaf(w, pfn, 1, &head, &large) != 0:
        return False
    mm_after_rmw()
    page = &m.map[head]
    if a64_load_acquire(entry) != e or a64_load_relaxed(pmd) != pmd_was or not stays(w, head) \
            or not folio_allowed(w, page, large) or test_flag(&m.map[pfn], PG_hwpoison) \
            or (not e & PTE_RW and must_unshare(w, page, page if folio_is_hugetlb(page) else &m.map[pfn])):
        drop_leaf(w, head, large, 1)
        return False
    set_referenced(page)
    note_leaf(w, pfn, 1)
    return True

cdef struct grab_t:             # what a row of neighbours must look like, and what each of them gets
    page_t *map
    const uint64_t *pmd         # the entry that names their table, and what it was
    uint64_t pmd_was
    uint64_t odd                # of page.flags: none of these
    uint64_t must               # all of these
    uint32_t amount
    uint32_t most               # references below the bias, from which on a folio must be marked as having many

cdef uint64_t grab_row(const grab_t *g, const uint64_t *entry, uint64_t n, const uint64_t *ahead, bint *wrong) noexcept nogil:
    """References on small anonymous pages whose entries count up by one page, with the same bits; how many, up to n. The page
    behind them is another kind, or somebody was in the way; or `wrong`: the last one is ours, but changed meanwhile.

    Nothing is stored in the loop but what the locked instruction writes: it would wait for each store before it. Neither are
    the PFNs. That is why the row is a function of its own, with all it needs in registers.
    """
    cdef uint64_t i, e = a64_load_acquire(entry), flags
    cdef page_t *page = &g.map[pte_pfn(e)]
    cdef uint64_t both = g.odd | g.must, must = g.must
    cdef uint32_t refs, amount = g.amount, most = g.most
    for i in range(n):
        if a64_load_acquire(&entry[i]) != e:
            return i        # before its page is looked at: nobody fetched that
        if ahead != NULL:
            prefetch_write(&g.map[pte_pfn(a64_load_relaxed(&ahead[i]))])
        flags = a64_load_relaxed(&page.flags)
        refs = refs_load(page)
        if mm_unlikely(flags & both != must or a64_load_relaxed(&page.compound_info) & 1
                       or not a64_load_relaxed(&page.mapping) & FOLIO_MAPPING_ANON or <int32_t>refs <= 0 or <int32_t>(refs + amount) <= 0
                       or refs & (GUP_PIN_COUNTING_BIAS - 1) >= most):
            return i
        if mm_unlikely(not a32_cas_acq_rel(&page._refcount, &refs, refs + amount)):
            return i
        mm_after_rmw()
        if mm_unlikely(a64_load_acquire(&entry[i]) != e or a64_load_relaxed(g.pmd) != g.pmd_was
                       or a64_load_relaxed(&page.flags) & both != must or a64_load_relaxed(&page.compound_info) & 1
                       or not a64_load_relaxed(&page.mapping) & FOLIO_MAPPING_ANON):
            wrong[0] = True
            return i + 1
        if mm_unlikely(not flags >> PG_referenced & 1):
            set_flag(page, PG_referenced)
        e += PFN_STEP
        page += 1
    return n

cdef bint fast_ptes(gup_t *w, const uint64_t *pmd, uint64_t pmd_was, uint64_t end, const uint64_t *more) noexcept nogil:
    """The entries of one table from w.addr on; `more`: of the table behind it, when the walk goes on there. False: the walk
    ends here.

    Small anonymous pages, what most of memory is, are taken in rows: one line of mem_map each, and one compare-and-swap.
    Everything else takes fast_pte.
    """
    cdef mem_t *m = w.m
    # The entries lead nowhere when the table was unlinked before we came: the second look at the PMD sees that.
    cdef const uint64_t *entry = table_at(m, pte_pfn(pmd_was)) + table_index(&w.mm.pgd, w.addr, 0)
    cdef uint64_t i, n = (end - w.addr) >> m.page_shift, e, pfn, row, got, taken = 0
    cdef uint64_t need = needed_bits(w), mask = need | PTE_SPECIAL
    cdef bint ok = True, wrong = False, longterm = (w.flags & FOLL_LONGTERM) != 0, pin = (w.flags & FOLL_PIN) != 0
    cdef bint exclusive = w.flags & (FOLL_PIN | FOLL_WRITE) == FOLL_PIN
    cdef grab_t g
    g.map = m.map
    g.pmd = pmd
    g.pmd_was = pmd_was
    g.odd = (ONE << PG_head) | (ONE << PG_hwpoison) | (<uint64_t>4 << ZONE_SHIFT)
    g.amount = GUP_PIN_COUNTING_BIAS if pin else 1
    g.most = GUP_PIN_COUNTING_BIAS if pin else GUP_PIN_COUNTING_BIAS // 2 - 1
    if entry != w.fetched:
        for i in range(min(n, <uint64_t>AHEAD)):
            e = a64_load_relaxed(&entry[i])
            if e & mask == need and pte_pfn(e) < m.nr_pages:
                prefetch_write(&m.map[pte_pfn(e)])
    if n < AHEAD:
        more = NULL
    w.fetched = more
    i = 0
    while i < n:
        e = a64_load_acquire(&entry[i])
        pfn = pte_pfn(e)
        # With one word left, the row in our hands would have none.
        if mm_unlikely(e & mask != need or pfn >= m.nr_pages or w.nr_leaves + 1 >= w.room):
            ok = False
            break
        # A row ends with the table, with memory, and where what is fetched ahead goes over to the next table.
        row = min(n - i, m.nr_pages - pfn)
        if i + AHEAD < n:
            row = min(row, n - AHEAD - i)
        got = 0
        if longterm:
            # Zones and migrate types are those of whole page blocks.
            row = min(row, (ONE << m.pageblock_order) - (pfn & ((ONE << m.pageblock_order) - 1)))
        if not longterm or longterm_pinnable(m, pfn):
            g.must = ONE << PG_owner_2 if exclusive and not e & PTE_RW else 0
            got = grab_row(&g, entry + i, row, entry + i + AHEAD if i + AHEAD < n else more + (i + AHEAD - n) if more != NULL else NULL,
                           &wrong)
        taken += got
        if mm_unlikely(wrong):
            # Whatever it is now, what we added is to be taken off the word that it was added to.
            if pin:
                stat_add(m, NR_FOLL_PIN_RELEASED, 1)
            got -= 1
            put_grabbed(m, pfn + got, g.amount)
            ok = False
        if got:
            note_leaf(w, pfn, got)
            i += got
        elif ok:
            ok = fast_pte(w, &entry[i], e, pmd, pmd_was)
            if ok:
                i += 1
        if not ok:
            break
    w.addr += i << m.page_shift
    w.leaf_walks += i
    w.head_lookups += taken
    w.ref_atomics += taken
    if pin:
        w.pins += taken
    return ok

# ---- leaves -----------------------------------------------------------------------------------------------------------
cdef bint fast_device_leaf(gup_t *w, const uint64_t *entry, uint64_t e, uint64_t pfn, uint64_t n) noexcept nogil:
    """A leaf over base pages of a device: one look at the entry, and a reference for each page."""
    cdef uint64_t i = 0, head
    cdef bint large
    while i < n and w.nr_leaves < w.room:
        if i + AHEAD < n:
            prefetch_write(&w.m.map[pfn + i + AHEAD])
        if grab_leaf(w, pfn + i, 1, &head, &large) != 0:
            break
        mm_after_rmw()
        if a64_load_acquire(entry) != e or not stays(w, head) or not folio_allowed(w, &w.m.map[head], large) \
                or test_flag(&w.m.map[head], PG_hwpoison) or (not e & PTE_RW and must_unshare(w, &w.m.map[head], &w.m.map[head])):
            drop_leaf(w, head, large, 1)
            break
        set_referenced(&w.m.map[head])
        note_leaf(w, pfn + i, 1)
        i += 1
    w.addr += i << w.m.page_shift
    return i == n

cdef inline bint fast_leaf(gup_t *w, const uint64_t *entry, uint64_t e, int level, uint64_t end) noexcept nogil:
    """All pages that a PMD or PUD leaf maps from w.addr up to end, in one update. False: the walk ends here."""
    cdef mem_t *m = w.m
    cdef uint64_t pfn = pte_pfn(e) + ((w.addr & (level_size(&w.mm.pgd, level) - 1)) >> m.page_shift)
    cdef uint64_t n = (end - w.addr) >> m.page_shift, head, need = needed_bits(w)
    cdef page_t *page
    cdef bint large
    if mm_unlikely(e & (need | PTE_SPECIAL) != need) or mm_unlikely(pfn + n > m.nr_pages) \
            or mm_unlikely(w.nr_leaves == w.room):
        return False
    w.leaf_walks += 1
    if mm_unlikely(pfn >= m.nr_ram) and not counts_mappings(m, pfn):
        return fast_device_leaf(w, entry, e, pfn, n)
    if mm_unlikely(grab_leaf(w, pfn, n, &head, &large) != 0):
        return False
    mm_after_rmw()
    page = &m.map[head]
    if mm_unlikely(a64_load_acquire(entry) != e) or mm_unlikely(not large) or mm_unlikely(not stays(w, head)) \
            or mm_unlikely(not folio_allowed(w, page, True)) \
            or mm_unlikely((a64_load_relaxed(&as_folio(page)._flags_1) >> PG_has_hwpoisoned) & 1) \
            or (not e & PTE_RW and must_unshare(w, page, page)):
        drop_leaf(w, head, large, n)
        return False
    set_referenced(page)
    note_leaf(w, pfn, n)
    w.addr = end
    return True

cdef inline void look_ahead(const gup_t *w, const uint64_t *entry, uint64_t left, const uint64_t *more) noexcept nogil:
    """Fetch head and tail 1 of a leaf some entries on; `left` is how many the table has after this one, `more` the entries
    of the table behind it, or NULL. Without these the first leaves of each table would be waited for one by one."""
    cdef uint64_t e
    if mm_likely(left >= AHEAD_LEAVES):
        entry += AHEAD_LEAVES
    elif more != NULL:
        entry = more + (AHEAD_LEAVES - 1 - left)
    else:
        return
    e = a64_load_relaxed(entry)
    if e & (PTE_PRESENT | PTE_PSE) == (PTE_PRESENT | PTE_PSE) and pte_pfn(e) + 1 < w.m.nr_pages:
        prefetch_write(&w.m.map[pte_pfn(e)])
        prefetch_write(&w.m.map[pte_pfn(e) + 1])

cdef inline const uint64_t *table_behind(const gup_t *w, const uint64_t *entry, const uint64_t *last) noexcept nogil:
    """The entries of the table that the next entry names; NULL when there is none."""
    cdef uint64_t e
    if entry == last:
        return NULL
    e = a64_load_acquire(entry + 1)
    return table_at(w.m, pte_pfn(e)) if e & (PTE_PRESENT | PTE_PSE) == PTE_PRESENT else NULL

cdef bint fast_table(gup_t *w, uint64_t table, int level, uint64_t end, const uint64_t *more) noexcept nogil:
    """The entries of one upper table from w.addr up to end; `more`: of the table behind it. False: the walk ends here."""
    cdef mem_t *m = w.m
    cdef pgd_t *g = &w.mm.pgd
    cdef uint64_t *entry = table_at(m, table) + table_index(g, w.addr, level)
    cdef uint64_t *last = table_at(m, table) + ((ONE << g.bits) - 1)
    cdef uint64_t e, next
    cdef bint ok
    while w.addr < end:
        e = a64_load_acquire(entry)
        next = level_end(g, w.addr, end, level)
        if pte_leaf(e, level):
            look_ahead(w, entry, <uint64_t>(last - entry), more)
            ok = fast_leaf(w, entry, e, level, next)
        elif not pte_table(e, level):
            return False
        elif level == 1:
            ok = fast_ptes(w, entry, e, next, table_behind(w, entry, last) if next < end else NULL)
        else:
            ok = fast_table(w, pte_pfn(e), level - 1, next, table_behind(w, entry, last))
        if mm_unlikely(not ok):
            return False
        entry += 1
    return True

# ---- a page at a time ---------------------------------------------------------------------------------------------------
cdef bint fast_page(gup_t *w) noexcept nogil:
    """One base page: descend from the top, lock the table that names it, take one reference. acquire="page"."""
    cdef mem_t *m = w.m
    cdef pgd_t *g = &w.mm.pgd
    cdef int level = 0
    cdef uint64_t table, e, pfn, head, need = needed_bits(w)
    cdef uint64_t *entry = walk_find(g, w.addr, &level, &table)
    cdef page_t *page
    cdef bint large, ok = False
    if w.nr_leaves == w.room:
        return False
    table_lock(m, table)
    e = a64_load_relaxed(entry)
    pfn = pte_pfn(e) + ((w.addr & (level_size(g, level) - 1)) >> m.page_shift)
    # A table that was unlinked has no entries: nothing of it is taken.
    if pte_leaf(e, level) and e & (need | PTE_SPECIAL) == need and pfn < m.nr_pages and grab_leaf(w, pfn, 1, &head, &large) == 0:
        page = &m.map[head]
        if not stays(w, head) or not folio_allowed(w, page, large) or test_flag(&m.map[pfn], PG_hwpoison) \
                or (level > 0 and large and (a64_load_relaxed(&as_folio(page)._flags_1) >> PG_has_hwpoisoned) & 1) \
                or (not e & PTE_RW and must_unshare(w, page, page if level > 0 or folio_is_hugetlb(page) else &m.map[pfn])):
            drop_leaf(w, head, large, 1)
        else:
            set_referenced(page)
            note_leaf(w, pfn, 1)
            w.addr += ONE << m.page_shift
            ok = True
    table_unlock(m, table)
    # The kernel counts each pin as it is taken; so does this generation.
    w.leaf_walks += 1
    if w.pins:
        stat_add(m, NR_FOLL_PIN_ACQUIRED, <int64_t>w.pins)
        w.pins = 0
    return ok

# ---- one attempt --------------------------------------------------------------------------------------------------------
cdef void gup_fast(gup_t *w) noexcept nogil:
    cdef mm_t *mm = w.mm
    cdef bint pin = (w.flags & FOLL_PIN) != 0
    cdef uint32_t seq = 0
    cdef uint64_t start = w.addr, first = w.nr_leaves
    cdef int token
    cdef uint64_t top
    w.next_pfn = 0      # a chunk's leaves are its own: they may have to go back
    if pin:
        seq = a32_load_acquire(&mm.write_protect_seq)
        if seq & 1:
            return
    token = walk_enter(&mm.pgd)
    top = a64_load_acquire(&mm.pgd.top)
    if top == 0 or a32_load_relaxed(&mm.exited):
        pass
    elif w.page_by_page:
        while w.addr < w.end and fast_page(w):
            pass
    else:
        fast_table(w, top, mm.pgd.levels - 1, w.end, NULL)
    walk_leave(&mm.pgd, token)
    count_walk(w)
    if pin:
        mm_full_barrier()
        if mm_unlikely(a32_load_acquire(&mm.write_protect_seq) != seq) and not mm_planted(2):
            release_leaves(w.m, w.leaf + first, w.nr_leaves - first, True)
            w.nr_leaves = first
            w.addr = start
