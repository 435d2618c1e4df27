"""Time variants of one job against each other on a machine that others use too.

All variants of a case run once a round, in rotating order, so that a slow minute hits all of them; a ratio is the
median of the rounds' ratios. Times are the thread's processor time: what others take is not counted. Before each timed
run the caches are swept by reading 64 MiB.
"""
import statistics
import time
from dataclasses import dataclass, field

import numpy as np

SWEEP_BYTES = 64 << 20


@dataclass
class Variant:
    """One way to do the job. run() is timed; before() is not, and brings back what run() needs."""

    name: str
    run: object
    before: object = None
    missing: str = ""           # why it cannot run here, instead of run


@dataclass
class Bar:
    """What a variant must reach against another one of the same case.

    at_least: time(against) / time(variant) must reach it; at_most: time(variant) / time(against) must not pass it;
    neither: the ratio is shown, as time(against) / time(variant).
    """

    variant: str
    against: str
    at_least: "float | None" = None
    at_most: "float | None" = None
    note: str = ""

    def ratios(self, samples):
        """Return the ratio of each round; empty when one of the two did not run."""
        ours, theirs = samples.get(self.variant, []), samples.get(self.against, [])
        if self.at_most is not None:
            ours, theirs = theirs, ours
        return [b / a for a, b in zip(ours, theirs)]

    def judge(self, samples):
        """Return {against, ratio, spread, bar, met, note}; ratio and met are None where nothing was measured."""
        ratios = self.ratios(samples)
        ratio, spread = median_mad(ratios)
        met = None
        if ratios and self.at_least is not None:
            met = ratio >= self.at_least
        elif ratios and self.at_most is not None:
            met = ratio <= self.at_most
        return {"against": self.against, "ratio": ratio, "spread": spread, "bar": self.text(), "met": met,
                "note": self.note}

    def text(self):
        """Return the bar as words: ">= 6x", "<= 1.10", or ""."""
        if self.at_least is not None:
            return f">= {self.at_least:g}x"
        return f"<= {self.at_most:.2f}" if self.at_most is not None else ""


@dataclass
class Row:
    """What one variant of one case took."""

    case: str
    variant: str
    entries: int
    samples: list               # ns of each round
    bars: list = field(default_factory=list)
    missing: str = ""           # why it did not run
    note: str = ""
    shown: str = ""             # in a table, instead of ns a page

    def as_dict(self):
        """Return the row as it goes into JSON; median and mad in ns for the whole run."""
        median, mad = median_mad(self.samples)
        per_page = None if median is None else median / self.entries
        row = {"case": self.case, "variant": self.variant, "ns_per_page": per_page, "median": median, "mad": mad,
               "rounds": len(self.samples), "entries": self.entries, "bars": self.bars}
        if self.missing:
            row["missing"] = self.missing
        if self.note:
            row["note"] = self.note
        return row


def median_mad(values):
    """Return the median and the median distance from it; (None, None) of nothing."""
    if not values:
        return None, None
    median = statistics.median(values)
    return median, statistics.median([abs(value - median) for value in values])


FEW = 3     # rounds that say nothing about a spread
TRIM = 5    # rounds from which on the lowest and the highest ratio are left out of the spread


def ratio_of(before, after):
    """Compare two ways by the ns of their rounds, run interleaved; returns plain data.

    before_ms, after_ms: medians. ratio: median of before/after of each round; low and high: its spread, without the lowest
    and the highest round. verdict: "win" or "loss" when the whole spread is on one side of 1, else "even"; "too few
    rounds" below 3.
    """
    ratios = sorted(b / max(a, 1) for b, a in zip(before, after))
    cut = 1 if len(ratios) >= TRIM else 0
    low, high = ratios[cut], ratios[-1 - cut]
    verdict = "win" if low > 1 else "loss" if high < 1 else "even"
    return {"before_ms": statistics.median(before) / 1e6, "after_ms": statistics.median(after) / 1e6,
            "ratio": statistics.median(ratios), "low": low, "high": high,
            "verdict": verdict if len(ratios) >= FEW else "too few rounds"}


class Sweeper:
    """Push everything else out of the caches by reading a buffer larger than them."""

    def __init__(self, nbytes=SWEEP_BYTES):
        self.words = np.ones(nbytes // 8, dtype=np.uint64)

    def __call__(self):
        self.words.sum()


def interleave(variants, rounds, sweep=None, clock=time.thread_time_ns):
    """Run each variant once a round, in rotating order; returns {name: [ns, a round each]}.

    Variants that are missing are left out.
    """
    variants = [variant for variant in variants if not variant.missing]
    samples = {variant.name: [] for variant in variants}
    for turn in range(rounds):
        for k in range(len(variants)):
            variant = variants[(turn + k) % len(variants)]
            if variant.before is not None:
                variant.before()
            if sweep is not None:
                sweep()
            start = clock()
            variant.run()
            samples[variant.name].append(clock() - start)
    return samples


def rows_of(case, variants, entries, samples, bars):
    """Put samples and bars together: a Row for each variant, in the order given."""
    return [Row(case, variant.name, entries, samples.get(variant.name, []),
                [bar.judge(samples) for bar in bars if bar.variant == variant.name], variant.missing)
            for variant in variants]
