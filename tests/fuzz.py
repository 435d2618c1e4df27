"""Random calls of everything public, mostly wrong, from fixed seeds."""
import random

import numpy as np

import mmcore as mmc
from calls import CALLS, Count, FOLIO, FOLIOS, LIVE_FOLIO, LIVE_PAGE, MEMORY, PAGE, PAGES, consume
from mmcore import BadPage, DevicePages, FOLL_GET, FOLL_PCI_P2PDMA, FOLL_PIN, Memory, MMError, PageList, PageRanges
from support import state

DOCUMENTED = (MMError, BadPage, TypeError)      # InvalidArgument is an MMError

SHAPES = {
    "small": dict(size="256K"),
    "plain": dict(size="16M"),
    "zones": dict(size="16M", movable="4M", cma="4M", hugetlb={"2M": 2, "64K": 4}),
    "devices": dict(size="8M", devices=[DevicePages("64K"), DevicePages("128K", align="32K"),
                                        DevicePages("64K", type="fsdax"), DevicePages("2M", type="pci_p2pdma", align="2M")]),
    "debug": dict(size="16M", hugetlb={"2M": 1}, debug=True),
    "64K pages": dict(size="64M", page_size="64K", hugetlb={"2M": 4}),
}

NUMBERS = [0, 1, 2, 3, 4, 7, 8, 15, 16, 511, 512, 513, 1023, 1024, 1025, 4095, 4096, (1 << 20) - 1, 1 << 20, (1 << 21) - 1,
           1 << 21, 1 << 22, (1 << 31) - 1, 1 << 31, (1 << 32) - 1, 1 << 32, 1 << 52, 1 << 63, (1 << 64) - 1, 1 << 64, -1, -2,
           -12, -14, -4095, -4096, -(1 << 31), -(1 << 63), 1 << 100]
NONSENSE = [None, "1", 1.5, True, [], (), {}, b"x", object(), float("nan"), -1, 1 << 70, Memory, [None], [[1]], range(3)]

# Calls that wait for a folio lock; the fuzz has one thread, which would wait for itself.
WAITS = {"folio_lock"}
# Left out: what nothing can tell from a right call. A frozen folio that nobody unfreezes is lost; and on a small folio
# with 512 and more plain references an unpin too many takes those instead, after which the counters are off for good.
UNBALANCED = {"folio_ref_freeze", "folio_ref_unfreeze", "folio_lock", "folio_trylock"}
OFTEN = ["put_page", "folio_put", "unpin_user_page", "unpin_user_folio", "unpin_user_pages", "release_pages", "grab_pages",
         "try_grab_folio", "unpin_user_pages_dirty_lock", "unpin_user_page_range_dirty_lock", "folio_alloc", "folio_get",
         "folio_split", "folios_put", "unpin_folios", "alloc_pages_bulk", "folio_alloc_at"]
OPTIONS = {
    "try_grab_folio": ("flags", [FOLL_PIN, FOLL_GET, 0, FOLL_PIN | FOLL_GET, FOLL_PIN | FOLL_PCI_P2PDMA, -1, 1 << 40]),
    "grab_pages": ("flags", [FOLL_PIN, FOLL_GET, FOLL_GET, 0, FOLL_PIN | FOLL_GET, FOLL_GET | FOLL_PCI_P2PDMA, "x"]),
    "put_compound_head": ("flags", [FOLL_PIN, FOLL_GET, 0, FOLL_PIN | FOLL_GET]),
    "unpin_user_pages": ("release", ["run", "head", "page", "none"]),
    "unpin_user_pages_dirty_lock": ("release", ["run", "head", "page", None]),
    "release_pages": ("release", ["run", "page", "head", 3]),
    "folio_alloc": ("zone", [None, "Normal", "Movable", "CMA", "DMA"]),
    "folio_alloc_at": ("hugetlb", [False, True]),
}


PLAIN = (FOLL_GET, FOLL_GET | FOLL_PCI_P2PDMA)


def same_frames(before, after):
    """Compare struct pages; a frame that was tried and given back may read as free now, and before as never used."""
    before, after = (np.frombuffer(text[:len(before)], np.dtype((np.void, 64))) for text in (before, after))
    if len(before) > len(after):
        return False
    changed = np.flatnonzero(before != after)
    return all(not frames.view(mmc.PAGE_DTYPE)[changed][word].any() for frames in (before, after)
               for word in ("compound_info", "mapping", "_refcount"))


class Fuzz:
    """Calls on one Memory; `refusals` counts by the kind of error, `calls` by the name of what was called."""

    def __init__(self, shape, seed):
        kwargs = dict(SHAPES[shape])
        self.rng = random.Random(f"{shape} {seed}")
        self.mem = Memory(kwargs.pop("size"), **kwargs)
        self.other, closed = Memory("1M"), Memory("1M")
        self.foreign = [mmc.folio_alloc(self.other, order) for order in (0, 3)]
        self.foreign += [folio.page for folio in self.foreign]
        self.closed = [closed, mmc.folio_alloc(closed, 0), mmc.alloc_page(closed)]
        closed.close()
        self.handles = [self.mem.zero_page, self.mem.folio(1)]
        for device in self.mem.devices:
            self.handles += [self.mem.folio(device.start_pfn), self.mem.page(device.start_pfn + device.nr_pages - 1)]
        self.pinned, self.names = [], sorted(CALLS.keys() - UNBALANCED)
        self.refusals, self.calls, self.done, self.compared = {}, {}, 0, 0

    # -- arguments ------------------------------------------------------------------------------------------------------
    def pfn(self):
        rng, what = self.rng, self.rng.random()
        if what < 0.5 and self.handles:
            handle = rng.choice(self.handles)
            return handle.pfn + rng.choice([0, 0, 0, 1, 2, 7])
        if what < 0.9:
            return rng.randrange(self.mem.nr_pages)
        return rng.choice(NUMBERS)

    def handle(self):
        """A page or folio: known, free, a tail, stale, another machine's, a closed one's, or none at all."""
        rng, what = self.rng, self.rng.random()
        if what < 0.62 and self.handles:
            return rng.choice(self.handles)
        if what < 0.90:
            pfn = self.pfn()
            if not self.mem.pfn_valid(pfn):
                pfn = 2
            return self.mem.page(pfn) if rng.random() < 0.5 else self.mem.folio(pfn)
        if what < 0.95:
            return rng.choice(self.foreign)
        if what < 0.97:
            return rng.choice(self.closed[1:])
        return rng.choice(NONSENSE)

    def pages(self):
        rng, what = self.rng, self.rng.random()
        if what < 0.35 and self.pinned:
            pages = rng.choice(self.pinned)
        elif what < 0.9:
            pfns = []
            for _ in range(rng.randint(0, 4)):
                start = rng.choice(self.handles).pfn if self.handles and rng.random() < 0.8 else self.pfn()
                run = list(range(start, start + rng.choice([1, 1, 2, 3, 8, 16, 40])))
                pfns += rng.choice([run, run, run[::-1], run * 2, [0], [1]])
            pages = PageList(self.mem, pfns)
        elif what < 0.95:
            return [self.handle() for _ in range(rng.randint(0, 3))]
        else:
            return rng.choice(NONSENSE)
        if rng.random() < 0.2 and isinstance(pages, PageList):
            return PageRanges.from_pagelist(pages)
        return pages[rng.randint(0, 3):] if rng.random() < 0.3 and isinstance(pages, PageList) else pages

    def argument(self, kind):
        rng = self.rng
        if kind == MEMORY:
            return self.mem if rng.random() < 0.97 else rng.choice([self.closed[0], None, 3])
        if kind in (FOLIO, LIVE_FOLIO):
            handle = self.handle()
            return handle.folio if isinstance(handle, mmc.Page) and rng.random() < 0.6 and handle.mem is self.mem else handle
        if kind in (PAGE, LIVE_PAGE):
            return self.handle()
        if kind == PAGES:
            return self.pages()
        if kind == FOLIOS:
            return [self.handle() for _ in range(rng.randint(0, 4))] if rng.random() < 0.95 else rng.choice(NONSENSE)
        if isinstance(kind, Count):
            what = rng.random()
            if what < 0.6:
                return rng.choice([0, 1, 1, 1, 2, 3, 8])
            return rng.choice(NUMBERS) if what < 0.95 else rng.choice(NONSENSE)
        if isinstance(kind.good, bool):
            return rng.random() < 0.5
        return [self.pfn() for _ in range(rng.randint(0, 3))] if rng.random() < 0.9 else rng.choice(NONSENSE)

    # -- calls ----------------------------------------------------------------------------------------------------------
    def step(self):
        rng, what = self.rng, self.rng.random()
        self.done += 1
        if what < 0.004:
            return self.attempt("memory_failure", self.mem.memory_failure, [self.handle()])
        if what < 0.02:
            return self.while_locked()
        if what < 0.03:
            return self.while_frozen()
        if what < 0.04:
            with self.mem.inject(rng.choice(["frame", "list", "alloc", "sg"]), rng.randint(1, 3)):
                return self.random_call()
        if what < 0.06 and len(self.handles) > 5:
            return self.let_go()
        self.random_call()

    def random_call(self, names=None):
        rng = self.rng
        name = rng.choice(names or (OFTEN if rng.random() < 0.5 else self.names))
        try:
            args = [self.argument(kind) for kind in CALLS[name]]
        except DOCUMENTED:
            return None         # a list that is refused already
        options = {}
        if name in OPTIONS and rng.random() < 0.5:
            key, values = OPTIONS[name]
            options[key] = rng.choice(values)
        if name == "try_grab_folio" and options.get("flags") in PLAIN and args[1] in NUMBERS and args[1] > 8:
            args[1] = 3
        return self.attempt(name, getattr(mmc, name), args, options)

    def attempt(self, name, function, args, options=None):
        """Call; only documented errors may come out, and in a sample of the calls a refusal is seen to change nothing."""
        # A frame that was never used reads otherwise once somebody tried to place a folio there and failed.
        before = state(self.mem) if self.rng.random() < 0.04 and name != "folios_alloc_at" else None
        self.calls[name] = self.calls.get(name, 0) + 1
        try:
            result = consume(function(*args, **(options or {})))
        except DOCUMENTED as e:
            self.refusals[type(e)] = self.refusals.get(type(e), 0) + 1
            if before:
                self.compared += 1
                after = state(self.mem)
                assert after[1:] == before[1:] and same_frames(before[0], after[0]), \
                    f"{name}{args} {options} was refused ({e}) and changed something"
            return None
        self.remember(name, result, args)
        return result

    def remember(self, name, result, args):
        if isinstance(result, (mmc.Folio, mmc.Page)):
            self.handles.append(result)
        elif isinstance(result, list):
            self.handles += [item for item in result if isinstance(item, mmc.Folio)]
        elif name == "alloc_pages_bulk":
            self.handles += list(result[:20])
            self.pinned.append(result)
        if name == "grab_pages" and isinstance(args[0], (PageList, PageRanges)):
            self.pinned.append(args[0])
        if len(self.handles) > 120:
            del self.handles[self.rng.randrange(len(self.handles))]
        del self.pinned[:-30]

    def while_locked(self):
        """Under a folio lock: no call that would wait for it, but those that must refuse to free the folio."""
        folio = self.argument(FOLIO)
        if self.attempt("folio_trylock", mmc.folio_trylock, [folio]):
            for _ in range(3):
                self.attempt("folio_put", mmc.folio_put, [folio])
                self.random_call(["folio_get", "unpin_user_page", "put_page", "folio_put", "unpin_user_pages", "folio_split"])
            mmc.folio_unlock(folio)     # nothing in between can have freed it, or made it a tail

    def while_frozen(self):
        folio = self.argument(FOLIO)
        count = self.rng.choice([getattr(folio, "refcount", 1) if getattr(folio, "mem", None) is self.mem else 1, 1, 2, 0, -1])
        if self.attempt("folio_ref_freeze", mmc.folio_ref_freeze, [folio, count]):
            for _ in range(3):
                name = self.rng.choice(["folio_get", "folio_put", "folio_try_get", "unpin_folio", "folio_split",
                                        "folio_mark_dirty"])
                self.attempt(name, getattr(mmc, name), [folio] + [0] * (name == "folio_split"))
            mmc.folio_ref_unfreeze(folio, count)

    def let_go(self):
        """Give something back properly, so that memory does not only fill up."""
        folio = self.rng.choice(self.handles)
        folio = folio.folio if isinstance(folio, mmc.Page) else self.mem.folio(folio.pfn)
        for call in (lambda: mmc.unpin_user_folio(folio, folio.pincount), lambda: mmc.folio_put_refs(folio, folio.refcount)):
            self.attempt("let go", lambda call: call(), [call])
