"""The C heap: worlds that come and go, with calls that succeed and calls that fail, leave nothing in it.

Frames, pins and charges are counted by the engine itself (test_injection.py); this looks at what it takes from malloc() and
mmap(), by the C library's own count, so that a list or a table that nobody frees is seen too.
"""
import ctypes
import gc
import os

import pytest

import mmcore as mmc
from injection_support import World
from support import not_under_asan
from test_injection import CASES

LONG = os.environ.get("MMCORE_TEST_PROFILE") == "long"
ROUNDS, WARM = (24, 8) if LONG else (8, 2)


class Mallinfo(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks",
                                                     "fordblks", "keepcost")]


def in_use():
    """Bytes in use, by malloc() and by its own mappings. Python's small objects are elsewhere."""
    info = LIBC.mallinfo2()
    return info.uordblks + info.hblkhd


def mapped():
    """Bytes of address space."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[0]) * 4096


pytestmark = not_under_asan("malloc() is another one")
try:
    LIBC = ctypes.CDLL(None)
    LIBC.mallinfo2.restype = Mallinfo
except (AttributeError, OSError):
    pytestmark = pytest.mark.skip(reason="needs mallinfo2() of glibc 2.33")


@pytest.fixture(scope="module", autouse=True)
def few_objects():
    """What other tests have left is not looked at by each collection here."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


def one(build, site):
    world = World(**getattr(build, "config", {}))
    call, undo = build(world)
    result = None
    if site is None:
        result = call()
    else:
        with world.mem.inject(site, 1):
            try:
                result = call()
            except (mmc.MMError, MemoryError):
                result = call
        if result is call:
            result = call()
    undo(result)
    del result, call, undo
    world.end()


def growth(build, site):
    """Bytes of heap and of address space that a round adds."""
    gc.collect()
    before = in_use(), mapped()
    for _ in range(ROUNDS):
        one(build, site)
    gc.collect()
    return (in_use() - before[0]) / ROUNDS, (mapped() - before[1]) / ROUNDS


@pytest.mark.parametrize("name", CASES)
def test_nothing_is_left_in_the_heap(name):
    build, sites = CASES[name]
    for site in (None, *sorted(sites)):
        for _ in range(WARM):
            one(build, site)
        # A leak of one small block a round is 16 bytes and more, each time; what Python keeps grows and shrinks now and then.
        for _ in range(6):
            heap, space = growth(build, site)
            if abs(heap) < 16 and space < 1 << 18:
                break
        else:
            raise AssertionError(f"{heap:.0f} bytes of heap and {space:.0f} of address space a round, failing: {site}")


def test_a_leak_is_seen():
    kept = []

    def build(world):
        def call():
            kept.append(ctypes.create_string_buffer(50000))
        return call, lambda _: None

    assert growth(build, None)[0] > 40000
