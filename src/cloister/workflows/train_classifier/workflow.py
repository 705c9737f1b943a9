"""Train one classifier of cell types on the labelled cells of all sites (`train-classifier`)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from cloister.cells import tables as cells
from cloister.cells.genes import check_unique, gene_names, plain_name
from cloister.cells.spaces import space_of
from cloister.disclosure import Thresholds
from cloister.errors import DataError, ParameterError
from cloister.models.discriminant import SETTINGS, Setting
from cloister.models.linear import LinearModel, folds_of, hold_out
from cloister.report.figures import curves
from cloister.session import Outcome, RemoteSession, Session
from cloister.workflows import Workflow
from cloister.workflows.fine_tune.parts import confusions
from cloister.workflows.modes import modes_of
from cloister.workflows.options import check_levels, option, privacy_budget
from cloister.workflows.saved_models.cell_classifier import CellClassifier, label_cells
from cloister.workflows.train_classifier import noisy_logistic, pooled_discriminant, pooled_logistic
from cloister.workflows.train_classifier.logistic_terms import Fitted, Labelled, Params, label_codes

if TYPE_CHECKING:
    from anndata import AnnData

PENALTIES = (1e-1, 3e-2, 1e-2, 3e-3, 1e-3, 3e-4, 1e-4)
BALANCE = {"auto": 0.0, "none": 0.0, "root": 0.5, "balanced": 1.0}


@dataclass(frozen=True)
class Options:
    label_key: str = option("cell_type", "column of obs with the labels, NaN where missing")
    levels: tuple[str, ...] = option(
        (), "further columns of obs that are constant within a label, such as ontology ids"
    )
    use_rep: str | None = option(None, "key of obsm with the inputs; genes by default")
    solver: Literal["statistics", "logistic"] = option(
        "statistics",
        "method: discriminants and ridge regression from sums over groups of cells; or iterative logistic regression, "
        "which needs dp_noise or every site's consent",
    )
    n_top_genes: int = option(400, "number of genes of the model, those whose label means differ most")
    layer: str | None = option(None, "layer with the values; X by default")
    kind: Literal["counts", "log"] = option("counts", "values at every site: raw counts or log-normalised")
    names: Literal["index", "symbol", "ensembl"] = option(
        "index", "gene names to match by: var_names, or symbols or Ensembl ids from var"
    )
    library_key: str | None = option(
        None, "column of obs with library sizes; by default the sum over all genes of the file"
    )
    target_sum: float = option(1e4, "counts per cell after normalisation", retired=True)
    labels: tuple[str, ...] = option((), "complete list of label names; if empty, the sites' names are collected")
    l2: float | None = option(
        None, "penalty λ of λ/2 ‖W‖² beside the mean loss, of solver=logistic; chosen on held-out cells if none"
    )
    class_weight: Literal["auto", "none", "root", "balanced"] = option(
        "auto",
        "weight of labels: by cells (none), by the root of their cells, equal, or chosen on held-out cells (auto)",
    )
    validation: float = option(
        0.25, "fraction of each label's cells held out at a time, to choose settings; 0 disables"
    )
    unknown_share: float = option(0.07, "fraction of right labels that may be called unknown")
    tolerance: float = option(1e-5, "change of a coefficient at which the logistic fit stops", retired=True)
    max_openings: int = option(200, "number of sums that the logistic fit may open", retired=True)
    min_cells: int = option(50, "minimum number of cells of a site, and of its labelled cells if it adds to the model")
    min_label_cells: int = option(
        10, "minimum number of a site's own cells of a label; rarer labels are left out there"
    )
    min_donors: int = option(3, "minimum number of a site's own donors of a label, where donor_key names them")
    max_share: float = option(0.9, "fraction of all labelled cells above which a site's claim ends the run; 1 disables")
    adapt: bool = option(default=True, help="align each site's cells with those of training before labelling them")
    dp_noise: float = option(
        0.0, "noise multiplier of differential privacy for a donor's or a site's cells; 0 disables"
    )
    dp_clip: float = option(1.0, "largest norm of the update of a donor or site, with noise")
    dp_delta: float = option(1e-5, "delta of differential privacy")
    dp_rounds: int = option(10, "number of rounds of averaging, with noise")
    donor_key: str | None = option(None, "column of obs with donors, for min_donors and as the unit that noise hides")
    key_added: str = option("predicted", "column of obs for the model's labels")

    def __post_init__(self) -> None:
        if not 0 <= self.validation < 1:
            raise ParameterError(f"option 'validation' must be in [0, 1), found {self.validation}")
        if self.l2 is None and not self.validation and self.iterative:
            raise ParameterError("without held-out cells no penalty can be chosen; pass l2=, or validation= above 0")
        if not 2 <= self.n_top_genes <= 50_000:
            raise ParameterError(f"option 'n_top_genes' must be between 2 and 50000, found {self.n_top_genes}")
        if self.labels and (len(set(self.labels)) != len(self.labels) or len(self.labels) < 2):
            raise ParameterError("option 'labels' needs at least two names, each once")
        check_levels(self.levels, self.label_key, self.labels)
        if not self.target_sum > 0 or self.min_cells < 2:
            raise ParameterError("option 'target_sum' must be above 0, 'min_cells' at least 2")
        if self.l2 is not None and not 0 < self.l2 <= 1e3:
            raise ParameterError(f"option 'l2' must be above 0 and at most 1000, found {self.l2:g}")
        if not 0 < self.max_share <= 1:
            raise ParameterError(f"option 'max_share' must lie above 0 and up to 1, found {self.max_share:g}")
        if self.min_label_cells < 2 or self.min_donors < 1:
            raise ParameterError("option 'min_label_cells' must be at least 2, 'min_donors' at least 1")
        if self.dp_noise:
            self._check_noise()

    @property
    def iterative(self) -> bool:
        return self.solver == "logistic" or self.dp_noise > 0

    def _check_noise(self) -> None:
        if self.validation or self.l2 is None or self.class_weight not in ("auto", "none"):
            raise ParameterError(
                "with dp_noise, pass l2= and set validation=0 and class_weight='none': counts of cells and of right "
                "answers carry no noise"
            )
        if self.dp_noise < 0 or not self.dp_clip > 0 or not 0 < self.dp_delta < 1 or self.dp_rounds < 1:
            raise ParameterError(
                "dp_noise and dp_clip must be above 0, dp_delta between 0 and 1, and dp_rounds at least 1"
            )


def train_classifier(adata: AnnData, session: Session | RemoteSession, *, copy: bool = False) -> Any:
    """Train a linear classifier together with the other sites, and label all cells here with it.

    The model follows from sums over all sites: cells and mean expression of each label, second moments of the
    chosen genes, and right answers on held-out cells. Counts are normalised and logged as in `shared_pca`.

    Parameters
    ----------
    adata
        Raw counts, log values, or an embedding with `use_rep=`; at every site alike. Without a label in
        `adata.obs[label_key]`, this site adds nothing to the model and gets labels.
    session
        This site's place in a study of `train-classifier`; the study says the options.

    Returns
    -------
    The classifier (`CellClassifier`), with `predict`, `predict_proba` and `save`; or `(adata, classifier)` if
    `copy=True`. Sets:

    `adata.obs[key_added]`, `adata.obs[f"{key_added}_confidence"]` : :class:`pandas.Series`
        The model's label for every cell, and its probability.
    `adata.uns[key_added]` : :class:`str`
        JSON: labels and their cells, settings with their scores, level of `unknown` and how many cells here are
        below it, labels that are too rare here.
    """
    adata, outcome = WORKFLOW.at_site(adata, session, copy=copy)
    return (adata, outcome.model) if copy else outcome.model


def check_mode(session: Session, options: Options) -> None:
    """Raise unless the study's mode and solver go together: the iterative fit withstands no malicious site."""
    needed = "semi-honest" if options.iterative and not options.dp_noise else "hardened"
    if session.mode != needed:
        solver = f"solver='{options.solver}'" + (" without dp_noise" if options.solver == "logistic" else "")
        raise ParameterError(f"{solver} runs in mode '{needed}', found mode '{session.mode}'; change one of them")


def site(session: Session, adata: AnnData, options: Options) -> Outcome:
    check_mode(session, options)
    mine = cells_of(adata, session, options)
    fitted: Fitted
    if options.dp_noise:
        fitted = session.run(noisy_logistic.site, noisy_params(session, options), mine)
    elif options.iterative:
        fitted = session.run(pooled_logistic.site, params_of(session, options), mine)
    else:
        fitted = session.run(pooled_discriminant.site, fixed_params(session, options), mine)
    classifier = classifier_of(session, options, fitted, space_of(adata, options.use_rep))
    bare = all(name is None for name in mine.labels)
    aligned = options.adapt and bare and fitted.centers is not None
    x, model = classifier.inputs(adata, layer=options.layer, library_key=options.library_key), classifier.model
    if fitted.own is not None and not bare:
        own = fitted.own
        model = replace(model, coefficients=own.coefficients, intercept=own.intercept, centers=fitted.own_centers)
    if options.adapt and not bare and model.typical is not None:
        model = model.moved_to(x, mine.codes(model.labels))  # by this site's own labels; stays here
    p = model.probabilities(x, adapt=aligned)
    labels = label_cells(p, model.labels, 0.0)
    cells.write_labels(adata, options.key_added, labels, p.max(axis=1), share_name="confidence")
    unsure = int(np.count_nonzero(model.is_unknown(x, p, adapt=aligned)))
    result = summary(fitted, options) | {"unsure": unsure, "too_rare_here": mine.excluded}
    adata.uns[options.key_added] = json.dumps(result)
    return Outcome(adata, result, model=classifier)


def coordinator(session: Session, options: Options) -> Outcome:
    """Add up what the sites send, and follow the fit."""
    check_mode(session, options)
    if options.dp_noise:
        fitted = session.run(noisy_logistic.coordinator, noisy_params(session, options))
    elif options.iterative:
        fitted = session.run(pooled_logistic.coordinator, params_of(session, options))
    else:
        fitted = session.run(pooled_discriminant.coordinator, fixed_params(session, options))
    return Outcome(None, summary(fitted, options))


def fixed_params(session: Session, options: Options) -> pooled_discriminant.Params:
    return pooled_discriminant.Params(params_of(session, options), settings_of(options), options.max_share)


def settings_of(options: Options) -> tuple[Setting, ...]:
    """All settings; with class weights that the study names, ridge regressions with these."""
    if options.class_weight == "auto":
        return SETTINGS
    return tuple(dict.fromkeys(replace(s, balance=BALANCE[options.class_weight]) for s in SETTINGS if s.penalty))


def params_of(session: Session, options: Options) -> Params:
    return Params(
        session.sites,
        session.coordinator,
        embedding=options.use_rep or "",
        kind=options.kind,
        n_top_genes=options.n_top_genes,
        target_sum=options.target_sum,
        labels=options.labels,
        penalties=penalties_of(options),
        held_out=options.validation > 0,
        balance=BALANCE[options.class_weight],
        unknown_share=options.unknown_share,
        tolerance=options.tolerance,
        openings=options.max_openings,
        min_cells=options.min_cells,
        min_label_cells=options.min_label_cells,
        seed=session.study.seed,
    )


def penalties_of(options: Options) -> tuple[float, ...]:
    """Of the logistic fit."""
    if options.l2 is not None:
        return (options.l2,)
    return PENALTIES if options.iterative else (1.0,)


def noisy_params(session: Session, options: Options) -> noisy_logistic.Params:
    return noisy_logistic.Params(
        params_of(session, options),
        options.dp_rounds,
        options.dp_noise,
        options.dp_clip,
        epsilon_of(options),
        options.dp_delta,
        options.donor_key is not None,
    )


def noisy_sums(options: Options) -> int:
    """How many sums with noise a run opens."""
    return options.dp_rounds + (options.donor_key is not None)


def epsilon_of(options: Options) -> float:
    return privacy_budget(options.dp_noise, options.dp_delta, noisy_sums(options))


def release_of(options: Options) -> tuple[str, float, int] | None:
    unit = "donor" if options.donor_key is not None else "site"
    return (unit, options.dp_noise, noisy_sums(options)) if options.dp_noise else None


def privacy_of(options: Options) -> dict[str, Any]:
    who = "donor" if options.donor_key is not None else "site"
    said = {
        "epsilon": epsilon_of(options),
        "delta": options.dp_delta,
        "protects": f"all cells of one {who}, against none",
    }
    return {"privacy": said} if options.dp_noise else {}


def own_labels(adata: AnnData, options: Options) -> tuple[str | None, ...]:
    return cells.labels_of(adata, options.label_key, options.levels)


def own_names(adata: AnnData, options: Options) -> list[str]:
    if options.names == "index":
        return [plain_name(str(name)) for name in adata.var_names]
    return gene_names(adata.var, options.names)


def thresholds_of(options: Options) -> dict[str, int]:
    return {"min_cells": options.min_label_cells, "min_donors": options.min_donors}


def donors_of(adata: AnnData, options: Options) -> Any:
    if options.donor_key is None:
        return None
    return adata.obs[options.donor_key].astype("category").cat.codes.to_numpy().astype(np.int64)


def cells_of(adata: AnnData, session: Session, options: Options) -> Labelled:
    labels = own_labels(adata, options)
    codes = label_codes(labels, tuple(sorted({name for name in labels if name is not None})))
    held, fold = np.zeros(adata.n_obs, dtype=bool), None
    if options.iterative:
        held[hold_out(codes, options.validation, session.rng("validation"))] = True
    elif options.validation:
        fold = folds_of(codes, max(2, round(1 / options.validation)), session.rng("validation"))
    more = {
        "donors": donors_of(adata, options),
        "thresholds": session.thresholds(**thresholds_of(options)),
        "fold": fold,
    }
    if options.use_rep is not None:
        x = cells.embedding(adata, options.use_rep)
        return Labelled((), x, labels, held, None, space_of(adata, options.use_rep), **more)
    library = None
    if options.library_key is not None:
        library = np.asarray(adata.obs[options.library_key], dtype=np.float64)
    rows, names = cells.rows_of(adata, options.layer), tuple(own_names(adata, options))
    return Labelled(names, rows, labels, held, library, "", **more)


def classifier_of(session: Session, options: Options, fitted: Fitted, space: str) -> CellClassifier:
    origin = {
        "study": session.study.name,
        "study_digest": session.study.digest.hex(),
        "sites": list(session.sites),
        "solver": "logistic" if options.iterative else "statistics",
        "setting": fitted.setting,
        "penalty": fitted.penalty,
        "openings": fitted.openings,
        "cells": fitted.cells,
        "epsilon": None,
        "library_key": options.library_key,
        "layer": options.layer,
    } | privacy_of(options).get("privacy", {})
    model = LinearModel(
        fitted.labels,
        fitted.coefficients,
        fitted.intercept,
        fitted.genes,
        fitted.common,
        options.kind,
        options.names,
        options.target_sum,
        options.use_rep,
        space,
        fitted.level,
        fitted.centers,
        origin,
    )
    if fitted.typical is not None:
        typical = np.vstack([fitted.typical.coefficients, fitted.typical.intercept])
        model = replace(model, typical=typical, typical_centers=fitted.typical_centers)
    return CellClassifier(model)


def check(adata: AnnData, options: Options) -> list[str]:
    """Raise `DataError` if these cells cannot take part; return what the user should know."""
    cells.check_cells(adata, layer=options.layer, use_rep=options.use_rep)
    if options.use_rep is None:
        found = cells.expression_kind(adata, options.layer)
        if found != options.kind:
            fix = "pass layer= with raw counts, or kind='log' at every site"
            raise DataError(f"expected {options.kind} values, found {found} values; {fix}")
        check_unique(own_names(adata, options), "Gene names")
    if adata.n_obs < options.min_cells:
        raise DataError(
            f"{adata.n_obs} cells, fewer than {options.min_cells}: sums over so few come close to single cells; "
            "leave this site out, or lower min_cells= if all agree"
        )
    if options.library_key is not None:
        if options.library_key not in adata.obs:
            raise DataError(f"adata.obs[{options.library_key!r}] is missing; pass the column with the library sizes")
        if not np.all(np.asarray(adata.obs[options.library_key], dtype=np.float64) > 0):  # NaN is not above 0
            raise DataError(f"adata.obs[{options.library_key!r}] must be above 0 for every cell")
    check_donors(adata, options)
    notes = check_for_noise(adata, options) if options.dp_noise else []
    if options.l2 is not None and not options.iterative:
        notes.append("option 'l2' is ignored: it is the penalty of solver='logistic'")
    labels = own_labels(adata, options)
    names = {name for name in labels if name is not None}
    if options.labels and (unknown := sorted(names - set(options.labels))):
        raise DataError(
            f"{len(unknown)} label(s) in adata.obs[{options.label_key!r}] are not in the study's vocabulary (e.g. "
            f"'{unknown[0]}'); rename or remove them, or agree on a longer list of labels"
        )
    if not names:
        notes.append(
            f"no label in adata.obs[{options.label_key!r}]: this site adds nothing to the model, and gets labels"
        )
    return notes + ([] if options.dp_noise else notes_on_labels(adata, options, labels))


def check_donors(adata: AnnData, options: Options) -> None:
    if options.donor_key is None:
        return
    if options.donor_key not in adata.obs:
        raise DataError(f"adata.obs[{options.donor_key!r}] is missing; pass the column with the donors as donor_key=")
    if adata.obs[options.donor_key].isna().any():
        raise DataError(
            f"adata.obs[{options.donor_key!r}] lacks the donor of some cells; fill them in, or remove these"
        )


def notes_on_labels(adata: AnnData, options: Options, labels: tuple[str | None, ...]) -> list[str]:
    """Labels that this site leaves out because too few of its cells or donors have them."""
    least = Thresholds(**thresholds_of(options))
    nothing = np.zeros(adata.n_obs, bool)
    mine = Labelled((), np.zeros((adata.n_obs, 0)), labels, nothing, donors=donors_of(adata, options), thresholds=least)
    notes, fewest = [], f"fewer than {least.min_cells} cells"
    if options.donor_key is not None:
        fewest += f" or {least.min_donors} donors"
    if excluded := mine.excluded:
        listed = ", ".join(f"'{name}' ({n} cells)" for name, n in list(excluded.items())[:8])
        more = f" and {len(excluded) - 8} more" if len(excluded) > 8 else ""
        notes.append(f"left out here, {fewest}: {listed}{more}; these cells add nothing to the model")
    remain = sum(name is not None for name in mine.open_labels(1).labels)
    surplus = sum(name is not None and name not in excluded for name in labels) - remain
    if surplus:
        notes.append(f"{surplus} cells left out here, by which one donor has more than half of a label's cells")
    if 0 < remain < options.min_cells:
        notes.append(
            f"{remain} labelled cells remain, fewer than min_cells = {options.min_cells}: this site adds nothing to "
            "the model, and gets labels"
        )
    if options.min_label_cells < Thresholds().min_cells:
        notes.append(f"sums over as few as {options.min_label_cells} cells of a label leave this site")
    return notes


def check_for_noise(adata: AnnData, options: Options) -> list[str]:
    """Raise if these cells cannot take part under noise; return what that means."""
    if options.use_rep is None and adata.n_vars > options.n_top_genes:
        raise DataError(
            f"{adata.n_vars} genes, more than n_top_genes={options.n_top_genes}: with dp_noise no gene is chosen by "
            "its variance; keep an agreed panel of genes, or pass use_rep= with an embedding of a public model"
        )
    who = "each donor" if options.donor_key is not None else "a whole site"
    notes = [f"noise hides {who}; with few of them the model may learn little"]
    if options.use_rep == "X_shared_pca":
        notes.append("X_shared_pca was itself made from sums over all cells, without noise")
    return notes


def summary(fitted: Fitted, options: Options) -> dict[str, Any]:
    best = next((row for row in fitted.path if row[0] == fitted.penalty), None)
    scores = {} if best is None else {"accuracy": best[1], "balanced_accuracy": best[2]}
    if fitted.scores:
        scores = {"accuracy": dict(fitted.scores)[fitted.setting]}
    return {
        "labels": list(fitted.labels),
        "cells": sum(fitted.cells.values()),
        "cells_per_label": fitted.cells,
        "left_out": list(fitted.left_out),
        "genes": len(fitted.genes),
        "solver": "logistic" if options.iterative else "statistics",
        "setting": fitted.setting,
        "own_setting": fitted.own_setting,
        "settings": dict(fitted.scores),
        "penalty": fitted.penalty,
        **scores,
        "level": fitted.level,
        "openings": fitted.openings,
        "converged": fitted.converged,
        "path": [list(row) for row in fitted.path],
    } | privacy_of(options)


def files(outcome: Outcome) -> dict[str, bytes]:
    return {} if outcome.model is None else {"model.npz": outcome.model.to_bytes()}


def figures(outcomes: Mapping[str, Outcome], options: Options) -> list[Any]:
    """Held-out cells along the penalties; at every site that is here, its own labels against the model's."""
    drawn = []
    rows: list[list[float]] = next((o.result["path"] for o in outcomes.values() if o.result.get("path")), [])
    if len(rows) > 1:
        lines = {"accuracy": [row[1] for row in rows], "balanced accuracy": [row[2] for row in rows]}
        title = "Held-out cells, from the strongest penalty to the weakest"
        drawn.append(curves(lines, title=title, xlabel="penalty", ylabel="score"))
    return drawn + confusions(outcomes, options)


WORKFLOW = Workflow(
    name="train-classifier",
    summary="Train one linear classifier on all sites' labelled cells, as if they were pooled.",
    options=Options,
    modes=modes_of("train-classifier"),
    site=site,
    coordinator=coordinator,
    check=check,
    privacy=lambda options: privacy_of(options).get("privacy", {}),
    release=release_of,
    writes=("obs[{key_added!r}]", "uns[{key_added!r}]"),
    files=files,
    model=("model.npz", lambda path, options: CellClassifier.load(path)),
    figures=figures,
)
