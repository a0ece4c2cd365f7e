# make demo, make test: each sets up .venv when it is missing or out of date, and reuses it afterwards.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
# A process for each core, each with one thread (tests/conftest.py); a worker that is done takes over tests of others.
SPREAD := -n auto --maxprocesses 8 --dist worksteal

.DEFAULT_GOAL := help
.PHONY: help demo test test-slow lint types check clean

help:  ## This list.
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/'

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "graphopt needs Python 3.11 or newer; found $$($(PYTHON) --version). Try: make PYTHON=python3.11 ..." >&2; exit 2; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	# torch first and alone: with the pinned version in place nothing else asks for another build of it.
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $(READY)

demo: $(READY)  ## Train a small language model on real text with the whole recipe.
	$(BIN)/graphopt demo

test: $(READY)  ## The tests, without the slow ones, in a process for each core.
	$(BIN)/python -m pytest $(SPREAD)

test-slow: $(READY)  ## The slow tests, one after the other: some of them measure time.
	$(BIN)/python -m pytest -m slow

lint: $(READY)  ## Style.
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(READY)  ## Types, of the package as a wheel lays it out.
	rm -rf .typecheck
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --target .typecheck .
	cd .typecheck && ../$(BIN)/mypy --config-file ../pyproject.toml -p graphopt

check: lint types test  ## Everything that continuous integration runs.

clean:  ## Remove the environment and everything built.
	rm -rf $(VENV) .typecheck build dist *.egg-info
