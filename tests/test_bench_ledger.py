"""The benchmark of the ledger times calls that do the same with and without one."""
import json
import subprocess
import sys
from pathlib import Path

from mmcore.bench import ledger

SCRIPT = Path(__file__).resolve().parent.parent / "benchmarks" / "bench_ledger.py"


def test_each_job_has_a_bar():
    rows = ledger.measure(1)
    assert len(rows) == 16 and all(row.samples[0] > 0 for row in rows)
    assert [len(row.bars) for row in rows] == [0, 1] * 8 and {bar["bar"] for row in rows for bar in row.bars} == {"<= 3.00"}


def test_script_writes_json(tmp_path):
    where = tmp_path / "rows.json"
    done = subprocess.run([sys.executable, SCRIPT, "--rounds", "1", "--json", where], capture_output=True, text=True)
    assert done.returncode == 0 and "bars met" in done.stdout, done.stderr
    assert len(json.loads(where.read_text())) == 16
    assert subprocess.run([sys.executable, SCRIPT, "--rounds", "0"], capture_output=True).returncode == 2
