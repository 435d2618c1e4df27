# cython: nonecheck=True
"""User memory of RDMA devices: pin it, describe it by a scatterlist, map it for the device; and the reverse.

Laws
    pinned_vm   grows by the pages that [address, address + length) touches before the first is pinned, and shrinks by the
                same number, whatever the driver does to iova since. No de-duplication: two regions over a page count twice.
    Failure     at any step: nothing is pinned, mapped or charged, and no page is marked dirty.
    Generations acquire "list" (PAGES_PER_LIST pages a call, appended) and "sink" (leaves go straight into the table);
                release "page" (a call a page: before 2021), "array" (lists of PAGES_PER_LIST pages: the RFC of December
                2020) and "range" (a call an entry, runs by arithmetic: v3, February 2021). All leave one state.

Units: addresses, sizes, page sizes: bytes; access: IB_ACCESS bits.
Raises: TypeError, InvalidArgument, MMError; what was taken is given back.
Threads: any number at once; one umem is for one thread at a time.
Kernel: the functions of these names in umem.c, struct ib_umem.
"""
from libc.errno cimport EFAULT, EINTR, ENOMEM
from libc.stdlib cimport free, malloc
from libc.string cimport memset
from mmcore.core.folio cimport bad_page, count_arg
from mmcore.core.gup cimport gup_pages
from mmcore.core.gup_args cimport gup_error
from mmcore.core.gup_walk cimport gup_t
from mmcore.core.hook cimport pin_watchers
from mmcore.core.lock cimport raise_pending
from mmcore.core.mm cimport MM
from mmcore.core.output cimport leaf_word, release_leaves
from mmcore.core.scatterlist cimport *
from mmcore.core.sgiter cimport pages_of
from mmcore.core.sgoutput cimport *
from mmcore.core.space cimport mm_t
from mmcore.core.walk cimport *
from mmcore.drivers.pagearray cimport array_output_t, array_take

import errno as _errno

from ..core.dma import Device, dma_map_sgtable, dma_unmap_sgtable
from ..core.errors import InvalidArgument, MMError
from ..core.scatterlist import SGAppendTable as _SGAppendTable
from ..core.sgalloc import sg_free_append_table
from ..core.sgcopy import sg_pcopy_to_buffer
from ..core.size import format_size
from .ibaccess import IB_ACCESS, ib_access_writable

__all__ = ["IBDevice", "IBUmem", "ib_umem_get", "ib_umem_release", "ib_umem_offset", "ib_umem_num_pages",
           "ib_umem_start_dma_addr", "ib_umem_dma_offset", "ib_umem_copy_from", "pages_per_list"]

cdef enum state:
    LIVE
    RELEASING
    RELEASED

ctypedef unsigned uint

def pages_per_list(mem):
    """Return how many pages are pinned, or unpinned, a call: the pointers that fit in a page, 512 with 4 KiB."""
    return mem.page_size // 8


class IBDevice(Device):
    """Stand for an RDMA device: IBDevice(mem, *, max_seg_size=2**32-1, iommu=False).

    Also what Device() takes; cc_bounce=True: a confidential guest whose DMA goes through bounce buffers. mtt_limit: the
    device keeps its translations in one table of mtt_entry bytes a page, and can have mtt_limit bytes for it (None: any).
    """

    def __init__(self, mem, *, max_seg_size=2**32 - 1, iommu=False, cc_bounce=False, mtt_limit=None, mtt_entry=16, **limits):
        super().__init__(mem, max_seg_size=max_seg_size, iommu=iommu, **limits)
        if max_seg_size < mem.page_size:
            raise InvalidArgument(f"max_seg_size {max_seg_size} is less than a page ({mem.page_size} bytes): no entry would fit")
        self.cc_bounce = bool(cc_bounce)
        self.mtt_limit = None if mtt_limit is None else int(count_arg(mtt_limit, "mtt_limit", 0, ~<uint64_t>0))
        self.mtt_entry = int(count_arg(mtt_entry, "mtt_entry", 1, 1 << 20))


cdef class IBUmem:
    """Hold pinned user memory, as a device sees it: made by ib_umem_get(). Kernel: struct ib_umem."""
    cdef readonly object device         # IBDevice
    cdef readonly MM mm
    cdef readonly uint64_t address      # of the first byte
    cdef readonly uint64_t length       # bytes
    cdef public object iova             # what the device calls `address`; drivers set it
    cdef readonly bint writable
    cdef readonly object dma_attrs      # names of the DMA attributes it was mapped with
    cdef readonly object acquire        # generation
    cdef readonly SGAppendTable sgt
    cdef readonly uint64_t npages       # charged to pinned_vm
    cdef uint32_t state

    def __init__(self):
        raise TypeError("an IBUmem is made by ib_umem_get()")

    @property
    def released(self):
        """True once ib_umem_release() has given it back."""
        return self.state == RELEASED

    @property
    def num_pages(self):
        """Pages that it touches."""
        return self.npages

    def __reduce__(self):
        raise TypeError("an IBUmem belongs to its Memory and cannot be pickled")

    def __repr__(self):
        if self.state == RELEASED:
            return f"<IBUmem {self.address:#x}+{self.length:#x} released>"
        return (f"<IBUmem {self.address:#x}+{self.length:#x} {'writable' if self.writable else 'read-only'} {self.npages} pages in "
                f"{self.sgt.orig_nents} entries, {self.sgt.nents} DMA segments>")

# ---- acquiring --------------------------------------------------------------------------------------------------------------
cdef struct pinning_t:                  # one ib_umem_get(), from its first pin to the complete table
    mem_t *m
    mm_t *mm
    sgtable_t *t
    uint64_t start                      # page-aligned address
    uint64_t npages
    uint64_t max_segment
    unsigned flags
    uint64_t done                       # pages pinned and in the table
    int error                           # negative errno
    int why                             # sg_reason, where the table is to blame
    gup_t w                             # of the last call

cdef void pin_by_lists(pinning_t *p, uint64_t *list, uint64_t room) noexcept nogil:
    """A list of pages a call, appended to the table; what a failed append held is dropped here."""
    cdef array_output_t out
    cdef append_t a
    cdef int64_t got
    cdef uint64_t want, i, word
    memset(&out, 0, sizeof(out))
    out.base.take = array_take
    while p.done < p.npages:
        want = min(p.npages - p.done, room)
        out.pfn = list
        out.base.nr_pages = 0
        got = gup_pages(&p.w, p.mm, p.start + (p.done << p.m.page_shift), want, p.flags, True, False, &out.base)
        if got <= 0:
            p.error = <int>got if got else -EFAULT
            if got == -EINTR:
                for i in range(<uint64_t>(out.pfn - list)):
                    word = leaf_word(list[i], 1)
                    release_leaves(p.m, &word, 1, True)
            return
        # A short count is no error: the next call says why.
        append_begin(&a, p.m, p.t, <uint64_t>got, 0, p.max_segment, p.npages - p.done - <uint64_t>got)
        p.error = append_list(&a, list, <uint64_t>got)
        if p.error == 0:
            p.error = append_finish(&a, 0)
        if p.error:
            p.why = a.why
            append_abort(&a)
            for i in range(<uint64_t>got):
                word = leaf_word(list[i], 1)
                release_leaves(p.m, &word, 1, True)
            return
        p.done += <uint64_t>got

cdef void pin_by_sink(pinning_t *p) noexcept nogil:
    """All pages in one call, each leaf straight into the table."""
    cdef sg_output_t out
    cdef int64_t got
    memset(&out, 0, sizeof(out))
    out.base.take = sg_take
    append_begin(&out.a, p.m, p.t, p.npages, 0, p.max_segment, 0)
    while out.pages < p.npages and p.error == 0:
        out.base.nr_pages = 0
        got = gup_pages(&p.w, p.mm, p.start + (out.pages << p.m.page_shift), p.npages - out.pages, p.flags, True, False, &out.base)
        if out.base.error:
            p.error = out.base.error
        elif got <= 0:
            p.error = <int>got if got else -EFAULT
    if p.error == 0:
        p.error = append_finish(&out.a, 0)
    if p.error:
        p.why = out.a.why
        append_release(&out.a, out.pages, True)
        append_abort(&out.a)
        return
    p.done = out.pages

cdef object pin_all(IBUmem umem, uint64_t *list, uint64_t room):
    """Pin and describe all of it, or raise with nothing pinned and the table empty."""
    cdef pinning_t p
    cdef SGAppendTable table = umem.sgt
    memset(&p, 0, sizeof(p))
    p.mm = umem.mm.enter()
    try:
        p.m = table.write(True)
        p.t = &table.t
        p.start = umem.address & ~((ONE << p.m.page_shift) - 1)
        p.npages = umem.npages
        p.max_segment = table.max_segment
        p.flags = FOLL_PIN | FOLL_LONGTERM | (FOLL_WRITE if umem.writable else 0)
        with nogil:
            if list != NULL:
                pin_by_lists(&p, list, room)
            else:
                pin_by_sink(&p)
            if p.error and p.done:
                table_release(p.m, p.t, p.done, True)
        table.write_done()
    finally:
        umem.mm.leave()
    if p.error == 0:
        return
    sg_free_append_table(table)
    if p.error == -EINTR:
        raise_pending()
    if p.why != SG_OK:
        raise MMError(-p.error, f"ib_umem_get(): no memory for a chunk of the scatterlist after {p.done} of {p.npages} pages; "
                                "nothing stays pinned", addr=umem.address)
    error = gup_error(umem.mm, &p.w, "ib_umem_get(): pin_user_pages_fast")
    raise MMError(error.errno, f"{error.strerror.partition(': ')[2]}; {p.done} of {p.npages} pages were pinned, and are released",
                  pfn=error.pfn, addr=error.addr)

cdef object over_memlock(MM mm, uint64_t npages, uint64_t now, uint64_t limit):
    page = mm.mem.page_size
    return MMError(_errno.ENOMEM, f"ib_umem_get(): {npages} pages ({format_size(npages * page)}) on top of {now - npages} already pinned "
                                  f"exceed RLIMIT_MEMLOCK ({limit} pages): raise it (ulimit -l), give the process CAP_IPC_LOCK, or "
                                  "register less")


def ib_umem_get(device, MM mm not None, addr, size, access, *, acquire="sink"):
    """Pin `size` bytes of user memory from `addr` on for an RDMA device, and map them; returns an IBUmem.

    acquire: "sink" or "list". The order of the checks is the kernel's. Raises MMError: EOPNOTSUPP (the device's DMA is
    bounced, or ON_DEMAND), EINVAL (size 0, or the range wraps: InvalidArgument; also of the IOMMU), EPERM (RLIMIT_MEMLOCK is 0),
    ENOMEM (memory; more than RLIMIT_MEMLOCK allows; the device's own table), and what pin_user_pages_fast() raises. Nothing
    stays then. Kernel: ib_umem_get().
    """
    cdef uint64_t start = count_arg(addr, "addr", 0, ~<uint64_t>0), nbytes = count_arg(size, "size", 0, ~<uint64_t>0)
    cdef uint64_t page, end, npages, now, limit
    cdef unsigned flags = <unsigned>count_arg(access, "access", 0, 0xffffffff)
    cdef uint64_t *list = NULL
    cdef IBUmem umem
    cdef mm_t *p
    if not isinstance(device, IBDevice):
        raise TypeError(f"an IBDevice is wanted, not {device!r}")
    if device.mem is not mm.mem:
        raise InvalidArgument("the address space belongs to another Memory than the device")
    if acquire not in ("sink", "list"):
        raise InvalidArgument(f"acquire={acquire!r} is none of 'sink', 'list'")
    p = mm.ptr()
    page = ONE << p.m.page_shift
    # 0. bounce buffers would make the device see copies
    if device.cc_bounce:
        raise MMError(_errno.EOPNOTSUPP, "ib_umem_get(): the device's DMA goes through bounce buffers (a confidential guest): it "
                                         "would work on copies", addr=start)
    # 1. the range
    if nbytes == 0:
        raise InvalidArgument("ib_umem_get() of 0 bytes: there is nothing to pin", addr=start)
    end = start + nbytes
    if end < start or end + page - 1 < end:
        raise InvalidArgument(f"ib_umem_get(): {nbytes} bytes from {start:#x} on run over the end of 64 bits", addr=start)
    # 2. can_do_mlock()
    if mm.rlimit_memlock == 0 and not mm.cap_ipc_lock:
        raise MMError(_errno.EPERM, "ib_umem_get(): RLIMIT_MEMLOCK is 0: raise it (ulimit -l), or give the process CAP_IPC_LOCK",
                      addr=start)
    # 3.
    if flags & IB_ACCESS.ON_DEMAND:
        raise MMError(_errno.EOPNOTSUPP, "ib_umem_get(): ON_DEMAND pages are not pinned: ask the device for its own page faults",
                      addr=start)
    # 4. the umem. npages from the address, once: drivers change iova (T50).
    npages = ((end + page - 1) >> p.m.page_shift) - (start >> p.m.page_shift)
    if inject_fails(p.m, INJECT_ALLOC):
        raise MMError(_errno.ENOMEM, "ib_umem_get(): no memory for the umem")
    umem = IBUmem.__new__(IBUmem)
    umem.device, umem.mm, umem.address, umem.length, umem.iova = device, mm, start, nbytes, addr.__index__()
    umem.writable = ib_access_writable(flags)
    umem.dma_attrs = ("REQUIRE_COHERENT", "WEAK_ORDERING") if flags & IB_ACCESS.RELAXED_ORDERING else ("REQUIRE_COHERENT",)
    umem.acquire = acquire
    umem.npages = npages
    umem.state = RELEASED               # until it is whole
    try:
        # 5. the list; the sink needs none
        if acquire == "list":
            list = <uint64_t *>malloc(page) if not inject_fails(p.m, INJECT_LIST) else NULL
            if list == NULL:
                raise MMError(_errno.ENOMEM, "ib_umem_get(): no memory for the list of pages")
        # 6.
        if npages > 0xffffffff:
            raise InvalidArgument(f"ib_umem_get(): {npages} pages are more than 32 bits count", addr=start)
        if device.mtt_limit is not None and npages * device.mtt_entry > device.mtt_limit:
            raise MMError(_errno.ENOMEM, f"ib_umem_get(): the device's table would take {npages * device.mtt_entry} bytes for "
                                         f"{npages} pages, and can have {device.mtt_limit}: register pieces of up to "
                                         f"{format_size(device.mtt_limit // device.mtt_entry * page)}", addr=start)
        # 7. added first, then compared: two registrations at once may both be refused, and never both be let in
        now = a64_fetch_add_relaxed(&p.pinned_vm, npages) + npages
        try:
            if not mm.cap_ipc_lock:
                limit = mm.rlimit_memlock >> p.m.page_shift
                if now > limit:
                    raise over_memlock(mm, npages, now, limit)
            # 8. to 10.
            umem.sgt = _SGAppendTable(mm.mem, max_segment=device.max_seg_size)
            pin_all(umem, list, page // 8)
            # 11.
            try:
                dma_map_sgtable(device, umem.sgt)
            except BaseException:
                drop_pins(umem)
                raise
        except BaseException:
            a64_fetch_add_relaxed(&p.pinned_vm, <uint64_t>-<int64_t>npages)
            raise
    finally:
        free(list)
    umem.state = LIVE
    if mm_unlikely(pin_watchers):
        tell_entries(mm.mem, umem.sgt.t.sgl, 0, npages, 1)
    return umem

cdef object drop_pins(IBUmem umem):
    """Unwind: the pins of a whole table, nothing dirtied, nothing to unmap."""
    cdef SGAppendTable table = umem.sgt
    cdef mem_t *m = table.write(True)
    with nogil:
        table_release(m, &table.t, umem.npages, True)
    table.write_done()
    sg_free_append_table(table)

# ---- releasing --------------------------------------------------------------------------------------------------------------
cdef enum how:
    BY_RANGE
    BY_ARRAY
    BY_PAGE

cdef uint64_t release_ranges(batch_t *b, sgtable_t *t) noexcept nogil:
    """A walk an entry, a folio at a time; pages done."""
    cdef sg_t *sg = t.sgl
    cdef uint64_t i, n, got, done = 0
    for i in range(t.orig_nents):       # no-cython-lint: the CPU's entries: there may be fewer DMA segments (T54)
        n = sg_nr_pages(sg, b.m.page_shift)
        got = release_range(b, sg_first_pfn(sg, b.m.page_shift), n)
        done += got
        if got < n:
            break
        sg = next_sg(sg)
    return done

cdef uint64_t release_arrays(batch_t *b, sgtable_t *t, uint64_t *list, uint64_t room, int gen) noexcept nogil:
    """The pages of the entries collected in a list, and a walk over that when it is full; pages done."""
    cdef sg_t *sg = t.sgl
    cdef uint64_t i, pfn, n, used = 0, got, done = 0
    for i in range(t.orig_nents):  # no-cython-lint
        pfn = sg_first_pfn(sg, b.m.page_shift)
        n = sg_nr_pages(sg, b.m.page_shift)
        while n:
            list[used] = pfn
            used += 1
            pfn += 1
            n -= 1
            if used == room:
                got = release_list(b, list, used, gen)
                done += got
                if got < used:
                    return done
                used = 0
        sg = next_sg(sg)
    return done + release_list(b, list, used, gen) if used else done

cdef uint64_t release_pages_one_by_one(batch_t *b, sgtable_t *t) noexcept nogil:
    """A call a page, from the page iterator; pages done."""
    cdef sg_t *sg = t.sgl
    cdef uint64_t i, pfn, n, done = 0
    for i in range(t.orig_nents):  # no-cython-lint
        pfn = sg_first_pfn(sg, b.m.page_shift)
        n = sg_nr_pages(sg, b.m.page_shift)
        while n:
            if release_list(b, &pfn, 1, GEN_PAGE) == 0:
                return done
            done += 1
            pfn += 1
            n -= 1
        sg = next_sg(sg)
    return done

cdef void undo_pages(batch_t *b, sgtable_t *t, uint64_t n) noexcept nogil:
    """Take the first n pages of the entries again."""
    cdef sg_t *sg = t.sgl
    cdef uint64_t k
    while n:
        k = min(n, sg_nr_pages(sg, b.m.page_shift))
        undo_range(b, sg_first_pfn(sg, b.m.page_shift), k)
        n -= k
        if n:
            sg = next_sg(sg)

cdef int release_arg(object release) except -1:
    if release == "range":
        return BY_RANGE
    if release == "array":
        return BY_ARRAY
    if release == "page":
        return BY_PAGE
    raise InvalidArgument(f"release={release!r} is none of 'range', 'array', 'page'")

cdef int lists_arg(object lists) except -1:
    if lists == "run":
        return GEN_RUN
    if lists == "head":
        return GEN_HEAD
    raise InvalidArgument(f"lists={lists!r} is none of 'run', 'head'")


def ib_umem_release(umem, *, release="range", lists="run"):
    """Unmap, unpin and uncharge a umem; None is let pass. Pages of a writable one are marked dirty first.

    release: "range", "array" or "page"; lists: how the lists of "array" are walked, "run" or "head" (as in 2020). Raises
    InvalidArgument for one that is released, or whose table was changed, and BadPage when its pins are not all there any more;
    then pins and charge are as they were, only the device's mapping is gone, and it can be called again. Kernel:
    ib_umem_release().
    """
    cdef IBUmem u
    cdef int way = release_arg(release), gen = lists_arg(lists)
    cdef uint32_t seen = LIVE
    if umem is None:
        return
    if not isinstance(umem, IBUmem):
        raise TypeError(f"an IBUmem is wanted, not {umem!r}")
    u = umem
    u.mm.mem.ptr()
    if not a32_cas_acq_rel(&u.state, &seen, RELEASING):
        raise InvalidArgument("the umem is released already" if seen == RELEASED else
                              "another thread is releasing the umem", addr=u.address)
    try:
        give_back(u, way, gen)
    except BaseException:
        a32_store_release(&u.state, LIVE)
        raise
    a32_store_release(&u.state, RELEASED)

cdef object give_back(IBUmem umem, int way, int gen):
    cdef SGAppendTable table = umem.sgt
    cdef uint64_t done = 0, room
    cdef uint64_t *list = NULL
    cdef batch_t b
    cdef mem_t *m
    if table.mapping is not None:
        dma_unmap_sgtable(umem.device, table)
    m = table.write(True)
    try:
        named = pages_of(table)
        if named != umem.npages:
            raise InvalidArgument(f"ib_umem_release(): somebody changed the table: it names {named} pages, and {umem.npages} were pinned. "
                                  "Nothing was unpinned", addr=umem.address)
    except BaseException:
        table.write_done()
        raise
    room = (ONE << m.page_shift) // 8
    with nogil:
        # One batch: folios are freed at its end, and until then all of it can be undone.
        b.error = batch_begin(&b, m, umem.npages, True, umem.writable)
        if b.error == 0:
            if way == BY_ARRAY:
                list = <uint64_t *>malloc(room * sizeof(uint64_t)) if not inject_fails(m, INJECT_LIST) else NULL
            if way == BY_RANGE:
                done = release_ranges(&b, &table.t)
            elif list != NULL:
                done = release_arrays(&b, &table.t, list, room, gen)
            else:
                done = release_pages_one_by_one(&b, &table.t)
            if b.error and undo_begin(&b):
                undo_pages(&b, &table.t, done)
                undo_end(&b)
            batch_finish(&b)
            free(list)
    table.write_done()
    if b.error == -ENOMEM:
        raise MMError(_errno.ENOMEM, f"no memory to note the folios that a release of {umem.npages} pages may free. Its pins are as "
                                     "they were")
    if b.error:
        if b.error == -EINTR:
            raise_pending()
        raise bad_page(umem.mm.mem, b.error, b.bad_pfn, b.bad_count, "ib_umem_release()")
    if mm_unlikely(pin_watchers):
        tell_entries(umem.mm.mem, table.t.sgl, 0, umem.npages, -1)
    # The mm_t lives as long as its MM, exited or not.
    a64_fetch_add_relaxed(&umem.mm.mm.pinned_vm, <uint64_t>-<int64_t>umem.npages)
    sg_free_append_table(table)

# ---- helpers ----------------------------------------------------------------------------------------------------------------
cdef IBUmem live_umem(object umem):
    if not isinstance(umem, IBUmem):
        raise TypeError(f"an IBUmem is wanted, not {umem!r}")
    (<IBUmem>umem).mm.mem.ptr()
    if (<IBUmem>umem).state != LIVE:
        raise InvalidArgument("the umem is released", addr=umem.address)
    return umem


def ib_umem_offset(umem):
    """Return the offset of the first byte in its page."""
    return umem.address % umem.sgt.mem.page_size


def ib_umem_num_pages(umem):
    """Return the pages that the umem touches: by its address, not by iova, which drivers change (T50)."""
    page = umem.sgt.mem.page_size
    return (umem.address + umem.length + page - 1) // page - umem.address // page


def ib_umem_start_dma_addr(umem):
    """Return where the device sees the first byte. Raises InvalidArgument when the umem is released."""
    if getattr(umem, "released", False):
        raise InvalidArgument("the umem is released", addr=umem.address)
    return umem.sgt[0].dma_address + ib_umem_offset(umem)


def ib_umem_dma_offset(umem, pgsz):
    """Return the offset of the first byte in the device's page of pgsz bytes."""
    cdef uint64_t size = count_arg(pgsz, "pgsz", 1, ~<uint64_t>0)
    if size & (size - 1):
        raise InvalidArgument(f"pgsz {size} is no power of two")
    return ib_umem_start_dma_addr(umem) & (size - 1)


def ib_umem_copy_from(umem, offset, length, *, into=None):
    """Return `length` bytes of the umem from `offset` on, or copy them into a writable buffer of that length.

    Raises InvalidArgument beyond its end. Counts in 64 bits (T59).
    """
    cdef IBUmem u = live_umem(umem)
    cdef uint64_t at = count_arg(offset, "offset", 0, ~<uint64_t>0), n = count_arg(length, "length", 0, ~<uint64_t>0)
    if at > u.length or n > u.length - at:
        raise InvalidArgument(f"{n} bytes at offset {at} leave the umem of {u.length} bytes", addr=u.address)
    out = bytearray(n) if into is None else memoryview(into).cast("B")
    if <uint64_t>len(out) != n:
        raise InvalidArgument(f"into= has {len(out)} bytes, not {n}")
    if n and sg_pcopy_to_buffer(u.sgt, out, at + ib_umem_offset(u)) != n:
        raise InvalidArgument(f"the table has fewer than {at + n} bytes", addr=u.address)
    return bytes(out) if into is None else into
