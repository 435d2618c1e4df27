"""The unpin family, release_pages, grab_pages, and the iterators as Python sees them.

Units: npages, refs: base pages; heads and counts: uint64 arrays.
Raises: TypeError, InvalidArgument for numbers outside of the list, BadPage when a law would break, with nothing
    changed.
Threads: any number at once; each call drops the GIL once, and is not one atomic step for the others.
Kernel: the functions of these names in gup.c and swap.c.
"""
from libc.errno cimport EINTR, ENOMEM
from mmcore.core.buddy cimport free_folio
from mmcore.core.hook cimport pin_tell, pin_watchers, pins_begin, pins_end, pins_t, pins_tell
from mmcore.core.pagelist cimport as_pages, new_pagelist, filling

import errno as _errno


from .errors import BadPage, InvalidArgument, MMError
from .folio import folio_put_refs

__all__ = [
    "compound_next", "for_each_compound_head", "compound_range_next", "for_each_compound_range", "folio_runs",
    "put_compound_head", "unpin_user_page", "unpin_user_pages", "unpin_user_pages_dirty_lock",
    "unpin_user_page_range_dirty_lock", "unpin_user_folio", "unpin_user_folio_dirty_locked", "unpin_folio",
    "unpin_folios", "release_pages", "folios_put", "grab_pages",
]

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

cdef void pins_in(PageList plist, PageRanges ranges, uint64_t n, pins_t *pins) noexcept:
    """Note the first n pages of a list, or of ranges where there are some, for those who watch pins."""
    cdef mem_t *m = &plist.mem.m
    cdef uint64_t i = 0, k
    pins_begin(pins)
    with nogil:
        if ranges is None:
            list_pins(m, plist.p, n, pins)
        else:
            while n:
                k = min(ranges.count[i], n)
                range_pins(m, plist.p[i], k, pins)
                n -= k
                i += 1

cdef object release_pages_of(object pages, object npages, int gen, bint pins, bint make_dirty, bint sanity, str call):
    """Release the first npages of a PageList or PageRanges: the body of every def function on lists below."""
    cdef PageList plist
    cdef PageRanges ranges = None
    cdef Memory mem
    cdef batch_t b
    cdef pins_t taken
    cdef bint watched
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
    mem.ptr()           # again: to convert npages may have run anything
    if sanity and mem.m.debug:
        if ranges is not None:
            plist = ranges.to_pagelist()
            ranges = None
        sanity_check_pinned_pages(mem, plist.p, n)
    watched = mm_unlikely(pin_watchers) and pins
    if watched:
        pins_in(plist, ranges, n, &taken)
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
    if watched and b.error:
        pins_end(&taken)
    if b.error == -ENOMEM:
        raise no_room(n)
    if b.error:
        raise failed(mem, &b, call)
    if watched:
        pins_tell(mem, &taken, -1)

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
        pin_tell(mem, pfn, nr, -1)


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
    next_run(plist.mem.ptr().map, plist.p + at, plist.n - at, &g)
    return folio_handle(plist.mem, g.head), g.count


def for_each_compound_head(pages, npages=None):
    """Iterate over (Folio, n): the folios of a list and how many neighbouring entries are in each. NULL is skipped.

    Folio and count are read when the iterator gets there; the caller holds references. v3 series, 2021.
    """
    cdef uint64_t n
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
    cdef Memory mem
    n[0] = count_arg(npages, "npages", 0, ~<uint64_t>0)
    mem = page_arg(page, pfn)
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
    next_in_range(mem.ptr().map, pfn + at, n - at, &g)
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


# ---- the unpin family ----------------------------------------------------------------------------------------------
def put_compound_head(folio, refs, flags=FOLL_PIN):
    """Drop refs pins (FOLL_PIN) or references (FOLL_GET) of a folio in one update. gup_put_folio() in later kernels.

    Raises BadPage when that would break a law.
    """
    cdef uint64_t pfn
    cdef uint64_t nr = count_arg(refs, "refs", 0, 0x7fffffff)
    cdef unsigned bits = <unsigned>count_arg(flags, "flags", 0, 0xffffffff)
    cdef Memory mem = folio_arg(folio, &pfn, False)
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
    cdef bint dirty = bool(make_dirty), watched
    cdef Memory mem = range_arg(page, npages, &pfn, &n)
    cdef batch_t b
    cdef pins_t taken
    if n == 0:
        return
    watched = pin_watchers != 0
    if mm_unlikely(watched):
        pins_begin(&taken)
        range_pins(&mem.m, pfn, n, &taken)
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
    if watched and b.error:
        pins_end(&taken)
    if b.error == -ENOMEM:
        raise no_room(n)
    if b.error:
        raise failed(mem, &b, "unpin_user_page_range_dirty_lock()")
    if watched:
        pins_tell(mem, &taken, -1)


def unpin_user_folio(folio, npages):
    """Drop npages pins of a folio. Raises BadPage when it has fewer. Kernel: unpin_user_folio()."""
    cdef uint64_t pfn
    cdef uint64_t n = count_arg(npages, "npages", 0, 0x7fffffff)
    cdef Memory mem = folio_arg(folio, &pfn, False)
    release_one(mem, pfn, n, False, "unpin_user_folio()")


def unpin_user_folio_dirty_locked(folio, npages, make_dirty):
    """Drop npages pins of a folio, marked dirty first if make_dirty and it is clean; it takes the folio lock itself.

    Proposed on the list in 2025 and not merged. Raises BadPage when it has fewer pins.
    """
    cdef uint64_t pfn
    cdef uint64_t n = count_arg(npages, "npages", 0, 0x7fffffff)
    cdef bint dirty = bool(make_dirty)
    cdef Memory mem = folio_arg(folio, &pfn, False)
    release_one(mem, pfn, n, dirty, "unpin_user_folio_dirty_locked()")


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


# ---- acquiring a given list ----------------------------------------------------------------------------------------------------
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
    cdef pins_t taken
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
        pins_in(plist, ranges, n, &taken)
        pins_tell(mem, &taken, 1)
