#!/usr/bin/env python3
"""Measure captures of a live machine against the raw read()s of the same files, interleaved.

All of memory must cost no more than 1.15 of the raw reads. A buffer is read at least twice, to see that it held still.
"""
import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT))     # after an installed one

from mmcore.bench import capture, report  # noqa: E402
from mmcore.core.size import parse_size  # noqa: E402


def main(argv=None):
    """Measure, print, and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="256M", help="bytes of the buffers (default 256M)")
    parser.add_argument("--rounds", type=int, default=5,
                        help="rounds, in each of which every variant runs once (default 5)")
    parser.add_argument("--json", metavar="FILE", help="write the rows as JSON too; - writes them instead of the table")
    args = parser.parse_args(argv)
    try:
        size = parse_size(args.size)
    except ValueError as error:
        parser.error(f"--size: {error}")
    if args.rounds < 1 or size < 4096:
        parser.error("at least 1 round, and a page")
    rows = capture.measure(args.rounds, size)
    report.show(rows, args.json, f"median of {args.rounds} rounds")
    return 0


if __name__ == "__main__":
    sys.exit(main())
