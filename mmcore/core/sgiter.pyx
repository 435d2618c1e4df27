# cython: nonecheck=True
"""Walking scatterlists, as Python sees it: entries, pages, DMA pages.

Units: entries and pages by index; sizes: bytes, uint64.
Raises: TypeError, InvalidArgument for tables that are freed and entries that are blank.
Threads: one at a time a table.
Kernel: the functions and macros of these names in scatterlist.h.
"""
from mmcore.core.folio cimport count_arg
from mmcore.core.pagelist cimport PageList, filling, new_pagelist

from .errors import InvalidArgument

__all__ = [
    "for_each_sg", "sg_next", "sg_last", "sg_nents", "sg_nents_for_len", "sg_page", "sg_phys", "sg_dma_address",
    "sg_dma_len", "sg_set_page", "sg_set_folio", "sg_mark_end", "sg_is_last", "for_each_sg_page", "sg_page_iter",
    "sg_page_pfns", "sg_dma_page_iter",
]

# ---- pages ----------------------------------------------------------------------------------------------------------
cdef void page_iter_start(page_iter_t *it, sg_t *sgl, uint64_t nents, unsigned shift, uint64_t pgoffset) noexcept nogil:
    it.sg, it.nents, it.shift, it.left = sgl, nents, shift, 0
    if sgl == NULL or nents == 0:
        it.nents = 0
        return
    it.pfn = sg_first_pfn(sgl, shift) - 1
    it.left = sg_nr_pages(sgl, shift)
    while pgoffset:
        if it.left == 0 and not page_iter_entry(it):
            return
        if pgoffset <= it.left:
            it.left -= pgoffset
            it.pfn += pgoffset
            return
        pgoffset -= it.left
        it.left = 0

# ---- bytes ----------------------------------------------------------------------------------------------------------
cdef uint64_t total_length(sg_t *sgl, uint64_t nents) noexcept nogil:
    cdef uint64_t total = 0
    while nents and sgl != NULL:
        total += sgl.length
        sgl = next_sg(sgl)
        nents -= 1
    return total

cdef void pieces_start(pieces_t *p, sg_t *sgl, uint64_t nents, unsigned shift, uint64_t skip, uint64_t length) noexcept nogil:
    p.sg, p.nents, p.shift, p.skip, p.left = sgl, nents, shift, skip, length

cdef bint pieces_next(pieces_t *p, piece_t *piece) noexcept nogil:
    cdef uint64_t at, length
    piece.length = 0
    while p.left and p.nents and p.sg != NULL:
        length = p.sg.length
        if p.skip >= length:
            p.skip -= length
        else:
            # Without a page it is at 0, which nobody has, whatever its offset says.
            at = (sg_pfn(p.sg) << p.shift) + p.sg.offset + p.skip if sg_pfn(p.sg) else 0
            length -= p.skip
            if length > p.left:
                length = p.left
            if piece.length == 0:
                piece.at = at
            elif piece.at + piece.length != at:
                return True
            piece.length += length
            p.left -= length
            p.skip = 0
        p.sg = next_sg(p.sg)
        p.nents -= 1
    return piece.length != 0

# ---- entries ----------------------------------------------------------------------------------------------------------
cdef SGEntry entry_arg(object entry):
    if type(entry) is not SGEntry:
        raise TypeError(f"an SGEntry is wanted, not {entry!r}")
    return entry

cdef SGEntry following(SGEntry entry):
    """The entry after one, or None: at the end mark, and behind the last entry of a table that is still being filled."""
    cdef SGTable table = entry.table
    cdef sg_t *sg
    table.read()
    try:
        sg = entry.ptr()
        if sg == table.t.prv:
            return None
        sg = next_sg(sg)
        return None if sg == NULL else entry_handle(table, sg, entry.index + 1)
    finally:
        table.read_done()


def for_each_sg(sgt, nents=None):
    """Iterate over the SGEntry of a table: the CPU's orig_nents (for_each_sgtable_sg), or the first nents.

    Chain links are never seen. Stops at the end mark. Raises InvalidArgument when the table is freed on the way.
    """
    cdef SGTable table = table_arg(sgt)
    cdef uint64_t n = count_arg(table.t.orig_nents if nents is None else nents, "nents", 0,
                                max(table.t.orig_nents, table.t.nents))
    return entries_of(table, table.generation, n)

def entries_of(SGTable table, generation, n):
    cdef SGEntry entry
    cdef uint64_t left = n
    if not left:
        return
    if generation != table.generation:
        raise InvalidArgument("the table was freed under the iterator")
    entry = entry_handle(table, table.t.sgl, 0)
    while entry is not None:
        yield entry
        left -= 1
        entry = following(entry) if left else None


def sg_next(entry):
    """Return the next SGEntry, None after the one that is marked as the end, or that an append table was filled to."""
    return following(entry_arg(entry))


def sg_last(sgt):
    """Return the last SGEntry of the CPU view. Raises InvalidArgument for an empty table, of which the kernel crashes."""
    cdef SGTable table = table_arg(sgt)
    if table.t.orig_nents == 0:
        raise InvalidArgument("an empty table has no last entry")
    return table[table.t.orig_nents - 1]


def sg_nents(sgt):
    """Count the entries of a table up to the end mark, whatever orig_nents says; None counts 0.

    An append table that is not complete has no end mark at its true end: what it holds is counted.
    """
    cdef SGTable table
    cdef sg_t *sg
    cdef uint64_t n = 0
    if sgt is None:
        return 0
    table = table_arg(sgt)
    table.read()
    with nogil:
        sg = table.t.sgl
        while sg != NULL:
            n += 1
            if sg == table.t.prv:
                break
            sg = next_sg(sg)
    table.read_done()
    return n


def sg_nents_for_len(sgt, length):
    """Return how many entries hold the first `length` bytes; 0 for 0. Raises MMError(EINVAL) when there are fewer bytes."""
    cdef SGTable table = table_arg(sgt)
    cdef uint64_t wanted = count_arg(length, "length", 0, ~<uint64_t>0), n = 0, total = 0
    cdef sg_t *sg
    if wanted == 0:
        return 0
    table.read()
    with nogil:
        sg = table.t.sgl
        while sg != NULL and n < table.t.orig_nents and total < wanted:
            total += sg.length
            n += 1
            sg = next_sg(sg)
    table.read_done()
    if total < wanted:
        raise InvalidArgument(f"the list holds {total} bytes, {wanted} are asked for")
    return n


def sg_page(entry):
    """Return the Page of an entry, None when it is blank."""
    return entry_arg(entry).page


def sg_phys(entry):
    """Return the physical address of an entry's first byte."""
    cdef SGEntry e = entry_arg(entry)
    return e.pfn * e.table.mem.page_size + e.offset


def sg_dma_address(entry):
    """Return where the device sees the DMA segment of this index."""
    return entry_arg(entry).dma_address


def sg_dma_len(entry):
    """Return the bytes of the DMA segment of this index."""
    return entry_arg(entry).dma_length


def sg_set_page(entry, page, length, offset):
    """Make an entry cover `length` bytes from `offset` on of a page; end mark and DMA fields stay.

    Raises InvalidArgument when the bytes leave the Memory or the page belongs to another one.
    """
    entry_arg(entry).set(page, length, offset)


def sg_set_folio(entry, folio, length, offset):
    """Make an entry cover `length` bytes from `offset` on of a folio.

    The entry gets the page that the first byte is in, and the offset in it: page iteration relies on offsets below a
    page, which the kernel leaves to the caller. Raises InvalidArgument beyond 32 bits (the kernel cuts) or the folio.
    """
    cdef SGEntry e = entry_arg(entry)
    cdef uint64_t size, first, nbytes, shift
    if type(folio) is not Folio:
        raise TypeError(f"a Folio is wanted, not {folio!r}")
    if folio.mem is not e.table.mem:
        raise InvalidArgument(f"{folio!r} belongs to another Memory than the table", pfn=folio.pfn)
    size = folio.nr_pages * folio.mem.page_size
    nbytes = count_arg(length, "length", 0, ~<uint64_t>0)
    first = count_arg(offset, "offset", 0, ~<uint64_t>0)
    if nbytes > 0xffffffff:
        raise InvalidArgument(f"length {nbytes} does not fit an entry, which has 32 bits for it: split it", pfn=folio.pfn)
    if first > size or nbytes > size - first:
        raise InvalidArgument(f"{nbytes} bytes at offset {first} leave the folio of {size} bytes", pfn=folio.pfn)
    shift = folio.mem.page_size.bit_length() - 1
    if first == size:
        # Empty, behind the last page: stay in the folio.
        e.set(folio.mem.page(folio.pfn + (first >> shift) - 1), 0, ONE << shift)
        return
    e.set(folio.mem.page(folio.pfn + (first >> shift)), length, first & ((ONE << shift) - 1))


def sg_mark_end(entry):
    """Mark an entry as the last of its list. A chain link is refused: the kernel would lose what hangs on it."""
    entry_arg(entry).mark_end()


def sg_is_last(entry):
    """Tell whether an entry carries the end mark."""
    return entry_arg(entry).is_last

# ---- pages, as Python sees them -----------------------------------------------------------------------------------------
cdef int still_data(const sg_t *sg) except -1:
    """Refuse to go on from a slot that sg_chain() has made a link since."""
    if sg != NULL and sg_is_chain(sg):
        raise InvalidArgument("the entry under the iterator became a chain link: begin again")
    return 0

cdef class PageIter:
    """Iterate over the pages of a table."""
    cdef SGTable table
    cdef uint64_t generation
    cdef page_iter_t it

    def __iter__(self):
        return self

    def __next__(self):
        cdef bint more
        cdef uint64_t pfn
        self.table.read()
        try:
            if self.generation != self.table.generation:
                raise InvalidArgument("the table was freed under the iterator")
            still_data(self.it.sg)
            more = page_iter_next(&self.it)
            pfn = self.it.pfn
        finally:
            self.table.read_done()
        if not more:
            raise StopIteration
        return page_handle(self.table.mem, pfn)


def sg_page_iter(sgt, pgoffset=0):
    """Iterate over the pages that the entries of the CPU view touch, after passing over pgoffset of them.

    An empty entry has no page; an offset beyond its first page starts at the page it reaches. (The kernel gives a page
    for (offset 100, length 0), and pages before the data for offsets beyond a page.) Blank entries are refused.
    """
    cdef SGTable table = table_arg(sgt)
    cdef uint64_t skip = count_arg(pgoffset, "pgoffset", 0, ~<uint64_t>0)
    cdef PageIter pages = PageIter.__new__(PageIter)
    cdef mem_t *m = table.read()
    try:
        pages.table = table
        pages.generation = table.generation
        pages_of(table)
        page_iter_start(&pages.it, table.t.sgl, table.t.orig_nents, m.page_shift, skip)
    finally:
        table.read_done()
    return pages


for_each_sg_page = sg_page_iter

cdef uint64_t pages_of(SGTable table) except? 0:
    """The pages of the CPU view. Entries with a length and no page were never set: nobody may walk over their pages."""
    cdef uint64_t i = 0, total = 0, n = table.t.orig_nents
    cdef unsigned shift = table.mem.m.page_shift
    cdef sg_t *sg = table.t.sgl
    with nogil:
        while sg != NULL and i < n and (sg_pfn(sg) != 0 or sg.length == 0):
            total += sg_nr_pages(sg, shift)
            sg = next_sg(sg)
            i += 1
    if sg != NULL and i < n:
        raise InvalidArgument(f"entry {i} has a length and no page: set it with sg_set_page()")
    return total


def sg_page_pfns(sgt, pgoffset=0):
    """Return the PFNs that sg_page_iter() gives, as a read-only uint64 array: its bulk form."""
    cdef SGTable table = table_arg(sgt)
    cdef uint64_t skip = count_arg(pgoffset, "pgoffset", 0, ~<uint64_t>0), n = 0, k, take, base
    cdef page_iter_t it
    cdef PageList pages
    cdef uint64_t *out
    cdef mem_t *m = table.read()
    try:
        n = pages_of(table)
        n = n - skip if skip < n else 0
        pages = new_pagelist(table.mem, n)
        out = filling(pages)
        with nogil:
            page_iter_start(&it, table.t.sgl, table.t.orig_nents, m.page_shift, skip)
            while it.left or page_iter_entry(&it):
                take, base = it.left, it.pfn + 1
                for k in range(take):
                    out[k] = base + k
                out += take
                it.left = 0
    finally:
        table.read_done()
    return pages.pfns


def sg_dma_page_iter(sgt, pgoffset=0):
    """Iterate over the DMA view: the DMA address of each page of each of the nents DMA segments.

    As in the kernel the addresses keep the segment's in-page offset: dma_address + i pages. How many pages a segment
    has follows from its own address (the kernel takes the offset of the CPU's entry of that index).
    """
    cdef SGTable table = table_arg(sgt)
    cdef uint64_t skip = count_arg(pgoffset, "pgoffset", 0, ~<uint64_t>0)
    return dma_pages(table, table.generation, skip)

def dma_pages(SGTable table, generation, skip):
    cdef uint64_t mask, at, nr, i = 0, k, page, passed = skip
    cdef SGEntry entry = None
    page = table.mem.page_size
    mask = page - 1
    while i < table.t.nents:
        i += 1
        if generation != table.generation:
            raise InvalidArgument("the table was freed under the iterator")
        entry = entry_handle(table, table.t.sgl, 0) if entry is None else following(entry)
        if entry is None:
            return
        at = entry.dma_address
        nr = entry.dma_length
        nr = ((at & mask) + nr + mask) // page if nr else 0
        k = min(passed, nr)
        passed -= k
        while k < nr:
            yield at + k * page
            k += 1
