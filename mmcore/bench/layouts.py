"""Page lists to measure on: which folios the memory is made of, and in which order a list names their pages.

Every folio keeps the one reference it was allocated with, so that releasing pins never frees. The same arguments give
the same layout each time.
"""
from dataclasses import dataclass

import numpy as np

import mmcore as mmc

SEED = 20210203
MAX_MIXED_ORDER = 9


@dataclass
class Layout:
    """A Memory, a page list over it, and what the list is made of."""

    mem: mmc.Memory
    pages: mmc.PageList
    contiguous: bool            # each PFN follows the one before
    nr_folios: int

    @property
    def nr(self):
        """Entries of the list."""
        return len(self.pages)

    @property
    def first(self):
        """Page of the first entry."""
        return self.mem.page(int(self.pages.pfns[0]))

    def close(self):
        """Give the memory back; views of it that callers made must be gone."""
        self.pages = None
        self.mem.close()


def expand(pfns, orders):
    """Return the PFNs of all pages of folios, folio by folio."""
    counts = np.left_shift(1, np.asarray(orders, dtype=np.int64))
    offsets = np.arange(int(counts.sum()), dtype=np.int64) - np.repeat(np.cumsum(counts) - counts, counts)
    return (np.repeat(np.asarray(pfns).astype(np.int64), counts) + offsets).astype(np.uint64)


def _memory(nr_pages, **config):
    # Beyond the pages: what is reserved, and what aligning the first folio leaves.
    size = 4096 * (nr_pages + 4096)
    return mmc.Memory((size + (1 << 21) - 1) >> 21 << 21, **config)


def _layout(mem, pfns, nr_folios):
    pages = mmc.PageList(mem, pfns)
    contiguous = bool((np.diff(pages.pfns.astype(np.int64)) == 1).all())
    return Layout(mem, pages, contiguous, nr_folios)


def in_order(pfns, order, rng):
    """The pages as they lie in memory."""
    return pfns


def backwards(pfns, order, rng):
    """The whole list from its end."""
    return pfns[::-1]


def folios_backwards(pfns, order, rng):
    """Folios from the last to the first, the pages of each in order."""
    return pfns.reshape(-1, 1 << order)[::-1].ravel()


def every_other(pfns, order, rng):
    """Every second page."""
    return pfns[::2]


def permuted_inside(pfns, order, rng):
    """Folios in order, the pages of each in random order."""
    return rng.permuted(pfns.reshape(-1, 1 << order), axis=1).ravel()


def shuffled(pfns, order, rng):
    """Folios in random order, the pages of each in order."""
    return rng.permutation(pfns.reshape(-1, 1 << order)).ravel()


def uniform(nr_pages, order, arrange=in_order):
    """Lay out nr_pages pages in folios of one order, as the functions above arrange them.

    Orders beyond the allocator's largest are hugetlb folios from a pool.
    """
    nr = nr_pages >> order
    if nr == 0:
        raise mmc.InvalidArgument(f"{nr_pages} pages hold no folio of order {order}")
    rng = np.random.default_rng(SEED)
    if order > 10:
        # A pool lies at a multiple of its page size: room for one more.
        mem = _memory((nr + 1) << order, hugetlb={4096 << order: nr})
        heads = [mmc.folio_alloc(mem, order, hugetlb=True).pfn for _ in range(nr)]
    elif order == 0:
        mem = _memory(nr_pages)
        heads = mmc.alloc_pages_bulk(mem, nr).pfns
    else:
        mem = _memory(nr_pages)
        # PFNs 0 and 1 are taken.
        heads = np.arange(1, nr + 1, dtype=np.uint64) << np.uint64(order)
        mmc.folios_alloc_at(mem, heads, order)
    pfns = expand(np.sort(np.asarray(heads, dtype=np.uint64)), np.full(nr, order))
    return _layout(mem, arrange(pfns, order, rng), nr)


def mixed(nr_pages, equal_by, shuffle=False):
    """Lay out nr_pages pages in folios of orders 0-9 that the allocator places.

    equal_by "folio": each order as often; "page": each order with as many pages. In memory order, or folios shuffled.
    """
    orders = np.arange(MAX_MIXED_ORDER + 1)
    weights = {"folio": np.ones(len(orders)), "page": 0.5 ** orders}[equal_by]
    rng = np.random.default_rng(SEED)
    mean = (weights * (1 << orders)).sum() / weights.sum()
    drawn = rng.choice(orders, size=int(nr_pages / mean * 1.2) + 64, p=weights / weights.sum())
    ends = np.cumsum(1 << drawn)
    drawn = drawn[:int(np.searchsorted(ends, nr_pages, side="right"))]
    mem = _memory(nr_pages + (nr_pages >> 6))
    alloc = mmc.folio_alloc
    heads = np.fromiter((alloc(mem, order).pfn for order in drawn.tolist()), np.uint64, len(drawn))
    place = rng.permutation(len(heads)) if shuffle else np.argsort(heads)
    return _layout(mem, expand(heads[place], drawn[place]), len(heads))
