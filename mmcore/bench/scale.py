"""How the cost of pinning grows with the size of a buffer and with threads, and the real memory of a modelled GiB."""
import os
import subprocess
import sys

import mmcore as mmc
from mmcore.core.size import format_size

from . import gup
from .measure import Row, Sweeper, Variant, interleave, median_mad
from .report import progress
from .scaling import together

GIB = 1 << 30
PAGE = 4096
FLAT = 1.2                      # a page may cost so many times what it costs in the smallest buffer
BACKINGS = {"2 MiB leaves": "thp", "base pages": "base"}
#: Bytes of real memory for each modelled base page: its struct page, its entry in a page table, in a list of PFNs and
#: in the list of what a release frees.
REAL_BYTES = {"thp": 64 + 2 * 8, "base": 64 + 8 + 2 * 8}
STEP = 8


def sizes(backing, largest, budget):
    """Return ([bytes of the buffers], why some are not among them or ""): from 1 GiB, by factors of 8, within a budget of real
    memory, all at once. Where not all of them fit, those below the largest make room for it, from the top on.
    """
    wanted = [min(GIB, largest)]
    while wanted[-1] < largest:
        wanted.append(min(wanted[-1] * STEP, largest))

    def need(found):
        return sum(found) // PAGE * REAL_BYTES[backing]

    fits = next((nr for nr in range(len(wanted)) if need(wanted[:nr + 1]) > budget), len(wanted))
    if fits == len(wanted):
        return wanted, ""
    found, gone = [*wanted[:-1], largest], []
    while len(found) > 2 and need(found) > budget:
        gone.insert(0, format_size(found.pop(-2)))
    if len(found) > 1 and need(found) <= budget:
        return found, f"{', '.join(gone)}: no room beside {format_size(largest)} in {budget / GIB:.1f} GiB of real memory"
    return wanted[:fits], (f"{format_size(wanted[fits])} needs {need(wanted[:fits + 1]) / GIB:.1f} GiB of real memory, "
                           f"{budget / GIB:.1f} GiB are allowed")


def with_size(backing, found, rounds):
    """Pin and release a whole buffer of each size, interleaved; rows with ns a page, held against the smallest.

    Leaves go into runs: a list of 16 Mi pages and more is not kept when it is dropped, and the next one is new memory.
    """
    machines, rows = {}, []
    try:
        for size in found:
            machines[format_size(size)] = gup.Machine(size, backing)
        output = mmc.PageRanges if backing == "thp" else mmc.PageList
        variants = [Variant(name, gup.Whole(machine, output=output).both) for name, machine in machines.items()]
        # Swept: the list and the struct pages of a small buffer would be in the caches, and those of a large one not.
        samples = {name: times[1:] for name, times in interleave(variants, rounds + 1, Sweeper()).items()}
        first = variants[0].name
        for variant in variants:
            machine, bars = machines[variant.name], []
            if variant.name != first:
                bars = [gup.Flat(variant.name, first, at_most=FLAT, own=machine.nr,
                                 other=machines[first].nr).judge(samples)]
            what = next(what for what, kind in BACKINGS.items() if kind == backing)
            rows.append(Row(f"pin + unpin, {what}", variant.name, machine.nr, samples[variant.name], bars))
        return rows
    finally:
        variants = None
        for machine in machines.values():
            machine.close()


def with_threads(backing, most, rounds, size=GIB // 4, turns=8):
    """Pin and release a buffer of its own in each of 1..most threads; rows with ns a page, and the scaling."""
    machines = [gup.Machine(size, backing) for _ in range(most)]
    what = next(what for what, kind in BACKINGS.items() if kind == backing)
    counts = sorted({1, *[nr for nr in (2, 4, 8, 16, 32, 64) if nr <= most], most})
    samples, rows = {nr: [] for nr in counts}, []
    try:
        for turn in range(rounds):
            for k in range(len(counts)):
                nr = counts[(turn + k) % len(counts)]
                samples[nr].append(together([[gup.Whole(machine).both] * turns for machine in machines[:nr]]))
        for nr in counts:
            entries, bars = machines[0].nr * turns * nr, []
            if nr > 1:
                ratio, spread = median_mad([one * nr / many for one, many in zip(samples[1], samples[nr])])
                bars = [{"against": "1 thread", "ratio": ratio, "spread": spread, "bar": "", "met": None,
                         "note": f"of {nr}"}]
            rows.append(Row(f"threads, {what}", f"{nr} thread{'s' * (nr > 1)}", entries, samples[nr], bars))
        return rows
    finally:
        for machine in machines:
            machine.close()


# VmHWM and not ru_maxrss: that one counts what the parent had when it forked.
PEAK = """
import sys
import mmcore as mmc
from mmcore.bench import gup

def peak():
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM"))

before = peak()
machine = gup.Machine(int(sys.argv[1]), sys.argv[2])
pages = mmc.pin_user_pages_fast(machine.mm, machine.addr, machine.nr, gup.WRITE)
mmc.unpin_user_pages(pages)
print((peak() - before) * 1024)
"""


def peak_bytes(size, backing):
    """Return the peak of real memory that a new process takes to fault in, pin and release one buffer, without
    what importing takes; None where the system does not say.
    """
    if not os.path.exists("/proc/self/status"):
        return None
    done = subprocess.run([sys.executable, "-c", PEAK, str(size), backing], check=True, capture_output=True, text=True,
                          env={**os.environ,
                               "PYTHONPATH": os.pathsep.join([os.path.dirname(os.path.dirname(mmc.__file__)),
                                                              *sys.path])})
    return int(done.stdout)


def peak_rows(found_by_backing):
    """Return rows with MiB of real memory for a modelled GiB."""
    rows = []
    for what, backing in BACKINGS.items():
        for size in found_by_backing[backing]:
            peak = peak_bytes(size, backing)
            if peak is None:
                rows.append(Row("peak memory of a modelled GiB", f"{format_size(size)}, {what}", 1, [],
                                missing="no /proc/self/status"))
                continue
            rows.append(Row("peak memory of a modelled GiB", f"{format_size(size)}, {what}", 1, [],
                            [{"against": "", "ratio": peak / size * 1024, "spread": None, "bar": "", "met": None,
                              "note": f"MiB; {peak / (1 << 20):.0f} MiB in all"}],
                              shown=f"{peak / size * 1024:.1f} MiB"))
    return rows


def measure(rounds, largest, base_largest, budget, threads):
    """Measure all of it; returns (rows, reasons why something was left out)."""
    rows, left_out, found = [], [], {}
    for what, backing in BACKINGS.items():
        progress(f"pin + unpin, {what}")
        found[backing], why = sizes(backing, largest if backing == "thp" else base_largest, budget)
        if why:
            left_out.append(f"{what}: {why}")
        if found[backing]:
            rows += with_size(backing, found[backing], rounds)
    if threads > 1:
        for what, backing in BACKINGS.items():
            progress(f"threads, {what}")
            rows += with_threads(backing, threads, rounds)
    else:
        left_out.append("threads: one processor")
    progress("peak memory")
    return rows + peak_rows(found), left_out
