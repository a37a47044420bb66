# Every target makes the virtual environment that it needs.
PYTHON ?= python3
# Two workers more than cores: tests wait a part of their time for programs that stop, hang or end. Files run in their own order; otherwise those
# with few, long tests would come last, and one worker would end them alone.
WORKERS ?= $(shell expr $$(nproc) + 2)
VENV   ?= .venv
BIN     = $(VENV)/bin
CHECKED = src tests bench examples docs
PYTEST  = PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python -m pytest -n $(WORKERS) --maxprocesses 9 --dist loadfile --no-loadscope-reorder

.PHONY: demo test full quick lint format docs wheel pythons torches clean

# pip and what builds the wheel. Packages that PYTHON has are visible, so that its torch (5 GB) is not downloaded again.
$(VENV)/.made:
	$(PYTHON) -m venv $(VENV)
	$(PYTHON) -c "import importlib.util as u; s = u.find_spec('torch'); print(s.submodule_search_locations[0].rpartition('/')[0] if s else '')" \
		> "$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/torch_of_python.pth"
	$(BIN)/python -m pip install --quiet --upgrade pip hatchling "hatch-fancy-pypi-readme>=24"
	@touch $@

# The wheel: what users install is what the demo shows and what the tests run against.
dist/.wheel: $(shell find src -type f ! -name "*.pyc") pyproject.toml README.md LICENSE $(VENV)/.made
	rm -rf dist/*.whl
	$(BIN)/python -m pip wheel --quiet --no-deps --no-build-isolation --wheel-dir dist .
	@touch $@

# What the wheel and its extras need; again when pyproject.toml changes.
$(VENV)/.demo $(VENV)/.ready: pyproject.toml | dist/.wheel
	$(BIN)/python -m pip install --quiet "$$(echo dist/*.whl)[$(EXTRA)]"
	@touch $@
$(VENV)/.demo: EXTRA = demo
$(VENV)/.ready: EXTRA = dev

# The wheel itself; again when a file of the source changes.
$(VENV)/.installed: dist/.wheel
	$(BIN)/python -m pip install --quiet --no-deps --force-reinstall dist/*.whl
	@touch $@

# Tune a real example on a real data set, then run the job under the plan that was found.
demo: $(VENV)/.demo $(VENV)/.installed
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python examples/demo.py

# Lint, types, tests. Of many alike cases a few are run, and what takes minutes is left to `make full`.
test: lint $(VENV)/.installed
	$(PYTEST) -m "not full"

# Every case of every test: before a release, and each night.
full: lint $(VENV)/.installed
	FLATOUT_FULL=1 $(PYTEST) tests bench/gpu/tests

# The tests that start no process, against the source: for every save.
quick: WORKERS = $(shell nproc)
quick: $(VENV)/.ready
	FLATOUT_QUICK=1 PYTHONPATH=src $(PYTEST) -m "not processes and not slow and not full"

lint: $(VENV)/.ready
	$(BIN)/ruff check $(CHECKED)
	$(BIN)/mypy --num-workers 2

format: $(VENV)/.ready
	$(BIN)/ruff check --fix --select I $(CHECKED)
	$(BIN)/ruff format $(CHECKED)

# The documentation site, in site/. Strict: a broken link or a warning fails.
docs: $(VENV)/.ready
	PYTHONPATH=src NO_MKDOCS_2_WARNING=1 DISABLE_MKDOCS_2_WARNING=true $(BIN)/mkdocs build --strict --quiet

# The wheel and the source distribution, in dist/. The wheel is installed into a clean environment and asked for its version.
wheel: $(VENV)/.ready
	rm -rf dist build/wheel
	$(BIN)/python -m build --quiet
	$(BIN)/twine check --strict dist/*
	$(PYTHON) -m venv build/wheel
	build/wheel/bin/pip install --quiet dist/*.whl
	build/wheel/bin/flatout --version

# The wheel beside torch, under each Python of this machine or with each supported torch; see bench/environments.py.
pythons torches: $(VENV)/.ready
	$(BIN)/python bench/environments.py $@ $(ARGS)

clean:
	rm -rf $(VENV) .flatout dist build site

# All of a release but the upload, which .github/workflows/release.yml does at the tag. The wheel that stays in dist is the one that was tested.
.PHONY: release
release:
	.github/release.sh check
	$(MAKE) wheel test docs
	PYTHON=$(PYTHON) .github/release.sh finish
