#!/usr/bin/env python3
"""Measure how pin + unpin grows with the size of a buffer and with threads, and the real memory of a modelled GiB.

Sizes go from 1 GiB to --largest by factors of 8. A struct page is 64 bytes: 1 TiB takes 16 GiB of real memory, and what
does not fit in --memory is left out and named.
"""
import argparse
import os
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parent.parent))     # after an installed one

from mmcore.bench import report, scale  # noqa: E402
from mmcore.core.size import format_size, parse_size  # noqa: E402


def available():
    """Return half of the memory that is free; 2 GiB where the system does not say."""
    try:
        with open("/proc/meminfo") as info:
            return int(next(line for line in info if line.startswith("MemAvailable")).split()[1]) * 1024 // 2
    except (OSError, StopIteration):
        return 2 << 30


def main(argv=None):
    """Measure, print, and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--largest", default="1T", help="largest buffer in 2 MiB leaves (default 1T)")
    parser.add_argument("--base-largest", default="64G", help="largest buffer in base pages (default 64G)")
    parser.add_argument("--memory", help="real memory that may be taken (default: half of what is free)")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1,
                        help="most threads (default: one a processor)")
    parser.add_argument("--rounds", type=int, default=9, help="rounds (default 9)")
    parser.add_argument("--json", metavar="FILE", help="write the rows as JSON too; - writes them instead of the table")
    args = parser.parse_args(argv)
    try:
        largest, base, memory = parse_size(args.largest), parse_size(args.base_largest), parse_size(args.memory
                                                                                                    or available())
    except ValueError as error:
        parser.error(str(error))
    if args.rounds < 1 or not 1 <= args.threads <= 64 or min(largest,
                                                             base) < 1 << 30 or largest % (2 << 20) or base % 4096:
        parser.error("at least 1 round, 1 to 64 threads, and 1G")
    rows, left_out = scale.measure(args.rounds, largest, base, memory, args.threads)
    report.show(rows, args.json, f"median of {args.rounds} rounds, up to {format_size(memory)} of real memory",
                [f"left out: {why}" for why in left_out])
    return 0


if __name__ == "__main__":
    sys.exit(main())
