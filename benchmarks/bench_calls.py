#!/usr/bin/env python3
"""Measure what one call from Python costs, with pyperf: folio helpers, handles, one pin; and what `import mmcore` adds.

Times are processor time: what other processes take is not counted. Prints pyperf's line for each, then which limits
are met. pyperf's own options work (--fast, -o FILE, --affinity, ...).
"""
import statistics
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT))     # after an installed one

try:
    import pyperf
except ImportError:
    sys.exit("pyperf is missing: pip install 'mmcore[bench]'")

from mmcore.bench import calls  # noqa: E402

IMPORT = "import time, numpy; start = time.process_time(); import mmcore; print(time.process_time() - start)"


def import_ms(rounds=9):
    """Return the median ms that importing mmcore takes after NumPy, in new processes whose caches are warm."""
    times = [float(subprocess.run([sys.executable, "-c", IMPORT], cwd=ROOT, check=True, capture_output=True,
                                  text=True).stdout)
             for _ in range(rounds + 1)]
    return statistics.median(times[1:]) * 1e3


def main():
    """Measure, print, and return the exit status."""
    runner = pyperf.Runner(processes=5, program_args=(__file__,))
    runner.metadata["description"] = "calls of mmcore from Python"
    runner.parse_args()
    scene, found = calls.Scene(), {}
    for name, (statement, most) in calls.CALLS.items():
        found[name] = runner.bench_time_func(name, calls.time_call(scene, statement)), most
    if runner.args.worker or any(bench is None for bench, _ in found.values()):
        return 0
    print()
    missed = False
    for name, (bench, most) in found.items():
        if most is not None:
            took = bench.median() * 1e9
            missed |= took > most
            print(f"{name}: {took:.1f} ns, must reach <= {most} ns: {'yes' if took <= most else 'NO'}")
    took = import_ms()
    missed |= took > calls.IMPORT_MS
    met = "yes" if took <= calls.IMPORT_MS else "NO"
    print(f"import mmcore after NumPy: {took:.1f} ms, must reach <= {calls.IMPORT_MS} ms: {met}")
    return int(missed)


if __name__ == "__main__":
    sys.exit(main())
