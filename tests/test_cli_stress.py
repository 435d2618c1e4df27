"""`mmcore stress`: the laws it checks are checked, a failure says how to see it again, and a seed is a run."""
import json
import random

import pytest
from live_support import mmcore

import mmcore as mmc
from mmcore.bench import stress, stress_jobs
from mmcore.bench.stress import Stress, StressFailure


@pytest.fixture
def run_of_one():
    run = Stress(1, 5)
    yield run
    run.failure = None


def test_words_and_numbers():
    done = mmcore("stress", "--threads", "2", "--rounds", "5", "--seed", "3")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].split() == ["operation", "done", "refused"]
    assert [line.split()[0] for line in lines[1:len(stress_jobs.JOBS) + 1]] == list(stress_jobs.JOBS)
    assert "operations/s by 2 threads; one thread alone" in done.stdout and "scaling" in done.stdout
    assert "hold: 6 checks" in done.stdout and "seed 3, 5 rounds" in done.stdout
    assert "seed 3, 2 threads" in done.stderr


def test_json_and_mix():
    done = mmcore("stress", "--rounds", "3", "--mix", "pin,unpin,pin", "--json", "--threads", "1", "--debug")
    got = json.loads(done.stdout)
    assert set(got["operations"]) == {"pin", "unpin"} and got["mix"] == ["pin", "unpin", "pin"]
    assert got["scaling"] is None
    assert sum(got["operations"].values()) + sum(got["refused"].values()) == 3 * stress.PER_ROUND
    assert got["operations"]["pin"] > got["operations"]["unpin"] and got["checks"] == 4


def test_seconds_end_it():
    done = mmcore("stress", "--seconds", "0.2", "--json")
    assert done.returncode == 0 and json.loads(done.stdout)["rounds"] >= 1


@pytest.mark.parametrize("words, code", [(["--threads", "0"], 2), (["--threads", "65"], 2), (["--seconds", "0"], 2),
                                         (["--seed", "x"], 2),
                                         (["--rounds", "0"], 2), (["--mix", "pin,nothing"], 1), (["--mix", ","], 1)])
def test_wrong_options(words, code):
    done = mmcore("stress", *words)
    assert done.returncode == code and "Traceback" not in done.stderr and done.stderr


def test_a_seed_is_a_run():
    """One thread draws the same operations, and leaves the same struct pages."""
    runs = [stress.run(1, seed=seed, rounds=6) for seed in (11, 11, 12)]
    assert runs[0].state == runs[1].state != runs[2].state
    assert runs[0].operations == runs[1].operations and runs[0].pins == runs[1].pins


@pytest.mark.parametrize("word", stress_jobs.JOBS)
def test_each_job_by_itself(word):
    """On pins that are there, each job does its work, and not only refusals."""
    report = stress.run(2, seed=1, rounds=5, mix=["pin", "fault", word])
    assert report.operations[word] > 0


@pytest.mark.parametrize("debug", (False, True))
@pytest.mark.parametrize("seed", range(3))
def test_all_jobs_by_many_threads(seed, debug):
    report = stress.run(4, seed=seed, rounds=10, debug=debug)
    assert report.checks == 11 and report.pins > 0 and set(report.operations) == set(stress_jobs.JOBS)


# ---- it can fail -----------------------------------------------------------------------------------------------------
def test_a_pin_that_is_forgotten_is_seen_and_where():
    run = Stress(1, 5, ["pin", "fault", "umem", "longterm"])
    run.round(run.workers)
    run.check()
    page = mmc.alloc_page(run.world.mem)
    mmc.grab_pages(mmc.PageList(run.world.mem, [page.pfn]))
    with pytest.raises(StressFailure, match=f"(?s)pins are held.*around pfn {page.pfn:#x}:.*_refcount=1025"):
        run.check()


def test_a_forgotten_pin_is_seen_beside_all_jobs(run_of_one):
    run_of_one.round(run_of_one.workers)
    run_of_one.check()
    page = mmc.alloc_page(run_of_one.world.mem)
    mmc.grab_pages(mmc.PageList(run_of_one.world.mem, [page.pfn]))
    with pytest.raises(StressFailure,
                       match=r"(?s)pins: \d+ pins are held, and \d+ are counted.*seed 5, 1 threads, round 1.*--seed 5"):
        run_of_one.check()
    with pytest.raises(StressFailure, match="at the end"):
        run_of_one.finish()


def test_a_broken_struct_page_is_seen_and_shown(run_of_one):
    mem = run_of_one.world.mem
    run_of_one.round(run_of_one.workers)
    folio = mmc.folio_alloc(mem, 2)
    run_of_one.check()
    with open("/proc/self/mem", "r+b", buffering=0) as bytes_of_this_process:
        # Behind the engine's back: the view is read-only.
        bytes_of_this_process.seek(mem.pages[folio.pfn:].ctypes.data + 52)
        bytes_of_this_process.write((7).to_bytes(4, "little"))
        mapcount = mem.pages[folio.pfn:].ctypes.data + 48
        bytes_of_this_process.seek(mapcount)
        bytes_of_this_process.write((100).to_bytes(4, "little"))
    with pytest.raises(StressFailure) as failure:
        run_of_one.check()
    text = str(failure.value)
    assert "seed 5" in text and f"around pfn {folio.pfn:#x}:" in text
    assert f"head   pfn {folio.pfn:#x}" in text and "_refcount=7" in text and "after" in text


def test_an_operation_that_fails_is_seen(monkeypatch):
    def unpin(worker):
        raise mmc.BadPage("some law", "it broke", pfn=2)

    monkeypatch.setitem(stress_jobs.JOBS, "unpin", unpin)
    run = Stress(1, 5, ["unpin"])
    with pytest.raises(StressFailure,
                       match=r"(?s)unpin: BadPage: some law: it broke.*again: mmcore stress --seed 5 --threads 1 "
                                            r"--rounds 1 --mix unpin\n.*around pfn 0x2"):
        run.round(run.workers)


def test_the_command_shows_the_seed_and_fails(tmp_path):
    code = ("from mmcore.bench import stress_jobs; import mmcore as mmc\n"
            "def pin(worker): raise mmc.BadPage('a law', 'of the test', pfn=2)\n"
            "stress_jobs.JOBS['pin'] = pin\n"
            "from mmcore.cli import main; raise SystemExit(main(['stress', '--seed', '77', '--rounds', '1']))")
    from live_support import run
    done = run("-c", code)
    assert done.returncode == 1
    assert all(words in done.stderr for words in ("a law: of the test", "--seed 77", "around pfn 0x2"))


def test_a_round_that_does_not_end_is_told(run_of_one, monkeypatch):
    import threading
    gate = threading.Event()
    monkeypatch.setattr(stress, "STUCK_SECONDS", 0.2)
    run_of_one.jobs = [lambda worker: gate.wait()]
    with pytest.raises(StressFailure, match="does not end"):
        run_of_one.round(run_of_one.workers)
    gate.set()


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_a_minute_of_everything(seed):
    report = stress.run(random.Random(seed).choice((2, 4, 8)), 60, seed)
    assert report.checks > 10
