"""Everything over one memory: processes, and who holds which of its frames; from that, what every counter must say."""
import errno as E
from collections import Counter

from . import Refused
from .spaces import READ, WRITE, Space

PAGE, BIAS = 4096, 1024


class Process:
    """An address space, its limits and its charges. Which frames it has, and what folios they are of, it is told."""

    def __init__(self, world, space=None, limit=None, user="root"):
        """limit: pages, RLIMIT_MEMLOCK; None with CAP_IPC_LOCK, which counts all the same."""
        self.world, self.space, self.limit, self.user = world, space or Space(), limit, user
        self.frames = {}            # page -> PFN
        self.pinned = self.locked = 0
        self.alive = True

    def fork(self):
        return Process(self.world, self.space.fork(), self.limit, self.user)

    def folio(self, frame):
        """(PFN of the head, order) of a frame's folio."""
        return self.world.folio_of(frame)

    def may(self, page, write):
        area = self.space.area.get(page)
        return bool(area and area.prot & (WRITE if write else READ) and (area.share is None or area.offset < area.share.size))

    def bring(self, pages, write):
        """Fault pages in for a longterm pin, which gives each private one a page of its own; ends at the first that it may not."""
        for page in pages:
            if not self.may(page, write):
                raise Refused(E.EFAULT)
            self.space.touched.add(page)
            if self.space.area[page].share is None:
                self.space.populated.add(page)

    # -- charges -------------------------------------------------------------------------------------------------------
    def above(self, total):
        return self.limit is not None and total > self.limit

    def lock(self, n):
        """Charge the user of a ring, whom CAP_IPC_LOCK exempts, and the process."""
        if self.limit is not None:
            if n > 0 and self.above(self.world.users[self.user] + n):
                raise Refused(E.ENOMEM)
            self.world.users[self.user] += n
        self.pinned += n

    # -- as a container sees it (vfio.py) --------------------------------------------------------------------------------
    def over(self, more):
        return self.above(self.locked + more)

    def pfn(self, vaddr, write):
        page = vaddr // PAGE
        return self.frames.get(page, 0) if self.may(page, write) else None


class World:
    """Processes and holders. A holder is whatever has pins(): the frames that it pins, each as often as it does."""

    def __init__(self, folio_of):
        """folio_of(frame): (head, order), from the engine: it is told, not decided here."""
        self.folio_of = folio_of
        self.processes, self.holders = [], []
        self.users = Counter()      # pages that rings have locked, by user

    def pins(self):
        """Pins by frame."""
        return Counter(frame for holder in self.holders for frame in holder.pins())

    def differences(self, folios):
        """What folios say differently: (PFN, order, refcount, pincount, mappings, references of a file's cache) of each.

        Every reference has one owner: an entry of a table, the cache of a file, or a pin (1024 of a small folio's; of a
        large one 1, counted twice). Folios that are not listed must hold no pins.
        """
        count = Counter()
        for frame, n in self.pins().items():
            count[self.folio_of(frame)[0]] += n
        found = []
        for pfn, order, refcount, pincount, mapped, cached in folios:
            pins = count.pop(pfn, 0)
            if order and pincount != pins:
                found.append(f"folio {pfn:#x} of order {order}: _pincount is {pincount}, should be {pins}")
            should = mapped + cached + (pins if order else pins * BIAS)
            if refcount != should:
                found.append(f"folio {pfn:#x} of order {order}: _refcount is {refcount}, should be {should}: "
                             f"{mapped} entries, {cached} of a file, {pins} pins")
        return found + [f"folio {pfn:#x} should have {pins} pins, and is not in use" for pfn, pins in count.items()]
