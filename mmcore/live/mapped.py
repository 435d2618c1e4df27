"""What backs each mapping: bytes by folio size and kind, alignment, and which huge pages it may have."""

from dataclasses import asdict, dataclass, field

import numpy as np

from .backing import folio_sizes, kind_bytes
from .thp import rules, why_not_huge
from .units import format_size


@dataclass(frozen=True)
class MappingBacking:
    """The pages of one mapping that were looked at; sizes are bytes."""

    start: int
    end: int
    perms: str
    name: str
    length: int                  # bytes of it inside the captured ranges
    present: int
    swapped: int
    alignment: int               # of its start: the largest power of two that divides it, up to 1 GiB
    contiguous: int              # longest physically contiguous run
    by_leaf: "int | None"        # bytes mapped by PMD or PUD entries; None: this kernel does not say
    by_size: dict = field(default_factory=dict)
    by_kind: dict = field(default_factory=dict)
    aligned: dict = field(default_factory=dict)      # folio size -> bytes whose address is aligned like their frame
    eligible: "bool | None" = None                   # the kernel's own THPeligible; None before Linux 5.0
    sizes: list = field(default_factory=list)        # thp.SizeRule of each folio size
    reason: str = ""                                 # why it is not huge, "" if it is huge throughout

    def as_dict(self) -> dict:
        """Return plain data for JSON."""
        data = asdict(self)
        for name in ("by_size", "by_kind", "aligned"):
            data[name] = {str(key): value for key, value in data[name].items()}
        return data

    @property
    def allowed(self) -> "list[int]":
        """Return the folio sizes that the rules allow it, in bytes."""
        return [rule.size for rule in self.sizes if not rule.reason]

    def eligibility(self) -> str:
        """Return in words which sizes it may have, or why none."""
        if not self.sizes:
            return "unknown: the capture has no settings"
        if not self.allowed:
            return f"no: {self.sizes[-1].reason}"
        text = "yes: " + ", ".join(map(format_size, self.allowed))
        largest = self.sizes[-1]
        if not largest.reason and not largest.free_blocks:
            text += f"; no block of {format_size(largest.size)} is free, so that memory must be compacted first"
        return text


def by_mapping(capture):
    """Return a MappingBacking for each mapping of a capture, in address order."""
    from .backing import physical_runs

    addresses = capture.addresses
    found = []
    for vma in capture.vmas:
        first, last = np.searchsorted(addresses, np.array([vma.start, vma.end - 1], np.uint64)).tolist()
        last += int(last < len(addresses) and int(addresses[last]) < vma.end)
        part = slice(first, last)
        pfns, orders, flags = capture.pfns[part], capture.orders[part], capture.flags[part]
        here = pfns != 0
        size = capture.page_size
        lengths = physical_runs(pfns, size)[1]
        found.append(MappingBacking(
            start=vma.start, end=vma.end, perms=vma.perms, name=vma.path, length=(last - first) * size,
            present=int(np.count_nonzero(here)) * size,
            swapped=int(np.count_nonzero(capture.words[part] >> np.uint64(62) & np.uint64(1))) * size,
            alignment=min(vma.start & -vma.start, 1 << 30) if vma.start else 1 << 30,
            contiguous=int(lengths.max(initial=0)) * size,
            by_leaf=None if capture.leaves is None else int(np.count_nonzero(capture.leaves[part] & here)) * size,
            by_size=folio_sizes(orders[here], size), by_kind=kind_bytes(flags[here], size),
            aligned=aligned(addresses[part][here], pfns[here], orders[here], size),
            eligible=bool(vma.sizes["THPeligible"]) if "THPeligible" in vma.sizes else None,
            sizes=rules(vma, capture.machine, capture.thp_disabled),
            reason=why_not_huge(vma, capture.machine, capture.thp_disabled)))
    return found


def aligned(addresses, pfns, orders, page_size):
    """Return folio size -> bytes whose address lies at the same offset in the size as their frame does.

    Only such pages can share one entry of a larger page table, or be mapped together.
    """
    inside = (np.uint64(1) << orders.astype(np.uint64)) - np.uint64(1)
    same = (addresses // np.uint64(page_size) & inside) == (pfns & inside)
    return folio_sizes(orders[same], page_size)
