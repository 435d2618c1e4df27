"""Real buffers with a chosen backing, made by mmap(2) and populated.

Python's default `mmap.mmap(-1, n)` is shared memory, which is not the memory that
malloc gives and which is never huge unless shmem THP is on. Everything here passes
its flags itself: MAP_PRIVATE|MAP_ANONYMOUS unless shared memory is what was asked for.

A Buffer *is* an mmap object, so `memoryview(buffer)`, `numpy.frombuffer(buffer)` and
slicing work on every Python version, exports are counted by the interpreter, and
`close()` refuses while a view is alive instead of leaving it dangling.
"""

import ctypes
import errno
import mmap
import os
import sys
import time

from mmcore.core.errors import MMError

from .errors import NotPossible
from .limits import available_memory
from .units import format_size, parse_size, round_up

BACKINGS = ("4k", "thp", "hugetlb", "shmem")

PROT_NONE = 0
MAP_NORESERVE = 0x4000
MAP_HUGETLB = 0x40000        # the same on x86, arm64, riscv and powerpc
MAP_HUGE_SHIFT = 26          # log2 of the huge page size sits above this bit
MADV_POPULATE_WRITE = 23     # Linux 5.14+: populates, and fails where a write would kill
MAX_PLACEMENT_TRIES = 64

_HUGEPAGES = "/sys/kernel/mm/hugepages"
_THP = "/sys/kernel/mm/transparent_hugepage"


class Buffer(mmap.mmap):
    """A populated anonymous mapping: `.addr`, `.length` (bytes), `.backing`, buffer protocol.

    `.view` is a new writable memoryview of bytes. Use as a context manager, or close().
    """

    backing = ""

    @property
    def addr(self) -> int:
        """Return the address of the first byte. Raises ValueError after close()."""
        return ctypes.addressof(ctypes.c_char.from_buffer(self))

    @property
    def length(self) -> int:
        """Return the size in bytes. Raises ValueError after close()."""
        return len(self)

    @property
    def view(self) -> memoryview:
        """Return a new writable memoryview of all bytes; release it before close()."""
        return memoryview(self)

    def populate(self, clock=time.perf_counter_ns):
        """Write every page, after asking the kernel to, which fails instead of killing us; returns the ns that it took.

        Raises MMError where memory, or the hugetlb limit of a cgroup, runs out.
        """
        start = clock()
        try:
            self.madvise(MADV_POPULATE_WRITE)
        except OSError as error:
            if error.errno != errno.EINVAL:     # EINVAL: before Linux 5.14
                raise MMError(
                    error.errno,
                    f"populating {format_size(self.length)} of {self.backing} failed: "
                    f"{error.strerror}; memory or the hugetlb limit of this cgroup ran out",
                ) from None
            for offset in range(0, len(self), mmap.PAGESIZE):
                self[offset] = 1
        taken = clock() - start
        # The written byte differs from 0: the kernel may split a THP of zeros to save memory.
        for offset in range(0, len(self), mmap.PAGESIZE):
            self[offset] = 1
        return taken

    def close(self):
        """Unmap the buffer; do nothing the second time.

        Raises BufferError while a memoryview or an array still looks at it.
        """
        try:
            super().close()
        except BufferError:
            raise BufferError(
                f"buffer of {format_size(len(self))} at {self.addr:#x} is still looked at by a "
                "memoryview or an array; release every view before closing it"
            ) from None

    def __exit__(self, kind, error, traceback):
        try:
            self.close()
        except BufferError:
            # The block's own error says more than a view that its traceback still holds;
            # the memory goes when that view goes.
            if kind is None:
                raise

    def __repr__(self):
        if self.closed:
            return f"<mmcore.live.Buffer backing={self.backing} closed>"
        return f"<mmcore.live.Buffer {self.addr:#x}+{self.length:#x} backing={self.backing}>"


def buffer(size, backing="4k", *, populate=True):
    """Make and populate a real buffer of this process; returns Buffer, a context manager.

    size is bytes as int or "256M", rounded up to a page; "thp" and "hugetlb" round up to a
    huge page and start on one's boundary, since less could not be huge.
    backing: "4k" (base pages, no THP), "thp" (advised), "hugetlb" (from the pool, which is
    never grown here), "shmem" (shared anonymous).
    What backs it really, `capture(buffer).backing()` tells: a THP may not be had.
    populate=False: not a page is there until it is touched, or until populate().

    Raises NotPossible off Linux, without hugetlb pages or without THP support, and
    MMError (ENOMEM) where the memory is not there.
    """
    if backing not in BACKINGS:
        raise ValueError(f"backing is one of {', '.join(BACKINGS)}, not {backing!r}")
    wanted = parse_size(size)
    if not sys.platform.startswith("linux"):
        raise NotPossible(
            f"a buffer with a chosen backing needs Linux, and this is {sys.platform}",
            "use the synthetic model (mmcore register --model)",
        )
    if backing == "hugetlb":
        made = _map_hugetlb(wanted)
    else:
        unit = thp_size() if backing == "thp" else mmap.PAGESIZE
        made = _map_small(round_up(wanted, unit), backing)
    made.backing = backing
    if populate:
        try:
            made.populate()
        except BaseException:
            made.close()
            raise
    return made


def _map_small(length, backing):
    room = available_memory()
    if room is not None and length > room:
        # Without this check the out-of-memory killer would answer, and not only to us.
        raise MMError(
            errno.ENOMEM,
            f"a populated buffer of {format_size(length)} does not fit: "
            f"{format_size(room)} of memory is available; ask for less",
        )
    if backing == "shmem":
        return _mmap(length, mmap.MAP_SHARED | mmap.MAP_ANONYMOUS)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    if backing == "4k":
        made = _mmap(length, flags)
        try:
            made.madvise(mmap.MADV_NOHUGEPAGE)
        except OSError as error:
            # EINVAL: a kernel without THP, where every page is a base page anyway.
            if error.errno != errno.EINVAL:
                made.close()
                raise
        return made
    made = _mmap_aligned(length, flags, thp_size())
    try:
        made.madvise(mmap.MADV_HUGEPAGE)
    except OSError as error:
        made.close()
        raise NotPossible(
            f"madvise(MADV_HUGEPAGE) failed: {error.strerror}; this kernel has no THP",
            "use --backing 4k or hugetlb, or a kernel with CONFIG_TRANSPARENT_HUGEPAGE",
        ) from None
    return made


def _mmap(length, flags):
    try:
        return Buffer(-1, length, flags=flags, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    except OSError as error:
        raise MMError(
            error.errno,
            f"mmap of {format_size(length)} failed: {error.strerror}; check ulimit -v and "
            "vm.overcommit_memory",
        ) from None


def _mmap_aligned(length, flags, align):
    """Map at a multiple of align, which mmap(2) does by itself only since Linux 6.7.

    Elsewhere: make a hole that fits exactly where it should go, and map until the hole is
    taken. Each mapping that lands elsewhere is kept meanwhile, so that its gap is full.
    """
    made = _mmap(length, flags)
    if made.addr % align == 0:
        return made
    made.close()
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t] + [ctypes.c_int] * 3 + [ctypes.c_long]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    around = libc.mmap(
        None, length + align, PROT_NONE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE, -1, 0
    )
    if around == ctypes.c_void_p(-1).value:
        number = ctypes.get_errno()
        raise MMError(number, f"no room for {format_size(length + align)} of address space")
    start = round_up(around, align)
    end, around_end = start + length, around + length + align
    libc.munmap(start, length)
    missed = []
    try:
        for _ in range(MAX_PLACEMENT_TRIES):
            made = _mmap(length, flags)
            if made.addr % align == 0:
                return made
            missed.append(made)
    finally:
        for other in missed:
            other.close()
        if start > around:
            libc.munmap(around, start - around)
        if around_end > end:
            libc.munmap(end, around_end - end)
    raise MMError(
        errno.ENOMEM,
        f"no place of {format_size(length)} aligned to {format_size(align)} in "
        f"{MAX_PLACEMENT_TRIES} tries; another thread may be mapping memory: try again",
    )


def _map_hugetlb(wanted):
    size = hugetlb_size()
    if size is None:
        raise NotPossible(
            "this kernel has no hugetlb pages (no entry in /sys/kernel/mm/hugepages)",
            "use --backing thp, or a kernel with CONFIG_HUGETLBFS",
        )
    length = round_up(wanted, size)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_HUGETLB
    flags |= (size.bit_length() - 1) << MAP_HUGE_SHIFT
    try:
        return Buffer(-1, length, flags=flags, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    except OSError as error:
        # mmap reserves the pages, so that it and not a SIGBUS later says that they lack.
        if error.errno != errno.ENOMEM:
            raise
    pool = hugetlb_pool(size)
    needed = length // size
    raise NotPossible(
        f"hugetlb: {needed} pages of {format_size(size)} needed, {pool['available']} available "
        f"(pool {pool['total']}, free {pool['free']}, reserved {pool['reserved']})",
        f"grow the pool as root: echo {pool['total'] + needed - pool['available']} > "
        f"{_pool_dir(size)}/nr_hugepages, and set it back to {pool['total']} afterwards",
    )


def thp_size():
    """Return the size of a PMD-mapped transparent huge page in bytes (2 MiB on x86)."""
    try:
        with open(f"{_THP}/hpage_pmd_size") as file:
            return int(file.read())
    except (OSError, ValueError):
        return 2 << 20


def thp_enabled(which="enabled"):
    """Return the chosen word of a THP switch: "always", "madvise", ...; "" if there is none."""
    try:
        with open(f"{_THP}/{which}") as file:
            text = file.read()
    except OSError:
        return ""
    return text[text.find("[") + 1:text.find("]")]


def hugetlb_size():
    """Return the hugetlb page size used here: 2 MiB where it exists, else the smallest."""
    try:
        names = os.listdir(_HUGEPAGES)
    except OSError:
        return None
    sizes = sorted(int(name[len("hugepages-"):-len("kB")]) << 10 for name in names)
    if not sizes:
        return None
    return 2 << 20 if 2 << 20 in sizes else sizes[0]


def hugetlb_pool(size):
    """Return the pool of one huge page size in pages: total, free, reserved, available."""
    counts = {}
    for key, name in (("total", "nr"), ("free", "free"), ("reserved", "resv")):
        with open(f"{_pool_dir(size)}/{name}_hugepages") as file:
            counts[key] = int(file.read())
    counts["available"] = max(0, counts["free"] - counts["reserved"])
    return counts


def _pool_dir(size):
    return f"{_HUGEPAGES}/hugepages-{size >> 10}kB"
