"""madvise, populate, huge page policy, soft-dirty: what each advice does, and what it refuses."""
import errno
import gc

import pytest

import mmcore as mmc
from mm_support import ANON, HUGE, PAGE, PRESENT, SOFT, SWAP, exclusive, word
from mmcore import File, InvalidArgument, MM, MMError, Memory
from support import refused


@pytest.fixture
def mem():
    with Memory("64M", hugetlb={"2M": 2}) as mem:
        mem.huge_zero_folio
        free = mem.vmstat()["nr_free_pages"]
        yield mem
        gc.collect()        # a refusal keeps the frames that its traceback names, and their files
        mem.check()
        assert mem.vmstat()["nr_free_pages"] == free, "frames leaked"


@pytest.fixture
def mm(mem):
    with MM(mem) as mm:
        yield mm


@pytest.mark.parametrize("advice", list(mmc.MADV))
def test_every_advice_wants_a_range_that_is_one(mm, advice):
    a = mm.mmap(2 * PAGE)
    mm.munmap(a + PAGE, PAGE)
    with refused(mm.mem, InvalidArgument, match="page size"):
        mm.madvise(a + 1, PAGE, advice)
    with refused(mm.mem, InvalidArgument, match="leave the address space"):
        mm.madvise((1 << 64) - PAGE, 2 * PAGE, advice)
    mm.madvise(a, 0, advice)
    # A hole: whatever was mapped is done, and the hole reported.
    with pytest.raises(MMError) as caught:
        mm.madvise(a, 2 * PAGE, advice)
    assert caught.value.errno == errno.ENOMEM
    with pytest.raises(InvalidArgument, match="none that is known"):
        mm.madvise(a, PAGE, 77)


def test_the_rest_of_a_range_with_a_hole_is_done(mm):
    a = mm.mmap(3 * PAGE)
    mm.write(a, b"A" * 3 * PAGE)
    mm.munmap(a + PAGE, PAGE)
    with pytest.raises(MMError):
        mm.madvise(a, 3 * PAGE, mmc.MADV_DONTNEED)
    assert mm.rss == 0 and mm.read(a + 2 * PAGE, 1) == b"\0"


def kinds(mm):
    """One mapping of each kind that takes some advice and not other."""
    shared = dict(flags=mmc.MAP_SHARED)
    return {"anon": mm.mmap(HUGE), "locked": mm.mmap(PAGE, flags=ANON | mmc.MAP_LOCKED),
            "hugetlb": mm.mmap(HUGE, flags=ANON | mmc.MAP_HUGETLB), "shmem": mm.mmap(HUGE, file=File(mm.mem, HUGE), **shared),
            "pfnmap": mm.mmap(PAGE, file=File(mm.mem, PAGE, "pfnmap"), **shared),
            "iomem": mm.mmap(PAGE, file=File(mm.mem, PAGE, "iomem"), **shared)}


REFUSES = {"DONTNEED": {"locked", "pfnmap", "iomem"}, "FREE": {"locked", "hugetlb", "shmem", "pfnmap", "iomem"},
           "PAGEOUT": {"locked", "hugetlb", "pfnmap", "iomem"}, "COLD": {"locked", "hugetlb", "pfnmap", "iomem"},
           "HUGEPAGE": {"hugetlb", "pfnmap", "iomem"}, "NOHUGEPAGE": {"hugetlb", "pfnmap", "iomem"},
           "DOFORK": {"iomem"}, "DONTFORK": set(), "POPULATE_READ": {"pfnmap", "iomem"}, "POPULATE_WRITE": {"pfnmap", "iomem"},
           "COLLAPSE": {"hugetlb", "shmem", "pfnmap", "iomem", "anon", "locked"}, "NORMAL": set(), "WILLNEED": set()}


@pytest.mark.parametrize("advice", REFUSES)
def test_who_refuses_what(mm, advice):
    """COLLAPSE of the anonymous ones: nothing is there to collapse, or no aligned range."""
    for kind, addr in kinds(mm).items():
        length = HUGE if kind in ("anon", "hugetlb", "shmem") else PAGE
        if kind in REFUSES[advice]:
            with pytest.raises(InvalidArgument) as caught:
                mm.madvise(addr, length, getattr(mmc, "MADV_" + advice))
            assert caught.value.addr == addr
        else:
            mm.madvise(addr, length, getattr(mmc, "MADV_" + advice))
        mm.mem.check()


def test_populate(mm):
    a = mm.mmap(4 * PAGE)
    mm.madvise(a, 2 * PAGE, mmc.MADV_POPULATE_WRITE)
    mm.madvise(a, 4 * PAGE, mmc.MADV_POPULATE_READ)
    assert mm.rss == 2 and mmc.is_zero_page(mm.page_at(a + 3 * PAGE))
    mm.mprotect(a, 4 * PAGE, mmc.PROT_READ)
    with pytest.raises(InvalidArgument):
        mm.madvise(a, PAGE, mmc.MADV_POPULATE_WRITE)
    file = File(mm.mem, PAGE)
    b = mm.mmap(2 * PAGE, flags=mmc.MAP_SHARED, file=file)
    with pytest.raises(MMError, match="SIGBUS") as caught:
        mm.madvise(b, 2 * PAGE, mmc.MADV_POPULATE_READ)
    assert (caught.value.errno, caught.value.addr) == (errno.EFAULT, b + PAGE)
    with mm.mem.inject("frame"), pytest.raises(MMError) as caught:
        mm.madvise(mm.mmap(PAGE), PAGE, mmc.MADV_POPULATE_WRITE)
    assert caught.value.errno == errno.ENOMEM


def test_map_populate(mm):
    a = mm.mmap(4 * PAGE, flags=ANON | mmc.MAP_POPULATE)
    assert mm.rss == 4 and mm.touch(a, 4 * PAGE) == 0
    # What cannot be populated is left for faults, silently.
    b = mm.mmap(PAGE, flags=ANON | mmc.MAP_POPULATE, prot=0)
    assert not word(mm, b) & PRESENT


@pytest.mark.parametrize("thp, advice, leaf", [("never", "HUGEPAGE", False), ("madvise", None, False), ("madvise", "HUGEPAGE", True),
                                               ("always", None, True), ("always", "NOHUGEPAGE", False)])
def test_huge_page_policy(thp, advice, leaf):
    with Memory("64M", thp=thp) as mem, MM(mem) as mm:
        a = mm.mmap(HUGE)
        if advice:
            mm.madvise(a, HUGE, getattr(mmc, "MADV_" + advice))
        assert mm.touch(a, HUGE) == (1 if leaf else 512)
        assert mm.page_at(a).folio.order == (9 if leaf else 0)


def test_mthp(mm):
    """
        orders 2 and 4 allowed    |....|....|....|....|    one fault brings an aligned 16, or 4 beside what is there
    """
    with Memory("64M", mthp=(2, 4)) as mem, MM(mem) as mm:
        a = mm.mmap(HUGE)
        mm.write(a + 17 * PAGE, b"A")
        folio = mm.page_at(a + 16 * PAGE).folio
        assert (folio.order, folio.mapcount, folio.refcount) == (4, 16, 16) and mm.rss == 16
        assert all(exclusive(mm.page_at(a + i * PAGE)) for i in range(16, 32))
        mm.read(a + 8 * PAGE, 1)                # a zero page in the way of an order-4 folio
        mm.write(a, b"B")
        assert mm.page_at(a).folio.order == 2 and mm.page_at(a + 4 * PAGE) is None
        mem.check()
        child = mm.fork()
        child.write(a + 17 * PAGE, b"C")
        assert mm.read(a + 17 * PAGE, 1) == b"A" and folio.mapcount == 16 + 15
        mem.check()
        child.exit()
        mm.write(a + 18 * PAGE, b"D")
        assert mm.page_at(a + 18 * PAGE).folio == folio, "all references are this process's: reused"
        with mem.inject("frame", 1):
            mm.write(a + 64 * PAGE, b"E")       # no block of 16: one of 4
        assert mm.page_at(a + 64 * PAGE).folio.order == 2


def test_soft_dirty(mm):
    """
        clear_refs ─ read: clean ─ write: a fault, the same page, dirty ─ swapped out and in: still dirty
    """
    a = mm.mmap(3 * PAGE)
    mm.touch(a, 3 * PAGE)
    pages = [mm.page_at(a + i * PAGE) for i in range(3)]
    mm.clear_refs(4)
    assert not any(word(mm, a + i * PAGE) & SOFT for i in range(3))
    mm.read(a, 1)
    mm.write(a + PAGE, b"A")
    assert [bool(word(mm, a + i * PAGE) & SOFT) for i in range(3)] == [False, True, False]
    assert [mm.page_at(a + i * PAGE) for i in range(3)] == pages
    mm.madvise(a, 3 * PAGE, mmc.MADV_PAGEOUT)
    assert [bool(word(mm, a + i * PAGE) & SOFT) for i in range(3)] == [False, True, False] and word(mm, a) & SWAP
    mm.read(a, 3 * PAGE)
    assert [bool(word(mm, a + i * PAGE) & SOFT) for i in range(3)] == [False, True, False]
    for wrong in (0, 5):
        with pytest.raises(InvalidArgument):
            mm.clear_refs(wrong)


def test_dontfork(mm):
    a = mm.mmap(3 * PAGE)
    mm.write(a, b"A" * 3 * PAGE)
    mm.madvise(a + PAGE, PAGE, mmc.MADV_DONTFORK)
    child = mm.fork()
    assert [(v.start, v.end) for v in child.vmas] == [(a, a + PAGE), (a + 2 * PAGE, a + 3 * PAGE)]
    child.exit()
    mm.madvise(a, 3 * PAGE, mmc.MADV_DOFORK)
    assert len(mm.vmas) == 1


def test_collapse_errors(mm):
    a = mm.mmap(2 * HUGE)
    mm.touch(a, 2 * HUGE)
    with refused(mm.mem, InvalidArgument):
        mm.madvise(a + PAGE, HUGE, mmc.MADV_COLLAPSE)       # no aligned range inside
    with mm.mem.inject("frame"), pytest.raises(MMError) as caught:
        mm.madvise(a, HUGE, mmc.MADV_COLLAPSE)
    assert caught.value.errno == errno.ENOMEM and mm.rss == 1024
    folio = mm.page_at(a + 3 * PAGE).folio
    mmc.folio_get(folio)
    with pytest.raises(MMError) as caught:
        mm.madvise(a, 2 * HUGE, mmc.MADV_COLLAPSE)
    assert (caught.value.errno, caught.value.addr) == (errno.EAGAIN, a)
    assert mm.page_at(a + HUGE).folio.order == 9, "the other range was collapsed all the same"
    mmc.folio_put(folio)
    mm.madvise(a, 2 * HUGE, mmc.MADV_COLLAPSE)
    assert mm.page_at(a).folio.order == 9
    mm.madvise(a, 2 * HUGE, mmc.MADV_COLLAPSE)              # nothing left to do


def test_swapped_pages_are_collapsed_too(mm):
    a = mm.mmap(HUGE)
    mm.write(a + 5 * PAGE, b"A")
    mm.madvise(a, HUGE, mmc.MADV_PAGEOUT)
    mm.madvise(a, HUGE, mmc.MADV_COLLAPSE)
    assert mm.page_at(a).folio.order == 9 and mm.read(a + 5 * PAGE, 1) == b"A" and mm.rss_stat["swap"] == 0


def test_too_many_mappings(mm):
    """65530 mappings, and not one more: neither by mmap nor by a split."""
    a = mm.mmap(65530 * 2 * PAGE, prot=0)
    for i in range(65529):
        mm.mprotect(a + i * PAGE, PAGE, 1 + 2 * (i & 1))
    assert len(mm.vmas) == 65530
    with pytest.raises(MMError) as caught:
        mm.mmap(PAGE, flags=mmc.MAP_SHARED | mmc.MAP_ANONYMOUS)
    assert caught.value.errno == errno.ENOMEM
    with pytest.raises(MMError) as caught:
        mm.munmap(a + 65600 * PAGE, PAGE)
    assert caught.value.errno == errno.ENOMEM and len(mm.vmas) == 65530
    with pytest.raises(MMError, match="2 mappings more, and there are 65530 of at most 65530") as caught:
        mm.madvise(a + 65600 * PAGE, PAGE, mmc.MADV_HUGEPAGE)
    assert caught.value.errno == errno.ENOMEM and len(mm.vmas) == 65530
    # What takes the place of another one is no mapping more.
    assert mm.mmap(PAGE, prot=7, flags=ANON | mmc.MAP_FIXED, addr=a + PAGE) == a + PAGE
    assert len(mm.vmas) == 65530
    # Nor is what one grows by, where it is.
    end = a + 65530 * 2 * PAGE
    assert mm.mremap(end - PAGE, PAGE, 3 * PAGE) == end - PAGE
    assert len(mm.vmas) == 65530 and mm.vmas[-1].end == end + 2 * PAGE


def test_free_drops_what_is_swapped_out_and_leaves_what_others_map(mm):
    a = mm.mmap(3 * PAGE)
    mm.write(a, b"A" * 3 * PAGE)
    mm.madvise(a, PAGE, mmc.MADV_PAGEOUT)
    assert mm.rss_stat["swap"] == 1
    child = mm.fork()
    mm.write(a + 2 * PAGE, b"B")                            # a page of its own again
    mm.madvise(a, 3 * PAGE, mmc.MADV_FREE)
    assert mm.rss_stat["swap"] == 0 and mm.read(a, 1) == b"\0", "dropped at once"
    shared, own = mm.page_at(a + PAGE), mm.page_at(a + 2 * PAGE)
    assert mmc.PageFlags.swapbacked in shared.flags and mmc.PageFlags.swapbacked not in own.flags
    assert child.read(a, 1) == child.read(a + PAGE, 1) == b"A"
    child.exit()


@pytest.mark.parametrize("advice", [mmc.MADV_DONTNEED, mmc.MADV_FREE, mmc.MADV_PAGEOUT])
def test_no_table_for_the_rest_of_a_leaf(mm, advice):
    a = mm.mmap(HUGE)
    mm.madvise(a, HUGE, mmc.MADV_HUGEPAGE)
    mm.write(a, b"A")
    mm.write(a + HUGE - PAGE, b"Z")
    for start, length in ((PAGE, HUGE - PAGE), (0, PAGE)):
        with mm.mem.inject("table") as injection, pytest.raises(MMError) as caught:
            mm.madvise(a + start, length, advice)
        assert injection.fired and caught.value.errno == errno.ENOMEM
        assert mm.page_at(a).folio.order == 9 and mm.read(a, 1) == b"A" and mm.read(a + HUGE - PAGE, 1) == b"Z"
