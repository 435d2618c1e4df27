"""A plain engine to hold the real one against: dictionaries, one page at a time, nothing clever.

It does not choose frames: it is told which PFNs the real engine handed out (adopt), and from then on does by itself what
get, pin, unpin and put should do to them. Rules, as the kernel's documentation states them:

    pin of a small folio    _refcount + 1024            pin of a large one      _refcount + 1 and _pincount + 1
    the zero page           is never pinned             PFN 0                   is NULL and is stepped over
    huge zero folio         pinned as any large folio, but release_pages() and folios_put() leave it alone
    at _refcount 0          the folio is freed: into its pool, to its device, or to the page allocator

A call that would break a rule raises BadPage and leaves everything as it was.
"""
import contextlib
import copy
import errno

from . import Refused

BIAS = 1024
MANY = 512              # from so many plain references on, those of a small folio and its pins cannot be told apart


class BadPage(Exception):
    """The call would break a rule."""


class Folio:
    """One folio: `kind` is normal, hugetlb, zero, huge_zero, or the type of the device it belongs to."""

    def __init__(self, pfn, order, kind, refcount=1):
        self.pfn, self.order, self.kind = pfn, order, kind
        self.refcount, self.pincount = refcount, 0
        self.dirty = self.anon = self.locked = self.writeback = self.many = False
        self.mapcount = 0

    @property
    def nr(self):
        return 1 << self.order

    @property
    def large(self):
        return self.order > 0

    @property
    def pins(self):
        if self.kind == "zero":
            return 0
        return self.pincount if self.large else self.refcount // BIAS

    def __repr__(self):
        return f"<{self.kind} folio {self.pfn} order {self.order} ref {self.refcount} pin {self.pincount}>"


class Engine:
    """The folios of one machine, by the PFN of their heads, and the counters that /proc/vmstat would show."""

    DEVICES = ("generic", "fsdax", "coherent", "private", "pci_p2pdma")

    def __init__(self, free_pages=0, pools=None):
        self.folios = {}
        self.head_of = {}                       # every page of a folio in use -> its head
        self.pools = {order: [nr, nr] for order, nr in (pools or {}).items()}   # order -> [size, free]
        self.pooled = {}                        # heads that wait in their pool -> order
        self.acquired = self.released = self.nr_dirty = 0
        self.free_pages = free_pages
        self._dying = None

    # -- what the real engine handed out --------------------------------------------------------------------------
    def adopt(self, pfn, order, kind="normal", refcount=1, from_pool=False):
        """Take note of a folio; from_pool: it came out of a hugetlb pool, not out of free memory."""
        pages = range(pfn, pfn + (1 << order))
        assert pfn % (1 << order) == 0 and not any(p in self.head_of for p in pages), "overlaps what is in use"
        folio = self.folios[pfn] = Folio(pfn, order, kind, refcount)
        for p in pages:
            self.head_of[p] = pfn
        if from_pool:
            self.pools[order][1] -= 1
            self.pooled.pop(pfn, None)
        elif kind in ("normal", "hugetlb", "huge_zero"):
            self.free_pages -= folio.nr
        return folio

    def folio_of(self, pfn):
        """The folio that holds a page; a page in no folio is free, and nothing may be done to it."""
        if pfn not in self.head_of:
            raise BadPage(f"page {pfn} is free")
        return self.folios[self.head_of[pfn]]

    # -- all or nothing -------------------------------------------------------------------------------------------
    @contextlib.contextmanager
    def _call(self):
        before = {pfn: copy.copy(folio) for pfn, folio in self.folios.items()}
        counters = (self.acquired, self.released, self.nr_dirty)
        self._dying = []
        try:
            yield
        except Exception:
            self.folios = before
            self.acquired, self.released, self.nr_dirty = counters
            raise
        for folio in self._dying:
            self._free(folio)

    def _drop(self, folio, amount):
        if folio.refcount < amount:
            raise BadPage(f"{folio}: underflow")
        folio.refcount -= amount
        if folio.refcount:
            return
        if folio.locked or folio.writeback or folio.mapcount or folio.pincount:
            raise BadPage(f"{folio}: the last reference goes while it is in use")
        if folio.kind in ("zero", "huge_zero"):
            raise BadPage(f"{folio}: never freed")
        self._dying.append(folio)

    def _free(self, folio):
        if folio.dirty and not folio.anon:
            self.nr_dirty -= folio.nr
        folio.dirty = folio.many = False
        if folio.kind in self.DEVICES:
            folio.refcount = 1 if folio.kind == "generic" else 0
            return
        del self.folios[folio.pfn]
        for pfn in range(folio.pfn, folio.pfn + folio.nr):
            del self.head_of[pfn]
        pool = self.pools.get(folio.order) if folio.kind == "hugetlb" else None
        if pool and pool[1] < pool[0]:
            pool[1] += 1
            self.pooled[folio.pfn] = folio.order
        else:
            self.free_pages += folio.nr

    # -- one reference, one pin -----------------------------------------------------------------------------------
    def _get_one(self, folio):
        if folio.refcount <= 0:
            raise Refused(errno.ENOMEM)
        if not folio.large and folio.refcount % BIAS + 1 >= MANY:
            folio.many = True
        folio.refcount += 1

    def _put_one(self, folio):
        if not folio.large and not folio.many and folio.refcount % BIAS < 1:
            raise BadPage(f"{folio}: the put would eat a pin")
        if folio.large and folio.refcount - 1 < folio.pincount:
            raise BadPage(f"{folio}: more pins than references")
        self._drop(folio, 1)

    def _pin_one(self, folio):
        if folio.refcount <= 0:
            raise Refused(errno.ENOMEM)
        if folio.kind == "pci_p2pdma":
            raise Refused(errno.EREMOTEIO)
        if folio.kind == "zero":
            return
        folio.refcount += 1 if folio.large else BIAS
        folio.pincount += folio.large
        self.acquired += 1

    def _unpin_one(self, folio):
        if folio.kind == "zero":
            return
        if folio.pins < 1:
            raise BadPage(f"{folio}: not pinned")
        folio.pincount -= folio.large
        self.released += 1
        self._drop(folio, 1 if folio.large else BIAS)

    def _dirty_one(self, folio):
        if folio.dirty or folio.kind == "zero":
            return
        folio.dirty = True
        if not folio.anon:
            self.nr_dirty += folio.nr

    # -- the calls: lists of PFNs, NULL stepped over ----------------------------------------------------------------
    def get(self, pfns):
        with self._call():
            for pfn in pfns:
                if pfn:
                    if pfn not in self.head_of:
                        raise Refused(errno.ENOMEM)
                    self._get_one(self.folio_of(pfn))

    def pin(self, pfns):
        before, tried = self.acquired, 0
        try:
            with self._call():
                for pfn in pfns:
                    if pfn:
                        if pfn not in self.head_of:
                            raise Refused(errno.ENOMEM)
                        self._pin_one(self.folio_of(pfn))
                        tried = self.acquired - before
        except Refused:
            # What was taken and given back again was taken and given back: both counters show it.
            self.acquired += tried
            self.released += tried
            raise

    def unpin(self, pfns, make_dirty=False):
        """unpin_user_page, unpin_user_pages, unpin_user_pages_dirty_lock, the range variant; also unpin_folios."""
        with self._call():
            for pfn in pfns:
                if pfn:
                    folio = self.folio_of(pfn)
                    if make_dirty:
                        self._dirty_one(folio)
                    self._unpin_one(folio)

    def unpin_folio(self, head, n, make_dirty=False):
        """unpin_user_folio, unpin_user_folio_dirty_locked, put_compound_head(FOLL_PIN)."""
        self.unpin([head] * n, make_dirty)

    def put(self, pfns):
        """put_page, folio_put, folio_put_refs, put_compound_head(FOLL_GET)."""
        with self._call():
            for pfn in pfns:
                if pfn:
                    self._put_one(self.folio_of(pfn))

    def release(self, pfns):
        """release_pages, folios_put: as put, but for the huge zero folio."""
        with self._call():
            for pfn in pfns:
                if pfn and self.folio_of(pfn).kind != "huge_zero":
                    self._put_one(self.folio_of(pfn))

    def mark_dirty(self, pfn):
        self._dirty_one(self.folio_of(pfn))

    def clear_dirty(self, pfn):
        folio = self.folio_of(pfn)
        if folio.dirty and not folio.anon:
            self.nr_dirty -= folio.nr
        folio.dirty = False

    def split(self, head, new_order):
        """Split what nobody else holds: every piece gets one reference of the caller's and the dirty mark."""
        folio = self.folios[head]
        if new_order >= folio.order:
            raise Refused(errno.EINVAL)
        if folio.kind != "normal" or folio.writeback or folio.mapcount:
            raise Refused(errno.EBUSY)
        if folio.refcount != 1:
            raise Refused(errno.EAGAIN)
        del self.folios[head]
        for pfn in range(head, head + folio.nr, 1 << new_order):
            piece = self.folios[pfn] = Folio(pfn, new_order, "normal")
            piece.dirty, piece.anon = folio.dirty, folio.anon
            for p in range(pfn, pfn + piece.nr):
                self.head_of[p] = pfn

    # -- comparing --------------------------------------------------------------------------------------------------
    def statistics(self):
        return {"nr_foll_pin_acquired": self.acquired, "nr_foll_pin_released": self.released, "nr_dirty": self.nr_dirty,
                "nr_free_pages": self.free_pages}

    def live_pins(self):
        return sum(folio.pins for folio in self.folios.values())

    def differences(self, pages, watched=()):
        """What a mem_map (a structured array) says differently. `watched`: PFNs that must read as free when they are."""
        found = []

        def differ(pfn, what, is_, should):
            if is_ != should:
                found.append(f"pfn {pfn}: {what} is {is_}, should be {should}")

        for folio in self.folios.values():
            head = pages[folio.pfn]
            differ(folio.pfn, "_refcount", int(head["_refcount"]), folio.refcount)
            differ(folio.pfn, "dirty", bool(head["flags"] & 1 << 4), folio.dirty)
            differ(folio.pfn, "locked", bool(head["flags"] & 1), folio.locked)
            differ(folio.pfn, "head", bool(head["flags"] & 1 << 6), folio.large)
            if folio.large:
                tail = pages[folio.pfn + 1]
                # _pincount is the second half of the word that a page calls mapping
                differ(folio.pfn, "_pincount", int(tail["mapping"]) >> 32, folio.pincount)
                differ(folio.pfn, "order", int(tail["flags"]) & 0xFF, folio.order)
                words = {int(word) for word in pages["compound_info"][folio.pfn + 1:folio.pfn + folio.nr]}
                differ(folio.pfn, "tail words", words, {(~0 << folio.order + 6) & (1 << 64) - 1 | 1})
                differ(folio.pfn, "tail counts", int(abs(pages["_refcount"][folio.pfn + 1:folio.pfn + folio.nr]).max()), 0)
        for pfn in watched:
            if pfn in self.head_of or pfn >= len(pages):
                continue
            if not any(head <= pfn < head + (1 << order) for head, order in self.pooled.items()):
                differ(pfn, "_refcount of a free page", int(pages[pfn]["_refcount"]), 0)
                differ(pfn, "flags of a free page", int(pages[pfn]["flags"]) & (1 << 26) - 1, 0)
                differ(pfn, "tail word of a free page", int(pages[pfn]["compound_info"]), 0)
        return found


# ---- the iterators, said plainly ------------------------------------------------------------------------------------
def list_groups(pfns, head_of):
    """for_each_compound_head: neighbours in the list that have one head are a group; NULL belongs to none and ends one."""
    groups, last = [], None
    for pfn in pfns:
        head = head_of(pfn) if pfn else None
        if head is not None and head == last:
            groups[-1][1] += 1
        elif head is not None:
            groups.append([head, 1])
        last = head
    return [tuple(group) for group in groups]


def range_groups(start, npages, head_of):
    """for_each_compound_range: the same over consecutive PFNs."""
    return list_groups(range(start, start + npages), head_of)


def next_group(pfns, i, head_of):
    """compound_next: the group at i, from i on."""
    return list_groups(pfns[i:], head_of)[0]


def contiguous_prefix(pfns):
    """num_pages_contiguous: how many entries from the first on are consecutive frames; NULL is followed by none."""
    n = 1
    while pfns[0] and n < len(pfns) and pfns[n] == pfns[0] + n:
        n += 1
    return n


def remaining_pages(pfn, head, order, most=None):
    """folio_remaining_pages: pages of the folio from this one on, itself included."""
    n = sum(1 for p in range(head, head + (1 << order)) if p >= pfn)
    return n if most is None else min(n, most)
