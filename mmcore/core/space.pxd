"""What address spaces are made of: VMAs, files, swap slots, families, and the registry of all of them in one Memory.

Only structures; the work is in the files named after the nouns (pgtable, swap, rmap, file, vma, fault, zap, fork, ...).

Laws
    VMAs of an mm are sorted by start, do not overlap, and are not empty; two neighbours that could be one are one.
    page.mapping is (id << 2) | FOLIO_MAPPING_ANON of a family, or id << 2 of a file; page.index is the page's number in it.
        Ids are never used twice, so that a stale one finds nothing rather than something else.
    An anonymous page is mapped only by mms of its family: an mm that was made fresh, and all that were forked from it.
        In each of them it can be found at start + (index - pgoff) of a VMA that spans the index.
    A mapping of a page holds one reference: one a PTE, one a PMD or PUD leaf. The page cache holds one a page.
    The reservation of hugetlb pages: of a VMA with VM_HUGE_RESV one a page that is not there yet; of a file one a mark.

Lock order, outermost first (memory.pxd goes on where this ends)
    1. mm_t.mmap_lock           for writing: VMAs and tables change shape; for reading: faults
    2. the folio lock
    3. family_t.lock            which mms are in it; fork holds it from the first copied entry until the child is in
    4. file_t.lock              its page cache, its size, its list of mappings
    5. mm_t.rmap_lock           VMAs hold still for those who come from a page; held over every change to them
    6. a table's lock (pgtable.pxd)
    7. swap_t.lock
    8. spaces_t.lock, a hugetlb pool's lock, a region's lock
"""
from libc.errno cimport ESRCH
from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t
from mmcore.core.memory cimport *
from mmcore.core.pgtable cimport pgd_t

cdef enum:                      # protection and flags, Linux x86-64
    PROT_NONE = 0x0
    PROT_READ = 0x1
    PROT_WRITE = 0x2
    PROT_EXEC = 0x4
    MAP_SHARED = 0x01
    MAP_PRIVATE = 0x02
    MAP_SHARED_VALIDATE = 0x03
    MAP_FIXED = 0x10
    MAP_ANONYMOUS = 0x20
    MAP_LOCKED = 0x2000
    MAP_NORESERVE = 0x4000
    MAP_POPULATE = 0x8000
    MAP_NONBLOCK = 0x10000
    MAP_STACK = 0x20000
    MAP_HUGETLB = 0x40000
    MAP_SYNC = 0x80000
    MAP_FIXED_NOREPLACE = 0x100000
    MAP_HUGE_SHIFT = 26
    MAP_HUGE_MASK = 0x3f
    MADV_NORMAL = 0
    MADV_RANDOM = 1
    MADV_SEQUENTIAL = 2
    MADV_WILLNEED = 3
    MADV_DONTNEED = 4
    MADV_FREE = 8
    MADV_DONTFORK = 10
    MADV_DOFORK = 11
    MADV_HUGEPAGE = 14
    MADV_NOHUGEPAGE = 15
    MADV_COLD = 20
    MADV_PAGEOUT = 21
    MADV_POPULATE_READ = 22
    MADV_POPULATE_WRITE = 23
    MADV_COLLAPSE = 25

cdef extern from *:             # vm_flags; the last two are ours
    """
    #define MM_VM_READ        0x1ULL
    #define MM_VM_WRITE       0x2ULL
    #define MM_VM_EXEC        0x4ULL
    #define MM_VM_SHARED      0x8ULL
    #define MM_VM_MAYREAD     0x10ULL
    #define MM_VM_MAYWRITE    0x20ULL
    #define MM_VM_MAYEXEC     0x40ULL
    #define MM_VM_MAYSHARE    0x80ULL
    #define MM_VM_PFNMAP      0x400ULL
    #define MM_VM_LOCKED      0x2000ULL
    #define MM_VM_IO          0x4000ULL
    #define MM_VM_DONTCOPY    0x20000ULL
    #define MM_VM_DONTEXPAND  0x40000ULL
    #define MM_VM_NORESERVE   0x200000ULL
    #define MM_VM_HUGETLB     0x400000ULL
    #define MM_VM_SOFTDIRTY   0x8000000ULL
    #define MM_VM_MIXEDMAP    0x10000000ULL
    #define MM_VM_HUGEPAGE    0x20000000ULL
    #define MM_VM_NOHUGEPAGE  0x40000000ULL
    #define MM_VM_HUGE_RESV   0x100000000000ULL
    """
    const uint64_t VM_READ "MM_VM_READ"
    const uint64_t VM_WRITE "MM_VM_WRITE"
    const uint64_t VM_EXEC "MM_VM_EXEC"
    const uint64_t VM_SHARED "MM_VM_SHARED"
    const uint64_t VM_MAYREAD "MM_VM_MAYREAD"
    const uint64_t VM_MAYWRITE "MM_VM_MAYWRITE"
    const uint64_t VM_MAYEXEC "MM_VM_MAYEXEC"
    const uint64_t VM_MAYSHARE "MM_VM_MAYSHARE"
    const uint64_t VM_PFNMAP "MM_VM_PFNMAP"
    const uint64_t VM_LOCKED "MM_VM_LOCKED"
    const uint64_t VM_IO "MM_VM_IO"
    const uint64_t VM_DONTCOPY "MM_VM_DONTCOPY"
    const uint64_t VM_DONTEXPAND "MM_VM_DONTEXPAND"
    const uint64_t VM_NORESERVE "MM_VM_NORESERVE"
    const uint64_t VM_HUGETLB "MM_VM_HUGETLB"
    const uint64_t VM_SOFTDIRTY "MM_VM_SOFTDIRTY"
    const uint64_t VM_MIXEDMAP "MM_VM_MIXEDMAP"
    const uint64_t VM_HUGEPAGE "MM_VM_HUGEPAGE"
    const uint64_t VM_NOHUGEPAGE "MM_VM_NOHUGEPAGE"
    const uint64_t VM_HUGE_RESV "MM_VM_HUGE_RESV"   # a private hugetlb VMA that owns a reservation

cdef enum file_kind:
    FILE_TMPFS
    FILE_EXT4
    FILE_HUGETLBFS
    FILE_DEVDAX
    FILE_FSDAX
    FILE_SECRETMEM
    FILE_PFNMAP
    FILE_IOMEM

cdef enum thp_mode:
    THP_NEVER
    THP_MADVISE
    THP_ALWAYS

cdef enum:
    CACHE_STRETCH = 512         # entries of a page cache that are looked at together
    MMF_HAS_PINNED = 1 << 27    # some FOLL_PIN was tried; never cleared, not inherited
    MAX_MAP_COUNT = 65530       # VMAs of an mm
    CACHE_NONE = 0              # entries of a page cache: nothing,
    CACHE_RESERVED = 1          # a reserved hugetlb page (1 is the zero page's PFN: never cached),
                                # the PFN of the page, or a swap slot with CACHE_SWAP
cdef extern from *:
    """
    #define MM_CACHE_SWAP (1ULL << 62)
    #define MM_SOME_FILES (~0ULL)
    """
    const uint64_t CACHE_SWAP "MM_CACHE_SWAP"
    const uint64_t SOME_FILES "MM_SOME_FILES"       # no file's id

cdef enum:                      # beside negative errno: what a fault or an access ends with
    FAULT_SIGBUS = -6001        # beyond the end of the file, no page, the device is gone
    FAULT_SIGSEGV = -6002       # nothing mapped, or not allowed

cdef struct mm_t

cdef struct file_t:             # what is mapped
    uint64_t id                 # page.mapping is id << 2
    mem_t *m
    int kind                    # file_kind
    unsigned order              # of one entry of its page cache: 0, or the hugetlb order
    uint64_t size               # bytes
    uint64_t nr_entries         # room of cache
    uint64_t *cache             # by index >> order
    bitmap_t filled             # the stretches of the cache, CACHE_STRETCH entries each, that something was ever put into
    uint64_t nr_cached          # entries that are pages
    uint64_t nr_reserved        # entries that are CACHE_RESERVED
    device_t *device            # devdax, fsdax
    uint64_t iomem_pfn          # iomem: its first PFN, beyond mem_map
    uint8_t *disk               # ext4: what writeback wrote; iomem: its registers
    uint8_t *on_disk            # ext4: a byte a page that was ever written back
    bint dead                   # the File object is gone
    bint gone                   # the device was removed: nothing can be mapped or faulted in
    pthread_mutex_t lock
    mm_t **mms                  # which mms map it, one entry a VMA
    uint64_t nr_mms
    uint64_t mms_room

cdef struct vma_t:
    uint64_t start              # first address
    uint64_t end                # one past the last
    uint64_t flags              # VM_*
    uint64_t pgoff              # page number of start: in the file; of the address itself when it was mapped, for anonymous ones
    file_t *file                # NULL: anonymous private memory
    unsigned order              # hugetlb order; 0 when not hugetlb
    uint32_t has_anon           # some anonymous page was mapped here (the kernel's vma->anon_vma)

cdef struct family_t:           # an mm and its descendants: where an anonymous page may be mapped
    uint64_t id
    pthread_mutex_t lock
    mm_t *first
    uint64_t nr                 # mms in it, and walkers that found it; under the registry's lock

cdef struct mm_t:
    mem_t *m
    pgd_t pgd
    pthread_rwlock_t mmap_lock
    pthread_mutex_t rmap_lock
    vma_t *vma                  # sorted
    uint64_t nr_vmas
    uint64_t vmas_room
    uint64_t hint               # addresses below are free, as far as known
    family_t *family
    mm_t *next                  # in its family
    mm_t *prev
    mm_t *next_all              # in the registry
    mm_t *prev_all
    uint64_t flags              # MMF_*, atomic
    uint32_t write_protect_seq  # odd while fork write-protects; gup-fast looks at it before and after
    # in pages, atomic
    uint64_t rss_anon
    uint64_t rss_file
    uint64_t rss_shmem
    uint64_t swapped
    uint64_t locked_vm
    uint64_t pinned_vm
    uint64_t total_faults
    uint64_t anon_id            # page.mapping of its anonymous pages
    uint64_t files_gone         # atomic: id of a file that is not mapped any more, and that MM keeps still; SOME_FILES: of several
    bint exited

cdef struct swap_t:             # the model's swap: slots with a page's bytes and a count of the entries that name them
    pthread_mutex_t lock
    uint64_t nr_slots           # ever used; slot 0 is never handed out
    uint64_t room
    uint64_t nr_used
    uint32_t *count
    uint8_t **bytes             # NULL: the page reads as zero
    uint64_t *free              # stack of slots
    uint64_t nr_free
    uint64_t free_room

cdef struct spaces_t:           # what hangs on mem_t.spaces
    pthread_mutex_t lock        # of the registry: short, innermost; walks ask it under tables' locks
    family_t **family           # by id; NULL when it is gone
    uint64_t nr_families
    uint64_t families_room
    file_t **file               # by id
    uint64_t nr_files
    uint64_t files_room
    mm_t *first                 # all mms
    uint64_t nr_mms
    uint64_t next_iomem         # PFNs beyond mem_map for iomem files
    swap_t swap
    int thp                     # thp_mode
    int shmem_thp
    uint64_t mthp               # a bit an order

cdef inline spaces_t *spaces_of(const mem_t *m) noexcept nogil:
    return <spaces_t *>m.spaces

cdef inline bint is_cow_mapping(uint64_t flags) noexcept nogil:
    return (flags & (VM_SHARED | VM_MAYWRITE)) == VM_MAYWRITE

cdef inline bint vma_is_anonymous(const vma_t *v) noexcept nogil:
    """Anonymous memory of base pages and THPs; private hugetlb has anonymous pages, and a file all the same or none."""
    return v.file == NULL and not v.flags & VM_HUGETLB

cdef inline uint64_t page_index(const mm_t *mm, const vma_t *v, uint64_t addr) noexcept nogil:
    """The number of a page in what its VMA maps (linear_page_index)."""
    return v.pgoff + ((addr - v.start) >> mm.m.page_shift)

# ---- mmap_lock --------------------------------------------------------------------------------------------------------
# Never waited for with the GIL: who holds it may want that. -ESRCH, and not locked: the mm has exited meanwhile, and its tables
# are gone.
cdef inline int mmap_read_lock(mm_t *mm) noexcept nogil:
    pthread_rwlock_rdlock(&mm.mmap_lock)
    if mm.exited:
        pthread_rwlock_unlock(&mm.mmap_lock)
        return -ESRCH
    return 0

cdef inline int mmap_write_lock(mm_t *mm) noexcept nogil:
    pthread_rwlock_wrlock(&mm.mmap_lock)
    if mm.exited:
        pthread_rwlock_unlock(&mm.mmap_lock)
        return -ESRCH
    return 0

cdef inline void mmap_unlock(mm_t *mm) noexcept nogil:
    pthread_rwlock_unlock(&mm.mmap_lock)

# ---- the registry --------------------------------------------------------------------------------------------------
cdef spaces_t *spaces_get(mem_t *m) noexcept nogil                  # makes it at the first call; NULL: no memory
cdef int family_join(mm_t *mm, family_t *family) noexcept nogil     # NULL: a new one. 0, -ENOMEM
cdef void family_join_locked(mm_t *mm, family_t *family) noexcept nogil     # family.lock held
cdef void family_leave(mm_t *mm) noexcept nogil
cdef family_t *family_get(mem_t *m, uint64_t mapping) noexcept nogil    # locked; NULL when it is gone
cdef void family_put(mem_t *m, family_t *family) noexcept nogil         # unlocks what family_get returned
cdef file_t *file_get(mem_t *m, uint64_t mapping) noexcept nogil    # NULL when it is gone
cdef int file_register(file_t *f) noexcept nogil
cdef void file_unregister(file_t *f) noexcept nogil
cdef void mm_register(mm_t *mm) noexcept nogil
cdef void mm_unregister(mm_t *mm) noexcept nogil
cdef bint grow(mem_t *m, void **array, uint64_t *room, uint64_t wanted, uint64_t item) noexcept nogil
