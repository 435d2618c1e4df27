"""Arguments and errors of the calls on an address space."""
from libc.errno cimport EAGAIN, EFAULT, EINVAL, ENOMEM
from libc.stdlib cimport malloc
from libc.string cimport memset
from mmcore.core.fault cimport EHWPOISON
from mmcore.core.folio cimport count_arg
from mmcore.core.pgtable cimport *
from mmcore.core.vma cimport range_hole, vma_find, vma_granule

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

# ---- what is there now ------------------------------------------------------------------------------------------------------
cdef void copy_vma(mm_t *mm, const vma_t *v, seen_t *seen) noexcept nogil:
    cdef file_t *f = v.file
    memset(seen, 0, sizeof(seen_t))
    seen.v.start, seen.v.end, seen.v.flags, seen.v.pgoff, seen.v.file, seen.v.order = v.start, v.end, v.flags, v.pgoff, f, v.order
    seen.there = True
    seen.nr_vmas = mm.nr_vmas
    seen.granule = vma_granule(mm, v)
    if f != NULL:
        pthread_mutex_lock(&f.lock)
        seen.file_id, seen.file_size, seen.file_kind, seen.file_gone = f.id, f.size, f.kind, f.gone
        pthread_mutex_unlock(&f.lock)

cdef void vma_see(mm_t *mm, uint64_t addr, seen_t *seen) noexcept nogil:
    cdef uint64_t i
    memset(seen, 0, sizeof(seen_t))
    if mmap_read_lock(mm):
        return
    i = vma_find(mm, addr)
    if i < mm.nr_vmas:
        copy_vma(mm, &mm.vma[i], seen)
        seen.there = seen.v.start <= addr
    seen.nr_vmas = mm.nr_vmas
    mmap_unlock(mm)

cdef int64_t vma_see_all(mm_t *mm, seen_t **all) noexcept nogil:
    cdef int64_t i, nr
    if mmap_read_lock(mm):
        return -ESRCH
    nr = <int64_t>mm.nr_vmas
    all[0] = <seen_t *>malloc((nr + 1) * sizeof(seen_t))
    if all[0] != NULL:
        for i in range(nr):
            copy_vma(mm, &mm.vma[i], &all[0][i])
    mmap_unlock(mm)
    return nr if all[0] != NULL else -ENOMEM

cdef uint64_t hole_seen(mm_t *mm, uint64_t start, uint64_t end) noexcept nogil:
    cdef uint64_t hole
    if mmap_read_lock(mm):
        return start
    hole = range_hole(mm, start, end)
    mmap_unlock(mm)
    return hole

# ---- words ------------------------------------------------------------------------------------------------------------------
cdef object access_error(Memory mem, mm_t *mm, int error, uint64_t addr, bint write, str call):
    cdef seen_t seen
    with nogil:
        vma_see(mm, addr, &seen)
    what = f"{call}: {'write to' if write else 'read of'} {addr:#x}"
    if error == -ENOMEM:
        refusal = no_frames(mem, f"{addr:#x}")
        return MMError(_errno.ENOMEM, f"{what}: {refusal.strerror.partition(': ')[2]}", addr=addr)
    if error == FAULT_SIGSEGV:
        if not seen.there:
            next_one = f"; the next mapping starts at {seen.v.start:#x}" if seen.v.start else ""
            return MMError(_errno.EFAULT, f"{what}: nothing is mapped there{next_one} (SIGSEGV)", addr=addr)
        return MMError(_errno.EFAULT, f"{what}: the mapping {seen.v.start:#x}-{seen.v.end:#x} does not allow it (its protection is "
                                      f"{VM(seen.v.flags & 7)!r}): mprotect() it first (SIGSEGV)", addr=addr)
    if error == FAULT_SIGBUS:
        return MMError(_errno.EFAULT, f"{what}: {sigbus_reason(mm, &seen, addr)} (SIGBUS)", addr=addr)
    if error == -EHWPOISON:
        return MMError(_errno.EFAULT, f"{what}: the page there is broken (hwpoison; SIGBUS); munmap() it, or map something else "
                                      "in its place", addr=addr)
    return MMError(-error, what, addr=addr)

cdef object sigbus_reason(const mm_t *mm, const seen_t *seen, uint64_t addr):
    cdef uint64_t offset
    if not seen.there:
        return "nothing is mapped there"
    offset = page_index(mm, &seen.v, addr) << mm.m.page_shift
    if seen.v.file == NULL or (seen.file_kind == FILE_HUGETLBFS and offset < seen.file_size):
        return (f"the pool of {format_size((ONE << mm.m.page_shift) << seen.v.order)} pages is empty: release some, or make "
                "the Memory with a larger one")
    if seen.file_gone:
        return "the device behind the mapping was removed"
    return (f"offset {offset:#x} is beyond the end of the {KIND_NAMES[seen.file_kind]} file "
            f"({seen.file_size:#x} bytes): it was truncated, or never as long")

cdef object shape_error(mm_t *mm, int error, str call, uint64_t start, uint64_t end):
    cdef uint64_t hole
    cdef seen_t seen
    with nogil:
        hole = hole_seen(mm, start, end)
        vma_see(mm, start, &seen)
        if not seen.there or start & (seen.granule - 1) == 0:
            vma_see(mm, end - 1, &seen)
    if error == -EINVAL:
        size = f" of {seen.granule:#x} bytes" if seen.there else ""
        return InvalidArgument(f"{call}: {start:#x}-{end:#x} cuts a huge page{size} that cannot be split", addr=start)
    if error == -ENOMEM and hole < end and call != "munmap()":
        return MMError(_errno.ENOMEM, f"{call}: nothing is mapped at {hole:#x}. Nothing was changed", addr=hole)
    if error == -ENOMEM:
        return MMError(_errno.ENOMEM, f"{call}: no frame for the page table that splitting a huge page takes, or more than "
                                      f"{MAX_MAP_COUNT} mappings", addr=start)
    return MMError(-error, f"{call} of {start:#x}-{end:#x}", addr=start)

cdef object mremap_error(int error, uint64_t start, uint64_t end, uint64_t new_size):
    if error == -EFAULT:
        return MMError(_errno.EFAULT, f"mremap(): {start:#x}-{end:#x} is not inside one mapping, or is of a kind that cannot grow",
                       addr=start)
    if error == -EINVAL:
        return InvalidArgument(f"mremap() of {start:#x}-{end:#x} to {new_size:#x} bytes: old and new overlap, or it cuts a huge page "
                               "of hugetlb or of a device, or it would make a hugetlb mapping longer", addr=start)
    return MMError(-error, f"mremap() of {start:#x}-{end:#x} to {new_size:#x} bytes: no room in the address space, or no frames for "
                           "page tables", addr=start)

cdef object madvise_error(Memory mem, mm_t *mm, int error, str name, int what, uint64_t start, uint64_t end, uint64_t at):
    cdef seen_t seen
    cdef uint64_t hole
    if error == -EINVAL:
        return InvalidArgument(f"madvise({name}) at {at:#x}: the mapping there does not take this advice (its flags, alignment "
                               "or protection), or nothing there can be collapsed", addr=at)
    with nogil:
        vma_see(mm, at, &seen)
        hole = hole_seen(mm, start, end)
    if error == -ENOMEM and at == start and seen.nr_vmas + 2 > MAX_MAP_COUNT and what in (
            MADV_DONTFORK, MADV_DOFORK, MADV_HUGEPAGE, MADV_NOHUGEPAGE):
        return MMError(_errno.ENOMEM, f"madvise({name}) of {start:#x}-{end:#x}: it makes up to 2 mappings more, and there are "
                                      f"{seen.nr_vmas} of at most {MAX_MAP_COUNT}: give neighbours the same advice, or unmap some. "
                                      "Nothing was changed", addr=at)
    if error == -ENOMEM and hole < end:
        return MMError(_errno.ENOMEM, f"madvise({name}): nothing is mapped at {hole:#x}", addr=at)
    if error == -EAGAIN:
        return MMError(_errno.EAGAIN, f"madvise({name}) at {at:#x}: a page is pinned, or somebody else holds a reference", addr=at)
    if error == -EFAULT:
        return access_error(mem, mm, FAULT_SIGBUS, at, what == MADV_POPULATE_WRITE, f"madvise({name})")
    if error == -EHWPOISON:
        return MMError(EHWPOISON, f"madvise({name}) at {at:#x}: the page there is broken (hwpoison)", addr=at)
    return MMError(-error, f"madvise({name}) at {at:#x}: no frame for a page or a table", addr=at)
