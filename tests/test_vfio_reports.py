"""Reported bugs of VFIO, iommufd and of accounting: each case by the id of its report."""
import ctypes
import errno

import numpy as np
import pytest

from mmcore import *
from support import poke
from vfio_support import *

EINVAL, ENOMEM, ENOSPC, EOVERFLOW, EFAULT = errno.EINVAL, errno.ENOMEM, errno.ENOSPC, errno.EOVERFLOW, errno.EFAULT
G1 = 1 << 30


def two_runs(mm, nr=8):
    """The address of 2 * nr pages in two physical runs."""
    addr, other = mm.mmap(2 * nr * PAGE), mm.mmap(PAGE)
    mm.touch(addr, nr * PAGE)
    mm.touch(other, PAGE)
    mm.touch(addr + nr * PAGE, nr * PAGE)
    pfns = [mm.page_at(addr + i * PAGE).pfn for i in range(2 * nr)]
    assert pfns == [*range(pfns[0], pfns[0] + nr), *range(pfns[nr], pfns[nr] + nr)] and pfns[nr] != pfns[0] + nr
    return addr


# ---- iommufd: what of it type1 has as well ---------------------------------------------------------------------------
def test_iommufd_align_overflow():
    # A hole below the top, and 1 GiB aligned to 1 GiB: aligning up wraps to 0 in 64 bits.
    mem, mm = machine()
    c = VFIOContainer(mem)
    c.attach(IOMMUDomain(mem, windows=[(0xffffffffff000000, 0xfffffffffffff000)]))
    refused(c, ENOSPC, lambda: c.find_iova("1G", align="1G"), mm)
    assert c.find_iova(PAGE) == 0xffffffffff000000
    refused(c, ENOSPC, lambda: c.find_iova(0xfff000 + PAGE), mm)
    c.map_dma(mm, mapped(mm, 2 * PAGE), 0xffffffffff000000, 2 * PAGE)
    assert c.find_iova(PAGE, align=0x10000) == 0xffffffffff010000 and c.find_iova(PAGE) == 0xffffffffff002000
    for wrong in (0, -1, 5, None):
        with pytest.raises((InvalidArgument, TypeError)):
            c.find_iova(wrong)
    over(c, mm)
    assert VFIOContainer(mem).find_iova("1G", align="1G") == 0


@pytest.mark.parametrize("options", GENERATIONS, ids=lambda o: "-".join(map(str, o.values())))
def test_iommufd_unpin_with_access(options):
    # Eight pages mapped; a driver holds 2..4 of them. The domain goes, then the driver.
    mem, mm = machine()
    c = container(mem, **options)
    c.register_device(lambda iova, size: None)
    addr = mapped(mm, 8 * PAGE)
    c.map_dma(mm, addr, 0, 8 * PAGE)
    c.pin_pages(2 * PAGE, 3, IOMMU_READ)
    c.detach(c.domains[0])
    assert [mm.page_at(addr + i * PAGE).refcount >> 10 for i in range(8)] == [0, 0, 1, 1, 1, 0, 0, 0] and mm.locked_vm == 3
    c.unpin_pages(2 * PAGE, 3)
    assert pins(mem) == mm.locked_vm == 0
    over(c, mm)


@pytest.mark.parametrize("domains", [0, 1])
def test_iommufd_uptr_overflow(domains):
    mem, mm = machine()
    c = container(mem, domains)
    refused(c, EOVERFLOW, lambda: c.map_dma(mm, 0xffffffffffff0000, 0, 0x20000), mm)
    refused(c, EINVAL, lambda: c.map_dma(mm, 0xffffffffffff0000, 0, 0), mm)
    over(c, mm)


# ---- type1 -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("options", GENERATIONS, ids=lambda o: "-".join(map(str, o.values())))
def test_vfio_contiguous_not_hugepage(options):
    mem, mm = machine()
    c = container(mem, **options)
    addr = mapped(mm, 2 * HUGE, thp=True)
    first, second = mem.folio(mm.page_at(addr).pfn), mem.folio(mm.page_at(addr + HUGE).pfn)
    assert second.pfn == first.pfn + 512
    c.map_dma(mm, addr, 0, 2 * HUGE)
    assert c.domains[0].map_calls == 1 and mm.locked_vm == 1024 and (first.pincount, second.pincount) == (512, 512)
    assert c.unmap_dma(0, 2 * HUGE) == 2 * HUGE and (first.pincount, second.pincount) == (0, 0)
    over(c, mm)


def test_vfio_entry_limit():
    mem, mm = machine()
    c = container(mem)
    addr = mapped(mm, 64 * PAGE)
    for i in range(65535):
        c.map_dma(mm, addr + i % 64 * PAGE, i * PAGE, PAGE)
    assert c.dma_avail == 0 and mm.locked_vm == pins(mem) == 65535
    with pytest.raises(MMError) as caught:
        c.map_dma(mm, addr, 65535 * PAGE, PAGE)
    assert caught.value.errno == ENOSPC and mm.locked_vm == pins(mem) == 65535
    assert c.unmap_dma(1000 * PAGE, PAGE) == PAGE and c.dma_avail == 1
    c.map_dma(mm, addr, 65535 * PAGE, PAGE)
    assert c.unmap_dma(0, 0, ALL) == 65535 * PAGE
    over(c, mm)
    # The parameter is sampled when the container is opened.
    few = VFIOContainer(mem, dma_entry_limit=1)
    few.map_dma(mm, addr, 0, PAGE)
    refused(few, ENOSPC, lambda: few.map_dma(mm, addr, PAGE, PAGE), mm)


@pytest.mark.parametrize("options", GENERATIONS, ids=lambda o: "-".join(map(str, o.values())))
def test_vfio_iova_top(options):
    mem, mm = machine()
    c = container(mem, **options)
    addr = mapped(mm, 2 * PAGE)
    c.map_dma(mm, addr, 0xfffffffffffff000, PAGE)
    assert c.unmap_dma(0xfffffffffffff000, PAGE) == PAGE and pins(mem) == 0
    c.map_dma(mm, addr, 0xfffffffffffff000, PAGE)
    assert c.unmap_dma(0, 0, ALL) == PAGE and pins(mem) == 0
    refused(c, EOVERFLOW, lambda: c.map_dma(mm, addr, 0xfffffffffffff000, 2 * PAGE), mm)
    refused(c, EINVAL, lambda: c.map_dma(mm, addr, 0xfffffffffffff000, 0), mm)
    over(c, mm)


@pytest.mark.parametrize("acquire", ACQUIRES)
def test_vfio_pfnmap_real_pfn(acquire):
    mem, mm = machine()
    c = container(mem, acquire=acquire)
    file = File(mem, 16 * PAGE, "iomem")
    addr = mm.mmap(16 * PAGE, PROT_READ | PROT_WRITE, MAP_SHARED, file)
    raw = [int(word) & (1 << 55) - 1 for word in mm.pagemap(addr, 16)]
    assert raw[0] >= mem.nr_pages and raw == list(range(raw[0], raw[0] + 16))
    with same(c, mm):
        c.map_dma(mm, addr, 0x100000, 16 * PAGE)
        # What the page table says, and not the page's number in the file.
        assert translations(c, 0x100000, 16 * PAGE) == raw and pins(mem) == mm.locked_vm == 0
        assert c.unmap_dma(0x100000, 16 * PAGE) == 65536
    # From the middle of the file: still what the table says.
    later = mm.mmap(4 * PAGE, PROT_READ | PROT_WRITE, MAP_SHARED, file, 8 * PAGE)
    c.map_dma(mm, later, 0, 4 * PAGE)
    assert translations(c, 0, 4 * PAGE) == raw[8:12]
    over(c, mm)


@pytest.mark.parametrize("acquire", ACQUIRES)
def test_vfio_pfnmap_real_pfn_that_is_not_there_yet(acquire):
    """Raw PFNs that nobody mapped yet are faulted in; what cannot be is EFAULT."""
    mem, mm = machine()
    c = container(mem, acquire=acquire)
    file = File(mem, 16 * PAGE, "iomem")
    addr = mm.mmap(16 * PAGE, PROT_READ | PROT_WRITE, MAP_SHARED, file)
    pfns = [int(word) & (1 << 55) - 1 for word in mm.pagemap(addr, 16)]
    forget_entries(mm, addr, 16)
    assert not any(int(word) >> 63 for word in mm.pagemap(addr, 16))
    c.map_dma(mm, addr, 0, 16 * PAGE)
    assert translations(c, 0, 16 * PAGE) == pfns
    c.unmap_dma(0, 16 * PAGE)
    mm.mprotect(addr, PAGE, PROT_NONE)
    refused(c, EFAULT, lambda: c.map_dma(mm, addr, 0, 16 * PAGE), mm)
    over(c, mm)


def forget_entries(mm, addr, nr):
    """Clear page table entries behind the engine's back: a mapping that its driver fills at the first fault."""
    mem, at = mm.mem, addr // PAGE % 512
    wanted = [int(word) & (1 << 55) - 1 for word in mm.pagemap(addr, nr)]
    for pfn in range(2, mem.nr_pages):
        if int(mem.pages["page_type"][pfn]) >> 24 == int(PageType.table):
            words = np.frombuffer(page_address(mem.page(pfn)), np.uint64)[at:at + nr]
            if [int(word) >> 12 & (1 << 40) - 1 for word in words] == wanted:
                ctypes.memset(words.ctypes.data, 0, words.nbytes)       # nobody may write a table through its page
                poke(mem, pfn, "index", int(mem.pages["index"][pfn]) - nr)     # how many entries the table has


@pytest.mark.parametrize("options", GENERATIONS[::4], ids=lambda o: "-".join(map(str, o.values())))
def test_vfio_unmap_bisect(options):
    mem, mm = machine()
    c = container(mem, **options)
    addr, M1 = mapped(mm, 6 << 20), 1 << 20
    c.map_dma(mm, addr, 0, 4 * M1)
    c.map_dma(mm, addr + 4 * M1, 4 * M1, 2 * M1)
    refused(c, EINVAL, lambda: c.unmap_dma(M1, M1), mm)
    refused(c, EINVAL, lambda: c.unmap_dma(0, 5 * M1), mm)
    assert c.unmap_dma(0, 6 * M1) == 6 * M1 and pins(mem) == mm.locked_vm == 0
    assert c.unmap_dma(8 * M1, PAGE) == 0
    over(c, mm)


@pytest.mark.parametrize("options", GENERATIONS, ids=lambda o: "-".join(map(str, o.values())))
def test_vfio_zero_page_leak(options):
    # The rules from 6.2 on: a long-term pin for reading breaks copy-on-write first, so that no zero page is ever pinned.
    mem, mm = machine()
    c = container(mem, **options)
    addr = mm.mmap(512 * PAGE)
    mm.touch(addr, 512 * PAGE, write=False)
    zero = mem.zero_page
    assert {mm.page_at(addr + i * PAGE) for i in range(512)} == {zero}
    before = zero.refcount
    for _ in range(3):
        c.map_dma(mm, addr, 0, HUGE, READ)
        assert zero.refcount == before and mm.locked_vm == pins(mem) == 512
        assert {mm.page_at(addr + i * PAGE).refcount for i in range(512)} == {1025}
        assert c.unmap_dma(0, HUGE) == 2097152
        assert zero.refcount == before and mm.locked_vm == 0
        assert {mm.page_at(addr + i * PAGE).refcount for i in range(512)} == {1}
    over(c, mm)


# ---- accounting ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("options", GENERATIONS[::4], ids=lambda o: "-".join(map(str, o.values())))
def test_acct_vfio_exec_underflow(options):
    mem = Memory("64M", debug=True)
    old = MM(mem, rlimit_memlock=1024 * PAGE)
    c = container(mem, **options)
    c.map_dma(old, mapped(old, 256 * PAGE), 0, 256 * PAGE)
    assert old.locked_vm == 256
    old.exit()
    new = MM(mem, rlimit_memlock=1024 * PAGE)
    assert c.unmap_dma(0, 256 * PAGE) == 256 * PAGE and new.locked_vm == 0 and pins(mem) == 0
    c.map_dma(new, mapped(new, 16 * PAGE), 0, 16 * PAGE)
    assert new.locked_vm == 16
    over(c, new)


@pytest.mark.parametrize("limit", [200, 256, 1024])
def test_acct_vfio_move_owner(limit):
    mem = Memory("64M", debug=True)
    old, new = MM(mem, rlimit_memlock=1024 * PAGE), MM(mem, rlimit_memlock=limit * PAGE)
    c = container(mem)
    c.map_dma(old, mapped(old, 256 * PAGE), 0, 256 * PAGE)
    c.unmap_dma(0, 256 * PAGE, UNMAP_VADDR)
    vaddr = mapped(new, 256 * PAGE)
    if limit < 256:
        refused(c, ENOMEM, lambda: c.map_dma(new, vaddr, 0, 256 * PAGE, VADDR), old, new)
        assert c.mappings[0].mm is old and (old.locked_vm, new.locked_vm) == (256, 0)
        c.map_dma(old, vaddr, 0, 256 * PAGE, VADDR)
    else:
        c.map_dma(new, vaddr, 0, 256 * PAGE, VADDR)
        assert (old.locked_vm, new.locked_vm) == (0, 256)
    assert c.unmap_dma(0, 256 * PAGE) == 256 * PAGE
    over(c, old, new)


def test_acct_vfio_move_owner_from_a_dead_one():
    mem = Memory("64M", debug=True)
    old, new = MM(mem), MM(mem)
    c = container(mem)
    c.map_dma(old, mapped(old, 256 * PAGE), 0, 256 * PAGE)
    c.unmap_dma(0, 0, UNMAP_VADDR | ALL)
    old.exit()
    c.map_dma(new, 0, 0, 256 * PAGE, VADDR)
    assert new.locked_vm == 256 and c.unmap_dma(0, 256 * PAGE) == 256 * PAGE
    over(c, new)


@pytest.mark.parametrize("options", GENERATIONS, ids=lambda o: "-".join(map(str, o.values())))
def test_acct_vhost_vdpa_error(options):
    # Two runs of 8 pages; the second cannot be mapped: whatever leaf of it fails.
    mem, mm = machine()
    addr = two_runs(mm)
    c = container(mem, **options)
    for nth in range(9, 17):
        refused(c, ENOMEM, lambda: injected(mem, "iommu_map", nth, lambda: c.map_dma(mm, addr, 0, 16 * PAGE)), mm, exactly="touched")
    # A pin that comes short: 5 of the second 8 pages are there, and no memory for the others.
    mm.madvise(addr + 13 * PAGE, 3 * PAGE, MADV_DONTNEED)
    hog = alloc_pages_bulk(mem, mem.vmstat()["nr_free_pages"])
    refused(c, ENOMEM, lambda: c.map_dma(mm, addr, 0, 16 * PAGE), mm, exactly="touched", match="no free memory")
    release_pages(hog)
    c.map_dma(mm, addr, 0, 16 * PAGE)
    assert mm.locked_vm == pins(mem) == 16
    over(c, mm)


def test_acct_memfd_free_hugepages():
    mem = Memory("64M", hugetlb={"2M": 1})
    file = File(mem, HUGE, "hugetlbfs")

    def free():
        return mem.hugetlb_pools()[HUGE][1]
    total, before = mem.hugetlb_pools()[HUGE][0], free()
    assert total == before == 1
    (folio,), offset = memfd_pin_folios(file, 0, HUGE - 1, 1)
    assert (folio.refcount, folio.pincount, offset, free()) == (513, 1, 0, 0)
    unpin_folios([folio])
    assert (folio.refcount, folio.pincount) == (512, 0)
    del file
    assert free() == 1 and pins(mem) == 0
    mem.check()


def test_acct_udmabuf_limit_overflow():
    # A limit of 4096 MiB is 2^20 pages, which 32 bits of bytes do not hold. (No udmabuf here: RLIMIT_MEMLOCK, and its errno.)
    mem = Memory("5G", thp="always")
    mm = MM(mem, rlimit_memlock=4096 << 20)
    c = container(mem)
    addr = mapped(mm, (4 << 30) + PAGE)
    c.map_dma(mm, addr, 0, 16 * PAGE)
    assert mm.locked_vm == 16 and c.unmap_dma(0, 16 * PAGE) == 16 * PAGE
    refused(c, ENOMEM, lambda: c.map_dma(mm, addr, 0, 1048577 * PAGE), mm, match="1048576 pages", exactly=False)
    c.map_dma(mm, addr, 0, 1048576 * PAGE)
    assert mm.locked_vm == 1048576
    over(c, mm)
