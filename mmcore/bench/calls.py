"""What one call from Python costs: the helpers that a script calls once a page or a folio, and importing mmcore."""
import time
import timeit

import mmcore as mmc

#: Name -> (statement, ns that it must not pass or None). NAMES is what the statements see.
CALLS = {
    "folio_remaining_pages(folio, page)": ("folio_remaining_pages(folio, page)", 80),
    "unpin_user_folio_dirty_locked(folio, 1, True)": ("unpin_user_folio_dirty_locked(folio, 1, True)", 150),
    "a new Page: mem.page(pfn)": ("mem.page(pfn)", 40),
    "a new Page: pages[3]": ("pages[3]", 40),
    "a new Folio: page.folio": ("page.folio", 40),
    "page_folio(page)": ("page_folio(page)", None),
    "folio_ref_count(folio)": ("folio_ref_count(folio)", None),
    "try_grab_folio(folio, 1) + unpin_user_folio(folio, 1)": (
        "try_grab_folio(folio, 1); unpin_user_folio(folio, 1)", None),
    "pin_user_pages_fast(mm, addr, 1) + unpin_user_pages": (
        "unpin_user_pages(pin_user_pages_fast(mm, addr, 1, FOLL_WRITE))", None),
}
IMPORT_MS = 40          # that importing mmcore may add to importing NumPy


class Scene:
    """A Memory with a pinned THP and a process: the names that the statements of CALLS see."""

    def __init__(self):
        self.mem = mmc.Memory("64M", thp="always")
        self.mm = mmc.MM(self.mem)
        addr = self.mm.mmap("2M")
        self.mm.touch(addr, 2 << 20)
        page = self.mm.page_at(addr + 3 * 4096)
        folio = page.folio
        self.names = {**vars(mmc), "mem": self.mem, "mm": self.mm, "addr": addr, "page": page, "pfn": page.pfn,
                      "folio": folio,
                      "pages": mmc.PageList(self.mem, range(folio.pfn, folio.pfn + 512))}
        mmc.folio_mark_dirty_lock(folio)

    def pin(self, nr):
        """Take nr pins of the folio, for calls that drop them; what is left from before is dropped first."""
        folio = self.names["folio"]
        if folio.pincount:
            mmc.unpin_user_folio(folio, folio.pincount)
        if nr:
            mmc.try_grab_folio(folio, nr)


def time_call(scene, statement):
    """Return a function of pyperf's kind, loops -> seconds of processor time, that runs a statement."""
    code = timeit.Timer(statement, timer=time.thread_time, globals=scene.names)

    def run(loops):
        scene.pin(loops if statement.startswith("unpin_user_folio_dirty_locked") else 0)
        return code.timeit(loops)
    return run
