"""External pins: pages that a driver (mdev) pins by IOVA, and accesses through a container.

    who                                     GUP pins on the page    locked_vm
    IOMMU mapping only                      1                       +1
    external pin only                       1                       +1
    the same IOVA pinned twice              1 (ref_count 2)         +1
    IOMMU mapping, then external pin        2                       +1: the pin is not charged
    external pin, then an IOMMU attached    2                       +1: the mapping is not charged for this page
    then the last IOMMU detached            1                       +1 an external pin that is left

Laws
    A pin is found by its exact IOVA, also inside a page; it lasts until it was unpinned as often as it was pinned.
    A call that fails at page n leaves what pages 0 to n - 1 had before.

The functions are called with the container's lock held; ExternalPins takes it.

Units: IOVAs, lengths: bytes; npage: pages.
Raises: TypeError, InvalidArgument, MMError.
Threads: any number at once, by the container's lock.
Kernel: vfio_iommu_type1_pin_pages(), _unpin_pages(), _dma_rw().
"""
import errno
import weakref
from functools import partial

from ..core.errors import InvalidArgument, MMError
from ..core.pagelist import PageList
from . import vfio_dirty
from .steps import all_of
from .vfio_dma import word
from .vfio_page import vfio_pin_page_external, vfio_unpin_page_external


class VFIODevice:
    """Stand for an open device that pins by itself: made by VFIOContainer.register_device()."""

    def __init__(self, container, on_dma_unmap, domain):
        self._container, self.on_dma_unmap, self.domain = weakref.ref(container), on_dma_unmap, domain

    @property
    def emulated(self):
        """True when no IOMMU stands behind it: its group has no domain."""
        return self.domain is None

    def unregister(self):
        """Close the device: no more notices of unmapping. Does nothing the second time."""
        container = self._container()
        if container is not None:
            container.unregister_device(self)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.unregister()

    def __repr__(self):
        return f"<VFIODevice {'emulated' if self.emulated else 'behind an IOMMU'} of {self._container()!r}>"


def covering(tree, iova, call):
    """Return the mapping of an IOVA, or raise."""
    dma = tree.find(iova, iova)
    if dma is None:
        raise InvalidArgument(f"{call}: nothing is mapped at IOVA {iova:#x}: map_dma() first", addr=iova)
    return dma


def allowed(dma, iova, prot, call):
    """Raise unless a mapping allows what is asked."""
    if dma.prot & prot != prot:
        raise MMError(errno.EPERM, f"{call}: the mapping at IOVA {dma.iova:#x} allows {_words(dma.prot)}, and "
                                   f"{_words(prot)} is asked of "
                                   f"{iova:#x}: map it so", addr=iova)


def _words(prot):
    return " and ".join(word for bit, word in ((1, "reading"), (2, "writing")) if prot & bit) or "nothing"


def pin_pages(mem, tree, iova, npage, prot, accounting, tracking, call):
    """Pin npage pages from an IOVA on, a page apart; returns their PageList."""
    shift = mem.page_size.bit_length() - 1
    pfns, done = [], []
    try:
        for at in range(iova, iova + npage * mem.page_size, mem.page_size):
            dma = covering(tree, at, call)
            allowed(dma, at, prot, call)
            pfns.append(vfio_pin_page_external(dma, at, accounting, call))
            done.append((dma, at))
            if tracking:
                vfio_dirty.mark(dma, at, at, shift)
        return PageList(mem, pfns)
    except BaseException:
        all_of(partial(vfio_unpin_page_external, dma, at, accounting, call) for dma, at in done)
        raise


def unpin_pages(mem, tree, iova, npage, accounting, call):
    """Unpin npage pages from an IOVA on; what is not pinned at exactly that IOVA is passed over."""
    found = [(covering(tree, at, call), at) for at in range(iova, iova + npage * mem.page_size, mem.page_size)]
    all_of(partial(vfio_unpin_page_external, dma, at, accounting, call) for dma, at in found)


def dma_rw(tree, iova, data, length, write, tracking, shift, call):
    """Read or write bytes by IOVA, as the CPU does for an emulated device; returns what was read."""
    chunks, at, left = [], iova, length
    while left:
        dma = covering(tree, at, call)
        allowed(dma, at, 3 if write else 1, call)
        if not dma.mm_alive:
            raise MMError(errno.EPERM, f"{call}: the process that mapped IOVA {dma.iova:#x} has exited: its memory is "
                                       "gone", addr=at)
        n = min(left, dma.last - at + 1)
        chunks.append((dma, at, n))
        at, left = at + n, left - n
    out, done = [], 0
    if write and len(chunks) > 1:
        # All can be written, or nothing is.
        for dma, at, n in chunks:
            dma.mm.touch(dma.vaddr + (at - dma.iova), n, True)
    for dma, at, n in chunks:
        addr = dma.vaddr + (at - dma.iova)
        if write:
            dma.mm.write(addr, data[done:done + n])
            if tracking:
                vfio_dirty.mark(dma, at, at + n - 1, shift)
        else:
            out.append(dma.mm.read(addr, n))
        done += n
    return b"".join(out)


class ExternalPins:
    """What a container offers to drivers; VFIOContainer is one."""

    def register_device(self, on_dma_unmap, *, domain=None):
        """Open a device whose driver pins pages by itself; returns a VFIODevice.

        on_dma_unmap(iova, size) is called before memory that is pinned is unmapped, and must unpin it. domain: the
        attached domain whose group it is in; None: an emulated device (mdev), whose group no IOMMU stands behind.
        """
        if not callable(on_dma_unmap):
            raise TypeError(f"on_dma_unmap is called with (iova, size): it cannot be {on_dma_unmap!r}")
        with self._lock:
            self._open()
            if domain is not None and domain not in self.domains:
                raise InvalidArgument("register_device: the domain is not attached to the container")
            device = VFIODevice(self, on_dma_unmap, domain)
            self._devices.append(device)
            return device

    def unregister_device(self, device):
        """Close a device; does nothing when it is closed. With the last emulated one and no domain, mappings go as
        well.
        """
        with self._lock:
            if device not in self._devices:
                return
            self._devices.remove(device)
            if device.emulated and not self._attached and not self._emulated() and not self.closed:
                self._remove_all()

    def pin_pages(self, iova, npage, prot, *, device=None):
        """Pin npage pages, the first one at an IOVA, for a driver; returns their PageList.

        prot: IOMMU_READ, IOMMU_WRITE. device: who asks, where it matters whose group says what it uses (dirty
        tracking). Raises MMError: EINVAL (nothing mapped, no device registered, no struct page), E2BIG (more than 512),
        EACCES (v1), EOVERFLOW, EBUSY (addresses are invalid), EPERM (the mapping does not allow it), ENODEV (its
        process is gone), ENOMEM, EFAULT. None of the pages is pinned then. Kernel: vfio_pin_pages().
        """
        call = "vfio_pin_pages"
        iova, npage = word(iova, "iova"), word(npage, "npage", 1)
        prot = word(prot, "prot", 0, 2**31 - 1)
        most = self.mem.page_size // 8
        if npage > most:
            raise MMError(errno.E2BIG, f"{call} of {npage} pages: {most} a call at most", addr=iova)
        with self._lock:
            self._external(iova, npage * self.mem.page_size, call)
            if self.vaddr_invalid_count:
                raise MMError(errno.EBUSY, f"{call}: {self.vaddr_invalid_count} mappings have no valid address: "
                                           "map_dma() with "
                                           "VFIO_DMA_MAP_FLAG_VADDR first", addr=iova)
            if not self._devices:
                raise InvalidArgument(f"{call}: no device is registered for notices of unmapping: register_device() "
                                      "first", addr=iova)
            if device is not None and device not in self._devices:
                raise InvalidArgument(f"{call}: the device is not registered here", addr=iova)
            pages = pin_pages(self.mem, self._tree, iova, npage, prot, not self._attached,
                              self.dirty_page_tracking, call)
            for attached in self._attached:
                if device is not None and device.domain is attached.domain and not attached.pinned_scope:
                    attached.pinned_scope = True
                    self.num_non_pinned_groups -= 1
            return pages

    def unpin_pages(self, iova, npage):
        """Unpin what pin_pages() pinned at exactly these IOVAs; what is not pinned there is passed over.

        Raises InvalidArgument where nothing is mapped, with nothing changed. Kernel: vfio_unpin_pages().
        """
        call = "vfio_unpin_pages"
        iova, npage = word(iova, "iova"), word(npage, "npage", 1)
        with self._lock:
            self._external(iova, npage * self.mem.page_size, call)
            unpin_pages(self.mem, self._tree, iova, npage, not self._attached, call)

    def dma_rw(self, iova, data_or_len, write):
        """Write bytes to memory by its IOVA, or read so many; returns the bytes read, or how many were written.

        Raises MMError: EBUSY (addresses are invalid), EINVAL (nothing mapped), EPERM (not allowed, or the process is
        gone), EFAULT (its memory is). Kernel: vfio_dma_rw().
        """
        call = "vfio_dma_rw"
        iova, write = word(iova, "iova"), bool(write)
        data = memoryview(data_or_len).cast("B") if write else None
        length = len(data) if write else word(data_or_len, "length")
        with self._lock:
            self._open()
            if self.vaddr_invalid_count:
                raise MMError(errno.EBUSY, f"{call}: {self.vaddr_invalid_count} mappings have no valid address",
                              addr=iova)
            if length:
                self._wraps(iova, length, "iova", call)
            out = dma_rw(self._tree, iova, data, length, write, self.dirty_page_tracking, self._shift, call)
            return length if write else out
