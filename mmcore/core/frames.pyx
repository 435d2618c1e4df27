"""Frames in bulk for address spaces."""
from mmcore.core.buddy cimport free_folios, freed_word, region_put, region_take, region_take_ready

cdef int region_turn(const mem_t *m, int turn) noexcept nogil:
    """The region that user memory tries at this turn; -1 when it has no such region."""
    cdef int i
    for i in range(m.nr_regions):
        if turn == 0 and m.region[i].zone == ZONE_MOVABLE:
            return i
        if turn == 1 and m.region[i].zone == ZONE_NORMAL and m.region[i].migratetype != MIGRATE_CMA:
            return i
        if turn == 2 and m.region[i].migratetype == MIGRATE_CMA:
            return i
    return -1

cdef uint64_t take_from(mem_t *m, region_t *r, uint64_t *pfns, uint64_t nr) noexcept nogil:
    """Small frames out of one region, whole blocks at a time, the smallest first."""
    cdef uint64_t got = 0, pfn, j
    cdef unsigned order
    pthread_mutex_lock(&r.lock)
    while got < nr:
        order = 0
        while order <= m.max_order and r.nr_blocks[order] == 0:
            order += 1
        if order > m.max_order:
            break
        # No more than is wanted: a block that is larger is taken in the largest pieces that fit.
        while (ONE << order) > nr - got:
            order -= 1
        pfn = region_take(m, r, order)
        for j in range(ONE << order):
            pfns[got + j] = pfn + j
        got += ONE << order
    pthread_mutex_unlock(&r.lock)
    return got

cdef uint64_t take_pages(mem_t *m, uint64_t *pfns, uint64_t nr) noexcept nogil:
    cdef uint64_t got = 0, most = nr
    cdef int turn, at
    if mm_unlikely(a32_load_relaxed(&m.inject_armed)):
        # Each page is an occurrence.
        most = 0
        while most < nr and not inject_fails(m, INJECT_FRAME):
            most += 1
    for turn in range(3):
        at = region_turn(m, turn)
        if at >= 0 and got < most:
            got += take_from(m, &m.region[at], pfns + got, most - got)
    stat_add(m, PGALLOC, <int64_t>got)
    return got

cdef void give_pages(mem_t *m, const uint64_t *pfns, uint64_t nr) noexcept nogil:
    cdef uint64_t i = 0, run, pfn, left
    cdef unsigned order
    cdef region_t *r
    cdef region_t *locked = NULL
    stat_add(m, NR_FREES, 1)
    while i < nr:
        run = 1
        while i + run < nr and pfns[i + run] == pfns[i] + run:
            run += 1
        pfn = pfns[i]
        left = run
        while left:
            r = region_of(m, pfn)
            if r != locked:
                if locked != NULL:
                    pthread_mutex_unlock(&locked.lock)
                pthread_mutex_lock(&r.lock)
                locked = r
            order = <unsigned>ctz64(pfn | ONE << m.max_order)
            while (ONE << order) > left or pfn + (ONE << order) > r.end:
                order -= 1
            region_put(m, r, pfn, order)
            pfn += ONE << order
            left -= ONE << order
        i += run
    if locked != NULL:
        pthread_mutex_unlock(&locked.lock)
    stat_add(m, PGFREE, <int64_t>nr)

cdef bint is_ready(mem_t *m, region_t *r, uint64_t pfn) noexcept nogil:
    """Is this block, which is being taken, ready? It is not any more then."""
    cdef uint64_t block = (pfn - r.base) >> m.pmd_order
    if not r.ready[block]:
        return False
    r.ready[block] = 0
    r.nr_ready -= 1
    return True

cdef uint64_t take_huge(mem_t *m, uint64_t *pfns, uint64_t nr) noexcept nogil:
    cdef uint64_t got = 0, most = nr, i
    cdef uint64_t fresh[64]
    cdef uint64_t nr_fresh = 0
    cdef int turn, at
    cdef region_t *r
    if most > 64:
        most = 64
    if mm_unlikely(a32_load_relaxed(&m.inject_armed)):
        nr = most
        most = 0
        while most < nr and not inject_fails(m, INJECT_FRAME):
            most += 1
    for turn in range(3):
        at = region_turn(m, turn)
        if at < 0 or got == most:
            continue
        r = &m.region[at]
        pthread_mutex_lock(&r.lock)
        while got < most:
            pfns[got] = region_take_ready(m, r, m.pmd_order)
            if pfns[got] == 0:
                break
            if not is_ready(m, r, pfns[got]):
                fresh[nr_fresh] = pfns[got]
                nr_fresh += 1
            got += 1
        pthread_mutex_unlock(&r.lock)
    for i in range(nr_fresh):
        prep_compound_page(&m.map[fresh[i]], region_of(m, fresh[i]).zone_flags, m.pmd_order)
        prep_mapped_once(&m.map[fresh[i]])
    stat_add(m, PGALLOC, <int64_t>(got << m.pmd_order))
    return got

cdef inline bint can_be_ready(const page_t *head) noexcept nogil:
    """Do only the words of head and tail 1 differ from those of a fresh folio?"""
    cdef uint64_t unlike = (ONE << PG_has_hwpoisoned) | (ONE << PG_mm_tails)
    return a64_load_relaxed(&as_folio(head)._flags_1) & unlike == 0 and not test_flag(head, PG_hwpoison)

cdef void give_huge(mem_t *m, const uint64_t *pfns, uint64_t nr) noexcept nogil:
    cdef uint64_t i, word, kept = 0
    cdef page_t *head
    cdef region_t *r
    cdef region_t *locked = NULL
    stat_add(m, NR_FREES, 1)
    for i in range(nr):
        head = &m.map[pfns[i]]
        if i + 4 < nr:
            prefetch_write(&m.map[pfns[i + 4]])
        if not can_be_ready(head):
            if locked != NULL:
                pthread_mutex_unlock(&locked.lock)
                locked = NULL
            word = freed_word(pfns[i], m.pmd_order, False)
            free_folios(m, &word, 1)
            continue
        r = region_of(m, pfns[i])
        page_init(head, r.zone_flags | (ONE << PG_head), 0)
        a64_store_relaxed(&as_folio(head)._flags_1, r.zone_flags)
        prep_folio_words(head, m.pmd_order)
        prep_mapped_once(head)
        if r != locked:
            if locked != NULL:
                pthread_mutex_unlock(&locked.lock)
            pthread_mutex_lock(&r.lock)
            locked = r
        r.ready[(pfns[i] - r.base) >> m.pmd_order] = 1
        r.nr_ready += 1
        region_put(m, r, pfns[i], m.pmd_order)
        kept += 1
    if locked != NULL:
        pthread_mutex_unlock(&locked.lock)
    if kept:
        stat_add(m, PGFREE, <int64_t>(kept << m.pmd_order))

cdef uint64_t take_folio(mem_t *m, unsigned order) noexcept nogil:
    cdef uint64_t pfn = 0
    cdef int turn, at
    if order == m.pmd_order:
        if take_huge(m, &pfn, 1) == 0:
            return 0
        prep_folio_words(&m.map[pfn], order)
        return pfn
    if mm_unlikely(inject_fails(m, INJECT_FRAME)):
        return 0
    for turn in range(3):
        at = region_turn(m, turn)
        if at < 0:
            continue
        pthread_mutex_lock(&m.region[at].lock)
        pfn = region_take(m, &m.region[at], order)
        pthread_mutex_unlock(&m.region[at].lock)
        if pfn:
            break
    if pfn == 0:
        return 0
    stat_add(m, PGALLOC, ONE << order)
    if order:
        prep_compound_page(&m.map[pfn], m.region[at].zone_flags, order)
    return pfn
