"""Unmapping."""
from libc.errno cimport ENOMEM
from mmcore.core.buddy cimport free_folio, reserve_hugetlb
from mmcore.core.folio cimport FREED, put_refs
from mmcore.core.frames cimport give_huge, give_pages
from mmcore.core.lock cimport mark_dirty
from mmcore.core.pgtable cimport *
from mmcore.core.rmap cimport *
from mmcore.core.swap cimport swap_free

cdef void zap_begin(zap_t *z, mm_t *mm) noexcept nogil:
    z.mm = mm
    z.m = mm.m
    z.nr_small = z.nr_huge = 0
    z.anon = z.file = z.shmem = z.swapped = 0

cdef void zap_end(zap_t *z) noexcept nogil:
    if z.nr_small:
        give_pages(z.m, z.small, z.nr_small)
    if z.nr_huge:
        give_huge(z.m, z.huge, z.nr_huge)
    if z.anon:
        a64_fetch_add_relaxed(&z.mm.rss_anon, <uint64_t>-z.anon)
    if z.file:
        a64_fetch_add_relaxed(&z.mm.rss_file, <uint64_t>-z.file)
    if z.shmem:
        a64_fetch_add_relaxed(&z.mm.rss_shmem, <uint64_t>-z.shmem)
    if z.swapped:
        a64_fetch_add_relaxed(&z.mm.swapped, <uint64_t>-z.swapped)
    zap_begin(z, z.mm)

cdef int64_t *rss_word(zap_t *z, const page_t *head) noexcept nogil:
    if folio_is_anon(head):
        return &z.anon
    return &z.shmem if test_flag(head, PG_swapbacked) else &z.file

cdef void rss_add(mm_t *mm, uint64_t head, int64_t pages) noexcept nogil:
    """Count pages into rss. hugetlb is not in it, as in the kernel; what is swap-backed and not anonymous is shmem."""
    cdef page_t *page = &mm.m.map[head]
    if folio_is_hugetlb(page):
        return
    if folio_is_anon(page):
        a64_fetch_add_relaxed(&mm.rss_anon, <uint64_t>pages)
    elif test_flag(page, PG_swapbacked):
        a64_fetch_add_relaxed(&mm.rss_shmem, <uint64_t>pages)
    else:
        a64_fetch_add_relaxed(&mm.rss_file, <uint64_t>pages)

cdef int put_mapping(mem_t *m, uint64_t head, uint32_t refs) noexcept nogil:
    """Drop references that mappings held, and free the folio at 0."""
    cdef page_t *page = &m.map[head]
    cdef unsigned order = folio_order_of(page)
    cdef int result = put_refs(m, page, page_is_head(page), refs)
    if result == FREED:
        free_folio(m, head, order)
    return result

cdef void small_done(zap_t *z, uint64_t pfn) noexcept nogil:
    z.small[z.nr_small] = pfn
    z.nr_small += 1
    if z.nr_small == ZAP_SMALL:
        give_pages(z.m, z.small, z.nr_small)
        z.nr_small = 0

cdef inline bint zap_fast(zap_t *z, uint64_t pfn) noexcept nogil:
    """An anonymous small page that only this entry holds: gone in one compare-and-swap, its struct page free."""
    cdef page_t *page = &z.m.map[pfn]
    cdef uint64_t flags = a64_load_relaxed(&page.flags), both = MAPPED_ONCE
    cdef uint64_t stop = (ONE << PG_locked) | (ONE << PG_writeback) | (ONE << PG_head) | (ONE << PG_reserved) \
        | (ONE << PG_hwpoison) | (ONE << PG_waiters)
    if mm_unlikely(flags & stop or not a64_load_relaxed(&page.mapping) & FOLIO_MAPPING_ANON or page_is_tail(page)):
        return False
    if mm_unlikely(not a64_cas_acq_rel(&page._mapcount, &both, UNMAPPED_FREE)):
        return False
    a64_store_relaxed(&page.flags, flags & ~((ONE << ZONE_SHIFT) - 1))
    a64_store_relaxed(&page.mapping, 0)
    a64_store_relaxed(&page.index, 0)
    a64_store_relaxed(&page.private, 0)
    z.anon += 1
    small_done(z, pfn)
    return True

cdef inline void dirty_folio(mem_t *m, uint64_t head) noexcept nogil:
    """A device's memory is written where it lies: nothing has to be written back."""
    if page_zone(&m.map[head]) != ZONE_DEVICE:
        mark_dirty(m, head)

cdef void zap_small(zap_t *z, uint64_t pfn, bint dirty) noexcept nogil:
    cdef page_t *page = &z.m.map[pfn]
    cdef int64_t *rss = rss_word(z, page)
    if dirty and rss != &z.anon:
        dirty_folio(z.m, pfn)
    rss[0] += 1
    a32_fetch_add_relaxed(&page._mapcount, <uint32_t>-1)
    put_mapping(z.m, pfn, 1)

cdef uint64_t zap_large(zap_t *z, uint64_t *entry, uint64_t left) noexcept nogil:
    """PTEs of one large folio, from this one on: as many as follow each other. Returns how many."""
    cdef mem_t *m = z.m
    cdef uint64_t pfn = pte_pfn(a64_load_relaxed(entry)), head = compound_head_pfn(m.map, pfn), nr = 0, e
    cdef uint64_t end = head + (ONE << folio_order_of(&m.map[head]))
    cdef int64_t *rss = rss_word(z, &m.map[head])
    cdef bint dirty = False
    while nr < left and pfn + nr < end:
        e = a64_load_relaxed(&entry[nr])
        if not pte_present(e) or e & PTE_SPECIAL or pte_pfn(e) != pfn + nr:
            break
        dirty = dirty or (e & PTE_DIRTY) != 0
        large_page_unmap(&m.map[head], &m.map[pfn + nr])
        a64_store_relaxed(&entry[nr], 0)
        nr += 1
    if dirty and rss != &z.anon:
        dirty_folio(m, head)
    rss[0] += <int64_t>nr
    put_mapping(m, head, <uint32_t>nr)
    return nr

cdef void zap_ptes(zap_t *z, uint64_t table, uint64_t addr, uint64_t end) noexcept nogil:
    cdef mem_t *m = z.m
    cdef uint64_t i, k, e, pfn, ahead, nr = (end - addr) >> m.page_shift, gone = 0
    cdef uint64_t *entry = table_at(m, table) + table_index(&z.mm.pgd, addr, 0)
    table_lock(m, table)
    if table_used(m, table)[0] == 0:
        table_unlock(m, table)
        return
    i = 0
    while i < nr:
        e = a64_load_relaxed(&entry[i])
        if e == 0:
            i += 1
            continue
        k = 1
        ahead = a64_load_relaxed(&entry[i + 8]) if i + 8 < nr else 0
        if ahead & PTE_PRESENT and pte_pfn(ahead) < m.nr_pages:
            prefetch_write(&m.map[pte_pfn(ahead)])
        if not pte_present(e):
            a64_store_relaxed(&entry[i], 0)
            if swp_type(e) == SWP_TYPE_SWAP:
                swap_free(m, swp_offset(e), 1)
                z.swapped += 1
        elif e & PTE_SPECIAL:
            a64_store_relaxed(&entry[i], 0)
        else:
            pfn = pte_pfn(e)
            a64_store_relaxed(&entry[i], 0)
            if not zap_fast(z, pfn):
                if page_is_tail(&m.map[pfn]) or page_is_head(&m.map[pfn]):
                    a64_store_relaxed(&entry[i], e)
                    k = zap_large(z, entry + i, nr - i)
                else:
                    zap_small(z, pfn, (e & PTE_DIRTY) != 0)
        gone += k
        i += k
    table_used(m, table)[0] -= gone
    table_unlock(m, table)

cdef void zap_one(zap_t *z, uint64_t e, int level) noexcept nogil:
    """Undo what one entry stood for; the entry itself is gone already."""
    cdef mem_t *m = z.m
    cdef uint64_t pfn = pte_pfn(e), head
    cdef page_t *page
    cdef int64_t *rss
    cdef bint huge
    if not pte_present(e):
        if swp_type(e) == SWP_TYPE_SWAP:
            swap_free(m, swp_offset(e), 1)
            z.swapped += 1
        return
    if e & PTE_SPECIAL:
        return
    if level == 0:
        if zap_fast(z, pfn):
            return
        if page_is_tail(&m.map[pfn]) or page_is_head(&m.map[pfn]):
            zap_large(z, &e, 1)
        else:
            zap_small(z, pfn, (e & PTE_DIRTY) != 0)
        return
    head = compound_head_pfn(m.map, pfn)
    page = &m.map[head]
    if not page_is_head(page):
        return      # base pages of a device: the leaf counted nothing
    rss = rss_word(z, page)
    if not folio_is_hugetlb(page):
        rss[0] += <int64_t>(ONE << level_order(&z.mm.pgd, level))
    if e & PTE_DIRTY and rss != &z.anon:
        dirty_folio(m, head)
    leaf_unmap(page)
    huge = rss == &z.anon and level == 1 and not folio_is_hugetlb(page)
    if put_refs(m, page, True, 1) != FREED:
        return
    if huge:
        z.huge[z.nr_huge] = head
        z.nr_huge += 1
        if z.nr_huge == ZAP_HUGE:
            give_huge(m, z.huge, z.nr_huge)
            z.nr_huge = 0
    else:
        free_folio(m, head, folio_order_of(page))

cdef void zap_table(zap_t *z, uint64_t table, int level, uint64_t start, uint64_t end) noexcept nogil:
    """The entries of one table, and what is below them. Upper tables are not locked on the way down: mmap_lock is held,
    so that a table stays a table; a leaf may be split meanwhile, and is looked at again under the lock."""
    cdef mem_t *m = z.m
    cdef pgd_t *g = &z.mm.pgd
    cdef uint64_t at = start, next, e, ahead
    cdef uint64_t *entry
    if level == 0:
        zap_ptes(z, table, start, end)
        return
    while at < end:
        next = level_end(g, at, end, level)
        entry = table_at(m, table) + table_index(g, at, level)
        e = a64_load_acquire(entry)
        if e & PTE_PSE and at + 8 * level_size(g, level) < end and (<uint64_t>entry & 0xfff) < 0xfc0:
            ahead = a64_load_relaxed(entry + 8)
            if ahead & PTE_PSE and pte_pfn(ahead) < m.nr_ram:
                prefetch_write(&m.map[pte_pfn(ahead)])
                prefetch_write(&m.map[pte_pfn(ahead) + 1])
        if e != 0 and not pte_table(e, level):
            table_lock(m, table)
            e = a64_load_relaxed(entry)
            if e != 0 and not pte_table(e, level):
                # Taken and cleared at once: the processor may be marking it accessed or dirty.
                e = a64_exchange_acq_rel(entry, 0)
                table_used(m, table)[0] -= 1
                zap_one(z, e, level)
            table_unlock(m, table)
            e = a64_load_acquire(entry)
        if pte_table(e, level):
            zap_table(z, pte_pfn(e), level - 1, at, next)
        at = next

cdef void zap_range(zap_t *z, vma_t *v, uint64_t start, uint64_t end) noexcept nogil:
    zap_table(z, z.mm.pgd.top, z.mm.pgd.levels - 1, start, end)

# ---- hugetlb ----------------------------------------------------------------------------------------------------------
cdef uint64_t hugetlb_missing(mm_t *mm, vma_t *v, uint64_t start, uint64_t end) noexcept nogil:
    cdef int level
    cdef uint64_t table, e, missing = 0, size = (ONE << v.order) << mm.m.page_shift
    while start < end:
        level = vma_level(mm, v)
        e = a64_load_acquire(walk_find(&mm.pgd, start, &level, &table))
        missing += level != vma_level(mm, v) or e == 0 or not folio_is_anon(&mm.m.map[pte_pfn(e)])
        start += size
    return missing

cdef void zap_hugetlb(mm_t *mm, vma_t *v, uint64_t start, uint64_t end) noexcept nogil:
    cdef zap_t z
    cdef uint64_t missing = hugetlb_missing(mm, v, start, end)
    cdef int64_t again
    zap_begin(&z, mm)
    zap_range(&z, v, start, end)
    zap_end(&z)
    if v.flags & VM_HUGE_RESV:
        again = <int64_t>(hugetlb_missing(mm, v, start, end) - missing)
        if again and reserve_hugetlb(mm.m, v.order, again) != 0:
            # Somebody was faster, or its pages are pinned.
            reserve_hugetlb(mm.m, v.order, again - <int64_t>hugetlb_missing(mm, v, v.start, v.end))
            v.flags &= ~VM_HUGE_RESV

# ---- splitting leaves -------------------------------------------------------------------------------------------------
cdef void drop_device_leaf(mm_t *mm, uint64_t table, uint64_t *entry, int level) noexcept nogil:
    cdef uint64_t e
    cdef zap_t z
    zap_begin(&z, mm)
    table_lock(z.m, table)
    if pte_leaf(a64_load_relaxed(entry), level):
        e = a64_exchange_acq_rel(entry, 0)
        table_used(z.m, table)[0] -= 1
        zap_one(&z, e, level)
    table_unlock(z.m, table)
    zap_end(&z)

cdef int split_leaf(mm_t *mm, vma_t *v, uint64_t addr) noexcept nogil:
    """Map the pages of a PMD leaf by PTEs instead. Every page keeps what it had: write, dirty, soft-dirty, exclusive.

    A PUD leaf, and a leaf over base pages, which nothing counts there and PTEs would, are a device's. They go, as the kernel
    lets leaves of files go, and the next access maps their pages again.
    The references for the 511 further mappings are taken before the entry changes, so that at no moment a mapping is
    without one. The leaf may be gone, or split by another, when the lock is had: then there is nothing to do.
    """
    cdef mem_t *m = mm.m
    cdef pgd_t *g = &mm.pgd
    cdef int level = 1
    cdef uint64_t table, e, new, pfn, bits, i, marked, nr = ONE << g.bits
    cdef uint64_t *entry = walk_find(g, addr, &level, &table)
    cdef uint64_t *pte
    cdef page_t *head
    cdef bint exclusive
    e = a64_load_acquire(entry)
    if not pte_leaf(e, level):
        return 0
    if level > 1 or (not e & PTE_SPECIAL and not counts_mappings(m, pte_pfn(e))):
        drop_device_leaf(mm, table, entry, level)
        return 0
    new = table_alloc(g)
    if new == 0:
        return -ENOMEM
    pte = table_at(m, new)
    table_lock(m, table)
    e = a64_load_relaxed(entry)
    if not pte_leaf(e, 1):
        table_unlock(m, table)
        table_discard(g, new)
        return 0
    pfn = pte_pfn(e)
    if e & PTE_SPECIAL and pfn == m.huge_zero_pfn:
        for i in range(nr):
            pte[i] = (m.zero_pfn << PTE_PFN_SHIFT) | (e & ~(PTE_PFN_MASK | PTE_PSE))
    else:
        head = &m.map[compound_head_pfn(m.map, pfn)]
        bits = e & ~(PTE_PFN_MASK | PTE_PSE)
        for i in range(nr):
            pte[i] = ((pfn + i) << PTE_PFN_SHIFT) | bits
        if page_is_head(head) and not e & PTE_SPECIAL:
            exclusive = folio_is_anon(head) and test_flag(head, PG_owner_2)
            a32_fetch_add_acq_rel(&head._refcount, <uint32_t>(nr - 1))
            mark_tails(head)
            for i in range(nr):
                if exclusive:
                    set_flag(&m.map[pfn + i], PG_owner_2)
                if a32_fetch_add_relaxed(&m.map[pfn + i]._mapcount, 1) == <uint32_t>-1:
                    a32_fetch_add_relaxed(&as_folio(head)._nr_pages_mapped, 1)
            a32_fetch_add_relaxed(&as_folio(head)._large_mapcount, <uint32_t>nr)
            leaf_unmap(head)
    table_used(m, new)[0] = nr
    # What the processor marked meanwhile, it marked for some page of the leaf: for all, as the leaf did.
    marked = a64_exchange_acq_rel(entry, (new << PTE_PFN_SHIFT) | PTE_PRESENT | PTE_RW | PTE_USER | PTE_ACCESSED) & ~e
    if mm_unlikely(marked):
        for i in range(nr):
            a64_fetch_or_relaxed(&pte[i], marked & (PTE_ACCESSED | PTE_DIRTY | PTE_SOFT_DIRTY))
    table_unlock(m, table)
    return 0

cdef int split_at(mm_t *mm, vma_t *v, uint64_t addr) noexcept nogil:
    cdef int level = 1
    cdef uint64_t table, e
    if v.flags & VM_HUGETLB:
        return 0
    e = a64_load_acquire(walk_find(&mm.pgd, addr, &level, &table))
    return split_leaf(mm, v, addr) if pte_leaf(e, level) and addr & (level_size(&mm.pgd, level) - 1) else 0
