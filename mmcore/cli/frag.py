"""
Tell how free memory is broken up: the staircase of free blocks by order in each zone, the share of free memory that an
allocation of each order cannot use, and the longest free runs. Without a target: this machine, now.
"""

import sys

from .output import print_fields, print_json
from .progress import progress
from .target import is_pid

HELP = "how free memory is fragmented: free blocks by order, unusable share, largest runs"
BAR = 40                # characters of the longest bar


def add_arguments(parser):
    """Declare the options of the verb."""
    parser.add_argument("target", nargs="?", metavar="PID|FILE",
                        help="a file written by mmcore capture; without it, or with a PID, this machine")
    parser.add_argument("--proc", action="store_true", help="print the zones as /proc/buddyinfo does")


def run(args):
    """Read, and print."""
    from mmcore.live.frag import frag

    if args.proc and args.json:
        args.usage_error("--proc or --json, not both")
    machine, frames, why = look(args)
    if args.proc:
        print(machine.buddyinfo(), end="")
        return
    found = frag(machine, frames)
    if args.json:
        print_json({**found.as_dict(), "no_runs": why})
    else:
        print_text(machine, found, why)


def look(args):
    """Return (Machine, Frames or None, why there are none)."""
    from mmcore.live.capture import Capture
    from mmcore.live.errors import NotPossible
    from mmcore.live.frames import read_frames
    from mmcore.live.machine import machine

    # A PID is taken too, like everywhere; free memory is the machine's.
    if args.target is not None and not is_pid(args.target):
        taken = Capture.load(args.target)
        return taken.machine, taken.frames, "" if taken.frames else "the capture has no frames: mmcore capture --all"
    if args.target is not None:
        from mmcore.live.limits import status

        status(int(args.target))
    around = machine()
    if args.proc:
        return around, None, ""
    try:
        with progress() as show:
            return around, read_frames(show), ""
    except NotPossible as error:
        return around, None, f"{error.reason}; {error.remedy}"


def print_text(machine, found, why):
    """Print a staircase a zone, and the largest runs."""
    from mmcore.live.units import format_size

    size = found.page_size
    for zone in found.zones:
        print(f"Node {zone.node}, zone {zone.zone}: {format_size(zone.free * size)} free, "
              f"{format_size(zone.in_blocks * size)} of it in blocks")
        print_staircase(zone.blocks, zone.unusable, size)
        print()
    fields = []
    if found.runs is None:
        fields.append(("free runs", f"not seen: {why}"))
    else:
        fields.append(("free runs", f"{found.free_runs}; the longest:"))
        fields += [("", f"{format_size(pages * size)} from PFN {first:#x} (physical {first * size:#x})")
                   for first, pages in found.runs]
    pmd = (machine.pmd_size // size).bit_length() - 1
    if pmd < len(found.unusable):
        fields.append(("huge pages", f"{found.unusable[pmd]:.1%} of free memory lies in blocks smaller than "
                                     f"{format_size(machine.pmd_size)}"))
    print_fields(fields)


def print_staircase(blocks, unusable, size):
    """Print a line an order: block size, count, bytes, the share that is unusable for it, and a bar of the bytes."""
    from mmcore.live.units import format_size

    most = max((count << order for order, count in enumerate(blocks)), default=0) or 1
    print("order     block     blocks       bytes  unusable")
    for order, count in enumerate(blocks):
        pages = count << order
        length = pages * BAR / most
        print(f"{order:5d}  {format_size(size << order):>8}  {count:9d}  {format_size(pages * size):>10}"
              f"    {unusable[order]:6.3f}  {bar(length)}".rstrip())


def bar(length):
    """Return a bar of this many characters, in eighths where the output can show them."""
    encoding = (sys.stdout.encoding or "").lower()
    if not encoding.startswith("utf"):
        return "#" * round(length)
    eighths = round(length * 8)
    return "█" * (eighths // 8) + ("", "▏", "▎", "▍", "▌", "▋", "▊", "▉")[eighths % 8]
