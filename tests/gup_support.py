"""What the tests of the get and pin families share: a machine with one of everything, the calls, and giving back."""

import ctypes

import numpy as np
import pytest

from mmcore import *

PAGE = 4096
HUGE = 2 << 20
EHWPOISON = 133

GETS = (get_user_pages, get_user_pages_remote, get_user_pages_unlocked, get_user_pages_fast)
PINS = (pin_user_pages, pin_user_pages_remote, pin_user_pages_unlocked, pin_user_pages_fast)
FAST = (get_user_pages_fast, get_user_pages_fast_only, pin_user_pages_fast)
SLOW = (get_user_pages, get_user_pages_remote, get_user_pages_unlocked, pin_user_pages, pin_user_pages_remote,
        pin_user_pages_unlocked)
ALL = GETS + PINS
GENERATIONS = ("leaf", "page")


def machine(size="64M", **config):
    """A Memory with Movable, CMA, a hugetlb pool, and devices of each kind that can be mapped."""
    config = {"movable": "16M", "cma": "8M", "hugetlb": {"2M": 4}, "thp": "madvise", "shmem_thp": "madvise"} | config
    devices = (DevicePages("4M", "generic", align="2M"), DevicePages("4M", "generic", align="2M", compound=False),
               DevicePages("2M", "pci_p2pdma", align="2M"), DevicePages("2M", "fsdax", align="4K"))
    return Memory(size, devices=devices, **config)


def is_pin(call):
    """Does this function pin?"""
    return call.__name__.startswith("pin")


def give_back(call, pages):
    """Release what a call returned."""
    if is_pin(call):
        unpin_user_pages(pages)
    else:
        release_pages(pages)


def pins_of(mem):
    """Live pins by the counters."""
    stat = mem.vmstat()
    return stat["nr_foll_pin_acquired"] - stat["nr_foll_pin_released"]


def zone_of(mem, pfn):
    """Name of the zone that holds a PFN; CMA is Normal."""
    return next(zone.name for zone in mem.zones if zone.start_pfn <= pfn < zone.end_pfn)


def outcome(call, *args, **kwargs):
    """What a call came to: its PFNs, or its errno."""
    try:
        return "pages", call(*args, **kwargs)
    except MMError as error:
        return "errno", error.errno


def frames(mem, ignore=0):
    """mem_map, without flags that depend on which walk touched a page."""
    pages = np.array(mem.pages)
    pages["flags"] &= np.uint64(~int(ignore) & (1 << 64) - 1)
    return pages


def over(mem, mm=None):
    """All pins are gone and every law holds; with an mm, that exits first."""
    if mm is not None:
        mm.exit()
    assert pins_of(mem) == 0
    mem.check()


# The fixtures of every file that imports all of this.
@pytest.fixture
def mem():
    with machine() as mem:
        yield mem
        assert pins_of(mem) == 0
        mem.check()


@pytest.fixture
def mm(mem):
    with MM(mem) as mm:
        yield mm


def hint_numa(mm, addr):
    """Take access from the entry that maps an address, as a scan for NUMA balancing does: who uses the page next faults."""
    mem, page = mm.mem, mm.page_at(addr)
    start = np.frombuffer(page_address(page), np.uint8).ctypes.data - page.pfn * PAGE
    for table in np.flatnonzero(mem.pages["page_type"] >> 24 == 0xf2).tolist():
        words = (ctypes.c_uint64 * 512).from_address(start + table * PAGE)
        for i, first in ((addr >> 12 & 511, page.pfn), (addr >> 21 & 511, page.pfn - (addr >> 12 & 511))):
            if words[i] & 0x101 and words[i] >> 12 & (1 << 40) - 1 == first:
                words[i] = words[i] & ~3 | 1 << 8
                return
    raise LookupError(hex(addr))
