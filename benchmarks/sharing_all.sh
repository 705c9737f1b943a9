#!/bin/sh
# What the measured pages show of hardened beside semi-honest sharing, again: benchmarks/sharing_all.sh
# SPU=python-that-has-spu adds SPU, DATA=folder says where the real sets are. Some 18 minutes on two cores of an AMD EPYC. What is printed
# goes to benchmarks/logs, from where scripts/pieces.py takes it into docs/measured. The lies of all protocols: benchmarks/lies.py.
set -u
cd "$(dirname "$0")/.."
python=${PYTHON:-python}
data=${DATA:-../shared/data}
export OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 MKL_NUM_THREADS=1 NUMBA_NUM_THREADS=1
mkdir -p build/sharing
keep() { # name, then what to run: kept only if it came to its end
    name=$1
    shift
    "$@" > "benchmarks/logs/$name.tmp" 2> "build/sharing/$name.err" && mv "benchmarks/logs/$name.tmp" "benchmarks/logs/$name.txt"
}
keep sharing_modes "$python" benchmarks/mapping.py --only modes --repeats 3 --spu "${SPU:-}"
keep sharing_equal "$python" benchmarks/mapping.py --only equal --data "$data"
keep sharing_flare "$python" benchmarks/mapping_flare.py
keep sharing_propagation "$python" benchmarks/propagation.py --only modes --data "$data"
$python scripts/pieces.py
tail -n 30 benchmarks/logs/sharing_*.txt
