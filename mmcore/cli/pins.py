"""
Tell who holds pinned memory: VmPin and VmLck of each process and what it has open that pins, the machine's own count of
pins acquired and released, and what no process explains. With --watch: again and again, with what changed.
"""

import argparse
import json
import time

from .output import print_fields, print_json, print_table

HELP = "who holds pins: VmPin by process, and what no process explains"
SECONDS = 2.0


def add_arguments(parser):
    """Declare the options of the verb."""
    parser.add_argument("--watch", action="store_true", help="repeat until interrupted; with --json a line each time")
    parser.add_argument("--interval", type=seconds,
                        help=f"seconds between two looks (default {SECONDS:g}); with --watch")
    parser.add_argument("--count", type=looks, help="stop after so many looks; with --watch")


def run(args):
    """Look, and print."""
    from mmcore.live.pins import pins

    if not args.watch:
        if args.interval is not None or args.count is not None:
            args.usage_error("--interval and --count go with --watch")
        found = pins()
        if args.json:
            print_json(found.as_dict())
        else:
            print_text(found)
        return
    watch(args, pins)


def watch(args, pins):
    """Look again and again; a change against the look before is shown with its sign."""
    last, done = None, 0
    while args.count is None or done < args.count:
        if done:
            time.sleep(args.interval or SECONDS)
        found = pins()
        if args.json:
            print(json.dumps(found.as_dict()), flush=True)
        else:
            if done:
                print()
            print_text(found, last)
            print(end="", flush=True)
        last, done = found, done + 1


def print_text(found, last=None):
    """Print the processes, then the machine."""
    from mmcore.live.units import format_size

    print(time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(found.when)))
    before = {one.pid: one for one in last.processes} if last else {}
    rows = []
    for one in found.processes:
        change = ""
        if last:
            delta = one.pinned - (before[one.pid].pinned if one.pid in before else 0)
            change = f"{'+' if delta > 0 else '-'}{format_size(abs(delta))}" if delta else "-"
        holders = ", ".join(one.holders) or "-"
        if one.shares is not None:
            holders += f" (address space of {one.shares})"
        rows.append((str(one.pid), one.command, format_size(one.pinned), *([change] if last else []),
                     format_size(one.locked), holders))
    if rows:
        print_table(("pid", "command", "VmPin", *(["change"] if last else []), "VmLck", "open"), rows,
                    left=(0, 1, 5 if last else 4))
        print()
    fields = [("VmPin", f"{found.charged} pages in all processes"
               + (f"; {found.unseen} processes may not be looked at (CAP_SYS_PTRACE)" if found.unseen else ""))]
    if found.acquired is not None:
        text = f"{found.acquired} acquired - {found.released} released = {found.outstanding} pages pinned"
        if last and last.outstanding is not None:
            text += f" ({found.outstanding - last.outstanding:+d})"
        fields.append(("machine", text))
    print_fields(fields + [("verdict", found.verdict())])


def seconds(text):
    """Return a number of seconds above 0."""
    try:
        value = float(text)
    except ValueError:
        value = 0
    if not 0 < value < 1e6:
        raise argparse.ArgumentTypeError(f"not a number of seconds: {text!r}")
    return value


def looks(text):
    """Return a number above 0."""
    from .register import _positive

    return _positive(text)
