"""Memory.check(): every law of the engine, on all frames that were ever used.

The free blocks say which frames are free; a second walk over mem_map must find each other frame in a folio that holds
together, and the sums of what it finds must be what the counters say. Nobody else may use the memory meanwhile.
"""
from libc.stdint cimport int32_t, int64_t, uint32_t, uint64_t
from libc.string cimport memset
from mmcore.core.filemap cimport cache_next, is_page
from mmcore.core.memory cimport *
from mmcore.core.folio cimport pincount_load, refs_load
from mmcore.core.pgtable cimport *
from mmcore.core.rmap cimport ENTIRELY_MAPPED
from mmcore.core.space cimport *

from .errors import BadPage, MMError

__all__ = ["check"]

cdef struct uses_t:             # what the tables of all mms, and the page caches, say about one frame
    int32_t ptes                # PTEs that map it
    int32_t leaves              # PMD and PUD leaves that start at it
    int32_t cached              # references of page caches, on the head
    int32_t is_table

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
    uses_t *uses                # by PFN
    uint64_t mapped             # of one mm: pages for rss, without hugetlb
    uint64_t swapped

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

cdef bint check_ready_block(sums_t *s, uint64_t pfn) noexcept nogil:
    """A free block whose struct pages still make a folio of PMD order that nobody has."""
    cdef page_t *head = &s.m.map[pfn]
    cdef folio_t *folio = as_folio(head)
    cdef uint64_t i, low = (ONE << ZONE_SHIFT) - 1
    if head.flags & low != ONE << PG_head or folio_order_of(head) != s.m.pmd_order:
        return breach(s, "a ready block reads as a fresh folio", pfn, <int64_t>head.flags, s.m.pmd_order)
    if head._refcount != 0 or head.mapping != 0 or folio._pincount != 0:
        return breach(s, "a ready block has no reference, mapping or pin", pfn, head._refcount, 0)
    if folio._large_mapcount != 0 or folio._entire_mapcount != 0 or folio._nr_pages_mapped != ENTIRELY_MAPPED:
        return breach(s, "a ready block counts the mapping it will have", pfn, folio._large_mapcount, 0)
    for i in range(1, ONE << s.m.pmd_order):
        if head[i].compound_info != tail_word(s.m.pmd_order) or head[i]._refcount != 0 \
                or head[i].flags & low != (s.m.pmd_order if i == 1 else 0) \
                or not frame_free(s, pfn + i) or (i > 1 and head[i]._mapcount != -1):
            return breach(s, "tails of a ready block are fresh and free", pfn + i, <int64_t>head[i].compound_info, 0)
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
    if test_flag(head, PG_mm_isolated):
        return breach(s, "no folio is isolated when nobody moves any", pfn, 1, 0)
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
            if pfn & ((ONE << m.pmd_order) - 1) == 0 and r.ready[(pfn - r.base) >> m.pmd_order]:
                if check_ready_block(s, pfn):
                    return True
                pfn += ONE << m.pmd_order
                continue
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
        if m.pool[i].nr_resv > m.pool[i].nr_free:
            return breach(s, "a hugetlb pool has what it promised", 0, <int64_t>m.pool[i].nr_free, <int64_t>m.pool[i].nr_resv)
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


# ---- address spaces -------------------------------------------------------------------------------------------------
cdef bint count_leaf(sums_t *s, mm_t *mm, const vma_t *v, uint64_t e, int level, uint64_t addr) noexcept nogil:
    """One leaf of an address space: note what it maps."""
    cdef mem_t *m = s.m
    cdef uint64_t pfn = pte_pfn(e), head
    cdef page_t *page
    if v == NULL:
        return breach(s, "what is mapped lies in a VMA", pfn, <int64_t>addr, level)
    if e & PTE_RW and not v.flags & VM_WRITE:
        return breach(s, "an entry allows no more than its VMA", pfn, <int64_t>addr, <int64_t>e)
    if e & PTE_SPECIAL:
        if not v.flags & VM_PFNMAP and pfn != m.zero_pfn and pfn != m.huge_zero_pfn:
            return breach(s, "special entries are zero pages or raw PFNs", pfn, <int64_t>addr, <int64_t>e)
        if e & PTE_RW and not v.flags & VM_PFNMAP:
            return breach(s, "zero pages are read-only", pfn, <int64_t>addr, <int64_t>e)
        return False
    if pfn == 0 or pfn >= m.nr_pages:
        return breach(s, "an entry maps a page", pfn, <int64_t>addr, <int64_t>m.nr_pages)
    head = compound_head_pfn(m.map, pfn)
    page = &m.map[head]
    if level and not page_is_head(page):
        return False        # base pages of a device: nothing is counted
    if level:
        s.uses[pfn].leaves += 1
    else:
        s.uses[pfn].ptes += 1
    if not folio_is_hugetlb(page):
        s.mapped += ONE << level_order(&mm.pgd, level)
    if folio_is_anon(page):
        if page.mapping != mm.anon_id:
            return breach(s, "anonymous pages are mapped in their family", pfn, <int64_t>page.mapping, <int64_t>mm.anon_id)
        if page.index + (pfn - head) != page_index(mm, v, addr):
            return breach(s, "page.index says where a page is mapped", pfn, <int64_t>page.index, <int64_t>page_index(mm, v, addr))
        if not v.has_anon:
            return breach(s, "a VMA with anonymous pages says so", pfn, <int64_t>addr, 1)
        if e & PTE_RW and not test_flag(&m.map[head if level else pfn], PG_owner_2):
            return breach(s, "what is writable is exclusive", pfn, <int64_t>addr, <int64_t>e)
    elif e & PTE_RW and not v.flags & VM_SHARED:
        return breach(s, "a private mapping does not write to a file", pfn, <int64_t>addr, <int64_t>e)
    return False

cdef bint count_table(sums_t *s, mm_t *mm, uint64_t table, int level, uint64_t addr, uint64_t *tables, uint64_t *at) noexcept nogil:
    cdef mem_t *m = s.m
    cdef uint64_t i, e, used = 0
    cdef uint64_t *entry = table_at(m, table)
    cdef const vma_t *v
    if table == 0 or table >= m.nr_ram or not page_type_is(&m.map[table], PGTY_table):
        return breach(s, "a table is a frame of its type", table, <int64_t>addr, level)
    if s.uses[table].is_table:
        return breach(s, "a table belongs to one address space", table, <int64_t>addr, level)
    if m.map[table].private:
        return breach(s, "a table's lock is free", table, <int64_t>addr, level)
    s.uses[table].is_table = 1
    tables[0] += 1
    for i in range(ONE << mm.pgd.bits):
        e = a64_load_relaxed(&entry[i])
        if e:
            used += 1
            if pte_table(e, level):
                if count_table(s, mm, pte_pfn(e), level - 1, addr, tables, at):
                    return True
            else:
                while at[0] < mm.nr_vmas and mm.vma[at[0]].end <= addr:
                    at[0] += 1
                v = NULL
                if at[0] < mm.nr_vmas and mm.vma[at[0]].start <= addr \
                        and addr + level_size(&mm.pgd, level) <= mm.vma[at[0]].end:
                    v = &mm.vma[at[0]]
                if pte_present(e):
                    if count_leaf(s, mm, v, e, level, addr):
                        return True
                else:
                    s.swapped += 1
                    if v == NULL:
                        return breach(s, "what is swapped out lies in a VMA", table, <int64_t>addr, level)
        addr += level_size(&mm.pgd, level)
    if used != table_used(m, table)[0]:
        return breach(s, "a table counts its entries", table, <int64_t>table_used(m, table)[0], <int64_t>used)
    return False

cdef bint check_one_mm(sums_t *s, mm_t *mm) noexcept nogil:
    cdef uint64_t tables = 0, i, at = 0
    cdef int64_t rss
    s.mapped = s.swapped = 0
    for i in range(mm.nr_vmas):
        if mm.vma[i].start >= mm.vma[i].end or (i and mm.vma[i].start < mm.vma[i - 1].end):
            return breach(s, "VMAs are sorted, disjoint and not empty", 0, <int64_t>mm.vma[i].start, <int64_t>mm.vma[i].end)
    if count_table(s, mm, mm.pgd.top, mm.pgd.levels - 1, 0, &tables, &at):
        return True
    if tables != mm.pgd.nr_tables:
        return breach(s, "an address space counts its tables", mm.pgd.top, <int64_t>mm.pgd.nr_tables, <int64_t>tables)
    rss = <int64_t>(mm.rss_anon + mm.rss_file + mm.rss_shmem)
    if rss != <int64_t>s.mapped:
        return breach(s, "rss counts what is mapped", mm.pgd.top, rss, <int64_t>s.mapped)
    if mm.swapped != s.swapped:
        return breach(s, "an address space counts what is swapped out", mm.pgd.top, <int64_t>mm.swapped, <int64_t>s.swapped)
    return False

cdef bint check_cached(sums_t *s, const file_t *f, uint64_t i, uint64_t pfn) noexcept nogil:
    """A page in a cache against its struct page."""
    cdef page_t *map = s.m.map
    cdef uint64_t head = compound_head_pfn(map, pfn)
    s.uses[head].cached += 1 << f.order
    if map[head].mapping != f.id << 2:
        return breach(s, "a cached page knows its file", pfn, <int64_t>map[head].mapping, <int64_t>(f.id << 2))
    if map[head].index + (pfn - head) != i << f.order:
        return breach(s, "a cached page knows its index", pfn, <int64_t>map[head].index, <int64_t>(i << f.order))
    return False

cdef bint check_file(sums_t *s, file_t *f) noexcept nogil:
    cdef uint64_t i, pfn, pages = 0, reserved = 0
    if f.kind == FILE_DEVDAX or f.kind == FILE_FSDAX or f.kind == FILE_IOMEM:
        return False
    i = cache_next(f, 0, f.nr_entries)
    while i < f.nr_entries:
        pfn = f.cache[i]
        if pfn == CACHE_RESERVED:
            reserved += 1
        elif is_page(pfn):
            pages += ONE << f.order
            if f.kind != FILE_PFNMAP and check_cached(s, f, i, pfn):
                return True
        i = cache_next(f, i + 1, f.nr_entries)
    if pages != f.nr_cached or reserved != f.nr_reserved:
        return breach(s, "a file counts its pages", 0, <int64_t>f.nr_cached, <int64_t>pages)
    return False

cdef bint check_counts(sums_t *s, uint64_t pfn) noexcept nogil:
    """A folio's map counts against what all tables say, and its references against mappings and cache."""
    cdef mem_t *m = s.m
    cdef page_t *head = &m.map[pfn]
    cdef uint64_t nr = ONE << folio_order_of(head), i
    cdef int64_t total = s.uses[pfn].leaves, entire = s.uses[pfn].leaves, mapped = 0
    if page_type_is(head, PGTY_table) != (s.uses[pfn].is_table != 0):
        return breach(s, "every table belongs to an address space", pfn, s.uses[pfn].is_table, 1)
    for i in range(nr):
        total += s.uses[pfn + i].ptes
        mapped += s.uses[pfn + i].ptes != 0
        if nr > 1 and m.map[pfn + i]._mapcount + 1 != s.uses[pfn + i].ptes and not (i == 0 and folio_is_hugetlb(head)):
            return breach(s, "_mapcount of a page is its PTEs", pfn + i, m.map[pfn + i]._mapcount + 1, s.uses[pfn + i].ptes)
    if folio_mapcount_of(head) != total and pfn != m.zero_pfn:
        return breach(s, "a folio's map count is its entries in all tables", pfn, folio_mapcount_of(head), total)
    if nr > 1:
        if as_folio(head)._entire_mapcount + 1 != entire:
            return breach(s, "_entire_mapcount is the leaves", pfn, as_folio(head)._entire_mapcount + 1, entire)
        if as_folio(head)._nr_pages_mapped != mapped + (ENTIRELY_MAPPED if entire else 0):
            return breach(s, "_nr_pages_mapped is the pages that PTEs map", pfn, as_folio(head)._nr_pages_mapped, mapped)
    if <int64_t><int32_t>refs_load(head) < total + s.uses[pfn].cached:
        return breach(s, "refcount >= mappings + cache", pfn, refs_load(head), total + s.uses[pfn].cached)
    return False

cdef bint check_mm(sums_t *s) noexcept nogil:
    """What page tables and page caches say, summed over all of them, against the struct pages."""
    cdef mem_t *m = s.m
    cdef spaces_t *spaces = spaces_of(m)
    cdef uint64_t size = s.frontier * sizeof(uses_t), pfn = 1, i
    cdef mm_t *mm
    cdef bint bad = False
    if spaces == NULL:
        return False
    s.uses = <uses_t *>buffer_alloc(size)
    if s.uses == NULL:
        return breach(s, "memory for the check of address spaces", 0, <int64_t>size, 0)
    memset(s.uses, 0, size)
    mm = spaces.first
    while mm != NULL and not bad:
        bad = check_one_mm(s, mm)
        mm = mm.next_all
    for i in range(1, spaces.nr_files):
        if spaces.file[i] != NULL and not bad:
            bad = check_file(s, spaces.file[i])
    while pfn < s.frontier and not bad:
        if pfn < m.nr_ram and (frame_free(s, pfn) or region_of(m, pfn).frontier <= pfn):
            bad = (s.uses[pfn].ptes or s.uses[pfn].leaves or s.uses[pfn].cached or s.uses[pfn].is_table) \
                and breach(s, "what is in use is not free", pfn, s.uses[pfn].ptes, s.uses[pfn].leaves)
            pfn += 1
            continue
        if pfn >= m.nr_ram and device_of(m, pfn) == NULL:
            pfn += 1
            continue
        bad = check_counts(s, pfn)
        pfn += ONE << folio_order_of(&m.map[pfn])
    buffer_free(s.uses, size)
    return bad


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
        if not check_all(&s):
            check_mm(&s)
        buffer_free(s.is_free, size)
    mem.leave()
    if s.law != NULL:
        raise BadPage((<bytes>s.law).decode(), f"at PFN {s.pfn:#x}: found {s.found}, expected {s.wanted}", pfn=s.pfn)
