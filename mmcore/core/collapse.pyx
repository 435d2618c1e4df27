"""Collapsing base pages into a THP."""
from libc.errno cimport EAGAIN, EINVAL, ENOMEM
from mmcore.core.fault cimport anon_flags, copy_page_bytes, handle_mm_fault, note_anon, vma_entry_bits, written_bits
from mmcore.core.frames cimport give_huge, take_huge
from mmcore.core.pgtable cimport *
from mmcore.core.rmap cimport *
from mmcore.core.vma cimport vma_find
from mmcore.core.zap cimport zap_begin, zap_end, zap_one, zap_t

cdef int page_refuses(mm_t *mm, uint64_t e) noexcept nogil:
    """Why a page cannot be collapsed: 0, -EINVAL, -EAGAIN."""
    cdef mem_t *m = mm.m
    cdef uint64_t head
    if e == 0 or e & PTE_SPECIAL:
        return 0 if e == 0 or pte_pfn(e) == m.zero_pfn else -EINVAL
    if not pte_present(e):
        return -EAGAIN
    head = compound_head_pfn(m.map, pte_pfn(e))
    if not folio_is_anon(&m.map[head]) or test_flag(&m.map[pte_pfn(e)], PG_hwpoison):
        return -EINVAL
    # A reference that no mapping explains: a pin, or somebody who looks at it.
    if <int64_t><int32_t>a32_load_acquire(&m.map[head]._refcount) != folio_mapcount_of(&m.map[head]) \
            or test_flag(&m.map[head], PG_locked):
        return -EAGAIN
    return 0

cdef int swap_in_all(mm_t *mm, vma_t *v, uint64_t addr, uint64_t end) noexcept nogil:
    cdef uint64_t table, e
    cdef int level, error
    while addr < end:
        level = 0
        e = a64_load_acquire(walk_find(&mm.pgd, addr, &level, &table))
        if level == 0 and pte_swap(e):
            error = handle_mm_fault(mm, v, addr, 0)
            if error:
                return error
            continue
        addr += ONE << mm.m.page_shift
    return 0

cdef int collapse_one(mm_t *mm, vma_t *v, uint64_t addr) noexcept nogil:
    cdef mem_t *m = mm.m
    cdef pgd_t *g = &mm.pgd
    cdef uint64_t table, e, new = 0, i, nr = ONE << g.bits, old, word
    cdef uint64_t *entry
    cdef uint64_t *pte
    cdef page_t *head
    cdef zap_t z
    cdef dead_t dead
    cdef int level = 1, error
    entry = walk_find(g, addr, &level, &table)
    e = a64_load_acquire(entry)
    if level != 1 or e == 0:
        return -EINVAL
    if pte_leaf(e, 1):
        return 0
    error = swap_in_all(mm, v, addr, addr + level_size(g, 1))
    if error:
        return -EINVAL if error < -4095 else error
    old = pte_pfn(e)
    pte = table_at(m, old)
    for i in range(nr):
        error = page_refuses(mm, a64_load_relaxed(&pte[i]))
        if error:
            return error
    if take_huge(m, &new, 1) == 0:
        return -ENOMEM
    # Those who come from a page keep out; gup-fast and other walkers without locks are waited for.
    pthread_mutex_lock(&mm.rmap_lock)
    table_lock(m, table)
    a64_store_release(entry, 0)
    table_unlock(m, table)
    pgd_synchronize(g)
    for i in range(nr):
        error = page_refuses(mm, a64_load_relaxed(&pte[i]))
        if error:
            break
    if error:
        table_lock(m, table)
        a64_store_release(entry, e)
        table_unlock(m, table)
        pthread_mutex_unlock(&mm.rmap_lock)
        give_huge(m, &new, 1)
        return error
    head = &m.map[new]
    a64_store_relaxed(&head.mapping, mm.anon_id)
    a64_store_relaxed(&head.index, page_index(mm, v, addr))
    a64_store_relaxed(&head.flags, anon_flags(m, new) | (ONE << PG_head))
    zap_begin(&z, mm)
    for i in range(nr):
        word = a64_load_relaxed(&pte[i])
        if word and not word & PTE_SPECIAL:
            copy_page_bytes(m, new + i, pte_pfn(word))
        if word:
            a64_store_relaxed(&pte[i], 0)
            zap_one(&z, word, 0)
    a32_store_release(&head._refcount, 1)
    a64_fetch_add_relaxed(&mm.rss_anon, nr)
    note_anon(v)
    table_lock(m, table)
    a64_store_release(entry, (new << PTE_PFN_SHIFT) | vma_entry_bits(v) | PTE_PSE | PTE_ACCESSED | written_bits(v))
    table_unlock(m, table)
    pthread_mutex_unlock(&mm.rmap_lock)
    zap_end(&z)
    table_used(m, old)[0] = 0
    dead.first = dead.nr = 0
    table_unlinked(g, &dead, old)
    tables_free(g, &dead)
    return 0

cdef int collapse_range(mm_t *mm, uint64_t start, uint64_t end, uint64_t *at) noexcept nogil:
    cdef uint64_t size = level_size(&mm.pgd, 1), addr, i, stop
    cdef int error, last = 0
    cdef vma_t *v
    cdef bint any = False
    i = vma_find(mm, start)
    while start < end:
        if i == mm.nr_vmas or mm.vma[i].start > start:
            at[0] = start
            return -ENOMEM
        v = &mm.vma[i]
        stop = min(end, v.end)
        if v.file != NULL or v.flags & (VM_HUGETLB | VM_PFNMAP | VM_IO | VM_NOHUGEPAGE):
            at[0] = start
            return -EINVAL
        addr = (start + size - 1) & ~(size - 1)
        while addr + size <= stop:
            any = True
            error = collapse_one(mm, v, addr)
            if error:
                at[0] = addr
                last = error
                if error == -ENOMEM:
                    return error
            addr += size
        start = stop
        i += 1
    return last if any else -EINVAL
