#!/usr/bin/env python3
"""Measure scatterlists: building from page lists, the sink that takes leaves, copies, page walks; C peers beside.

One table: a line a variant, with its time a page, and what it must reach against which other variant or in ns.
"""
import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT))     # after an installed one

from mmcore.bench import report, sg  # noqa: E402
from mmcore.core.size import parse_size  # noqa: E402

FOLDER = Path(__file__).resolve().parent / "peers"


def main(argv=None):
    """Measure, print, and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pages", help="pages of a list, as 4194304 or 4M (default: 4M; 256K with --quick)")
    parser.add_argument("--rounds", type=int, help="rounds, in each of which every variant runs once (default: 9; 3)")
    parser.add_argument("--quick", action="store_true", help="smaller lists and fewer rounds")
    parser.add_argument("--case", action="append", metavar="SUBSTR", help="only cases whose name contains this")
    parser.add_argument("--json", metavar="FILE", help="write the rows as JSON too; - writes them instead of the table")
    args = parser.parse_args(argv)
    try:
        pages = parse_size(args.pages or ("256K" if args.quick else "4M"))
    except ValueError as error:
        parser.error(f"--pages: {error}")
    rounds = (3 if args.quick else 9) if args.rounds is None else args.rounds
    if rounds < 1 or pages < 1024 or pages % 1024:
        parser.error("at least 1 round, and a multiple of 1024 pages")
    names = [name for name in sg.CASES if not args.case or any(part in name for part in args.case)]
    if not names:
        parser.error(f"no case contains {args.case}; there are {', '.join(sg.CASES)}")
    rows = sg.measure(names, pages, rounds, FOLDER)
    report.show(rows, args.json, f"lists of {pages} pages, median of {rounds} rounds",
                ["\n" + sg.SHUFFLED_NOTE] if "copies" in names else ())
    return 0


if __name__ == "__main__":
    sys.exit(main())
