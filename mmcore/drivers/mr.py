"""Protection domains and memory regions, in the manner of pyverbs.

Units: addresses, lengths: bytes; access: IB_ACCESS bits; keys: uint32.
Raises: TypeError, InvalidArgument, MMError as ib_umem_get().
Threads: any number at once; a lock a domain, a lock a region.
Kernel: ibv_reg_mr(), struct ib_pd, struct ib_mr.
"""
import errno
import itertools
import threading

from ..core.errors import InvalidArgument, MMError
from ..core.mm import MM
from ..ledger import holding
from .ibaccess import IB_ACCESS, ib_access_writable, ib_check_mr_access, ib_umem_check_rereg
from .steps import all_of
from .umem import IBDevice, ib_umem_get, ib_umem_release

__all__ = ["ProtectionDomain", "MR"]

_RELEASES = "range", "array", "page"
_KEY_VARIANTS = 256             # the low byte of a key changes with each use of its index


class ProtectionDomain:
    """Hold the memory regions of one process on one device: ProtectionDomain(device, mm). Kernel: struct ib_pd.

    close(), or the end of a with-statement, closes its regions first, the last one registered first.
    """

    def __init__(self, device, mm):
        if not isinstance(device, IBDevice):
            raise TypeError(f"an IBDevice is wanted, not {device!r}")
        if not isinstance(mm, MM):
            raise TypeError(f"an MM is wanted, not {mm!r}")
        if device.mem is not mm.mem:
            raise InvalidArgument("the address space belongs to another Memory than the device")
        self.device, self.mm = device, mm
        self.closed = False
        self._mrs = {}          # index: MR, in the order of registration
        self._free = []         # indexes that were used
        self._next = itertools.count(1)
        self._uses = {}         # index: how often
        self._lock = threading.Lock()

    @property
    def mrs(self):
        """List the regions that are open, in the order of registration."""
        return list(self._mrs.values())

    def reg_mr(self, addr, length, access, *, acquire="sink", release="range"):
        """Register `length` bytes from `addr` on; returns an MR. acquire, release: generations, of ib_umem_get/_release().

        Raises InvalidArgument for access flags that do not go together, and as ib_umem_get() does. Verb: ibv_reg_mr.
        """
        self._open()
        return MR(self, addr, length, ib_check_mr_access(access), acquire, release)

    def close(self):
        """Close the regions and the domain; does nothing the second time. What cannot be closed stays, and is raised."""
        with self._lock:
            if self.closed:
                return
            self.closed = True      # no more registrations
        try:
            all_of(mr.close for mr in reversed(self.mrs))
        except BaseException:
            self.closed = False
            raise

    def _open(self):
        if self.closed:
            raise InvalidArgument("the protection domain is closed")

    def _enter(self, mr):
        with self._lock:
            self._open()
            index = self._free.pop() if self._free else next(self._next)
            self._uses[index] = uses = self._uses.get(index, -1) + 1
            # Before it can be found here: close() of the domain closes what it finds.
            mr.lkey = index << 8 | uses % _KEY_VARIANTS
            self._mrs[index] = mr

    def _leave(self, mr):
        with self._lock:
            index = mr.lkey >> 8
            del self._mrs[index]
            self._free.append(index)

    def __enter__(self):
        self._open()
        return self

    def __exit__(self, *_):
        self.close()

    def __repr__(self):
        return f"<ProtectionDomain of {self.device!r} {'closed' if self.closed else f'{len(self._mrs)} regions'}>"


class MR:
    """Hold a memory region: pinned, accounted and mapped until close(). Made by ProtectionDomain.reg_mr()."""

    def __init__(self, pd, addr, length, access, acquire, release):
        if not isinstance(release, str) or release not in _RELEASES:
            # Now: close() would find out too late.
            raise InvalidArgument(f"release={release!r} is none of {', '.join(map(repr, _RELEASES))}")
        self.pd, self.access, self.acquire, self.release = pd, access, acquire, release
        # What the device calls it is known only once it is there; what its holder is called, before.
        self._name = f"MR {addr:#x}+{length:#x}" if isinstance(addr, int) and isinstance(length, int) else "MR"
        self._lock = threading.Lock()
        self.umem = self._get(addr, length, access)
        try:
            pd._enter(self)
        except BaseException:
            self._give_back(self.umem)
            raise

    def _get(self, addr, length, access):
        with holding(self._name):
            return ib_umem_get(self.pd.device, self.pd.mm, addr, length, access, acquire=self.acquire)

    def _give_back(self, umem):
        with holding(self._name):
            ib_umem_release(umem, release=self.release)

    @property
    def rkey(self):
        """What a peer names it by: lkey, as on most devices."""
        return self.lkey

    @property
    def addr(self):
        """Address of its first byte."""
        return self._open().address

    @property
    def length(self):
        """Bytes."""
        return self._open().length

    @property
    def closed(self):
        """True after close()."""
        return self.umem is None

    def _open(self):
        umem = self.umem
        if umem is None:
            raise InvalidArgument("the memory region is closed")
        return umem

    def rereg(self, *, addr=None, length=None, access=None):
        """Change what is registered (addr and length) or what it allows (access), or both; verb: ibv_rereg_mr.

        With addr the new pages are pinned before the old ones go; so both count for a moment, and a failure leaves the
        region as it was. Raises MMError(EACCES) when access alone becomes writable and the pages were pinned for reading.
        """
        if (addr is None) != (length is None):
            raise InvalidArgument("a new translation is an addr and a length")
        with self._lock:
            umem = self._open()
            wanted = self.access if access is None else ib_check_mr_access(access)
            changes = {name for name, value in (("translation", addr), ("access", access)) if value is not None}
            ib_umem_check_rereg(umem, changes, wanted)
            if addr is not None:
                new = self._get(addr, length, wanted)
                try:
                    self._give_back(umem)
                except BaseException:
                    self._give_back(new)
                    raise
                self.umem = new
            self.access = wanted

    def read(self, offset, length):
        """Return bytes as a peer reads them: needs REMOTE_READ. Raises MMError(EACCES), InvalidArgument beyond the end."""
        from .umem import ib_umem_copy_from
        umem = self._open()
        if not self.access & IB_ACCESS.REMOTE_READ:
            raise MMError(errno.EACCES, "the region does not allow REMOTE_READ")
        return ib_umem_copy_from(umem, offset, length)

    def close(self):
        """Deregister: unmap, unpin, uncharge; does nothing the second time. Raises as ib_umem_release(), and stays open then."""
        with self._lock:
            if self.umem is None:
                return
            self._give_back(self.umem)
            self.umem = None
            self.pd._leave(self)

    def __enter__(self):
        self._open()
        return self

    def __exit__(self, *_):
        self.close()

    def __repr__(self):
        if self.umem is None:
            return f"<MR {self.lkey:#x} closed>"
        writes = "writable" if ib_access_writable(self.access) else "read-only"
        return f"<MR {self.lkey:#x} {self.umem.address:#x}+{self.umem.length:#x} {writes}>"
