"""Processes that run on while they are captured: they exit, exec, unmap, fault. What comes out is consistent."""

import signal

import numpy as np
import pytest
from live_support import CAP_SYS_ADMIN, PAGE, ask, child, linux, or_skip, root, run, without_capabilities

from mmcore import live
from mmcore.live import pagemap as pm
from mmcore.live import settle

pytestmark = linux

HOLDER = """
import sys
from mmcore import live
from mmcore.live.buffer import MAP_NORESERVE
import mmap, ctypes
libc = ctypes.CDLL(None, use_errno=True)
libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
buf = live.buffer(2 << 20, "4k")
addr = buf.addr
print(hex(addr), flush=True)
for line in sys.stdin:
    word = line.strip()
    if word == "unmap": libc.munmap(addr, 1 << 20)
    if word == "unmap all": libc.munmap(addr, 2 << 20)
    if word == "drop": libc.madvise(addr, 64 * 4096, mmap.MADV_DONTNEED)
    if word == "rewrite":
        libc.madvise(addr, 64 * 4096, mmap.MADV_DONTNEED)
        for at in range(64): buf[at * 4096] = 2
    if word == "protect": libc.mprotect(ctypes.c_void_p(addr), ctypes.c_size_t(1 << 20), 1)
    if word == "exec":
        import os; os.execv("/bin/sleep", ["sleep", "30"])
    print("done", flush=True)
"""
SIZE = 2 << 20


def consistent(got):
    """Every page is whole or a hole in every column, no frame is free or there twice, and the capture can be kept."""
    hole = got.pfns == 0
    for name in ("flags", "mapcounts", "heads", "orders"):
        assert not getattr(got, name)[hole].any(), name
    here = ~hole
    assert not np.any(pm.has_flag(got.flags[here], pm.KPF_BUDDY))
    pages = np.uint64(1) << got.orders[here].astype(np.uint64)
    assert np.all((got.heads[here] <= got.pfns[here]) & (got.pfns[here] < got.heads[here] + pages))
    assert not pm.overlapping(got.pfns, got.heads, got.orders).any()
    with got.replay() as engine:
        engine.mem.check()


def interrupted(monkeypatch, at, action, name="read_ranges"):
    """Do something after the at-th of the reads that a capture is made of."""
    real, calls = getattr(settle, name), []

    def between(*args, **kwargs):
        result = real(*args, **kwargs)
        calls.append(1)
        if len(calls) == at:
            action()
        return result

    monkeypatch.setattr(settle, name, between)
    return calls


@pytest.fixture
def holder():
    with child(HOLDER) as (started, words):
        or_skip(live.capture, started.pid, int(words[0], 16), SIZE)
        yield started, int(words[0], 16)


def kill(started):
    started.send_signal(signal.SIGKILL)
    started.wait()


@pytest.mark.parametrize("at, name", [(1, "read_ranges"), (1, "look_up"), (2, "read_ranges")])
def test_a_process_that_ends(monkeypatch, holder, tmp_path, at, name):
    started, addr = holder
    interrupted(monkeypatch, at, lambda: kill(started), name)
    got = live.capture(started.pid, addr, SIZE)
    assert f"process {started.pid} ended while it was read" in got.partial[0]
    consistent(got)
    present = np.count_nonzero(got.pfns)
    if (at, name) == (1, "read_ranges"):
        # Its frames were free, or somebody else's, by the time they were looked up.
        assert got.moved > 400 and present + got.moved == 512 and "given back" in got.partial[1]
    else:
        assert present == 512 and got.moved == 0
    got.save(tmp_path / "x")
    assert live.Capture.load(tmp_path / "x").partial == got.partial


def test_a_process_that_ends_before_anything_was_read(monkeypatch, holder):
    started, addr = holder
    real = settle.open_proc

    def too_late(*args):
        file = real(*args)
        kill(started)
        return file

    monkeypatch.setattr(settle, "open_proc", too_late)
    with pytest.raises(ProcessLookupError, match=f"process {started.pid} does not exist"):
        live.capture(started.pid, addr, SIZE)


def test_a_process_that_becomes_another_program(monkeypatch, holder):
    """exec throws the address space away; the PID goes on, and nothing of the new program gets into the capture."""
    started, addr = holder

    def execute():
        started.stdin.write("exec\n")
        started.stdin.flush()
        for _ in range(2000):
            with open(f"/proc/{started.pid}/comm") as file:
                if file.read().strip() == "sleep":
                    return
        pytest.fail("no exec")

    interrupted(monkeypatch, 1, execute, "look_up")
    got = live.capture(started.pid, addr, SIZE)
    kill(started)
    assert "ended while it was read" in got.partial[0] and np.count_nonzero(got.pfns) == 512
    consistent(got)


def test_part_of_the_range_is_unmapped(monkeypatch, holder):
    started, addr = holder
    calls = interrupted(monkeypatch, 1, lambda: ask(started, "unmap"))
    got = live.capture(started.pid, addr, SIZE)
    assert len(calls) > 2 and not got.partial and got.moved == 0
    assert not got.pfns[:256].any() and got.pfns[256:].all()
    assert [(vma.start, vma.end) for vma in got.vmas] == [(addr + (1 << 20), got.vmas[0].end)]
    consistent(got)


@pytest.mark.parametrize("at", [1, 2])
def test_all_of_the_range_is_unmapped(monkeypatch, holder, at):
    started, addr = holder
    interrupted(monkeypatch, at, lambda: ask(started, "unmap all"))
    got = live.capture(started.pid, addr, SIZE)
    assert got.partial == ["the range was unmapped while it was read"] and not got.pfns.any()
    consistent(got)


@pytest.mark.parametrize("word", ["drop", "rewrite", "protect"])
@pytest.mark.parametrize("at", [1, 2])
def test_what_changes_once_is_read_again(monkeypatch, holder, word, at):
    started, addr = holder
    before = live.capture(started.pid, addr, SIZE)
    interrupted(monkeypatch, at, lambda: ask(started, word))
    got = live.capture(started.pid, addr, SIZE)
    monkeypatch.undo()
    consistent(got)
    assert not got.partial and got.moved == 0
    assert np.array_equal(got.pfns[64:], before.pfns[64:])
    if at == 1 or word == "protect":
        again = live.capture(started.pid, addr, SIZE)
        assert np.array_equal(got.pfns, again.pfns)
    if word == "protect" and at == 1:
        assert [vma.perms for vma in got.vmas] == ["r--p", "rw-p"]


def test_what_changes_in_every_look_is_left_out(monkeypatch, holder):
    started, addr = holder
    real = settle.read_ranges

    def restless(*args):
        words = real(*args)
        ask(started, "rewrite")
        return words

    monkeypatch.setattr(settle, "read_ranges", restless)
    got = live.capture(started.pid, addr, SIZE)
    consistent(got)
    # A frame that was freed may come back to the same place: such a page is held to have stayed.
    assert got.moved == 64 - np.count_nonzero(got.pfns[:64]) and got.pfns[64:].all()
    if got.moved:
        assert f"{got.moved} pages changed in each of 4 looks" in got.partial[0] and str(started.pid) in got.partial[0]


def test_mappings_that_change_in_every_look_are_told(monkeypatch, holder):
    started, addr = holder
    monkeypatch.setattr(settle, "same_mappings", lambda *args: False)
    got = live.capture(started.pid, addr, SIZE)
    assert got.partial == ["mappings changed in each of 4 looks: they are as the last look found them"]
    assert got.pfns.all()


def test_folios_that_are_torn_in_every_look_are_left_out(monkeypatch, holder):
    started, addr = holder
    real = settle.look_up

    def torn(*args):
        found, mask = real(*args)
        mask[:10] = True
        return found, mask

    monkeypatch.setattr(settle, "look_up", torn)
    got = live.capture(started.pid, addr, SIZE)
    assert got.moved == 10 and not got.pfns[:10].any() and got.pfns[10:].all()
    consistent(got)


def test_a_busy_process_is_captured_again_and_again():
    """Real faults, frees and huge pages, without a hand at the reads."""
    busy = """
import mmap, sys, threading
print("ready", flush=True)
stop = []
threading.Thread(target=lambda: (sys.stdin.read(), stop.append(1)), daemon=True).start()
while not stop:
    area = mmap.mmap(-1, 8 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    area.madvise(mmap.MADV_HUGEPAGE)
    for at in range(0, 8 << 20, 4096): area[at] = 1
    area.madvise(mmap.MADV_DONTNEED, 0, 1 << 20)
    area.close()
"""
    with child(busy) as (started, _):
        for _ in range(8):
            got = or_skip(live.capture, started.pid)
            consistent(got)
            assert bool(got.moved) <= bool(got.partial) and np.count_nonzero(got.pfns) > 500


def test_a_pid_is_not_read_twice_from_two_processes(monkeypatch, holder):
    """The address space is held from the first look on; the PID may be another process's by the second."""
    started, addr = holder
    opened = []
    real = settle.open_proc
    monkeypatch.setattr(settle, "open_proc", lambda *args: opened.append(args) or real(*args))
    live.capture(started.pid, addr, SIZE)
    assert opened == [(started.pid, "pagemap", "rb")]


@root
def test_another_users_process_names_the_privilege():
    """ptrace access is one right, seeing frames another; each refusal says which."""
    code = ("import os, sys\nfrom mmcore import live\n{before}\n"
            "try: live.capture({target})\n"
            "except live.NotPossible as error: print(error.reason, '|', error.remedy)")
    with child("import sys; print('ready', flush=True); sys.stdin.read()") as (started, _):
        done = run("-c", code.format(before="os.setgid(65534); os.setuid(65534)", target=started.pid))
        assert "may not be read by uid 65534" in done.stdout and "CAP_SYS_PTRACE" in done.stdout, done
    done = run("-c", code.format(before="", target="'self'"), preexec_fn=without_capabilities(CAP_SYS_ADMIN))
    assert "hides their PFNs: no CAP_SYS_ADMIN" in done.stdout and "run as root" in done.stdout, done
    done = run("-c", code.format(before="os.setgid(65534); os.setuid(65534)", target="'memory'"))
    assert "may not be read by uid 65534" in done.stdout and "root" in done.stdout, done


def test_length_of_a_page_and_the_last_page(holder):
    started, addr = holder
    got = live.capture(started.pid, addr + SIZE - PAGE, PAGE)
    assert len(got.pfns) == 1 and got.pfns[0]


def test_frame_0_is_a_hole(monkeypatch, holder):
    """A driver may map frame 0; it is shown as any other, and nobody's."""
    started, addr = holder
    real = settle.read_ranges

    def with_frame_0(*args):
        words = real(*args)
        words[3] = pm.PM_PRESENT
        return words

    monkeypatch.setattr(settle, "read_ranges", with_frame_0)
    got = live.capture(started.pid, addr, SIZE)
    assert got.pfns[3] == 0 and got.words[3] == 0 and np.count_nonzero(got.pfns) == 511 and not got.partial
    monkeypatch.setattr(settle, "read_ranges", lambda *args: real(*args) & ~pm.PM_PFN_MASK)
    with pytest.raises(live.NotPossible, match="hides their PFNs"):
        live.capture(started.pid, addr, SIZE)


def test_a_free_frame_never_backs_a_page(monkeypatch, holder):
    started, addr = holder
    real = settle.KPageFile.gather

    def some_free(self, pfns):
        words = real(self, pfns)
        if self.path.endswith("flags"):
            words[:5] = 1 << pm.KPF_BUDDY
        return words

    monkeypatch.setattr(settle.KPageFile, "gather", some_free)
    got = live.capture(started.pid, addr, SIZE)
    assert got.moved == 5 and not got.pfns[:5].any() and got.pfns[5:].all()


def test_every_page_of_folios_that_overlap_is_found():
    #   pfn      16 17 .. 31 | 32      a folio of 16 pages, seen by three of them, and two small pages inside of it
    #   told as  A  A        |
    #               B     C
    pfns = np.array([16, 18, 19, 17, 30, 32, 0], np.uint64)
    heads = np.array([16, 16, 16, 17, 30, 32, 0], np.uint64)
    orders = np.array([4, 4, 4, 0, 0, 0, 0], np.uint8)
    found = pm.overlapping(pfns, heads, orders)
    assert found[:4].all() and not found[5:].any()
    left = np.where(found, np.uint64(0), pfns)
    assert not pm.overlapping(left, heads, orders).any()
