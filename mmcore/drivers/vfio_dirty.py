"""Dirty bitmaps of a container: a bit a page of each mapping, while tracking is on.

Laws
    A bit is set when a driver pins the page (it may write at any time) or writes it by dma_rw, and all bits of a
    mapping that IOMMUs translate count as set as long as a group exists that never said which pages it uses
    (num_non_pinned_groups). Reading clears, and sets again what is pinned by drivers at that moment; the bitmap of an
    unmap goes with the mapping. Bit n of a bitmap is the page n pages after the IOVA asked for, in words of 64 bits,
    least significant first.

The functions are called with the container's lock held; DirtyPages takes it.
"""
import errno

from ..core.errors import InvalidArgument, MMError
from ..core.mm import MM
from ..core.size import parse_size
from .vfio_dma import word
from .vfio_uapi import DIRTY_BITMAP_BYTES, DIRTY_BITMAP_PAGES_MAX, DIRTY_BITMAP_SIZE_MAX

WORD = 64


class UserBits:
    """The caller's bitmap: a writable buffer, or (mm, addr, nbytes) in a process, where a copy may fault."""

    def __init__(self, bitmap, call):
        self.call = call
        if isinstance(bitmap, tuple):
            if len(bitmap) != 3 or not isinstance(bitmap[0], MM):
                raise TypeError(f"bitmap= is a writable buffer or (mm, addr, nbytes), not {bitmap!r}")
            self.mm, self.addr = bitmap[0], word(bitmap[1], "addr of the bitmap")
            self.size = word(bitmap[2], "size of the bitmap")
        else:
            self.mm, self.view = None, memoryview(bitmap).cast("B")
            if self.view.readonly:
                raise TypeError("bitmap= is read-only: pass a bytearray or a NumPy array")
            self.size = len(self.view)

    def read(self, offset, n):
        """Bytes of it."""
        if self.mm is None:
            return bytes(self.view[offset:offset + n])
        return self._copy(self.mm.read, self.addr + offset, n)

    def write(self, offset, data):
        """Put bytes into it."""
        if self.mm is None:
            self.view[offset:offset + len(data)] = data
        else:
            self._copy(self.mm.write, self.addr + offset, data)

    def _copy(self, copy, addr, what):
        try:
            return copy(addr, what)
        except MMError as error:
            raise MMError(errno.EFAULT, f"{self.call}: the bitmap at {addr:#x} cannot be accessed: {error.strerror}",
                          addr=addr) from None


def verify_bitmap_size(npages, size, call):
    """Refuse a bitmap that is too short for npages, or too long for anybody."""
    if not npages or not 0 < size <= DIRTY_BITMAP_SIZE_MAX or size < DIRTY_BITMAP_BYTES(npages):
        raise InvalidArgument(f"{call}: a bitmap of {size} bytes for {npages} pages: it takes "
                              f"{DIRTY_BITMAP_BYTES(npages)} bytes, and "
                              f"more than {DIRTY_BITMAP_SIZE_MAX} ({DIRTY_BITMAP_SIZE_MAX * 8} pages) are not taken")


def alloc_bitmap(dma, call):
    """Give a mapping its bitmap; raises InvalidArgument when it is too large for one, MMError(ENOMEM)."""
    if dma.npages > DIRTY_BITMAP_PAGES_MAX:
        raise InvalidArgument(f"{call}: the mapping at IOVA {dma.iova:#x} has {dma.npages} pages, and a dirty bitmap "
                              "has at most "
                              f"{DIRTY_BITMAP_PAGES_MAX}: unmap it, or map it in parts", addr=dma.iova)
    bitmap = None
    if not dma.alloc_fails():
        try:
            bitmap = bytearray(DIRTY_BITMAP_BYTES(dma.npages))
        except MemoryError:
            pass
    if bitmap is None:
        raise MMError(errno.ENOMEM, f"{call}: no memory for the dirty bitmap of the mapping at IOVA {dma.iova:#x}: "
                                    f"{DIRTY_BITMAP_BYTES(dma.npages)} bytes", addr=dma.iova)
    dma.bitmap = bitmap


def seed(dma, shift):
    """Set the bits of what drivers have pinned: they may write it at any time."""
    for pin in dma.pins():
        mark(dma, pin.iova, pin.iova, shift)


def mark(dma, first, last, shift):
    """Set the bits of the pages that hold IOVAs first to last."""
    for bit in range((first - dma.iova) >> shift, ((last - dma.iova) >> shift) + 1):
        dma.bitmap[bit >> 3] |= 1 << (bit & 7)


def fill(dma):
    """Set all bits of a mapping."""
    full, rest = divmod(dma.npages, 8)
    dma.bitmap[:full] = b"\xff" * full
    if rest:
        dma.bitmap[full] = (1 << rest) - 1


def start(dmas, shift, call):
    """Give every mapping a bitmap, or none."""
    done = []
    try:
        for dma in dmas:
            alloc_bitmap(dma, call)
            done.append(dma)
            seed(dma, shift)
    except BaseException:
        for dma in done:
            dma.bitmap = None
        raise


def stop(dmas):
    """Drop the bitmaps."""
    for dma in dmas:
        dma.bitmap = None


def update_user_bitmap(bits, dma, base, shift, all_dirty):
    """Copy a mapping's bits to where they belong in the caller's bitmap, which starts at IOVA base.

    What lies before them in their first word is kept; the words that they reach are otherwise written.
    """
    if all_dirty:
        fill(dma)
    at = (dma.iova - base) >> shift
    low = at % WORD
    offset, n = at // WORD * 8, DIRTY_BITMAP_BYTES(dma.npages + low)
    if low == 0:
        bits.write(offset, bytes(dma.bitmap[:n]))
        return
    kept = int.from_bytes(bits.read(offset, 8), "little") & ((1 << low) - 1)
    bits.write(offset, (int.from_bytes(dma.bitmap, "little") << low | kept).to_bytes(n, "little"))


def clear(dma, shift):
    """Forget what was read, but for what drivers have pinned."""
    dma.bitmap = bytearray(len(dma.bitmap))
    seed(dma, shift)


class DirtyPages:
    """Dirty tracking of a container; VFIOContainer is one."""

    def dirty_pages_start(self):
        """Start tracking; does nothing when it is on. Raises MMError: EACCES (v1), EINVAL (too many pages), ENOMEM."""
        self._dirty_pages(True)

    def dirty_pages_stop(self):
        """Stop tracking; does nothing when it is off. Raises MMError(EACCES) for v1."""
        self._dirty_pages(False)

    def _dirty_pages(self, on):
        call = "VFIO_IOMMU_DIRTY_PAGES"
        with self._lock:
            self._open()
            self._v2_only(call)
            if on and not self.dirty_page_tracking:
                start(self._tree, self._shift, call)
            elif not on:
                stop(self._tree)
            self.dirty_page_tracking = on

    def dirty_pages_get_bitmap(self, iova, size, pgsize=None, *, bitmap=None):
        """Return the dirty bitmap of the mappings in [iova, iova + size) as bytes, a bit for each pgsize bytes, and
        clear them.

        bitmap: where to put it instead, a writable buffer or (mm, addr, nbytes). Raises MMError: EACCES (v1), EINVAL
        (sizes, a range that cuts a mapping, tracking is off), EOVERFLOW, EFAULT. Kernel: VFIO_IOMMU_DIRTY_PAGES,
        GET_BITMAP.
        """
        call = "VFIO_IOMMU_DIRTY_PAGES"
        iova, size = word(iova, "iova"), word(parse_size(size), "size")
        with self._lock:
            self._open()
            self._v2_only(call)
            if size == 0:
                raise InvalidArgument(f"{call}: GET_BITMAP of 0 bytes", addr=iova)
            self._wraps(iova, size, "iova", call)
            npages, out = size >> self._shift, None
            if bitmap is None:
                verify_bitmap_size(npages, DIRTY_BITMAP_BYTES(npages), call)
                out = bitmap = bytearray(DIRTY_BITMAP_BYTES(npages))
            bits = self._bitmap_arg(bitmap, pgsize, size, call)
            if bits.pgsize != self.pgsize:
                raise InvalidArgument(f"{call}: pgsize {bits.pgsize}: the bitmap has a bit for each {self.pgsize} "
                                      "bytes", addr=iova)
            self._aligned(iova | size, f"iova {iova:#x} and size {size:#x}", call)
            if not self.dirty_page_tracking:
                raise InvalidArgument(f"{call}: tracking is off: dirty_pages_start() first", addr=iova)
            self._uncut(iova, iova + size - 1, call)
            dmas, at = self._tree.dmas, self._tree.first(iova)
            while at < len(dmas) and dmas[at].iova < iova + size:
                update_user_bitmap(bits, dmas[at], iova, self._shift, self._all_dirty(dmas[at]))
                clear(dmas[at], self._shift)
                at += 1
            return bytes(out) if out is not None else None
