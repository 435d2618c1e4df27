"""`mmcore mr-test` as its users meet it, and the benchmark behind it: what they print, not how fast it is."""
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from live_support import mmcore

from mmcore.bench import mr

SCRIPT = Path(__file__).parent.parent / "benchmarks" / "bench_mr.py"


def report(*words):
    done = mmcore("mr-test", "--json", "--size", "4M", "--rounds", "2", *words)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_the_first_line_is_the_kernel_tests():
    done = mmcore("mr-test", "--size", "4M", "--rounds", "3")
    assert done.returncode == 0, done.stderr
    first, *phases = done.stdout.splitlines()
    assert re.fullmatch(r"3 rounds in \d+\.\d{3} sec: \d+\.\d{3} usec / round", first)
    assert [line.split()[0] for line in phases] == ["region", "register", "deregister"]
    assert "DMA map" in done.stdout and "DMA unmap" in done.stdout


@pytest.mark.parametrize("backing, entries", [("thp", range(1, 3)), ("hugetlb", range(1, 3)), ("devdax", [1]), ("4k", range(1, 1025))])
@pytest.mark.parametrize("acquire, release", [("list", "page"), ("sink", "range"), ("list", "array")])
def test_backings_and_generations(backing, entries, acquire, release):
    got = report("--backing", backing, "--acquire", acquire, "--release", release, "--lists", "head")
    assert (got["backing"], got["acquire"], got["release"], got["pages"], got["rounds"]) == (backing, acquire, release, 1024, 2)
    assert got["entries"] in entries
    assert got["best_page_size"] == (4096 if backing == "4k" else 2 << 20)
    assert set(got["phases"]) == {"register", "map", "deregister", "unmap"}


def test_seconds():
    done = mmcore("mr-test", "--size", "2M", "--seconds", "0.01", "--json")
    assert done.returncode == 0 and json.loads(done.stdout)["rounds"] >= 1


def test_compare_has_every_generation_and_what_was_published():
    got = report("--compare")
    assert [row["generation"] for row in got["rows"]] == [mr.generation_name(*g) for g in mr.GENERATIONS]
    assert got["rows"][0]["ratio"] == 1 and all(row["usec_per_round"] > 0 for row in got["rows"])
    assert [one["before"] for one in got["rows"][3]["published"]] == [8480.335, 8698.367]
    done = mmcore("mr-test", "--size", "2M", "--rounds", "1", "--compare")
    for text in ("1860.786", "1845.225", "16426.047", "4663.622", "sink + range"):
        assert text in done.stdout


@pytest.mark.parametrize("words", [["--size", "0"], ["--rounds", "0"], ["--seconds", "0"], ["--seconds", "x"], ["--backing", "2m"],
                                   ["--release", "run"], ["--acquire", "page"], ["--seconds", "1", "--rounds", "1"]])
def test_usage(words):
    done = mmcore("mr-test", *words)
    assert done.returncode == 2 and "Traceback" not in done.stderr


@pytest.mark.parametrize("case", mr.CASES)
def test_each_case_of_the_benchmark_runs(case):
    done = subprocess.run([sys.executable, str(SCRIPT), "--size", "4M", "--rounds", "1", "--case", case, "--json", "-"],
                          capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)
    assert rows and all(row["rounds"] == 1 or row.get("missing") for row in rows)
    assert any(bar["bar"] for row in rows for bar in row["bars"])


def test_the_best_page_is_the_frame():
    row, = mr.best_page_size(mr.Setup(mr.GIB, 1))
    assert row.bars[0]["met"]


@pytest.mark.parametrize("words", [["--size", "5"], ["--rounds", "0"], ["--case", "nothing"], ["--size", "x"]])
def test_wrong_options_of_the_benchmark(words):
    done = subprocess.run([sys.executable, str(SCRIPT), *words], capture_output=True, text=True)
    assert done.returncode == 2
