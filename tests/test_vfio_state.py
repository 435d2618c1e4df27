"""A container against the plain one of reference/vfio.py: any calls in any order, every law after each of them."""
from collections import Counter

import numpy as np
import pytest
from hypothesis import settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from mmcore import *
from reference import Refused, vfio as plain
from vfio_support import *

PAGES = 24                      # behind each process's buffer
HOLE = 20
ENTRIES = 5
IOVAS = st.one_of(st.integers(0, 11).map(lambda n: n * PAGE), st.integers(TOP // PAGE - 6, TOP // PAGE - 1).map(lambda n: n * PAGE))
SIZES = st.integers(1, 6).map(lambda n: n * PAGE)
ODD = st.sampled_from([0, 0, 0, 0, 0, 1, PAGE // 2])
SMALL = dict(max_examples=150, stateful_step_count=50, deadline=None)


def buffer(mem, limit, cap):
    """(MM, its plain counterpart): pages that do not follow each other, with a hole."""
    mm = MM(mem, rlimit_memlock=limit, cap_ipc_lock=cap)
    addr, other = mm.mmap(PAGES * PAGE), mm.mmap(PAGES * PAGE)
    for i in range(PAGES):
        mm.touch(addr + i * PAGE, PAGE)
        mm.touch(other + i * PAGE, PAGE)
    mm.munmap(addr + HOLE * PAGE, PAGE)
    mm.munmap(other, PAGES * PAGE)
    pfns = [None if i == HOLE else mm.page_at(addr + i * PAGE).pfn for i in range(PAGES)]
    return mm, plain.Process(addr, pfns, None if mm.cap_ipc_lock else limit // PAGE)


class Both(RuleBasedStateMachine):
    """Every call goes to both; they end alike, and look alike after."""

    @initialize(v2=st.sampled_from([True, True, True, False]), options=st.sampled_from(GENERATIONS), single=st.booleans())
    def begin(self, v2, options, single):
        self.mem = Memory("16M", debug=True)
        self.sides = [buffer(self.mem, 14 * PAGE, False), buffer(self.mem, 3 * PAGE, True)]
        self.c = VFIOContainer(self.mem, VFIO_TYPE1v2_IOMMU if v2 else VFIO_TYPE1_IOMMU, dma_entry_limit=ENTRIES, disable_hugepages=single,
                               **options)
        self.p = plain.Container(v2, ENTRIES)

    def both(self, ours, theirs):
        before = seen(self.c)
        try:
            expected = theirs()
        except Refused as refusal:
            with pytest.raises(MMError) as caught:
                ours()
            assert caught.value.errno == refusal.errno, (caught.value, refusal)
            assert seen(self.c) == before
            return None
        got = ours()
        assert got == expected
        return got

    # ---- calls -------------------------------------------------------------------------------------------------------
    @rule(side=st.integers(0, 1), page=st.integers(-1, PAGES - 1), iova=IOVAS, size=st.one_of(SIZES, SIZES, st.just(0)), odd=ODD,
          flags=st.sampled_from([3, 3, 3, 1, 2, 0, 7]))
    def map(self, side, page, iova, size, odd, flags):
        mm, process = self.sides[side]
        vaddr = process.addr + page * PAGE
        self.both(lambda: self.c.map_dma(mm, vaddr, iova + odd, size, flags), lambda: self.p.map(process, vaddr, iova + odd, size, flags))

    @rule(iova=IOVAS, size=st.one_of(SIZES, SIZES, st.just(0)), odd=ODD)
    def unmap(self, iova, size, odd):
        self.both(lambda: self.c.unmap_dma(iova + odd, size), lambda: self.p.unmap(iova + odd, size))

    @rule(data=st.data())
    def unmap_one(self, data):
        if self.p.maps:
            m = data.draw(st.sampled_from(self.p.maps))
            self.both(lambda: self.c.unmap_dma(m.iova, m.size), lambda: self.p.unmap(m.iova, m.size))

    @rule(invalidate=st.booleans(), iova=st.sampled_from([0, 0, PAGE]))
    def unmap_all(self, invalidate, iova):
        flags = ALL | (UNMAP_VADDR if invalidate else 0)
        self.both(lambda: self.c.unmap_dma(iova, 0, flags), lambda: self.p.unmap(iova, 0, True, invalidate))

    @rule(data=st.data(), iova=IOVAS)
    def invalidate(self, data, iova):
        size = PAGE
        if self.p.maps and data.draw(st.booleans()):
            m = data.draw(st.sampled_from(self.p.maps))
            iova, size = m.iova, m.size
        self.both(lambda: self.c.unmap_dma(iova, size, UNMAP_VADDR), lambda: self.p.unmap(iova, size, invalidate=True))

    @precondition(lambda self: self.p.maps)
    @rule(data=st.data(), side=st.integers(0, 1), page=st.integers(0, 10), wrong=st.sampled_from([0, 0, 0, PAGE]))
    def new_vaddr(self, data, side, page, wrong):
        mm, process = self.sides[side]
        m = data.draw(st.sampled_from(self.p.maps))
        iova, size, vaddr = m.iova, m.size + wrong, process.addr + page * PAGE
        self.both(lambda: self.c.map_dma(mm, vaddr, iova, size, VADDR), lambda: self.p.map(process, vaddr, iova, size, 4))

    @precondition(lambda self: self.p.domains < 3)
    @rule()
    def attach(self):
        self.both(lambda: self.c.attach(IOMMUDomain(self.mem)), self.p.attach)

    @precondition(lambda self: self.p.domains)
    @rule(which=st.integers(0, 2))
    def detach(self, which):
        domain = self.c.domains[which % self.p.domains]
        self.c.detach(domain)
        self.p.detach()
        assert domain.stats["leaves"] == 0 and domain.stats["tables"] == 1

    @precondition(lambda self: not self.p.devices)
    @rule()
    def register(self):
        self.c.register_device(self.told)
        self.p.devices = 1

    def told(self, iova, size):
        for m in self.c.mappings:
            if m.iova == iova:
                for pin in m.pins:
                    for _ in range(pin.ref_count):
                        self.c.unpin_pages(pin.iova, 1)

    @rule(iova=IOVAS, odd=ODD, npage=st.integers(0, 4), prot=st.integers(1, 3))
    def pin(self, iova, odd, npage, prot):
        def ours():
            return list(self.c.pin_pages(iova + odd, npage, prot).pfns)
        self.both(ours, lambda: self.p.pin(iova + odd, npage, prot))

    @rule(data=st.data(), odd=ODD)
    def pin_in_a_mapping(self, data, odd):
        if self.p.maps:
            m = data.draw(st.sampled_from(self.p.maps))
            n = data.draw(st.integers(1, 4))
            self.both(lambda: list(self.c.pin_pages(m.iova + odd, n, m.prot).pfns), lambda: self.p.pin(m.iova + odd, n, m.prot))

    @rule(data=st.data(), iova=IOVAS, npage=st.integers(0, 4))
    def unpin(self, data, iova, npage):
        there = [at for m in self.p.maps for at in m.pins]
        if there and data.draw(st.booleans()):
            iova, npage = data.draw(st.sampled_from(there)), 1
        self.both(lambda: self.c.unpin_pages(iova, npage), lambda: self.p.unpin(iova, npage))

    @rule(on=st.booleans())
    def track(self, on):
        self.both(self.c.dirty_pages_start if on else self.c.dirty_pages_stop, lambda: self.p.track(on))

    @rule(iova=IOVAS, pages=st.integers(1, 12))
    def bitmap(self, iova, pages):
        size = min(pages * PAGE, TOP - iova)

        def ours():
            bitmap = np.frombuffer(self.c.dirty_pages_get_bitmap(iova, size, PAGE), np.uint8)
            return np.flatnonzero(np.unpackbits(bitmap, bitorder="little")).tolist()
        self.both(ours, lambda: self.p.bitmap(iova, size))

    # ---- laws --------------------------------------------------------------------------------------------------------
    @invariant()
    def laws(self):
        c, p = self.c, self.p
        maps = c.mappings
        assert [(m.iova, m.size, m.vaddr, m.prot, m.iommu_mapped, m.vaddr_invalid, m.locked_vm, m.lock_cap) for m in maps] == \
            [(m.iova, m.size, m.vaddr, m.prot, m.mapped, m.invalid, m.charged, m.cap) for m in p.maps]
        assert [[tuple(pin) for pin in m.pins] for m in maps] == [[(at, *pin) for at, pin in sorted(m.pins.items())] for m in p.maps]
        # 1. charges
        for mm, process in self.sides:
            assert mm.locked_vm == process.locked == sum(m.locked_vm for m in maps if m.mm is mm)
        # 2. pins by page, and 7. by the counters
        wanted = Counter(p.pins())
        for _, process in self.sides:
            for pfn in filter(None, process.pfns):
                assert self.mem.page(pfn).refcount >> 10 == wanted[pfn]
        assert pins(self.mem) == sum(wanted.values())
        # 3. slots, 9. invalid addresses
        assert c.dma_avail + len(maps) == ENTRIES and c.vaddr_invalid_count == p.invalid
        # 4. disjoint, and translated alike everywhere; nothing else is
        assert all(a.iova + a.size <= b.iova for a, b in zip(maps, maps[1:]))
        for m in maps if c.domains else ():
            assert translations(c, m.iova, m.size) == [p.translation(at) for at in range(m.iova, m.iova + m.size, PAGE)]
        for domain in c.domains:
            assert domain.stats["bytes"] == sum(m.size for m in maps) and domain.stale == 0     # 6. nothing is unpinned before a flush

    def teardown(self):
        if hasattr(self, "c"):
            over(self.c, *[mm for mm, _ in self.sides])


TestBoth = Both.TestCase
TestBoth.settings = settings(settings.default, **SMALL)
