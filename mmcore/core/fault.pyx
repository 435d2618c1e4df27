"""Page faults on base pages and THPs."""
from libc.errno cimport EAGAIN, ENOMEM
from mmcore.core.buddy cimport alloc_folio
from mmcore.core.filemap cimport file_counts, file_page, file_pages
from mmcore.core.frames cimport give_huge, take_folio, take_huge, take_pages
from mmcore.core.lock cimport mark_dirty
from mmcore.core.hugetlb cimport hugetlb_fault
from mmcore.core.pgtable cimport *
from mmcore.core.rmap cimport *
from mmcore.core.swap cimport swap_count, swap_free, swap_load
from mmcore.core.zap cimport rss_add, split_leaf, zap_begin, zap_end, zap_one, zap_t

cdef extern from "<sched.h>" nogil:
    int sched_yield()

cdef enum:
    THP_BATCH = 32
    THP_AHEAD = 16
    STREAM_FROM = 64            # pages of one run

# ---- entries ------------------------------------------------------------------------------------------------------------
cdef void mark_access(uint64_t *entry, uint64_t bits) noexcept nogil:
    """Set accessed and dirty as the processor does: without a lock, and only while the entry is what was looked at."""
    cdef uint64_t e = a64_load_relaxed(entry)
    while e & PTE_PRESENT and e & bits != bits:
        if a64_cas_acq_rel(entry, &e, e | bits):
            return

cdef uint64_t huge_zero_get(mem_t *m) noexcept nogil:
    cdef spaces_t *s = spaces_of(m)
    cdef uint64_t pfn = a64_load_acquire(&m.huge_zero_pfn)
    if pfn:
        return pfn
    pthread_mutex_lock(&s.lock)
    pfn = m.huge_zero_pfn
    if pfn == 0:
        pfn = alloc_folio(m, (1 << MAX_REGIONS) - 1, m.pmd_order)
        if pfn:
            a64_store_release(&m.huge_zero_pfn, pfn)
    pthread_mutex_unlock(&s.lock)
    return pfn

# ---- huge: which sizes ---------------------------------------------------------------------------------------------------
cdef bint thp_allowed(const mm_t *mm, const vma_t *v) noexcept nogil:
    cdef int mode = spaces_of(mm.m).thp if v.file == NULL else spaces_of(mm.m).shmem_thp
    if v.flags & VM_NOHUGEPAGE or mode == THP_NEVER:
        return False
    return mode == THP_ALWAYS or (v.flags & VM_HUGEPAGE) != 0

cdef bint leaf_fits(const mm_t *mm, const vma_t *v, uint64_t addr, int level) noexcept nogil:
    """Does the VMA span the whole leaf around addr?"""
    cdef uint64_t size = level_size(&mm.pgd, level), first = addr & ~(size - 1)
    return first >= v.start and first + size <= v.end

cdef inline void huge_anon_init(mem_t *m, uint64_t pfn, uint64_t mapping, uint64_t index) noexcept nogil:
    # What take_huge gave counts its one mapping already: only the head's own line is written.
    cdef page_t *head = &m.map[pfn]
    a64_store_relaxed(&head.mapping, mapping)
    a64_store_relaxed(&head.index, index)
    a64_store_relaxed(&head.flags, anon_flags(m, pfn) | (ONE << PG_head))
    a32_store_release(&head._refcount, 1)

cdef int64_t thp_run(mm_t *mm, vma_t *v, uint64_t addr, uint64_t end, bint write) noexcept nogil:
    """Fill PMDs that are none from the one around addr on, up to THP_BATCH and while the VMA spans them. How many; 0 when
    there is no block, and base pages must do."""
    cdef mem_t *m = mm.m
    cdef pgd_t *g = &mm.pgd
    cdef uint64_t size = level_size(g, 1), at = addr & ~(size - 1), wanted = 0, got, i, table
    cdef uint64_t pfns[THP_BATCH]
    cdef uint64_t bits, last
    cdef uint64_t *entry
    cdef int error
    table = table_make(g, at, 1, &error)
    if table == 0:
        return error if error == -ENOMEM else 0
    entry = table_at(m, table) + table_index(g, at, 1)
    last = level_end(g, at, v.end, 2)
    while wanted < THP_BATCH and at + (wanted + 1) * size <= last and at + wanted * size < end \
            and a64_load_relaxed(&entry[wanted]) == 0:
        wanted += 1
    if wanted == 0:
        return 0
    if write:
        got = take_huge(m, pfns, wanted)
        if got == 0:
            return 0
        bits = vma_entry_bits(v) | PTE_PSE | PTE_ACCESSED | written_bits(v)
        for i in range(min(got, <uint64_t>THP_AHEAD)):
            prefetch_write(&m.map[pfns[i]])
    else:
        pfns[0] = huge_zero_get(m)
        if pfns[0] == 0:
            return 0
        got = wanted
        bits = vma_entry_bits(v) | PTE_PSE | PTE_ACCESSED | PTE_SPECIAL
    table_lock(m, table)
    i = 0
    while i < got and a64_load_relaxed(&entry[i]) == 0:
        if write:
            # By number, not by the batch: the next batch most likely goes on where this one ends.
            prefetch_write(&m.map[pfns[i] + (THP_AHEAD << m.pmd_order)])
            huge_anon_init(m, pfns[i], mm.anon_id, page_index(mm, v, at + i * size))
            a64_store_release(&entry[i], (pfns[i] << PTE_PFN_SHIFT) | bits)
        else:
            a64_store_release(&entry[i], (pfns[0] << PTE_PFN_SHIFT) | bits)
        i += 1
    table_used(m, table)[0] += i
    if i:
        # For the huge zero page too: a child of fork gets it with the rest, unlike the zero page of a PTE (seen on 6.18).
        note_anon(v)
    table_unlock(m, table)
    if write:
        if i < got:
            give_huge(m, pfns + i, got - i)
        a64_fetch_add_relaxed(&mm.rss_anon, i << m.pmd_order)
    # None: another thread was faster with the first, and what it put there must be looked at.
    return <int64_t>i if i else -EAGAIN

cdef uint64_t mthp_fault(mm_t *mm, vma_t *v, uint64_t *entry, uint64_t addr) noexcept nogil:
    """Under the table's lock: a large folio mapped by PTEs around addr, of the largest order that is allowed, fits and is
    to be had. `entry` is addr's. Returns how many entries it filled; 0: a base page must do."""
    cdef mem_t *m = mm.m
    cdef uint64_t orders = spaces_of(m).mthp, pfn, size, first, i, bits
    cdef uint64_t *pte
    cdef unsigned order
    cdef page_t *head
    if v.flags & VM_NOHUGEPAGE:
        return 0
    while orders:
        order = 63 - <unsigned>clz64(orders)
        orders &= ~(ONE << order)
        size = (ONE << order) << m.page_shift
        first = addr & ~(size - 1)
        if first < v.start or first + size > v.end:
            continue
        pte = entry - ((addr - first) >> m.page_shift)
        for i in range(ONE << order):
            if a64_load_relaxed(&pte[i]) != 0:
                break
        else:
            pfn = take_folio(m, order)
            if pfn == 0:
                continue
            head = &m.map[pfn]
            mark_tails(head)
            a64_store_relaxed(&head.mapping, mm.anon_id)
            a64_store_relaxed(&head.index, page_index(mm, v, first))
            a64_store_relaxed(&head.flags, anon_flags(m, pfn) | (ONE << PG_head))
            bits = vma_entry_bits(v) | PTE_ACCESSED | written_bits(v)
            for i in range(ONE << order):
                a32_store_relaxed(&m.map[pfn + i]._mapcount, 0)
                if i:
                    a64_store_relaxed(&m.map[pfn + i].flags, m.map[pfn + i].flags | (ONE << PG_owner_2))
            as_folio(head)._large_mapcount = <int32_t>((ONE << order) - 1)
            as_folio(head)._nr_pages_mapped = <int32_t>(ONE << order)
            a32_store_release(&head._refcount, <uint32_t>(ONE << order))
            for i in range(ONE << order):
                a64_store_release(&pte[i], ((pfn + i) << PTE_PFN_SHIFT) | bits)
            note_anon(v)
            a64_fetch_add_relaxed(&mm.rss_anon, ONE << order)
            return ONE << order
    return 0

cdef inline void anon_page_stream(page_t *page, uint64_t flags, uint64_t mapping, uint64_t index) noexcept nogil:
    """anon_page_init() past the caches; nobody can find the page before stream_end()."""
    cdef uint64_t *word = <uint64_t *>page
    stream64(word, flags)
    stream64(word + 1, 0)           # compound_info
    stream64(word + 2, 0)           # lru_prev
    stream64(word + 3, mapping)
    stream64(word + 4, index)
    stream64(word + 5, 0)           # private
    stream64(word + 6, MAPPED_ONCE)
    stream64(word + 7, 0)           # memcg_data

cdef uint64_t anon_run(mm_t *mm, vma_t *v, uint64_t *entry, uint64_t addr, uint64_t nr, bint write) noexcept nogil:
    """Under the table's lock: fill `nr` entries that are none with base pages. How many it could."""
    cdef mem_t *m = mm.m
    cdef uint64_t pfns[512]
    cdef uint64_t got, i, k, index, flags, bits, done = 0, mapping = mm.anon_id
    cdef bint one_region = m.nr_regions == 1
    if not write:
        bits = (m.zero_pfn << PTE_PFN_SHIFT) | vma_entry_bits(v) | PTE_ACCESSED | PTE_SPECIAL
        for i in range(nr):
            a64_store_relaxed(&entry[i], bits)
        return nr
    index = page_index(mm, v, addr)
    bits = vma_entry_bits(v) | PTE_ACCESSED | written_bits(v)
    note_anon(v)
    while done < nr:
        k = min(<uint64_t>512, nr - done)
        got = take_pages(m, pfns, k)
        flags = anon_flags(m, pfns[0]) if got else 0
        if got >= STREAM_FROM:
            # Their lines are written whole and not looked at again before others push them out: past the caches.
            for i in range(got):
                if not one_region:
                    flags = anon_flags(m, pfns[i])
                anon_page_stream(&m.map[pfns[i]], flags, mapping, index + done + i)
            stream_end()
            for i in range(got):
                a64_store_release(&entry[done + i], (pfns[i] << PTE_PFN_SHIFT) | bits)
            done += got
            if got < k:
                break
            continue
        for i in range(got):
            if i + 8 < got:
                prefetch_write(&m.map[pfns[i + 8]])
            if not one_region:
                flags = anon_flags(m, pfns[i])
            anon_page_init(m, &m.map[pfns[i]], flags, mapping, index + done + i)
            a64_store_release(&entry[done + i], (pfns[i] << PTE_PFN_SHIFT) | bits)
        done += got
        if got < k:
            break
    a64_fetch_add_relaxed(&mm.rss_anon, done)
    return done

# ---- write to what is there ------------------------------------------------------------------------------------------------
cdef bint only_ours(mm_t *mm, uint64_t table, uint64_t pfn) noexcept nogil:
    """Under the table's lock: is every reference of the page's folio a mapping by this table? Then nobody shares it."""
    cdef mem_t *m = mm.m
    cdef uint64_t head = compound_head_pfn(m.map, pfn), nr, i, e
    cdef uint64_t *entry = table_at(m, table)
    cdef int64_t ours = 0, mappings
    if not page_is_head(&m.map[head]):
        return a64_load_acquire(&m.map[pfn]._mapcount) == MAPPED_ONCE
    nr = ONE << folio_order_of(&m.map[head])
    mappings = folio_mapcount_of(&m.map[head])
    if <int64_t><int32_t>a32_load_acquire(&m.map[head]._refcount) != mappings or mappings > <int64_t>nr:
        return False
    for i in range(ONE << mm.pgd.bits):
        e = a64_load_relaxed(&entry[i])
        if pte_present(e) and not e & PTE_SPECIAL and pte_pfn(e) - head < nr:
            ours += 1
    return ours == mappings

cdef int copy_to_anon(mm_t *mm, vma_t *v, uint64_t *entry, uint64_t e, uint64_t addr, bint unshare) noexcept nogil:
    """Under the table's lock: put a copy of what is mapped in its place, exclusive to this mm."""
    cdef mem_t *m = mm.m
    cdef uint64_t new, pfn = pte_pfn(e), bits
    cdef zap_t z
    if pfn < m.nr_pages and test_flag(&m.map[pfn], PG_hwpoison):
        return -EHWPOISON
    if take_pages(m, &new, 1) == 0:
        return -ENOMEM
    note_anon(v)
    anon_page_init(m, &m.map[new], anon_flags(m, new), mm.anon_id, page_index(mm, v, addr))
    if pfn < m.nr_pages:
        copy_page_bytes(m, new, pfn)
    if unshare:
        # The entry stays read-only: a pin that only reads must not look like a write of the process.
        bits = vma_entry_bits(v) | PTE_ACCESSED | (e & PTE_SOFT_DIRTY)
    else:
        bits = vma_entry_bits(v) | PTE_ACCESSED | written_bits(v)
    a64_store_release(entry, (new << PTE_PFN_SHIFT) | bits)
    a64_fetch_add_relaxed(&mm.rss_anon, 1)
    zap_begin(&z, mm)
    zap_one(&z, e, 0)
    zap_end(&z)
    return 0

cdef int do_wp_page(mm_t *mm, vma_t *v, uint64_t table, uint64_t *entry, uint64_t e, uint64_t addr,
                    unsigned flags) noexcept nogil:
    """Under the table's lock: an entry that is present and does not allow the write, or is not exclusive and should be."""
    cdef mem_t *m = mm.m
    cdef uint64_t pfn = pte_pfn(e), head
    cdef bint unshare = (flags & FAULT_FLAG_UNSHARE) != 0
    if v.flags & VM_SHARED:
        if unshare:
            return 0
        if not e & PTE_SPECIAL and v.file != NULL and v.file.kind == FILE_EXT4:
            mark_dirty(m, compound_head_pfn(m.map, pfn))
        a64_store_release(entry, e | PTE_ACCESSED | written_bits(v))
        return 0
    if e & PTE_SPECIAL or pfn >= m.nr_pages:
        return copy_to_anon(mm, v, entry, e, addr, unshare)
    head = compound_head_pfn(m.map, pfn)
    if folio_is_anon(&m.map[head]):
        if test_flag(&m.map[pfn], PG_owner_2) or only_ours(mm, table, pfn):
            set_flag(&m.map[pfn], PG_owner_2)
            if not unshare:
                a64_store_release(entry, e | PTE_ACCESSED | written_bits(v))
            return 0
    return copy_to_anon(mm, v, entry, e, addr, unshare)

cdef int do_huge_wp(mm_t *mm, vma_t *v, uint64_t table, uint64_t *entry, uint64_t addr, unsigned flags) noexcept nogil:
    """The same for a PMD leaf: reuse it, or split it and let the PTE be looked at. The huge zero folio becomes a THP."""
    cdef mem_t *m = mm.m
    cdef uint64_t e, pfn, size = level_size(&mm.pgd, 1), new = 0
    cdef page_t *head
    cdef bint unshare = (flags & FAULT_FLAG_UNSHARE) != 0, done = False
    if a64_load_relaxed(entry) & PTE_SPECIAL and take_huge(m, &new, 1) == 0:
        new = 0
    table_lock(m, table)
    e = a64_load_relaxed(entry)
    if not pte_leaf(e, 1) or (not unshare and e & PTE_RW):
        done = True
    elif v.flags & VM_SHARED:
        if not unshare:
            a64_store_release(entry, e | PTE_ACCESSED | written_bits(v))
        done = True
    elif e & PTE_SPECIAL:
        if new:
            huge_anon_init(m, new, mm.anon_id, page_index(mm, v, addr & ~(size - 1)))
            note_anon(v)
            a64_store_release(entry, (new << PTE_PFN_SHIFT) | vma_entry_bits(v) | PTE_PSE | PTE_ACCESSED
                              | (0 if unshare else written_bits(v)))
            a64_fetch_add_relaxed(&mm.rss_anon, ONE << m.pmd_order)
            new = 0
            done = True
    else:
        pfn = pte_pfn(e)
        head = &m.map[compound_head_pfn(m.map, pfn)]
        if folio_is_anon(head):
            if test_flag(head, PG_owner_2) or (folio_mapcount_of(head) == 1 and a32_load_acquire(&head._refcount) == 1):
                set_flag(head, PG_owner_2)
                if not unshare:
                    a64_store_release(entry, e | PTE_ACCESSED | written_bits(v))
                done = True
    table_unlock(m, table)
    if new:
        give_huge(m, &new, 1)
    return 0 if done else split_leaf(mm, v, addr)

# ---- files -------------------------------------------------------------------------------------------------------------------
cdef uint64_t file_bits(const vma_t *v, uint64_t pfn, bint write) noexcept nogil:
    """The entry of a file's page as far as the VMA says; a clean page under dirty tracking is mapped read-only."""
    cdef uint64_t bits = vma_entry_bits(v) | PTE_ACCESSED
    if v.flags & VM_SHARED and v.flags & VM_WRITE and (write or v.file.kind != FILE_EXT4):
        bits |= PTE_RW
    if write:
        bits |= PTE_DIRTY | PTE_SOFT_DIRTY
    return bits

cdef int file_leaf(mm_t *mm, vma_t *v, uint64_t addr, bint write, bint *done) noexcept nogil:
    """Map a device's leaf, or a THP of tmpfs, as one entry of a higher level, where it and the VMA line up."""
    cdef mem_t *m = mm.m
    cdef pgd_t *g = &mm.pgd
    cdef file_t *f = v.file
    cdef uint64_t index, pfn = 0, table, first, span
    cdef uint64_t *entry
    cdef int level = 1, error
    done[0] = False
    if f.kind == FILE_DEVDAX or f.kind == FILE_FSDAX:
        level = 2 if f.device.leaf_order >= 2 * g.bits else 1 if f.device.leaf_order >= g.bits else 0
    elif f.kind != FILE_TMPFS or not thp_allowed(mm, v):
        return 0
    if level == 0 or not leaf_fits(mm, v, addr, level) or (write and not v.flags & VM_SHARED):
        return 0
    first = addr & ~(level_size(g, level) - 1)
    index = page_index(mm, v, first)
    span = ONE << level_order(g, level)
    if index & (span - 1):
        return 0
    table = table_make(g, first, level, &error)
    if table == 0:
        return error if error == -ENOMEM else 0
    pthread_mutex_lock(&f.lock)
    error = 0
    if index + span > file_pages(f):
        error = FAULT_SIGBUS if page_index(mm, v, addr) >= file_pages(f) else 0
    else:
        error = file_page(f, index, True, &pfn)
        if error == 0 and page_is_head(&m.map[pfn]) and a64_load_relaxed(&as_folio(&m.map[pfn])._flags_1) >> PG_has_hwpoisoned & 1:
            pass        # page by page, so that only the broken one refuses
        elif error == 0 and pfn & (span - 1) == 0 and (f.device != NULL or folio_order_of(&m.map[pfn]) == m.pmd_order):
            entry = table_at(m, table) + table_index(g, first, level)
            table_lock(m, table)
            if a64_load_relaxed(entry) == 0:
                if counts_mappings(m, pfn):
                    leaf_map(&m.map[pfn], 1)
                    rss_add(mm, pfn, <int64_t>span)
                a64_store_release(entry, (pfn << PTE_PFN_SHIFT) | file_bits(v, pfn, write) | PTE_PSE)
                table_used(m, table)[0] += 1
                done[0] = True
            elif not pte_table(a64_load_relaxed(entry), level):
                done[0] = True
            table_unlock(m, table)
    pthread_mutex_unlock(&f.lock)
    return error

cdef int do_file_fault(mm_t *mm, vma_t *v, uint64_t addr, bint write) noexcept nogil:
    """An entry that is none, in a file's VMA: map the page of the cache, or a copy of it."""
    cdef mem_t *m = mm.m
    cdef pgd_t *g = &mm.pgd
    cdef file_t *f = v.file
    cdef uint64_t pfn = 0, table
    cdef uint64_t *entry
    cdef int error
    cdef bint done = False
    error = file_leaf(mm, v, addr, write, &done)
    if error or done:
        return error
    table = table_make(g, addr, 0, &error)
    if table == 0:
        return error if error == -ENOMEM else 0
    entry = table_at(m, table) + table_index(g, addr, 0)
    pthread_mutex_lock(&f.lock)
    error = file_page(f, page_index(mm, v, addr), thp_allowed(mm, v), &pfn)
    if error == 0 and pfn < m.nr_pages and test_flag(&m.map[pfn], PG_hwpoison):
        error = -EHWPOISON
    if error == 0:
        table_lock(m, table)
        if a64_load_relaxed(entry) == 0:
            if not file_counts(f):
                a64_store_release(entry, (pfn << PTE_PFN_SHIFT) | file_bits(v, pfn, write) | PTE_SPECIAL)
            elif write and not v.flags & VM_SHARED:
                # Private: the copy is made at once, and the cache's page never mapped.
                error = copy_to_anon(mm, v, entry, (pfn << PTE_PFN_SHIFT) | PTE_PRESENT | PTE_SPECIAL, addr, False)
            else:
                if write and f.kind == FILE_EXT4:
                    mark_dirty(m, compound_head_pfn(m.map, pfn))
                page_map(m, pfn)
                rss_add(mm, compound_head_pfn(m.map, pfn), 1)
                a64_store_release(entry, (pfn << PTE_PFN_SHIFT) | file_bits(v, pfn, write))
            if error == 0:
                table_used(m, table)[0] += 1
        table_unlock(m, table)
    pthread_mutex_unlock(&f.lock)
    return error

# ---- swap ----------------------------------------------------------------------------------------------------------------------
cdef int do_swap_page(mm_t *mm, vma_t *v, uint64_t table, uint64_t *entry, uint64_t e, uint64_t addr,
                      bint write) noexcept nogil:
    """Under the table's lock: bring a page back. It is exclusive when it was, or when no other entry names the slot."""
    cdef mem_t *m = mm.m
    cdef uint64_t new, slot = swp_offset(e), bits
    cdef bint exclusive
    if swp_type(e) != SWP_TYPE_SWAP:
        return 0
    if take_pages(m, &new, 1) == 0:
        return -ENOMEM
    exclusive = (e & SWP_EXCLUSIVE) != 0 or swap_count(m, slot) == 1
    note_anon(v)
    anon_page_init(m, &m.map[new], anon_flags(m, new) & ~(0 if exclusive else ONE << PG_owner_2), mm.anon_id,
                   page_index(mm, v, addr))
    swap_load(m, slot, new)
    swap_free(m, slot, 1)
    bits = vma_entry_bits(v) | PTE_ACCESSED | (PTE_SOFT_DIRTY if e & SWP_SOFT_DIRTY else 0)
    if exclusive and v.flags & VM_WRITE:
        bits |= PTE_RW
        if write:
            bits |= PTE_DIRTY | PTE_SOFT_DIRTY
    a64_store_release(entry, (new << PTE_PFN_SHIFT) | bits)
    a64_fetch_add_relaxed(&mm.rss_anon, 1)
    a64_fetch_add_relaxed(&mm.swapped, <uint64_t>-1)
    return 0

# ---- the fault -------------------------------------------------------------------------------------------------------------------
cdef int handle_pte_fault(mm_t *mm, vma_t *v, uint64_t addr, unsigned flags) noexcept nogil:
    cdef mem_t *m = mm.m
    cdef pgd_t *g = &mm.pgd
    cdef uint64_t table, e, n
    cdef uint64_t *entry
    cdef bint write = (flags & FAULT_FLAG_WRITE) != 0
    cdef int error = 0
    table = table_make(g, addr, 0, &error)
    if table == 0:
        return error if error == -ENOMEM else 0
    entry = table_at(m, table) + table_index(g, addr, 0)
    table_lock(m, table)
    e = a64_load_relaxed(entry)
    if e == 0 and v.file != NULL:
        # Truncated or dropped since it was looked at: the fault starts over.
        table_unlock(m, table)
        return 0
    if e == 0:
        # An unshare of nothing has nothing to do but bring something in.
        n = mthp_fault(mm, v, entry, addr) if write and spaces_of(m).mthp else 0
        if n == 0:
            n = anon_run(mm, v, entry, addr, 1, write)
        if n == 0:
            error = -ENOMEM
        table_used(m, table)[0] += n
    elif not pte_present(e):
        if swp_type(e) == SWP_TYPE_MIGRATION:
            table_unlock(m, table)
            sched_yield()
            return 0
        error = do_swap_page(mm, v, table, entry, e, addr, write)
    elif is_numa_hint(e, v):
        # Answered by making it present.
        a64_store_release(entry, (e & ~PTE_PROTNONE) | vma_entry_bits(v) | PTE_ACCESSED)
    elif flags & FAULT_FLAG_UNSHARE or (write and not e & PTE_RW):
        error = do_wp_page(mm, v, table, entry, e, addr, flags)
    else:
        a64_store_release(entry, e | PTE_ACCESSED | (PTE_DIRTY | PTE_SOFT_DIRTY if write else 0))
    table_unlock(m, table)
    return error

cdef int handle_mm_fault(mm_t *mm, vma_t *v, uint64_t addr, unsigned flags) noexcept nogil:
    cdef mem_t *m = mm.m
    cdef uint64_t table, e
    cdef uint64_t *entry
    cdef int level = 1
    cdef int64_t n
    cdef bint write = (flags & FAULT_FLAG_WRITE) != 0
    a64_fetch_add_relaxed(&mm.total_faults, 1)
    if v.flags & VM_HUGETLB:
        return hugetlb_fault(mm, v, addr, flags)
    entry = walk_find(&mm.pgd, addr, &level, &table)
    e = a64_load_acquire(entry)
    if level >= 1 and pte_leaf(e, level):
        if is_numa_hint(e, v):
            table_lock(m, table)
            e = a64_load_relaxed(entry)
            if pte_leaf(e, level):
                a64_store_release(entry, (e & ~PTE_PROTNONE) | vma_entry_bits(v) | PTE_ACCESSED)
            table_unlock(m, table)
            return 0
        if flags & FAULT_FLAG_UNSHARE or (write and not e & PTE_RW):
            if level == 1:
                return do_huge_wp(mm, v, table, entry, addr, flags)
            if not v.flags & VM_SHARED:
                return split_leaf(mm, v, addr)      # and the copy of one page is made at the next look
            mark_access(entry, PTE_RW | PTE_ACCESSED | PTE_DIRTY | PTE_SOFT_DIRTY)
            return 0
        mark_access(entry, PTE_ACCESSED | (PTE_DIRTY | PTE_SOFT_DIRTY if write else 0))
        return 0
    if v.file != NULL:
        level = 0
        e = a64_load_acquire(walk_find(&mm.pgd, addr, &level, &table))
        if e == 0:
            return do_file_fault(mm, v, addr, write)
        return handle_pte_fault(mm, v, addr, flags)
    if e == 0 and thp_allowed(mm, v) and leaf_fits(mm, v, addr, 1):
        n = thp_run(mm, v, addr, addr + 1, write)
        if n:
            return 0 if n > 0 or n == -EAGAIN else <int>n
    return handle_pte_fault(mm, v, addr, flags)
