"""Demos of models that sites train together: CellCnn under encryption, a classifier by sums, a hidden encoder."""

from __future__ import annotations

from typing import Any

import numpy as np

from cloister.cells import demo as demo_data
from cloister.cells import tables as cells
from cloister.demo import attacks
from cloister.demo.rows import Played, Tell, cost_of, linear_figures, percent, right_of
from cloister.demo.story import CLASSIFIER, CLONE, Story, panel
from cloister.errors import CloisterError
from cloister.models import cellcnn, polynomial
from cloister.mpc.sums import pooled_scaling
from cloister.papers import clear_training
from cloister.papers.attacks.sent import MASKED, Sent
from cloister.rehearsal.rehearsal import rehearse
from cloister.workflows.fine_tune import workflow as tuning
from cloister.workflows.fine_tune.training_terms import Weights
from cloister.workflows.train_cellcnn import encrypted_training
from cloister.workflows.train_cellcnn import workflow as training
from cloister.workflows.train_cellcnn.figures import accuracy

DEMO_PENALTY = 0.01  # of the logistic regressions alone and pooled
DRAWS = 5  # of donors: one draw of so few says little


def train_cellcnn(story: Story, tell: Tell) -> Played:
    """Accuracy on new donors with the same disease, over five draws of donors, of a CellCnn that was trained encrypted.

    Its markers are the genes that `compare-groups` has found. The first draw is the story's own; its encrypted model
    has to be its clear twin's, and for the other draws the twin stands for it. The mode `published` is not played: it
    ends by opening the same model, so an attack would have the same kind of ciphertexts to read, and its circuit takes
    6 GB for three sites and minutes for these four steps.
    """
    cohorts = [story.sites, *(demo_data.demo_cohort(clone=CLONE, seed=2014 + i) for i in range(1, DRAWS))]
    later = (demo_data.demo_cohort(20, clone=CLONE, seed=3014 + i) for i in range(DRAWS))
    draws = [panel(sites, story.found) for sites in cohorts]
    new = [panel(a, story.found, like=before) for a, before in zip(later, cohorts, strict=True)]
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
    alone = float(np.mean([score([clear_cellcnn([d[p]], config, options) for d in draws]) for p in draws[0]]))
    runs, rows = [], []
    for mode in ("hardened", "plain"):
        sent = Sent(encrypted_training.Gradient, clear_training.Gradient)
        run = rehearse("train-cellcnn", draws[0], mode=mode, on_event=tell, on_frame=sent, timeout=300.0, **same)
        runs.append(run)
        leak = attacks.markers_compared(sent, run.model, draws[0])
        figures = percent(alone, score([run.model, *others]), pooled)
        rows.append(("train-cellcnn", mode, "donors", *figures, leak, *cost_of(run)))
    first, second = (np.array(run.results["basel"]["filters"], dtype=np.float64) for run in runs)
    if not np.allclose(first, second, atol=1e-3):
        raise CloisterError("the encrypted model is not the clear twin's; please report this")
    return runs[:1], rows


def train_classifier(story: Story, tell: Tell) -> Played:
    """Accuracy on one cell in five, where each site has labelled the kinds of cells that it knows."""
    sent = Sent(*MASKED)
    run = rehearse("train-classifier", story.sites, on_event=tell, on_frame=sent, **CLASSIFIER)
    story.labelled = run.data
    x = {p: np.asarray(run.model.inputs(a).todense()) for p, a in story.sites.items()}
    alone, pooled = linear_figures(x, story.truth, story.held, story.seen, DEMO_PENALTY)
    predicted = {p: a.obs["predicted"].astype(str).to_numpy() for p, a in run.data.items()}
    figures = percent(alone, right_of(predicted, story.truth, story.held), pooled)
    labelled = {p: a[story.seen[p]] for p, a in x.items()}
    leak = attacks.own_label_sums(sent, run.model, labelled, {p: story.truth[p][story.seen[p]] for p in x}, [*x])
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
    per = "class" if options.per == "group" else options.per  # all donors of a class together
    drawn = {"n_cells": options.n_cells, "per": per, "n_inputs": options.n_inputs * len(sites)}
    inputs = cellcnn.draw_inputs(model.prepare(X), donors, y, **drawn, rng=rng)
    return replace(model, weights=cellcnn.train(config, [cellcnn.draw_batches(*inputs, config, rng)]))


def fine_tune(story: Story, tell: Tell) -> Played:
    """Accuracy on one cell in five, where each site has labelled the kinds of cells that it knows.

    Pooled and alone are logistic regressions; alone, a site can only name what it has labelled itself. No mode averages
    plainly. What that would show the coordinator is worked out beside the published run, by the same learners in the
    clear, whose mean updates have to be those of the run; their model is the last one, the run's its best.
    """
    sites, sent, steps = story.integrated, Sent(*MASKED, Weights), Sent(*MASKED)
    x = {p: cells.embedding(a, "X_integrated") for p, a in sites.items()}
    kinds = tuple(sorted({str(kind) for a in sites.values() for kind in a.obs["cell_type"].dropna()}))
    run = rehearse("fine-tune", sites, on_event=tell, on_frame=steps, use_rep="X_integrated", labels=kinds)
    options: dict[str, Any] = {"use_rep": "X_integrated", "labels": kinds, "rounds": 15, "local_epochs": 3, "lr": 3e-3}
    averaged = rehearse("fine-tune", sites, mode="published", on_event=tell, on_frame=sent, **options)
    labels = tuple(run.results["basel"]["labels"])
    share = {p: np.array([np.mean(story.truth[p][story.seen[p]] == name) for name in labels]) for p in sites}
    chosen = tuning.in_mode(tuning.Options(**options), "published")
    learners = attacks.plain_learners(sites, labels, chosen, averaged.study.seed)
    leak, theta = attacks.labels_compared(sent, learners, share, chosen)
    leak["hardened"] = attacks.steps_compared(steps, learners, share, run.results["basel"]["history"])
    ours = {p: run.data[p].obs["predicted"].astype(str).to_numpy() for p in sites}
    twins = {p: np.array(labels)[learner.logits(theta).argmax(axis=1)] for p, learner in learners.items()}
    alone, pooled = linear_figures(x, story.truth, story.held, story.seen)
    rows = []
    plain = {p: averaged.data[p].obs["predicted"].astype(str).to_numpy() for p in sites}
    for mode, found, cost in (
        ("hardened", ours, cost_of(run)),
        ("published", plain, cost_of(averaged)),
        ("clear twin", twins, ("–", "–")),
    ):
        figures = percent(alone, right_of(found, story.truth, story.held), pooled)
        rows.append(("fine-tune", mode, "accuracy", *figures, leak[mode], *cost))
    return [run, averaged], rows


def adapt_model(story: Story, tell: Tell) -> Played:
    """Accuracy on one cell in five of every third, where each site has labelled the kinds of cells that it knows.

    The provider has trained its encoder on healthy cells from Basel. Pooled and alone are logistic regressions on the
    same taps. The published mode takes as long for one cell as the hardened one for a thousand. It is played with two
    cells at each of two sites, the fewest that it takes: enough to see what it opens, and too few for a figure.
    """
    sites = {p: a[::3].copy() for p, a in story.sites.items()}
    truth, held, seen = ({p: x[p][::3] for p in sites} for x in (story.truth, story.held, story.seen))
    options: dict[str, Any] = {"ring": "small", "model": str(demo_data.demo_encoder()), "timeout": 300.0}
    run = rehearse("adapt-model", sites, on_event=tell, **options)
    taps = {p: np.asarray(run.data[p].obsm["predicted_features"]) for p in sites}
    predicted = {p: run.data[p].obs["predicted"].astype(str).to_numpy() for p in sites}
    alone, pooled = linear_figures(taps, truth, held, seen)
    figures = percent(alone, right_of(predicted, truth, held), pooled)
    encoder = polynomial.Encoder.load(demo_data.demo_encoder())
    asking = story.sites["vienna"]
    blinded = attacks.blinded_block(encoder, asking)
    few = {p: sites[p][np.flatnonzero(seen[p])[:2]].copy() for p in ("lugano", "vienna")}
    kinds = tuple(sorted({str(kind) for a in few.values() for kind in a.obs["cell_type"]}))
    second = rehearse("adapt-model", few, mode="published", labels=kinds, on_event=tell, **{**options, "rounds": 1})
    shown = attacks.shown_block(encoder, second.data["vienna"], asking)
    return [run, second], [
        ("adapt-model", "hardened", "accuracy", *figures, blinded, *cost_of(run)),
        ("adapt-model", "published", "2 cells", "–", "–", "–", shown, *cost_of(second)),
    ]
