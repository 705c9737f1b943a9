#!/bin/sh
# Everything that docs/measured/train-cellcnn.md says of cost, in one go; hours on one core. OUT is a folder for the logs.
set -e
OUT=${1:-cellcnn-logs}
mkdir -p "$OUT"
export OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 NUMBA_NUM_THREADS=1
python benchmarks/cellcnn.py --part cost > "$OUT/cost.log" 2>&1
python benchmarks/lattice_before_after.py > "$OUT/before_after.log" 2>&1
python benchmarks/cellcnn.py --part paper > "$OUT/paper.log" 2>&1
python benchmarks/cellcnn.py --part sites > "$OUT/sites.log" 2>&1
python benchmarks/cellcnn.py --part predict > "$OUT/predict.log" 2>&1
python benchmarks/cellcnn.py --part encrypted --inputs 1000 > "$OUT/encrypted.log" 2>&1
python benchmarks/cellcnn.py --part classes > "$OUT/classes.log" 2>&1
python benchmarks/cellcnn_flare.py > "$OUT/flare.log" 2>&1
