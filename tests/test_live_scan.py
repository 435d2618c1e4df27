"""PAGEMAP_SCAN and PROCMAP_QUERY say what pagemap and maps say, and are done without where there are none."""

import errno
import mmap

import numpy as np
import pytest
from live_support import PAGE, linux, or_skip
from support import not_under_asan

from mmcore import live
from mmcore.live import pagemap as pm
from mmcore.live import scan, vma
from mmcore.live.buffer import MAP_NORESERVE
from mmcore.live.limits import open_proc

pytestmark = linux


def without_ioctl(monkeypatch, number=errno.ENOTTY):
    def refuse(*args):
        raise OSError(number, "refused")

    monkeypatch.setattr(scan.fcntl, "ioctl", refuse)


def lines_of(pid="self", start=0, end=1 << 64):
    with open_proc(pid, "maps") as file:
        return [line for line in map(scan.parse_line, file) if line.end > start and line.start < end]


def test_query_agrees_with_the_text():
    with live.buffer("1M") as buf:
        lo, hi = buf.addr - (8 << 20), buf.addr + (8 << 20)
        with open_proc("self", "maps") as file:
            found = scan.query(file, lo, hi)
        if found is None:
            pytest.skip("PROCMAP_QUERY needs Linux 6.11")
        assert found == lines_of(start=lo, end=hi) and len(found) > 1
        assert scan.mappings("self", lo, hi) == found


def test_query_of_nothing():
    with open_proc("self", "maps") as file:
        if scan.query(file, 0, 1 << 64) is None:
            pytest.skip("PROCMAP_QUERY needs Linux 6.11")
        assert scan.query(file, 0, 4096) == []


@pytest.mark.parametrize("number", scan.MISSING)
def test_maps_are_read_where_there_is_no_query(monkeypatch, number):
    with live.buffer("1M") as buf:
        wanted = scan.mappings("self", buf.addr, buf.addr + PAGE)
        without_ioctl(monkeypatch, number)
        assert scan.mappings("self", buf.addr, buf.addr + PAGE) == wanted
        assert scan.query(None, 0, 1) is None


def test_scan_agrees_with_pagemap():
    area = mmap.mmap(-1, 64 * PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    for page in (0, 1, 5, 6, 7, 63):
        area[page * PAGE] = 1
    addr = np.frombuffer(area, np.uint8).ctypes.data
    with open_proc("self", "pagemap", "rb") as file:
        regions = scan.scan(file, addr, addr + 64 * PAGE, all_of=scan.PAGE_IS_PRESENT)
        if regions is None:
            pytest.skip("PAGEMAP_SCAN needs Linux 6.7")
        words = np.zeros(64, np.uint64)
        pm.read_words(file, addr // PAGE, words)
    pages = sorted(page for region in regions for page in range(
        (int(region["start"]) - addr) // PAGE, (int(region["end"]) - addr) // PAGE))
    assert pages == np.flatnonzero(words & pm.PM_PRESENT).tolist() and {0, 1, 5, 6, 7, 63} <= set(pages)


def test_scan_goes_on_when_its_answer_is_full(monkeypatch):
    area = mmap.mmap(-1, 64 * PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    area.madvise(mmap.MADV_NOHUGEPAGE)
    for page in range(0, 64, 2):
        area[page * PAGE] = 1
    addr = np.frombuffer(area, np.uint8).ctypes.data
    monkeypatch.setattr(scan, "REGIONS", 3)
    with open_proc("self", "pagemap", "rb") as file:
        regions = scan.scan(file, addr, addr + 64 * PAGE, all_of=scan.PAGE_IS_PRESENT)
    if regions is None:
        pytest.skip("PAGEMAP_SCAN needs Linux 6.7")
    assert [(int(start) - addr) // PAGE for start in regions["start"]] == list(range(0, 64, 2))


@pytest.mark.parametrize("backing, huge", [("4k", False), ("thp", True)])
def test_leaves_are_those_of_smaps(backing, huge):
    with live.buffer("4M", backing) as buf:
        got = or_skip(live.capture, buf)
        if got.leaves is None:
            pytest.skip("PAGEMAP_SCAN needs Linux 6.7")
        assert np.count_nonzero(got.leaves) * PAGE == sum(one.huge for one in got.vmas) or not huge
        assert bool(got.leaves.any()) <= huge
        assert got.backing().mappings[0].by_leaf == np.count_nonzero(got.leaves) * PAGE


def test_captures_without_the_ioctls(monkeypatch):
    with live.buffer("4M", "thp") as buf:
        wanted = or_skip(live.capture, buf)
        without_ioctl(monkeypatch)
        got = live.capture(buf)
    assert got.leaves is None and np.array_equal(got.pfns, wanted.pfns) and not got.partial
    assert got.backing().mappings[0].by_leaf is None


@not_under_asan("its shadow lies there too")
def test_the_holes_of_a_very_large_mapping_cost_nothing(monkeypatch):
    """16 TiB reserved, as sanitizers and runtimes do: only the stretches with pages have entries."""
    size = 1 << 44
    area = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE)
    area[0] = area[size // 2] = area[size - 1] = 1
    addr = np.frombuffer(area, np.uint8).ctypes.data
    with open_proc("self", "pagemap", "rb") as file:
        if scan.scan(file, addr, addr + PAGE, all_of=scan.PAGE_IS_PRESENT) is None:
            pytest.skip("PAGEMAP_SCAN needs Linux 6.7")
    got = or_skip(live.capture)
    assert len(got.pfns) < 1 << 20 and np.all(np.diff(got.addresses.astype(np.int64)) > 0)
    mine = (got.addresses >= addr) & (got.addresses < addr + size)
    present = got.addresses[mine & (got.pfns != 0)]
    assert {addr, addr + size // 2, addr + size - PAGE} <= set(present.tolist())
    backing = next(one for one in got.backing().mappings if one.start <= addr < one.end)
    assert backing.present >= 3 * PAGE and backing.length < 1 << 30
    without_ioctl(monkeypatch)
    with pytest.raises(ValueError, match="give addr and length"):
        live.capture()
    area.close()


@pytest.mark.parametrize("which, error", [(0, ValueError), (10 ** 9, ValueError), ("other", TypeError),
                                          (True, TypeError),
                                          (None, TypeError)])
def test_mappings_that_are_not_there(which, error):
    with pytest.raises(error):
        vma.find_vma("self", which)


@not_under_asan("a process has no [heap]")
def test_mappings_by_name_and_line():
    lines = lines_of()
    assert vma.find_vma("self", "stack").path == "[stack]" and vma.find_vma("self", "heap").path == "[heap]"
    assert vma.find_vma("self", 1).start == lines[0].start


def test_names_that_are_no_text():
    assert scan.parse_line("Size: 4 kB\n") is None
    line = "7f00-8f00 rw-s 0001 00:05 12                       /memfd:a b (deleted)\n"
    assert scan.parse_line(line) == scan.Mapping(0x7F00, 0x8F00, "rw-s", 1, "00:05", 12, "/memfd:a b (deleted)")
    assert vma.clean("a\x1b[2Jb\u202e") == "a?[2Jb?"
