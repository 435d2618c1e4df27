"""Dirty bitmaps: what sets bits, what clears them, where they land in the caller's words."""
import errno

import numpy as np
import pytest

from mmcore import *
from mmcore.drivers import vfio_dirty
from vfio_support import *

EINVAL, EFAULT, EOVERFLOW, ENOMEM = errno.EINVAL, errno.EFAULT, errno.EOVERFLOW, errno.ENOMEM


def bits(bitmap):
    """Numbers of the bits that are set."""
    return np.flatnonzero(np.unpackbits(np.frombuffer(bitmap, np.uint8), bitorder="little")).tolist()


def emulated(nr=8, iova=0, **limits):
    """A container without a domain, with a device, and one mapping."""
    mem, mm = machine(**limits)
    c = VFIOContainer(mem)
    c.register_device(lambda at, size: [c.unpin_pages(pin.iova, 1) for m in c.mappings for pin in m.pins for _ in range(pin.ref_count)])
    addr = mapped(mm, nr * PAGE)
    c.map_dma(mm, addr, iova, nr * PAGE)
    return mem, mm, c, addr


# ---- start and stop --------------------------------------------------------------------------------------------------
def test_start_and_stop_are_idempotent():
    mem, mm, c, addr = emulated()
    refused(c, EINVAL, lambda: c.dirty_pages_get_bitmap(0, 8 * PAGE, PAGE), mm, match="tracking is off")
    c.pin_pages(PAGE, 2, IOMMU_READ)
    c.dirty_pages_start()
    c.dma_rw(0, b"x", True)
    c.dirty_pages_start()
    # What was pinned when tracking began counts, and what was written since.
    assert bits(c.dirty_pages_get_bitmap(0, 8 * PAGE, PAGE)) == [0, 1, 2]
    assert bits(c.dirty_pages_get_bitmap(0, 8 * PAGE, PAGE)) == [1, 2]
    c.dirty_pages_stop()
    c.dirty_pages_stop()
    assert not c.dirty_page_tracking
    c.dirty_pages_start()
    c.unpin_pages(PAGE, 1)
    assert bits(c.dirty_pages_get_bitmap(0, 8 * PAGE, PAGE)) == [1, 2]
    assert bits(c.dirty_pages_get_bitmap(0, 8 * PAGE, PAGE)) == [2]
    over(c, mm)


def test_a_start_that_fails_gives_all_bitmaps_back():
    """The k-th of 5 mappings gets no bitmap: those before it lose theirs."""
    mem, mm, c, addr = emulated()
    for i in range(1, 5):
        c.map_dma(mm, addr, i * HUGE, PAGE)
    for k in range(1, 6):
        refused(c, ENOMEM, lambda: injected(mem, "alloc", k, c.dirty_pages_start), mm)
        assert all(dma.bitmap is None for dma in c._tree)
    c.dirty_pages_start()
    refused(c, ENOMEM, lambda: injected(mem, "alloc", 2, lambda: c.map_dma(mm, addr, 1 << 40, PAGE)), mm)
    over(c, mm)


@pytest.mark.parametrize("attached", [False, True])
def test_a_mapping_that_is_too_large_for_a_bitmap(attached):
    mem, mm = machine()
    c = VFIOContainer(mem)
    c.map_dma(mm, 0, 0, 2**31 * PAGE)
    refused(c, EINVAL, c.dirty_pages_start, mm, match="at most 2147483647")
    c.unmap_dma(0, 0, ALL)
    if attached:
        c.attach(IOMMUDomain(mem))
    c.dirty_pages_start()
    if not attached:
        refused(c, EINVAL, lambda: c.map_dma(mm, 0, 0, 2**31 * PAGE), mm)
    else:
        # Pinned and mapped before the bitmap is asked for: then all of it is undone.
        addr = mapped(mm, 8 * PAGE)
        refused(c, ENOMEM, lambda: injected(mem, "alloc", 2, lambda: c.map_dma(mm, addr, 0, 8 * PAGE)), mm, exactly="touched")
    over(c, mm)


# ---- what sets bits --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("at, n, dirty", [(4095, 2, [0, 1]), (4095, 1, [0]), (4096, 1, [1]), (0, 4096, [0]), (0, 4097, [0, 1]),
                                          (100, 3 * 4096, [0, 1, 2, 3]), (7 * 4096 + 4095, 1, [7])])
def test_writes_dirty_the_first_to_the_last_page(at, n, dirty):
    mem, mm, c, addr = emulated(iova=0x40000)
    c.dirty_pages_start()
    c.dma_rw(0x40000 + at, n, False)
    assert bits(c.dirty_pages_get_bitmap(0x40000, 8 * PAGE, PAGE)) == []
    c.dma_rw(0x40000 + at, b"x" * n, True)
    assert bits(c.dirty_pages_get_bitmap(0x40000, 8 * PAGE, PAGE)) == dirty
    assert bits(c.dirty_pages_get_bitmap(0x40000, 8 * PAGE, PAGE)) == []
    over(c, mm)


def test_a_group_that_never_said_what_it_uses_may_have_written_anywhere():
    mem, mm, c, addr = emulated()
    domain, second = IOMMUDomain(mem), IOMMUDomain(mem)
    c.attach(domain)
    device = c.register_device(lambda iova, size: None, domain=domain)
    assert c.num_non_pinned_groups == 1 and not device.emulated
    c.dirty_pages_start()
    assert bits(c.dirty_pages_get_bitmap(0, 8 * PAGE, PAGE)) == list(range(8))
    # Its driver pins: from now on it says so.
    c.pin_pages(3 * PAGE, 1, IOMMU_READ, device=device)
    assert c.num_non_pinned_groups == 0
    c.dirty_pages_get_bitmap(0, 8 * PAGE, PAGE)
    assert bits(c.dirty_pages_get_bitmap(0, 8 * PAGE, PAGE)) == [3]
    # Another group that does not: and when it leaves, nobody knows what it wrote.
    c.attach(second)
    assert c.num_non_pinned_groups == 1
    c.detach(second)
    assert c.num_non_pinned_groups == 0
    assert bits(c.dirty_pages_get_bitmap(0, 8 * PAGE, PAGE)) == list(range(8))
    assert bits(c.dirty_pages_get_bitmap(0, 8 * PAGE, PAGE)) == [3]
    c.unpin_pages(3 * PAGE, 1)
    c.detach(domain)
    # Set when it was read last; by then the page was pinned.
    assert bits(c.dirty_pages_get_bitmap(0, 8 * PAGE, PAGE)) == [3]
    assert bits(c.dirty_pages_get_bitmap(0, 8 * PAGE, PAGE)) == []
    over(c, mm)


def test_detach_of_the_last_group_fills_the_bitmaps():
    mem, mm, c, addr = emulated()
    domain = IOMMUDomain(mem)
    c.attach(domain)
    c.dirty_pages_start()
    c.detach(domain)
    assert bits(c.dirty_pages_get_bitmap(0, 8 * PAGE, PAGE)) == list(range(8))
    over(c, mm)


# ---- where bits land -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("first", [0, 1, 63, 64, 65, 100])
def test_bits_of_a_mapping_are_shifted_to_its_place(first):
    mem, mm, c, addr = emulated(nr=130, iova=first * PAGE)
    c.map_dma(mm, addr, (first + 140) * PAGE, 3 * PAGE)
    c.dirty_pages_start()
    for page in (0, 1, 62, 63, 64, 129, 140, 142):
        c.dma_rw((first + page) * PAGE, b"x", True)
    got = bits(c.dirty_pages_get_bitmap(0, 300 * PAGE, PAGE))
    assert got == [first + page for page in (0, 1, 62, 63, 64, 129, 140, 142)]
    over(c, mm)


def test_the_callers_bits_before_a_mapping_are_kept():
    mem, mm, c, addr = emulated(nr=4, iova=10 * PAGE)
    c.dirty_pages_start()
    c.dma_rw(12 * PAGE, b"x", True)
    mine = bytearray(b"\xff" * 16)
    assert c.dirty_pages_get_bitmap(0, 128 * PAGE, PAGE, bitmap=mine) is None
    # The low 10 bits are the caller's; its word is otherwise written; the second word belongs to no mapping.
    assert bits(mine) == [*range(10), 12, *range(64, 128)]
    words = np.zeros(2, np.uint64)
    c.dma_rw(13 * PAGE, b"x", True)
    c.dirty_pages_get_bitmap(0, 128 * PAGE, PAGE, bitmap=words)
    assert words.tolist() == [1 << 13, 0]
    over(c, mm)


# ---- refusals --------------------------------------------------------------------------------------------------------
def test_get_bitmap_checks():
    mem, mm, c, addr = emulated()
    c.map_dma(mm, addr, HUGE, 8 * PAGE)
    c.dirty_pages_start()
    c.dma_rw(0, b"x", True)
    get = c.dirty_pages_get_bitmap
    for call, number in ((lambda: get(0, 0, PAGE), EINVAL), (lambda: get(TOP - PAGE, 2 * PAGE, PAGE), EOVERFLOW),
                         (lambda: get(0, 65 * PAGE, PAGE, bitmap=bytearray(8)), EINVAL),
                         (lambda: get(0, PAGE, PAGE, bitmap=bytearray()), EINVAL),
                         (lambda: get(0, 100, PAGE), EINVAL), (lambda: get(0, 8 * PAGE, HUGE), EINVAL),
                         (lambda: get(0, 8 * PAGE, 0), EINVAL),
                         (lambda: get(0, 8 * PAGE, 3), EINVAL), (lambda: get(0, 8 * PAGE, 2 * PAGE), EINVAL),
                         (lambda: get(1, 8 * PAGE, PAGE), EINVAL),
                         (lambda: get(0, 8 * PAGE + 1, PAGE), EINVAL), (lambda: get(PAGE, 7 * PAGE, PAGE), EINVAL),
                         (lambda: get(0, 7 * PAGE, PAGE), EINVAL), (lambda: get(0, HUGE + PAGE, PAGE), EINVAL),
                         (lambda: get(0, 2**31 * PAGE + PAGE, PAGE), EINVAL),
                         (lambda: get(0, 8 * PAGE, PAGE, bitmap=(mm, 1 << 40, 8)), EFAULT)):
        refused(c, number, call, mm)
    for wrong in ((mm, 1), (None, 1, 8), bytes(8), "x", 5):
        with same(c, mm), pytest.raises(TypeError):
            get(0, 8 * PAGE, PAGE, bitmap=wrong)
    assert bits(get(0, 8 * PAGE)) == [0], "what was refused cleared nothing"
    assert bits(get(16 * PAGE, 8 * PAGE, PAGE)) == []
    over(c, mm)


@pytest.mark.parametrize("npages, size, fits", [(0, 8, False), (1, 0, False), (1, 7, False), (1, 8, True), (64, 8, True), (65, 8, False),
                                                (65, 16, True), (1, 256 << 20, True), (1, (256 << 20) + 1, False),
                                                (2**31, 256 << 20, True), (2**31 + 1, 256 << 20, False)])
def test_verify_bitmap_size(npages, size, fits):
    if fits:
        vfio_dirty.verify_bitmap_size(npages, size, "call")
    else:
        with pytest.raises(InvalidArgument):
            vfio_dirty.verify_bitmap_size(npages, size, "call")


# ---- unmap with a bitmap ---------------------------------------------------------------------------------------------
def test_unmap_tells_the_last_bits_of_a_mapping():
    mem, mm, c, addr = emulated(nr=4)
    c.map_dma(mm, addr, 4 * PAGE, 4 * PAGE)
    c.dirty_pages_start()
    c.dma_rw(2 * PAGE, b"x", True)
    c.pin_pages(5 * PAGE, 1, IOMMU_READ)        # unpinned by the driver when it is told
    out = bytearray(8)
    assert c.unmap_dma(0, 8 * PAGE, GET_DIRTY, bitmap=out, pgsize=PAGE) == 8 * PAGE
    assert bits(out) == [2, 5] and not c.mappings
    over(c, mm)


def test_a_driver_that_stops_tracking_when_it_is_told():
    mem, mm, c, addr = emulated(nr=4)
    c.map_dma(mm, addr, 4 * PAGE, 4 * PAGE)
    c.register_device(lambda at, size: c.dirty_pages_stop())
    c.dirty_pages_start()
    c.pin_pages(5 * PAGE, 1, IOMMU_READ)
    with pytest.raises(InvalidArgument, match="tracking was stopped"):
        c.unmap_dma(0, 8 * PAGE, GET_DIRTY, bitmap=bytearray(8), pgsize=PAGE)
    assert [m.iova for m in c.mappings] == [4 * PAGE] and c.dma_avail == 65534
    over(c, mm)


def test_corner_c9_a_bitmap_that_cannot_be_written_at_the_second_mapping():
    """The words of mapping 0 lie on a page that is there, those of mapping 1 behind its end."""
    mem, mm, c, addr = emulated(nr=4)
    c.map_dma(mm, addr, 64 * PAGE, 4 * PAGE)
    c.map_dma(mm, addr, 128 * PAGE, 4 * PAGE)
    c.dirty_pages_start()
    c.dma_rw(0, b"x", True)
    at = mapped(mm, 2 * PAGE) + PAGE - 8
    mm.munmap(at + 8, PAGE)
    with pytest.raises(MMError) as caught:
        c.unmap_dma(0, 132 * PAGE, GET_DIRTY, bitmap=(mm, at, 24))
    assert caught.value.errno == EFAULT and [m.iova for m in c.mappings] == [64 * PAGE, 128 * PAGE] and c.dma_avail == 65533
    assert mm.read(at, 8) == b"\1" + bytes(7)
    mem.check()
    over(c, mm)
