"""SGAppendTable as the output of get_user_pages* and pin_user_pages*."""
cimport cython
from mmcore.core.hook cimport pin_watchers, pins_begin, pins_t, pins_tell
from mmcore.core.output cimport GupOutput, leaf_count, leaf_pfn, leaf_word, register_output, release_leaves
from mmcore.core.walk cimport range_pins

import errno as _errno

from .errors import InvalidArgument, MMError
from .scatterlist import SGAppendTable as _SGAppendTable

cdef uint64_t UNBOUNDED = ONE << 40     # pages that may follow: nobody said how many

cdef uint64_t sg_take(gup_output_t *base, const uint64_t *leaf, uint64_t nr) noexcept nogil:
    cdef sg_output_t *out = <sg_output_t *>base
    cdef uint64_t i, count
    cdef int error
    for i in range(nr):
        count = leaf_count(leaf[i])
        error = append_run(&out.a, leaf_pfn(leaf[i]), count)
        if mm_unlikely(error != 0):
            # Some pages of this leaf may be in the table: `pages` does not count them, and the walk releases them.
            base.error = error
            return i
        out.pages += count
    return nr

cdef inline sg_t *following(sg_t *sg) noexcept nogil:
    """The next slot that holds an entry, where the end may not be marked yet."""
    sg += 1
    return sg_chain_ptr(sg) if sg_is_chain(sg) else sg

cdef inline sg_t *first_added(const append_t *a, uint64_t *skip) noexcept nogil:
    """The entry where an append began, and how many of its pages were there before."""
    cdef sg_t *sg = a.before.prv
    cdef uint64_t mask = (ONE << a.shift) - 1
    skip[0] = 0
    if sg == NULL:
        return a.t.sgl
    if sg_is_chain(sg):         # it moved when its slot became the link
        sg = sg_chain_ptr(sg)
    skip[0] = ((sg.offset & mask) + <uint64_t>a.prv_length + mask) >> a.shift
    return sg

cdef void release_entries(mem_t *m, sg_t *sg, uint64_t skip, uint64_t n, bint pins) noexcept nogil:
    cdef uint64_t k, word
    while n:
        k = sg_nr_pages(sg, m.page_shift) - skip
        if k > n:
            k = n
        if k:
            word = leaf_word(sg_first_pfn(sg, m.page_shift) + skip, k)
            release_leaves(m, &word, 1, pins)
        skip = 0
        n -= k
        if n:
            sg = following(sg)

cdef void append_release(append_t *a, uint64_t n, bint pins) noexcept nogil:
    cdef uint64_t skip
    cdef sg_t *sg
    if n:
        sg = first_added(a, &skip)
        release_entries(a.m, sg, skip, n, pins)

cdef void table_release(mem_t *m, sgtable_t *t, uint64_t n, bint pins) noexcept nogil:
    release_entries(m, t.sgl, 0, n, pins)

cdef object tell_entries(Memory mem, sg_t *sg, uint64_t skip, uint64_t n, int sign):
    cdef pins_t pins
    cdef uint64_t k
    pins_begin(&pins)
    while n:
        k = min(sg_nr_pages(sg, mem.m.page_shift) - skip, n)
        range_pins(&mem.m, sg_first_pfn(sg, mem.m.page_shift) + skip, k, &pins)
        skip = 0
        n -= k
        if n:
            sg = following(sg)
    pins_tell(mem, &pins, sign)


@cython.no_gc_clear
cdef class SGTableOutput(GupOutput):
    """The sink behind output=SGAppendTable (a new table, complete), and output=table (appended; more may follow)."""
    cdef SGAppendTable table
    cdef sg_output_t out
    cdef bint is_open           # the table is ours to write, and the append is begun
    cdef bint is_new

    cdef gup_output_t *begin(self, Memory mem, uint64_t nr_pages) except NULL:
        cdef mem_t *m
        if self.is_new:
            self.table = _SGAppendTable(mem)
        elif self.table.mem is not mem:
            raise InvalidArgument("output=: the table belongs to another Memory than the address space")
        m = self.table.write(True)
        append_begin(&self.out.a, m, &self.table.t, nr_pages, 0, self.table.max_segment, 0 if self.is_new else UNBOUNDED)
        self.is_open = True
        self.out.base.take = sg_take
        return &self.out.base

    def __dealloc__(self):
        # A walk that got nothing ends the call without a word to the sink.
        self.drop()

    cdef void drop(self) noexcept:
        if self.is_open:
            self.is_open = False
            append_abort(&self.out.a)
            self.table.write_done()

    cdef void give_back(self, mem_t *m, bint pins):
        append_release(&self.out.a, self.out.pages, pins)
        self.out.pages = 0
        self.drop()

    cdef object finish(self, Memory mem, bint pins):
        cdef int error = self.out.base.error, why
        cdef uint64_t skip
        cdef sg_t *sg
        table = self.table
        if error == 0 and self.out.pages:
            error = append_finish(&self.out.a, 0)
        if error:
            why = self.out.a.why
            self.give_back(&mem.m, pins)
            if why == SG_WHY_NO_MEMORY:
                raise MMError(_errno.ENOMEM, "no memory for a chunk of the scatterlist that is the output: the table is as it was, "
                                             "and nothing stays pinned")
            raise InvalidArgument("the output is a table that is complete, or was promised fewer pages (left_pages): give the "
                                  "call a new one")
        if self.out.pages == 0:
            self.drop()
            return table
        self.is_open = False
        self.table.write_done()
        if mm_unlikely(pin_watchers) and pins:
            sg = first_added(&self.out.a, &skip)
            tell_entries(mem, sg, skip, self.out.pages, 1)
        return table


def _make(output):
    cdef SGTableOutput sink = SGTableOutput.__new__(SGTableOutput)
    sink.is_new = output is _SGAppendTable
    if not sink.is_new:
        sink.table = output
        if sink.table.mem is None:
            raise InvalidArgument("output=: this table was never set up")
    return sink

register_output(_SGAppendTable, _make)
