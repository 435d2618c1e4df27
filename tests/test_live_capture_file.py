"""Capture files: whole or refused, whatever somebody made of them; and nothing in them that should not be."""

import io
import json
import os
import zipfile
import zlib

import numpy as np
import pytest
from live_support import (
    CAP_SYS_ADMIN, CAP_SYS_PTRACE, child, linux, made_up_capture, mmcore, or_skip, root, run, without_capabilities,
)
from support import not_under_asan

from mmcore import live
from mmcore.live import capturefile
from mmcore.live.machine import Machine, Zone

MACHINE = Machine("6.18.0", 4096, 2 << 20, (Zone(0, "Normal", 1, 1 << 20, 1000, 900, 0, 30, 1, 2, 3, (4, 1)),),
                  {"enabled": "madvise"}, {65536: {"enabled": "inherit"}}, {2 << 20: {"total": 4, "free": 2}})
COLUMNS = ("starts", "counts", "words", "flags", "mapcounts", "heads", "orders", "pfns")


def example():
    """Return a capture with a folio, a hole, a page, and a description of everything."""
    vmas = [{"start": 1 << 30, "end": (1 << 30) + 6 * 4096, "perms": "rw-p", "path": "[heap]", "flags": ["rd", "hg"],
             "sizes": {"Rss": 20480, "THPeligible": 1}}]
    pages = [(64, 64, 2), (65, 64, 2), (66, 64, 2), (67, 64, 2), None, (9, 9, 0)]
    return made_up_capture(pages, vmas=vmas, machine=MACHINE.as_dict(), status={"VmPin": 4096},
                           rlimits={"Max locked memory": [1, None]}, partial=["cut"], when=5, whole=True)


@pytest.fixture
def saved(tmp_path):
    """A file with a capture in it, as (path, {member: bytes})."""
    path = tmp_path / "capture.npz"
    example().save(path)
    with zipfile.ZipFile(path) as whole:
        return path, {name: whole.read(name) for name in whole.namelist()}


def write(path, members):
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as whole:
        for name, content in members.items():
            whole.writestr(name, content)


def npy(array):
    file = io.BytesIO()
    np.save(file, array, allow_pickle=True)
    return file.getvalue()


def refused(path, match="capture again"):
    with pytest.raises(ValueError, match=match) as caught:
        live.Capture.load(path)
    assert str(caught.value).startswith(str(path)) and "\n" not in str(caught.value)
    return str(caught.value)


def test_everything_comes_back(tmp_path):
    before = example()
    before.save(tmp_path / "x")
    after = live.Capture.load(tmp_path / "x")
    for name in COLUMNS:
        assert np.array_equal(getattr(before, name), getattr(after, name)), name
    for name in ("pid", "page_size", "moved", "partial", "when", "whole", "limits", "rlimits", "status", "machine",
                 "started",
                 "boot", "vmas", "leaves", "kernel"):
        assert getattr(before, name) == getattr(after, name), name
    assert after.vmas[0].sizes == {"Rss": 20480, "THPeligible": 1} and after.machine.free_blocks == [4, 1]
    assert before.backing() == after.backing()


def test_numpy_can_write_the_file_again(saved):
    path, _ = saved
    with np.load(path, allow_pickle=False) as data:
        np.savez_compressed(path, **data)
    assert live.Capture.load(path).vmas == example().vmas


@pytest.mark.parametrize("size", [0, 1, 100, 0.3, 0.6, 0.95, -1])
def test_truncated(saved, size):
    path, _ = saved
    whole = path.read_bytes()
    path.write_bytes(whole[:int(size * len(whole)) if isinstance(size, float) else size])
    refused(path)


def test_every_damaged_byte_is_noticed_or_harmless(saved):
    """Nothing but ValueError ever comes out, and what loads is what was saved."""
    path, _ = saved
    whole, rng = path.read_bytes(), np.random.default_rng(3)
    for at in rng.integers(0, len(whole), 400).tolist():
        damaged = bytearray(whole)
        damaged[at] ^= int(rng.integers(1, 256))
        path.write_bytes(damaged)
        try:
            got = live.Capture.load(path)
        except ValueError as error:
            assert str(path) in str(error)
        else:
            assert np.array_equal(got.words, example().words) and got.vmas == example().vmas


@pytest.mark.parametrize("content", [b"", b"hello\n", b"\x80\x04N.", b"PK\x03\x04", b"\x93NUMPY\x01\x00",
                                     os.urandom(4000)])
def test_foreign_files(tmp_path, content):
    (tmp_path / "x").write_bytes(content)
    refused(tmp_path / "x")


def test_what_has_no_end_or_no_writer_is_not_read(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path in ("/dev/zero", "/dev/null", tmp_path / "pipe"):
        with pytest.raises(ValueError, match="no regular file"):
            live.Capture.load(path)


def test_a_folder_and_no_file(tmp_path):
    with pytest.raises(OSError):
        live.Capture.load(tmp_path)
    with pytest.raises(FileNotFoundError):
        live.Capture.load(tmp_path / "absent")


@pytest.mark.parametrize("name", sorted(capturefile.KINDS))
def test_every_member_must_be_there(saved, name):
    path, members = saved
    write(path, {key: value for key, value in members.items() if key != f"{name}.npy"})
    assert f"{name}.npy" in refused(path)


def test_members_that_do_not_belong(saved):
    path, members = saved
    write(path, {**members, "../../evil": b"x"})
    refused(path)
    with zipfile.ZipFile(path, "w") as whole, pytest.warns(UserWarning):
        for name, content in [*members.items(), ("words.npy", members["words.npy"])]:
            whole.writestr(name, content)
    refused(path, "twice")


def test_pickles_are_not_even_looked_at(saved):
    path, members = saved

    class Evil:
        def __reduce__(self):
            return os.mkdir, (str(path) + ".ran",)

    write(path, {**members, "words.npy": npy(np.array([Evil()], object))})
    refused(path)
    assert not os.path.exists(str(path) + ".ran")


@pytest.mark.parametrize("name, array", [
    ("words", np.zeros(6, np.int64)), ("words", np.zeros((6, 1), np.uint64)), ("words", np.zeros(6, ">u8")),
    ("orders", np.zeros(6, np.float64)), ("words", np.asfortranarray(np.zeros((2, 3), np.uint64))),
    ("words", np.zeros(6, [("a", np.uint64)])), ("words", np.uint64(3)),
])
def test_arrays_of_another_kind(saved, name, array):
    path, members = saved
    write(path, {**members, f"{name}.npy": npy(array)})
    refused(path)


@pytest.mark.parametrize("header", [
    "{'descr': '<u8', 'fortran_order': False, 'shape': (7,), }",               # longer than its bytes
    "{'descr': '<u8', 'fortran_order': False, 'shape': (5,), }",               # shorter
    "{'descr': '<u8', 'fortran_order': False, 'shape': (-1,), }",
    "{'descr': '<u8', 'fortran_order': False, 'shape': (99999999999999999999999,), }",
    "{'descr': '<u8', 'fortran_order': False, 'shape': (True,), }",
    "{'descr': '<u8', 'shape': (6,), }", "__import__('os').mkdir('x')", "(" * 3000, "{", "[1, 2]", "\0",
])
def test_headers_that_lie(saved, header):
    path, members = saved
    text = header.encode()
    write(path, {**members, "words.npy": b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text + bytes(48)})
    refused(path)


def test_a_header_that_is_too_long(saved):
    path, members = saved
    write(path, {**members, "words.npy": b"\x93NUMPY\x01\x00\xff\xff" + b" " * 65535 + bytes(48)})
    refused(path)


def test_a_bomb_is_refused_before_it_is_unpacked(saved, monkeypatch):
    """A small file whose directory promises more than the memory here, or delivers more than it promises."""
    path, members = saved
    header = b"{'descr': '<u8', 'fortran_order': False, 'shape': (%d,), }" % (1 << 24)
    bomb = b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header + bytes(8 << 24)
    write(path, {**members, "frame_flags.npy": bomb})
    assert path.stat().st_size < 1 << 20
    monkeypatch.setattr(capturefile, "available_memory", lambda: 64 << 20)
    read = []
    monkeypatch.setattr(capturefile, "read_array", lambda whole, name, *rest, real=capturefile.read_array: (
        read.append(name), real(whole, name, *rest))[1])
    assert "unpacks to" in refused(path, "of memory is available")
    assert read == ["info.npy"]
    monkeypatch.setattr(capturefile, "MAX_INFO", 10)
    refused(path, "of description")


def test_a_directory_that_promises_less_than_it_delivers(saved):
    path, members = saved
    plain = members["words.npy"]
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as whole:
        for name, content in members.items():
            whole.writestr(name, content if name != "words.npy" else plain + bytes(1 << 20))
    raw = bytearray(path.read_bytes())
    # Both the local header and the directory say the size of the honest member.
    for at in range(len(raw) - 4):
        if raw[at:at + 4] == (len(plain) + (1 << 20)).to_bytes(4, "little"):
            raw[at:at + 4] = len(plain).to_bytes(4, "little")
    path.write_bytes(raw)
    refused(path)


def description(members, **changed):
    info = json.loads(np.load(io.BytesIO(members["info.npy"])).tobytes())
    for key, value in changed.items():
        if value is KeyError:
            del info[key]
        else:
            info[key] = value
    return {**members, "info.npy": npy(np.frombuffer(json.dumps(info).encode(), np.uint8))}


VMA = {"start": 4096, "end": 8192, "perms": "rw-p", "offset": 0, "dev": "", "inode": 0, "path": "",
       "kernel_page_size": 4096,
       "rss": 0, "huge": 0, "flags": []}


@pytest.mark.parametrize("changed", [
    {"format": "other"}, {"format": KeyError}, {"pid": -1}, {"pid": "1"}, {"pid": 1.5}, {"pid": True},
    {"pid": KeyError},
    {"page_size": 4097}, {"page_size": 0}, {"page_size": 1 << 40}, {"page_size": "4096"}, {"moved": None},
    {"started": -1}, {"boot": 5},
    {"partial": "text"}, {"partial": [1]}, {"when": "now"}, {"when": -1}, {"whole": 1}, {"has_leaves": None},
    {"limits": {}}, {"limits": {"pid": 1, "soft": -5, "hard": 0, "locked": 0, "pinned": 0, "cap_ipc_lock": False}},
    {"rlimits": {"a": [1]}}, {"rlimits": {"a": [1, "x"]}}, {"rlimits": []}, {"status": {"VmPin": "4"}}, {"status": 3},
    {"vmas": []}, {"vmas": [VMA, VMA]}, {"vmas": [{**VMA, "extra": 1}]}, {"vmas": [{**VMA, "start": 8192}]},
    {"vmas": [{**VMA, "perms": "rw"}]}, {"vmas": [{**VMA, "path": 5}]}, {"vmas": [{**VMA, "flags": "ab"}]},
    {"vmas": {}}, {"vmas": [5]}, {"size_names": [1, 2]}, {"size_names": []}, {"machine": {}}, {"machine": None},
    {"machine": {**MACHINE.as_dict(), "zones": [{"node": 0}]}}, {"machine": {**MACHINE.as_dict(), "page_size": "x"}},
    {"machine": {**MACHINE.as_dict(), "thp": {"enabled": 5}}}, {"machine": {**MACHINE.as_dict(), "mthp": {"x": {}}}},
])
def test_descriptions_that_are_none(saved, changed):
    path, members = saved
    write(path, description(members, **changed))
    refused(path)


def test_a_later_version_says_so(saved):
    path, members = saved
    write(path, description(members, version=capturefile.VERSION + 1))
    refused(path, "use the mmcore that wrote it")


@pytest.mark.parametrize("text", [b"", b"{", b"[" * 100_000, b"null", b"[]", b"\xff\xfe", b'{"format": '
                                  + b"9" * 100_000 + b"}"])
def test_descriptions_that_are_no_json(saved, text):
    path, members = saved
    write(path, {**members, "info.npy": npy(np.frombuffer(text, np.uint8))})
    refused(path)


def pages(**changed):
    """Return the members' arrays of the example, some of them changed."""
    good = example()
    arrays = {name: np.array(getattr(good, name)) for name in COLUMNS[:-1]}
    for name, (at, value) in changed.items():
        arrays[name][at] = value
    return arrays


@pytest.mark.parametrize("changed, match", [
    ({"counts": (0, 7)}, "length"), ({"counts": (0, (1 << 64) - 1)}, "length"), ({"counts": (0, 0)}, "length"),
    ({"starts": (0, 4095)}, "overlap"), ({"starts": (0, (1 << 64) - 4096)}, "overlap"),
    ({"orders": (5, 31)}, "too large"), ({"orders": (5, 255)}, "too large"), ({"orders": (0, 1)}, "folios overlap"),
    ({"heads": (5, 10)}, "outside"), ({"heads": (1, 0)}, "outside"), ({"heads": (4, 7)}, "hole"),
    ({"flags": (4, 1)}, "hole"), ({"mapcounts": (4, 1)}, "hole"), ({"words": (4, 1 << 63)}, "without a frame"),
    ({"words": (5, 1 << 63 | 11)}, "outside"),
])
def test_pages_that_cannot_be(saved, changed, match):
    path, members = saved
    write(path, {**members, **{f"{name}.npy": npy(array) for name, array in pages(**changed).items()}})
    refused(path, match)


def test_control_characters_do_not_reach_a_terminal(saved):
    path, members = saved
    info = json.loads(np.load(io.BytesIO(members["info.npy"])).tobytes())
    info["vmas"][0]["path"] = "/tmp/\x1b]0;owned\x07\n"
    info["partial"] = ["\x1b[2J"]
    info["machine"]["kernel"] = "\x1b[31m"
    write(path, {**members, "info.npy": npy(np.frombuffer(json.dumps(info).encode(), np.uint8))})
    got = live.Capture.load(path)
    for text in (got.vmas[0].path, got.partial[0], got.kernel):
        assert text.isprintable()


SECRET = """
import mmap, sys, ctypes
area = mmap.mmap(-1, 1 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
secret = b"very-" + b"secret-content-of-memory"
for at in range(0, len(area), 4096): area[at:at + len(secret)] = secret
name = sys.argv.append(0) or "my-secret-command"
ctypes.CDLL(None).prctl(15, name.encode(), 0, 0, 0)
print("ready", flush=True)
sys.stdin.read()
"""


@not_under_asan("a process has no [heap]")
@linux
def test_no_content_and_no_names(tmp_path):
    """Neither the file nor what it unpacks to holds what was in memory, nor a name that is not a mapping's."""
    with child(SECRET) as (holder, _):
        named = or_skip(live.capture, holder.pid)
        nameless = live.capture(holder.pid, names=False)
        assert named.command == "my-secret-comma"
        named.save(tmp_path / "named")
        nameless.save(tmp_path / "nameless")
        again = live.Capture.load(tmp_path / "named")
        assert again.runs_here and again.command == ""
        again.boot = "another machine"
        assert not again.runs_here
    assert not named.runs_here
    for name in ("named", "nameless"):
        with zipfile.ZipFile(tmp_path / name) as whole:
            everything = b"".join(whole.read(member) for member in whole.namelist())
        for word in (b"secret-content", b"my-secret-comm"):
            assert word not in everything and word not in (tmp_path / name).read_bytes()
        assert (b"python" in everything) == (name == "named")
    paths = {vma.path for vma in nameless.vmas}
    assert "[heap]" in paths and all(path in ("", "/memfd:") or path.startswith("[") for path in paths)
    # Files are still told apart, and what the pages are is still known.
    assert len({vma.inode for vma in nameless.vmas}) == len({(vma.dev, vma.inode) for vma in named.vmas})
    assert nameless.backing().by_kind == named.backing().by_kind


@root
def test_a_file_is_read_without_privilege(tmp_path):
    with live.buffer("4M", "thp") as buf:
        taken = or_skip(live.capture, buf)
    path = tmp_path / "x.npz"
    taken.save(path)
    code = f"from mmcore import live; c = live.Capture.load({str(path)!r}); print(c.backing().present, len(c.pfns))"
    dropped = without_capabilities(CAP_SYS_ADMIN, CAP_SYS_PTRACE)
    done = run("-c", code, preexec_fn=dropped)
    assert done.stdout.split() == [str(4 << 20), "1024"], done.stderr
    done = mmcore("backing", str(path), preexec_fn=dropped)
    assert done.returncode == 0 and "2 MiB: 4 MiB" in done.stdout, done.stderr


def test_checksums_are_compared(saved):
    path, members = saved
    raw = bytearray(path.read_bytes())
    good = zlib.crc32(members["words.npy"]).to_bytes(4, "little")
    for at in range(len(raw) - 4):
        if raw[at:at + 4] == good:
            raw[at] ^= 1
    path.write_bytes(raw)
    refused(path)
