# Every target makes the virtual environment that it needs.
PYTHON ?= python3
# Two workers more than cores: tests wait a part of their time for programs that stop, hang or end. Files run in their own order; otherwise those
# with few, long tests would come last, and one worker would end them alone.
WORKERS ?= $(shell expr $$(nproc) + 2)
VENV   ?= .venv
BIN     = $(VENV)/bin
CHECKED = src tests bench examples docs
PYTEST  = PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python -m pytest -n $(WORKERS) --maxprocesses 9 --dist loadfile --no-loadscope-reorder

.PHONY: demo test full quick lint format docs wheel clean

$(VENV)/.ready: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet -e ".[dev]"
	@touch $@


# Tune a real example on a real data set, then run the job under the plan that was found.
demo: $(VENV)/.ready
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python examples/demo.py

# Lint, types, tests. Of many alike cases a few are run, and what takes minutes is left to `make full`.
test: lint
	$(PYTEST) -m "not full"

# Every case of every test: before a release, and each night.
full: lint
	FLATOUT_FULL=1 $(PYTEST)

# The tests that start no process: for every save.
quick: WORKERS = $(shell nproc)
quick: $(VENV)/.ready
	FLATOUT_QUICK=1 $(PYTEST) -m "not processes and not slow and not full"

lint: $(VENV)/.ready
	$(BIN)/ruff check $(CHECKED)
	$(BIN)/mypy
	$(BIN)/mypy --config-file bench/mypy.ini bench/*.py

format: $(VENV)/.ready
	$(BIN)/ruff check --fix --select I $(CHECKED)
	$(BIN)/ruff format $(CHECKED)

# The documentation site, in site/. Strict: a broken link or a warning fails.
docs: $(VENV)/.ready
	NO_MKDOCS_2_WARNING=1 DISABLE_MKDOCS_2_WARNING=true $(BIN)/mkdocs build --strict --quiet

# The wheel and the source distribution, in dist/. The wheel is installed into a clean environment and asked for its version.
wheel: $(VENV)/.ready
	rm -rf dist build/wheel
	$(BIN)/python -m pip install --quiet build twine
	$(BIN)/python -m build --quiet
	$(BIN)/twine check --strict dist/*
	$(PYTHON) -m venv build/wheel
	build/wheel/bin/pip install --quiet dist/*.whl
	build/wheel/bin/flatout --version

clean:
	rm -rf $(VENV) .flatout dist build site
