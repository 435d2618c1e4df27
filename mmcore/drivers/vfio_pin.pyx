"""Pinning and mapping DMA mappings."""
from libc.errno cimport EFAULT, EINTR, ENOMEM
from libc.stdlib cimport free, malloc
from libc.string cimport memset
from mmcore.core.fault cimport FAULT_FLAG_WRITE, handle_mm_fault
from mmcore.core.folio cimport FOLL_LONGTERM, FOLL_PIN, FOLL_REMOTE, FOLL_TOUCH, FOLL_WRITE
from mmcore.core.gup cimport gup_pages
from mmcore.core.gup_args cimport gup_error
from mmcore.core.gup_walk cimport WHY_NOTHING, WHY_OUTPUT
from mmcore.core.hook cimport pin_watchers, pins_begin, pins_t
from mmcore.core.iommu cimport *
from mmcore.core.lock cimport raise_pending
from mmcore.core.mm cimport MM
from mmcore.core.output cimport gup_output_t, leaf_count, leaf_pfn, leaf_word, release_leaves
from mmcore.core.pagelist cimport contiguous
from mmcore.core.pgtable cimport *
from mmcore.core.space cimport *
from mmcore.core.vma cimport vma_lookup
from mmcore.drivers.pagearray cimport array_output_t, array_take

import errno as _errno

from ..core.errors import MMError
from ..core.size import format_size

# ---- GUP: a batch ----------------------------------------------------------------------------------------------------
cdef inline unsigned pin_flags(const pinning_t *p) noexcept nogil:
    return FOLL_PIN | FOLL_LONGTERM | FOLL_TOUCH | FOLL_REMOTE | (FOLL_WRITE if p.d.prot & DMA_WRITE else 0)

cdef void give_back(mem_t *m, uint64_t pfn, uint64_t n) noexcept nogil:
    """Pages of a call that was interrupted: as if it had not been made."""
    cdef uint64_t word
    while n:
        word = leaf_word(pfn, 1)
        release_leaves(m, &word, 1, True)
        pfn += 1
        n -= 1

cdef int64_t vaddr_get_pfns(pinning_t *p, uint64_t vaddr, uint64_t npages, uint64_t *pfn) noexcept nogil:
    """Pages into the batch, from vaddr on; or raw PFNs, and the batch stays empty. How many, or a negative errno."""
    cdef array_output_t out
    cdef int64_t got
    cdef uint64_t i
    memset(&out, 0, sizeof(out))
    out.base.take = array_take
    out.pfn = p.page
    got = gup_pages(&p.w, p.d.mm, vaddr, min(npages, p.capacity), pin_flags(p), False, False, &out.base)
    if mm_likely(got > 0):
        p.size = <uint64_t>got
        p.offset = 0
        pfn[0] = p.page[0]
        return got
    if got == -EINTR:
        for i in range(<uint64_t>(out.pfn - p.page)):
            give_back(p.m, p.page[i], 1)
        return got
    return follow_pfnmap(p, vaddr, npages, pfn, got if got else -EFAULT)

# ---- raw PFNs --------------------------------------------------------------------------------------------------------
cdef int64_t follow_pfnmap(pinning_t *p, uint64_t vaddr, uint64_t npages, uint64_t *pfn, int64_t error) noexcept nogil:
    """What the page table of a VM_PFNMAP mapping says, to the end of its leaf; `error` where there is none."""
    cdef mm_t *mm = p.d.mm
    cdef bint write = (p.d.prot & DMA_WRITE) != 0
    cdef uint64_t table, e, at, leaf
    cdef uint64_t *entry
    cdef vma_t *v
    cdef int level, _tries, token
    pthread_rwlock_rdlock(&mm.mmap_lock)
    for _tries in range(3):
        v = vma_lookup(mm, vaddr) if not mm.exited else NULL
        if v == NULL or not v.flags & VM_PFNMAP:
            break
        p.w.why = WHY_NOTHING
        p.why = PIN_PFNMAP
        error = -EFAULT
        level = 0
        token = walk_enter(&mm.pgd)
        entry = walk_find(&mm.pgd, vaddr, &level, &table)
        e = a64_load_acquire(entry)
        walk_leave(&mm.pgd, token)
        if not pte_leaf(e, level):
            if not v.flags & (VM_WRITE if write else VM_READ):
                break
            if handle_mm_fault(mm, v, vaddr, FAULT_FLAG_WRITE if write else 0) != 0:
                break
            continue
        if write and not e & PTE_RW:
            break
        # In pages: an external pin may start inside one.
        leaf = level_size(&mm.pgd, level) >> p.m.page_shift
        at = (vaddr >> p.m.page_shift) & (leaf - 1)
        pfn[0] = pte_pfn(e) + at
        # A page that somebody counts references of is not to be mapped without one.
        p.pfn = pfn[0]
        if is_invalid_reserved_pfn(p.m, pfn[0]):
            error = <int64_t>min(npages, leaf - at)
            p.why = PIN_GUP
        break
    pthread_rwlock_unlock(&mm.mmap_lock)
    return error

# ---- one chunk -------------------------------------------------------------------------------------------------------
cdef int over_limit(pinning_t *p, int64_t pages) noexcept nogil:
    """The look before a chunk is taken, at the caller's limit; equality is allowed."""
    cdef uint64_t now = a64_load_relaxed(&p.current.locked_vm)
    if p.d.lock_cap or now + <uint64_t>pages <= p.limit:
        return 0
    p.why, p.wanted, p.over = PIN_MEMLOCK, now + <uint64_t>pages, p.limit
    return -ENOMEM

cdef int charge(pinning_t *p, int64_t pages) noexcept nogil:
    """The charge at the end of a chunk, against the limit of who mapped it."""
    if mm_likely(lock_acct(p.d, pages) == 0):
        return 0
    p.why, p.wanted, p.over = PIN_MEMLOCK, a64_load_relaxed(&p.d.mm.locked_vm) + <uint64_t>pages, p.d.limit
    return -ENOMEM

cdef void batch_unpin(pinning_t *p) noexcept nogil:
    while p.size:
        put_pfns(&p.u, p.d, p.page[p.offset], 1, RELEASE_PAGE)
        p.offset += 1
        p.size -= 1

cdef int64_t pin_pages_remote(pinning_t *p, uint64_t vaddr, uint64_t npage, uint64_t *base) noexcept nogil:
    """The next chunk, page by page or batch by batch: pages of it, or a negative errno with nothing of it kept."""
    cdef dma_t *d = p.d
    cdef uint64_t iova = d.iova + (vaddr - d.vaddr), pfn = 0, pinned = 0, nr
    cdef int64_t acct, got = 0, lock = 0
    cdef bint rsvd = False, full = True
    base[0] = 0
    if p.size:
        pfn = base[0] = p.page[p.offset]
        rsvd = is_invalid_reserved_pfn(p.m, pfn)
    if p.one_page:
        npage = 1
    while npage and full:
        if p.size == 0:
            got = vaddr_get_pfns(p, vaddr, npage, &pfn)
            if got < 0:
                p.at = vaddr
                break
            if base[0] == 0:
                base[0] = pfn
                rsvd = is_invalid_reserved_pfn(p.m, pfn)
            if p.size == 0:
                # Raw PFNs. What does not go on is looked up again by the next call.
                if pfn != base[0] + pinned or not rsvd:
                    break
                nr = <uint64_t>got
                pinned += nr
                npage -= nr
                vaddr += nr << p.m.page_shift
                iova += nr << p.m.page_shift
                continue
        while p.size:
            pfn = p.page[p.offset]
            if pfn != base[0] + pinned or is_invalid_reserved_pfn(p.m, pfn) != rsvd:
                full = False
                break
            nr = contiguous(p.page + p.offset, p.size) if p.acquire == ACQUIRE_BATCH else 1
            acct = 0 if rsvd else <int64_t>nr - vpfn_pages(d, iova, nr)
            if acct and over_limit(p, lock + acct):
                p.at = vaddr
                got = -ENOMEM
                full = False
                break
            lock += acct
            pinned += nr
            npage -= nr
            vaddr += nr << p.m.page_shift
            iova += nr << p.m.page_shift
            p.offset += nr
            p.size -= nr
    if got >= 0:
        d.has_rsvd = d.has_rsvd or rsvd
        got = charge(p, lock)
        if got < 0:
            p.at = vaddr
    if got < 0:
        if pinned and not rsvd:
            put_pfns(&p.u, d, base[0], pinned, RELEASE_PAGE)
        batch_unpin(p)
        return got
    return <int64_t>pinned

# ---- GUP: runs -------------------------------------------------------------------------------------------------------
cdef struct gather_t:
    gup_output_t base
    pinning_t *p
    bint join                   # the next leaf may go on where the last run ends

cdef enum:
    PER_STEP = 512              # pages of the first step, and of all where leaves are small
    STEP_GROWS = 8
    LONG_RUN = 64               # pages: with longer runs, the next step is larger

cdef uint64_t gather_take(gup_output_t *base, const uint64_t *leaf, uint64_t nr) noexcept nogil:
    cdef gather_t *out = <gather_t *>base
    cdef uint64_t i
    for i in range(nr):
        if mm_unlikely(not add_run(out.p.m, &out.p.gathered, leaf_pfn(leaf[i]), leaf_count(leaf[i]), out.join)):
            base.error = -ENOMEM
            return i
        out.join = True
    return nr

cdef void gather(pinning_t *p) noexcept nogil:
    """Pin the next step of it into runs. What stops it is in p.error: the runs before that are to be taken first.

    Steps grow while leaves are large, and are a batch where they are not: what a step pinned is charged and mapped
    while its struct pages are in the caches.
    """
    cdef gather_t out
    cdef uint64_t pfn = 0, runs = p.gathered.n, step = min(p.step, p.wanted_pages - p.gathered_pages)
    cdef int64_t got
    memset(&out, 0, sizeof(out))
    out.base.take = gather_take
    out.p = p
    out.join = runs > 0 and not p.last_rsvd
    p.at = p.d.vaddr + (p.gathered_pages << p.m.page_shift)
    got = gup_pages(&p.w, p.d.mm, p.at, step, pin_flags(p), False, False, &out.base)
    p.gathered_pages += out.base.nr_pages
    if out.base.nr_pages:
        p.last_rsvd = False
        p.step = p.step * STEP_GROWS if (p.gathered.n - runs) * LONG_RUN < step else PER_STEP
    if got > 0:
        p.error = out.base.error
        return
    if got != -EINTR:
        got = follow_pfnmap(p, p.at, p.wanted_pages - p.gathered_pages, &pfn, got if got else -EFAULT)
        if got > 0:
            if add_run(p.m, &p.gathered, pfn, <uint64_t>got, p.last_rsvd):
                p.last_rsvd = True
                p.gathered_pages += <uint64_t>got
                return
            p.why = PIN_NO_MEMORY
            got = -ENOMEM
    p.error = <int>got

cdef void gathered_unpin(pinning_t *p) noexcept nogil:
    """Give back the runs that were not taken."""
    cdef run_t *run
    while p.next_run < p.gathered.n:
        run = &p.gathered.run[p.next_run]
        put_pfns(&p.u, p.d, run.pfn, run.nr, RELEASE_FOLIO)
        p.next_run += 1

cdef int64_t next_gathered(pinning_t *p, uint64_t vaddr, uint64_t *base) noexcept nogil:
    """The next chunk, out of what is gathered: charge it."""
    cdef dma_t *d = p.d
    cdef run_t *run
    cdef int64_t acct, error
    cdef bint rsvd
    # A run is complete when another one follows it, or nothing does.
    while p.next_run + 1 >= p.gathered.n and p.gathered_pages < p.wanted_pages and p.error == 0:
        if not p.remember and p.next_run and p.next_run < p.gathered.n:
            p.gathered.run[0] = p.gathered.run[p.next_run]
            p.gathered.n -= p.next_run
            p.next_run = 0
        gather(p)
    if p.next_run == p.gathered.n:
        return p.error
    run = &p.gathered.run[p.next_run]
    rsvd = is_invalid_reserved_pfn(p.m, run.pfn)
    acct = 0 if rsvd else <int64_t>run.nr - vpfn_pages(d, d.iova + (vaddr - d.vaddr), run.nr)
    error = over_limit(p, acct) if acct else 0
    if error == 0 and p.error and p.next_run + 1 == p.gathered.n:
        # The call of the kernel that takes this run meets the error before it ends, and takes nothing.
        return p.error
    if error == 0:
        d.has_rsvd = d.has_rsvd or rsvd
        error = charge(p, acct)
    if error:
        p.at = vaddr
        return error
    p.next_run += 1
    base[0] = run.pfn
    return <int64_t>run.nr

# ---- mapping ---------------------------------------------------------------------------------------------------------
cdef int map_chunk(pinning_t *p, const domains_t *to, uint64_t iova, uint64_t pfn, uint64_t nr) noexcept nogil:
    """In every domain, or in none."""
    cdef unsigned shift = p.m.page_shift
    cdef int i, error
    for i in range(to.n):
        error = iommu_map(to.d[i], iova, pfn << shift, nr << shift, p.d.prot | DMA_CACHE)
        if mm_unlikely(error != 0):
            p.why, p.domain, p.at, p.pfn, p.wanted = PIN_MAP, i, iova, pfn, nr
            while i > 0:
                i -= 1
                iommu_unmap(to.d[i], iova, nr << shift)
            return error
    return 0

cdef void map_all(pinning_t *p, const domains_t *to) noexcept nogil:
    """Pin and map all of it, or nothing; p.error."""
    cdef dma_t *d = p.d
    cdef unsigned shift = p.m.page_shift
    cdef uint64_t done = 0, pfn = 0
    cdef int64_t got = 0
    cdef bint remember = p.remember
    cdef int error
    cdef unmapping_t z
    p.wanted_pages = d.size >> shift
    p.step = PER_STEP
    while done < d.size:
        if p.acquire == ACQUIRE_SINK:
            got = next_gathered(p, d.vaddr + done, &pfn)
        else:
            got = pin_pages_remote(p, d.vaddr + done, (d.size - done) >> shift, &pfn)
        if got <= 0:
            break
        error = map_chunk(p, to, d.iova + done, pfn, <uint64_t>got)
        if error:
            unpin_pages_remote(&p.u, d, d.iova + done, pfn, <uint64_t>got, True)
            batch_unpin(p)
            got = error
            break
        if p.acquire != ACQUIRE_SINK and remember:
            # Runs only spare questions: without memory for them, the IOMMU is asked.
            remember = add_run(p.m, &d.runs, pfn, <uint64_t>got, False)
        done += <uint64_t>got << shift
    p.error = <int>got if got < 0 else 0
    if p.acquire == ACQUIRE_SINK:
        gathered_unpin(p)
        if remember:
            d.runs = p.gathered
            memset(&p.gathered, 0, sizeof(runs_t))
    if not remember:
        drop_runs(&d.runs)
    d.runs_whole = remember
    d.iommu_mapped = True
    if p.error:
        # Nothing of it is left: what was mapped is unmapped, flushed, unpinned and uncharged, in this order.
        putting_begin(&z.u, p.m, p.u.how, NULL)
        unmap_unpin(&z, d, to, done, ACCOUNT_EACH)
        putting_end(&z.u)
        d.iommu_mapped = False
        drop_runs(&d.runs)
        d.runs_whole = False

cdef void replay_mapped(pinning_t *p, const domains_t *first, const domains_t *to) noexcept nogil:
    """Map what other domains map already: by its runs, or by asking the first domain."""
    cdef dma_t *d = p.d
    cdef unsigned shift = p.m.page_shift
    cdef uint64_t done = 0, i = 0, phys = 0, nr
    while done < d.size:
        if d.runs_whole:
            phys, nr = d.runs.run[i].pfn << shift, d.runs.run[i].nr
            i += 1
        else:
            nr = iommu_phys_run(first.d[0], d.iova + done, d.size - done, &phys) >> shift
            if nr == 0:
                # Unmapped behind the container's back: nothing to map here either.
                done += ONE << shift
                continue
        p.error = map_chunk(p, to, d.iova + done, phys >> shift, nr)
        if p.error:
            if done:
                iommu_unmap_range(to.d[0], d.iova, done)
            return
        done += nr << shift

cdef void iommu_unmap_range(iommu_t *domain, uint64_t iova, uint64_t size) noexcept nogil:
    cdef uint64_t done = 0, got
    while done < size:
        got = iommu_unmap_fast(domain, iova + done, size - done)
        done += got if got else ONE << domain.page_shift
    iommu_sync(domain)

# ---- for the container -----------------------------------------------------------------------------------------------
cdef void log_chunk(pins_t *log, mem_t *m, uint64_t pfn, uint64_t n) noexcept nogil:
    cdef putting_t u
    putting_begin(&u, m, RELEASE_FOLIO, log)
    log_groups(&u, pfn, n)

cdef int setup(pinning_t *p, VFIODma dma, int acquire, int release, bint one_page, bint remember, MM current) except -1:
    memset(p, 0, sizeof(pinning_t))
    p.m = &dma.mm.mem.m
    p.d = &dma.d
    putting_begin(&p.u, p.m, release, NULL)
    p.acquire = ACQUIRE_PAGE if one_page else acquire
    p.one_page = one_page
    p.remember = remember
    if current is None or current is dma.mm:
        p.current, p.limit = dma.d.mm, dma.d.limit
    else:
        p.current = current.ptr()
        p.limit = ~<uint64_t>0 if current.rlimit_memlock is None else current.rlimit_memlock >> p.m.page_shift
    p.page = &p.fallback_page
    p.capacity = 1
    if p.acquire != ACQUIRE_SINK and not one_page:
        # Pointers of one page; without memory for them, one page at a time.
        if not inject_fails(p.m, INJECT_LIST):
            p.page = <uint64_t *>malloc(ONE << p.m.page_shift)
        if p.page == NULL:
            p.page = &p.fallback_page
        elif p.page != &p.fallback_page:
            p.capacity = (ONE << p.m.page_shift) // 8
    return 0

cdef void teardown(pinning_t *p) noexcept nogil:
    putting_end(&p.u)
    drop_runs(&p.gathered)
    if p.page != &p.fallback_page:
        free(p.page)

cdef object pin_failed(VFIODma dma, pinning_t *p, str call):
    """The error, in words; a Python exception of a signal handler passes on."""
    if p.error == -EINTR:
        raise_pending()
    page = dma.mm.mem.page_size
    if p.why == PIN_MEMLOCK:
        return MMError(_errno.ENOMEM, f"{call}: RLIMIT_MEMLOCK ({p.over * page} bytes, {p.over} pages) exceeded at "
                                      f"{p.at:#x}: {p.wanted} "
                                      "pages would be locked. Raise it (ulimit -l), give the process CAP_IPC_LOCK, or "
                                      "map less", addr=p.at)
    if p.why == PIN_MAP:
        return MMError(-p.error, f"{call}: domain {p.domain} could not map {format_size(p.wanted * page)} at IOVA "
                                 f"{p.at:#x} to PFN "
                                 f"{p.pfn:#x}: a part of the range is mapped already, there is no memory for a table, "
                                 "or the "
                                 "failure was injected", addr=p.at, pfn=p.pfn)
    if p.why == PIN_PFNMAP:
        named = f"PFN {p.pfn:#x} there has a struct page that is not reserved, or may not be written" if p.pfn else \
            "nothing is mapped there, or it may not be accessed"
        return MMError(-p.error, f"{call}: the raw PFNs (VM_PFNMAP) at {p.at:#x}: {named}. Device memory without "
                                 "struct pages can be "
                                 "mapped", addr=p.at, pfn=p.pfn or None)
    if p.why == PIN_NO_MEMORY or p.w.why == WHY_OUTPUT:
        return MMError(_errno.ENOMEM, f"{call}: no memory for the runs of pages", addr=p.at)
    error = gup_error(dma.mm, &p.w, f"{call}: pin_user_pages_remote")
    return MMError(error.errno, error.strerror.partition(": ")[2], pfn=error.pfn, addr=error.addr)

cdef object check_alive(VFIODma dma, str call):
    if a32_load_relaxed(&dma.d.mm.exited):
        raise MMError(_errno.ENODEV, f"{call}: the address space {dma.mm.name} that mapped IOVA {dma.d.iova:#x} has "
                                     "exited: its memory "
                                     "is gone", addr=dma.d.iova)


def vfio_pin_map_dma(VFIODma dma not None, list domains, int acquire, int release, bint one_page, bint remember,
                     str call, MM current=None):
    """Pin the memory behind a mapping, charge it, and map it in all these domains; or raise, with nothing of it left.

    The container's lock is held. current: whose limit is looked at first, as the kernel does with the caller's; default
    who mapped it.
    """
    cdef pinning_t p
    cdef domains_t to
    cdef Memory mem = dma.mm.mem
    cdef pins_t log
    cdef bint watched = pin_watchers != 0
    check_alive(dma, call)
    domains_in(domains, &to)
    setup(&p, dma, acquire, release, one_page, remember or watched, current)
    mem.enter()
    with nogil:
        map_all(&p, &to)
        teardown(&p)
    mem.leave()
    if p.error:
        raise pin_failed(dma, &p, call)
    if watched:
        pins_begin(&log)
        if not dma.d.runs_whole:
            # There was no memory for the runs: the books are told that they do not know.
            log.lost = dma.d.size >> mem.m.page_shift
        for i in range(dma.d.runs.n):
            log_chunk(&log, &mem.m, dma.d.runs.run[i].pfn, dma.d.runs.run[i].nr)
        if not remember:
            drop_runs(&dma.d.runs)
            dma.d.runs_whole = False
        tell_pins(dma, &log, 1)


def vfio_replay(VFIODma dma not None, list domains, IOMMUDomain new not None, str call):
    """Map a mapping that `domains` map already in one more; or raise, with nothing of it mapped there."""
    cdef pinning_t p
    cdef domains_t first, to
    cdef Memory mem = dma.mm.mem
    domains_in(domains, &first)
    domains_in([new], &to)
    setup(&p, dma, ACQUIRE_SINK, RELEASE_RANGE, False, False, None)
    mem.enter()
    with nogil:
        replay_mapped(&p, &first, &to)
        teardown(&p)
    mem.leave()
    if p.error:
        raise pin_failed(dma, &p, call)


ACQUIRES = {"sink": <int>ACQUIRE_SINK, "batch": <int>ACQUIRE_BATCH, "page": <int>ACQUIRE_PAGE}
RELEASES = {"range": <int>RELEASE_RANGE, "folio": <int>RELEASE_FOLIO, "page": <int>RELEASE_PAGE}
