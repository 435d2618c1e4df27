"""Scatterlists: building, the sink, copies and page walks, against C peers."""
import ctypes
import importlib.machinery
import importlib.util
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np

import mmcore as mmc

from . import peers
from .measure import Bar, Sweeper, Variant, interleave, median_mad, rows_of
from .report import progress

PAGE = 4096
CHUNK_BYTES = 128 * 32
UINT_MAX = 0xffffffff
#: Why copies of a shuffled list stay behind one memcpy, however they are made.
SHUFFLED_NOTE = """\
A list of 4 KiB pages in random order is not one memcpy's work: each piece is on another page of the host, so that each
costs a page walk of its own and starts a new prefetch stream. The row is shown without a bar; the same pieces in an
order that touches neighbours soon reach it."""


@dataclass
class Limit:
    """A bar in time: a variant takes at most so many ns for each of `entries`."""

    variant: str
    most: float
    entries: int
    unit: str = "page"

    def judge(self, samples):
        """Return the bar as Bar.judge() does; the ratio is the time."""
        times = [sample / self.entries for sample in samples.get(self.variant, [])]
        value, spread = median_mad(times)
        return {"against": f"ns/{self.unit}", "ratio": value, "spread": spread, "bar": f"<= {self.most:g} ns",
                "met": None if value is None else value <= self.most, "note": ""}


class Peers:
    """The functions of sg.c."""

    def __init__(self, source):
        self.library = ctypes.CDLL(str(peers.build(source)))
        for name, arguments in (("build_twice", "puup"), ("build_once", "puup"), ("copy", "ppu"), ("walk", "pu")):
            function = getattr(self.library, "peer_" + name)
            function.restype = ctypes.c_int64
            function.argtypes = [{"p": ctypes.c_void_p, "u": ctypes.c_uint64}[letter] for letter in arguments]
            setattr(self, name, function)


def cython_module(source):
    """Compile a .pyx file on the engine's declarations and return the module. Raises peers.NoPeers when it cannot be."""
    name = source.stem
    if importlib.util.find_spec("Cython") is None:
        raise peers.NoPeers("no Cython")
    folder = Path(tempfile.mkdtemp(prefix="mmcore-bench-"))
    try:
        package = str(Path(mmc.__file__).parent.parent)
        done = subprocess.run([sys.executable, "-m", "cython", "-3", "-I", package, str(source), "-o", str(folder / "module.c")],
                              capture_output=True, text=True)
        if done.returncode:
            raise peers.NoPeers(f"{source.name} does not compile: {done.stderr.strip().splitlines()[-1:]}")
        target = folder / f"{name}.so"
        command = [*peers.compiler(), *peers.flags(), f"-I{peers.INCLUDE}", f"-I{sysconfig.get_path('include')}",
                   str(folder / "module.c"), "-o", str(target)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise peers.NoPeers(f"{name}.c does not compile: {done.stderr.strip().splitlines()[-1:]}")
        loader = importlib.machinery.ExtensionFileLoader(name, str(target))
        module = importlib.util.module_from_spec(importlib.util.spec_from_loader(name, loader))
        loader.exec_module(module)
        return module
    finally:
        shutil.rmtree(folder, ignore_errors=True)


class Bench:
    """What all cases share: sizes, peers, and one Memory that is large enough."""

    def __init__(self, nr_pages, rounds, folder):
        self.nr, self.rounds = nr_pages, rounds
        self.sweep = Sweeper()
        self.mem = mmc.Memory((2 * nr_pages + (1 << 18)) * PAGE)
        self.folder = Path(folder)
        try:
            self.peers, self.missing = Peers(self.folder / "sg.c"), ""
        except peers.NoPeers as reason:
            self.peers, self.missing = None, str(reason)

    def peer(self, name, run, before=None):
        """Return a variant that needs the C peers."""
        return Variant(name, run if self.peers else None, before, missing=self.missing)

    def rows(self, case, variants, entries, bars, rounds=None):
        """Measure and return rows."""
        samples = interleave(variants, rounds or self.rounds, self.sweep)
        return rows_of(case, variants, entries, samples, bars)

    # -- building
    def build(self, case, pfns, max_segment, limit=None, bar=1.10):
        """Measure one list, built at once. limit: ns a page; bar: against the same algorithm in C."""
        nr, most = len(pfns), min(max_segment, UINT_MAX) // PAGE
        pages = mmc.PageList(self.mem, pfns)
        arena = np.zeros((nr + nr // 64 + 256) * 32, np.uint8)
        address, where = pages.pfns.ctypes.data, arena.ctypes.data + 32
        wanted = len(mmc.sg_alloc_table_from_pages_segment(pages, 0, nr * PAGE, max_segment))
        kept = []

        def ours():
            kept[:] = [mmc.sg_alloc_table_from_pages_segment(pages, 0, nr * PAGE, max_segment)]

        def check(run):
            def call():
                if run(address, nr, most, where) != wanted:
                    raise RuntimeError("the peer and the engine disagree on the number of entries")
            return call
        variants = [Variant("engine", ours, kept.clear),
                    self.peer("C once", self.peers and check(self.peers.build_once)),
                    self.peer("C twice", self.peers and check(self.peers.build_twice))]
        bars = [Bar("engine", "C once", at_most=bar), Bar("engine", "C twice")]
        if limit:
            bars.append(Limit("engine", limit, nr))
        return self.rows(case, variants, nr, bars)

    def contiguous(self):
        """4 Mi pages in a row."""
        return self.build("build, contiguous", np.arange(16, 16 + self.nr), UINT_MAX, 0.6)

    def contiguous_short(self):
        """The same in entries of 64 KiB."""
        return self.build("build, contiguous, 64 KiB entries", np.arange(16, 16 + self.nr), 65536)

    def scattered(self):
        """No page follows another."""
        return self.build("build, scattered", np.arange(16, 16 + 2 * self.nr, 2), UINT_MAX)

    def runs(self):
        """Runs of 16 pages."""
        at = np.arange(self.nr)
        return self.build("build, runs of 16", 16 + at + at // 16, UINT_MAX, bar=None)

    # -- the sink
    def sink(self):
        """Pin leaves of 2 MiB and build the table: by a list of pages, and straight from the leaves."""
        nr = max(self.nr // 512, 8)
        mem = mmc.Memory((nr + 2) * 1024 * PAGE)
        starts = [(2 * i + 1) * 512 for i in range(nr)]
        mmc.folios_alloc_at(mem, starts, [9] * nr)
        leaves = mmc.PageRanges(mem, starts, [512] * nr)
        size, kept = nr * 512 * PAGE, []

        def by_list():
            pages = leaves.to_pagelist()                # what a pin call that fills a list writes
            mmc.grab_pages(pages)
            kept.append(mmc.sg_alloc_table_from_pages(pages, 0, size))

        def by_leaf():
            mmc.grab_pages(leaves)
            kept.append(mmc.sg_alloc_table_from_pages(leaves, 0, size))

        def back():
            if kept:
                mmc.unpin_user_pages(leaves)
                kept.clear()
        try:
            variants = [Variant("sink", by_leaf, back), Variant("list", by_list, back)]
            rows = self.rows("pin and build 2 MiB leaves (ns a leaf)", variants, nr,
                             [Bar("sink", "list", at_least=6), Limit("sink", 60, nr, "leaf")], max(self.rounds, 5))
            back()
            return rows
        finally:
            mem.close()

    # -- copies
    def copies(self):
        """Copy to and from a buffer: 4 KiB and 2 MiB entries against one memcpy."""
        size = min(self.nr // 16, 1 << 18) * PAGE
        mem = mmc.Memory(size + (64 << 20))
        pages = mmc.alloc_pages_bulk(mem, size // PAGE)
        pfns = pages.pfns
        order = np.random.default_rng(1).permutation(len(pfns))
        tables = {
            "2 MiB": mmc.sg_alloc_table_from_pages_segment(pages, 0, size, 2 << 20),
            # Neighbours swapped: every entry is one page.
            "4 KiB": mmc.sg_alloc_table_from_pages(mmc.PageList(mem, pfns.reshape(-1, 2)[:, ::-1].ravel()), 0, size),
            "4 KiB, shuffled": mmc.sg_alloc_table_from_pages(mmc.PageList(mem, pfns[order]), 0, size),
        }
        near, far = np.ones(size, np.uint8), np.ones(size, np.uint8)
        mmc.sg_copy_from_buffer(tables["2 MiB"], near)
        rows = []
        for name, copy, wanted in (("to", mmc.sg_copy_to_buffer, near), ("from", mmc.sg_copy_from_buffer, near)):
            variants = [Variant(entry, lambda copy=copy, table=table: copy(table, wanted)) for entry, table in tables.items()]
            variants.append(self.peer("C memcpy", self.peers and (
                lambda: self.peers.copy(near.ctypes.data, far.ctypes.data, size))))
            # At least 0.9 times as fast.
            bars = [Bar(entry, "C memcpy", at_least=0.9) for entry in ("2 MiB", "4 KiB")]
            bars.append(Bar("4 KiB, shuffled", "C memcpy"))
            rows += self.rows(f"sg_copy_{name}_buffer, {size >> 20} MiB", variants, size // PAGE, bars)
        del variants, tables, pages, pfns
        mem.close()
        return rows

    # -- page walks
    def walks(self):
        """Walk the pages: the iterator in Cython, its bulk form in Python, over long entries and single pages."""
        try:
            module, missing = cython_module(self.folder / "sgwalk.pyx"), ""
            walk = module.walk
        except peers.NoPeers as reason:
            module, walk, missing = None, None, str(reason)
        rows = []
        for name, pfns in (("512-page entries", 16 + np.arange(self.nr) + np.arange(self.nr) // 512),
                           ("single pages", np.arange(16, 16 + 2 * self.nr, 2))):
            table = mmc.sg_alloc_table_from_pages(mmc.PageList(self.mem, pfns), 0, len(pfns) * PAGE)
            kept = []
            variants = [Variant("iterator", walk and (lambda: walk(table)), missing=missing),
                        Variant("C iterator", module and self.peers and (
                            lambda: self.peers.walk(module.first_slot(table), len(table))), missing=missing or self.missing),
                        Variant("bulk", lambda: kept.append(mmc.sg_page_pfns(table)), kept.clear)]
            if walk and walk(table) != int(pfns.sum()):
                raise RuntimeError("the walk missed pages")
            bars = [Limit("iterator", 2, self.nr), Bar("iterator", "C iterator"), Limit("bulk", 5, self.nr)]
            rows += self.rows(f"pages of {name}", variants, self.nr, bars)
            del variants
            kept.clear()
            mmc.sg_free_table(table)
        return rows


CASES = ("contiguous", "contiguous_short", "scattered", "runs", "sink", "copies", "walks")


def measure(names, nr_pages, rounds, folder):
    """Measure cases by name and return their rows. folder: where sg.c and sgwalk.pyx are."""
    bench, rows = Bench(nr_pages, rounds, folder), []
    for name in names:
        progress(name)
        rows += getattr(bench, name)()
    return rows
