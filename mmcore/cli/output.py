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


def print_table(headers, rows):
    """Print rows of text under headers: the first column to the left, the others to the right.

    A rich table where stdout is a terminal and rich is installed, else plain text.
    """
    if sys.stdout.isatty():
        try:
            _print_rich(headers, rows)
            return
        except ImportError:
            pass
    for line in plain_table(headers, rows):
        print(line)


def plain_table(headers, rows):
    """Return the lines of a table in plain text, columns two spaces apart."""
    widths = [max(len(cell) for cell in column) for column in zip(headers, *rows)]
    lines = []
    for row in (headers, *rows):
        cells = [row[0].ljust(widths[0])]
        cells += [cell.rjust(width) for cell, width in zip(row[1:], widths[1:])]
        lines.append("  ".join(cells).rstrip())
    return lines


def _print_rich(headers, rows):
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for number, header in enumerate(headers):
        table.add_column(header, justify="right" if number else "left", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    # rich honours NO_COLOR by itself.
    Console(highlight=False).print(table)
