"""Who wants to know about pins: the books that PinLedger keeps.

The thin functions that take or drop pins look at one C integer; while no book is open, that is all it costs.

Laws
    A book's slot of a PFN is the latest of its entries there, 0 for none; entries of one folio differ in holder or site.
    What is dropped is looked up before it is released, since a folio may be free after, and booked when it went.
Locks: book.lock is the innermost of all. Nothing that may run Python code runs under it.
"""
from libc.stdint cimport uint32_t, uint64_t
from mmcore.core.memory cimport Memory, pthread_mutex_t

cdef int pin_watchers                   # how many books are open

cdef enum:
    PINS_OWN = 8

cdef struct pin_t:
    uint64_t head                       # PFN of the folio
    uint64_t count

cdef struct pins_t:                     # what one call takes or drops
    pin_t *p
    uint64_t n
    uint64_t room
    uint64_t lost                       # pins that there was no memory to note
    pin_t own[PINS_OWN]

cdef void pins_grow(pins_t *pins) noexcept nogil

cdef inline void pins_begin(pins_t *pins) noexcept nogil:
    pins.p = pins.own
    pins.n = pins.lost = 0
    pins.room = PINS_OWN

cdef inline void pins_add(pins_t *pins, uint64_t head, uint64_t count) noexcept nogil:
    if pins.n == pins.room:
        pins_grow(pins)
    if pins.n == pins.room:
        pins.lost += count
        return
    pins.p[pins.n].head = head
    pins.p[pins.n].count = count
    pins.n += 1

cdef void pins_end(pins_t *pins) noexcept nogil                             # without a word: the call failed
cdef object pins_tell(Memory mem, pins_t *pins, int sign)                   # and pins_end(); sign: +1 taken, -1 dropped
cdef object pin_tell(Memory mem, uint64_t head, uint64_t count, int sign)   # the same for one folio

cdef struct entry_t:
    uint32_t holder                     # index of its name
    uint32_t site                       # index of where the call was
    uint32_t next                       # the next older one of the folio, or the next free one; 0 ends
    uint64_t count

cdef struct site_t:
    void *code                          # a reference to the code object that called; NULL: an unused place
    int at                              # the instruction in it
    uint32_t id                         # OURS: a frame of this package, whose caller is meant

cdef class PinBook:
    cdef readonly Memory mem
    cdef uint64_t serial                # tells books apart; never 0
    cdef pthread_mutex_t lock           # of all that follows
    cdef uint32_t *slot                 # by PFN
    cdef uint64_t slot_size             # bytes
    cdef entry_t *entry                 # [0] is not used
    cdef uint32_t nr_entries            # ever used; the free ones are chained
    cdef uint32_t room
    cdef uint32_t free
    cdef site_t *site                   # a hash table, at most half full
    cdef uint32_t nr_sites
    cdef uint32_t sites_size            # a power of two
    cdef readonly uint64_t unknown      # drops of pins that were taken before
    cdef readonly uint64_t lost         # pins that there was no memory to book
    cdef list holders                   # names
    cdef dict holder_ids
    cdef object slow_holder             # asked when the thread's innermost tag is not this book's

    cdef uint32_t find_site(self, void *code, int at) noexcept nogil
    cdef uint32_t call_site(self) except? 0
    cdef object book(self, const pin_t *pins, uint64_t n, int sign)
