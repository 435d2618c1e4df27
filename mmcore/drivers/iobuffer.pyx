# cython: nonecheck=True
"""Buffers that io_uring has registered: pinned once, one pin kept a folio where that says all, used by many requests.

Laws
    Pins        a buffer holds one pin a bvec: one a folio when it is coalesced, else one a page. The others go at once.
    Charge      a base page counts each time it is in a buffer. A large folio counts whole, once a table, from its first user
                to its last. (The kernel takes it back with the buffer that brought it, whoever else still uses it.)
    Failure     none of it stays; a release is all or nothing.

Runs of pages are kept, not pages: a bvec follows from them by arithmetic.

Units: addresses, lengths, offsets: bytes; pages: base pages.
Raises: TypeError, InvalidArgument.
Threads: any number at once; a lock a table and its clones.
Kernel: struct io_mapped_ubuf, io_check_coalesce_buffer().
"""
from libc.errno cimport EINTR, ENOMEM, EREMOTEIO
from libc.stdlib cimport free
from libc.string cimport memset
from mmcore.core.folio cimport bad_page, count_arg
from mmcore.core.gup cimport gup_pages
from mmcore.core.gup_args cimport gup_error
from mmcore.core.gup_walk cimport gup_t
from mmcore.core.hook cimport pin_watchers, pins_add, pins_begin, pins_t, pins_tell
from mmcore.core.lock cimport raise_pending
from mmcore.core.mm cimport MM
from mmcore.core.output cimport leaf_count, leaf_pfn, leaf_word, release_leaves
from mmcore.core.pagelist cimport PageList
from mmcore.core.space cimport mm_t
from mmcore.core.walk cimport *
from mmcore.drivers.ioruns cimport *

import errno as _errno
import threading
import weakref
from collections import namedtuple

from ..core.errors import InvalidArgument, MMError
from ..core.size import format_size
from ..ledger import holding

__all__ = ["RegisteredBuffer", "CoalesceData", "io_check_coalesce_buffer"]

BUFFER_MOST = 1 << 30           # bytes of one buffer

CoalesceData = namedtuple("CoalesceData", "nr_folios nr_pages_head nr_pages_mid folio_shift first_folio_page_idx")
CoalesceData.__doc__ = "What a coalescible buffer is made of. Kernel: struct io_imu_folio_data."

# ---- accounting -----------------------------------------------------------------------------------------------------------
_users = weakref.WeakKeyDictionary()    # Memory: {user: pages locked by io_uring}
_users_lock = threading.Lock()
# A clone shares buffers, and what they count for, with tables that have locks of their own. Order: a table's lock, this one,
# _users_lock.
_shared_lock = threading.Lock()

cdef class Charges:
    """What the buffers that one table registered count for; clones of them too."""
    cdef MM mm
    cdef uses_t uses
    cdef uint64_t nr_buffers
    cdef readonly uint64_t pages

    def __dealloc__(self):
        free(self.uses.head)
        free(self.uses.count)

    cdef int charge(self, uint64_t pages, uint64_t addr) except -1:
        cdef MM mm = self.mm
        with _users_lock:
            if not mm.cap_ipc_lock:
                users = _users.setdefault(mm.mem, {})
                now = users.get(mm.user, 0) + pages
                if mm.rlimit_memlock is not None and now > mm.rlimit_memlock >> mm.mem.m.page_shift:
                    raise MMError(_errno.ENOMEM, f"{pages} pages on top of {now - pages} that user {mm.user!r} has registered exceed "
                                                 f"RLIMIT_MEMLOCK ({mm.rlimit_memlock >> mm.mem.m.page_shift} pages): raise it (ulimit "
                                                 "-l), or register less. Large folios count whole", addr=addr)
                users[mm.user] = now
            self.pages += pages
        a64_fetch_add_relaxed(&mm.mm.pinned_vm, pages)
        return 0

    cdef void uncharge(self, uint64_t pages):
        cdef MM mm = self.mm
        with _users_lock:
            if not mm.cap_ipc_lock:
                users = _users[mm.mem]
                users[mm.user] -= pages
                if not users[mm.user]:
                    del users[mm.user]
            self.pages -= pages
        a64_fetch_add_relaxed(&mm.mm.pinned_vm, <uint64_t>-<int64_t>pages)

    cdef void end(self, uint64_t buffers, uint64_t pages):
        """So many buffers are gone, and with them so many pages."""
        self.uncharge(pages)
        self.nr_buffers -= buffers
        if self.nr_buffers == 0 and self.uses.size:
            memset(self.uses.head, 0, self.uses.size * sizeof(uint64_t))
            memset(self.uses.count, 0, self.uses.size * sizeof(uint64_t))
            self.uses.filled = 0


def user_locked_vm(mem, user="root"):
    """Return the pages that a user's tables have locked (user_struct.locked_vm); holders of CAP_IPC_LOCK are not counted."""
    with _users_lock:
        return _users.get(mem, {}).get(user, 0)

# ---- one buffer -----------------------------------------------------------------------------------------------------------
cdef class RegisteredBuffer:
    """Hold one registered buffer: .address, .length, .bvecs. Kernel: struct io_mapped_ubuf."""
    cdef buffer_t u
    cdef Charges charges
    cdef uint64_t refs                  # tables that it is in
    cdef readonly Memory mem
    cdef readonly uint64_t address
    cdef readonly uint64_t length       # bytes
    cdef readonly uint64_t offset       # of the first byte, in the first bvec's unit
    cdef readonly unsigned folio_shift  # log2 of the bytes of that unit: a folio, or a page
    cdef readonly uint64_t acct_pages   # charged when it was registered

    def __init__(self):
        raise TypeError("buffers are made by BufferTable.register() and update()")

    def __dealloc__(self):
        free(self.u.run)

    @property
    def coalesced(self):
        """True when it has a bvec a folio."""
        return bool(self.u.coalesced)

    @property
    def nr_bvecs(self):
        """Bvecs, and pins that it holds."""
        return self.u.nr_bvecs

    @property
    def refcount(self):
        """Tables that it is in."""
        return self.refs

    @property
    def bvecs(self):
        """List (PFN of the first page, offset, length): the heads of folios, or pages."""
        cdef uint64_t i, pfn, n, left = self.length, offset = self.offset, unit = ONE << self.folio_shift, length
        cdef group_t g
        out = []
        self.mem.ptr()
        for i in range(self.u.nr_runs):
            pfn, n = leaf_pfn(self.u.run[i]), leaf_count(self.u.run[i])
            while n:
                if self.u.coalesced:
                    next_in_range(self.mem.m.map, pfn, n, &g)
                else:
                    g.head, g.count = pfn, 1
                length = min(left, unit - offset)
                out.append((g.head, offset, length))
                left -= length
                offset = 0
                pfn += g.count
                n -= g.count
        return out

    def __repr__(self):
        return (f"<RegisteredBuffer {self.address:#x}+{self.length:#x}, {self.u.nr_bvecs} bvecs of up to "
                f"{format_size(1 << self.folio_shift)}>")

cdef object pin_user(MM mm, uint64_t addr, uint64_t nr, buffer_t *u):
    """io_pin_pages(): all of it, or raise with nothing pinned."""
    cdef runs_output_t out
    cdef gup_t w
    cdef int64_t got
    cdef mm_t *p = mm.enter()
    memset(&out, 0, sizeof(out))
    out.base.take = runs_take
    out.m = p.m
    out.u = u
    with nogil:
        got = gup_pages(&w, p, addr, nr, FOLL_PIN | FOLL_WRITE | FOLL_LONGTERM, True, False, &out.base)
        if got != <int64_t>nr:
            release_leaves(p.m, u.run, u.nr_runs, True)
    mm.leave()
    if got == <int64_t>nr:
        return
    if got == -EINTR:
        raise_pending()
    if got >= 0:
        if out.base.error == -ENOMEM:
            raise MMError(_errno.ENOMEM, f"no memory to note the pages of a buffer at {addr:#x}", addr=addr)
        raise MMError(_errno.EFAULT, f"only {got} of {nr} pages of the buffer at {addr:#x} can be pinned: the next one is not mapped, not "
                                     "writable, or of a kind that forbids long-term pins. Nothing stays pinned",
                      addr=addr + <uint64_t>got * mm.mem.page_size)
    raise gup_error(mm, &w, "io_pin_pages(): pin_user_pages_fast")

cdef object pin_list(PageList pages, buffer_t *u):
    """Pages known already, as of a captured buffer: all of them, or raise with nothing pinned."""
    cdef mem_t *m = pages.mem.enter()
    cdef uint64_t done = 0, i
    cdef int error
    with nogil:
        error = grab_list(m, pages.p, pages.n, FOLL_PIN, &done)
        for i in range(done):
            if error == 0 and not add_run(m, u, pages.p[i], 1):
                error = -ENOMEM
        if error:
            for i in range(done):
                put_one(m, pages.p[i])
    pages.mem.leave()
    if error:
        why = "it is PCI P2PDMA memory" if error == -EREMOTEIO else "it is free, or there is no memory to note it"
        raise MMError(-error, f"page {done} of the list cannot be pinned: {why}",
                      pfn=pages[int(min(done, pages.n - 1))].pfn)

cdef void put_one(mem_t *m, uint64_t pfn) noexcept nogil:
    cdef uint64_t word = leaf_word(pfn, 1)
    release_leaves(m, &word, 1, True)

def buffer_arg(MM mm not None, what):
    """Return (PageList or None, address, length): what a buffer of a table is to be, checked before anything changes."""
    cdef Memory mem = mm.mem
    cdef uint64_t page = ONE << mem.ptr().page_shift, addr, length
    cdef PageList known
    if isinstance(what, PageList):
        what = (what, 0, len(what) * int(page))
    try:
        parts = tuple(what)
    except TypeError:
        parts = ()
    if len(parts) == 2:
        return None, count_arg(parts[0], "address", 0, ~<uint64_t>0), count_arg(parts[1], "length", 0, ~<uint64_t>0)
    if len(parts) != 3 or not isinstance(parts[0], PageList):
        raise TypeError(f"a buffer is (address, length), a PageList or (PageList, offset, length), not {what!r}")
    known = parts[0]
    if known.mem is not mem:
        raise InvalidArgument("the pages belong to another Memory than the table")
    addr, length = count_arg(parts[1], "offset", 0, ~<uint64_t>0), count_arg(parts[2], "length", 1, 1 << 62)
    if addr >= page or (addr + length + page - 1) >> mem.m.page_shift != known.n or not known.pfns.all():
        raise InvalidArgument(f"{length} bytes at offset {addr} are not the {known.n} pages of the list, or one of these is NULL")
    return known, addr, length


def new_buffer(Charges charges not None, PageList known, uint64_t addr, uint64_t length):
    """Pin, coalesce and charge one buffer, as buffer_arg() gave it. None: an empty slot."""
    cdef RegisteredBuffer buf
    cdef MM mm = charges.mm
    cdef mem_t *m = mm.mem.ptr()
    cdef uint64_t page = ONE << m.page_shift, end, nr_folios = 0, folio_pages = 1, head_pages, first_idx = 0, visits = 0
    cdef int64_t pages = 0
    buf = RegisteredBuffer.__new__(RegisteredBuffer)
    if known is None and addr == 0:
        if length:
            raise MMError(_errno.EFAULT, f"a buffer of {length} bytes at address 0", addr=0)
        return None
    if length == 0 or length > BUFFER_MOST:
        raise MMError(_errno.EFAULT, f"a buffer of {length} bytes: 1 byte to {format_size(BUFFER_MOST)} can be registered", addr=addr)
    end = addr + length
    if end < addr or end + page - 1 < end:
        raise MMError(_errno.EOVERFLOW, f"a buffer of {length} bytes at {addr:#x} runs over the end of 64 bits", addr=addr)
    buf.mem, buf.address, buf.length, buf.charges = mm.mem, addr, length, charges
    buf.u.nr_pages = ((end + page - 1) >> m.page_shift) - (addr >> m.page_shift)
    if known is not None:
        pin_list(known, &buf.u)
    else:
        pin_user(mm, addr & ~(page - 1), buf.u.nr_pages, &buf.u)
    buf.u.nr_bvecs = buf.u.nr_pages
    with _shared_lock:
        mm.mem.enter()
        with nogil:
            buf.u.coalesced = buf.u.nr_pages > 1 and check_coalesce(m.map, &buf.u, &nr_folios, &folio_pages, &head_pages, &first_idx) \
                and folio_pages > 1
            if buf.u.coalesced:
                drop_surplus(m, &buf.u)
                buf.u.nr_bvecs = nr_folios
            # The kernel's descriptor.
            pages = -ENOMEM if inject_fails(m, INJECT_ALLOC) else use_folios(m, &charges.uses, &buf.u, &visits)
        mm.mem.leave()
        try:
            if pages < 0:
                raise MMError(_errno.ENOMEM, "no memory for the descriptor of a buffer", addr=addr)
            charges.charge(<uint64_t>pages, addr)
        except BaseException:
            unuse_folios(m, &charges.uses, &buf.u, visits)
            drop_quietly(m, &buf.u)
            raise
        charges.nr_buffers += 1
    buf.acct_pages = <uint64_t>pages
    buf.folio_shift = m.page_shift
    buf.offset = addr & (page - 1)
    if buf.u.coalesced:
        while ONE << buf.folio_shift < folio_pages << m.page_shift:
            buf.folio_shift += 1
        # By the page's place in its folio; the address says nothing about that (T73).
        buf.offset += first_idx << m.page_shift
    if mm_unlikely(pin_watchers):
        tell_bvecs(buf, 1)
    return buf

cdef void drop_quietly(mem_t *m, const buffer_t *u) noexcept:
    """The pins of a buffer that nobody has seen yet."""
    cdef uint64_t i, pfn, n
    cdef group_t g
    for i in range(u.nr_runs):
        pfn, n = leaf_pfn(u.run[i]), leaf_count(u.run[i])
        if not u.coalesced:
            release_leaves(m, &u.run[i], 1, True)
            continue
        while n:
            next_in_range(m.map, pfn, n, &g)
            put_one(m, pfn)
            pfn += g.count
            n -= g.count

cdef object tell_bvecs(RegisteredBuffer buf, int sign):
    cdef mem_t *m = &buf.mem.m
    cdef uint64_t i, pfn, n
    cdef group_t g
    cdef pins_t pins
    pins_begin(&pins)
    for i in range(buf.u.nr_runs):
        pfn, n = leaf_pfn(buf.u.run[i]), leaf_count(buf.u.run[i])
        while n:
            next_in_range(m.map, pfn, n, &g)
            if g.head != m.zero_pfn:
                pins_add(&pins, g.head, 1 if buf.u.coalesced else g.count)
            pfn += g.count
            n -= g.count
    with holding(f"io_uring buffer {buf.address:#x}+{buf.length:#x}"):
        pins_tell(buf.mem, &pins, sign)

cdef object release_buffers(Memory mem, list buffers):
    """Release buffers that leave their last table: one batch, all or nothing. Raises BadPage, MMError(ENOMEM)."""
    cdef RegisteredBuffer buf
    cdef Charges charges
    cdef uint64_t i, n = len(buffers), total = 0, done = 0, gone
    cdef buffer_t **u
    cdef batch_t b
    cdef mem_t *m
    if n == 0:
        return
    u = <buffer_t **>mem_malloc(&mem.m, n * sizeof(buffer_t *))
    if u == NULL:
        raise MMError(_errno.ENOMEM, f"no memory to release {n} buffers at once. Nothing was changed")
    for i in range(n):
        buf = buffers[i]
        u[i] = &buf.u
        total += buf.u.nr_bvecs
        if mm_unlikely(pin_watchers):
            tell_bvecs(buf, -1)
    m = mem.enter()
    # Which folios a buffer visits is read from them, so before they may be freed.
    left = {}
    for buf in buffers:
        left[buf.charges] = left.get(buf.charges, 0) + 1
    pages = {}
    for charges, count in left.items():
        if count == charges.nr_buffers:
            pages[charges] = charges.pages
        else:
            pages[charges] = sum([unuse_folios(m, &charges.uses, &(<RegisteredBuffer>buf).u, ~<uint64_t>0) for buf in buffers
                                  if (<RegisteredBuffer>buf).charges is charges])
    with nogil:
        b.error = batch_begin(&b, m, total, True, False)
        if b.error == 0:
            for i in range(n):
                gone = drop_bvecs(&b, u[i], u[i].nr_bvecs, False)
                done += gone
                if gone < u[i].nr_bvecs:
                    break
            if b.error and undo_begin(&b):
                for i in range(n):
                    gone = min(done, u[i].nr_bvecs)
                    drop_bvecs(&b, u[i], gone, True)
                    done -= gone
                    if done == 0:
                        break
                undo_end(&b)
            batch_finish(&b)
    mem.leave()
    free(u)
    if b.error:
        for charges, count in left.items():
            if count != charges.nr_buffers:
                for buf in buffers:
                    if buf.charges is charges:
                        use_folios(m, &charges.uses, &buf.u, &gone)
        if mm_unlikely(pin_watchers):
            for buf in buffers:
                tell_bvecs(buf, 1)
        if b.error == -ENOMEM:
            raise MMError(_errno.ENOMEM, f"no memory to note the folios that a release of {total} pins may free. Nothing was changed")
        if b.error == -EINTR:
            raise_pending()
        raise bad_page(mem, b.error, b.bad_pfn, b.bad_count, "unregistering buffers")
    for charges, count in left.items():
        charges.end(count, pages[charges])


def io_check_coalesce_buffer(pages):
    """Return CoalesceData when a PageList can be kept by folios, else None.

    Folios must be of one size; the first may begin inside when it is used to its end, those in the middle are used whole,
    the last from its start; pages of a folio follow each other. Folios of one page pass, and are kept by pages all the same.
    """
    cdef PageList plist
    cdef buffer_t u
    cdef uint64_t i, nr_folios = 0, folio_pages = 0, head_pages = 0, first_idx = 0
    cdef bint fits = True
    cdef group_t g
    if not isinstance(pages, PageList):
        raise TypeError(f"a PageList is wanted, not {pages!r}")
    plist = pages
    if plist.n == 0 or not plist.pfns.all():
        raise InvalidArgument("the pages of a buffer: at least one, and none NULL")
    cdef mem_t *m = plist.mem.ptr()
    if folio_at(m.map, plist.p[0], &g.head) == 1:
        if any([folio_at(m.map, plist.p[i], &g.head) != 1 for i in range(plist.n)]):
            return None
        return CoalesceData(plist.n, 1, 1, m.page_shift, 0)
    memset(&u, 0, sizeof(u))
    try:
        for i in range(plist.n):
            if not add_run(m, &u, plist.p[i], 1):
                raise MMError(_errno.ENOMEM, "no memory to note the runs of the pages")
        fits = check_coalesce(m.map, &u, &nr_folios, &folio_pages, &head_pages, &first_idx)
    finally:
        free(u.run)
    if not fits:
        return None
    return CoalesceData(nr_folios, head_pages, folio_pages, m.page_shift + int(folio_pages).bit_length() - 1, first_idx)


def new_charges(MM mm not None):
    """Return what a table counts its buffers in."""
    cdef Charges charges = Charges.__new__(Charges)
    charges.mm = mm
    return charges


def hold_buffers(buffers):
    """Count one more table for each buffer of a list; None is an empty slot."""
    cdef RegisteredBuffer buf
    with _shared_lock:
        for buf in buffers:
            if buf is not None:
                buf.refs += 1


def forget_buffers(buffers):
    """Give up buffers that are in no table yet, when what they were made with fails; needs no memory, and cannot fail."""
    cdef RegisteredBuffer buf
    cdef uint64_t pages
    cdef mem_t *m
    with _shared_lock:
        for buf in buffers:
            if buf is not None:
                m = buf.mem.enter()
                if mm_unlikely(pin_watchers):
                    tell_bvecs(buf, -1)
                pages = unuse_folios(m, &buf.charges.uses, &buf.u, ~<uint64_t>0)
                drop_quietly(m, &buf.u)
                buf.mem.leave()
                buf.charges.end(1, pages)


def drop_buffers(Memory mem not None, buffers):
    """Take buffers out of a table; release those that no other table has.

    All or nothing: raises BadPage, MMError(ENOMEM).
    """
    cdef RegisteredBuffer buf
    with _shared_lock:
        dying = []
        for buf in buffers:
            if buf is not None and buf.refs == 1:
                dying.append(buf)
        release_buffers(mem, dying)
        for buf in buffers:
            if buf is not None:
                buf.refs -= 1
