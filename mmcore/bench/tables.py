"""The published measurements of page pinning, done again: every table in one run, old way against new way, interleaved.

An Entry is one line: scenario, before, after, their ratio here and as published, the kernel and a C peer beside.
"""
import re
import statistics
import time
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np

import mmcore as mmc

from ..live.errors import NotPossible
from . import costmodel, gup, gup_test, mr, unpin
from . import vfio as vfio_bench
from .layouts import Layout
from .measure import Sweeper, Variant, interleave, ratio_of
from .peers import Peers
from .report import machine, progress

PAGE, HUGE, GIB = 4096, 2 << 20, 1 << 30
PEERS = Path(mmc.__file__).resolve().parent.parent / "benchmarks" / "peers"     # in the repository only
ROUNDS = 9
LINUX = "io_uring"      # what the running kernel is asked for


@dataclass
class Setup:
    """How large, and how often."""

    size: int                   # of the buffers of gup_test's tables
    region: int                 # of memory registration
    kernel: int                 # of real buffers
    rounds: int
    sweep: object = None
    peers: Path = PEERS
    kernel_times: dict = field(default_factory=dict)


@dataclass
class Entry:
    """One line of a table. Samples are ns of each round for all pages; before and after ran interleaved."""

    table: str
    scenario: str
    before: str
    after: str
    pages: int
    samples: dict                       # {"before": [ns], "after": [ns]}
    published: str = ""                 # the change as its authors measured it
    published_ratio: "float | None" = None
    kernel: object = None               # ns a page of the running kernel, or why there is none
    peer: object = None                 # (name, [ns]), or why there is none

    def as_dict(self):
        """Return it as plain data; times in ns a page."""
        told = ratio_of(self.samples["before"], self.samples["after"])
        scale = 1e6 / self.pages
        measured = isinstance(self.kernel, float)
        kernel = {"ns_per_page": self.kernel} if measured else {"missing": self.kernel or "not measured"}
        if isinstance(self.peer, tuple):
            name, samples = self.peer
            beside = ratio_of(samples, self.samples["after"])
            peer = {"name": name, "ns_per_page": beside["before_ms"] * scale, "ratio": beside["ratio"],
                    "low": beside["low"],
                    "high": beside["high"], "verdict": beside["verdict"]}
        else:
            peer = {"missing": self.peer or "none in the repository"}
        return {"table": self.table, "scenario": self.scenario, "before": self.before, "after": self.after,
                "pages": self.pages,
                "before_ns_per_page": told["before_ms"] * scale, "after_ns_per_page": told["after_ms"] * scale,
                "ratio": told["ratio"],
                "low": told["low"], "high": told["high"], "verdict": told["verdict"],
                "rounds": len(self.samples["after"]),
                "published": self.published, "published_ratio": self.published_ratio, "kernel": kernel, "peer": peer,
                "samples": self.samples}


def pair(table, scenario, before, after, pages, samples, peer=None, published=None, **more):
    """Return the Entry of two variants that ran; peer: the name of a third; published: (before, after, unit, what)."""
    text, ratio = "", None
    if published:
        old, new, unit, what = published
        text, ratio = f"{old:g} -> {new:g} {unit} ({what})", old / new
    if isinstance(peer, str) and samples.get(peer):
        peer = (peer, samples[peer])
    return Entry(table, scenario, before, after, pages, {"before": samples[before], "after": samples[after]}, text,
                 ratio, peer=peer, **more)


def kernel_ns(setup, backing, phase):
    """Return ns a page that the running kernel takes to "register" or "unregister" a real buffer, or why not."""
    if backing not in setup.kernel_times:
        from mmcore.live import NotPossible, buffer, kernel_register
        try:
            with buffer(setup.kernel, backing) as real:
                setup.kernel_times[backing] = kernel_register(real, setup.rounds)
        except (NotPossible, MemoryError, OSError) as reason:
            setup.kernel_times[backing] = str(reason)
    times = setup.kernel_times[backing]
    return times if isinstance(times, str) else statistics.median(getattr(times, f"{phase}_ns")) / times.pages


# ---- the tables ------------------------------------------------------------------------------------------------------
def release_by_heads(setup):
    """gup_test of 2021: 16 GiB of THP and of 1 GiB hugetlb pages, released by list."""
    title, peers = "release of pinned lists (gup_test, 2021)", unpin.load_peers(setup.peers / "unpin.c")
    entries = []
    for scenario, backing, options in (
            ("THP", "thp", gup_test.Options("a", setup.size, advice="t")),
            ("1 GiB hugetlb", "hugetlb", gup_test.Options("a", setup.size, file="hugetlbfs:1G", shared=True)),
            ("4 KiB pages", "4k", gup_test.Options("a", min(setup.size, 4 * GIB), advice="T"))):
        buffer = gup_test.Buffer(options)
        try:
            pages = mmc.pin_user_pages_fast(buffer.mm, buffer.addr, buffer.nr, gup.WRITE)
            mmc.unpin_user_pages(pages)
            # Base pages lie in a row here as well, but nobody would know.
            layout = Layout(buffer.mem, pages, backing != "4k" and mmc.num_pages_contiguous(pages) == buffer.nr, 0)
            variants = [variant for variant in unpin.variants_of(layout, peers) if variant.name != "NumPy"]
            samples = interleave(variants, setup.rounds, setup.sweep)
            kernel = kernel_ns(setup, backing, "unregister")
            for after in [name for name in ("head", "run", "range") if name in samples]:
                published = gup_test.PUBLISHED.get((buffer.backing, "put")) if after == "head" else None
                peer = f"C {after}" if isinstance(peers, Peers) else peers
                entries.append(pair(title, scenario, "page", after, buffer.nr, samples, peer,
                                    published and (*published[:2], "ms", published[2]), kernel=kernel))
            del layout, variants, pages
        finally:
            buffer.close()
    return entries


def device_leaves(setup):
    """The RFC of 2020: device-dax in 2 MiB pages, 512 pages a call, base device pages against compound ones."""
    title = "device-dax, compound pages (RFC of 2020)"
    leaf, page = gup.Machine(setup.size, "device"), gup.Machine(setup.size, "device, base pages")
    peers = gup.peers_of(setup.peers / "gup.c", leaf)
    entries = []
    try:
        for letter, name, call, flags in (("u", "get", mmc.get_user_pages_fast, gup.WRITE),
                                          ("a", "pin", mmc.pin_user_pages_fast, gup.WRITE),
                                          ("L", "longterm pin", mmc.pin_user_pages, gup.LONGTERM)):
            variants = [gup.Calls(page, call, flags, acquire="page").variant("page"),
                        gup.Calls(leaf, call, flags, acquire="leaf").variant("leaf")]
            if isinstance(peers, str):
                peer = peers
            else:
                peer = "C leaf"
                variants.append(Variant(peer, partial(peers.take_list, int(name != "get")), peers.drop_list))
            samples = interleave(variants, setup.rounds, setup.sweep)
            for variant in variants:
                variant.before()
            published = gup_test.PUBLISHED["devdax 2M", f"get {letter}"]
            entries.append(pair(title, name, "page", "leaf", leaf.nr, samples, peer,
                                (*published[:2], "ms", published[2]),
                                kernel="no device-dax here"))
        return entries
    finally:
        if not isinstance(peers, str):
            peers.close()
        variants = None
        leaf.close()
        page.close()


RDMA = (("list + range", "v3", "thp"), ("list + array, head", "device-dax", "devdax"),
        ("list + array, head", "hugetlbfs", "hugetlb"))


def registration(setup):
    """RDMA: 1 GiB registered and deregistered; v3 of the series on THP, RFC 8/9 on device-dax and hugetlbfs."""
    title = "RDMA register + deregister (v3, RFC 8/9)"
    entries = []
    for backing in ("thp", "devdax", "hugetlb", "4k"):
        region = mr.Region(setup.region, backing)
        peers = gup.peers_of(setup.peers / "gup.c", region.machine) if backing != "4k" else None
        try:
            variants = [region.variant(*generation) for generation in mr.GENERATIONS]
            if isinstance(peers, gup.Peers):
                variants.append(Variant("C pins", peers.pin_and_drop))
            samples = interleave(variants, setup.rounds, setup.sweep)
            kernel = "no device-dax here"
            if backing != "devdax":
                times = [kernel_ns(setup, backing, phase) for phase in ("register", "unregister")]
                kernel = times[0] if isinstance(times[0], str) else sum(times)
            for variant in [variant.name for variant in variants if variant.name not in (mr.BASE, "C pins")]:
                figures = [figure for name, what, where in RDMA if (name, where) == (variant, backing)
                           for figure in mr.PUBLISHED[name] if what in figure[2]]
                published = (*figures[0][:2], "us", figures[0][2]) if figures else None
                floor = ("C pins" if isinstance(peers, gup.Peers) else peers) if variant == "sink + range" else None
                entries.append(pair(title, {"4k": "4 KiB pages", "thp": "THP"}.get(backing, backing), mr.BASE, variant,
                                    region.nr, samples,
                                    floor, published, kernel=kernel))
        finally:
            if isinstance(peers, gup.Peers):
                peers.close()
            variants = None
            region.close()
    return entries


FIGURES = re.compile(r"published:? *([\d.]+) -> ([\d.]+)")


def of_rows(title, rows):
    """Return Entries of what the other scenarios measured: each row against the rows its bars name.

    A note of a bar such as "published: 0.047 -> 0.025 s ..." gives the published ratio.
    """
    by_name = {(row.case, row.variant): row for row in rows}
    entries = []
    for row in rows:
        for bar in row.bars:
            other = by_name.get((row.case, bar["against"]))
            if other is not None and other.samples and row.samples:
                figures = FIGURES.search(bar["note"])
                published = bar["note"].partition("published")[2].lstrip(": ")
                entries.append(Entry(title, row.case, other.variant, row.variant, row.entries,
                                     {"before": other.samples, "after": row.samples}, published,
                                     float(figures[1]) / float(figures[2]) if figures else None))
    return entries


def fixed_buffers(setup):
    """io_uring's registration: the running kernel's against the engine's, on buffers of the same size and order."""
    title = "fixed buffers: the running kernel against the engine"
    entries = []
    for backing in ("4k", "thp"):
        rows = mr.fixed_buffers(mr.Setup(setup.kernel, setup.rounds, setup.sweep), backing)
        found = of_rows(title, rows)
        for entry in found:
            entry.kernel = statistics.median(entry.samples["before"]) / entry.pages
        entries += found
    return entries


def vfio(setup):
    """VFIO type1: MAP and UNMAP of the unit test vfio-pci-mem-dma-map."""
    # Its 1 GiB pages have nothing before to compare with.
    names = [name for name in vfio_bench.CASES if name != "1 GiB pages"]
    entries = of_rows("VFIO type1 (2025)", vfio_bench.measure(names, setup.size, min(setup.size, 4 * GIB), GIB, setup.rounds))
    for entry in entries:
        entry.kernel = "no VFIO device here"
    return entries


TABLES = {"release": release_by_heads, "device-dax": device_leaves, "rdma": registration, "vfio": vfio,
          "fixed buffers": fixed_buffers}


# ---- the floor under them --------------------------------------------------------------------------------------------
def floor(setup):
    """Measure what memory itself costs; returns {what: ns a page}: what does this to each page is no faster."""
    nr = 1 << 22
    pfns, out, counters = np.arange(nr, dtype=np.uint64), np.ones(nr, np.uint64), np.ones((nr, 16), np.int32)
    times = {"read a list of PFNs": [], "write a list of PFNs": [], "read one word of each struct page": []}
    jobs = (pfns.sum, partial(out.fill, 7), counters[:, 13].sum)
    for _ in range(setup.rounds):
        for name, job in zip(times, jobs):
            if setup.sweep is not None:
                setup.sweep()
            start = time.thread_time_ns()
            job()
            times[name].append(time.thread_time_ns() - start)
    return {name: statistics.median(samples) / nr for name, samples in times.items()}


def cost_model(runs):
    """Say which share of real runs lies inside the interval that the kept calibration gives; None when none is kept."""
    try:
        calibration = costmodel.Calibration.load()
    except FileNotFoundError:
        raise NotPossible("no calibration is kept", "mmcore register --calibrate") from None
    share, _ = costmodel.coverage(calibration, runs)
    return {"share_inside": share, "aim": 0.9, "calibrated": calibration.date, "doubts": calibration.doubts()}


def cost_model_words(model):
    """Return what cost_model() found as one sentence."""
    share = dict(model["share_inside"])
    runs, total = share.pop("runs"), share.pop("total")
    return (f"cost model: {100 * total:.0f} % of {runs} real runs took what the calibration of {model['calibrated']} "
            f"expects (aim {100 * model['aim']:.0f} %); by phase: "
            + ", ".join(f"{phase.replace('_', '-')} {100 * part:.0f} %" for phase, part in share.items())
            + "".join(f"; {doubt}" for doubt in model["doubts"]))


# ---- all of it -------------------------------------------------------------------------------------------------------
def measure(names=None, quick=False, rounds=ROUNDS, size=None):
    """Measure tables by name, all when there are none; returns plain data, ready for JSON."""
    setup = Setup(size or (GIB if quick else 16 * GIB), min(size or GIB, (GIB if not quick else GIB // 4)),
                  min(size or GIB, GIB if not quick else GIB // 8), rounds, Sweeper())
    began, entries, timings = time.monotonic(), [], {}
    for name in names or TABLES:
        progress(name)
        start = time.monotonic()
        entries += TABLES[name](setup)
        timings[name] = time.monotonic() - start
    missing, model = {}, None
    if not names:
        progress("the cost model against real runs")
        try:
            model = cost_model(20 if quick else 60)
        except (NotPossible, OSError, ValueError) as error:
            missing["cost model"] = str(error)
    progress("memory itself")
    return {"machine": machine(), "when": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), "rounds": rounds,
            "quick": quick,
            "size": setup.size, "region": setup.region, "kernel_buffer": setup.kernel,
            "floor_ns_per_page": floor(setup),
            "entries": [entry.as_dict() for entry in entries], "cost_model": model, "missing": missing, "seconds": time.monotonic() - began,
            "seconds_by_table": timings}


def against(new, old):
    """Compare two runs of measure() line by line; returns [{table, scenario, before, after, old_ratio, new_ratio,
    verdict}].

    "better" or "worse" when the spreads of the two ratios do not meet; else "same"; "new" or "gone" where only one has
    it.
    """
    def keyed(run):
        try:
            return {(row["table"], row["scenario"], row["before"], row["after"]): row for row in run["entries"]}
        except (TypeError, KeyError) as error:
            raise ValueError(f"not a file of `mmcore bench`: {type(error).__name__} {error}") from None

    ours, theirs = keyed(new), keyed(old)
    rows = []
    for key in dict.fromkeys([*ours, *theirs]):
        mine, before = ours.get(key), theirs.get(key)
        if mine is None or before is None:
            verdict = "new" if before is None else "gone"
        elif mine["low"] > before["high"]:
            verdict = "better"
        else:
            verdict = "worse" if mine["high"] < before["low"] else "same"
        rows.append({**dict(zip(("table", "scenario", "before", "after"), key)), "old_ratio": before
                     and before["ratio"],
                     "new_ratio": mine and mine["ratio"], "old_ns_per_page": before and before["after_ns_per_page"],
                     "new_ns_per_page": mine and mine["after_ns_per_page"], "verdict": verdict})
    return rows
