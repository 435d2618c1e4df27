"""External pins, their accounting beside IOMMUs, dma_rw; attaching, replaying and detaching."""
import errno

import pytest

from mmcore import *
from support import poke
from vfio_support import *

EINVAL, EBUSY, EPERM, E2BIG, EACCES, EOVERFLOW, ENOMEM, ENODEV, EFAULT = (
    errno.EINVAL, errno.EBUSY, errno.EPERM, errno.E2BIG, errno.EACCES, errno.EOVERFLOW, errno.ENOMEM, errno.ENODEV, errno.EFAULT)
NR = 16


def quiet(iova, size):
    """A driver that never has to unpin."""
    raise AssertionError("nobody unmaps here")


@pytest.fixture(params=ACQUIRES)
def emulated(request):
    """(Memory, MM, container without a domain, with a device; address of 16 mapped pages): nothing is pinned yet."""
    mem, mm = machine()
    c = VFIOContainer(mem, acquire=request.param)
    device = c.register_device(quiet)
    addr = mapped(mm, NR * PAGE)
    c.map_dma(mm, addr, 0x100000, NR * PAGE)
    assert pins(mem) == mm.locked_vm == 0
    yield mem, mm, c, addr
    c._devices = [device]
    over(c, mm)


def state_of(mem, mm, addr):
    """(GUP pins on the first page, all pins, pages charged)."""
    page = mm.page_at(addr)
    return (page.refcount >> 10, pins(mem), mm.locked_vm)


# ---- the table of 1.13 -----------------------------------------------------------------------------------------------
def test_the_accounting_table(emulated):
    mem, mm, c, addr = emulated
    iova, domain = 0x100000, IOMMUDomain(mem)
    # external only
    pages = c.pin_pages(iova, 1, IOMMU_WRITE)
    assert list(pages.pfns) == [mm.page_at(addr).pfn] and state_of(mem, mm, addr) == (1, 1, 1)
    # external twice, same iova
    c.pin_pages(iova, 1, IOMMU_READ)
    assert state_of(mem, mm, addr) == (1, 1, 1) and c.mappings[0].pins == [(iova, pages.pfns[0], 2)]
    # external, then an IOMMU attached
    c.attach(domain)
    assert state_of(mem, mm, addr) == (2, NR + 1, NR) and translations(c, iova, PAGE) == [pages.pfns[0]]
    # IOMMU map, then external
    c.pin_pages(iova + PAGE, 1, IOMMU_READ)
    assert state_of(mem, mm, addr + PAGE) == (2, NR + 2, NR)
    # the last IOMMU detached
    c.detach(domain)
    assert state_of(mem, mm, addr) == (1, 2, 2) and domain.stats["leaves"] == 0 and not c.mappings[0].iommu_mapped
    # attached again; external unpin beside an IOMMU does not account
    c.attach(domain)
    assert state_of(mem, mm, addr) == (2, NR + 2, NR)
    c.unpin_pages(iova, 1)
    assert state_of(mem, mm, addr) == (2, NR + 2, NR)
    c.unpin_pages(iova, 2)
    assert state_of(mem, mm, addr) == (1, NR, NR) and not c.mappings[0].pins
    assert c.unmap_dma(iova, NR * PAGE) == NR * PAGE and mm.locked_vm == 0


def test_corner_c3_two_pins_inside_one_page(emulated):
    mem, mm, c, addr = emulated
    c.pin_pages(0x100010, 1, IOMMU_READ)
    c.pin_pages(0x100800, 1, IOMMU_READ)
    assert state_of(mem, mm, addr) == (2, 2, 2)
    domain = IOMMUDomain(mem)
    c.attach(domain)
    assert state_of(mem, mm, addr) == (3, NR + 2, NR)
    c.detach(domain)
    assert state_of(mem, mm, addr) == (2, 2, 2)
    c.unpin_pages(0x100010, 1)
    c.unpin_pages(0x100000, 1)      # nothing is pinned at exactly this IOVA
    assert state_of(mem, mm, addr) == (1, 1, 1)
    c.unpin_pages(0x100800, 1)
    assert state_of(mem, mm, addr) == (0, 0, 0)


def test_corner_c3_two_unaligned_pins_a_page_apart_are_two_nodes(emulated):
    mem, mm, c, addr = emulated
    c.pin_pages(0x100800, 2, IOMMU_READ)
    assert [pin.iova for pin in c.mappings[0].pins] == [0x100800, 0x101800]
    c.unpin_pages(0x101800, 1)
    assert [pin.iova for pin in c.mappings[0].pins] == [0x100800] and pins(mem) == 1
    c.unpin_pages(0x100800, 1)


@pytest.mark.parametrize("nr", [1, 2])
def test_corner_c2_pins_in_a_chunk_that_ends_at_the_top(nr):
    """An exclusive end wraps to 0, and finds none of them: here they are found."""
    mem, mm = machine()
    c = VFIOContainer(mem)
    c.register_device(quiet)
    addr = mapped(mm, 4 * PAGE)
    c.map_dma(mm, addr, TOP - 4 * PAGE, 4 * PAGE)
    c.pin_pages(TOP - nr * PAGE, nr, IOMMU_READ)
    c.attach(IOMMUDomain(mem))
    assert mm.locked_vm == 4 and pins(mem) == 4 + nr
    refused(c, EOVERFLOW, lambda: c.pin_pages(TOP - PAGE, 2, IOMMU_READ), mm)
    c.unpin_pages(TOP - nr * PAGE, nr)
    over(c, mm)


# ---- what pin_pages refuses ------------------------------------------------------------------------------------------
def test_pin_pages_checks(emulated):
    mem, mm, c, addr = emulated
    refused(c, EINVAL, lambda: c.pin_pages(0x100000, 0, IOMMU_READ), mm)
    refused(c, E2BIG, lambda: c.pin_pages(0x100000, 513, IOMMU_READ), mm, match="512")
    refused(c, EOVERFLOW, lambda: c.pin_pages(TOP - PAGE, 2, IOMMU_READ), mm)
    refused(c, EINVAL, lambda: c.pin_pages(0, 1, IOMMU_READ), mm, match="nothing is mapped")
    c.map_dma(mm, addr, 0x200000, PAGE, READ)
    refused(c, EPERM, lambda: c.pin_pages(0x200000, 1, IOMMU_WRITE), mm, match="allows reading")
    c.pin_pages(0x200000, 1, IOMMU_READ)
    c.unpin_pages(0x200000, 1)
    with pytest.raises((InvalidArgument, TypeError)):
        c.pin_pages(0x100000, 1, None)
    device, = c.devices
    device.unregister()
    device.unregister()
    assert not c.mappings, "the last emulated group took the mappings with it"
    c.map_dma(mm, addr, 0x100000, NR * PAGE)
    refused(c, EINVAL, lambda: c.pin_pages(0x100000, 1, IOMMU_READ), mm, match="no device")
    with pytest.raises(TypeError):
        c.register_device(None)
    with pytest.raises(InvalidArgument):
        c.register_device(quiet, domain=IOMMUDomain(mem))


def test_v1_has_no_external_pins():
    mem, mm = machine()
    c = container(mem, 1, VFIO_TYPE1_IOMMU)
    c.register_device(quiet)
    c.map_dma(mm, mapped(mm, PAGE), 0, PAGE)
    for call in (lambda: c.pin_pages(0, 1, IOMMU_READ), lambda: c.unpin_pages(0, 1), c.dirty_pages_start, c.dirty_pages_stop,
                 lambda: c.dirty_pages_get_bitmap(0, PAGE, PAGE)):
        refused(c, EACCES, call, mm)
    refused(c, EINVAL, lambda: c.unmap_dma(0, PAGE, GET_DIRTY, bitmap=bytearray(8)), mm)
    over(c, mm)


@pytest.mark.parametrize("fails_at", [0, 1, 7])
@pytest.mark.parametrize("why", ["hole", "limit", "alloc", "protection", "raw"])
def test_corner_c13_a_pin_that_fails_in_the_middle(fails_at, why):
    mem = Memory("64M", debug=True)
    mm = MM(mem, rlimit_memlock=(fails_at + 2) * PAGE)
    c = VFIOContainer(mem)
    c.register_device(quiet)
    addr = mapped(mm, NR * PAGE)
    c.map_dma(mm, addr, 0, NR * PAGE)
    c.map_dma(mm, addr, NR * PAGE, NR * PAGE, READ)
    held = [(at * PAGE, 1) for at in (0, 5)] if why == "hole" else [(20 * PAGE, 1)]
    for at, n in held:
        c.pin_pages(at, n, IOMMU_READ)
    start, number, prot = 0, EFAULT, IOMMU_READ
    if why == "hole":
        mm.munmap(addr + (fails_at + 6) * PAGE, PAGE)
        start = 6 * PAGE
    elif why == "limit":
        mm2 = mapped(mm, PAGE * (1 if fails_at else 1))
        c.map_dma(mm, mm2, 1 << 30, PAGE)
        c.pin_pages(1 << 30, 1, IOMMU_READ)
        number = ENOMEM
    elif why == "protection":
        start, number, prot = (NR - fails_at) * PAGE, EPERM, IOMMU_WRITE
    elif why == "raw":
        mm.mmap(PAGE, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, File(mem, PAGE, "iomem"), 0, addr + fails_at * PAGE)
        number = EINVAL
    else:
        number = ENOMEM
    call = lambda: c.pin_pages(start, fails_at + 2, prot)   # noqa: E731
    refused(c, number, (lambda: injected(mem, "alloc", fails_at + 1, call)) if why == "alloc" else call, mm, exactly="touched")
    over(c, mm)


def test_corner_c5_raw_pfns_that_have_reserved_pages():
    mem, mm = machine(rlimit_memlock=0, cap_ipc_lock=False)
    c = VFIOContainer(mem)
    c.register_device(quiet)
    addr = mm.mmap(2 * PAGE, PROT_READ | PROT_WRITE, MAP_SHARED, File(mem, 2 * PAGE, "pfnmap"))
    pfn = mm.page_at(addr).pfn
    poke(mem, pfn, "flags", int(mem.pages["flags"][pfn]) | int(PageFlags.reserved))
    c.map_dma(mm, addr, 0, 2 * PAGE)
    assert list(c.pin_pages(0, 1, IOMMU_WRITE).pfns) == [pfn] and pins(mem) == mm.locked_vm == 0
    refused(c, EFAULT, lambda: c.pin_pages(PAGE, 1, IOMMU_WRITE), mm)
    c.unpin_pages(0, 1)
    assert not c.mappings[0].pins and pins(mem) == 0
    over(c, mm)


@pytest.mark.parametrize("inside", [1, 0x800, PAGE - 1])
def test_a_pin_that_starts_inside_a_page_of_raw_pfns(inside):
    #   IOVA pages   | memory | registers |     registers have no struct page; the first page must not stay pinned
    mem, mm = machine()
    c = VFIOContainer(mem)
    c.register_device(quiet)
    addr = mapped(mm, 2 * PAGE)
    mm.mmap(PAGE, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, File(mem, PAGE, "iomem"), 0, addr + PAGE)
    c.map_dma(mm, addr, 0, 2 * PAGE)
    for at, n in ((PAGE + inside, 1), (inside, 2)):
        refused(c, EINVAL, lambda at=at, n=n: c.pin_pages(at, n, IOMMU_READ), mm, exactly="touched", match="no struct page")
    raw = mm.mmap(PAGE, PROT_READ | PROT_WRITE, MAP_SHARED, File(mem, PAGE, "pfnmap"))
    pfn = mm.page_at(raw).pfn
    poke(mem, pfn, "flags", int(mem.pages["flags"][pfn]) | int(PageFlags.reserved))
    c.map_dma(mm, raw, 1 << 20, PAGE)
    assert list(c.pin_pages((1 << 20) + inside, 1, IOMMU_READ).pfns) == [pfn]
    assert c.mappings[1].pins == [((1 << 20) + inside, pfn, 1)]
    c.unpin_pages((1 << 20) + inside, 1)
    over(c, mm)


def test_corner_c14_emulated_maps_touch_nothing():
    mem, mm = machine()
    c = VFIOContainer(mem)
    c.register_device(quiet)
    with same(c, mm):
        c.map_dma(mm, 1 << 40, 0, 16 * PAGE)        # no memory there at all
        c.unmap_dma(0, 16 * PAGE)
    c.map_dma(mm, 1 << 40, 0, 16 * PAGE)
    refused(c, EFAULT, lambda: c.pin_pages(0, 1, IOMMU_READ), mm)
    over(c, mm)


@pytest.mark.parametrize("acquire", ACQUIRES)
@pytest.mark.parametrize("remember", [True, False])
def test_corner_c15_attach_unwinds_all_that_it_replayed(acquire, remember):
    """Three mappings are pinned by the attach, with external pins among them; the fourth fails."""
    mem, mm = machine(rlimit_memlock="40K", cap_ipc_lock=False)
    c = VFIOContainer(mem, acquire=acquire, remember_runs=remember)
    c.register_device(quiet)
    addr = mapped(mm, 32 * PAGE)
    for i in range(3):
        c.map_dma(mm, addr + i * 4 * PAGE, i * HUGE, 3 * PAGE)
        c.pin_pages(i * HUGE + PAGE + i * 16, 1, IOMMU_READ)
    c.pin_pages(PAGE, 1, IOMMU_READ)
    c.map_dma(mm, 1 << 40, 3 * HUGE, PAGE)
    domain = IOMMUDomain(mem)
    assert (pins(mem), mm.locked_vm) == (3, 3)
    refused(c, EFAULT, lambda: c.attach(domain), mm, exactly="touched")
    c.unmap_dma(3 * HUGE, PAGE)
    c.map_dma(mm, addr, 3 * HUGE, 2 * PAGE)
    refused(c, ENOMEM, lambda: c.attach(domain), mm, exactly="touched", match="RLIMIT")
    assert domain.holder is None and domain.stats["leaves"] == domain.stale == 0 and domain.stats["tables"] == 1
    c.unmap_dma(3 * HUGE, 2 * PAGE)
    for nth in range(1, 10):
        refused(c, ENOMEM, lambda: injected(mem, "iommu_map", nth, lambda: c.attach(domain)), mm, exactly="touched")
    c.attach(domain)
    assert (pins(mem), mm.locked_vm) == (12, 9)
    # And a second one, which maps what is mapped.
    second = IOMMUDomain(mem)
    for nth in range(1, 10):
        refused(c, ENOMEM, lambda: injected(mem, "iommu_map", nth, lambda: c.attach(second)), mm)
        assert second.stats["leaves"] == 0
    c.attach(second)
    assert translations(c, 0, 3 * PAGE) and (pins(mem), mm.locked_vm) == (12, 9)
    c.detach(domain)
    c.detach(second)
    assert (pins(mem), mm.locked_vm) == (3, 3)
    over(c, mm)


# ---- notices of unmapping --------------------------------------------------------------------------------------------
def test_a_driver_is_told_before_its_pages_go(emulated):
    mem, mm, c, addr = emulated
    told = []

    def unpin(iova, size):
        told.append((iova, size))
        c.unpin_pages(iova, NR)
    c._devices.clear()
    c.register_device(unpin)
    c.pin_pages(0x100000, NR, IOMMU_READ)
    c.map_dma(mm, addr, 0x800000, PAGE)
    assert c.unmap_dma(0, 0, ALL) == (NR + 1) * PAGE
    assert told == [(0x100000, NR * PAGE)] and pins(mem) == mm.locked_vm == 0


@pytest.mark.parametrize("devices", [0, 1, 2])
def test_a_driver_that_keeps_its_pages(emulated, devices):
    mem, mm, c, addr = emulated
    told = []
    c.pin_pages(0x100000, 2, IOMMU_READ)
    c._devices.clear()
    for _ in range(devices):
        c.register_device(lambda iova, size: told.append(iova))
    refused(c, EBUSY, lambda: c.unmap_dma(0, 0, ALL), mm, match="2 external pins")
    assert told == [0x100000] * 10 * devices
    c.unpin_pages(0x100000, 2)


def test_what_a_driver_raises_is_passed_on(emulated):
    mem, mm, c, addr = emulated
    c.pin_pages(0x100000, 1, IOMMU_READ)
    with same(c, mm), pytest.raises(AssertionError, match="nobody unmaps here"):
        c.unmap_dma(0x100000, NR * PAGE)
    c.unpin_pages(0x100000, 1)
    assert c.unmap_dma(0x100000, NR * PAGE) == NR * PAGE


def test_unpin_of_what_is_not_mapped_changes_nothing(emulated):
    mem, mm, c, addr = emulated
    c.pin_pages(0x100000, 2, IOMMU_READ)
    last = 0x100000 + (NR - 1) * PAGE
    refused(c, EINVAL, lambda: c.unpin_pages(last, 2), mm)
    for args in ((0x100000, 0), (0x100000, -1), (0x100000, None), (TOP - PAGE, 2)):
        with same(c, mm), pytest.raises((MMError, TypeError)):
            c.unpin_pages(*args)
    c.unpin_pages(0x100000, 2)


def test_a_process_that_is_gone():
    mem, mm = machine()
    c = VFIOContainer(mem)
    c.register_device(quiet)
    c.map_dma(mm, mapped(mm, 4 * PAGE), 0, 4 * PAGE)
    c.pin_pages(0, 2, IOMMU_READ)
    mm.exit()
    for call, number in ((lambda: c.pin_pages(2 * PAGE, 1, IOMMU_READ), ENODEV), (lambda: c.dma_rw(0, 4, False), EPERM),
                         (lambda: c.attach(IOMMUDomain(mem)), ENODEV)):
        refused(c, number, call)
    # What is pinned already is one more user of it.
    c.pin_pages(0, 1, IOMMU_READ)
    c.unpin_pages(0, 1)
    assert pins(mem) == 2
    c.unpin_pages(0, 2)
    assert pins(mem) == 0 and c.unmap_dma(0, 4 * PAGE) == 4 * PAGE
    mem.check()


# ---- dma_rw ----------------------------------------------------------------------------------------------------------
def test_dma_rw_that_fails_in_its_second_mapping_writes_nothing(emulated):
    mem, mm, c, addr = emulated
    end, there = 0x100000 + NR * PAGE, mapped(mm, PAGE)
    c.map_dma(mm, there, end, PAGE)
    mm.munmap(there, PAGE)
    c.dirty_pages_start()
    refused(c, EFAULT, lambda: c.dma_rw(end - 3, b"abcdef", True), mm)
    assert mm.read(addr + NR * PAGE - 3, 3) == bytes(3) and not any(c.dirty_pages_get_bitmap(0x100000, NR * PAGE))
    assert c.dma_rw(end - 3, b"abc", True) == 3 and mm.read(addr + NR * PAGE - 3, 3) == b"abc"


def test_dma_rw_moves_real_bytes(emulated):
    mem, mm, c, addr = emulated
    other = mapped(mm, PAGE)
    c.map_dma(mm, other, 0x100000 + NR * PAGE, PAGE)
    end = 0x100000 + NR * PAGE
    assert c.dma_rw(end - 3, b"abcdef", True) == 6
    assert mm.read(addr + NR * PAGE - 3, 3) == b"abc" and mm.read(other, 3) == b"def"
    mm.write(other + 3, b"ghi")
    assert c.dma_rw(end - 2, 8, False) == b"bcdefghi" and c.dma_rw(end, 0, False) == b"" and c.dma_rw(end, b"", True) == 0
    refused(c, EINVAL, lambda: c.dma_rw(end + PAGE - 1, 2, False), mm)
    before = mm.read(addr, 8)
    refused(c, EINVAL, lambda: c.dma_rw(end + PAGE - 1, b"xy", True), mm)
    assert mm.read(other + PAGE - 1, 1) == b"\0" and mm.read(addr, 8) == before
    refused(c, EOVERFLOW, lambda: c.dma_rw(TOP - 1, 2, False), mm)
    for prot, reads in ((READ, True), (WRITE, False)):
        c.map_dma(mm, other, 0x900000, PAGE, prot)
        refused(c, EPERM, lambda: c.dma_rw(0x900000, b"x", True), mm)
        if reads:
            assert c.dma_rw(0x900000, 1, False) == b"d"
        else:
            refused(c, EPERM, lambda: c.dma_rw(0x900000, 1, False), mm)
        c.unmap_dma(0x900000, PAGE)
    mm.munmap(other, PAGE)
    refused(c, EFAULT, lambda: c.dma_rw(end, 1, False), mm)
    for wrong in (None, 1.5, -1):
        with pytest.raises((InvalidArgument, TypeError)):
            c.dma_rw(end, wrong, False)
    with pytest.raises(TypeError):
        c.dma_rw(end, 5, True)


# ---- attach and detach -----------------------------------------------------------------------------------------------
def test_attach_checks():
    mem, mm = machine()
    c, other = container(mem), container(mem)
    addr = mapped(mm, 4 * PAGE)
    c.map_dma(mm, addr, 0x100000, 4 * PAGE)
    refused(c, EINVAL, lambda: c.attach(c.domains[0]), mm, match="this container")
    refused(c, EINVAL, lambda: c.attach(other.domains[0]), mm, match="another container")
    for wrong, words in ((dict(windows=[(0, 0x101fff)]), "outside of what the domain translates"),
                         (dict(windows=[(0, 0x101fff), (0x102000, TOP - 1)]), "outside"),
                         (dict(reserved=[(0x103fff, 0x103fff)]), "reserved region"),
                         (dict(reserved=[(0, 0x100000, "msi")]), "reserved region")):
        refused(c, EINVAL, lambda: c.attach(IOMMUDomain(mem, **wrong)), mm, match=words)
    refused(c, errno.EPERM, lambda: c.attach(IOMMUDomain(mem), msi_isolated=False), mm, match="allow_unsafe")
    refused(other, EINVAL, lambda: other.attach(IOMMUDomain(mem, windows=[(0, 7)], reserved=[(0, 7)])), mm, match="no IOVA is left")
    relaxed = IOMMUDomain(mem, reserved=[(0x100000, 0x1fffff, "direct-relaxable"), (0x200000, 0x2fffff)])
    c.attach(relaxed)
    assert c.windows == [(0, 0x1fffff), (0x300000, TOP - 1)] and translations(c, 0x100000, PAGE) != [None]
    refused(c, EINVAL, lambda: c.map_dma(mm, addr, 0x200000, PAGE), mm)
    c.detach(relaxed)
    assert c.windows == [(0, TOP - 1)] and relaxed.stats["leaves"] == 0 and pins(mem) == 4
    c.map_dma(mm, addr, 0x200000, PAGE)
    refused(c, EINVAL, lambda: c.detach(relaxed), mm)
    unsafe = VFIOContainer(mem, allow_unsafe_interrupts=True)
    unsafe.attach(IOMMUDomain(mem), msi_isolated=False)
    unsafe.close(), other.close()
    over(c, mm)


@pytest.mark.parametrize("remember", [True, False])
def test_the_first_domain_goes_and_the_second_is_asked(remember):
    mem, mm = machine()
    addr = mapped(mm, 20 * PAGE)
    c = container(mem, 3, remember_runs=remember, release="page")
    c.map_dma(mm, addr, 0, 20 * PAGE)
    pfns, first = translations(c, 0, 20 * PAGE), c.domains[0]
    c.detach(first)
    assert translations(c, 0, 20 * PAGE) == pfns and first.stats["leaves"] == 0 and pins(mem) == 20
    c.attach(first)
    assert c.domains[-1] is first and translations(c, 0, 20 * PAGE) == pfns
    assert c.unmap_dma(0, 20 * PAGE) == 20 * PAGE
    over(c, mm)


def test_the_last_domain_takes_all_mappings_with_it():
    mem, mm = machine()
    c = container(mem)
    c.map_dma(mm, mapped(mm, 4 * PAGE), 0, 4 * PAGE)
    c.detach(c.domains[0])
    assert not c.mappings and c.dma_avail == 65535 and pins(mem) == mm.locked_vm == 0
    over(c, mm)


@pytest.mark.parametrize("end", ["detach", "close", "unregister"])
def test_a_driver_whose_pin_was_dropped_keeps_nothing_else(end):
    """Every mapping and every other pin goes; the pin that is missing is named at the end."""
    mem, mm = machine()
    c = VFIOContainer(mem)
    device = c.register_device(quiet)
    for i in range(3):
        c.map_dma(mm, mapped(mm, 4 * PAGE), i << 20, 4 * PAGE)
    lost = c.pin_pages(0, 3, IOMMU_READ)
    c.pin_pages(1 << 20, 2, IOMMU_READ)
    unpin_user_page(lost[0])
    if end == "unregister":
        call = device.unregister
    else:
        # Both pins of the page: the driver's and the mapping's.
        c.attach(IOMMUDomain(mem))
        c.unregister_device(device)
        unpin_user_page(lost[0])
        call = c.close if end == "close" else lambda: c.detach(c.domains[0])
    with pytest.raises(BadPage, match="pin underflow"):
        call()
    assert not c.mappings and not c.domains and c.dma_avail == 65535 and pins(mem) == mm.locked_vm == 0
    c.close()
    mem.check()


def test_unpin_pages_goes_on_after_a_pin_that_was_dropped():
    mem, mm = machine()
    c = VFIOContainer(mem)
    c.register_device(quiet)
    c.map_dma(mm, mapped(mm, 4 * PAGE), 0, 4 * PAGE)
    unpin_user_page(c.pin_pages(0, 4, IOMMU_READ)[1])
    with pytest.raises(BadPage, match="pin underflow.*What was to go is gone all the same"):
        c.unpin_pages(0, 4)
    assert not c.mappings[0].pins and pins(mem) == 0
    mem.check()


def test_domains_of_different_leaves():
    mem, mm = machine()
    c = VFIOContainer(mem)
    c.attach(IOMMUDomain(mem))
    c.attach(IOMMUDomain(mem, page_sizes=["4K"]))
    assert c.pgsize_bitmap == PAGE
    c.map_dma(mm, mapped(mm, 2 * HUGE, thp=True), 0, 2 * HUGE)
    assert [d.stats["leaves"] for d in c.domains] == [2, 1024] and [d.map_calls for d in c.domains] == [1, 1]
    over(c, mm)


def test_a_container_that_is_dropped_gives_everything_back():
    mem, mm = machine()
    c = container(mem, 2)
    c.register_device(quiet)
    c.map_dma(mm, mapped(mm, 4 * PAGE), 0, 4 * PAGE)
    c.pin_pages(0, 3, IOMMU_READ)
    c.pin_pages(0, 1, IOMMU_READ)
    del c
    assert pins(mem) == mm.locked_vm == 0
    mem.check()


# ---- who holds what --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("options", GENERATIONS[::3], ids=lambda o: "-".join(map(str, o.values())))
def test_the_ledger_sees_pins_of_mappings_and_of_drivers(options):
    mem, mm = machine()
    c = container(mem, **options)
    c.register_device(lambda iova, size: c.unpin_pages(iova, 3))
    addr = mapped(mm, HUGE, thp=True)
    head = mm.page_at(addr).pfn
    with PinLedger(mem) as ledger:
        c.map_dma(mm, addr, 0x10000000, HUGE)
        c.pin_pages(0x10000000, 3, IOMMU_READ)
        with pytest.raises(MMError):
            c.map_dma(mm, 1 << 40, 0, PAGE)
        assert [(row.holder, row.folio.pfn, row.count) for row in ledger.outstanding()] == [("VFIO 0x10000000+0x200000", head, 515)] or \
            ledger.by_holder() == {"VFIO 0x10000000+0x200000": 515}
        with pytest.raises(BadPage, match="VFIO 0x10000000"):
            ledger.assert_balanced()
        mm.exit()       # the folio is freed by the unmap
        c.unmap_dma(0x10000000, HUGE)
        ledger.assert_balanced()
        assert ledger.released_before == 0
    c.close()
    assert pins(mem) == 0
