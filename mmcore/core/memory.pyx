# cython: nonecheck=True
"""Memory and its handles: set-up, statistics, views.

Units: PFNs: int, uint64; sizes: bytes or "2M"; counts: base pages unless said otherwise; .pages: PAGE_DTYPE, one
    dimension.
Raises: InvalidArgument for what does not fit and for a closed Memory, MMError(ENOMEM), BadPage.
Threads: any number at once, but for check(), save() and close().
Kernel: mem_map, pg_data_t, struct zone, struct page, struct folio.
"""
from cpython.buffer cimport PyBuffer_FillInfo
from libc.stdlib cimport free
from libc.string cimport memset
cimport cython

import contextlib
import errno as _errno
from collections import namedtuple

import numpy as np

from .errors import InvalidArgument, MMError
from .page import PAGE_DTYPE, PageFlags, ZONE_NAMES
from .size import format_size

__all__ = ["Memory", "Page", "Folio", "Zone"]

Zone = namedtuple("Zone", "name start_pfn end_pfn present managed free")
Zone.__doc__ = """One zone: PFNs [start_pfn, end_pfn); present, managed and free pages."""

INJECT_SITES = {"frame": INJECT_FRAME, "table": INJECT_TABLE, "list": INJECT_LIST, "sg": INJECT_SG,
                "iommu_map": INJECT_IOMMU_MAP, "migrate": INJECT_MIGRATE, "alloc": INJECT_ALLOC,
                "iommu_unmap": INJECT_IOMMU_UNMAP}
VMSTAT = {"nr_foll_pin_acquired": NR_FOLL_PIN_ACQUIRED, "nr_foll_pin_released": NR_FOLL_PIN_RELEASED,
          "nr_dirty": NR_DIRTY, "nr_writeback": NR_WRITEBACK, "nr_dirtied": NR_DIRTIED, "nr_written": NR_WRITTEN,
          "pgalloc": PGALLOC, "pgfree": PGFREE, "nr_poisoned": NR_POISONED}
OPSTATS = {"ref_atomics": OP_REF_ATOMICS, "pincount_atomics": OP_PINCOUNT_ATOMICS, "head_lookups": OP_HEAD_LOOKUPS,
           "folio_locks": OP_FOLIO_LOCKS, "leaf_walks": OP_LEAF_WALKS}

# ---- fault injection ------------------------------------------------------------------------------------------------
cdef bint inject_hit(mem_t *m, int site) noexcept nogil:
    cdef uint32_t left = a32_load_relaxed(&m.inject[site])
    while left != 0:
        if a32_cas_acq_rel(&m.inject[site], &left, left - 1):
            return left == 1
    return False

# ---- bytes ----------------------------------------------------------------------------------------------------------
cdef uint8_t *page_bytes_slow(mem_t *m, uint64_t pfn) noexcept nogil:
    cdef uint8_t *at = m.bytes + (pfn << m.page_shift)
    pthread_mutex_lock(&m.bytes_lock)
    if not test_flag(&m.map[pfn], PG_mm_written):
        memset(at, 0, <size_t>1 << m.page_shift)
        a64_fetch_or_acq_rel(&m.map[pfn].flags, ONE << PG_mm_written)
        if page_is_tail(&m.map[pfn]):
            mark_tails(&m.map[compound_head_pfn(m.map, pfn)])
    pthread_mutex_unlock(&m.bytes_lock)
    return at

cdef void teardown(mem_t *m) noexcept nogil:
    cdef int i
    if m.spaces != NULL:
        m.spaces_free(m)
    for i in range(m.nr_regions):
        unreserve(m.region[i].bits, m.region[i].bits_size)
        free(m.region[i].ready)
        pthread_mutex_destroy(&m.region[i].lock)
    for i in range(m.nr_pools):
        free(m.pool[i].free)
        pthread_mutex_destroy(&m.pool[i].lock)
    if m.bytes != NULL:
        unreserve(m.bytes, m.nr_pages << m.page_shift)
    if m.blocktype != NULL:
        unreserve(m.blocktype, (m.nr_pages >> m.pageblock_order) + 1)
    if m.stats != NULL:
        unreserve(m.stats, NR_STAT_SLOTS * sizeof(stat_slot_t))
    if m.map != NULL:
        unreserve(m.map, (m.nr_pages + 4) * sizeof(page_t))
    memset(m, 0, sizeof(mem_t))


cdef class Memory:
    """Model a machine's physical memory: a mem_map of 64-byte struct pages on which everything else works.

    Memory(size, *, page_size=4096, movable=0, cma=0, hugetlb=None, devices=(), thp="madvise", shmem_thp="never",
    mthp=(), debug=False). Sizes are bytes or strings ("16G"). `movable` and `cma` are parts of `size` at its end, in
    ZONE_MOVABLE and in CMA page blocks, rounded up to whole page blocks. `hugetlb` maps sizes to numbers of pages that
    are set aside at once ({"2M": 64}). `devices` are DevicePages, placed behind `size`. `debug` turns the kernel's
    DEBUG_VM checks on; they raise BadPage.

    Raises InvalidArgument for sizes that do not fit together, MMError(ENOMEM) when the pools do not fit or the system
    refuses the reservation. Threads may use one Memory at once; close() waits for nobody and refuses while it is in
    use. Kernel counterpart: mem_map, pg_data_t, zones.
    """

    def __cinit__(self, *args, **kwargs):
        memset(&self.m, 0, sizeof(mem_t))

    def __init__(self, size, *, page_size=4096, movable=0, cma=0, hugetlb=None, devices=(), thp="madvise",
                 shmem_thp="never", mthp=(), debug=False):
        if self.config is not None:
            # Not again when it is closed, either: what was made of it would take the new one for its own.
            raise InvalidArgument(f"this Memory {'is set up already' if self.m.map != NULL else 'is closed: make a new one'}")
        from .boot import boot
        self.config = {"size": size, "page_size": page_size, "movable": movable, "cma": cma, "hugetlb": hugetlb,
                       "devices": devices, "thp": thp, "shmem_thp": shmem_thp, "mthp": mthp, "debug": debug}
        try:
            boot(self)
        except BaseException:
            teardown(&self.m)
            self.config = None
            raise

    # -- life ---------------------------------------------------------------------------------------------------------
    cdef mem_t *ptr(self) except NULL:
        if self.m.map == NULL:
            raise InvalidArgument("this Memory is closed")
        return &self.m

    cdef mem_t *enter(self) except NULL:
        cdef mem_t *m = self.ptr()
        a32_fetch_add_acq_rel(&self.users, 1)
        return m

    cdef void leave(self) noexcept:
        a32_fetch_sub_acq_rel(&self.users, 1)

    def close(self):
        """Give the memory back to the system; every later use raises InvalidArgument. Does nothing when closed.

        Raises MMError(EBUSY) while a view of .pages, a page_address() or another thread's call is alive.
        """
        if self.m.map == NULL:
            return
        if a32_load_acquire(&self.users) or self.views:
            raise MMError(_errno.EBUSY, f"close() while {self.views} views of this Memory (.pages, page_address) and "
                                        f"{a32_load_acquire(&self.users)} running calls use it: drop them first")
        teardown(&self.m)

    @property
    def closed(self):
        """True after close()."""
        return self.m.map == NULL

    def __enter__(self):
        self.ptr()
        return self

    def __exit__(self, kind, value, traceback):
        if kind is not None and self.views:
            return      # the traceback keeps views alive; the exception under way says more than EBUSY would
        self.close()

    def __dealloc__(self):
        # Views keep this object alive, so none is left here.
        teardown(&self.m)

    def __repr__(self):
        if self.m.map == NULL:
            return "<Memory closed>"
        return (f"<Memory {format_size(self.config['size'])}, pages of {format_size(ONE << self.m.page_shift)}, "
                f"{sum(zone.free for zone in self.zones)} free>")

    # -- looking ------------------------------------------------------------------------------------------------------
    @property
    def nr_pages(self):
        """Pages of mem_map, ZONE_DEVICE included."""
        return self.ptr().nr_pages

    @property
    def page_size(self):
        """Bytes of a base page."""
        return ONE << self.ptr().page_shift

    @property
    def debug(self):
        """True when the kernel's DEBUG_VM checks are on."""
        return self.ptr().debug

    @property
    def pmd_order(self):
        """Order of what one PMD maps: 9 with 4 KiB pages."""
        return self.ptr().pmd_order

    @property
    def max_order(self):
        """Largest order that folio_alloc gives: 10 with 4 KiB pages."""
        return self.ptr().max_order

    def __getbuffer__(self, Py_buffer *view, int flags):
        cdef mem_t *m = self.ptr()
        PyBuffer_FillInfo(view, self, <void *>m.map, <Py_ssize_t>(frontier_of(m) * sizeof(page_t)), 1, flags)
        self.views += 1

    def __releasebuffer__(self, Py_buffer *view):
        self.views -= 1

    @property
    def pages(self):
        """View mem_map, read-only: a structured array of PAGE_DTYPE whose index is the PFN.

        It ends at the highest PFN that was ever in use; a new one is made at each access, and close() refuses while
        one is alive. The values are live: other threads change them under the reader.
        """
        self.ptr()
        return np.frombuffer(self, PAGE_DTYPE)

    def pfn_valid(self, pfn):
        """Tell whether a PFN can be a page's: 0 < pfn < nr_pages, and in no hole between devices."""
        cdef mem_t *m = self.ptr()
        if isinstance(pfn, bool) or not hasattr(pfn, "__index__"):
            return False
        pfn = pfn.__index__()
        if not 0 < pfn < m.nr_pages:
            return False
        return pfn < m.nr_ram or device_of(m, pfn) != NULL

    cdef uint64_t check_pfn(self, object pfn) except 0:
        cdef mem_t *m = self.ptr()
        cdef int64_t number = plain_int(pfn)
        if mm_likely(0 < number < <int64_t>m.nr_ram):
            return <uint64_t>number
        if not self.pfn_valid(pfn):
            if isinstance(pfn, bool) or not hasattr(pfn, "__index__"):
                raise TypeError(f"a PFN is an integer, not {pfn!r}")
            if pfn == 0:
                raise InvalidArgument("PFN 0 is no page: it stands for NULL", pfn=0)
            raise InvalidArgument(f"PFN {int(pfn):#x} is outside this Memory: PFNs are 1..{m.nr_pages - 1:#x}"
                                  + (" without the holes between devices" if m.nr_devices else ""), pfn=int(pfn))
        return <uint64_t>int(pfn)

    def page(self, pfn):
        """Return the Page of a PFN (pfn_to_page). Raises InvalidArgument outside of mem_map."""
        return page_handle(self, self.check_pfn(pfn))

    def folio(self, pfn):
        """Return the Folio that holds a PFN (pfn_folio): a tail gives the folio of its head."""
        cdef uint64_t at = self.check_pfn(pfn)
        return folio_handle(self, compound_head_pfn(self.m.map, at))

    @property
    def zone_names(self):
        """Names of the zones that exist, lowest first."""
        return [zone.name for zone in self.zones]

    @property
    def zones(self):
        """List the zones: Zone(name, start_pfn, end_pfn, present, managed, free), numbers in pages."""
        cdef mem_t *m = self.ptr()
        cdef region_t *r
        rows = {}
        for i in range(m.nr_regions):
            r = &m.region[i]
            row = rows.setdefault(ZONE_NAMES[r.zone], [r.start, r.end, 0, 0, 0])
            row[1] = r.end
            row[2] += r.end - r.start
            row[3] += r.managed
            row[4] += a64_load_relaxed(&r.nr_free)
        if m.nr_devices:
            present = sum([m.device[i].end - m.device[i].start for i in range(m.nr_devices)])
            # Device pages are present, and the page allocator manages none of them.
            rows["Device"] = [m.device[0].start, m.nr_pages, present, 0, 0]
        return [Zone(name, *row) for name, row in rows.items()]

    def buddyinfo(self):
        """Return the numbers of free blocks by order, a list for each zone's name (/proc/buddyinfo)."""
        cdef mem_t *m = self.ptr()
        table = {}
        for i in range(m.nr_regions):
            row = table.setdefault(ZONE_NAMES[m.region[i].zone], [0] * (m.max_order + 1))
            for order in range(m.max_order + 1):
                row[order] += a64_load_relaxed(&m.region[i].nr_blocks[order])
        return table

    def hugetlb_pools(self):
        """Return {page size in bytes: (pages, free pages)} of the hugetlb pools."""
        cdef mem_t *m = self.ptr()
        return {(ONE << m.page_shift) << m.pool[i].order: (m.pool[i].nr, a64_load_relaxed(&m.pool[i].nr_free))
                for i in range(m.nr_pools)}

    def vmstat(self):
        """Return the counters under /proc/vmstat's names, in base pages."""
        cdef mem_t *m = self.ptr()
        values = {"nr_free_pages": sum([a64_load_relaxed(&m.region[i].nr_free) for i in range(m.nr_regions)])}
        values.update({name: stat_sum(m, item) for name, item in VMSTAT.items()})
        return values

    def opstats(self):
        """Return what algorithms cost since reset_opstats(), in operations; counted once a batch."""
        cdef mem_t *m = self.ptr()
        return {name: stat_sum(m, item) for name, item in OPSTATS.items()}

    def reset_opstats(self):
        """Set the counters of opstats() to 0; no other thread may be counting."""
        cdef mem_t *m = self.ptr()
        for item in OPSTATS.values():
            for slot in range(NR_STAT_SLOTS):
                a64_store_relaxed(&m.stats[slot].v[item], 0)

    @contextlib.contextmanager
    def inject(self, site, nth=1):
        """Make the nth occurrence of something that can fail, fail, within the with-statement.

        site: "frame" (a page frame), "table" (a page table), "list" (a page list), "sg" (a scatterlist chunk),
        "iommu_map" (a leaf), "iommu_unmap" (a call, which then unmaps nothing), "migrate", "alloc" (any other memory of the
        engine). `with mem.inject(...) as injection:` injection.fired says whether it has failed yet: to walk nth upward until
        nothing is left to fail.
        """
        if site not in INJECT_SITES:
            raise InvalidArgument(f"inject({site!r}): sites are {', '.join(INJECT_SITES)}")
        if not isinstance(nth, int) or not 0 < nth < 1 << 31:
            raise InvalidArgument(f"inject({site!r}, nth={nth!r}): nth counts from 1")
        cdef int index = INJECT_SITES[site]
        a32_store_relaxed(&self.ptr().inject[index], nth)
        a32_fetch_add_relaxed(&self.ptr().inject_armed, 1)
        injection = Injection(self, index)
        try:
            yield injection
        finally:
            injection.over = injection.fired
            a32_store_relaxed(&self.m.inject[index], 0)
            a32_fetch_add_relaxed(&self.m.inject_armed, <uint32_t>-1)

    # -- pages that always exist ----------------------------------------------------------------------------------------
    @property
    def zero_page(self):
        """The page that reads as zero (ZERO_PAGE): reserved, never pinned, never freed."""
        return page_handle(self, self.ptr().zero_pfn)

    @property
    def huge_zero_folio(self):
        """The folio of PMD size that reads as zero; allocated when first asked for, and then kept.

        Raises MMError(ENOMEM) when there is no block for it.
        """
        cdef mem_t *m = self.ptr()
        if m.huge_zero_pfn == 0:
            from .buddy import folio_alloc
            m.huge_zero_pfn = folio_alloc(self, m.pmd_order).pfn
        return folio_handle(self, m.huge_zero_pfn)

    # -- whole-memory work, in modules above this one -------------------------------------------------------------------
    def check(self):
        """Check every law of the engine on all of mem_map; raises BadPage naming the PFN and the law.

        No other thread may use the memory meanwhile. O(pages ever used).
        """
        from .check import check
        check(self)

    def memory_failure(self, page):
        """Mark a page as broken (hwpoison): a free one leaves the allocator, a used one will not return to it.

        It stays where it is mapped; user accesses to it raise MMError(EFAULT), as SIGBUS would end them, and so do faults that
        would map or copy it; get_user_pages() says EHWPOISON with FOLL_HWPOISON, else EFAULT.
        Raises MMError: EHWPOISON when it was marked before, EBUSY for the zero page, the huge zero folio and reserved
        pages. Kernel counterpart: memory_failure().
        """
        from .poison import memory_failure
        memory_failure(self, page)

    def save(self, path):
        """Write mem_map, the bytes behind its pages, and the counters to a file (.npz, no pickle)."""
        from .snapshot import save
        save(self, path)

    @staticmethod
    def load(path):
        """Return the Memory that save() wrote. Raises MMError(EINVAL) for a file that is none."""
        from .snapshot import load
        return load(path)


class Injection:
    """What inject() gives: fired is True once the occurrence that was to fail has failed."""

    def __init__(self, mem, site):
        self.mem, self.site, self.over = mem, site, None

    @property
    def fired(self):
        return _fired(self.mem, self.site) if self.over is None else self.over

cdef object _fired(Memory mem, int site):
    return a32_load_relaxed(&mem.m.inject[site]) == 0


def _flags_text(flags, zone):
    names = "|".join([flag.name for flag in PageFlags if flags & flag])
    return f"{names or 0} zone={ZONE_NAMES.get(zone, zone)}"


# Handles come and go at each call: the last ones are kept for the next. They refer to a Memory, which never refers to one.
@cython.freelist(64)
@cython.no_gc
cdef class Page:
    """Stand for one struct page: a Memory and a PFN. Hashable; equal when both are equal.

    A handle takes no reference: the page may be freed and used again behind it, as behind a struct page *.
    """

    def __init__(self, *args):
        raise TypeError("pages are had from a Memory: mem.page(pfn)")

    @property
    def flags(self):
        """PageFlags of this very page."""
        return PageFlags(a64_load_relaxed(&self.mem.ptr().map[self.pfn].flags) & ((ONE << ZONE_SHIFT) - 1))

    @property
    def refcount(self):
        """References of the folio that holds the page (page_count)."""
        cdef mem_t *m = self.mem.ptr()
        return <int32_t>a32_load_relaxed(&m.map[compound_head_pfn(m.map, self.pfn)]._refcount)

    @property
    def mapcount(self):
        """Mappings of this very page, PMD mappings of its folio not counted; 0 for a typed page."""
        cdef page_t *page = &self.mem.ptr().map[self.pfn]
        cdef int32_t count = <int32_t>a32_load_relaxed(&page._mapcount)
        return 0 if count < -1 else count + 1

    @property
    def folio(self):
        """The Folio that holds the page (page_folio)."""
        cdef mem_t *m = self.mem.ptr()
        return folio_handle(self.mem, compound_head_pfn(m.map, self.pfn))

    def __eq__(self, other):
        if not isinstance(other, Page):
            return NotImplemented
        return self.mem is (<Page>other).mem and self.pfn == (<Page>other).pfn

    def __hash__(self):
        return hash((id(self.mem), self.pfn))

    def __reduce__(self):
        raise TypeError("a Page belongs to its Memory and cannot be pickled; pickle its .pfn")

    def __repr__(self):
        if self.mem.m.map == NULL:
            return f"<struct page pfn={self.pfn:#x} of a closed Memory>"
        cdef page_t *page = &self.mem.m.map[self.pfn]
        return (f"<struct page pfn={self.pfn:#x} refcount={self.refcount} mapcount={self.mapcount} "
                f"flags={_flags_text(a64_load_relaxed(&page.flags), page_zone(page))}>")


@cython.freelist(64)
@cython.no_gc
cdef class Folio:
    """Stand for a folio: a Memory and the PFN of its head. Hashable; equal when both are equal.

    A handle takes no reference. Once the folio is freed or split away, helpers that take it refuse it.
    """

    def __init__(self, *args):
        raise TypeError("folios are had from folio_alloc, page.folio or mem.folio(pfn)")

    @property
    def order(self):
        """log2 of its pages."""
        return folio_order_of(&self.mem.ptr().map[self.pfn])

    @property
    def nr_pages(self):
        """Its base pages."""
        return ONE << folio_order_of(&self.mem.ptr().map[self.pfn])

    @property
    def refcount(self):
        """References, a C int (folio_ref_count)."""
        return <int32_t>a32_load_relaxed(&self.mem.ptr().map[self.pfn]._refcount)

    @property
    def pincount(self):
        """FOLL_PIN pins: exact for a large folio; for a small one _refcount / GUP_PIN_COUNTING_BIAS, which 1024 plain
        references look like as well."""
        cdef page_t *head = &self.mem.ptr().map[self.pfn]
        if page_is_head(head):
            return <int32_t>a32_load_relaxed(&as_folio(head)._pincount)
        if self.pfn == self.mem.m.zero_pfn:
            return 0
        return a32_load_relaxed(&head._refcount) >> GUP_PIN_COUNTING_SHIFT

    @property
    def mapcount(self):
        """Mappings of all its pages (folio_mapcount)."""
        return folio_mapcount_seen(&self.mem.ptr().map[self.pfn])

    @property
    def flags(self):
        """PageFlags of the head."""
        return PageFlags(a64_load_relaxed(&self.mem.ptr().map[self.pfn].flags) & ((ONE << ZONE_SHIFT) - 1))

    @property
    def dirty(self):
        """True when PG_dirty is set."""
        return bool(test_flag(&self.mem.ptr().map[self.pfn], PG_dirty))

    @property
    def locked(self):
        """True when somebody holds the folio lock."""
        return bool(test_flag(&self.mem.ptr().map[self.pfn], PG_locked))

    @property
    def page(self):
        """Its first Page."""
        self.mem.ptr()
        return page_handle(self.mem, self.pfn)

    def __eq__(self, other):
        if not isinstance(other, Folio):
            return NotImplemented
        return self.mem is (<Folio>other).mem and self.pfn == (<Folio>other).pfn

    def __hash__(self):
        return hash((id(self.mem), self.pfn, "folio"))

    def __reduce__(self):
        raise TypeError("a Folio belongs to its Memory and cannot be pickled; pickle its .pfn")

    def __repr__(self):
        if self.mem.m.map == NULL:
            return f"<struct folio pfn={self.pfn:#x} of a closed Memory>"
        cdef page_t *head = &self.mem.m.map[self.pfn]
        return (f"<struct folio pfn={self.pfn:#x} order={self.order} refcount={self.refcount} "
                f"pincount={self.pincount} mapcount={self.mapcount} flags={_flags_text(a64_load_relaxed(&head.flags), page_zone(head))}>")
