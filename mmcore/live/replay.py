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
    space (None: frames only). Use as a context manager, or close().
    """

    mem: object
    pages: object
    mm: object = None

    def close(self):
        """Free the engine. Raises what Memory.close() raises while views of it live."""
        self.pages = None
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
    mem = mmcore.Memory(size, page_size=capture.page_size)
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
        return Replay(mem, mmcore.PageList(mem, pfns))
    except BaseException:
        mem.close()
        raise
