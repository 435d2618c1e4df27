"""What the tests that ask the kernel share: real memory of every kind, and counters that others on the machine move
too."""

import contextlib
import ctypes
import mmap
import os
import sys

import pytest
from live_support import PAGE, or_skip, scratch_file

from mmcore import live
from mmcore.live.buffer import hugetlb_pool, hugetlb_size

HUGE = 2 << 20
PROT_NONE, RW = 0, mmap.PROT_READ | mmap.PROT_WRITE
PRIVATE, SHARED, ANON, FIXED, NORESERVE, HUGETLB = 2, 1, 0x20, 0x10, 0x4000, 0x40000
MREMAP_MAYMOVE, MREMAP_FIXED = 1, 2
MADV_DONTNEED, MADV_DONTFORK, MADV_HUGEPAGE, MADV_NOHUGEPAGE, MADV_POPULATE_WRITE = 4, 10, 14, 15, 23
THP = "/sys/kernel/mm/transparent_hugepage"
FAILED = ctypes.c_void_p(-1).value

libc = ctypes.CDLL(None, use_errno=True)
if sys.platform.startswith("linux"):
    libc.mmap.restype = libc.mremap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t] + [ctypes.c_int] * 3 + [ctypes.c_long]
    libc.mremap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    libc.mprotect.argtypes = libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


def checked(result, what):
    """Return the result of a system call; raises OSError where it failed."""
    if result in (-1, FAILED):
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result


class Area:
    """Real memory by address: a reserved stretch, in which mappings are made, moved and cut."""

    def __init__(self, length, align=HUGE):
        self.room = length + 2 * align
        self.base = checked(libc.mmap(None, self.room, PROT_NONE, PRIVATE | ANON | NORESERVE, -1, 0), "mmap")
        self.addr = -(-self.base // align) * align

    def map(self, length, flags=PRIVATE | ANON, fd=-1, offset=0, prot=RW, at=0):
        """Map at `at` bytes from the aligned start; returns the address."""
        return checked(libc.mmap(self.addr + at, length, prot, flags | FIXED, fd, offset), "mmap")

    def close(self):
        """Unmap all."""
        libc.munmap(self.base, self.room)


def advise(addr, length, advice):
    """Call madvise(2)."""
    return checked(libc.madvise(addr, length, advice), "madvise")


def write(addr, length, value=1, step=PAGE):
    """Write a byte into each page."""
    for at in range(addr, addr + length, step):
        ctypes.memset(at, value, 1)


def read(addr, length, step=PAGE):
    """Read a byte of each page."""
    return [ctypes.string_at(at, 1) for at in range(addr, addr + length, step)]


@contextlib.contextmanager
def child_that_waits():
    """Fork a child that does nothing until the block ends; gives its PID."""
    mine, theirs = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(theirs)
        os.read(mine, 1)
        os._exit(0)
    os.close(mine)
    try:
        yield pid
    finally:
        os.close(theirs)
        os.waitpid(pid, 0)


def need_hugetlb(change, pages):
    """See that so many hugetlb pages can be had; the pool is grown where tests may, else the test is skipped."""
    size = hugetlb_size()
    if size is None:
        pytest.skip("this kernel has no hugetlb pages")
    if hugetlb_pool(size)["available"] < pages:
        total = hugetlb_pool(size)["total"]
        change(f"/sys/kernel/mm/hugepages/hugepages-{size >> 10}kB/nr_hugepages", total + pages)
        if hugetlb_pool(size)["available"] < pages:
            pytest.skip(f"memory is too fragmented for {pages} hugetlb pages")


def need_switch(change, path, word):
    """See that a THP switch is set to a word; it is changed where tests may, else the test is skipped."""
    if not os.path.exists(path):
        pytest.skip(f"this kernel has no {path}")
    with open(path) as file:
        if f"[{word}]" not in file.read():
            change(path, word)


# ---- memory of every kind: each takes (Area, the change_system fixture or a stand-in, a folder); gives what it made
# -----------
def base_pages(area, *_):
    addr = area.map(64 * PAGE)
    advise(addr, 64 * PAGE, MADV_NOHUGEPAGE)
    write(addr, 64 * PAGE)
    return addr, 64 * PAGE


def mthp_64k(area, change, _):
    need_switch(change, f"{THP}/hugepages-64kB/enabled", "madvise")
    length = HUGE // 2  # too short for a PMD
    addr = area.map(length)
    advise(addr, length, MADV_HUGEPAGE)
    write(addr, length)
    return addr, length


def thp(area, *_):
    addr = area.map(2 * HUGE)
    advise(addr, 2 * HUGE, MADV_HUGEPAGE)
    write(addr, 2 * HUGE)
    return addr, 2 * HUGE


def hugetlb(area, change, _, flags=PRIVATE):
    need_hugetlb(change, 2)
    addr = area.map(2 * HUGE, flags | ANON | HUGETLB)
    write(addr, 2 * HUGE)
    return addr, 2 * HUGE


def hugetlb_shared(area, change, folder):
    return hugetlb(area, change, folder, SHARED)


def shmem(area, *_):
    addr = area.map(64 * PAGE, SHARED | ANON)
    write(addr, 64 * PAGE)
    return addr, 64 * PAGE


def shmem_thp(area, change, _):
    need_switch(change, f"{THP}/shmem_enabled", "advise")
    addr = area.map(2 * HUGE, SHARED | ANON)
    advise(addr, 2 * HUGE, MADV_HUGEPAGE)
    write(addr, 2 * HUGE)
    return addr, 2 * HUGE


def memfd(area, *_):
    fd = os.memfd_create("oracle")
    os.ftruncate(fd, 64 * PAGE)
    addr = area.map(32 * PAGE, SHARED, fd, 16 * PAGE)
    write(addr, 32 * PAGE)
    os.close(fd)
    return addr, 32 * PAGE


def memfd_twice(area, *_):
    """The same pages at two addresses."""
    fd = os.memfd_create("oracle")
    os.ftruncate(fd, 16 * PAGE)
    addr = area.map(16 * PAGE, SHARED, fd)
    area.map(16 * PAGE, SHARED, fd, at=16 * PAGE)
    write(addr, 32 * PAGE)
    os.close(fd)
    return addr, 32 * PAGE


def file_private_read(area, _, folder):
    fd = scratch_file(folder, 16 * PAGE)
    addr = area.map(16 * PAGE, PRIVATE, fd)
    os.close(fd)
    read(addr, 16 * PAGE)
    return addr, 16 * PAGE


def file_private_written(area, change, folder):
    addr, length = file_private_read(area, change, folder)
    write(addr, length // 2)
    return addr, length


def file_shared(area, _, folder):
    fd = scratch_file(folder, 16 * PAGE)
    addr = area.map(16 * PAGE, SHARED, fd)
    os.close(fd)
    write(addr, 16 * PAGE)
    return addr, 16 * PAGE


def zero_pages(area, *_):
    addr = area.map(16 * PAGE)
    advise(addr, 16 * PAGE, MADV_NOHUGEPAGE)
    read(addr, 16 * PAGE)
    write(addr + 8 * PAGE, 4 * PAGE)
    return addr, 16 * PAGE


def huge_zero_page(area, *_):
    addr = area.map(2 * HUGE)
    advise(addr, 2 * HUGE, MADV_HUGEPAGE)
    read(addr, 2 * HUGE)
    return addr, 2 * HUGE


def moved(area, *_):
    """mremap(2), by pages."""
    addr, length = base_pages(area)
    to = area.addr + HUGE + 3 * PAGE
    return checked(libc.mremap(addr, length, length, MREMAP_MAYMOVE | MREMAP_FIXED, to), "mremap"), length


def thp_moved_askew(area, *_):
    """A huge page moved to where it cannot be mapped by a PMD."""
    addr, length = thp(area)
    to = area.addr + 3 * HUGE + 5 * PAGE
    return checked(libc.mremap(addr, length, length, MREMAP_MAYMOVE | MREMAP_FIXED, to), "mremap"), length


def cut(area, *_):
    addr, length = base_pages(area)
    checked(libc.munmap(addr + 8 * PAGE, 16 * PAGE), "munmap")
    return addr + 24 * PAGE, length - 24 * PAGE


def thp_cut(area, *_):
    """A huge page of which the middle is unmapped."""
    addr, length = thp(area)
    checked(libc.munmap(addr, HUGE - 7 * PAGE), "munmap")
    return addr + HUGE - 7 * PAGE, length - HUGE + 7 * PAGE


def thp_with_holes(area, *_):
    addr, length = thp(area)
    advise(addr + 9 * PAGE, PAGE, MADV_DONTNEED)
    return addr, length


LAYOUTS = {
    "4 KiB": base_pages,
    "mTHP 64K": mthp_64k,
    "THP": thp,
    "hugetlb": hugetlb,
    "hugetlb shared": hugetlb_shared,
    "shmem": shmem,
    "shmem THP": shmem_thp,
    "memfd": memfd,
    "memfd twice": memfd_twice,
    "file private, read": file_private_read,
    "file private, written": file_private_written,
    "file shared": file_shared,
    "zero page after a read": zero_pages,
    "huge zero page": huge_zero_page,
    "after mremap": moved,
    "THP after mremap askew": thp_moved_askew,
    "after munmap": cut,
    "THP after munmap": thp_cut,
    "THP with a hole": thp_with_holes,
}
#: What large folios a layout is about: without them the test would say nothing.
WANTED_ORDER = {
    "mTHP 64K": 4,
    "THP": 9,
    "hugetlb": 9,
    "hugetlb shared": 9,
    "shmem THP": 9,
    "huge zero page": 9,
    "THP after mremap askew": 9,
    "THP after munmap": 9,
    "THP with a hole": 9,
}


@contextlib.contextmanager
def layout(name, request, folder):
    """Give (address, length) of real memory of one kind."""
    area = Area(6 * HUGE)

    def change(path, value):
        request.getfixturevalue("change_system")(path, value)

    try:
        addr, length = LAYOUTS[name](area, change, folder)
        snapshot = or_skip(live.capture, "self", addr, length)
        wanted = WANTED_ORDER.get(name)
        if wanted is not None and wanted not in snapshot.orders:
            pytest.skip(f"this machine gave no folio of order {wanted}")
        yield addr, length
    finally:
        area.close()


# ---- counters
# ---------------------------------------------------------------------------------------------------------
def pins_of(action, expected, tries=30):
    """Return (acquired, released) pages that an action counts, machine-wide.

    What others do meanwhile only adds: the expected pair, seen once, is believed; else the least that was seen.
    """
    least = None
    for _ in range(tries):
        before = or_skip(live.foll_pins)
        action()
        after = live.foll_pins()
        got = after[0] - before[0], after[1] - before[1]
        if got == tuple(expected):
            return got
        least = got if least is None else min(least, got)
    return least
