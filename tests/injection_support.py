"""The cases of fault injection: worlds in which a call that can fail is tried, by noun."""
import contextlib

import pytest

import mmcore as mmc
from mm_support import ANON, HUGE, PAGE
from mmcore import (FOLL_LONGTERM, FOLL_WRITE, IB_ACCESS_LOCAL_WRITE, MM, BufferTable, Device, File, IBDevice, Memory, MMError, PageList,
                    ProtectionDomain, SGAppendTable)


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
