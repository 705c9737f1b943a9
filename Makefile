PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
export OMP_NUM_THREADS ?= 1
export OPENBLAS_NUM_THREADS ?= 1
export MKL_NUM_THREADS ?= 1
export NUMBA_NUM_THREADS ?= 1
# four on two cores: many tests wait for a timeout and compute nothing; neighbours stay together and share fixtures
WORKERS ?= 4
PYTEST := $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal

.PHONY: help setup demo test test-all coverage mutants fuzz hashes oracle docs axe notebooks figures bench tables wheel sbom lint format clean

help:                   ## this list
	@grep -hE "^[a-z-]+:.*##" $(MAKEFILE_LIST) | sed -E "s/:[^#]*##/\t/" | expand -t 12

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q -c constraints.txt torch==2.13.0
	$(BIN)/python -m pip install -q -c constraints.txt -e ".[all,fcs,dev]"
	touch $@

setup: $(STAMP)         ## only the environment

demo: $(STAMP)          ## one story on one set of cells, told by every workflow; writes demo/report.html
	$(BIN)/cloister demo --out demo

test: $(STAMP) lint     ## what CI runs
	$(PYTEST) -m "not slow"

test-all: $(STAMP) lint ## with the long tests
	$(PYTEST)

coverage: $(STAMP)      ## fast tests with branch coverage, in build/coverage.xml
	$(PYTEST) -m "not slow" --cov --cov-report term:skip-covered --cov-report xml:build/coverage.xml

mutants: $(STAMP)       ## weaken every protocol in one place at a time, and say which behaviour notices; long, resumable
	$(BIN)/python scripts/mutants.py

fuzz: $(STAMP)          ## coverage-guided fuzzing of all parsers of foreign bytes, SECONDS=60 each; needs atheris
	$(BIN)/python -m pip install -q -c constraints.txt atheris
	$(BIN)/python fuzz/run.py --seconds $(or $(SECONDS),60)

oracle: $(STAMP)        ## compare with SPU, OpenFHE and limma, in environments of their own
	$(BIN)/python scripts/oracle.py

docs: $(STAMP)          ## the documentation as web pages, in build/site; broken links fail
	$(BIN)/python scripts/docs.py

axe: $(STAMP)           ## faults of accessibility in pages, found by axe-core in a Chromium; skipped without npm
	@if command -v npm > /dev/null; then npm install --silent --no-save --prefix build/axe axe-core@4.14.0 && \
	AXE=build/axe/node_modules/axe-core/axe.min.js $(BIN)/python -m pytest -n 0 tests/page/test_axe.py; \
	else echo "npm is missing, so this is skipped"; fi

notebooks: $(STAMP)     ## run the notebooks and keep their outputs
	$(BIN)/python scripts/notebooks.py

figures: $(STAMP)       ## the pictures of the workflow pages, from rehearsals
	$(BIN)/python scripts/figures.py

bench: $(STAMP)         ## every benchmark, quick form, kept in benchmarks/logs/quick.json
	$(BIN)/python scripts/bench.py

tables: $(STAMP)        ## the papers' tables with our column
	$(BIN)/python scripts/tables.py

wheel: $(STAMP)         ## build the wheel, and try it outside the repository on Python 3.11 to 3.14 (or PYTHONS="...")
	$(BIN)/python scripts/wheel.py $(addprefix --python ,$(PYTHONS))

hashes: $(STAMP)        ## constraints-hashed.txt, from constraints.txt and the package index
	$(BIN)/python scripts/hash_constraints.py

sbom: $(STAMP)          ## what is installed, as CycloneDX, in build/sbom.json
	$(BIN)/python scripts/sbom.py

lint: $(STAMP)          ## style and types
	$(BIN)/ruff check src tests benchmarks scripts fuzz examples
	$(BIN)/ruff format --check src tests benchmarks scripts fuzz examples
	$(BIN)/mypy

format: $(STAMP)        ## tidy the code, and the pages that are made from it
	$(BIN)/ruff check --fix src tests benchmarks scripts fuzz examples
	$(BIN)/ruff format src tests benchmarks scripts fuzz examples
	$(BIN)/python scripts/pieces.py

clean:
	rm -rf $(VENV) demo build dist *.egg-info src/*.egg-info
