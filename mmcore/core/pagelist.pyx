# cython: nonecheck=True
"""Lists and runs of pages; alloc_pages_bulk, num_pages_contiguous.

Units: PFNs and counts: uint64, one dimension; 0 stands for NULL.
Raises: TypeError for what is no number, InvalidArgument for a PFN beyond the end, or a run that leaves the Memory.
Threads: any number at once: a list never changes, but for an empty one that is the output= of a pin call, once.
Kernel: struct page ** and its length.
"""
from cpython.buffer cimport PyBuffer_FillInfo
from libc.string cimport memcpy
from mmcore.core.buddy cimport alloc_pages
from mmcore.core.folio cimport count_arg

import errno as _errno
import operator

import numpy as np

from .errors import InvalidArgument, MMError

__all__ = ["PageList", "PageRanges", "alloc_pages_bulk", "num_pages_contiguous"]

cdef uint64_t first_invalid(mem_t *m, const uint64_t *p, uint64_t n) noexcept nogil:
    """Index of the first PFN that no page has, or n. NULL (0) is valid in a list."""
    cdef uint64_t i, worst = 0
    for i in range(n):
        worst |= p[i]       # cheap, and nearly always enough when nr_ram is a power of two
    if worst < m.nr_ram:
        return n
    for i in range(n):
        if p[i] >= m.nr_ram and (p[i] >= m.nr_pages or device_of(m, p[i]) == NULL):
            return i
    return n

cdef object checked_array(Memory mem, object pfns):
    """A contiguous uint64 array of PFNs, from integers, arrays, Pages, Folios and None."""
    if not isinstance(pfns, np.ndarray):
        pfns = [number_of(mem, pfn) for pfn in pfns]
        try:
            pfns = np.array(pfns, dtype=np.uint64)
        except (OverflowError, ValueError):
            raise InvalidArgument("a PFN in the list is negative or beyond 64 bits") from None
    if pfns.ndim != 1:
        raise InvalidArgument(f"PFNs are a one-dimensional array, not of shape {pfns.shape}")
    if pfns.dtype.kind not in "iu" and len(pfns):
        raise TypeError(f"PFNs are integers, not {pfns.dtype}")
    if pfns.dtype.kind == "i" and len(pfns) and pfns.min() < 0:
        raise InvalidArgument(f"PFN {pfns.min()} at index {int(pfns.argmin())} is negative")
    return np.ascontiguousarray(pfns, dtype=np.uint64)

cdef object number_of(Memory mem, object pfn):
    if type(pfn) is int:
        return pfn
    if pfn is None:
        return 0
    if type(pfn) is Page or type(pfn) is Folio:
        if pfn.mem is not mem:
            raise InvalidArgument(f"{pfn!r} belongs to another Memory", pfn=pfn.pfn)
        return pfn.pfn
    if isinstance(pfn, bool) or not hasattr(pfn, "__index__"):
        raise TypeError(f"a PFN or a Page is wanted, not {pfn!r}")
    return pfn.__index__()

cdef object outside(mem_t *m, uint64_t pfn, uint64_t i):
    return InvalidArgument(f"PFN {pfn:#x} at index {i} is outside this Memory: PFNs are 1..{m.nr_pages - 1:#x}, or 0 for NULL",
                           pfn=pfn)

cdef PageList new_pagelist(Memory mem, uint64_t n):
    cdef PageList pages = PageList.__new__(PageList)
    cdef uint64_t size = n * sizeof(uint64_t)
    cdef mem_t *m = mem.ptr()
    pages.mem = mem
    pages.p = NULL
    if not inject_fails(m, INJECT_LIST):
        pages.p = <uint64_t *>buffer_alloc(size)
    if pages.p == NULL:
        raise MMError(_errno.ENOMEM, f"no memory for a list of {n} pages ({size} bytes)")
    pages.n = n
    pages.size = size if size else 1
    return pages

cdef void pagelist_fill(PageList empty, PageList pages, uint64_t n):
    if empty.size:
        buffer_free(<void *>empty.p, 0)
        empty.size = 0
    empty.owner = pages if pages.owner is None else pages.owner
    empty.p = pages.p
    # Last, for a walk in another thread: it looks at no more than the length that it read.
    a64_store_release(&empty.n, n)

cdef PageList pagelist_view(PageList pages, uint64_t start, uint64_t n):
    cdef PageList view = PageList.__new__(PageList)
    view.mem = pages.mem
    view.p = pages.p + start
    view.n = n
    view.owner = pages if pages.owner is None else pages.owner
    return view


cdef class PageList:
    """Hold the PFNs of pages of one Memory, as the kernel's `struct page **` does. Read-only once made, or filled by a pin call.

    PageList(mem, pfns): pfns is any iterable of PFNs (int, or a uint64 array), Pages or None; 0 and None stand for
    NULL. It is copied and checked here, so that walks need no checks. Raises InvalidArgument for a PFN outside of the
    Memory. len(), iteration (Page, or None for NULL), slices that share memory, and +. Holds no references on pages.
    """

    def __init__(self, Memory mem not None, pfns=()):
        cdef mem_t *m = mem.ptr()
        cdef const uint64_t[::1] at
        cdef uint64_t bad, n
        cdef PageList new
        if self.p != NULL:
            raise InvalidArgument("a PageList is read-only")
        if isinstance(pfns, PageRanges):
            pfns = pfns.to_pagelist()
        if isinstance(pfns, PageList):
            if (<PageList>pfns).mem is not mem:
                raise InvalidArgument("the list belongs to another Memory")
            pfns = pfns.pfns
        array = checked_array(mem, pfns)
        n = len(array)
        new = new_pagelist(mem, n)
        if n:
            at = array
            memcpy(filling(new), &at[0], n * sizeof(uint64_t))
        bad = first_invalid(m, new.p, n)
        if bad < n:
            raise outside(m, new.p[bad], bad)
        self.mem = mem
        self.n = n
        self.p = new.p
        self.size = new.size
        new.size = 0

    def __dealloc__(self):
        if self.size and self.p != NULL:
            buffer_free(<void *>self.p, self.n * sizeof(uint64_t))

    def __getbuffer__(self, Py_buffer *view, int flags):
        PyBuffer_FillInfo(view, self, <void *>self.p, <Py_ssize_t>(self.n * sizeof(uint64_t)), 1, flags)

    @property
    def pfns(self):
        """The PFNs: a read-only uint64 array that shares the list's memory."""
        if self.n == 0:
            empty = np.empty(0, dtype=np.uint64)
            empty.flags.writeable = False
            return empty
        return np.frombuffer(self, dtype=np.uint64)

    def __len__(self):
        return self.n

    def __getitem__(self, index):
        cdef int64_t number = plain_int(index)
        if mm_likely(0 <= number < <int64_t>self.n):
            return page_handle(self.mem, self.p[number]) if self.p[number] else None
        if isinstance(index, slice):
            start, stop, step = index.indices(self.n)
            if step == 1:
                return pagelist_view(self, start, max(stop - start, 0))
            return PageList(self.mem, self.pfns[index])
        at = operator.index(index)
        if not -<object>self.n <= at < self.n:
            raise IndexError(f"index {at} of a list of {self.n} pages")
        cdef uint64_t pfn = self.p[at + <object>self.n if at < 0 else at]
        return page_handle(self.mem, pfn) if pfn else None

    def __iter__(self):
        cdef uint64_t i
        for i in range(self.n):
            yield page_handle(self.mem, self.p[i]) if self.p[i] else None

    def __add__(self, other):
        cdef PageList left, right, new
        if not isinstance(self, PageList) or not isinstance(other, PageList):
            return NotImplemented
        left, right = self, other
        if left.mem is not right.mem:
            raise InvalidArgument("the lists belong to two Memories")
        new = new_pagelist(left.mem, left.n + right.n)
        memcpy(filling(new), left.p, left.n * sizeof(uint64_t))
        memcpy(filling(new) + left.n, right.p, right.n * sizeof(uint64_t))
        return new

    def __eq__(self, other):
        if not isinstance(other, PageList):
            return NotImplemented
        return self.mem is (<PageList>other).mem and np.array_equal(self.pfns, other.pfns)

    __hash__ = None

    def __reduce__(self):
        raise TypeError("a PageList belongs to its Memory and cannot be pickled; pickle its .pfns")

    def __repr__(self):
        shown = ", ".join([f"{pfn:#x}" for pfn in self.pfns[:6].tolist()])
        return f"<PageList of {self.n}: {shown}{', ...' if self.n > 6 else ''}>"


cdef class PageRanges:
    """Hold runs of pages: first PFNs and numbers of pages, as uint64 arrays. Read-only once made, or filled by a pin call.

    PageRanges(mem, pfns, counts). A run is contiguous in PFN space and may cross folios. A run of one page at PFN 0
    stands for NULL. Raises InvalidArgument for a run that is empty or leaves the Memory.
    """

    def __init__(self, Memory mem not None, pfns=(), counts=()):
        cdef mem_t *m = mem.ptr()
        cdef const uint64_t[::1] at
        cdef uint64_t i, n, total = 0, first, last
        if self.starts is not None:
            raise InvalidArgument("PageRanges are read-only")
        cdef PageList starts = PageList(mem, pfns)
        numbers = checked_array(mem, counts).copy()
        n = starts.n
        if <uint64_t>len(numbers) != n:
            raise InvalidArgument(f"{n} PFNs and {len(numbers)} counts: one count a run is wanted")
        if n:
            at = numbers
            for i in range(n):
                first = starts.p[i]
                last = first + at[i] - 1
                if at[i] == 0 or not run_valid(m, first, last):
                    raise InvalidArgument(f"run {i}, {at[i]} pages from PFN {first:#x}, is empty or leaves this Memory "
                                          f"({m.nr_pages} pages)", pfn=first)
                if first == 0 and at[i] != 1:
                    raise InvalidArgument(f"run {i} starts at PFN 0, which is no page", pfn=0)
                total += at[i]
            self.count = &at[0]
        self.mem = mem
        self.starts = starts
        self.count_owner = numbers
        self.nr_pages = total

    @property
    def pfns(self):
        """First PFN of each run: a read-only uint64 array."""
        return self.starts.pfns

    @property
    def counts(self):
        """Pages of each run: a read-only uint64 array."""
        view = self.count_owner.view()
        view.flags.writeable = False
        return view

    def __len__(self):
        return self.starts.n

    def __iter__(self):
        return iter(zip(self.pfns.tolist(), self.counts.tolist()))

    def to_pagelist(self):
        """Return the PageList of all pages, in order."""
        cdef PageList new = new_pagelist(self.mem, self.nr_pages)
        cdef uint64_t *out = filling(new)
        cdef uint64_t i, k
        with nogil:
            for i in range(self.starts.n):
                for k in range(self.count[i]):
                    out[k] = self.starts.p[i] + k
                out += self.count[i]
        return new

    @staticmethod
    def from_pagelist(PageList pages not None):
        """Return the runs of a list: neighbours whose PFNs follow each other are one run."""
        pfns = pages.pfns
        if not len(pfns):
            return PageRanges(pages.mem)
        breaks = np.flatnonzero((np.diff(pfns) != 1) | (pfns[:len(pfns) - 1] == 0)) + 1
        firsts = np.concatenate(([0], breaks))
        counts = np.diff(np.concatenate((firsts, [len(pfns)])))
        return PageRanges(pages.mem, pfns[firsts], counts)

    def __reduce__(self):
        raise TypeError("PageRanges belong to their Memory and cannot be pickled")

    def __repr__(self):
        return f"<PageRanges of {self.starts.n} runs, {self.nr_pages} pages>"

cdef object as_pages(object pages):
    if isinstance(pages, (PageList, PageRanges)):
        (<Memory>pages.mem).ptr()
        return pages
    if isinstance(pages, (list, tuple)):
        for page in pages:
            if type(page) is Page or type(page) is Folio:
                return PageList(page.mem, pages)
        if not pages:
            raise TypeError("an empty sequence names no Memory: pass PageList(mem)")
    raise TypeError(f"a PageList or PageRanges is wanted, not {type(pages).__name__}: make one with PageList(mem, pfns)")


def alloc_pages_bulk(Memory mem not None, nr):
    """Allocate nr pages with one reference each; a PageList of them.

    Shorter when memory runs out on the way, as the kernel's; MMError(ENOMEM) when there is no page at all.
    """
    cdef uint64_t wanted = count_arg(nr, "nr", 0, mem.ptr().nr_pages)
    cdef PageList pages = new_pagelist(mem, wanted)
    cdef uint64_t got
    cdef mem_t *m = mem.enter()
    cdef uint64_t *out = filling(pages)
    if inject_fails(m, INJECT_FRAME):
        wanted = 0
    with nogil:
        got = alloc_pages(m, (1 << MAX_REGIONS) - 1, out, wanted)
    mem.leave()
    if got == 0 and nr:
        raise MMError(_errno.ENOMEM, f"none of {nr} pages could be allocated: no page is free")
    return pages if got == pages.n else pagelist_view(pages, 0, got)

cdef uint64_t contiguous(const uint64_t *p, uint64_t n) noexcept nogil:
    """Length of the prefix whose PFNs follow each other; n is at least 1."""
    cdef uint64_t k = 1, j, different, first = p[0]
    if first == 0:
        return 1
    while k + 32 <= n:
        different = 0
        for j in range(32):
            different |= p[k + j] ^ (first + k + j)
        if different:
            break
        k += 32
    while k < n and p[k] == first + k:
        k += 1
    return k


def num_pages_contiguous(pages, nr=None):
    """Return how many pages from the start of a list follow each other in PFN order; folios do not matter.

    nr: look at this many entries only. Raises InvalidArgument for an empty list. Kernel: num_pages_contiguous().
    """
    cdef PageList plist
    cdef uint64_t most, total, i
    cdef PageRanges ranges
    pages = as_pages(pages)
    if isinstance(pages, PageRanges):
        ranges = pages
        most = count_arg(ranges.nr_pages if nr is None else nr, "nr", 1, ranges.nr_pages)
        total = ranges.count[0]
        i = 1
        while ranges.starts.p[0] != 0 and i < ranges.starts.n and total < most and ranges.starts.p[i] == ranges.starts.p[0] + total:
            total += ranges.count[i]
            i += 1
        return min(total, most)
    plist = pages
    most = count_arg(plist.n if nr is None else nr, "nr", 1, plist.n)
    return contiguous(plist.p, most)
