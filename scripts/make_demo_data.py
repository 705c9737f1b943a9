"""Cut the three demo sites from the lung set (Tabula Sapiens and Travaglini et al.), reproducibly.

    python scripts/make_demo_data.py SOURCE

SOURCE is the folder with `lung_ts_vs_hlca.h5ad` (2,000 cells x 3,000 genes of raw counts; see NOTICE). Only
10x cells are kept, split by donor. The genes are the 600 that vary most, by the mean rank over the sites.
`obsm["X_pca"]` is the same projection everywhere, learned from basel's cells alone and stored beside it in
`var["pca_mean"]` and `varm["PCs"]`, so no other site had to show a cell for it:

    X_pca = (log1p(10000 * X / n_counts) - pca_mean) @ PCs
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import pandas as pd
from anndata import AnnData
from anndata.io import read_h5ad, write_h5ad

from cloister.arrays import F64, Index

SITES = {"basel": ("TSP1", "TSP2"), "lugano": ("LCA2",), "vienna": ("LCA1", "LCA3")}
N_CELLS, N_GENES, N_COMPONENTS, SEED = 480, 600, 20, 7
TARGET = Path(__file__).resolve().parent.parent / "src" / "cloister" / "data"


def cut_sites(lung: AnnData, rng: np.random.Generator) -> dict[str, AnnData]:
    lung = lung[(lung.obs["technology"] == "10x") & (lung.obs["cell_type_coarse"] != "other")]
    sites = {}
    for site, donors in SITES.items():
        mine = np.flatnonzero(lung.obs["donor"].isin(donors))
        mine = np.sort(rng.choice(mine, size=min(N_CELLS, len(mine)), replace=False))
        obs = lung.obs.iloc[mine]
        sites[site] = AnnData(
            X=lung.X[mine].astype(np.float32),
            obs=pd.DataFrame(
                {
                    "cell_type": obs["cell_type_coarse"].astype(str).astype("category"),
                    "cell_type_fine": obs["cell_type"].astype(str).astype("category"),
                    "donor": obs["donor"].astype(str).astype("category"),
                    "n_counts": obs["n_counts_all_genes"].astype(np.float32),
                }
            ),
            var=pd.DataFrame(index=lung.var_names),
        )
    return sites


def log_values(site: AnnData) -> F64:
    return np.log1p(1e4 * site.X.toarray() / site.obs["n_counts"].to_numpy(dtype=float)[:, None])


def variability_rank(values: F64) -> Index:
    """Rank genes by variance over mean, compared with genes of a similar mean (20 groups)."""
    mean = values.mean(axis=0)
    dispersion = values.var(axis=0) / np.maximum(mean, 1e-3)
    group = np.digitize(mean, np.quantile(mean, np.linspace(0, 1, 21)[1:-1]))
    score = np.zeros_like(dispersion)
    for g in range(20):
        mine = dispersion[group == g]
        score[group == g] = (mine - np.median(mine)) / (mine.std() + 1e-9)
    return np.argsort(np.argsort(-score, kind="stable"), kind="stable")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("source", type=Path, help="folder with lung_ts_vs_hlca.h5ad")
    parser.add_argument("--target", type=Path, default=TARGET)
    options = parser.parse_args()

    sites = cut_sites(read_h5ad(options.source / "lung_ts_vs_hlca.h5ad"), np.random.default_rng(SEED))
    rank = np.mean([variability_rank(log_values(site)) for site in sites.values()], axis=0)
    genes = np.sort(np.argsort(rank, kind="stable")[:N_GENES])
    sites = {name: site[:, genes].copy() for name, site in sites.items()}

    basel = log_values(sites["basel"])
    mean = basel.mean(axis=0)
    _, _, loadings = np.linalg.svd(basel - mean, full_matrices=False)
    loadings = loadings[:N_COMPONENTS].T  # (genes, components)
    loadings *= np.sign(loadings[np.abs(loadings).argmax(axis=0), range(N_COMPONENTS)])

    options.target.mkdir(parents=True, exist_ok=True)
    for name, site in sites.items():
        site.obsm["X_pca"] = ((log_values(site) - mean) @ loadings).astype(np.float32)
        site.var["pca_mean"] = mean.astype(np.float32)
        site.varm["PCs"] = loadings.astype(np.float32)
        path = options.target / f"lung_{name}.h5ad"
        write_h5ad(path, site, compression="gzip", compression_opts=9)
        print(f"{path.name}: {site.n_obs} cells x {site.n_vars} genes, {path.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
