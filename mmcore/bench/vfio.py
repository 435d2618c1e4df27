"""VFIO mapping: generations of pinning and releasing against each other, and the unit test vfio-pci-mem-dma-map in the
engine.

`mmcore vfio-dma-map` and benchmarks/bench_vfio.py both run what is here.
"""
import os
import time
from dataclasses import dataclass
from functools import partial

import numpy as np

import mmcore as mmc
from mmcore.live.errors import NotPossible

from .measure import Bar, Sweeper, Variant, interleave, median_mad, rows_of
from .report import progress

PAGE, HUGE, GIB = 4096, 2 << 20, 1 << 30
IOVA = 4 * GIB                  # the unit test's
PAGE_STRUCT = 64
SEED = 20250814
CLOSE_ROUNDS = 5                # times the rounds, where two variants are close
BACKINGS = ("MADV_HUGEPAGE", "MAP_POPULATE", "HUGETLBFS")
#: (acquire, release, remember_runs), the oldest first: to 6.17, its two halves, the thread's, 6.18, and ours.
GENERATIONS = (("page", "page", False), ("batch", "page", False), ("batch", "folio", False), ("batch", "range", False),
               ("batch", "range", True), ("sink", "range", True))
BASE = "page + page"
#: Seconds (MAP, UNMAP) for 16 GiB before and after, by backing and generation: the unit test on Linux 6.15 with the
#: patches of 17 June 2025, and on 6.16 with the series of 14 August, which was merged.
PUBLISHED = {
    "MADV_HUGEPAGE": {"page + page": ((.047, .138), (.047, .138)), "batch + folio": ((.047, .138), (.028, .049)),
                      "batch + range": ((.049, .141), (.025, .044))},
    "MAP_POPULATE": {"page + page": ((.280, .312), (.280, .312)), "batch + folio": ((.280, .312), (.294, .296)),
                     "batch + range": ((.268, .307), (.249, .289))},
    "HUGETLBFS": {"page + page": ((.052, .139), (.052, .139)), "batch + folio": ((.052, .139), (.033, .049)),
                  "batch + range": ((.051, .135), (.030, .044))},
}
PUBLISHED_SIZE = 16 * GIB


def generation_name(acquire, release, remember):
    """Return the name of a generation of both."""
    return f"{acquire} + {release}{', runs' if remember else ''}"


def need_memory(size):
    """Raise NotPossible when the struct pages of a machine of this size do not fit the memory that is free here."""
    needed = size // PAGE * PAGE_STRUCT
    try:
        free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        with open("/proc/meminfo") as info:
            free = next((int(line.split()[1]) << 10 for line in info if line.startswith("MemAvailable")), free)
    except (OSError, ValueError):
        return
    if needed > free * 3 // 4:
        raise NotPossible(f"a machine of {size / GIB:g} GiB has {needed / GIB:.1f} GiB of struct pages, and "
                          f"{free / GIB:.1f} GiB are free",
                          "take a smaller size")


class Setting:
    """A Memory, a process and a container with one domain, as the unit test has them."""

    def __init__(self, size, backing, gigantic=False, shuffled=False):
        self.size, self.nr, self.backing, self.shuffled = size, size // PAGE, backing, shuffled
        need_memory(size)
        spare = (256 << 20) + (GIB if gigantic else 0)
        page = GIB if gigantic else HUGE
        pool = {page: size // page} if backing == "HUGETLBFS" else None
        self.page = page
        self.mem = mmc.Memory((size + size // 256 + spare) // HUGE * HUGE, thp="madvise", hugetlb=pool)
        self.mm = mmc.MM(self.mem)
        self.container = mmc.VFIOContainer(self.mem)
        self.domain = mmc.IOMMUDomain(self.mem)
        self.container.attach(self.domain)
        self.file = mmc.File(self.mem, size, "hugetlbfs", page_size=page) if pool else None
        self.addr = None

    def mmap(self):
        """Map the buffer as the unit test does."""
        if self.backing == "MADV_HUGEPAGE":
            self.addr = self.mm.mmap(self.size, flags=mmc.MAP_PRIVATE | mmc.MAP_ANONYMOUS)
            self.mm.madvise(self.addr, self.size, mmc.MADV_HUGEPAGE)
        elif self.backing == "MAP_POPULATE":
            populate = 0 if self.shuffled else mmc.MAP_POPULATE
            self.addr = self.mm.mmap(self.size, flags=mmc.MAP_SHARED | mmc.MAP_ANONYMOUS | populate)
        else:
            self.addr = self.mm.mmap(self.size, flags=mmc.MAP_SHARED, file=self.file)

    def populate(self):
        """Write all of it; shuffled: so that no page follows the one before."""
        if self.shuffled:
            for page in np.random.default_rng(SEED).permutation(self.nr).tolist():
                self.mm.touch(self.addr + page * PAGE, PAGE)
        else:
            self.mm.touch(self.addr, self.size)

    def map(self, acquire, remember):
        """VFIO MAP DMA."""
        self.container.remember_runs = remember
        self.container.map_dma(self.mm, self.addr, IOVA, self.size, acquire=acquire)

    def unmap(self, release):
        """VFIO UNMAP DMA."""
        self.container.unmap_dma(IOVA, self.size, release=release)

    def munmap(self):
        """Give the buffer back."""
        self.mm.munmap(self.addr, self.size)

    def close(self):
        """Give everything back."""
        self.container.close()
        self.mm.exit()
        self.file = self.container = self.domain = self.mm = None
        self.mem.close()


def run_loops(size, backing, acquire, release, remember, loops, clock=time.perf_counter, say=lambda text: None):
    """Run one phase of the unit test; returns plain data, times in seconds. say() gets a line a step of each loop."""
    setting = Setting(size, backing)
    steps = [("mmap", "mmap in", setting.mmap), ("populate", "mmap populated in", setting.populate),
             ("map", "VFIO MAP DMA in", lambda: setting.map(acquire, remember)),
             ("unmap", "VFIO UNMAP DMA in", lambda: setting.unmap(release)), ("munmap", "munmap in", setting.munmap)]
    if backing == "MAP_POPULATE":
        del steps[1]
    times = {key: [] for key, _, _ in steps}
    try:
        for loop in range(loops):
            say(f"{loop}:")
            for key, words, step in steps:
                start = clock()
                step()
                times[key].append(clock() - start)
                say(f"{words} {times[key][-1]:.3f}s")
        setting.mem.check()
        walks = setting.domain.stats["iova_to_phys"] // loops
        return {"backing": backing, "size": size, "page_size": setting.page, "acquire": acquire, "release": release,
                "remember_runs": remember, "loops": loops, "iova_to_phys": walks, "seconds": times,
                "average": {key: sum(values) / loops for key, values in times.items()}}
    finally:
        setting.close()


def compare(size, backing, loops, clock=time.thread_time_ns):
    """Run all generations interleaved on one buffer; returns plain data: ns, medians of the loops, and ratios to the
    oldest.
    """
    setting = Setting(size, backing)
    try:
        setting.mmap()
        setting.populate()
        names = [generation_name(*generation) for generation in GENERATIONS]
        times = {name: ([], []) for name in names}
        setting.map("page", False)
        setting.unmap("page")
        for turn in range(loops):
            for k in range(len(names)):
                acquire, release, remember = GENERATIONS[(turn + k) % len(names)]
                start = clock()
                setting.map(acquire, remember)
                between = clock()
                setting.unmap(release)
                both = between - start, clock() - between
                for row, took in zip(times[generation_name(acquire, release, remember)], both):
                    row.append(took)
        rows = []
        for name in names:
            row = {"generation": name}
            for what, mine, base in zip(("map", "unmap"), times[name], times[BASE]):
                row[what] = {"ns": median_mad(mine)[0], "ratio": median_mad([b / a for a, b in zip(mine, base)])[0]}
            published = PUBLISHED[backing].get(name)
            if published:
                before, after = published
                row["published"] = {"before": before, "seconds": after, "ratio": [b / a for a, b in zip(after, before)]}
            rows.append(row)
        return {"backing": backing, "size": size, "pages": setting.nr, "loops": loops, "against": BASE, "rows": rows}
    finally:
        setting.close()


# ---- the cases of bench_vfio.py --------------------------------------------------------------------------------------
@dataclass
class Within(Bar):
    """Demand a time in ms, all of it."""

    ms: float = 0

    def judge(self, samples):
        """Compare the median of the variant's own times."""
        value, spread = median_mad([sample / 1e6 for sample in samples.get(self.variant, [])])
        return {"against": self.against, "ratio": value, "spread": spread, "bar": self.text(),
                "met": None if value is None else value <= self.ms, "note": self.note}

    def text(self):
        """Return the bar as words."""
        return f"<= {self.ms:g} ms"


class Work:
    """A setting whose buffer is mapped, or not, as the next variant wants it."""

    def __init__(self, size, backing, **options):
        self.setting = Setting(size, backing, **options)
        self.setting.mmap()
        self.setting.populate()
        self.mapped = False

    def unmapped(self):
        """Before a MAP."""
        if self.mapped:
            self.setting.unmap("range")
        self.mapped = False

    def with_runs(self, remember):
        """Before an UNMAP."""
        self.unmapped()
        self.setting.map("sink", remember)
        self.mapped = True

    def map(self, acquire, remember):
        """Timed."""
        self.setting.map(acquire, remember)
        self.mapped = True

    def unmap(self, release):
        """Timed."""
        self.setting.unmap(release)
        self.mapped = False

    def maps(self):
        """Return the variants of MAP."""
        rows = (("page", "page", False), ("batch", "batch", False), ("sink", "sink", False),
                ("sink, runs kept", "sink", True))
        return [Variant(name, partial(self.map, acquire, remember), self.unmapped) for name, acquire, remember in rows]

    def unmaps(self):
        """Return the variants of UNMAP."""
        return [Variant(release + ("" if remember else ", asking"), partial(self.unmap, release),
                        partial(self.with_runs, remember))
                for remember in (True, False) for release in ("page", "folio", "range")]

    def close(self):
        """Give everything back."""
        self.setting.close()


def _published(backing, name, k):
    before, after = (times[k] for times in PUBLISHED[backing][name])
    return f"published: {before:.3f} -> {after:.3f} s for 16 GiB, {before / after:.2f}x"


def large_folios(setup, backing):
    """16 GiB in 2 MiB folios."""
    work = Work(setup.size, backing)
    try:
        maps, unmaps = work.maps(), work.unmaps()
        bars = [Bar("batch", "page", at_least=1.7, note=_published(backing, "batch + range", 0)),
                Bar("sink", "page", at_least=10),
                Bar("sink, runs kept", "page", at_least=10)]
        rows = rows_of(f"{backing}, MAP", maps, setup.size // PAGE, interleave(maps, setup.rounds, setup.sweep), bars)
        bars = [Bar("range", "page", at_least=3), Bar("range", "page, asking", at_least=10),
                Bar("folio, asking", "page, asking", note=_published(backing, "batch + folio", 1)),
                Bar("range, asking", "page, asking", note=_published(backing, "batch + range", 1)),
                Bar("range", "range, asking", note="what remembered runs spare")]
        nr = setup.size // PAGE
        rows += rows_of(f"{backing}, UNMAP", unmaps, nr, interleave(unmaps, setup.rounds, setup.sweep), bars)
        # A third of a millisecond each, which an interrupt moves by a tenth: more rounds for these two.
        close = [variant for variant in unmaps if variant.name in ("folio", "range")]
        samples = interleave(close, CLOSE_ROUNDS * setup.rounds, setup.sweep)
        return rows + rows_of(f"{backing}, UNMAP again", close, nr, samples, [Bar("folio", "range", at_most=1.15)])
    finally:
        work.close()


def base_pages(setup, shuffled=False):
    """The same in 4 KiB pages: no generation is slower than the oldest."""
    backing, size = "MAP_POPULATE", setup.base_size // 4 if shuffled else setup.base_size
    case = "4 KiB pages, scattered" if shuffled else "4 KiB pages"
    work = Work(size, backing, shuffled=shuffled)
    try:
        maps, unmaps = work.maps(), work.unmaps()
        notes = {"batch": _published(backing, "batch + range", 0)}
        bars = [Bar(variant.name, "page", at_most=1.1, note=notes.get(variant.name, "")) for variant in maps[1:]]
        rows = rows_of(f"{case}, MAP", maps, size // PAGE, interleave(maps, setup.rounds, setup.sweep), bars)
        bars = [Bar(f"{release}{how}", f"page{how}", at_most=1.1,
                    note=_published(backing, "batch + range", 1) if (release, how) == ("range", ", asking") else "")
                for how in ("", ", asking") for release in ("folio", "range")]
        return rows + rows_of(f"{case}, UNMAP", unmaps, size // PAGE,
                              interleave(unmaps, setup.rounds, setup.sweep), bars)
    finally:
        work.close()


def gigantic(setup):
    """256 GiB in 1 GiB pages."""
    case, name = f"{setup.gigantic >> 30} GiB of 1 GiB pages", "sink, runs kept"
    bars = [Within("MAP", "time", ms=.5, note="published, 256 GiB: type1 99.36 ms, with a patch that was refused 0.20 "
                                              "ms; iommufd 144.65 ms"),
            Within("UNMAP", "time", ms=.5)]
    try:
        work = Work(setup.gigantic, "HUGETLBFS", gigantic=True)
    except (NotPossible, MemoryError) as reason:
        variants = [Variant(what, None, missing=str(reason)) for what in ("MAP", "UNMAP")]
        return rows_of(case, variants, setup.gigantic // PAGE, {}, bars)
    try:
        variants = [Variant("MAP", partial(work.map, "sink", True), work.unmapped),
                    Variant("UNMAP", partial(work.unmap, "range"), partial(work.with_runs, True))]
        rows = rows_of(case, variants, setup.gigantic // PAGE, interleave(variants, setup.rounds, setup.sweep), bars)
        for row in rows:
            row.note = name
        return rows
    finally:
        work.close()


CASES = {
    "MADV_HUGEPAGE": partial(large_folios, backing="MADV_HUGEPAGE"),
    "HUGETLBFS": partial(large_folios, backing="HUGETLBFS"),
    "4 KiB pages": base_pages,
    "4 KiB pages, scattered": partial(base_pages, shuffled=True),
    "1 GiB pages": gigantic,
}


@dataclass
class Setup:
    """How large and how often."""

    size: int
    base_size: int
    gigantic: int
    rounds: int
    sweep: object = None


def measure(names, size, base_size, gigantic_size, rounds):
    """Measure cases by name; returns their rows."""
    setup = Setup(size, base_size, gigantic_size, rounds, Sweeper())
    rows = []
    for name in names:
        progress(name)
        rows += CASES[name](setup)
    return rows
