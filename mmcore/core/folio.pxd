"""Folios: references, pins, split.

Laws
    _refcount >= mappings + pins. Whoever brings it to 0 owns the folio; nobody else may touch it after.
    Pins of a small folio are GUP_PIN_COUNTING_BIAS on _refcount each; of a large one 1 on _refcount and 1 on _pincount.
    The permanent zero page is never pinned. nr_foll_pin_* count base pages' pins, on every path.
    A put or unpin that would break a law is refused with a BAD_* code, and nothing is changed.

Memory order
    Taking a reference   acquire: what the last owner wrote is visible (compare-and-swap, never from 0: a folio at 0
                         is being freed, and an add that is taken back could hit its next owner)
    Dropping one         release, and acquire for whoever reaches 0
    Pin, large           _refcount first, then _pincount; unpin: _pincount first, then _refcount. So at any moment
                         _pincount <= _refcount, and whoever sees 0 references sees 0 pins.

Plain references and pins share one counter of a small folio. As long as it never had 512 or more plain references,
_refcount & 1023 is their exact number, and a put that would eat a pin is refused. A folio that had that many carries
PG_mm_many_refs until it is freed; on it an unpin too many, or a put too many, can no longer be seen.
"""
from libc.stdint cimport int32_t, int64_t, uint32_t, uint64_t
from mmcore.core.memory cimport *
from mmcore.core.buddy cimport free_folio

cdef enum:
    FOLL_WRITE = 0x1
    FOLL_GET = 0x2
    FOLL_DUMP = 0x4
    FOLL_FORCE = 0x8
    FOLL_NOWAIT = 0x10
    FOLL_NOFAULT = 0x20
    FOLL_HWPOISON = 0x40
    FOLL_ANON = 0x80
    FOLL_LONGTERM = 0x100
    FOLL_SPLIT_PMD = 0x200
    FOLL_PCI_P2PDMA = 0x400
    FOLL_INTERRUPTIBLE = 0x800
    FOLL_HONOR_NUMA_FAULT = 0x1000
    FOLL_TOUCH = 1 << 16
    FOLL_TRIED = 1 << 17
    FOLL_REMOTE = 1 << 18
    FOLL_PIN = 1 << 19
    FOLL_FAST_ONLY = 1 << 20
    FOLL_UNLOCKABLE = 1 << 21
    FOLL_MADV_POPULATE = 1 << 22

cdef enum:                      # why a put was refused; outside the range of errno
    BAD_UNDERFLOW = -5001       # fewer references than the call drops
    BAD_UNPINNED = -5002        # fewer pins than the call drops
    BAD_EATS_PIN = -5003        # the references left would not cover the pins
    BAD_LOCKED = -5004          # the last reference, and somebody holds the lock
    BAD_WRITEBACK = -5005       # the last reference, and writeback runs
    BAD_MAPPED = -5006          # the last reference, and page tables map it
    BAD_RESERVED = -5007        # the last reference of a page that is not the allocator's
    BAD_FREE = -5008            # the folio is free already
    NOT_FREED = 0
    FREED = 1                   # the caller brought it to 0, and frees it

# ---- slow sides, out of line ---------------------------------------------------------------------------------------
cdef int put_wrong(const page_t *head, uint32_t old, uint32_t refs) noexcept nogil      # 0 when it is right after all
cdef int put_last_wrong(mem_t *m, const page_t *head) noexcept nogil                    # why the last reference must stay; 0
cdef int put_last(mem_t *m, page_t *head, uint32_t old) noexcept nogil  # drops the last ones, if they may go

cdef inline bint not_to_write(const mem_t *m, uint64_t head) noexcept nogil:
    """The zero pages, which everybody reads, and page tables: a wild entry there would lead the engine astray."""
    return head == m.zero_pfn or head == m.huge_zero_pfn or page_type_is(&m.map[head], PGTY_table)

# ---- references ----------------------------------------------------------------------------------------------------
cdef inline uint32_t refs_load(const page_t *head) noexcept nogil:
    return a32_load_relaxed(&head._refcount)

cdef inline uint32_t pincount_load(const page_t *head) noexcept nogil:
    return a32_load_relaxed(&as_folio(head)._pincount)

cdef inline void note_plain_refs(page_t *head, uint32_t old, uint32_t refs) noexcept nogil:
    """Mark a small folio whose plain references come near the bias. Long before: the mark is set after the add."""
    if mm_unlikely((old & (GUP_PIN_COUNTING_BIAS - 1)) + <uint64_t>refs >= GUP_PIN_COUNTING_BIAS // 2):
        if not test_flag(head, PG_mm_many_refs) and not page_is_head(head):
            set_flag(head, PG_mm_many_refs)

cdef inline bint ref_add_positive(page_t *head, uint64_t amount) noexcept nogil:
    """Add when the count, a signed int, is above 0 and the sum fits 32 bits."""
    cdef uint32_t old = refs_load(head)
    while True:
        if mm_unlikely(<int32_t>old <= 0 or amount + old > 0xffffffffu):
            return False
        if mm_likely(a32_cas_acq_rel(&head._refcount, &old, old + <uint32_t>amount)):
            return True

cdef inline bint ref_add_unless_zero(page_t *head, uint32_t amount) noexcept nogil:
    """Add unless the count is 0 (folio_ref_try_add)."""
    cdef uint32_t old = refs_load(head)
    while True:
        if old == 0 or <uint64_t>old + amount > 0xffffffffu:
            return False
        if mm_likely(a32_cas_acq_rel(&head._refcount, &old, old + amount)):
            return True

cdef inline int put_refs(mem_t *m, page_t *head, bint large, uint32_t refs) noexcept nogil:
    """Drop plain references: NOT_FREED, FREED, or a BAD_* code with nothing changed."""
    cdef uint32_t old = refs_load(head)
    cdef int bad
    while True:
        # Looked at before, not undone after: a wrong put must not be seen by the right ones of other threads.
        if mm_unlikely(old < refs or (old - refs < pincount_load(head) if large
                                      else (old & (GUP_PIN_COUNTING_BIAS - 1)) < refs)):
            bad = put_wrong(head, old, refs)
            if bad:
                return bad
        if old == refs and mm_unlikely(put_last_wrong(m, head)):
            bad = put_last(m, head, old)
            if bad != NOT_FREED:
                return bad
            old = refs_load(head)
            continue
        if mm_likely(a32_cas_acq_rel(&head._refcount, &old, old - refs)):
            return FREED if old == refs else NOT_FREED

cdef inline int put_pins(mem_t *m, page_t *head, bint large, uint64_t pins) noexcept nogil:
    """Drop pins (not of the zero page): NOT_FREED, FREED, or a BAD_* code with nothing changed. Statistics are the caller's.

    Compare-and-swap costs what fetch-and-sub costs (4.8 ns here), and a wrong unpin is never seen by right ones.
    """
    cdef uint32_t old, amount = <uint32_t>pins
    cdef int bad
    if large:
        old = pincount_load(head)
        while True:
            if mm_unlikely(old < pins):
                return BAD_UNPINNED
            if mm_likely(a32_cas_acq_rel(&as_folio(head)._pincount, &old, old - amount)):
                break
    else:
        if mm_unlikely(pins >> (32 - GUP_PIN_COUNTING_SHIFT)):
            return BAD_UNPINNED
        amount <<= GUP_PIN_COUNTING_SHIFT
    old = refs_load(head)
    while True:
        if mm_unlikely(old <= amount) and (old < amount or put_last_wrong(m, head)):
            if old == amount:
                bad = put_last(m, head, old)
            elif refs_load(head) != old:
                bad = NOT_FREED
            else:
                bad = BAD_UNDERFLOW if large else BAD_UNPINNED
            if bad == NOT_FREED:
                old = refs_load(head)
                continue
            if large and bad != FREED:
                a32_fetch_add_acq_rel(&as_folio(head)._pincount, amount)
            return bad
        if mm_likely(a32_cas_acq_rel(&head._refcount, &old, old - amount)):
            return FREED if old == amount else NOT_FREED

cdef inline bint retake(page_t *head, bint large, bint pins, uint64_t count) noexcept nogil:
    """Take back what a batch dropped, unless the folio is gone since. The caller sees to it that no frame is used again."""
    cdef uint64_t amount = count << GUP_PIN_COUNTING_SHIFT if pins and not large else count
    if not ref_add_unless_zero(head, <uint32_t>amount):
        return False
    if pins and large:
        a32_fetch_add_acq_rel(&as_folio(head)._pincount, <uint32_t>count)
    return True

cdef int grab_folio(mem_t *m, uint64_t pfn, uint64_t refs, unsigned flags) noexcept nogil

# ---- split ------------------------------------------------------------------------------------------------------------
cdef int split(mem_t *m, uint64_t pfn, unsigned new_order) noexcept nogil    # 0, -EINVAL, -EBUSY, -EAGAIN
cdef int64_t expected_refs(mem_t *m, uint64_t pfn) noexcept nogil           # that mappings and caches explain

# ---- sums that have one home ---------------------------------------------------------------------------------------
cdef inline uint64_t remaining_pages(uint64_t head, uint64_t nr_pages, uint64_t pfn, uint64_t max_pages) noexcept nogil:
    """Pages from pfn to the end of its folio, pfn's own included, at most max_pages (folio_remaining_pages)."""
    cdef uint64_t left = head + nr_pages - pfn
    return left if left < max_pages else max_pages

cdef inline bint longterm_pinnable(mem_t *m, uint64_t pfn) noexcept nogil:
    """May the folio with this head be pinned for long? The order of the questions is the kernel's."""
    cdef unsigned zone, block = pageblock_migratetype(m, pfn)
    cdef device_t *d
    if block == MIGRATE_CMA or block == MIGRATE_ISOLATE:
        return False
    if pfn == m.zero_pfn:
        return True
    zone = page_zone(&m.map[pfn])
    if zone == ZONE_DEVICE:
        d = device_of(m, pfn)
        return d == NULL or (d.type != DEVICE_COHERENT and d.type != DEVICE_FSDAX)
    return zone != ZONE_MOVABLE

# ---- for the thin functions of this and the higher modules -----------------------------------------------------------
cdef Memory folio_arg(object folio, uint64_t *pfn, bint live)           # no tail; with live, no free one either
cdef Memory page_arg(object page, uint64_t *pfn)
cdef uint64_t count_arg(object number, str what, uint64_t least, uint64_t most) except? 0
cdef object grab_error(Memory mem, int error, uint64_t pfn)
cdef object bad_page(Memory mem, int code, uint64_t pfn, uint64_t dropped, str call)
