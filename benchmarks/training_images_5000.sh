#!/bin/bash
# Table 4 with 5000 labels, one split each, beside 1000 labels, and one larger network, all at once on one GPU:
#
#     training_images_5000.sh DATA OUT [LIMIT in seconds, 385]
#     training_images_5000.sh DATA OUT LIMIT long
#
# Settings as in training_images_all.sh. The larger run has width 128, as the paper, and two arms. `long`: two arms, two
# splits, five times the rounds of stage 2.
export PYTHONUNBUFFERED=1 OMP_NUM_THREADS=1
data=$1 out=$2 limit=${3:-385}
mkdir -p "$out"
(nvidia-cuda-mps-control -d && echo "MPS started") 2>&1 | tail -n 1
form="--seed 0 --test --train 20000 --first 1500 --power 3 --balance --scale-confidence --class-weights"
one() { # name, further arguments
    timeout "$limit" python3 "$(dirname "$0")/training_images.py" --data "$data" $form --out "$out/$1.jsonl" "${@:2}" \
        > "$out/$1.txt" 2>&1 &
}
if [ "$4" = long ]; then
    for split in iid noniid; do
        one "5000-$split-long" --labels 5000 --split $split --rounds 800 --score-every 100 --arms labelled xclp
    done
    wait
    tail -n 1 "$out"/*.txt | cut -c1-600
    exit
fi
for split in iid noniid half; do
    one "5000-$split" --labels 5000 --split $split --rounds 150 --score-every 30
done
one "1000-iid" --labels 1000 --split iid --rounds 90 --score-every 30 --arms labelled xclp
one "5000-iid-wide" --labels 5000 --split iid --rounds 90 --score-every 15 --width 128 --arms labelled xclp
wait
for f in "$out"/*.txt; do echo "== $f"; tail -n 1 "$f" | cut -c1-600; done
