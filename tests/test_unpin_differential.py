"""The generations of the walk against each other and against a plain engine; the iterators against their definitions."""
import random

import numpy as np
import pytest
from hypothesis import given, strategies as st

import mmcore as mmc
from history import History
from mmcore import FOLL_GET, Memory, PageList, PageRanges
from reference.frames import contiguous_prefix, list_groups, next_group, range_groups, remaining_pages

SEEDS = st.integers(0, (1 << 32) - 1)


# ---- histories ------------------------------------------------------------------------------------------------------
@given(st.booleans(), st.lists(SEEDS, min_size=5, max_size=40))
def test_every_generation_leaves_what_one_page_at_a_time_leaves(huge_zero, seeds):
    history = History(["run", "head", "page", "ranges"], huge_zero)
    for seed in range(3):
        history.do_alloc(random.Random(seeds[seed]))
    for seed in seeds:
        history.step(seed)
    history.check()


@pytest.mark.parametrize("seed", range(6))
def test_long_histories(seed):
    rng = random.Random(seed)
    history = History(["run", "head", "page", "ranges"])
    done = 0
    for _ in range(150):
        history.step(rng.getrandbits(64))
        done += 1
    history.check()
    assert done == 150


def test_histories_reach_every_kind_of_outcome():
    # The comparison is worth what it meets: calls that go through, refusals, frees, pools, dirty folios, splits.
    rng = random.Random(7)
    history = History(["run"])
    met = {}
    for _ in range(600):
        call = rng.choice(history.calls)
        state = history.reference.statistics(), len(history.reference.folios), dict(history.reference.pooled)
        outcome = []
        on_all = history.on_all
        history.on_all = lambda *args: outcome.append(on_all(*args)) or outcome[-1]
        call(rng)
        del history.on_all
        for result in outcome:
            met.setdefault((call.__name__, result), 0)
            met[call.__name__, result] += 1
        after = history.reference.statistics(), len(history.reference.folios), dict(history.reference.pooled)
        for i, name in enumerate(("statistics", "folios", "pooled")):
            if state[i] != after[i]:
                met[name] = met.get(name, 0) + 1
    names = {call.__name__ for call in history.calls} - {"do_alloc"}
    assert {name for name in names if met.get((name, True), 0) < 3} == set()
    assert {name for name in names - {"do_dirty"} if met.get((name, False), 0) < 1} == set()
    assert min(met[name] for name in ("statistics", "folios", "pooled")) >= 3


# ---- one layout, every way to release it ----------------------------------------------------------------------------
@st.composite
def packed(draw):
    """Folios of mixed orders, one behind the other with aligned starts: (pfn, order) of each, and what lies between."""
    at, folios = draw(st.integers(2, 64)), []
    for order in draw(st.lists(st.sampled_from([0, 0, 0, 1, 1, 2, 3, 4, 6, 9]), min_size=1, max_size=25)):
        at = (at + (1 << order) - 1) & ~((1 << order) - 1)
        folios.append((at, order))
        at += 1 << order
        at += draw(st.sampled_from([0, 0, 0, 0, 1, 3]))
    return folios


def build(folios, hugetlb=()):
    mem = Memory("32M")
    mmc.folios_alloc_at(mem, [pfn for pfn, _ in folios], [order for _, order in folios],
                        hugetlb=[i in hugetlb and order > 1 for i, (_, order) in enumerate(folios)])
    return mem


def pages_of(folios):
    return [p for pfn, order in folios for p in range(pfn, pfn + (1 << order))]


@given(packed(), st.sets(st.integers(0, 24)), st.integers(1, 3), st.booleans(), st.booleans(), SEEDS)
def test_every_way_to_release_a_layout(folios, hugetlb, times, dirty, drop, seed):
    #   pin every page `times` times | drop the plain reference, or keep it | release, each machine in its way
    pfns = pages_of(folios) * times
    ways = {
        "run": lambda m: mmc.unpin_user_pages_dirty_lock(PageList(m, pfns), len(pfns), dirty),
        "head": lambda m: mmc.unpin_user_pages_dirty_lock(PageList(m, pfns), len(pfns), dirty, release="head"),
        "page": lambda m: mmc.unpin_user_pages_dirty_lock(PageList(m, pfns), len(pfns), dirty, release="page"),
        "reversed": lambda m: mmc.unpin_user_pages_dirty_lock(PageList(m, pfns[::-1]), len(pfns), dirty),
        "shuffled": lambda m: mmc.unpin_user_pages_dirty_lock(
            PageList(m, random.Random(seed).sample(pfns, len(pfns))), len(pfns), dirty),
        "ranges": lambda m: mmc.unpin_user_pages_dirty_lock(
            PageRanges.from_pagelist(PageList(m, pfns)), len(pfns), dirty),
        "range": lambda m: [mmc.unpin_user_page_range_dirty_lock(m.page(pfn), n, dirty)
                            for pfn, n in PageRanges.from_pagelist(PageList(m, pfns))],
        "folio": lambda m: [mmc.unpin_user_folio_dirty_locked(m.folio(pfn), times << order, dirty)
                            for pfn, order in folios],
        "one by one": lambda m: [mmc.unpin_user_pages_dirty_lock(PageList(m, [pfn]), 1, dirty) for pfn in pfns],
    }
    results = {}
    for name, release in ways.items():
        mem = build(folios, hugetlb)
        pages = PageList(mem, pfns)
        mmc.grab_pages(PageRanges.from_pagelist(pages) if name == "ranges" else pages)
        if drop:
            mmc.folios_put([mem.folio(pfn) for pfn, _ in folios])
        mem.check()
        release(mem)
        mem.check()
        stat = mem.vmstat()
        assert stat["nr_foll_pin_acquired"] == stat["nr_foll_pin_released"] == len(pfns)
        assert stat["nr_dirty"] == (len(pages_of(folios)) if dirty and not drop else 0)
        results[name] = mem.pages.tobytes(), stat["nr_free_pages"], mem.buddyinfo()
    for name, result in results.items():
        assert result == results["page"], name
    if drop:
        assert results["run"][2] == Memory("32M").buddyinfo()


@given(packed(), st.data())
def test_a_range_is_the_list_of_its_pages(folios, data):
    # A range may start in the middle of a folio and end in another; what is not pinned on the way makes both fail.
    pfns, (a, b) = pages_of(folios), (build(folios), build(folios))
    pinned = pfns[data.draw(st.integers(0, len(pfns) - 1)):][:data.draw(st.integers(1, len(pfns)))]
    start = data.draw(st.sampled_from(pinned))
    n = data.draw(st.integers(0, 2 * len(pinned)))
    dirty = data.draw(st.booleans())
    for mem in a, b:
        mmc.grab_pages(PageList(mem, pinned))
    before, outcomes = a.pages.tobytes(), []
    for call in (lambda: mmc.unpin_user_page_range_dirty_lock(a.page(start), n, dirty),
                 lambda: mmc.unpin_user_pages_dirty_lock(PageList(b, range(start, start + n)), n, dirty)):
        try:
            outcomes.append(call())
        except mmc.BadPage as e:
            outcomes.append(e.pfn)
    assert outcomes[0] == outcomes[1]
    assert a.pages.tobytes() == b.pages.tobytes()
    if outcomes[0] is not None:
        assert a.pages.tobytes() == before
    names = ("nr_foll_pin_acquired", "nr_foll_pin_released", "nr_dirty", "nr_free_pages")
    assert [a.vmstat()[name] for name in names] == [b.vmstat()[name] for name in names]
    a.check()
    b.check()


@given(packed(), st.integers(1, 5), SEEDS, st.booleans())
def test_release_pages_frees_as_one_put_after_the_other(folios, times, seed, dirty):
    pfns = [p for p in pages_of(folios) for _ in range(times)]
    random.Random(seed).shuffle(pfns)
    results = {}
    for name in "run", "page", "ranges", "put_page":
        mem = build(folios)
        mmc.grab_pages(PageList(mem, pfns), FOLL_GET)
        for pfn, _ in folios:
            mmc.folio_put(mem.folio(pfn))
            if dirty:
                mmc.folio_mark_dirty(mem.folio(pfn))
        pages = PageList(mem, pfns)
        if name == "put_page":
            for pfn in pfns:
                mmc.put_page(mem.page(pfn))
        elif name == "ranges":
            mmc.release_pages(PageRanges.from_pagelist(pages))
        else:
            mmc.release_pages(pages, release=name)
        mem.check()
        assert mem.vmstat()["nr_dirty"] == 0 and mem.buddyinfo() == Memory("32M").buddyinfo()
        results[name] = mem.pages.tobytes()
    assert len(set(results.values())) == 1


# ---- iterators against their definitions ----------------------------------------------------------------------------
@st.composite
def listed(draw):
    """A layout, and a list over it: any order, duplicates, NULL, the zero page, pages that are free."""
    folios = draw(packed())
    pages = pages_of(folios)
    pieces = []
    for _ in range(draw(st.integers(0, 6))):
        start = draw(st.integers(0, len(pages) - 1))
        piece = pages[start:start + draw(st.integers(1, 90))]
        shape = draw(st.integers(0, 5))
        if shape == 1:
            piece = piece[::-1]
        elif shape == 2:
            piece = piece[::3]
        elif shape == 3:
            random.Random(start).shuffle(piece)
        elif shape == 4:
            piece = [pages[start]] * draw(st.integers(1, 40))
        elif shape == 5:
            piece = [draw(st.sampled_from([0, 1, 2, 5000, 8191]))] * draw(st.integers(1, 3))
        pieces += piece
    return folios, pieces


def heads(folios):
    table = {p: pfn for pfn, order in folios for p in range(pfn, pfn + (1 << order))}
    return lambda pfn: table.get(pfn, pfn)


@given(listed(), st.integers(0, 500))
def test_iterators_over_lists(layout, some):
    folios, pfns = layout
    mem, head_of = build(folios), heads(folios)
    pages = PageList(mem, pfns)
    groups = list_groups(pfns, head_of)
    assert [(folio.pfn, n) for folio, n in mmc.for_each_compound_head(pages)] == groups
    some = min(some, len(pfns))
    assert [(f.pfn, n) for f, n in mmc.for_each_compound_head(pages, some)] == list_groups(pfns[:some], head_of)
    pair = mmc.folio_runs(pages)
    assert [array.dtype for array in pair] == [np.uint64, np.uint64]
    assert list(zip(*map(np.ndarray.tolist, pair))) == groups
    if pfns:
        ranges = PageRanges.from_pagelist(pages)
        assert ranges.to_pagelist() == pages and ranges.nr_pages == len(pfns)
        assert [(folio.pfn, n) for folio, n in mmc.for_each_compound_head(ranges)] == groups
        assert list(zip(*map(np.ndarray.tolist, mmc.folio_runs(ranges)))) == groups
        assert mmc.num_pages_contiguous(pages) == mmc.num_pages_contiguous(ranges) == contiguous_prefix(pfns)
        if some:
            assert mmc.num_pages_contiguous(pages, some) == contiguous_prefix(pfns[:some])
            assert mmc.num_pages_contiguous(ranges, some) == contiguous_prefix(pfns[:some])
    for i in range(0, len(pfns), 1 + len(pfns) // 20):
        folio, n = mmc.compound_next(pages, i)
        if pfns[i]:
            assert (folio.pfn, n) == next_group(pfns, i, head_of)
        else:
            assert (folio, n) == (None, 1)


@given(packed(), st.data())
def test_iterators_over_ranges(folios, data):
    mem, head_of = build(folios), heads(folios)
    end = folios[-1][0] + (1 << folios[-1][1]) + 3
    start = data.draw(st.integers(1, end - 1))
    n = data.draw(st.integers(0, end - start))
    groups = range_groups(start, n, head_of)
    assert [(folio.pfn, k) for folio, k in mmc.for_each_compound_range(mem.page(start), n)] == groups
    assert sum(k for _, k in groups) == n
    for i in range(0, n, 1 + n // 20):
        folio, k = mmc.compound_range_next(mem.page(start), n, i)
        assert (folio.pfn, k) == range_groups(start + i, n - i, head_of)[0]
        page = mem.page(start + i)
        order = dict(folios).get(folio.pfn, 0)
        assert k == mmc.folio_remaining_pages(folio, page, n - i) == remaining_pages(page.pfn, folio.pfn, order, n - i)
        assert mmc.folio_remaining_pages(folio, page) == remaining_pages(page.pfn, folio.pfn, order)


def test_a_wrong_walk_would_be_seen():
    # What the comparison is made of: a reference that counts one pin too many differs.
    history = History(["run", "page"])
    history.do_alloc(random.Random(1))
    history.reference.folios[max(history.reference.folios)].refcount += 1
    with pytest.raises(AssertionError, match="_refcount"):
        history.compare("tampered")
    history.reference.folios[max(history.reference.folios)].refcount -= 1
    history.reference.acquired += 1
    with pytest.raises(AssertionError, match="statistics"):
        history.compare("tampered")
    history.reference.acquired -= 1
    mmc.folio_get(history.mems["page"].zero_page.folio)
    with pytest.raises(AssertionError, match="another mem_map"):
        history.compare("tampered")
