PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
export OMP_NUM_THREADS ?= 1
export OPENBLAS_NUM_THREADS ?= 1
export MKL_NUM_THREADS ?= 1
export NUMBA_NUM_THREADS ?= 1

.PHONY: demo test test-all bench lint format clean

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q -c constraints.txt torch==2.13.0
	$(BIN)/python -m pip install -q -c constraints.txt -e ".[all,dev]"
	touch $@

demo: $(STAMP)          ## every workflow on small real data; writes demo/report.html
	$(BIN)/cloister demo --out demo

test: $(STAMP) lint     ## what CI runs
	$(BIN)/python -m pytest -n 2 -m "not slow"

test-all: $(STAMP) lint ## with the long tests
	$(BIN)/python -m pytest -n 2

bench: $(STAMP)         ## every benchmark, quick form; figures are printed last
	for script in benchmarks/*.py; do $(BIN)/python $$script --quick || exit 1; done

lint: $(STAMP)
	$(BIN)/ruff check src tests benchmarks
	$(BIN)/ruff format --check src tests benchmarks
	$(BIN)/mypy

format: $(STAMP)
	$(BIN)/ruff check --fix src tests benchmarks
	$(BIN)/ruff format src tests benchmarks

clean:
	rm -rf $(VENV) demo build dist *.egg-info src/*.egg-info
