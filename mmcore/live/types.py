"""Frames by their flags, in the letters and the option grammar of the kernel's page-types.

A word is 64 bits: those of kpageflags, and for pages of a process three of pagemap on top. Like page-types, a report
hides what is for kernel developers (bits 32 to 42, and compound marks that are not hugetlb's) unless it is raw. Bits
that this table does not know are shown as bitNN, never dropped.
"""

from dataclasses import dataclass, field

import numpy as np

from .pagemap import (
    KPF_ACTIVE, KPF_ANON, KPF_COMPOUND_HEAD, KPF_COMPOUND_TAIL, KPF_ERROR, KPF_HUGE, KPF_RECLAIM, KPF_SLAB,
    KPF_WRITEBACK, PM_FILE, PM_MMAP_EXCLUSIVE, PM_SOFT_DIRTY, PM_SWAP,
)

# Bit: (letter, name).
NAMES = {
    0: "L locked", 1: "E error", 2: "R referenced", 3: "U uptodate", 4: "D dirty", 5: "l lru", 6: "A active",
    7: "S slab", 8: "W writeback", 9: "I reclaim", 10: "B buddy", 11: "M mmap", 12: "a anonymous", 13: "s swapcache",
    14: "b swapbacked", 15: "H compound_head", 16: "T compound_tail", 17: "G huge", 18: "u unevictable",
    19: "X hwpoison", 20: "n nopage", 21: "x ksm", 22: "t thp", 23: "o offline", 24: "z zero_page", 25: "i idle_page",
    26: "g pgtable",
    32: "r reserved", 33: "m mlocked", 34: "d mappedtodisk", 35: "P private", 36: "p private_2", 37: "O owner_private",
    38: "h arch", 39: "c uncached", 40: "f softdirty", 41: "H arch_2", 42: "J arch_3",
    47: "d anon_exclusive", 48: "I readahead", 50: "A slub_frozen", 51: "E slub_debug",
    61: "F file", 62: "w swap", 63: "1 mmap_exclusive",
}
FLAGS = {bit: tuple(text.split()) for bit, text in NAMES.items()}
BY_NAME = {name: bit for bit, (_, name) in FLAGS.items()}
KPF_OWNER_2, KPF_SOFTDIRTY, KPF_ANON_EXCLUSIVE, KPF_READAHEAD, KPF_SLUB_FROZEN, KPF_SLUB_DEBUG = 34, 40, 47, 48, 50, 51
KPF_FILE, KPF_SWAP, KPF_MMAP_EXCLUSIVE = 61, 62, 63
HIDDEN = sum(1 << bit for bit in FLAGS if bit >= 32)       # for kernel developers
ALL = (1 << 64) - 1

# One bit serves two purposes; which one, another flag says: (bit, the flag that must be there, or not, stands for).
OVERLOADED = (
    (KPF_OWNER_2, KPF_ANON, True, KPF_ANON_EXCLUSIVE),
    (KPF_RECLAIM, KPF_WRITEBACK, False, KPF_READAHEAD),
    (KPF_ACTIVE, KPF_SLAB, True, KPF_SLUB_FROZEN),
    (KPF_ERROR, KPF_SLAB, True, KPF_SLUB_DEBUG),
)


def _bit(number):
    return np.uint64(1 << number)


def _has(words, number):
    return words & _bit(number) != 0


def process_words(flags, pagemap):
    """Return kpageflags words with what pagemap adds about a process's page: file, swap, mmap_exclusive, softdirty."""
    words = flags.copy()
    for mask, bit in ((PM_FILE, KPF_FILE), (PM_SWAP, KPF_SWAP), (PM_MMAP_EXCLUSIVE, KPF_MMAP_EXCLUSIVE),
                      (PM_SOFT_DIRTY, KPF_SOFTDIRTY)):
        words |= np.where(pagemap & mask != 0, _bit(bit), np.uint64(0))
    return words


def shown(words, raw=False):
    """Return words as a report shows them: raw: what overloaded bits stand for; else without what is for developers."""
    words = words.copy()
    if raw:
        for bit, other, there, stands_for in OVERLOADED:
            which = _has(words, bit) & (_has(words, other) == there)
            words[which] ^= _bit(bit) | _bit(stands_for)
        return words
    words &= np.uint64(ALL & ~HIDDEN)
    words[~_has(words, KPF_HUGE)] &= np.uint64(ALL & ~(1 << KPF_COMPOUND_HEAD | 1 << KPF_COMPOUND_TAIL))
    return words


def letters(word):
    """Return the symbolic flags of a word: a letter for each known bit that is set, "_" where it is not."""
    text = "".join(letter if word >> bit & 1 else "_" for bit, (letter, _) in FLAGS.items())
    return text + "".join(f"+{name}" for name in unknown(word))


def names(word):
    """Return the names of a word's flags, with commas; bitNN for those that have none."""
    return ",".join([name for bit, (_, name) in FLAGS.items() if word >> bit & 1] + unknown(word))


def unknown(word):
    """Return bitNN for each set bit that has no name."""
    return [f"bit{bit}" for bit in range(64) if word >> bit & 1 and bit not in FLAGS]


def legend():
    """Return (bit, letter, name) of every flag that has a name."""
    return [(bit, letter, name) for bit, (letter, name) in FLAGS.items()]


def parse_flags(text):
    """Return the word of "0x10,anon,bit57": numbers and names with commas. Raises ValueError."""
    word = 0
    for part in text.split(","):
        word |= _one_flag(part.strip())
    return word


def _one_flag(text):
    if text in BY_NAME:
        return 1 << BY_NAME[text]
    if text.startswith("bit") and text[3:].isdigit() and int(text[3:]) < 64:
        return 1 << int(text[3:])
    try:
        value = int(text, 0)
    except ValueError:
        value = -1
    if 0 <= value <= ALL:
        return value
    # The beginning of a name will do; of several the lowest bit is meant, as page-types does.
    for name, bit in BY_NAME.items():
        if text and name.startswith(text):
            return 1 << bit
    raise ValueError(f"no flag is called {text!r}; give names as --legend shows them, bitNN, or a number like 0x10")


@dataclass(frozen=True)
class Bits:
    """One filter: of the bits in `.mask`, exactly `.wanted` are set; wanted None: at least one is."""

    mask: int
    wanted: "int | None"

    def matches(self, words):
        """Return which words pass, as bool."""
        some = words & np.uint64(self.mask)
        return some != 0 if self.wanted is None else some == np.uint64(self.wanted)


def parse_bits(text):
    """Parse a bits-spec: Bits. Raises ValueError.

    "b1,b2": any of them; "b1,b2=b1": of these, exactly b1; "b1,~b2": b1 and not b2; "=b1,b2": exactly these and
    nothing else.
    """
    if not text.strip():
        raise ValueError("an empty bits-spec; give for example anon, anon,~thp or =lru,uptodate")
    if "=" in text:
        left, _, right = text.partition("=")
        wanted = parse_flags(right) if right.strip() else 0
        mask = parse_flags(left) | wanted if left.strip() else ALL
        return Bits(mask, wanted)
    if "~" in text:
        parts = [part.strip() for part in text.split(",")]
        wanted = sum({_one_flag(part) for part in parts if not part.startswith("~")})
        unwanted = 0
        for part in parts:
            if part.startswith("~"):
                unwanted |= _one_flag(part[1:].strip())
        if wanted & unwanted:
            raise ValueError(f"{text!r} wants {names(wanted & unwanted)} and forbids it")
        return Bits(wanted | unwanted, wanted)
    return Bits(parse_flags(text), None)


def parse_addresses(text):
    """Parse an addr-spec in pages: (first, past the last or None). Raises ValueError.

    "N": one page; "N+M": M pages; "N,M": N to M - 1; "N,": to the end; ",M": from 0.
    """
    try:
        if "+" in text:
            first, _, count = text.partition("+")
            first, count = int(first, 0), int(count, 0)
            last = first + count
        elif "," in text:
            first, _, last = text.partition(",")
            if not first.strip() and not last.strip():
                raise ValueError
            first = int(first, 0) if first.strip() else 0
            last = int(last, 0) if last.strip() else None
        else:
            first = int(text, 0)
            last = first + 1
    except ValueError:
        raise ValueError(f"not an addr-spec: {text!r}; in pages: N, N+M, N,M, N, or ,M") from None
    if first < 0 or (last is not None and last <= first):
        raise ValueError(f"the addr-spec {text!r} holds no page")
    return first, last


@dataclass
class Pages:
    """What a report walks: `.where` (frame, or page of the address space), `.pfns`, `.words`, `.mapcounts`, one a page.

    `.virtual` tells which of the two `.where` is. PFN 0 stands for no frame: a page that is swapped out.
    """

    where: np.ndarray
    pfns: np.ndarray
    words: np.ndarray
    mapcounts: np.ndarray
    virtual: bool

    def part(self, which):
        """Return the pages where the bool array is set."""
        return Pages(self.where[which], self.pfns[which], self.words[which], self.mapcounts[which], self.virtual)


def frames_of(frames):
    """Return the Pages of all frames of a machine. PFN 0, which is nobody's page, is not one of them."""
    where = np.arange(1, len(frames), dtype=np.uint64)
    return Pages(where, where, frames.flags[1:], frames.mapcounts[1:], False)


def pages_of(capture):
    """Return the Pages of a process: those that are present or swapped out."""
    here = (capture.pfns != 0) | (capture.words & PM_SWAP != 0)
    where = capture.addresses[here] // np.uint64(capture.page_size)
    words = process_words(capture.flags[here], capture.words[here])
    return Pages(where, capture.pfns[here], words, capture.mapcounts[here], True)


def select(pages, addresses=(), bits=(), raw=False):
    """Return the Pages in any of the address ranges that pass every filter, their words as a report shows them."""
    if addresses:
        which = np.zeros(len(pages.where), bool)
        for first, last in addresses:
            # Beyond 64 bits there is no page.
            first, last = min(first, ALL), ALL if last is None else min(last, ALL)
            which |= (pages.where >= np.uint64(first)) & (pages.where < np.uint64(last))
        pages = pages.part(which)
    visible = shown(pages.words, raw)
    whole = visible if raw else pages.words
    which = np.ones(len(visible), bool)
    for one in bits:
        # A filter that names a hidden flag means it; "exactly these" means what is shown.
        which &= one.matches(visible if one.mask == ALL else whole)
    return Pages(pages.where, pages.pfns, visible, pages.mapcounts, pages.virtual).part(which)


@dataclass(frozen=True)
class Summary:
    """Pages by the word they show: `.rows` of (word, pages), in ascending order, and `.total`."""

    page_size: int
    total: int
    rows: list = field(default_factory=list)

    def as_dict(self):
        """Return plain data for JSON."""
        return {"total": self.total, "page_size": self.page_size, "rows": [
            {"flags": f"{word:#018x}", "pages": count, "bytes": count * self.page_size,
             "symbolic": letters(word), "names": names(word)} for word, count in self.rows]}


def summarise(pages, page_size):
    """Count the pages by word: Summary."""
    words, counts = np.unique(pages.words, return_counts=True)
    return Summary(page_size, len(pages.words), list(zip(words.tolist(), counts.tolist())))


def stretches(pages, by_mapcount=False):
    """Return the runs of pages that follow each other and show the same word: (first indexes, lengths).

    A run of a process's pages also follows in frames, or is swapped out throughout.
    """
    count = len(pages.where)
    if not count:
        return np.zeros(0, np.int64), np.zeros(0, np.int64)
    same = (np.diff(pages.where) == 1) & (pages.words[1:] == pages.words[:-1])
    if pages.virtual:
        absent = (pages.pfns[1:] == 0) & (pages.pfns[:-1] == 0)
        same &= (pages.pfns[1:] == pages.pfns[:-1] + np.uint64(1)) & (pages.pfns[:-1] != 0) | absent
    if by_mapcount:
        same &= pages.mapcounts[1:] == pages.mapcounts[:-1]
    firsts = np.flatnonzero(np.concatenate(([True], ~same)))
    return firsts, np.diff(np.append(firsts, count))
