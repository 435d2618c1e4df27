"""The unpin family, release_pages, grab_pages, and the iterators as Python sees them."""
from cpython.exc cimport PyErr_Occurred
from libc.errno cimport EAGAIN, EINTR, ENOMEM, EREMOTEIO
from libc.string cimport memset
from mmcore.core.hook cimport pin_watchers, pins_changed
from mmcore.core.buddy cimport FREED_CLEAN_SHIFT, frames_go, frames_hold, free_folio
from mmcore.core.pagelist cimport as_pages, new_pagelist, filling, pagelist_view

import errno as _errno

import numpy as np

from .errors import BadPage, InvalidArgument, MMError
from .folio import folio_put_refs

__all__ = [
    "compound_next", "for_each_compound_head", "compound_range_next", "for_each_compound_range", "folio_runs",
    "put_compound_head", "unpin_user_page", "unpin_user_pages", "unpin_user_pages_dirty_lock",
    "unpin_user_page_range_dirty_lock", "unpin_user_folio", "unpin_user_folio_dirty_locked", "unpin_folio",
    "unpin_folios", "release_pages", "folios_put", "grab_pages",
]

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
    STEP = 8
    SHORT_GROUP = 8             # entries
    FEW_PAGES = 16              # a folio of at most this many is compared entry by entry

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
    """Prefetch head and tail 1 of the folio two groups on, if the list goes on as it did; entry i starts a group."""
    cdef uint64_t at
    if i + 2 * g.count < n:
        at = pfns[i + 2 * g.count] & ~(g.nr_pages - 1)
        prefetch_write(&map[at])
        prefetch_write(&map[at + 1])

cdef inline void look_along(const page_t *map, uint64_t pfn, uint64_t i, uint64_t n, const group_t *g) noexcept nogil:
    """The same for a range; page i of it starts a group."""
    cdef uint64_t k
    if g.count < SHORT_GROUP:
        # Lines follow each other, but locked operations hide that from the processor's own prefetcher.
        for k in range(i + FAR, min(i + FAR + g.count, n)):
            prefetch_write(&map[pfn + k])
    elif i + 2 * g.count + 1 < n:
        prefetch_write(&map[pfn + i + 2 * g.count])
        prefetch_write(&map[pfn + i + 2 * g.count + 1])

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
    cdef uint64_t i = 0, next = 0, large = 0, merged = 0, pfn, word, skip = w.skip
    cdef group_t g
    g.count = 1
    while i < n:
        pfn = pfns[i]
        word = a64_load_relaxed(&map[pfn].compound_info)
        if word & 1:
            g.nr_pages = ONE << tail_word_order(word)
            g.head = pfn & ~(g.nr_pages - 1)
        elif page_is_head(&map[pfn]):
            g.nr_pages = ONE << (a64_load_relaxed(&as_folio(&map[pfn])._flags_1) & 0xff)
            g.head = pfn
        else:
            if mm_likely(i + FAR < n):
                prefetch_write(&map[pfns[i + FAR]])
                if mm_unlikely(pfns[i + 1] == pfn):
                    break
            elif i + 1 < n and pfns[i + 1] == pfn:
                break
            if mm_unlikely(pfn == skip or pfn == 0 or not unpin_small(&map[pfn])):
                break
            g.count = 1
            i += 1
            continue
        if g.count < SHORT_GROUP:
            next = look_far(map, pfns, i, n, next)
        g.count = run_length(pfns + i, n - i, g.head, g.nr_pages)
        if g.count >= SHORT_GROUP:
            look_two_groups_on(map, pfns, i + g.count, n, &g)
        if mm_unlikely(g.head == skip or not unpin_large(&map[g.head], g.count)):
            break
        large += 1
        i += g.count
        merged += g.count - 1
    w.large += large
    w.merged += merged
    return i

cdef uint64_t release_list(batch_t *b, const uint64_t *pfns, uint64_t n, int gen) noexcept nogil:
    cdef uint64_t i = 0
    cdef group_t g
    cdef walk_t w
    walk_begin(b, &w)
    while i < n:
        if w.plain:
            if gen == GEN_RUN:
                i += plain_run(w.map, pfns + i, n - i, &w)
            elif gen == GEN_HEAD:
                i += plain_head(w.map, pfns + i, n - i, &w)
            else:
                i += plain_page(w.map, pfns + i, n - i, &w)
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

cdef object no_room(uint64_t n):
    return MMError(_errno.ENOMEM, f"no memory to note the folios that a release of {n} pages may free. Nothing was changed")

cdef object failed(Memory mem, batch_t *b, str call):
    """Raise what a failed batch ended with; it is undone already, or kept."""
    if b.error == -EINTR:
        raise_pending()
    error = bad_page(mem, b.error, b.bad_pfn, b.bad_count, call)
    if b.kept:
        error = BadPage(error.law, error.reason.removesuffix("Nothing was changed") + "What the call released before it got "
                        "there stays released: other threads freed memory meanwhile", pfn=error.pfn)
    return error

cdef int generation_arg(object release) except -1:
    if release == "run":
        return GEN_RUN
    if release == "head":
        return GEN_HEAD
    if release == "page":
        return GEN_PAGE
    raise InvalidArgument(f"release={release!r} is none of 'run', 'head', 'page'")

cdef int sanity_check_pinned_pages(Memory mem, const uint64_t *pfns, uint64_t n) except -1:
    """Under debug=True: a pinned anonymous page was exclusive when it was pinned, and stays so."""
    cdef mem_t *m = &mem.m
    cdef uint64_t i, head
    cdef bint exclusive
    for i in range(n):
        if pfns[i] == 0 or pfns[i] == m.zero_pfn:
            continue
        head = compound_head_pfn(m.map, pfns[i])
        if not folio_is_anon(&m.map[head]):
            continue
        exclusive = test_flag(&m.map[head], PG_owner_2)
        if page_is_head(&m.map[head]) and not folio_is_hugetlb(&m.map[head]):
            exclusive = exclusive or test_flag(&m.map[pfns[i]], PG_owner_2)
        if not exclusive:
            raise BadPage("pinned anonymous pages are exclusive", f"PFN {pfns[i]:#x} is pinned, anonymous, and not exclusive "
                          "(debug=True). Nothing was changed", pfn=pfns[i])
    return 0

cdef object watched_runs(object pages, uint64_t n):
    """(heads, counts) of the first n pages for those who watch pins; the zero page is not among them."""
    cdef PageList plist = pages.to_pagelist() if isinstance(pages, PageRanges) else pages
    heads, counts = folio_runs(pagelist_view(plist, 0, n))
    return heads[heads != plist.mem.m.zero_pfn], counts[heads != plist.mem.m.zero_pfn]

cdef object release_pages_of(object pages, object npages, int gen, bint pins, bint make_dirty, bint sanity, str call):
    """Release the first npages of a PageList or PageRanges: the body of every def function on lists below."""
    cdef PageList plist
    cdef PageRanges ranges = None
    cdef Memory mem
    cdef batch_t b
    cdef uint64_t n, total, i, done, left, k, nr_runs = 0
    pages = as_pages(pages)
    mem = pages.mem
    if isinstance(pages, PageRanges):
        ranges = pages
        plist = ranges.starts
        nr_runs = plist.n
        total = ranges.nr_pages
        if gen != GEN_RUN:
            # The walks over lists want a list; only the generation `run` knows ranges.
            plist = ranges.to_pagelist()
            ranges = None
    else:
        plist = pages
        total = plist.n
    n = total if npages is None else count_arg(npages, "npages", 0, total)
    if n == 0:
        return
    if sanity and mem.m.debug:
        if ranges is not None:
            plist = ranges.to_pagelist()
            ranges = None
        sanity_check_pinned_pages(mem, plist.p, n)
    watched = watched_runs(pages, n) if mm_unlikely(pin_watchers) and pins else None
    cdef mem_t *m = mem.enter()
    with nogil:
        done = 0
        b.error = batch_begin(&b, m, n, pins, make_dirty)
        if b.error == 0 and ranges is None:
            done = release_list(&b, plist.p, n, gen)
            if done < n and undo_begin(&b):
                undo_list(&b, plist.p, done)
                undo_end(&b)
        elif b.error == 0:
            left = n
            for i in range(nr_runs):
                k = min(ranges.count[i], left)
                done = release_range(&b, plist.p[i], k) if plist.p[i] else k
                if done < k:
                    if undo_begin(&b):
                        undo_range(&b, plist.p[i], done)
                        while i > 0:
                            i -= 1
                            if plist.p[i]:
                                undo_range(&b, plist.p[i], ranges.count[i])
                        undo_end(&b)
                    break
                left -= k
                if left == 0:
                    break
        if b.error != -ENOMEM:
            batch_finish(&b)
    mem.leave()
    if b.error == -ENOMEM:
        raise no_room(n)
    if b.error:
        raise failed(mem, &b, call)
    if watched is not None:
        pins_changed(mem, watched[0], watched[1], -1)

cdef object release_one(Memory mem, uint64_t pfn, uint64_t nr, bint make_dirty, str call):
    """Drop pins of one folio: the body of the functions that take a page or a folio."""
    cdef mem_t *m = &mem.m
    cdef page_t *head = &m.map[pfn]
    cdef bint large = page_is_head(head), newly = False
    cdef int result
    if nr == 0 or pfn == m.zero_pfn:
        return
    if make_dirty and not test_flag(head, PG_dirty):
        if refs_load(head) == 0:
            raise bad_page(mem, BAD_UNPINNED, pfn, nr, call)
        if not trylock(head):
            mem.enter()
            with nogil:
                result = lock_wait(m, pfn)
            mem.leave()
            if result:
                raise_pending()
        newly = mark_dirty(m, pfn)
        unlock(m, pfn)
    result = put_pins(m, head, large, nr)
    if result < 0:
        if newly:
            clear_dirty(m, pfn)
        raise bad_page(mem, result, pfn, nr, call)
    stat_add(m, NR_FOLL_PIN_RELEASED, <int64_t>nr)
    stat_add(m, OP_REF_ATOMICS, 1)
    stat_add(m, OP_PINCOUNT_ATOMICS, large)
    if result == FREED:
        free_folio(m, pfn, folio_order_of(head))
    if mm_unlikely(pin_watchers):
        pins_changed(mem, (pfn,), (nr,), -1)


# ---- iterators ----------------------------------------------------------------------------------------------------------------------
def compound_next(pages, i):
    """Return (Folio, n): the folio of entry i of a list, and how many entries from there on are in it.

    Grouping is by neighbours in the list: any order within a folio, holes and duplicates. (None, 1) for NULL.
    Raises InvalidArgument when i is no index of the list.
    """
    pages = as_pages(pages)
    cdef PageList plist = pages.to_pagelist() if isinstance(pages, PageRanges) else pages
    cdef group_t g
    cdef uint64_t at
    if plist.n == 0:
        raise InvalidArgument("the list is empty")
    at = count_arg(i, "index", 0, plist.n - 1)
    if plist.p[at] == 0:
        return None, 1
    next_run(plist.mem.m.map, plist.p + at, plist.n - at, &g)
    return folio_handle(plist.mem, g.head), g.count


def for_each_compound_head(pages, npages=None):
    """Iterate over (Folio, n): the folios of a list and how many neighbouring entries are in each. NULL is skipped.

    Folio and count are read when the iterator gets there; the caller holds references. v3 series, 2021.
    """
    cdef group_t g
    cdef uint64_t i = 0, n
    pages = as_pages(pages)
    cdef PageList plist = pages.to_pagelist() if isinstance(pages, PageRanges) else pages
    n = plist.n if npages is None else count_arg(npages, "npages", 0, plist.n)
    return _heads(plist, n)


def _heads(PageList plist, uint64_t n):
    cdef group_t g
    cdef uint64_t i = 0
    while i < n:
        if plist.p[i] == 0:
            i += 1
            continue
        next_run(plist.mem.ptr().map, plist.p + i, n - i, &g)
        i += g.count
        yield folio_handle(plist.mem, g.head), g.count

cdef Memory range_arg(object page, object npages, uint64_t *pfn, uint64_t *n):
    """A first Page and a number of pages that stay within the Memory."""
    cdef Memory mem = page_arg(page, pfn)
    n[0] = count_arg(npages, "npages", 0, ~<uint64_t>0)
    if n[0] and not run_valid(&mem.m, pfn[0], pfn[0] + n[0] - 1):
        raise InvalidArgument(f"{n[0]} pages from PFN {pfn[0]:#x} leave this Memory, whose last page is "
                              f"{mem.m.nr_pages - 1:#x}" + (", or cross a hole between devices" if mem.m.nr_devices else ""),
                              pfn=pfn[0])
    return mem


def compound_range_next(page, npages, i):
    """Return (Folio, n): the folio of page + i in a range of contiguous pages, and how many of the range follow in it."""
    cdef uint64_t pfn, n, at
    cdef group_t g
    cdef Memory mem = range_arg(page, npages, &pfn, &n)
    if n == 0:
        raise InvalidArgument("the range is empty")
    at = count_arg(i, "index", 0, n - 1)
    next_in_range(mem.m.map, pfn + at, n - at, &g)
    return folio_handle(mem, g.head), g.count


def for_each_compound_range(page, npages):
    """Iterate over (Folio, n): the folios that a range of contiguous pages touches, and how many of its pages are in each."""
    cdef uint64_t pfn, n
    cdef Memory mem = range_arg(page, npages, &pfn, &n)
    return _range(mem, pfn, n)


def _range(Memory mem, uint64_t pfn, uint64_t n):
    cdef group_t g
    cdef uint64_t i = 0
    while i < n:
        next_in_range(mem.ptr().map, pfn + i, n - i, &g)
        i += g.count
        yield folio_handle(mem, g.head), g.count


def folio_runs(pages):
    """Return (head PFNs, counts), uint64 arrays: all that for_each_compound_head gives, in one step without the GIL."""
    pages = as_pages(pages)
    cdef PageList plist = pages.to_pagelist() if isinstance(pages, PageRanges) else pages
    cdef PageList heads = new_pagelist(plist.mem, plist.n), counts = new_pagelist(plist.mem, plist.n)
    cdef uint64_t *head = filling(heads)
    cdef uint64_t *count = filling(counts)
    cdef uint64_t i = 0, groups = 0
    cdef group_t g
    cdef mem_t *m = plist.mem.enter()
    with nogil:
        while i < plist.n:
            if plist.p[i] == 0:
                i += 1
                continue
            next_run(m.map, plist.p + i, plist.n - i, &g)
            head[groups] = g.head
            count[groups] = g.count
            groups += 1
            i += g.count
        stat_add(m, OP_HEAD_LOOKUPS, <int64_t>groups)
    plist.mem.leave()
    return heads.pfns[:groups].copy(), counts.pfns[:groups].copy()


# ---- the unpin family -----------------------------------------------------------------------------------------------------------------------
def put_compound_head(folio, refs, flags=FOLL_PIN):
    """Drop refs pins (FOLL_PIN) or references (FOLL_GET) of a folio in one update. gup_put_folio() in later kernels.

    Raises BadPage when that would break a law.
    """
    cdef uint64_t pfn
    cdef Memory mem = folio_arg(folio, &pfn, False)
    cdef uint64_t nr = count_arg(refs, "refs", 0, 0x7fffffff)
    cdef unsigned bits = <unsigned>count_arg(flags, "flags", 0, 0xffffffff)
    if bits & FOLL_GET and bits & FOLL_PIN or not bits & (FOLL_GET | FOLL_PIN):
        raise InvalidArgument("flags must have one of FOLL_GET and FOLL_PIN")
    if bits & FOLL_PIN:
        release_one(mem, pfn, nr, False, "put_compound_head()")
    elif nr:
        folio_put_refs(folio, nr)


def unpin_user_page(page):
    """Drop one pin of a page taken by pin_user_pages*. Raises BadPage when it is not pinned."""
    cdef uint64_t pfn
    cdef Memory mem = page_arg(page, &pfn)
    if mem.m.debug:
        sanity_check_pinned_pages(mem, &pfn, 1)
    release_one(mem, compound_head_pfn(mem.m.map, pfn), 1, False, "unpin_user_page()")


def unpin_user_pages(pages, npages=None, *, release="run"):
    """Drop one pin of each of the first npages of a list; NULL entries are skipped.

    pages: PageList or PageRanges; release: "run", "head" or "page", see the docs of the generations. Drops the GIL once
    for all. Raises BadPage when a page is not pinned, with nothing changed; InvalidArgument for npages outside of the
    list, where the kernel warns. Kernel: unpin_user_pages().
    """
    release_pages_of(pages, npages, generation_arg(release), True, False, True, "unpin_user_pages()")


def unpin_user_pages_dirty_lock(pages, npages, make_dirty, *, release="run"):
    """Drop one pin of each of the first npages of a list, each folio marked dirty under its lock first if make_dirty.

    A folio that is dirty already is not locked. NULL entries and the zero page are skipped, also when dirtying. May
    sleep for a folio lock. Raises as unpin_user_pages; the dirtying is undone as well.
    Kernel: unpin_user_pages_dirty_lock().
    """
    release_pages_of(pages, npages, generation_arg(release), True, bool(make_dirty), True, "unpin_user_pages_dirty_lock()")


def unpin_user_page_range_dirty_lock(page, npages, make_dirty):
    """Drop one pin of each of npages contiguous pages from `page` on, marked dirty first if make_dirty.

    Only for pages pinned by pin_user_pages* (FOLL_PIN is hard-wired): pages taken by get_user_pages* or folio_get() must
    not go through here. One look and one update a folio. Raises as unpin_user_pages_dirty_lock; InvalidArgument for a
    range that leaves the memory. Kernel: unpin_user_page_range_dirty_lock().
    """
    cdef uint64_t pfn, n, done = 0
    cdef Memory mem = range_arg(page, npages, &pfn, &n)
    cdef bint dirty = bool(make_dirty)
    cdef batch_t b
    if n == 0:
        return
    watched = watched_runs(PageList(mem, range(pfn, pfn + n)), n) if mm_unlikely(pin_watchers) else None
    cdef mem_t *m = mem.enter()
    with nogil:
        b.error = batch_begin(&b, m, n, True, dirty)
        if b.error == 0:
            done = release_range(&b, pfn, n)
            if done < n and undo_begin(&b):
                undo_range(&b, pfn, done)
                undo_end(&b)
            batch_finish(&b)
    mem.leave()
    if b.error == -ENOMEM:
        raise no_room(n)
    if b.error:
        raise failed(mem, &b, "unpin_user_page_range_dirty_lock()")
    if watched is not None:
        pins_changed(mem, watched[0], watched[1], -1)


def unpin_user_folio(folio, npages):
    """Drop npages pins of a folio. Raises BadPage when it has fewer. Kernel: unpin_user_folio()."""
    cdef uint64_t pfn
    cdef Memory mem = folio_arg(folio, &pfn, False)
    release_one(mem, pfn, count_arg(npages, "npages", 0, 0x7fffffff), False, "unpin_user_folio()")


def unpin_user_folio_dirty_locked(folio, npages, make_dirty):
    """Drop npages pins of a folio, marked dirty first if make_dirty and it is clean; it takes the folio lock itself.

    Proposed on the list in 2025 and not merged. Raises BadPage when it has fewer pins.
    """
    cdef uint64_t pfn
    cdef Memory mem = folio_arg(folio, &pfn, False)
    release_one(mem, pfn, count_arg(npages, "npages", 0, 0x7fffffff), bool(make_dirty), "unpin_user_folio_dirty_locked()")


def unpin_folio(folio):
    """Drop one pin of a folio. Kernel: unpin_folio()."""
    unpin_user_folio(folio, 1)

cdef object heads_of(object folios):
    """A list of folios as a PageList of their heads; None stands for NULL."""
    cdef uint64_t pfn
    cdef Memory mem = None, other
    if isinstance(folios, (PageList, PageRanges)):
        raise TypeError("a list of folios is wanted, not of pages")
    folios = list(folios)
    heads = []
    for folio in folios:
        if folio is None:
            heads.append(0)
            continue
        other = folio_arg(folio, &pfn, False)
        if mem is not None and other is not mem:
            raise InvalidArgument("the folios belong to two Memories", pfn=pfn)
        mem = other
        heads.append(pfn)
    return PageList(mem, heads) if mem is not None else None


def unpin_folios(folios):
    """Drop one pin of each folio of a list; equal neighbours in one update, None is skipped. Kernel: unpin_folios()."""
    heads = heads_of(folios)
    if heads is not None:
        release_pages_of(heads, None, GEN_RUN, True, False, False, "unpin_folios()")


def release_pages(pages, *, release="run"):
    """Drop one plain reference of each page of a list, and free what reaches 0; the huge zero folio is skipped.

    pages: PageList or PageRanges. release="run" groups by folio as the unpin family does; "page" goes one by one, as the
    kernel still does. Raises BadPage when a reference is missing, with nothing changed. Kernel: release_pages().
    """
    release_pages_of(pages, None, generation_arg(release), False, False, False, "release_pages()")


def folios_put(folios):
    """Drop one plain reference of each folio of a list; the huge zero folio is skipped. Kernel: folios_put()."""
    heads = heads_of(folios)
    if heads is not None:
        release_pages_of(heads, None, GEN_RUN, False, False, False, "folios_put()")


# ---- acquiring a given list -----------------------------------------------------------------------------------------------------------------------
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
    cdef uint64_t i = 0, k
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


def grab_pages(pages, flags=FOLL_PIN):
    """Take a pin (FOLL_PIN) or a reference (FOLL_GET) of each page of a list, all or nothing; NULL is skipped.

    pages: PageList or PageRanges. Raises MMError: ENOMEM for a page that is free or whose counter would overflow,
    EREMOTEIO for P2PDMA memory without FOLL_PCI_P2PDMA; .pfn says which. What was taken before is given back then.
    """
    pages = as_pages(pages)
    cdef PageRanges ranges = pages if isinstance(pages, PageRanges) else None
    cdef PageList plist = pages if ranges is None else ranges.starts
    cdef Memory mem = plist.mem
    cdef unsigned bits = <unsigned>count_arg(flags, "flags", 0, 0xffffffff)
    cdef uint64_t n = plist.n if ranges is None else ranges.nr_pages
    cdef uint64_t done = 0, failed_at = 0, i = 0
    cdef int error
    cdef batch_t b
    if bits & FOLL_GET and bits & FOLL_PIN or not bits & (FOLL_GET | FOLL_PIN):
        raise InvalidArgument("flags must have one of FOLL_GET and FOLL_PIN")
    if n == 0:
        return
    cdef mem_t *m = mem.enter()
    with nogil:
        # A release that may be needed to give back, got ready before anything is taken.
        b.error = batch_begin(&b, m, n, (bits & FOLL_PIN) != 0, False)
        error = b.error
        if error == 0:
            if not b.pins:
                b.skip = 0
            if ranges is None:
                error = grab_list(m, plist.p, n, bits, &done)
                if error:
                    failed_at = plist.p[done]
                    release_list(&b, plist.p, done, GEN_RUN)
            else:
                while i < plist.n:
                    if plist.p[i]:
                        error = grab_range(m, plist.p[i], ranges.count[i], bits, &done)
                        if error:
                            failed_at = plist.p[i] + done
                            release_range(&b, plist.p[i], done)
                            break
                    i += 1
                if error:
                    while i > 0:
                        i -= 1
                        if plist.p[i]:
                            release_range(&b, plist.p[i], ranges.count[i])
            batch_finish(&b)
    mem.leave()
    if b.error:
        raise no_room(n)
    if error:
        raise grab_error(mem, error, failed_at)
    if mm_unlikely(pin_watchers) and bits & FOLL_PIN:
        watched = watched_runs(pages, n)
        pins_changed(mem, watched[0], watched[1], 1)
