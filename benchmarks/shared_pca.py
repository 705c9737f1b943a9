"""What a shared PCA costs, and what it costs that it corrects no batch effect.

    python benchmarks/shared_pca.py [--quick] [--data ../shared/data]

On four batches of blood cells (`pbmc_federation.h5ad`), each a site: subspace angle to the pooled PCA computed in one
place, seconds and bytes; then k-NN labels (k = 10) in the shared space,

  within      nearest neighbours in the cell's own batch (leave one out): what the space allows without a batch effect
  across      nearest neighbours in the other batches only: what mapping labels between sites has to live with
  centred     the same after every batch was centred on its own mean, the crudest of corrections
  mixing      share of a cell's 10 nearest neighbours, of all batches, that come from its own; expected if well mixed
"""

from __future__ import annotations

import argparse
import os
import platform
import time
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import anndata as ad
import numpy as np
from scipy.linalg import subspace_angles
from sklearn.metrics import f1_score
from sklearn.neighbors import NearestNeighbors

from cloister.rehearsal.rehearsal import rehearse
from cloister.workflows.shared_pca import shared_pca

K = 10


def vote(neighbours, labels):
    kinds, codes = np.unique(labels, return_inverse=True)
    counts = np.zeros((len(neighbours), len(kinds)), int)
    for column in codes[neighbours].T:
        counts[np.arange(len(neighbours)), column] += 1
    return kinds[counts.argmax(axis=1)]


def labels_from(reference, labels, query, *, skip_self=False):
    found = NearestNeighbors(n_neighbors=K + skip_self).fit(reference).kneighbors(query, return_distance=False)
    return vote(found[:, int(skip_self) :], labels)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="500 cells of every batch, 500 genes")
    parser.add_argument("--data", type=Path, default=Path(__file__).parents[2] / "shared" / "data")
    args = parser.parse_args()
    path = args.data / "scrna" / "pbmc_federation.h5ad"
    if not path.exists():
        print(f"{path} is not here; nothing measured")
        return
    whole = ad.read_h5ad(path)
    rng = np.random.default_rng(0)
    sites = {}
    for batch in whole.obs["batch"].unique():
        mine = np.flatnonzero(whole.obs["batch"] == batch)
        mine = rng.choice(mine, min(500, len(mine)), replace=False) if args.quick else mine
        sites[str(batch).replace("_", "-")] = whole[np.sort(mine)].copy()
    size = {"n_top_genes": 500 if args.quick else 2000, "n_components": 30}

    began = time.perf_counter()
    run = rehearse("shared-pca", sites, **size)
    took = time.perf_counter() - began
    params = shared_pca.Params(tuple(sites), "coordinator", **size)
    began = time.perf_counter()
    cells = {p: shared_pca.Cells(tuple(a.var_names), a.X) for p, a in sites.items()}
    ideal = shared_pca.ideal(params, cells)
    pooled_took = time.perf_counter() - began
    found = {p: run.data[p].obsm["X_shared_pca"] for p in sites}
    angle = subspace_angles(np.vstack(list(found.values())), np.vstack([ideal[p][1] for p in sites])).max()

    rows, types = [], {p: a.obs["cell_type"].astype(str).to_numpy() for p, a in sites.items()}
    everything, owners = np.vstack(list(found.values())), np.repeat(list(sites), [len(x) for x in found.values()])
    near = NearestNeighbors(n_neighbors=K + 1).fit(everything).kneighbors(everything, return_distance=False)[:, 1:]
    own = (owners[near] == owners[:, None]).mean(axis=1)
    centred = {p: x - x.mean(axis=0) for p, x in found.items()}
    for p in sites:
        others = [q for q in sites if q != p]
        known = np.isin(types[p], np.concatenate([types[q] for q in others]))
        labels = np.concatenate([types[q] for q in others])
        within = labels_from(found[p], types[p], found[p], skip_self=True)
        across = labels_from(np.vstack([found[q] for q in others]), labels, found[p])
        moved = labels_from(np.vstack([centred[q] for q in others]), labels, centred[p])
        row = [p, len(types[p])]
        for guess in (within, across, moved):
            row += [np.mean(guess[known] == types[p][known]), f1_score(types[p][known], guess[known], average="macro")]
        rows.append([*row, own[owners == p].mean(), len(types[p]) / len(owners)])

    print(f"{platform.machine()}, {os.cpu_count()} cores, {os.environ['OMP_NUM_THREADS']} thread(s), "
          f"{len(sites)} sites, {len(owners)} cells, {whole.n_vars} genes, {size}")  # fmt: skip
    sent = max(c["bytes"] for p, c in run.cost.items() if p != "coordinator")
    print(f"shared {took:.1f} s with all parties on one machine, {sent / 1e6:.1f} MB sent per site; "
          f"pooled in one place {pooled_took:.1f} s; largest subspace angle {angle:.1e}")  # fmt: skip
    print(f"{'site':14s} cells  within acc/F1   across acc/F1   centred acc/F1  own neighbours (expected)")
    for p, n, *x in rows:
        pairs = "".join(f"{a:7.3f} {b:6.3f}  " for a, b in zip(x[0:6:2], x[1:6:2], strict=True))
        print(f"{p:14s} {n:5d} {pairs} {x[6]:.3f} ({x[7]:.3f})")


if __name__ == "__main__":
    main()
