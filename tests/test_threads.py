"""Four threads on shared and private folios, for a bounded number of operations; then every law.

Calls on lists run without the GIL, so that their walks meet on the counters; scalar calls meet between bytecodes, which
a short switch interval makes often.
"""
import random
import sys
import threading

import pytest

import mmcore as mmc
from mmcore import BadPage, FOLL_GET, Memory, MMError, PageList, PageRanges
from support import released, run

THREADS = 4


@pytest.fixture(autouse=True)
def short_switches():
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


def on_all(work, *args):
    run(*[lambda i=i: work(i, *args) for i in range(THREADS)])


def pages_of(folios):
    return [p for folio in folios for p in range(folio.pfn, folio.pfn + folio.nr_pages)]


# ---- counters -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("release", ["run", "head", "page"])
def test_shared_folios_keep_their_counts(release):
    #   every thread: pin all, pin all again, unpin in another order, unpin     on the same 2000 pages
    mem = Memory("32M", hugetlb={"2M": 1})
    fresh = mem.buddyinfo()
    folios = [mmc.folio_alloc(mem, order) for order in [0] * 200 + [1, 2, 3, 4, 9, 10] * 2]
    folios.append(mmc.folio_alloc(mem, 9, hugetlb=True))
    pfns = pages_of(folios)

    def work(i):
        pages, mixed = PageList(mem, pfns), PageList(mem, random.Random(i).sample(pfns, len(pfns)))
        for n in range(200):
            mmc.grab_pages(pages)
            mmc.grab_pages(mixed)
            mmc.unpin_user_pages_dirty_lock(mixed, len(mixed), n == 7, release=release)
            mmc.unpin_user_pages(PageRanges.from_pagelist(pages) if n % 2 else pages, release=release)

    on_all(work)
    assert {(folio.refcount, folio.pincount, folio.dirty, folio.locked) for folio in folios} == {(1, 0, True, False)}
    stat = mem.vmstat()
    assert stat["nr_foll_pin_acquired"] == stat["nr_foll_pin_released"] == THREADS * 200 * 2 * len(pfns)
    assert stat["nr_dirtied"] == stat["nr_dirty"] == len(pfns), "each folio turned dirty once"
    mem.check()
    mmc.folios_put(folios)
    assert mem.buddyinfo() == fresh and mem.hugetlb_pools() == {2 << 20: (1, 1)}
    released(mem)


def test_a_folio_is_freed_once():
    # Each thread holds one reference on each page; whoever drops the last frees, and nobody else.
    mem = Memory("32M")
    fresh = mem.buddyinfo()
    for n in range(100):
        folios = [mmc.folio_alloc(mem, order) for order in [0] * 500 + [1, 3, 9]]
        pages = PageList(mem, [folio.pfn for folio in folios])
        for _ in range(THREADS - 1):
            mmc.grab_pages(pages, FOLL_GET)
        orders = [PageList(mem, random.Random(i).sample(pages.pfns.tolist(), len(pages)) if n % 2 else pages)
                  for i in range(THREADS)]
        run(*[lambda p=p: mmc.release_pages(p) for p in orders])
        mem.check()
        assert mem.buddyinfo() == fresh
    stat = mem.vmstat()
    assert stat["pgalloc"] == stat["pgfree"] == 100 * (500 + 2 + 8 + 512)


def test_last_pins_free_once():
    # Nobody but the pins holds the folios; each thread has pinned every page once.
    mem = Memory("32M")
    fresh = mem.buddyinfo()
    for _ in range(100):
        folios = [mmc.folio_alloc(mem, order) for order in [0] * 300 + [2, 4, 9]]
        pages = PageList(mem, pages_of(folios))
        for _ in range(THREADS):
            mmc.grab_pages(pages)
        mmc.folios_put(folios)
        on_all(lambda i: mmc.unpin_user_pages_dirty_lock(pages, len(pages), i % 2 == 0,
                                                         release=["run", "head", "page", "run"][i]))
        released(mem)
        assert mem.buddyinfo() == fresh and mem.vmstat()["nr_dirty"] == 0


# ---- allocation -----------------------------------------------------------------------------------------------------
def test_allocation_hands_every_frame_out_once():
    mem = Memory("16M", movable="4M", cma="4M")
    fresh = mem.buddyinfo()
    taken = [[] for _ in range(THREADS)]

    def work(i):
        rng = random.Random(i)
        while True:
            try:
                if rng.random() < 0.5:
                    taken[i].append(mmc.folio_alloc(mem, rng.choice([0, 1, 2, 5])))
                else:
                    taken[i] += [page.folio for page in mmc.alloc_pages_bulk(mem, rng.randint(1, 50))]
            except MMError:
                return

    on_all(work)
    pfns = [p for folios in taken for p in pages_of(folios)]
    assert len(pfns) == len(set(pfns)), "a frame was handed out twice"
    mem.check()
    on_all(lambda i: mmc.folios_put(random.Random(i).sample(taken[i], len(taken[i]))))
    assert mem.buddyinfo() == fresh
    mem.check()


def test_allocation_and_freeing_side_by_side():
    mem = Memory("16M", hugetlb={"2M": 2, "64K": 5})
    fresh, pools = mem.buddyinfo(), mem.hugetlb_pools()

    def work(i):
        rng, held = random.Random(i), []
        for _ in range(4000):
            if held and rng.random() < 0.5:
                some = [held.pop(rng.randrange(len(held))) for _ in range(rng.randint(1, min(5, len(held))))]
                mmc.folios_put(some) if rng.random() < 0.5 else [mmc.folio_put(folio) for folio in some]
                continue
            try:
                if rng.random() < 0.2:
                    held.append(mmc.folio_alloc(mem, rng.choice([4, 9]), hugetlb=True))
                else:
                    held.append(mmc.folio_alloc(mem, rng.choice([0, 0, 1, 3, 6])))
            except MMError as e:
                assert e.errno == 12
        mmc.folios_put(held)

    on_all(work)
    mem.check()
    assert mem.buddyinfo() == fresh and mem.hugetlb_pools() == pools


# ---- splitting ------------------------------------------------------------------------------------------------------
def test_splits_and_grabs_of_one_folio():
    #   two threads   pin pages of it, dirty and unpin     two threads   split it: it works, or somebody holds it
    #   A pin that came before the split makes it fail; one that comes after it is on a piece, and every page is pinned
    #   through the head that it has then. While it is split its count is frozen at 0, and a pin is refused.
    mem = Memory("16M")
    fresh = mem.buddyinfo()
    rounds, split, refused = 250, [], []
    for n in range(rounds):
        folio = mmc.folio_alloc_at(mem, 1024, 6)
        pages = PageList(mem, range(1024, 1088))

        def pin(i):
            for _ in range(8):
                try:
                    mmc.grab_pages(pages[i * 8:])
                except MMError as e:
                    assert e.errno == 12
                    continue
                mmc.unpin_user_pages_dirty_lock(pages[i * 8:], 64 - i * 8, i == 1, release=["run", "page"][i])

        def cut(i):
            for order in 4, 2, 0:
                for pfn in range(1024, 1088, 1 << (6 if order == 4 else order + 2)):
                    try:
                        mmc.folio_split(mem.folio(pfn), order)
                        split.append(order)
                    except (MMError, BadPage):      # held, split already, or frozen by the other one
                        refused.append(order)

        run(lambda: pin(0), lambda: pin(1), lambda: cut(0), lambda: cut(1))
        released(mem)
        for pfn in {mem.folio(pfn).pfn for pfn in range(1024, 1088)}:
            assert mem.folio(pfn).refcount == 1
            mmc.folio_put(mem.folio(pfn))
        assert mem.buddyinfo() == fresh and mem.vmstat()["nr_dirty"] == 0
        del folio
    assert split


def test_private_folios_come_go_and_split():
    mem = Memory("32M")
    fresh = mem.buddyinfo()

    def work(i):
        rng = random.Random(i)
        for _ in range(500):
            folio = mmc.folio_alloc(mem, rng.choice([1, 3, 5, 9]))
            pages = PageList(mem, range(folio.pfn, folio.pfn + folio.nr_pages))
            mmc.grab_pages(pages)
            with pytest.raises(MMError):
                mmc.folio_split(folio)
            mmc.unpin_user_pages_dirty_lock(pages, len(pages), rng.random() < 0.5)
            pieces = mmc.folio_split(folio, rng.randint(0, folio.order - 1))
            mmc.grab_pages(pages)
            mmc.folios_put(pieces)
            mmc.unpin_user_pages(pages, release=rng.choice(["run", "head", "page"]))

    on_all(work)
    released(mem)
    assert mem.buddyinfo() == fresh and mem.vmstat()["nr_dirty"] == 0


# ---- the lock -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("order", [0, 3])
def test_the_lock_protects_a_counter(order):
    mem = Memory("4M")
    folio = mmc.folio_alloc(mem, order)
    counter = [0]

    def work(i):
        for _ in range(2000):
            mmc.folio_lock(folio)
            value = counter[0]
            for _ in range(3):
                pass                # room for a switch
            counter[0] = value + 1
            mmc.folio_unlock(folio)

    on_all(work)
    assert counter[0] == THREADS * 2000
    assert not folio.locked and mmc.PageFlags.waiters not in folio.flags
    mem.check()


def test_the_lock_keeps_others_from_dirtying():
    #   one thread   lock, look, look again: unchanged, clean for io, unlock      the others   pin, dirty and unpin
    mem = Memory("4M")
    folios = [mmc.folio_alloc(mem, order) for order in (0, 2, 0, 4)]
    pages = PageList(mem, pages_of(folios))
    stop = threading.Event()

    def cleaner():
        rng = random.Random(0)
        while not stop.is_set():
            folio = rng.choice(folios)
            mmc.folio_lock(folio)
            mmc.folio_clear_dirty_for_io(folio)
            for _ in range(20):
                assert not folio.dirty, "dirtied while it was locked"
            mmc.folio_unlock(folio)

    def dirtier():
        try:
            for _ in range(300):
                mmc.grab_pages(pages)
                mmc.unpin_user_pages_dirty_lock(pages, len(pages), True)
        finally:
            finished.append(1)
            if len(finished) == 3:
                stop.set()

    finished = []
    run(cleaner, dirtier, dirtier, dirtier)
    released(mem)
    mmc.folios_put(folios)
    assert mem.vmstat()["nr_dirty"] == 0


# ---- everything at once ---------------------------------------------------------------------------------------------
@pytest.mark.parametrize("seed", range(3))
def test_everything_at_once(seed):
    mem = Memory("32M", movable="8M", hugetlb={"2M": 2})
    fresh, pools = mem.buddyinfo(), mem.hugetlb_pools()
    shared = [mmc.folio_alloc(mem, order) for order in (0, 0, 0, 1, 2, 4, 9)] + [mmc.folio_alloc(mem, 9, hugetlb=True)]
    pfns = pages_of(shared) + [0, 1]

    def work(i):
        rng, held, pins = random.Random(seed * 10 + i), [], []
        for _ in range(3000):
            what = rng.randrange(9)
            if what == 0:
                start = rng.randrange(len(pfns))
                pins.append(PageList(mem, pfns[start:start + rng.randint(1, 700)]))
                mmc.grab_pages(pins[-1])
            elif what == 1 and pins:
                pages = pins.pop(rng.randrange(len(pins)))
                mmc.unpin_user_pages_dirty_lock(pages, len(pages), rng.random() < 0.5,
                                                release=rng.choice(["run", "head", "page"]))
            elif what == 2:
                folio = rng.choice(shared)
                mmc.folio_get(folio)
                assert mmc.folio_try_get(folio)
                mmc.folio_put_refs(folio, 2)
            elif what == 3:
                folio = rng.choice(shared)
                mmc.folio_mark_dirty_lock(folio)
                mmc.folio_lock(folio)
                mmc.folio_clear_dirty_for_io(folio)
                mmc.folio_unlock(folio)
            elif what == 4:
                try:
                    held.append(mmc.folio_alloc(mem, rng.choice([0, 1, 3, 9]), zone=rng.choice([None, "Movable"])))
                except MMError as e:
                    assert e.errno == 12
            elif what == 5 and held:
                folio = held.pop(rng.randrange(len(held)))
                held += mmc.folio_split(folio) if 0 < folio.order < 4 else [folio]
            elif what == 6 and held:
                mmc.folios_put([held.pop(rng.randrange(len(held))) for _ in range(rng.randint(1, len(held)))])
            elif what == 7:
                folio = rng.choice(shared)
                try:
                    mmc.folio_split(folio)
                    raise AssertionError("a folio that others use was split")
                except MMError as e:
                    assert e.errno in (11, 16, 22)
                    mmc.try_grab_folio(folio, 3)
                    mmc.unpin_user_folio(folio, 3)
            else:
                mem.vmstat(), mem.buddyinfo(), mem.zones, repr(rng.choice(shared)), len(mem.pages)
        for pages in pins:
            mmc.unpin_user_pages(pages)
        mmc.folios_put(held)

    mmc.grab_pages(PageList(mem, [folio.pfn for folio in shared]), FOLL_GET)     # nobody may split or free them
    on_all(work)
    released(mem)
    for _ in range(2):
        mmc.folios_put(shared)
    assert mem.buddyinfo() == fresh and mem.hugetlb_pools() == pools and mem.vmstat()["nr_dirty"] == 0
    mem.check()


def test_close_refuses_while_a_call_runs():
    # A walk over a list waits for a folio lock; its Memory cannot be closed under it.
    mem = Memory("4M")
    folio = mmc.folio_alloc(mem, 0)
    pages = PageList(mem, [folio])
    mmc.grab_pages(pages)
    mmc.folio_lock(folio)
    thread = threading.Thread(target=lambda: mmc.unpin_user_pages_dirty_lock(pages, 1, True))
    thread.start()
    while mmc.PageFlags.waiters not in folio.flags:
        pass
    with pytest.raises(MMError, match="running calls") as caught:
        mem.close()
    assert caught.value.errno == 16
    mmc.folio_unlock(folio)
    thread.join()
    assert folio.dirty
    mem.close()


def test_wrong_calls_do_not_disturb_right_ones():
    #   two threads   pin and unpin their pages     two threads   unpin what is not pinned: refused, each time
    mem = Memory("16M")
    fresh = mem.buddyinfo()
    folios = [mmc.folio_alloc(mem, order) for order in (0, 0, 3, 0, 5)]
    never = [mmc.folio_alloc(mem, order) for order in (0, 2)]
    pages = PageList(mem, pages_of(folios))

    def right(i):
        for _ in range(2000):
            mmc.grab_pages(pages)
            mmc.unpin_user_pages(pages, release=["run", "page"][i])

    def wrong(i):
        for _ in range(2000):
            with pytest.raises(BadPage):
                mmc.unpin_user_pages(PageList(mem, pages_of(never)[i:]))
            with pytest.raises(BadPage):
                mmc.folio_put_refs(never[i], 2)

    run(lambda: right(0), lambda: right(1), lambda: wrong(0), lambda: wrong(1))
    released(mem)
    mmc.folios_put(folios + never)
    assert mem.buddyinfo() == fresh


@pytest.mark.parametrize("order", [0, 2])
@pytest.mark.parametrize("release", ["run", "head", "page", "ranges", "range"])
def test_a_batch_that_fails_while_others_free(order, release):
    #   A   unpin 1500 pinned folios, and then one that is not: it fails
    #   B   meanwhile drops the plain references, and where A has taken the pins off already, that frees
    #   A takes its pins back where nothing was freed since it began; else they stay released, and the error says so.
    #   In no case are pins put on a frame that is free, or somebody else's by now.
    texts = set()
    for _ in range(12):
        mem = Memory("64M")
        fresh = mem.buddyinfo()
        # the wrong one comes last, and is the first frame behind the others
        folios = [mmc.folio_alloc_at(mem, pfn, order) for pfn in range(1024, 1024 + (1500 << order), 1 << order)]
        wrong = mmc.folio_alloc_at(mem, 1024 + (1500 << order), order)
        good, all_pages = PageList(mem, pages_of(folios)), PageList(mem, pages_of(folios + [wrong]))
        mmc.grab_pages(good)
        again = []

        def fail():
            with pytest.raises(BadPage) as caught:
                if release == "range":
                    mmc.unpin_user_page_range_dirty_lock(mem.page(1024), len(all_pages), True)
                elif release == "ranges":
                    mmc.unpin_user_pages(PageRanges.from_pagelist(all_pages))
                else:
                    mmc.unpin_user_pages_dirty_lock(all_pages, len(all_pages), True, release=release)
            texts.add(str(caught.value).split(". ")[-1][:20])
            assert caught.value.pfn == wrong.pfn

        def put():
            mmc.folios_put(folios)

        def use():
            for _ in range(30):
                try:
                    again.append(mmc.alloc_pages_bulk(mem, 100))
                except MMError:
                    pass

        run(fail, put, use)
        mem.check()
        for folio in folios:
            folio = mem.folio(folio.pfn)
            if folio.pincount:
                mmc.unpin_user_folio(folio, folio.pincount)
        for pages in again:
            mmc.release_pages(pages)
        mmc.folio_put(wrong)
        released(mem)
        assert mem.buddyinfo() == fresh and mem.vmstat()["nr_dirty"] == 0
    assert texts <= {"Nothing was changed", "What the call releas"}


def test_wrong_unpins_do_not_hide_the_last_put():
    #   A   unpins pages that are not pinned, each by itself: refused      B   drops their last references: freed
    for _ in range(20):
        mem = Memory("32M")
        fresh = mem.buddyinfo()
        pages = [mmc.alloc_page(mem) for _ in range(1500)]
        lists = [PageList(mem, [page]) for page in pages]

        def wrong():
            for one in lists:
                with pytest.raises(BadPage):
                    mmc.unpin_user_pages(one)

        def right():
            for one in lists:
                mmc.release_pages(one)

        run(wrong, right, wrong)
        released(mem)
        assert mem.buddyinfo() == fresh
