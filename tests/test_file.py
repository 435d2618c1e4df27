"""Files under mappings: page cache, dirty tracking, truncation, devices."""
import errno
import gc

import pytest

import mmcore as mmc
from mm_support import FILE, HUGE, PAGE, PRESENT, SWAP, exclusive, pin, private, seen_by_device, shared, word
from mmcore import DevicePages, File, InvalidArgument, MM, MMError, Memory
from support import refused


@pytest.fixture
def mem():
    devices = [DevicePages("8M", align="2M"), DevicePages("8M", align="2M", compound=False), DevicePages("4M", type="fsdax"),
               DevicePages("4M")]
    mem = Memory("64M", hugetlb={"2M": 4}, devices=devices, shmem_thp="madvise")
    mem.huge_zero_folio
    free, pools = mem.vmstat()["nr_free_pages"], mem.hugetlb_pools()
    yield mem
    gc.collect()        # a refusal keeps the frames that its traceback names, and their files
    mem.check()
    stat = mem.vmstat()
    assert stat["nr_free_pages"] == free and mem.hugetlb_pools() == pools, "frames leaked"
    assert stat["nr_dirty"] == 0


@pytest.fixture
def mm(mem):
    with MM(mem) as mm:
        yield mm


@pytest.mark.parametrize("kind", ["tmpfs", "ext4"])
def test_one_page_for_all_who_share(mm, kind):
    """
        file    |0|1|2|3|        two mappings, one from page 1 on; write(2); read(2)
    """
    file = File(mm.mem, 4 * PAGE, kind)
    a, b = shared(mm, file, 4 * PAGE), shared(mm, file, 2 * PAGE, offset=PAGE)
    mm.write(a + PAGE, b"A")
    assert mm.read(b, 1) == b"A" and file.read(PAGE, 1) == b"A"
    file.write(2 * PAGE, b"B")
    assert mm.read(b + PAGE, 1) == mm.read(a + 2 * PAGE, 1) == b"B"
    page = mm.page_at(b)
    assert page == file.page_at(PAGE) and (page.refcount, page.mapcount) == (3, 2)
    assert word(mm, b) & FILE and not exclusive(page)
    assert mm.rss_stat["shmem" if kind == "tmpfs" else "file"] == 4
    mm.mem.check()


@pytest.mark.parametrize("kind", ["tmpfs", "ext4", "hugetlbfs"])
def test_private_mappings_copy_on_write(mm, kind):
    """
        cache   F ───────────────── F unchanged ──
        mm      reads F ─ writes: copy Q, exclusive
    """
    size = 2 * HUGE if kind == "hugetlbfs" else 4 * PAGE
    file = File(mm.mem, size, kind)
    file.write(5, b"F")
    a = private(mm, file, size)
    assert mm.read(a + 5, 1) == b"F"
    f = mm.page_at(a)
    assert f == file.page_at(0)
    mm.write(a + 5, b"Q")
    assert mm.page_at(a) != f and exclusive(mm.page_at(a)) and file.read(5, 1) == b"F"
    child = mm.fork()
    child.write(a + 5, b"R")
    assert (mm.read(a + 5, 1), child.read(a + 5, 1), file.read(5, 1)) == (b"Q", b"R", b"F")
    mm.mem.check()
    child.exit()


def test_ext4_tracks_dirt(mm):
    """
        write ─ dirty ─ writeback: clean, write-protected ─ read: stays clean ─ write: a fault, dirty again
    """
    file = File(mm.mem, 4 * PAGE, "ext4")
    a = shared(mm, file, 4 * PAGE)
    mm.write(a, b"A")
    folio = file.page_at(0).folio
    assert folio.dirty and mm.mem.vmstat()["nr_dirty"] == 1
    assert file.writeback() == 1 and not folio.dirty and mm.mem.vmstat()["nr_dirty"] == 0
    mm.read(a, 1)
    assert not folio.dirty
    faults = mm.total_faults
    mm.write(a, b"B")
    assert mm.total_faults == faults + 1 and folio.dirty
    assert file.writeback() == 1 and file.writeback() == 0
    # Read first, written later: the first entry is read-only too.
    mm.read(a + PAGE, 1)
    faults = mm.total_faults
    mm.write(a + PAGE, b"C")
    assert mm.total_faults == faults + 1 and file.page_at(PAGE).folio.dirty
    file.writeback()


def test_ext4_pages_come_back_from_the_disk(mm):
    file = File(mm.mem, 2 * PAGE, "ext4")
    a = shared(mm, file, 2 * PAGE)
    mm.write(a, b"A")
    mm.madvise(a, 2 * PAGE, mmc.MADV_PAGEOUT)
    assert file.nr_cached == 0 and mm.rss == 0
    assert mm.read(a, 1) == b"A" and file.read(0, 1) == b"A"


def test_tmpfs_pages_come_back_from_swap(mm):
    file = File(mm.mem, 2 * PAGE)
    a = shared(mm, file, 2 * PAGE)
    mm.write(a, b"A")
    mm.madvise(a, PAGE, mmc.MADV_PAGEOUT)
    assert file.nr_cached == 0 and file.page_at(0) is None
    # The entry of a file's page is simply gone: the slot is in the page cache.
    assert not word(mm, a) & (PRESENT | SWAP)
    mm.mem.check()
    assert mm.read(a, 1) == b"A"


@pytest.mark.parametrize("kind", ["tmpfs", "ext4"])
def test_truncate_under_a_mapping(mm, kind):
    """
        file      |0|1|2|3|   truncate to 1.5 pages   |0|1.|      then grown again: zeros
        private   |.|.|Q|.|   its copy Q goes as well
    """
    file = File(mm.mem, 4 * PAGE, kind)
    a, b = shared(mm, file, 4 * PAGE), private(mm, file, 4 * PAGE)
    mm.write(a, b"A" * 4 * PAGE)
    mm.write(b + 2 * PAGE, b"Q")
    file.truncate(PAGE + PAGE // 2)
    mm.mem.check()
    assert mm.read(a + PAGE, PAGE) == b"A" * (PAGE // 2) + bytes(PAGE // 2)
    for at in (a + 2 * PAGE, b + 2 * PAGE, b + 3 * PAGE):
        with pytest.raises(MMError, match="truncated.*SIGBUS") as caught:
            mm.read(at, 1)
        assert caught.value.errno == errno.EFAULT and caught.value.addr == at
    file.truncate(4 * PAGE)
    assert mm.read(a + 2 * PAGE, 2 * PAGE) == bytes(2 * PAGE) and mm.read(b + 2 * PAGE, 1) == b"\0"


def test_pinned_page_outlives_truncation(mm):
    file = File(mm.mem, PAGE)
    a = shared(mm, file, PAGE)
    mm.write(a, b"A")
    pages = pin(mm, a)
    file.truncate(0)
    page = pages[0]
    assert (page.mapcount, page.refcount, page.folio.pincount) == (0, 1024, 1) and seen_by_device(pages) == b"A"
    file.truncate(PAGE)
    assert mm.read(a, 1) == b"\0" and mm.page_at(a) != page
    mmc.unpin_user_pages(pages)


def test_tmpfs_thp(mm):
    """
        cache   |   THP   |    one leaf in each mapping that lines up, entries in one that does not
    """
    file = File(mm.mem, 2 * HUGE)
    a = shared(mm, file, 2 * HUGE)
    mm.madvise(a, 2 * HUGE, mmc.MADV_HUGEPAGE)
    assert mm.touch(a, 2 * HUGE) == 2
    folio = file.page_at(0).folio
    assert (folio.order, folio.mapcount, folio.refcount) == (9, 1, 513)
    b = shared(mm, file, 16 * PAGE, offset=PAGE)
    mm.write(b, b"B")
    assert mm.read(a + PAGE, 1) == b"B" and folio.mapcount == 2
    mm.mem.check()
    file.truncate(HUGE + 3 * PAGE)
    mm.mem.check()
    assert file.page_at(HUGE).folio.order == 0, "the THP that the end cut was split"
    assert file.nr_cached == 512 + 3
    mm.munmap(a + 5 * PAGE, PAGE)
    mm.mem.check()
    assert folio.mapcount == 511 + 1


def test_case_folio_beyond_eof_refs(mm):
    """A piece of a split folio beyond the end of the file holds a cache reference a page: dropping it frees all of them."""
    file = File(mm.mem, HUGE)
    a = shared(mm, file, HUGE)
    mm.madvise(a, HUGE, mmc.MADV_HUGEPAGE)
    mm.touch(a, PAGE)
    mm.munmap(a, HUGE)
    folio = file.page_at(0).folio
    mmc.folio_get(folio)
    pieces = mmc.folio_split(folio, 2)
    assert [p.refcount for p in pieces] == [4 + 1] * 128
    for piece in pieces:
        mmc.folio_put(piece)
    free = mm.mem.vmstat()["nr_free_pages"]
    last = pieces[-1]
    file.truncate(HUGE - 4 * PAGE)
    assert last.refcount == 0 and mm.mem.vmstat()["nr_free_pages"] == free + 4
    mm.mem.check()


def test_hugetlbfs_shares_and_reserves(mm):
    file = File(mm.mem, 2 * HUGE, "hugetlbfs")
    a = shared(mm, file, 2 * HUGE)
    assert mm.mem.hugetlb_pools()[HUGE] == (4, 4)
    with pytest.raises(MMError):
        mm.mmap(3 * HUGE, flags=mmc.MAP_PRIVATE | mmc.MAP_ANONYMOUS | mmc.MAP_HUGETLB)
    b = shared(mm, file, HUGE, offset=HUGE)
    mm.write(b + 7, b"B")
    assert mm.read(a + HUGE + 7, 1) == b"B" and mm.page_at(b).folio.mapcount == 2
    child = mm.fork()
    child.write(b + 7, b"C")
    assert mm.read(b + 7, 1) == b"C"
    child.exit()
    file.truncate(HUGE)
    assert file.nr_cached == 0
    with pytest.raises(MMError, match="SIGBUS"):
        mm.read(b, 1)


@pytest.mark.parametrize("device, leaf, counted", [(0, 9, True), (1, 9, False), (3, 0, True)])
def test_devdax(mm, device, leaf, counted):
    """Leaves of the device's alignment; base pages behind a huge leaf are not counted, the device map keeps them."""
    region = mm.mem.devices[device]
    file = File(mm.mem, "4M", "devdax", device=region)
    a = shared(mm, file, "4M")
    assert mm.touch(a, "4M") == (4 << 20) // (PAGE << leaf)
    page = mm.page_at(a + 3 * PAGE)
    assert page.pfn == region.start_pfn + 3
    assert page.folio.mapcount == (1 if counted else 0) and page.refcount == (2 if counted else 1)
    mm.write(a + 3 * PAGE, b"D")
    assert mm.read(a + 3 * PAGE, 1) == b"D" and seen_by_device([page]) == b"D"
    mm.mem.check()
    if leaf:
        with refused(mm.mem, InvalidArgument):
            mm.munmap(a, PAGE)
    with refused(mm.mem, InvalidArgument):
        private(mm, file, "4M")
    child = mm.fork()
    assert child.read(a + 3 * PAGE, 1) == b"D"
    child.exit()


def test_device_gone(mm):
    file = File(mm.mem, "4M", "devdax", device=mm.mem.devices[0])
    a = shared(mm, file, "4M")
    mm.touch(a, PAGE)
    pages = pin(mm, a)
    with refused(mm.mem, MMError, errno=errno.EBUSY):
        file.unplug()
    mmc.unpin_user_pages(pages)
    file.unplug()
    with pytest.raises(MMError, match="removed.*SIGBUS") as caught:
        mm.read(a, 1)
    assert caught.value.errno == errno.EFAULT
    with refused(mm.mem, MMError, errno=errno.ENODEV):
        shared(mm, file, "4M")


def test_fsdax(mm):
    """No copy in memory: the file's page is the device's, and truncation must wait for who holds it."""
    file = File(mm.mem, 8 * PAGE, "fsdax", device=mm.mem.devices[2])
    a = shared(mm, file, 8 * PAGE)
    mm.write(a + PAGE, b"D")
    page = mm.page_at(a + PAGE)
    assert page.pfn == mm.mem.devices[2].start_pfn + 1 and (page.refcount, page.mapcount) == (2, 1)
    pages = pin(mm, a + PAGE)
    with refused(mm.mem, MMError, errno=errno.EBUSY, match="pinned"):
        file.truncate(0)
    mmc.unpin_user_pages(pages)
    with pytest.raises(MMError) as caught:
        File(mm.mem, PAGE, "fsdax", device=mm.mem.devices[2])
    assert caught.value.errno == errno.EBUSY
    file.truncate(0)
    assert (page.refcount, page.mapcount) == (0, 0)
    with pytest.raises(MMError, match="SIGBUS"):
        mm.read(a + PAGE, 1)


def test_secretmem(mm):
    file = File(mm.mem, 2 * PAGE, "secretmem")
    with refused(mm.mem, InvalidArgument):
        private(mm, file, PAGE)
    with refused(mm.mem, InvalidArgument):
        file.read(0, 1)
    a = shared(mm, file, 2 * PAGE)
    mm.write(a, b"S")
    assert mm.locked_vm == 2 and not mmc.reclaim(mm.page_at(a).folio)
    with refused(mm.mem, InvalidArgument):
        mm.madvise(a, PAGE, mmc.MADV_PAGEOUT)
    mm.munmap(a, 2 * PAGE)
    assert mm.locked_vm == 0


def test_raw_pfns_count_nothing(mm):
    file = File(mm.mem, 2 * PAGE, "pfnmap")
    a = shared(mm, file, 2 * PAGE)
    page = mm.page_at(a)
    assert (page.refcount, page.mapcount, mm.rss, mm.total_faults) == (1, 0, 0, 0), "mapped at once, and counted nowhere"
    mm.write(a, b"R")
    child = mm.fork()
    assert child.read(a, 1) == b"R" and page.refcount == 1
    child.exit()
    for advice in (mmc.MADV_DONTNEED, mmc.MADV_HUGEPAGE, mmc.MADV_POPULATE_READ, mmc.MADV_PAGEOUT, mmc.MADV_COLLAPSE):
        with refused(mm.mem, InvalidArgument):
            mm.madvise(a, PAGE, advice)
    mm.mem.check()


def test_iomem_has_no_pages(mm):
    file = File(mm.mem, 2 * PAGE, "iomem")
    a = shared(mm, file, 2 * PAGE)
    mm.write(a + PAGE, b"reg")
    assert mm.read(a + PAGE, 3) == b"reg" and file.read(PAGE, 3) == b"reg"
    assert mm.page_at(a) is None and word(mm, a) & PRESENT
    with refused(mm.mem, InvalidArgument):
        mm.madvise(a, PAGE, mmc.MADV_DOFORK)


@pytest.mark.parametrize("make", [
    lambda mem: File(mem, PAGE, "nfs"), lambda mem: File(mem, HUGE, "hugetlbfs", page_size="1G"),
    lambda mem: File(mem, PAGE, "hugetlbfs"), lambda mem: File(mem, PAGE, "devdax"),
    lambda mem: File(mem, PAGE, "devdax", device=9), lambda mem: File(mem, PAGE, "devdax", device=2),
    lambda mem: File(mem, PAGE, "fsdax", device=0), lambda mem: File(mem, "1G", "devdax", device=0),
    lambda mem: File(mem, PAGE, "tmpfs", page_size="2M"), lambda mem: File(mem, PAGE, "tmpfs", device=0)])
def test_files_that_cannot_be(mem, make):
    with refused(mem, InvalidArgument):
        make(mem)


def test_io_beyond_the_end(mm):
    file = File(mm.mem, PAGE)
    assert file.read(PAGE, 5) == b"" and file.read(PAGE - 2, 5) == b"\0\0"
    file.write(3 * PAGE, b"grown")
    assert file.size == 3 * PAGE + 5 and file.read(3 * PAGE, 9) == b"grown"
    huge = File(mm.mem, HUGE, "hugetlbfs")
    with pytest.raises(MMError) as caught:
        huge.write(HUGE, b"x")
    assert caught.value.errno == errno.EFBIG
    with refused(mm.mem, InvalidArgument):
        huge.truncate(PAGE)


def test_files_outlive_their_object_while_mapped(mm):
    a = shared(mm, File(mm.mem, PAGE), PAGE)
    mm.write(a, b"A")
    assert mm.read(a, 1) == b"A" and mm.find_vma(a).file.kind == "tmpfs"


def test_mlock_limit(mem):
    with MM(mem, rlimit_memlock=4 * PAGE) as mm:
        flags = mmc.MAP_PRIVATE | mmc.MAP_ANONYMOUS | mmc.MAP_LOCKED
        a = mm.mmap(3 * PAGE, flags=flags)
        assert mm.locked_vm == 3 and mm.rss == 3, "locked memory is there at once"
        with refused(mem, MMError, errno=errno.EAGAIN, match="RLIMIT_MEMLOCK"):
            mm.mmap(2 * PAGE, flags=flags)
        with refused(mem, MMError, errno=errno.EAGAIN):
            mm.mremap(a, 3 * PAGE, 5 * PAGE)
        mm.mremap(a, 3 * PAGE, 4 * PAGE)
        assert mm.locked_vm == 4
        mm.munmap(a, 2 * PAGE)
        assert mm.locked_vm == 2
        with refused(mem, InvalidArgument):
            mm.madvise(a + 2 * PAGE, PAGE, mmc.MADV_DONTNEED)
    with MM(mem, rlimit_memlock=0, cap_ipc_lock=True) as mm:
        mm.mmap(PAGE, flags=flags)


# ---- what a file refuses, and why ------------------------------------------------------------------------------------
def test_files_are_set_up_once_and_say_what_they_are(mem):
    file = File(mem, 3 * PAGE)
    file.write(0, b"x")
    assert repr(file) == "<File tmpfs, 12K, 1 pages in memory, 0 mappings>" and file.page_size == PAGE
    with refused(mem, InvalidArgument, match="set up already"):
        file.__init__(mem, PAGE)
    blank = File.__new__(File)
    assert "closed" in repr(blank)
    with refused(mem, InvalidArgument, match="never set up"):
        blank.size
    assert File(mem, "4M", "devdax", device=mem.devices[0]).page_size == HUGE
    assert File(mem, "4M", "devdax", device=mem.devices[3]).page_size == PAGE


@pytest.mark.parametrize("kind, device, match", [("pfnmap", None, "size of what it stands for"), ("iomem", None, "size of what"),
                                                 ("devdax", 0, "size of what"), ("secretmem", None, "set once"),
                                                 ("hugetlbfs", None, "no multiple of the huge page size")])
def test_sizes_that_cannot_be_set(mem, kind, device, match):
    file = File(mem, HUGE, kind, device=device)
    with refused(mem, InvalidArgument, match=match):
        file.truncate(3 * PAGE)
    assert file.size == HUGE


def test_a_file_larger_than_its_device(mem):
    file = File(mem, PAGE, "fsdax", device=mem.devices[2])
    with refused(mem, MMError, errno=errno.ENOSPC, match="more than the device has"):
        file.truncate("8M")
    file.truncate("4M")
    assert file.size == 4 << 20


def test_no_room_for_a_larger_cache(mem):
    file = File(mem, PAGE, "ext4")
    file.write(0, b"kept")
    file.writeback()
    with mem.inject("alloc"), refused(mem, MMError, errno=errno.ENOMEM, match="page cache of 1M"):
        file.truncate("1M")
    assert file.size == PAGE
    file.truncate("1M")         # the disk moves along with the cache
    assert mmc.reclaim(file.page_at(0).folio) and file.nr_cached == 0
    assert file.read(0, 4) == b"kept" and file.read((1 << 20) - 4, 8) == bytes(4)


@pytest.mark.parametrize("kind, device", [("tmpfs", None), ("ext4", None), ("hugetlbfs", None), ("secretmem", None)])
def test_only_devices_are_unplugged(mem, kind, device):
    file = File(mem, HUGE, kind)
    with refused(mem, InvalidArgument, match=f"a {kind} file has no device"):
        file.unplug()


def test_io_that_fails_says_where_and_why(mem):
    dax = File(mem, "4M", "fsdax", device=mem.devices[2])
    dax.write(PAGE, b"there")
    assert dax.read(PAGE, 5) == b"there" and dax.read(5 * PAGE, 2) == b"\0\0"
    dax.unplug()
    with refused(mem, MMError, errno=errno.EIO, match="the device of this fsdax file was removed"):
        dax.read(PAGE, 5)
    huge = File(mem, 2 * HUGE, "hugetlbfs")
    taken = [mmc.folio_alloc(mem, 9, hugetlb=True) for _ in range(4)]
    with refused(mem, MMError, errno=errno.EIO, match="the pool of 2M pages is empty: release some"):
        huge.write(HUGE, b"x")
    for folio in taken:
        mmc.folio_put(folio)
    huge.write(HUGE, b"x")
    assert huge.read(HUGE, 2) == b"x\0" and huge.nr_cached == 512
    small = File(mem, PAGE)
    with mem.inject("frame"), refused(mem, MMError, errno=errno.ENOMEM, match="no free page for offset"):
        small.write(0, b"x")
    assert small.nr_cached == 0


def test_registers_are_written_without_a_mapping(mem):
    file = File(mem, 2 * PAGE, "iomem")
    file.write(PAGE - 2, b"1234")
    assert file.read(PAGE - 2, 4) == b"1234" and file.page_at(0) is None
    file.unplug()


def test_the_end_inside_a_folio_that_is_held(mm):
    """
        THP   |0|1|2|3|...|511|    page 7 pinned, truncated to 4 pages: nothing is split, what is beyond reads as zero
    """
    file = File(mm.mem, HUGE)
    a = shared(mm, file, HUGE)
    mm.madvise(a, HUGE, mmc.MADV_HUGEPAGE)
    mm.write(a + 3 * PAGE, b"kept")
    mm.write(a + 7 * PAGE, b"gone")
    pages = pin(mm, a + 7 * PAGE)
    folio = pages[0].folio
    assert folio.order == 9
    file.truncate(4 * PAGE)
    assert folio.order == 9 and file.size == 4 * PAGE and seen_by_device(pages, 0, 4) == bytes(4)
    assert file.read(3 * PAGE, 9) == b"kept" + bytes(5)
    mmc.unpin_user_pages(pages)
    file.truncate(HUGE)
    assert file.read(7 * PAGE, 4) == bytes(4)
    mm.mem.check()


def test_no_second_thp_where_a_page_is(mm):
    file = File(mm.mem, 2 * HUGE - PAGE)
    a = shared(mm, file, 2 * HUGE - PAGE)
    file.write(5 * PAGE, b"small")
    mm.madvise(a, 2 * HUGE - PAGE, mmc.MADV_HUGEPAGE)
    mm.touch(a, PAGE)
    assert mm.page_at(a).folio.order == 0, "the cache has a page of that stretch"
    mm.touch(a + HUGE, PAGE)
    assert mm.page_at(a + HUGE).folio.order == 0, "the file ends inside"


def test_no_block_for_a_thp_of_a_file(mm):
    file = File(mm.mem, HUGE)
    a = shared(mm, file, HUGE)
    mm.madvise(a, HUGE, mmc.MADV_HUGEPAGE)
    mm.touch(a, PAGE)       # tables
    file.truncate(0)
    file.truncate(HUGE)
    with mm.mem.inject("frame"):
        mm.touch(a, PAGE)
    assert mm.page_at(a).folio.order == 0, "base pages do where no block is free"


@pytest.mark.parametrize("site, kind", [("alloc", "tmpfs"), ("alloc", "ext4"), ("frame", "pfnmap")])
def test_no_memory_for_a_file(mem, site, kind):
    failed = 0
    for nth in range(1, 20):
        with mem.inject(site, nth=nth):
            try:
                File(mem, 4 * PAGE, kind)
            except (MemoryError, MMError) as error:
                failed += 1
                assert isinstance(error, MemoryError) or error.errno == errno.ENOMEM
            else:
                break
    assert failed


# ---- huge pages of a file ------------------------------------------------------------------------------------------------
def test_a_private_write_copies_the_file_page_or_says_that_the_pool_is_empty(mm):
    file = File(mm.mem, HUGE, "hugetlbfs")
    file.write(0, b"F")
    a = private(mm, file, HUGE, )
    taken = [mmc.folio_alloc(mm.mem, 9, hugetlb=True) for _ in range(2)]     # one is promised to the mapping
    mm.write(a + 1, b"P")
    assert mm.read(a, 2) == b"FP" and file.read(0, 2) == b"F\0" and exclusive(mm.page_at(a))
    child = mm.fork()
    before = child.page_at(a)
    with pytest.raises(MMError, match="SIGBUS"):
        child.write(a, b"C")
    assert child.page_at(a) == before and child.read(a, 2) == b"FP"
    b = mm.mmap(HUGE, flags=mmc.MAP_PRIVATE | mmc.MAP_NORESERVE, file=file)
    with pytest.raises(MMError, match="SIGBUS"):
        mm.write(b, b"P")
    assert mm.read(b, 1) == b"F"
    for folio in taken:
        mmc.folio_put(folio)
    child.write(a, b"C")
    assert child.read(a, 2) == b"CP" and mm.read(a, 2) == b"FP"
    child.exit()


def test_a_shared_huge_page_that_was_read_only_is_written_again(mm):
    file = File(mm.mem, HUGE, "hugetlbfs")
    a = shared(mm, file, HUGE)
    mm.write(a, b"1")
    mm.mprotect(a, HUGE, mmc.PROT_READ)
    with pytest.raises(MMError, match="SIGSEGV|not writable|protection"):
        mm.write(a, b"2")
    mm.mprotect(a, HUGE, mmc.PROT_READ | mmc.PROT_WRITE)
    mm.write(a, b"3")
    assert file.read(0, 1) == b"3" and mm.page_at(a).folio.dirty


@pytest.mark.parametrize("kind", ["tmpfs", "ext4", "fsdax", "hugetlbfs", "iomem"])
@pytest.mark.parametrize("offset", [(1 << 64) - 1, (1 << 64) - PAGE, 1 << 63, (1 << 62) + 1])
def test_writing_where_the_end_wraps(mem, kind, offset):
    file = File(mem, HUGE, kind, device=mem.devices[2] if kind == "fsdax" else None)
    with refused(mem, (InvalidArgument, MMError)):
        file.write(offset, bytes(PAGE + 2))
    assert file.size == HUGE and file.read(offset, 2) == b""
