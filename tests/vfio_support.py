"""What the tests of VFIO share: a machine, a container with domains, and what must be as before."""
import contextlib
import itertools

import numpy as np
import pytest

from mmcore import *
from support import state

PAGE, HUGE, TOP = 4096, 2 << 20, 1 << 64
READ, WRITE, VADDR = VFIO_DMA_MAP_FLAG_READ, VFIO_DMA_MAP_FLAG_WRITE, VFIO_DMA_MAP_FLAG_VADDR
RW = READ | WRITE
ALL, GET_DIRTY, UNMAP_VADDR = VFIO_DMA_UNMAP_FLAG_ALL, VFIO_DMA_UNMAP_FLAG_GET_DIRTY_BITMAP, VFIO_DMA_UNMAP_FLAG_VADDR
ACQUIRES = ("sink", "batch", "page")
RELEASES = ("range", "folio", "page")
#: Every acquiring generation with every releasing one, with runs remembered and not.
GENERATIONS = [dict(acquire=a, release=r, remember_runs=m) for a, r, m in itertools.product(ACQUIRES, RELEASES, (True, False))]


def machine(size="64M", **limits):
    """(Memory, MM): DEBUG_VM checks are on, so that pages unpinned before a flush are named."""
    mem = Memory(size, thp="madvise", debug=True, hugetlb={"2M": 4})
    return mem, MM(mem, **limits)


def container(mem, domains=1, iommu_type=VFIO_TYPE1v2_IOMMU, **options):
    """A container with so many fresh domains."""
    c = VFIOContainer(mem, iommu_type, **options)
    for _ in range(domains):
        c.attach(IOMMUDomain(mem))
    return c


def mapped(mm, size, thp=False, **kwargs):
    """A populated buffer's address."""
    addr = mm.mmap(size, **kwargs)
    if thp:
        mm.madvise(addr, size, MADV_HUGEPAGE)
    mm.touch(addr, size)
    return addr


def pins(mem):
    """Live pins by the counters."""
    stat = mem.vmstat()
    return stat["nr_foll_pin_acquired"] - stat["nr_foll_pin_released"]


def translations(c, iova, size):
    """PFNs that every domain translates a range to, None where it does not; all domains must agree."""
    rows = [[domain.iova_to_phys(at) for at in range(iova, iova + size, PAGE)] for domain in c.domains]
    assert all(row == rows[0] for row in rows)
    return [None if phys is None else phys // PAGE for phys in rows[0]]


def frames(mem, *ignore):
    """mem_map as bytes, without some flags."""
    pages = np.array(mem.pages)
    mask = sum(int(flag) for flag in ignore)
    pages["flags"] &= np.uint64(~mask & TOP - 1)
    return pages.tobytes()


def seen(c):
    """What a failed call must leave of a container."""
    info = c.info()
    return (c.mappings, info, c.vaddr_invalid_count, c.num_non_pinned_groups, c.dirty_page_tracking, c.domains,
            [(d.stats["leaves"], d.stats["bytes"], d.stats["tables"], d.stale) for d in c.domains],
            {m.mm: m.mm.locked_vm for m in c.mappings if _alive(m.mm)})


def _alive(mm):
    try:
        mm.vmas
    except MMError:
        return False
    return True


@contextlib.contextmanager
def same(c, *mms, exactly=True):
    """What happens inside leaves the container, the charges, and (exactly) every struct page as they were.

    exactly="touched": but for marks of an access, which a pin that is given back leaves. False: faults may have been
    taken and pages been moved; pins are as before all the same.
    """
    ignore = (PageFlags.dirty, PageFlags.referenced) if exactly == "touched" else ()

    def look():
        return seen(c), [mm.locked_vm for mm in mms], pins(c.mem), (frames(c.mem, *ignore), state(c.mem)[1:]) if exactly else None
    before = look()
    yield
    after = look()
    assert after[:3] == before[:3]
    assert after[3] == before[3], "mem_map changed"
    c.mem.check()


def refused(c, number, call, *mms, match=None, exactly=True):
    """A call is refused with an errno, and changes nothing."""
    with same(c, *mms, exactly=exactly), pytest.raises(MMError, match=match) as caught:
        call()
    assert caught.value.errno == number, caught.value
    return caught.value


def over(c, *mms):
    """The end: nothing is pinned or charged any more, and every law holds."""
    c.close()
    assert pins(c.mem) == 0
    assert all(mm.locked_vm == 0 for mm in mms)
    c.mem.check()


def injected(mem, site, nth, call):
    """Make a call in which the nth occurrence of something fails."""
    with mem.inject(site, nth):
        return call()
