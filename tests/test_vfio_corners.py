"""Corners of pinning for a container, by the numbers that docs and reports give them."""
import errno

import pytest

from mmcore import *
from vfio_support import *

ENOMEM = errno.ENOMEM
FIXED = MAP_SHARED | MAP_FIXED


def test_corner_c1_pfn_0_is_no_page():
    mem, mm = machine()
    assert PageFlags.reserved & int(mem.pages["flags"][0])
    with pytest.raises((MMError, ValueError)):
        mem.page(0)


@pytest.mark.parametrize("acquire", ACQUIRES)
def test_corner_c4_a_longterm_pin_finds_no_reserved_page(acquire):
    mem, mm = machine()
    addr = mm.mmap(4 * PAGE)
    mm.touch(addr, 4 * PAGE, write=False)
    assert mm.page_at(addr) == mem.zero_page
    c = container(mem, acquire=acquire)
    c.map_dma(mm, addr, 0, 4 * PAGE, READ)
    assert mem.zero_page.pfn not in translations(c, 0, 4 * PAGE) and pins(mem) == 4 and not c.mappings[0].has_rsvd
    over(c, mm)


def test_corner_c6_disable_hugepages_counts_from_the_next_mapping_on():
    mem, mm = machine()
    addr = mapped(mm, 8 * PAGE)
    c = container(mem, acquire="batch")
    for i, off in enumerate((False, True, False)):
        c.disable_hugepages = off
        before = c.domains[0].map_calls
        c.map_dma(mm, addr, i * HUGE, 8 * PAGE)
        assert c.domains[0].map_calls - before == (8 if off else 1)
    assert pins(mem) == 24
    over(c, mm)


@pytest.mark.parametrize("acquire", ACQUIRES)
def test_corner_c7_the_mappers_own_limit_is_the_last_word(acquire):
    """Attach by a caller whose limit is larger than that of who mapped: the look beforehand passes, the charge does
    not.
    """
    mem = Memory("64M", debug=True)
    poor, rich = MM(mem, rlimit_memlock=4 * PAGE), MM(mem, rlimit_memlock="1M")
    c = VFIOContainer(mem, acquire=acquire)
    addr = mapped(poor, 8 * PAGE)
    c.map_dma(poor, addr, 0, 3 * PAGE)
    c.map_dma(poor, addr, 1 << 30, 8 * PAGE)
    for current, limit in ((rich, 4), (poor, 4), (None, 4), (MM(mem, rlimit_memlock=2 * PAGE), 2)):
        error = refused(c, ENOMEM, lambda: c.attach(IOMMUDomain(mem), current=current), poor, rich,
                        match="RLIMIT_MEMLOCK", exactly="touched")
        assert f"({limit * PAGE} bytes" in str(error)
    over(c, poor)


@pytest.mark.parametrize("acquire", ACQUIRES)
def test_corner_c8_has_rsvd_is_noted_with_the_chunk(acquire):
    mem = Memory("64M", debug=True)
    mm = MM(mem, rlimit_memlock=2 * PAGE)
    c = VFIOContainer(mem, acquire=acquire)
    addr = mapped(mm, 8 * PAGE)
    for raw_at, noted in ((0, True), (4, False)):
        mm.mmap(2 * PAGE, PROT_READ | PROT_WRITE, FIXED, File(mem, 2 * PAGE, "iomem"), 0, addr + raw_at * PAGE)
        c.map_dma(mm, addr, 0, 8 * PAGE)
        with pytest.raises(MMError):
            c.attach(IOMMUDomain(mem))
        assert c.mappings[0].has_rsvd == noted and pins(mem) == mm.locked_vm == 0
        c.unmap_dma(0, 8 * PAGE)
        addr = mapped(mm, 8 * PAGE)
    over(c, mm)
