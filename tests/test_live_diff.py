"""What happened between two captures: made up, where every case is known, and real, where the kernel did it."""

import dataclasses
import mmap

import numpy as np
import pytest
from live_support import PAGE, ask, child, linux, made_up_capture, or_skip

from mmcore import live
from mmcore.live import pagemap as pm
from mmcore.live.diff import KINDS, diff
from mmcore.live.frames import Frames

START = 1 << 30


def pairs(found):
    return [(one.kind, (one.start - START) // 4096, one.length // 4096) for one in found.changes]


def totals(found):
    return {kind: n // 4096 for kind, n in found.totals.items() if n}


FOLIO = [(64 + at, 64, 2) for at in range(4)]
SMALL = [(64 + at, 64 + at, 0) for at in range(4)]


@pytest.mark.parametrize("before, after, changes", [
    (FOLIO, FOLIO, []),
    (FOLIO, SMALL, [("split", 0, 4)]),
    (SMALL, FOLIO, [("collapsed", 0, 4)]),                                     # in place
    (SMALL, [(128 + at, 128, 2) for at in range(4)], [("collapsed", 0, 4)]),   # into a new folio, as khugepaged does
    (FOLIO, [(128 + at, 128 + at, 0) for at in range(4)], [("moved", 0, 4)]),  # smaller, and elsewhere
    (FOLIO, [(128 + at, 128, 2) for at in range(4)], [("moved", 0, 4)]),
    (SMALL, [None, SMALL[1], (9, 9, 0), None], [("freed", 0, 1), ("moved", 2, 1), ("freed", 3, 1)]),
    ([None, None, SMALL[2], None], SMALL, [("new", 0, 2), ("new", 3, 1)]),
    ([None] * 4, [None] * 4, []),
])
def test_each_kind(before, after, changes):
    found = diff(made_up_capture(before), made_up_capture(after))
    assert pairs(found) == changes
    counted = {}
    for kind, _, length in changes:
        counted[kind] = counted.get(kind, 0) + length
    same = 4 - sum(counted.values())
    assert totals(found) == {**counted, **({"same": same} if same else {})}


def test_frames_and_orders_are_told():
    one = diff(made_up_capture(FOLIO), made_up_capture(SMALL)).changes[0]
    assert (one.before, one.order_before, one.after, one.order_after) == (64, 2, 64, 0)
    one = diff(made_up_capture(SMALL), made_up_capture([None] * 4)).changes[0]
    assert (one.before, one.after, one.order_after) == (64, None, None)


def test_what_is_gone_for_which_reason():
    before = made_up_capture(SMALL)
    vmas = [{"start": START, "end": START + 4096, "perms": "rw-p"}]
    after = made_up_capture([None, None, SMALL[2], SMALL[3]], vmas=vmas)
    assert pairs(diff(before, after)) == [("freed", 0, 1), ("unmapped", 1, 1)]
    swapped = made_up_capture([None] * 4)
    words = np.array(swapped.words)
    words[:2] = 1 << 62 | 0x77
    swapped.words = words
    assert pairs(diff(before, swapped)) == [("swapped out", 0, 2), ("freed", 2, 2)]


@pytest.mark.parametrize("whole, kind", [(True, "unmapped"), (False, "not looked at")])
def test_outside_of_what_was_looked_at(whole, kind):
    """A capture of everything says that a page is gone; one of a range says nothing about the rest."""
    before = made_up_capture(SMALL)
    after = made_up_capture(SMALL[2:], start=START + 2 * 4096, whole=whole)
    assert pairs(diff(before, after)) == [(kind, 0, 2)]
    back = pairs(diff(after, before))
    assert back == [("new" if whole else "not looked at", 0, 2)]


def test_where_the_frames_went():
    flags, mapcounts = np.zeros(100, np.uint64), np.zeros(100, np.uint64)
    flags[64] = 1 << pm.KPF_BUDDY
    mapcounts[65] = 2
    after = made_up_capture([None, None, None, SMALL[3]])
    after.frames = Frames(flags, mapcounts)
    found = diff(made_up_capture(SMALL), after)
    assert [n // 4096 for n in found.frames.values()] == [1, 1, 1]
    assert diff(made_up_capture(SMALL), made_up_capture(SMALL)).frames is None


def test_what_does_not_compare():
    with pytest.raises(ValueError, match="do not compare"):
        diff(made_up_capture(SMALL), made_up_capture(SMALL, page_size=65536))
    with pytest.raises(ValueError, match="without a process"):
        diff(made_up_capture(SMALL), made_up_capture(SMALL, pid=0))
    other = made_up_capture(SMALL, pid=2, kernel="other", partial=["cut"], when=-5)
    notes = diff(made_up_capture(SMALL, when=3), other).notes
    assert len(notes) == 4 and "two processes: 1 and 2" in notes[0] and "later" in notes[2] and "cut" in notes[3]
    assert "given again" in diff(made_up_capture(SMALL, started=5), made_up_capture(SMALL, started=6)).notes[0]
    assert set(dataclasses.asdict(diff(other, other))["totals"]) == set(KINDS)


HOLDER = """
import mmap, sys
from mmcore import live
area = live.buffer(4 << 20, "4k")
print(hex(area.addr), flush=True)
for line in sys.stdin:
    word = line.strip()
    if word == "drop": area.madvise(mmap.MADV_DONTNEED, 0, 1 << 20)
    if word == "again":
        for at in range(0, 1 << 20, 4096): area[at] = 1
    if word == "collapse":
        area.madvise(mmap.MADV_HUGEPAGE)
        try: area.madvise(25, -area.addr % (2 << 20), 2 << 20)
        except OSError as error: print("no", error, flush=True); continue
    print("done", flush=True)
"""


@linux
def test_a_real_process(tmp_path):
    with child(HOLDER) as (started, words):
        addr = int(words[0], 16)
        shots = [or_skip(live.capture, started.pid, addr, 4 << 20)]
        for word in ("drop", "again"):
            assert ask(started, word) == ["done"]
            shots.append(live.capture(started.pid, addr, 4 << 20, memory=word == "drop"))
        answer = ask(started, "collapse")
        shots.append(live.capture(started.pid, addr, 4 << 20))
    first, dropped, again, collapsed = shots
    assert totals(diff(first, dropped)) == {"freed": 256, "same": 768}
    assert sum(diff(first, dropped).frames.values()) == 1 << 20
    assert totals(diff(dropped, again)) == {"new": 256, "same": 768}
    for path, shot in zip("ab", (first, again)):
        shot.save(tmp_path / path)
    loaded = [live.Capture.load(tmp_path / path) for path in "ab"]
    assert diff(*loaded) == diff(first, again)
    if answer[0] == "done":
        found = totals(diff(again, collapsed))
        assert found["collapsed"] == 512 and found["same"] == 512


@linux
def test_copy_on_write_moves_pages():
    """After a fork both map the same frames; whoever writes first goes to another one."""
    forker = """
import os, sys
from mmcore import live
area = live.buffer(1 << 20, "4k")
print(hex(area.addr), flush=True)
sys.stdin.readline()
ready, told = os.pipe()
if os.fork() == 0:
    os.read(ready, 1)
    os._exit(0)
for at in range(0, 512 << 10, 4096): area[at] = 7
print("done", flush=True)
sys.stdin.read()
os.write(told, b"x")
os.wait()
"""
    with child(forker) as (started, words):
        addr = int(words[0], 16)
        before = or_skip(live.capture, started.pid, addr, 1 << 20)
        ask(started)
        after = live.capture(started.pid, addr, 1 << 20)
    assert totals(diff(before, after)) == {"moved": 128, "same": 128}
    assert np.all(after.mapcounts[128:] == 2) and np.all(after.mapcounts[:128] == 1)
    assert mmap.PAGESIZE == PAGE
