"""--change-system: without it nothing is changed, with it everything is put back, also by a test that fails."""

import subprocess
import sys
from pathlib import Path

import pytest

CONFTEST = Path(__file__).parent / "conftest.py"
TESTS = """
import pytest

def test_two_changes(change_system):
    change_system({switch!r}, "always")
    change_system({switch!r}, "madvise")
    change_system({number!r}, 7)
    assert open({number!r}).read() == "7"

def test_that_fails(change_system):
    change_system({number!r}, 9)
    assert False
"""


@pytest.mark.parametrize("words, outcome", [([], "2 skipped"), (["--change-system"], "1 failed, 1 passed")])
def test_what_is_changed_is_put_back(tmp_path, words, outcome):
    switch, number = tmp_path / "enabled", tmp_path / "nr_hugepages"
    switch.write_text("always madvise [never]\n")
    number.write_text("3\n")
    (tmp_path / "conftest.py").write_text(CONFTEST.read_text())
    (tmp_path / "test_it.py").write_text(TESTS.format(switch=str(switch), number=str(number)))
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *words, str(tmp_path)],
        capture_output=True, text=True, cwd=tmp_path,
    )
    assert outcome in done.stdout, done.stdout + done.stderr
    # Files keep what is written last, where the kernel's show all words again.
    assert switch.read_text() == ("never" if words else "always madvise [never]\n")
    assert number.read_text().strip() == "3"
