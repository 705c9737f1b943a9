"""Demos of labels: mapped from other sites' references, and propagated over all sites' cells."""

from __future__ import annotations

import numpy as np

from cloister.attacks.sent import Sent
from cloister.cells import demo as demo_data
from cloister.cells import tables as cells
from cloister.demo import attacks
from cloister.demo.rows import Played, Tell, cost_of
from cloister.models import graph
from cloister.protocols.knn import plain_knn
from cloister.run.rehearsal import rehearse
from cloister.workflows.baselines.mapping import mapping_baselines


def map_labels(tell: Tell) -> Played:
    """Accuracy of the labels that one site gets from the other two, against its own."""
    sites, query = demo_data.demo_sites(), "vienna"
    few = {p: a[::4].copy() for p, a in sites.items()}  # published takes many more rounds
    runs, rows = [], []
    for mode in ("hardened", "published", "plain"):
        data = few if mode == "published" else sites
        table = mapping_baselines(data, query=query)
        sent = Sent(plain_knn.Queries, plain_knn.Nearest)
        run = rehearse("map-labels", data, mode=mode, query=query, on_event=tell, on_frame=sent)
        pooled, alone = (
            table["pooled k-NN"]["accuracy"],
            max(table[f"{p} alone"]["accuracy"] for p in data if p != query),
        )
        accuracy = run.results[query]["accuracy"]
        x = {p: cells.embedding(a, "X_pca") for p, a in data.items()}
        leak = attacks.references_rebuilt(sent, x, query, run.data[query].obs["mapped"].to_numpy())
        runs.append(run)
        figures = (f"{pooled:.1%}", f"{accuracy:.1%}", f"{alone:.1%}")
        rows.append(("map-labels", mode, "accuracy", *figures, leak, *cost_of(run)))
    return runs, rows


def propagate_labels(tell: Tell) -> Played:
    """Accuracy on cells whose label was hidden: one in ten is kept at two sites, none at the third."""
    import pandas as pd

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
        in_clear = graph.propagate(codes, numbers, n_classes=len(classes), exact=False)
        named = np.array([classes[i] if i >= 0 else "" for i in in_clear.label])
        return float(np.mean(named[numbers < 0] == truth[numbers < 0]))

    pooled, alone = clear([*sites]), float(np.mean([clear([p]) for p in ("basel", "lugano")] + [0.0]))
    runs, rows = [], []
    found_out = attacks.points_and_labels(vectors, {p: x.to_numpy() for p, x in given.items()}, 1024)
    for mode, leak in ((mode, found_out[mode]) for mode in ("hardened", "published")):
        run = rehearse("propagate-labels", sites, mode=mode, bits=1024, on_event=tell)
        hits = [
            (run.data[p].obs["propagated"].astype(str).to_numpy() == hidden[p])[np.array([x is None for x in given[p]])]
            for p in sites
        ]
        in_clear = float(np.mean(np.concatenate(hits)))
        runs.append(run)
        figures = (f"{pooled:.1%}", f"{in_clear:.1%}", f"{alone:.1%}")
        rows.append(("propagate-labels", mode, "accuracy", *figures, leak, *cost_of(run)))
    return runs, rows
