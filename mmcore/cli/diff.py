"""
Compare two captures of a process: which pages moved, were split, collapsed into larger folios, freed, swapped out,
unmapped, or are newly present. The second may be a PID: then it is compared with what it has now.
"""

from .output import print_fields, print_json, print_table
from .target import capture_process, is_pid

HELP = "what moved, split, collapsed or was freed between two captures"
SHOWN = 40


def add_arguments(parser):
    """Declare the options of the verb."""
    parser.add_argument("before", metavar="BEFORE", help="a file written by mmcore capture")
    parser.add_argument("after", metavar="AFTER", help="a later one, or the PID as it is now")
    parser.add_argument("--all", action="store_true", help=f"list every change, not only the first {SHOWN}")


def run(args):
    """Compare, and print."""
    from mmcore.live.capture import Capture
    from mmcore.live.diff import diff

    before = Capture.load(args.before)
    after = now(args, before) if is_pid(args.after) else Capture.load(args.after)
    found = diff(before, after)
    if args.json:
        print_json(found.as_dict())
    else:
        print_text(args, found)


def now(args, before):
    """Capture what the first capture looked at, as it is now."""
    args.vma = args.addr = args.length = None
    if not before.whole and len(before.starts):
        args.addr, args.length = before.addr, before.length
    return capture_process(int(args.after), args, memory=before.frames is not None)


def print_text(args, found):
    """Print the totals, then the stretches."""
    from mmcore.live.units import format_size

    fields = [("note", text) for text in found.notes]
    fields += [(kind, format_size(n)) for kind, n in found.totals.items() if n or kind == "same"]
    if found.frames is not None:
        text = "; ".join(f"{format_size(n)} {kind}" for kind, n in found.frames.items() if n)
        fields.append(("frames left", text or "none"))
    print_fields(fields)
    if not found.changes:
        return
    print()
    shown = found.changes if args.all else found.changes[:SHOWN]
    rows = [(f"{one.start:x}-{one.start + one.length:x}", one.kind, format_size(one.length),
             frame(one.before, one.order_before), frame(one.after, one.order_after), one.name or "-") for one in shown]
    print_table(("addresses", "what", "size", "before", "after", "name"), rows, left=(0, 1, 5))
    if len(shown) < len(found.changes):
        print(f"{len(found.changes) - len(shown)} more; --all lists them")


def frame(pfn, order):
    """Return "0x1234 order 9", or "-" where there was no page."""
    return "-" if pfn is None else f"{pfn:#x} order {order}"
