"""hmm_range_fault: what each kind of entry looks like to a device, and what a request brings about."""
import errno

import numpy as np
import pytest

from gup_support import *
from support import refused, unchanged

V, W, E = HMM_PFN_VALID, HMM_PFN_WRITE, HMM_PFN_ERROR


@pytest.fixture
def mem():
    with machine() as mem:
        yield mem
        mem.check()


@pytest.fixture
def mm(mem):
    with MM(mem) as mm:
        yield mm


def word(page, order=0, flags=V | W):
    return page.pfn | flags | order << 53


def test_looking_faults_nothing(mem, mm):
    addr = mm.mmap(8 * PAGE)
    mm.touch(addr, 2 * PAGE)
    mm.touch(addr + 2 * PAGE, PAGE, write=False)
    mm.touch(addr + 3 * PAGE, PAGE)
    mm.mprotect(addr + 3 * PAGE, PAGE, PROT_READ)
    mm.touch(addr + 4 * PAGE, PAGE)
    mm.mprotect(addr + 4 * PAGE, PAGE, PROT_NONE)
    mm.munmap(addr + 6 * PAGE, PAGE)
    faults = mm.total_faults
    with unchanged(mem):
        words = hmm_range_fault(mm, addr, 8)
    assert mm.total_faults == faults
    assert words.dtype == np.uint64 and words.tolist() == [
        word(mm.page_at(addr)), word(mm.page_at(addr + PAGE)), word(mem.zero_page, 0, V), word(mm.page_at(addr + 3 * PAGE), 0, V),
        E, 0, E, 0]


def test_every_word_of_a_huge_mapping(mem, mm):
    addr = mm.mmap(2 * HUGE)
    mm.madvise(addr, 2 * HUGE, MADV_HUGEPAGE)
    mm.touch(addr, HUGE)
    head = mm.page_at(addr).pfn
    words = hmm_range_fault(mm, addr + 5 * PAGE, 20)
    assert words.tolist() == [head + 5 + i | V | W | 9 << 53 for i in range(20)]
    assert hmm_pfn_to_map_order(words[3]) == 9 and hmm_pfn_to_pfn(words[3]) == head + 8
    mm.touch(addr + HUGE, PAGE, write=False)
    assert hmm_range_fault(mm, addr + HUGE, 1)[0] == mem.huge_zero_folio.pfn | V | 9 << 53


def test_request_to_fault_and_to_write(mem, mm):
    addr = mm.mmap(4 * PAGE)
    words = hmm_range_fault(mm, addr, 2, HMM_PFN_REQ_FAULT)
    assert words.tolist() == [word(mem.zero_page, 0, V)] * 2
    words = hmm_range_fault(mm, addr, 2, HMM_PFN_REQ_FAULT | HMM_PFN_REQ_WRITE)
    assert words.tolist() == [word(mm.page_at(addr)), word(mm.page_at(addr + PAGE))] and not is_zero_page(mm.page_at(addr))
    # A request to write alone is none.
    assert hmm_range_fault(mm, addr + 2 * PAGE, 1, HMM_PFN_REQ_WRITE)[0] == 0


def test_words_ask_for_themselves_and_keep_what_is_sticky(mem, mm):
    addr = mm.mmap(3 * PAGE)
    sticky = HMM_PFN_DMA_MAPPED | HMM_PFN_P2PDMA
    asked = [HMM_PFN_REQ_FAULT | sticky, 0, HMM_PFN_REQ_FAULT | HMM_PFN_REQ_WRITE]
    words = hmm_range_fault(mm, addr, 3, hmm_pfns=asked, pfn_flags_mask=HMM_PFN_REQ_FAULT | HMM_PFN_REQ_WRITE)
    assert words.tolist() == [word(mem.zero_page, 0, V) | sticky, 0, word(mm.page_at(addr + 2 * PAGE))]
    assert hmm_range_fault(mm, addr + PAGE, 1, hmm_pfns=[HMM_PFN_REQ_FAULT])[0] == 0    # the mask lets nothing through
    assert asked[1] == 0


def test_copy_on_write_and_swap(mem, mm):
    addr = mm.mmap(2 * PAGE)
    mm.write(addr, b"parent")
    child = mm.fork()
    assert hmm_range_fault(mm, addr, 1)[0] == word(mm.page_at(addr), 0, V)
    before = child.page_at(addr)
    words = hmm_range_fault(mm, addr, 1, V | W)
    assert words[0] == word(mm.page_at(addr)) and child.page_at(addr) == before
    child.exit()
    mm.madvise(addr, PAGE, MADV_PAGEOUT)
    assert hmm_range_fault(mm, addr, 1)[0] == 0
    assert hmm_range_fault(mm, addr, 1, V)[0] & V and mm.read(addr, 6) == b"parent"


def test_hugetlb_and_devices(mem, mm):
    addr = mm.mmap(HUGE, flags=MAP_PRIVATE | MAP_ANONYMOUS | MAP_HUGETLB)
    assert hmm_range_fault(mm, addr, 1)[0] == 0
    words = hmm_range_fault(mm, addr + 7 * PAGE, 2, V | W)
    assert words.tolist() == [mm.page_at(addr).pfn + 7 + i | V | W | 9 << 53 for i in range(2)]
    dax = mm.mmap(HUGE, flags=MAP_SHARED, file=File(mem, HUGE, "devdax", device=0))
    assert hmm_range_fault(mm, dax, 1, V | W)[0] == mem.devices[0].start_pfn | V | W | 9 << 53
    for kind in ("pfnmap", "iomem"):
        io = mm.mmap(PAGE, flags=MAP_SHARED, file=File(mem, PAGE, kind))
        mm.touch(io, PAGE)
        assert hmm_range_fault(mm, io, 1)[0] == E
        with refused(mem, MMError, errno=errno.EFAULT):
            hmm_range_fault(mm, io, 1, V)


def test_errors(mem, mm):
    addr = mm.mmap(4 * PAGE, PROT_READ)
    with refused(mem, MMError, "not writable", errno.EPERM) as caught:
        hmm_range_fault(mm, addr, 1, V | W)
    assert caught.value.addr == addr
    with refused(mem, MMError, errno=errno.EFAULT):
        hmm_range_fault(mm, 0x1000, 1, V)
    none = mm.mmap(PAGE, PROT_NONE)
    with refused(mem, MMError, errno=errno.EFAULT):
        hmm_range_fault(mm, none, 1, V)
    writable = mm.mmap(2 * PAGE)
    mm.touch(writable, PAGE)
    with mem.inject("frame"), refused(mem, MMError, "no free page", errno.ENOMEM) as caught:
        hmm_range_fault(mm, writable, 2, V | W)
    assert caught.value.addr == writable + PAGE
    file = File(mem, 2 * PAGE)
    beyond = mm.mmap(2 * PAGE, flags=MAP_SHARED, file=file)
    mm.touch(beyond, 2 * PAGE)
    file.truncate(PAGE)
    with refused(mem, MMError, errno=errno.EFAULT):
        hmm_range_fault(mm, beyond, 2, V)
    for args in ((addr + 1, 1), (addr, -1), (addr, 1 << 60), (addr, 1, 1), (addr, 1, -1), (None, 1), ((1 << 64) - PAGE, 2)):
        with refused(mem, (InvalidArgument, TypeError)):
            hmm_range_fault(mm, *args)
    with refused(mem, InvalidArgument, "one word a page"):
        hmm_range_fault(mm, addr, 2, hmm_pfns=[0])
    assert len(hmm_range_fault(mm, addr, 0)) == 0


def test_no_references_are_taken(mem, mm):
    addr = mm.mmap(PAGE)
    mm.touch(addr, PAGE)
    hmm_range_fault(mm, addr, 1, V | W)
    assert mm.page_at(addr).refcount == 1
