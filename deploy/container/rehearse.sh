#!/bin/sh
# Builds both images and runs a study of three hospitals in eight containers on this machine: sh deploy/container/rehearse.sh
# Needs Docker with Compose, root, and `make setup`. PYTHON names another base image; BUILD=0 uses the images that are there.
set -eu
cd "$(dirname "$0")/../.."
bin="$PWD/.venv/bin"
compose="${COMPOSE:-docker compose}"
work="$(mktemp -d)"
trap '$compose -p cloister-rehearsal -f "$work/deploy/container/compose.yaml" down -v >/dev/null 2>&1; rm -rf "$work"' EXIT

if [ "${BUILD:-1}" = 1 ]; then
    "$bin/python" -m pip wheel --quiet --no-deps --wheel-dir dist .
    for target in service carrier; do
        docker build --quiet -f deploy/container/Dockerfile ${PYTHON:+--build-arg PYTHON="$PYTHON"} --target $target -t cloister-$target .
    done
fi

mkdir -p "$work/deploy/container"
cp deploy/container/compose.yaml "$work/deploy/container/"
cd "$work/deploy/container"
cat > study.toml <<'STUDY'
name = "rehearsal"
workflow = "bin-values"
mode = "hardened"
[parties]
hub = "coordinator"
basel = "site"
lugano = "site"
vienna = "site"
[network]
host = "172.30.0.2"
port = 8002
STUDY
"$bin/cloister" provision study.toml --out kits
for site in basel lugano vienna; do
    "$bin/python" - "kits/$site/cells.h5ad" <<'CELLS'
import sys

import anndata as ad
import numpy as np

ad.AnnData(np.random.default_rng().poisson(1.0, (300, 400)).astype(np.float32)).write_h5ad(sys.argv[1])
CELLS
done
for party in hub basel lugano vienna; do
    sed -i 's/^sandbox = .*/sandbox = "systemd"/' "kits/$party/local/site.toml"
done
for site in basel lugano vienna; do
    "$bin/cloister" site "kits/$site" --approve > /dev/null
done
chown -R 61201:61202 kits
chmod 640 kits/*/startup/*
$compose -p cloister-rehearsal up --detach --no-build
sleep 15
docker exec "$(docker ps -q -f name=rehearsal.hub.1)" cloister run /kit/study.toml --as hub --kit /kit
for site in basel lugano vienna; do
    ls "kits/$site"/results/*/outcome.json
done
