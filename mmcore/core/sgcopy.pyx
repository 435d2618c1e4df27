# cython: nonecheck=True
"""Bytes of scatterlists: copies, zeroing, the mapping iterator.

Units: bytes; buffers are anything with the buffer protocol, contiguous.
Raises: TypeError, InvalidArgument, BadPage for free pages, before a byte moves; MMError(EBUSY).
Threads: one at a time a table; copies run without the GIL.
Kernel: the functions of these names, struct sg_mapping_iter.
"""
from cpython.buffer cimport PyBUF_SIMPLE, PyBUF_WRITABLE, PyBuffer_Release, PyObject_GetBuffer
from libc.stdint cimport uint8_t
from libc.string cimport memcpy, memset
from mmcore.core.folio cimport *
from mmcore.core.sgiter cimport *
from mmcore.core.unpin cimport folio_at

import enum

from .errors import BadPage, InvalidArgument
from .content import page_address

__all__ = ["SG_MITER", "SG_MITER_ATOMIC", "SG_MITER_TO_SG", "SG_MITER_FROM_SG", "SG_MITER_LOCAL", "sg_miter",
           "sg_copy_to_buffer", "sg_copy_from_buffer", "sg_pcopy_to_buffer", "sg_pcopy_from_buffer", "sg_zero_buffer"]


class SG_MITER(enum.IntFlag):
    """Name the SG_MITER_* flags: which way bytes go, and how the kernel would map the page (ATOMIC, LOCAL: no effect)."""
    ATOMIC = 1
    TO_SG = 2
    FROM_SG = 4
    LOCAL = 8


SG_MITER_ATOMIC, SG_MITER_TO_SG, SG_MITER_FROM_SG, SG_MITER_LOCAL = SG_MITER

cdef enum copy_kind:
    COPY_TO_BUFFER
    COPY_FROM_BUFFER
    COPY_ZERO

# ---- is every page there? -------------------------------------------------------------------------------------------------
cdef uint64_t first_refused(mem_t *m, pieces_t walk, bint writes) noexcept nogil:
    """The first PFN of the pieces that is free or, for writing, is the engine's own; 0 when there is none.

    One look a folio, at struct pages that a scout asked for a few pieces before. Done before a byte moves, so that a
    refused call changes nothing.
    """
    cdef pieces_t scout = walk
    cdef piece_t piece, far
    cdef uint64_t pfn, end, head, nr, ahead = 0
    while pieces_next(&walk, &piece):
        while ahead < 12 and pieces_next(&scout, &far):
            prefetch_read(&m.map[far.at >> m.page_shift])
            ahead += 1
        if ahead:
            ahead -= 1
        pfn = piece.at >> m.page_shift
        end = (piece.at + piece.length - 1) >> m.page_shift
        if pfn == 0:
            return ~<uint64_t>0
        while pfn <= end:
            nr = folio_at(m.map, pfn, &head)
            if refs_load(&m.map[head]) == 0:
                return pfn
            if writes and not_to_write(m, head):
                return pfn
            pfn = head + nr
    return 0

cdef object refusal(mem_t *m, uint64_t pfn):
    if pfn == ~<uint64_t>0:
        return InvalidArgument("an entry has a length and no page: set it with sg_set_page()")
    head = compound_head_pfn(m.map, pfn)
    if refs_load(&m.map[head]) == 0:
        return BadPage("use after free", f"PFN {pfn:#x} of the list is free: hold a reference or a pin on the pages while "
                                         "a scatterlist names them", pfn=pfn)
    return InvalidArgument(f"PFN {pfn:#x} is a zero page or a page table, which nobody may write", pfn=pfn)

# ---- large copies -----------------------------------------------------------------------------------------------------------
cdef extern from *:
    """
    #if defined(__x86_64__)
    #include <emmintrin.h>
    /*
     * One memcpy of a gigabyte writes past the caches; a thousand of 4 KiB do not, and read each line they overwrite.
     * So lists of small pieces take this copy, which also fetches the piece that comes next: the processor's own
     * prefetch stops at each page.
     */
    static void mm_stream_copy(void *to, const void *from, size_t n, const void *next, size_t n_next)
    {
        char *d = to;
        const char *s = from;
        const char *ahead = next;
        const char *ahead_end = ahead + n_next;
        size_t head = -(uintptr_t)d & 63;

        if (head > n)
            head = n;
        memcpy(d, s, head);
        d += head, s += head, n -= head;
        for (; n >= 64; n -= 64, d += 64, s += 64) {
            __m128i a = _mm_loadu_si128((const __m128i *)s), b = _mm_loadu_si128((const __m128i *)s + 1);
            __m128i c = _mm_loadu_si128((const __m128i *)s + 2), e = _mm_loadu_si128((const __m128i *)s + 3);

            if (ahead < ahead_end) {
                __builtin_prefetch(ahead);
                ahead += 64;
            }
            _mm_stream_si128((__m128i *)d, a);
            _mm_stream_si128((__m128i *)d + 1, b);
            _mm_stream_si128((__m128i *)d + 2, c);
            _mm_stream_si128((__m128i *)d + 3, e);
        }
        memcpy(d, s, n);
    }
    #define mm_stream_end() _mm_sfence()
    #else
    #define mm_stream_copy(to, from, n, next, n_next) memcpy(to, from, n)
    #define mm_stream_end() ((void)0)
    #endif
    """
    void mm_stream_copy(void *to, const void *from_, size_t n, const void *next, size_t n_next) nogil
    void mm_stream_end() nogil

cdef uint64_t STREAM_TOTAL = 32 << 20   # bytes of a copy from which on it would only push other data out of the caches
cdef uint64_t STREAM_PIECE = 1 << 20    # memcpy does as well on pieces from here on

# ---- copying --------------------------------------------------------------------------------------------------------------
cdef inline bint written(const mem_t *m, uint64_t pfn) noexcept nogil:
    return (a64_load_acquire(&m.map[pfn].flags) >> PG_mm_written) & 1

cdef uint64_t same_state(mem_t *m, uint64_t at, uint64_t length, bint state) noexcept nogil:
    """How many of the bytes are in pages that all have been written, or all have not."""
    cdef uint64_t page = ONE << m.page_shift, pfn = at >> m.page_shift, done = page - (at & (page - 1))
    while done < length and written(m, pfn + 1) == state:
        pfn += 1
        done += page
    return done if done < length else length

cdef void make_written(mem_t *m, uint64_t at, uint64_t length) noexcept nogil:
    cdef uint64_t pfn = at >> m.page_shift, end = (at + length - 1) >> m.page_shift
    while pfn <= end:
        page_bytes(m, pfn)
        pfn += 1

cdef inline void copy_bytes(uint8_t *to, const uint8_t *from_, uint64_t n, const uint8_t *ahead, uint64_t n_ahead,
                            bint stream) noexcept nogil:
    if stream and n < STREAM_PIECE:
        mm_stream_copy(to, from_, n, ahead, n_ahead)
    else:
        memcpy(to, from_, n)

cdef uint64_t copy_pieces(mem_t *m, pieces_t walk, uint8_t *buf, uint64_t length, copy_kind kind) noexcept nogil:
    cdef piece_t piece, ahead
    cdef uint64_t moved = 0, n, fetch
    cdef bint state, more, stream = length >= STREAM_TOTAL
    ahead.at = 0
    more = pieces_next(&walk, &piece)
    while more:
        more = pieces_next(&walk, &ahead)
        fetch = 0
        if more:
            prefetch_read(&m.map[ahead.at >> m.page_shift])
            fetch = ahead.length
        while piece.length:
            if kind == COPY_TO_BUFFER:
                # Pages that nobody wrote read as zero, and stay without bytes of their own.
                state = written(m, piece.at >> m.page_shift)
                n = same_state(m, piece.at, piece.length, state)
                if state:
                    copy_bytes(buf + moved, m.bytes + piece.at, n, m.bytes + ahead.at, fetch, stream)
                else:
                    memset(buf + moved, 0, n)
            else:
                n = piece.length
                make_written(m, piece.at, n)
                if kind == COPY_FROM_BUFFER:
                    copy_bytes(m.bytes + piece.at, buf + moved, n, NULL, 0, stream)
                else:
                    memset(m.bytes + piece.at, 0, n)
            piece.at += n
            piece.length -= n
            moved += n
        piece = ahead
    if stream:
        mm_stream_end()
    return moved

cdef object copy(object sgt, object buf, object length, object skip, copy_kind kind):
    cdef SGTable table = table_arg(sgt)
    cdef uint64_t passed = count_arg(skip, "skip", 0, ~<uint64_t>0), n = 0, bad = 0
    cdef Py_buffer view
    cdef pieces_t walk
    cdef mem_t *m
    view.buf = NULL
    if kind == COPY_ZERO:
        n = count_arg(length, "buflen", 0, ~<uint64_t>0)
    else:
        PyObject_GetBuffer(buf, &view, PyBUF_WRITABLE if kind == COPY_TO_BUFFER else PyBUF_SIMPLE)
        n = <uint64_t>view.len
    try:
        m = table.read()
        try:
            with nogil:
                pieces_start(&walk, table.t.sgl, table.t.orig_nents, m.page_shift, passed, n)
                bad = first_refused(m, walk, kind != COPY_TO_BUFFER)
                if bad == 0:
                    n = copy_pieces(m, walk, <uint8_t *>view.buf, n, kind)
            if bad:
                raise refusal(m, bad)
        finally:
            table.read_done()
    finally:
        if kind != COPY_ZERO:
            PyBuffer_Release(&view)
    return n


def sg_copy_to_buffer(sgt, buf, skip=0):
    """Copy bytes of the list, from `skip` on, into a writable buffer; how many: what the buffer and the list have.

    0 when skip is beyond the list. Counts in 64 bits. Raises BadPage when a page is free; then nothing was copied.
    """
    return copy(sgt, buf, None, skip, COPY_TO_BUFFER)


def sg_copy_from_buffer(sgt, buf, skip=0):
    """Copy a buffer into the list, from `skip` on; how many bytes. Raises as sg_copy_to_buffer(), and for zero pages."""
    return copy(sgt, buf, None, skip, COPY_FROM_BUFFER)


def sg_pcopy_to_buffer(sgt, buf, skip):
    """Copy as sg_copy_to_buffer(): the kernel's name for the form with skip."""
    return copy(sgt, buf, None, skip, COPY_TO_BUFFER)


def sg_pcopy_from_buffer(sgt, buf, skip):
    """Copy as sg_copy_from_buffer(): the kernel's name for the form with skip."""
    return copy(sgt, buf, None, skip, COPY_FROM_BUFFER)


def sg_zero_buffer(sgt, buflen, skip=0):
    """Set buflen bytes of the list to 0, from `skip` on; how many were there. Raises as sg_copy_from_buffer()."""
    return copy(sgt, None, buflen, skip, COPY_ZERO)

# ---- the mapping iterator ---------------------------------------------------------------------------------------------------
cdef class sg_miter:
    """Iterate over the bytes of a table in windows: memoryviews that never cross a page. Kernel: struct sg_mapping_iter.

    sg_miter(sgt, flags): SG_MITER_TO_SG gives writable windows, SG_MITER_FROM_SG alone read-only ones; one of the two
    is needed. The window of before is released when the next one is taken. Set .consumed lower than the window before
    going on, and the rest of it comes next. skip(n) passes over n bytes; stop() releases the window, and iteration
    can go on after it. Empty entries give no window. Each page needs a reference: BadPage for a free one.
    """
    cdef SGTable table
    cdef uint64_t generation
    cdef readonly object flags
    cdef readonly object page       # of the window, None without one
    cdef readonly object window     # memoryview, None without one
    cdef uint64_t consumed_
    cdef uint64_t length_           # of the window
    cdef uint64_t index             # the entry under way
    cdef sg_t *sg                   # the same; NULL at the end
    cdef uint64_t done              # bytes of it that are behind us

    def __init__(self, sgt, flags):
        if self.table is not None:
            raise InvalidArgument("this iterator is set up already")
        self.flags = SG_MITER(count_arg(flags, "flags", 0, 0xf))
        if not self.flags & (SG_MITER.TO_SG | SG_MITER.FROM_SG):
            raise InvalidArgument("sg_miter() needs SG_MITER_TO_SG or SG_MITER_FROM_SG: which way do the bytes go?")
        self.table = table_arg(sgt)
        self.generation = self.table.generation
        self.sg = self.table.t.sgl if self.table.t.orig_nents else NULL

    def __iter__(self):
        return self

    @property
    def length(self):
        """Bytes of the window, 0 without one."""
        return self.length_

    @property
    def consumed(self):
        """Bytes of the window that are done with; all of it unless set lower."""
        return self.consumed_

    @consumed.setter
    def consumed(self, n):
        self.consumed_ = count_arg(n, "consumed", 0, self.length_)

    def stop(self):
        """Release the window: what is not consumed of it comes next."""
        self.done += self.consumed_
        self.consumed_ = self.length_ = 0
        window, self.window, self.page = self.window, None, None
        if window is not None:
            try:
                window.release()
            except BufferError:
                pass            # the caller made an array of it, which keeps the bytes

    cdef uint64_t prepare(self) except? 0:
        """Find the next window; its length, 0 at the end. Needs read()."""
        cdef uint64_t page, at
        if self.generation != self.table.generation:
            raise InvalidArgument("the table was freed under the iterator")
        still_data(self.sg)
        while self.sg != NULL and self.done >= self.sg.length:
            self.done = 0
            self.index += 1
            self.sg = next_sg(self.sg) if self.index < self.table.t.orig_nents else NULL
        if self.sg == NULL:
            return 0
        if sg_pfn(self.sg) == 0:
            raise InvalidArgument(f"entry {self.index} has a length and no page: set it with sg_set_page()")
        page = self.table.mem.page_size
        at = self.sg.offset + self.done
        return min(self.sg.length - self.done, page - (at & (page - 1)))

    def __next__(self):
        cdef uint64_t n, at, page
        self.stop()
        self.table.read()
        try:
            n = self.prepare()
            if n == 0:
                raise StopIteration
            page = self.table.mem.page_size
            at = self.sg.offset + self.done
            handle = page_handle(self.table.mem, sg_pfn(self.sg) + at // page)
            at &= page - 1
            if self.flags & SG_MITER.TO_SG and not_to_write(&self.table.mem.m, compound_head_pfn(self.table.mem.m.map, handle.pfn)):
                raise InvalidArgument(f"{handle!r} is a zero page or a page table, which nobody may write", pfn=handle.pfn)
            window = page_address(handle)
            if not self.flags & SG_MITER.TO_SG:
                window = window.toreadonly()
            self.window = window[at:at + n]
            self.page = handle
            self.length_ = self.consumed_ = n
        finally:
            self.table.read_done()
        return self.window

    def skip(self, n):
        """Pass over n bytes: False when the list ends before, True also when it ends just there."""
        cdef uint64_t left = count_arg(n, "skip", 0, ~<uint64_t>0), take
        self.stop()
        self.table.read()
        try:
            while left:
                take = self.prepare()
                if take == 0:
                    return False
                # The whole rest of the entry can go at once.
                take = min(left, <uint64_t>self.sg.length - self.done)
                self.done += take
                left -= take
            return True
        finally:
            self.table.read_done()

    def __reduce__(self):
        raise TypeError("an sg_miter belongs to its table and cannot be pickled")
