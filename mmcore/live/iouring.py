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
from .replay import FRAME_MULTIPLE, SPARE
from .units import format_size, round_up
from .vmstat import foll_pins

# Numbers of the generic table, which every architecture since 2019 shares; alpha and mips differ.
SYSCALLS = {"io_uring_setup": 425, "io_uring_register": 427}
ARCHITECTURES = ("x86_64", "aarch64", "riscv64", "ppc64le", "s390x", "loongarch64")
IORING_REGISTER_BUFFERS = 0
IORING_UNREGISTER_BUFFERS = 1
IO_URING_PARAMS_SIZE = 120
MAX_IOVEC = 1 << 30              # bytes: the kernel refuses more in one buffer
MAX_IOVECS = 16384
MAX_PAGE_ORDER = 10             # of the buddy allocator


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
    register_ns: "list[int]" = field(default_factory=list)
    unregister_ns: "list[int]" = field(default_factory=list)
    vmpin_at_register: "list | None" = field(default_factory=list)
    vmpin_at_unregister: "list | None" = field(default_factory=list)
    # [(acquired, released)] a round, machine-wide; None and a reason where not readable
    at_register: "list | None" = field(default_factory=list)
    at_unregister: "list | None" = field(default_factory=list)
    no_counts: str = ""


def predict_iouring_pins(pfns, heads, orders, max_pages=None):
    """Return the Prediction for registering these pages as one buffer, cut every max_pages.

    Arrays of one entry a page, in buffer order: PFN, PFN of its folio's head, folio order.
    The engine lays out these folios and registers them with a BufferTable; what it counts is
    the prediction. Raises ValueError for a page that is not present.
    """
    if not (len(pfns) == len(heads) == len(orders)):
        raise ValueError(f"arrays differ: {len(pfns)} pfns, {len(heads)} heads, {len(orders)} orders")
    if np.any(pfns == 0):
        at = int(np.flatnonzero(pfns == 0)[0])
        raise ValueError(f"page {at} is not present: registering would fault it in first")
    if not len(pfns):
        return Prediction()
    import mmcore

    folios, first = np.unique(heads, return_index=True)
    orders = orders[first]
    top = int(np.max(folios + (np.uint64(1) << orders.astype(np.uint64))))
    page = os.sysconf("SC_PAGE_SIZE")
    with mmcore.Memory(round_up(top * page, FRAME_MULTIPLE) + SPARE, page_size=page) as mem:
        # Folios beyond the allocator's largest can only be hugetlb.
        mmcore.folios_alloc_at(mem, folios, orders, hugetlb=orders > MAX_PAGE_ORDER)
        pages = mmcore.PageList(mem, pfns)
        step = max_pages or len(pages)
        return predict_registration(mem, [pages[at:at + step] for at in range(0, len(pages), step)])


def predict_registration(mem, buffers):
    """Return the Prediction for registering buffers on a fresh ring, from doing it in the engine.

    buffers: what BufferTable.register() takes of pages that are known: PageLists of mem, or
    (PageList, offset in the first page, length). Nothing stays registered.
    """
    import mmcore

    def counts():
        stat = mem.vmstat()
        return stat["nr_foll_pin_acquired"], stat["nr_foll_pin_released"]

    mm = mmcore.MM(mem)
    table = mmcore.BufferTable(mm)
    before = counts()
    table.register(buffers)
    between = counts()
    made, charge = table.buffers, table.charged
    result = Prediction(
        acquired=between[0] - before[0], released_at_register=between[1] - before[1], charge=charge,
        bvecs=sum(buf.nr_bvecs for buf in made), coalesced=sum(buf.coalesced for buf in made),
        iovecs=len(made))
    table.unregister()
    result.released_at_unregister = counts()[1] - between[1]
    mm.exit()
    return result


def kernel_register(buffer, rounds=1, *, iovecs=None, clock=time.perf_counter_ns):
    """Register and unregister a buffer of this process with io_uring; return KernelRegister.

    buffer has .addr and .length (bytes). More than 1 GiB goes as several iovecs in one call;
    iovecs, a list of (address, length), says how to cut it, or which parts to take.
    The pin counters are machine-wide: pins of others in the meantime show in them. clock: wall time;
    time.thread_time_ns does not count what others run meanwhile.

    Raises NotPossible where io_uring is missing or forbidden, or RLIMIT_MEMLOCK refuses.
    """
    require_proc()
    if rounds < 1:
        raise ValueError(f"rounds must be at least 1, not {rounds}")
    addr, length = buffer.addr, buffer.length
    if iovecs is None:
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
        _settle()
        for _ in range(rounds):
            _one_round(ring, packed, len(iovecs), result, length, page, clock)
    return result


def _settle(pause=0.002, most=50):
    """Wait until VmPin stands still: the kernel takes the pages of a ring that was closed off it some time later."""
    last = limits().pinned
    for _ in range(most):
        time.sleep(pause)
        now = limits().pinned
        if now == last:
            return
        last = now


def _one_round(ring, packed, count, result, length, page, clock):
    before = _counts(result, page)
    start = clock()
    failed = ring.register(IORING_REGISTER_BUFFERS, packed, count)
    result.register_ns.append(clock() - start)
    if failed:
        raise _refusal("registering the buffer", failed, length)
    between = _counts(result, page)
    start = clock()
    failed = ring.register(IORING_UNREGISTER_BUFFERS, None, 0)
    result.unregister_ns.append(clock() - start)
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
