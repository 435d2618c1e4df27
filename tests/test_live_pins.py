"""Who holds pins: real registrations of children, and the sums that say what nobody explains."""

import pytest
from live_support import ask, child, linux, or_skip, root, run, without_capabilities

from mmcore.live import pins as p

SIZE = 4 << 20

HOLDER = """
import struct, sys
from mmcore import live
from mmcore.live.iouring import IORING_REGISTER_BUFFERS, _Ring
buf = live.buffer({size}, {backing!r})
try: ring = _Ring()
except live.NotPossible as error: print("no", error, flush=True); sys.exit()
failed = ring.register(IORING_REGISTER_BUFFERS, struct.pack("@NN", buf.addr, buf.length), 1)
print("no" if failed else "pinned", failed, flush=True)
sys.stdin.read()
"""


def of(found, pid):
    return next((one for one in found.processes if one.pid == pid), None)


@linux
@pytest.mark.parametrize("backing", ["4k", "thp"])
def test_a_registration_shows_in_its_process(backing):
    with child(HOLDER.format(size=SIZE, backing=backing)) as (started, words):
        if words[0] != "pinned":
            pytest.skip(" ".join(words))
        found = or_skip(p.pins)
        mine = of(found, started.pid)
        assert mine.pinned == SIZE and "io_uring" in mine.holders and mine.command.startswith("python")
        assert mine.shares is None and found.charged >= SIZE // found.page_size
        assert found.outstanding == found.acquired - found.released
        assert found.unexplained == found.outstanding - found.charged
        if backing == "thp" and found.unexplained < 0:
            assert "one pin for a huge folio" in found.verdict()
    after = p.pins()
    assert of(after, started.pid) is None


@linux
def test_threads_and_vfork_children_are_not_counted_twice():
    """A process that shares its address space shows the same VmPin; the bytes are there once."""
    code = HOLDER.format(size=SIZE, backing="4k").replace("sys.stdin.read()", """
import ctypes, os, signal
libc = ctypes.CDLL(None, use_errno=True)
stack = ctypes.create_string_buffer(1 << 16)
pause = ctypes.cast(libc.pause, ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p))
twin = libc.clone(pause, ctypes.c_void_p(ctypes.addressof(stack) + (1 << 16) - 64), 0x100 | signal.SIGCHLD, None)
sys.stdin.readline()
print(twin, flush=True)
sys.stdin.read()
os.kill(twin, signal.SIGKILL)
os.waitpid(twin, 0)
""")
    with child(code) as (started, words):
        if words[0] != "pinned":
            pytest.skip(" ".join(words))
        twin = int(ask(started)[0])
        if twin < 0:
            pytest.skip("clone(CLONE_VM) failed")
        found = or_skip(p.pins)
        both = [of(found, started.pid), of(found, twin)]
        assert [one.pinned for one in both] == [SIZE, SIZE]
        if not p.same_memory(started.pid, twin):
            pytest.skip("this kernel has no kcmp")
        assert [one.shares for one in both] in ([None, started.pid], [twin, None])
    assert not p.same_memory(1, started.pid)


@linux
def test_counters_are_made_current_or_said_to_be_behind(monkeypatch):
    found = or_skip(p.pins)
    assert found.current or found.why_not_current

    def refuse():
        raise p.NotPossible("not root", "be root")

    monkeypatch.setattr(p, "refresh", refuse)
    found = p.pins()
    assert not found.current and "not root" in found.why_not_current
    if found.outstanding is not None:
        assert "may be behind" in found.verdict()


def made_up(acquired, released, *processes, current=True):
    return p.Pins(0, 4096, list(processes), acquired, released, current)


@pytest.mark.parametrize("found, unexplained, words", [
    (made_up(10, 10), 0, "explains every pin"),
    (made_up(110, 10, p.ProcessPins(5, "a", 100 * 4096, 0)), 0, "explains every pin"),
    (made_up(12, 10, p.ProcessPins(5, "a", 512 * 4096, 0, ("io_uring",))), -510, "one pin for a huge folio"),
    (made_up(110, 10), 100, "I/O in flight"),
    (made_up(110, 10, p.ProcessPins(5, "a", 0, 50 * 4096, ("vfio",))), 100, "50 pages in VmLck"),
    (made_up(None, None), None, "Linux 5.6"),
    (made_up(110, 10, p.ProcessPins(5, "a", 100 * 4096, 0), p.ProcessPins(6, "b", 100 * 4096, 0, (), 5)), 0,
     "every pin"),
])
def test_what_the_difference_means(found, unexplained, words):
    assert found.unexplained == unexplained and words in found.verdict()
    data = found.as_dict()
    assert data["unexplained"] == unexplained and data["verdict"] == found.verdict()


def test_processes_that_vanish_and_kernel_threads():
    assert p._process(1 << 22 | 1) == p.ProcessPins(1 << 22 | 1, "", 0, 0)


@root
def test_without_rights_it_says_what_it_does_not_see():
    code = ("import os\nfrom mmcore.live import pins\nos.setgid(65534); os.setuid(65534)\n"
            "found = pins.pins(); print(found.current, found.unseen > 0, found.why_not_current)")
    done = run("-c", code, preexec_fn=without_capabilities())
    assert done.stdout.startswith("False True ") and "root" in done.stdout, done
