# Every target sets up what it needs: python3 (3.11 or later) and make are enough. `make test PYTHON=python3.13` takes
# another Python, with an environment of its own, `make test TESTS=tests/model` a part of the tests, MARK=slow the slow ones.
PYTHON ?= python3
WORKERS ?= 2
TESTS ?=
MARK ?= not slow
version = $(shell $(1) -c 'import sys; print("%d.%d" % sys.version_info[:2])')
VERSION := $(call version,$(PYTHON))
ifeq ($(VERSION),)
$(error PYTHON=$(PYTHON) does not run; give a Python of version 3.11 or later, such as PYTHON=/usr/bin/python3.13)
endif
# What pyright and git hooks look for is `.venv`: of python3 in the checkout, of others in a folder of their own.
VENV := $(if $(filter $(VERSION),$(call version,python3)),,.python-$(VERSION)/).venv
BIN := $(VENV)/bin
ifneq ($(MAKECMDGOALS),clean)
ifneq ($(if $(wildcard $(VENV)),$(call version,$(BIN)/python),$(VERSION)),$(VERSION))
$(error $(VENV) is not of Python $(VERSION), which PYTHON=$(PYTHON) is: remove it, or run `make clean`)
endif
endif
READY := $(VENV)/.ready
PYTEST := $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal
install = $(BIN)/python -m pip install --quiet --editable '.$(1)' && touch $@

.PHONY: test test-all test-notebooks lint format notebooks docs dist demo clean

test: $(READY)-test
	$(PYTEST) -m "$(MARK)" $(TESTS)

test-all: $(READY)-dist
	$(PYTEST) $(TESTS)

# All notebooks, and the code of all pages.
test-notebooks: $(READY)-test
	$(PYTEST) tests/documents/test_notebooks.py tests/documents/test_docs.py

lint: $(READY)-lint
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --venvpath $(dir $(VENV))

format: $(READY)-lint
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# Runs the notebooks and stores their outputs.
notebooks: $(READY)-test
	$(BIN)/python tests/helpers/run_notebook.py notebooks/*.ipynb

docs: $(READY)-docs
	$(BIN)/python -m sphinx -W --keep-going -q -b html docs docs/_build/html

# Wheel and sdist, tried from outside of the checkout.
dist: $(READY)-dist
	rm -rf dist
	$(BIN)/python -m build --no-isolation --outdir dist .
	$(PYTEST) -n 0 -m "slow or not slow" tests/house/test_distribution.py

demo: $(READY)
	$(BIN)/python examples/lm.py

clean:
	rm -rf .venv .python-* build dist docs/_build *.egg-info .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# The package alone, all that the demo needs.
$(READY): pyproject.toml | $(BIN)/python
	$(call install)

# An extra of pyproject.toml besides, in the same environment.
$(READY)-%: $(READY)
	$(call install,[$*])

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)
