#!/bin/bash
# All arms, three splits, some seeds of training_images.py at once on one GPU:
#
#     training_images_all.sh DATA OUT [SEEDS, "0 1"] [LIMIT in seconds]
#
# Settled before the run, on validation images with another seed (100): similarities to the third power, labels balanced,
# confidences scaled, class weights, embeddings of length one, the rates of the authors' program. The test images are
# scored along the way and chosen on for nothing; what counts is the score of the last round.
export PYTHONUNBUFFERED=1 OMP_NUM_THREADS=1
data=$1 out=$2 seeds=${3:-0 1} limit=${4:-100000}
(nvidia-cuda-mps-control -d && echo "MPS started") 2>&1 | tail -n 1
for seed in $seeds; do
    for split in iid noniid half; do
        timeout "$limit" python3 "$(dirname "$0")/training_images.py" --data "$data" --split $split --seed $seed --test \
            --train 16000 --width 64 --first 1500 --rounds 270 --score-every 30 \
            --power 3 --balance --scale-confidence --class-weights --out "$out/$split-$seed.jsonl" \
            > "$out/$split-$seed.txt" 2>&1 &
    done
done
wait
for f in "$out"/*.txt; do echo "== $f"; tail -n 1 "$f" | cut -c1-600; done
rm -f "$out"/*.txt
