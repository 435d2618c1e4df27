"""`mmcore capture` and the reports on captures, as their users meet them: child processes, text, JSON, exit status."""

import contextlib
import io
import json
import os
import re
from types import SimpleNamespace

import numpy as np
import pytest
from live_support import CAP_SYS_ADMIN, ROOT, child, linux, made_up_capture, mmcore, or_skip, root, without_capabilities
from support import not_under_asan

from mmcore import cli, live
from mmcore.live import colours

pytestmark = linux

HOLDER = """
import sys
from mmcore import live
buf = live.buffer(8 << 20, "thp")
print(hex(buf.addr), flush=True)
sys.stdin.read()
"""
VERBS = ("backing", "types", "map")


@pytest.fixture(scope="module")
def holder():
    """A process with a buffer of 8 MiB, as (pid, address)."""
    with child(HOLDER) as (started, words):
        addr = int(words[0], 16)
        or_skip(live.capture, started.pid, addr, 4096)
        yield started.pid, addr


@pytest.fixture(scope="module")
def files(holder, tmp_path_factory):
    """Capture files of it: the buffer, and everything."""
    folder = tmp_path_factory.mktemp("captures")
    pid, addr = holder
    got = [mmcore("capture", "--pid", str(pid), "--addr", hex(addr), "--length", "8M", "-o",
                  str(folder / "buffer.npz")),
           mmcore("capture", "--pid", str(pid), "--all", "-o", str(folder / "all.npz"))]
    for done in got:
        assert done.returncode == 0 and not done.stderr, done.stderr
    return folder / "buffer.npz", folder / "all.npz", got


def call(*words, **how):
    """Run a verb: in this process, or with `how` in a child; returns what subprocess.run() would."""
    words = list(map(str, words))
    if how:
        return mmcore(*words, **how)
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            status = cli.main(words)
        except SystemExit as end:
            status = end.code
    return SimpleNamespace(returncode=status, stdout=out.getvalue(), stderr=err.getvalue())


def good(*words, **how):
    done = call(*words, **how)
    assert done.returncode == 0 and not done.stderr, (done.stdout, done.stderr)
    return done.stdout


def data(*words, **how):
    return json.loads(good(words[0], "--json", *words[1:], **how))


def error(*words, status=1, **how):
    done = call(*words, **how)
    assert done.returncode == status and done.stdout == "", (done.stdout, done.stderr)
    assert "Traceback" not in done.stderr and (status == 2 or len(done.stderr.splitlines()) == 1)
    return done.stderr


def test_what_capture_says(files):
    text = files[2][0].stdout
    assert re.search(r"pages +2048 looked at, 2048 present \(8 MiB\)", text)
    assert re.search(r"frames +\d+ of the machine", files[2][1].stdout)


def test_capture_as_json(holder, tmp_path):
    path = tmp_path / "x.npz"
    got = data("capture", "--pid", holder[0], "--vma", "stack", "-o", path)
    assert got["pid"] == holder[0] and got["mappings"] == 1 and got["bytes"] == path.stat().st_size
    assert got["partial"] == [] and got["frames"] == 0 and 0 < got["present"] <= got["pages"]
    assert live.Capture.load(path).vmas[0].path == "[stack]"


def test_capture_chooses_mappings(holder, tmp_path):
    path = tmp_path / "x.npz"
    good("capture", "--pid", holder[0], "--vma", "1", "-o", path)
    with open(f"/proc/{holder[0]}/maps") as file:
        assert live.Capture.load(path).vmas[0].start == int(file.readline().split("-")[0], 16)
    good("capture", "--pid", holder[0], "-o", path, "--no-names")
    assert not any("/lib" in vma.path for vma in live.Capture.load(path).vmas)
    good("capture", "--all", "-o", path)
    alone = live.Capture.load(path)
    assert alone.pid == 0 and not len(alone.pfns) and len(alone.frames) > 1000


@pytest.mark.parametrize("words, text", [
    (["capture"], "-o"), (["capture", "-o", "x"], "--pid"), (["capture", "--pid", "0", "-o", "x"], "above 0"),
    (["capture", "--pid", "1", "--vma", "7x", "-o", "x"], "line number"),
    (["capture", "--pid", "1", "--vma", "heap", "--all", "-o", "x"], "not both"),
    (["capture", "--pid", "1", "--addr", "0x1000", "-o", "x"], "go together"),
    (["capture", "--pid", "1", "--addr", "0x1000", "--length", "4K", "--vma", "heap", "-o", "x"], "not both"),
    (["capture", "--all", "--vma", "heap", "-o", "x"], "need a PID"),
    (["backing"], "PID|FILE"), (["backing", "0"], "above 0"), (["backing", "x.npz", "--vma", "heap"], "need a PID"),
    (["backing", "1", "--proc", "--json"], "not both"), (["frag", "--proc", "--json"], "not both"),
    (["types", "-b", "nothing"], "nothing"), (["types", "-b", "anon,~anon"], "forbids"),
    (["types", "-a", "9,8"], "holds no page"),
    (["types", "-a", "x"], "addr-spec"), (["types", "1", "-p", "2"], "one of"), (["types", "-l", "-L"], "not both"),
    (["types", "-d", "nope"], "nope"), (["types", "--vma", "heap"], "need a PID"),
    (["map", "--cell", "tiny"], "tiny"), (["map", "--columns", "3"], "8 to 1024"), (["map", "-o", "x.txt"], ".png"),
    (["map", "--strip"], "PID or a file"), (["map", "--pfns", "8,3"], "holds no page"),
    (["diff", "x.npz"], "AFTER"), (["pins", "--count", "3"], "--watch"),
    (["pins", "--watch", "--interval", "0"], "seconds"),
])
def test_usage(words, text):
    assert text in error(*words, status=2)


@pytest.mark.parametrize("verb", [*VERBS, "frag"])
def test_files_that_are_none(verb, tmp_path):
    path = tmp_path / "x.npz"
    assert "x.npz" in error(verb, path)
    path.write_bytes(b"hello")
    assert "capture again" in error(verb, path)


@pytest.mark.parametrize("closed", [1, 2])
def test_outputs_that_are_closed(closed, files, tmp_path):
    """mmcore pins >&-: there is nothing to write to, and nothing goes wrong."""
    for words in (["pins"], ["frag"], ["map", files[0]], ["gup-test", "-m", "1"], ["preflight", "--size", "64K"]):
        done = mmcore(*map(str, words), preexec_fn=lambda: os.close(closed))
        assert (done.returncode, done.stderr) == (0, "") and bool(done.stdout) == (closed == 2)


def test_processes_that_are_none(tmp_path):
    gone = str(1 << 22 | 1)
    for words in (["capture", "--pid", gone, "-o", tmp_path / "x"], ["backing", gone], ["types", gone], ["map", gone],
                  ["frag", gone]):
        assert "does not exist" in error(*words)
    assert "no address space" in error("backing", "2", status=77)
    assert not list(tmp_path.iterdir())


def test_where_nothing_can_be_written(holder, tmp_path):
    assert "no such folder" in error("capture", "--pid", holder[0], "-o", tmp_path / "no" / "x.npz")
    for folder in (tmp_path, ""):
        assert "name a file" in error("capture", "--pid", holder[0], "-o", folder)
    assert "maps nothing" in error("capture", "--pid", holder[0], "--addr", "0x1000", "--length", "4K", "-o",
                                   tmp_path / "x")
    assert "there is no line" in error("capture", "--pid", holder[0], "--vma", 99999, "-o", tmp_path / "x")
    assert not list(tmp_path.iterdir())


@root
def test_not_possible_without_privilege_but_files_are_read(holder, files, tmp_path):
    less = without_capabilities(CAP_SYS_ADMIN)
    for words in (["capture", "--pid", holder[0], "-o", tmp_path / "x"], ["backing", holder[0]]):
        assert "CAP_SYS_ADMIN" in error(*words, status=77, preexec_fn=less)
    for words in (["backing", files[0]], ["map", files[1]], ["frag"], ["pins"]):
        good(*words, preexec_fn=less)


def test_backing(holder, files):
    pid, addr = holder
    now = data("backing", pid, "--addr", hex(addr), "--length", "8M")
    then = data("backing", files[0])
    for got in (now, then):
        assert got["present"] == got["length"] == 8 << 20 == sum(got["by_size"].values())
        one = next(one for one in got["mappings"] if one["start"] <= addr < one["end"])
        assert one["by_kind"] == {"anon": 8 << 20} and one["sizes"][-1]["size"] == 2 << 20
        assert set(got["settings"]) == {"thp", "mthp", "hugetlb", "free_blocks"}
    text = good("backing", files[0])
    for word in ("looked at", "present ", "folios ", "kinds ", "THP ", "hugetlb ", "folio size", "huge",
                 "2 MiB: 8 MiB"):
        assert word in text, word
    assert "\x1b" not in text


def test_backing_as_smaps(holder, files):
    got = good("backing", files[0], "--proc").splitlines()
    assert re.fullmatch(r"[0-9a-f]+-[0-9a-f]+ rw-p 00000000 00:00 0 ?", got[0])
    assert any(re.fullmatch(r"AnonHugePages: +\d+ kB", line) for line in got) and got[-1].startswith("VmFlags: rd wr")
    with open(f"/proc/{holder[0]}/smaps") as file:
        keys = [line.split(":")[0] for line in file if re.match(r"[A-Z]\w+:", line)]
    assert [line.split(":")[0] for line in got[1:]] == keys[:len(got) - 1]


def test_types(holder, files):
    pid, addr = holder
    text = good("types", pid, "--addr", hex(addr), "--length", "8M")
    lines = text.splitlines()
    assert lines[0].split() == ["flags", "page-count", "MB", "symbolic-flags", "long-symbolic-flags"]
    assert all(re.match(r"0x[0-9a-f]{16}\t +\d+ +\d+  [A-Za-z1_+0-9]+\t\S*$", line) for line in lines[1:-1])
    assert lines[-1].split() == ["total", "2048", "8"] and "anonymous" in text and "thp" in text
    got = data("types", files[0])
    assert got["total"] == 2048 == sum(row["pages"] for row in got["rows"])


def test_types_listings(holder, files):
    lines = good("types", files[0], "-L", "-N").splitlines()
    assert lines[0].split("\t") == ["voffset", "offset", "flags"] and len(lines) == 2048 + 2
    assert int(lines[1].split("\t")[0], 16) == holder[1] >> 12 and all(int(line.split("\t")[1], 16)
                                                                       for line in lines[1:-1])
    lines = good("types", files[0], "-l", "-M", "-N", "-b", "thp").splitlines()
    assert lines[0].split("\t") == ["voffset", "offset", "map-cnt", "len", "flags"]
    assert sum(int(line.split("\t")[3], 16) for line in lines[1:-1]) == 2048
    lines = good("types", files[1], "--frames", "-l", "-N", "-a", "0,256").splitlines()
    assert lines[0].split("\t") == ["offset", "len", "flags"] and lines[1].split("\t")[0] == "1"
    assert sum(int(line.split("\t")[1], 16) for line in lines[1:-1]) == 255
    got = data("types", files[0], "-L", "-a", f"{hex(holder[1] >> 12)}+3")
    assert [row["voffset"] for row in got["pages"]] == [(holder[1] >> 12) + at for at in range(3)]


def test_types_of_this_machine_and_of_a_file():
    got = data("types", "-b", "buddy")
    assert got["total"] > 0 and all("buddy" in row["names"] for row in got["rows"])
    got = data("types", "-f", __file__, "-r")
    assert got["file"].endswith("test_cli_capture.py") and all("file" in row["names"] for row in got["rows"])
    assert "no such file" in error("types", "-f", "/nonexistent").lower()
    assert good("types", "-d", "0x10,anon,bit57").split("\t")[2] == "dirty,anonymous,bit57\n"
    assert data("types", "-d", "0x10,anon")["names"] == "dirty,anonymous"
    assert "10 B buddy" in good("types", "--legend")


def test_frames_that_a_capture_has_not(files):
    assert "--all" in error("types", files[0], "--frames", status=77)


@not_under_asan("a process has more mappings than the map draws")
def test_map_in_letters(holder, files):
    text = good("map", files[1], "--columns", "64")
    rows = [line for line in text.splitlines() if re.match(r" *(0|[\d.]+ [KMGT]iB) [ .kfsaAH*]+$", line)]
    assert len(rows) > 2 and "\x1b" not in text
    for one in colours.CLASSES[1:]:
        assert re.search(rf"^ +{re.escape(one.letter)} +{one.name} +\d", text, re.M), one.name
    got = data("map", files[1])
    assert got["grid"]["totals"]["free"] > 0 and any(strip["start"] <= holder[1] < strip["end"]
                                                     for strip in got["strips"])
    assert sum(got["grid"]["marks"].values()) > 2000
    strip = good("map", files[0], "--strip")
    assert re.search(r"A{10}[x×]4", strip) or "anon large" in strip
    assert data("map", files[0], "--strip")["grid"] is None
    assert good("map", files[1], "--pfns", "0x100000+64", "--cell", "page", "--columns", "32").count("4 GiB") >= 1


def test_map_as_picture(files, tmp_path):
    pytest.importorskip("matplotlib")
    for name, start in (("x.png", b"\x89PNG"), ("x.svg", b"<?xml")):
        assert good("map", files[1], "-o", tmp_path / name).strip().endswith(name)
        assert (tmp_path / name).read_bytes().startswith(start)
    assert "no such folder" in error("map", files[1], "-o", tmp_path / "no" / "x.png")


def test_map_without_matplotlib(files, tmp_path):
    (tmp_path / "matplotlib").mkdir()
    (tmp_path / "matplotlib" / "__init__.py").write_text("raise ImportError('none')\n")
    path = f"{tmp_path}{os.pathsep}{ROOT}"
    assert "mmcore[plot]" in error("map", files[1], "-o", tmp_path / "x.png", status=77, env={"PYTHONPATH": path})


def test_frag(files):
    with open("/proc/buddyinfo") as file:
        shape = [(line.split()[:4], len(line.split())) for line in file]
    for words in (["frag", "--proc"], ["frag", files[1], "--proc"]):
        assert [(line.split()[:4], len(line.split())) for line in good(*words).splitlines()] == shape
    text = good("frag", files[1])
    assert "unusable" in text and "free runs" in text and "lies in blocks smaller than" in text
    got = data("frag", files[1])
    assert got["runs"] and len(got["zones"]) == len(shape) and len(got["unusable"]) == len(got["blocks"])
    assert "--all" in good("frag", files[0]) and data("frag", files[0])["runs"] is None


def test_diff(holder, files, tmp_path):
    got = data("diff", files[0], holder[0])
    assert sum(got["totals"].values()) == 8 << 20 and got["notes"] == []
    assert "same" in good("diff", files[0], files[0])
    made_up_capture([(9, 9, 0), None, (70, 70, 0)]).save(tmp_path / "a")
    made_up_capture([(10, 10, 0), (11, 11, 0), None]).save(tmp_path / "b")
    text = good("diff", tmp_path / "a", tmp_path / "b")
    assert re.search(r"40000000-40001000 +moved +4 KiB +0x9 order 0 +0xa order 0", text)
    assert re.search(r"40001000-40002000 +new +4 KiB +- +0xb order 0", text) and "freed" in text
    pages = [(9 + 2 * at, 9 + 2 * at, 0) for at in range(100)]
    made_up_capture(pages).save(tmp_path / "a")
    made_up_capture([page if at % 2 else None for at, page in enumerate(pages)]).save(tmp_path / "b")
    assert "10 more; --all" in good("diff", tmp_path / "a", tmp_path / "b")
    assert len(good("diff", "--all", tmp_path / "a", tmp_path / "b").splitlines()) > 50
    assert "without a process" in error("diff", files[0], _machine_alone(tmp_path))


def _machine_alone(tmp_path):
    made_up_capture([None], pid=0).save(tmp_path / "alone")
    return tmp_path / "alone"


def test_a_partial_capture_says_so_in_every_report(tmp_path):
    path = tmp_path / "x.npz"
    made_up_capture([(9, 9, 0), None], partial=["process 1 ended while it was read: 1 of 2 pages were read"]).save(path)
    for words in (["backing", path], ["map", path, "--strip"], ["diff", path, path]):
        assert "process 1 ended while it was read" in good(*words)
    for words in (["backing", path], ["types", path], ["map", path]):
        assert data(*words)["partial"]


def test_names_from_a_hostile_file_are_harmless(tmp_path):
    path = tmp_path / "x.npz"
    vmas = [{"start": 1 << 30, "end": (1 << 30) + 4096, "perms": "rw-p", "path": "[red]\x1b[31m[/bold]", "flags": []}]
    made_up_capture([(9, 9, 0)], vmas=vmas).save(path)
    assert "\x1b" not in good("backing", path) + good("map", path, "--strip")


def test_pins():
    text = good("pins")
    assert "VmPin" in text and "verdict" in text
    got = data("pins")
    assert {"processes", "acquired", "released", "outstanding", "charged", "unexplained", "verdict"} <= set(got)
    lines = good("pins", "--watch", "--count", "2", "--interval", "0.01", "--json").splitlines()
    assert len(lines) == 2 and all(json.loads(line)["when"] > 0 for line in lines)
    text = good("pins", "--watch", "--count", "2", "--interval", "0.01")
    assert text.count("verdict") == 2


def on_a_terminal(*words, env=None):
    """Run mmcore on a pseudo-terminal; return what it printed."""
    import pty
    import subprocess
    import sys

    leader, follower = pty.openpty()
    done = subprocess.Popen([sys.executable, "-m", "mmcore.cli", *map(str, words)], stdout=follower, stderr=follower,
                            cwd=ROOT,
                            env={**os.environ, "TERM": "xterm-256color", "COLORTERM": "truecolor", "COLUMNS": "120",
                                 "NO_COLOR": "", **(env or {})})
    os.close(follower)
    text = b""
    while True:
        try:
            part = os.read(leader, 1 << 16)
        except OSError:
            break
        if not part:
            break
        text += part
    os.close(leader)
    assert done.wait() == 0, text
    return text.decode()


def test_colours_on_a_terminal(files):
    pytest.importorskip("rich")
    text = on_a_terminal("map", files[1])
    red, green, blue = (int(colours.CLASSES[colours.FILE].colour[at:at + 2], 16) for at in (1, 3, 5))
    assert f"48;2;{red};{green};{blue}" in text
    plain = on_a_terminal("map", files[1], env={"NO_COLOR": "1"})
    assert "\x1b[" not in plain and "f" in plain


def test_a_progress_bar_only_on_a_terminal_and_only_after_a_second(monkeypatch, capsys):
    pytest.importorskip("rich")
    from mmcore.cli import progress

    with progress.progress() as show:
        assert show is None or os.isatty(2)
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    for delay, drawn in ((3600, False), (0, True)):
        with progress.progress(delay) as show:
            show(1, 10, "pages")
            show(10, 10, "pages")
        assert ("pages" in capsys.readouterr().err) == drawn


def test_progress_is_told():
    told = []
    with live.buffer("1M") as buf:
        or_skip(live.capture, buf, progress=lambda *row: told.append(row))
    assert told and all(done <= total for done, total, _ in told) and told[-1][0] == told[-1][1]
    told.clear()
    got = live.capture("memory", progress=lambda *row: told.append(row))
    assert [what for _, _, what in told] == sorted((what for _, _, what in told), reverse=True)
    assert told[-1][0] >= len(got.frames) and np.all(np.diff([done for done, _, _ in told]) > 0)
