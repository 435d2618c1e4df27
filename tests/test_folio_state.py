"""Folios: the lock, dirty and writeback, splitting."""
import signal
import threading
import time

import pytest

import mmcore as mmc
from mmcore import BadPage, DevicePages, InvalidArgument, Memory, MMError, PageFlags
from support import refused, released, unchanged


@pytest.fixture
def mem():
    return Memory("16M", hugetlb={"2M": 1})


def dirty(mem):
    return mem.vmstat()["nr_dirty"]


# ---- the lock -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("order", [0, 1, 9])
def test_lock(mem, order):
    folio = mmc.folio_alloc(mem, order)
    assert not folio.locked and mmc.folio_trylock(folio) is True
    assert folio.locked and mmc.folio_trylock(folio) is False
    mmc.folio_unlock(folio)
    mmc.folio_lock(folio)
    assert folio.locked and PageFlags.locked in folio.flags
    mmc.folio_unlock(folio)
    assert not folio.locked and PageFlags.waiters not in folio.flags
    with refused(mem, BadPage, match="lock", pfn=folio.pfn):
        mmc.folio_unlock(folio)


def test_lock_of_a_free_folio(mem):
    folio = mmc.folio_alloc(mem, 0)
    mmc.folio_put(folio)
    for call in mmc.folio_lock, mmc.folio_trylock, mmc.folio_unlock:
        with refused(mem, BadPage):
            call(folio)


@pytest.mark.parametrize("waiters", [1, 3])
def test_lock_waits_and_wakes(mem, waiters):
    #   main   lock ......................... unlock
    #   others       lock: asleep ............       got it, one after the other
    folio = mmc.folio_alloc(mem, 2)
    got, busy = [], []

    def work(name):
        before = time.thread_time()
        mmc.folio_lock(folio)
        busy.append(time.thread_time() - before)
        got.append(name)
        mmc.folio_unlock(folio)

    mmc.folio_lock(folio)
    threads = [threading.Thread(target=work, args=(i,)) for i in range(waiters)]
    for thread in threads:
        thread.start()
    while PageFlags.waiters not in folio.flags:
        time.sleep(0.001)
    held = 0.4
    time.sleep(held)
    assert got == [] and all(thread.is_alive() for thread in threads)
    mmc.folio_unlock(folio)
    for thread in threads:
        thread.join()
    assert sorted(got) == list(range(waiters))
    assert not folio.locked
    # Asleep, not spinning: who waits uses hardly any processor.
    assert max(busy) < held / 2


def test_locks_of_folios_are_apart(mem):
    # Many folios share a bucket of the wait table; a wake-up of one must not let a waiter of another through.
    folios = [mmc.folio_alloc(mem, 0) for _ in range(600)]
    for folio in folios:
        assert mmc.folio_trylock(folio)
    got = []

    def work(folio):
        mmc.folio_lock(folio)
        got.append(folio)
        mmc.folio_unlock(folio)

    waiting = folios[::100]
    threads = [threading.Thread(target=work, args=(folio,)) for folio in waiting]
    for thread in threads:
        thread.start()
    for folio in folios:
        if folio not in waiting:
            mmc.folio_unlock(folio)
    assert got == []
    for folio in waiting:
        mmc.folio_unlock(folio)
    for thread in threads:
        thread.join()
    assert set(got) == set(waiting)
    mem.check()


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="no interval timers here")
def test_a_signal_ends_the_wait(mem):
    # A thread that locks twice waits for itself; what its signal handler raises sets it free.
    class Alarm(Exception):
        pass

    def handler(*_):
        raise Alarm

    folio = mmc.folio_alloc(mem, 0)
    mmc.folio_lock(folio)
    before = signal.signal(signal.SIGALRM, handler)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        with pytest.raises(Alarm):
            mmc.folio_lock(folio)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert folio.locked
    mmc.folio_unlock(folio)
    mmc.folio_put(folio)
    mem.check()


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="no interval timers here")
@pytest.mark.parametrize("dirtying", [lambda f: mmc.folio_mark_dirty_lock(f), lambda f: mmc.set_page_dirty_lock(f.page)])
def test_an_interrupted_dirtying_leaves_nothing(mem, dirtying):
    def handler(*_):
        raise KeyboardInterrupt

    folio = mmc.folio_alloc(mem, 3)
    mmc.folio_lock(folio)
    before = signal.signal(signal.SIGALRM, handler)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        with pytest.raises(KeyboardInterrupt):
            dirtying(folio)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert folio.locked and not folio.dirty and dirty(mem) == 0, "the lock is still main's"
    mmc.folio_unlock(folio)
    mem.check()


# ---- dirty and writeback --------------------------------------------------------------------------------------------
MARKS = [mmc.folio_mark_dirty, mmc.folio_mark_dirty_lock, lambda f: mmc.set_page_dirty(mmc.folio_page(f, f.nr_pages - 1)),
         lambda f: mmc.set_page_dirty_lock(mmc.folio_page(f, f.nr_pages - 1))]


@pytest.mark.parametrize("mark", MARKS)
@pytest.mark.parametrize("order", [0, 1, 9])
def test_dirty(mem, mark, order):
    #   clean --mark--> dirty (+ nr) --mark--> no change --clear for io--> clean (- nr)
    folio = mmc.folio_alloc(mem, order)
    assert not folio.dirty and not mmc.folio_test_dirty(folio)
    assert mark(folio) is True and dirty(mem) == 1 << order
    assert folio.dirty and mmc.folio_test_dirty(folio) and mmc.PageDirty(mmc.folio_page(folio, (1 << order) - 1))
    assert mark(folio) is False and dirty(mem) == 1 << order
    assert not folio.locked
    mem.check()
    assert mmc.folio_clear_dirty_for_io(folio) is True
    assert mmc.folio_clear_dirty_for_io(folio) is False
    assert not folio.dirty and dirty(mem) == 0


@pytest.mark.parametrize("mark", MARKS)
def test_the_zero_page_stays_clean(mem, mark):
    with refused(mem, BadPage, match="zero page", pfn=1):
        mark(mem.zero_page.folio)


@pytest.mark.parametrize("mark", MARKS)
def test_a_free_folio_is_not_dirtied(mem, mark):
    folio = mmc.folio_alloc(mem, 0)
    mmc.folio_put(folio)
    with refused(mem, BadPage, pfn=folio.pfn):
        mark(folio)


@pytest.mark.parametrize("order", [0, 3])
def test_freeing_a_dirty_folio_takes_it_off_the_count(mem, order):
    folio = mmc.folio_alloc(mem, order)
    mmc.folio_mark_dirty(folio)
    mmc.folio_put(folio)
    assert dirty(mem) == 0
    again = mmc.folio_alloc_at(mem, folio.pfn, order)
    assert not again.dirty
    mem.check()


def test_a_refused_last_put_keeps_the_dirty_count(mem):
    folio = mmc.folio_alloc(mem, 3)
    mmc.folio_mark_dirty(folio)
    mmc.folio_lock(folio)
    with refused(mem, BadPage):
        mmc.folio_put(folio)
    assert dirty(mem) == 8 and folio.dirty


@pytest.mark.parametrize("order", [0, 4])
def test_writeback(mem, order):
    #   dirty -> clear for io -> start writeback (+ nr) -> end (- nr)
    folio = mmc.folio_alloc(mem, order)
    mmc.folio_mark_dirty(folio)
    mmc.folio_clear_dirty_for_io(folio)
    mmc.folio_start_writeback(folio)
    assert PageFlags.writeback in folio.flags and mem.vmstat()["nr_writeback"] == 1 << order
    with refused(mem, BadPage, match="writeback"):
        mmc.folio_start_writeback(folio)
    mem.check()
    mmc.folio_end_writeback(folio)
    assert PageFlags.writeback not in folio.flags and mem.vmstat()["nr_writeback"] == 0
    with refused(mem, BadPage, match="writeback"):
        mmc.folio_end_writeback(folio)


@pytest.mark.parametrize("call", [mmc.folio_clear_dirty_for_io, mmc.folio_start_writeback])
def test_debug_wants_the_folio_lock(call):
    mem = Memory("4M", debug=True)
    folio = mmc.folio_alloc(mem, 0)
    mmc.folio_mark_dirty(folio)
    with refused(mem, BadPage, match="lock"):
        call(folio)
    mmc.folio_lock(folio)
    call(folio)
    assert mem.debug


# ---- split ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("order, new_order", [(1, 0), (2, 0), (2, 1), (4, 2), (9, 0), (9, 8), (10, 3)])
def test_split(mem, order, new_order):
    #   [      order      ]  ->  [new][new][new]...   each with one reference of the caller's
    folio = mmc.folio_alloc(mem, order)
    pfn, free = folio.pfn, mem.vmstat()["nr_free_pages"]
    pieces = mmc.folio_split(folio, new_order)
    assert [piece.pfn for piece in pieces] == list(range(pfn, pfn + (1 << order), 1 << new_order))
    assert {(piece.order, piece.refcount, piece.pincount) for piece in pieces} == {(new_order, 1, 0)}
    assert all(mem.folio(at).pfn == at & ~((1 << new_order) - 1) for at in range(pfn, pfn + (1 << order)))
    assert mem.vmstat()["nr_free_pages"] == free
    mem.check()
    for piece in pieces:
        mmc.folio_put(piece)
    assert mem.buddyinfo() == Memory("16M", hugetlb={"2M": 1}).buddyinfo()
    mem.check()


def test_a_split_folio_reads_as_one_that_never_was_large(mem):
    split, plain = mmc.folio_alloc_at(mem, 64, 3), mmc.folio_alloc_at(mem, 128, 3)
    mmc.folio_split(split, 1)
    mmc.folio_put(plain)
    mmc.folios_alloc_at(mem, [128, 130, 132, 134], 1)
    assert mem.pages[64:72].tobytes() == mem.pages[128:136].tobytes()


@pytest.mark.parametrize("new_order", [0, 2])
def test_pieces_inherit_dirty_and_the_first_keeps_the_lock(mem, new_order):
    folio = mmc.folio_alloc(mem, 4)
    mmc.folio_lock(folio)
    mmc.folio_mark_dirty(folio)
    pieces = mmc.folio_split(folio, new_order)
    assert all(piece.dirty for piece in pieces) and dirty(mem) == 16, "as many dirty pages as before"
    assert [piece.locked for piece in pieces] == [True] + [False] * (len(pieces) - 1)
    mmc.folio_unlock(pieces[0])
    for piece in pieces:
        mmc.folio_put(piece)
    assert dirty(mem) == 0
    mem.check()


def test_pieces_keep_their_bytes(mem):
    folio = mmc.folio_alloc(mem, 3)
    for i in (0, 3, 7):
        mmc.page_address(mmc.folio_page(folio, i))[:1] = bytes([i + 1])
    pieces = mmc.folio_split(folio)
    assert [mmc.page_address(piece.page)[0] for piece in pieces] == [1, 0, 0, 4, 0, 0, 0, 8]


@pytest.mark.parametrize("hold, let_go", [
    (lambda f: mmc.folio_get(f), lambda f: mmc.folio_put(f)),
    (lambda f: mmc.try_grab_folio(f, 1), lambda f: mmc.unpin_user_folio(f, 1)),
    (lambda f: mmc.try_grab_folio(f, 8), lambda f: mmc.unpin_user_folio(f, 8)),
])
@pytest.mark.parametrize("new_order", [0, 1])
def test_what_somebody_holds_is_not_split(mem, hold, let_go, new_order):
    folio = mmc.folio_alloc(mem, 3)
    hold(folio)
    with refused(mem, MMError, errno=11, pfn=folio.pfn):
        mmc.folio_split(folio, new_order)
    let_go(folio)
    assert len(mmc.folio_split(folio, new_order)) == 8 >> new_order
    released(mem)


def test_pinned_folio_without_other_references_is_not_split(mem):
    # refcount 1, pincount 1: the count alone looks as if nobody else held it
    folio = mmc.folio_alloc(mem, 3)
    mmc.try_grab_folio(folio, 1)
    mmc.folio_put(folio)
    with refused(mem, MMError, errno=11):
        mmc.folio_split(folio)
    mmc.unpin_user_folio(folio, 1)
    released(mem)


@pytest.mark.parametrize("what", ["hugetlb", "huge_zero", "writeback", "device"])
def test_what_is_never_split(what):
    mem = Memory("16M", hugetlb={"2M": 1}, devices=[DevicePages("2M", align="2M")])
    folio = {"hugetlb": lambda: mmc.folio_alloc(mem, 9, hugetlb=True), "huge_zero": lambda: mem.huge_zero_folio,
             "writeback": lambda: mmc.folio_alloc(mem, 9), "device": lambda: mem.folio(mem.devices[0].start_pfn)}[what]()
    if what == "writeback":
        mmc.folio_start_writeback(folio)
    with refused(mem, MMError, errno=16, pfn=folio.pfn):
        mmc.folio_split(folio)
    if what == "writeback":
        mmc.folio_end_writeback(folio)
        assert len(mmc.folio_split(folio)) == 512


@pytest.mark.parametrize("order, new_order, error", [(0, 0, InvalidArgument), (3, 3, InvalidArgument),
                                                     (3, 4, InvalidArgument), (3, -1, InvalidArgument),
                                                     (3, 1 << 40, InvalidArgument), (3, "0", TypeError),
                                                     (3, 1.0, TypeError), (3, None, TypeError)])
def test_orders_that_a_split_cannot_have(mem, order, new_order, error):
    folio = mmc.folio_alloc(mem, order)
    with refused(mem, error):
        mmc.folio_split(folio, new_order)


def test_split_of_a_free_folio(mem):
    folio = mmc.folio_alloc(mem, 3)
    mmc.folio_put(folio)
    with refused(mem, BadPage, pfn=folio.pfn):
        mmc.folio_split(folio)


def test_stale_handles_after_a_split(mem):
    # The handle of the whole is now the handle of the first piece; a handle of a piece is no tail any more.
    folio = mmc.folio_alloc(mem, 2)
    tail = mmc.folio_page(folio, 3)
    with refused(mem, InvalidArgument, match="tail"):
        mmc.folio_get(tail)
    mmc.folio_split(folio)
    with unchanged(mem):
        assert (folio.order, folio.nr_pages) == (0, 1)
    mmc.folio_get(tail)
    assert mem.folio(tail.pfn).refcount == 2
    mmc.folio_put(tail)
    mem.check()
