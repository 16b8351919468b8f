# Every target sets up what it needs: python3 (3.11 or later) and make are enough.
PYTHON ?= python3
WORKERS ?= 2
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
PYTEST := $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal

.PHONY: test test-all test-notebooks lint format notebooks docs dist demo clean

test: $(READY)
	$(PYTEST) -m "not slow"

test-all: $(READY)
	$(PYTEST)

# All notebooks, and the code of all pages.
test-notebooks: $(READY)
	$(PYTEST) tests/test_notebooks.py tests/test_docs.py

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# Runs the notebooks and stores their outputs.
notebooks: $(READY)
	$(BIN)/python tests/helpers/run_notebook.py notebooks/*.ipynb

docs: $(READY)
	$(BIN)/python -m sphinx -W --keep-going -q -b html docs docs/_build/html

# Wheel and sdist, tried from outside of the checkout.
dist: $(READY)
	rm -rf dist
	$(BIN)/python -m build --no-isolation --outdir dist .
	$(PYTEST) -n 0 -m "slow or not slow" tests/test_distribution.py

demo: $(READY)
	$(BIN)/python examples/lm.py

clean:
	rm -rf $(VENV) build dist docs/_build *.egg-info .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(READY): pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --editable '.[dev]'
	touch $@
