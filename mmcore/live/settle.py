"""Read a process that runs on until two looks agree; what never agrees is left out and told.

A page is kept when pagemap showed the same frame before and after its frame was looked up. What changed in between
(written after a fork, migrated, unmapped, split) is read again, a few times; then it is left out, as a hole.
"""

from dataclasses import dataclass, field

import numpy as np

from mmcore.core.errors import MMError

from .errors import NotPossible
from .limits import open_proc, vanished
from .pagemap import (
    KPF_BUDDY, KPF_NOPAGE, KPF_ZERO_PAGE, PM_PRESENT, KPageFile, check_pfns_shown, folio_extents, has_flag,
    overlapping, pfns_of, read_words,
)
from .scan import PAGE_IS_HUGE, PAGE_IS_PRESENT, mappings, scan

TRIES = 4
COLUMNS = ("words", "flags", "mapcounts", "heads", "orders", "leaves")


@dataclass
class Settled:
    """The pages of a process that two looks agreed on, as arrays of one entry a page, in address order."""

    vmas: list
    ranges: list                      # (address, pages)
    words: np.ndarray                 # pagemap
    flags: np.ndarray                 # kpageflags
    mapcounts: np.ndarray             # kpagecount
    heads: np.ndarray
    orders: np.ndarray
    leaves: "np.ndarray | None"       # bool: mapped by a PMD or PUD entry; None: this kernel does not say
    moved: int = 0                    # pages left out because they changed in every look
    partial: list = field(default_factory=list)       # sentences: what is missing, and why


def settle(pid, layout, span, page_size, progress=None, steady=True):
    """Read the pages of a process: Settled.

    layout() -> (vmas, ranges) of the addresses span, called again when mappings changed; steady=False: do not look
    whether they did, for this process itself, whose own reading maps memory. Raises what layout() raises at the first
    look, ProcessLookupError if the address space ends before anything was read, NotPossible where PFNs are hidden.
    """
    best, again, changed, doubtful = None, None, False, None
    with open_proc(pid, "pagemap", "rb") as file:
        vmas, ranges = layout()
        for attempt in range(TRIES):
            total = sum(count for _, count in ranges)
            what = f"pages, look {attempt + 1}" if attempt else "pages"
            tell = progress and (lambda done, total=total, what=what: progress(done, total, what))
            words = again if again is not None else read_ranges(file, ranges, page_size, tell)
            drop_frame_0(pid, words)
            if best is None and not len(words):
                raise vanished(pid)
            if len(words) < total and best is not None:
                return unconfirmed(pid, best, doubtful)
            best, torn = look_up(file, vmas, first_pages(ranges, len(words)), words, page_size)
            doubtful = torn | gone(best)
            if len(words) < total:
                return unconfirmed(pid, best, doubtful, total)
            again = read_ranges(file, ranges, page_size)
            drop_frame_0(pid, again)
            if len(again) < total:
                return unconfirmed(pid, best, doubtful)
            doubtful = torn | (pfns_of(words) != pfns_of(again))
            try:
                changed = steady and not same_mappings(vmas, mappings(pid, *span))
                if changed:
                    again = None
                    vmas, ranges = layout()
            except MMError:                       # EFAULT: nothing is mapped there any more
                return incomplete(best, np.ones(total, bool), ["the range was unmapped while it was read"])
            except (ProcessLookupError, NotPossible):
                return unconfirmed(pid, best, doubtful | gone(best))
            if not changed and not doubtful.any():
                return best
    left_out = np.count_nonzero(doubtful & (best.words != 0))
    reasons = [f"mappings changed in each of {TRIES} looks: they are as the last look found them"] if changed else []
    if left_out:
        reasons.append(f"{left_out} pages changed in each of {TRIES} looks and are left out; to hold them still: "
                       f"kill -STOP {pid}")
    return incomplete(best, doubtful, reasons)


def unconfirmed(pid, best, doubtful, total=None):
    """Return what was read of a process that ended before a second look."""
    pages = len(best.words)
    reasons = [f"process {pid} ended while it was read: "
               + (f"{pages} of {total} pages were read" if total else "no second look confirms its pages")]
    left_out = np.count_nonzero(doubtful & (best.words != 0))
    if left_out:
        reasons.append(f"{left_out} pages whose frames it had given back by then are left out")
    return incomplete(best, doubtful, reasons)


def incomplete(best, doubtful, reasons):
    """Return the pages without the doubtful ones, which become holes in every column."""
    best.moved = int(np.count_nonzero(doubtful & (best.words != 0)))
    best.partial = reasons
    for name in COLUMNS:
        column = getattr(best, name)
        if column is not None:
            column[doubtful] = 0
    return best


def drop_frame_0(pid, words):
    """Make holes of mappings of frame 0, which a driver may map and nobody owns.

    Raises NotPossible where every frame is shown as 0: they are hidden.
    """
    if not np.any(pfns_of(words)):
        check_pfns_shown(pid, words)
    words[(pfns_of(words) == 0) & (words & PM_PRESENT != 0)] = 0


def read_ranges(file, ranges, page_size, progress=None):
    """Read the pagemap words of ranges; fewer come back where the address space ends (the process is gone)."""
    total = sum(count for _, count in ranges)
    words = np.zeros(total, np.uint64)
    done = 0
    for start, count in ranges:
        try:
            got = read_words(file, start // page_size, words[done:done + count],
                             progress and (lambda part, done=done: progress(done + part, total)))
        except ProcessLookupError:
            got = 0
        done += got
        if got < count:
            break
    return words[:done]


def first_pages(ranges, count):
    """Return the ranges that the first count pages lie in."""
    kept = []
    for start, pages in ranges:
        if count <= 0:
            break
        kept.append((start, min(pages, count)))
        count -= pages
    return kept


def look_up(file, vmas, ranges, words, page_size):
    """Look up the frames of pagemap words; return (Settled, which pages lie in folios that were changing)."""
    pfns = pfns_of(words)
    with KPageFile("kpageflags") as kpageflags:
        flags = kpageflags.gather(pfns)
        # Frames without a struct page (device memory) belong to no folio.
        whole = np.where(has_flag(flags, KPF_NOPAGE), np.uint64(0), pfns)
        torn = np.zeros(len(pfns), bool)
        heads, orders = folio_extents(whole, flags, kpageflags.span, torn)
        torn |= overlapping(whole, heads, orders)
    # A free frame backs nothing: it was given back between two readings.
    torn |= has_flag(flags, KPF_BUDDY)
    with KPageFile("kpagecount") as kpagecount:
        mapcounts = kpagecount.gather(pfns)
    leaves = read_leaves(file, ranges, len(pfns), page_size)
    return Settled(vmas, ranges, words, flags, mapcounts, heads, orders, leaves), torn


def read_leaves(file, ranges, npages, page_size):
    """Return which pages a PMD or PUD entry maps, as bool; None on a kernel without PAGEMAP_SCAN."""
    leaves = np.zeros(npages, bool)
    done = 0
    for start, count in ranges:
        regions = scan(file, start, start + count * page_size, all_of=PAGE_IS_PRESENT | PAGE_IS_HUGE)
        if regions is None:
            return None
        for region in regions:
            first, last = ((int(region[key]) - start) // page_size + done for key in ("start", "end"))
            leaves[first:last] = True
        done += count
    return leaves


def gone(found):
    """Tell which pages certainly are not the process's any more: their frame is free, or nobody maps it."""
    uncounted = has_flag(found.flags, KPF_NOPAGE) | has_flag(found.flags, KPF_ZERO_PAGE)
    free = has_flag(found.flags, KPF_BUDDY) | (found.mapcounts == 0) & ~uncounted
    return free & (pfns_of(found.words) != 0)


def holds_pages(mapping):
    """Tell whether pages are looked for in a mapping: guards and the vsyscall page have none."""
    return mapping.perms[:3] != "---" and mapping.path != "[vsyscall]"


def same_mappings(vmas, now):
    """Tell whether the mappings are those that were looked at."""
    then, now = ({(one.start, one.end, one.perms, one.offset, one.inode) for one in found if holds_pages(one)}
                 for found in (vmas, now))
    return then == now
