"""Captures: of this process and others, what they refuse, and their files."""

import mmap
import subprocess
import sys

import numpy as np
import pytest
from live_support import CAP_SYS_ADMIN, PAGE, ROOT, linux, or_skip, part_of, root, run, without_capabilities

from mmcore import live
from mmcore.live import pagemap as pm
from mmcore.live import settle

pytestmark = linux

HOLDER = """
import sys
from mmcore import live
buf = live.buffer({size}, {backing!r})
print(hex(buf.addr), flush=True)
sys.stdin.read()
"""


@pytest.fixture
def holder():
    """Start processes that hold a buffer: holder(size, backing) -> (Popen, address)."""
    started = []

    def start(size, backing):
        child = subprocess.Popen(
            [sys.executable, "-c", HOLDER.format(size=size, backing=backing)], cwd=ROOT,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )
        started.append(child)
        return child, int(child.stdout.readline(), 16)

    yield start
    for child in started:
        child.communicate()


@pytest.mark.parametrize("backing, kind", [("4k", "anon"), ("thp", "anon"), ("shmem", "shmem")])
def test_capture_of_a_buffer(backing, kind):
    with live.buffer("4M", backing) as buf:
        got = or_skip(live.capture, buf)
        assert (got.addr, got.length, got.page_size) == (buf.addr, buf.length, PAGE)
        assert got.pfns.dtype == np.uint64 and len(got.pfns) == buf.length // PAGE
        assert np.all(got.pfns != 0) and len(np.unique(got.pfns)) == len(got.pfns)
        assert np.all(got.heads <= got.pfns)
        assert np.all(got.pfns - got.heads < np.uint64(1) << got.orders.astype(np.uint64))
        assert np.all(got.heads % (np.uint64(1) << got.orders.astype(np.uint64)) == 0)
        assert np.all(got.mapcounts >= 1)
        assert got.vmas[0].start <= buf.addr < got.vmas[0].end
        assert got.limits == live.limits()
        backing_found = got.backing()
        assert backing_found.by_kind == {kind: buf.length}
        assert sum(backing_found.by_size.values()) == buf.length
        if backing == "4k":
            assert backing_found.by_size == {PAGE: buf.length}
            assert "MADV_NOHUGEPAGE" in backing_found.not_huge[0][2]
        assert np.array_equal(got.addresses, buf.addr + np.arange(len(got.pfns)) * PAGE)


def test_arrays_are_read_only():
    with live.buffer(PAGE) as buf:
        got = or_skip(live.capture, buf)
    for array in (got.pfns, got.flags, got.mapcounts, got.heads, got.orders, got.words):
        with pytest.raises(ValueError):
            array[0] = 0


def test_part_of_a_folio_keeps_the_whole_folio_s_head_and_order():
    with live.buffer("4M", "thp") as buf:
        whole = or_skip(live.capture, buf)
        part = live.capture(part_of(buf, 100, 500))
        assert np.array_equal(part.pfns, whole.pfns[100:600])
        assert np.array_equal(part.heads, whole.heads[100:600])
        assert np.array_equal(part.orders, whole.orders[100:600])


def test_range_is_widened_to_whole_pages():
    with live.buffer(8 * PAGE) as buf:
        got = or_skip(live.capture, "self", buf.addr + 100, PAGE)
        assert (got.addr, len(got.pfns)) == (buf.addr, 2)


def test_holes_and_zero_pages():
    area = mmap.mmap(-1, 8 * PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    import ctypes

    addr = ctypes.addressof(ctypes.c_char.from_buffer(area))
    area[0] = 1
    _ = area[3 * PAGE]                        # read only: the zero page
    got = or_skip(live.capture, "self", addr, 8 * PAGE)
    assert np.flatnonzero(got.pfns).tolist() == [0, 3]
    zero = pm.has_flag(got.flags, pm.KPF_ZERO_PAGE)
    assert zero.tolist() == [False] * 3 + [True] + [False] * 4
    assert np.all(got.flags[got.pfns == 0] == 0) and np.all(got.heads[got.pfns == 0] == 0)
    assert got.backing().by_kind == {"anon": PAGE, "zero page": PAGE}
    assert got.backing().present == 2 * PAGE
    area.close()


def test_capture_of_the_whole_process():
    got = or_skip(live.capture)
    assert len(got.vmas) > 10 and len(got.starts) > 10
    assert len(got.addresses) == len(got.pfns)
    names = {vma.path for vma in got.vmas}
    assert "[stack]" in names


def test_capture_of_another_process(holder):
    child, addr = holder(4 << 20, "4k")
    got = or_skip(live.capture, child.pid, addr, 4 << 20)
    assert got.pid == child.pid and got.command.startswith("python") and not got.partial
    assert got.runs_here
    assert np.all(got.pfns != 0)
    assert got.backing().by_kind == {"anon": 4 << 20}


def test_vanished_process(holder):
    child, addr = holder(PAGE, "4k")
    or_skip(live.capture, child.pid, addr, PAGE)
    child.communicate()
    with pytest.raises(ProcessLookupError, match=f"process {child.pid} does not exist"):
        live.capture(child.pid, addr, PAGE)


def test_zombie_has_nothing_to_show():
    or_skip(live.capture, "self")
    child = subprocess.Popen([sys.executable, "-c", ""], stdout=subprocess.PIPE)
    child.stdout.read()                       # ended, not waited for
    try:
        import time

        for _ in range(200):
            with open(f"/proc/{child.pid}/status") as file:
                if "zombie" in file.read():
                    break
            time.sleep(0.01)
        with pytest.raises((live.NotPossible, ProcessLookupError, OSError)):
            live.capture(child.pid)
    finally:
        child.wait()


def test_bad_address():
    with live.buffer(PAGE) as buf:
        or_skip(live.capture, buf)
    with pytest.raises(OSError, match="maps nothing") as caught:
        live.capture("self", 0x1000, PAGE)
    assert caught.value.errno == 14


@pytest.mark.parametrize("target, addr, length, error", [
    ("other", None, None, TypeError), (True, None, None, TypeError), (1.5, None, None, TypeError),
    (-1, None, None, ValueError), (0, None, None, ValueError),
    ("self", 0, None, TypeError), ("self", None, 1, TypeError), ("self", 4096, 0, ValueError),
    ("self", -4096, 1, ValueError), ("self", (1 << 64) - 1, 2, ValueError),
    ("self", 0, 1 << 50, ValueError),
])
def test_bad_arguments(target, addr, length, error):
    with pytest.raises(error):
        live.capture(target, addr, length)


def test_a_buffer_brings_its_own_address():
    with live.buffer(PAGE) as buf:
        with pytest.raises(TypeError, match="its own"):
            live.capture(buf, 0, 1)


@root
def test_hidden_pfns_are_not_taken_for_frames():
    code = (
        "from mmcore import live\n"
        "try: live.capture(live.buffer('1M'))\n"
        "except live.NotPossible as error: print(error.reason); print(error.remedy)"
    )
    done = run("-c", code, preexec_fn=without_capabilities(CAP_SYS_ADMIN))
    assert "CAP_SYS_ADMIN" in done.stdout and "as root" in done.stdout, done.stdout + done.stderr


def test_words_with_hidden_pfns(monkeypatch):
    def fake(file, index, out):
        out[:] = pm.PM_PRESENT
        return len(out)

    monkeypatch.setattr(pm, "read_words", fake)
    with pytest.raises(live.NotPossible, match="hides their PFNs"):
        pm.read_pagemap("self", 0, 4, PAGE)


def test_pages_that_change_while_they_are_read(monkeypatch):
    with live.buffer("1M") as buf:
        or_skip(live.capture, buf)
        real, calls = settle.read_ranges, []

        def restless(*args):
            words = real(*args)
            calls.append(1)
            if len(calls) < 2:                # as if the page had moved at the first look
                words[0] ^= np.uint64(1)
            return words

        monkeypatch.setattr(settle, "read_ranges", restless)
        assert live.capture(buf).moved == 0 and len(calls) == 3
        monkeypatch.setattr(settle, "read_ranges",
                            lambda *args: real(*args) ^ np.uint64(calls.append(1) or len(calls) & 1))
        got = live.capture(buf)
    assert got.moved == 256 and "256 pages changed in each of 4 looks" in got.partial[0]
    assert not got.pfns.any() and not got.heads.any() and not got.mapcounts.any()


def test_save_and_load(tmp_path):
    with live.buffer("4M", "thp") as buf:
        got = or_skip(live.capture, buf)
    path = tmp_path / "capture"
    got.save(path)
    again = live.Capture.load(path)
    for name in ("pfns", "flags", "mapcounts", "heads", "orders", "words", "starts", "counts"):
        assert np.array_equal(getattr(got, name), getattr(again, name)), name
    assert (again.vmas, again.limits, again.pid, again.kernel) == (got.vmas, got.limits, got.pid, got.kernel)
    assert again.backing() == got.backing()
    assert [p.name for p in tmp_path.iterdir()] == ["capture"]


def test_damaged_and_foreign_files(tmp_path):
    with live.buffer("64K") as buf:
        got = or_skip(live.capture, buf)
    path = tmp_path / "capture.npz"
    got.save(path)
    whole = path.read_bytes()
    for size in (0, 1, 10, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:size])
        with pytest.raises(ValueError, match="capture again") as caught:
            live.Capture.load(path)
        assert str(path) in str(caught.value)
    middle = len(whole) // 2
    path.write_bytes(whole[:middle] + bytes(64) + whole[middle + 64:])
    with pytest.raises(ValueError, match="capture"):
        live.Capture.load(path)
    for name, content in (("text", b"hello\n"), ("pickle", b"\x80\x04N.")):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ValueError, match="capture again"):
            live.Capture.load(tmp_path / name)
    np.savez(tmp_path / "other.npz", a=np.arange(3))
    with pytest.raises(ValueError, match="not a whole mmcore capture"):
        live.Capture.load(tmp_path / "other.npz")
    np.save(tmp_path / "array.npy", np.arange(3))
    with pytest.raises(ValueError, match="capture"):
        live.Capture.load(tmp_path / "array.npy")
    with pytest.raises(FileNotFoundError):
        live.Capture.load(tmp_path / "absent")


def test_arrays_that_disagree_are_refused(tmp_path):
    with live.buffer("64K") as buf:
        got = or_skip(live.capture, buf)
    path = tmp_path / "capture.npz"
    got.save(path)
    with np.load(path) as data:
        arrays = dict(data)
    for name, bad in (("flags", arrays["flags"][:3]), ("orders", arrays["orders"].astype(float)),
                      ("counts", arrays["counts"] + np.uint64(1))):
        np.savez(path, **{**arrays, name: bad})
        with pytest.raises(ValueError, match="damaged"):
            live.Capture.load(path)


def test_saving_where_nothing_can_be_written(tmp_path):
    with live.buffer(PAGE) as buf:
        got = or_skip(live.capture, buf)
    with pytest.raises(OSError):
        got.save(tmp_path / "no" / "such" / "place")
