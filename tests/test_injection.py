"""Every step that can fail is made to fail once, and each time nothing leaks, nothing has changed, and every law holds.

A row of CASES is a name, a function that builds a world and returns the call to be tried, and the sites that must have
failed in it. For each site the nth occurrence fails, n from 1 upward in a world of its own each, until none is left:

    build ── look ── call (the nth occurrence fails) ── look again: as before ── call again: succeeds ── undo ── empty

A failure that the call makes up for (a THP that becomes base pages, a short list of pinned pages) is no error; what it did
is undone, and must have left nothing.
"""

import pytest

import mmcore as mmc
from injection_support import *
from mm_support import ANON, HUGE, PAGE
from mmcore import MM, File, MMError, PageList, PageRanges, SGAppendTable

SITES = ("frame", "table", "list", "sg", "iommu_map", "migrate", "alloc")
CLOSELY = 16                # the first occurrences of a site, which fail one by one; further on in growing steps

MAPPING = {"frame", "table", "list", "iommu_map", "migrate", "alloc"}        # what pins for long and maps

CASES = {
    # ---- fork
    "fork base pages": (fork(lambda world, mm: written(mm, 64 * PAGE)), {"frame", "table", "alloc"}),
    "fork pinned base pages": (fork(pinned_base), {"frame", "table", "alloc"}),
    "fork a THP": (fork(lambda world, mm: thp(mm)), {"frame", "table", "alloc"}),
    "fork a pinned THP": (fork(pinned_thp), {"frame", "table", "alloc"}),
    "fork copies of a file": (fork(private_file), {"frame", "table", "alloc"}),
    "fork what is swapped out": (fork(swapped), {"frame", "table", "alloc"}),
    "fork hugetlb": (fork(lambda world, mm: hugetlb(mm)), {"frame", "table", "alloc"}),
    "fork pinned hugetlb": (fork(pinned_hugetlb), {"frame", "table", "alloc"}),
    "fork many VMAs": (fork(many_vmas), {"frame", "table", "alloc"}),
    # ---- gup
    "pin": (gup(mmc.pin_user_pages), {"list"}),
    "pin, as ranges": (gup(mmc.pin_user_pages, PageRanges), {"list"}),
    "pin, into a scatterlist": (gup(mmc.pin_user_pages, SGAppendTable, nr=300), {"list", "sg"}),
    "pin, into Python": (gup(mmc.pin_user_pages, Sink), {"list"}),
    "pin, a page at a time": (gup(mmc.pin_user_pages, acquire="page"), {"list"}),
    "pin fast": (gup(mmc.pin_user_pages_fast), {"list"}),
    "pin fast, as ranges": (gup(mmc.pin_user_pages_fast, PageRanges), {"list"}),
    "pin fast, into a scatterlist": (gup(mmc.pin_user_pages_fast, SGAppendTable, nr=300), {"sg"}),
    "pin fast, into Python": (gup(mmc.pin_user_pages_fast, Sink), {"list"}),
    "pin many": (gup(mmc.pin_user_pages_fast, nr=900), {"list"}),
    "pin what is not there": (gup(mmc.pin_user_pages, populated=False), {"frame", "table", "list"}),
    "pin what is not there, fast": (gup(mmc.pin_user_pages_fast, populated=False), {"frame", "table", "list"}),
    "pin what is not there, into a scatterlist": (gup(mmc.pin_user_pages, SGAppendTable, populated=False),
                                                  {"frame", "table", "list", "sg"}),
    "pin into a table in use": (append_to_a_table, {"list", "sg"}),
    # ---- longterm: what is in Movable memory is moved first
    "longterm, anonymous": (longterm(movable_anon), {"frame", "list", "migrate", "alloc"}),
    "longterm, anonymous, fast": (longterm(movable_anon, call=mmc.pin_user_pages_fast), {"frame", "list", "migrate", "alloc"}),
    "longterm, THP": (longterm(movable_thp), {"frame", "list", "migrate", "alloc"}),
    "longterm, file": (longterm(movable_file), {"frame", "list", "migrate", "alloc"}),
    # ---- registration
    "umem, sink": (umem("sink"), {"frame", "table", "list", "sg", "iommu_map", "migrate", "alloc"}),
    "umem, list": (umem("list"), {"frame", "table", "list", "sg", "iommu_map", "migrate", "alloc"}),
    "umem of what is not there, sink": (umem("sink", False), {"frame", "table", "list", "sg", "iommu_map", "migrate", "alloc"}),
    "umem of what is not there, list": (umem("list", False), {"frame", "table", "list", "sg", "iommu_map", "migrate", "alloc"}),
    "umem release, range": (release_umem("range"), {"alloc"}),
    "umem release, array": (release_umem("array"), {"list", "alloc"}),
    "umem release, page": (release_umem("page"), {"alloc"}),
    "MR, another translation": (rereg, {"frame", "list", "sg", "iommu_map", "migrate", "alloc"}),
    "io_uring register": (register(False), {"frame", "list", "migrate", "alloc"}),
    "io_uring register, THP": (register(True), {"frame", "list", "migrate", "alloc"}),
    "io_uring update": (update, {"frame", "list", "migrate", "alloc"}),
    "io_uring unregister": (unregister, {"alloc"}),
    "VFIO map, sink": (vfio(map_dma, unmap_all, acquire="sink"), MAPPING),
    "VFIO map, batch": (vfio(map_dma, unmap_all, acquire="batch"), MAPPING),
    "VFIO map, page": (vfio(map_dma, unmap_all, acquire="page"), MAPPING),
    "VFIO map of what is not there, sink": (vfio(map_few, unmap_all, 40, False, acquire="sink"), MAPPING),
    "VFIO map of what is not there, batch": (vfio(map_few, unmap_all, 40, False, acquire="batch"), MAPPING),
    "VFIO map of what is not there, page": (vfio(map_few, unmap_all, 40, False, acquire="page"), MAPPING),
    "VFIO map, runs forgotten": (vfio(map_few, unmap_all, 40, remember_runs=False), MAPPING),
    "VFIO map, two domains, dirty tracking": (
        vfio(map_few, unmap_all, 40, attached=2, build=lambda c, *_: c.dirty_pages_start()), MAPPING),
    "VFIO attach the first domain": (
        vfio(lambda c, d, mm, addr: c.attach(d[0]), lambda c, d, _: None, 40, attached=0, build=map_few), MAPPING),
    "VFIO attach another, by runs": (vfio(attach_second, detach_second, 40, build=map_few), {"table", "iommu_map"}),
    "VFIO attach another, by asking": (vfio(attach_second, detach_second, 40, build=map_few, remember_runs=False), {"table", "iommu_map"}),
    "VFIO detach": (vfio(lambda c, d, mm, addr: c.detach(d[0]), lambda c, d, _: None, 40, build=map_few), {"alloc"}),
    "VFIO pin_pages": (vfio(pin_pages, unpin_pages, 40, attached=0, build=open_driver), {"frame", "list", "migrate", "alloc"}),
    "VFIO pin_pages of what is mapped": (vfio(pin_pages, unpin_pages, 40, build=open_driver), {"list", "alloc"}),
    "VFIO pin_pages of what is not there": (
        vfio(pin_pages, unpin_pages, 40, False, attached=0, build=open_driver), {"frame", "table", "list", "migrate", "alloc"}),
    "VFIO dirty_pages_start": (
        vfio(lambda c, *_: c.dirty_pages_start(), lambda c, d, _: c.dirty_pages_stop(), 40, build=map_few), {"alloc"}),
    "VFIO unmap with a bitmap, range": (vfio(unmap_with_bitmap, lambda *_: None, 40, build=map_tracked, release="range"), {"alloc"}),
    "VFIO unmap with a bitmap, folio": (vfio(unmap_with_bitmap, lambda *_: None, 40, build=map_tracked, release="folio"), {"alloc"}),
    "VFIO unmap with a bitmap, page": (vfio(unmap_with_bitmap, lambda *_: None, 40, build=map_tracked, release="page"), {"alloc"}),
    "VFIO unmap, runs forgotten": (
        vfio(unmap_with_bitmap, lambda *_: None, 40, attached=2, build=map_tracked, remember_runs=False), {"alloc"}),
    # ---- scatterlists
    "sg_alloc_table": (sg(lambda world: lambda: mmc.sg_alloc_table(world.mem, 700)), {"sg"}),
    "sg from pages": (sg(lambda world: (lambda pages: lambda: mmc.sg_alloc_table_from_pages(pages, 0, len(pages) * PAGE))(
        every_other(world, 400))), {"sg"}),
    "sg append": (sg_append, {"sg"}),
    "sg_split": (sg_split, {"sg", "alloc"}),
    "sgl_alloc": (unallocated(lambda world: mmc.sgl_alloc(world.mem, 300 * PAGE), mmc.sgl_free), {"frame", "list", "sg"}),
    "dma_map_sgtable": (dma_map, {"table", "iommu_map"}),
    # ---- address spaces
    "a new MM": (lambda world: ((lambda: MM(world.mem)), (lambda mm: mm.exit())), {"frame", "table", "alloc"}),
    "mmap populate": (space(lambda w, mm, b: mm.mmap(32 * PAGE, flags=ANON | mmc.MAP_POPULATE), undo=unmap(32 * PAGE)),
                      {"frame", "table", "alloc"}),
    "mmap populate, THP": (space(lambda w, mm, b: mm.mmap(2 * HUGE, flags=ANON | mmc.MAP_POPULATE), undo=unmap(2 * HUGE), thp="always"),
                           {"frame", "table", "alloc"}),
    "mmap locked": (space(lambda w, mm, b: mm.mmap(32 * PAGE, flags=ANON | mmc.MAP_LOCKED), undo=unmap(32 * PAGE)),
                    {"frame", "table", "alloc"}),
    "mmap hugetlb": (space(lambda w, mm, b: mm.mmap(2 * HUGE, flags=ANON | mmc.MAP_HUGETLB | mmc.MAP_POPULATE), undo=unmap(2 * HUGE)),
                     {"frame", "table", "alloc"}),
    "mmap over a hole": (space(lambda w, mm, addr: mm.mmap(8 * PAGE, flags=ANON | mmc.MAP_FIXED, addr=addr + 8 * PAGE),
                               lambda w, mm: written(mm, 48 * PAGE)), {"alloc"}),
    "touch": (space(lambda w, mm, addr: mm.touch(addr, 32 * PAGE), lambda w, mm: mm.mmap(32 * PAGE)), {"frame", "table"}),
    "touch, THP": (space(lambda w, mm, addr: mm.touch(addr, 2 * HUGE), advised), {"frame", "table"}),
    "touch, mTHP": (space(lambda w, mm, addr: mm.touch(addr, 64 * PAGE), lambda w, mm: mm.mmap(64 * PAGE), mthp=(4,)), {"frame", "table"}),
    "touch hugetlb": (space(lambda w, mm, addr: mm.touch(addr, 2 * HUGE), lambda w, mm: mm.mmap(2 * HUGE, flags=ANON | mmc.MAP_HUGETLB)),
                      {"frame", "table"}),
    "touch a file": (space(lambda w, mm, addr: mm.touch(addr, 32 * PAGE), shared_file()), {"frame", "table"}),
    "touch ext4": (space(lambda w, mm, addr: mm.touch(addr, 32 * PAGE), shared_file("ext4")), {"frame", "table"}),
    "write to a private file": (space(lambda w, mm, addr: mm.touch(addr, 4 * PAGE), private_of_file), {"frame", "table"}),
    "write after fork": (space(lambda w, mm, addr: mm.touch(addr, 4 * PAGE), forked(lambda w, mm: written(mm, 32 * PAGE))), {"frame"}),
    "write after fork, THP": (space(lambda w, mm, addr: mm.touch(addr, 4 * PAGE), forked(lambda w, mm: thp(mm))), {"frame", "table"}),
    "write after fork, hugetlb": (space(lambda w, mm, addr: mm.touch(addr, HUGE), forked(lambda w, mm: hugetlb(mm))), {"frame"}),
    "swap out": (space(lambda w, mm, addr: mm.madvise(addr, 64 * PAGE, mmc.MADV_PAGEOUT), lambda w, mm: written(mm, 64 * PAGE)), {"alloc"}),
    "swap out, THP": (space(lambda w, mm, addr: mm.madvise(addr, HUGE, mmc.MADV_PAGEOUT), lambda w, mm: thp(mm)),
                      {"frame", "table", "alloc"}),
    "swap out, tmpfs": (space(lambda w, mm, addr: mm.madvise(addr, 8 * PAGE, mmc.MADV_PAGEOUT),
                              lambda w, mm: (lambda addr: (mm.write(addr, b"t" * 8 * PAGE), addr)[1])(shared_file()(w, mm))), {"alloc"}),
    "swap in": (space(lambda w, mm, addr: mm.read(addr, 32 * PAGE), out), {"frame"}),
    "swap in by a write": (space(lambda w, mm, addr: mm.touch(addr, 64 * PAGE), out), {"frame"}),
    "collapse": (space(lambda w, mm, addr: mm.madvise(addr, HUGE, mmc.MADV_COLLAPSE), sparse), {"frame"}),
    "split by a system call": (space(lambda w, mm, addr: mm.mprotect(addr + 5 * PAGE, PAGE, mmc.PROT_READ), lambda w, mm: thp(mm)),
                               {"frame", "table", "alloc"}),
    "folio_split": (folio_split, {"frame", "table"}),
    "mprotect in the middle": (space(lambda w, mm, addr: mm.mprotect(addr + 5 * PAGE, PAGE, mmc.PROT_READ),
                                     lambda w, mm: written(mm, 32 * PAGE)), {"alloc"}),
    "munmap in the middle": (space(lambda w, mm, addr: mm.munmap(addr + 5 * PAGE, PAGE), shared_file()), {"alloc"}),
    "munmap of half a THP": (space(lambda w, mm, addr: mm.munmap(addr + 256 * PAGE, 256 * PAGE), lambda w, mm: thp(mm)),
                             {"frame", "table", "alloc"}),
    "mremap, moved": (space(lambda w, mm, addr: mm.mremap(addr, 32 * PAGE, 64 * PAGE, addr - 64 * HUGE),
                            lambda w, mm: written(mm, 32 * PAGE)),
                      {"frame", "table", "alloc"}),
    "mremap, part of a THP": (space(lambda w, mm, addr: mm.mremap(addr + 8 * PAGE, 8 * PAGE, 16 * PAGE, addr - 64 * HUGE),
                                    lambda w, mm: thp(mm)), {"frame", "table", "alloc"}),
    "mremap, to before its own mapping": (space(lambda w, mm, addr: mm.mremap(addr + 5 * PAGE, PAGE, PAGE, addr - PAGE),
                                                lambda w, mm: written(mm, 32 * PAGE)), {"alloc"}),
    "mremap, grown in place": (space(lambda w, mm, addr: mm.mremap(addr, 16 * PAGE, 32 * PAGE), locked_half), {"alloc", "frame"}),
    "mremap of a file": (space(lambda w, mm, addr: mm.mremap(addr, 16 * PAGE, 16 * PAGE, addr - 64 * HUGE), shared_file()), {"alloc"}),
    "MADV_POPULATE_WRITE": (space(lambda w, mm, addr: mm.madvise(addr, 32 * PAGE, mmc.MADV_POPULATE_WRITE),
                                  lambda w, mm: mm.mmap(32 * PAGE)),
                            {"frame", "table"}),
    "MADV_DONTNEED in a THP": (space(lambda w, mm, addr: mm.madvise(addr + PAGE, 8 * PAGE, mmc.MADV_DONTNEED), lambda w, mm: thp(mm)),
                               {"frame", "table"}),
    "hmm_range_fault": (space(lambda w, mm, addr: mmc.hmm_range_fault(mm, addr, 32, mmc.HMM_PFN_REQ_FAULT | mmc.HMM_PFN_REQ_WRITE),
                              lambda w, mm: mm.mmap(32 * PAGE)), {"frame", "table"}),
    # ---- files
    "a new file": (file_case(lambda world: File(world.mem, 32 * PAGE)), {"alloc"}),
    "a new ext4 file": (file_case(lambda world: File(world.mem, 32 * PAGE, "ext4")), {"alloc"}),
    "a new pfnmap": (file_case(lambda world: File(world.mem, 8 * PAGE, "pfnmap")), {"frame", "alloc"}),
    "a longer file": (grow_file("tmpfs"), {"alloc"}),
    "a longer ext4 file": (grow_file("ext4"), {"alloc"}),
    "file.write": (write_file, {"frame"}),
    "memfd": (memfd("tmpfs", 16 * PAGE, 16), {"frame", "migrate", "alloc"}),
    "memfd, hugetlbfs": (memfd("hugetlbfs", 2 * HUGE, 2), {"frame", "alloc"}),
    # ---- lists and frames
    "grab_pages": (grab, {"alloc"}),
    "unpin_user_pages": (release(mmc.unpin_user_pages), {"alloc"}),
    "unpin_user_pages_dirty_lock": (release(lambda pages: mmc.unpin_user_pages_dirty_lock(pages, None, True)), {"alloc"}),
    "unpin a range": (release(lambda pages: mmc.unpin_user_page_range_dirty_lock(pages[0], len(pages), True)), {"alloc"}),
    "alloc_pages_bulk": (unallocated(lambda world: mmc.alloc_pages_bulk(world.mem, 40), mmc.release_pages), {"frame", "list"}),
    "folio_alloc": (unallocated(lambda world: mmc.folio_alloc(world.mem, 4), mmc.folio_put), {"frame"}),
    "PageList": (unallocated(lambda world: PageList(world.mem, range(2, 500)), lambda pages: None), {"list"}),
}


def untouched(build):
    """What a world looks like that nobody called anything in: looking faults, so it is a world of its own."""
    world = World(**getattr(build, "config", {}))
    call, undo = build(world)
    before = world.looks()
    undo(call())
    del call, undo
    world.end()
    return before


def attempt(build, site, nth, before):
    """One world, one failure. Returns whether anything failed."""
    world = World(**getattr(build, "config", {}))
    call, undo = build(world)
    result, refused = None, False
    world.mem.check()
    with world.mem.inject(site, nth) as injection:
        try:
            result = call()
        except (MMError, MemoryError) as error:
            assert injection.fired, f"{error!r}, and nothing was made to fail"
            refused = True
    world.mem.check()
    if refused:
        stat = world.mem.vmstat()
        assert stat["nr_foll_pin_acquired"] - stat["nr_foll_pin_released"] == before[0], "pins leak"
        assert world.looks() == before
        world.mem.check()
        result = call()             # what failed can be done again
        world.mem.check()
    undo(result)
    del result, call, undo
    world.end()
    return injection.fired


@pytest.mark.parametrize("site", SITES)
@pytest.mark.parametrize("name", CASES)
def test_a_failure_at_any_step_leaves_nothing(name, site):
    build, sites = CASES[name]
    before, hits, nth = untouched(build), 0, 1
    while attempt(build, site, nth, before):
        hits += 1
        # One by one at first; a copy of 512 pages is 512 times the same step.
        nth += 1 if nth < CLOSELY else nth // 4
    assert (hits > 0) == (site in sites), f"{hits} occurrences of {site!r}, and the table says {sorted(sites)}"


@pytest.mark.parametrize("acquire", ["sink", "batch", "page"])
def test_a_ledger_says_what_it_could_not_book(acquire):
    """Without memory for the runs of a mapping, nobody knows which folios it took: the ledger must not call that balanced."""
    nth, unbooked, fired = 1, 0, True
    while fired:
        world = World()
        mm = world.mm()
        addr = scattered(mm, 40)
        container = mmc.VFIOContainer(world.mem, acquire=acquire)
        container.attach(mmc.IOMMUDomain(world.mem))
        world.undo.callback(container.close)
        with mmc.PinLedger(world.mem) as ledger:
            with world.mem.inject("list", nth) as injection:
                try:
                    container.map_dma(mm, addr, 0, 40 * PAGE)
                except MMError:
                    pass
            fired = injection.fired
            if container.mappings and sum(ledger.by_holder().values()) != 40:
                unbooked += 1
                with pytest.raises(MemoryError):
                    ledger.assert_balanced()
            container.unmap_dma(0, 0, mmc.VFIO_DMA_UNMAP_FLAG_ALL)
            del ledger
        world.end()
        nth += 1
    assert nth > 2 and (unbooked > 0) == (acquire != "sink")
