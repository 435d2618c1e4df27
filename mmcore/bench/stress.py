"""Many threads on one machine of the engine, with every law checked at quiet points.

A run is a sequence of rounds. In a round each thread does a number of operations that its own generator draws, seeded
by (seed, thread); between two rounds nobody works, and the laws are checked. So a run of one thread is the same each
time, and of several as far as the order allows in which the system lets them run.
"""
import faulthandler
import random
import sys
import threading
import time
import zlib
from dataclasses import dataclass, field

import numpy as np

import mmcore as mmc
from mmcore.core.dump import dump_around

from .stress_jobs import JOBS, REFUSALS, Worker, World

PER_ROUND = 150             # operations of a thread between two quiet points
STUCK_SECONDS = 120         # a round that takes longer will not end
HEAD = np.uint64(mmc.PageFlags.head)
ALONE = 0.2                 # the part of the time in which one thread works alone, for the scaling


class StressFailure(RuntimeError):
    """Say that a law did not hold, or that an operation failed: how to see it again, and the state around it."""


@dataclass
class Report:
    """What a run did."""

    seed: int
    threads: int
    mix: list
    rounds: int = 0
    operations: dict = field(default_factory=dict)      # by job: done
    refused: dict = field(default_factory=dict)         # by job: as other threads or full memory make them
    seconds: float = 0          # of rounds with all threads, checks left out
    alone_rate: float = 0       # operations/s of one thread
    rate: float = 0             # operations/s of all threads
    checks: int = 0
    pins: int = 0               # acquired in all
    state: int = 0              # checksum of mem_map at the last quiet point

    @property
    def scaling(self):
        """Operations/s of all threads against those of one; None with one thread."""
        return self.rate / self.alone_rate if self.threads > 1 and self.alone_rate else None


def parse_mix(text):
    """Return the jobs of a list such as "pin,unpin,fork"; a word that stands twice is drawn twice as often.

    Raises ValueError for a word that is no job.
    """
    words = [word.strip() for word in text.split(",") if word.strip()]
    for word in words:
        if word not in JOBS:
            raise ValueError(f"--mix: {word!r} is none of {', '.join(JOBS)}")
    if not words:
        raise ValueError(f"--mix is empty; there are {', '.join(JOBS)}")
    return words


class Stress:
    """A run: a World and its workers."""

    def __init__(self, threads=2, seed=0, mix=None, per_round=PER_ROUND, debug=False):
        self.threads, self.seed, self.mix, self.per_round = threads, seed, mix or list(JOBS), per_round
        self.jobs = [JOBS[word] for word in self.mix]
        self.world = World(threads, debug)
        self.workers = [Worker(self.world, random.Random(f"{seed}/{k}")) for k in range(threads)]
        self.report = Report(seed, threads, self.mix, operations=dict.fromkeys(self.mix, 0),
                             refused=dict.fromkeys(self.mix, 0))
        self.failure = None

    # ---- rounds ------------------------------------------------------------------------------------------------------
    def _work(self, worker, start):
        counts = {word: [0, 0] for word in self.mix}
        draw, jobs = worker.rng.randrange, self.jobs
        start.wait()
        try:
            for _ in range(self.per_round):
                if self.failure is not None:
                    break
                job = jobs[draw(len(jobs))]
                worker.last = job.__name__
                worker.done += 1
                try:
                    job(worker)
                except mmc.MMError as error:
                    if error.errno not in REFUSALS:
                        raise
                    counts[job.__name__][1] += 1
                else:
                    counts[job.__name__][0] += 1
        except BaseException as error:
            if self.failure is None:
                self.failure = error, worker
        worker.counts = counts

    def round(self, workers):
        """Let these workers do a round; returns its seconds. Raises StressFailure."""
        self.report.rounds += 1
        start = threading.Barrier(len(workers) + 1)
        # Daemons: a thread that is stuck without the GIL must not keep the process from ending.
        threads = [threading.Thread(target=self._work, args=(worker, start), daemon=True) for worker in workers]
        for thread in threads:
            thread.start()
        start.wait()
        began = time.perf_counter()
        for thread in threads:
            thread.join(max(0.1, began + STUCK_SECONDS - time.perf_counter()))
        took = time.perf_counter() - began
        stuck = [worker for worker, thread in zip(workers, threads) if thread.is_alive()]
        if stuck:
            faulthandler.dump_traceback(sys.stderr)
            words = ", ".join(worker.last for worker in stuck)
            raise StressFailure(self._text(f"a round does not end: stuck in {words}", None))
        for worker in workers:
            for word, (done, refused) in worker.counts.items():
                self.report.operations[word] += done
                self.report.refused[word] += refused
        if self.failure is not None:
            error, worker = self.failure
            raise StressFailure(self._text(f"{worker.last}: {type(error).__name__}: {error}", error)) from error
        return took

    def check(self):
        """Check every law, and that the pins which threads hold are those that are counted. Nobody works meanwhile."""
        mem = self.world.mem
        try:
            mem.check()
            stat = mem.vmstat()
            held = sum(worker.nr_pins() for worker in self.workers)
            live = stat["nr_foll_pin_acquired"] - stat["nr_foll_pin_released"]
            if held != live:
                raise mmc.BadPage("pins", f"{held} pins are held, and {live} are counted: acquired - released")
        except mmc.BadPage as error:
            raise StressFailure(self._text(str(error), error)) from error
        self.report.checks += 1
        self.report.pins = stat["nr_foll_pin_acquired"]
        self.report.state = zlib.crc32(mem.pages.tobytes())

    def finish(self):
        """Release everything, end every process, and check that nothing is left."""
        try:
            for worker in self.workers:
                worker.release_all()
            self.world.close()
        except (mmc.BadPage, mmc.MMError) as error:
            raise StressFailure(self._text(f"at the end: {error}", error)) from error
        self.report.checks += 1

    def _text(self, what, error):
        mix, rounds = ",".join(self.mix), self.report.rounds
        words = [what, f"seed {self.seed}, {self.threads} threads, round {rounds}, mix {mix}",
                 f"again: mmcore stress --seed {self.seed} --threads {self.threads} --rounds {rounds} --mix {mix}",
                 "doing: " + ", ".join(worker.last for worker in self.workers)]
        pfn = getattr(error, "pfn", None) or self._wrong_pins()
        if pfn:
            words += [f"around pfn {pfn:#x}:", dump_around(self.world.mem, pfn)]
        return "\n".join(words)


    def _wrong_pins(self):
        """Return the first head whose pins are not those that threads hold by lists and regions, or None.

        For laws about sums, which name no PFN; not told where buffers of io_uring or VFIO hold pins as well.
        """
        mem, held = self.world.mem, {}
        if mem.closed or any(worker.tables or worker.mappings for worker in self.workers):
            return None
        for worker in self.workers:
            for pages in worker.lists():
                for head, count in zip(*(array.tolist() for array in mmc.folio_runs(pages))):
                    held[head] = held.get(head, 0) + count
        pages = mem.pages
        # Small folios whose references reach the bias, and large ones: few enough to look at one by one.
        many = np.flatnonzero((pages["_refcount"] >= mmc.GUP_PIN_COUNTING_BIAS) | (pages["flags"] & HEAD != 0))
        for head in sorted({*many.tolist(), *held}):
            folio = mem.folio(head)
            pins = folio.pincount if folio.order else max(folio.refcount, 0) // mmc.GUP_PIN_COUNTING_BIAS
            if head != mem.zero_page.pfn and folio.pfn == head and folio.refcount > 0 and pins != held.get(head, 0):
                return head
        return None


def run(threads=2, seconds=10.0, seed=0, mix=None, rounds=None, debug=False, tell=None):
    """Run for some seconds, or for a number of rounds; returns a Report. Raises StressFailure.

    With several threads the first fifth of the time is one thread's alone, for the scaling (with rounds: every fifth of
    them). tell(report, seconds) is called after each round.
    """
    stress = Stress(threads, seed, mix, debug=debug)
    report, began = stress.report, time.perf_counter()
    spent, done = {1: 0.0, threads: 0.0}, {1: 0, threads: 0}
    while True:
        elapsed = time.perf_counter() - began
        part = report.rounds / rounds if rounds else elapsed / seconds
        if part >= 1:
            break
        workers = stress.workers[:1] if part < ALONE else stress.workers
        before = sum(report.operations.values())
        spent[len(workers)] += stress.round(workers)
        done[len(workers)] += sum(report.operations.values()) - before
        stress.check()
        report.seconds = spent[threads]
        report.alone_rate = done[1] / spent[1] if spent[1] else 0
        report.rate = done[threads] / spent[threads] if spent[threads] else 0
        if tell is not None:
            tell(report, time.perf_counter() - began)
    stress.finish()
    return report
