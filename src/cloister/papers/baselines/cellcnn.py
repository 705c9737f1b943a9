"""What a CellCnn of several sites is measured against, on the donors that they hold out. For researchers.

    table = cl.cellcnn_baselines(sites, hold_out=1)
    table["logistic regression"]["donors"]["accuracy"]

Everything here needs all cells in one place, which is what the training itself avoids.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from cloister.arrays import F64, I64, Array, Bits
from cloister.cells import tables as cells
from cloister.disclosure import Thresholds
from cloister.errors import DataError, ParameterError
from cloister.models import cellcnn
from cloister.mpc.sums import pooled_scaling
from cloister.papers.baselines import max_pooling as as_published
from cloister.papers.baselines.mapping import linear_label
from cloister.session import party_rng
from cloister.workflows.common.columns import match_columns
from cloister.workflows.options import read_options
from cloister.workflows.train_cellcnn.evaluation import KINDS, Held, held_out, scores, table_of, tables_of
from cloister.workflows.train_cellcnn.figures import positive
from cloister.workflows.train_cellcnn.presets import settled
from cloister.workflows.train_cellcnn.workflow import (
    WORKFLOW,
    Options,
    check,
    donor_classes,
    drawn_of,
    drawn_per,
    groups_of,
)

if TYPE_CHECKING:
    from anndata import AnnData

VOTES = 25  # inputs of a donor, where pooling is not the mean
CLUSTERS, CLUSTERED = 20, 500  # clusters of cells, and cells of a donor that they are made of


@dataclass(frozen=True)
class Cells:
    """Cells of one site or of several, before scaling."""

    x: F64
    donor: Array
    y: I64
    out: Bits  # of donors that are held out

    @classmethod
    def pooled(cls, parts: Sequence[Cells]) -> Cells:
        x, donor, y, out = (np.concatenate([getattr(p, k) for p in parts]) for k in ("x", "donor", "y", "out"))
        return cls(x, donor, y, out)


@dataclass(frozen=True)
class Setting:
    options: Options
    markers: tuple[str, ...]
    classes: tuple[str, ...]
    seed: int
    sites: int

    @property
    def drawn(self) -> dict[str, Any]:
        """As many inputs as all sites draw together."""
        o = self.options
        drawn = drawn_of(o)
        return drawn | {"n_inputs": o.n_inputs * (self.sites if drawn["per"] == "class" else 1)}

    @property
    def config(self) -> cellcnn.Config:
        o = self.options
        return cellcnn.Config(
            len(self.markers),
            o.n_filters,
            len(self.classes),
            o.batch * self.sites,
            o.n_steps,
            o.learning_rate,
            o.momentum,
            o.interval,
            self.seed,
        )

    def rng(self, label: str) -> np.random.Generator:
        return party_rng(self.seed, "baselines", label)


def cellcnn_baselines(
    data: Mapping[str, AnnData], *, seed: int = 0, max_pooling: bool = True, **options: Any
) -> dict[str, dict[str, dict[str, float]]]:
    """Classify donors without a federation: at each site alone, and from pooled cells.

    Parameters
    ----------
    data
        Site → cells, as for `cl.rehearse("train-cellcnn", data)`; with the same seed the same donors are held out.
    max_pooling
        Also CellCnn as published, with the largest response of an input's cells; needs the extra `models`.
    options
        Of `train-cellcnn`; `hold_out` at least 1.

    Returns
    -------
    `pooled` and `SITE alone` (the same network, by means of cells), `pooled, max pooling`, and logistic regression on
    donors' means (`mean expression`), means and deviations (`logistic regression`) and proportions of 20 clusters
    (`cluster proportions`) → `inputs` and `donors` → `accuracy`, `precision`, `recall`, `f_score` on the donors that
    all sites hold out.
    """
    chosen: Options = read_options(WORKFLOW.options, options, WORKFLOW.name)
    if chosen.hold_out < 1:
        raise ParameterError("baselines are compared on donors that were held out: set hold_out=1 or more")
    parts, setting = _gather(data, chosen, seed)
    every = Cells.pooled([*parts.values()])
    made = {"pooled": _network(every, every, setting)}
    made |= {f"{site} alone": _network(own, every, setting) for site, own in parts.items()}
    if max_pooling:
        made["pooled, max pooling"] = _max_pooling(every, setting)
    made |= _regressions(every, setting)
    at = setting.classes.index(positive(chosen, setting.classes))
    return {name: {kind: scores(t, at) for kind, t in tables.items()} for name, tables in made.items()}


def _gather(data: Mapping[str, AnnData], chosen: Options, seed: int) -> tuple[dict[str, Cells], Setting]:
    donors = {}
    for site, adata in data.items():
        check(adata, chosen)
        donors[site] = donor_classes(adata, chosen)
    classes = tuple(sorted({c for of in donors.values() for c in of.values()}))
    if len(classes) < 2:
        raise DataError(f"all donors of all sites are '{classes[0]}'; two classes needed")
    markers = tuple(str(v) for v in next(iter(data.values())).var_names)
    parts, train = {}, 0
    for site, adata in data.items():
        rng = party_rng(seed, site, "hold out")
        if drawn_per(chosen) == "group":
            least = Thresholds(chosen.min_cells, chosen.min_donors)
            kept = groups_of(adata, chosen, least).held_out(chosen.hold_out, rng)
        else:
            kept = held_out(donors[site], chosen.hold_out, rng)
        train += len(donors[site]) - len(kept)
        x = cells.embedding(adata, None)[:, match_columns([str(v) for v in adata.var_names], markers)]
        x = np.arcsinh(x / chosen.cofactor) if chosen.cofactor else x
        names = adata.obs[chosen.sample_key].astype(str).to_numpy()
        y = np.array([classes.index(c) for c in adata.obs[chosen.target_key].astype(str)])
        of_site = np.array([f"{site}/{n}" for n in names])  # two sites may name donors alike
        parts[site] = Cells(x, of_site, y, np.isin(names, kept))
    return parts, Setting(settled(chosen, len(data), len(classes), train), markers, classes, seed, len(data))


def _scaled(own: Cells, every: Cells) -> tuple[F64, F64]:
    """Cells to train on and all held-out ones, by the spread of the former."""
    scaling = pooled_scaling.scaling_of(own.x[~own.out])
    made = (cellcnn.standardise(x, 0.0, scaling.mean, scaling.scale) for x in (own.x[~own.out], every.x[every.out]))
    train, test = made
    return train, test


def _network(own: Cells, every: Cells, setting: Setting) -> dict[str, I64]:
    """The clear twin on these cells in one place; who has donors of one class alone names no other."""
    train, test = _scaled(own, every)
    here, there, config = ~own.out, every.out, setting.config
    held = Held.of(test, every.donor[there], every.y[there], setting.drawn, Thresholds(), setting.rng("held out"))
    if len(known := np.unique(own.y)) == 1:
        truths = zip(KINDS, (held.labels, held.donor_labels), strict=True)
        return {kind: table_of(y, np.full_like(y, known[0]), config.classes) for kind, y in truths}
    X, y = cellcnn.draw_inputs(train, own.donor[here], own.y[here], **setting.drawn, rng=setting.rng("inputs"))
    w = cellcnn.train(config, [cellcnn.draw_batches(X, y, config, setting.rng("batches"))])
    nothing = np.zeros(config.markers)
    model = cellcnn.Model(config, setting.markers, setting.classes, 0.0, nothing, nothing + 1, w)
    return dict(zip(KINDS, tables_of([model], held)[0], strict=True))


def _max_pooling(every: Cells, setting: Setting) -> dict[str, I64]:
    train, test = _scaled(every, every)
    here, there, o = ~every.out, every.out, len(setting.classes)

    def whole(x: F64, donor: Array, y: I64, label: str, **other: Any) -> tuple[F64, I64]:
        pairs = [*cellcnn.draw_rows(donor, y, **(setting.drawn | other), rng=setting.rng(label))]
        return np.stack([x[rows] for _, rows in pairs]), np.array([k for k, _ in pairs])

    X, y = whole(train, every.donor[here], every.y[here], "inputs")
    config = as_published.Config(filters=setting.config.filters, classes=o, seed=setting.seed)
    predict = as_published.train(X, y, replace(config, batch=min(config.batch, max(1, len(X) // 10))))
    X, y = whole(test, every.donor[there], every.y[there], "held out")
    tables = {"inputs": table_of(y, predict(X), o)}
    X, y = whole(test, every.donor[there], every.y[there], "votes", per="donor", n_inputs=VOTES)
    votes = np.stack([np.bincount(v, minlength=o) for v in predict(X).reshape(-1, VOTES)])
    return tables | {"donors": table_of(y[::VOTES], votes.argmax(axis=1), o)}


def _regressions(every: Cells, setting: Setting) -> dict[str, dict[str, I64]]:
    """Logistic regression on each donor's means, means and deviations, or cluster proportions."""
    train, test = _scaled(every, every)
    donors, others = every.donor[~every.out], every.donor[every.out]
    first, last = (np.unique(of, return_index=True)[1] for of in (donors, others))
    known, truth = every.y[~every.out][first], every.y[every.out][last]
    middle = centres(train, donors, setting.rng("clusters"))
    features: dict[str, Callable[[F64, Array], F64]] = {
        "mean expression": means,
        "logistic regression": lambda x, of: np.hstack([means(x, of), deviations(x, of)]),
        "cluster proportions": lambda x, of: proportions(x, of, middle),
    }
    return {
        name: {"donors": table_of(truth, regress(of(train, donors), known, of(test, others)), len(setting.classes))}
        for name, of in features.items()
    }


def regress(features: F64, known: I64, queries: F64) -> I64:
    """Classes of donors by logistic regression on features, standardised over the donors with `known` classes."""
    scaling = pooled_scaling.scaling_of(features)
    r, q = (cellcnn.standardise(x, 0.0, scaling.mean, scaling.scale) for x in (features, queries))
    return np.asarray(linear_label(q, r, known), np.int64)


def means(x: F64, donor: Array) -> F64:
    """Mean of each marker over each donor's cells, donors in order."""
    return np.stack([x[donor == d].mean(axis=0) for d in np.unique(donor)])


def deviations(x: F64, donor: Array) -> F64:
    return np.stack([x[donor == d].std(axis=0) for d in np.unique(donor)])


def centres(x: F64, donor: Array, rng: np.random.Generator) -> F64:
    """Centres of k-means clusters of cells, of equally many of each donor as far as there are."""
    from scipy.cluster.vq import kmeans2

    of = [np.flatnonzero(donor == d) for d in np.unique(donor)]
    few = np.concatenate([rng.permutation(rows)[:CLUSTERED] for rows in of])
    return np.asarray(kmeans2(x[few], min(CLUSTERS, len(few)), minit="++", rng=rng)[0], np.float64)


def proportions(x: F64, donor: Array, middle: F64) -> F64:
    """Square roots of the proportions of each donor's cells that are nearest to each centre."""
    from scipy.spatial import KDTree

    nearest = KDTree(middle).query(x)[1]
    counts = np.stack([np.bincount(nearest[donor == d], minlength=len(middle)) for d in np.unique(donor)])
    return np.asarray(np.sqrt(counts / counts.sum(axis=1, keepdims=True)))
