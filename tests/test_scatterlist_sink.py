"""The append sink as an extension of somebody else's uses it: cimported, fed with leaves, finished or given up."""
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from mmcore import Memory, SGAppendTable
from mmcore.bench.peers import NoPeers
from mmcore.bench.sg import cython_module
from sg_support import PAGE, UINT_MAX, append, rows, snapshot

SOURCE = '''
from libc.stdint cimport uint64_t
from mmcore.core.memory cimport Memory, mem_t
from mmcore.core.sgappend cimport *
from mmcore.core.scatterlist cimport SGAppendTable


def feed(SGAppendTable table, leaves, uint64_t nr_pages, uint64_t max_segment, uint64_t later, bint give_up):
    """Feed (pfn, pages) leaves and lists of PFNs in turn; the error, 0 when all went well."""
    cdef append_t a
    cdef uint64_t pfn, nr, i
    cdef uint64_t pfns[64]
    cdef int error = 0
    cdef mem_t *m = table.write(True)
    append_begin(&a, m, &table.t, nr_pages, 0, max_segment, later)
    for leaf in leaves:
        if isinstance(leaf, list):
            for i in range(len(leaf)):
                pfns[i] = leaf[i]
            error = append_list(&a, pfns, len(leaf))
        else:
            pfn, nr = leaf
            error = append_run(&a, pfn, nr)
        if error:
            break
    if error == 0 and not give_up:
        error = append_finish(&a, 0)
    if error or give_up:
        append_abort(&a)
    table.write_done()
    return error, a.why
'''
MEM = Memory("64M")


@pytest.fixture(scope="module")
def feed(tmp_path_factory):
    source = Path(tmp_path_factory.mktemp("sink")) / "sink.pyx"
    source.write_text(SOURCE)
    try:
        return cython_module(source).feed
    except NoPeers as reason:
        pytest.skip(str(reason))


LEAF = st.one_of(st.tuples(st.integers(16, 4000), st.sampled_from([1, 2, 16, 512])),
                 st.lists(st.integers(16, 200), min_size=1, max_size=64))


def pages_of(leaves):
    out = []
    for leaf in leaves:
        out += leaf if isinstance(leaf, list) else range(leaf[0], leaf[0] + leaf[1])
    return out


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(leaves=st.lists(LEAF, min_size=1, max_size=30), more=st.lists(LEAF, min_size=1, max_size=5),
       max_segment=st.sampled_from([PAGE, 5 * PAGE, 65536, UINT_MAX]), slack=st.integers(0, 600))
def test_leaves_build_what_the_list_builds(feed, leaves, more, max_segment, slack):
    """Slot for slot; also when fewer pages come than the sink was opened for, and after giving up half-way."""
    first, second = pages_of(leaves), pages_of(more)
    by_leaf, by_list = SGAppendTable(MEM), SGAppendTable(MEM)
    for part, pages, later in ((leaves, first, len(second)), (more, second, 0)):
        before = snapshot(by_leaf)
        assert feed(by_leaf, part, len(pages) + slack, max_segment, later, True) == (0, 0)
        assert snapshot(by_leaf) == before
        assert feed(by_leaf, part, len(pages) + slack, max_segment, later, False) == (0, 0)
        append(by_list, pages, later, max_segment=max_segment)
        by_leaf.check()
        assert rows(by_leaf) == rows(by_list)
        assert (by_leaf.chunks, by_leaf.total_nents) == (by_list.chunks, by_list.total_nents)


def test_more_leaves_than_the_sink_was_opened_for(feed):
    sgt = SGAppendTable(MEM)
    append(sgt, [16], 1000)
    before = snapshot(sgt)
    for leaves in ([(17, 512)], [(20, 400), (500, 112)], [[40] * 64] * 8, [[40] * 60, (900, 452)]):
        error, why = feed(sgt, leaves, 511, UINT_MAX, 0, False)
        assert error == -22 and why and snapshot(sgt) == before
    assert feed(sgt, [(17, 511)], 511, UINT_MAX, 0, False) == (0, 0) and rows(sgt) == [(16, 0, 512 * PAGE)]


def test_every_failing_chunk_of_a_sink(feed):
    leaves = [(16 + 3 * i, 2) for i in range(600)]
    nth = 1
    sgt = SGAppendTable(MEM)
    while True:
        before = snapshot(sgt)
        with MEM.inject("sg", nth):
            error, _ = feed(sgt, leaves, 1200, UINT_MAX, 0, False)
        if error == 0:
            break
        assert error == -12 and snapshot(sgt) == before
        nth += 1
    assert nth == 6 and len(sgt) == 600             # 600 entries are 5 chunks
