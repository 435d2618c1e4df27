"""A sink in Cython, built outside of the package against its headers: no walk knows of it."""
from pathlib import Path

import pytest

import mmcore as mmc
from cython_support import build, load
from mmcore import MM, Memory

pytest.importorskip("Cython")

SOURCE = '''
from libc.stdint cimport uint64_t
from mmcore.core.memory cimport *
from mmcore.core.output cimport GupOutput, gup_output_t, leaf_count, leaf_pfn

cdef struct sum_t:
    gup_output_t base
    uint64_t leaves
    uint64_t pages
    uint64_t xor_of_pfns
    uint64_t room               # leaves it takes before it is full

cdef uint64_t take(gup_output_t *base, const uint64_t *leaf, uint64_t nr) noexcept nogil:
    cdef sum_t *out = <sum_t *>base
    cdef uint64_t i
    for i in range(nr):
        if out.leaves == out.room:
            base.error = -28
            return i
        out.leaves += 1
        out.pages += leaf_count(leaf[i])
        out.xor_of_pfns ^= leaf_pfn(leaf[i])
    return nr

cdef class Sum(GupOutput):
    cdef sum_t out

    def __init__(self, room=1 << 40):
        self.out.room = room

    cdef gup_output_t *begin(self, Memory mem, uint64_t nr_pages) except NULL:
        self.out.base.take = take
        return &self.out.base

    cdef object finish(self, Memory mem, bint pins):
        return self.out.leaves, self.out.pages, self.out.xor_of_pfns
'''

@pytest.fixture(scope="module")
def sink(tmp_path_factory):
    return load(build(tmp_path_factory.mktemp("sink"), "sink", SOURCE, path=Path(mmc.__file__).parent.parent))


def test_a_sink_of_ones_own(sink):
    with Memory("64M", thp="always") as mem:
        mm = MM(mem)
        addr = mm.mmap(4 << 20)
        mm.touch(addr, 4 << 20)
        for call in (mmc.pin_user_pages, mmc.pin_user_pages_fast):
            pages = call(mm, addr, 1000, mmc.FOLL_WRITE)
            ranges = mmc.PageRanges.from_pagelist(pages)
            leaves, nr, xor = call(mm, addr, 1000, mmc.FOLL_WRITE, output=sink.Sum())
            firsts = 0
            for pfn, _ in ranges:
                firsts ^= pfn
            assert (leaves, nr, xor) == (len(ranges), 1000, firsts)
            mmc.unpin_user_pages(pages)
            mmc.unpin_user_pages(pages)
        mm.exit()
        mem.check()


def test_what_it_refuses_is_released(sink):
    with Memory("64M", thp="never") as mem:
        mm = MM(mem)
        addr = mm.mmap(64 << 10)
        for page in (0, 2, 4, 1, 3, 5):
            mm.touch(addr + page * 4096, 4096)
        assert mmc.pin_user_pages_fast(mm, addr, 6, output=sink.Sum(4))[:2] == (4, 4)
        stat = mem.vmstat()
        assert stat["nr_foll_pin_acquired"] - stat["nr_foll_pin_released"] == 4
        with pytest.raises(mmc.MMError, match="output") as caught:
            mmc.pin_user_pages_fast(mm, addr, 6, output=sink.Sum(0))
        assert caught.value.errno == 28
        mmc.unpin_user_pages(mmc.pin_user_pages(mm, addr, 4))
        mmc.unpin_user_pages(mmc.PageList(mem, [mm.page_at(addr + page * 4096).pfn for page in range(4)]))
        mm.exit()
        mem.check()
