"""Unmapping DMA mappings."""
from mmcore.core.hook cimport pin_watchers, pins_begin, pins_t, pins_tell
from mmcore.core.iommu cimport *

from ..core.errors import BadPage, InvalidArgument
from ..ledger import holding

DOMAINS_MOST = <int>MAX_DOMAINS         # of a container

cdef int domains_in(list domains, domains_t *out) except -1:
    cdef IOMMUDomain domain
    out.n = 0
    if len(domains) > MAX_DOMAINS:
        raise InvalidArgument(f"a container has at most {MAX_DOMAINS} domains")
    for domain in domains:
        out.d[out.n] = &domain.d
        out.n += 1
    return 0

# ---- the queue -------------------------------------------------------------------------------------------------------
cdef void sync_unpin(unmapping_t *z) noexcept nogil:
    """Flush, then unpin what was unmapped before."""
    cdef uint64_t i
    cdef vfio_region_t *r
    if z.nr_queued == 0:
        return
    iommu_sync(z.domain)
    for i in range(z.nr_queued):
        r = &z.queue[i]
        if i + 4 < z.nr_queued and not no_struct_page(z.u.m, r[4].pfn):
            prefetch_write(&z.u.m.map[r[4].pfn])
        z.unlocked += unpin_pages_remote(&z.u, z.d, r.iova, r.pfn, r.nr, z.each)
    z.nr_queued = 0

cdef uint64_t unmap_region(unmapping_t *z, uint64_t iova, uint64_t pfn, uint64_t size) noexcept nogil:
    """Unmap from one region on: the bytes that went, 0 when the IOMMU has nothing there."""
    cdef unsigned shift = z.u.m.page_shift
    cdef uint64_t done = 0
    cdef vfio_region_t *r
    # The kernel allocates an entry for each region; without one, the region goes the slow way.
    if not inject_fails(z.u.m, INJECT_ALLOC):
        done = iommu_unmap_fast(z.domain, iova, size)
    if done:
        r = &z.queue[z.nr_queued]
        r.iova, r.pfn, r.nr = iova, pfn, done >> shift
        z.nr_queued += 1
        if z.nr_queued == TLB_SYNC_MAX:
            sync_unpin(z)
        return done
    sync_unpin(z)
    done = iommu_unmap(z.domain, iova, size)
    if done:
        z.unlocked += unpin_pages_remote(&z.u, z.d, iova, pfn, done >> shift, z.each)
    return done

cdef inline void lose(unmapping_t *z, uint64_t iova, uint64_t nr) noexcept nogil:
    if z.lost == 0:
        z.lost_at = iova
    z.lost += nr

cdef void unmap_by_runs(unmapping_t *z, uint64_t size) noexcept nogil:
    cdef dma_t *d = z.d
    cdef unsigned shift = z.u.m.page_shift
    cdef uint64_t i, pfn, left, got, at = 0
    for i in range(d.runs.n):
        pfn, left = d.runs.run[i].pfn, min(d.runs.run[i].nr << shift, size - at)
        while left:
            got = min(unmap_region(z, d.iova + at, pfn, left), left)
            if mm_unlikely(got == 0):
                # Flushed above; no device reaches this page, and we know which it is.
                lose(z, d.iova + at, 1)
                got = ONE << shift
                z.unlocked += unpin_pages_remote(&z.u, d, d.iova + at, pfn, 1, z.each)
            at += got
            pfn += got >> shift
            left -= got
        if at == size:
            return

cdef void unmap_by_asking(unmapping_t *z, uint64_t size) noexcept nogil:
    cdef dma_t *d = z.d
    cdef unsigned shift = z.u.m.page_shift
    cdef uint64_t at = 0, phys = 0, length, got
    while at < size:
        length = iommu_phys_run(z.domain, d.iova + at, size - at, &phys)
        got = unmap_region(z, d.iova + at, phys >> shift, length) if length else 0
        if mm_unlikely(got == 0):
            lose(z, d.iova + at, 1)
            got = ONE << shift
        at += got

cdef void unmap_unpin(unmapping_t *z, dma_t *d, const domains_t *domains, uint64_t size, int accounting) noexcept nogil:
    cdef int i
    z.d = d
    z.each = accounting == ACCOUNT_EACH
    z.nr_queued = z.unlocked = z.lost = 0
    if size == 0 or domains.n == 0:
        return
    z.domain = z.u.domain = domains.d[0]
    for i in range(1, domains.n):
        unmap_elsewhere(domains.d[i], d, size)
    if d.runs_whole:
        unmap_by_runs(z, size)
    else:
        unmap_by_asking(z, size)
    d.iommu_mapped = False
    sync_unpin(z)
    drop_runs(&d.runs)
    d.runs_whole = False
    if accounting == ACCOUNT_ALL:
        lock_acct(d, -<int64_t>z.unlocked)

cdef void unmap_elsewhere(iommu_t *domain, const dma_t *d, uint64_t size) noexcept nogil:
    """Unmap all of a mapping in a domain that is not asked for its pages; holes are passed over."""
    cdef uint64_t done = 0, got
    while done < size:
        got = iommu_unmap_fast(domain, d.iova + done, size - done)
        done += got if got else ONE << d.m.page_shift
    iommu_sync(domain)

cdef object unmapping_failed(Memory mem, unmapping_t *z):
    putting_failed(mem, &z.u, f"unmapping the DMA mapping at IOVA {z.d.iova:#x}")
    if z.lost:
        raise BadPage("every page of a mapping is mapped in its domains",
                      f"{z.lost} pages from IOVA {z.lost_at:#x} on were not mapped in the first domain any more: "
                      "somebody unmapped "
                      "them behind the container's back. Without remembered runs their pins stay")

# ---- for the container -----------------------------------------------------------------------------------------------
cdef object tell_pins(VFIODma dma, pins_t *log, int sign):
    if log.n or log.lost:
        with holding(f"VFIO {dma.d.iova:#x}+{dma.d.size:#x}"):
            pins_tell(dma.mm.mem, log, sign)

cdef object release_mapping(VFIODma dma, list domains, int how, int accounting):
    """Unmap a mapping in these domains and unpin it; returns the pages that were released."""
    cdef unmapping_t z
    cdef domains_t in_
    cdef pins_t log
    cdef Memory mem = dma.mm.mem
    domains_in(domains, &in_)
    pins_begin(&log)
    mem.enter()
    with nogil:
        putting_begin(&z.u, &mem.m, how, &log if pin_watchers else NULL)
        unmap_unpin(&z, &dma.d, &in_, dma.d.size, accounting)
        putting_end(&z.u)
    mem.leave()
    tell_pins(dma, &log, -1)
    unmapping_failed(mem, &z)
    return z.unlocked


def vfio_unmap_unpin(VFIODma dma not None, list domains, int how, bint do_accounting):
    """Unmap and release a mapping; returns the pages that were released and not uncharged. The container's lock is
    held.

    Raises BadPage when pins or translations were missing, after everything else was done.
    """
    unlocked = release_mapping(dma, domains, how, ACCOUNT_ALL if do_accounting else ACCOUNT_NOT)
    return 0 if do_accounting else unlocked


def vfio_unreplay(VFIODma dma not None, IOMMUDomain new not None, int release):
    """Take back vfio_pin_map_dma() of a mapping in an attach that failed: external pins stay charged."""
    release_mapping(dma, [new], release, ACCOUNT_EACH)


def vfio_unmap_domain(VFIODma dma not None, IOMMUDomain domain not None):
    """Unmap a mapping in one domain, and leave its pages pinned: others still map them."""
    cdef Memory mem = dma.mm.mem
    mem.enter()
    with nogil:
        unmap_elsewhere(&domain.d, &dma.d, dma.d.size)
    mem.leave()


def vfio_reaccount(VFIODma dma not None, uint64_t unlocked):
    """Charge what only external pins hold now, and take back the rest: after the last domain went."""
    cdef uint64_t i
    cdef int64_t locked = 0
    cdef bint cap = dma.d.lock_cap
    for i in range(dma.d.nr_pins):
        locked += not is_invalid_reserved_pfn(dma.d.m, dma.d.pin[i].pfn)
    # Whatever the limit: these pages are pinned already, and their pins will be uncharged one by one.
    dma.d.lock_cap = True
    lock_acct(&dma.d, locked - <int64_t>unlocked)
    dma.d.lock_cap = cap
