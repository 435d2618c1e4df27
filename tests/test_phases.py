"""Phases of a registration, in the engine and in the kernel, and `mmcore register --what-if`. No test looks at how long
they are."""

import json
import os

import pytest
from gup_support import pins_of
from live_support import PAGE, engine_or_skip, linux, mmcore, or_skip
from test_costmodel import SAMPLES, calibration

import mmcore as mmc
from mmcore import live
from mmcore.bench import costmodel as cm
from mmcore.bench import phases
from mmcore.bench.register import model_space, touch_and_free
from mmcore.cli import main

NAMES = ["list + page", "list + array, head", "list + array, run", "list + range", "sink + range"]


@pytest.mark.parametrize("backing", ["4k", "thp", "hugetlb", "shmem"])
def test_engine_phases_leave_nothing_pinned(backing):
    with model_space(4 << 20, backing) as (mm, addr):
        rows = phases.engine_phases(mm, addr, 4 << 20, fault_in=1024.0, free=2048.0, rounds=2)
        assert [row["generation"] for row in rows] == NAMES
        for row in rows:
            assert set(row) == {"generation", *phases.PHASES} and all(row[phase] >= 0 for phase in phases.PHASES)
            assert (row["fault_in"], row["free"]) == (1.0, 2.0), "ns a page"
            assert row["pin"] > 0 and row["unpin"] > 0
            # The sink puts leaves straight into the table: no part of its own.
            assert (row["sg"] == 0) is (row["generation"] == "sink + range")
        assert pins_of(mm.mem) == 0 and mm.pinned_vm == 0
        mm.mem.check()


def test_phases_are_parts_of_one_registration():
    """With a clock that counts its readings, each part is one step, and what remains for accounting is nothing."""
    ticks = iter(range(10**6))
    with model_space(1 << 20, "4k") as (mm, addr):
        rows = phases.engine_phases(mm, addr, 1 << 20, rounds=1, clock=lambda: 256 * next(ticks))
    by_name = {row["generation"]: row for row in rows}
    assert (by_name["list + page"]["pin"], by_name["list + page"]["sg"]) == (1, 1)
    assert {row["account"] for row in rows} == {0} and {row["map"] for row in rows} == {1} == {
        row["unmap"] for row in rows
    }


def test_what_cannot_be_registered_says_so():
    with mmc.Memory("64M") as mem, mmc.MM(mem) as mm:
        addr = mm.mmap(1 << 20, prot=mmc.PROT_READ)
        with pytest.raises(mmc.MMError):
            phases.engine_phases(mm, addr, 1 << 20)
        assert pins_of(mem) == 0


def test_first_touch_and_freeing_are_measured():
    fault_in, free = touch_and_free(4 << 20, "4k", rounds=1)
    assert fault_in > 0 and free > 0


@linux
@pytest.mark.parametrize("backing", ["4k", "thp", "shmem"])
def test_a_real_run_has_all_phases_and_ends(backing):
    with live.buffer(PAGE) as buf:
        or_skip(live.kernel_register, buf)
    before = len(live.vmas())
    run = or_skip(phases.kernel_run, 2 << 20, backing)
    assert run.nbytes == 2 << 20 and min(run.fault_in, run.register, run.unregister, run.free) > 0
    sample = cm.run_sample(2 << 20, backing)
    assert sample["total"] == sum(sample[phase] for phase in cm.PHASES if phase != "total")
    assert len(live.vmas()) <= before + 2 and live.limits().pinned == 0


@linux
def test_a_buffer_that_is_not_populated_yet():
    with live.buffer("1M", populate=False) as buf:
        before = live.vmas("self", buf.addr, buf.addr + buf.length)[0]
        assert before.rss == 0 and buf.populate() > 0
        assert live.vmas("self", buf.addr, buf.addr + buf.length)[0].rss == 1 << 20 and buf[PAGE] == 1


# ---- the verb
# ---------------------------------------------------------------------------------------------------------
@pytest.fixture
def kept(tmp_path, monkeypatch):
    """A cache directory with the recorded calibration, of another kernel."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    calibration(SAMPLES, missing={"hugetlb": ("no pool", "grow it")}).save()
    return {"env": {"XDG_CACHE_HOME": str(tmp_path)}}


def test_what_if_of_a_model(kept):
    engine_or_skip()
    done = mmcore(
        "register", "--json", "--model", "--size", "8M", "--backing", "4k", "--rounds", "1", "--what-if", "thp", **kept
    )
    assert done.returncode == 0, done.stderr
    got = json.loads(done.stdout)["what_if"]
    expected = calibration(SAMPLES).predict("thp", 8 << 20)
    assert {phase: one["middle"] for phase, one in got["phases"].items()} == {
        phase: one.middle for phase, one in expected.items()
    }
    assert (got["folios"], got["unpin_updates"]) == (4, 8) and got["phases"]["total"]["now"] is None
    assert (
        any("Linux 6.18, this is" in text for text in got["calibration"]["doubts"])
        and got["calibration"]["sessions"] == 5
    )


@linux
def test_what_if_of_a_real_buffer_in_text(kept):
    engine_or_skip()
    with live.buffer(PAGE) as buf:
        or_skip(live.capture, buf)
        or_skip(live.kernel_register, buf)
    done = mmcore("register", "--size", "4M", "--backing", "4k", "--rounds", "1", "--what-if", "thp", **kept)
    text = done.stdout
    assert done.returncode == 0 and not done.stderr, done.stderr
    text = text[text.index("phases of a registration") :]
    places = [
        text.index(word)
        for word in (
            "list + page",
            "sink + range",
            "\nkernel ",
            "what if it were thp",
            "4 MiB in 2 folios",
            "90% of runs",
            "\ntotal ",
            "calibrated",
            "doubt ",
            "--calibrate",
        )
    ]
    assert places == sorted(places)
    # The kernel pins, makes its table and accounts in one call.
    row = next(line for line in text.splitlines() if line.startswith("kernel") and "in pin" in line)
    assert row.count("in pin") == 2


def test_what_if_of_what_was_not_measured(kept):
    done = mmcore("register", "--model", "--size", "4M", "--rounds", "1", "--what-if", "hugetlb", **kept)
    assert done.returncode == 77 and "no pool" in done.stderr and "grow it" in done.stderr and not done.stdout


def test_a_damaged_calibration_is_no_crash(kept, tmp_path):
    (tmp_path / "mmcore" / "calibration.json").write_text("{")
    done = mmcore("register", "--model", "--size", "4M", "--what-if", "thp", **kept)
    assert done.returncode == 1 and "--calibrate" in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize("words", [["--what-if", "shmem"], ["--what-if"]])
def test_usage(words):
    assert mmcore("register", *words).returncode == 2


@pytest.mark.parametrize("as_json", [False, True])
def test_calibrate_measures_keeps_and_says_where(tmp_path, monkeypatch, capsys, as_json):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    def measure(nbytes, backing):
        if backing == "hugetlb":
            raise live.NotPossible("no pool", "grow it")
        return {"backing": backing, "nbytes": nbytes, **{phase: 3.0 * nbytes for phase in cm.PHASES}}

    monkeypatch.setattr(cm, "run_sample", measure)
    assert main(["register", "--calibrate", *(["--json"] if as_json else [])]) == 0
    out = capsys.readouterr().out
    path = os.path.join(tmp_path, "mmcore", "calibration.json")
    assert (
        path in out
        and "grow it" in out
        and cm.Calibration.load(path).predict("4k", 2 << 20)["total"].middle == pytest.approx(6 << 20)
    )
    if as_json:
        assert json.loads(out)["lines"]["4k"]["register"]["per_page"] == pytest.approx(3 * 4096)


def test_without_a_calibration_one_is_measured_and_that_is_said(tmp_path, monkeypatch, capsys):
    engine_or_skip()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(
        cm,
        "run_sample",
        lambda nbytes, backing: {"backing": backing, "nbytes": nbytes, **{p: 1.0 * nbytes for p in cm.PHASES}},
    )
    assert main(["register", "--model", "--size", "4M", "--rounds", "1", "--what-if", "4k"]) == 0
    told = capsys.readouterr()
    assert "no calibration in" in told.err and "what if it were 4k" in told.out
    assert main(["register", "--model", "--size", "4M", "--rounds", "1", "--what-if", "4k"]) == 0
    assert capsys.readouterr().err == "", "the second time it is there"
