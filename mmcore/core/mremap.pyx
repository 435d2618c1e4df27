"""mremap."""
from libc.errno cimport EFAULT, EINVAL, ENOMEM
from mmcore.core.pgtable cimport *
from mmcore.core.vma cimport do_munmap, find_area, vma_find, vma_granule, vma_insert, vma_isolate, vma_lookup, vma_merge, vma_put, vma_ready
from mmcore.core.zap cimport split_leaf

cdef int prepare(mm_t *mm, vma_t *v, uint64_t start, uint64_t end, uint64_t delta) noexcept nogil:
    """Everything that moving entries by delta could fail at: tables at the new place, leaves that do not line up there."""
    cdef pgd_t *g = &mm.pgd
    cdef uint64_t at = start, next, e, table, size
    cdef int level, error
    while at < end:
        level = 0
        e = a64_load_acquire(walk_find(g, at, &level, &table))
        next = level_end(g, at, end, level)
        size = level_size(g, level)
        if level == 0:
            # One look a table: all its entries need the same tables at the new place, or two of them.
            next = level_end(g, at, end, 1)
            if table_make(g, at + delta, 0, &error) == 0 or table_make(g, next - 1 + delta, 0, &error) == 0:
                return -ENOMEM
        elif e and (delta & (size - 1) or at & (size - 1) or next - at < size):
            error = split_leaf(mm, v, at)
            if error:
                return error
            continue
        elif e and table_make(g, at + delta, level, &error) == 0:
            return -ENOMEM
        at = next
    return 0

cdef void move_entries(mm_t *mm, uint64_t start, uint64_t end, uint64_t delta) noexcept nogil:
    """Under rmap_lock: whoever comes from a page finds each entry at the one place or the other. All that is needed is there."""
    cdef mem_t *m = mm.m
    cdef pgd_t *g = &mm.pgd
    cdef uint64_t at = start, e, table, to
    cdef uint64_t *entry
    cdef uint64_t *target
    cdef int level, same
    while at < end:
        level = 0
        entry = walk_find(g, at, &level, &table)
        e = a64_load_acquire(entry)
        if e:
            same = level
            target = walk_find(g, at + delta, &same, &to)
            table_lock(m, table)
            e = a64_load_relaxed(entry)
            a64_store_release(entry, 0)
            table_used(m, table)[0] -= 1
            table_unlock(m, table)
            # A move is a change of what the process sees there.
            if pte_present(e):
                e |= PTE_SOFT_DIRTY
            else:
                e |= SWP_SOFT_DIRTY
            table_lock(m, to)
            a64_store_release(target, e)
            table_used(m, to)[0] += 1
            table_unlock(m, to)
        at = level_end(g, at, end, level)

cdef int move_vma(mm_t *mm, uint64_t old, uint64_t old_len, uint64_t new_len, uint64_t new) noexcept nogil:
    """Make a VMA at the new place, move the entries, unmap the old place."""
    cdef vma_t *v = vma_lookup(mm, old)
    cdef vma_t made = v[0]
    cdef uint64_t first = 0, last = 0, moved = min(old_len, new_len)
    cdef dead_t dead
    cdef int error
    # The old place becomes VMAs of its own, so that nothing can fail once entries have moved.
    error = vma_isolate(mm, old, old + old_len, &first, &last)
    if error:
        return error
    v = vma_lookup(mm, old)
    made.pgoff = v.pgoff
    made.start = new
    made.end = new + new_len
    error = prepare(mm, v, old, old + moved, new - old)
    if error == 0:
        error = vma_insert(mm, &made)
    if error:
        dead.first = dead.nr = 0
        first = vma_find(mm, new)
        tables_unlink(&mm.pgd, &dead, new, new + new_len, mm.vma[first - 1].end if first else 0,
                      mm.vma[first].start if first < mm.nr_vmas else ONE << 63)
        tables_free(&mm.pgd, &dead)
        vma_merge(mm, old, old + old_len)
        return error
    pthread_mutex_lock(&mm.rmap_lock)
    move_entries(mm, old, old + moved, new - old)
    pthread_mutex_unlock(&mm.rmap_lock)
    if made.flags & VM_LOCKED:
        a64_fetch_add_relaxed(&mm.locked_vm, new_len >> mm.m.page_shift)
    # What the pool promised for pages that are not there yet went along.
    vma_lookup(mm, old).flags &= ~<uint64_t>VM_HUGE_RESV
    return do_munmap(mm, old, old + old_len)

cdef int do_mremap(mm_t *mm, uint64_t old, uint64_t old_len, uint64_t new_len, uint64_t *new, bint fixed) noexcept nogil:
    cdef vma_t *v = vma_lookup(mm, old)
    cdef vma_t more
    cdef uint64_t i, to, whole
    cdef int error
    if fixed and new[0] < old + old_len and old < new[0] + new_len:
        return -EINVAL
    if v == NULL:
        return -EFAULT
    if v.flags & VM_HUGETLB:
        # Lengths are rounded up to the page size, addresses are not; nothing could be promised for a longer mapping.
        whole = vma_granule(mm, v) - 1
        old_len = (old_len + whole) & ~whole
        new_len = (new_len + whole) & ~whole
        if old & whole or (fixed and new[0] & whole) or new_len > old_len:
            return -EINVAL
    if not fixed and new_len <= old_len:
        # Just an unmapping, of whatever is mapped there.
        new[0] = old
        return do_munmap(mm, old + new_len, old + old_len) if new_len < old_len else 0
    if old + min(old_len, new_len) > v.end:
        return -EFAULT
    if v.file != NULL and v.file.kind == FILE_DEVDAX and old & (vma_granule(mm, v) - 1):
        return -EINVAL
    if new_len > old_len and v.flags & (VM_DONTEXPAND | VM_PFNMAP):
        return -EFAULT
    if fixed:
        error = do_munmap(mm, new[0], new[0] + new_len)
        if error == 0 and new_len < old_len:
            error = do_munmap(mm, old + new_len, old + old_len)
            old_len = new_len
        return error if error else move_vma(mm, old, old_len, new_len, new[0])
    new[0] = old
    # Grow where it is, when it ends where its VMA ends and there is room behind.
    i = vma_find(mm, old)
    if old + old_len == v.end and (i + 1 == mm.nr_vmas or mm.vma[i + 1].start >= old + new_len) \
            and old + new_len <= task_size(&mm.pgd):
        more = v[0]
        more.start = v.end
        more.end = old + new_len
        more.pgoff = v.pgoff + ((v.end - v.start) >> mm.m.page_shift)
        more.has_anon = 0
        # It is merged at once, so that there are no more of them.
        error = vma_ready(mm, &more)
        if error == 0:
            vma_put(mm, &more)
        if error == 0 and more.flags & VM_LOCKED:
            a64_fetch_add_relaxed(&mm.locked_vm, (new_len - old_len) >> mm.m.page_shift)
        return error
    to = find_area(mm, new_len, level_size(&mm.pgd, 1) if new_len >= level_size(&mm.pgd, 1) else ONE << mm.m.page_shift)
    if to == 0:
        return -ENOMEM
    new[0] = to
    return move_vma(mm, old, old_len, new_len, to)
