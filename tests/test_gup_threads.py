"""Pins against everything that may take pages away meanwhile. Each race ends lawful: content, counters, no pin left."""
import os
import random
import sys
import threading
import time

import pytest

from gup_support import *

TURNS = 200
SEEDS = range(200 if os.environ.get("MMCORE_TEST_PROFILE") == "long" else 12)


@pytest.fixture(autouse=True)
def switch_often():
    old = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(old)


def race(*jobs):
    """Run jobs at once; the first exception of any of them is raised here."""
    errors, start = [], threading.Barrier(len(jobs))

    def run(job):
        start.wait()
        try:
            job()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(job,)) for job in jobs]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    if errors:
        raise errors[0]


def pinner(mm, addr, nr, rng, turns=200, flags=FOLL_WRITE, calls=PINS, look=None):
    """Pin parts of a range and release them, whatever happens to it."""
    def job():
        for _ in range(turns):
            first = rng.randrange(nr)
            call = rng.choice(calls)
            try:
                pages = call(mm, addr + first * PAGE, rng.randint(1, nr - first), flags, acquire=rng.choice(GENERATIONS))
            except MMError:
                continue
            if look is not None:
                look(first, pages)
            assert all(page.refcount > 0 for page in pages)
            unpin_user_pages(pages)
    return job


@pytest.mark.parametrize("thp", (False, True))
@pytest.mark.parametrize("seed", SEEDS)
def test_fork(seed, thp):
    """What is pinned is never write-protected and shared: the parent's next write reaches the pinned page."""
    rng = random.Random(seed)
    with machine("48M", movable=0, cma=0) as mem:
        mm = MM(mem)
        addr, nr = mm.mmap(HUGE), 16
        mm.madvise(addr, HUGE, MADV_HUGEPAGE if thp else MADV_NOHUGEPAGE)
        mm.touch(addr, nr * PAGE)
        mine = threading.Lock()

        def look(first, pages):
            # Reads and writes of the process and of the device are one memory, as long as the pin lasts.
            with mine:
                for i, page in enumerate(pages):
                    mm.write(addr + (first + i) * PAGE, bytes([rng.randrange(256)]))
                    assert mm.page_at(addr + (first + i) * PAGE) == page
                    assert page_address(page)[0] == mm.read(addr + (first + i) * PAGE, 1)[0]

        def forker():
            for _ in range(TURNS // 2):
                child = mm.fork()
                child.read(addr, PAGE)
                child.write(addr, b"child")
                child.exit()

        race(forker, pinner(mm, addr, nr, random.Random(seed + 1), 150, look=look),
             pinner(mm, addr, nr, random.Random(seed + 2), 150, flags=0))
        over(mem, mm)


@pytest.mark.parametrize("thp", (False, True))
@pytest.mark.parametrize("seed", SEEDS)
def test_munmap(seed, thp):
    rng = random.Random(seed)
    with machine("48M") as mem:
        mm = MM(mem)
        addr = mm.mmap(2 * HUGE)
        mm.madvise(addr, 2 * HUGE, MADV_HUGEPAGE if thp else MADV_NOHUGEPAGE)

        def unmapper():
            for _ in range(TURNS):
                at = addr + rng.randrange(1024) * PAGE
                size = min(rng.choice((1, 3, 100, 512)) * PAGE, addr + 2 * HUGE - at)
                mm.munmap(at, size)
                mm.mmap(size, flags=MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, addr=at)

        race(unmapper, pinner(mm, addr, 1024, random.Random(seed + 1)), pinner(mm, addr, 1024, random.Random(seed + 2), flags=0))
        over(mem, mm)


@pytest.mark.parametrize("seed", SEEDS)
def test_thp_split_and_collapse(seed):
    with machine("64M", movable=0, cma=0) as mem:
        mm = MM(mem)
        addr = mm.mmap(2 * HUGE)
        mm.madvise(addr, 2 * HUGE, MADV_HUGEPAGE)
        mm.touch(addr, 2 * HUGE)
        for i in range(0, 1024, 37):
            mm.write(addr + i * PAGE, i.to_bytes(2, "little"))

        def look(first, pages):
            for i in range(first + (-first) % 37, first + len(pages), 37):
                assert bytes(page_address(pages[i - first])[:2]) == i.to_bytes(2, "little")

        def splitter():
            rng = random.Random(seed)
            for _ in range(TURNS):
                at = addr + rng.randrange(1024) * PAGE
                pages = get_user_pages(mm, at, 1, FOLL_SPLIT_PMD)
                try:
                    # Our reference is the one that a split expects; each piece comes with one of ours.
                    pieces = folio_split(pages[0].folio) if rng.random() < 0.5 else None
                except MMError:
                    pieces = None
                if pieces is None:
                    release_pages(pages)
                else:
                    folios_put(pieces)

        def collapser():
            rng = random.Random(seed + 9)
            for _ in range(TURNS):
                try:
                    mm.madvise(addr + rng.randrange(2) * HUGE, HUGE, MADV_COLLAPSE)
                except MMError:
                    pass

        race(splitter, collapser, pinner(mm, addr, 1024, random.Random(seed + 1), 150, look=look),
             pinner(mm, addr, 1024, random.Random(seed + 2), 150, flags=0, look=look))
        over(mem, mm)


@pytest.mark.parametrize("kind", ("tmpfs", "ext4", "hugetlbfs"))
@pytest.mark.parametrize("seed", SEEDS)
def test_truncate(seed, kind):
    rng = random.Random(seed)
    with machine("48M") as mem:
        mm = MM(mem)
        size = 2 * HUGE if kind == "hugetlbfs" else 64 * PAGE
        step = HUGE if kind == "hugetlbfs" else PAGE
        file = File(mem, size, kind)
        addr = mm.mmap(size, flags=MAP_SHARED, file=file)

        def truncater():
            for _ in range(TURNS):
                file.truncate(rng.randrange(size // step) * step)
                file.truncate(size)

        longterm = int(FOLL_LONGTERM) if kind != "ext4" else 0
        race(truncater, pinner(mm, addr, size // PAGE, random.Random(seed + 1)),
             pinner(mm, addr, size // PAGE, random.Random(seed + 2), flags=int(FOLL_WRITE) | longterm))
        mm.munmap(addr, size)
        file.truncate(0)
        over(mem, mm)


@pytest.mark.parametrize("thp", (False, True))
@pytest.mark.parametrize("seed", SEEDS)
def test_longterm_migration(seed, thp):
    """Pages move out of Movable memory while others write, fork and pin: no byte is lost, and no pin is left in Movable."""
    with machine("64M") as mem:
        mm = MM(mem)
        addr, nr = mm.mmap(HUGE), 32
        mm.madvise(addr, HUGE, MADV_HUGEPAGE if thp else MADV_NOHUGEPAGE)
        for i in range(nr):
            mm.write(addr + i * PAGE, bytes([0, i]))

        def look(first, pages):
            assert all(folio_is_longterm_pinnable(page.folio) for page in pages)

        def writer():
            for turn in range(TURNS):
                for i in range(0, nr, 5):
                    mm.write(addr + i * PAGE, bytes([turn]))
                    assert mm.read(addr + i * PAGE, 2) == bytes([turn, i])

        def forker():
            rng = random.Random(seed)
            for _ in range(TURNS // 4):
                child = mm.fork()
                for i in range(nr):
                    assert child.read(addr + i * PAGE + 1, 1) == bytes([i])
                if rng.random() < 0.5:
                    child.touch(addr, nr * PAGE)
                child.exit()

        race(writer, forker, pinner(mm, addr, nr, random.Random(seed + 1), 100, flags=FOLL_WRITE | FOLL_LONGTERM, look=look),
             pinner(mm, addr, nr, random.Random(seed + 2), 100, flags=FOLL_LONGTERM, look=look))
        assert all(mm.read(addr + i * PAGE + 1, 1) == bytes([i]) for i in range(nr))
        over(mem, mm)


@pytest.mark.parametrize("seed", SEEDS)
def test_file_pages_move_while_many_use_them(seed):
    with machine("64M") as mem:
        file = File(mem, 32 * PAGE)
        file.write(0, b"".join(bytes([i]) * PAGE for i in range(32)))
        users = [MM(mem) for _ in range(3)]
        places = [mm.mmap(32 * PAGE, flags=MAP_SHARED, file=file) for mm in users]

        def look(first, pages):
            assert all(bytes(page_address(page)[:1]) == bytes([first + i]) for i, page in enumerate(pages))

        def mover():
            rng = random.Random(seed)
            for _ in range(TURNS):
                page = file.page_at(rng.randrange(32) * PAGE)
                if page is not None and folio_try_get(page.folio):
                    try:
                        folio_put(migrate_folio_longterm(page.folio))
                    except MMError:
                        folio_put(page.folio)

        race(mover, *(pinner(mm, addr, 32, random.Random(seed + i), 100, flags=flags, look=look) for i, (mm, addr, flags) in
                      enumerate(zip(users, places, (FOLL_WRITE, FOLL_LONGTERM, FOLL_WRITE | FOLL_LONGTERM)))))
        assert file.read(0, 32 * PAGE) == b"".join(bytes([i]) * PAGE for i in range(32))
        for mm in users:
            mm.exit()
        file.truncate(0)
        over(mem)


@pytest.mark.parametrize("seed", SEEDS)
def test_reclaim(seed):
    with machine("48M") as mem:
        mm = MM(mem)
        addr = mm.mmap(64 * PAGE)
        for i in range(64):
            mm.write(addr + i * PAGE, bytes([i + 1]))

        def look(first, pages):
            assert all(page_address(page)[0] == first + i + 1 for i, page in enumerate(pages))

        def reclaimer():
            rng = random.Random(seed)
            for _ in range(TURNS):
                first = rng.randrange(64)
                mm.madvise(addr + first * PAGE, rng.randint(1, 64 - first) * PAGE, MADV_PAGEOUT)

        race(reclaimer, pinner(mm, addr, 64, random.Random(seed + 1), look=look),
             pinner(mm, addr, 64, random.Random(seed + 2), flags=FOLL_LONGTERM, look=look))
        assert all(mm.read(addr + i * PAGE, 1) == bytes([i + 1]) for i in range(64))
        over(mem, mm)


@pytest.mark.parametrize("seed", range(4))
def test_many_pinners_of_one_range_and_their_counters(seed):
    with machine("48M", movable=0, cma=0) as mem:
        mm = MM(mem)
        addr = mm.mmap(HUGE + 64 * PAGE)
        mm.madvise(addr, HUGE, MADV_HUGEPAGE)
        race(*(pinner(mm, addr, 512 + 64, random.Random(seed * 10 + i), 200, flags=flags)
               for i, flags in enumerate((FOLL_WRITE, 0, FOLL_WRITE | FOLL_LONGTERM, FOLL_LONGTERM))))
        over(mem, mm)


@pytest.mark.parametrize("output", (PageList, PageRanges))
def test_long_fast_walks_against_fork_and_truncation_of_their_tables(output):
    """Walks that take long enough to be met in the middle: fork's number changes under them, tables are unlinked."""
    with machine("160M", movable=0, cma=0) as mem:
        mm = MM(mem)
        size, nr = 32 << 20, 8192
        addr = mm.mmap(size)
        mm.madvise(addr, size, MADV_NOHUGEPAGE)
        mm.touch(addr, size)
        other = mm.mmap(size)
        done = threading.Event()

        def forker():
            for _ in range(15):
                child = mm.fork()
                child.exit()
                mm.munmap(other, size)
                mm.mmap(size, flags=MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, addr=other)
            done.set()

        def pin(seed):
            rng = random.Random(seed)

            def job():
                while not done.is_set():
                    pages = pin_user_pages_fast(mm, addr, nr, FOLL_WRITE, output=output)
                    pfns = (pages.to_pagelist() if output is PageRanges else pages).pfns
                    assert len(pfns) == nr
                    for i in rng.sample(range(nr), 10):
                        mm.write(addr + i * PAGE, b"seen")
                        assert mm.page_at(addr + i * PAGE).pfn == pfns[i]
                    unpin_user_pages(pages)
                    try:
                        unpin_user_pages(pin_user_pages_fast(mm, other, nr, FOLL_WRITE, acquire="page"))
                    except MMError:
                        pass
            return job

        race(forker, pin(1), pin(2))
        over(mem, mm)


def test_a_page_by_page_pin_of_a_file_beside_forks_of_its_process():
    """
        pinner    holds a table's lock, asks the registry what file this is
        forker    holds the family's lock, waits for the table's
        exiter    leaves the family: waits for the family's lock, and must not hold the registry's meanwhile

    Found by `mmcore stress --mix longterm,fault,fork`. Daemons: threads that wait for each other for ever would keep pytest.
    """
    mem = Memory("128M", movable=0, cma=0)
    mm, files = MM(mem), [File(mem, 256 * PAGE) for _ in range(2)]
    # One table: pages of two files in turn, so that each is asked for, and anonymous ones, so that fork wants its lock.
    shared = mm.mmap(HUGE)
    mm.madvise(shared, HUGE, MADV_NOHUGEPAGE)
    for i in range(256):
        mm.mmap(PAGE, flags=MAP_SHARED | MAP_FIXED, file=files[i % 2], offset=i * PAGE, addr=shared + i * PAGE)
    mm.touch(shared, HUGE)
    # Below it, so that fork holds the family's lock for long before it comes to the table.
    first = mm.mmap(8 * HUGE)
    mm.madvise(first, 8 * HUGE, MADV_NOHUGEPAGE)
    mm.touch(first, 8 * HUGE)
    assert first < shared
    errors = []

    def guarded(job):
        def run():
            try:
                for _ in range(TURNS * 2):
                    job()
            except BaseException as error:
                errors.append(error)
        return threading.Thread(target=run, daemon=True)

    def pin():
        unpin_user_pages(pin_user_pages_fast(mm, shared, 256, FOLL_WRITE | FOLL_LONGTERM, acquire="page"))

    threads = [guarded(lambda: mm.fork().exit()) for _ in range(3)] + [guarded(pin) for _ in range(2)]
    [thread.start() for thread in threads]
    deadline = time.monotonic() + 60
    [thread.join(max(0, deadline - time.monotonic())) for thread in threads]
    assert not any(thread.is_alive() for thread in threads), "threads wait for each other"
    assert not errors
    mm.munmap(shared, HUGE)
    for file in files:
        file.truncate(0)
    over(mem, mm)
    mem.close()
