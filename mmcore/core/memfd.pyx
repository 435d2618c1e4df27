"""memfd_pin_folios: pins on the folios of a memory file, without an address space.

Units: start, end: offsets in bytes, end included.
Raises: TypeError, InvalidArgument, MMError.
Threads: any number at once; the file's lock.
Kernel: memfd_pin_folios().
"""
from libc.errno cimport EAGAIN, EINTR, EINVAL, ENOMEM
from libc.stdint cimport uint64_t
from libc.stdlib cimport free
from mmcore.core.file cimport File
from mmcore.core.filemap cimport file_page
from mmcore.core.folio cimport *
from mmcore.core.gup_walk cimport WHY_MIGRATE
from mmcore.core.hook cimport pin_watchers, pins_add, pins_begin, pins_t, pins_tell
from mmcore.core.lock cimport raise_pending
from mmcore.core.migrate cimport check_and_migrate
from mmcore.core.output cimport leaf_pfn, leaf_word, release_leaves
from mmcore.core.space cimport *


from .errors import InvalidArgument, MMError

__all__ = ["memfd_pin_folios"]

cdef enum:
    MAX_ROUNDS = 100

cdef struct pinned_t:           # folios of a file, one pin each, as leaf words of one page
    uint64_t *leaf
    uint64_t nr
    uint64_t room
    uint64_t offset             # of the start in the first folio
    uint64_t bad                # PFN, or index in the file
    int why

cdef int pin_one(file_t *f, uint64_t index, pinned_t *p, uint64_t *next) noexcept nogil:
    """Find or make the folio of an index, and pin it once. The lock of the file makes the two one step: a folio that
    somebody else makes meanwhile is found."""
    cdef mem_t *m = f.m
    cdef uint64_t pfn = 0, head
    cdef int error
    if not grow(f.m, <void **>&p.leaf, &p.room, p.nr + 1, sizeof(uint64_t)):
        return -ENOMEM
    pthread_mutex_lock(&f.lock)
    error = file_page(f, index, spaces_of(m).shmem_thp == THP_ALWAYS, &pfn)
    if error == 0:
        head = compound_head_pfn(m.map, pfn)
        p.bad = head
        # The cache's reference keeps it while we hold the lock; what fails is a counter at its end.
        error = -EINVAL if grab_folio(m, head, 1, FOLL_PIN) else 0
        next[0] = index + (ONE << folio_order_of(&m.map[head])) - (pfn - head)
        if p.nr == 0:
            p.offset = (pfn - head) << m.page_shift
    elif error == FAULT_SIGBUS:
        error = -ENOMEM if f.kind == FILE_HUGETLBFS and index < (f.size >> m.page_shift) else -EINVAL
    pthread_mutex_unlock(&f.lock)
    if error == 0:
        p.leaf[p.nr] = leaf_word(head, 1)
        p.nr += 1
    return error

cdef int pin_folios(file_t *f, uint64_t start, uint64_t end, uint64_t most, pinned_t *p) noexcept nogil:
    cdef mem_t *m = f.m
    cdef uint64_t index, last = end >> m.page_shift
    cdef int error = 0, rounds
    for rounds in range(MAX_ROUNDS):  # no-cython-lint
        p.nr = 0
        index = start >> m.page_shift
        while index <= last and p.nr < most and error == 0:
            error = pin_one(f, index, p, &index)
        if error:
            release_leaves(m, p.leaf, p.nr, True)
            return error
        error = check_and_migrate(m, p.leaf, p.nr, False, &p.bad, &p.why)
        if error != -EAGAIN:
            return error
        error = 0
    p.why = WHY_MIGRATE
    return -ENOMEM


def memfd_pin_folios(File file not None, start, end, max_folios):
    """Pin the folios that hold bytes start..end (inclusive) of a tmpfs or hugetlbfs file, once each, long-term.

    Returns (list of Folio, offset of `start` in the first one). Missing pages are made; folios in Movable or CMA memory are
    moved out first. At most max_folios: fewer may cover less than the range. Release with unpin_folios(). Raises
    InvalidArgument for other kinds, a range that is empty or leaves the file, max_folios 0; MMError(ENOMEM).
    Kernel: memfd_pin_folios().
    """
    cdef file_t *f = file.ptr()
    cdef uint64_t first = count_arg(start, "start", 0, (ONE << 63) - 1), last = count_arg(end, "end", 0, (ONE << 63) - 1), i
    cdef uint64_t most = count_arg(max_folios, "max_folios", 1, ONE << 32)
    cdef pinned_t p
    cdef pins_t taken
    cdef int error
    if f.kind != FILE_TMPFS and f.kind != FILE_HUGETLBFS:
        raise InvalidArgument(f"memfd_pin_folios() of a {file.kind} file: it is for tmpfs and hugetlbfs")
    if first > last or last >= f.size:
        raise InvalidArgument(f"memfd_pin_folios(): bytes {first:#x}..{last:#x} are no range within the file ({f.size:#x} bytes)")
    p.leaf = NULL
    p.nr = p.room = p.offset = p.bad = 0
    p.why = 0
    file.mem.enter()
    with nogil:
        error = pin_folios(f, first, last, most, &p)
    file.mem.leave()
    try:
        if error == -EINTR:
            raise_pending()
        if error == -EINVAL:
            raise InvalidArgument(f"memfd_pin_folios(): a page of bytes {first:#x}..{last:#x} is gone (the file was truncated), "
                                  "or its counter would overflow. Nothing is pinned")
        if error:
            why = ("a folio in Movable or CMA memory is held or pinned by somebody else and cannot be moved" if p.why == WHY_MIGRATE
                   else "no free page for the file, or to move one of its folios to; or its hugetlb pool is empty")
            raise MMError(-error, f"memfd_pin_folios() of bytes {first:#x}..{last:#x}: {why}. Nothing is pinned",
                          pfn=p.bad or None)
        folios = [folio_handle(file.mem, leaf_pfn(p.leaf[i])) for i in range(p.nr)]
        if mm_unlikely(pin_watchers):
            pins_begin(&taken)
            for i in range(p.nr):
                pins_add(&taken, leaf_pfn(p.leaf[i]), 1)
            pins_tell(file.mem, &taken, 1)
        return folios, p.offset + (first & ((ONE << f.m.page_shift) - 1))
    finally:
        free(p.leaf)
