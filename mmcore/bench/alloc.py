"""Making a Memory, and allocating and freeing base pages in bulk."""
import mmap
import time

import numpy as np

import mmcore as mmc

from .layouts import SEED
from .measure import Row, median_mad
from .report import progress

BULK_PAGES = 1 << 20


def resident_bytes():
    """Return what this process has in memory; None where the system does not say."""
    try:
        with open("/proc/self/statm") as statm:
            return int(statm.read().split()[1]) * mmap.PAGESIZE
    except OSError:
        return None


def limit_bar(value, most, unit):
    """Return a bar as the rows carry it: a value that must not pass a limit."""
    return {"against": "", "ratio": value, "spread": None, "bar": f"<= {most} {unit}",
            "met": None if value is None else value <= most, "note": ""}


def creation(rounds, size="1T"):
    """Measure how long a Memory takes to make, and what it keeps resident; returns two rows."""
    samples, grown = [], []
    for _ in range(rounds):
        before = resident_bytes()
        start = time.perf_counter_ns()
        mem = mmc.Memory(size)
        samples.append(time.perf_counter_ns() - start)
        if before is not None:
            grown.append(resident_bytes() - before)
        mem.close()
    case = f'Memory("{size}")'
    spent = median_mad(samples)[0] / 1e6
    resident = max(grown) / (1 << 20) if grown else None
    return [
        Row(case, "creation", 1, samples, [limit_bar(spent, 10, "ms")], shown=f"{spent:.2f} ms"),
        Row(case, "resident", 1, [], [limit_bar(resident, 16, "MiB")], shown=f"{resident:.2f} MiB" if grown else "-",
            missing="" if grown else "no /proc/self/statm"),
    ]


def bulk(rounds, nr_pages=BULK_PAGES):
    """Measure alloc_pages_bulk + release_pages of base pages that were used before, in order and shuffled; rows.

    A pair is the allocation and the freeing of one page. The list is shuffled between the two, untimed.
    """
    rng = np.random.default_rng(SEED)
    clock = time.thread_time_ns
    with mmc.Memory(4096 * (nr_pages + 4096) * 2) as mem:
        mmc.release_pages(mmc.alloc_pages_bulk(mem, nr_pages))
        parts = {(order, part): [] for order in ("in order", "shuffled") for part in ("alloc", "free", "pair")}
        for _ in range(rounds):
            for order in ("in order", "shuffled"):
                start = clock()
                pages = mmc.alloc_pages_bulk(mem, nr_pages)
                got = clock() - start
                if order == "shuffled":
                    pages = mmc.PageList(mem, rng.permutation(pages.pfns))
                start = clock()
                mmc.release_pages(pages)
                freed = clock() - start
                del pages
                for part, spent in (("alloc", got), ("free", freed), ("pair", got + freed)):
                    parts[order, part].append(spent)
        mem.check()
    rows = []
    for (order, part), samples in parts.items():
        bars = []
        if part == "pair":
            most = {"in order": 15, "shuffled": 45}[order]
            bars = [limit_bar(median_mad(samples)[0] / nr_pages, most, "ns")]
        rows.append(Row(f"bulk, {nr_pages} pages, {order}", part, nr_pages, samples, bars))
    return rows


def singles(rounds, nr=1 << 14):
    """Measure folio_alloc + folio_put from Python, a pair of calls a folio, by order; rows without a bar."""
    rows = []
    with mmc.Memory("2G") as mem:
        alloc, put = mmc.folio_alloc, mmc.folio_put
        for order in (0, 4, 9):
            count = max(1, nr >> order)
            samples = []
            for _ in range(rounds):
                start = time.thread_time_ns()
                folios = [alloc(mem, order) for _ in range(count)]
                for folio in folios:
                    put(folio)
                samples.append(time.thread_time_ns() - start)
            rows.append(Row("folio_alloc + folio_put", f"order {order}, pair", count, samples))
    return rows


def measure(rounds, nr_pages=BULK_PAGES):
    """Measure all of it; returns rows."""
    rows = []
    for name, part in (("creation", creation), ("bulk", lambda n: bulk(n, nr_pages)), ("folios", singles)):
        progress(name)
        rows += part(rounds)
    return rows
