"""Anonymous memory: mapping, touching, reading and writing, unmapping, and what pagemap says."""
import errno

import numpy as np
import pytest

import mmcore as mmc
from mmcore import InvalidArgument, MM, MMError, Memory
from support import refused

PAGE = 4096
HUGE = 2 << 20
PRESENT, SWAP, FILE, EXCLUSIVE, SOFT = 1 << 63, 1 << 62, 1 << 61, 1 << 56, 1 << 55
PFN = (1 << 55) - 1


def word(mm, addr):
    return int(mm.pagemap(addr, 1)[0])


@pytest.fixture
def mem():
    with Memory("64M") as mem:
        free = mem.vmstat()["nr_free_pages"]
        yield mem
        mem.check()
        assert mem.vmstat()["nr_free_pages"] == free, "frames leaked"


@pytest.fixture
def mm(mem):
    with MM(mem) as mm:
        yield mm


def test_write_and_read_back(mm):
    a = mm.mmap(4 * PAGE)
    assert mm.read(a, 4 * PAGE) == bytes(4 * PAGE)
    mm.write(a + PAGE - 3, b"across")
    assert mm.read(a + PAGE - 4, 8) == b"\0across\0"
    mm.mem.check()


def test_reads_map_the_zero_page_and_writes_a_page(mm):
    """
        read   |zero |zero |          no frame taken, refcount of the zero page stays
        write  |zero | new |
    """
    a = mm.mmap(2 * PAGE)
    zero = mm.mem.zero_page
    before = zero.refcount
    assert mm.touch(a, 2 * PAGE, write=False) == 2
    assert mm.page_at(a) == zero and mm.page_at(a + PAGE) == zero and zero.refcount == before
    assert mm.rss == 0
    assert mm.touch(a + PAGE, PAGE) == 1
    page = mm.page_at(a + PAGE)
    assert page != zero and (page.refcount, page.mapcount) == (1, 1) and mm.rss == 1
    assert mmc.PageFlags.anon_exclusive in page.flags       # anonymous and exclusive


def test_touch_counts_faults_once(mm):
    a = mm.mmap("1M")
    assert mm.touch(a, "1M") == 256 and mm.total_faults == 256
    assert mm.touch(a, "1M") == 0 and mm.total_faults == 256
    assert mm.rss == 256 and mm.rss_stat == {"anon": 256, "file": 0, "shmem": 0, "swap": 0}


def test_pagemap_words(mm):
    a = mm.mmap(3 * PAGE)
    mm.touch(a, PAGE)
    mm.touch(a + PAGE, PAGE, write=False)
    written, zero, none = (int(w) for w in mm.pagemap(a, 3))
    assert written == PRESENT | EXCLUSIVE | SOFT | mm.page_at(a).pfn
    # A new VMA reads as soft-dirty all over, whatever is there.
    assert zero == PRESENT | SOFT | mm.mem.zero_page.pfn
    assert none == SOFT
    assert not np.any(mm.pagemap(a + (1 << 30), 2))


@pytest.mark.parametrize("start, nr", [(0, 1), (1, 1), (7, 1), (0, 8), (2, 3), (3, 5)])
def test_munmap_splits_and_mmap_merges(mm, start, nr):
    """
        |0 1 2 3 4 5 6 7|   munmap [start, start + nr)   MAP_FIXED fills the hole: one VMA again
    """
    a = mm.mmap(8 * PAGE)
    mm.write(a, bytes(range(8)) * PAGE)
    mm.munmap(a + start * PAGE, nr * PAGE)
    assert len(mm.vmas) == (start > 0) + (start + nr < 8)
    assert mm.rss == 8 - nr
    mm.mem.check()
    for i in range(8):
        if start <= i < start + nr:
            with pytest.raises(MMError) as caught:
                mm.read(a + i * PAGE, 1)
            assert caught.value.errno == errno.EFAULT and caught.value.addr == a + i * PAGE
        else:
            assert mm.read(a + i * PAGE, 8) == bytes(range(8))
    assert mm.mmap(nr * PAGE, flags=mmc.MAP_PRIVATE | mmc.MAP_ANONYMOUS | mmc.MAP_FIXED, addr=a + start * PAGE) == a + start * PAGE
    assert [(v.start, v.end) for v in mm.vmas] == [(a, a + 8 * PAGE)]
    assert mm.read(a + start * PAGE, PAGE) == bytes(PAGE)


def test_tables_go_with_what_they_map(mm):
    assert mm.nr_tables == 1
    a = mm.mmap(HUGE)
    mm.touch(a, PAGE)
    assert mm.nr_tables == 4
    mm.munmap(a, HUGE)
    assert mm.nr_tables == 1


def test_exit_gives_everything_back(mem):
    mm = MM(mem)
    mm.touch(mm.mmap("8M"), "8M")
    mm.exit()
    with pytest.raises(MMError) as caught:
        mm.mmap(PAGE)
    assert caught.value.errno == errno.ESRCH


def test_out_of_memory_leaks_nothing(mm):
    a = mm.mmap("128M")
    with pytest.raises(MMError, match="no frame") as caught:
        mm.touch(a, "128M")
    assert caught.value.errno == errno.ENOMEM and caught.value.addr >= a
    mm.mem.check()
    mm.munmap(a, "128M")


@pytest.mark.parametrize("site, nth", [("frame", 1), ("frame", 5), ("table", 1), ("table", 3)])
def test_injected_failures_of_faults(mm, site, nth):
    a = mm.mmap(8 * PAGE)
    with mm.mem.inject(site, nth), pytest.raises(MMError) as caught:
        mm.touch(a, 8 * PAGE)
    assert caught.value.errno == errno.ENOMEM
    mm.mem.check()
    # Three tables are frames too: of five frames, the last one to be had was the first page's.
    assert mm.touch(a, 8 * PAGE) == (7 if (site, nth) == ("frame", 5) else 8)


# ---- what is refused ------------------------------------------------------------------------------------------------
TASK = (1 << 47) - PAGE
ANON = mmc.MAP_PRIVATE | mmc.MAP_ANONYMOUS


@pytest.mark.parametrize("args, number", [
    (dict(length=0), errno.EINVAL),
    (dict(length=1 << 48), errno.ENOMEM),
    (dict(length=PAGE, flags=mmc.MAP_ANONYMOUS), errno.EINVAL),
    (dict(length=PAGE, prot=64), errno.EINVAL),
    (dict(length=PAGE, flags=mmc.MAP_PRIVATE), errno.EBADF),
    (dict(length=PAGE, offset=5), errno.EINVAL),
    (dict(length=PAGE, offset=(1 << 64) - PAGE), errno.EOVERFLOW),
    (dict(length=PAGE, flags=ANON | mmc.MAP_FIXED), errno.EINVAL),
    (dict(length=PAGE, flags=ANON | mmc.MAP_FIXED, addr=PAGE * 20 + 1), errno.EINVAL),
    (dict(length=2 * PAGE, flags=ANON | mmc.MAP_FIXED, addr=TASK - PAGE), errno.ENOMEM),
    (dict(length=PAGE, flags=ANON | mmc.MAP_FIXED, addr=(1 << 64) - PAGE), errno.ENOMEM),
    (dict(length=PAGE, flags=ANON | mmc.MAP_FIXED, addr=PAGE), errno.EPERM),
    (dict(length=PAGE, flags=ANON | mmc.MAP_HUGETLB), errno.EINVAL),
])
def test_mmap_refuses(mm, args, number):
    with refused(mm.mem, MMError, errno=number):
        mm.mmap(**args)
    assert mm.vmas == []


def test_fixed_noreplace(mm):
    a = mm.mmap(4 * PAGE)
    with refused(mm.mem, MMError, errno=errno.EEXIST) as caught:
        mm.mmap(2 * PAGE, flags=ANON | mmc.MAP_FIXED_NOREPLACE, addr=a + 3 * PAGE)
    assert caught.value.addr == a + 3 * PAGE
    assert mm.mmap(2 * PAGE, flags=ANON | mmc.MAP_FIXED_NOREPLACE, addr=a + 4 * PAGE) == a + 4 * PAGE
    assert len(mm.vmas) == 1


@pytest.mark.parametrize("addr, length", [(1, PAGE), (PAGE, 0), (TASK, PAGE), ((1 << 64) - PAGE, 2 * PAGE), (0, 1 << 64)])
def test_munmap_refuses(mm, addr, length):
    with refused(mm.mem, InvalidArgument):
        mm.munmap(addr, length)


@pytest.mark.parametrize("call", ["read", "write", "touch", "touch_read"])
def test_accesses_that_fault(mm, call):
    """
        |rw  |r   |hole|
    """
    a = mm.mmap(2 * PAGE)
    mm.mprotect(a + PAGE, PAGE, mmc.PROT_READ)
    do = {"read": lambda at, n: mm.read(at, n), "write": lambda at, n: mm.write(at, b"x" * n),
          "touch": lambda at, n: mm.touch(at, n), "touch_read": lambda at, n: mm.touch(at, n, write=False)}[call]
    bad = a + PAGE if call in ("write", "touch") else a + 2 * PAGE
    with refused(mm.mem, MMError, match="SIGSEGV", errno=errno.EFAULT) as caught:
        do(a, 3 * PAGE)
    assert caught.value.addr == bad
    with refused(mm.mem, MMError, errno=errno.EFAULT):
        do((1 << 64) - PAGE, 3 * PAGE)


def test_mprotect(mm):
    """
        |rw          |       |rw |r  |rw |       |rw          |
    """
    a = mm.mmap(3 * PAGE)
    mm.write(a, b"abc" * PAGE)
    mm.mprotect(a + PAGE, PAGE, mmc.PROT_READ)
    assert [v.end - v.start for v in mm.vmas] == [PAGE] * 3
    page = mm.page_at(a + PAGE)
    mm.mem.check()
    mm.mprotect(a + PAGE, PAGE, mmc.PROT_NONE)
    with pytest.raises(MMError):
        mm.read(a + PAGE, 1)
    assert word(mm, a + PAGE) & PRESENT       # PROT_NONE is not "not present"
    mm.mem.check()
    mm.mprotect(a + PAGE, PAGE, mmc.PROT_READ | mmc.PROT_WRITE)
    assert len(mm.vmas) == 1
    faults = mm.total_faults
    mm.write(a + PAGE, b"xyz")
    assert mm.total_faults == faults, "exclusive and dirty: writable at once, no fault"
    assert mm.page_at(a + PAGE) == page and mm.read(a + PAGE, 3) == b"xyz"


def test_mprotect_refuses(mm):
    a = mm.mmap(2 * PAGE)
    mm.munmap(a + PAGE, PAGE)
    for args, number in [((a + 1, PAGE, 0), errno.EINVAL), ((a, 2 * PAGE, 0), errno.ENOMEM), ((a, 1 << 62, 0), errno.ENOMEM),
                         (((1 << 64) - PAGE, 2 * PAGE, 0), errno.ENOMEM), ((a, PAGE, 8), errno.EINVAL)]:
        with refused(mm.mem, MMError, errno=number):
            mm.mprotect(*args)
    assert mm.vmas[0].flags & mmc.VM.WRITE
    mm.mprotect(a, 0, 0)        # nothing to do is no error


GOOD = {"mmap": (PAGE,), "munmap": (1 << 20, PAGE), "mprotect": (1 << 20, PAGE, 1), "madvise": (1 << 20, PAGE, 4),
        "mremap": (1 << 20, PAGE, PAGE), "read": (1 << 20, 1), "write": (1 << 20, b"x"), "touch": (1 << 20, PAGE),
        "find_vma": (1 << 20,), "pagemap": (1 << 20, 1), "page_at": (1 << 20,), "clear_refs": (4,)}
NUMBERS = [(name, i) for name, args in GOOD.items() for i in range(len(args)) if (name, i) != ("write", 1)]


@pytest.mark.parametrize("name, index", NUMBERS)
@pytest.mark.parametrize("value", [-1, 1 << 64, 1 << 100, None, 1.5, [], object(), True], ids=repr)
def test_arguments_that_are_no_numbers_or_do_not_fit(mm, name, index, value):
    args = list(GOOD[name])
    args[index] = value
    with refused(mm.mem, (MMError, TypeError)):
        getattr(mm, name)(*args)
    assert mm.vmas == []


@pytest.mark.parametrize("make", [lambda mem: MM(None), lambda mem: MM(mem, user=5), lambda mem: MM(mem, rlimit_memlock=-1),
                                  lambda mem: MM(mem, rlimit_memlock="much"), lambda mem: mmc.File(None, PAGE),
                                  lambda mem: mmc.File(mem, -1), lambda mem: mmc.File(mem, "x"), lambda mem: mmc.PinLedger(5)])
def test_objects_that_cannot_be(mem, make):
    with refused(mem, (TypeError, ValueError)):
        make(mem)


def test_a_file_must_be_one(mm):
    with Memory("4M") as other:
        for file, error in ((5, TypeError), (mmc.File(other, PAGE), InvalidArgument)):
            with refused(mm.mem, error):
                mm.mmap(PAGE, flags=mmc.MAP_SHARED, file=file)


def test_a_closed_memory_ends_its_spaces():
    mem = Memory("4M")
    mm, file = MM(mem), mmc.File(mem, PAGE)
    mm.touch(mm.mmap(PAGE), PAGE)
    mem.close()
    for call in (lambda: mm.mmap(PAGE), lambda: mm.rss, mm.fork, mm.exit, lambda: file.read(0, 1), lambda: file.size):
        with pytest.raises(InvalidArgument, match="closed"):
            call()
    assert "closed" in repr(mm) and "closed" in repr(file)
    del mm, file


# ---- arguments that do not fit ---------------------------------------------------------------------------------------
def test_a_space_is_set_up_once_and_says_what_it_is(mem):
    mm = MM(mem, rlimit_memlock="64K", user="alice")
    assert (mm.rlimit_memlock, mm.cap_ipc_lock, mm.user) == (64 << 10, False, "alice") and mm.name in repr(mm)
    child = mm.fork()
    assert child.name.startswith(f"{mm.name}.") and child.user == "alice"
    child.exit()
    with refused(mem, InvalidArgument, match="set up already"):
        mm.__init__(mem)
    with refused(mem, InvalidArgument, match="never set up"):
        MM.__new__(MM).rss
    with refused(mem, InvalidArgument, match="MMF_HAS_PINNED is never cleared"):
        mm.has_pinned = False
    with refused(mem, InvalidArgument, match="pagemap.. from 0x1, which is no multiple"):
        mm.pagemap(1, 1)
    mm.exit()
    assert repr(mm) == f"<MM {mm.name}, exited>"


def test_empty_reads_and_writes_touch_nothing(mm):
    a = mm.mmap(PAGE)
    assert mm.read(a, 0) == b"" and mm.write(a, b"") in (None, 0) and mm.rss == 0 and mm.total_faults == 0


def test_mappings_that_cannot_be():
    devices = [mmc.DevicePages("4M", align="2M")]
    with Memory("64M", hugetlb={"2M": 2, "4M": 1}, devices=devices) as mem, MM(mem) as mm:
        tmpfs, dax, raw = mmc.File(mem, PAGE), mmc.File(mem, "4M", "devdax", device=0), mmc.File(mem, PAGE, "pfnmap")
        huge = mmc.File(mem, 2 * HUGE, "hugetlbfs")
        shared, size = mmc.MAP_SHARED, {"4M": 22 << 26}
        for match, args in (
                ("MAP_ANONYMOUS and a file exclude", dict(length=PAGE, flags=shared | mmc.MAP_ANONYMOUS, file=tmpfs)),
                ("no multiple of the device's alignment", dict(length=HUGE + PAGE, flags=shared, file=dax)),
                ("offset 0x1000 is no multiple of the device's", dict(length=HUGE, flags=shared, file=dax, offset=PAGE)),
                ("more than the devdax file has", dict(length=3 * HUGE, flags=shared, file=dax)),
                ("more than the pfnmap file has", dict(length=2 * PAGE, flags=shared, file=raw)),
                ("offset 0x1000 is no multiple of the huge page", dict(length=HUGE, flags=shared, file=huge, offset=PAGE)),
                ("no leaf of their own", dict(length=4 << 20, flags=mmc.MAP_PRIVATE | mmc.MAP_ANONYMOUS | mmc.MAP_HUGETLB | size["4M"]))):
            with refused(mem, InvalidArgument, match=match):
                mm.mmap(**args)
        with refused(mem, InvalidArgument, match="no leaf of their own"):
            mmc.File(mem, "4M", "hugetlbfs", page_size="4M")
        assert mm.vmas == [] and mm.locked_vm == 0


def test_no_place_is_left(mem):
    """One mapping over nearly all of the address space: what is larger than the rest finds no room."""
    with MM(mem) as mm:
        a = mm.mmap(1 << 46, prot=0)
        with refused(mem, MMError, errno=errno.ENOMEM):
            mm.mmap((1 << 46) + HUGE, prot=0)
        assert [vma.start for vma in mm.vmas] == [a]


# ---- moving ------------------------------------------------------------------------------------------------------------
def test_what_is_locked_stays_locked_and_what_is_swapped_stays_swapped(mem, mm):
    locked = mm.mmap(2 * PAGE, flags=mmc.MAP_PRIVATE | mmc.MAP_ANONYMOUS | mmc.MAP_LOCKED)
    to = mm.mmap(8 * PAGE, prot=0)
    assert mm.locked_vm == 2
    assert mm.mremap(locked, 2 * PAGE, 3 * PAGE, to) == to and mm.locked_vm == 3
    a = mm.mmap(2 * PAGE)
    mm.write(a, b"swapped")
    mm.madvise(a, PAGE, mmc.MADV_PAGEOUT)
    mm.clear_refs(4)
    assert word(mm, a) & (SWAP | SOFT) == SWAP
    b = mm.mremap(a, 2 * PAGE, 2 * PAGE, to + 4 * PAGE)
    assert b == to + 4 * PAGE and word(mm, b) & (SWAP | SOFT) == SWAP | SOFT, "a move is a change"
    assert mm.read(b, 7) == b"swapped" and mm.find_vma(a) is None
    mm.munmap(to, 3 * PAGE)
    assert mm.locked_vm == 0


@pytest.mark.parametrize("how", ["in place", "moved", "away"])
@pytest.mark.parametrize("prot", [mmc.PROT_READ | mmc.PROT_WRITE, mmc.PROT_READ, 0])
def test_what_a_locked_mapping_grows_by_is_there(mem, mm, prot, how):
    locked = mm.mmap(4 * PAGE, prot=prot, flags=mmc.MAP_PRIVATE | mmc.MAP_ANONYMOUS | mmc.MAP_LOCKED)
    if how != "moved":
        mm.munmap(locked + 2 * PAGE, 2 * PAGE)
    old = 4 if how == "moved" else 2
    to = mm.mremap(locked, old * PAGE, (old + 2) * PAGE, locked - 64 * HUGE if how == "away" else None)
    assert (to == locked) == (how == "in place") or how == "moved"
    assert all((word(mm, to + i * PAGE) & PRESENT != 0) == (prot != 0) for i in range(old + 2))
    assert mm.locked_vm == old + 2
    mm.munmap(to, (old + 2) * PAGE)


@pytest.mark.parametrize("moved", [False, True])
@pytest.mark.parametrize("pages", [10, 8, 5])
def test_what_shrinks_may_be_several_mappings(mem, mm, pages, moved):
    """Seen on 6.18: |rw 4|r- 4|  2|rw 4|. What goes is unmapped, whatever is there; only what moves must be one mapping."""
    a = mm.mmap(14 * PAGE)
    mm.write(a, b"stays")
    mm.mprotect(a + 4 * PAGE, 4 * PAGE, mmc.PROT_READ)
    mm.munmap(a + 8 * PAGE, 2 * PAGE)
    to = a - 64 * HUGE if moved else None
    if moved:
        with refused(mem, MMError, errno=errno.EFAULT):
            mm.mremap(a, 14 * PAGE, pages * PAGE, to)
        pages = 3
    b = mm.mremap(a, 14 * PAGE, pages * PAGE, to)
    assert b == (to or a) and mm.read(b, 5) == b"stays"
    assert sum(v.end - v.start for v in mm.vmas) == min(pages, 8) * PAGE
    assert mm.mremap(b, 14 * PAGE, 14 * PAGE) == b, "nothing to do"


def test_moves_that_cannot_be(mem, mm):
    a = mm.mmap(4 * PAGE)
    mm.munmap(a + 2 * PAGE, PAGE)
    for args, number in (((0x10000, PAGE, 2 * PAGE), errno.EFAULT), ((a, 4 * PAGE, 8 * PAGE), errno.EFAULT),
                         ((a, 2 * PAGE, 2 * PAGE, a + PAGE), errno.EINVAL),
                         ((a, 4 * PAGE, 4 * PAGE, a + 3 * PAGE), errno.EINVAL), ((a + 2 * PAGE, PAGE, PAGE, a + 2 * PAGE), errno.EINVAL)):
        with refused(mem, (MMError, InvalidArgument), errno=number):
            mm.mremap(*args)
    assert [(vma.start, vma.end) for vma in mm.vmas] == [(a, a + 2 * PAGE), (a + 3 * PAGE, a + 4 * PAGE)]


@pytest.mark.parametrize("order", [4, 9])
@pytest.mark.parametrize("file", [False, True])
@pytest.mark.parametrize("new_order", [0, 2])
def test_split_of_a_mapped_folio_that_the_caller_does_not_hold(order, file, new_order):
    """The mappings' references are all there is: taking them away to split would free the folio under its owner."""
    with Memory("64M", mthp=(4,), shmem_thp="always", thp="always") as mem, MM(mem) as mm:
        size = PAGE << order
        addr = mm.mmap(size, flags=mmc.MAP_SHARED, file=mmc.File(mem, HUGE)) if file else mm.mmap(size)
        mm.write(addr, b"x" * size)
        folio = mm.page_at(addr).folio
        assert folio.order == (9 if file else order)
        with refused(mem, MMError, "the caller holds none of its own"):
            mmc.folio_split(folio, new_order)
        assert mm.rss == size // PAGE and mm.read(addr, size) == b"x" * size
        mmc.folio_get(folio)
        for piece in mmc.folio_split(folio, new_order):
            mmc.folio_put(piece)
        assert mm.read(addr, size) == b"x" * size and mm.page_at(addr).folio.order == new_order


def test_secretmem_is_locked_memory_and_counts_against_the_limit(mem):
    """The kernel checks it as MAP_LOCKED; also what else is locked counts: here by a VFIO container."""
    mm, file = MM(mem, rlimit_memlock=4 * PAGE), mmc.File(mem, 8 * PAGE, "secretmem")
    addr, c = mm.mmap(2 * PAGE), mmc.VFIOContainer(mem)
    c.attach(mmc.IOMMUDomain(mem))
    c.map_dma(mm, addr, 0, 2 * PAGE)
    with refused(mem, MMError, "3 pages to lock .* with 2 locked", errno=errno.EAGAIN):
        mm.mmap(3 * PAGE, flags=mmc.MAP_SHARED, file=file)
    there = mm.mmap(2 * PAGE, flags=mmc.MAP_SHARED, file=file)
    assert mm.locked_vm == 4 and mm.find_vma(there).flags & mmc.VM.LOCKED
    mm.munmap(there, 2 * PAGE)
    c.close()
    assert mm.locked_vm == 0
    mm.exit()
    del file
