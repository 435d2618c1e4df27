"""Physical memory and buffers as pictures, as data: a grid of cells, each of what most of its frames are used for, and
a strip of boxes, one a folio, wider the larger the folio.
"""

from dataclasses import dataclass, field

import numpy as np

from .colours import ABSENT, ANON, ANON_LARGE, CLASSES, FILE, FREE, HUGETLB, KERNEL, SHMEM
from .frames import SECTION
from .pagemap import (
    KPF_ANON, KPF_BUDDY, KPF_COMPOUND_HEAD, KPF_COMPOUND_TAIL, KPF_HUGE, KPF_HWPOISON, KPF_LRU, KPF_NOPAGE, KPF_OFFLINE,
    KPF_PGTABLE, KPF_RESERVED, KPF_SLAB, KPF_SWAPBACKED, KPF_THP, KPF_UNEVICTABLE, KPF_UPTODATE, KPF_WRITEBACK,
)

BLOCK = 2 << 20           # bytes of the smallest cell chosen unasked: a page block of x86
ROWS = 40                 # rows chosen unasked, at most


def _any(flags, *bits):
    return flags & np.uint64(sum(1 << bit for bit in bits)) != 0


def classify(flags, zones=()):
    """Return the class of each frame, as an index of colours.CLASSES; index = PFN where zones are given.

    Frames outside every zone are absent, and so are whole sections without one flag: memory that the kernel has not
    taken into use. A single frame without a flag is the kernel's, or on a processor's own free list.
    """
    classes = np.full(len(flags), KERNEL, np.uint8)
    classes[_any(flags, KPF_LRU, KPF_UNEVICTABLE, KPF_UPTODATE, KPF_WRITEBACK)] = FILE
    classes[_any(flags, KPF_SWAPBACKED)] = SHMEM
    anon = _any(flags, KPF_ANON)
    classes[anon] = ANON
    classes[anon & _any(flags, KPF_COMPOUND_HEAD, KPF_COMPOUND_TAIL, KPF_THP)] = ANON_LARGE
    classes[_any(flags, KPF_SLAB, KPF_PGTABLE, KPF_RESERVED)] = KERNEL
    classes[_any(flags, KPF_HUGE)] = HUGETLB
    classes[_any(flags, KPF_BUDDY)] = FREE
    classes[_any(flags, KPF_NOPAGE, KPF_OFFLINE, KPF_HWPOISON)] = ABSENT
    spanned = [(zone.start_pfn, zone.end_pfn) for zone in zones if zone.spanned]
    if spanned:
        outside = np.ones(len(flags), bool)
        for first, last in spanned:
            outside[first:last] = False
        classes[outside] = ABSENT
        for first in range(0, len(flags) - SECTION + 1, SECTION):
            if not flags[first:first + SECTION].any():
                classes[first:first + SECTION] = ABSENT
    return classes


@dataclass(frozen=True)
class Grid:
    """Physical memory in cells of `.cell_pages` frames from `.first_pfn` on, `.columns` a row.

    `.cells`: uint8, the class that most frames of the cell have; `.marks`: how many frames of the cell are pointed at;
    `.totals`: class name -> frames.
    """

    page_size: int
    first_pfn: int
    cell_pages: int
    columns: int
    cells: np.ndarray
    marks: np.ndarray
    totals: dict = field(default_factory=dict)

    @property
    def rows(self):
        """Return the number of rows."""
        return -(-len(self.cells) // self.columns)

    @property
    def cell_bytes(self):
        """Return the bytes of a cell."""
        return self.cell_pages * self.page_size

    def address(self, row):
        """Return the physical address at which a row starts."""
        return (self.first_pfn + row * self.columns * self.cell_pages) * self.page_size

    def letters(self):
        """Return a text a row: the letter of each cell's class, "*" where an eighth of it and more is pointed at."""
        text = np.array([one.letter for one in CLASSES])[self.cells]
        text[self.marks * 8 >= self.cell_pages] = "*"
        return ["".join(text[first:first + self.columns]) for first in range(0, len(text), self.columns)]

    def as_dict(self):
        """Return plain data for JSON."""
        return {"page_size": self.page_size, "first_pfn": self.first_pfn, "cell_pages": self.cell_pages,
                "columns": self.columns, "rows": self.letters(), "totals": self.totals,
                "marks": {str(at): int(self.marks[at]) for at in np.flatnonzero(self.marks).tolist()},
                "classes": {one.letter: one.name for one in CLASSES}}


def grid(flags, page_size, zones=(), first=0, last=None, cell=None, columns=64, rows=ROWS, marks=()):
    """Draw frames first to last - 1 as a Grid.

    flags: kpageflags words, index = PFN. cell: bytes of a cell, a power of two of pages; None chooses the smallest of
    2 MiB and more that needs no more than `rows` rows. marks: PFNs to point at. Raises ValueError for a cell that is
    no power of two of pages, or where there is no frame to draw.
    """
    last = len(flags) if last is None else min(last, len(flags))
    if first >= last:
        raise ValueError(f"there are frames up to PFN {len(flags) - 1:#x}, none from {first:#x} on")
    if cell is None:
        cell_pages = max(1, BLOCK // page_size)
        while cell_pages > 1 and (last - first) // cell_pages < columns:
            cell_pages //= 2
        while -(-(last - first) // cell_pages) > columns * rows:
            cell_pages *= 2
    else:
        cell_pages = cell // page_size
        if cell % page_size or not cell_pages or cell_pages & (cell_pages - 1):
            raise ValueError(f"a cell is a power of two of pages of {page_size} bytes, not {cell} bytes")
    if -(-(last - first) // cell_pages) > 1 << 22:
        raise ValueError(f"{-(-(last - first) // cell_pages)} cells are too many to draw; "
                         "choose larger ones, or fewer frames")
    first = first // cell_pages * cell_pages
    # Zones are told apart by PFN, so that all frames are classified before a part is drawn.
    classes = classify(flags[:last], zones)[first:]
    edges = np.arange(0, len(classes), cell_pages)
    counts = np.stack([np.add.reduceat((classes == one).astype(np.int32), edges) for one in range(len(CLASSES))])
    marks = np.unique(np.asarray(marks, np.uint64))
    marks = marks[(marks >= first) & (marks < last) & (marks != 0)]
    marked = np.bincount(((marks - np.uint64(first)) // np.uint64(cell_pages)).astype(np.int64), minlength=len(edges))
    totals = {one.name: int(n) for one, n in zip(CLASSES, counts.sum(axis=1))}
    return Grid(page_size, first, cell_pages, columns, counts.argmax(axis=0).astype(np.uint8), marked, totals)


def captured_flags(capture):
    """Return kpageflags words by PFN of what a capture without frames saw: its own pages; the rest is absent."""
    if not capture.pfns.any():
        raise ValueError("the capture has no page that is present: there is nothing to draw")
    flags = np.full(int(capture.pfns.max()) + 1, 1 << KPF_NOPAGE, np.uint64)
    here = capture.pfns != 0
    flags[capture.pfns[here].astype(np.int64)] = capture.flags[here]
    return flags


@dataclass(frozen=True)
class Box:
    """One folio, or the part of it that the buffer maps, or a hole (order None); `.count` equal ones in a row."""

    address: int
    pages: int
    order: "int | None"
    kind: int             # index of colours.CLASSES
    count: int = 1

    @property
    def width(self):
        """Return the width in units: 1 for a page, one more each time the folio doubles."""
        return 1 if self.order is None else 1 + self.order


@dataclass(frozen=True)
class Strip:
    """A mapping or range in address order as boxes, one a folio; `.groups` puts equal neighbours together."""

    name: str
    start: int
    end: int
    page_size: int
    groups: list = field(default_factory=list)

    @property
    def boxes(self):
        """Yield the boxes one by one."""
        for group in self.groups:
            for turn in range(group.count):
                yield Box(group.address + turn * group.pages * self.page_size, group.pages, group.order, group.kind)

    @property
    def folios(self):
        """Return how many folios there are."""
        return sum(group.count for group in self.groups if group.order is not None)

    def as_dict(self):
        """Return plain data for JSON."""
        return {"name": self.name, "start": self.start, "end": self.end, "boxes": [
            {"address": one.address, "pages": one.pages, "order": one.order, "class": CLASSES[one.kind].name,
             "count": one.count} for one in self.groups]}


def strips(capture, most=8):
    """Draw the mappings of a capture that have the most pages as Strips, in address order; at most so many."""
    addresses, found = capture.addresses, []
    for vma in capture.vmas:
        first, last = np.searchsorted(addresses, np.array([vma.start, vma.end - 1], np.uint64)).tolist()
        last += int(last < len(addresses) and int(addresses[last]) < vma.end)
        present = int(np.count_nonzero(capture.pfns[first:last]))
        if present:
            found.append((present, vma, first, last))
    largest = sorted(sorted(found, key=lambda one: -one[0])[:most], key=lambda one: one[1].start)
    return [strip(capture, vma.path, addresses, first, last) for _, vma, first, last in largest]


def strip(capture, name, addresses, first, last):
    """Draw the captured pages first to last - 1 as a Strip."""
    size = capture.page_size
    where, pfns, heads = addresses[first:last], capture.pfns[first:last], capture.heads[first:last]
    orders = np.where(pfns != 0, capture.orders[first:last].astype(np.int64), -1)
    kinds = np.where(pfns != 0, classify(capture.flags[first:last]), ABSENT)
    # A box goes on while the next page is the next one of the same folio; a hole while there is none.
    same = (heads[1:] == heads[:-1]) & (orders[1:] == orders[:-1]) & (np.diff(where) == size)
    same &= (pfns[1:] == pfns[:-1] + np.uint64(1)) & (orders[1:] > 0) | (orders[1:] < 0)
    starts = np.flatnonzero(np.concatenate(([True], ~same)))
    lengths = np.diff(np.append(starts, len(where)))
    groups = []
    alike = (orders[starts][1:] == orders[starts][:-1]) & (kinds[starts][1:] == kinds[starts][:-1])
    alike &= lengths[1:] == lengths[:-1]
    alike &= np.diff(where[starts]) == lengths[:-1].astype(np.uint64) * np.uint64(size)
    alike &= orders[starts][1:] >= 0
    edges = np.flatnonzero(np.concatenate(([True], ~alike)))
    for at, count in zip(edges.tolist(), np.diff(np.append(edges, len(starts))).tolist()):
        box = int(starts[at])
        order = int(orders[box])
        groups.append(Box(int(where[box]), int(lengths[at]), None if order < 0 else order, int(kinds[box]), count))
    return Strip(name, int(where[0]), int(where[-1]) + size, size, groups)
