"""memory_failure: a broken page leaves the allocator, its pool, or does not return to them."""
import errno

import pytest

import mmcore as mmc
from mmcore import MM, BadPage, DevicePages, File, FOLL_GET, InvalidArgument, Memory, MMError, PageFlags
from support import canonical_blocks, refused, unchanged

EHWPOISON = getattr(errno, "EHWPOISON", 133)
PAGE = 4096
HUGE = 512 * PAGE


@pytest.fixture
def mem():
    return Memory("16M", hugetlb={"2M": 2})


def everything(mem):
    """PFNs of all that can be allocated, one page at a time."""
    pfns = []
    while True:
        try:
            pfns += [int(pfn) for pfn in mmc.alloc_pages_bulk(mem, 1000).pfns]
        except MMError:
            return pfns


@pytest.mark.parametrize("pfn", [2, 9, 1000, 3071])
@pytest.mark.parametrize("used", [False, True])
def test_a_free_page_is_never_handed_out(mem, pfn, used):
    if used:
        mmc.folio_put(mmc.folio_alloc_at(mem, pfn, 0))
    free = mem.vmstat()["nr_free_pages"]
    mem.memory_failure(mem.page(pfn))
    assert mem.vmstat()["nr_free_pages"] == free - 1
    assert PageFlags.hwpoison in mem.page(pfn).flags
    assert mem.buddyinfo()["Normal"] == canonical_blocks(set(range(2, 3072)) - {pfn}, 10)
    mem.check()
    assert sorted(everything(mem)) == [p for p in range(2, 3072) if p != pfn]
    for call in (lambda: mmc.folio_get(mem.folio(pfn)), lambda: mmc.try_grab_folio(mem.folio(pfn), 1)):
        with refused(mem, (BadPage, MMError)):
            call()
    with refused(mem, MMError, errno=16):
        mmc.folio_alloc_at(mem, pfn, 0)


def test_a_used_page_does_not_come_back(mem):
    page = mmc.alloc_page(mem)
    mmc.grab_pages([page])
    free = mem.vmstat()["nr_free_pages"]
    mem.memory_failure(page)
    mem.check()
    mmc.put_page(page)
    mmc.unpin_user_page(page)
    assert mem.vmstat()["nr_free_pages"] == free and PageFlags.hwpoison in page.flags
    mem.check()
    assert page.pfn not in everything(mem)


@pytest.mark.parametrize("index", [0, 1, 2, 7])
def test_the_other_pages_of_a_folio_come_back(mem, index):
    folio = mmc.folio_alloc_at(mem, 64, 3)
    mem.memory_failure(mmc.folio_page(folio, index))
    mem.check()
    mmc.folio_put(folio)
    mem.check()
    assert mem.buddyinfo()["Normal"] == canonical_blocks(set(range(2, 3072)) - {64 + index}, 10)


def test_a_split_keeps_the_mark_on_its_page(mem):
    folio = mmc.folio_alloc_at(mem, 64, 3)
    mem.memory_failure(mem.page(69))
    pieces = mmc.folio_split(folio, 1)
    assert [PageFlags.hwpoison in mem.page(pfn).flags for pfn in range(64, 72)] == [pfn == 69 for pfn in range(64, 72)]
    for piece in pieces:
        mmc.folio_put(piece)
    assert mem.buddyinfo()["Normal"] == canonical_blocks(set(range(2, 3072)) - {69}, 10)
    mem.check()


def test_a_hugetlb_folio_with_a_broken_page_leaves_its_pool(mem):
    # In use: it goes to the allocator when it is freed, but for the broken page; the pool is one smaller.
    free = mem.vmstat()["nr_free_pages"]
    folio = mmc.folio_alloc(mem, 9, hugetlb=True)
    mem.memory_failure(mmc.folio_page(folio, 77))
    mmc.folio_put(folio)
    assert mem.hugetlb_pools() == {2 << 20: (1, 1)}
    assert mem.vmstat()["nr_free_pages"] == free + 511
    mem.check()


@pytest.mark.parametrize("index", [0, 77])
def test_a_pooled_hugetlb_folio_with_a_broken_page_is_not_handed_out(mem, index):
    pfn = mmc.folio_alloc(mem, 9, hugetlb=True).pfn
    mmc.folio_put(mem.folio(pfn))
    mem.memory_failure(mem.page(pfn + index))
    mem.check()
    got = mmc.folio_alloc(mem, 9, hugetlb=True)
    assert got.pfn != pfn
    with refused(mem, MMError, errno=12):
        mmc.folio_alloc(mem, 9, hugetlb=True)
    assert pfn + index not in everything(mem)
    mmc.folio_put(got)
    mem.check()


def test_twice_is_refused(mem):
    page = mmc.alloc_page(mem)
    for broken in page, mem.page(2000):
        mem.memory_failure(broken)
        with refused(mem, MMError, errno=EHWPOISON, pfn=broken.pfn):
            mem.memory_failure(broken)


def test_folio_huge_zero_unpoison(mem):
    # The huge zero folio is refused: references and counters of it stay as they were.
    huge = mem.huge_zero_folio
    mmc.try_grab_folio(huge, 1, FOLL_GET)
    for page in huge.page, mmc.folio_page(huge, 200):
        with refused(mem, MMError, errno=16, pfn=page.pfn):
            mem.memory_failure(page)
    assert huge.refcount == 2
    mmc.folio_put(huge)
    with refused(mem, BadPage):
        mmc.folio_put(huge)


def test_reserved_pages_are_refused(mem):
    with refused(mem, MMError, errno=16, pfn=1):
        mem.memory_failure(mem.zero_page)


@pytest.mark.parametrize("page", [3, None, "page"])
def test_what_is_no_page(mem, page):
    with refused(mem, TypeError):
        mem.memory_failure(page)


def test_a_page_of_another_memory(mem):
    other = Memory("16M")
    page = mmc.alloc_page(other)
    with refused(mem, InvalidArgument), unchanged(other):
        mem.memory_failure(page)


def test_device_pages_keep_the_mark():
    mem = Memory("16M", devices=[DevicePages("64K", type="generic")])
    page = mem.page(mem.devices[0].start_pfn + 3)
    mem.memory_failure(page)
    mmc.put_page(page)
    assert PageFlags.hwpoison in page.flags
    mem.check()


def test_poisoned_pages_are_counted(mem):
    for pfn in 10, 20, 30:
        mem.memory_failure(mem.page(pfn))
    assert mem.vmstat()["nr_poisoned"] == 3


def map_file(mem, mm, private):
    """A file of four pages whose third is broken and in the cache, and a fresh mapping of it."""
    file = File(mem, 4 * PAGE, "tmpfs")
    file.write(2 * PAGE, b"broken")
    first = mm.mmap(4 * PAGE, flags=mmc.MAP_SHARED, file=file)
    mm.read(first + 2 * PAGE, 1)
    mem.memory_failure(mm.page_at(first + 2 * PAGE))
    return mm.mmap(4 * PAGE, flags=mmc.MAP_PRIVATE if private else mmc.MAP_SHARED, file=file)


def test_user_accesses_to_a_broken_page():
    with Memory("64M") as mem, MM(mem) as mm:
        addr = mm.mmap(4 * PAGE)
        mm.write(addr, b"x" * 4 * PAGE)
        mem.memory_failure(mm.page_at(addr + PAGE))
        for call in (lambda: mm.read(addr + PAGE + 9, 1), lambda: mm.write(addr + PAGE, b"y")):
            with refused(mem, MMError, "hwpoison", errno.EFAULT):
                call()
        assert mm.read(addr, PAGE) == b"x" * PAGE and mm.read(addr + 2 * PAGE, 2 * PAGE) == b"x" * 2 * PAGE
        # What reaches it in the middle stops there.
        with pytest.raises(MMError) as caught:
            mm.read(addr, 3 * PAGE)
        assert caught.value.addr == addr + PAGE
        mm.munmap(addr, 4 * PAGE)
        mem.check()


@pytest.mark.parametrize("private", [False, True])
@pytest.mark.parametrize("write", [False, True])
def test_faults_on_a_broken_page_of_a_file(private, write):
    with Memory("64M") as mem, MM(mem) as mm:
        addr = map_file(mem, mm, private)
        access = (lambda at: mm.write(at, b"y")) if write else (lambda at: mm.read(at, 1))
        with refused(mem, MMError, "hwpoison", errno.EFAULT):
            access(addr + 2 * PAGE)
        with pytest.raises(MMError) as caught:
            mm.madvise(addr, 4 * PAGE, mmc.MADV_POPULATE_WRITE if write else mmc.MADV_POPULATE_READ)
        assert caught.value.errno == EHWPOISON and caught.value.addr == addr + 2 * PAGE
        with pytest.raises(MMError) as caught:
            mmc.pin_user_pages(mm, addr + 2 * PAGE, 1, mmc.FOLL_HWPOISON | (mmc.FOLL_WRITE if write else 0))
        assert caught.value.errno == EHWPOISON
        access(addr + PAGE)
        mem.check()


def test_a_broken_page_is_not_copied():
    #   parent   |--- page, broken after the fork ---|   the child's write would copy it
    with Memory("64M") as mem, MM(mem) as mm:
        addr = mm.mmap(PAGE)
        mm.write(addr, b"x")
        child = mm.fork()
        mem.memory_failure(mm.page_at(addr))
        with refused(mem, MMError, "hwpoison", errno.EFAULT):
            child.write(addr, b"y")
        child.exit()
        mem.check()


def test_a_thp_of_a_file_with_a_broken_page_is_mapped_by_pages():
    with Memory("64M", shmem_thp="always") as mem, MM(mem) as mm:
        file = File(mem, HUGE, "tmpfs")
        addr = mm.mmap(HUGE, flags=mmc.MAP_SHARED, file=file)
        mm.write(addr, b"x")
        page = mm.page_at(addr + 5 * PAGE)
        assert page.folio.nr_pages == 512
        mem.memory_failure(page)
        again = mm.mmap(HUGE, flags=mmc.MAP_SHARED, file=file)
        assert mm.read(again, 1) == b"x" and mm.read(again + 6 * PAGE, 1) == b"\0"
        with refused(mem, MMError, "hwpoison", errno.EFAULT):
            mm.read(again + 5 * PAGE, 1)
        mem.check()


def test_a_broken_page_is_neither_swapped_nor_collapsed():
    with Memory("64M") as mem, MM(mem) as mm:
        addr = mm.mmap(HUGE)
        mm.madvise(addr, HUGE, mmc.MADV_NOHUGEPAGE)
        mm.write(addr, b"x" * 3 * PAGE)
        broken = mm.page_at(addr + PAGE)
        mem.memory_failure(broken)
        mm.madvise(addr, 3 * PAGE, mmc.MADV_PAGEOUT)
        assert [mm.page_at(addr + i * PAGE) for i in range(3)] == [None, broken, None]
        assert not mmc.reclaim(broken.folio)
        mm.madvise(addr, HUGE, mmc.MADV_HUGEPAGE)
        with pytest.raises(InvalidArgument):
            mm.madvise(addr, HUGE, mmc.MADV_COLLAPSE)
        with refused(mem, MMError, "hwpoison", errno.EFAULT):
            mm.read(addr + PAGE, 1)
        assert mm.page_at(addr + PAGE) == broken and mm.read(addr, PAGE) == b"x" * PAGE
        mem.check()


@pytest.mark.parametrize("hugetlb", [False, True])
def test_fork_does_not_copy_a_broken_page(hugetlb):
    #   pinned: fork would copy it for the child
    with Memory("64M", hugetlb={"2M": 4}) as mem, MM(mem) as mm:
        flags = mmc.MAP_PRIVATE | mmc.MAP_ANONYMOUS | (mmc.MAP_HUGETLB if hugetlb else 0)
        addr = mm.mmap(HUGE if hugetlb else PAGE, flags=flags)
        mm.write(addr, b"x")
        pages = mmc.pin_user_pages(mm, addr, 1)
        mem.memory_failure(pages[0])
        with pytest.raises(MMError) as caught:
            mm.fork()
        assert caught.value.errno == EHWPOISON
        mmc.unpin_user_pages(pages)
        with mm.fork() as child, refused(mem, MMError, "hwpoison", errno.EFAULT):
            child.read(addr, 1)
        mem.check()


@pytest.mark.parametrize("mapped_before", [False, True])
def test_a_private_mapping_does_not_copy_a_broken_hugetlb_page(mapped_before):
    with Memory("64M", hugetlb={"2M": 4}) as mem, MM(mem) as mm:
        file = File(mem, HUGE, "hugetlbfs")
        file.write(0, b"x")
        private = mm.mmap(HUGE, flags=mmc.MAP_PRIVATE, file=file)
        if mapped_before:
            mm.read(private, 1)
        mem.memory_failure(mem.page(file.page_at(0).pfn + 3))
        with pytest.raises(MMError, match="hwpoison"):
            mm.write(private, b"y")
        with pytest.raises(MMError) as caught:
            mmc.pin_user_pages(mm, private, 1, mmc.FOLL_WRITE | mmc.FOLL_HWPOISON)
        assert caught.value.errno == EHWPOISON and mm.read(private, 1) == b"x"
        mem.check()


def test_a_device_is_not_shown_a_broken_page():
    with Memory("64M") as mem, MM(mem) as mm:
        addr = mm.mmap(3 * PAGE)
        mm.write(addr, b"x" * 3 * PAGE)
        mem.memory_failure(mm.page_at(addr + PAGE))
        words = mmc.hmm_range_fault(mm, addr, 3)
        assert [int(word) >> 61 for word in words] == [0b110, 0b001, 0b110]     # VALID and WRITE; ERROR
        with refused(mem, MMError, errno=errno.EFAULT):
            mmc.hmm_range_fault(mm, addr, 3, mmc.HMM_PFN_REQ_FAULT)


@pytest.mark.parametrize("kind", ["tmpfs", "ext4", "hugetlbfs"])
def test_file_io_on_a_broken_page(kind):
    with Memory("64M", hugetlb={"2M": 4}) as mem:
        file = File(mem, HUGE, kind)
        file.write(0, b"x" * 3 * PAGE)
        mem.memory_failure(file.page_at(PAGE))
        for call in (lambda: file.read(PAGE + 9, 1), lambda: file.write(PAGE, b"y")):
            with refused(mem, MMError, "hwpoison", errno.EIO):
                call()
        assert file.read(0, PAGE) + file.read(2 * PAGE, PAGE) == b"x" * 2 * PAGE
        assert file.writeback() == (2 if kind == "ext4" else 0)
        assert file.page_at(PAGE).folio.dirty
        mem.check()
