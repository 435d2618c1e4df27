#!/usr/bin/env python3
"""Measure the release of pinned page lists: the engine's generations, C peers, NumPy, and two threads.

One table: a line a variant, with its time a page, and what it must reach against which other variant.
"""
import argparse
import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT))     # after an installed one

from mmcore.bench import report, scaling, unpin  # noqa: E402
from mmcore.core.size import parse_size  # noqa: E402

SOURCE = Path(__file__).resolve().parent / "peers" / "unpin.c"


def options(argv):
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pages", help="pages of a list, as 4194304 or 4M (default: 4M; 256K with --quick)")
    parser.add_argument("--rounds", type=int, help="rounds, in each of which every variant runs once (default: 9; 3)")
    parser.add_argument("--quick", action="store_true", help="smaller lists and fewer rounds")
    parser.add_argument("--case", action="append", metavar="SUBSTR", help="only cases whose name contains this")
    parser.add_argument("--json", metavar="FILE", help="write the rows as JSON too; - writes them instead of the table")
    args = parser.parse_args(argv)
    try:
        args.pages = parse_size(args.pages or ("256K" if args.quick else "4M"))
    except ValueError as error:
        parser.error(f"--pages: {error}")
    args.rounds = (3 if args.quick else 9) if args.rounds is None else args.rounds
    if args.rounds < 1 or args.pages < 2:
        parser.error("at least 1 round and 2 pages")
    return parser, args


def chosen(cases, parts):
    """Return the cases whose name contains one of the parts; all without parts."""
    return [case for case in cases if not parts or any(part in case.name for part in parts)]


def main(argv=None):
    """Measure, print, and return the exit status."""
    parser, args = options(argv)
    singles, pairs = chosen(unpin.CASES, args.case), chosen(scaling.CASES, args.case)
    if not singles and not pairs:
        names = "\n  ".join(case.name for case in (*unpin.CASES, *scaling.CASES))
        parser.error(f"no case contains {args.case}; there are\n  {names}")
    rows = unpin.measure(singles, args.pages, args.rounds, SOURCE)
    if pairs and (os.cpu_count() or 1) < 2:
        print("one processor: cases with two threads are left out", file=sys.stderr)
    elif pairs:
        rows += scaling.measure(pairs, args.pages, args.rounds, unpin.load_peers(SOURCE),
                                0.05 if args.quick else scaling.REGION_SECONDS)
    report.show(rows, args.json, f"lists of {args.pages} pages, median of {args.rounds} rounds",
                ["\n" + unpin.PUBLISHED_WHY] if any(case.name == "order 9" for case in singles) else ())
    return 0


if __name__ == "__main__":
    sys.exit(main())
