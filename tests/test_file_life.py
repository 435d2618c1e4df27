"""How long a file lives, and what it takes while it does."""
import errno
import gc
import os

import pytest

import mmcore as mmc
from mm_support import PAGE
from mmcore import File, InvalidArgument, MM, MMError, Memory
from support import refused, run

SHARED = mmc.MAP_SHARED | mmc.MAP_ANONYMOUS


@pytest.fixture
def mem():
    mem = Memory("16M")
    free = mem.vmstat()["nr_free_pages"]
    yield mem
    gc.collect()
    mem.check()
    assert mem.vmstat()["nr_free_pages"] == free, "frames leaked"


def used(mem):
    return mem.zones[0].managed - mem.vmstat()["nr_free_pages"]


@pytest.mark.parametrize("how", ["munmap", "in halves", "MAP_FIXED", "mremap", "mremap onto"])
def test_shared_anonymous_memory_goes_with_its_last_mapping(mem, how):
    """Nothing names the file it stands on but its mappings."""
    with MM(mem) as mm:
        for _ in range(20):
            addr = mm.mmap("2M", flags=SHARED, addr=1 << 40)
            mm.touch(addr, "2M")
            if how == "munmap":
                mm.munmap(addr, "2M")
            elif how == "in halves":
                mm.munmap(addr, "1M")
                assert mm.read(addr + (1 << 20), 3) == bytes(3)
                mm.munmap(addr + (1 << 20), "1M")
            elif how == "MAP_FIXED":
                mm.mmap("2M", flags=mmc.MAP_PRIVATE | mmc.MAP_ANONYMOUS | mmc.MAP_FIXED, addr=addr)
            elif how == "mremap":
                mm.munmap(mm.mremap(addr, "2M", PAGE), PAGE)
            else:
                mm.mremap(mm.mmap(PAGE), PAGE, PAGE, new_addr=addr)
                mm.munmap(addr, "2M")
            assert used(mem) < 512
            mm.munmap(addr, "2M")


def test_what_another_process_maps_or_a_device_pins_stays(mem):
    with MM(mem) as mm:
        addr = mm.mmap("1M", flags=SHARED)
        mm.write(addr, b"here")
        pages = mmc.pin_user_pages(mm, addr, 4, mmc.FOLL_WRITE | mmc.FOLL_LONGTERM)
        child = mm.fork()
        mm.munmap(addr, "1M")
        assert child.read(addr, 4) == b"here" and child.find_vma(addr).file.nr_cached == 4
        child.munmap(addr, "1M")
        assert bytes(mmc.page_address(pages[0])[:4]) == b"here"
        mmc.unpin_user_pages(pages)
        child.exit()


def test_files_of_the_caller_stay_his(mem):
    file = File(mem, "64K")
    with MM(mem) as mm:
        for _ in range(3):
            addr = mm.mmap("64K", flags=mmc.MAP_SHARED, file=file)
            mm.write(addr, b"kept")
            mm.munmap(addr, "64K")
            assert file.read(0, 4) == b"kept"
    del file


def test_files_beside_threads_that_map_fork_and_unmap(mem):
    """A file is kept before it is mapped, and a fork takes along what is mapped until it has the lock."""
    with MM(mem) as mm:
        def work():
            for _ in range(150):
                addr = mm.mmap(4 * PAGE, flags=SHARED)
                mm.write(addr, b"mine")
                assert mm.read(addr, 4) == b"mine"
                mm.munmap(addr, 4 * PAGE)

        def forks():
            for _ in range(150):
                child = mm.fork()
                for vma in child.vmas:
                    assert vma.file is not None and child.read(vma.start, 1) is not None
                child.exit()
        run(work, work, forks)
        assert mm.vmas == []


@pytest.mark.parametrize("kind", ["tmpfs", "ext4"])
def test_growing_copies_what_is_there_and_nothing_else(mem, kind):
    """A file is sparse: growing it once copied all of its holes, and took as much memory as it is long."""
    file = File(mem, 0, kind)
    for size in (64 * PAGE, 400 << 20, 700 << 20):
        file.truncate(size)
        file.write(size - 2 * PAGE - 3, b"across")
        file.writeback()
        before = resident()
        file.truncate(size + PAGE)
        file.truncate(size * 2)
        assert resident() - before < 64 << 20
        assert file.read(size - 2 * PAGE - 3, 6) == b"across" and file.read(size, PAGE) == bytes(PAGE)
        for page in range(2):
            mmc.reclaim(file.page_at(size - 3 * PAGE + page * PAGE).folio)
        assert file.read(size - 2 * PAGE - 3, 6) == b"across"


def resident():
    """Bytes of this process that are in memory; 0 where nobody says."""
    try:
        with open("/proc/self/statm") as statm:
            return int(statm.read().split()[1]) * os.sysconf("SC_PAGESIZE")
    except OSError:
        return 0


@pytest.mark.parametrize("kind", ["tmpfs", "ext4"])
@pytest.mark.parametrize("nth", [1, 2])
def test_a_write_that_fails_leaves_the_file_as_long_as_it_was(mem, kind, nth):
    file = File(mem, 100, kind)
    file.write(0, b"a" * 100)
    with mem.inject("frame", nth), pytest.raises(MMError, match=f"offset {hex(nth * PAGE)} of the file") as caught:
        file.write(90, b"b" * 4 * PAGE)
    assert caught.value.errno == errno.ENOMEM
    assert file.size == 100 and file.nr_cached == 1
    file.truncate(5 * PAGE)
    assert file.read(100, 5 * PAGE) == bytes(5 * PAGE - 100)


def test_a_write_of_nothing_writes_nothing(mem):
    file = File(mem, 0)
    assert file.write(100, b"") == 0 and file.size == 0


@pytest.mark.parametrize("kind", ["secretmem", "pfnmap"])
@pytest.mark.parametrize("at", [0, PAGE, 1 << 40])
def test_what_cannot_be_read_or_written_says_so_wherever(kind, at):
    with Memory("16M") as mem:
        file = File(mem, PAGE, kind)
        for call in (lambda: file.read(at, 1), lambda: file.read(at, 0), lambda: file.write(at, b"x"), lambda: file.write(at, b"")):
            with refused(mem, InvalidArgument, match="cannot be read or written by"):
                call()
