"""Bytes through the tables, and pagemap."""
from libc.string cimport memcpy, memset
from mmcore.core.fault cimport EHWPOISON, FAULT_FLAG_WRITE, entry_allows, handle_mm_fault
from mmcore.core.pgtable cimport *
from mmcore.core.rmap cimport page_mapcount
from mmcore.core.touch cimport touch_range
from mmcore.core.vma cimport vma_find, vma_lookup

cdef extern from *:
    """
    #define MM_PM_SOFT_DIRTY (1ULL << 55)
    #define MM_PM_EXCLUSIVE (1ULL << 56)
    #define MM_PM_FILE (1ULL << 61)
    #define MM_PM_SWAP (1ULL << 62)
    #define MM_PM_PRESENT (1ULL << 63)
    """
    const uint64_t PM_SOFT_DIRTY "MM_PM_SOFT_DIRTY"
    const uint64_t PM_EXCLUSIVE "MM_PM_EXCLUSIVE"
    const uint64_t PM_FILE "MM_PM_FILE"
    const uint64_t PM_SWAP "MM_PM_SWAP"
    const uint64_t PM_PRESENT "MM_PM_PRESENT"

cdef inline bint vma_allows(const vma_t *v, bint write) noexcept nogil:
    """x86: what can be written or executed can be read."""
    return (v.flags & (VM_WRITE if write else VM_READ | VM_WRITE | VM_EXEC)) != 0

cdef vma_t *access_vma(mm_t *mm, uint64_t addr, bint write) noexcept nogil:
    cdef vma_t *v = vma_lookup(mm, addr)
    return v if v != NULL and vma_allows(v, write) else NULL

cdef uint64_t access_stop(mm_t *mm, uint64_t start, uint64_t end, bint write) noexcept nogil:
    cdef uint64_t i = vma_find(mm, start)
    while start < end:
        if i == mm.nr_vmas or mm.vma[i].start > start or not vma_allows(&mm.vma[i], write):
            return start
        start = mm.vma[i].end
        i += 1
    return end

cdef void copy_one(mm_t *mm, const vma_t *v, uint64_t pfn, uint64_t inside, uint8_t *data, uint64_t n, bint write) noexcept nogil:
    cdef mem_t *m = mm.m
    cdef uint8_t *at
    if pfn >= m.nr_pages:
        # Registers: the file has their bytes.
        at = v.file.disk + ((pfn - v.file.iomem_pfn) << m.page_shift) + inside
    elif not write and not test_flag(&m.map[pfn], PG_mm_written):
        memset(data, 0, n)
        return
    else:
        at = page_bytes(m, pfn) + inside
    if pfn < m.nr_pages and folio_is_anon(&m.map[compound_head_pfn(m.map, pfn)]):
        memcpy(at if write else data, data if write else at, n)
    else:
        copy_shared(at if write else data, data if write else at, n)

cdef int access_bytes(mm_t *mm, uint64_t *addr, uint8_t *data, uint64_t n, bint write) noexcept nogil:
    """Copy from or to user memory; *addr is how far it came. The copy of a page is under its table's lock, so that nobody
    takes the page away in the middle of it: what a store instruction gets from the processor."""
    cdef mem_t *m = mm.m
    cdef pgd_t *g = &mm.pgd
    cdef uint64_t page = ONE << m.page_shift, table, e, step, pfn, inside
    cdef uint64_t *entry
    cdef uint64_t bits = PTE_ACCESSED | (PTE_DIRTY | PTE_SOFT_DIRTY if write else 0)
    cdef vma_t *v = NULL
    cdef int level, error
    while n:
        if v == NULL or addr[0] >= v.end:
            v = access_vma(mm, addr[0], write)
            if v == NULL:
                return FAULT_SIGSEGV
        inside = addr[0] & (page - 1)
        step = min(n, page - inside)
        level = 0
        entry = walk_find(g, addr[0], &level, &table)
        table_lock(m, table)
        e = a64_load_relaxed(entry)
        if pte_leaf(e, level) and entry_allows(e, write):
            pfn = pte_pfn(e) + ((addr[0] & (level_size(g, level) - 1)) >> m.page_shift)
            if pfn < m.nr_pages and mm_unlikely(test_flag(&m.map[pfn], PG_hwpoison)):
                table_unlock(m, table)
                return -EHWPOISON
            copy_one(mm, v, pfn, inside, data, step, write)
            if e & bits != bits:
                a64_fetch_or_relaxed(entry, bits)
            table_unlock(m, table)
            addr[0] += step
            data += step
            n -= step
            continue
        table_unlock(m, table)
        error = handle_mm_fault(mm, v, addr[0] & ~(page - 1), FAULT_FLAG_WRITE if write else 0)
        if error:
            return error
    return 0

cdef int touch_pages(mm_t *mm, uint64_t *addr, uint64_t end, bint write, uint64_t *faults) noexcept nogil:
    cdef uint64_t i
    cdef int error
    while addr[0] < end:
        i = vma_find(mm, addr[0])
        if i == mm.nr_vmas or mm.vma[i].start > addr[0] or not vma_allows(&mm.vma[i], write):
            return FAULT_SIGSEGV
        error = touch_range(mm, &mm.vma[i], addr, min(end, mm.vma[i].end), write, faults)
        if error:
            return error
    return 0

cdef void populate(mm_t *mm, uint64_t start, uint64_t end, uint64_t vm_flags) noexcept nogil:
    """mm_populate() of what was just mapped with these flags. What cannot be brought in is left for faults, as in the kernel."""
    cdef uint64_t faults = 0
    cdef bint write = (vm_flags & (VM_WRITE | VM_SHARED)) == VM_WRITE
    if vm_flags & VM_PFNMAP or not vm_flags & (VM_READ | VM_WRITE) or mmap_read_lock(mm) != 0:
        return
    if access_stop(mm, start, end, write) == end:
        touch_pages(mm, &start, end, write, &faults)
    mmap_unlock(mm)

# ---- pagemap ----------------------------------------------------------------------------------------------------------------
cdef uint64_t pagemap_word(mm_t *mm, const vma_t *v, uint64_t addr, bint privileged) noexcept nogil:
    cdef mem_t *m = mm.m
    cdef pgd_t *g = &mm.pgd
    cdef int level = 0
    cdef uint64_t table, pfn, head
    cdef uint64_t e = a64_load_acquire(walk_find(g, addr, &level, &table))
    cdef uint64_t word = PM_SOFT_DIRTY if v.flags & VM_SOFTDIRTY else 0
    if pte_leaf(e, level):
        word |= PM_PRESENT
        if e & PTE_SOFT_DIRTY:
            word |= PM_SOFT_DIRTY
        pfn = pte_pfn(e) + ((addr & (level_size(g, level) - 1)) >> m.page_shift)
        if privileged:
            word |= pfn
        if not e & PTE_SPECIAL and pfn < m.nr_pages:
            head = compound_head_pfn(m.map, pfn)
            if not folio_is_anon(&m.map[head]):
                word |= PM_FILE
            # Since 6.15 the first page of a leaf speaks for all of it, also where another mm maps some of the others.
            if page_mapcount(m, pte_pfn(e)) == 1:
                word |= PM_EXCLUSIVE
        elif level and e & PTE_SPECIAL and pte_pfn(e) == m.huge_zero_pfn:
            # Under a PMD the kernel looks at the folio, which is not anonymous (seen on 6.18); the zero page of a PTE is skipped.
            word |= PM_FILE
    elif pte_swap(e) and level == 0:
        word |= PM_SWAP
        if e & SWP_SOFT_DIRTY:
            word |= PM_SOFT_DIRTY
        if privileged:
            # Bits 0-4 the type of swap, 5-54 the slot.
            word |= (swp_type(e) - SWP_TYPE_SWAP) | (swp_offset(e) << 5)
    return word

cdef void pagemap_words(mm_t *mm, uint64_t addr, uint64_t *words, uint64_t nr, bint privileged) noexcept nogil:
    cdef uint64_t i, at = vma_find(mm, addr), page = ONE << mm.m.page_shift
    for i in range(nr):
        while at < mm.nr_vmas and mm.vma[at].end <= addr:
            at += 1
        if at < mm.nr_vmas and mm.vma[at].start <= addr:
            words[i] = pagemap_word(mm, &mm.vma[at], addr, privileged)
        else:
            words[i] = 0
        addr += page

cdef uint64_t page_at_addr(mm_t *mm, uint64_t addr) noexcept nogil:
    cdef pgd_t *g = &mm.pgd
    cdef int level = 0
    cdef uint64_t table, e = a64_load_acquire(walk_find(g, addr, &level, &table))
    if not pte_leaf(e, level):
        return 0
    return pte_pfn(e) + ((addr & (level_size(g, level) - 1)) >> mm.m.page_shift)
