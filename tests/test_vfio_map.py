"""MAP_DMA and UNMAP_DMA: the order of the checks, the unmap matrix of v1 and v2, the ends of the address space."""
import errno
import itertools

import pytest

from mmcore import *
from vfio_support import *

EINVAL, EOVERFLOW, EEXIST, ENOSPC, ENOENT, ENOMEM = (errno.EINVAL, errno.EOVERFLOW, errno.EEXIST, errno.ENOSPC, errno.ENOENT,
                                                    errno.ENOMEM)
M4 = 4 << 20


@pytest.fixture
def two():
    """(Memory, MM, container with one domain, address of 4 MiB)."""
    mem, mm = machine()
    c = container(mem)
    yield mem, mm, c, mapped(mm, M4)
    over(c, mm)


# ---- MAP_DMA: the order of checks ------------------------------------------------------------------------------------
# Each row spoils one thing of a good call; its errno; the first of two spoilt things must be the one that is told.
SPOIL = [
    ("flags", EINVAL, dict(flags=RW | 8)),
    ("size 0", EINVAL, dict(size=0)),
    ("wraps", EOVERFLOW, dict(iova=TOP - PAGE, size=2 * PAGE)),
    ("prot and VADDR", EINVAL, dict(flags=RW | VADDR)),
    ("misaligned", EINVAL, dict(vaddr_by=1)),
    ("overlap", EEXIST, dict(iova=0x10000)),
    ("no slot", ENOSPC, dict(slots=False)),
    ("window", EINVAL, dict(iova=1 << 40)),
    ("unmapped vaddr", errno.EFAULT, dict(vaddr_by=1 << 40)),
]
WORDS = {"flags": "flags", "size 0": "0 bytes", "wraps": "end of 64", "prot and VADDR": "READ, WRITE or both", "misaligned": "multiples",
         "overlap": "overlap", "no slot": "dma_entry_limit", "window": "windows", "unmapped vaddr": "nothing is mapped"}


def spoilt(*rows):
    mem, mm = machine()
    c = VFIOContainer(mem, dma_entry_limit=2)
    c.attach(IOMMUDomain(mem, windows=[(0, (1 << 40) - 1), (TOP - (1 << 20), TOP - 1)]))
    addr = mapped(mm, 16 * PAGE)
    c.map_dma(mm, addr, 0x10000, PAGE)
    good = dict(vaddr=addr, iova=0x100000, size=PAGE, flags=RW)
    for _, _, change in rows:
        for key, value in change.items():
            if key == "vaddr_by":
                good["vaddr"] += value
            elif key == "slots":
                c.map_dma(mm, addr, 0x20000, PAGE)
            elif key == "flags":
                good["flags"] |= value
            else:
                good[key] = value
    return c, mm, good


@pytest.mark.parametrize("row", SPOIL, ids=lambda row: row[0])
def test_each_check_of_map(row):
    c, mm, good = spoilt(row)
    refused(c, row[1], lambda: c.map_dma(mm, **good), mm, match=WORDS[row[0]])
    over(c, mm)


@pytest.mark.parametrize("first, second", [(a, b) for a, b in itertools.combinations(SPOIL, 2)
                                           if not ({"iova", "size", "flags"} & set(a[2]) & set(b[2]))],
                         ids=lambda row: row[0])
def test_of_two_checks_the_earlier_one_is_told(first, second):
    c, mm, good = spoilt(first, second)
    refused(c, first[1], lambda: c.map_dma(mm, **good), mm, match=WORDS[first[0]])


def test_a_good_map_is_none_of_them():
    c, mm, good = spoilt()
    c.map_dma(mm, **good)
    assert [(m.iova, m.size, m.prot, m.locked_vm) for m in c.mappings] == [(0x10000, PAGE, 3, 1), (0x100000, PAGE, 3, 1)]
    assert c.dma_avail == 0 and mm.locked_vm == 2
    over(c, mm)


def test_neither_prot_nor_vaddr(two):
    mem, mm, c, addr = two
    refused(c, EINVAL, lambda: c.map_dma(mm, addr, 0, PAGE, 0), mm)
    for flags in (READ, WRITE, RW):
        c.map_dma(mm, addr, 0, PAGE, flags)
        assert c.mappings[0].prot == flags and c.unmap_dma(0, PAGE) == PAGE


def test_vaddr_wraps_too(two):
    mem, mm, c, addr = two
    refused(c, EOVERFLOW, lambda: c.map_dma(mm, TOP - PAGE, 0, 2 * PAGE), mm)
    # The last page of 64 bits does not wrap: it is only no user address.
    refused(c, errno.EFAULT, lambda: c.map_dma(mm, TOP - PAGE, 0, PAGE), mm)


WRONG = [-1, TOP, 1.5, None, "x", True, b"1"]


@pytest.mark.parametrize("wrong", WRONG, ids=repr)
@pytest.mark.parametrize("which", ["vaddr", "iova", "size", "flags"])
def test_wrong_values_are_refused(two, which, wrong):
    mem, mm, c, addr = two
    good = dict(vaddr=addr, iova=0, size=PAGE, flags=RW)
    with same(c, mm), pytest.raises((InvalidArgument, TypeError)):
        c.map_dma(mm, **good | {which: wrong})
    if which != "vaddr":
        with same(c, mm), pytest.raises((InvalidArgument, TypeError)):
            c.unmap_dma(**{key: value for key, value in (good | {"flags": 0} | {which: wrong}).items() if key != "vaddr"})


def test_foreign_and_dead_address_spaces(two):
    mem, mm, c, addr = two
    other, stranger = machine()
    dead = MM(mem)
    dead.exit()
    for wrong, error in ((stranger, InvalidArgument), (None, TypeError), (mem, TypeError), (dead, MMError)):
        with same(c, mm), pytest.raises(error):
            c.map_dma(wrong, addr, 0, PAGE)
    with pytest.raises(InvalidArgument):
        c.attach(IOMMUDomain(other))
    with pytest.raises(TypeError):
        c.attach(other)
    for wrong in (dict(iommu_type=2), dict(iommu_type=True), dict(acquire="leaf"), dict(release=None), dict(dma_entry_limit=-1)):
        with pytest.raises((InvalidArgument, TypeError)):
            VFIOContainer(mem, **wrong)
    with pytest.raises(InvalidArgument):
        c.map_dma(mm, addr, 0, PAGE, acquire="run")
    with pytest.raises(InvalidArgument):
        c.unmap_dma(0, PAGE, release="run")


def test_a_closed_container_and_a_closed_memory(two):
    mem, mm, _, addr = two
    c = container(mem)
    c.close()
    c.close()
    for call in (lambda: c.map_dma(mm, addr, 0, PAGE), lambda: c.unmap_dma(0, PAGE), lambda: c.attach(IOMMUDomain(mem)),
                 lambda: c.pin_pages(0, 1, 1), lambda: c.unpin_pages(0, 1), lambda: c.dma_rw(0, 1, False),
                 lambda: c.register_device(print), c.dirty_pages_start, c.__enter__):
        with pytest.raises(InvalidArgument, match="closed"):
            call()
    other, stranger = machine()
    c = container(other)
    c.map_dma(stranger, mapped(stranger, PAGE), 0, PAGE)
    stranger.exit()
    other.close()
    for call in (lambda: c.map_dma(stranger, 0, 0, PAGE), lambda: c.attach(IOMMUDomain(mem))):
        with pytest.raises(MMError):
            call()


# ---- windows ---------------------------------------------------------------------------------------------------------
def test_a_range_over_two_windows_that_touch_is_refused(two):
    mem, mm, _, addr = two
    c = VFIOContainer(mem)
    c.attach(IOMMUDomain(mem, windows=[(0, 0xffff), (0x20000, 0x7ffff)],
                         reserved=[(0x40000, 0x4ffff), (0x60000, 0x60fff, "direct-relaxable")]))
    assert c.windows == c.info()["iova_ranges"] == [(0, 0xffff), (0x20000, 0x3ffff), (0x50000, 0x7ffff)]
    for iova, size in ((0xf000, PAGE), (0x20000, 0x20000), (0x50000, 0x30000)):
        c.map_dma(mm, addr, iova, size)
    for iova, size in ((0xf000 + PAGE, PAGE), (0x40000, PAGE), (0x3f000, 2 * PAGE), (0x80000, PAGE)):
        refused(c, EINVAL if iova != 0x3f000 else EEXIST, lambda: c.map_dma(mm, addr, iova, size), mm)
    over(c, mm)
    touching = VFIOContainer(mem)
    touching.attach(IOMMUDomain(mem, windows=[(0, 0xffff)]))
    touching._windows = [(0, 0x7fff), (0x8000, 0xffff)]
    refused(touching, EINVAL, lambda: touching.map_dma(mm, addr, 0x7000, 2 * PAGE), mm, match="one of the windows")
    over(touching, mm)


@pytest.mark.parametrize("wrong", [dict(windows=[]), dict(windows=[(5, 4)]), dict(windows=[5]), dict(windows=[(0, TOP)]),
                                   dict(reserved=[(0, 1, "no")]), dict(reserved=[(0,)]), dict(windows=[(0, 1.5)])], ids=repr)
def test_wrong_windows(wrong):
    mem, _ = machine()
    with pytest.raises((InvalidArgument, TypeError)):
        IOMMUDomain(mem, **wrong)


# ---- UNMAP_DMA: the matrix of v1 and v2 ------------------------------------------------------------------------------
# mappings: A [0,4) B [4,6) . . C [8,9), in pages. Request (start, pages): what v1 removes; what v2 does (None: EINVAL).
#
#     0   1   2   3   4   5   6   7   8   9
#     |------A--------|---B---|       |-C-|
MATRIX = [
    ("exactly one", 0, 4, "A", "A"),
    ("exactly two", 0, 6, "AB", "AB"),
    ("with a gap", 4, 5, "BC", "BC"),
    ("all and more", 0, 64, "ABC", "ABC"),
    ("start inside", 1, 3, "", None),
    ("start inside, more follow", 1, 8, "", None),
    ("end inside", 0, 2, "A", None),
    ("end inside the last of two", 0, 5, "AB", None),
    ("both ends inside", 1, 1, "", None),
    ("the gap", 6, 2, "", ""),
    ("from the gap on", 7, 2, "C", "C"),
    ("beyond", 9, 1, "", ""),
]
LAYOUT = {"A": (0, 4), "B": (4, 2), "C": (8, 1)}


@pytest.mark.parametrize("iommu_type", [VFIO_TYPE1_IOMMU, VFIO_TYPE1v2_IOMMU, 6])
@pytest.mark.parametrize("row", MATRIX, ids=lambda row: row[0])
@pytest.mark.parametrize("remember", [True, False])
def test_the_unmap_matrix(row, iommu_type, remember):
    _, start, nr, v1, v2 = row
    mem, mm = machine()
    c = container(mem, 2, iommu_type, remember_runs=remember)
    addr = mapped(mm, 16 * PAGE)
    for first, count in LAYOUT.values():
        c.map_dma(mm, addr + first * PAGE, first * PAGE, count * PAGE)
    gone = v1 if iommu_type == VFIO_TYPE1_IOMMU else v2
    if gone is None:
        refused(c, EINVAL, lambda: c.unmap_dma(start * PAGE, nr * PAGE), mm, match="cut the mapping")
    else:
        assert c.unmap_dma(start * PAGE, nr * PAGE) == PAGE * sum(LAYOUT[name][1] for name in gone)
        left = [LAYOUT[name] for name in "ABC" if name not in gone]
        assert [(m.iova // PAGE, m.size // PAGE) for m in c.mappings] == left
        assert mm.locked_vm == pins(mem) == sum(count for _, count in left)
        there = {page for first, count in left for page in range(first, first + count)}
        assert {i for i, pfn in enumerate(translations(c, 0, 16 * PAGE)) if pfn} == there
    left = PAGE * mm.locked_vm
    assert c.unmap_dma(0, 0, ALL) == left and not c.mappings and c.dma_avail == 65535
    over(c, mm)


def test_unmap_checks_in_order(two):
    mem, mm, c, addr = two
    c.map_dma(mm, addr, 0x10000, PAGE)
    bits = bytearray(8)
    for args, kwargs, number in [
            ((1, PAGE, 8), {}, EINVAL), ((1, PAGE, GET_DIRTY | ALL), {"bitmap": bits}, EINVAL),
            ((1, PAGE, GET_DIRTY | UNMAP_VADDR), {"bitmap": bits}, EINVAL), ((1, PAGE, GET_DIRTY), {}, EINVAL),
            ((1, PAGE, GET_DIRTY), {"bitmap": bits, "pgsize": 0}, EINVAL), ((1, PAGE), {}, EINVAL), ((0, PAGE, ALL), {}, EINVAL),
            ((PAGE, 0, ALL), {}, EINVAL), ((0, 0), {}, EINVAL), ((0, 1), {}, EINVAL), ((TOP - PAGE, 2 * PAGE), {}, EOVERFLOW),
            ((0x10000, PAGE, GET_DIRTY), {"bitmap": bits}, EINVAL), ((0, PAGE), {"bitmap": bits}, EINVAL)]:
        refused(c, number, lambda: c.unmap_dma(*args, **kwargs), mm)
    # A short bitmap is told before a misaligned iova: it is looked at before the lock is taken.
    refused(c, EINVAL, lambda: c.unmap_dma(1, 65 * PAGE, GET_DIRTY, bitmap=bits), mm, match="bitmap of 8 bytes")
    with pytest.raises(TypeError):
        c.unmap_dma(0x10000, PAGE, GET_DIRTY, bitmap=bytes(8))
    assert c.unmap_dma(0x10000, PAGE) == PAGE


def test_all_on_an_empty_container_is_no_error(two):
    assert two[2].unmap_dma(0, 0, ALL) == 0 and two[2].unmap_dma(0, PAGE) == 0


# ---- the top ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("options", GENERATIONS, ids=lambda o: "-".join(map(str, o.values())))
def test_corner_c12_the_last_page(options):
    mem, mm = machine()
    c, addr = container(mem, 2, **options), mapped(mm, 2 * PAGE)
    c.map_dma(mm, addr, TOP - PAGE, PAGE)
    assert c.mappings[0].iova + c.mappings[0].size == TOP and translations(c, TOP - PAGE, PAGE) == [mm.page_at(addr).pfn]
    refused(c, EEXIST, lambda: c.map_dma(mm, addr, TOP - 2 * PAGE, 2 * PAGE), mm)
    refused(c, EOVERFLOW, lambda: c.map_dma(mm, addr, TOP - PAGE, 2 * PAGE), mm)
    refused(c, EOVERFLOW, lambda: c.unmap_dma(TOP - PAGE, 2 * PAGE), mm)
    c.map_dma(mm, addr + PAGE, TOP - 2 * PAGE, PAGE)
    assert c.unmap_dma(TOP - 2 * PAGE, 2 * PAGE) == 2 * PAGE and pins(mem) == 0
    c.map_dma(mm, addr, TOP - PAGE, PAGE)
    assert c.unmap_dma(0, 0, ALL) == PAGE
    over(c, mm)


def test_corner_c11_v1_touches_nothing_after_a_mapping_that_starts_before():
    mem, mm = machine()
    c, addr = container(mem, 1, VFIO_TYPE1_IOMMU), mapped(mm, 8 * PAGE)
    c.map_dma(mm, addr, 0, 2 * PAGE)
    c.map_dma(mm, addr + 2 * PAGE, 2 * PAGE, PAGE)
    with same(c, mm):
        assert c.unmap_dma(PAGE, 2 * PAGE) == 0
    over(c, mm)


# ---- slots -----------------------------------------------------------------------------------------------------------
def test_a_failed_map_gives_its_slot_back(two):
    mem, mm, _, addr = two
    c = container(mem, dma_entry_limit=2)
    c.map_dma(mm, addr, 0, PAGE)
    for site in ("alloc", "iommu_map"):
        refused(c, ENOMEM, lambda: injected(mem, site, 1, lambda: c.map_dma(mm, addr, PAGE, PAGE)), mm,
                exactly="touched")
    assert c.dma_avail == 1
    c.map_dma(mm, addr, PAGE, PAGE)
    refused(c, ENOSPC, lambda: c.map_dma(mm, addr, 2 * PAGE, PAGE), mm)
    c.unmap_dma(0, PAGE)
    c.map_dma(mm, addr, 2 * PAGE, PAGE)
    over(c, mm)
    none = container(mem, dma_entry_limit=0)
    refused(none, ENOSPC, lambda: none.map_dma(mm, addr, 0, PAGE), mm)
    over(none, mm)


# ---- addresses that are invalidated ----------------------------------------------------------------------------------
def test_vaddr_invalidate_and_update(two):
    mem, mm, c, addr = two
    c.map_dma(mm, addr, 0, 4 * PAGE)
    c.map_dma(mm, addr + 4 * PAGE, 8 * PAGE, PAGE)
    before = translations(c, 0, 4 * PAGE)
    assert c.unmap_dma(0, 4 * PAGE, UNMAP_VADDR) == 4 * PAGE and c.vaddr_invalid_count == 1
    assert translations(c, 0, 4 * PAGE) == before and pins(mem) == mm.locked_vm == 5
    # Invalid already: what this call flagged before is valid again.
    refused(c, EINVAL, lambda: c.unmap_dma(0, 0, UNMAP_VADDR | ALL), mm, match="invalid already")
    assert c.unmap_dma(8 * PAGE, PAGE, UNMAP_VADDR) == PAGE and c.vaddr_invalid_count == 2
    refused(c, errno.EBUSY, lambda: c.attach(IOMMUDomain(mem)), mm)
    c.register_device(lambda iova, size: None)
    refused(c, errno.EBUSY, lambda: c.pin_pages(0, 1, IOMMU_READ), mm)
    refused(c, errno.EBUSY, lambda: c.dma_rw(0, 1, False), mm)
    # New mappings and plain unmaps go on; VADDR must fit exactly.
    c.map_dma(mm, addr, 16 * PAGE, PAGE)
    refused(c, ENOENT, lambda: c.map_dma(mm, addr, 32 * PAGE, PAGE, VADDR), mm)
    refused(c, EINVAL, lambda: c.map_dma(mm, addr, 16 * PAGE, PAGE, VADDR), mm, match="its address is valid")
    refused(c, EINVAL, lambda: c.map_dma(mm, addr, 0, 2 * PAGE, VADDR), mm)
    refused(c, EINVAL, lambda: c.map_dma(mm, addr, PAGE, 4 * PAGE, VADDR), mm)
    c.map_dma(mm, addr + 64 * PAGE, 0, 4 * PAGE, VADDR)
    assert c.mappings[0].vaddr == addr + 64 * PAGE and c.vaddr_invalid_count == 1 and pins(mem) == mm.locked_vm == 6
    assert c.unmap_dma(8 * PAGE, PAGE) == PAGE and c.vaddr_invalid_count == 0
    refused(c, errno.EBUSY, lambda: c.unmap_dma(0, 0, UNMAP_VADDR | ALL), mm, match="emulated")


def test_all_addresses_at_once_and_the_extension(two):
    mem, mm, c, addr = two
    for i in range(3):
        c.map_dma(mm, addr, i * HUGE, (i + 1) * PAGE)
    assert c.unmap_dma(0, 0, UNMAP_VADDR | ALL) == 6 * PAGE and c.vaddr_invalid_count == 3
    assert c.check_extension(VFIO_UPDATE_VADDR) == 1
    for i in range(3):
        c.map_dma(mm, addr, i * HUGE, (i + 1) * PAGE, VADDR)
    assert c.vaddr_invalid_count == 0
    with c.register_device(lambda iova, size: None):
        assert c.check_extension(VFIO_UPDATE_VADDR) == 0
    assert [c.check_extension(n) for n in range(1, 11)] == [1, 0, 1, 1, 0, 0, 0, 0, 1, 1]


@pytest.mark.parametrize("limit, cap", [(3, None), (4, None), (0, True), (None, None)])
def test_a_new_owner_takes_the_charge(two, limit, cap):
    mem, mm, c, addr = two
    new = MM(mem, rlimit_memlock=None if limit is None else limit * PAGE, cap_ipc_lock=cap)
    c.map_dma(mm, addr, 0, 4 * PAGE)
    c.unmap_dma(0, 4 * PAGE, UNMAP_VADDR)
    if limit == 3:
        refused(c, ENOMEM, lambda: c.map_dma(new, addr, 0, 4 * PAGE, VADDR), mm, new, match="RLIMIT_MEMLOCK")
        assert c.mappings[0].mm is mm and mm.locked_vm == 4
        return
    c.map_dma(new, addr, 0, 4 * PAGE, VADDR)
    assert (mm.locked_vm, new.locked_vm, c.mappings[0].mm) == (0, 4, new) and c.mappings[0].lock_cap == new.cap_ipc_lock
    assert c.unmap_dma(0, 4 * PAGE) == 4 * PAGE and new.locked_vm == 0


def test_the_constants_are_the_kernels():
    assert (VFIO_TYPE1_IOMMU, VFIO_TYPE1v2_IOMMU, VFIO_UNMAP_ALL, VFIO_UPDATE_VADDR) == (1, 3, 9, 10)
    assert (VFIO_DMA_MAP_FLAG_READ, VFIO_DMA_MAP_FLAG_WRITE, VFIO_DMA_MAP_FLAG_VADDR) == (1, 2, 4)
    assert (VFIO_DMA_UNMAP_FLAG_GET_DIRTY_BITMAP, VFIO_DMA_UNMAP_FLAG_ALL, VFIO_DMA_UNMAP_FLAG_VADDR) == (1, 2, 4)
    assert (IOMMU_READ, IOMMU_WRITE, IOMMU_CACHE) == (1, 2, 4)
    assert [DIRTY_BITMAP_BYTES(n) for n in (0, 1, 64, 65)] == [0, 8, 8, 16]
    assert (VFIO_IOMMU_TLB_SYNC_MAX, VFIO_BATCH_MAX_CAPACITY, VFIO_PIN_PAGES_MAX_ENTRIES) == (512, 512, 512)


def test_info_and_repr(two):
    mem, mm, c, addr = two
    c.map_dma(mm, addr, 0, PAGE)
    info = c.info()
    assert info["dma_avail"] == 65534 and info["iova_ranges"] == [(0, TOP - 1)] and info["migration"]["pgsize_bitmap"] == PAGE
    assert info["iova_pgsizes"] == PAGE | HUGE | 1 << 30 and VFIOContainer(mem).pgsize_bitmap == TOP - PAGE
    assert "1 mappings" in repr(c)


def test_a_container_is_one_of_a_memory(two):
    with pytest.raises(TypeError, match="a Memory is wanted"):
        VFIOContainer(two[1])


def test_the_sixty_fifth_domain_is_refused(two):
    mem, mm, c, addr = two
    c.map_dma(mm, addr, 0, 2 * PAGE)
    while len(c.domains) < 64:
        c.attach(IOMMUDomain(mem))
    one_more = IOMMUDomain(mem)
    refused(c, errno.ENOSPC, lambda: c.attach(one_more), mm, match="64 domains are attached")
    assert one_more.holder is None and one_more.stats["leaves"] == 0
    assert c.unmap_dma(0, 0, ALL) == 2 * PAGE and pins(mem) == 0 and mm.locked_vm == 0
