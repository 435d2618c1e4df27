"""Arguments and errors of the calls on an address space."""
from libc.errno cimport EINVAL, ENOMEM
from mmcore.core.fault cimport EHWPOISON
from mmcore.core.filemap cimport file_pages
from mmcore.core.folio cimport count_arg
from mmcore.core.pgtable cimport *
from mmcore.core.vma cimport range_hole, vma_find, vma_granule, vma_lookup

import errno as _errno

from .errors import InvalidArgument, MMError
from .file import KIND_NAMES
from .size import format_size, parse_size
from .space import VM

cdef int range_arg(const mm_t *mm, object addr, object length, str call, uint64_t *start, uint64_t *end) except -1:
    """An aligned address and a length rounded up to pages, within the address space."""
    cdef uint64_t page = ONE << mm.m.page_shift
    start[0] = count_arg(addr, "addr", 0, ~<uint64_t>0)
    size = parse_size(length, "length")
    if start[0] & (page - 1):
        raise InvalidArgument(f"{call} at {start[0]:#x}, which is no multiple of the page size ({page:#x})", addr=start[0])
    if size > task_size(&mm.pgd) or start[0] > task_size(&mm.pgd) - (<uint64_t>size + page - 1 & ~(page - 1)):
        raise InvalidArgument(f"{call}: {size:#x} bytes from {start[0]:#x} on leave the address space, which ends at "
                              f"{task_size(&mm.pgd):#x}", addr=start[0])
    end[0] = start[0] + (<uint64_t>size + page - 1 & ~(page - 1))
    return 0

cdef object no_frames(Memory mem, str what):
    total = sum([zone.free for zone in mem.zones])
    return MMError(_errno.ENOMEM, f"no frame for {what}: {total} pages are free, blocks by order {mem.buddyinfo()}. Free some, "
                                  "or make a larger Memory")

cdef object access_error(Memory mem, const mm_t *mm, int error, uint64_t addr, bint write, str call):
    cdef vma_t *v = vma_lookup(mm, addr)
    what = f"{call}: {'write to' if write else 'read of'} {addr:#x}"
    if error == -ENOMEM:
        refusal = no_frames(mem, f"{addr:#x}")
        return MMError(_errno.ENOMEM, f"{what}: {refusal.strerror.partition(': ')[2]}", addr=addr)
    if error == FAULT_SIGSEGV:
        if v == NULL:
            i = vma_find(mm, addr)
            next_one = f"; the next mapping starts at {mm.vma[i].start:#x}" if i < mm.nr_vmas else ""
            return MMError(_errno.EFAULT, f"{what}: nothing is mapped there{next_one} (SIGSEGV)", addr=addr)
        return MMError(_errno.EFAULT, f"{what}: the mapping {v.start:#x}-{v.end:#x} does not allow it (its protection is "
                                      f"{VM(v.flags & 7)!r}): mprotect() it first (SIGSEGV)", addr=addr)
    if error == FAULT_SIGBUS:
        return MMError(_errno.EFAULT, f"{what}: {sigbus_reason(mm, addr)} (SIGBUS)", addr=addr)
    if error == -EHWPOISON:
        return MMError(_errno.EFAULT, f"{what}: the page there is broken (hwpoison; SIGBUS); munmap() it, or map something else "
                                      "in its place", addr=addr)
    return MMError(-error, what, addr=addr)

cdef object sigbus_reason(const mm_t *mm, uint64_t addr):
    cdef vma_t *v = vma_lookup(mm, addr)
    cdef uint64_t offset
    if v == NULL:
        return "nothing is mapped there"
    if v.file == NULL or (v.file.kind == FILE_HUGETLBFS and page_index(mm, v, addr) < file_pages(v.file)):
        return (f"the pool of {format_size((ONE << mm.m.page_shift) << v.order)} pages is empty: release some, or make "
                "the Memory with a larger one")
    if v.file.gone:
        return "the device behind the mapping was removed"
    offset = page_index(mm, v, addr) << mm.m.page_shift
    return (f"offset {offset:#x} is beyond the end of the {KIND_NAMES[v.file.kind]} file "
            f"({v.file.size:#x} bytes): it was truncated, or never as long")

cdef object shape_error(const mm_t *mm, int error, str call, uint64_t start, uint64_t end):
    cdef uint64_t hole = range_hole(mm, start, end)
    cdef vma_t *v
    if error == -EINVAL:
        v = vma_lookup(mm, start)
        if v == NULL or start & (vma_granule(mm, v) - 1) == 0:
            v = vma_lookup(mm, end - 1)
        size = f" of {vma_granule(mm, v):#x} bytes" if v != NULL else ""
        return InvalidArgument(f"{call}: {start:#x}-{end:#x} cuts a huge page{size} that cannot be split", addr=start)
    if error == -ENOMEM and hole < end and call != "munmap()":
        return MMError(_errno.ENOMEM, f"{call}: nothing is mapped at {hole:#x}. Nothing was changed", addr=hole)
    if error == -ENOMEM:
        return MMError(_errno.ENOMEM, f"{call}: no frame for the page table that splitting a huge page takes, or more than "
                                      f"{MAX_MAP_COUNT} mappings", addr=start)
    return MMError(-error, f"{call} of {start:#x}-{end:#x}", addr=start)
