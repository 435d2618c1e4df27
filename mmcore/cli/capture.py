"""
Take a snapshot of a process's memory map into a file that every other verb reads, here or on another machine, without
privilege: mappings, pagemap, the frames behind them, limits, huge page settings and pools, free blocks and zones. No
content of memory goes into it. With --all: every mapping, and every frame of the machine.
"""

from .output import print_fields, print_json
from .progress import progress
from .register import _positive
from .target import add_part, capture_process, check_part, existing_folder, heading

HELP = "take a snapshot of a process and the machine, for the reports below"


def add_arguments(parser):
    """Declare the options of the verb."""
    parser.add_argument("--pid", type=_positive, help="the process; without it --all takes the machine alone")
    add_part(parser)
    parser.add_argument("--all", action="store_true", help="every mapping, and every frame of the machine")
    parser.add_argument("-o", "--output", required=True, metavar="FILE", help="the file to write, x.npz")
    parser.add_argument("--no-names", action="store_true", help="leave out the names of mappings")


def run(args):
    """Capture, save and tell."""
    from mmcore.live.capture import capture

    if args.pid is None and not args.all:
        args.usage_error("give --pid, or --all for the machine's memory")
    check_part(args, args.pid)
    if args.all and (args.addr is not None or args.vma is not None):
        args.usage_error("--all or a part of the process, not both")
    existing_folder(args.output)
    if args.pid is None:
        with progress() as show:
            taken = capture("memory", progress=show)
    else:
        taken = capture_process(args.pid, args, memory=args.all, names=not args.no_names)
    taken.save(args.output)
    report(args, taken)


def report(args, taken):
    """Say what is in the file."""
    import os

    import numpy as np

    from mmcore.live.units import format_size

    size = os.path.getsize(args.output)
    present = int(np.count_nonzero(taken.pfns))
    if args.json:
        print_json({"file": args.output, "bytes": size, **heading(taken), "mappings": len(taken.vmas),
                    "pages": len(taken.pfns), "present": present, "page_table_leaves": taken.leaves is not None})
        return
    fields = [("file", f"{args.output}, {format_size(size)}")]
    if taken.pid:
        fields.append(("process", f"{taken.pid}, {len(taken.vmas)} mappings"))
        fields.append(("pages", f"{len(taken.pfns)} looked at, {present} present "
                                f"({format_size(present * taken.page_size)})"))
    if taken.frames is not None:
        fields.append(("frames", f"{len(taken.frames)} of the machine "
                                 f"({format_size(len(taken.frames) * taken.page_size)})"))
    print_fields(fields + [("partial", text) for text in taken.partial])
