"""A capture as an engine: the same folios at the same PFNs."""

from dataclasses import dataclass

import numpy as np

from .pagemap import KPF_HUGE, KPF_NOPAGE, KPF_ZERO_PAGE, has_flag
from .units import round_up

FRAME_MULTIPLE = 4 << 20        # Memory sizes are whole largest buddy blocks
SPARE = 16 << 20                # for what the engine itself allocates (page tables, zero folio)


@dataclass
class Replay:
    """An engine that holds a captured or modelled layout.

    `.mem` Memory, `.pages` PageList in buffer order with PFN 0 for holes, `.mm` the address
    space (None: frames only), `.unmapped` the pages that it could not map as the process
    had them. Use as a context manager, or close().
    """

    mem: object
    pages: object
    mm: object = None
    unmapped: int = 0

    def close(self):
        """Free the engine. Raises what Memory.close() raises while views of it live."""
        self.pages = None
        self.mm = None
        self.mem.close()

    def __enter__(self):
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
        engine.mm, engine.unmapped = address_space(capture, mem, pfns)
        return engine
    except BaseException:
        mem.close()
        raise


def address_space(capture, mem, pfns):
    """Map the claimed folios as the process had them: VMAs, leaves, exclusive pages; returns (MM, pages left out).

    Only what the capture looked at is mapped. A PMD leaf is drawn where smaps counts one for every place that could have
    one; the exclusive mark is set where pagemap says that nobody else maps the page. How often others map a page is in
    capture.mapcounts; they are not made up here.
    """
    import mmcore
    from mmcore.core.adopt import adopt

    mm = mmcore.MM(mem)
    files = {}
    addresses = capture.addresses
    limit = (1 << 47) - mem.page_size
    for vma in capture.vmas:
        # Captured addresses are in ascending order; a buffer may start or end inside a mapping.
        first, last = np.searchsorted(addresses, [vma.start, vma.end])
        if first == last or vma.end > limit:
            continue
        where = addresses[first:last]
        map_like(mm, vma, files)
        leaves = leaf_pages(capture, vma, first, last, mem)
        exclusive = (capture.words[first:last] >> np.uint64(56)) & np.uint64(1)
        for start, stop in runs(where, mem.page_size):
            adopt(mm, int(where[start]), pfns[first:last][start:stop], leaves[start:stop], exclusive[start:stop])
    present = pfns != 0
    mapped = np.zeros(len(pfns), bool)
    for start, stop in runs(addresses, mem.page_size):
        mapped[start:stop] = (mm.pagemap(int(addresses[start]), stop - start) >> np.uint64(63)) != 0
    return mm, int(np.count_nonzero(present & ~mapped))


def map_like(mm, vma, files):
    """Map what a captured mapping was: anonymous memory, hugetlb, or a file that stands for the one it had."""
    import mmcore

    prot = sum(bit for letter, bit in zip("rwx", (1, 2, 4)) if letter in vma.perms)
    shared = vma.perms[3] == "s"
    flags = (mmcore.MAP_SHARED if shared else mmcore.MAP_PRIVATE) | mmcore.MAP_FIXED
    length = vma.end - vma.start
    file, offset = None, 0
    if vma.hugetlb and not shared:
        flags |= mmcore.MAP_ANONYMOUS | mmcore.MAP_HUGETLB | mmcore.MAP_NORESERVE
        flags |= (vma.kernel_page_size.bit_length() - 1) << 26
    elif not vma.inode and not shared:
        flags |= mmcore.MAP_ANONYMOUS
    else:
        key, offset = (vma.dev, vma.inode), vma.offset
        memory = vma.path.startswith(("/dev/zero", "/memfd:", "/dev/shm", "/SYSV")) or not vma.inode
        if key not in files:
            files[key] = mmcore.File(mm.mem, 0, "tmpfs" if memory else "ext4")
        file = files[key]
        if file.size < offset + length:
            file.truncate(offset + length)
    mm.mmap(length, prot, flags, file=file, offset=offset, addr=vma.start)
    for letters, advice in (("hg", mmcore.MADV_HUGEPAGE), ("nh", mmcore.MADV_NOHUGEPAGE), ("dc", mmcore.MADV_DONTFORK)):
        if letters in vma.flags and not vma.hugetlb:
            mm.madvise(vma.start, length, advice)


def leaf_pages(capture, vma, first, last, mem):
    """Tell which captured pages of a mapping lie under a PMD leaf."""
    order = mem.pmd_order
    where = capture.addresses[first:last]
    inside = (where // np.uint64(mem.page_size)) & np.uint64((1 << order) - 1)
    lined_up = (capture.orders[first:last] == order) & (capture.pfns[first:last] - capture.heads[first:last] == inside)
    possible = len(np.unique(capture.heads[first:last][lined_up])) * (mem.page_size << order)
    if vma.hugetlb:
        return np.ones(last - first, bool)
    return lined_up & (0 < possible <= vma.huge)


def runs(addresses, page_size):
    """Return (start, stop) of the stretches of consecutive pages."""
    cuts = np.flatnonzero(np.diff(addresses) != page_size) + 1 if len(addresses) else np.zeros(0, int)
    edges = [0, *cuts.tolist(), len(addresses)]
    return [(a, b) for a, b in zip(edges, edges[1:]) if a < b]
