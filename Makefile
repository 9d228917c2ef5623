# Everything runs in .venv, which is made on first use with only Python and git at hand: `demo`
# installs what it runs with, everything else adds the tools and packages of development.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
DEMO := $(VENV)/.installed-demo
STAMP := $(VENV)/.installed
# Long files are divided: workers steal tests from each other when they have none left.
PYTEST := $(BIN)/python -m pytest -n auto --dist worksteal

# Tests start hundreds of processes: what the first one compiles the others import.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test slow drills lowest check fmt lint types layers doctests bench record servers diagrams sizes docs packages release clean

demo: $(if $(wildcard $(STAMP)),$(STAMP),$(DEMO))  ## make a dataset, prepare it, train, save, resume on another topology
	$(BIN)/python examples/demo.py

test: $(STAMP)  ## run the tests, except those that take long
	$(PYTEST) -m 'not slow and not drill'

slow: $(STAMP)  ## run the tests that take long: trainers, Ray, soak, wheels, many topologies
	$(PYTEST) -m 'slow and not drill'

drills: $(STAMP)  ## inject faults, try random pipelines and hostile files: SECONDS each
	DRILL_SECONDS=$(or $(SECONDS),20) $(BIN)/python -m pytest -n auto --dist load -m drill tests/drills

lowest:  ## run tests with the oldest versions of other packages that pyproject.toml admits
	.ci/lowest

check: lint types layers doctests docs test slow lowest  ## what CI runs

fmt: $(STAMP)
	$(BIN)/ruff format src plugins tests benchmarks examples docs
	$(BIN)/ruff check --fix src plugins tests benchmarks examples docs

lint: $(STAMP)
	$(BIN)/ruff format --check src plugins tests benchmarks examples docs
	$(BIN)/ruff check src plugins tests benchmarks examples docs

types: $(STAMP)
	$(BIN)/mypy

layers: $(STAMP)
	$(BIN)/lint-imports

doctests: $(STAMP)  ## run the examples in docstrings; those of README and docs are tests
	$(BIN)/python -m pytest --doctest-modules src/energon

servers: $(STAMP)  ## install what tests talk to: Ceph, Azurite, libfuse, Chromium and shells
	.ci/fuse
	.ci/shells
	.ci/ceph
	.ci/node
	.ci/chromium

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("energon needs Python 3.11 or newer; name one: make PYTHON=python3.12")'
	$(PYTHON) -m venv $(VENV)

$(DEMO): pyproject.toml constraints.txt | $(BIN)/python
	@.ci/install torch,fast-jpeg 0.9
	@touch $@

$(STAMP): pyproject.toml plugins/energon-mds/pyproject.toml constraints.txt src/energon_loader.pth | $(BIN)/python
	@.ci/install dev 2.1 plugins/energon-mds
	@touch $@

BENCHMARKS := run overheads prepare stream remote blends decode lanes packing scale lookup view kinds programs

bench: $(STAMP)  ## measure beside the installed peers: pages of benchmarks, README, the chart
	set -e; for name in $(BENCHMARKS); do $(BIN)/python benchmarks/$$name.py; done

record: $(STAMP)  ## install webdataset and megatron-energon, and record what programs yield with them
	$(BIN)/python -m tests.compat.peers

docs: $(STAMP)  ## build the site of the documentation, check its links, and open it
	$(BIN)/python -m docs.site.build

packages:  ## build wheel and sdist, and try them in clean environments, with torch and without
	.ci/packages

release:  ## check everything, build VERSION, and tag it: make release VERSION=0.2.0
	.ci/release $(VERSION)

diagrams: $(STAMP)  ## draw docs/images/*.svg
	$(BIN)/python -m docs.site.diagrams

sizes: $(STAMP)  ## write the files and lines of each capability into CONTRIBUTING.md
	$(BIN)/python -m docs.site.sizes

clean:
	rm -rf $(VENV) .venv-lowest .servers build dist demo .pytest_cache .mypy_cache .ruff_cache .hypothesis
