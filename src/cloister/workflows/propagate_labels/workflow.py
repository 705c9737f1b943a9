"""Label cells from the labels of some of them, over a graph of all sites' cells (`propagate-labels`)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from cloister.cells import tables as cells
from cloister.errors import DataError, ParameterError
from cloister.models import graph
from cloister.papers import label_propagation
from cloister.report import figures as draw
from cloister.session import Outcome, RemoteSession, Session
from cloister.study import Study
from cloister.workflows import Workflow
from cloister.workflows.modes import modes_of
from cloister.workflows.one_space import agree_on_space, note_on_space
from cloister.workflows.options import WEAKER, option
from cloister.workflows.propagate_labels import (
    private_propagation,
    propagation_terms,
    shared_codes,
    verified_propagation,
)
from cloister.workflows.propagate_labels.chosen_settings import Choice

if TYPE_CHECKING:
    from anndata import AnnData


@dataclass(frozen=True)
class Options:
    label_key: str = option("cell_type", "column of obs with the labels, NaN where missing")
    use_rep: str = option(
        "X_shared_pca", "key of obsm with one space of all sites, from shared-pca, integrate or embed; X for the matrix"
    )
    bits: int = option(4096, "length of a cell's binary code, in bits; longer codes give finer similarities")
    n_neighbors: int = option(5, "number of neighbours per cell in the graph")
    alpha: float = option(0.9, "weight of a step along the graph, between 0 and 1; a larger one carries labels farther")
    power: float = option(4.0, "exponent of the similarities; a larger one favours near neighbours", modes=WEAKER)
    hamming: Literal["mpc", "ot", "he"] = option(
        "mpc", "engine for distances: three-party sharing, oblivious transfer or homomorphic encryption", modes=WEAKER
    )
    key_added: str = option("propagated", "column of obs for the result")
    relabel: bool = option(default=False, help="replace given labels, too, where the graph disagrees")
    classes: tuple[str, ...] = option(
        (), "complete list of class names; if empty, the sites' names are collected, hidden from the coordinator"
    )
    balance: bool = option(
        default=False, help="divide scores by the number of labels per class, which all parties learn", modes=WEAKER
    )
    groups: int = option(1, "number of separate graphs, for very many small sites")
    choose: bool = option(
        default=False,
        help="choose alpha and steps by left-out labels; in other modes also neighbours, power, balance, class_means",
    )
    class_means: float = option(
        0.0,
        "weight of each class's mean direction, which all sites learn; 1 helps with few labels, 0 disables",
        modes=WEAKER,
    )
    class_means_from: int = option(
        2, "minimum number of labels of a class over all sites to open its mean", modes=WEAKER, retired=True
    )

    def __post_init__(self) -> None:
        try:
            graph.check_sizes(1 << 40, self.bits, self.n_neighbors, self.alpha, self.power)
        except ParameterError as e:
            raise ParameterError(f"option {e}") from None
        if len(set(self.classes)) != len(self.classes) or len(self.classes) == 1:
            raise ParameterError("option 'classes' must name at least two different classes, or none")
        if not 0 <= self.class_means <= propagation_terms.MOST_WEIGHT or self.class_means_from < 2:
            raise ParameterError("option 'class_means' must lie between 0 and 64, 'class_means_from' be at least 2")
        if self.groups < 1:
            raise ParameterError(f"option 'groups' must be at least 1, found {self.groups}")
        if not self.key_added or self.key_added == self.label_key:
            raise ParameterError("option 'key_added' must be a name of its own, so that given labels are kept")


def propagate_labels(adata: AnnData, session: Session | RemoteSession, *, copy: bool = False) -> AnnData | None:
    """Label the cells without a label from those that have one, at any site, over a graph of all sites' cells.

    Parameters
    ----------
    adata
        Cells, all, some or none of them labelled: `adata.obs[label_key]`, where NaN means no label. The embedding
        `adata.obsm[use_rep]` must be one space for all sites. The column may be missing at a site without labels.
    session
        This site's place in a study of `propagate-labels`, from `cl.join(kit)`; the study says the options.

    Returns
    -------
    `None`, or a labelled copy if `copy=True`. Sets the following fields:

    `adata.obs[key_added]` : :class:`pandas.Series`
        The given label, or the propagated one (``category``); NaN for cells that no label reaches. With `relabel`
        the propagated one for all cells.
    `adata.obs[f"{key_added}_confidence"]` : :class:`pandas.Series`
        1 - entropy / log C of the class scores (``float``); 1 for given labels, 0 for cells that no label reaches.
        In mode hardened from the largest score in eighths: 0 for an even split between all classes.
    """
    adata, _ = WORKFLOW.at_site(adata, session, copy=copy)
    return adata if copy else None


def site(session: Session, adata: AnnData, options: Options) -> Outcome:
    agree_on_space(session, options.use_rep, adata)
    inputs = _inputs(adata, options)
    budget = (session.charge_queries,) if session.study.mode == "hardened" else ()
    found = session.run(_protocol(session.study).site, params_of(session.study, options), *inputs, *budget)
    write(adata, options, found)
    choice = chosen(found.choice) if options.choose else {}
    return Outcome(adata, computed_by(session.study, options) | summary(adata, options) | choice)


def coordinator(session: Session, options: Options) -> Outcome:
    agree_on_space(session, options.use_rep)
    served = session.run(_protocol(session.study).server, params_of(session.study, options))
    choice = chosen(served[0].choice) if options.choose and len(served) == 1 else {}
    return Outcome(None, computed_by(session.study, options) | _counts(served) | choice)


def auxiliary(session: Session, options: Options) -> Outcome:
    agree_on_space(session, options.use_rep)
    session.attend(params_of(session.study, options))
    return Outcome(None, computed_by(session.study, options))


def params_of(study: Study, options: Options) -> propagation_terms.Params:
    return propagation_terms.Params(
        study.sites,
        study.coordinator,
        options.bits,
        options.n_neighbors,
        options.alpha,
        options.hamming,
        options.classes,
        options.balance,
        options.groups,
        options.power,
        options.choose,
        options.class_means,
        options.class_means_from,
    )


def check_study(study: Study, options: Options) -> None:
    """Refuse what mode hardened does not compute under sharing."""
    if study.mode == "hardened":
        try:
            verified_propagation.check_params(params_of(study, options))
        except ParameterError as e:
            raise ParameterError(f"option {e}") from None


def _protocol(study: Study) -> Any:
    return {"published": label_propagation, "semi-honest": private_propagation}.get(study.mode, verified_propagation)


def labels_of(adata: AnnData, options: Options) -> list[str | None]:
    """One name or None per cell; a site without the column has no labels."""
    if options.label_key not in adata.obs:
        return [None] * adata.n_obs
    column = adata.obs[options.label_key]
    return [None if missing else str(x) for x, missing in zip(column, column.isna(), strict=True)]


def _inputs(adata: AnnData, options: Options) -> tuple[Any, list[str | None]]:
    return cells.embedding(adata, options.use_rep), labels_of(adata, options)


def write(adata: AnnData, options: Options, found: propagation_terms.Labels) -> None:
    given = labels_of(adata, options)
    names, confidence = list(found.names), found.confidence.copy()
    if not options.relabel:
        for i, name in enumerate(given):
            if name is not None:
                names[i], confidence[i] = name, 1.0
    cells.write_labels(adata, options.key_added, names, confidence, share_name="confidence")


def check(adata: AnnData, options: Options) -> list[str]:
    """Raise `DataError` if these cells cannot take part; return what the user should know."""
    if adata.n_obs == 0:
        raise DataError("Expected cells, found none; leave this site out.")
    vectors, labels = _inputs(adata, options)
    propagation_terms.check_inputs(vectors, labels)
    known = {name for name in labels if name is not None}
    if options.classes and (strange := known - set(options.classes)):
        raise DataError(
            f"adata.obs[{options.label_key!r}] holds {len(strange)} label(s) that are not among the"
            f" {len(options.classes)} agreed classes; rename them, or agree on a longer list: classes="
        )
    notes = []
    if options.label_key not in adata.obs:
        there = ", ".join(repr(str(k)) for k in adata.obs) or "none"
        notes.append(f"adata.obs[{options.label_key!r}] is missing (there is {there}): all cells count as unlabelled")
    notes += note_on_space(options.use_rep)
    if zeros := int((vectors == 0).all(axis=1).sum()):
        notes.append(f"{zeros} cells are all zero, and so have no direction: they lie at a right angle to all others")
    return notes


def who_computes(study: Study) -> str:
    """One sentence for the people behind the parties."""
    first, second, third = shared_codes.computing(study.sites, study.coordinator)
    text = f"{first}, {second} and {third} compute; any two of them together could see codes and labels of all cells"
    if third == study.coordinator:
        text += (
            f". {third} holds no cells and computes because there are only two sites; with a third site it would not"
        )
    return text


def warnings(study: Study, options: Options) -> list[str]:
    """With two sites, who computes: who runs the coordinator often is one of the two."""
    told = computed_by(study, options)
    return list(told.values()) if len(study.sites) == 2 else []


def computed_by(study: Study, options: Options) -> dict[str, Any]:
    if options.hamming != "mpc" and study.mode == "published":
        return {}
    note = "each group has its own three computing parties" if options.groups > 1 else who_computes(study)
    return {"note": note}


def _counts(served: tuple[propagation_terms.Served, ...]) -> dict[str, Any]:
    counts: dict[str, Any] = {
        "sites": [u for s in served for u in s.sites],
        "cells": sum(sum(s.sizes) for s in served),
        "finished": [u for s in served for u in s.finished],
    }
    marked = [s.labelled for s in served if s.labelled is not None]
    return counts | ({"labelled": sum(map(len, marked))} if marked else {})


def chosen(choice: Choice) -> dict[str, Any]:
    """The chosen setting and, if not hardened, how often it predicts labels that were left out."""
    if choice.setting.steps:
        return {"chosen": {"alpha": choice.setting.alpha, "steps": choice.setting.steps}}
    if math.isnan(choice.accuracy):
        return {}
    score = f"balanced accuracy {choice.accuracy:.3f} on labels left out, best of {len(choice.tried)} settings tried"
    usual = choice.tried[0]
    if choice.setting == usual[0]:
        score = f"balanced accuracy {choice.accuracy:.3f} on labels left out; no other setting is clearly better"
    return {
        "chosen": asdict(choice.setting),
        "balanced_accuracy": choice.accuracy,
        "usual_balanced_accuracy": usual[1],
        "choice": score,
    }


def summary(adata: AnnData, options: Options) -> dict[str, Any]:
    """What a site may want to see first."""
    given = np.array([name is not None for name in labels_of(adata, options)])
    found = adata.obs[options.key_added]
    missing = found.isna().to_numpy()
    confidence = adata.obs[f"{options.key_added}_confidence"].to_numpy()
    reached = ~given & ~missing
    made: dict[str, Any] = {
        "cells": int(adata.n_obs),
        "labelled": int(given.sum()),
        "propagated": int(reached.sum()),
        "unreached": int(missing.sum()),
        "confidence": float(confidence[reached].mean()) if reached.any() else None,
        "cells_per_label": {str(k): int(v) for k, v in found.value_counts().items()},
    }
    if given.all() and not options.relabel:
        made["warning"] = f"every cell has a label in obs['{options.label_key}'] already, so there was none to give"
    if missing.any():
        made["warning"] = (
            f"{int(missing.sum())} of {adata.n_obs} cells are in parts of the graph without any label, and get none"
        )
    return made


def figures(outcomes: Mapping[str, Outcome], options: Options) -> list[Any]:
    made: list[Any] = []
    confidence: dict[str, Any] = {}
    here = {s: o.adata for s, o in outcomes.items() if o.adata is not None and options.key_added in o.adata.obs}
    order = sorted({str(x) for adata in here.values() for x in adata.obs[options.key_added].dropna()})
    for site, adata in here.items():
        points = cells.embedding(adata, options.use_rep)
        points = points if points.shape[1] > 1 else np.column_stack([points, np.zeros(len(points))])
        names = adata.obs[options.key_added].astype(object).where(~adata.obs[options.key_added].isna(), "no label")
        title = f"Cells of {site} by propagated label"
        made.append(draw.embedding(points, names.astype(str).tolist(), title=title, order=order))
        asked = adata.obs[options.label_key].isna().to_numpy() if options.label_key in adata.obs else slice(None)
        if len(found := adata.obs[f"{options.key_added}_confidence"].to_numpy()[asked]):
            confidence[site] = found
    if confidence:
        title, xlabel = (
            "Confidence of the labels that were not given",
            "confidence (0: none reached it, 1: sure)",
        )
        made.append(draw.histograms(confidence, title=title, xlabel=xlabel))
    return made


WORKFLOW = Workflow(
    name="propagate-labels",
    summary="Label cells from few labels at any site, over a graph of all sites' cells.",
    options=Options,
    modes=modes_of("propagate-labels"),
    site=site,
    coordinator=coordinator,
    auxiliary=auxiliary,
    check=check,
    check_study=check_study,
    writes=("obs[{key_added!r}]",),
    figures=figures,
    warnings=warnings,
)
