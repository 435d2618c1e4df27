"""An idea: in a list that only grows, one compare tells whether a whole folio follows."""
from libc.stdint cimport int64_t, uint64_t
from mmcore cimport FREED, Memory, PageList, folio_at, folio_order_of, free_folio, mem_t, page_is_head, put_pins, stat_add
from mmcore cimport NR_FOLL_PIN_RELEASED, OP_HEAD_LOOKUPS, OP_PINCOUNT_ATOMICS, OP_REF_ATOMICS


def grows(PageList pages not None):
    """Tell whether each PFN is above the one before. A list never changes, so that once is enough."""
    cdef uint64_t i
    cdef bint ok = True
    with nogil:
        for i in range(1, pages.n):
            ok &= pages.p[i] > pages.p[i - 1]
    return ok and pages.n and pages.p[0] != 0


def unpin_growing(PageList pages not None):
    """Drop one pin of each page of a list that grows."""
    cdef Memory mem = pages.mem
    cdef mem_t *m = mem.enter()
    cdef const uint64_t *p = pages.p
    cdef uint64_t i = 0, head, nr, k, groups = 0, large = 0
    cdef int result = 0
    with nogil:
        while i < pages.n and result >= 0:
            nr = folio_at(m.map, p[i], &head)
            k = min(head + nr - p[i], pages.n - i)
            if p[i + k - 1] != p[i] + k - 1:        # holes: the folio ends somewhere before
                k = 1
                while i + k < pages.n and p[i + k] < head + nr:
                    k += 1
            result = put_pins(m, &m.map[head], nr > 1, k)
            if result == FREED:
                free_folio(m, head, folio_order_of(&m.map[head]))
            groups += 1
            large += nr > 1
            i += k
        stat_add(m, NR_FOLL_PIN_RELEASED, <int64_t>i)
        stat_add(m, OP_HEAD_LOOKUPS, <int64_t>groups)
        stat_add(m, OP_REF_ATOMICS, <int64_t>groups)
        stat_add(m, OP_PINCOUNT_ATOMICS, <int64_t>large)
    mem.leave()
    if result < 0:
        raise RuntimeError(f"entry {i - k} is not pinned")
