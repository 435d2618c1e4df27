"""Unmapping folios, splitting mapped ones, and reclaim.

Units: a Folio in, a bool out.
Raises: TypeError, InvalidArgument, BadPage.
Threads: any number at once; it tries locks, and gives up where one is taken.
Kernel: shrink_folio_list(), try_to_unmap().
"""
from libc.errno cimport EAGAIN, EBUSY, ENOMEM
from mmcore.core.buddy cimport free_folio
from mmcore.core.fault cimport vma_entry_bits
from mmcore.core.filemap cimport file_write_page
from mmcore.core.folio cimport expected_refs, folio_arg, ref_add_unless_zero, refs_load, split
from mmcore.core.lock cimport clear_dirty, mark_dirty, trylock, unlock
from mmcore.core.pgtable cimport *
from mmcore.core.rmap cimport *
from mmcore.core.swap cimport swap_dup, swap_free, swap_store
from mmcore.core.zap cimport put_mapping, rss_add, split_leaf

__all__ = ["reclaim"]

# ---- anonymous -----------------------------------------------------------------------------------------------------------
cdef int take_entry(remap_t *r, mm_t *mm, uint64_t table, uint64_t *entry, uint64_t e) noexcept nogil:
    """Under the table's lock: one mapping becomes a migration entry."""
    cdef mem_t *m = r.m
    cdef uint64_t pfn = pte_pfn(e), head = compound_head_pfn(m.map, pfn)
    cdef page_t *page = &m.map[pfn]
    cdef uint64_t mig = swp_entry(SWP_TYPE_MIGRATION, pfn)
    if e & PTE_SOFT_DIRTY:
        mig |= SWP_SOFT_DIRTY
    if e & PTE_RW:
        mig |= MIG_WRITE
    if e & PTE_DIRTY:
        mig |= MIG_DIRTY
    if e & PTE_ACCESSED:
        mig |= MIG_YOUNG
    a64_store_release(entry, mig)
    if e & PTE_DIRTY and not test_flag(&m.map[head], PG_swapbacked):
        # Given up by MADV_FREE, and written since: it counts again.
        set_flag(&m.map[head], PG_swapbacked)
    if test_flag(page, PG_owner_2):
        # gup-fast reads the entry, pins, reads it again, and looks at the mark; we clear the entry, then look for pins,
        # then clear the mark. One of the two sees the other and backs off.
        mm_full_barrier()
        if maybe_dma_pinned(&m.map[head]):
            a64_store_release(entry, e)
            return -EBUSY
        clear_flag(page, PG_owner_2)
        a64_store_release(entry, mig | SWP_EXCLUSIVE)
    rss_add(mm, head, -1)
    if page_is_head(&m.map[head]):
        large_page_unmap(&m.map[head], page)
    else:
        a32_fetch_add_relaxed(&page._mapcount, <uint32_t>-1)
    put_mapping(m, head, 1)
    return 0

cdef int unmap_stretch(mm_t *mm, vma_t *v, uint64_t addr, uint64_t first, uint64_t nr, void *arg) noexcept nogil:
    cdef remap_t *r = <remap_t *>arg
    cdef uint64_t i, table, e
    cdef uint64_t *entry
    cdef int level
    for i in range(nr):
        level = 0
        entry = walk_find(&mm.pgd, addr, &level, &table)
        e = a64_load_acquire(entry)
        if level == 1 and pte_leaf(e, 1) and not e & PTE_SPECIAL and pte_pfn(e) - r.old < r.nr:
            r.error = split_leaf(mm, v, addr)
            if r.error:
                return 1
            level = 0
            entry = walk_find(&mm.pgd, addr, &level, &table)
        if level == 0:
            table_lock(r.m, table)
            e = a64_load_relaxed(entry)
            if pte_present(e) and not e & PTE_SPECIAL and pte_pfn(e) == r.old + first + i:
                r.error = take_entry(r, mm, table, entry, e)
            table_unlock(r.m, table)
            if r.error:
                return 1
        addr += ONE << r.m.page_shift
    return 0

cdef int remap_stretch(mm_t *mm, vma_t *v, uint64_t addr, uint64_t first, uint64_t nr, void *arg) noexcept nogil:
    """A migration entry becomes a mapping again, or a swap entry."""
    cdef remap_t *r = <remap_t *>arg
    cdef mem_t *m = r.m
    cdef uint64_t i, table, e, pfn, bits
    cdef uint64_t *entry
    cdef int level
    for i in range(nr):
        level = 0
        entry = walk_find(&mm.pgd, addr, &level, &table)
        addr += ONE << m.page_shift
        if level != 0:
            continue
        table_lock(m, table)
        e = a64_load_relaxed(entry)
        if pte_swap(e) and swp_type(e) == SWP_TYPE_MIGRATION and swp_offset(e) == r.old + first + i:
            r.done += 1
            if r.new == 0 and r.slot == 0:
                a64_store_release(entry, 0)
                table_used(m, table)[0] -= 1
            elif r.new == 0:
                swap_dup(m, r.slot)
                a64_store_release(entry, swp_entry(SWP_TYPE_SWAP, r.slot) | (e & (SWP_SOFT_DIRTY | SWP_EXCLUSIVE)))
                a64_fetch_add_relaxed(&mm.swapped, 1)
            else:
                pfn = r.new + first + i
                bits = vma_entry_bits(v) | (PTE_SOFT_DIRTY if e & SWP_SOFT_DIRTY else 0) \
                    | (PTE_DIRTY if e & MIG_DIRTY else 0) | (PTE_ACCESSED if e & MIG_YOUNG else 0)
                if e & MIG_WRITE and v.flags & VM_WRITE:
                    bits |= PTE_RW
                page_map(m, pfn)
                if e & SWP_EXCLUSIVE:
                    set_flag(&m.map[pfn], PG_owner_2)
                rss_add(mm, compound_head_pfn(m.map, pfn), 1)
                a64_store_release(entry, (pfn << PTE_PFN_SHIFT) | bits)
        table_unlock(m, table)
    return 0

cdef int unmap_folio(mem_t *m, uint64_t head) noexcept nogil:
    """On failure everything is mapped again as it was, leaves that were split aside."""
    cdef remap_t r
    cdef uint64_t mapping = a64_load_relaxed(&m.map[head].mapping), index = a64_load_relaxed(&m.map[head].index)
    r.m, r.old, r.new, r.nr, r.error = m, head, head, ONE << folio_order_of(&m.map[head]), 0
    rmap_walk_anon(m, mapping, index, r.nr, unmap_stretch, &r)
    if r.error == 0 and folio_mapcount_of(&m.map[head]) > 0:
        r.error = -EAGAIN
    if r.error:
        remap_folio(m, head, head, mapping, index, r.nr)
    return r.error

cdef void remap_folio(mem_t *m, uint64_t old, uint64_t new, uint64_t mapping, uint64_t index, uint64_t nr) noexcept nogil:
    cdef remap_t r
    r.m, r.old, r.new, r.nr, r.error, r.done = m, old, new, nr, 0, 0
    rmap_walk_anon(m, mapping, index, nr, remap_stretch, &r)

# ---- files -----------------------------------------------------------------------------------------------------------------
cdef int clear_stretch(mm_t *mm, vma_t *v, uint64_t addr, uint64_t first, uint64_t nr, void *arg) noexcept nogil:
    """Entries of a file's folio become none; their dirt goes to the folio. Private copies stay."""
    cdef remap_t *r = <remap_t *>arg
    cdef mem_t *m = r.m
    cdef page_t *head = &m.map[r.old]
    cdef uint64_t i = 0, table, e, step
    cdef uint64_t *entry
    cdef int level
    while i < nr:
        level = 0
        entry = walk_find(&mm.pgd, addr + (i << m.page_shift), &level, &table)
        step = 1
        table_lock(m, table)
        e = a64_load_relaxed(entry)
        if pte_leaf(e, level) and not e & PTE_SPECIAL and pte_pfn(e) < m.nr_pages \
                and compound_head_pfn(m.map, pte_pfn(e)) == r.old:
            step = ONE << level_order(&mm.pgd, level)
            a64_store_release(entry, 0)
            table_used(m, table)[0] -= 1
            if e & PTE_DIRTY:
                mark_dirty(m, r.old)
            rss_add(mm, r.old, -<int64_t>step)
            if level:
                leaf_unmap(head)
            elif page_is_head(head):
                large_page_unmap(head, &m.map[pte_pfn(e)])
            else:
                a32_fetch_add_relaxed(&head._mapcount, <uint32_t>-1)
            put_mapping(m, r.old, 1)
        table_unlock(m, table)
        i += step
    return 0

cdef void unmap_file_folio(file_t *f, uint64_t head) noexcept nogil:
    cdef remap_t r
    r.m, r.old, r.nr = f.m, head, ONE << folio_order_of(&f.m.map[head])
    rmap_walk_file(f, a64_load_relaxed(&f.m.map[head].index), r.nr, clear_stretch, &r)

# ---- split -------------------------------------------------------------------------------------------------------------------
cdef bint callers_alone(mem_t *m, uint64_t head) noexcept nogil:
    """One reference beside those of mappings and the cache: the caller's. Looked at before anything is unmapped, since
    without it the last mapping that goes takes the folio along."""
    return <int32_t>refs_load(&m.map[head]) == <int32_t>expected_refs(m, head) + 1

cdef int split_mapped(mem_t *m, uint64_t head, unsigned new_order) noexcept nogil:
    """split() of a folio that page tables map: unmap, split, map the pieces."""
    cdef page_t *page = &m.map[head]
    cdef uint64_t nr = ONE << folio_order_of(page), mapping = a64_load_relaxed(&page.mapping), index = a64_load_relaxed(&page.index)
    cdef file_t *f
    cdef int error
    if folio_is_hugetlb(page) or page_zone(page) == ZONE_DEVICE or test_flag(page, PG_writeback):
        return -EBUSY
    if maybe_dma_pinned(page):
        return -EAGAIN
    if mapping & FOLIO_MAPPING_ANON:
        if not callers_alone(m, head):
            return -EAGAIN
        error = unmap_folio(m, head)
        if error:
            return -EAGAIN if error == -EBUSY else error
        error = split(m, head, new_order)
        remap_folio(m, head, head, mapping, index, nr)
        return error
    f = file_get(m, mapping)
    if f == NULL:
        return -EBUSY
    pthread_mutex_lock(&f.lock)
    if a64_load_relaxed(&page.mapping) != mapping:
        error = -EBUSY
    elif not callers_alone(m, head):
        error = -EAGAIN
    else:
        unmap_file_folio(f, head)
        error = split(m, head, new_order)
    pthread_mutex_unlock(&f.lock)
    return error

# ---- reclaim -------------------------------------------------------------------------------------------------------------------
cdef int reclaim_anon(mem_t *m, uint64_t pfn) noexcept nogil:
    """A small anonymous page, locked, with one reference of ours: to swap, or away when MADV_FREE gave it up and nobody
    wrote since."""
    cdef page_t *page = &m.map[pfn]
    cdef uint64_t mapping = a64_load_relaxed(&page.mapping), index = a64_load_relaxed(&page.index)
    cdef uint32_t ours = 1
    cdef remap_t r
    cdef int error = unmap_folio(m, pfn)
    if error:
        return error
    # Frozen: from here on nobody can take a reference.
    if not a32_cas_acq_rel(&page._refcount, &ours, 0):
        remap_folio(m, pfn, pfn, mapping, index, 1)
        return -EAGAIN
    r.m, r.old, r.new, r.nr, r.error, r.done = m, pfn, 0, 1, 0, 0
    r.slot = 0
    if test_flag(page, PG_swapbacked):
        r.slot = swap_store(m, pfn, 1)
        if r.slot == 0:
            a32_store_release(&page._refcount, 1)
            remap_folio(m, pfn, pfn, mapping, index, 1)
            return -ENOMEM
    rmap_walk_anon(m, mapping, index, 1, remap_stretch, &r)
    if r.slot:
        swap_free(m, r.slot, 1)
    # The lock bit goes with the flags; whoever sleeps for it looks again by himself.
    free_folio(m, pfn, 0)
    return 0

cdef int reclaim_file(mem_t *m, uint64_t pfn) noexcept nogil:
    """A small page of a file, locked, with one reference of ours: tmpfs to swap, ext4 to its disk."""
    cdef page_t *page = &m.map[pfn]
    cdef file_t *f = file_get(m, a64_load_relaxed(&page.mapping))
    cdef uint64_t slot, index
    cdef uint32_t both = 2
    cdef int error = 0
    if f == NULL:
        return -EBUSY
    pthread_mutex_lock(&f.lock)
    if a64_load_relaxed(&page.mapping) != f.id << 2 or (f.kind != FILE_TMPFS and f.kind != FILE_EXT4):
        error = -EBUSY
    else:
        unmap_file_folio(f, pfn)
        index = a64_load_relaxed(&page.index)
        if not a32_cas_acq_rel(&page._refcount, &both, 0):
            error = -EAGAIN
        elif f.kind == FILE_TMPFS:
            slot = swap_store(m, pfn, 1)
            if slot == 0:
                a32_store_release(&page._refcount, 2)
                error = -ENOMEM
            else:
                f.cache[index] = CACHE_SWAP | slot
        else:
            if test_flag(page, PG_dirty):
                file_write_page(f, pfn)
            f.cache[index] = CACHE_NONE
        if error == 0:
            f.nr_cached -= 1
            clear_dirty(m, pfn)
            a64_store_relaxed(&page.mapping, 0)
            free_folio(m, pfn, 0)
    pthread_mutex_unlock(&f.lock)
    return error

cdef int reclaim_folio(mem_t *m, uint64_t head) noexcept nogil:
    cdef page_t *page = &m.map[head]
    cdef uint64_t i, nr = ONE << folio_order_of(page)
    cdef int error = 0, one
    cdef bint anon = folio_is_anon(page)
    if not trylock(page):
        put_mapping(m, head, 1)
        return -EBUSY
    if maybe_dma_pinned(page) or folio_is_hugetlb(page) or page_zone(page) == ZONE_DEVICE or a64_load_relaxed(&page.mapping) == 0 \
            or test_flag(page, PG_unevictable) or test_flag(page, PG_writeback):
        error = -EBUSY
    elif nr > 1:
        error = split_mapped(m, head, 0) if folio_mapcount_of(page) > 0 else split(m, head, 0)
    if error:
        unlock(m, head)
        put_mapping(m, head, 1)
        return error
    for i in range(nr):
        page = &m.map[head + i]
        one = -EBUSY
        if i == 0 or trylock(page):
            # A broken page has nothing that could be written to swap or to a disk.
            if not test_flag(page, PG_hwpoison):
                one = reclaim_anon(m, head + i) if anon else reclaim_file(m, head + i)
            if one:
                unlock(m, head + i)
        if one:
            put_mapping(m, head + i, 1)
            error = one
    return error


def reclaim(folio):
    """Try to take a folio's frames away, from everyone who maps it: to swap, or to its file's disk. Tells whether it went.

    What is pinned, held by somebody else, locked, broken, hugetlb, secretmem or a device's stays. A large folio is split first, and
    goes page by page. Kernel: shrink_folio_list() of one folio; MADV_PAGEOUT passes over what others map, this does not.
    """
    cdef uint64_t pfn
    cdef Memory mem = folio_arg(folio, &pfn, True)
    cdef mem_t *m = mem.enter()
    cdef int error = -EBUSY
    with nogil:
        if m.spaces != NULL and ref_add_unless_zero(&m.map[pfn], 1):
            error = reclaim_folio(m, pfn)
    mem.leave()
    return error == 0
