"""Page caches: what the pages of a file are, by kind, and which mms map it.

    kind        pages                                   what is special
    tmpfs       small, or THPs (shmem_thp)              swap-backed; MADV_PAGEOUT moves its pages to swap
    ext4        small                                   dirty tracking: shared entries are write-protected while clean
    hugetlbfs   of its pool                             shared mappings reserve; the index counts huge pages
    devdax      a generic device's folios               leaves of the device's alignment; shared mappings only
    fsdax       a device's pages                        no copy in memory; long pins are refused (spec 4.4)
    secretmem   small                                   shared mappings only; nobody may pin it
    pfnmap      frames of its own, mapped as raw PFNs   VM_PFNMAP: special entries that count nothing
    iomem       PFNs that have no struct page           VM_IO | VM_PFNMAP

Laws (under file_t.lock)
    An entry of the cache is 0, a mark, a swap slot or the PFN of a page whose mapping is id << 2 and whose index is its own.
    The cache holds one reference on each page that it names: nr_pages of them on a large folio.
    What lies in no filled stretch is 0, and was never written back: a file costs what is in it, not what it could hold.
"""
from libc.stdint cimport int64_t, uint8_t, uint64_t
from mmcore.core.space cimport *

cdef inline uint64_t file_pages(const file_t *f) noexcept nogil:
    """Base pages up to its end."""
    return (f.size + (ONE << f.m.page_shift) - 1) >> f.m.page_shift

cdef inline bint is_page(uint64_t entry) noexcept nogil:
    return entry > CACHE_RESERVED and entry < CACHE_SWAP

cdef bint file_counts(const file_t *f) noexcept nogil       # do its pages have references and map counts?

cdef inline void cache_fill(file_t *f, uint64_t first, uint64_t nr) noexcept nogil:
    """Note that these entries are about to hold something."""
    cdef uint64_t i
    for i in range(first // CACHE_STRETCH, (first + nr - 1) // CACHE_STRETCH + 1):
        bitmap_set(&f.filled, i)

cdef inline uint64_t cache_next(const file_t *f, uint64_t entry, uint64_t end) noexcept nogil:
    """The first entry from here on that may hold something, or end."""
    if entry >= end or bitmap_test(&f.filled, entry // CACHE_STRETCH):
        return entry
    return min(bitmap_next(&f.filled, entry // CACHE_STRETCH) * CACHE_STRETCH, end)

# ---- under f.lock -----------------------------------------------------------------------------------------------------
# The page of an index, made when missing; 0, -ENOMEM, FAULT_SIGBUS.
cdef int file_page(file_t *f, uint64_t index, bint huge_ok, uint64_t *pfn) noexcept nogil
cdef uint64_t file_look(const file_t *f, uint64_t index) noexcept nogil                     # the same when it is there; else 0
cdef void file_drop(file_t *f, uint64_t index) noexcept nogil       # one entry out of the cache; nothing maps it any more
cdef void dax_drop(file_t *f, uint64_t index) noexcept nogil        # the same for a page of an fsdax device
cdef void file_write_page(file_t *f, uint64_t pfn) noexcept nogil   # a dirty page to the disk
cdef int file_room(file_t *f, uint64_t size) noexcept nogil         # cache and disk for this many bytes; 0, -ENOMEM
cdef void file_forget(file_t *f) noexcept nogil                     # both back to the system

# ---- who maps it: these take f.lock ------------------------------------------------------------------------------------
cdef int file_add_mm(file_t *f, mm_t *mm) noexcept nogil    # 0, -ENOMEM
cdef void file_del_mm(file_t *f, mm_t *mm) noexcept nogil
cdef bint file_mapped(file_t *f, const mm_t *mm) noexcept nogil
