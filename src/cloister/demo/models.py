"""Demos of models that sites train together: CellCnn under encryption, a classifier by sums, a hidden encoder."""

from __future__ import annotations

from typing import Any

import numpy as np

from cloister.attacks.sent import Sent
from cloister.cells import demo as demo_data
from cloister.cells import tables as cells
from cloister.demo import attacks
from cloister.demo.rows import EPITHELIUM, IMMUNE, KNOWN, STROMA, Played, Tell, cost_of, hide_labels, linear_figures
from cloister.errors import CloisterError
from cloister.models import cellcnn, polynomial
from cloister.protocols.cellcnn import clear_training, encrypted_training
from cloister.protocols.fedavg.training_terms import Weights
from cloister.protocols.sums import pooled_scaling, secure_sum
from cloister.run.rehearsal import rehearse
from cloister.workflows import fine_tune as tuning
from cloister.workflows import train_cellcnn as training
from cloister.workflows.baselines.mapping import linear_label
from cloister.workflows.figures.cellcnn import accuracy

DRAWS = 5  # of donors: one draw of so few says little


def train_cellcnn(tell: Tell) -> Played:
    """Accuracy on new simulated donors, over five draws of donors, of a CellCnn that was trained encrypted.

    Donors differ in the make-up of their cells, as people do, and the four of one site are too few. The encrypted model
    of the first draw has to be its clear twin's; for the other draws the twin stands for it. The mode `published` is
    not played: it ends by opening the same model, so an attack would have the same kind of ciphertexts to read, and its
    circuit takes 6 GB for three sites and minutes for these four steps.
    """
    size: dict[str, Any] = {"n_cells": 300, "planted": 0.15, "variety": 0.4}
    draws = [demo_data.demo_donors(4, seed=2040 + i, **size) for i in range(DRAWS)]
    new = [demo_data.demo_donors(20, seed=3040 + i, **size) for i in range(DRAWS)]
    same: dict[str, Any] = {"n_steps": 4, "n_filters": 4, "n_cells": 100, "learning_rate": 1.2, "open_model": True}
    same["positive_class"] = "case"
    options = training.Options(**same)

    def score(models: list[Any]) -> float:
        """Of one model for each draw, on that draw's new donors."""
        each = zip(models, new, strict=True)
        return float(np.mean([accuracy(m, a, options)["donor_accuracy"] for m, sites in each for a in sites.values()]))

    others = [rehearse("train-cellcnn", d, mode="plain", on_event=tell, **same).model for d in draws[1:]]
    config = others[0].config
    pooled = score([clear_cellcnn([*d.values()], config, options) for d in draws])
    alone = np.mean([score([clear_cellcnn([d[p]], config, options) for d in draws]) for p in draws[0]])
    runs, rows = [], []
    for mode in ("hardened", "plain"):
        sent = Sent(encrypted_training.Gradient, clear_training.Gradient)
        run = rehearse("train-cellcnn", draws[0], mode=mode, on_event=tell, on_frame=sent, timeout=300.0, **same)
        runs.append(run)
        leak = attacks.markers_compared(sent, run.model, draws[0])
        figures = (f"{v:.1%}" for v in (pooled, score([run.model, *others]), alone))
        rows.append(("train-cellcnn", mode, "donors", *figures, leak, *cost_of(run)))
    first, second = (np.array(run.results["basel"]["filters"], dtype=np.float64) for run in runs)
    if not np.allclose(first, second, atol=1e-3):
        raise CloisterError("the encrypted model is not the clear twin's; please report this")
    return runs[:1], rows


def train_classifier(tell: Tell) -> Played:
    """Accuracy at a site without labels, of a classifier that the other two train."""
    sites, asking, sent = demo_data.demo_sites(), "vienna", Sent(secure_sum.MaskedInput)
    truth = {p: a.obs["cell_type"].astype(str).to_numpy() for p, a in sites.items()}
    bare = {p: a.copy() for p, a in sites.items()}
    del bare[asking].obs["cell_type"]
    size: dict[str, Any] = {"n_top_genes": 200, "l2": 0.01, "validation": 0.0, "min_label_cells": 3}
    run = rehearse("train-classifier", bare, on_event=tell, on_frame=sent, **size)
    x = {p: np.asarray(run.model.inputs(a).todense()) for p, a in sites.items()}
    others = [p for p in sites if p != asking]

    def right(names: list[str]) -> float:
        seen = np.concatenate([x[p] for p in names]), np.concatenate([truth[p] for p in names])
        return float(np.mean(linear_label(x[asking], *seen, penalty=size["l2"] * len(seen[0])) == truth[asking]))

    federated = float(np.mean(run.data[asking].obs["predicted"].astype(str).to_numpy() == truth[asking]))
    figures = (f"{v:.1%}" for v in (right(others), federated, max(right([p]) for p in others)))
    leak = attacks.own_label_sums(sent, run.model, x, truth, others)
    return [run], [("train-classifier", "hardened", "accuracy", *figures, leak, *cost_of(run))]


def clear_cellcnn(sites: list[Any], config: Any, options: Any) -> Any:
    """The same CellCnn on these sites' donors in one place: as many inputs of each site a step, scaled by all cells."""
    from dataclasses import replace

    X = np.concatenate([cells.embedding(a, None) for a in sites])
    donors, label = (np.concatenate([a.obs[k].astype(str).to_numpy() for a in sites]) for k in ("donor", "condition"))
    classes = tuple(np.unique(label))
    y = np.array([classes.index(c) for c in label])
    config, rng = replace(config, batch=config.batch * len(sites)), np.random.default_rng(0)
    scaling = pooled_scaling.scaling_of(X)
    model = cellcnn.Model(config, tuple(map(str, sites[0].var_names)), classes, 0.0, scaling.mean, scaling.scale)
    drawn = {"n_cells": options.n_cells, "per": options.per, "n_inputs": options.n_inputs * len(sites)}
    inputs = cellcnn.draw_inputs(model.prepare(X), donors, y, **drawn, rng=rng)
    return replace(model, weights=cellcnn.train(config, [cellcnn.draw_batches(*inputs, config, rng)]))


def fine_tune(tell: Tell) -> Played:
    """Accuracy on one cell in five, where each site has labelled the kinds of cells that it knows.

    Pooled and alone are logistic regressions; alone, a site can only name what it has labelled itself. No mode averages
    plainly. What that would show the coordinator is worked out beside the run, by the same learners in the clear, whose
    mean updates have to be those of the run; their model is the last one, the run's its best.
    """
    sites, truth, held, seen = hide_labels(0.2, KNOWN)
    x = {p: cells.embedding(a, "X_pca") for p, a in sites.items()}
    sent = Sent(secure_sum.MaskedInput, Weights)
    options: dict[str, Any] = {"rounds": 15, "local_epochs": 3, "lr": 3e-3}
    run = rehearse("fine-tune", sites, on_event=tell, on_frame=sent, **options)
    labels = tuple(run.results["basel"]["labels"])
    share = {p: np.array([np.mean(truth[p][seen[p]] == name) for name in labels]) for p in sites}
    learners = attacks.plain_learners(sites, labels, tuning.Options(**options), run.study.seed)
    leak, theta = attacks.labels_compared(sent, learners, share, tuning.Options(**options))
    ours = {p: run.data[p].obs["predicted"].astype(str).to_numpy() for p in sites}
    twins = {p: np.array(labels)[learner.logits(theta).argmax(axis=1)] for p, learner in learners.items()}
    return [run], [
        (
            "fine-tune",
            "hardened",
            "accuracy",
            *linear_figures(x, truth, held, seen, ours),
            leak["hardened"],
            *cost_of(run),
        ),
        (
            "fine-tune",
            "clear twin",
            "accuracy",
            *linear_figures(x, truth, held, seen, twins),
            leak["clear twin"],
            "–",
            "–",
        ),
    ]


def adapt_model(tell: Tell) -> Played:
    """Accuracy on one cell in five, where each site has labelled the kinds of cells that it knows.

    Pooled and alone are logistic regressions on the same taps. The published mode takes as long for one cell as the
    hardened one for a thousand. It is played with two cells at each site, the fewest that it takes: enough to see what
    it opens, and too few for a figure of accuracy.
    """
    known = {"lugano": (*EPITHELIUM, *STROMA), "vienna": IMMUNE}  # the provider's encoder was trained on basel's
    sites, truth, held, seen = hide_labels(0.2, known)
    options: dict[str, Any] = {"ring": "small", "rounds": 30, "local_epochs": 2, "lr": 0.02, "timeout": 300.0}
    options |= {"model": str(demo_data.demo_encoder())}
    run = rehearse("adapt-model", sites, on_event=tell, **options)
    taps = {p: np.asarray(run.data[p].obsm["predicted_features"]) for p in sites}
    predicted = {p: run.data[p].obs["predicted"].astype(str).to_numpy() for p in sites}
    figures = linear_figures(taps, truth, held, seen, predicted)
    encoder = polynomial.Encoder.load(demo_data.demo_encoder())
    asking = demo_data.demo_sites()["vienna"]
    blinded = attacks.blinded_block(encoder, asking)
    few = {p: a[np.flatnonzero(seen[p])[:2]].copy() for p, a in sites.items()}
    second = rehearse("adapt-model", few, mode="published", on_event=tell, **options)
    shown = attacks.shown_block(encoder, second.data["vienna"], asking)
    return [run, second], [
        ("adapt-model", "hardened", "accuracy", *figures, blinded, *cost_of(run)),
        ("adapt-model", "published", "2 cells", "–", "–", "–", shown, *cost_of(second)),
    ]
