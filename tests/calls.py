"""Every public call, by what its arguments are: for calling all of them wrongly."""
import mmcore as mmc
from mmcore.core import dma, iommu, scatterlist, sgalloc, sgcopy, sgdraw, sgiter, sgsplit
from mmcore.drivers import bio, ibaccess, iouring, iov, mr, umem, umem_blocks, vfio

# What an argument is. `live`: the folio must not be free, also where the call only looks.
FOLIO, LIVE_FOLIO, PAGE, LIVE_PAGE, PAGES, FOLIOS, MEMORY = "folio", "live folio", "page", "live page", "pages", "folios", "mem"


class Count:
    """A number; `good` is one that fits a folio of order 3 with one pin, `none`: None is allowed too."""

    def __init__(self, good, none=False):
        self.good, self.none = good, none


class Plain:
    """An argument that no wrong value is tried for here."""

    def __init__(self, good):
        self.good = good


# On an order-3 folio with two references and two pins every call below is valid with its good arguments.
CALLS = {
    "page_to_pfn": [PAGE], "pfn_to_page": [MEMORY, Count(8)], "page_folio": [PAGE], "compound_head": [PAGE],
    "PageHead": [PAGE], "PageTail": [PAGE], "PageCompound": [PAGE], "PageDirty": [PAGE], "compound_order": [PAGE],
    "compound_nr": [PAGE], "is_zero_page": [PAGE], "dump_page": [PAGE, Plain("why")],
    "is_huge_zero_folio": [FOLIO], "is_huge_zero_page": [PAGE],
    "folio_order": [FOLIO], "folio_nr_pages": [FOLIO], "folio_size": [FOLIO], "folio_test_large": [FOLIO],
    "folio_page": [FOLIO, Count(1)], "folio_page_idx": [FOLIO, PAGE], "folio_remaining_pages": [FOLIO, PAGE],
    "folio_ref_count": [FOLIO], "folio_mapcount": [FOLIO], "folio_expected_ref_count": [FOLIO],
    "folio_maybe_dma_pinned": [FOLIO], "folio_is_longterm_pinnable": [FOLIO],
    "folio_get": [LIVE_FOLIO], "folio_put": [LIVE_FOLIO], "folio_put_refs": [LIVE_FOLIO, Count(1)],
    "folio_try_get": [FOLIO], "folio_ref_freeze": [FOLIO, Count(77)], "folio_ref_unfreeze": [LIVE_FOLIO, Count(1)],
    "get_page": [LIVE_PAGE], "put_page": [LIVE_PAGE], "try_grab_folio": [LIVE_FOLIO, Count(1)],
    "folio_add_pin": [LIVE_FOLIO], "folio_add_pins": [LIVE_FOLIO, Count(1)], "folio_split": [LIVE_FOLIO, Count(1)],
    "zone_device_page_init": [LIVE_FOLIO], "reclaim": [LIVE_FOLIO],
    "folio_lock": [LIVE_FOLIO], "folio_trylock": [LIVE_FOLIO], "folio_unlock": [LIVE_FOLIO], "folio_test_dirty": [FOLIO],
    "folio_mark_dirty": [LIVE_FOLIO], "folio_mark_dirty_lock": [LIVE_FOLIO], "set_page_dirty": [LIVE_PAGE],
    "set_page_dirty_lock": [LIVE_PAGE], "folio_clear_dirty_for_io": [LIVE_FOLIO], "folio_start_writeback": [LIVE_FOLIO],
    "folio_end_writeback": [LIVE_FOLIO], "page_address": [LIVE_PAGE], "folio_address": [LIVE_FOLIO],
    "folio_alloc": [MEMORY, Count(0)], "alloc_page": [MEMORY], "alloc_pages_bulk": [MEMORY, Count(1)],
    "folio_alloc_at": [MEMORY, Count(64), Count(0)], "folios_alloc_at": [MEMORY, Plain([64]), Plain([0])],
    "PageList": [MEMORY, Plain([2])], "PageRanges": [MEMORY, Plain([2]), Plain([1])],
    "num_pages_contiguous": [PAGES, Count(1, none=True)], "compound_next": [PAGES, Count(0)],
    "for_each_compound_head": [PAGES, Count(1, none=True)], "folio_runs": [PAGES],
    "compound_range_next": [PAGE, Count(4), Count(0)], "for_each_compound_range": [PAGE, Count(4)],
    "put_compound_head": [LIVE_FOLIO, Count(1)], "unpin_user_page": [LIVE_PAGE],
    "unpin_user_pages": [PAGES, Count(1, none=True)], "unpin_user_pages_dirty_lock": [PAGES, Count(1, none=True), Plain(True)],
    "unpin_user_page_range_dirty_lock": [LIVE_PAGE, Count(1), Plain(True)], "unpin_user_folio": [LIVE_FOLIO, Count(1)],
    "unpin_user_folio_dirty_locked": [LIVE_FOLIO, Count(1), Plain(True)], "unpin_folio": [LIVE_FOLIO],
    "unpin_folios": [FOLIOS], "release_pages": [PAGES], "folios_put": [FOLIOS], "grab_pages": [PAGES],
    "longterm_unpinnable": [PAGES], "migrate_folio_longterm": [LIVE_FOLIO],
}

# Scatterlists and DMA: test_scatterlist_wrong.py calls these wrongly.
SCATTERLIST = {name for module in (scatterlist, sgalloc, sgcopy, sgdraw, sgiter, sgsplit, dma, iommu)
               for name in module.__all__}
# test_iov.py calls these.
EXTRACTION = {*bio.__all__, *iov.__all__}
# test_umem.py, test_mr.py and test_iouring.py call these wrongly.
REGISTRATION = {name for module in (ibaccess, iouring, mr, umem, umem_blocks) for name in module.__all__}
# test_vfio_*.py call these wrongly.
VFIO = set(vfio.__all__)
# Calls on address spaces and files: called wrongly in the tests of their own files.
IN_SPACES = {"get_user_pages", "get_user_pages_fast", "get_user_pages_fast_only", "get_user_pages_remote",
             "get_user_pages_unlocked", "pin_user_pages", "pin_user_pages_fast", "pin_user_pages_remote",
             "pin_user_pages_unlocked", "memfd_pin_folios", "hmm_range_fault", "hmm_pfn_to_map_order", "hmm_pfn_to_pfn"}
CONSTANTS = ("FOLL_", "IB_ACCESS_", "PROT_", "MAP_", "MADV_", "HMM_PFN_")

# What the names of mmcore are that no caller calls: types, dtypes, constants.
NOT_CALLED = {"BadPage", "DevicePages", "DeviceRegion", "FOLIO_DTYPE", "Folio", "InvalidArgument", "MMError", "Memory",
              "PAGE_DTYPE", "Page", "PageFlags", "PageType", "Zone", "FOLL", "GUP_PIN_COUNTING_BIAS", "GupOutput", "File",
              "MM", "VM", "VMA", "PROT", "MAP", "MADV", "PinLedger", "get_include"}


def good(argument, mem, folio):
    """A valid value of an argument, on a folio of order 3."""
    if isinstance(argument, (Count, Plain)):
        return argument.good
    return {FOLIO: folio, LIVE_FOLIO: folio, PAGE: mem.page(folio.pfn + 1), LIVE_PAGE: mem.page(folio.pfn + 1),
            PAGES: mmc.PageList(mem, [folio.pfn + 1, folio.pfn + 2]), FOLIOS: [folio], MEMORY: mem}[argument]


def arguments(name, mem, folio):
    """Valid arguments of a call."""
    return [good(argument, mem, folio) for argument in CALLS[name]]


def positions(*kinds):
    """(name, index) of every argument of one of these kinds."""
    return [(name, i) for name, args in CALLS.items() for i, argument in enumerate(args)
            if argument in kinds or (isinstance(argument, Count) and Count in kinds)]


def consume(result):
    """Run what a call only returns lazily."""
    if hasattr(result, "__next__"):
        return list(result)
    return result
