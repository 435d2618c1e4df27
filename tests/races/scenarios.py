"""Small scenarios of two or three actors on the real code paths, and what must hold at the end of each.

A class makes a world; actors() are the calls that race; end() says what is lawful. An actor may be refused in ways that its
comment names. Lines show one interleaving, top to bottom.
"""
import errno

import mmcore as mmc
from mmcore import BadPage, FOLL_LONGTERM, FOLL_WRITE, MM, Memory, MMError

PAGE, HUGE = 4096, 2 << 20


class World:
    config = {}
    size = "8M"

    def __init__(self):
        self.mem = Memory(self.size, **self.config)
        self.free = self.mem.vmstat()["nr_free_pages"]
        self.build()

    def build(self):
        pass

    def over(self):
        """Everything is released: lawful and empty."""
        self.mem.check()
        stat = self.mem.vmstat()
        assert stat["nr_foll_pin_acquired"] == stat["nr_foll_pin_released"], "pins are left"
        assert stat["nr_free_pages"] == self.free, f"{self.free - stat['nr_free_pages']} frames are not free"
        self.mem.close()


def may(errors, call, *args, **kwargs):
    """The call's result, or None when it is refused with one of these errno."""
    try:
        return call(*args, **kwargs)
    except MMError as error:
        if error.errno not in errors:
            raise


class GrabAgainstLastPut(World):
    """
        holder   folio_put, the last one
        taker    try_grab_folio                ENOMEM when it comes too late, BadPage when the frame is seen free at once
    """
    def build(self):
        self.folio, self.got = mmc.folio_alloc(self.mem, 2), False

    def take(self):
        try:
            mmc.try_grab_folio(self.folio, 1)
            self.got = True
        except MMError as error:
            assert error.errno == errno.ENOMEM

    def actors(self):
        return [lambda: mmc.folio_put(self.folio), self.take]

    def end(self):
        if self.got:
            assert self.folio.refcount == 1 and self.folio.pincount == 1
            mmc.unpin_folio(self.folio)
        self.over()


class GrabSmallAgainstLastPut(GrabAgainstLastPut):
    """The same with a small folio, where a pin is 1024 references."""
    def build(self):
        self.folio, self.got = mmc.folio_alloc(self.mem, 0), False

    def end(self):
        if self.got:
            assert self.folio.refcount == 1024
            mmc.unpin_folio(self.folio)
        self.over()


class GrabAgainstSplit(World):
    """
        taker      grab_pages of a page in the middle        of the folio, or of the piece
        splitter   folio_lock, folio_split, folio_unlock     EAGAIN when the pin came first
    """
    def build(self):
        self.folio, self.pieces = mmc.folio_alloc(self.mem, 2), None
        self.page = mmc.PageList(self.mem, [self.folio.pfn + 2])

    def split(self):
        mmc.folio_lock(self.folio)
        self.pieces = may((errno.EAGAIN,), mmc.folio_split, self.folio)
        mmc.folio_unlock(self.folio)

    def actors(self):
        # The grab may find the count frozen for the split: ENOMEM.
        return [lambda: setattr(self, "got", may((errno.ENOMEM,), mmc.grab_pages, self.page) is None), self.split]

    def end(self):
        stat = self.mem.vmstat()
        pins = stat["nr_foll_pin_acquired"] - stat["nr_foll_pin_released"]
        if pins:
            holder = self.mem.page(self.folio.pfn + 2).folio
            assert holder.pincount == 1 and holder.nr_pages == (1 if self.pieces else 4)
            mmc.unpin_user_pages(self.page)
        for folio in self.pieces or [self.folio]:
            mmc.folio_put(folio)
        self.over()


class UnpinAgainstFree(World):
    """
        holder   folio_put, of the last plain reference
        driver   unpin_user_page, of the last pin            whoever is last frees it, once
    """
    order = 2

    def build(self):
        self.folio = mmc.folio_alloc(self.mem, self.order)
        mmc.try_grab_folio(self.folio, 1)

    def actors(self):
        return [lambda: mmc.folio_put(self.folio), lambda: mmc.unpin_user_page(mmc.folio_page(self.folio, 0))]

    def end(self):
        self.over()


class UnpinSmallAgainstFree(UnpinAgainstFree):
    """The same with a small folio."""
    order = 0


class UnpinsAgainstFree(UnpinAgainstFree):
    """Three actors: two drivers, one by a list and one by the folio, and the holder."""
    def build(self):
        self.folio = mmc.folio_alloc(self.mem, 2)
        mmc.try_grab_folio(self.folio, 3)

    def actors(self):
        pages = mmc.PageList(self.mem, [self.folio.pfn, self.folio.pfn + 3])
        return [lambda: mmc.folio_put(self.folio), lambda: mmc.unpin_user_pages(pages), lambda: mmc.unpin_user_folio(self.folio, 1)]


class UnpinAgainstPassingPin(World):
    """
        driver   unpin_user_page, of the last pin      is never refused for a pin that was there only while it looked
        walk     try_grab_folio, unpin_folio           as the walk without locks pins a page, sees that its entry changed,
                                                       and takes the pin back; ENOMEM when the driver was first
    """
    order = 2

    def build(self):
        self.folio = mmc.folio_alloc(self.mem, self.order)
        mmc.try_grab_folio(self.folio, 1)
        mmc.folio_put(self.folio)
        self.page = mmc.folio_page(self.folio, 0)

    def drop(self):
        mmc.unpin_user_page(self.page)

    def passes(self):
        try:
            mmc.try_grab_folio(self.folio, 1)
        except MMError as error:
            assert error.errno == errno.ENOMEM
        else:
            mmc.unpin_folio(self.folio)

    def actors(self):
        return [self.drop, self.passes]

    def end(self):
        self.over()


class UnpinSmallAgainstPassingPin(UnpinAgainstPassingPin):
    """The same with a small folio."""
    order = 0


class PutAgainstPassingPin(UnpinAgainstPassingPin):
    """The same with a plain reference as the last one."""
    def build(self):
        self.folio = mmc.folio_alloc(self.mem, self.order)

    def drop(self):
        mmc.folio_put(self.folio)


class PutAgainstPassingLock(PutAgainstPassingPin):
    """The walk takes the folio's lock as well, with a reference of its own."""
    def passes(self):
        if mmc.folio_try_get(self.folio):
            mmc.folio_lock(self.folio)
            mmc.folio_unlock(self.folio)
            mmc.folio_put(self.folio)


class DirtyAgainstWriteback(World):
    """
        driver      unpin_user_pages_dirty_lock(make_dirty)
        writeback   folio_lock, clear_dirty_for_io, start_writeback, unlock, end_writeback

    What the device wrote is dirty or was written back: never neither.
    """
    def build(self):
        self.folio = mmc.folio_alloc(self.mem, 0)
        self.pages = mmc.PageList(self.mem, [self.folio.pfn])
        mmc.try_grab_folio(self.folio, 1)
        mmc.folio_mark_dirty_lock(self.folio)
        self.written = False

    def write(self):
        mmc.folio_lock(self.folio)
        self.written = mmc.folio_clear_dirty_for_io(self.folio)
        if self.written:
            mmc.folio_start_writeback(self.folio)
        mmc.folio_unlock(self.folio)
        if self.written:
            mmc.folio_end_writeback(self.folio)

    def actors(self):
        return [lambda: mmc.unpin_user_pages_dirty_lock(self.pages, None, True), self.write]

    def end(self):
        stat = self.mem.vmstat()
        assert self.written or self.folio.dirty
        assert stat["nr_dirty"] == int(self.folio.dirty) and stat["nr_writeback"] == 0 and not self.folio.locked
        self.mem.check()
        mmc.folio_put(self.folio)
        self.over()


class Spaces(World):
    """With an address space of two pages that were written."""
    def build(self):
        self.mm, self.child, self.pages = MM(self.mem), None, None
        self.addr = self.mm.mmap(2 * PAGE)
        self.mm.write(self.addr, b"a" * PAGE + b"b" * PAGE)
        self.mm.has_pinned = True

    def end(self):
        self.mem.check()
        if self.pages is not None and len(self.pages):
            self.same_page()
            mmc.unpin_user_pages(self.pages)
        self.mem.check()
        if self.child is not None:
            self.child.exit()
        self.mm.exit()
        self.over()

    def same_page(self):
        """What a device writes through the pin, the process sees, and the reverse: it is the same page."""
        self.mm.write(self.addr, b"P")
        assert bytes(mmc.page_address(self.pages[0])[:1]) == b"P", "the process got a copy: the device has another page"
        if self.child is not None:
            assert self.child.read(self.addr, 1) == b"a", "the child sees what its parent wrote"


class ForkAgainstFastPin(Spaces):
    """
        forker   fork: write-protect, share
        pinner   pin_user_pages_fast: sees write_protect_seq move, and takes its pins back
    """
    def actors(self):
        def fork():
            self.child = self.mm.fork()

        def pin():
            self.pages = mmc.pin_user_pages_fast(self.mm, self.addr, 2, FOLL_WRITE)
        return [fork, pin]


class CollapseAgainstFastPin(Spaces):
    """
        khugepaged   MADV_COLLAPSE        EAGAIN when it meets a pin
        pinner       pin_user_pages_fast
    """
    size = "16M"

    def build(self):
        self.mm, self.child, self.pages = MM(self.mem), None, None
        self.addr = self.mm.mmap(HUGE)
        self.mm.madvise(self.addr, HUGE, mmc.MADV_NOHUGEPAGE)
        self.mm.write(self.addr, b"a" * PAGE + b"b" * PAGE)
        self.mm.madvise(self.addr, HUGE, mmc.MADV_HUGEPAGE)

    def actors(self):
        def pin():
            self.pages = mmc.pin_user_pages_fast(self.mm, self.addr, 2, FOLL_WRITE)
        return [lambda: may((errno.EAGAIN, errno.EBUSY), self.mm.madvise, self.addr, HUGE, mmc.MADV_COLLAPSE), pin]


class MunmapAgainstLongterm(Spaces):
    """
        owner    munmap
        driver   pin_user_pages(FOLL_LONGTERM) of a page in Movable memory, which is moved first     EFAULT when it is gone
    """
    config = {"movable": "4M"}

    def actors(self):
        def pin():
            self.pages = may((errno.EFAULT, errno.ENOMEM), mmc.pin_user_pages, self.mm, self.addr, 2, FOLL_WRITE | FOLL_LONGTERM)
        return [lambda: self.mm.munmap(self.addr, 2 * PAGE), pin]

    def same_page(self):
        assert all(not page.folio.mapcount for page in self.pages)


class MunmapAgainstFastPin(MunmapAgainstLongterm):
    """The walk without locks, against tables that go."""
    config = {}

    def actors(self):
        def pin():
            self.pages = may((errno.EFAULT,), mmc.pin_user_pages_fast, self.mm, self.addr, 2, FOLL_WRITE)
        return [lambda: self.mm.munmap(self.addr, 2 * PAGE), pin]


class LongtermAgainstLongterm(Spaces):
    """
        driver       pin_user_pages(FOLL_LONGTERM) of pages in Movable memory: isolated, moved, pinned
        another      the same; finds them isolated, gives its pins back, waits       ENOMEM: who moves met a pin of the other
    """
    config = {"movable": "4M"}

    def actors(self):
        def pin(name):
            def act():
                setattr(self, name, may((errno.ENOMEM,), mmc.pin_user_pages, self.mm, self.addr, 2, FOLL_WRITE | FOLL_LONGTERM))
            return act
        return [pin("pages"), pin("others")]

    def end(self):
        assert self.pages is not None or self.others is not None, "both were refused"
        if self.others is not None:
            assert self.pages is None or self.pages.pfns.tolist() == self.others.pfns.tolist()
            assert all(mmc.folio_is_longterm_pinnable(page.folio) for page in self.others)
            mmc.unpin_user_pages(self.others)
        super().end()


class ExitAgainst(Spaces):
    """
        owner    exit
        other    a call that found the process alive            ESRCH when it comes too late
    """
    def build(self):
        super().build()
        self.file = mmc.File(self.mem, 4 * PAGE)

    def call(self):
        raise NotImplementedError

    def actors(self):
        return [self.mm.exit, lambda: may((errno.ESRCH, errno.EFAULT), self.call)]

    def end(self):
        self.mem.check()
        if self.child is not None:
            self.child.exit()
        assert "0 mappings" in repr(self.file)
        self.file = None
        self.over()


class ExitAgainstMmap(ExitAgainst):
    def call(self):
        self.mm.mmap(2 * PAGE, flags=mmc.MAP_SHARED | mmc.MAP_POPULATE, file=self.file)


class ExitAgainstTouch(ExitAgainst):
    def call(self):
        self.mm.touch(self.addr, 2 * PAGE)


class ExitAgainstFork(ExitAgainst):
    def call(self):
        self.child = self.mm.fork()


class ExitAgainstMadvise(ExitAgainst):
    def call(self):
        self.mm.madvise(self.addr, 2 * PAGE, mmc.MADV_DONTNEED)


class ForkAgainstMmapOfFile(Spaces):
    """
        forker   fork            the child has the mapping or not; if so, it keeps the file
        mapper   mmap
    """
    def actors(self):
        self.at = self.addr + 16 * PAGE
        self.mm.mmap(PAGE, addr=self.at)        # the tables are there

        def fork():
            self.child = self.mm.fork()

        def mmap():
            file = mmc.File(self.mem, PAGE)
            file.write(0, b"f")
            self.mm.mmap(PAGE, flags=mmc.MAP_SHARED | mmc.MAP_FIXED, file=file, addr=self.at)
        return [fork, mmap]

    def end(self):
        shared = bool(self.child.find_vma(self.at).flags & mmc.VM.SHARED)
        assert shared == (self.child.find_vma(self.at).file is not None), "the child does not keep what it maps"
        self.mm.exit()
        self.mem.check()
        assert self.child.read(self.at, 1) == (b"f" if shared else bytes(1))
        self.child.exit()
        self.over()


class ViewAgainstTable(Spaces):
    """
        viewer   page_address, and a view from behind one that was released: each can write, and then no table is made of the
                 frame, or is refused
        mover    mremap onto the page: unmaps it, which frees the lowest frame there is; then makes a table
    """
    def build(self):
        lowest = mmc.alloc_page(self.mem)
        super().build()
        self.at, self.views = self.addr - (1 << 31), []
        self.mm.touch(self.mm.mmap(2 * PAGE, addr=self.at) + PAGE, PAGE)        # the tables are there
        mmc.put_page(lowest)
        self.mm.touch(self.at, PAGE)
        self.page = self.mm.page_at(self.at)
        assert self.page == lowest
        self.mm.munmap(self.at + PAGE, PAGE)

    def actors(self):
        with mmc.page_address(self.page) as first:
            behind = first.obj

        def look():
            for view in (lambda: mmc.page_address(self.page), lambda: memoryview(behind)):
                try:
                    self.views.append(view())
                except (BadPage, BufferError):
                    pass

        def move():
            self.mm.mremap(self.addr, PAGE, PAGE, self.at)
        return [look, move]

    def end(self):
        table = int(self.mem.pages["page_type"][self.page.pfn]) >> 24 == 0xf2
        assert not table or all(view.readonly for view in self.views), "a view can write a page table"
        for view in self.views:
            view.release()
        super().end()


# class, preemptions, interleavings at most
SCENARIOS = [
    (GrabAgainstLastPut, 4, 4000), (GrabSmallAgainstLastPut, 4, 4000), (GrabAgainstSplit, 3, 3000), (UnpinAgainstFree, 4, 4000),
    (UnpinSmallAgainstFree, 4, 4000), (UnpinsAgainstFree, 3, 4000), (UnpinAgainstPassingPin, 4, 4000),
    (UnpinSmallAgainstPassingPin, 4, 4000), (PutAgainstPassingPin, 4, 4000), (PutAgainstPassingLock, 4, 4000),
    (DirtyAgainstWriteback, 3, 3000), (ForkAgainstFastPin, 2, 3000), (CollapseAgainstFastPin, 2, 3000),
    (MunmapAgainstLongterm, 2, 3000), (MunmapAgainstFastPin, 2, 3000),
    (LongtermAgainstLongterm, 2, 3000), (ExitAgainstMmap, 2, 1500), (ExitAgainstTouch, 2, 1500),
    (ExitAgainstFork, 2, 1500), (ExitAgainstMadvise, 2, 1500),
    (ForkAgainstMmapOfFile, 2, 1500), (ViewAgainstTable, 3, 1500),
]
# a fault planted into the build, a scenario that must find it, and the preemptions that it takes: 1 compare-and-swap does not
# compare; 2 the fast walk does not look whether a fork began; 3 why a last reference must stay is looked at twice, and not
# with the count frozen; 4 fork does not look whether it kept all files; 5 a new view does not look whether its frame is a table
PLANTED = [(1, UnpinAgainstFree, 2), (1, UnpinsAgainstFree, 2), (2, ForkAgainstFastPin, 2), (3, UnpinAgainstPassingPin, 3),
           (3, PutAgainstPassingPin, 3), (3, PutAgainstPassingLock, 3), (4, ForkAgainstMmapOfFile, 2), (5, ViewAgainstTable, 2)]
