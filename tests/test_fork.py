"""fork and copy-on-write: who shares, who copies, who keeps the page; drawn as timelines."""
import errno

import pytest

import mmcore as mmc
from mm_support import ANON, EXCLUSIVE, FILE, HUGE, PAGE, PRESENT, SOFT, SWAP, exclusive, pin, seen_by_device, word
from mmcore import MM, MMError, Memory


@pytest.fixture
def mem():
    with Memory("64M", hugetlb={"2M": 4}, thp="madvise") as mem:
        mem.huge_zero_folio     # made at first use, and kept
        free, pools = mem.vmstat()["nr_free_pages"], mem.hugetlb_pools()
        yield mem
        mem.check()
        stat = mem.vmstat()
        assert stat["nr_foll_pin_acquired"] == stat["nr_foll_pin_released"]
        assert stat["nr_free_pages"] == free and mem.hugetlb_pools() == pools, "frames leaked"


@pytest.fixture
def mm(mem):
    with MM(mem) as mm:
        yield mm


def thp(mm, n=1, at=None):
    """An area of n THPs, written."""
    a = mm.mmap(n * HUGE)
    mm.madvise(a, n * HUGE, mmc.MADV_HUGEPAGE)
    assert mm.touch(a, n * HUGE) == n
    return a


def test_share_then_copy_then_reuse(mm):
    """
        parent   write A ── fork ── write B: copy Q ─────────────────
        child             └─ reads A ──────────── write C: reuse P ──
        P        exclusive   shared      only the child's    exclusive
    """
    a = mm.mmap(PAGE)
    mm.write(a, b"A")
    p = mm.page_at(a)
    assert exclusive(p)
    child = mm.fork()
    assert (p.refcount, p.mapcount, exclusive(p)) == (2, 2, False)
    assert not word(mm, a) & EXCLUSIVE
    mm.write(a, b"B")
    assert mm.page_at(a) != p and exclusive(mm.page_at(a))
    assert child.read(a, 1) == b"A" and (p.refcount, p.mapcount) == (1, 1)
    child.write(a, b"C")
    assert child.page_at(a) == p and exclusive(p)
    assert (mm.read(a, 1), child.read(a, 1)) == (b"B", b"C")
    mm.mem.check()
    child.exit()


def test_reading_after_fork_shares(mm):
    a = mm.mmap(4 * PAGE)
    mm.touch(a, 4 * PAGE)
    child = mm.fork()
    assert child.touch(a, 4 * PAGE, write=False) == 0
    assert [child.page_at(a + i * PAGE) for i in range(4)] == [mm.page_at(a + i * PAGE) for i in range(4)]
    assert child.rss == mm.rss == 4 and child.total_faults == 0
    child.exit()


def test_zero_pages_and_untouched_areas_are_not_copied(mm):
    mm.mmap("4M")
    child = mm.fork()
    assert child.nr_tables == 1 and child.vmas == mm.vmas
    child.exit()


def test_shared_memory_stays_shared(mm):
    a = mm.mmap(2 * PAGE, flags=mmc.MAP_SHARED | mmc.MAP_ANONYMOUS)
    mm.write(a, b"A")
    child = mm.fork()
    child.write(a, b"B")
    child.write(a + PAGE, b"C")
    assert (mm.read(a, 1), mm.read(a + PAGE, 1)) == (b"B", b"C")
    assert mm.page_at(a) == child.page_at(a)
    child.exit()


def test_pinned_page_is_copied_into_the_child(mm):
    """
        parent   write A ─ pin ─ fork ─ write B: same page ──
        device             └──────────────────────── reads B
        child                    └─ has a copy of A
    """
    a = mm.mmap(2 * PAGE)
    mm.write(a, b"A")
    mm.write(a + PAGE, b"a")
    pages = pin(mm, a)
    p = mm.page_at(a)
    child = mm.fork()
    assert child.page_at(a) != p and exclusive(child.page_at(a)) and child.read(a, 1) == b"A"
    assert child.page_at(a + PAGE) == mm.page_at(a + PAGE), "what is not pinned is shared"
    faults = mm.total_faults
    mm.write(a, b"B")
    assert mm.total_faults == faults and mm.page_at(a) == p and seen_by_device(pages) == b"B"
    assert child.read(a, 1) == b"A"
    mmc.unpin_user_pages(pages)
    child.exit()


def test_a_process_that_never_pinned_pays_nothing(mm):
    """1024 plain references look like a pin; without MMF_HAS_PINNED fork does not even look."""
    a = mm.mmap(PAGE)
    mm.write(a, b"A")
    folio = mm.page_at(a).folio
    mmc.try_grab_folio(folio, 1024, mmc.FOLL_GET)
    assert mmc.folio_maybe_dma_pinned(folio)
    child = mm.fork()
    assert child.page_at(a) == mm.page_at(a)
    child.exit()
    mm.has_pinned = True
    mm.write(a, b"B")
    child = mm.fork()
    assert not child.has_pinned, "not inherited"
    child.exit()
    mmc.folio_put_refs(folio, 1024)


def test_shared_already_is_shared_further(mm):
    """A page that two processes had before it was pinned is not exclusive: the next fork shares it again."""
    a = mm.mmap(PAGE)
    mm.write(a, b"A")
    first = mm.fork()
    pages = pin(mm, a)
    second = mm.fork()
    assert second.page_at(a) == mm.page_at(a) == first.page_at(a) and mm.page_at(a).mapcount == 3
    mmc.unpin_user_pages(pages)
    first.exit()
    second.exit()


@pytest.mark.parametrize("nth", [1, 2, 3])
def test_fork_without_frames(mm, nth):
    a = mm.mmap(8 * PAGE)
    mm.write(a, b"A" * 8 * PAGE)
    pages = pin(mm, a, 8)
    free = mm.mem.vmstat()["nr_free_pages"]
    for site in ("frame", "table"):
        with mm.mem.inject(site, nth + 1), pytest.raises(MMError) as caught:
            mm.fork()
        assert caught.value.errno == errno.ENOMEM
        mm.mem.check()
        assert mm.mem.vmstat()["nr_free_pages"] == free, "no child, no frames of it"
        assert mm.read(a, 8 * PAGE) == b"A" * 8 * PAGE
    mmc.unpin_user_pages(pages)


# ---- THP ------------------------------------------------------------------------------------------------------------
def test_thp_is_shared_by_its_leaf(mm):
    """
        parent   PMD leaf ── fork ── write page 3: leaf split, page 3 copied
        child              └─ PMD leaf, read-only
    """
    a = thp(mm)
    mm.write(a + 3 * PAGE, b"A")
    head = mm.page_at(a).folio
    assert head.order == 9 and head.mapcount == 1
    child = mm.fork()
    assert (head.mapcount, head.refcount, exclusive(head.page)) == (2, 2, False)
    mm.write(a + 3 * PAGE, b"B")
    assert mm.page_at(a + 3 * PAGE).folio != head and mm.page_at(a + 4 * PAGE).folio == head
    assert child.read(a + 3 * PAGE, 1) == b"A"
    # The child's leaf, and 511 entries of the parent's.
    assert head.mapcount == 1 + 511 and head.refcount == 1 + 511
    mm.mem.check()
    child.exit()
    assert mm.read(a + 3 * PAGE, 1) == b"B"


def test_thp_is_reused_whole_when_the_other_is_gone(mm):
    a = thp(mm)
    head = mm.page_at(a).folio
    child = mm.fork()
    child.exit()
    tables = mm.nr_tables
    mm.write(a + HUGE - 1, b"x")
    assert mm.page_at(a).folio == head and exclusive(head.page) and mm.nr_tables == tables


def test_pinned_thp_goes_page_by_page(mm):
    """A pin is the folio's: every exclusive page of it is copied, and the parent keeps all of its own."""
    a = thp(mm)
    mm.write(a, b"A")
    mm.write(a + 7 * PAGE, b"B")
    head = mm.page_at(a).folio
    pages = pin(mm, a + 7 * PAGE)
    child = mm.fork()
    assert head.mapcount == 512 and head.pincount == 1
    assert child.rss == 512 and all(child.page_at(a + i * PAGE).folio != head for i in (0, 7, 511))
    assert (child.read(a, 1), child.read(a + 7 * PAGE, 1)) == (b"A", b"B")
    faults = mm.total_faults
    mm.write(a + 7 * PAGE, b"C")
    assert mm.total_faults == faults and seen_by_device(pages) == b"C"
    mm.mem.check()
    mmc.unpin_user_pages(pages)
    child.exit()


def test_leaf_is_split_and_collapsed_with_every_counter(mm):
    """
        |        leaf        |   munmap of page 5   | 5 | hole | 506 |   refill, collapse   |        leaf        |
    """
    a = thp(mm)
    for i in (0, 5, 511):
        mm.write(a + i * PAGE, bytes([i % 251]))
    old = mm.page_at(a).folio
    mm.munmap(a + 5 * PAGE, PAGE)
    assert (old.mapcount, old.refcount, mm.rss) == (511, 511, 511)
    mm.mem.check()
    mm.mmap(PAGE, flags=ANON | mmc.MAP_FIXED, addr=a + 5 * PAGE)
    mm.madvise(a, HUGE, mmc.MADV_HUGEPAGE)
    mm.madvise(a, HUGE, mmc.MADV_COLLAPSE)
    new = mm.page_at(a).folio
    assert new != old and (new.order, new.mapcount, new.refcount, mm.rss) == (9, 1, 1, 512)
    assert exclusive(new.page)
    assert [mm.read(a + i * PAGE, 1)[0] for i in (0, 5, 511)] == [0, 0, 511 % 251]
    mm.mem.check()


def test_collapse_refuses_what_is_pinned(mm):
    a = mm.mmap(HUGE)
    mm.touch(a, HUGE)
    pages = pin(mm, a + 9 * PAGE)
    with pytest.raises(MMError) as caught:
        mm.madvise(a, HUGE, mmc.MADV_COLLAPSE)
    assert caught.value.errno == errno.EAGAIN and caught.value.addr == a
    mm.mem.check()
    mmc.unpin_user_pages(pages)
    mm.madvise(a, HUGE, mmc.MADV_COLLAPSE)
    assert mm.page_at(a + 9 * PAGE).folio.order == 9


def test_split_of_a_folio_that_two_processes_map(mm):
    a = thp(mm)
    mm.write(a + 100 * PAGE, b"A")
    child = mm.fork()
    folio = mm.page_at(a).folio
    mmc.folio_get(folio)
    pieces = mmc.folio_split(folio, 2)
    assert len(pieces) == 128 and all((p.refcount, p.mapcount) == (9, 8) for p in pieces)
    for piece in pieces:
        mmc.folio_put(piece)
    mm.mem.check()
    mm.write(a + 100 * PAGE, b"B")
    assert child.read(a + 100 * PAGE, 1) == b"A"
    child.exit()


def test_huge_zero_folio(mm):
    """
        read    the huge zero folio, by one leaf, no frame of the process
        fork    shared by both
        write   a THP of its own; the child still reads zeros
    """
    a = mm.mmap(HUGE)
    mm.madvise(a, HUGE, mmc.MADV_HUGEPAGE)
    zero = mm.mem.huge_zero_folio
    assert mm.touch(a, HUGE, write=False) == 1
    assert mm.page_at(a + 5 * PAGE).folio == zero and mm.rss == 0 and zero.refcount == 1
    first = mm.fork()       # gets it with the rest, unlike the zero page of a PTE; pagemap calls it a file's, and nobody's own
    assert first.page_at(a + 5 * PAGE).folio == zero
    assert word(first, a) == word(mm, a) and word(mm, a) & (PRESENT | FILE | EXCLUSIVE) == PRESENT | FILE
    first.exit()
    first = mm.fork()
    mm.write(a + PAGE, b"A")
    assert mm.page_at(a).folio.order == 9 and mm.page_at(a).folio != zero
    second = mm.fork()
    assert second.read(a, 2) == b"\0\0" and second.read(a + PAGE, 1) == b"A"
    assert first.read(a + PAGE, 1) == b"\0"
    first.exit()
    second.exit()


def test_thp_falls_back_to_base_pages(mm):
    a = mm.mmap(HUGE)
    mm.madvise(a, HUGE, mmc.MADV_HUGEPAGE)
    with mm.mem.inject("frame", 3):     # two tables, then the block
        assert mm.touch(a, 4 * PAGE) == 4
    assert mm.page_at(a).folio.order == 0 and mm.rss == 4


# ---- swap -----------------------------------------------------------------------------------------------------------
def test_swap_out_and_in_keeps_the_exclusive_mark(mm):
    """
        write A ─ pageout ─ read: a new page, exclusive, writable at once
    """
    a = mm.mmap(2 * PAGE)
    mm.write(a, b"A")
    mm.madvise(a, 2 * PAGE, mmc.MADV_PAGEOUT)
    assert word(mm, a) & SWAP and not word(mm, a) & PRESENT and mm.page_at(a) is None
    assert mm.rss == 0 and mm.rss_stat["swap"] == 1
    mm.mem.check()
    assert mm.read(a, 1) == b"A" and exclusive(mm.page_at(a))
    faults = mm.total_faults
    mm.write(a, b"B")
    assert mm.total_faults == faults


def test_shared_swap_entries(mm):
    """
        parent, child share P ─ reclaim ─ both have the slot ─ child reads: its own copy ─ parent writes: its own
    """
    a = mm.mmap(PAGE)
    mm.write(a, b"A")
    child = mm.fork()
    mm.madvise(a, PAGE, mmc.MADV_PAGEOUT)
    assert word(mm, a) & PRESENT, "MADV_PAGEOUT passes over what others map"
    assert mmc.reclaim(mm.page_at(a).folio)
    assert word(mm, a) & SWAP and word(child, a) & SWAP and word(mm, a) == word(child, a)
    mm.mem.check()
    assert child.read(a, 1) == b"A" and not exclusive(child.page_at(a))
    mm.write(a, b"B")
    assert child.read(a, 1) == b"A"
    child.exit()


def test_madv_free(mm):
    """
        free ─ pageout: gone, reads zero          free ─ write ─ pageout: swapped, as ever
    """
    a = mm.mmap(2 * PAGE)
    mm.write(a, b"A")
    mm.write(a + PAGE, b"B")
    mm.madvise(a, 2 * PAGE, mmc.MADV_FREE)
    mm.write(a + PAGE, b"C")
    mm.madvise(a, 2 * PAGE, mmc.MADV_PAGEOUT)
    assert not word(mm, a) & (SWAP | PRESENT) and word(mm, a + PAGE) & SWAP
    assert mm.read(a, 1) == b"\0" and mm.read(a + PAGE, 1) == b"C"


def test_thp_is_paged_out_in_pieces(mm):
    a = thp(mm)
    mm.write(a + 8 * PAGE, b"A")
    mm.madvise(a, HUGE, mmc.MADV_PAGEOUT)
    assert mm.rss == 0 and mm.rss_stat["swap"] == 512
    assert mm.read(a + 8 * PAGE, 1) == b"A"
    mm.mem.check()


# ---- hugetlb --------------------------------------------------------------------------------------------------------
HUGETLB = ANON | mmc.MAP_HUGETLB


def test_hugetlb_reuse_and_copy(mm):
    a = mm.mmap(HUGE, flags=HUGETLB)
    mm.write(a + 5, b"A")
    h = mm.page_at(a).folio
    assert (h.order, h.mapcount, h.refcount, exclusive(h.page), mm.rss) == (9, 1, 1, True, 0)
    child = mm.fork()
    child.write(a + 5, b"B")
    assert child.page_at(a).folio != h and mm.read(a + 5, 1) == b"A"
    mm.write(a + 5, b"C")
    assert mm.page_at(a).folio == h
    child.exit()


def test_hugetlb_reservation(mm):
    """
        pool 4:  reserve 3 │ promised 3, free 4 │ a second mapping of 2: ENOMEM │ of 1: fits │ touch: promise redeemed
    """
    a = mm.mmap(3 * HUGE, flags=HUGETLB)
    with pytest.raises(MMError, match="promise") as caught:
        mm.mmap(2 * HUGE, flags=HUGETLB)
    assert caught.value.errno == errno.ENOMEM
    with pytest.raises(MMError):
        for _ in range(2):
            mmc.folio_alloc(mm.mem, 9, hugetlb=True)
    taken = mm.mem.hugetlb_pools()[HUGE]
    assert taken == (4, 3), "only the one that nobody was promised"
    assert mm.touch(a, 3 * HUGE) == 3 and mm.mem.hugetlb_pools()[HUGE] == (4, 0)
    mm.madvise(a + HUGE, HUGE, mmc.MADV_DONTNEED)
    mm.mem.check()
    assert mm.touch(a + HUGE, HUGE) == 1
    mm.munmap(a, 3 * HUGE)
    head = next(f for f in range(512, len(mm.mem.pages), 512) if mm.mem.pages["page_type"][f] >> 24 == 0xF4
                and mm.mem.pages["_refcount"][f])
    mmc.folio_put(mm.mem.folio(head))


def test_hugetlb_noreserve_ends_in_sigbus(mm):
    a = mm.mmap(5 * HUGE, flags=HUGETLB | mmc.MAP_NORESERVE)
    with pytest.raises(MMError, match="SIGBUS") as caught:
        mm.touch(a, 5 * HUGE)
    assert caught.value.errno == errno.EFAULT and caught.value.addr == a + 4 * HUGE
    mm.mem.check()


@pytest.mark.parametrize("call", ["munmap", "mprotect", "fixed"])
def test_hugetlb_is_not_cut(mm, call):
    a = mm.mmap(2 * HUGE, flags=HUGETLB)
    with pytest.raises(mmc.InvalidArgument):
        if call == "munmap":
            mm.munmap(a, PAGE)
        elif call == "mprotect":
            mm.mprotect(a + PAGE, HUGE, 0)
        else:
            mm.mmap(PAGE, flags=ANON | mmc.MAP_FIXED, addr=a + HUGE + PAGE)
    assert len(mm.vmas) == 1
    mm.mem.check()


def test_gigantic_leaves():
    with Memory("4G", hugetlb={"1G": 2}) as mem, MM(mem) as mm:
        a = mm.mmap("1G", flags=HUGETLB | mmc.MAP_HUGE_1GB)
        assert mm.touch(a, "1G") == 1 and mm.nr_tables == 2, "a leaf in the PUD table"
        mm.write(a + (1 << 29) + 5, b"A")
        child = mm.fork()
        child.write(a + (1 << 29) + 5, b"B")
        assert mm.read(a + (1 << 29) + 5, 1) == b"A"
        mem.check()
        child.exit()
        mem.check()


# ---- cases from reports ---------------------------------------------------------------------------------------------
def test_case_cow_fork_pinned_hugetlb(mm):
    """A pinned huge page is copied at fork when the pool has one; when it has none fork fails, and nothing is shared."""
    a = mm.mmap(HUGE, flags=HUGETLB)
    mm.write(a, b"A")
    h = mm.page_at(a).folio
    pages = pin(mm, a)
    others = [mmc.folio_alloc(mm.mem, 9, hugetlb=True) for _ in range(2)]
    child = mm.fork()           # one is left
    assert child.page_at(a).folio != h and exclusive(child.page_at(a).folio.page) and child.read(a, 1) == b"A"
    mm.write(a, b"B")
    assert mm.page_at(a).folio == h and seen_by_device(pages) == b"B"
    with pytest.raises(MMError) as caught:
        mm.fork()
    assert caught.value.errno == errno.ENOMEM
    assert (h.mapcount, h.pincount, exclusive(h.page)) == (1, 1, True)
    mm.write(a, b"C")
    assert mm.page_at(a).folio == h
    child.exit()
    mmc.unpin_user_pages(pages)
    for folio in others:
        mmc.folio_put(folio)


def test_case_cow_hugetlb_child_writable(mm):
    """After fork neither side can write to the shared huge page: the child's write must not show in the parent."""
    a = mm.mmap(HUGE, flags=HUGETLB)
    mm.write(a, b"P")
    h = mm.page_at(a).folio
    child = mm.fork()
    assert h.mapcount == 2
    child.write(a, b"C")
    assert mm.read(a, 1) == b"P" and h.mapcount == 1
    child.exit()


def test_case_cow_vmsplice_leak(mm):
    """A reference that the child keeps past its mapping must not see what the parent writes later."""
    a = mm.mmap(PAGE)
    mm.write(a, b"A")
    p = mm.page_at(a)
    child = mm.fork()
    assert (p.mapcount, p.refcount) == (2, 2)
    pages = mmc.PageList(mm.mem, [child.page_at(a).pfn])
    mmc.grab_pages(pages, mmc.FOLL_GET)
    child.munmap(a, PAGE)
    assert (p.mapcount, p.refcount) == (1, 2)
    mm.write(a, b"B")
    assert mm.page_at(a) != p and seen_by_device(pages) == b"A" and mm.read(a, 1) == b"B"
    mmc.release_pages(pages)
    child.exit()


def test_case_cow_clear_refs_pinned(mm):
    """clear_refs(4) leaves a pinned page writable and soft-dirty; the other is write-protected, and reused by the next write."""
    a = mm.mmap(2 * PAGE)
    mm.write(a, b"0")
    mm.write(a + PAGE, b"1")
    pages = pin(mm, a)
    p0, p1 = mm.page_at(a), mm.page_at(a + PAGE)
    mm.clear_refs(4)
    assert word(mm, a) & SOFT and not word(mm, a + PAGE) & SOFT
    faults = mm.total_faults
    mm.write(a, b"x")
    assert mm.total_faults == faults and mm.page_at(a) == p0 and seen_by_device(pages) == b"x"
    mm.write(a + PAGE, b"y")
    assert mm.total_faults == faults + 1 and mm.page_at(a + PAGE) == p1 and word(mm, a + PAGE) & SOFT
    mmc.unpin_user_pages(pages)


def test_case_cow_pinned_no_swapcache(mm):
    """Reclaim leaves a pinned page alone: it stays mapped, writable and the device's."""
    a = mm.mmap(PAGE)
    mm.write(a, b"A")
    p = mm.page_at(a)
    pages = pin(mm, a)
    mm.madvise(a, PAGE, mmc.MADV_PAGEOUT)
    assert not mmc.reclaim(p.folio)
    faults = mm.total_faults
    mm.write(a, b"B")
    assert mm.total_faults == faults and mm.page_at(a) == p and seen_by_device(pages) == b"B"
    mmc.unpin_user_pages(pages)


def test_case_cow_shmem_gem_private(mm):
    """A driver's raw PFNs may be mapped shared; a private mapping that could be written one day is refused at mmap."""
    buffer = mmc.File(mm.mem, 4 * PAGE, "pfnmap")
    a = mm.mmap(4 * PAGE, flags=mmc.MAP_SHARED, file=buffer)
    mm.write(a, b"A")
    with pytest.raises(MMError) as caught:
        mm.mmap(4 * PAGE, flags=mmc.MAP_PRIVATE, file=buffer)
    assert caught.value.errno == errno.EINVAL
    mm.munmap(a, 4 * PAGE)
    del buffer, caught


def test_case_pm_exclusive_needs_present(mm):
    """A swapped page of a process is never reported as exclusive; the other process's present one is."""
    a = mm.mmap(PAGE)
    mm.write(a, b"A")
    child = mm.fork()
    assert mmc.reclaim(mm.page_at(a).folio)
    child.read(a, 1)
    assert word(mm, a) & SWAP and not word(mm, a) & (PRESENT | EXCLUSIVE)
    assert word(child, a) & PRESENT and word(child, a) & EXCLUSIVE
    child.exit()


def test_case_pm_pfn_hidden(mm):
    """Without privilege the word still says present, but names no frame."""
    a = mm.mmap(PAGE)
    mm.write(a, b"A")
    pfn = mm.page_at(a).pfn
    low = (1 << 55) - 1
    with_cap, without = (int(mm.pagemap(a, 1, privileged=p)[0]) for p in (True, False))
    assert with_cap & low == pfn and without & low == 0 and without & PRESENT
    assert with_cap & ~low == without & ~low
