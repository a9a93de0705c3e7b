# People and CI use the same commands. Each does whatever set-up is still missing; a second call goes straight to work.

PYTHON ?= python3
TORCH ?= 2.13.0
PYTEST_ARGS ?=
BENCH_ARGS ?=
DEMO_ARGS ?=

BIN := .venv/bin
DONE := .venv/done
PIP := $(BIN)/python -m pip --disable-pip-version-check
TABLES := bench/readme_table.py bench/docs_tables.py
BENCHES := $(filter-out bench/harness.py $(TABLES),$(wildcard bench/*.py))

.DELETE_ON_ERROR:
.PHONY: help setup demo test test-reference lint format coverage bench bench-images clean

help:
	@echo "make demo      train a small model on real pictures, through torch's DataLoader and through feedline (DEMO_ARGS=--help)"
	@echo "make test      ruff, mypy and the whole test suite (PYTEST_ARGS='-k words' for a part of it)"
	@echo "make test-reference  the conformance tests on torch's own loader (after a change of them, or of torch's version)"
	@echo "make lint      ruff and mypy; make format rewrites"
	@echo "make bench     every measurement in bench/, tables printed, JSON written to bench/results/"
	@echo "make bench-images  pictures only: feedline and its peers, each in an environment of its own (BENCH_ARGS=--quick)"
	@echo "make coverage  the test suite with a table of what it did not reach"
	@echo "make clean     remove what was built and the virtual environment"

setup: $(DONE)/installed

demo: $(DONE)/installed
	@$(BIN)/python examples/demo/demo.py $(DEMO_ARGS)

# First what can share the machine, on all cores; then what measures memory and moments, by itself. A selection of
# PYTEST_ARGS may leave one of the two without tests, which pytest reports with exit code 5.
test: lint $(DONE)/services
	@$(BIN)/python tests/helpers/peers.py
	@$(BIN)/python -m pytest -n auto --dist loadfile -m 'not alone' $(PYTEST_ARGS) || [ $$? -eq 5 ]
	@$(BIN)/python -m pytest -m 'alone' $(PYTEST_ARGS) || [ $$? -eq 5 ]

# The conformance tests say what torch does. That this is true depends on torch alone, so it is not asked in every run.
test-reference: $(DONE)/installed
	@$(BIN)/python -m pytest -n auto --dist loadfile --reference tests/conformance $(PYTEST_ARGS)

lint: $(DONE)/installed
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

# The servers that the tests and one bench run against.
$(DONE)/services: scripts/system-packages
	@scripts/system-packages --test
	@mkdir -p $(DONE) && touch $@

$(DONE)/environment: $(DONE)/system
	@$(PYTHON) -m venv .venv
	@touch $@

# torch comes first and alone: what depends on it would bring its newest build with all of CUDA. Once there, it is
# pinned, so that nothing that is installed later replaces it.
$(DONE)/torch.txt: $(DONE)/environment
	@$(BIN)/python -c 'import importlib.util as u, sys; sys.exit(u.find_spec("torch") is None)' \
		|| $(PIP) install 'torch==$(TORCH)'
	@$(BIN)/python -c 'from importlib.metadata import version; print("torch==" + version("torch"))' > $@

$(DONE)/build-tools: $(DONE)/torch.txt
	@$(PIP) install --quiet cmake ninja nanobind scikit-build-core
	@touch $@

# Built with the tools of the environment, not in isolation: seconds in place of a minute when native/ has changed.
$(DONE)/installed: $(DONE)/build-tools pyproject.toml CMakeLists.txt $(wildcard native/* native/*/*)
	@$(PIP) install --quiet --no-build-isolation --constraint $(DONE)/torch.txt --editable '.[dev]'
	@touch $@
