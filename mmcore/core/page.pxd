"""struct page: flags, types, the tail word, and everything that looks at pages without a Memory at hand.

Identity: a page is its PFN; `struct page *map` below is always the base of a mem_map and a page is `map[pfn]`.
Nothing here takes references; a look-up without one may be stale by the time it returns, as in the kernel.
"""
from libc.stdint cimport int32_t, int64_t, uint8_t, uint32_t, uint64_t

cdef extern from "page.h" nogil:
    ctypedef struct page_t "struct page":
        uint64_t flags              # PG_* | zone << ZONE_SHIFT | node << NODE_SHIFT
        uint64_t lru_next           # PFN link, bit 0 clear; shares its word with the next two
        uint64_t compound_info      # tails: the tail word
        uint64_t pgmap              # ZONE_DEVICE heads: (index of the device + 1) << 1
        uint64_t lru_prev           # PFN link
        uint64_t mapping            # FOLIO_MAPPING_ANON | ..., or TAIL_MAPPING
        uint64_t index
        uint64_t private "private_"
        int32_t _mapcount           # mappings - 1
        uint32_t page_type          # the same word: PGTY_* << 24 | owner's data, or all ones
        int32_t _refcount
        uint64_t memcg_data
    ctypedef struct folio_t "struct folio":
        uint64_t _flags_1           # order in the low byte
        int32_t _large_mapcount     # mappings - 1
        int32_t _nr_pages_mapped
        int32_t _entire_mapcount    # PMD/PUD mappings - 1
        int32_t _pincount
        int32_t _mm_id_mapcount[2]
        uint32_t _mm_id[2]
        uint32_t _nr_pages
        uint64_t _deferred_list[2]
        uint64_t _hugetlb_subpool
        uint64_t _hugetlb_cgroup
        uint64_t _hugetlb_cgroup_rsvd
        uint64_t _hugetlb_hwpoison

cdef extern from "atomic.h" nogil:
    uint32_t a32_load_relaxed(const void *p)
    uint32_t a32_load_acquire(const void *p)
    void a32_store_relaxed(void *p, uint32_t v)
    void a32_store_release(void *p, uint32_t v)
    uint32_t a32_fetch_add_relaxed(void *p, uint32_t v)
    uint32_t a32_fetch_add_acq_rel(void *p, uint32_t v)
    uint32_t a32_fetch_sub_acq_rel(void *p, uint32_t v)
    bint a32_cas_acq_rel(void *p, uint32_t *expected, uint32_t v)
    uint64_t a64_load_relaxed(const void *p)
    uint64_t a64_load_acquire(const void *p)
    void a64_store_relaxed(void *p, uint64_t v)
    void a64_store_release(void *p, uint64_t v)
    uint64_t a64_fetch_add_relaxed(void *p, uint64_t v)
    uint64_t a64_fetch_add_release(void *p, uint64_t v)
    uint64_t a64_exchange_acq_rel(void *p, uint64_t v)
    uint64_t a64_fetch_or_acquire(void *p, uint64_t v)
    uint64_t a64_fetch_or_relaxed(void *p, uint64_t v)
    uint64_t a64_fetch_or_acq_rel(void *p, uint64_t v)
    uint64_t a64_fetch_and_release(void *p, uint64_t v)
    uint64_t a64_fetch_and_acq_rel(void *p, uint64_t v)
    bint a64_cas_acq_rel(void *p, uint64_t *expected, uint64_t v)
    void cpu_relax()
    void mm_full_barrier()
    bint mm_planted(int n)      # a test's own fault; 0 but in the race explorer's build
    void copy_shared(void *to, const void *source, size_t n)    # memcpy() of what others may write meanwhile: bytes of files
    void prefetch_read(const void *p)
    void prefetch_write(const void *p)
    void stream64(void *p, uint64_t v)
    void stream_end()
    int ctz64(uint64_t v)
    int clz64(uint64_t v)
    int popcount64(uint64_t v)
    bint mm_unlikely(bint x)
    bint mm_likely(bint x)
    unsigned thread_slot(unsigned nr_slots)

# ---- flags: bit numbers of Linux 7.x, `enum pageflags` ------------------------------------------------------------
cdef enum:
    PG_locked = 0               # the folio lock; must share a byte with PG_waiters
    PG_writeback = 1
    PG_referenced = 2
    PG_uptodate = 3
    PG_dirty = 4
    PG_lru = 5
    PG_head = 6                 # first page of a folio of order >= 1
    PG_waiters = 7              # somebody sleeps for PG_locked
    PG_active = 8
    PG_workingset = 9
    PG_owner_priv_1 = 10
    PG_owner_2 = 11             # anon_exclusive
    PG_arch_1 = 12
    PG_reserved = 13
    PG_private = 14
    PG_private_2 = 15
    PG_reclaim = 16
    PG_swapbacked = 17
    PG_unevictable = 18
    PG_dropbehind = 19
    PG_mlocked = 20
    PG_hwpoison = 21
    PG_young = 22
    PG_idle = 23
    PG_arch_2 = 24
    PG_arch_3 = 25
    # Ours, in bits that Linux leaves unused between its flags and the zone:
    PG_mm_written = 40          # the page's bytes were handed out since it was allocated; until then they read as zero
    PG_mm_many_refs = 41        # a small folio that came near GUP_PIN_COUNTING_BIAS plain references: its pins and
                                # plain references can no longer be told apart
    PG_mm_pool = 42             # a hugetlb folio that waits in its pool
    PG_mm_retired = 43          # a broken page that is out of use for ever
    PG_mm_isolated = 45         # whoever set it moves the folio (the kernel takes it off its list: PG_lru)
    # SECOND flags, in tail 1's word
    PG_has_hwpoisoned = 8
    PG_large_rmappable = 9
    PG_partially_mapped = 16
    PG_mm_tails = 44            # ours: some tail has more than its tail word: bytes, a map count, an exclusive mark
    # where x86-64 has the zone and the node
    ZONE_SHIFT = 51
    NODE_SHIFT = 54

cdef enum:
    ZONE_NORMAL = 2             # ids of an x86-64 kernel with ZONE_DMA, ZONE_DMA32 and ZONE_DEVICE
    ZONE_MOVABLE = 3
    ZONE_DEVICE = 4

cdef enum:                      # page_type >> 24
    PGTY_buddy = 0xf0
    PGTY_offline = 0xf1
    PGTY_table = 0xf2
    PGTY_guard = 0xf3
    PGTY_hugetlb = 0xf4
    PGTY_slab = 0xf5
    PGTY_zsmalloc = 0xf6
    PGTY_unaccepted = 0xf7
    PGTY_large_kmalloc = 0xf8
    PGTY_netpp = 0xf9

cdef enum:
    FOLIO_MAPPING_ANON = 1
    FOLIO_MAPPING_KSM = 2       # with ANON
    GUP_PIN_COUNTING_BIAS = 1024
    GUP_PIN_COUNTING_SHIFT = 10
    MAX_FOLIO_ORDER = 30        # what the order byte and a 64-bit tail word can tell; far above any hugetlb page

cdef enum:                      # enum migratetype, one a page block
    MIGRATE_UNMOVABLE = 0
    MIGRATE_MOVABLE = 1
    MIGRATE_CMA = 4
    MIGRATE_ISOLATE = 5

cdef extern from *:
    """
    /* LIST_POISON-like mark in the mapping word of tails from 3 on: what the kernel's check at free looks for */
    #define MM_TAIL_MAPPING 0xdead000000000400ULL
    #define MM_ONE 1ULL
    #define MM_NO_TYPE 0xffffffffu
    """
    const uint64_t TAIL_MAPPING "MM_TAIL_MAPPING"
    const uint64_t ONE "MM_ONE"
    const uint32_t NO_TYPE "MM_NO_TYPE"


# ---- the tail word -----------------------------------------------------------------------------------------------
cdef inline uint64_t tail_word(unsigned order) noexcept nogil:
    """The word at offset 8 of each tail of a folio of this order (>= 1)."""
    return ((~<uint64_t>0) << (order + 6)) | 1

cdef inline unsigned tail_word_order(uint64_t word) noexcept nogil:
    """The order in a tail word; the word must have bit 0 set."""
    return <unsigned>ctz64(word & ~<uint64_t>1) - 6

cdef inline uint64_t head_of(uint64_t pfn, uint64_t word) noexcept nogil:
    """PFN of the head, given a page and its word at offset 8."""
    cdef uint64_t mask = ((word & 1) - 1) | word
    return ((pfn << 6) & mask) >> 6

cdef inline uint64_t compound_head_pfn(const page_t *map, uint64_t pfn) noexcept nogil:
    return head_of(pfn, a64_load_relaxed(&map[pfn].compound_info))

cdef inline bint page_is_tail(const page_t *page) noexcept nogil:
    return a64_load_relaxed(&page.compound_info) & 1

cdef inline bint page_is_head(const page_t *page) noexcept nogil:
    return (a64_load_relaxed(&page.flags) >> PG_head) & 1

cdef inline folio_t *as_folio(const page_t *head) noexcept nogil:
    return <folio_t *>head

cdef inline unsigned folio_order_of(const page_t *head) noexcept nogil:
    """Order of the folio with this head; 0 for a small one."""
    if not page_is_head(head):
        return 0
    return <unsigned>(a64_load_relaxed(&as_folio(head)._flags_1) & 0xff)

cdef inline bint test_flag(const page_t *page, unsigned bit) noexcept nogil:
    return (a64_load_relaxed(&page.flags) >> bit) & 1

cdef inline void set_flag(page_t *page, unsigned bit) noexcept nogil:
    a64_fetch_or_relaxed(&page.flags, ONE << bit)

cdef inline void clear_flag(page_t *page, unsigned bit) noexcept nogil:
    a64_fetch_and_release(&page.flags, ~(ONE << bit))

cdef inline void mark_tails(page_t *head) noexcept nogil:
    """Note that the tails of a folio must be written when it is freed."""
    if not (a64_load_relaxed(&as_folio(head)._flags_1) >> PG_mm_tails) & 1:
        a64_fetch_or_relaxed(&as_folio(head)._flags_1, ONE << PG_mm_tails)

cdef inline unsigned page_zone(const page_t *page) noexcept nogil:
    return <unsigned>(a64_load_relaxed(&page.flags) >> ZONE_SHIFT) & 7

cdef inline bint page_has_type(const page_t *page) noexcept nogil:
    """A typed page stores all ones in the top bits of what is otherwise its map count."""
    return <int32_t>a32_load_relaxed(&page.page_type) < <int32_t>0xff000000

cdef inline bint page_type_is(const page_t *page, unsigned pgty) noexcept nogil:
    return (a32_load_relaxed(&page.page_type) >> 24) == pgty

cdef inline bint folio_is_hugetlb(const page_t *head) noexcept nogil:
    return page_type_is(head, PGTY_hugetlb)

cdef inline int64_t folio_mapcount_of(const page_t *head) noexcept nogil:
    """Mappings of the folio: small from _mapcount (0 when that is a type), large from _large_mapcount."""
    cdef int32_t count
    if page_is_head(head):
        return <int64_t><int32_t>a32_load_relaxed(&as_folio(head)._large_mapcount) + 1
    count = <int32_t>a32_load_relaxed(&head._mapcount)
    if count < -1:
        return 0
    return <int64_t>count + 1

cdef inline int64_t folio_mapcount_seen(const page_t *head) noexcept nogil:
    """The same for a folio that may be free: a block kept ready for a PMD leaf counts its mapping ahead."""
    if a32_load_relaxed(&head._refcount) == 0 and head.mapping == 0:
        return 0
    return folio_mapcount_of(head)

cdef inline bint folio_is_anon(const page_t *head) noexcept nogil:
    return a64_load_relaxed(&head.mapping) & FOLIO_MAPPING_ANON


# ---- writing a whole page or folio: the caller owns the frames -----------------------------------------------------
# Relaxed stores, which cost what plain ones cost: others may look at the words without holding a reference, and find
# out afterwards that what they saw was stale.
cdef inline void page_init(page_t *page, uint64_t flags, uint32_t refcount) noexcept nogil:
    """Write all 64 bytes: a page that is no tail, maps nothing and has this count."""
    a64_store_relaxed(&page.mapping, 0)
    a64_store_relaxed(&page.index, 0)
    a64_store_relaxed(&page.private, 0)
    a64_store_relaxed(&page.lru_prev, 0)
    a64_store_relaxed(&page.memcg_data, 0)
    a32_store_relaxed(&page._mapcount, <uint32_t>-1)
    a64_store_relaxed(&page.flags, flags)
    a64_store_relaxed(&page.compound_info, 0)
    # Last: with a count the page can be found by others.
    a32_store_release(&page._refcount, refcount)

cdef inline void prep_tail(page_t *page, uint64_t flags, uint64_t word) noexcept nogil:
    """Write all 64 bytes of a tail: refcount 0, map count -1, its tail word."""
    a64_store_relaxed(&page.lru_prev, 0)
    a64_store_relaxed(&page.mapping, TAIL_MAPPING)
    a64_store_relaxed(&page.index, 0)
    a64_store_relaxed(&page.private, 0)
    a32_store_relaxed(&page._mapcount, <uint32_t>-1)
    a64_store_relaxed(&page.memcg_data, 0)
    a64_store_relaxed(&page.flags, flags)
    a32_store_relaxed(&page._refcount, 0)
    a64_store_relaxed(&page.compound_info, word)

cdef inline void prep_folio_words(page_t *head, unsigned order) noexcept nogil:
    """Write what a folio keeps in tails 1 and 2, after these were written as tails."""
    cdef folio_t *folio = as_folio(head)
    a64_store_relaxed(&folio._flags_1, folio._flags_1 | order)
    a32_store_relaxed(&folio._large_mapcount, <uint32_t>-1)
    a32_store_relaxed(&folio._nr_pages_mapped, 0)
    a32_store_relaxed(&folio._entire_mapcount, <uint32_t>-1)
    a32_store_relaxed(&folio._pincount, 0)
    a32_store_relaxed(&folio._mm_id_mapcount[0], <uint32_t>-1)
    a32_store_relaxed(&folio._mm_id_mapcount[1], <uint32_t>-1)
    a32_store_relaxed(&folio._mm_id[0], 0)
    a32_store_relaxed(&folio._mm_id[1], 0)
    a32_store_relaxed(&folio._nr_pages, <uint32_t>(ONE << order))
    if order > 1:
        # The kernel's empty list points to itself; ours are PFN links, and 0 is never a PFN.
        a64_store_relaxed(&folio._deferred_list[0], 0)
        a64_store_relaxed(&folio._deferred_list[1], 0)

cdef enum:
    ENTIRELY_MAPPED = 0x800000      # of _nr_pages_mapped: a PMD or PUD leaf maps the folio

cdef inline void prep_mapped_once(page_t *head) noexcept nogil:
    """Of a folio that was just prepared: its map counts as one PMD leaf has them."""
    cdef folio_t *folio = as_folio(head)
    a32_store_relaxed(&folio._large_mapcount, 0)
    a32_store_relaxed(&folio._entire_mapcount, 0)
    a32_store_relaxed(&folio._nr_pages_mapped, ENTIRELY_MAPPED)

cdef inline void prep_compound_page(page_t *head, uint64_t flags, unsigned order) noexcept nogil:
    """Write the 64 * 2^order bytes of a folio with refcount 0; the caller publishes it by storing the count.

    The head gets `flags` and PG_head; the tails get the zone and node bits of `flags`.
    """
    cdef uint64_t i, word = tail_word(order)
    cdef uint64_t zone = flags & ~((ONE << ZONE_SHIFT) - 1)
    page_init(head, flags | (ONE << PG_head), 0)
    for i in range(1, ONE << order):
        prep_tail(head + i, zone, word)
    prep_folio_words(head, order)

cdef inline void prep_hugetlb_folio(page_t *head) noexcept nogil:
    """Mark a fresh compound page as hugetlb: a type on the head only, and its words in tail 3."""
    cdef folio_t *folio = as_folio(head)
    a32_store_relaxed(&head.page_type, <uint32_t>PGTY_hugetlb << 24)
    folio._hugetlb_subpool = 0
    folio._hugetlb_cgroup = 0
    folio._hugetlb_cgroup_rsvd = 0
    folio._hugetlb_hwpoison = 0
