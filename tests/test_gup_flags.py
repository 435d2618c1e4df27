"""What each FOLL flag does, the exclusive protocol, zero pages, and the marks that a walk leaves."""

import pytest

import mmcore as mmc

from gup_support import *


def huge(mm, write=True):
    """One THP, or the huge zero folio."""
    addr = mm.mmap(HUGE)
    mm.madvise(addr, HUGE, MADV_HUGEPAGE)
    mm.touch(addr, HUGE, write)
    return addr


def refs(pages):
    return [page.refcount for page in pages]


# ---- what a reference and a pin are -----------------------------------------------------------------------------------------
@pytest.mark.parametrize("acquire", GENERATIONS)
@pytest.mark.parametrize("call", ALL)
def test_counts(mem, mm, call, acquire):
    small, large = mm.mmap(4 * PAGE), huge(mm)
    mm.touch(small, 4 * PAGE)
    pages = call(mm, small, 4, FOLL_WRITE, acquire=acquire)
    assert refs(pages) == [1 + (1024 if is_pin(call) else 1)] * 4
    give_back(call, pages)
    pages = call(mm, large + 3 * PAGE, 100, FOLL_WRITE, acquire=acquire)
    folio = pages[0].folio
    assert (folio.refcount, folio.pincount) == (101, 100 if is_pin(call) else 0)
    assert pins_of(mem) == (100 if is_pin(call) else 0)
    give_back(call, pages)


@pytest.mark.parametrize("call", ALL)
def test_has_pinned_gates_the_copy_in_fork(mem, mm, call):
    """
    parent   touch ── call, released ── fork          a process that never pinned shares its page;
    child                                 └── page    one that tried has the gate open for good
    """
    addr = mm.mmap(2 * PAGE)
    mm.touch(addr, 2 * PAGE)
    give_back(call, call(mm, addr, 1))
    page = mm.page_at(addr)
    try_grab_folio(page.folio, 2000, FOLL_GET)          # enough plain references to look pinned
    child = mm.fork()
    assert (child.page_at(addr) == page) == (not is_pin(call))
    folio_put_refs(page.folio, 2000)
    child.exit()


def test_a_pin_that_fails_sets_the_gate(mem, mm):
    addr = mm.mmap(PAGE)
    mm.touch(addr, PAGE)
    with pytest.raises(MMError):
        pin_user_pages(mm, 0x1000, 1)
    page = mm.page_at(addr)
    try_grab_folio(page.folio, 2000, FOLL_GET)
    child = mm.fork()
    assert child.page_at(addr) != page
    folio_put_refs(page.folio, 2000)
    child.exit()


# ---- zero pages --------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("acquire", GENERATIONS)
@pytest.mark.parametrize("call", ALL)
def test_zero_page(mem, mm, call, acquire):
    addr = mm.mmap(4 * PAGE)
    zero = mem.zero_page
    before = zero.refcount
    pages = call(mm, addr, 4, acquire=acquire)
    assert list(pages) == [zero] * 4
    # A pin of it is none; a reference counts.
    assert zero.refcount == before + (0 if is_pin(call) else 4) and pins_of(mem) == 0
    give_back(call, pages)
    assert zero.refcount == before


@pytest.mark.parametrize("call", PINS)
def test_huge_zero_folio_is_pinned_as_any_folio(mem, mm, call):
    addr = huge(mm, write=False)
    pages = call(mm, addr, 8)
    assert is_huge_zero_page(pages[0]) and pages[0].folio.pincount == 8 and pins_of(mem) == 8
    unpin_user_pages(pages)
    assert pages[0].folio.pincount == 0


@pytest.mark.parametrize("call", PINS)
@pytest.mark.parametrize("thp", (False, True))
def test_longterm_read_of_untouched_memory_is_not_the_zero_page(mem, mm, call, thp):
    addr = huge(mm, write=False) if thp else mm.mmap(4 * PAGE)
    pages = call(mm, addr, 4, FOLL_LONGTERM)
    assert not any(is_zero_page(page) or is_huge_zero_page(page) for page in pages)
    mm.write(addr, b"seen by the device")
    assert bytes(page_address(pages[0])[:18]) == b"seen by the device"
    unpin_user_pages(pages)


@pytest.mark.parametrize("call", PINS)
def test_longterm_read_of_a_private_file_is_a_copy(mem, mm, call):
    file = File(mem, 4 * PAGE)
    file.write(0, b"file")
    addr = mm.mmap(4 * PAGE, flags=MAP_PRIVATE, file=file)
    mm.read(addr, 4)
    shared = file.page_at(0)
    short = call(mm, addr, 1)
    assert short[0] == shared
    pages = call(mm, addr, 1, FOLL_LONGTERM)
    assert pages[0] != shared and bytes(page_address(pages[0])[:4]) == b"file"
    mm.write(addr, b"mine")
    assert bytes(page_address(pages[0])[:4]) == b"mine" and file.read(0, 4) == b"file"
    unpin_user_pages(short)
    unpin_user_pages(pages)


# ---- exclusive -----------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("thp", (False, True))
@pytest.mark.parametrize("call", PINS)
def test_reading_pin_of_a_shared_page_unshares_it(mem, mm, call, thp):
    """
    parent   write ── fork ── pin to read ── write      the device sees what the process writes afterwards
    child               └────────────────── read        and the child does not
    """
    addr = huge(mm) if thp else mm.mmap(4 * PAGE)
    mm.write(addr, b"before")
    child = mm.fork()
    shared = mm.page_at(addr)
    assert child.page_at(addr) == shared
    pages = call(mm, addr, 1)
    assert pages[0] != shared and PageFlags.anon_exclusive in pages[0].flags
    assert bytes(page_address(pages[0])[:6]) == b"before"
    mm.write(addr, b"after!")
    assert mm.page_at(addr) == pages[0] and bytes(page_address(pages[0])[:6]) == b"after!"
    assert child.read(addr, 6) == b"before"
    unpin_user_pages(pages)
    child.exit()


@pytest.mark.parametrize("call", GETS)
def test_reading_reference_of_a_shared_page_does_not_unshare_it(mem, mm, call):
    addr = mm.mmap(PAGE)
    mm.touch(addr, PAGE)
    child = mm.fork()
    pages = call(mm, addr, 1)
    assert pages[0] == child.page_at(addr)
    release_pages(pages)
    child.exit()


@pytest.mark.parametrize("thp", (False, True))
def test_pin_first_then_fork_gives_the_child_a_copy(mem, mm, thp):
    addr = huge(mm) if thp else mm.mmap(4 * PAGE)
    mm.write(addr, b"parent")
    pages = pin_user_pages_fast(mm, addr, 1, FOLL_WRITE)
    child = mm.fork()
    assert mm.page_at(addr) == pages[0] and child.page_at(addr) != pages[0] and child.read(addr, 6) == b"parent"
    mm.write(addr, b"device")
    assert mm.page_at(addr) == pages[0] and child.read(addr, 6) == b"parent"
    unpin_user_pages(pages)
    child.exit()


# ---- FOLL_FORCE -----------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("acquire", GENERATIONS)
@pytest.mark.parametrize("call", ALL)
def test_force_writes_to_read_only_private_memory(mem, mm, call, acquire):
    file = File(mem, 2 * PAGE)
    file.write(0, b"text")
    addr = mm.mmap(2 * PAGE, PROT_READ, MAP_PRIVATE, file)
    mm.read(addr, 4)
    pages = call(mm, addr, 1, FOLL_WRITE | FOLL_FORCE, acquire=acquire)
    # A breakpoint: the process's own copy, still not writable by itself.
    assert pages[0] != file.page_at(0) and mm.page_at(addr) == pages[0]
    page_address(pages[0])[:4] = b"trap"
    assert mm.read(addr, 4) == b"trap" and file.read(0, 4) == b"text"
    with pytest.raises(MMError):
        mm.write(addr, b"x")
    again = call(mm, addr, 1, FOLL_WRITE | FOLL_FORCE, acquire=acquire)
    assert again == pages
    give_back(call, pages)
    give_back(call, again)


@pytest.mark.parametrize("call", ALL)
def test_force_reads_prot_none(mem, mm, call):
    addr = mm.mmap(2 * PAGE)
    mm.write(addr, b"hidden")
    mm.mprotect(addr, 2 * PAGE, PROT_NONE)
    pages = call(mm, addr, 1, FOLL_FORCE)
    assert bytes(page_address(pages[0])[:6]) == b"hidden"
    give_back(call, pages)


@pytest.mark.parametrize("call", PINS)
@pytest.mark.parametrize("kind, flags", [("base", FOLL_FORCE), ("base", FOLL_FORCE | FOLL_WRITE), ("thp", FOLL_FORCE),
                                         ("thp", FOLL_FORCE | FOLL_WRITE), ("hugetlb", FOLL_FORCE)])
def test_force_unshares_a_prot_none_page(mem, mm, call, kind, flags):
    """
        mm      write ── fork ── PROT_NONE ── pin by FOLL_FORCE: exclusive to mm first, the entry stays without access
        child         └─ reads what was written
    """
    flag = mmc.MAP_PRIVATE | mmc.MAP_ANONYMOUS | (mmc.MAP_HUGETLB if kind == "hugetlb" else 0)
    addr = mm.mmap(HUGE, flags=flag)
    if kind == "thp":
        mm.madvise(addr, HUGE, mmc.MADV_HUGEPAGE)
    mm.write(addr, b"shared")
    child = mm.fork()
    mm.mprotect(addr, HUGE, PROT_NONE)
    before = mm.total_faults
    pages = call(mm, addr, 1, flags)
    assert mm.total_faults - before < 4, "the walk went round"
    assert pages[0] == mm.page_at(addr) != child.page_at(addr) and bytes(page_address(pages[0])[:6]) == b"shared"
    page_address(pages[0])[:6] = b"device"
    assert child.read(addr, 6) == b"shared"
    with pytest.raises(MMError):
        mm.read(addr, 1)
    mm.mprotect(addr, HUGE, PROT_READ)
    assert mm.read(addr, 6) == b"device"
    give_back(call, pages)
    child.exit()


# ---- FOLL_SPLIT_PMD, FOLL_NOWAIT, FOLL_NOFAULT, marks --------------------------------------------------------------------------
@pytest.mark.parametrize("call", SLOW)
def test_split_pmd_leaves_the_folio_and_maps_it_by_ptes(mem, mm, call):
    addr = huge(mm)
    folio = mm.page_at(addr).folio
    pages = call(mm, addr + 5 * PAGE, 3, FOLL_SPLIT_PMD)
    assert [page.pfn for page in pages] == [folio.pfn + 5 + i for i in range(3)]
    assert folio.order == 9 and folio.mapcount == 512 and folio.refcount == 512 + 3
    give_back(call, pages)
    # What follows finds PTEs, and the same pages.
    pages = call(mm, addr, 512, FOLL_WRITE)
    assert pages.pfns.tolist() == list(range(folio.pfn, folio.pfn + 512))
    give_back(call, pages)


@pytest.mark.parametrize("call", SLOW)
def test_nowait_starts_the_read_and_returns_nothing(mem, mm, call):
    addr = mm.mmap(4 * PAGE)
    mm.write(addr, b"swapped")
    mm.madvise(addr, PAGE, MADV_PAGEOUT)
    assert mm.page_at(addr) is None
    assert len(call(mm, addr, 1, FOLL_NOWAIT)) == 0
    pages = call(mm, addr, 1, FOLL_NOWAIT)
    assert bytes(page_address(pages[0])[:7]) == b"swapped"
    give_back(call, pages)
    # What needs no disk is faulted in.
    pages = call(mm, addr + PAGE, 2, FOLL_NOWAIT | FOLL_WRITE)
    assert len(pages) == 2
    give_back(call, pages)


@pytest.mark.parametrize("call", ALL)
def test_swapped_pages_come_back(mem, mm, call):
    addr = mm.mmap(8 * PAGE)
    mm.write(addr, bytes(range(200)) * 160)
    before = mm.read(addr, 8 * PAGE)
    mm.madvise(addr, 8 * PAGE, MADV_PAGEOUT)
    pages = call(mm, addr, 8)
    assert b"".join(bytes(page_address(page)) for page in pages) == before
    give_back(call, pages)


def test_touch_marks_dirty_and_referenced_pin_user_pages_does_not(mem, mm):
    file = File(mem, 8 * PAGE)
    for index, (call, dirty, referenced) in enumerate(((get_user_pages, True, True), (pin_user_pages_remote, True, True),
                                                       (pin_user_pages_unlocked, True, True), (pin_user_pages, False, False),
                                                       (pin_user_pages_fast, False, True))):
        addr = mm.mmap(PAGE, flags=MAP_SHARED, file=file, offset=index * PAGE)
        mm.touch(addr, PAGE, write=False)               # mapped writable, and clean
        page = mm.page_at(addr)
        assert PageFlags.dirty not in page.flags
        pages = call(mm, addr, 1, FOLL_WRITE)
        assert (PageFlags.dirty in page.flags) == dirty, call
        assert (PageFlags.referenced in page.flags) == referenced, call
        give_back(call, pages)


def test_interruptible_and_numa_hints_change_nothing_without_their_cause(mem, mm):
    addr = mm.mmap(4 * PAGE)
    pages = pin_user_pages(mm, addr, 4, FOLL_INTERRUPTIBLE | FOLL_HONOR_NUMA_FAULT | FOLL_WRITE)
    assert len(pages) == 4
    unpin_user_pages(pages)


def test_a_signal_handler_that_raises_ends_the_call_with_nothing_held(mem, mm):
    import signal
    addr = mm.mmap(16 << 20)
    calls = []

    def handler(*_):
        calls.append(1)
        raise KeyboardInterrupt

    old = signal.signal(signal.SIGALRM, handler)
    try:
        for turn in range(200):
            mm.madvise(addr, 16 << 20, MADV_DONTNEED)
            signal.setitimer(signal.ITIMER_REAL, 0.0001 + turn * 0.00001)
            try:
                pages = pin_user_pages(mm, addr, 4096, FOLL_WRITE)
            except KeyboardInterrupt:
                assert pins_of(mem) == 0
                break
            except BaseException:
                raise
            signal.setitimer(signal.ITIMER_REAL, 0)
            unpin_user_pages(pages)
        signal.setitimer(signal.ITIMER_REAL, 0)
    except KeyboardInterrupt:
        signal.setitimer(signal.ITIMER_REAL, 0)         # it came between two calls
        if "pages" in locals() and pins_of(mem):
            unpin_user_pages(pages)
    finally:
        signal.signal(signal.SIGALRM, old)
    mem.check()


def test_misaligned_start_means_its_page(mem, mm):
    addr = mm.mmap(4 * PAGE)
    mm.touch(addr, 4 * PAGE)
    for call in ALL:
        pages = call(mm, addr + PAGE + 1234, 2)
        assert [page for page in pages] == [mm.page_at(addr + PAGE), mm.page_at(addr + 2 * PAGE)]
        give_back(call, pages)


def test_pages_across_mappings(mem, mm):
    addr = mm.mmap(HUGE + 8 * PAGE)
    mm.madvise(addr, HUGE, MADV_HUGEPAGE)
    mm.touch(addr, HUGE + 4 * PAGE)
    mm.mprotect(addr + HUGE + 2 * PAGE, PAGE, PROT_READ)
    for call in ALL:
        for acquire in GENERATIONS:
            pages = call(mm, addr + HUGE - 2 * PAGE, 8, FOLL_WRITE, acquire=acquire)
            assert len(pages) == 4                      # up to the page that cannot be written
            give_back(call, pages)
            pages = call(mm, addr + HUGE - 2 * PAGE, 10, acquire=acquire)
            assert len(pages) == 10
            give_back(call, pages)


def test_debug_memory_finds_pins_of_pages_that_are_not_exclusive(mm):
    with machine(debug=True) as mem:
        mm = MM(mem)
        addr = mm.mmap(4 * PAGE)
        for call in PINS:
            unpin_user_pages(call(mm, addr, 4, FOLL_WRITE))
        over(mem, mm)


@pytest.mark.parametrize("kind", ("base", "thp", "hugetlb"))
@pytest.mark.parametrize("call", ALL)
def test_numa_hints_are_looked_through_unless_they_are_to_be_answered(mem, mm, call, kind):
    """
        entry   no access, page there     |  no flag: taken as it is  |  FOLL_HONOR_NUMA_FAULT, or an access: a fault first
    """
    addr = mm.mmap(HUGE, flags=MAP_PRIVATE | MAP_ANONYMOUS | (MAP_HUGETLB if kind == "hugetlb" else 0))
    if kind == "thp":
        mm.madvise(addr, HUGE, MADV_HUGEPAGE)
    mm.write(addr + 3 * PAGE, b"here")
    addr += 3 * PAGE
    page = mm.page_at(addr)
    assert page.folio.order == (0 if kind == "base" else 9)
    for flags, taken in ((0, 0), (FOLL_HONOR_NUMA_FAULT, 1)):
        hint_numa(mm, addr)
        faults = mm.total_faults
        pages = call(mm, addr, 1, flags)
        assert pages[0] == page and mm.total_faults == faults + taken
        give_back(call, pages)
    hint_numa(mm, addr)
    faults = mm.total_faults
    assert mm.read(addr, 4) == b"here" and mm.total_faults == faults + 1 and mm.page_at(addr) == page
    mm.write(addr, b"gone")
    assert mm.read(addr, 4) == b"gone" and mm.page_at(addr) == page
    mem.check()
