"""Which workflow should label these cells: rehearsals on held-out labels, and a recommendation.

The least revealing way that is as good as the best is recommended.

    advice = cl.advise("study.toml", data={"basel": a, "lugano": b, "vienna": c})
    print(advice)                      # a table, the recommendation, and the rule
    advice.recommended                 # "map-labels", for example
    advice.to_dict()                   # the same as plain values

The ways: each site alone (regularised logistic regression on its own genes), `map-labels`, `propagate-labels`,
`train-classifier`, `fine-tune`, and `adapt-model` where a provider's model is given. All run in mode hardened. A way
that needs one space of all sites takes that of the study (`use_rep`), or `shared-pca` runs before it and counts.

**Held-out cells** are a fraction of each label's cells at each site. Where unlabelled cells look like kinds that a site
has not labelled, some kinds are held out there as a whole, and their cells get that share of the weight: a site alone
cannot name them.

**Noise.** Two ways label the same held-out cells, so their difference is that of pairs: +1 where only the first is
right, -1 where only the second is. Its standard error is that of a mean of pairs; with `donor_key` donors are drawn,
not cells. A way is as good as the best if it is behind by no more than one such standard error.

**How much a way reveals** is the largest `RANK` of its steps, then the next. The order is a judgement, and each rank
has its reason; what the parties learn in full is in the modes of the workflows, and part of the advice.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from cloister import workflows
from cloister.arrays import F64, Array, Bits
from cloister.cells import tables as cells
from cloister.errors import CloisterError, DataError, ParameterError
from cloister.mpc.net.events import Event
from cloister.papers.baselines.own_features import own_features, own_labels
from cloister.rehearsal.rehearsal import check_sites, named_site, rehearse, study_cells
from cloister.rehearsal.run import Run
from cloister.study import Study
from cloister.workflows import pipeline

if TYPE_CHECKING:
    from anndata import AnnData

LOG = logging.getLogger("cloister")
ALONE, SPACE = "alone", "shared-pca"
WAYS = (ALONE, "map-labels", "propagate-labels", "train-classifier", "fine-tune", "adapt-model")
NEED_SPACE = ("map-labels", "propagate-labels", "fine-tune")
RANK = {  # how much a step reveals, and why
    ALONE: (0, "nothing leaves a site"),
    "map-labels": (1, "a site learns labels of its own cells; nothing is opened to all"),
    "propagate-labels": (2, "a site learns labels and score levels of its own cells; crafted cells can find others"),
    "fine-tune": (3, "sums of gradients with noise are opened, and so a model"),
    "adapt-model": (3, "sums of gradients with noise are opened, and so an adapter; a provider takes part"),
    SPACE: (4, "exact sums over all cells are opened: means and covariances of genes"),
    "train-classifier": (5, "exact sums over the cells of each label are opened, and so a model"),
}
NOT_NOISY = 6  # of `fine-tune` and `adapt-model` with dp_noise=0: exact sums of gradients
COLUMN, FOUND = "_advise_label", "_advise_found"  # what the ways read and write; never in the given objects
SHARED = ("layer", "kind", "names", "library_key", "target_sum", "donor_key", "min_donors", "ring", "model", "device")
LEAST_SHARE, LEAST_CELLS = 0.05, 15  # of unlabelled cells that make kinds be held out; of a kind at a site
FEWEST = 30  # held-out cells over all sites below which nothing can be compared


@dataclass(frozen=True)
class Way:
    """What came of one way."""

    name: str
    steps: tuple[str, ...] = ()
    correct: int = 0
    held_out: int = 0
    accuracy: float = math.nan  # of the held-out cells, weighted where kinds were held out as a whole
    by_site: Mapping[str, float] = field(default_factory=dict)  # accuracy
    bytes: int = 0  # sent by all parties
    cpu_seconds: float = 0.0  # of all parties
    rounds: int = 0
    rank: tuple[int, ...] = ()
    why: str = ""  # the reason for its rank
    learns: tuple[tuple[str, str, str], ...] = ()  # step, who, what
    behind: float = 0.0  # accuracy of the best less its own
    error: float = 0.0  # standard error of that
    problem: str = ""  # why it was not evaluated

    @property
    def as_good(self) -> bool:
        """Whether it is behind the best by no more than the noise."""
        return not self.problem and self.behind <= self.error


@dataclass(frozen=True)
class Advice:
    """The ways in the order of what they reveal, and the one to take."""

    ways: tuple[Way, ...]
    recommended: str
    best: str
    held_out: int
    labelled: int
    unit: str  # "cells", or "donors"
    share: Mapping[str, float] = field(default_factory=dict)  # of a site's unlabelled cells, like kinds of others only
    hidden: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # kinds whose labels were held out as a whole

    @property
    def alone_is_enough(self) -> bool:
        return self.recommended == ALONE

    @property
    def reason(self) -> str:
        """The recommendation in words."""
        best, way = self.way(self.best), self.way(self.recommended)
        if way.name == best.name:
            text = (
                f"'{way.name}' has the highest accuracy ({way.accuracy:.3f}), and no way that reveals less is as good"
            )
        else:
            text = (
                f"'{way.name}' ({way.accuracy:.3f}) is as good as '{best.name}' ({best.accuracy:.3f}) within the noise "
                f"(behind by {way.behind:.3f}, standard error {way.error:.3f}), and reveals less"
            )
        if self.alone_is_enough:
            return f"work alone: {text}" if way.name != best.name else f"work alone: {text.partition(',')[0]}"
        return f"take '{way.name}': {text}"

    @property
    def rule(self) -> str:
        return (
            f"Rule: the least revealing way that is behind the best by no more than one standard error of the "
            f"difference, on {self.held_out} held-out cells (pairs of {self.unit})."
        ) + "".join(
            f" Of the unlabelled cells at {site}, {self.share[site]:.0%} look like kinds that only others have labelled"
            f"; so all labels of {', '.join(kinds)} were held out there, and weigh as much."
            for site, kinds in self.hidden.items()
            if kinds
        )

    def way(self, name: str) -> Way:
        return next(w for w in self.ways if w.name == name)

    def rows(self) -> list[dict[str, Any]]:
        """A row for each way, for tables."""
        return [
            {
                "way": way.name,
                "accuracy": None if way.problem else round(way.accuracy, 4),
                "behind": None if way.problem else round(way.behind, 4),
                "standard_error": None if way.problem else round(way.error, 4),
                "as_good": way.as_good,
                "bytes": way.bytes,
                "cpu_seconds": round(way.cpu_seconds, 2),
                "rounds": way.rounds,
                "reveals": way.why,
                "problem": way.problem,
            }
            for way in self.ways
        ]

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain values."""
        learned = {w.name: [{"step": s, "who": who, "what": what} for s, who, what in w.learns] for w in self.ways}
        by_site = {w.name: {s: round(x, 4) for s, x in w.by_site.items()} for w in self.ways if not w.problem}
        return {
            "recommended": self.recommended,
            "reason": self.reason,
            "rule": self.rule,
            "best": self.best,
            "alone_is_enough": self.alone_is_enough,
            "held_out": self.held_out,
            "labelled": self.labelled,
            "unlabelled_like_kinds_of_others": {s: round(x, 4) for s, x in self.share.items()},
            "kinds_held_out": {s: list(kinds) for s, kinds in self.hidden.items()},
            "ways": self.rows(),
            "accuracy_by_site": by_site,
            "learns": learned,
        }

    def __str__(self) -> str:
        lines = []
        for way in self.ways:
            if way.problem:
                lines.append(f"{way.name:17} not evaluated: {way.problem}")
                continue
            lines.append(
                f"{way.name:17} accuracy {way.accuracy:.3f}  {'as good' if way.as_good else '       '}  "
                f"{way.bytes / 1e6:9.1f} MB  {way.cpu_seconds:7.1f} CPU-s  {way.rounds:5} rounds  {way.why}"
            )
        return "\n".join([*lines, "", f"Recommended: {self.reason}.", self.rule])


def advise(
    study: str | Path | Study,
    data: Mapping[str, AnnData | str | Path | Any],
    *,
    label_key: str = "",
    model: str | Path | None = None,
    held_out: float = 0.2,
    n_cells: int = 1000,
    seed: int = 0,
    timeout: float = 600.0,
    ways: tuple[str, ...] = WAYS,
    on_event: Callable[[Event], None] | None = None,
) -> Advice:
    """Rehearse the ways to label cells on labels that are held out, and recommend one of them.

    Parameters
    ----------
    study
        A `Study` or the path of its file: its step that reads labels says which column, values and donors. Or the name
        of a workflow, whose usual options are taken.
    data
        Site name → its cells, as for `rehearse`.
    label_key
        Column of `obs` with the labels; by default the one of the study.
    model
        File of a provider's model, for `adapt-model`; by default the one of the study. Without one it is left out.
    held_out
        Fraction of each label's cells at each site that no way sees the label of.
    n_cells
        Largest number of cells of a site that are taken, drawn at random; 0 for all.
    ways
        The ways to evaluate.

    Returns
    -------
    An `Advice`.
    """
    check_settings(held_out, n_cells, ways)
    options, agreed = options_of(study)
    if agreed is not None:
        check_sites(agreed, data)
    if label_key:
        options["label_key"] = label_key
    if model is not None:
        options["model"] = str(model)
    task = Task(
        data, options, agreed, held_out=held_out, n_cells=n_cells, seed=seed, timeout=timeout, on_event=on_event
    )
    return task.advice(tuple(w for w in WAYS if w in ways))


def check_settings(held_out: float, n_cells: int, ways: tuple[str, ...]) -> None:
    if not 0 < held_out < 1:
        raise ParameterError(f"held_out must be above 0 and below 1, found {held_out}")
    if n_cells < 0:
        raise ParameterError(f"n_cells must be at least 0, found {n_cells}")
    if unknown := [w for w in ways if w not in WAYS]:
        raise ParameterError(f"there is no way '{unknown[0]}'; there are {', '.join(WAYS)}")
    if len(set(ways)) < 2:
        raise ParameterError("name at least two ways to compare")


def options_of(study: str | Path | Study) -> tuple[dict[str, Any], Study | None]:
    """Options that say how labels and values are read; and the study, if there is one."""
    if isinstance(study, str) and study in workflows.names():
        return {"label_key": getattr(workflows.get(study).options, "label_key", "cell_type")}, None
    if isinstance(study, str | Path) and not str(study).endswith(".toml"):
        raise ParameterError(f"there is no study '{study}'; name a study.toml, or a workflow such as map-labels")
    agreed = study if isinstance(study, Study) else Study.load(study)
    reading = [o for _, _, o in pipeline.check_steps(agreed) if getattr(o, "label_key", None)]
    if not reading:
        raise ParameterError(f"no step of the study '{agreed.name}' reads labels; advise compares ways to label cells")
    chosen = reading[-1]
    taken = {f.name: getattr(chosen, f.name) for f in dataclasses.fields(chosen)}
    wanted = {k: v for k, v in taken.items() if k in (*SHARED, "label_key", "use_rep", "dp_noise")}
    if not any(part.workflow in ("adapt-model",) for part in agreed.parts):
        wanted.pop("model", None)  # a network's kind, in fine-tune
    given = {k for part in agreed.parts for k in part.parameters} | {k for s in agreed.steps for k in s.options}
    return {k: v for k, v in wanted.items() if k in given or k == "label_key"}, agreed


class Task:
    """The cells of the sites with some labels held out, and what every way makes of them."""

    def __init__(
        self, data: Mapping[str, Any], options: dict[str, Any], agreed: Study | None, *, held_out: float, n_cells: int,
        seed: int, timeout: float, on_event: Callable[[Event], None] | None,
    ) -> None:  # fmt: skip
        if not isinstance(data, Mapping) or len(data) < 2:
            raise ParameterError(
                "advise compares working alone with working together: name the cells of two sites or more"
            )
        self.options, self.seed, self.timeout, self.on_event = options, seed, timeout, on_event
        self.sites: dict[str, AnnData] = {}
        self.truth: dict[str, Array] = {}
        self.held: dict[str, Bits] = {}
        self.weights: dict[str, F64] = {}  # of the held-out cells
        self._space: tuple[dict[str, AnnData], str, Run | None] | None = None
        key = str(options["label_key"])
        for i, (site, given) in enumerate(data.items()):
            rng = np.random.default_rng([seed, i])
            with named_site(site, given):
                whole = study_cells(agreed, site, given, inplace=False)
                cells.check_cells(whole, need_names=False)
                if key not in whole.obs:
                    raise DataError(f"adata.obs[{key!r}] is missing; name the column of labels with label_key=")
                some = np.arange(whole.n_obs)
                if n_cells and whole.n_obs > n_cells:
                    some = np.sort(rng.permutation(whole.n_obs)[:n_cells])
                adata = whole[some].to_memory() if whole.isbacked else whole[some].copy()
                column = adata.obs[key]
                self.sites[site] = adata
                self.truth[site] = np.where(column.isna(), "", column.astype(str)).astype(object)
        self.features = own_features(self.sites)
        self.share = self.beyond()
        self.hidden = hidden_kinds(self.truth, self.share, np.random.default_rng([seed, len(data)]))
        for i, (site, names) in enumerate(self.truth.items()):
            new = np.isin(names, self.hidden[site])
            self.held[site] = held_cells(names, held_out, np.random.default_rng([seed, i, 1])) | new
            self.sites[site].obs[COLUMN] = np.where((names == "") | self.held[site], np.array(None, object), names)
            self.weights[site] = weights_of(new[self.held[site]], self.share[site])
        self.labelled = sum(int((n != "").sum()) for n in self.truth.values())
        self.count = sum(int(h.sum()) for h in self.held.values())
        if self.count < FEWEST:
            raise DataError(
                f"{self.count} cells could be held out of {self.labelled} with a label in adata.obs[{key!r}]; at least "
                f"{FEWEST} are needed to compare ways: label more cells, or raise held_out="
            )

    def beyond(self) -> dict[str, float]:
        """Of every site the share of its unlabelled cells that look like a kind which only others have labelled.

        By a regression on all sites' labels, which a rehearsal can do and hospitals apart cannot.
        """
        seen = {s: n != "" for s, n in self.truth.items()}
        rows = np.concatenate([self.features[s][seen[s]] for s in self.sites])
        names = np.concatenate([self.truth[s][seen[s]] for s in self.sites]).astype(str)
        found = {}
        for site, x in self.features.items():
            own = set(self.truth[site]) - {""}
            if not own or seen[site].all() or own >= set(names):
                found[site] = 0.0
                continue
            found[site] = float((~np.isin(own_labels(x[~seen[site]], rows, names), sorted(own))).mean())
        return found

    # ---- every way ---------------------------------------------------------------------------------------------------

    def advice(self, names: tuple[str, ...]) -> Advice:
        made: dict[str, Way] = {}
        right: dict[str, Array] = {}
        for name in names:
            try:
                made[name], right[name] = self.evaluated(name)
            except CloisterError as e:
                made[name] = Way(name, problem=str(e).rstrip("."), rank=ranks((name,), self.options), why=RANK[name][1])
        weights = np.concatenate([self.weights[s] for s in self.sites])
        found = advice_from(made, right, weights, self.groups(), self.labelled)
        return dataclasses.replace(found, share=self.share, hidden=self.hidden)

    def groups(self) -> Array | None:
        """The donor of every held-out cell, if the study names donors."""
        key = self.options.get("donor_key")
        if not key:
            return None
        if missing := [s for s, a in self.sites.items() if key not in a.obs]:
            raise DataError(f"site '{missing[0]}': adata.obs[{key!r}] is missing; name the column of donors")
        parts = [
            np.char.add(f"{s}/", a.obs[key].astype(str).to_numpy(str)[self.held[s]]) for s, a in self.sites.items()
        ]
        return np.concatenate(parts)

    def evaluated(self, name: str) -> tuple[Way, Array]:
        """A way, and for every held-out cell whether its label is right."""
        began, runs = time.thread_time(), list[Run]()
        if name == ALONE:
            found = self.alone()
        else:
            found, runs = getattr(self, name.replace("-", "_"))()
        right = {s: np.asarray(found[s] == self.truth[s][self.held[s]]) for s in self.sites}
        steps = tuple(dict.fromkeys(run.study.workflow for run in runs)) or (ALONE,)
        rank = ranks(steps, self.options)
        learns = tuple((s, who, what) for s in steps if s != ALONE for who, what in workflows.learns(s, "hardened"))
        way = Way(
            name,
            steps,
            int(sum(r.sum() for r in right.values())),
            self.count,
            float(sum(w @ right[s] for s, w in self.weights.items()) / sum(w.sum() for w in self.weights.values())),
            {s: float(np.average(r, weights=self.weights[s])) for s, r in right.items() if len(r)},
            int(sum(c["bytes"] for run in runs for c in run.cost.values())),
            float(sum(c["cpu_seconds"] for run in runs for c in run.cost.values()))
            if runs
            else time.thread_time() - began,
            int(sum(max(c["rounds"] for c in run.cost.values()) for run in runs)),
            rank,
            "; ".join(dict.fromkeys(RANK[s][1] for s in sorted(steps, key=lambda s: -RANK[s][0]))),
            learns,
        )
        return way, np.concatenate([right[s] for s in self.sites])

    def alone(self) -> dict[str, Array]:
        if bare := [s for s, a in self.sites.items() if a.obs[COLUMN].isna().all()]:
            raise DataError(f"site '{bare[0]}' has no label of its own to learn from")
        if blind := [s for s in self.sites if self.share[s] >= LEAST_SHARE and not self.hidden[s]]:
            raise DataError(
                f"{self.share[blind[0]]:.0%} of the unlabelled cells at '{blind[0]}' look like kinds that only others "
                "have labelled; it cannot name them alone, and has too few labels to hold out a kind and measure that"
            )
        x, found = self.features, {}
        for site, a in self.sites.items():
            seen = a.obs[COLUMN].notna().to_numpy()
            found[site] = own_labels(x[site][self.held[site]], x[site][seen], self.truth[site][seen].astype(str))
        return found

    def map_labels(self) -> tuple[dict[str, Array], list[Run]]:
        """Every site with held-out cells queries the labelled cells of all others."""
        placed, key, before = self.space()
        found: dict[str, Array] = {}
        runs = [] if before is None else [before]
        for site in self.sites:
            found[site] = np.full(int(self.held[site].sum()), "", dtype=object)
            if not self.held[site].any():
                continue
            asked = {s: a[self.held[s]].copy() if s == site else a for s, a in placed.items()}
            asked = {s: a for s, a in asked.items() if s == site or a.obs[COLUMN].notna().any()}
            run = self.run("map-labels", asked, query=site, label_key=COLUMN, use_rep=key, key_added=FOUND)
            found[site] = names_in(run.data[site])
            runs.append(run)
        return found, runs

    def propagate_labels(self) -> tuple[dict[str, Array], list[Run]]:
        return self.in_space("propagate-labels")

    def fine_tune(self) -> tuple[dict[str, Array], list[Run]]:
        return self.in_space("fine-tune")

    def in_space(self, name: str) -> tuple[dict[str, Array], list[Run]]:
        placed, key, before = self.space()
        run = self.run(name, placed, label_key=COLUMN, use_rep=key, key_added=FOUND)
        return self.of(run), [run] if before is None else [before, run]

    def train_classifier(self) -> tuple[dict[str, Array], list[Run]]:
        run = self.run("train-classifier", self.sites, label_key=COLUMN, key_added=FOUND)
        return self.of(run), [run]

    def adapt_model(self) -> tuple[dict[str, Array], list[Run]]:
        if not self.options.get("model"):
            raise ParameterError("no provider's model is given; name its file with model=")
        run = self.run("adapt-model", self.sites, label_key=COLUMN, key_added=FOUND)
        return self.of(run), [run]

    def of(self, run: Run) -> dict[str, Array]:
        return {s: names_in(run.data[s])[self.held[s]] for s in self.sites}

    def space(self) -> tuple[dict[str, AnnData], str, Run | None]:
        """The sites in one space, its key, and the run of `shared-pca` that made it, if one had to."""
        if self._space is None:
            key = str(self.options.get("use_rep") or "")
            if key and all(key in a.obsm for a in self.sites.values()):
                self._space = self.sites, key, None
            else:
                run = self.run(SPACE, self.sites)
                self._space = run.data, "X_shared_pca", run
        return self._space

    def run(self, name: str, data: Mapping[str, AnnData], **own: Any) -> Run:
        """A rehearsal with those of the study's options that the workflow has."""
        known = {f.name for f in dataclasses.fields(workflows.get(name).options)}
        taken = {k: v for k, v in self.options.items() if k in (*SHARED, "dp_noise") and k in known and v is not None}
        if name != "adapt-model":
            taken.pop("model", None)
        if name == "train-classifier":
            taken.pop("dp_noise", None)  # its noise hides donors or sites, not cells
        if "kind" in known and "kind" not in taken:
            taken["kind"] = cells.expression_kind(next(iter(data.values())))
        options = taken | {k: v for k, v in own.items() if k in known}
        run = rehearse(name, data, seed=self.seed, timeout=self.timeout, on_event=self.on_event, **options)
        return run


def hidden_kinds(
    truth: Mapping[str, Array], share: Mapping[str, float], rng: np.random.Generator
) -> dict[str, tuple[str, ...]]:
    """Kinds whose labels a site loses as a whole: up to a third of those that others have labelled, too.

    Two sites that had labels in common keep one of them. Labels of few cells count for nothing, as in workflows.
    """
    counts = {s: dict(zip(*np.unique(n.astype(str), return_counts=True), strict=True)) for s, n in truth.items()}
    left = {s: {str(k) for k, n in each.items() if k and n >= LEAST_CELLS} for s, each in counts.items()}
    hidden: dict[str, tuple[str, ...]] = dict.fromkeys(truth, ())
    for site in truth:
        if share[site] < LEAST_SHARE:
            continue
        others = [s for s in truth if s != site and left[s] & left[site]]
        shared = sorted({kind for s in others for kind in left[s] & left[site]})
        for kind in map(str, rng.permutation(shared)):
            rest = left[site] - {kind}
            if (
                any(kind in left[s] for s in others)
                and len(rest) > 1
                and len(hidden[site]) < len(shared) / 3
                and all(left[s] & rest for s in others)
            ):
                left[site], hidden[site] = rest, (*hidden[site], kind)
    return hidden


def weights_of(hidden: Bits, share: float) -> F64:
    """Weights of a site's held-out cells, so that those of hidden kinds are that share; their sum is their number."""
    n, new = len(hidden), int(hidden.sum())
    if not new or new == n:
        return np.ones(n)
    return np.where(hidden, share / new, (1 - share) / (n - new)) * n


def held_cells(names: Array, fraction: float, rng: np.random.Generator) -> Bits:
    """Of every label the fraction of its cells, rounded down; of a rare one none."""
    held = np.zeros(len(names), bool)
    for name in sorted(set(names) - {""}):
        at = rng.permutation(np.flatnonzero(names == name))
        held[at[: int(len(at) * fraction)]] = True
    return held


def names_in(adata: AnnData) -> Array:
    column = adata.obs[FOUND]
    return np.where(column.isna(), "", column.astype(str)).astype(object)


def ranks(steps: tuple[str, ...], options: Mapping[str, Any]) -> tuple[int, ...]:
    """The largest rank of the steps first; ways are ordered by it."""
    exact = options.get("dp_noise") == 0
    noisy = ("fine-tune", "adapt-model")
    return tuple(sorted((NOT_NOISY if exact and s in noisy else RANK[s][0] for s in steps), reverse=True))


def standard_error(difference: F64, weights: F64, groups: Array | None = None) -> float:
    """Of the weighted mean of differences of pairs; of groups of cells (donors), where there are some."""
    parts = weights * (difference - np.average(difference, weights=weights))
    if groups is not None:
        parts = np.bincount(np.unique(groups, return_inverse=True)[1], parts).astype(np.float64)
    return float(np.sqrt((parts**2).sum()) / weights.sum())


def advice_from(
    made: Mapping[str, Way], right: Mapping[str, Array], weights: F64, groups: Array | None, labelled: int
) -> Advice:
    """The recommendation, from what every way got right on the same cells."""
    if not right:
        problems = "; ".join(f"{w.name}: {w.problem}" for w in made.values())
        raise DataError(f"no way could be evaluated ({problems})")
    best = max(right, key=lambda name: (float(weights @ right[name]), tuple(-r for r in made[name].rank)))
    ways = []
    for name, way in made.items():
        if name in right:
            d = right[best].astype(float) - right[name]
            way = dataclasses.replace(
                way, behind=float(np.average(d, weights=weights)), error=standard_error(d, weights, groups)
            )
        ways.append(way)
    ways.sort(key=lambda w: (w.rank, w.bytes))
    recommended = next(w.name for w in ways if w.as_good)
    return Advice(
        tuple(ways), recommended, best, made[best].held_out, labelled, "cells" if groups is None else "donors"
    )
