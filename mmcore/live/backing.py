"""What backs a buffer, from plain arrays: folio sizes, physical runs, scatterlist entries.

Works on captured pages and on modelled ones alike.
"""

from dataclasses import asdict, dataclass, field, replace

import numpy as np

from .pagemap import (
    KPF_ANON, KPF_COMPOUND_HEAD, KPF_COMPOUND_TAIL, KPF_HUGE, KPF_KSM, KPF_NOPAGE,
    KPF_SWAPBACKED, KPF_ZERO_PAGE, has_flag,
)
from .units import format_size

LISTED = 20                    # mappings that the text names
MAX_SEGMENT = 0xFFFFF000       # bytes: UINT_MAX rounded down to a page of any size we know


@dataclass(frozen=True)
class Backing:
    """The pages behind a buffer. Sizes are bytes that the buffer maps, not whole folios."""

    page_size: int
    length: int                    # bytes looked at
    present: int                   # bytes with a page
    pages: int                     # pages present
    folios: int                    # distinct folios behind them
    runs: int                      # physically contiguous runs, in buffer order
    sg_segments: int               # runs cut at the largest scatterlist segment
    by_size: "dict[int, int]" = field(default_factory=dict)      # folio size in bytes -> bytes mapped
    by_kind: "dict[str, int]" = field(default_factory=dict)      # "anon", "shmem", "file", ... -> bytes
    not_huge: list = field(default_factory=list)     # [(start, end, reason)]
    mappings: list = field(default_factory=list)     # MappingBacking of each mapping; empty for a model

    def as_dict(self) -> dict:
        """Return plain data for JSON."""
        data = asdict(replace(self, mappings=[]))
        data["mappings"] = [one.as_dict() for one in self.mappings]
        data["by_size"] = {str(size): nbytes for size, nbytes in self.by_size.items()}
        return data

    def lines(self) -> "list[str]":
        """Return the report as lines of text."""
        out = [
            f"{format_size(self.length)}: {self.pages} pages in {self.folios} folios, "
            f"{self.runs} physical runs, {self.sg_segments} scatterlist segments"
        ]
        for size, nbytes in sorted(self.by_size.items()):
            out.append(f"{format_size(size)} folios: {format_size(nbytes)}")
        if self.present < self.length:
            out.append(f"not present: {format_size(self.length - self.present)}")
        for one in self.mappings[:LISTED]:
            sizes = ", ".join(f"{format_size(size)} folios {format_size(n)}" for size, n in sorted(one.by_size.items()))
            huge = f"not huge: {one.reason}" if one.reason else "huge"
            out.append(f"{one.start:#x}-{one.end:#x} aligned to {format_size(one.alignment)}: "
                       f"{sizes or 'not present'}; {huge}")
        if len(self.mappings) > LISTED:
            out.append(f"and {len(self.mappings) - LISTED} more mappings")
        return out

    def __str__(self) -> str:
        return "\n".join(self.lines())


def describe(pfns, heads, orders, flags, page_size, not_huge=()):
    """Return the Backing of pages in buffer order; PFN 0 is a hole."""
    here = pfns != 0
    present = int(np.count_nonzero(here))
    run_lengths = physical_runs(pfns, page_size)[1]
    per_segment = MAX_SEGMENT // page_size
    return Backing(
        page_size=page_size,
        length=len(pfns) * page_size,
        present=present * page_size,
        pages=present,
        folios=_distinct(heads[here]),
        runs=len(run_lengths),
        sg_segments=int(np.sum(-(-run_lengths // per_segment))),
        by_size=folio_sizes(orders[here], page_size),
        by_kind=kind_bytes(flags[here], page_size),
        not_huge=list(not_huge),
    )


def folio_sizes(orders, page_size):
    """Return folio size in bytes -> bytes of the pages of these orders."""
    counts = np.bincount(orders)
    return {page_size << order: int(counts[order]) * page_size for order in np.flatnonzero(counts).tolist()}


def kind_bytes(flags, page_size):
    """Return kind -> bytes of the pages with these kpageflags words."""
    return {kind: pages * page_size for kind, pages in kinds(flags).items() if pages}


def _distinct(values):
    # np.unique hashes, which is ten times slower on millions of nearly sorted PFNs.
    ordered = np.sort(values)
    return int(np.count_nonzero(ordered[1:] != ordered[:-1])) + bool(len(values))


def physical_runs(pfns, page_size=4096):
    """Return (first indexes, lengths in pages) of the runs that a scatterlist would merge.

    A run goes on while the PFN is the next one; a hole belongs to none.
    """
    if not len(pfns):
        return np.zeros(0, np.int64), np.zeros(0, np.int64)
    joined = np.zeros(len(pfns), bool)
    joined[1:] = (pfns[1:] == pfns[:-1] + np.uint64(1)) & (pfns[:-1] != 0)
    firsts = np.flatnonzero(~joined)
    lengths = np.diff(np.append(firsts, len(pfns)))
    some = pfns[firsts] != 0
    return firsts[some], lengths[some]


def kinds(flags):
    """Return pages by kind, from kpageflags words; each page is counted once."""
    zero = has_flag(flags, KPF_ZERO_PAGE)
    compound = has_flag(flags, KPF_COMPOUND_HEAD) | has_flag(flags, KPF_COMPOUND_TAIL)
    nopage = has_flag(flags, KPF_NOPAGE)
    hugetlb = has_flag(flags, KPF_HUGE)
    ksm = has_flag(flags, KPF_KSM)
    anon = has_flag(flags, KPF_ANON)
    swapbacked = has_flag(flags, KPF_SWAPBACKED)
    # In order: a page belongs to the first kind that fits.
    rules = (
        ("huge zero", zero & compound),
        ("zero page", zero),
        ("no struct page", nopage),
        ("hugetlb", hugetlb),
        ("ksm", ksm),
        ("anon", anon),
        ("shmem", swapbacked),
        ("file", np.ones(len(flags), bool)),
    )
    left = np.ones(len(flags), bool)
    counts = {}
    for name, rule in rules:
        mine = rule & left
        counts[name] = int(np.count_nonzero(mine))
        left &= ~mine
    return counts
