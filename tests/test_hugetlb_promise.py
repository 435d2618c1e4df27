"""What a pool of huge pages promised to private mappings, when truncation takes their pages."""
import pytest

import mmcore as mmc
from mm_support import HUGE
from mmcore import File, MM, Memory
from support import run


@pytest.mark.parametrize("pinned", [False, True])
@pytest.mark.parametrize("size", [0, HUGE])
def test_truncation_takes_private_huge_pages_and_their_promise_stays_true(pinned, size):
    """The page of its own used the promise up; without it the pool promises again, or, while it is pinned or taken, no more."""
    mem = Memory("16M", hugetlb={"2M": 4})
    mm, file = MM(mem), File(mem, 2 * HUGE, "hugetlbfs")
    addr = mm.mmap(2 * HUGE, flags=mmc.MAP_PRIVATE, file=file)
    mm.write(addr + HUGE, b"own")           # a page in the cache, and a copy
    assert mem.hugetlb_pools()[HUGE] == (4, 2)
    pages = mmc.pin_user_pages(mm, addr + HUGE, 1, mmc.FOLL_WRITE | mmc.FOLL_LONGTERM) if pinned else None
    others = [mmc.folio_alloc(mem, 9, hugetlb=True)]         # one is left, and is promised to the first page
    file.truncate(size)
    mem.check()
    if pinned:
        mmc.unpin_user_pages(pages)
    mem.check()
    file.truncate(2 * HUGE)
    mm.write(addr + HUGE, b"again")
    mm.munmap(addr, 2 * HUGE)
    mem.check()
    mmc.folios_put(others)
    # Nothing stays promised: another mapping may have all that is free.
    file.truncate(0)
    there = mm.mmap(4 * HUGE, flags=mmc.MAP_PRIVATE | mmc.MAP_ANONYMOUS | mmc.MAP_HUGETLB)
    mm.touch(there, 4 * HUGE)


def test_truncation_and_unmapping_count_a_promise_once():
    """The two come from both sides: one by the file, the other by the address space."""
    for _ in range(60):
        with Memory("16M", hugetlb={"2M": 2}) as mem, MM(mem) as mm:
            file = File(mem, HUGE, "hugetlbfs")
            addr = mm.mmap(HUGE, flags=mmc.MAP_PRIVATE, file=file)
            mm.write(addr, b"own")
            run(lambda: file.truncate(0), lambda: mm.munmap(addr, HUGE))
            mem.check()
            assert mem.hugetlb_pools()[HUGE] == (2, 2)
            mm.mmap(2 * HUGE, flags=mmc.MAP_PRIVATE | mmc.MAP_ANONYMOUS | mmc.MAP_HUGETLB)


def test_a_move_to_before_its_own_mapping_leaves_the_promise_for_what_stays():
    """    |      | 0 | 1 | 2 |        what stays in front of the part that goes ends where that comes to lie
         | 1 | 0 |   | 2 |    """
    mem = Memory("16M", hugetlb={"2M": 4})
    with MM(mem) as mm:
        addr = mm.mmap(3 * HUGE, flags=mmc.MAP_PRIVATE | mmc.MAP_ANONYMOUS | mmc.MAP_HUGETLB)
        mm.write(addr + HUGE, b"moved")
        assert mm.mremap(addr + HUGE, HUGE, HUGE, addr - HUGE) == addr - HUGE
        mem.check()
        assert all(v.flags & mmc.VM.HUGE_RESV for v in mm.vmas) and mm.read(addr - HUGE, 5) == b"moved"
        mm.munmap(addr - HUGE, 4 * HUGE)
        # Nothing stays promised: another mapping may have the whole pool.
        mm.mmap(4 * HUGE, flags=mmc.MAP_PRIVATE | mmc.MAP_ANONYMOUS | mmc.MAP_HUGETLB)
        mem.check()
