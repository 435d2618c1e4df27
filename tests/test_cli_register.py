"""`mmcore register` as its users meet it: a child process, text and JSON, exit status and stderr."""

import json
import os
import pty
import subprocess
import sys

import pytest
from live_support import (
    CAP_IPC_LOCK, CAP_SYS_ADMIN, PAGE, ROOT, engine_or_skip, linux, mmcore, or_skip, root, run,
    without_capabilities,
)

from mmcore import live
from mmcore.live.buffer import hugetlb_pool, hugetlb_size

GENERATIONS = ["page", "head", "run", "range"]


def report(*words, **how):
    done = mmcore("register", "--json", "--rounds", "2", *words, **how)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def one_line(done, status):
    """Assert how an error looks: its status, nothing on stdout, one line and no traceback."""
    assert done.returncode == status, (done.stdout, done.stderr)
    assert done.stdout == ""
    assert len(done.stderr.splitlines()) == 1, done.stderr
    return done.stderr


@pytest.mark.parametrize("words", [["--version"], ["-h"], ["register", "-h"]])
def test_version_and_help(words):
    done = mmcore(*words)
    assert done.returncode == 0 and "mmcore" in done.stdout and not done.stderr


@pytest.mark.parametrize("words, text", [
    ([], "VERB"),
    (["nonsense"], "nonsense"),
    (["register", "--backing", "2m"], "2m"),
    (["register", "--size", "lots"], "lots"),
    (["register", "--size", "0"], "size"),
    (["register", "--rounds", "0"], "above 0"),
    (["register", "--pid", "x"], "above 0"),
    (["register", "--pid", "1"], "--addr and --length"),
    (["register", "--addr", "0x1000"], "--pid"),
    (["register", "--pid", "1", "--addr", "7f00zz", "--length", "4K"], "0x"),
    (["register", "--pid", "1", "--addr", "0x1000", "--length", "4K", "--size", "4K"], "no --size"),
    (["register", "--pid", "1", "--addr", "0x1000", "--length", "4K", "--model"], "no --size"),
])
def test_usage(words, text):
    done = mmcore(*words)
    assert done.returncode == 2 and text in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize("backing, size, kind", [
    ("4k", 4096, "anon"), ("thp", 2 << 20, "anon"), ("hugetlb", 2 << 20, "hugetlb"), ("shmem", 4096, "shmem"),
])
def test_model(backing, size, kind):
    engine_or_skip()
    got = report("--model", "--size", "8M", "--backing", backing)
    assert got["source"] == "model" and got["why_model"]["reason"] == "asked for"
    assert got["backing"]["by_size"] == {str(size): 8 << 20}
    assert got["backing"]["by_kind"] == {kind: 8 << 20}
    assert (got["backing"]["pages"], got["backing"]["folios"]) == (2048, (8 << 20) // size)
    assert not got["kernel"]["possible"]
    counts(got)


def counts(got):
    """Assert the counter updates of every generation: they follow from the layout alone."""
    assert [row["release"] for row in got["engine"]] == GENERATIONS
    assert got["pins_left"] == 0
    rows = {row["release"]: row for row in got["engine"]}
    pages, folios = got["backing"]["pages"], got["backing"]["folios"]
    small = got["backing"]["by_size"].get("4096", 0) // 4096
    large, large_pages = folios - small, pages - small
    # A small page takes one counter, a large folio two: _refcount and _pincount.
    assert rows["page"]["unpin_updates"] == small + 2 * large_pages
    assert rows["run"]["unpin_updates"] == rows["head"]["unpin_updates"] == small + 2 * large
    assert rows["range"]["unpin_updates"] == small + 2 * large
    for row in rows.values():
        assert row["unpin_ns_per_page"] > 0 and row["pin_ns_per_page"] > 0 and row["ratio"] > 0


def test_model_rounds_hugetlb_up_and_keeps_the_tail_of_thp():
    engine_or_skip()
    got = report("--model", "--size", "3M", "--backing", "hugetlb")
    assert got["backing"]["by_size"] == {str(2 << 20): 4 << 20}
    got = report("--model", "--size", "3M", "--backing", "thp")
    assert got["backing"]["by_size"] == {str(2 << 20): 2 << 20, "4096": 1 << 20}


@linux
@pytest.mark.parametrize("backing", ["4k", "thp", "shmem"])
def test_live(backing):
    engine_or_skip()
    with live.buffer(PAGE) as buf:
        or_skip(live.capture, buf)
    got = report("--size", "8M", "--backing", backing)
    assert got["source"] == "live" and got["buffer"]["own"] and got["buffer"]["addr"]
    assert got["backing"]["length"] == got["backing"]["present"] == got["memlock"]["needed"] == 8 << 20
    counts(got)
    kernel = got["kernel"]
    if not kernel["possible"]:
        assert kernel["reason"] and kernel["remedy"]
        pytest.skip(kernel["reason"])
    assert kernel["predicted"]["acquired"] == got["backing"]["pages"]
    assert kernel["equal"]["vmpin"] is True
    if not kernel["equal"]["pins"]:
        pytest.skip(f"other pins on the machine: {kernel['counted']} against {kernel['predicted']}")


@linux
def test_text_has_everything_in_order():
    engine_or_skip()
    with live.buffer(PAGE) as buf:
        or_skip(live.capture, buf)
    done = mmcore("register", "--size", "8M", "--backing", "thp", "--rounds", "2")
    assert done.returncode == 0 and not done.stderr
    text = done.stdout
    assert "\x1b" not in text
    places = [text.index(word) for word in (
        "buffer ", "backed by", "layout ", "memlock ", "release ", "\npage ", "\nhead ", "\nrun ", "\nrange ",
    )]
    assert places == sorted(places)
    assert "2048 pages in" in text and "physical run" in text and "scatterlist segment" in text
    assert "8 MiB needed, limit" in text


@linux
def test_a_buffer_of_another_process():
    engine_or_skip()
    with live.buffer("4M", "thp") as buf:
        or_skip(live.capture, buf)
        got = report("--pid", str(os.getpid()), "--addr", hex(buf.addr + PAGE), "--length", "1M")
    assert got["source"] == "live" and got["buffer"]["pid"] == os.getpid() and not got["buffer"]["own"]
    assert got["backing"]["length"] == 1 << 20
    assert not got["kernel"]["possible"] and "only the caller's own" in got["kernel"]["reason"]


@linux
def test_a_process_that_is_not_there():
    done = mmcore("register", "--pid", str(1 << 22 | 1), "--addr", "0x1000", "--length", "4K")
    assert "does not exist" in one_line(done, 1)


@linux
def test_an_address_where_nothing_is():
    with live.buffer(PAGE) as buf:
        or_skip(live.capture, buf)
    done = mmcore("register", "--pid", str(os.getpid()), "--addr", "0x1000", "--length", "4K")
    assert "maps nothing at 0x1000" in one_line(done, 1)


@linux
def test_more_memory_than_there_is():
    assert "is available; ask for less" in one_line(mmcore("register", "--size", "100T"), 1)


def test_a_model_that_is_larger_than_the_memory_here():
    done = mmcore("register", "--model", "--size", "4000T")
    assert done.returncode == 1 and "a model of 4000 TiB takes 250 TiB" in done.stderr and not done.stdout


@linux
def test_hugetlb_without_a_pool():
    size = hugetlb_size()
    pool = hugetlb_pool(size) if size else None
    wanted = 2 << 20 if pool is None else (pool["available"] + 1) * size
    text = one_line(mmcore("register", "--backing", "hugetlb", "--size", str(wanted)), 77)
    assert "not possible here" in text and "remedy" in text
    if pool:
        assert "nr_hugepages" in text and hugetlb_pool(size) == pool


@linux
@root
def test_without_cap_sys_admin_the_model_stands_in_and_says_so():
    engine_or_skip()
    how = {"preexec_fn": without_capabilities(CAP_SYS_ADMIN)}
    got = report("--size", "4M", **how)
    assert got["source"] == "model" and "CAP_SYS_ADMIN" in got["why_model"]["reason"]
    assert got["why_model"]["remedy"] and got["buffer"]["addr"] is None
    done = mmcore("register", "--size", "4M", "--rounds", "2", **how)
    assert done.returncode == 0 and done.stdout.startswith("model ")
    assert "CAP_SYS_ADMIN" in done.stdout


@linux
@root
def test_without_cap_sys_admin_another_process_is_not_possible():
    with live.buffer(PAGE) as buf:
        done = mmcore("register", "--pid", str(os.getpid()), "--addr", hex(buf.addr), "--length", "4K",
                      preexec_fn=without_capabilities(CAP_SYS_ADMIN))
    assert "not possible here" in one_line(done, 77)


@linux
@root
def test_memlock_is_refused_with_the_remedy():
    engine_or_skip()
    import resource

    drop = without_capabilities(CAP_IPC_LOCK)

    def less():
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (1 << 20, 1 << 20))
        drop()

    got = report("--size", "4M", preexec_fn=less)
    assert got["memlock"]["verdict"] == "refused" and "memlock 4096" in got["memlock"]["remedy"]
    assert not got["kernel"]["possible"] and got["kernel"]["remedy"]


def test_off_linux_the_model_stands_in():
    engine_or_skip()
    code = ("import sys; from mmcore.cli import main; sys.platform = 'plan9'\n"
            "sys.exit(main(['register', '--json', '--size', '4M', '--rounds', '1']))")
    done = run("-c", code)
    assert done.returncode == 0, done.stderr
    got = json.loads(done.stdout)
    assert got["source"] == "model" and "plan9" in got["why_model"]["reason"]
    assert got["memlock"]["verdict"] == "unknown"


def test_a_reader_that_leaves_early_gets_no_traceback():
    engine_or_skip()
    child = subprocess.Popen(
        [sys.executable, "-m", "mmcore.cli", "register", "--model", "--size", "4M", "--rounds", "1"],
        cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )
    child.stdout.close()
    assert "Traceback" not in child.stderr.read()
    child.stderr.close()
    child.wait()


@pytest.mark.parametrize("no_color", [False, True])
def test_on_a_terminal(no_color):
    engine_or_skip()
    mine, theirs = pty.openpty()
    env = {"TERM": "xterm", "COLUMNS": "120", **({"NO_COLOR": "1"} if no_color else {})}
    child = subprocess.Popen(
        [sys.executable, "-m", "mmcore.cli", "register", "--model", "--size", "4M", "--rounds", "1"],
        cwd=ROOT, stdout=theirs, stderr=theirs, env={**os.environ, **env},
    )
    os.close(theirs)
    text = b""
    while True:
        try:
            part = os.read(mine, 4096)
        except OSError:                       # EIO: the child has closed the terminal
            break
        if not part:
            break
        text += part
    os.close(mine)
    assert child.wait() == 0
    text = text.decode()
    assert all(name in text for name in GENERATIONS)
    if no_color:
        assert "\x1b[3" not in text
