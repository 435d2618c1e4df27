"""Broken pages (hwpoison): the body of Memory.memory_failure()."""
from libc.stdint cimport uint64_t
from mmcore.core.buddy cimport dissolve_pooled, region_is_free, region_take_at
from mmcore.core.folio cimport *

import errno as _errno

from .errors import InvalidArgument, MMError

__all__ = ["memory_failure"]


def memory_failure(Memory mem not None, page):
    """Mark a page as broken; see Memory.memory_failure."""
    cdef mem_t *m = mem.ptr()
    cdef uint64_t pfn, head
    cdef region_t *r
    if page_arg(page, &pfn) is not mem:
        raise InvalidArgument("the page belongs to another Memory", pfn=pfn)
    r = region_of(m, pfn)
    head = compound_head_pfn(m.map, pfn)
    if test_flag(&m.map[pfn], PG_reserved) or head == m.huge_zero_pfn:
        raise MMError(_errno.EBUSY, f"PFN {pfn:#x} is the zero page, the huge zero folio or reserved: it cannot be taken "
                                    "out of use", pfn=pfn)
    if test_flag(&m.map[pfn], PG_hwpoison):
        raise MMError(getattr(_errno, "EHWPOISON", 133), f"PFN {pfn:#x} was marked as broken before", pfn=pfn)
    if test_flag(&m.map[head], PG_mm_pool):
        # A hugetlb folio that waits in its pool is broken up: all but the broken page become ordinary memory.
        dissolve_pooled(m, head, pfn)
    elif r != NULL:
        # A free page leaves the allocator, so that nobody gets it.
        pthread_mutex_lock(&r.lock)
        if region_is_free(m, r, pfn):
            region_take_at(m, r, pfn, 0)
            page_init(&m.map[pfn], r.zone_flags | (ONE << PG_mm_retired), 0)
        pthread_mutex_unlock(&r.lock)
    set_flag(&m.map[pfn], PG_hwpoison)
    head = compound_head_pfn(m.map, pfn)
    if page_is_head(&m.map[head]):
        a64_fetch_or_relaxed(&as_folio(&m.map[head])._flags_1, ONE << PG_has_hwpoisoned)
    stat_add(m, NR_POISONED, 1)
