"""hmm_range_fault: what is mapped, as a device that mirrors an address space wants to know it. Takes no references.

A word of the result (struct hmm_range.hmm_pfns, 64-bit)
    63 VALID (in: REQ_FAULT)    62 WRITE (in: REQ_WRITE)    61 ERROR    60 DMA_MAPPED, 59 P2PDMA, 58 P2PDMA_BUS (kept)
    57-53 order of the mapping: log2 of the pages of the entry    52-0 PFN
0: nothing there, and could be faulted in. Every word is filled, also inside a huge mapping.

The request of a page is (its word & pfn_flags_mask) | default_flags. There are no notifiers here: who needs the answer to
stay true keeps the address space from changing.

Units: words: uint64; PFN in the low bits, flags from the top, order in bits 53-57.
Raises: TypeError, InvalidArgument, MMError(EFAULT, EPERM, ENOMEM).
Threads: any number at once; mmap_lock for reading.
Kernel: hmm_range_fault(), struct hmm_range.
"""
from libc.errno cimport EFAULT, ENOMEM, EPERM
from libc.stdint cimport uint64_t
from mmcore.core.fault cimport FAULT_FLAG_WRITE, handle_mm_fault
from mmcore.core.folio cimport count_arg
from mmcore.core.mm cimport MM
from mmcore.core.pgtable cimport *
from mmcore.core.space cimport *
from mmcore.core.vma cimport vma_lookup


import numpy as np

from .errors import InvalidArgument, MMError

cdef extern from *:
    """
    #define MM_HMM_VALID (1ULL << 63)
    #define MM_HMM_WRITE (1ULL << 62)
    #define MM_HMM_ERROR (1ULL << 61)
    #define MM_HMM_STICKY (7ULL << 58)
    #define MM_HMM_SHIFT 53
    """
    const uint64_t VALID "MM_HMM_VALID"
    const uint64_t WRITE "MM_HMM_WRITE"
    const uint64_t ERROR "MM_HMM_ERROR"
    const uint64_t STICKY "MM_HMM_STICKY"
    const int ORDER_SHIFT "MM_HMM_SHIFT"

HMM_PFN_VALID = HMM_PFN_REQ_FAULT = 1 << 63
HMM_PFN_WRITE = HMM_PFN_REQ_WRITE = 1 << 62
HMM_PFN_ERROR = 1 << 61
HMM_PFN_DMA_MAPPED = 1 << 60
HMM_PFN_P2PDMA = 1 << 59
HMM_PFN_P2PDMA_BUS = 1 << 58

__all__ = ["hmm_range_fault", "hmm_pfn_to_map_order", "hmm_pfn_to_pfn", "HMM_PFN_VALID", "HMM_PFN_WRITE", "HMM_PFN_ERROR",
           "HMM_PFN_REQ_FAULT", "HMM_PFN_REQ_WRITE", "HMM_PFN_DMA_MAPPED", "HMM_PFN_P2PDMA", "HMM_PFN_P2PDMA_BUS"]

cdef inline bint needs_fault(uint64_t request, uint64_t have) noexcept nogil:
    """A request to write counts only together with one to fault."""
    if not request & VALID:
        return False
    return not have & VALID or (request & WRITE and not have & WRITE)

cdef uint64_t look(const mm_t *mm, const vma_t *v, uint64_t addr) noexcept nogil:
    """The answer for one page as the tables are now."""
    cdef const pgd_t *g = &mm.pgd
    cdef int level = 0
    cdef uint64_t table, e = a64_load_acquire(walk_find(g, addr, &level, &table)), pfn
    if not pte_leaf(e, level) or not e & PTE_PRESENT:
        return 0
    pfn = pte_pfn(e)
    if e & PTE_SPECIAL and pfn != mm.m.zero_pfn and pfn != mm.m.huge_zero_pfn:
        return ERROR
    pfn += (addr & (level_size(g, level) - 1)) >> g.shift
    if pfn < mm.m.nr_pages and test_flag(&mm.m.map[pfn], PG_hwpoison):
        return ERROR    # no fault mends it
    return pfn | VALID | (WRITE if e & PTE_RW else 0) | (<uint64_t>level_order(g, level) << ORDER_SHIFT)

cdef int range_fault(mm_t *mm, uint64_t start, uint64_t *words, uint64_t nr, uint64_t default_flags, uint64_t mask,
                     uint64_t *at) noexcept nogil:
    """at: index of the page that ended it. Words before it are final, the others still hold what came in."""
    cdef uint64_t i, addr, request, have = 0
    cdef vma_t *v = NULL
    cdef int error, tries
    for i in range(nr):
        at[0] = i
        addr = start + (i << mm.m.page_shift)
        request = (words[i] & mask) | default_flags
        if v == NULL or addr >= v.end or addr < v.start:
            v = vma_lookup(mm, addr)
        if v == NULL or v.flags & (VM_IO | VM_PFNMAP) or not v.flags & VM_READ:
            if request & VALID:
                return -EFAULT
            words[i] = (words[i] & STICKY) | ERROR
            continue
        for tries in range(20000):  # no-cython-lint
            have = look(mm, v, addr)
            if not needs_fault(request, have):
                break
            if have & ERROR:
                return -EFAULT
            if request & WRITE and not v.flags & VM_WRITE:
                return -EPERM
            error = handle_mm_fault(mm, v, addr, FAULT_FLAG_WRITE if request & WRITE else 0)
            if error:
                return -ENOMEM if error == -ENOMEM else -EFAULT
        else:
            return -EFAULT
        words[i] = (words[i] & STICKY) | have
    at[0] = nr
    return 0


def hmm_range_fault(MM mm not None, start, nr_pages, default_flags=0, *, hmm_pfns=None, pfn_flags_mask=0):
    """Return what nr_pages pages from an address on are mapped to, as a uint64 array of HMM_PFN_* words; see the module.

    default_flags: HMM_PFN_REQ_FAULT and HMM_PFN_REQ_WRITE for all pages; hmm_pfns with pfn_flags_mask: for each its own.
    Raises MMError: EFAULT where a requested page cannot be had, EPERM for a write to a mapping that is not writable, ENOMEM;
    InvalidArgument for a start that is no multiple of the page size. Kernel: hmm_range_fault().
    """
    cdef mm_t *p = mm.ptr()
    cdef uint64_t addr = count_arg(start, "start", 0, ~<uint64_t>0), at = 0
    cdef uint64_t n = count_arg(nr_pages, "nr_pages", 0, task_size(&p.pgd) >> p.m.page_shift)
    cdef uint64_t flags = count_arg(default_flags, "default_flags", 0, ~<uint64_t>0)
    cdef uint64_t mask = count_arg(pfn_flags_mask, "pfn_flags_mask", 0, ~<uint64_t>0)
    cdef uint64_t[::1] words
    cdef int error = 0
    if addr & ((ONE << p.m.page_shift) - 1):
        raise InvalidArgument(f"hmm_range_fault() from {addr:#x}, which is no multiple of the page size", addr=addr)
    if addr + (n << p.m.page_shift) < addr:
        raise InvalidArgument(f"hmm_range_fault(): {n} pages from {addr:#x} on run over the end of 64 bits", addr=addr)
    if flags & ~(VALID | WRITE):
        raise InvalidArgument(f"default_flags {flags:#x} has more than HMM_PFN_REQ_FAULT and HMM_PFN_REQ_WRITE")
    if hmm_pfns is None:
        array = np.zeros(n, np.uint64)
    else:
        array = np.array(hmm_pfns, dtype=np.uint64)
        if array.shape != (n,):
            raise InvalidArgument(f"hmm_pfns has shape {array.shape}: one word a page is wanted, {n}")
    if n == 0:
        return array
    words = array
    mm.enter()
    with nogil:
        pthread_rwlock_rdlock(&p.mmap_lock)
        error = -EFAULT if p.exited else range_fault(p, addr, &words[0], n, flags, mask, &at)
        pthread_rwlock_unlock(&p.mmap_lock)
    mm.leave()
    if error:
        addr += at << p.m.page_shift
        why = {-EPERM: "a write is requested, and the mapping is not writable",
               -ENOMEM: "no free page to fault in"}.get(error, "it is requested, and nothing can be mapped or read there")
        raise MMError(-error, f"hmm_range_fault() at {addr:#x}: {why}", addr=addr)
    return array


def hmm_pfn_to_map_order(word):
    """Return log2 of the pages that the CPU maps with one entry there."""
    return (count_arg(word, "word", 0, ~<uint64_t>0) >> 53) & 0x1f


def hmm_pfn_to_pfn(word):
    """Return the PFN in a word of hmm_range_fault()."""
    return count_arg(word, "word", 0, ~<uint64_t>0) & ((ONE << 53) - 1)
