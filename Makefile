# make demo | make test | make test-long | make check | make families. Everything lives in ./.venv, remade only where pyproject.toml has changed.
#   PYTHON=...        the interpreter that makes the environment (3.11 or 3.12)
#   PYTEST_ARGS=...   more arguments for pytest, e.g. PYTEST_ARGS='tests/moe -x', or '-n 0' for one process

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.PHONY: help venv demo test test-long check families

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed-$(shell cksum < pyproject.toml | cut -d' ' -f1)
IN_RANGE := import sys; raise SystemExit(not (3, 11) <= sys.version_info[:2] < (3, 13))
PYTHON ?= $(shell for python in python3 python3.12 python3.11; do \
	$$python -c '$(IN_RANGE)' 2>/dev/null && { echo $$python; break; }; done)

# Two OpenMP threads beside any other load are slower than one: threads are set where they are wanted.
export OMP_NUM_THREADS ?= 1
export TOKENIZERS_PARALLELISM ?= false
export DS_BUILD_OPS := 0
export PIP_DISABLE_PIP_VERSION_CHECK := 1

help:
	@sed -n '1,3p' Makefile

venv: $(STAMP)

$(STAMP):
	@test -n "$(PYTHON)" || { echo "error: Python 3.11 or 3.12 is needed and none was found; name one: make PYTHON=/path/to/python3.12" >&2; exit 1; }
	@$(PYTHON) -c '$(IN_RANGE)' || { echo "error: PYTHON=$(PYTHON) is not Python 3.11 or 3.12" >&2; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -c 'import torch' 2>/dev/null || $(MAKE) --no-print-directory torch
	$(BIN)/python -m pip install --quiet --editable '.[ray,report,dev]'
	@rm -f $(VENV)/.installed-* && touch $@

# Without a GPU the CPU build of PyTorch; with one, the project's own requirement chooses the build.
.PHONY: torch
torch:
	@if command -v nvidia-smi >/dev/null && nvidia-smi --list-gpus >/dev/null 2>&1; then exit 0; fi; \
	echo "no GPU: installing the CPU build of PyTorch"; \
	$(BIN)/python -m pip install --quiet 'torch==2.13.0+cpu' || { \
		echo "no CPU build on the configured package index; installing the default build." >&2; \
		echo "Setting PIP_EXTRA_INDEX_URL to PyTorch's CPU wheel index before 'make' saves 4 GB." >&2; \
		$(BIN)/python -m pip install --quiet 'torch==2.13.0'; }

demo: venv
	$(BIN)/python -m pipelines.demo

test: venv
	$(BIN)/python -m pytest -m 'not gpu and not long' -n 2 --dist loadgroup $(PYTEST_ARGS)

# Killed drivers, lost nodes, full disks, whole sweeps, populations: half an hour and more on two cores.
test-long: venv
	$(BIN)/python -m pytest -m long $(PYTEST_ARGS)

check: venv
	$(BIN)/ruff check .
	$(BIN)/ruff format --check --quiet .
	$(BIN)/basedpyright

families: venv
	$(BIN)/python -m tests.families $(FAMILIES)
