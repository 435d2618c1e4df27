#!/usr/bin/env python3
"""Measure VFIO mapping: generations of pinning and releasing against the oldest, with the published ratios beside.

One table: a line a variant, with its time a page, and what it must reach against which other variant.
"""
import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT))

from mmcore.bench import report, vfio  # noqa: E402
from mmcore.core.size import format_size, parse_size  # noqa: E402


def options(argv):
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", help="bytes of the buffers in 2 MiB folios (default: 16G; 4G with --quick)")
    parser.add_argument("--base-size", help="bytes of the buffer in 4 KiB pages, of which a quarter is scattered too (default: 4G; 256M)")
    parser.add_argument("--gigantic", help="bytes of the buffer in 1 GiB pages (default: 256G; 4G)")
    parser.add_argument("--rounds", type=int, help="rounds, in each of which every variant runs once (default: 9; 5)")
    parser.add_argument("--quick", action="store_true", help="smaller buffers and fewer rounds")
    parser.add_argument("--case", action="append", metavar="SUBSTR", help="only cases whose name contains this")
    parser.add_argument("--json", metavar="FILE", help="write the rows as JSON too; - writes them instead of the table")
    args = parser.parse_args(argv)
    try:
        args.size = parse_size(args.size or ("4G" if args.quick else "16G"))
        args.base_size = parse_size(args.base_size or ("256M" if args.quick else "4G"))
        args.gigantic = parse_size(args.gigantic or ("4G" if args.quick else "256G"))
    except ValueError as error:
        parser.error(str(error))
    args.rounds = (5 if args.quick else 9) if args.rounds is None else args.rounds
    units = ((args.size, 2 << 20), (args.base_size, 8 << 20), (args.gigantic, 1 << 30))
    if args.rounds < 1 or any(size < part or size % part for size, part in units):
        parser.error("at least 1 round; --size a multiple of 2M, --base-size of 8M, --gigantic of 1G")
    args.names = [name for name in vfio.CASES if not args.case or any(part in name for part in args.case)]
    if not args.names:
        parser.error(f"no case contains {args.case}; there are {', '.join(vfio.CASES)}")
    return args


def main(argv=None):
    """Measure, print, and return the exit status."""
    args = options(argv)
    rows = vfio.measure(args.names, args.size, args.base_size, args.gigantic, args.rounds)
    report.show(rows, args.json, f"{format_size(args.size)} in 2 MiB folios, {format_size(args.base_size)} in 4 KiB pages, median of "
                                 f"{args.rounds} rounds; \"asking\": iova_to_phys for every page, as the kernel does")
    return 0


if __name__ == "__main__":
    sys.exit(main())
