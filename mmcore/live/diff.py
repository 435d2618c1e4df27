"""What happened to a process's pages between two captures: moved, split, collapsed, freed, newly present.

Pages are compared by address. Collapsed: the page lies in a larger folio now (khugepaged, or a refault); split: in a
smaller one, at the same frame; moved: at another frame (migrated, compacted, copied after a fork, refaulted). A page
that is gone was freed, swapped out, or is no longer mapped.
"""

from dataclasses import asdict, dataclass, field

import numpy as np

from .pagemap import KPF_BUDDY, PM_SWAP, has_flag

KINDS = ("same", "moved", "split", "collapsed", "freed", "swapped out", "unmapped", "new", "not looked at")
SAME, MOVED, SPLIT, COLLAPSED, FREED, SWAPPED, UNMAPPED, NEW, NOT_LOOKED = range(len(KINDS))


@dataclass(frozen=True)
class Change:
    """One stretch of pages to which the same happened."""

    kind: str
    start: int               # address
    length: int              # bytes
    name: str                # of the mapping
    before: "int | None"     # first PFN, None where there was no page
    after: "int | None"
    order_before: "int | None"
    order_after: "int | None"


@dataclass(frozen=True)
class Diff:
    """Two captures of a process compared; sizes are bytes."""

    page_size: int
    totals: dict = field(default_factory=dict)       # kind -> bytes
    changes: list = field(default_factory=list)      # Change, in address order, without "same"
    frames: "dict | None" = None                     # what the frames that the process left are now, in bytes
    notes: list = field(default_factory=list)        # why the two may not be comparable

    def as_dict(self) -> dict:
        """Return plain data for JSON."""
        return asdict(self)


def diff(before, after):
    """Compare two Captures: Diff. Raises ValueError where they cannot be compared at all."""
    if before.page_size != after.page_size:
        raise ValueError(f"pages of {before.page_size} bytes and of {after.page_size}: "
                         "captures of two machines do not compare")
    if not before.pid or not after.pid:
        raise ValueError("a capture without a process: there are no addresses to compare; capture with --pid")
    where = np.union1d(before.addresses, after.addresses)
    old, new = aligned_to(where, before), aligned_to(where, after)
    kinds = classify(where, old, new, before, after)
    totals = {name: int(n) * before.page_size for name, n in zip(KINDS, np.bincount(kinds, minlength=len(KINDS)))}
    return Diff(before.page_size, totals, changes(where, kinds, old, new, before, after),
                left_frames(old, new, after), notes(before, after))


@dataclass(frozen=True)
class Columns:
    """A capture's columns at the addresses of both."""

    looked: np.ndarray
    pfns: np.ndarray
    heads: np.ndarray
    orders: np.ndarray
    swapped: np.ndarray


def aligned_to(where, capture):
    """Return the capture's columns at these addresses: Columns."""
    at = np.searchsorted(where, capture.addresses)

    def spread(values, kind):
        column = np.zeros(len(where), kind)
        column[at] = values
        return column

    return Columns(spread(True, bool), spread(capture.pfns, np.uint64), spread(capture.heads, np.uint64),
                   spread(capture.orders, np.int16), spread(capture.words & PM_SWAP != 0, bool))


def mapped(where, capture):
    """Tell which addresses lie in a mapping of the capture."""
    starts = np.array([vma.start for vma in capture.vmas], np.uint64)
    ends = np.array([vma.end for vma in capture.vmas], np.uint64)
    if not len(starts):
        return np.zeros(len(where), bool)
    at = np.searchsorted(starts, where, side="right") - 1
    return (at >= 0) & (where < ends[at])


def classify(where, old, new, before, after):
    """Return what happened to each page, as an index of KINDS; pages that neither capture has are "same"."""
    had, has = old.pfns != 0, new.pfns != 0
    # A capture of everything has no entry where nothing is; one of a range knows nothing of what lies outside.
    unknown_old, unknown_new = ~old.looked & (not before.whole), ~new.looked & (not after.whole)
    both = had & has
    kinds = np.full(len(where), SAME, np.uint8)
    kinds[both & (old.pfns != new.pfns)] = MOVED
    kinds[both & (old.orders > new.orders) & (old.pfns == new.pfns)] = SPLIT
    kinds[both & (old.orders < new.orders)] = COLLAPSED
    lost = had & ~has
    kinds[lost] = FREED
    kinds[lost & new.swapped] = SWAPPED
    kinds[lost & ~mapped(where, after)] = UNMAPPED
    kinds[~had & has] = NEW
    kinds[had & unknown_new | has & unknown_old] = NOT_LOOKED
    return kinds


def changes(where, kinds, old, new, before, after):
    """Return the stretches of pages to which the same happened: list of Change."""
    count = len(where)
    if not count:
        return []
    size = before.page_size
    same = (np.diff(where) == size) & (kinds[1:] == kinds[:-1])
    for columns in (old, new):
        same &= (columns.orders[1:] == columns.orders[:-1]) & ((columns.pfns[1:] != 0) == (columns.pfns[:-1] != 0))
    firsts = np.flatnonzero(np.concatenate(([True], ~same)))
    lengths = np.diff(np.append(firsts, count))
    keep = kinds[firsts] != SAME
    starts = np.array([vma.start for vma in after.vmas], np.uint64)
    found = []
    for first, length in zip(firsts[keep].tolist(), lengths[keep].tolist()):
        address = int(where[first])
        had, has = bool(old.pfns[first]), bool(new.pfns[first])
        found.append(Change(
            KINDS[kinds[first]], address, length * size,
            name_at(after, starts, address) or name_at(before, None, address),
            int(old.pfns[first]) if had else None, int(new.pfns[first]) if has else None,
            int(old.orders[first]) if had else None, int(new.orders[first]) if has else None))
    return found


def name_at(capture, starts, address):
    """Return the name of the mapping at an address, "" where there is none."""
    if starts is None:
        starts = np.array([vma.start for vma in capture.vmas], np.uint64)
    at = int(np.searchsorted(starts, np.uint64(address), side="right")) - 1
    return capture.vmas[at].path if at >= 0 and address < capture.vmas[at].end else ""


def left_frames(old, new, after):
    """Tell what the frames that the process left are now, where the later capture has all frames: kind -> bytes."""
    if after.frames is None:
        return None
    left = np.setdiff1d(old.pfns[old.pfns != 0], new.pfns)
    left = left[left < len(after.frames)].astype(np.int64)
    flags, mapcounts = after.frames.flags[left], after.frames.mapcounts[left]
    free = has_flag(flags, KPF_BUDDY)
    in_use = ~free & (mapcounts > 0)
    counts = {"free": free, "mapped by others": in_use,
              "used otherwise, or on a processor's free list": ~(free | in_use)}
    return {name: int(np.count_nonzero(which)) * after.page_size for name, which in counts.items()}


def notes(before, after):
    """Return what speaks against comparing the two."""
    found = []
    if before.pid != after.pid:
        found.append(f"two processes: {before.pid} and {after.pid}")
    elif (before.started, before.boot) != (after.started, after.boot):
        found.append(f"two processes: PID {before.pid} was given again, or the machine was started again")
    if before.kernel != after.kernel:
        found.append(f"two kernels: {before.kernel} and {after.kernel}")
    if before.when > after.when:
        found.append("the first capture is the later one")
    for which, capture in (("first", before), ("second", after)):
        found += [f"the {which} capture is partial: {text}" for text in capture.partial]
    return found
