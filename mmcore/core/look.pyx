"""Helpers that only look at pages and folios. A look without a reference may be stale at once, as in the kernel.

Units: PFNs, counts and orders: int; sizes: bytes.
Raises: TypeError for what is no handle, InvalidArgument for a tail where a folio is wanted, a PFN beyond the end, a
    closed Memory.
Threads: any number at once; no lock, no reference.
Kernel: the functions and macros of these names in mm.h and page-flags.h.
"""
from libc.stdint cimport int32_t, uint64_t
from mmcore.core.folio cimport *

from .errors import InvalidArgument

__all__ = [
    "page_to_pfn", "pfn_to_page", "page_folio", "compound_head", "PageHead", "PageTail", "PageCompound", "PageDirty",
    "compound_order", "compound_nr", "is_zero_page", "is_huge_zero_folio", "is_huge_zero_page", "folio_order",
    "folio_nr_pages", "folio_size", "folio_test_large", "folio_page", "folio_page_idx", "folio_remaining_pages",
    "folio_ref_count", "folio_mapcount", "folio_expected_ref_count", "folio_maybe_dma_pinned",
    "folio_is_longterm_pinnable",
]

# ---- pages ---------------------------------------------------------------------------------------------------------------
def page_to_pfn(page):
    """Return the page frame number of a Page (int)."""
    cdef uint64_t pfn
    page_arg(page, &pfn)
    return pfn


def pfn_to_page(Memory mem not None, pfn):
    """Return the Page of a PFN. Raises InvalidArgument outside of mem_map."""
    return mem.page(pfn)


def page_folio(page):
    """Return the Folio that holds a page; without a reference it may be stale at once."""
    cdef uint64_t pfn
    cdef Memory mem = page_arg(page, &pfn)
    return folio_handle(mem, compound_head_pfn(mem.m.map, pfn))


def compound_head(page):
    """Return the first Page of the page's folio: the page itself when it is no tail."""
    cdef uint64_t pfn
    cdef Memory mem = page_arg(page, &pfn)
    return page_handle(mem, compound_head_pfn(mem.m.map, pfn))


def PageHead(page):
    """Tell whether a page is the first of a folio of order >= 1."""
    cdef uint64_t pfn
    cdef Memory mem = page_arg(page, &pfn)
    return bool(page_is_head(&mem.m.map[pfn]))


def PageTail(page):
    """Tell whether a page is a tail of a folio."""
    cdef uint64_t pfn
    cdef Memory mem = page_arg(page, &pfn)
    return bool(page_is_tail(&mem.m.map[pfn]))


def PageCompound(page):
    """Tell whether a page is the head or a tail of a folio of order >= 1."""
    cdef uint64_t pfn
    cdef Memory mem = page_arg(page, &pfn)
    return bool(page_is_head(&mem.m.map[pfn]) or page_is_tail(&mem.m.map[pfn]))


def PageDirty(page):
    """Tell whether the page's folio is dirty; the flag is the head's."""
    cdef uint64_t pfn
    cdef Memory mem = page_arg(page, &pfn)
    return bool(test_flag(&mem.m.map[compound_head_pfn(mem.m.map, pfn)], PG_dirty))


def compound_order(page):
    """Return log2 of the pages of a folio, given its head; 0 for a tail or a small folio, as the kernel does."""
    cdef uint64_t pfn
    cdef Memory mem = page_arg(page, &pfn)
    return folio_order_of(&mem.m.map[pfn])


def compound_nr(page):
    """Return the pages of a folio, given its head; 1 for a tail or a small folio, as the kernel does."""
    cdef uint64_t pfn
    cdef Memory mem = page_arg(page, &pfn)
    return ONE << folio_order_of(&mem.m.map[pfn])


def is_zero_page(page):
    """Tell whether this is the permanent zero page, which is never pinned."""
    cdef uint64_t pfn
    cdef Memory mem = page_arg(page, &pfn)
    return pfn == mem.m.zero_pfn


def is_huge_zero_folio(folio):
    """Tell whether this is the huge zero folio, which is pinned as any large folio is."""
    cdef uint64_t pfn
    cdef Memory mem = folio_arg(folio, &pfn, False)
    return pfn == mem.m.huge_zero_pfn


def is_huge_zero_page(page):
    """Tell whether a page belongs to the huge zero folio."""
    cdef uint64_t pfn
    cdef Memory mem = page_arg(page, &pfn)
    return compound_head_pfn(mem.m.map, pfn) == mem.m.huge_zero_pfn


# ---- folios -----------------------------------------------------------------------------------------------------------------
def folio_order(folio):
    """Return log2 of a folio's pages."""
    cdef uint64_t pfn
    cdef Memory mem = folio_arg(folio, &pfn, False)
    return folio_order_of(&mem.m.map[pfn])


def folio_nr_pages(folio):
    """Return a folio's base pages."""
    cdef uint64_t pfn
    cdef Memory mem = folio_arg(folio, &pfn, False)
    return ONE << folio_order_of(&mem.m.map[pfn])


def folio_size(folio):
    """Return a folio's size in bytes."""
    cdef uint64_t pfn
    cdef Memory mem = folio_arg(folio, &pfn, False)
    return (ONE << folio_order_of(&mem.m.map[pfn])) << mem.m.page_shift


def folio_test_large(folio):
    """Tell whether a folio has more than one page."""
    cdef uint64_t pfn
    cdef Memory mem = folio_arg(folio, &pfn, False)
    return bool(page_is_head(&mem.m.map[pfn]))


def folio_page(folio, n):
    """Return the n-th Page of a folio, from 0. Raises InvalidArgument past its end, where the kernel does not look."""
    cdef uint64_t pfn
    cdef Memory mem = folio_arg(folio, &pfn, False)
    return page_handle(mem, pfn + count_arg(n, "page index", 0, (ONE << folio_order_of(&mem.m.map[pfn])) - 1))

cdef Memory folio_and_index(object folio, object page, uint64_t *head, uint64_t *index):
    """A folio and which of its pages a Page is."""
    cdef uint64_t pfn
    cdef Memory mem = folio_arg(folio, head, False)
    if page_arg(page, &pfn) is not mem:
        raise InvalidArgument("the page belongs to another Memory than the folio", pfn=pfn)
    index[0] = pfn - head[0]
    if mm_unlikely(index[0] >= ONE << folio_order_of(&mem.m.map[head[0]])):
        raise InvalidArgument(f"PFN {pfn:#x} is not in the folio at {head[0]:#x} "
                              f"({ONE << folio_order_of(&mem.m.map[head[0]])} pages)", pfn=pfn)
    return mem


def folio_page_idx(folio, page):
    """Return which page of a folio a Page is, from 0. Raises InvalidArgument when it is not in the folio."""
    cdef uint64_t head, index
    folio_and_index(folio, page, &head, &index)
    return index


def folio_remaining_pages(folio, page, max_pages=None):
    """Return how many pages of a folio follow from `page` on, that page included, at most max_pages.

    Proposed on the list in 2025 and not merged. Raises InvalidArgument when the page is not in the folio.
    """
    cdef uint64_t head, index
    cdef uint64_t most = ~<uint64_t>0 if max_pages is None else count_arg(max_pages, "max_pages", 0, ~<uint64_t>0)
    cdef Memory mem = folio_and_index(folio, page, &head, &index)
    return remaining_pages(head, ONE << folio_order_of(&mem.m.map[head]), head + index, most)


def folio_ref_count(folio):
    """Return a folio's references, a C int."""
    cdef uint64_t pfn
    cdef Memory mem = folio_arg(folio, &pfn, False)
    return <int32_t>refs_load(&mem.m.map[pfn])


def folio_mapcount(folio):
    """Return the mappings of all pages of a folio."""
    cdef uint64_t pfn
    cdef Memory mem = folio_arg(folio, &pfn, False)
    return folio_mapcount_seen(&mem.m.map[pfn])


def folio_expected_ref_count(folio):
    """Return the references that mappings and caches explain; the caller's own and pins are not among them."""
    cdef uint64_t pfn
    cdef Memory mem = folio_arg(folio, &pfn, False)
    return expected_refs(&mem.m, pfn)


def folio_maybe_dma_pinned(folio):
    """Tell whether a folio may be pinned: exact for a large one; for a small one True also at 1024 plain references."""
    cdef uint64_t pfn
    cdef Memory mem = folio_arg(folio, &pfn, False)
    cdef page_t *head = &mem.m.map[pfn]
    if page_is_head(head):
        return <int32_t>pincount_load(head) > 0
    return refs_load(head) >= GUP_PIN_COUNTING_BIAS


def folio_is_longterm_pinnable(folio):
    """Tell whether a folio may stay pinned for long: not in CMA or ZONE_MOVABLE, nor fsdax or coherent device memory.

    The zero page always may.
    """
    cdef uint64_t pfn
    cdef Memory mem = folio_arg(folio, &pfn, False)
    return bool(longterm_pinnable(&mem.m, pfn))
