"""Longterm pins: eligibility, and moving folios out of Movable and CMA with everything that knows them."""
import errno
import threading

import numpy as np
import pytest
from hypothesis import given, strategies as st

from gup_support import *
from support import refused


@pytest.fixture
def mem():
    with machine(hugetlb={"2M": 4}, mthp=(2,)) as mem:
        yield mem
        assert pins_of(mem) == 0
        mem.check()


@pytest.fixture
def mm(mem):
    with MM(mem) as mm:
        yield mm


def stays(mem, page):
    """May it be pinned for long?"""
    return folio_is_longterm_pinnable(page.folio)


def fill(mm, addr, length):
    """Bytes that tell pages apart."""
    data = bytes((addr + i) % 251 for i in range(0, length, PAGE))
    for i, byte in enumerate(data):
        mm.write(addr + i * PAGE, bytes([byte, i & 255, i >> 8]))
    return data


def same(mm, addr, data):
    """Are these the bytes that fill() wrote?"""
    return all(mm.read(addr + i * PAGE, 3) == bytes([byte, i & 255, i >> 8]) for i, byte in enumerate(data))


@pytest.mark.parametrize("acquire", GENERATIONS)
@pytest.mark.parametrize("call", PINS)
@pytest.mark.parametrize("kind", ("small", "mthp", "thp", "thp by ptes", "tmpfs", "tmpfs huge", "shared", "ext4 private"))
def test_folios_move_with_bytes_and_mappings(mem, mm, call, acquire, kind):
    length = HUGE
    if kind == "tmpfs huge":
        addr = mm.mmap(length, flags=MAP_SHARED, file=File(mem, length))
    elif kind in ("tmpfs", "ext4 private"):
        length = 64 * PAGE
        file = File(mem, length, "tmpfs" if kind == "tmpfs" else "ext4")
        addr = mm.mmap(length, flags=MAP_SHARED if kind == "tmpfs" else MAP_PRIVATE, file=file)
    elif kind == "shared":
        length = 64 * PAGE
        addr = mm.mmap(length, flags=MAP_SHARED | MAP_ANONYMOUS)
    else:
        addr = mm.mmap(length if kind.startswith("thp") else 64 * PAGE)
        length = length if kind.startswith("thp") else 64 * PAGE
    if kind in ("thp", "thp by ptes", "tmpfs huge"):
        mm.madvise(addr, length, MADV_HUGEPAGE)
    elif kind == "small":
        mm.madvise(addr, length, MADV_NOHUGEPAGE)
    data = fill(mm, addr, length)
    if kind == "thp by ptes":
        release_pages(get_user_pages(mm, addr, 1, FOLL_SPLIT_PMD))
    before = [mm.page_at(addr + i) for i in range(0, length, PAGE)]
    assert not any(stays(mem, page) for page in before)
    order = before[0].folio.order
    short = call(mm, addr, length // PAGE, FOLL_WRITE, acquire=acquire)
    assert list(short) == before                        # without LONGTERM they stay where they are
    unpin_user_pages(short)
    rss, tables = mm.rss_stat, mm.nr_tables
    pages = call(mm, addr, length // PAGE, FOLL_WRITE | FOLL_LONGTERM, acquire=acquire)
    assert len(pages) == length // PAGE and all(stays(mem, page) for page in pages)
    assert not set(pages) & set(before) and [mm.page_at(addr + i) for i in range(0, length, PAGE)] == list(pages)
    assert pages[0].folio.order == order and mm.rss_stat == rss and mm.nr_tables == tables
    assert same(mm, addr, data)
    assert pins_of(mem) == len(pages)
    # A second pin finds them where they may stay.
    again = call(mm, addr, length // PAGE, FOLL_WRITE | FOLL_LONGTERM, acquire=acquire)
    assert again == pages
    unpin_user_pages(again)
    mm.write(addr, b"later")
    assert bytes(page_address(pages[0])[:5]) == b"later"
    unpin_user_pages(pages)


def test_every_mapping_follows(mem, mm):
    """Two VMAs of one file, a private one that only reads, and another process: one folio, five entries."""
    file = File(mem, 8 * PAGE)
    file.write(0, b"first")
    one = mm.mmap(8 * PAGE, flags=MAP_SHARED, file=file)
    two = mm.mmap(4 * PAGE, PROT_READ, MAP_SHARED, file)
    private = mm.mmap(4 * PAGE, PROT_READ, MAP_PRIVATE, file)
    other = MM(mem)
    there = other.mmap(8 * PAGE, flags=MAP_SHARED, file=file)
    child = mm.fork()
    everyone = ((mm, one), (mm, two), (mm, private), (other, there), (child, one))
    for who, addr in everyone:
        who.read(addr, 1)
    old = file.page_at(0)
    assert old.mapcount == 5
    pages = pin_user_pages(mm, one, 1, FOLL_WRITE | FOLL_LONGTERM)
    assert pages[0] != old and pages[0].mapcount == 5 and file.page_at(0) == pages[0]
    assert {who.page_at(addr) for who, addr in everyone} == {pages[0]}
    other.write(there, b"again")
    assert file.read(0, 5) == b"again" == child.read(one, 5)
    unpin_user_pages(pages)
    child.exit()
    other.exit()


@pytest.mark.parametrize("thp", (False, True))
def test_shared_anonymous_folio_moves_for_all(mem, mm, thp):
    addr = mm.mmap(HUGE)
    mm.madvise(addr, HUGE, MADV_HUGEPAGE if thp else MADV_NOHUGEPAGE)
    mm.write(addr, b"both")
    child = mm.fork()
    grandchild = child.fork()
    old = mm.page_at(addr)
    folio_get(old.folio)
    new = migrate_folio_longterm(old.folio)
    assert {who.page_at(addr).folio for who in (mm, child, grandchild)} == {new} and new.pfn != old.pfn
    assert grandchild.read(addr, 4) == b"both" and stays(mem, mm.page_at(addr))
    folio_put(new)
    mm.write(addr, b"mine")
    assert child.read(addr, 4) == b"both"
    grandchild.exit()
    child.exit()


def test_protection_exclusive_and_dirt_stay(mem, mm):
    addr = mm.mmap(8 * PAGE)
    mm.madvise(addr, 8 * PAGE, MADV_NOHUGEPAGE)
    mm.touch(addr, 8 * PAGE)
    mm.mprotect(addr + PAGE, PAGE, PROT_READ)
    mm.mprotect(addr + 2 * PAGE, PAGE, PROT_NONE)
    before = mm.pagemap(addr, 8) & ~np.uint64((1 << 55) - 1)
    flags = [mm.page_at(addr + i * PAGE).flags & (PageFlags.anon_exclusive | PageFlags.swapbacked | PageFlags.uptodate) for i in range(8)]
    pages = pin_user_pages(mm, addr, 8, FOLL_FORCE | FOLL_LONGTERM)
    assert len(pages) == 8 and all(stays(mem, page) for page in pages)
    assert (mm.pagemap(addr, 8) & ~np.uint64((1 << 55) - 1) == before).all()
    assert [page.flags & (PageFlags.anon_exclusive | PageFlags.swapbacked | PageFlags.uptodate) for page in pages] == flags
    for at in (addr + PAGE, addr + 2 * PAGE):
        with pytest.raises(MMError):
            mm.write(at, b"x")
    faults = mm.total_faults
    mm.write(addr, b"x")
    assert mm.total_faults == faults                    # the entry is as writable as it was
    unpin_user_pages(pages)


def test_dirty_file_pages_stay_dirty(mem, mm):
    file = File(mem, 4 * PAGE, "ext4")
    addr = mm.mmap(4 * PAGE, flags=MAP_SHARED, file=file)
    mm.write(addr, b"dirty")
    dirty = mem.vmstat()["nr_dirty"]
    assert dirty == 1
    page = file.page_at(0)
    folio_get(page.folio)
    new = migrate_folio_longterm(page.folio)
    assert new.dirty and mem.vmstat()["nr_dirty"] == dirty
    folio_put(new)
    assert file.writeback() == 1 and mem.vmstat()["nr_dirty"] == 0
    file.truncate(0)


@pytest.mark.parametrize("call", PINS)
@pytest.mark.parametrize("acquire", GENERATIONS)
def test_failure_to_allocate_keeps_nothing_and_changes_nothing(mem, mm, call, acquire):
    addr = mm.mmap(16 * PAGE)
    mm.madvise(addr, 16 * PAGE, MADV_NOHUGEPAGE)
    data = fill(mm, addr, 16 * PAGE)
    before = [mm.page_at(addr + i * PAGE) for i in range(16)]
    unpin_user_pages(call(mm, addr, 16, FOLL_WRITE))    # marks them as referenced and dirty
    with mem.inject("migrate"), refused(mem, MMError, "no free memory", errno.ENOMEM):
        call(mm, addr, 16, FOLL_WRITE | FOLL_LONGTERM, acquire=acquire)
    assert [mm.page_at(addr + i * PAGE) for i in range(16)] == before and same(mm, addr, data)
    # The third one fails: two have moved, all pins are gone, every byte is there.
    with mem.inject("migrate", 3), pytest.raises(MMError) as caught:
        call(mm, addr, 16, FOLL_WRITE | FOLL_LONGTERM, acquire=acquire)
    assert caught.value.errno == errno.ENOMEM and pins_of(mem) == 0 and same(mm, addr, data)
    assert [page == mm.page_at(addr + i * PAGE) for i, page in enumerate(before)] == [False] * 2 + [True] * 14


@pytest.mark.parametrize("hold", ("pin", "get"))
@pytest.mark.parametrize("call", PINS)
def test_somebody_else_holds_it(mem, mm, call, hold):
    addr = mm.mmap(4 * PAGE)
    mm.touch(addr, 4 * PAGE)
    held = (pin_user_pages if hold == "pin" else get_user_pages)(mm, addr, 2, FOLL_WRITE)
    pins = pins_of(mem)
    with pytest.raises(MMError, match="could not be moved") as caught:
        call(mm, addr, 4, FOLL_WRITE | FOLL_LONGTERM)
    assert caught.value.errno == errno.ENOMEM and caught.value.pfn == held[0].pfn
    assert pins_of(mem) == pins and mm.page_at(addr) == held[0]
    (unpin_user_pages if hold == "pin" else release_pages)(held)
    pages = call(mm, addr, 4, FOLL_WRITE | FOLL_LONGTERM)
    unpin_user_pages(pages)


def test_no_normal_memory_left(mem, mm):
    addr = mm.mmap(4 * PAGE)
    mm.write(addr, b"stays")
    mm.touch(addr, 4 * PAGE)
    hog = []
    for order in range(10, -1, -1):
        try:
            while True:
                hog.append(folio_alloc(mem, order, zone="Normal"))
        except MMError:
            pass
    with refused(mem, MMError, errno=errno.ENOMEM):
        pin_user_pages(mm, addr, 4, FOLL_WRITE | FOLL_LONGTERM)
    folios_put(hog)
    assert mm.read(addr, 5) == b"stays"


def test_mixed_list_is_all_or_nothing(mem, mm):
    """Pages that may stay lose their pins too when one that must go cannot."""
    addr = mm.mmap(8 * PAGE)
    mm.madvise(addr, 8 * PAGE, MADV_NOHUGEPAGE)
    first = pin_user_pages(mm, addr, 4, FOLL_WRITE | FOLL_LONGTERM)     # these have moved
    mm.touch(addr, 8 * PAGE)
    with mem.inject("migrate"), refused(mem, MMError, errno=errno.ENOMEM):
        pin_user_pages(mm, addr, 8, FOLL_WRITE | FOLL_LONGTERM)
    pages = pin_user_pages(mm, addr, 8, FOLL_WRITE | FOLL_LONGTERM)
    assert list(pages)[:4] == list(first)
    unpin_user_pages(first)
    unpin_user_pages(pages)


def test_hugetlb_moves_within_its_pool(mem, mm):
    addr = mm.mmap(HUGE, flags=MAP_PRIVATE | MAP_ANONYMOUS | MAP_HUGETLB)
    mm.write(addr + 5 * PAGE, b"huge")
    free = mem.hugetlb_pools()
    old = mm.page_at(addr).folio
    folio_get(old)
    new = migrate_folio_longterm(old)
    assert new.pfn != old.pfn and new.order == 9 and mm.page_at(addr).folio == new and mm.read(addr + 5 * PAGE, 4) == b"huge"
    assert mem.hugetlb_pools() == free
    folio_put(new)
    hog = [folio_alloc(mem, 9, hugetlb=True) for _ in range(3)]
    folio_get(new)
    with refused(mem, MMError, errno=errno.ENOMEM):
        migrate_folio_longterm(new)
    folio_put(new)
    folios_put(hog)


def test_what_cannot_move(mem, mm):
    page, target = alloc_page(mem), alloc_page(mem)
    put_page(target)                                    # mem_map knows the frame that will be tried
    folio_get(page.folio)
    with refused(mem, MMError, "held by more", errno.EAGAIN):
        migrate_folio_longterm(page.folio)
    folio_put_refs(page.folio, 2)
    with refused(mem, MMError, errno=errno.EBUSY):
        migrate_folio_longterm(mem.zero_page.folio)
    with refused(mem, MMError, errno=errno.EBUSY):
        migrate_folio_longterm(mem.folio(mem.devices[0].start_pfn))
    page = alloc_page(mem)
    mem.memory_failure(page)
    with refused(mem, MMError, errno=errno.EBUSY):
        migrate_folio_longterm(page.folio)
    put_page(page)


def test_a_pin_is_not_the_reference_that_moves(mem):
    folio = folio_alloc(mem, 3, zone="Movable")
    target = folio_alloc(mem, 3, zone="Normal")
    folio_put(target)
    try_grab_folio(folio, 1)
    folio_put(folio)
    with refused(mem, MMError, errno=errno.EAGAIN):
        migrate_folio_longterm(folio)
    unpin_folio(folio)


def test_a_folio_that_nothing_maps_moves(mem):
    folio = folio_alloc(mem, 3, zone="Movable")
    folio_address(folio)[:6] = b"on its"
    new = migrate_folio_longterm(folio)
    assert zone_of(mem, new.pfn) == "Normal" and bytes(folio_address(new)[:6]) == b"on its" and new.refcount == 1
    folio_put(new)


# ---- which ones -------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("acquire", GENERATIONS)
def test_unpinnable_names_each_folio_once(mem, acquire):
    movable, cma = folio_alloc(mem, 3, zone="Movable"), folio_alloc(mem, 2, zone="CMA")
    normal = folio_alloc(mem, 4, zone="Normal")
    pfns = [normal.pfn, 0, *range(movable.pfn, movable.pfn + 8), *range(cma.pfn, cma.pfn + 4), mem.zero_page.pfn, cma.pfn + 2]
    found = longterm_unpinnable(PageList(mem, pfns), acquire=acquire)
    assert found.pfns.tolist() == [movable.pfn, cma.pfn]
    back = longterm_unpinnable(PageList(mem, [cma.pfn, movable.pfn, cma.pfn]), acquire=acquire)
    assert back.pfns.tolist() == [cma.pfn, movable.pfn, cma.pfn]
    runs = PageRanges(mem, [normal.pfn, movable.pfn + 2, cma.pfn], [16, 3, 4])
    assert longterm_unpinnable(runs, acquire=acquire).pfns.tolist() == [movable.pfn, cma.pfn]
    assert len(longterm_unpinnable(PageList(mem), acquire=acquire)) == 0
    with refused(mem, InvalidArgument):
        longterm_unpinnable(runs, acquire="folio")
    for folio in (movable, cma, normal):
        folio_put(folio)


def test_the_check_looks_once_a_folio(mem, mm):
    addr = mm.mmap(HUGE, flags=MAP_PRIVATE | MAP_ANONYMOUS | MAP_HUGETLB)
    pages = pin_user_pages(mm, addr, 512, FOLL_WRITE | FOLL_LONGTERM)
    assert len(longterm_unpinnable(pages)) == len(longterm_unpinnable(pages, acquire="page")) == 0
    unpin_user_pages(pages)


@given(st.lists(st.tuples(st.sampled_from(["Movable", "CMA", "Normal"]), st.integers(0, 4), st.integers(0, 15), st.integers(1, 16)),
                max_size=12))
def test_both_checks_agree(pieces):
    with Memory("16M", movable="4M", cma="4M") as mem:
        folios, pfns = [], []
        for zone, order, first, nr in pieces:
            folio = folio_alloc(mem, order, zone=zone)
            folios.append(folio)
            pfns += list(range(folio.pfn, folio.pfn + (1 << order)))[first:first + nr]
        pages = PageList(mem, pfns)
        assert longterm_unpinnable(pages) == longterm_unpinnable(pages, acquire="page")
        ranges = PageRanges.from_pagelist(pages)
        assert set(longterm_unpinnable(ranges).pfns.tolist()) == set(longterm_unpinnable(pages).pfns.tolist())
        folios_put(folios)


@pytest.mark.parametrize("acquire", ["leaf", "page"])
@pytest.mark.parametrize("call", [pin_user_pages, pin_user_pages_fast])
def test_a_folio_that_is_twice_in_the_range(mem, mm, call, acquire):
    """A file mapped twice, side by side: each of its pages moves once, and both places pin it."""
    nr = 24
    file = File(mem, nr * PAGE)
    addr = mm.mmap(2 * nr * PAGE)
    for at in (addr, addr + nr * PAGE):
        mm.mmap(nr * PAGE, flags=MAP_SHARED | MAP_FIXED, file=file, addr=at)
    mm.touch(addr, 2 * nr * PAGE)
    assert not folio_is_longterm_pinnable(mm.page_at(addr).folio)
    pages = call(mm, addr, 2 * nr, FOLL_WRITE | FOLL_LONGTERM, acquire=acquire)
    assert len(pages) == 2 * nr and pages.pfns[:nr].tolist() == pages.pfns[nr:].tolist()
    for page in pages:
        assert folio_is_longterm_pinnable(page.folio) and (page.refcount, page.mapcount) == (3 + 2 * 1024, 2)
    mem.check()
    unpin_user_pages(pages)
    mem.check()


def test_many_threads_pin_what_must_move(mem, mm):
    """Who finds a folio on its way waits for it. Who moves one may be refused, for pins of others on their way back."""
    nr, got = 64, []
    addr = mm.mmap(nr * PAGE)

    def pin():
        barrier.wait()
        try:
            pages = pin_user_pages(mm, addr, nr, FOLL_WRITE | FOLL_LONGTERM)
        except MMError as refusal:
            got.append(refusal.errno)
        else:
            got.append(pages.pfns.tolist())
            assert all(stays(mem, page) for page in pages)
            unpin_user_pages(pages)

    done = 0
    for _ in range(30):
        mm.touch(addr, nr * PAGE)
        barrier = threading.Barrier(3)
        threads = [threading.Thread(target=pin) for _ in range(3)]
        [thread.start() for thread in threads]
        [thread.join() for thread in threads]
        pfns = [pages for pages in got if pages != errno.ENOMEM]
        assert len(got) == 3 and all(pages == pfns[0] for pages in pfns)
        done += len(pfns)
        got.clear()
        mem.check()
        mm.madvise(addr, nr * PAGE, MADV_DONTNEED)
    assert done > 30
