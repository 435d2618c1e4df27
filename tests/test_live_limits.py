"""Limits, capabilities and the judgement whether a registration fits."""

import errno
import os
import pickle
import re
import resource
import sys

import pytest
from live_support import CAP_IPC_LOCK, PAGE, linux, root, run, without_capabilities

from mmcore import live
from mmcore.live.limits import Limits, available_memory, fit, pages_spanned

# The modules: live.limits and live.vmstat are functions.
limits, vmstat = sys.modules["mmcore.live.limits"], sys.modules["mmcore.live.vmstat"]
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


# ---- what other machines answer ----------------------------------------------------------------------------------------
def opening(monkeypatch, module, answers):
    """Let open() of a module raise what a path is told to; other paths are opened."""
    def told(path, *args, **kwargs):
        if path in answers:
            raise answers[path]
        return open(path, *args, **kwargs)

    monkeypatch.setattr(module, "open", told, raising=False)


def test_no_proc_of_linux(monkeypatch):
    monkeypatch.setattr(limits.sys, "platform", "darwin")
    with pytest.raises(live.NotPossible, match="this needs Linux .* and this is darwin"):
        limits.require_proc()
    monkeypatch.setattr(limits.sys, "platform", "linux")
    monkeypatch.setattr(limits.os.path, "exists", lambda path: False)
    with pytest.raises(live.NotPossible, match="/proc is not mounted") as caught:
        limits.status()
    assert caught.value.remedy == "mount -t proc proc /proc"


@linux
@pytest.mark.parametrize("error, found, match", [
    (FileNotFoundError(errno.ENOENT, "no"), live.NotPossible, "does not exist on this kernel.*CONFIG_PROC_PAGE_MONITOR"),
    (ProcessLookupError(errno.ESRCH, "no"), live.NotPossible, "has no address space"),
    (PermissionError(errno.EACCES, "no"), live.NotPossible, "may not be read by uid .*CAP_SYS_PTRACE"),
])
def test_files_of_a_process_that_cannot_be_read(monkeypatch, error, found, match):
    opening(monkeypatch, limits, {"/proc/self/pagemap": error})
    with pytest.raises(found) as caught:
        limits.open_proc("self", "pagemap")
    assert re.search(match, f"{caught.value.reason} {caught.value.remedy}")


class Ends:
    """A file of a process that ends while it is read."""

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def __iter__(self):
        raise ProcessLookupError(errno.ESRCH, "gone")


@linux
@pytest.mark.parametrize("read", [limits.status, limits.rlimits, live.vmas])
def test_a_process_that_ends_while_it_is_read(monkeypatch, read):
    for module in (limits, sys.modules["mmcore.live.vma"]):
        monkeypatch.setattr(module, "open_proc", lambda *_: Ends())
    with pytest.raises(ProcessLookupError, match="process 7 does not exist or ended while it was read"):
        read(7)


@linux
def test_no_word_about_available_memory(monkeypatch):
    opening(monkeypatch, limits, {"/proc/meminfo": FileNotFoundError(errno.ENOENT, "no")})
    assert available_memory() is None


@linux
@pytest.mark.parametrize("error, found, match", [
    (PermissionError(errno.EACCES, "no"), live.NotPossible, "may not be written, so that nr_foll_pin_"),
    (FileNotFoundError(errno.ENOENT, "no"), live.NotPossible, "stat_refresh is missing"),
    (OSError(errno.EIO, "broken"), OSError, "broken"),
])
def test_counters_that_cannot_be_made_current(monkeypatch, error, found, match):
    opening(monkeypatch, vmstat, {vmstat.STAT_REFRESH: error})
    with pytest.raises(found, match=match):
        vmstat.refresh()


@linux
def test_counters_below_zero_are_folded_all_the_same(monkeypatch):
    opening(monkeypatch, vmstat, {vmstat.STAT_REFRESH: OSError(errno.EINVAL, "negative")})
    assert vmstat.refresh() is None


@linux
def test_kernels_without_pin_counters(monkeypatch):
    monkeypatch.setattr(vmstat, "refresh", lambda: None)
    monkeypatch.setattr(vmstat, "vmstat", lambda: {"nr_free_pages": 1})
    with pytest.raises(live.NotPossible, match="no nr_foll_pin_acquired") as caught:
        vmstat.foll_pins()
    assert caught.value.remedy == "it needs Linux 5.6 or newer"


def test_refusals_are_pickled_with_their_remedy():
    error = pickle.loads(pickle.dumps(live.NotPossible("why", "what helps")))
    assert (error.reason, error.remedy) == ("why", "what helps")
