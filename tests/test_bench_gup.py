"""The benchmark of acquiring: every case runs, gives everything back, and its verdicts follow from its numbers. No time is
asserted."""
import json
import subprocess
import sys
from pathlib import Path

import pytest

from mmcore.bench import gup
from mmcore.bench.peers import NoPeers, build

SCRIPT = Path(__file__).resolve().parent.parent / "benchmarks" / "bench_gup.py"
SOURCE = SCRIPT.parent / "peers" / "gup.c"
SIZE, BASE_SIZE = 32 << 20, 4 << 20

pytestmark = pytest.mark.skipif(not SOURCE.exists(), reason="the benchmarks are not in this tree")

VARIANTS = {
    "device leaves, 512 a call": {"leaf", "page"},
    "THP leaves, 512 a call": {"leaf", "page"},
    "PMD leaves into lists and ranges": {"PageList, warm", "C fill, warm", "PageList, fresh", "C fill, fresh", "PageRanges",
                                         "C ranges"},
    "base pages": {"pin_user_pages_fast", "pin_user_pages", "kernel, io_uring register"},
    "longterm check": {"per folio", "per page", "with the check", "without"},
    "flat, 2 MiB leaves": {"2 MiB", "8 MiB", "32 MiB", "128 MiB"},
    "flat, base pages": {"2 MiB", "8 MiB", "32 MiB", "128 MiB"},
}


@pytest.mark.parametrize("name", gup.CASES)
def test_each_case_measures_its_variants_and_gives_back(name, monkeypatch):
    closed = []
    close = gup.Machine.close

    def looks(machine):
        machine.mem.check()
        stat = machine.mem.vmstat()
        closed.append(stat["nr_foll_pin_acquired"] - stat["nr_foll_pin_released"])
        close(machine)

    monkeypatch.setattr(gup.Machine, "close", looks)
    rows = gup.measure([name], SIZE, BASE_SIZE, 1, SOURCE)
    assert {row.variant for row in rows} == VARIANTS[name]
    assert all(row.missing or (len(row.samples) in (1, 2) and min(row.samples) > 0) for row in rows)
    assert closed and not any(closed), "pins were left when a machine was taken down"
    for row in rows:
        for bar in row.bars:
            assert bar["met"] is None or isinstance(bar["met"], bool)


def test_peers_that_cannot_be_built_are_missing_and_said(monkeypatch):
    def nothing(source):
        raise NoPeers("no compiler")

    monkeypatch.setattr(gup, "build", nothing)
    rows = gup.measure(["PMD leaves into lists and ranges"], SIZE, BASE_SIZE, 1, SOURCE)
    assert {row.variant: row.missing for row in rows if row.missing} == dict.fromkeys(
        ("C fill, warm", "C fill, fresh", "C ranges"), "no compiler")


def test_peers_do_what_the_engine_does():
    try:
        build(SOURCE)
    except NoPeers as reason:
        pytest.skip(str(reason))
    machine = gup.Machine(8 << 20, "thp")
    peers = gup.Peers(SOURCE, machine)
    folio = machine.mm.page_at(machine.addr).folio
    for pin, pins, refs in ((1, 512, 512), (0, 0, 512)):
        before = folio.refcount
        peers.take_list(pin)
        assert (folio.pincount, folio.refcount) == (pins, before + refs)
        assert peers.buffer.tolist() == [page.pfn for page in (machine.mm.page_at(machine.addr + i * 4096) for i in range(2048))]
        peers.drop_list()
        assert (folio.pincount, folio.refcount) == (0, before)
    peers.pin_and_drop()
    assert folio.pincount == 0
    peers.close()
    machine.close()


def test_a_time_is_judged_by_the_page_or_by_the_leaf():
    assert gup.ns("run", 2, 100).judge({"run": [150, 150, 150]})["met"] is True
    leaf = gup.ns("run", 2, 100, pages=4).judge({"run": [150, 150, 150]})
    assert leaf["met"] is False and leaf["ratio"] == 6 and leaf["bar"] == "<= 2 ns/leaf"
    assert gup.ns("run", 2, 100).judge({})["met"] is None


def test_script():
    done = subprocess.run([sys.executable, SCRIPT, "--size", "64M", "--base-size", "4M", "--rounds", "1", "--case", "longterm",
                           "--json", "-"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert {row["variant"] for row in json.loads(done.stdout)} == VARIANTS["longterm check"]
    for wrong in (["--size", "5M"], ["--case", "nothing"]):
        assert subprocess.run([sys.executable, SCRIPT, *wrong], capture_output=True).returncode == 2
