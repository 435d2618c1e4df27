"""Which folio sizes a mapping may have: each rule alone, then all of them against the kernel's own THPeligible."""

import mmap

import numpy as np
import pytest
from live_support import linux, or_skip

from mmcore import live
from mmcore.live import machine as m
from mmcore.live import thp
from mmcore.live.vma import Vma, smaps, vmas

HUGE = 2 << 20
BLOCKS = (m.Zone(0, "Normal", blocks=(1,) * 11),)


def settings(enabled="always", shmem="never", mthp=None, zones=BLOCKS):
    sizes = {HUGE: {"enabled": "inherit", "shmem_enabled": "inherit"}, **(mthp or {})}
    return m.Machine("test", 4096, HUGE, zones, {"enabled": enabled, "shmem_enabled": shmem}, sizes)


def anon(start=HUGE, end=3 * HUGE, **fields):
    return Vma(start, end, "rw-p", **{"rss": 4096, **fields})


@pytest.mark.parametrize("vma, machine, match", [
    (anon(), settings(), ""),
    (anon(), settings("never"), "enabled is never"),
    (anon(), settings("madvise"), "not advised"),
    (anon(flags=("hg",)), settings("madvise"), ""),
    (anon(flags=("nh",)), settings(), "MADV_NOHUGEPAGE"),
    (anon(end=HUGE + 4096), settings(), "no aligned range of 2 MiB"),
    (anon(start=4096, end=2 * HUGE - 4096), settings(), "no aligned range"),
    (anon(start=4096, end=2 * HUGE), settings(), ""),
    (anon(flags=("ht",)), settings(), "hugetlb"),
    (anon(flags=("io",)), settings(), "VM_IO"), (anon(flags=("pf",)), settings(), "VM_PFNMAP"),
    (anon(flags=("mm",)), settings(), "VM_MIXEDMAP"), (anon(flags=("de",)), settings(), "VM_DONTEXPAND"),
    (anon(path="/usr/lib/x.so", inode=5), settings(), "file system's choice"),
    (anon(path="/dev/zero (deleted)", inode=5), settings(), "shmem_enabled is never"),
    (anon(path="/dev/zero (deleted)", inode=5), settings("never", "always"), "aligned"),
    (anon(path="/dev/zero (deleted)", inode=5, offset=HUGE), settings("never", "always"), ""),
    (anon(path="/memfd:x", inode=5, offset=4096), settings("never", "always"), "aligned"),
    (anon(path="/memfd:x", offset=HUGE), settings("never", "advise"), "not advised"),
    (anon(path="/memfd:x", offset=HUGE, flags=("hg",)), settings("never", "advise"), ""),
    (anon(path="/memfd:x", offset=HUGE), settings("never", "deny"), "is deny"),
    (anon(path="/memfd:x", offset=HUGE), settings("never", "within_size"), ""),
    (anon(), settings("", mthp={}), "not in this kernel"),
])
def test_rules(vma, machine, match):
    if match == "aligned":
        # The file's offset has to be aligned like the address: shift the file by a page to see it refused.
        vma = Vma(**{**vars(vma), "offset": vma.offset | 4096})
    reason = thp.forbidden(vma, HUGE, machine)
    assert (match in reason) if match else reason == ""


def test_a_process_may_turn_it_off():
    assert "PR_SET_THP_DISABLE" in thp.forbidden(anon(), HUGE, settings(), process_disabled=True)


def test_each_size_has_its_own_switch():
    small = 65536
    machine = settings("madvise", mthp={small: {"enabled": "always", "shmem_enabled": "never"}})
    assert thp.forbidden(anon(), small, machine) == "" and "madvise" in thp.forbidden(anon(), HUGE, machine)
    machine = settings("always", mthp={small: {"enabled": "never"}, HUGE: {"enabled": "never"}})
    for size in (small, HUGE):
        assert f"hugepages-{size >> 10}kB/enabled is never" in thp.forbidden(anon(), size, machine)
    # A mapping too small for one size fits another.
    assert [rule.size for rule in thp.rules(anon(end=HUGE + 2 * small),
                                            settings("always", mthp={small: {"enabled": "inherit"}}))
            if not rule.reason] == [small]


def test_free_blocks_are_counted_by_order():
    zones = (m.Zone(0, "A", blocks=(5, 0, 0, 0, 3, 1)), m.Zone(0, "B", blocks=(0, 0, 0, 0, 0, 0, 1)))
    rules = thp.rules(anon(), settings(mthp={65536: {"enabled": "always"}}, zones=zones))
    assert [(rule.size, rule.free_blocks) for rule in rules] == [(65536, 3 + 2 + 4), (HUGE, 0)]
    assert "no free block of 2 MiB now" in thp.why_not_huge(anon(), settings(zones=zones))
    assert "split since" in thp.why_not_huge(anon(), settings())
    assert thp.why_not_huge(anon(huge=2 * HUGE), settings("never")) == ""
    assert thp.why_not_huge(anon(rss=0), settings()) == "not populated"


@linux
def test_the_kernel_agrees_for_every_mapping_of_this_process():
    """THPeligible says whether any size may be had, by the same rules; file systems decide for their files."""
    areas = []
    for length, advice in ((HUGE, None), (4 * HUGE, None), (4 * HUGE, mmap.MADV_HUGEPAGE),
                           (4 * HUGE, mmap.MADV_NOHUGEPAGE),
                           (HUGE // 2, mmap.MADV_HUGEPAGE)):
        area = mmap.mmap(-1, length, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if advice:
            area.madvise(advice)
        area[0] = 1
        areas.append(area)
    shared = mmap.mmap(-1, 4 * HUGE)
    shared.madvise(mmap.MADV_HUGEPAGE)
    here = m.machine()
    if not here.thp:
        pytest.skip("this kernel has no THP")
    seen = 0
    for vma in vmas():
        if "THPeligible" not in vma.sizes or (vma.inode and not vma.shared_memory):
            continue
        allowed = [rule.size for rule in thp.rules(vma, here) if not rule.reason]
        assert bool(allowed) == bool(vma.sizes["THPeligible"]), (vma, allowed)
        seen += 1
    assert seen > 5
    del shared, areas


@linux
def test_smaps_comes_back_as_it_was():
    """Every line of every mapping of a process that stands still, but for sizes shared with others that move."""
    from live_support import child

    with child("import sys; print('ready', flush=True); sys.stdin.read()") as (started, _):
        for _ in range(5):
            with open(f"/proc/{started.pid}/smaps") as file:
                before = file.read()
            got = smaps(vmas(started.pid))
            with open(f"/proc/{started.pid}/smaps") as file:
                after = file.read()
            if before == after:
                break
        else:
            pytest.skip("shared pages moved all the time")
    assert got == before


@linux
def test_a_capture_judges_by_its_own_settings():
    """A file tells why on the machine it was taken, whatever the one that reads it is set to."""
    with live.buffer("4M", "4k") as buf:
        got = or_skip(live.capture, buf)
    assert got.not_huge and "MADV_NOHUGEPAGE" in got.not_huge[0][2]
    got.machine = settings("never")
    got.vmas = [Vma(**{**vars(vma), "flags": ()}) for vma in got.vmas]
    assert "enabled is never" in got.not_huge[0][2]
    one = got.backing().mappings[0]
    assert one.eligibility().startswith("no: ") and one.allowed == []
    assert not one.as_dict()["reason"].startswith("madvise")


@linux
def test_backing_by_mapping():
    with live.buffer("8M", "thp") as huge:
        got = or_skip(live.capture, "self", huge.addr + HUGE, 2 * HUGE)
        one = got.backing().mappings[0]
        assert (one.length, one.present) == (2 * HUGE, 2 * HUGE) and sum(one.by_size.values()) == 2 * HUGE
        if one.by_size == {HUGE: 2 * HUGE}:
            assert one.aligned == {HUGE: 2 * HUGE} and one.contiguous >= HUGE
        assert one.alignment == min(one.start & -one.start, 1 << 30)
        assert np.all(got.pfns != 0)
    total = or_skip(live.capture).backing()
    assert sum(one.present for one in total.mappings) == total.present
    for name in ("by_size", "by_kind"):
        added = {}
        for one in total.mappings:
            for key, value in getattr(one, name).items():
                added[key] = added.get(key, 0) + value
        assert added == getattr(total, name)
