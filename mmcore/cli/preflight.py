"""
Tell before registering whether it will be refused: what RDMA, VFIO and io_uring each count for a buffer, against which
limit, and the commands that help.
"""

from .output import print_fields, print_json, print_table
from .register import _positive, _size
from .target import add_target, check_part, open_target

HELP = "will registering this buffer be refused, and what helps?"
DEFAULT_SIZE = "256M"


def add_arguments(parser):
    """Declare the options of the verb."""
    add_target(parser, required=False, otherwise="; without one a buffer is made here")
    parser.add_argument("--pid", type=_positive, help="the same as PID")
    parser.add_argument("--size", type=_size, help=f"make a buffer of this size here (default {DEFAULT_SIZE})")
    parser.add_argument(
        "--backing", choices=("4k", "thp", "hugetlb", "shmem"), help="and back it with this (default thp)"
    )
    parser.add_argument(
        "--api", action="append", choices=("rdma", "vfio", "io_uring"), help="only this one; may be given again"
    )
    parser.add_argument("--check", action="store_true", help="exit with status 1 when it will be refused")


def run(args):
    """Look and print."""
    if args.target and args.pid:
        args.usage_error("PID or --pid, not both")
    args.target = args.target or (str(args.pid) if args.pid else None)
    if args.target and (args.size or args.backing):
        args.usage_error("--size and --backing make a buffer of their own: no PID, no file")
    from mmcore.live import buffer
    from mmcore.live.preflight import APIS, preflight

    apis = [api for api in APIS if not args.api or api.lower() in args.api]
    if args.target:
        found = preflight(open_target(args), apis=apis)
    else:
        check_part(args, None)
        with buffer(args.size or _size(DEFAULT_SIZE), args.backing or "thp") as buf:
            found = preflight(buf, apis=apis)
    if args.json:
        print_json(found.as_dict())
    else:
        print_report(found)
    return 1 if args.check and not found.ok else 0


def print_report(found):
    """Print a Preflight as text."""
    from mmcore.live.units import format_size

    def limit(nbytes):
        return "unlimited" if nbytes is None else format_size(nbytes)

    have = found.limits
    print_fields(
        [
            ("process", f"{have.pid}, CAP_IPC_LOCK {'yes' if have.cap_ipc_lock else 'no'}"),
            (
                "memlock",
                f"soft {limit(have.soft)}, hard {limit(have.hard)}; VmLck {format_size(have.locked)}, "
                f"VmPin {format_size(have.pinned)}",
            ),
            *[("cgroup", f"{path}: {format_size(usage)} of {format_size(most)}") for path, most, usage in found.cgroup],
            (
                "missing",
                format_size(found.not_present) + " not present: registering faults it in"
                if found.not_present
                else "nothing",
            ),
        ]
    )
    print()
    print_table(
        ("api", "each", "pages", "needed", "now", "counted in", "verdict"),
        [
            (
                row.api,
                row.each,
                str(row.pages),
                format_size(row.needed),
                format_size(row.current),
                row.counted_in,
                row.verdict,
            )
            for row in found.charges
        ],
    )
    print()
    fields = [("verdict", f"{found.verdict}: {found.reason}")]
    fields += [
        ("remedy" if not number else "", f"{command}    ({what})")
        for number, (what, command) in enumerate(found.remedies[:12])
    ]
    if len(found.remedies) > 12:
        fields.append(("", f"and {len(found.remedies) - 12} more; --json has all"))
    fields += [("note", note) for note in found.notes]
    print_fields(fields)
