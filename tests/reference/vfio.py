"""A plain VFIO container: dictionaries of pages, no batches, no queues. What it says, the engine must do.

A process is a list of PFNs behind a buffer (None: a hole), none of which follows another, so that each page is a chunk.
A call returns its result, or raises Refused with the errno; then nothing has changed.
"""
import errno as E

from . import Refused

PAGE, TOP = 4096, 1 << 64
WRITE = 2


class Process:
    def __init__(self, addr, pfns, limit):
        self.addr, self.pfns, self.limit, self.locked = addr, pfns, limit, 0     # limit None: CAP_IPC_LOCK

    def pfn(self, vaddr, write):
        """The page behind an address, None. All may be written here."""
        index = (vaddr - self.addr) // PAGE
        return self.pfns[index] if 0 <= index < len(self.pfns) else None

    def over(self, more):
        return self.limit is not None and self.locked + more > self.limit


class Mapping:
    def __init__(self, process, vaddr, iova, size, prot):
        self.process, self.vaddr, self.iova, self.size, self.prot = process, vaddr, iova, size, prot
        self.last = iova + size - 1
        self.mapped = self.invalid = False
        self.cap = process.limit is None
        self.charged = 0
        self.pages = []         # PFNs that IOMMUs hold
        self.pins = {}          # iova: [pfn, references]
        self.dirty = set()      # numbers of pages

    def covers(self, first, last):
        return self.iova <= last and first <= self.last

    def charge(self, n):
        if n > 0 and not self.cap and self.process.over(n):
            raise Refused(E.ENOMEM)
        self.process.locked += n
        self.charged += n

    def pin_all(self):
        """Pin and charge for an IOMMU, or nothing of it."""
        got, before = [], self.charged
        try:
            for at in range(0, self.size, PAGE):
                pfn = self.process.pfn(self.vaddr + at, self.prot & WRITE)
                if pfn is None:
                    raise Refused(E.EFAULT)
                inside = sum(self.iova + at <= iova < self.iova + at + PAGE for iova in self.pins)
                self.charge(1 - inside)
                got.append(pfn)
        except Refused:
            self.process.locked -= self.charged - before
            self.charged = before
            raise
        self.pages, self.mapped = got, True


class Container:
    def __init__(self, v2, entries):
        self.v2, self.entries = v2, entries
        self.maps, self.domains, self.tracking = [], 0, False
        self.devices = 0        # emulated ones

    # ---- asking ------------------------------------------------------------------------------------------------------
    def at(self, iova):
        return next((m for m in self.maps if m.iova <= iova <= m.last), None)

    @property
    def invalid(self):
        return sum(m.invalid for m in self.maps)

    def pins(self):
        """The frames pinned: one for each mapping's page, one for each external pin."""
        return [pfn for m in self.maps for pfn in m.pages + [pfn for pfn, _ in m.pins.values()]]

    def translation(self, iova):
        m = self.at(iova)
        return m.pages[(iova - m.iova) // PAGE] if m and m.mapped else None

    # ---- mapping -----------------------------------------------------------------------------------------------------
    def map(self, process, vaddr, iova, size, flags):
        if size == 0:
            raise Refused(E.EINVAL)
        if iova + size > TOP or vaddr + size > TOP:
            raise Refused(E.EOVERFLOW)
        if bool(flags & 3) == bool(flags & 4):
            raise Refused(E.EINVAL)
        if (size | iova | vaddr) % PAGE:
            raise Refused(E.EINVAL)
        there = sorted((m for m in self.maps if m.covers(iova, iova + size - 1)), key=lambda m: m.iova)
        if flags & 4:
            return self.update(there[0] if there else None, process, vaddr, iova, size)
        if there:
            raise Refused(E.EEXIST)
        if len(self.maps) == self.entries:
            raise Refused(E.ENOSPC)
        m = Mapping(process, vaddr, iova, size, flags)
        if self.domains:
            m.pin_all()
        self.maps.append(m)
        self.maps.sort(key=lambda m: m.iova)
        return None

    def update(self, m, process, vaddr, iova, size):
        if m is None:
            raise Refused(E.ENOENT)
        if not m.invalid or (m.iova, m.size) != (iova, size):
            raise Refused(E.EINVAL)
        if process is not m.process:
            if m.charged and process.over(m.charged):
                raise Refused(E.ENOMEM)
            process.locked += m.charged
            m.process.locked -= m.charged
        m.process, m.vaddr, m.invalid, m.cap = process, vaddr, False, process.limit is None

    def unmap(self, iova, size, everything=False, invalidate=False):
        if invalidate and self.devices:
            raise Refused(E.EBUSY)
        if iova % PAGE:
            raise Refused(E.EINVAL)
        if everything:
            if iova or size:
                raise Refused(E.EINVAL)
            last = TOP - 1
        else:
            if size == 0 or size % PAGE:
                raise Refused(E.EINVAL)
            if iova + size > TOP:
                raise Refused(E.EOVERFLOW)
            last = iova + size - 1
            if self.v2 and any(m.covers(iova, last) and (m.iova < iova or m.last > last) for m in self.maps):
                raise Refused(E.EINVAL)
        gone = [m for m in self.maps if m.covers(iova, last)]
        if not self.v2 and gone and gone[0].iova < iova:
            return 0
        if invalidate:
            if any(m.invalid for m in gone):
                raise Refused(E.EINVAL)
            for m in gone:
                m.invalid = True
        else:
            for m in gone:
                for at in list(m.pins):         # its driver is told, and unpins
                    while at in m.pins:
                        self.unpin(at, 1)
                self.remove(m)
        return sum(m.size for m in gone)

    def remove(self, m):
        if m.mapped:
            self.take_back(m, len(m.pages))
        self.maps.remove(m)

    @staticmethod
    def take_back(m, n):
        m.process.locked -= n
        m.charged -= n

    # ---- domains -----------------------------------------------------------------------------------------------------
    def attach(self):
        if self.invalid:
            raise Refused(E.EBUSY)
        done = []
        try:
            for m in self.maps:
                if not m.mapped:
                    before = m.charged
                    m.pin_all()
                    done.append((m, before))
        except Refused:
            for m, before in done:
                self.take_back(m, m.charged - before)
                m.pages, m.mapped = [], False
            raise
        self.domains += 1

    def detach(self):
        self.domains -= 1
        if self.domains == 0:
            for m in list(self.maps):
                if self.devices:
                    self.take_back(m, len(m.pages) - len(m.pins))
                    m.pages, m.mapped = [], False
                else:
                    m.pins.clear()
                    self.remove(m)
        if self.tracking:
            for m in self.maps:
                m.dirty = set(range(m.size // PAGE))

    # ---- drivers -----------------------------------------------------------------------------------------------------
    def pin(self, iova, npage, prot):
        if npage < 1:
            raise Refused(E.EINVAL)
        if not self.v2:
            raise Refused(E.EACCES)
        if iova + npage * PAGE > TOP:
            raise Refused(E.EOVERFLOW)
        if self.invalid:
            raise Refused(E.EBUSY)
        if not self.devices:
            raise Refused(E.EINVAL)
        done = []
        try:
            for at in range(iova, iova + npage * PAGE, PAGE):
                m = self.at(at)
                if m is None:
                    raise Refused(E.EINVAL)
                if m.prot & prot != prot:
                    raise Refused(E.EPERM)
                if at in m.pins:
                    m.pins[at][1] += 1
                else:
                    pfn = m.process.pfn(m.vaddr + at - m.iova, prot & WRITE)
                    if pfn is None:
                        raise Refused(E.EFAULT)
                    if not self.domains:
                        m.charge(1)
                    m.pins[at] = [pfn, 1]
                done.append(at)
                m.dirty.add((at - m.iova) // PAGE)
        except Refused:
            for at in done:
                self.unpin(at, 1)
            raise
        return [self.at(at).pins[at][0] for at in done]

    def unpin(self, iova, npage):
        if npage < 1:
            raise Refused(E.EINVAL)
        if not self.v2:
            raise Refused(E.EACCES)
        if iova + npage * PAGE > TOP:
            raise Refused(E.EOVERFLOW)
        where = [(at, self.at(at)) for at in range(iova, iova + npage * PAGE, PAGE)]
        if any(m is None for _, m in where):
            raise Refused(E.EINVAL)
        for at, m in where:
            if at in m.pins:
                m.pins[at][1] -= 1
                if m.pins[at][1] == 0:
                    del m.pins[at]
                    if not self.domains:
                        self.take_back(m, 1)

    # ---- dirty -------------------------------------------------------------------------------------------------------
    def track(self, on):
        if not self.v2:
            raise Refused(E.EACCES)
        if on and not self.tracking:
            for m in self.maps:
                m.dirty = {(at - m.iova) // PAGE for at in m.pins}
        self.tracking = on

    def bitmap(self, iova, size):
        """Numbers of the dirty pages in a range."""
        if not self.v2:
            raise Refused(E.EACCES)
        if not self.tracking or any(m.covers(iova, iova + size - 1) and (m.iova < iova or m.last >= iova + size) for m in self.maps):
            raise Refused(E.EINVAL)
        out = set()
        for m in self.maps:
            if m.covers(iova, iova + size - 1):
                pages = range(m.size // PAGE) if self.domains and m.mapped else m.dirty
                out |= {(m.iova - iova) // PAGE + page for page in pages}
                m.dirty = {(at - m.iova) // PAGE for at in m.pins}
        return sorted(out)
