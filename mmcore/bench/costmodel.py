"""What would registering cost with another backing: a model with a stated error, from a calibration measured on this
machine.

Each phase of a real run (fault-in, register, unregister, free, and their total) is taken to cost a + b * pages, for
each backing apart. How far real runs were from that line, as a ratio, gives the interval: it is drawn around 95 % of
those ratios, so that a later run, which meets another load, lies in it nine times out of ten. share_inside() tells how
often it really does.

A calibration is kept, with its samples, its date and what it was measured on, in the user's cache directory. One
session cannot see how the machine drifts (other load, other memory): a new calibration joins the last ones of the same
machine, so that the interval comes to hold what really varies.
"""

import datetime
import json
import os
import platform
import random
import time
from dataclasses import dataclass, field

import numpy as np

from mmcore.live.errors import NotPossible
from mmcore.live.units import format_size

from .phases import kernel_run

PHASES = ("fault_in", "register", "unregister", "free", "total")
BACKINGS = ("4k", "thp", "hugetlb")
CONFIDENCE = 0.90  # of a later run
DRAWN = 0.95  # of the samples: a later run meets another load than they did
SIZES = tuple((2 << 20) << k for k in range(7))  # 2 MiB to 128 MiB
ROUNDS = 8
STALE_DAYS = 30
SESSIONS = 8  # calibrations that are kept, the last ones
VERSION = 1
LEAST_SAMPLES = 20  # fewer say nothing about nine out of ten


@dataclass(frozen=True)
class Interval:
    """ns: the most likely cost, and between which two it lies with CONFIDENCE."""

    low: float
    middle: float
    high: float

    def __contains__(self, ns):
        return self.low <= ns <= self.high


@dataclass(frozen=True)
class Line:
    """Cost of one phase with one backing: (fixed + per_page * pages) * ratio, the ratio most likely middle, between low
    and high."""

    fixed: float  # ns
    per_page: float  # ns
    low: float
    middle: float
    high: float

    @property
    def spread(self):
        """Return (low, high) as multiples of what is most likely."""
        return self.low / self.middle, self.high / self.middle

    def at(self, pages):
        """Return the Interval for so many pages."""
        base = self.fixed + self.per_page * pages
        return Interval(base * self.low, base * self.middle, base * self.high)


def fit(pages, ns, confidence=DRAWN):
    """Fit a Line to samples: arrays of pages and of ns, one entry a run. Raises ValueError for fewer than 20 or bad
    ones.

    Errors count relative to the cost, so that small buffers matter as much as large ones.
    """
    pages, ns = np.asarray(pages, float), np.asarray(ns, float)
    if pages.shape != ns.shape or pages.ndim != 1 or len(pages) < LEAST_SAMPLES:
        raise ValueError(f"{pages.size} and {ns.size} samples: at least {LEAST_SAMPLES} of each are needed")
    if not (np.isfinite(pages).all() and np.isfinite(ns).all() and (pages > 0).all() and (ns > 0).all()):
        raise ValueError("samples are numbers above 0")
    # Medians of each size first: one run in a hundred that met an interrupt shall not bend the line.
    sizes = np.unique(pages)
    middles = np.array([np.median(ns[pages == size]) for size in sizes])
    weights = np.stack([1 / middles, sizes / middles], axis=1)
    (fixed, per_page), *_ = np.linalg.lstsq(weights, np.ones(len(sizes)), rcond=None)
    if fixed < 0 or len(sizes) == 1:
        fixed, per_page = 0.0, float(np.median(middles / sizes))
    elif per_page < 0:
        fixed, per_page = float(np.median(middles)), 0.0
    ratios = np.sort(ns / (fixed + per_page * pages))
    return Line(float(fixed), float(per_page), *_between(ratios, confidence))


def _between(ratios, confidence):
    """Return (low, median, high) of sorted ratios, such that a new one of their kind lies between with at least this
    confidence.

    A fifth of what is left out lies below, the rest above: costs have a floor, and a long tail of runs that waited for
    something (memory that a hypervisor had to find first).
    """
    n, out = len(ratios), 1 - confidence
    # n samples make n + 1 gaps for the next one: rounded outwards, the interval is not too narrow for its samples.
    low, high = int(np.floor(out / 5 * (n + 1))), int(np.ceil((1 - 4 * out / 5) * (n + 1)))
    return float(ratios[max(0, low - 1)]), float(np.median(ratios)), float(ratios[min(n, high) - 1])


@dataclass
class Calibration:
    """Samples of one machine, and the Lines they give. `.lines[backing][phase]`, `.missing` {backing: (reason,
    remedy)}."""

    kernel: str
    cpu: str
    date: str  # ISO, UTC
    page_size: int
    samples: list  # [{"session": date, "backing", "nbytes", phase: ns}]
    missing: dict = field(default_factory=dict)

    def __post_init__(self):
        self.lines = {}
        for backing in {sample["backing"] for sample in self.samples}:
            mine = [sample for sample in self.samples if sample["backing"] == backing]
            pages = [sample["nbytes"] // self.page_size for sample in mine]
            self.lines[backing] = {phase: fit(pages, [sample[phase] for sample in mine]) for phase in PHASES}

    @property
    def sessions(self):
        """Return the dates of the calibrations that are in it, in order."""
        return sorted({sample["session"] for sample in self.samples})

    def joined(self, older):
        """Return this calibration with the samples of an older one of the same machine; itself for one of another."""
        if (older.kernel, older.cpu, older.page_size) != (self.kernel, self.cpu, self.page_size):
            return self
        keep = set(sorted({*self.sessions, *older.sessions})[-SESSIONS:])
        samples = [sample for sample in older.samples if sample["session"] in keep - set(self.sessions)] + self.samples
        have = {sample["backing"] for sample in samples}
        missing = {backing: why for backing, why in self.missing.items() if backing not in have}
        return Calibration(self.kernel, self.cpu, self.date, self.page_size, samples, missing)

    def predict(self, backing, nbytes):
        """Return {phase: Interval} for registering so many bytes. Raises NotPossible for a backing that was not
        measured."""
        if backing not in self.lines:
            reason, remedy = self.missing.get(backing, ("it was not measured", "mmcore register --calibrate"))
            raise NotPossible(f"the calibration has nothing on {backing}: {reason}", remedy)
        pages = -(-nbytes // self.page_size)
        return {phase: line.at(pages) for phase, line in self.lines[backing].items()}

    def doubts(self, now=None):
        """Say what makes the calibration less than trustworthy here: another kernel or CPU, its age; [] when nothing
        does."""
        found = []
        if self.kernel != platform.release():
            found.append(f"measured on Linux {self.kernel}, this is {platform.release()}")
        if self.cpu != cpu_name():
            found.append(f"measured on {self.cpu}, this is {cpu_name()}")
        age = ((now or _now()) - datetime.datetime.fromisoformat(self.date)).days
        if age >= STALE_DAYS:
            found.append(f"measured {age} days ago")
        elif age < 0:
            found.append("measured in the future, by its date")
        return found

    def doubt_of_size(self, backing, nbytes):
        """Say when a size lies outside of what was measured, else ""."""
        sizes = [sample["nbytes"] for sample in self.samples if sample["backing"] == backing]
        if min(sizes) <= nbytes <= max(sizes):
            return ""
        return (
            f"{format_size(nbytes)} lies outside of the measured {format_size(min(sizes))} to {format_size(max(sizes))}"
        )

    def spread(self, backing):
        """Return (low, high) of the total as multiples of what is most likely."""
        return self.lines[backing]["total"].spread

    def save(self, path=None):
        """Write it, whole or not at all; returns the path."""
        path = path or cache_path()
        os.makedirs(os.path.dirname(path), exist_ok=True)
        part = f"{path}.part{os.getpid()}"
        try:
            with open(part, "w") as file:
                json.dump(
                    {
                        "version": VERSION,
                        "kernel": self.kernel,
                        "cpu": self.cpu,
                        "date": self.date,
                        "page_size": self.page_size,
                        "missing": self.missing,
                        "samples": self.samples,
                    },
                    file,
                )
            os.replace(part, path)
        finally:
            if os.path.exists(part):
                os.unlink(part)
        return path

    @classmethod
    def load(cls, path=None):
        """Read one. Raises FileNotFoundError, and ValueError for a file that is damaged or of another version."""
        path = path or cache_path()
        try:
            with open(path) as file:
                data = json.load(file)
            if data["version"] != VERSION:
                raise ValueError(f"version {data['version']}, this mmcore reads {VERSION}")
            samples = [
                {
                    "session": str(row["session"]),
                    "backing": str(row["backing"]),
                    "nbytes": int(row["nbytes"]),
                    **{phase: float(row[phase]) for phase in PHASES},
                }
                for row in data["samples"]
            ]
            missing = {str(key): (str(reason), str(remedy)) for key, (reason, remedy) in data["missing"].items()}
            datetime.datetime.fromisoformat(data["date"]) - _now()
            if not 0 < int(data["page_size"]) <= 1 << 20 or not samples:
                raise ValueError("no samples, or no page size")
            return cls(str(data["kernel"]), str(data["cpu"]), data["date"], int(data["page_size"]), samples, missing)
        except (ValueError, KeyError, TypeError, AttributeError, UnicodeDecodeError) as error:
            raise ValueError(
                f"{path}: no calibration of this mmcore ({error}); measure again: mmcore register --calibrate"
            ) from None


def cache_path():
    """Return where the calibration is kept: $XDG_CACHE_HOME/mmcore, or ~/.cache/mmcore."""
    base = os.environ.get("XDG_CACHE_HOME")
    # The specification has relative paths ignored.
    if not base or not os.path.isabs(base):
        base = os.path.join(os.path.expanduser("~"), ".cache")
    return os.path.join(base, "mmcore", "calibration.json")


def cpu_name():
    """Return the processor's name, as /proc/cpuinfo has it; what Python knows elsewhere."""
    try:
        with open("/proc/cpuinfo") as file:
            for line in file:
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _now():
    return datetime.datetime.now(datetime.timezone.utc)


def run_sample(nbytes, backing, clock=time.thread_time_ns):
    """Measure one real run; returns a sample."""
    run = kernel_run(nbytes, backing, clock).as_dict()
    return {**run, "total": run["fault_in"] + run["register"] + run["unregister"] + run["free"]}


def calibrate(backings=BACKINGS, sizes=SIZES, rounds=ROUNDS, *, progress=None):
    """Measure this machine: every backing and size in turn, some rounds; returns a Calibration.

    A backing that cannot be had is left out, and its reason kept. Raises NotPossible when none can.
    """
    samples, missing, date = [], {}, _now().isoformat(timespec="seconds")
    for turn in range(rounds):
        for nbytes in sizes:
            for backing in backings:
                if backing in missing:
                    continue
                if progress:
                    progress(f"round {turn + 1} of {rounds}: {format_size(nbytes)} of {backing}")
                try:
                    samples.append({"session": date, **run_sample(nbytes, backing)})
                except NotPossible as error:
                    missing[backing] = (error.reason, error.remedy)
    samples = [sample for sample in samples if sample["backing"] not in missing]
    if not samples:
        raise NotPossible(
            "; ".join(reason for reason, _ in missing.values()), "; ".join(remedy for _, remedy in missing.values())
        )
    return Calibration(platform.release(), cpu_name(), date, os.sysconf("SC_PAGE_SIZE"), samples, missing)


def recalibrate(path=None, **how):
    """Calibrate, join what is kept of this machine already, and keep it; returns the Calibration."""
    fresh = calibrate(**how)
    try:
        fresh = fresh.joined(Calibration.load(path))
    except (FileNotFoundError, ValueError):
        pass  # the first one, or a file that this one replaces
    fresh.save(path)
    return fresh


def share_inside(calibration, samples):
    """Return {phase: share of samples inside their interval}, and under "runs" how many there were; None without
    samples."""
    inside = {phase: 0 for phase in PHASES}
    for sample in samples:
        expected = calibration.predict(sample["backing"], sample["nbytes"])
        for phase in PHASES:
            inside[phase] += sample[phase] in expected[phase]
    runs = len(samples)
    return {phase: count / runs if runs else None for phase, count in inside.items()} | {"runs": runs}


def coverage(calibration, runs=60, *, seed=None, measure=run_sample):
    """Measure real runs of random size and backing, within what the calibration knows; returns (share_inside(), the
    samples).

    What `mmcore bench` reports: aim is 90 %.
    """
    draw = random.Random(seed)
    samples = []
    for _ in range(runs):
        backing = draw.choice(sorted(calibration.lines))
        sizes = [sample["nbytes"] for sample in calibration.samples if sample["backing"] == backing]
        # As likely between 2 and 4 MiB as between 64 and 128.
        nbytes = int(min(sizes) * (max(sizes) / min(sizes)) ** draw.random()) >> 21 << 21
        samples.append(measure(max(nbytes, min(sizes)), backing))
    return share_inside(calibration, samples), samples
