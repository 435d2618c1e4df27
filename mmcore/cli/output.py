"""How verbs print: JSON, aligned plain text, or rich tables on a terminal."""

import json
import sys


def print_json(data):
    """Print data as JSON, indented, keys in their own order."""
    print(json.dumps(data, indent=2))


def print_fields(fields):
    """Print (name, text) pairs in two columns; an empty name goes on with the one before."""
    width = max(len(name) for name, _ in fields)
    for name, text in fields:
        print(f"{name:<{width}}  {text}")


def print_table(headers, rows, left=(0,)):
    """Print rows of text under headers: the columns `left` to the left, the others to the right.

    A rich table where stdout is a terminal and rich is installed, else plain text.
    """
    if sys.stdout.isatty():
        try:
            _print_rich(headers, rows, left)
            return
        except ImportError:
            pass
    for line in plain_table(headers, rows, left):
        print(line)


def plain_table(headers, rows, left=(0,)):
    """Return the lines of a table in plain text, columns two spaces apart."""
    widths = [max(len(cell) for cell in column) for column in zip(headers, *rows)]
    lines = []
    for row in (headers, *rows):
        cells = [cell.ljust(width) if at in left else cell.rjust(width)
                 for at, (cell, width) in enumerate(zip(row, widths))]
        lines.append("  ".join(cells).rstrip())
    return lines


def _print_rich(headers, rows, left):
    from rich import box
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for number, header in enumerate(headers):
        table.add_column(header, justify="left" if number in left else "right", no_wrap=number not in left[1:],
                         overflow="fold")
    for row in rows:
        table.add_row(*map(escape, row))
    # rich honours NO_COLOR by itself.
    Console(highlight=False).print(table)
