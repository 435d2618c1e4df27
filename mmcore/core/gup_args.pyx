"""Arguments and errors of the get and pin families."""
from libc.errno cimport EFAULT
from mmcore.core.gup_walk cimport *
from mmcore.core.pthread cimport pthread_rwlock_tryrdlock, pthread_rwlock_unlock
from mmcore.core.space cimport vma_t
from mmcore.core.vma cimport vma_lookup

from .errors import InvalidArgument, MMError
from .folio import FOLL

cdef str names(unsigned bits):
    return " | ".join(["FOLL_" + flag.name for flag in FOLL if flag.value & bits]) or hex(bits)

cdef unsigned flags_arg(const wrapper_t *wrapper, object gup_flags) except? 0xffffffff:
    cdef unsigned flags = <unsigned>count_arg(gup_flags, "gup_flags", 0, 0xffffffff)
    cdef unsigned all_of_it = flags | wrapper.to_set
    cdef str call
    if mm_likely(not flags & ~<unsigned>(KNOWN_FLAGS & ~(FOLL_GET | FOLL_LONGTERM)) and
                 not (wrapper.fast and all_of_it & ~<unsigned>FAST_FLAGS)):
        return all_of_it
    call = wrapper.name.decode()
    if mm_unlikely(flags & INTERNAL_FLAGS):
        raise InvalidArgument(f"{call}(): {names(flags & INTERNAL_FLAGS)} is internal: the function sets what it needs")
    if mm_unlikely(flags & ~<unsigned>KNOWN_FLAGS):
        raise InvalidArgument(f"{call}(): {flags & ~<unsigned>KNOWN_FLAGS:#x} is no FOLL_* flag")
    flags |= wrapper.to_set
    if mm_unlikely(flags & FOLL_PIN and flags & FOLL_GET):
        raise InvalidArgument(f"{call}(): FOLL_GET and FOLL_PIN exclude each other: take references with get_user_pages*()")
    if mm_unlikely(flags & FOLL_LONGTERM and not flags & FOLL_PIN):
        raise InvalidArgument(f"{call}(): FOLL_LONGTERM is for pins: use {call.replace('get', 'pin')}()")
    if mm_unlikely(flags & FOLL_LONGTERM and flags & FOLL_PCI_P2PDMA):
        raise InvalidArgument(f"{call}(): FOLL_LONGTERM and FOLL_PCI_P2PDMA exclude each other: P2PDMA memory may be unplugged")
    if mm_unlikely(wrapper.fast and flags & ~<unsigned>FAST_FLAGS):
        raise InvalidArgument(f"{call}(): the fast walk does not know {names(flags & ~<unsigned>FAST_FLAGS)}: use "
                              f"{call.replace('_fast_only', '').replace('_fast', '')}()")
    return flags

_WORDS = {
    WHY_NO_VMA: "nothing is mapped there",
    WHY_IO: "the mapping is VM_IO or VM_PFNMAP: a driver's memory has no pages to hold",
    WHY_NOT_ANON: "FOLL_ANON, and the mapping is not anonymous",
    WHY_FSDAX: "a filesystem-DAX mapping cannot be pinned long-term: truncation could not wait for the pin. Without "
               "FOLL_LONGTERM it can be pinned",
    WHY_SPLIT_HUGETLB: "FOLL_SPLIT_PMD, and hugetlb mappings cannot be split",
    WHY_SECRETMEM: "secretmem can be pinned by nobody: the kernel itself has no mapping of it",
    WHY_DIRTY_TRACKING: "a shared writable mapping of a file with writeback cannot be pinned long-term for writing: the "
                        "filesystem would not be told of the writes. Copy to anonymous memory, or use shmem or hugetlbfs",
    WHY_NO_WRITE: "FOLL_WRITE, and the mapping is not writable",
    WHY_FORCE_SHARED: "FOLL_WRITE with FOLL_FORCE needs a private mapping that may become writable",
    WHY_NO_READ: "the mapping is not readable (PROT_NONE)",
    WHY_NO_MEMORY: "no free memory to fault in, or to move the page out of Movable and CMA: free some, or make a larger "
                   "Memory",
    WHY_SIGBUS: "the fault ended in SIGBUS: beyond the end of the file, the device is gone, or the hugetlb pool is empty",
    WHY_SIGSEGV: "the fault ended in SIGSEGV",
    WHY_HWPOISON: "the page is broken (hwpoison)",
    WHY_NOFAULT: "FOLL_NOFAULT, and the page is not there, or not as it must be",
    WHY_HOLE: "FOLL_DUMP, and nothing is there: it would read as zero",
    WHY_SPECIAL: "the entry names a PFN without a struct page",
    WHY_P2PDMA: "PCI P2PDMA memory: pass FOLL_PCI_P2PDMA",
    WHY_REFS: "no reference to be had: the page's counter is 0, negative, or would overflow; release some of its references",
    WHY_OUTPUT: "the output could not take a page",
    WHY_MIGRATE: "FOLL_LONGTERM, and the page is in Movable or CMA memory and could not be moved: somebody else holds or pins it",
    WHY_COHERENT: "FOLL_LONGTERM, and the page is device memory that could not be moved to RAM",
    WHY_BUSY: "the entry stays as it is whatever fault is taken",
    WHY_OVERFLOW: "start + nr_pages runs over the end of 64 bits",
    WHY_TASK_SIZE: "the end is beyond the largest user address",
}

cdef object gup_error(MM mm, const gup_t *w, str call):
    cdef uint64_t addr = w.addr, start = 0, end = 0
    cdef int error = -w.error if w.error < 0 else EFAULT
    cdef vma_t *v
    where = ""
    # Not waited for: whoever holds it may want the GIL, which we have. Then the mapping is not named.
    if mm.mm != NULL and pthread_rwlock_tryrdlock(&mm.mm.mmap_lock) == 0:
        v = vma_lookup(mm.mm, addr) if not mm.mm.exited else NULL
        if v != NULL:
            start = v.start
            end = v.end
        pthread_rwlock_unlock(&mm.mm.mmap_lock)
        if end:
            where = f" in the mapping {start:#x}-{end:#x}"
    why = _WORDS.get(w.why, "it could not be taken")
    pfn = w.bad_pfn if w.bad_pfn else None
    if pfn is not None and w.why not in (WHY_HWPOISON, WHY_P2PDMA, WHY_REFS, WHY_MIGRATE, WHY_COHERENT, WHY_NO_MEMORY):
        pfn = None
    if pfn is not None:
        where += f", PFN {pfn:#x}"
    return MMError(error, f"{call}() at {addr:#x}{where}: {why}", pfn=pfn, addr=addr)
