"""VFIO type1: what a container maps for devices, in the exact order of the kernel's checks.

    vfio_dma        one mapping; their set
    vfio_pin        pinning and mapping, by generation
    vfio_page       external pins of single pages; change of owner
    vfio_unmap      unmapping: regions, flushes
    vfio_release    releasing pages by generation; charges
    vfio_external   pin_pages, unpin_pages, dma_rw
    vfio_dirty      dirty bitmaps
    vfio_window     which IOVAs may be mapped
    vfio_uapi       names and numbers

Locks: one a container (the kernel's iommu->lock), outermost: mmap_lock, folio locks and all below come after it. It is
not held while a device is told of an unmapping.

Units: IOVAs, addresses, sizes: bytes; locked_vm, dma_avail counts: pages, entries; IOVAs: uint64.
Raises: TypeError, InvalidArgument, MMError as the ioctls; BadPage when pins or translations were lost.
Threads: any number at once; a lock a container.
Kernel: drivers/vfio/vfio_iommu_type1.c.
"""
import errno
import threading
import weakref
from functools import partial

from ..core.errors import InvalidArgument, MMError
from ..core.iommu import IOMMUDomain
from ..core.memory import Memory
from ..core.mm import MM
from ..core.size import format_size, parse_size
from . import vfio_dirty
from .steps import all_of
from .vfio_dma import DmaTree, VFIODma, VFIOMapping, VFIOPin, word
from .vfio_dirty import DirtyPages
from .vfio_external import ExternalPins, VFIODevice
from .vfio_page import vfio_change_dma_owner, vfio_unpin_page_external
from .vfio_pin import ACQUIRES, RELEASES, vfio_pin_map_dma, vfio_replay
from .vfio_uapi import *
from .vfio_uapi import __all__ as _uapi
from .vfio_unmap import DOMAINS_MOST, vfio_reaccount, vfio_unmap_domain, vfio_unmap_unpin, vfio_unreplay
from .vfio_window import excluded, free_iova, inside, intersect, windows_of

__all__ = ["VFIOContainer", "VFIODevice", "VFIOMapping", "VFIOPin", *_uapi]

_TOP = 2**64
_claiming = threading.Lock()      # over whether a domain has a holder; inside a container's lock
_NOTICES = 10                   # unmap notices to a driver that does not unpin, before it is given up


class _Attached:
    """A domain, and whether its group said which pages it uses (pinned_page_dirty_scope)."""

    def __init__(self, domain):
        self.domain, self.pinned_scope = domain, False


class VFIOContainer(ExternalPins, DirtyPages):
    """Model a VFIO container with a type1 IOMMU: VFIOContainer(mem, iommu_type=VFIO_TYPE1v2_IOMMU, *, ...).

    dma_entry_limit: mappings at most; disable_hugepages: a page a pin call; acquire: "sink", "batch" or "page";
    release: "range", "folio" or "page"; remember_runs: keep the physical runs of each mapping, instead of asking the
    IOMMU for every page when it is unmapped; allow_unsafe_interrupts: attach() without isolated MSIs. Threads may share
    one. close(), or the end of a with-statement, unmaps everything. Kernel: struct vfio_iommu.
    """

    def __init__(self, mem, iommu_type=VFIO_TYPE1v2_IOMMU, *, dma_entry_limit=65535, disable_hugepages=False,
                 acquire="sink", release="range", remember_runs=True, allow_unsafe_interrupts=False):
        if not isinstance(mem, Memory):
            raise TypeError(f"a Memory is wanted, not {mem!r}")
        known = (VFIO_TYPE1_IOMMU, VFIO_TYPE1v2_IOMMU, VFIO_TYPE1_NESTING_IOMMU)
        if iommu_type not in known or isinstance(iommu_type, bool):
            raise InvalidArgument(f"iommu_type={iommu_type!r} is none of VFIO_TYPE1_IOMMU (1), VFIO_TYPE1v2_IOMMU (3)")
        self.mem, self.v2 = mem, iommu_type != VFIO_TYPE1_IOMMU
        self.disable_hugepages, self.remember_runs = bool(disable_hugepages), bool(remember_runs)
        self.allow_unsafe_interrupts = bool(allow_unsafe_interrupts)
        self.acquire, self.release = acquire, release
        self._generation(ACQUIRES, "acquire", acquire)
        self._generation(RELEASES, "release", release)
        self.dma_entry_limit = self.dma_avail = word(dma_entry_limit, "dma_entry_limit", 0, 2**32 - 1)
        self.vaddr_invalid_count = 0
        self.num_non_pinned_groups = 0
        self.dirty_page_tracking = False
        self.closed = False
        self._shift = mem.page_size.bit_length() - 1
        self._tree = DmaTree()
        self._attached, self._devices = [], []
        self._windows = windows_of(())
        self._lock = threading.Lock()

    # ---- looking -----------------------------------------------------------------------------------------------------
    @property
    def domains(self):
        """List the attached domains; the first one is asked for physical addresses."""
        return [attached.domain for attached in self._attached]

    @property
    def devices(self):
        """List the registered devices."""
        return list(self._devices)

    @property
    def mappings(self):
        """List the mappings by IOVA, as they are now: VFIOMapping."""
        with self._lock:
            return [dma.snapshot() for dma in self._tree]

    @property
    def windows(self):
        """List the IOVAs that may be mapped: (first, last), both inside."""
        return list(self._windows)

    @property
    def pgsize_bitmap(self):
        """Page sizes, a bit each, that all domains have; any from the page size on without a domain."""
        bitmap = _TOP - self.mem.page_size
        for domain in self.domains:
            bitmap &= sum(domain.page_sizes)
        return bitmap

    @property
    def pgsize(self):
        """The smallest page size, of which IOVAs, addresses and sizes are multiples."""
        return self.pgsize_bitmap & -self.pgsize_bitmap

    def info(self):
        """Return what VFIO_IOMMU_GET_INFO tells: page sizes, windows, migration limits, free mapping slots."""
        with self._lock:
            return {"flags": 3, "iova_pgsizes": self.pgsize_bitmap, "iova_ranges": list(self._windows),
                    "migration": {"pgsize_bitmap": self.pgsize, "max_dirty_bitmap_size": DIRTY_BITMAP_SIZE_MAX},
                    "dma_avail": self.dma_avail}

    def check_extension(self, extension):
        """Return 1 when the container has an extension (VFIO_TYPE1_IOMMU, VFIO_UNMAP_ALL, ...), else 0."""
        extension = word(extension, "extension", 0, 2**31 - 1)
        if extension == VFIO_UPDATE_VADDR:
            return int(not self._emulated())
        return int(extension in (VFIO_TYPE1_IOMMU, VFIO_TYPE1v2_IOMMU, VFIO_UNMAP_ALL, VFIO_DMA_CC_IOMMU))

    def iova_to_phys(self, iova):
        """Return the physical address of an IOVA in the first domain, or None.

        None: it is not mapped, or no domain is attached.
        """
        iova = word(iova, "iova")
        with self._lock:
            return self._attached[0].domain.iova_to_phys(iova) if self._attached else None

    def find_iova(self, size, *, align=None):
        """Return the lowest IOVA where size bytes could be mapped, a multiple of align (default: the smallest page).

        Nothing is set aside. Raises MMError(ENOSPC) when no window has room. (type1 leaves this to its users; iommufd's
        IOMMU_IOAS_MAP chooses.)
        """
        size = word(parse_size(size), "size", 1)
        align = self.pgsize if align is None else word(parse_size(align), "align", 1)
        self._aligned(size | align, f"size {size:#x} and align {align:#x}", "find_iova")
        with self._lock:
            iova = free_iova(self._windows, [(dma.iova, dma.last) for dma in self._tree], size, align)
        if iova is None:
            raise MMError(errno.ENOSPC, f"find_iova: no window has {format_size(size)} free at a multiple of "
                                        f"{format_size(align)}: "
                                        f"{self._spelled(self._windows)}")
        return iova

    # ---- mapping -----------------------------------------------------------------------------------------------------
    def map_dma(self, mm, vaddr, iova, size, flags=VFIO_DMA_MAP_FLAG_READ | VFIO_DMA_MAP_FLAG_WRITE, *, acquire=None):
        """Map [iova, iova + size) to the memory of a process from vaddr on.

        It is pinned and charged when an IOMMU is attached.
        mm: who calls. flags: VFIO_DMA_MAP_FLAG_READ, _WRITE; or _VADDR: a new address, and owner, for a mapping whose
        address was invalidated. acquire: instead of the container's. Raises MMError: EINVAL (InvalidArgument),
        EOVERFLOW (a range wraps), EEXIST (overlap), ENOSPC (no slot), ENOMEM (RLIMIT_MEMLOCK, memory), ENOENT (VADDR
        and nothing there), and what pinning and mapping raise; nothing has changed then. Kernel: VFIO_IOMMU_MAP_DMA.
        """
        call = "VFIO_IOMMU_MAP_DMA"
        self._mm(mm)
        vaddr, iova, size = word(vaddr, "vaddr"), word(iova, "iova"), word(parse_size(size), "size")
        flags = word(flags, "flags", 0, 2**32 - 1)
        generation = self._generation(ACQUIRES, "acquire", self.acquire if acquire is None else acquire)
        if flags & ~7:
            raise InvalidArgument(f"{call}: flags {flags:#x}: known are READ (1), WRITE (2) and VADDR (4)", addr=iova)
        if size == 0:
            raise InvalidArgument(f"{call} of 0 bytes", addr=iova)
        self._wraps(iova, size, "iova", call)
        self._wraps(vaddr, size, "vaddr", call)
        prot, new_vaddr = flags & 3, bool(flags & VFIO_DMA_MAP_FLAG_VADDR)
        if bool(prot) == new_vaddr:
            raise InvalidArgument(f"{call}: flags {flags:#x}: READ, WRITE or both; or VADDR alone", addr=iova)
        with self._lock:
            self._open()
            self._aligned(size | iova | vaddr, f"iova {iova:#x}, vaddr {vaddr:#x} and size {size:#x}", call)
            dma = self._tree.find(iova, iova + size - 1)
            if new_vaddr:
                self._set_vaddr(dma, mm, vaddr, iova, size, call)
                return
            if dma is not None:
                raise MMError(errno.EEXIST, f"{call}: IOVAs {iova:#x}-{iova + size - 1:#x} overlap the mapping "
                                            f"{dma.iova:#x}-{dma.last:#x}: "
                                            "unmap_dma() that first", addr=dma.iova)
            if self.dma_avail == 0:
                raise MMError(errno.ENOSPC, f"{call}: all {self.dma_entry_limit} mappings of the container "
                                            "(dma_entry_limit) are in use: "
                                            "unmap some, map larger ranges, or raise the limit", addr=iova)
            if not inside(self._windows, iova, iova + size - 1):
                raise InvalidArgument(f"{call}: IOVAs {iova:#x}-{iova + size - 1:#x} are not inside one of the "
                                      "windows that the domains "
                                      f"translate: {self._spelled(self._windows)}", addr=iova)
            dma = VFIODma.make(mm, vaddr, iova, size, prot)
            if dma.alloc_fails():
                raise MMError(errno.ENOMEM, f"{call}: no memory for the mapping's record", addr=iova)
            if self._attached:
                vfio_pin_map_dma(dma, self.domains, generation, self._release_gen(), self.disable_hugepages,
                                 self.remember_runs, call)
            if self.dirty_page_tracking:
                try:
                    vfio_dirty.alloc_bitmap(dma, call)
                except BaseException:
                    vfio_unmap_unpin(dma, self.domains, self._release_gen(), True)
                    raise
            self.dma_avail -= 1
            self._tree.link(dma)

    def _set_vaddr(self, dma, mm, vaddr, iova, size, call):
        if dma is None:
            raise MMError(errno.ENOENT, f"{call}: VADDR, and nothing is mapped at IOVA {iova:#x}", addr=iova)
        if not dma.vaddr_invalid or (dma.iova, dma.size) != (iova, size):
            raise InvalidArgument(f"{call}: VADDR for IOVAs {iova:#x}-{iova + size - 1:#x}: the mapping there is "
                                  f"{dma.iova:#x}-{dma.last:#x}, "
                                  f"its address is {'in' if dma.vaddr_invalid else ''}valid. It must be the whole "
                                  "mapping, "
                                  "invalidated by unmap_dma(..., VFIO_DMA_UNMAP_FLAG_VADDR)", addr=iova)
        vfio_change_dma_owner(dma, mm, call)
        dma.vaddr, dma.vaddr_invalid = vaddr, False
        self.vaddr_invalid_count -= 1

    # ---- unmapping ---------------------------------------------------------------------------------------------------
    def unmap_dma(self, iova, size, flags=0, *, bitmap=None, pgsize=None, release=None):
        """Unmap the mappings in [iova, iova + size), unpin and uncharge them; returns the bytes that were unmapped.

        flags: VFIO_DMA_UNMAP_FLAG_ALL (iova and size are 0), _VADDR (addresses become invalid; nothing is unmapped),
        _GET_DIRTY_BITMAP (into bitmap=, a writable buffer or (mm, addr, nbytes), a bit for each pgsize bytes). release:
        instead of the container's. v2 refuses (InvalidArgument) a range that cuts a mapping; v1 unmaps nothing when the
        range starts inside one, and more than asked when it ends inside one. Nothing mapped there is no error: 0.
        Raises MMError: EINVAL, EOVERFLOW (the range wraps), EBUSY (VADDR with an emulated device; a driver that keeps
        its pins), EFAULT (bitmap; mappings before are gone). Kernel: VFIO_IOMMU_UNMAP_DMA.
        """
        call = "VFIO_IOMMU_UNMAP_DMA"
        iova, size, flags = word(iova, "iova"), word(parse_size(size), "size"), word(flags, "flags", 0, 2**32 - 1)
        how = self._generation(RELEASES, "release", self.release if release is None else release)
        everything, invalidate = bool(flags & VFIO_DMA_UNMAP_FLAG_ALL), bool(flags & VFIO_DMA_UNMAP_FLAG_VADDR)
        dirty = bool(flags & VFIO_DMA_UNMAP_FLAG_GET_DIRTY_BITMAP)
        if flags & ~7:
            raise InvalidArgument(f"{call}: flags {flags:#x}: known are GET_DIRTY_BITMAP (1), ALL (2) and VADDR (4)",
                                  addr=iova)
        if dirty and (everything or invalidate):
            raise InvalidArgument(f"{call}: GET_DIRTY_BITMAP goes with neither ALL nor VADDR", addr=iova)
        bits = self._bitmap_arg(bitmap, pgsize, size, call) if dirty else None
        if not dirty and bitmap is not None:
            raise InvalidArgument(f"{call}: bitmap= goes with VFIO_DMA_UNMAP_FLAG_GET_DIRTY_BITMAP", addr=iova)
        with self._lock:
            self._open()
            if invalidate and self._emulated():
                raise MMError(errno.EBUSY, f"{call}: VADDR, and an emulated device is registered: it needs the "
                                           "addresses", addr=iova)
            self._aligned(iova, f"iova {iova:#x}", call)
            if everything:
                if iova or size:
                    raise InvalidArgument(f"{call}: ALL goes with iova 0 and size 0, not {iova:#x} and {size:#x}",
                                          addr=iova)
                last = _TOP - 1
            else:
                if size == 0:
                    raise InvalidArgument(f"{call} of 0 bytes: VFIO_DMA_UNMAP_FLAG_ALL unmaps everything", addr=iova)
                self._aligned(size, f"size {size:#x}", call)
                self._wraps(iova, size, "iova", call)
                last = iova + size - 1
            if dirty and (not self.dirty_page_tracking or bits.pgsize != self.pgsize):
                raise InvalidArgument(f"{call}: GET_DIRTY_BITMAP needs dirty_pages_start() before, and pgsize "
                                      f"{self.pgsize} (given: "
                                      f"{bits.pgsize})", addr=iova)
            if self.v2 and not everything:
                self._uncut(iova, last, call)
            return self._unmap(iova, last, invalidate, bits, how, call)

    def _unmap(self, iova, last, invalidate, bits, how, call):
        total, flagged, stubborn, notices = 0, [], None, 0
        while True:
            # Taken out of the set together: what is done is [first, at).
            first = at = self._tree.first(iova)
            dmas, waiting = self._tree.dmas, None
            try:
                while at < len(dmas) and dmas[at].iova <= last:
                    dma = dmas[at]
                    if not self.v2 and iova > dma.iova:
                        break
                    if invalidate:
                        if dma.vaddr_invalid:
                            for one in flagged:
                                one.vaddr_invalid = False
                            self.vaddr_invalid_count -= len(flagged)
                            raise InvalidArgument(f"{call}: the address of the mapping at IOVA {dma.iova:#x} is "
                                                  "invalid already; "
                                                  "nothing was invalidated", addr=dma.iova)
                        dma.vaddr_invalid = True
                        self.vaddr_invalid_count += 1
                        flagged.append(dma)
                        total += dma.size
                        at += 1
                        continue
                    if dma.nr_pins:
                        waiting = dma
                        break
                    if bits is not None and dma.bitmap is None:
                        raise InvalidArgument(f"{call}: tracking was stopped by an on_dma_unmap; what came before IOVA "
                                              f"{dma.iova:#x} is unmapped", addr=dma.iova)
                    if bits is not None:
                        vfio_dirty.update_user_bitmap(bits, dma, iova, self._shift, self._all_dirty(dma))
                    total += dma.size
                    at += 1
                    self._remove(dma, how)
            finally:
                if not invalidate:
                    del dmas[first:at]
            if waiting is None:
                return total
            notices = notices + 1 if waiting is stubborn else 1
            stubborn = waiting
            if notices > _NOTICES:
                raise MMError(errno.EBUSY, f"{call}: the mapping at IOVA {waiting.iova:#x} has {waiting.nr_pins} "
                                           "external pins, and after "
                                           f"{_NOTICES} notices to {len(self._devices)} devices still: their "
                                           "on_dma_unmap must "
                                           "unpin_pages()", addr=waiting.iova)
            self._notify(waiting.iova, waiting.size)

    def _notify(self, iova, size):
        """Tell the devices, without the lock: they unpin."""
        devices = list(self._devices)
        self._lock.release()
        try:
            for device in devices:
                device.on_dma_unmap(iova, size)
        finally:
            self._lock.acquire()

    def _remove(self, dma, how):
        """Give a mapping up, all but its place in the set."""
        self.vaddr_invalid_count -= dma.vaddr_invalid
        self.dma_avail += 1
        dma.bitmap = None
        if dma.iommu_mapped:
            vfio_unmap_unpin(dma, self.domains, how, True)

    # ---- domains -----------------------------------------------------------------------------------------------------
    def attach(self, domain, *, current=None, msi_isolated=True):
        """Attach an IOMMUDomain, as that of a group of devices: everything mapped so far is mapped there too.

        Memory of mappings that no IOMMU had so far is pinned and charged now. current: the MM of who calls, whose limit
        is looked at first (default: that of who mapped). Raises MMError: EBUSY (addresses are invalid), EINVAL
        (attached already; mappings outside of its windows or in its reserved regions; no IOVA left), EPERM (MSIs not
        isolated), ENOSPC (64 domains), and what pinning and mapping raise. All is as before then. Kernel: attach_group.
        """
        call = "attach"
        if not isinstance(domain, IOMMUDomain):
            raise TypeError(f"an IOMMUDomain is wanted, not {domain!r}")
        if domain.mem is not self.mem:
            raise InvalidArgument("the domain belongs to another Memory than the container")
        if current is not None:
            self._mm(current)
        with self._lock:
            self._open()
            if self.vaddr_invalid_count:
                raise MMError(errno.EBUSY, f"{call}: {self.vaddr_invalid_count} mappings have no valid address: "
                                           "map_dma() with "
                                           "VFIO_DMA_MAP_FLAG_VADDR first")
            if len(self._attached) == DOMAINS_MOST:
                raise MMError(errno.ENOSPC, f"{call}: {DOMAINS_MOST} domains are attached, and a container has no more")
            with _claiming:
                if domain.holder is not None:
                    where = "this" if domain.holder() is self else "another"
                    raise InvalidArgument(f"{call}: the domain is attached to {where} container already")
                # Weak: a container that is dropped gives its memory back at once, not at the next collection.
                domain.holder = weakref.ref(self)
            try:
                windows = self._windows_with(domain, call)
                if not msi_isolated and not self.allow_unsafe_interrupts:
                    raise MMError(errno.EPERM, f"{call}: the group's interrupts are not isolated: any device could raise "
                                               "any of them; "
                                               "allow_unsafe_interrupts=True takes that risk")
                self._replay(domain, current, call)
            except BaseException:
                domain.holder = None
                raise
            self._attached.append(_Attached(domain))
            self._windows = windows
            self.num_non_pinned_groups += 1

    def _windows_with(self, domain, call):
        aperture = intersect(self._windows, domain.windows)
        for dma in self._tree:
            if not inside(aperture, dma.iova, dma.last):
                raise InvalidArgument(f"{call}: the mapping {dma.iova:#x}-{dma.last:#x} is outside of what the domain "
                                      "translates: "
                                      f"{self._spelled(domain.windows)}", addr=dma.iova)
            for first, last in excluded(domain):
                if dma.iova <= last and dma.last >= first:
                    raise InvalidArgument(f"{call}: the mapping {dma.iova:#x}-{dma.last:#x} lies in the domain's "
                                          "reserved region "
                                          f"{first:#x}-{last:#x}", addr=dma.iova)
        windows = windows_of([*self.domains, domain])
        if not windows:
            raise InvalidArgument(f"{call}: no IOVA is left that all domains translate and none reserves")
        return windows

    def _replay(self, domain, current, call):
        done, release = [], self._release_gen()
        generation = self._generation(ACQUIRES, "acquire", self.acquire)
        try:
            for dma in self._tree:
                fresh = not dma.iommu_mapped
                if fresh:
                    vfio_pin_map_dma(dma, [domain], generation, release, self.disable_hugepages, self.remember_runs,
                                     call, current)
                else:
                    vfio_replay(dma, self.domains, domain, call)
                done.append((dma, fresh))
        except BaseException:
            all_of(partial(vfio_unreplay, dma, domain, release) if fresh else partial(vfio_unmap_domain, dma, domain)
                   for dma, fresh in reversed(done))
            raise

    def detach(self, domain):
        """Detach a domain.

        With the last one everything is unmapped; or, with emulated devices, only unmapped from IOMMUs: what their drivers
        pinned stays pinned, and charged. Kernel: detach_group.
        """
        with self._lock:
            self._open()
            attached = next((one for one in self._attached if one.domain is domain), None)
            if attached is None:
                raise InvalidArgument("detach: this domain is not attached to the container")
            self._detach(attached)

    def _detach(self, attached):
        try:
            if len(self._attached) > 1:
                for dma in self._tree:
                    vfio_unmap_domain(dma, attached.domain)
            elif self._emulated():
                self._unmap_and_reaccount()
            else:
                self._remove_all()
        finally:
            self._attached.remove(attached)
            attached.domain.holder = None
            for device in [device for device in self._devices if device.domain is attached.domain]:
                self._devices.remove(device)
            self._windows = windows_of(self.domains)
            if not attached.pinned_scope:
                self.num_non_pinned_groups -= 1
                if self.dirty_page_tracking:
                    # Nobody knows what its devices wrote.
                    for dma in self._tree:
                        vfio_dirty.fill(dma)

    def _unmap_and_reaccount(self):
        all_of(partial(self._reaccount, dma) for dma in self._tree)

    def _reaccount(self, dma):
        vfio_reaccount(dma, vfio_unmap_unpin(dma, self.domains, self._release_gen(), False))

    def _remove_all(self):
        """Unmap everything; pins that drivers still have go as well."""
        steps = []
        for dma in self._tree:
            steps += [partial(vfio_unpin_page_external, dma, pin.iova, not self._attached, "detach")
                      for pin in dma.pins() for _ in range(pin.ref_count)]
            steps.append(partial(self._remove, dma, self._release_gen()))
        try:
            all_of(steps)
        finally:
            self._tree.dmas.clear()

    # ---- the end -----------------------------------------------------------------------------------------------------
    def close(self):
        """Detach every domain, unmap everything, drop all pins; does nothing the second time."""
        with self._lock:
            if self.closed:
                return
            self.closed = True
            self._devices.clear()
            all_of((*[partial(self._detach, attached) for attached in reversed(self._attached)], self._remove_all))

    def __enter__(self):
        self._open()
        return self

    def __exit__(self, *_):
        self.close()

    def __del__(self):
        # What a process leaves behind is closed with its file; a Memory that was closed before took everything.
        if not getattr(self, "closed", True) and not self.mem.closed:
            try:
                self.close()
            except Exception:       # nobody is there to be told
                pass

    def __repr__(self):
        return (f"<VFIOContainer type1{'v2' if self.v2 else ''} "
                f"{'closed' if self.closed else f'{len(self._tree)} mappings'}, "
                f"{len(self._attached)} domains>")

    # ---- shared checks -----------------------------------------------------------------------------------------------
    def _open(self):
        if self.closed:
            raise InvalidArgument("the container is closed")

    def _mm(self, mm):
        if not isinstance(mm, MM):
            raise TypeError(f"an MM is wanted, not {mm!r}")
        if mm.mem is not self.mem:
            raise InvalidArgument("the address space belongs to another Memory than the container")
        mm.vmas                 # raises when it has exited

    def _generation(self, known, what, name):
        if not isinstance(name, str) or name not in known:
            raise InvalidArgument(f"{what}={name!r} is none of {', '.join(map(repr, known))}")
        return known[name]

    def _release_gen(self):
        return self._generation(RELEASES, "release", self.release)

    def _emulated(self):
        return any(device.emulated for device in self._devices)

    def _all_dirty(self, dma):
        return self.num_non_pinned_groups > 0 and dma.iommu_mapped

    def _v2_only(self, call):
        if not self.v2:
            raise MMError(errno.EACCES, f"{call}: not of a type1 v1 container: open it as VFIO_TYPE1v2_IOMMU")

    def _external(self, iova, nbytes, call):
        self._open()
        self._v2_only(call)
        self._wraps(iova, nbytes, "iova", call)

    def _wraps(self, start, size, what, call):
        if start + size > _TOP:
            raise MMError(errno.EOVERFLOW, f"{call}: {what} {start:#x} and {size:#x} bytes run over the end of 64 bits",
                          addr=start)

    def _aligned(self, value, what, call):
        if value % self.pgsize:
            raise InvalidArgument(f"{call}: {what} must be multiples of {format_size(self.pgsize)}, the smallest page "
                                  "of the domains")

    def _uncut(self, iova, last, call):
        for edge in (iova, last):
            dma = self._tree.find(edge, edge)
            if dma is not None and (dma.iova < iova or dma.last > last):
                raise InvalidArgument(f"{call}: IOVAs {iova:#x}-{last:#x} cut the mapping "
                                      f"{dma.iova:#x}-{dma.last:#x}: mappings go as a whole",
                                      addr=dma.iova)

    def _bitmap_arg(self, bitmap, pgsize, size, call):
        if bitmap is None:
            raise InvalidArgument(f"{call}: GET_DIRTY_BITMAP needs bitmap=, a writable buffer or (mm, addr, nbytes)")
        bits = vfio_dirty.UserBits(bitmap, call)
        bits.pgsize = self.mem.page_size if pgsize is None else word(parse_size(pgsize), "pgsize")
        if bits.pgsize == 0 or bits.pgsize & (bits.pgsize - 1):
            raise InvalidArgument(f"{call}: pgsize {bits.pgsize} is no power of two")
        vfio_dirty.verify_bitmap_size(size >> (bits.pgsize.bit_length() - 1), bits.size, call)
        return bits

    def _spelled(self, windows):
        return ", ".join(f"{first:#x}-{last:#x}" for first, last in windows)
