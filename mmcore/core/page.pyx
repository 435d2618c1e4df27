"""Flags, page types, and the NumPy view of struct page and struct folio.

Units: bits of uint64 flags; types are the top byte of uint32 page_type; PAGE_DTYPE 64 bytes, FOLIO_DTYPE 256.
Raises: nothing but what enums raise.
Threads: plain values.
Kernel: enum pageflags, enum pagetype, struct page, struct folio.
"""
import enum

import numpy as np

__all__ = ["PageFlags", "PageType", "PAGE_DTYPE", "FOLIO_DTYPE", "ZONE_NAMES"]

cdef extern from *:
    int CYTHON_HEX_VERSION

#: The Cython that this was built with, as "3.1.2".
CYTHON_VERSION = ".".join([str(CYTHON_HEX_VERSION >> shift & 0xff) for shift in (24, 16, 8)])


class PageFlags(enum.IntFlag):
    """Name the bits of page.flags (`enum pageflags` of Linux 7.x), and mmcore's own."""
    locked = 1 << PG_locked
    writeback = 1 << PG_writeback
    referenced = 1 << PG_referenced
    uptodate = 1 << PG_uptodate
    dirty = 1 << PG_dirty
    lru = 1 << PG_lru
    head = 1 << PG_head
    waiters = 1 << PG_waiters
    active = 1 << PG_active
    workingset = 1 << PG_workingset
    owner_priv_1 = 1 << PG_owner_priv_1
    anon_exclusive = 1 << PG_owner_2
    arch_1 = 1 << PG_arch_1
    reserved = 1 << PG_reserved
    private = 1 << PG_private
    private_2 = 1 << PG_private_2
    reclaim = 1 << PG_reclaim
    swapbacked = 1 << PG_swapbacked
    unevictable = 1 << PG_unevictable
    dropbehind = 1 << PG_dropbehind
    mlocked = 1 << PG_mlocked
    hwpoison = 1 << PG_hwpoison
    young = 1 << PG_young
    idle = 1 << PG_idle
    arch_2 = 1 << PG_arch_2
    arch_3 = 1 << PG_arch_3
    mm_written = ONE << PG_mm_written
    mm_many_refs = ONE << PG_mm_many_refs
    mm_pool = ONE << PG_mm_pool
    mm_retired = ONE << PG_mm_retired
    mm_isolated = ONE << PG_mm_isolated


class PageType(enum.IntEnum):
    """Name the types in the top byte of page.page_type."""
    buddy = PGTY_buddy
    offline = PGTY_offline
    table = PGTY_table
    guard = PGTY_guard
    hugetlb = PGTY_hugetlb
    slab = PGTY_slab
    zsmalloc = PGTY_zsmalloc
    unaccepted = PGTY_unaccepted
    large_kmalloc = PGTY_large_kmalloc
    netpp = PGTY_netpp


ZONE_NAMES = {ZONE_NORMAL: "Normal", ZONE_MOVABLE: "Movable", ZONE_DEVICE: "Device"}


def _dtype(size, fields):
    return np.dtype({
        "names": [name for name, _, _ in fields],
        "formats": [kind for _, kind, _ in fields],
        "offsets": [offset for _, _, offset in fields],
        "itemsize": size,
    })


_PAGE_FIELDS = [
    ("flags", "<u8", 0),
    ("compound_info", "<u8", 8), ("lru_next", "<u8", 8), ("pgmap", "<u8", 8),
    ("lru_prev", "<u8", 16),
    ("mapping", "<u8", 24),
    ("index", "<u8", 32),
    ("private", "<u8", 40),
    ("_mapcount", "<i4", 48), ("page_type", "<u4", 48),
    ("_refcount", "<i4", 52),
    ("memcg_data", "<u8", 56),
]

#: One struct page: 64 bytes, unions as overlapping fields.
PAGE_DTYPE = _dtype(64, _PAGE_FIELDS)

#: struct folio over the first four pages of a folio; only order >= 2 has all four.
FOLIO_DTYPE = _dtype(256, _PAGE_FIELDS + [
    ("_flags_1", "<u8", 64), ("_head_1", "<u8", 72),
    ("_large_mapcount", "<i4", 80), ("_nr_pages_mapped", "<i4", 84),
    ("_entire_mapcount", "<i4", 88), ("_pincount", "<i4", 92),
    ("_mm_id_mapcount", ("<i4", (2,)), 96), ("_mm_id", ("<u4", (2,)), 104),
    ("_mapcount_1", "<i4", 112), ("_refcount_1", "<i4", 116),
    ("_nr_pages", "<u4", 120),
    ("_flags_2", "<u8", 128), ("_head_2", "<u8", 136), ("_deferred_list", ("<u8", (2,)), 144),
    ("_flags_3", "<u8", 192), ("_head_3", "<u8", 200),
    ("_hugetlb_subpool", "<u8", 208), ("_hugetlb_cgroup", "<u8", 216),
    ("_hugetlb_cgroup_rsvd", "<u8", 224), ("_hugetlb_hwpoison", "<u8", 232),
])
