"""Memory.check(): every law of the engine, on all frames that were ever used.

The free blocks say which frames are free; a second walk over mem_map must find each other frame in a folio that holds
together, and the sums of what it finds must be what the counters say. Nobody else may use the memory meanwhile.
"""
from libc.stdint cimport int32_t, int64_t, uint8_t, uint32_t, uint64_t
from libc.string cimport memset
from mmcore.core.memory cimport *
from mmcore.core.folio cimport pincount_load, refs_load

from .errors import BadPage, MMError

__all__ = ["check"]

cdef struct sums_t:
    mem_t *m
    uint64_t *is_free           # a bit a frame, up to the frontier
    uint64_t frontier
    const char *law             # the first breach; NULL while there is none
    uint64_t pfn
    int64_t found
    int64_t wanted
    uint64_t free               # pages by the walks
    uint64_t allocated
    uint64_t pins_least         # pins of small folios with PG_mm_many_refs cannot be told exactly
    uint64_t pins_most
    int64_t dirty
    int64_t writeback
    uint64_t pooled

cdef bint breach(sums_t *s, const char *law, uint64_t pfn, int64_t found, int64_t wanted) noexcept nogil:
    s.law, s.pfn, s.found, s.wanted = law, pfn, found, wanted
    return True

cdef inline bint frame_free(const sums_t *s, uint64_t pfn) noexcept nogil:
    return (s.is_free[pfn >> 6] >> (pfn & 63)) & 1

cdef bint check_block(sums_t *s, region_t *r, uint64_t pfn, unsigned order) noexcept nogil:
    """One free block: inside its region, no buddy free beside it, no frame in two blocks."""
    cdef uint64_t i, buddy = pfn ^ (ONE << order)
    if pfn < r.start or pfn + (ONE << order) > r.end:
        return breach(s, "a free block lies in its zone", pfn, order, 0)
    if order < s.m.max_order and buddy + (ONE << order) <= r.end and bitmap_test(&r.free[order], (buddy - r.base) >> order):
        return breach(s, "never two mergeable buddies apart", pfn, order, 0)
    for i in range(pfn, min(pfn + (ONE << order), s.frontier)):
        if frame_free(s, i):
            return breach(s, "free blocks are disjoint", i, order, 0)
        s.is_free[i >> 6] |= ONE << (i & 63)
    s.free += ONE << order
    return False

cdef bint check_bitmap(sums_t *s, region_t *r, unsigned order, int level, uint64_t word, uint64_t *count) noexcept nogil:
    """Visit the members below one word of a level; a summary bit must not stand for an empty word."""
    cdef uint64_t bits = r.free[order].level[level][word], at
    while bits:
        at = (word << 6) + <uint64_t>ctz64(bits)
        bits &= bits - 1
        if level == 0:
            count[0] += 1
            if check_block(s, r, r.base + (at << order), order):
                return True
        else:
            if r.free[order].level[level - 1][at] == 0:
                return breach(s, "a summary bit has members", r.base, order, level)
            if check_bitmap(s, r, order, level - 1, at, count):
                return True
    return False

cdef bint check_free_frame(sums_t *s, uint64_t pfn) noexcept nogil:
    cdef page_t *page = &s.m.map[pfn]
    cdef uint64_t low = page.flags & ((ONE << ZONE_SHIFT) - 1)
    if page._refcount != 0:
        return breach(s, "a free frame has no reference", pfn, page._refcount, 0)
    if page.compound_info != 0 or page.mapping != 0 or low != 0:
        return breach(s, "a free frame reads as free", pfn, <int64_t>page.compound_info, <int64_t>low)
    if page._mapcount != -1 and not (page._mapcount == 0 and page.flags == 0):
        return breach(s, "a free frame is not mapped", pfn, page._mapcount, -1)
    return False

cdef bint check_folio(sums_t *s, uint64_t pfn, uint64_t end, uint64_t *nr_pages) noexcept nogil:
    """The folio at a frame that is not free."""
    cdef mem_t *m = s.m
    cdef page_t *head = &m.map[pfn]
    cdef uint64_t i, nr, word, pins = 0
    cdef unsigned order
    cdef uint32_t refs = refs_load(head)
    cdef int64_t mapped
    if page_is_tail(head):
        return breach(s, "a tail follows its head", pfn, <int64_t>compound_head_pfn(m.map, pfn), 0)
    order = folio_order_of(head)
    if page_is_head(head) and (order == 0 or order > MAX_FOLIO_ORDER):
        return breach(s, "a head has an order", pfn, order, 0)
    nr = ONE << order
    nr_pages[0] = nr
    if pfn & (nr - 1):
        return breach(s, "folios are naturally aligned", pfn, order, 0)
    if pfn + nr > end:
        return breach(s, "a folio lies in its zone", pfn, order, 0)
    word = tail_word(order) if order else 0
    for i in range(1, nr):
        if m.map[pfn + i].compound_info != word:
            return breach(s, "tails name their head", pfn + i, <int64_t>m.map[pfn + i].compound_info, <int64_t>word)
        if m.map[pfn + i]._refcount != 0:
            return breach(s, "tails have no references of their own", pfn + i, m.map[pfn + i]._refcount, 0)
        if page_is_head(&m.map[pfn + i]):
            return breach(s, "a tail is no head", pfn + i, 0, 0)
        if pfn + i < s.frontier and pfn < m.nr_ram and frame_free(s, pfn + i):
            return breach(s, "an allocated frame is in no free block", pfn + i, 0, 0)
    if order and as_folio(head)._nr_pages != nr:
        return breach(s, "_nr_pages is 2^order", pfn, as_folio(head)._nr_pages, <int64_t>nr)
    mapped = folio_mapcount_of(head)
    if order:
        pins = pincount_load(head)
        s.pins_least += pins
        s.pins_most += pins
    elif pfn != m.zero_pfn:
        if test_flag(head, PG_mm_many_refs):
            s.pins_most += refs >> GUP_PIN_COUNTING_SHIFT
        else:
            pins = refs >> GUP_PIN_COUNTING_SHIFT
            s.pins_least += pins
            s.pins_most += pins
            refs = <uint32_t>(pins + (refs & (GUP_PIN_COUNTING_BIAS - 1)))
    if pfn != m.zero_pfn and <int64_t>refs < mapped + <int64_t>pins:
        return breach(s, "refcount >= mappings + pins", pfn, refs, mapped + <int64_t>pins)
    if test_flag(head, PG_dirty) and not folio_is_anon(head):
        s.dirty += <int64_t>nr
    if test_flag(head, PG_writeback):
        s.writeback += <int64_t>nr
    if refs == 0:
        if test_flag(head, PG_mm_pool):
            s.pooled += 1
        elif not test_flag(head, PG_mm_retired) and pfn < m.nr_ram:
            return breach(s, "a folio at 0 references is freed (lost frame, or frozen and forgotten)", pfn, 0, 1)
    elif test_flag(head, PG_mm_pool) or test_flag(head, PG_mm_retired):
        return breach(s, "a folio in its pool, or retired, has no references", pfn, refs, 0)
    return False

cdef bint check_region(sums_t *s, region_t *r) noexcept nogil:
    cdef mem_t *m = s.m
    cdef unsigned order
    cdef uint64_t count, pfn, nr, free_before = s.free, first = s.allocated, last
    for order in range(m.max_order + 1):
        count = 0
        if check_bitmap(s, r, order, r.free[order].nr_levels - 1, 0, &count):
            return True
        if count != r.nr_blocks[order]:
            return breach(s, "free blocks of an order are counted", r.start, <int64_t>count, <int64_t>r.nr_blocks[order])
    if s.free - free_before != r.nr_free:
        return breach(s, "free pages are counted", r.start, <int64_t>(s.free - free_before), <int64_t>r.nr_free)
    pfn = r.start
    last = min(r.end, s.frontier)
    if r.start == 0:
        for pfn in range(m.nr_reserved):
            if not test_flag(&m.map[pfn], PG_reserved) or frame_free(s, pfn):
                return breach(s, "reserved frames stay reserved", pfn, 0, 0)
        pfn = m.nr_reserved
    while pfn < last:
        if frame_free(s, pfn):
            if check_free_frame(s, pfn):
                return True
            pfn += 1
            continue
        if check_folio(s, pfn, r.end, &nr):
            return True
        if (m.map[pfn].flags >> ZONE_SHIFT) & 7 != r.zone:
            return breach(s, "pages know their zone", pfn, <int64_t>(m.map[pfn].flags >> ZONE_SHIFT), r.zone)
        s.allocated += nr
        pfn += nr
    # What lies above the highest frame ever used must be free, or the sum falls short.
    if s.free - free_before + s.allocated - first != r.managed:
        return breach(s, "free + allocated == managed", r.start,
                      <int64_t>(s.free - free_before + s.allocated - first), <int64_t>r.managed)
    return False

cdef bint check_all(sums_t *s) noexcept nogil:
    cdef mem_t *m = s.m
    cdef uint64_t pfn, nr, managed = 0, pooled = 0
    cdef int64_t live
    cdef int i
    for i in range(m.nr_regions):
        if check_region(s, &m.region[i]):
            return True
        managed += m.region[i].managed
    if managed + m.nr_reserved != m.nr_ram:
        return breach(s, "managed + reserved == present", 0, <int64_t>(managed + m.nr_reserved), <int64_t>m.nr_ram)
    if m.map[m.zero_pfn]._refcount < 1:
        return breach(s, "the zero page keeps its reference", m.zero_pfn, m.map[m.zero_pfn]._refcount, 1)
    if test_flag(&m.map[m.zero_pfn], PG_dirty):
        return breach(s, "the zero page stays clean", m.zero_pfn, 1, 0)
    for i in range(m.nr_devices):
        pfn = m.device[i].start
        while pfn < m.device[i].end:
            if check_folio(s, pfn, m.device[i].end, &nr):
                return True
            if nr != ONE << m.device[i].order or m.map[pfn].pgmap != <uint64_t>(i + 1) << 1:
                return breach(s, "device folios keep their size and device map", pfn, <int64_t>nr, ONE << m.device[i].order)
            pfn += nr
    for i in range(m.nr_pools):
        pooled += m.pool[i].nr_free
    if pooled != s.pooled:
        return breach(s, "hugetlb pools hold what they count", 0, <int64_t>s.pooled, <int64_t>pooled)
    live = stat_sum(m, NR_FOLL_PIN_ACQUIRED) - stat_sum(m, NR_FOLL_PIN_RELEASED)
    if live < <int64_t>s.pins_least or live > <int64_t>s.pins_most:
        return breach(s, "live pins == nr_foll_pin_acquired - nr_foll_pin_released", 0, <int64_t>s.pins_least, live)
    if s.dirty != stat_sum(m, NR_DIRTY):
        return breach(s, "nr_dirty counts the dirty pages", 0, s.dirty, stat_sum(m, NR_DIRTY))
    if s.writeback != stat_sum(m, NR_WRITEBACK):
        return breach(s, "nr_writeback counts the pages under writeback", 0, s.writeback, stat_sum(m, NR_WRITEBACK))
    return False


def check(Memory mem not None):
    """Check every law on a Memory; raises BadPage naming the law and the PFN. See Memory.check()."""
    cdef sums_t s
    cdef uint64_t size
    memset(&s, 0, sizeof(s))
    s.m = mem.enter()
    s.frontier = frontier_of(s.m)
    size = ((s.frontier >> 6) + 1) * 8
    s.is_free = <uint64_t *>buffer_alloc(size)
    if s.is_free == NULL:
        mem.leave()
        raise MMError(12, f"no memory to check {s.frontier} pages ({size} bytes)")
    with nogil:
        memset(s.is_free, 0, size)
        check_all(&s)
        buffer_free(s.is_free, size)
    mem.leave()
    if s.law != NULL:
        raise BadPage((<bytes>s.law).decode(), f"at PFN {s.pfn:#x}: found {s.found}, expected {s.wanted}", pfn=s.pfn)
