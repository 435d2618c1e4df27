#!/usr/bin/env python3
"""Build mmcore with one of gcc's sanitizers in build/NAME, and run tests on that build: run.py tsan|asan|ubsan [pytest words].

Without words tsan ends with a minute of `mmcore stress`, all operations mixed.
The modules of the working tree stay what they are. Exit status: pytest's, or that of stress; 1 when the sanitizer reported
anything; 77 when this compiler has no such library. Reports are in build/NAME/report.*.
"""
import os
import subprocess
import sys
import sysconfig
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
HERE = Path(__file__).resolve().parent
THREADS = ["test_threads.py", "test_gup_threads.py", "test_mm_threads.py", "test_vfio_threads.py"]
STRESS = ["-m", "mmcore.cli", "stress", "--threads", "4", "--seconds", "60"]
KINDS = {
    # name: compiler words, library, where its options go and what they are, what runs
    "tsan": ("-O1 -g -fsanitize=thread -Wno-tsan", "libtsan.so", "TSAN_OPTIONS",
             f"history_size=4:exitcode=66:suppressions={HERE}/tsan.supp", THREADS),
    "asan": ("-O1 -g -fsanitize=address -fno-omit-frame-pointer", "libasan.so", "ASAN_OPTIONS",
             "detect_leaks=0:allocator_may_return_null=1:exitcode=66", ["."]),
    "ubsan": ("-O1 -g -fsanitize=undefined -fno-sanitize=shift-base,alignment", "libubsan.so", "UBSAN_OPTIONS",
              f"print_stacktrace=1:suppressions={HERE}/ubsan.supp", ["."]),
}


def compiler():
    return os.environ.get("CC") or sysconfig.get_config_var("CC").split()[0]


def build(name, flags):
    """Compile into build/NAME/lib, with whatever compiler CC says."""
    where = ROOT / "build" / name
    link = " ".join(word for word in flags.split() if word.startswith("-fsanitize="))
    env = {**os.environ, "MMCORE_CFLAGS": flags, "MMCORE_LDFLAGS": link, "CC": os.environ.get("CC") or compiler()}
    subprocess.run([sys.executable, "setup.py", "-q", "build", "--build-base", where / "tmp", "--build-lib", where / "lib",
                    "--parallel", str(os.cpu_count())], cwd=ROOT, env=env, check=True)
    return where


def _path(library):
    """Return where the compiler's libraries have this one; the bare name if they do not."""
    return subprocess.run([*compiler().split()[-1:], f"-print-file-name={library}"], capture_output=True, text=True).stdout.strip()


def environment(name, where):
    """Return the variables under which a Python loads the build and its sanitizer.

    libstdc++ comes early too: the sanitizers wrap what throws, and look for it once, before matplotlib brings it.
    """
    flags, library, options, values, _ = KINDS[name]
    path = _path(library)
    if not os.path.isabs(path):
        print(f"{name}: {compiler()} has no {library} here", file=sys.stderr)
        raise SystemExit(77)
    preload = [os.path.realpath(found) for found in (path, _path("libstdc++.so.6")) if os.path.isabs(found)]
    for old in where.glob("report*"):
        old.unlink()
    return {**os.environ, "LD_PRELOAD": " ".join(preload), options: f"{values}:log_path={where / 'report'}",
            "PYTHONPATH": str(where / "lib"), "PYTHONMALLOC": "malloc" if name == "asan" else "default", "MMCORE_SANITIZER": name}


def main(argv):
    if not argv or argv[0] not in KINDS:
        print(__doc__, file=sys.stderr)
        return 2
    name, words = argv[0], argv[1:]
    where = build(name, KINDS[name][0])
    env = environment(name, where)
    # From the tests' directory: the root has a package mmcore of its own.
    done = subprocess.run([sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *(words or KINDS[name][4])],
                          cwd=ROOT / "tests", env=env)
    failed = done.returncode
    if name == "tsan" and not words:
        failed = subprocess.run([sys.executable, *STRESS], cwd=ROOT / "tests", env=env).returncode or failed
    reports = sorted(where.glob("report*"))
    for report in reports:
        print(f"--- {report}\n{report.read_text()}")
    print(f"{name}: {len(reports)} processes with reports, exit status {failed}")
    return 1 if reports else failed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
