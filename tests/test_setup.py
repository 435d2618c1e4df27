"""Set-up: the two commands of the README, what they say when something is missing, and what a build touches."""
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

pytestmark = pytest.mark.skipif(not (ROOT / "Makefile").exists() or shutil.which("make") is None,
                                reason="needs the source tree and make")


def run(*args, **env):
    return subprocess.run(args, cwd=ROOT, env={**os.environ, **env}, capture_output=True, text=True)


def copy_of_the_tree(to):
    """What a fresh clone holds."""
    listing = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True)
    if listing.returncode:
        pytest.skip("not a git checkout")
    for name in filter(None, listing.stdout.decode().split("\0")):
        source = ROOT / name
        if source.is_file():
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, to / name)
    return to


@pytest.mark.parametrize("tool, said", [
    ("PYTHON", "apt-get install python3"),
    ("CC", "apt-get install gcc"),
])
def test_a_missing_tool_is_named_with_its_package(tool, said):
    if tool == "CC":
        result = run("make", "check-tools", f"PYTHON={sys.executable}", CC="no-such-compiler")
    else:
        result = run("make", "check-tools", "PYTHON=no-such-python")
    assert result.returncode != 0
    assert said in result.stderr


def test_an_old_python_is_refused(tmp_path):
    old = tmp_path / "python3"
    old.write_text('#!/bin/sh\ncase "$*" in *version_info*) exit 1;; esac\nexit 0\n')
    old.chmod(0o755)
    result = run("make", "check-tools", f"PYTHON={old}")
    assert result.returncode != 0
    assert "older than 3.10" in result.stderr


def test_the_readme_and_ci_name_targets_that_exist():
    makefile = (ROOT / "Makefile").read_text()
    targets = set(re.findall(r"^([a-z-]+):", makefile, re.MULTILINE))
    named = set(re.findall(r"^make ?([a-z-]*)", (ROOT / "README.md").read_text(), re.MULTILINE))
    assert named == {"", "test"}
    assert {"run", "test"} <= targets
    assert "make test" in (ROOT / ".ci" / "run").read_text()


def test_the_first_target_is_the_main_job():
    result = run("make", "-n", "--no-print-directory", f"PYTHON={sys.executable}")
    assert result.returncode == 0, result.stderr
    assert "mmcore register --size 256M --backing thp" in result.stdout


@pytest.mark.slow
def test_a_fresh_clone_sets_itself_up_and_runs_the_main_job(tmp_path):
    tree = copy_of_the_tree(tmp_path / "clone")
    result = subprocess.run(["make", "--no-print-directory", f"PYTHON={sys.executable}"], cwd=tree, capture_output=True,
                            text=True)
    assert result.returncode == 0, result.stderr
    assert "release  pin updates" in result.stdout
    built = {path: path.stat().st_mtime_ns for path in (tree / "mmcore" / "core").glob("*.so")}
    source = tree / "mmcore" / "core" / "look.pyx"
    source.write_text(source.read_text() + "\n")
    result = subprocess.run(["make", "build"], cwd=tree, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    touched = {path.name.split(".")[0] for path in (tree / "mmcore" / "core").glob("*.so")
               if path.stat().st_mtime_ns != built[path]}
    assert touched == {"look"}
