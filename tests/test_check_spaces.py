"""Memory.check() on address spaces: every law that can be broken behind the engine's back is seen, and named with its PFN."""
import contextlib
import ctypes

import numpy as np
import pytest

import mmcore as mmc
from mmcore import MM, BadPage, File, Memory
from support import poke

PAGE = 4096
HUGE = 512 * PAGE
WRITE, HUGE_BIT, SPECIAL = 1 << 1, 1 << 7, 1 << 9
TABLE_TYPE = 0xf2
OWNER = 1 << mmc.PageFlags.anon_exclusive.bit_length() - 1


class Space:
    """One mapping of each kind, and ways to write where only bugs write."""

    #   anon  | A0* A1* A2 swapped | A3 zero page |    * written
    #   fixed | R0, written and then made read-only |
    #   file  | S0 S1 | shared, tmpfs     copy | P0 | private, of the same page
    #   thp   | H, one PMD leaf |          gone | a leaf that was unmapped: its block is ready for the next |
    def __init__(self):
        self.mem = Memory("64M")
        self.mm = mm = MM(self.mem)
        self.anon, self.fixed = mm.mmap(4 * PAGE), mm.mmap(PAGE)
        mm.write(self.anon, b"0" * 3 * PAGE)
        mm.madvise(self.anon + 2 * PAGE, PAGE, mmc.MADV_PAGEOUT)
        mm.read(self.anon + 3 * PAGE, 1)
        mm.write(self.fixed, b"R")
        mm.mprotect(self.fixed, PAGE, mmc.PROT_READ)
        self.file = File(self.mem, 2 * PAGE, "tmpfs")
        self.shared = mm.mmap(2 * PAGE, flags=mmc.MAP_SHARED, file=self.file)
        self.copy = mm.mmap(PAGE, flags=mmc.MAP_PRIVATE, file=self.file)
        mm.write(self.shared, b"S" * 2 * PAGE)
        mm.read(self.copy, 1)
        self.thp, gone = mm.mmap(HUGE), mm.mmap(HUGE)
        for addr in self.thp, gone:
            mm.madvise(addr, HUGE, mmc.MADV_HUGEPAGE)
            mm.write(addr, b"H")
        self.gone = mm.page_at(gone).pfn
        mm.munmap(gone, HUGE)
        page = self.pfn("anon")
        self.bytes = np.frombuffer(mmc.page_address(self.mem.page(page)), np.uint8).ctypes.data - page * PAGE
        self.mem.check()

    def pfn(self, name, page=0):
        return self.mm.page_at(getattr(self, name) + page * PAGE).pfn

    def entries(self, table):
        """View the words of a page table."""
        return np.frombuffer((ctypes.c_uint64 * 512).from_address(self.bytes + table * PAGE), np.uint64)

    def tables(self):
        return [int(pfn) for pfn in np.flatnonzero(self.mem.pages["page_type"] >> 24 == TABLE_TYPE)]

    def place(self, name, page=0):
        """Find the table and the index of the entry that maps a page."""
        at = getattr(self, name) + page * PAGE
        index = at >> 21 & 511 if name == "thp" else at >> 12 & 511
        word = int(self.mm.pagemap(at, 1)[0])
        for table in self.tables():
            entry = int(self.entries(table)[index])
            if word >> 63 and entry & 1 and entry >> 12 & (1 << 40) - 1 == self.pfn(name, page) \
                    and bool(entry & HUGE_BIT) == (name == "thp"):
                return table, index
            if not word >> 63 and entry and not entry & 1:
                return table, index
        raise LookupError(name)

    def entry(self, name, page, change):
        table, index = self.place(name, page)
        entries = self.entries(table)
        entries[index] = change(int(entries[index]))
        return table

    @contextlib.contextmanager
    def restored(self):
        """Put struct pages and tables back at the end, so that the address space can be torn down."""
        pages, tables = self.mem.pages, {table: self.entries(table).copy() for table in self.tables()}
        kept = pages.tobytes()
        yield
        ctypes.memmove(pages.ctypes.data, kept, len(kept))
        for table, words in tables.items():
            self.entries(table)[:] = words

    def drop(self, name, page):
        """Clear an entry, and count it as gone."""
        table = self.entry(name, page, lambda e: 0)
        poke(self.mem, table, "index", int(self.mem.pages["index"][table]) - 1)

    def twice(self):
        """Name a table a second time."""
        entries = self.entries(self.place("thp")[0])
        entries[np.flatnonzero(entries == 0)[-1]] = self.place("anon")[0] << 12 | 0x27

    def stray(self, name, page):
        """Copy an entry to where nothing is mapped, and count it."""
        table, index = self.place(name, page)
        entries = self.entries(table)
        free = next(k for k in range(512) if entries[k] == 0
                    and self.mm.find_vma(getattr(self, name) + (k - index) * PAGE) is None)
        entries[free] = entries[index]
        poke(self.mem, table, "index", int(self.mem.pages["index"][table]) + 1)


def field(name, word, value, page=0):
    """Return what writes a field of a mapped page's struct page; a function of the old value, or the value."""
    def write(space):
        pfn = getattr(space, name) if name == "gone" else space.pfn(name)
        pfn += page
        old = poke(space.mem, pfn, word, 0)
        poke(space.mem, pfn, word, value(old) if callable(value) else value)
    return write


BREACHES = [
    # what is wrong, how it comes about, words of the law
    ("page of another family", field("anon", "mapping", lambda old: old + 4), "family"),
    ("page of another place", field("anon", "index", lambda old: old + 1), "page.index"),
    ("writable page that may be shared", field("anon", "flags", lambda old: old & ~OWNER), "writable is exclusive"),
    ("writable zero page", lambda s: s.entry("anon", 3, lambda e: e | WRITE), "zero pages are read-only"),
    ("entry that allows too much", lambda s: s.entry("fixed", 0, lambda e: e | WRITE), "no more than its VMA"),
    ("special entry of a page", lambda s: s.entry("anon", 0, lambda e: e | SPECIAL), "special entries"),
    ("entry beyond memory", lambda s: s.entry("anon", 0, lambda e: e | 1 << 40), "maps a page"),
    ("private mapping that writes to the file", lambda s: s.entry("copy", 0, lambda e: e | WRITE), "does not write to a file"),
    ("entry that nobody counted", lambda s: s.entry("anon", 1, lambda e: 0), "counts its entries"),
    ("page that left no trace", lambda s: s.drop("anon", 1), "rss"),
    ("swap entry that left no trace", lambda s: s.drop("anon", 2), "swapped out"),
    ("page outside of every VMA", lambda s: s.stray("anon", 0), "lies in a VMA"),
    ("swap entry outside of every VMA", lambda s: s.stray("anon", 2), "swapped out lies in a VMA"),
    ("table that is locked", lambda s: poke(s.mem, s.place("anon")[0], "private", 1), "lock is free"),
    ("table that is none", lambda s: poke(s.mem, s.place("anon")[0], "page_type", 0xffffffff), "frame of its type"),
    ("table that nobody has", field("fixed", "page_type", TABLE_TYPE << 24), "every table"),
    ("table in two places", Space.twice, "one address space"),
    ("subpage with a mapping of its own", field("thp", "_mapcount", 0, page=7), "_mapcount of a page"),
    ("folio mapped once more than it is", field("thp", "_large_mapcount", 1), "mappings"),
    ("leaf that is not counted", field("thp", "_entire_mapcount", -1), "_entire_mapcount"),
    ("pages mapped by PTEs that are not", field("thp", "_nr_pages_mapped", 0x800001), "_nr_pages_mapped"),
    ("cached page of another file", field("shared", "mapping", lambda old: old + 4), "knows its file"),
    ("cached page of another index", field("shared", "index", 5), "knows its index"),
    ("cached page without the cache's reference", field("shared", "_refcount", 2), "refcount"),
    ("ready block that is no folio", field("gone", "flags", lambda old: old & ~(1 << 6)), "ready block"),
    ("ready block with a pin", field("gone", "_pincount", 1), "ready block"),
    ("ready block that forgot its mapping", field("gone", "_large_mapcount", -1), "ready block"),
    ("ready block with a strange tail", field("gone", "compound_info", 0, page=9), "tails of a ready block"),
]


@pytest.mark.parametrize("name, breach, law", BREACHES, ids=[row[0] for row in BREACHES])
def test_breach_is_seen(name, breach, law):
    space = Space()
    with space.restored():
        breach(space)
        with pytest.raises(BadPage) as caught:
            space.mem.check()
    space.mem.check()
    assert law in str(caught.value), "another law than the one that was broken"
    assert caught.value.law
