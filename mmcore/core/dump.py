"""Struct pages as text, in the manner of the kernel's dump_page().

Units: PFNs, counts as in struct page.
Raises: TypeError, InvalidArgument.
Threads: any number at once; what is shown may change meanwhile.
Kernel: dump_page().
"""
import operator

import numpy as np

from .look import compound_head, folio_mapcount, page_to_pfn
from .page import FOLIO_DTYPE, PageFlags

__all__ = ["dump_page"]

FLAG_BITS = 0xffffff        # the kernel's own; above are zone numbers and the engine's marks
PLAIN = ("_mapcount", "_refcount")


def _raw(pages, mark):
    words = pages.view("<u8").reshape(-1, 4).tolist()
    return [f"{mark}: " + " ".join(f"{word:016x}" for word in row) for row in words]


def _second_page(mem, head):
    # An order-1 folio has two struct pages, the overlay four.
    return np.frombuffer(mem.pages[head:head + 2].tobytes().ljust(FOLIO_DTYPE.itemsize, b"\0"), FOLIO_DTYPE)[0]


def dump_page(page, reason=None):
    """Return what the kernel's dump_page() prints about a page, as text of several lines.

    refcount is the folio's, mapcount the page's; `mapping` is the number of a file or of a family of address spaces,
    since no field of mem_map is an address. A page that was never allocated says so. Raises as page_to_pfn(). Reads
    without locks: other threads may change what is read. Kernel: dump_page().
    """
    pfn, mem = page_to_pfn(page), page.mem
    because = [f"page dumped because: {reason}"] if reason else []
    if pfn >= len(mem.pages):
        return "\n".join([f"page: pfn:{pfn:#x} was never used"] + because)
    head = page_to_pfn(compound_head(page))
    folio, fields, own = mem.folio(head), mem.pages[head], mem.pages[pfn]
    lines = [f"page: refcount:{folio.refcount} mapcount:{page.mapcount} mapping:{int(fields['mapping']):016x} "
             f"index:{int(fields['index']) + pfn - head:#x} pfn:{pfn:#x}"]
    if folio.order:
        second = _second_page(mem, head)
        lines.append(f"head: order:{folio.order} mapcount:{folio_mapcount(folio)} "
                     f"entire_mapcount:{second['_entire_mapcount'] + 1} "
                     f"nr_pages_mapped:{second['_nr_pages_mapped']} pincount:{second['_pincount']}")
    flags = int(own["flags"])
    names = "|".join(flag.name for flag in PageFlags if flags & flag & FLAG_BITS)
    lines.append(f"{'anon ' if int(fields['mapping']) & 1 else ''}flags: {flags:#x}({names})")
    lines += _raw(mem.pages[pfn:pfn + 1], "raw")
    if folio.order:
        lines += _raw(mem.pages[head:head + 2], "head")
    return "\n".join(lines + because)


def dump_around(mem, pfn, reach=1):
    """Return the folio of a PFN, the page itself, and `reach` struct pages on each side of the folio, one line each."""
    pfn = operator.index(pfn)
    if not mem.pfn_valid(pfn):
        return f"pfn {pfn:#x}: no struct page here; the last one is {mem.nr_pages - 1:#x}"
    folio = mem.page(pfn).folio
    start, end = folio.pfn, folio.pfn + max(folio.nr_pages, 1)
    what = {start - step: "before" for step in range(1, reach + 1)} | {end - 1 + step: "after"
                                                                       for step in range(1, reach + 1)}
    what |= {at: "tail" for at in range(start, min(start + 1 + reach, end))} | {pfn: "page", start: "head"}
    lines = [repr(folio)]
    for at in sorted(at for at in what if mem.pfn_valid(at)):
        text = "never used"
        if at < len(mem.pages):
            fields = mem.pages[at]
            text = " ".join(f"{name}={int(fields[name]):{'d' if name in PLAIN else '#x'}}" for name in
                            ("flags", "compound_info", "mapping", "index", "private", *PLAIN))
        lines.append(f"  {what[at]:<6} pfn {at:#x}: {text}")
    return "\n".join(lines)
