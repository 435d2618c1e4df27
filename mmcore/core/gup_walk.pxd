"""Acquiring: get_user_pages and pin_user_pages. What one call is, and who does which part of it.

    gup_walk    the structure all of them share; references of one leaf
    gup_args    flags and arguments: what is refused before anything is looked at; errors in words
    gup_fast    the walk without locks, over what is mapped and allowed already
    gup_slow    the walk under mmap_lock: VMAs are checked, faults are taken
    migrate     longterm pins: which folios must not stay where they are, and moving them
    output      where the pages go
    gup         the calls: fast, then slow for the rest; all of it again after a migration

Laws
    Both walks give one result: the same pages, references, pins and errno, whichever of them did which part.
    acquire="page" (a look-up, a lock and a counter update a page, as before 2020) and "leaf" (one a leaf) leave one state.
    A page is returned only while an entry that allowed it named it after its reference was taken: what is freed, split,
    collapsed, truncated or write-protected meanwhile is given back, and looked at again.
    A pinned anonymous page is exclusive, and stays so until it is freed: fork and GUP see each other (below).
    Partial success is success: pages that were had before an error stay, and the error is not told. A longterm pin that
    cannot be migrated is the exception: nothing stays.
    nr_foll_pin_acquired grows by what was taken, also when it is given back within the call.

Memory order
    Fast walk   load the entry (acquire); take the reference (compare-and-swap, then a full barrier); load the entry again.
                Who unmaps stores the entry, then drops its reference: either the second look sees the store, or the
                reference came first and keeps the folio.
    Fork        makes write_protect_seq odd, write-protects, makes it even. A fast walk that pins looks at it before and
                after: odd or changed means that all of its pages go back. It sets MMF_HAS_PINNED before its first look,
                fork reads that after making the number odd.
    Exclusive   who takes PG_owner_2 away changes the entry first, then looks for pins; a pin comes before the second look
                at the entry, and the look at PG_owner_2 after that.

Locks: the fast walk holds none. The slow walk holds mmap_lock for reading, and a table's lock while it takes references of
pages that the table names; references are taken under it, so that no second look is needed.
"""
from libc.errno cimport EAGAIN, ENOMEM, EREMOTEIO
from libc.stdint cimport int64_t, uint32_t, uint64_t
from mmcore.core.memory cimport *
from mmcore.core.folio cimport *
from mmcore.core.output cimport LEAF_MAX_PAGES, LEAF_PFN_BITS, leaf_count, leaf_pfn, leaf_word
from mmcore.core.space cimport mm_t, vma_t

cdef extern from *:
    """
    /* Between a read-modify-write that took a reference and the second look at what it was taken for. */
    #if defined(__x86_64__) || defined(__i386__)
    #define mm_after_rmw() __asm__ __volatile__("" ::: "memory")
    #else
    #define mm_after_rmw() mm_full_barrier()
    #endif
    """
    void mm_after_rmw() nogil

cdef enum gup_why:              # what ended a walk: the words that go with an errno
    WHY_NOTHING
    WHY_NO_VMA
    WHY_IO                      # VM_IO or VM_PFNMAP
    WHY_NOT_ANON
    WHY_FSDAX
    WHY_SPLIT_HUGETLB
    WHY_SECRETMEM
    WHY_DIRTY_TRACKING
    WHY_NO_WRITE
    WHY_FORCE_SHARED
    WHY_NO_READ
    WHY_NO_MEMORY
    WHY_SIGBUS
    WHY_SIGSEGV
    WHY_HWPOISON
    WHY_NOFAULT
    WHY_HOLE
    WHY_SPECIAL
    WHY_P2PDMA
    WHY_REFS
    WHY_OUTPUT
    WHY_MIGRATE
    WHY_COHERENT
    WHY_BUSY
    WHY_SIGNAL
    WHY_OVERFLOW
    WHY_TASK_SIZE
    WHY_NOWAIT

cdef enum:
    GUP_CHUNK = 512             # leaves that the fast walk takes before they are validated and handed on
    GUP_MISS = -7001            # nothing there that the walk may take: fault it in
    GUP_UNSHARE = -7002         # there, and to be made exclusive first (-EMLINK in the kernel)

cdef struct gup_t:              # one walk, or a stretch of one
    mem_t *m
    mm_t *mm
    uint64_t start              # first address
    uint64_t addr               # next address
    uint64_t end
    unsigned flags              # FOLL_*, internal ones included
    bint page_by_page           # acquire="page"
    # what was taken, in order
    uint64_t *leaf
    uint64_t nr_leaves
    uint64_t room
    uint64_t next_pfn           # what would extend the last leaf
    bint growing                # leaf is malloc'ed and may grow
    const uint64_t *fetched     # the entries whose first pages were prefetched from the table before
    # counted at the end
    uint64_t pins
    uint64_t ref_atomics
    uint64_t pincount_atomics
    uint64_t head_lookups
    uint64_t leaf_walks
    # a file's kind, so that its registry is asked once
    uint64_t seen_mapping
    int seen_kind
    # how it ended
    int error                   # negative errno, GUP_*
    int why                     # gup_why
    uint64_t bad_pfn

cdef inline bint starts_range(mem_t *m, uint64_t pfn) noexcept nogil:
    """Is this the first page of a device? Leaves do not run into it."""
    cdef device_t *d
    if mm_likely(pfn < m.nr_ram):
        return False
    d = device_of(m, pfn)
    return d != NULL and d.start == pfn

cdef bint more_leaves(gup_t *w) noexcept nogil
cdef inline bint note_leaf(gup_t *w, uint64_t pfn, uint64_t count) noexcept nogil:
    """Remember pages whose references were taken; the caller made sure that there is room for one word more."""
    if pfn == w.next_pfn and leaf_count(w.leaf[w.nr_leaves - 1]) + count <= LEAF_MAX_PAGES and not starts_range(w.m, pfn):
        w.leaf[w.nr_leaves - 1] += count << LEAF_PFN_BITS
    else:
        w.leaf[w.nr_leaves] = leaf_word(pfn, count)
        w.nr_leaves += 1
    w.next_pfn = pfn + count
    return True

cdef inline bint leaf_room(gup_t *w) noexcept nogil:
    """Is there room for one leaf more? Asked before its reference is taken."""
    return mm_likely(w.nr_leaves < w.room) or (w.growing and more_leaves(w))

# ---- references of one leaf, all in one folio --------------------------------------------------------------------------
cdef inline int grab_leaf(gup_t *w, uint64_t pfn, uint64_t n, uint64_t *head, bint *large) noexcept nogil:
    """Take n references or pins on the folio of pfn: 0, -ENOMEM, -EREMOTEIO, or -EAGAIN when it was split meanwhile.

    The zero page is not pinned, and no error. n pages from pfn on are in the folio, as far as an entry says.
    """
    cdef mem_t *m = w.m
    cdef uint64_t at = compound_head_pfn(m.map, pfn), flags, amount = n
    cdef page_t *page = &m.map[at]
    cdef bint pin = (w.flags & FOLL_PIN) != 0
    cdef device_t *d
    cdef uint32_t old
    flags = a64_load_relaxed(&page.flags)
    head[0] = at
    large[0] = (flags >> PG_head) & 1
    w.head_lookups += 1
    if mm_unlikely((flags >> ZONE_SHIFT) & 7 == ZONE_DEVICE) and not w.flags & FOLL_PCI_P2PDMA:
        d = device_of(m, at)
        if d != NULL and d.type == DEVICE_PCI_P2PDMA:
            w.bad_pfn = pfn
            return -EREMOTEIO
    if pin:
        if mm_unlikely(at == m.zero_pfn):
            return 0
        if not large[0]:
            amount = n << GUP_PIN_COUNTING_SHIFT
    old = refs_load(page)
    if mm_unlikely(amount >> 31) or mm_unlikely(not ref_add_positive(page, amount)):
        w.bad_pfn = pfn
        return -ENOMEM
    if mm_unlikely(compound_head_pfn(m.map, pfn) != at or page_is_head(page) != large[0]):
        put_grabbed(m, at, <uint32_t>amount)
        return -EAGAIN
    w.ref_atomics += 1
    if not pin:
        note_plain_refs(page, old, <uint32_t>n)
        return 0
    w.pins += n
    if large[0]:
        a32_fetch_add_relaxed(&as_folio(page)._pincount, <uint32_t>n)
        w.pincount_atomics += 1
    return 0

cdef inline void drop_leaf(gup_t *w, uint64_t head, bint large, uint64_t n) noexcept nogil:
    """Take back what grab_leaf just took. Counted as taken all the same, and as released, so that the sums agree."""
    cdef uint32_t amount = <uint32_t>n
    if w.flags & FOLL_PIN:
        if head == w.m.zero_pfn:
            return
        stat_add(w.m, NR_FOLL_PIN_RELEASED, <int64_t>n)
        if large:
            a32_fetch_sub_acq_rel(&as_folio(&w.m.map[head])._pincount, amount)
        else:
            amount <<= GUP_PIN_COUNTING_SHIFT
    put_grabbed(w.m, head, amount)

cdef void put_grabbed(mem_t *m, uint64_t head, uint32_t amount) noexcept nogil
cdef void count_walk(gup_t *w) noexcept nogil               # adds the counts to the Memory's, and clears them
cdef int kind_of_file(mem_t *m, uint64_t mapping) noexcept nogil       # file_kind of the file behind page.mapping; -1: gone
