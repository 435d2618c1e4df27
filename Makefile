# make        set everything up and run the main job: what does registering a buffer cost?
# make test   set everything up and run the tests
# Both work from a fresh clone; what is missing on the machine is named with the package to install.
.DELETE_ON_ERROR:

PYTHON ?= python3
VENV ?= .venv
PY = $(VENV)/bin/python

.PHONY: run test build setup check-tools bench coverage clean tsan asan ubsan fuzz races

run: build
	$(VENV)/bin/mmcore register --size 256M --backing thp

test: build
	$(PY) -m pytest $(PYTEST_ARGS)

bench: build
	$(PY) benchmarks/bench_unpin.py
	$(PY) benchmarks/bench_sg.py
	$(PY) benchmarks/bench_gup.py
	$(PY) benchmarks/bench_mm.py
	$(PY) benchmarks/bench_mr.py
	$(PY) benchmarks/bench_ledger.py

# Which lines of mmcore/ the suite runs; fails below 95 %.
coverage: setup
	@$(PY) -m pip install -q 'coverage>=7.10'
	$(PY) tests/coverage/run.py $(PYTEST_ARGS)

# The suite's threads under ThreadSanitizer, and the suite under the address and undefined-behaviour sanitizers, each on a
# build of its own in build/NAME. SANITIZE_ARGS: other tests or words for pytest.
tsan asan ubsan: setup
	$(PY) tests/sanitize/run.py $@ $(SANITIZE_ARGS)

# Small scenarios under every interleaving of their steps, on a build with step marks in build/races.
races: setup
	$(PY) tests/races/run.py $(RACES_ARGS)

# Random calls, damaged files, random command lines; what is worth keeping stays in build/fuzz.
FUZZ_SECONDS ?= 120
fuzz: build
	$(PY) tests/fuzz_run.py --seconds $(FUZZ_SECONDS)

# Incremental: Cython and the compiler see only what changed.
build: setup
	@$(PY) setup.py -q build_ext --inplace

setup: $(VENV)/.ready

# The project is installed in place, so that the modules that build_ext writes are the ones that are imported.
$(VENV)/.ready: pyproject.toml | check-tools
	$(PYTHON) -m venv $(VENV)
	$(PY) -m pip install -q --upgrade pip 'setuptools>=77' 'Cython>=3.1'
	MMCORE_METADATA_ONLY=1 $(PY) -m pip install -q --no-build-isolation --editable '.[cli,test]'
	@touch $@

check-tools:
	@command -v $(PYTHON) >/dev/null || { echo "$(PYTHON) is missing: install python3 (Debian: apt-get install python3 python3-dev python3-venv)" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { echo "$(PYTHON) is older than 3.10: pass PYTHON=python3.12, or install a newer one" >&2; exit 1; }
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || { echo "the venv module is missing: install it (Debian: apt-get install python3-venv)" >&2; exit 1; }
	@$(PYTHON) -c 'import os, sys, sysconfig; sys.exit(not os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h")))' || { echo "Python.h is missing: install the headers (Debian: apt-get install python3-dev)" >&2; exit 1; }
	@command -v $${CC:-cc} >/dev/null || { echo "no C compiler: install one (Debian: apt-get install gcc libc6-dev)" >&2; exit 1; }

clean:
	rm -rf build mmcore/core/*.c mmcore/core/*.so mmcore/drivers/*.c mmcore/drivers/*.so
