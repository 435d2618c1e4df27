"""mmap: arguments, placing, promises, raw PFNs."""
from libc.errno cimport EEXIST, EINVAL, ENOMEM
from libc.stdint cimport uint64_t
from mmcore.core.access cimport populate
from mmcore.core.buddy cimport pool_of, reserve_hugetlb
from mmcore.core.file cimport File, new_file
from mmcore.core.filemap cimport file_del_mm, file_look, file_pages
from mmcore.core.folio cimport count_arg
from mmcore.core.hugetlb cimport hugetlb_reserve_file
from mmcore.core.mm cimport MM, check_mlock, forget_files
from mmcore.core.pgtable cimport *
from mmcore.core.space cimport *
from mmcore.core.vma cimport do_munmap, find_area, vma_find, vma_lookup, vma_put, vma_ready

import errno as _errno

from .errors import InvalidArgument, MMError
from .size import format_size

cdef extern from "Python.h":
    void PyObject_GC_UnTrack(void *o)

__all__ = ["do_mmap"]


def do_mmap(MM self not None, size, uint64_t prot, uint64_t flags, file, uint64_t offset, addr):
    """Map; see MM.mmap(), which converts the numbers."""
    cdef mm_t *mm = self.mm
    cdef mem_t *m = mm.m
    cdef uint64_t page = ONE << m.page_shift, length, align, at = 0, pages, end
    cdef vma_t v
    cdef unsigned order = 0
    cdef int error = 0, kind = flags & 3
    cdef file_t *f = NULL
    cdef bint shared = kind == MAP_SHARED or kind == MAP_SHARED_VALIDATE, fixed
    fixed = (flags & (MAP_FIXED | MAP_FIXED_NOREPLACE)) != 0
    if size == 0:
        raise InvalidArgument("mmap() of length 0")
    if not kind:
        raise InvalidArgument("mmap() flags need one of MAP_SHARED and MAP_PRIVATE")
    if prot & ~<uint64_t>7:
        raise InvalidArgument(f"prot {prot:#x} has bits beyond PROT_READ, PROT_WRITE and PROT_EXEC")
    if size > task_size(&mm.pgd):
        raise MMError(_errno.ENOMEM, f"mmap() of {size:#x} bytes: the address space has {task_size(&mm.pgd):#x}")
    if offset & (page - 1):
        raise InvalidArgument(f"offset {offset:#x} is no multiple of the page size")
    if offset + size > ~<uint64_t>0:
        raise MMError(_errno.EOVERFLOW, f"mmap(): offset {offset:#x} + {size:#x} bytes is beyond 64 bits")
    if file is not None and flags & MAP_ANONYMOUS:
        raise InvalidArgument("MAP_ANONYMOUS and a file exclude each other: pass flags=MAP_SHARED or MAP_PRIVATE with file=")
    if file is None and not flags & MAP_ANONYMOUS:
        raise MMError(_errno.EBADF, "mmap() without MAP_ANONYMOUS needs file=")
    if file is not None and not isinstance(file, File):
        raise TypeError(f"file is a File, not {file!r}")
    if flags & MAP_HUGETLB and file is None:
        order = hugetlb_order(self, flags)
    if file is not None:
        f = (<File>file).ptr()
        if f.m != m:
            raise InvalidArgument("the file belongs to another Memory")
        check_file(file, f, shared, prot, offset)
        order = f.order
    align = page << order
    if f != NULL and f.kind == FILE_DEVDAX:
        align = page << f.device.leaf_order
    if align > page and size % align and f != NULL and f.kind == FILE_DEVDAX:
        raise InvalidArgument(f"length {size:#x} is no multiple of the device's alignment {align:#x}")
    length = (<uint64_t>size + align - 1) & ~(align - 1)
    pages = length >> m.page_shift
    if f != NULL and f.kind in (FILE_PFNMAP, FILE_IOMEM, FILE_DEVDAX) and (offset + length + page - 1) >> m.page_shift > file_pages(f):
        raise InvalidArgument(f"{length:#x} bytes at offset {offset:#x} are more than the {file.kind} file has ({f.size:#x})")
    at = place_arg(self, addr, length, align, fixed, flags)
    if not order and align == page and length >= page << m.pmd_order:
        align = page << m.pmd_order
    if f != NULL and f.kind == FILE_SECRETMEM:
        flags |= MAP_LOCKED
    check_mlock(self, flags, pages)
    v.start = at
    v.end = at + length
    v.flags = (prot & 7) | VM_MAYREAD | VM_MAYWRITE | VM_MAYEXEC | VM_SOFTDIRTY
    v.file = f
    v.order = order
    v.has_anon = 0
    if shared:
        v.flags |= VM_SHARED | VM_MAYSHARE
    if order:
        v.flags |= VM_HUGETLB | VM_DONTEXPAND
    if flags & MAP_NORESERVE:
        v.flags |= VM_NORESERVE
    if flags & MAP_LOCKED:
        v.flags |= VM_LOCKED
    if f != NULL and f.kind == FILE_PFNMAP:
        v.flags |= VM_PFNMAP | VM_DONTEXPAND
    if f != NULL and f.kind == FILE_IOMEM:
        v.flags |= VM_PFNMAP | VM_IO | VM_DONTEXPAND
    if f == NULL and shared:
        file = new_file(self.mem, length, FILE_HUGETLBFS if order else FILE_TMPFS, order)
        f = (<File>file).f
        v.file = f
    v.pgoff = offset >> m.page_shift
    # Kept before anything is mapped: whatever happens, a file lives as long as what maps it.
    self.mem.enter()
    a32_fetch_add_acq_rel(&self.keeping, 1)
    try:
        if file is not None:
            self.files[f.id] = file
            # Storing has made it known to the collector, which clears dicts: the file would go before what maps it.
            PyObject_GC_UnTrack(<void *>self.files)
        with nogil:
            error = mmap_write_lock(mm)
            if error == 0:
                error = mmap_region(mm, &v, align, flags)
                mmap_unlock(mm)
            at = v.start
            end = v.end
            if error == 0 and (flags & MAP_POPULATE or v.flags & VM_LOCKED):
                populate(mm, at, end, v.flags)
    finally:
        a32_fetch_sub_acq_rel(&self.keeping, 1)
        self.mem.leave()
    forget_files(self, error != 0)          # also what a fixed mapping has replaced
    if error == -ESRCH:
        self.ptr()
    if error == -EINVAL:
        raise InvalidArgument(f"mmap() onto {at:#x}-{at + length:#x} would cut a huge page that cannot be split", addr=at)
    if error == -_errno.EEXIST:
        raise MMError(_errno.EEXIST, f"mmap(MAP_FIXED_NOREPLACE): something is mapped in {at:#x}-{at + length:#x} already",
                      addr=at)
    if error and order and not flags & MAP_NORESERVE and reserve_short(mm, &v):
        nr, free_pages = self.mem.hugetlb_pools()[page << order]
        raise MMError(_errno.ENOMEM, f"the pool of {format_size(page << order)} pages cannot promise {length // (page << order)} "
                                     f"pages: {free_pages} of {nr} are free, and {pool_promised(m, order)} of these are promised: "
                                     "make it larger, or pass MAP_NORESERVE", addr=at)
    if error:
        raise MMError(_errno.ENOMEM, f"mmap() of {length:#x} bytes: no room in the address space, more than {MAX_MAP_COUNT} "
                                     "mappings, or no memory for page tables", addr=at)
    return at

cdef uint64_t pool_promised(mem_t *m, unsigned order):
    return pool_of(m, order).nr_resv

cdef bint reserve_short(mm_t *mm, const vma_t *v):
    cdef hstate_t *h = pool_of(mm.m, v.order)
    return h.nr_free < h.nr_resv + ((v.end - v.start) >> mm.m.page_shift >> v.order)

cdef int mmap_region(mm_t *mm, vma_t *v, uint64_t align, uint64_t flags) noexcept nogil:
    """Place, clear the place, reserve, map raw PFNs, insert. 0, -ENOMEM, -EINVAL, -EEXIST; v says where."""
    cdef uint64_t length = v.end - v.start, nr, i
    cdef int error = 0
    if flags & MAP_FIXED_NOREPLACE:
        i = vma_find(mm, v.start)
        if i < mm.nr_vmas and mm.vma[i].start < v.end:
            return -EEXIST
    elif flags & MAP_FIXED:
        pass
    else:
        i = vma_find(mm, v.start)
        if v.start == 0 or (i < mm.nr_vmas and mm.vma[i].start < v.end):
            v.start = find_area(mm, length, align)
            if v.start == 0:
                return -ENOMEM
            v.end = v.start + length
    if v.file == NULL:
        v.pgoff = v.start >> mm.m.page_shift
    # The promise first: it is what most often fails, and nothing is undone more easily.
    if v.flags & VM_HUGETLB and not v.flags & VM_NORESERVE:
        nr = length >> mm.m.page_shift >> v.order
        if v.flags & VM_SHARED:
            error = hugetlb_reserve_file(v.file, v.pgoff >> v.order, nr)
        else:
            error = reserve_hugetlb(mm.m, v.order, <int64_t>nr)
            if error == 0:
                v.flags |= VM_HUGE_RESV
        if error:
            return error
    # All that can fail comes before what was there goes. Unmapping does not lift the count over the limit: it is checked
    # before it splits, and what it removes is at least what it split.
    i = vma_find(mm, v.start)
    if mm.nr_vmas >= MAX_MAP_COUNT and (i == mm.nr_vmas or mm.vma[i].start >= v.end):
        error = -ENOMEM
    if error == 0:
        error = vma_ready(mm, v)
    if error == 0 and flags & MAP_FIXED:
        error = do_munmap(mm, v.start, v.end)
        if error and v.file != NULL:
            file_del_mm(v.file, mm)
    if error == 0:
        vma_put(mm, v)
    if error == 0 and v.flags & VM_PFNMAP:
        error = remap_pfn_range(mm, vma_lookup(mm, v.start), v.start, v.end)
        if error:
            do_munmap(mm, v.start, v.end)
    elif error and v.flags & VM_HUGE_RESV:
        reserve_hugetlb(mm.m, v.order, -<int64_t>(length >> mm.m.page_shift >> v.order))
    if error == 0 and v.flags & VM_LOCKED:
        a64_fetch_add_relaxed(&mm.locked_vm, length >> mm.m.page_shift)
    return error

cdef int remap_pfn_range(mm_t *mm, vma_t *v, uint64_t start, uint64_t end) noexcept nogil:
    """Map raw PFNs: special entries, which count nothing."""
    cdef mem_t *m = mm.m
    cdef uint64_t table, bits = PTE_PRESENT | PTE_USER | PTE_ACCESSED | PTE_SPECIAL
    cdef uint64_t *entry
    cdef int error
    if not v.flags & (VM_READ | VM_WRITE | VM_EXEC):
        bits = (bits & ~PTE_PRESENT) | PTE_PROTNONE
    if v.flags & VM_WRITE and v.flags & VM_SHARED:
        bits |= PTE_RW
    while start < end:
        table = table_make(&mm.pgd, start, 0, &error)
        if table == 0:
            return error
        entry = table_at(m, table) + table_index(&mm.pgd, start, 0)
        table_lock(m, table)
        if a64_load_relaxed(entry) == 0:
            table_used(m, table)[0] += 1
        a64_store_release(entry, (file_look(v.file, page_index(mm, v, start)) << PTE_PFN_SHIFT) | bits)
        table_unlock(m, table)
        start += ONE << m.page_shift
    return 0

cdef unsigned hugetlb_order(MM self, uint64_t flags) except 0:
    cdef mem_t *m = self.mm.m
    cdef unsigned log = <unsigned>(flags >> MAP_HUGE_SHIFT) & MAP_HUGE_MASK
    size = (ONE << m.page_shift) << m.pmd_order if log == 0 else <object>1 << log
    pools = self.mem.hugetlb_pools()
    if size not in pools:
        raise InvalidArgument(f"MAP_HUGETLB: no pool of {format_size(size)} pages "
                              f"(there are {', '.join(map(format_size, pools)) or 'none'}): "
                              "make the Memory with hugetlb={size: number}")
    order = (size >> m.page_shift).bit_length() - 1
    if order != m.pmd_order and order != 2 * m.pmd_order:
        raise InvalidArgument(f"hugetlb pages of {format_size(size)} have no leaf of their own: only PMD and PUD sizes can be mapped")
    return order

cdef object check_file(File file, file_t *f, bint shared, uint64_t prot, uint64_t offset):
    if f.gone:
        raise MMError(_errno.ENODEV, f"the device of the {file.kind} file was removed")
    if not shared and f.kind in (FILE_DEVDAX, FILE_SECRETMEM):
        raise InvalidArgument(f"a {file.kind} file is mapped with MAP_SHARED only")
    if not shared and f.kind in (FILE_PFNMAP, FILE_IOMEM):
        raise InvalidArgument(f"a private mapping of a {file.kind} file could be written one day, and copying needs struct pages: "
                              "map it with MAP_SHARED")
    if f.order and offset & (((ONE << f.m.page_shift) << f.order) - 1):
        raise InvalidArgument(f"offset {offset:#x} is no multiple of the huge page size {file.page_size:#x}")
    if f.kind == FILE_DEVDAX and offset & (file.page_size - 1):
        raise InvalidArgument(f"offset {offset:#x} is no multiple of the device's alignment {file.page_size:#x}")

cdef uint64_t place_arg(MM self, object addr, uint64_t length, uint64_t align, bint fixed, uint64_t flags) except? 0:
    """Where it should go; 0: anywhere."""
    cdef mm_t *mm = self.mm
    cdef uint64_t at
    if addr is None:
        if fixed:
            raise InvalidArgument("MAP_FIXED needs addr=")
        return 0
    at = count_arg(addr, "addr", 0, ~<uint64_t>0)
    if fixed and at & (align - 1):
        raise InvalidArgument(f"MAP_FIXED at {at:#x}, which is no multiple of {align:#x}", addr=at)
    if at > task_size(&mm.pgd) or length > task_size(&mm.pgd) - at:
        if fixed:
            raise MMError(_errno.ENOMEM, f"MAP_FIXED at {at:#x}: {length:#x} bytes leave the address space, which ends at "
                                         f"{task_size(&mm.pgd):#x}", addr=at)
        return 0
    if fixed and at < 0x10000:
        raise MMError(_errno.EPERM, f"MAP_FIXED at {at:#x}: below vm.mmap_min_addr (0x10000)", addr=at)
    return at & ~(align - 1)
