# Everything runs in .venv, which is made on first use with only Python and git at hand.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: demo test drills lowest check fmt lint types layers doctests bench servers api clean

demo: $(STAMP)  ## make a dataset, prepare it, train, save, resume on another topology
	$(BIN)/python examples/demo.py

test: $(STAMP)  ## run the whole test suite; after `make servers`, none of it is skipped
	@# With npm at hand, what stands for Azure is installed by the way; nothing depends on it.
	@if command -v npm > /dev/null; then .ci/azurite || true; fi
	$(BIN)/python -m pytest -n auto --dist loadfile -m 'not drill'

drills: $(STAMP)  ## inject faults, try random pipelines and hostile files: SECONDS each
	DRILL_SECONDS=$(or $(SECONDS),20) $(BIN)/python -m pytest -n auto --dist load -m drill tests/drills

lowest:  ## run tests with the oldest versions of other packages that pyproject.toml admits
	.ci/lowest

check: lint types layers doctests test lowest  ## what CI runs

fmt: $(STAMP)
	$(BIN)/ruff format src tests benchmarks examples
	$(BIN)/ruff check --fix src tests benchmarks examples

lint: $(STAMP)
	$(BIN)/ruff format --check src tests benchmarks examples
	$(BIN)/ruff check src tests benchmarks examples

types: $(STAMP)
	$(BIN)/mypy

layers: $(STAMP)
	$(BIN)/lint-imports

doctests: $(STAMP)  ## run the examples in docstrings; those of README and docs are tests
	$(BIN)/python -m pytest --doctest-modules src/energon

servers: $(STAMP)  ## install the servers that tests of object stores talk to
	.ci/ceph
	.ci/azurite

$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	# torch first and pinned: a range would bring gigabytes of CUDA packages.
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

bench: $(STAMP)  ## regenerate docs/benchmarks.md, side by side with the installed peers
	$(BIN)/python benchmarks/run.py

api: $(STAMP)  ## regenerate docs/api.md of signatures and docstrings
	$(BIN)/python -m tests.docs.reference

clean:
	rm -rf $(VENV) .venv-lowest .servers build dist demo .pytest_cache .mypy_cache .ruff_cache .hypothesis
