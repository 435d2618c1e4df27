"""io_uring fixed buffers: limits and their errno, coalescing, one pin a folio, accounting, release, imports, clones."""
import errno

import pytest
from hypothesis import given, settings, strategies as st

from mmcore import *
from mmcore.drivers.iobuffer import user_locked_vm
from mmcore.drivers.iov import MAX_RW_COUNT
from rdma_support import HUGE, PAGE, machine, mapped, nothing_kept, pages_of, pins, scattered
from support import state

TOP = 1 << 64


def thp(**kwargs):
    mem, mm, _ = machine(thp="always", **kwargs)
    return mem, mm


def base(**kwargs):
    mem, mm, _ = machine(**kwargs)
    return mem, mm


# ---- limits -------------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("buffer, number", [
    ((0, 1), errno.EFAULT), ((0x10000, 0), errno.EFAULT), ((0x10000, (1 << 30) + 1), errno.EFAULT),
    ((TOP - PAGE, 2 * PAGE), errno.EOVERFLOW), ((TOP - PAGE + 0x800, 0x400), errno.EOVERFLOW), ((0x10000, PAGE), errno.EFAULT)])
def test_a_buffer_that_cannot_be(buffer, number):
    mem, mm = base()
    addr = mapped(mm, 4 * PAGE)
    table = BufferTable(mm)
    # Pinning marks pages as accessed and dirty, and that stays.
    with nothing_kept(mem, mm, ignore=("flags",)), pytest.raises(MMError) as caught:
        table.register([(addr, PAGE), buffer])
    assert caught.value.errno == number and table.buffers == [] and table.charged == 0
    table.register([(addr, PAGE), (0, 0)])
    assert table.buffers[1] is None and table.buffers[0].bvecs[0][1:] == (0, PAGE)
    table.unregister()


def test_counts_and_states():
    mem, mm = base()
    addr = mapped(mm, PAGE)
    table = BufferTable(mm)
    for wrong in ([], [(0, 0)] * 16385):
        with pytest.raises(InvalidArgument):
            table.register(wrong)
    for wrong in (0, 16385, -1):
        with pytest.raises(InvalidArgument):
            BufferTable(mm, wrong)
    for wrong in ("4", True, 1.0):
        with pytest.raises(TypeError):
            BufferTable(mm, wrong)
    for use in (table.unregister, lambda: table.update(0, [(addr, PAGE)])):
        with pytest.raises(MMError) as caught:
            use()
        assert caught.value.errno == errno.ENXIO
    table.register([(0, 0)] * 16384)
    with pytest.raises(MMError) as caught:
        table.register([(addr, PAGE)])
    assert caught.value.errno == errno.EBUSY
    for index, nr in ((16384, 1), (16383, 2), (-1, 1), (0, 0)):
        with pytest.raises(InvalidArgument):
            table.update(index, [(addr, PAGE)] * nr)
    table.unregister()
    for wrong in (None, mem):
        with pytest.raises(TypeError):
            BufferTable(wrong)
    with pytest.raises(TypeError):
        RegisteredBuffer()
    with pytest.raises(InvalidArgument):
        BufferTable(mm, files="6.5")


# ---- coalescing -----------------------------------------------------------------------------------------------------------
#   A, B: 512 pages; C: 512; D: 256; small pages
MEM = Memory("64M")
A, B, C = (folio_alloc_at(MEM, 512 * i, 9).pfn for i in (2, 4, 7))
D = folio_alloc_at(MEM, 512 * 9, 8).pfn
MM_OF_MEM = MM(MEM)
SMALL = [folio_alloc_at(MEM, 512 * 11 + i, 0).pfn for i in range(4)]


def part(head, first, last):
    return list(range(head + first, head + last + 1))


@pytest.mark.parametrize("pfns, want", [
    (part(A, 3, 9), (1, 7, 512, 3)),
    (part(A, 500, 511) + part(B, 0, 511) + part(C, 0, 6), (3, 12, 512, 500)),
    (part(A, 500, 509) + part(B, 0, 9), None),                                  # T74: a gap at A's end
    (part(A, 500, 511) + part(B, 1, 9), None),
    (part(A, 0, 511) + part(B, 0, 99) + part(C, 0, 9), None),                   # the middle is not full
    (part(A, 0, 511) + part(D, 0, 255), None),                                  # sizes differ
    (SMALL[:3], (3, 1, 1, 0)),
    (part(A, 0, 511) + part(A, 0, 511), (2, 512, 512, 0)),                      # the same folio twice
    (part(A, 0, 5) + part(A, 7, 9), None),
    (list(reversed(part(A, 0, 5))), None),
    (part(A, 3, 3), (1, 1, 512, 3)),
    (part(A, 0, 511) + SMALL[:1], None),
    (SMALL[:1] + part(A, 0, 511), None),
])
def test_T74_what_coalesces(pfns, want):
    got = io_check_coalesce_buffer(PageList(MEM, pfns))
    assert (got and (got.nr_folios, got.nr_pages_head, got.nr_pages_mid, got.first_folio_page_idx)) == want
    if got:
        assert 1 << got.folio_shift == got.nr_pages_mid * PAGE
    # A buffer of these pages does what the check says, and gives all back.
    table = BufferTable(MM_OF_MEM)
    before = state(MEM)
    table.register([PageList(MEM, pfns)])
    buf, = table.buffers
    kept = want[0] if want and want[2] > 1 and len(pfns) > 1 else len(pfns)
    assert buf.coalesced is (want is not None and want[2] > 1 and len(pfns) > 1)
    assert buf.nr_bvecs == kept == len(buf.bvecs) and sum(n for *_, n in buf.bvecs) == len(pfns) * PAGE
    assert [pfn + (offset + at) // PAGE for pfn, offset, n in buf.bvecs for at in range(0, n, PAGE)] == pfns
    table.unregister()
    assert state(MEM) == before
    MEM.check()


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(st.sampled_from([A, B, C, D, SMALL[0], SMALL[1]]), st.integers(0, 511), st.integers(0, 511)), min_size=1,
                max_size=4), st.integers(0, PAGE - 1), st.integers(0, PAGE - 1))
def test_balance_for_any_pages(pieces, offset, short):
    pfns = []
    for head, first, last in pieces:
        size = MEM.folio(head).nr_pages
        first, last = sorted((first % size, last % size))
        pfns += part(head, first, last)
    length = max(1, len(pfns) * PAGE - offset - short)
    if (offset + length + PAGE - 1) // PAGE != len(pfns):
        return
    before = state(MEM)
    table = BufferTable(MM_OF_MEM)
    table.register([(PageList(MEM, pfns), offset, length)])
    buf, = table.buffers
    assert pins(MEM) - before[1]["pins"] == buf.nr_bvecs
    if buf.coalesced:
        assert all(MEM.folio(pfn).pincount == [b[0] for b in buf.bvecs].count(pfn) for pfn, *_ in buf.bvecs)
    # Its bvecs name exactly the bytes.
    assert sum(n for *_, n in buf.bvecs) == length and buf.bvecs[0][1] % PAGE == offset
    assert [pfn + at // PAGE for pfn, off, n in buf.bvecs for at in range(off // PAGE * PAGE, off + n, PAGE)] == pfns
    table.unregister()
    assert state(MEM) == before


def test_T72_tail_pages_are_released_by_folio():
    mem, mm = thp()
    addr = mapped(mm, HUGE)
    head = mm.page_at(addr)
    table = BufferTable(mm)
    table.register([(addr + 5 * PAGE, 2 * PAGE)])
    assert table.buffers[0].bvecs == [(head.pfn, 5 * PAGE, 2 * PAGE)] and mem.folio(head.pfn).pincount == 1
    table.unregister()
    assert mem.folio(head.pfn).pincount == 0


def test_T73_the_offset_is_the_pages_place_in_its_folio():
    #   a THP moved by mremap to an address that is no multiple of 2 MiB
    mem, mm = thp()
    addr = mapped(mm, HUGE)
    pfn = mm.page_at(addr).pfn
    room = mm.mmap(4 * HUGE, prot=PROT_NONE)
    moved = mm.mremap(addr, HUGE, HUGE, room + 3 * PAGE)
    assert moved % HUGE == 3 * PAGE and mm.page_at(moved).pfn == pfn
    table = BufferTable(mm)
    table.register([(moved + 256 * PAGE + 12, HUGE // 2 - 12)])
    buf, = table.buffers
    if buf.coalesced:
        assert buf.bvecs == [(pfn, 256 * PAGE + 12, HUGE // 2 - 12)]
    else:
        assert buf.bvecs[0] == (pfn + 256, 12, PAGE - 12)
    table.unregister()
    assert pins(mem) == 0


# ---- accounting ---------------------------------------------------------------------------------------------------------------
def test_T75_a_folio_counts_once_and_until_its_last_user_leaves():
    mem, mm = thp(rlimit_memlock=512 * PAGE)
    addr = mapped(mm, HUGE)
    table = BufferTable(mm, 3)
    charges = []
    for index, buffer in ((0, (addr, HUGE // 2)), (1, (addr + HUGE // 2, HUGE // 2)), (0, (0, 0)), (1, (0, 0))):
        table.update(index, [buffer])
        charges.append((table.charged, mm.pinned_vm, user_locked_vm(mem)))
    assert charges == [(512,) * 3, (512,) * 3, (512,) * 3, (0,) * 3]
    assert pins(mem) == 0


def test_base_pages_count_each_time():
    mem, mm = base(rlimit_memlock=20 * PAGE)
    addr = mapped(mm, 8 * PAGE)
    table = BufferTable(mm)
    table.register([(addr, 8 * PAGE), (addr, 8 * PAGE), (addr + 1, PAGE)])
    assert table.charged == mm.pinned_vm == user_locked_vm(mem) == 18
    table.update(1, [(0, 0)])
    assert table.charged == 10
    table.unregister()
    assert user_locked_vm(mem) == mm.pinned_vm == 0


def test_a_limit_is_the_users():
    mem = Memory("16M")
    mms = [MM(mem, rlimit_memlock=10 * PAGE, user=user) for user in ("a", "a", "b")]
    tables = [BufferTable(mm) for mm in mms]
    buffers = [[(mapped(mm, 6 * PAGE), 6 * PAGE)] for mm in mms]
    tables[0].register(buffers[0])
    with nothing_kept(mem, mms[1], ignore=("flags",)), pytest.raises(MMError, match="RLIMIT_MEMLOCK") as caught:
        tables[1].register(buffers[1])
    assert caught.value.errno == errno.ENOMEM
    tables[2].register(buffers[2])          # another user
    tables[0].unregister()
    tables[1].register(buffers[1])
    assert user_locked_vm(mem, "a") == 6 == mms[1].pinned_vm and mms[0].pinned_vm == 0
    rich = MM(mem, rlimit_memlock=PAGE, cap_ipc_lock=True, user="c")
    table = BufferTable(rich)
    table.register([(mapped(rich, 6 * PAGE), 6 * PAGE)])
    assert rich.pinned_vm == 6 and user_locked_vm(mem, "c") == 0
    for table in (*tables[1:], table):
        table.unregister()
    assert pins(mem) == 0


# ---- failures -----------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("site", ["alloc", "list", "frame", "table"])
@pytest.mark.parametrize("huge", [False, True])
def test_a_failure_at_any_step_leaves_nothing(site, huge):
    hit = 0
    for nth in range(1, 60):
        mem, mm = thp() if huge else base()
        addr = mm.mmap(4 * HUGE) if huge else scattered(mm, 300)
        size = 4 * HUGE if huge else 300 * PAGE
        table = BufferTable(mm)
        with mem.inject(site, nth):
            try:
                table.register([(addr + 7, PAGE), (addr + PAGE, size - PAGE)])
                passed = True
            except MMError as error:
                assert error.errno in (errno.ENOMEM, errno.EFAULT)
                passed = False
                hit += 1
        if passed:
            table.unregister()
        assert pins(mem) == mm.pinned_vm == table.charged == 0
        mem.check()
        if passed:
            break
    assert passed and (hit or site in ("frame", "table"))


@pytest.mark.parametrize("update", [False, True])
def test_giving_up_takes_no_memory(update):
    """What was pinned for a call that fails goes back also when nothing more can be allocated."""
    for nth in range(1, 30):
        mem, mm = base()
        addr, table = mapped(mm, 4 * PAGE), BufferTable(mm)
        if update:
            table.register([(addr, PAGE), (addr + PAGE, PAGE)])
        before, kept = pins(mem), table.buffers
        with mem.inject("alloc", nth) as site, pytest.raises(MMError):
            if update:
                table.update(0, [(addr + 2 * PAGE, 2 * PAGE)])
                raise MMError(0, "it was updated")
            table.register([(addr, 4 * PAGE), (addr, PAGE), (0x10000, PAGE)])
        if update and not site.fired:
            break
        assert (pins(mem), table.buffers, table.charged, mm.pinned_vm) == (before, kept, len(kept), len(kept))
        mem.check()
        if not site.fired:
            break
    assert nth > 2 and not site.fired


def test_unregistering_without_memory():
    mem, mm = base()
    table = BufferTable(mm)
    table.register([(mapped(mm, PAGE), PAGE)])
    with nothing_kept(mem, mm), mem.inject("alloc"), pytest.raises(MMError, match="Nothing was changed") as caught:
        table.unregister()
    assert caught.value.errno == errno.ENOMEM and table.charged == 1
    table.unregister()


def test_release_of_pins_that_somebody_dropped():
    mem, mm = base()
    addr = mapped(mm, 30 * PAGE)
    table = BufferTable(mm)
    table.register([(addr, 10 * PAGE), (addr + 10 * PAGE, 20 * PAGE)])
    page = mm.page_at(addr + 15 * PAGE)
    unpin_user_page(page)
    before = state(mem)
    with pytest.raises(BadPage) as caught:
        table.unregister()
    assert caught.value.pfn == page.pfn and state(mem) == before and table.charged == 30 and len(table.buffers) == 2
    grab_pages(PageList(mem, [page.pfn]))
    table.unregister()
    assert pins(mem) == 0


def test_a_failed_replacement_keeps_the_old_one():
    mem, mm = thp()
    addr = mapped(mm, 2 * HUGE)
    table = BufferTable(mm)
    table.register([(addr, HUGE), (addr, HUGE)])
    folio = mem.folio(mm.page_at(addr).pfn)
    unpin_user_folio(folio, 2)
    kept = table.buffers
    with pytest.raises(BadPage):
        table.update(0, [(addr + HUGE, HUGE)])
    assert table.buffers == kept and table.charged == 512 and mem.folio(mm.page_at(addr + HUGE).pfn).pincount == 0
    try_grab_folio(folio, 2)
    assert table.update(0, [(addr + HUGE, HUGE)]) == 1 and table.charged == 1024
    table.unregister()
    assert pins(mem) == 0 and mm.pinned_vm == 0


# ---- use ------------------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("huge", [False, True])
def test_import_ranges(huge):
    mem, mm = thp() if huge else base()
    addr = mapped(mm, 2 * HUGE) if huge else scattered(mm, 1024)
    start, size = addr + 3 * PAGE + 100, HUGE + 5000
    table = BufferTable(mm)
    table.register([(start, size)])
    want = pages_of(mm, start, size)
    for at, length in ((0, size), (0, 1), (size - 1, 1), (5000, 3 * PAGE), (HUGE - 4 * PAGE - 100, 2 * PAGE), (size, 0)):
        pieces = table.import_range(0, start + at, length)
        touched = [(pfn * PAGE + off + k) // PAGE for pfn, off, n in pieces for k in (*range(0, n, PAGE), n - 1)]
        first = (100 + at) // PAGE
        assert sorted(set(touched), key=touched.index) == want[first:first + len(set(touched))]
        assert sum(n for *_, n in pieces) == length
        if pieces:
            assert (pieces[0][0] * PAGE + pieces[0][1]) % PAGE == (start + at) % PAGE
    for at, length in ((start - 1, 2), (start, size + 1), (start + size, 1), (TOP - 1, 2), (start, MAX_RW_COUNT + 1)):
        with pytest.raises(MMError) as caught:
            table.import_range(0, at, length)
        assert caught.value.errno == errno.EFAULT
    with pytest.raises(MMError):
        table.import_range(1, start, 1)
    table.unregister()


def test_clones_share_buffers_and_pins():
    mem, mm = thp()
    addr = mapped(mm, 2 * HUGE)
    source, other = BufferTable(mm), BufferTable(mm)
    source.register([(addr, HUGE), (addr + HUGE, HUGE)])
    before = state(mem)
    other.clone(source, src_off=1, dst_off=2, nr=1)
    assert other.buffers == [None, None, source.buffers[1]] and source.buffers[1].refcount == 2 and state(mem) == before
    for call, number in ((lambda: other.clone(source), errno.EBUSY), (lambda: source.clone(source), errno.EBUSY),
                         (lambda: BufferTable(mm).clone(BufferTable(mm)), errno.ENXIO),
                         (lambda: BufferTable(mm).clone(source, src_off=1, nr=2), errno.EINVAL)):
        with pytest.raises(MMError) as caught:
            call()
        assert caught.value.errno == number
    source.unregister()
    assert pins(mem) == 1 and mm.pinned_vm == 512       # the shared one is charged where it was registered
    other.unregister()
    assert pins(mem) == 0 == mm.pinned_vm


def test_tables_that_share_buffers_end_at_once():
    import threading
    mem, mm = thp()
    addr = mapped(mm, 2 * HUGE)
    for _ in range(30):
        tables = [BufferTable(mm) for _ in range(4)]
        tables[0].register([(addr + i * PAGE, HUGE) for i in range(8)])
        for table in tables[1:]:
            table.clone(tables[0])
        start = threading.Barrier(4)

        def end(table):
            start.wait()
            table.unregister()
            table.register([(addr, 2 * HUGE)])
            table.unregister()
        threads = [threading.Thread(target=end, args=(table,)) for table in tables]
        [t.start() for t in threads]
        [t.join() for t in threads]
        assert pins(mem) == mm.pinned_vm == 0 and all(table.charged == 0 for table in tables)
    mem.check()


def test_the_ledger_names_what_stays_registered():
    mem, mm = thp()
    addr = mapped(mm, 2 * HUGE)
    with PinLedger(mem) as ledger:
        table = BufferTable(mm)
        table.register([(addr + PAGE, 2 * HUGE - PAGE)])
        assert ledger.by_holder() == {f"io_uring buffer {addr + PAGE:#x}+{2 * HUGE - PAGE:#x}": 2}
        table.unregister()
        ledger.assert_balanced()


def test_the_exit_of_a_with_statement_unregisters():
    mem, mm = base()
    addr = mapped(mm, PAGE)
    with BufferTable(mm) as table:
        table.register([(addr, PAGE)])
        mm.exit()       # the pins outlive the address space
        assert pins(mem) == 1
    assert pins(mem) == 0
    mem.check()


# ---- the face ----------------------------------------------------------------------------------------------------------------
def test_what_tables_and_buffers_say():
    mem, mm = thp()
    addr = mapped(mm, HUGE)
    table = BufferTable(mm)
    assert repr(table) == "<BufferTable, nothing registered>"
    table.register([(addr, HUGE), (0, 0)])
    assert repr(table) == "<BufferTable of 2 slots, 1 used>"
    buf = table.buffers[0]
    assert repr(buf) == f"<RegisteredBuffer {addr:#x}+{HUGE:#x}, 1 bvecs of up to 2M>"
    assert (buf.mem, buf.offset, buf.folio_shift, buf.acct_pages) == (mem, 0, 21, 512)
    table.unregister()
    assert pins(mem) == 0


def test_what_cannot_be_cloned_or_updated():
    mem, mm = base()
    other, stranger = base()
    addr, there = mapped(mm, PAGE), mapped(stranger, PAGE)
    table, foreign, empty = BufferTable(mm), BufferTable(stranger), BufferTable(mm)
    table.register([(addr, PAGE)])
    foreign.register([(there, PAGE)])
    before = state(mem), state(other)
    for wrong, error, match in (((mm,), TypeError, "BufferTable is wanted"), ((foreign,), InvalidArgument, "two Memories"),
                                ((table, 1 << 32), InvalidArgument, "src_off 4294967296 does not fit in 32 bits")):
        with pytest.raises(error, match=match):
            empty.clone(*wrong)
    for index in (True, 0.0, "0", None):
        with pytest.raises(TypeError, match="index is an int"):
            table.update(index, [(addr, PAGE)])
    assert (state(mem), state(other)) == before and empty.buffers == []
    table.unregister()
    foreign.unregister()


@pytest.mark.parametrize("wrong, error", [([5], TypeError), (None, TypeError), ("empty", InvalidArgument), ("null", InvalidArgument)])
def test_what_cannot_be_coalesced(wrong, error):
    mem, mm = base()
    wrong = {"empty": PageList(mem), "null": PageList(mem, [0, 5])}.get(wrong, wrong) if isinstance(wrong, str) else wrong
    with pytest.raises(error):
        io_check_coalesce_buffer(wrong)


def test_pages_that_do_not_fit_a_buffer():
    mem, mm = base()
    other, stranger = base()
    pages = PageList(mem, pages_of(mm, mapped(mm, 2 * PAGE), 2 * PAGE))
    foreign = PageList(other, pages_of(stranger, mapped(stranger, PAGE), PAGE))
    table = BufferTable(mm)
    for what, match in ((foreign, "another Memory"), ((pages, 0, 3 * PAGE), "are not the 2 pages"), ((pages, PAGE, PAGE), "are not the"),
                        (PageList(mem, [pages.pfns[0], 0]), "NULL")):
        before = state(mem)
        with pytest.raises(InvalidArgument, match=match):
            table.register([what])
        assert state(mem) == before and table.buffers == []


@pytest.mark.parametrize("wrong", [(), (1,), (1, 2, 3), (None, 0, PAGE), None, 5, "ab", [[]], {}, (1.5, PAGE), (None, PAGE), ("0", PAGE),
                                   (0x10000, True), (-1, PAGE), (1 << 64, PAGE), "empty list", "negative offset"])
@pytest.mark.parametrize("files", ["longterm", "5.8"])
def test_what_is_no_buffer_changes_no_slot(wrong, files):
    """Every buffer of a call is looked at before the first is replaced."""
    mem, mm = base()
    addr = mapped(mm, 2 * PAGE)
    wrong = {"empty list": (PageList(mem), 0, PAGE), "negative offset": (PageList(mem, [mem.zero_page.pfn]), -1, PAGE)}.get(
        wrong, wrong) if isinstance(wrong, str) else wrong
    table = BufferTable(mm, 2, files=files)
    assert table.update(0, [(addr, PAGE)]) == 1
    first = table.buffers[0]
    with nothing_kept(mem, mm):
        with pytest.raises((TypeError, InvalidArgument)):
            table.update(0, [(addr + PAGE, PAGE), wrong])
        with pytest.raises((TypeError, InvalidArgument)):
            BufferTable(mm, files=files).register([(addr + PAGE, PAGE), wrong])
    assert table.buffers == [first, None]
    table.unregister()
