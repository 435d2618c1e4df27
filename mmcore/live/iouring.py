"""The running kernel as an oracle: register a real buffer with io_uring, and measure it.

No liburing: three system calls are enough. Registering pins every page for as long as
the registration lives (FOLL_WRITE|FOLL_LONGTERM), as RDMA and VFIO do.
"""

import ctypes
import errno
import os
import platform
import struct
import time
from dataclasses import dataclass, field

import numpy as np

from mmcore.core.errors import MMError

from .errors import NotPossible
from .limits import fit, limits, require_proc
from .units import format_size
from .vmstat import foll_pins

# Numbers of the generic table, which every architecture since 2019 shares; alpha and mips differ.
SYSCALLS = {"io_uring_setup": 425, "io_uring_register": 427}
ARCHITECTURES = ("x86_64", "aarch64", "riscv64", "ppc64le", "s390x", "loongarch64")
IORING_REGISTER_BUFFERS = 0
IORING_UNREGISTER_BUFFERS = 1
IO_URING_PARAMS_SIZE = 120
MAX_IOVEC = 1 << 30              # bytes: the kernel refuses more in one buffer
MAX_IOVECS = 16384


@dataclass
class Prediction:
    """What the kernel should count when it registers a buffer; all in pages."""

    acquired: int = 0                 # nr_foll_pin_acquired
    released_at_register: int = 0     # dropped at once: one pin a folio is enough
    released_at_unregister: int = 0
    charge: int = 0                   # VmPin
    bvecs: int = 0
    coalesced: int = 0                # iovecs that became one bvec a folio
    iovecs: int = 0


@dataclass
class KernelRegister:
    """Measured registrations of one buffer. Times in ns, one entry a round; counts in pages."""

    pages: int
    iovecs: int
    register_ns: list = field(default_factory=list)
    unregister_ns: list = field(default_factory=list)
    vmpin_at_register: "list | None" = field(default_factory=list)
    vmpin_at_unregister: "list | None" = field(default_factory=list)
    # [(acquired, released)] a round, machine-wide; None and a reason where not readable
    at_register: "list | None" = field(default_factory=list)
    at_unregister: "list | None" = field(default_factory=list)
    no_counts: str = ""


def predict_iouring_pins(pfns, heads, orders, max_pages=None):
    """Return the Prediction for registering these pages as one buffer, cut every max_pages.

    Arrays of one entry a page, in buffer order: PFN, PFN of its folio's head, folio order.
    A buffer is coalesced when it has more than one page, its folios have one size above a
    page, and each is used to its end and from its start except at the buffer's two ends.
    Then one pin and one bvec stay for each folio; otherwise one for each page.
    A folio is charged whole, once a ring. Raises ValueError for a page that is not present.
    """
    if not (len(pfns) == len(heads) == len(orders)):
        raise ValueError(f"arrays differ: {len(pfns)} pfns, {len(heads)} heads, {len(orders)} orders")
    if np.any(pfns == 0):
        at = int(np.flatnonzero(pfns == 0)[0])
        raise ValueError(f"page {at} is not present: registering would fault it in first")
    total = Prediction()
    charged = {}
    step = max_pages or max(1, len(pfns))
    for at in range(0, len(pfns), step):
        part = slice(at, at + step)
        _add_buffer(total, charged, pfns[part], heads[part], orders[part])
    total.charge = sum(charged.values())
    return total


def _add_buffer(total, charged, pfns, heads, orders):
    n = len(pfns)
    size = 1 << int(orders[0])
    folios = _coalesced_folios(pfns, heads, orders)
    coalesced = n > 1 and folios is not None and size > 1
    bvecs = folios if coalesced else n
    total.iovecs += 1
    total.acquired += n
    total.released_at_register += n - bvecs
    total.released_at_unregister += bvecs
    total.bvecs += bvecs
    total.coalesced += coalesced
    # A small page is charged each time it appears, a compound one once.
    small = orders == 0
    charged[None] = charged.get(None, 0) + int(np.count_nonzero(small))
    compound, first = np.unique(heads[~small], return_index=True)
    sizes = 1 << orders[~small][first].astype(np.int64)
    charged.update(zip(compound.tolist(), sizes.tolist()))


def _coalesced_folios(pfns, heads, orders):
    """Return how many folio visits cover the pages in the coalescible way, or None."""
    if np.any(orders != orders[0]):
        return None
    size = np.uint64(1 << int(orders[0]))
    index = pfns - heads
    # A visit goes on while the next page is the next of the same folio.
    goes_on = (heads[1:] == heads[:-1]) & (pfns[1:] == pfns[:-1] + np.uint64(1))
    ends = np.flatnonzero(~goes_on)
    if np.any(index[ends] != size - np.uint64(1)) or np.any(index[ends + 1] != 0):
        return None
    return len(ends) + 1


def kernel_register(buffer, rounds=1):
    """Register and unregister a buffer of this process with io_uring; return KernelRegister.

    buffer has .addr and .length (bytes). More than 1 GiB goes as several iovecs in one call.
    The pin counters are machine-wide: pins of others in the meantime show in them.

    Raises NotPossible where io_uring is missing or forbidden, or RLIMIT_MEMLOCK refuses.
    """
    require_proc()
    if rounds < 1:
        raise ValueError(f"rounds must be at least 1, not {rounds}")
    addr, length = buffer.addr, buffer.length
    iovecs = [(addr + at, min(MAX_IOVEC, length - at)) for at in range(0, length, MAX_IOVEC)]
    if len(iovecs) > MAX_IOVECS:
        raise ValueError(f"{format_size(length)} needs {len(iovecs)} iovecs, above {MAX_IOVECS}")
    page = os.sysconf("SC_PAGE_SIZE")
    packed = b"".join(struct.pack("@NN", base, size) for base, size in iovecs)
    pages = sum(-(-(base + size) // page) - base // page for base, size in iovecs)
    result = KernelRegister(pages=pages, iovecs=len(iovecs))
    try:
        foll_pins()
    except NotPossible as error:
        result.no_counts = str(error)
        result.at_register = result.at_unregister = None
    with _Ring() as ring:
        for _ in range(rounds):
            _one_round(ring, packed, len(iovecs), result, length, page)
    return result


def _one_round(ring, packed, count, result, length, page):
    before = _counts(result, page)
    start = time.perf_counter_ns()
    failed = ring.register(IORING_REGISTER_BUFFERS, packed, count)
    result.register_ns.append(time.perf_counter_ns() - start)
    if failed:
        raise _refusal("registering the buffer", failed, length)
    between = _counts(result, page)
    start = time.perf_counter_ns()
    failed = ring.register(IORING_UNREGISTER_BUFFERS, None, 0)
    result.unregister_ns.append(time.perf_counter_ns() - start)
    if failed:
        raise _refusal("unregistering the buffer", failed, length)
    after = _counts(result, page)
    result.vmpin_at_register.append(between[0] - before[0])
    result.vmpin_at_unregister.append(after[0] - between[0])
    if result.at_register is not None:
        result.at_register.append((between[1] - before[1], between[2] - before[2]))
        result.at_unregister.append((after[1] - between[1], after[2] - between[2]))


def _counts(result, page):
    """Return (VmPin in pages, acquired, released); the latter 0 where not readable."""
    pins = foll_pins() if result.at_register is not None else (0, 0)
    return (limits().pinned // page, *pins)


class _Ring:
    """An io_uring of the least size; a context manager."""

    def __init__(self):
        machine = platform.machine()
        if machine not in ARCHITECTURES:
            raise NotPossible(
                f"the io_uring system call numbers of {machine} are not known here",
                "run on x86_64 or aarch64",
            )
        self._syscall = ctypes.CDLL(None, use_errno=True).syscall
        self._syscall.restype = ctypes.c_long
        params = (ctypes.c_char * IO_URING_PARAMS_SIZE)()
        fd = self._syscall(
            ctypes.c_long(SYSCALLS["io_uring_setup"]), ctypes.c_uint(1), ctypes.byref(params)
        )
        if fd < 0:
            raise _refusal("io_uring_setup", ctypes.get_errno(), 0)
        self.fd = fd

    def register(self, opcode, argument, count):
        """Call io_uring_register; return 0 or the errno."""
        result = self._syscall(
            ctypes.c_long(SYSCALLS["io_uring_register"]), ctypes.c_int(self.fd),
            ctypes.c_uint(opcode), ctypes.c_char_p(argument), ctypes.c_uint(count),
        )
        return ctypes.get_errno() if result < 0 else 0

    def __enter__(self):
        return self

    def __exit__(self, *_):
        os.close(self.fd)       # drops what is still registered


def _refusal(what, number, length):
    """Return the error for an errno of io_uring, in words."""
    name = errno.errorcode.get(number, str(number))
    if number == errno.ENOMEM and length:
        verdict = fit(length, limits())
        if verdict.ok:
            return NotPossible(
                f"{what} failed ({name}): {verdict.reason}, so memory ran out, or other "
                "registrations of this user fill the limit (io_uring counts per user)",
                "register less, or raise ulimit -l",
            )
        return NotPossible(f"{what} failed ({name}): {verdict.reason}", verdict.remedy)
    if number == errno.ENOMEM:
        return NotPossible(f"{what} failed ({name}): no memory for a ring", "raise ulimit -l")
    if number == errno.ENOSYS:
        return NotPossible(f"{what} failed ({name}): this kernel has no io_uring",
                           "use Linux 5.1+ with CONFIG_IO_URING")
    if number in (errno.EPERM, errno.EACCES):
        return NotPossible(
            f"{what} failed ({name}): io_uring is forbidden; kernel.io_uring_disabled is "
            f"{_io_uring_disabled()}, or a seccomp filter (containers) blocks it",
            "as root: sysctl kernel.io_uring_disabled=0; in a container: a seccomp profile "
            "that allows io_uring",
        )
    words = {
        errno.EFAULT: "part of the buffer cannot be pinned: not mapped, not writable, or of "
                      "a kind that forbids long-term pins",
        errno.EINVAL: "the kernel does not know this registration",
        errno.EOPNOTSUPP: "the pages are on a file system that forbids long-term pins",
        errno.EBUSY: "buffers are already registered on this ring",
        errno.EOVERFLOW: "the buffer is too long",
        errno.EMFILE: "too many files are open: raise ulimit -n",
        errno.ENFILE: "too many files are open on this machine",
        errno.EINTR: "a signal came in between: try again",
    }
    text = words.get(number, os.strerror(number))
    return MMError(number, f"{what} of {format_size(length)} failed ({name}): {text}")


def _io_uring_disabled():
    try:
        with open("/proc/sys/kernel/io_uring_disabled") as file:
            return file.read().strip()
    except OSError:
        return "not in this kernel"
