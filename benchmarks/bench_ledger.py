#!/usr/bin/env python3
"""Measure what an open PinLedger costs the calls that it books."""
import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from mmcore.bench import ledger, report  # noqa: E402


def main(argv=None):
    """Measure, print, and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15, help="rounds (default: 15)")
    parser.add_argument("--json", metavar="FILE", help="write the rows as JSON too; - writes them instead of the table")
    args = parser.parse_args(argv)
    if args.rounds < 1:
        parser.error("at least 1 round")
    rows = ledger.measure(args.rounds)
    report.show(rows, args.json, f"median of {args.rounds} rounds")
    return 0


if __name__ == "__main__":
    sys.exit(main())
