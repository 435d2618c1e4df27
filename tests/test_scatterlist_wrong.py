"""Scatterlist and DMA calls with wrong arguments, and from several threads: refused or right, nothing broken."""
import pickle
import random
import threading
import time

import pytest

import mmcore as mmc
from calls import SCATTERLIST
from mmcore import InvalidArgument, Memory, MMError, PageList, SG_MITER_FROM_SG, SGAppendTable
from sg_support import PAGE, append, build, entries, rows, snapshot
from support import ANY_REFUSAL, refused

# What each call takes. On the objects of make() every call below is valid.
CALLS = {
    "SGTable": ["mem"], "SGAppendTable": ["mem"], "sg_max_single_alloc": ["mem"], "sg_alloc_table": ["mem", "count"],
    "sg_alloc_table_chained": ["mem", "count", "count"], "sg_init_table": ["mem", "count"],
    "sg_alloc_table_from_pages": ["pages", "zero", "size"],
    "sg_alloc_table_from_pages_segment": ["pages", "zero", "size", "size"],
    "sg_alloc_append_table_from_pages": ["append", "pages", "zero", "size", "size", "count"],
    "sg_free_table": ["spare"], "sg_free_append_table": ["append"], "sg_chain": ["front", "two", "table"],
    "sg_miter": ["table", "flags"], "sg_copy_to_buffer": ["table", "buffer", "zero"],
    "sg_copy_from_buffer": ["table", "buffer", "zero"], "sg_pcopy_to_buffer": ["table", "buffer", "zero"],
    "sg_pcopy_from_buffer": ["table", "buffer", "zero"], "sg_zero_buffer": ["table", "size", "zero"],
    "sg_draw": ["table"], "for_each_sg": ["table"], "sg_next": ["entry"], "sg_last": ["table"], "sg_nents": ["table"],
    "sg_nents_for_len": ["table", "count"], "sg_page": ["entry"], "sg_phys": ["entry"], "sg_dma_address": ["entry"],
    "sg_dma_len": ["entry"], "sg_set_page": ["entry", "page", "count", "zero"],
    "sg_set_folio": ["entry", "folio", "count", "zero"], "sg_mark_end": ["entry"], "sg_is_last": ["entry"],
    "for_each_sg_page": ["table", "zero"], "sg_page_iter": ["table", "zero"], "sg_page_pfns": ["table", "zero"],
    "sg_dma_page_iter": ["table", "zero"], "sg_split": ["table", "zero", "sizes"], "sgl_alloc": ["mem", "size"],
    "sgl_free": ["spare"], "Device": ["mem"], "dma_map_sgtable": ["device", "table"],
    "dma_unmap_sgtable": ["device", "mapped"], "IOMMUDomain": ["mem"],
}
NOT_CALLED = {"SGEntry", "SG_DTYPE", "SG_CHUNK_SIZE", "SG_MITER", "SG_MITER_ATOMIC", "SG_MITER_TO_SG", "SG_MITER_FROM_SG",
              "SG_MITER_LOCAL", "DMA", "DMA_BIDIRECTIONAL", "DMA_TO_DEVICE", "DMA_FROM_DEVICE", "DMA_MAPPING_ERROR"}


class World:
    """A Memory and one valid object of each kind."""

    def __init__(self):
        self.mem = Memory("16M")
        self.pages = mmc.alloc_pages_bulk(self.mem, 4)
        self.table = mmc.sg_alloc_table_from_pages(self.pages, 0, 4 * PAGE)
        self.append = SGAppendTable(self.mem)
        append(self.append, self.pages.pfns[:1], 10)
        self.spare = mmc.sgl_alloc(self.mem, 100)
        self.front = mmc.sg_init_table(self.mem, 2)
        self.entry = self.table[0]
        self.page, self.folio = self.pages[0], self.pages[0].folio
        self.device = mmc.Device(self.mem, iommu=True)
        self.mapped = build(self.mem, self.pages.pfns)
        mmc.dma_map_sgtable(self.device, self.mapped)
        self.buffer = bytearray(100)
        self.count, self.zero, self.two, self.size, self.flags, self.sizes = 3, 0, 2, 4 * PAGE, SG_MITER_FROM_SG, [1, 2]

    def state(self):
        return [snapshot(table) for table in (self.table, self.append, self.spare, self.front, self.mapped)]

    def call(self, name, args):
        result = getattr(mmc, name)(*args)
        if hasattr(result, "__next__"):
            return list(result)
        return result

    def args(self, name):
        return [getattr(self, kind) for kind in CALLS[name]]


def test_every_public_name_is_in_the_table():
    assert SCATTERLIST - NOT_CALLED == CALLS.keys()


@pytest.mark.parametrize("name", CALLS)
def test_the_good_arguments_are_good(name):
    world = World()
    world.call(name, world.args(name))
    world.mem.check()


WRONG = {
    "mem": [None, 5, "16M"], "pages": [None, 5, [], [5], "pages"], "table": [5, "table", [], object()],
    "append": [None, 5, "table"], "spare": [None, 5, "table"], "front": [None, 5, "table"], "mapped": [None, 5, "table"],
    "entry": [None, 5, "entry"], "page": [None, 5, "page"], "folio": [None, 5, "folio"], "device": [None, 5, "device"],
    "buffer": [None, 5, "text"], "flags": [None, 0, 16, 1, "flags", 1 << 70], "sizes": [None, 5, [None], [-1], [1 << 70], ["1"]],
}
NUMBERS = [None, "1", 1.0, -1, -(1 << 70), 1 << 64, 1 << 70, True]


def wrong_cases():
    for name, kinds in CALLS.items():
        for index, kind in enumerate(kinds):
            for value in WRONG.get(kind, NUMBERS):
                if (name, value) == ("sg_nents", None):
                    continue                        # sg_nents(NULL) is 0
                if name == "sg_alloc_append_table_from_pages" and index == 4 and value is None:
                    continue                        # the table's own max_segment
                yield name, index, value


@pytest.mark.parametrize("name, index, value", list(wrong_cases()), ids=repr)
def test_wrong_arguments(name, index, value):
    world = World()
    before = world.state()
    args = world.args(name)
    args[index] = value
    with refused(world.mem, ANY_REFUSAL):
        world.call(name, args)
    assert world.state() == before


@pytest.mark.parametrize("name", [name for name, kinds in CALLS.items() if {"pages", "page", "folio", "table", "device"} & {*kinds}])
def test_what_belongs_to_another_memory(name):
    """Each argument in turn is another Memory's, where a call takes two things that have one."""
    world, other = World(), World()
    kinds = CALLS[name]
    having = [i for i, kind in enumerate(kinds) if kind not in ("count", "zero", "two", "size", "flags", "sizes", "buffer")]
    if len(having) < 2:
        return
    for index in having:
        args = world.args(name)
        args[index] = getattr(other, kinds[index])
        before, theirs = world.state(), other.state()
        with refused(world.mem, ANY_REFUSAL):
            world.call(name, args)
        assert world.state() == before and other.state() == theirs


@pytest.mark.parametrize("name", [name for name in CALLS])
def test_a_closed_memory(name):
    world = World()
    args = world.args(name)
    world.mem.close()
    with pytest.raises(ANY_REFUSAL):
        world.call(name, args)


def test_freed_and_raw_tables():
    world = World()
    mmc.sg_free_table(world.table)
    with pytest.raises(InvalidArgument):
        world.entry.length
    for raw in (mmc.SGTable.__new__(mmc.SGTable), mmc.SGAppendTable.__new__(mmc.SGAppendTable)):
        for name, kinds in CALLS.items():
            for index, kind in enumerate(kinds):
                if kind in ("table", "append", "spare", "front", "mapped"):
                    args = world.args(name)
                    args[index] = raw
                    with pytest.raises(ANY_REFUSAL):
                        world.call(name, args)
        with pytest.raises(ANY_REFUSAL):
            raw.entries
        repr(raw)
    device = mmc.Device.__new__(mmc.Device)
    with pytest.raises(ANY_REFUSAL):
        mmc.dma_map_sgtable(device, world.spare)
    repr(device)
    domain = mmc.IOMMUDomain.__new__(mmc.IOMMUDomain)
    for use in (lambda: domain.map(0, 0, PAGE), lambda: domain.unmap(0, PAGE), lambda: domain.iova_to_phys(0),
                lambda: domain.leaf_size(0), lambda: mmc.Device(world.mem, iommu=domain)):
        with pytest.raises(ANY_REFUSAL):
            use()
    repr(domain), domain.stats
    with pytest.raises(TypeError):
        mmc.SGEntry()
    for made in (world.append, world.device):
        with pytest.raises(ANY_REFUSAL):
            made.__init__(world.mem)


def test_nothing_here_is_pickled():
    world = World()
    for thing in (world.table, world.append, world.entry, world.device, world.device.domain,
                  mmc.sg_miter(world.table, SG_MITER_FROM_SG)):
        with pytest.raises(TypeError):
            pickle.dumps(thing)


def test_settable_counts():
    world = World()
    sgt = mmc.sg_init_table(world.mem, 4)
    sgt.nents = sgt.orig_nents = 0
    assert list(mmc.for_each_sg(sgt)) == [] and sgt[3].pfn == 0
    for value in (5, -1, None, 1 << 64):
        with refused(world.mem, ANY_REFUSAL):
            sgt.nents = value
        with refused(world.mem, ANY_REFUSAL):
            world.append.orig_nents = value
    # Counts beyond what was filled in: walks end where the slots end.
    sgt.orig_nents = 4
    assert len(list(mmc.for_each_sg(sgt))) == 4


def test_walks_end_at_an_early_end_mark():
    world = World()
    sgt = entries(world.mem, [(pfn, 0, 100) for pfn in world.pages.pfns.tolist()])
    mmc.sg_mark_end(sgt[1])
    assert len(list(mmc.for_each_sg(sgt))) == 2 and mmc.sg_nents(sgt) == 2 and sgt.orig_nents == 4
    out = bytearray(400)
    assert mmc.sg_copy_to_buffer(sgt, out) == 200
    assert len(mmc.sg_page_pfns(sgt)) == len(list(mmc.sg_page_iter(sgt))) == 2
    assert sum(len(window) for window in mmc.sg_miter(sgt, SG_MITER_FROM_SG)) == 200
    with refused(world.mem, InvalidArgument):
        mmc.sg_split(sgt, 0, [300])
    # A device would be given entries that are not there: refused.
    for iommu in (True, False):
        with refused(world.mem, InvalidArgument, "ends before"):
            mmc.dma_map_sgtable(mmc.Device(world.mem, iommu=iommu), sgt)
    sgt.orig_nents = 2
    assert mmc.dma_map_sgtable(mmc.Device(world.mem, iommu=True), sgt) == 2


def test_random_wrong_calls():
    """20,000 calls with arguments mixed at random: refused, or done; the laws hold, and nothing crashes."""
    rng = random.Random(5)
    values = [None, 0, 1, 2, 3, -1, PAGE, 4 * PAGE, 1 << 31, (1 << 32) - 1, 1 << 32, (1 << 64) - 1, 1 << 64, "x", b"bytes", [], [1, 2],
              True, 1.5]
    kinds = ["mem", "pages", "table", "append", "spare", "front", "mapped", "entry", "page", "folio", "device", "buffer", "flags"]
    names = [name for name in CALLS if name not in ("sg_alloc_table", "sg_init_table", "sg_alloc_table_chained")]
    for _ in range(40):
        world, other = World(), World()
        for _ in range(500):
            name = rng.choice(names)
            args = [getattr(world, kind) for kind in CALLS[name]]
            for index in range(len(args)):
                draw = rng.random()
                if draw < 0.25:
                    args[index] = rng.choice(values)
                elif draw < 0.4:
                    args[index] = getattr(rng.choice((world, other)), rng.choice(kinds))
            try:
                getattr(mmc, name)(*args)
            except ANY_REFUSAL:
                pass
            except BufferError:
                pass                                # a buffer that may not be written
        for mem in (world.mem, other.mem):
            mem.check()


# ---- threads -----------------------------------------------------------------------------------------------------------------
def run_threads(work, nr=4):
    failures = []

    def body(k):
        try:
            work(k)
        except BaseException as error:
            failures.append(error)
            raise
    threads = [threading.Thread(target=body, args=(k,)) for k in range(nr)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_threads_with_their_own_tables():
    mem = Memory("64M")
    domain_device = [mmc.Device(mem, iommu=True) for _ in range(4)]
    pages = mmc.alloc_pages_bulk(mem, 2000)

    def work(k):
        data = bytes([k + 1]) * (100 * PAGE)
        for turn in range(30):
            mine = pages[k * 500:(k + 1) * 500:2]
            sgt = mmc.sg_alloc_table_from_pages(mine, 0, 250 * PAGE)
            assert mmc.sg_copy_from_buffer(sgt, data) == len(data)
            out = bytearray(len(data))
            assert mmc.sg_copy_to_buffer(sgt, out) == len(data) and out == data
            assert mmc.dma_map_sgtable(domain_device[k], sgt) == 16
            mmc.dma_unmap_sgtable(domain_device[k], sgt)
            grown = SGAppendTable(mem)
            for start in range(0, 250, 50):
                append(grown, mine.pfns[start:start + 50], 200 - start)
            assert rows(grown) == rows(sgt)
            mmc.sg_free_append_table(grown)
            mmc.sg_free_table(sgt)
    run_threads(work)
    mem.check()


def test_threads_on_one_table_are_refused_or_right():
    """Readers, writers and freers of one table at once: each call does its work or is refused."""
    mem = Memory("64M")
    pages = mmc.alloc_pages_bulk(mem, 3000)
    odd = PageList(mem, pages.pfns[::2])
    sgt = SGAppendTable(mem)
    done, refusals = [0] * 4, [0] * 4

    def work(k):
        out = bytearray(3000 * PAGE // 8)
        while done[k] < 40:
            try:
                if k == 0:
                    mmc.sg_alloc_append_table_from_pages(sgt, odd, 0, len(odd) * PAGE, None, 100000)
                elif k == 1:
                    mmc.sg_copy_to_buffer(sgt, out)
                elif k == 2:
                    assert len(mmc.sg_page_pfns(sgt)) % len(odd) == 0
                    for entry in mmc.for_each_sg(sgt):
                        entry.length
                else:
                    mmc.sg_free_append_table(sgt)
                done[k] += 1
            except (MMError, InvalidArgument):
                refusals[k] += 1
                time.sleep(0.0005)
    run_threads(work)
    mem.check()


def test_close_waits_for_nobody():
    mem = Memory("64M")
    folio = mmc.folio_alloc(mem, 9)
    sgt = entries(mem, [(folio.pfn, 0, 2 << 20)] * 200)
    started = threading.Event()

    def copy():
        started.set()
        mmc.sg_zero_buffer(sgt, 1 << 40)
    thread = threading.Thread(target=copy)
    thread.start()
    started.wait()
    try:
        mem.close()                                 # before the copy or after it
    except MMError as error:
        assert error.errno == 16                    # or refused while it runs
    thread.join()


def test_threads_that_map_and_unmap_one_table():
    """Each mapping is undone once, whoever wins; a table never changes while it is mapped."""
    mem = Memory("64M")
    device = mmc.Device(mem, iommu=True)
    sgt = SGAppendTable(mem)
    append(sgt, range(100, 1100, 2), 100000)
    done = [0] * 4

    def work(k):
        for turn in range(200):
            try:
                if k < 2:
                    mmc.dma_map_sgtable(device, sgt)
                elif k == 2:
                    mmc.dma_unmap_sgtable(device, sgt)
                else:
                    append(sgt, [2000 + 2 * turn], 100000)
                done[k] += 1
            except (MMError, InvalidArgument):
                time.sleep(0.0001)
    run_threads(work)
    if sgt.mapped:
        mmc.dma_unmap_sgtable(device, sgt)
    assert device.iova_ranges == [] and device.mappings == 0 and device.domain.stats["leaves"] == 0
    assert done[2] <= done[0] + done[1] and len(sgt) == 500 + done[3]
    sgt.check()


def test_tables_that_were_never_set_up_and_entries_without_a_device():
    mem = Memory("4M")
    blank = mmc.SGTable.__new__(mmc.SGTable)
    for use in (blank.check, lambda: mmc.sg_free_table(blank), lambda: mmc.sg_nents(blank), lambda: blank[0]):
        with pytest.raises(InvalidArgument, match="never set up"):
            use()
    sgt = build(mem, [20, 30])
    assert [entry.dma_flags for entry in mmc.for_each_sg(sgt)] == [0, 0] and sgt[0] != 5


def test_an_entry_without_a_page_stands_for_no_bytes_whatever_its_offset():
    mem = Memory("16M")
    page = mmc.alloc_pages_bulk(mem, 1)[0]
    for offset in (page.pfn * PAGE, 0xfffff000):
        sgt = entries(mem, [(page.pfn, 0, PAGE), (page.pfn, 0, 2 * PAGE)])
        sgt[1].page, sgt[1].offset = None, offset
        for use in (lambda: mmc.sg_copy_to_buffer(sgt, bytearray(3 * PAGE)), lambda: mmc.sg_zero_buffer(sgt, 3 * PAGE),
                    lambda: mmc.sg_copy_from_buffer(sgt, bytes(3 * PAGE)), lambda: mmc.sg_split(sgt, 2 * PAGE, [PAGE])):
            with refused(mem, InvalidArgument, "has a length and no page"):
                use()


def test_a_chain_may_be_longer_than_the_stack_is_deep():
    def work():
        last = table = build(mem, [20])
        for _ in range(4000):
            front = mmc.sg_init_table(mem, 2)
            mmc.sg_set_page(front[0], mem.page(30), PAGE, 0)
            mmc.sg_chain(front, 2, table)
            table = front
        assert mmc.sg_nents(table) == 4001
        with pytest.raises(InvalidArgument, match="ring"):
            mmc.sg_chain(last, 2, table)
        with pytest.raises(MMError, match="chained behind 1"):
            mmc.sg_free_table(last)
        mmc.sg_free_table(table)
        del table, front
        mmc.sg_free_table(last)

    mem = Memory("4M")
    before = threading.stack_size(128 << 10)
    try:
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    finally:
        threading.stack_size(before)
    mem.check()


@pytest.mark.parametrize("walk", [lambda sgt: mmc.sg_miter(sgt, SG_MITER_FROM_SG), mmc.sg_page_iter])
def test_an_iterator_does_not_go_on_from_what_became_a_link(walk):
    mem = Memory("4M")
    page = mmc.alloc_pages_bulk(mem, 1)[0].pfn
    first, second = entries(mem, [(page, 0, 100), (page, 0, 100)]), build(mem, [page])
    steps = walk(first)
    next(steps), next(steps)
    first[1].length, first[1].page = 0, None
    mmc.sg_chain(first, 2, second)
    with pytest.raises(InvalidArgument, match="became a chain link"):
        next(steps)


def test_set_up_twice_or_by_the_base_class_only():
    mem = Memory("16M")
    sgt = build(mem, mmc.alloc_pages_bulk(mem, 2).pfns)
    windows = mmc.sg_miter(sgt, SG_MITER_FROM_SG)
    next(windows)
    with pytest.raises(InvalidArgument, match="set up already"):
        windows.__init__(sgt, SG_MITER_FROM_SG)
    bare = SGAppendTable.__new__(SGAppendTable)
    mmc.SGTable.__init__(bare, mem)
    assert bare.max_segment == 0xffffffff
    mm = mmc.MM(mem)
    addr = mm.mmap(4 * PAGE)
    mmc.pin_user_pages(mm, addr, 4, mmc.FOLL_WRITE, output=bare)
    assert sum(length for _, _, length in rows(bare)) == 4 * PAGE
