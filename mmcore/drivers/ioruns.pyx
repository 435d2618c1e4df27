"""Runs of pages of a registered buffer."""
from libc.errno cimport ENOMEM
from libc.stdlib cimport free, realloc
from mmcore.core.output cimport LEAF_MAX_PAGES, LEAF_PFN_BITS, leaf_count, leaf_pfn, leaf_word

# ---- runs -------------------------------------------------------------------------------------------------------------------
cdef bint add_run(mem_t *m, buffer_t *u, uint64_t pfn, uint64_t count) noexcept nogil:
    cdef uint64_t last
    cdef void *at
    if u.nr_runs:
        last = u.run[u.nr_runs - 1]
        # Joined, since a run that ends inside a folio means that the next page is another.
        if leaf_pfn(last) + leaf_count(last) == pfn and leaf_count(last) + count <= LEAF_MAX_PAGES:
            u.run[u.nr_runs - 1] += count << LEAF_PFN_BITS
            return True
    if u.nr_runs == u.room:
        if inject_fails(m, INJECT_LIST):
            return False
        at = realloc(u.run, (2 * u.room + 64) * sizeof(uint64_t))
        if at == NULL:
            return False
        u.run = <uint64_t *>at
        u.room = 2 * u.room + 64
    u.run[u.nr_runs] = leaf_word(pfn, count)
    u.nr_runs += 1
    return True

cdef uint64_t runs_take(gup_output_t *base, const uint64_t *leaf, uint64_t nr) noexcept nogil:
    cdef runs_output_t *out = <runs_output_t *>base
    cdef uint64_t i
    for i in range(nr):
        if not add_run(out.m, out.u, leaf_pfn(leaf[i]), leaf_count(leaf[i])):
            base.error = -ENOMEM
            return i
    return nr

cdef bint check_coalesce(const page_t *map, const buffer_t *u, uint64_t *nr_folios, uint64_t *folio_pages, uint64_t *head_pages,
                         uint64_t *first_idx) noexcept nogil:
    """Folios of one size, each used to its end and from its start, but for the buffer's two ends."""
    cdef uint64_t i, pfn, n, end = 0
    cdef group_t g
    nr_folios[0] = 0
    for i in range(u.nr_runs):
        pfn, n = leaf_pfn(u.run[i]), leaf_count(u.run[i])
        while n:
            next_in_range(map, pfn, n, &g)
            if nr_folios[0] == 0:
                folio_pages[0], head_pages[0], first_idx[0] = g.nr_pages, g.count, pfn - g.head
                # A buffer of base pages is kept by pages anyway: no look at the others.
                if g.nr_pages == 1:
                    return False
            elif g.nr_pages != folio_pages[0] or end != 0 or pfn != g.head:
                return False
            # Not 0: pages of the folio that were not used; then nothing may follow.
            end = g.head + g.nr_pages - pfn - g.count
            nr_folios[0] += 1
            pfn += g.count
            n -= g.count
    return True

cdef void drop_surplus(mem_t *m, const buffer_t *u) noexcept nogil:
    """Keep one pin of each folio visited; they were taken a moment ago, so that this cannot fail."""
    cdef uint64_t i, pfn, n, dropped = 0, updates = 0
    cdef group_t g
    for i in range(u.nr_runs):
        pfn, n = leaf_pfn(u.run[i]), leaf_count(u.run[i])
        while n:
            next_in_range(m.map, pfn, n, &g)
            if g.count > 1:
                put_pins(m, &m.map[g.head], True, g.count - 1)
                dropped += g.count - 1
                updates += 1
            pfn += g.count
            n -= g.count
    stat_add(m, NR_FOLL_PIN_RELEASED, <int64_t>dropped)
    stat_add(m, OP_REF_ATOMICS, <int64_t>updates)
    stat_add(m, OP_PINCOUNT_ATOMICS, <int64_t>updates)

cdef enum:
    PER_LIST = 512
    SHORT_RUN = 8               # pages: shorter ones on average are released as a list, whose walk looks ahead

cdef uint64_t drop_short_runs(batch_t *b, const buffer_t *u) noexcept nogil:
    cdef uint64_t list[PER_LIST]
    cdef uint64_t i, k, count, used = 0, got, done = 0
    for i in range(u.nr_runs):
        count = leaf_count(u.run[i])
        for k in range(count):
            list[used] = leaf_pfn(u.run[i]) + k
            used += 1
            if used == PER_LIST:
                got = release_list(b, list, used, GEN_RUN)
                done += got
                if got < used:
                    return done
                used = 0
    return done + release_list(b, list, used, GEN_RUN) if used else done

cdef uint64_t drop_bvecs(batch_t *b, const buffer_t *u, uint64_t most, bint undo) noexcept nogil:
    """Drop (or, with undo, take again) the pins of the first `most` bvecs; how many. Fewer: b.error."""
    cdef uint64_t i, pfn, n, k, got, done = 0
    cdef group_t g
    if not undo and not u.coalesced and u.nr_pages < SHORT_RUN * u.nr_runs:
        return drop_short_runs(b, u)
    for i in range(u.nr_runs):
        pfn, n = leaf_pfn(u.run[i]), leaf_count(u.run[i])
        while n and done < most:
            if u.coalesced:
                next_in_range(b.m.map, pfn, n, &g)
                k = 1
            else:
                k = g.count = min(n, most - done)
            if undo:
                undo_range(b, pfn, k)
                got = k
            else:
                got = release_range(b, pfn, k)
            done += got
            if got < k:
                return done
            pfn += g.count
            n -= g.count
        if done == most:
            break
    return done

# ---- who uses which large folio -----------------------------------------------------------------------------------------------
cdef inline uint64_t slot_of(const uses_t *s, uint64_t head) noexcept nogil:
    cdef uint64_t at = ((head * <uint64_t>0x9E3779B97F4A7C15) >> 20) & (s.size - 1)
    while s.head[at] and s.head[at] != head:
        at = (at + 1) & (s.size - 1)
    return at

cdef bint more_slots(mem_t *m, uses_t *s) noexcept nogil:
    """Make room, and forget the heads that nobody uses."""
    cdef uses_t new
    cdef uint64_t i, at
    new.size = 64
    new.filled = 0
    for i in range(s.size):
        new.filled += s.count[i] != 0
    while new.size < 4 * (new.filled + 1):
        new.size *= 2
    new.head = <uint64_t *>mem_calloc(m, new.size, sizeof(uint64_t))
    new.count = <uint64_t *>mem_calloc(m, new.size, sizeof(uint64_t))
    if new.head == NULL or new.count == NULL:
        free(new.head)
        free(new.count)
        return False
    for i in range(s.size):
        if s.count[i]:
            at = slot_of(&new, s.head[i])
            new.head[at], new.count[at] = s.head[i], s.count[i]
    free(s.head)
    free(s.count)
    s[0] = new
    return True

cdef int64_t use_folios(mem_t *m, uses_t *s, const buffer_t *u, uint64_t *visited) noexcept nogil:
    """Count a buffer's visits in; the pages to charge for it, or -ENOMEM. `visited`: large groups that were counted."""
    cdef uint64_t i, at, pfn, n, pages = 0
    cdef group_t g
    visited[0] = 0
    for i in range(u.nr_runs):
        pfn, n = leaf_pfn(u.run[i]), leaf_count(u.run[i])
        while n:
            next_in_range(m.map, pfn, n, &g)
            if g.nr_pages == 1:
                pages += g.count
            else:
                if 2 * s.filled >= s.size and not more_slots(m, s):
                    return -ENOMEM
                at = slot_of(s, g.head)
                if s.head[at] == 0:
                    s.head[at] = g.head
                    s.filled += 1
                if s.count[at] == 0:
                    pages += g.nr_pages
                s.count[at] += 1
                visited[0] += 1
            pfn += g.count
            n -= g.count
    return <int64_t>pages

cdef uint64_t unuse_folios(mem_t *m, uses_t *s, const buffer_t *u, uint64_t visits) noexcept nogil:
    """Count the first visits of a buffer out; the pages that are no longer to be charged. Before its pins go."""
    cdef uint64_t i, at, pfn, n, pages = 0
    cdef group_t g
    for i in range(u.nr_runs):
        pfn, n = leaf_pfn(u.run[i]), leaf_count(u.run[i])
        while n:
            next_in_range(m.map, pfn, n, &g)
            if g.nr_pages == 1:
                pages += g.count
            elif visits:
                visits -= 1
                at = slot_of(s, g.head)
                s.count[at] -= 1
                if s.count[at] == 0:
                    pages += g.nr_pages
            pfn += g.count
            n -= g.count
    return pages
