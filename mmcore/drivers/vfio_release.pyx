"""Releasing pages of DMA mappings."""
from libc.errno cimport ENOMEM
from libc.string cimport memset
from mmcore.core.folio cimport FREED, bad_page, free_folio, put_pins
from mmcore.core.hook cimport pins_add
from mmcore.core.lock cimport lock_wait, mark_dirty, raise_pending, unlock

from ..core.errors import BadPage

cdef enum:
    FAR = 8                     # groups that a walk looks ahead

# ---- accounting ------------------------------------------------------------------------------------------------------
cdef int lock_acct(dma_t *d, int64_t npage) noexcept nogil:
    """Charge the mm that mapped it, or take a charge back; the capability lifts the limit, it does not stop
    counting.
    """
    cdef uint64_t now
    if npage == 0:
        return 0
    if a32_load_relaxed(&d.mm.exited):
        return 0                # its charge went with it (-ESRCH, which callers ignore)
    now = a64_load_relaxed(&d.mm.locked_vm)
    if npage < 0:
        a64_fetch_add_relaxed(&d.mm.locked_vm, <uint64_t>npage)
    else:
        while True:
            if not d.lock_cap and now + <uint64_t>npage > d.limit:
                return -ENOMEM
            if a64_cas_acq_rel(&d.mm.locked_vm, &now, now + <uint64_t>npage):
                break
    d.locked_vm += npage
    return 0

# ---- one group -------------------------------------------------------------------------------------------------------
cdef void dirty_folio(putting_t *u, uint64_t head) noexcept nogil:
    """set_page_dirty_lock, unless somebody marked it already; that look is without the lock, as in the kernel."""
    if test_flag(&u.m.map[head], PG_dirty) or head == u.m.zero_pfn:
        return
    if lock_wait(u.m, head) == 0:
        mark_dirty(u.m, head)
        unlock(u.m, head)
    else:
        # A release is finished whatever a signal handler raises; the page is ours by its pin.
        mark_dirty(u.m, head)
        u.interrupted = True

cdef inline void put_group(putting_t *u, uint64_t head, bint large, uint64_t count, bint dirty) noexcept nogil:
    cdef page_t *page = &u.m.map[head]
    cdef int result
    if mm_unlikely(head == u.m.zero_pfn):
        return
    if dirty and not test_flag(page, PG_dirty):
        dirty_folio(u, head)
    result = put_pins(u.m, page, large, count)
    if mm_unlikely(result != 0):
        if result != FREED:
            if u.bad == 0:
                u.bad, u.bad_pfn, u.bad_count = result, head, count
            return
        free_folio(u.m, head, folio_order_of(page) if large else 0)
    u.pages += count
    u.updates += 1
    u.large += large

# ---- the generations -------------------------------------------------------------------------------------------------
cdef uint64_t put_by_page(putting_t *u, uint64_t pfn, uint64_t n, bint dirty) noexcept nogil:
    cdef uint64_t i, head, released = 0
    for i in range(n):
        if is_invalid_reserved_pfn(u.m, pfn + i):
            continue
        head = compound_head_pfn(u.m.map, pfn + i)
        put_group(u, head, page_is_head(&u.m.map[head]), 1, dirty)
        released += 1
    u.lookups += n
    return released

cdef inline uint64_t put_folio_of(putting_t *u, uint64_t pfn, uint64_t n, bint dirty) noexcept nogil:
    """The pages from pfn on that are in its folio, at most n."""
    cdef page_t *page = &u.m.map[pfn]
    cdef group_t g
    u.lookups += 1
    # A small folio by itself: most have nothing to group, and cost what one page at a time costs.
    if not (a64_load_relaxed(&page.compound_info) & 1 or page_is_head(page)):
        put_group(u, pfn, False, 1, dirty)
        return 1
    next_in_range(u.m.map, pfn, n, &g)
    if FAR * g.count < n:
        prefetch_write(&u.m.map[pfn + FAR * g.count])
    put_group(u, g.head, True, g.count, dirty)
    return g.count

cdef uint64_t put_by_folio(putting_t *u, uint64_t pfn, uint64_t n, bint dirty) noexcept nogil:
    cdef uint64_t i = 0, done, released = 0
    while i < n:
        if is_invalid_reserved_pfn(u.m, pfn + i):
            i += 1
            continue
        done = put_folio_of(u, pfn + i, n - i, dirty)
        released += done
        i += done
    return released

cdef uint64_t put_by_range(putting_t *u, uint64_t pfn, uint64_t n, bint dirty) noexcept nogil:
    cdef uint64_t i = 0
    while i < n:
        i += put_folio_of(u, pfn + i, n - i, dirty)
    return n

cdef void log_groups(putting_t *u, uint64_t pfn, uint64_t n) noexcept nogil:
    """Note the folios before they lose their pins: after, some may be gone."""
    cdef uint64_t i = 0
    cdef group_t g
    while i < n:
        if is_invalid_reserved_pfn(u.m, pfn + i):
            i += 1
            continue
        next_in_range(u.m.map, pfn + i, n - i, &g)
        pins_add(u.log, g.head, g.count)
        i += g.count

cdef uint64_t put_pfns(putting_t *u, const dma_t *d, uint64_t pfn, uint64_t n, int how) noexcept nogil:
    """Drop a pin of each page; how many of them were pages that had one."""
    cdef bint dirty = (d.prot & DMA_WRITE) != 0
    if mm_unlikely(u.log != NULL):
        log_groups(u, pfn, n)
    if how == RELEASE_RANGE and not d.has_rsvd:
        return put_by_range(u, pfn, n, dirty)
    if how == RELEASE_FOLIO:
        return put_by_folio(u, pfn, n, dirty)
    return put_by_page(u, pfn, n, dirty)

cdef uint64_t unpin_pages_remote(putting_t *u, dma_t *d, uint64_t iova, uint64_t pfn, uint64_t npage,
                                 bint do_accounting) noexcept nogil:
    """Release a chunk. Pages that are pinned externally at the same IOVA stay charged, on behalf of that pin."""
    cdef uint64_t unlocked
    cdef int64_t locked
    if mm_unlikely(u.m.debug) and u.domain != NULL and a64_load_relaxed(&u.domain.stale):
        u.early += npage
    unlocked = put_pfns(u, d, pfn, npage, u.how)
    if do_accounting and unlocked:
        locked = vpfn_pages(d, iova, npage)
        lock_acct(d, locked - <int64_t>unlocked)
    return unlocked

# ---- a call ----------------------------------------------------------------------------------------------------------
cdef void putting_begin(putting_t *u, mem_t *m, int how, pins_t *log) noexcept nogil:
    memset(u, 0, sizeof(putting_t))
    u.m = m
    u.how = how
    u.log = log

cdef void putting_end(putting_t *u) noexcept nogil:
    if u.pages:
        stat_add(u.m, NR_FOLL_PIN_RELEASED, <int64_t>u.pages)
        stat_add(u.m, OP_REF_ATOMICS, <int64_t>u.updates)
    if u.large:
        stat_add(u.m, OP_PINCOUNT_ATOMICS, <int64_t>u.large)
    if u.lookups:
        stat_add(u.m, OP_HEAD_LOOKUPS, <int64_t>u.lookups)
    u.pages = u.updates = u.large = u.lookups = 0

cdef object putting_failed(Memory mem, putting_t *u, str call):
    if u.interrupted:
        raise_pending()
    if u.bad:
        error = bad_page(mem, u.bad, u.bad_pfn, u.bad_count, call)
        raise BadPage(error.law, f"{error.reason.partition('. Nothing')[0]}. What was to go is gone all the same, "
                                 "and all other pages were unpinned", pfn=error.pfn)
    if u.early:
        raise BadPage("unpin after the IOTLB flush", f"{call}: {u.early} pages were unpinned while a device could "
                                                     "still reach them")
