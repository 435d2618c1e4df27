"""A capture as an engine: the same folios at the same PFNs."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from .pagemap import KPF_HUGE, KPF_NOPAGE, KPF_ZERO_PAGE, PM_FILE, PM_MMAP_EXCLUSIVE, has_flag
from .units import round_up

if TYPE_CHECKING:
    from ..core.memory import Memory
    from ..core.mm import MM
    from ..core.pagelist import PageList

FRAME_MULTIPLE = 4 << 20        # Memory sizes are whole largest buddy blocks
SPARE = 16 << 20                # for what the engine itself allocates (page tables, zero folio)
MAX_OTHERS = 64                 # address spaces that stand for other processes


@dataclass
class Replay:
    """An engine that holds a captured or modelled layout.

    `.mem` Memory, `.pages` PageList in buffer order with PFN 0 for holes, `.mm` the address
    space (None: frames only), `.others` address spaces that map what others map too, so that
    each page is mapped as often as the kernel counted (up to 64 of them), `.unmapped` the
    pages that it could not map as the process had them. Use as a context manager, or close().
    """

    mem: "Memory"
    pages: "PageList"
    mm: "MM | None" = None
    unmapped: int = 0
    others: "list[MM]" = field(default_factory=list)

    def close(self) -> None:
        """Free the engine. Raises what Memory.close() raises while views of it live."""
        self.pages = None  # type: ignore[assignment]
        self.mm = None
        self.others = []
        self.mem.close()

    def __enter__(self) -> "Replay":
        return self

    def __exit__(self, *_):
        self.close()


def replay(capture):
    """Claim every captured folio, whole, in a new Memory; returns Replay.

    Zero pages become the engine's own; frames without a struct page become holes, since
    no pin can hold them.
    """
    import mmcore

    pfns = capture.pfns.copy()
    pfns[has_flag(capture.flags, KPF_NOPAGE)] = 0
    zero = has_flag(capture.flags, KPF_ZERO_PAGE) & (pfns != 0)
    real = (pfns != 0) & ~zero
    heads, first = np.unique(capture.heads[real], return_index=True)
    orders = capture.orders[real][first]
    hugetlb = has_flag(capture.flags[real][first], KPF_HUGE)

    top = int(np.max(heads + (np.uint64(1) << orders.astype(np.uint64)), initial=0))
    size = round_up(top * capture.page_size, FRAME_MULTIPLE) + SPARE
    # Pools of no pages: the captured hugetlb folios are surplus, but their size can be mapped.
    sizes = {capture.page_size << int(order): 0 for order in np.unique(orders[hugetlb])}
    mem = mmcore.Memory(size, page_size=capture.page_size, hugetlb=sizes)
    try:
        # Real frames first: what the engine takes for itself then goes elsewhere.
        if len(heads):
            mmcore.folios_alloc_at(mem, heads, orders, hugetlb=hugetlb)
        if np.any(zero):
            small = zero & (capture.orders == 0)
            pfns[small] = mem.zero_page.pfn
            large = zero & ~small
            if np.any(large):
                inside = capture.pfns[large] - capture.heads[large]
                pfns[large] = np.uint64(mem.huge_zero_folio.pfn) + inside
        engine = Replay(mem, mmcore.PageList(mem, pfns))
        engine.mm, engine.others, engine.unmapped = address_space(capture, mem, pfns)
        return engine
    except BaseException:
        mem.close()
        raise


def address_space(capture, mem, pfns):
    """Map the claimed folios as the process had them: VMAs, leaves, exclusive pages; returns (MM, others, pages left
    out).

    Only what the capture looked at is mapped. A PMD leaf is drawn where smaps counts one for every place that could
    have one; the exclusive mark is set where pagemap says that nobody else maps the page. What is mapped more often
    than the capture shows is mapped by others as well, at the same address: whoever they are, they count.
    """
    import mmcore

    mm = mmcore.MM(mem)
    more = mapped_by_others(capture)
    # Forked while it is empty: anonymous pages may be mapped by relatives only.
    others = [mm.fork() for _ in range(min(int(np.max(more, initial=0)), MAX_OTHERS))]
    files = {}
    addresses = capture.addresses
    limit = (1 << 47) - mem.page_size
    for vma in capture.vmas:
        # Captured addresses are in ascending order; a buffer may start or end inside a mapping.
        first, last = np.searchsorted(addresses, [vma.start, vma.end])
        if first == last or vma.end > limit:
            continue
        part = slice(first, last)
        leaves = leaf_pages(capture, vma, first, last, mem)
        exclusive = (capture.words[part] & PM_MMAP_EXCLUSIVE) != 0
        anon = (capture.words[part] & PM_FILE) == 0
        largest = int(np.max(capture.orders[part], initial=0))
        map_pages(mm, vma, files, addresses[part], pfns[part], leaves, exclusive, anon, largest)
        for turn, other in enumerate(others):
            mine = more[part] > turn
            if not np.any(mine):
                break
            # Of a huge page that they do not share as a whole, others map pages.
            whole = leaves & ~np.isin(capture.heads[part], capture.heads[part][~mine]) | vma.hugetlb
            theirs = np.where(mine, pfns[part], np.uint64(0))
            map_pages(other, vma, files, addresses[part], theirs, whole, np.zeros(last - first, bool), anon, largest)
    present = pfns != 0
    mapped = np.zeros(len(pfns), bool)
    for start, stop in runs(addresses, mem.page_size):
        mapped[start:stop] = (mm.pagemap(int(addresses[start]), stop - start) >> np.uint64(63)) != 0
    return mm, others, int(np.count_nonzero(present & ~mapped))


def mapped_by_others(capture):
    """Return for each page how often it is mapped beyond what the capture shows; 0 where pagemap says that nobody else
    does."""
    _, back, own = np.unique(capture.pfns, return_inverse=True, return_counts=True)
    own = own[back.reshape(-1)].astype(np.int64)
    more = capture.mapcounts.astype(np.int64) - own
    no = (capture.pfns == 0) | has_flag(capture.flags, KPF_ZERO_PAGE) | has_flag(capture.flags, KPF_NOPAGE)
    return np.where(no, 0, np.maximum(more, 0))


def map_pages(mm, vma, files, addresses, pfns, leaves, exclusive, anon, largest):
    """Make a mapping in an address space, and put these pages there; largest: the order of the largest folio among
    them."""
    from mmcore.core.adopt import adopt

    map_like(mm, vma, files, largest)
    for start, stop in runs(addresses, mm.mem.page_size):
        adopt(mm, int(addresses[start]), pfns[start:stop], leaves[start:stop], exclusive[start:stop],
              anon[start:stop])


def map_like(mm, vma, files, file_order=0):
    """Map what a captured mapping was: anonymous memory, hugetlb, or a file that stands for the one it had.

    file_order: of the largest folio that may be in its cache.
    """
    import mmcore

    prot = sum(bit for letter, bit in zip("rwx", (1, 2, 4)) if letter in vma.perms)
    shared = vma.perms[3] == "s"
    flags = (mmcore.MAP_SHARED if shared else mmcore.MAP_PRIVATE) | mmcore.MAP_FIXED
    length = vma.end - vma.start
    file, offset = None, 0
    if vma.hugetlb:
        flags |= mmcore.MAP_NORESERVE           # the pool of a replay is empty: what is there is surplus
    if vma.hugetlb and not shared:
        flags |= mmcore.MAP_ANONYMOUS | mmcore.MAP_HUGETLB
        flags |= (vma.kernel_page_size.bit_length() - 1) << 26
    elif not vma.inode and not shared:
        flags |= mmcore.MAP_ANONYMOUS
    else:
        key, offset = (vma.dev, vma.inode), vma.offset
        memory = vma.path.startswith(("/dev/zero", "/memfd:", "/dev/shm", "/SYSV")) or not vma.inode
        if key not in files and vma.hugetlb:
            files[key] = mmcore.File(mm.mem, 0, "hugetlbfs", page_size=vma.kernel_page_size)
        elif key not in files:
            files[key] = mmcore.File(mm.mem, 0, "tmpfs" if memory else "ext4")
        file = files[key]
        if file.size < offset + length:
            # Folios may reach beyond the end of what is mapped.
            file.truncate(round_up(offset + length, mm.mem.page_size << file_order))
    mm.mmap(length, prot, flags, file=file, offset=offset, addr=vma.start)
    for letters, advice in (("hg", mmcore.MADV_HUGEPAGE), ("nh", mmcore.MADV_NOHUGEPAGE), ("dc", mmcore.MADV_DONTFORK)):
        if letters in vma.flags and not vma.hugetlb:
            mm.madvise(vma.start, length, advice)


def leaf_pages(capture, vma, first, last, mem):
    """Tell which captured pages of a mapping lie under a PMD leaf.

    A huge page can have one where it lies in line, whole inside of the mapping and without a hole; it has one when
    smaps counts as many as there are such places.
    """
    part = slice(first, last)
    if vma.hugetlb:
        return np.ones(last - first, bool)
    where, heads = capture.addresses[part], capture.heads[part]
    size = np.uint64(mem.page_size << mem.pmd_order)
    base = where // size * size
    inside = (where - base) // np.uint64(mem.page_size)
    lined_up = (capture.orders[part] == mem.pmd_order) & (capture.pfns[part] - heads == inside)
    lined_up &= (base >= vma.start) & (base + size <= vma.end)
    lined_up &= ~np.isin(base, base[~lined_up])
    # smaps does not count the huge zero page, which is never mapped by pages.
    zero = has_flag(capture.flags[part], KPF_ZERO_PAGE) & lined_up
    possible = len(np.unique(heads[lined_up & ~zero])) * int(size)
    return zero | lined_up & (0 < possible <= vma.huge)


def runs(addresses, page_size):
    """Return (start, stop) of the stretches of consecutive pages."""
    cuts = np.flatnonzero(np.diff(addresses) != page_size) + 1 if len(addresses) else np.zeros(0, int)
    edges = [0, *cuts.tolist(), len(addresses)]
    return [(a, b) for a, b in zip(edges, edges[1:]) if a < b]
