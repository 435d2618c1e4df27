"""Free memory in blocks, its unusable share, its runs; and the files that say so, as machines write them."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from live_support import linux, or_skip

from mmcore import live
from mmcore.live import machine as m
from mmcore.live import pagemap as pm
from mmcore.live.frag import frag, free_runs, unusable_free
from mmcore.live.frames import Frames

BUDDYINFO = """\
Node 0, zone      DMA      0      0      0      0      0      0      0      0      1      1      3 
Node 0, zone   Normal   4511   2243    905    400    130     12      7      1      0      0      0 
Node 1, zone  Movable     12      0      1 
"""  # noqa: W291 (as the kernel writes it)
ZONEINFO = """\
Node 0, zone      DMA
  per-node stats
      nr_inactive_anon 1925
  pages free     3840
        boost    0
        min      15
        low      18
        high     21
        spanned  4095
        present  3998
        managed  3840
        cma      0
        protection: (0, 2976, 15960, 15960)
  pagesets
    cpu: 0
              count:    0
              high:     14
              batch:    1
  start_pfn:           1
Node 0, zone   Normal
  pages free     26000
        min      100
        low      200
        high     300
        spanned  65536
        present  65000
        managed  64000
        cma      4096
  start_pfn:           4096
Node 1, zone  Movable
  pages free     16
        spanned  1024
        present  1024
        managed  1024
  start_pfn:           1048576
Node 1, zone   Device
  pages free     0
        spanned  0
"""
FREE = np.uint64(1 << pm.KPF_BUDDY)


def test_zones_of_two_nodes():
    dma, normal, movable, device = m.zones(BUDDYINFO, ZONEINFO)
    assert dma == m.Zone(0, "DMA", 1, 4095, 3998, 3840, 0, 3840, 15, 18, 21, (0,) * 8 + (1, 1, 3))
    assert (normal.start_pfn, normal.end_pfn, normal.cma, normal.high) == (4096, 69632, 4096, 300)
    assert (movable.node, movable.blocks, movable.free_in_blocks) == (1, (12, 0, 1), 16) and device.blocks == ()
    assert dma.free_in_blocks == 256 + 512 + 3 * 1024


def test_buddyinfo_comes_back_as_it_was():
    assert m.Machine(zones=tuple(m.zones(BUDDYINFO, ZONEINFO))).buddyinfo() == BUDDYINFO


def test_a_machine_survives_json():
    import json

    before = m.Machine("6.18", 4096, 2 << 20, tuple(m.zones(BUDDYINFO, ZONEINFO)), {"enabled": "madvise"},
                       {65536: {"enabled": "never"}}, {2 << 20: {"total": 1}})
    assert m.Machine.from_dict(json.loads(json.dumps(before.as_dict()))) == before


@pytest.mark.parametrize("text, word", [("always [madvise] never\n", "madvise"), ("[never]", "never"), ("5\n", "5"),
                                        ("", "")])
def test_switches(text, word):
    assert m.chosen(text) == word


@linux
def test_this_machine():
    here = m.machine()
    with open("/proc/buddyinfo") as file:
        lines = file.read()
    # Counts move; the shape does not.
    ours, theirs = ([(line.split()[:4], len(line.split())) for line in text.splitlines()]
                    for text in (here.buddyinfo(), lines))
    assert ours == theirs
    assert m.zones(lines, "") and m.Machine(zones=tuple(m.zones(lines, ""))).buddyinfo() == lines
    assert here.page_size and here.kernel and any(zone.managed for zone in here.zones)
    assert all(zone.present <= zone.spanned and zone.managed <= zone.present for zone in here.zones)
    if here.thp:
        assert here.thp["enabled"] in ("always", "madvise", "never")


@pytest.mark.parametrize("blocks, unusable", [
    ((), ()), ((0, 0), (1.0, 1.0)), ((4,), (0.0,)), ((4, 0), (0.0, 1.0)), ((2, 1), (0.0, 0.5)), ((0, 0, 1), (0, 0, 0)),
    ((8, 0, 2), (0.0, 0.5, 0.5)),
])
def test_unusable_free(blocks, unusable):
    assert unusable_free(blocks) == pytest.approx(unusable)


@given(st.lists(st.integers(0, 1000), min_size=1, max_size=11))
def test_unusable_free_grows_with_the_order(blocks):
    """It is the share that is not in blocks of the order and above, as the kernel's own index is defined."""
    got = unusable_free(blocks)
    total = sum(count << order for order, count in enumerate(blocks))
    for order, share in enumerate(got):
        usable = sum(count << at for at, count in enumerate(blocks) if at >= order)
        assert share == pytest.approx((total - usable) / total if total else 1)
    assert list(got) == sorted(got)


def plain_runs(flags, edges):
    runs, start = [], None
    for pfn, word in enumerate([*flags.tolist(), 0]):
        free = bool(word & int(FREE))
        if start is not None and (not free or pfn in edges):
            runs.append((start, pfn - start))
            start = None
        if free and start is None:
            start = pfn
    return runs


@given(st.lists(st.booleans(), min_size=1, max_size=60), st.sets(st.integers(0, 60), max_size=3))
def test_runs(free, edges):
    flags = np.where(np.array(free), FREE, np.uint64(4))
    starts, lengths = free_runs(flags, sorted(edges))
    assert list(zip(starts.tolist(), lengths.tolist())) == plain_runs(flags, edges)


def test_report():
    flags = np.zeros(8192, np.uint64)
    flags[100:300] = flags[4000:5000] = FREE
    got = frag(m.Machine(zones=tuple(m.zones(BUDDYINFO, ZONEINFO))), Frames(flags, flags))
    assert got.runs == [(4096, 904), (100, 200), (4000, 96)] and got.free_runs == 3
    assert [zone.zone for zone in got.zones] == ["DMA", "Normal", "Movable"] and got.zones[1].largest_order == 7
    assert got.zones[1].in_blocks == sum(n << order for order, n in enumerate(got.zones[1].blocks))
    assert got.blocks[0] == 4511 + 12 and got.as_dict()["zones"][0]["zone"] == "DMA"
    assert frag(m.Machine()).zones == [] and frag(m.Machine()).runs is None


@linux
def test_runs_of_this_machine_hold_a_block_of_the_largest_order():
    taken = or_skip(live.capture, "memory")
    got = frag(taken.machine, taken.frames)
    assert got.free_runs >= len(got.runs) and [n for _, n in got.runs] == sorted((n for _, n in got.runs), reverse=True)
    for first, pages in got.runs:
        assert first > 0 and pm.has_flag(taken.frames.flags[first:first + pages], pm.KPF_BUDDY).all()
