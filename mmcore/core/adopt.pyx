"""Mapping folios that exist already: how a captured process becomes an address space of the engine."""
from libc.errno cimport EEXIST, EFAULT, EINVAL
from libc.stdint cimport uint8_t, uint32_t, uint64_t
from mmcore.core.fault cimport note_anon, vma_entry_bits, written_bits
from mmcore.core.filemap cimport cache_fill
from mmcore.core.folio cimport count_arg, refs_load
from mmcore.core.mm cimport MM
from mmcore.core.pgtable cimport *
from mmcore.core.rmap cimport *
from mmcore.core.space cimport *
from mmcore.core.vma cimport vma_lookup
from mmcore.core.zap cimport rss_add, vma_level

import numpy as np

from .errors import InvalidArgument, MMError

__all__ = ["adopt"]

cdef bint into_cache(file_t *f, uint64_t head, uint64_t index) noexcept nogil:
    """Give a folio that nobody maps to a file's page cache, which takes its one reference over; under f.lock."""
    cdef mem_t *m = f.m
    cdef unsigned order = folio_order_of(&m.map[head])
    cdef uint64_t i, nr = ONE << order, first = index >> f.order, slots = nr >> f.order
    if a64_load_relaxed(&m.map[head].mapping):
        return a64_load_relaxed(&m.map[head].mapping) == f.id << 2 and a64_load_relaxed(&m.map[head].index) == index
    # A file of huge pages has a slot for each of them, and no page of another size.
    if order < f.order or (f.order and order != f.order) or first << f.order != index or first + slots > f.nr_entries \
            or refs_load(&m.map[head]) != 1:
        return False
    for i in range(slots):
        if f.cache[first + i] != CACHE_NONE:
            return False
    cache_fill(f, first, slots)
    for i in range(slots):
        f.cache[first + i] = head + i
    a64_store_relaxed(&m.map[head].mapping, f.id << 2)
    a64_store_relaxed(&m.map[head].index, index)
    a64_fetch_or_relaxed(&m.map[head].flags, (ONE << PG_uptodate) | (ONE << PG_swapbacked if f.kind == FILE_TMPFS else 0))
    f.nr_cached += nr
    a32_fetch_add_acq_rel(&m.map[head]._refcount, <uint32_t>(nr - 1))
    return True

cdef int adopt_one(mm_t *mm, uint64_t addr, uint64_t pfn, bint leaf, bint exclusive, bint anon) noexcept nogil:
    """1: mapped; 0: not, or part of a leaf that is; negative errno."""
    cdef mem_t *m = mm.m
    cdef pgd_t *g = &mm.pgd
    cdef vma_t *v = vma_lookup(mm, addr)
    cdef uint64_t head = compound_head_pfn(m.map, pfn), table, index, bits
    cdef uint64_t *entry
    cdef page_t *page = &m.map[head]
    cdef unsigned order = folio_order_of(page)
    cdef int level = 0, error = 0
    cdef bint first = False, zero = head == m.zero_pfn or head == m.huge_zero_pfn, ok
    if v == NULL:
        return -EFAULT
    # A private mapping of a file has pages of its own where it was written.
    anon = v.file == NULL or (anon and not v.flags & VM_SHARED)
    if v.flags & VM_HUGETLB:
        level = vma_level(mm, v)
    elif leaf and order == m.pmd_order:
        level = 1
    if level:
        # The list may start inside the leaf: it is mapped whole, as it was, when the VMA spans it.
        addr -= (pfn - head) << m.page_shift
        pfn = head
        if addr & (level_size(g, level) - 1) or order != level_order(g, level) or addr < v.start \
                or addr + level_size(g, level) > v.end:
            return 0
    if folio_is_hugetlb(page) != ((v.flags & VM_HUGETLB) != 0) or (refs_load(page) == 0 and not zero) \
            or (page_has_type(page) and not folio_is_hugetlb(page)):
        return -EINVAL
    table = table_make(g, addr, level, &error)
    if table == 0:
        return 0 if error == -EEXIST else error
    entry = table_at(m, table) + table_index(g, addr, level)
    index = page_index(mm, v, addr) - (pfn - head)
    bits = vma_entry_bits(v) | PTE_ACCESSED | (PTE_PSE if level else 0)
    if a64_load_relaxed(entry) != 0:
        return 0
    if zero:
        if v.file != NULL:
            return -EINVAL
        bits |= PTE_SPECIAL
    elif not anon:
        pthread_mutex_lock(&v.file.lock)
        ok = into_cache(v.file, head, index)
        pthread_mutex_unlock(&v.file.lock)
        if not ok:
            return 0
        if v.flags & VM_SHARED and v.flags & VM_WRITE and v.file.kind != FILE_EXT4:
            bits |= PTE_RW
    elif a64_load_relaxed(&page.mapping) == 0:
        # The one who claimed the frames gives its reference to the first mapping.
        a64_store_relaxed(&page.mapping, mm.anon_id)
        a64_store_relaxed(&page.index, index)
        a64_fetch_or_relaxed(&page.flags, (ONE << PG_uptodate) | (ONE << PG_swapbacked))
        first = True
    elif a64_load_relaxed(&page.mapping) != mm.anon_id or a64_load_relaxed(&page.index) != index:
        return 0
    if not zero:
        if anon:
            note_anon(v)
            if exclusive:
                set_flag(page if level else &m.map[pfn], PG_owner_2)
                bits |= written_bits(v)
        if level:
            leaf_map(page, 0 if first else 1)
        elif order:
            large_page_map(page, &m.map[pfn], 0 if first else 1)
        elif first:
            a32_fetch_add_relaxed(&page._mapcount, 1)
        else:
            small_map_add(page)
        rss_add(mm, head, <int64_t>(ONE << level_order(g, level)))
    table_lock(m, table)
    a64_store_release(entry, (pfn << PTE_PFN_SHIFT) | bits)
    table_used(m, table)[0] += 1
    table_unlock(m, table)
    return 1


def adopt(MM self not None, addr, pfns, leaves, exclusive, anon=None):
    """Map existing pages at consecutive addresses, where nothing is mapped yet; returns how many entries were made.

    pfns: uint64 array, 0 for nothing; leaves, exclusive, anon: bool arrays of the same length: which belong to a PMD leaf,
    which are this process's alone, and which are anonymous (None: those of mappings without a file). The one reference of
    a fresh folio goes over to its first mapping, or to the page cache of the VMA's file. What cannot be mapped
    as asked (a folio that is mapped out of order, or taken by another file) is left out. Raises MMError:
    EFAULT outside of mappings, EINVAL for hugetlb pages in other VMAs, free pages or page tables, ENOMEM.
    """
    cdef mm_t *mm = self.ptr()
    cdef mem_t *m = mm.m
    cdef uint64_t at = count_arg(addr, "addr", 0, ~<uint64_t>0), i, n, made = 0, page = ONE << m.page_shift
    cdef const uint64_t[::1] numbers = np.ascontiguousarray(pfns, dtype=np.uint64)
    cdef const uint8_t[::1] leaf = np.ascontiguousarray(leaves, dtype=np.uint8)
    cdef const uint8_t[::1] alone = np.ascontiguousarray(exclusive, dtype=np.uint8)
    cdef const uint8_t[::1] own = np.zeros(len(numbers), np.uint8) if anon is None else np.ascontiguousarray(anon, dtype=np.uint8)
    cdef int result = 0
    n = <uint64_t>numbers.shape[0]
    if leaf.shape[0] != numbers.shape[0] or alone.shape[0] != numbers.shape[0] or own.shape[0] != numbers.shape[0]:
        raise InvalidArgument("pfns, leaves, exclusive and anon are arrays of one length")
    if at & (page - 1):
        raise InvalidArgument(f"{at:#x} is no multiple of the page size", addr=at)
    for i in range(n):
        if numbers[i]:
            self.mem.check_pfn(numbers[i])
    self.mem.enter()
    with nogil:
        result = mmap_write_lock(mm)
        if result == 0:
            for i in range(n):
                if numbers[i]:
                    result = adopt_one(mm, at + i * page, numbers[i], leaf[i], alone[i], own[i])
                    if result < 0:
                        break
                    made += <uint64_t>result
            mmap_unlock(mm)
    self.mem.leave()
    if result == -ESRCH:
        self.ptr()
    if result < 0:
        raise MMError(-result, f"page {i} of the list (PFN {numbers[i]:#x}) cannot be mapped at {at + i * page:#x}: nothing is "
                               "mapped there, the page is free, a page table, or of another kind than the mapping",
                               pfn=numbers[i], addr=at + i * page)
    return made
