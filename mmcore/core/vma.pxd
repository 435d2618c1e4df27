"""VMAs: a sorted array that splits and merges; and the shape of an address space: placing, unmapping, protecting, moving.

Everything here is called with mmap_lock held for writing (vma_find: for reading), and takes rmap_lock around each change of
the array. Whatever can fail (a page table to split a leaf, room in the array, a place in a file's list) comes before the
first change.
"""
from libc.stdint cimport int64_t, uint64_t
from mmcore.core.space cimport *

cdef inline uint64_t vma_find(const mm_t *mm, uint64_t addr) noexcept nogil:
    """Index of the first VMA that ends above addr (find_vma); nr_vmas when there is none."""
    cdef uint64_t low = 0, high = mm.nr_vmas, mid
    while low < high:
        mid = (low + high) >> 1
        if mm.vma[mid].end > addr:
            high = mid
        else:
            low = mid + 1
    return low

cdef inline vma_t *vma_lookup(const mm_t *mm, uint64_t addr) noexcept nogil:
    """The VMA that holds addr, or NULL (vma_lookup)."""
    cdef uint64_t i = vma_find(mm, addr)
    if i < mm.nr_vmas and mm.vma[i].start <= addr:
        return &mm.vma[i]
    return NULL

cdef inline uint64_t range_hole(const mm_t *mm, uint64_t start, uint64_t end) noexcept nogil:
    """The first address of a range that no VMA holds; `end` when all of it is mapped."""
    cdef uint64_t i = vma_find(mm, start)
    while start < end:
        if i == mm.nr_vmas or mm.vma[i].start > start:
            return start
        start = mm.vma[i].end
        i += 1
    return end

cdef int vma_insert(mm_t *mm, const vma_t *v) noexcept nogil        # merges with its neighbours; 0, -ENOMEM
cdef int vma_ready(mm_t *mm, const vma_t *v) noexcept nogil         # what of it can fail, also with a do_munmap() between;
cdef void vma_put(mm_t *mm, const vma_t *v) noexcept nogil          # ... and the rest; or file_del_mm() undoes it
cdef int vma_split(mm_t *mm, uint64_t i, uint64_t addr) noexcept nogil      # addr starts VMA i + 1 after; 0, -ENOMEM, -EINVAL
cdef void vma_remove(mm_t *mm, uint64_t first, uint64_t last) noexcept nogil    # [first, last) out of the array
cdef void vma_merge(mm_t *mm, uint64_t start, uint64_t end) noexcept nogil  # neighbours from the one before start to the one after end
cdef int vma_isolate(mm_t *mm, uint64_t start, uint64_t end, uint64_t *first, uint64_t *last) noexcept nogil
    # splits at both ends: VMAs [first, last) are what a range spans; 0, or an error with nothing changed
cdef uint64_t find_area(mm_t *mm, uint64_t length, uint64_t align) noexcept nogil   # 0: no room
cdef int do_munmap(mm_t *mm, uint64_t start, uint64_t end) noexcept nogil
cdef int do_mprotect(mm_t *mm, uint64_t start, uint64_t end, uint64_t prot) noexcept nogil
cdef uint64_t vma_granule(const mm_t *mm, const vma_t *v) noexcept nogil    # bytes at whose multiples it may be split
cdef void mm_exit(mm_t *mm) noexcept nogil      # unmaps all, and leaves family and registry; once
