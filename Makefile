# People and CI use the same commands. Each target does the missing set-up first; later calls skip it.

PYTHON ?= python3
TORCH ?= 2.13.0
PYTEST_ARGS ?=
BENCH_ARGS ?=
FUZZ_INPUTS ?= 5000000
DEMO_ARGS ?=

BIN := .venv/bin
DONE := .venv/done
# Python compiles each file at its first import: pip would compile thousands that nothing imports.
PIP := $(BIN)/python -m pip --disable-pip-version-check
PIP_INSTALL := $(PIP) install --no-compile
# uv installs many packages sooner. Where it cannot, such as from an index that only pip knows, pip does.
UV_INSTALL := UV_CACHE_DIR=$(CURDIR)/.venv/uv $(BIN)/uv pip install --python $(BIN)/python
# Errors only: pip warns for each package that one of several indexes does not have.
QUIETLY := --quiet --quiet
# A test process that dies ends the run: pytest-xdist would wait forever for what it had.
# Three for two cores: the tests wait for a quarter of their time, for processes, servers and timeouts.
TEST_PROCESSES ?= $(shell echo $$(($$(getconf _NPROCESSORS_ONLN) * 3 / 2)))
SHARED_TESTS := $(BIN)/python -m pytest -n $(TEST_PROCESSES) --dist loadfile --no-loadscope-reorder --max-worker-restart 0 -m 'not alone and not nightly'
TABLES := bench/readme_table.py bench/docs_tables.py
BENCHES := $(filter-out bench/harness.py $(TABLES),$(wildcard bench/*.py))

# Each of the many processes of the tests would compile all that it imports.
unexport PYTHONDONTWRITEBYTECODE

# OpenMP's threads, which torch uses, spin while they wait: where processes share cores, for longer than tests compute.
test test-reference test-nightly coverage: export OMP_WAIT_POLICY := passive

# Debian's packages come while pip's do and native/ is compiled, and the peers before mypy ends.
MAKEFLAGS += --jobs=4

.DELETE_ON_ERROR:
.PHONY: help setup demo peers test test-reference test-nightly lint format coverage fuzz bench bench-images clean

help:
	@echo "make demo            train a small network on real images, with torch's DataLoader and with feedline's (DEMO_ARGS=--help)"
	@echo "make test            run ruff, mypy and the whole test suite (PYTEST_ARGS='-k words' for a part of it)"
	@echo "make test-reference  run the conformance tests on torch's own DataLoader (after a change of them, or of torch's version)"
	@echo "make test-nightly    run the tests that take minutes each, many rounds of the random kills and interrupts, and many examples of all property tests"
	@echo "make lint            run ruff and mypy"
	@echo "make format          reformat with ruff"
	@echo "make coverage        run the test suite, and list the lines that it did not reach"
	@echo "make fuzz            run image kernels and formats on damaged files for a night (FUZZ_INPUTS=20000 for minutes)"
	@echo "make bench           run all benchmarks, print tables, write JSON to bench/results/"
	@echo "make bench-images    run the image benchmarks only: feedline and its peers, each in its own environment (BENCH_ARGS=--quick)"
	@echo "make clean           remove build files and the virtual environment"

setup: $(DONE)/installed

# With torchvision's Python part, in a folder of its own: its wheels belong to other builds of torch.
demo: $(DONE)/installed
	@PYTHONPATH="$$($(BIN)/python tests/helpers/peers.py torchvision)" $(BIN)/python examples/demo/demo.py $(DEMO_ARGS)

# First the tests that start many processes, then those that import many libraries, each on all cores: a process forks the more
# slowly the larger it is. Last those that measure time or memory, one by one. With PYTEST_ARGS some of the three parts may
# be empty, which pytest reports with exit code 5. In the second, torch's operators compute in one thread: three processes that
# train small networks on two cores wait for each other's threads. What asks torch for their number is answered as usual.
test: lint peers $(DONE)/services $(DONE)/bytecode
	@$(SHARED_TESTS) --part forking $(PYTEST_ARGS) || [ $$? -eq 5 ]
	@OMP_THREAD_LIMIT=1 $(SHARED_TESTS) --part others $(PYTEST_ARGS) || [ $$? -eq 5 ]
	@$(BIN)/python -m pytest -m 'alone and not nightly' $(PYTEST_ARGS) || [ $$? -eq 5 ]

# The conformance tests state what torch does. Whether that is true depends on torch alone, so it is not part of `test`.
test-reference: $(DONE)/installed
	@$(BIN)/python -m pytest -n auto --dist loadfile --reference tests/conformance $(PYTEST_ARGS)

# Tests that take minutes because of the timeouts of others, such as the rendezvous of torchrun, and the stress tests with
# many rounds of their random kills and interrupts, of which `test` makes a few. Then all property tests, with several times as
# many examples; without CI, they are other examples each night.
test-nightly: peers $(DONE)/installed $(DONE)/services
	@NIGHTLY=1 $(BIN)/python -m pytest -m 'nightly or stress' $(PYTEST_ARGS)
	@env -u CI NIGHTLY=1 $(BIN)/python -m pytest -m 'hypothesis and not nightly' $(PYTEST_ARGS)

# Packages that stay out of the environment, such as torchvision, in folders of their own.
peers: $(DONE)/environment
	@$(BIN)/python tests/helpers/peers.py

# mypy reads src/, so it need not wait for the compiler.
lint: $(DONE)/dependencies
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy

format: $(DONE)/installed
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

coverage: $(DONE)/installed $(DONE)/services
	@$(BIN)/python -m coverage run -m pytest $(PYTEST_ARGS)
	@$(BIN)/python -m coverage combine --quiet
	@$(BIN)/python -m coverage report

# The comparisons with Pillow take about 100 times as long for each input as the kernels under sanitizers, and so do the
# formats, of which there are dozens.
fuzz: $(DONE)/installed $(DONE)/services
	@SEED=$$$$ scripts/fuzz --inputs $(FUZZ_INPUTS)
	@SEED=$$$$ scripts/fuzz --valgrind $$(($(FUZZ_INPUTS) / 200))
	@cd build/fuzz && PYTHONPATH=../../tests/helpers ../../$(BIN)/python ../../tests/images/verdicts.py $$(($(FUZZ_INPUTS) / 20)) $$$$
	@cd build/fuzz && PYTHONPATH=../../tests/helpers ../../$(BIN)/python ../../tests/images/encoders.py $$(($(FUZZ_INPUTS) / 200)) $$$$
	@cd build/fuzz && PYTHONPATH=../../tests:../../tests/helpers:../../tests/services:../../examples/extending \
		../../$(BIN)/python -X faulthandler ../../tests/formats/hostile.py all $$(($(FUZZ_INPUTS) / 500)) $$$$

bench: $(DONE)/installed $(DONE)/services
	@set -e; for script in $(BENCHES); do echo "== $$script"; $(BIN)/python $$script; done
	@$(MAKE) --no-print-directory bench-images
	@set -e; for script in $(TABLES); do $(BIN)/python $$script; done

bench-images: $(DONE)/installed
	@PYTHONPATH=bench:examples/demo $(BIN)/python -m images.contest $(BENCH_ARGS)

clean:
	rm -rf .venv build

$(DONE)/system: scripts/system-packages
	@scripts/system-packages $(PYTHON)
	@mkdir -p $(DONE) && touch $@

# The servers for the tests and for the remote benchmarks.
$(DONE)/services: scripts/system-packages | $(DONE)/system
	@scripts/system-packages --test
	@mkdir -p $(DONE) && touch $@

# Python's own pip may be years old: the latest finds the versions of 200 packages in a third of the time.
$(DONE)/environment: $(DONE)/system
	@$(PYTHON) -m venv .venv
	@$(PIP_INSTALL) $(QUIETLY) --upgrade pip
	@touch $@

# The tools come first, so that native/ is compiled while pip installs torch.
$(DONE)/build-tools: $(DONE)/environment
	@$(PIP_INSTALL) $(QUIETLY) cmake ninja nanobind scikit-build-core
	@$(PIP_INSTALL) $(QUIETLY) uv 2>/dev/null || true
	@touch $@

# torch is installed alone: packages that depend on it would bring its newest build with all of CUDA. It is then pinned, so
# that no later package replaces it.
$(DONE)/torch.txt: $(DONE)/build-tools
	@$(BIN)/python -c 'import importlib.util as u, sys; sys.exit(u.find_spec("torch") is None)' \
		|| $(PIP_INSTALL) 'torch==$(TORCH)'
	@$(BIN)/python -c 'from importlib.metadata import version; print("torch==" + version("torch"))' > $@

# Built with the tools of the environment, not in isolation: a rebuild of native/ takes seconds instead of a minute. The wheel
# is only made to compile while pip installs what feedline needs: the editable package then has nothing left to compile.
$(DONE)/compiled: $(DONE)/build-tools pyproject.toml CMakeLists.txt $(wildcard native/* native/*/*)
	@$(PIP) wheel $(QUIETLY) --no-build-isolation --no-deps --wheel-dir build/wheel .
	@touch $@

$(DONE)/dependencies: $(DONE)/torch.txt pyproject.toml
	@$(BIN)/python -c 'import tomllib as t; p = t.load(open("pyproject.toml", "rb"))["project"]; \
		print(*p["dependencies"], *p["optional-dependencies"]["dev"], sep="\n")' > $@.txt
	@$(UV_INSTALL) --quiet --no-build-isolation --constraint $(DONE)/torch.txt --requirement $@.txt 2>/dev/null \
		|| $(PIP_INSTALL) $(QUIETLY) --no-build-isolation --constraint $(DONE)/torch.txt --requirement $@.txt
	@rm -rf .venv/uv
	@touch $@

# The first import of a file compiles it, and the processes of the tests would compile the same 4,000 files at the same time.
# One does so while mypy runs. What fails here fails in the tests, too, and is reported there.
$(DONE)/bytecode: $(DONE)/installed | peers
	@$(BIN)/python -m pytest --collect-only --quiet >/dev/null 2>&1 || true
	@touch $@

$(DONE)/installed: $(DONE)/dependencies $(DONE)/compiled
	@$(PIP_INSTALL) $(QUIETLY) --no-build-isolation --no-deps --editable .
	@touch $@
