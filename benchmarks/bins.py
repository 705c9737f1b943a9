"""bin-values: values in another bin than by the quantiles of all values in one place.

python benchmarks/bins.py        demo cells, and continuous values of five and of three sites; below a minute
"""

from __future__ import annotations

import numpy as np
from anndata import AnnData
from scipy import sparse

from cloister.cells import demo
from cloister.cells import tables as cells
from cloister.rehearsal.rehearsal import rehearse

BINS = 51


def misplaced(data):
    """Number of non-zero values, and the fraction whose bin no pooled edge allows."""
    run = rehearse("bin-values", data, n_bins=BINS)
    everything = np.sort(np.concatenate([v for a in data.values() for v in cells.nonzero_values(a)]))
    edges = np.clip(np.quantile(everything, np.linspace(0, 1, BINS - 1)), everything[9], everything[-10])
    wrong = 0
    for site, a in data.items():
        both = (a.X, run.data[site].layers["binned"])
        X, found = (np.asarray(m.toarray() if sparse.issparse(m) else m) for m in both)
        last = np.clip(np.digitize(X, edges), 1, BINS - 1)
        first = np.minimum(np.digitize(X, edges, right=True) + 1, last)
        wrong += int(np.sum((X != 0) & ((found < first) | (found > last))))
    return len(everything), wrong / len(everything)


def lognormal(rng):
    sites = zip((20, 60, 300, 1000, 2000), (-1, 2, 0, 0.5, 1), (0.5, 1.5, 1.0, 0.2, 0.8), strict=True)
    for n, mu, sigma in sites:
        X = rng.lognormal(mu, sigma, (n, 60)).astype(np.float32)
        X[rng.random(X.shape) < 0.6] = 0
        yield AnnData(sparse.csr_matrix(X))


def main():
    names = ("basel", "lugano", "vienna", "bern", "zug")
    rng = np.random.default_rng(0)
    sets = {
        "demo cells, three sites": demo.demo_sites(),
        "log-normal, five sites": dict(zip(names, lognormal(np.random.default_rng(1)), strict=True)),
        "gamma, three sites": {s: AnnData(rng.gamma(2, 1 + i, (2000, 50))) for i, s in enumerate(names[:3])},
    }
    for name, data in sets.items():
        n, share = misplaced(data)
        print(f"{name:26s} {n:8d} values  {share:.3%} in another bin", flush=True)


if __name__ == "__main__":
    main()
