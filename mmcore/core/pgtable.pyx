"""Page tables: walkers, and how tables come and go."""
from libc.errno cimport EEXIST, ENOMEM
from libc.string cimport memset
from mmcore.core.buddy cimport alloc_frames, free_folio
from mmcore.core.content cimport in_view

cdef extern from "<sched.h>" nogil:
    int sched_yield()

# ---- locks ----------------------------------------------------------------------------------------------------------
cdef void table_lock_slow(mem_t *m, uint64_t table) noexcept nogil:
    """Spin for the lock; what is done under it is short. Give the processor away now and then: its holder may need it."""
    cdef int spins = 0
    while True:
        while a64_load_relaxed(&m.map[table].private) & 1:
            cpu_relax()
            spins += 1
            if spins & 127 == 0:
                sched_yield()
        if not a64_fetch_or_acquire(&m.map[table].private, 1) & 1:
            return

# ---- walkers --------------------------------------------------------------------------------------------------------
# Two epochs, and counters of who entered in which. To free, change the epoch and wait until nobody of the old one is
# left; those who enter meanwhile enter in the new one and cannot have seen what was unlinked before.
cdef int walk_enter(pgd_t *g) noexcept nogil:
    cdef int slot = <int>thread_slot(NR_WALK_SLOTS)
    cdef uint64_t epoch
    while True:
        epoch = a64_load_acquire(&g.epoch) & 1
        a64_fetch_add_relaxed(&g.slot[slot].inside[epoch], 1)
        mm_full_barrier()
        if mm_likely(a64_load_acquire(&g.epoch) & 1 == epoch):
            return slot << 1 | <int>epoch
        # The epoch changed between the two looks: the one who changed it may have missed us.
        a64_fetch_add_relaxed(&g.slot[slot].inside[epoch], <uint64_t>-1)

cdef void walk_leave(pgd_t *g, int token) noexcept nogil:
    a64_fetch_add_release(&g.slot[token >> 1].inside[token & 1], <uint64_t>-1)

cdef void pgd_synchronize(pgd_t *g) noexcept nogil:
    cdef uint64_t old, inside
    cdef int i, spins = 0
    while a64_fetch_or_acquire(&g.synced, 1) & 1:
        sched_yield()
    mm_full_barrier()
    old = a64_load_relaxed(&g.epoch)
    a64_store_release(&g.epoch, old + 1)
    mm_full_barrier()
    while True:
        inside = 0
        for i in range(NR_WALK_SLOTS):
            inside += a64_load_acquire(&g.slot[i].inside[old & 1])
        if inside == 0:
            break
        cpu_relax()
        spins += 1
        if spins & 63 == 0:
            sched_yield()
    a64_store_release(&g.synced, 0)

# ---- tables ---------------------------------------------------------------------------------------------------------
cdef void table_forget(page_t *page) noexcept nogil:
    a64_store_relaxed(&page.index, 0)
    a64_store_relaxed(&page.private, 0)
    a64_store_relaxed(&page.lru_next, 0)
    a32_store_relaxed(&page.page_type, NO_TYPE)

cdef uint64_t table_alloc(pgd_t *g) noexcept nogil:
    """A frame of unmovable memory, cleared. Region 0 is the Normal memory outside of CMA."""
    cdef mem_t *m = g.m
    cdef uint64_t pfn, aside = 0, next
    if mm_unlikely(inject_fails(m, INJECT_TABLE)):
        return 0
    while True:
        pfn = alloc_frames(m, 1, 0)
        if pfn == 0:
            break
        page_init(&m.map[pfn], m.region[0].zone_flags | (ONE << PG_mm_written), 0)
        a32_store_relaxed(&m.map[pfn].page_type, <uint32_t>PGTY_table << 24)
        if mm_likely(not in_view(m, pfn)):
            break
        # Put aside until one was found that nobody can write.
        a64_store_relaxed(&m.map[pfn].private, aside)
        aside = pfn
    while mm_unlikely(aside != 0):
        next = a64_load_relaxed(&m.map[aside].private)
        table_forget(&m.map[aside])
        free_folio(m, aside, 0)
        aside = next
    if mm_unlikely(pfn == 0):
        return 0
    memset(table_at(m, pfn), 0, <size_t>1 << m.page_shift)
    a32_store_release(&m.map[pfn]._refcount, 1)
    a64_fetch_add_relaxed(&g.nr_tables, 1)
    return pfn

cdef void frame_put(mem_t *m, uint64_t pfn) noexcept nogil:
    """Free a table's frame, unless somebody holds a speculative reference: then the last one to go frees it."""
    table_forget(&m.map[pfn])
    if a32_fetch_sub_acq_rel(&m.map[pfn]._refcount, 1) == 1:
        free_folio(m, pfn, 0)

cdef void table_discard(pgd_t *g, uint64_t table) noexcept nogil:
    a64_fetch_add_relaxed(&g.nr_tables, <uint64_t>-1)
    frame_put(g.m, table)

cdef int pgd_init(pgd_t *g, mem_t *m) noexcept nogil:
    memset(g, 0, sizeof(pgd_t))
    g.m = m
    g.shift = m.page_shift
    g.bits = m.page_shift - 3
    g.levels = <int>((TASK_BITS - g.shift + g.bits - 1) // g.bits)
    g.top = table_alloc(g)
    return 0 if g.top else -ENOMEM

cdef uint64_t table_make(pgd_t *g, uint64_t addr, int level, int *error) noexcept nogil:
    """Descend to the table of a level that decides about addr, and make what is missing on the way."""
    cdef mem_t *m = g.m
    cdef int k = g.levels - 1
    cdef uint64_t at = g.top, e, new = 0
    cdef uint64_t *entry
    error[0] = 0
    while k > level:
        entry = table_at(m, at) + table_index(g, addr, k)
        e = a64_load_acquire(entry)
        if e == 0:
            # Allocated before the lock is taken; whoever comes second gives its own back.
            new = table_alloc(g)
            if new == 0:
                error[0] = -ENOMEM
                return 0
            table_lock(m, at)
            e = a64_load_relaxed(entry)
            if e == 0:
                e = (new << PTE_PFN_SHIFT) | PTE_PRESENT | PTE_RW | PTE_USER | PTE_ACCESSED
                a64_store_release(entry, e)
                table_used(m, at)[0] += 1
                new = 0
            table_unlock(m, at)
            if new:
                table_discard(g, new)
        if not pte_table(e, k):
            error[0] = -EEXIST
            return 0
        at = pte_pfn(e)
        k -= 1
    return at

cdef void table_unlinked(pgd_t *g, dead_t *dead, uint64_t table) noexcept nogil:
    """Note a table that no entry leads to any more. Its lru words are free: it is on no list."""
    a64_store_relaxed(&g.m.map[table].lru_next, dead.first << 1)
    dead.first = table
    dead.nr += 1

cdef void unlink_below(pgd_t *g, dead_t *dead, uint64_t table, int level, uint64_t start, uint64_t end, uint64_t floor,
                       uint64_t ceiling) noexcept nogil:
    """Unlink the empty tables below one table that span nothing outside of [floor, ceiling)."""
    cdef mem_t *m = g.m
    cdef uint64_t *entry
    cdef uint64_t at = start, next, e, child, span = level_size(g, level), first
    while at < end:
        next = level_end(g, at, end, level)
        entry = table_at(m, table) + table_index(g, at, level)
        e = a64_load_relaxed(entry)
        if pte_table(e, level):
            child = pte_pfn(e)
            if level > 1:
                unlink_below(g, dead, child, level - 1, at, next, floor, ceiling)
            first = at & ~(span - 1)
            if first >= floor and first + span <= ceiling and a64_load_relaxed(table_used(m, child)) == 0:
                table_lock(m, table)
                a64_store_release(entry, 0)
                table_used(m, table)[0] -= 1
                table_unlock(m, table)
                table_unlinked(g, dead, child)
        at = next

cdef void tables_unlink(pgd_t *g, dead_t *dead, uint64_t start, uint64_t end, uint64_t floor,
                        uint64_t ceiling) noexcept nogil:
    """Unlink the tables of a range that was unmapped; floor and ceiling are the neighbours' end and start.

    mmap_lock is held for writing: nobody makes tables meanwhile.
    """
    unlink_below(g, dead, g.top, g.levels - 1, start, end, floor, ceiling)

cdef void tables_free(pgd_t *g, dead_t *dead) noexcept nogil:
    cdef uint64_t next
    if dead.first == 0:
        return
    pgd_synchronize(g)
    while dead.first:
        next = a64_load_relaxed(&g.m.map[dead.first].lru_next) >> 1
        table_discard(g, dead.first)
        dead.first = next
    dead.nr = 0

cdef void pgd_destroy(pgd_t *g) noexcept nogil:
    cdef dead_t dead
    cdef uint64_t top = g.top
    if top == 0:
        return
    dead.first = dead.nr = 0
    tables_unlink(g, &dead, 0, task_size(g), 0, ONE << 63)
    tables_free(g, &dead)
    # The top table too goes only after the walkers that may have seen it; later ones find frame 0, which reads as empty.
    a64_store_release(&g.top, 0)
    pgd_synchronize(g)
    table_discard(g, top)
