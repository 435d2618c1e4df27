# cython: nonecheck=True
"""Scatterlist tables: chunks, and tables and entries as Python sees them.

Units: offsets, lengths: bytes, uint32; DMA addresses: bytes, uint64; .entries: SG_DTYPE, one dimension.
Raises: InvalidArgument for what does not fit, for tables that are freed, blank or foreign; MMError(EBUSY) for a table
    that another thread uses.
Threads: one at a time a table.
Kernel: struct sg_table, struct sg_append_table, struct scatterlist.
"""
cimport cython
from libc.errno cimport ENOMEM
from libc.stdlib cimport free, realloc
from libc.string cimport memset
from mmcore.core.folio cimport count_arg

import errno as _errno

import numpy as np

from .errors import BadPage, InvalidArgument, MMError

__all__ = ["SGTable", "SGAppendTable", "SGEntry", "SG_DTYPE"]

cdef extern from "Python.h":
    void PyObject_GC_UnTrack(void *o)
    Py_ssize_t Py_REFCNT(object o)

SG_DTYPE = np.dtype({"names": ["pfn", "offset", "length", "dma_address", "dma_length"],
                     "formats": ["<u8", "<u4", "<u4", "<u8", "<u4"], "offsets": [0, 8, 12, 16, 24], "itemsize": 32})

cdef enum:
    BUSY_WRITER = 0xffffffff
cdef uint64_t SLAB_MOST = 32 << 20

# ---- chunks ---------------------------------------------------------------------------------------------------------
cdef bint slab_grow(sgtable_t *t, uint64_t size, uint64_t slots) noexcept nogil:
    """Start a slab with room for a chunk of this size: exactly that at first, then eight times the last one.

    But not beyond what `slots` slots, the most that may still come, can fill.
    """
    cdef uint64_t want = size + sizeof(slab_t), rounded = 4096, most
    cdef slab_t *slab
    if t.slab != NULL:
        most = slots + slots // 64      # with the links
        most = most * sizeof(sg_t) + sizeof(slab_t) if most < SLAB_MOST else SLAB_MOST
        want = max(want, min(most, min(8 * t.slab.size, SLAB_MOST)))
        while rounded < want:
            rounded <<= 1
        want = rounded
    slab = <slab_t *>buffer_alloc(want)
    if slab == NULL:
        return False
    slab.prev, slab.size, slab.used = t.slab, want, sizeof(slab_t)
    t.slab = slab
    return True

cdef sg_t *chunk_alloc(mem_t *m, sgtable_t *t, uint64_t nr, uint64_t most) noexcept nogil:
    """Add a chunk of nr slots, content undefined, not linked yet; NULL, with the table as it was, without memory.

    most: how many slots may be wanted from here on, this chunk's included.
    """
    cdef uint64_t size = nr * sizeof(sg_t), room
    cdef chunk_t *chunk
    cdef sg_t *sgl
    if inject_fails(m, INJECT_SG):
        return NULL
    if t.nr_chunks == t.chunks_room:
        room = 2 * t.chunks_room + 1
        chunk = <chunk_t *>realloc(t.chunk, room * sizeof(chunk_t))
        if chunk == NULL:
            return NULL
        t.chunk, t.chunks_room = chunk, room
    if (t.slab == NULL or t.slab.size - t.slab.used < size) and not slab_grow(t, size, most):
        return NULL
    sgl = <sg_t *>(<uint8_t *>t.slab + t.slab.used)
    t.slab.used += size
    chunk = &t.chunk[t.nr_chunks]
    # The last slot of the chunk before becomes a link.
    chunk.sgl, chunk.nr, chunk.first = sgl, nr, t.total_nents - 1 if t.nr_chunks else 0
    t.total_nents = chunk.first + nr
    t.nr_chunks += 1
    t.nr_allocs += 1
    return sgl

cdef void link_chunk(sg_t *last, sg_t *sgl) noexcept nogil:
    """Turn a slot into the link to a chunk (sg_chain)."""
    memset(last, 0, sizeof(sg_t))
    last.page_link = <uint64_t>sgl | SG_CHAIN

cdef void slabs_free(sgtable_t *t, slab_t *until) noexcept nogil:
    cdef slab_t *slab
    while t.slab != until:
        slab = t.slab
        t.slab = slab.prev
        buffer_free(slab, slab.size)

cdef void table_free(sgtable_t *t) noexcept nogil:
    cdef uint64_t allocs = t.nr_allocs, frees = t.nr_frees + t.nr_chunks
    slabs_free(t, NULL)
    free(t.chunk)
    memset(t, 0, sizeof(sgtable_t))
    t.nr_allocs, t.nr_frees = allocs, frees

cdef int table_alloc(mem_t *m, sgtable_t *t, uint64_t nents, uint64_t max_ents, uint64_t first) noexcept nogil:
    """Give an empty table nents blank entries; the first chunk has `first` slots unless that is 0. 0 or -ENOMEM."""
    cdef uint64_t left = nents, limit = first if first else max_ents, slots
    cdef sg_t *sgl
    cdef sg_t *last = NULL
    t.max_ents = max_ents
    while left:
        slots = left if left <= limit else limit
        sgl = chunk_alloc(m, t, slots, left)
        if sgl == NULL:
            table_free(t)
            return -ENOMEM
        memset(sgl, 0, slots * sizeof(sg_t))
        if last == NULL:
            t.sgl = sgl
        else:
            link_chunk(last, sgl)
        last = sgl + slots - 1
        left -= slots if left == slots else slots - 1
        limit = max_ents
    last.page_link |= SG_END
    t.nents = t.orig_nents = nents
    return 0

cdef sg_t *entry_at(sgtable_t *t, uint64_t index) noexcept nogil:
    """The slot of an entry of the table's own chunks, by bisection; index < total_nents."""
    cdef uint64_t low = 0, high = t.nr_chunks, middle
    while high - low > 1:
        middle = (low + high) >> 1
        if t.chunk[middle].first <= index:
            low = middle
        else:
            high = middle
    return t.chunk[low].sgl + (index - t.chunk[low].first)

cdef const char *first_breach(mem_t *m, sgtable_t *t, bint chained, uint64_t *where) noexcept nogil:
    """The first law that does not hold, and where; NULL when all do. A chained table has one link that is not a chunk's."""
    cdef uint64_t i, k, slots = 0, index = 0
    cdef chunk_t *chunk
    cdef sg_t *sg
    for i in range(t.nr_chunks):
        chunk = &t.chunk[i]
        if chunk.first != index:
            where[0] = index
            return "chunks follow each other"
        slots += chunk.nr
        for k in range(chunk.nr):
            sg = chunk.sgl + k
            where[0] = index
            if i + 1 < t.nr_chunks and k + 1 == chunk.nr:
                if sg.page_link != (<uint64_t>t.chunk[i + 1].sgl | SG_CHAIN) or sg.offset or sg.length:
                    return "the last slot of a chunk links to the next"
                break
            if sg_is_chain(sg):
                if not chained:
                    return "a link is the last slot of its chunk"
            elif sg_pfn(sg) and not entry_fits(m, sg_first_pfn(sg, m.page_shift), sg_nr_pages(sg, m.page_shift)):
                return "entries name pages of the Memory"
            elif t.prv != NULL and index >= t.orig_nents and (sg_pfn(sg) or sg.length):
                return "what follows the last entry is blank"
            index += 1
        if i + 1 == t.nr_chunks and not chained and not chunk.sgl[chunk.nr - 1].page_link & SG_END:
            return "the last slot carries the end mark"
    where[0] = t.total_nents
    if t.nr_chunks and slots != t.total_nents + t.nr_chunks - 1:
        return "slots are total_nents and the links"
    if not chained and (t.nents > t.total_nents or t.orig_nents > t.total_nents):
        return "entries fit their slots"
    if t.prv != NULL and t.prv != entry_at(t, t.orig_nents - 1):
        return "the last entry is the one that is extended"
    if t.nr_allocs - t.nr_frees != t.nr_chunks:
        return "chunks are freed once"
    return NULL

# ---- one thread at a time -------------------------------------------------------------------------------------------
cdef bint begin_reading(uint32_t *busy) noexcept nogil:
    cdef uint32_t seen = a32_load_relaxed(busy)
    while seen < BUSY_WRITER - 1:
        if a32_cas_acq_rel(busy, &seen, seen + 1):
            return True
    return False

cdef SGTable next_table(SGTable table):
    """The table that is chained behind one, or None."""
    return <SGTable>table.chained[0] if table.chained else None

cdef void end_reading(SGTable table, SGTable until) noexcept:
    """Let go of a table and those behind it, `until` not included."""
    cdef SGTable behind
    while table is not until:
        behind = next_table(table)
        a32_fetch_sub_acq_rel(&table.busy, 1)
        table = behind

# ---- tables -----------------------------------------------------------------------------------------------------------
@cython.no_gc_clear
cdef class SGTable:
    """Hold a scatterlist: entries (page, offset, length) and, once it is mapped for DMA, (dma_address, dma_length).

    Made by sg_alloc_table() and its kin; SGTable(mem) is an empty one. The CPU's entries are the first orig_nents, the
    device's the first nents; after an IOMMU merged them the two have nothing to do with each other by index. len() and
    iteration go by orig_nents; sgt[i] is the SGEntry in slot i, up to .capacity. Holds no references on pages. Kernel: struct sg_table.
    """

    def __cinit__(self, *args, **kwargs):
        memset(&self.t, 0, sizeof(sgtable_t))
        self.chained = []
        PyObject_GC_UnTrack(<void *>self.chained)       # or it could be cleared before __dealloc__ reads it

    def __init__(self, Memory mem not None):
        mem.ptr()
        if self.mem is not None:
            raise InvalidArgument("this table is set up already")
        self.mem = mem

    def __dealloc__(self):
        cdef SGTable behind
        cdef list chain = self.chained
        # A loop again: each table may have the last reference of the one behind it, and would go from within its own end.
        while chain:
            behind = chain.pop()
            behind.nr_users -= 1
            chain = behind.chained if Py_REFCNT(behind) == 1 else None
        table_free(&self.t)

    cdef mem_t *read(self) except NULL:
        cdef mem_t *m
        cdef SGTable table = self
        if self.mem is None:
            raise InvalidArgument("this table was never set up")
        m = self.mem.enter()
        # A loop: a chain may be longer than the stack is deep.
        while table is not None:
            if not begin_reading(&table.busy):
                end_reading(self, table)
                self.mem.leave()
                raise MMError(_errno.EBUSY, "another thread's call is changing this table: tables need the caller's lock")
            table = next_table(table)
        return m

    cdef void read_done(self) noexcept:
        end_reading(self, None)
        self.mem.leave()

    cdef mem_t *write(self, bint structure) except NULL:
        cdef mem_t *m
        cdef uint32_t seen = 0
        if self.mem is None:
            raise InvalidArgument("this table was never set up")
        m = self.mem.enter()
        if not a32_cas_acq_rel(&self.busy, &seen, BUSY_WRITER):
            self.mem.leave()
            raise MMError(_errno.EBUSY, "another thread's call is using this table: tables need the caller's lock")
        # Asked once it is ours: nobody can map or chain it any more.
        if structure and self.mapping is not None:
            self.write_done()
            raise MMError(_errno.EBUSY, "the table is mapped for DMA: dma_unmap_sgtable() first")
        if structure and self.nr_users:
            self.write_done()
            raise MMError(_errno.EBUSY, f"the table is chained behind {self.nr_users} other(s): free those first")
        return m

    cdef void write_done(self) noexcept:
        a32_store_release(&self.busy, 0)
        self.mem.leave()

    @property
    def nents(self):
        """Entries of the DMA view; before mapping the same as orig_nents."""
        return self.t.nents

    @nents.setter
    def nents(self, value):
        self.write(True)
        try:
            self.t.nents = entries_arg(self, value, "nents")
        finally:
            self.write_done()

    @property
    def orig_nents(self):
        """Entries of the CPU view."""
        return self.t.orig_nents

    @orig_nents.setter
    def orig_nents(self, value):
        self.write(True)
        try:
            self.t.orig_nents = entries_arg(self, value, "orig_nents")
        finally:
            self.write_done()

    @property
    def capacity(self):
        """Entries that fit: all slots of its chunks but the links."""
        return self.t.total_nents

    @property
    def mapped(self):
        """True while it is mapped for DMA."""
        return self.mapping is not None

    @property
    def chunks(self):
        """Slots of each chunk, links included; the chunks of tables chained behind it are theirs."""
        self.read()
        slots = [self.t.chunk[i].nr for i in range(self.t.nr_chunks)]
        self.read_done()
        return slots

    @property
    def entries(self):
        """Copy the entries of the CPU view: a structured array of SG_DTYPE, the DMA fields beside."""
        cdef uint64_t i = 0, n
        cdef uint8_t[::1] bytes_
        cdef sg_t *out
        cdef sg_t *sg
        self.read()
        try:
            n = max(self.t.orig_nents, self.t.nents)
            array = np.zeros(n, SG_DTYPE)
            if n:
                bytes_ = array.view(np.uint8)
                out = <sg_t *>&bytes_[0]
                with nogil:
                    sg = self.t.sgl
                    while sg != NULL and i < n:
                        out[i] = sg[0]
                        out[i].page_link >>= SG_PFN_SHIFT
                        out[i].dma_flags = 0
                        sg = next_sg(sg)
                        i += 1
            return array
        finally:
            self.read_done()

    def check(self):
        """Check the laws of the table: links, marks, slots, counts, and pages that exist. Raises BadPage."""
        cdef mem_t *m = self.read()
        cdef const char *law
        cdef uint64_t where = 0
        try:
            law = first_breach(m, &self.t, bool(self.chained), &where)
            if law != NULL:
                raise BadPage(law.decode(), f"slot or entry {where} of {self!r}")
        finally:
            self.read_done()

    def __len__(self):
        return self.t.orig_nents

    def __iter__(self):
        from .sgiter import for_each_sg
        return for_each_sg(self)

    def __getitem__(self, index):
        cdef uint64_t at, i
        cdef sg_t *sg
        self.read()
        try:
            wanted = index.__index__()
            n = self.t.orig_nents if self.chained else max(self.t.total_nents, self.t.orig_nents)
            if isinstance(self, SGAppendTable):
                n = self.t.orig_nents
            if not -n <= wanted < n:
                raise IndexError(f"entry {wanted} of a table of {n}")
            at = wanted + n if wanted < 0 else wanted
            if not self.chained:
                return entry_handle(self, entry_at(&self.t, at), at)
            sg = self.t.sgl
            for i in range(at):  # no-cython-lint
                sg = next_sg(sg)
                if sg == NULL:
                    raise IndexError(f"the list ends before entry {at}")
            return entry_handle(self, sg, at)
        finally:
            self.read_done()

    def __reduce__(self):
        raise TypeError("a scatterlist belongs to its Memory and cannot be pickled; pickle its .entries")

    def __repr__(self):
        return (f"<{type(self).__name__} of {self.t.orig_nents} entries in {self.t.nr_chunks} chunks"
                f"{', mapped to ' + str(self.t.nents) if self.mapping is not None else ''}>")


cdef class SGAppendTable(SGTable):
    """Hold a scatterlist that grows call by call: sg_alloc_append_table_from_pages(), or as the output of a pin call.

    max_segment is the longest entry that the output gets, in bytes; rounded down to a page when used. Kernel: struct
    sg_append_table.
    """

    def __cinit__(self, *args, **kwargs):
        self.max_segment = 0xffffffff       # also of one that only SGTable.__init__() sets up

    def __init__(self, Memory mem not None, *, max_segment=0xffffffff):
        cdef mem_t *m = mem.ptr()
        max_segment = count_arg(max_segment, "max_segment", ONE << m.page_shift, 0xffffffff)
        SGTable.__init__(self, mem)
        self.max_segment = max_segment

    @property
    def total_nents(self):
        """Slots that can hold entries; links are not counted."""
        return self.t.total_nents


cdef uint64_t entries_arg(SGTable table, value, str what) except? 0:
    if isinstance(table, SGAppendTable) or table.chained:
        raise InvalidArgument(f"{what} of an append table, or of a chained one, follows from what is in it")
    return count_arg(value, what, 0, table.t.total_nents)

cdef SGTable new_table(Memory mem):
    cdef SGTable table = SGTable.__new__(SGTable)
    table.mem = mem
    return table

cdef SGTable table_arg(object table):
    if not isinstance(table, SGTable):
        raise TypeError(f"an SGTable is wanted, not {table!r}")
    if (<SGTable>table).mem is None:
        raise InvalidArgument("this table was never set up")
    (<SGTable>table).mem.ptr()
    return table

cdef bint entry_fits(mem_t *m, uint64_t pfn, uint64_t nr) noexcept nogil:
    cdef device_t *d
    if nr == 0 or pfn == 0 or pfn >= m.nr_pages or nr > m.nr_pages - pfn:
        return nr == 0 and pfn != 0 and pfn < m.nr_pages
    if pfn + nr <= m.nr_ram:
        return True
    d = device_of(m, pfn)
    return d != NULL and pfn + nr <= d.end


cdef class SGEntry:
    """Stand for one entry of a table; a driver reads and sets its fields. Refused once the table is freed."""

    def __init__(self, *args):
        raise TypeError("entries are had from a table: for_each_sg(sgt), sgt[i]")

    cdef sg_t *ptr(self) except NULL:
        """The slot; the caller is between read() or write() and its end."""
        if self.generation != self.table.generation:
            raise InvalidArgument(f"entry {self.index} is of a table that was freed: its memory is gone")
        if sg_is_chain(self.sg):
            raise InvalidArgument(f"entry {self.index} became a chain link: a link is no data")
        return self.sg

    cdef int put(self, uint64_t pfn, uint64_t offset, uint64_t length) except -1:
        """Set the CPU fields; refused, with nothing changed, when they leave the Memory."""
        cdef mem_t *m = self.table.write(True)
        cdef sg_t *sg
        cdef sg_t new
        try:
            sg = self.ptr()
            new.page_link, new.offset, new.length = pfn << SG_PFN_SHIFT, <uint32_t>offset, <uint32_t>length
            if pfn and not entry_fits(m, sg_first_pfn(&new, m.page_shift), sg_nr_pages(&new, m.page_shift)):
                raise InvalidArgument(f"{length} bytes at offset {offset} of PFN {pfn:#x} leave this Memory, or the device "
                                      f"they start on: PFNs are 1..{m.nr_pages - 1:#x}", pfn=pfn)
            sg.page_link = new.page_link | (sg.page_link & SG_END)
            sg.offset, sg.length = new.offset, new.length
        finally:
            self.table.write_done()
        return 0

    cdef sg_t copy(self) except *:
        cdef sg_t sg
        self.table.read()
        try:
            sg = self.ptr()[0]
        finally:
            self.table.read_done()
        return sg

    @property
    def pfn(self):
        """PFN of its page, 0 when it is blank."""
        cdef sg_t sg = self.copy()
        return sg_pfn(&sg)

    @property
    def page(self):
        """Its first Page, None when it is blank (sg_page); setting it keeps offset and length (sg_assign_page)."""
        cdef sg_t sg = self.copy()
        return page_handle(self.table.mem, sg_pfn(&sg)) if sg_pfn(&sg) else None

    @page.setter
    def page(self, page):
        cdef sg_t sg = self.copy()
        self.put(0 if page is None else page_of(self.table.mem, page), sg.offset, sg.length)

    @property
    def offset(self):
        """Bytes from the start of its page to its first byte."""
        return self.copy().offset

    @offset.setter
    def offset(self, offset):
        cdef sg_t sg = self.copy()
        self.put(sg_pfn(&sg), count_arg(offset, "offset", 0, 0xffffffff), sg.length)

    @property
    def length(self):
        """Bytes."""
        return self.copy().length

    @length.setter
    def length(self, length):
        cdef sg_t sg = self.copy()
        self.put(sg_pfn(&sg), sg.offset, count_arg(length, "length", 0, 0xffffffff))

    @property
    def dma_address(self):
        """Where the device sees the DMA segment with this index (sg_dma_address)."""
        return self.copy().dma_address

    @dma_address.setter
    def dma_address(self, address):
        cdef uint64_t value = count_arg(address, "dma_address", 0, ~<uint64_t>0)
        self.table.write(False)
        try:
            self.ptr().dma_address = value
        finally:
            self.table.write_done()

    @property
    def dma_length(self):
        """Bytes of the DMA segment with this index (sg_dma_len)."""
        return self.copy().dma_length

    @dma_length.setter
    def dma_length(self, length):
        cdef uint64_t value = count_arg(length, "dma_length", 0, 0xffffffff)
        self.table.write(False)
        try:
            self.ptr().dma_length = <uint32_t>value
        finally:
            self.table.write_done()

    @property
    def dma_flags(self):
        """SG_DMA_* bits."""
        return self.copy().dma_flags

    @property
    def is_last(self):
        """True when it carries the end mark."""
        return bool(self.copy().page_link & SG_END)

    def set(self, page, length, offset):
        """Set page, length and offset at once; the end mark and the DMA fields stay (sg_set_page)."""
        self.put(page_of(self.table.mem, page), count_arg(offset, "offset", 0, 0xffffffff),
                 count_arg(length, "length", 0, 0xffffffff))

    def mark_end(self):
        """Mark it as the last one (sg_mark_end)."""
        self.table.write(False)
        try:
            self.ptr().page_link |= SG_END
        finally:
            self.table.write_done()

    def __eq__(self, other):
        if not isinstance(other, SGEntry):
            return NotImplemented
        return self.sg == (<SGEntry>other).sg and self.generation == (<SGEntry>other).generation \
            and self.table is (<SGEntry>other).table

    def __hash__(self):
        return hash((<uint64_t>self.sg, self.generation))

    def __reduce__(self):
        raise TypeError("an SGEntry belongs to its table and cannot be pickled")

    def __repr__(self):
        try:
            sg = self.copy()
        except (MMError, ValueError) as error:
            return f"<SGEntry {self.index}: {error}>"
        return (f"<SGEntry {self.index}: pfn={sg.page_link >> SG_PFN_SHIFT:#x} offset={sg.offset} length={sg.length} "
                f"dma={sg.dma_address:#x}+{sg.dma_length}{' END' if sg.page_link & SG_END else ''}>")


cdef uint64_t page_of(Memory mem, object page) except 0:
    if type(page) is not Page and type(page) is not Folio:
        raise TypeError(f"a Page is wanted, not {page!r}")
    if page.mem is not mem:
        raise InvalidArgument(f"{page!r} belongs to another Memory than the table", pfn=page.pfn)
    return page.pfn

cdef SGEntry entry_handle(SGTable table, sg_t *sg, uint64_t index):
    cdef SGEntry entry = SGEntry.__new__(SGEntry)
    entry.table = table
    entry.generation = table.generation
    entry.sg = sg
    entry.index = index
    return entry
