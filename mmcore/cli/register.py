"""
Tell what registering a buffer costs: what backs it, whether RLIMIT_MEMLOCK allows it, what
pinning and releasing it takes by each release generation of the engine, and what the running
kernel itself takes to register it with io_uring.
"""

import argparse
import sys

from .output import print_fields, print_json, print_table

HELP = "what does registering this buffer cost, for real and in the model"
DEFAULT_SIZE = "256M"
DEFAULT_BACKING = "thp"
ROUNDS = 9


def add_arguments(parser):
    """Declare the options of the verb."""
    parser.add_argument("--size", type=_size, help=f"bytes, or 4K, 256M, 1G (default {DEFAULT_SIZE})")
    parser.add_argument("--backing", choices=("4k", "thp", "hugetlb", "shmem"),
                        help=f"what to back the buffer with (default {DEFAULT_BACKING})")
    parser.add_argument("--pid", type=_positive, help="look at a buffer of this process instead")
    parser.add_argument("--addr", type=_address, help="its address, as in /proc/PID/maps; with --pid")
    parser.add_argument("--length", type=_size, help="its length in bytes; with --pid")
    parser.add_argument("--rounds", type=_positive, default=ROUNDS,
                        help=f"measured rounds; medians are shown (default {ROUNDS})")
    parser.add_argument("--model", action="store_true",
                        help="use a synthetic layout, not a real buffer; works anywhere")
    parser.add_argument("--what-if", choices=("4k", "thp", "hugetlb"),
                        help="also tell what it would cost with this backing, from a calibration of this machine")
    parser.add_argument("--calibrate", action="store_true",
                        help="measure the calibration first (some seconds; it joins those that are kept); "
                             "alone: only that")


def run(args):
    """Measure and print."""
    if args.pid is not None:
        if args.addr is None or args.length is None:
            args.usage_error("--pid needs --addr and --length")
        if args.size is not None or args.backing is not None or args.model:
            args.usage_error("--pid takes the buffer as it is: no --size, --backing or --model")
    elif args.addr is not None or args.length is not None:
        args.usage_error("--addr and --length need --pid")

    from mmcore.bench.register import register

    calibration = _calibration(args) if args.calibrate or args.what_if else None
    if args.calibrate and not args.what_if:
        if args.json:
            print_json(_calibration_dict(calibration))
        else:
            print_fields(_calibration_fields(calibration))
        return
    report = register(
        args.size or _size(DEFAULT_SIZE), args.backing or DEFAULT_BACKING, pid=args.pid,
        addr=args.addr, length=args.length, rounds=args.rounds, model=args.model,
        what_if=args.what_if, calibration=calibration,
    )
    if args.json:
        print_json(report)
    else:
        print_report(report)


def print_report(report):
    """Print the report of bench.register.register() as text."""
    fields = _buffer_fields(report) + _memlock_fields(report["memlock"])
    print_fields(fields)
    print()
    print(f"{_many(report['backing']['pages'], 'page')}, median of {_many(report['rounds'], 'round')}; "
          "updates are atomic counter changes in struct pages")
    rows = [
        (row["release"], str(row["pin_updates"]), f"{row['pin_ns_per_page']:.3f}",
         str(row["unpin_updates"]), f"{row['unpin_ns_per_page']:.3f}", _ratio(row["ratio"]))
        for row in report["engine"]
    ]
    kernel = report["kernel"]
    if kernel["possible"]:
        rows.append(("kernel", "-", f"{kernel['pin_ns_per_page']:.3f}", "-",
                     f"{kernel['unpin_ns_per_page']:.3f}", _ratio(kernel["ratio"])))
    print_table(
        ("release", "pin updates", "pin ns/page", "unpin updates", "unpin ns/page", "vs page"), rows)
    print()
    if report["acquire"]["rows"]:
        print("by address, without locks where it is mapped:")
        print_table(
            ("acquire", "pages", "updates", "ns/page", "release ns/page"),
            [(row["acquire"], str(row["pages"]), str(row["updates"]), f"{row['acquire_ns_per_page']:.3f}",
              f"{row['release_ns_per_page']:.3f}") for row in report["acquire"]["rows"]])
        print()
    if report["phases"]["rows"]:
        _print_phases(report["phases"]["rows"], kernel)
    print_fields(_kernel_fields(kernel))
    if report["what_if"]:
        print()
        _print_what_if(report["what_if"])


def _print_phases(rows, kernel):
    from mmcore.bench.phases import PHASES

    def ns(value):
        return "-" if value is None else f"{value:.3f}"

    print("phases of a registration, ns/page:")
    lines = [(row["generation"], *(ns(row[phase]) for phase in PHASES)) for row in rows]
    if kernel["possible"]:
        # One system call pins, makes the table and accounts; io_uring maps no device.
        timed = ("fault_in", "pin", "unpin", "free")
        fault_in, pin, unpin, free = (ns(kernel[f"{phase}_ns_per_page"]) for phase in timed)
        lines.append(("kernel", fault_in, pin, "in pin", "in pin", "-", "-", unpin, free))
    print_table(("acquire + release", *(phase.replace("_", "-") for phase in PHASES)), lines)
    print()


def _print_what_if(what):
    from mmcore.live.units import format_size

    print(f"what if it were {what['backing']}: {format_size(what['nbytes'])} in {_many(what['folios'], 'folio')}, "
          f"{what['unpin_updates']} counter updates to release; {what['confidence']:.0%} of runs lie between low and "
          "high")
    rows = []
    for phase, one in what["phases"].items():
        ratio = f"{one['now'] / one['middle']:.1f}x" if one["now"] else "-"
        rows.append((phase.replace("_", "-"), *(_time(one[key]) for key in ("now", "middle", "low", "high")), ratio))
    print_table(("phase", "now", "likely", "low", "high", "now / likely"), rows)
    print()
    have = what["calibration"]
    fields = [("calibrated", f"{have['date']}, Linux {have['kernel']}, {have['cpu']}; {_many(have['runs'], 'run')} in "
                             f"{_many(have['sessions'], 'session')}, {_spread(have['spread'])}")]
    fields += [("doubt", text) for text in have["doubts"]]
    if have["doubts"]:
        fields.append(("remedy", "mmcore register --calibrate"))
    print_fields(fields)


def _spread(spread):
    return f"{spread[0]:.2f}x to {spread[1]:.2f}x"


def _time(ns):
    if ns is None:
        return "-"
    for unit, size in (("s", 1e9), ("ms", 1e6), ("us", 1e3)):
        if ns >= size:
            return f"{ns / size:.3g} {unit}"
    return f"{ns:.0f} ns"


def _calibration(args):
    """Return the calibration that is kept, or a new one if there is none, or when asked."""
    from mmcore.bench import costmodel

    def progress(text):
        if sys.stderr.isatty():
            print(f"\r\x1b[Kcalibrating, {text}", end="", file=sys.stderr, flush=True)

    if not args.calibrate:
        try:
            return costmodel.Calibration.load()
        except FileNotFoundError:
            print(f"no calibration in {costmodel.cache_path()}: measuring one, some seconds", file=sys.stderr)
    found = costmodel.recalibrate(progress=progress)
    if sys.stderr.isatty():
        print("\r\x1b[K", end="", file=sys.stderr, flush=True)
    return found


def _calibration_dict(found):
    from mmcore.bench import costmodel

    missing = {backing: {"reason": reason, "remedy": remedy} for backing, (reason, remedy) in found.missing.items()}
    return {"path": costmodel.cache_path(), "date": found.date, "kernel": found.kernel, "cpu": found.cpu,
            "sessions": found.sessions, "runs": len(found.samples), "missing": missing,
            "lines": {backing: {phase: vars(line) | {"spread": line.spread} for phase, line in lines.items()}
                      for backing, lines in found.lines.items()}}


def _calibration_fields(found):
    from mmcore.bench import costmodel

    fields = [("calibrated", f"{found.date}, Linux {found.kernel}, {found.cpu}; {_many(len(found.samples), 'run')} in "
                             f"{_many(len(found.sessions), 'session')}"), ("kept in", costmodel.cache_path())]
    for backing in sorted(found.lines):
        line = found.lines[backing]["total"]
        cost = f"{_time(line.fixed)} + {line.per_page * line.middle:.3g} ns/page in all"
        fields.append((backing, f"{cost}, {_spread(line.spread)}"))
    for backing, (reason, remedy) in found.missing.items():
        fields += [(backing, f"not measured: {reason}"), ("", f"remedy: {remedy}")]
    return fields


def _buffer_fields(report):
    from mmcore.live.units import format_size

    buf, backing = report["buffer"], report["backing"]
    fields = []
    if report["source"] == "model":
        why = report["why_model"]
        text = f"synthetic layout, no real buffer looked at: {why['reason']}"
        fields.append(("model", text + (f"; remedy: {why['remedy']}" if why["remedy"] else "")))
    name = format_size(backing["length"])
    if buf["addr"] is not None:
        name += f" at {buf['addr']:#x} of {'this process' if buf['own'] else 'process'} {buf['pid']}"
    if buf["asked_backing"]:
        name += f", asked for {buf['asked_backing']}"
    fields.append(("buffer", name))
    sizes = [
        f"{format_size(int(size))} folios: {format_size(nbytes)}"
        for size, nbytes in sorted(backing["by_size"].items(), key=lambda item: int(item[0]))
    ]
    if backing["present"] < backing["length"]:
        sizes.append(f"not present: {format_size(backing['length'] - backing['present'])}")
    sizes.append(" ".join(f"{kind} {format_size(n)}" for kind, n in backing["by_kind"].items()))
    fields.append(("backed by", "; ".join(sizes)))
    fields.append(("layout", f"{_many(backing['pages'], 'page')} in {_many(backing['folios'], 'folio')}; "
                             f"{_many(backing['runs'], 'physical run')}, "
                             f"{_many(backing['sg_segments'], 'scatterlist segment')}"))
    for reason in sorted({row[2] for row in backing["not_huge"]}):
        fields.append(("not huge", reason))
    if buf["moved"]:
        fields.append(("unsteady", f"{buf['moved']} pages moved while they were read: the process runs on"))
    return fields


def _memlock_fields(memlock):
    from mmcore.live.units import format_size

    if memlock["verdict"] == "unknown":
        limit = "unknown"
    else:
        limit = "unlimited" if memlock["limit"] is None else format_size(memlock["limit"])
    if memlock["verdict"] == "refused":
        text = f"refused: {memlock['reason']}"
    else:
        text = f"{format_size(memlock['needed'])} needed, limit {limit}: {memlock['verdict']}"
        if memlock["verdict"] in ("exempt", "unknown"):
            text += f" ({memlock['reason']})"
    fields = [("memlock", text)]
    if memlock["remedy"]:
        fields.append(("remedy", memlock["remedy"]))
    return fields


def _kernel_fields(kernel):
    if not kernel["possible"]:
        return [("kernel", f"no row: {kernel['reason']}"), ("remedy", kernel["remedy"])]
    counted, predicted, equal = kernel["counted"], kernel["predicted"], kernel["equal"]
    fields = [("kernel", f"Linux {kernel['kernel']}, io_uring fixed buffers, {_many(kernel['iovecs'], 'iovec')}; "
                         "walks page tables and accounts as well")]
    if kernel["no_counts"]:
        fields.append(("counted", f"pins not counted: {kernel['no_counts']}"))
    else:
        fields.append(("counted", _pins(counted)))
    fields.append(("VmPin", f"{counted['vmpin_at_register']:+d} pages at register, "
                            f"{counted['vmpin_at_unregister']:+d} at unregister"))
    if predicted is None:
        fields.append(("predicted", "nothing: PFNs are not readable"))
        return fields
    fields.append(("predicted", f"{_pins(predicted)}; VmPin {predicted['charge']:+d}"))
    if equal["pins"] is None:
        verdict = "VmPin equal" if equal["vmpin"] else "VmPin differs"
    elif equal["pins"] and equal["vmpin"]:
        verdict = "predicted and counted pins are equal"
    elif equal["vmpin"]:
        verdict = ("pins differ, VmPin is equal: nr_foll_pin_* are machine-wide, so other pins on the "
                   "machine show in them; run again when it is quiet")
    else:
        verdict = "VmPin differs: the rule used here is not this kernel's"
    fields.append(("verdict", verdict))
    return fields


def _pins(counts):
    return (f"{counts['acquired']} pins acquired, {counts['released_at_register']} released at register, "
            f"{counts['released_at_unregister']} at unregister")


def _many(number, noun):
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _ratio(ratio):
    return "-" if ratio is None else f"{ratio:.2f}x"


def _size(text):
    from mmcore.live.units import parse_size

    try:
        return parse_size(int(text, 0) if text.lower().startswith("0x") else text)
    except (ValueError, TypeError) as error:
        raise argparse.ArgumentTypeError(getattr(error, "strerror", None) or str(error)) from None


def _address(text):
    try:
        # Bare hexadecimal, as /proc/PID/maps shows it, cannot be told from decimal: ask for 0x.
        value = int(text, 0)
    except ValueError:
        raise argparse.ArgumentTypeError(f"not an address: {text!r}; write 0x7f0000000000") from None
    if not 0 <= value < 1 << 64:
        raise argparse.ArgumentTypeError(f"not an address: {text!r}")
    return value


def _positive(text):
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"not a number above 0: {text!r}")
    return value
