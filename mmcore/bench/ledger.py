"""What an open PinLedger costs: the same pairs of pin and unpin, with and without one."""

import mmcore as mmc

from .measure import Bar, Variant, interleave, rows_of
from .report import progress

MOST = 3.0                  # an open ledger may cost this many times the call
PAGES = 2048


def jobs(mem):
    """Return {name: (pages a run, run)}: single calls, lists of small pages, of large folios, and a registration."""
    folio = mmc.folio_alloc(mem, 4)
    small = mmc.alloc_pages_bulk(mem, PAGES)
    large = mmc.folio_alloc(mem, 9)
    in_large = mmc.PageList(mem, range(large.pfn, large.pfn + large.nr_pages))
    mm = mmc.MM(mem)
    base, huge = mm.mmap(PAGES << 12), mm.mmap(PAGES << 12)
    mm.madvise(huge, PAGES << 12, mmc.MADV_HUGEPAGE)
    mm.madvise(base, PAGES << 12, mmc.MADV_NOHUGEPAGE)
    mm.touch(base, PAGES << 12)
    mm.touch(huge, PAGES << 12)
    domain = mmc.ProtectionDomain(mmc.IBDevice(mem), mm)

    def one_folio():
        for _ in range(1000):
            mmc.try_grab_folio(folio, 1)
            mmc.unpin_user_folio(folio, 1)

    def one_page():
        for _ in range(500):
            mmc.unpin_user_pages(mmc.pin_user_pages_fast(mm, base, 1, mmc.FOLL_WRITE))

    def a_list(pages, turns):
        for _ in range(turns):
            mmc.grab_pages(pages)
            mmc.unpin_user_pages(pages)

    def walk(addr, turns, output=mmc.PageList):
        for _ in range(turns):
            mmc.unpin_user_pages(mmc.pin_user_pages_fast(mm, addr, PAGES, mmc.FOLL_WRITE, output=output))

    def register():
        for _ in range(10):
            domain.reg_mr(base, PAGES << 12, mmc.IB_ACCESS_LOCAL_WRITE).close()

    return {"one folio, one pin": (1000, one_folio), "one page of an address space": (500, one_page),
            "list of base pages": (10 * PAGES, lambda: a_list(small, 10)),
            "list within one folio": (200 * 512, lambda: a_list(in_large, 200)),
            "address space, base pages": (10 * PAGES, lambda: walk(base, 10)),
            "address space, THP": (100 * PAGES, lambda: walk(huge, 100)),
            "address space, THP, as ranges": (100 * PAGES, lambda: walk(huge, 100, mmc.PageRanges)),
            "memory region, base pages": (10 * PAGES, register)}


def measure(rounds):
    """Return a row for each job without and with a ledger; the second must cost MOST times the first at most."""
    rows = []
    with mmc.Memory("128M") as mem:
        for name, (pages, run) in jobs(mem).items():
            progress(name)
            ledger = mmc.PinLedger(mem)

            def booked(run=run, ledger=ledger):
                with ledger, ledger.tag("bench"):
                    run()

            run()
            booked()
            ledger.assert_balanced()
            variants = [Variant("no ledger", run), Variant("ledger", booked)]
            rows += rows_of(name, variants, pages, interleave(variants, rounds), [Bar("ledger", "no ledger", at_most=MOST)])
    return rows
