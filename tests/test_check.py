"""Memory.check(): every law that can be broken behind the engine's back is seen, and named with its PFN."""
import pytest

import mmcore as mmc
from mmcore import BadPage, DevicePages, InvalidArgument, Memory, PageFlags
from support import poke


#   2 free | 8..15 order 3, pinned twice | 16 small, pinned once, dirty | 32..63 order 5 | 64 small | 72..79 free, used
#   512..1023 hugetlb in use | the pool's other folio | Movable | two devices
@pytest.fixture
def mem():
    mem = Memory("16M", movable="2M", hugetlb={"2M": 2},
                 devices=[DevicePages("64K", align="32K"), DevicePages("8K", type="fsdax")])
    for pfn, order in ((8, 3), (16, 0), (32, 5), (64, 0), (72, 3)):
        mmc.folio_alloc_at(mem, pfn, order)
    mmc.try_grab_folio(mem.folio(8), 2)
    mmc.try_grab_folio(mem.folio(16), 1)
    mmc.folio_mark_dirty(mem.folio(16))
    mmc.folio_start_writeback(mem.folio(32))
    mmc.folio_put(mem.folio(72))
    mmc.folio_alloc(mem, 9, hugetlb=True)
    mmc.folio_alloc(mem, 2, zone="Movable")
    mem.check()
    return mem


POOLED = 3584 - 512                 # the second folio of the pool; it ends where Movable starts
DEVICE = 4096
TAIL_WORD = {order: (~0 << order + 6) & (1 << 64) - 1 | 1 for order in range(12)}

BREACHES = [
    # name, pfn, field, value, the PFN in the error (None: any), a word of the law
    ("reference on a free page", 72, "_refcount", 1, 72, "free"),
    ("free page that is a tail", 73, "compound_info", TAIL_WORD[3], 73, "free"),
    ("free page that is dirty", 75, "flags", 1 << 4 | 2 << 51, 75, "free"),
    ("free page that is mapped", 74, "_mapcount", 0, 74, "free"),
    ("lost frame", 64, "_refcount", 0, 64, "0 references"),
    ("lost folio", 32, "_refcount", 0, 32, "references"),
    ("fewer references than pins", 8, "_refcount", 1, 8, "pins"),
    ("tail with a reference", 10, "_refcount", 1, 10, "tail"),
    ("tail of another head", 11, "compound_info", TAIL_WORD[2], 11, "tail"),
    ("tail that is none", 12, "compound_info", 0, 12, "tail"),
    ("tail that is a head", 13, "flags", 1 << 6 | 2 << 51, 13, "tail"),
    ("small page that is a tail", 64, "compound_info", TAIL_WORD[6], None, "tail"),
    ("head that is none", 32, "flags", 1 << 1 | 2 << 51, None, ""),
    ("head without an order", 8, "_flags_1", 2 << 51, 8, "order"),
    ("head of another order", 8, "_flags_1", 2 << 51 | 2, None, ""),
    ("folio of another size", 8, "_nr_pages", 4, 8, "_nr_pages"),
    ("pin that nobody counted", 8, "_pincount", 3, None, "pin"),
    ("pin that got lost", 8, "_pincount", 1, None, "pin"),
    ("small pin that nobody counted", 64, "_refcount", 1025, None, "pin"),
    ("small pin that got lost", 16, "_refcount", 1, None, "pin"),
    ("pin of a device page that nobody counted", DEVICE, "_pincount", 1, None, "pin"),
    ("dirty page that nobody counted", 64, "flags", 1 << 4 | 2 << 51, None, "dirty"),
    ("clean page that was counted", 16, "flags", 2 << 51, None, "dirty"),
    ("writeback that nobody counted", 64, "flags", 1 << 1 | 2 << 51, None, "writeback"),
    ("isolated and forgotten", 64, "flags", 1 << 45 | 2 << 51, 64, "isolated"),
    ("page of another zone", 64, "flags", 3 << 51, 64, "zone"),
    ("mapped without references", 64, "_mapcount", 4, 64, "mappings"),
    ("zero page that is dirty", 1, "flags", 1 << 13 | 1 << 4 | 2 << 51, 1, "zero page"),
    ("zero page without a reference", 1, "_refcount", 0, 1, "zero page"),
    ("NULL that is not reserved", 0, "flags", 2 << 51, None, "reserved"),
    ("pooled folio with a reference", POOLED, "_refcount", 1, POOLED, "pool"),
    ("folio in use that says it is pooled", 32, "flags", 1 << 42 | 1 << 6 | 1 << 1 | 2 << 51, 32, "pool"),
    ("device folio of another device", DEVICE, "pgmap", 4, DEVICE, "device"),
    ("device folio of another order", DEVICE + 1, "flags", 4 << 51 | 2, None, ""),
]


@pytest.mark.parametrize("name, pfn, field, value, where, law", BREACHES, ids=[row[0] for row in BREACHES])
def test_breach_is_seen(mem, name, pfn, field, value, where, law):
    if pfn == POOLED:
        assert PageFlags.mm_pool in mem.page(pfn).flags
    before = poke(mem, pfn, field, value)
    with pytest.raises(BadPage) as caught:
        mem.check()
    assert law in str(caught.value), "another law than the one that was broken"
    if where is not None:
        assert caught.value.pfn == where
    assert caught.value.law and f"{caught.value.pfn:#x}" in str(caught.value)
    poke(mem, pfn, field, before)
    mem.check()


@pytest.mark.parametrize("kwargs", [
    {}, dict(movable="2M", cma="2M"), dict(hugetlb={"2M": 1, "64K": 2}), dict(page_size="64K"),
    dict(devices=[DevicePages("64K"), DevicePages("2M", type="fsdax", align="2M"), DevicePages("1G", align="1G")]),
])
def test_fresh_machines_keep_every_law(kwargs):
    Memory("64M", **kwargs).check()


def test_check_changes_nothing(mem):
    before = mem.pages.tobytes(), mem.vmstat(), mem.opstats(), mem.buddyinfo()
    mem.check()
    assert (mem.pages.tobytes(), mem.vmstat(), mem.opstats(), mem.buddyinfo()) == before


def test_check_of_a_large_machine_looks_at_what_was_used():
    mem = Memory("1T")
    for zone_end in 9, 10, 0:
        mmc.folio_alloc(mem, zone_end)
    mem.check()


def test_check_of_a_closed_memory():
    mem = Memory("4M")
    mem.close()
    with pytest.raises(InvalidArgument):
        mem.check()
