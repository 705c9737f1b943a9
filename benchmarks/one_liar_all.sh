#!/bin/sh
# All that docs/measured/one-liar.md shows, again: benchmarks/one_liar_all.sh [processes] (half an hour on 16 cores)
# Logs go to benchmarks/logs, what is printed to build/one-liar; the cost runs last and alone.
set -u
cd "$(dirname "$0")/.."
jobs=${1:-$(nproc)}
python=${PYTHON:-python}
export OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 MKL_NUM_THREADS=1 NUMBA_NUM_THREADS=1
mkdir -p build/one-liar
$python scripts/mutants.py --jobs "$jobs" > build/one-liar/mutants.txt 2>&1
$python benchmarks/lies.py --jobs "$((jobs / 2 + 1))" > build/one-liar/lies.txt 2>&1
$python benchmarks/outliers.py --only auroc --keep build/one-liar/auroc.json > build/one-liar/auroc.txt 2>&1
$python benchmarks/before_after.py --repeats 5 > build/one-liar/cost.txt 2>&1
$python scripts/pieces.py
tail -n 3 build/one-liar/*.txt
