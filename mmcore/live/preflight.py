"""Will registering a buffer be refused? What each way to pin it long-term counts, against which limit, and the remedy.

    RDMA        every page that an MR touches, an MR at a time, to the process's pinned_vm (VmPin)
    VFIO        every page of a mapping but those without a struct page, a mapping at a time, to its locked_vm (VmLck)
    io_uring    a base page each time it is in a buffer, a large folio whole and once a ring, to the *user's* locked_vm,
    which
                no file shows, and to the process's pinned_vm; the ring itself counts for the user as well

All three compare with the soft RLIMIT_MEMLOCK; equality passes; CAP_IPC_LOCK lifts the limit. Pages that are not there
yet are faulted in first, and that is what a memory cgroup may refuse.
"""

import errno
import mmap
from dataclasses import asdict, dataclass, field

import numpy as np

from .capture import capture
from .errors import NotPossible
from .iouring import MAX_IOVEC, MAX_IOVECS, predict_iouring_pins
from .limits import Limits, cgroup_memory, fit, limits, pages_spanned, remedies
from .longterm import mapping_obstacle, of_this_machine
from .pagemap import KPF_NOPAGE, KPF_ZERO_PAGE, has_flag
from .units import format_size

APIS = ("RDMA", "VFIO", "io_uring")
RING_PAGES = 2  # the least ring: one page of entries, one of both queues (Linux 6.18)
VFIO_DMA_ENTRY_LIMIT = 65535  # mappings of a container: the default of vfio_iommu_type1.dma_entry_limit
GOOD = ("fits", "unlimited", "exempt")


@dataclass(frozen=True)
class Piece:
    """One buffer: its address, its bytes, and what is known of its pages (None: PFNs are hidden)."""

    addr: int
    length: int
    pfns: "np.ndarray | None" = None
    heads: "np.ndarray | None" = None
    orders: "np.ndarray | None" = None
    flags: "np.ndarray | None" = None


@dataclass(frozen=True)
class Charge:
    """What one API counts for the buffers, and whether that fits. Sizes are bytes."""

    api: str
    each: str  # what is counted one by one: "MR", "mapping", "ring"
    pages: int
    needed: int
    counted_in: str
    current: int  # counted there before the buffers; io_uring: of this process, and the ring's own pages; the
    # user's other rings are not to be seen
    limit: "int | None"
    verdict: str  # "fits", "unlimited", "exempt", "refused"
    errno: int  # of the refusal, 0 otherwise
    reason: str


@dataclass(frozen=True)
class Preflight:
    """Whether registering passes, by each API. `.needed`, `.limit`, `.current` are of the API that needs most.

    `.verdict` is "refused" when any API refuses, and `.remedy` the first command that helps; `.remedies` all of them,
    as (what for, command). `.obstacles` are refusals that no limit explains: (address, errno, words).
    """

    limits: Limits
    page_size: int
    charges: "list[Charge]"
    not_present: int  # bytes that registering faults in first
    cgroup: "list[tuple[str, int, int]]"  # [(path, limit, usage)] in bytes
    obstacles: "list[tuple[int, int, str]]" = field(default_factory=list)
    remedies: "list[tuple[str, str]]" = field(default_factory=list)
    notes: "list[str]" = field(default_factory=list)

    @property
    def worst(self) -> Charge:
        """Return the Charge that decides: a refused one if there is one, else the largest."""
        refused = [charge for charge in self.charges if charge.verdict == "refused"]
        return max(refused or self.charges, key=lambda charge: charge.current + charge.needed)

    @property
    def needed(self) -> int:
        """Return the bytes that the API which decides counts."""
        return self.worst.needed

    @property
    def limit(self) -> "int | None":
        """Return the soft limit in bytes; None: unlimited."""
        return self.limits.soft

    @property
    def current(self) -> int:
        """Return the bytes that count now where the API which decides counts."""
        return self.worst.current

    @property
    def verdict(self) -> str:
        """Return "fits", "unlimited", "exempt" or "refused"."""
        return "refused" if self.obstacles or self.short_of_memory else self.worst.verdict

    @property
    def short_of_memory(self) -> "tuple[str, int, int] | None":
        """Return the (path, limit, usage) of the memory cgroup that cannot take the missing pages, or None."""
        for row in self.cgroup:
            if self.not_present > max(0, row[1] - row[2]):
                return row
        return None

    @property
    def ok(self) -> bool:
        """Return whether every API passes."""
        return self.verdict in GOOD

    @property
    def reason(self) -> str:
        """Return in words why the verdict is what it is."""
        if self.worst.verdict == "refused":
            return f"{self.worst.api}: {self.worst.reason}"
        if self.obstacles:
            return self.obstacles[0][2]
        short = self.short_of_memory
        if short:
            return (
                f"{format_size(self.not_present)} are not present and must be faulted in, and the memory cgroup "
                f"{short[0]} has {format_size(max(0, short[1] - short[2]))} left of {format_size(short[1])}"
            )
        return self.worst.reason

    @property
    def remedy(self) -> str:
        """Return the first command, or advice, that helps; empty when all is well."""
        return self.remedies[0][1] if self.remedies else ""

    def as_dict(self) -> dict:
        """Return plain data for JSON."""
        return {
            "needed": self.needed,
            "limit": self.limit,
            "hard": self.limits.hard,
            "current": self.current,
            "cap_ipc_lock": self.limits.cap_ipc_lock,
            "pid": self.limits.pid,
            "verdict": self.verdict,
            "reason": self.reason,
            "remedy": self.remedy,
            "charges": [asdict(charge) for charge in self.charges],
            "not_present": self.not_present,
            "cgroup": [{"path": path, "limit": limit, "usage": usage} for path, limit, usage in self.cgroup],
            "obstacles": [{"addr": addr, "errno": number, "reason": words} for addr, number, words in self.obstacles],
            "remedies": [{"for": what, "command": command} for what, command in self.remedies],
            "notes": list(self.notes),
        }


def preflight(target, *, apis=APIS):
    """Tell whether registering a capture, a buffer or several of them passes, by each API; returns Preflight.

    target: a Capture, an object with .addr and .length of this process, or a list of these, all of one process: each is
    an MR, a VFIO mapping and a fixed buffer of one ring. Whole pages are counted, as the kernel does. Where PFNs are
    hidden, io_uring's count takes every page for a base page, and `.notes` says so. Raises ValueError for nothing,
    ProcessLookupError, MMError (EFAULT) where nothing is mapped, NotPossible off Linux for buffers.
    """
    unknown = [api for api in apis if api not in APIS]
    if unknown or not apis:
        raise ValueError(f"apis are some of {', '.join(APIS)}, not {apis!r}")
    many = not (hasattr(target, "pfns") or hasattr(target, "addr"))
    targets = list(target) if many else [target]
    if not targets:
        raise ValueError("no buffer to look at")
    pieces, notes, vmas, have, page_size, pid = _look(targets)
    own = pid == "self"
    charges = [_CHARGE[api](pieces, have, page_size, notes) for api in apis]
    missing = sum(page_size * _missing(piece) for piece in pieces if piece.pfns is not None)
    obstacles = [row for row in map(mapping_obstacle, vmas) if row]
    found = Preflight(have, page_size, charges, missing, cgroup_memory(pid) if pid else [], obstacles, notes=notes)
    needs = [charge for charge in charges if charge.verdict == "refused"]
    if needs:
        total = max(charge.current + charge.needed for charge in needs)
        found.remedies.extend(remedies(total, have, own=own))
    for addr, _, words in obstacles:
        found.remedies.append((f"the mapping at {addr:#x}", words))
    if found.short_of_memory:
        path = found.short_of_memory[0]
        found.remedies.append(("the memory cgroup", f"echo {found.short_of_memory[2] + missing} > {path}"))
    return found


def _look(targets):
    """Return (pieces, notes, vmas, Limits, page size, whose they are: "self", a PID that runs here, or None)."""
    pieces, notes, vmas, have, page_size, pid = [], [], [], None, mmap.PAGESIZE, "self"
    for one in targets:
        if not hasattr(one, "pfns"):
            addr, length = one.addr, one.length
            try:
                one = capture(one)
            except NotPossible as hidden:
                notes.append(
                    f"the buffer at {addr:#x}: {hidden.reason}; io_uring's count takes every page for a base page, and "
                    "would count large folios whole"
                )
                pieces.append(Piece(addr, length))
                continue
            # The page range of the capture starts on a page; the buffer may not.
            pieces.append(Piece(addr, length, one.pfns, one.heads, one.orders, one.flags))
        else:
            pid = one.pid if of_this_machine(one) else None
            at = 0
            for start, count in zip(one.starts.tolist(), one.counts.tolist()):
                part = slice(at, at + count)
                pieces.append(
                    Piece(
                        start, count * one.page_size, one.pfns[part], one.heads[part], one.orders[part], one.flags[part]
                    )
                )
                at += count
        if have is not None and one.limits.pid != have.pid:
            raise ValueError(f"buffers of two processes, {have.pid} and {one.limits.pid}: look at each alone")
        have, page_size = one.limits, one.page_size
        vmas += [vma for vma in one.vmas if vma not in vmas]
    return pieces, notes, vmas, have or limits(), page_size, pid


def _missing(piece):
    return int(np.count_nonzero(piece.pfns == 0))


def _judge(api, each, pages, counted_in, current, have, page_size, reason="", number=0):
    one = fit(pages * page_size, have, current, counted_in)
    if number and one.verdict != "exempt":
        return Charge(api, each, pages, one.needed, counted_in, current, have.soft, "refused", number, reason)
    return Charge(
        api,
        each,
        pages,
        one.needed,
        counted_in,
        current,
        have.soft,
        one.verdict,
        0 if one.ok else errno.ENOMEM,
        one.reason,
    )


def rdma_charge(pieces, have, page_size, notes):
    """Charge each MR with the pages it touches; a limit of 0 is refused before anything is counted (EPERM)."""
    pages = sum(pages_spanned(piece.addr, piece.length, page_size) for piece in pieces)
    zero = "RLIMIT_MEMLOCK is 0: the kernel answers EPERM before it counts" if have.soft == 0 else ""
    return _judge("RDMA", "MR", pages, "VmPin", have.pinned, have, page_size, zero, errno.EPERM if zero else 0)


def vfio_charge(pieces, have, page_size, notes):
    """Charge each mapping with its pages; frames without a struct page are not counted, and nothing is counted once for
    two."""
    pages, ragged = 0, 0
    for piece in pieces:
        pages += pages_spanned(piece.addr, piece.length, page_size)
        if piece.flags is not None:
            pages -= int(np.count_nonzero(has_flag(piece.flags, KPF_NOPAGE)))
        ragged += (piece.addr | piece.length) % page_size != 0
    if ragged:
        notes.append(
            f"VFIO maps whole pages: {ragged} of {len(pieces)} buffers do not start and end on one (EINVAL); "
            "counted are the pages around them"
        )
    if len(pieces) > VFIO_DMA_ENTRY_LIMIT:
        notes.append(
            f"VFIO: {len(pieces)} mappings are more than dma_entry_limit, {VFIO_DMA_ENTRY_LIMIT} by default (ENOSPC)"
        )
    return _judge("VFIO", "mapping", pages, "VmLck", have.locked, have, page_size)


def iouring_charge(pieces, have, page_size, notes):
    """Charge one ring as the engine's BufferTable does: a large folio whole and once, a base page each time."""
    pages, pfns, heads, orders = 0, [], [], []
    for piece in pieces:
        if piece.pfns is None:
            pages += pages_spanned(piece.addr, piece.length, page_size)
            continue
        # A zero page is replaced by a page of its own when it is pinned for writing.
        here = (piece.pfns != 0) & ~has_flag(piece.flags, KPF_ZERO_PAGE) & ~has_flag(piece.flags, KPF_NOPAGE)
        pages += len(here) - int(np.count_nonzero(here))
        pfns.append(piece.pfns[here])
        heads.append(piece.heads[here])
        orders.append(piece.orders[here])
    missing = sum(_missing(piece) for piece in pieces if piece.pfns is not None)
    if missing:
        notes.append(
            f"{missing} pages are not present: io_uring's count takes them for base pages; a huge page faulted in "
            "counts whole"
        )
    if pfns:
        step = MAX_IOVEC // page_size
        pages += predict_iouring_pins(*map(np.concatenate, (pfns, heads, orders)), max_pages=step).charge
    buffers = sum(-(-piece.length // MAX_IOVEC) for piece in pieces)
    if buffers > MAX_IOVECS:
        notes.append(f"io_uring: {buffers} buffers of up to 1 GiB are more than the {MAX_IOVECS} of a ring (EINVAL)")
    return _judge(
        "io_uring", "ring", pages, "the user's locked_vm", have.pinned + RING_PAGES * page_size, have, page_size
    )


_CHARGE = {"RDMA": rdma_charge, "VFIO": vfio_charge, "io_uring": iouring_charge}
