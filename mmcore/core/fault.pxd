"""Page faults: what a missing or insufficient entry becomes.

    anonymous, nothing there     read: the zero page, or the huge zero folio; write: a THP, a PTE-mapped large folio, a page
    file, nothing there          the page of the cache; a private write copies it at once
    write, entry is read-only    reuse what is exclusive to this mm, else copy (do_wp_page)
    unshare                      the same for a pin that only reads: the page becomes exclusive, the entry stays read-only
    swap                         a fresh page with the slot's bytes

Laws
    An anonymous page is exclusive (PG_owner_2; on the head under a leaf and for hugetlb, on each page under PTEs) or may be
    shared. What is writable is exclusive. Only fork, and swapping out, take the mark away, and never from a page that may
    be pinned.
    A fault that fails changed nothing: frames are had before entries change.
The caller holds mmap_lock, found the VMA, and checked that it allows the access.
"""
from libc.stdint cimport int64_t, uint64_t
from libc.string cimport memcpy
from mmcore.core.space cimport *
from mmcore.core.pgtable cimport *
from mmcore.core.rmap cimport MAPPED_ONCE

cdef extern from *:
    """
    #include <errno.h>
    #ifndef EHWPOISON
    #define EHWPOISON 133
    #endif
    """
    const int EHWPOISON

cdef enum:
    FAULT_FLAG_WRITE = 1
    FAULT_FLAG_UNSHARE = 2

cdef int handle_mm_fault(mm_t *mm, vma_t *v, uint64_t addr, unsigned flags) noexcept nogil
    # 0: look again. -ENOMEM, FAULT_SIGBUS, FAULT_SIGSEGV, -EHWPOISON
cdef uint64_t huge_zero_get(mem_t *m) noexcept nogil        # PFN of the huge zero folio, or 0
cdef bint thp_allowed(const mm_t *mm, const vma_t *v) noexcept nogil

# ---- for touch.pyx, which takes many faults at once ----------------------------------------------------------------------
cdef bint leaf_fits(const mm_t *mm, const vma_t *v, uint64_t addr, int level) noexcept nogil
cdef void mark_access(uint64_t *entry, uint64_t bits) noexcept nogil
cdef int64_t thp_run(mm_t *mm, vma_t *v, uint64_t addr, uint64_t end, bint write) noexcept nogil
    # leaves made; 0: base pages must do; -EAGAIN: look again; -ENOMEM
cdef uint64_t mthp_fault(mm_t *mm, vma_t *v, uint64_t *entry, uint64_t addr) noexcept nogil            # under the table's lock
cdef uint64_t anon_run(mm_t *mm, vma_t *v, uint64_t *entry, uint64_t addr, uint64_t nr, bint write) noexcept nogil  # the same

# ---- entries and pages ------------------------------------------------------------------------------------------------
cdef inline bint entry_allows(uint64_t e, bint write) noexcept nogil:
    """Would the processor let a user access through?"""
    return (e & PTE_PRESENT) != 0 and (not write or (e & PTE_RW) != 0)

cdef inline bint is_numa_hint(uint64_t e, const vma_t *v) noexcept nogil:
    """An entry without access where the VMA allows some: a question who uses the page. In a PROT_NONE VMA it asks nothing."""
    return e & PTE_PROTNONE and v.flags & (VM_READ | VM_WRITE | VM_EXEC)

cdef inline uint64_t vma_entry_bits(const vma_t *v) noexcept nogil:
    if v.flags & (VM_READ | VM_WRITE | VM_EXEC):
        return PTE_PRESENT | PTE_USER
    return PTE_PROTNONE | PTE_USER

cdef inline uint64_t written_bits(const vma_t *v) noexcept nogil:
    """What a write fault adds: dirty, and writable where the VMA is (maybe_mkwrite)."""
    return PTE_DIRTY | PTE_SOFT_DIRTY | (PTE_RW if v.flags & VM_WRITE else 0)

cdef inline uint64_t anon_flags(mem_t *m, uint64_t pfn) noexcept nogil:
    """Flags of an anonymous page that only its mm has."""
    return region_of(m, pfn).zone_flags | (ONE << PG_uptodate) | (ONE << PG_swapbacked) | (ONE << PG_owner_2)

cdef inline void anon_page_init(mem_t *m, page_t *page, uint64_t flags, uint64_t mapping, uint64_t index) noexcept nogil:
    """Write a small page mapped once, in one pass over its cache line; both counts last, by one store."""
    a64_store_relaxed(&page.mapping, mapping)
    a64_store_relaxed(&page.index, index)
    a64_store_relaxed(&page.private, 0)
    a64_store_relaxed(&page.lru_prev, 0)
    a64_store_relaxed(&page.memcg_data, 0)
    a64_store_relaxed(&page.flags, flags)
    a64_store_relaxed(&page.compound_info, 0)
    a64_store_release(&page._mapcount, MAPPED_ONCE)

cdef inline void note_anon(vma_t *v) noexcept nogil:
    if not a32_load_relaxed(&v.has_anon):
        a32_store_release(&v.has_anon, 1)

cdef inline void copy_page_bytes(mem_t *m, uint64_t to, uint64_t source) noexcept nogil:
    """A page that was never written reads as zero, and so does its copy then, at no cost."""
    if not test_flag(&m.map[source], PG_mm_written):
        return
    if folio_is_anon(&m.map[compound_head_pfn(m.map, source)]):
        memcpy(page_bytes(m, to), page_bytes(m, source), ONE << m.page_shift)
    else:
        copy_shared(page_bytes(m, to), page_bytes(m, source), ONE << m.page_shift)
