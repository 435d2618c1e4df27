"""Many threads on one address space: faults, forks, munmap, collapse, reclaim, pins. Lawful at the end, and nothing lost."""
import errno
import os
import random
import struct
import sys

import pytest

import mmcore as mmc
from mm_support import ANON, HUGE, PAGE
from mmcore import MM, MMError, Memory
from support import run

LONG = os.environ.get("MMCORE_TEST_PROFILE") == "long"
ROUNDS = 5000 if LONG else 300
AREA = 4 * HUGE


@pytest.fixture(autouse=True)
def switch_often():
    """Let Python change threads as often as it can: what runs without the GIL interleaves by itself."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def lawful(mem, mm, free):
    mem.check()
    mm.exit()
    mem.check()
    stat = mem.vmstat()
    assert stat["nr_free_pages"] == free and stat["nr_foll_pin_acquired"] == stat["nr_foll_pin_released"]


@pytest.fixture(params=["never", "always"])
def mem(request):
    with Memory("192M", thp=request.param) as mem:
        mem.huge_zero_folio
        yield mem


@pytest.mark.parametrize("seed", range(3))
def test_everything_at_once(mem, seed):
    """
        writer    its own slots of the area, read back at once
        breaker   munmap and mmap of the upper half, which no writer uses
        forker    fork; the child's slots do not change while the parent writes; exit
        shaper    collapse, pageout, split by mprotect, clear_refs
        reader    pagemap and page_at, without any lock of its own
    """
    free = mem.vmstat()["nr_free_pages"]
    mm = MM(mem)
    a = mm.mmap(AREA)
    mm.madvise(a, AREA, mmc.MADV_DOFORK)
    half = AREA // 2

    def writer(slot):
        draw = random.Random(seed * 100 + slot)
        mine = {}

        def work():
            for i in range(ROUNDS * 4):
                at = a + draw.randrange(half // PAGE) * PAGE + slot * 64
                value = draw.randrange(1, 1 << 60)
                mm.write(at, struct.pack("<Q", value))
                mine[at] = value
                at = draw.choice(list(mine))
                assert struct.unpack("<Q", mm.read(at, 8))[0] == mine[at]
        return work

    def breaker():
        draw = random.Random(seed)
        for i in range(ROUNDS):
            at = a + half + draw.randrange(half // PAGE - 8) * PAGE
            mm.munmap(at, 8 * PAGE)
            mm.mmap(8 * PAGE, flags=ANON | mmc.MAP_FIXED, addr=at)
            mm.touch(at, 8 * PAGE, write=draw.random() < .7)
            if i % 10 == 0:
                mm.madvise(a + half, half, mmc.MADV_DONTNEED)

    def forker():
        draw = random.Random(seed + 1)
        for i in range(ROUNDS // 4):
            child = mm.fork()
            slots = [a + draw.randrange(half // PAGE) * PAGE + 64 * draw.randrange(2) for _ in range(5)]
            before = [child.read(at, 8) for at in slots]
            child.write(a + 8, b"child")
            for at, value in zip(slots, before):
                if at != a:
                    assert child.read(at, 8) == value
            child.exit()

    def shaper():
        draw = random.Random(seed + 2)
        for i in range(ROUNDS):
            at = a + draw.randrange(half // PAGE - 16) * PAGE
            choice = draw.randrange(4)
            try:
                if choice == 0:
                    mm.madvise(a + draw.randrange(2) * HUGE, HUGE, mmc.MADV_COLLAPSE)
                elif choice == 1:
                    mm.madvise(at, 16 * PAGE, mmc.MADV_PAGEOUT)
                elif choice == 2:
                    mm.madvise(at, 16 * PAGE, mmc.MADV_NOHUGEPAGE)
                    mm.madvise(at, 16 * PAGE, mmc.MADV_HUGEPAGE)
                else:
                    mm.clear_refs(4)
            except MMError as error:
                # Nothing there yet, or a page that another thread was just looking at.
                assert choice == 0 and error.errno in (mmc.InvalidArgument("").errno, 11)

    def reader():
        for i in range(ROUNDS):
            mm.pagemap(a, AREA // PAGE)
            mm.page_at(a + i * PAGE)
            mm.vmas

    run(writer(0), writer(1), breaker, forker, shaper, reader)
    lawful(mem, mm, free)


@pytest.mark.parametrize("seed", range(3))
def test_pins_beside_fork_and_reclaim(mem, seed):
    """A pinned page stays where its process sees it, however many forks and reclaims run beside."""
    free = mem.vmstat()["nr_free_pages"]
    mm = MM(mem)
    a = mm.mmap(HUGE)
    mm.touch(a, HUGE)
    mm.has_pinned = True

    def pinner(slot):
        def work():
            draw = random.Random(seed * 10 + slot)
            for i in range(ROUNDS):
                at = a + (draw.randrange(200) * 2 + slot) * PAGE
                mm.write(at, struct.pack("<Q", i))
                page = mm.page_at(at)
                if page is None:
                    continue        # reclaimed between the two
                try:
                    pages = mmc.PageList(mem, [page.pfn])
                    mmc.grab_pages(pages)
                except MMError:
                    continue
                # What gup-fast does: look again once it is pinned.
                if mm.page_at(at) == page and mmc.PageFlags.anon_exclusive in (page.flags | page.folio.flags):
                    mm.write(at, struct.pack("<Q", i + 1))
                    if mm.page_at(at) == page:
                        assert bytes(mmc.page_address(page)[:8]) == struct.pack("<Q", i + 1)
                mmc.unpin_user_pages(pages)
        return work

    def forker():
        for i in range(ROUNDS // 4):
            mm.fork().exit()

    def reclaimer():
        draw = random.Random(seed)
        for i in range(ROUNDS):
            mm.madvise(a + draw.randrange(480) * PAGE, 32 * PAGE, mmc.MADV_PAGEOUT)

    run(pinner(0), pinner(1), forker, reclaimer)
    lawful(mem, mm, free)


def test_truncate_beside_faults(mem):
    free = mem.vmstat()["nr_free_pages"]
    mms = [MM(mem) for _ in range(2)]
    file = mmc.File(mem, 64 * PAGE)

    def user(mm, flags):
        def work():
            a = mm.mmap(64 * PAGE, flags=flags, file=file)
            for i in range(ROUNDS * 3):
                try:
                    mm.write(a + i % 64 * PAGE, b"x")
                    mm.read(a + (i * 7) % 64 * PAGE, 1)
                except MMError as error:
                    assert "SIGBUS" in str(error)
                if i % 20 == 0:
                    mm.fork().exit()
        return work

    def cutter():
        for i in range(ROUNDS):
            file.truncate(i % 64 * PAGE)
            file.truncate(64 * PAGE)

    run(user(mms[0], mmc.MAP_SHARED), user(mms[1], mmc.MAP_PRIVATE), cutter)
    mem.check()
    for mm in mms:
        mm.exit()
    del file
    mem.check()
    assert mem.vmstat()["nr_free_pages"] == free


@pytest.mark.parametrize("what", ["fork", "mmap", "mmap of a file"])
def test_an_address_space_that_exits_meanwhile_takes_no_more(what):
    """Who waited for its lock finds it gone: no child of a family that has ended, no mapping that nobody takes away."""
    for _ in range(300):
        with Memory("4M") as mem:
            file, mm = mmc.File(mem, 4 * PAGE), MM(mem)
            mm.write(mm.mmap(4 * PAGE), b"x")
            call = {"fork": lambda: mm.fork().exit(), "mmap": lambda: mm.mmap(4 * PAGE, flags=ANON | mmc.MAP_LOCKED),
                    "mmap of a file": lambda: mm.mmap(4 * PAGE, flags=mmc.MAP_SHARED | mmc.MAP_POPULATE, file=file)}[what]
            done = []

            def attempt():
                try:
                    call()
                    done.append(0)
                except MMError as error:
                    done.append(error.errno)
            run(attempt, mm.exit, attempt)
            assert set(done) <= {0, errno.ESRCH}
            file.truncate(0)
            mem.check()
            assert mem.vmstat()["nr_free_pages"] == mem.zones[0].managed
