"""hugetlb mappings: faults, copies, reservations. Always a whole folio of a pool behind one PMD or PUD leaf.

Laws
    A private VMA made without MAP_NORESERVE has a promise (VM_HUGE_RESV) for each page that is not its own yet (nothing,
    or the file's, is mapped there); its child in a fork has none.
    A shared one has a mark in the page cache of its file for each page that is not there yet.
    AnonExclusive is the head's.
"""
from libc.stdint cimport int64_t, uint64_t
from mmcore.core.space cimport *
from mmcore.core.pgtable cimport pgd_t

cdef int hugetlb_fault(mm_t *mm, vma_t *v, uint64_t addr, unsigned flags) noexcept nogil
cdef int hugetlb_copy(mm_t *mm, uint64_t source, unsigned order, bint reserved, uint64_t index, uint64_t mapping,
                      uint64_t *new) noexcept nogil     # 0, FAULT_SIGBUS: the pool is empty, -EHWPOISON
cdef int hugetlb_reserve_file(file_t *f, uint64_t index, uint64_t nr) noexcept nogil     # huge indices; all or nothing
