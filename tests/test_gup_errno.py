"""Arguments and errors of the get and pin families: the rules of each wrapper, and every errno with its state unchanged."""
import errno

import pytest

from gup_support import *
from support import refused, unchanged

NOBODY = 0x1000


@pytest.fixture
def mem():
    with machine() as mem:
        yield mem


@pytest.fixture
def mm(mem):
    with MM(mem) as mm:
        yield mm


# ---- arguments: refused before anything is looked at -----------------------------------------------------------------------
@pytest.mark.parametrize("call", ALL + (get_user_pages_fast_only,))
@pytest.mark.parametrize("flag", (FOLL_TOUCH, FOLL_TRIED, FOLL_REMOTE, FOLL_PIN, FOLL_FAST_ONLY, FOLL_UNLOCKABLE,
                                  FOLL_MADV_POPULATE, 1 << 13, 1 << 31))
def test_internal_and_unknown_flags_are_refused(mem, mm, call, flag):
    addr = mm.mmap(PAGE)
    with refused(mem, InvalidArgument, "internal|no FOLL_", errno.EINVAL):
        call(mm, addr, 1, flag)


@pytest.mark.parametrize("call", GETS + (get_user_pages_fast_only,))
def test_longterm_is_for_pins(mem, mm, call):
    with refused(mem, InvalidArgument, "FOLL_LONGTERM is for pins", errno.EINVAL):
        call(mm, mm.mmap(PAGE), 1, FOLL_LONGTERM)


@pytest.mark.parametrize("call", PINS)
def test_get_and_pin_exclude_each_other(mem, mm, call):
    # pin_user_pages, _remote and _unlocked return 0 here in the kernel: it reads as "no pages, no error".
    with refused(mem, InvalidArgument, "exclude each other", errno.EINVAL):
        call(mm, mm.mmap(PAGE), 1, FOLL_GET)


@pytest.mark.parametrize("call", PINS)
def test_longterm_p2pdma_is_refused(mem, mm, call):
    with refused(mem, InvalidArgument, "P2PDMA", errno.EINVAL):
        call(mm, mm.mmap(PAGE), 1, FOLL_LONGTERM | FOLL_PCI_P2PDMA)


@pytest.mark.parametrize("call", GETS)
def test_get_may_be_said_to_get(mem, mm, call):
    addr = mm.mmap(PAGE)
    pages = call(mm, addr, 1, FOLL_GET | FOLL_WRITE)
    assert pages[0].refcount == 2
    release_pages(pages)


@pytest.mark.parametrize("call", FAST)
@pytest.mark.parametrize("flag", (FOLL_HWPOISON, FOLL_NOWAIT, FOLL_ANON, FOLL_INTERRUPTIBLE, FOLL_DUMP, FOLL_SPLIT_PMD))
def test_fast_calls_do_not_know_every_flag(mem, mm, call, flag):
    with refused(mem, InvalidArgument, "fast walk does not know", errno.EINVAL):
        call(mm, mm.mmap(PAGE), 1, flag)


@pytest.mark.parametrize("call", ALL + (get_user_pages_fast_only,))
@pytest.mark.parametrize("args", ((None, 1), (NOBODY, None), (-1, 1), (NOBODY, -1), (1 << 64, 1), (NOBODY, 1 << 64),
                                  (NOBODY, 1, -1), (NOBODY, 1, None), (True, 1), ("0x1000", 1)))
def test_wrong_arguments(mem, mm, call, args):
    with refused(mem, (TypeError, ValueError)):
        call(mm, *args)


@pytest.mark.parametrize("call", ALL)
def test_wrong_options(mem, mm, call):
    addr = mm.mmap(PAGE)
    mm.touch(addr, PAGE)
    with refused(mem, InvalidArgument, "acquire"):
        call(mm, addr, 1, acquire="batch")
    for output in (None, list, GupOutput, "PageList", 7):
        with refused(mem, (TypeError, ValueError)):
            call(mm, addr, 1, output=output)
    with refused(mem, TypeError):
        call(None, addr, 1)


@pytest.mark.parametrize("call", ALL + (get_user_pages_fast_only,))
@pytest.mark.parametrize("acquire", GENERATIONS)
def test_zero_pages_are_an_empty_list_everywhere(mem, mm, call, acquire):
    with unchanged(mem):
        for addr in (0, NOBODY, mm.mmap(PAGE), (1 << 64) - 1):
            assert len(call(mm, addr, 0, acquire=acquire)) == 0
            assert call(mm, addr, 0, acquire=acquire, output=PageRanges).nr_pages == 0


@pytest.mark.parametrize("call", ALL)
def test_exited_address_space(mem, call):
    mm = MM(mem)
    mm.exit()
    with refused(mem, MMError, errno=errno.ESRCH):
        call(mm, NOBODY, 1)


# ---- errno by errno ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("acquire", GENERATIONS)
@pytest.mark.parametrize("call", ALL)
def test_efault_nothing_mapped(mem, mm, call, acquire):
    with refused(mem, MMError, "nothing is mapped", errno.EFAULT) as caught:
        call(mm, NOBODY, 1, acquire=acquire)
    assert caught.value.addr == NOBODY


@pytest.mark.parametrize("acquire", GENERATIONS)
@pytest.mark.parametrize("call", ALL)
def test_partial_success_hides_the_error(mem, mm, call, acquire):
    addr = mm.mmap(3 * PAGE)
    mm.touch(addr, PAGE)
    pages = call(mm, addr, 8, FOLL_WRITE, acquire=acquire)
    assert len(pages) == 3
    assert [page.pfn for page in pages] == [mm.page_at(addr + i * PAGE).pfn for i in range(3)]
    give_back(call, pages)
    assert [page.refcount for page in pages] == [1, 1, 1]


@pytest.mark.parametrize("call", (get_user_pages_fast, pin_user_pages_fast, get_user_pages_fast_only))
def test_fast_range_ends(mem, mm, call):
    top = (1 << 47) - PAGE
    with refused(mem, MMError, "runs over the end", errno.EOVERFLOW):
        call(mm, (1 << 64) - PAGE, 2)
    with refused(mem, MMError, "runs over the end", errno.EOVERFLOW):
        call(mm, 0, 1 << 60)
    with refused(mem, MMError, "largest user address", errno.EFAULT):
        call(mm, top, 1)


@pytest.mark.parametrize("call", (get_user_pages, pin_user_pages))
def test_slow_range_that_wraps_ends_at_the_mapping(mem, mm, call):
    addr = mm.mmap(2 * PAGE)
    pages = call(mm, addr, 1 << 62, FOLL_WRITE)
    assert len(pages) == 2
    give_back(call, pages)
    with refused(mem, MMError, errno=errno.EFAULT):
        call(mm, (1 << 64) - PAGE, 2)


def test_fast_only_returns_what_is_there_and_never_faults(mem, mm):
    addr = mm.mmap(4 * PAGE)
    mm.touch(addr, 2 * PAGE)
    faults = mm.total_faults
    assert len(get_user_pages_fast_only(mm, addr + 2 * PAGE, 1)) == 0
    assert len(get_user_pages_fast_only(mm, NOBODY, 1)) == 0
    pages = get_user_pages_fast_only(mm, addr, 4)
    assert len(pages) == 2 and mm.total_faults == faults
    release_pages(pages)


@pytest.mark.parametrize("call", ALL)
@pytest.mark.parametrize("kind", ("pfnmap", "iomem"))
def test_efault_driver_memory(mem, mm, call, kind):
    addr = mm.mmap(4 * PAGE, flags=MAP_SHARED, file=File(mem, 4 * PAGE, kind))
    mm.touch(addr, 4 * PAGE, write=False)
    with refused(mem, MMError, "VM_IO or VM_PFNMAP", errno.EFAULT):
        call(mm, addr, 1)


@pytest.mark.parametrize("call", SLOW)
def test_efault_anon_wanted(mem, mm, call):
    file = mm.mmap(PAGE, flags=MAP_SHARED, file=File(mem, PAGE))
    with refused(mem, MMError, "FOLL_ANON", errno.EFAULT):
        call(mm, file, 1, FOLL_ANON)
    hugetlb = mm.mmap(HUGE, flags=MAP_PRIVATE | MAP_ANONYMOUS | MAP_HUGETLB)
    with refused(mem, MMError, "FOLL_ANON", errno.EFAULT):
        call(mm, hugetlb, 1, FOLL_ANON)
    anon = mm.mmap(PAGE)
    pages = call(mm, anon, 1, FOLL_ANON)
    assert len(pages) == 1
    give_back(call, pages)


@pytest.mark.parametrize("call", PINS)
def test_eopnotsupp_fsdax_longterm(mem, mm, call):
    fsdax = File(mem, HUGE, "fsdax", device=3)
    addr = mm.mmap(HUGE, flags=MAP_SHARED, file=fsdax)
    mm.touch(addr, HUGE)
    with refused(mem, MMError, "filesystem-DAX", errno.EOPNOTSUPP):
        call(mm, addr, 4, FOLL_LONGTERM)
    pages = call(mm, addr, 4)
    assert len(pages) == 4
    give_back(call, pages)


@pytest.mark.parametrize("call", SLOW)
def test_eopnotsupp_split_of_hugetlb(mem, mm, call):
    addr = mm.mmap(HUGE, flags=MAP_PRIVATE | MAP_ANONYMOUS | MAP_HUGETLB)
    mm.touch(addr, HUGE)
    with refused(mem, MMError, "hugetlb", errno.EOPNOTSUPP):
        call(mm, addr, 1, FOLL_SPLIT_PMD)


@pytest.mark.parametrize("acquire", GENERATIONS)
@pytest.mark.parametrize("call", ALL)
@pytest.mark.parametrize("flags", (0, FOLL_WRITE))
def test_efault_secretmem(mem, mm, call, flags, acquire):
    addr = mm.mmap(4 * PAGE, flags=MAP_SHARED, file=File(mem, 4 * PAGE, "secretmem"))
    mm.touch(addr, 4 * PAGE)
    with refused(mem, MMError, "secretmem", errno.EFAULT):
        call(mm, addr, 1, flags, acquire=acquire)


@pytest.mark.parametrize("call", PINS)
def test_efault_longterm_write_to_a_file_with_writeback(mem, mm, call):
    file = File(mem, 4 * PAGE, "ext4")
    shared = mm.mmap(4 * PAGE, flags=MAP_SHARED, file=file)
    mm.touch(shared, 4 * PAGE)
    with refused(mem, MMError, "writeback", errno.EFAULT):
        call(mm, shared, 1, FOLL_WRITE | FOLL_LONGTERM)
    for flags in (FOLL_WRITE, FOLL_LONGTERM, 0):
        pages = call(mm, shared, 1, flags)
        give_back(call, pages)
    private = mm.mmap(4 * PAGE, flags=MAP_PRIVATE, file=file)
    pages = call(mm, private, 1, FOLL_WRITE | FOLL_LONGTERM)
    assert len(pages) == 1
    give_back(call, pages)


@pytest.mark.parametrize("kind", ("tmpfs", "hugetlbfs"))
@pytest.mark.parametrize("call", PINS)
def test_longterm_write_to_memory_files_is_fine(mem, mm, call, kind):
    addr = mm.mmap(HUGE, flags=MAP_SHARED, file=File(mem, HUGE, kind))
    pages = call(mm, addr, 4, FOLL_WRITE | FOLL_LONGTERM)
    assert len(pages) == 4
    give_back(call, pages)


@pytest.mark.parametrize("acquire", GENERATIONS)
@pytest.mark.parametrize("call", ALL)
def test_efault_protection(mem, mm, call, acquire):
    addr = mm.mmap(4 * PAGE)
    mm.touch(addr, 4 * PAGE)
    mm.mprotect(addr, PAGE, PROT_READ)
    mm.mprotect(addr + PAGE, PAGE, PROT_NONE)
    with refused(mem, MMError, "not writable", errno.EFAULT):
        call(mm, addr, 1, FOLL_WRITE, acquire=acquire)
    with refused(mem, MMError, "not readable", errno.EFAULT):
        call(mm, addr + PAGE, 1, 0, acquire=acquire)
    shared = mm.mmap(PAGE, PROT_READ, MAP_SHARED, File(mem, PAGE))
    with refused(mem, MMError, "private mapping", errno.EFAULT):
        call(mm, shared, 1, FOLL_WRITE | FOLL_FORCE, acquire=acquire)


@pytest.mark.parametrize("call", ALL)
def test_enomem_of_the_fault(mem, mm, call):
    addr = mm.mmap(4 * PAGE)
    mm.touch(addr, PAGE)
    with mem.inject("frame"), refused(mem, MMError, "no free memory", errno.ENOMEM):
        call(mm, addr + PAGE, 1, FOLL_WRITE)
    # The first page is there; the second cannot be had: one page, no error.
    with mem.inject("frame"):
        pages = call(mm, addr, 2, FOLL_WRITE)
    assert len(pages) == 1
    give_back(call, pages)


@pytest.mark.parametrize("call", SLOW)
def test_enomem_of_a_split(mem, mm, call):
    addr = mm.mmap(HUGE)
    mm.madvise(addr, HUGE, MADV_HUGEPAGE)
    mm.touch(addr, HUGE)
    with mem.inject("table"), refused(mem, MMError, errno=errno.ENOMEM):
        call(mm, addr, 1, FOLL_SPLIT_PMD)


@pytest.mark.parametrize("call", ALL)
def test_enomem_of_lists(mem, mm, call):
    addr = mm.mmap(4 * PAGE)
    mm.touch(addr, 4 * PAGE)
    give_back(call, call(mm, addr, 4))      # marks the pages as referenced
    # The kinds of list, one after the other: the output's own, and for the slow walk the one in which it remembers.
    for nth, output in ((1, PageList), (1, PageRanges)) + (() if call in FAST else ((2, PageList), (2, PageRanges))):
        with mem.inject("list", nth), refused(mem, MMError, "list|output|memory", errno.ENOMEM):
            call(mm, addr, 4, output=output)


@pytest.mark.parametrize("acquire", GENERATIONS)
@pytest.mark.parametrize("call", ALL)
def test_enomem_counter_at_its_end(mem, mm, call, acquire):
    addr = mm.mmap(PAGE)
    mm.touch(addr, PAGE)
    page = mm.page_at(addr)
    try_grab_folio(page_folio(page), 0x7ffffffe, FOLL_GET)
    # One more makes the signed counter negative; from then on every grab is refused, and changes nothing.
    pages = call(mm, addr, 1, acquire=acquire)
    assert page.refcount < 0
    before = frames(mem)
    with pytest.raises(MMError, match="counter") as caught:
        call(mm, addr, 1, acquire=acquire)
    assert caught.value.errno == errno.ENOMEM and caught.value.pfn == page.pfn
    assert (frames(mem) == before).all() and pins_of(mem) == is_pin(call)
    give_back(call, pages)
    folio_put_refs(page_folio(page), 0x7ffffffe)
    assert page.refcount == 1


@pytest.mark.parametrize("call", SLOW)
@pytest.mark.parametrize("thp", (False, True))
def test_ehwpoison(mem, mm, call, thp):
    addr = mm.mmap(HUGE)
    mm.madvise(addr, HUGE, MADV_HUGEPAGE if thp else MADV_NOHUGEPAGE)
    mm.touch(addr, 8 * PAGE)
    mem.memory_failure(mm.page_at(addr + 3 * PAGE))
    with refused(mem, MMError, "hwpoison", EHWPOISON):
        call(mm, addr + 3 * PAGE, 1, FOLL_HWPOISON)
    with refused(mem, MMError, "hwpoison", errno.EFAULT):
        call(mm, addr + 3 * PAGE, 1)
    for acquire in GENERATIONS:
        pages = call(mm, addr, 8, FOLL_HWPOISON, acquire=acquire)
        assert len(pages) == 3
        give_back(call, pages)


@pytest.mark.parametrize("thp", (False, True))
@pytest.mark.parametrize("acquire", GENERATIONS)
def test_fast_stops_at_hwpoison(mem, mm, thp, acquire):
    addr = mm.mmap(HUGE)
    mm.madvise(addr, HUGE, MADV_HUGEPAGE if thp else MADV_NOHUGEPAGE)
    mm.touch(addr, 8 * PAGE)
    mem.memory_failure(mm.page_at(addr + 3 * PAGE))
    with refused(mem, MMError, "hwpoison", errno.EFAULT):
        pin_user_pages_fast(mm, addr + 3 * PAGE, 1, acquire=acquire)
    pages = pin_user_pages_fast(mm, addr, 8, acquire=acquire)
    assert len(pages) == 3
    unpin_user_pages(pages)


@pytest.mark.parametrize("call", ALL)
def test_eremoteio(mem, mm, call):
    addr = mm.mmap(HUGE, flags=MAP_SHARED, file=File(mem, HUGE, "devdax", device=2))
    zone_device_page_init(mem.page(mem.devices[2].start_pfn))
    mm.touch(addr, HUGE)
    with refused(mem, MMError, "FOLL_PCI_P2PDMA", errno.EREMOTEIO):
        call(mm, addr, 4)
    pages = call(mm, addr, 4, FOLL_PCI_P2PDMA)
    assert len(pages) == 4
    give_back(call, pages)


@pytest.mark.parametrize("call", ALL)
def test_efault_beyond_the_end_of_the_file(mem, mm, call):
    file = File(mem, 4 * PAGE)
    addr = mm.mmap(4 * PAGE, flags=MAP_SHARED, file=file)
    mm.touch(addr, 4 * PAGE)
    file.truncate(2 * PAGE)
    with refused(mem, MMError, "SIGBUS", errno.EFAULT):
        call(mm, addr + 2 * PAGE, 1)
    pages = call(mm, addr, 4)
    assert len(pages) == 2
    give_back(call, pages)


@pytest.mark.parametrize("call", ALL)
def test_efault_device_gone_and_pool_empty(mem, mm, call):
    file = File(mem, HUGE, "devdax", device=0)
    addr = mm.mmap(HUGE, flags=MAP_SHARED, file=file)
    file.unplug()
    with pytest.raises(MMError, match="SIGBUS") as caught:
        call(mm, addr, 1)
    assert caught.value.errno == errno.EFAULT
    folios = [folio_alloc(mem, 9, hugetlb=True) for _ in range(4)]
    hugetlb = mm.mmap(HUGE, flags=MAP_PRIVATE | MAP_ANONYMOUS | MAP_HUGETLB | MAP_NORESERVE)
    with pytest.raises(MMError, match="SIGBUS") as caught:
        call(mm, hugetlb, 1, FOLL_WRITE)
    assert caught.value.errno == errno.EFAULT
    folios_put(folios)


@pytest.mark.parametrize("call", ALL)
def test_efault_nofault(mem, mm, call):
    addr = mm.mmap(4 * PAGE)
    mm.touch(addr, PAGE)
    mm.touch(addr + PAGE, PAGE, write=False)
    faults = mm.total_faults
    with refused(mem, MMError, "FOLL_NOFAULT", errno.EFAULT):
        call(mm, addr + 2 * PAGE, 1, FOLL_NOFAULT)
    with refused(mem, MMError, "FOLL_NOFAULT", errno.EFAULT):
        call(mm, addr + PAGE, 1, FOLL_NOFAULT | FOLL_WRITE)       # the zero page is there, and cannot be written
    pages = call(mm, addr, 4, FOLL_NOFAULT)
    assert len(pages) == 2 and mm.total_faults == faults
    give_back(call, pages)


@pytest.mark.parametrize("call", SLOW)
def test_efault_dump_leaves_holes(mem, mm, call):
    addr = mm.mmap(4 * PAGE)
    mm.touch(addr, PAGE)
    mm.touch(addr + PAGE, PAGE, write=False)
    faults = mm.total_faults
    for hole in (addr + PAGE, addr + 2 * PAGE):
        with refused(mem, MMError, "FOLL_DUMP", errno.EFAULT):
            call(mm, hole, 1, FOLL_DUMP)
    assert mm.total_faults == faults
    pages = call(mm, addr, 1, FOLL_DUMP)
    give_back(call, pages)
    # A file is no hole: its pages are brought in.
    file = mm.mmap(PAGE, flags=MAP_SHARED, file=File(mem, PAGE))
    give_back(call, call(mm, file, 1, FOLL_DUMP))
    huge = mm.mmap(HUGE)
    mm.madvise(huge, HUGE, MADV_HUGEPAGE)
    mm.touch(huge, HUGE, write=False)
    assert is_huge_zero_page(mm.page_at(huge))
    hugetlb = mm.mmap(HUGE, flags=MAP_PRIVATE | MAP_ANONYMOUS | MAP_HUGETLB)
    for hole in (huge, hugetlb):
        with refused(mem, MMError, "FOLL_DUMP", errno.EFAULT):
            call(mm, hole, 1, FOLL_DUMP)


def test_errors_say_where(mem, mm):
    addr = mm.mmap(2 * PAGE, PROT_READ)
    with pytest.raises(MMError) as caught:
        pin_user_pages(mm, addr + PAGE + 7, 1, FOLL_WRITE)
    assert caught.value.addr == addr + PAGE and caught.value.pfn is None
    text = str(caught.value)
    assert "pin_user_pages()" in text and f"{addr + PAGE:#x}" in text and "not writable" in text


@pytest.mark.parametrize("call", SLOW)
def test_a_signal_ends_the_walk(call):
    """A handler that raises while pages are faulted in: its exception passes on, and nothing stays taken."""
    import signal

    class Stop(Exception):
        pass

    def handler(*_):
        raise Stop

    nr, before = 32768, signal.signal(signal.SIGALRM, handler)
    with Memory("160M") as mem:
        try:
            for _ in range(100):
                mm = MM(mem)
                addr = mm.mmap(nr * PAGE)
                try:
                    # Long before the walk is done, which looks at signals every 1024 faults.
                    signal.setitimer(signal.ITIMER_REAL, 5e-4)
                    give_back(call, call(mm, addr, nr, FOLL_WRITE))
                except Stop:
                    pass
                signal.setitimer(signal.ITIMER_REAL, 0)
                rss = mm.rss
                assert pins_of(mem) == 0
                mem.check()
                if call in GETS:
                    assert all(mm.page_at(addr + i * PAGE).refcount == 1 for i in range(0, rss, 100))
                mm.exit()
                if 0 < rss < nr:
                    break
            else:
                pytest.fail("no signal came while pages were faulted in")
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("call", SLOW)
def test_efault_dump_of_a_hole_in_a_hugetlb_file(mem, mm, call):
    file = File(mem, HUGE, "hugetlbfs")
    addr = mm.mmap(HUGE, flags=MAP_SHARED, file=file)
    with refused(mem, MMError, "FOLL_DUMP", errno.EFAULT):
        call(mm, addr, 1, FOLL_DUMP)
    assert file.nr_cached == 0
    file.write(0, b"there")
    pages = call(mm, addr, 1, FOLL_DUMP)
    assert pages[0] == file.page_at(0) == mm.page_at(addr)
    give_back(call, pages)
