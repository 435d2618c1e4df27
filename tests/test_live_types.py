"""page-types' letters and option grammar, against a plain reference and the real machine."""

import os
import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from live_support import PAGE, linux, made_up_capture, or_skip

from mmcore import live
from mmcore.live import pagemap as pm
from mmcore.live import types
from mmcore.live.cached import cached
from mmcore.live.frames import Frames

WORDS = st.integers(0, (1 << 64) - 1)
NAMED = sorted(types.BY_NAME)


def words(*values):
    return np.array(values, np.uint64)


def test_the_letters_of_the_known_flags():
    """The letters that page-types prints, in its order: what an expert's eye and scripts look for."""
    stable = "".join(letter for bit, letter, _ in types.legend() if bit < 27)
    assert stable == "LERUDlASWIBMasbHTGuXnxtozig"
    assert "".join(letter for bit, letter, _ in types.legend() if 32 <= bit < 43) == "rmdPpOhcfHJ"
    assert types.letters(1 << 10).strip("_") == "B" and types.letters(0).strip("_") == ""
    assert types.names(1 << 2 | 1 << 12 | 1 << 63) == "referenced,anonymous,mmap_exclusive"


@pytest.mark.parametrize("bit", range(64))
def test_every_bit_has_a_name_and_comes_back(bit):
    name = types.names(1 << bit)
    assert name == (types.FLAGS[bit][1] if bit in types.FLAGS else f"bit{bit}")
    assert types.parse_flags(name) == 1 << bit == types.parse_flags(hex(1 << bit)) == types.parse_flags(f"bit{bit}")
    assert (f"bit{bit}" in types.letters(1 << bit)) == (bit not in types.FLAGS)


@given(WORDS)
def test_names_say_the_whole_word(word):
    assert types.parse_flags(types.names(word) or "0") == word
    assert len(re.sub(r"\+bit\d+", "", types.letters(word))) == len(types.FLAGS)


@pytest.mark.parametrize("text, word", [
    ("0x10,anon", 1 << 4 | 1 << 12), ("anon", 1 << 12), ("huge", 1 << 17), ("slub", 1 << 50), ("16", 16),
    ("lru, dirty", 1 << 5 | 1 << 4),
])
def test_names_and_numbers(text, word):
    assert types.parse_flags(text) == word


@pytest.mark.parametrize("text", ["", "nothing", "anon,", "bit64", "bit-1", "-1", str(1 << 64), "0x", "~anon",
                                  "anon thp"])
def test_flags_that_are_none(text):
    with pytest.raises(ValueError, match="no flag is called"):
        types.parse_flags(text)


def plain_match(text, word):
    """The grammar, said again in plain words for one page."""
    if "=" in text:
        left, right = text.split("=")
        wanted = sum(1 << types.BY_NAME[name] for name in right.split(",") if name)
        if not left:
            return word == wanted
        mask = wanted | sum(1 << types.BY_NAME[name] for name in left.split(","))
        return word & mask == wanted
    if "~" in text:
        return all((word >> types.BY_NAME[name.lstrip("~")] & 1) == (not name.startswith("~"))
                   for name in text.split(","))
    return any(word >> types.BY_NAME[name] & 1 for name in text.split(","))


SPECS = st.one_of(
    st.lists(st.sampled_from(NAMED), min_size=1, max_size=4, unique=True).map(",".join),
    st.lists(st.sampled_from(NAMED), min_size=1, max_size=4, unique=True).flatmap(lambda names: st.lists(
        st.booleans(), min_size=len(names), max_size=len(names)).map(
            lambda no: ",".join(("~" if n else "") + name for n, name in zip(no, names)))),
    st.tuples(st.lists(st.sampled_from(NAMED), max_size=3), st.lists(st.sampled_from(NAMED), max_size=3)).map(
        lambda both: ",".join(both[0]) + "=" + ",".join(both[1])),
)


@given(SPECS, st.lists(WORDS, min_size=1, max_size=20))
def test_bits_spec(spec, values):
    assert types.parse_bits(spec).matches(words(*values)).tolist() == [plain_match(spec, value) for value in values]


@pytest.mark.parametrize("text", ["", " ", "anon,~anon", "what", "anon=what", "~", "a=b=c"])
def test_bits_that_are_none(text):
    with pytest.raises(ValueError):
        types.parse_bits(text)


@pytest.mark.parametrize("text, first, last", [
    ("5", 5, 6), ("0x10", 16, 17), ("5+3", 5, 8), ("5,8", 5, 8), ("5,", 5, None), (",8", 0, 8), ("0x10+0x10", 16, 32),
])
def test_addr_spec(text, first, last):
    assert types.parse_addresses(text) == (first, last)


@pytest.mark.parametrize("text", ["", ",", "x", "5+", "5+0", "8,5", "5,5", "-1", "5+-1", "1.5", "5 6"])
def test_addresses_that_are_none(text):
    with pytest.raises(ValueError):
        types.parse_addresses(text)


def test_what_is_hidden_and_what_raw_shows():
    anon_exclusive = 1 << 12 | 1 << 34
    thp = 1 << 12 | 1 << 15 | 1 << 22
    hugetlb = 1 << 17 | 1 << 15
    given_words = words(anon_exclusive, thp, hugetlb, 1 << 9, 1 << 9 | 1 << 8, 1 << 7 | 1 << 6, 1 << 57 | 1 << 32)
    assert types.shown(given_words).tolist() == [
        1 << 12, 1 << 12 | 1 << 22, hugetlb, 1 << 9, 1 << 9 | 1 << 8, 1 << 7 | 1 << 6, 1 << 57]
    assert types.shown(given_words, raw=True).tolist() == [
        1 << 12 | 1 << 47, thp, hugetlb, 1 << 48, 1 << 9 | 1 << 8, 1 << 7 | 1 << 50, 1 << 57 | 1 << 32]


def frames(*values):
    return types.frames_of(Frames(words(*values), words(*range(len(values)))))


def test_frame_0_is_nobodys():
    pages = frames(1 << 10, 1 << 10, 4)
    assert pages.where.tolist() == pages.pfns.tolist() == [1, 2] and pages.words.tolist() == [1 << 10, 4]


def test_select_and_summarise():
    pages = frames(0, 4, 4, 1 << 10, 1 << 57, 1 << 57, 4, 1 << 32)
    got = types.summarise(types.select(pages), 4096)
    assert got.total == 7 and got.rows == [(0, 1), (4, 3), (1 << 10, 1), (1 << 57, 2)]
    assert got.as_dict()["rows"][3]["names"] == "bit57"
    assert types.select(pages, [(2, 4), (6, None)]).where.tolist() == [2, 3, 6, 7]
    assert types.select(pages, [(1 << 64, 1 << 70), (1 << 80, None), (6, (1 << 64) + 1)]).where.tolist() == [6, 7]
    assert types.select(pages, bits=[types.parse_bits("referenced")]).where.tolist() == [1, 2, 6]
    # A filter that names a hidden flag means it; one that says "exactly these" means what is shown.
    assert types.select(pages, bits=[types.parse_bits("reserved")]).where.tolist() == [7]
    assert types.select(pages, bits=[types.parse_bits("=")]).where.tolist() == [7]
    both = [types.parse_bits("bit57,referenced"), types.parse_bits("~referenced")]
    assert types.select(pages, [(0, 5)], both).where.tolist() == [4]


def test_ranges_of_frames():
    pages = types.select(frames(0, 4, 4, 8, 8, 4, 4))
    assert [part.tolist() for part in types.stretches(pages)] == [[0, 2, 4], [2, 2, 2]]
    assert types.stretches(pages, by_mapcount=True)[1].tolist() == [1] * 6
    assert types.stretches(types.select(pages, [(100, 200)]))[0].tolist() == []


def test_ranges_of_a_process_follow_in_both():
    capture = made_up_capture([(5, 5, 0), (6, 6, 0), (8, 8, 0), None, (9, 9, 0)])
    pages = types.select(types.pages_of(capture))
    assert [part.tolist() for part in types.stretches(pages)] == [[0, 2, 3], [2, 1, 1]]
    assert pages.where.tolist() == [(1 << 18) + at for at in (0, 1, 2, 4)]


def test_a_page_that_is_swapped_out_has_no_frame():
    capture = made_up_capture([None, (6, 6, 0)])
    swapped = np.array(capture.words)
    swapped[0] = np.uint64(1 << 62 | 0x123)
    capture.words = swapped
    pages = types.pages_of(capture)
    assert pages.pfns.tolist() == [0, 6] and types.names(int(pages.words[0])) == "swap"


@linux
def test_all_frames_of_this_machine():
    taken = or_skip(live.capture, "memory")
    pages = types.select(types.frames_of(taken.frames))
    got = types.summarise(pages, taken.page_size)
    assert got.total == len(taken.frames) - 1 == sum(count for _, count in got.rows)
    free = types.select(types.frames_of(taken.frames), bits=[types.parse_bits("buddy")])
    in_blocks = sum(zone.free_in_blocks for zone in taken.machine.zones)
    # Every page of a free block is flagged here; memory moves between the two readings.
    if len(free.where) > in_blocks // 2:
        assert abs(len(free.where) - in_blocks) < max(in_blocks // 2, 1 << 16)


@linux
def test_a_process_adds_what_pagemap_knows():
    with live.buffer("1M", "4k") as private, live.buffer("1M", "shmem") as shared:
        own = types.pages_of(or_skip(live.capture, private))
        other = types.pages_of(live.capture(shared))
    assert np.all(own.words >> np.uint64(types.KPF_MMAP_EXCLUSIVE) & np.uint64(1) == 1)
    assert np.all(own.words >> np.uint64(types.KPF_FILE) & np.uint64(1) == 0)
    assert np.all(other.words >> np.uint64(types.KPF_FILE) & np.uint64(1) == 1)
    assert np.all(other.words >> np.uint64(pm.KPF_SWAPBACKED) & np.uint64(1) == 1)


@linux
def test_a_file_in_the_page_cache(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"x" * (10 * PAGE + 100))
    got = or_skip(cached, path)
    assert got.where.tolist() == list(range(11)) and np.all(got.pfns != 0)
    assert np.all(got.words >> np.uint64(types.KPF_FILE) & np.uint64(1) == 1)
    path.write_bytes(b"")
    assert len(cached(path).where) == 0
    with open(path, "wb") as file:
        file.truncate(1 << 20)                 # a hole: nothing is cached, and nothing is read in
    before = cached(path)
    assert len(before.where) == 0 and len(cached(path).where) == 0
    with pytest.raises(FileNotFoundError):
        cached(tmp_path / "absent")
    with pytest.raises(OSError, match="no regular file"):
        cached(tmp_path)
    with pytest.raises(OSError, match="no regular file"):
        cached(os.devnull)
