"""Train one CellCnn on donors of several sites, encrypted from the first step to the last (`train-cellcnn`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from cloister import cells
from cloister.errors import DataError, ParameterError
from cloister.models import cellcnn
from cloister.protocols import cellcnn_terms, clear_training, pooled_scaling
from cloister.protocols.columns import match_columns
from cloister.seat import Outcome, Seat
from cloister.workflows import Workflow

if TYPE_CHECKING:
    from anndata import AnnData

    from cloister.protocols.encrypted_training import Trained
    from cloister.protocols.key_store import KeyStore

PRESETS: dict[str, dict[str, Any]] = {  # [SAV22] supplementary note 3; rates are ours, chosen on the clear twin
    "cmv": {"n_cells": 200, "n_inputs": 2000, "per": "class", "total_batch": 200, "interval": 3.0, "epochs": 20},
    "aml": {"n_cells": 200, "n_inputs": 1000, "per": "class", "total_batch": 200, "interval": 3.0, "epochs": 20},
    "rrms-class": {"n_cells": 100, "n_inputs": 15000, "per": "class", "total_batch": 64, "interval": 1.0, "epochs": 30},
    "rrms-donor": {"n_cells": 2000, "n_inputs": 10, "per": "donor", "total_batch": 64, "interval": 1.0, "epochs": 30},
}


@dataclass(frozen=True)
class Options:
    sample_key: str = field(default="donor", metadata={"help": "column of obs that names the donor of a cell"})
    target_key: str = field(default="condition", metadata={"help": "column of obs with the class of its donor"})
    n_filters: int = field(default=8, metadata={"help": "filters (h)"})
    n_cells: int = field(default=200, metadata={"help": "cells per multi-cell input (c)"})
    n_inputs: int = field(default=200, metadata={"help": "multi-cell inputs per class or donor at each site (z)"})
    per: Literal["class", "donor"] = field(default="class", metadata={"help": "draw inputs per class or per donor"})
    n_steps: int = field(default=20, metadata={"help": "training steps; each is one aggregation"})
    batch: int = field(default=0, metadata={"help": "inputs per site and step; 0 means 200 over the number of sites"})
    learning_rate: float = field(default=0.2, metadata={"help": "step size (eta)"})
    momentum: float = field(default=0.9, metadata={"help": "share of the last update that goes on (mu)"})
    interval: float = field(default=3.0, metadata={"help": "the sigmoid is fitted on [-interval, interval]"})
    preset: Literal["cmv", "aml", "rrms-class", "rrms-donor"] | None = field(
        default=None, metadata={"help": "settings of the paper: cells, inputs, batch, interval and steps"}
    )
    cofactor: float = field(default=0.0, metadata={"help": "arcsinh(x / cofactor) first; 5 for mass cytometry, 0: no"})
    scaling: Literal["pooled", "reference", "none"] = field(
        default="pooled", metadata={"help": "standardise by secure sums, by public reference values, or not"}
    )
    reference_mean: tuple[float, ...] = field(default=(), metadata={"help": "one per marker, in the agreed order"})
    reference_scale: tuple[float, ...] = field(default=(), metadata={"help": "one per marker, in the agreed order"})
    encrypted: bool = field(default=True, metadata={"help": "false: the clear twin, gradients in plain sight"})
    open_model: bool = field(default=False, metadata={"help": "decrypt the final model, if every site consents"})
    keep: str = field(default="", metadata={"help": "folder for keys, checkpoints and the encrypted model"})

    def __post_init__(self) -> None:
        for name in ("n_filters", "n_cells", "n_inputs", "n_steps"):
            if getattr(self, name) < 1:
                raise ParameterError(f"option '{name}' must be at least 1, found {getattr(self, name)}")
        if not 0 <= self.momentum < 1 or self.learning_rate <= 0 or not 0 < self.interval <= 8 or self.batch < 0:
            raise ParameterError("options: 0 <= momentum < 1, learning_rate > 0, 0 < interval <= 8, batch >= 0")
        if len(self.reference_mean) != len(self.reference_scale):
            raise ParameterError("options 'reference_mean' and 'reference_scale' must have one number per marker each")
        if (self.scaling == "reference") != bool(self.reference_mean):
            raise ParameterError("scaling='reference' needs reference_mean and reference_scale, and only then")
        if self.encrypted and not self.open_model and not self.keep:
            raise ParameterError(
                "the encrypted model would be lost: name a folder with keep=, or let all agree to open_model=true"
            )


def settled(options: Options, sites: int) -> Options:
    """The options with the preset's values, and the batch for that many sites."""
    if options.preset is not None:
        p = PRESETS[options.preset]
        n_inputs = max(1, p["n_inputs"] // sites)  # fewer inputs at each of more sites, as in the paper
        batch = options.batch or max(1, p["total_batch"] // sites)
        per_epoch = -(-2 * n_inputs // batch)
        kept = {k: p[k] for k in ("n_cells", "per", "interval")}
        options = replace(options, **kept, n_inputs=n_inputs, batch=batch, n_steps=per_epoch * p["epochs"])
    return replace(options, batch=options.batch or max(1, 200 // sites))


def config_of(options: Options, terms: cellcnn_terms.Terms, seed: int) -> cellcnn.Config:
    return cellcnn.Config(
        markers=len(terms.markers),
        filters=options.n_filters,
        classes=len(terms.classes),
        batch=options.batch,
        steps=options.n_steps,
        learning_rate=options.learning_rate,
        momentum=options.momentum,
        interval=options.interval,
        seed=seed,
    )


def donor_classes(adata: AnnData, options: Options) -> dict[str, str]:
    """Donor → class; every donor has one."""
    for key in (options.sample_key, options.target_key):
        if key not in adata.obs:
            raise DataError(f"adata.obs['{key}'] is missing; name the column with sample_key= or target_key=")
        if adata.obs[key].isna().any():
            raise DataError(f"adata.obs['{key}'] has missing entries; remove these cells or fill them in")
    pairs = adata.obs[[options.sample_key, options.target_key]].astype(str).drop_duplicates()
    found = dict(zip(pairs[options.sample_key], pairs[options.target_key], strict=True))
    if len(found) != len(pairs):
        twice = pairs[options.sample_key][pairs[options.sample_key].duplicated()].iloc[0]
        raise DataError(f"donor '{twice}' has several classes in obs['{options.target_key}']; a donor has one")
    return found


def check(adata: AnnData, options: Options) -> list[str]:
    """Raise `DataError` if these cells cannot train a CellCnn; return what the user should know."""
    cells.check_cells(adata, allow_negative=True)
    donors = donor_classes(adata, options)
    classes = sorted(set(donors.values()))
    if len(classes) < 2:
        raise DataError(
            f"all donors here are '{classes[0]}' in obs['{options.target_key}']; a site needs donors of two classes"
        )
    notes = []
    for label in classes:
        if sum(c == label for c in donors.values()) == 1:
            notes.append(f"class '{label}' has one donor at this site: the model may learn the donor, not the class")
    least = min(adata.obs[options.sample_key].astype(str).value_counts())
    if least < options.n_cells:
        notes.append(f"a donor has {least} cells, fewer than n_cells={options.n_cells}; cells are drawn repeatedly")
    if not options.encrypted:
        notes.append("encrypted=false: every site's gradients go to the coordinator in plain sight")
    return notes


def train_cellcnn(adata: AnnData, study: Seat, **given: Any) -> cellcnn.Model:
    """Train a CellCnn together with the other sites of the study; nothing of it is decrypted unless all agreed.

    Parameters
    ----------
    adata
        Cells of the donors here: `obs[sample_key]` names the donor, `obs[target_key]` its class; markers are columns.
    given
        See `Options`.

    Returns
    -------
    The model; its `weights` are `None` if it stays encrypted (then the folder `keep` holds it). If opened, also sets

    `adata.obs["cellcnn_response"]` : :class:`pandas.Series`
        Response of every cell to the filter that speaks most for the last class.
    `adata.uns["cloister"]["cellcnn"]` : :class:`dict`
        Filters by markers, dense weights, markers and classes.

    Reveals
    -------
    coordinator, site : names of markers and classes; pooled mean and spread of every marker (not with
        scaling="reference"); if open_model, the final weights. Nothing else: see `encrypted_training`.
    with encrypted=false : every site's gradients, to the coordinator.
    """
    options = settled(Options(**given), len(study.study.sites))
    check(adata, options)
    check_mode(study, options)
    sites, hub = study.study.sites, study.study.coordinator
    donors = donor_classes(adata, options)
    terms = study.run(
        cellcnn_terms.site,
        cellcnn_terms.Params(sites, hub),
        [str(v) for v in adata.var_names],
        sorted(set(donors.values())),
    )
    X = cells.embedding(adata, None)[:, match_columns([str(v) for v in adata.var_names], terms.markers)]
    x = np.arcsinh(X / options.cofactor) if options.cofactor else X
    mean, scale = standard(study, options, x)
    made = cellcnn.Model(config_of(options, terms, study.study.seed), *terms, options.cofactor, mean, scale)
    prepared = cellcnn.standardise(x, 0.0, mean, scale)
    names = adata.obs[options.sample_key].astype(str).to_numpy()
    y = np.array([terms.classes.index(c) for c in adata.obs[options.target_key].astype(str)])
    inputs, labels = cellcnn.draw_inputs(
        prepared, names, y, n_cells=options.n_cells, per=options.per, n_inputs=options.n_inputs, rng=study.rng("inputs")
    )
    batches = cellcnn.draw_batches(inputs, labels, made.config, study.rng("batches"))
    weights = play(study, options, made, batches)
    made = replace(made, weights=weights)
    save(made, options, study)
    if weights is not None:
        report(adata, made, prepared)
    return made


def check_mode(study: Seat, options: Options) -> None:
    if study.study.mode == "published" and options.encrypted and not options.open_model:
        raise ParameterError("mode 'published' ends by opening the model; agree to open_model=true, or use 'hardened'")


def standard(study: Seat, options: Options, x: Any) -> tuple[Any, Any]:
    """Mean and scale of every marker: by secure sums, agreed on beforehand, or 0 and 1."""
    width = x.shape[1]
    if options.scaling == "pooled":
        params = pooled_scaling.Params(study.study.sites, study.study.coordinator, width)
        found = study.run(pooled_scaling.site, params, x)
        return found.mean, found.scale
    if options.scaling == "reference":
        if len(options.reference_mean) != width:
            raise ParameterError(f"{width} markers are in common, the reference has {len(options.reference_mean)}")
        return np.array(options.reference_mean), np.array(options.reference_scale)
    return np.zeros(width), np.ones(width)


def play(study: Seat, options: Options, made: cellcnn.Model, batches: tuple[Any, Any] | None) -> Any:
    """The training itself, for a site (with batches) or the coordinator (without)."""
    sites, hub = study.study.sites, study.study.coordinator
    if not options.encrypted:
        clear = clear_training.Params(sites, hub, made.config)
        if batches is None:
            return study.run(clear_training.aggregator, clear)
        return study.run(clear_training.holder, clear, *batches)
    if study.study.mode == "published":
        from cloister.protocols import published_training

        printed = published_training.choose_ring(made.config, len(sites))
        as_printed = published_training.Params(sites, hub, printed, made.config)
        kept = store_of(options, study)
        if batches is None:
            return study.run(published_training.aggregator, as_printed, kept).weights
        return study.run(published_training.holder, as_printed, *batches, kept).weights
    from cloister.protocols import encrypted_training
    from cloister.protocols.cellcnn_circuit import choose_ring

    ring = choose_ring(made.config, len(sites))
    params = encrypted_training.Params(sites, hub, ring, made.config, open_model=options.open_model)
    store = store_of(options, study)
    done: Trained
    if batches is None:
        done = study.run(encrypted_training.aggregator, params, store)
    else:
        done = study.run(encrypted_training.holder, params, *batches, store)
    return done.weights


def store_of(options: Options, study: Seat) -> KeyStore | None:
    from cloister.protocols.key_store import KeyStore

    return KeyStore(options.keep, study.me) if options.keep else None


def save(made: cellcnn.Model, options: Options, study: Seat) -> None:
    if options.keep:
        folder = Path(options.keep) / study.me
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        (folder / "model.json").write_text(made.to_json(), encoding="utf-8")


def report(adata: AnnData, made: cellcnn.Model, prepared: Any) -> None:
    """What an opened model says about this site's own cells."""
    assert made.weights is not None
    adata.obs["cellcnn_response"] = made.response(prepared, len(made.classes) - 1)
    adata.uns.setdefault("cloister", {})["cellcnn"] = {
        "filters": made.weights.W.T,
        "dense": made.weights.V,
        "markers": list(made.markers),
        "classes": list(made.classes),
    }


def accuracy(made: cellcnn.Model, adata: AnnData, options: Options) -> dict[str, Any]:
    """Of an opened model on this site's donors, each by the mean of all its cells."""
    X, names, truth = donor_means(made, adata, options.sample_key, options.target_key)
    if made.weights is None or truth is None:
        return {}
    U = made.logits(X)
    found = [made.classes[k] for k in cellcnn.predict(U)]
    outside = int((np.abs(U) > made.config.interval).sum())
    return {
        "donors": len(names),
        "donor_accuracy": float(np.mean([a == b for a, b in zip(found, truth, strict=True)])),
        "logits_outside_interval": outside,
        "logits": int(U.size),
    }


def donor_means(
    made: cellcnn.Model, adata: AnnData, sample_key: str, target_key: str | None = None
) -> tuple[Any, list[str], list[str] | None]:
    """One prepared mean per donor, their names, and their classes if known."""
    if sample_key not in adata.obs:
        raise DataError(f"adata.obs['{sample_key}'] is missing; name the column of donors with sample_key=")
    at = match_columns([str(v) for v in adata.var_names], made.markers)
    prepared = made.prepare(cells.embedding(adata, None)[:, at])
    names = adata.obs[sample_key].astype(str).to_numpy()
    donors = sorted(set(names))
    X = np.stack([prepared[names == d].mean(axis=0) for d in donors])
    if target_key is None or target_key not in adata.obs:
        return X, donors, None
    classes = adata.obs[target_key].astype(str).to_numpy()
    return X, donors, [str(classes[names == d][0]) for d in donors]


def coordinate(study: Seat, options: Options) -> cellcnn.Model:
    """The coordinator's half."""
    options = settled(options, len(study.study.sites))
    check_mode(study, options)
    sites, hub = study.study.sites, study.study.coordinator
    terms = study.run(cellcnn_terms.coordinator, cellcnn_terms.Params(sites, hub))
    width = len(terms.markers)
    if options.scaling == "pooled":
        found = study.run(pooled_scaling.coordinator, pooled_scaling.Params(sites, hub, width))
        mean, scale = found.mean, found.scale
    else:
        mean, scale = standard(study, options, np.zeros((0, width)))
    made = cellcnn.Model(config_of(options, terms, study.study.seed), *terms, options.cofactor, mean, scale)
    made = replace(made, weights=play(study, options, made, None))
    save(made, options, study)
    return made


def part(study: Seat, adata: AnnData | None, options: Options) -> Outcome:
    if study.role == "auxiliary":
        return Outcome()
    if study.role == "coordinator":
        made = coordinate(study, options)
        return Outcome(None, summary(made), model=made)
    if adata is None:
        raise DataError("a site needs cells; name them with --data")
    made = train_cellcnn(adata, study, **vars(options))
    return Outcome(adata, summary(made) | accuracy(made, adata, options), model=made)


def summary(made: cellcnn.Model) -> dict[str, Any]:
    known: dict[str, Any] = {
        "markers": list(made.markers),
        "classes": list(made.classes),
        "steps": made.config.steps,
        "opened": made.weights is not None,
    }
    if made.weights is not None:
        known |= {"filters": made.weights.W.T.tolist(), "dense": made.weights.V.tolist()}
    return known


def files(outcome: Outcome) -> dict[str, bytes]:
    return {} if outcome.model is None else {"model.json": outcome.model.to_json().encode()}


def figures(outcomes: Mapping[str, Outcome], options: Options) -> list[Any]:
    """Filters by markers; how many cells each donor has that the positive filter selects; their markers."""
    from cloister.figures import COLOURS, canvas, heatmap, histograms

    opened = {p: o for p, o in sorted(outcomes.items()) if o.result.get("opened")}
    if not opened:
        return []
    result = next(iter(opened.values())).result
    label = result["classes"][-1]
    V = np.array(result["dense"])
    strength = V[:, -1] - V[:, :-1].mean(axis=1)
    order = np.argsort(-strength)
    drawn = [
        heatmap(
            np.array(result["filters"])[order],
            [f"filter {k + 1} ({strength[k]:+.2f})" for k in order],
            result["markers"],
            title="Filters by markers",
            rows=f"filter, and how much it speaks for '{label}'",
            columns="marker",
            alt=f"Weights of {len(V)} filters on {len(result['markers'])} markers, strongest for '{label}' first.",
        )
    ]
    tables = {p: o.adata for p, o in opened.items() if o.adata is not None and "cellcnn_response" in o.adata.obs}
    if not tables:
        return drawn
    responses = np.concatenate([a.obs["cellcnn_response"].to_numpy() for a in tables.values()])
    bar = float(np.quantile(responses, 0.9))
    shares: dict[str, list[float]] = {}
    for a in tables.values():
        chosen = a.obs["cellcnn_response"].to_numpy() > bar
        for donor in a.obs[options.sample_key].unique():
            of_donor = (a.obs[options.sample_key] == donor).to_numpy()
            kind = str(a.obs[options.target_key][of_donor].iloc[0])
            shares.setdefault(kind, []).append(float(chosen[of_donor].mean()))
    with canvas() as c:
        kinds = sorted(shares)
        c.axis.boxplot([shares[k] for k in kinds], tick_labels=kinds, medianprops={"color": COLOURS[0]})
        c.axis.set(ylabel="share of selected cells per donor")
        middle = ", ".join(f"{k}: {np.median(shares[k]):.3f}" for k in kinds)
        drawn.append(c.done("Cells selected by the positive filter", f"Medians per donor: {middle}."))
    top = np.argsort(-np.abs(np.array(result["filters"])[order[0]]))[:2]
    for j in top:
        name = result["markers"][j]
        every = np.concatenate([np.asarray(cells.embedding(a, None))[:, _column(a, name)] for a in tables.values()])
        drawn.append(
            histograms(
                {"all cells": every, "selected cells": every[responses > bar]},
                title=f"{name} in selected cells",
                xlabel=name,
            )
        )
    return drawn


def _column(adata: AnnData, name: str) -> int:
    from cloister import genes

    return [genes.plain_name(str(v)) for v in adata.var_names].index(name)


WORKFLOW = Workflow(
    name="train-cellcnn",
    summary="train one CellCnn on donors of several sites, encrypted from the first step to the last",
    options=Options,
    protocols={"hardened": "encrypted_training", "published": "published_training"},
    part=part,
    check=check,
    files=files,
    figures=figures,
)
