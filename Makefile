# People and CI use the same commands. Each does whatever set-up is still missing; a second call goes straight to work.

PYTHON ?= python3
TORCH ?= 2.13.0
PYTEST_ARGS ?=

BIN := .venv/bin
DONE := .venv/done
PIP := $(BIN)/python -m pip --disable-pip-version-check
README_TABLE := $(wildcard bench/readme_table.py)
BENCHES := $(filter-out bench/harness.py $(README_TABLE),$(wildcard bench/*.py))

.DELETE_ON_ERROR:
.PHONY: help setup demo test lint format coverage bench clean

help:
	@echo "make demo      train a small model on real pictures, through torch's DataLoader and through feedline"
	@echo "make test      ruff, mypy and the whole test suite (PYTEST_ARGS='-k words' for a part of it)"
	@echo "make lint      ruff and mypy; make format rewrites"
	@echo "make bench     every measurement in bench/, tables printed, JSON written to bench/results/"
	@echo "make coverage  the test suite with a table of what it did not reach"
	@echo "make clean     remove what was built and the virtual environment"

setup: $(DONE)/installed

demo: $(DONE)/installed
	@$(BIN)/feedline demo

test: lint
	@$(BIN)/python -m pytest $(PYTEST_ARGS)

lint: $(DONE)/installed
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy

format: $(DONE)/installed
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

coverage: $(DONE)/installed
	@$(BIN)/python -m coverage run -m pytest $(PYTEST_ARGS)
	@$(BIN)/python -m coverage combine --quiet
	@$(BIN)/python -m coverage report

bench: $(DONE)/installed
	@set -e; for script in $(BENCHES) $(README_TABLE); do echo "== $$script"; $(BIN)/python $$script; done
	@$(BIN)/python bench/readme_table.py

clean:
	rm -rf .venv build

$(DONE)/system: scripts/system-packages
	@scripts/system-packages $(PYTHON)
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
	@$(PIP) install --quiet --no-build-isolation --constraint $(DONE)/torch.txt --editable '.[dev,demo]'
	@touch $@
