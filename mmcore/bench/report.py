"""Rows as a table of text, and as JSON."""
import json
import os
import platform
import sys

import numpy

import mmcore
from mmcore.core.page import CYTHON_VERSION


def machine():
    """Return one line that says what this was measured on."""
    model = platform.processor() or platform.machine()
    try:
        with open("/proc/cpuinfo") as info:
            model = next((line.split(":", 1)[1].strip() for line in info if line.startswith("model name")), model)
    except OSError:
        pass
    return (f"{model}, {os.cpu_count()} processors, {platform.system()} {platform.release()}, Python {platform.python_version()}, "
            f"Cython {CYTHON_VERSION}, NumPy {numpy.__version__}, mmcore {mmcore.__version__}")


def number(value):
    """Format nanoseconds with three digits that count."""
    if value is None:
        return "-"
    return f"{value:.3f}" if value < 1 else f"{value:.2f}" if value < 100 else f"{value:.0f}"


def _lines(row):
    """Return the cells of a row: one line, and one more for each further bar."""
    data = row.as_dict()
    mad = "" if row.shown else number(data["mad"] and data["mad"] / row.entries)
    bars = row.bars or [None]
    for k, bar in enumerate(bars):
        value = row.shown or number(data["ns_per_page"])
        cells = [row.case, row.variant, value, mad] if k == 0 else ["", "", "", ""]
        if bar is None:
            cells += ["", "", "", row.missing or row.note]
        else:
            ratio = "-" if bar["ratio"] is None else f"{bar['ratio']:.2f}"
            ratio += "" if bar["spread"] is None else f" ±{bar['spread']:.2f}"
            met = {True: "yes", False: "NO", None: "" if bar["ratio"] is not None else "not measured"}[bar["met"]]
            cells += [bar["against"], ratio, bar["bar"], met + (" " if met and bar["note"] else "") + bar["note"]]
        yield cells


HEAD = ("case", "variant", "ns/page", "mad", "against", "ratio", "must reach", "met")
RIGHT = {2, 3, 5}           # columns of numbers


_ALL = range(len(HEAD))


def table(rows, head=HEAD, columns=_ALL):
    """Return the rows as aligned text, some columns of them; a case is named once."""
    lines, last = [list(head)], None
    for row in rows:
        for cells in _lines(row):
            if cells[0] and cells[0] == last:
                cells[0] = ""
            last = cells[0] or last
            lines.append(cells)
    widths = {k: max(len(line[k]) for line in lines) for k in columns}
    text = []
    for line in lines:
        cells = [line[k].rjust(widths[k]) if k in RIGHT else line[k].ljust(widths[k]) for k in columns]
        text.append("  ".join(cells).rstrip())
    text.insert(1, "  ".join("-" * width for width in widths.values()))
    return "\n".join(text)


def verdict(rows):
    """Return the sentences that say how many bars are met, and which are not."""
    bars = [(row, bar) for row in rows for bar in row.bars if bar["bar"]]
    measured = [(row, bar) for row, bar in bars if bar["met"] is not None]
    missed = [(row, bar) for row, bar in measured if not bar["met"]]
    text = f"{len(measured) - len(missed)} of {len(measured)} bars met"
    if len(measured) < len(bars):
        text += f", {len(bars) - len(measured)} not measured"
    lines = [text + "."]
    for row, bar in missed:
        against = f" against {bar['against']}" if bar["against"] else ""
        lines.append(f"  missed: {row.case}, {row.variant}{against}: {bar['ratio']:.2f}, must reach {bar['bar']}")
    return "\n".join(lines)


def write_json(rows, where):
    """Write the rows as a JSON list to a file, or to standard output for "-"."""
    text = json.dumps([row.as_dict() for row in rows], indent=1) + "\n"
    if where == "-":
        sys.stdout.write(text)
    else:
        with open(where, "w") as out:
            out.write(text)


def show(rows, where, heading, notes=(), **columns):
    """Write rows as JSON where asked to, and print them: machine, heading, table, verdict, notes. JSON on standard output is alone."""
    if where:
        write_json(rows, where)
    if where != "-":
        print(f"{machine()}\n{heading}\n")
        print(table(rows, **columns))
        print("\n" + verdict(rows))
        for note in notes:
            print(note)


def progress(text):
    """Say on a terminal what is being measured."""
    if sys.stderr.isatty():
        print(f"... {text}", file=sys.stderr)
