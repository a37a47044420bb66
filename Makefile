# Two commands on a fresh machine: `make demo` and `make test`. Both make their own virtual environment.
PYTHON ?= python3
# One more than cores: a fifth of the time a test waits for a program that is stopped, hangs or is given time to end. Files go in their order: else those with
# few, long tests would come last, and one worker would end them alone.
WORKERS ?= $(shell expr $$(nproc) + 1)
VENV   ?= .venv
BIN     = $(VENV)/bin

.PHONY: demo test lint clean

$(VENV)/.ready: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet -e ".[dev]"
	@touch $@

# Tune a real example on a real data set, then run the job under the plan that was found.
demo: $(VENV)/.ready
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python examples/demo.py

test: $(VENV)/.ready
	$(BIN)/ruff check src tests bench examples
	$(BIN)/mypy
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python -m pytest -n $(WORKERS) --maxprocesses 9 --dist loadfile --no-loadscope-reorder

clean:
	rm -rf $(VENV) .flatout dist build
