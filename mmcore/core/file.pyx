"""Files under their kernel kinds: page cache, devices, writeback, truncation.

Units: offsets and sizes: bytes; pages: base pages.
Raises: InvalidArgument, MMError; see each.
Threads: any number at once; a lock a file.
Kernel: struct address_space and its file systems.
"""
from libc.errno cimport EBUSY
from libc.stdlib cimport free
from libc.string cimport memcpy, memset
cimport cython
from mmcore.core.fault cimport EHWPOISON
from mmcore.core.filemap cimport (cache_next, dax_drop, file_drop, file_forget, file_look, file_page, file_pages, file_room,
                                  file_write_page, is_page)
from mmcore.core.folio cimport count_arg, put_refs, split
from mmcore.core.lock cimport mark_dirty
from mmcore.core.pgtable cimport *
from mmcore.core.rmap cimport *
from mmcore.core.zap cimport zap_begin, zap_end, zap_hugetlb, zap_range, zap_t

import errno as _errno

from .errors import InvalidArgument, MMError
from .size import format_size, parse_size

__all__ = ["File"]

KINDS = {"tmpfs": FILE_TMPFS, "ext4": FILE_EXT4, "hugetlbfs": FILE_HUGETLBFS, "devdax": FILE_DEVDAX, "fsdax": FILE_FSDAX,
         "secretmem": FILE_SECRETMEM, "pfnmap": FILE_PFNMAP, "iomem": FILE_IOMEM}
KIND_NAMES = {value: name for name, value in KINDS.items()}

# ---- what maps it: for rmap_walk_file() ---------------------------------------------------------------------------------
cdef int unmap_stretch(mm_t *mm, vma_t *v, uint64_t addr, uint64_t first, uint64_t nr, void *arg) noexcept nogil:
    """rmap_fn: unmap all of a stretch, copies that private mappings made included. A leaf that spans its start goes
    whole: what is still in the file is faulted in again."""
    cdef zap_t z
    cdef uint64_t table, end = addr + (nr << mm.m.page_shift), size
    cdef int level = 0
    cdef uint64_t e = a64_load_acquire(walk_find(&mm.pgd, addr, &level, &table))
    if level > 0 and pte_leaf(e, level):
        size = level_size(&mm.pgd, level)
        addr &= ~(size - 1)
    level = 0
    e = a64_load_acquire(walk_find(&mm.pgd, end - 1, &level, &table))
    if level > 0 and pte_leaf(e, level):
        end = (end + level_size(&mm.pgd, level) - 1) & ~(level_size(&mm.pgd, level) - 1)
    if v.flags & VM_HUGETLB:
        zap_hugetlb(mm, v, addr, end)
        return 0
    zap_begin(&z, mm)
    zap_range(&z, v, addr, end)
    zap_end(&z)
    return 0

cdef int protect_stretch(mm_t *mm, vma_t *v, uint64_t addr, uint64_t first, uint64_t nr, void *arg) noexcept nogil:
    """rmap_fn: write-protect shared entries before writeback, so that the next write says so (folio_mkclean)."""
    cdef uint64_t table, e
    cdef uint64_t *entry
    cdef int level = 0
    if not v.flags & VM_SHARED:
        return 0
    entry = walk_find(&mm.pgd, addr, &level, &table)
    if level != 0:
        return 0
    table_lock(mm.m, table)
    e = a64_load_relaxed(entry)
    if pte_present(e) and not e & PTE_SPECIAL and pte_pfn(e) == <uint64_t>arg:
        if e & PTE_DIRTY:
            mark_dirty(mm.m, compound_head_pfn(mm.m.map, pte_pfn(e)))
        a64_store_release(entry, e & ~(PTE_RW | PTE_DIRTY))
    table_unlock(mm.m, table)
    return 0

# ---- the object ---------------------------------------------------------------------------------------------------------
cdef void file_destroy(file_t *f) noexcept nogil:
    """The object goes, and with it the last mapping: drop the cache, unless the Memory is closed and took the frames."""
    cdef uint64_t i
    if f.m.map != NULL and f.m.spaces != NULL:
        if f.id:
            file_unregister(f)
        if f.kind == FILE_FSDAX:
            for i in range(f.device.end - f.device.start):
                dax_drop(f, i)
        elif f.kind != FILE_DEVDAX and f.kind != FILE_IOMEM:
            i = cache_next(f, 0, f.nr_entries)
            while i < f.nr_entries:
                if f.cache[i]:
                    file_drop(f, i << f.order)
                i = cache_next(f, i + 1, f.nr_entries)
    file_forget(f)
    pthread_mutex_destroy(&f.lock)
    free(f.mms)
    free(f)

cdef object sigbus(file_t *f, uint64_t offset):
    name = KIND_NAMES[f.kind]
    if f.gone:
        return f"the device of this {name} file was removed"
    if f.kind == FILE_HUGETLBFS and offset < f.size:
        return f"the pool of {format_size((ONE << f.m.page_shift) << f.order)} pages is empty: release some, or make it larger"
    return f"offset {offset:#x} is beyond the end of the {name} file ({f.size:#x} bytes)"


@cython.no_gc_clear
cdef class File:
    """Model a file, or whatever else can be mapped: File(mem, size, kind="tmpfs", *, page_size=None, device=None).

    kind: "tmpfs", "ext4", "hugetlbfs" (page_size: which pool, default the PMD size), "devdax" and "fsdax" (device: one of
    mem.devices, a generic and an fsdax one), "secretmem", "pfnmap" (a driver's frames, mapped as raw PFNs; of `device` when
    given) or "iomem" (registers: no struct pages). size: bytes, or "64M". Its pages are freed when the last reference to
    the object and the last mapping are gone. Raises InvalidArgument for arguments that do not fit together, MMError(ENOMEM),
    MMError(EBUSY) for a second fsdax file on one device.
    """

    def __cinit__(self, *args, **kwargs):
        self.f = NULL

    def __init__(self, Memory mem not None, size, kind="tmpfs", *, page_size=None, device=None):
        if self.f != NULL:
            raise InvalidArgument("this File is set up already")
        from .open import open_file
        open_file(self, mem, count_arg(parse_size(size, "size of a file"), "size", 0, ONE << 62), kind, page_size, device)

    cdef file_t *ptr(self) except NULL:
        if self.f == NULL:
            raise InvalidArgument("this File was never set up")
        self.mem.ptr()
        return self.f

    def __dealloc__(self):
        if self.f != NULL:
            file_destroy(self.f)

    def __repr__(self):
        if self.f == NULL or self.mem.m.map == NULL:
            return "<File of a closed Memory>"
        return f"<File {self.kind}, {format_size(self.f.size)}, {self.f.nr_cached} pages in memory, {self.f.nr_mms} mappings>"

    @property
    def size(self):
        """Bytes up to its end."""
        return self.ptr().size

    @property
    def page_size(self):
        """Bytes of one page of its cache: the pool's for hugetlbfs, the leaf's for devdax."""
        cdef file_t *f = self.ptr()
        if f.kind == FILE_DEVDAX:
            return (ONE << f.m.page_shift) << f.device.leaf_order
        return (ONE << f.m.page_shift) << f.order

    @property
    def nr_cached(self):
        """Base pages of it that are in memory."""
        return self.ptr().nr_cached

    def page_at(self, offset):
        """Return the Page at a byte offset when it is in memory, else None. Takes no reference."""
        cdef file_t *f = self.ptr()
        cdef uint64_t pfn, at = count_arg(offset, "offset", 0, ~<uint64_t>0)
        pthread_mutex_lock(&f.lock)
        pfn = file_look(f, at >> f.m.page_shift)
        pthread_mutex_unlock(&f.lock)
        return page_handle(self.mem, pfn) if 0 < pfn < f.m.nr_pages else None

    def read(self, offset, n):
        """Read n bytes from a byte offset, as read(2) does: shorter at the end of the file. Returns bytes.

        secretmem, pfnmap and devdax cannot be read (MMError(EINVAL)). Raises MMError(ENOMEM) when a page cannot be brought in,
        MMError(EIO) when one is broken.
        """
        cdef file_t *f = self.ptr()
        cdef uint64_t at = count_arg(offset, "offset", 0, ~<uint64_t>0), left = count_arg(n, "n", 0, ~<uint64_t>0)
        takes_io(self)
        if at >= f.size:
            return b""
        left = min(left, f.size - at)
        data = bytearray(left)
        file_io(self, at, data, False)
        return bytes(data)

    def write(self, offset, data):
        """Write bytes at a byte offset, as write(2) does; tmpfs and ext4 files grow. Returns the number of bytes.

        Raises MMError: EINVAL for secretmem, pfnmap and devdax, EFBIG past the end of files that cannot grow, ENOMEM, EIO
        (a broken page); the file is as long as before then.
        """
        cdef file_t *f = self.ptr()
        cdef uint64_t at = count_arg(offset, "offset", 0, ONE << 62)        # the end does not wrap
        takes_io(self)
        data = memoryview(data).cast("B")
        cdef uint64_t old = f.size, end = at + <uint64_t>len(data)
        if end > old and end > at:
            if f.kind != FILE_TMPFS and f.kind != FILE_EXT4:
                raise MMError(_errno.EFBIG, f"bytes {at:#x}..{at + len(data):#x} are beyond the end of the {self.kind} file "
                                            f"({f.size:#x}), which cannot grow")
            self.truncate(end)
        try:
            file_io(self, at, data, True)
        except BaseException:
            if end > old and f.size == end:
                self.truncate(old)
            raise
        return len(data)

    def writeback(self):
        """Write the dirty pages of an ext4 file to its disk; returns how many. Other kinds have nothing to write: 0.

        Shared entries are write-protected first, so that the next write through them is noticed. A broken page stays dirty.
        """
        cdef file_t *f = self.ptr()
        cdef uint64_t i, written = 0, pfn, head
        if f.kind != FILE_EXT4:
            return 0
        self.mem.enter()
        with nogil:
            pthread_mutex_lock(&f.lock)
            i = cache_next(f, 0, file_pages(f))
            while i < file_pages(f):
                pfn = f.cache[i]
                if is_page(pfn):
                    rmap_walk_file(f, i, 1, protect_stretch, <void *>pfn)
                    head = compound_head_pfn(f.m.map, pfn)
                    # With the last of its pages, when all of them are protected. What a truncation left is beyond the end.
                    if (i + 1 == file_pages(f) or pfn + 1 == head + (ONE << folio_order_of(&f.m.map[head]))) \
                            and test_flag(&f.m.map[head], PG_dirty) and not test_flag(&f.m.map[pfn], PG_hwpoison):
                        file_write_page(f, head)
                        written += ONE << folio_order_of(&f.m.map[head])
                i = cache_next(f, i + 1, file_pages(f))
            pthread_mutex_unlock(&f.lock)
        self.mem.leave()
        return written

    def truncate(self, size):
        """Set the size. What lies beyond is unmapped everywhere, copies of private mappings included, and dropped.

        A page that somebody else holds or pins lives on without the file. Raises MMError: EBUSY for fsdax pages that are
        pinned (the kernel waits), EINVAL for kinds without a size of their own, ENOMEM. Kernel: truncate_setsize().
        """
        cdef file_t *f = self.ptr()
        cdef uint64_t wanted = count_arg(parse_size(size, "size of a file"), "size", 0, ONE << 62)
        cdef int error
        if f.kind not in (FILE_TMPFS, FILE_EXT4, FILE_HUGETLBFS, FILE_FSDAX, FILE_SECRETMEM):
            raise InvalidArgument(f"a {self.kind} file has the size of what it stands for: it cannot be truncated")
        if f.kind == FILE_SECRETMEM and f.size:
            raise InvalidArgument("a secretmem file's size is set once")
        if f.order and wanted & (((ONE << f.m.page_shift) << f.order) - 1):
            raise InvalidArgument(f"size {wanted:#x} is no multiple of the huge page size {self.page_size:#x}")
        if f.kind == FILE_FSDAX and wanted > (f.device.end - f.device.start) << f.m.page_shift:
            raise MMError(_errno.ENOSPC, f"size {wanted:#x} is more than the device has")
        self.mem.enter()
        with nogil:
            error = file_truncate(f, wanted)
        self.mem.leave()
        if error == -EBUSY:
            raise MMError(_errno.EBUSY, f"truncate({wanted:#x}): pages of the fsdax file beyond are held or pinned, and DMA "
                                        "into them would hit whatever the filesystem puts there next: unpin them first. Nothing was "
                                        "changed")
        if error:
            raise MMError(-error, f"no address space for the page cache of {format_size(wanted)}")

    def unplug(self):
        """Remove the device of a devdax, fsdax, pfnmap or iomem file: mappings go, and faults end in SIGBUS.

        Raises InvalidArgument for other kinds, MMError(EBUSY) while pages of it are held or pinned.
        """
        cdef file_t *f = self.ptr()
        cdef bint busy = False
        if f.kind not in (FILE_DEVDAX, FILE_FSDAX, FILE_PFNMAP, FILE_IOMEM):
            raise InvalidArgument(f"a {self.kind} file has no device")
        self.mem.enter()
        with nogil:
            pthread_mutex_lock(&f.lock)
            busy = f.kind == FILE_DEVDAX and device_busy(f, 0) or f.kind == FILE_FSDAX and device_busy(f, 0)
            if not busy:
                f.gone = True
                rmap_walk_file(f, 0, file_pages(f), unmap_stretch, NULL)
            pthread_mutex_unlock(&f.lock)
        self.mem.leave()
        if busy:
            raise MMError(_errno.EBUSY, "pages of the device are held or pinned: unpin them first. Nothing was changed")

cdef bint device_busy(file_t *f, uint64_t first) noexcept nogil:
    """Has a page of the device from this index on references that its mappings and its own entry do not explain?"""
    cdef mem_t *m = f.m
    cdef uint64_t pfn = f.device.start + first
    cdef page_t *head
    cdef int64_t own
    while pfn < f.device.end:
        head = &m.map[compound_head_pfn(m.map, pfn)]
        own = 1 if f.kind == FILE_DEVDAX or a64_load_relaxed(&head.mapping) else 0
        if <int64_t>a32_load_relaxed(&head._refcount) > folio_mapcount_of(head) + own:
            return True
        pfn = (head - m.map) + (ONE << folio_order_of(head))
    return False

cdef int file_truncate(file_t *f, uint64_t size) noexcept nogil:
    cdef mem_t *m = f.m
    cdef uint64_t page = ONE << m.page_shift, first = (size + page - 1) >> m.page_shift, i, pfn, head, last, next
    cdef int error = 0
    pthread_mutex_lock(&f.lock)
    last = file_pages(f)
    if f.kind == FILE_FSDAX and first < last and device_busy(f, first):
        error = -EBUSY
    elif f.kind != FILE_FSDAX:
        error = file_room(f, size)
    if error:
        pthread_mutex_unlock(&f.lock)
        return error
    f.size = size
    if first < last:
        rmap_walk_file(f, first, last - first, unmap_stretch, NULL)
    if f.kind == FILE_FSDAX:
        for i in range(first, last):
            dax_drop(f, i)
        pthread_mutex_unlock(&f.lock)
        return 0
    i = first
    while True:
        i = cache_next(f, i >> f.order, last >> f.order) << f.order
        if i >= last:
            break
        pfn = f.cache[i >> f.order]
        if f.order == 0 and is_page(pfn) and page_is_tail(&m.map[pfn]):
            # The end lies inside a large folio: split it when nobody else holds it; else it stays whole until it is dropped.
            head = compound_head_pfn(m.map, pfn)
            next = m.map[head].index + (ONE << folio_order_of(&m.map[head]))
            if ref_add_positive(&m.map[head], 1):
                trim_folio(f, head, i)
            i = next
            continue
        elif pfn:
            file_drop(f, i)
        i += ONE << f.order
    if size & (page - 1):
        pfn = file_look(f, size >> m.page_shift)
        if pfn and test_flag(&m.map[pfn], PG_mm_written):
            memset(page_bytes(m, pfn) + (size & (page - 1)), 0, page - (size & (page - 1)))
        if f.disk != NULL:
            memset(f.disk + size, 0, page - (size & (page - 1)))
    if f.on_disk != NULL:
        i = cache_next(f, first, last)
        while i < last:
            next = min(last, (i // CACHE_STRETCH + 1) * CACHE_STRETCH)
            memset(f.on_disk + i, 0, next - i)
            i = cache_next(f, next, last)
    pthread_mutex_unlock(&f.lock)
    return 0

cdef void trim_folio(file_t *f, uint64_t head, uint64_t index) noexcept nogil:
    """Split a large folio that the new end cuts, and drop its pages from `index` on. The caller's reference goes."""
    cdef mem_t *m = f.m
    cdef uint64_t i, nr = ONE << folio_order_of(&m.map[head]), start = a64_load_relaxed(&m.map[head].index)
    if split(m, head, 0) == 0:
        for i in range(nr):
            # The split gave each piece the cache's reference and one of ours.
            put_refs(m, &m.map[head + i], False, 1)
        for i in range(index - start, nr):
            file_drop(f, start + i)
    else:
        for i in range(index - start, nr):
            if test_flag(&m.map[head + i], PG_mm_written):
                memset(page_bytes(m, head + i), 0, ONE << m.page_shift)
        put_refs(m, &m.map[head], True, 1)

cdef int io_page(file_t *f, uint64_t at, uint8_t *data, uint64_t n, bint write) noexcept nogil:
    """Copy within one page of the file; the page is brought in, but a hole is not filled by reading."""
    cdef mem_t *m = f.m
    cdef uint64_t pfn = 0, index = at >> m.page_shift, inside = at & ((ONE << m.page_shift) - 1), entry
    cdef int error = 0
    if f.kind == FILE_IOMEM:
        if write:
            memcpy(f.disk + at, data, n)
        else:
            memcpy(data, f.disk + at, n)
        return 0
    if not write and f.kind != FILE_DEVDAX and f.kind != FILE_FSDAX:
        entry = f.cache[index >> f.order]
        if entry <= CACHE_RESERVED and not (f.kind == FILE_EXT4 and f.on_disk[index]):
            memset(data, 0, n)
            return 0
    error = file_page(f, index, False, &pfn)
    if error:
        return error
    if test_flag(&m.map[pfn], PG_hwpoison):
        return -EHWPOISON
    if write:
        copy_shared(page_bytes(m, pfn) + inside, data, n)
        mark_dirty(m, compound_head_pfn(m.map, pfn))
    elif test_flag(&m.map[pfn], PG_mm_written):
        copy_shared(data, page_bytes(m, pfn) + inside, n)
    else:
        memset(data, 0, n)
    return 0

cdef int takes_io(File self) except -1:
    if self.f.kind == FILE_SECRETMEM or self.f.kind == FILE_PFNMAP or self.f.kind == FILE_DEVDAX:
        raise InvalidArgument(f"a {self.kind} file cannot be read or written by read(2) and write(2): map it")
    return 0

cdef int file_io(File self, uint64_t at, object data, bint write) except -1:
    cdef file_t *f = self.f
    cdef const uint8_t[::1] view
    cdef uint64_t n = len(data), done = 0, step, page = ONE << f.m.page_shift
    cdef int error = 0
    if n == 0:
        return 0
    view = data
    self.mem.enter()
    with nogil:
        while done < n and error == 0:
            step = min(n - done, page - ((at + done) & (page - 1)))
            pthread_mutex_lock(&f.lock)
            error = io_page(f, at + done, <uint8_t *>&view[done], step, write)
            pthread_mutex_unlock(&f.lock)
            if error == 0:
                done += step
    self.mem.leave()
    if error == FAULT_SIGBUS:
        raise MMError(_errno.EIO, f"I/O at {at + done:#x}: {sigbus(f, at + done)}")
    if error == -EHWPOISON:
        raise MMError(_errno.EIO, f"I/O at {at + done:#x}: the page in the cache is broken (hwpoison): truncate() the file "
                                  "before it, or go around it")
    if error:
        raise MMError(-error, f"no free page for offset {at + done:#x} of the file: free memory, or make a larger Memory")
    return 0

cdef File new_file(Memory mem, uint64_t size, int kind, unsigned order):
    """What shared anonymous mappings stand on: shmem, or the kernel's own hugetlbfs mount."""
    return File(mem, size, KIND_NAMES[kind], page_size=(ONE << mem.m.page_shift) << order if order else None)
