"""The append sink."""
from libc.string cimport memset

cdef void append_begin(append_t *a, mem_t *m, sgtable_t *t, uint64_t nr_pages, uint32_t offset, uint64_t max_segment,
                       uint64_t left_pages) noexcept nogil:
    cdef uint64_t end
    cdef chunk_t *chunk
    memset(a, 0, sizeof(append_t))
    a.m, a.t, a.shift, a.offset = m, t, m.page_shift, offset
    a.max_pages, a.left, a.later = max_segment >> m.page_shift, nr_pages, left_pages
    a.before, a.slab = t[0], t.slab
    if t.slab != NULL:
        a.slab_used = t.slab.used
    if t.max_ents == 0:
        t.max_ents = (ONE << m.page_shift) // sizeof(sg_t)
    if t.prv == NULL:
        return
    a.sg, a.prv_length = t.prv, t.prv.length
    chunk = &t.chunk[t.nr_chunks - 1]
    # Behind the end mark there is no next slot, even where the chunk has some.
    a.end = a.sg if a.sg.page_link & SG_END else chunk.sgl + chunk.nr - 1
    end = <uint64_t>a.sg.offset + a.sg.length
    if sg_pfn(a.sg) and not end & ((ONE << a.shift) - 1):
        end >>= a.shift
        a.next_pfn = sg_pfn(a.sg) + end
        a.room = a.max_pages - end if end < a.max_pages else 0

cdef int add_chunk(append_t *a, uint64_t want) noexcept nogil:
    """Go on in a new chunk. The entry in the last slot, which becomes the link, moves there."""
    cdef sgtable_t *t = a.t
    cdef uint64_t slots = want if want < t.max_ents else t.max_ents
    cdef sg_t *sgl
    if a.sg != NULL and a.sg == a.before.prv:
        a.why = SG_WHY_CLOSED
        return -EINVAL
    if a.sg != NULL and t.chunk[t.nr_chunks - 1].nr < t.max_ents:
        # The kernel links here as well, and then frees by arithmetic that expects the link in the last slot of a full
        # chunk: what hangs on this one would leak.
        a.why = SG_WHY_PROMISE
        return -EINVAL
    sgl = chunk_alloc(a.m, t, slots, want)
    if sgl == NULL:
        a.why = SG_WHY_NO_MEMORY
        return -ENOMEM
    if a.sg == NULL:
        t.sgl = sgl
        a.sg = sgl - 1
    else:
        sgl[0] = a.sg[0]
        link_chunk(a.sg, sgl)
        a.sg = sgl
    a.end = sgl + slots - 1
    return 0

cdef int append_next(append_t *a) noexcept nogil:
    return add_chunk(a, a.left + a.later + (a.sg != NULL))

cdef int append_mixed(append_t *a, uint64_t pfn, uint64_t nr) noexcept nogil:
    """A run that reaches ZONE_DEVICE: cut where the device map changes; entries do not cross that."""
    cdef mem_t *m = a.m
    cdef device_t *d
    cdef uint64_t start, end, take
    cdef int error
    while nr:
        d = device_of(m, pfn)
        start = d.start if d != NULL else 0
        end = d.end if d != NULL else m.nr_ram
        if pfn == start:
            a.next_pfn = 0
        take = min(nr, end - pfn)
        error = append_same(a, pfn, take)
        if error:
            return error
        pfn += take
        nr -= take
    return 0

cdef inline uint64_t run_of(const uint64_t *p, uint64_t n) noexcept nogil:
    """Length of the prefix whose PFNs follow each other; n is at least 1.

    Blocks of 32 vectorise, and cost more than a short run: a block is entered when its last entry fits, which says nearly
    always that all do.
    """
    cdef uint64_t k = 1, j, different, first = p[0]
    if n < 2 or p[1] != first + 1:
        return 1
    while k + 32 <= n and p[k + 31] == first + k + 31:
        different = 0
        for j in range(32):
            different |= p[k + j] ^ (first + k + j)
        if different:
            break
        k += 32
    while k + 8 <= n and p[k + 7] == first + k + 7:
        different = 0
        for j in range(8):
            different |= p[k + j] ^ (first + k + j)
        if different:
            break
        k += 8
    while k < n and p[k] == first + k:
        k += 1
    return k

cdef int append_list(append_t *a, const uint64_t *pfns, uint64_t n) noexcept nogil:
    # What append_run() does for each run, with the state in locals: stores to entries would make the compiler load it anew.
    cdef uint64_t i = 0, k, pfn, take, rest = a.left - n    # pages that may come behind the list, in the same call
    cdef uint64_t next_pfn = a.next_pfn, room = a.room, max_pages = a.max_pages, nr_ram = a.m.nr_ram
    cdef uint32_t offset = a.offset, page = <uint32_t>(ONE << a.shift)
    cdef unsigned shift = a.shift
    cdef sg_t *sg = a.sg
    cdef sg_t *end = a.end
    cdef sg_t *before
    cdef int error
    if mm_unlikely(n > a.left):
        a.why = SG_WHY_TOO_MANY
        return -EINVAL
    while i < n:
        if offset == 0 and pfns[i] != next_pfn:
            # Pages that nothing follows: all there is to do is to write their entries.
            before = sg
            while i + 1 < n and sg != end and pfns[i] - 1 < nr_ram - 1 and pfns[i + 1] != pfns[i] + 1:
                sg += 1
                write_sg(sg, pfns[i], 0, page)
                i += 1
            if sg != before:
                next_pfn, room = pfns[i - 1] + 1, max_pages - 1
        pfn = pfns[i]
        if mm_unlikely(pfn == 0):
            a.why, a.bad = SG_WHY_NULL_PAGE, i
            return -EINVAL
        k = run_of(pfns + i, n - i)
        i += k
        if mm_unlikely(pfn + k > nr_ram):
            a.sg, a.next_pfn, a.room, a.offset, a.left = sg, next_pfn, room, offset, rest + n - i + k
            error = append_mixed(a, pfn, k)
            if error:
                return error
            sg, end, next_pfn, room, offset = a.sg, a.end, a.next_pfn, a.room, a.offset
            continue
        if pfn == next_pfn:
            take = k if k < room else room
            sg.length += <uint32_t>(take << shift)
            room -= take
            pfn += take
            k -= take
        while k:
            if mm_unlikely(sg == end):
                a.sg, a.left = sg, rest + n - i + k
                error = append_next(a)
                if error:
                    return error
                sg, end = a.sg, a.end
            take = k if k < max_pages else max_pages
            sg += 1
            write_sg(sg, pfn, offset, <uint32_t>((take << shift) - offset))
            offset = 0
            room = max_pages - take
            pfn += take
            k -= take
        next_pfn = pfn
    a.sg, a.next_pfn, a.room, a.offset, a.left = sg, next_pfn, room, offset, rest
    return 0

cdef int append_finish(append_t *a, uint64_t tail) noexcept nogil:
    cdef sgtable_t *t = a.t
    cdef chunk_t *chunk
    cdef uint64_t slots, used
    cdef int error
    if a.sg == NULL:
        return 0
    a.sg.length -= <uint32_t>tail
    if a.sg != t.prv:
        if a.later and a.sg == a.end:
            # More will come: the last slot of a chunk is for the link.
            error = add_chunk(a, 1 + a.later)
            if error:
                return error
        chunk = &t.chunk[t.nr_chunks - 1]
        used = a.sg - chunk.sgl + 1
        if t.nr_chunks > a.before.nr_chunks:
            slots = used + a.later if a.later < t.max_ents - used else t.max_ents
            t.slab.used -= (chunk.nr - slots) * sizeof(sg_t)
            t.total_nents -= chunk.nr - slots
            chunk.nr = slots
            memset(chunk.sgl + used, 0, (slots - used) * sizeof(sg_t))
        chunk.sgl[chunk.nr - 1].page_link |= SG_END
        t.nents = t.orig_nents = chunk.first + used
        t.prv = a.sg
    if a.later == 0:
        a.sg.page_link |= SG_END
    return 0

cdef void append_abort(append_t *a) noexcept nogil:
    cdef sgtable_t *t = a.t
    cdef chunk_t *chunk
    cdef sg_t *end
    t.nr_frees += t.nr_chunks - a.before.nr_chunks
    slabs_free(t, a.slab)
    if t.slab != NULL:
        t.slab.used = a.slab_used
    t.nr_chunks, t.total_nents = a.before.nr_chunks, a.before.total_nents
    t.sgl, t.prv = a.before.sgl, a.before.prv
    t.nents, t.orig_nents = a.before.nents, a.before.orig_nents
    if t.prv != NULL:
        t.prv.length = a.prv_length
        chunk = &t.chunk[t.nr_chunks - 1]
        end = chunk.sgl + chunk.nr - 1
        if t.prv != end:
            memset(t.prv + 1, 0, (end - t.prv) * sizeof(sg_t))
            end.page_link = SG_END
