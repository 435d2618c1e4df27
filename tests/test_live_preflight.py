"""Preflight: what each API counts, against the drivers of the engine and the kernel; limits, and the commands that
help."""

import importlib
import json
import os
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
from live_support import (
    CAP_IPC_LOCK,
    PAGE,
    linux,
    mmcore,
    or_skip,
    part_of,
    root,
    run,
    scratch_file,
    without_capabilities,
)

import mmcore as mmc
from mmcore import live
from mmcore.live.limits import Limits, cgroup_memory, has_capability, remedies

pytestmark = linux
module = importlib.import_module("mmcore.live.preflight")  # the package has the function under this name
MIB = 1 << 20
CAP_SYS_RESOURCE = 24


def charges(found):
    return {charge.api: charge for charge in found.charges}


@pytest.mark.parametrize("backing", ["4k", "thp", "shmem"])
def test_of_a_whole_buffer_all_count_its_pages(backing):
    with live.buffer("4M", backing) as buf:
        got = live.preflight(buf)
    assert [charge.api for charge in got.charges] == ["RDMA", "VFIO", "io_uring"]
    assert {charge.pages for charge in got.charges} == {1024} and got.needed == 4 * MIB
    assert got.limits == live.limits() and got.limit == got.limits.soft and got.not_present == 0 and not got.obstacles
    assert got.ok and not got.remedy


def test_a_part_of_a_huge_page_counts_whole_only_for_io_uring():
    with live.buffer("4M", "thp") as buf:
        or_skip(live.capture, buf)
        part = part_of(buf, 510, 4)  # the end of one huge page and the start of the next
        got = charges(live.preflight(part))
        kernel = or_skip(live.kernel_register, part)
        if live.capture(part).orders.min() < 9:
            pytest.skip("no huge pages were had")
        assert got["RDMA"].pages == got["VFIO"].pages == 4
        assert got["io_uring"].pages == 1024 == kernel.vmpin_at_register[0]


def test_buffers_are_charged_one_by_one_but_a_ring_counts_a_huge_page_once():
    with live.buffer("2M", "thp") as buf:
        or_skip(live.capture, buf)
        parts = [part_of(buf, 0, 8), part_of(buf, 4, 8)]
        got = charges(live.preflight(parts))
        if live.capture(buf).orders.min() < 9:
            pytest.skip("no huge page was had")
        assert got["RDMA"].pages == got["VFIO"].pages == 16 and got["io_uring"].pages == 512
        ring = or_skip(live.kernel_register, buf, iovecs=[(part.addr, part.length) for part in parts])
        assert ring.vmpin_at_register == [512]


def test_the_drivers_of_the_engine_charge_the_same():
    with live.buffer("4M", "thp") as buf:
        snapshot = or_skip(live.capture, part_of(buf, 3, 700))
    got = charges(live.preflight(snapshot))
    with snapshot.replay() as engine:
        mm = engine.mm
        umem = mmc.ib_umem_get(mmc.IBDevice(engine.mem), mm, snapshot.addr, snapshot.length, mmc.IB_ACCESS.LOCAL_WRITE)
        assert mm.pinned_vm == got["RDMA"].pages == 700
        mmc.ib_umem_release(umem)
        table = mmc.BufferTable(mm)
        table.register([(snapshot.addr, snapshot.length)])
        assert mm.pinned_vm == table.charged == got["io_uring"].pages
        table.unregister()


@pytest.mark.parametrize("offset, length, pages", [(0, 1, 1), (PAGE - 1, 2, 2), (100, PAGE, 2), (PAGE, PAGE, 1)])
def test_whole_pages_and_what_vfio_says_of_ragged_ends(offset, length, pages):
    with live.buffer(4 * PAGE) as buf:
        got = live.preflight(SimpleNamespace(addr=buf.addr + offset, length=length))
        assert {charge.pages for charge in got.charges} == {pages}
        assert any("EINVAL" in note for note in got.notes) is ((offset | length) % PAGE != 0)


def test_holes_are_counted_and_told():
    area = live.buffer(8 * PAGE)
    area.madvise(4)  # MADV_DONTNEED: all of it
    area[0] = 1
    with area:
        or_skip(live.capture, area)
        got = live.preflight(area)
        assert (
            got.not_present == 7 * PAGE and got.needed == 8 * PAGE and "7 pages are not present" in " ".join(got.notes)
        )


# ---- verdicts on captures of no machine
# -------------------------------------------------------------------------------
def pretend(soft, hard=None, locked=0, pinned=0, cap=False, pages=2048):
    """Return a Capture of base pages of a process with these limits, in MiB."""

    def mib(value):
        return None if value is None else int(value * MIB)

    pfns = np.arange(0x1000, 0x1000 + pages, dtype=np.uint64)
    return live.Capture(
        {
            "pid": 77,
            "command": "gone",
            "kernel": "0",
            "page_size": 4096,
            "moved": 0,
            "not_huge": [],
            "vmas": [],
            "limits": {
                "pid": 77,
                "soft": mib(soft),
                "hard": mib(hard),
                "locked": mib(locked),
                "pinned": mib(pinned),
                "cap_ipc_lock": cap,
            },
        },
        {
            "starts": np.array([1 << 30], np.uint64),
            "counts": np.array([pages], np.uint64),
            "words": pfns | np.uint64(1 << 63),
            "flags": np.zeros(pages, np.uint64),
            "mapcounts": np.ones(pages, np.uint64),
            "heads": pfns,
            "orders": np.zeros(pages, np.uint8),
        },
    )


@pytest.mark.parametrize(
    "have, verdicts, remedy",
    [
        # Equality passes; a ring of its own takes two pages more.
        (dict(soft=8, hard=8), "fits fits refused", "prlimit --pid 77 --memlock=8396800:8396800"),
        (dict(soft=8 + 1 / 128, hard=9), "fits fits fits", ""),
        (dict(soft=8.5, hard=8.5, locked=1), "fits refused fits", "prlimit --pid 77 --memlock=9437184:9437184"),
        (dict(soft=8, hard=64, pinned=1), "refused fits refused", "ulimit -l 9224"),
        (dict(soft=None), "unlimited unlimited unlimited", ""),
        (dict(soft=1, hard=1, cap=True), "exempt exempt exempt", ""),
        (dict(soft=0, hard=0), "refused refused refused", "prlimit --pid 77 --memlock=8396800:8396800"),
    ],
)
def test_each_api_has_its_own_account(have, verdicts, remedy):
    got = live.preflight(pretend(**have))
    assert [charge.verdict for charge in got.charges] == verdicts.split()
    assert (
        got.remedy == remedy
        and got.ok is ("refused" not in verdicts)
        and got.verdict == ("refused" if "refused" in verdicts else verdicts.split()[0])
    )
    assert json.loads(json.dumps(got.as_dict()))["verdict"] == got.verdict
    if have["soft"] == 0:
        # RDMA asks whether the process may lock at all before it counts.
        assert [charge.errno for charge in got.charges] == [1, 12, 12]


def test_only_the_apis_asked_for():
    snapshot = pretend(8, 8, locked=1)
    assert live.preflight(snapshot, apis=["RDMA"]).ok and not live.preflight(snapshot, apis=["VFIO"]).ok
    for wrong in ([], ["rdma"], ["XDP"]):
        with pytest.raises(ValueError, match="apis are some of"):
            live.preflight(snapshot, apis=wrong)


def test_nothing_and_two_processes_are_refused():
    with pytest.raises(ValueError, match="no buffer"):
        live.preflight([])
    with live.buffer(PAGE) as buf:
        mine = or_skip(live.capture, buf)
        with pytest.raises(ValueError, match="two processes"):
            live.preflight([pretend(8), mine])


def test_more_buffers_than_a_container_or_a_ring_takes(monkeypatch):
    monkeypatch.setattr(module, "VFIO_DMA_ENTRY_LIMIT", 1)
    monkeypatch.setattr(module, "MAX_IOVECS", 1)
    notes = " ".join(live.preflight([pretend(None), pretend(None)]).notes)
    assert "ENOSPC" in notes and "io_uring: 2 buffers" in notes


def test_frames_without_a_struct_page_are_not_charged_by_vfio():
    snapshot = pretend(None, pages=4)
    snapshot.flags = np.array([0, 1 << 20, 0, 0], np.uint64)
    got = charges(live.preflight(snapshot))
    assert got["VFIO"].pages == 3 and got["RDMA"].pages == 4


def test_refusals_that_no_limit_explains(tmp_path):
    import mmap

    fd = scratch_file(tmp_path, 2 * PAGE)
    with mmap.mmap(fd, 2 * PAGE) as area:
        os.close(fd)
        area[0] = 1
        got = live.preflight(or_skip(live.capture, "self", *where(area)))
        assert (
            got.verdict == "refused"
            and not got.ok
            and got.obstacles[0][1] == 14
            and "writes back" in got.reason
            and got.remedy
        )


def where(area):
    from live_support import address_of

    return address_of(area), len(area)


# ---- memory cgroups
# ---------------------------------------------------------------------------------------------------
def test_what_is_missing_must_fit_the_cgroup(monkeypatch):
    monkeypatch.setattr(module, "cgroup_memory", lambda pid: [("/group/memory.max", 10 * MIB, 9 * MIB)])
    area = live.buffer("2M")
    with area:
        or_skip(live.capture, area)
        assert live.preflight(area).ok
        area.madvise(4)
        got = live.preflight(area)
    assert got.verdict == "refused" and "memory cgroup /group/memory.max has 1 MiB left of 10 MiB" in got.reason
    assert got.remedies == [("the memory cgroup", f"echo {11 * MIB} > /group/memory.max")]


def test_cgroups_of_this_process_are_whole():
    for path, limit, usage in cgroup_memory():
        assert os.path.exists(path) and limit < 1 << 62 and usage >= 0
    assert cgroup_memory(1 << 22 | 1) == []


# ---- the commands really help
# -----------------------------------------------------------------------------------------
def test_commands_name_every_way():
    have = Limits(os.getpid(), MIB, MIB, 0, 0, False)
    text = "\n".join(command for _, command in remedies(5 * MIB + 1, have))
    for words in (
        "prlimit --pid",
        "memlock 5121",
        "LimitMEMLOCK=5121K",
        "--ulimit memlock=5243904:5243904",
        "setcap cap_ipc_lock+ep /",
    ):
        assert words in text
    assert remedies(MIB, Limits(7, 0, None, 0, 0, False))[0][1] == "ulimit -l 1024"


def limited(soft, hard, code):
    """Start Python with these memlock limits (MiB) and without CAP_IPC_LOCK; returns the running process."""
    import resource

    drop = without_capabilities(CAP_IPC_LOCK)

    def less():
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (soft * MIB, hard * MIB))
        drop()

    return subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, preexec_fn=less
    )


@root
@pytest.mark.parametrize("soft, hard", [(1, 8), (1, 1)])
def test_prlimit_as_told_lifts_the_limit_of_a_running_process(soft, hard):
    if hard < 8 and not has_capability(CAP_SYS_RESOURCE):
        pytest.skip("raising a hard limit needs CAP_SYS_RESOURCE, which even this root lacks")
    child = limited(soft, hard, "print(1, flush=True); input()")
    try:
        child.stdout.readline()
        have = live.limits(child.pid)
        assert (have.soft, have.hard) == (soft * MIB, hard * MIB) and not have.cap_ipc_lock
        command = next(command for _, command in remedies(8 * MIB, have) if command.startswith("prlimit"))
        assert str(child.pid) in command
        try:
            subprocess.run(command.split(), check=True)
        except FileNotFoundError:
            pytest.skip("prlimit (util-linux) is not installed")
        assert live.limits(child.pid).soft == 8 * MIB
    finally:
        child.communicate("\n")


@root
def test_ulimit_as_told_makes_the_same_registration_pass():
    """Refused under 1 MiB, the command it names is typed, and then the kernel takes the buffer."""
    import resource

    with live.buffer(PAGE) as buf:
        or_skip(live.kernel_register, buf)
    code = (
        "from mmcore import live\n"
        "with live.buffer('4M') as buf:\n"
        "    got = live.preflight(buf, apis=['io_uring']); print(got.verdict, got.remedy, sep='|')\n"
        "    try: live.kernel_register(buf); print('registered')\n"
        "    except live.NotPossible as error: print(error.reason)\n"
    )
    drop = without_capabilities(CAP_IPC_LOCK)

    def less():
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (MIB, 8 * MIB))
        drop()

    first = run("-c", code, preexec_fn=less)
    verdict, command = first.stdout.splitlines()[0].split("|")
    assert verdict == "refused" and command == "ulimit -l 4104" and "ENOMEM" in first.stdout, first.stderr
    again = subprocess.run(
        ["bash", "-c", f'{command} && exec "$0" -c "$1"', sys.executable, code],
        capture_output=True,
        text=True,
        preexec_fn=less,
        env={**os.environ, "PYTHONPATH": os.path.dirname(os.path.dirname(mmc.__file__))},
    )
    assert again.stdout.splitlines() == ["fits|", "registered"], again.stderr


# ---- the verb
# ---------------------------------------------------------------------------------------------------------
def test_the_verb(tmp_path):
    done = mmcore("preflight", "--size", "4M", "--backing", "4k")
    assert done.returncode == 0 and not done.stderr
    assert all(word in done.stdout for word in ("memlock ", "RDMA", "VFIO", "io_uring", "verdict "))
    got = json.loads(mmcore("preflight", "--json", "--size", "4M", "--api", "vfio").stdout)
    assert [charge["api"] for charge in got["charges"]] == ["VFIO"] and got["needed"] == 4 * MIB
    pretend(8, 8, locked=1).save(tmp_path / "capture")
    done = mmcore("preflight", str(tmp_path / "capture"), "--check")
    assert done.returncode == 1 and "refused" in done.stdout and "prlimit --pid 77" in done.stdout
    assert mmcore("preflight", str(tmp_path / "capture")).returncode == 0


def test_the_verb_on_a_process():
    with live.buffer("1M") as buf:
        or_skip(live.capture, buf)
        done = mmcore("preflight", "--json", "--pid", str(os.getpid()), "--addr", hex(buf.addr), "--length", "1M")
    assert json.loads(done.stdout)["needed"] == MIB, done.stderr


@pytest.mark.parametrize(
    "words, text",
    [
        (["--addr", "0x1000"], "go together"),
        (["--addr", "0x1000", "--length", "4K"], "need a PID"),
        (["--api", "xdp"], "xdp"),
        (["--pid", "1", "--size", "4K"], "no PID"),
        (["file", "--pid", "1"], "not both"),
    ],
)
def test_usage(words, text):
    done = mmcore("preflight", *words)
    assert done.returncode == 2 and text in done.stderr and "Traceback" not in done.stderr
