"""Demos of labels: mapped from other sites' references, and propagated over all sites' cells."""

from __future__ import annotations

from typing import Any

import numpy as np

from cloister.cells import tables as cells
from cloister.demo import attacks
from cloister.demo.rows import Played, Tell, cost_of, percent
from cloister.demo.story import Story
from cloister.models import graph
from cloister.papers import plain_knn
from cloister.papers.attacks.sent import Sent
from cloister.papers.baselines.mapping import mapping_baselines
from cloister.rehearsal.rehearsal import rehearse
from cloister.workflows.propagate_labels.workflow import Options


def map_labels(story: Story, tell: Tell) -> Played:
    """Accuracy of the labels that one site gets from the other two; alone is the better one of these two.

    Every third cell, and in the published mode, which takes many more rounds, every ninth.
    """
    query, use_rep = "vienna", "X_integrated"

    def asking(every: int) -> dict[str, Any]:
        data = {p: a[story.seen[p]][::every].copy() for p, a in story.integrated.items() if p != query}
        data[query] = story.integrated[query][::every].copy()
        data[query].obs["cell_type"] = story.truth[query][::every]  # it sends none of these; they are for the score
        return data

    runs, rows = [], []
    for mode in ("hardened", "published", "plain"):
        data = asking(9 if mode == "published" else 3)
        table = mapping_baselines(data, query=query, use_rep=use_rep)
        sent = Sent(plain_knn.Queries, plain_knn.Nearest)
        run = rehearse("map-labels", data, mode=mode, query=query, use_rep=use_rep, on_event=tell, on_frame=sent)
        alone = max(table[f"{p} alone"]["accuracy"] for p in data if p != query)
        x = {p: cells.embedding(a, use_rep) for p, a in data.items()}
        leak = attacks.references_rebuilt(sent, x, query, run.data[query].obs["mapped"].to_numpy())
        runs.append(run)
        figures = percent(alone, run.results[query]["accuracy"], table["pooled k-NN"]["accuracy"])
        rows.append(("map-labels", mode, "accuracy", *figures, leak, *cost_of(run)))
    return runs, rows


def propagate_labels(story: Story, tell: Tell) -> Played:
    """Accuracy on cells that no site has labelled, of 120 cells a site; alone, over a graph of one's own cells."""
    rng = np.random.default_rng(0)
    at = {p: np.sort(rng.permutation(a.n_obs)[:120]) for p, a in story.integrated.items()}
    sites = {p: a[at[p]].copy() for p, a in story.integrated.items()}
    truth = {p: story.truth[p][at[p]] for p in sites}
    vectors = {p: cells.embedding(a, "X_integrated") for p, a in sites.items()}
    given = {p: a.obs["cell_type"].astype(object).where(a.obs["cell_type"].notna(), None) for p, a in sites.items()}
    hidden = {p: np.array([x is None for x in given[p]]) for p in sites}

    def hits(labels: dict[str, Any]) -> float:
        return float(np.mean(np.concatenate([(labels[p] == truth[p])[hidden[p]] for p in sites])))

    def clear(names: list[str]) -> dict[str, Any]:
        V = np.concatenate([vectors[p] for p in names])
        labels = np.concatenate([given[p].to_numpy() for p in names])
        classes = sorted({x for x in labels if x is not None})
        numbers = np.array([-1 if x is None else classes.index(x) for x in labels])
        codes = graph.codes(V, graph.hyperplanes(bytes(32), 1024, V.shape[1]))
        in_clear = graph.propagate(
            codes,
            numbers,
            n_classes=len(classes),
            n_neighbors=Options.n_neighbors,
            alpha=Options.alpha,
            power=Options.power,
            exact=False,
        )
        named = np.array([classes[i] if i >= 0 else "" for i in in_clear.label])
        return dict(zip(names, np.split(named, np.cumsum([len(vectors[p]) for p in names])[:-1]), strict=True))

    pooled, alone = hits(clear([*sites])), hits({p: clear([p])[p] for p in sites})
    runs, rows = [], []
    found_out = attacks.points_and_labels(vectors, {p: x.to_numpy() for p, x in given.items()}, 1024)
    for mode, leak in ((mode, found_out[mode]) for mode in ("hardened", "published")):
        run = rehearse("propagate-labels", sites, mode=mode, bits=1024, use_rep="X_integrated", on_event=tell)
        together = hits({p: run.data[p].obs["propagated"].astype(str).to_numpy() for p in sites})
        runs.append(run)
        rows.append(("propagate-labels", mode, "accuracy", *percent(alone, together, pooled), leak, *cost_of(run)))
    return runs, rows
