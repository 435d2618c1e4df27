# make        set everything up and run the main job: what does registering a buffer cost?
# make test   set everything up and run the tests
# Both work from a fresh clone; what is missing on the machine is named with the package to install.
.DELETE_ON_ERROR:

PYTHON ?= python3
VENV ?= .venv
PY = $(VENV)/bin/python

.PHONY: run test build setup lint stubs docs wheel bench bench-all bench-calls bench-gate coverage stress
.PHONY: tsan asan ubsan fuzz races check-tools clean

run: build
	$(VENV)/bin/mmcore register --size 256M --backing thp

test: build
	$(PY) -m pytest $(PYTEST_ARGS)

# Style, names and types; no compiler needed.
lint: $(VENV)/.extra-lint
	$(PY) -m ruff check .
	PATH="$(VENV)/bin:$$PATH" $(VENV)/bin/cython-lint mmcore benchmarks
	$(PY) -m mypy
	$(PY) -m mypy --strict --follow-imports=silent tests/typed_use.py

# The .pyi files against the built modules.
stubs: build $(VENV)/.extra-lint
	$(PY) -m mypy.stubtest mmcore --concise --ignore-unused-allowlist --allowlist tests/stubtest-allowlist.txt

# docs/_build/html; a warning is an error.
docs: build $(VENV)/.extra-docs
	$(PY) -m sphinx -W -q -b html docs docs/_build/html
	@echo "docs/_build/html/index.html"

# dist/: the sdist, and the wheel made from it.
wheel: $(VENV)/.extra-dev
	$(PY) -m build --no-isolation --outdir dist

# Every published measurement again, in one run.
bench: build
	$(VENV)/bin/mmcore bench

# Every scenario by itself, with what each must reach.
bench-all: build
	$(PY) benchmarks/bench_unpin.py
	$(PY) benchmarks/bench_sg.py
	$(PY) benchmarks/bench_gup.py
	$(PY) benchmarks/bench_mm.py
	$(PY) benchmarks/bench_mr.py
	$(PY) benchmarks/bench_capture.py
	$(PY) benchmarks/bench_vfio.py
	$(PY) benchmarks/bench_scale.py
	$(PY) benchmarks/bench_ledger.py

# What one call from Python costs, by pyperf.
bench-calls: build
	@$(PY) -c 'import pyperf' 2>/dev/null || $(PY) -m pip install -q 'pyperf>=2.6'
	$(PY) benchmarks/bench_calls.py --quiet

# Instructions of the hot loops against the stored ones: fails when one takes over 5 % more. 77: not possible here, and why.
bench-gate: build
	$(PY) benchmarks/bench_gate.py || [ $$? -eq 77 ]

stress: build
	$(VENV)/bin/mmcore stress --seconds 60

# Which lines of mmcore/ the suite runs; fails below 95 %.
coverage: build
	@$(PY) -m pip install -q 'coverage>=7.10'
	$(PY) tests/coverage/run.py $(PYTEST_ARGS)

# The suite's threads under ThreadSanitizer, and the suite under the address and undefined-behaviour sanitizers, each on a
# build of its own in build/NAME (tests of scripts run these on the ordinary one). SANITIZE_ARGS: other tests or words for pytest.
tsan asan ubsan: build
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

# What an extra of pyproject.toml brings, installed when it is first needed.
$(VENV)/.extra-%: pyproject.toml | setup
	MMCORE_METADATA_ONLY=1 $(PY) -m pip install -q --no-build-isolation --editable '.[$*]'
	@touch $@

check-tools:
	@command -v $(PYTHON) >/dev/null || { echo "$(PYTHON) is missing: install python3 (Debian: apt-get install python3 python3-dev python3-venv)" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { echo "$(PYTHON) is older than 3.10: pass PYTHON=python3.12, or install a newer one" >&2; exit 1; }
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || { echo "the venv module is missing: install it (Debian: apt-get install python3-venv)" >&2; exit 1; }
	@$(PYTHON) -c 'import os, sys, sysconfig; sys.exit(not os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h")))' || { echo "Python.h is missing: install the headers (Debian: apt-get install python3-dev)" >&2; exit 1; }
	@command -v $${CC:-cc} >/dev/null || { echo "no C compiler: install one (Debian: apt-get install gcc libc6-dev)" >&2; exit 1; }

clean:
	rm -rf build dist docs/_build mmcore/core/*.c mmcore/core/*.so mmcore/drivers/*.c mmcore/drivers/*.so
