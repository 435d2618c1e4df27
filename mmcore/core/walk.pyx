"""The walks over lists and ranges of pages, and the batches around them: no Python below this line."""
from libc.errno cimport EAGAIN, ENOMEM, EREMOTEIO
from libc.string cimport memset
from mmcore.core.buddy cimport FREED_CLEAN_SHIFT, frames_go, frames_hold, free_folio

# ---- one group ------------------------------------------------------------------------------------------------------------
cdef inline void note_freed(batch_t *b, uint64_t pfn, page_t *head, bint large) noexcept nogil:
    """Remember a folio this batch brought to 0. Its line is warm now: see whether it reads as a free page's already."""
    cdef bint clean = False
    cdef unsigned order = 0
    if large:
        order = folio_order_of(head)
    else:
        clean = (a64_load_relaxed(&head.flags) & ((ONE << ZONE_SHIFT) - 1)) == 0 \
            and (head.compound_info | head.lru_prev | head.mapping | head.index | head.private | head.memcg_data) == 0 \
            and head._mapcount == -1
    b.freed[b.nr_freed] = freed_word(pfn, order, clean)
    b.nr_freed += 1

cdef int dirty_once(batch_t *b, uint64_t pfn, page_t *head) noexcept nogil:
    """Lock, mark dirty, unlock, unless somebody did already; the test without the lock is the kernel's, and benign."""
    cdef int error
    if test_flag(head, PG_dirty) or pfn == b.m.zero_pfn:
        return 0
    if refs_load(head) == 0:
        return BAD_UNPINNED     # free: nobody's to mark
    error = lock_wait(b.m, pfn)
    if error:
        return error
    if mark_dirty(b.m, pfn):
        b.dirtied[b.nr_dirtied] = pfn
        b.nr_dirtied += 1
    unlock(b.m, pfn)
    return 0

cdef bint dirty_refused(batch_t *b, uint64_t pfn, uint64_t count) noexcept nogil:
    cdef int error = dirty_once(b, pfn, &b.m.map[pfn])
    if error:
        b.error, b.bad_pfn, b.bad_count = error, pfn, count
    return error != 0

cdef bint put_refused(batch_t *b, uint64_t pfn, bint large, uint64_t count, int result) noexcept nogil:
    """What follows a put that did not just lower a counter: remember a folio to free, or the error."""
    if result == FREED:
        note_freed(b, pfn, &b.m.map[pfn], large)
        return False
    b.error, b.bad_pfn, b.bad_count = result, pfn, count
    return True

# What a walk keeps in registers: a batch_t is memory, which every atomic makes the compiler load anew. And a locked
# operation waits for the stores before it, even to the stack: so nothing is counted for the commonest group, a small
# folio once in the list; the numbers of groups follow from what is counted for all others.
cdef struct walk_t:
    mem_t *m
    page_t *map
    uint64_t skip
    bint pins
    bint make_dirty
    bint plain                  # pins, and nothing to be marked dirty
    uint64_t skipped            # entries without a counter: NULL, and pages that are passed over
    uint64_t skipped_groups
    uint64_t merged             # entries that needed no update of their own
    uint64_t large              # updates of large folios

cdef inline void walk_begin(const batch_t *b, walk_t *w) noexcept nogil:
    w.m, w.map, w.skip, w.pins, w.make_dirty = b.m, b.m.map, b.skip, b.pins, b.make_dirty
    w.plain = b.pins and not b.make_dirty
    w.skipped = 0
    w.skipped_groups = 0
    w.merged = 0
    w.large = 0

cdef inline uint64_t walk_end(batch_t *b, const walk_t *w, uint64_t done, bint look_at_all) noexcept nogil:
    """Add to the batch what a walk over `done` entries did, with a look-up for each of them or one a group."""
    cdef uint64_t updates = done - w.skipped - w.merged
    if w.pins:
        b.released += done - w.skipped
        b.pincount_atomics += w.large
    b.ref_atomics += updates
    b.head_lookups += done if look_at_all else updates + w.skipped_groups
    return done

cdef inline bint release_group(batch_t *b, walk_t *w, uint64_t pfn, bint large, uint64_t count) noexcept nogil:
    """Drop `count` pins or references of one folio. True when that was refused: b.error says why, the folio is as it was."""
    cdef page_t *head = &w.map[pfn]
    cdef int result
    if mm_unlikely(pfn == w.skip or pfn == 0):
        w.skipped += count
        w.skipped_groups += 1
        return False
    if mm_unlikely(w.make_dirty) and dirty_refused(b, pfn, count):
        return True
    if mm_likely(w.pins):
        result = put_pins(w.m, head, large, count)
    else:
        result = put_refs(w.m, head, large, <uint32_t>count) if count <= 0xffffffffu else BAD_UNDERFLOW
    if mm_unlikely(result != NOT_FREED) and put_refused(b, pfn, large, count, result):
        return True
    if large:
        w.large += 1
        w.merged += count - 1
    elif mm_unlikely(count > 1):
        w.merged += count - 1
    return False

# ---- walks ------------------------------------------------------------------------------------------------------------------
# Prefetching, by measurement (4 Mi pages, nothing warm): a small folio's line 128 entries ahead, one an entry; short groups
# of large folios all entries' lines up to 128 ahead, in steps of 8; long groups head and tail 1 two groups ahead.
cdef enum:
    FAR = 128
    NEAR = 16                   # the same for one page at a time: past a compare-and-swap fewer misses get under way than past
                                # a fetch-and-sub, and this gives them back
    STEP = 8
    SHORT_GROUP = 8             # entries

cdef inline uint64_t look_far(const page_t *map, const uint64_t *pfns, uint64_t i, uint64_t n, uint64_t next) noexcept nogil:
    """Prefetch the pages of the entries from `next` up to FAR behind i; returns the first that is not prefetched."""
    cdef int k
    if i + FAR < next or i + FAR + 2 * STEP > n:
        return next
    if next < i:
        next = i
    while next <= i + FAR:
        for k in range(STEP):
            prefetch_write(&map[pfns[next + k]])
        next += STEP
    return next

cdef inline void look_two_groups_on(const page_t *map, const uint64_t *pfns, uint64_t i, uint64_t n, const group_t *g) noexcept nogil:
    """Prefetch the entry two groups on, and head and tail 1 of its folio, if the list goes on as it did; i starts a group."""
    cdef uint64_t at
    if i + 2 * g.count < n:
        at = pfns[i + 2 * g.count]
        prefetch_read(&map[at])
        # The mask comes from tail 1: kept from before, it would be stored to the stack for each group.
        at = head_of(at, a64_load_relaxed(&map[g.head + 1].compound_info))
        prefetch_write(&map[at])
        prefetch_write(&map[at + 1])

cdef inline void look_along(const page_t *map, uint64_t pfn, uint64_t i, uint64_t n, const group_t *g) noexcept nogil:
    """The same for a range, eight groups on; page i of it starts a group."""
    cdef uint64_t k
    if g.count < SHORT_GROUP:
        # Lines follow each other, but locked operations hide that from the processor's own prefetcher.
        for k in range(i + FAR, min(i + FAR + g.count, n)):
            prefetch_write(&map[pfn + k])
    elif i + 8 * g.count + 1 < n:
        # Further than in a list: where a range goes on is no guess.
        prefetch_write(&map[pfn + i + 8 * g.count])
        prefetch_write(&map[pfn + i + 8 * g.count + 1])

# Pins, and nothing to be marked dirty: what a walk is nearly always about. A loop around a locked operation costs what its
# other instructions cost on top, it waits for its own stores even to the stack, and one that misses the caches has the more
# misses under way the shorter it is. So each generation has a loop that only lowers counters, and stops where anything else
# is to be done: a page that is passed over, a counter that ends or is short, somebody else at the same counter, and, so
# that nothing is counted for the commonest group, a small folio twice in a row. release_list() does that by the book.
cdef inline bint unpin_small(page_t *page) noexcept nogil:
    """One pin off a small folio that keeps references and that nobody else is changing; False with nothing changed."""
    cdef uint32_t old = refs_load(page)
    return old > GUP_PIN_COUNTING_BIAS and a32_cas_acq_rel(&page._refcount, &old, old - GUP_PIN_COUNTING_BIAS)

cdef inline bint unpin_large(page_t *head, uint64_t pins) noexcept nogil:
    """The same for a large folio."""
    cdef uint32_t old = pincount_load(head)
    if old < pins or not a32_cas_acq_rel(&as_folio(head)._pincount, &old, old - <uint32_t>pins):
        return False
    old = refs_load(head)
    if mm_likely(old > pins and a32_cas_acq_rel(&head._refcount, &old, old - <uint32_t>pins)):
        return True
    a32_fetch_add_acq_rel(&as_folio(head)._pincount, <uint32_t>pins)
    return False

cdef uint64_t plain_page(page_t *map, const uint64_t *pfns, uint64_t n, walk_t *w) noexcept nogil:
    cdef uint64_t i = 0, large = 0, pfn, word, skip = w.skip
    while i < n:
        pfn = pfns[i]
        if i + NEAR < n:
            prefetch_read(&map[pfns[i + NEAR]])
        word = a64_load_relaxed(&map[pfn].compound_info)
        # Branches, where the look-up of a head has none: a predicted address does not wait for a word that misses.
        if word & 1:
            pfn = head_of(pfn, word)
            if mm_unlikely(pfn == skip or not unpin_large(&map[pfn], 1)):
                break
            large += 1
        elif pfn == skip or pfn == 0:
            break
        elif page_is_head(&map[pfn]):
            if mm_unlikely(not unpin_large(&map[pfn], 1)):
                break
            large += 1
        elif mm_unlikely(not unpin_small(&map[pfn])):
            break
        i += 1
    w.large += large
    return i

cdef uint64_t plain_head(page_t *map, const uint64_t *pfns, uint64_t n, walk_t *w) noexcept nogil:
    cdef uint64_t i = 0, j, large = 0, merged = 0, skip = w.skip
    cdef uint64_t head = compound_head_pfn(map, pfns[0]), next = 0
    while i < n:
        j = i + 1
        while j < n:
            next = compound_head_pfn(map, pfns[j])
            if next != head:
                break
            j += 1
        if head == skip or head == 0:
            break
        if page_is_head(&map[head]):
            if mm_unlikely(not unpin_large(&map[head], j - i)):
                break
            large += 1
            merged += j - i - 1
        elif mm_unlikely(j - i > 1 or not unpin_small(&map[head])):
            break
        head = next
        i = j
    w.large += large
    w.merged += merged
    return i

cdef uint64_t plain_run(page_t *map, const uint64_t *pfns, uint64_t n, walk_t *w) noexcept nogil:
    # Stretches of small folios and of large ones take turns, each in a loop of its own with registers of its own.
    cdef uint64_t i = 0, next = 0, small = 0, large = 0, pfn, word, start, skip = w.skip
    cdef group_t g
    g.count = 1
    while i < n:
        start = i
        while i < n:
            pfn = pfns[i]
            if a64_load_relaxed(&map[pfn].compound_info) & 1 or page_is_head(&map[pfn]):
                break
            if mm_likely(i + FAR < n):
                prefetch_write(&map[pfns[i + FAR]])
            if mm_unlikely(i + 1 < n and pfns[i + 1] == pfn):
                break
            if mm_unlikely(pfn == skip or pfn == 0 or not unpin_small(&map[pfn])):
                break
            i += 1
        if i != start:
            # One entry each: their number is the length of the stretch.
            small += i - start
            g.count = 1
        start = large
        while i < n:
            pfn = pfns[i]
            word = a64_load_relaxed(&map[pfn].compound_info)
            if word & 1:
                g.nr_pages = ONE << tail_word_order(word)
            elif page_is_head(&map[pfn]):
                g.nr_pages = ONE << (a64_load_relaxed(&as_folio(&map[pfn])._flags_1) & 0xff)
            else:
                break
            if g.count < SHORT_GROUP:
                next = look_far(map, pfns, i, n, next)
            g.head = pfn & ~(g.nr_pages - 1)
            g.count = run_length(pfns + i, n - i, g.head, g.nr_pages)
            if g.count >= SHORT_GROUP:
                look_two_groups_on(map, pfns, i + g.count, n, &g)
            if mm_unlikely(g.head == skip or not unpin_large(&map[g.head], g.count)):
                break
            large += 1
            i += g.count
        if large == start:
            # Neither kind gets on: a group for the book, or the end.
            break
    w.large += large
    w.merged += i - small - large
    return i

cdef uint64_t plain_range(page_t *map, uint64_t pfn, uint64_t n, walk_t *w) noexcept nogil:
    cdef uint64_t i = 0, small = 0, large = 0, word, start, skip = w.skip
    cdef group_t g
    g.count = 1
    while i < n:
        start = i
        while i < n and not a64_load_relaxed(&map[pfn + i].compound_info) & 1 and not page_is_head(&map[pfn + i]):
            if mm_likely(i + FAR < n):
                prefetch_write(&map[pfn + i + FAR])
            if mm_unlikely(pfn + i == skip or not unpin_small(&map[pfn + i])):
                break
            i += 1
        small += i - start
        start = large
        while i < n:
            word = a64_load_relaxed(&map[pfn + i].compound_info)
            if word & 1:
                g.nr_pages = ONE << tail_word_order(word)
            elif page_is_head(&map[pfn + i]):
                g.nr_pages = ONE << (a64_load_relaxed(&as_folio(&map[pfn + i])._flags_1) & 0xff)
            else:
                break
            g.head = (pfn + i) & ~(g.nr_pages - 1)
            g.count = remaining_pages(g.head, g.nr_pages, pfn + i, n - i)
            look_along(map, pfn, i, n, &g)
            if mm_unlikely(g.head == skip or not unpin_large(&map[g.head], g.count)):
                break
            large += 1
            i += g.count
        if large == start:
            break
    w.large += large
    w.merged += i - small - large
    return i

# Called through pointers that the compiler cannot see through: merged into their callers, the loops would compete for
# registers, and which of them loses changes with every line around them.
ctypedef uint64_t (*list_walk)(page_t *map, const uint64_t *pfns, uint64_t n, walk_t *w) noexcept nogil
ctypedef uint64_t (*range_walk)(page_t *map, uint64_t pfn, uint64_t n, walk_t *w) noexcept nogil
cdef list_walk plain_lists[3]
cdef range_walk plain_ranges = plain_range
plain_lists[<int>GEN_RUN] = plain_run
plain_lists[<int>GEN_HEAD] = plain_head
plain_lists[<int>GEN_PAGE] = plain_page

cdef uint64_t release_list(batch_t *b, const uint64_t *pfns, uint64_t n, int gen) noexcept nogil:
    cdef uint64_t i = 0
    cdef group_t g
    cdef walk_t w
    walk_begin(b, &w)
    while i < n:
        if w.plain:
            i += plain_lists[gen](w.map, pfns + i, n - i, &w)
            if i == n:
                break
        elif gen == GEN_RUN and i + FAR < n:
            prefetch_write(&w.map[pfns[i + FAR]])
        # One group by the book. PFN 0 is a page of its own, so that NULL is a group like any other.
        if gen == GEN_RUN:
            next_run(w.map, pfns + i, n - i, &g)
        elif gen == GEN_HEAD:
            next_head(w.map, pfns + i, n - i, &g)
        else:
            g.head = compound_head_pfn(w.map, pfns[i])
            g.count = 1
        if mm_unlikely(release_group(b, &w, g.head, page_is_head(&w.map[g.head]), g.count)):
            break
        i += g.count
    return walk_end(b, &w, i, gen != GEN_RUN)

cdef uint64_t release_range(batch_t *b, uint64_t pfn, uint64_t n) noexcept nogil:
    cdef uint64_t i = 0
    cdef group_t g
    cdef walk_t w
    walk_begin(b, &w)
    while i < n:
        if w.plain:
            i += plain_ranges(w.map, pfn + i, n - i, &w)
            if i == n:
                break
        next_in_range(w.map, pfn + i, n - i, &g)
        look_along(w.map, pfn, i, n, &g)
        if g.nr_pages > 1:
            if mm_unlikely(release_group(b, &w, g.head, True, g.count)):
                break
        elif mm_unlikely(release_group(b, &w, g.head, False, g.count)):
            break
        i += g.count
    return walk_end(b, &w, i, False)

cdef inline page_t *freed_head(const batch_t *b, uint64_t i) noexcept nogil:
    return &b.m.map[b.freed[i] & ((ONE << FREED_CLEAN_SHIFT) - 1)]

cdef bint undo_begin(batch_t *b) noexcept nogil:
    cdef uint64_t i
    b.kept = not frames_hold(b.m, b.frees)
    if b.kept:
        return False
    # What this batch brought to 0 is its own to raise again; a reference holds it until the groups are retaken.
    for i in range(b.nr_freed):
        a32_store_release(&freed_head(b, i)._refcount, 1)
    return True

cdef inline void undo_group(batch_t *b, const group_t *g) noexcept nogil:
    if g.head == b.skip:
        return
    # Not to be had when another thread brought it to 0 and is about to free it: then it stays released.
    if retake(&b.m.map[g.head], g.nr_pages > 1, b.pins, g.count) and b.pins:
        b.released -= g.count

cdef void undo_list(batch_t *b, const uint64_t *pfns, uint64_t n) noexcept nogil:
    cdef uint64_t i = 0
    cdef group_t g
    while i < n:
        if pfns[i] == 0:
            i += 1
            continue
        next_run(b.m.map, pfns + i, n - i, &g)
        undo_group(b, &g)
        i += g.count

cdef void undo_range(batch_t *b, uint64_t pfn, uint64_t n) noexcept nogil:
    cdef uint64_t i = 0
    cdef group_t g
    while i < n:
        next_in_range(b.m.map, pfn + i, n - i, &g)
        undo_group(b, &g)
        i += g.count

# ---- batches -------------------------------------------------------------------------------------------------------------------
cdef int batch_begin(batch_t *b, mem_t *m, uint64_t nr_pages, bint pins, bint make_dirty) noexcept nogil:
    """Get ready for releases of nr_pages in all: 0, or -ENOMEM before anything changed.

    The arrays have room for the worst case; what is not used of them is never touched.
    """
    memset(b, 0, sizeof(batch_t))
    b.m = m
    b.pins = pins
    b.make_dirty = make_dirty
    b.skip = m.zero_pfn if pins else m.huge_zero_pfn
    b.frees = stat_sum(m, NR_FREES)
    b.freed_size = nr_pages * sizeof(uint64_t)
    if inject_fails(m, INJECT_ALLOC):
        return -ENOMEM
    b.freed = <uint64_t *>buffer_alloc(b.freed_size)
    if b.freed == NULL:
        return -ENOMEM
    if make_dirty:
        b.dirtied_size = nr_pages * sizeof(uint64_t)
        b.dirtied = <uint64_t *>buffer_alloc(b.dirtied_size)
        if b.dirtied == NULL:
            buffer_free(b.freed, b.freed_size)
            return -ENOMEM
    return 0

cdef void undo_end(batch_t *b) noexcept nogil:
    cdef uint64_t i
    for i in range(b.nr_dirtied):
        # At 0 another thread is about to free it, and counts its dirt.
        if refs_load(&b.m.map[b.dirtied[i]]) != 0:
            clear_dirty(b.m, b.dirtied[i])
    for i in range(b.nr_freed):
        a32_fetch_sub_acq_rel(&freed_head(b, i)._refcount, 1)
    b.nr_freed = 0
    frames_go(b.m)

cdef void batch_finish(batch_t *b) noexcept nogil:
    if b.released:
        stat_add(b.m, NR_FOLL_PIN_RELEASED, <int64_t>b.released)
    if b.nr_freed:
        free_folios(b.m, b.freed, b.nr_freed)
    stat_add(b.m, OP_REF_ATOMICS, <int64_t>b.ref_atomics)
    stat_add(b.m, OP_PINCOUNT_ATOMICS, <int64_t>b.pincount_atomics)
    stat_add(b.m, OP_HEAD_LOOKUPS, <int64_t>b.head_lookups)
    buffer_free(b.freed, b.freed_size)
    if b.dirtied != NULL:
        buffer_free(b.dirtied, b.dirtied_size)

# ---- acquiring a given list ----------------------------------------------------------------------------------------
cdef struct taken_t:            # what a grab counts, added once at its end
    uint64_t pins
    uint64_t ref_atomics
    uint64_t pincount_atomics

cdef void count_taken(mem_t *m, const taken_t *t) noexcept nogil:
    stat_add(m, NR_FOLL_PIN_ACQUIRED, <int64_t>t.pins)
    stat_add(m, OP_REF_ATOMICS, <int64_t>t.ref_atomics)
    stat_add(m, OP_PINCOUNT_ATOMICS, <int64_t>t.pincount_atomics)
    stat_add(m, OP_HEAD_LOOKUPS, <int64_t>t.ref_atomics)

cdef inline int grab_group(mem_t *m, uint64_t pfn, const group_t *g, unsigned flags, taken_t *t) noexcept nogil:
    """Take a pin or reference for each entry of the group that starts at pfn: 0, -ENOMEM, -EREMOTEIO, -EAGAIN.

    -EAGAIN: the page was split off its folio between the look and the reference; nothing is taken, look again.
    """
    cdef page_t *head = &m.map[g.head]
    cdef bint pin = (flags & FOLL_PIN) != 0
    cdef uint64_t amount, now
    cdef uint32_t old
    cdef device_t *d
    if mm_unlikely(pin and g.head == m.zero_pfn):
        return 0
    if mm_unlikely(page_zone(head) == ZONE_DEVICE) and not flags & FOLL_PCI_P2PDMA:
        d = device_of(m, g.head)
        if d != NULL and d.type == DEVICE_PCI_P2PDMA:
            return -EREMOTEIO if <int32_t>refs_load(head) > 0 else -ENOMEM
    amount = g.count << GUP_PIN_COUNTING_SHIFT if pin and g.nr_pages == 1 else g.count
    old = refs_load(head)
    if mm_unlikely(amount >> 31) or not ref_add_positive(head, amount):
        return -ENOMEM
    if mm_unlikely(folio_at(m.map, pfn, &now) != g.nr_pages or now != g.head):
        if put_plain(m, g.head, <uint32_t>amount) == FREED:
            free_folio(m, g.head, folio_order_of(head))
        return -EAGAIN
    t.ref_atomics += 1
    if not pin:
        note_plain_refs(head, old, <uint32_t>g.count)
        return 0
    t.pins += g.count
    if g.nr_pages > 1:
        a32_fetch_add_relaxed(&as_folio(head)._pincount, <uint32_t>g.count)
        t.pincount_atomics += 1
    return 0

cdef int grab_list(mem_t *m, const uint64_t *pfns, uint64_t n, unsigned flags, uint64_t *done) noexcept nogil:
    cdef page_t *map = m.map
    cdef uint64_t i = 0, next = 0
    cdef group_t g
    cdef int error = 0
    cdef taken_t t
    memset(&t, 0, sizeof(t))
    g.count = 1
    while i < n:
        if pfns[i] == 0:
            i += 1
            continue
        if next_small(map, pfns + i, n - i, &g):
            if i + FAR < n:
                prefetch_write(&map[pfns[i + FAR]])
        else:
            if g.count < SHORT_GROUP:
                next = look_far(map, pfns, i, n, next)
            next_run(map, pfns + i, n - i, &g)
            if g.count >= SHORT_GROUP:
                look_two_groups_on(map, pfns, i + g.count, n, &g)
        error = grab_group(m, pfns[i], &g, flags, &t)
        if mm_unlikely(error != 0):
            if error == -EAGAIN:
                error = 0
                continue
            break
        i += g.count
    count_taken(m, &t)
    done[0] = i
    return error

cdef int grab_range(mem_t *m, uint64_t pfn, uint64_t n, unsigned flags, uint64_t *done) noexcept nogil:
    cdef uint64_t i = 0
    cdef group_t g
    cdef int error = 0
    cdef taken_t t
    memset(&t, 0, sizeof(t))
    while i < n:
        next_in_range(m.map, pfn + i, n - i, &g)
        look_along(m.map, pfn, i, n, &g)
        error = grab_group(m, pfn + i, &g, flags, &t)
        if mm_unlikely(error != 0):
            if error == -EAGAIN:
                error = 0
                continue
            break
        i += g.count
    count_taken(m, &t)
    done[0] = i
    return error

cdef int put_plain(mem_t *m, uint64_t pfn, uint32_t refs) noexcept nogil:
    """Take back references that the same call added: no look at what they were for."""
    return FREED if a32_fetch_sub_acq_rel(&m.map[pfn]._refcount, refs) == refs else NOT_FREED
