"""
Do the published measurements of page pinning again, in one run: gup_test's releases, device-dax, RDMA, VFIO and
io_uring, the old way against the new way, interleaved, with the published ratio, the running kernel and a C peer
beside. A ratio whose spread crosses 1 is "even", never a win.
"""

import argparse
import contextlib
import csv
import io
import json
import sys

from .output import print_json, print_table
from .register import _positive, _size
from .target import existing_folder

HELP = "every published measurement again, in one run"
COLUMNS = ("table", "scenario", "before", "after", "before_ns_per_page", "after_ns_per_page", "ratio", "low", "high",
           "verdict",
           "published_ratio", "kernel_ns_per_page", "peer", "peer_ns_per_page", "pages", "rounds")


def add_arguments(parser):
    """Declare the options of the verb."""
    parser.add_argument("--quick", action="store_true", help="1 GiB instead of 16: under a minute")
    parser.add_argument("--rounds", type=_rounds, default=9, help="interleaved rounds, 9 or more (default 9)")
    parser.add_argument("--size", type=_bench_size, help="bytes of the buffers (default 16G; 1G with --quick)")
    parser.add_argument("--table", action="append", metavar="NAME", help="only this table; may be given again")
    parser.add_argument("--save", metavar="FILE", help="write the JSON to a file, for --compare later")
    parser.add_argument("--csv", metavar="FILE", help="write the lines as CSV; - writes them instead of the tables")
    parser.add_argument("--compare", metavar="OLD.json", help="what is better or worse than in an earlier run")
    parser.add_argument("--plot", metavar="OUT", help="draw the ratios, as .png or .svg (needs matplotlib)")
    parser.add_argument("--load", metavar="FILE", help="measure nothing; show, compare or draw this earlier run")


def run(args):
    """Measure, or load, and print."""
    from mmcore.bench.tables import against

    old = _load(args.compare, lambda report: against(report, report)) if args.compare else None
    for path in (args.save, None if args.csv == "-" else args.csv):
        if path:
            existing_folder(path)
    if args.plot:
        _check_plot(args)
    if args.json and args.csv == "-":
        args.usage_error("--json or --csv -, not both: both write to standard output")
    if args.load:
        report = _load(args.load, _try_all)
    else:
        from mmcore.bench import tables

        unknown = [name for name in args.table or () if name not in tables.TABLES]
        if unknown:
            args.usage_error(f"no table {unknown[0]!r}; there are {', '.join(tables.TABLES)}")
        report = tables.measure(args.table, args.quick, args.rounds, args.size)
    if old is not None:
        report["against"] = {"machine": old.get("machine"), "when": old.get("when"), "rows": against(report, old)}
    if args.save:
        with open(args.save, "w") as out:
            json.dump(report, out, indent=1)
            out.write("\n")
    if args.csv:
        _write_csv(report, args.csv)
    if args.json:
        print_json(report)
    elif args.csv != "-":
        print_report(report)
    if args.plot:
        from mmcore.bench.plot import plot_ratios

        plot_ratios(report, args.plot)
        print(f"drawn: {args.plot}", file=sys.stderr)


def print_report(report):
    """Print a report of bench.tables.measure() as text."""
    from mmcore.live.units import format_size

    print(report["machine"])
    print(f"{report['when']}: median of {report['rounds']} interleaved rounds, spread without the lowest and the "
          "highest; buffers of "
          f"{format_size(report['size'])}, regions of {format_size(report['region'])}; ns for each 4 KiB page")
    print("memory itself: " + ", ".join(f"{what} {value:.2f} ns" for what,
                                        value in report["floor_ns_per_page"].items()))
    for table in dict.fromkeys(entry["table"] for entry in report["entries"]):
        print(f"\n{table}")
        print_table(("scenario", "before", "ns", "after", "ns", "ratio", "spread", "verdict", "published", "kernel",
                     "C peer", "after/C"),
                    [_cells(entry) for entry in report["entries"] if entry["table"] == table])
    print()
    for line in _notes(report):
        print(line)
    if "against" in report:
        _print_against(report["against"])


def _cells(entry):
    peer = entry["peer"]
    beside = peer.get("ns_per_page") is not None
    return (entry["scenario"], entry["before"], f"{entry['before_ns_per_page']:.3f}", entry["after"],
            f"{entry['after_ns_per_page']:.3f}",
            f"{entry['ratio']:.2f}x", f"{entry['low']:.2f}-{entry['high']:.2f}", entry["verdict"],
            f"{entry['published_ratio']:.2f}x" if entry["published_ratio"] else entry["published"] or "-",
            f"{entry['kernel']['ns_per_page']:.3f}" if "ns_per_page" in entry["kernel"] else "-",
            f"{peer['ns_per_page']:.3f}" if beside else "-", f"{1 / peer['ratio']:.2f}" if beside else "-")


def _notes(report):
    entries = report["entries"]
    wins = sum(entry["verdict"] == "win" for entry in entries)
    yield f"{wins} of {len(entries)} lines are faster after, in nearly every round."
    for verdict, what in (("even", "no difference that can be told"), ("loss", "slower")):
        for entry in entries:
            if entry["verdict"] == verdict:
                yield (f"  {what}: {entry['scenario']}, {entry['before']} -> {entry['after']}: {entry['ratio']:.2f}x "
                       f"({entry['low']:.2f}-{entry['high']:.2f})")
    for published in dict.fromkeys((entry["table"], entry["scenario"], entry["published"]) for entry in entries
                                   if entry["published"]):
        yield f"published: {published[1]}: {published[2]}"
    for why in dict.fromkeys(entry["kernel"]["missing"] for entry in entries if "missing" in entry["kernel"]):
        yield f"kernel, no figure: {why}"
    yield "kernel: io_uring fixed buffers of this machine, time on the wall; it walks page tables and accounts as well."
    for why in dict.fromkeys(entry["peer"]["missing"] for entry in entries if "missing" in entry["peer"]):
        yield f"C peer, no figure: {why}"
    model = report.get("cost_model")
    if model:
        from mmcore.bench.tables import cost_model_words

        yield cost_model_words(model)
    for name, why in report["missing"].items():
        yield f"left out: {name}: {why}"
    yield f"{report['seconds']:.0f} s in all"


def _print_against(against):
    print(f"\nagainst the run of {against['when']} on {against['machine']}")

    def text(value, unit):
        return "-" if value is None else f"{value:.2f}{unit}"

    print_table(("scenario", "before", "after", "ratio then", "now", "ns then", "now", "verdict"),
                [(row["scenario"], row["before"], row["after"], text(row["old_ratio"], "x"),
                  text(row["new_ratio"], "x"),
                  text(row["old_ns_per_page"], ""), text(row["new_ns_per_page"], ""), row["verdict"])
                  for row in against["rows"]])


def _write_csv(report, where):
    out = sys.stdout if where == "-" else open(where, "w", newline="")
    try:
        writer = csv.writer(out, lineterminator="\n")
        writer.writerow(COLUMNS)
        for entry in report["entries"]:
            flat = {**entry, "kernel_ns_per_page": entry["kernel"].get("ns_per_page"),
                    "peer": entry["peer"].get("name"),
                    "peer_ns_per_page": entry["peer"].get("ns_per_page")}
            writer.writerow(["" if flat[name] is None else flat[name] for name in COLUMNS])
    finally:
        if out is not sys.stdout:
            out.close()


def _try_all(report):
    with contextlib.redirect_stdout(io.StringIO()):
        print_report(report)
        _write_csv(report, "-")


def _load(path, use):
    """Read a file that --save wrote. use(report): what will be done with it is tried now, before anything is measured."""
    with open(path) as file:
        try:
            report = json.load(file)
        except ValueError as error:
            raise ValueError(f"{path} is not JSON: {error}") from None
    if not isinstance(report, dict) or not isinstance(report.get("entries"), list):
        raise ValueError(f"{path} is not a file of `mmcore bench --save`: it has no entries")
    try:
        use(report)
    except (LookupError, TypeError, AttributeError, ArithmeticError, ValueError) as error:
        raise ValueError(f"{path} is not a whole file of `mmcore bench --save`: {type(error).__name__} {error}") from None
    return report


def _check_plot(args):
    if not args.plot.endswith((".png", ".svg")):
        args.usage_error(f"--plot draws .png or .svg, not {args.plot!r}")
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        from mmcore.live.errors import NotPossible

        raise NotPossible("matplotlib is not installed", "pip install 'mmcore[plot]'") from None


def _rounds(text):
    value = _positive(text)
    if value < 9:
        raise argparse.ArgumentTypeError(f"{value} rounds say too little about a spread: 9 or more")
    return value


def _bench_size(text):
    value = _size(text)
    if value < 64 << 20 or value % (32 << 20):
        raise argparse.ArgumentTypeError(f"{text}: a multiple of 32M, 64M or more")
    return value
