"""
Tell why the page at an address cannot be pinned long-term, as RDMA, VFIO and io_uring do: by mapping, file system,
page, zone and migrate type.
"""

from .output import print_fields, print_json
from .register import _address
from .target import is_pid

HELP = "why can the page at this address not be pinned long-term?"


def add_arguments(parser):
    """Declare the options of the verb."""
    parser.add_argument("target", metavar="PID", help="a process, self, or a capture file")
    parser.add_argument("addr", metavar="ADDR", type=_address, help="an address in it, as 0x7f0000000000")
    parser.add_argument("--read-only", action="store_true", help="for a device that only reads")


def run(args):
    """Look and print."""
    from mmcore.live import Capture, capture, why_not_longterm

    if is_pid(args.target) or args.target == "self":
        target = args.target if args.target == "self" else int(args.target)
        snapshot = capture(target, args.addr, 1)
    else:
        snapshot = Capture.load(args.target)
    found = why_not_longterm(snapshot, args.addr, write=not args.read_only)
    if args.json:
        print_json(found.as_dict())
    else:
        how = "reads only" if args.read_only else "writes"
        print_fields(
            [
                ("address", f"{args.addr:#x} of process {snapshot.pid} ({snapshot.command}), for a device that {how}"),
                ("verdict", found.lines()[0]),
                *found.checks,
                *([("remedy", found.remedy)] if found.remedy else []),
            ]
        )
