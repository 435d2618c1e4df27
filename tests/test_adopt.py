"""Mapping folios that exist already, large ones of files too: as ext4 and xfs have them, and as only captures bring
them here."""

import numpy as np
import pytest
from mm_support import PAGE
from support import released, unchanged

import mmcore as mmc
from mmcore.core.adopt import adopt

FIRST = 4096  # PFN


@pytest.fixture
def mem():
    with mmc.Memory("64M", hugetlb={"2M": 0}) as mem:
        yield mem
        released(mem)


def mapped(mem, kind, order, flags=mmc.MAP_SHARED, n=None):
    """A file of one kind whose cache is one folio, mapped by pages."""
    n = n or 1 << order
    mmc.folios_alloc_at(mem, [FIRST], [order], hugetlb=kind == "hugetlbfs")
    file = mmc.File(mem, max(n, 1 << order) * PAGE, kind)
    mm = mmc.MM(mem)
    if kind == "hugetlbfs":
        flags |= mmc.MAP_NORESERVE
    addr = mm.mmap(n * PAGE, flags=flags, file=file)
    none = np.zeros(n, bool)
    made = adopt(mm, addr, np.arange(FIRST, FIRST + n, dtype=np.uint64), none, none)
    assert made == (1 if kind == "hugetlbfs" else n)
    mem.check()
    return mm, file, addr


@pytest.mark.parametrize(
    "kind, order", [("tmpfs", 0), ("tmpfs", 4), ("ext4", 0), ("ext4", 4), ("ext4", 9), ("hugetlbfs", 9)]
)
def test_a_write_dirties_the_folio_and_no_word_of_a_tail(mem, kind, order):
    mm, file, addr = mapped(mem, kind, order)
    n = 1 << order
    for i in range(n):
        mm.write(addr + i * PAGE, b"%d" % i)
    mem.check()
    folio = mem.folio(FIRST)
    assert (folio.order, folio.dirty) == (order, kind == "ext4")
    pages = mmc.pin_user_pages_fast(mm, addr, n, mmc.FOLL_WRITE)
    mem.check()
    mmc.unpin_user_pages_dirty_lock(pages, n, True)
    assert folio.dirty and folio.order == order
    mem.check()
    del pages
    mm.exit()
    del file


@pytest.mark.parametrize("order", [1, 4, 9])
def test_writeback_writes_all_pages_of_a_large_folio(mem, order):
    mm, file, addr = mapped(mem, "ext4", order)
    n = 1 << order
    for i in range(n):
        mm.write(addr + i * PAGE, bytes([i % 251 + 1]))
    assert file.writeback() == n and not mem.folio(FIRST).dirty and mem.vmstat()["nr_dirty"] == 0
    assert file.writeback() == 0
    mem.check()
    # Entries are write-protected: a write through the last page is noticed again, for all of the folio.
    mm.write(addr + (n - 1) * PAGE, b"x")
    assert mem.folio(FIRST).dirty and file.writeback() == n
    mm.munmap(addr, n * PAGE)
    assert file.read(0, 1) == b"\1" and file.read((n - 1) * PAGE, 1) == b"x"
    mm.exit()
    mem.check()


@pytest.mark.parametrize("kind", ["tmpfs", "ext4"])
@pytest.mark.parametrize("keep", [1, 5, 15])
def test_truncation_splits_a_large_folio_and_drops_all_that_lies_beyond(mem, kind, keep):
    mmc.folios_alloc_at(mem, [FIRST, FIRST + 16], [4, 4])
    file = mmc.File(mem, 32 * PAGE, kind)
    mm = mmc.MM(mem)
    addr = mm.mmap(32 * PAGE, flags=mmc.MAP_SHARED, file=file)
    none = np.zeros(32, bool)
    assert adopt(mm, addr, np.arange(FIRST, FIRST + 32, dtype=np.uint64), none, none) == 32
    for i in range(32):
        mm.write(addr + i * PAGE, bytes([i + 1]))
    file.truncate(keep * PAGE)
    mem.check()
    assert mm.rss <= keep and mm.read(addr, 1) == b"\1"
    assert mem.page(FIRST + 16).refcount == 0, "the folio after the cut one is dropped as well"
    with pytest.raises(mmc.MMError, match="SIGBUS"):
        mm.read(addr + keep * PAGE, 1)
    mm.exit()


def test_pages_of_its_own_in_a_private_mapping(mem):
    mmc.folios_alloc_at(mem, [FIRST, FIRST + 1], [0, 0])
    file = mmc.File(mem, 2 * PAGE, "ext4")
    mm = mmc.MM(mem)
    addr = mm.mmap(2 * PAGE, flags=mmc.MAP_PRIVATE, file=file)
    none = np.zeros(2, bool)
    assert adopt(mm, addr, [FIRST, FIRST + 1], none, [False, True], [False, True]) == 2
    mm.write(addr, b"a")
    mm.write(addr + PAGE, b"b")
    assert mm.page_at(addr).pfn != FIRST and mm.page_at(addr + PAGE).pfn == FIRST + 1
    mem.check()
    mm.exit()


def test_a_folio_that_the_file_has_no_room_for_is_left_out(mem):
    mmc.folios_alloc_at(mem, [FIRST], [4])
    small = mmc.File(mem, 8 * PAGE, "tmpfs")
    mm = mmc.MM(mem)
    addr = mm.mmap(8 * PAGE, flags=mmc.MAP_SHARED, file=small)
    none = np.zeros(4, bool)
    assert adopt(mm, addr + 4 * PAGE, np.arange(FIRST + 4, FIRST + 8, dtype=np.uint64), none, none) == 0
    assert (mem.folio(FIRST).refcount, mem.folio(FIRST).mapcount, mm.rss) == (1, 0, 0)
    mem.check()
    mm.exit()
    mmc.folio_put(mem.folio(FIRST))


def test_arrays_of_one_length(mem):
    mmc.folios_alloc_at(mem, [FIRST], [0])
    mm = mmc.MM(mem)
    addr = mm.mmap(PAGE)
    with unchanged(mem):
        for wrong in ([[], [0], [0]], [[0], [], [0]], [[0], [0], []]):
            with pytest.raises(mmc.InvalidArgument, match="one length"):
                adopt(mm, addr, [FIRST], *wrong)
        with pytest.raises(mmc.MMError):
            adopt(mm, addr + PAGE, [FIRST], [0], [0])
    mmc.folio_put(mem.folio(FIRST))
    mm.exit()
