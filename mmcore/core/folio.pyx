# cython: nonecheck=True
"""References, pins and splitting, under the kernel's names; and what the modules above share: arguments, errors.

Units: refs, pins, counts: int, C int in struct page; a pin of a small folio is 1024 on it.
Raises: TypeError for what is no handle, InvalidArgument for a tail, a closed Memory, a count out of range; BadPage
    when a law would break, with nothing changed.
Threads: any number at once: compare-and-swap, acquire on taking, release on dropping.
Kernel: the functions of these names in mm.h, gup.c and huge_memory.c.
"""
from libc.errno cimport EAGAIN, EBUSY, EINVAL, ENOMEM, EREMOTEIO
from mmcore.core.hook cimport pin_tell, pin_watchers
from mmcore.core.buddy cimport region_is_free

import enum
import errno as _errno

from .errors import BadPage, InvalidArgument, MMError

__all__ = [
    "FOLL", "GUP_PIN_COUNTING_BIAS", "folio_get", "folio_put", "folio_put_refs", "folio_try_get", "folio_ref_freeze",
    "folio_ref_unfreeze", "get_page", "put_page", "try_grab_folio", "folio_add_pin", "folio_add_pins", "folio_split",
    "zone_device_page_init",
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
cdef int put_wrong(const page_t *head, uint32_t old, uint32_t refs) noexcept nogil:
    """Decide about a put that looks wrong: 0 when it is right after all, else a BAD_* code."""
    cdef int i
    if old < refs:
        return BAD_FREE if old == 0 else BAD_UNDERFLOW
    if not page_is_head(head):
        return 0 if test_flag(head, PG_mm_many_refs) else BAD_EATS_PIN
    # Pins and references are two words; others may move both while we look. The law holds at every moment, so one look
    # that finds room for this put settles the matter; where there is none, no look finds it.
    for i in range(64):  # no-cython-lint
        old = refs_load(head)
        if old >= refs and old - refs >= pincount_load(head):
            return 0
        cpu_relax()
    return BAD_EATS_PIN

cdef int put_last_wrong(mem_t *m, const page_t *head) noexcept nogil:
    """Why a folio may not lose its last reference; 0 when it may."""
    cdef uint64_t flags = a64_load_acquire(&head.flags)
    cdef uint64_t stop = (ONE << PG_locked) | (ONE << PG_writeback) | (ONE << PG_reserved)
    if mm_unlikely((flags & stop) != 0):
        if (flags >> PG_locked) & 1:
            return BAD_LOCKED
        return BAD_WRITEBACK if (flags >> PG_writeback) & 1 else BAD_RESERVED
    if mm_unlikely(folio_mapcount_of(head) > 0):
        return BAD_MAPPED
    if mm_unlikely((flags >> PG_head) & 1 and pincount_load(head) != 0):
        return BAD_EATS_PIN
    if mm_unlikely(<uint64_t>(head - m.map) == m.huge_zero_pfn or page_type_is(head, PGTY_table)):
        return BAD_RESERVED
    return 0

cdef int put_last(mem_t *m, page_t *head, uint32_t old) noexcept nogil:
    """Drop the last references, all `old` of them: FREED; NOT_FREED when the count moved meanwhile: look again; or a BAD_* code.

    Why they may have to stay is looked at with the count frozen at 0. Otherwise somebody could take a reference, a pin or the
    lock, drop it again, and be taken for a reason: the count is what it was, and yet the look was at two states.
    """
    cdef int bad
    cdef uint32_t expected = old
    if mm_planted(3):       # the look of before this was frozen
        return BAD_EATS_PIN if a32_load_acquire(&head._refcount) == old else NOT_FREED
    if not a32_cas_acq_rel(&head._refcount, &expected, 0):
        return NOT_FREED
    bad = put_last_wrong(m, head)
    if bad:
        a32_store_release(&head._refcount, old)
        return bad
    return FREED

# ---- taking references --------------------------------------------------------------------------------------------------
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
        refs += nr if a64_load_relaxed(&head.mapping) else 0
        refs += test_flag(head, PG_private)
    return refs + folio_mapcount_of(head)

cdef int split(mem_t *m, uint64_t pfn, unsigned new_order) noexcept nogil:
    """Split a folio that is not mapped into folios of new_order, one reference of the caller's on each.

    The count is frozen at 0 meanwhile, so that nobody can take a reference through a page whose head is changing.
    """
    cdef page_t *head = &m.map[pfn]
    cdef unsigned order = folio_order_of(head)
    cdef uint32_t expected, share
    cdef uint64_t i, own, keep, zone, inherited, mapping, index, at, step = ONE << new_order
    if order == 0 or new_order >= order:
        return -EINVAL
    if folio_is_hugetlb(head) or pfn == m.huge_zero_pfn or page_zone(head) == ZONE_DEVICE \
            or test_flag(head, PG_writeback) or test_flag(head, PG_private):
        return -EBUSY
    if folio_mapcount_of(head) > 0:
        return -EBUSY
    expected = <uint32_t>expected_refs(m, pfn) + 1
    if pincount_load(head) != 0 or not a32_cas_acq_rel(&head._refcount, &expected, 0):
        return -EAGAIN
    if folio_order_of(head) != order or folio_is_hugetlb(head) or test_flag(head, PG_writeback):
        # Somebody else split it, or it was freed and used again, before the freeze made it ours.
        a32_store_release(&head._refcount, expected)
        return -EAGAIN
    keep = (ONE << PG_mm_written) | (ONE << PG_hwpoison) | (ONE << PG_owner_2)
    own = a64_load_relaxed(&head.flags)
    zone = own & ~((ONE << ZONE_SHIFT) - 1)
    inherited = own & ((ONE << PG_dirty) | (ONE << PG_referenced) | (ONE << PG_uptodate) | (ONE << PG_active)
                              | (ONE << PG_workingset) | (ONE << PG_swapbacked) | (ONE << PG_unevictable)
                              | (ONE << PG_dropbehind) | (ONE << PG_mlocked))
    mapping = a64_load_relaxed(&head.mapping)
    index = a64_load_relaxed(&head.index)
    i = pfn + (ONE << order)
    while i > pfn:
        # From the end: the head, where the lock and the frozen count are, comes last. A waiter's mark that is lost in
        # this plain store costs that waiter one time-out.
        i -= step
        split_piece(m, i, new_order, zone, inherited, keep, mapping, index + (i - pfn) if mapping else 0,
                    (ONE << PG_locked) | (ONE << PG_waiters) if i == pfn else 0)
    # A cache holds a reference on each page, and the caller gets one on each piece.
    share = 1 + ((expected - 1) >> (order - new_order))
    for at in range(1, ONE << (order - new_order)):
        a32_store_release(&m.map[pfn + at * step]._refcount, share)
    a32_store_release(&head._refcount, share)
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
    a64_store_relaxed(&head.mapping, mapping)
    a64_store_relaxed(&head.index, index)
    if order:
        prep_folio_words(head, order)
        if poisoned:
            a64_fetch_or_relaxed(&as_folio(head)._flags_1, ONE << PG_has_hwpoisoned)

# ---- arguments and errors -------------------------------------------------------------------------------------------------------
# Numbers are converted first, handles looked at last: __index__() of a caller's own may run anything, and close the Memory.
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
    cdef page_t *head = &mem.m.map[pfn]
    if not ref_add_unless_zero(head, 1):
        return False
    note_plain_refs(head, refs_load(head) - 1, 1)
    return True

cdef object drop(Memory mem, uint64_t pfn, uint64_t refs, str call):
    cdef page_t *head = &mem.m.map[pfn]
    cdef int result = put_refs(&mem.m, head, page_is_head(head), <uint32_t>refs)
    if result == FREED:
        free_folio(&mem.m, pfn, folio_order_of(head))
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
    cdef uint64_t nr = count_arg(refs, "refs", 0, 0x7fffffff)
    cdef Memory mem = folio_arg(folio, &pfn, False)
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
    cdef uint32_t expected = <uint32_t>count_arg(count, "count", 1, 0x7fffffff)
    cdef Memory mem = folio_arg(folio, &pfn, False)
    return bool(a32_cas_acq_rel(&mem.m.map[pfn]._refcount, &expected, 0))


def folio_ref_unfreeze(folio, count):
    """Give a frozen folio its count back. Raises BadPage when it is not frozen."""
    cdef uint64_t pfn
    cdef uint64_t refs = count_arg(count, "count", 1, 0x7fffffff)
    cdef Memory mem = folio_arg(folio, &pfn, False)
    cdef page_t *head = &mem.m.map[pfn]
    cdef region_t *r = region_of(&mem.m, pfn)
    cdef uint32_t zero = 0
    cdef bint free = test_flag(head, PG_mm_pool) or test_flag(head, PG_mm_retired)
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
    cdef unsigned bits = <unsigned>count_arg(flags, "flags", 0, 0xffffffff)
    cdef uint64_t nr = count_arg(refs, "refs", 1, 0x7fffffff)
    cdef Memory mem = folio_arg(folio, &pfn, False)
    cdef int error
    if bits & FOLL_GET and bits & FOLL_PIN:
        raise InvalidArgument("FOLL_GET and FOLL_PIN exclude each other")
    error = grab_folio(&mem.m, pfn, nr, bits)
    if error:
        raise grab_error(mem, error, pfn)
    if mm_unlikely(pin_watchers) and bits & FOLL_PIN and pfn != mem.m.zero_pfn:
        pin_tell(mem, pfn, nr, 1)


def folio_add_pins(folio, n):
    """Pin a folio that is pinned already n times more. Raises BadPage when it is not pinned, MMError(ENOMEM) on overflow."""
    cdef uint64_t pfn
    cdef uint64_t nr = count_arg(n, "pins", 1, 0x7fffffff)
    cdef Memory mem = folio_arg(folio, &pfn, False)
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
    if mm_unlikely(pin_watchers):
        pin_tell(mem, pfn, nr, 1)


def folio_add_pin(folio):
    """Pin a folio that is pinned already once more. Unlike the kernel's, it counts in nr_foll_pin_acquired."""
    folio_add_pins(folio, 1)


# ---- split --------------------------------------------------------------------------------------------------------------------
def folio_split(folio, new_order=0):
    """Split a folio into folios of new_order; returns them, one reference of the caller's on each.

    Dirty and the other flags are inherited. Raises MMError: EAGAIN when anybody else holds a reference or a pin, EBUSY
    for hugetlb, the huge zero folio, device memory and folios under writeback, ENOMEM when a leaf that maps it must be
    split and there is no frame for its table, EINVAL when new_order is not smaller. Page tables that map it map the pieces
    after; what was exclusive stays so. The lock, when it is held, stays on the first. Kernel counterpart: split_folio_to_order().
    """
    cdef uint64_t pfn
    cdef unsigned wanted = <unsigned>count_arg(new_order, "new_order", 0, MAX_FOLIO_ORDER)
    cdef Memory mem = folio_arg(folio, &pfn, True)
    cdef unsigned order = folio_order_of(&mem.m.map[pfn])
    cdef int error
    mem.enter()
    with nogil:
        if wanted < order and mem.m.split_mapped != NULL and folio_mapcount_of(&mem.m.map[pfn]) > 0:
            error = mem.m.split_mapped(&mem.m, pfn, wanted)
        else:
            error = split(&mem.m, pfn, wanted)
    mem.leave()
    if error == -EINVAL:
        raise InvalidArgument(f"a folio of order {order} cannot be split to order {wanted}: it must get smaller", pfn=pfn)
    if error == -EBUSY:
        raise MMError(_errno.EBUSY, f"the folio at PFN {pfn:#x} cannot be split: it is hugetlb, the huge zero folio, device "
                                    "memory, truncated and still mapped, or under writeback", pfn=pfn)
    if error == -ENOMEM:
        raise MMError(_errno.ENOMEM, f"no frame for the page table that splitting a leaf on the folio at PFN {pfn:#x} takes", pfn=pfn)
    if error == -EAGAIN:
        refs, wants = <int32_t>refs_load(&mem.m.map[pfn]), expected_refs(&mem.m, pfn) + 1
        why = "the caller holds none of its own: folio_get() first" if refs < wants else \
            "somebody else holds or pins it; release that first"
        raise MMError(_errno.EAGAIN, f"the folio at PFN {pfn:#x} has {refs} references (pincount "
                                     f"{<int32_t>pincount_load(&mem.m.map[pfn])}) and {wants} are expected: {why}", pfn=pfn)
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
