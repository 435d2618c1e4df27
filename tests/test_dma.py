"""Devices, DMA mapping and IOMMU page tables."""
import pytest
from hypothesis import given, strategies as st

import mmcore as mmc
from mmcore import (BadPage, Device, DMA_BIDIRECTIONAL, DMA_FROM_DEVICE, DMA_TO_DEVICE, InvalidArgument, IOMMUDomain, Memory,
                    MMError, PageRanges, SGAppendTable)
from sg_support import PAGE, UINT_MAX, append, build, dma_rows, entries, rows, snapshot
from support import refused

M2, G1 = 2 << 20, 1 << 30


@pytest.fixture
def mem():
    return Memory("8G")


# ---- direct -----------------------------------------------------------------------------------------------------------
def test_direct_mapping_merges_nothing(mem):
    device = Device(mem)
    sgt = entries(mem, [(16, 100, PAGE), (18, 0, PAGE), (19, 0, PAGE), (30, 5000, 0)])
    assert mmc.dma_map_sgtable(device, sgt, DMA_TO_DEVICE) == 4 == sgt.nents
    assert dma_rows(sgt) == [(16 * PAGE + 100, PAGE), (18 * PAGE, PAGE), (19 * PAGE, PAGE), (30 * PAGE + 5000, 0)]
    assert sgt.mapped and device.mappings == 1
    mmc.dma_unmap_sgtable(device, sgt, DMA_TO_DEVICE)
    assert dma_rows(sgt) == [(0, 0)] * 4 and not sgt.mapped and device.mappings == 0


def test_direct_mapping_beyond_the_mask(mem):
    device = Device(mem, dma_mask=(1 << 32) - 1)
    high = (1 << 20) + 5
    sgt = entries(mem, [(16, 0, PAGE), (high - 6, 0, PAGE), (high, 0, PAGE)])
    before = snapshot(sgt)
    with refused(mem, MMError, "mask", errno=5):
        mmc.dma_map_sgtable(device, sgt)
    assert snapshot(sgt) == before
    # The last byte below the mask, and the first one above.
    assert mmc.dma_map_sgtable(device, entries(mem, [((1 << 20) - 1, 0, PAGE)])) == 1
    with refused(mem, MMError, errno=5):
        mmc.dma_map_sgtable(device, entries(mem, [((1 << 20) - 1, 0, PAGE + 1)]))


# ---- IOMMU ------------------------------------------------------------------------------------------------------------
def test_scattered_pages_become_one_segment(mem):
    device = Device(mem, iommu=True, max_seg_size=UINT_MAX)
    pfns = range(100, 1124, 2)
    sgt = build(mem, pfns, size=512 * PAGE - 7)
    assert len(sgt) == 512 and mmc.dma_map_sgtable(device, sgt) == 1
    (at, length), = dma_rows(sgt)
    assert length == 512 * PAGE - 7 and at % M2 == 0
    assert [device.domain.iova_to_phys(at + i * PAGE + 9) for i in range(512)] == [pfn * PAGE + 9 for pfn in pfns]
    # The two views have nothing to do with each other by index: 512 entries, one segment, the rest marked unused.
    table = sgt.entries
    assert rows(sgt) == [(pfn, 0, PAGE) for pfn in pfns][:511] + [(1122, 0, PAGE - 7)]
    assert all(int(row["dma_address"]) == mmc.DMA_MAPPING_ERROR and row["dma_length"] == 0 for row in table[1:])
    mmc.dma_unmap_sgtable(device, sgt)
    assert device.domain.stats["leaves"] == 0 and device.domain.stats["syncs"] == 1
    assert device.domain.iova_to_phys(at) is None


def test_segments_end_at_the_devices_limits(mem):
    pfns = range(100, 100 + 2 * 40, 2)
    sgt = build(mem, pfns)
    device = Device(mem, iommu=True)                            # 64 KiB
    assert mmc.dma_map_sgtable(device, sgt) == 3
    assert [length for _, length in dma_rows(sgt)] == [65536, 65536, 8 * PAGE]
    assert device.check(sgt) == []
    mmc.dma_unmap_sgtable(device, sgt)
    device = Device(mem, iommu=True, max_seg_size=UINT_MAX, seg_boundary_mask=16 * PAGE - 1)
    assert mmc.dma_map_sgtable(device, sgt) == 3 and device.check(sgt) == []
    assert all(at % (16 * PAGE) == 0 for at, _ in dma_rows(sgt))
    mmc.dma_unmap_sgtable(device, sgt)
    # An entry that would cross a boundary moves up to it, and leaves a hole.
    sgt = entries(mem, [(100, 0, 3 * PAGE), (200, 0, 2 * PAGE)])
    device = Device(mem, iommu=True, max_seg_size=UINT_MAX, seg_boundary_mask=4 * PAGE - 1)
    assert mmc.dma_map_sgtable(device, sgt) == 2
    (a, la), (b, lb) = dma_rows(sgt)
    assert (la, lb, b - a) == (3 * PAGE, 2 * PAGE, 4 * PAGE) and device.domain.iova_to_phys(a + 3 * PAGE) is None
    mmc.dma_unmap_sgtable(device, sgt)
    assert device.domain.stats["leaves"] == 0


def test_partial_pages_close_segments(mem):
    device = Device(mem, iommu=True)
    sgt = entries(mem, [(100, 10, PAGE - 10), (200, 0, 100), (300, 0, PAGE), (400, 5, 10), (500, 0, PAGE)])
    assert mmc.dma_map_sgtable(device, sgt) == 4
    assert [length for _, length in dma_rows(sgt)] == [PAGE - 10 + 100, PAGE, 10, PAGE]
    assert [at % PAGE for at, _ in dma_rows(sgt)] == [10, 0, 5, 0]


def test_t69_merging_near_four_gigabytes_does_not_wrap(mem):
    """Two entries whose lengths sum to 2^32: the sum is 0 in 32 bits."""
    sgt = mmc.sg_alloc_table_from_pages(PageRanges(mem, [1024], [1 << 20]), 0, 1 << 32)
    device = Device(mem, iommu=True, max_seg_size=UINT_MAX, seg_boundary_mask=(1 << 64) - 1)
    assert mmc.dma_map_sgtable(device, sgt) == 2
    assert [length for _, length in dma_rows(sgt)] == [0xFFFFF000, PAGE]
    mmc.dma_unmap_sgtable(device, sgt)


def test_large_leaves(mem):
    sgt = mmc.sg_alloc_table_from_pages(PageRanges(mem, [1 << 18], [3 << 18]), 0, 3 << 30)
    device = Device(mem, iommu=True, max_seg_size=UINT_MAX)
    assert mmc.dma_map_sgtable(device, sgt) == 1
    (at, _), = dma_rows(sgt)
    assert device.domain.stats["leaves"] == 3 and device.domain.leaf_size(at + 5) == G1
    assert device.domain.iova_to_phys(at + (2 << 30) + 12345) == (3 << 30) + 12345
    mmc.dma_unmap_sgtable(device, sgt)
    small = Device(mem, iommu=IOMMUDomain(mem, page_sizes=["4K", "2M"]), max_seg_size=UINT_MAX)
    mmc.dma_map_sgtable(small, sgt)
    assert small.domain.stats["leaves"] == 3 * 512


def test_two_devices_of_one_domain_share_its_iovas(mem):
    domain = IOMMUDomain(mem)
    a, b = Device(mem, iommu=domain), Device(mem, iommu=domain, dma_mask=0xffffffff)
    tables = [build(mem, [pfn]) for pfn in (20, 30, 40, 50)]
    for device, sgt in zip((a, b, a, b), tables):
        mmc.dma_map_sgtable(device, sgt)
    assert [domain.iova_to_phys(dma_rows(sgt)[0][0]) for sgt in tables] == [pfn * PAGE for pfn in (20, 30, 40, 50)]
    assert all(dma_rows(sgt)[0][0] <= b.dma_mask for sgt in tables[1::2])
    assert a.iova_ranges == b.iova_ranges and len(a.iova_ranges) == 4
    with refused(mem, InvalidArgument, "another device"):
        mmc.dma_unmap_sgtable(a, tables[1])
    for device, sgt in zip((a, b, a, b), tables):
        mmc.dma_unmap_sgtable(device, sgt)
    assert a.iova_ranges == [] and domain.stats["leaves"] == 0 and (a.mappings, b.mappings) == (0, 0)


def test_iovas_that_a_domain_does_not_translate_or_reserves_are_not_given(mem):
    domain = IOMMUDomain(mem, windows=[(0, 7 * PAGE - 1), (9 * PAGE, 16 * PAGE + 100)],
                         reserved=[(11 * PAGE + 5, 12 * PAGE, "msi"), (12 * PAGE, 12 * PAGE, "direct"), (3 * PAGE, 3 * PAGE)])
    device = Device(mem, iommu=domain)
    tables = [build(mem, [pfn]) for pfn in range(20, 40)]
    with pytest.raises(MMError, match="no 4096 bytes of IOVA space") as caught:
        for sgt in tables:
            mmc.dma_map_sgtable(device, sgt)
    assert caught.value.errno == 12
    assert [first // PAGE for first, _ in device.iova_ranges] == [1, 2, 4, 5, 6, 9, 10, 13, 14, 15]
    mmc.dma_unmap_sgtable(device, tables[3])
    mmc.dma_map_sgtable(device, tables[15])
    assert dma_rows(tables[15]) == [(10 * PAGE, PAGE)]


# ---- IOVA space ---------------------------------------------------------------------------------------------------------
def test_iova_space_runs_out_and_comes_back(mem):
    device = Device(mem, iommu=True, dma_mask=16 * PAGE - 1)
    tables = [build(mem, [20 + 2 * i]) for i in range(20)]
    mapped = []
    with pytest.raises(MMError) as caught:
        for sgt in tables:
            mmc.dma_map_sgtable(device, sgt)
            mapped.append(sgt)
    assert caught.value.errno == 12 and len(mapped) == 15        # 16 pages, less the one at 0
    assert device.domain.stats["leaves"] == 15 and not tables[15].mapped
    taken = {at for sgt in mapped for at, _ in dma_rows(sgt)}
    assert taken == {i * PAGE for i in range(1, 16)}
    for sgt in mapped[3:7]:
        mmc.dma_unmap_sgtable(device, sgt)
    wide = build(mem, [900, 902])
    assert mmc.dma_map_sgtable(device, wide) == 1
    with refused(mem, MMError, errno=12):
        mmc.dma_map_sgtable(device, build(mem, range(1000, 1100, 2)))
    for sgt in mapped[:3] + mapped[7:] + [wide]:
        mmc.dma_unmap_sgtable(device, sgt)
    assert device.iova_ranges == [] and device.mappings == 0


def test_the_whole_space_and_more():
    mem = Memory("2T")
    device = Device(mem, iommu=True, dma_mask=(1 << 40) - 1, seg_boundary_mask=(1 << 64) - 1)
    sgt = mmc.sg_alloc_table_from_pages(PageRanges(mem, [1 << 18], [1 << 27]), 0, 1 << 39)
    assert mmc.dma_map_sgtable(device, sgt) == len(sgt)
    again = mmc.sg_alloc_table_from_pages(PageRanges(mem, [1 << 18], [1 << 27]), 0, 1 << 39)
    with refused(mem, MMError, errno=12):
        mmc.dma_map_sgtable(device, again)
    assert dma_rows(sgt)[0][0] == 1 << 39


# ---- failing --------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("site", ["iommu_map", "table"])
def test_every_failing_step_of_a_mapping(mem, site):
    device = Device(mem, iommu=True)
    sgt = build(mem, [20, 21, 40, 50, 51, 52])
    nth = 1
    while True:
        before = snapshot(sgt)
        try:
            with mem.inject(site, nth):
                mmc.dma_map_sgtable(device, sgt)
            break
        except MMError as error:
            assert error.errno == 22 and snapshot(sgt) == before
            stats = device.domain.stats
            assert (stats["leaves"], stats["bytes"], stats["tables"], device.iova_ranges) == (0, 0, 1, [])
            nth += 1
    assert nth - 1 == (6 if site == "iommu_map" else 5)
    assert sgt.nents == 1


def test_wrong_calls(mem):
    device, other = Device(mem, iommu=True), Device(mem)
    sgt = build(mem, [20, 30])
    with refused(mem, InvalidArgument, "not mapped"):
        mmc.dma_unmap_sgtable(device, sgt)
    with refused(mem, InvalidArgument, "empty"):
        mmc.dma_map_sgtable(device, mmc.SGTable(mem))
    with refused(mem, InvalidArgument, "no page"):
        mmc.dma_map_sgtable(device, mmc.sg_alloc_table(mem, 1))
    with refused(mem, InvalidArgument, "another Memory"):
        mmc.dma_map_sgtable(Device(Memory("4M")), sgt)
    for direction in (3, -1, "to", None):
        with refused(mem, InvalidArgument, "direction"):
            mmc.dma_map_sgtable(device, sgt, direction)
    mmc.dma_map_sgtable(device, sgt, DMA_FROM_DEVICE)
    before = snapshot(sgt)
    with refused(mem, MMError, "mapped already", errno=16):
        mmc.dma_map_sgtable(device, sgt)
    with refused(mem, InvalidArgument, "another device"):
        mmc.dma_unmap_sgtable(other, sgt)
    with refused(mem, InvalidArgument, "direction"):
        mmc.dma_unmap_sgtable(device, sgt, DMA_BIDIRECTIONAL)
    with refused(mem, MMError, "mapped for DMA", errno=16):
        mmc.sg_free_table(sgt)
    with refused(mem, MMError, "mapped for DMA", errno=16):
        sgt[0].length = 5
    with refused(mem, MMError, "mapped for DMA", errno=16):
        sgt.nents = 1
    assert snapshot(sgt) == before
    # Whatever a driver scribbles into the DMA view: unmapping goes by what was mapped (T70).
    sgt[0].dma_address, sgt[0].dma_length = 0, 1
    mmc.dma_unmap_sgtable(device, sgt, DMA_FROM_DEVICE)
    assert device.domain.stats["leaves"] == 0 and sgt.nents == 2


@pytest.mark.parametrize("limits", [{"max_seg_size": 0}, {"max_seg_size": 1 << 32}, {"max_seg_size": -1}, {"dma_mask": 0},
                                    {"seg_boundary_mask": 0}, {"seg_boundary_mask": 4096}, {"seg_boundary_mask": 1 << 64},
                                    {"seg_boundary_mask": "4G"}, {"dma_mask": None}])
def test_limits_that_no_device_has(mem, limits):
    with refused(mem, (InvalidArgument, TypeError)):
        Device(mem, **limits)


def test_an_append_table_grows_after_unmapping(mem):
    device = Device(mem, iommu=True)
    sgt = SGAppendTable(mem)
    append(sgt, [20], 3)
    mmc.dma_map_sgtable(device, sgt)
    with refused(mem, MMError, errno=16):
        append(sgt, [30], 1)
    mmc.dma_unmap_sgtable(device, sgt)
    append(sgt, [30], 0)
    assert rows(sgt) == [(20, 0, PAGE), (30, 0, PAGE)] and sgt.nents == 2


# ---- the domain -------------------------------------------------------------------------------------------------------------
def test_a_domain_uses_the_largest_leaves(mem):
    domain = IOMMUDomain(mem)
    domain.map(G1 - M2 - PAGE, G1 - M2 - PAGE, 2 * G1 + 2 * M2 + 2 * PAGE)
    assert domain.stats["leaves"] == 1 + 1 + 2 + 1 + 1
    sizes = [domain.leaf_size(at) for at in (G1 - M2 - 1, G1 - 1, G1, 3 * G1, 3 * G1 + M2)]
    assert sizes == [PAGE, M2, G1, M2, PAGE]
    # Physical addresses must be aligned as well.
    domain.map(8 * G1, PAGE, M2)
    assert domain.leaf_size(8 * G1) == PAGE and domain.stats["leaves"] == 6 + 512
    assert domain.unmap(8 * G1, M2) == M2
    assert domain.unmap(G1 - M2 - PAGE, 2 * G1 + 2 * M2 + 2 * PAGE) == 2 * G1 + 2 * M2 + 2 * PAGE
    assert domain.stats == {"leaves": 0, "bytes": 0, "maps": 518, "unmaps": 518, "syncs": 2, "iova_to_phys": 0, "tables": 1}


def test_unmapping_a_part_takes_the_leaf(mem):
    domain = IOMMUDomain(mem)
    domain.map(G1, 0, M2)
    assert domain.unmap(G1 + M2 // 2, PAGE) == M2 // 2          # from there to the end of the leaf
    assert domain.stats["leaves"] == 0
    assert domain.unmap(G1, PAGE) == 0
    domain.map(0, 0, 2 * PAGE)
    domain.map(3 * PAGE, 0, PAGE)
    assert domain.unmap(0, 4 * PAGE) == 2 * PAGE                # up to the hole
    assert domain.unmap(3 * PAGE, PAGE) == PAGE


def test_mapping_over_a_mapping_is_refused(mem):
    domain = IOMMUDomain(mem)
    domain.map(G1, 0, M2)
    before = domain.stats
    for iova, size in ((G1, PAGE), (G1 - PAGE, 2 * PAGE), (G1 + M2 - PAGE, 2 * PAGE), (0, 2 * G1), (G1 + M2 // 2, PAGE)):
        with refused(mem, MMError, "mapped already", errno=17):
            domain.map(iova, 0, size)
    assert domain.stats == before
    domain.map(G1 + M2, 0, PAGE)
    domain.map(G1 - PAGE, 0, PAGE)


@pytest.mark.parametrize("iova, phys, size", [(1, 0, PAGE), (0, 1, PAGE), (0, 0, 1), (0, 0, 0), (-PAGE, 0, PAGE),
                                              ((1 << 64) - PAGE, 0, 2 * PAGE), (0, 1 << 33, PAGE), (0, (1 << 33) - PAGE, 2 * PAGE),
                                              (0, (1 << 64) - PAGE, PAGE), (0, 0, 1 << 64), (0, 0, (1 << 64) - PAGE)])
def test_maps_that_are_refused(mem, iova, phys, size):
    domain = IOMMUDomain(mem)
    with refused(mem, InvalidArgument):
        domain.map(iova, phys, size)
    assert domain.stats["leaves"] == 0 and domain.stats["tables"] == 1


def test_the_ends_of_the_address_space(mem):
    domain = IOMMUDomain(mem)
    domain.map((1 << 64) - PAGE, 5 * PAGE, PAGE)
    domain.map(0, 6 * PAGE, PAGE)
    assert domain.iova_to_phys((1 << 64) - 1) == 6 * PAGE - 1 and domain.iova_to_phys(0) == 6 * PAGE
    with refused(mem, MMError, errno=17):
        domain.map((1 << 64) - 2 * PAGE, 0, 2 * PAGE)
    assert domain.unmap((1 << 64) - PAGE, PAGE) == PAGE and domain.unmap(0, PAGE) == PAGE
    assert domain.stats["tables"] == 1 and domain.stats["iova_to_phys"] == 2


@pytest.mark.parametrize("page_size, sizes", [("4K", [4096, M2, G1]), ("16K", [16384, 32 << 20, 64 << 30]),
                                              ("64K", [65536, 512 << 20, 4 << 40])])
def test_leaf_sizes_follow_the_page(page_size, sizes):
    mem = Memory("8G", page_size=page_size)
    domain = IOMMUDomain(mem)
    assert domain.page_sizes == sizes
    domain.map(sizes[1], sizes[1], 2 * sizes[1] + sizes[0])
    assert domain.stats["leaves"] == 3 and domain.leaf_size(2 * sizes[1]) == sizes[1]
    assert domain.iova_to_phys(3 * sizes[1] + 7) == 3 * sizes[1] + 7
    for wrong in (["2M", "1G"], ["8K"], [0], [3]):
        with refused(mem, (InvalidArgument, ValueError)):
            IOMMUDomain(mem, page_sizes=wrong)


@given(st.lists(st.tuples(st.integers(0, 3000), st.integers(0, 2000), st.integers(1, 1200), st.booleans()), max_size=12))
def test_a_domain_is_a_dictionary_of_pages(steps):
    """Against a dictionary; the unit is a page, and leaves are 4K or 2M."""
    mem = Memory("16M")
    domain, model, leaf_of = IOMMUDomain(mem), {}, {}
    for iova, phys, nr, mapping in steps:
        if mapping:
            if any(page in model for page in range(iova, iova + nr)):
                with pytest.raises(MMError) as caught:
                    domain.map(iova * PAGE, phys * PAGE, nr * PAGE)
                assert caught.value.errno == 17
            else:
                domain.map(iova * PAGE, phys * PAGE, nr * PAGE)
                done = 0
                while done < nr:
                    size = 512 if not (iova + done) % 512 and not (phys + done) % 512 and nr - done >= 512 else 1
                    for page in range(done, done + size):
                        model[iova + page], leaf_of[iova + page] = phys + page, (iova + done, size)
                    done += size
        else:
            done = 0
            while done < nr and iova + done in model:
                start, size = leaf_of[iova + done]
                done = start + size - iova
                for page in range(start, start + size):
                    del model[page], leaf_of[page]
            assert domain.unmap(iova * PAGE, nr * PAGE) == done * PAGE
        assert domain.stats["bytes"] == len(model) * PAGE and domain.stats["leaves"] == len(set(leaf_of.values()))
        for page in (iova - 1, iova, iova + nr - 1, iova + nr):
            if page >= 0:
                found = domain.iova_to_phys(page * PAGE + 5)
                assert found == (model[page] * PAGE + 5 if page in model else None)


# ---- reports ------------------------------------------------------------------------------------------------------------------
def test_sg_device_segment_limit():
    """2 MiB in one entry for a device of 64 KiB: the checker says so; built by the device's limit it is 32 entries."""
    mem = Memory("64M", debug=True)
    folio = mmc.folio_alloc(mem, 9)
    pages = PageRanges(mem, [folio.pfn], [512])
    device = Device(mem)
    sgt = mmc.sg_alloc_table_from_pages(pages, 0, M2)
    assert device.check(sgt) == ["segment 0 of 2097152 bytes is longer than max_seg_size 65536"]
    with refused(mem, BadPage, "max_segment=device.max_seg_size"):
        mmc.dma_map_sgtable(device, sgt)
    fine = mmc.sg_alloc_table_from_pages_segment(pages, 0, M2, device.max_seg_size)
    assert [length for _, _, length in rows(fine)] == [65536] * 32 and device.check(fine) == []
    assert mmc.dma_map_sgtable(device, fine) == 32
    raised = Device(mem, max_seg_size=M2)
    assert raised.check(sgt) == [] and mmc.dma_map_sgtable(raised, sgt) == 1
    # Without debugging it goes through, as in the kernel.
    calm = Memory("64M")
    long = mmc.sg_alloc_table_from_pages(PageRanges(calm, [512], [512]), 0, M2)
    assert mmc.dma_map_sgtable(Device(calm), long) == 1


def test_the_checker_sees_boundaries(mem):
    device = Device(mem, max_seg_size=UINT_MAX, seg_boundary_mask=65535)
    assert device.check(entries(mem, [(15, 0, PAGE), (16, 0, 65536)])) == []
    assert len(device.check(entries(mem, [(15, 0, PAGE + 1)]))) == 1


def test_what_devices_and_domains_say(mem):
    device = Device(mem, seg_boundary_mask=0xffff, iommu=True)
    assert (device.seg_boundary_mask, device.iommu, Device(mem).iommu) == (0xffff, True, False)
    domain = IOMMUDomain(mem)
    with refused(mem, InvalidArgument, "set up already"):
        domain.__init__(mem)
    with refused(mem, InvalidArgument, "never set up"):
        IOMMUDomain.__new__(IOMMUDomain).map(0, 0, PAGE)
    domain.map(G1, 0, 2 * PAGE)
    for iova, size in ((G1 + 1, PAGE), (G1, PAGE + 1), ((1 << 64) - PAGE, 2 * PAGE)):
        with refused(mem, InvalidArgument, "multiples of 4096, within 64 bits"):
            domain.unmap(iova, size)
    assert domain.stats["leaves"] == 2


def test_no_iova_for_more_than_there_is(mem):
    """A table longer than the device's address space: no range is taken, and a smaller one still fits."""
    device = Device(mem, dma_mask=(1 << 20) - 1, iommu=True)
    sgt = build(mem, range(1000, 1512))
    with refused(mem, MMError, "of IOVA space are left below 0xfffff", errno=12):
        mmc.dma_map_sgtable(device, sgt)
    small = build(mem, [20])
    mmc.dma_map_sgtable(device, small)
    mmc.dma_unmap_sgtable(device, small)
