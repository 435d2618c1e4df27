"""The scatterlist benchmark runs, its peers agree with the engine, and its rows say what they must."""
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from mmcore.bench import sg
from mmcore.bench.peers import compiler

SCRIPT = Path(__file__).parent.parent / "benchmarks" / "bench_sg.py"


def run(*args):
    done = subprocess.run([sys.executable, str(SCRIPT), *args], capture_output=True, text=True)
    return done


@pytest.mark.skipif(not shutil.which(compiler()[0]), reason="the peers need a C compiler")
@pytest.mark.parametrize("case", sg.CASES)
def test_each_case_runs(case):
    done = run("--pages", "1024", "--rounds", "1", "--case", case, "--json", "-")
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)
    assert rows and all(row.get("missing") or row["ns_per_page"] > 0 for row in rows)
    assert any(bar["bar"] for row in rows for bar in row["bars"]) or case == "runs"


def test_wrong_options():
    for args in (["--rounds", "0"], ["--pages", "5"], ["--pages", "x"], ["--case", "nothing"]):
        assert run(*args).returncode == 2


def test_a_limit_is_judged_by_time():
    limit = sg.Limit("engine", 2, 100)
    assert limit.judge({"engine": [150, 150, 150]})["met"] is True
    assert limit.judge({"engine": [250, 250, 250]})["met"] is False
    assert limit.judge({})["met"] is None
