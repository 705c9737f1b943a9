"""What a mapping is measured against: each site alone, all references pooled, a linear model. For researchers.

    table = cl.mapping_baselines(sites, query="vienna", label_key="cell_type", use_rep="X_pca")
    table["pooled k-NN"]["accuracy"]

Everything here needs all cells in one place, which is what the mapping itself avoids.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from cloister.arrays import F64, Array, Bits
from cloister.cells import tables as cells
from cloister.errors import DataError, ParameterError
from cloister.models import logistic

if TYPE_CHECKING:
    from anndata import AnnData

Names = Array


def scores(truth: Names, found: Names) -> dict[str, float]:
    """Accuracy, and F1 averaged over the labels that occur in the truth."""
    f1 = []
    for label in np.unique(truth):
        both = np.count_nonzero((truth == label) & (found == label))
        f1.append(2 * both / (np.count_nonzero(truth == label) + np.count_nonzero(found == label)))
    return {"accuracy": float((truth == found).mean()), "macro_f1": float(np.mean(f1))}


def nearest_label(q: F64, r: F64, names: Names, k: int) -> tuple[Names, Bits]:
    """Majority label of the k nearest rows of r, of equal ones the first by name; and which votes were ties."""
    order = np.argsort(names, kind="stable")  # equally near ones count in the order of their labels
    r, labels, codes = r[order], *np.unique(names[order], return_inverse=True)
    k = min(k, len(r))
    found, ties = [], []
    for start in range(0, len(q), 256):
        part = q[start : start + 256]
        d = ((part**2).sum(1)[:, None] - 2 * part @ r.T) + (r**2).sum(1)
        near = codes[np.argsort(d, axis=1, kind="stable")[:, :k]]
        votes = np.stack([(near == i).sum(1) for i in range(len(labels))], axis=1)
        found.append(labels[votes.argmax(1)])
        ties.append((votes == votes.max(1, keepdims=True)).sum(1) > 1)
    return np.concatenate(found), np.concatenate(ties)


def linear_label(q: F64, r: F64, names: Names, penalty: float = 1.0) -> Names:
    """Multinomial logistic regression with a squared penalty, on the columns as they are.

    Components of a PCA carry their weight in their variance: scaled to unit variance, the last ones would count as much
    as the first, and the model would be weak.
    """
    labels, codes = np.unique(names, return_inverse=True)
    if len(labels) == 1:
        return np.repeat(labels, len(q))
    rows, mean = logistic.Rows(r, codes, np.ones(len(r))), r.mean(0)
    columns, rank = r.shape[1], max(1, min(r.shape[1], 50, 700 // len(labels)))
    basis = np.eye(columns) if columns <= rank else np.linalg.svd(r - mean, full_matrices=False)[2][:rank].T
    left_over = max(0.0, float(r.var(0).sum() - ((r - mean) @ basis).var(0).sum())) / max(1, columns - rank)
    problem = logistic.Problem(penalty / len(r), float(len(r)), basis, left_over)
    start = np.zeros((columns + 1, len(labels)))
    theta, _ = logistic.minimise_here(rows, mean, problem, start, logistic.Memory(), most=200, tolerance=1e-3)
    return np.asarray(labels[logistic.scores(q, theta, mean).argmax(1)])


def mapping_baselines(
    data: Mapping[str, AnnData],
    *,
    query: str,
    label_key: str = "cell_type",
    use_rep: str = "X_shared_pca",
    n_neighbors: int = 10,
) -> dict[str, dict[str, Any]]:
    """Label the query site's cells in the ways that need no protocol, and score them by its own labels.

    Returns
    -------
    Name of the baseline → `accuracy`, `macro_f1`, `labels`: each reference site alone, all sites pooled, and logistic
    regression on the pooled references. `ties`, of the pooled one, says where its vote was a tie.
    """
    if query not in data or len(data) < 2:
        raise ParameterError(f"expected the query site and at least one other, found {', '.join(data)}")
    for site, adata in data.items():
        if label_key not in adata.obs:
            raise DataError(f"site '{site}': adata.obs[{label_key!r}] is missing; pass label_key=")
    x = {site: cells.embedding(adata, use_rep) for site, adata in data.items()}
    known = {site: ~adata.obs[label_key].isna().to_numpy() for site, adata in data.items()}
    names = {site: data[site].obs[label_key][known[site]].astype(str).to_numpy() for site in data}
    others = [site for site in data if site != query]
    pooled = np.concatenate([x[s][known[s]] for s in others]), np.concatenate([names[s] for s in others])
    made: dict[str, dict[str, Any]] = {}
    for site in others:
        found, ties = nearest_label(x[query], x[site][known[site]], names[site], n_neighbors)
        made[f"{site} alone"] = {"labels": found, "ties": ties}
    found, ties = nearest_label(x[query], *pooled, n_neighbors)
    made["pooled k-NN"] = {"labels": found, "ties": ties}
    made["pooled logistic regression"] = {"labels": linear_label(x[query], *pooled)}
    for row in made.values():
        row |= scores(names[query], row["labels"][known[query]])
    return made
