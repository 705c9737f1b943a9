"""The small public data sets that come with the package; NOTICE names their sources and licences."""

from __future__ import annotations

from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from cloister.cells.files import read_cells

if TYPE_CHECKING:
    from anndata import AnnData

SITES = ("basel", "lugano", "vienna")


def demo_sites() -> dict[str, AnnData]:
    """Load the three small lung sites that come with the package: raw counts, `cell_type`, `X_pca`."""
    sites = {}
    for site in SITES:
        with resources.as_file(resources.files("cloister") / "data" / f"lung_{site}.h5ad") as path:
            sites[site] = read_cells(path, probe=False)  # our own file
    return sites


def demo_donors(
    per_site: int = 8, n_cells: int = 500, planted: float = 0.12, *, variety: float = 0.0, seed: int = 2015
) -> dict[str, AnnData]:
    """Simulate three sites with donors of two conditions, from real mass-cytometry cells that come with the package.

    A donor is `n_cells` cells drawn from one bone marrow; in the condition "case", a share `planted` of them are CD16+
    NK cells, in "control" almost none. `obs` has `donor`, `condition`, `population`. Another seed draws other donors.
    With `variety`, donors differ in the make-up of their other cells as well, as people do: each population is weighed
    by a log-normal factor of that deviation.
    """
    import pandas as pd
    from anndata import AnnData

    with resources.as_file(resources.files("cloister") / "data" / "levine_cells.npz") as path, np.load(path) as file:
        X, label, populations, markers = (file[k] for k in ("X", "label", "populations", "markers"))
    rng = np.random.default_rng(seed)
    rare = label == int(np.flatnonzero(populations == "CD16+_NK_cells")[0])
    sites = {}
    for site in SITES:
        rows, donors, conditions = [], [], []
        for i in range(per_site):
            case = i % 2 == 0
            n_rare = rng.binomial(n_cells, planted if case else 0.01)
            rows.append(rng.choice(np.flatnonzero(rare), n_rare))
            weigh = None
            if variety:
                weigh = np.exp(variety * rng.standard_normal(len(populations)))[label[~rare]]
                weigh /= weigh.sum()
            rows.append(rng.choice(np.flatnonzero(~rare), n_cells - n_rare, p=weigh))
            donors += [f"{site}-{i + 1}"] * n_cells
            conditions += ["case" if case else "control"] * n_cells
        drawn = np.concatenate(rows)
        names = [f"{site}-cell-{i}" for i in range(len(drawn))]
        obs = pd.DataFrame(
            {"donor": donors, "condition": conditions, "population": populations[label[drawn]]}, index=names
        )
        sites[site] = AnnData(X[drawn].astype(np.float32), obs=obs, var=pd.DataFrame(index=[str(m) for m in markers]))
    return sites


def demo_cohort(
    per_site: int = 12, n_cells: int = 160, planted: int = 20, *, clone: float = 0.0, seed: int = 2014
) -> dict[str, AnnData]:
    """Simulate three sites with donors of two conditions, from the counts of the lung cells of `demo_sites`.

    A donor is `n_cells` cells drawn at a site, each gene thinned by a factor of the donor's own. In the condition
    "case" macrophages have 0.4 more counts, on average, of `planted` genes (`var["planted"]`), and most T cells are
    missing. `obs` has `donor`, `condition`, `age`, `cell_type`. Another seed draws other donors with the same disease.
    With `clone`, this fraction of the last site's cells, and a twelfth of it at the others, belongs to a clone that
    expresses thirty genes which lung cells rarely express (`obs["clone"]`).
    """
    import pandas as pd
    from anndata import AnnData
    from scipy import sparse

    rng = np.random.default_rng(2014)
    whole = demo_sites()
    common = sorted(set.intersection(*(set(a.var_names) for a in whole.values())))
    seen = np.asarray(sum(np.asarray((a[:, common].X > 0).mean(axis=0)).ravel() for a in whole.values()))
    up = np.zeros(len(common), bool)
    up[rng.choice(np.flatnonzero((seen > 0.4) & (seen < 1.5)), planted, replace=False)] = True
    foreign = np.random.default_rng([2014, 1]).choice(np.flatnonzero(seen < 0.3), 30, replace=False)
    rng, growth = rng if seed == 2014 else np.random.default_rng(seed), np.random.default_rng([seed, 2])
    sites = {}
    for site, adata in whole.items():
        counts, kind = adata[:, common].X.toarray(), adata.obs["cell_type"].astype(str).to_numpy()
        tables, rows = [], []
        for i in range(per_site):
            case = i % 2 == 1
            chance = np.where((kind == "T") & case, 0.25, 1.0)
            drawn = rng.choice(len(counts), n_cells, p=chance / chance.sum())
            own = np.clip(np.exp(rng.normal(-0.4, 0.25, len(common))), 0.1, 1.0)
            x = rng.binomial(counts[drawn].astype(np.int64), own)
            if case:
                x += rng.poisson(0.4, x.shape) * np.outer(kind[drawn] == "macrophage", up)
            grown = growth.random(n_cells) < (clone if site == SITES[-1] else clone / 12)
            x[np.ix_(grown, foreign)] += growth.poisson(2.0, (grown.sum(), len(foreign)))
            tables.append(x)
            facts = {"donor": f"{site}-{i + 1}", "condition": "case" if case else "control"}
            of_cells = {"cell_type": kind[drawn]} | ({"clone": grown} if clone else {})
            rows.append(pd.DataFrame({**facts, "age": int(rng.integers(25, 75)), **of_cells}))
        obs = pd.concat(rows, ignore_index=True)
        obs.index = pd.Index([f"{site}-cell-{i}" for i in range(len(obs))])
        matrix = sparse.csr_matrix(np.concatenate(tables).astype(np.float32))
        sites[site] = AnnData(matrix, obs=obs, var=pd.DataFrame({"planted": up}, index=common))
    return sites


def demo_encoder() -> Path:
    """File of the small encoder that plays a provider's model; it was trained on the cells of the demo's site basel."""
    with resources.as_file(resources.files("cloister") / "data" / "lung_encoder.npz") as path:
        return path


def demo_rows() -> dict[str, AnnData]:
    """Load cardiotocograms of three sites, with `obs["outlier_truth"]`; one site holds most of the outliers."""
    import pandas as pd
    from anndata import AnnData

    with resources.as_file(resources.files("cloister") / "data" / "cardio.npz") as path, np.load(path) as file:
        X, y = file["X"], file["y"].astype(bool)
    rng = np.random.default_rng(2016)
    home = np.where(y, rng.choice(3, len(y), p=[0.15, 0.15, 0.7]), rng.choice(3, len(y), p=[0.4, 0.35, 0.25]))
    sites = {}
    for i, site in enumerate(SITES):
        at = np.flatnonzero(home == i)
        obs = pd.DataFrame({"outlier_truth": y[at]}, index=[f"{site}-{j}" for j in at])
        sites[site] = AnnData(X[at], obs=obs, var=pd.DataFrame(index=[f"feature-{j + 1}" for j in range(X.shape[1])]))
    return sites
