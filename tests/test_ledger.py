"""PinLedger: who holds which pins, whatever function took or dropped them."""
import threading

import pytest

import mmcore as mmc
from mm_support import HUGE, PAGE, pin
from mmcore import BadPage, MM, Memory, PinLedger


@pytest.fixture
def mem():
    with Memory("64M") as mem:
        yield mem
        mem.check()


@pytest.fixture
def folio(mem):
    folio = mmc.folio_alloc(mem, 4)
    yield folio
    mmc.folio_put(folio)


def held(ledger):
    return [(row.holder, row.folio.pfn, row.count) for row in ledger.outstanding()]


TAKE = {"try_grab_folio": lambda f: mmc.try_grab_folio(f, 4),
        "grab_pages": lambda f: mmc.grab_pages(mmc.PageList(f.mem, range(f.pfn, f.pfn + 4))),
        "grab_ranges": lambda f: mmc.grab_pages(mmc.PageRanges(f.mem, [f.pfn + 2], [4])),
        "folio_add_pins": lambda f: (mmc.try_grab_folio(f, 1), mmc.folio_add_pins(f, 3))}
DROP = {"unpin_user_page": lambda f: [mmc.unpin_user_page(mmc.folio_page(f, i)) for i in range(4)],
        "unpin_user_pages": lambda f: mmc.unpin_user_pages(mmc.PageList(f.mem, range(f.pfn, f.pfn + 4))),
        "ranges": lambda f: mmc.unpin_user_pages(mmc.PageRanges(f.mem, [f.pfn], [4])),
        "page by page": lambda f: mmc.unpin_user_pages(mmc.PageList(f.mem, [f.pfn] * 4), release="page"),
        "dirty_lock": lambda f: mmc.unpin_user_pages_dirty_lock(mmc.PageList(f.mem, range(f.pfn, f.pfn + 4)), 4, False),
        "range": lambda f: mmc.unpin_user_page_range_dirty_lock(f.page, 4, False),
        "unpin_user_folio": lambda f: mmc.unpin_user_folio(f, 4),
        "unpin_folio": lambda f: [mmc.unpin_folio(f) for _ in range(4)],
        "unpin_folios": lambda f: mmc.unpin_folios([f] * 4),
        "put_compound_head": lambda f: mmc.put_compound_head(f, 4)}


@pytest.mark.parametrize("take", TAKE)
@pytest.mark.parametrize("drop", DROP)
def test_every_pair_balances(mem, folio, take, drop):
    with PinLedger(mem) as ledger:
        TAKE[take](folio)
        assert sum(row[2] for row in held(ledger)) == 4 == folio.pincount
        with pytest.raises(BadPage, match="4 pins on 1 folios"):
            ledger.assert_balanced()
        DROP[drop](folio)
        assert held(ledger) == []
        ledger.assert_balanced()


def test_holders_and_call_sites(mem, folio):
    with PinLedger(mem) as ledger:
        with ledger.tag("rdma"):
            mmc.try_grab_folio(folio, 3)
            with ledger.tag("vfio"):
                mmc.try_grab_folio(folio, 2)
        mmc.try_grab_folio(folio, 1)
        assert ledger.by_holder() == {"rdma": 3, "vfio": 2, "untagged": 1}
        assert all(row.folio == folio and "test_ledger.py:" in row.site for row in ledger.outstanding())
        with ledger.tag("rdma"):
            mmc.unpin_user_folio(folio, 2)
        assert ledger.by_holder() == {"rdma": 1, "vfio": 2, "untagged": 1}
        mmc.unpin_user_folio(folio, 1)
        assert ledger.by_holder() == {"rdma": 1, "vfio": 2}
        with pytest.raises(BadPage, match="vfio: 2 on PFN") as caught:
            ledger.assert_balanced()
        assert caught.value.pfn == folio.pfn
        mmc.unpin_user_folio(folio, 3)


def test_what_is_refused_is_not_booked(mem, folio):
    with PinLedger(mem) as ledger:
        mmc.try_grab_folio(folio, 1)
        with pytest.raises(BadPage):
            mmc.unpin_user_folio(folio, 2)
        with pytest.raises(mmc.MMError):
            mmc.grab_pages(mmc.PageList(mem, [folio.pfn, folio.pfn + 100]))
        assert held(ledger) == [("untagged", folio.pfn, 1)]
        mmc.unpin_folio(folio)


def test_plain_references_and_the_zero_page_are_no_pins(mem, folio):
    with PinLedger(mem) as ledger:
        pages = mmc.PageList(mem, [folio.pfn, mem.zero_page.pfn])
        mmc.grab_pages(pages, mmc.FOLL_GET)
        mmc.release_pages(pages)
        mmc.grab_pages(mmc.PageList(mem, [mem.zero_page.pfn]))
        mmc.unpin_user_page(mem.zero_page)
        assert held(ledger) == []


def test_pins_from_before(mem, folio):
    mmc.try_grab_folio(folio, 2)
    with PinLedger(mem) as ledger:
        mmc.try_grab_folio(folio, 1)
        mmc.unpin_user_folio(folio, 3)
        assert held(ledger) == [] and ledger.released_before == 2
    mmc.try_grab_folio(folio, 1)        # nobody watches any more
    assert held(ledger) == []
    mmc.unpin_folio(folio)


def test_another_memory_is_not_watched(mem, folio):
    with Memory("4M") as other, PinLedger(other) as ledger:
        mmc.try_grab_folio(folio, 1)
        assert held(ledger) == []
    mmc.unpin_folio(folio)


def test_threads_have_tags_of_their_own(mem):
    folios = [mmc.alloc_page(mem).folio for _ in range(4)]

    def work(folio, ledger):
        with ledger.tag(f"thread {folio.pfn}"):
            for _ in range(200):
                mmc.try_grab_folio(folio, 2)
                mmc.unpin_user_folio(folio, 1)

    with PinLedger(mem) as ledger:
        threads = [threading.Thread(target=work, args=(folio, ledger)) for folio in folios]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert ledger.by_holder() == {f"thread {folio.pfn}": 200 for folio in folios}
    for folio in folios:
        mmc.unpin_user_folio(folio, 200)
        mmc.folio_put(folio)


def test_pins_of_an_address_space(mem):
    with MM(mem) as mm, PinLedger(mem) as ledger:
        a = mm.mmap(HUGE)
        mm.madvise(a, HUGE, mmc.MADV_HUGEPAGE)
        mm.touch(a, HUGE)
        pages = pin(mm, a, 8)
        assert held(ledger) == [("untagged", mm.page_at(a).folio.pfn, 8)]
        mmc.unpin_user_pages(pages)
        ledger.assert_balanced()


def test_many_call_sites_and_holders(mem):
    """More sites than the table begins with: each keeps its own line, and the innermost frame of the caller counts."""
    folios = [mmc.alloc_page(mem).folio for _ in range(300)]
    with PinLedger(mem) as ledger:
        for i, folio in enumerate(folios):
            scope = {"mmc": mmc, "folio": folio, "PinLedger": PinLedger}
            exec(compile("\n" * i + f"with ledger.tag('h{i % 7}'): mmc.try_grab_folio(folio, {i + 1})", f"made{i}.py", "exec"),
                 {**scope, "ledger": ledger})
        rows = {row.folio: row for row in ledger.outstanding()}
        for i, folio in enumerate(folios):
            assert rows[folio][2:] == (i + 1, f"made{i}.py:{i + 1}") and rows[folio].holder == f"h{i % 7}"
        for i, folio in enumerate(folios):
            mmc.unpin_user_folio(folio, i + 1)
        ledger.assert_balanced()
    for folio in folios:
        mmc.folio_put(folio)


def test_two_ledgers_and_a_driver_name_their_own(mem):
    with MM(mem) as mm, PinLedger(mem) as one, PinLedger(mem) as two:
        a = mm.mmap(4 * PAGE)
        mm.touch(a, 4 * PAGE)
        domain = mmc.ProtectionDomain(mmc.IBDevice(mem), mm)
        with one.tag("one"):
            pages = pin(mm, a, 1)
            with two.tag("two"):
                pages += pin(mm, a, 1)
            region = domain.reg_mr(a, PAGE, mmc.IB_ACCESS_LOCAL_WRITE)
            pages += pin(mm, a, 1)
        assert one.by_holder() == {"one": 3, region._name: 1}
        assert two.by_holder() == {"untagged": 2, "two": 1, region._name: 1}
        with two.tag("two"):
            region.close()
        mmc.unpin_user_pages(pages)
        one.assert_balanced()
        two.assert_balanced()


@pytest.mark.parametrize("output", [mmc.PageList, mmc.PageRanges, mmc.SGAppendTable, mmc.GupOutput], ids=lambda o: o.__name__)
@pytest.mark.parametrize("huge", [False, True])
def test_every_output_is_booked(mem, output, huge):
    class Kept(mmc.GupOutput):
        def __init__(self):
            self.pages = []

        def gup_output_single_page(self, page):
            self.pages.append(page.pfn)

        def gup_output_pages(self, page, count):
            self.pages += range(page.pfn, page.pfn + count)

    with MM(mem) as mm, PinLedger(mem) as ledger:
        a = mm.mmap(HUGE)
        if huge:
            mm.madvise(a, HUGE, mmc.MADV_HUGEPAGE)
        mm.touch(a, HUGE)
        sink = Kept() if output is mmc.GupOutput else output
        got = mmc.pin_user_pages_fast(mm, a + PAGE, 9, mmc.FOLL_WRITE, output=sink)
        assert sorted(held(ledger)) == ([("untagged", mm.page_at(a).folio.pfn, 9)] if huge else
                                        sorted(("untagged", mm.page_at(a + i * PAGE).pfn, 1) for i in range(1, 10)))
        assert {row.site.rpartition(":")[0] for row in ledger.outstanding()} == {__file__}
        pfns = sink.pages if sink is not output else mmc.sg_page_pfns(got) if output is mmc.SGAppendTable else got
        if output in (mmc.SGAppendTable, mmc.GupOutput):
            pfns = mmc.PageList(mem, list(pfns))
        mmc.unpin_user_pages(pfns, 4)
        assert sum(row[2] for row in held(ledger)) == 5
        rest = mmc.PageList(mem, [page.pfn for page in (pfns.to_pagelist() if isinstance(pfns, mmc.PageRanges) else pfns)][4:])
        mmc.unpin_user_pages(rest)
        ledger.assert_balanced()
        if output is mmc.SGAppendTable:
            mmc.sg_free_append_table(got)
