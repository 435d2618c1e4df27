"""A snapshot of the pages behind a buffer of this or another process, and of the machine around it, as arrays."""

import errno
import mmap
import time
from dataclasses import asdict, replace
from typing import TYPE_CHECKING

import numpy as np

from mmcore.core.errors import MMError

from . import capturefile
from .backing import Backing, describe
from .capturefile import MAX_PAGES, PAGES
from .errors import NotPossible
from .frames import Frames, read_frames
from .limits import Limits, limits, memory_lines, open_proc, require_proc, rlimits, status
from .machine import Machine, machine
from .pagemap import pfns_of
from .scan import PAGE_IS_PRESENT, PAGE_IS_SWAPPED, scan
from .settle import holds_pages, settle
from .thp import why_not_huge
from .units import format_size
from .vma import Vma, clean, nameless, vmas

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from .replay import Replay

SPARSE = 1 << 30             # bytes: of larger mappings only the populated stretches are kept, where they are known
STRETCH = 2 << 20            # bytes: stretches are widened to this, so that few are needed
WHOLE = 1 << 64
NO_LIMITS = Limits(0, None, None, 0, 0, False)


class Capture:
    """The pages of one or more address ranges of a process at one moment, the machine around them, and its frames.

    `.pfns` (uint64, 0: not present), `.flags` (kpageflags words), `.mapcounts`
    (kpagecount words: how often a page is mapped, which is not its reference count),
    `.heads`, `.orders` (the folio of each page), `.words` (pagemap), `.leaves` (bool: mapped by
    a PMD or PUD entry; None where the kernel does not say) are arrays of one entry a page, in
    address order. `.vmas` are the mappings looked at, `.limits` the process's memlock limits,
    `.rlimits` all of them, `.status` its memory lines (bytes), `.machine` the settings, zones
    and pools. `.command` is the process's name, which is not kept in files. `.frames` holds every frame of the
    machine, or None. `.moved` counts pages left out because they changed while they were read, `.partial` says in
    words what is missing. `.pid` is 0 where no process was captured.
    """

    starts: "NDArray[np.uint64]"        # of the ranges
    counts: "NDArray[np.uint64]"        # their pages
    words: "NDArray[np.uint64]"
    flags: "NDArray[np.uint64]"
    mapcounts: "NDArray[np.uint64]"
    heads: "NDArray[np.uint64]"
    orders: "NDArray[np.uint8]"

    def __init__(self, info, arrays):
        self.pid = info["pid"]
        self.command = info.get("command", "")
        self.started = info.get("started", 0)              # clock ticks since boot: tells processes of one PID apart
        self.boot = info.get("boot", "")                   # boot_id of the machine
        self.page_size = info["page_size"]
        self.moved = info["moved"]
        self.partial = list(info.get("partial", ()))
        self.when = info.get("when", 0)                    # seconds since 1970
        self.whole = info.get("whole", False)              # all mappings, not a range of them
        self.limits = Limits(**info["limits"])
        self.rlimits = {name: tuple(pair) for name, pair in info.get("rlimits", {}).items()}
        self.status = dict(info.get("status", {}))
        self.machine = Machine.from_dict(info["machine"]) if "machine" in info else Machine(info.get("kernel", ""))
        self.kernel = self.machine.kernel
        self.vmas = [Vma(**{**v, "flags": tuple(v["flags"])}) for v in info["vmas"]]
        for name, kind in {"starts": np.uint64, "counts": np.uint64, **PAGES}.items():
            if name != "leaves":
                setattr(self, name, read_only(np.asarray(arrays[name], kind)))
        leaves = arrays.get("leaves") if info.get("has_leaves", False) else None
        self.leaves = None if leaves is None else read_only(leaves.astype(bool))
        self.pfns = read_only(pfns_of(self.words))
        self.frames = None
        if len(arrays.get("frame_flags", ())):
            self.frames = Frames(read_only(arrays["frame_flags"]), read_only(arrays["frame_mapcounts"]))

    @property
    def addr(self) -> int:
        """Return the address of the first page; 0 where no page was looked at."""
        return int(self.starts[0]) if len(self.starts) else 0

    @property
    def length(self) -> int:
        """Return the captured size in bytes."""
        return len(self.words) * self.page_size

    @property
    def addresses(self) -> "NDArray[np.uint64]":
        """Return the address of each page as uint64."""
        size = np.uint64(self.page_size)
        return np.concatenate([np.zeros(0, np.uint64)] + [
            start + np.arange(int(count), dtype=np.uint64) * size
            for start, count in zip(self.starts, self.counts)
        ])

    @property
    def runs_here(self) -> bool:
        """Return whether the captured process runs on this machine now."""
        if not self.pid or not self.boot:
            return False
        try:
            return (self.started, self.boot) == identity(self.pid)
        except (OSError, NotPossible):
            return False

    @property
    def thp_disabled(self) -> bool:
        """Return whether the process turned THP off for itself."""
        return self.status.get("THP_enabled", 1) == 0

    @property
    def not_huge(self) -> "list[tuple[int, int, str]]":
        """Return (start, end, reason) of each mapping that is not huge throughout."""
        reasons = ((vma, why_not_huge(vma, self.machine, self.thp_disabled)) for vma in self.vmas)
        return [(vma.start, vma.end, why) for vma, why in reasons if why]

    def backing(self) -> Backing:
        """Tell what backs the pages: Backing, by folio size, kind and physical run, in total and by mapping."""
        from .mapped import by_mapping

        total = describe(self.pfns, self.heads, self.orders, self.flags, self.page_size, self.not_huge)
        return replace(total, mappings=by_mapping(self))

    def replay(self) -> "Replay":
        """Build an engine with the same frames and folios: Replay(.mem .pages .mm).

        Raises MMError where the engine cannot hold the layout.
        """
        from .replay import replay

        return replay(self)

    def save(self, path) -> None:
        """Write the capture to a file; it appears whole or not at all. Raises OSError.

        No content of memory goes into it, and of names only those of the mappings.
        """
        names = list(dict.fromkeys(name for vma in self.vmas for name in vma.sizes))
        info = {
            "pid": self.pid, "page_size": self.page_size, "moved": self.moved, "partial": self.partial,
            "started": self.started, "boot": self.boot, "when": self.when, "whole": self.whole,
            "limits": asdict(self.limits), "rlimits": self.rlimits,
            "status": self.status, "machine": self.machine.as_dict(), "size_names": names,
            "has_leaves": self.leaves is not None,
            "vmas": [{key: value for key, value in vars(vma).items() if key != "sizes"} for vma in self.vmas],
        }
        npages, frames = len(self.words), self.frames or Frames(np.zeros(0, np.uint64), np.zeros(0, np.uint64))
        capturefile.save(path, info, {
            "starts": self.starts, "counts": self.counts, "words": self.words, "flags": self.flags,
            "mapcounts": self.mapcounts, "heads": self.heads, "orders": self.orders,
            "leaves": np.zeros(npages, np.uint8) if self.leaves is None else self.leaves,
            "sizes": np.array([vma.sizes.get(name, 0) for vma in self.vmas for name in names], np.uint64),
            "frame_flags": frames.flags, "frame_mapcounts": frames.mapcounts,
        })

    @classmethod
    def load(cls, path) -> "Capture":
        """Read a capture file; works on any machine, without privilege.

        Raises FileNotFoundError, or ValueError saying what is wrong with the file. Nothing in a
        file is executed, and one that would unpack to more than the memory here is refused.
        """
        info, arrays = capturefile.load(path)
        names, table = info["size_names"], arrays["sizes"].reshape(len(info["vmas"]), len(info["size_names"]))
        for vma, row in zip(info["vmas"], table.tolist()):
            vma["sizes"] = dict(zip(names, row))
        return cls(info, arrays)

    def __repr__(self):
        frames = "" if self.frames is None else f", {len(self.frames)} frames of the machine"
        if not self.pid:
            return f"<Capture of {len(self.frames or ())} frames>"
        return (
            f"<Capture pid {self.pid} {self.addr:#x}+{self.length:#x}: "
            f"{int(np.count_nonzero(self.pfns))} of {len(self.pfns)} pages present{frames}>"
        )


def read_only(array):
    """Return the array, which nobody writes any more."""
    array.flags.writeable = False
    return array


def capture(target="self", addr=None, length=None, *, memory=False, names=True, progress=None):
    """Snapshot the pages of a buffer, of [addr, addr + length) of a process, or of all of it.

    target: "self", a PID, a buffer object with .addr and .length, or "memory": no process, every
    frame of the machine, which memory=True adds to a process's pages. The range is widened to
    whole pages. Without addr every mapping that can hold pages is taken; of mappings above 1 GiB
    only the populated stretches then have entries. names=False leaves out the names of mappings.
    progress(done, total, what) is called as the reading goes on.

    Raises NotPossible off Linux, where the process may not be read (it takes ptrace access) or
    without CAP_SYS_ADMIN (PFNs are hidden), ProcessLookupError if the process is gone, MMError
    (EFAULT) where nothing is mapped. A process that runs on may change what is read: it is read
    again until two looks agree; what never does is left out and told in `.moved` and `.partial`.
    Threads may capture at once; the GIL is free while the kernel reads.
    """
    require_proc()
    pid, addr, length = _resolve(target, addr, length)
    page_size, around, when = mmap.PAGESIZE, machine(), time.time()
    info = {"page_size": page_size, "when": when, "machine": around.as_dict(), "whole": addr is None}
    if pid is None:
        nothing = {name: np.zeros(0, kind) for name, kind in capturefile.ARRAYS.items()}
        info.update(pid=0, moved=0, vmas=[], limits=asdict(NO_LIMITS))
        return Capture(info, {**nothing, **_frame_arrays(True, progress)})
    have = limits(pid)
    started, boot = identity(pid)
    info.update(pid=have.pid, command=clean(status(pid)["Name"]), started=started, boot=boot, limits=asdict(have),
                rlimits=rlimits(pid), status=memory_lines(status(pid)))
    layout, span = _layout(pid, addr, length, page_size)
    found = settle(pid, layout, span, page_size, progress, steady=pid != "self")
    listed = found.vmas if names else nameless(found.vmas)
    info.update(moved=found.moved, partial=found.partial, vmas=[vars(vma) for vma in listed],
                has_leaves=found.leaves is not None)
    starts, counts = (np.array(column, np.uint64) for column in zip(*found.ranges))
    return Capture(info, {
        "starts": starts, "counts": counts, "words": found.words, "flags": found.flags, "mapcounts": found.mapcounts,
        "heads": found.heads, "orders": found.orders, "leaves": found.leaves, **_frame_arrays(memory, progress),
    })


def identity(pid):
    """Return (start time in clock ticks since boot, boot_id): what no other process of this PID shares."""
    with open_proc(pid, "stat") as file:
        # The name in parentheses may hold anything; the fields after it are plain.
        started = int(file.read().rpartition(")")[2].split()[19])
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return started, file.read().strip()
    except OSError:
        return started, ""


def _frame_arrays(wanted, progress):
    if not wanted:
        return {}
    frames = read_frames(progress)
    return {"frame_flags": frames.flags, "frame_mapcounts": frames.mapcounts}


def _layout(pid, addr, length, page_size):
    """Return (layout, span): what to look at, as a call to ask again, and the addresses that it lies in."""
    if addr is None:
        return lambda: _all_mappings(pid, page_size), (0, WHOLE)
    start = addr // page_size * page_size
    stop = -(-(addr + length) // page_size) * page_size
    check_size([(start, (stop - start) // page_size)], page_size)
    return lambda: _one_range(pid, start, stop, page_size), (start, stop)


def _one_range(pid, start, stop, page_size):
    found = vmas(pid, start, stop)
    if not found:
        raise MMError(
            errno.EFAULT,
            f"process {pid} maps nothing at {start:#x}+{stop - start:#x}; see /proc/{pid}/maps",
            addr=start,
        )
    return found, [(start, (stop - start) // page_size)]


def _all_mappings(pid, page_size):
    found = [vma for vma in vmas(pid) if holds_pages(vma)]
    if not found:
        raise NotPossible(
            f"process {pid} has no address space (a kernel thread or a zombie)",
            "give the PID of a user process",
        )
    ranges = []
    with open_proc(pid, "pagemap", "rb") as file:
        for vma in found:
            ranges += _populated(file, vma, page_size)
    check_size(ranges, page_size)
    return found, ranges


def _populated(file, vma, page_size):
    """Return the ranges of a mapping to read: all of it, or the stretches that hold pages where it is very large."""
    everything = [(vma.start, (vma.end - vma.start) // page_size)]
    if vma.end - vma.start <= SPARSE:
        return everything
    regions = scan(file, vma.start, vma.end, any_of=PAGE_IS_PRESENT | PAGE_IS_SWAPPED)
    if regions is None:
        return everything
    stretches = []
    for start, end in zip(regions["start"].tolist(), regions["end"].tolist()):
        start = max(vma.start, start // STRETCH * STRETCH)
        end = min(vma.end, -(-end // STRETCH) * STRETCH)
        if stretches and start <= stretches[-1][1]:
            stretches[-1] = (stretches[-1][0], max(end, stretches[-1][1]))
        else:
            stretches.append((start, end))
    return [(start, (end - start) // page_size) for start, end in stretches]


def check_size(ranges, page_size):
    """Raise ValueError where the ranges are more pages than a capture holds."""
    npages = sum(count for _, count in ranges)
    if npages > MAX_PAGES:
        raise ValueError(
            f"{format_size(npages * page_size)} of address space is too much for one capture "
            f"({format_size(MAX_PAGES * page_size)} at most); give addr and length"
        )


def _resolve(target, addr, length):
    """Return (pid, addr, length) as ints, "self" and None; a pid of None stands for the machine alone."""
    if hasattr(target, "addr") and hasattr(target, "length"):
        if addr is not None or length is not None:
            raise TypeError("a buffer object brings its own addr and length")
        return "self", target.addr, target.length
    if isinstance(target, str) and target == "memory":
        if addr is not None or length is not None:
            raise TypeError("the machine's memory is captured whole: no addr, no length")
        return None, None, None
    if target != "self":
        if isinstance(target, bool) or not isinstance(target, int):
            raise TypeError(f'target is "self", "memory", a PID or a buffer, not {target!r}')
        if target <= 0:
            raise ValueError(f"a PID is above 0, not {target}")
    if addr is None and length is None:
        return target, None, None
    if addr is None or length is None:
        raise TypeError("addr and length go together")
    if addr < 0 or length <= 0 or addr + length > 1 << 64:
        raise ValueError(f"not a range of addresses: {addr:#x}+{length:#x}")
    return target, addr, length
