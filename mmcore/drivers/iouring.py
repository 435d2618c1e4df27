"""io_uring fixed buffers: the table of a ring.

Registering is all or nothing. Updating is not: the buffers before the one that failed stay, and are counted.

Units: addresses, lengths: bytes; slots by index.
Raises: TypeError, InvalidArgument, MMError with the errno of the system call.
Threads: any number at once; a lock a table and its clones.
Kernel: IORING_REGISTER_BUFFERS and its kin in rsrc.c.
"""
import errno as _errno
import threading

from ..core.errors import InvalidArgument, MMError
from ..core.mm import MM
from .iobuffer import *
from .iobuffer import __all__ as _iobuffer
from .iobuffer import buffer_arg, drop_buffers, forget_buffers, hold_buffers, new_buffer, new_charges
from .iov import MAX_RW_COUNT, _number

__all__ = ["BufferTable", "IORING_MAX_REG_BUFFERS", *_iobuffer]

IORING_MAX_REG_BUFFERS = 16384


class BufferTable:
    """Hold the fixed buffers of one io_uring: BufferTable(mm, nr=None); with nr, that many empty slots.

    Buffers are (address, length). A PageList, or (PageList, offset in the first page, length), registers pages that are known
    already, as those of a captured buffer. files="5.8": refuse files other than hugetlbfs, as kernels to 5.17 did.
    """

    def __init__(self, mm, nr=None, *, files="longterm"):
        if not isinstance(mm, MM):
            raise TypeError(f"an MM is wanted, not {mm!r}")
        if files not in ("longterm", "5.8"):
            raise InvalidArgument(f"files={files!r} is none of 'longterm', '5.8'")
        self.mm, self.files = mm, files
        self._lock = threading.Lock()
        self._slots = None
        self._charges = new_charges(mm)
        if nr is not None:
            self._slots = [None] * _count(nr)

    @property
    def buffers(self):
        """List the slots: RegisteredBuffer, or None for an empty one; [] when nothing is registered."""
        return list(self._slots or ())

    @property
    def charged(self):
        """Pages that its buffers count for, each large folio once."""
        return self._charges.pages

    def _one(self, what):
        known, addr, length = what
        if self.files == "5.8" and known is None:
            for vma in self.mm.vmas:
                if vma.start < addr + length and addr < vma.end and vma.file is not None and vma.file.kind != "hugetlbfs":
                    raise MMError(_errno.EOPNOTSUPP, f"the buffer at {addr:#x} is on a {vma.file.kind} file: only hugetlbfs may be "
                                                     "registered under the rules of 5.8", addr=addr)
        return new_buffer(self._charges, known, addr, length)

    def _args(self, buffers):
        """All of them are checked before one is registered: a wrong one changes nothing."""
        return [buffer_arg(self.mm, what) for what in buffers]

    def register(self, buffers):
        """Register all buffers of a list, or none; (0, 0) leaves a slot empty. Kernel: IORING_REGISTER_BUFFERS.

        Raises MMError: EBUSY (some are registered), EINVAL for 0 or more than 16384, EFAULT (length 0 or above 1 GiB; what cannot
        be pinned), EOVERFLOW (the range wraps), ENOMEM (memory, or RLIMIT_MEMLOCK of the user).
        """
        buffers = self._args(buffers)
        with self._lock:
            if self._slots is not None:
                raise MMError(_errno.EBUSY, f"{len(self._slots)} slots are registered on this ring: unregister() first, or update()")
            _count(len(buffers))
            made = []
            try:
                for what in buffers:
                    made.append(self._one(what))
            except BaseException:
                forget_buffers(made)
                raise
            hold_buffers(made)
            self._slots = made

    def update(self, index, buffers):
        """Replace slots from `index` on; returns how many were.

        The error of a later one is not told, as in the kernel; that of the first is raised. Raises as register(), and
        MMError(ENXIO) without slots. Kernel: IORING_REGISTER_BUFFERS_UPDATE.
        """
        index, buffers = _number(index, "index"), self._args(buffers)
        with self._lock:
            if self._slots is None:
                raise MMError(_errno.ENXIO, "no slots are registered: register(), or BufferTable(mm, nr)")
            if not buffers or index + len(buffers) > len(self._slots):
                raise InvalidArgument(f"{len(buffers)} slots from {index} on are not in the table of {len(self._slots)}")
            for done, what in enumerate(buffers):
                try:
                    new = self._one(what)
                except MMError:
                    if not done:
                        raise
                    return done
                old = self._slots[index + done]
                try:
                    drop_buffers(self.mm.mem, [old])
                except BaseException:
                    forget_buffers([new])
                    raise
                hold_buffers([new])
                self._slots[index + done] = new
            return len(buffers)

    def clone(self, source, src_off=0, dst_off=0, nr=0):
        """Put nr buffers (0: all) of another table into this one, from slot dst_off on; they are shared, pins do not change.

        Raises MMError: EBUSY (some are registered here), ENXIO (none there), EINVAL (beyond either table, or 16384), EOVERFLOW (32
        bits). Kernel: IORING_REGISTER_CLONE_BUFFERS.
        """
        if not isinstance(source, BufferTable):
            raise TypeError(f"a BufferTable is wanted, not {source!r}")
        src_off, dst_off, nr = (_u32(n, what) for n, what in ((src_off, "src_off"), (dst_off, "dst_off"), (nr, "nr")))
        if source.mm.mem is not self.mm.mem:
            raise InvalidArgument("the tables belong to two Memories")
        if source is self:
            raise MMError(_errno.EBUSY, "a table cannot be cloned onto itself")
        first, second = sorted((self._lock, source._lock), key=id)
        with first, second:
            if self._slots is not None:
                raise MMError(_errno.EBUSY, "buffers are registered on this ring: unregister() first")
            if source._slots is None:
                raise MMError(_errno.ENXIO, "the source has no buffers")
            nr = nr or len(source._slots)
            if max(src_off, dst_off) + nr > 0xffffffff:
                raise MMError(_errno.EOVERFLOW, f"offset {max(src_off, dst_off)} and {nr} buffers do not fit in 32 bits")
            if src_off + nr > len(source._slots):
                raise InvalidArgument(f"{nr} buffers from {src_off} on are not in the source of {len(source._slots)}")
            if dst_off + nr > IORING_MAX_REG_BUFFERS:
                raise InvalidArgument(f"{dst_off + nr} slots: a table has up to {IORING_MAX_REG_BUFFERS}")
            shared = source._slots[src_off:src_off + nr]
            hold_buffers(shared)
            self._slots = [None] * dst_off + shared

    def unregister(self):
        """Release all. Raises MMError(ENXIO) when nothing is registered, BadPage when pins are missing, with nothing changed."""
        with self._lock:
            if self._slots is None:
                raise MMError(_errno.ENXIO, "no buffers are registered")
            drop_buffers(self.mm.mem, self._slots)
            self._slots = None

    def import_range(self, index, addr, length):
        """Return the pieces (PFN, offset, length) that a request on [addr, addr + length) of a buffer works on.

        Raises MMError(EFAULT): an empty slot, a range that leaves the buffer or wraps, or of more than MAX_RW_COUNT bytes.
        Kernel: io_import_fixed().
        """
        addr, length = _number(addr, "addr"), _number(length, "length")
        slots = self._slots or ()
        at = _u32(index, "index")
        buf = slots[at] if at < len(slots) else None
        if buf is None:
            raise MMError(_errno.EFAULT, f"slot {at} is empty")
        if addr < buf.address or addr + length > buf.address + buf.length or length > MAX_RW_COUNT:
            raise MMError(_errno.EFAULT, f"{length} bytes at {addr:#x} leave the buffer {buf.address:#x}+{buf.length:#x}, or are more than "
                                         f"{MAX_RW_COUNT}", addr=addr)
        skip, pieces = addr - buf.address, []
        for pfn, offset, size in buf.bvecs:
            if skip < size and length:
                take = min(length, size - skip)
                pieces.append((pfn, offset + skip, take))
                length -= take
                skip = 0
            else:
                skip = max(0, skip - size)
        return pieces

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if self._slots is not None:
            self.unregister()

    def __repr__(self):
        if self._slots is None:
            return "<BufferTable, nothing registered>"
        return f"<BufferTable of {len(self._slots)} slots, {sum(buf is not None for buf in self._slots)} used>"


def _count(nr):
    if isinstance(nr, bool) or not hasattr(nr, "__index__"):
        raise TypeError(f"a number of buffers is an int, not {nr!r}")
    if not 0 < nr.__index__() <= IORING_MAX_REG_BUFFERS:
        raise InvalidArgument(f"{nr} buffers: 1 to {IORING_MAX_REG_BUFFERS} can be registered")
    return nr.__index__()


def _u32(value, what):
    value = _number(value, what)
    if value > 0xffffffff:
        raise InvalidArgument(f"{what} {value} does not fit in 32 bits")
    return value
