"""Values that no caller can mean, where a call keeps them, or turns to memory with them, before it looks."""
import numpy as np
import pytest

import mmcore as mmc
from mm_support import PAGE
from mmcore import IBDevice, InvalidArgument, MM, Memory, MMError, ProtectionDomain, IB_ACCESS
from support import refused


@pytest.fixture
def mem():
    return Memory("16M")


@pytest.fixture
def mm(mem):
    return MM(mem)


@pytest.mark.parametrize("kwargs", [
    dict(size=1 << 64), dict(size=1 << 70), dict(movable=1 << 64), dict(cma=1 << 63), dict(hugetlb=5), dict(hugetlb=["2M"]),
    dict(hugetlb="2M"), dict(mthp=(2.5,)), dict(mthp=("4",)), dict(mthp=(None,))], ids=str)
def test_machines_that_cannot_be(kwargs):
    with pytest.raises((TypeError, InvalidArgument)):
        Memory(**{"size": "16M", **kwargs})


@pytest.mark.parametrize("kind", ["tmpfs", "ext4", "secretmem", "pfnmap", "iomem"])
@pytest.mark.parametrize("size", [1 << 63, 1 << 64, 1 << 100])
def test_files_that_cannot_be(mem, kind, size):
    with refused(mem, InvalidArgument):
        mmc.File(mem, size, kind)


@pytest.mark.parametrize("advice", [True, 4.0, np.float64(4), "4", None, -1, 1 << 40])
def test_advice_that_is_none(mem, mm, advice):
    addr = mm.mmap(PAGE)
    mm.write(addr, b"kept")
    with refused(mem, (TypeError, InvalidArgument)):
        mm.madvise(addr, PAGE, advice)
    assert mm.read(addr, 4) == b"kept"
    mm.madvise(addr, PAGE, np.int64(mmc.MADV_DONTNEED))


@pytest.mark.parametrize("nbytes", [8 << 20, 1 << 40, 1 << 45, 1 << 46, 1 << 61])
def test_reading_what_is_not_there_takes_no_memory(mem, mm, nbytes):
    addr = mm.mmap(4 << 20)
    with refused(mem, MMError, errno=14) as caught:
        mm.read(addr, nbytes)
    assert caught.value.addr in (addr, addr + (4 << 20))
    assert mm.read(addr + 5, (4 << 20) - 5) == bytes((4 << 20) - 5)


@pytest.mark.parametrize("release", ["x", "run", None, True, 1, ["range"]])
def test_a_region_that_could_not_be_closed_is_not_made(mem, mm, release):
    with ProtectionDomain(IBDevice(mem), mm) as pd, refused(mem, InvalidArgument, "none of 'range', 'array', 'page'"):
        pd.reg_mr(mm.mmap(PAGE), PAGE, IB_ACCESS.LOCAL_WRITE, release=release)


@pytest.mark.parametrize("name, value", [("mtt_limit", "1M"), ("mtt_limit", -1), ("mtt_limit", 1.5), ("mtt_limit", True),
                                         ("mtt_entry", 0), ("mtt_entry", None), ("mtt_entry", 16.0)])
def test_limits_of_devices_are_numbers(mem, name, value):
    with pytest.raises((TypeError, InvalidArgument), match=name):
        IBDevice(mem, **{name: value})


@pytest.mark.parametrize("flags", ["x", None, 2.0, True, 1 << 4, -1, []])
def test_flags_of_a_miter(mem, flags):
    with pytest.raises((TypeError, InvalidArgument)):
        mmc.sg_miter(mmc.sg_alloc_table(mem, 1), flags)


@pytest.mark.parametrize("value", ["5", 1.5, True, None, -1, 1 << 64])
def test_words_and_page_sizes(mem, mm, value):
    umem = mmc.ib_umem_get(IBDevice(mem), mm, mm.mmap(PAGE), PAGE, 1)
    for call in (mmc.hmm_pfn_to_pfn, mmc.hmm_pfn_to_map_order, lambda n: mmc.ib_umem_dma_offset(umem, n)):
        with pytest.raises((TypeError, InvalidArgument)):
            call(value)
    with pytest.raises(InvalidArgument, match="no power of two"):
        mmc.ib_umem_dma_offset(umem, 3)
    mmc.ib_umem_release(umem)
