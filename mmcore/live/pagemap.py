"""The kernel's page files as arrays: /proc/PID/pagemap, /proc/kpageflags, /proc/kpagecount.

Each is an array of 64-bit words, indexed by virtual page or by PFN. They are read by
long runs: a syscall a page would cost more than everything done with the answer.
"""

import os

import numpy as np

from .errors import NotPossible
from .limits import open_proc, require_proc, vanished

# /proc/PID/pagemap
PM_PFN_MASK = np.uint64((1 << 55) - 1)
PM_SOFT_DIRTY = np.uint64(1 << 55)
PM_MMAP_EXCLUSIVE = np.uint64(1 << 56)
PM_FILE = np.uint64(1 << 61)
PM_SWAP = np.uint64(1 << 62)
PM_PRESENT = np.uint64(1 << 63)

# /proc/kpageflags: bit numbers
KPF_LOCKED, KPF_ERROR, KPF_REFERENCED, KPF_UPTODATE, KPF_DIRTY, KPF_LRU = range(6)
KPF_ACTIVE, KPF_SLAB, KPF_WRITEBACK, KPF_RECLAIM, KPF_BUDDY = range(6, 11)
KPF_MMAP, KPF_ANON, KPF_SWAPCACHE, KPF_SWAPBACKED = range(11, 15)
KPF_COMPOUND_HEAD, KPF_COMPOUND_TAIL, KPF_HUGE = range(15, 18)
KPF_UNEVICTABLE, KPF_HWPOISON, KPF_NOPAGE, KPF_KSM, KPF_THP = range(18, 23)
KPF_OFFLINE, KPF_ZERO_PAGE, KPF_IDLE, KPF_PGTABLE = range(23, 27)
KPF_RESERVED = 32          # from here on: for kernel developers, without a promise to stay

CHUNK_WORDS = 1 << 20      # 8 MiB a read
NEAR = 32                  # PFNs this near are read in one run: a word costs about 80 ns, another call 3 us
BLOCK_ORDER = 9            # folios up to this order are found by reading one aligned block
MAX_ORDER = 30             # nothing real is larger; stops a search through bad data


def has_flag(flags, bit):
    """Return a bool array: which kpageflags words have the bit."""
    return flags >> np.uint64(bit) & np.uint64(1) != 0


def read_words(file, index, out, progress=None):
    """Fill the uint64 array out with words from index on; return how many there were.

    progress(words so far) is called after each 8 MiB.
    """
    view = memoryview(out).cast("B")
    done = 0
    while done < len(view):
        want = view[done:done + 8 * CHUNK_WORDS]
        got = os.preadv(file.fileno(), [want], 8 * index + done)
        if got <= 0:
            break
        done += got
        if progress:
            progress(done // 8)
    return done // 8


def read_pagemap(pid, addr, npages, page_size):
    """Return npages words of /proc/PID/pagemap from the page of addr on.

    Raises ProcessLookupError if the process is gone, and NotPossible where pages are
    present but their PFNs are hidden, which the kernel shows as PFN 0.
    """
    words = np.zeros(npages, np.uint64)
    with open_proc(pid, "pagemap", "rb") as file:
        try:
            got = read_words(file, addr // page_size, words)
        except ProcessLookupError:
            got = 0
    if got < npages:
        # The file ends early only when there is no address space (any more).
        raise vanished(pid)
    check_pfns_shown(pid, words)
    return words


def check_pfns_shown(pid, words):
    """Raise NotPossible where pages are present but the kernel hides their PFNs, as 0."""
    present = words & PM_PRESENT != 0
    if np.any(present & (words & PM_PFN_MASK == 0)):
        raise NotPossible(
            f"/proc/{pid}/pagemap shows pages but hides their PFNs: no CAP_SYS_ADMIN",
            "run as root in the initial user namespace (in a container: --cap-add SYS_ADMIN)",
        )


def pfns_of(words):
    """Return the PFNs of pagemap words as uint64, 0 where no page is present."""
    return np.where(words & PM_PRESENT != 0, words & PM_PFN_MASK, np.uint64(0))


class KPageFile:
    """/proc/kpageflags or /proc/kpagecount, opened; a context manager.

    Raises NotPossible where the kernel has no such file or it may not be read.
    """

    def __init__(self, name):
        require_proc()
        self.path = f"/proc/{name}"
        try:
            self.file = open(self.path, "rb", buffering=0)
        except PermissionError:
            raise NotPossible(
                f"{self.path} may not be read by uid {os.geteuid()}", "run as root (CAP_SYS_ADMIN)"
            ) from None
        except FileNotFoundError:
            raise NotPossible(
                f"{self.path} is missing", "it needs a kernel with CONFIG_PROC_PAGE_MONITOR"
            ) from None

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.file.close()

    def span(self, start, stop):
        """Return the words of PFNs start to stop - 1; zeros beyond the end of memory."""
        out = np.zeros(stop - start, np.uint64)
        read_words(self.file, start, out)
        return out

    def gather(self, pfns):
        """Return the word of each PFN, in order; 0 for PFN 0, which stands for no page."""
        out = np.zeros(len(pfns), np.uint64)
        order = np.argsort(pfns, kind="stable")           # nearly sorted already: a merge sort is one pass
        order = order[np.count_nonzero(pfns == 0):]
        wanted = pfns[order]
        for first, last in near_runs(wanted, NEAR):
            start, stop = int(wanted[first]), int(wanted[last]) + 1
            out[order[first:last + 1]] = self.span(start, stop)[wanted[first:last + 1] - np.uint64(start)]
        return out


def near_runs(values, near):
    """Yield (first, last) indexes of runs of sorted values whose steps are at most near."""
    if not len(values):
        return
    breaks = np.flatnonzero(np.diff(values) > near)
    firsts = np.concatenate(([0], breaks + 1))
    lasts = np.concatenate((breaks, [len(values) - 1]))
    yield from zip(firsts.tolist(), lasts.tolist())


def folio_extents(pfns, flags, span, torn=None):
    """Find the folio of each page: (heads uint64, orders uint8), 0 and 0 where pfns is 0.

    span(start, stop) returns kpageflags words; the frames *around* the captured pages are
    read too, since a folio may begin before and end after what the buffer maps of it.
    Where the flags are not those of whole, aligned folios, they changed between two reads:
    the bool array torn is set there, and without it ValueError raised.
    """
    heads = pfns.copy()
    orders = np.zeros(len(pfns), np.uint8)
    compound = has_flag(flags, KPF_COMPOUND_HEAD) | has_flag(flags, KPF_COMPOUND_TAIL)
    compound &= pfns != 0
    where = np.flatnonzero(compound)
    if not len(where):
        return heads, orders
    wanted, back = np.unique(pfns[where], return_inverse=True)
    found_heads = np.zeros(len(wanted), np.uint64)
    found_orders = np.zeros(len(wanted), np.uint8)
    found_bad = np.zeros(len(wanted), bool)
    blocks = wanted >> np.uint64(BLOCK_ORDER)
    for first, last in near_runs(blocks, 1):
        start = int(blocks[first]) << BLOCK_ORDER
        stop = (int(blocks[last]) + 1) << BLOCK_ORDER
        start, words = _whole_folios(start, stop, span)
        some = slice(first, last + 1)
        found_heads[some], found_orders[some], found_bad[some] = _units(wanted[some], start, words)
    if torn is not None:
        torn[where] = found_bad[back.reshape(-1)]
    elif np.any(found_bad):
        raise ValueError(f"PFN {int(wanted[np.argmax(found_bad)]):#x} lies in frames that are no folio")
    heads[where] = found_heads[back.reshape(-1)]
    orders[where] = found_orders[back.reshape(-1)]
    return heads, orders


def overlapping(pfns, heads, orders):
    """Tell which pages lie in folios that overlap another one, or are told in two sizes; never PFN 0."""
    order = np.argsort(heads, kind="stable")
    order = order[pfns[order] != 0]
    found = np.zeros(len(pfns), bool)
    while True:
        first, size = heads[order], np.uint64(1) << orders[order].astype(np.uint64)
        same = first[1:] == first[:-1]
        wrong = np.where(same, size[1:] != size[:-1], first[:-1] + size[:-1] > first[1:])
        if not wrong.any():
            return found
        # All pages of both folios; what lies behind them is then compared with what lies before.
        doubtful = np.isin(first, np.concatenate((first[1:][wrong], first[:-1][wrong])))
        found[order[doubtful]] = True
        order = order[~doubtful]


def _whole_folios(start, stop, span):
    """Widen [start, stop) until no folio crosses its ends; return (start, flags words).

    Only gigantic folios cross an aligned block: they start with a tail, or the block
    after still holds their tails.
    """
    words = span(start, stop)
    order = BLOCK_ORDER
    while _is_tail(words[0]) and order < MAX_ORDER and start:
        order += 1
        lower = start & ~((1 << order) - 1)
        if lower < start:
            words = np.concatenate((span(lower, start), words))
            start = lower
    while _is_tail(span(stop, stop + 1)[0]) and order < MAX_ORDER:
        order += 1
        upper = ((stop >> order) + 1) << order
        words = np.concatenate((words, span(stop, upper)))
        stop = upper
    return start, words


def _is_tail(word):
    return bool(int(word) >> KPF_COMPOUND_TAIL & 1)


def _units(wanted, start, words):
    """Return (heads, orders, bad) of wanted PFNs: a frame that is no tail starts a unit; bad ones are no folio."""
    starts = np.flatnonzero(~has_flag(words, KPF_COMPOUND_TAIL))
    if not len(starts):
        return wanted, np.zeros(len(wanted), np.uint8), np.ones(len(wanted), bool)
    lengths = np.diff(np.append(starts, len(words)))
    index = (wanted - np.uint64(start)).astype(np.int64)
    unit = np.searchsorted(starts, index, side="right") - 1
    heads = (starts[unit] + start).astype(np.uint64)
    sizes = lengths[unit]
    orders = np.log2(sizes).astype(np.uint8)
    bad = (np.left_shift(1, orders.astype(np.int64)) != sizes) | (heads % sizes.astype(np.uint64) != 0)
    bad |= ~has_flag(words[starts[unit]], KPF_COMPOUND_HEAD) | (unit < 0)
    return heads, orders, bad
