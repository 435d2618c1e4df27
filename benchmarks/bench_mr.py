#!/usr/bin/env python3
"""Measure memory registration: generations against each other, and fixed buffers against the running kernel's io_uring.

One table: a line a variant, with its time a page, and what it must reach against which other variant.
"""
import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT))     # after an installed one

from mmcore.bench import mr, report  # noqa: E402
from mmcore.core.size import format_size, parse_size  # noqa: E402


def main(argv=None):
    """Measure, print, and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", help="bytes of the region (default: 1G; 64M with --quick)")
    parser.add_argument("--rounds", type=int, help="rounds, in each of which every variant runs once (default: 15; 3)")
    parser.add_argument("--quick", action="store_true", help="a smaller region and fewer rounds")
    parser.add_argument("--case", action="append", metavar="SUBSTR", help="only cases whose name contains this")
    parser.add_argument("--json", metavar="FILE", help="write the rows as JSON too; - writes them instead of the table")
    args = parser.parse_args(argv)
    try:
        size = parse_size(args.size or ("64M" if args.quick else "1G"))
    except ValueError as error:
        parser.error(f"--size: {error}")
    rounds = (3 if args.quick else 15) if args.rounds is None else args.rounds
    if rounds < 1 or size < 2 << 20 or size % (2 << 20):
        parser.error("at least 1 round, and a multiple of 2M")
    names = [name for name in mr.CASES if not args.case or any(part in name for part in args.case)]
    if not names:
        parser.error(f"no case contains {args.case}; there are {', '.join(mr.CASES)}")
    rows = mr.measure(names, size, rounds)
    report.show(rows, args.json, f"a region of {format_size(size)}, median of {rounds} rounds")
    return 0


if __name__ == "__main__":
    sys.exit(main())
