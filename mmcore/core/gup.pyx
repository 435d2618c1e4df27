"""get_user_pages* and pin_user_pages*.

Units: start: address in bytes; nr_pages: base pages; gup_flags: FOLL_* bits, unsigned int.
Raises: TypeError, InvalidArgument, MMError with .errno and .addr.
Threads: any number at once on one MM, without the GIL; the fast walk takes no lock, the slow one mmap_lock for
    reading.
Kernel: the functions of these names in gup.c.
"""
from libc.errno cimport EAGAIN, EBUSY, EFAULT, EINTR, ENOMEM, EOVERFLOW
from libc.stdlib cimport free
from libc.string cimport memset
from mmcore.core.gup_args cimport flags_arg, gup_error, wrapper_t
from mmcore.core.gup_fast cimport gup_fast
from mmcore.core.gup_slow cimport gup_slow
from mmcore.core.gup_walk cimport *
from mmcore.core.hook cimport pin_watchers, pins_begin, pins_t, pins_tell
from mmcore.core.lock cimport raise_pending
from mmcore.core.migrate cimport check_and_migrate
from mmcore.core.mm cimport MM
from mmcore.core.output cimport GupOutput, gup_output_t, leaf_count, output_arg, release_leaves
from mmcore.core.pagelist cimport PageList, PageRanges
from mmcore.core.pgtable cimport task_size
from mmcore.core.space cimport *
from mmcore.core.walk cimport list_pins, range_pins

from .errors import InvalidArgument, MMError

__all__ = [
    "get_user_pages", "get_user_pages_fast", "get_user_pages_fast_only", "get_user_pages_remote", "get_user_pages_unlocked",
    "pin_user_pages", "pin_user_pages_fast", "pin_user_pages_remote", "pin_user_pages_unlocked",
]

cdef enum:
    MAX_ROUNDS = 100            # migrations of one range before we believe that somebody moves it back

# ---- one call -----------------------------------------------------------------------------------------------------------
cdef bint hand_on(gup_t *w, gup_output_t *out) noexcept nogil:
    """Give the leaves to the sink; what it refuses is released. False: it refused."""
    cdef uint64_t i, taken = out.take(out, w.leaf, w.nr_leaves)
    for i in range(taken):
        out.nr_pages += leaf_count(w.leaf[i])
    if mm_unlikely(taken < w.nr_leaves):
        release_leaves(w.m, w.leaf + taken, w.nr_leaves - taken, (w.flags & FOLL_PIN) != 0)
        w.error = out.error if out.error else -ENOMEM
        w.why = WHY_OUTPUT
        w.addr = w.start + (out.nr_pages << w.m.page_shift)
    w.nr_leaves = 0
    w.next_pfn = 0
    return w.error == 0

cdef bint fast_part(gup_t *w, gup_output_t *out) noexcept nogil:
    """Chunk by chunk, until the fast walk stops at something. False: the sink refused."""
    cdef uint64_t chunk[GUP_CHUNK]
    cdef bint full = True, taken = True
    w.leaf = chunk
    w.room = GUP_CHUNK
    while full and taken and w.addr < w.end:
        gup_fast(w)
        full = w.nr_leaves + 1 >= GUP_CHUNK     # a run needs a word to end in
        if w.nr_leaves:
            taken = hand_on(w, out)
    w.leaf = NULL
    w.room = 0
    return taken

cdef void slow_part(gup_t *w, gup_output_t *out) noexcept nogil:
    """__gup_longterm_locked: pin, check, migrate, and pin again, until all may stay."""
    cdef uint64_t start = w.addr
    cdef int result = 0, rounds
    w.growing = True
    pthread_rwlock_rdlock(&w.mm.mmap_lock)
    for rounds in range(MAX_ROUNDS + 1):
        w.addr = start
        w.nr_leaves = 0
        w.next_pfn = 0
        w.error = 0
        if w.mm.exited:
            w.error = -EFAULT
            w.why = WHY_NO_VMA
            break
        gup_slow(w)
        if w.error == -EINTR or w.nr_leaves == 0:
            break
        if not w.flags & FOLL_LONGTERM:
            break
        result = check_and_migrate(w.m, w.leaf, w.nr_leaves, w.page_by_page, &w.bad_pfn, &w.why)
        if result == 0:
            break
        w.nr_leaves = 0
        if result != -EAGAIN or rounds == MAX_ROUNDS:
            if result == -EAGAIN:
                w.why = WHY_MIGRATE
            w.error = result if result != -EAGAIN else -ENOMEM
            w.addr = start
            break
    pthread_rwlock_unlock(&w.mm.mmap_lock)
    if w.error == -EINTR:
        release_leaves(w.m, w.leaf, w.nr_leaves, (w.flags & FOLL_PIN) != 0)
        w.nr_leaves = 0
    elif w.nr_leaves:
        w.error = 0         # what was had stays; why it ended is not told
        hand_on(w, out)
    free(w.leaf)
    w.leaf = NULL
    w.growing = False

cdef int64_t gup_pages(gup_t *w, mm_t *mm, uint64_t start, uint64_t nr_pages, unsigned flags, bint fast, bint page_by_page,
                       gup_output_t *out) noexcept nogil:
    cdef unsigned shift = mm.m.page_shift
    memset(w, 0, sizeof(gup_t))
    w.m = mm.m
    w.mm = mm
    w.flags = flags
    w.page_by_page = page_by_page
    w.seen_mapping = ~<uint64_t>0
    if nr_pages == 0:
        return 0
    if flags & FOLL_PIN and not a64_load_relaxed(&mm.flags) & MMF_HAS_PINNED:
        a64_fetch_or_acq_rel(&mm.flags, MMF_HAS_PINNED)
    w.addr = w.start = start & ~((ONE << shift) - 1)
    w.end = w.addr + (nr_pages << shift)
    if mm_unlikely(nr_pages >> (64 - shift) or w.end < w.addr):
        w.error, w.why = -EOVERFLOW, WHY_OVERFLOW
        if fast:
            return w.error
        # The slow walk comes to the end of the last mapping first.
        w.error, w.why = 0, WHY_NOTHING
        w.end = max(task_size(&mm.pgd), w.addr + 1)
    if fast:
        if mm_unlikely(w.end > task_size(&mm.pgd)):
            w.error, w.why = -EFAULT, WHY_TASK_SIZE
            return w.error
        if not fast_part(w, out) or w.addr == w.end or flags & FOLL_FAST_ONLY:
            return <int64_t>out.nr_pages if out.nr_pages or w.error == 0 else w.error
        w.flags |= FOLL_TOUCH | FOLL_UNLOCKABLE
    if not flags & FOLL_PIN:
        w.flags |= FOLL_GET
    slow_part(w, out)
    if w.error == -EINTR:
        return w.error
    return <int64_t>out.nr_pages if out.nr_pages or w.error == 0 else w.error

# ---- the face -----------------------------------------------------------------------------------------------------------
cdef str LEAF = "leaf"

cdef bint by_page_arg(object acquire) except -1:
    if mm_likely(acquire is LEAF) or acquire == "leaf":
        return False
    if acquire == "page":
        return True
    raise InvalidArgument(f"acquire={acquire!r} is none of 'leaf', 'page'")

cdef object gup(const wrapper_t *wrapper, MM mm, object start, object nr_pages, object gup_flags, object acquire, object output):
    cdef uint64_t addr = count_arg(start, "start", 0, ~<uint64_t>0)
    cdef uint64_t nr = count_arg(nr_pages, "nr_pages", 0, ~<uint64_t>0), most
    cdef unsigned flags = flags_arg(wrapper, gup_flags)
    cdef bint by_page = by_page_arg(acquire), pins = (flags & FOLL_PIN) != 0
    cdef GupOutput sink = output_arg(output)
    cdef mm_t *p = mm.ptr()
    cdef gup_output_t *out
    cdef gup_t w
    cdef int64_t result
    most = task_size(&p.pgd) >> p.m.page_shift
    if a64_fetch_or_acquire(&sink.in_use, 1):
        raise MMError(EBUSY, f"{wrapper.name.decode()}(): another call has this {type(sink).__name__} as its output, and is not over: "
                             "make one for each")
    try:
        # The Memory stays open until the sink is done: its methods may be Python code, and what they refuse goes back.
        mm.enter()
        try:
            out = sink.begin(mm.mem, min(nr, most))
            with nogil:
                result = gup_pages(&w, p, addr, nr, flags, wrapper.fast, by_page, out)
            if mm_unlikely(result == -EINTR):
                sink.give_back(&mm.mem.m, pins)
                raise_pending()
            if mm_unlikely(result < 0):
                raise gup_error(mm, &w, wrapper.name.decode())
            taken = sink.finish(mm.mem, pins)
            if mm_unlikely(pin_watchers) and pins:
                tell_watchers(mm.mem, taken)
            return taken
        finally:
            mm.leave()
    finally:
        a64_store_release(&sink.in_use, 0)

cdef object tell_watchers(Memory mem, object taken):
    """Name the folios that were pinned; outputs that are no lists tell themselves."""
    cdef mem_t *m = &mem.m
    cdef uint64_t i
    cdef pins_t pins
    cdef PageList plist
    cdef PageRanges ranges
    pins_begin(&pins)
    if isinstance(taken, PageList):
        plist = taken
        list_pins(m, plist.p, plist.n, &pins)
    elif isinstance(taken, PageRanges):
        ranges = taken
        for i in range(ranges.starts.n):
            range_pins(m, ranges.starts.p[i], ranges.count[i], &pins)
    pins_tell(mem, &pins, 1)

cdef wrapper_t GET = wrapper_t("get_user_pages", FOLL_TOUCH, False)
cdef wrapper_t GET_REMOTE = wrapper_t("get_user_pages_remote", FOLL_TOUCH | FOLL_REMOTE, False)
cdef wrapper_t GET_UNLOCKED = wrapper_t("get_user_pages_unlocked", FOLL_TOUCH | FOLL_UNLOCKABLE, False)
cdef wrapper_t GET_FAST = wrapper_t("get_user_pages_fast", FOLL_GET, True)
cdef wrapper_t GET_FAST_ONLY = wrapper_t("get_user_pages_fast_only", FOLL_GET | FOLL_FAST_ONLY, True)
cdef wrapper_t PIN = wrapper_t("pin_user_pages", FOLL_PIN, False)
cdef wrapper_t PIN_REMOTE = wrapper_t("pin_user_pages_remote", FOLL_PIN | FOLL_TOUCH | FOLL_REMOTE, False)
cdef wrapper_t PIN_UNLOCKED = wrapper_t("pin_user_pages_unlocked", FOLL_PIN | FOLL_TOUCH | FOLL_UNLOCKABLE, False)
cdef wrapper_t PIN_FAST = wrapper_t("pin_user_pages_fast", FOLL_PIN, True)


def get_user_pages(MM mm not None, start, nr_pages, gup_flags=0, *, acquire="leaf", output=PageList):
    """Take a reference on each of nr_pages user pages from the address `start` on; faults in what is missing.

    gup_flags: FOLL_WRITE, FORCE, ANON, DUMP, NOFAULT, NOWAIT, HWPOISON, SPLIT_PMD, PCI_P2PDMA, HONOR_NUMA_FAULT,
    INTERRUPTIBLE. acquire: "leaf" (one update a PMD or PUD leaf) or "page" (one a base page). output: PageList, PageRanges,
    SGAppendTable or a GupOutput, the class or an object; what it made is returned. An object of the first two must be empty.

    Fewer pages when an error came after some; MMError with the kernel's errno and .addr when there was none at all; none and
    no error for nr_pages 0, and with FOLL_NOWAIT. Raises InvalidArgument for flags that do not go together, where the
    kernel returns -EINVAL. Release with put_page() or release_pages(). Kernel: get_user_pages(), mmap_lock taken here.
    """
    return gup(&GET, mm, start, nr_pages, gup_flags, acquire, output)


def get_user_pages_remote(MM mm not None, start, nr_pages, gup_flags=0, *, acquire="leaf", output=PageList):
    """Take references on pages of another process. As get_user_pages(). Kernel: get_user_pages_remote()."""
    return gup(&GET_REMOTE, mm, start, nr_pages, gup_flags, acquire, output)


def get_user_pages_unlocked(MM mm not None, start, nr_pages, gup_flags=0, *, acquire="leaf", output=PageList):
    """Take references on user pages, where the caller does not hold mmap_lock. As get_user_pages()."""
    return gup(&GET_UNLOCKED, mm, start, nr_pages, gup_flags, acquire, output)


def get_user_pages_fast(MM mm not None, start, nr_pages, gup_flags=0, *, acquire="leaf", output=PageList):
    """Take references on user pages without locks where they are mapped already; the rest as get_user_pages() does.

    gup_flags: FOLL_WRITE, FORCE, NOFAULT, PCI_P2PDMA, HONOR_NUMA_FAULT; others raise InvalidArgument. MMError(EOVERFLOW)
    when the range wraps, MMError(EFAULT) when it ends beyond the largest user address.
    """
    return gup(&GET_FAST, mm, start, nr_pages, gup_flags, acquire, output)


def get_user_pages_fast_only(MM mm not None, start, nr_pages, gup_flags=0, *, acquire="leaf", output=PageList):
    """Take references without locks and without faults; returns what there is up to the first page that needs either."""
    return gup(&GET_FAST_ONLY, mm, start, nr_pages, gup_flags, acquire, output)


def pin_user_pages(MM mm not None, start, nr_pages, gup_flags=0, *, acquire="leaf", output=PageList):
    """Pin each of nr_pages user pages from the address `start` on, for DMA; faults in what is missing.

    gup_flags as for get_user_pages(), and FOLL_LONGTERM: pages in Movable or CMA memory are moved out first, fsdax and
    shared files with writeback are refused. Release with the unpin_* functions. Raises as get_user_pages(); also for the
    arguments to which the kernel answers 0. Does not mark pages as accessed or dirty.
    """
    return gup(&PIN, mm, start, nr_pages, gup_flags, acquire, output)


def pin_user_pages_remote(MM mm not None, start, nr_pages, gup_flags=0, *, acquire="leaf", output=PageList):
    """Pin pages of another process. As pin_user_pages(), and marks them as accessed, and dirty for FOLL_WRITE."""
    return gup(&PIN_REMOTE, mm, start, nr_pages, gup_flags, acquire, output)


def pin_user_pages_unlocked(MM mm not None, start, nr_pages, gup_flags=0, *, acquire="leaf", output=PageList):
    """Pin user pages, where the caller does not hold mmap_lock. As pin_user_pages_remote()."""
    return gup(&PIN_UNLOCKED, mm, start, nr_pages, gup_flags, acquire, output)


def pin_user_pages_fast(MM mm not None, start, nr_pages, gup_flags=0, *, acquire="leaf", output=PageList):
    """Pin user pages without locks where they are mapped already; the rest as pin_user_pages_unlocked() does.

    gup_flags: FOLL_WRITE, LONGTERM, FORCE, NOFAULT, PCI_P2PDMA, HONOR_NUMA_FAULT. Raises as get_user_pages_fast().
    """
    return gup(&PIN_FAST, mm, start, nr_pages, gup_flags, acquire, output)
