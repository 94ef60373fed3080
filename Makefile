# Each target sets up what it needs on a machine with nothing but python3 and pip.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# Properties draw the same examples each time in `test` (hypothesis' own profile), new ones in `test-full`.
PROPERTIES := ci
PYTEST = $(BIN)/python -m pytest --hypothesis-profile=$(PROPERTIES)

.PHONY: demo test test-full check unit clean

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --editable '.[runtime,local,plots,dev]' --constraint constraints.txt
	touch $@

demo: $(STAMP)  ## rehearses a small GPT: twice undisturbed, once with a kill, the same bits
	$(BIN)/trainmover rehearse --steps 30 --kills 1 examples/gpt_bytes.py

check: $(STAMP)  ## formatting, lint, types, who imports whom, unit tests
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(PYTEST) tests/unit -q -m "not full"

test: check  ## everything but the full matrices; under 12 minutes on two cores
	$(PYTEST) tests/integration tests/chaos -q -m 'not full and not gpu'

test-full: PROPERTIES := default
test-full: check  ## with the full matrices; up to 75 minutes on two cores
	$(PYTEST) tests/integration tests/chaos -q -m 'not gpu'

clean:
	rm -rf $(VENV) build dist *.egg-info src/*.egg-info
