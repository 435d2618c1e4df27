"""`mmcore vfio-dma-map` as its users meet it, and the benchmark behind it: what they print, not how fast it is."""
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from live_support import mmcore

from mmcore.bench import measure, vfio

SCRIPT = Path(__file__).parent.parent / "benchmarks" / "bench_vfio.py"
SMALL = "0.03125"               # 32 MiB


def report(*words):
    done = mmcore("vfio-dma-map", SMALL, "--json", "--loops", "2", *words)
    assert done.returncode == 0 and not done.stderr, done.stderr
    return json.loads(done.stdout)


def test_the_unit_tests_lines():
    done = mmcore("vfio-dma-map", SMALL, "--loops", "2")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == "------- AVERAGE (MADV_HUGEPAGE) --------" and lines[3] == "------- AVERAGE (MAP_POPULATE) --------"
    assert len(lines) == 6
    for at, what in ((1, "MAP"), (2, "UNMAP"), (4, "MAP"), (5, "UNMAP")):
        assert re.fullmatch(rf"VFIO {what} DMA in \d+\.\d{{3}} s \(\d+\.\d GB/s\)", lines[at])
    steps = ["mmap in", "mmap populated in", "VFIO MAP DMA in", "VFIO UNMAP DMA in", "munmap in"]
    expected = [line for phase in (steps, [s for s in steps if s != "mmap populated in"]) for loop in "01" for line in (f"{loop}:", *phase)]
    assert [re.sub(r" \d+\.\d{3}s$", "", line) for line in done.stderr.splitlines()] == expected


def test_hugetlbfs_names_its_page_size():
    done = mmcore("vfio-dma-map", SMALL, "--loops", "1", "--backing", "HUGETLBFS")
    assert done.returncode == 0 and done.stdout.splitlines()[:2] == ["Using 2MB huge page size on hugetlbfs",
                                                                      "------- AVERAGE (HUGETLBFS) --------"]


@pytest.mark.parametrize("backing", vfio.BACKINGS)
@pytest.mark.parametrize("words", [("--acquire", "page", "--release", "page", "--ask"), ("--acquire", "batch", "--release", "folio"), ()])
def test_backings_and_generations(backing, words):
    got, = report("--backing", backing, *words)
    assert (got["backing"], got["size"], got["loops"]) == (backing, 32 << 20, 2)
    assert got["iova_to_phys"] == (8192 if "--ask" in words else 0) or backing == "MAP_POPULATE" and got["iova_to_phys"] >= 8192
    assert len(got["seconds"]["map"]) == 2 and got["average"]["unmap"] > 0


def test_compare_has_every_generation_and_what_was_published():
    both = report("--compare")
    assert [one["backing"] for one in both] == ["MADV_HUGEPAGE", "MAP_POPULATE"]
    for one in both:
        assert [row["generation"] for row in one["rows"]] == [vfio.generation_name(*g) for g in vfio.GENERATIONS]
        assert one["rows"][0]["map"]["ratio"] == one["rows"][0]["unmap"]["ratio"] == 1
        assert all(row[what]["ns"] > 0 for row in one["rows"] for what in ("map", "unmap"))
    assert both[0]["rows"][0]["published"]["seconds"] == [.047, .138] and both[0]["rows"][2]["published"]["seconds"] == [.028, .049]
    done = mmcore("vfio-dma-map", SMALL, "--compare", "--loops", "1", "--backing", "HUGETLBFS")
    assert done.returncode == 0 and "0.052 / 0.139 s" in done.stdout and "0.033 / 0.049 s" in done.stdout
    assert len(done.stdout.splitlines()) == 2 + len(vfio.GENERATIONS)


@pytest.mark.parametrize("words", [(), ("0",), ("-1",), ("x",), ("nan",), ("inf",), ("1e9",),
                                   ("1", "--loops", "0"), ("1", "--backing", "THP"),
                                   ("1", "--release", "run"), ("1", "2")])
def test_wrong_usage(words):
    done = mmcore("vfio-dma-map", *words)
    assert done.returncode == 2 and "usage" in done.stderr and not done.stdout


def test_what_does_not_fit_here():
    done = mmcore("vfio-dma-map", "1000000")
    assert done.returncode == 77 and "struct pages" in done.stderr and "smaller" in done.stderr


def test_the_benchmark_has_all_bars():
    done = subprocess.run([sys.executable, SCRIPT, "--quick", "--size", "8M", "--base-size", "8M", "--gigantic", "1G", "--rounds", "1",
                           "--json", "-"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)
    bars = {(row["case"], row["variant"], bar["against"]): bar["bar"] for row in rows for bar in row["bars"] if bar["bar"]}
    for backing in ("MADV_HUGEPAGE", "HUGETLBFS"):
        assert bars[f"{backing}, MAP", "batch", "page"] == ">= 1.7x" and bars[f"{backing}, MAP", "sink, runs kept", "page"] == ">= 10x"
        assert bars[f"{backing}, UNMAP", "range", "page"] == ">= 3x" and bars[f"{backing}, UNMAP", "range", "page, asking"] == ">= 10x"
        assert bars[f"{backing}, UNMAP again", "folio", "range"] == "<= 1.15"
    assert sum(case.startswith("4 KiB") for case, _, _ in bars) == 14 and bars["1 GiB of 1 GiB pages", "MAP", "time"] == "<= 0.5 ms"
    for words in (["--size", "1M"], ["--rounds", "0"], ["--case", "none"], ["--gigantic", "2M"]):
        assert subprocess.run([sys.executable, SCRIPT, *words], capture_output=True).returncode == 2


def test_a_bar_in_ms_can_be_missed():
    bar = vfio.Within("MAP", "time", ms=.5)
    assert isinstance(bar, measure.Bar) and bar.text() == "<= 0.5 ms"
    assert [bar.judge({"MAP": [ns]})["met"] for ns in (499_999, 500_001)] == [True, False] and bar.judge({})["met"] is None


def test_a_size_without_room_is_not_measured(monkeypatch):
    monkeypatch.setattr(vfio, "need_memory", lambda size: (_ for _ in ()).throw(vfio.NotPossible("no room", "take less")))
    rows = vfio.measure(["1 GiB pages"], 0, 0, 1 << 30, 1)
    assert [row.missing for row in rows] == ["no room; take less"] * 2
