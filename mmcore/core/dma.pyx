"""Devices, DMA mapping of scatterlists, IOVA space.

Units: addresses and sizes: bytes, uint64.
Raises: InvalidArgument for foreign or unmapped tables, MMError for what the device or the IOMMU refuses.
Threads: a lock a device; a table is for one thread at a time (MMError(EBUSY) for the other).
Kernel: dma_map_sgtable(), dma_unmap_sgtable(), struct device.
"""
from mmcore.core.folio cimport count_arg

import bisect
import enum
import errno as _errno

from .errors import BadPage, InvalidArgument, MMError

__all__ = ["Device", "DMA", "DMA_BIDIRECTIONAL", "DMA_TO_DEVICE", "DMA_FROM_DEVICE", "DMA_MAPPING_ERROR",
           "dma_map_sgtable", "dma_unmap_sgtable"]


class DMA(enum.IntEnum):
    """Name the directions of enum dma_data_direction."""
    BIDIRECTIONAL = 0
    TO_DEVICE = 1
    FROM_DEVICE = 2


DMA_BIDIRECTIONAL, DMA_TO_DEVICE, DMA_FROM_DEVICE = DMA
DMA_MAPPING_ERROR = (1 << 64) - 1

cdef uint64_t ALL_ONES = ~<uint64_t>0
# What the IOMMU lets the device do, by direction.
cdef unsigned PROT[3]
PROT[:] = [IOMMU_READ | IOMMU_WRITE, IOMMU_READ, IOMMU_WRITE]

# ---- layouts: no IOMMU is touched here ---------------------------------------------------------------------------------
cdef uint64_t map_direct(sg_t *sg, uint64_t nents, unsigned shift, const dma_limits_t *limits) noexcept nogil:
    """A segment an entry, at its physical address. Entries done: fewer when one is beyond the device's mask."""
    cdef uint64_t i = 0, phys
    while i < nents and sg != NULL:
        phys = (sg_pfn(sg) << shift) + sg.offset
        if phys + (sg.length - (sg.length != 0)) > limits.mask:
            return i
        sg.dma_address = phys
        sg.dma_length = sg.length
        sg.dma_flags = 0
        sg = next_sg(sg)
        i += 1
    return i

cdef inline uint64_t before_boundary(uint64_t at, uint64_t boundary) noexcept nogil:
    """Bytes from a place in the range to the next multiple of boundary + 1; 0 when that is 2^64 or just here."""
    return (boundary - at + 1) & boundary

cdef inline uint64_t place(const sg_t *sg, uint64_t at, uint64_t page, uint64_t boundary, uint64_t *padded) noexcept nogil:
    """Where in the range an entry goes, when `at` bytes are used: whole pages, moved up where it would cross a boundary.

    An empty entry takes no room.
    """
    cdef uint64_t room = before_boundary(at, boundary)
    padded[0] = 0
    if sg.length:
        padded[0] = ((sg.offset & (page - 1)) + <uint64_t>sg.length + page - 1) & ~(page - 1)
    if room and room < padded[0]:
        return at + room
    return at

cdef uint64_t range_size(sg_t *sg, uint64_t nents, uint64_t page, uint64_t boundary) noexcept nogil:
    """Bytes of IOVA space that a list needs."""
    cdef uint64_t used = 0, padded
    while nents and sg != NULL:
        used = place(sg, used, page, boundary, &padded)
        used += padded
        sg = next_sg(sg)
        nents -= 1
    return used

cdef int map_range(iommu_t *d, sg_t *sg, uint64_t nents, unsigned shift, uint64_t iova, uint64_t boundary,
                   unsigned prot) noexcept nogil:
    """Write the leaves: neighbours in physical memory that are neighbours in the range go in one call. Undoes on error."""
    cdef uint64_t page = ONE << shift, at, used = 0, padded, phys
    cdef uint64_t run_at = 0, run_phys = 0, run = 0
    cdef int error = 0
    while error == 0:
        if nents == 0 or sg == NULL:
            if run:
                error = iommu_map(d, iova + run_at, run_phys, run, prot)
                if error == 0:
                    return 0
            break
        at = place(sg, used, page, boundary, &padded)
        phys = ((sg_pfn(sg) << shift) + sg.offset) & ~(page - 1)
        if padded:
            if run and at == run_at + run and phys == run_phys + run:
                run += padded
            else:
                if run:
                    error = iommu_map(d, iova + run_at, run_phys, run, prot)
                    if error:
                        break
                run_at, run_phys, run = at, phys, padded
        used = at + padded
        sg = next_sg(sg)
        nents -= 1
    if error:
        unmap_holes(d, iova, run_at)
    return error

cdef void unmap_holes(iommu_t *d, uint64_t iova, uint64_t size) noexcept nogil:
    """Unmap a range that may have holes where entries were moved up to a boundary."""
    cdef uint64_t done = 0, n, page = ONE << d.page_shift
    while done < size:
        n = iommu_unmap_fast(d, iova + done, size - done)
        done += n if n else page
    if size:
        iommu_sync(d)

cdef uint64_t make_segments(sg_t *sgl, uint64_t nents, uint64_t page, uint64_t iova, const dma_limits_t *limits) noexcept nogil:
    """Write the DMA view of a list that was mapped from iova on; returns its segments.

    An entry joins the open segment when it starts on a page, that place is on no boundary, and both fit max_seg_size;
    a segment closes when an entry does not fill its last page.
    """
    cdef sg_t *sg = sgl
    cdef sg_t *out = sgl
    cdef uint64_t i, used = 0, at, padded, start, length, count = 0, segment = 0
    cdef bint is_open = False
    for i in range(nents):  # no-cython-lint
        if sg == NULL:
            break
        at = place(sg, used, page, limits.boundary, &padded)
        start, length = sg.offset & (page - 1), sg.length
        used = at + padded
        if length:
            # Written as a difference: a sum in 32 bits wraps at 4 GiB.
            if is_open and start == 0 and (iova + at) & limits.boundary and at == segment \
                    and limits.max_seg_size >= length and limits.max_seg_size - length >= out.dma_length:
                out.dma_length += <uint32_t>length
            else:
                if count:
                    out = next_sg(out)
                count += 1
                out.dma_address = iova + at + start
                out.dma_length = <uint32_t>length
                out.dma_flags = 0
            segment = used
            is_open = start + length == padded
        sg = next_sg(sg)
    # The spare entries, so that nobody takes what was there before for a segment.
    sg = sgl if count == 0 else next_sg(out)
    for i in range(count, nents):  # no-cython-lint
        if sg == NULL:
            break
        sg.dma_address = ALL_ONES
        sg.dma_length = 0
        sg.dma_flags = 0
        sg = next_sg(sg)
    return count

def _highest(busy, first, end, size):
    """Return the highest start of an aligned range of this size in [first, end) that none of `busy` meets, or None."""
    align = 1 << (size - 1).bit_length()
    for begin, after in [*reversed(busy), (0, first)]:
        start = (end - size) & -align
        if end >= size and start >= max(first, after):
            return start
        end = min(end, begin)
    return None

# ---- devices ------------------------------------------------------------------------------------------------------------
cdef class Device:
    """Stand for a device that does DMA: its limits, and how its addresses become physical ones.

    Device(mem, *, max_seg_size=65536, seg_boundary_mask=2**32-1, iommu=False, dma_mask=2**48-1). Without an IOMMU it
    sees physical addresses; with one (iommu=True, or an IOMMUDomain) addresses of its own, in which pieces of memory
    follow each other and become one segment. The defaults are those of a PCI device whose driver raised nothing.
    """

    def __init__(self, Memory mem not None, *, max_seg_size=65536, seg_boundary_mask=2**32 - 1, iommu=False,
                 dma_mask=2**48 - 1):
        if self.mem is not None:
            raise InvalidArgument("this device is set up already")
        cdef uint64_t page = ONE << mem.ptr().page_shift
        self.limits.max_seg_size = count_arg(max_seg_size, "max_seg_size", 1, 0xffffffff)
        self.limits.boundary = count_arg(seg_boundary_mask, "seg_boundary_mask", page - 1, ALL_ONES)
        if self.limits.boundary & (self.limits.boundary + 1):
            raise InvalidArgument(f"seg_boundary_mask {seg_boundary_mask:#x} is no power of two less one")
        self.limits.mask = count_arg(dma_mask, "dma_mask", page - 1, ALL_ONES)
        if isinstance(iommu, IOMMUDomain):
            if iommu.mem is not mem:
                raise InvalidArgument("the IOMMU domain belongs to another Memory")
            self.domain = iommu
        elif iommu:
            self.domain = IOMMUDomain(mem)
        self.mem = mem

    @property
    def max_seg_size(self):
        """Bytes of the longest segment that it takes (dma_get_max_seg_size); what builders get as max_segment."""
        return self.limits.max_seg_size

    @property
    def seg_boundary_mask(self):
        """No segment crosses a multiple of this plus one (dma_get_seg_boundary)."""
        return self.limits.boundary

    @property
    def dma_mask(self):
        """The highest address it can drive."""
        return self.limits.mask

    @property
    def iommu(self):
        """True when its addresses go through an IOMMU."""
        return self.domain is not None

    cdef uint64_t iova_alloc(self, uint64_t size) except? 0:
        """A range below all that its domain's devices have, or else the highest hole; aligned to its size as a power of two.

        So a range not longer than the boundary never crosses one, and places in a longer one are as if it began at 0.
        """
        if size > ONE << 63:
            return ALL_ONES
        domain = self.domain
        with domain.taking:
            # IOVA 0 is left out, so that no segment is at address 0.
            first, end = self.mem.page_size, self.dma_mask + 1
            lowest = domain.taken[0][0] if domain.taken else end
            start = _highest(domain.closed, first, min(lowest, end), size)
            if start is None:
                start = _highest(sorted(domain.closed + domain.taken), first, end, size)
            if start is None:
                return ALL_ONES
            bisect.insort(domain.taken, (start, start + size))
            return start

    cdef void iova_free(self, uint64_t iova):
        domain = self.domain
        with domain.taking:
            del domain.taken[bisect.bisect_left(domain.taken, (iova, 0))]

    @property
    def iova_ranges(self):
        """List the IOVA ranges that the devices of its domain use: (first, one past the last); [] without one."""
        return [] if self.domain is None else list(self.domain.taken)

    def check(self, sgt):
        """List what of a table breaks the device's limits, [] when nothing does, as the kernel's DMA debugging does.

        Looks at the DMA view when it is mapped, else at the CPU's. With Memory(debug=True) mapping does this itself.
        """
        cdef SGTable table = table_arg(sgt)
        rows = table.entries
        if table.mapping is not None:
            segments = [(int(row["dma_address"]), int(row["dma_length"])) for row in rows[:table.nents]]
        else:
            page = self.mem.page_size
            segments = [(int(row["pfn"]) * page + int(row["offset"]), int(row["length"])) for row in rows]
        broken = []
        for i, (at, length) in enumerate(segments):
            if length > self.limits.max_seg_size:
                broken.append(f"segment {i} of {length} bytes is longer than max_seg_size {self.limits.max_seg_size}")
            if length and at & ~self.limits.boundary != (at + length - 1) & ~self.limits.boundary:
                broken.append(f"segment {i}, {length} bytes at {at:#x}, crosses a multiple of {self.limits.boundary + 1:#x}")
        return broken

    def __reduce__(self):
        raise TypeError("a Device belongs to its Memory and cannot be pickled")

    def __repr__(self):
        return (f"<{type(self).__name__} max_seg_size={self.limits.max_seg_size:#x} "
                f"seg_boundary_mask={self.limits.boundary:#x} {'iommu' if self.domain is not None else 'direct'} "
                f"{self.mappings} mapped>")


class Mapping:
    """What one dma_map_sgtable() did: the device, the direction, and the range of IOVAs (None: direct)."""
    __slots__ = ("device", "direction", "iova", "size")

    def __init__(self, device, direction, iova, size):
        self.device, self.direction, self.iova, self.size = device, direction, iova, size


cdef object direction_arg(object direction):
    try:
        return DMA(direction)
    except ValueError:
        raise InvalidArgument(f"direction {direction!r} is none of DMA_BIDIRECTIONAL, DMA_TO_DEVICE, DMA_FROM_DEVICE") \
            from None

cdef Device device_arg(object device):
    if not isinstance(device, Device):
        raise TypeError(f"a Device is wanted, not {device!r}")
    if (<Device>device).mem is None:
        raise InvalidArgument("this device was never set up")
    return device

cdef uint64_t first_blank(SGTable table) noexcept nogil:
    """Index of the first entry without a page, or orig_nents."""
    cdef uint64_t i = 0
    cdef sg_t *sg = table.t.sgl
    while i < table.t.orig_nents and sg != NULL and sg_pfn(sg):
        sg = next_sg(sg)
        i += 1
    return i


def dma_map_sgtable(device, sgt, direction=DMA.BIDIRECTIONAL):
    """Map the orig_nents entries of a table for a device: fills the DMA view and nents, which is returned.

    Raises InvalidArgument for an empty table, a blank entry, another Memory; MMError: EBUSY when it is mapped, EIO when
    the device cannot reach a page (direct), ENOMEM when the IOVA space or a page table is exhausted, EINVAL when the
    IOMMU refuses. With Memory(debug=True) entries beyond the device's limits are refused (BadPage; the kernel warns).
    """
    cdef SGTable table = table_arg(sgt)
    cdef Device dev = device_arg(device)
    cdef uint64_t n, size = 0, iova = 0, done
    cdef unsigned prot
    cdef int error = 0
    cdef mem_t *m
    way = direction_arg(direction)
    prot = PROT[way]
    if dev.mem is not table.mem:
        raise InvalidArgument("the table belongs to another Memory than the device")
    if table.mapping is not None:
        raise MMError(_errno.EBUSY, "the table is mapped already: dma_unmap_sgtable() first")
    if table.t.orig_nents == 0:
        raise InvalidArgument("an empty table: nothing to map")
    if dev.mem.debug and dev.domain is None:
        broken = dev.check(table)
        if broken:
            raise BadPage("device limits", broken[0] + ": build the table with max_segment=device.max_seg_size, or raise the "
                                                       "limit that the driver declares")
    m = table.write(True)
    try:
        n = table.t.orig_nents
        done = first_blank(table)
        if done < n:
            raise InvalidArgument(f"entry {done} has no page, or the list ends before it: set it with sg_set_page()")
        if dev.domain is None:
            with nogil:
                done = map_direct(table.t.sgl, n, m.page_shift, &dev.limits)
                if done < n:
                    clear_dma(table.t.sgl, n)
            if done < n:
                raise MMError(_errno.EIO, f"entry {done} is beyond the device's mask {dev.limits.mask:#x}: raise dma_mask, or "
                                          "use an IOMMU")
            table.t.nents = n
            table.mapping = Mapping(dev, way, None, 0)
        else:
            with nogil:
                size = range_size(table.t.sgl, n, ONE << m.page_shift, dev.limits.boundary)
            if size:
                iova = dev.iova_alloc(size)
                if iova == ALL_ONES:
                    raise MMError(_errno.ENOMEM, f"no {size} bytes of IOVA space are left below {dev.limits.mask:#x}")
                dev.domain.enter()
                with nogil:
                    error = map_range(&dev.domain.d, table.t.sgl, n, m.page_shift, iova, dev.limits.boundary, prot)
                dev.domain.leave()
                if error:
                    dev.iova_free(iova)
                    # A driver sees -EINVAL whatever the IOMMU said, and must not retry.
                    raise MMError(_errno.EINVAL, f"the IOMMU could not map {size} bytes at IOVA {iova:#x} (error "
                                                 f"{_errno.errorcode.get(-error, -error)}); the table is as it was")
            with nogil:
                table.t.nents = make_segments(table.t.sgl, n, ONE << m.page_shift, iova, &dev.limits)
            table.mapping = Mapping(dev, way, iova, size)
        a64_fetch_add_relaxed(&dev.mappings, 1)
    finally:
        table.write_done()
    return table.t.nents


cdef void clear_dma(sg_t *sg, uint64_t nents) noexcept nogil:
    while nents and sg != NULL:
        sg.dma_address = 0
        sg.dma_length = 0
        sg.dma_flags = 0
        sg = next_sg(sg)
        nents -= 1


def dma_unmap_sgtable(device, sgt, direction=None):
    """Undo dma_map_sgtable(): the whole of what it mapped, whatever the DMA view says now. nents is orig_nents again.

    Raises InvalidArgument when the table is not mapped, or by another device, or in another direction (None: any).
    """
    cdef SGTable table = table_arg(sgt)
    cdef Device dev = device_arg(device)
    cdef uint64_t iova, size
    cdef sg_t *sg
    mapping = table.mapping
    if mapping is None:
        raise InvalidArgument("the table is not mapped: dma_map_sgtable() first, and unmap once")
    if mapping.device is not dev:
        raise InvalidArgument(f"the table is mapped by another device, {mapping.device!r}")
    if direction is not None and direction_arg(direction) is not mapping.direction:
        raise InvalidArgument(f"the table was mapped with direction {mapping.direction.name}, not "
                              f"{direction_arg(direction).name}")
    table.write(False)
    try:
        if table.mapping is not mapping:
            raise InvalidArgument("another thread unmapped the table at the same time")
        if mapping.size:
            iova, size = mapping.iova, mapping.size
            dev.domain.enter()
            with nogil:
                unmap_holes(&dev.domain.d, iova, size)
            dev.domain.leave()
            dev.iova_free(iova)
        sg = table.t.sgl
        clear_dma(sg, table.t.orig_nents)
        table.t.nents = table.t.orig_nents
        table.mapping = None
        a64_fetch_add_relaxed(&dev.mappings, ~<uint64_t>0)
    finally:
        table.write_done()
