"""What an adapter is measured against: no provider at all, alone, pooled, a linear head, the whole model fine-tuned.

    run = cl.rehearse("adapt-model", data=sites, model="model.npz", label_key="some")
    table = cl.adaptation_baselines(run, truth_key="cell_type")
    run.report("report.html", compared=list(table.values()))

Everything here needs all samples and the provider's model in one place, which is what the workflow itself avoids.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from cloister.errors import DataError, ParameterError
from cloister.models.polynomial import Encoder
from cloister.papers.baselines.own_features import own_features, own_labels
from cloister.workflows import check_plan, options_of
from cloister.workflows.adapt_model import workflow as adapt_model
from cloister.workflows.adapt_model.inference import inputs_of
from cloister.workflows.adapt_model.training import given, learner_of, recipe_of

if TYPE_CHECKING:
    from cloister.models.learner import Learner

LOG = logging.getLogger("cloister")
WITHOUT = ("no provider, each site alone", "no provider, pooled")  # on the sites' own genes or pixels
ARMS = ("each site alone", "together", "pooled", "linear probing", "full fine-tuning", *WITHOUT)


def adaptation_baselines(
    run: Any, *, truth_key: str, fine_tuning_rate: float = 1e-3, rounds: int = 0
) -> dict[str, dict[str, Any]]:
    """Train on what a rehearsal of `adapt-model` trained on, in the ways that need no protocol, and score all alike.

    Scores are of the samples without a label for training whose true one is known. Taps are the run's own; all but
    full fine-tuning have the run's options, rounds among them unless some are given; they train as published mode does,
    without noise.

    Returns
    -------
    Name of the way → `way`, `accuracy`, `balanced_accuracy`, accuracy at every site, `parameters` that are trained,
    CPU `seconds`: each site alone, together (the run), pooled, linear probing and full fine-tuning (both by averaging
    over the sites, as published mode does). The last two rows need no provider: logistic regression with the same
    labels on the sites' own genes or pixels, each site alone and pooled. Where one of them is at least as good as the
    run, a warning goes to the log `cloister`.
    """
    workflow, _ = check_plan(run.study)
    options: adapt_model.Options = options_of(workflow, run.study.parameters)
    if workflow.name != "adapt-model" or options.stage == "ask" or options.label_key == truth_key:
        raise ParameterError("expected a run of adapt-model that trained, and a column of true labels besides its own")
    options = adapt_model.in_mode(dataclasses.replace(options, dp_noise=None, donor_key=None), "published")
    task = Task(run, options, truth_key, rounds or options.rounds)
    made: dict[str, dict[str, Any]] = {}
    for way in ARMS:
        began = time.process_time()
        found, parameters = task.by(way, fine_tuning_rate)
        right, kinds = found == task.truth, np.unique(task.truth)
        made[way] = {
            "way": way,
            "accuracy": float(right.mean()),
            "balanced_accuracy": float(np.mean([right[task.truth == kind].mean() for kind in kinds])),
            **{f"at {site}": float(right[task.home == site].mean()) for site in np.unique(task.home)},
            "parameters": parameters,
            "seconds": round(time.process_time() - began, 2),
        }
    if warning := without_provider(made):
        LOG.warning(warning)
    return made


def without_provider(table: Mapping[str, Mapping[str, Any]]) -> str:
    """What to know if a way without the provider is as good as the run, or better; nothing if the run is ahead."""
    run = float(table["together"]["accuracy"])
    way = max(WITHOUT, key=lambda w: float(table[w]["accuracy"]))
    best = float(table[way]["accuracy"])
    if best < run:
        return ""
    instead = "train-classifier needs no provider" if way == WITHOUT[1] else "a site needs nobody for that"
    return (
        f"the provider's model does not help here: '{way}', on the sites' own features with the same labels, has "
        f"accuracy {best:.3f}, the run {run:.3f}; {instead}"
    )


class Task:
    """A run's samples, what it trained on, and what is asked of every way."""

    def __init__(self, run: Any, options: adapt_model.Options, truth_key: str, rounds: int) -> None:
        self.run, self.options, self.rounds = run, options, rounds
        self.sites = [str(site) for site in run.study.sites if site in run.data]
        self.labels = tuple(run.results[self.sites[0]]["labels"])
        rank = run.model.module.config.rank
        self.taps, self.codes, self.asked, truths = {}, {}, {}, []
        for site in self.sites:
            a = run.data[site]
            if truth_key not in a.obs:
                raise DataError(f"site '{site}': adata.obs[{truth_key!r}] is missing; pass truth_key=")
            names = given(a, options)
            taps = np.asarray(a.obsm[f"{options.key_added}_features"])
            self.taps[site] = np.nan_to_num(taps).reshape(len(taps), -1, rank)
            there = ~np.isnan(taps).any(axis=1)
            codes = np.array([-1 if name is None else self.labels.index(name) for name in names], np.int64)
            self.codes[site] = np.where(there, codes, -1)
            self.asked[site] = a.obs[truth_key].notna().to_numpy() & np.array([name is None for name in names])
            truths.append(a.obs[truth_key][self.asked[site]].astype(str).to_numpy())
        self.truth, self.home = np.concatenate(truths), np.repeat(self.sites, [len(x) for x in truths])
        if not len(self.truth):
            raise DataError(f"no sample without a label has one in adata.obs[{truth_key!r}]; keep some for the score")

    def by(self, way: str, rate: float) -> tuple[Any, int]:
        """Labels of the asked samples, and how many parameters were trained."""
        sites, options = self.sites, self.options
        if way == "together":
            each = [self.run.data[s].obs[options.key_added].astype(str).to_numpy()[self.asked[s]] for s in sites]
            return np.concatenate(each), int(self.run.results[sites[0]]["parameters"])
        if way in WITHOUT:
            return self.without_provider(pooled=way == WITHOUT[1])
        if way == "full fine-tuning":
            return self.fit([self.whole([site]) for site in sites], rate, self.inputs)
        if way == "linear probing":
            options = dataclasses.replace(options, bottleneck=0)
        if way == "each site alone":
            alone = [self.fit([self.small([s], options)], options.lr, self.taps, asked=[s]) for s in sites]
            return np.concatenate([found for found, _ in alone]), alone[0][1]
        groups = [sites] if way == "pooled" else [[site] for site in sites]
        return self.fit([self.small(group, options) for group in groups], options.lr, self.taps)

    def without_provider(self, *, pooled: bool) -> tuple[Any, int]:
        """Logistic regression on the sites' own features; alone, a site can only name what it has labelled itself."""
        images = Encoder.load(self.options.model).card["kind"] == "images"
        x = own_features({site: self.run.data[site] for site in self.sites}, images=images)
        known = np.array(self.labels)

        def labelled(group: Sequence[str]) -> tuple[Any, Any]:
            seen = {site: self.codes[site] >= 0 for site in group}
            rows = np.concatenate([x[site][seen[site]] for site in group])
            return rows, known[np.concatenate([self.codes[site][seen[site]] for site in group])]

        parts = [
            own_labels(x[site][self.asked[site]], *labelled(self.sites if pooled else [site])) for site in self.sites
        ]
        return np.concatenate(parts), (x[self.sites[0]].shape[1] + 1) * len(known)

    @property
    def inputs(self) -> dict[str, Any]:
        encoder = Encoder.load(self.options.model)
        return {site: inputs_of(self.run.data[site], encoder.card) for site in self.sites}

    def small(self, group: Sequence[str], options: adapt_model.Options) -> Learner:
        """The adapter of these options over the samples of some sites."""
        x, codes = (np.concatenate([part[site] for site in group]) for part in (self.taps, self.codes))
        return learner_of(options, x.shape[1:], self.labels, _table(x), codes, [], "+".join(group), self.run.study.seed)

    def whole(self, group: Sequence[str]) -> Learner:
        """The provider's model itself, all of its weights."""
        from cloister.models.learner import Learner
        from cloister.models.polynomial.unfolded import unfold

        x, codes = (np.concatenate([part[site] for site in group]) for part in (self.inputs, self.codes))
        model = unfold(Encoder.load(self.options.model), len(self.labels))
        recipe = dataclasses.replace(recipe_of(self.options, self.run.study.seed), optimizer="adam")
        return Learner(model, len(self.labels), recipe, _table(x), codes, [], describe="", site="+".join(group))

    def fit(
        self, learners: Sequence[Learner], rate: float, x: dict[str, Any], asked: Sequence[str] = ()
    ) -> tuple[Any, int]:
        """Federated averaging in the clear; with one learner, plain training."""
        theta = np.zeros(learners[0].size)
        weight = np.array([learner.cells for learner in learners], float)
        for t in range(self.rounds):
            updates = [learner.train(theta.astype(np.float32), t, rate)[0] for learner in learners]
            theta = theta + np.average(updates, axis=0, weights=weight)
        logits_of = self._logits(learners[0], theta)
        found = [logits_of(x[site][self.asked[site]]).argmax(axis=1) for site in asked or self.sites]
        trained = sum(p.numel() for p in learners[0].model.parameters() if p.requires_grad)
        return np.array(self.labels)[np.concatenate(found)], trained

    @staticmethod
    def _logits(learner: Learner, theta: Any) -> Callable[[Any], Any]:
        import torch

        learner.place(theta.astype(np.float32))
        learner.model.eval()

        def logits(x: Any) -> Any:
            parts = torch.as_tensor(x, dtype=torch.float32).split(256)
            with torch.no_grad():
                return torch.cat([learner.model(part) for part in parts]).numpy() if len(x) else np.zeros((0, 1))

        return logits


def _table(x: Any) -> Any:
    import torch

    from cloister.models.learner import Table

    return Table(torch.as_tensor(x, dtype=torch.float32))
