"""docs/trust.md names what exists; the marks of the race explorer are in no ordinary build; the fuzzer runs."""
import re
import subprocess
import sys
from pathlib import Path

import pytest

import mmcore.core.folio

ROOT = Path(__file__).resolve().parent.parent
LAWS, REFERENCE, *_ = (ROOT / "docs" / "trust.md").read_text().split("\n## ")
ROWS = [line for line in LAWS.splitlines() if line.startswith("| ") and not line.startswith("| Law")]


def test_every_law_of_the_design_has_a_row():
    laws = re.findall(r"^\| ([^|]+) \| `core", (ROOT / "docs" / "design.md").read_text(), re.M)
    assert len(ROWS) >= len(laws) >= 9


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[2:50])
def test_checks_and_tests_exist(row):
    law, checks, tests = (cell.strip() for cell in row.strip("|").split("|"))
    source = (ROOT / "mmcore" / "core" / "check.pyx").read_text()
    for words in re.findall('"([^"]+)"', checks):
        assert f'"{words}"' in source, words
    names = tests.split(", ")
    assert names and all((ROOT / "tests" / f"{name}.py").exists() for name in names), tests


def test_the_reference_is_what_its_table_says():
    rows = re.findall(r"^\| `(\w+)` \| [^|]+ \| ([^|]+) \|$", REFERENCE, re.M)
    assert {module for module, _ in rows} == {path.stem for path in (ROOT / "tests" / "reference").glob("[!_]*.py")}
    for module, tests in rows:
        for name in tests.split(", "):
            assert "reference" in (ROOT / "tests" / f"{name}.py").read_text(), (module, name)
        assert "mmcore" not in re.sub('"""(.|\n)*?"""', "", (ROOT / "tests" / "reference" / f"{module}.py").read_text())


def test_an_ordinary_build_has_no_marks():
    for module in (mmcore.core.folio, mmcore.core.gup_fast, mmcore.core.walk):
        binary = Path(module.__file__).read_bytes()
        assert b"mm_step_hook" not in binary and b"mm_planted_bug" not in binary


@pytest.mark.parametrize("part", ["api", "files", "cli"])
def test_the_fuzzer_runs(part, tmp_path):
    done = subprocess.run([sys.executable, ROOT / "tests" / "fuzz_run.py", "--seconds", "1", "--only", part, "--corpus", tmp_path,
                           "--seed", "5"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(rf"seed 5: [1-9][0-9]* {part}", done.stdout)
