"""Memory registration: generations of acquiring and releasing against each other, and fixed buffers against the kernel's.

`mmcore mr-test` and benchmarks/bench_mr.py both run what is here.
"""
import time
from dataclasses import dataclass
from functools import partial

import numpy as np

import mmcore as mmc

from .gup import Machine
from .measure import Bar, Row, Sweeper, Variant, interleave, median_mad, rows_of
from .report import progress

PAGE, HUGE, GIB = 4096, 2 << 20, 1 << 30
BACKINGS = {"thp": "thp", "hugetlb": "hugetlb", "devdax": "device", "4k": "base"}
SIZES = PAGE | HUGE | GIB
ACCESS = mmc.IB_ACCESS.LOCAL_WRITE | mmc.IB_ACCESS.REMOTE_WRITE | mmc.IB_ACCESS.REMOTE_READ
#: (acquire, release, how lists of "array" are walked), the oldest first.
GENERATIONS = (("list", "page", "run"), ("list", "array", "head"), ("list", "array", "run"), ("list", "range", "run"),
               ("sink", "range", "run"))
BASE = "list + page"
#: usec a round of the patches' authors, 1 GiB: before, after, what changed.
PUBLISHED = {
    "list + range": ((8480.335, 1860.786, "v3, 5 s"), (8698.367, 1845.225, "v3, 60 s")),
    "list + array, head": ((31617.923, 16426.047, "RFC 8/9, device-dax"), (10748.456, 4663.622, "RFC 8/9, hugetlbfs")),
}


def generation_name(acquire, release, lists="run"):
    """Return the name of a pair of generations."""
    return f"{acquire} + {release}" + (f", {lists}" if release == "array" else "")


class Region:
    """A populated buffer of one backing, and what registers it: one RDMA device, one process."""

    def __init__(self, size, backing):
        size = -(-size // HUGE) * HUGE if backing != "4k" else -(-size // PAGE) * PAGE
        self.machine = Machine(size, BACKINGS[backing])
        self.size, self.nr = size, size // PAGE
        self.device = mmc.IBDevice(self.machine.mem)

    def get(self, acquire):
        """Register; returns the umem."""
        return mmc.ib_umem_get(self.device, self.machine.mm, self.machine.addr, self.size, ACCESS, acquire=acquire)

    def round(self, acquire, release, lists="run"):
        """Register and deregister once."""
        mmc.ib_umem_release(self.get(acquire), release=release, lists=lists)

    def variant(self, acquire, release, lists="run"):
        """Return one round as a Variant."""
        return Variant(generation_name(acquire, release, lists), partial(self.round, acquire, release, lists))

    def close(self):
        """Give the machine back."""
        self.device = None
        self.machine.close()


def run_rounds(region, acquire, release, *, lists="run", seconds=None, rounds=None, clock=time.perf_counter_ns):
    """Register and deregister for some seconds, or so many rounds; returns plain data with the phases in usec a round.

    "map" and "unmap" are the device's part of the two, measured apart on one table after the rounds.
    """
    get, give = [], []
    start = clock()
    while len(get) < rounds if rounds else clock() - start < seconds * 1e9:
        before = clock()
        umem = region.get(acquire)
        between = clock()
        mmc.ib_umem_release(umem, release=release, lists=lists)
        get.append(between - before)
        give.append(clock() - between)
    elapsed = clock() - start
    map_ns, unmap_ns = _mapping(region, acquire, clock)
    usec = {"register": sum(get) / len(get) / 1e3, "map": map_ns / 1e3, "deregister": sum(give) / len(give) / 1e3,
            "unmap": unmap_ns / 1e3}
    return {"rounds": len(get), "seconds": elapsed / 1e9, "usec_per_round": elapsed / 1e3 / len(get), "phases": usec}


def _mapping(region, acquire, clock, rounds=5):
    umem = region.get(acquire)
    times = []
    for _ in range(rounds):
        start = clock()
        mmc.dma_unmap_sgtable(region.device, umem.sgt)
        between = clock()
        mmc.dma_map_sgtable(region.device, umem.sgt)
        times.append((clock() - between, between - start))
    mmc.ib_umem_release(umem)
    return median_mad([t[0] for t in times])[0], median_mad([t[1] for t in times])[0]


def test_region(size, backing, acquire, release, lists="run", seconds=None, rounds=None):
    """Run mr-test's scenario; returns plain data."""
    region = Region(size, backing)
    try:
        umem = region.get(acquire)
        what = {"size": region.size, "backing": backing, "acquire": acquire, "release": release, "lists": lists,
                "pages": umem.num_pages, "entries": umem.sgt.orig_nents, "segments": umem.sgt.nents,
                "best_page_size": mmc.ib_umem_find_best_pgsz(umem, SIZES, umem.address)}
        mmc.ib_umem_release(umem)
        what |= run_rounds(region, acquire, release, lists=lists, seconds=seconds, rounds=rounds)
        region.machine.mem.check()
        return what
    finally:
        region.close()


test_region.__test__ = False    # type: ignore[attr-defined]     # a test of the kernel's kind, not pytest's


def compare(size, backing, seconds=None, rounds=None, clock=time.perf_counter_ns):
    """Run all generations interleaved; returns plain data: usec a round, and the ratio to the oldest, medians of rounds."""
    region = Region(size, backing)
    try:
        variants = [region.variant(*generation) for generation in GENERATIONS]
        samples, start = {variant.name: [] for variant in variants}, clock()
        while len(samples[BASE]) < rounds if rounds else clock() - start < seconds * 1e9 or not samples[BASE]:
            for name, times in interleave(variants, 1, clock=clock).items():
                samples[name] += times
        rows = []
        for variant in variants:
            ratio, spread = median_mad(Bar(variant.name, BASE).ratios(samples))
            rows.append({"generation": variant.name, "usec_per_round": median_mad(samples[variant.name])[0] / 1e3, "ratio": ratio,
                         "spread": spread, "published": [{"before": before, "after": after, "ratio": before / after, "what": what}
                                                         for before, after, what in PUBLISHED.get(variant.name, ())]})
        return {"size": region.size, "backing": backing, "rounds": len(samples[BASE]), "against": BASE, "rows": rows}
    finally:
        region.close()


# ---- the cases of bench_mr.py -----------------------------------------------------------------------------------------------
def _note(name, backing):
    wanted = {"devdax": "device-dax", "hugetlb": "hugetlbfs", "thp": "v3"}[backing]
    figures = [f"{before / after:.2f}x ({what})" for before, after, what in PUBLISHED.get(name, ()) if wanted in what]
    return "published: " + ", ".join(figures) if figures else ""


def large_folios(setup, backing):
    """1 GiB in 2 MiB folios: all generations against the oldest."""
    region = Region(setup.size, backing)
    try:
        variants = [region.variant(*generation) for generation in GENERATIONS]
        samples = interleave(variants, setup.rounds, setup.sweep)
        least = {"list + range": 4.6, "list + array, run": 2.3, "sink + range": 15}
        bars = [Bar(variant.name, BASE, at_least=least.get(variant.name), note=_note(variant.name, backing))
                for variant in variants if variant.name != BASE]
        return rows_of(f"{backing}, register and deregister", variants, region.nr, samples, bars)
    finally:
        region.close()


def base_pages(setup):
    """1 GiB in 4 KiB pages: no generation is slower than the oldest."""
    region = Region(setup.size, "4k")
    try:
        variants = [region.variant(*generation) for generation in GENERATIONS]
        samples = interleave(variants, setup.rounds, setup.sweep)
        bars = [Bar(variant.name, BASE, at_most=1.0) for variant in variants if variant.name != BASE]
        return rows_of("4k, register and deregister", variants, region.nr, samples, bars)
    finally:
        region.close()


def best_page_size(setup):
    """A buffer on 1 GiB frames: the device's page is 1 GiB."""
    mem = mmc.Memory(4 * GIB, hugetlb={GIB: 1})
    mm = mmc.MM(mem)
    file = mmc.File(mem, GIB, "hugetlbfs", page_size=GIB)
    addr = mm.mmap(GIB, flags=mmc.MAP_SHARED, file=file)
    umem = mmc.ib_umem_get(mmc.IBDevice(mem), mm, addr, GIB, ACCESS)
    try:
        variants = [Variant("find_best_pgsz", partial(mmc.ib_umem_find_best_pgsz, umem, SIZES, addr))]
        samples = interleave(variants, setup.rounds, setup.sweep)
        size = mmc.ib_umem_find_best_pgsz(umem, SIZES, addr)
        bar = {"against": "bytes", "ratio": float(size), "spread": None, "bar": f"= {GIB}", "met": size == GIB, "note": ""}
        return [Row("1 GiB frame, best page size", "find_best_pgsz", 1, samples["find_best_pgsz"], [bar])]
    finally:
        mmc.ib_umem_release(umem)
        mm.exit()
        mem.close()


class _Ordered:
    """A process with a buffer of base pages that lie as those of a real one do."""

    def __init__(self, real):
        from mmcore.live import NotPossible, capture
        nr = real.length // PAGE
        self.mem = mmc.Memory((real.length + real.length // 256 + (256 << 20)) // HUGE * HUGE, thp="never")
        self.mm = mmc.MM(self.mem)
        self.addr = self.mm.mmap(real.length)
        try:
            # By rank: the page with the lowest PFN is touched first. Runs of the real buffer stay runs.
            order = np.argsort(np.asarray(capture(real).pfns), kind="stable").tolist()
            self.note = "pages in the real buffer's order"
        except NotPossible as reason:
            order, self.note = range(nr), f"pages in order: {reason}"
        for i in order:
            self.mm.touch(self.addr + i * PAGE, PAGE)

    def close(self):
        """Give the memory back."""
        self.mm.exit()
        self.mem.close()


def fixed_buffers(setup, backing):
    """A BufferTable against the running kernel's io_uring, on buffers of one size and order, in turn."""
    from mmcore.live import NotPossible, buffer, kernel_register
    ours, theirs = "BufferTable", "kernel, io_uring"
    cells = ("register", "unregister")
    size = min(setup.size, GIB)     # io_uring's largest buffer
    samples, missing, note, nr = {cell: {ours: [], theirs: []} for cell in cells}, "", "", size // PAGE
    try:
        with buffer(size, backing) as real:
            machine = _Ordered(real) if backing == "4k" else Machine(size, BACKINGS[backing])
            note = getattr(machine, "note", "")
            try:
                table = mmc.BufferTable(machine.mm)
                for _ in range(setup.rounds):
                    setup.sweep()
                    # Wall time on both sides: the kernel's is not to be had otherwise.
                    times = [time.perf_counter_ns()]
                    table.register([(machine.addr, real.length)])
                    times.append(time.perf_counter_ns())
                    table.unregister()
                    times.append(time.perf_counter_ns())
                    for k, cell in enumerate(cells):
                        samples[cell][ours].append(times[k + 1] - times[k])
                    if not missing:
                        setup.sweep()
                        try:
                            kernel = kernel_register(real, 1)
                        except (NotPossible, OSError) as reason:
                            missing = str(reason)
                        else:
                            samples["register"][theirs] += map(int, kernel.register_ns)
                            samples["unregister"][theirs] += map(int, kernel.unregister_ns)
            finally:
                table = None
                machine.close()
    except (NotPossible, MemoryError, OSError) as reason:
        missing = str(reason)
    rows = []
    for cell in cells:
        rows += rows_of(f"io_uring, {backing}, {cell}", [Variant(ours, None, missing="" if samples[cell][ours] else missing),
                                                        Variant(theirs, None, missing=missing)], nr, samples[cell],
                        [Bar(ours, theirs, at_least=1.0, note=note)])
    return rows


CASES = {
    "thp": partial(large_folios, backing="thp"),
    "hugetlb": partial(large_folios, backing="hugetlb"),
    "devdax": partial(large_folios, backing="devdax"),
    "4k": base_pages,
    "best page size": best_page_size,
    "io_uring, 4k": partial(fixed_buffers, backing="4k"),
    "io_uring, thp": partial(fixed_buffers, backing="thp"),
}


@dataclass
class Setup:
    """How large and how often."""

    size: int
    rounds: int
    sweep: object = None


def measure(names, size, rounds):
    """Measure cases by name; returns their rows."""
    setup = Setup(size, rounds, Sweeper())
    rows = []
    for name in names:
        progress(name)
        rows += CASES[name](setup)
    return rows
