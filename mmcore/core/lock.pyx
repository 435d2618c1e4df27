"""The folio lock, dirty and writeback.

Units: booleans out of the tests and of what sets: whether it changed anything.
Raises: TypeError for what is no handle, InvalidArgument for a tail, BadPage for a free folio, or when a law would
    break.
Threads: any number at once; folio_lock() sleeps without the GIL, a signal ends it.
Kernel: the functions of these names in filemap.c and page-writeback.c.
"""
from cpython.exc cimport PyErr_Occurred
from libc.errno cimport EINTR
from mmcore.core.folio cimport *

from .errors import BadPage
from .look import page_folio

__all__ = [
    "folio_lock", "folio_trylock", "folio_unlock", "folio_test_dirty", "folio_mark_dirty", "folio_mark_dirty_lock",
    "set_page_dirty", "set_page_dirty_lock", "folio_clear_dirty_for_io", "folio_start_writeback", "folio_end_writeback",
]

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
    for i in range(100):  # no-cython-lint
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


# ---- the lock ------------------------------------------------------------------------------------------------------
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


# ---- dirty and writeback ----------------------------------------------------------------------------------------------------
cdef int dirtyable(Memory mem, uint64_t pfn, str call) except -1:
    if pfn == mem.m.zero_pfn:
        raise BadPage("the zero page stays clean", f"{call} on the zero page (PFN {pfn:#x}): it is shared by all and never "
                      "written. Nothing was changed", pfn=pfn)
    if page_type_is(&mem.m.map[pfn], PGTY_table):
        raise BadPage("page tables are the engine's", f"{call} on a page table (PFN {pfn:#x}): it has neither a file nor swap behind "
                      "it. Nothing was changed", pfn=pfn)
    return 0


def folio_test_dirty(folio):
    """Tell whether PG_dirty is set."""
    cdef uint64_t pfn
    cdef Memory mem = folio_arg(folio, &pfn, False)
    return bool(test_flag(&mem.m.map[pfn], PG_dirty))


def folio_mark_dirty(folio):
    """Set PG_dirty; True when it was clean. Counts in nr_dirty unless the folio is anonymous.

    The caller holds the folio lock where the folio may be truncated. Raises BadPage for the zero page, a page table and a free
    folio.
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
