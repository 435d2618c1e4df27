"""hugetlb mappings."""
from mmcore.core.buddy cimport alloc_hugetlb_reserved, reserve_hugetlb
from mmcore.core.fault cimport (EHWPOISON, FAULT_FLAG_UNSHARE, FAULT_FLAG_WRITE, copy_page_bytes, is_numa_hint, note_anon, vma_entry_bits,
                                written_bits)
from mmcore.core.filemap cimport cache_fill, cache_next, file_page
from mmcore.core.lock cimport mark_dirty
from mmcore.core.pgtable cimport *
from mmcore.core.rmap cimport *
from mmcore.core.zap cimport vma_level, zap_begin, zap_end, zap_one, zap_t

cdef uint64_t huge_new(mm_t *mm, unsigned order, bint reserved, uint64_t index, uint64_t mapping) noexcept nogil:
    """A folio of the pool as an exclusive anonymous one, mapped once; or 0."""
    cdef mem_t *m = mm.m
    cdef uint64_t pfn = alloc_hugetlb_reserved(m, order, reserved)
    cdef page_t *head
    if pfn == 0:
        return 0
    head = &m.map[pfn]
    a64_store_relaxed(&head.mapping, mapping)
    a64_store_relaxed(&head.index, index)
    a64_fetch_or_relaxed(&head.flags, (ONE << PG_owner_2) | (ONE << PG_uptodate))
    leaf_map(head, 0)
    return pfn

cdef int hugetlb_copy(mm_t *mm, uint64_t source, unsigned order, bint reserved, uint64_t index, uint64_t mapping,
                      uint64_t *new) noexcept nogil:
    cdef uint64_t i
    if (a64_load_relaxed(&as_folio(&mm.m.map[source])._flags_1) >> PG_has_hwpoisoned) & 1:
        return -EHWPOISON
    new[0] = huge_new(mm, order, reserved, index, mapping)
    if new[0] == 0:
        return FAULT_SIGBUS
    for i in range(ONE << order):
        copy_page_bytes(mm.m, new[0] + i, source + i)
    return 0

cdef int no_page(mm_t *mm, vma_t *v, uint64_t table, uint64_t *entry, uint64_t addr, bint write) noexcept nogil:
    """An entry that is none. A private mapping gets a page of its own also for reading: there is no huge zero page here."""
    cdef mem_t *m = mm.m
    cdef file_t *f = v.file
    cdef uint64_t pfn = 0, index = page_index(mm, v, addr), bits = vma_entry_bits(v) | PTE_PSE | PTE_ACCESSED
    cdef bint reserved = (v.flags & VM_HUGE_RESV) != 0, private = not v.flags & VM_SHARED
    cdef int error = 0
    if f == NULL:
        pfn = huge_new(mm, v.order, reserved, index, mm.anon_id)
        if pfn == 0:
            return FAULT_SIGBUS
        note_anon(v)
    else:
        error = file_page(f, index, False, &pfn)
        if error:
            return error
        if private and write:
            error = hugetlb_copy(mm, pfn, v.order, reserved, index, mm.anon_id, &pfn)
            if error:
                return error
            note_anon(v)
        else:
            leaf_map(&m.map[pfn], 1)
    if write:
        bits |= written_bits(v)
        if not private:
            mark_dirty(m, pfn)
    elif not private and v.flags & VM_WRITE:
        bits |= PTE_RW
    a64_store_release(entry, (pfn << PTE_PFN_SHIFT) | bits)
    table_used(m, table)[0] += 1
    return 0

cdef int huge_wp(mm_t *mm, vma_t *v, uint64_t *entry, uint64_t e, uint64_t addr, bint unshare) noexcept nogil:
    cdef mem_t *m = mm.m
    cdef uint64_t pfn = pte_pfn(e), new = 0
    cdef page_t *head = &m.map[pfn]
    cdef zap_t z
    cdef int error
    if v.flags & VM_SHARED:
        if not unshare:
            a64_store_release(entry, e | PTE_ACCESSED | written_bits(v))
            mark_dirty(m, pfn)
        return 0
    if folio_is_anon(head) and (test_flag(head, PG_owner_2) or (folio_mapcount_of(head) == 1
                                                               and a32_load_acquire(&head._refcount) == 1)):
        set_flag(head, PG_owner_2)
        if not unshare:
            a64_store_release(entry, e | PTE_ACCESSED | written_bits(v))
        return 0
    # The promise is for the first page of its own; what it had and shares since a fork was that already.
    error = hugetlb_copy(mm, pfn, v.order, (v.flags & VM_HUGE_RESV) != 0 and not folio_is_anon(head), page_index(mm, v, addr),
                         mm.anon_id, &new)
    if error:
        return error
    note_anon(v)
    a64_store_release(entry, (new << PTE_PFN_SHIFT) | vma_entry_bits(v) | PTE_PSE | PTE_ACCESSED
                      | (e & PTE_SOFT_DIRTY if unshare else written_bits(v)))
    zap_begin(&z, mm)
    zap_one(&z, e, vma_level(mm, v))
    zap_end(&z)
    return 0

cdef int hugetlb_fault(mm_t *mm, vma_t *v, uint64_t addr, unsigned flags) noexcept nogil:
    cdef mem_t *m = mm.m
    cdef pgd_t *g = &mm.pgd
    cdef int level = vma_level(mm, v), error = 0
    cdef uint64_t table, e
    cdef uint64_t *entry
    cdef bint write = (flags & FAULT_FLAG_WRITE) != 0
    addr &= ~(level_size(g, level) - 1)
    table = table_make(g, addr, level, &error)
    if table == 0:
        return error
    entry = table_at(m, table) + table_index(g, addr, level)
    # One at a time: two faults on one page of a file must not both fill it (the kernel's fault mutex).
    if v.file != NULL:
        pthread_mutex_lock(&v.file.lock)
    table_lock(m, table)
    e = a64_load_relaxed(entry)
    if e == 0:
        error = no_page(mm, v, table, entry, addr, write)
    elif is_numa_hint(e, v):
        a64_store_release(entry, (e & ~PTE_PROTNONE) | vma_entry_bits(v) | PTE_ACCESSED)
    elif flags & FAULT_FLAG_UNSHARE or (write and not e & PTE_RW):
        error = huge_wp(mm, v, entry, e, addr, (flags & FAULT_FLAG_UNSHARE) != 0)
    else:
        a64_store_release(entry, e | PTE_ACCESSED | (PTE_DIRTY | PTE_SOFT_DIRTY if write else 0))
    table_unlock(m, table)
    if v.file != NULL:
        pthread_mutex_unlock(&v.file.lock)
    return error

cdef int hugetlb_reserve_file(file_t *f, uint64_t index, uint64_t nr) noexcept nogil:
    """Promise pages for the holes of a range of a file; beyond its end there is nothing to promise."""
    cdef uint64_t i, wanted, end = min(index + nr, f.size >> f.m.page_shift >> f.order)
    cdef int error = 0
    pthread_mutex_lock(&f.lock)
    wanted = end - index if end > index else 0
    i = cache_next(f, index, end)
    while i < end:
        wanted -= f.cache[i] != CACHE_NONE
        i = cache_next(f, i + 1, end)
    if wanted:
        error = reserve_hugetlb(f.m, f.order, <int64_t>wanted)
    if error == 0 and wanted:
        cache_fill(f, index, end - index)
        for i in range(index, end):
            if f.cache[i] == CACHE_NONE:
                f.cache[i] = CACHE_RESERVED
                f.nr_reserved += 1
    pthread_mutex_unlock(&f.lock)
    return error
