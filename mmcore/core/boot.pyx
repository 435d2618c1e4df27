"""Set a Memory up: check its arguments, reserve the address space, lay out zones, pools and devices.

Units: sizes: bytes as int, or "4K", "2M", "1G".
Raises: InvalidArgument for sizes, types and alignments that do not exist.
Threads: they are plain values.
Kernel: struct dev_pagemap, enum memory_type.
"""
from libc.errno cimport errno
from libc.stdint cimport uint8_t, uint32_t, uint64_t
from libc.stdlib cimport calloc, malloc
from libc.string cimport memset, strerror
from mmcore.core.memory cimport *

import errno as _errno
import operator
from collections import namedtuple
from collections.abc import Mapping

from .errors import InvalidArgument, MMError
from .size import format_size, parse_size

__all__ = ["DevicePages", "DeviceRegion"]

DEVICE_TYPES = {"generic": DEVICE_GENERIC, "fsdax": DEVICE_FSDAX, "coherent": DEVICE_COHERENT,
                "private": DEVICE_PRIVATE, "pci_p2pdma": DEVICE_PCI_P2PDMA}
THP_MODES = ("always", "madvise", "never")


class DevicePages:
    """Ask for a ZONE_DEVICE range: a size in bytes, a type, an alignment, compound folios or base pages.

    type: "generic" (device-dax), "fsdax", "coherent", "private" or "pci_p2pdma". align: "4K", "2M" or "1G", the size
    of its folios (compound=True) or of the leaves that map its base pages (compound=False).
    """

    def __init__(self, size, type="generic", align="4K", compound=True):
        self.size = parse_size(size, "size of device pages")
        if type not in DEVICE_TYPES:
            raise InvalidArgument(f"device pages of type {type!r}; known are {', '.join(DEVICE_TYPES)}")
        self.type = type
        self.align = parse_size(align, "alignment of device pages")
        self.compound = bool(compound)

    def __repr__(self):
        return (f"DevicePages({format_size(self.size)!r}, type={self.type!r}, align={format_size(self.align)!r}, "
                f"compound={self.compound})")


class DeviceRegion(namedtuple("DeviceRegion", "start_pfn nr_pages type align compound")):
    """A ZONE_DEVICE range of a Memory: first PFN, pages, type, alignment in bytes, compound or not."""
    __slots__ = ()

# ---- set-up ---------------------------------------------------------------------------------------------------------
cdef int region_init(mem_t *m, uint64_t start, uint64_t end, unsigned zone, unsigned migratetype) noexcept nogil:
    cdef region_t *r = &m.region[m.nr_regions]
    cdef uint64_t words = 0, span
    cdef uint64_t *at
    cdef unsigned order
    r.start, r.end, r.zone, r.migratetype = start, end, zone, migratetype
    r.base = (start >> m.max_order) << m.max_order
    r.zone_flags = <uint64_t>zone << ZONE_SHIFT
    r.frontier = start
    r.managed = end - start
    span = end - r.base
    for order in range(m.max_order + 1):
        words += bitmap_words((span + (ONE << order) - 1) >> order)
    r.bits_size = words * 8
    r.bits = reserve(r.bits_size, False)
    if r.bits == NULL:
        return -1
    at = <uint64_t *>r.bits
    for order in range(m.max_order + 1):
        at = bitmap_place(&r.free[order], (span + (ONE << order) - 1) >> order, at)
    r.ready = <uint8_t *>calloc((span >> m.pmd_order) + 1, 1)
    if r.ready == NULL:
        return -1
    pthread_mutex_init(&r.lock, NULL)
    m.nr_regions += 1
    return 0

cdef void region_add_free(mem_t *m, region_t *r, uint64_t start, uint64_t end) noexcept nogil:
    """Put a range that was never used on the free lists, in the largest aligned blocks."""
    cdef unsigned order
    cdef uint64_t pfn = start
    while pfn < end:
        order = m.max_order
        while pfn & ((ONE << order) - 1) or pfn + (ONE << order) > end:
            order -= 1
        bitmap_set(&r.free[order], (pfn - r.base) >> order)
        r.nr_blocks[order] += 1
        r.nr_free += ONE << order
        pfn += ONE << order

cdef object no_address_space(str what, uint64_t size):
    cdef str reason = strerror(errno).decode()
    return MMError(_errno.ENOMEM,
                   f"the system refused to reserve {format_size(size)} of address space for {what} ({reason}). The "
                   "reservation costs no memory until it is touched; it is refused by `ulimit -v` or by "
                   "vm.overcommit_memory=2. Raise the limit (ulimit -v unlimited), set "
                   "`sysctl vm.overcommit_memory=0`, or take a smaller Memory")


cdef object settle(Memory self):
    """Check and complete the arguments in self.config, and derive the geometry of pages and blocks."""
    config = self.config
    cdef mem_t *m = &self.m
    page_size = parse_size(config["page_size"], "page_size")
    if page_size not in (4096, 16384, 65536):
        raise InvalidArgument(f"page_size {page_size} is none of 4K, 16K, 64K")
    m.page_shift = order_of(page_size)
    m.max_order = {12: 10, 14: 11, 16: 13}[m.page_shift]
    m.pmd_order = m.page_shift - 3      # a table of 8-byte entries fills a page
    m.pageblock_order = m.pmd_order
    m.debug = bool(config["debug"])
    for name in ("thp", "shmem_thp"):
        if config[name] not in THP_MODES:
            raise InvalidArgument(f"{name}={config[name]!r} is none of {', '.join(THP_MODES)}")
    hugetlb = config["hugetlb"] or {}
    if not isinstance(hugetlb, Mapping):
        raise TypeError(f"hugetlb is a dict of page sizes and numbers of pages, not {hugetlb!r}")
    mthp = tuple(sorted({operator.index(order) for order in config["mthp"]}))
    if any(not 1 < order < m.pmd_order for order in mthp):
        raise InvalidArgument(f"mthp={mthp}: orders of PTE-mapped large folios are 2..{m.pmd_order - 1}")
    sizes = {name: parse_size(config[name], name) for name in ("size", "movable", "cma")}
    for name, size in sizes.items():
        if size > 1 << 62:
            raise InvalidArgument(f"{name} of {size:#x} bytes is beyond what any machine has")
    self.config = {**config, **sizes, "page_size": page_size,
                   "hugetlb": {parse_size(kind, "hugetlb page size"): nr for kind, nr in hugetlb.items()},
                   "devices": tuple(config["devices"]), "mthp": mthp,
                   "debug": bool(config["debug"])}


def boot(Memory self not None):
    """Set a Memory up from its config; what fails leaves it to teardown()."""
    cdef mem_t *m = &self.m
    cdef uint64_t block, normal, cma, movable, start, order, at
    settle(self)
    config = self.config
    nbytes, page_size = config["size"], config["page_size"]
    block = ONE << m.pageblock_order
    if nbytes % page_size:
        raise InvalidArgument(f"size {nbytes} is no multiple of the page size {page_size}")
    if nbytes > 1 << 52:
        raise InvalidArgument(f"size {format_size(nbytes)} is beyond 52-bit physical addresses")
    m.nr_ram = nbytes // page_size
    movable = -(-config["movable"] // page_size)
    cma = -(-config["cma"] // page_size)
    movable = (movable + block - 1) & ~(block - 1)
    cma = (cma + block - 1) & ~(block - 1)
    if (movable or cma) and m.nr_ram % block:
        # The parts at the end start and end on page blocks, as the kernel wants them.
        raise InvalidArgument(f"size {nbytes} is no multiple of a page block ({block * page_size} bytes), which "
                              "movable= and cma= need")
    if movable + cma + 4 > m.nr_ram:
        raise InvalidArgument(f"size {nbytes} leaves no Normal memory: movable takes {movable} and cma {cma} of "
                              f"{m.nr_ram} pages, at least 4 must remain")
    # ZONE_DEVICE behind the RAM
    at = m.nr_ram
    regions = []
    for wanted in config["devices"]:
        if not isinstance(wanted, DevicePages):
            raise TypeError(f"devices= takes DevicePages, not {wanted!r}")
        if len(regions) == MAX_DEVICES:
            raise InvalidArgument(f"more than {MAX_DEVICES} devices")
        if wanted.align < page_size or wanted.align & (wanted.align - 1):
            raise InvalidArgument(f"{wanted!r}: the alignment must be a power of two of at least a page")
        if not wanted.size or wanted.size % wanted.align:
            raise InvalidArgument(f"{wanted!r}: the size must be a multiple of the alignment, and not 0")
        order = order_of(wanted.align // page_size)
        at = (at + (ONE << order) - 1) & ~((ONE << order) - 1)
        m.device[len(regions)].start = at
        at += wanted.size // page_size
        m.device[len(regions)].end = at
        m.device[len(regions)].type = DEVICE_TYPES[wanted.type]
        m.device[len(regions)].leaf_order = order
        m.device[len(regions)].order = order if wanted.compound else 0
        regions.append(DeviceRegion(m.device[len(regions)].start, wanted.size // page_size, wanted.type,
                                     wanted.align, wanted.compound))
    self.devices = tuple(regions)
    m.nr_pages = at

    # Four spare pages: a look at the overlay of the very last page stays inside.
    m.map = <page_t *>reserve((m.nr_pages + 4) * sizeof(page_t), True)
    if m.map == NULL:
        raise no_address_space("mem_map", m.nr_pages * sizeof(page_t))
    m.bytes = <uint8_t *>reserve(m.nr_pages << m.page_shift, False)
    if m.bytes == NULL:
        raise no_address_space("the bytes behind the pages", m.nr_pages << m.page_shift)
    m.blocktype = <uint8_t *>reserve((m.nr_pages >> m.pageblock_order) + 1, False)
    m.stats = <stat_slot_t *>reserve(NR_STAT_SLOTS * sizeof(stat_slot_t), False)
    if m.blocktype == NULL or m.stats == NULL:
        raise no_address_space("page blocks and statistics", m.nr_pages >> m.pageblock_order)
    pthread_mutex_init(&m.bytes_lock, NULL)

    normal = m.nr_ram - movable - cma
    if region_init(m, 0, normal, ZONE_NORMAL, MIGRATE_MOVABLE) != 0:
        raise no_address_space("the free lists of ZONE_NORMAL", normal // 4)
    if cma and region_init(m, normal, normal + cma, ZONE_NORMAL, MIGRATE_CMA) != 0:
        raise no_address_space("the free lists of CMA", cma // 4)
    if movable and region_init(m, normal + cma, m.nr_ram, ZONE_MOVABLE, MIGRATE_MOVABLE) != 0:
        raise no_address_space("the free lists of ZONE_MOVABLE", movable // 4)
    memset(m.blocktype + (normal >> m.pageblock_order), MIGRATE_CMA, cma >> m.pageblock_order)

    # PFN 0 stands for NULL; PFN 1 is the zero page. Both are reserved, as the kernel's are.
    m.zero_pfn = 1
    m.nr_reserved = 2
    m.region[0].managed -= 2
    m.region[0].frontier = 2
    for pfn in range(2):
        page_init(&m.map[pfn], m.region[0].zone_flags | (ONE << PG_reserved), 1)

    start = boot_pools(self, normal)
    region_add_free(m, &m.region[0], 2, start)
    for i in range(1, m.nr_regions):
        region_add_free(m, &m.region[i], m.region[i].start, m.region[i].end)
    with nogil:
        boot_devices(m)


cdef uint64_t boot_pools(Memory self, uint64_t end) except 0:
    """Carve the hugetlb pools off the end of Normal memory; return where they start."""
    cdef mem_t *m = &self.m
    cdef hstate_t *h
    cdef uint64_t page_size = ONE << m.page_shift, start = end, stop, i
    cdef unsigned order
    hugetlb = self.config["hugetlb"]
    if len(hugetlb) > MAX_POOLS:
        raise InvalidArgument(f"{len(hugetlb)} hugetlb pools; at most {MAX_POOLS}")
    # Largest first, so that the smaller ones start aligned.
    for size in sorted(hugetlb, reverse=True):
        nr = hugetlb[size]
        # A hugetlb folio's own words lie in the struct page of its fourth page.
        if size < 4 * page_size or size & (size - 1) or size > page_size << 20:
            raise InvalidArgument(f"hugetlb pages of {format_size(size)}: the size must be a power of two, at least "
                                  f"4 pages ({format_size(4 * page_size)}) and at most {format_size(page_size << 20)}")
        if not isinstance(nr, int) or nr < 0:
            raise InvalidArgument(f"hugetlb pool of {format_size(size)}: {nr!r} is no number of pages")
        order = order_of(size // page_size)
        stop = (start >> order) << order
        if nr << order > stop or stop - (nr << order) < 4:
            raise MMError(_errno.ENOMEM,
                          f"a hugetlb pool of {nr} pages of {format_size(size)} needs {format_size(nr * size)} of "
                          f"Normal memory, and {format_size(stop << m.page_shift)} are left: take a larger Memory "
                          "or a smaller pool")
        start_of_pool = stop - (nr << order)
        # What lies between the end of this pool and the last one stays ordinary memory.
        region_add_free(m, &m.region[0], stop, start)
        h = &m.pool[m.nr_pools]
        h.order = order
        h.nr = nr
        h.free = <uint64_t *>malloc((nr if nr else 1) * sizeof(uint64_t))
        if h.free == NULL:
            raise MemoryError()
        pthread_mutex_init(&h.lock, NULL)
        m.nr_pools += 1
        start = start_of_pool
        with nogil:
            for i in range(h.nr):
                # A stack: the lowest PFN comes out first.
                h.free[h.nr - 1 - i] = start + (i << order)
                prep_compound_page(&m.map[start + (i << order)], m.region[0].zone_flags | (ONE << PG_mm_pool), order)
                prep_hugetlb_folio(&m.map[start + (i << order)])
            h.nr_free = h.nr
        if nr:
            m.region[0].frontier = max(m.region[0].frontier, start + (h.nr << order))
    return start


cdef void boot_devices(mem_t *m) noexcept nogil:
    """Write the struct pages of ZONE_DEVICE: as after memremap_pages().

    Generic device memory is there to be mapped at once and holds a reference of its own; the other types start idle,
    at 0, and their driver takes the first reference.
    """
    cdef int i
    cdef device_t *d
    cdef uint64_t pfn, flags = <uint64_t>ZONE_DEVICE << ZONE_SHIFT
    cdef uint32_t refcount
    for i in range(MAX_DEVICES):
        d = &m.device[i]
        if d.end == 0:
            return
        m.nr_devices = i + 1
        refcount = 1 if d.type == DEVICE_GENERIC else 0
        pfn = d.start
        while pfn < d.end:
            if d.order:
                prep_compound_page(&m.map[pfn], flags, d.order)
            else:
                page_init(&m.map[pfn], flags, 0)
            m.map[pfn].pgmap = <uint64_t>(i + 1) << 1
            a32_store_release(&m.map[pfn]._refcount, refcount)
            pfn += ONE << d.order

cdef unsigned order_of(uint64_t nr_pages) noexcept nogil:
    return 63 - <unsigned>clz64(nr_pages)
