"""Train one CellCnn on donors of several sites, encrypted from the first step to the last (`train-cellcnn`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

import numpy as np

from cloister.arrays import I64
from cloister.cells import tables as cells
from cloister.disclosure import Contribution, Rows, Thresholds
from cloister.errors import DataError, ParameterError, RefusedError
from cloister.files import write as write_file
from cloister.models import cellcnn
from cloister.mpc.sums import pooled_scaling
from cloister.papers import clear_training, published_training
from cloister.session import Outcome, RemoteSession, Session
from cloister.study import CONSENTS, Study
from cloister.workflows import Workflow
from cloister.workflows.common.columns import match_columns
from cloister.workflows.modes import modes_of
from cloister.workflows.options import check_min_donors, option
from cloister.workflows.train_cellcnn import cellcnn_terms, encrypted_training, encrypted_validation
from cloister.workflows.train_cellcnn.cellcnn_circuit import choose_ring
from cloister.workflows.train_cellcnn.donor_groups import DonorGroups
from cloister.workflows.train_cellcnn.evaluation import Held, donor_rows, held_out, judged, pooled_tables
from cloister.workflows.train_cellcnn.figures import accuracy, consensus, figures, positive
from cloister.workflows.train_cellcnn.key_store import KeyStore
from cloister.workflows.train_cellcnn.presets import PRESETS, settle
from cloister.workflows.train_cellcnn.response import report

if TYPE_CHECKING:
    from anndata import AnnData

    from cloister.workflows.train_cellcnn.encrypted_training import Trained
    from cloister.workflows.train_cellcnn.key_store import KeyStore


@dataclass(frozen=True)
class Options:
    sample_key: str = option("donor", "column of obs that names the donor of a cell")
    target_key: str = option("condition", "column of obs with the class of its donor")
    n_filters: int = option(8, "filters (h)")
    n_cells: int = option(200, "cells per multi-cell input that is drawn (c)")
    n_inputs: int = option(200, "multi-cell inputs that are drawn per class or donor at each site (z)")
    per: Literal["group", "class", "donor"] = option(
        "group",
        "inputs to train on: means of groups of min_donors donors, or drawn per class or donor if every site consents",
    )
    n_steps: int = option(60, "training steps; each is one aggregation")
    batch: int = option(0, "inputs per site and local iteration; 0 means 200 over the number of sites")
    n_local: int = option(
        1, "local iterations per step: batches whose gradients a site adds up, encrypted", retired=True
    )
    learning_rate: float = option(0.4, "step size (eta)")
    momentum: float = option(0.9, "fraction of the last update in the next one (mu)")
    interval: float = option(3.0, "the sigmoid is fitted on [-interval, interval]", retired=True)
    preset: Literal["cmv", "aml", "rrms-class", "rrms-donor"] | None = option(
        None, "settings of the paper: cells, inputs, batch, interval and steps"
    )
    cofactor: float = option(0.0, "divisor c of arcsinh(x / c) before training; 5 for mass cytometry, 0 disables")
    scaling: Literal["pooled", "reference", "none"] = option(
        "pooled", "standardise by secure sums, by public reference values, or not"
    )
    reference_mean: tuple[float, ...] = option((), "one per marker, in the agreed order", retired=True)
    reference_scale: tuple[float, ...] = option((), "one per marker, in the agreed order", retired=True)
    open_model: bool = option(default=False, help="decrypt the final model, if every site consents")
    positive_class: str | None = option(None, "class whose cells reports select; the last by name if none")
    n_models: int = option(1, "number of models with 3 to 9 filters, of which held-out donors choose the best")
    hold_out: int = option(0, "donors per class at each site that are kept for validation")
    keep: str = option("", "folder for keys, checkpoints and the encrypted model")

    validate_every: int = option(
        0,
        "number of steps between openings of the squared error on held-out inputs, if every site consents; 0 disables",
    )
    patience: int = option(0, "number of validations without improvement before training stops; 0 disables")
    min_cells: int = option(10, "smallest number of a site's own cells behind any opened sum", opens=True)
    min_donors: int = option(
        3, "smallest number of a site's own donors behind any opened sum; of hold_out per class too", opens=True
    )

    def __post_init__(self) -> None:
        for name in ("n_filters", "n_cells", "n_inputs", "n_steps", "n_local", "n_models"):
            if getattr(self, name) < 1:
                raise ParameterError(f"option '{name}' must be at least 1, found {getattr(self, name)}")
        if not 0 <= self.momentum < 1 or self.learning_rate <= 0 or not 0 < self.interval <= 8 or self.batch < 0:
            raise ParameterError("options: 0 <= momentum < 1, learning_rate > 0, 0 < interval <= 8, batch >= 0")
        if len(self.reference_mean) != len(self.reference_scale):
            raise ParameterError("options 'reference_mean' and 'reference_scale' must have one number per marker each")
        if (self.scaling == "reference") != bool(self.reference_mean):
            raise ParameterError("scaling='reference' needs reference_mean and reference_scale, and only then")
        if min(self.hold_out, self.validate_every, self.patience) < 0:
            raise ParameterError("options 'hold_out', 'validate_every' and 'patience' must be at least 0")
        if self.patience and not self.validate_every:
            raise ParameterError("patience counts validations: set validate_every=1 or more")
        if self.validate_every and self.hold_out < 1:
            raise ParameterError("validate_every needs donors to validate on: set hold_out=1 or more")
        check_min_donors(self.min_donors)
        if self.min_cells < 1:
            raise ParameterError(f"option 'min_cells' must be at least 1, found {self.min_cells}")
        if self.n_models > 1 and self.hold_out < 1:
            raise ParameterError("several models are compared on donors that were held out: set hold_out=1 or more")


def check_study(study: Study, options: Options) -> None:
    """Raise `ParameterError` where the options do not go with the study's mode."""
    if options.validate_every and study.mode == "published":
        raise ParameterError("mode 'published' has no validation during training; use 'hardened'")
    if 0 < options.hold_out < options.min_donors:
        raise ParameterError(
            f"hold_out={options.hold_out} donors per class at each site are fewer than min_donors={options.min_donors};"
            " hold out more, or agree on a smaller min_donors: what is opened about held-out donors rests on that many"
        )
    if study.mode == "plain" or options.open_model:
        return
    if study.mode == "published":
        raise ParameterError("mode 'published' ends by opening the model; agree to open_model=true, or use 'hardened'")
    if options.n_models > 1:
        raise ParameterError("several models are compared after opening: set open_model=true")
    if not options.keep:
        raise ParameterError(
            "the encrypted model would be lost: name a folder with keep=, or let all agree to open_model=true"
        )


def config_of(options: Options, terms: cellcnn_terms.Terms, seed: int, model: int = 0) -> cellcnn.Config:
    """Of the model of that number: several differ in their start and their number of filters, as in [AC17]."""
    positive(options, terms.classes)
    return cellcnn.Config(
        markers=len(terms.markers),
        filters=options.n_filters if options.n_models == 1 else 3 + model % 7,
        classes=len(terms.classes),
        batch=options.batch,
        steps=options.n_steps,
        learning_rate=options.learning_rate,
        momentum=options.momentum,
        interval=options.interval,
        seed=seed + model,
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
    least = Thresholds(options.min_cells, options.min_donors)
    notes: list[str] = []
    if len(classes) < 2:
        notes.append(f"all donors here are '{classes[0]}': other sites must bring donors of another class")
    grouped = drawn_per(options) == "group"
    for label in classes if not grouped else ():
        if sum(c == label for c in donors.values()) <= options.hold_out:
            raise DataError(
                f"class '{label}' has too few donors at this site to hold out {options.hold_out} of them and train on"
                " others; use a smaller hold_out"
            )
        if sum(c == label for c in donors.values()) == 1:
            notes.append(f"class '{label}' has one donor at this site: the model may learn the donor, not the class")
    if grouped:
        for label, number in groups_of(adata, options, least).left_out().items():
            notes.append(
                f"class '{label}' has {number} donors here, fewer than a group of min_donors={options.min_donors}: they"
                " are not used"
            )
    check_thresholds(adata, options, least)
    fewest = min(adata.obs[options.sample_key].astype(str).value_counts())
    if fewest < options.n_cells:
        notes.append(f"a donor has {fewest} cells, fewer than n_cells={options.n_cells}; cells are drawn repeatedly")
    return notes


def groups_of(adata: AnnData, options: Options, thresholds: Thresholds) -> DonorGroups:
    """All groups of this site's donors; raise `DataError` where there are too few to train on and to hold out."""
    names = adata.obs[options.sample_key].astype(str).to_numpy()
    groups = DonorGroups.of(donor_classes(adata, options), names, thresholds)
    groups.check()
    groups.held_out(options.hold_out, np.random.default_rng(0))
    return groups


def group_of_cells(adata: AnnData, options: Options, floors: Mapping[str, int]) -> I64 | None:
    """The group of each cell's donor, -1 for none, for comparison with earlier runs; None for other inputs."""
    if drawn_per(options) != "group" or not {options.sample_key, options.target_key} <= set(adata.obs):
        return None
    names = adata.obs[options.sample_key].astype(str).to_numpy()
    thresholds = Thresholds(options.min_cells, options.min_donors).raised(floors)
    groups = DonorGroups.of(donor_classes(adata, options), names, thresholds)
    return np.asarray(groups.codes[np.searchsorted(groups.donors, names)], np.int64)


def check_thresholds(adata: AnnData, options: Options, thresholds: Thresholds) -> None:
    """Raise `DataError` if what this site adds to opened sums would be based on too few of its cells or donors."""
    donors = donor_classes(adata, options)
    cells_of = adata.obs[options.sample_key].astype(str).value_counts()
    smallest = np.sort(cells_of.to_numpy())  # whichever donors are held out
    left = len(donors) - options.hold_out * len(set(donors.values()))
    codes = np.arange(max(left, 0))
    rows = Rows(len(codes), codes, thresholds, cells=smallest[: len(codes)].astype(np.int64))
    if options.scaling == "pooled" or options.preset is not None or options.per == "group":
        rows.check("cells to train on")


def check_batches(behind: list[Any], names: Any, batches: Any, thresholds: Thresholds) -> None:
    """Raise `DataError` if an input is based on too few of this site's cells, or a batch on too few of its donors.

    `behind` are the rows of the cells of every input, `batches` (steps, n) the inputs of every step. A malicious site
    can separate the gradient of one step, and steer it towards the inputs with the largest logits: see docs/security.
    """
    fewest = min(len(np.unique(rows)) for rows in behind)
    if fewest < thresholds.min_cells:
        raise DataError(
            f"an input is the mean of {fewest} different cells, fewer than min_cells = {thresholds.min_cells};"
            " use a larger n_cells, or leave this site out of the study"
        )
    donors = [set(names[rows].tolist()) for rows in behind]
    least = min(len(set().union(*(donors[i] for i in batch))) for batch in batches)
    if least < thresholds.min_donors:
        raise DataError(
            f"a batch is based on {least} donors, fewer than min_donors = {thresholds.min_donors}; use a larger batch,"
            " or leave this site out of the study"
        )


def check_held_out(options: Options, thresholds: Thresholds) -> None:
    """The same for what is opened about held-out donors; `check_study` compares with what was agreed."""
    if 0 < options.hold_out < thresholds.min_donors:
        raise DataError(
            f"hold_out={options.hold_out} donors per class are fewer than min_donors = {thresholds.min_donors}, which"
            " this site's own settings raised; agree on a larger hold_out, or leave this site out of the study"
        )
    if options.hold_out and not options.preset and options.n_cells < thresholds.min_cells:
        raise DataError(
            f"n_cells={options.n_cells} cells per held-out input are fewer than min_cells = {thresholds.min_cells};"
            " agree on a larger n_cells, or leave this site out of the study"
        )


def train_cellcnn(adata: AnnData, session: Session | RemoteSession) -> cellcnn.Model:
    """Train a CellCnn together with the other sites of the study; nothing of it is decrypted unless all agreed.

    Parameters
    ----------
    adata
        Cells of the donors here: `obs[sample_key]` names the donor, `obs[target_key]` its class; markers are columns.
    session
        This site's place in a study of `train-cellcnn`, from `cl.join(kit)`; the study says the options.

    Returns
    -------
    The model; its `weights` are `None` if it stays encrypted (then the folder `keep` holds it). If opened, also sets

    `adata.obs["cellcnn_response"]` : :class:`pandas.Series`
        Response of every cell to the filter that speaks most for `positive_class`.
    `adata.obsm["cellcnn_responses"]` : array (n_cells, n_classes)
        The same for each class.
    `adata.obs["cellcnn_cluster"]` : :class:`pandas.Series`
        For the tenth of the cells that respond most, their cluster; empty for others.
    `adata.uns["cloister"]["cellcnn"]` : :class:`dict`
        Filters by markers, dense weights, markers and classes.
    """
    _, outcome = WORKFLOW.at_site(adata, session)
    return cast(cellcnn.Model, outcome.model)


def site(session: Session, adata: AnnData, options: Options) -> Outcome:
    check_consent(session, options)
    check_thresholds(adata, options, thresholds_of(session, options))
    check_held_out(options, thresholds_of(session, options))
    if drawn_per(options) == "group":
        groups_of(adata, options, thresholds_of(session, options))
    every, prepared, held = models_of(adata, session, options)
    model, agreed = best_of(session, options, every, held)
    save(model, options, session)
    found = summary(model) | agreed | accuracy(model, adata, options)
    if model.weights is not None:
        found |= report(adata, model, prepared, positive(options, model.classes))
    return Outcome(adata, found, model=model)


def thresholds_of(session: Session, options: Options) -> Thresholds:
    """Those of the study, raised by the site's own settings."""
    return session.thresholds(min_cells=options.min_cells, min_donors=options.min_donors)


def drawn_per(options: Options) -> str:
    """What inputs are drawn per; a preset decides it, where one is named."""
    return PRESETS[options.preset].per if options.preset else options.per


def check_consent(session: Session, options: Options) -> None:
    """Raise `RefusedError` before anything is sent, if this site's own settings do not allow what the study opens."""
    drawn = session.mode == "hardened" and drawn_per(options) != "group"
    asked = {"open-model": options.open_model, "donor-inputs": drawn, "validation": options.validate_every > 0}
    for what, wanted in asked.items() if session.mode != "plain" else ():
        if wanted and what not in session.consent:
            raise RefusedError(
                f"'{session.me}' does not consent to {CONSENTS[what]}; add \"{what}\" to [approve] consent in"
                " local/site.toml, or agree on a study without"
            )


def models_of(adata: AnnData, session: Session, options: Options) -> tuple[list[cellcnn.Model], Any, Held | None]:
    """Every model that was trained, this site's cells in their units, and the inputs that none of them saw."""
    sites, hub = session.sites, session.coordinator
    donors = donor_classes(adata, options)
    names = adata.obs[options.sample_key].astype(str).to_numpy()
    thresholds = thresholds_of(session, options)
    groups = groups_of(adata, options, thresholds) if drawn_per(options) == "group" else None
    terms = session.run(
        cellcnn_terms.site,
        cellcnn_terms.Params(sites, hub),
        [str(v) for v in adata.var_names],
        sorted(set(donors.values() if groups is None else groups.labels)),
    )
    if groups is not None:
        kept = groups.held_out(options.hold_out, session.rng("hold out"))
    else:
        kept = held_out(donors, options.hold_out, session.rng("hold out"))
    out = np.isin(names, kept)
    options = settle(session, options, len(terms.classes), donor_rows(names[~out], thresholds))
    X = cells.embedding(adata, None)[:, match_columns([str(v) for v in adata.var_names], terms.markers)]
    x = np.arcsinh(X / options.cofactor) if options.cofactor else X
    known = {c: k for k, c in enumerate(terms.classes)}  # without classes that have no group at any site
    y = np.array([known.get(c, -1) for c in adata.obs[options.target_key].astype(str)])
    rows, whose = np.flatnonzero(~out), np.unique(names[~out], return_inverse=True)[1]
    if groups is not None:
        rows, whose = groups.without(kept).rows(names)
    own = Rows(len(rows), whose, thresholds)
    fence = None if groups is None else groups.fence(x, names)
    used = x[rows] if fence is None else fence.hold(x[rows])
    mean, scale = standard(session, options, x.shape[1], used, own, fence)
    prepared = cellcnn.standardise(x, 0.0, mean, scale)
    held, drawn, part = None, drawn_of(options), None
    if out.any():
        seen = prepared[out] if fence is None else cellcnn.standardise(fence.hold(x[out]), 0.0, mean, scale)
        held = Held.of(seen, names[out], y[out], drawn, thresholds, session.rng("held out"))
    if groups is not None and fence is not None:
        inputs, labels, part = of_groups(groups.without(kept), terms, cellcnn.standardise(used, 0.0, mean, scale))
        if held is not None:
            apart = groups.among(kept)
            far = cellcnn.standardise(fence.hold(x[apart.rows(names)[0]]), 0.0, mean, scale)
            held = replace(held, groups=of_groups(apart, terms, far))
        if session.mode != "hardened":  # other modes send no contributions
            part = None
            held = None if held is None or held.groups is None else replace(held, groups=(*held.groups[:2], None))
    else:
        drawing = (prepared[~out], names[~out], y[~out])
        inputs, labels = cellcnn.draw_inputs(*drawing, **drawn, rng=session.rng("inputs"))
        behind = [at for _, at in cellcnn.draw_rows(names[~out], y[~out], **drawn, rng=session.rng("inputs"))]
    made: list[cellcnn.Model] = []
    for k in range(options.n_models):
        config = config_of(options, terms, session.study.seed, k)
        model = cellcnn.Model(config, terms.markers, terms.classes, options.cofactor, mean, scale)
        at, labels_of = batches_of(inputs, labels, config, session.rng(f"batches/{k}" if k else "batches"))
        if groups is None and session.mode != "plain":
            check_batches(behind, names[~out], at, thresholds)
        sent = inputs[at] if part is None else part.map(itemgetter(at))
        sample = None if held is None else held.batch(config, session.rng("validation"))
        made.append(train(session, options, model, (sent, labels_of, sample), k))
    return made, prepared, held


def of_groups(groups: DonorGroups, terms: cellcnn_terms.Terms, x: Any) -> tuple[Any, Any, Contribution]:
    """The mean of each group, its class, and the means as they are sent; `x` are the rows that `groups` names."""
    means, part = groups.inputs(x)
    return means, np.array([terms.classes.index(c) for c in groups.labels]), part


def batches_of(inputs: Any, labels: Any, config: cellcnn.Config, rng: np.random.Generator) -> tuple[Any, Any]:
    """Which input is at each place of every step's batch, (steps, n), and their labels (steps, n, o)."""
    numbers = np.arange(len(inputs), dtype=np.float64)[:, None]
    at, Y = cellcnn.draw_batches(numbers, labels, config, rng)
    return at[..., 0].astype(np.int64), Y


def drawn_of(options: Options) -> dict[str, Any]:
    """How multi-cell inputs are drawn: to train on, or where these are means of groups, to be evaluated on."""
    per = "class" if options.per == "group" else options.per
    return {"n_cells": options.n_cells, "per": per, "n_inputs": options.n_inputs}


def best_of(
    session: Session, options: Options, made: list[cellcnn.Model], held: Held | None
) -> tuple[cellcnn.Model, dict[str, Any]]:
    """The opened model that does best on all sites' held-out inputs, how good it is, and the consensus of the best."""
    if options.hold_out == 0 or made[0].weights is None:
        return made[0], {}
    tables = pooled_tables(session, made, held)
    right = np.trace(tables[:, 0], axis1=1, axis2=2) / max(1, int(tables[0, 0].sum()))
    best = int(right.argmax())
    found: dict[str, Any] = {"validation_accuracy": right.tolist()}
    found |= judged(tables[best], made[best].classes, positive(options, made[best].classes))
    return made[best], found | (consensus(made, right.tolist()) if len(made) > 1 else {})


def standard(
    session: Session,
    options: Options,
    width: int,
    x: Any,
    own: Rows | None = None,
    fence: pooled_scaling.Fence | None = None,
) -> tuple[Any, Any]:
    """Mean and scale of every marker: by secure sums over the sites' `x`, agreed on beforehand, or 0 and 1."""
    if options.scaling == "pooled":
        params = pooled_scaling.Params(session.sites, session.coordinator, width)
        pooled = (
            session.run(pooled_scaling.coordinator, params)
            if x is None or own is None
            else session.run(pooled_scaling.site, params, x, own.donor, own.thresholds, fence)
        )
        return pooled.mean, pooled.scale
    if options.scaling == "reference":
        if len(options.reference_mean) != width:
            raise ParameterError(f"{width} markers are in common, the reference has {len(options.reference_mean)}")
        return np.array(options.reference_mean), np.array(options.reference_scale)
    return np.zeros(width), np.ones(width)


def train(
    session: Session, options: Options, model: cellcnn.Model, inputs: tuple[Any, Any, Any] | None, number: int = 0
) -> cellcnn.Model:
    """The training itself, for a site (with batches, labels and held-out inputs) or the coordinator (without)."""
    sites, hub, store = session.sites, session.coordinator, store_of(options, session, number)
    every, patience = options.validate_every, options.patience
    if session.mode == "plain":
        clear = clear_training.Params(sites, hub, model.config, every, patience)
        if inputs is None:
            return ended(model, session.run(clear_training.aggregator, clear))
        return ended(model, session.run(clear_training.holder, clear, *inputs[:2], inputs[2] if every else None))
    if session.mode == "published":
        as_printed = published_training.Params(sites, hub, published_training.choose_ring(len(sites)), model.config)
        if inputs is None:
            return replace(model, weights=session.run(published_training.aggregator, as_printed, store).weights)
        return replace(model, weights=session.run(published_training.holder, as_printed, *inputs[:2], store).weights)
    done: Trained
    size = model.config.batch if every else 0
    ring = (encrypted_validation.ring_for if every else choose_ring)(model.config, len(sites))
    params = encrypted_training.Params(sites, hub, ring, model.config, options.open_model, every, size, patience)
    if inputs is None:
        done = session.run(encrypted_training.aggregator, params, store)
    else:
        X, Y, held = inputs
        done = session.run(encrypted_training.holder, params, X, Y, store, held if every else None)
    return ended(replace(model, ring=ring.about), done)


def ended(model: cellcnn.Model, done: Trained | clear_training.Trained) -> cellcnn.Model:
    early = done.step if done.step < model.config.steps else 0
    return replace(model, weights=done.weights, losses=done.losses, stopped=early)


def store_of(options: Options, session: Session, number: int = 0) -> KeyStore | None:
    if not options.keep:
        return None
    return KeyStore(Path(options.keep) / f"model-{number + 1}" if options.n_models > 1 else options.keep, session.me)


def save(made: cellcnn.Model, options: Options, session: Session) -> None:
    if options.keep:
        folder = Path(options.keep) / session.me
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_file(folder / "model.json", made.to_json())


def coordinator(session: Session, options: Options) -> Outcome:
    terms = session.run(cellcnn_terms.coordinator, cellcnn_terms.Params(session.sites, session.coordinator))
    options = settle(session, options, len(terms.classes), None)
    mean, scale = standard(session, options, len(terms.markers), None)
    every: list[cellcnn.Model] = []
    for k in range(options.n_models):
        config = config_of(options, terms, session.study.seed, k)
        model = cellcnn.Model(config, terms.markers, terms.classes, options.cofactor, mean, scale)
        every.append(train(session, options, model, None, k))
    best, agreed = best_of(session, options, every, None)
    save(best, options, session)
    return Outcome(None, summary(best) | agreed, model=best)


def summary(made: cellcnn.Model) -> dict[str, Any]:
    known: dict[str, Any] = {
        "markers": list(made.markers),
        "classes": list(made.classes),
        "steps": made.stopped or made.config.steps,
        "opened": made.weights is not None,
    }
    if made.weights is not None:
        known |= {"filters": made.weights.W.T.tolist(), "dense": made.weights.V.tolist()}
    if made.ring:
        known["ring"] = made.ring
    if made.stopped:
        known["stopped"] = (
            f"after {made.stopped} of {made.config.steps} steps: the validation error did not get smaller"
        )
    if made.losses:
        known["validation_loss"] = {str(step): loss for step, loss in made.losses.items()}
    return known


def files(outcome: Outcome) -> dict[str, bytes]:
    return {} if outcome.model is None else {"model.json": outcome.model.to_json().encode()}


def warnings(study: Study, options: Options) -> list[str]:
    """What the sites should know before they start."""
    if study.mode != "hardened":
        return []
    if (per := drawn_per(options)) != "group":
        return [
            f"inputs are drawn per {per}: one malicious site can combine the batches of all steps, so that an opened"
            " model or answers to queries show few donors of another site; per=group bounds this by min_donors"
        ]
    if not options.open_model:
        return []
    notes = [
        "open_model: one malicious site can steer the opened weights towards the mean of one group of min_donors ="
        f" {options.min_donors} or more donors of another site, but not of fewer"
    ]
    if options.hold_out:
        notes.append(
            "hold_out: tables of held-out donors count at least min_donors donors each, but the tables of two models"
            f" can differ by one donor; this study opens {options.n_models} table(s), and every further run adds some"
        )
    return notes


WORKFLOW = Workflow(
    name="train-cellcnn",
    summary="Train one CellCnn on donors of several sites, encrypted from the first step to the last.",
    options=Options,
    modes=modes_of("train-cellcnn"),
    site=site,
    coordinator=coordinator,
    check=check,
    reads=lambda options, site: ("sample_key", "target_key"),
    groups=group_of_cells,
    writes=("uns['cloister']['cellcnn']",),
    check_study=check_study,
    warnings=warnings,
    files=files,
    model=("model.json", lambda path, options: cellcnn.Model.from_json(path.read_text(encoding="utf-8"))),
    figures=figures,
    stand_in={"open_model": True},
    retired={"encrypted": "training in the clear is mode 'plain', and the other modes are encrypted"},
)
