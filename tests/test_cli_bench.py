"""`mmcore bench`: every table, what is said about a ratio, files, comparison and picture. No time is asserted."""
import copy
import csv
import json

import pytest
from live_support import mmcore, run

import mmcore as mmc
from mmcore.bench import gup, tables
from mmcore.bench.measure import Row, ratio_of


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """One small run of all tables, and its file."""
    path = tmp_path_factory.mktemp("bench") / "run.json"
    done = mmcore("bench", "--quick", "--size", "64M", "--save", str(path), "--csv", str(path.with_suffix(".csv")))
    assert done.returncode == 0, done.stderr
    return path, done.stdout, json.loads(path.read_text())


def entries(report, **which):
    return [entry for entry in report["entries"] if all(entry[name] == value for name, value in which.items())]


# ---- the run ---------------------------------------------------------------------------------------------------------
def test_every_table_of_the_seeds_is_there(saved):
    _, text, report = saved
    published = {(entry["scenario"], entry["before"], entry["after"]): round(entry["published_ratio"], 2)
                 for entry in report["entries"] if entry["published_ratio"]}
    for key, ratio in {("THP", "page", "head"): 3.78, ("1 GiB hugetlb", "page", "head"): 3.19,
                       ("get", "page", "leaf"): 16.85,
                       ("pin", "page", "leaf"): 21.33, ("longterm pin", "page", "leaf"): 10.53,
                       ("THP", "list + page", "list + range"): 4.56,
                       ("devdax", "list + page", "list + array, head"): 1.92,
                       ("hugetlb", "list + page", "list + array, head"): 2.30}.items():
        assert published[key] == ratio
    for words in ("87.6 -> 23.2 ms", "150 -> 8.9 ms", "31617.9 -> 16426 us", "scenario", "verdict", "published",
                  "kernel", "C peer",
                  "memory itself", "NumPy", "Cython"):
        assert words in text
    assert any("VFIO" in entry["table"] for entry in report["entries"])
    assert report["cost_model"] or "calibrat" in report["missing"]["cost model"]


def test_nine_rounds_and_honest_verdicts(saved):
    _, text, report = saved
    assert report["rounds"] == 9
    for entry in report["entries"]:
        assert entry["rounds"] == len(entry["samples"]["before"]) >= 9
        assert entry["low"] <= entry["ratio"] <= entry["high"]
        assert (entry["verdict"] == "win") == (entry["low"] > 1) and (entry["verdict"] == "loss") == (entry["high"] < 1)
        if entry["verdict"] != "win":
            assert f"{entry['scenario']}, {entry['before']} -> {entry['after']}: {entry['ratio']:.2f}x" in text
    assert f"{sum(entry['verdict'] == 'win' for entry in report['entries'])} of {len(report['entries'])} lines" in text


def test_peers_and_kernel_have_a_figure_or_a_reason(saved):
    _, text, report = saved
    for entry in report["entries"]:
        assert entry["kernel"].get("missing") or entry["kernel"]["ns_per_page"] > 0
        assert entry["peer"].get("missing") or entry["peer"]["ns_per_page"] > 0
        for why in (entry["kernel"].get("missing"), entry["peer"].get("missing")):
            assert not why or why in text
    assert set(report["floor_ns_per_page"]) == {"read a list of PFNs", "write a list of PFNs",
                                                "read one word of each struct page"}


def test_csv_has_the_same_lines(saved):
    path, _, report = saved
    rows = list(csv.DictReader(path.with_suffix(".csv").open()))
    assert [row["scenario"] for row in rows] == [entry["scenario"] for entry in report["entries"]]
    assert [float(row["ratio"]) for row in rows] == [entry["ratio"] for entry in report["entries"]]
    out = mmcore("bench", "--load", str(path), "--csv", "-").stdout
    assert out == path.with_suffix(".csv").read_text()


def test_one_table_as_json():
    done = mmcore("bench", "--quick", "--size", "64M", "--table", "device-dax", "--json", "--rounds", "10")
    report = json.loads(done.stdout)
    assert {entry["scenario"] for entry in report["entries"]} == {"get", "pin", "longterm pin"}
    assert report["rounds"] == 10


# ---- what is said about ratios ---------------------------------------------------------------------------------------
@pytest.mark.parametrize("before, after, verdict, ratio", [
    ([20] * 9, [10] * 9, "win", 2), ([10] * 9, [20] * 9, "loss", 0.5), ([10, 11, 12] * 3, [11] * 9, "even", 1),
    ([20] * 7 + [9, 9], [10] * 9, "even", 2),            # one round may be out of line, not two
    ([20] * 8 + [5], [10] * 9, "win", 2), ([20, 20], [10, 10], "too few rounds", 2),
    ([20] * 3 + [9], [10] * 4, "even", 2),
])
def test_a_spread_that_crosses_1_is_no_win(before, after, verdict, ratio):
    told = ratio_of([value * 1000 for value in before], [value * 1000 for value in after])
    assert told["verdict"] == verdict and told["ratio"] == pytest.approx(ratio)


def test_rows_of_other_scenarios_become_lines():
    """What VFIO's and other modules return."""
    bar = {"against": "old", "ratio": 2, "spread": 0, "bar": "", "met": None, "note": "published: 0.047 -> 0.025 s for 16 GiB"}
    rows = [Row("case", "old", 10, [100] * 9), Row("case", "new", 10, [50] * 9, [bar]),
            Row("case", "absent", 10, [], [{"against": "old", "note": ""}], missing="why")]
    entry, = tables.of_rows("table", rows)
    assert (entry.before, entry.after, entry.published) == ("old", "new", "0.047 -> 0.025 s for 16 GiB")
    assert entry.published_ratio == 0.047 / 0.025
    assert entry.as_dict()["ratio"] == 2 and entry.as_dict()["after_ns_per_page"] == 5


def test_the_peers_of_lists_do_what_the_engine_does():
    """C takes the same pins and references into the same list as pin_user_pages_fast() and get_user_pages_fast()."""
    machine = gup.Machine(8 << 20, "device")
    peers = gup.peers_of(tables.PEERS / "gup.c", machine)
    if isinstance(peers, str):
        machine.close()
        pytest.skip(peers)
    try:
        mmc.release_pages(mmc.get_user_pages_fast(machine.mm, machine.addr, machine.nr,
                                                  mmc.FOLL_WRITE))   # marks them as accessed
        before = machine.mem.pages.tobytes()
        for pin, call, release in ((1, mmc.pin_user_pages_fast, mmc.unpin_user_pages),
                                   (0, mmc.get_user_pages_fast, mmc.release_pages)):
            pages = call(machine.mm, machine.addr, machine.nr, mmc.FOLL_WRITE)
            taken = machine.mem.pages.tobytes()
            release(pages)
            peers.take_list(pin)
            assert machine.mem.pages.tobytes() == taken and (peers.buffer == pages.pfns).all()
            peers.drop_list()
            assert machine.mem.pages.tobytes() == before
            del pages
    finally:
        peers.close()
        machine.close()


# ---- comparison ------------------------------------------------------------------------------------------------------
def test_compare_with_an_old_run(saved, tmp_path):
    path, _, report = saved
    old = copy.deepcopy(report)
    first, second, third = old["entries"][:3]
    for name in ("ratio", "low", "high"):
        first[name] /= 1000
        second[name] *= 1000
    gone = dict(third, scenario="not any more")
    old["entries"][2] = gone
    other = tmp_path / "old.json"
    other.write_text(json.dumps(old))
    done = mmcore("bench", "--load", str(path), "--compare", str(other), "--json")
    rows = json.loads(done.stdout)["against"]["rows"]
    assert [row["verdict"] for row in rows[:4]] == ["better", "worse", "new", "same"] and rows[-1]["verdict"] == "gone"
    text = mmcore("bench", "--load", str(path), "--compare", str(other)).stdout
    assert "against the run of" in text and "better" in text and "worse" in text


# ---- picture ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("kind, starts", [("png", b"\x89PNG"), ("svg", b"<?xml")])
def test_the_picture(saved, tmp_path, kind, starts):
    pytest.importorskip("matplotlib")
    out = tmp_path / f"out.{kind}"
    done = mmcore("bench", "--load", str(saved[0]), "--plot", str(out))
    assert done.returncode == 0, done.stderr
    assert out.read_bytes().startswith(starts) and out.stat().st_size > 5000


def test_without_matplotlib(saved):
    code = ("import sys; sys.modules['matplotlib'] = None\n"
            f"from mmcore.cli import main; sys.exit(main(['bench', '--load', {str(saved[0])!r}, '--plot', 'x.png']))")
    done = run("-c", code)
    assert done.returncode == 77 and "mmcore[plot]" in done.stderr


# ---- wrong use -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("words, code", [(["--rounds", "8"], 2), (["--rounds", "x"], 2), (["--size", "5M"], 2),
                                         (["--table", "nothing"], 2),
                                         (["--plot", "x.pdf"], 2), (["--json", "--csv", "-"], 2),
                                         (["--compare", "/nonexistent"], 1),
                                         (["--load", "/nonexistent"], 1)])
def test_wrong_options(words, code):
    done = mmcore("bench", *words)
    assert done.returncode == code and "Traceback" not in done.stderr and done.stderr


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"entries": 3}', "\0", '{"entries": [5]}', '{"entries": [{}]}'])
def test_files_that_are_none_of_ours(tmp_path, text):
    path = tmp_path / "x.json"
    path.write_text(text)
    for option in ("--compare", "--load"):
        done = mmcore("bench", option, str(path), "--quick", "--table", "rdma")
        assert done.returncode == 1 and "Traceback" not in done.stderr and str(path) in done.stderr and not done.stdout


def test_a_run_that_lacks_a_field_is_none(saved, tmp_path):
    path = tmp_path / "x.json"
    for field in ("machine", "floor_ns_per_page", "missing", "seconds"):
        path.write_text(json.dumps({name: value for name, value in saved[2].items() if name != field}))
        done = mmcore("bench", "--load", str(path))
        assert (done.returncode, done.stdout) == (1, "") and f"KeyError '{field}'" in done.stderr
    done = mmcore("bench", "--load", str(saved[0]), "--save", str(tmp_path / "no" / "x"))
    assert done.returncode == 1 and "no such folder" in done.stderr and not done.stdout


def test_where_the_repository_is_not(monkeypatch, tmp_path):
    """An installed package has no peers: it says so, and measures all the same."""
    setup = tables.Setup(64 << 20, 16 << 20, 8 << 20, 3, None, tmp_path)
    rows = [entry.as_dict() for entry in tables.device_leaves(setup)]
    assert all("no C source" in row["peer"]["missing"] for row in rows) and all(row["ratio"] > 0 for row in rows)
