"""Page tables: geometry, what they cost, what is found in them, and that they are never freed under a walker."""
import errno
import sys
import threading

import pytest

import mmcore as mmc
from mm_support import ANON, HUGE, PAGE, PRESENT, word
from mmcore import MM, MMError, Memory, PageType
from support import refused

TABLE = int(PageType.table) if hasattr(PageType, "table") else 0xF2


def tables_in(mem):
    pages = mem.pages
    return int(((pages["page_type"] >> 24 == TABLE) & (pages["_refcount"] > 0)).sum())


@pytest.mark.parametrize("page_size, levels, pmd", [(4096, 4, 2 << 20), (16384, 3, 32 << 20), (65536, 3, 512 << 20)])
def test_geometry_follows_the_page_size(page_size, levels, pmd):
    """
        4K    9 bits a level   4 levels        16K   11 bits   3 levels        64K   13 bits   3 levels
    """
    with Memory("2G", page_size=page_size, thp="always") as mem, MM(mem) as mm:
        free = mem.vmstat()["nr_free_pages"]
        a = mm.mmap(page_size)
        mm.write(a, b"A")
        assert mm.nr_tables == levels == tables_in(mem)
        assert mem.vmstat()["nr_free_pages"] == free - (levels - 1) - 1
        b = mm.mmap(2 * pmd)
        assert b % pmd == 0 and mm.touch(b, 2 * pmd) == 2
        folio = mm.page_at(b + page_size).folio
        assert folio.nr_pages * page_size == pmd and folio.mapcount == 1
        mm.write(b + pmd - 2, b"abcd")
        mem.check()
        mm.munmap(b + page_size, page_size)
        assert mm.read(b + pmd - 2, 4) == b"abcd" and folio.mapcount == folio.nr_pages - 1
        mem.check()
        child = mm.fork()
        child.write(b + pmd - 2, b"x")
        assert mm.read(b + pmd - 2, 1) == b"a"
        mem.check()
        child.exit()


def test_tables_are_frames_of_their_type():
    with Memory("64M") as mem, MM(mem) as mm:
        a = mm.mmap("1G", flags=ANON | mmc.MAP_FIXED, addr=64 << 30)
        for i in range(5):
            mm.touch(a + i * HUGE, PAGE)
        assert mm.nr_tables == tables_in(mem) == 1 + 1 + 1 + 5
        assert mm.read(a + 77 * HUGE, 1) == b"\0"      # reading needs tables too
        assert mm.nr_tables == tables_in(mem) == 9
        mm.munmap(a, 2 * HUGE)
        assert mm.nr_tables == tables_in(mem) == 7
        mem.check()


@pytest.mark.parametrize("nth", range(1, 8))
def test_every_table_may_be_refused(nth):
    """What was built before the refusal is used by the next try, or goes with the mapping."""
    with Memory("64M") as mem, MM(mem) as mm:
        free = mem.vmstat()["nr_free_pages"]
        a = mm.mmap(4 << 30)
        with mem.inject("table", nth):
            caught = None
            try:
                for i in (0, 1, 1024, 1025):
                    mm.touch(a + i * HUGE, PAGE)
            except MMError as error:
                caught = error
        assert caught is not None and caught.errno == errno.ENOMEM
        mem.check()
        mm.munmap(a, 4 << 30)
        assert mem.vmstat()["nr_free_pages"] == free


def test_splitting_needs_a_table():
    """A cut through a leaf that finds no frame for a table is refused, and the leaf stays."""
    with Memory("64M", thp="always") as mem, MM(mem) as mm:
        a = mm.mmap(2 * HUGE)
        mm.touch(a, 2 * HUGE)
        mm.write(a, b"A")
        calls = [lambda: mm.munmap(a + PAGE, PAGE), lambda: mm.mprotect(a + PAGE, PAGE, 1),
                 lambda: mm.madvise(a + PAGE, PAGE, mmc.MADV_DONTNEED), lambda: mm.madvise(a, PAGE, mmc.MADV_NOHUGEPAGE),
                 lambda: mm.mremap(a, PAGE, 2 * PAGE), lambda: mm.munmap(a + PAGE, HUGE)]
        for call in calls:
            before = mm.vmas, mm.rss, mm.nr_tables
            with mem.inject("table"), pytest.raises(MMError) as caught:
                call()
            assert caught.value.errno == errno.ENOMEM
            assert (mm.vmas, mm.rss, mm.nr_tables) == before and mm.page_at(a).folio.mapcount == 1
            mem.check()
        # The second cut of one range fails: the first one is undone as far as anybody can see.
        with mem.inject("table", 2), pytest.raises(MMError):
            mm.munmap(a + PAGE, HUGE)
        assert len(mm.vmas) == 1 and mm.rss == 1024 and mm.read(a, 1) == b"A"
        mem.check()


def test_mremap_moves_tables_and_leaves():
    """
        |leaf|base|  ── moved by a multiple of the PMD size: the leaf goes whole ── by one page: it is split
    """
    with Memory("64M", thp="always") as mem, MM(mem) as mm:
        a = mm.mmap(HUGE + 8 * PAGE)
        mm.touch(a, HUGE + 8 * PAGE)
        mm.write(a + HUGE - 1, b"ab")
        leaf = mm.page_at(a).folio
        b = mm.mremap(a, HUGE + 8 * PAGE, HUGE + 8 * PAGE, a - (1 << 30))
        assert mm.read(b + HUGE - 1, 2) == b"ab" and leaf.mapcount == 1 and mm.page_at(b).folio == leaf
        assert not word(mm, a) and word(mm, b) & PRESENT
        mem.check()
        c = mm.mremap(b, HUGE + 8 * PAGE, HUGE + 9 * PAGE, b - (1 << 30) + PAGE)
        assert mm.read(c + HUGE - 1, 2) == b"ab" and leaf.mapcount == 512 and mm.page_at(c).folio == leaf
        mem.check()
        with mem.inject("table", 2), pytest.raises(MMError) as caught:
            mm.mremap(c, HUGE + 9 * PAGE, HUGE + 9 * PAGE, a - (7 << 30))
        assert caught.value.errno == errno.ENOMEM and mm.read(c + HUGE - 1, 2) == b"ab" and len(mm.vmas) == 1
        mem.check()


@pytest.mark.parametrize("args, number", [
    (lambda a: (a + 1, PAGE, PAGE), errno.EINVAL), (lambda a: (a, PAGE, 0), errno.EINVAL), (lambda a: (a, 0, PAGE), errno.EINVAL),
    (lambda a: (a, 9 * PAGE, 10 * PAGE), errno.EFAULT), (lambda a: (a - (1 << 32), PAGE, PAGE), errno.EFAULT),
    (lambda a: (a, 2 * PAGE, 2 * PAGE, a + PAGE), errno.EINVAL), (lambda a: (a, PAGE, PAGE, a + 5), errno.EINVAL),
    (lambda a: (a, PAGE, PAGE, PAGE), errno.EPERM), (lambda a: (a, PAGE, PAGE, (1 << 47) - PAGE), errno.EINVAL),
    (lambda a: (a, PAGE, 1 << 47), errno.EINVAL), (lambda a: (a, 8 * PAGE, (1 << 47) - 2 * PAGE), errno.ENOMEM)])
def test_mremap_refuses(args, number):
    with Memory("16M") as mem, MM(mem) as mm:
        a = mm.mmap(8 * PAGE)
        mm.munmap(mm.mmap(PAGE), PAGE)
        mm.mmap(PAGE, flags=ANON | mmc.MAP_FIXED, addr=a + 8 * PAGE, prot=0)
        mm.write(a, b"A")
        before = mm.vmas
        with pytest.raises(MMError) as caught:
            mm.mremap(*args(a))
        assert caught.value.errno == number
        assert mm.vmas == before and mm.read(a, 1) == b"A"
        mem.check()


def test_mremap_of_hugetlb():
    #   a   | H0  H1*  H2  H3  H4*  H5 |        * written; the pool promised the others
    #   b                                 | H0  H1*  H2  H3  H4*  H5 |
    #   c                                                 | H0 H1* H2 |   moved and cut: three go back to the pool
    with Memory("256M", hugetlb={"2M": 8}) as mem, MM(mem) as mm:
        a = mm.mmap(6 * HUGE, flags=ANON | mmc.MAP_HUGETLB)
        mm.write(a + HUGE, b"one")
        mm.write(a + 4 * HUGE, b"four")
        room = (mm.mmap(16 * HUGE, flags=ANON | mmc.MAP_NORESERVE) + HUGE - 1) & ~(HUGE - 1)
        b = mm.mremap(a, 6 * HUGE, 6 * HUGE, room)
        assert b == room and mm.read(b + HUGE, 3) == b"one" and mm.read(b + 4 * HUGE, 4) == b"four" and mm.find_vma(a) is None
        mem.check()
        with pytest.raises(MMError):                        # 2 taken, 4 promised, 2 left
            mm.mmap(3 * HUGE, flags=ANON | mmc.MAP_HUGETLB)
        c = mm.mremap(b, 6 * HUGE, 2 * HUGE + 5, room + 8 * HUGE)
        assert mm.read(c + HUGE, 3) == b"one" and mm.find_vma(c).end == c + 3 * HUGE
        mem.check()
        more = mm.mmap(5 * HUGE, flags=ANON | mmc.MAP_HUGETLB)
        mm.touch(more, 5 * HUGE)
        mm.touch(c, 3 * HUGE)
        before = mm.vmas
        for args in (c + PAGE, HUGE, HUGE), (c, HUGE, HUGE, room + PAGE), (c, 2 * HUGE, 3 * HUGE):
            with pytest.raises(mmc.InvalidArgument):
                mm.mremap(*args)
        assert mm.vmas == before and mm.mremap(c, 3 * HUGE, 3 * HUGE) == c
        mm.exit()
        mem.check()


def test_case_folio_pmd_share_count():
    """A scanner's reference on a page table is no sharing: the table goes when the scanner lets it go."""
    with Memory("16M") as mem, MM(mem) as mm:
        free = mem.vmstat()["nr_free_pages"]
        a = mm.mmap(PAGE)
        mm.touch(a, PAGE)
        tables = [pfn for pfn in range(2, len(mem.pages)) if mem.pages["page_type"][pfn] >> 24 == TABLE]
        assert len(tables) == 4
        scanned = mem.folio(tables[-1])
        assert mmc.folio_try_get(scanned)
        mm.munmap(a, PAGE)
        assert mm.nr_tables == 1 and mem.vmstat()["nr_free_pages"] == free - 1
        mem.check()
        mmc.folio_put(scanned)
        assert mem.vmstat()["nr_free_pages"] == free
        mem.check()


def test_case_alloc_split_large_buddy_last_pfn():
    """Memory that ends with a block of 512 pages: freeing up to its end looks at nothing beyond."""
    with Memory("6M", thp="always") as mem, MM(mem) as mm:
        before = mem.buddyinfo()
        a = mm.mmap(HUGE)
        mm.touch(a, HUGE)
        last = mem.nr_pages - 512
        taken = mm.page_at(a).pfn
        others = []
        while taken != last:
            others.append(mmc.folio_alloc(mem, 9))
            taken = others[-1].pfn
        mm.munmap(a, HUGE)
        for folio in others:
            mmc.folio_put(folio)
        assert mem.buddyinfo() == before
        mem.check()


def test_case_pm_pfnzero_huge():
    """Zero pages are told by both kinds: 512 pages of the huge zero folio, then 512 entries of the small one."""
    with Memory("64M", thp="madvise") as mem, MM(mem) as mm:
        a = mm.mmap(2 * HUGE)
        mm.madvise(a, HUGE, mmc.MADV_HUGEPAGE)
        mm.touch(a, 2 * HUGE, write=False)

        def zero(i):
            page = mm.page_at(a + i * PAGE)
            return mmc.is_zero_page(page) or mmc.is_huge_zero_page(page)

        assert [i for i in range(1024) if not zero(i)] == []
        assert mmc.is_huge_zero_page(mm.page_at(a)) and mmc.is_zero_page(mm.page_at(a + HUGE))
        with mem.inject("frame"):       # no block for a THP: the leaf is split, and one page copied
            mm.write(a, b"x")
        assert [i for i in range(1024) if not zero(i)] == [0]
        mem.check()


def test_walkers_never_see_a_freed_table():
    """Readers without locks beside mmap, touch and munmap of the same place; every answer is a page or None."""
    with Memory("64M", thp="madvise") as mem, MM(mem) as mm:
        a = mm.mmap(HUGE)
        stop = threading.Event()
        seen, wrong = set(), []

        def look():
            while not stop.is_set():
                page = mm.page_at(a + 5 * PAGE)
                if page is not None:
                    if mem.pages["page_type"][page.pfn] >> 24 == TABLE:
                        wrong.append(page)
                    seen.add(page.pfn)

        before = sys.getswitchinterval()
        sys.setswitchinterval(1e-6)
        readers = [threading.Thread(target=look) for _ in range(2)]
        for reader in readers:
            reader.start()
        i = 0
        while i < 1000 or (not seen and i < 100_000):
            i += 1
            mm.touch(a, 8 * PAGE)
            if i % 3 == 0:
                mm.madvise(a, HUGE, mmc.MADV_COLLAPSE)
            mm.munmap(a, HUGE)
            mm.mmap(HUGE, flags=ANON | mmc.MAP_FIXED, addr=a)
        stop.set()
        sys.setswitchinterval(before)
        for reader in readers:
            reader.join()
        assert seen and not wrong
        mem.check()


def test_a_page_table_is_nobodys_to_free_or_to_write():
    """A table is a frame as any other, and can be named by its PFN: its reference is the address space's, its bytes are entries."""
    mem = mmc.Memory("16M", thp="never")
    mm = mmc.MM(mem)
    addr = mm.mmap("1M")
    mm.write(addr, b"hello")
    pages = mem.pages
    tables = [mem.page(pfn) for pfn in range(len(pages)) if pages["page_type"][pfn] >> 24 == TABLE and pages["_refcount"][pfn]]
    del pages
    assert len(tables) == mm.nr_tables
    for table in tables:
        pages = mmc.PageList(mem, [table.pfn])
        for put in (lambda: mmc.put_page(table), lambda: mmc.folio_put_refs(table.folio, 1), lambda: mmc.release_pages(pages),
                    lambda: mmc.release_pages(pages, release="page"), lambda: mmc.folios_put([table.folio])):
            with refused(mem, mmc.BadPage, "engine's own reference"):
                put()
        sgt = mmc.sg_alloc_table_from_pages(pages, 0, 4096)
        for write in (lambda: mmc.sg_zero_buffer(sgt, 8), lambda: mmc.sg_copy_from_buffer(sgt, b"\xff" * 8),
                      lambda: list(mmc.sg_miter(sgt, mmc.SG_MITER_TO_SG))):
            with refused(mem, mmc.InvalidArgument, "nobody may write"):
                write()
        for mark in (mmc.folio_mark_dirty, mmc.folio_mark_dirty_lock, mmc.folio_start_writeback):
            with refused(mem, mmc.BadPage, "page tables are the engine's"):
                mark(table.folio)
        assert mmc.page_address(table).readonly and mmc.folio_address(table.folio).readonly
        mmc.get_page(table)
        mmc.put_page(table)
    assert mm.read(addr, 5) == b"hello"
    mm.exit()
    mem.check()
    assert not any(table.refcount for table in tables)
