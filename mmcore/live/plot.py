"""Pictures as files, by matplotlib: PNG, SVG, or whatever else it writes by the name's ending."""

import math
import os

from .colours import CLASSES, INK, MARK, PAPER
from .errors import NotPossible
from .units import format_size

WIDTH, LEFT, RIGHT = 11, 1.15, 0.35           # inches
ROW, GRID_HEAD, STRIP_HEAD = 0.22, 0.62, 0.42 # inches: a row of a strip, what is written above a picture
LEGEND_COLUMNS = 5
NAME = 60                 # letters of a mapping's name
UNITS = 150               # width of a strip's row
STRIP_ROWS = 6            # rows of a strip at most; a longer one draws equal neighbours as one box, with their number
DPI = 150
FORMATS = (".png", ".svg", ".pdf")


def figure_class():
    """Return matplotlib's Figure. Raises NotPossible where matplotlib is missing."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise NotPossible("matplotlib is not installed, and pictures are drawn with it",
                          "pip install 'mmcore[plot]'") from None
    return Figure


def check_name(path):
    """Raise ValueError unless the name ends like a format that is written."""
    ending = os.path.splitext(os.fspath(path))[1].lower()
    if ending not in FORMATS:
        raise ValueError(f"a picture is a {', '.join(FORMATS)} file, not {os.fspath(path)!r}")


def draw(path, grid=None, strips=(), title="", marked=""):
    """Draw a Grid and Strips into a file.

    Raises NotPossible without matplotlib, ValueError for another ending, OSError.

    marked: what the marks in cells mean, for the legend.
    """
    check_name(path)
    Figure = figure_class()
    handles = legend(grid, strips, marked)
    legend_rows = -(-len(handles) // LEGEND_COLUMNS)
    heights = [max(2.0, min(8.0, 0.07 * grid.rows))] if grid else []
    heights += [ROW * len(layout(one)) for one in strips]
    gaps = ([GRID_HEAD] if grid else []) + [STRIP_HEAD] * len(strips)
    head = 0.5 + 0.24 * legend_rows
    total = head + sum(heights) + sum(gaps) + 0.3
    figure = Figure(figsize=(WIDTH, total), facecolor=PAPER)
    figure.text(LEFT / WIDTH, 1 - 0.16 / total, title, ha="left", va="top", color=INK, fontsize=9.5)
    figure.legend(handles=handles, loc="upper left", bbox_to_anchor=(LEFT / WIDTH - 0.008, 1 - 0.4 / total),
                  ncols=LEGEND_COLUMNS, fontsize=8.5, frameon=False, labelcolor=INK, columnspacing=1.6,
                  handlelength=1.4,
                  borderaxespad=0)
    top, pictures = total - head, [grid] * bool(grid) + list(strips)
    for one, height, gap in zip(pictures, heights, gaps):
        top -= gap + height
        axis = figure.add_axes((LEFT / WIDTH, top / total, (WIDTH - LEFT - RIGHT) / WIDTH, height / total))
        if one is grid:
            draw_grid(axis, one)
        else:
            draw_strip(axis, one)
    figure.savefig(path, dpi=DPI, facecolor=PAPER)


def draw_grid(axis, grid):
    """Draw cells with a ruler of physical addresses."""
    import numpy as np
    from matplotlib.colors import ListedColormap

    cells = np.zeros(grid.rows * grid.columns, np.uint8)
    cells[:len(grid.cells)] = grid.cells
    colours = ListedColormap([one.colour for one in CLASSES])
    axis.imshow(cells.reshape(grid.rows, grid.columns), cmap=colours, vmin=0, vmax=len(CLASSES) - 1,
                interpolation="nearest", aspect="auto", extent=(0, grid.columns, grid.rows, 0), zorder=0)
    if len(grid.cells) <= 20000:
        for column in range(1, grid.columns):
            axis.axvline(column, color=PAPER, linewidth=0.35)
        for row in range(1, grid.rows):
            axis.axhline(row, color=PAPER, linewidth=0.35)
    marked = np.flatnonzero(grid.marks)
    if len(marked):
        size = 2.5 + 12 * grid.marks[marked] / grid.cell_pages
        axis.scatter(marked % grid.columns + 0.5, marked // grid.columns + 0.5, s=size, marker="o", color=MARK,
                     edgecolors=PAPER, linewidths=0.3, zorder=3)
    step = max(1, 2 ** math.ceil(math.log2(max(1, grid.rows / 14))))
    rows = range(0, grid.rows, step)
    axis.set_yticks(list(rows), [place(grid.address(row)) for row in rows])
    parts = [grid.columns * part // 8 for part in range(9)]
    axis.set_xticks(parts, [f"+{format_size(part * grid.cell_bytes)}" if part else "+0" for part in parts])
    axis.xaxis.tick_top()
    style(axis)
    axis.set_title(f"physical memory: a cell is {format_size(grid.cell_bytes)}, a row "
                   f"{format_size(grid.cell_bytes * grid.columns)}; the colour is what most of the cell is",
                   loc="left", fontsize=9, color=INK, pad=8)


def layout(strip):
    """Lay a strip's boxes out in rows: list of rows of (x, Box); too many equal neighbours are one box."""
    for boxes in (list(strip.boxes) if strip.folios <= UNITS * STRIP_ROWS else None, strip.groups):
        if boxes is None:
            continue
        rows, x = [[]], 0
        for one in boxes:
            width = one.width + (2 + len(str(one.count)) if one.count > 1 else 0)
            if x + width > UNITS and rows[-1]:
                rows.append([])
                x = 0
            rows[-1].append((x, one))
            x += width + (1 if one.count > 1 else 0)
        if len(rows) <= STRIP_ROWS or boxes is strip.groups:
            return rows[:STRIP_ROWS]
    return []


def draw_strip(axis, strip):
    """Draw one box a folio with a ruler of addresses."""
    from matplotlib.patches import Rectangle

    rows = layout(strip)
    shown = sum(one.count for row in rows for _, one in row if one.order is not None)
    for at, row in enumerate(rows):
        for x, one in row:
            hole = one.order is None
            axis.add_patch(Rectangle((x + 0.06, at + 0.12), one.width - 0.12, 0.76, linewidth=0.4,
                                     facecolor=PAPER if hole else CLASSES[one.kind].colour,
                                     edgecolor="#999999" if hole else INK, hatch="////" if hole else None))
            if one.count > 1:
                axis.text(x + one.width + 0.25, at + 0.52, f"×{one.count}", fontsize=6.5, va="center", color=INK)
    axis.set_xlim(0, UNITS)
    axis.set_ylim(len(rows), 0)
    axis.set_xticks([])
    axis.set_yticks([at + 0.5 for at in range(len(rows))], [f"{row[0][1].address:x}" for row in rows])
    style(axis)
    more = "" if shown == strip.folios else f", the first {shown} drawn"
    name = strip.name or "anonymous"
    name = name if len(name) <= NAME else "…" + name[-NAME:]
    axis.set_title(f"{name}: {format_size(strip.end - strip.start)} in {strip.folios} folios{more}; "
                   "a box is a folio, one unit wider each time it doubles", loc="left", fontsize=9, color=INK)


def style(axis):
    """Leave only what is needed to read an axis."""
    axis.tick_params(labelsize=7.5, colors=INK, length=2, width=0.5)
    for spine in axis.spines.values():
        spine.set_linewidth(0.5)
        spine.set_color("#999999")


def legend(grid, strips, marked):
    """Return what says which colour is which class, with its size."""
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    used = {one.kind for strip in strips for one in strip.groups if one.order is not None}
    handles = []
    for kind, one in enumerate(CLASSES):
        if grid:
            label = f"{one.name}  {format_size(grid.totals[one.name] * grid.page_size)}"
        elif kind in used:
            label = one.name
        else:
            continue
        handles.append(Patch(facecolor=one.colour, edgecolor="#999999", linewidth=0.5, label=label))
    if any(one.order is None for strip in strips for one in strip.groups):
        handles.append(Patch(facecolor=PAPER, edgecolor="#999999", linewidth=0.5, hatch="////",
                             label="hole: not present"))
    if grid is not None and grid.marks.any():
        handles.append(Line2D([], [], linestyle="", marker="o", markersize=4, color=MARK, markeredgecolor=PAPER,
                              label=marked or "pointed at"))
    return handles


def place(address):
    """Return a physical address as a ruler shows it: "4 GiB", "4.25 GiB"."""
    return format_size(address) if address else "0"
