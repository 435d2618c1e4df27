"""The registry of address spaces, families, files and swap in one Memory; the constants under their kernel names.

Units: bits of unsigned int, of VM unsigned long, with the values of x86-64.
Raises: nothing but what enums raise.
Threads: plain values.
Kernel: mman.h, mman-common.h; VM: mm.h.
"""
from libc.errno cimport ENOMEM
from libc.stdlib cimport free, realloc

import enum

__all__ = ["PROT", "MAP", "MADV", "VM"]


class PROT(enum.IntFlag):
    """Name the PROT_* protections."""
    NONE = PROT_NONE
    READ = PROT_READ
    WRITE = PROT_WRITE
    EXEC = PROT_EXEC


class MAP(enum.IntFlag):
    """Name the MAP_* flags (x86-64); HUGE_2MB and the like go with HUGETLB."""
    SHARED = MAP_SHARED
    PRIVATE = MAP_PRIVATE
    SHARED_VALIDATE = MAP_SHARED_VALIDATE
    FIXED = MAP_FIXED
    ANONYMOUS = MAP_ANONYMOUS
    LOCKED = MAP_LOCKED
    NORESERVE = MAP_NORESERVE
    POPULATE = MAP_POPULATE
    NONBLOCK = MAP_NONBLOCK
    STACK = MAP_STACK
    HUGETLB = MAP_HUGETLB
    SYNC = MAP_SYNC
    FIXED_NOREPLACE = MAP_FIXED_NOREPLACE
    HUGE_64KB = 16 << MAP_HUGE_SHIFT
    HUGE_2MB = 21 << MAP_HUGE_SHIFT
    HUGE_32MB = 25 << MAP_HUGE_SHIFT
    HUGE_512MB = 29 << MAP_HUGE_SHIFT
    HUGE_1GB = 30 << MAP_HUGE_SHIFT


class MADV(enum.IntEnum):
    """Name the MADV_* advice."""
    NORMAL = MADV_NORMAL
    RANDOM = MADV_RANDOM
    SEQUENTIAL = MADV_SEQUENTIAL
    WILLNEED = MADV_WILLNEED
    DONTNEED = MADV_DONTNEED
    FREE = MADV_FREE
    DONTFORK = MADV_DONTFORK
    DOFORK = MADV_DOFORK
    HUGEPAGE = MADV_HUGEPAGE
    NOHUGEPAGE = MADV_NOHUGEPAGE
    COLD = MADV_COLD
    PAGEOUT = MADV_PAGEOUT
    POPULATE_READ = MADV_POPULATE_READ
    POPULATE_WRITE = MADV_POPULATE_WRITE
    COLLAPSE = MADV_COLLAPSE


class VM(enum.IntFlag):
    """Name the vm_flags of a VMA."""
    READ = VM_READ
    WRITE = VM_WRITE
    EXEC = VM_EXEC
    SHARED = VM_SHARED
    MAYREAD = VM_MAYREAD
    MAYWRITE = VM_MAYWRITE
    MAYEXEC = VM_MAYEXEC
    MAYSHARE = VM_MAYSHARE
    PFNMAP = VM_PFNMAP
    LOCKED = VM_LOCKED
    IO = VM_IO
    DONTCOPY = VM_DONTCOPY
    DONTEXPAND = VM_DONTEXPAND
    NORESERVE = VM_NORESERVE
    HUGETLB = VM_HUGETLB
    SOFTDIRTY = VM_SOFTDIRTY
    MIXEDMAP = VM_MIXEDMAP
    HUGEPAGE = VM_HUGEPAGE
    NOHUGEPAGE = VM_NOHUGEPAGE
    HUGE_RESV = VM_HUGE_RESV


for _names in (PROT, MAP, MADV):
    globals().update({f"{_names.__name__}_{name}": value for name, value in _names.__members__.items()})
    __all__ += [f"{_names.__name__}_{name}" for name in _names.__members__]

cdef bint grow(mem_t *m, void **array, uint64_t *room, uint64_t wanted, uint64_t item) noexcept nogil:
    """Make room for `wanted` items in an array that grows by half; False when there is no memory.

    A failure can be injected into each call, also into one that has the room: what follows must not depend on history.
    """
    cdef uint64_t size = room[0] + (room[0] >> 1) + 8
    cdef void *at
    if mm_unlikely(inject_fails(m, INJECT_ALLOC)):
        return False
    if wanted <= room[0]:
        return True
    if size < wanted:
        size = wanted
    at = realloc(array[0], size * item)
    if at == NULL:
        return False
    array[0] = at
    room[0] = size
    return True

cdef void spaces_free(mem_t *m) noexcept nogil:
    """The Memory goes: what is malloc'ed goes with it. mms and files are their objects' and find their Memory closed."""
    cdef spaces_t *s = spaces_of(m)
    cdef uint64_t i
    cdef mm_t *mm = s.first
    while mm != NULL:
        mm.family = NULL
        mm = mm.next_all
    for i in range(s.nr_families):
        free(s.family[i])
    for i in range(1, s.swap.nr_slots):
        free(s.swap.bytes[i])
    free(s.family)
    free(s.file)
    free(s.swap.count)
    free(s.swap.bytes)
    free(s.swap.free)
    pthread_mutex_destroy(&s.lock)
    pthread_mutex_destroy(&s.swap.lock)
    free(s)
    m.spaces = NULL

cdef spaces_t *spaces_get(mem_t *m) noexcept nogil:
    """Called with the GIL by the first MM or File of a Memory: nobody else makes it meanwhile."""
    cdef spaces_t *s = spaces_of(m)
    if s != NULL:
        return s
    s = <spaces_t *>mem_calloc(m, 1, sizeof(spaces_t))
    if s == NULL:
        return NULL
    pthread_mutex_init(&s.lock, NULL)
    pthread_mutex_init(&s.swap.lock, NULL)
    # Id 0 is nobody's, so that mapping 0 stays "not mapped"; slot 0 of swap is never handed out.
    s.nr_families = 1
    s.nr_files = 1
    s.swap.nr_slots = 1
    if not grow(m, <void **>&s.family, &s.families_room, 1, sizeof(void *)) \
            or not grow(m, <void **>&s.file, &s.files_room, 1, sizeof(void *)):
        free(s.family)
        free(s)
        return NULL
    s.family[0] = NULL
    s.file[0] = NULL
    s.next_iomem = (m.nr_pages + (ONE << 20)) & ~((ONE << 20) - 1)
    m.spaces_free = spaces_free
    m.spaces = s
    return s

# ---- families ---------------------------------------------------------------------------------------------------------
cdef int family_join(mm_t *mm, family_t *family) noexcept nogil:
    cdef spaces_t *s = spaces_of(mm.m)
    if family == NULL:
        family = <family_t *>mem_calloc(mm.m, 1, sizeof(family_t))
        if family == NULL:
            return -ENOMEM
        pthread_mutex_init(&family.lock, NULL)
        pthread_mutex_lock(&s.lock)
        if not grow(mm.m, <void **>&s.family, &s.families_room, s.nr_families + 1, sizeof(void *)):
            pthread_mutex_unlock(&s.lock)
            free(family)
            return -ENOMEM
        family.id = s.nr_families
        s.family[s.nr_families] = family
        s.nr_families += 1
        pthread_mutex_unlock(&s.lock)
    pthread_mutex_lock(&family.lock)
    family_join_locked(mm, family)
    pthread_mutex_unlock(&family.lock)
    return 0

cdef void family_join_locked(mm_t *mm, family_t *family) noexcept nogil:
    cdef spaces_t *s = spaces_of(mm.m)
    mm.family = family
    mm.anon_id = (family.id << 2) | FOLIO_MAPPING_ANON
    mm.prev = NULL
    mm.next = family.first
    if family.first != NULL:
        family.first.prev = mm
    family.first = mm
    pthread_mutex_lock(&s.lock)
    family.nr += 1
    pthread_mutex_unlock(&s.lock)

cdef void family_drop(spaces_t *s, family_t *family) noexcept nogil:
    """One holder less; the last frees it.

    The registry's lock is never held while a family's is waited for: fork holds that one for long, and waits for tables'
    locks, under which walks ask the registry about files.
    """
    cdef bint last
    pthread_mutex_lock(&s.lock)
    family.nr -= 1
    last = family.nr == 0
    if last:
        s.family[family.id] = NULL
    pthread_mutex_unlock(&s.lock)
    if last:
        pthread_mutex_destroy(&family.lock)
        free(family)

cdef void family_leave(mm_t *mm) noexcept nogil:
    """Leave; a walker that found the family keeps it until it is done."""
    cdef family_t *family = mm.family
    if family == NULL:
        return
    pthread_mutex_lock(&family.lock)
    if mm.prev != NULL:
        mm.prev.next = mm.next
    else:
        family.first = mm.next
    if mm.next != NULL:
        mm.next.prev = mm.prev
    pthread_mutex_unlock(&family.lock)
    mm.family = NULL
    family_drop(spaces_of(mm.m), family)

cdef family_t *family_get(mem_t *m, uint64_t mapping) noexcept nogil:
    cdef spaces_t *s = spaces_of(m)
    cdef uint64_t id = mapping >> 2
    cdef family_t *family = NULL
    if s == NULL:
        return NULL
    pthread_mutex_lock(&s.lock)
    if id < s.nr_families:
        family = s.family[id]
        if family != NULL:
            family.nr += 1
    pthread_mutex_unlock(&s.lock)
    if family != NULL:
        pthread_mutex_lock(&family.lock)
    return family

cdef void family_put(mem_t *m, family_t *family) noexcept nogil:
    pthread_mutex_unlock(&family.lock)
    family_drop(spaces_of(m), family)

# ---- files and mms ------------------------------------------------------------------------------------------------------
cdef file_t *file_get(mem_t *m, uint64_t mapping) noexcept nogil:
    cdef spaces_t *s = spaces_of(m)
    cdef uint64_t id = mapping >> 2
    cdef file_t *f = NULL
    if s == NULL:
        return NULL
    pthread_mutex_lock(&s.lock)
    if id < s.nr_files:
        f = s.file[id]
    pthread_mutex_unlock(&s.lock)
    return f

cdef int file_register(file_t *f) noexcept nogil:
    cdef spaces_t *s = spaces_of(f.m)
    cdef int error = 0
    pthread_mutex_lock(&s.lock)
    if grow(f.m, <void **>&s.file, &s.files_room, s.nr_files + 1, sizeof(void *)):
        f.id = s.nr_files
        s.file[s.nr_files] = f
        s.nr_files += 1
    else:
        error = -ENOMEM
    pthread_mutex_unlock(&s.lock)
    return error

cdef void file_unregister(file_t *f) noexcept nogil:
    cdef spaces_t *s = spaces_of(f.m)
    pthread_mutex_lock(&s.lock)
    s.file[f.id] = NULL
    pthread_mutex_unlock(&s.lock)

cdef void mm_register(mm_t *mm) noexcept nogil:
    cdef spaces_t *s = spaces_of(mm.m)
    pthread_mutex_lock(&s.lock)
    mm.prev_all = NULL
    mm.next_all = s.first
    if s.first != NULL:
        s.first.prev_all = mm
    s.first = mm
    s.nr_mms += 1
    pthread_mutex_unlock(&s.lock)

cdef void mm_unregister(mm_t *mm) noexcept nogil:
    cdef spaces_t *s = spaces_of(mm.m)
    pthread_mutex_lock(&s.lock)
    if mm.prev_all != NULL:
        mm.prev_all.next_all = mm.next_all
    else:
        s.first = mm.next_all
    if mm.next_all != NULL:
        mm.next_all.prev_all = mm.prev_all
    s.nr_mms -= 1
    pthread_mutex_unlock(&s.lock)
