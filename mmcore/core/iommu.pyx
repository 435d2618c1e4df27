"""IOMMU page tables and the domain as Python sees it.

Units: IOVAs, physical addresses and sizes: bytes, uint64.
Raises: InvalidArgument for what is misaligned or too large, MMError for what is mapped already.
Threads: a lock a domain.
Kernel: struct iommu_domain, iommu_map(), iommu_unmap(), iommu_iova_to_phys().
"""
from libc.errno cimport EEXIST, EINVAL, ENOMEM
from libc.stdlib cimport calloc, free, malloc
from libc.string cimport memset
from mmcore.core.folio cimport count_arg

import errno as _errno
import threading

from .errors import InvalidArgument, MMError
from .size import format_size, parse_size

__all__ = ["IOMMUDomain"]

cdef uint64_t NOT_MAPPED = ~<uint64_t>0

# ---- tables -----------------------------------------------------------------------------------------------------------
cdef iommu_node_t *node_alloc(iommu_t *d) noexcept nogil:
    cdef iommu_node_t *node
    if d.m != NULL and inject_fails(d.m, INJECT_TABLE):
        return NULL
    node = <iommu_node_t *>malloc(sizeof(iommu_node_t))
    if node == NULL:
        return NULL
    node.nr_used = 0
    node.entry = <uint64_t *>calloc(ONE << d.bits, sizeof(uint64_t))
    if node.entry == NULL:
        free(node)
        return NULL
    d.nodes += 1
    return node

cdef void node_free(iommu_t *d, iommu_node_t *node) noexcept nogil:
    free(node.entry)
    free(node)
    d.nodes -= 1

cdef void tree_free(iommu_t *d, iommu_node_t *node) noexcept nogil:
    cdef uint64_t i
    if node.nr_used:
        for i in range(ONE << d.bits):
            if node.entry[i] and not node.entry[i] & IOMMU_LEAF:
                tree_free(d, <iommu_node_t *>node.entry[i])
    node_free(d, node)

cdef int iommu_init(iommu_t *d, unsigned page_shift, uint64_t page_sizes) noexcept nogil:
    memset(d, 0, sizeof(iommu_t))
    d.page_shift = page_shift
    d.bits = page_shift - 3
    d.page_sizes = page_sizes
    d.top = <int>((64 - page_shift + d.bits - 1) // d.bits) - 1
    d.root = node_alloc(d)
    if d.root == NULL:
        return -ENOMEM
    pthread_mutex_init(&d.lock, NULL)
    return 0

cdef void iommu_destroy(iommu_t *d) noexcept nogil:
    if d.root != NULL:
        tree_free(d, d.root)
        pthread_mutex_destroy(&d.lock)
    memset(d, 0, sizeof(iommu_t))

cdef inline unsigned level_shift(const iommu_t *d, int level) noexcept nogil:
    return d.page_shift + <unsigned>level * d.bits

cdef inline uint64_t slot_of(const iommu_t *d, uint64_t iova, int level) noexcept nogil:
    return (iova >> level_shift(d, level)) & ((ONE << d.bits) - 1)

cdef uint64_t *find_leaf(iommu_t *d, uint64_t iova, int *level) noexcept nogil:
    """The leaf entry that maps an IOVA, NULL; at `level` the walk ended."""
    cdef iommu_node_t *node = d.root
    cdef uint64_t *entry
    level[0] = d.top
    while True:
        entry = &node.entry[slot_of(d, iova, level[0])]
        if entry[0] & IOMMU_LEAF:
            return entry
        if entry[0] == 0:
            return NULL
        node = <iommu_node_t *>entry[0]
        level[0] -= 1

cdef int leaf_level(const iommu_t *d, uint64_t aligned, uint64_t size) noexcept nogil:
    """The level of the largest leaf that fits both addresses (or-ed together) and the bytes left."""
    cdef int level = 2
    cdef unsigned shift
    while level > 0:
        shift = level_shift(d, level)
        if shift < 63 and (d.page_sizes >> shift) & 1 and size >> shift and not aligned & ((ONE << shift) - 1):
            return level
        level -= 1
    return 0

cdef int map_leaves(iommu_t *d, uint64_t iova, uint64_t phys, uint64_t count, int level, unsigned prot,
                    uint64_t *done) noexcept nogil:
    """Write up to `count` leaves of one level, as far as they lie in one table; done grows by the bytes. 0 or an error."""
    cdef iommu_node_t *path[IOMMU_LEVELS]
    cdef iommu_node_t *node = d.root
    cdef iommu_node_t *fresh
    cdef uint64_t *entry
    cdef uint64_t slot, k = 0, span = ONE << level_shift(d, level)
    cdef int at = d.top, error = 0
    path[at] = node
    while at > level:
        entry = &node.entry[slot_of(d, iova, at)]
        if entry[0] == 0:
            fresh = node_alloc(d)
            if fresh == NULL:
                prune(d, iova, path, at)
                return -ENOMEM
            entry[0] = <uint64_t>fresh
            node.nr_used += 1
        elif entry[0] & IOMMU_LEAF:
            prune(d, iova, path, at)
            return -EEXIST
        node = <iommu_node_t *>entry[0]
        at -= 1
        path[at] = node
    slot = slot_of(d, iova, level)
    while k < count and slot < ONE << d.bits:
        if node.entry[slot]:
            error = -EEXIST
            break
        if d.m != NULL and mm_unlikely(inject_fails(d.m, INJECT_IOMMU_MAP)):
            error = -ENOMEM
            break
        node.entry[slot] = phys | IOMMU_LEAF | prot
        phys += span
        slot += 1
        k += 1
    node.nr_used += k
    d.leaves += k
    d.maps += k
    d.mapped += k * span
    done[0] += k * span
    if error:
        prune(d, iova, path, level)
    return error

cdef void prune(iommu_t *d, uint64_t iova, iommu_node_t **path, int at) noexcept nogil:
    """Free the tables on the way down to path[at] that have no entries, from the bottom up."""
    cdef iommu_node_t *node
    while at < d.top:
        node = path[at]
        if node.nr_used:
            return
        at += 1
        path[at].entry[slot_of(d, iova, at)] = 0
        path[at].nr_used -= 1
        node_free(d, node)

cdef uint64_t unmap_leaves(iommu_t *d, uint64_t iova, uint64_t size) noexcept nogil:
    """Clear the leaf that maps an IOVA and those after it in its table, up to `size` bytes; the bytes from there, or 0.

    All of the first and the last leaf go; what lies before iova is not counted.
    """
    cdef iommu_node_t *path[IOMMU_LEVELS]
    cdef iommu_node_t *node = d.root
    cdef uint64_t slot, done, span, k = 1
    cdef int at = d.top
    while True:
        path[at] = node
        slot = slot_of(d, iova, at)
        if node.entry[slot] == 0:
            return 0
        if node.entry[slot] & IOMMU_LEAF:
            break
        node = <iommu_node_t *>node.entry[slot]
        at -= 1
    span = ONE << level_shift(d, at)
    done = span - (iova & (span - 1))
    node.entry[slot] = 0
    while done < size and slot + 1 < ONE << d.bits and node.entry[slot + 1] & IOMMU_LEAF:
        slot += 1
        node.entry[slot] = 0
        done += span
        k += 1
    node.nr_used -= k
    d.leaves -= k
    d.unmaps += k
    d.mapped -= k * span
    prune(d, iova, path, at)
    return done

# ---- the calls --------------------------------------------------------------------------------------------------------
cdef uint64_t unmap_range(iommu_t *d, uint64_t iova, uint64_t size) noexcept nogil:
    cdef uint64_t done = 0, n
    while done < size:
        n = unmap_leaves(d, iova + done, size - done)
        if n == 0:
            break
        done += n
    return done

cdef bint any_mapped(iommu_t *d, iommu_node_t *node, int level, uint64_t base, uint64_t first, uint64_t last) noexcept nogil:
    """Does a leaf map anything in [first, last], looking below one table whose first IOVA is base?"""
    cdef uint64_t i = 0, at
    if first > base:
        i = (first - base) >> level_shift(d, level)
    while i < ONE << d.bits:
        at = base + (i << level_shift(d, level))
        if at > last or at < base:
            return False
        if node.entry[i] & IOMMU_LEAF:
            return True
        if node.entry[i] and any_mapped(d, <iommu_node_t *>node.entry[i], level - 1, at, first, last):
            return True
        i += 1
    return False

cdef int iommu_map(iommu_t *d, uint64_t iova, uint64_t phys, uint64_t size, unsigned prot) noexcept nogil:
    cdef uint64_t mask = (ONE << d.page_shift) - 1, done = 0
    cdef int level, error = 0
    if size == 0 or (iova | phys | size) & mask or iova + (size - 1) < iova or phys + (size - 1) < phys:
        return -EINVAL
    pthread_mutex_lock(&d.lock)
    # Refused before anything changes: undoing then never touches what was there.
    if any_mapped(d, d.root, d.top, 0, iova, iova + (size - 1)):
        error = -EEXIST
    while error == 0 and done < size:
        # To the end of its table no larger leaf can fit: only its first entry is aligned for one.
        level = leaf_level(d, (iova + done) | (phys + done), size - done)
        error = map_leaves(d, iova + done, phys + done, (size - done) >> level_shift(d, level), level, prot & 7, &done)
    if error and done:
        unmap_range(d, iova, done)
    if error == 0:
        a64_fetch_add_relaxed(&d.map_calls, 1)
    pthread_mutex_unlock(&d.lock)
    return error

cdef uint64_t iommu_unmap_fast(iommu_t *d, uint64_t iova, uint64_t size) noexcept nogil:
    cdef uint64_t done
    if d.m != NULL and mm_unlikely(inject_fails(d.m, INJECT_IOMMU_UNMAP)):
        return 0
    pthread_mutex_lock(&d.lock)
    done = unmap_range(d, iova, size)
    a64_fetch_add_relaxed(&d.stale, done)
    pthread_mutex_unlock(&d.lock)
    return done

cdef void iommu_sync(iommu_t *d) noexcept nogil:
    a64_store_relaxed(&d.stale, 0)
    a64_fetch_add_relaxed(&d.syncs, 1)

cdef uint64_t iommu_unmap(iommu_t *d, uint64_t iova, uint64_t size) noexcept nogil:
    cdef uint64_t done = iommu_unmap_fast(d, iova, size)
    if done:
        iommu_sync(d)
    return done

cdef uint64_t iommu_iova_to_phys(iommu_t *d, uint64_t iova) noexcept nogil:
    cdef uint64_t *entry
    cdef uint64_t phys = NOT_MAPPED
    cdef int level
    pthread_mutex_lock(&d.lock)
    d.walks += 1
    entry = find_leaf(d, iova, &level)
    if entry != NULL:
        phys = (entry[0] & ~<uint64_t>IOMMU_LOW) | (iova & ((ONE << level_shift(d, level)) - 1))
    pthread_mutex_unlock(&d.lock)
    return phys

cdef uint64_t iommu_phys_run(iommu_t *d, uint64_t iova, uint64_t size, uint64_t *phys) noexcept nogil:
    # A descent a page, as asking iommu_iova_to_phys() for each is; only the lock is taken once.
    cdef uint64_t page = ONE << d.page_shift, done = 0, at
    cdef uint64_t *entry
    cdef int level
    pthread_mutex_lock(&d.lock)
    while done < size:
        d.walks += 1
        entry = find_leaf(d, iova + done, &level)
        if entry == NULL:
            break
        at = (entry[0] & ~<uint64_t>IOMMU_LOW) | ((iova + done) & ((ONE << level_shift(d, level)) - 1))
        if done == 0:
            phys[0] = at
        elif at != phys[0] + done:
            break
        done += page
    pthread_mutex_unlock(&d.lock)
    return done

cdef uint64_t iommu_leaf_at(iommu_t *d, uint64_t iova) noexcept nogil:
    cdef uint64_t *entry
    cdef int level
    pthread_mutex_lock(&d.lock)
    entry = find_leaf(d, iova, &level)
    pthread_mutex_unlock(&d.lock)
    return ONE << level_shift(d, level) if entry != NULL else 0


cdef class IOMMUDomain:
    """Translate IOVAs to physical addresses, as an IOMMU with its own page tables does.

    IOMMUDomain(mem, *, page_sizes=None, windows=None, reserved=()): page_sizes are the leaf sizes it may use ("4K", "2M",
    "1G"; default: all that the Memory's page size has). windows: [(first, last)] of IOVAs that it translates, both inside
    (default: all of 64 bits); reserved: [(first, last)] or [(first, last, kind)], kind "reserved", "direct", "msi", or
    "direct-relaxable", which VFIO may map over. Those two bind VFIO and dma_map_sgtable(), as in the kernel, not map()
    itself. Devices that share a domain share its IOVAs. map(), unmap() and iova_to_phys() are the kernel's iommu_map(),
    iommu_unmap() and iommu_iova_to_phys(); .stats counts what they cost.
    """

    def __init__(self, Memory mem not None, *, page_sizes=None, windows=None, reserved=()):
        cdef mem_t *m = mem.ptr()
        cdef uint64_t bitmap = 0
        if self.ready:
            raise InvalidArgument("this domain is set up already")
        page = 1 << <object>m.page_shift
        possible = [page, page * (page // 8), page * (page // 8) ** 2]
        for size in possible if page_sizes is None else [parse_size(leaf, "a leaf size") for leaf in page_sizes]:
            if size not in possible:
                raise InvalidArgument(f"leaves of {format_size(size)}: with pages of {format_size(possible[0])} they are "
                                      f"{', '.join([format_size(leaf) for leaf in possible])}")
            bitmap |= <uint64_t>size
        if not bitmap & <uint64_t>page:
            raise InvalidArgument(f"a domain maps {format_size(possible[0])} leaves in any case: name it in page_sizes")
        self.windows = merged([ranges_arg(window, "a window")[:2]
                               for window in ([(0, NOT_MAPPED)] if windows is None else windows)])
        if not self.windows:
            raise InvalidArgument("windows=[]: a domain without an IOVA maps nothing")
        self.reserved = sorted([ranges_arg(region, "a reserved region") for region in reserved])
        self.closed = closed_ranges(self.windows, self.reserved)
        self.taken = []
        self.taking = threading.Lock()
        if iommu_init(&self.d, m.page_shift, bitmap):
            raise MMError(_errno.ENOMEM, "no memory for the root table of an IOMMU domain")
        self.mem = mem
        # The Memory outlives the domain. Written once: calls of other threads read it without a lock.
        self.d.m = m
        self.ready = True

    def __dealloc__(self):
        if self.ready:
            iommu_destroy(&self.d)

    cdef mem_t *enter(self) except NULL:
        if not self.ready:
            raise InvalidArgument("this domain was never set up")
        return self.mem.enter()

    cdef void leave(self) noexcept:
        self.mem.leave()

    @property
    def page_sizes(self):
        """Sizes of leaves in bytes, smallest first."""
        cdef int bit
        return [ONE << bit for bit in range(64) if (self.d.page_sizes >> bit) & 1]

    @property
    def stats(self):
        """Counts: leaves and bytes mapped now; leaves ever mapped and unmapped, syncs, iova_to_phys walks; tables."""
        cdef iommu_t *d = &self.d
        cdef uint64_t leaves, mapped, maps, unmaps, walks, nodes
        pthread_mutex_lock(&d.lock)
        leaves, mapped, maps, unmaps, walks, nodes = d.leaves, d.mapped, d.maps, d.unmaps, d.walks, d.nodes
        pthread_mutex_unlock(&d.lock)
        return {"leaves": leaves, "bytes": mapped, "maps": maps, "unmaps": unmaps, "syncs": a64_load_relaxed(&d.syncs),
                "iova_to_phys": walks, "tables": nodes}

    @property
    def map_calls(self):
        """Calls of iommu_map() that succeeded: one a stretch of physical memory."""
        return a64_load_relaxed(&self.d.map_calls)

    @property
    def stale(self):
        """Bytes that were unmapped since the last flush of the IOTLB: a device may still reach them."""
        return a64_load_relaxed(&self.d.stale)

    def map(self, iova, phys, size, prot=3):
        """Map [iova, iova + size) to physical addresses from phys on; all are multiples of the page size.

        Raises InvalidArgument, MMError(EEXIST) when a part is mapped, MMError(ENOMEM); then nothing changed.
        """
        cdef uint64_t at = count_arg(iova, "iova", 0, NOT_MAPPED), to = count_arg(phys, "phys", 0, NOT_MAPPED)
        cdef uint64_t n = count_arg(size, "size", 1, NOT_MAPPED)
        cdef unsigned bits = count_arg(prot, "prot", 0, 7)
        cdef int error
        cdef mem_t *m = self.enter()
        if to + (n - 1) < to or to + (n - 1) >= m.nr_pages << m.page_shift:
            self.leave()
            raise InvalidArgument(f"{n} bytes from physical address {to:#x} on leave this Memory", addr=to)
        with nogil:
            error = iommu_map(&self.d, at, to, n, bits)
        self.leave()
        if error:
            raise map_error(self, error, at, to, n)

    def unmap(self, iova, size):
        """Unmap from iova on; the bytes that went. It stops at a hole, and takes whole leaves: the sum may exceed size."""
        cdef uint64_t at = count_arg(iova, "iova", 0, NOT_MAPPED), n = count_arg(size, "size", 0, NOT_MAPPED), done
        self.enter()
        if (at | n) & ((ONE << self.d.page_shift) - 1) or (n and at + (n - 1) < at):
            self.leave()
            raise InvalidArgument(f"unmap of {n} bytes at {at:#x}: both are multiples of {1 << self.d.page_shift}, within 64 "
                                  "bits", addr=at)
        with nogil:
            done = iommu_unmap(&self.d, at, n)
        self.leave()
        return done

    def iova_to_phys(self, iova):
        """Return the physical address an IOVA is mapped to, None when it is not. (The kernel's 0 is an address here.)"""
        cdef uint64_t at = count_arg(iova, "iova", 0, NOT_MAPPED), phys
        self.enter()
        phys = iommu_iova_to_phys(&self.d, at)
        self.leave()
        return None if phys == NOT_MAPPED else phys

    def leaf_size(self, iova):
        """Return the size of the leaf that maps an IOVA, 0 when none does."""
        cdef uint64_t at = count_arg(iova, "iova", 0, NOT_MAPPED)
        self.enter()
        size = iommu_leaf_at(&self.d, at)
        self.leave()
        return size

    def __reduce__(self):
        raise TypeError("an IOMMUDomain belongs to its Memory and cannot be pickled")

    def __repr__(self):
        stats = self.stats
        return f"<IOMMUDomain {stats['leaves']} leaves, {format_size(stats['bytes'])} mapped>"

KINDS = ("reserved", "direct", "direct-relaxable", "msi")

def ranges_arg(region, what):
    """(first, last[, kind]) as a tuple of three, checked."""
    if not isinstance(region, (tuple, list)) or not 2 <= len(region) <= 3:
        raise InvalidArgument(f"{what} is (first, last), both inside, not {region!r}")
    first, last = count_arg(region[0], "the first IOVA", 0, NOT_MAPPED), count_arg(region[1], "the last IOVA", 0, NOT_MAPPED)
    kind = region[2] if len(region) == 3 else "reserved"
    if last < first:
        raise InvalidArgument(f"{what} from {first:#x} to {last:#x} ends before it starts")
    if kind not in KINDS:
        raise InvalidArgument(f"{what} of kind {kind!r}: it is one of {', '.join(KINDS)}")
    return first, last, kind

def merged(windows):
    """Windows in order, those that overlap as one."""
    done = []
    for first, last in sorted(windows):
        if done and first <= done[len(done) - 1][1]:
            before = done.pop()
            first, last = before[0], max(last, before[1])
        done.append((first, last))
    return done

def closed_ranges(windows, reserved):
    """[(first, one past the last)] of the IOVAs outside of the windows, and of those that are reserved."""
    edges = [-1] + [edge for window in windows for edge in window] + [1 << 64]
    outside = [(last + 1, first - 1) for last, first in zip(edges[::2], edges[1::2]) if last + 1 < first]
    return [(first, last + 1) for first, last in merged(outside + [region[:2] for region in reserved])]

cdef object map_error(IOMMUDomain domain, int error, uint64_t iova, uint64_t phys, uint64_t size):
    what = f"mapping {size} bytes at IOVA {iova:#x} to {phys:#x}"
    if error == -EEXIST:
        return MMError(_errno.EEXIST, f"{what}: a part of the range is mapped already", addr=iova)
    if error == -ENOMEM:
        return MMError(_errno.ENOMEM, f"{what}: no memory for a page table, or the failure was injected", addr=iova)
    return InvalidArgument(f"{what}: all three are multiples of {1 << domain.d.page_shift} and stay within 64 bits", addr=iova)
