"""
Register and deregister a memory region again and again, as the tests of RDMA's batching patches did, in the engine; and
compare the generations of acquiring and releasing, with what their authors published beside.
"""

from .output import print_fields, print_json, print_table
from .register import _positive, _size

HELP = "register and deregister a memory region for N seconds, by each generation"
SECONDS = 5.0


def add_arguments(parser):
    """Declare the options of the verb."""
    parser.add_argument("--size", type=_size, default=1 << 30, help="bytes of the region (default 1G)")
    parser.add_argument("--seconds", type=_seconds, help=f"how long (default {SECONDS:g})")
    parser.add_argument("--rounds", type=_positive, help="how many rounds, instead of --seconds")
    parser.add_argument("--backing", choices=("thp", "hugetlb", "devdax", "4k"), default="thp", help="default thp")
    parser.add_argument("--acquire", choices=("list", "sink"), default="sink",
                        help="list: 512 pages a call, appended; sink: straight into the table (default)")
    parser.add_argument("--release", choices=("page", "array", "range"), default="range", help="default range")
    parser.add_argument("--lists", choices=("head", "run"), default="run", help="how --release array walks its lists (default run)")
    parser.add_argument("--compare", action="store_true", help="all generations, interleaved, with the published ratios")


def run(args):
    """Measure and print."""
    if args.seconds is not None and args.rounds is not None:
        args.usage_error("--seconds or --rounds, not both")
    from mmcore.bench import mr

    seconds = None if args.rounds else args.seconds or SECONDS
    if args.compare:
        report = mr.compare(args.size, args.backing, seconds, args.rounds)
    else:
        report = mr.test_region(args.size, args.backing, args.acquire, args.release, args.lists, seconds, args.rounds)
    if args.json:
        print_json(report)
    elif args.compare:
        _print_comparison(report)
    else:
        _print_rounds(report)


def _print_rounds(report):
    from mmcore.live.units import format_size

    print(f"{report['rounds']} rounds in {report['seconds']:.3f} sec: {report['usec_per_round']:.3f} usec / round")
    phases = report["phases"]
    print_fields([
        ("region", f"{format_size(report['size'])} of {report['backing']}, {report['pages']} pages in {report['entries']} entries, "
                   f"{report['segments']} DMA segments, best page size {format_size(report['best_page_size'])}"),
        ("register", f"{phases['register']:.3f} usec by {report['acquire']}, of which DMA map {phases['map']:.3f}"),
        ("deregister", f"{phases['deregister']:.3f} usec by {report['release']}, of which DMA unmap {phases['unmap']:.3f}"),
    ])


def _print_comparison(report):
    from mmcore.live.units import format_size

    print(f"{format_size(report['size'])} of {report['backing']}, median of {report['rounds']} rounds of each, interleaved; ratios "
          f"against {report['against']}")
    rows = []
    for row in report["rows"]:
        published = "; ".join(f"{one['before']:.3f} -> {one['after']:.3f}, {one['ratio']:.2f}x ({one['what']})" for one in row["published"])
        rows.append((row["generation"], f"{row['usec_per_round']:.3f}", f"{row['ratio']:.2f}x", published or "-"))
    print_table(("acquire + release", "usec / round", "ratio", "published"), rows)


def _seconds(text):
    import argparse

    try:
        value = float(text)
    except ValueError:
        value = 0
    if not 0 < value < 1e6:
        raise argparse.ArgumentTypeError(f"not a number of seconds: {text!r}")
    return value
