"""What several test files share: snapshots of a Memory, and refusals that must leave no trace."""
import contextlib
import os
import threading

import pytest

from mmcore import BadPage, MMError

ANY_REFUSAL = (MMError, BadPage, TypeError, ValueError, OverflowError)


def not_under_asan(why):
    """Skip a test that needs what AddressSanitizer takes from a process."""
    return pytest.mark.skipif(os.environ.get("MMCORE_SANITIZER") == "asan", reason=f"under AddressSanitizer {why}")


def state(mem):
    """Everything that a failed call must leave as it was: of the counters of events only what they add up to."""
    stat = mem.vmstat()
    states = {name: stat[name] for name in ("nr_free_pages", "nr_dirty", "nr_writeback")}
    states["pins"] = stat["nr_foll_pin_acquired"] - stat["nr_foll_pin_released"]
    return mem.pages.tobytes(), states, mem.buddyinfo(), mem.hugetlb_pools()


@contextlib.contextmanager
def unchanged(mem):
    """What happens inside changes nothing, and every law holds after."""
    before = state(mem)
    yield
    after = state(mem)
    assert before[1:] == after[1:]
    assert before[0] == after[0], "mem_map changed"
    mem.check()


@contextlib.contextmanager
def refused(mem, error, match=None, errno=None, pfn=None):
    """What happens inside is refused with this error, and changes nothing."""
    with unchanged(mem), pytest.raises(error, match=match) as caught:
        yield caught
    if errno is not None:
        assert caught.value.errno == errno
    if pfn is not None:
        assert caught.value.pfn == pfn


def released(mem):
    """Nothing is pinned any more, by the counters and by every folio."""
    stat = mem.vmstat()
    assert stat["nr_foll_pin_acquired"] == stat["nr_foll_pin_released"]
    mem.check()


def canonical_blocks(free, max_order):
    """Free blocks by order, given the set of free PFNs: buddies always merge, so the set says everything."""
    row = [0] * (max_order + 1)
    left = set(free)
    for order in range(max_order, -1, -1):
        size = 1 << order
        for start in sorted(pfn for pfn in left if pfn % size == 0):
            block = range(start, start + size)
            if left.issuperset(block):
                left.difference_update(block)
                row[order] += 1
    return row


def poke(mem, pfn, field, value):
    """Write a field of a struct page behind the engine's back: for states that only other parts, or bugs, make."""
    import ctypes

    from mmcore import FOLIO_DTYPE
    dtype, offset = FOLIO_DTYPE.fields[field][:2]
    pages = mem.pages
    at = pages.ctypes.data + 64 * pfn + offset
    assert 64 * pfn + offset + dtype.itemsize <= pages.nbytes
    before = int.from_bytes(ctypes.string_at(at, dtype.itemsize), "little")
    ctypes.memmove(at, (value & (1 << 8 * dtype.itemsize) - 1).to_bytes(dtype.itemsize, "little"), dtype.itemsize)
    return before


def run(*works):
    """Run each of these in a thread of its own, started together; what one raises, the test raises."""
    errors, start = [], threading.Barrier(len(works))

    def body(work):
        try:
            start.wait()
            work()
        except BaseException as e:
            errors.append(e)

    threads = [threading.Thread(target=body, args=(work,)) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
