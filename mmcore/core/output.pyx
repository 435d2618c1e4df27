"""Sinks: PageList, PageRanges, and what Python code makes of leaves.

Units: pages are handed on as a first Page and a number of base pages.
Raises: what the methods of a subclass raise passes on.
Threads: a sink is for one call at a time.
Kernel: gup_output, of the review of 2020; not merged.
"""
from libc.errno cimport ENOMEM
from libc.stdlib cimport free, realloc
from libc.string cimport memcpy
from mmcore.core.folio cimport FREED, free_folio, put_pins, put_refs
from mmcore.core.hook cimport pin_watchers, pins_begin, pins_t, pins_tell
from mmcore.core.pagelist cimport PageRanges, filling, new_pagelist, pagelist_fill, pagelist_view
from mmcore.core.unpin cimport group_t, next_in_range
from mmcore.core.walk cimport range_pins

from .errors import InvalidArgument

__all__ = ["GupOutput"]

# ---- a PFN a page -----------------------------------------------------------------------------------------------------
cdef struct list_output_t:
    gup_output_t base
    uint64_t *pfn               # next to fill
    uint64_t *end               # one past the room there is

cdef uint64_t list_take(gup_output_t *base, const uint64_t *leaf, uint64_t nr) noexcept nogil:
    cdef list_output_t *out = <list_output_t *>base
    cdef uint64_t *at = out.pfn
    cdef uint64_t i, k, pfn, count
    for i in range(nr):
        pfn = leaf_pfn(leaf[i])
        count = leaf_count(leaf[i])
        if mm_likely(count == 1):
            at[0] = pfn
        else:
            for k in range(count):
                at[k] = pfn + k
        at += count
    out.pfn = at
    return nr

cdef int fillable(object given, Memory owner, Memory mem, uint64_t nr_pages) except -1:
    """An object that is to be filled belongs here, and is empty."""
    if owner is not mem:
        raise InvalidArgument(f"output= is a {type(given).__name__} of another Memory" if owner is not None else
                              f"output= is a {type(given).__name__} that was never set up")
    if nr_pages:
        raise InvalidArgument(f"output= is a {type(given).__name__} of {nr_pages} pages: an empty one is filled, once; pass the class, "
                              "or an object just made")
    return 0

cdef class PageListOutput(GupOutput):
    cdef list_output_t out
    cdef PageList pages
    cdef PageList given

    cdef gup_output_t *begin(self, Memory mem, uint64_t nr_pages) except NULL:
        if self.given is not None:
            fillable(self.given, self.given.mem, mem, self.given.n)
        self.pages = new_pagelist(mem, nr_pages)
        self.out.base.take = list_take
        self.out.pfn = filling(self.pages)
        self.out.end = self.out.pfn + nr_pages
        return &self.out.base

    cdef void give_back(self, mem_t *m, bint pins):
        cdef uint64_t i, leaf, n = <uint64_t>(self.out.pfn - filling(self.pages))
        for i in range(n):
            leaf = leaf_word(self.pages.p[i], 1)
            release_leaves(m, &leaf, 1, pins)
        self.out.pfn = filling(self.pages)

    cdef object finish(self, Memory mem, bint pins):
        cdef PageList pages = self.pages
        cdef uint64_t n = <uint64_t>(self.out.pfn - filling(pages))
        if self.given is not None:
            try:
                fillable(self.given, mem, mem, self.given.n)    # again: another thread may have filled it meanwhile
            except BaseException:
                self.give_back(&mem.m, pins)
                raise
            pagelist_fill(self.given, pages, n)
            return self.given
        self.pages = None
        return pages if n == pages.n else pagelist_view(pages, 0, n)

# ---- runs -------------------------------------------------------------------------------------------------------------
cdef struct ranges_output_t:
    gup_output_t base
    mem_t *m
    uint64_t *pfn               # first pages, then ...
    uint64_t *count
    uint64_t n
    uint64_t room
    uint64_t next_pfn           # what would extend the last run; 0: nothing

cdef bint more_room(ranges_output_t *out) noexcept nogil:
    cdef uint64_t room = out.room + (out.room >> 1) + 64
    cdef void *at
    if inject_fails(out.m, INJECT_LIST):
        return False
    at = realloc(out.pfn, room * sizeof(uint64_t))
    if at == NULL:
        return False
    out.pfn = <uint64_t *>at
    at = realloc(out.count, room * sizeof(uint64_t))
    if at == NULL:
        return False
    out.count = <uint64_t *>at
    out.room = room
    return True

cdef uint64_t ranges_take(gup_output_t *base, const uint64_t *leaf, uint64_t nr) noexcept nogil:
    cdef ranges_output_t *out = <ranges_output_t *>base
    cdef uint64_t i, pfn, count
    for i in range(nr):
        pfn = leaf_pfn(leaf[i])
        count = leaf_count(leaf[i])
        if pfn == out.next_pfn and not starts_device(out.m, pfn):
            out.count[out.n - 1] += count
        else:
            if mm_unlikely(out.n == out.room) and not more_room(out):
                out.base.error = -ENOMEM
                return i
            out.pfn[out.n] = pfn
            out.count[out.n] = count
            out.n += 1
        out.next_pfn = pfn + count
    return nr

cdef inline bint starts_device(mem_t *m, uint64_t pfn) noexcept nogil:
    cdef device_t *d
    if mm_likely(pfn < m.nr_ram):
        return False
    d = device_of(m, pfn)
    return d != NULL and d.start == pfn

cdef class PageRangesOutput(GupOutput):
    cdef ranges_output_t out
    cdef Memory mem
    cdef PageRanges given

    def __dealloc__(self):
        free(self.out.pfn)
        free(self.out.count)

    cdef gup_output_t *begin(self, Memory mem, uint64_t nr_pages) except NULL:
        if self.given is not None:
            fillable(self.given, self.given.mem, mem, self.given.nr_pages)
        self.mem = mem
        self.out.m = mem.ptr()
        self.out.base.take = ranges_take
        return &self.out.base

    cdef void give_back(self, mem_t *m, bint pins):
        cdef uint64_t i, k, leaf
        for i in range(self.out.n):
            for k in range(self.out.count[i]):
                leaf = leaf_word(self.out.pfn[i] + k, 1)
                release_leaves(m, &leaf, 1, pins)
        self.out.n = 0

    cdef object finish(self, Memory mem, bint pins):
        cdef PageRanges ranges = self.given if self.given is not None else PageRanges.__new__(PageRanges)
        cdef PageList starts, counts
        try:
            fillable(ranges, mem, mem, ranges.nr_pages)
            starts = new_pagelist(self.mem, self.out.n)
            counts = new_pagelist(self.mem, self.out.n)
        except BaseException:
            self.give_back(&mem.m, pins)
            raise
        if self.out.n:
            memcpy(filling(starts), self.out.pfn, self.out.n * sizeof(uint64_t))
            memcpy(filling(counts), self.out.count, self.out.n * sizeof(uint64_t))
        ranges.count = counts.p
        ranges.count_owner = counts.pfns
        if self.given is None:
            ranges.mem = self.mem
            ranges.starts = starts
        else:
            pagelist_fill(ranges.starts, starts, starts.n)
        ranges.nr_pages = self.out.base.nr_pages
        return ranges

# ---- Python code ------------------------------------------------------------------------------------------------------
cdef struct python_output_t:
    gup_output_t base
    mem_t *m
    uint64_t *leaf              # kept until the walk is over: Python code must not run under its locks
    uint64_t n
    uint64_t room

cdef uint64_t python_take(gup_output_t *base, const uint64_t *leaf, uint64_t nr) noexcept nogil:
    cdef python_output_t *out = <python_output_t *>base
    cdef uint64_t room
    cdef void *at
    if out.n + nr > out.room:
        room = out.n + nr + (out.room >> 1)
        at = NULL if inject_fails(out.m, INJECT_LIST) else realloc(out.leaf, room * sizeof(uint64_t))
        if at == NULL:
            base.error = -ENOMEM
            return 0
        out.leaf = <uint64_t *>at
        out.room = room
    memcpy(out.leaf + out.n, leaf, nr * sizeof(uint64_t))
    out.n += nr
    return nr

cdef class GupOutput:
    """Receive the pages that a get_user_pages* or pin_user_pages* call acquires: pass one as output=.

    Subclass it and override gup_output_pages(first, npages), called with a Page and how many pages from there on follow
    each other, and gup_output_single_page(page) for leaves of one page; the latter calls the former if you do not. They run
    after the walk, in the order of the addresses. One that raises ends the call: what it was given, and what follows,
    is released, and the exception passes on; what came before stays acquired, and is yours. The call returns the object;
    .nr_pages is how many pages it has received. One call at a time may have it: until that is over, another, also from
    within its methods, is MMError(EBUSY).
    """
    def __dealloc__(self):
        free(self.leaves.leaf)

    @property
    def nr_pages(self):
        """Pages received by the last call."""
        return self.leaves.base.nr_pages

    def gup_output_single_page(self, page):
        """Receive one page."""
        self.gup_output_pages(page, 1)

    def gup_output_pages(self, page, npages):
        """Receive npages pages that follow each other, from this one on."""
        raise NotImplementedError(f"{type(self).__name__} must override gup_output_pages")

    cdef gup_output_t *begin(self, Memory mem, uint64_t nr_pages) except NULL:
        self.leaves.n = 0
        self.leaves.base.take = python_take
        self.leaves.m = mem.ptr()
        self.leaves.base.error = 0
        self.leaves.base.nr_pages = 0
        return &self.leaves.base

    cdef void give_back(self, mem_t *m, bint pins):
        release_leaves(m, self.leaves.leaf, self.leaves.n, pins)
        self.leaves.n = 0
        self.leaves.base.nr_pages = 0

    cdef object finish(self, Memory mem, bint pins):
        """Hand the leaves to the methods; release what they do not get to."""
        cdef uint64_t i, n = self.leaves.n, pfn, count
        cdef mem_t *m = &mem.m
        # Before: a method may release what it is given.
        if mm_unlikely(pin_watchers) and pins:
            tell_leaves(mem, self.leaves.leaf, n, 1)
        for i in range(n):
            pfn = leaf_pfn(self.leaves.leaf[i])
            count = leaf_count(self.leaves.leaf[i])
            try:
                if count == 1:
                    self.gup_output_single_page(page_handle(mem, pfn))
                else:
                    self.gup_output_pages(page_handle(mem, pfn), count)
            except BaseException:
                self.leaves.base.nr_pages = 0
                for count in range(i):
                    self.leaves.base.nr_pages += leaf_count(self.leaves.leaf[count])
                if mm_unlikely(pin_watchers) and pins:
                    tell_leaves(mem, self.leaves.leaf + i, n - i, -1)
                release_leaves(m, self.leaves.leaf + i, n - i, pins)
                raise
        return self

cdef object tell_leaves(Memory mem, const uint64_t *leaf, uint64_t n, int sign):
    cdef pins_t pins
    cdef uint64_t i
    pins_begin(&pins)
    for i in range(n):
        range_pins(&mem.m, leaf_pfn(leaf[i]), leaf_count(leaf[i]), &pins)
    pins_tell(mem, &pins, sign)

# ---- which sink ---------------------------------------------------------------------------------------------------------
cdef dict makers = {PageList: None, PageRanges: None}

cdef void register_output(object kind, object make):
    makers[kind] = make

cdef GupOutput output_arg(object output):
    cdef PageListOutput to_list
    cdef PageRangesOutput to_ranges
    if output is PageList:
        return PageListOutput.__new__(PageListOutput)
    if output is PageRanges:
        return PageRangesOutput.__new__(PageRangesOutput)
    if isinstance(output, PageList):
        to_list = PageListOutput.__new__(PageListOutput)
        to_list.given = output
        return to_list
    if isinstance(output, PageRanges):
        to_ranges = PageRangesOutput.__new__(PageRangesOutput)
        to_ranges.given = output
        return to_ranges
    if isinstance(output, GupOutput):
        return output
    if isinstance(output, type) and issubclass(output, GupOutput) and output is not GupOutput:
        return output()
    for kind, make in makers.items():
        if make is not None and (output is kind or isinstance(output, kind)):
            return make(output)
    raise TypeError("output= is PageList, PageRanges, SGAppendTable or a GupOutput, a class or an object, not "
                    f"{output!r}")

# ---- giving back ----------------------------------------------------------------------------------------------------------
cdef void release_leaves(mem_t *m, const uint64_t *leaf, uint64_t nr, bint pins) noexcept nogil:
    cdef uint64_t i, k, count, pfn, done = 0
    cdef group_t g
    cdef page_t *head
    cdef int result
    for i in range(nr):
        pfn = leaf_pfn(leaf[i])
        count = leaf_count(leaf[i])
        k = 0
        while k < count:
            next_in_range(m.map, pfn + k, count - k, &g)
            k += g.count
            if pins and g.head == m.zero_pfn:
                continue
            head = &m.map[g.head]
            if pins:
                result = put_pins(m, head, g.nr_pages > 1, g.count)
                if mm_likely(result >= 0):
                    done += g.count
            else:
                result = put_refs(m, head, g.nr_pages > 1, <uint32_t>g.count)
            if result == FREED:
                free_folio(m, g.head, folio_order_of(head))
    if done:
        stat_add(m, NR_FOLL_PIN_RELEASED, <int64_t>done)
