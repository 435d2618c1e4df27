"""
Let many threads pin, fork, split, migrate and register on one machine of the engine, and check every law at quiet
points and at the end. Ends by itself. A failure prints the seed, the law, and the struct pages around the page where it
was seen.
"""

import argparse
import sys

from .output import print_fields, print_json, print_table
from .register import _positive

HELP = "threads that do everything at once, with every law checked"


def add_arguments(parser):
    """Declare the options of the verb."""
    parser.add_argument("--threads", type=_threads, default=2, help="threads (default 2)")
    parser.add_argument("--seconds", type=_seconds, default=10.0, help="how long (default 10)")
    parser.add_argument("--rounds", type=_positive,
                        help="how many rounds, instead of --seconds: one thread repeats the same run")
    parser.add_argument("--seed", type=int, default=0, help="of the operations drawn (default 0)")
    parser.add_argument("--mix",
                        help="operations; a word twice is drawn twice as often (default all: pin, unpin, dirty, fork, "
                                      "fault, split, collapse, longterm, umem, vfio, iouring)")
    parser.add_argument("--debug", action="store_true", help="with the kernel's DEBUG_VM checks as well")


def run(args):
    """Run and print; raises an error on the first law that does not hold."""
    from mmcore.bench import stress

    mix = stress.parse_mix(args.mix) if args.mix is not None else None
    progress = _Progress(args.rounds, args.seconds)
    print(f"seed {args.seed}, {args.threads} threads", file=sys.stderr)     # also for a run that does not come back
    try:
        report = stress.run(args.threads, args.seconds, args.seed, mix, args.rounds, args.debug, progress.tell)
    except stress.StressFailure as failure:
        progress.end()
        print(failure, file=sys.stderr)
        raise RuntimeError(str(failure).splitlines()[0]) from None
    progress.end()
    if args.json:
        print_json({"seed": report.seed, "threads": report.threads, "mix": report.mix, "rounds": report.rounds,
                    "checks": report.checks,
                    "operations": report.operations, "refused": report.refused, "operations_per_second": report.rate,
                    "operations_per_second_of_one_thread": report.alone_rate, "scaling": report.scaling,
                    "pins": report.pins,
                    "state": report.state})
        return
    print_table(("operation", "done", "refused"), [(word, str(report.operations[word]), str(report.refused[word]))
                                                   for word in report.operations])
    print()
    scaling = ""
    if report.scaling is not None:
        scaling = f"; one thread alone {report.alone_rate:.0f}/s: scaling {report.scaling:.2f}x"
    print_fields([("rate", f"{report.rate:.0f} operations/s by {report.threads} threads{scaling}"),
                  ("laws", f"hold: {report.checks} checks, {report.pins} pins acquired, none left"),
                  ("run", f"seed {report.seed}, {report.rounds} rounds, state {report.state:08x}")])


class _Progress:
    """One line that is written over on a terminal, a line now and then elsewhere."""

    def __init__(self, rounds, seconds):
        self.rounds, self.seconds, self.shown = rounds, seconds, 0.0
        self.terminal = sys.stderr.isatty()

    def tell(self, report, elapsed):
        if elapsed - self.shown < (0.2 if self.terminal else 10):
            return
        self.shown = elapsed
        total = f"{elapsed:.0f}/{self.seconds:g} s, {report.rounds} rounds"
        if self.rounds:
            total = f"{report.rounds}/{self.rounds} rounds"
        done, rate = sum(report.operations.values()), report.rate or report.alone_rate
        text = f"{total}, {done} operations, {rate:.0f}/s, all laws hold"
        print(f"\r{text}\x1b[K" if self.terminal else text, end="" if self.terminal else "\n", file=sys.stderr,
              flush=True)

    def end(self):
        if self.terminal and self.shown:
            print(file=sys.stderr)


def _threads(text):
    value = _positive(text)
    if value > 64:
        raise argparse.ArgumentTypeError(f"{value} threads are more than 64")
    return value


def _seconds(text):
    try:
        value = float(text)
    except ValueError:
        value = 0
    if not 0 < value <= 86400:
        raise argparse.ArgumentTypeError(f"not a number of seconds up to a day: {text!r}")
    return value
