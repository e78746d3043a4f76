# The environment is made once, in .venv; everything runs from there.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PEERS := .venv-peers

.PHONY: help demo test lint types unit test-peers bench clean

help:
	@echo "make demo        merge three models and look at the result"
	@echo "make test        lint, types, tests with coverage"
	@echo "make test-peers  agreement with mergekit and PEFT (installs them, and torch)"
	@echo "make bench       speed and memory beside mergekit and plain torch (needs 20 GB of disk)"

$(VENV)/ready: pyproject.toml requirements-dev.txt constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --upgrade pip
	$(BIN)/pip install --quiet --constraint constraints.txt torch
	$(BIN)/pip install --quiet --constraint constraints.txt --requirement requirements-dev.txt
	touch $@

$(PEERS)/ready: pyproject.toml requirements-peers.txt constraints.txt
	$(PYTHON) -m venv $(PEERS)
	$(PEERS)/bin/pip install --quiet --upgrade pip
	$(PEERS)/bin/pip install --quiet --constraint constraints.txt torch
	$(PEERS)/bin/pip install --quiet --constraint constraints.txt --requirement requirements-peers.txt
	touch $@

demo: $(VENV)/ready
	$(BIN)/python examples/first_merge.py

test: lint types unit

lint: $(VENV)/ready
	$(BIN)/ruff check
	$(BIN)/ruff format --check

types: $(VENV)/ready
	$(BIN)/mypy

unit: $(VENV)/ready
	$(BIN)/python -m pytest --quiet --cov --cov-report=term

test-peers: $(PEERS)/ready
	$(PEERS)/bin/python -m pytest --quiet tests/peers

bench: $(VENV)/ready $(PEERS)/ready
	$(BIN)/python bench/compare.py --peers-python $(PEERS)/bin/python

clean:
	rm -rf $(VENV) $(PEERS) .mypy_cache .pytest_cache .ruff_cache .coverage
