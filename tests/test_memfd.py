"""memfd_pin_folios."""
import errno
import threading

import pytest

from gup_support import *
from support import refused


@pytest.fixture
def mem():
    with machine(movable=0, cma=0) as mem:
        yield mem
        assert pins_of(mem) == 0
        mem.check()


@pytest.mark.parametrize("kind", ("ext4", "secretmem", "pfnmap", "iomem"))
def test_other_kinds(mem, kind):
    file = File(mem, 4 * PAGE, kind)
    with refused(mem, InvalidArgument, "tmpfs and hugetlbfs", errno.EINVAL):
        memfd_pin_folios(file, 0, 4 * PAGE - 1, 4)


@pytest.mark.parametrize("args", ((-1, 0, 1), (PAGE, 0, 1), (0, PAGE - 1, 0), (0, 4 * PAGE, 8), (1 << 63, 1 << 63, 1),
                                  (0, None, 1), ("0", 1, 1)))
def test_bad_arguments(mem, args):
    file = File(mem, 4 * PAGE)
    with refused(mem, (InvalidArgument, TypeError)):
        memfd_pin_folios(file, *args)
    with refused(mem, TypeError):
        memfd_pin_folios(None, 0, 0, 1)


def test_one_pin_a_folio_and_missing_pages_are_made(mem):
    file = File(mem, 8 * PAGE)
    file.write(2 * PAGE, b"here")
    folios, offset = memfd_pin_folios(file, PAGE + 100, 4 * PAGE, 16)
    assert offset == 100 and len(folios) == 4
    assert folios == [file.page_at(i * PAGE).folio for i in range(1, 5)] and pins_of(mem) == 4
    assert [folio.refcount for folio in folios] == [1025] * 4
    assert bytes(folio_address(folios[1])[:4]) == b"here"
    some, offset = memfd_pin_folios(file, 0, 8 * PAGE - 1, 3)
    assert len(some) == 3 and offset == 0
    unpin_folios(folios)
    unpin_folios(some)


def test_hugetlb_folios_are_pinned_once_each(mem):
    file = File(mem, 2 * HUGE, "hugetlbfs")
    folios, offset = memfd_pin_folios(file, HUGE - PAGE, HUGE + PAGE, 8)
    assert len(folios) == 2 and offset == HUGE - PAGE
    assert [(folio.refcount, folio.pincount) for folio in folios] == [(513, 1)] * 2 and pins_of(mem) == 2
    folio_add_pins(folios[0], 5)
    unpin_user_folio(folios[0], 5)
    unpin_folios(folios)


def test_empty_pool_and_no_memory(mem):
    hog = [folio_alloc(mem, 9, hugetlb=True) for _ in range(3)]
    file = File(mem, 2 * HUGE, "hugetlbfs")
    with pytest.raises(MMError) as caught:
        memfd_pin_folios(file, 0, 2 * HUGE - 1, 8)
    assert caught.value.errno == errno.ENOMEM and pins_of(mem) == 0
    folios_put(hog)
    small = File(mem, 4 * PAGE)
    with mem.inject("frame", 3), pytest.raises(MMError) as caught:
        memfd_pin_folios(small, 0, 4 * PAGE - 1, 8)
    assert caught.value.errno == errno.ENOMEM and pins_of(mem) == 0


def test_folios_leave_movable_memory():
    with machine() as mem:
        file = File(mem, 8 * PAGE)
        file.write(0, bytes(range(256)) * 128)
        before = [file.page_at(i * PAGE) for i in range(8)]
        folios, _ = memfd_pin_folios(file, 0, 8 * PAGE - 1, 8)
        assert all(folio_is_longterm_pinnable(folio) for folio in folios)
        assert not {folio.pfn for folio in folios} & {page.pfn for page in before}
        assert file.read(0, 8 * PAGE) == bytes(range(256)) * 128
        unpin_folios(folios)
        del before
        with mem.inject("migrate"), pytest.raises(MMError) as caught:
            memfd_pin_folios(File(mem, PAGE), 0, 0, 1)
        assert caught.value.errno == errno.ENOMEM
        over(mem)


def test_truncated_while_pinned(mem):
    file = File(mem, 4 * PAGE)
    folios, _ = memfd_pin_folios(file, 0, 4 * PAGE - 1, 4)
    file.truncate(0)
    assert [folio.refcount for folio in folios] == [1024] * 4
    unpin_folios(folios)
    with refused(mem, InvalidArgument, "no range", errno.EINVAL):
        memfd_pin_folios(file, 0, 0, 1)


def test_race_memfd_create(mem):
    """Two pinners of an empty file: one page is made, both pin it, none is lost."""
    for turn in range(40):
        file = File(mem, HUGE, "hugetlbfs")
        free = mem.hugetlb_pools()
        got, start = [], threading.Barrier(2)

        def pin():
            start.wait()
            got.append(memfd_pin_folios(file, 0, HUGE - 1, 1))

        threads = [threading.Thread(target=pin) for _ in range(2)]
        [thread.start() for thread in threads]
        [thread.join() for thread in threads]
        (first, _), (second, _) = got
        assert first == second and first[0].pincount == 2 and first[0].refcount == 512 + 2
        assert mem.hugetlb_pools() != free
        unpin_folios(first + second)
        del file, got
        assert mem.hugetlb_pools() == free


def test_acct_memfd_free_hugepages():
    """
        pool of 1   file ── pin: made, and pinned ── unpin: only the cache has it ── file gone: back in the pool
    """
    with machine(hugetlb={"2M": 1}) as mem:
        file = File(mem, HUGE, "hugetlbfs")
        folios, offset = memfd_pin_folios(file, 0, HUGE - 1, 1)
        assert offset == 0 and len(folios) == 1 and folios[0].pincount == 1
        pinned = folios[0].refcount
        assert mem.hugetlb_pools()[HUGE] == (1, 0)
        unpin_folios(folios)
        assert folios[0].refcount == pinned - 1 and folios[0].pincount == 0
        del file
        assert mem.hugetlb_pools()[HUGE] == (1, 1)
        mem.check()


def test_a_ledger_names_the_folios_of_a_file(mem):
    file = File(mem, 3 * PAGE)
    with PinLedger(mem) as ledger:
        with ledger.tag("importer"):
            folios, offset = memfd_pin_folios(file, PAGE + 7, 3 * PAGE - 1, 8)
        assert offset == 7
        assert {(row.holder, row.folio, row.count) for row in ledger.outstanding()} == {("importer", folio, 1) for folio in folios}
        unpin_folios(folios)
        ledger.assert_balanced()
