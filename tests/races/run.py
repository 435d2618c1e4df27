#!/usr/bin/env python3
"""Build mmcore with step marks in build/races, and explore the interleavings of tests/races/scenarios.py.

run.py [name ...]: only scenarios whose names contain one of these. Exit status 1 when a run ended unlawful, or when a
planted fault was not found.
"""
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "sanitize"))


def start(words):
    """Build, and run this file again with the scheduler loaded."""
    from run import build, compiler
    where = build("races", "-O1 -g -DMMCORE_RACES -Wno-unused-function")
    lib = where / "libstep.so"
    subprocess.run([*compiler().split(), "-O1", "-g", "-shared", "-fPIC", "-pthread", "-o", lib, HERE / "step.c", "-ldl"], check=True)
    env = {**os.environ, "LD_PRELOAD": str(lib), "PYTHONPATH": str(where / "lib"), "MMCORE_RACES": "1"}
    return subprocess.run([sys.executable, HERE / "run.py", *words], env=env).returncode


def main(words):
    from explore import Explorer
    from scenarios import PLANTED, SCENARIOS
    explorer, bad = Explorer(), 0
    for scenario, preemptions, most in SCENARIOS:
        if words and not any(word.lower() in scenario.__name__.lower() for word in words):
            continue
        runs, steps, failures, whole = explorer.explore(scenario, preemptions, most)
        print(f"{scenario.__name__:26} {runs:5} interleavings, {steps / runs:6.0f} steps each, up to {preemptions} preemptions"
              f"{'' if whole else ' (cut off)'}: {'lawful' if not failures else f'{len(failures)} UNLAWFUL'}", flush=True)
        for schedule, error in failures:
            print(f"    {type(error).__name__}: {error}\n    schedule: {''.join(map(str, schedule))}")
        bad += len(failures)
    for number, scenario, preemptions in PLANTED:
        if words and not any(word.lower() in scenario.__name__.lower() for word in words):
            continue
        explorer.planted.value = number
        runs, _, failures, _ = explorer.explore(scenario, preemptions, 4000)
        explorer.planted.value = 0
        found = f"found, {runs} interleavings: {str(failures[0][1])[:90]}" if failures else f"NOT FOUND in {runs} interleavings"
        print(f"planted fault {number} in {scenario.__name__}: {found}", flush=True)
        bad += not failures
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]) if "MMCORE_RACES" in os.environ else start(sys.argv[1:]))
