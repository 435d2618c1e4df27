"""Booking pins: by folio, holder and Python call site."""
from cpython.ref cimport PyObject
from libc.stdlib cimport calloc, free, malloc, realloc
from libc.string cimport memcpy
from mmcore.core.memory cimport *

import os

__all__ = ["PinBook", "set_tag"]

cdef extern from *:
    """
    #include <Python.h>
    #include <frameobject.h>
    /* Which book's tag is innermost in this thread (0: none), and the holder's index in it. */
    typedef struct { uint64_t book; uint32_t holder; } mm_tag_t;
    static __thread mm_tag_t mm_tag;

    /* A number that is another one for each call in a code object. */
    static int mm_frame_at(PyFrameObject *frame)
    {
    #if PY_VERSION_HEX >= 0x030B0000
        return PyFrame_GetLasti(frame);
    #else
        return PyFrame_GetLineNumber(frame);
    #endif
    }
    static PyObject *mm_frame_code(PyFrameObject *frame) { return (PyObject *)PyFrame_GetCode(frame); }
    static PyFrameObject *mm_frame(void)
    {
        PyFrameObject *frame = PyEval_GetFrame();
        Py_XINCREF(frame);
        return frame;
    }
    """
    ctypedef struct PyFrameObject
    ctypedef struct mm_tag_t:
        uint64_t book
        uint32_t holder
    mm_tag_t mm_tag
    PyFrameObject *mm_frame()
    PyFrameObject *PyFrame_GetBack(PyFrameObject *frame)
    int mm_frame_at(PyFrameObject *frame)
    PyObject *mm_frame_code(PyFrameObject *frame)
    void Py_XDECREF(void *o)
    void Py_INCREF_ "Py_INCREF"(PyObject *o)
    int PyCode_Addr2Line(void *code, int at)
    int PY_VERSION_HEX

cdef enum:
    OURS = 0xffffffff
    NO_SITE = 0                 # there was no frame outside of this package, or no memory

_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep

cdef list _books = []
cdef uint64_t _last_serial = 0
pin_watchers = 0

# ---- what a call takes or drops -------------------------------------------------------------------------------------
cdef void pins_grow(pins_t *pins) noexcept nogil:
    cdef uint64_t room = pins.room * 4
    cdef pin_t *p
    if pins.p == pins.own:
        p = <pin_t *>malloc(room * sizeof(pin_t))
        if p != NULL:
            memcpy(p, pins.own, pins.n * sizeof(pin_t))
    else:
        p = <pin_t *>realloc(pins.p, room * sizeof(pin_t))
    if p != NULL:
        pins.p = p
        pins.room = room

cdef void pins_end(pins_t *pins) noexcept nogil:
    if pins.p != pins.own:
        free(pins.p)
    pins.p = pins.own
    pins.n = 0

cdef object pins_tell(Memory mem, pins_t *pins, int sign):
    cdef PinBook book
    try:
        for book in tuple(_books):
            if book.mem is mem:
                book.lost += pins.lost
                book.book(pins.p, pins.n, sign)
    finally:
        pins_end(pins)

cdef object pin_tell(Memory mem, uint64_t head, uint64_t count, int sign):
    cdef PinBook book
    cdef pin_t pin
    pin.head = head
    pin.count = count
    for book in tuple(_books):
        if book.mem is mem:
            book.book(&pin, 1, sign)


def set_tag(uint64_t book, uint32_t holder):
    """Make a holder of a book, by the book's serial, the innermost tag of this thread; returns the one before."""
    before = mm_tag.book, mm_tag.holder
    mm_tag.book = book
    mm_tag.holder = holder
    return before


cdef struct held_t:
    uint64_t pfn
    entry_t entry

# ---- books ----------------------------------------------------------------------------------------------------------
cdef inline uint32_t place_of(void *code, int at, uint32_t size) noexcept nogil:
    cdef uint64_t mixed = (<uint64_t>code ^ (<uint64_t><uint32_t>at << 40)) * 0x9e3779b97f4a7c15ULL
    return <uint32_t>(mixed >> 40) & (size - 1)

cdef inline uint32_t entry_new(PinBook book) noexcept nogil:
    """An unused entry, or 0."""
    cdef uint32_t e = book.free
    cdef uint32_t room
    cdef entry_t *more
    if e:
        book.free = book.entry[e].next
        return e
    if book.nr_entries == book.room:
        room = book.room * 2
        more = <entry_t *>realloc(book.entry, <uint64_t>room * sizeof(entry_t)) if room > book.room else NULL
        if more == NULL:
            return 0
        book.entry = more
        book.room = room
    book.nr_entries += 1
    return book.nr_entries - 1

cdef inline void book_take(PinBook book, uint64_t head, uint64_t count, uint32_t holder, uint32_t site) noexcept nogil:
    cdef uint32_t first = book.slot[head], e = first
    while e:
        if book.entry[e].holder == holder and book.entry[e].site == site:
            book.entry[e].count += count
            return
        e = book.entry[e].next
    e = entry_new(book)
    if e == 0:
        book.lost += count
        return
    book.entry[e].holder = holder
    book.entry[e].site = site
    book.entry[e].count = count
    book.entry[e].next = first
    book.slot[head] = e

cdef inline uint64_t drop_from(PinBook book, uint64_t head, uint64_t count, uint32_t holder, bint own) noexcept nogil:
    """Drop from one holder's entries, or from everybody's; returns what is left to drop."""
    cdef uint32_t *link = &book.slot[head]
    cdef uint32_t e
    cdef uint64_t gone
    while link[0] and count:
        e = link[0]
        if own and book.entry[e].holder != holder:
            link = &book.entry[e].next
            continue
        gone = min(count, book.entry[e].count)
        count -= gone
        book.entry[e].count -= gone
        if book.entry[e].count == 0:
            link[0] = book.entry[e].next
            book.entry[e].next = book.free
            book.free = e
    return count

cdef inline void book_drop(PinBook book, uint64_t head, uint64_t count, uint32_t holder) noexcept nogil:
    # The holder's own first, then the latest of the others.
    count = drop_from(book, head, count, holder, True)
    if count:
        book.unknown += drop_from(book, head, count, holder, False)


cdef class PinBook:
    """Pins of one Memory that were taken while the book is open, by folio, holder and call site. For PinLedger."""

    def __cinit__(self, Memory mem not None, slow_holder):
        global _last_serial
        pthread_mutex_init(&self.lock, NULL)
        _last_serial += 1
        self.serial = _last_serial
        self.mem = mem
        self.slow_holder = slow_holder
        self.holders, self.holder_ids = [], {}
        self.slot_size = mem.ptr().nr_pages * sizeof(uint32_t)
        self.slot = <uint32_t *>reserve(self.slot_size, False)
        self.room, self.nr_entries = 64, 1
        self.entry = <entry_t *>malloc(self.room * sizeof(entry_t))
        self.sites_size, self.nr_sites = 64, 1
        self.site = <site_t *>calloc(self.sites_size, sizeof(site_t))
        if self.slot == NULL or self.entry == NULL or self.site == NULL:
            raise MemoryError()

    def __dealloc__(self):
        cdef uint32_t i
        if self.slot != NULL:
            unreserve(self.slot, self.slot_size)
        if self.site != NULL:
            for i in range(self.sites_size):
                Py_XDECREF(self.site[i].code)
        free(self.entry)
        free(self.site)
        pthread_mutex_destroy(&self.lock)

    def open(self):
        """Begin to book."""
        global pin_watchers
        _books.append(self)
        pin_watchers = <int>len(_books)

    def close(self):
        """End what open() began; what is booked stays."""
        global pin_watchers
        _books.remove(self)
        pin_watchers = <int>len(_books)

    @property
    def tag(self):
        """The number that set_tag() knows this book by."""
        return self.serial

    def holder(self, str name not None):
        """Return a holder's index in this book."""
        if name not in self.holder_ids:
            self.holders.append(name)
            self.holder_ids[name] = len(self.holders) - 1
        return self.holder_ids[name]

    cdef uint32_t find_site(self, void *code, int at) noexcept nogil:
        cdef uint32_t i = place_of(code, at, self.sites_size)
        while self.site[i].code != NULL:
            if self.site[i].code == code and self.site[i].at == at:
                return self.site[i].id
            i = (i + 1) & (self.sites_size - 1)
        return NO_SITE

    cdef uint32_t call_site(self) except? 0:
        """The nearest caller outside of this package."""
        cdef PyFrameObject *frame = mm_frame()
        cdef PyFrameObject *back
        cdef PyObject *code
        cdef uint32_t id = NO_SITE
        cdef int at
        while frame != NULL:
            code = mm_frame_code(frame)
            at = mm_frame_at(frame)
            pthread_mutex_lock(&self.lock)
            id = self.find_site(code, at)
            pthread_mutex_unlock(&self.lock)
            if id == NO_SITE:
                id = add_site(self, code, at)
            Py_XDECREF(code)
            if id != OURS:
                break
            back = PyFrame_GetBack(frame)
            Py_XDECREF(frame)
            frame = back
            id = NO_SITE
        Py_XDECREF(frame)
        return id

    cdef object book(self, const pin_t *pins, uint64_t n, int sign):
        cdef uint32_t holder, site = 0
        cdef uint64_t i
        if mm_tag.book == self.serial:
            holder = mm_tag.holder
        elif mm_tag.book == 0:
            holder = 0
        else:
            holder = self.holder(self.slow_holder())
        if sign > 0:
            site = self.call_site()
        with nogil:
            pthread_mutex_lock(&self.lock)
            if sign > 0:
                for i in range(n):
                    book_take(self, pins[i].head, pins[i].count, holder, site)
            else:
                for i in range(n):
                    book_drop(self, pins[i].head, pins[i].count, holder)
            pthread_mutex_unlock(&self.lock)

    def rows(self):
        """Return [(holder, PFN of the head, pins, "file:line" of the call)] of what is held."""
        cdef uint64_t pfn, n = 0, room = 0, last = frontier_of(self.mem.ptr())
        cdef uint32_t e, i, size
        cdef held_t *held = NULL
        cdef held_t *more
        cdef site_t *sites = NULL
        cdef bint full = False
        try:
            with nogil:
                pthread_mutex_lock(&self.lock)
                for pfn in range(last):
                    e = self.slot[pfn]
                    while e and not full:
                        if n == room:
                            room = 2 * room + 64
                            more = <held_t *>realloc(held, room * sizeof(held_t))
                            full = more == NULL
                            if full:
                                break
                            held = more
                        held[n].pfn = pfn
                        held[n].entry = self.entry[e]
                        n += 1
                        e = self.entry[e].next
                size = self.sites_size
                sites = <site_t *>malloc(size * sizeof(site_t))
                if sites != NULL:
                    memcpy(sites, self.site, size * sizeof(site_t))
                pthread_mutex_unlock(&self.lock)
            if full or sites == NULL:
                raise MemoryError()
            # Code objects stay as long as the book.
            words = {sites[i].id: f"{(<object>sites[i].code).co_filename}:{line_of(<object>sites[i].code, sites[i].at)}"
                     for i in range(size) if sites[i].code != NULL and sites[i].id != OURS}
            return [(self.holders[held[i].entry.holder], held[i].pfn, held[i].entry.count, words.get(held[i].entry.site, "?"))
                    for i in range(n)]
        finally:
            free(held)
            free(sites)


cdef object line_of(object code, int at):
    return PyCode_Addr2Line(<void *>code, at) if PY_VERSION_HEX >= 0x030B0000 else at

cdef uint32_t add_site(PinBook book, PyObject *code, int at) except? 0:
    """Note a call site; returns its number, OURS for this package's own frames, 0 without memory."""
    cdef bint ours = os.path.abspath((<object>code).co_filename).startswith(_PACKAGE)
    cdef uint32_t id, i, k
    cdef site_t *more
    pthread_mutex_lock(&book.lock)
    try:
        id = book.find_site(code, at)
        if id != NO_SITE:
            return id
        if book.nr_sites * 2 > book.sites_size:
            more = <site_t *>calloc(book.sites_size * 2, sizeof(site_t))
            if more == NULL:
                return NO_SITE
            for i in range(book.sites_size):
                if book.site[i].code != NULL:
                    k = place_of(book.site[i].code, book.site[i].at, book.sites_size * 2)
                    while more[k].code != NULL:
                        k = (k + 1) & (book.sites_size * 2 - 1)
                    more[k] = book.site[i]
            free(book.site)
            book.site = more
            book.sites_size *= 2
        i = place_of(code, at, book.sites_size)
        while book.site[i].code != NULL:
            i = (i + 1) & (book.sites_size - 1)
        Py_INCREF_(code)
        book.site[i].code = code
        book.site[i].at = at
        book.site[i].id = <uint32_t>OURS if ours else book.nr_sites
        book.nr_sites += 1
        return book.site[i].id
    finally:
        pthread_mutex_unlock(&book.lock)
