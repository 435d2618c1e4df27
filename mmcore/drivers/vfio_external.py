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

Called with the container's lock held.
"""
import errno
import weakref

from ..core.errors import InvalidArgument, MMError
from ..core.pagelist import PageList
from . import vfio_dirty
from .vfio_pin import vfio_pin_page_external, vfio_unpin_page_external


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
        raise MMError(errno.EPERM, f"{call}: the mapping at IOVA {dma.iova:#x} allows {_words(dma.prot)}, and {_words(prot)} is asked of "
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
    except BaseException:
        for dma, at in done:
            vfio_unpin_page_external(dma, at, accounting, call)
        raise
    return PageList(mem, pfns)


def unpin_pages(mem, tree, iova, npage, accounting, call):
    """Unpin npage pages from an IOVA on; what is not pinned at exactly that IOVA is passed over."""
    found = [(covering(tree, at, call), at) for at in range(iova, iova + npage * mem.page_size, mem.page_size)]
    for dma, at in found:
        vfio_unpin_page_external(dma, at, accounting, call)


def dma_rw(tree, iova, data, length, write, tracking, shift, call):
    """Read or write bytes by IOVA, as the CPU does for an emulated device; returns what was read."""
    chunks, at, left = [], iova, length
    while left:
        dma = covering(tree, at, call)
        allowed(dma, at, 3 if write else 1, call)
        if not dma.mm_alive:
            raise MMError(errno.EPERM, f"{call}: the process that mapped IOVA {dma.iova:#x} has exited: its memory is gone", addr=at)
        n = min(left, dma.last - at + 1)
        chunks.append((dma, at, n))
        at, left = at + n, left - n
    out, done = [], 0
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
