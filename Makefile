PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
ARGS ?=

.PHONY: train test lint wheel clean

# The main job: train a small BERT eager and dispatched, side by side (ARGS="--help" lists the options).
train: $(STAMP)
	$(BIN)/python -m benchmarks.train_bert $(ARGS)

# Two workers with one OpenMP thread each: threads that wait for one another across workers cost minutes.
test: lint
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 $(ARGS)

lint: $(STAMP)
	$(BIN)/ruff check .

# dist/*.whl, to be installed with: pip install -c constraints.txt dist/*.whl
wheel: $(STAMP)
	$(BIN)/python -m build --wheel

$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -c constraints.txt torch
	$(BIN)/python -m pip install --quiet -c constraints.txt -e ".[dev]"
	touch $@

clean:
	rm -rf $(VENV) .pytest_cache .ruff_cache .mypy_cache build dist *.egg-info
