PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
TORCH_VENV := .venv-torch-$(VERSION)
ARGS ?=

.PHONY: train test quick test-all test-gpu test-torch test-wild lint wheel clean

# The main job: train a small BERT eager and dispatched, side by side (ARGS="--help" lists the options).
train: $(STAMP)
	$(BIN)/python -m benchmarks.train_bert $(ARGS)

# Two workers with one OpenMP thread each: threads that wait for one another across workers cost minutes. So does
# compiling the sources anew in every process that a test starts, where the environment says that no bytecode is kept.
# Each worker begins with a half of the list, so that tests of one file share what they compile; later they share work.
test: lint
	OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -n 2 --dist worksteal --durations 20 $(ARGS)

# One test of sixty, of all rooms, for the edit loop.
quick: lint
	OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -n 2 --dist worksteal --quick $(ARGS)

# The sweeps too: the rest of families of generated cases, of which `make test` runs a sample of each kind.
test-all:
	$(MAKE) test ARGS="--all $(ARGS)"

# On a machine with a GPU: the tests that need one, those that run on any device, and how many ran. PYTHON is one whose
# torch sees the GPU.
test-gpu:
	TEST_DEVICE=cuda OMP_NUM_THREADS=1 $(PYTHON) -m pytest -ra --all $(ARGS)

# Small models of public packages beside eager, in an environment of its own; fails where one is wrong or raises (ARGS: texts of families,
# --out FILE: results, from which a later run goes on).
test-wild: .venv-wild/.installed
	OMP_NUM_THREADS=1 .venv-wild/bin/python -m tests.wild $(ARGS)

.venv-wild/.installed: pyproject.toml constraints.txt
	test -x $(@D)/bin/python || $(PYTHON) -m venv $(@D)
	$(@D)/bin/pip install -c constraints.txt -e . accelerate transformers torchvision timm torch_geometric peft diffusers \
		vit-pytorch monai kornia pytorch-metric-learning gpytorch botorch e3nn
	touch $@

# The same tests with another torch, in an environment of its own: make test-torch VERSION=2.15.0 [PYTHON=python3.13]
test-torch: $(TORCH_VENV)/.installed
	OMP_NUM_THREADS=1 $(TORCH_VENV)/bin/python -m pytest -n 2 --dist worksteal $(ARGS)

$(TORCH_VENV)/.installed: pyproject.toml constraints.txt
	test -n "$(VERSION)" || { echo "which torch? make test-torch VERSION=2.15.0"; exit 2; }
	test -x $(@D)/bin/python || $(PYTHON) -m venv $(@D)
	grep -v '^torch==' constraints.txt > $(@D)/constraints.txt
	$(@D)/bin/python -m pip install --quiet torch==$(VERSION)
	$(@D)/bin/python -m pip install --quiet -c $(@D)/constraints.txt torch==$(VERSION) -e ".[dev]"
	touch $@

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
	rm -rf $(VENV) .venv-torch-* .pytest_cache .ruff_cache .mypy_cache build dist *.egg-info
