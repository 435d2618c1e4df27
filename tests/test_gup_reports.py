"""Reports of the past about get_user_pages, longterm pins and their races, each as a test under the report's id."""
import errno
import threading

import pytest

from gup_support import *
from support import refused


def counts(page):
    return page.folio.refcount, page.folio.pincount


# ---- gup ----------------------------------------------------------------------------------------------------------------------
def test_gup_dax_pud_leaf():
    """A 1 GiB leaf of a device is a leaf by its own bits, not a table to descend into."""
    with Memory("16M", devices=(DevicePages("1G", "generic", align="1G"),)) as mem:
        mm = MM(mem)
        addr = mm.mmap("1G", flags=MAP_SHARED, file=File(mem, "1G", "devdax", device=0))
        mm.touch(addr, PAGE)
        head = mem.devices[0].start_pfn
        pages = pin_user_pages_fast(mm, addr + 5 * PAGE, 2)
        assert pages.pfns.tolist() == [head + 5, head + 6] and mem.folio(head).pincount == 2
        unpin_user_pages(pages)
        over(mem, mm)


def test_gup_hugetlb_refs_unaligned(mem, mm):
    """An address inside the last page of a hugetlb mapping: one page, not none."""
    addr = mm.mmap(HUGE, flags=MAP_PRIVATE | MAP_ANONYMOUS | MAP_HUGETLB)
    mm.touch(addr, HUGE)
    head = mm.page_at(addr)
    before = counts(head)
    pages = pin_user_pages(mm, addr + HUGE - PAGE + 8, 1)
    assert pages.pfns.tolist() == [head.pfn + 511] and counts(head) == (before[0] + 1, before[1] + 1)
    unpin_user_pages(pages)


def test_gup_memfd_alloc_eexist(mem, mm):
    """Somebody fills the index between look-up and creation: what is there is pinned, once."""
    for _ in range(20):
        file = File(mem, HUGE, "hugetlbfs")
        addr = mm.mmap(HUGE, flags=MAP_SHARED | MAP_NORESERVE, file=file)
        filler = threading.Thread(target=mm.touch, args=(addr, HUGE))
        filler.start()
        folios, _ = memfd_pin_folios(file, 0, HUGE - 1, 1)
        filler.join()
        assert len(folios) == 1 and folios[0].pincount == 1 and mm.page_at(addr).folio == folios[0]
        unpin_folios(folios)
        mm.munmap(addr, HUGE)
        file.truncate(0)


def lock_buffers(mm, buffers):
    """A driver that takes several buffers: what it has when one of them fails is what it must give back."""
    taken = []
    for addr, nr in buffers:
        try:
            pages = pin_user_pages_fast(mm, addr, nr, FOLL_WRITE)
        except MMError as error:
            return taken, error.errno
        taken += list(pages)
        if len(pages) < nr:
            return taken, errno.ENOSPC
    return taken, 0


@pytest.mark.parametrize("mapped, nr_taken, error", ((0, 2, errno.EFAULT), (1, 3, errno.ENOSPC), (3, 5, 0)))
def test_gup_multi_buffer_unwind(mem, mm, mapped, nr_taken, error):
    first = mm.mmap(2 * PAGE)
    second = mm.mmap(8 * PAGE)
    mm.munmap(second + mapped * PAGE, (8 - mapped) * PAGE)
    taken, why = lock_buffers(mm, ((first, 2), (second, 3)))
    assert len(taken) == nr_taken and why == error and pins_of(mem) == nr_taken
    unpin_user_pages(taken)
    assert [page.refcount for page in taken] == [1] * nr_taken


def test_gup_partial_pin_unwind(mem, mm):
    addr = mm.mmap(3 * PAGE)
    pages = pin_user_pages_fast(mm, addr, 8, FOLL_WRITE)
    assert len(pages) == 3 and pins_of(mem) == 3
    unpin_user_pages(pages)
    assert [page.refcount for page in pages] == [1] * 3
    mm.munmap(addr, 3 * PAGE)
    with refused(mem, MMError, errno=errno.EFAULT):
        pin_user_pages_fast(mm, addr, 8, FOLL_WRITE)


@pytest.mark.parametrize("call", GETS)
def test_gup_refcount_overflow_get(mem, mm, call):
    """The signed counter is at its end: the reference that would wrap it is refused, and it stays as it is."""
    addr = mm.mmap(PAGE)
    mm.touch(addr, PAGE)
    page = mm.page_at(addr)
    try_grab_folio(page.folio, 0x7fffffff - 2, FOLL_GET)
    assert page.refcount == 0x7fffffff - 1
    got = [call(mm, addr, 1), call(mm, addr, 1)]
    count = page.refcount
    assert count < 0
    with pytest.raises(MMError) as caught:
        call(mm, addr, 1)
    assert caught.value.errno == errno.ENOMEM and page.refcount == count
    for pages in got:
        release_pages(pages)
    folio_put_refs(page.folio, 0x7fffffff - 2)


def test_gup_secretmem_fast(mem, mm):
    addr = mm.mmap(4 * PAGE, flags=MAP_SHARED, file=File(mem, 4 * PAGE, "secretmem"))
    mm.touch(addr, PAGE)
    for call in (pin_user_pages_fast, get_user_pages_fast):
        for flags in (0, FOLL_WRITE):
            with refused(mem, MMError, "secretmem", errno.EFAULT):
                call(mm, addr, 1, flags)
    assert len(get_user_pages_fast_only(mm, addr, 1)) == 0


def test_gup_split_pmd_hugetlb(mem, mm):
    hugetlb = mm.mmap(HUGE, flags=MAP_PRIVATE | MAP_ANONYMOUS | MAP_HUGETLB)
    mm.touch(hugetlb, HUGE)
    with refused(mem, MMError, errno=errno.EOPNOTSUPP):
        get_user_pages(mm, hugetlb, 1, FOLL_GET | FOLL_SPLIT_PMD)
    thp = mm.mmap(HUGE)
    mm.madvise(thp, HUGE, MADV_HUGEPAGE)
    mm.touch(thp, HUGE)
    tables = mm.nr_tables
    pages = get_user_pages(mm, thp, 1, FOLL_GET | FOLL_SPLIT_PMD)
    assert mm.nr_tables == tables + 1 and pages[0].folio.mapcount == 512
    assert [hmm_pfn_to_map_order(word) for word in hmm_range_fault(mm, thp, 512)] == [0] * 512
    release_pages(pages)


@pytest.mark.parametrize("debug", (False, True))
def test_gup_unpin_array_with_null(debug):
    with machine(debug=debug) as mem:
        mm = MM(mem)
        addr = mm.mmap(3 * PAGE)
        p0, p1, p2 = pin_user_pages(mm, addr, 3, FOLL_WRITE)
        released = mem.vmstat()["nr_foll_pin_released"]
        unpin_user_pages(PageList(mem, [p0, None, p2]), 3)
        assert [page.refcount for page in (p0, p1, p2)] == [1, 1025, 1]
        assert mem.vmstat()["nr_foll_pin_released"] == released + 2
        unpin_user_page(p1)
        over(mem, mm)


# ---- longterm -----------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("acquire", GENERATIONS)
def test_lt_compound_skip(acquire):
    """
    THP by PTEs   [ h  h+1 | unmapped ...          ]     in Normal memory
    base pages             [ a  b ]                      in CMA: looked at although a THP's head came before
    """
    with Memory("32M", cma="8M", thp="always") as mem:
        mm = MM(mem)
        addr = mm.mmap(HUGE)
        mm.touch(addr, HUGE)
        head = mm.page_at(addr).pfn
        mm.munmap(addr + 2 * PAGE, HUGE - 2 * PAGE)
        mm.mmap(2 * PAGE, flags=MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, addr=addr + 2 * PAGE)
        hog = []
        for order in range(10, -1, -1):
            try:
                while True:
                    hog.append(folio_alloc(mem, order, zone="Normal"))
            except MMError:
                pass
        mm.write(addr + 2 * PAGE, b"a" + bytes(PAGE - 1) + b"b")
        cma = [mm.page_at(addr + i * PAGE) for i in (2, 3)]
        assert not any(folio_is_longterm_pinnable(page.folio) for page in cma)
        folios_put(hog)
        pages = pin_user_pages(mm, addr, 4, FOLL_WRITE | FOLL_LONGTERM, acquire=acquire)
        assert pages.pfns.tolist()[:2] == [head, head + 1] and not set(list(pages)[2:]) & set(cma)
        assert all(folio_is_longterm_pinnable(page.folio) for page in pages)
        assert mm.read(addr + 2 * PAGE, 1) + mm.read(addr + 3 * PAGE, 1) == b"ab"
        unpin_user_pages(pages)
        over(mem, mm)


def test_lt_fsdax_refused(mem, mm):
    fsdax = mm.mmap(PAGE, flags=MAP_SHARED, file=File(mem, HUGE, "fsdax", device=3))
    devdax = mm.mmap(HUGE, flags=MAP_SHARED, file=File(mem, HUGE, "devdax", device=0))
    for addr in (fsdax, devdax):
        mm.touch(addr, PAGE)
        unpin_user_pages(pin_user_pages(mm, addr, 1, FOLL_WRITE))
    with refused(mem, MMError, errno=errno.EOPNOTSUPP):
        pin_user_pages(mm, fsdax, 1, FOLL_LONGTERM)
    unpin_user_pages(pin_user_pages(mm, devdax, 1, FOLL_LONGTERM))


def test_lt_infinite_loop_off_lru(mem, mm):
    """Pages that must not stay and cannot be moved: an end after a bounded number of rounds, and no pin more than before.
    (Every page that can be mapped here can be isolated; what cannot move is one that somebody holds.)"""
    addr = mm.mmap(2 * PAGE)
    mm.touch(addr, 2 * PAGE)
    held = pin_user_pages(mm, addr, 2, FOLL_WRITE)
    unpin_user_pages(pin_user_pages(mm, addr, 2, FOLL_WRITE))
    with pytest.raises(MMError) as caught:
        pin_user_pages(mm, addr, 2, FOLL_WRITE | FOLL_LONGTERM)
    assert caught.value.errno == errno.ENOMEM and [page.refcount for page in held] == [1025] * 2
    unpin_user_pages(held)


def test_lt_migration_failure_error(mem, mm):
    addr = mm.mmap(4 * PAGE)
    unpin_user_pages(pin_user_pages(mm, addr, 3, FOLL_WRITE | FOLL_LONGTERM))
    mm.write(addr + 3 * PAGE, b"in movable memory")
    pages = [mm.page_at(addr + i * PAGE) for i in range(4)]
    assert [folio_is_longterm_pinnable(page.folio) for page in pages] == [True] * 3 + [False]
    with mem.inject("migrate"), refused(mem, MMError, errno=errno.ENOMEM):
        pin_user_pages(mm, addr, 4, FOLL_WRITE | FOLL_LONGTERM)
    assert [page.refcount for page in pages] == [1] * 4 and mm.read(addr + 3 * PAGE, 17) == b"in movable memory"


def test_lt_null_after_migrate(mem, mm):
    addr = mm.mmap(8 * PAGE)
    unpin_user_pages(pin_user_pages(mm, addr, 8, FOLL_WRITE | FOLL_LONGTERM))
    for i in (2, 5):
        mm.madvise(addr + i * PAGE, PAGE, MADV_DONTNEED)
        mm.write(addr + i * PAGE, bytes([i]))
    before = [mm.page_at(addr + i * PAGE) for i in range(8)]
    assert [i for i, page in enumerate(before) if not folio_is_longterm_pinnable(page.folio)] == [2, 5]
    pages = pin_user_pages(mm, addr, 8, FOLL_WRITE | FOLL_LONGTERM)
    assert [i for i, page in enumerate(pages) if page != before[i]] == [2, 5]
    assert [page.refcount for page in pages] == [1025] * 8 and pins_of(mem) == 8
    assert all(folio_is_longterm_pinnable(page.folio) for page in pages)
    assert mm.read(addr + 2 * PAGE, 1) == b"\2" and mm.read(addr + 5 * PAGE, 1) == b"\5"
    unpin_user_pages(pages)


def test_lt_zero_pfn_movable(mem, mm):
    """The rules since 6.2: a longterm read of untouched private memory gets fresh exclusive pages that may stay. (The zero
    page lies in Normal memory here, and may stay wherever it is.)"""
    addr = mm.mmap(8 * PAGE)
    mm.touch(addr, 8 * PAGE, write=False)
    assert folio_is_longterm_pinnable(mem.zero_page.folio)
    count = mem.zero_page.refcount
    pages = pin_user_pages(mm, addr, 8, FOLL_LONGTERM)
    assert len(set(pages)) == 8 and not any(is_zero_page(page) for page in pages)
    assert all(PageFlags.anon_exclusive in page.flags and folio_is_longterm_pinnable(page.folio) for page in pages)
    assert mem.zero_page.refcount == count
    unpin_user_pages(pages)


# ---- concurrency ----------------------------------------------------------------------------------------------------------------
def test_race_deferred_split_migrate(mem, mm):
    """A partially mapped THP that somebody looks at with a reference: migration refuses, and it is freed once."""
    addr = mm.mmap(HUGE)
    mm.madvise(addr, HUGE, MADV_HUGEPAGE)
    mm.write(addr, b"kept")
    mm.munmap(addr + 100 * PAGE, HUGE - 100 * PAGE)
    folio = mm.page_at(addr).folio
    folio_get(folio)                                    # the scanner's
    with pytest.raises(MMError, match="could not be moved"):
        pin_user_pages(mm, addr, 100, FOLL_WRITE | FOLL_LONGTERM)
    assert mm.page_at(addr).folio == folio
    freed = mem.vmstat()["pgfree"]
    folio_put(folio)
    assert mem.vmstat()["pgfree"] == freed
    pages = pin_user_pages(mm, addr, 100, FOLL_WRITE | FOLL_LONGTERM)
    assert mem.vmstat()["pgfree"] - freed == 512 and folio.refcount == 0 and mm.read(addr, 4) == b"kept"
    unpin_user_pages(pages)


def test_race_fast_gup_vs_collapse(mem, mm):
    """Pinned before the check: the collapse gives up, and the table is as before. Pinned after: the page of the THP."""
    addr = mm.mmap(HUGE)
    mm.madvise(addr, HUGE, MADV_NOHUGEPAGE)
    mm.touch(addr, HUGE)
    mm.madvise(addr, HUGE, MADV_HUGEPAGE)
    pages = pin_user_pages_fast(mm, addr + 40 * PAGE, 1, FOLL_WRITE)
    with pytest.raises(MMError):
        mm.madvise(addr, HUGE, MADV_COLLAPSE)
    assert mm.page_at(addr + 40 * PAGE) == pages[0] and pages[0].folio.order == 0
    unpin_user_pages(pages)
    mm.madvise(addr, HUGE, MADV_COLLAPSE)
    again = pin_user_pages_fast(mm, addr + 40 * PAGE, 1, FOLL_WRITE)
    assert again[0].folio.order == 9 and again[0].pfn == again[0].folio.pfn + 40 and again[0] != pages[0]
    unpin_user_pages(again)


def test_race_fast_gup_vs_fork(mem, mm):
    """Whoever comes first, the pinned page is the process's own: its writes reach the device, the child's memory is apart."""
    for turn in range(60):
        addr = mm.mmap(PAGE)
        mm.write(addr, b"old")
        children, pinned, start = [], [], threading.Barrier(2)

        def fork():
            start.wait()
            children.append(mm.fork())

        def pin():
            start.wait()
            pinned.append(pin_user_pages_fast(mm, addr, 1, FOLL_WRITE))

        threads = [threading.Thread(target=fork), threading.Thread(target=pin)]
        [thread.start() for thread in threads]
        [thread.join() for thread in threads]
        (child,), ((page,),) = children, pinned
        mm.write(addr, b"new")
        assert bytes(page_address(page)[:3]) == b"new" and mm.page_at(addr) == page
        assert child.read(addr, 3) == b"old" and child.page_at(addr) != page
        unpin_user_page(page)
        child.exit()
        mm.munmap(addr, PAGE)


def test_race_grab_vs_thp_split(mem, mm):
    """A reference for page 88 of a folio that is split meanwhile ends up on page 88, never on what was its head."""
    for turn in range(30):
        addr = mm.mmap(HUGE)
        mm.madvise(addr, HUGE, MADV_HUGEPAGE)
        mm.touch(addr, HUGE)
        head = mm.page_at(addr).pfn
        release_pages(get_user_pages(mm, addr, 1, FOLL_SPLIT_PMD))
        got, start = [], threading.Barrier(2)

        def split():
            start.wait()
            for _ in range(10):
                folio_get(mem.folio(head))
                try:
                    folios_put(folio_split(mem.folio(head)))
                    return
                except MMError:
                    folio_put(mem.folio(head))

        def grab():
            start.wait()
            for _ in range(20):
                got.append(get_user_pages_fast(mm, addr + 88 * PAGE, 1))

        threads = [threading.Thread(target=split), threading.Thread(target=grab)]
        [thread.start() for thread in threads]
        [thread.join() for thread in threads]
        assert {pages[0].pfn for pages in got} == {head + 88}
        page = mem.page(head + 88)
        if page.folio.order == 0:
            assert page.refcount == 21 and mem.page(head).refcount == 1
        else:
            assert page.folio.refcount == 512 + 20
        for pages in got:
            release_pages(pages)
        mm.munmap(addr, HUGE)


@pytest.mark.parametrize("io", (True, False))
def test_race_madvfree_vs_dio(mem, mm, io):
    """A direct read into memory that may be dropped: reclaim leaves what somebody holds, and drops what nobody does."""
    addr = mm.mmap(4 * PAGE)
    mm.madvise(addr, 4 * PAGE, MADV_NOHUGEPAGE)
    mm.write(addr, b"\1" * 4 * PAGE)
    mm.madvise(addr, 4 * PAGE, MADV_FREE)
    pages = get_user_pages_fast(mm, addr, 4, FOLL_WRITE) if io else []
    mm.madvise(addr, 4 * PAGE, MADV_PAGEOUT)
    for page in pages:
        page_address(page)[:] = b"\x79" * PAGE
        set_page_dirty_lock(page)
    if io:
        release_pages(pages)
    assert mm.read(addr, 4 * PAGE) == (b"\x79" if io else b"\0") * 4 * PAGE


def test_race_writeback_vs_pin_write(mem, mm):
    """
    process   write                                              the device's write comes after the page was cleaned and
    writeback        clean, protect            write it out      write-protected: the release marks it dirty again, and
    device                          write, release dirty         the next writeback has it. For long that is refused.
    """
    file = File(mem, 4 * PAGE, "ext4")
    addr = mm.mmap(4 * PAGE, flags=MAP_SHARED, file=file)
    mm.write(addr, b"first")
    pages = pin_user_pages_fast(mm, addr, 1, FOLL_WRITE)
    assert file.writeback() == 1 and not pages[0].folio.dirty
    page_address(pages[0])[:6] = b"device"
    assert file.writeback() == 0                        # nobody told it
    unpin_user_pages_dirty_lock(pages, 1, True)
    assert pages[0].folio.dirty and file.writeback() == 1
    with refused(mem, MMError, errno=errno.EFAULT):
        pin_user_pages_fast(mm, addr, 1, FOLL_WRITE | FOLL_LONGTERM)
    # Truncated while pinned: the dirt of a page without a file is nobody's, and goes with it.
    pages = pin_user_pages_fast(mm, addr, 1, FOLL_WRITE)
    file.truncate(0)
    unpin_user_pages_dirty_lock(pages, 1, True)
    assert pages[0].refcount == 0 and mem.vmstat()["nr_dirty"] == 0
