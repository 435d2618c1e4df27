"""MM: address spaces under Python's hands.

Units: addresses: int, bytes; lengths: bytes or "2M"; prot, flags, advice: PROT_*, MAP_*, MADV_* bits.
Raises: TypeError, InvalidArgument, MMError with the errno of the system call and .addr.
Threads: any number at once: mmap_lock for reading in faults, for writing in what changes the shape; a lock a page
    table.
Kernel: struct mm_struct, vm_area_struct, and the system calls of these names.
"""
from libc.stdint cimport uint8_t
from libc.stdlib cimport free
cimport cython
from mmcore.core.access cimport access_bytes, access_stop, page_at_addr, pagemap_words, populate, touch_pages
from mmcore.core.fork cimport fork_mm
from mmcore.core.file cimport File
from mmcore.core.filemap cimport file_mapped
from mmcore.core.fault cimport EHWPOISON
from mmcore.core.folio cimport count_arg
from mmcore.core.madvise cimport do_clear_refs, do_madvise
from mmcore.core.mm_args cimport *
from mmcore.core.mremap cimport do_mremap
from mmcore.core.pgtable cimport *
from mmcore.core.remap cimport split_mapped
from mmcore.core.vma cimport do_mprotect, do_munmap, mm_exit

import errno as _errno
import itertools
from collections import namedtuple

import numpy as np

from .errors import InvalidArgument, MMError
from .size import parse_size
from .space import MADV, VM

__all__ = ["MM", "VMA"]

cdef dict _MODES = {"never": THP_NEVER, "madvise": THP_MADVISE, "always": THP_ALWAYS}
_numbers = itertools.count(1)
_ADVICE = {value: str(value.name) for value in MADV}

VMA = namedtuple("VMA", "start end flags file offset")
VMA.__doc__ = """One mapping as it was when looked at: addresses [start, end), flags (VM), the File or None, offset in it."""

# ---- life -----------------------------------------------------------------------------------------------------------------
cdef int settings(Memory mem) except -1:
    """Make the registry of a Memory, and copy what its config says about huge pages to where faults see it."""
    cdef spaces_t *s
    s = spaces_get(&mem.m)
    if s == NULL:
        raise MemoryError()
    if mem.m.split_mapped != NULL:
        return 0                # said before; faults read it without a lock
    s.thp = _MODES[mem.config["thp"]]
    s.shmem_thp = _MODES[mem.config["shmem_thp"]]
    s.mthp = 0
    for order in mem.config["mthp"]:
        s.mthp |= ONE << <unsigned>order
    mem.m.split_mapped = split_mapped
    return 0

cdef extern from "Python.h":
    void PyObject_GC_UnTrack(void *o)

cdef void hide(dict files):
    """Keep a dict of files from the collector of cycles: it clears dicts, and the files would go before what maps them."""
    PyObject_GC_UnTrack(<void *>files)

cdef object forget_files(MM self, bint all):
    """Let go of files that nothing here maps any more: what shared anonymous memory stood on is freed with it.

    all: also what was kept and then not mapped. While a call is about to map, or to fork, nothing goes; the last one looks.
    """
    cdef File file
    cdef mm_t *mm = self.mm
    cdef uint64_t gone = a64_exchange_acq_rel(&mm.files_gone, 0)
    if all:
        gone = SOME_FILES
    if gone == 0:
        return
    for file in list(self.files.values()) if gone == SOME_FILES else filter(None, [self.files.get(gone)]):
        # Letting a file go may run anything, and another thread.
        if a32_load_acquire(&self.keeping):
            a64_store_release(&mm.files_gone, SOME_FILES)
            return
        if not file_mapped(file.f, mm):
            self.files.pop(file.f.id, None)

cdef MM new_mm(Memory mem):
    """An empty address space, in no family yet."""
    cdef MM self = MM.__new__(MM)
    mm_setup(self, mem)
    return self

cdef int mm_setup(MM self, Memory mem) except -1:
    cdef mem_t *m = mem.ptr()
    cdef mm_t *mm
    settings(mem)
    mm = <mm_t *>mem_calloc(m, 1, sizeof(mm_t))
    if mm == NULL:
        raise MemoryError()
    mm.m = m
    pthread_rwlock_init(&mm.mmap_lock, NULL)
    pthread_mutex_init(&mm.rmap_lock, NULL)
    mm.exited = True
    self.mem = mem
    self.mm = mm
    self.files = {}
    if pgd_init(&mm.pgd, m) != 0:
        raise no_frames(mem, "the top page table of an address space")
    mm.hint = task_size(&mm.pgd) & ~((ONE << 27) - 1)
    mm.exited = False
    mm_register(mm)
    return 0

@cython.no_gc_clear
cdef class MM:
    """Model the address space of a process: MM(mem, *, rlimit_memlock=None, cap_ipc_lock=None, user="root").

    rlimit_memlock: bytes or "64K", None for no limit; cap_ipc_lock: None means true only when there is no limit. MMs of one
    user share what io_uring accounts to users. Threads may use one MM at once: faults run side by side, changes of its
    shape one at a time. Raises MMError(ENOMEM) when there is no frame for its top page table. Kernel: struct mm_struct.
    """

    def __cinit__(self, *args, **kwargs):
        self.mm = NULL

    def __init__(self, Memory mem not None, *, rlimit_memlock=None, cap_ipc_lock=None, user="root"):
        if self.mm != NULL:
            raise InvalidArgument("this MM is set up already")
        if not isinstance(user, str):
            raise TypeError(f"user is a name, not {user!r}")
        self.rlimit_memlock = None if rlimit_memlock is None else parse_size(rlimit_memlock, "rlimit_memlock")
        self.cap_ipc_lock = self.rlimit_memlock is None if cap_ipc_lock is None else bool(cap_ipc_lock)
        self.user = user
        self.name = str(next(_numbers))
        mm_setup(self, mem)
        if family_join(self.mm, NULL) != 0:
            raise MemoryError()

    cdef mm_t *ptr(self) except NULL:
        if self.mm == NULL:
            raise InvalidArgument("this MM was never set up")
        self.mem.ptr()
        if a32_load_relaxed(&self.mm.exited):
            raise MMError(_errno.ESRCH, f"the address space {self.name} has exited")
        return self.mm

    cdef mm_t *enter(self) except NULL:
        cdef mm_t *mm = self.ptr()
        self.mem.enter()
        return mm

    cdef void leave(self) noexcept:
        self.mem.leave()

    def __dealloc__(self):
        cdef mm_t *mm = self.mm
        if mm == NULL:
            return
        if not a32_load_relaxed(&mm.exited) and self.mem.m.map != NULL:
            mm_exit(mm)
        pthread_rwlock_destroy(&mm.mmap_lock)
        pthread_mutex_destroy(&mm.rmap_lock)
        free(mm.vma)
        free(mm)

    def exit(self):
        """End the address space: unmap everything, free its tables. Later calls raise MMError(ESRCH). Kernel: exit_mmap()."""
        cdef mm_t *mm = self.enter()
        with nogil:
            mm_exit(mm)
        forget_files(self, True)
        self.leave()

    def __enter__(self):
        self.ptr()
        return self

    def __exit__(self, *_):
        if self.mm != NULL and not a32_load_relaxed(&self.mm.exited) and self.mem.m.map != NULL:
            self.exit()

    def __repr__(self):
        cdef seen_t seen
        if self.mm == NULL or self.mem.m.map == NULL:
            return "<MM of a closed Memory>"
        if a32_load_relaxed(&self.mm.exited):
            return f"<MM {self.name}, exited>"
        with nogil:
            vma_see(self.mm, 0, &seen)
        return f"<MM {self.name}, {seen.nr_vmas} VMAs, rss {self.rss} pages>"

    # -- shape -----------------------------------------------------------------------------------------------------------------
    def mmap(self, length, prot=PROT_READ | PROT_WRITE, flags=MAP_PRIVATE | MAP_ANONYMOUS, file=None, offset=0, addr=None):
        """Map anonymous memory, or a file from a byte offset on; returns the address.

        length: bytes, or "2M". addr: a hint, or with MAP_FIXED the place. Mappings of 2 MiB and more are placed aligned to
        the PMD size, hugetlb ones and devices to their page size. Shared anonymous memory stands on a File of its own.
        Raises MMError: EINVAL, EEXIST (MAP_FIXED_NOREPLACE on something mapped), ENOMEM (no room, no tables, a hugetlb pool
        that cannot promise its pages, too many VMAs), EAGAIN (MAP_LOCKED or secretmem over RLIMIT_MEMLOCK), EBADF (no file),
        EOVERFLOW, ENODEV (the device is gone). Kernel: mmap(2).
        """
        from .mmap import do_mmap
        self.ptr()
        return do_mmap(self, parse_size(length, "length"), count_arg(prot, "prot", 0, 0x7fffffff),
                       count_arg(flags, "flags", 0, ~<uint64_t>0), file, count_arg(offset, "offset", 0, ~<uint64_t>0), addr)

    def munmap(self, addr, length):
        """Unmap all that is mapped in a range; holes are no error.

        Raises MMError: EINVAL for an address that is no multiple of the page size, a length of 0, a range beyond the address
        space, or one that cuts a huge page of hugetlb or a device; ENOMEM when a leaf must be split and there is no frame
        for its table. Kernel: munmap(2).
        """
        cdef uint64_t start, end
        cdef int error
        cdef mm_t *mm = self.ptr()
        range_arg(self.ptr(), addr, length, "munmap()", &start, &end)
        if end == start:
            raise InvalidArgument("munmap() of length 0", addr=start)
        self.mem.enter()
        with nogil:
            error = mmap_write_lock(mm)
            if error == 0:
                error = do_munmap(mm, start, end)
                mmap_unlock(mm)
        self.mem.leave()
        forget_files(self, False)
        if error:
            self.ptr()              # raises when it was an exit
            raise shape_error(mm, error, "munmap()", start, end)

    def mprotect(self, addr, length, prot):
        """Change the protection of a range.

        Raises MMError: EINVAL (misaligned, or it cuts a huge page of hugetlb or a device), ENOMEM (part of it is not mapped,
        or no frame for a table). Kernel: mprotect(2).
        """
        cdef uint64_t start, end, wanted = count_arg(prot, "prot", 0, 7)
        cdef int error
        cdef mm_t *mm = self.ptr()
        if count_arg(addr, "addr", 0, ~<uint64_t>0) + parse_size(length, "length") > task_size(&mm.pgd):
            raise MMError(_errno.ENOMEM, f"mprotect(): the range from {addr:#x} on leaves the address space "
                                         f"({task_size(&mm.pgd):#x})", addr=addr)
        range_arg(self.ptr(), addr, length, "mprotect()", &start, &end)
        if start == end:
            return
        self.mem.enter()
        with nogil:
            error = mmap_write_lock(mm)
            if error == 0:
                error = do_mprotect(mm, start, end, wanted)
                mmap_unlock(mm)
        self.mem.leave()
        if error:
            self.ptr()
            raise shape_error(mm, error, "mprotect()", start, end)

    def mremap(self, old, old_len, new_len, new_addr=None):
        """Resize a mapping, and move it when it cannot grow where it is.

        With new_addr it goes exactly there, and what is mapped there goes. Returns the address.

        Raises MMError: EFAULT (nothing is mapped at old; what moves or grows is not all one mapping, or of a kind that cannot
        grow), EINVAL (misaligned, new_len 0, old and new overlap; hugetlb: not at its page size, or growing), ENOMEM (no room or no
        tables), EAGAIN (locked memory over RLIMIT_MEMLOCK). Nothing has moved then. Kernel: mremap(2), with MREMAP_MAYMOVE.
        """
        cdef mm_t *mm = self.ptr()
        cdef uint64_t start, end, wanted_end, to = 0, new_size, vm_flags = 0
        cdef bint fixed = new_addr is not None
        cdef int error
        range_arg(self.ptr(), old, old_len, "mremap()", &start, &end)
        range_arg(self.ptr(), new_addr if fixed else 0, new_len, "mremap()", &to, &wanted_end)
        new_size = wanted_end - to
        if new_size == 0 or end == start:
            raise InvalidArgument("mremap() of or to length 0", addr=start)
        if fixed and to < 0x10000:
            raise MMError(_errno.EPERM, f"mremap() to {to:#x}: below vm.mmap_min_addr (0x10000)", addr=to)
        v = self.find_vma(start)
        if v is not None:
            vm_flags = int(v.flags)
        if vm_flags & VM_LOCKED and new_size > end - start:
            check_mlock(self, MAP_LOCKED, (new_size - (end - start)) >> mm.m.page_shift)
        self.mem.enter()
        with nogil:
            error = mmap_write_lock(mm)
            if error == 0:
                error = do_mremap(mm, start, end - start, new_size, &to, fixed)
                mmap_unlock(mm)
            if error == 0 and vm_flags & VM_LOCKED and new_size > end - start:
                populate(mm, to + (end - start), to + new_size, vm_flags)
        self.mem.leave()
        forget_files(self, False)
        if error == -ESRCH:
            self.ptr()
        if error:
            raise mremap_error(error, start, end, new_size)
        return to

    def madvise(self, addr, length, advice):
        """Advise the kernel about a range.

        MADV_HUGEPAGE, NOHUGEPAGE, POPULATE_READ, POPULATE_WRITE, DONTNEED, FREE, COLLAPSE, PAGEOUT, DONTFORK, DOFORK, COLD;
        NORMAL, RANDOM, SEQUENTIAL and WILLNEED are accepted and change nothing.

        Raises MMError: EINVAL (misaligned, unknown, or advice that a mapping in the range does not take), ENOMEM (part is
        not mapped: the rest was done; or no frame), EFAULT (POPULATE beyond the end of a file), EAGAIN (COLLAPSE of pages
        that somebody holds or pins). .addr says where. Kernel: madvise(2).
        """
        cdef mm_t *mm = self.ptr()
        cdef uint64_t start, end, at = 0
        cdef int error, what
        range_arg(self.ptr(), addr, length, "madvise()", &start, &end)
        advice = int(count_arg(advice, "advice", 0, 0x7fffffff))
        if advice not in _ADVICE:
            raise InvalidArgument(f"advice {advice!r} is none that is known: {', '.join(_ADVICE.values())}", addr=start)
        what = advice
        name = _ADVICE[advice]
        if start == end:
            return
        self.mem.enter()
        with nogil:
            error = do_madvise(mm, start, end, what, &at)
        self.mem.leave()
        if error == 0:
            return
        self.ptr()
        raise madvise_error(self.mem, mm, error, name, what, start, end, at)

    def fork(self):
        """Return a copy of the address space that shares its pages until one side writes; pinned pages are copied at once.

        Raises MMError(ENOMEM) when there is no frame for a table or a copy, MMError(EHWPOISON) when a pinned page is broken;
        there is no child then. Kernel: dup_mm().
        """
        cdef mm_t *mm = self.ptr()
        cdef MM child = new_mm(self.mem)
        cdef int error
        child.rlimit_memlock = self.rlimit_memlock
        child.cap_ipc_lock = self.cap_ipc_lock
        child.user = self.user
        child.name = f"{self.name}.{next(_numbers)}"
        self.mem.enter()
        a32_fetch_add_acq_rel(&self.keeping, 1)
        try:
            child.files = dict(self.files)
            with nogil:
                error = fork_mm(child.mm, mm)
            # What was mapped before the lock was had. Until now nothing here has let go of a file.
            if not mm_planted(4):
                child.files.update(self.files)
        finally:
            hide(child.files)
            a32_fetch_sub_acq_rel(&self.keeping, 1)
            self.mem.leave()
        forget_files(self, False)
        if error:
            self.ptr()
            if error == -EHWPOISON:
                raise MMError(EHWPOISON, "fork(): a page that is pinned, and so would be copied for the child, is broken (hwpoison): "
                                         "unpin it, or munmap() it")
            raise no_frames(self.mem, "a page table or the copy of a pinned page in fork()")
        return child

    def clear_refs(self, what=4):
        """Clear marks of access, as a write to /proc/PID/clear_refs does.

        4: soft-dirty bits go, and what may be written is write-protected, so that the next write sets them again; pinned
        pages are left as they are. 1, 2, 3: accessed bits of all, anonymous, file memory.
        """
        cdef mm_t *mm = self.ptr()
        cdef int kind = <int>count_arg(what, "what", 1, 4), error
        self.mem.enter()
        with nogil:
            error = mmap_write_lock(mm)
            if error == 0:
                do_clear_refs(mm, kind)
                mmap_unlock(mm)
        self.mem.leave()
        if error:
            self.ptr()

    # -- accesses --------------------------------------------------------------------------------------------------------------
    def read(self, addr, n):
        """Read n bytes as the process does; returns bytes.

        Raises MMError(EFAULT) where nothing is mapped, where reading is not allowed (SIGSEGV), and beyond the end of a file
        (SIGBUS); MMError(ENOMEM) when a page cannot be brought in.
        """
        cdef uint64_t nbytes = count_arg(n, "n", 0, ONE << 62)
        if nbytes > READ_AT_ONCE:
            # Before memory is taken for what cannot be read.
            user_copy(self, addr, nbytes, None, False)
        data = bytearray(nbytes)
        user_copy(self, addr, nbytes, data, False)
        return bytes(data)

    def write(self, addr, data):
        """Write bytes as the process does. Raises as read(); a range that is not all writable is refused as a whole."""
        data = memoryview(data).cast("B")
        user_copy(self, addr, len(data), data, True)

    def touch(self, addr, length, write=True):
        """Access one byte of each page of a range, without changing any; returns the faults it took.

        Raises as read(); pages before the one that failed stay.
        """
        cdef mm_t *mm = self.ptr()
        cdef uint64_t start = count_arg(addr, "addr", 0, ~<uint64_t>0), faults = 0, end, page = ONE << mm.m.page_shift, stop = 0
        cdef bint for_write = bool(write)
        cdef int error = 0
        size = parse_size(length, "length")
        if size == 0:
            return 0
        if start + size > task_size(&mm.pgd):
            raise MMError(_errno.EFAULT, f"touch(): the range from {start:#x} on leaves the address space", addr=start)
        end = (start + <uint64_t>size + page - 1) & ~(page - 1)
        start &= ~(page - 1)
        self.mem.enter()
        with nogil:
            error = mmap_read_lock(mm)
            if error == 0:
                stop = access_stop(mm, start, end, for_write)
                if stop < end:
                    error = FAULT_SIGSEGV
                    start = stop
                else:
                    error = touch_pages(mm, &start, end, for_write, &faults)
                mmap_unlock(mm)
        self.mem.leave()
        if error:
            self.ptr()
            raise access_error(self.mem, mm, error, start, for_write, "touch()")
        return faults

    # -- looking ---------------------------------------------------------------------------------------------------------------
    @property
    def vmas(self):
        """List the mappings by address: VMA(start, end, flags, file, offset), as of now."""
        cdef mm_t *mm = self.ptr()
        cdef seen_t *all = NULL
        cdef int64_t i, nr
        with nogil:
            nr = vma_see_all(mm, &all)
        if nr < 0:
            self.ptr()
            raise MemoryError()
        try:
            return [snapshot(self, &all[i]) for i in range(nr)]
        finally:
            free(all)

    def find_vma(self, addr):
        """Return the VMA that holds an address, or None. (The kernel's find_vma also returns the next one above.)"""
        cdef mm_t *mm = self.ptr()
        cdef uint64_t at = count_arg(addr, "addr", 0, ~<uint64_t>0)
        cdef seen_t seen
        with nogil:
            vma_see(mm, at, &seen)
        return snapshot(self, &seen) if seen.there else None

    def pagemap(self, addr, nr, *, privileged=True):
        """Return the uint64 words that /proc/PID/pagemap has for nr pages from addr on.

        Bits 0-54 PFN (0 without privilege), or type and slot of swap; 55 soft-dirty, 56 exclusively mapped, 61 file page,
        62 swapped, 63 present.
        """
        cdef mm_t *mm = self.ptr()
        cdef uint64_t start = count_arg(addr, "addr", 0, ~<uint64_t>0), n = count_arg(nr, "nr", 0, ONE << 40)
        cdef bint all_bits = bool(privileged)
        cdef uint64_t[::1] words
        cdef int error
        array = np.zeros(n, np.uint64)
        if start & ((ONE << mm.m.page_shift) - 1):
            raise InvalidArgument(f"pagemap() from {start:#x}, which is no multiple of the page size", addr=start)
        if n:
            words = array
            self.mem.enter()
            with nogil:
                error = mmap_read_lock(mm)
                if error == 0:
                    pagemap_words(mm, start, &words[0], n, all_bits)
                    mmap_unlock(mm)
            self.mem.leave()
            if error:
                self.ptr()
        return array

    def page_at(self, addr):
        """Return the Page that is mapped at an address; None when none is, or it has no struct page. Takes no reference."""
        cdef uint64_t at = count_arg(addr, "addr", 0, (ONE << TASK_BITS) - 1), pfn
        cdef mm_t *mm = self.enter()
        cdef int token = walk_enter(&mm.pgd)
        pfn = page_at_addr(mm, at)
        walk_leave(&mm.pgd, token)
        self.leave()
        return page_handle(self.mem, pfn) if 0 < pfn < mm.m.nr_pages else None

    @property
    def nr_tables(self):
        """Page tables it has, the top one included; each is one frame."""
        return a64_load_relaxed(&self.ptr().pgd.nr_tables)

    @property
    def rss(self):
        """Resident pages: anonymous, file and shmem; hugetlb and zero pages are not counted, as in the kernel."""
        cdef mm_t *mm = self.ptr()
        return a64_load_relaxed(&mm.rss_anon) + a64_load_relaxed(&mm.rss_file) + a64_load_relaxed(&mm.rss_shmem)

    @property
    def rss_stat(self):
        """Resident pages by kind, and those in swap: {"anon", "file", "shmem", "swap"}."""
        cdef mm_t *mm = self.ptr()
        return {"anon": a64_load_relaxed(&mm.rss_anon), "file": a64_load_relaxed(&mm.rss_file),
                "shmem": a64_load_relaxed(&mm.rss_shmem), "swap": a64_load_relaxed(&mm.swapped)}

    @property
    def locked_vm(self):
        """Pages that count against RLIMIT_MEMLOCK: mlocked ones, and those of drivers that account here (RDMA aside)."""
        return a64_load_relaxed(&self.ptr().locked_vm)

    @property
    def pinned_vm(self):
        """Pages that drivers account as pinned (RDMA, io_uring)."""
        return a64_load_relaxed(&self.ptr().pinned_vm)

    @property
    def total_faults(self):
        """Page faults it ever took."""
        return a64_load_relaxed(&self.ptr().total_faults)

    @property
    def has_pinned(self):
        """True once anything tried to pin its pages (MMF_HAS_PINNED): fork looks at pins only then."""
        return bool(a64_load_relaxed(&self.ptr().flags) & MMF_HAS_PINNED)

    @has_pinned.setter
    def has_pinned(self, value):
        # What pin_user_pages* do on entry; grab_pages() of pages found by hand knows no mm, so its caller says it here.
        if not value:
            raise InvalidArgument("MMF_HAS_PINNED is never cleared")
        a64_fetch_or_relaxed(&self.ptr().flags, MMF_HAS_PINNED)

cdef object snapshot(MM self, const seen_t *seen):
    file = self.files.get(seen.file_id) if seen.v.file != NULL else None
    if file is None and seen.v.file != NULL:
        self.ptr()              # an exit meanwhile let them go
    return VMA(seen.v.start, seen.v.end, VM(seen.v.flags), file, seen.v.pgoff << self.mem.m.page_shift if file is not None else 0)

cdef enum:
    READ_AT_ONCE = 1 << 20      # bytes

cdef int user_copy(MM self, object addr, uint64_t n, object data, bint write) except -1:
    """Copy n bytes between user memory and data; for None, only raise where not all of them can be accessed."""
    cdef mm_t *mm = self.ptr()
    cdef uint64_t at = count_arg(addr, "addr", 0, ~<uint64_t>0), stop = 0
    cdef const uint8_t[::1] view
    cdef uint8_t *bytes = NULL
    cdef int error = 0
    call = "write()" if write else "read()"
    if n == 0:
        return 0
    if at + <object>n > task_size(&mm.pgd):
        raise MMError(_errno.EFAULT, f"{call}: {n} bytes from {at:#x} on leave the address space", addr=at)
    if data is not None:
        view = data
        bytes = <uint8_t *>&view[0]
    self.mem.enter()
    with nogil:
        error = mmap_read_lock(mm)
        if error == 0:
            stop = access_stop(mm, at, at + n, write)
            if stop < at + n:
                error = FAULT_SIGSEGV
                at = stop
            elif bytes != NULL:
                error = access_bytes(mm, &at, bytes, n, write)
            mmap_unlock(mm)
    self.mem.leave()
    if error:
        self.ptr()
        raise access_error(self.mem, mm, error, at, write, call)
    return 0

cdef int check_mlock(MM self, uint64_t flags, uint64_t pages) except -1:
    cdef mm_t *mm = self.mm
    if not flags & MAP_LOCKED or self.cap_ipc_lock or self.rlimit_memlock is None:
        return 0
    locked = a64_load_relaxed(&mm.locked_vm)
    limit = self.rlimit_memlock >> mm.m.page_shift
    if locked + pages > limit:
        raise MMError(_errno.EAGAIN, f"{pages} pages to lock (MAP_LOCKED, secretmem) with {locked} locked already are more than "
                                     f"RLIMIT_MEMLOCK allows ({limit} pages): raise the limit (ulimit -l), or give CAP_IPC_LOCK")
    return 0
