"""DMA mappings, their external pins, and their set.

Units: IOVAs, addresses, sizes: bytes; locked_vm: pages.
Raises: TypeError, InvalidArgument.
Threads: under the container's lock; VFIOMapping and VFIOPin are copies.
Kernel: struct vfio_dma, struct vfio_pfn.
"""
from libc.errno cimport ENOMEM
from libc.stdlib cimport free, realloc
from libc.string cimport memmove
from mmcore.core.folio cimport count_arg

from collections import namedtuple

__all__ = ["VFIOMapping", "VFIOPin"]

VFIOMapping = namedtuple("VFIOMapping", "iova vaddr size prot mm iommu_mapped lock_cap vaddr_invalid has_rsvd "
                                        "locked_vm pins")
VFIOMapping.__doc__ = """One DMA mapping as it was when looked at; locked_vm in pages, pins: its external pins."""
VFIOPin = namedtuple("VFIOPin", "iova pfn ref_count")
VFIOPin.__doc__ = """One external pin: its exact IOVA, the page, and how often it was asked for."""

# ---- runs -----------------------------------------------------------------------------------------------------------
cdef bint add_run(mem_t *m, runs_t *runs, uint64_t pfn, uint64_t nr, bint join) noexcept nogil:
    cdef run_t *last
    cdef uint64_t room
    cdef void *at
    if join and runs.n:
        last = &runs.run[runs.n - 1]
        if last.pfn + last.nr == pfn:
            last.nr += nr
            return True
    if runs.n == runs.room:
        if inject_fails(m, INJECT_LIST):
            return False
        room = runs.room + (runs.room >> 1) + 8
        at = realloc(runs.run, room * sizeof(run_t))
        if at == NULL:
            return False
        runs.run = <run_t *>at
        runs.room = room
    runs.run[runs.n].pfn = pfn
    runs.run[runs.n].nr = nr
    runs.n += 1
    return True

cdef void drop_runs(runs_t *runs) noexcept nogil:
    free(runs.run)
    runs.run = NULL
    runs.n = runs.room = 0

# ---- external pins ---------------------------------------------------------------------------------------------------
cdef uint64_t pins_below(const dma_t *d, uint64_t iova) noexcept nogil:
    """How many external pins lie below an IOVA."""
    cdef uint64_t low = 0, high = d.nr_pins, mid
    while low < high:
        mid = (low + high) >> 1
        if d.pin[mid].iova < iova:
            low = mid + 1
        else:
            high = mid
    return low

cdef int64_t vpfn_pages(const dma_t *d, uint64_t iova, uint64_t nr) noexcept nogil:
    cdef uint64_t end
    if mm_likely(d.nr_pins == 0):
        return 0
    end = iova + (nr << d.m.page_shift)
    # A chunk that ends at 2^64: all that is left. An exclusive end of 0 would find nothing (corner C2).
    return <int64_t>((d.nr_pins if end == 0 else pins_below(d, end)) - pins_below(d, iova))

cdef vpfn_t *find_vpfn(const dma_t *d, uint64_t iova) noexcept nogil:
    cdef uint64_t at = pins_below(d, iova)
    return &d.pin[at] if at < d.nr_pins and d.pin[at].iova == iova else NULL

cdef int add_vpfn(dma_t *d, uint64_t iova, uint64_t pfn) noexcept nogil:
    cdef uint64_t at, room
    cdef void *new
    if inject_fails(d.m, INJECT_ALLOC):
        return -ENOMEM
    if d.nr_pins == d.pins_room:
        room = 2 * d.pins_room + 16
        new = realloc(d.pin, room * sizeof(vpfn_t))
        if new == NULL:
            return -ENOMEM
        d.pin = <vpfn_t *>new
        d.pins_room = room
    at = pins_below(d, iova)
    memmove(&d.pin[at + 1], &d.pin[at], (d.nr_pins - at) * sizeof(vpfn_t))
    d.pin[at].iova, d.pin[at].pfn, d.pin[at].ref_count = iova, pfn, 1
    d.nr_pins += 1
    return 0

cdef void del_vpfn(dma_t *d, vpfn_t *pin) noexcept nogil:
    cdef uint64_t at = <uint64_t>(pin - d.pin)
    d.nr_pins -= 1
    memmove(pin, pin + 1, (d.nr_pins - at) * sizeof(vpfn_t))

# ---- a mapping -------------------------------------------------------------------------------------------------------
cdef class VFIODma:
    """Hold one mapping of a container; callers see VFIOMapping, a copy."""

    def __init__(self):
        raise TypeError("a mapping is made by VFIOContainer.map_dma()")

    def __dealloc__(self):
        free(self.d.pin)
        drop_runs(&self.d.runs)

    @staticmethod
    def make(MM mm, uint64_t vaddr, uint64_t iova, uint64_t size, unsigned prot):
        """Return a mapping that is in no container, with nothing pinned."""
        cdef VFIODma dma = VFIODma.__new__(VFIODma)
        dma.own(mm)
        dma.d.m = &mm.mem.m
        dma.d.vaddr, dma.d.iova, dma.d.size, dma.d.prot = vaddr, iova, size, prot
        return dma

    def own(self, MM mm):
        """Say who mapped it: whose memory, limit and capability count."""
        self.mm = mm
        self.d.mm = mm.mm
        if mm.rlimit_memlock is None:
            self.d.limit = ~<uint64_t>0
        else:
            self.d.limit = min(mm.rlimit_memlock >> mm.mem.m.page_shift, ~<uint64_t>0)
        self.d.lock_cap = mm.cap_ipc_lock

    @property
    def iova(self):
        return self.d.iova

    @property
    def size(self):
        return self.d.size

    @property
    def last(self):
        """Its last IOVA."""
        return self.d.iova + (self.d.size - 1)

    @property
    def vaddr(self):
        return self.d.vaddr

    @vaddr.setter
    def vaddr(self, uint64_t value):
        self.d.vaddr = value

    @property
    def prot(self):
        return self.d.prot

    @property
    def iommu_mapped(self):
        return bool(self.d.iommu_mapped)

    @iommu_mapped.setter
    def iommu_mapped(self, value):
        self.d.iommu_mapped = value

    @property
    def vaddr_invalid(self):
        return bool(self.d.vaddr_invalid)

    @vaddr_invalid.setter
    def vaddr_invalid(self, value):
        self.d.vaddr_invalid = value

    @property
    def nr_pins(self):
        """External pins."""
        return self.d.nr_pins

    @property
    def npages(self):
        return self.d.size >> self.d.m.page_shift

    @property
    def mm_alive(self):
        return not a32_load_relaxed(&self.d.mm.exited)

    def alloc_fails(self):
        """Was an allocation asked to fail here (Memory.inject)?"""
        return inject_fails(self.d.m, INJECT_ALLOC)

    def pins(self):
        """External pins by IOVA, as VFIOPin."""
        return [VFIOPin(self.d.pin[i].iova, self.d.pin[i].pfn, self.d.pin[i].ref_count) for i in range(self.d.nr_pins)]

    def snapshot(self):
        """The mapping as callers see it."""
        return VFIOMapping(self.d.iova, self.d.vaddr, self.d.size, self.d.prot, self.mm, bool(self.d.iommu_mapped),
                           bool(self.d.lock_cap), bool(self.d.vaddr_invalid), bool(self.d.has_rsvd),
                           self.d.locked_vm, self.pins())


cdef class DmaTree:
    """Keep the mappings of a container by IOVA. (The kernel's is a tree; an array is as fast at 65535 of them.)"""

    def __init__(self):
        self.dmas = []

    def __len__(self):
        return len(self.dmas)

    def __iter__(self):
        return iter(self.dmas)

    cpdef Py_ssize_t first(self, uint64_t start):
        cdef Py_ssize_t low = 0, high = len(self.dmas), mid
        cdef VFIODma dma
        while low < high:
            mid = (low + high) >> 1
            dma = <VFIODma>self.dmas[mid]
            if dma.d.iova + (dma.d.size - 1) >= start:
                high = mid
            else:
                low = mid + 1
        return low

    cpdef VFIODma find(self, uint64_t start, uint64_t last):
        cdef Py_ssize_t at = self.first(start)
        if at < len(self.dmas) and (<VFIODma>self.dmas[at]).d.iova <= last:
            return <VFIODma>self.dmas[at]
        return None

    def link(self, VFIODma dma):
        """Add a mapping that overlaps none."""
        self.dmas.insert(self.first(dma.d.iova), dma)

    def unlink(self, VFIODma dma):
        """Take a mapping out."""
        del self.dmas[self.first(dma.d.iova)]


def word(number, what, least=0, most=2**64 - 1):
    """Return an argument as an int of 64 bits; raises TypeError, or InvalidArgument outside of least..most."""
    return count_arg(number, what, least, most)
