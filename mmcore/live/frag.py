"""How free memory is broken up: the blocks of the allocator, what of it is unusable by order, and the largest runs.

buddyinfo counts blocks up to the allocator's largest order. With the frames of a capture the free runs are found across
blocks; every page of a free block is flagged there.
"""

from dataclasses import asdict, dataclass, field

import numpy as np

from .pagemap import KPF_BUDDY, has_flag

LARGEST = 10            # free runs listed


@dataclass(frozen=True)
class ZoneFrag:
    """The free memory of one zone, in pages."""

    node: int
    zone: str
    free: int                  # nr_free_pages of zoneinfo; the processors' own lists lie outside of both
    in_blocks: int             # what the blocks add up to
    blocks: tuple              # free blocks by order
    unusable: tuple            # by order: the share of free pages in blocks too small for it, 0 to 1
    largest_order: "int | None"


@dataclass(frozen=True)
class Frag:
    """The fragmentation of a machine's free memory."""

    page_size: int
    zones: list = field(default_factory=list)       # ZoneFrag
    blocks: tuple = ()                              # of all zones
    unusable: tuple = ()
    runs: "list | None" = None                      # (first PFN, pages), the longest first; None: no frames were seen
    free_runs: "int | None" = None                  # how many runs there are

    def as_dict(self) -> dict:
        """Return plain data for JSON."""
        return asdict(self)


def unusable_free(blocks):
    """Return by order the share of free pages that an allocation of it cannot use: those in smaller blocks.

    1 where nothing is free, as the kernel's unusable_index says.
    """
    pages = [count << order for order, count in enumerate(blocks)]
    total = sum(pages)
    return tuple((sum(pages[:order]) / total if total else 1.0) for order in range(len(pages)))


def free_runs(flags, edges=()):
    """Return (first PFNs, lengths) of the runs of free frames; edges: PFNs at which a run ends, those of zones."""
    free = has_flag(flags, KPF_BUDDY)
    starts = np.flatnonzero(free & ~np.concatenate(([False], free[:-1])))
    stops = np.flatnonzero(free & ~np.concatenate((free[1:], [False]))) + 1
    for edge in edges:
        at = int(np.searchsorted(starts, edge, side="right")) - 1
        if at >= 0 and starts[at] < edge < stops[at]:
            starts, stops = np.insert(starts, at + 1, edge), np.insert(stops, at, edge)
    return starts, stops - starts


def frag(machine, frames=None):
    """Tell how free memory is fragmented: Frag. machine: Machine; frames: Frames of the same moment, or None."""
    zones = []
    for zone in machine.zones:
        if zone.blocks:
            orders = [order for order, count in enumerate(zone.blocks) if count]
            zones.append(ZoneFrag(zone.node, zone.name, zone.free, zone.free_in_blocks, zone.blocks,
                                  unusable_free(zone.blocks), orders[-1] if orders else None))
    runs = count = None
    if frames is not None:
        edges = sorted({edge for zone in machine.zones if zone.spanned for edge in (zone.start_pfn, zone.end_pfn)})
        starts, lengths = free_runs(frames.flags, edges)
        longest = np.argsort(-lengths, kind="stable")[:LARGEST]
        runs = [(int(starts[at]), int(lengths[at])) for at in longest]
        count = len(starts)
    blocks = tuple(machine.free_blocks)
    return Frag(machine.page_size, zones, blocks, unusable_free(blocks), runs, count)
