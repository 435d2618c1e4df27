"""Take and give back frames; folio_alloc, alloc_page, and folios at given frames.

Units: order: int, log2 of base pages; zone: str or None; PFNs: ints, or uint64 arrays.
Raises: TypeError and InvalidArgument for arguments that no memory could satisfy, MMError(ENOMEM) when there is no
    block.
Threads: any number at once; a lock a zone's region.
Kernel: folio_alloc(), alloc_pages(), alloc_contig_range().
"""
from libc.errno cimport EBUSY, EINVAL, ENOMEM
from libc.string cimport memmove

import errno as _errno

import numpy as np

from .errors import InvalidArgument, MMError
from .size import format_size

__all__ = ["folio_alloc", "alloc_page", "folio_alloc_at", "folios_alloc_at"]

# ---- under the region's lock ----------------------------------------------------------------------------------------
cdef inline void block_set(region_t *r, uint64_t pfn, unsigned order) noexcept nogil:
    bitmap_set(&r.free[order], (pfn - r.base) >> order)
    a64_store_relaxed(&r.nr_blocks[order], r.nr_blocks[order] + 1)

cdef inline void block_clear(region_t *r, uint64_t pfn, unsigned order) noexcept nogil:
    bitmap_clear(&r.free[order], (pfn - r.base) >> order)
    a64_store_relaxed(&r.nr_blocks[order], r.nr_blocks[order] - 1)

cdef inline bint block_test(region_t *r, uint64_t pfn, unsigned order) noexcept nogil:
    return bitmap_test(&r.free[order], (pfn - r.base) >> order)

cdef void forget_ready(mem_t *m, region_t *r, uint64_t pfn, uint64_t nr) noexcept nogil:
    """Write the struct pages of the ready blocks that these frames lie in back to what free frames look like."""
    cdef uint64_t block = (pfn - r.base) >> m.pmd_order
    while r.base + (block << m.pmd_order) < pfn + nr:
        if r.ready[block]:
            r.ready[block] = 0
            r.nr_ready -= 1
            wipe(m, r.base + (block << m.pmd_order), m.pmd_order)
        block += 1

cdef inline void account_taken(mem_t *m, region_t *r, uint64_t pfn, uint64_t nr) noexcept nogil:
    if mm_unlikely(r.nr_ready != 0):
        forget_ready(m, r, pfn, nr)
    a64_store_relaxed(&r.nr_free, r.nr_free - nr)
    if pfn + nr > r.frontier:
        a64_store_relaxed(&r.frontier, pfn + nr)

cdef inline uint64_t first_block(region_t *r, unsigned order) noexcept nogil:
    return r.base + (bitmap_first(&r.free[order]) << order)

cdef uint64_t region_take(mem_t *m, region_t *r, unsigned order) noexcept nogil:
    cdef uint64_t pfn = region_take_ready(m, r, order)
    if pfn and mm_unlikely(r.nr_ready != 0):
        forget_ready(m, r, pfn, ONE << order)
    return pfn

cdef uint64_t region_take_ready(mem_t *m, region_t *r, unsigned order) noexcept nogil:
    """Take a block and leave it to the caller to look whether it is ready."""
    cdef unsigned have = order
    cdef uint64_t pfn
    while have <= m.max_order and r.nr_blocks[have] == 0:
        have += 1
    if have > m.max_order:
        return 0
    pfn = first_block(r, have)
    block_clear(r, pfn, have)
    while have > order:
        have -= 1
        block_set(r, pfn + (ONE << have), have)
    a64_store_relaxed(&r.nr_free, r.nr_free - (ONE << order))
    if pfn + (ONE << order) > r.frontier:
        a64_store_relaxed(&r.frontier, pfn + (ONE << order))
    return pfn

cdef bint region_take_at(mem_t *m, region_t *r, uint64_t pfn, unsigned order) noexcept nogil:
    """Take exactly [pfn, pfn + 2^order), when all of it is free."""
    cdef unsigned have
    cdef uint64_t block, half, step = ONE << m.max_order
    if pfn < r.start or pfn + (ONE << order) > r.end:
        return False
    if order > m.max_order:
        # Larger than any block: every block of the top order in it must be free.
        block = pfn
        while block < pfn + (ONE << order):
            if not block_test(r, block, m.max_order):
                return False
            block += step
        block = pfn
        while block < pfn + (ONE << order):
            block_clear(r, block, m.max_order)
            block += step
    else:
        # Free frames that fill an aligned block are one block, of this order or a larger one.
        have = order
        while True:
            block = (pfn >> have) << have
            if block_test(r, block, have):
                break
            have += 1
            if have > m.max_order:
                return False
        block_clear(r, block, have)
        while have > order:
            have -= 1
            half = block + (ONE << have)
            if pfn >= half:
                block_set(r, block, have)
                block = half
            else:
                block_set(r, half, have)
    account_taken(m, r, pfn, ONE << order)
    return True

cdef void region_put(mem_t *m, region_t *r, uint64_t pfn, unsigned order) noexcept nogil:
    cdef uint64_t other
    a64_store_relaxed(&r.nr_free, r.nr_free + (ONE << order))
    if order > m.max_order:
        other = pfn + (ONE << order)
        while pfn < other:
            block_set(r, pfn, m.max_order)
            pfn += ONE << m.max_order
        return
    while order < m.max_order:
        other = pfn ^ (ONE << order)
        # Bits below start are never set; bits past end may not exist.
        if other + (ONE << order) > r.end or not block_test(r, other, order):
            break
        block_clear(r, other, order)
        pfn &= ~(ONE << order)
        order += 1
    block_set(r, pfn, order)

cdef bint region_is_free(mem_t *m, region_t *r, uint64_t pfn) noexcept nogil:
    cdef unsigned order
    for order in range(m.max_order + 1):
        if block_test(r, (pfn >> order) << order, order):
            return True
    return False

# ---- allocation -----------------------------------------------------------------------------------------------------
cdef uint64_t alloc_frames(mem_t *m, unsigned regions, unsigned order) noexcept nogil:
    """Take a block out of the first region of the set that has one; its struct pages still read as free."""
    cdef int i
    cdef uint64_t pfn
    if mm_unlikely(inject_fails(m, INJECT_FRAME)):
        return 0
    for i in range(m.nr_regions):
        if not (regions >> i) & 1:
            continue
        pthread_mutex_lock(&m.region[i].lock)
        pfn = region_take(m, &m.region[i], order)
        pthread_mutex_unlock(&m.region[i].lock)
        if pfn:
            stat_add(m, PGALLOC, ONE << order)
            return pfn
    return 0

cdef inline void prep_folio(mem_t *m, uint64_t pfn, unsigned order, uint64_t flags) noexcept nogil:
    """Write the struct pages of a block just taken, and publish it with one reference."""
    if order == 0:
        page_init(&m.map[pfn], flags, 1)
    else:
        prep_compound_page(&m.map[pfn], flags, order)
        a32_store_release(&m.map[pfn]._refcount, 1)

cdef uint64_t alloc_folio(mem_t *m, unsigned regions, unsigned order) noexcept nogil:
    cdef uint64_t pfn = alloc_frames(m, regions, order)
    if pfn:
        prep_folio(m, pfn, order, region_of(m, pfn).zone_flags)
    return pfn

cdef hstate_t *pool_of(mem_t *m, unsigned order) noexcept nogil:
    cdef int i
    for i in range(m.nr_pools):
        if m.pool[i].order == order:
            return &m.pool[i]
    return NULL

cdef int reserve_hugetlb(mem_t *m, unsigned order, int64_t nr) noexcept nogil:
    cdef hstate_t *h = pool_of(m, order)
    cdef int error = 0
    pthread_mutex_lock(&h.lock)
    if nr > 0 and h.nr_free < h.nr_resv + <uint64_t>nr:
        error = -ENOMEM
    else:
        h.nr_resv = <uint64_t>(<int64_t>h.nr_resv + nr)
    pthread_mutex_unlock(&h.lock)
    return error

cdef uint64_t alloc_hugetlb(mem_t *m, unsigned order) noexcept nogil:
    return alloc_hugetlb_reserved(m, order, False)

cdef uint64_t alloc_hugetlb_reserved(mem_t *m, unsigned order, bint reserved) noexcept nogil:
    cdef int i
    cdef hstate_t *h
    cdef uint64_t pfn = 0
    if mm_unlikely(inject_fails(m, INJECT_FRAME)):
        return 0
    for i in range(m.nr_pools):
        h = &m.pool[i]
        if h.order != order:
            continue
        pthread_mutex_lock(&h.lock)
        if h.nr_free > (0 if reserved else h.nr_resv):
            a64_store_relaxed(&h.nr_free, h.nr_free - 1)
            pfn = h.free[h.nr_free]
            if reserved:
                h.nr_resv -= 1
        pthread_mutex_unlock(&h.lock)
        break
    if pfn:
        clear_flag(&m.map[pfn], PG_mm_pool)
        a32_store_release(&m.map[pfn]._refcount, 1)
    return pfn

cdef uint64_t alloc_pages(mem_t *m, unsigned regions, uint64_t *pfns, uint64_t nr) noexcept nogil:
    """Allocate small folios, whole blocks at a time; returns how many there were."""
    cdef int i
    cdef region_t *r
    cdef uint64_t got = 0, pfn, size, k, j, flags
    cdef unsigned order
    for i in range(m.nr_regions):
        if not (regions >> i) & 1:
            continue
        r = &m.region[i]
        flags = r.zone_flags
        while got < nr:
            pthread_mutex_lock(&r.lock)
            order = 0
            while order <= m.max_order and r.nr_blocks[order] == 0:
                order += 1
            if order > m.max_order:
                pthread_mutex_unlock(&r.lock)
                break
            pfn = first_block(r, order)
            block_clear(r, pfn, order)
            size = ONE << order
            k = min(size, nr - got)
            account_taken(m, r, pfn, k)
            # What is left of the block goes back in aligned pieces.
            j = k
            while j < size:
                order = <unsigned>ctz64(pfn + j)
                block_set(r, pfn + j, order)
                j += ONE << order
            pthread_mutex_unlock(&r.lock)
            for j in range(k):
                page_init(&m.map[pfn + j], flags, 1)
                pfns[got + j] = pfn + j
            got += k
        if got == nr:
            break
    stat_add(m, PGALLOC, <int64_t>got)
    return got

cdef int alloc_folio_at(mem_t *m, uint64_t pfn, unsigned order, bint hugetlb) noexcept nogil:
    cdef region_t *r = region_of(m, pfn)
    cdef bint taken
    if r == NULL or pfn & ((ONE << order) - 1):
        return -EINVAL
    pthread_mutex_lock(&r.lock)
    taken = region_take_at(m, r, pfn, order)
    pthread_mutex_unlock(&r.lock)
    if not taken:
        return -EBUSY
    stat_add(m, PGALLOC, ONE << order)
    prep_folio(m, pfn, order, r.zone_flags)
    if hugetlb:
        prep_hugetlb_folio(&m.map[pfn])
    return 0

# ---- freeing --------------------------------------------------------------------------------------------------------
cdef void wipe(mem_t *m, uint64_t pfn, unsigned order) noexcept nogil:
    """Write struct pages back to what a free frame looks like; a broken page keeps its mark, and is retired."""
    cdef uint64_t i, zone = a64_load_relaxed(&m.map[pfn].flags) & ~((ONE << ZONE_SHIFT) - 1)
    for i in range(pfn, pfn + (ONE << order)):
        if mm_unlikely(test_flag(&m.map[i], PG_hwpoison)):
            page_init(&m.map[i], zone | (ONE << PG_hwpoison) | (ONE << PG_mm_retired), 0)
        else:
            page_init(&m.map[i], zone, 0)

cdef void free_device_folio(mem_t *m, uint64_t pfn) noexcept nogil:
    """Device memory is never free: generic memory is ready for use again, the others are idle until their driver asks."""
    cdef device_t *d = device_of(m, pfn)
    cdef page_t *head = &m.map[pfn]
    cdef uint64_t keep = ~((ONE << ZONE_SHIFT) - 1) | (ONE << PG_head) | (ONE << PG_hwpoison)
    a64_fetch_and_release(&head.flags, keep)
    if d.type != DEVICE_GENERIC and d.type != DEVICE_FSDAX:
        a64_store_relaxed(&head.mapping, 0)
    if d.type == DEVICE_GENERIC:
        a32_store_release(&head._refcount, 1)

cdef bint free_hugetlb_folio(mem_t *m, uint64_t pfn, unsigned order) noexcept nogil:
    """Put a folio back into its pool; False when it must be broken up instead: surplus, or with a broken page."""
    cdef hstate_t *h = pool_of(m, order)
    cdef page_t *head = &m.map[pfn]
    cdef uint64_t keep = ~((ONE << ZONE_SHIFT) - 1) | (ONE << PG_head)
    cdef uint64_t i
    cdef bint pooled = False
    if h == NULL:
        return False
    pthread_mutex_lock(&h.lock)
    if h.nr_free < h.nr:
        if (a64_load_relaxed(&as_folio(head)._flags_1) >> PG_has_hwpoisoned) & 1:
            h.nr -= 1
        else:
            a64_store_relaxed(&head.mapping, 0)
            a64_store_relaxed(&head.index, 0)
            a64_store_relaxed(&head.private, 0)
            for i in range(1, ONE << order):
                # The next owner must not see the bytes of this one.
                if test_flag(&m.map[pfn + i], PG_mm_written):
                    clear_flag(&m.map[pfn + i], PG_mm_written)
            a64_store_relaxed(&head.flags, (head.flags & keep) | (ONE << PG_mm_pool))
            h.free[h.nr_free] = pfn
            a64_store_relaxed(&h.nr_free, h.nr_free + 1)
            pooled = True
    pthread_mutex_unlock(&h.lock)
    return pooled

cdef void dissolve_pooled(mem_t *m, uint64_t pfn, uint64_t broken) noexcept nogil:
    """Take the folio with this head out of its pool and free its pages, except the broken one."""
    cdef unsigned order = folio_order_of(&m.map[pfn])
    cdef hstate_t *h = pool_of(m, order)
    cdef uint64_t i, word
    cdef bint found = False
    pthread_mutex_lock(&h.lock)
    for i in range(h.nr_free):
        if h.free[i] == pfn:
            # Keeps the order of the stack: lowest PFN first.
            memmove(&h.free[i], &h.free[i + 1], (h.nr_free - i - 1) * sizeof(uint64_t))
            a64_store_relaxed(&h.nr_free, h.nr_free - 1)
            h.nr -= 1
            found = True
            break
    pthread_mutex_unlock(&h.lock)
    if not found:
        return
    set_flag(&m.map[broken], PG_hwpoison)
    wipe(m, pfn, order)
    for i in range(pfn, pfn + (ONE << order)):
        if i != broken:
            word = freed_word(i, 0, True)
            free_folios(m, &word, 1)

cdef inline void put_run(mem_t *m, region_t *r, uint64_t pfn, uint64_t nr) noexcept nogil:
    """Free contiguous frames in the largest aligned blocks."""
    cdef unsigned order
    while nr:
        order = <unsigned>min(<uint64_t>ctz64(pfn), <uint64_t>(63 - clz64(nr)))
        if order > m.max_order:
            order = m.max_order
        region_put(m, r, pfn, order)
        pfn += ONE << order
        nr -= ONE << order

cdef void free_folios(mem_t *m, const uint64_t *freed, uint64_t nr) noexcept nogil:
    """Return folios with refcount 0 to where they came from. Nobody else may know them any more."""
    cdef uint64_t i = 0, j, pfn, word, run, pages = 0
    cdef unsigned order
    cdef region_t *r
    cdef region_t *locked = NULL
    cdef page_t *head
    cdef bint broken
    stat_add(m, NR_FREES, 1)
    while i < nr:
        word = freed[i]
        i += 1
        pfn = word & ((ONE << FREED_CLEAN_SHIFT) - 1)
        order = <unsigned>(word >> FREED_ORDER_SHIFT)
        head = &m.map[pfn]
        r = region_of(m, pfn)
        broken = False
        run = ONE << order
        if mm_likely((word >> FREED_CLEAN_SHIFT) & 1 and r != NULL):
            # Small folios whose struct pages need nothing; neighbours go back as one block.
            while i < nr and freed[i] == word + run and pfn + run < r.end:
                run += 1
                i += 1
        else:
            if mm_unlikely(test_flag(head, PG_dirty) and not folio_is_anon(head)):
                # Freed before it was written: what the kernel's truncation takes off the dirty count.
                stat_add(m, NR_DIRTY, -<int64_t>run)
            if r == NULL:
                free_device_folio(m, pfn)
                continue
            if mm_unlikely(folio_is_hugetlb(head)):
                if locked != NULL:      # a pool's lock comes before a region's
                    pthread_mutex_unlock(&locked.lock)
                    locked = NULL
                if free_hugetlb_folio(m, pfn, order):
                    continue
            broken = test_flag(head, PG_hwpoison) if order == 0 else (a64_load_relaxed(&as_folio(head)._flags_1) >> PG_has_hwpoisoned) & 1
            wipe(m, pfn, order)
        if locked != r:
            if locked != NULL:
                pthread_mutex_unlock(&locked.lock)
            pthread_mutex_lock(&r.lock)
            locked = r
        if mm_unlikely(broken):
            # The broken pages stay out for ever; the others are as good as before.
            for j in range(pfn, pfn + run):
                if not test_flag(&m.map[j], PG_hwpoison):
                    region_put(m, r, j, 0)
                    pages += 1
            continue
        if order > m.max_order:
            region_put(m, r, pfn, order)
        else:
            put_run(m, r, pfn, run)
        pages += run
    if locked != NULL:
        pthread_mutex_unlock(&locked.lock)
    if pages:
        stat_add(m, PGFREE, <int64_t>pages)

cdef bint frames_hold(mem_t *m, int64_t frees) noexcept nogil:
    """Lock every list of free frames, if no frame was given back since `frees` was read; frames_go() ends that.

    Meanwhile no frame can be used again. The one place where more than one region's lock is held, in order of address.
    """
    cdef int i
    for i in range(m.nr_pools):
        pthread_mutex_lock(&m.pool[i].lock)
    for i in range(m.nr_regions):
        pthread_mutex_lock(&m.region[i].lock)
    if stat_sum(m, NR_FREES) == frees:
        return True
    frames_go(m)
    return False

cdef void frames_go(mem_t *m) noexcept nogil:
    cdef int i
    for i in range(m.nr_regions):
        pthread_mutex_unlock(&m.region[i].lock)
    for i in range(m.nr_pools):
        pthread_mutex_unlock(&m.pool[i].lock)

# ---- the Python face ------------------------------------------------------------------------------------------------
cdef int regions_of_zone(Memory mem, object zone) except -1:
    cdef mem_t *m = mem.ptr()
    cdef int i, mask = 0
    if zone is None:
        return (1 << m.nr_regions) - 1
    if zone not in ("Normal", "Movable", "CMA"):
        raise InvalidArgument(f"zone={zone!r} is none of None, 'Normal', 'Movable', 'CMA'")
    for i in range(m.nr_regions):
        if m.region[i].migratetype == MIGRATE_CMA:
            mask |= (zone == "CMA") << i
        elif m.region[i].zone == ZONE_MOVABLE:
            mask |= (zone == "Movable") << i
        else:
            mask |= (zone == "Normal") << i
    if not mask:
        raise InvalidArgument(f"this Memory has no {zone} memory: make it with Memory(..., {zone.lower()}=SIZE)")
    return mask


def _no_frames(Memory mem, order, zone):
    free = {name: [count for count in row] for name, row in mem.buddyinfo().items()}
    total = sum(z.free for z in mem.zones)
    where = "any zone" if zone is None else zone
    why = ("the free memory is in smaller blocks: free neighbouring folios, or take a smaller order"
           if total >= 1 << order else "free folios, or make a larger Memory")
    return MMError(_errno.ENOMEM, f"no free block of {1 << <object>order} pages (order {order}) in {where}; {total} pages are "
                                  f"free, blocks by order {free}; {why}")


def folio_alloc(Memory mem not None, order, *, zone=None, hugetlb=False):
    """Allocate a folio of 2**order pages with one reference.

    zone: "Normal", "Movable", "CMA", or None for the first of these that has room. hugetlb: from the pool of that
    size. Raises MMError(ENOMEM) when there is no block, InvalidArgument for an order that does not exist.
    Kernel counterpart: folio_alloc(), alloc_hugetlb_folio().
    """
    cdef mem_t *m = mem.ptr()
    cdef unsigned regions
    cdef uint64_t pfn
    if isinstance(order, bool) or not isinstance(order, int):
        raise TypeError(f"order is an int, not {order!r}")
    if hugetlb:
        sizes = {size: free for size, (_, free) in mem.hugetlb_pools().items()}
        size = <object>(ONE << m.page_shift) << order if 0 <= order <= MAX_FOLIO_ORDER else None
        if size not in sizes:
            raise InvalidArgument(f"order {order} is no hugetlb page size of this Memory; its pools are of "
                                  f"{', '.join(format_size(s) for s in sizes) or 'none'}: make it with "
                                  "Memory(..., hugetlb={size: number})")
        if zone is not None:
            raise InvalidArgument("hugetlb folios come from their pool: zone= does not go with hugetlb=True")
        pfn = alloc_hugetlb(m, order)
        if not pfn:
            raise MMError(_errno.ENOMEM, f"the pool of {format_size(size)} pages is empty ({mem.hugetlb_pools()[size][0]} "
                                         "pages, all in use): release some, or make the Memory with a larger pool")
        return folio_handle(mem, pfn)
    if not 0 <= order <= <int>m.max_order:
        raise InvalidArgument(f"order {order} is none of 0..{m.max_order}; larger folios come from hugetlb pools")
    regions = regions_of_zone(mem, zone)
    pfn = alloc_folio(m, regions, order)
    if not pfn:
        raise _no_frames(mem, order, zone)
    return folio_handle(mem, pfn)


def alloc_page(Memory mem not None):
    """Allocate a page with one reference (alloc_page()). Raises MMError(ENOMEM)."""
    cdef uint64_t pfn = alloc_folio(mem.ptr(), (1 << MAX_REGIONS) - 1, 0)
    if not pfn:
        raise _no_frames(mem, 0, None)
    return page_handle(mem, pfn)


cdef object place_error(Memory mem, int error, uint64_t pfn, unsigned order):
    if error == -EBUSY:
        return MMError(_errno.EBUSY, f"pages {pfn:#x}..{pfn + (ONE << order) - 1:#x} are not all free: something is "
                                     "allocated there, or they cross a zone", pfn=pfn)
    return InvalidArgument(f"a folio of order {order} cannot start at PFN {pfn:#x}: folios are naturally aligned and lie "
                           "in RAM", pfn=pfn)


def folio_alloc_at(Memory mem not None, pfn, order, *, hugetlb=False):
    """Allocate the folio [pfn, pfn + 2**order), with one reference.

    For layouts that must be exact: replayed captures, tests. Raises MMError(EBUSY) when a page of it is taken,
    InvalidArgument when pfn is no multiple of 2**order or outside of RAM. Kernel counterpart: alloc_contig_range().
    """
    return folios_alloc_at(mem, [pfn], [order], hugetlb=hugetlb)[0]


def folios_alloc_at(Memory mem not None, pfns, orders, *, hugetlb=False):
    """Allocate a folio at each of the PFNs, all or nothing; returns a list of Folio.

    pfns: uint64 array; orders: array of the same length, or one number; hugetlb: bool array or one bool. Raises as
    folio_alloc_at.
    """
    cdef mem_t *m = mem.ptr()
    cdef const uint64_t[::1] at
    cdef const uint8_t[::1] order, huge
    cdef int error = 0
    cdef uint64_t i, nr, done = 0
    pfns, orders = np.atleast_1d(np.asarray(pfns)), np.asarray(orders)
    if pfns.ndim != 1:
        raise InvalidArgument("PFNs are a one-dimensional array")
    for name, array in (("PFNs", pfns), ("orders", orders)):
        if array.dtype == object and all([isinstance(number, int) for number in array.flat]):
            raise InvalidArgument(f"a number in the {name} is negative or beyond 64 bits")
        if array.size and array.dtype.kind not in "iu":
            raise TypeError(f"{name} are integers of at most 64 bits, not {array.dtype}")
    if pfns.dtype.kind == "i" and len(pfns) and pfns.min() < 0:
        raise InvalidArgument(f"PFN {pfns.min()} is negative")
    try:
        wide = np.broadcast_to(orders, pfns.shape)
        kinds = np.ascontiguousarray(np.broadcast_to(np.asarray(hugetlb, dtype=bool), pfns.shape), dtype=np.uint8)
    except ValueError as e:
        raise InvalidArgument(f"orders and hugetlb are one value, or one for each of {len(pfns)} PFNs: {e}") from None
    pfns = np.ascontiguousarray(pfns, dtype=np.uint64)
    if len(wide) and not (0 <= wide.min() and wide.max() <= MAX_FOLIO_ORDER):
        raise InvalidArgument(f"an order is outside 0..{MAX_FOLIO_ORDER}")
    if len(pfns) and not (pfns.min() > 0 and pfns.max() < m.nr_ram):
        raise InvalidArgument(f"a PFN is outside of RAM: 1..{m.nr_ram - 1:#x}")
    if (kinds.astype(bool) & (wide < 2)).any():
        # Its own words lie in the struct page of its fourth page.
        raise InvalidArgument("a hugetlb folio has at least four pages (order 2)")
    at, order, huge = pfns, np.ascontiguousarray(wide, dtype=np.uint8), kinds
    nr = len(pfns)
    mem.enter()
    with nogil:
        while done < nr:
            if order[done] > m.max_order and not huge[done]:
                error = -EINVAL
            else:
                error = alloc_folio_at(m, at[done], order[done], huge[done])
            if error:
                break
            done += 1
        if error:
            for i in range(done):
                a32_store_release(&m.map[at[i]]._refcount, 0)
                free_folio(m, at[i], order[i])
    mem.leave()
    if error:
        raise place_error(mem, error, at[done], order[done])
    return [folio_handle(mem, pfn) for pfn in pfns.tolist()]
