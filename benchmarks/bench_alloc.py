#!/usr/bin/env python3
"""Measure making a Memory of 1 TiB, and allocating and freeing base pages in bulk."""
import argparse
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parent.parent))     # after an installed one

from mmcore.bench import alloc, report  # noqa: E402
from mmcore.core.size import parse_size  # noqa: E402


def main(argv=None):
    """Measure, print, and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pages", default="1M", help="pages of a bulk allocation, as 1048576 or 1M (default: 1M)")
    parser.add_argument("--rounds", type=int, default=9, help="rounds (default: 9)")
    parser.add_argument("--json", metavar="FILE", help="write the rows as JSON too; - writes them instead of the table")
    args = parser.parse_args(argv)
    try:
        nr_pages = parse_size(args.pages)
    except ValueError as error:
        parser.error(f"--pages: {error}")
    if args.rounds < 1 or nr_pages < 1:
        parser.error("at least 1 round and 1 page")
    rows = alloc.measure(args.rounds, nr_pages)
    report.show(rows, args.json, f"median of {args.rounds} rounds",
                head=("case", "what", "ns", "mad", "", "", "must reach", "met"), columns=(0, 1, 2, 3, 6, 7))
    return 0


if __name__ == "__main__":
    sys.exit(main())
