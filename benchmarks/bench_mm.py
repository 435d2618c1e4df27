#!/usr/bin/env python3
"""Measure address spaces: touch, munmap and fork, from 1 GiB to 64 GiB, and the running kernel's fork beside it."""
import argparse
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parent.parent))     # after an installed one

from mmcore.bench import mm, report  # noqa: E402
from mmcore.core.size import parse_size  # noqa: E402


def main(argv=None):
    """Measure, print, and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--smallest", default="1G", help="smallest area (default: 1G)")
    parser.add_argument("--largest", default="64G", help="largest area; base pages of 64G take 2.5 GiB of memory (default: 64G)")
    parser.add_argument("--fork", default="1G", help="area of the fork rows, populated for real too (default: 1G)")
    parser.add_argument("--rounds", type=int, default=5, help="rounds (default: 5)")
    parser.add_argument("--json", metavar="FILE", help="write the rows as JSON too; - writes them instead of the table")
    args = parser.parse_args(argv)
    try:
        sizes = [parse_size(text) for text in (args.smallest, args.largest, args.fork)]
    except ValueError as error:
        parser.error(str(error))
    if args.rounds < 1 or any(size < mm.HUGE or size % mm.HUGE for size in sizes) or sizes[1] < sizes[0]:
        parser.error("at least 1 round; sizes are multiples of 2M, the largest not below the smallest")
    rows = mm.measure(args.rounds, *sizes)
    report.show(rows, args.json, f"median of {args.rounds} rounds; ns a base page, or a leaf of 2 MiB",
                head=("case", "step", "ns", "mad", "against", "ratio", "must reach", "met"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
