"""Why a page cannot be pinned long-term: the rules on real mappings, with io_uring as the judge, and on captures of no
machine."""

import contextlib
import ctypes
import errno
import json
import mmap
import os
from types import SimpleNamespace

import numpy as np
import pytest
from live_support import (
    CAP_SYS_ADMIN,
    PAGE,
    address_of,
    linux,
    mmcore,
    or_skip,
    root,
    scratch_file,
    secret_memory,
    without_capabilities,
)

from mmcore import InvalidArgument, MMError, live
from mmcore.live import longterm
from mmcore.live import pagemap as pm
from mmcore.live.machine import Machine, Zone
from mmcore.live.vma import Vma

FLAGS = ("rd", "wr", "mr", "mw", "me", "ac")


@contextlib.contextmanager
def mapped(kind, tmp_path):
    """Give a mapping of one touched page of this kind."""
    private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    if kind in ("anon", "zero", "hole", "read-only"):
        area = mmap.mmap(-1, PAGE, flags=private)
    elif kind == "memfd":
        fd = os.memfd_create("longterm")
        os.ftruncate(fd, PAGE)
        area = mmap.mmap(fd, PAGE)
        os.close(fd)
    elif kind == "secretmem":
        area = secret_memory(PAGE)
    else:
        fd = scratch_file(tmp_path, PAGE)
        area = mmap.mmap(fd, PAGE, flags=mmap.MAP_SHARED if kind == "file shared" else mmap.MAP_PRIVATE)
        os.close(fd)
    if kind in ("zero", "file private"):
        _ = area[0]
    elif kind != "hole":
        area[0] = 1
    addr = address_of(area)
    if kind == "read-only":
        assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(addr), ctypes.c_size_t(PAGE), mmap.PROT_READ) == 0
    yield SimpleNamespace(addr=addr, length=PAGE)
    area.close()


CASES = [
    ("anon", "pinnable", "stays where it is"),
    ("hole", "pinnable", "faults it in"),
    ("zero", "pinnable", "zero page"),
    ("memfd", "pinnable", "stays"),
    ("file private", "pinnable", "copy-on-write"),
    ("read-only", "refused", "not writable"),
    ("secretmem", "refused", "secret memory"),
    ("file shared", "refused", "writes back"),
]


@linux
@pytest.mark.parametrize("kind, verdict, words", CASES)
def test_the_rule_and_the_kernel_agree(kind, verdict, words, tmp_path):
    with mapped(kind, tmp_path) as buf:
        snapshot = or_skip(live.capture, buf)
        got = live.why_not_longterm(snapshot, buf.addr)
        if got.verdict == "unknown" and "CMA" in got.reason:
            pytest.skip(got.reason)
        assert got.verdict == verdict and words in got.reason, str(got)
        assert (got.errno == errno.EFAULT) is (verdict == "refused") is bool(got.remedy)
        assert got.pfn == snapshot.pfns[0] and got.checks[0][0] == "mapping"
        try:
            or_skip(live.kernel_register, buf)
        except OSError as refusal:
            assert verdict == "refused" and refusal.errno == got.errno
        else:
            assert verdict == "pinnable"


@linux
def test_a_device_that_only_reads_may_share_a_file(tmp_path):
    with mapped("file shared", tmp_path) as buf:
        snapshot = or_skip(live.capture, buf)
        assert live.why_not_longterm(snapshot, buf.addr, write=False).verdict in ("pinnable", "unknown")
    with mapped("read-only", tmp_path) as buf:
        snapshot = or_skip(live.capture, buf)
        assert live.why_not_longterm(snapshot, buf.addr, write=False).verdict in ("pinnable", "unknown")


@linux
def test_addresses_that_are_none():
    with live.buffer(2 * PAGE) as buf:
        snapshot = or_skip(live.capture, SimpleNamespace(addr=buf.addr, length=PAGE))
        for addr in (buf.addr + PAGE, 0, (1 << 64) - 1):
            with pytest.raises(MMError, match="captured is") as caught:
                live.why_not_longterm(snapshot, addr)
            assert caught.value.errno == errno.EFAULT and caught.value.addr == addr
        for addr in (-1, 1 << 64):
            with pytest.raises(InvalidArgument):
                live.why_not_longterm(snapshot, addr)
        for addr in ("0x10", 1.5, None, True):
            with pytest.raises(TypeError):
                live.why_not_longterm(snapshot, addr)


# ---- captures of no machine
# -------------------------------------------------------------------------------------------
def made_up(vma, flags, *, pfn=0x1234, word=None, pinned=0, mapcount=1):
    """Return a Capture of one page of a process that does not run here."""
    return live.Capture(
        {
            "pid": 1 << 22 | 1,
            "command": "gone",
            "kernel": "0",
            "page_size": 4096,
            "moved": 0,
            "not_huge": [],
            "vmas": [vars(vma)],
            "limits": {"pid": 1, "soft": None, "hard": None, "locked": 0, "pinned": pinned, "cap_ipc_lock": False},
        },
        {
            "starts": np.array([vma.start], np.uint64),
            "counts": np.array([1], np.uint64),
            "words": np.array([pfn | int(pm.PM_PRESENT) if word is None else word], np.uint64),
            "flags": np.array([flags], np.uint64),
            "mapcounts": np.array([mapcount], np.uint64),
            "heads": np.array([pfn], np.uint64),
            "orders": np.zeros(1, np.uint8),
        },
    )


ANON = Vma(0x10000, 0x11000, "rw-p", flags=FLAGS)
ANON_PAGE = 1 << pm.KPF_ANON | 1 << pm.KPF_SWAPBACKED | 1 << pm.KPF_LRU


@pytest.mark.parametrize(
    "change, flags, number, words",
    [
        ({"flags": FLAGS + ("pf",)}, 0, errno.EFAULT, "VM_PFNMAP"),
        ({"flags": FLAGS + ("io",)}, 0, errno.EFAULT, "VM_IO"),
        ({"perms": "---p"}, ANON_PAGE, errno.EFAULT, "may not be accessed"),
        ({}, ANON_PAGE | 1 << pm.KPF_HWPOISON, errno.EFAULT, "memory error"),
        ({}, 1 << pm.KPF_NOPAGE, errno.EFAULT, "no struct page"),
        ({}, ANON_PAGE | 1 << pm.KPF_OFFLINE, errno.EFAULT, "offline"),
        ({"perms": "rw-s", "inode": 5, "dev": "08:01", "path": "/data"}, 0, errno.EFAULT, "block device"),
    ],
)
def test_refusals(change, flags, number, words):
    got = live.why_not_longterm(made_up(Vma(**{**vars(ANON), **change}), flags), 0x10123)
    assert (got.verdict, got.errno) == ("refused", number) and words in got.reason and got.remedy
    assert json.loads(json.dumps(got.as_dict()))["errno"] == errno.errorcode[number]


def test_of_a_foreign_capture_the_zone_is_not_known():
    got = live.why_not_longterm(made_up(ANON, ANON_PAGE), 0x10000)
    assert got.verdict == "unknown" and "zone" in got.reason and got.remedy
    shared = Vma(0x10000, 0x11000, "rw-s", inode=5, dev="00:2a", path="/data", flags=FLAGS)
    got = live.why_not_longterm(made_up(shared, 1 << pm.KPF_LRU), 0x10000)
    assert got.verdict == "unknown" and "file system" in got.reason
    # A page that is known to be shared memory needs no file system.
    got = live.why_not_longterm(made_up(shared, 1 << pm.KPF_SWAPBACKED | 1 << pm.KPF_LRU), 0x10000)
    assert "file system" not in got.reason


@pytest.mark.parametrize("zone, cma, verdict, words", [("Movable", 0, "moved", "ZONE_MOVABLE"), ("Normal", 0, "pinnable", "no CMA"),
                                                       ("Normal", 64, "unknown", "CMA")])
def test_a_foreign_capture_tells_its_zones(zone, cma, verdict, words):
    capture = made_up(ANON, ANON_PAGE)
    capture.machine = Machine(zones=(Zone(0, "DMA", 0, 0x1000), Zone(0, zone, 0x1000, 0x9000, cma=cma)))
    got = live.why_not_longterm(capture, 0x10000)
    assert got.verdict == verdict and words in got.reason


def test_swapped_out_is_faulted_in():
    got = live.why_not_longterm(made_up(ANON, 0, word=int(pm.PM_SWAP)), 0x10000)
    assert got.verdict == "pinnable" and got.pfn == 0 and "swapped" in got.checks[-1][1]


@pytest.fixture
def here(monkeypatch):
    """Take captures for ones of this machine, with this zone and these page blocks."""

    def place(zone, blocks, cma=None):
        monkeypatch.setattr(longterm, "of_this_machine", lambda capture: True)
        monkeypatch.setattr(longterm, "zone_of", lambda pfn: zone)
        monkeypatch.setattr(longterm, "page_blocks", lambda name: blocks)
        if cma is not None:
            monkeypatch.setattr(longterm, "in_cma", lambda pfn, name: cma)

    return place


def test_movable_and_cma_are_moved_first(here):
    here("Movable", {"Movable": 4})
    got = live.why_not_longterm(made_up(ANON, ANON_PAGE), 0x10000)
    assert (
        got.verdict == "moved"
        and "ZONE_MOVABLE" in got.reason
        and "ENOMEM" in got.reason
        and "compact_memory" in got.remedy
    )
    here("Normal", {"Movable": 4})
    assert live.why_not_longterm(made_up(ANON, ANON_PAGE), 0x10000).verdict == "pinnable"
    here("Normal", {"Movable": 4, "CMA": 2}, cma=True)
    assert "CMA area" in live.why_not_longterm(made_up(ANON, ANON_PAGE), 0x10000).reason


def test_what_hints_at_other_references(here):
    here("Movable", {"Movable": 4})
    flags = 1 << pm.KPF_ANON | 1 << pm.KPF_WRITEBACK | 1 << pm.KPF_LOCKED
    words = dict(live.why_not_longterm(made_up(ANON, flags, pinned=8192, mapcount=2), 0x10000).checks)["references"]
    assert all(word in words for word in ("written back", "locked", "LRU", "2 times", "8 KiB pinned"))
    assert "no _refcount" in dict(live.why_not_longterm(made_up(ANON, ANON_PAGE), 0x10000).checks)["references"]


def test_pages_that_a_private_mapping_replaces(here):
    here("Normal", {})
    ksm = ANON_PAGE | 1 << pm.KPF_KSM
    assert "KSM" in live.why_not_longterm(made_up(ANON, ksm), 0x10000).reason
    assert "zero page" in live.why_not_longterm(made_up(ANON, 1 << pm.KPF_ZERO_PAGE), 0x10000).reason


def test_dax_file_systems_are_refused(monkeypatch):
    vma = Vma(0x10000, 0x11000, "rw-s", inode=5, dev="08:01", path="/data", flags=FLAGS)
    number, words, _ = longterm.mapping_rule(vma, filesystem=("ext4", "rw,dax=always"))
    assert number == errno.EOPNOTSUPP and "DAX" in words


@linux
@pytest.mark.parametrize("text, zone", [(0, ""), (1 << 51, "")])
def test_frames_of_no_zone(text, zone):
    assert longterm.zone_of(text) == zone


# ---- the verb
# ---------------------------------------------------------------------------------------------------------
@linux
def test_the_verb_on_a_process_and_on_a_file(tmp_path):
    with live.buffer(PAGE) as buf:
        or_skip(live.capture, buf).save(tmp_path / "capture")
        done = mmcore("why-not-longterm", str(os.getpid()), hex(buf.addr))
        assert done.returncode == 0 and "verdict " in done.stdout and "migrate type" in done.stdout, done.stderr
        done = mmcore("why-not-longterm", str(tmp_path / "capture"), hex(buf.addr), "--json", "--read-only")
        got = json.loads(done.stdout)
        assert got["addr"] == buf.addr and got["write"] is False and got["checks"][0][0] == "mapping"
    done = mmcore("why-not-longterm", str(os.getpid()), "0x1000")
    assert done.returncode == 1 and "maps nothing at 0x1000" in done.stderr and not done.stdout
    done = mmcore("why-not-longterm", str(1 << 22 | 1), "0x1000")
    assert done.returncode == 1 and "does not exist" in done.stderr
    assert mmcore("why-not-longterm", "1", "7f00zz").returncode == 2
    assert mmcore("why-not-longterm", str(tmp_path / "none"), "0x1000").returncode == 1


@linux
@root
def test_without_privilege_the_verb_says_what_it_needs():
    done = mmcore("why-not-longterm", "1", "0x1000", preexec_fn=without_capabilities(CAP_SYS_ADMIN))
    assert done.returncode in (1, 77) and "Traceback" not in done.stderr
