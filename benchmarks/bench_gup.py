#!/usr/bin/env python3
"""Measure the acquiring of pages: generations, outputs, walks, longterm check; C peers and the running kernel beside them.

One table: a line a variant, with its time a page, and what it must reach against which other variant.
"""
import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT))     # after an installed one

from mmcore.bench import gup, report  # noqa: E402
from mmcore.core.size import format_size, parse_size  # noqa: E402

SOURCE = Path(__file__).resolve().parent / "peers" / "gup.c"


def options(argv):
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", help="bytes of the buffers in 2 MiB leaves (default: 16G; 1G with --quick); the flat "
                                       "cases go from a sixteenth of it to four times as much")
    parser.add_argument("--base-size", help="bytes of the buffers in base pages (default: 1G; 128M with --quick)")
    parser.add_argument("--rounds", type=int, help="rounds, in each of which every variant runs once (default: 9; 3)")
    parser.add_argument("--quick", action="store_true", help="smaller buffers and fewer rounds")
    parser.add_argument("--case", action="append", metavar="SUBSTR", help="only cases whose name contains this")
    parser.add_argument("--json", metavar="FILE", help="write the rows as JSON too; - writes them instead of the table")
    args = parser.parse_args(argv)
    try:
        args.size = parse_size(args.size or ("1G" if args.quick else "16G"))
        args.base_size = parse_size(args.base_size or ("128M" if args.quick else "1G"))
    except ValueError as error:
        parser.error(str(error))
    args.rounds = (3 if args.quick else 9) if args.rounds is None else args.rounds
    if args.rounds < 1 or args.size < 64 << 20 or args.size % (32 << 20) or args.base_size < 2 << 20 or args.base_size % 4096:
        parser.error("at least 1 round; --size a multiple of 32M, 64M or more; --base-size of whole pages, 2M or more")
    return parser, args


def main(argv=None):
    """Measure, print, and return the exit status."""
    parser, args = options(argv)
    names = [name for name in gup.CASES if not args.case or any(part in name for part in args.case)]
    if not names:
        parser.error(f"no case contains {args.case}; there are\n  " + "\n  ".join(gup.CASES))
    rows = gup.measure(names, args.size, args.base_size, args.rounds, SOURCE)
    report.show(rows, args.json, f"buffers of {format_size(args.size)} and {format_size(args.base_size)}, median of {args.rounds} rounds",
                ["\n" + gup.PUBLISHED_WHY] if any("device" in name for name in names) else ())
    return 0


if __name__ == "__main__":
    sys.exit(main())
