"""Longterm eligibility and migration.

Units: lists of pages in, heads of folios out.
Raises: TypeError, InvalidArgument, MMError(ENOMEM, EBUSY).
Threads: any number at once.
Kernel: check_and_migrate_movable_pages(), migrate_longterm_unpinnable_folios().
"""
from libc.errno cimport EAGAIN, EBUSY, EINTR, ENOMEM
from libc.stdlib cimport free
from libc.string cimport memcpy, memset
from mmcore.core.buddy cimport alloc_folio, alloc_hugetlb, free_folio
from mmcore.core.folio cimport *
from mmcore.core.gup_walk cimport WHY_COHERENT, WHY_MIGRATE, WHY_NO_MEMORY, WHY_SIGNAL
from mmcore.core.lock cimport lock_wait, raise_pending, unlock
from mmcore.core.output cimport leaf_count, leaf_pfn, release_leaves
from mmcore.core.pagelist cimport PageList, PageRanges, as_pages, filling, new_pagelist
from mmcore.core.pgtable cimport *
from mmcore.core.rmap cimport rmap_walk_anon, rmap_walk_file
from mmcore.core.space cimport *
from mmcore.core.unpin cimport folio_at, run_length

import errno as _errno

from .errors import InvalidArgument, MMError

__all__ = ["longterm_unpinnable", "migrate_folio_longterm"]

cdef extern from "<sched.h>" nogil:
    int sched_yield()

cdef enum:
    TRIES = 10                  # the kernel's migrate_pages() comes back as often
    WAITS = 100000              # for somebody else who moves a folio
    SPINS = 2000                # for a table's lock, before all of them are given back
    REGION_NORMAL = 1           # a bit a region: the first one is Normal memory outside of CMA

# ---- where a folio is mapped, with all tables locked ------------------------------------------------------------------
cdef struct place_t:
    uint64_t *entry

cdef struct move_t:
    mem_t *m
    uint64_t head
    uint64_t nr                 # pages of the folio
    place_t *place              # entries that map it
    uint64_t nr_places
    uint64_t places_room
    uint64_t *table             # tables whose locks we hold
    uint64_t nr_tables
    uint64_t tables_room
    int error                   # -EAGAIN: somebody else works on a table; -ENOMEM

cdef bint hold_table(move_t *v, uint64_t table) noexcept nogil:
    """Hold a table's lock, one we have already included."""
    cdef uint64_t i
    cdef int spins = 0
    for i in range(v.nr_tables):
        if v.table[i] == table:
            return True
    if not grow(v.m, <void **>&v.table, &v.tables_room, v.nr_tables + 1, sizeof(uint64_t)):
        v.error = -ENOMEM
        return False
    while a64_fetch_or_acquire(&v.m.map[table].private, 1) & 1:
        spins += 1
        if spins == SPINS:
            v.error = -EAGAIN
            return False
        cpu_relax()
    v.table[v.nr_tables] = table
    v.nr_tables += 1
    return True

cdef inline bint maps_it(const move_t *v, uint64_t e) noexcept nogil:
    return pte_present(e) and not e & PTE_SPECIAL and pte_pfn(e) - v.head < v.nr

cdef bint note_place(move_t *v, uint64_t *entry) noexcept nogil:
    if not grow(v.m, <void **>&v.place, &v.places_room, v.nr_places + 1, sizeof(place_t)):
        v.error = -ENOMEM
        return False
    v.place[v.nr_places].entry = entry
    v.nr_places += 1
    return True

cdef bint places_in_table(move_t *v, uint64_t table, uint64_t *entry, uint64_t nr) noexcept nogil:
    """Note which of nr entries of one table map the folio. The lock is kept when there are any."""
    cdef uint64_t i, before = v.nr_places, held = v.nr_tables
    if not hold_table(v, table):
        return False
    for i in range(nr):
        if maps_it(v, a64_load_acquire(&entry[i])) and not note_place(v, &entry[i]):
            return False
    if v.nr_places == before and v.nr_tables > held:
        v.nr_tables -= 1
        table_unlock(v.m, table)
    return True

cdef int collect_places(mm_t *mm, vma_t *vma, uint64_t addr, uint64_t first, uint64_t nr, void *arg) noexcept nogil:
    """rmap_fn: lock what maps the folio in a stretch of a VMA, and note where."""
    cdef move_t *v = <move_t *>arg
    cdef pgd_t *g = &mm.pgd
    cdef uint64_t end = addr + (nr << mm.m.page_shift), next, table, e
    cdef uint64_t *entry
    cdef int level, token = walk_enter(g)
    while addr < end and v.error == 0:
        level = 0
        entry = walk_find(g, addr, &level, &table)
        next = level_end(g, addr, end, level if level else 1)
        if level == 0:
            places_in_table(v, table, entry, (next - addr) >> mm.m.page_shift)
        else:
            e = a64_load_acquire(entry)
            if pte_leaf(e, level) and maps_it(v, e):
                places_in_table(v, table, entry, 1)
        addr = next
    # A table that holds an entry is never freed, and these entries stay as long as its lock is ours.
    walk_leave(g, token)
    return v.error

cdef void let_go(move_t *v) noexcept nogil:
    cdef uint64_t i
    for i in range(v.nr_tables):
        table_unlock(v.m, v.table[i])
    v.nr_tables = v.nr_places = 0
    v.error = 0

# ---- the move itself ----------------------------------------------------------------------------------------------------
cdef extern from *:
    """
    /* What a folio keeps when it moves: all but what belongs to the frame (lock, zone, head, poison). */
    #define MM_MOVING_FLAGS ((1ULL << 2) | (1ULL << 3) | (1ULL << 4) | (1ULL << 8) | (1ULL << 9) | (1ULL << 10) | (1ULL << 11) \
                             | (1ULL << 16) | (1ULL << 17) | (1ULL << 18) | (1ULL << 19) | (1ULL << 20) | (1ULL << 22) | (1ULL << 23))
    """
    const uint64_t MOVING_FLAGS "MM_MOVING_FLAGS"
    # PG_referenced, uptodate, dirty, active, workingset, owner_priv_1, owner_2, reclaim, swapbacked, unevictable,
    # dropbehind, mlocked, young, idle

cdef void move_page(mem_t *m, uint64_t to, uint64_t source) noexcept nogil:
    """Bytes, map count and marks of one page."""
    cdef uint64_t flags = a64_load_relaxed(&m.map[source].flags)
    if flags >> PG_mm_written & 1:
        memcpy(page_bytes(m, to), m.bytes + (source << m.page_shift), ONE << m.page_shift)
    a64_fetch_or_relaxed(&m.map[to].flags, flags & (ONE << PG_owner_2))
    if not page_has_type(&m.map[source]):
        a32_store_relaxed(&m.map[to]._mapcount, a32_load_relaxed(&m.map[source]._mapcount))

cdef void move_state(mem_t *m, uint64_t to, uint64_t source, uint64_t nr) noexcept nogil:
    cdef page_t *new = &m.map[to]
    cdef page_t *old = &m.map[source]
    cdef folio_t *a = as_folio(new)
    cdef folio_t *b = as_folio(old)
    cdef uint64_t i
    for i in range(nr):
        move_page(m, to + i, source + i)
    a64_fetch_or_relaxed(&new.flags, a64_load_relaxed(&old.flags) & MOVING_FLAGS)
    a64_store_relaxed(&new.index, a64_load_relaxed(&old.index))
    a64_store_relaxed(&new.private, 0 if folio_is_hugetlb(old) else a64_load_relaxed(&old.private))
    a64_store_release(&new.mapping, a64_load_relaxed(&old.mapping))
    if nr > 1:
        a64_fetch_or_relaxed(&a._flags_1, a64_load_relaxed(&b._flags_1) & ((ONE << PG_partially_mapped) | (ONE << PG_mm_tails)))
        a._large_mapcount = b._large_mapcount
        a._nr_pages_mapped = b._nr_pages_mapped
        a._entire_mapcount = b._entire_mapcount
    # The old frame: nothing of the file's or the mappings' is left on it; dirt is not dropped, it moved.
    a64_fetch_and_acq_rel(&old.flags, ~(MOVING_FLAGS | (ONE << PG_locked) | (ONE << PG_waiters) | (ONE << PG_mm_isolated)))
    a64_store_relaxed(&old.mapping, 0)
    a64_store_relaxed(&old.private, 0)
    if nr > 1:
        b._large_mapcount = b._entire_mapcount = -1
        b._nr_pages_mapped = 0
    for i in range(nr):
        a64_fetch_and_acq_rel(&m.map[source + i].flags, ~(ONE << PG_owner_2))
        if not page_has_type(&m.map[source + i]):
            a32_store_relaxed(&m.map[source + i]._mapcount, <uint32_t>-1)

cdef void repoint(move_t *v, uint64_t to) noexcept nogil:
    """Make every entry name the new frames. Accessed and dirty may be set by the processor meanwhile: they are kept."""
    cdef uint64_t i, e, new
    for i in range(v.nr_places):
        e = a64_load_relaxed(v.place[i].entry)
        while True:
            new = (e & ~PTE_PFN_MASK) | ((to + pte_pfn(e) - v.head) << PTE_PFN_SHIFT)
            if a64_cas_acq_rel(v.place[i].entry, &e, new):
                break

cdef int try_move(move_t *v, uint64_t to, file_t *f) noexcept nogil:
    """All tables are held: freeze, copy, repoint. 0 or -EAGAIN with nothing changed. f.lock is held for a file's folio."""
    cdef mem_t *m = v.m
    cdef page_t *old = &m.map[v.head]
    cdef uint64_t refs, i
    cdef uint32_t expected
    if <int64_t>v.nr_places != folio_mapcount_of(old) or test_flag(old, PG_writeback):
        return -EAGAIN
    if v.nr > 1 and pincount_load(old) != 0:
        return -EAGAIN          # what the caller holds is a pin
    refs = v.nr_places + (v.nr if f != NULL else 0)
    expected = <uint32_t>refs + 1
    # A pin may be the caller's one reference: then the count is as expected, and the folio stays all the same.
    if (page_is_head(old) and pincount_load(old) != 0) or not a32_cas_acq_rel(&old._refcount, &expected, 0):
        return -EAGAIN
    move_state(m, to, v.head, v.nr)
    if f != NULL:
        if f.order:
            f.cache[a64_load_relaxed(&m.map[to].index) >> f.order] = to
        else:
            for i in range(v.nr):
                f.cache[a64_load_relaxed(&m.map[to].index) + i] = to + i
    a32_store_release(&m.map[to]._refcount, <uint32_t>refs + 1)
    repoint(v, to)
    return 0

cdef int attempt(move_t *v, uint64_t to) noexcept nogil:
    """One try, under the folio lock: 0, -EAGAIN, -ENOMEM."""
    cdef mem_t *m = v.m
    cdef uint64_t mapping = a64_load_relaxed(&m.map[v.head].mapping)
    cdef file_t *f = NULL
    cdef int error
    if mapping == 0 or mapping & FOLIO_MAPPING_ANON:
        if mapping:
            rmap_walk_anon(m, mapping, a64_load_relaxed(&m.map[v.head].index), v.nr, collect_places, v)
        error = v.error if v.error else try_move(v, to, NULL)
        let_go(v)
        return error
    f = file_get(m, mapping)
    if f == NULL:
        return -EAGAIN
    pthread_mutex_lock(&f.lock)
    if a64_load_relaxed(&m.map[v.head].mapping) != mapping:
        error = -EAGAIN         # truncated while we waited
    else:
        rmap_walk_file(f, a64_load_relaxed(&m.map[v.head].index), v.nr, collect_places, v)
        error = v.error if v.error else try_move(v, to, f)
    let_go(v)
    pthread_mutex_unlock(&f.lock)
    return error

cdef uint64_t target_alloc(mem_t *m, unsigned order, bint hugetlb) noexcept nogil:
    """A folio of this size that a longterm pin may keep, with one reference; or 0."""
    cdef uint64_t pfn
    if inject_fails(m, INJECT_MIGRATE):
        return 0
    if not hugetlb:
        return alloc_folio(m, REGION_NORMAL, order)
    pfn = alloc_hugetlb(m, order)
    if pfn and not longterm_pinnable(m, pfn):
        target_free(m, pfn, order)
        return 0
    return pfn

cdef void target_free(mem_t *m, uint64_t pfn, unsigned order) noexcept nogil:
    a32_store_release(&m.map[pfn]._refcount, 0)
    free_folio(m, pfn, order)

cdef int migrate_folio(mem_t *m, uint64_t head, uint64_t *target) noexcept nogil:
    cdef page_t *old = &m.map[head]
    cdef unsigned order = folio_order_of(old)
    cdef bint hugetlb = folio_is_hugetlb(old)
    cdef uint64_t new
    cdef move_t v
    cdef int tries, error
    if region_of(m, head) == NULL or head == m.huge_zero_pfn or test_flag(old, PG_reserved) \
            or (page_has_type(old) and not hugetlb) or test_flag(old, PG_hwpoison) \
            or (order and (a64_load_relaxed(&as_folio(old)._flags_1) >> PG_has_hwpoisoned) & 1):
        return -EBUSY
    new = target_alloc(m, order, hugetlb)
    if new == 0:
        return -ENOMEM
    error = lock_wait(m, head)
    if error:
        target_free(m, new, order)
        return error
    memset(&v, 0, sizeof(v))
    v.m = m
    v.head = head
    v.nr = ONE << order
    # Nobody finds the new frames before an entry names them: the count is stored last.
    a32_store_relaxed(&m.map[new]._refcount, 0)
    error = -EAGAIN
    for tries in range(TRIES):
        if tries:
            sched_yield()
        error = attempt(&v, new)
        if error != -EAGAIN:
            break
    free(v.place)
    free(v.table)
    if error:
        unlock(m, head)
        free_folio(m, new, order)
        return error
    # Our reference is the new folio's now. The old count is 0 and its lock bit gone: the frames are ours to free.
    free_folio(m, head, order)
    target[0] = new
    return 0

# ---- which folios must not stay ---------------------------------------------------------------------------------------------
cdef uint64_t unpinnable_run(mem_t *m, uint64_t pfn, uint64_t count, bint page_by_page, uint64_t *heads, uint64_t room,
                             uint64_t *last) noexcept nogil:
    cdef uint64_t k = 0, head, nr_pages, found = 0
    while k < count:
        if page_by_page:
            head = compound_head_pfn(m.map, pfn + k)
            k += 1
        else:
            nr_pages = folio_at(m.map, pfn + k, &head)
            k += remaining_pages(head, nr_pages, pfn + k, count - k)
        if mm_likely(longterm_pinnable(m, head)) or head == last[0]:
            continue
        last[0] = head
        if found < room:
            heads[found] = head
        found += 1
    return found

cdef uint64_t unpinnable(mem_t *m, const uint64_t *leaf, uint64_t nr, bint page_by_page, uint64_t *heads, uint64_t room) noexcept nogil:
    cdef uint64_t i, found = 0, last = 0
    for i in range(nr):
        found += unpinnable_run(m, leaf_pfn(leaf[i]), leaf_count(leaf[i]), page_by_page, heads + min(found, room),
                                room - min(found, room), &last)
    return found

cdef void put_one(mem_t *m, uint64_t head) noexcept nogil:
    cdef page_t *page = &m.map[head]
    if put_refs(m, page, page_is_head(page), 1) == FREED:
        free_folio(m, head, folio_order_of(page))

cdef int move_all(mem_t *m, const uint64_t *heads, uint64_t nr, uint64_t *bad, int *why) noexcept nogil:
    """Move folios that were isolated, and given a reference each; it goes. The first failure is told, and ends the moving."""
    cdef uint64_t i, new
    cdef int error = 0, failed = 0
    for i in range(nr):
        error = failed
        if failed == 0:
            error = migrate_folio(m, heads[i], &new)
            if error == 0:
                put_one(m, new)
                continue
            failed = error
            bad[0] = heads[i]
            if error == -EINTR:
                why[0] = WHY_SIGNAL
            elif error == -EBUSY and region_of(m, heads[i]) == NULL:
                why[0] = WHY_COHERENT
            else:
                # Whatever it was, the kernel says that there was no memory.
                why[0] = WHY_NO_MEMORY if error == -ENOMEM else WHY_MIGRATE
                failed = -ENOMEM
        clear_flag(&m.map[heads[i]], PG_mm_isolated)
        put_one(m, heads[i])
    return failed

cdef void wait_moved(mem_t *m, uint64_t head) noexcept nogil:
    """Until somebody else has moved a folio, or given up; a bound, since its frame may be isolated again. Takes no reference."""
    cdef int _turn
    for _turn in range(WAITS):
        if not test_flag(&m.map[head], PG_mm_isolated):
            break
        cpu_relax()
        sched_yield()

cdef int check_and_migrate(mem_t *m, const uint64_t *leaf, uint64_t nr, bint page_by_page, uint64_t *bad, int *why) noexcept nogil:
    """check_and_migrate_movable_pages: see the laws for what its three results mean."""
    cdef uint64_t found = unpinnable(m, leaf, nr, page_by_page, NULL, 0), i, kept = 0, other = 0
    cdef uint64_t *heads
    cdef int error
    if mm_likely(found == 0):
        return 0
    heads = <uint64_t *>mem_malloc(m, found * sizeof(uint64_t))
    if heads == NULL:
        release_leaves(m, leaf, nr, True)
        why[0] = WHY_NO_MEMORY
        return -ENOMEM
    found = min(found, unpinnable(m, leaf, nr, page_by_page, heads, found))
    for i in range(found):
        # Once each: a file's page may be mapped twice in the range, and others may want the same folio moved; a reference
        # of theirs would keep it where it is.
        if a64_fetch_or_acq_rel(&m.map[heads[i]].flags, ONE << PG_mm_isolated) >> PG_mm_isolated & 1:
            other = heads[i]
        # A reference of our own before the pins go: with the last of them the folio might.
        elif ref_add_positive(&m.map[heads[i]], 1):
            heads[kept] = heads[i]
            kept += 1
        else:
            clear_flag(&m.map[heads[i]], PG_mm_isolated)
    release_leaves(m, leaf, nr, True)
    error = move_all(m, heads, kept, bad, why)
    free(heads)
    if kept == 0 and other:
        wait_moved(m, other)
    return error if error else -EAGAIN


# ---- the Python face ----------------------------------------------------------------------------------------------------------
def longterm_unpinnable(pages, *, acquire="leaf"):
    """Return the heads (a PageList) of the folios of a list that a longterm pin would have to move, or could not take.

    acquire: "leaf" looks once a folio, as check_and_migrate_cma_pages with the compound iterator; "page" once a page, as
    before. Neighbours that are one folio are named once. The caller holds references.
    """
    cdef PageList plist, found
    cdef PageRanges ranges
    cdef Memory mem
    cdef bint by_page = by_page_arg(acquire)
    cdef uint64_t total = 0
    cdef uint64_t *heads
    pages = as_pages(pages)
    mem = pages.mem
    if isinstance(pages, PageRanges):
        ranges = pages
        plist = ranges.starts
    else:
        ranges = None
        plist = pages
    cdef const uint64_t *count = NULL
    if ranges is not None:
        count = ranges.count
    cdef mem_t *m = mem.enter()
    try:
        total = count_unpinnable(m, plist.p, count, plist.n, by_page, NULL)
        found = new_pagelist(mem, total)
        if total:
            heads = filling(found)
            count_unpinnable(m, plist.p, count, plist.n, by_page, heads)
    finally:
        mem.leave()
    return found

cdef uint64_t count_unpinnable(mem_t *m, const uint64_t *pfn, const uint64_t *count, uint64_t n, bint by_page,
                               uint64_t *heads) noexcept:
    """The heads of a list (count NULL) or of runs; only their number when heads is NULL."""
    cdef uint64_t i = 0, head, nr_pages, total = 0, last = 0
    with nogil:
        while i < n:
            if pfn[i] == 0:
                i += 1
                continue
            if count != NULL:
                total += unpinnable_run(m, pfn[i], count[i], by_page, heads + total, 0 if heads == NULL else count[i], &last)
                i += 1
                continue
            if by_page:
                head = compound_head_pfn(m.map, pfn[i])
                i += 1
            else:
                nr_pages = folio_at(m.map, pfn[i], &head)
                i += run_length(pfn + i, n - i, head, nr_pages)
            if mm_likely(longterm_pinnable(m, head)) or head == last:
                continue
            last = head
            if heads != NULL:
                heads[total] = head
            total += 1
    return total

cdef bint by_page_arg(object acquire) except -1:
    if acquire == "leaf":
        return False
    if acquire == "page":
        return True
    raise InvalidArgument(f"acquire={acquire!r} is none of 'leaf', 'page'")


def migrate_folio_longterm(folio):
    """Move a folio to memory where it may be pinned for long; returns the new Folio. Its bytes and mappings move with it.

    The caller holds one reference on the old folio, and then one on the new one. Raises MMError:
    ENOMEM when there is no block of its size outside of Movable and CMA, EAGAIN when somebody else holds or pins it, EBUSY
    for device memory, the zero pages and broken pages. The kernel does this for FOLL_LONGTERM, in migrate_pages().
    """
    cdef uint64_t pfn, new = 0
    cdef Memory mem = folio_arg(folio, &pfn, True)
    cdef mem_t *m = mem.enter()
    cdef int error
    with nogil:
        error = migrate_folio(m, pfn, &new)
    mem.leave()
    if error == -EINTR:
        raise_pending()
    if error:
        raise migrate_error(mem, error, pfn)
    return folio_handle(mem, new)

cdef object migrate_error(Memory mem, int error, uint64_t pfn):
    cdef page_t *head = &mem.m.map[pfn]
    order = folio_order_of(head)
    if error == -ENOMEM:
        return MMError(_errno.ENOMEM, f"no free block of order {order} outside of Movable and CMA to move PFN {pfn:#x} to: free "
                                      "Normal memory, or make less of it Movable", pfn=pfn)
    if error == -EAGAIN:
        return MMError(_errno.EAGAIN, f"the folio at PFN {pfn:#x} (refcount {<int32_t>refs_load(head)}, {folio_mapcount_of(head)} "
                                      "mappings) is held by more than its mappings and its file: release that first", pfn=pfn)
    return MMError(_errno.EBUSY, f"PFN {pfn:#x} cannot be moved: it is device memory, a zero page, reserved, or broken", pfn=pfn)
