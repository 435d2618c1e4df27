"""What a memory region allows: IB_ACCESS_* and the rules between them.

Units: access: IB_ACCESS bits.
Raises: TypeError, InvalidArgument, MMError(EACCES).
Threads: plain values.
Kernel: enum ib_access_flags, ib_check_mr_access().
"""
import enum
import errno

from ..core.errors import InvalidArgument, MMError

__all__ = ["IB_ACCESS", "ib_access_writable", "ib_check_mr_access", "ib_umem_check_rereg"]


class IB_ACCESS(enum.IntFlag):
    """Name the bits of enum ib_access_flags."""
    LOCAL_WRITE = 1
    REMOTE_WRITE = 2
    REMOTE_READ = 4
    REMOTE_ATOMIC = 8
    MW_BIND = 16
    ZERO_BASED = 32
    ON_DEMAND = 64
    HUGETLB = 128
    FLUSH_GLOBAL = 256
    FLUSH_PERSISTENT = 512
    RELAXED_ORDERING = 1 << 20


_WRITES = IB_ACCESS.LOCAL_WRITE | IB_ACCESS.REMOTE_WRITE | IB_ACCESS.REMOTE_ATOMIC | IB_ACCESS.MW_BIND
_ALL = 0
for _flag in IB_ACCESS:
    _ALL |= _flag.value
    globals()[f"IB_ACCESS_{_flag.name}"] = _flag
    __all__.append(f"IB_ACCESS_{_flag.name}")


def ib_access_writable(access):
    """Tell whether a region with these flags is pinned for writing: any of LOCAL_WRITE, REMOTE_WRITE, REMOTE_ATOMIC, MW_BIND."""
    return bool(access & _WRITES)


def ib_check_mr_access(access):
    """Return the flags as IB_ACCESS, or raise InvalidArgument.

    REMOTE_WRITE and REMOTE_ATOMIC need LOCAL_WRITE: the device that writes for a peer writes here. Bits without a name are
    refused.
    """
    if isinstance(access, bool) or not hasattr(access, "__index__"):
        raise TypeError(f"access is IB_ACCESS flags, not {access!r}")
    access = access.__index__()
    if access & ~_ALL or access < 0:
        raise InvalidArgument(f"access {access:#x} has bits that are no IB_ACCESS flag: {access & ~_ALL:#x}")
    if access & (IB_ACCESS.REMOTE_WRITE | IB_ACCESS.REMOTE_ATOMIC) and not access & IB_ACCESS.LOCAL_WRITE:
        raise InvalidArgument(f"{IB_ACCESS(access)!r}: remote writes and atomics need LOCAL_WRITE too")
    return IB_ACCESS(access)


def ib_umem_check_rereg(umem, flags_changed, access):
    """Refuse access flags that write through pages that were pinned for reading: MMError(EACCES).

    flags_changed: the set of what a re-registration changes, "access" and "translation". With a new translation the pages
    are pinned anew, and any access may be asked for. Kernel: the check of 2026.
    """
    if "access" in flags_changed and "translation" not in flags_changed and ib_access_writable(access) and not umem.writable:
        raise MMError(errno.EACCES, f"the region at {umem.address:#x} was pinned for reading: writes through it could reach shared "
                                    "pages, or copies that nobody sees. Register it anew, or change its translation as well",
                      addr=umem.address)
