# The one door. Each target makes .venv and installs what it needs by itself; nothing is done twice.
# Needs Python 3.11 or newer with pip, and make. Another Python: make test PYTHON=/path/to/python3.12

SHELL := /bin/sh
BIN := .venv/bin
BENCHMARKS := $(sort $(wildcard benchmarks/*.py))
PYTHON ?=

# One thread: results then do not depend on how many cores the machine has, and small tensors are faster so.
export OMP_NUM_THREADS ?= 1
# Two for the demo. They sleep while they wait for each other: where something else runs too, spinning would cost
# far more than it saves.
TWO_THREADS := OMP_NUM_THREADS=2 OMP_WAIT_POLICY=passive
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: help demo test test-long lint docs bench proof proof-full clean
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

help:  ## Show this list.
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-10s %s\n", $$1, $$2 }' Makefile

demo: .venv/.core  ## Train a small language model on Python's own docstrings, about two minutes.
	$(TWO_THREADS) $(BIN)/augend check examples/docstrings.toml
	$(TWO_THREADS) $(BIN)/augend fit examples/docstrings.toml

test: .venv/.test  ## Run the tests, two at a time; layers 0 to 3 must be covered, branches too.
	$(BIN)/python -m pytest --numprocesses=2 --cov --cov-report=term

test-long: .venv/.test  ## Run the tests that take minutes, with many more generated examples.
	$(BIN)/python -m pytest -m long --hypothesis-profile=long --timeout=1800

lint: .venv/.lint  ## Check format, rules, types and that the documentation builds without a warning.
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/sphinx-build -W -n -E -q --keep-going docs docs/_build/html

docs: .venv/.test .venv/.lint  ## Run every example of the documentation and build it into docs/_build/html.
	$(BIN)/python -m pytest tests/test_docs.py
	$(BIN)/sphinx-build -W -n -E -q --keep-going docs docs/_build/html
	@echo "docs/_build/html/index.html"

bench: .venv/.core  ## Run the benchmarks; each prints one line of JSON.
	@for file in $(BENCHMARKS); do $(BIN)/python $$file || exit 1; done

proof: .venv/.core  ## Train the demo on 1, 2, 3 and 4 ranks, killed, shuffled: the same bits, in three minutes.
	$(BIN)/python benchmarks/proof

proof-full: .venv/.core  ## Train in every way whose bits are promised to be the same, in about half an hour.
	$(BIN)/python benchmarks/proof --full

clean:  ## Remove what was built and cached; .venv and runs/ stay.
	rm -rf build dist docs/_build .coverage .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find src tests docs examples benchmarks -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true

# A stamp is touched when all it stands for is installed, and is out of date when the versions or the package's
# description have changed. pip says nothing but errors.
.venv/.core: pyproject.toml constraints.txt
	@test -x $(BIN)/pip || { $(find_python) && echo "making .venv with $$python" && $$python -m venv --clear .venv; }
	@echo "installing augend and PyTorch into .venv (a few minutes the first time)"
	@$(BIN)/pip install --quiet --quiet --constraint constraints.txt "$$(grep '^torch==' constraints.txt)"
	@$(BIN)/pip install --quiet --quiet --constraint constraints.txt --editable .
	@touch $@

.venv/.test: .venv/.core
	@echo "installing what the tests need into .venv"
	@$(BIN)/pip install --quiet --quiet --constraint constraints.txt --editable '.[test]'
	@touch $@

.venv/.lint: .venv/.core
	@echo "installing the linters and the documentation tools into .venv"
	@$(BIN)/pip install --quiet --quiet --constraint constraints.txt --editable '.[lint,docs]'
	@touch $@

PYTHONS := $(or $(PYTHON),python3.11 python3 python3.12 python3.13 python)
define find_python
{ python=; for name in $(PYTHONS); do \
	if $$name -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then python=$$name; break; fi; \
done; \
if test -z "$$python"; then \
	echo "augend needs Python 3.11 or newer; tried $(PYTHONS)." \
		"Install one, or name it: make PYTHON=/path/to/python" >&2; \
	false; \
fi; }
endef
