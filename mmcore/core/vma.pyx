"""VMAs, and what gives an address space its shape."""
from libc.errno cimport EINVAL, ENOMEM
from libc.string cimport memmove
from mmcore.core.buddy cimport reserve_hugetlb
from mmcore.core.filemap cimport file_add_mm, file_del_mm
from mmcore.core.pgtable cimport *
from mmcore.core.zap cimport hugetlb_missing, split_at, zap_begin, zap_end, zap_range, zap_t

cdef enum:
    MMAP_MIN_ADDR = 0x10000

# ---- the array ----------------------------------------------------------------------------------------------------------
cdef bint room_for(mm_t *mm, uint64_t nr) noexcept nogil:
    """Make room for more VMAs. Readers that come from a page hold rmap_lock, and the array may move."""
    cdef bint ok
    if mm.nr_vmas + nr > MAX_MAP_COUNT:
        return False
    if mm.nr_vmas + nr <= mm.vmas_room:
        return not inject_fails(mm.m, INJECT_ALLOC)
    pthread_mutex_lock(&mm.rmap_lock)
    ok = grow(mm.m, <void **>&mm.vma, &mm.vmas_room, mm.nr_vmas + nr, sizeof(vma_t))
    pthread_mutex_unlock(&mm.rmap_lock)
    return ok

cdef bint same_kind(mm_t *mm, const vma_t *a, const vma_t *b) noexcept nogil:
    """Could these neighbours be one VMA?"""
    cdef uint64_t differ = (a.flags ^ b.flags) & ~VM_SOFTDIRTY
    return a.end == b.start and differ == 0 and a.file == b.file and a.order == b.order \
        and a.pgoff + ((a.end - a.start) >> mm.m.page_shift) == b.pgoff

cdef void vma_merge(mm_t *mm, uint64_t start, uint64_t end) noexcept nogil:
    cdef uint64_t i = vma_find(mm, start - 1 if start else 0)
    cdef vma_t *a
    cdef vma_t *b
    cdef file_t *f
    # Borders in [start, end] only: who isolated a VMA beyond counts on it.
    while i + 1 < mm.nr_vmas and mm.vma[i + 1].start <= end:
        a = &mm.vma[i]
        b = &mm.vma[i + 1]
        if not same_kind(mm, a, b):
            i += 1
            continue
        f = a.file
        pthread_mutex_lock(&mm.rmap_lock)
        a.end = b.end
        a.flags |= b.flags & VM_SOFTDIRTY
        a.has_anon |= b.has_anon
        mm.nr_vmas -= 1
        memmove(b, b + 1, (mm.nr_vmas - i - 1) * sizeof(vma_t))
        pthread_mutex_unlock(&mm.rmap_lock)
        if f != NULL:
            file_del_mm(f, mm)

cdef int vma_ready(mm_t *mm, const vma_t *v) noexcept nogil:
    cdef bint ok
    pthread_mutex_lock(&mm.rmap_lock)
    ok = grow(mm.m, <void **>&mm.vma, &mm.vmas_room, mm.nr_vmas + 3, sizeof(vma_t))
    pthread_mutex_unlock(&mm.rmap_lock)
    return 0 if ok and (v.file == NULL or file_add_mm(v.file, mm) == 0) else -ENOMEM

cdef int vma_insert(mm_t *mm, const vma_t *v) noexcept nogil:
    cdef int error
    if mm.nr_vmas >= MAX_MAP_COUNT:
        return -ENOMEM
    error = vma_ready(mm, v)
    if error == 0:
        vma_put(mm, v)
    return error

cdef void vma_put(mm_t *mm, const vma_t *v) noexcept nogil:
    cdef uint64_t start = v.start, end = v.end, i = vma_find(mm, start)
    pthread_mutex_lock(&mm.rmap_lock)
    memmove(&mm.vma[i + 1], &mm.vma[i], (mm.nr_vmas - i) * sizeof(vma_t))
    mm.vma[i] = v[0]
    mm.nr_vmas += 1
    pthread_mutex_unlock(&mm.rmap_lock)
    vma_merge(mm, start, end)

cdef uint64_t vma_granule(const mm_t *mm, const vma_t *v) noexcept nogil:
    if v.flags & VM_HUGETLB:
        return (ONE << mm.m.page_shift) << v.order
    if v.file != NULL and v.file.kind == FILE_DEVDAX:
        return (ONE << mm.m.page_shift) << v.file.device.leaf_order
    return ONE << mm.m.page_shift

cdef int vma_split(mm_t *mm, uint64_t i, uint64_t addr) noexcept nogil:
    cdef vma_t *v = &mm.vma[i]
    cdef int error
    if addr <= v.start or addr >= v.end:
        return 0
    if addr & (vma_granule(mm, v) - 1):
        return -EINVAL
    if not room_for(mm, 1):
        return -ENOMEM
    v = &mm.vma[i]
    if v.file != NULL and file_add_mm(v.file, mm) != 0:
        return -ENOMEM
    error = split_at(mm, v, addr)
    if error:
        if v.file != NULL:
            file_del_mm(v.file, mm)
        return error
    pthread_mutex_lock(&mm.rmap_lock)
    memmove(&mm.vma[i + 1], &mm.vma[i], (mm.nr_vmas - i) * sizeof(vma_t))
    mm.nr_vmas += 1
    mm.vma[i].end = addr
    mm.vma[i + 1].pgoff += (addr - mm.vma[i + 1].start) >> mm.m.page_shift
    mm.vma[i + 1].start = addr
    pthread_mutex_unlock(&mm.rmap_lock)
    return 0

cdef void vma_remove(mm_t *mm, uint64_t first, uint64_t last) noexcept nogil:
    cdef uint64_t i
    for i in range(first, last):
        if mm.vma[i].file != NULL:
            file_del_mm(mm.vma[i].file, mm)
    if first == last:
        return              # there may be no array yet
    pthread_mutex_lock(&mm.rmap_lock)
    memmove(&mm.vma[first], &mm.vma[last], (mm.nr_vmas - last) * sizeof(vma_t))
    mm.nr_vmas -= last - first
    pthread_mutex_unlock(&mm.rmap_lock)

cdef int vma_isolate(mm_t *mm, uint64_t start, uint64_t end, uint64_t *first, uint64_t *last) noexcept nogil:
    cdef uint64_t i = vma_find(mm, start), j
    cdef int error
    if i < mm.nr_vmas and mm.vma[i].start < start:
        error = vma_split(mm, i, start)
        if error:
            return error
        i += 1
    j = vma_find(mm, end)
    if j < mm.nr_vmas and mm.vma[j].start < end:
        error = vma_split(mm, j, end)
        if error:
            vma_merge(mm, start, start)
            return error
        j += 1
    first[0] = i
    last[0] = j
    return 0

# ---- placing --------------------------------------------------------------------------------------------------------------
cdef uint64_t find_area(mm_t *mm, uint64_t length, uint64_t align) noexcept nogil:
    """A free range, from the hint downwards; from the top when nothing fits below."""
    cdef uint64_t top = task_size(&mm.pgd) & ~((ONE << 27) - 1), from_top, at, i
    for from_top in range(2):
        at = top if from_top else mm.hint
        while at >= length + MMAP_MIN_ADDR:
            at = (at - length) & ~(align - 1)
            if at < MMAP_MIN_ADDR:
                break
            i = vma_find(mm, at)
            if i == mm.nr_vmas or mm.vma[i].start >= at + length:
                mm.hint = at
                return at
            at = mm.vma[i].start
    return 0

# ---- unmapping ------------------------------------------------------------------------------------------------------------
cdef void unmap_vmas(mm_t *mm, uint64_t first, uint64_t last) noexcept nogil:
    """Zap VMAs [first, last), and give back what they promised and locked."""
    cdef zap_t z
    cdef vma_t *v
    cdef uint64_t i
    for i in range(first, last):
        v = &mm.vma[i]
        if v.flags & VM_HUGE_RESV:
            # A truncation of its file, which comes from the other side, promises again what it takes, or ends the promise.
            pthread_mutex_lock(&mm.rmap_lock)
            if v.flags & VM_HUGE_RESV:
                reserve_hugetlb(mm.m, v.order, -<int64_t>hugetlb_missing(mm, v, v.start, v.end))
                v.flags &= ~VM_HUGE_RESV
            pthread_mutex_unlock(&mm.rmap_lock)
        if v.flags & VM_LOCKED:
            a64_fetch_add_relaxed(&mm.locked_vm, <uint64_t>-<int64_t>((v.end - v.start) >> mm.m.page_shift))
        zap_begin(&z, mm)
        zap_range(&z, v, v.start, v.end)
        zap_end(&z)

cdef int do_munmap(mm_t *mm, uint64_t start, uint64_t end) noexcept nogil:
    cdef uint64_t first = 0, last = 0, floor, ceiling, low, high
    cdef dead_t dead
    cdef int error = vma_isolate(mm, start, end, &first, &last)
    if error:
        return error
    if first == last:
        return 0
    low = mm.vma[first].start
    high = mm.vma[last - 1].end
    floor = mm.vma[first - 1].end if first else 0
    ceiling = mm.vma[last].start if last < mm.nr_vmas else ONE << 63
    unmap_vmas(mm, first, last)
    vma_remove(mm, first, last)
    dead.first = dead.nr = 0
    tables_unlink(&mm.pgd, &dead, low, high, floor, ceiling)
    tables_free(&mm.pgd, &dead)
    if end > mm.hint:
        mm.hint = end
    return 0

cdef void exit_mmap(mm_t *mm) noexcept nogil:
    unmap_vmas(mm, 0, mm.nr_vmas)
    vma_remove(mm, 0, mm.nr_vmas)
    pgd_destroy(&mm.pgd)

# ---- protection -------------------------------------------------------------------------------------------------------------
cdef uint64_t protected_entry(mm_t *mm, const vma_t *v, uint64_t e, int level) noexcept nogil:
    """What an entry becomes under its VMA's new flags. Write comes back only where no fault needs to see it: for an
    exclusive anonymous page that is dirty and soft-dirty already, and for shared memory without dirty tracking."""
    cdef mem_t *m = mm.m
    cdef uint64_t pfn = pte_pfn(e), head
    e &= ~(PTE_PRESENT | PTE_PROTNONE)
    if not v.flags & (VM_READ | VM_WRITE | VM_EXEC):
        return (e & ~PTE_RW) | PTE_PROTNONE
    e |= PTE_PRESENT
    if not v.flags & VM_WRITE:
        return e & ~PTE_RW
    if v.flags & VM_SHARED:
        return e | PTE_RW if v.file == NULL or v.file.kind != FILE_EXT4 else e
    if e & PTE_SPECIAL or pfn >= m.nr_pages or e & PTE_DIRTY == 0 or e & PTE_SOFT_DIRTY == 0:
        return e
    head = compound_head_pfn(m.map, pfn)
    if folio_is_anon(&m.map[head]) and test_flag(&m.map[head if level else pfn], PG_owner_2):
        e |= PTE_RW
    return e

cdef void protect_table(mm_t *mm, const vma_t *v, uint64_t table, int level, uint64_t start, uint64_t end) noexcept nogil:
    cdef mem_t *m = mm.m
    cdef pgd_t *g = &mm.pgd
    cdef uint64_t at = start, next, e
    cdef uint64_t *entry
    if level == 0:
        table_lock(m, table)
    while at < end:
        next = level_end(g, at, end, level)
        entry = table_at(m, table) + table_index(g, at, level)
        e = a64_load_acquire(entry)
        if pte_table(e, level):
            protect_table(mm, v, pte_pfn(e), level - 1, at, next)
        elif pte_present(e):
            if level:
                table_lock(m, table)
            # The processor may have set accessed or dirty meanwhile; at level 0 and with mmap_lock that is settled.
            e = a64_load_relaxed(entry)
            if pte_leaf(e, level):
                a64_store_release(entry, protected_entry(mm, v, e, level))
            if level:
                table_unlock(m, table)
        at = next
    if level == 0:
        table_unlock(m, table)

cdef int do_mprotect(mm_t *mm, uint64_t start, uint64_t end, uint64_t prot) noexcept nogil:
    cdef uint64_t first = 0, last = 0, i, wanted = prot & 7
    cdef vma_t *v
    cdef int error
    if range_hole(mm, start, end) < end:
        return -ENOMEM
    # Every mapping may have every protection: VM_MAYREAD, VM_MAYWRITE and VM_MAYEXEC are always set.
    error = vma_isolate(mm, start, end, &first, &last)
    if error:
        return error
    for i in range(first, last):
        v = &mm.vma[i]
        if (v.flags & 7) == wanted:
            continue
        pthread_mutex_lock(&mm.rmap_lock)
        v.flags = (v.flags & ~<uint64_t>7) | wanted
        pthread_mutex_unlock(&mm.rmap_lock)
        protect_table(mm, v, mm.pgd.top, mm.pgd.levels - 1, v.start, v.end)
    vma_merge(mm, start, end)
    return 0

cdef void mm_exit(mm_t *mm) noexcept nogil:
    if mmap_write_lock(mm) == 0:
        exit_mmap(mm)
        family_leave(mm)
        mm_unregister(mm)
        a32_store_relaxed(&mm.exited, True)
        mmap_unlock(mm)
