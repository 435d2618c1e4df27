"""What the tests of registration share: a machine, a populated buffer, and what must be as before."""
import contextlib

import numpy as np

from mmcore import *
from support import state

PAGE, HUGE = 4096, 2 << 20
RO, RW = IB_ACCESS.REMOTE_READ, IB_ACCESS.LOCAL_WRITE | IB_ACCESS.REMOTE_WRITE | IB_ACCESS.REMOTE_READ
ACQUIRES = ("sink", "list")
RELEASES = ("range", "array", "page")


def machine(size="64M", *, iommu=False, thp="never", max_seg_size=2**32 - 1, mem=None, **limits):
    """(Memory, MM, IBDevice)."""
    mem = mem or Memory(size, thp=thp, hugetlb={"2M": 4})
    return mem, MM(mem, **limits), IBDevice(mem, iommu=iommu, max_seg_size=max_seg_size)


def mapped(mm, size, **kwargs):
    """A populated buffer's address."""
    addr = mm.mmap(size, **kwargs)
    mm.touch(addr, size)
    return addr


def scattered(mm, nr):
    """The address of nr pages whose PFNs do not follow each other, in runs of 1 to 3."""
    addr, other = mm.mmap(nr * PAGE), mm.mmap(nr * PAGE)
    for i in range(nr):
        mm.touch(addr + i * PAGE, PAGE)
        if i % 3 != 1:
            mm.touch(other + i * PAGE, PAGE)
    return addr


def pins(mem):
    """Live pins by the counters."""
    stat = mem.vmstat()
    return stat["nr_foll_pin_acquired"] - stat["nr_foll_pin_released"]


def pages_of(mm, addr, size):
    """PFNs behind a range."""
    start = addr // PAGE * PAGE
    return [mm.page_at(at).pfn for at in range(start, addr + size, PAGE)]


@contextlib.contextmanager
def nothing_kept(mem, mm, ignore=()):
    """Whatever happens inside, pins, charge and every struct page are as before; `ignore`: some of their fields."""
    def look():
        pages = np.array(mem.pages)
        for field in ignore:
            pages[field] = 0
        return pages.tobytes(), state(mem)[1:], mm.pinned_vm
    before = look()
    yield
    assert look() == before
    mem.check()
