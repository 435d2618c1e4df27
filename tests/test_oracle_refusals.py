"""The kernel as oracle, on refusals: each registration is asked of io_uring and of the engine's BufferTable, and both
say the same errno; then both are as they were."""

import ctypes
import errno
import json
import mmap
import os
import resource

import pytest
from gup_support import pins_of
from live_support import PAGE, linux, or_skip, root, scratch_file, secret_memory, address_of
from oracle_support import ANON, HUGE, PRIVATE, SHARED, Area, child_that_waits, libc, write

import mmcore as mmc
from mmcore import live
from mmcore.live.iouring import _Ring

pytestmark = linux
REGISTER, UNREGISTER = 0, 1


class Kernel:
    """Real mappings of this process, and a ring."""

    def __init__(self, folder):
        self.folder, self.area, self.ring, self.kept = folder, Area(4 * HUGE), or_skip(_Ring), []
        self.base = self.area.addr

    def map(self, kind, at=0, length=8 * PAGE):
        prot = mmap.PROT_READ if kind == "read-only" else 0 if kind == "no access" else mmap.PROT_READ | mmap.PROT_WRITE
        if kind == "secretmem":
            self.kept.append(secret_memory(length))
            return address_of(self.kept[-1])
        if kind in ("ext4 shared", "ext4 private", "ext4 shared read-only"):
            fd = scratch_file(self.folder, length)
            prot = mmap.PROT_READ if "read-only" in kind else prot
            addr = self.area.map(length, PRIVATE if "private" in kind else SHARED, fd, prot=prot, at=at)
            os.close(fd)
            return addr
        addr = self.area.map(length, (SHARED if kind == "shmem" else PRIVATE) | ANON, prot=prot, at=at)
        if prot & mmap.PROT_WRITE:
            write(addr, length)
        return addr

    def unmap(self, addr, length):
        assert libc.munmap(addr, length) == 0

    def register(self, buffers):
        """Return 0 or the errno."""
        packed = b"".join(ctypes.string_at((ctypes.c_size_t * 2)(addr, length), 16) for addr, length in buffers)
        return self.ring.register(REGISTER, packed, len(buffers))

    def unregister(self):
        return self.ring.register(UNREGISTER, None, 0)

    def pinned(self):
        return live.limits().pinned // PAGE

    def close(self):
        os.close(self.ring.fd)
        for area in self.kept:
            area.close()
        self.area.close()


class Engine:
    """The same in the engine."""

    def __init__(self, _):
        self.mem = mmc.Memory("64M")
        self.mm = mmc.MM(self.mem)
        self.table = mmc.BufferTable(self.mm)
        self.base = 1 << 32

    def map(self, kind, at=0, length=8 * PAGE):
        prot = mmc.PROT_READ if "read-only" in kind else 0 if kind == "no access" else mmc.PROT_READ | mmc.PROT_WRITE
        flags, file = mmc.MAP_PRIVATE | mmc.MAP_ANONYMOUS, None
        if kind.startswith("ext4"):
            flags = mmc.MAP_PRIVATE if "private" in kind else mmc.MAP_SHARED
            file = mmc.File(self.mem, length, "ext4")
        elif kind == "secretmem":
            flags, file = mmc.MAP_SHARED, mmc.File(self.mem, length, "secretmem")
        elif kind == "shmem":
            flags = mmc.MAP_SHARED | mmc.MAP_ANONYMOUS
        addr = self.mm.mmap(length, prot, flags | mmc.MAP_FIXED, file=file, addr=self.base + at)
        if prot & mmc.PROT_WRITE and not kind.startswith("ext4"):
            self.mm.touch(addr, length)
        return addr

    def unmap(self, addr, length):
        self.mm.munmap(addr, length)

    def register(self, buffers):
        try:
            self.table.register(buffers)
            return 0
        except OSError as refusal:
            return refusal.errno

    def unregister(self):
        try:
            self.table.unregister()
            return 0
        except OSError as refusal:
            return refusal.errno

    def pinned(self):
        return self.mm.pinned_vm

    def close(self):
        self.table = None
        assert pins_of(self.mem) == 0
        self.mem.check()
        self.mm.exit()
        self.mem.close()


def both(folder, scenario):
    """Run a scenario on both; returns what it gave on each."""
    got = []
    for kind in (Kernel, Engine):
        world = kind(folder)
        try:
            before = world.pinned()
            got.append(scenario(world))
            world.unregister()
            assert world.pinned() == before, f"{kind.__name__}: something stayed pinned"
        finally:
            world.close()
    return got


def agree(folder, scenario, wanted):
    kernel, engine = both(folder, scenario)
    assert kernel == engine == wanted, (
        f"kernel {errno.errorcode.get(kernel, kernel)}, engine {errno.errorcode.get(engine, engine)}"
    )


@pytest.mark.parametrize(
    "kind, wanted",
    [
        ("anon", 0),
        ("shmem", 0),
        ("ext4 private", 0),
        ("ext4 shared", errno.EFAULT),
        ("ext4 shared read-only", errno.EFAULT),
        ("secretmem", errno.EFAULT),
        ("read-only", errno.EFAULT),
        ("no access", errno.EFAULT),
    ],
)
def test_by_kind_of_mapping(kind, wanted, tmp_path):
    agree(tmp_path, lambda world: world.register([(world.map(kind), 8 * PAGE)]), wanted)


def hole(world):
    addr = world.map("anon")
    world.unmap(addr + 3 * PAGE, PAGE)
    return world.register([(addr, 8 * PAGE)])


def second_fails(world):
    addr = world.map("anon")
    return world.register([(addr, PAGE), (world.map("read-only", at=HUGE), PAGE)])


def twice(world):
    addr = world.map("anon")
    return world.register([(addr, PAGE)]), world.register([(addr, PAGE)]), world.unregister(), world.unregister()


def ends_in_another_kind(world):
    addr = world.map("anon")
    world.map("ext4 shared", at=8 * PAGE)
    return world.register([(addr, 9 * PAGE)]), world.register([(addr, 8 * PAGE)])


@pytest.mark.parametrize(
    "scenario, wanted",
    [
        (hole, errno.EFAULT),
        (second_fails, errno.EFAULT),
        (twice, (0, errno.EBUSY, 0, errno.ENXIO)),
        (ends_in_another_kind, (errno.EFAULT, 0)),
        (lambda world: world.unregister(), errno.ENXIO),
        (lambda world: world.register([]), errno.EINVAL),
        (lambda world: world.register([(world.map("anon"), 0)]), errno.EFAULT),
        (lambda world: world.register([(0, PAGE)]), errno.EFAULT),
        (lambda world: world.register([(world.map("anon"), (1 << 30) + 1)]), errno.EFAULT),
        (lambda world: world.register([(world.map("anon"), 1), (world.base + PAGE - 1, 2)]), 0),
        (lambda world: world.register([(0, 0), (world.map("anon"), PAGE)]), 0),
        (lambda world: world.register([((1 << 64) - 2 * PAGE, 2 * PAGE)]), None),
        (lambda world: world.register([(world.map("anon"), PAGE)] * 16385), errno.EINVAL),
        (lambda world: world.register([(world.map("anon"), PAGE)] * 16384), 0),
    ],
    ids=[
        "hole",
        "second fails",
        "twice",
        "ends in another kind",
        "none registered",
        "no buffers",
        "length 0",
        "address 0",
        "above 1 GiB",
        "across a page",
        "empty slot",
        "wraps",
        "16385 buffers",
        "16384 buffers",
    ],
)
def test_by_what_is_asked(scenario, wanted, tmp_path):
    if wanted is None:
        kernel, engine = both(tmp_path, scenario)
        assert kernel == engine != 0
    else:
        agree(tmp_path, scenario, wanted)


# ---- RLIMIT_MEMLOCK, of a child that is nobody in particular
# --------------------------------------------------------------------
USER = 23456


def as_user(limit, work, user=USER, prepare=None):
    """Run work() in a child of another user with this RLIMIT_MEMLOCK in bytes; returns what it returned, through JSON.

    prepare() is run before, still as root, and what it returns is the argument of work().
    """
    mine, theirs = os.pipe()
    pid = os.fork()
    if pid == 0:
        answer = None
        try:
            os.close(mine)
            given = () if prepare is None else (prepare(),)
            resource.setrlimit(resource.RLIMIT_MEMLOCK, (limit, limit))
            os.setgid(user)
            os.setuid(user)
            answer = work(*given)
        finally:
            os.write(theirs, json.dumps(answer).encode())
            os._exit(0)
    os.close(theirs)
    text = b""
    while part := os.read(mine, 4096):
        text += part
    os.close(mine)
    os.waitpid(pid, 0)
    return json.loads(text)


def ring_register(buffers):
    """Register on a ring of its own in this process: the errno, and the pages of VmPin."""
    with _Ring() as ring:
        packed = b"".join(ctypes.string_at((ctypes.c_size_t * 2)(addr, length), 16) for addr, length in buffers)
        return ring.register(REGISTER, packed, len(buffers)), live.limits().pinned // PAGE


@pytest.fixture
def ring_pages():
    """How many pages a ring itself counts for its user; the engine's tables have no ring."""
    or_skip(_Ring).__exit__()
    area = Area(HUGE)
    addr = area.map(16 * PAGE)
    libc.madvise(addr, 16 * PAGE, 15)
    write(addr, 16 * PAGE)
    # Counted down to the least limit under which a buffer of 8 pages is taken. What a ring took goes back late, in the
    # background: each try is another user.
    for extra in range(8):
        if as_user((8 + extra) * PAGE, lambda: ring_register([(addr, 8 * PAGE)]), USER + 100 + extra)[0] == 0:
            break
    else:
        pytest.fail("8 pages are refused under a limit of 15")
    yield extra
    area.close()


def of_its_own(length, backing, part=None):
    """A buffer that the child makes itself: what it has by fork it would copy by pages. And a registration of (a part
    of) it."""

    def prepare():
        buf = live.buffer(length, backing)
        return buf if backing == "4k" or live.capture(buf).orders.min() == 9 else None

    def work(buf):
        return "no huge page was had" if buf is None else ring_register([(buf.addr, part or buf.length)])

    return {"work": work, "prepare": prepare}


def of_the_engine(snapshot, limit, pages):
    """Register some pages of a capture under a limit in pages: [errno, pages in pinned_vm]."""
    with snapshot.replay() as engine:
        mm = mmc.MM(engine.mem, rlimit_memlock=limit * PAGE, cap_ipc_lock=False, user="somebody")
        table = mmc.BufferTable(mm)
        try:
            table.register([engine.pages[:pages]])
            got = [0, mm.pinned_vm]
            table.unregister()
        except mmc.MMError as refusal:
            got = [refusal.errno, mm.pinned_vm]
        mm.exit()
        return got


@root
@pytest.mark.parametrize(
    "backing, pages, part, charge", [("4k", 64, 64, 64), ("thp", 512, 512, 512), ("thp", 512, 1, 512)]
)
@pytest.mark.parametrize("over", [-1, 0, 1])
def test_over_the_limit(backing, pages, part, charge, over, ring_pages):
    """Equality passes, one page more is ENOMEM; a huge page counts whole for a part of it. VmPin is the charge, or
    nothing."""
    user = USER + 1000 + 100 * over + pages + part
    kernel = as_user((charge - over + ring_pages) * PAGE, user=user, **of_its_own(pages * PAGE, backing, part * PAGE))
    with live.buffer(pages * PAGE, backing) as buf:
        snapshot = or_skip(live.capture, buf)
    if isinstance(kernel, str) or (backing == "thp" and snapshot.orders.min() < 9):
        pytest.skip("no huge page was had")
    ours = of_the_engine(snapshot, charge - over, part)
    assert kernel == ours == [errno.ENOMEM if over > 0 else 0, 0 if over > 0 else charge]


@root
def test_what_a_child_has_by_fork_is_copied_by_pages(ring_pages):
    """A page of a huge page that parent and child share becomes the child's by a copy, and counts as one page."""
    with live.buffer(HUGE, "thp") as buf:
        snapshot = or_skip(live.capture, buf)
        if snapshot.orders.min() < 9:
            pytest.skip("no huge page was had")
        kernel = as_user((8 + ring_pages) * PAGE, lambda: ring_register([(buf.addr, PAGE)]), USER + 2000)
    with snapshot.replay() as engine:
        child = engine.mm.fork()
        with mmc.BufferTable(child) as table:
            table.register([(snapshot.addr, PAGE)])
            assert kernel == [0, 1] == [0, child.pinned_vm] and child.page_at(snapshot.addr).folio.order == 0
        child.exit()


@root
def test_processes_of_one_user_share_the_count(ring_pages):
    """Two rings of one user, and buffers that only fit one by one; a process of another user is not in their way."""
    with live.buffer(16 * PAGE) as buf:

        def two(limit):
            with _Ring() as first, _Ring() as second:
                packed = ctypes.string_at((ctypes.c_size_t * 2)(buf.addr, 8 * PAGE), 16)
                return first.register(REGISTER, packed, 1), second.register(REGISTER, packed, 1)

        kernel = as_user((15 + 2 * ring_pages) * PAGE, lambda: two(0), USER + 3000)
        enough = as_user((16 + 2 * ring_pages) * PAGE, lambda: two(0), USER + 3001)
        snapshot = or_skip(live.capture, buf)
    for limit, wanted in ((15, kernel), (16, enough)):
        with snapshot.replay() as engine:
            got, tables = [], []
            for _ in range(2):
                mm = mmc.MM(engine.mem, rlimit_memlock=limit * PAGE, cap_ipc_lock=False, user="one")
                tables.append(mmc.BufferTable(mm))
                try:
                    tables[-1].register([engine.pages[:8]])
                    got.append(0)
                except mmc.MMError as refusal:
                    got.append(refusal.errno)
            other = mmc.MM(engine.mem, rlimit_memlock=limit * PAGE, cap_ipc_lock=False, user="another")
            with mmc.BufferTable(other) as table:
                table.register([engine.pages[:8]])
            for table in tables:
                if table.buffers:
                    table.unregister()
            assert got == wanted == [0, errno.ENOMEM if limit == 15 else 0]


@root
def test_preflight_says_before_what_the_kernel_says_after(ring_pages):
    """For a child of another user: at the limit, and a page below it."""
    with live.buffer(32 * PAGE) as buf:
        or_skip(live.capture, buf)
        for less, verdict in ((0, "fits"), (1, "refused")):

            def look():
                got = live.preflight(buf, apis=["io_uring"])
                return got.verdict, got.needed, ring_register([(buf.addr, buf.length)])[0]

            said, needed, number = as_user((32 + ring_pages - less) * PAGE, look, USER + 4000 + less)
            assert (said, needed, number) == (verdict, 32 * PAGE, errno.ENOMEM if less else 0)


def test_a_child_of_fork_does_not_inherit_registrations():
    """The pins belong to the ring and its process: VmPin of a fresh child is 0, in the engine too."""
    with live.buffer(8 * PAGE) as buf:
        snapshot = or_skip(live.capture, buf)
        ring = or_skip(_Ring)
        with ring:
            assert ring.register(REGISTER, ctypes.string_at((ctypes.c_size_t * 2)(buf.addr, buf.length), 16), 1) == 0
            with child_that_waits() as child:
                theirs = live.limits(child).pinned // PAGE
    with snapshot.replay() as engine, mmc.BufferTable(engine.mm) as table:
        table.register([(buf_addr := snapshot.addr, 8 * PAGE)])
        other = engine.mm.fork()
        assert theirs == other.pinned_vm == 0 and engine.mm.pinned_vm == 8 and engine.mm.page_at(buf_addr)
        other.exit()
