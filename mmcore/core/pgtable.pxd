"""Page tables: radix levels of frames, 64-bit entries with the x86 meanings, a lock a table, look-ups without locks.

    level 0   entries are PTEs            a leaf maps 1 page
    level 1   entries are PMDs            a leaf maps 2^(shift - 3) pages: 512 at 4 KiB
    level 2   entries are PUDs            a leaf maps the square of that
    level 3   entries are PGDs (4 KiB pages only)
A table fills one page of mem_map, so it has 2^(page_shift - 3) entries. 47 bits of address need 4 levels at 4 KiB pages
and 3 at 16 and 64 KiB. Tables are real frames (PGTY_table, from the buddy allocator) rather than malloc'ed: that is what
a fork or a sparse mapping costs a machine, check() can account for each of them, and a saved Memory holds them. It costs
nothing measurable, since one table serves 512 pages: clearing it is 0.2 ns a page.

Laws
    An entry is none (0), a table, a leaf, or not present (swap). A table's page says how many entries of it are not none
    (index); its lock is a word of it (private).
    Entries are 64-bit words, written by a single store: a reader without a lock sees the one or the other.
    An entry changes only under the lock of its table, but for the accessed and dirty bits, which the processor sets by
    compare-and-swap.
    A table is freed only after it was unlinked and every walker that might have seen it has left (pgd_synchronize).

Memory order
    New table, new leaf      release: who finds the entry finds what it leads to
    Reading an entry         acquire
    walk_enter               a full barrier between "I am here" and the first look; pgd_synchronize has one between the
                             unlinking and its look at who is there. One of the two sees the other.

Lock order: an upper table before a lower one; of two tables of one level in fork and mremap, the source first (the other
belongs to an mm that nobody else can reach, or both to one mm whose mmap_lock is held for writing).
"""
from libc.stdint cimport int64_t, uint32_t, uint64_t
from mmcore.core.memory cimport *

cdef extern from *:
    """
    #define MM_PTE_PRESENT     0x001ULL
    #define MM_PTE_RW          0x002ULL
    #define MM_PTE_USER        0x004ULL
    #define MM_PTE_ACCESSED    0x020ULL
    #define MM_PTE_DIRTY       0x040ULL
    #define MM_PTE_PSE         0x080ULL
    #define MM_PTE_PROTNONE    0x100ULL
    #define MM_PTE_SPECIAL     0x200ULL
    #define MM_PTE_SOFT_DIRTY  0x800ULL
    #define MM_PTE_PFN_MASK    0x000ffffffffff000ULL
    #define MM_SWP_SOFT_DIRTY  0x002ULL
    #define MM_SWP_EXCLUSIVE   0x008ULL
    #define MM_SWP_TYPE_SHIFT  58
    """
    const uint64_t PTE_PRESENT "MM_PTE_PRESENT"
    const uint64_t PTE_RW "MM_PTE_RW"
    const uint64_t PTE_USER "MM_PTE_USER"
    const uint64_t PTE_ACCESSED "MM_PTE_ACCESSED"
    const uint64_t PTE_DIRTY "MM_PTE_DIRTY"
    const uint64_t PTE_PSE "MM_PTE_PSE"                 # a leaf above level 0
    const uint64_t PTE_PROTNONE "MM_PTE_PROTNONE"       # mapped, but no access: PRESENT is clear then
    const uint64_t PTE_SPECIAL "MM_PTE_SPECIAL"         # zero page, or a frame that is not ours to count
    const uint64_t PTE_SOFT_DIRTY "MM_PTE_SOFT_DIRTY"
    const uint64_t PTE_PFN_MASK "MM_PTE_PFN_MASK"       # the PFN << 12 whatever the page size
    const uint64_t SWP_SOFT_DIRTY "MM_SWP_SOFT_DIRTY"
    const uint64_t SWP_EXCLUSIVE "MM_SWP_EXCLUSIVE"
    const int SWP_TYPE_SHIFT "MM_SWP_TYPE_SHIFT"

cdef enum:
    PTE_PFN_SHIFT = 12
    MAX_LEVELS = 4
    TASK_BITS = 47
    SWP_TYPE_SWAP = 1           # a slot of the Memory's swap
    SWP_TYPE_MIGRATION = 2      # a page that is being moved; the offset is its PFN
    NR_WALK_SLOTS = 16          # a power of two

cdef struct walk_slot_t:        # walkers of some threads, in each of two epochs; a cache line
    uint64_t inside[2]
    uint64_t pad[6]

cdef struct pgd_t:              # the tables of one address space
    mem_t *m
    uint64_t top                # PFN of the top table
    int levels
    unsigned bits               # of address that one level decodes
    unsigned shift              # page_shift
    uint64_t nr_tables          # the top one included
    uint64_t epoch
    uint64_t synced             # epoch changes go one at a time: a spin lock
    walk_slot_t slot[NR_WALK_SLOTS]

cdef struct dead_t:             # tables that were unlinked, linked through lru_next, to be freed by tables_free
    uint64_t first
    uint64_t nr

# ---- entries -------------------------------------------------------------------------------------------------------
cdef inline bint pte_present(uint64_t e) noexcept nogil:
    """Does it map something, or lead to a table? As in the kernel, PROT_NONE counts as present."""
    return (e & (PTE_PRESENT | PTE_PROTNONE)) != 0

cdef inline uint64_t pte_pfn(uint64_t e) noexcept nogil:
    return (e & PTE_PFN_MASK) >> PTE_PFN_SHIFT

cdef inline bint pte_leaf(uint64_t e, int level) noexcept nogil:
    return pte_present(e) and (level == 0 or (e & PTE_PSE) != 0)

cdef inline bint pte_table(uint64_t e, int level) noexcept nogil:
    return level > 0 and (e & (PTE_PRESENT | PTE_PSE)) == PTE_PRESENT

cdef inline bint pte_swap(uint64_t e) noexcept nogil:
    return e != 0 and not pte_present(e)

cdef inline uint64_t swp_entry(uint64_t type, uint64_t offset) noexcept nogil:
    return (type << SWP_TYPE_SHIFT) | (offset << PTE_PFN_SHIFT)

cdef inline uint64_t swp_offset(uint64_t e) noexcept nogil:
    return (e & PTE_PFN_MASK) >> PTE_PFN_SHIFT

cdef inline uint64_t swp_type(uint64_t e) noexcept nogil:
    return e >> SWP_TYPE_SHIFT

# ---- addresses -----------------------------------------------------------------------------------------------------
cdef inline unsigned level_order(const pgd_t *g, int level) noexcept nogil:
    """log2 of the pages that one entry of a level spans."""
    return <unsigned>level * g.bits

cdef inline unsigned level_shift(const pgd_t *g, int level) noexcept nogil:
    return g.shift + <unsigned>level * g.bits

cdef inline uint64_t level_size(const pgd_t *g, int level) noexcept nogil:
    """Bytes that one entry of a level spans."""
    return ONE << (g.shift + <unsigned>level * g.bits)

cdef inline uint64_t table_index(const pgd_t *g, uint64_t addr, int level) noexcept nogil:
    return (addr >> (g.shift + <unsigned>level * g.bits)) & ((ONE << g.bits) - 1)

cdef inline uint64_t level_end(const pgd_t *g, uint64_t addr, uint64_t end, int level) noexcept nogil:
    """The end of what the entry that holds addr spans, or `end` when that comes first (pmd_addr_end)."""
    cdef uint64_t size = level_size(g, level)
    cdef uint64_t next = (addr & ~(size - 1)) + size
    return next if next < end else end

cdef inline uint64_t *table_at(const mem_t *m, uint64_t table) noexcept nogil:
    """The entries of the table in this frame."""
    return <uint64_t *>(m.bytes + (table << m.page_shift))

cdef inline uint64_t task_size(const pgd_t *g) noexcept nogil:
    return (ONE << TASK_BITS) - (ONE << g.shift)

# ---- the lock of a table, and how many entries it holds -------------------------------------------------------------
cdef void table_lock_slow(mem_t *m, uint64_t table) noexcept nogil
cdef inline void table_lock(mem_t *m, uint64_t table) noexcept nogil:
    if mm_unlikely(a64_fetch_or_acquire(&m.map[table].private, 1) & 1):
        table_lock_slow(m, table)

cdef inline void table_unlock(mem_t *m, uint64_t table) noexcept nogil:
    a64_store_release(&m.map[table].private, 0)

cdef inline uint64_t *table_used(mem_t *m, uint64_t table) noexcept nogil:
    return &m.map[table].index

# ---- walkers -------------------------------------------------------------------------------------------------------
cdef int walk_enter(pgd_t *g) noexcept nogil                        # a token for walk_leave; no table goes away until then
cdef void walk_leave(pgd_t *g, int token) noexcept nogil
cdef void pgd_synchronize(pgd_t *g) noexcept nogil                  # waits for walkers; hold no lock they may want

cdef inline uint64_t *walk_find(const pgd_t *g, uint64_t addr, int *level, uint64_t *table) noexcept nogil:
    """Descend to the entry that decides about addr, at `level` or above: a leaf, not present, or none.

    On return *level is where it was found and *table whose entry it is. Entries change behind a reader without the
    table's lock; it loads the word once and works on the copy.
    """
    cdef int k = g.levels - 1
    cdef uint64_t at = a64_load_acquire(&g.top)
    cdef uint64_t *entry
    cdef uint64_t e
    while True:
        entry = table_at(g.m, at) + table_index(g, addr, k)
        if k == level[0]:
            break
        e = a64_load_acquire(entry)
        if not pte_table(e, k):
            break
        at = pte_pfn(e)
        k -= 1
    level[0] = k
    table[0] = at
    return entry

# ---- building and taking down ---------------------------------------------------------------------------------------
cdef int pgd_init(pgd_t *g, mem_t *m) noexcept nogil                # 0, -ENOMEM
cdef uint64_t table_alloc(pgd_t *g) noexcept nogil                  # an empty table's frame, or 0
cdef void table_discard(pgd_t *g, uint64_t table) noexcept nogil    # one that was never linked
# The table of that level, or 0 with -ENOMEM; -EEXIST under a leaf.
cdef uint64_t table_make(pgd_t *g, uint64_t addr, int level, int *error) noexcept nogil
cdef void table_unlinked(pgd_t *g, dead_t *dead, uint64_t table) noexcept nogil
cdef void tables_unlink(pgd_t *g, dead_t *dead, uint64_t start, uint64_t end, uint64_t floor, uint64_t ceiling) noexcept nogil
cdef void tables_free(pgd_t *g, dead_t *dead) noexcept nogil        # synchronizes first
cdef void pgd_destroy(pgd_t *g) noexcept nogil                      # every leaf is gone already
