"""Copying address spaces."""
from libc.errno cimport EAGAIN, ENOMEM
from mmcore.core.fault cimport EHWPOISON, anon_flags, anon_page_init, copy_page_bytes, vma_entry_bits
from mmcore.core.filemap cimport file_add_mm
from mmcore.core.frames cimport give_pages, take_pages
from mmcore.core.hugetlb cimport hugetlb_copy
from mmcore.core.pgtable cimport *
from mmcore.core.rmap cimport *
from mmcore.core.swap cimport swap_dup
from mmcore.core.vma cimport mm_exit
from mmcore.core.zap cimport split_leaf

cdef enum:
    STASH = 64

cdef struct fork_t:
    mm_t *child
    mm_t *mm
    mem_t *m
    bint look_at_pins
    uint64_t stash[STASH]       # frames for copies, taken ahead
    uint64_t nr_stash
    uint64_t anon               # pages for the child's rss
    uint64_t file
    uint64_t shmem
    uint64_t swapped

cdef uint64_t stash_take(fork_t *k) noexcept nogil:
    if k.nr_stash == 0:
        # With failures to inject, each copy is an occurrence of its own.
        k.nr_stash = take_pages(k.m, k.stash, 1 if a32_load_relaxed(&k.m.inject_armed) else STASH)
        if k.nr_stash == 0:
            return 0
    k.nr_stash -= 1
    return k.stash[k.nr_stash]

cdef inline bint needs_cow_for_dma(const fork_t *k, const page_t *head) noexcept nogil:
    return k.look_at_pins and maybe_dma_pinned(head)

cdef inline void count_rss(fork_t *k, const page_t *head, uint64_t nr) noexcept nogil:
    if folio_is_anon(head):
        k.anon += nr
    elif test_flag(head, PG_swapbacked):
        k.shmem += nr
    else:
        k.file += nr

cdef int copy_present(fork_t *k, const vma_t *v, uint64_t *entry, uint64_t *child, uint64_t addr) noexcept nogil:
    """One page under a PTE."""
    cdef mem_t *m = k.m
    cdef uint64_t e = a64_load_relaxed(entry), pfn = pte_pfn(e), head, new
    cdef page_t *page
    if e & PTE_SPECIAL:
        child[0] = e if v.flags & VM_PFNMAP else e & ~PTE_RW
        return 0
    page = &m.map[pfn]
    head = compound_head_pfn(m.map, pfn)
    if folio_is_anon(&m.map[head]) and test_flag(page, PG_owner_2):
        if needs_cow_for_dma(k, &m.map[head]):
            if test_flag(page, PG_hwpoison):
                return -EHWPOISON       # not to be copied, and not to be shared
            new = stash_take(k)
            if new == 0:
                return -ENOMEM
            anon_page_init(m, &m.map[new], anon_flags(m, new), k.child.anon_id, page_index(k.mm, v, addr))
            copy_page_bytes(m, new, pfn)
            child[0] = (new << PTE_PFN_SHIFT) | vma_entry_bits(v) | PTE_DIRTY | PTE_SOFT_DIRTY \
                | (PTE_RW if v.flags & VM_WRITE else 0)
            k.anon += 1
            return 0
        clear_flag(page, PG_owner_2)
    if page_is_head(&m.map[head]):
        large_page_map(&m.map[head], page, 1)
    else:
        small_map_dup(page)
    count_rss(k, &m.map[head], 1)
    if e & PTE_RW:
        e &= ~PTE_RW
        a64_store_release(entry, e)
    child[0] = e & ~PTE_ACCESSED
    return 0

cdef int copy_ptes(fork_t *k, vma_t *v, uint64_t source, uint64_t table, uint64_t addr, uint64_t end) noexcept nogil:
    cdef mem_t *m = k.m
    cdef uint64_t i, e, ahead, used = 0, nr = (end - addr) >> m.page_shift
    cdef uint64_t *entry = table_at(m, source) + table_index(&k.mm.pgd, addr, 0)
    cdef uint64_t *child = table_at(m, table) + table_index(&k.mm.pgd, addr, 0)
    cdef int error = 0
    table_lock(m, source)
    for i in range(nr):
        e = a64_load_relaxed(&entry[i])
        if e == 0:
            continue
        ahead = a64_load_relaxed(&entry[i + 8]) if i + 8 < nr else 0
        if ahead & PTE_PRESENT and pte_pfn(ahead) < m.nr_pages:
            prefetch_write(&m.map[pte_pfn(ahead)])
        if pte_present(e):
            error = copy_present(k, v, entry + i, child + i, addr + (i << m.page_shift))
            if error:
                break
        else:
            # Swap, or a page that is being moved: what was exclusive or writable is neither from now on.
            e &= ~(SWP_EXCLUSIVE | (PTE_PSE if swp_type(e) == SWP_TYPE_MIGRATION else 0))
            a64_store_release(&entry[i], e)
            child[i] = e
            if swp_type(e) == SWP_TYPE_SWAP:
                swap_dup(m, swp_offset(e))
                k.swapped += 1
        used += 1
    table_used(m, table)[0] += used
    table_unlock(m, source)
    return error

cdef int copy_leaf(fork_t *k, vma_t *v, uint64_t table, uint64_t *entry, uint64_t addr, int level) noexcept nogil:
    """A PMD or PUD leaf. -EAGAIN: pinned, so that it must go page by page."""
    cdef mem_t *m = k.m
    cdef uint64_t e, pfn, new = 0, to
    cdef uint64_t *child
    cdef page_t *head
    cdef int error = 0
    to = table_make(&k.child.pgd, addr, level, &error)
    if to == 0:
        return error
    child = table_at(m, to) + table_index(&k.mm.pgd, addr, level)
    table_lock(m, table)
    e = a64_load_relaxed(entry)
    if not pte_leaf(e, level):
        error = -EAGAIN
    elif e & PTE_SPECIAL:
        child[0] = e
        table_used(m, to)[0] += 1
    else:
        pfn = pte_pfn(e)
        head = &m.map[pfn]
        if folio_is_anon(head) and test_flag(head, PG_owner_2) and needs_cow_for_dma(k, head):
            error = -EAGAIN
            if folio_is_hugetlb(head):
                error = hugetlb_copy(k.child, pfn, v.order, False, page_index(k.mm, v, addr), k.child.anon_id, &new)
                if error == FAULT_SIGBUS:
                    error = -ENOMEM
                if error == 0:
                    child[0] = (new << PTE_PFN_SHIFT) | vma_entry_bits(v) | PTE_PSE | PTE_DIRTY | PTE_SOFT_DIRTY \
                        | (PTE_RW if v.flags & VM_WRITE else 0)
                    table_used(m, to)[0] += 1
        elif folio_is_anon(head) or folio_is_hugetlb(head):
            if folio_is_anon(head) and test_flag(head, PG_owner_2):
                clear_flag(head, PG_owner_2)
            leaf_map(head, 1)
            if not folio_is_hugetlb(head):
                count_rss(k, head, ONE << level_order(&k.mm.pgd, level))
            if e & PTE_RW:
                e &= ~PTE_RW
                a64_store_release(entry, e)
            child[0] = e & ~PTE_ACCESSED
            table_used(m, to)[0] += 1
        # A leaf of a file faults in again.
    table_unlock(m, table)
    return error

cdef int copy_range(fork_t *k, vma_t *v, uint64_t table, int level, uint64_t start, uint64_t end) noexcept nogil:
    """What lies below one table of the parent. mmap_lock is held for writing."""
    cdef mem_t *m = k.m
    cdef pgd_t *g = &k.mm.pgd
    cdef uint64_t at = start, next, e, to
    cdef uint64_t *entry
    cdef int error = 0
    while at < end:
        next = level_end(g, at, end, level)
        entry = table_at(m, table) + table_index(g, at, level)
        e = a64_load_acquire(entry)
        if e != 0 and not pte_table(e, level):
            error = copy_leaf(k, v, table, entry, at, level)
            if error == -EAGAIN:
                error = split_leaf(k.mm, v, at)
            if error:
                return error
            e = a64_load_acquire(entry)
        if pte_table(e, level):
            if level == 1:
                to = table_make(&k.child.pgd, at, 0, &error)
                if to == 0:
                    return error
                error = copy_ptes(k, v, pte_pfn(e), to, at, next)
            else:
                error = copy_range(k, v, pte_pfn(e), level - 1, at, next)
            if error:
                return error
        at = next
    return 0

cdef int dup_vma(fork_t *k, vma_t *v) noexcept nogil:
    """One VMA: into the child's array first, so that whoever comes from its file finds it; then its entries."""
    cdef mm_t *child = k.child
    cdef vma_t new = v[0]
    cdef int error = 0
    new.flags &= ~(VM_LOCKED | VM_HUGE_RESV)
    if v.file != NULL and file_add_mm(v.file, child) != 0:
        return -ENOMEM
    pthread_mutex_lock(&child.rmap_lock)
    child.vma[child.nr_vmas] = new
    child.nr_vmas += 1
    pthread_mutex_unlock(&child.rmap_lock)
    if not (is_cow_mapping(v.flags) and a32_load_relaxed(&v.has_anon)) and not v.flags & VM_PFNMAP:
        return 0
    # A truncation comes before or after both the parent's entries and the child's.
    if v.file != NULL:
        pthread_mutex_lock(&v.file.lock)
    error = copy_range(k, v, k.mm.pgd.top, k.mm.pgd.levels - 1, v.start, v.end)
    if v.file != NULL:
        pthread_mutex_unlock(&v.file.lock)
    return error

cdef int dup_mmap(mm_t *child, mm_t *mm) noexcept nogil:
    cdef fork_t k
    cdef uint64_t i
    cdef int error = 0
    k.child, k.mm, k.m = child, mm, mm.m
    # At once, while nobody knows the child: the array must not move once its files know it.
    if not grow(k.m, <void **>&child.vma, &child.vmas_room, mm.nr_vmas, sizeof(vma_t)):
        return -ENOMEM
    k.look_at_pins = (a64_load_acquire(&mm.flags) & MMF_HAS_PINNED) != 0
    k.nr_stash = k.anon = k.file = k.shmem = k.swapped = 0
    child.anon_id = mm.anon_id
    child.hint = mm.hint
    a32_fetch_add_acq_rel(&mm.write_protect_seq, 1)
    for i in range(mm.nr_vmas):
        if mm.vma[i].flags & VM_DONTCOPY:
            continue
        error = dup_vma(&k, &mm.vma[i])
        if error:
            break
    a32_fetch_add_acq_rel(&mm.write_protect_seq, 1)
    if k.nr_stash:
        give_pages(k.m, k.stash, k.nr_stash)
    child.rss_anon += k.anon
    child.rss_file += k.file
    child.rss_shmem += k.shmem
    child.swapped += k.swapped
    return error

cdef int fork_mm(mm_t *child, mm_t *mm) noexcept nogil:
    cdef family_t *family
    cdef int error = mmap_write_lock(mm)
    if error:
        return error
    # Whoever comes from a page waits until all that maps it can be found.
    family = mm.family
    pthread_mutex_lock(&family.lock)
    error = dup_mmap(child, mm)
    if error == 0:
        family_join_locked(child, family)
    pthread_mutex_unlock(&family.lock)
    mmap_unlock(mm)
    if error:
        mm_exit(child)
    return error
