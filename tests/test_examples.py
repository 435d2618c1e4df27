"""The scripts under examples/, and the one that draws the picture of the README, run and say what they are there to say."""
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = ROOT / "examples"

pytestmark = pytest.mark.skipif(not EXAMPLES.exists(), reason="needs the source tree")


def run(script, *args):
    done = subprocess.run([sys.executable, str(script), *map(str, args)], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_a_driver_is_tested_and_its_leak_is_named():
    said = run(EXAMPLES / "driver_test.py")
    assert "1280 given back" in said
    assert re.search(r"LeakyRing: .* on PFN 0x\w+ .*driver_test\.py:\d+", said)
    assert int(re.search(r"(\d+) injected, nothing left behind", said)[1]) > 0


def test_what_if_counts_less_work_for_larger_pages():
    said = run(EXAMPLES / "what_if.py", "1G")
    counts = {name: dict(re.findall(r"^ +(fault in|pin|map|unpin) +[\d.]+ ms +(\d+) ", text, re.MULTILINE))
              for name, text in re.findall(r"^(\S.*): 1024 MiB\n((?: .*\n)+)", said, re.MULTILINE)}
    nr = {"4 KiB": 262144, "THP": 512, "hugetlb 2M": 512, "hugetlb 1G": 1}
    assert {name: int(count["fault in"]) for name, count in counts.items()} == nr
    # A small folio has one counter, a large one two. Neighbours in memory share a leaf of the IOMMU, never across.
    assert {name: int(count["pin"]) for name, count in counts.items()} == \
        {name: pages * (1 if name == "4 KiB" else 2) for name, pages in nr.items()}
    assert all(int(count["map"]) <= max(512, nr[name]) for name, count in counts.items())


def test_the_release_loops_leave_one_state():
    said = run(EXAMPLES / "release_on_sg.py")
    updates = dict(re.findall(r"^(page by page|by entry) +(\d+) counter updates", said, re.MULTILINE))
    assert updates == {"page by page": "8192", "by entry": "16"}
    assert "mem_map is the same after both" in said


def test_a_batching_idea_is_built_compared_and_measured():
    pytest.importorskip("Cython")
    if shutil.which("cc") is None:
        pytest.skip("no C compiler")
    said = run(EXAMPLES / "batching_idea.py", 65536)
    rows = re.findall(r"^(order .*?) +([\d.]+) +([\d.]+) +([\d.]+) +([\d.]+)$", said, re.MULTILINE)
    assert [name for name, *_ in rows] == ["order 0", "order 4", "order 9", "order 9, every other"]
    assert "grows() is False" in said


def test_forks_with_pins_are_plotted(tmp_path):
    pytest.importorskip("matplotlib")
    said = run(EXAMPLES / "plot_fork.py", tmp_path / "fork.png")
    assert (tmp_path / "fork.png").read_bytes().startswith(b"\x89PNG")
    assert re.findall(r"(\d+) of 16384 pages pinned: +(\d+) copied", said)[-1] == ("16384", "16384")


def test_the_picture_of_the_readme_is_drawn_from_its_figures(tmp_path):
    pytest.importorskip("matplotlib")
    shutil.copy(ROOT / "docs" / "_static" / "release.json", tmp_path)
    run(ROOT / "docs" / "plot_release.py", "--folder", tmp_path)
    assert "<svg" in (tmp_path / "release.svg").read_text()
    run(ROOT / "docs" / "plot_release.py", "--folder", tmp_path, "--measure", "--pages", 4096, "--rounds", 1)
    figures = json.loads((tmp_path / "release.json").read_text())
    assert figures["pages"] == 4096 and all(len(times) == 10 for times in figures["ns_per_page"].values())
