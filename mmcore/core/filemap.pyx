"""Page caches: bringing pages in, dropping them, writing them back."""
from libc.errno cimport ENOMEM
from libc.string cimport memcpy, memset
from mmcore.core.buddy cimport alloc_hugetlb_reserved, free_folio, reserve_hugetlb
from mmcore.core.folio cimport FREED, put_refs
from mmcore.core.frames cimport take_folio, take_pages
from mmcore.core.lock cimport clear_dirty, mark_dirty
from mmcore.core.swap cimport swap_free, swap_load

cdef bint file_counts(const file_t *f) noexcept nogil:
    return f.kind != FILE_PFNMAP and f.kind != FILE_IOMEM

cdef uint64_t file_look(const file_t *f, uint64_t index) noexcept nogil:
    cdef uint64_t entry
    if index >= file_pages(f):
        return 0
    if f.kind == FILE_DEVDAX or f.kind == FILE_FSDAX or (f.kind == FILE_PFNMAP and f.device != NULL):
        return f.device.start + index
    if f.kind == FILE_IOMEM:
        return f.iomem_pfn + index
    entry = f.cache[index >> f.order]
    return entry + (index & ((ONE << f.order) - 1)) if is_page(entry) else 0

cdef void cache_page(file_t *f, uint64_t pfn, unsigned order, uint64_t index, uint64_t flags) noexcept nogil:
    """Give fresh frames to the cache: it holds the one reference a page that there is."""
    cdef mem_t *m = f.m
    cdef page_t *head = &m.map[pfn]
    cdef uint64_t i
    if order == 0:
        page_init(head, region_of(m, pfn).zone_flags | flags, 0)
    else:
        a64_fetch_or_relaxed(&head.flags, flags)
    a64_store_relaxed(&head.mapping, f.id << 2)
    a64_store_relaxed(&head.index, index)
    cache_fill(f, index >> f.order, (ONE << order) >> f.order)
    if f.order:
        f.cache[index >> f.order] = pfn
    else:
        for i in range(ONE << order):
            f.cache[index + i] = pfn + i
    f.nr_cached += ONE << order
    a32_store_release(&head._refcount, <uint32_t>(ONE << order))

cdef int tmpfs_huge(file_t *f, uint64_t index, uint64_t *pfn) noexcept nogil:
    """Fill an aligned stretch of an empty part of the cache with one THP, when there is a block for it."""
    cdef mem_t *m = f.m
    cdef uint64_t first = (index >> m.pmd_order) << m.pmd_order, i, huge
    if first + (ONE << m.pmd_order) > file_pages(f):
        return 0
    for i in range(ONE << m.pmd_order):
        if f.cache[first + i] != CACHE_NONE:
            return 0
    huge = take_folio(m, m.pmd_order)
    if huge == 0:
        return 0
    cache_page(f, huge, m.pmd_order, first, (ONE << PG_uptodate) | (ONE << PG_swapbacked))
    pfn[0] = huge + (index - first)
    return 1

cdef int dax_page(file_t *f, uint64_t pfn) noexcept nogil:
    """The first look of a filesystem at a device page: from idle to in use, with the reference of its entry."""
    cdef mem_t *m = f.m
    cdef uint64_t head = compound_head_pfn(m.map, pfn)
    if a64_load_relaxed(&m.map[head].mapping) == 0:
        a64_store_relaxed(&m.map[head].mapping, f.id << 2)
        a64_store_relaxed(&m.map[head].index, head - f.device.start)
        f.nr_cached += ONE << folio_order_of(&m.map[head])
        a32_fetch_add_acq_rel(&m.map[head]._refcount, 1)
    return 0

cdef int file_page(file_t *f, uint64_t index, bint huge_ok, uint64_t *pfn) noexcept nogil:
    cdef mem_t *m = f.m
    cdef uint64_t entry, new, slot
    if index >= file_pages(f) or f.gone:
        return FAULT_SIGBUS
    pfn[0] = file_look(f, index)
    if pfn[0]:
        if f.kind == FILE_FSDAX:
            return dax_page(f, pfn[0])
        return 0
    entry = f.cache[index >> f.order]
    if f.kind == FILE_HUGETLBFS:
        new = alloc_hugetlb_reserved(m, f.order, entry == CACHE_RESERVED)
        if new == 0:
            return FAULT_SIGBUS
        f.nr_reserved -= entry == CACHE_RESERVED
        cache_page(f, new, f.order, (index >> f.order) << f.order, ONE << PG_uptodate)
        pfn[0] = new + (index & ((ONE << f.order) - 1))
        return 0
    if huge_ok and f.kind == FILE_TMPFS and entry == CACHE_NONE and tmpfs_huge(f, index, pfn):
        return 0
    if take_pages(m, &new, 1) == 0:
        return -ENOMEM
    cache_page(f, new, 0, index, (ONE << PG_uptodate) | (ONE << PG_swapbacked if f.kind == FILE_TMPFS else 0))
    if entry & CACHE_SWAP:
        slot = entry & ~CACHE_SWAP
        swap_load(m, slot, new)
        swap_free(m, slot, 1)
        mark_dirty(m, new)
    elif f.kind == FILE_EXT4 and f.on_disk[index]:
        memcpy(page_bytes(m, new), f.disk + (index << m.page_shift), ONE << m.page_shift)
    pfn[0] = new
    return 0

cdef void file_drop(file_t *f, uint64_t index) noexcept nogil:
    """Take an entry out of the cache. A large folio in a small-page cache goes as a whole: index is its first."""
    cdef mem_t *m = f.m
    cdef uint64_t entry = f.cache[index >> f.order], nr, i
    cdef page_t *head
    cdef unsigned order
    if entry & CACHE_SWAP:
        swap_free(m, entry & ~CACHE_SWAP, 1)
    elif entry == CACHE_RESERVED:
        reserve_hugetlb(m, f.order, -1)
        f.nr_reserved -= 1
    elif is_page(entry):
        head = &m.map[entry]
        order = folio_order_of(head)
        nr = ONE << order
        if f.order == 0:
            for i in range(1, nr):
                f.cache[index + i] = CACHE_NONE
        f.nr_cached -= nr
        clear_dirty(m, entry)
        if f.kind != FILE_PFNMAP:
            a64_store_relaxed(&head.mapping, 0)
        if put_refs(m, head, order != 0, <uint32_t>nr) == FREED:
            free_folio(m, entry, order)
    f.cache[index >> f.order] = CACHE_NONE

cdef void dax_drop(file_t *f, uint64_t index) noexcept nogil:
    cdef mem_t *m = f.m
    cdef page_t *head = &m.map[compound_head_pfn(m.map, f.device.start + index)]
    cdef unsigned order = folio_order_of(head)
    if a64_load_relaxed(&head.mapping) != f.id << 2:
        return
    a64_store_relaxed(&head.mapping, 0)
    a64_store_relaxed(&head.index, 0)
    f.nr_cached -= ONE << order
    clear_dirty(m, head - m.map)
    if put_refs(m, head, order != 0, 1) == FREED:
        free_folio(m, head - m.map, order)

cdef void file_write_page(file_t *f, uint64_t pfn) noexcept nogil:
    """Write a dirty folio of an ext4 file to its disk: clean first, so that what is dirtied meanwhile stays dirty."""
    cdef mem_t *m = f.m
    cdef uint64_t i, index = a64_load_relaxed(&m.map[pfn].index), nr = ONE << folio_order_of(&m.map[pfn])
    clear_dirty(m, pfn)
    for i in range(nr):
        if test_flag(&m.map[pfn + i], PG_mm_written):
            copy_shared(f.disk + ((index + i) << m.page_shift), page_bytes(m, pfn + i), ONE << m.page_shift)
        elif f.on_disk[index + i]:
            memset(f.disk + ((index + i) << m.page_shift), 0, ONE << m.page_shift)
        f.on_disk[index + i] = 1
    stat_add(m, NR_WRITTEN, <int64_t>nr)

cdef void take_over(file_t *f, file_t *to) noexcept nogil:
    """Copy what is in the cache and on the disk to larger ones. What was never written is not written now."""
    cdef uint64_t i = cache_next(f, 0, f.nr_entries), j, n, page = ONE << f.m.page_shift
    while i < f.nr_entries:
        n = min(f.nr_entries - i, <uint64_t>CACHE_STRETCH)
        cache_fill(to, i, n)
        memcpy(to.cache + i, f.cache + i, n * 8)
        if f.on_disk != NULL:
            memcpy(to.on_disk + i, f.on_disk + i, n)
            for j in range(i, i + n):
                if f.on_disk[j]:
                    memcpy(to.disk + j * page, f.disk + j * page, page)
        i = cache_next(f, i + n, f.nr_entries)

cdef void file_forget(file_t *f) noexcept nogil:
    """Give cache and disk back to the system."""
    cdef uint64_t n = f.nr_entries
    if f.cache != NULL:
        unreserve(f.cache, n * 8)
    if f.filled.level[0] != NULL:
        unreserve(f.filled.level[0], bitmap_words(f.filled.nr_bits) * 8)
    if f.disk != NULL:
        unreserve(f.disk, n << f.m.page_shift)
    if f.on_disk != NULL:
        unreserve(f.on_disk, n)

cdef int file_room(file_t *f, uint64_t size) noexcept nogil:
    """Make cache and disk large enough for this many bytes; they only grow."""
    cdef mem_t *m = f.m
    cdef file_t new
    cdef uint64_t pages = (size + (ONE << m.page_shift) - 1) >> m.page_shift, stretches
    cdef uint64_t entries = (pages + (ONE << f.order) - 1) >> f.order
    cdef uint64_t *bits
    cdef bint with_disk = f.kind == FILE_EXT4 or f.kind == FILE_IOMEM
    if entries <= f.nr_entries:
        return 0
    if inject_fails(m, INJECT_ALLOC):
        return -ENOMEM
    entries += entries >> 1 if f.nr_entries else 0
    stretches = entries // CACHE_STRETCH + 1
    memset(&new, 0, sizeof(new))
    new.m = m
    new.nr_entries = entries
    new.cache = <uint64_t *>reserve(entries * 8, False)
    bits = <uint64_t *>reserve(bitmap_words(stretches) * 8, False)
    if bits != NULL:
        bitmap_place(&new.filled, stretches, bits)
    if with_disk:
        new.disk = <uint8_t *>reserve(entries << m.page_shift, False)
        new.on_disk = <uint8_t *>reserve(entries, False)
    if new.cache == NULL or bits == NULL or with_disk and (new.disk == NULL or new.on_disk == NULL):
        file_forget(&new)
        return -ENOMEM
    if f.nr_entries:
        take_over(f, &new)
        file_forget(f)
    f.cache, f.filled, f.disk, f.on_disk, f.nr_entries = new.cache, new.filled, new.disk, new.on_disk, entries
    return 0

# ---- who maps it --------------------------------------------------------------------------------------------------------
cdef int file_add_mm(file_t *f, mm_t *mm) noexcept nogil:
    cdef int error = 0
    pthread_mutex_lock(&f.lock)
    if grow(f.m, <void **>&f.mms, &f.mms_room, f.nr_mms + 1, sizeof(void *)):
        f.mms[f.nr_mms] = mm
        f.nr_mms += 1
    else:
        error = -ENOMEM
    pthread_mutex_unlock(&f.lock)
    return error

cdef bint maps(const file_t *f, const mm_t *mm) noexcept nogil:
    cdef uint64_t i
    for i in range(f.nr_mms):
        if f.mms[i] == mm:
            return True
    return False

cdef void file_del_mm(file_t *f, mm_t *mm) noexcept nogil:
    cdef uint64_t i
    pthread_mutex_lock(&f.lock)
    i = f.nr_mms
    while i > 0:
        i -= 1
        if f.mms[i] == mm:
            f.nr_mms -= 1
            f.mms[i] = f.mms[f.nr_mms]
            break
    if not maps(f, mm):
        a64_store_release(&mm.files_gone, SOME_FILES if a64_load_acquire(&mm.files_gone) else f.id)
    pthread_mutex_unlock(&f.lock)

cdef bint file_mapped(file_t *f, const mm_t *mm) noexcept nogil:
    cdef bint found
    pthread_mutex_lock(&f.lock)
    found = maps(f, mm)
    pthread_mutex_unlock(&f.lock)
    return found
