"""Reports of the past about copy-on-write under get_user_pages, each as a test under the report's id."""
import errno

import pytest

import mmcore as mmc
from gup_support import *
from support import refused

SOFT_DIRTY = 1 << 55


def test_cow_foll_force_shared(mem, mm):
    """A forced write through a read-only private mapping of shared memory lands in a copy, never in the shared page."""
    #   file page S  <-- private, PROT_READ, may write      FORCE|WRITE  -->  copy Q; S as it was
    file = File(mem, PAGE, "tmpfs")
    file.write(0, b"shared")
    addr = mm.mmap(PAGE, PROT_READ, MAP_PRIVATE, file=file)
    assert mm.read(addr, 6) == b"shared"
    shared = mm.page_at(addr)
    pages = get_user_pages(mm, addr, 1, FOLL_WRITE | FOLL_FORCE)
    assert pages[0] != shared and mm.page_at(addr) == pages[0]
    mmc.page_address(pages[0])[:6] = b"forced"
    assert file.read(0, 6) == b"shared" and mm.read(addr, 6) == b"forced"
    mmc.release_pages(pages)
    # In a shared mapping there is no copy to be had.
    fixed = mm.mmap(PAGE, PROT_READ, MAP_SHARED, file=file)
    mm.read(fixed, 1)
    with refused(mem, MMError, errno=errno.EFAULT):
        get_user_pages(mm, fixed, 1, FOLL_WRITE | FOLL_FORCE)
    assert file.read(0, 6) == b"shared"


@pytest.mark.parametrize("longterm", [True, False])
def test_cow_ro_longterm_breaks_early(mem, mm, longterm):
    """A read-only long-term pin of a private mapping holds what a later write will go to; a short one need not."""
    #   (a) zero page   (b) page F of a file   (c) anonymous page shared with a child
    file = File(mem, PAGE, "tmpfs")
    file.write(0, b"F")
    zero = mm.mmap(PAGE)
    cached = mm.mmap(PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE, file=file)
    shared = mm.mmap(PAGE)
    mm.write(shared, b"S")
    child = mm.fork()
    addrs = (zero, cached, shared)
    for addr in addrs:
        mm.read(addr, 1)
    before = [mm.page_at(addr) for addr in addrs]
    assert before[0] == mem.zero_page and before[2] == child.page_at(shared)
    mm.clear_refs(4)
    pinned = [pin_user_pages(mm, addr, 1, FOLL_LONGTERM if longterm else 0)[0] for addr in addrs]
    unshared = [addr for addr, old, new in zip(addrs, before, pinned) if old != new]
    assert unshared == (list(addrs) if longterm else [shared])
    assert not any(int(mm.pagemap(addr, 1)[0]) & SOFT_DIRTY for addr in addrs)
    for addr, page in zip(addrs, pinned):
        mm.write(addr, b"w")
        assert (mm.page_at(addr) == page) == (addr in unshared)
    assert file.read(0, 1) == b"F" and child.read(shared, 1) == b"S"
    for page in pinned:
        mmc.unpin_user_page(page)
    child.exit()
