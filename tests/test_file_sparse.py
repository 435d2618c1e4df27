"""Files that are mostly holes: they cost what is in them, in time and in memory, not what they could hold."""
import errno
import random

import pytest

import mmcore as mmc
from mm_support import PAGE
from mmcore import File, MM, MMError, Memory
from support import not_under_asan, refused


def resident():
    """KiB of this process in memory, and of its page tables: reading what was never written costs the latter."""
    with open("/proc/self/status") as file:
        words = dict(line.split(":") for line in file)
    return sum(int(words[key].split()[0]) for key in ("VmRSS", "VmPTE"))


@pytest.fixture
def mem():
    with Memory("64M", hugetlb={"2M": 2}) as mem:
        yield mem


@pytest.mark.parametrize("kind, size", [("tmpfs", 1 << 46), ("ext4", 1 << 43), ("secretmem", 1 << 46), ("hugetlbfs", 1 << 50)])
@not_under_asan("the shadow of what is reserved is touched")
def test_a_hole_costs_nothing(mem, kind, size):
    """
        file    |a|  ...  |b|  ...  |c|      a few pages, far apart in a terabyte or more
    """
    before = resident()
    file, mm = File(mem, size, kind), MM(mem)
    step = file.page_size
    nr = 2 if kind == "hugetlbfs" else 8
    at = [mm.mmap(step, flags=mmc.MAP_SHARED, file=file, offset=size // 8 * i) for i in range(nr)]
    for i, addr in enumerate(at):
        mm.write(addr, b"%d" % i)
        assert mm.read(addr, 1) == b"%d" % i
    assert file.nr_cached == len(at) * step // PAGE
    assert file.writeback() == (len(at) if kind == "ext4" else 0)
    mem.check()
    if kind != "secretmem":
        file.truncate(step)
        assert file.nr_cached == step // PAGE and mm.read(at[0], 1) == b"0"
    if kind in ("tmpfs", "ext4"):       # larger: into a new cache, and a new disk
        file.write(size + size // 16, b"end")
        assert file.read(0, 1) == b"0" and file.read(size // 8, 1) == b"\0" and file.read(size + size // 16, 3) == b"end"
    mem.check()
    assert resident() - before < 32 << 10
    mm.exit()
    del file
    mem.check()


def test_promises_for_a_hole_are_counted_not_walked(mem):
    """
        file    |  ...  |x|y|  ...  |        a pool of two: x is promised, then x and y, then no more
    """
    file, huge, middle = File(mem, 1 << 46, "hugetlbfs"), 2 << 20, 1 << 45
    with MM(mem) as mm:
        def promise(offset, length):
            return mm.mmap(length, flags=mmc.MAP_SHARED, file=file, offset=offset)

        with refused(mem, MMError, errno=errno.ENOMEM):
            promise(0, 1 << 46)
        promise(middle, huge)
        with refused(mem, MMError, errno=errno.ENOMEM):
            promise(middle + huge, 2 * huge)
        promise(middle, 2 * huge)
        with refused(mem, MMError, errno=errno.ENOMEM):
            promise(middle + 2 * huge, huge)
        with refused(mem, MMError, errno=errno.ENOMEM):
            promise(middle - huge, huge)
        promise(middle + huge, huge)
        mem.check()
    mem.check()


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("kind", ["tmpfs", "ext4"])
def test_what_is_in_a_sparse_file(mem, kind, seed):
    """Pages written, truncated and written back at any distance, against a dictionary."""
    rng = random.Random(seed)
    top = 1 << 28       # pages: 2^19 stretches, four levels of the set
    file, pages, size = File(mem, 0, kind), {}, 0
    for step in range(300):
        what = rng.random()
        if what < 0.7:
            index = rng.randrange(1 << rng.randrange(1, 29))
            data = b"%d" % step
            file.write(index * PAGE, data)
            pages[index], size = data, max(size, index * PAGE + len(data))
        elif what < 0.8:
            size = rng.randrange(1 << rng.randrange(1, 29)) * PAGE
            file.truncate(size)
            pages = {index: data for index, data in pages.items() if index * PAGE < size}
        elif what < 0.9:
            file.writeback()
            assert mem.vmstat()["nr_dirty"] == (0 if kind == "ext4" else len(pages))
        else:
            index = rng.randrange(top)
            assert file.page_at(index * PAGE) is None or index in pages
        assert (file.size, file.nr_cached) == (size, len(pages))
    for index, data in pages.items():
        assert file.read(index * PAGE, len(data)) == data
    mem.check()
    file.truncate(0)
    assert file.nr_cached == 0 and mem.vmstat()["nr_dirty"] == 0
    mem.check()
