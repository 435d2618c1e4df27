"""The benchmark of address spaces measures what it says, and its verdicts follow from its numbers."""
import json
import subprocess
import sys
from pathlib import Path

import pytest

from mmcore.bench import mm
from mmcore.bench.measure import Row

SCRIPT = Path(__file__).resolve().parent.parent / "benchmarks" / "bench_mm.py"


@pytest.mark.parametrize("huge", [False, True])
def test_steps_of_a_life(huge):
    steps = mm.life(16 << 20, huge, 2)
    assert set(steps) == {"touch", "fork", "exit of the child", "munmap"}
    assert all(len(samples) == 2 and min(samples) > 0 for samples in steps.values())


def test_flat_compares_the_worst_with_the_smallest():
    rows = [Row("1G, base pages", "touch", 10, [100]), Row("8G, base pages", "touch", 10, [130]),
            Row("64G, base pages", "touch", 10, [110]), Row("1G, 2 MiB leaves", "touch", 10, [100]),
            Row("64G, 2 MiB leaves", "touch", 10, [90]), Row("64G, 2 MiB leaves", "exit of the child", 10, [900])]
    mm.flat_bars(rows)
    assert [len(row.bars) for row in rows] == [0, 1, 0, 0, 1, 0]
    assert rows[1].bars[0]["ratio"] == pytest.approx(1.3) and rows[1].bars[0]["met"] is False
    assert rows[4].bars[0]["met"] is True


def test_script_writes_json(tmp_path):
    where = tmp_path / "rows.json"
    done = subprocess.run([sys.executable, SCRIPT, "--smallest", "8M", "--largest", "32M", "--fork", "8M", "--rounds", "1",
                           "--json", where], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    rows = json.loads(where.read_text())
    assert {row["variant"] for row in rows} >= {"touch", "fork", "munmap", "nothing pinned", "all pinned and written"}
    assert "bars met" in done.stdout


@pytest.mark.parametrize("words", [["--smallest", "5"], ["--rounds", "0"], ["--smallest", "8M", "--largest", "4M"], ["--fork", "x"]])
def test_usage(words):
    done = subprocess.run([sys.executable, SCRIPT, *words], capture_output=True, text=True)
    assert done.returncode == 2
