# Needs only Python >= 3.11 and make. Everything is installed into .venv, once for each change of pyproject.toml.

# Asked to run, not only looked for: a version manager leaves names behind that start nothing.
WORKS := import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 11))
PYTHON ?= $(shell for name in python3.12 python3.13 python3.11 python3 python; do \
  $$name -c '$(WORKS)' >/dev/null 2>&1 && echo $$name && break; done)
VENV := .venv
BIN := $(VENV)/bin
USED := $(VENV)/.installed
DEV := $(VENV)/.installed-dev
# Two workers with one thread each, a whole file to each in turn: files build models and runs that their tests share.
WORKERS ?= 2

.PHONY: help quickstart test check format clean

help:
	@echo "make quickstart   install, train model=tiny on the embedded world, evaluate, export"
	@echo "make test         install what the tests need and run them all"
	@echo "make check        ruff and mypy"
	@echo "make format       let ruff format and sort the code"

quickstart: $(USED)
	$(BIN)/rm-opt train experiment=quickstart

test: $(DEV)
	OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile

check: $(DEV)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(DEV)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

$(BIN)/python:
	@$(or $(PYTHON),false) -c '$(WORKS)' || \
	  { echo "expected Python 3.11 or newer with venv; install it, or name it: make PYTHON=/path/to/python" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); exit 1; }

$(USED): pyproject.toml | $(BIN)/python
	@echo "installing into $(VENV) (minutes, once)"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -e .
	@touch $@

$(DEV): pyproject.toml | $(BIN)/python
	@echo "installing with what the tests need into $(VENV) (minutes, once)"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[dev]'
	@touch $@ $(USED)

clean:
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache .hypothesis
