"""Address spaces: touch, munmap and fork by kind of page and by size, and fork beside the running kernel's.

Times are the thread's processor time, and the caches are swept before each step on base pages; a first round brings the
frames into use and is not counted. The cost a page of touch, munmap and fork must be flat: the largest size is compared
with the smallest, each by its own median.
"""
import gc
import mmap
import os
import statistics
import time

import mmcore as mmc
from mmcore.core.size import format_size, parse_size

from .alloc import limit_bar
from .measure import Row, Sweeper, median_mad
from .report import progress

PAGE = 4096
HUGE = 2 << 20
FLAT = 1.20                 # the cost a page at the largest size, as a part of that at the smallest
CLOCK = time.thread_time_ns


def timed(call):
    """Return ns of processor time that a call took, and its result; the collector stays out of it."""
    start = CLOCK()
    result = call()
    return CLOCK() - start, result


def area(mm, size, huge):
    """Map an area, advised for THPs or against them."""
    addr = mm.mmap(size)
    mm.madvise(addr, size, mmc.MADV_HUGEPAGE if huge else mmc.MADV_NOHUGEPAGE)
    return addr


def life(size, huge, rounds):
    """Measure touch, fork and munmap of one area, a new one a round over the same frames; returns {step: [ns]}."""
    steps = {"touch": [], "fork": [], "exit of the child": [], "munmap": []}
    # Base pages: 1 GiB has 16 MiB of struct pages, which would still be in the caches, and those of 64 GiB not. Leaves: two
    # lines of each, 512 in 1 GiB; after a sweep one would time a cache miss, not the fault.
    sweep = Sweeper() if not huge else lambda: None
    # The child of base pages needs tables, one a 2 MiB; nothing else is copied.
    with mmc.Memory(size + size // 128 + (64 << 20)) as mem, mmc.MM(mem) as mm:
        for turn in range(rounds + 1):
            addr = area(mm, size, huge)
            sweep()
            touched, faults = timed(lambda: mm.touch(addr, size))
            if faults != size // (HUGE if huge else PAGE):
                raise RuntimeError(f"{faults} faults on {size} bytes: not the pages that were to be measured")
            sweep()
            forked, child = timed(mm.fork)
            sweep()
            left, _ = timed(child.exit)
            sweep()
            unmapped, _ = timed(lambda: mm.munmap(addr, size))
            if turn:
                for step, spent in zip(steps, (touched, forked, left, unmapped)):
                    steps[step].append(spent)
        mem.check()
    return steps


def life_rows(size, huge, rounds):
    """Return the rows of one size: ns a base page, or a leaf."""
    progress(f"{format_size(size)} of {'THP' if huge else 'base pages'}")
    entries = size // (HUGE if huge else PAGE)
    limits = {"touch": 60 if huge else 15, "munmap": None if huge else 12}
    case = f"{format_size(size)}, {'2 MiB leaves' if huge else 'base pages'}"
    rows = []
    for step, samples in life(size, huge, rounds).items():
        most = limits.get(step)
        bars = [limit_bar(median_mad(samples)[0] / entries, most, "ns")] if most else []
        rows.append(Row(case, step, entries, samples, bars))
    return rows


def flat_bars(rows):
    """Hold the largest size against the smallest: a bar on the largest one's row of each step that must be flat."""
    by_step = {}
    for row in rows:
        kind = row.case.partition(", ")[2]
        if row.variant in ("touch", "munmap", "fork"):
            by_step.setdefault((kind, row.variant), []).append(row)
    for group in by_step.values():
        if len(group) < 2:
            continue
        costs = [statistics.median(row.samples) / row.entries for row in group]
        worst = max(range(1, len(group)), key=lambda k: costs[k] / costs[0])
        ratio = costs[worst] / costs[0]
        group[worst].bars.append({"against": group[0].case.partition(",")[0], "ratio": ratio, "spread": None,
                                  "bar": f"<= {FLAT:.2f}", "met": ratio <= FLAT, "note": "flat"})


def pinned_fork(size, rounds, written):
    """Measure fork with every base page pinned: each is copied into the child, its bytes only when any were written."""
    progress(f"fork, {format_size(size)} pinned")
    nr = size // PAGE
    samples, sweep = [], Sweeper()
    with mmc.Memory(2 * size + size // 64 + (64 << 20)) as mem, mmc.MM(mem) as mm:
        addr = area(mm, size, False)
        mm.touch(addr, size)
        if written:
            for at in range(addr, addr + size, PAGE):
                mm.write(at, b"x")
        pages = mmc.PageList(mem, mm.pagemap(addr, nr) & ((1 << 55) - 1))
        mmc.grab_pages(pages)
        mm.has_pinned = True
        for turn in range(rounds + 1):
            sweep()
            spent, child = timed(mm.fork)
            child.exit()
            if turn:
                samples.append(spent)
        mmc.unpin_user_pages(pages)
        mem.check()
    return samples


def kernel_fork(size, rounds):
    """Measure the running kernel's fork() of a process with as many populated base pages; returns [ns], or why not."""
    if not hasattr(mmap, "MADV_NOHUGEPAGE"):
        return "no MADV_NOHUGEPAGE here"
    try:
        buffer = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        buffer.madvise(mmap.MADV_NOHUGEPAGE)
    except (OSError, ValueError) as error:
        return str(error)
    with buffer:
        for at in range(0, size, PAGE):
            buffer[at] = 1
        samples = []
        gc.collect()
        for _ in range(rounds + 1):
            # Wall time: the kernel's work for a fork is done in the call, but partly on nobody's account.
            start = time.perf_counter_ns()
            child = os.fork()
            if child == 0:
                os._exit(0)
            samples.append(time.perf_counter_ns() - start)
            os.waitpid(child, 0)
            # The parent's entries are read-only now: make them as they were.
            for at in range(0, size, PAGE):
                buffer[at] = 1
    return samples[1:]


def fork_rows(size, rounds):
    """Return fork's rows: nothing pinned, all pinned, and the kernel's fork() of the same."""
    entries = size // PAGE
    case = f"fork, {format_size(size)} of base pages"
    plain = life(size, False, rounds)["fork"]
    rows = [Row(case, "nothing pinned", entries, plain),
            Row(case, "all pinned, never written", entries, pinned_fork(size, rounds, False)),
            Row(case, "all pinned and written", entries, pinned_fork(size, rounds, True))]
    progress("the kernel's fork()")
    kernel = kernel_fork(size, rounds)
    if isinstance(kernel, str):
        rows.append(Row(case, "this kernel's fork()", entries, [], missing=kernel))
    else:
        rows.append(Row(case, "this kernel's fork()", entries, kernel))
        ratio = median_mad(kernel)[0] / median_mad(plain)[0]
        rows[0].bars.append({"against": "this kernel's fork()", "ratio": ratio, "spread": None, "bar": "", "met": None, "note": ""})
    return rows


def measure(rounds, smallest="1G", largest="64G", fork="1G"):
    """Measure all of it; returns rows. Sizes grow by a factor of 8 from the smallest to the largest."""
    small, large = parse_size(smallest), parse_size(largest)
    sizes = [small]
    while sizes[-1] * 8 <= large:
        sizes.append(sizes[-1] * 8)
    if sizes[-1] != large:
        sizes.append(large)
    rows = []
    for huge in (False, True):
        for size in sizes:
            rows += life_rows(size, huge, rounds)
    flat_bars(rows)
    return rows + fork_rows(parse_size(fork), rounds)
