"""The demo: every workflow on small real data that ships with the package, in minutes on two cores.

Each entry of `DEMOS` plays its workflow's modes in rehearsal and returns the runs and the rows of the table: what the
pooled analysis would give, what the federation gives, what a site alone gets, what others get to see, the cost.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from cloister import cells, demo_attacks, demo_data
from cloister.channel import Event
from cloister.errors import CloisterError
from cloister.rehearsal import Run, rehearse

HEADER = (
    "workflow",
    "mode",
    "measure",
    "pooled",
    "federated",
    "alone",
    "what others get to see",
    "sent",
    "seconds",
)
Tell = Callable[[Event], None] | None


def run_demo(
    folder: Path, *, on_event: Tell = None, say: Callable[[str], None] = print
) -> tuple[list[tuple[Any, ...]], Path]:
    """Play every demo, save each run under `folder`, and write one report. Returns the table and the page."""
    from cloister.report import write_report
    from cloister.results import save_run

    rows: list[tuple[Any, ...]] = [HEADER]
    runs: list[Run] = []
    for name, play in DEMOS.items():
        say(f"{name} ...")
        began = time.perf_counter()
        played, lines = play(on_event)
        runs += played
        rows += lines
        for run in played:
            save_run(run, folder / f"{name}-{run.study.mode}")
        say(f"{name}: {time.perf_counter() - began:.1f} s")
    return rows, write_report(folder / "report.html", runs, title="Cloister demo", table=rows)


def write_sites(folder: Path) -> list[Path]:
    """Write the demo's three sites as .h5ad files, to try the command line on."""
    from cloister.cell_files import write_cells

    folder.mkdir(parents=True, exist_ok=True)
    files = {folder / f"{site}.h5ad": adata for site, adata in demo_data.demo_sites().items()}
    for path, adata in files.items():
        write_cells(adata, path)
    return list(files)


def cost_of(run: Run) -> tuple[str, str]:
    """What a site sent, on average, and the seconds of the whole run."""
    from cloister.report_parts import size

    sites = [run.cost[p] for p in run.study.sites if p in run.cost]
    sent = float(np.mean([c["bytes"] for c in sites]))
    return size(sent), f"{max(c['seconds'] for c in run.cost.values()):.1f}"


def bin_values(tell: Tell) -> tuple[list[Run], list[tuple[Any, ...]]]:
    """Share of values that get the bin which the pooled quantiles would give them."""
    from cloister.workflows.bin_values import digitise

    sites = demo_data.demo_sites()
    values = {p: np.concatenate([*cells.nonzero_values(a)]) for p, a in sites.items()}
    levels = np.linspace(0, 1, 50)
    pooled = np.quantile(np.concatenate([*values.values()]), levels)

    def right(edges: Callable[[str], Any]) -> float:
        hits = [digitise(v, edges(p)) == digitise(v, pooled) for p, v in values.items()]
        return float(np.mean(np.concatenate(hits)))

    alone = right(lambda p: np.quantile(values[p], levels))
    runs, rows = [], []
    for mode in ("hardened", "published"):
        run = rehearse("bin-values", sites, mode=mode, on_event=tell)
        found = right(lambda p, run=run: run.data[p].uns["cloister"]["bin_edges"])
        seen = [e for p in sites for e, _ in run.receipts[p].entries if e.kind == "opened" and "local" in e.name]
        leak = f"{len(seen)} sites' own quantiles" if seen else "pooled counts only"
        runs.append(run)
        rows.append(("bin-values", mode, "same bin", "100.0%", f"{found:.1%}", f"{alone:.1%}", leak, *cost_of(run)))
    return runs, rows


def map_labels(tell: Tell) -> tuple[list[Run], list[tuple[Any, ...]]]:
    """Accuracy of the labels that one site gets from the other two, against its own."""
    from cloister.attacks import trilateration
    from cloister.protocols import plain_knn
    from cloister.workflows.mapping_baselines import mapping_baselines

    sites, query = demo_data.demo_sites(), "vienna"
    few = {p: a[::4].copy() for p, a in sites.items()}  # published takes many more rounds
    runs, rows = [], []
    for mode in ("hardened", "published", "plain"):
        data = few if mode == "published" else sites
        table = mapping_baselines(data, query=query)
        run = rehearse("map-labels", data, mode=mode, query=query, on_event=tell)
        pooled, alone = (
            table["pooled k-NN"]["accuracy"],
            max(table[f"{p} alone"]["accuracy"] for p in data if p != query),
        )
        found, leak = run.results[query]["accuracy"], "sizes only"
        if mode == "plain":  # what the coordinator is sent, and what it makes of it
            x = {p: np.rint(cells.embedding(a, "X_pca") * 2**16).astype(np.int64) for p, a in data.items()}
            hits = 0
            for p in x.keys() - {query}:
                d2, numbers = plain_knn.nearest(x[query], x[p], np.zeros(len(x[p]), np.int64), 10)
                view = trilateration.View(x[query].astype(float), numbers, d2.astype(float))
                hits += trilateration.rebuilt(view, x[p].astype(float), within=2**16 / 100)
            leak = f"{hits} of {sum(len(v) for p, v in x.items() if p != query)} references rebuilt"
        runs.append(run)
        figures = (f"{pooled:.1%}", f"{found:.1%}", f"{alone:.1%}")
        rows.append(("map-labels", mode, "accuracy", *figures, leak, *cost_of(run)))
    return runs, rows


def find_outliers(tell: Tell) -> tuple[list[Run], list[tuple[Any, ...]]]:
    """Area under the ROC curve of the scores, one site holding most of the outliers."""
    from cloister.models import isolation_forest

    sites = demo_data.demo_rows()
    truth = {p: a.obs["outlier_truth"].to_numpy() for p, a in sites.items()}
    pooled = _forest_auroc(isolation_forest, np.concatenate([a.X for a in sites.values()]), [*truth.values()])
    alone = float(np.mean([_forest_auroc(isolation_forest, a.X, [truth[p]]) for p, a in sites.items()]))
    runs, rows = [], []
    for mode, attack in (("hardened", demo_attacks.rows_rebuilt), ("published", demo_attacks.rows_unmasked)):
        run = rehearse("find-outliers", sites, mode=mode, contamination=0.1, on_event=tell)
        leak = attack(sites)
        scores = [run.data[p].obs["outlier_score"].to_numpy() for p in sites]
        found = auroc(np.concatenate(scores), np.concatenate([*truth.values()]))
        runs.append(run)
        rows.append(
            ("find-outliers", mode, "AUROC", f"{pooled:.3f}", f"{found:.3f}", f"{alone:.3f}", leak, *cost_of(run))
        )
    return runs, rows


def _forest_auroc(forest: Any, X: Any, truth: list[Any]) -> float:
    rng = np.random.default_rng(0)
    X = np.asarray(X, dtype=np.float64)
    return auroc(forest.fit(X, rng=rng).score(X), np.concatenate(truth))


def auroc(scores: Any, truth: Any) -> float:
    """How often an outlier scores above an inlier; ties count half."""
    from scipy.stats import rankdata

    ranks = rankdata(scores)
    n = int(truth.sum())
    return float((ranks[truth].sum() - n * (n + 1) / 2) / (n * (len(truth) - n)))


def propagate_labels(tell: Tell) -> tuple[list[Run], list[tuple[Any, ...]]]:
    """Accuracy on cells whose label was hidden: one in ten is kept at two sites, none at the third."""
    import pandas as pd

    from cloister.models import graph

    rng = np.random.default_rng(0)
    sites, hidden = {}, {}
    for p, a in demo_data.demo_sites().items():
        a = a[rng.permutation(a.n_obs)[:120]].copy()
        hidden[p] = a.obs["cell_type"].astype(str).to_numpy().copy()
        keep = rng.random(a.n_obs) < (0.0 if p == "vienna" else 0.1)
        a.obs["cell_type"] = pd.Categorical(np.where(keep, hidden[p], None))
        sites[p] = a
    vectors = {p: cells.embedding(a, "X_pca") for p, a in sites.items()}
    given = {p: a.obs["cell_type"].astype(object).where(a.obs["cell_type"].notna(), None) for p, a in sites.items()}

    def clear(names: list[str]) -> float:
        V = np.concatenate([vectors[p] for p in names])
        labels = np.concatenate([given[p].to_numpy() for p in names])
        truth = np.concatenate([hidden[p] for p in names])
        classes = sorted({x for x in labels if x is not None})
        numbers = np.array([-1 if x is None else classes.index(x) for x in labels])
        codes = graph.codes(V, graph.hyperplanes(bytes(32), 1024, V.shape[1]))
        found = graph.propagate(codes, numbers, n_classes=len(classes), exact=False)
        named = np.array([classes[i] if i >= 0 else "" for i in found.label])
        return float(np.mean(named[numbers < 0] == truth[numbers < 0]))

    pooled, alone = clear([*sites]), float(np.mean([clear([p]) for p in ("basel", "lugano")] + [0.0]))
    runs, rows = [], []
    found_out = demo_attacks.points_and_labels(vectors, {p: x.to_numpy() for p, x in given.items()}, 1024)
    for mode, leak in ((mode, found_out[mode]) for mode in ("hardened", "published")):
        run = rehearse("propagate-labels", sites, mode=mode, bits=1024, on_event=tell)
        hits = [
            (run.data[p].obs["propagated"].astype(str).to_numpy() == hidden[p])[np.array([x is None for x in given[p]])]
            for p in sites
        ]
        found = float(np.mean(np.concatenate(hits)))
        runs.append(run)
        figures = (f"{pooled:.1%}", f"{found:.1%}", f"{alone:.1%}")
        rows.append(("propagate-labels", mode, "accuracy", *figures, leak, *cost_of(run)))
    return runs, rows


def fine_tune(tell: Tell) -> tuple[list[Run], list[tuple[Any, ...]]]:
    """Accuracy on one cell in five whose label was hidden; pooled and alone by logistic regression."""
    import pandas as pd

    from cloister.workflows.mapping_baselines import linear_label

    rng = np.random.default_rng(0)
    sites, truth, held = {}, {}, {}
    for p, a in demo_data.demo_sites().items():
        truth[p] = a.obs["cell_type"].astype(str).to_numpy().copy()
        held[p] = rng.random(a.n_obs) < 0.2
        a.obs["cell_type"] = pd.Categorical(np.where(held[p], None, truth[p]))
        sites[p] = a
    x = {p: cells.embedding(a, "X_pca") for p, a in sites.items()}

    def linear(names: list[str], p: str) -> float:
        seen = np.concatenate([x[q][~held[q]] for q in names]), np.concatenate([truth[q][~held[q]] for q in names])
        return float(np.mean(linear_label(x[p][held[p]], *seen) == truth[p][held[p]]))

    def over_sites(accuracy: Callable[[str], float]) -> float:
        return float(np.average([accuracy(p) for p in sites], weights=[held[p].sum() for p in sites]))

    run = rehearse("fine-tune", sites, rounds=15, local_epochs=3, lr=3e-3, on_event=tell)
    found = {p: run.data[p].obs["predicted"].astype(str).to_numpy() for p in sites}
    figures = (
        over_sites(lambda p: linear([*sites], p)),
        over_sites(lambda p: float(np.mean((found[p] == truth[p])[held[p]]))),
        over_sites(lambda p: linear([p], p)),
    )
    row = ("fine-tune", "hardened", "accuracy", *(f"{v:.1%}" for v in figures), "mean updates only", *cost_of(run))
    return [run], [row]


def train_cellcnn(tell: Tell) -> tuple[list[Run], list[tuple[Any, ...]]]:
    """Accuracy on the sites' simulated donors of a CellCnn that was trained encrypted, beside its clear twin."""
    donors = demo_data.demo_donors()
    same = {"n_steps": 4, "n_filters": 4, "n_cells": 100, "learning_rate": 0.4, "open_model": True}
    runs, rows = [], []
    for encrypted in (True, False):
        run = rehearse("train-cellcnn", donors, encrypted=encrypted, on_event=tell, **same)
        found = float(np.mean([run.results[p]["donor_accuracy"] for p in donors]))
        runs.append(run)
        leak = "nothing before all agree to open it" if encrypted else "every gradient"
        mode = "hardened" if encrypted else "clear twin"
        rows.append(("train-cellcnn", mode, "donors", "–", f"{found:.1%}", "–", leak, *cost_of(run)))
    first, second = (np.array(run.results["basel"]["filters"], dtype=np.float64) for run in runs)
    if not np.allclose(first, second, atol=1e-3):
        raise CloisterError("the encrypted model is not the clear twin's; please report this")
    return runs[:1], rows


def shared_pca(tell: Tell) -> tuple[list[Run], list[tuple[Any, ...]]]:
    """Smallest cosine between the space that was found and the one of all cells in one place."""
    sites = demo_data.demo_sites()
    run = rehearse("shared-pca", sites, n_components=10, n_top_genes=300, on_event=tell)
    genes = [str(g) for g in run.data["basel"].uns["X_shared_pca"]["genes"]]
    at = [sites["basel"].var_names.get_loc(g) for g in genes]
    logs = {}
    for p, a in sites.items():
        x = np.asarray(a.X.todense(), dtype=np.float64)
        logs[p] = np.log1p(x / np.maximum(x.sum(axis=1, keepdims=True), 1) * 1e4)[:, at]

    def axes(y: Any) -> Any:
        deviation = y.std(axis=0, ddof=1)
        z = np.clip((y - y.mean(axis=0)) / np.where(deviation > 0, deviation, 1), None, 10)
        return np.linalg.svd(z - z.mean(axis=0), full_matrices=False)[2][:10].T

    def nearness(a: Any, b: Any) -> float:
        return float(np.linalg.svd(np.linalg.qr(a)[0].T @ np.linalg.qr(b)[0])[1].min())

    pooled = axes(np.concatenate([*logs.values()]))
    place = {str(g): i for i, g in enumerate(run.data["basel"].var_names)}
    found = np.asarray(run.data["basel"].varm["X_shared_pca"])[[place[g] for g in genes]]
    alone = float(np.mean([nearness(axes(y), pooled) for y in logs.values()]))
    sums = sum(e.name.startswith("sum of") for e, _ in run.receipts["coordinator"].entries if e.kind == "opened")
    leak = f"{sums} sums over all sites" if sums else "sums over all sites"
    figures = ("1.000", f"{nearness(found, pooled):.3f}", f"{alone:.3f}")
    return [run], [("shared-pca", "hardened", "same space", *figures, leak, *cost_of(run))]


def adapt_model(tell: Tell) -> tuple[list[Run], list[tuple[Any, ...]]]:
    """Accuracy on one cell in five whose label was hidden; pooled and alone by logistic regression on the same taps."""
    import pandas as pd

    from cloister.workflows.mapping_baselines import linear_label

    rng = np.random.default_rng(0)
    sites, truth, held = {}, {}, {}
    for p, a in demo_data.demo_sites().items():
        if p == "basel":  # the provider's encoder was trained on these
            continue
        truth[p] = a.obs["cell_type"].astype(str).to_numpy().copy()
        held[p] = rng.random(a.n_obs) < 0.2
        a.obs["cell_type"] = pd.Categorical(np.where(held[p], None, truth[p]))
        sites[p] = a
    options = {"ring": "small", "rounds": 30, "local_epochs": 2, "lr": 0.02, "timeout": 300.0}
    run = rehearse("adapt-model", sites, model=str(demo_data.demo_encoder()), on_event=tell, **options)
    taps = {p: np.asarray(run.data[p].obsm["predicted_features"]) for p in sites}

    def linear(names: list[str], p: str) -> Any:
        seen = np.concatenate([taps[q][~held[q]] for q in names]), np.concatenate([truth[q][~held[q]] for q in names])
        return linear_label(taps[p][held[p]], *seen) == truth[p][held[p]]

    def over_sites(hits: Callable[[str], Any]) -> str:
        return f"{np.mean(np.concatenate([hits(p) for p in sites])):.1%}"

    found = {p: run.data[p].obs["predicted"].astype(str).to_numpy() == truth[p] for p in sites}
    figures = (
        over_sites(lambda p: linear([*sites], p)),
        over_sites(lambda p: found[p][held[p]]),
        over_sites(lambda p: linear([p], p)),
    )
    seen = f"{taps['vienna'].shape[1]} numbers per cell, of the last block"
    leak = demo_attacks.block_fitted(demo_data.demo_sites()["vienna"])
    return [run], [
        ("adapt-model", "hardened", "accuracy", *figures, seen, *cost_of(run)),
        ("adapt-model", "published", "not run", "–", "–", "–", leak, "–", "–"),
    ]


DEMOS: dict[str, Callable[[Tell], tuple[list[Run], list[tuple[Any, ...]]]]] = {
    "bin-values": bin_values,
    "shared-pca": shared_pca,
    "find-outliers": find_outliers,
    "map-labels": map_labels,
    "propagate-labels": propagate_labels,
    "train-cellcnn": train_cellcnn,
    "fine-tune": fine_tune,
    "adapt-model": adapt_model,
}
