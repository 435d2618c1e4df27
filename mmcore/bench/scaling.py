"""Two threads on disjoint halves of a list: what the engine gains by a second processor, and what C gains."""
import os
import threading
import time
from dataclasses import dataclass
from functools import partial

import numpy as np

import mmcore as mmc

from . import layouts
from .measure import Row, median_mad
from .peers import Peers
from .report import progress

IN_CACHES_PAGES = (64 << 20) // 4096    # 1 MiB of struct pages
REGION_SECONDS = 0.6                    # of one call without the GIL
#: A measured scaling may be this part below the peer's before it counts as worse.
TOLERANCE = 0.05


@dataclass
class Case:
    """Two halves of a layout, as lists that name their pages again and again."""

    name: str
    build: object               # nr_pages -> Layout
    in_caches: bool             # 64 MiB of pages, and regions of REGION_SECONDS; else all pages, each list `repeat` times
    repeat: int = 1
    at_least: "float | None" = None      # the scaling that run must reach; else the C peer's own


CASES = (
    Case("2 threads, in the caches, order 0", partial(layouts.uniform, order=0), True, at_least=1.8),
    Case("2 threads, memory-bound, order 0 shuffled", partial(layouts.uniform, order=0, arrange=layouts.shuffled), False, 8),
    Case("2 threads, memory-bound, order 9", partial(layouts.uniform, order=9), False, 32),
)


def queued_ns():
    """Return how long this thread was ready to run while other processes had the processors; 0 where that is not told."""
    try:
        with open("/proc/thread-self/schedstat") as stat:
            return int(stat.read().split()[1])
    except (OSError, IndexError, ValueError):
        return 0


def together(jobs):
    """Run lists of calls, a thread each, that start at the same moment; returns ns of the thread that took longest.

    That is time on the wall, waiting for locks or the GIL included, but without what other processes took.
    """
    gate = threading.Barrier(len(jobs))
    spent = []

    def work(calls):
        gate.wait()
        queued, start = queued_ns(), time.perf_counter_ns()
        for call in calls:
            call()
        spent.append(time.perf_counter_ns() - start - (queued_ns() - queued))

    threads = [threading.Thread(target=work, args=(calls,)) for calls in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if len(spent) < len(jobs):
        raise RuntimeError("a thread of the benchmark failed; its error is above")
    return max(spent)


def available_bytes():
    """Return what lists may take: an eighth of the memory that is there."""
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 8
    except (ValueError, OSError):
        return 1 << 30


def _repeat_for(layout, seconds):
    """Return how often a half must be named for one call on it to take so long, within the memory there is."""
    half = layout.pages[:layout.nr // 2]
    best = None
    for _ in range(3):
        mmc.grab_pages(half)
        start = time.perf_counter()
        mmc.unpin_user_pages(half)
        spent = time.perf_counter() - start
        best = spent if best is None else min(best, spent)
    # A small page holds 2^21 - 1 pins.
    return max(1, min(int(seconds / best) + 1, available_bytes() // (8 * len(half)), (1 << 21) - 2))


def measure_case(case, nr_pages, rounds, peers, seconds):
    """Measure one thread on both halves, then two threads on a half each; returns rows."""
    layout = case.build(min(nr_pages, IN_CACHES_PAGES) if case.in_caches else nr_pages)
    repeat = _repeat_for(layout, seconds) if case.in_caches else case.repeat
    middle = layout.nr // 2
    halves = [mmc.PageList(layout.mem, np.tile(part, repeat))
              for part in (layout.pages.pfns[:middle], layout.pages.pfns[middle:2 * middle])]
    entries = sum(len(half) for half in halves)
    jobs = {"run": [partial(mmc.unpin_user_pages, half) for half in halves]}
    if isinstance(peers, Peers):
        jobs["C run"] = [peers.on_list("run", layout.mem, half) for half in halves]
    grabs = [[partial(mmc.grab_pages, half)] for half in halves]
    samples = {(name, nr): [] for name in jobs for nr in (1, 2)}
    order = list(samples)
    try:
        for turn in range(rounds):
            for k in range(len(order)):
                name, nr = order[(turn + k) % len(order)]
                together(grabs)
                calls = jobs[name]
                samples[name, nr].append(together([calls] if nr == 1 else [[call] for call in calls]))
    finally:
        del jobs, grabs, halves
        layout.close()
    return _rows(case, entries, samples, peers)


def _rows(case, entries, samples, peers):
    ours, theirs = ([a / b for a, b in zip(samples.get((name, 1), []), samples.get((name, 2), []))]
                    for name in ("run", "C run"))
    rows = []
    for name, scaling in (("run", ours), ("C run", theirs)):
        if not scaling:
            rows.append(Row(case.name, name, entries, [], missing=peers))
            continue
        ratio, spread = median_mad(scaling)
        bar = {"against": "1 thread", "ratio": ratio, "spread": spread, "bar": "", "met": None, "note": ""}
        bars = [bar]
        if name == "run" and case.at_least:
            bar["bar"], bar["met"] = f">= {case.at_least:g}x", ratio >= case.at_least
        elif name == "run":
            both, wide = median_mad([a / b for a, b in zip(ours, theirs)])
            least = 1 - TOLERANCE
            bars.append({"against": "C's scaling", "ratio": both, "spread": wide, "bar": f">= {least:.2f}x",
                         "met": None if both is None else both >= least, "note": ""})
        region = median_mad(samples[name, 2])[0] / 1e9
        one = Row(case.name, f"{name}, 1 thread", entries, samples[name, 1])
        two = Row(case.name, f"{name}, 2 threads", entries, samples[name, 2], bars)
        bar["note"] = f"regions of {region:.2f} s"
        rows += [one, two]
    return rows


def measure(cases, nr_pages, rounds, peers, seconds=REGION_SECONDS):
    """Measure cases one after the other; returns their rows."""
    rows = []
    for case in cases:
        progress(case.name)
        rows += measure_case(case, nr_pages, rounds, peers, seconds)
    return rows
