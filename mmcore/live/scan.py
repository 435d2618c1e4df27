"""Two ioctls that ask the kernel for what is mapped instead of reading every word: PROCMAP_QUERY and PAGEMAP_SCAN.

PAGEMAP_SCAN (Linux 6.7) tells where pages are, so that the holes of a large mapping cost nothing, and which of them a
PMD or PUD entry maps, which no other file says page by page. PROCMAP_QUERY (Linux 6.11) finds the mapping of an address
without a line of text. On a kernel without them the callers read /proc/PID/pagemap and /proc/PID/maps.
"""

import ctypes
import errno
import fcntl
import re
from dataclasses import dataclass

import numpy as np

from .limits import open_proc, vanished

PAGEMAP_SCAN = 0xC0606610           # _IOWR('f', 16, struct pm_scan_arg)
PROCMAP_QUERY = 0xC0686611          # _IOWR('f', 17, struct procmap_query)

PAGE_IS_FILE, PAGE_IS_PRESENT, PAGE_IS_SWAPPED, PAGE_IS_PFNZERO, PAGE_IS_HUGE = (1 << bit for bit in range(2, 7))

VMA_READABLE, VMA_WRITABLE, VMA_EXECUTABLE, VMA_SHARED, COVERING_OR_NEXT = (1 << bit for bit in range(5))

REGIONS = 4096                      # regions a call: 96 KiB
REGION_DTYPE = np.dtype([("start", np.uint64), ("end", np.uint64), ("categories", np.uint64)])
MISSING = (errno.ENOTTY, errno.EINVAL, errno.EPERM, errno.EOPNOTSUPP)
_MAPS_LINE = re.compile(r"([0-9a-f]+)-([0-9a-f]+) (\S{4}) ([0-9a-f]+) (\S+) (\d+)\s*(.*)")


class ScanArg(ctypes.Structure):
    """struct pm_scan_arg."""

    _fields_ = [(name, ctypes.c_uint64) for name in (
        "size", "flags", "start", "end", "walk_end", "vec", "vec_len", "max_pages",
        "category_inverted", "category_mask", "category_anyof_mask", "return_mask")]


class QueryArg(ctypes.Structure):
    """struct procmap_query."""

    _fields_ = [(name, ctypes.c_uint64) for name in (
        "size", "query_flags", "query_addr", "vma_start", "vma_end", "vma_flags", "vma_page_size", "vma_offset",
        "inode")]
    _fields_ += [(name, ctypes.c_uint32) for name in ("dev_major", "dev_minor", "vma_name_size", "build_id_size")]
    _fields_ += [(name, ctypes.c_uint64) for name in ("vma_name_addr", "build_id_addr")]


@dataclass(frozen=True)
class Mapping:
    """One line of /proc/PID/maps."""

    start: int
    end: int
    perms: str
    offset: int
    dev: str
    inode: int
    path: str


def scan(file, start, end, all_of=0, any_of=0):
    """Return the regions of [start, end) whose pages are in these categories: REGION_DTYPE; None without the ioctl.

    file: /proc/PID/pagemap, opened. all_of, any_of: PAGE_IS_* bits.
    """
    found, arg = [], ScanArg(size=ctypes.sizeof(ScanArg))
    regions = np.zeros(REGIONS, REGION_DTYPE)
    while start < end:
        arg.start, arg.end, arg.vec, arg.vec_len = start, end, regions.ctypes.data, REGIONS
        arg.category_mask, arg.category_anyof_mask, arg.return_mask = all_of, any_of, all_of | any_of
        try:
            count = fcntl.ioctl(file, PAGEMAP_SCAN, arg)
        except OSError as error:
            if error.errno in MISSING:
                return None
            if error.errno == errno.ESRCH:      # the address space is gone
                break
            raise
        found.append(regions[:count].copy())
        if arg.walk_end <= start:
            break
        start = arg.walk_end
    return np.concatenate(found) if found else np.zeros(0, REGION_DTYPE)


def mappings(pid="self", start=0, end=1 << 64):
    """Return the Mappings of a process that overlap [start, end), in order, without their sizes.

    Raises ProcessLookupError if the process is gone, NotPossible if it may not be read.
    """
    with open_proc(pid, "maps") as file:
        try:
            # A few mappings are asked for one by one; all of them come faster as one text.
            if end - start < 1 << 32:
                found = query(file, start, end)
                if found is not None:
                    return found
            return [line for line in map(parse_line, file) if line.end > start and line.start < end]
        except ProcessLookupError:
            raise vanished(pid) from None


def query(file, start, end):
    """Return the Mappings of [start, end) by PROCMAP_QUERY; None on a kernel without it.

    file: /proc/PID/maps, opened.
    """
    found, name = [], ctypes.create_string_buffer(4096)
    arg = QueryArg(size=ctypes.sizeof(QueryArg), query_flags=COVERING_OR_NEXT)
    while start < end:
        arg.query_addr, arg.vma_name_addr, arg.vma_name_size, arg.build_id_size = start, ctypes.addressof(name), 4096, 0
        try:
            fcntl.ioctl(file, PROCMAP_QUERY, arg)
        except OSError as error:
            if error.errno == errno.ENOENT:     # no mapping from there on
                break
            if error.errno in MISSING or error.errno == errno.ENAMETOOLONG:
                return None
            raise
        if arg.vma_start >= end:
            break
        letters = ((VMA_READABLE, "r"), (VMA_WRITABLE, "w"), (VMA_EXECUTABLE, "x"))
        perms = "".join(letter if arg.vma_flags & bit else "-" for bit, letter in letters)
        found.append(Mapping(
            arg.vma_start, arg.vma_end, perms + ("s" if arg.vma_flags & VMA_SHARED else "p"), arg.vma_offset,
            f"{arg.dev_major:02x}:{arg.dev_minor:02x}", arg.inode,
            name.raw[:max(0, arg.vma_name_size - 1)].decode(errors="surrogateescape") if arg.vma_name_size else ""))
        start = arg.vma_end
    return found


def parse_line(line):
    """Return the Mapping of a line of maps, or of the first line of an entry of smaps; None if it is neither."""
    match = _MAPS_LINE.match(line)
    if not match:
        return None
    start, end, perms, offset, dev, inode, path = match.groups()
    return Mapping(int(start, 16), int(end, 16), perms, int(offset, 16), dev, int(inode), path.rstrip("\n"))
