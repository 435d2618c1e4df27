"""Large leaves over the pages of devices."""
import errno

import pytest

import mmcore as mmc
from mm_support import HUGE, PAGE, private, shared
from mmcore import DevicePages, File, MM, MMError, Memory
from support import refused

GIB = 512 * HUGE


@pytest.fixture
def giant():
    """(Memory, MM, a fsdax file that one PUD leaf maps, an address that fits it)."""
    with Memory("16M", devices=[DevicePages("1G", type="fsdax", align="1G")]) as mem, MM(mem) as mm:
        yield mem, mm, File(mem, GIB, "fsdax", device=0), 8 * GIB
        mem.check()


def test_a_private_write_under_a_pud_leaf_is_a_copy(giant):
    mem, mm, file, at = giant
    file.write(0, b"file")
    private(mm, file, GIB, addr=at)
    assert mm.read(at, 4) == b"file" and mm.rss == GIB // PAGE
    mm.write(at, b"mine")
    assert file.read(0, 4) == b"file" and mm.read(at, 4) == b"mine" and mm.rss == 1
    for i, call in enumerate((mmc.pin_user_pages, mmc.pin_user_pages_fast)):
        taken = call(mm, at + (i + 1) * PAGE, 1, mmc.FOLL_WRITE)
        assert mmc.PageFlags.anon_exclusive in taken[0].flags and taken[0].pfn < mem.devices[0].start_pfn
        mmc.unpin_user_pages(taken)


@pytest.mark.parametrize("start, end", [(HUGE, 2 * HUGE), (PAGE, GIB), (0, HUGE + PAGE)])
def test_protection_of_a_part_of_a_pud_leaf_is_that_of_the_part(giant, start, end):
    mem, mm, file, at = giant
    shared(mm, file, GIB, addr=at)
    mm.write(at, b"x")
    mm.mprotect(at + start, end - start, mmc.PROT_READ)
    rest = at if start else at + end
    mm.write(rest, b"y")
    for call in mmc.pin_user_pages, mmc.pin_user_pages_fast:
        with refused(mem, MMError, errno=errno.EFAULT):
            call(mm, at + start, 1, mmc.FOLL_WRITE)
    assert not mmc.get_user_pages_fast_only(mm, at + start, 1, mmc.FOLL_WRITE).pfns.size
    mmc.unpin_user_pages(mmc.pin_user_pages_fast(mm, rest, 1, mmc.FOLL_WRITE))


@pytest.mark.parametrize("to", [32 * GIB + PAGE, 32 * GIB + HUGE, 32 * GIB])
@pytest.mark.parametrize("first, length", [(HUGE, HUGE), (0, GIB)])
def test_mremap_of_a_pud_leaf(giant, first, length, to):
    mem, mm, file, at = giant
    file.write(first, b"moved")
    shared(mm, file, GIB, addr=at)
    mm.read(at, 1)
    assert mm.mremap(at + first, length, length, to) == to
    assert mm.read(to, 5) == b"moved"
    mm.write(to, b"M")
    assert file.read(first, 5) == b"Moved"


@pytest.mark.parametrize("advice", [mmc.MADV_PAGEOUT, mmc.MADV_DONTNEED])
def test_advice_on_a_part_of_a_leaf_over_base_pages_of_a_device(advice):
    #   leaf 0..511 of pages that count no mappings      advice on 1..2      ->      the leaf goes, the next access maps it
    with Memory("64M", devices=[DevicePages("8M", align="2M", compound=False)]) as mem:
        mm = MM(mem)
        addr = mm.mmap(8 << 20, flags=mmc.MAP_SHARED, file=File(mem, "8M", kind="devdax", device=mem.devices[0]))
        mm.touch(addr, 8 << 20)
        mm.write(addr, b"kept")
        mm.madvise(addr + 4096, 8192, advice)
        mem.check()
        assert mm.read(addr, 4) == b"kept"
        mm.exit()
        mem.check()
