"""All of it at once: processes, pins, RDMA regions, rings and a container over one memory, against reference/world.py.

Any calls in any order. After each of them every folio's counters are what their owners add up to, each charge is what it is
for, and a device sees what its process sees.
"""
import errno
import os
import struct

import numpy as np
import pytest
from hypothesis import settings, strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule

import mmcore as mmc
from mmcore import MM, MMError
from mmcore.drivers.bio import Bio, bio_release_pages
from mmcore.drivers.iobuffer import user_locked_vm
from mmcore.drivers.iov import ITER_DEST, iov_iter_extract_bvecs, iov_iter_ubuf
from reference import Refused, regions, vfio
from reference.spaces import READ, WRITE, Share
from reference.world import Process, World
from test_gup_state import PinMachine
from test_mm_state import ARENA, MOST_MMS, PAGE, PAGES, PFN, PMD, PRESENT, Hold, lengths, starts, window
from vfio_support import GENERATIONS, UNMAP_VADDR, translations

LIMIT = 400                 # pages: what a process without CAP_IPC_LOCK may lock
MOST_HOLDERS = 4
FILE = 600                  # pages of a file at first
ACCESS = (mmc.IB_ACCESS_LOCAL_WRITE, mmc.IB_ACCESS_LOCAL_WRITE | mmc.IB_ACCESS_REMOTE_WRITE, mmc.IB_ACCESS_REMOTE_READ, 0)
OFFSETS = (0, 0, 1, 0x800)
IOVAS = tuple(i * PMD * PAGE for i in range(4)) + (7 * PAGE, (1 << 40) - PAGE)

which, offsets = st.integers(0, 9), st.sampled_from(OFFSETS)


class WorldMachine(PinMachine):
    """As its base, with drivers. A holder's pages are in self.held, with what it sees through them."""

    @initialize(limited=st.booleans(), options=st.sampled_from(GENERATIONS))
    def begin(self, limited=False, options=GENERATIONS[0]):
        self.mem = mmc.Memory("128M", thp=self.thp, mthp=self.mthp, movable="32M", cma="16M")
        self.pins, self.held = [], {}
        self.token = self.shares = 0
        first = MM(self.mem, rlimit_memlock=LIMIT * PAGE) if limited else MM(self.mem)
        self.free = self.mem.vmstat()["nr_free_pages"] + first.nr_tables
        self.world = World(self.folio_of)
        process = Process(self.world, limit=LIMIT if limited else None)
        self.process = {first: process}
        self.spaces = [(first, process.space)]
        self.device = mmc.IBDevice(self.mem, iommu=limited)
        self.regions = []           # [IBUmem, Region]
        self.rings = [(mmc.BufferTable(first), regions.Buffers(process))]
        self.ringers = [first]
        self.c = mmc.VFIOContainer(self.mem, dma_entry_limit=5, **options)
        self.p = vfio.Container(True, 5)
        self.world.holders.append(self.p)
        self.c.attach(mmc.IOMMUDomain(self.mem))
        self.p.attach()
        self.files = [(mmc.File(self.mem, FILE * PAGE), Share(FILE)) for _ in range(2)]
        self.outcomes = set()       # (call, errno or 0)
        self.mmap(which=0, start=0, length=PAGES, prot=READ | WRITE, shared=False)

    # -- what is told ----------------------------------------------------------------------------------------------------
    def folio_of(self, pfn):
        folio = self.mem.page(pfn).folio
        return folio.pfn, folio.order

    def tell_frames(self, mm):
        """Where the pages of a process lie now."""
        process = self.process[mm]
        words = mm.pagemap(ARENA * PAGE, PAGES)
        there = np.flatnonzero(words & np.uint64(PRESENT))
        process.frames = dict(zip((there + ARENA).tolist(), (words[there] & np.uint64(PFN)).tolist()))
        return process

    def believe(self, process, pages):
        """A refused call leaves what it had faulted in; how far it came is told."""
        for page in pages:
            pfn = process.frames.get(page)
            if pfn is not None and process.space.area[page].share is None and not (
                    pfn == self.mem.zero_page.pfn or mmc.is_huge_zero_page(self.mem.page(pfn))):
                process.space.populated.add(page)
                process.space.touched.add(page)

    def ask(self, call, mm, ours, theirs, pages=(), unmovable=(errno.ENOMEM,), either=()):
        """Both sides; (what ours gave, what theirs gave), None when both refused alike.

        unmovable: the errnos that a page means which somebody else's pin keeps where no longterm pin may be. either: those of
        two reasons of which one may come first.
        """
        got = number = None
        try:
            got = ours()
        except MMError as refusal:
            number = refusal.errno
        self.outcomes.add((call, number or 0))
        process = self.tell_frames(mm)
        if number in either or number in unmovable and self.unmovable(process, pages):
            self.believe(process, pages)
            return None
        try:
            result = theirs(process)
        except Refused as refusal:
            assert number == refusal.errno, (number and errno.errorcode[number], refusal)
            return None
        assert number is None, f"refused with {errno.errorcode[number]}"
        return got, result

    def unmovable(self, process, pages):
        held = {self.mem.page(hold.pfn).folio for hold in self.holds()}
        there = {self.mem.page(process.frames[page]).folio for page in pages if page in process.frames}
        return any(not mmc.folio_is_longterm_pinnable(folio) for folio in held & there)

    # -- who holds what ---------------------------------------------------------------------------------------------------
    def holds(self):
        return self.pins + [hold for holds in self.held.values() for hold in holds]

    def hold(self, holder, mm, pages, frames, writable):
        space = self.process[mm].space
        zeros = self.mem.zero_page.pfn
        self.held[holder] = [
            Hold(mm, page, pfn, space.read(page) if space.area[page].share is None else (space.area[page].share, space.area[page].offset),
                 writable) for page, pfn in zip(pages, frames) if pfn != zeros]

    def let_go(self, holder):
        del self.held[holder]
        self.world.holders.remove(holder)

    # -- processes --------------------------------------------------------------------------------------------------------
    @rule(which=which)
    @precondition(lambda self: len(self.spaces) < MOST_MMS)
    def fork(self, which):
        mm, _ = self.pick(which, "fork")
        child, process = mm.fork(), self.process[mm].fork()
        self.process[child] = process
        self.spaces.append((child, process.space))

    @rule(which=which)
    @precondition(lambda self: len(self.spaces) > 1)
    def exit(self, which):
        mm, _ = self.spaces[which % len(self.spaces)]
        PinMachine.exit(self, which=which)
        self.process[mm].alive = False

    # -- files --------------------------------------------------------------------------------------------------------------
    @rule(which=which, start=starts, length=lengths, file=st.integers(0, 1), first=st.integers(0, FILE))
    def mmap_file(self, which, start, length, file, first):
        mm, space = self.pick(which, f"mmap {start}+{length} file{file} from {first}")
        pages = window(start, length)
        self.detach(mm, pages)
        mm.mmap(len(pages) * PAGE, READ | WRITE, mmc.MAP_SHARED | mmc.MAP_FIXED, self.files[file][0], first * PAGE, addr=pages.start * PAGE)
        space.mmap(pages, READ | WRITE, self.files[file][1], -1 - file, first)

    @rule(which=st.integers(0, 1), index=st.integers(0, FILE))
    def file_write(self, which, index):
        file, share = self.files[which % 2]
        if index < share.size:
            self.timeline.event(f"file{which % 2}", f"write {index}")
            self.token += 1
            file.write(index * PAGE, struct.pack("<Q", self.token))
            share[index] = self.token

    @rule(which=st.integers(0, 1), index=st.integers(0, FILE))
    def file_read(self, which, index):
        file, share = self.files[which % 2]
        if index < share.size:
            assert struct.unpack("<Q", file.read(index * PAGE, 8))[0] == share.get(index, 0)

    @rule(which=st.integers(0, 1), size=st.integers(0, FILE))
    def truncate(self, which, size):
        """What is pinned keeps its bytes, and is no longer the file's."""
        file, share = self.files[which % 2]
        self.timeline.event(f"file{which % 2}", f"truncate {size}")
        for hold in self.holds():
            if isinstance(hold.token, tuple) and hold.token[0] is share and hold.token[1] >= size:
                hold.token, hold.page = hold.content(), None
        file.truncate(size * PAGE)
        share.truncate(size)

    # -- RDMA ---------------------------------------------------------------------------------------------------------------
    @rule(which=which, start=starts, length=lengths, offset=offsets, cut=offsets, access=st.sampled_from(ACCESS),
          acquire=st.sampled_from(("sink", "list")))
    @precondition(lambda self: len(self.regions) < MOST_HOLDERS)
    def reg(self, which, start, length, offset, cut, access, acquire):
        mm, _ = self.pick(which, f"reg_mr {start}+{length} access {access}")
        pages = window(start, length)
        addr, size = pages.start * PAGE + offset, len(pages) * PAGE - offset - cut
        done = self.ask("reg", mm, lambda: mmc.ib_umem_get(self.device, mm, addr, size, access, acquire=acquire),
                        lambda process: regions.Region(process, addr, size, access), pages)
        if done:
            umem, region = done
            entries = umem.sgt.entries[:umem.sgt.orig_nents]
            assert [(int(e["pfn"]), int(e["offset"]), int(e["length"])) for e in entries] == region.entries
            self.regions.append(done)
            self.world.holders.append(region)
            self.hold(region, mm, region.pages, region.frames, region.writable)

    @rule(which=which, release=st.sampled_from(("range", "array", "page")))
    @precondition(lambda self: self.regions)
    def dereg(self, which, release):
        umem, region = self.regions.pop(which % len(self.regions))
        self.timeline.event("rdma", f"dereg {region.pages.start - ARENA}+{len(region.pages)}")
        mmc.ib_umem_release(umem, release=release)
        for pfn in set(region.release()):
            folio = self.mem.page(pfn).folio
            assert folio.refcount == 0 or folio.dirty
        self.let_go(region)

    @rule(which=which, at=st.integers(0, 1 << 20))
    @precondition(lambda self: self.regions)
    def rdma_read(self, which, at):
        umem, region = self.regions[which % len(self.regions)]
        hold = self.held[region][at % len(self.held[region])] if self.held[region] else None
        if hold:
            page = region.pages.start + region.frames.index(hold.pfn)
            offset = page * PAGE - umem.address
            if 0 <= offset <= umem.length - 8:
                self.timeline.event("rdma", f"read {page - ARENA}")
                assert struct.unpack("<Q", mmc.ib_umem_copy_from(umem, offset, 8))[0] == hold.content()

    # -- rings --------------------------------------------------------------------------------------------------------------
    @rule(which=which)
    def ring(self, which):
        """A new ring; of three, one that nobody can use any more goes."""
        if len(self.rings) == 3:
            over = [n for n, (_, plain) in enumerate(self.rings) if plain.slots is None and not plain.process.alive]
            if not over:
                return
            del self.rings[over[0]], self.ringers[over[0]]
        mm, _ = self.pick(which, "io_uring_setup")
        self.rings.append((mmc.BufferTable(mm), regions.Buffers(self.process[mm])))
        self.ringers.append(mm)

    def a_buffer(self, spec):
        start, length, offset = spec
        if length == 0:
            return (0, 0), ()
        pages = window(start, length)
        return (pages.start * PAGE + offset, len(pages) * PAGE - offset), pages

    def after_ring(self):
        """Holders are the buffers that some table has."""
        now = set().union(*[table.slots or () for _, table in self.rings]) - {None}
        for holder in [holder for holder in self.held if isinstance(holder, regions.Buffer) and holder not in now]:
            self.let_go(holder)
        for buffer in now:
            if buffer not in self.held:
                mm = next(mm for mm, process in self.process.items() if process is buffer.maker.process)
                self.world.holders.append(buffer)
                # One pin a folio keeps all of its pages where they are.
                self.hold(buffer, mm, buffer.pages, buffer.frames, True)

    def on_ring(self, which, text, ours, theirs, specs=()):
        n = which % len(self.rings)
        table, plain = self.rings[n]
        mm = self.ringers[n]
        if not self.process[mm].alive and specs:
            return
        self.timeline.event(f"ring{n}", text)
        wanted = [self.a_buffer(spec) for spec in specs]
        pages = [page for _, range_ in wanted for page in range_]
        buffers = [buffer for buffer, _ in wanted]
        alive = mm if self.process[mm].alive else self.spaces[0][0]
        done = self.ask(text.split()[0], alive, lambda: ours(table, buffers), lambda _: theirs(plain, buffers), pages,
                        (errno.ENOMEM, errno.EFAULT))
        if done:
            assert done[0] == done[1]
        self.after_ring()

    specs = st.lists(st.tuples(starts, st.one_of(lengths, st.just(0)), offsets), min_size=1, max_size=3)

    @rule(which=which, specs=specs)
    def buffers_register(self, which, specs):
        self.on_ring(which, f"register {specs}", lambda table, buffers: table.register(buffers),
                     lambda plain, buffers: plain.register(buffers), specs)

    @rule(which=which, at=st.integers(0, 2), specs=specs)
    def buffers_update(self, which, at, specs):
        slots = self.rings[which % len(self.rings)][1].slots
        specs = specs[:len(slots)] if slots else specs
        if slots:
            at %= len(slots) - len(specs) + 1
        done = []

        def ours(table, buffers):
            done.append(table.update(at, buffers))
            return done[0]

        def theirs(plain, buffers):
            process, pages = plain.process, [page for spec in specs for page in self.a_buffer(spec)[1]]
            if done and done[0] < len(buffers) and self.unmovable(process, pages):
                self.believe(process, pages)        # the next one was refused for that, of which nobody is told
                return plain.update(at, buffers[:done[0]])
            return plain.update(at, buffers)

        self.on_ring(which, f"update {at} {specs}", ours, theirs, specs)

    @rule(which=which)
    def buffers_unregister(self, which):
        self.on_ring(which, "unregister", lambda table, _: table.unregister(), lambda plain, _: plain.unregister())

    @rule(which=which, source=which)
    @precondition(lambda self: len(self.rings) > 1)
    def buffers_clone(self, which, source):
        n, source = which % len(self.rings), source % len(self.rings)
        if n != source:
            self.on_ring(which, f"clone ring{source}", lambda table, _: table.clone(self.rings[source][0]),
                         lambda plain, _: plain.clone(self.rings[source][1]))

    # -- VFIO ---------------------------------------------------------------------------------------------------------------
    def after_vfio(self):
        for holder in [holder for holder in self.held if isinstance(holder, vfio.Mapping)
                       and (holder not in self.p.maps or not holder.mapped)]:
            del self.held[holder]
        for m in self.p.maps:
            if m.mapped and m not in self.held:
                mm = next(mm for mm, process in self.process.items() if process is m.process)
                first = m.vaddr // PAGE
                self.hold(m, mm, range(first, first + m.size // PAGE), m.pages, m.prot & WRITE)

    @rule(which=which, start=starts, length=lengths, iova=st.sampled_from(IOVAS), prot=st.sampled_from((3, 3, 1)))
    def dma_map(self, which, start, length, iova, prot):
        mm, _ = self.pick(which, f"map_dma {start}+{length} at {iova:#x}")
        pages = window(start, length)
        vaddr, size = pages.start * PAGE, len(pages) * PAGE

        def theirs(process):
            self.p.map(process, vaddr, iova, size, prot)
            if self.p.domains:
                process.bring(pages, prot & WRITE)

        # What a batch cannot have and what it may not charge are found in the order of batches, not of pages.
        over = self.process[mm].over(len(pages)) and any(not self.process[mm].may(page, prot & WRITE) for page in pages)
        either = (errno.ENOMEM, errno.EFAULT) if over else ()
        refused = self.ask("map_dma", mm, lambda: self.c.map_dma(mm, vaddr, iova, size, prot), theirs, pages, either=either) is None
        if refused:
            self.believe(self.tell_frames(mm), pages)
        self.after_vfio()

    @rule(which=which, invalidate=st.booleans())
    @precondition(lambda self: self.p.maps)
    def dma_unmap(self, which, invalidate):
        m = self.p.maps[which % len(self.p.maps)]
        self.timeline.event("vfio", f"{'invalidate' if invalidate else 'unmap'} {m.iova:#x}+{m.size:#x}")
        got = wanted = None
        try:
            got = self.c.unmap_dma(m.iova, m.size, UNMAP_VADDR if invalidate else 0)
        except MMError as refusal:
            got = -refusal.errno
        try:
            wanted = self.p.unmap(m.iova, m.size, invalidate=invalidate)
        except Refused as refusal:
            wanted = -refusal.errno
        assert got == wanted
        self.after_vfio()

    @rule()
    @precondition(lambda self: len(self.c.domains) < 2 and all(m.process.alive for m in self.p.maps) and not self.p.invalid
                  and all(m.mapped for m in self.p.maps))
    def attach(self):
        self.timeline.event("vfio", "attach")
        self.c.attach(mmc.IOMMUDomain(self.mem))
        self.p.attach()
        self.after_vfio()

    @rule(which=which)
    @precondition(lambda self: self.c.domains)
    def detach_domain(self, which):
        self.timeline.event("vfio", "detach")
        self.c.detach(self.c.domains[which % len(self.c.domains)])
        self.p.detach()
        self.after_vfio()

    # -- devices write ------------------------------------------------------------------------------------------------------
    @rule(which=st.integers(0, 1 << 20))
    @precondition(lambda self: any(hold.writable for hold in self.holds()))
    def device_write(self, which):
        holds = [hold for hold in self.holds() if hold.writable]
        pfn = holds[which % len(holds)].pfn
        self.timeline.event("device", f"writes PFN {pfn:#x}")
        self.dma(pfn)

    def dma(self, pfn):
        """A device writes to a frame: whoever holds it sees that, and the processes that map it there."""
        self.token += 1
        mmc.page_address(self.mem.page(pfn))[:8] = struct.pack("<Q", self.token)
        for hold in self.holds():
            if hold.pfn == pfn and isinstance(hold.token, tuple):
                hold.token[0][hold.token[1]] = self.token
            elif hold.pfn == pfn:
                hold.token = self.token
                if hold.page is not None:
                    self.process[hold.mm].space.content[hold.page] = self.token

    @rule(which=which, start=starts, length=lengths, most=st.sampled_from((1, 3, 600)))
    def direct_read(self, which, start, length, most):
        """read() with O_DIRECT: short pins, the device writes, and all is given back dirty."""
        mm, space = self.pick(which, f"read(O_DIRECT) {start}+{length}")
        pages = window(start, length)
        wanted = 0
        while wanted < len(pages) and self.allowed(space, pages[wanted], True):
            wanted += 1
        bio, it, frames = Bio(self.mem), iov_iter_ubuf(ITER_DEST, pages.start * PAGE, len(pages) * PAGE), []
        try:
            while it.count:
                _, bvecs = iov_iter_extract_bvecs(it, it.count, most, mem=self.mem, pin=lambda *what: mmc.pin_user_pages_fast(mm, *what))
                for page, offset, size in bvecs:
                    bio.add_page(page, size, offset)
                    frames += range(page.pfn, page.pfn + size // PAGE)
        except MMError as refusal:
            assert refusal.errno == errno.EFAULT
        assert len(frames) == wanted
        for page, pfn in zip(pages, frames):
            space.touch(range(page, page + 1), True)
            self.dma(pfn)
            if space.area[page].share is None:
                space.content[page] = self.token
            else:
                space.area[page].share[space.area[page].offset] = self.token
        bio_release_pages(bio, True)
        assert all(self.mem.page(pfn).folio.dirty for pfn in frames)

    # -- after every step ---------------------------------------------------------------------------------------------------
    def folios(self):
        """(PFN, order, refcount, pincount, mappings, references of a file's cache) of what processes map or holders pin."""
        pages = self.mem.pages
        frames = {pfn for mm, _ in self.spaces for pfn in self.tell_frames(mm).frames.values()}
        frames = np.array(sorted(frames | set(self.world.pins())), np.uint64)
        info = pages["compound_info"][frames]
        mask = info >> np.uint64(6) | np.uint64(0x3F << 58)
        heads = np.unique(np.where(info & np.uint64(1), frames & mask, frames))
        columns = [pages[field][heads].tolist() for field in ("flags", "mapping", "_refcount", "_mapcount")]
        for pfn, flags, mapping, refcount, mapcount in zip(heads.tolist(), *columns):
            order, pincount, mapped = 0, 0, mapcount + 1
            if flags & 1 << 6:
                folio = self.mem.folio(pfn)
                order, pincount, mapped = folio.order, folio.pincount, folio.mapcount
            if pfn != self.mem.zero_page.pfn and not (order and mmc.is_huge_zero_folio(folio)):
                yield pfn, order, refcount, pincount, mapped, (1 << order) if mapping and not mapping & 1 else 0

    @invariant()
    def owned(self):
        if not hasattr(self, "world"):
            return
        taken = Taken(self.pins)
        self.world.holders.append(taken)
        try:
            assert self.world.differences(list(self.folios())) == []
            live = self.world.pins()
        finally:
            self.world.holders.remove(taken)
        stat = self.mem.vmstat()
        assert stat["nr_foll_pin_acquired"] - stat["nr_foll_pin_released"] == sum(live.values())
        for mm, _ in self.spaces:
            process = self.process[mm]
            assert (mm.pinned_vm, mm.locked_vm) == (process.pinned, process.locked)
        assert user_locked_vm(self.mem) == self.world.users["root"]
        for table, plain in self.rings:
            assert [buffer and [list(bvec) for bvec in buffer.bvecs] for buffer in table.buffers] == \
                [buffer and buffer.bvecs for buffer in plain.slots or ()]
        assert [(m.iova, m.size, m.iommu_mapped, m.locked_vm) for m in self.c.mappings] == \
            [(m.iova, m.size, m.mapped, m.charged) for m in self.p.maps]
        for m in self.p.maps:
            if m.mapped:
                assert translations(self.c, m.iova, m.size) == m.pages

    def over(self):
        for file, _ in self.files:
            file.truncate(0)

    def teardown(self):
        if not hasattr(self, "world"):
            return
        for umem, _ in self.regions:
            mmc.ib_umem_release(umem)
        for table, plain in self.rings:
            if plain.slots is not None:
                table.unregister()
        self.c.close()
        assert user_locked_vm(self.mem) == 0
        assert all(mm.locked_vm == 0 == mm.pinned_vm for mm, _ in self.spaces)
        PinMachine.teardown(self)


class Taken:
    """What the pin calls took."""

    def __init__(self, holds):
        self.holds = holds

    def pins(self):
        return [hold.pfn for hold in self.holds]


class WorldThpMachine(WorldMachine):
    thp = "always"


class WorldMthpMachine(WorldMachine):
    mthp = (2, 4)


LONG = os.environ.get("MMCORE_TEST_PROFILE") == "long"


def test_what_nobody_owns_is_seen():
    machine = WorldMachine()
    machine.begin()
    machine.reg(which=0, start=3, length=4, offset=0, cut=0, access=int(mmc.IB_ACCESS_LOCAL_WRITE), acquire="sink")
    machine.owned()
    frame = mmc.PageList(machine.mem, machine.regions[0][1].frames[:1])
    for take, give in ((mmc.grab_pages, mmc.unpin_user_pages), (lambda pages: mmc.get_page(pages[0]), mmc.release_pages)):
        take(frame)
        with pytest.raises(AssertionError, match="_refcount is .*, should be 1025: 1 entries, 0 of a file, 1 pins"):
            machine.owned()
        give(frame)
    machine.regions[0][1].process.pinned += 1
    with pytest.raises(AssertionError):
        machine.owned()
    machine.regions[0][1].process.pinned -= 1
    machine.teardown()


for machine in (WorldMachine, WorldThpMachine, WorldMthpMachine):
    machine.TestCase.settings = settings(max_examples=200 if LONG else 15, stateful_step_count=30, deadline=None)

TestWorld = WorldMachine.TestCase
TestWorldThp = WorldThpMachine.TestCase
TestWorldMthp = WorldMthpMachine.TestCase
