"""madvise and clear_refs."""
from libc.errno cimport EFAULT, EINVAL, ENOMEM
from mmcore.core.access cimport page_at_addr, touch_pages
from mmcore.core.collapse cimport collapse_range
from mmcore.core.folio cimport ref_add_positive
from mmcore.core.pgtable cimport *
from mmcore.core.remap cimport reclaim_folio
from mmcore.core.rmap cimport *
from mmcore.core.vma cimport range_hole, vma_find, vma_granule, vma_isolate, vma_merge
from mmcore.core.zap cimport put_mapping, split_at, zap_begin, zap_end, zap_hugetlb, zap_range, zap_t

# ---- flags of VMAs: under mmap_lock for writing -------------------------------------------------------------------------
cdef int advise_flags(mm_t *mm, uint64_t start, uint64_t end, int advice) noexcept nogil:
    cdef uint64_t first = 0, last = 0, i, on = 0, off = 0, refuse = 0
    cdef vma_t *v
    cdef int error
    if advice == MADV_DONTFORK:
        on = VM_DONTCOPY
    elif advice == MADV_DOFORK:
        off = VM_DONTCOPY
        refuse = VM_IO
    elif advice == MADV_HUGEPAGE:
        on = VM_HUGEPAGE
        off = VM_NOHUGEPAGE
        refuse = VM_PFNMAP | VM_IO | VM_HUGETLB
    else:
        on = VM_NOHUGEPAGE
        off = VM_HUGEPAGE
        refuse = VM_PFNMAP | VM_IO | VM_HUGETLB
    i = vma_find(mm, start)
    while i < mm.nr_vmas and mm.vma[i].start < end:
        if mm.vma[i].flags & refuse:
            return -EINVAL
        i += 1
    error = vma_isolate(mm, start, end, &first, &last)
    if error:
        return error
    pthread_mutex_lock(&mm.rmap_lock)
    for i in range(first, last):
        v = &mm.vma[i]
        v.flags = (v.flags & ~off) | on
    pthread_mutex_unlock(&mm.rmap_lock)
    vma_merge(mm, start, end)
    return 0

# ---- DONTNEED, FREE --------------------------------------------------------------------------------------------------------
cdef int advise_dontneed(mm_t *mm, vma_t *v, uint64_t start, uint64_t end) noexcept nogil:
    cdef zap_t z
    cdef int error
    if v.flags & (VM_LOCKED | VM_PFNMAP):
        return -EINVAL
    if v.flags & VM_HUGETLB:
        if start & (vma_granule(mm, v) - 1):
            return -EINVAL
        end &= ~(vma_granule(mm, v) - 1)
        if start < end:
            pthread_mutex_lock(&mm.rmap_lock)
            zap_hugetlb(mm, v, start, end)
            pthread_mutex_unlock(&mm.rmap_lock)
        return 0
    error = split_at(mm, v, start)
    if error == 0:
        error = split_at(mm, v, end) if end < v.end else 0
    if error:
        return error
    zap_begin(&z, mm)
    zap_range(&z, v, start, end)
    zap_end(&z)
    return 0

cdef void free_entry(mm_t *mm, uint64_t *entry, int level) noexcept nogil:
    """Under the table's lock: the page may be dropped instead of swapped out, unless it is written again."""
    cdef mem_t *m = mm.m
    cdef uint64_t e = a64_load_relaxed(entry), pfn = pte_pfn(e), head
    if pte_swap(e) and swp_type(e) == SWP_TYPE_SWAP:
        return
    if not pte_leaf(e, level) or e & PTE_SPECIAL or pfn >= m.nr_pages:
        return
    head = compound_head_pfn(m.map, pfn)
    # Only what nobody else maps; a part of a large folio is left alone, where the kernel splits it.
    if not folio_is_anon(&m.map[head]) or maybe_dma_pinned(&m.map[head]) or folio_mapcount_of(&m.map[head]) != 1:
        return
    clear_flag(&m.map[head], PG_swapbacked)
    clear_flag(&m.map[head], PG_dirty)
    a64_store_release(entry, e & ~(PTE_DIRTY | PTE_ACCESSED))

cdef int advise_free(mm_t *mm, vma_t *v, uint64_t start, uint64_t end) noexcept nogil:
    cdef uint64_t table, next
    cdef uint64_t *entry
    cdef uint64_t e
    cdef int level, error
    if v.file != NULL or v.flags & (VM_HUGETLB | VM_PFNMAP | VM_LOCKED):
        return -EINVAL
    error = split_at(mm, v, start)
    if error == 0:
        error = split_at(mm, v, end) if end < v.end else 0
    while start < end and error == 0:
        level = 0
        entry = walk_find(&mm.pgd, start, &level, &table)
        next = level_end(&mm.pgd, start, end, level)
        table_lock(mm.m, table)
        e = a64_load_relaxed(entry)
        free_entry(mm, entry, level)
        if level == 0 and pte_swap(e) and swp_type(e) == SWP_TYPE_SWAP:
            table_unlock(mm.m, table)
            advise_dontneed(mm, v, start, next)
        else:
            table_unlock(mm.m, table)
        start = next
    return error

# ---- PAGEOUT ---------------------------------------------------------------------------------------------------------------
cdef int advise_pageout(mm_t *mm, vma_t *v, uint64_t start, uint64_t end) noexcept nogil:
    """Each page that only this process maps, one after the other; what does not go stays, and that is no error."""
    cdef mem_t *m = mm.m
    cdef uint64_t table, e, pfn, head, next
    cdef int level, error
    if v.flags & (VM_LOCKED | VM_PFNMAP | VM_HUGETLB):
        return -EINVAL
    error = split_at(mm, v, start)
    if error == 0:
        error = split_at(mm, v, end) if end < v.end else 0
    if error:
        return error
    while start < end:
        level = 0
        e = a64_load_acquire(walk_find(&mm.pgd, start, &level, &table))
        next = level_end(&mm.pgd, start, end, level)
        if pte_leaf(e, level) and not e & PTE_SPECIAL and pte_pfn(e) < m.nr_pages:
            pfn = pte_pfn(e)
            head = compound_head_pfn(m.map, pfn)
            if ref_add_positive(&m.map[head], 1):
                # Split, or freed and used again since: the reference may hold another page than the one that is mapped.
                if compound_head_pfn(m.map, pfn) == head and page_at_addr(mm, start) == pfn and page_mapcount(m, pfn) == 1:
                    reclaim_folio(m, head)
                else:
                    put_mapping(m, head, 1)
        start = next
    return 0

# ---- POPULATE --------------------------------------------------------------------------------------------------------------
cdef int advise_populate(mm_t *mm, uint64_t start, uint64_t end, bint write, uint64_t *at) noexcept nogil:
    cdef uint64_t i, faults = 0
    cdef int error = 0
    at[0] = start
    while at[0] < end:
        i = vma_find(mm, at[0])
        if i == mm.nr_vmas or mm.vma[i].start > at[0]:
            return -ENOMEM
        if mm.vma[i].flags & (VM_PFNMAP | VM_IO) or not mm.vma[i].flags & (VM_WRITE if write else VM_READ):
            return -EINVAL
        error = touch_pages(mm, at, min(end, mm.vma[i].end), write, &faults)
        if error == FAULT_SIGBUS or error == FAULT_SIGSEGV:
            return -EFAULT
        if error:
            return error
    return 0

# ---- madvise ---------------------------------------------------------------------------------------------------------------
cdef int advise_vmas(mm_t *mm, uint64_t start, uint64_t end, int advice, uint64_t *at) noexcept nogil:
    """VMA by VMA; holes are stepped over, and end the call with ENOMEM after everything else was done."""
    cdef uint64_t i = vma_find(mm, start), stop
    cdef int error = 0
    cdef bint hole = False
    cdef vma_t *v
    while start < end:
        if i == mm.nr_vmas or mm.vma[i].start >= end:
            at[0] = start if not hole else at[0]
            return -ENOMEM
        v = &mm.vma[i]
        if v.start > start:
            if not hole:
                at[0] = start
            hole = True
            start = v.start
        stop = min(end, v.end)
        if advice == MADV_DONTNEED:
            error = advise_dontneed(mm, v, start, stop)
        elif advice == MADV_FREE:
            error = advise_free(mm, v, start, stop)
        elif advice == MADV_PAGEOUT:
            error = advise_pageout(mm, v, start, stop)
        elif advice == MADV_COLD and v.flags & (VM_LOCKED | VM_PFNMAP | VM_HUGETLB):
            error = -EINVAL
        if error:
            at[0] = start
            return error
        start = stop
        i += 1
    return -ENOMEM if hole else 0

cdef int do_madvise(mm_t *mm, uint64_t start, uint64_t end, int advice, uint64_t *at) noexcept nogil:
    cdef int error
    cdef uint64_t hole, i
    cdef bint write = advice in (MADV_DONTFORK, MADV_DOFORK, MADV_HUGEPAGE, MADV_NOHUGEPAGE, MADV_COLLAPSE)
    at[0] = start
    if advice == MADV_DONTNEED:
        # Promises of hugetlb VMAs change with their pages: not beside other faults.
        error = mmap_read_lock(mm)
        if error:
            return error
        i = vma_find(mm, start)
        while i < mm.nr_vmas and mm.vma[i].start < end:
            write = write or mm.vma[i].flags & VM_HUGETLB
            i += 1
        mmap_unlock(mm)
    error = mmap_write_lock(mm) if write else mmap_read_lock(mm)
    if error:
        return error
    if advice == MADV_COLLAPSE:
        error = collapse_range(mm, start, end, at)
    elif advice == MADV_POPULATE_READ or advice == MADV_POPULATE_WRITE:
        error = advise_populate(mm, start, end, advice == MADV_POPULATE_WRITE, at)
    elif write and advice != MADV_DONTNEED:
        error = advise_flags(mm, start, end, advice)
        hole = range_hole(mm, start, end)
        if error == 0 and hole < end:
            at[0] = hole
            error = -ENOMEM
    else:
        error = advise_vmas(mm, start, end, advice, at)
    mmap_unlock(mm)
    return error

# ---- clear_refs ------------------------------------------------------------------------------------------------------------
cdef void clear_entry(mm_t *mm, const vma_t *v, uint64_t *entry, int level, int what) noexcept nogil:
    """Under the table's lock. Soft-dirty: read-only and clean, so that the next write is seen; never a page that may be
    pinned, whose writes nobody would see."""
    cdef mem_t *m = mm.m
    cdef uint64_t e = a64_load_relaxed(entry)
    if what != 4:
        if pte_leaf(e, level):
            a64_store_release(entry, e & ~PTE_ACCESSED)
        return
    if pte_leaf(e, level):
        if e & PTE_RW and is_cow_mapping(v.flags) and a64_load_acquire(&mm.flags) & MMF_HAS_PINNED \
                and not e & PTE_SPECIAL and maybe_dma_pinned(&m.map[compound_head_pfn(m.map, pte_pfn(e))]):
            return
        a64_store_release(entry, e & ~(PTE_RW | PTE_SOFT_DIRTY) if not e & PTE_SPECIAL else e & ~PTE_SOFT_DIRTY)
    elif pte_swap(e):
        a64_store_release(entry, e & ~SWP_SOFT_DIRTY)

cdef void clear_table(mm_t *mm, const vma_t *v, uint64_t table, int level, uint64_t start, uint64_t end, int what) noexcept nogil:
    cdef mem_t *m = mm.m
    cdef pgd_t *g = &mm.pgd
    cdef uint64_t at = start, next, e
    cdef uint64_t *entry
    while at < end:
        next = level_end(g, at, end, level)
        entry = table_at(m, table) + table_index(g, at, level)
        e = a64_load_acquire(entry)
        if pte_table(e, level):
            clear_table(mm, v, pte_pfn(e), level - 1, at, next, what)
        elif e:
            table_lock(m, table)
            clear_entry(mm, v, entry, level, what)
            table_unlock(m, table)
        at = next

cdef void do_clear_refs(mm_t *mm, int what) noexcept nogil:
    cdef uint64_t i
    cdef vma_t *v
    for i in range(mm.nr_vmas):
        v = &mm.vma[i]
        if what == 2 and v.file != NULL or what == 3 and v.file == NULL:
            continue
        if v.flags & VM_HUGETLB:
            continue
        clear_table(mm, v, mm.pgd.top, mm.pgd.levels - 1, v.start, v.end, what)
        if what == 4:
            pthread_mutex_lock(&mm.rmap_lock)
            v.flags &= ~VM_SOFTDIRTY
            pthread_mutex_unlock(&mm.rmap_lock)
