#!/usr/bin/env python3
"""Count which lines of mmcore/ the suite runs, Cython and Python alike: run.py [--least PERCENT] [pytest words].

Cython's lines are counted by gcov, at the speed of compiled code and in threads without the GIL: the C files name the line of
the .pyx that each of theirs comes from. Python's are counted by coverage.py. The build is in build/coverage, and the modules
of the working tree stay what they are. Lines that nobody ran are in build/coverage/missing.txt. A line is left out when it
says so, with the reason: `# pragma: no cover - WHY`. Exit status: 1 below PERCENT, or when a test failed.
"""
import argparse
import json
import os
import re
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
WHERE = ROOT / "build" / "coverage"
LEAST = 95.0
FLAGS = "-O1 --coverage -fprofile-update=atomic"
LEFT_OUT = "pragma: no cover"
# Lines that gcov counts and that are no code: words that only open a block (what stands for them is the copy of a `finally` that
# an exception runs), and attributes (what stands for them is the getter that Cython writes). coverage.py counts neither.
NO_CODE = re.compile(r"(else|try|finally):\s*(#.*)?$|cdef (readonly|public) [\w ,*]+(#.*)?$|#")


# Code that is of no line: what closes a function, a try or a loop, and what is written after the last function. Cython says of
# it the line that it said last, which would count as run whenever the function returns from anywhere.
NOBODYS = re.compile(r"\s*/\* function exit code \*/|\s*__pyx_L\d+(_(?!bool_binop_done|next_and|next_or)\w+)?:;"
                     r"|/\* #### Code section: (?!module_code|init_module)")
NOWHERE = '#line 1 "generated"'


def hold_lines(text):
    """Return C in which each line says which line of the .pyx it is of; Cython says it once, and the next ones count on."""
    out, here, open_comment, continued = [], NOWHERE, False, False
    for line in text.splitlines():
        said = re.match(r'#line (\d+) "(.*)"$', line)
        if said:
            # Until a comment says that a statement begins, it is the last one's line again.
            if here != NOWHERE:
                here = f'#line {said[1]} "{said[2]}"'
            continue
        begins = re.match(r'\s*/\* "(.*)":(\d+)$', line)
        if begins:
            here = f'#line {begins[2]} "{begins[1]}"'
        elif NOBODYS.match(line):
            here = NOWHERE
        if not open_comment and not continued:
            out.append(here)
        out.append(line)
        continued = line.endswith("\\")
        code = re.sub(r"/\*.*?\*/", "", line)
        open_comment = "*/" not in code if open_comment else "/*" in code
    return "\n".join(out) + "\n"


def build():
    """Compile the tree into build/coverage/lib."""
    sys.path.insert(0, str(ROOT))
    os.chdir(ROOT)
    import setup as tree
    from Cython.Build import cythonize
    from setuptools import Extension
    from setuptools.dist import Distribution

    made = cythonize(tree.extensions, nthreads=tree.JOBS, compiler_directives=tree.DIRECTIVES, build_dir=str(WHERE / "cython"),
                     emit_linenums=True, quiet=True)
    extensions = []
    for extension in made:
        source = Path(extension.sources[0])
        target = WHERE / "c" / source.relative_to(WHERE / "cython" if source.is_absolute() else (WHERE / "cython").relative_to(ROOT))
        text = hold_lines(source.read_text())
        if not target.exists() or target.read_text() != text:
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(text)
        extensions.append(Extension(extension.name, [str(target.relative_to(ROOT))], depends=tree.HEADERS,
                                    include_dirs=[str(tree.CORE)], extra_compile_args=tree.CFLAGS + FLAGS.split(),
                                    extra_link_args=tree.LDFLAGS + ["--coverage"]))
    options = {"build": {"build_base": str(WHERE / "tmp"), "build_lib": str(WHERE / "lib")}}
    distribution = Distribution({"name": "mmcore", "packages": [], "ext_modules": extensions, "options": options,
                                 "script_name": "setup.py"})
    distribution.parse_config_files()
    distribution.packages = [str(path.parent.relative_to(ROOT)).replace("/", ".") for path in ROOT.glob("mmcore/**/__init__.py")]
    distribution.ext_modules = extensions
    command = distribution.get_command_obj("build_ext")
    command.parallel = tree.JOBS
    distribution.run_command("build")


def run(words):
    """Run the suite on the build; returns pytest's exit status."""
    for old in [*WHERE.rglob("*.gcda"), *WHERE.glob(".coverage*")]:
        old.unlink()
    settings = WHERE / "coveragerc"
    settings.write_text(f"[run]\nsource = {WHERE / 'lib' / 'mmcore'}\ndata_file = {WHERE / '.coverage'}\nparallel = true\n"
                        "patch = subprocess\nconcurrency = thread\n")
    env = {**os.environ, "PYTHONPATH": str(WHERE / "lib"), "COVERAGE_RCFILE": str(settings)}
    # From the tests' directory: the root has a package mmcore of its own.
    return subprocess.run([sys.executable, "-m", "coverage", "run", f"--rcfile={settings}", "-m", "pytest", "-q", "-p",
                           "no:cacheprovider", *(words or ["."])], cwd=ROOT / "tests", env=env).returncode


def cython_lines():
    """Return {file: {line: times}} of the .pyx and .pxd, from gcov."""
    counts = defaultdict(lambda: defaultdict(int))
    for data in sorted(WHERE.rglob("*.gcda")):
        done = subprocess.run(["gcov", "--json-format", "--stdout", data], cwd=ROOT, capture_output=True, text=True, check=True)
        for part in done.stdout.splitlines():
            for file in json.loads(part)["files"]:
                if file["file"].startswith("mmcore/"):
                    for line in file["lines"]:
                        counts[file["file"]][line["line_number"]] += line["count"]
    return counts


def python_lines():
    """Return the same of the .py files, from coverage.py."""
    settings, report = WHERE / "coveragerc", WHERE / "python.json"
    subprocess.run([sys.executable, "-m", "coverage", "combine", "-q", f"--rcfile={settings}"], cwd=WHERE, check=True)
    subprocess.run([sys.executable, "-m", "coverage", "json", "-q", f"--rcfile={settings}", "-o", report], cwd=WHERE, check=True)
    counts = {}
    for name, file in json.loads(report.read_text())["files"].items():
        name = str(Path(WHERE, name).resolve().relative_to(WHERE / "lib"))
        counts[name] = {line: 1 for line in file["executed_lines"]} | {line: 0 for line in file["missing_lines"]}
    return counts


def code_lines(text):
    """Return the numbers of the lines that are code: no blank ones, no comments, no docstrings, nothing of NO_CODE."""
    found, docstring = set(), False
    for n, line in enumerate(map(str.strip, text), 1):
        if docstring or line.startswith('"""'):
            docstring = (line.count('"""') == 1) != docstring
        elif line and not NO_CODE.match(line):
            found.add(n)
    return found


def row(name, total, missed):
    print(f"{name:<40}{total:>6} lines{missed:>6} not run{100 - 100 * missed / total:>8.1f} %")


def report(counts, least):
    """Print a line a file and a directory, write the lines that nobody ran, and return whether enough were."""
    folders, missing, left_out = defaultdict(lambda: [0, 0]), [], []
    for name in sorted(counts):
        text = (ROOT / name).read_text().splitlines()
        lines = counts[name].keys() & code_lines(text)
        skipped = {n for n in lines if LEFT_OUT in text[n - 1]}
        left_out += [f"{name}:{n}: {text[n - 1].strip()}" for n in sorted(skipped)]
        missed = sorted(n for n in lines - skipped if counts[name][n] == 0)
        missing += [f"{name}:{n}: {text[n - 1].strip()}" for n in missed]
        if lines - skipped:
            row(name, len(lines - skipped), len(missed))
            for folder in (str(Path(name).parent), "all"):
                folders[folder][0] += len(lines - skipped)
                folders[folder][1] += len(missed)
    print()
    for folder, (total, missed) in folders.items():
        if folder != "all":
            row(folder, total, missed)
    print("\nleft out by a remark:", *left_out or ["nothing"], sep="\n  ")
    (WHERE / "missing.txt").write_text("\n".join(missing) + "\n")
    total, missed = folders["all"]
    share = 100 - 100 * missed / total
    print(f"\n{share:.1f} % of {total} lines were run, at least {least} % must be; "
          f"the others are in {(WHERE / 'missing.txt').relative_to(ROOT)}")
    return share >= least


def main(argv):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--least", type=float, default=LEAST, metavar="PERCENT")
    options, words = parser.parse_known_args(argv)
    build()
    status = run(words)
    enough = report({**cython_lines(), **python_lines()}, options.least)
    return status or not enough


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
