"""Who holds pins: VmPin of each process, what the kernel counted machine-wide, and what no process explains.

VmPin is what was charged: RDMA, io_uring and VDPA count there, and io_uring charges a whole huge folio for its one pin.
nr_foll_pin_acquired - nr_foll_pin_released is what is pinned now, by anybody: also by I/O in flight, by VFIO (which
charges VmLck), and by what was pinned without a charge. So the two need not agree, in either direction.
"""

import os
import time
from dataclasses import asdict, dataclass, field

from .errors import NotPossible
from .limits import require_proc
from .vma import clean
from .vmstat import refresh, vmstat

HOLDERS = (("io_uring", "anon_inode:[io_uring]"), ("vfio", "/dev/vfio/"), ("vfio", "anon_inode:[vfio"),
           ("iommufd", "/dev/iommu"), ("rdma", "/dev/infiniband/"), ("vdpa", "/dev/vhost-vdpa"))


@dataclass(frozen=True)
class ProcessPins:
    """A process that has pinned or locked memory, in bytes, and what it holds open that pins."""

    pid: int
    command: str
    pinned: int                       # VmPin
    locked: int                       # VmLck
    holders: tuple = ()               # kinds of its open files that can hold pins
    shares: "int | None" = None       # PID whose address space this is too: its bytes are counted there


@dataclass(frozen=True)
class Pins:
    """The pins of a machine at one moment; pages are base pages."""

    when: float
    page_size: int
    processes: list = field(default_factory=list)     # ProcessPins, the largest VmPin first
    acquired: "int | None" = None                     # nr_foll_pin_acquired; None on a kernel without it
    released: "int | None" = None
    current: bool = False                             # whether the counters of all processors were folded first
    why_not_current: str = ""
    unseen: int = 0                                   # processes that may not be looked at

    @property
    def outstanding(self) -> "int | None":
        """Return the pages pinned now, machine-wide; None where the kernel does not count them."""
        return None if self.acquired is None or self.released is None else self.acquired - self.released

    @property
    def charged(self) -> int:
        """Return the pages that VmPin of all address spaces adds up to."""
        return sum(one.pinned for one in self.processes if one.shares is None) // self.page_size

    @property
    def unexplained(self) -> "int | None":
        """Return outstanding - charged in pages: above 0, pins no VmPin explains; below 0, charges without pins."""
        return None if self.outstanding is None else self.outstanding - self.charged

    def as_dict(self) -> dict:
        """Return plain data for JSON."""
        return {**asdict(self), "outstanding": self.outstanding, "charged": self.charged,
                "unexplained": self.unexplained, "verdict": self.verdict()}

    def verdict(self) -> str:
        """Return in words what the difference means."""
        rest = self.unexplained
        if rest is None:
            return "this kernel does not count pins (it needs Linux 5.6)"
        stale = "" if self.current else f"; the counters may be behind ({self.why_not_current})"
        if rest == 0:
            return "VmPin explains every pin" + stale
        if rest < 0:
            return (f"{-rest} pages are charged without a pin of their own: io_uring keeps one pin for a huge folio "
                    "and charges all of it" + stale)
        # By address space, not by process: threads and clones show the same bytes.
        vfio = sum(one.locked for one in self.processes if "vfio" in one.holders or "iommufd" in one.holders)
        text = f"{rest} pages are pinned that no VmPin explains: I/O in flight, or a driver that does not charge"
        if vfio:
            text += f"; processes with VFIO open have {vfio // self.page_size} pages in VmLck, where VFIO charges"
        return text + stale


def pins():
    """Look at every process and the machine's counters: Pins. Raises NotPossible off Linux."""
    require_proc()
    current, why = True, ""
    try:
        refresh()
    except NotPossible as error:
        current, why = False, f"{error.reason}; {error.remedy}"
    stats = vmstat()
    found, unseen = [], 0
    for name in os.listdir("/proc"):
        if name.isdigit():
            one = _process(int(name))
            if one is None:
                unseen += 1
            elif one.pinned or one.locked or one.holders:
                found.append(one)
    found.sort(key=lambda one: (-one.pinned, -one.locked, one.pid))
    return Pins(time.time(), os.sysconf("SC_PAGE_SIZE"), _shared(found), stats.get("nr_foll_pin_acquired"),
                stats.get("nr_foll_pin_released"), current, why, unseen)


def _process(pid):
    """Return the ProcessPins of a process, all 0 where it has ended; None where its files may not be looked at."""
    nothing = ProcessPins(pid, "", 0, 0)
    try:
        with open(f"/proc/{pid}/status", errors="replace") as file:
            fields = dict(line.split(":", 1) for line in file if ":" in line)
    except (FileNotFoundError, ProcessLookupError):
        return nothing
    except PermissionError:
        return None
    if "VmPin" not in fields:             # a kernel thread, or a zombie
        return nothing
    pinned, locked = (int(fields[key].split()[0]) << 10 for key in ("VmPin", "VmLck"))
    try:
        holders = tuple(sorted(set(_holders(pid))))
    except PermissionError:
        if not pinned and not locked:
            return None
        holders = ()
    return ProcessPins(pid, clean(fields["Name"].strip()), pinned, locked, holders)


def _holders(pid):
    try:
        names = os.listdir(f"/proc/{pid}/fd")
    except (FileNotFoundError, ProcessLookupError):
        return
    for name in names:
        try:
            target = os.readlink(f"/proc/{pid}/fd/{name}")
        except (FileNotFoundError, ProcessLookupError):
            continue
        for kind, start in HOLDERS:
            if target.startswith(start):
                yield kind


def _shared(found):
    """Mark processes that share an address space with one before (CLONE_VM): they show the same bytes again."""
    marked, seen = [], {}
    for one in found:
        twin = next((pid for pid in seen.get((one.pinned, one.locked), ()) if same_memory(pid, one.pid)), None)
        if twin is None:
            seen.setdefault((one.pinned, one.locked), []).append(one.pid)
            marked.append(one)
        else:
            marked.append(ProcessPins(one.pid, one.command, one.pinned, one.locked, one.holders, twin))
    return marked


def same_memory(one, other):
    """Tell whether two processes share their address space, by kcmp(2); False where the kernel does not say."""
    import ctypes
    import platform

    number = {"x86_64": 312, "aarch64": 272, "riscv64": 272}.get(platform.machine())
    if number is None or one == other:
        return one == other
    return ctypes.CDLL(None).syscall(number, one, other, 1, 0, 0) == 0      # 1: KCMP_VM
