"""A snapshot of the pages behind a buffer of this or another process, kept as arrays."""

import errno
import json
import mmap
import os
import platform
import zipfile
import zlib
from dataclasses import asdict

import numpy as np

from mmcore.core.errors import MMError

from .backing import describe
from .errors import NotPossible
from .limits import Limits, limits, require_proc, vanished
from .pagemap import KPF_NOPAGE, KPageFile, folio_extents, has_flag, pfns_of, read_pagemap
from .units import format_size
from .vma import Vma, vmas, why_not_huge

FORMAT = "mmcore-capture"
VERSION = 1
ARRAYS = {
    "starts": np.uint64, "counts": np.uint64, "words": np.uint64, "flags": np.uint64,
    "mapcounts": np.uint64, "heads": np.uint64, "orders": np.uint8,
}
TRIES = 4
MAX_PAGES = 1 << 27          # 512 GiB of 4 KiB pages: 4 GiB of arrays


class Capture:
    """The pages of one or more address ranges of a process at one moment.

    `.pfns` (uint64, 0: not present), `.flags` (kpageflags words), `.mapcounts`
    (kpagecount words: how often a page is mapped, which is not its reference count),
    `.heads`, `.orders` (the folio of each page), `.words` (pagemap) are arrays of one
    entry a page, in address order. `.vmas` are the mappings looked at, `.limits` the
    process's memlock limits, `.moved` the pages that changed while they were read.
    """

    def __init__(self, info, arrays):
        self.pid = info["pid"]
        self.command = info["command"]
        self.kernel = info["kernel"]
        self.page_size = info["page_size"]
        self.moved = info["moved"]
        self.limits = Limits(**info["limits"])
        self.vmas = [Vma(**{**v, "flags": tuple(v["flags"])}) for v in info["vmas"]]
        self.not_huge = [tuple(row) for row in info["not_huge"]]
        for name in ARRAYS:
            array = arrays[name]
            array.flags.writeable = False
            setattr(self, name, array)
        self.pfns = pfns_of(self.words)
        self.pfns.flags.writeable = False

    @property
    def addr(self):
        """Return the address of the first page."""
        return int(self.starts[0])

    @property
    def length(self):
        """Return the captured size in bytes."""
        return len(self.words) * self.page_size

    @property
    def addresses(self):
        """Return the address of each page as uint64."""
        size = np.uint64(self.page_size)
        return np.concatenate([
            start + np.arange(int(count), dtype=np.uint64) * size
            for start, count in zip(self.starts, self.counts)
        ])

    def backing(self):
        """Tell what backs the pages: Backing, by folio size, kind and physical run."""
        return describe(
            self.pfns, self.heads, self.orders, self.flags, self.page_size, self.not_huge
        )

    def replay(self):
        """Build an engine with the same frames and folios: Replay(.mem .pages .mm).

        Raises MMError where the engine cannot hold the layout.
        """
        from .replay import replay

        return replay(self)

    def save(self, path):
        """Write the capture to a file; it appears whole or not at all. Raises OSError."""
        info = {
            "format": FORMAT, "version": VERSION, "pid": self.pid, "command": self.command,
            "kernel": self.kernel, "page_size": self.page_size, "moved": self.moved,
            "limits": asdict(self.limits), "vmas": [asdict(v) for v in self.vmas],
            "not_huge": self.not_huge,
        }
        arrays = {name: getattr(self, name) for name in ARRAYS}
        arrays["info"] = np.frombuffer(json.dumps(info).encode(), np.uint8)
        part = f"{os.fspath(path)}.part{os.getpid()}"
        try:
            with open(part, "wb") as file:
                np.savez_compressed(file, **arrays)
            os.replace(part, path)
        finally:
            if os.path.exists(part):
                os.unlink(part)

    @classmethod
    def load(cls, path):
        """Read a capture file; works on any machine.

        Raises FileNotFoundError, or ValueError saying what is wrong with the file.
        """
        try:
            with open(path, "rb") as file, np.load(file, allow_pickle=False) as data:
                info = json.loads(bytes(data["info"]))
                if info["format"] != FORMAT:
                    raise KeyError("info")
                if info["version"] != VERSION:
                    raise ValueError(
                        f"{path}: capture version {info['version']}, this mmcore reads {VERSION}; "
                        "use the mmcore that wrote it"
                    )
                arrays = {name: data[name] for name in ARRAYS}
                _check_arrays(path, info, arrays)
                return cls(info, arrays)
        except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, KeyError, TypeError, AttributeError,
                json.JSONDecodeError, UnicodeDecodeError) as error:
            raise ValueError(
                f"{path}: not a whole mmcore capture ({type(error).__name__}); it is truncated, "
                "damaged or another kind of file: capture again"
            ) from None
        except ValueError as error:
            if str(error).startswith(str(path)):
                raise
            raise ValueError(
                f"{path}: not a mmcore capture (no .npz file); capture again"
            ) from None

    def __repr__(self):
        return (
            f"<Capture pid {self.pid} {self.addr:#x}+{self.length:#x}: "
            f"{int(np.count_nonzero(self.pfns))} of {len(self.pfns)} pages present>"
        )


def _check_arrays(path, info, arrays):
    for name, kind in ARRAYS.items():
        if arrays[name].dtype != kind or arrays[name].ndim != 1:
            raise ValueError(f"{path}: damaged capture: array {name} is {arrays[name].dtype}")
    npages = len(arrays["words"])
    lengths = {len(arrays[n]) for n in ("words", "flags", "mapcounts", "heads", "orders")}
    if lengths != {npages} or int(arrays["counts"].sum()) != npages or not npages:
        raise ValueError(f"{path}: damaged capture: its arrays disagree in length")
    if info["page_size"] <= 0 or info["page_size"] & (info["page_size"] - 1):
        raise ValueError(f"{path}: damaged capture: page size {info['page_size']}")


def capture(target="self", addr=None, length=None):
    """Snapshot the pages of a buffer, of [addr, addr + length) of a process, or of all of it.

    target: "self", a PID, or a buffer object with .addr and .length. The range is widened
    to whole pages. Without addr every mapping that can hold pages is taken.

    Raises NotPossible off Linux or without CAP_SYS_ADMIN (PFNs are hidden),
    ProcessLookupError if the process is gone, MMError (EFAULT) where nothing is mapped.
    A process that runs on may change what is read: it is read again until two reads
    agree, and after that `.moved` counts the pages that still differ.
    """
    require_proc()
    pid, addr, length = _resolve(target, addr, length)
    page_size = mmap.PAGESIZE
    if addr is None:
        found = [v for v in vmas(pid) if v.perms[:3] != "---" and v.path != "[vsyscall]"]
        ranges = [(v.start, (v.end - v.start) // page_size) for v in found]
        if not ranges:
            raise NotPossible(
                f"process {pid} has no address space (a kernel thread or a zombie)",
                "give the PID of a user process",
            )
    else:
        start = addr // page_size * page_size
        stop = -(-(addr + length) // page_size) * page_size
        found = vmas(pid, start, stop)
        if not found:
            raise MMError(
                errno.EFAULT,
                f"process {pid} maps nothing at {addr:#x}+{length:#x}; see /proc/{pid}/maps",
                addr=addr,
            )
        ranges = [(start, (stop - start) // page_size)]
    npages = sum(count for _, count in ranges)
    if npages > MAX_PAGES:
        raise ValueError(
            f"{format_size(npages * page_size)} of address space is too much for one capture; "
            "give addr and length"
        )
    words, frames, moved = _settled(pid, ranges, page_size)
    try:
        with open(f"/proc/{pid}/comm") as file:
            command = file.read().strip()
    except (FileNotFoundError, ProcessLookupError):
        raise vanished(pid) from None
    have = limits(pid)
    info = {
        "pid": have.pid, "command": command, "kernel": platform.release(),
        "page_size": page_size, "moved": moved, "limits": asdict(have),
        "vmas": [asdict(v) for v in found],
        "not_huge": [(v.start, v.end, why) for v in found for why in [why_not_huge(v)] if why],
    }
    starts, counts = (np.array(column, np.uint64) for column in zip(*ranges))
    return Capture(info, {"starts": starts, "counts": counts, "words": words, **frames})


def _resolve(target, addr, length):
    """Return (pid, addr, length) as ints, or "self" and None."""
    if hasattr(target, "addr") and hasattr(target, "length"):
        if addr is not None or length is not None:
            raise TypeError("a buffer object brings its own addr and length")
        return "self", target.addr, target.length
    if target != "self":
        if isinstance(target, bool) or not isinstance(target, int):
            raise TypeError(f'target is "self", a PID or a buffer, not {target!r}')
        if target <= 0:
            raise ValueError(f"a PID is above 0, not {target}")
    if addr is None and length is None:
        return target, None, None
    if addr is None or length is None:
        raise TypeError("addr and length go together")
    if addr < 0 or length <= 0 or addr + length > 1 << 64:
        raise ValueError(f"not a range of addresses: {addr:#x}+{length:#x}")
    return target, addr, length


def _settled(pid, ranges, page_size):
    """Read pagemap, then the frames, then pagemap again, until both reads agree.

    Returns (words, {flags, mapcounts, heads, orders}, pages that moved).
    """
    failure = None
    before = _words(pid, ranges, page_size)
    for _ in range(TRIES):
        pfns = pfns_of(before)
        try:
            frames = _frames(pfns)
        except ValueError as error:          # a folio was split or freed under our eyes
            failure, moved = error, None
        else:
            failure = None
        after = _words(pid, ranges, page_size)
        moved = int(np.count_nonzero(pfns != pfns_of(after)))
        if not failure and not moved:
            break
        words, before = before, after
    else:
        if failure:
            raise RuntimeError(
                f"the folios of process {pid} changed in each of {TRIES} reads ({failure}); "
                f"stop it while it is read: kill -STOP {pid}"
            )
        return words, frames, moved
    return before, frames, 0


def _words(pid, ranges, page_size):
    return np.concatenate([read_pagemap(pid, start, n, page_size) for start, n in ranges])


def _frames(pfns):
    with KPageFile("kpageflags") as file:
        flags = file.gather(pfns)
        # Frames without a struct page (device memory) belong to no folio.
        heads, orders = folio_extents(
            np.where(has_flag(flags, KPF_NOPAGE), np.uint64(0), pfns), flags, file.span
        )
    with KPageFile("kpagecount") as file:
        mapcounts = file.gather(pfns)
    return {"flags": flags, "mapcounts": mapcounts, "heads": heads, "orders": orders}
