"""Making and freeing scatterlist tables.

Units: nents: entries; offset, size, max_segment: bytes.
Raises: TypeError, InvalidArgument, MMError(ENOMEM, EBUSY); the table is as it was.
Threads: one at a time a table.
Kernel: the functions of these names in scatterlist.c.
"""
from mmcore.core.folio cimport count_arg
from mmcore.core.pagelist cimport PageList, PageRanges, as_pages
from mmcore.core.sgappend cimport *

import errno as _errno
import os

from .errors import InvalidArgument, MMError

__all__ = [
    "SG_CHUNK_SIZE", "sg_max_single_alloc", "sg_alloc_table", "sg_alloc_table_chained", "sg_init_table",
    "sg_alloc_table_from_pages", "sg_alloc_table_from_pages_segment", "sg_alloc_append_table_from_pages", "sg_free_table",
    "sg_free_append_table", "sg_chain",
]

SG_CHUNK_SIZE = 128             # slots of a chunk of sg_alloc_table_chained(), whatever the page size

def sg_max_single_alloc(Memory mem not None):
    """Return the slots of a full chunk, SG_MAX_SINGLE_ALLOC: what fits in a page, 128 with 4 KiB."""
    return (ONE << mem.ptr().page_shift) // sizeof(sg_t)

cdef SGTable blank_table(Memory mem, nents, uint64_t max_ents, uint64_t first):
    cdef uint64_t n = count_arg(nents, "nents", 1, 0xffffffff)
    cdef SGTable table = new_table(mem)
    cdef mem_t *m = mem.ptr()
    cdef int error
    # Entries are cleared at once; a table beyond the machine's memory would not fail but be killed.
    if n * sizeof(sg_t) > <uint64_t>(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")) // 2:
        raise MMError(_errno.ENOMEM, f"a table of {n} entries takes {n * sizeof(sg_t)} bytes, more than half of the "
                                     "machine's memory")
    if max_ents == 0:
        max_ents = n
    m = mem.enter()
    with nogil:
        error = table_alloc(m, &table.t, n, max_ents, first)
    mem.leave()
    if error:
        raise MMError(-error, f"no memory for a scatterlist of {n} entries ({n * sizeof(sg_t)} bytes)")
    return table


def sg_alloc_table(Memory mem not None, nents):
    """Return a table of nents blank entries, in chunks of sg_max_single_alloc(mem) slots.

    Raises InvalidArgument for 0, MMError(ENOMEM) with nothing left behind. Kernel: sg_alloc_table().
    """
    return blank_table(mem, nents, (ONE << mem.ptr().page_shift) // sizeof(sg_t), 0)


def sg_alloc_table_chained(Memory mem not None, nents, nents_first_chunk=0):
    """Return a table of nents blank entries, in chunks of SG_CHUNK_SIZE slots after a first one of nents_first_chunk.

    A first chunk of one slot could hold a link only and is left out, as in the kernel. Raises InvalidArgument for 0
    entries (the kernel stops). Kernel: sg_alloc_table_chained(), whose first chunk is the caller's memory.
    """
    first = count_arg(nents_first_chunk, "nents_first_chunk", 0, 0xffffffff)
    return blank_table(mem, nents, 128, 0 if first <= 1 else first)


def sg_init_table(Memory mem not None, nents):
    """Return a table of nents blank entries in one array, however long. Kernel: sg_init_table() on a driver's array."""
    return blank_table(mem, nents, 0, 0)

cdef object append_error(append_t *a, int error, uint64_t left_pages):
    if a.why == SG_WHY_NO_MEMORY:
        return MMError(-error, f"no memory for chunk {a.before.nr_chunks + 1} or later of the scatterlist; the table is as "
                               "it was")
    if a.why == SG_WHY_NULL_PAGE:
        return InvalidArgument(f"page {a.bad} of the list is NULL: a scatterlist has no holes", pfn=0)
    if a.why == SG_WHY_CLOSED:
        return InvalidArgument("the last append said left_pages=0 and ended the list, and these pages need a new entry: "
                               "pass an upper bound of the pages still to come")
    return InvalidArgument("more entries are needed than the left_pages of the calls before allowed for: left_pages is an "
                           "upper bound of the pages still to come")

cdef int append_pages(SGTable table, object pages, offset, size, max_segment, left_pages) except -1:
    """Append a PageList or PageRanges: validates, then runs without the GIL."""
    cdef mem_t *m
    cdef append_t a
    cdef PageList plist = None
    cdef PageRanges ranges = None
    cdef uint64_t n, page_size, most, left, first, nbytes, span, i
    cdef int error = 0
    pages = as_pages(pages)
    if pages.mem is not table.mem:
        raise InvalidArgument("the pages belong to another Memory than the table")
    if isinstance(pages, PageList):
        plist = pages
        n = plist.n
    else:
        ranges = pages
        n = ranges.nr_pages
    if n == 0:
        raise InvalidArgument("an empty list of pages: at least one is wanted")
    page_size = ONE << table.mem.ptr().page_shift
    most = count_arg(max_segment, "max_segment", 0, 0xffffffff)
    if most < page_size:
        raise InvalidArgument(f"max_segment {most} is less than a page ({page_size} bytes)")
    first = count_arg(offset, "offset", 0, 0xffffffff)
    if first >= page_size:
        raise InvalidArgument(f"offset {first} is not within the first page ({page_size} bytes): pass the pages from there on")
    left = count_arg(left_pages, "left_pages", 0, ONE << 52)
    span = n * page_size
    nbytes = count_arg(size, "size", 1, ~<uint64_t>0 - page_size)
    if first + nbytes > span or first + nbytes <= span - page_size:
        raise InvalidArgument(f"size {nbytes} at offset {first} is {(first + nbytes + page_size - 1) // page_size} pages, and "
                              f"the list has {n}")
    if left and first + nbytes != span:
        raise InvalidArgument(f"size {nbytes} ends {span - first - nbytes} bytes before its last page does, and {left} pages "
                              "are to follow: only the last call may end within a page")
    m = table.write(True)
    try:
        if table.t.prv != NULL and first:
            raise InvalidArgument(f"offset {first} on a table that has entries: only the first page of a list has one")
        with nogil:
            append_begin(&a, m, &table.t, n, <uint32_t>first, most, left)
            if plist is not None:
                error = append_list(&a, plist.p, n)
            else:
                for i in range(ranges.starts.n):
                    if ranges.starts.p[i] == 0:
                        a.why, a.bad = SG_WHY_NULL_PAGE, i
                        error = -EINVAL
                        break
                    error = append_run(&a, ranges.starts.p[i], ranges.count[i])
                    if error:
                        break
            if error == 0:
                error = append_finish(&a, span - first - nbytes)
            if error:
                append_abort(&a)
        if error:
            raise append_error(&a, error, left)
    finally:
        table.write_done()
    return 0


def sg_alloc_append_table_from_pages(append, pages, offset, size, max_segment=None, left_pages=0):
    """Append `size` bytes of a list of pages, from `offset` in its first page on, to a table.

    Entries go over neighbours in PFN order, up to max_segment bytes (rounded down to a page; None: the table's own).
    left_pages: an upper bound of the pages that later calls will bring; 0 ends the list. `size` must end in the last
    page, and at its end when more is to come. Raises InvalidArgument or MMError(ENOMEM), and then the table is as it
    was. Kernel: the function of this name; see docs/differences.md for what it lets pass.
    """
    if not isinstance(append, SGAppendTable):
        raise TypeError(f"an SGAppendTable is wanted, not {append!r}")
    table_arg(append)
    append_pages(append, pages, offset, size, append.max_segment if max_segment is None else max_segment, left_pages)


def sg_alloc_table_from_pages_segment(pages, offset, size, max_segment):
    """Return a table over `size` bytes of a list of pages, from `offset` in the first page on.

    Entries are at most max_segment bytes, rounded down to a page. Raises as sg_alloc_append_table_from_pages().
    """
    pages = as_pages(pages)
    cdef SGTable table = new_table(pages.mem)
    append_pages(table, pages, offset, size, max_segment, 0)
    table.t.prv = NULL      # complete: nothing is appended to it
    return table


def sg_alloc_table_from_pages(pages, offset, size):
    """Return a table over `size` bytes of a list of pages; entries are as long as 32 bits allow (0xfffff000 bytes)."""
    return sg_alloc_table_from_pages_segment(pages, offset, size, 0xffffffff)

cdef void release_table(SGTable table):
    table.generation += 1
    table_free(&table.t)
    for other in table.chained:
        (<SGTable>other).nr_users -= 1
    table.chained.clear()


def sg_free_table(sgt):
    """Free the entries of a table, not its pages; does nothing the second time.

    Raises MMError(EBUSY) while it is mapped for DMA or chained behind another one, InvalidArgument for an append table,
    of which the kernel would leak chunks here.
    """
    cdef SGTable table = table_arg(sgt)
    if isinstance(table, SGAppendTable):
        raise InvalidArgument("this is an append table: sg_free_append_table() frees by the slots it has")
    table.write(True)
    release_table(table)
    table.write_done()


def sg_free_append_table(append):
    """Free the entries of an append table, not its pages; it can be filled again. Raises as sg_free_table()."""
    cdef SGTable table = table_arg(append)
    if not isinstance(table, SGAppendTable):
        raise InvalidArgument("this is no append table: sg_free_table() frees it")
    table.write(True)
    release_table(table)
    table.write_done()


def sg_chain(prv, prv_nents, sgl):
    """Link table sgl behind the first prv_nents - 1 entries of table prv, whose slot prv_nents - 1 becomes the link.

    prv must have its first prv_nents slots in one array, and the last of them blank: the kernel would overwrite an entry
    there. prv then has the entries of both; sgl stays its own table and cannot be freed before prv.
    """
    cdef SGTable first = table_arg(prv), second = table_arg(sgl)
    cdef uint64_t n = count_arg(prv_nents, "prv_nents", 2, 0xffffffff)
    cdef sg_t *slot
    if first.mem is not second.mem:
        raise InvalidArgument("the tables belong to two Memories")
    if isinstance(first, SGAppendTable) or first.chained:
        raise InvalidArgument("nothing can be chained to an append table by hand, nor twice to one table")
    if reaches(second, first):
        raise InvalidArgument("the chain would be a ring: no walk over it would end")
    first.write(True)
    try:
        if first.t.nr_chunks == 0 or n > first.t.chunk[0].nr or (n == first.t.chunk[0].nr and first.t.nr_chunks > 1):
            raise InvalidArgument(f"prv_nents {n} is beyond the first array of the table")
        slot = first.t.sgl + n - 1
        if sg_pfn(slot) or slot.length:
            raise InvalidArgument(f"slot {n - 1} holds an entry, which the link would overwrite: reserve one slot more")
        second.read()
        try:
            if second.t.orig_nents == 0:
                raise InvalidArgument("the table to chain is empty")
            if isinstance(second, SGAppendTable) and not second.t.prv.page_link & SG_END:
                raise InvalidArgument("the table to chain is not complete: its last append said that pages will follow")
            link_chunk(slot, second.t.sgl)
            first.t.nents = first.t.orig_nents = n - 1 + second.t.orig_nents
            first.chained.append(second)
            second.nr_users += 1
        finally:
            second.read_done()
    finally:
        first.write_done()

cdef bint reaches(SGTable table, SGTable target):
    while table is not target:
        if not table.chained:
            return False
        table = table.chained[0]
    return True
