#!/usr/bin/env python3
"""Count the instructions of the hot loops with callgrind, and fail when one takes over 5 % more than gate.json says.

--update writes what was counted into gate.json: for changes that are meant, and for another compiler.
"""
import argparse
import json
import shutil
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.append(str(HERE.parent))     # after an installed one

from mmcore.bench import gate  # noqa: E402

NOT_POSSIBLE = 77


def main(argv=None):
    """Count, print, and return the exit status: 0, 1 a loop takes more, 77 not possible here."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--update", action="store_true", help="store what was counted")
    parser.add_argument("--file", type=Path, default=HERE / "gate.json",
                        help="the stored counts (default: gate.json beside this)")
    parser.add_argument("--counts", type=Path, help="counts of an earlier run of --json, instead of counting")
    parser.add_argument("--json", type=Path, help="write the counts to a file")
    args = parser.parse_args(argv)
    if args.counts is None and not shutil.which("valgrind"):
        print("valgrind is not installed: apt-get install valgrind (Debian), dnf install valgrind (Fedora)",
              file=sys.stderr)
        return NOT_POSSIBLE
    found = json.loads(args.counts.read_text()) if args.counts else {"setting": gate.setting(),
                                                                     "instructions_per_page": gate.count()}
    for path in [args.json] * bool(args.json) + [args.file] * args.update:
        path.write_text(json.dumps(found, indent=1) + "\n")
    if not args.file.exists():
        print(f"{args.file} does not exist: write it with --update", file=sys.stderr)
        return 1
    stored = json.loads(args.file.read_text())
    rows = gate.judge(found["instructions_per_page"], stored["instructions_per_page"])
    width = max(len(row[0]) for row in rows)
    print(f"{'instructions a page':<{width}}  {'stored':>9}  {'now':>9}  change")
    for name, old, new, change, fails in rows:
        cells = ["-" if value is None else f"{value:.2f}" for value in (old, new)]
        text = "new" if old is None else "gone" if new is None else f"{change:+.1%}"
        print(f"{name:<{width}}  {cells[0]:>9}  {cells[1]:>9}  {text}" + "  FAILS: more than 5 %, or gone" * fails)
    if found["setting"] != stored["setting"]:
        print(f"not comparable: {stored['setting']} then, {found['setting']} now; --update stores these",
              file=sys.stderr)
        return NOT_POSSIBLE
    return int(any(row[4] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
