"""The bytes behind pages, as writable memoryviews.

Units: memoryviews of unsigned bytes, format "B".
Raises: TypeError for what is no handle, BadPage for a free page.
Threads: any number at once; the bytes have no lock, as in the kernel.
Kernel: page_address(), kmap_local_folio().
"""
cimport cython
from cpython.buffer cimport PyBuffer_FillInfo
from mmcore.core.folio cimport *

__all__ = ["page_address", "folio_address"]


cdef bint in_view(mem_t *m, uint64_t pfn) noexcept nogil:
    cdef view_t *v
    cdef bint found = False
    mm_full_barrier()
    if mm_likely(a64_load_relaxed(<uint64_t *>&m.views) == 0):
        return False
    pthread_mutex_lock(&m.bytes_lock)
    v = m.views
    while v != NULL and not found:
        found = v.start <= pfn < v.end
        v = v.next
    pthread_mutex_unlock(&m.bytes_lock)
    return found

cdef void view_add(mem_t *m, view_t *v) noexcept nogil:
    pthread_mutex_lock(&m.bytes_lock)
    v.next = m.views
    a64_store_relaxed(<uint64_t *>&m.views, <uint64_t>v)
    pthread_mutex_unlock(&m.bytes_lock)
    mm_full_barrier()

cdef void view_del(mem_t *m, view_t *v) noexcept nogil:
    cdef view_t **at = &m.views
    pthread_mutex_lock(&m.bytes_lock)
    while at[0] != v:
        at = &at[0].next
    a64_store_relaxed(<uint64_t *>at, <uint64_t>v.next)
    pthread_mutex_unlock(&m.bytes_lock)

cdef bint any_table(const mem_t *m, const view_t *v) noexcept nogil:
    cdef uint64_t pfn
    for pfn in range(v.start, v.end):
        if page_type_is(&m.map[pfn], PGTY_table):
            return not mm_planted(5)
    return False


# The collector must not take the Memory from it: a view may still be released, which counts there.
@cython.no_gc_clear
cdef class PageBytes:
    def __getbuffer__(self, Py_buffer *view, int flags):
        self.mem.ptr()
        PyBuffer_FillInfo(view, self, self.at, self.size, self.readonly, flags)
        if self.exports == 0 and not self.readonly:
            view_add(&self.mem.m, &self.view)
            # Looked at now that it is listed: between two exports, a frame that was freed may have become a table.
            if any_table(&self.mem.m, &self.view):
                view_del(&self.mem.m, &self.view)
                raise BufferError(f"PFNs {self.view.start:#x}..{self.view.end - 1:#x} were freed, and there is a page table among them "
                                  "now: take a new view of what is wanted")
        self.mem.views += 1
        self.exports += 1

    def __releasebuffer__(self, Py_buffer *view):
        if self.exports == 1 and not self.readonly:
            view_del(&self.mem.m, &self.view)
        self.exports -= 1
        self.mem.views -= 1

cdef object bytes_of(Memory mem, uint64_t pfn, bint whole, str call):
    """A view of a page that somebody holds, or of its whole folio; read-only when others count on what is there."""
    cdef mem_t *m = &mem.m
    cdef PageBytes bytes = PageBytes.__new__(PageBytes)
    cdef uint64_t head = compound_head_pfn(m.map, pfn), nr = 1, i
    cdef unsigned order
    # A reference of our own: another thread may free the page meanwhile, and the flag of its bytes is then no longer ours to set.
    if not ref_add_unless_zero(&m.map[head], 1):
        raise bad_page(mem, BAD_FREE, pfn, 0, call)
    order = folio_order_of(&m.map[head])
    try:
        if compound_head_pfn(m.map, pfn) != head:
            raise bad_page(mem, BAD_FREE, pfn, 0, call)
        if whole:
            nr = ONE << order
        for i in range(nr):
            page_bytes(m, pfn + i)
        bytes.mem = mem
        bytes.at = m.bytes + (pfn << m.page_shift)
        bytes.size = nr << m.page_shift
        bytes.readonly = not_to_write(m, head)
        bytes.view.start, bytes.view.end = pfn, pfn + nr
        return memoryview(bytes)
    finally:
        if put_refs(m, &m.map[head], order != 0, 1) == FREED:
            free_folio(m, head, order)


def page_address(page):
    """Return a writable memoryview of the page's bytes; zeros when nobody wrote them since it was allocated.

    Of the zero pages and of page tables the view is read-only. The view keeps the Memory from closing, but takes no reference on
    the page: one that is kept when the page is freed shows whatever the frame is used for next, but for page tables, which are made
    of frames that nobody can write. Raises BadPage for a free page.
    """
    cdef uint64_t pfn
    cdef Memory mem = page_arg(page, &pfn)
    return bytes_of(mem, pfn, False, "page_address()")


def folio_address(folio):
    """Return a writable memoryview of all bytes of a folio; as page_address."""
    cdef uint64_t pfn
    cdef Memory mem = folio_arg(folio, &pfn, True)
    return bytes_of(mem, pfn, True, "folio_address()")
