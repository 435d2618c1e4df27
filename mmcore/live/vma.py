"""The mappings of a process, from /proc/PID/smaps, and why one of them is not huge."""

import re
from dataclasses import dataclass

from .buffer import thp_enabled, thp_size
from .limits import open_proc, vanished

_HEADER = re.compile(r"([0-9a-f]+)-([0-9a-f]+) (\S{4}) ([0-9a-f]+) (\S+) (\d+)\s*(.*)")


@dataclass(frozen=True)
class Vma:
    """One mapping: addresses, permissions, file, and what smaps says of huge pages."""

    start: int
    end: int
    perms: str
    offset: int = 0
    dev: str = "00:00"
    inode: int = 0
    path: str = ""
    kernel_page_size: int = 4096     # of the VMA, bytes: hugetlb shows here
    rss: int = 0                     # bytes
    huge: int = 0                    # bytes mapped by PMD: anon, shmem and file
    flags: tuple = ()                # VmFlags, two letters each

    @property
    def hugetlb(self):
        """Return whether hugetlb pages back the mapping."""
        return "ht" in self.flags


def vmas(pid="self", start=0, end=1 << 64):
    """Return the Vmas of a process that overlap [start, end), in order.

    Raises ProcessLookupError if the process is gone, NotPossible if it may not be read.
    """
    found = []
    current = None
    with open_proc(pid, "smaps") as file:
        try:
            for line in file:
                header = _HEADER.match(line)
                if header:
                    if current:
                        found.append(current)
                        current = None
                    first, last, perms, offset, dev, inode, path = header.groups()
                    # The kernel makes smaps as it is read: stop after the last one wanted.
                    if int(first, 16) >= end:
                        break
                    if int(last, 16) > start:
                        current = {
                            "start": int(first, 16), "end": int(last, 16), "perms": perms,
                            "offset": int(offset, 16), "dev": dev, "inode": int(inode),
                            "path": path.strip(),
                        }
                elif current:
                    _field(current, line)
        except ProcessLookupError:
            raise vanished(pid) from None
    if current:
        found.append(current)
    return [Vma(**fields) for fields in found]


def _field(fields, line):
    key, _, value = line.partition(":")
    if key == "VmFlags":
        fields["flags"] = tuple(value.split())
    elif key == "KernelPageSize":
        fields["kernel_page_size"] = int(value.split()[0]) << 10
    elif key == "Rss":
        fields["rss"] = int(value.split()[0]) << 10
    elif key in ("AnonHugePages", "ShmemPmdMapped", "FilePmdMapped"):
        fields["huge"] = fields.get("huge", 0) + (int(value.split()[0]) << 10)


def why_not_huge(vma):
    """Return in words why a mapping has no PMD-sized THP, or "" if it is huge throughout.

    The first rule that forbids it is the answer; when none does, memory was short of huge
    pages at the fault or the folio was split later, which no file tells apart.
    """
    size = thp_size()
    if vma.hugetlb or vma.huge >= (vma.end - vma.start) // size * size > 0:
        return ""
    first = -(-vma.start // size) * size
    if first + size > vma.end:
        return f"no aligned range of {size >> 20} MiB in the mapping"
    if "nh" in vma.flags:
        return "madvise(MADV_NOHUGEPAGE)"
    shared_memory = vma.path.startswith(("/dev/zero", "/memfd:", "/dev/shm", "/SYSV"))
    switch = "shmem_enabled" if shared_memory else "enabled"
    chosen = thp_enabled(switch)
    advised = "hg" in vma.flags
    if vma.inode and not shared_memory:
        return "file pages: their folios are the file system's choice"
    if chosen in ("", "never", "deny"):
        return f"transparent_hugepage/{switch} is {chosen or 'not in this kernel'}"
    if chosen in ("madvise", "advise") and not advised:
        return f"transparent_hugepage/{switch} is {chosen} and the mapping is not advised"
    if vma.rss < vma.end - vma.start and not vma.rss:
        return "not populated"
    return "no huge page was free when it was touched, or the folio was split since"
