import enum
from typing import Final

import numpy as np

CYTHON_VERSION: Final[str]
PAGE_DTYPE: Final[np.dtype[np.void]]
FOLIO_DTYPE: Final[np.dtype[np.void]]
ZONE_NAMES: Final[dict[int, str]]

class PageFlags(enum.IntFlag):
    locked = 0x1
    writeback = 0x2
    referenced = 0x4
    uptodate = 0x8
    dirty = 0x10
    lru = 0x20
    head = 0x40
    waiters = 0x80
    active = 0x100
    workingset = 0x200
    owner_priv_1 = 0x400
    anon_exclusive = 0x800
    arch_1 = 0x1000
    reserved = 0x2000
    private = 0x4000
    private_2 = 0x8000
    reclaim = 0x10000
    swapbacked = 0x20000
    unevictable = 0x40000
    dropbehind = 0x80000
    mlocked = 0x100000
    hwpoison = 0x200000
    young = 0x400000
    idle = 0x800000
    arch_2 = 0x1000000
    arch_3 = 0x2000000
    mm_written = 0x10000000000
    mm_many_refs = 0x20000000000
    mm_pool = 0x40000000000
    mm_retired = 0x80000000000
    mm_isolated = 0x200000000000

class PageType(enum.IntEnum):
    buddy = 240
    offline = 241
    table = 242
    guard = 243
    hugetlb = 244
    slab = 245
    zsmalloc = 246
    unaccepted = 247
    large_kmalloc = 248
    netpp = 249
