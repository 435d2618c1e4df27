"""Release of pinned page lists: every generation of the engine against C peers and a NumPy peer, by layout of the list."""
from dataclasses import dataclass
from functools import partial

import numpy as np

import mmcore as mmc

from . import layouts
from .measure import Bar, Sweeper, Variant, interleave, rows_of
from .peers import NoPeers, Peers
from .report import progress

GENERATIONS = ("run", "head", "page")

#: gup_test of Linux, 16 GiB of THP: release one by one against release by neighbouring heads (February 2021), ms.
PUBLISHED = (87.6, 23.2)
PUBLISHED_NOTE = f"published: {PUBLISHED[0]} -> {PUBLISHED[1]} ms, {PUBLISHED[0] / PUBLISHED[1]:.1f}x"
PUBLISHED_WHY = """\
The published 87.6 -> 23.2 ms for 16 GiB of THP (gup_test, 2021) is 20.9 -> 5.5 ns/page. The gain has the same cause
here and there: two counter updates a page become two a folio. What stays is the head look-up: one 64-byte struct page
for each entry, 256 MiB of them. The kernel's figures hold more work on each side of the arrow that is not here (a
statistics update and out-of-line calls a page before; lists of 512 pages, each with its own call, after), on another
machine; so the times differ, and the ratio is near but not the same. `run` removes what `head` leaves: it does not look
at the tails."""


@dataclass
class Case:
    """A layout, and what the engine must reach on it."""

    name: str
    build: object               # nr_pages -> Layout
    bars: tuple = ()
    nr_min: int = 1             # pages the layout needs


def faster(against, times, variant="run", note=""):
    """Demand: the variant is at least so many times faster."""
    return Bar(variant, against, at_least=times, note=note)


def within(against, times, variant="run"):
    """Demand: the variant takes at most so many times what the other one takes."""
    return Bar(variant, against, at_most=times)


SAME_IN_C = (within("C run", 1.10), within("C head", 1.10, "head"), within("C page", 1.10, "page"),
             within("C range", 1.10, "range"))


def uniform(order, arrange=layouts.in_order):
    """Return a builder of layouts with folios of one order."""
    return partial(layouts.uniform, order=order, arrange=arrange)


def mixed(equal_by, shuffle=False):
    """Return a builder of layouts with orders 0-9."""
    return partial(layouts.mixed, equal_by=equal_by, shuffle=shuffle)


SAME_LIST = (faster("C head", 4), faster("page", 8))

CASES = (
    Case("order 9", uniform(9), (faster("C head", 6), faster("page", 10), faster("page", 50, "range"),
                                 Bar("head", "page", note=PUBLISHED_NOTE)), 512),
    Case("order 9, reversed", uniform(9, layouts.backwards), SAME_LIST, 512),
    Case("order 9, folios reversed", uniform(9, layouts.folios_backwards), SAME_LIST, 512),
    Case("order 9, every other page", uniform(9, layouts.every_other), SAME_LIST, 512),
    Case("order 9, permuted inside", uniform(9, layouts.permuted_inside), SAME_LIST, 512),
    Case("order 18, hugetlb", uniform(18), (faster("page", 12),), 1 << 18),
    Case("order 4", uniform(4), (faster("C head", 2), faster("page", 4)), 16),
    Case("order 3", uniform(3), (within("C head", 1.05),), 8),
    Case("order 2", uniform(2), (within("C head", 1.05),), 4),
    Case("order 1", uniform(1), (within("C head", 1.05),), 2),
    Case("order 0", uniform(0), (within("C page", 1.05),)),
    Case("order 0, shuffled", uniform(0, layouts.shuffled), (faster("C head", 2), faster("page", 1.3))),
    Case("orders 0-9 equal by folio", mixed("folio"), (faster("C head", 2),), 1024),
    Case("orders 0-9 equal by folio, shuffled", mixed("folio", True), (faster("C head", 2.5),), 1024),
    Case("orders 0-9 equal by pages", mixed("page"), (within("C head", 1.20), faster("page", 1.3)), 1024),
    Case("orders 0-9 equal by pages, shuffled", mixed("page", True), (faster("C head", 1.5),), 1024),
)


def heads_and_counts(words, pfns):
    """Group a list in NumPy: the heads, each once, and how many entries are in each folio."""
    word = words[pfns]
    mask = ((word & np.uint64(1)) - np.uint64(1)) | word
    return np.unique(((pfns << np.uint64(6)) & mask) >> np.uint64(6), return_counts=True)


class NumPyPeer:
    """What one writes without an engine: np.unique and np.subtract.at, on a copy of the counters, without atomics."""

    def __init__(self, layout):
        self.layout = layout

    def before(self):
        """Copy the counters as they are when the list is pinned."""
        pages = self.layout.mem.pages
        self.refs = pages["_refcount"].astype(np.int64)
        self.pins = np.zeros(len(pages), dtype=np.int64)
        heads, counts = heads_and_counts(pages["compound_info"], self.layout.pages.pfns)
        large = (pages["flags"][heads] >> np.uint64(6)) & np.uint64(1) != 0
        self.refs[heads] += np.where(large, counts, counts << 10)
        self.pins[heads[large]] = counts[large]

    def run(self):
        """Drop one pin of each page of the list."""
        pages = self.layout.mem.pages
        heads, counts = heads_and_counts(pages["compound_info"], self.layout.pages.pfns)
        large = (pages["flags"][heads] >> np.uint64(6)) & np.uint64(1) != 0
        np.subtract.at(self.pins, heads[large], counts[large])
        np.subtract.at(self.refs, heads, np.where(large, counts, counts << 10))
        if (self.refs[heads] < 1).any():
            raise RuntimeError("a folio would be left without a reference")


def variants_of(layout, peers):
    """Return the ways to release the list of a layout. peers: Peers, or the text that says why there are none."""
    mem, pages = layout.mem, layout.pages
    grab = partial(mmc.grab_pages, pages)
    variants = [Variant(name, partial(mmc.unpin_user_pages, pages, release=name), grab) for name in GENERATIONS]
    if layout.contiguous:
        variants.append(Variant("range", partial(mmc.unpin_user_page_range_dirty_lock, layout.first, layout.nr, False),
                                grab))
    names = [f"C {variant.name}" for variant in variants]
    for name in names:
        kind = name[2:]
        if not isinstance(peers, Peers):
            variants.append(Variant(name, None, missing=peers))
        elif kind == "range":
            variants.append(Variant(name, peers.on_range(mem, layout.first.pfn, layout.nr), grab))
        else:
            variants.append(Variant(name, peers.on_list(kind, mem, pages), grab))
    numpy = NumPyPeer(layout)
    variants.append(Variant("NumPy", numpy.run, numpy.before))
    return variants


def load_peers(source):
    """Return Peers, or the text that says why there are none."""
    try:
        return Peers(source)
    except NoPeers as reason:
        return str(reason)


def measure_case(case, nr_pages, rounds, peers, sweep):
    """Lay one case out, measure it, and return its rows."""
    layout = case.build(max(nr_pages, case.nr_min))
    try:
        variants = variants_of(layout, peers)
        samples = interleave(variants, rounds, sweep)
        return rows_of(case.name, variants, layout.nr, samples, case.bars + SAME_IN_C)
    finally:
        del variants
        layout.close()


def measure(cases, nr_pages, rounds, source):
    """Measure cases one after the other; returns their rows. source: the peers' C file."""
    peers, sweep = load_peers(source), Sweeper()
    rows = []
    for case in cases:
        progress(case.name)
        rows += measure_case(case, nr_pages, rounds, peers, sweep)
    return rows
