"""Mapping folios that exist already, large ones of files too: as ext4 and xfs have them, and as only captures bring
them here."""

import errno

import numpy as np
import pytest
from mm_support import PAGE
from support import refused, released, unchanged

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


# ---- what cannot be mapped as asked ----------------------------------------------------------------------------------
def adopt_one(mm, addr, pfn, leaf=False, exclusive=False, anon=None):
    return adopt(mm, addr, [pfn], [leaf], [exclusive], None if anon is None else [anon])


def test_refused_with_the_page_and_the_reason(mem):
    mmc.folios_alloc_at(mem, [FIRST, 8192], [0, 9], hugetlb=[False, True])
    file = mmc.File(mem, 2 * PAGE, "tmpfs")
    mm = mmc.MM(mem)
    addr, huge = mm.mmap(2 * PAGE), mm.mmap(512 * PAGE)
    shared = mm.mmap(2 * PAGE, flags=mmc.MAP_SHARED, file=file)
    with refused(mem, mmc.InvalidArgument, match="no multiple of the page size"):
        adopt_one(mm, addr + 1, FIRST)
    mm.touch(addr + PAGE, PAGE)     # the tables are there
    mm.touch(shared + PAGE, PAGE)
    free = 8192 + 1024
    table = next(pfn for pfn in range(FIRST, free) if mem.pages["page_type"][pfn] >> 24 == 0xf2)
    assert mem.page(free).refcount == 0 and mem.page(table).refcount == 1
    for at, pfn in ((addr, free), (addr, table), (huge, 8192), (shared, mem.zero_page.pfn)):
        with refused(mem, mmc.MMError, match=rf"page 0 of the list \(PFN {pfn:#x}\) cannot be mapped at {at:#x}", errno=errno.EINVAL,
                     pfn=pfn):
            adopt_one(mm, at, pfn)
    mmc.folio_put(mem.folio(FIRST))
    mmc.folio_put(mem.folio(8192))
    mm.exit()


def test_what_is_mapped_already_stays(mem):
    mmc.folios_alloc_at(mem, [FIRST, FIRST + 512], [0, 9])
    mm = mmc.MM(mem)
    addr = mm.mmap(1024 * PAGE)
    mm.write(addr, b"old")
    mm.madvise(addr + 512 * PAGE, 512 * PAGE, mmc.MADV_HUGEPAGE)
    mm.write(addr + 512 * PAGE, b"huge")
    with unchanged(mem):
        assert adopt_one(mm, addr, FIRST) == 0                                # an entry
        assert adopt_one(mm, addr + 600 * PAGE, FIRST) == 0                   # a leaf where a table would be needed
        assert adopt_one(mm, addr + 512 * PAGE, FIRST + 512, leaf=True) == 0
    assert mm.read(addr, 3) == b"old" and mm.read(addr + 512 * PAGE, 4) == b"huge"
    mmc.folio_put(mem.folio(FIRST))
    mmc.folio_put(mem.folio(FIRST + 512))
    mm.exit()


def test_a_page_of_an_anonymous_folio_has_one_place(mem):
    """An index and an address space a folio: a page of it elsewhere, or in a stranger's space, is left out."""
    mmc.folios_alloc_at(mem, [FIRST], [2])
    mm, other = mmc.MM(mem), mmc.MM(mem)
    addr, there = mm.mmap(16 * PAGE), other.mmap(16 * PAGE)
    assert adopt_one(mm, addr, FIRST) == 1 and adopt_one(mm, addr + 2 * PAGE, FIRST + 2) == 1
    other.touch(there, PAGE)
    with unchanged(mem):
        assert adopt_one(mm, addr + 8 * PAGE, FIRST + 1) == 0
        assert adopt_one(other, there + PAGE, FIRST + 1) == 0
    assert mem.folio(FIRST).mapcount == 2
    mm.exit()
    other.exit()


def test_a_leaf_that_its_mapping_does_not_span_is_left_out(mem):
    mmc.folios_alloc_at(mem, [FIRST], [9])
    mm = mmc.MM(mem)
    addr = mm.mmap(1024 * PAGE)
    mm.munmap(addr, PAGE)
    with unchanged(mem):
        assert adopt_one(mm, addr + PAGE, FIRST + 1, leaf=True) == 0          # its first page is not mapped
        assert adopt_one(mm, addr + 513 * PAGE, FIRST, leaf=True) == 0        # off its boundary
    assert adopt_one(mm, addr + 513 * PAGE, FIRST + 1, leaf=True) == 1        # found from its second page
    assert mm.page_at(addr + 512 * PAGE).pfn == FIRST and mm.rss == 512
    mm.exit()


def test_a_file_takes_only_what_nobody_else_holds(mem):
    mmc.folios_alloc_at(mem, [FIRST, FIRST + 1], [0, 0])
    file, other = mmc.File(mem, 4 * PAGE, "tmpfs"), mmc.File(mem, 4 * PAGE, "tmpfs")
    mm = mmc.MM(mem)
    addr, there = (mm.mmap(4 * PAGE, flags=mmc.MAP_SHARED, file=f) for f in (file, other))
    assert adopt_one(mm, addr, FIRST) == 1
    file.write(3 * PAGE, b"in memory")
    held = mem.folio(FIRST + 1)
    with unchanged(mem):
        assert adopt_one(mm, there, FIRST) == 0                               # another file's
        assert adopt_one(mm, addr + PAGE, FIRST) == 0                         # at another index of it
        assert adopt_one(mm, addr + 3 * PAGE, FIRST + 1) == 0                 # the cache has a page there
    mmc.folio_get(held)
    with unchanged(mem):
        assert adopt_one(mm, addr + PAGE, FIRST + 1) == 0                     # somebody else has a reference
    mmc.folio_put(held)
    assert adopt_one(mm, addr + PAGE, FIRST + 1) == 1
    again = mm.mmap(4 * PAGE, flags=mmc.MAP_SHARED, file=file)
    assert adopt_one(mm, again, FIRST) == 1 and mem.folio(FIRST).mapcount == 2
    mm.exit()
    del file, other
