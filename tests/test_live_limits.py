"""Limits, capabilities and the judgement whether a registration fits."""

import os
import resource

import pytest
from live_support import CAP_IPC_LOCK, PAGE, linux, root, run, without_capabilities

from mmcore import live
from mmcore.live.limits import Limits, available_memory, fit, pages_spanned

MIB = 1 << 20


def have(soft, hard=None, pinned=0, cap=False):
    return Limits(pid=1, soft=soft, hard=hard, locked=0, pinned=pinned, cap_ipc_lock=cap)


@pytest.mark.parametrize("needed, limits, verdict, remedy", [
    (8 * MIB, have(8 * MIB, 8 * MIB), "fits", ""),
    (8 * MIB + 1, have(8 * MIB, 64 * MIB), "refused", "ulimit -l 8193"),
    (8 * MIB, have(8 * MIB, None, pinned=MIB), "refused", "ulimit -l 9216"),
    (8 * MIB, have(MIB, MIB), "refused", "memlock 8192"),
    (8 * MIB, have(0, 0, cap=True), "exempt", ""),
    (1 << 40, have(None, None), "unlimited", ""),
])
def test_fit(needed, limits, verdict, remedy):
    got = fit(needed, limits)
    assert got.verdict == verdict and got.ok == (verdict != "refused")
    assert (got.needed, got.limit, got.current) == (needed, limits.soft, limits.pinned)
    assert remedy in got.remedy and bool(got.remedy) == bool(remedy)


@pytest.mark.parametrize("addr, length, pages", [(0, 1, 1), (4095, 2, 2), (4096, 4096, 1), (1, 4096, 2)])
def test_whole_pages_are_counted(addr, length, pages):
    assert pages_spanned(addr, length, 4096) == pages


@linux
def test_limits_of_this_process():
    got = live.limits()
    soft, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    assert got.pid == os.getpid()
    assert got.soft == (None if soft == resource.RLIM_INFINITY else soft)
    assert got.hard == (None if hard == resource.RLIM_INFINITY else hard)
    assert live.limits(os.getpid()) == got


@linux
def test_limits_of_a_process_that_is_not_there():
    with pytest.raises(ProcessLookupError, match="does not exist"):
        live.limits(1 << 22 | 1)


@linux
def test_preflight_counts_buffers_together():
    with live.buffer(3 * PAGE) as one, live.buffer(PAGE) as two:
        assert live.preflight(one).needed == 3 * PAGE
        assert live.preflight([one, two]).needed == 4 * PAGE


@linux
@root
def test_without_cap_ipc_lock_the_limit_applies():
    code = (
        "import resource; resource.setrlimit(resource.RLIMIT_MEMLOCK, (1 << 20, 1 << 20))\n"
        "from mmcore import live\n"
        "got = live.preflight(live.buffer('2M'))\n"
        "print(got.verdict, got.needed, got.limit)"
    )
    done = run("-c", code, preexec_fn=without_capabilities(CAP_IPC_LOCK))
    assert done.stdout.split() == ["refused", str(2 * MIB), str(MIB)], done.stderr


@linux
def test_available_memory_is_below_what_there_is():
    total = os.sysconf("SC_PHYS_PAGES") * PAGE
    room = available_memory()
    assert room is None or 0 <= room <= total
