"""Pinning and unpinning by generation: one state, whatever way it was come by; and failures, which leave none of it."""
import errno

import pytest
from hypothesis import given, settings, strategies as st

from mmcore import *
from support import poke
from vfio_support import *

ENOMEM, EFAULT = errno.ENOMEM, errno.EFAULT
G1 = 1 << 30
FIXED = MAP_SHARED | MAP_FIXED
PER_BATCH = 512


# ---- buffers: what a mapping may find behind its addresses -----------------------------------------------------------
# Each returns (address, pages); a machine is built anew for every generation, and is the same each time.
def cow_hole(mm):
    """F0P0 F0P1 F0P2 F1P0 F0P4 ...: one page of a THP replaced, as copy-on-write does; skipping to the end of F0
    maps F0P3.
    """
    addr, other = mapped(mm, HUGE, thp=True), mapped(mm, PAGE)
    head = mm.page_at(addr).pfn
    spare = mm.mmap(PAGE)
    mm.mremap(addr + 3 * PAGE, PAGE, PAGE, spare)
    mm.mremap(other, PAGE, PAGE, addr + 3 * PAGE)
    pfns = [mm.page_at(addr + i * PAGE).pfn - head for i in range(6)]
    assert pfns[:3] + pfns[4:] == [0, 1, 2, 4, 5] and not 0 <= pfns[3] < 512
    return addr, 512


def two_folios(mm):
    """Two THPs side by side: one chunk of 1024 pages."""
    addr = mapped(mm, 2 * HUGE, thp=True)
    assert mm.page_at(addr + HUGE).pfn == mm.page_at(addr).pfn + 512
    return addr, 1024


def broken_at(*breaks, nr=1100):
    """Base pages that follow each other, but for breaks before these pages."""
    def build(mm):
        addr, other = mm.mmap(nr * PAGE), mm.mmap(max(1, len(breaks)) * PAGE)
        edges = [0, *breaks, nr]
        for i, (first, last) in enumerate(zip(edges, edges[1:])):
            mm.touch(addr + first * PAGE, (last - first) * PAGE)
            if i < len(breaks):
                mm.touch(other + i * PAGE, PAGE)
        pfns = [mm.page_at(addr + i * PAGE).pfn for i in range(nr)]
        assert {i for i in range(1, nr) if pfns[i] != pfns[i - 1] + 1} >= set(breaks)
        return addr, nr
    build.__name__ = "broken_at_" + "_".join(map(str, breaks))
    return build


def scattered(mm, nr=600):
    """No two pages follow each other."""
    addr, other = mm.mmap(nr * PAGE), mm.mmap(nr * PAGE)
    for i in range(nr):
        mm.touch(addr + i * PAGE, PAGE)
        mm.touch(other + i * PAGE, PAGE)
    return addr, nr


def backwards(mm, nr=40):
    """Every page follows the one after it."""
    addr = mm.mmap(nr * PAGE)
    for i in reversed(range(nr)):
        mm.touch(addr + i * PAGE, PAGE)
    return addr, nr


def raw_and_anon(mm):
    """Device memory without struct pages and anonymous memory in turns: what is left of a look-up is not a batch
    entry.
    """
    addr = mapped(mm, 24 * PAGE)
    for at in (2, 8, 9, 20):
        mm.mmap(PAGE if at != 20 else 4 * PAGE, PROT_READ | PROT_WRITE, FIXED, File(mm.mem, "16K", "iomem"), 0, addr + at * PAGE)
    return addr, 24


def raw_first_and_last(mm):
    """Raw PFNs at both ends, and 600 pages of them in one run."""
    addr = mapped(mm, 610 * PAGE)
    file = File(mm.mem, 600 * PAGE, "iomem")
    mm.mmap(600 * PAGE, PROT_READ | PROT_WRITE, FIXED, file, 0, addr)
    mm.mmap(PAGE, PROT_READ | PROT_WRITE, FIXED, file, 0, addr + 609 * PAGE)
    return addr, 610


def reserved_in_the_middle(mm):
    """Raw PFNs that have struct pages, which are reserved, between anonymous pages."""
    addr = mapped(mm, 12 * PAGE)
    mm.mmap(4 * PAGE, PROT_READ | PROT_WRITE, FIXED, File(mm.mem, 4 * PAGE, "pfnmap"), 0, addr + 4 * PAGE)
    for i in range(4):
        pfn = mm.page_at(addr + (4 + i) * PAGE).pfn
        poke(mm.mem, pfn, "flags", int(mm.mem.pages["flags"][pfn]) | int(PageFlags.reserved))
    return addr, 12


def hugetlb(mm):
    """A mapping of hugetlb pages, from the middle of one to the middle of another."""
    return mapped(mm, 3 * HUGE, flags=MAP_PRIVATE | MAP_ANONYMOUS | MAP_HUGETLB) + 100 * PAGE, 1100


def shared(mm):
    """Shared memory of which nothing is there yet."""
    return mm.mmap(50 * PAGE, flags=MAP_SHARED | MAP_ANONYMOUS), 50


def untouched(mm):
    """Private memory of which nothing is there yet."""
    return mm.mmap(530 * PAGE), 530


def mixed(mm):
    """THPs, base pages, a hole in between them that is another mapping, and a file, in one range."""
    addr = mm.mmap(4 * HUGE)
    mm.madvise(addr, 4 * HUGE, MADV_HUGEPAGE)
    mm.touch(addr, 2 * HUGE)
    mm.mmap(7 * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, addr=addr + HUGE - 3 * PAGE)
    mm.mmap(5 * PAGE, PROT_READ | PROT_WRITE, FIXED, File(mm.mem, "64K", "tmpfs"), 0, addr + HUGE + 64 * PAGE)
    return addr + PAGE, 1500


BUFFERS = [cow_hole, two_folios, broken_at(511), broken_at(512), broken_at(513), broken_at(1, 511, 1024), scattered, backwards,
           raw_and_anon, raw_first_and_last, reserved_in_the_middle, hugetlb, shared, untouched, mixed]


def history(buffer, options, prot=RW, domains=1, **more):
    """Everything that can be seen of a map and an unmap of a buffer."""
    mem, mm = machine()
    addr, nr = buffer(mm)
    c = container(mem, domains, **options, **more)
    iova = 1 << 32
    c.map_dma(mm, addr, iova, nr * PAGE, prot)
    pfns = translations(c, iova, nr * PAGE)
    m = c.mappings[0]
    rows = [pfns, m.locked_vm, mm.locked_vm, pins(mem), m.has_rsvd, [d.map_calls for d in c.domains],
            [d.stats["maps"] for d in c.domains], frames(mem)]
    # Against the page tables, and one mapping a page: the plain meaning of it all.
    assert pfns == [int(word) & (1 << 55) - 1 for word in mm.pagemap(addr, nr)]
    real = [pfn for pfn in pfns if pfn < mem.nr_pages and not PageFlags.reserved & int(mem.pages["flags"][pfn])]
    assert m.locked_vm == mm.locked_vm == pins(mem) == len(real) and m.has_rsvd == (len(real) < nr)
    if not c.disable_hugepages:
        joined = sum(i == 0 or pfns[i] != pfns[i - 1] + 1 or (pfns[i] in real) != (pfns[i - 1] in real) for i in range(nr))
        assert [d.map_calls for d in c.domains] == [joined] * domains
    assert c.unmap_dma(iova, nr * PAGE) == nr * PAGE and mm.locked_vm == pins(mem) == 0
    rows += [frames(mem), [d.stats["leaves"] for d in c.domains]]
    over(c, mm)
    return rows


@pytest.mark.parametrize("buffer", BUFFERS, ids=lambda b: b.__name__)
@pytest.mark.parametrize("prot", [RW, READ], ids=["rw", "ro"])
def test_all_generations_leave_one_state(buffer, prot):
    """The plainest is page by page, asking the IOMMU: all others are as it is."""
    plain = history(buffer, dict(acquire="page", release="page", remember_runs=False), prot)
    for options in GENERATIONS:
        assert history(buffer, options, prot) == plain, options


@pytest.mark.parametrize("buffer", [cow_hole, raw_and_anon, scattered, mixed], ids=lambda b: b.__name__)
def test_a_page_at_a_time_is_the_same_but_for_the_calls(buffer):
    """disable_hugepages: one page a pin call, one call of the IOMMU a page."""
    plain = history(buffer, dict(acquire="page", release="page", remember_runs=False))
    for options in GENERATIONS:
        rows = history(buffer, options, disable_hugepages=True)
        assert rows[5] == [len(rows[0])]
        assert rows[:5] + rows[7:] == plain[:5] + plain[7:]


ORDERS = (0, 0, 2, 4, 9)


def partition(mm, folios, replaced):
    """Folios of these orders side by side, some of whose pages were replaced by others."""
    sizes = [1 << order for order in folios]
    addr = mm.mmap(sum(sizes) * PAGE + HUGE, PROT_READ | PROT_WRITE) + HUGE
    addr &= ~(HUGE - 1)
    at = addr
    for order in sorted(folios, reverse=True):      # aligned to their sizes, whatever their number
        if order == 9:
            mm.madvise(at, HUGE, MADV_HUGEPAGE)
        mm.touch(at, PAGE << order)
        at += PAGE << order
    for page in replaced:
        page %= sum(sizes)
        other, away = mapped(mm, PAGE), mm.mmap(PAGE)
        mm.mremap(addr + page * PAGE, PAGE, PAGE, away)
        mm.mremap(other, PAGE, PAGE, addr + page * PAGE)
    return addr, sum(sizes)


@settings(max_examples=25)
@given(st.lists(st.sampled_from(ORDERS), min_size=1, max_size=8), st.lists(st.integers(0, 4000), max_size=6, unique=True),
       st.integers(0, 600), st.sampled_from(GENERATIONS[1:]), st.booleans(), st.sampled_from([(), (2,), (4,), (2, 4)]))
def test_any_partition_into_folios(folios, replaced, skip, options, write, mthp):
    def look(options):
        mem = Memory("64M", thp="madvise", mthp=mthp, debug=True)
        mm = MM(mem)
        addr, nr = partition(mm, folios, replaced)
        first = skip % nr
        c = container(mem, **options)
        c.map_dma(mm, addr + first * PAGE, 0, (nr - first) * PAGE, RW if write else READ)
        rows = [translations(c, 0, (nr - first) * PAGE), pins(mem), mm.locked_vm, c.domains[0].map_calls, frames(mem)]
        c.unmap_dma(0, 0, ALL)
        rows.append(frames(mem))
        over(c, mm)
        return rows
    assert look(options) == look(dict(acquire="page", release="page", remember_runs=False))


@pytest.mark.parametrize("acquire", ACQUIRES)
def test_no_memory_for_a_batch_means_a_page_at_a_time(acquire):
    mem, mm = machine()
    addr, nr = cow_hole(mm)
    c = container(mem, acquire=acquire)
    if acquire == "sink":
        refused(c, ENOMEM, lambda: injected(mem, "list", 1, lambda: c.map_dma(mm, addr, 0, nr * PAGE)), mm, exactly="touched")
    else:
        injected(mem, "list", 1, lambda: c.map_dma(mm, addr, 0, nr * PAGE))
        assert c.domains[0].map_calls == 3 and pins(mem) == nr
    over(c, mm)


@pytest.mark.parametrize("page_size", ["16K", "64K"])
@pytest.mark.parametrize("options", GENERATIONS[::4], ids=lambda o: "-".join(map(str, o.values())))
def test_larger_pages(page_size, options):
    """A batch has as many entries as a page has pointers."""
    mem = Memory("256M", page_size=page_size, debug=True)
    mm, size, nr = MM(mem), mem.page_size, 600
    addr, other = mm.mmap(nr * size), mm.mmap(nr * size)
    for i in range(nr):
        mm.touch(addr + i * size, size)
        if i % 3 == 0:
            mm.touch(other + i * size, size)
    c = container(mem, 2, **options)
    c.map_dma(mm, addr, 0, nr * size)
    c.register_device(lambda iova, length: c.unpin_pages(iova, nr))
    most = min(nr, size // 8)
    assert list(c.pin_pages(0, most, IOMMU_WRITE).pfns) == [mm.page_at(addr + i * size).pfn for i in range(most)]
    for domain in c.domains:
        assert [domain.iova_to_phys(i * size) // size for i in range(nr)] == [mm.page_at(addr + i * size).pfn for i in range(nr)]
    assert mm.locked_vm == nr and pins(mem) == nr + most
    refused(c, errno.EINVAL, lambda: c.map_dma(mm, addr, nr * size, PAGE), mm, match="multiples of")
    assert c.unmap_dma(0, nr * size) == nr * size
    over(c, mm)


def test_a_folio_of_1_gib():
    """262144 pages in one chunk: folios may cross what sparse memory calls a section."""
    mem = Memory("2G", hugetlb={"1G": 1})
    mm = MM(mem)
    addr = mapped(mm, G1, flags=MAP_PRIVATE | MAP_ANONYMOUS | MAP_HUGETLB | 30 << 26)
    for options in (dict(acquire="sink"), dict(acquire="batch", release="folio"), dict(acquire="page", release="page")):
        c = container(mem, **options)
        c.map_dma(mm, addr, G1, G1)
        assert c.domains[0].stats["leaves"] == c.domains[0].map_calls == 1 and pins(mem) == mm.locked_vm == 1 << 18
        assert mem.folio(mm.page_at(addr).pfn).pincount == 1 << 18
        assert c.unmap_dma(G1, G1) == G1
        over(c, mm)


@pytest.mark.parametrize("release", RELEASES)
def test_pages_of_a_process_that_is_gone_are_freed_by_the_unmap(release):
    """THPs, base pages, and hugetlb pages, which go back to their pool."""
    mem, mm = machine()
    c, free = container(mem, release=release), mem.vmstat()["nr_free_pages"]
    for i, addr in enumerate((mapped(mm, HUGE, thp=True), mapped(mm, 40 * PAGE),
                              mapped(mm, 2 * HUGE, flags=MAP_PRIVATE | MAP_ANONYMOUS | MAP_HUGETLB))):
        c.map_dma(mm, addr, i << 30, (HUGE, 40 * PAGE, 2 * HUGE)[i])
    mm.exit()
    assert mem.hugetlb_pools()[HUGE] == (4, 2) and mem.vmstat()["nr_free_pages"] < free - 512
    assert c.unmap_dma(0, 0, ALL) == 3 * HUGE + 40 * PAGE
    # The first process's top table is free as well.
    assert mem.hugetlb_pools()[HUGE] == (4, 4) and mem.vmstat()["nr_free_pages"] >= free
    over(c)


# ---- dirty -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("release", RELEASES)
def test_corner_c10_pages_are_dirtied_when_they_are_unpinned_if_they_may_be_written(release):
    mem, mm = machine()
    file = File(mem, "1M", "tmpfs")
    addr = mapped(mm, 64 * PAGE, flags=MAP_SHARED, file=file)
    folios = [mem.folio(mm.page_at(addr + i * PAGE).pfn) for i in range(64)]
    c = container(mem, release=release)

    def clean():
        for folio in folios:
            folio_lock(folio)
            folio_clear_dirty_for_io(folio)
            folio_unlock(folio)

    def dirty():
        return sum(map(folio_test_dirty, folios))
    clean()
    for prot, after in ((READ, 0), (WRITE, 64)):
        c.map_dma(mm, addr, 0, 64 * PAGE, prot)
        # A pin for writing marks them as well (FOLL_TOUCH); writeback cleans them meanwhile.
        clean()
        c.unmap_dma(0, 64 * PAGE)
        assert dirty() == after
    over(c, mm)


# ---- limits ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("options", GENERATIONS, ids=lambda o: "-".join(map(str, o.values())))
@pytest.mark.parametrize("nr, breaks", [(8, ()), (600, ()), (1100, (600,)), (1100, (511, 512, 513))])
def test_the_limit_exactly_and_a_page_less(options, nr, breaks):
    """Within the first batch, in the second, in the second chunk: all or nothing."""
    for short, held in ((0, 0), (0, 5), (1, 0), (1, 5), (nr - 1, 0), (nr // 2, 0), (nr, 0)):
        mem = Memory("64M", debug=True)
        mm = MM(mem, rlimit_memlock=(nr + held - short) * PAGE)
        addr, _ = broken_at(*breaks, nr=nr)(mm)
        c = container(mem, 2, **options)
        if held:
            c.map_dma(mm, mapped(mm, held * PAGE), 1 << 40, held * PAGE)
        assert mm.locked_vm == held
        if short:
            error = refused(c, ENOMEM, lambda: c.map_dma(mm, addr, 0, nr * PAGE), mm, match="RLIMIT_MEMLOCK", exactly="touched")
            assert str((nr + held - short) * PAGE) in str(error) and "ulimit" in str(error)
        else:
            c.map_dma(mm, addr, 0, nr * PAGE)
            assert mm.locked_vm == nr + held
        over(c, mm)


@pytest.mark.parametrize("acquire", ACQUIRES)
def test_the_capability_lifts_the_limit_and_still_counts(acquire):
    mem, mm = machine(rlimit_memlock=0, cap_ipc_lock=True)
    c = container(mem, acquire=acquire)
    c.map_dma(mm, mapped(mm, 600 * PAGE), 0, 600 * PAGE)
    assert mm.locked_vm == 600 and c.mappings[0].lock_cap
    # Two mappings of one page, and two containers, count twice.
    other = container(mem)
    other.map_dma(mm, c.mappings[0].vaddr, 0, 600 * PAGE)
    c.map_dma(mm, c.mappings[0].vaddr, 1 << 30, PAGE)
    assert mm.locked_vm == pins(mem) == 1201
    other.close()
    assert mm.locked_vm == pins(mem) == 601
    over(c, mm)


@pytest.mark.parametrize("acquire", ACQUIRES)
def test_raw_pfns_are_not_charged(acquire):
    mem, mm = machine(rlimit_memlock=0, cap_ipc_lock=False)
    c = container(mem, acquire=acquire)
    addr = mm.mmap(1024 * PAGE, PROT_READ | PROT_WRITE, MAP_SHARED, File(mem, 1024 * PAGE, "iomem"))
    with same(c, mm):
        c.map_dma(mm, addr, 0, 1024 * PAGE)
        assert c.domains[0].map_calls == 1 and c.mappings[0].has_rsvd and mm.locked_vm == 0
        c.unmap_dma(0, 1024 * PAGE)
    over(c, mm)


# ---- failures --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("options", GENERATIONS, ids=lambda o: "-".join(map(str, o.values())))
def test_any_leaf_that_cannot_be_mapped_unwinds_everything(options):
    """Three chunks in three domains; the first that works is the tenth: 3 * 3 leaves."""
    mem, mm = machine()
    addr, nr = broken_at(3, 6, nr=8)(mm)
    c = container(mem, 3, **options)
    leaves = 3 * nr
    for nth in range(1, leaves + 1):
        error = refused(c, ENOMEM, lambda: injected(mem, "iommu_map", nth, lambda: c.map_dma(mm, addr, 0, nr * PAGE)), mm,
                        exactly="touched")
        # Chunk by chunk, domain by domain.
        at = [(d, k) for k, n in ((0, 3), (3, 3), (6, 2)) for d in range(3) for _ in range(n)][nth - 1]
        assert f"domain {at[0]} could not" in str(error) and error.addr == at[1] * PAGE
    injected(mem, "iommu_map", leaves + 1, lambda: c.map_dma(mm, addr, 0, nr * PAGE))
    over(c, mm)


@pytest.mark.parametrize("options", GENERATIONS[::2], ids=lambda o: "-".join(map(str, o.values())))
@pytest.mark.parametrize("site", ["frame", "table", "list", "alloc", "migrate", "sg"])
def test_whatever_fails_leaves_nothing(options, site):
    """Memory that is faulted in by the pin, for three domains."""
    for nth in range(1, 40):
        mem, mm = machine("32M")
        addr, nr = untouched(mm)
        c = container(mem, 2, **options)
        try:
            with mem.inject(site, nth):
                c.map_dma(mm, addr, 0, nr * PAGE)
        except MMError as error:
            assert error.errno == ENOMEM and not c.mappings and c.dma_avail == 65535
            assert mm.locked_vm == pins(mem) == 0 and [d.stats["tables"] for d in c.domains] == [1, 1]
            assert [d.stale for d in c.domains] == [0, 0]
            mem.check()
            continue
        finally:
            over(c, mm)
        return
    assert site == "frame", "it never came to an end"


@pytest.mark.parametrize("acquire", ACQUIRES)
def test_a_hole_in_the_memory(acquire):
    mem, mm = machine()
    addr = mapped(mm, 1200 * PAGE)
    c = container(mem, 2, acquire=acquire)
    for hole in (0, 1, 511, 512, 513, 1199):
        mm.mprotect(addr + hole * PAGE, PAGE, PROT_NONE)
        error = refused(c, EFAULT, lambda: c.map_dma(mm, addr, 0, 1200 * PAGE), mm, exactly="touched")
        assert error.addr == addr + hole * PAGE and "not writable" in str(error)
        mm.mprotect(addr + hole * PAGE, PAGE, PROT_READ | PROT_WRITE)
    mm.munmap(addr + 600 * PAGE, PAGE)
    assert refused(c, EFAULT, lambda: c.map_dma(mm, addr, 0, 1200 * PAGE), mm, exactly="touched").addr == addr + 600 * PAGE
    over(c, mm)


@pytest.mark.parametrize("acquire", ACQUIRES)
def test_of_a_limit_and_a_hole_the_lower_address_is_told(acquire):
    for limit, hole, number in ((600, 900, ENOMEM), (600, 700, ENOMEM), (600, 599, EFAULT), (100, 50, EFAULT), (1100, 1099, EFAULT)):
        mem = Memory("64M")
        mm = MM(mem, rlimit_memlock=limit * PAGE)
        addr = mapped(mm, 1200 * PAGE)
        mm.munmap(addr + hole * PAGE, PAGE)
        c = container(mem, acquire=acquire)
        refused(c, number, lambda: c.map_dma(mm, addr, 0, 1200 * PAGE), mm, exactly="touched")
        over(c, mm)


@pytest.mark.parametrize("acquire", ACQUIRES)
@pytest.mark.parametrize("raw", [False, True])
def test_the_run_before_a_hole_is_not_mapped(acquire, raw):
    #   | memory or registers | hole |    the hole ends the call that would have returned the run: no IOMMU, no has_rsvd
    mem, mm = machine()
    addr = mapped(mm, 4 * PAGE)
    if raw:
        mm.mmap(2 * PAGE, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, File(mem, 2 * PAGE, "iomem"), 0, addr)
    mm.munmap(addr + 2 * PAGE, PAGE)
    c = VFIOContainer(mem, acquire=acquire)
    c.map_dma(mm, addr, 0, 4 * PAGE)
    domain = IOMMUDomain(mem)
    with mem.inject("iommu_map"), pytest.raises(MMError) as caught:
        c.attach(domain)
    assert caught.value.errno == EFAULT and domain.map_calls == 0 and not c.mappings[0].has_rsvd
    assert pins(mem) == mm.locked_vm == 0
    over(c, mm)


@pytest.mark.parametrize("acquire", ACQUIRES)
def test_raw_pfns_with_pages_are_refused(acquire):
    """A pfnmap of frames that somebody counts references of; and one that may not be written."""
    mem, mm = machine()
    c = container(mem, acquire=acquire)
    addr = mm.mmap(4 * PAGE, PROT_READ | PROT_WRITE, MAP_SHARED, File(mem, 4 * PAGE, "pfnmap"))
    error = refused(c, EFAULT, lambda: c.map_dma(mm, addr, 0, 4 * PAGE), mm, match="not reserved")
    assert error.pfn == mm.page_at(addr).pfn
    registers = mm.mmap(4 * PAGE, PROT_READ, MAP_SHARED, File(mem, 4 * PAGE, "iomem"))
    refused(c, EFAULT, lambda: c.map_dma(mm, registers, 0, 4 * PAGE), mm)
    c.map_dma(mm, registers, 0, 4 * PAGE, READ)
    over(c, mm)


# ---- unmapping -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("options", GENERATIONS[:6], ids=lambda o: "-".join(map(str, o.values())))
@pytest.mark.parametrize("site", ["iommu_unmap", "alloc"])
@pytest.mark.parametrize("nth", [1, 2, 511, 512, 513, 514, 600])
def test_a_region_that_does_not_go_the_fast_way(options, site, nth):
    """600 regions: flushed at 512 and at the end; one that fails flushes what is queued, and then itself."""
    mem, mm = machine()
    addr, nr = scattered(mm)
    c = container(mem, **options)
    c.map_dma(mm, addr, 0, nr * PAGE)
    syncs = c.domains[0].stats["syncs"]
    assert injected(mem, site, nth, lambda: c.unmap_dma(0, nr * PAGE)) == nr * PAGE
    assert pins(mem) == mm.locked_vm == c.domains[0].stale == 0 and c.domains[0].stats["leaves"] == 0
    queued = (nth - 1) % 512
    after = nr - nth
    first = (nth - 1) // 512 + (queued > 0)         # full queues, and the rest before the one that failed
    assert c.domains[0].stats["syncs"] - syncs == first + 1 + after // 512 + (after % 512 > 0)
    over(c, mm)


@pytest.mark.parametrize("nr, flushes", [(1, 1), (511, 1), (512, 1), (513, 2), (1024, 2), (1025, 3)])
@pytest.mark.parametrize("remember", [True, False])
def test_a_flush_for_512_regions(nr, flushes, remember):
    mem, mm = machine()
    addr, _ = scattered(mm, nr)
    c = container(mem, 2, remember_runs=remember)
    c.map_dma(mm, addr, 0, nr * PAGE)
    before = [(d.stats["syncs"], d.stats["iova_to_phys"]) for d in c.domains]
    c.unmap_dma(0, nr * PAGE)
    after = [(d.stats["syncs"], d.stats["iova_to_phys"]) for d in c.domains]
    # The other domain goes first, and is flushed once. Without runs each page is asked for, and each end of a run again.
    assert [b[0] - a[0] for a, b in zip(before, after)] == [flushes, 1]
    assert [b[1] - a[1] for a, b in zip(before, after)] == [0 if remember else 2 * nr - 1, 0]
    over(c, mm)


@pytest.mark.parametrize("remember", [True, False])
def test_what_somebody_unmapped_behind_the_containers_back(remember):
    mem, mm = machine()
    addr = mapped(mm, 8 * PAGE)
    c = container(mem, 2, remember_runs=remember)
    c.map_dma(mm, addr, 0, 8 * PAGE)
    c.domains[0].unmap(3 * PAGE, 2 * PAGE)
    with pytest.raises(BadPage, match="behind the container's back") as caught:
        c.unmap_dma(0, 8 * PAGE)
    assert "2 pages from IOVA 0x3000" in str(caught.value)
    # The mapping is gone; what is known by its runs was unpinned.
    assert not c.mappings and c.dma_avail == 65535 and [d.stats["leaves"] for d in c.domains] == [0, 0]
    assert pins(mem) == (0 if remember else 2)


@pytest.mark.parametrize("release", RELEASES)
def test_pins_that_somebody_dropped_are_named(release):
    mem, mm = machine()
    addr = mapped(mm, 8 * PAGE)
    c = container(mem, release=release)
    c.map_dma(mm, addr, 0, 8 * PAGE)
    lost = mm.page_at(addr + 5 * PAGE)
    unpin_user_page(lost)
    with pytest.raises(BadPage, match="pin underflow") as caught:
        c.unmap_dma(0, 8 * PAGE)
    assert caught.value.pfn == lost.pfn and not c.mappings and pins(mem) == 0 and mm.locked_vm == 0
    mem.check()


def test_a_close_that_meets_lost_pins_is_finished_all_the_same():
    mem, mm = machine()
    addr = mapped(mm, 8 * PAGE)
    c = container(mem, 2)
    domains = c.domains
    c.map_dma(mm, addr, 0, 4 * PAGE)
    c.map_dma(mm, addr + 4 * PAGE, HUGE, 4 * PAGE)
    unpin_user_page(mm.page_at(addr))
    with pytest.raises(BadPage, match="pin underflow"):
        c.close()
    assert pins(mem) == mm.locked_vm == 0 and [d.stats["leaves"] for d in domains] == [0, 0]
    for domain in domains:
        VFIOContainer(mem).attach(domain)
    mem.check()
