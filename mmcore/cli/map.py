"""
Draw physical memory: a cell for each block of frames, coloured by what most of it is used for, and for a process one
box a folio, wider the larger it is. On the terminal, and with -o as PNG or SVG (matplotlib). Without colours
(NO_COLOR, or piped) classes are letters.
"""

import itertools
import os
import shutil
import sys

from .output import print_json
from .progress import progress
from .register import _size
from .target import add_target, describe, existing_folder, heading, open_target

HELP = "a picture of physical memory, and of a buffer folio by folio"
RULER = 10            # characters of the address before a row


def add_arguments(parser):
    """Declare the options of the verb."""
    add_target(parser, required=False, otherwise="; without it this machine's memory")
    parser.add_argument("--cell", type=cell, metavar="page|block|SIZE",
                        help="what a cell stands for (default: as fits)")
    parser.add_argument("--pfns", metavar="ADDR-SPEC", help="only these frames: N+M, N,M, N, or ,M as in types")
    parser.add_argument("--columns", type=columns, help="cells a row (default: 64, 128 with -o)")
    parser.add_argument("--strip", action="store_true", help="only the process, folio by folio")
    parser.add_argument("-o", "--output", metavar="FILE", help="write a .png, .svg or .pdf file instead")


def run(args):
    """Look, and draw."""
    from mmcore.live import picture, plot
    from mmcore.live.types import parse_addresses

    first, last = 0, None
    if args.pfns is not None:
        try:
            first, last = parse_addresses(args.pfns)
        except ValueError as error:
            args.usage_error(str(error))
    if args.strip and args.target is None:
        args.usage_error("--strip needs a PID or a file")
    if args.output:
        try:
            plot.check_name(args.output)
        except ValueError as error:
            args.usage_error(str(error))
        existing_folder(args.output)
        plot.figure_class()
    taken = look(args)
    wide = args.columns or (128 if args.output else fitting())
    grid, strips = None, []
    if not args.strip:
        flags = taken.frames.flags if taken.frames is not None else picture.captured_flags(taken)
        zones = taken.machine.zones if taken.frames is not None else ()
        if taken.frames is None and args.pfns is None:
            first = int(taken.pfns[taken.pfns != 0].min())
        grid = picture.grid(flags, taken.page_size, zones, first, last, args.cell, wide,
                            128 if args.output else picture.ROWS, taken.pfns if taken.frames is not None else ())
    if taken.pid:
        strips = picture.strips(taken, 8 if args.strip else 4)
    if args.json:
        print_json({**heading(taken), "grid": grid and grid.as_dict(), "strips": [one.as_dict() for one in strips]})
    if args.output:
        plot.draw(args.output, grid, strips, describe(taken), f"holds pages of process {taken.pid}")
        if not args.json:
            print(f"{args.output}")
    elif not args.json:
        Terminal().draw(taken, grid, strips)


def look(args):
    """Return the Capture to draw."""
    from mmcore.live.capture import capture

    if args.target is None:
        if args.addr is not None or args.vma is not None:
            args.usage_error("--addr, --length and --vma choose a part of a process: they need a PID")
        with progress() as show:
            return capture("memory", progress=show)
    return open_target(args, memory=not args.strip)


class Terminal:
    """Draws with coloured cells on a terminal that wants colours, with letters elsewhere."""

    def __init__(self):
        self.console = None
        if sys.stdout.isatty() and not os.environ.get("NO_COLOR"):
            try:
                from rich.console import Console
            except ImportError:
                return
            console = Console(highlight=False)
            self.console = console if console.color_system else None

    def line(self, before, cells):
        """Print a line: text, then (class, text) cells."""
        from mmcore.live.colours import CLASSES

        if self.console is None:
            print((before + "".join(text for _, text in cells)).rstrip())
            return
        from rich.text import Text

        row = Text(before)
        for (kind, marked), some in itertools.groupby(cells, key=lambda cell: (cell[0], cell[1] == "*")):
            text = "".join(part for _, part in some)
            if kind is None:
                row.append(text)
            else:
                colour = CLASSES[kind].colour
                row.append(text if marked else " " * len(text), f"bold {contrast(colour)} on {colour}")
        self.console.print(row, soft_wrap=True)

    def draw(self, taken, grid, strips):
        """Draw everything."""
        print(describe(taken))
        for text in taken.partial:
            print(f"partial: {text}")
        if grid is not None:
            print()
            self.draw_grid(grid, taken)
        for one in strips:
            print()
            self.draw_strip(one)
        print()
        self.legend(grid, strips, taken)

    def draw_grid(self, grid, taken):
        """Draw the cells of physical memory, with rulers."""
        from mmcore.live.plot import place
        from mmcore.live.units import format_size

        print(f"physical memory, a cell is {format_size(grid.cell_bytes)}, "
              f"a row {format_size(grid.cell_bytes * grid.columns)}")
        quarter = max(8, grid.columns // 4)
        ticks = "".join(f"{'|+' + format_size(at * grid.cell_bytes).replace('iB', '').replace(' ', ''):<{quarter}}"
                        if at else f"{'|':<{quarter}}" for at in range(0, grid.columns, quarter))
        print(f"{'':{RULER}}{ticks[:grid.columns + quarter].rstrip()}")
        letters = grid.letters()
        for row, text in enumerate(letters):
            kinds = grid.cells[row * grid.columns:(row + 1) * grid.columns]
            self.line(f"{place(grid.address(row)):>{RULER - 1}} ", list(zip(kinds.tolist(), text)))

    def draw_strip(self, strip):
        """Draw a mapping as boxes: as many letters as its width, "x12" after twelve equal ones."""
        from mmcore.live.colours import CLASSES
        from mmcore.live.units import format_size

        print(f"{strip.start:x}-{strip.end:x} {strip.name or 'anonymous'}: {format_size(strip.end - strip.start)} in "
              f"{strip.folios} folios; a box is a folio, one wider each time it doubles")
        room, cells, used, lines = shutil.get_terminal_size((100, 24)).columns - 14, [], 0, 0
        start = strip.start
        for one in strip.groups:
            letter = "-" if one.order is None else CLASSES[one.kind].letter
            kind = None if one.order is None else one.kind
            tail = f"x{one.count} " if one.count > 1 else " "
            if one.order is None:
                tail = f"x{one.pages} " if one.pages > 1 else " "
            if cells and used + one.width + len(tail) > room:
                if lines == ROWS_OF_A_STRIP - 1:
                    cells.append((None, "..."))
                    break
                self.line(f"{start:12x}  ", cells)
                cells, used, start, lines = [], 0, one.address, lines + 1
            cells += [(kind, letter * one.width), (None, tail)]
            used += one.width + len(tail)
        self.line(f"{start:12x}  ", cells)

    def legend(self, grid, strips, taken):
        """Say what the colours and letters mean."""
        from mmcore.live.colours import CLASSES
        from mmcore.live.units import format_size

        used = {one.kind for strip in strips for one in strip.groups if one.order is not None}
        for kind, one in enumerate(CLASSES):
            if grid is None and kind not in used:
                continue
            size = format_size(grid.totals[one.name] * grid.page_size) if grid else ""
            letter = "blank" if one.letter == " " else one.letter
            swatch = [] if self.console is None else [(kind, "  "), (None, " ")]
            self.line(f"{letter:>5} ", swatch + [(None, f"{one.name:<10} {size:>10}  {one.meaning}".rstrip())])
        blank = "" if self.console is None else "   "
        if grid is not None and grid.marks.any():
            print(f"{'*':>5} {blank}an eighth of the cell and more is process {taken.pid}'s")
        if any(one.order is None for strip in strips for one in strip.groups):
            print(f"{'-':>5} {blank}not present")


ROWS_OF_A_STRIP = 8


def contrast(colour):
    """Return black or white, whichever is read better on a colour."""
    red, green, blue = (int(colour[at:at + 2], 16) for at in (1, 3, 5))
    return "#000000" if 0.299 * red + 0.587 * green + 0.114 * blue > 140 else "#ffffff"


def fitting():
    """Return the cells a row of the terminal takes: a power of two."""
    room = shutil.get_terminal_size((100, 24)).columns - RULER
    return max(16, 1 << (max(16, min(room, 128)).bit_length() - 1))


def cell(text):
    """Return the bytes of a cell."""
    import mmap

    return {"page": mmap.PAGESIZE, "block": 2 << 20}.get(text) or _size(text)


def columns(text):
    """Return a number of cells a row."""
    import argparse

    from .register import _positive

    value = _positive(text)
    if not 8 <= value <= 1024:
        raise argparse.ArgumentTypeError(f"8 to 1024 cells a row, not {value}")
    return value
