"""What the threads of `mmcore stress` do: one function a word of --mix, one operation a call.

A job draws from its thread's own generator, keeps what it acquired in its thread's own lists, and shares everything
else: the Memory, the address spaces, their areas and files. It may be refused (MMError with an errno of REFUSALS);
anything else is a failure.
"""
import errno

import numpy as np

import mmcore as mmc

PAGE, HUGE = 4096, 2 << 20
#: What an operation may meet because of what other threads do: no memory, nothing mapped, busy, try again.
REFUSALS = {errno.ENOMEM, errno.EFAULT, errno.EAGAIN, errno.EBUSY, errno.ENOSPC}
AREA = 4 * HUGE                 # of each address space, anonymous
FILE = HUGE                     # of each file
POOL = 8                        # hugetlb pages; an address space maps one of them
HELD = 12                       # things of one kind that a thread holds at most
GENERATIONS = ("leaf", "page")
RELEASES = ("run", "head", "page")
WRITE, LONGTERM = mmc.FOLL_WRITE, mmc.FOLL_LONGTERM
ACCESS = mmc.IB_ACCESS.LOCAL_WRITE | mmc.IB_ACCESS.REMOTE_WRITE
ANONYMOUS = mmc.MAP_PRIVATE | mmc.MAP_ANONYMOUS


class World:
    """A Memory with every zone, a few processes, their areas and files: what all threads share."""

    def __init__(self, threads, debug=False):
        self.mem = mmc.Memory("384M", movable="96M", cma="32M", hugetlb={"2M": POOL}, thp="madvise",
                              shmem_thp="madvise",
                              mthp=(4,), debug=debug)
        self.mem.huge_zero_folio        # made once, and never freed: what is free at the end can be compared
        self.free = self.mem.vmstat()["nr_free_pages"]
        self.mms = [mmc.MM(self.mem) for _ in range(max(2, (threads + 1) // 2))]
        self.files = [mmc.File(self.mem, FILE, "tmpfs"), mmc.File(self.mem, FILE, "ext4")]
        self.device = mmc.IBDevice(self.mem)
        self.areas = [self._areas(mm, k) for k, mm in enumerate(self.mms)]

    def _areas(self, mm, k):
        anon = mm.mmap(AREA)
        mm.madvise(anon, AREA // 2, mmc.MADV_HUGEPAGE)
        areas = [(anon, AREA, False), (anon, AREA, False)]       # twice: drawn twice as often
        for file in self.files:
            at = mm.mmap(FILE, flags=mmc.MAP_SHARED, file=file)
            mm.madvise(at, FILE, mmc.MADV_HUGEPAGE)
            areas.append((at, FILE, file.kind == "ext4"))
        areas.append((mm.mmap(FILE, flags=mmc.MAP_PRIVATE, file=self.files[0]), FILE, False))
        if k < POOL // 2:
            areas.append((mm.mmap(HUGE, flags=ANONYMOUS | mmc.MAP_HUGETLB), HUGE, False))
        return areas

    def close(self):
        """End all processes and files, check that nothing is left, and give the memory back."""
        for mm in self.mms:
            mm.exit()
        for file in self.files:
            file.truncate(0)
        self.device = None
        self.mms, self.files, self.areas = [], [], []
        self.mem.check()
        stat = self.mem.vmstat()
        if stat["nr_foll_pin_acquired"] != stat["nr_foll_pin_released"]:
            raise mmc.BadPage("pins", "every holder has released, and {} pins are left".format(
                stat["nr_foll_pin_acquired"] - stat["nr_foll_pin_released"]))
        if stat["nr_free_pages"] != self.free:
            raise mmc.BadPage("frames",
                              f"every process has ended, and {self.free - stat['nr_free_pages']} pages are not free")
        self.mem.close()


class Worker:
    """One thread: its generator, what it holds, and what it has done."""

    def __init__(self, world, rng):
        self.world, self.rng = world, rng
        self.pins, self.umems, self.mappings = [], [], []
        self.tables, self.containers = {}, {}
        self.done, self.refused, self.last = 0, 0, ""

    # ---- drawing -----------------------------------------------------------------------------------------------------
    def space(self):
        """Draw an address space and its areas."""
        k = self.rng.randrange(len(self.world.mms))
        return self.world.mms[k], self.world.areas[k]

    def range(self, most=1024):
        """Draw (mm, address, pages, whether the file has writeback)."""
        mm, areas = self.space()
        start, size, writeback = self.rng.choice(areas)
        first = self.rng.randrange(size // PAGE)
        return mm, start + first * PAGE, min(self.rng.choice((1, 3, 16, 64, 512, most)),
                                             size // PAGE - first), writeback

    def anon(self, most=512):
        """Draw (mm, address, pages) of anonymous memory."""
        mm, areas = self.space()
        first = self.rng.randrange(AREA // PAGE)
        return mm, areas[0][0] + first * PAGE, min(self.rng.choice((1, 5, 32, most)), AREA // PAGE - first)

    # ---- holding -----------------------------------------------------------------------------------------------------
    def hold(self, pages):
        """Keep pinned pages; the oldest go when there are too many."""
        self.pins.append(pages)
        if len(self.pins) > HELD:
            release(self, self.pins.pop(0), False)

    def lists(self):
        """The pages of what it pinned and registered, a PageList each."""
        lists = [pages.to_pagelist() if isinstance(pages, mmc.PageRanges) else pages for pages in self.pins]
        return lists + [mmc.PageList(self.world.mem, mmc.sg_page_pfns(umem.sgt)) for umem, _ in self.umems]

    def nr_pins(self):
        """Pins this thread holds, as the statistics count them: zero pages have none."""
        zero = self.world.mem.zero_page.pfn
        count = sum(int(np.count_nonzero(pages.pfns != zero)) for pages in self.lists())
        # io_uring keeps a pin an entry.
        count += sum(len(buffer.bvecs) for table in self.tables.values() for buffer in table.buffers
                     if buffer is not None)
        return count + sum(size // PAGE for _, _, size in self.mappings)

    def release_all(self):
        """Release everything."""
        while self.pins:
            release(self, self.pins.pop(), False)
        while self.umems:
            mmc.ib_umem_release(self.umems.pop()[0])
        for table in self.tables.values():
            if len(table.buffers):
                table.unregister()
        while self.mappings:
            container, iova, size = self.mappings.pop()
            container.unmap_dma(iova, size)
        self.tables, self.containers = {}, {}


def release(worker, pages, make_dirty):
    """Release pinned pages by a generation drawn, sometimes in two parts."""
    rng = worker.rng
    parts = [pages]
    if isinstance(pages, mmc.PageList) and len(pages) > 1 and rng.random() < 0.3:
        cut = rng.randrange(1, len(pages))
        parts = [pages[cut:], pages[:cut]]
    for part in parts:
        if make_dirty:
            mmc.unpin_user_pages_dirty_lock(part, None, True, release=rng.choice(RELEASES))
        else:
            mmc.unpin_user_pages(part, release=rng.choice(RELEASES))


# ---- the jobs --------------------------------------------------------------------------------------------------------
def pin(worker):
    """Pin a range, fast or not, for reading or writing, into a list or runs."""
    rng = worker.rng
    mm, at, nr, _ = worker.range()
    call = rng.choice((mmc.pin_user_pages_fast, mmc.pin_user_pages_fast, mmc.pin_user_pages, mmc.pin_user_pages_remote))
    worker.hold(call(mm, at, nr, rng.choice((WRITE, 0)), acquire=rng.choice(GENERATIONS),
                     output=rng.choice((mmc.PageList, mmc.PageList, mmc.PageRanges))))


def unpin(worker):
    """Release something that is held."""
    if worker.pins:
        release(worker, worker.pins.pop(worker.rng.randrange(len(worker.pins))), False)


def dirty(worker):
    """Mark pages dirty: those of a pin as it is released, or those of one that stays; sometimes write files back."""
    rng = worker.rng
    if worker.pins and rng.random() < 0.6:
        pages = worker.pins.pop(rng.randrange(len(worker.pins)))
        release(worker, pages, True)
    elif worker.pins:
        pages = rng.choice(worker.pins)
        page = pages[rng.randrange(len(pages))] if isinstance(pages, mmc.PageList) and len(pages) else None
        if page is not None and not mmc.is_zero_page(page) and not mmc.is_huge_zero_page(page):
            mmc.set_page_dirty_lock(page)
    else:
        rng.choice(worker.world.files).writeback()


def fork(worker):
    """Fork; the child writes, reads, sometimes forks as well, and ends."""
    rng = worker.rng
    mm, at, nr = worker.anon()
    with mm.fork() as child:
        for _ in range(rng.randrange(3)):
            child.touch(at, nr * PAGE, write=rng.random() < 0.5)
        if rng.random() < 0.2:
            child.fork().exit()


def fault(worker):
    """Touch, drop, unmap and map again, page out: what moves pages under everybody."""
    rng = worker.rng
    what = rng.randrange(6)
    if what < 3:
        mm, at, nr, _ = worker.range(most=256)
        mm.touch(at, nr * PAGE, write=rng.random() < 0.7)
        return
    mm, at, nr = worker.anon(most=128)
    if what == 3:
        mm.madvise(at, nr * PAGE, mmc.MADV_DONTNEED)
    elif what == 4:
        mm.madvise(at, nr * PAGE, mmc.MADV_PAGEOUT)
    else:
        # MAP_FIXED replaces: no moment in which another thread could map something else there.
        mm.mmap(nr * PAGE, flags=ANONYMOUS | mmc.MAP_FIXED, addr=at)


def split(worker):
    """Split leaves and folios: by FOLL_SPLIT_PMD and folio_split(), or by protecting a part."""
    rng = worker.rng
    mm, at, nr = worker.anon(most=32)
    if rng.random() < 0.4:
        mm.mprotect(at, nr * PAGE, mmc.PROT_READ)
        mm.mprotect(at, nr * PAGE, mmc.PROT_READ | mmc.PROT_WRITE)
        return
    pages = mmc.get_user_pages(mm, at, 1, mmc.FOLL_SPLIT_PMD)
    try:
        # The reference taken is the one that a split expects; every piece comes with one.
        pieces = mmc.folio_split(pages[0].folio)
    except mmc.MMError:
        mmc.release_pages(pages)
    else:
        mmc.folios_put(pieces)


def collapse(worker):
    """Make a huge page of base pages."""
    rng = worker.rng
    mm, areas = worker.space()
    at = areas[0][0] + rng.randrange(AREA // HUGE) * HUGE
    mm.madvise(at, HUGE, mmc.MADV_HUGEPAGE)
    try:
        mm.madvise(at, HUGE, mmc.MADV_COLLAPSE)
    except mmc.MMError as error:
        # EINVAL: nothing is mapped there that could be collapsed.
        if error.errno != errno.EINVAL:
            raise


def longterm(worker):
    """Pin for long, moving pages out of Movable and CMA memory; what came back may stay."""
    rng = worker.rng
    mm, at, nr, writeback = worker.range()
    flags = LONGTERM | (0 if writeback else WRITE)
    call = rng.choice((mmc.pin_user_pages, mmc.pin_user_pages_fast))
    pages = call(mm, at, nr, flags, acquire=rng.choice(GENERATIONS))
    worker.hold(pages)
    bad = mmc.longterm_unpinnable(pages)
    if len(bad):
        raise mmc.BadPage("longterm", f"a longterm pin returned PFN {bad[0].pfn:#x}, which may not be pinned for long",
                          pfn=bad[0].pfn)


def umem(worker):
    """Register an RDMA region, or release one."""
    rng = worker.rng
    if worker.umems and (len(worker.umems) >= HELD or rng.random() < 0.5):
        old, _ = worker.umems.pop(rng.randrange(len(worker.umems)))
        mmc.ib_umem_release(old, release=rng.choice(("range", "array", "page")))
        return
    mm, at, nr, writeback = worker.range()
    access = ACCESS if not writeback else mmc.IB_ACCESS.REMOTE_READ
    worker.umems.append((mmc.ib_umem_get(worker.world.device, mm, at, nr * PAGE, access,
                                         acquire=rng.choice(("sink", "list"))), mm))


def iouring(worker):
    """Register fixed buffers in a table of the thread's own, replace one, or drop all."""
    rng = worker.rng
    mm, at, nr, writeback = worker.range()
    if writeback:
        return
    table = worker.tables.setdefault(id(mm), None) or mmc.BufferTable(mm)
    worker.tables[id(mm)] = table
    if not len(table.buffers):
        table.register([(at, nr * PAGE), (at, PAGE)])
    elif rng.random() < 0.5:
        table.update(rng.randrange(2), [(at, nr * PAGE)])
    else:
        table.unregister()


def vfio(worker):
    """Map a range for a device through VFIO, or unmap one."""
    rng = worker.rng
    if worker.mappings and (len(worker.mappings) >= HELD or rng.random() < 0.5):
        container, iova, size = worker.mappings.pop(rng.randrange(len(worker.mappings)))
        container.unmap_dma(iova, size)
        return
    mm, at, nr, writeback = worker.range()
    if writeback:
        return
    key = (id(mm), rng.randrange(2))
    container = worker.containers.get(key)
    if container is None:
        container = mmc.VFIOContainer(worker.world.mem, acquire=("sink", "page")[key[1]],
                                      release=("range", "page")[key[1]])
        container.attach(mmc.IOMMUDomain(worker.world.mem))
        worker.containers[key] = container
    iova = (1 + worker.done % (1 << 20)) << 24
    container.map_dma(mm, at, iova, nr * PAGE)
    worker.mappings.append((container, iova, nr * PAGE))


JOBS = {job.__name__: job for job in (pin, unpin, dirty, fork, fault, split, collapse, longterm, umem, vfio, iouring)}
