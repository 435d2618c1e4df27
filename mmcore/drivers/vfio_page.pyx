"""Pins of single pages, for drivers; and mappings that change their owner."""
from libc.errno cimport EINVAL, ENOMEM
from mmcore.core.hook cimport pin_watchers, pins_begin, pins_t
from mmcore.core.mm cimport MM
from mmcore.core.space cimport *
from mmcore.drivers.vfio_pin cimport *

import errno as _errno

from ..core.errors import MMError

# ---- external pins ---------------------------------------------------------------------------------------------------
def vfio_pin_page_external(VFIODma dma not None, uint64_t iova, bint do_accounting, str call):
    """Pin the page at an IOVA for a driver, or count one more user of it; returns its PFN."""
    cdef pinning_t p
    cdef Memory mem = dma.mm.mem
    cdef vpfn_t *pin = find_vpfn(&dma.d, iova)
    cdef uint64_t pfn = 0
    cdef int64_t got
    cdef bint rsvd
    cdef pins_t log
    if pin != NULL:
        pin.ref_count += 1
        return pin.pfn
    check_alive(dma, call)
    setup(&p, dma, ACQUIRE_PAGE, RELEASE_PAGE, True, False, None)
    p.at = dma.d.vaddr + (iova - dma.d.iova)
    mem.enter()
    with nogil:
        got = vaddr_get_pfns(&p, p.at, 1, &pfn)
        p.error = <int>got if got < 0 else 0
        p.size = 0
        rsvd = got == 1 and is_invalid_reserved_pfn(p.m, pfn)
        if got == 1:
            if no_struct_page(p.m, pfn):
                p.error, p.why, p.pfn = -EINVAL, PIN_PFNMAP, pfn
            elif do_accounting and not rsvd:
                p.error = charge(&p, 1)
            if p.error == 0 and add_vpfn(&dma.d, iova, pfn) != 0:
                p.error, p.why = -ENOMEM, PIN_NO_MEMORY
                if do_accounting and not rsvd:
                    lock_acct(&dma.d, -1)
            if p.error and not rsvd:
                put_pfns(&p.u, &dma.d, pfn, 1, RELEASE_PAGE)
        teardown(&p)
    mem.leave()
    if p.error == -EINVAL:
        raise MMError(_errno.EINVAL, f"{call}: IOVA {iova:#x} is PFN {pfn:#x}, which has no struct page: a driver "
                                     "cannot use it", addr=iova,
                      pfn=pfn)
    if p.error:
        raise pin_failed(dma, &p, call)
    if pin_watchers and not rsvd:
        pins_begin(&log)
        log_chunk(&log, &mem.m, pfn, 1)
        tell_pins(dma, &log, 1)
    return pfn


def vfio_unpin_page_external(VFIODma dma not None, uint64_t iova, bint do_accounting, str call):
    """Drop one user of the page at an IOVA, and its pin with the last one; tells whether there was a pin at all."""
    cdef putting_t u
    cdef Memory mem = dma.mm.mem
    cdef vpfn_t *pin = find_vpfn(&dma.d, iova)
    cdef uint64_t pfn, released
    cdef pins_t log
    if pin == NULL:
        return False
    pin.ref_count -= 1
    if pin.ref_count:
        return True
    pfn = pin.pfn
    pins_begin(&log)
    mem.enter()
    with nogil:
        putting_begin(&u, &mem.m, RELEASE_PAGE, &log if pin_watchers else NULL)
        released = put_pfns(&u, &dma.d, pfn, 1, RELEASE_PAGE)
        putting_end(&u)
        del_vpfn(&dma.d, pin)
        if do_accounting:
            lock_acct(&dma.d, -<int64_t>released)
    mem.leave()
    tell_pins(dma, &log, -1)
    putting_failed(mem, &u, call)
    return True

# ---- change of owner -------------------------------------------------------------------------------------------------
def vfio_change_dma_owner(VFIODma dma not None, MM mm not None, str call):
    """Let another address space own a mapping: its charge moves there, if that one's limit allows."""
    cdef dma_t *d = &dma.d
    cdef uint64_t n = <uint64_t>d.locked_vm, now, limit
    cdef mm_t *new = mm.ptr()
    if mm is dma.mm:
        return
    limit = ~<uint64_t>0 if mm.rlimit_memlock is None else mm.rlimit_memlock >> d.m.page_shift
    now = a64_load_relaxed(&new.locked_vm)
    while True:
        if not mm.cap_ipc_lock and n and now + n > limit:
            raise MMError(_errno.ENOMEM, f"{call}: the {n} pages of the mapping at IOVA {d.iova:#x} on top of {now} "
                                         "locked already exceed "
                                         f"RLIMIT_MEMLOCK ({limit} pages) of the new owner: raise it (ulimit -l), or "
                                         "give it "
                                         "CAP_IPC_LOCK", addr=d.iova)
        if a64_cas_acq_rel(&new.locked_vm, &now, now + n):
            break
    if not a32_load_relaxed(&d.mm.exited):
        a64_fetch_add_relaxed(&d.mm.locked_vm, <uint64_t>-<int64_t>n)
    dma.own(mm)
