"""The bytes behind pages, as writable memoryviews.

Units: memoryviews of unsigned bytes, format "B".
Raises: TypeError for what is no handle, BadPage for a free page.
Threads: any number at once; the bytes have no lock, as in the kernel.
Kernel: page_address(), kmap_local_folio().
"""
cimport cython
from cpython.buffer cimport PyBuffer_FillInfo
from libc.stdint cimport uint8_t, uint64_t
from mmcore.core.folio cimport *

__all__ = ["page_address", "folio_address"]


# The collector must not take the Memory from it: a view may still be released, which counts there.
@cython.no_gc_clear
cdef class PageBytes:
    """The bytes of one page or folio, writable through the buffer protocol; keeps the Memory open."""
    cdef Memory mem
    cdef uint8_t *at
    cdef Py_ssize_t size

    def __getbuffer__(self, Py_buffer *view, int flags):
        self.mem.ptr()
        PyBuffer_FillInfo(view, self, self.at, self.size, 0, flags)
        self.mem.views += 1

    def __releasebuffer__(self, Py_buffer *view):
        self.mem.views -= 1

cdef object bytes_of(Memory mem, uint64_t pfn, uint64_t nr):
    cdef PageBytes view = PageBytes.__new__(PageBytes)
    cdef uint64_t i
    view.mem = mem
    for i in range(nr):
        view.at = page_bytes(&mem.m, pfn + i)
    view.at = mem.m.bytes + (pfn << mem.m.page_shift)
    view.size = nr << mem.m.page_shift
    return memoryview(view)


def page_address(page):
    """Return a writable memoryview of the page's bytes; zeros when nobody wrote them since it was allocated.

    Of the zero pages and of page tables the view is read-only. The view keeps the Memory from closing, but takes no reference on
    the page. Raises BadPage for a free page.
    """
    cdef uint64_t pfn
    cdef Memory mem = page_arg(page, &pfn)
    cdef uint64_t head = compound_head_pfn(mem.m.map, pfn)
    if refs_load(&mem.m.map[head]) == 0:
        raise bad_page(mem, BAD_FREE, pfn, 0, "page_address()")
    view = bytes_of(mem, pfn, 1)
    return view.toreadonly() if not_to_write(&mem.m, head) else view


def folio_address(folio):
    """Return a writable memoryview of all bytes of a folio; as page_address."""
    cdef uint64_t pfn
    cdef Memory mem = folio_arg(folio, &pfn, True)
    view = bytes_of(mem, pfn, ONE << folio_order_of(&mem.m.map[pfn]))
    return view.toreadonly() if not_to_write(&mem.m, pfn) else view
