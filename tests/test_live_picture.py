"""Pictures: what a frame is used for, the grid's cells, the strip's boxes, and the files that matplotlib writes."""

import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from live_support import linux, made_up_capture, or_skip

from mmcore import live
from mmcore.live import colours, picture, plot
from mmcore.live import pagemap as pm
from mmcore.live.frames import SECTION
from mmcore.live.machine import Zone


def word(*bits):
    return sum(1 << bit for bit in bits)


NAMES = [one.name for one in colours.CLASSES]


@pytest.mark.parametrize("flags, name", [
    (word(pm.KPF_BUDDY), "free"), (word(pm.KPF_BUDDY, pm.KPF_UPTODATE), "free"),
    (word(pm.KPF_NOPAGE), "absent"), (word(pm.KPF_OFFLINE), "absent"), (word(pm.KPF_HWPOISON, pm.KPF_ANON), "absent"),
    (0, "kernel"), (word(pm.KPF_SLAB), "kernel"), (word(pm.KPF_PGTABLE), "kernel"), (word(pm.KPF_RESERVED), "kernel"),
    (word(pm.KPF_LRU, pm.KPF_UPTODATE), "file"), (word(pm.KPF_UNEVICTABLE), "file"),
    (word(pm.KPF_THP, pm.KPF_LRU), "file"),
    (word(pm.KPF_SWAPBACKED, pm.KPF_LRU), "shmem"), (word(pm.KPF_ANON, pm.KPF_SWAPBACKED, pm.KPF_LRU), "anon"),
    (word(pm.KPF_ANON, pm.KPF_COMPOUND_TAIL), "anon large"), (word(pm.KPF_ANON, pm.KPF_THP), "anon large"),
    (word(pm.KPF_HUGE, pm.KPF_COMPOUND_HEAD), "hugetlb"), (word(pm.KPF_HUGE, pm.KPF_ANON), "hugetlb"),
])
def test_classes(flags, name):
    assert NAMES[picture.classify(np.array([flags], np.uint64))[0]] == name


def test_what_lies_in_no_zone_or_is_not_in_use_is_absent():
    flags = np.zeros(3 * SECTION, np.uint64)
    flags[SECTION + 5] = word(pm.KPF_SLAB)
    zones = [Zone(0, "A", 10, 2 * SECTION), Zone(0, "empty", 0, 0)]
    classes = picture.classify(flags, zones)
    assert np.all(classes[:SECTION] == colours.ABSENT)          # a section without one flag
    assert np.all(classes[SECTION:2 * SECTION] == colours.KERNEL)
    assert np.all(classes[2 * SECTION + 10:] == colours.ABSENT)
    assert np.all(picture.classify(flags) == colours.KERNEL)


def test_colours_are_told_apart():
    """Eight classes, each with a colour and a letter of its own; they differ also for the red-green blind."""
    assert len(colours.CLASSES) == 8
    for values in ([one.letter for one in colours.CLASSES], [one.colour for one in colours.CLASSES] + [colours.MARK]):
        assert len(set(values)) == len(values)
    # Red-green blindness leaves blue-yellow and lightness: simulate it (Vienot 1999) and measure the distance.
    simulate = np.array([[0.1124, 0.8876, 0], [0.1124, 0.8876, 0], [0.004, -0.004, 1]])
    seen = [simulate @ (np.array([int(one.colour[at:at + 2], 16) for at in (1, 3, 5)]) / 255) ** 2.2
            for one in colours.CLASSES]
    for at, one in enumerate(seen):
        for other in seen[:at]:
            # Lightness counts as the eye sees it.
            assert np.linalg.norm(np.cbrt(np.clip(one, 0, None)) - np.cbrt(np.clip(other, 0, None))) > 0.08


@given(st.lists(st.sampled_from([0, 1 << pm.KPF_BUDDY, 1 << pm.KPF_LRU, 1 << pm.KPF_ANON]), min_size=1, max_size=100),
       st.sampled_from([4096, 8192, 65536]), st.integers(8, 16))
def test_cells_hold_what_most_frames_are(flags, cell, columns):
    words = np.array(flags, np.uint64)
    got = picture.grid(words, 4096, cell=cell, columns=columns)
    pages = cell // 4096
    assert (got.cell_pages, got.cell_bytes) == (pages, cell) and len(got.cells) == -(-len(flags) // pages)
    classes = picture.classify(words)
    for at, found in enumerate(got.cells.tolist()):
        counts = np.bincount(classes[at * pages:(at + 1) * pages], minlength=8)
        assert counts[found] == counts.max()
    assert sum(got.totals.values()) == len(flags)
    assert "".join(got.letters()) == "".join(colours.CLASSES[one].letter for one in got.cells)
    assert got.rows == len(got.letters()) == -(-len(got.cells) // columns)


def test_a_part_starts_at_a_cell():
    words = np.full(4096, 1 << pm.KPF_BUDDY, np.uint64)
    words[2000] = 1 << pm.KPF_LRU
    got = picture.grid(words, 4096, first=1990, last=2010, cell=4096, columns=8)
    assert (got.first_pfn, len(got.cells)) == (1990, 20) and got.letters()[1][2] == "f"
    assert got.address(1) == (1990 + 8) * 4096
    got = picture.grid(words, 4096, first=1990, last=2010, cell=65536)
    assert got.first_pfn == 1984


def test_the_cell_is_chosen_to_fit():
    words = np.full(1 << 20, 1 << pm.KPF_BUDDY, np.uint64)
    got = picture.grid(words, 4096, columns=64, rows=40)
    assert got.rows <= 40 and got.cell_bytes >= 2 << 20 and got.cell_bytes & (got.cell_bytes - 1) == 0
    assert picture.grid(words[:100], 4096, columns=64).cell_pages == 1


def test_marks_count_frames():
    words = np.full(64, 1 << pm.KPF_BUDDY, np.uint64)
    got = picture.grid(words, 4096, cell=16 * 4096, columns=8, marks=[0, 5, 5, 16, 17, 63, 1000])
    assert got.marks.tolist() == [1, 2, 0, 1] and got.letters() == [".*.."]
    assert got.as_dict()["marks"] == {"0": 1, "1": 2, "3": 1}


@pytest.mark.parametrize("how, match", [
    ({"cell": 3 * 4096}, "power of two"), ({"cell": 100}, "power of two"), ({"first": 200}, "none from"),
    ({"cell": 0}, "power of two"),
])
def test_grids_that_cannot_be(how, match):
    with pytest.raises(ValueError, match=match):
        picture.grid(np.zeros(100, np.uint64), 4096, **how)


def test_strip_of_every_kind_of_box():
    pages = [(64, 64, 2), (65, 64, 2), (66, 64, 2), (67, 64, 2), (68, 68, 2), (69, 68, 2), (70, 68, 2), (71, 68, 2),
             None, None, (9, 9, 0), (10, 10, 0), (30, 30, 0), (129, 128, 3), (130, 128, 3)]
    one = picture.strips(made_up_capture(pages))[0]
    assert [(box.order, box.pages, box.count, box.width) for box in one.groups] == [
        (2, 4, 2, 3), (None, 2, 1, 1), (0, 1, 3, 1), (3, 2, 1, 4)]
    assert one.folios == 6 and sum(box.pages for box in one.boxes) == len(pages)
    addresses = [box.address for box in one.boxes]
    assert addresses == sorted(addresses) and addresses[1] == (1 << 30) + 4 * 4096
    assert [NAMES[box.kind] for box in one.groups] == ["anon large", "absent", "anon", "anon large"]


@given(st.lists(st.tuples(st.integers(0, 3), st.booleans()), min_size=1, max_size=30))
def test_boxes_cover_the_buffer_once(parts):
    pages, pfn = [], 64
    for order, hole in parts:
        pfn = -(-pfn // (1 << order)) * (1 << order) + (1 << order) * hole
        pages += [None] if hole else [(pfn + at, pfn, order) for at in range(1 << order)]
        pfn += 0 if hole else 1 << order
    if not any(pages):
        return
    one = picture.strips(made_up_capture(pages))[0]
    at = one.start
    for box in one.boxes:
        assert box.address == at
        at += box.pages * 4096
    assert at == one.end and one.folios == sum(not hole for _, hole in parts)


def test_only_the_largest_mappings_are_drawn():
    capture = made_up_capture([(9 + at, 9 + at, 0) for at in range(6)], vmas=[
        {"start": (1 << 30) + a * 4096, "end": (1 << 30) + b * 4096, "perms": "rw-p"}
        for a, b in ((0, 1), (1, 3), (3, 6))])
    assert [one.end - one.start for one in picture.strips(capture, most=2)] == [8192, 12288]


def example():
    words = np.full(1 << 14, 1 << pm.KPF_BUDDY, np.uint64)
    words[:4000] = 1 << pm.KPF_LRU
    pages = [(64 + at, 64, 9) for at in range(0)] + [(512 + at, 512, 9) for at in range(512)] + [None] * 3
    pages += [(2000 + at, 2000 + at, 0) for at in range(200)]
    return picture.grid(words, 4096, columns=32, marks=range(512, 1024)), picture.strips(made_up_capture(pages))


def test_png_shows_the_colours(tmp_path):
    image = pytest.importorskip("matplotlib.image")
    grid, strips = example()
    plot.draw(tmp_path / "x.png", grid, strips, "a title", "marked")
    pixels = image.imread(tmp_path / "x.png")[:, :, :3]
    assert pixels.shape[1] > 1000
    shown = {tuple(one) for one in np.round(pixels.reshape(-1, 3) * 255).astype(int).tolist()}
    kinds = (colours.FREE, colours.FILE, colours.ANON, colours.ANON_LARGE)
    for colour in [*(colours.CLASSES[kind].colour for kind in kinds), colours.MARK]:
        assert tuple(int(colour[at:at + 2], 16) for at in (1, 3, 5)) in shown, colour


def test_svg_and_pdf(tmp_path):
    pytest.importorskip("matplotlib")
    grid, strips = example()
    plot.draw(tmp_path / "x.svg", grid, strips, "a title")
    text = (tmp_path / "x.svg").read_text()
    assert text.lstrip().startswith("<?xml") and "</svg>" in text
    assert colours.CLASSES[colours.ANON_LARGE].colour.lower() in text.lower()
    plot.draw(tmp_path / "x.pdf", None, strips)
    assert (tmp_path / "x.pdf").read_bytes().startswith(b"%PDF")


@pytest.mark.parametrize("name", ["x", "x.npz", "x.png.txt", ".png"])
def test_other_endings_are_refused(tmp_path, name):
    with pytest.raises(ValueError, match=".png, .svg, .pdf"):
        plot.draw(tmp_path / name, *example())
    assert not list(tmp_path.iterdir())


def test_without_matplotlib(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(live.NotPossible, match=r"mmcore\[plot\]"):
        plot.draw(tmp_path / "x.png", *example())


def test_a_long_strip_puts_equal_boxes_together(tmp_path):
    pages = [(2000 + at, 2000 + at, 0) for at in range(3000)]
    one = picture.strips(made_up_capture(pages))[0]
    rows = plot.layout(one)
    assert len(rows) == 1 and rows[0][0][1].count == 3000
    few = picture.strips(made_up_capture(pages[:300]))[0]
    assert [len(row) for row in plot.layout(few)] == [150, 150]
    mixed = [(2000 + 2 * at, 2000 + 2 * at, 0) if at % 2 else None for at in range(6000)]
    assert len(plot.layout(picture.strips(made_up_capture(mixed))[0])) == plot.STRIP_ROWS


@linux
def test_this_machine():
    with live.buffer("4M", "thp") as buf:
        taken = or_skip(live.capture, buf)
        whole = live.capture("memory")
    got = picture.grid(whole.frames.flags, whole.page_size, whole.machine.zones, marks=taken.pfns)
    assert int(got.marks.sum()) == len(taken.pfns) and got.totals["free"] > 0 and got.totals["file"] > 0
    assert sum(got.totals.values()) == len(whole.frames)
    alone = picture.captured_flags(taken)
    assert np.count_nonzero(picture.classify(alone) != colours.ABSENT) == len(taken.pfns)
    with pytest.raises(ValueError, match="nothing to draw"):
        picture.captured_flags(made_up_capture([None]))
