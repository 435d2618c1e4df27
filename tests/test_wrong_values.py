"""Values that no caller can mean, where a call keeps them, or turns to memory with them, before it looks."""
import subprocess
import sys

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


BARE = """
import inspect, sys
import mmcore as mmc
mem = mmc.Memory("16M")
mm = mmc.MM(mem)
addr = mm.mmap("64K")
calls = {
    "lists": [mmc.unpin_user_pages, mmc.release_pages, mmc.grab_pages, mmc.folio_runs, mmc.num_pages_contiguous, mmc.longterm_unpinnable,
              mmc.io_check_coalesce_buffer, lambda o: mmc.PageList(mem, [5]) + o, lambda o: mmc.BufferTable(mm).register([o])],
    "pages": [mmc.put_page, mmc.get_page, mmc.page_address, mmc.folio_address, mmc.folio_put, mmc.folio_split, mmc.page_folio, repr],
    "tables": [mmc.sg_free_table, mmc.sg_page_pfns, mmc.sg_nents, mmc.sg_last, lambda o: mmc.sg_copy_to_buffer(o, bytearray(8)),
               lambda o: mmc.sg_split(o, 0, [1]), lambda o: list(mmc.for_each_sg(o)), mmc.sg_next, mmc.sg_page, mmc.sg_mark_end],
    "machines": [lambda o: mmc.folio_alloc(o, 0), mmc.MM, lambda o: mmc.PageList(o, [1]), lambda o: mmc.pin_user_pages(o, addr, 1),
                 mmc.BufferTable, lambda o: mmc.ib_umem_get(o, mm, addr, 1, 1), mmc.ib_umem_release,
                 lambda o: mmc.ib_umem_copy_from(o, 0, 1), lambda o: mmc.pin_user_pages(mm, addr, 1, output=o),
                 lambda o: mm.mmap(4096, 3, mmc.MAP_SHARED, o), lambda o: mmc.dma_map_sgtable(o, mmc.sg_alloc_table(mem, 1))]}
for name in sys.argv[1:]:
    bare = getattr(mmc, name).__new__(getattr(mmc, name))
    for attribute in dir(bare):
        if attribute.startswith("__") and attribute not in ("__repr__", "__len__", "__iter__", "__eq__", "__add__", "__next__"):
            continue
        for arguments in ((), (1,), (bare,), (1, b"x")):
            try:
                getattr(bare, attribute)(*arguments)
            except Exception:
                pass
    for call in [call for group in calls.values() for call in group]:
        try:
            call(bare)
        except (mmc.MMError, mmc.BadPage, TypeError, AttributeError, NotImplementedError):
            pass
    mem.check()
    print(name)
"""


def test_objects_that_were_never_set_up_crash_nothing():
    """T.__new__(T), or a subclass that forgets super().__init__(): what it lacks is an error, not a null pointer."""
    names = [name for name in mmc.__all__ if isinstance(getattr(mmc, name), type) and getattr(mmc, name).__module__.startswith("mmcore")
             and not issubclass(getattr(mmc, name), (Exception, int, tuple)) and name not in ("VFIOContainer", "PageFlags")]
    done = subprocess.run([sys.executable, "-c", BARE, *names], capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.split() == names, done.stderr[-1000:]


@pytest.mark.parametrize("text, size", [("0.5K", 512), ("1.5 GiB", 3 << 29), ("1.25", None), ("9007199254740993.0", 9007199254740993),
                                        ("9" * 400 + ".5G", None), ("9" * 400 + ".0", int("9" * 400))])
def test_sizes_are_exact_however_long(text, size):
    if size is None:
        with pytest.raises(mmc.InvalidArgument):
            mmc.Memory(text)
    else:
        from mmcore.core.size import parse_size
        assert parse_size(text) == size
