"""The kernel as oracle, on pins: what the counters of the machine and of the process say of each way to pin, and the
engine the same."""

import ctypes
import os
from types import SimpleNamespace

import numpy as np
import pytest
from gup_support import pins_of as pins_left
from live_support import PAGE, linux, or_skip, scratch_file
from oracle_support import HUGE, LAYOUTS, advise, layout, libc, pins_of
from support import not_under_asan

import mmcore as mmc
from mmcore import live
from mmcore.live import pagemap as pm

pytestmark = linux
O_DIRECT = getattr(os, "O_DIRECT", 0)
SPARE = {"zero page after a read", "huge zero page", "file private, read", "file private, written"}
REFUSED = {"file shared"}
PINNABLE = [name for name in LAYOUTS if name not in REFUSED]


def counters(mem):
    stat = mem.vmstat()
    return np.array([stat["nr_foll_pin_acquired"], stat["nr_foll_pin_released"]])


@pytest.fixture(params=PINNABLE)
def real(request, tmp_path):
    """(address, length) of real memory of each kind that can be pinned."""
    with layout(request.param, request, tmp_path) as (addr, length):
        yield SimpleNamespace(name=request.param, addr=addr, length=length)


def believed(measured, expected):
    """The pair of a round in which nobody else pinned, if there is one; else the least."""
    return tuple(expected) if tuple(expected) in measured else min(measured)


def test_io_uring(real):
    """Registering pins all and keeps one pin a folio where it can: VmPin and nr_foll_pin_* of the kernel are those of
    the engine, which does it on the replayed address space; then both have the same folios, and the same exclusive
    pages."""
    snapshot = or_skip(live.capture, "self", real.addr, real.length)
    with snapshot.replay() as engine:
        table = mmc.BufferTable(engine.mm)
        start = counters(engine.mem)
        table.register([(real.addr, real.length)])
        between = counters(engine.mem)
        charge = table.charged
        table.unregister()
        after = counters(engine.mem)
        kernel = or_skip(live.kernel_register, real, rounds=1)
        # The first round faults and copies, the others find everything there: the counts are the same, as in the
        # engine.
        more = live.kernel_register(real, rounds=10)
        assert kernel.vmpin_at_register[0] == -kernel.vmpin_at_unregister[0] == charge
        assert set(more.vmpin_at_register) == {charge}
        if kernel.at_register is None:
            pytest.skip(kernel.no_counts)
        assert believed(kernel.at_register + more.at_register, between - start) == tuple(between - start)
        assert believed(kernel.at_unregister + more.at_unregister, after - between) == tuple(after - between)
        same_after(snapshot, engine, real)


def same_after(before, engine, real):
    """The pin changed the same pages of both: those that were zero, or of a file."""
    now = live.capture("self", real.addr, real.length)
    words = engine.mm.pagemap(real.addr, len(now.pfns))
    told = pm.PM_PRESENT | pm.PM_FILE | pm.PM_MMAP_EXCLUSIVE
    assert np.array_equal(words & told, now.words & told)
    ours = (words & pm.PM_PFN_MASK) != (np.asarray(before.words) & pm.PM_PFN_MASK)
    zero = pm.has_flag(before.flags, pm.KPF_ZERO_PAGE)
    theirs = now.pfns != before.pfns
    assert np.array_equal(ours[~zero], theirs[~zero]) and np.all(theirs[zero])
    assert not pm.has_flag(now.flags[zero], pm.KPF_ZERO_PAGE).any()
    if real.name in SPARE:
        assert theirs.any()
    orders = [engine.mem.page(int(word & pm.PM_PFN_MASK)).folio.order for word in words[::7]]
    assert orders == now.orders[::7].tolist()
    engine.mem.check()


@pytest.mark.parametrize(
    "name", ["4 KiB", "mTHP 64K", "THP", "hugetlb", "shmem", "memfd", "file shared", "zero page after a read"]
)
@pytest.mark.parametrize("way", ["O_DIRECT read", "O_DIRECT write"])
def test_direct_io(name, way, request, tmp_path):
    """A pin a page for the time of the transfer, on files as well."""
    with layout(name, request, tmp_path) as (addr, length):
        length = min(length, 64 * PAGE)
        fd = scratch_file(tmp_path, 64 * PAGE)
        direct = os.open(f"/proc/self/fd/{fd}", os.O_RDWR | O_DIRECT)
        try:
            libc.pread.argtypes = libc.pwrite.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_long]
            call = libc.pread if "read" in way else libc.pwrite
            zero = kernel_zero(addr, length)
            expected = engine_io(addr, length, "read" in way)
            # Only a write to the device leaves the zero page where it is, and that is not counted.
            assert expected[0] == length // PAGE - (0 if "read" in way else zero)
            done = []
            assert pins_of(lambda: done.append(call(direct, addr, length, 0)), expected) == expected
            assert set(done) == {length}
        finally:
            os.close(direct)
            os.close(fd)


def kernel_zero(addr, length):
    return int(np.count_nonzero(pm.has_flag(or_skip(live.capture, "self", addr, length).flags, pm.KPF_ZERO_PAGE)))


def engine_io(addr, length, into_memory):
    """What the engine counts for a bio of these bytes."""
    snapshot = or_skip(live.capture, "self", addr, length)
    with snapshot.replay() as engine:
        start = counters(engine.mem)
        direction = mmc.ITER_DEST if into_memory else mmc.ITER_SOURCE
        it = mmc.iov_iter_ubuf(direction, addr, length)

        def pin(at, nr, flags):
            return mmc.pin_user_pages_fast(engine.mm, at, nr, flags)

        while it.count:
            _, pages, _ = mmc.iov_iter_extract_pages(it, it.count, 256, mem=engine.mem, pin=pin)
            mmc.unpin_user_pages_dirty_lock(pages, len(pages), into_memory)
        assert pins_left(engine.mem) == 0
        return tuple(int(n) for n in counters(engine.mem) - start)


@pytest.mark.parametrize("name", ["4 KiB", "THP", "shmem"])
def test_process_vm_readv(name, request, tmp_path):
    """The other process's pages are pinned for the copy, each once; as many as the engine's pin_user_pages_remote()
    takes."""
    with layout(name, request, tmp_path) as (addr, length):
        length = min(length, 64 * PAGE)
        into = ctypes.create_string_buffer(length)

        class Iovec(ctypes.Structure):
            _fields_ = [("base", ctypes.c_void_p), ("length", ctypes.c_size_t)]

        local, remote = Iovec(ctypes.addressof(into), length), Iovec(addr, length)
        libc.process_vm_readv.restype = ctypes.c_ssize_t
        with or_skip(live.capture, "self", addr, length).replay() as engine:
            start = counters(engine.mem)
            mmc.unpin_user_pages(mmc.pin_user_pages_remote(engine.mm, addr, length // PAGE))
            expected = tuple(int(n) for n in counters(engine.mem) - start)
        done = []

        def action():
            done.append(libc.process_vm_readv(os.getpid(), ctypes.byref(local), ctypes.c_ulong(1),
                                              ctypes.byref(remote), ctypes.c_ulong(1), ctypes.c_ulong(0)))
        assert pins_of(action, expected) == expected == (length // PAGE, length // PAGE)
        assert set(done) == {length}


def test_vmsplice_holds_references_and_no_pins():
    with live.buffer(16 * PAGE) as buf:
        reader, writer = os.pipe()
        iovec = (ctypes.c_size_t * 2)(buf.addr, 16 * PAGE)
        done = []

        def splice():
            done.append(libc.vmsplice(writer, iovec, ctypes.c_ulong(1), 0))
            os.read(reader, 16 * PAGE)

        assert pins_of(splice, (0, 0)) == (0, 0) and set(done) == {16 * PAGE}
        os.close(reader)
        os.close(writer)
        with or_skip(live.capture, buf).replay() as engine:
            start = counters(engine.mem)
            pages = mmc.get_user_pages_fast(engine.mm, buf.addr, 16)
            assert {page.refcount for page in pages} == {2} and (counters(engine.mem) == start).all()
            mmc.release_pages(pages)
            engine.mem.check()


@not_under_asan("mlock() does nothing")
def test_mlock_is_no_pin():
    with live.buffer(16 * PAGE) as buf:
        before = live.limits()
        address = ctypes.c_void_p(buf.addr)
        done = []

        def lock():
            done.append(libc.mlock(address, ctypes.c_size_t(16 * PAGE)))
            now.append(live.limits())
            libc.munlock(address, ctypes.c_size_t(16 * PAGE))

        now = []
        assert pins_of(lock, (0, 0)) == (0, 0) and set(done) == {0}
        assert now[0].locked - before.locked == 16 * PAGE and now[0].pinned == before.pinned
        mm = mmc.MM(mem := mmc.Memory("64M"))
        addr = mm.mmap(16 * PAGE, flags=mmc.MAP_PRIVATE | mmc.MAP_ANONYMOUS | mmc.MAP_LOCKED)
        assert (mm.locked_vm, mm.pinned_vm, pins_left(mem)) == (16, 0, 0) and mm.page_at(addr) is not None
        mm.exit()
        mem.close()


def test_a_pinned_page_stays_where_it_is_through_fork():
    """Registered, forked, written: the process keeps its pages, and the child got copies. The engine does the same."""
    with live.buffer(8 * PAGE) as buf:
        snapshot = or_skip(live.capture, buf)
        ring = or_skip(_ring)
        with ring:
            packed = (ctypes.c_size_t * 2)(buf.addr, buf.length)
            assert ring.register(0, bytes(packed), 1) == 0
            from oracle_support import child_that_waits

            with child_that_waits() as child:
                buf[0] = 7
                mine, theirs = live.capture(buf), live.capture(child, buf.addr, buf.length)
        with snapshot.replay() as engine:
            with mmc.BufferTable(engine.mm) as table:
                table.register([(buf.addr, buf.length)])
                other = engine.mm.fork()
                engine.mm.write(buf.addr, b"\7")
                kept = [engine.mm.page_at(buf.addr + i * PAGE).pfn for i in range(8)]
                copies = [other.page_at(buf.addr + i * PAGE).pfn for i in range(8)]
                engine.mem.check()
                other.exit()
        assert mine.pfns.tolist() == kept == snapshot.pfns.tolist()
        assert not set(copies) & set(kept) and not set(theirs.pfns.tolist()) & set(kept)
        assert set(mine.mapcounts.tolist()) == set(theirs.mapcounts.tolist()) == {1}


def _ring():
    from mmcore.live.iouring import _Ring

    return _Ring()


def test_advice_on_pinned_memory_drops_the_mapping_and_keeps_the_pin():
    """MADV_DONTNEED of a registered buffer: the address shows a new page, and the old one lives as long as its pin."""
    with live.buffer(2 * PAGE) as buf:
        snapshot = or_skip(live.capture, buf)
        ring = or_skip(_ring)
        with ring:
            assert ring.register(0, bytes((ctypes.c_size_t * 2)(buf.addr, buf.length)), 1) == 0
            pinned = live.limits().pinned
            advise(buf.addr, buf.length, 4)
            buf[0] = 9
            now = live.capture(buf)
            assert live.limits().pinned == pinned
        with snapshot.replay() as engine:
            with mmc.BufferTable(engine.mm) as table:
                table.register([(buf.addr, buf.length)])
                engine.mm.madvise(buf.addr, buf.length, mmc.MADV_DONTNEED)
                engine.mm.write(buf.addr, b"\11")
                assert (
                    engine.mm.page_at(buf.addr).pfn != snapshot.pfns[0] and engine.mm.page_at(buf.addr + PAGE) is None
                )
                assert engine.mem.page(int(snapshot.pfns[0])).refcount == 1024
                engine.mem.check()
        assert now.pfns[0] != snapshot.pfns[0] and now.pfns[1] == 0


@pytest.mark.parametrize("part, order", [((3, 1), 9), ((510, 4), 9), ((0, 512), 9)])
def test_a_part_of_a_huge_page_counts_whole(part, order):
    first, nr = part
    with live.buffer(2 * HUGE, "thp") as buf:
        if order not in or_skip(live.capture, buf).orders:
            pytest.skip("no huge pages were had")
        some = SimpleNamespace(addr=buf.addr + first * PAGE, length=nr * PAGE)
        folios = len(np.unique(live.capture(some).heads))
        assert or_skip(live.kernel_register, some).vmpin_at_register == [512 * folios]
        with live.capture(buf).replay() as engine, mmc.BufferTable(engine.mm) as table:
            table.register([(some.addr, some.length)])
            assert table.charged == engine.mm.pinned_vm == 512 * folios
