"""The benchmarks run, their output keeps its shape, and the C peers do what the engine does. No time is asserted."""
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import mmcore as mmc
from mmcore.bench import layouts, measure, report, scaling
from mmcore.bench.peers import NoPeers, Peers

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "benchmarks" / "peers" / "unpin.c"

pytestmark = pytest.mark.skipif(not SOURCE.exists(), reason="the benchmarks are not in this tree")


@pytest.fixture(scope="module")
def peers():
    try:
        return Peers(SOURCE)
    except NoPeers as reason:
        pytest.skip(str(reason))


def bench(script, *args, **environ):
    return subprocess.run([sys.executable, str(ROOT / "benchmarks" / script), *args], capture_output=True, text=True,
                          env={**os.environ, **environ}, timeout=300)


def state(mem):
    return mem.pages.tobytes()


# ---- output ----------------------------------------------------------------------------------------------------------
def test_table_and_json(tmp_path, peers):
    out = tmp_path / "rows.json"
    done = bench("bench_unpin.py", "--pages", "4096", "--rounds", "1", "--case", "order 4", "--json", str(out))
    assert done.returncode == 0, done.stderr
    head = next(line for line in done.stdout.splitlines() if line.startswith("case"))
    assert head.split() == ["case", "variant", "ns/page", "mad", "against", "ratio", "must", "reach", "met"]
    assert "bars met" in done.stdout
    rows = json.loads(out.read_text())
    assert [row["variant"] for row in rows] == ["run", "head", "page", "range", "C run", "C head", "C page", "C range",
                                                "NumPy"]
    for row in rows:
        assert {"case", "variant", "ns_per_page", "median", "mad", "rounds"} <= set(row)
        assert row["case"] == "order 4" and row["rounds"] == 1 and row["entries"] == 4096
        assert row["ns_per_page"] > 0 and row["mad"] == 0
        assert row["variant"] in done.stdout
    assert [bar["against"] for bar in rows[0]["bars"]] == ["C head", "page", "C run"]
    assert all(isinstance(bar["met"], bool) for bar in rows[0]["bars"])


def test_json_alone_and_threads():
    done = bench("bench_unpin.py", "--quick", "--pages", "4096", "--rounds", "1", "--case", "memory-bound, order 9",
                 "--json", "-")
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)
    if os.cpu_count() > 1:
        assert [row["variant"] for row in rows][:2] == ["run, 1 thread", "run, 2 threads"]
        assert rows[1]["bars"][0]["against"] == "1 thread"


def test_without_a_compiler_the_peers_say_so():
    done = bench("bench_unpin.py", "--pages", "4096", "--rounds", "1", "--case", "order 0, shuffled", "--json", "-",
                 CC="/nonexistent/cc")
    rows = {row["variant"]: row for row in json.loads(done.stdout)}
    assert rows["C run"]["ns_per_page"] is None and "no C compiler" in rows["C run"]["missing"]
    assert rows["run"]["ns_per_page"] > 0
    assert {bar["against"]: bar["met"] is None for bar in rows["run"]["bars"]} == \
        {"C head": True, "page": False, "C run": True}


@pytest.mark.parametrize("args", [["--case", "no such case"], ["--pages", "many"], ["--rounds", "0"]])
def test_wrong_options(args):
    done = bench("bench_unpin.py", *args)
    assert done.returncode == 2 and not done.stdout


def test_alloc(tmp_path):
    out = tmp_path / "rows.json"
    done = bench("bench_alloc.py", "--pages", "1000", "--rounds", "1", "--json", str(out))
    assert done.returncode == 0, done.stderr
    rows = json.loads(out.read_text())
    assert [row["variant"] for row in rows if row["bars"]] == ["creation", "resident", "pair", "pair"]
    assert "of 4 bars met" in done.stdout or "not measured" in done.stdout


def test_bars_and_numbers():
    samples = {"a": [1.0, 2.0, 4.0], "b": [4.0, 6.0, 8.0]}
    fast = measure.Bar("a", "b", at_least=3).judge(samples)
    assert (fast["ratio"], fast["spread"], fast["met"], fast["bar"]) == (3, 1, True, ">= 3x")
    slow = measure.Bar("b", "a", at_most=1.05).judge(samples)
    assert (slow["ratio"], slow["met"], slow["bar"]) == (3, False, "<= 1.05")
    assert measure.Bar("a", "c", at_least=1).judge(samples)["met"] is None
    assert measure.Bar("a", "b").judge(samples)["met"] is None
    assert [report.number(x) for x in (None, 0.0123, 1.5, 123.4)] == ["-", "0.012", "1.50", "123"]


def test_every_variant_runs_once_a_round_in_rotating_order():
    order = []
    variants = [measure.Variant(name, lambda name=name: order.append(name)) for name in "abc"]
    variants.append(measure.Variant("d", None, missing="not here"))
    samples = measure.interleave(variants, 3)
    assert "".join(order) == "abcbcacab"
    assert {name: len(values) for name, values in samples.items()} == {"a": 3, "b": 3, "c": 3}


# ---- layouts ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("build, nr_folios", [
    (lambda: layouts.uniform(4096, 0), 4096),
    (lambda: layouts.uniform(4096, 0, layouts.shuffled), 4096),
    (lambda: layouts.uniform(4096, 3), 512),
    (lambda: layouts.uniform(4096, 9, layouts.backwards), 8),
    (lambda: layouts.uniform(4096, 9, layouts.folios_backwards), 8),
    (lambda: layouts.uniform(4096, 9, layouts.permuted_inside), 8),
    (lambda: layouts.uniform(4096, 11), 2),
])
def test_uniform_layouts(build, nr_folios):
    layout = build()
    pfns = layout.pages.pfns
    assert layout.nr == 4096 == len(np.unique(pfns)) and layout.nr_folios == nr_folios
    heads, _ = mmc.folio_runs(mmc.PageList(layout.mem, np.sort(pfns)))
    assert len(heads) == nr_folios
    assert layout.contiguous == bool((np.diff(pfns.astype(np.int64)) == 1).all())
    del pfns
    layout.close()


@pytest.mark.parametrize("equal_by", ["folio", "page"])
@pytest.mark.parametrize("shuffle", [False, True])
def test_mixed_layouts(equal_by, shuffle):
    layout = layouts.mixed(1 << 16, equal_by, shuffle)
    heads, counts = mmc.folio_runs(layout.pages)
    assert len(heads) == layout.nr_folios == len(np.unique(heads))
    assert (1 << 16) - 512 <= layout.nr <= 1 << 16
    orders = np.bincount(np.log2(counts).astype(int), minlength=10)
    shares = orders if equal_by == "folio" else orders << np.arange(10)
    assert shares.min() > 0 and shares.max() < 4 * np.median(shares)
    assert bool((np.diff(heads.astype(np.int64)) > 0).all()) == (not shuffle)
    again = layouts.mixed(1 << 16, equal_by, shuffle)
    assert (again.pages.pfns == layout.pages.pfns).all()
    again.close()
    layout.close()


# ---- the peers leave what the engine leaves --------------------------------------------------------------------------
def messy_list(layout, seed):
    """Pages of a layout with duplicates, holes, NULL, the zero page, and runs of both directions."""
    rng = np.random.default_rng(seed)
    pfns = layout.pages.pfns
    parts = []
    for _ in range(200):
        start = int(rng.integers(len(pfns)))
        part = pfns[start:start + int(rng.integers(1, 80))]
        kind = rng.integers(6)
        parts.append([part, part[::-1], rng.permutation(part), np.repeat(part, 2), np.zeros(3, np.uint64),
                      np.full(2, layout.mem.zero_page.pfn, np.uint64)][kind])
    return mmc.PageList(layout.mem, np.concatenate(parts))


@pytest.mark.parametrize("walk", ["page", "head", "run"])
@pytest.mark.parametrize("equal_by", ["folio", "page"])
def test_list_peers_leave_the_engines_state(peers, walk, equal_by):
    layout = layouts.mixed(1 << 13, equal_by, True)
    mem = layout.mem
    for seed in range(5):
        pages = messy_list(layout, seed)
        before = state(mem)
        mmc.grab_pages(pages)
        mmc.grab_pages(pages)
        pinned = state(mem)
        mmc.unpin_user_pages(pages, release=walk)
        once = state(mem)
        mmc.grab_pages(pages)
        assert state(mem) == pinned
        nulls = int(np.isin(pages.pfns, [0, mem.zero_page.pfn]).sum())
        release = peers.on_list(walk, mem, pages)
        assert release() == len(pages) - nulls
        assert state(mem) == once != pinned
        assert release() == len(pages) - nulls
        assert state(mem) == before
    del release
    layout.close()


@pytest.mark.parametrize("order", [0, 1, 4, 9])
def test_range_peer_leaves_the_engines_state(peers, order):
    layout = layouts.uniform(4096, order)
    mem, first = layout.mem, layout.first
    for skip, nr in [(0, 4096), (1, 4094), (513, 1), (5, 2000)]:
        pages = layout.pages[skip:skip + nr]
        start = mem.page(first.pfn + skip)
        before = state(mem)
        mmc.grab_pages(pages)
        mmc.grab_pages(pages)
        mmc.unpin_user_page_range_dirty_lock(start, nr, False)
        once = state(mem)
        mmc.grab_pages(pages)
        release = peers.on_range(mem, start.pfn, nr)
        assert release() == nr and state(mem) == once
        assert release() == nr and state(mem) == before
    del pages, release
    layout.close()


@pytest.mark.parametrize("walk", ["page", "head", "run", "range"])
def test_peers_refuse_what_is_not_pinned(peers, walk):
    layout = layouts.uniform(64, 0)
    mmc.grab_pages(layout.pages[:40])
    release = peers.on_range(layout.mem, layout.first.pfn, 64) if walk == "range" else \
        peers.on_list(walk, layout.mem, layout.pages)
    with pytest.raises(RuntimeError, match="entry 40 has no pin"):
        release()


def test_two_threads_against_one_and_peers_that_are_missing():
    case = scaling.Case("small", lambda nr_pages: layouts.uniform(nr_pages, 0), True, at_least=1.8)
    rows = scaling.measure([case], 512, 2, "no compiler", seconds=0.001)
    assert [(row.variant, row.missing) for row in rows] == [("run, 1 thread", ""), ("run, 2 threads", ""), ("C run", "no compiler")]
    assert rows[0].entries == rows[1].entries and rows[0].entries % 512 == 0 and len(rows[1].samples) == 2
    assert rows[1].bars[0]["bar"] == ">= 1.8x" and "regions of" in rows[1].bars[0]["note"]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_thread_that_fails_fails_the_measurement():
    with pytest.raises(RuntimeError, match="a thread of the benchmark failed"):
        scaling.together([[lambda: None], [lambda: 1 / 0]])
