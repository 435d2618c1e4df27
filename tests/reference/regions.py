"""What registering a buffer pins, charges and describes: RDMA regions and io_uring buffers, a page at a time.

Each is made after the engine was asked to make its own: by then the process has been told which frames it has. Making one
raises Refused where the engine had to refuse. What was faulted in before that stays, as it does there.
"""
import errno as E

from . import Refused
from .lists import Table

PAGE, TOP = 4096, 1 << 64
LOCAL_WRITE, REMOTE_WRITE, REMOTE_ATOMIC, MW_BIND, ON_DEMAND = 1, 2, 8, 16, 64
BATCH = PAGE // 8           # pages that a region pins before it lists them
MOST_BUFFER = 1 << 30


def up(n):
    return -(-n // PAGE) * PAGE


class Region:
    """An RDMA region: every page pinned once and charged once, however often it was registered before."""

    def __init__(self, process, addr, size, access, max_segment=2**32 - 1):
        self.process = process
        self.writable = bool(access & (LOCAL_WRITE | REMOTE_WRITE | REMOTE_ATOMIC | MW_BIND))
        if up(addr + size) >= TOP:
            raise Refused(E.EINVAL)
        if process.limit == 0:
            raise Refused(E.EPERM)
        if access & ON_DEMAND:
            raise Refused(E.EOPNOTSUPP)
        self.pages = range(addr // PAGE, up(addr + size) // PAGE)
        if size == 0:
            raise Refused(E.EINVAL)
        if process.above(process.pinned + len(self.pages)):
            raise Refused(E.ENOMEM)
        process.bring(self.pages, self.writable)
        self.frames = [process.frames[page] for page in self.pages]
        process.pinned += len(self.pages)
        table = Table(PAGE)
        for at in range(0, len(self.frames), BATCH):
            batch = self.frames[at:at + BATCH]
            table.append(batch, 0, len(batch) * PAGE, max_segment, len(self.frames) - at - len(batch))
        self.entries = table.entries()

    def pins(self):
        return self.frames

    def release(self):
        """Give back pins and charge; returns the frames whose folios are dirty now."""
        self.process.pinned -= len(self.frames)
        return self.frames if self.writable else []


class Buffer:
    """A registered buffer: one pin a folio if all folios are alike and lie in it whole, one a page otherwise."""

    def __init__(self, process, addr, size):
        self.tables = 0
        if size == 0 or size > MOST_BUFFER or addr == 0:
            raise Refused(E.EFAULT)
        if up(addr + size) >= TOP:
            raise Refused(E.EOVERFLOW)
        self.pages = range(addr // PAGE, up(addr + size) // PAGE)
        process.bring(self.pages, True)
        self.frames = [process.frames[page] for page in self.pages]
        self.folio = {frame: process.folio(frame) for frame in self.frames}     # (head, order), while it is pinned
        groups = self.groups()
        self.coalesced = self.alike(groups)
        if not self.coalesced:
            groups = [[frame] for frame in self.frames]
        self.held = [frames[0] for frames in groups]
        # A piece begins where its first page lies in the folio; without coalescing the page itself is named.
        self.bvecs = [[frames[0] - self.index(frames[0]), self.index(frames[0]) * PAGE, len(frames) * PAGE] if self.coalesced
                      else [frames[0], 0, PAGE] for frames in groups]
        self.bvecs[0][1] += addr % PAGE
        self.bvecs[0][2] -= addr % PAGE
        self.bvecs[-1][2] -= up(addr + size) - addr - size

    def index(self, frame):
        return frame - self.folio[frame][0]

    def groups(self):
        """Neighbours that follow each other in one folio."""
        groups = []
        for frame in self.frames:
            if groups and frame == groups[-1][-1] + 1 and self.folio[frame] == self.folio[groups[-1][-1]]:
                groups[-1].append(frame)
            else:
                groups.append([frame])
        return groups

    def alike(self, groups):
        orders = {self.folio[frames[0]][1] for frames in groups}
        return len(self.frames) > 1 and len(orders) == 1 and orders != {0} \
            and all(self.index(frames[0]) == 0 for frames in groups[1:]) \
            and all(self.index(frames[-1]) + 1 == 1 << self.folio[frames[-1]][1] for frames in groups[:-1])

    def pins(self):
        return self.held


class Buffers:
    """The table of a ring: slots that hold a Buffer or nothing; None before anything is registered.

    `made`: the buffers that it registered and that it or a clone of it still has. They charge its process: a small page
    each time, a large folio whole and once.
    """

    def __init__(self, process):
        self.process, self.slots, self.made = process, None, []

    def cost(self):
        folios = [buffer.folio[frame] for buffer in self.made for frame in buffer.frames]
        return sum(order == 0 for _, order in folios) + sum(1 << order for _, order in set(folios) if order)

    def add(self, addr, size):
        if addr == size == 0:
            return None
        buffer, before = Buffer(self.process, addr, size), self.cost()
        self.made.append(buffer)
        try:
            self.process.lock(self.cost() - before)
        except Refused:
            self.made.remove(buffer)
            raise
        buffer.maker = self
        return buffer

    def forget(self, buffer):
        """Nobody has it any more."""
        before = self.cost()
        self.made.remove(buffer)
        self.process.lock(self.cost() - before)

    @staticmethod
    def take(buffers):
        for buffer in filter(None, buffers):
            buffer.tables += 1

    @staticmethod
    def drop(buffers):
        for buffer in filter(None, buffers):
            buffer.tables -= 1
            if buffer.tables == 0:
                buffer.maker.forget(buffer)

    # -- the system calls --------------------------------------------------------------------------------------------------
    def register(self, wanted):
        """All, or none."""
        if self.slots is not None:
            raise Refused(E.EBUSY)
        made = []
        try:
            for addr, size in wanted:
                made.append(self.add(addr, size))
        except Refused:
            self.take(made)
            self.drop(made)
            raise
        self.take(made)
        self.slots = made

    def update(self, at, wanted):
        """Slot after slot; returns how many, when a later one is refused."""
        if self.slots is None:
            raise Refused(E.ENXIO)
        for done, (addr, size) in enumerate(wanted):
            try:
                new = self.add(addr, size)
            except Refused:
                if done == 0:
                    raise
                return done
            self.take([new])
            self.drop([self.slots[at + done]])
            self.slots[at + done] = new
        return len(wanted)

    def clone(self, source):
        if self.slots is not None:
            raise Refused(E.EBUSY)
        if source.slots is None:
            raise Refused(E.ENXIO)
        self.take(source.slots)
        self.slots = list(source.slots)

    def unregister(self):
        if self.slots is None:
            raise Refused(E.ENXIO)
        self.drop(self.slots)
        self.slots = None
