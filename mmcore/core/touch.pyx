"""Touching ranges: as many faults at once as one page table, or a row of PMDs, has room for."""
from libc.errno cimport EAGAIN, EEXIST, ENOMEM
from mmcore.core.fault cimport (FAULT_FLAG_WRITE, anon_run, entry_allows, handle_mm_fault, leaf_fits, mark_access, mthp_fault,
                                thp_allowed, thp_run)
from mmcore.core.pgtable cimport *

cdef int touch_table(mm_t *mm, vma_t *v, uint64_t *at, uint64_t end, bint write, uint64_t *faults) noexcept nogil:
    """The part of a range that one page table spans. Entries that are none in anonymous memory are filled in runs."""
    cdef mem_t *m = mm.m
    cdef pgd_t *g = &mm.pgd
    cdef uint64_t table, e, i = 0, k, n, nr = (end - at[0]) >> m.page_shift, addr = at[0], filled = 0, taken = 0
    cdef uint64_t *entry
    cdef uint64_t bits = PTE_ACCESSED | (PTE_DIRTY | PTE_SOFT_DIRTY if write else 0)
    cdef uint64_t allowed = PTE_PRESENT | (PTE_RW if write else 0)
    cdef bint anon = v.file == NULL
    cdef int error = 0
    table = table_make(g, addr, 0, &error)
    if table == 0:
        return error
    entry = table_at(m, table) + table_index(g, addr, 0)
    table_lock(m, table)
    while i < nr:
        e = a64_load_relaxed(&entry[i])
        if e & allowed == allowed:
            if e & bits != bits:
                a64_store_relaxed(&entry[i], e | bits)
            i += 1
            continue
        if e == 0 and anon:
            n = 0
            if write and spaces_of(m).mthp:
                n = mthp_fault(mm, v, entry + i, addr + (i << m.page_shift))
                if n:
                    # One fault brought them all; where it started inside, what is before was touched already or is not asked for.
                    filled += n
                    taken += 1
                    i += 1
                    continue
                k = 1
            else:
                k = 1
                while i + k < nr and a64_load_relaxed(&entry[i + k]) == 0:
                    k += 1
            n = anon_run(mm, v, entry + i, addr + (i << m.page_shift), k, write)
            filled += n
            taken += n
            i += n
            if n < k:
                error = -ENOMEM
                break
            continue
        table_used(m, table)[0] += filled
        a64_fetch_add_relaxed(&mm.total_faults, taken)
        faults[0] += taken
        table_unlock(m, table)
        error = handle_mm_fault(mm, v, addr + (i << m.page_shift), FAULT_FLAG_WRITE if write else 0)
        faults[0] += 1
        at[0] = addr + (i << m.page_shift)
        if error:
            return error
        return 0        # what it did may have changed the shape of the tables: look again from there
    table_used(m, table)[0] += filled
    table_unlock(m, table)
    a64_fetch_add_relaxed(&mm.total_faults, taken)
    faults[0] += taken
    at[0] = addr + (i << m.page_shift)
    return error

cdef int touch_range(mm_t *mm, vma_t *v, uint64_t *addr, uint64_t end, bint write, uint64_t *faults) noexcept nogil:
    cdef pgd_t *g = &mm.pgd
    cdef uint64_t e, table
    cdef uint64_t *entry
    cdef int level, error = 0
    cdef int64_t n
    cdef bint thp = v.file == NULL and not v.flags & VM_HUGETLB and thp_allowed(mm, v)
    while addr[0] < end:
        level = 1
        entry = walk_find(g, addr[0], &level, &table)
        e = a64_load_acquire(entry)
        if pte_leaf(e, level):
            if not entry_allows(e, write):
                error = handle_mm_fault(mm, v, addr[0], FAULT_FLAG_WRITE if write else 0)
                faults[0] += 1
                if error:
                    return error
                continue
            mark_access(entry, PTE_ACCESSED | (PTE_DIRTY | PTE_SOFT_DIRTY if write else 0))
            addr[0] = level_end(g, addr[0], end, level)
            continue
        if v.flags & VM_HUGETLB:
            error = handle_mm_fault(mm, v, addr[0], FAULT_FLAG_WRITE if write else 0)
            faults[0] += 1
            if error:
                return error
            continue
        if thp and e == 0 and leaf_fits(mm, v, addr[0], 1):
            n = thp_run(mm, v, addr[0], end, write)
            if n == -EAGAIN:
                continue
            if n < 0:
                return <int>n
            if n:
                faults[0] += <uint64_t>n
                a64_fetch_add_relaxed(&mm.total_faults, <uint64_t>n)
                addr[0] = min((addr[0] & ~(level_size(g, 1) - 1)) + <uint64_t>n * level_size(g, 1), end)
                continue
        if v.file != NULL and e == 0:
            error = handle_mm_fault(mm, v, addr[0], FAULT_FLAG_WRITE if write else 0)
            faults[0] += 1
            if error:
                return error
            continue
        error = touch_table(mm, v, addr, level_end(g, addr[0], end, 1), write, faults)
        if error == -EEXIST:
            error = 0
        if error:
            return error
    return 0
