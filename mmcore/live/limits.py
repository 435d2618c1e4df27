"""What a process may lock and pin, what it has, and whether a need fits.

Three kernels' rules share RLIMIT_MEMLOCK: mlock(2) and VFIO count locked_vm (VmLck),
RDMA counts pinned_vm (VmPin), io_uring counts per user, which no file shows. A process
with CAP_IPC_LOCK is exempt from all of them.
"""

import errno
import os
import sys
from dataclasses import dataclass

from .errors import NotPossible
from .units import format_size

CAP_IPC_LOCK = 14
CAP_SYS_ADMIN = 21
NO_CGROUP_LIMIT = 1 << 62        # version 1 writes "no limit" as the largest number of pages


@dataclass(frozen=True)
class Limits:
    """The memlock limits of a process in bytes (None: unlimited) and what it has locked."""

    pid: int
    soft: "int | None"
    hard: "int | None"
    locked: int          # VmLck, bytes: mlock and VFIO
    pinned: int          # VmPin, bytes: RDMA and io_uring
    cap_ipc_lock: bool   # counts only in the initial user namespace


@dataclass(frozen=True)
class Fit:
    """Whether `needed` bytes on top of `current` pass RLIMIT_MEMLOCK, and what to do if not."""

    needed: int
    limit: "int | None"
    current: int         # bytes counted now
    verdict: str         # "fits", "unlimited", "exempt" or "refused"
    reason: str
    remedy: str          # empty unless refused

    @property
    def ok(self) -> bool:
        """Return whether the registration passes."""
        return self.verdict != "refused"


def proc_path(pid, name):
    """Return /proc/PID/name, with "self" for this process."""
    return f"/proc/{pid}/{name}"


def require_proc():
    """Raise NotPossible where there is no /proc of Linux."""
    if not sys.platform.startswith("linux"):
        raise NotPossible(
            f"this needs Linux (pagemap, kpageflags), and this is {sys.platform}",
            "use the synthetic model (mmcore register --model)",
        )
    if not os.path.exists("/proc/self/status"):
        raise NotPossible("/proc is not mounted", "mount -t proc proc /proc")


def open_proc(pid, name, mode="r"):
    """Open /proc/PID/name.

    Raises ProcessLookupError if the process is gone, NotPossible if it may not be read.
    """
    require_proc()
    path = proc_path(pid, name)
    try:
        # Names in /proc are bytes that somebody chose; one that is no text must not end the reading.
        return open(path, mode, **({"buffering": 0} if "b" in mode else {"errors": "replace"}))
    except (FileNotFoundError, ProcessLookupError) as error:
        if os.path.exists(proc_path(pid, "status")):
            if error.errno == errno.ESRCH:
                raise NotPossible(
                    f"process {pid} has no address space (a kernel thread or a zombie)",
                    "give the PID of a user process",
                ) from None
            raise NotPossible(
                f"{path} does not exist on this kernel",
                "it needs CONFIG_PROC_PAGE_MONITOR",
            ) from None
        raise vanished(pid) from None
    except PermissionError:
        raise NotPossible(
            f"{path} may not be read by uid {os.geteuid()}",
            "run as the owner of the process, or as root: reading another one's memory map takes ptrace access "
            "(CAP_SYS_PTRACE), PFNs take CAP_SYS_ADMIN",
        ) from None


def vanished(pid):
    """Return the error of a process that does not exist (any more)."""
    return ProcessLookupError(
        errno.ESRCH, f"process {pid} does not exist or ended while it was read; check the PID"
    )


def status(pid="self"):
    """Return /proc/PID/status as a dict of text."""
    fields = {}
    with open_proc(pid, "status") as file:
        try:
            for line in file:
                key, _, value = line.partition(":")
                fields[key] = value.strip()
        except ProcessLookupError:
            raise vanished(pid) from None
    return fields


def memory_lines(fields):
    """Return the lines of status that count memory, in bytes, and THP_enabled as it is: Vm*, Rss*, HugetlbPages."""
    return {key: int(value.split()[0]) << (10 if value.endswith("kB") else 0) for key, value in fields.items()
            if key.startswith(("Vm", "Rss")) or key in ("HugetlbPages", "THP_enabled")}


def rlimits(pid="self"):
    """Return every limit of a process: name -> (soft, hard), None: unlimited.

    Raises ProcessLookupError if it is gone, NotPossible if it may not be read.
    """
    found = {}
    with open_proc(pid, "limits") as file:
        try:
            for line in list(file)[1:]:
                name, pair = line[:26].rstrip(), line[26:].split()[:2]
                found[name] = tuple(None if word == "unlimited" else int(word) for word in pair)
        except ProcessLookupError:
            raise vanished(pid) from None
    return found


def _kilobytes(fields, key):
    # Kernel threads and zombies have no Vm lines: nothing locked.
    return int(fields.get(key, "0 kB").split()[0]) << 10


def has_capability(number, pid="self"):
    """Return whether a process has a capability that counts: in the initial user namespace."""
    if not int(status(pid).get("CapEff", "0"), 16) >> number & 1:
        return False
    try:
        with open_proc(pid, "uid_map") as file:
            return file.read().split() == ["0", "0", "4294967295"]
    except NotPossible:
        return True


def limits(pid="self"):
    """Return the Limits of a process: RLIMIT_MEMLOCK, CAP_IPC_LOCK, VmLck, VmPin; bytes.

    Raises ProcessLookupError if it is gone, NotPossible off Linux.
    """
    fields = status(pid)
    soft, hard = rlimits(pid).get("Max locked memory", (None, None))
    return Limits(
        pid=int(fields["Pid"]),
        soft=soft,
        hard=hard,
        locked=_kilobytes(fields, "VmLck"),
        pinned=_kilobytes(fields, "VmPin"),
        cap_ipc_lock=has_capability(CAP_IPC_LOCK, pid),
    )


def fit(needed, have, current=None, counted_in="VmPin"):
    """Judge `needed` bytes against Limits: current + needed <= soft limit. current: bytes, VmPin when None."""
    current = have.pinned if current is None else current
    now = "pinned now" if counted_in == "VmPin" else f"in {counted_in} now"
    words = f"{format_size(needed)} needed, {format_size(current)} {now}"
    remedy = ""
    if have.cap_ipc_lock:
        verdict, reason = "exempt", "CAP_IPC_LOCK: no limit applies"
    elif have.soft is None:
        verdict, reason = "unlimited", "RLIMIT_MEMLOCK is unlimited"
    elif current + needed <= have.soft:
        verdict, reason = "fits", f"{words}, limit {format_size(have.soft)}"
    else:
        verdict = "refused"
        reason = f"{words}, limit {format_size(have.soft)}: the kernel answers ENOMEM"
        remedy = remedy_words(current + needed, have)
    return Fit(needed, have.soft, current, verdict, reason, remedy)


def remedy_words(total, have):
    """Return in one line how a process comes to lock `total` bytes."""
    kilobytes = -(-total // 1024)
    if have.hard is None or total <= have.hard:
        return f"ulimit -l {kilobytes}"
    return (
        f"the hard limit is {format_size(have.hard)}: as root, `memlock {kilobytes}` in "
        f"/etc/security/limits.conf, or LimitMEMLOCK={kilobytes}K in the systemd unit, or "
        "give the program CAP_IPC_LOCK"
    )


def remedies(total, have, *, own=False):
    """Return the commands that let a process lock `total` bytes: [(what for, command)], the least far-reaching first.

    own: the process is this one, which takes its limit from the shell that starts it.
    """
    kilobytes = -(-total // 1024)
    size = kilobytes << 10
    pid, who = ("$$", "the shell that starts it") if own else (have.pid, "the process as it runs")
    found = []
    if have.hard is None or total <= have.hard:
        found.append(("the shell that starts it", f"ulimit -l {kilobytes}"))
        if not own:
            found.append((who, f"prlimit --pid {pid} --memlock={size}:"))
    else:
        found.append((f"{who}, as root (CAP_SYS_RESOURCE)", f"prlimit --pid {pid} --memlock={size}:{size}"))
        found.append(("logins, a line in /etc/security/limits.conf", f"* - memlock {kilobytes}"))
    found.append(("a systemd unit, in [Service]", f"LimitMEMLOCK={kilobytes}K"))
    found.append(("a container", f"docker run --ulimit memlock={size}:{size}"))
    try:
        program = os.path.realpath(proc_path(have.pid, "exe"))
    except OSError:
        program = ""
    if os.path.isfile(program):
        whose = "every program of this interpreter" if own else "the program, for good"
        found.append((f"{whose}, as root", f"setcap cap_ipc_lock+ep {program}"))
    return found


def pages_spanned(addr, length, page_size):
    """Return the pages that [addr, addr + length) touches: what pinning it counts."""
    return -(-(addr + length) // page_size) - addr // page_size


def available_memory():
    """Return the bytes that can be populated without swapping or being killed; None: unknown.

    The least of MemAvailable and the room in the memory cgroup, version 1 or 2.
    """
    room = None
    try:
        with open("/proc/meminfo") as file:
            for line in file:
                if line.startswith("MemAvailable:"):
                    room = int(line.split()[1]) << 10
    except OSError:
        return None
    for _, limit, usage in cgroup_memory():
        room = limit - usage if room is None else min(room, limit - usage)
    return None if room is None else max(0, room)


def cgroup_memory(pid="self"):
    """Return [(limit file, limit, usage)] in bytes of the memory cgroups that hold a process, innermost first.

    Versions 1 and 2. Empty where there is no limit, or none that can be read. What belongs to inner namespaces is not
    seen.
    """
    found = []
    try:
        with open(proc_path(pid, "cgroup")) as file:
            groups = [line.rstrip("\n").split(":", 2) for line in file]
    except OSError:
        return found
    for _, controllers, path in groups:
        if controllers == "":
            base, names = "/sys/fs/cgroup", ("memory.max", "memory.current")
        elif "memory" in controllers.split(","):
            base = "/sys/fs/cgroup/memory"
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes")
        else:
            continue
        # Every ancestor's limit holds too.
        path = path.rstrip("/")
        while True:
            try:
                limit, usage = (_number(f"{base}{path}/{name}") for name in names)
            except (OSError, ValueError):
                pass                    # no such file, or "max"
            else:
                if limit < NO_CGROUP_LIMIT:
                    found.append((f"{base}{path}/{names[0]}", limit, usage))
            if not path:
                break
            path = path.rpartition("/")[0]
    return found


def _number(path):
    with open(path) as file:
        return int(file.read())
