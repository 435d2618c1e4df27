"""Every step that can fail is made to fail once, and each time nothing leaks, nothing has changed, and every law holds.

A row of CASES is a name, a function that builds a world and returns the call to be tried, and the sites that must have
failed in it. For each site the nth occurrence fails, n from 1 upward in a world of its own each, until none is left:

    build ── look ── call (the nth occurrence fails) ── look again: as before ── call again: succeeds ── undo ── empty

A failure that the call makes up for (a THP that becomes base pages, a short list of pinned pages) is no error; what it did
is undone, and must have left nothing.
"""
import contextlib

import pytest

import mmcore as mmc
from mm_support import ANON, HUGE, PAGE
from mmcore import (FOLL_LONGTERM, FOLL_WRITE, IB_ACCESS_LOCAL_WRITE, MM, BufferTable, Device, File, IBDevice, Memory, MMError, PageList,
                    PageRanges, ProtectionDomain, SGAppendTable)

SITES = ("frame", "table", "list", "sg", "iommu_map", "migrate", "alloc")
CLOSELY = 16                # the first occurrences of a site, which fail one by one; further on in growing steps


class World:
    """One machine and what a case builds on it. What is left when all of it is undone is a leak."""

    def __init__(self, **config):
        config = {"movable": "8M", "hugetlb": {"2M": 3}} | config
        self.mem = Memory("40M", **config)
        self.mem.huge_zero_folio
        self.mms, self.kept, self.containers, self.undo = [], [], [], contextlib.ExitStack()
        self.pools, self.free = self.mem.hugetlb_pools(), self.mem.vmstat()["nr_free_pages"]

    def mm(self, **limits):
        mm = MM(self.mem, **limits)
        self.mms.append(mm)
        return mm

    def looks(self):
        """What a failed call must not change, as those see it who use the machine. Reading faults, so it comes last."""
        stat = self.mem.vmstat()
        seen = [stat["nr_foll_pin_acquired"] - stat["nr_foll_pin_released"], stat["nr_writeback"]]
        for container, domains in self.containers:
            seen.append(([m._replace(mm=None, pins=[(pin.iova, pin.ref_count) for pin in m.pins]) for m in container.mappings],
                         container.info(), container.dirty_page_tracking, [d in container.domains for d in domains],
                         [(d.stats["leaves"], d.stats["bytes"], d.stats["tables"], d.stale) for d in domains]))
        for mm in self.mms:
            seen.append((mm.locked_vm, mm.pinned_vm, [(vma.start, vma.end, int(vma.flags), vma.offset) for vma in mm.vmas]))
            seen.append([bytes(mm.read(at, 64)) for vma in mm.vmas if vma.flags & mmc.VM.READ and not vma.flags & mmc.VM.PFNMAP
                         for at in range(vma.start, vma.end, 16 * PAGE if vma.end - vma.start <= HUGE else HUGE)
                         if vma.file is None or vma.offset + at - vma.start < vma.file.size])
        return seen

    def end(self):
        """Undo everything; nothing may be left."""
        self.undo.close()
        for mm in self.mms:
            mm.exit()
        self.mms.clear()
        self.kept.clear()
        self.containers.clear()
        self.mem.check()
        stat = self.mem.vmstat()
        assert stat["nr_foll_pin_acquired"] == stat["nr_foll_pin_released"], "pins leak"
        assert stat["nr_free_pages"] == self.free, f"{self.free - stat['nr_free_pages']} frames leak"
        assert self.mem.hugetlb_pools() == self.pools, "hugetlb pages leak"
        self.mem.close()


def written(mm, size, **kwargs):
    """An area with bytes of its own in each 64 KiB."""
    addr = mm.mmap(size, **kwargs)
    for at in range(addr, addr + size, 16 * PAGE):
        mm.write(at, at.to_bytes(8, "little"))
    return addr


def thp(mm, size=HUGE):
    addr = mm.mmap(size)
    mm.madvise(addr, size, mmc.MADV_HUGEPAGE)
    mm.touch(addr, size)
    mm.write(addr, b"huge")
    return addr


def scattered(mm, nr):
    """nr pages whose frames do not follow each other."""
    addr, other = mm.mmap(nr * PAGE), mm.mmap(nr * PAGE)
    for i in range(nr):
        mm.touch(addr + i * PAGE, PAGE)
        mm.touch(other + i * PAGE, PAGE)
    return addr


# ---- cases: build(world) -> (call, undo): undo(result) takes back what a call that succeeded did ---------------------------
def fork(build):
    def case(world):
        mm = world.mm()
        build(world, mm)
        return mm.fork, lambda child: child.exit()
    return case


def pinned(world, mm, addr, nr):
    pages = mmc.pin_user_pages(mm, addr, nr, FOLL_WRITE)
    world.undo.callback(mmc.unpin_user_pages, pages)


def private_file(world, mm):
    file = File(world.mem, 64 * PAGE)
    addr = mm.mmap(64 * PAGE, flags=mmc.MAP_PRIVATE, file=file)
    for i in range(0, 64, 16):
        mm.write(addr + i * PAGE, b"own")
    mm.read(addr + 5 * PAGE, 1)


def swapped(world, mm):
    addr = written(mm, 64 * PAGE)
    mm.madvise(addr, 64 * PAGE, mmc.MADV_PAGEOUT)


def hugetlb(mm, pages=1, **kwargs):
    addr = mm.mmap(pages * HUGE, flags=ANON | mmc.MAP_HUGETLB, **kwargs)
    mm.touch(addr, pages * HUGE)
    mm.write(addr, b"pool")
    return addr


def many_vmas(world, mm):
    for i in range(12):
        written(mm, 16 * PAGE, prot=mmc.PROT_READ | mmc.PROT_WRITE | (mmc.PROT_EXEC if i % 2 else 0))


def pinned_base(world, mm):
    pinned(world, mm, written(mm, 32 * PAGE), 9)


def pinned_thp(world, mm):
    pinned(world, mm, thp(mm) + 3 * PAGE, 2)


def pinned_hugetlb(world, mm):
    pinned(world, mm, hugetlb(mm), 2)


class Sink(mmc.GupOutput):
    """An output in Python."""

    def __init__(self):
        self.pages = []

    def gup_output_single_page(self, page):
        self.pages.append(page.pfn)

    def gup_output_pages(self, page, count):
        self.pages += range(page.pfn, page.pfn + count)


def give_back(world, taken):
    if isinstance(taken, SGAppendTable):
        mmc.unpin_user_pages(PageList(world.mem, mmc.sg_page_pfns(taken)))
        mmc.sg_free_append_table(taken)
    elif isinstance(taken, Sink):
        mmc.unpin_user_pages(PageList(world.mem, taken.pages))
    elif len(taken):
        mmc.unpin_user_pages(taken)


def gup(call, output=PageList, flags=FOLL_WRITE, area=scattered, nr=24, populated=True, acquire="leaf"):
    def case(world):
        mm = world.mm()
        addr = area(mm, nr) if populated else mm.mmap(nr * PAGE)
        return (lambda: call(mm, addr, nr, flags, output=output() if output is Sink else output, acquire=acquire),
                lambda taken: give_back(world, taken))
    return case


def append_to_a_table(world):
    """The output is a table that holds pages already: a failure leaves those."""
    mm = world.mm()
    addr = scattered(mm, 400)
    table = mmc.pin_user_pages(mm, addr, 150, FOLL_WRITE, output=SGAppendTable(world.mem))
    before = table.entries.tobytes()
    world.undo.callback(lambda: give_back(world, table))

    def call():
        try:
            return mmc.pin_user_pages(mm, addr + 150 * PAGE, 250, FOLL_WRITE, output=table)
        except MMError:
            assert table.entries.tobytes()[:len(before)] == before and len(mmc.sg_page_pfns(table)) == 150
            raise
    return call, lambda taken: None


def longterm(area, nr=8, call=mmc.pin_user_pages):
    def case(world):
        mm = world.mm()
        addr = area(world, mm)
        return lambda: call(mm, addr, nr, FOLL_WRITE | FOLL_LONGTERM), lambda taken: give_back(world, taken)
    return case


def movable_anon(world, mm):
    return written(mm, 16 * PAGE)


def movable_thp(world, mm):
    return thp(mm)


def movable_file(world, mm):
    file = File(world.mem, 16 * PAGE)
    addr = mm.mmap(16 * PAGE, flags=mmc.MAP_SHARED, file=file)
    for i in range(16):
        mm.write(addr + i * PAGE, bytes([i]))
    return addr


def movable_hugetlb(world, mm):
    return hugetlb(mm)


def umem(acquire, populated=True):
    def case(world):
        mm, device = world.mm(), IBDevice(world.mem, iommu=True, max_seg_size=2 * PAGE)
        world.undo.callback(lambda: device.mappings == 0 or pytest.fail("mappings leak"))
        addr = scattered(mm, 300) if populated else mm.mmap(40 * PAGE)
        size = (300 if populated else 40) * PAGE
        return lambda: mmc.ib_umem_get(device, mm, addr, size, IB_ACCESS_LOCAL_WRITE, acquire=acquire), mmc.ib_umem_release
    return case


def release_umem(release):
    def case(world):
        mm, device = world.mm(), IBDevice(world.mem, iommu=True)
        got = mmc.ib_umem_get(device, mm, scattered(mm, 64), 64 * PAGE, IB_ACCESS_LOCAL_WRITE)
        return lambda: mmc.ib_umem_release(got, release=release), lambda nothing: None
    return case


def rereg(world):
    mm, device = world.mm(), IBDevice(world.mem, iommu=True)
    region = ProtectionDomain(device, mm).reg_mr(scattered(mm, 64), 64 * PAGE, IB_ACCESS_LOCAL_WRITE)
    world.undo.callback(region.close)
    other = scattered(mm, 200)
    return lambda: region.rereg(addr=other, length=200 * PAGE, access=IB_ACCESS_LOCAL_WRITE), lambda nothing: None


def register(huge):
    def case(world):
        mm = world.mm(user="somebody", rlimit_memlock="32M")
        addr, nr = (thp(mm, 2 * HUGE), 1024) if huge else (scattered(mm, 200), 200)
        table = BufferTable(mm)
        world.undo.callback(lambda: table.charged == 0 or pytest.fail("a charge leaks"))
        return (lambda: table.register([(addr + 5, PAGE), (addr + PAGE, (nr - 1) * PAGE)]), lambda nothing: table.unregister())
    return case


def update(world):
    mm = world.mm()
    addr = scattered(mm, 200)
    table = BufferTable(mm)
    table.register([(addr, 8 * PAGE)] * 4)
    world.undo.callback(table.unregister)
    return lambda: table.update(1, [(addr + 8 * PAGE, 100 * PAGE), (addr + 60 * PAGE, 100 * PAGE)]), lambda nothing: None


def unregister(world):
    mm = world.mm()
    table = BufferTable(mm)
    table.register([(scattered(mm, 100), 100 * PAGE), (thp(mm), HUGE)])
    return table.unregister, lambda nothing: None


def vfio(do, undo, nr=300, populated=True, attached=1, build=lambda container, domains, mm, addr: None, **options):
    """A call on a container with two domains, of which so many are attached: do(container, domains, mm, addr)."""
    def case(world):
        mm, container = world.mm(), mmc.VFIOContainer(world.mem, **options)
        domains = [mmc.IOMMUDomain(world.mem) for _ in range(2)]
        world.containers.append((container, domains))
        world.undo.callback(container.close)
        addr = scattered(mm, nr) if populated else mm.mmap(nr * PAGE)
        for domain in domains[:attached]:
            container.attach(domain)
        build(container, domains, mm, addr)
        return (lambda: do(container, domains, mm, addr)), (lambda result: undo(container, domains, result))
    return case


def map_dma(container, domains, mm, addr, nr=300):
    container.map_dma(mm, addr, 1 << 30, nr * PAGE)


def map_few(container, domains, mm, addr):
    map_dma(container, domains, mm, addr, 40)


def map_tracked(container, domains, mm, addr):
    map_few(container, domains, mm, addr)
    container.dirty_pages_start()


def unmap_all(container, domains, result):
    container.unmap_dma(0, 0, mmc.VFIO_DMA_UNMAP_FLAG_ALL)


def attach_second(container, domains, mm, addr):
    container.attach(domains[1])


def detach_second(container, domains, result):
    container.detach(domains[1])


def unmap_with_bitmap(container, domains, mm, addr):
    bits = bytearray(8)
    assert container.unmap_dma(1 << 30, 40 * PAGE, mmc.VFIO_DMA_UNMAP_FLAG_GET_DIRTY_BITMAP, bitmap=bits, pgsize=PAGE) == 40 * PAGE
    assert bits == bytes([255] * 5 + [0] * 3)


def pin_pages(container, domains, mm, addr):
    return container.pin_pages(1 << 30, 20, 3)


def unpin_pages(container, domains, pages):
    container.unpin_pages(1 << 30, 20)


def open_driver(container, domains, mm, addr):
    container.register_device(lambda iova, size: None)
    map_few(container, domains, mm, addr)


def frames(world, nr):
    pages = mmc.alloc_pages_bulk(world.mem, nr)
    world.undo.callback(mmc.release_pages, pages)
    return pages


def every_other(world, nr):
    pages = frames(world, 2 * nr)
    return PageList(world.mem, pages.pfns[::2])


def sg(make, free=None):
    def case(world):
        return make(world), free or mmc.sg_free_table
    return case


def sg_append(world):
    pages = every_other(world, 700)
    table = SGAppendTable(world.mem)
    mmc.sg_alloc_append_table_from_pages(table, pages[:200], 0, 200 * PAGE, None, 500)
    world.undo.callback(mmc.sg_free_append_table, table)
    return lambda: mmc.sg_alloc_append_table_from_pages(table, pages[200:], 0, 500 * PAGE, None, 0), lambda nothing: None


def sg_split(world):
    table = mmc.sg_alloc_table_from_pages(every_other(world, 300), 0, 300 * PAGE)
    world.undo.callback(mmc.sg_free_table, table)
    return lambda: mmc.sg_split(table, 100, [200 * PAGE, 90 * PAGE]), lambda parts: [mmc.sg_free_table(part) for part in parts]


def dma_map(world):
    device = Device(world.mem, iommu=True, max_seg_size=PAGE)
    table = mmc.sg_alloc_table_from_pages(every_other(world, 20), 0, 20 * PAGE)
    world.undo.callback(mmc.sg_free_table, table)
    world.undo.callback(lambda: device.mappings == 0 or pytest.fail("mappings leak"))
    both = mmc.DMA.BIDIRECTIONAL
    return lambda: mmc.dma_map_sgtable(device, table, both), lambda n: mmc.dma_unmap_sgtable(device, table, both)


def space(do, build=lambda world, mm: None, undo=lambda world, mm, result: None, **config):
    """A call on an address space: do(world, mm, built)."""
    def case(world):
        mm = world.mm()
        built = build(world, mm)
        return (lambda: do(world, mm, built)), (lambda result: undo(world, mm, result))
    case.config = config
    return case


def unmap(length):
    return lambda world, mm, addr: mm.munmap(addr, length)


def advised(world, mm):
    addr = mm.mmap(2 * HUGE)
    mm.madvise(addr, 2 * HUGE, mmc.MADV_HUGEPAGE)
    return addr


def sparse(world, mm):
    """Base pages where a THP could be."""
    addr = mm.mmap(HUGE)
    mm.madvise(addr, HUGE, mmc.MADV_NOHUGEPAGE)
    for i in range(0, 512, 64):
        mm.write(addr + i * PAGE, bytes([i // 64 + 1]))
    mm.madvise(addr, HUGE, mmc.MADV_HUGEPAGE)
    return addr


def locked_half(world, mm):
    """A locked area with room behind it."""
    addr = mm.mmap(32 * PAGE, flags=ANON | mmc.MAP_LOCKED)
    mm.munmap(addr + 16 * PAGE, 16 * PAGE)
    return addr


def out(world, mm):
    addr = written(mm, 64 * PAGE)
    mm.madvise(addr, 64 * PAGE, mmc.MADV_PAGEOUT)
    return addr


def shared_file(kind="tmpfs", pages=32):
    def build(world, mm):
        file = File(world.mem, pages * PAGE, kind)
        return mm.mmap(pages * PAGE, flags=mmc.MAP_SHARED, file=file)
    return build


def private_of_file(world, mm):
    file = File(world.mem, 32 * PAGE)
    file.write(0, b"file" * 1024 * 32)
    return mm.mmap(32 * PAGE, flags=mmc.MAP_PRIVATE, file=file)


def forked(build):
    def both(world, mm):
        built = build(world, mm)
        child = mm.fork()
        world.mms.append(child)
        return built
    return both


def file_case(do, **config):
    def case(world):
        return (lambda: do(world)), (lambda result: None)
    case.config = config
    return case


def grow_file(kind):
    def case(world):
        file = File(world.mem, 4 * PAGE, kind)
        file.write(0, b"x" * PAGE)
        return (lambda: file.truncate(64 * PAGE)), (lambda nothing: file.truncate(4 * PAGE))
    return case


def write_file(world):
    file = File(world.mem, 32 * PAGE)
    world.kept.append(file)
    return lambda: file.write(100, b"y" * (8 * PAGE)), lambda nothing: None


def memfd(kind, size, nr, **config):
    def case(world):
        file = File(world.mem, size, kind)
        world.kept.append(file)
        return lambda: mmc.memfd_pin_folios(file, 0, size - 1, nr), lambda got: mmc.unpin_folios(got[0])
    case.config = config
    return case


def release(how):
    def case(world):
        pages = frames(world, 64)
        mmc.grab_pages(pages)
        return lambda: how(pages), lambda nothing: None
    return case


def grab(world):
    pages = frames(world, 64)
    return lambda: mmc.grab_pages(pages), lambda nothing: mmc.unpin_user_pages(pages)


def folio_split(world):
    mm = world.mm()
    folio = mm.page_at(thp(mm)).folio

    def split():
        mmc.folio_lock(folio)
        try:
            return mmc.folio_split(folio)
        finally:
            mmc.folio_unlock(folio)

    mmc.folio_get(folio)
    world.undo.callback(lambda: mmc.folio_put(folio))       # the first piece's, or the whole's
    return split, lambda pieces: [mmc.folio_put(piece) for piece in pieces[1:]]


def unallocated(call, free):
    return lambda world: ((lambda: call(world)), (lambda got: free(got)))


MAPPING = {"frame", "table", "list", "iommu_map", "migrate", "alloc"}        # what pins for long and maps

CASES = {
    # ---- fork
    "fork base pages": (fork(lambda world, mm: written(mm, 64 * PAGE)), {"frame", "table", "alloc"}),
    "fork pinned base pages": (fork(pinned_base), {"frame", "table", "alloc"}),
    "fork a THP": (fork(lambda world, mm: thp(mm)), {"frame", "table", "alloc"}),
    "fork a pinned THP": (fork(pinned_thp), {"frame", "table", "alloc"}),
    "fork copies of a file": (fork(private_file), {"frame", "table", "alloc"}),
    "fork what is swapped out": (fork(swapped), {"frame", "table", "alloc"}),
    "fork hugetlb": (fork(lambda world, mm: hugetlb(mm)), {"frame", "table", "alloc"}),
    "fork pinned hugetlb": (fork(pinned_hugetlb), {"frame", "table", "alloc"}),
    "fork many VMAs": (fork(many_vmas), {"frame", "table", "alloc"}),
    # ---- gup
    "pin": (gup(mmc.pin_user_pages), {"list"}),
    "pin, as ranges": (gup(mmc.pin_user_pages, PageRanges), {"list"}),
    "pin, into a scatterlist": (gup(mmc.pin_user_pages, SGAppendTable, nr=300), {"list", "sg"}),
    "pin, into Python": (gup(mmc.pin_user_pages, Sink), {"list"}),
    "pin, a page at a time": (gup(mmc.pin_user_pages, acquire="page"), {"list"}),
    "pin fast": (gup(mmc.pin_user_pages_fast), {"list"}),
    "pin fast, as ranges": (gup(mmc.pin_user_pages_fast, PageRanges), {"list"}),
    "pin fast, into a scatterlist": (gup(mmc.pin_user_pages_fast, SGAppendTable, nr=300), {"sg"}),
    "pin fast, into Python": (gup(mmc.pin_user_pages_fast, Sink), {"list"}),
    "pin many": (gup(mmc.pin_user_pages_fast, nr=900), {"list"}),
    "pin what is not there": (gup(mmc.pin_user_pages, populated=False), {"frame", "table", "list"}),
    "pin what is not there, fast": (gup(mmc.pin_user_pages_fast, populated=False), {"frame", "table", "list"}),
    "pin what is not there, into a scatterlist": (gup(mmc.pin_user_pages, SGAppendTable, populated=False),
                                                  {"frame", "table", "list", "sg"}),
    "pin into a table in use": (append_to_a_table, {"list", "sg"}),
    # ---- longterm: what is in Movable memory is moved first
    "longterm, anonymous": (longterm(movable_anon), {"frame", "list", "migrate", "alloc"}),
    "longterm, anonymous, fast": (longterm(movable_anon, call=mmc.pin_user_pages_fast), {"frame", "list", "migrate", "alloc"}),
    "longterm, THP": (longterm(movable_thp), {"frame", "list", "migrate", "alloc"}),
    "longterm, file": (longterm(movable_file), {"frame", "list", "migrate", "alloc"}),
    # ---- registration
    "umem, sink": (umem("sink"), {"frame", "table", "list", "sg", "iommu_map", "migrate", "alloc"}),
    "umem, list": (umem("list"), {"frame", "table", "list", "sg", "iommu_map", "migrate", "alloc"}),
    "umem of what is not there, sink": (umem("sink", False), {"frame", "table", "list", "sg", "iommu_map", "migrate", "alloc"}),
    "umem of what is not there, list": (umem("list", False), {"frame", "table", "list", "sg", "iommu_map", "migrate", "alloc"}),
    "umem release, range": (release_umem("range"), {"alloc"}),
    "umem release, array": (release_umem("array"), {"list", "alloc"}),
    "umem release, page": (release_umem("page"), {"alloc"}),
    "MR, another translation": (rereg, {"frame", "list", "sg", "iommu_map", "migrate", "alloc"}),
    "io_uring register": (register(False), {"frame", "list", "migrate", "alloc"}),
    "io_uring register, THP": (register(True), {"frame", "list", "migrate", "alloc"}),
    "io_uring update": (update, {"frame", "list", "migrate", "alloc"}),
    "io_uring unregister": (unregister, {"alloc"}),
    "VFIO map, sink": (vfio(map_dma, unmap_all, acquire="sink"), MAPPING),
    "VFIO map, batch": (vfio(map_dma, unmap_all, acquire="batch"), MAPPING),
    "VFIO map, page": (vfio(map_dma, unmap_all, acquire="page"), MAPPING),
    "VFIO map of what is not there, sink": (vfio(map_few, unmap_all, 40, False, acquire="sink"), MAPPING),
    "VFIO map of what is not there, batch": (vfio(map_few, unmap_all, 40, False, acquire="batch"), MAPPING),
    "VFIO map of what is not there, page": (vfio(map_few, unmap_all, 40, False, acquire="page"), MAPPING),
    "VFIO map, runs forgotten": (vfio(map_few, unmap_all, 40, remember_runs=False), MAPPING),
    "VFIO map, two domains, dirty tracking": (
        vfio(map_few, unmap_all, 40, attached=2, build=lambda c, *_: c.dirty_pages_start()), MAPPING),
    "VFIO attach the first domain": (
        vfio(lambda c, d, mm, addr: c.attach(d[0]), lambda c, d, _: None, 40, attached=0, build=map_few), MAPPING),
    "VFIO attach another, by runs": (vfio(attach_second, detach_second, 40, build=map_few), {"table", "iommu_map"}),
    "VFIO attach another, by asking": (vfio(attach_second, detach_second, 40, build=map_few, remember_runs=False), {"table", "iommu_map"}),
    "VFIO detach": (vfio(lambda c, d, mm, addr: c.detach(d[0]), lambda c, d, _: None, 40, build=map_few), {"alloc"}),
    "VFIO pin_pages": (vfio(pin_pages, unpin_pages, 40, attached=0, build=open_driver), {"frame", "list", "migrate", "alloc"}),
    "VFIO pin_pages of what is mapped": (vfio(pin_pages, unpin_pages, 40, build=open_driver), {"list", "alloc"}),
    "VFIO pin_pages of what is not there": (
        vfio(pin_pages, unpin_pages, 40, False, attached=0, build=open_driver), {"frame", "table", "list", "migrate", "alloc"}),
    "VFIO dirty_pages_start": (
        vfio(lambda c, *_: c.dirty_pages_start(), lambda c, d, _: c.dirty_pages_stop(), 40, build=map_few), {"alloc"}),
    "VFIO unmap with a bitmap, range": (vfio(unmap_with_bitmap, lambda *_: None, 40, build=map_tracked, release="range"), {"alloc"}),
    "VFIO unmap with a bitmap, folio": (vfio(unmap_with_bitmap, lambda *_: None, 40, build=map_tracked, release="folio"), {"alloc"}),
    "VFIO unmap with a bitmap, page": (vfio(unmap_with_bitmap, lambda *_: None, 40, build=map_tracked, release="page"), {"alloc"}),
    "VFIO unmap, runs forgotten": (
        vfio(unmap_with_bitmap, lambda *_: None, 40, attached=2, build=map_tracked, remember_runs=False), {"alloc"}),
    # ---- scatterlists
    "sg_alloc_table": (sg(lambda world: lambda: mmc.sg_alloc_table(world.mem, 700)), {"sg"}),
    "sg from pages": (sg(lambda world: (lambda pages: lambda: mmc.sg_alloc_table_from_pages(pages, 0, len(pages) * PAGE))(
        every_other(world, 400))), {"sg"}),
    "sg append": (sg_append, {"sg"}),
    "sg_split": (sg_split, {"sg", "alloc"}),
    "sgl_alloc": (unallocated(lambda world: mmc.sgl_alloc(world.mem, 300 * PAGE), mmc.sgl_free), {"frame", "list", "sg"}),
    "dma_map_sgtable": (dma_map, {"table", "iommu_map"}),
    # ---- address spaces
    "a new MM": (lambda world: ((lambda: MM(world.mem)), (lambda mm: mm.exit())), {"frame", "table", "alloc"}),
    "mmap populate": (space(lambda w, mm, b: mm.mmap(32 * PAGE, flags=ANON | mmc.MAP_POPULATE), undo=unmap(32 * PAGE)),
                      {"frame", "table", "alloc"}),
    "mmap populate, THP": (space(lambda w, mm, b: mm.mmap(2 * HUGE, flags=ANON | mmc.MAP_POPULATE), undo=unmap(2 * HUGE), thp="always"),
                           {"frame", "table", "alloc"}),
    "mmap locked": (space(lambda w, mm, b: mm.mmap(32 * PAGE, flags=ANON | mmc.MAP_LOCKED), undo=unmap(32 * PAGE)),
                    {"frame", "table", "alloc"}),
    "mmap hugetlb": (space(lambda w, mm, b: mm.mmap(2 * HUGE, flags=ANON | mmc.MAP_HUGETLB | mmc.MAP_POPULATE), undo=unmap(2 * HUGE)),
                     {"frame", "table", "alloc"}),
    "mmap over a hole": (space(lambda w, mm, addr: mm.mmap(8 * PAGE, flags=ANON | mmc.MAP_FIXED, addr=addr + 8 * PAGE),
                               lambda w, mm: written(mm, 48 * PAGE)), {"alloc"}),
    "touch": (space(lambda w, mm, addr: mm.touch(addr, 32 * PAGE), lambda w, mm: mm.mmap(32 * PAGE)), {"frame", "table"}),
    "touch, THP": (space(lambda w, mm, addr: mm.touch(addr, 2 * HUGE), advised), {"frame", "table"}),
    "touch, mTHP": (space(lambda w, mm, addr: mm.touch(addr, 64 * PAGE), lambda w, mm: mm.mmap(64 * PAGE), mthp=(4,)), {"frame", "table"}),
    "touch hugetlb": (space(lambda w, mm, addr: mm.touch(addr, 2 * HUGE), lambda w, mm: mm.mmap(2 * HUGE, flags=ANON | mmc.MAP_HUGETLB)),
                      {"frame", "table"}),
    "touch a file": (space(lambda w, mm, addr: mm.touch(addr, 32 * PAGE), shared_file()), {"frame", "table"}),
    "touch ext4": (space(lambda w, mm, addr: mm.touch(addr, 32 * PAGE), shared_file("ext4")), {"frame", "table"}),
    "write to a private file": (space(lambda w, mm, addr: mm.touch(addr, 4 * PAGE), private_of_file), {"frame", "table"}),
    "write after fork": (space(lambda w, mm, addr: mm.touch(addr, 4 * PAGE), forked(lambda w, mm: written(mm, 32 * PAGE))), {"frame"}),
    "write after fork, THP": (space(lambda w, mm, addr: mm.touch(addr, 4 * PAGE), forked(lambda w, mm: thp(mm))), {"frame", "table"}),
    "write after fork, hugetlb": (space(lambda w, mm, addr: mm.touch(addr, HUGE), forked(lambda w, mm: hugetlb(mm))), {"frame"}),
    "swap out": (space(lambda w, mm, addr: mm.madvise(addr, 64 * PAGE, mmc.MADV_PAGEOUT), lambda w, mm: written(mm, 64 * PAGE)), {"alloc"}),
    "swap out, THP": (space(lambda w, mm, addr: mm.madvise(addr, HUGE, mmc.MADV_PAGEOUT), lambda w, mm: thp(mm)),
                      {"frame", "table", "alloc"}),
    "swap out, tmpfs": (space(lambda w, mm, addr: mm.madvise(addr, 8 * PAGE, mmc.MADV_PAGEOUT),
                              lambda w, mm: (lambda addr: (mm.write(addr, b"t" * 8 * PAGE), addr)[1])(shared_file()(w, mm))), {"alloc"}),
    "swap in": (space(lambda w, mm, addr: mm.read(addr, 32 * PAGE), out), {"frame"}),
    "swap in by a write": (space(lambda w, mm, addr: mm.touch(addr, 64 * PAGE), out), {"frame"}),
    "collapse": (space(lambda w, mm, addr: mm.madvise(addr, HUGE, mmc.MADV_COLLAPSE), sparse), {"frame"}),
    "split by a system call": (space(lambda w, mm, addr: mm.mprotect(addr + 5 * PAGE, PAGE, mmc.PROT_READ), lambda w, mm: thp(mm)),
                               {"frame", "table", "alloc"}),
    "folio_split": (folio_split, {"frame", "table"}),
    "mprotect in the middle": (space(lambda w, mm, addr: mm.mprotect(addr + 5 * PAGE, PAGE, mmc.PROT_READ),
                                     lambda w, mm: written(mm, 32 * PAGE)), {"alloc"}),
    "munmap in the middle": (space(lambda w, mm, addr: mm.munmap(addr + 5 * PAGE, PAGE), shared_file()), {"alloc"}),
    "munmap of half a THP": (space(lambda w, mm, addr: mm.munmap(addr + 256 * PAGE, 256 * PAGE), lambda w, mm: thp(mm)),
                             {"frame", "table", "alloc"}),
    "mremap, moved": (space(lambda w, mm, addr: mm.mremap(addr, 32 * PAGE, 64 * PAGE, addr - 64 * HUGE),
                            lambda w, mm: written(mm, 32 * PAGE)),
                      {"frame", "table", "alloc"}),
    "mremap, part of a THP": (space(lambda w, mm, addr: mm.mremap(addr + 8 * PAGE, 8 * PAGE, 16 * PAGE, addr - 64 * HUGE),
                                    lambda w, mm: thp(mm)), {"frame", "table", "alloc"}),
    "mremap, grown in place": (space(lambda w, mm, addr: mm.mremap(addr, 16 * PAGE, 32 * PAGE), locked_half), {"alloc"}),
    "mremap of a file": (space(lambda w, mm, addr: mm.mremap(addr, 16 * PAGE, 16 * PAGE, addr - 64 * HUGE), shared_file()), {"alloc"}),
    "MADV_POPULATE_WRITE": (space(lambda w, mm, addr: mm.madvise(addr, 32 * PAGE, mmc.MADV_POPULATE_WRITE),
                                  lambda w, mm: mm.mmap(32 * PAGE)),
                            {"frame", "table"}),
    "MADV_DONTNEED in a THP": (space(lambda w, mm, addr: mm.madvise(addr + PAGE, 8 * PAGE, mmc.MADV_DONTNEED), lambda w, mm: thp(mm)),
                               {"frame", "table"}),
    "hmm_range_fault": (space(lambda w, mm, addr: mmc.hmm_range_fault(mm, addr, 32, mmc.HMM_PFN_REQ_FAULT | mmc.HMM_PFN_REQ_WRITE),
                              lambda w, mm: mm.mmap(32 * PAGE)), {"frame", "table"}),
    # ---- files
    "a new file": (file_case(lambda world: File(world.mem, 32 * PAGE)), {"alloc"}),
    "a new ext4 file": (file_case(lambda world: File(world.mem, 32 * PAGE, "ext4")), {"alloc"}),
    "a new pfnmap": (file_case(lambda world: File(world.mem, 8 * PAGE, "pfnmap")), {"frame", "alloc"}),
    "a longer file": (grow_file("tmpfs"), {"alloc"}),
    "a longer ext4 file": (grow_file("ext4"), {"alloc"}),
    "file.write": (write_file, {"frame"}),
    "memfd": (memfd("tmpfs", 16 * PAGE, 16), {"frame", "migrate", "alloc"}),
    "memfd, hugetlbfs": (memfd("hugetlbfs", 2 * HUGE, 2), {"frame", "alloc"}),
    # ---- lists and frames
    "grab_pages": (grab, {"alloc"}),
    "unpin_user_pages": (release(mmc.unpin_user_pages), {"alloc"}),
    "unpin_user_pages_dirty_lock": (release(lambda pages: mmc.unpin_user_pages_dirty_lock(pages, None, True)), {"alloc"}),
    "unpin a range": (release(lambda pages: mmc.unpin_user_page_range_dirty_lock(pages[0], len(pages), True)), {"alloc"}),
    "alloc_pages_bulk": (unallocated(lambda world: mmc.alloc_pages_bulk(world.mem, 40), mmc.release_pages), {"frame", "list"}),
    "folio_alloc": (unallocated(lambda world: mmc.folio_alloc(world.mem, 4), mmc.folio_put), {"frame"}),
    "PageList": (unallocated(lambda world: PageList(world.mem, range(2, 500)), lambda pages: None), {"list"}),
}


def untouched(build):
    """What a world looks like that nobody called anything in: looking faults, so it is a world of its own."""
    world = World(**getattr(build, "config", {}))
    call, undo = build(world)
    before = world.looks()
    undo(call())
    del call, undo
    world.end()
    return before


def attempt(build, site, nth, before):
    """One world, one failure. Returns whether anything failed."""
    world = World(**getattr(build, "config", {}))
    call, undo = build(world)
    result, refused = None, False
    world.mem.check()
    with world.mem.inject(site, nth) as injection:
        try:
            result = call()
        except (MMError, MemoryError) as error:
            assert injection.fired, f"{error!r}, and nothing was made to fail"
            refused = True
    world.mem.check()
    if refused:
        stat = world.mem.vmstat()
        assert stat["nr_foll_pin_acquired"] - stat["nr_foll_pin_released"] == before[0], "pins leak"
        assert world.looks() == before
        world.mem.check()
        result = call()             # what failed can be done again
        world.mem.check()
    undo(result)
    del result, call, undo
    world.end()
    return injection.fired


@pytest.mark.parametrize("site", SITES)
@pytest.mark.parametrize("name", CASES)
def test_a_failure_at_any_step_leaves_nothing(name, site):
    build, sites = CASES[name]
    before, hits, nth = untouched(build), 0, 1
    while attempt(build, site, nth, before):
        hits += 1
        # One by one at first; a copy of 512 pages is 512 times the same step.
        nth += 1 if nth < CLOSELY else nth // 4
    assert (hits > 0) == (site in sites), f"{hits} occurrences of {site!r}, and the table says {sorted(sites)}"


@pytest.mark.parametrize("acquire", ["sink", "batch", "page"])
def test_a_ledger_says_what_it_could_not_book(acquire):
    """Without memory for the runs of a mapping, nobody knows which folios it took: the ledger must not call that balanced."""
    nth, unbooked, fired = 1, 0, True
    while fired:
        world = World()
        mm = world.mm()
        addr = scattered(mm, 40)
        container = mmc.VFIOContainer(world.mem, acquire=acquire)
        container.attach(mmc.IOMMUDomain(world.mem))
        world.undo.callback(container.close)
        with mmc.PinLedger(world.mem) as ledger:
            with world.mem.inject("list", nth) as injection:
                try:
                    container.map_dma(mm, addr, 0, 40 * PAGE)
                except MMError:
                    pass
            fired = injection.fired
            if container.mappings and sum(ledger.by_holder().values()) != 40:
                unbooked += 1
                with pytest.raises(MemoryError):
                    ledger.assert_balanced()
            container.unmap_dma(0, 0, mmc.VFIO_DMA_UNMAP_FLAG_ALL)
            del ledger
        world.end()
        nth += 1
    assert nth > 2 and (unbooked > 0) == (acquire != "sink")
