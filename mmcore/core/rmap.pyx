"""From a page to the entries that map it."""

cdef int visit_vma(mm_t *mm, vma_t *v, uint64_t index, uint64_t nr, rmap_fn fn, void *arg) noexcept nogil:
    """Call fn for the part of [index, index + nr) that a VMA spans."""
    cdef uint64_t pages = (v.end - v.start) >> mm.m.page_shift
    cdef uint64_t first = max(index, v.pgoff), last = min(index + nr, v.pgoff + pages)
    if first >= last:
        return 0
    return fn(mm, v, v.start + ((first - v.pgoff) << mm.m.page_shift), first - index, last - first, arg)

cdef int visit_mm(mm_t *mm, const file_t *f, uint64_t index, uint64_t nr, rmap_fn fn, void *arg) noexcept nogil:
    """The VMAs of one mm that may map the pages: all of the file's, or those that have anonymous pages."""
    cdef uint64_t i
    cdef int stop = 0
    pthread_mutex_lock(&mm.rmap_lock)
    for i in range(mm.nr_vmas):
        if (mm.vma[i].file == f) if f != NULL else a32_load_relaxed(&mm.vma[i].has_anon) != 0:
            stop = visit_vma(mm, &mm.vma[i], index, nr, fn, arg)
            if stop:
                break
    pthread_mutex_unlock(&mm.rmap_lock)
    return stop

cdef int rmap_walk_anon(mem_t *m, uint64_t mapping, uint64_t index, uint64_t nr, rmap_fn fn, void *arg) noexcept nogil:
    """Visit what may map anonymous pages [index, index + nr) of a family. Whoever comes from a folio holds a reference and
    its lock, so that mapping and index stay."""
    cdef family_t *family = family_get(m, mapping)
    cdef mm_t *mm
    cdef int stop = 0
    if family == NULL:
        return 0
    mm = family.first
    while mm != NULL and not stop:
        stop = visit_mm(mm, NULL, index, nr, fn, arg)
        mm = mm.next
    family_put(m, family)
    return stop

cdef int rmap_walk_file(file_t *f, uint64_t index, uint64_t nr, rmap_fn fn, void *arg) noexcept nogil:
    """The same for a range of a file, whether its pages are in memory or not; f.lock is held."""
    cdef uint64_t i, j
    cdef int stop
    for i in range(f.nr_mms):
        # An mm that maps the file twice is listed twice, and visited once.
        for j in range(i):
            if f.mms[j] == f.mms[i]:
                break
        else:
            stop = visit_mm(f.mms[i], f, index, nr, fn, arg)
            if stop:
                return stop
    return 0
