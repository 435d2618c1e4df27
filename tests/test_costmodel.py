"""The cost model, on recorded runs: fit, interval, the share of runs inside; what is kept, and what is doubted. No test
takes a time."""

import csv
import datetime
import json
import os
from pathlib import Path

import numpy as np
import pytest

from mmcore.bench import costmodel as cm
from mmcore.live import NotPossible

RECORDED = Path(__file__).parent / "recorded_runs.csv"
NOW = datetime.datetime(2026, 12, 1, tzinfo=datetime.timezone.utc)


def recorded():
    """Runs of a real machine (Linux 6.18, two busy cores), in sessions some minutes apart."""
    with open(RECORDED, newline="") as file:
        rows = list(csv.DictReader(file))
    samples = []
    for row in rows:
        one = {"session": row["session"], "backing": row["backing"], "nbytes": int(row["nbytes"])}
        one |= {phase: float(row[phase]) for phase in cm.PHASES if phase != "total"}
        one["total"] = sum(one[phase] for phase in cm.PHASES if phase != "total")
        samples.append(one)
    return samples


def calibration(samples, **change):
    how = {
        "kernel": "6.18",
        "cpu": "some",
        "date": "2026-11-30T12:00:00+00:00",
        "page_size": 4096,
        "missing": {},
    } | change
    return cm.Calibration(samples=samples, **how)


SAMPLES = recorded()
SESSIONS = sorted({sample["session"] for sample in SAMPLES})


# ---- the fit
# ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("fixed, per_page", [(5000.0, 60.0), (0.0, 4.0), (20000.0, 0.0), (100.0, 0.05)])
def test_a_line_without_noise_is_found(fixed, per_page):
    pages = np.repeat([512, 1024, 2048, 8192, 32768], 5)
    line = cm.fit(pages, fixed + per_page * pages)
    assert line.at(4096).middle == pytest.approx(fixed + per_page * 4096, rel=1e-6)
    assert line.low == pytest.approx(1) == line.high and line.spread == pytest.approx((1, 1))


def test_one_size_gives_a_line_through_nothing():
    line = cm.fit([512] * 20, [51200.0] * 20)
    assert (line.fixed, line.per_page) == (0, 100) and line.at(1024).middle == 102400


def test_costs_that_fall_with_size_are_taken_as_constant():
    pages = np.repeat([512, 1024, 2048, 4096], 6)
    line = cm.fit(pages, 1e6 - 10.0 * pages)
    assert line.per_page == 0 and line.fixed > 0


def test_a_wild_run_bends_no_line():
    pages = np.repeat([512, 1024, 2048, 4096, 8192], 9)
    ns = 1000 + 50.0 * pages
    ns[::9] *= 40
    line = cm.fit(pages, ns)
    assert line.at(4096).middle == pytest.approx(1000 + 50 * 4096)


@pytest.mark.parametrize(
    "pages, ns",
    [
        ([1] * 19, [1.0] * 19),
        ([1] * 20, [1.0] * 21),
        ([], []),
        ([0] * 20, [1.0] * 20),
        ([1] * 20, [0.0] * 20),
        ([1] * 20, [float("nan")] * 20),
        ([1] * 20, [float("inf")] * 20),
        ([1] * 20, [-1.0] * 20),
    ],
)
def test_bad_samples_are_refused(pages, ns):
    with pytest.raises(ValueError, match="samples"):
        cm.fit(pages, ns)


def test_the_interval_leaves_out_little_below_and_more_above():
    ratios = np.linspace(1, 2, 200)
    pages = np.full(200, 1000)
    line = cm.fit(pages, 1000 * ratios, 0.9)
    inside = np.count_nonzero([value in line.at(1000) for value in 1000 * ratios])
    assert 180 <= inside <= 184
    below = np.count_nonzero(1000 * ratios < line.at(1000).low)
    assert below < 200 - inside - below


@pytest.mark.parametrize("seed", range(5))
def test_the_interval_holds_what_it_says_of_new_runs(seed):
    """Runs of one law, made up: of many sets of samples, nine out of ten new runs lie inside, on average."""
    draw, shares = np.random.default_rng(seed), []
    for _ in range(40):
        pages = np.repeat([512, 1024, 2048, 4096, 8192, 16384, 32768], 8)
        line = cm.fit(pages, (9000 + 60.0 * pages) * draw.lognormal(0, 0.3, len(pages)))
        new = (9000 + 60.0 * 5000) * draw.lognormal(0, 0.3, 200)
        shares.append(np.mean([value in line.at(5000) for value in new]))
    assert np.mean(shares) >= cm.CONFIDENCE


# ---- recorded runs
# ----------------------------------------------------------------------------------------------------
def test_recorded_runs_lie_inside_their_own_interval():
    got = cm.share_inside(calibration(SAMPLES), SAMPLES)
    assert got["runs"] == len(SAMPLES)
    assert all(got[phase] >= cm.CONFIDENCE for phase in cm.PHASES)


@pytest.mark.parametrize("left_out", SESSIONS)
def test_a_session_that_was_not_used_lies_mostly_inside(left_out):
    """Each session against the others: what a later run meets. The machine was busy, and drifted."""
    others = [sample for sample in SAMPLES if sample["session"] != left_out]
    new = [sample for sample in SAMPLES if sample["session"] == left_out]
    got = cm.share_inside(calibration(others), new)
    assert all(got[phase] >= 0.8 for phase in cm.PHASES)


def test_of_all_sessions_together_nine_out_of_ten_runs_lie_inside():
    inside = {phase: 0 for phase in cm.PHASES}
    for left_out in SESSIONS:
        new = [sample for sample in SAMPLES if sample["session"] == left_out]
        got = cm.share_inside(calibration([s for s in SAMPLES if s["session"] != left_out]), new)
        for phase in cm.PHASES:
            inside[phase] += got[phase] * len(new)
    assert all(inside[phase] / len(SAMPLES) >= cm.CONFIDENCE for phase in cm.PHASES)


def test_no_runs_have_no_share():
    assert cm.share_inside(calibration(SAMPLES), []) == {phase: None for phase in cm.PHASES} | {"runs": 0}


def test_the_share_is_counted():
    made = calibration(SAMPLES)
    expected = made.predict("thp", 8 << 20)
    good = {"backing": "thp", "nbytes": 8 << 20, **{phase: one.middle for phase, one in expected.items()}}
    bad = {"backing": "thp", "nbytes": 8 << 20, **{phase: one.high * 2 for phase, one in expected.items()}}
    got = cm.share_inside(made, [good, good, good, bad])
    assert got == {phase: 0.75 for phase in cm.PHASES} | {"runs": 4}


def test_huge_pages_are_cheaper_to_register_by_the_recorded_runs():
    made = calibration(SAMPLES)
    assert made.predict("thp", 64 << 20)["register"].high < made.predict("4k", 64 << 20)["register"].low
    small, large = (made.predict("4k", size)["total"].middle for size in (4 << 20, 64 << 20))
    assert 10 < large / small < 20


def test_coverage_draws_sizes_within_what_is_known_and_counts(monkeypatch):
    made = calibration(SAMPLES)
    asked = []

    def measure(nbytes, backing):
        asked.append((nbytes, backing))
        return {
            "backing": backing,
            "nbytes": nbytes,
            **{phase: one.middle for phase, one in made.predict(backing, nbytes).items()},
        }

    share, runs = cm.coverage(made, 25, seed=1, measure=measure)
    assert share == {phase: 1.0 for phase in cm.PHASES} | {"runs": 25} and len(runs) == 25
    sizes = [sample["nbytes"] for sample in SAMPLES]
    assert all(min(sizes) <= nbytes <= max(sizes) and nbytes % (2 << 20) == 0 for nbytes, _ in asked)
    assert {backing for _, backing in asked} == set(made.lines)
    again = []
    cm.coverage(made, 25, seed=1, measure=lambda *what: again.append(what) or measure(*what))
    assert again == asked[:25]


# ---- what is kept, and what is doubted
# ----------------------------------------------------------------------------------
def test_saved_and_loaded_it_says_the_same(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    made = calibration(SAMPLES, missing={"hugetlb": ("no pool", "grow it")})
    path = made.save()
    assert path == cm.cache_path() == str(tmp_path / "mmcore" / "calibration.json") and os.listdir(
        tmp_path / "mmcore"
    ) == ["calibration.json"]
    got = cm.Calibration.load()
    assert got == made and got.lines == made.lines and got.sessions == SESSIONS
    with pytest.raises(NotPossible, match="no pool; grow it"):
        got.predict("hugetlb", 4096)
    with pytest.raises(NotPossible, match="--calibrate"):
        got.predict("1g", 4096)


@pytest.mark.parametrize("value", ["", "relative/path", None])
def test_without_an_absolute_xdg_cache_home_it_is_in_the_home(monkeypatch, value):
    monkeypatch.setenv("HOME", "/home/somebody")
    if value is None:
        monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    else:
        monkeypatch.setenv("XDG_CACHE_HOME", value)
    assert cm.cache_path() == "/home/somebody/.cache/mmcore/calibration.json"


@pytest.mark.parametrize(
    "spoil",
    [
        lambda data: data.pop("samples"),
        lambda data: data.update(version=99),
        lambda data: data.update(samples=[]),
        lambda data: data["samples"][0].pop("free"),
        lambda data: data["samples"][0].update(register="x"),
        lambda data: data["samples"][0].update(register=-5),
        lambda data: data.update(date="yesterday"),
        lambda data: data.update(missing=7),
        lambda data: data.update(page_size=0),
        lambda data: data.update(samples=data["samples"][:5]),
        lambda data: data["samples"][0].update(nbytes=0),
        lambda data: data.update(date="2026-11-30T12:00:00"),
    ],
)
def test_a_damaged_file_is_refused_with_the_remedy(tmp_path, spoil):
    path = str(tmp_path / "calibration.json")
    calibration(SAMPLES).save(path)
    with open(path) as file:
        data = json.load(file)
    spoil(data)
    with open(path, "w") as file:
        json.dump(data, file)
    with pytest.raises(ValueError, match="mmcore register --calibrate"):
        cm.Calibration.load(path)


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "\x00\xff", '{"version": 1}'])
def test_no_calibration_at_all(tmp_path, text):
    path = tmp_path / "calibration.json"
    path.write_bytes(text.encode("latin1"))
    with pytest.raises(ValueError, match="no calibration"):
        cm.Calibration.load(str(path))
    with pytest.raises(FileNotFoundError):
        cm.Calibration.load(str(tmp_path / "none"))


def test_doubts(monkeypatch):
    monkeypatch.setattr(cm, "cpu_name", lambda: "some")
    monkeypatch.setattr(cm.platform, "release", lambda: "6.18")
    made = calibration(SAMPLES)
    assert made.doubts(NOW) == []
    assert "30 days ago" in made.doubts(NOW + datetime.timedelta(days=30))[0]
    assert "future" in made.doubts(NOW - datetime.timedelta(days=30))[0]
    foreign = calibration(SAMPLES, kernel="5.10", cpu="other")
    assert "Linux 5.10, this is 6.18" in foreign.doubts(NOW)[0] and "other, this is some" in foreign.doubts(NOW)[1]
    assert made.doubt_of_size("thp", 1 << 30).startswith("1 GiB lies outside of the measured 2 MiB to 128 MiB")
    assert made.doubt_of_size("thp", 8 << 20) == ""


def test_sessions_of_one_machine_are_joined_and_the_oldest_go():
    def session(number, **change):
        date = f"2026-11-{number:02}T00:00:00+00:00"
        return calibration(
            [{**sample, "session": date} for sample in SAMPLES if sample["session"] == SESSIONS[0]], date=date, **change
        )

    kept = session(1)
    for number in range(2, 2 + cm.SESSIONS):
        kept = session(number).joined(kept)
    assert (
        len(kept.sessions) == cm.SESSIONS
        and kept.sessions[0].startswith("2026-11-02")
        and kept.date.startswith("2026-11-09")
    )
    assert session(20, kernel="7.0").joined(kept).sessions == ["2026-11-20T00:00:00+00:00"]
    # What was measured once is not missing because it cannot be had today.
    without = calibration(
        [{**sample, "session": "2026-11-21"} for sample in SAMPLES if sample["backing"] == "4k"],
        missing={"thp": ("gone", "come back"), "hugetlb": ("no pool", "grow it")},
    )
    assert set(without.joined(kept).missing) == {"hugetlb"} and without.joined(kept).predict("thp", 4 << 20)


def test_calibrate_leaves_out_what_cannot_be_had(monkeypatch, tmp_path):
    def measure(nbytes, backing):
        if backing == "hugetlb":
            raise NotPossible("no pool", "grow it")
        return {"backing": backing, "nbytes": nbytes, **{phase: float(nbytes) for phase in cm.PHASES}}

    monkeypatch.setattr(cm, "run_sample", measure)
    told = []
    got = cm.calibrate(rounds=4, progress=told.append)
    assert (
        set(got.lines) == {"4k", "thp"}
        and got.missing == {"hugetlb": ("no pool", "grow it")}
        and "round 1 of 4" in told[0]
    )
    assert got.predict("thp", 8 << 20)["register"].middle == pytest.approx(8 << 20)
    path = str(tmp_path / "calibration.json")
    first = cm.recalibrate(path, rounds=4)
    assert cm.Calibration.load(path) == first
    (tmp_path / "calibration.json").write_text("damaged")
    assert len(cm.recalibrate(path, rounds=4).sessions) == 1, "a damaged file is replaced"
    with pytest.raises(NotPossible, match="no pool"):
        cm.calibrate(["hugetlb"])
