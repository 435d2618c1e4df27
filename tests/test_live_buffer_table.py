"""The engine's BufferTable against the running kernel's: real buffers, their frames replayed, every counter compared."""
import ctypes
import errno
import mmap
import os
import tempfile

import pytest
from live_support import CAP_IPC_LOCK, PAGE, linux, or_skip, part_of, root, run, without_capabilities

import mmcore as mmc
from mmcore import live
from mmcore.live.iouring import predict_registration

HUGE = 2 << 20
TRIES = 5
MREMAP_MAYMOVE, MREMAP_FIXED = 1, 2

pytestmark = linux


def agrees(target, iovecs):
    """Assert that the kernel counts for these iovecs of a buffer what the engine counts for the frames behind them."""
    base = target.addr // PAGE * PAGE
    for _ in range(TRIES):
        snapshot = or_skip(live.capture, "self", target.addr, target.length)
        measured = or_skip(live.kernel_register, target, iovecs=iovecs)
        if measured.at_register is None:
            pytest.skip(measured.no_counts)
        with snapshot.replay() as engine:
            buffers = []
            for addr, length in iovecs:
                first, last = (addr - base) // PAGE, (addr + length - 1 - base) // PAGE
                buffers.append((engine.pages[first:last + 1], addr % PAGE, length))
            want = predict_registration(engine.mem, buffers)
            del buffers
            engine.mem.check()
        # VmPin is of this process only: nothing else can show in it.
        assert measured.vmpin_at_register == [want.charge] and measured.vmpin_at_unregister == [-want.charge]
        counted = measured.at_register[0], measured.at_unregister[0]
        predicted = (want.acquired, want.released_at_register), (0, want.released_at_unregister)
        if counted == predicted:
            return want
    pytest.skip(f"other pins on the machine, or another rule: counted {counted}, predicted {predicted}")


@pytest.mark.parametrize("backing", ["4k", "thp", "hugetlb"])
@pytest.mark.parametrize("offset", [0, 100, PAGE + 1])
def test_whole_buffers_and_unaligned_starts(backing, offset):
    with or_skip(live.buffer, "8M", backing) as buf:
        got = agrees(buf, [(buf.addr + offset, buf.length - offset)])
        assert got.acquired == (buf.length - offset + PAGE - 1) // PAGE + (offset // PAGE * PAGE != offset and
                                                                          (buf.length - offset) % PAGE == 0)


def test_nine_unaligned_small_buffers_pin_two_pages_each():
    with live.buffer("64K") as buf:
        got = agrees(buf, [(buf.addr + 16 + i * PAGE, PAGE) for i in range(9)])
        assert (got.acquired, got.charge, got.bvecs) == (18, 18, 18)


def test_half_of_a_huge_page_twice():
    with or_skip(live.buffer, "2M", "thp") as buf:
        got = agrees(buf, [(buf.addr, HUGE // 2), (buf.addr + HUGE // 2, HUGE // 2)])
        assert got.acquired == 512
        if got.coalesced == 2:
            assert (got.charge, got.bvecs) == (512, 2)


def test_a_huge_page_at_an_address_that_is_no_multiple_of_its_size():
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = libc.mremap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
    libc.mremap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    room = libc.mmap(None, 4 * HUGE, 0, flags, -1, 0)
    with or_skip(live.buffer, "4M", "thp") as buf:
        # Move the second half, which is a huge page of its own; what is left of the buffer goes with it.
        source, to = buf.addr + HUGE, room + (-room) % HUGE + 3 * PAGE
        moved = libc.mremap(source, HUGE, HUGE, MREMAP_MAYMOVE | MREMAP_FIXED, to)
        assert moved == to, os.strerror(ctypes.get_errno())
        try:
            target = type("Range", (), {"addr": moved, "length": HUGE})
            agrees(target, [(moved + 256 * PAGE, HUGE // 2)])
            agrees(target, [(moved + 100, HUGE - 100)])
        finally:
            libc.munmap(moved, HUGE)
            # Closing the buffer unmaps its range: something must be there.
            assert libc.mmap(source, HUGE, 3, flags | 0x10, -1, 0) == source
    libc.munmap(room, 4 * HUGE)


def test_a_hole_in_a_huge_page():
    with or_skip(live.buffer, "4M", "thp") as buf:
        buf.madvise(mmap.MADV_DONTNEED, 600 * PAGE, PAGE)
        buf.madvise(mmap.MADV_NOHUGEPAGE)
        buf[600 * PAGE] = 1
        agrees(buf, [(buf.addr, buf.length)])
        agrees(buf, [(buf.addr, HUGE), (buf.addr + HUGE, HUGE)])


def disk_file():
    """A file on a filesystem with writeback, or skip."""
    for folder in (os.getcwd(), "/var/tmp", "/tmp"):
        handle = tempfile.TemporaryFile(dir=folder)
        kinds = [line.split() for line in open("/proc/self/mountinfo")]
        device = os.fstat(handle.fileno()).st_dev
        name = f"{os.major(device)}:{os.minor(device)}"
        if any(words[2] == name and words[words.index("-") + 1] in ("ext4", "xfs") for words in kinds):
            handle.truncate(4 * PAGE)
            return handle
        handle.close()
    pytest.skip("no ext4 or xfs to make a file on")


def test_a_shared_mapping_of_a_file_on_disk_is_refused_by_both():
    with live.buffer(PAGE) as buf:
        or_skip(live.kernel_register, buf)
    with disk_file() as handle, mmap.mmap(handle.fileno(), 4 * PAGE) as shared:
        shared[:] = bytes([1]) * 4 * PAGE
        addr = ctypes.addressof(ctypes.c_char.from_buffer(shared))
        target = part_of(type("At", (), {"addr": addr}), 0, 4)
        with pytest.raises(OSError) as caught:
            live.kernel_register(target)
        assert caught.value.errno == errno.EFAULT
        before = live.limits().pinned
    mem = mmc.Memory("16M")
    mm = mmc.MM(mem)
    addr = mm.mmap(4 * PAGE, flags=mmc.MAP_SHARED, file=mmc.File(mem, 4 * PAGE, "ext4"))
    mm.touch(addr, 4 * PAGE)
    table = mmc.BufferTable(mm)
    with pytest.raises(mmc.MMError) as caught:
        table.register([(addr, 4 * PAGE)])
    assert caught.value.errno == errno.EFAULT and mm.pinned_vm == 0 and live.limits().pinned == before


@root
def test_over_the_limit_is_refused_by_both():
    code = (
        "import resource; resource.setrlimit(resource.RLIMIT_MEMLOCK, (1 << 20, 1 << 20))\n"
        "from mmcore import live\n"
        "for size in ('512K', '4M'):\n"
        "    try: live.kernel_register(live.buffer(size)); print(size, 'registered')\n"
        "    except live.NotPossible as error: print(size, 'ENOMEM' if 'ENOMEM' in error.reason else error.reason)"
    )
    with live.buffer(PAGE) as buf:
        or_skip(live.kernel_register, buf)
    done = run("-c", code, preexec_fn=without_capabilities(CAP_IPC_LOCK))
    kernel = done.stdout.splitlines()
    mem = mmc.Memory("32M")
    mm = mmc.MM(mem, rlimit_memlock=1 << 20)
    ours = []
    for size in ("512K", "4M"):
        table = mmc.BufferTable(mm)
        addr = mm.mmap(size)
        try:
            table.register([(addr, {"512K": 512 << 10, "4M": 4 << 20}[size])])
            ours.append(f"{size} registered")
            table.unregister()
        except mmc.MMError as error:
            ours.append(f"{size} {errno.errorcode[error.errno]}")
    assert kernel == ours == ["512K registered", "4M ENOMEM"], done.stderr
