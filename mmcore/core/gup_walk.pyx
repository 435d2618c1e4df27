"""What the walks share."""
from libc.stdlib cimport realloc
from mmcore.core.space cimport *

cdef void put_grabbed(mem_t *m, uint64_t head, uint32_t amount) noexcept nogil:
    """Take back references that this call added: no look at what they were for. The folio may have lost all others."""
    cdef page_t *page = &m.map[head]
    if a32_fetch_sub_acq_rel(&page._refcount, amount) == amount:
        free_folio(m, head, folio_order_of(page))

cdef bint more_leaves(gup_t *w) noexcept nogil:
    cdef uint64_t room = w.room + (w.room >> 1) + GUP_CHUNK
    cdef void *at
    if inject_fails(w.m, INJECT_LIST):
        return False
    at = realloc(w.leaf, room * sizeof(uint64_t))
    if at == NULL:
        return False
    w.leaf = <uint64_t *>at
    w.room = room
    return True

cdef void count_walk(gup_t *w) noexcept nogil:
    if w.pins:
        stat_add(w.m, NR_FOLL_PIN_ACQUIRED, <int64_t>w.pins)
    if w.ref_atomics:
        stat_add(w.m, OP_REF_ATOMICS, <int64_t>w.ref_atomics)
    if w.pincount_atomics:
        stat_add(w.m, OP_PINCOUNT_ATOMICS, <int64_t>w.pincount_atomics)
    if w.head_lookups:
        stat_add(w.m, OP_HEAD_LOOKUPS, <int64_t>w.head_lookups)
    if w.leaf_walks:
        stat_add(w.m, OP_LEAF_WALKS, <int64_t>w.leaf_walks)
    w.pins = w.ref_atomics = w.pincount_atomics = w.head_lookups = w.leaf_walks = 0

cdef int kind_of_file(mem_t *m, uint64_t mapping) noexcept nogil:
    """Asked under the registry's lock: a file that is still listed there is still allocated."""
    cdef spaces_t *s = spaces_of(m)
    cdef uint64_t id = mapping >> 2
    cdef int kind = -1
    if s == NULL:
        return -1
    pthread_mutex_lock(&s.lock)
    if id < s.nr_files and s.file[id] != NULL:
        kind = s.file[id].kind
    pthread_mutex_unlock(&s.lock)
    return kind
