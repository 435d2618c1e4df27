"""Reported bugs of memory registration, io_uring buffers and their accounting: each case by the id of its report."""
import errno

import pytest

from mmcore import *
from mmcore.drivers.iobuffer import user_locked_vm
from rdma_support import HUGE, PAGE, RO, RW, machine, mapped, nothing_kept, pages_of, pins
from support import state
from test_umem_blocks import seen

TOP = 1 << 64
GIB = 1 << 30


def refusal(call):
    """The errno of a call that is refused."""
    with pytest.raises(MMError) as caught:
        call()
    return caught.value.errno


# ---- umem -----------------------------------------------------------------------------------------------------------------------
def test_umem_cuda_512gib():
    # A driver keeps 16 bytes a page in one table of at most 2^31 - 1 bytes: 512 GiB is a page too much. By sizes alone: what
    # passes the table's check comes to the pages, which are not mapped.
    mem, mm, _ = machine()
    capped, free = IBDevice(mem, mtt_limit=2**31 - 1), IBDevice(mem)
    with nothing_kept(mem, mm):
        for device, size, number in ((capped, 512 * GIB, errno.ENOMEM), (capped, 512 * GIB - PAGE, errno.EFAULT),
                                     (free, 512 * GIB, errno.EFAULT)):
            assert refusal(lambda: ib_umem_get(device, mm, 1 << 40, size, RW)) == number


def test_umem_cuda_512gib_scaled():
    # The same with all of its pages, at a 16384th of the size: 32 MiB is a page too much.
    mem, mm, _ = machine("128M", thp="always")
    capped, free, size = IBDevice(mem, mtt_limit=2**17 - 1), IBDevice(mem), 32 << 20
    addr = mapped(mm, size)
    with nothing_kept(mem, mm):
        assert refusal(lambda: ib_umem_get(capped, mm, addr, size, RW)) == errno.ENOMEM
    for device, fits in ((capped, size - PAGE), (free, size)):
        umem = ib_umem_get(device, mm, addr, fits, RW)
        assert pins(mem) == mm.pinned_vm == fits // PAGE
        ib_umem_release(umem)
    # In pieces, of which one more fails: those before it go in reverse order when the domain closes.
    order = []
    with pytest.raises(MMError), ProtectionDomain(capped, mm) as pd:
        for i in range(8):
            mr = pd.reg_mr(addr + i * (size >> 3), size >> 3, RW)
            mr.close = lambda close=mr.close, i=i: (order.append(i), close())
        assert mm.pinned_vm == size // PAGE
        pd.reg_mr(1 << 40, PAGE, RW)
    assert order == list(range(7, -1, -1)) and pins(mem) == mm.pinned_vm == 0


def test_umem_dontfork_partial_page():
    mem, mm, dev = machine()
    addr = mapped(mm, PAGE)
    mm.write(addr, b"plain")
    umem = ib_umem_get(dev, mm, addr + 2048, 2048, RW)
    pfn = mm.page_at(addr).pfn
    # The mark is on whole pages: half a page takes its neighbour with it, and an address inside is refused.
    assert refusal(lambda: mm.madvise(addr + 2048, 2048, MADV_DONTFORK)) == errno.EINVAL
    unmarked = mm.fork()
    assert unmarked.read(addr, 5) == b"plain" and unmarked.page_at(addr).pfn != pfn      # its own copy: the mark is not needed
    mm.madvise(addr, PAGE, MADV_DONTFORK)
    child = mm.fork()
    assert child.find_vma(addr) is None and refusal(lambda: child.write(addr, b"x")) == errno.EFAULT
    mm.write(addr, b"parent")
    assert mm.page_at(addr).pfn == pfn and ib_umem_copy_from(umem, 0, 1) == b"\0"
    ib_umem_release(umem)
    assert pins(mem) == 0
    mem.check()


def test_umem_dontfork_vma_leak():
    mem, mm, dev = machine()
    addr = mapped(mm, 1024 * PAGE)
    for i in range(1, 60):
        at = addr + i * 17 * PAGE
        mm.madvise(at, 16 * PAGE, MADV_DONTFORK)
        umem = ib_umem_get(dev, mm, at, 16 * PAGE, RW)
        assert len(mm.vmas) == 3
        ib_umem_release(umem)
        mm.madvise(at, 16 * PAGE, MADV_DOFORK)
        assert len(mm.vmas) == 1


@pytest.mark.parametrize("addr, size, pages", [(0x1f80, 0x100, 2), (0x1000, 0x1000, 1), (0x1fff, 1, 1), (0x1fff, 2, 2),
                                               (0x1001, 0x1000, 2)])
def test_umem_page_count_offset(addr, size, pages):
    mem, mm, dev = machine()
    start = mapped(mm, 4 * PAGE)
    umem = ib_umem_get(dev, mm, start + addr, size, RO)
    assert umem.num_pages == ib_umem_num_pages(umem) == mm.pinned_vm == pages
    ib_umem_release(umem)
    assert refusal(lambda: ib_umem_get(dev, mm, start + addr, 0, RO)) == errno.EINVAL


def test_umem_pgsz_4gib_entries():
    segments = [(0x34401400000, 0xfffff000), (0x345013ff000, 0xfffff000), (0x346013fe000, 0xfffff000), (0x347013fd000, 0xfffff000),
                (0x348013fc000, 0x4000)]
    umem = seen(segments)
    for bitmap, size, blocks in ((PAGE | HUGE, HUGE, 8192), (PAGE | HUGE | 4 << 20 | GIB, 4 << 20, 4096)):
        assert ib_umem_find_best_pgsz(umem, bitmap, 0) == size
        found = list(rdma_umem_for_each_dma_block(umem, size))
        assert len(found) == blocks == ib_umem_num_dma_blocks(umem, size) and len(found) * size == 17_179_869_184
        assert found[0] == segments[0][0] and found[-1] == segments[0][0] + 17_179_869_184 - size


def test_umem_pgsz_crosses_boundary():
    umem = seen([(61440, 28672)], iova=61440)
    assert ib_umem_find_best_pgsz(umem, sum(1 << bit for bit in range(12, 22)), 61440) == 131072
    assert ib_umem_num_dma_blocks(umem, 131072) == 1 and list(rdma_umem_for_each_dma_block(umem, 131072)) == [0]


@pytest.mark.parametrize("addr, length", [(0x10000, TOP - 0x8000), (0xffffffffffffe000, 0x4000)])
def test_umem_register_overflow(addr, length):
    # RDMA's errno is EINVAL; io_uring's EFAULT for the length, EOVERFLOW for the sum.
    mem, mm, dev = machine()
    mapped(mm, 4 * PAGE)
    table = BufferTable(mm)
    with nothing_kept(mem, mm):
        assert refusal(lambda: ib_umem_get(dev, mm, addr, length, RW)) == errno.EINVAL
        assert refusal(lambda: table.register([(addr, length)])) in (errno.EFAULT, errno.EOVERFLOW)


# ---- io_uring ---------------------------------------------------------------------------------------------------------------------
def test_iou_clone_offset_limit():
    mem, mm, _ = machine()
    addr = mapped(mm, 4 * PAGE)
    source = BufferTable(mm)
    source.register([(addr + i * PAGE, PAGE) for i in range(4)])
    before = state(mem)
    table = BufferTable(mm)
    assert refusal(lambda: table.clone(source, nr=4, dst_off=16381)) == errno.EINVAL
    assert refusal(lambda: table.clone(source, nr=4, dst_off=0xffffffff)) == errno.EOVERFLOW
    assert table.buffers == [] and [buf.refcount for buf in source.buffers] == [1] * 4
    table.clone(source, nr=4, dst_off=16380)
    assert len(table.buffers) == 16384 and [buf.refcount for buf in source.buffers] == [2] * 4 and state(mem) == before
    table.unregister()
    assert [buf.refcount for buf in source.buffers] == [1] * 4 and pins(mem) == 4
    source.unregister()
    assert pins(mem) == 0


def test_iou_coalesced_tail_unpin():
    #   A THP whose head page the process no longer has: pages 5 and 6 are registered.
    mem, mm, _ = machine(thp="always", mem=Memory("64M", thp="always", debug=True))
    addr = mapped(mm, HUGE)
    folio = mem.folio(mm.page_at(addr).pfn)
    mm.munmap(addr, PAGE)
    table = BufferTable(mm)
    seen_at_pin = mem.vmstat()["nr_foll_pin_acquired"]
    table.register([(addr + 5 * PAGE, 2 * PAGE)])
    assert mem.vmstat()["nr_foll_pin_acquired"] - seen_at_pin == 2 and folio.pincount == 1
    table.unregister()
    assert folio.pincount == 0
    table.register([(addr + 5 * PAGE, PAGE)])
    assert folio.pincount == 1
    table.unregister()
    assert pins(mem) == 0
    mem.check()


@pytest.mark.parametrize("kind, old, new", [("hugetlbfs", None, None), ("tmpfs", errno.EOPNOTSUPP, None),
                                            ("ext4", errno.EOPNOTSUPP, errno.EFAULT)])
def test_iou_file_backed(kind, old, new):
    for files, number in (("5.8", old), ("longterm", new)):
        mem, mm, _ = machine()
        size = {"page_size": HUGE} if kind == "hugetlbfs" else {}
        addr = mm.mmap(HUGE, flags=MAP_SHARED, file=File(mem, HUGE, kind, **size))
        table = BufferTable(mm, files=files)
        if number is None:
            table.register([(addr, HUGE)])
            table.unregister()
        else:
            assert refusal(lambda: table.register([(addr, HUGE)])) == number
        assert pins(mem) == 0 == mm.pinned_vm
    # A private mapping of the file is copied, and may be registered.
    if kind == "ext4":
        addr = mm.mmap(HUGE, flags=MAP_PRIVATE, file=File(mem, HUGE, kind))
        table.register([(addr, HUGE)])
        assert pins(mem) == 512
        table.unregister()


def test_iou_imu_alloc_leak():
    mem, mm, _ = machine()
    addr = mapped(mm, 8 * PAGE)
    folios = [mem.folio(pfn) for pfn in pages_of(mm, addr, 8 * PAGE)]
    counts = [folio.refcount for folio in folios]
    table = BufferTable(mm)
    with mem.inject("alloc"):
        assert refusal(lambda: table.register([(addr, 8 * PAGE)])) == errno.ENOMEM
    assert [folio.refcount for folio in folios] == counts and table.charged == mm.pinned_vm == pins(mem) == 0


def test_iou_memlock_unaligned_heap():
    mem, mm, _ = machine(rlimit_memlock=65536)
    addr = mapped(mm, 16 * PAGE)
    table = BufferTable(mm)

    def heap(nr, offset):
        return [(addr + offset + i * PAGE, PAGE) for i in range(nr)]
    table.register(heap(8, 16))
    assert table.charged == 16
    table.unregister()
    assert refusal(lambda: table.register(heap(9, 16))) == errno.ENOMEM
    assert pins(mem) == table.charged == user_locked_vm(mem) == 0
    table.register(heap(9, 0))
    assert table.charged == 9
    table.unregister()


@pytest.mark.parametrize("addr, length", [(0xfffffffffffff000, 0x2000), (0xfffffffffffff800, 0x400)])
def test_iou_pin_pages_overflow(addr, length):
    mem, mm, _ = machine()
    with nothing_kept(mem, mm):
        assert refusal(lambda: BufferTable(mm).register([(addr, length)])) == errno.EOVERFLOW


def test_iou_prefix_registration():
    mem, mm, _ = machine()
    addr = mapped(mm, 4 * PAGE)
    mm.munmap(addr + 2 * PAGE, PAGE)
    buffers = [(addr + i * PAGE, PAGE) for i in range(4)]
    table = BufferTable(mm, 4)
    assert table.update(0, buffers) == 2
    assert refusal(lambda: table.update(2, buffers[2:])) == errno.EFAULT
    assert [buf is not None for buf in table.buffers] == [True, True, False, False] and pins(mem) == table.charged == 2
    # The registration of a whole table is all or nothing.
    assert refusal(lambda: BufferTable(mm).register(buffers)) == errno.EFAULT
    assert pins(mem) == 2
    table.unregister()


# ---- accounting -------------------------------------------------------------------------------------------------------------------
def test_acct_cuda_segment_count():
    # Small segments, each a mapping of its own, end at the number of mappings: far below the limit on locked memory, and told
    # from it.
    mem, mm, dev = machine("512M", rlimit_memlock=1 << 30)
    addr = mapped(mm, 65600 * PAGE)
    umems, at = [], addr
    with pytest.raises(MMError) as caught:
        while True:
            mm.madvise(at, PAGE, MADV_DONTFORK)
            umems.append(ib_umem_get(dev, mm, at, PAGE, RW))
            at += 2 * PAGE
    assert caught.value.errno == errno.ENOMEM and "MEMLOCK" not in str(caught.value)
    assert len(umems) == mm.pinned_vm == pins(mem) == 32765     # and those that were there are intact
    assert len(mm.vmas) == 65530
    [ib_umem_release(umem) for umem in reversed(umems)]
    assert mm.pinned_vm == pins(mem) == 0


def test_acct_iou_shared_hugepage():
    mem, mm, _ = machine(rlimit_memlock=512 * PAGE)
    table = BufferTable(mm, 2)
    for _ in range(3):
        addr = mm.mmap(HUGE, flags=MAP_PRIVATE | MAP_ANONYMOUS | MAP_HUGETLB)
        table.update(0, [(addr, HUGE // 2)])
        assert table.charged == 512
        table.update(1, [(addr + HUGE // 2, HUGE // 2)])
        assert table.charged == 512
        table.update(0, [(0, 0)])
        assert table.charged == 512 == mm.pinned_vm
        # So another huge page is over the limit while the second half is pinned.
        fresh = mm.mmap(HUGE, flags=MAP_PRIVATE | MAP_ANONYMOUS | MAP_HUGETLB)
        assert refusal(lambda: table.update(0, [(fresh, HUGE // 2)])) == errno.ENOMEM
        table.update(1, [(0, 0)])
        assert table.charged == 0 == mm.pinned_vm == pins(mem)
        mm.munmap(addr, HUGE)
        mm.munmap(fresh, HUGE)


def test_acct_siw_reserve_first():
    # Two registrations of 600 pages under a limit of 1000, the second while the first is between its charge and its pins.
    mem, mm, dev = machine(rlimit_memlock=1000 * PAGE)
    addr = mapped(mm, 1200 * PAGE)
    first = ib_umem_get(dev, mm, addr, 600 * PAGE, RW)
    with nothing_kept(mem, mm):
        assert refusal(lambda: ib_umem_get(dev, mm, addr + 600 * PAGE, 600 * PAGE, RW)) == errno.ENOMEM
    assert mm.pinned_vm == 600
    ib_umem_release(first)
    # A pin that stops after 100 pages gives all 600 back.
    mm.munmap(addr + 100 * PAGE, PAGE)
    for acquire in ("list", "sink"):
        assert refusal(lambda: ib_umem_get(dev, mm, addr, 600 * PAGE, RW, acquire=acquire)) == errno.EFAULT
        assert mm.pinned_vm == pins(mem) == 0


def test_acct_siw_reserve_first_threads():
    import threading
    mem, mm, dev = machine(rlimit_memlock=1000 * PAGE)
    addr = mapped(mm, 600 * PAGE)
    for _ in range(20):
        start, got, most = threading.Barrier(3), [], []

        def register():
            start.wait()
            try:
                got.append(ib_umem_get(dev, mm, addr, 600 * PAGE, RW))
            except MMError as error:
                assert error.errno == errno.ENOMEM
            most.append(len(got))
        threads = [threading.Thread(target=register) for _ in range(3)]
        [t.start() for t in threads]
        [t.join() for t in threads]
        assert len(got) <= 1 and mm.pinned_vm == 600 * len(got)
        [ib_umem_release(umem) for umem in got]
        assert mm.pinned_vm == 0
