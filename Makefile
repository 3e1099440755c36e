# `make demo`, `make test` and `make check` work on a fresh clone: each builds .venv on first use and reuses it after.
PYTHON ?= python3
VENV := .venv
DATA ?= data
PY := $(VENV)/bin/python
STAMP := $(VENV)/.installed
# The versions that the tests ran with. Installed first, so that no other requirement picks a different torch.
TORCH := torch==2.14.1 torchvision==0.29.1

.DEFAULT_GOAL := help
.PHONY: help demo test test-slow check fmt docs docs-links bench bench-record release-check matrix gpu-check clean

help:  ## print this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-13s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

# Redone when pyproject.toml changes. An existing environment is kept: torch with CUDA takes several GB.
$(STAMP): pyproject.toml
	test -x $(PY) || $(PYTHON) -m venv $(VENV)
	$(PY) -m pip install $(TORCH)
	$(PY) -m pip install -e ".[examples,tests,dev]"
	touch $@

demo: $(STAMP)  ## run the quickstart example
	$(PY) examples/quickstart.py

test: $(STAMP)  ## run the tests, without the slow ones
	$(PY) -m pytest -n auto --dist worksteal

test-slow: $(STAMP)  ## run the slow tests only
	$(PY) -m pytest -m slow

check: $(STAMP)  ## lint, formatting, types, import layers
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy
	$(VENV)/bin/lint-imports

fmt: $(STAMP)  ## format the code and apply safe lint fixes
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

# Together with [tests], which has a library that the site's parser needs in an older version than it would take.
docs: $(STAMP)  ## build the site in docs/_build/html: pages, API reference, gallery; a warning is an error
	$(PY) -c "import sphinx_gallery, myst_parser, furo" || $(PY) -m pip install --quiet -e ".[docs,tests]"
	OMP_NUM_THREADS=1 $(PY) -m sphinx -W --keep-going -q -b html docs docs/_build/html

docs-links: $(STAMP)  ## renew docs/inventories, for links to torch, BackPACK and Python
	$(PY) docs/inventories/make.py

bench: $(STAMP)  ## compare with other optimizers: time, memory, state; numbers and figure in runs/
	$(PY) -m pip install --quiet -e ".[bench]"
	$(PY) -m benchmarks --json runs/bench.json --figure runs/bench.png

# The new environment sees the libraries of .venv, torch among them, but not its editable installation: no second 6 GB.
RELEASE := runs/release
release-check: $(STAMP)  ## build the sdist and the wheel, and use both in a new environment, without the checkout
	$(PY) -c "import build, twine" || $(PY) -m pip install --quiet -e ".[release]"
	rm -rf dist $(RELEASE)
	$(PY) -m build --outdir dist
	$(PY) -m twine check --strict dist/*
	$(PY) -m venv $(RELEASE)/venv
	$(RELEASE)/venv/bin/python -m pip install --quiet --no-deps dist/*.whl
	$(PY) -c "import site, sys; open(sys.argv[1], 'w').write(site.getsitepackages()[0])" \
		$$(ls -d $(RELEASE)/venv/lib/python3*/site-packages)/libraries.pth
	tar -xf dist/*.tar.gz -C $(RELEASE)
	$(RELEASE)/venv/bin/python $(RELEASE)/kfqn_ext-*/tests/installed_check.py $(RELEASE)/kfqn_ext-*/README.md
	cd $(RELEASE)/kfqn_ext-* && ../venv/bin/python -m pytest -q --collect-only | tail -1
	cd $(RELEASE)/kfqn_ext-* && ../venv/bin/python -m pytest -q tests/linalg tests/geometry tests/test_api.py tests/test_links.py

# Oldest and newest Python and torch to be had; what passes is what pyproject.toml may claim. With pyenv, name the
# Pythons: PYENV_VERSION=3.11.7:3.13.0 make matrix. Each environment takes 6 GB.
MATRIX ?= 3.11/2.13.0 3.13/2.14.1
MATRIX_TESTS := tests/extensions tests/geometry tests/linalg tests/test_docs.py README.md docs
matrix: $(MATRIX:%=runs/matrix/%)  ## slow: the quick tests on the oldest and the newest Python and torch

.PHONY: $(MATRIX:%=runs/matrix/%)
$(MATRIX:%=runs/matrix/%): runs/matrix/%:
	test -x $@/bin/python || python$(patsubst %/,%,$(dir $*)) -m venv $@
	$@/bin/python -m pip install --quiet torch==$(notdir $*) -e ".[tests]"
	$@/bin/python -m pytest -q $(MATRIX_TESTS)

bench-record: $(STAMP)  ## make the tables of docs/performance.md again, in forty minutes; DATA=folder of MNIST
	$(PY) -m benchmarks.page --data-root $(DATA)

gpu-check: $(STAMP)  ## all about a GPU in eight minutes, tests included; says so and succeeds without one
	$(PY) -m benchmarks.gpu --data-root $(DATA)

clean:  ## remove caches and build products; keeps .venv
	rm -rf build dist docs/_build docs/auto_gallery docs/sg_execution_times.rst *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -not -path './$(VENV)/*' -prune -exec rm -rf {} +
