"""A scatterlist as text: where its bytes are in the list, in physical memory, and in which segments.

Units: a table in, text out.
Raises: TypeError, InvalidArgument for a freed table.
Threads: one at a time a table.
Kernel: none.
"""
from .errors import InvalidArgument
from .scatterlist import SGTable
from .size import format_size

__all__ = ["sg_draw"]

# Letters for entries, in turn.
LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"


def _rows(cells, width):
    """Cut a list of strings into lines of at most width cells."""
    return [cells[i:i + width] for i in range(0, len(cells), width)] or [[]]


def _page_cells(entries, page):
    """Return [(letter, PFN)] of the pages of the list in its order."""
    cells = []
    for i, entry in enumerate(entries):
        if not entry["length"]:
            continue
        first = int(entry["pfn"]) + int(entry["offset"]) // page
        nr = -(-(int(entry["offset"]) % page + int(entry["length"])) // page)
        cells += [(LETTERS[i % len(LETTERS)], first + k) for k in range(nr)]
    return cells


def sg_draw(sgt, *, width=64, max_pages=1024):
    """Return a drawing of a table: the pages in the order of the list, then by PFN, then a line a segment.

    A letter is an entry of the CPU view, a dot a page between two that are not of the list (longer gaps are cut short).
    Segments of the DMA view follow when the table is mapped. Raises InvalidArgument beyond max_pages pages.
    """
    if not isinstance(sgt, SGTable):
        raise TypeError(f"an SGTable is wanted, not {sgt!r}")
    if width < 1:
        raise InvalidArgument(f"width {width}: a line has at least one page")
    entries = sgt.entries
    page = sgt.mem.page_size
    cpu = entries[:sgt.orig_nents]
    nr = sum(-(-(int(e["offset"]) % page + int(e["length"])) // page) for e in cpu if e["length"])
    if nr > max_pages:
        raise InvalidArgument(f"{nr} pages are too many to draw: raise max_pages={max_pages}, or sg_split() the list")
    cells = _page_cells(cpu, page)
    lines = []
    for row in _rows([letter for letter, _ in cells], width):
        lines.append("virtual   |" + "".join(row) + "|")
    physical, last = [], None
    for pfn, letter in sorted({pfn: letter for letter, pfn in cells}.items()):
        if last is None or pfn - last > 8:
            physical.append((pfn, []))
        elif pfn - last > 1:
            physical[-1][1].append("." * (pfn - last - 1))
        physical[-1][1].append(letter)
        last = pfn
    for pfn, row in physical:
        row = "".join(row)
        for k in range(0, len(row), width):
            lines.append(f"physical  |{row[k:k + width]}|  from PFN {pfn + k:#x}")
    for i, entry in enumerate(cpu):
        lines.append(f"segment   {LETTERS[i % len(LETTERS)]} {i}: PFN {int(entry['pfn']):#x} + {int(entry['offset'])}, "
                     f"{int(entry['length'])} bytes ({format_size(int(entry['length']))})")
    if sgt.mapped:
        for i, entry in enumerate(entries[:sgt.nents]):
            lines.append(f"dma       {i}: {int(entry['dma_address']):#x}, {int(entry['dma_length'])} bytes "
                         f"({format_size(int(entry['dma_length']))})")
    return "\n".join(lines)
