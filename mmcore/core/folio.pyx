"""The folio_* and page helpers, under the kernel's names."""
from cpython.buffer cimport PyBuffer_FillInfo
from cpython.exc cimport PyErr_Occurred
from libc.errno cimport EAGAIN, EBUSY, EINTR, EINVAL, ENOMEM, EREMOTEIO
from mmcore.core.buddy cimport dissolve_pooled, region_is_free, region_take_at

import enum
import errno as _errno

from .errors import BadPage, InvalidArgument, MMError

__all__ = [
    "FOLL", "GUP_PIN_COUNTING_BIAS",
    "page_to_pfn", "pfn_to_page", "page_folio", "compound_head", "PageHead", "PageTail", "PageCompound", "PageDirty",
    "compound_order", "compound_nr", "folio_page", "folio_page_idx", "folio_order", "folio_nr_pages", "folio_size",
    "folio_test_large", "folio_ref_count", "folio_get", "folio_put", "folio_put_refs", "folio_try_get",
    "folio_ref_freeze", "folio_ref_unfreeze", "get_page", "put_page", "folio_maybe_dma_pinned",
    "folio_is_longterm_pinnable", "folio_mapcount", "folio_expected_ref_count", "folio_lock", "folio_trylock",
    "folio_unlock", "folio_test_dirty", "folio_mark_dirty", "folio_mark_dirty_lock", "set_page_dirty",
    "set_page_dirty_lock", "folio_clear_dirty_for_io", "folio_start_writeback", "folio_end_writeback", "folio_split",
    "is_zero_page", "is_huge_zero_folio", "is_huge_zero_page", "folio_remaining_pages", "try_grab_folio",
    "folio_add_pin", "folio_add_pins", "zone_device_page_init", "page_address", "folio_address", "memory_failure",
]


class FOLL(enum.IntFlag):
    """Name the FOLL_* flags; those from TOUCH on are internal to the kernel, PIN is open here for grab calls."""
    WRITE = FOLL_WRITE
    GET = FOLL_GET
    DUMP = FOLL_DUMP
    FORCE = FOLL_FORCE
    NOWAIT = FOLL_NOWAIT
    NOFAULT = FOLL_NOFAULT
    HWPOISON = FOLL_HWPOISON
    ANON = FOLL_ANON
    LONGTERM = FOLL_LONGTERM
    SPLIT_PMD = FOLL_SPLIT_PMD
    PCI_P2PDMA = FOLL_PCI_P2PDMA
    INTERRUPTIBLE = FOLL_INTERRUPTIBLE
    HONOR_NUMA_FAULT = FOLL_HONOR_NUMA_FAULT
    TOUCH = FOLL_TOUCH
    TRIED = FOLL_TRIED
    REMOTE = FOLL_REMOTE
    PIN = FOLL_PIN
    FAST_ONLY = FOLL_FAST_ONLY
    UNLOCKABLE = FOLL_UNLOCKABLE
    MADV_POPULATE = FOLL_MADV_POPULATE


# FOLL_WRITE, FOLL_PIN, ... as module constants
globals().update({"FOLL_" + flag.name: flag for flag in FOLL})
globals()["GUP_PIN_COUNTING_BIAS"] = 1024
__all__ += ["FOLL_" + flag.name for flag in FOLL]

# ---- dropping references: the slow sides ------------------------------------------------------------------------------
cdef int put_suspicious(mem_t *m, page_t *head, uint32_t old, uint32_t refs) noexcept nogil:
    """Decide about a put that looks wrong: 0 when it was right after all, else a BAD_* code after undoing."""
    cdef int i, bad
    cdef uint32_t now
    if old < refs:
        bad = BAD_FREE if old == 0 else BAD_UNDERFLOW
    elif page_is_head(head):
        # Pins and references are two words; others may move both while we look. The law holds at every moment, so one
        # look that finds it kept settles the matter, and a breach stays one however often we look.
        for i in range(64):
            now = refs_load(head)
            if now >= pincount_load(head):
                return 0
            cpu_relax()
        bad = BAD_EATS_PIN
    else:
        if test_flag(head, PG_mm_many_refs):
            return 0
        bad = BAD_EATS_PIN
    a32_fetch_add_acq_rel(&head._refcount, refs)
    return bad

cdef int put_last(mem_t *m, page_t *head, uint32_t amount) noexcept nogil:
    """The count just reached 0: FREED when the folio may be freed, else a BAD_* code after undoing."""
    cdef uint64_t flags = a64_load_relaxed(&head.flags)
    cdef int bad = FREED
    cdef uint64_t stop = (ONE << PG_locked) | (ONE << PG_writeback) | (ONE << PG_reserved)
    if mm_unlikely((flags & stop) != 0):
        if (flags >> PG_locked) & 1:
            bad = BAD_LOCKED
        elif (flags >> PG_writeback) & 1:
            bad = BAD_WRITEBACK
        else:
            bad = BAD_RESERVED
    elif mm_unlikely(folio_mapcount_of(head) > 0):
        bad = BAD_MAPPED
    elif mm_unlikely((flags >> PG_head) & 1 and pincount_load(head) != 0):
        bad = BAD_EATS_PIN
    elif mm_unlikely(<uint64_t>(head - m.map) == m.huge_zero_pfn):
        bad = BAD_RESERVED
    if bad != FREED:
        a32_fetch_add_acq_rel(&head._refcount, amount)
        return bad
    return FREED

# ---- taking references --------------------------------------------------------------------------------------------------
cdef uint64_t try_get_folio(mem_t *m, uint64_t pfn, uint32_t refs) noexcept nogil:
    """Take references on the folio that holds a page; its head's PFN, or 0 when it is free.

    The page may be split off its folio meanwhile: look again once the references hold it.
    """
    cdef uint64_t head
    while True:
        head = compound_head_pfn(m.map, pfn)
        if not ref_add_positive(&m.map[head], refs):
            return 0
        if mm_likely(compound_head_pfn(m.map, pfn) == head):
            return head
        if put_refs(m, &m.map[head], page_is_head(&m.map[head]), refs) == FREED:
            free_folio(m, head, folio_order_of(&m.map[head]))

cdef int grab_folio(mem_t *m, uint64_t pfn, uint64_t refs, unsigned flags) noexcept nogil:
    """try_grab_folio on the folio with this head: 0, -ENOMEM, -EREMOTEIO, -EINVAL."""
    cdef page_t *head = &m.map[pfn]
    cdef device_t *d
    cdef uint64_t amount
    cdef uint32_t old
    cdef bint large
    if mm_unlikely(<int32_t>refs_load(head) <= 0):
        return -ENOMEM
    if mm_unlikely(page_zone(head) == ZONE_DEVICE) and not flags & FOLL_PCI_P2PDMA:
        d = device_of(m, pfn)
        if d != NULL and d.type == DEVICE_PCI_P2PDMA:
            return -EREMOTEIO
    if not flags & (FOLL_GET | FOLL_PIN):
        return 0
    if mm_unlikely(refs >> 31):
        return -ENOMEM
    large = page_is_head(head)
    if flags & FOLL_GET:
        old = refs_load(head)
        if not ref_add_positive(head, refs):
            return -ENOMEM
        note_plain_refs(head, old, <uint32_t>refs)
        stat_add(m, OP_REF_ATOMICS, 1)
        return 0
    if mm_unlikely(pfn == m.zero_pfn):
        return 0
    amount = refs if large else refs << GUP_PIN_COUNTING_SHIFT
    if not ref_add_positive(head, amount):
        return -ENOMEM
    stat_add(m, OP_REF_ATOMICS, 1)
    if large:
        a32_fetch_add_relaxed(&as_folio(head)._pincount, <uint32_t>refs)
        stat_add(m, OP_PINCOUNT_ATOMICS, 1)
    stat_add(m, NR_FOLL_PIN_ACQUIRED, <int64_t>refs)
    return 0

cdef extern from "Python.h":
    # Without cpython.exc's `except -1`: the exception stays set for the def function that waits (raise_pending).
    int PyErr_CheckSignals()

# ---- the folio lock -------------------------------------------------------------------------------------------------------
# Waiters sleep on one of 256 conditions, chosen by the folio. PG_waiters tells the owner that there may be some:
#   waiter   takes the bucket's mutex, sets PG_waiters, tries the lock once more, sleeps
#   owner    clears PG_locked and PG_waiters in one step; when PG_waiters was set: mutex, wake all, done
# A waiter that sets its mark after that step finds the lock free; one that set it before is woken.
cdef extern from *:
    """
    #include <pthread.h>
    #include <time.h>

    typedef struct {
        pthread_mutex_t mutex;
        pthread_cond_t cond;
    } mm_bucket;
    static mm_bucket mm_wait_table[256];

    static void mm_wait_init(void)
    {
        for (int i = 0; i < 256; i++) {
            pthread_mutex_init(&mm_wait_table[i].mutex, NULL);
            pthread_cond_init(&mm_wait_table[i].cond, NULL);
        }
    }
    static mm_bucket *mm_wait_bucket(const void *folio)
    {
        return &mm_wait_table[(((uintptr_t)folio >> 6) * 0x9e3779b97f4a7c15ULL) >> 56];
    }
    /* Sleep at most 50 ms, so that a signal can end the wait. */
    static void mm_wait_sleep(mm_bucket *b)
    {
        struct timespec until;

        clock_gettime(CLOCK_REALTIME, &until);
        until.tv_nsec += 50 * 1000 * 1000;
        if (until.tv_nsec >= 1000000000L) {
            until.tv_nsec -= 1000000000L;
            until.tv_sec++;
        }
        pthread_cond_timedwait(&b->cond, &b->mutex, &until);
    }
    """
    ctypedef struct mm_bucket:
        pthread_mutex_t mutex
    void mm_wait_init() nogil
    mm_bucket *mm_wait_bucket(const void *folio) nogil
    void mm_wait_sleep(mm_bucket *b) nogil

cdef extern from *:
    """
    static void mm_wake_all(mm_bucket *b)
    {
        pthread_mutex_lock(&b->mutex);
        pthread_cond_broadcast(&b->cond);
        pthread_mutex_unlock(&b->mutex);
    }
    """
    void mm_wake_all(mm_bucket *b) nogil

mm_wait_init()

cdef int lock_wait(mem_t *m, uint64_t pfn) noexcept nogil:
    """Take the folio lock: spin a little, then sleep. 0, or -EINTR with a Python exception set by a signal handler."""
    cdef page_t *head = &m.map[pfn]
    cdef mm_bucket *bucket
    cdef int i
    cdef bint stop = False
    stat_add(m, OP_FOLIO_LOCKS, 1)
    for i in range(100):
        if trylock(head):
            return 0
        cpu_relax()
    bucket = mm_wait_bucket(head)
    while True:
        pthread_mutex_lock(&bucket.mutex)
        a64_fetch_or_acq_rel(&head.flags, ONE << PG_waiters)
        if trylock(head):
            pthread_mutex_unlock(&bucket.mutex)
            return 0
        mm_wait_sleep(bucket)
        pthread_mutex_unlock(&bucket.mutex)
        if trylock(head):
            # Others may still sleep on this folio.
            a64_fetch_or_acq_rel(&head.flags, ONE << PG_waiters)
            return 0
        with gil:
            stop = PyErr_CheckSignals() != 0
        if stop:
            return -EINTR

cdef void unlock(mem_t *m, uint64_t pfn) noexcept nogil:
    cdef page_t *head = &m.map[pfn]
    cdef mm_bucket *bucket = mm_wait_bucket(head)
    cdef uint64_t old = a64_fetch_and_release(&head.flags, ~((ONE << PG_locked) | (ONE << PG_waiters)))
    if (old >> PG_waiters) & 1:
        mm_wake_all(bucket)

cdef int raise_pending() except -1:
    if PyErr_Occurred() != NULL:
        return -1
    return 0

# ---- dirty and writeback ----------------------------------------------------------------------------------------------------
cdef bint mark_dirty(mem_t *m, uint64_t pfn) noexcept nogil:
    cdef page_t *head = &m.map[pfn]
    cdef int64_t nr
    if (a64_fetch_or_acq_rel(&head.flags, ONE << PG_dirty) >> PG_dirty) & 1:
        return False
    if not folio_is_anon(head):
        nr = ONE << folio_order_of(head)
        stat_add(m, NR_DIRTY, nr)
        stat_add(m, NR_DIRTIED, nr)
    return True

cdef bint clear_dirty(mem_t *m, uint64_t pfn) noexcept nogil:
    cdef page_t *head = &m.map[pfn]
    if not (a64_fetch_and_acq_rel(&head.flags, ~(ONE << PG_dirty)) >> PG_dirty) & 1:
        return False
    if not folio_is_anon(head):
        stat_add(m, NR_DIRTY, -<int64_t>(ONE << folio_order_of(head)))
    return True

# ---- split --------------------------------------------------------------------------------------------------------------------
cdef int64_t expected_refs(mem_t *m, uint64_t pfn) noexcept nogil:
    """References that mappings and caches explain (folio_expected_ref_count)."""
    cdef page_t *head = &m.map[pfn]
    cdef int64_t refs = 0, nr = ONE << folio_order_of(head)
    if page_has_type(head) and not folio_is_hugetlb(head):
        return 0
    if folio_is_anon(head):
        if test_flag(head, PG_swapbacked) and test_flag(head, PG_owner_priv_1):
            refs += nr
    else:
        refs += nr if head.mapping else 0
        refs += test_flag(head, PG_private)
    return refs + folio_mapcount_of(head)

cdef int split(mem_t *m, uint64_t pfn, unsigned new_order) noexcept nogil:
    """Split a folio that is not mapped into folios of new_order, one reference of the caller's on each.

    The count is frozen at 0 meanwhile, so that nobody can take a reference through a page whose head is changing.
    """
    cdef page_t *head = &m.map[pfn]
    cdef unsigned order = folio_order_of(head)
    cdef uint32_t expected
    cdef uint64_t i, keep, zone, inherited, mapping, index, at, step = ONE << new_order
    if order == 0 or new_order >= order:
        return -EINVAL
    if folio_is_hugetlb(head) or pfn == m.huge_zero_pfn or page_zone(head) == ZONE_DEVICE \
            or test_flag(head, PG_writeback):
        return -EBUSY
    if folio_mapcount_of(head) > 0:
        return -EBUSY
    expected = <uint32_t>expected_refs(m, pfn) + 1
    if pincount_load(head) != 0 or not a32_cas_acq_rel(&head._refcount, &expected, 0):
        return -EAGAIN
    keep = (ONE << PG_mm_written) | (ONE << PG_hwpoison) | (ONE << PG_owner_2)
    zone = head.flags & ~((ONE << ZONE_SHIFT) - 1)
    inherited = head.flags & ((ONE << PG_dirty) | (ONE << PG_referenced) | (ONE << PG_uptodate) | (ONE << PG_active)
                              | (ONE << PG_workingset) | (ONE << PG_swapbacked) | (ONE << PG_unevictable)
                              | (ONE << PG_dropbehind) | (ONE << PG_mlocked))
    mapping = head.mapping
    index = head.index
    i = pfn + (ONE << order)
    while i > pfn:
        # From the end: the head, where the lock and the frozen count are, comes last. A waiter's mark that is lost in
        # this plain store costs that waiter one time-out.
        i -= step
        split_piece(m, i, new_order, zone, inherited, keep, mapping, index + (i - pfn) if mapping else 0,
                    (ONE << PG_locked) | (ONE << PG_waiters) if i == pfn else 0)
    for at in range(1, ONE << (order - new_order)):
        a32_store_release(&m.map[pfn + at * step]._refcount, 1)
    a32_store_release(&head._refcount, expected)
    return 0

cdef void split_piece(mem_t *m, uint64_t pfn, unsigned order, uint64_t zone, uint64_t inherited, uint64_t keep,
                      uint64_t mapping, uint64_t index, uint64_t lock_bits) noexcept nogil:
    cdef page_t *head = &m.map[pfn]
    cdef uint64_t i, own
    cdef bint poisoned = False
    for i in range(1, ONE << order):
        own = a64_load_relaxed(&head[i].flags) & keep
        poisoned = poisoned or (own >> PG_hwpoison) & 1
        prep_tail(head + i, zone | own, tail_word(order))
    own = a64_load_relaxed(&head.flags) & (keep | lock_bits)
    poisoned = poisoned or (own >> PG_hwpoison) & 1
    page_init(head, zone | own | inherited | ((ONE << PG_head) if order else 0), 0)
    head.mapping = mapping
    head.index = index
    if order:
        prep_folio_words(head, order)
        if poisoned:
            as_folio(head)._flags_1 |= ONE << PG_has_hwpoisoned

# ---- arguments and errors -------------------------------------------------------------------------------------------------------
cdef Memory folio_arg(object folio, uint64_t *pfn, bint live):
    cdef Memory mem
    cdef mem_t *m
    if type(folio) is Folio:
        mem = (<Folio>folio).mem
        pfn[0] = (<Folio>folio).pfn
    elif type(folio) is Page:
        mem = (<Page>folio).mem
        pfn[0] = (<Page>folio).pfn
    else:
        raise TypeError(f"a Folio is wanted, not {folio!r}")
    m = mem.ptr()
    if mm_unlikely(page_is_tail(&m.map[pfn[0]])):
        raise InvalidArgument(f"PFN {pfn[0]:#x} is a tail (its folio starts at {compound_head_pfn(m.map, pfn[0]):#x}) where "
                              "a folio is wanted: take page_folio(page); or the folio was freed and used again",
                              pfn=pfn[0])
    if live and refs_load(&m.map[pfn[0]]) == 0:
        raise bad_page(mem, BAD_FREE, pfn[0], 0, "the call")
    return mem

cdef Memory page_arg(object page, uint64_t *pfn):
    cdef Memory mem
    if type(page) is Page:
        mem = (<Page>page).mem
        pfn[0] = (<Page>page).pfn
    elif type(page) is Folio:
        mem = (<Folio>page).mem
        pfn[0] = (<Folio>page).pfn
    else:
        raise TypeError(f"a Page is wanted, not {page!r}")
    mem.ptr()
    return mem

cdef uint64_t count_arg(object number, str what, uint64_t least, uint64_t most) except? 0:
    if type(number) is not int:
        if isinstance(number, bool) or not hasattr(number, "__index__"):
            raise TypeError(f"{what} is an int, not {number!r}")
        number = number.__index__()
    if not least <= number <= most:
        hint = ""
        if -4095 <= number < 0:
            hint = f"; it looks like an error of the call before ({_errno.errorcode.get(-number, number)})"
        raise InvalidArgument(f"{what} {number} is outside {least}..{most}{hint}")
    return number

cdef dict _LAWS = {
    BAD_UNDERFLOW: ("refcount underflow", "it was released more often than it was taken"),
    BAD_UNPINNED: ("pin underflow", "it was unpinned more often than it was pinned, or was never pinned: pages taken "
                                    "with FOLL_GET go back with put_page() or release_pages()"),
    BAD_EATS_PIN: ("refcount >= pins", "the references left would not cover its pins: pages taken with FOLL_PIN go back "
                                       "with the unpin_* functions"),
    BAD_LOCKED: ("freed while locked", "this is its last reference, and its lock is held: folio_unlock() first"),
    BAD_WRITEBACK: ("freed under writeback", "this is its last reference, and it is under writeback: "
                                             "folio_end_writeback() first"),
    BAD_MAPPED: ("freed while mapped", "this is its last reference, and page tables still map it"),
    BAD_RESERVED: ("reserved page freed", "this is the engine's own reference: it was put once too often"),
    BAD_FREE: ("use after free", "its refcount is 0: the folio is free (or frozen), and the handle is stale"),
}

cdef object bad_page(Memory mem, int code, uint64_t pfn, uint64_t dropped, str call):
    cdef page_t *head = &mem.m.map[pfn]
    law, why = _LAWS[code]
    state = f"refcount {<int32_t>refs_load(head)}"
    if page_is_head(head):
        state += f", pincount {<int32_t>pincount_load(head)}"
    what = f" of {dropped}" if dropped else ""
    return BadPage(law, f"{call}{what} on the folio at PFN {pfn:#x} ({state}): {why}. Nothing was changed", pfn=pfn)


# ---- looking: pages ---------------------------------------------------------------------------------------------------------------
def page_to_pfn(page):
    """Return the page frame number of a Page (int)."""
    cdef uint64_t pfn
    page_arg(page, &pfn)
    return pfn


def pfn_to_page(Memory mem not None, pfn):
    """Return the Page of a PFN. Raises InvalidArgument outside of mem_map."""
    return mem.page(pfn)


def page_folio(page):
    """Return the Folio that holds a page; without a reference it may be stale at once."""
    cdef uint64_t pfn
    cdef Memory mem = page_arg(page, &pfn)
    return folio_handle(mem, compound_head_pfn(mem.m.map, pfn))


def compound_head(page):
    """Return the first Page of the page's folio: the page itself when it is no tail."""
    cdef uint64_t pfn
    cdef Memory mem = page_arg(page, &pfn)
    return page_handle(mem, compound_head_pfn(mem.m.map, pfn))


def PageHead(page):
    """Tell whether a page is the first of a folio of order >= 1."""
    cdef uint64_t pfn
    cdef Memory mem = page_arg(page, &pfn)
    return bool(page_is_head(&mem.m.map[pfn]))


def PageTail(page):
    """Tell whether a page is a tail of a folio."""
    cdef uint64_t pfn
    cdef Memory mem = page_arg(page, &pfn)
    return bool(page_is_tail(&mem.m.map[pfn]))


def PageCompound(page):
    """Tell whether a page is the head or a tail of a folio of order >= 1."""
    cdef uint64_t pfn
    cdef Memory mem = page_arg(page, &pfn)
    return bool(page_is_head(&mem.m.map[pfn]) or page_is_tail(&mem.m.map[pfn]))


def PageDirty(page):
    """Tell whether the page's folio is dirty; the flag is the head's."""
    cdef uint64_t pfn
    cdef Memory mem = page_arg(page, &pfn)
    return bool(test_flag(&mem.m.map[compound_head_pfn(mem.m.map, pfn)], PG_dirty))


def compound_order(page):
    """Return log2 of the pages of a folio, given its head; 0 for a tail or a small folio, as the kernel does."""
    cdef uint64_t pfn
    cdef Memory mem = page_arg(page, &pfn)
    return folio_order_of(&mem.m.map[pfn])


def compound_nr(page):
    """Return the pages of a folio, given its head; 1 for a tail or a small folio, as the kernel does."""
    cdef uint64_t pfn
    cdef Memory mem = page_arg(page, &pfn)
    return ONE << folio_order_of(&mem.m.map[pfn])


def is_zero_page(page):
    """Tell whether this is the permanent zero page, which is never pinned."""
    cdef uint64_t pfn
    cdef Memory mem = page_arg(page, &pfn)
    return pfn == mem.m.zero_pfn


def is_huge_zero_folio(folio):
    """Tell whether this is the huge zero folio, which is pinned as any large folio is."""
    cdef uint64_t pfn
    cdef Memory mem = folio_arg(folio, &pfn, False)
    return pfn == mem.m.huge_zero_pfn


def is_huge_zero_page(page):
    """Tell whether a page belongs to the huge zero folio."""
    cdef uint64_t pfn
    cdef Memory mem = page_arg(page, &pfn)
    return compound_head_pfn(mem.m.map, pfn) == mem.m.huge_zero_pfn


# ---- looking: folios -----------------------------------------------------------------------------------------------------------------
def folio_order(folio):
    """Return log2 of a folio's pages."""
    cdef uint64_t pfn
    cdef Memory mem = folio_arg(folio, &pfn, False)
    return folio_order_of(&mem.m.map[pfn])


def folio_nr_pages(folio):
    """Return a folio's base pages."""
    cdef uint64_t pfn
    cdef Memory mem = folio_arg(folio, &pfn, False)
    return ONE << folio_order_of(&mem.m.map[pfn])


def folio_size(folio):
    """Return a folio's size in bytes."""
    cdef uint64_t pfn
    cdef Memory mem = folio_arg(folio, &pfn, False)
    return (ONE << folio_order_of(&mem.m.map[pfn])) << mem.m.page_shift


def folio_test_large(folio):
    """Tell whether a folio has more than one page."""
    cdef uint64_t pfn
    cdef Memory mem = folio_arg(folio, &pfn, False)
    return bool(page_is_head(&mem.m.map[pfn]))


def folio_page(folio, n):
    """Return the n-th Page of a folio, from 0. Raises InvalidArgument past its end, where the kernel does not look."""
    cdef uint64_t pfn
    cdef Memory mem = folio_arg(folio, &pfn, False)
    return page_handle(mem, pfn + count_arg(n, "page index", 0, (ONE << folio_order_of(&mem.m.map[pfn])) - 1))

cdef Memory folio_and_index(object folio, object page, uint64_t *head, uint64_t *index):
    """A folio and which of its pages a Page is."""
    cdef uint64_t pfn
    cdef Memory mem = folio_arg(folio, head, False)
    if page_arg(page, &pfn) is not mem:
        raise InvalidArgument("the page belongs to another Memory than the folio", pfn=pfn)
    index[0] = pfn - head[0]
    if mm_unlikely(index[0] >= ONE << folio_order_of(&mem.m.map[head[0]])):
        raise InvalidArgument(f"PFN {pfn:#x} is not in the folio at {head[0]:#x} "
                              f"({ONE << folio_order_of(&mem.m.map[head[0]])} pages)", pfn=pfn)
    return mem


def folio_page_idx(folio, page):
    """Return which page of a folio a Page is, from 0. Raises InvalidArgument when it is not in the folio."""
    cdef uint64_t head, index
    folio_and_index(folio, page, &head, &index)
    return index


def folio_remaining_pages(folio, page, max_pages=None):
    """Return how many pages of a folio follow from `page` on, that page included, at most max_pages.

    Proposed on the list in 2025 and not merged. Raises InvalidArgument when the page is not in the folio.
    """
    cdef uint64_t head, index
    cdef Memory mem = folio_and_index(folio, page, &head, &index)
    cdef uint64_t most = ~<uint64_t>0
    if max_pages is not None:
        most = count_arg(max_pages, "max_pages", 0, ~<uint64_t>0)
    return remaining_pages(head, ONE << folio_order_of(&mem.m.map[head]), head + index, most)


def folio_ref_count(folio):
    """Return a folio's references, a C int."""
    cdef uint64_t pfn
    cdef Memory mem = folio_arg(folio, &pfn, False)
    return <int32_t>refs_load(&mem.m.map[pfn])


def folio_mapcount(folio):
    """Return the mappings of all pages of a folio."""
    cdef uint64_t pfn
    cdef Memory mem = folio_arg(folio, &pfn, False)
    return folio_mapcount_of(&mem.m.map[pfn])


def folio_expected_ref_count(folio):
    """Return the references that mappings and caches explain; the caller's own and pins are not among them."""
    cdef uint64_t pfn
    cdef Memory mem = folio_arg(folio, &pfn, False)
    return expected_refs(&mem.m, pfn)


def folio_maybe_dma_pinned(folio):
    """Tell whether a folio may be pinned: exact for a large one; for a small one True also at 1024 plain references."""
    cdef uint64_t pfn
    cdef Memory mem = folio_arg(folio, &pfn, False)
    cdef page_t *head = &mem.m.map[pfn]
    if page_is_head(head):
        return <int32_t>pincount_load(head) > 0
    return refs_load(head) >= GUP_PIN_COUNTING_BIAS


def folio_is_longterm_pinnable(folio):
    """Tell whether a folio may stay pinned for long: not in CMA or ZONE_MOVABLE, nor fsdax or coherent device memory.

    The zero page always may.
    """
    cdef uint64_t pfn
    cdef Memory mem = folio_arg(folio, &pfn, False)
    return bool(longterm_pinnable(&mem.m, pfn))


# ---- references -------------------------------------------------------------------------------------------------------------------------
def folio_get(folio):
    """Take one reference. Raises BadPage when the count is 0 or close to overflow (-127..0)."""
    cdef uint64_t pfn
    cdef Memory mem = folio_arg(folio, &pfn, False)
    cdef page_t *head = &mem.m.map[pfn]
    cdef uint32_t old = refs_load(head)
    while True:
        if <uint32_t>(old + 127) <= 127:
            raise bad_page(mem, BAD_FREE, pfn, 1, "folio_get()")
        if a32_cas_acq_rel(&head._refcount, &old, old + 1):
            break
    note_plain_refs(head, old, 1)


def get_page(page):
    """Take one reference on the page's folio; nothing for slab and large kmalloc pages, as in the kernel."""
    cdef uint64_t pfn
    cdef Memory mem = page_arg(page, &pfn)
    pfn = compound_head_pfn(mem.m.map, pfn)
    if page_type_is(&mem.m.map[pfn], PGTY_slab) or page_type_is(&mem.m.map[pfn], PGTY_large_kmalloc):
        return
    folio_get(folio_handle(mem, pfn))


def folio_try_get(folio):
    """Take one reference unless the count is 0; tells whether it did."""
    cdef uint64_t pfn
    cdef Memory mem = folio_arg(folio, &pfn, False)
    return bool(ref_add_unless_zero(&mem.m.map[pfn], 1))

cdef object drop(Memory mem, uint64_t pfn, uint64_t refs, str call):
    cdef page_t *head = &mem.m.map[pfn]
    cdef unsigned order = folio_order_of(head)
    cdef int result = put_refs(&mem.m, head, order != 0, <uint32_t>refs)
    if result == FREED:
        free_folio(&mem.m, pfn, order)
    elif result < 0:
        raise bad_page(mem, result, pfn, refs, call)


def folio_put(folio):
    """Drop one reference; the last one frees the folio. Raises BadPage when that would break a law."""
    cdef uint64_t pfn
    cdef Memory mem = folio_arg(folio, &pfn, False)
    drop(mem, pfn, 1, "folio_put()")


def folio_put_refs(folio, refs):
    """Drop several references; the last one frees the folio. Raises BadPage when that would break a law."""
    cdef uint64_t pfn
    cdef Memory mem = folio_arg(folio, &pfn, False)
    cdef uint64_t nr = count_arg(refs, "refs", 0, 0x7fffffff)
    if nr:
        drop(mem, pfn, nr, "folio_put_refs()")


def put_page(page):
    """Drop one reference on the page's folio; nothing for slab and large kmalloc pages, as in the kernel.

    Raises BadPage when that would break a law.
    """
    cdef uint64_t pfn
    cdef Memory mem = page_arg(page, &pfn)
    pfn = compound_head_pfn(mem.m.map, pfn)
    if page_type_is(&mem.m.map[pfn], PGTY_slab) or page_type_is(&mem.m.map[pfn], PGTY_large_kmalloc):
        return
    drop(mem, pfn, 1, "put_page()")


def folio_ref_freeze(folio, count):
    """Set the count to 0 when it is exactly `count`; tells whether it did. folio_ref_unfreeze() ends it."""
    cdef uint64_t pfn
    cdef Memory mem = folio_arg(folio, &pfn, False)
    cdef uint32_t expected = <uint32_t>count_arg(count, "count", 1, 0x7fffffff)
    return bool(a32_cas_acq_rel(&mem.m.map[pfn]._refcount, &expected, 0))


def folio_ref_unfreeze(folio, count):
    """Give a frozen folio its count back. Raises BadPage when it is not frozen."""
    cdef uint64_t pfn
    cdef Memory mem = folio_arg(folio, &pfn, False)
    cdef uint64_t refs = count_arg(count, "count", 1, 0x7fffffff)
    cdef page_t *head = &mem.m.map[pfn]
    cdef region_t *r = region_of(&mem.m, pfn)
    cdef uint32_t zero = 0
    cdef bint free = test_flag(head, PG_mm_pool) or test_flag(head, PG_hwpoison)
    if r != NULL and not free:
        pthread_mutex_lock(&r.lock)
        free = region_is_free(&mem.m, r, pfn)
        pthread_mutex_unlock(&r.lock)
    if free and refs_load(head) == 0:
        raise bad_page(mem, BAD_FREE, pfn, 0, "folio_ref_unfreeze()")
    if page_is_head(head) and refs < pincount_load(head):
        raise bad_page(mem, BAD_EATS_PIN, pfn, refs, "folio_ref_unfreeze()")
    if not a32_cas_acq_rel(&head._refcount, &zero, <uint32_t>refs):
        raise BadPage("unfreeze of a folio that is not frozen",
                      f"folio_ref_unfreeze() on PFN {pfn:#x} with refcount {<int32_t>zero}. Nothing was changed", pfn=pfn)


cdef object grab_error(Memory mem, int error, uint64_t pfn):
    cdef page_t *head = &mem.m.map[compound_head_pfn(mem.m.map, pfn)]
    if error == -ENOMEM:
        refs = <int32_t>refs_load(head)
        why = ("the page is free, or being freed" if refs == 0 else
               "the counter overflowed, or would: release some of its references")
        return MMError(_errno.ENOMEM, f"no reference to be had on PFN {pfn:#x} (refcount {refs}): {why}", pfn=pfn)
    if error == -EREMOTEIO:
        return MMError(_errno.EREMOTEIO, f"PFN {pfn:#x} is PCI P2PDMA memory: pass FOLL_PCI_P2PDMA", pfn=pfn)
    return MMError(-error, f"PFN {pfn:#x} cannot be taken", pfn=pfn)


def try_grab_folio(folio, refs, flags=FOLL.PIN):
    """Take references (FOLL_GET) or pins (FOLL_PIN) on a folio; with neither flag it changes nothing.

    refs: int, 1 to 2**31 - 1. Raises MMError: ENOMEM when the count is 0, negative or would overflow; EREMOTEIO for
    P2PDMA memory without FOLL_PCI_P2PDMA. The zero page is not pinned, and no error. Kernel: try_grab_folio().
    """
    cdef uint64_t pfn
    cdef Memory mem = folio_arg(folio, &pfn, False)
    cdef unsigned bits = <unsigned>count_arg(flags, "flags", 0, 0xffffffff)
    cdef uint64_t nr = count_arg(refs, "refs", 1, 0x7fffffff)
    cdef int error
    if bits & FOLL_GET and bits & FOLL_PIN:
        raise InvalidArgument("FOLL_GET and FOLL_PIN exclude each other")
    error = grab_folio(&mem.m, pfn, nr, bits)
    if error:
        raise grab_error(mem, error, pfn)


def folio_add_pins(folio, n):
    """Pin a folio that is pinned already n times more. Raises BadPage when it is not pinned, MMError(ENOMEM) on overflow."""
    cdef uint64_t pfn
    cdef Memory mem = folio_arg(folio, &pfn, False)
    cdef uint64_t nr = count_arg(n, "pins", 1, 0x7fffffff)
    cdef page_t *head = &mem.m.map[pfn]
    cdef int error
    if pfn == mem.m.zero_pfn:
        return
    if (pincount_load(head) == 0) if page_is_head(head) else (refs_load(head) < GUP_PIN_COUNTING_BIAS):
        raise BadPage("add pins to what is pinned", f"folio_add_pin(s) on the folio at PFN {pfn:#x}, which is not pinned: "
                      "take the first pin with pin_user_pages* or try_grab_folio(). Nothing was changed", pfn=pfn)
    error = grab_folio(&mem.m, pfn, nr, FOLL_PIN)
    if error:
        raise grab_error(mem, error, pfn)


def folio_add_pin(folio):
    """Pin a folio that is pinned already once more. Unlike the kernel's, it counts in nr_foll_pin_acquired."""
    folio_add_pins(folio, 1)


# ---- the lock -----------------------------------------------------------------------------------------------------------------------------
def folio_lock(folio):
    """Take the folio lock; sleeps while another holds it. The caller holds a reference.

    A signal handler that raises ends the wait. A thread that locks twice waits for itself, as in the kernel.
    """
    cdef uint64_t pfn
    cdef Memory mem = folio_arg(folio, &pfn, True)
    cdef int error
    if trylock(&mem.m.map[pfn]):
        stat_add(&mem.m, OP_FOLIO_LOCKS, 1)
        return
    mem.enter()
    with nogil:
        error = lock_wait(&mem.m, pfn)
    mem.leave()
    if error:
        raise_pending()


def folio_trylock(folio):
    """Take the folio lock unless it is held; tells whether it did."""
    cdef uint64_t pfn
    cdef Memory mem = folio_arg(folio, &pfn, True)
    stat_add(&mem.m, OP_FOLIO_LOCKS, 1)
    return bool(trylock(&mem.m.map[pfn]))


def folio_unlock(folio):
    """Drop the folio lock and wake who waits for it. Raises BadPage when it is not held."""
    cdef uint64_t pfn
    cdef Memory mem = folio_arg(folio, &pfn, False)
    if not test_flag(&mem.m.map[pfn], PG_locked):
        raise BadPage("unlock of an unlocked folio", f"folio_unlock() on PFN {pfn:#x}, which is not locked", pfn=pfn)
    unlock(&mem.m, pfn)


# ---- dirty and writeback ----------------------------------------------------------------------------------------------------------------------
cdef int dirtyable(Memory mem, uint64_t pfn, str call) except -1:
    if pfn == mem.m.zero_pfn:
        raise BadPage("the zero page stays clean", f"{call} on the zero page (PFN {pfn:#x}): it is shared by all and never "
                      "written. Nothing was changed", pfn=pfn)
    return 0


def folio_test_dirty(folio):
    """Tell whether PG_dirty is set."""
    cdef uint64_t pfn
    cdef Memory mem = folio_arg(folio, &pfn, False)
    return bool(test_flag(&mem.m.map[pfn], PG_dirty))


def folio_mark_dirty(folio):
    """Set PG_dirty; True when it was clean. Counts in nr_dirty unless the folio is anonymous.

    The caller holds the folio lock where the folio may be truncated. Raises BadPage for the zero page and a free folio.
    """
    cdef uint64_t pfn
    cdef Memory mem = folio_arg(folio, &pfn, True)
    dirtyable(mem, pfn, "folio_mark_dirty()")
    return bool(mark_dirty(&mem.m, pfn))


def folio_mark_dirty_lock(folio):
    """Set PG_dirty under the folio lock, which it takes; True when it was clean. Raises as folio_mark_dirty."""
    cdef uint64_t pfn
    cdef Memory mem = folio_arg(folio, &pfn, True)
    dirtyable(mem, pfn, "folio_mark_dirty_lock()")
    folio_lock(folio)
    cdef bint newly = mark_dirty(&mem.m, pfn)
    unlock(&mem.m, pfn)
    return bool(newly)


def set_page_dirty(page):
    """Set PG_dirty of the page's folio; True when it was clean. Raises as folio_mark_dirty."""
    return folio_mark_dirty(page_folio(page))


def set_page_dirty_lock(page):
    """Set PG_dirty of the page's folio under its lock; True when it was clean. Raises as folio_mark_dirty."""
    return folio_mark_dirty_lock(page_folio(page))


def folio_clear_dirty_for_io(folio):
    """Clear PG_dirty before writeback; True when it was set. With debug=True the lock must be held (else BadPage)."""
    cdef uint64_t pfn
    cdef Memory mem = folio_arg(folio, &pfn, True)
    debug_locked(mem, pfn, "folio_clear_dirty_for_io()")
    return bool(clear_dirty(&mem.m, pfn))

cdef int debug_locked(Memory mem, uint64_t pfn, str call) except -1:
    if mem.m.debug and not test_flag(&mem.m.map[pfn], PG_locked):
        raise BadPage("folio lock held", f"{call} on PFN {pfn:#x} without the folio lock (debug=True)", pfn=pfn)
    return 0


def folio_start_writeback(folio):
    """Set PG_writeback. Raises BadPage when it is set already; with debug=True also without the folio lock."""
    cdef uint64_t pfn
    cdef Memory mem = folio_arg(folio, &pfn, True)
    cdef page_t *head = &mem.m.map[pfn]
    debug_locked(mem, pfn, "folio_start_writeback()")
    dirtyable(mem, pfn, "folio_start_writeback()")
    if (a64_fetch_or_acq_rel(&head.flags, ONE << PG_writeback) >> PG_writeback) & 1:
        raise BadPage("one writeback at a time", f"folio_start_writeback() on PFN {pfn:#x}, which is under writeback", pfn=pfn)
    stat_add(&mem.m, NR_WRITEBACK, ONE << folio_order_of(head))


def folio_end_writeback(folio):
    """Clear PG_writeback. Raises BadPage when it is not set."""
    cdef uint64_t pfn
    cdef Memory mem = folio_arg(folio, &pfn, True)
    cdef page_t *head = &mem.m.map[pfn]
    cdef int64_t nr = ONE << folio_order_of(head)
    if not (a64_fetch_and_acq_rel(&head.flags, ~(ONE << PG_writeback)) >> PG_writeback) & 1:
        raise BadPage("end of a writeback that runs", f"folio_end_writeback() on PFN {pfn:#x}, which is not under writeback",
                      pfn=pfn)
    stat_add(&mem.m, NR_WRITEBACK, -nr)
    stat_add(&mem.m, NR_WRITTEN, nr)


# ---- split, poison ----------------------------------------------------------------------------------------------------------------------------------
def folio_split(folio, new_order=0):
    """Split a folio into folios of new_order; returns them, one reference of the caller's on each.

    Dirty and the other flags are inherited. Raises MMError: EAGAIN when anybody else holds a reference or a pin, EBUSY
    for hugetlb, the huge zero folio, device memory, mapped folios and folios under writeback, EINVAL when new_order is
    not smaller. The lock, when it is held, stays on the first. Kernel counterpart: split_folio_to_order().
    """
    cdef uint64_t pfn
    cdef Memory mem = folio_arg(folio, &pfn, True)
    cdef unsigned order = folio_order_of(&mem.m.map[pfn])
    cdef unsigned wanted = <unsigned>count_arg(new_order, "new_order", 0, MAX_FOLIO_ORDER)
    cdef int error
    mem.enter()
    with nogil:
        error = split(&mem.m, pfn, wanted)
    mem.leave()
    if error == -EINVAL:
        raise InvalidArgument(f"a folio of order {order} cannot be split to order {wanted}: it must get smaller", pfn=pfn)
    if error == -EBUSY:
        raise MMError(_errno.EBUSY, f"the folio at PFN {pfn:#x} cannot be split: it is hugetlb, the huge zero folio, device "
                                    "memory, mapped, or under writeback", pfn=pfn)
    if error == -EAGAIN:
        raise MMError(_errno.EAGAIN, f"the folio at PFN {pfn:#x} has {<int32_t>refs_load(&mem.m.map[pfn])} references "
                                     f"(pincount {<int32_t>pincount_load(&mem.m.map[pfn])}) and {expected_refs(&mem.m, pfn) + 1} "
                                     "are expected: somebody else holds or pins it; release that first", pfn=pfn)
    return [folio_handle(mem, at) for at in range(pfn, pfn + (ONE << order), ONE << wanted)]


def zone_device_page_init(page):
    """Take the first reference on an idle device folio, as its driver does. Raises BadPage when it is not idle.

    For fsdax, coherent, private and P2PDMA memory, which starts at 0; generic memory holds its own reference.
    """
    cdef uint64_t pfn
    cdef Memory mem = folio_arg(page, &pfn, False)
    cdef uint32_t zero = 0
    if device_of(&mem.m, pfn) == NULL:
        raise InvalidArgument(f"PFN {pfn:#x} is no device memory", pfn=pfn)
    if not a32_cas_acq_rel(&mem.m.map[pfn]._refcount, &zero, 1):
        raise BadPage("idle device folio", f"zone_device_page_init() on PFN {pfn:#x} with refcount {<int32_t>zero}: it is in "
                      "use. Nothing was changed", pfn=pfn)


def memory_failure(Memory mem not None, page):
    """Mark a page as broken; see Memory.memory_failure."""
    cdef mem_t *m = mem.ptr()
    cdef uint64_t pfn, head
    cdef region_t *r
    if page_arg(page, &pfn) is not mem:
        raise InvalidArgument("the page belongs to another Memory", pfn=pfn)
    r = region_of(m, pfn)
    head = compound_head_pfn(m.map, pfn)
    if test_flag(&m.map[pfn], PG_reserved) or head == m.huge_zero_pfn:
        raise MMError(_errno.EBUSY, f"PFN {pfn:#x} is the zero page, the huge zero folio or reserved: it cannot be taken "
                                    "out of use", pfn=pfn)
    if test_flag(&m.map[pfn], PG_hwpoison):
        raise MMError(getattr(_errno, "EHWPOISON", 133), f"PFN {pfn:#x} was marked as broken before", pfn=pfn)
    if test_flag(&m.map[head], PG_mm_pool):
        # A hugetlb folio that waits in its pool is broken up: all but the broken page become ordinary memory.
        dissolve_pooled(m, head, pfn)
    elif r != NULL:
        # A free page leaves the allocator, so that nobody gets it.
        pthread_mutex_lock(&r.lock)
        if region_is_free(m, r, pfn):
            region_take_at(m, r, pfn, 0)
            page_init(&m.map[pfn], r.zone_flags, 0)
        pthread_mutex_unlock(&r.lock)
    set_flag(&m.map[pfn], PG_hwpoison)
    head = compound_head_pfn(m.map, pfn)
    if page_is_head(&m.map[head]):
        a64_fetch_or_relaxed(&as_folio(&m.map[head])._flags_1, ONE << PG_has_hwpoisoned)
    stat_add(m, NR_POISONED, 1)


# ---- bytes ----------------------------------------------------------------------------------------------------------------------------------------------
cdef class PageBytes:
    """The bytes of one page or folio, writable through the buffer protocol; keeps the Memory open."""
    cdef Memory mem
    cdef uint8_t *at
    cdef Py_ssize_t size

    def __getbuffer__(self, Py_buffer *view, int flags):
        self.mem.ptr()
        PyBuffer_FillInfo(view, self, self.at, self.size, 0, flags)
        self.mem.views += 1

    def __releasebuffer__(self, Py_buffer *view):
        self.mem.views -= 1

cdef object bytes_of(Memory mem, uint64_t pfn, uint64_t nr):
    cdef PageBytes view = PageBytes.__new__(PageBytes)
    cdef uint64_t i
    view.mem = mem
    for i in range(nr):
        view.at = page_bytes(&mem.m, pfn + i)
    view.at = mem.m.bytes + (pfn << mem.m.page_shift)
    view.size = nr << mem.m.page_shift
    return memoryview(view)


def page_address(page):
    """Return a writable memoryview of the page's bytes; zeros when nobody wrote them since it was allocated.

    The view keeps the Memory from closing, but takes no reference on the page. Raises BadPage for a free page.
    """
    cdef uint64_t pfn
    cdef Memory mem = page_arg(page, &pfn)
    cdef uint64_t head = compound_head_pfn(mem.m.map, pfn)
    if refs_load(&mem.m.map[head]) == 0:
        raise bad_page(mem, BAD_FREE, pfn, 0, "page_address()")
    view = bytes_of(mem, pfn, 1)
    return view.toreadonly() if head in (mem.m.zero_pfn, mem.m.huge_zero_pfn) else view


def folio_address(folio):
    """Return a writable memoryview of all bytes of a folio; as page_address."""
    cdef uint64_t pfn
    cdef Memory mem = folio_arg(folio, &pfn, True)
    view = bytes_of(mem, pfn, ONE << folio_order_of(&mem.m.map[pfn]))
    return view.toreadonly() if pfn in (mem.m.zero_pfn, mem.m.huge_zero_pfn) else view
