"""The walk under mmap_lock."""
from libc.errno cimport EEXIST, EFAULT, EINTR, EOPNOTSUPP
from mmcore.core.fault cimport EHWPOISON, FAULT_FLAG_UNSHARE, FAULT_FLAG_WRITE, handle_mm_fault
from mmcore.core.filemap cimport file_look
from mmcore.core.gup_walk cimport *
from mmcore.core.lock cimport mark_dirty
from mmcore.core.pgtable cimport *
from mmcore.core.rmap cimport counts_mappings
from mmcore.core.space cimport *
from mmcore.core.vma cimport vma_lookup
from mmcore.core.zap cimport split_leaf

cdef extern from "<sched.h>" nogil:
    int sched_yield()

cdef extern from "Python.h":
    int PyErr_CheckSignals()    # leaves the exception set; it is raised when no lock is held any more

cdef enum:
    MAX_TRIES = 20000           # faults on one page that bring nothing: an entry that cannot be had, not bad luck
    SIGNAL_EVERY = 1024         # faults between two looks at signals

cdef inline int fail(gup_t *w, int error, int why) noexcept nogil:
    w.why = why
    return -error

# ---- VMAs ---------------------------------------------------------------------------------------------------------------
cdef bint needs_dirty_tracking(const vma_t *v) noexcept nogil:
    """Must its filesystem be told of writes? Shared, writable, and with writeback."""
    return v.flags & (VM_SHARED | VM_WRITE) == (VM_SHARED | VM_WRITE) and v.file != NULL \
        and (v.file.kind == FILE_EXT4 or v.file.kind == FILE_FSDAX)

cdef int check_vma_flags(gup_t *w, const vma_t *v) noexcept nogil:
    cdef unsigned flags = w.flags
    if v.flags & (VM_IO | VM_PFNMAP):
        return fail(w, EFAULT, WHY_IO)
    if flags & FOLL_ANON and not vma_is_anonymous(v):
        return fail(w, EFAULT, WHY_NOT_ANON)
    if flags & FOLL_LONGTERM and v.file != NULL and v.file.kind == FILE_FSDAX:
        return fail(w, EOPNOTSUPP, WHY_FSDAX)
    if flags & FOLL_SPLIT_PMD and v.flags & VM_HUGETLB:
        return fail(w, EOPNOTSUPP, WHY_SPLIT_HUGETLB)
    if v.file != NULL and v.file.kind == FILE_SECRETMEM:
        return fail(w, EFAULT, WHY_SECRETMEM)
    if flags & FOLL_WRITE:
        if not vma_is_anonymous(v) and flags & (FOLL_PIN | FOLL_LONGTERM) == (FOLL_PIN | FOLL_LONGTERM) \
                and needs_dirty_tracking(v):
            return fail(w, EFAULT, WHY_DIRTY_TRACKING)
        if not v.flags & VM_WRITE:
            if not flags & FOLL_FORCE:
                return fail(w, EFAULT, WHY_NO_WRITE)
            if not is_cow_mapping(v.flags):
                return fail(w, EFAULT, WHY_FORCE_SHARED)
    elif not v.flags & VM_READ and not flags & FOLL_FORCE:
        return fail(w, EFAULT, WHY_NO_READ)
    return 0

# ---- entries --------------------------------------------------------------------------------------------------------------
cdef bint can_follow_write(const gup_t *w, const vma_t *v, uint64_t e, const page_t *head, const page_t *page) noexcept nogil:
    """May the page of this entry be written? page carries the exclusive mark; NULL when no struct page is to be looked at."""
    if e & PTE_RW:
        return True
    if not w.flags & FOLL_FORCE or v.flags & (VM_MAYSHARE | VM_SHARED | VM_WRITE) or not v.flags & VM_MAYWRITE:
        return False
    if page == NULL or not a64_load_relaxed(&head.mapping) & FOLIO_MAPPING_ANON or not test_flag(page, PG_owner_2):
        return False
    # A write that soft-dirty tracking has not seen yet goes through a fault.
    return (v.flags & VM_SOFTDIRTY) != 0 or (e & PTE_SOFT_DIRTY) != 0

cdef bint must_unshare(const gup_t *w, const vma_t *v, const page_t *head, const page_t *page) noexcept nogil:
    """gup_must_unshare for an entry that is not writable."""
    if w.flags & (FOLL_PIN | FOLL_WRITE) != FOLL_PIN:
        return False
    if not a64_load_relaxed(&head.mapping) & FOLIO_MAPPING_ANON:
        return (w.flags & FOLL_LONGTERM) != 0 and is_cow_mapping(v.flags)
    return not test_flag(page, PG_owner_2)

cdef bint numa_hint(const gup_t *w, const vma_t *v, uint64_t e) noexcept nogil:
    return e & PTE_PROTNONE and w.flags & FOLL_HONOR_NUMA_FAULT and v.flags & (VM_READ | VM_WRITE | VM_EXEC)

cdef int hole(gup_t *w, const vma_t *v) noexcept nogil:
    """Nothing is there. A core dump does not fill in what would read as zero (no_page_table)."""
    cdef uint64_t there
    if not w.flags & FOLL_DUMP:
        return GUP_MISS
    if vma_is_anonymous(v):
        return fail(w, EFAULT, WHY_HOLE)
    if v.flags & VM_HUGETLB:
        if v.file == NULL:
            return fail(w, EFAULT, WHY_HOLE)
        pthread_mutex_lock(&v.file.lock)
        there = file_look(v.file, page_index(w.mm, v, w.addr))
        pthread_mutex_unlock(&v.file.lock)
        if there == 0:
            return fail(w, EFAULT, WHY_HOLE)
    return GUP_MISS

cdef int grab_failed(gup_t *w, int error) noexcept nogil:
    if error == -EREMOTEIO:
        w.why = WHY_P2PDMA
    elif error == -EAGAIN:
        return GUP_MISS         # split between two looks: cannot last under the table's lock
    else:
        w.why = WHY_REFS
    return error

cdef int poisoned(gup_t *w, uint64_t pfn) noexcept nogil:
    w.bad_pfn = pfn
    w.why = WHY_HWPOISON
    return -EHWPOISON if w.flags & FOLL_HWPOISON else -EFAULT

cdef void mark_touched(gup_t *w, uint64_t *entry, uint64_t e) noexcept nogil:
    """Set accessed, and dirty for a write, as the processor would; under the table's lock, yet beside the processor."""
    cdef uint64_t bits = PTE_ACCESSED | (PTE_DIRTY if w.flags & FOLL_WRITE and e & PTE_RW else 0)
    while e & bits != bits:
        if a64_cas_acq_rel(entry, &e, e | bits):
            return

# ---- following -------------------------------------------------------------------------------------------------------------
cdef int follow_pte(gup_t *w, const vma_t *v, uint64_t *entry) noexcept nogil:
    """Under the table's lock: take the page of one PTE. 0, GUP_MISS, GUP_UNSHARE, or an errno."""
    cdef mem_t *m = w.m
    cdef uint64_t e = a64_load_acquire(entry), pfn = pte_pfn(e), head = 0
    cdef page_t *page = NULL
    cdef page_t *folio = NULL
    cdef bint large, normal
    cdef int error
    if not pte_present(e):
        return hole(w, v) if e == 0 else GUP_MISS
    if numa_hint(w, v, e):
        return GUP_MISS
    normal = not e & PTE_SPECIAL and pfn < m.nr_pages
    if normal:
        folio = &m.map[compound_head_pfn(m.map, pfn)]
        page = folio if folio_is_hugetlb(folio) else &m.map[pfn]
    if w.flags & FOLL_WRITE and not can_follow_write(w, v, e, folio, page):
        return GUP_MISS
    if not normal:
        if w.flags & FOLL_DUMP:
            return fail(w, EFAULT, WHY_HOLE)
        if pfn != m.zero_pfn:
            if w.flags & FOLL_TOUCH:
                mark_touched(w, entry, e)
            return fail(w, EEXIST, WHY_SPECIAL)
        page = folio = &m.map[pfn]
    if not e & PTE_RW and must_unshare(w, v, folio, page):
        return GUP_UNSHARE
    if mm_unlikely(test_flag(&m.map[pfn], PG_hwpoison)):
        return poisoned(w, pfn)
    error = grab_leaf(w, pfn, 1, &head, &large)
    if mm_unlikely(error != 0):
        return grab_failed(w, error)
    if w.flags & FOLL_TOUCH:
        if w.flags & FOLL_WRITE and not e & PTE_DIRTY and not test_flag(folio, PG_dirty) and pfn != m.zero_pfn:
            mark_dirty(m, head)
        if not test_flag(folio, PG_referenced):
            set_flag(folio, PG_referenced)
    note_leaf(w, pfn, 1)
    w.addr += ONE << m.page_shift
    return 0

cdef int follow_ptes(gup_t *w, const vma_t *v, uint64_t *entry, uint64_t table, uint64_t end) noexcept nogil:
    """The entries of one table from w.addr on; one of them for acquire="page"."""
    cdef int error = 0
    table_lock(w.m, table)
    while w.addr < end:
        if not leaf_room(w):
            error = fail(w, ENOMEM, WHY_NO_MEMORY)
            break
        error = follow_pte(w, v, entry)
        if error:
            break
        w.leaf_walks += 1
        entry += 1
        if w.page_by_page:
            break
    table_unlock(w.m, table)
    return error

cdef int follow_leaf(gup_t *w, const vma_t *v, uint64_t *entry, uint64_t table, int level, uint64_t end) noexcept nogil:
    """The pages that a PMD or PUD leaf maps from w.addr up to end, in one update; one page for acquire="page"."""
    cdef mem_t *m = w.m
    cdef uint64_t e, pfn, n = 1 if w.page_by_page else (end - w.addr) >> m.page_shift, head, step, i = 0
    cdef page_t *folio
    cdef bint large, normal
    cdef int error = 0
    if not leaf_room(w):
        return fail(w, ENOMEM, WHY_NO_MEMORY)
    table_lock(m, table)
    e = a64_load_acquire(entry)
    if not pte_leaf(e, level):
        table_unlock(m, table)
        return 0        # split, or gone: look again
    pfn = pte_pfn(e) + ((w.addr & (level_size(&w.mm.pgd, level) - 1)) >> m.page_shift)
    folio = &m.map[compound_head_pfn(m.map, pfn)] if pfn < m.nr_pages else NULL
    normal = folio != NULL and not e & PTE_SPECIAL
    if w.flags & FOLL_WRITE and not can_follow_write(w, v, e, folio, folio if normal else NULL):
        error = GUP_MISS
    elif not normal and (folio == NULL or pte_pfn(e) != m.huge_zero_pfn):
        error = fail(w, EEXIST, WHY_SPECIAL)
    elif not normal and w.flags & FOLL_DUMP:
        error = fail(w, EFAULT, WHY_HOLE)
    elif numa_hint(w, v, e):
        error = GUP_MISS
    elif not e & PTE_RW and must_unshare(w, v, folio, folio):
        error = GUP_UNSHARE
    else:
        # Base pages of a device behind one leaf have counts of their own.
        step = n if counts_mappings(m, pfn) else 1
        if step > 1 and mm_unlikely((a64_load_relaxed(&as_folio(folio)._flags_1) >> PG_has_hwpoisoned) & 1):
            step = 1
        while i < n:
            if mm_unlikely(test_flag(&m.map[pfn + i], PG_hwpoison)):
                error = poisoned(w, pfn + i)
                break
            if not leaf_room(w):
                error = fail(w, ENOMEM, WHY_NO_MEMORY)
                break
            error = grab_leaf(w, pfn + i, step, &head, &large)
            if mm_unlikely(error != 0):
                error = grab_failed(w, error)
                break
            note_leaf(w, pfn + i, step)
            i += step
        w.leaf_walks += 1
        w.addr += i << m.page_shift
        if i and w.flags & FOLL_TOUCH:
            mark_touched(w, entry, e)
    table_unlock(m, table)
    return error

cdef int follow(gup_t *w, vma_t *v, uint64_t end) noexcept nogil:
    """Take what the tables have from w.addr on, up to the end of one table or leaf. 0: go on at w.addr."""
    cdef pgd_t *g = &w.mm.pgd
    cdef int level = 0
    cdef uint64_t table, e
    cdef uint64_t *entry = walk_find(g, w.addr, &level, &table)
    if level > 0:
        e = a64_load_acquire(entry)
        if pte_leaf(e, level):
            # A device's leaf is no THP: its pages cannot be mapped one by one.
            if level == 1 and w.flags & FOLL_SPLIT_PMD and (v.file == NULL or v.file.device == NULL):
                return fail(w, ENOMEM, WHY_NO_MEMORY) if split_leaf(w.mm, v, w.addr) else 0
            return follow_leaf(w, v, entry, table, level, level_end(g, w.addr, end, level))
        return hole(w, v) if e == 0 else GUP_MISS
    return follow_ptes(w, v, entry, table, level_end(g, w.addr, end, 1))

# ---- faulting in --------------------------------------------------------------------------------------------------------------
cdef bint needs_io(gup_t *w, const vma_t *v) noexcept nogil:
    """Would bringing in this page wait for a disk?"""
    cdef int level = 0
    cdef uint64_t table, index, e = a64_load_acquire(walk_find(&w.mm.pgd, w.addr, &level, &table))
    cdef bint io = False
    if pte_swap(e):
        return swp_type(e) == SWP_TYPE_SWAP
    if e == 0 and v.file != NULL and (v.file.kind == FILE_EXT4 or v.file.kind == FILE_TMPFS):
        index = page_index(w.mm, v, w.addr)
        pthread_mutex_lock(&v.file.lock)
        if file_look(v.file, index) == 0 and index < v.file.nr_entries:
            io = (v.file.on_disk != NULL and v.file.on_disk[index]) or (v.file.cache[index] & CACHE_SWAP) != 0
        pthread_mutex_unlock(&v.file.lock)
    return io

cdef int faultin(gup_t *w, vma_t *v, bint unshare) noexcept nogil:
    """0: look again. Else the errno that ends the walk; GUP_MISS when FOLL_NOWAIT forbids to wait for what was started."""
    cdef unsigned flags = FAULT_FLAG_WRITE if w.flags & FOLL_WRITE else 0
    cdef bint io = False
    cdef int error
    if w.flags & FOLL_NOFAULT:
        return fail(w, EFAULT, WHY_NOFAULT)
    if w.flags & FOLL_NOWAIT:
        io = needs_io(w, v)
    error = handle_mm_fault(w.mm, v, w.addr, FAULT_FLAG_UNSHARE if unshare else flags)
    if error == 0:
        # The read was started; the one who asked does not wait for its end.
        return GUP_MISS if io else 0
    if error == -ENOMEM:
        return fail(w, ENOMEM, WHY_NO_MEMORY)
    if error == -EHWPOISON:
        return poisoned(w, 0)
    return fail(w, EFAULT, WHY_SIGSEGV if error == FAULT_SIGSEGV else WHY_SIGBUS)

cdef bint signalled() noexcept nogil:
    cdef bint stop
    with gil:
        stop = PyErr_CheckSignals() != 0
    return stop

cdef void gup_slow(gup_t *w) noexcept nogil:
    cdef vma_t *v = NULL
    cdef uint64_t tries = 0, faults = 0, before
    cdef int error = 0
    while w.addr < w.end:
        if v == NULL or w.addr >= v.end:
            v = vma_lookup(w.mm, w.addr)
            error = fail(w, EFAULT, WHY_NO_VMA) if v == NULL else check_vma_flags(w, v)
            if error:
                break
        before = w.addr
        error = follow(w, v, min(w.end, v.end))
        if error == 0:
            tries = 0 if w.addr != before else tries + 1
            if tries > MAX_TRIES:
                error = fail(w, EFAULT, WHY_BUSY)
                break
            continue
        if error != GUP_MISS and error != GUP_UNSHARE:
            break
        faults += 1
        tries = 1 if w.addr != before else tries + 1
        if mm_unlikely(tries > MAX_TRIES):
            error = fail(w, EFAULT, WHY_BUSY)
            break
        if mm_unlikely(tries & 15 == 15):
            sched_yield()       # somebody else works on this entry
        if mm_unlikely(faults % SIGNAL_EVERY == 0) and signalled():
            error = fail(w, EINTR, WHY_SIGNAL)
            break
        error = faultin(w, v, error == GUP_UNSHARE)
        if error:
            if error == GUP_MISS:
                error = fail(w, 0, WHY_NOWAIT)
            break
    w.error = error
    count_walk(w)
