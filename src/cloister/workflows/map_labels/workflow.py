"""Label the cells of one site by their nearest neighbours in references that stay at the others (`map-labels`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from cloister.cells import tables as cells
from cloister.errors import DataError, ParameterError
from cloister.papers import plain_knn, published_knn
from cloister.papers.baselines.mapping import scores
from cloister.report import figures as draw
from cloister.session import Outcome, RemoteSession, Session
from cloister.study import Party, Study
from cloister.workflows import Workflow
from cloister.workflows.map_labels import mapping_terms, private_knn, reference_distances, verified_knn
from cloister.workflows.modes import modes_of
from cloister.workflows.one_space import agree_on_space, note_on_space
from cloister.workflows.options import check_levels, option

if TYPE_CHECKING:
    from anndata import AnnData

UNKNOWN = "unknown"


@dataclass(frozen=True)
class Options:
    query: str = option("", "name of the site whose cells are labelled; all others offer references")
    label_key: str = option("cell_type", "column of obs with the references' labels")
    levels: tuple[str, ...] = option(
        (), "further columns of obs that are constant within a label, such as ontology ids"
    )
    use_rep: str = option(
        "X_shared_pca", "key of obsm with one space of all sites, from shared-pca, integrate or embed"
    )
    n_neighbors: int = option(10, "number of nearest references that vote")
    key_added: str = option("mapped", "column of obs for the result")
    share: bool = option(default=False, help="also reveal the fraction of votes to the querying site")
    max_distance: float | None = option(
        None, "distance from the nearest reference beyond which a cell is called unknown; no limit by default"
    )
    known_share: float = option(
        0.0,
        "choose max_distance so that this fraction of references has another of the same site within it; 0 disables",
    )
    labels: tuple[str, ...] = option((), "complete list of label names; if empty, the sites' names are collected")
    bound: float | None = option(None, "largest Euclidean norm of a cell; by default computed on shares")
    precision: int = option(40, "bits of a distance and its label on shares; 32 is faster, 64 finer")
    prototypes: int = option(0, "number of means per label that replace a site's references; 0 uses the cells")
    computing: tuple[str, ...] = option(
        (), "names of the three computing parties; by default the querier and two others"
    )

    def __post_init__(self) -> None:
        if self.n_neighbors < 1:
            raise ParameterError(f"option 'n_neighbors' must be at least 1, found {self.n_neighbors}")
        if self.precision not in range(24, 65):
            raise ParameterError(f"option 'precision' must be from 24 to 64, found {self.precision}")
        if self.prototypes < 0:
            raise ParameterError(f"option 'prototypes' must be at least 0, found {self.prototypes}")
        for key in ("bound", "max_distance"):
            value = getattr(self, key)
            if value is not None and not value > 0:
                raise ParameterError(f"option '{key}' must be above 0, found {value}")
        if not 0 <= self.known_share < 1 or (self.known_share and self.max_distance is not None):
            raise ParameterError("option 'known_share' must be in [0, 1), and chooses max_distance: pass one of them")
        if len(set(self.labels)) != len(self.labels):
            raise ParameterError("option 'labels' names a label twice")
        check_levels(self.levels, self.label_key, self.labels)
        if self.computing and len(set(self.computing)) != 3:
            raise ParameterError(
                f"option 'computing' must name three different parties, found {', '.join(self.computing)}"
            )


def computing_parties(study: Study, query: Party, chosen: Sequence[str] = ()) -> tuple[Party, Party, Party]:
    """Who computes: those named, or the querier and two sites with references, or the coordinator for want of one."""
    if not query:
        raise ParameterError("'map-labels' needs the option 'query': name the site whose cells are labelled")
    for name in (query, *chosen):
        if name not in study.parties:
            raise ParameterError(f"'{name}' is not a party of this study; there are {', '.join(study.parties)}")
    if study.parties[query] != "site":
        raise ParameterError(f"option 'query' must name a site, '{query}' is the study's {study.parties[query]}")
    names = tuple(map(Party, chosen)) or (query, *(p for p in study.sites if p != query), study.coordinator)[:3]
    if len(names) != 3:
        raise ParameterError("a mapping needs a querying site and at least one other")
    return (names[0], names[1], names[2])


def who_computes(study: Study, computing: Sequence[Party]) -> str:
    """One sentence for the people behind the parties."""
    text = f"{computing[0]}, {computing[1]} and {computing[2]} compute; any two of them together could see everything"
    if study.coordinator in computing and len(study.sites) < 3:
        text += f". {study.coordinator} holds no cells and computes because there are only two sites"
    return text


def map_labels(adata: AnnData, session: Session | RemoteSession, *, copy: bool = False) -> AnnData | None:
    """Label cells by their nearest neighbours in references that stay at other sites.

    At the site that the study names as `query`, its cells are labelled. At any other, its labelled cells serve as
    references and stay there; nothing is written, and cells without a label are left out.

    Parameters
    ----------
    adata
        Cells to label, or references. `adata.obsm[use_rep]` must lie in one space at all sites.
    session
        This site's place in a study of `map-labels`, from `cl.join(kit)`; the study says the options.

    Returns
    -------
    `None`, or a labelled copy if `copy=True`. Sets the following fields:

    `adata.obs[key_added]` : :class:`pandas.Series`
        The label most of the `n_neighbors` nearest references carry (``category``), or ``unknown``.
    `adata.obs[f"{key_added}_share"]` : :class:`pandas.Series`
        The share of neighbours that carry it (``float``), if `share`.
    `adata.obs[f"{key_added}_{level}"]` : :class:`pandas.Series`
        What goes with the label, for every column of `levels`.
    """
    adata, _ = WORKFLOW.at_site(adata, session, copy=copy)
    return adata if copy else None


def site(session: Session, adata: AnnData, options: Options) -> Outcome:
    agree_on_space(session, options.use_rep, adata)
    if session.me != options.query:
        x, names = references(adata, options)
        if options.prototypes:
            x, names = metacells(x, names, options.prototypes, session.rng("prototypes"))
        label_cells(session, options, x, names)
        return Outcome(adata, computed_by(session, options))
    mapped, labels = label_cells(session, options, cells.embedding(adata, options.use_rep), None)
    names = np.array([*labels, UNKNOWN], dtype=object)
    share = None if mapped.votes is None else mapped.votes / options.n_neighbors
    cells.write_labels(adata, options.key_added, names[mapped.labels], share)
    return Outcome(adata, computed_by(session, options) | summary(adata, options))


def assist(session: Session, options: Options) -> Outcome:
    """The part of a party without cells."""
    agree_on_space(session, options.use_rep)
    label_cells(session, options, None, None)
    return Outcome(None, computed_by(session, options))


def computed_by(session: Session, options: Options) -> dict[str, Any]:
    computing = computing_parties(session.study, Party(options.query), options.computing)
    return {"computing": list(computing), "note": who_computes(session.study, computing)}


def references(adata: AnnData, options: Options) -> tuple[Any, Any]:
    """Rows and label names of the labelled cells."""
    cells.check_cells(adata, use_rep=options.use_rep, label_key=options.label_key)
    labels = cells.labels_of(adata, options.label_key, options.levels)
    known = np.array([label is not None for label in labels])
    names = np.array(labels, dtype=object)[known].astype(str)
    if options.labels:
        strange = ~np.isin(names, options.labels)
        if strange.any():
            raise DataError(
                f"{int(strange.sum())} cells carry {len(set(names[strange]))} label(s) in"
                f" adata.obs[{options.label_key!r}] that are not among the {len(options.labels)} of the study's"
                " vocabulary; rename them, or agree on a longer list: labels="
            )
    return cells.embedding(adata, options.use_rep)[known], names


def check_references(adata: AnnData, options: Options) -> None:
    references(adata, options)


def metacells(x: Any, names: Any, per_label: int, rng: np.random.Generator) -> tuple[Any, Any]:
    """Means of groups of cells (metacells), at most `per_label` for each label: Lloyd's algorithm, 20 steps."""
    rows, labels = [], []
    for name in np.unique(names):
        mine = x[names == name]
        if len(mine) <= per_label:
            centres = mine
        else:
            centres = mine[rng.choice(len(mine), per_label, replace=False)]
            for _ in range(20):
                nearest = ((mine**2).sum(1)[:, None] - 2 * mine @ centres.T + (centres**2).sum(1)).argmin(1)
                counts = np.bincount(nearest, minlength=per_label)
                sums = np.zeros_like(centres)
                np.add.at(sums, nearest, mine)
                centres = np.where(counts[:, None] > 0, sums / np.maximum(counts, 1)[:, None], centres)
        rows.append(centres)
        labels += [name] * len(centres)
    return np.concatenate(rows), np.array(labels)


def label_cells(session: Session, options: Options, x: Any, names: Any) -> tuple[Any, tuple[str, ...]]:
    """All parties: agree on the terms, then on the labels. `x` are queries if there are no `names`."""
    plan, query, hub = session.study, Party(options.query), session.coordinator
    computing = computing_parties(plan, query, options.computing)
    sites = tuple(p for p in plan.sites if p != query)
    agreed = mapping_terms.Params(
        hub, query, sites, computing, options.n_neighbors, options.labels, options.bound or 0.0, plan.auxiliaries
    )
    if x is None:
        role = mapping_terms.coordinator if session.me == hub else mapping_terms.helper
        terms = session.run(role, agreed)
    else:
        step = 0 if plan.mode in ("hardened", "semi-honest") else 1  # 0: rounded up to an eighth
        own = () if names is None or options.labels else tuple(sorted({str(n) for n in names}))
        norm = float(np.sqrt((x**2).sum(1).max()))
        mine = mapping_terms.LocalInput(x.shape[1], len(x), mapping_terms.rounded(len(x), step), norm, own)
        _check_bound(norm, options)
        terms = session.run(mapping_terms.owner, agreed, mine)
        if names is not None:
            session.charge_queries(query, queries(terms))
    core = private_knn.Params(
        query,
        sites,
        computing,
        terms.queries,
        terms.rows,
        terms.dims,
        terms.labels,
        terms.bound,
        options.n_neighbors,
        options.precision,
        options.share,
        farthest(session, options, terms.bound, x, names),
    )
    module, params = protocol_of(plan, core)
    if x is None and plan.mode == "plain" and session.me != hub:
        session.attend(params)
        return None, terms.labels
    if x is None:
        return session.run(module.coordinator if plan.mode == "plain" else module.helper, params), terms.labels
    if names is None:
        return session.run(module.querier, params, x), terms.labels
    order = {name: i for i, name in enumerate(terms.labels)}
    return session.run(module.holder, params, x, np.array([order[n] for n in names])), terms.labels


def farthest(session: Session, options: Options, bound: float, x: Any, names: Any) -> float:
    """All parties: how far from every reference a cell may be; 0 for any distance."""
    if not options.known_share:
        return options.max_distance or 0.0
    plan, query = session.study, Party(options.query)
    sites = tuple(p for p in plan.sites if p != query)
    params = reference_distances.Params(
        query, sites, session.coordinator, bound, options.known_share, tuple(plan.auxiliaries)
    )
    if x is None:
        role = reference_distances.coordinator if session.me == session.coordinator else reference_distances.listener
        found = session.run(role, params)
    elif names is None:
        found = session.run(reference_distances.querier, params)
    else:
        found = session.run(reference_distances.site, params, x, session.thresholds())
    return float(found)


def queries(terms: mapping_terms.Terms) -> int:
    """Query cells of a run: what it costs of the budget that a reference site has for the querier.

    It is the announced number, rounded up. No more cells can be labelled: shares of exactly so many rows are read.
    """
    return terms.queries


def protocol_of(study: Study, core: private_knn.Params) -> tuple[Any, Any]:
    if study.mode == "plain":
        return plain_knn, plain_knn.Params(core, study.coordinator)
    if study.mode == "published":
        return published_knn, published_knn.Params(core)
    if study.mode == "semi-honest":
        return private_knn, core
    return verified_knn, verified_knn.Params(core)


def _check_bound(norm: float, options: Options) -> None:
    if options.bound is not None and norm > options.bound:
        raise DataError(
            f"adata.obsm[{options.use_rep!r}] has cells farther from the origin than bound={options.bound:g}, which"
            " the study agreed on; nothing was sent. Clean the data, or agree on a larger bound."
        )


def check(adata: AnnData, options: Options) -> list[str]:
    """Raise `DataError` if these cells cannot take part; return what the user should know."""
    norms = np.sqrt((cells.embedding(adata, options.use_rep) ** 2).sum(1))
    _check_bound(float(norms.max()), options)
    usual = float(np.median(norms[norms > 0])) if norms.any() else 0.0
    if far := int((norms > mapping_terms.APART * usual).sum() if usual else 0):
        raise DataError(
            f"adata.obsm[{options.use_rep!r}] has {far} cell(s) more than {mapping_terms.APART:g} times as far from the"
            " origin as half of all cells; beside them, all others look alike. Remove them, or make the embedding anew."
        )
    notes = []
    if options.label_key not in adata.obs:
        notes.append(
            f"adata.obs[{options.label_key!r}] is missing: these cells can be labelled, and are not references"
        )
    return notes + note_on_space(options.use_rep)


# ---- the workflow ----------------------------------------------------------------------------------------------------


def check_study(study: Study, options: Options) -> None:
    computing_parties(study, Party(options.query), options.computing)
    if options.known_share and study.mode in ("published", "plain"):
        raise ParameterError(
            f"mode '{study.mode}' does not choose max_distance; pass max_distance=, or leave known_share out"
        )


def warnings(study: Study, options: Options) -> list[str]:
    """Who computes, and what happens to cells that are like no reference, before anything starts."""
    notes = []
    if options.max_distance is None and not options.known_share:
        notes.append(
            "cells of a type that no reference has get a label too; known_share=0.98 calls some unknown, and few others"
        )
    if study.mode == "plain":
        return notes
    return [*notes, who_computes(study, computing_parties(study, Party(options.query), options.computing))]


def summary(adata: AnnData, options: Options) -> dict[str, Any]:
    """What the querier may want to see first; with its own labels, if it has any, how often they agree."""
    found = adata.obs[options.key_added].astype(str)
    made: dict[str, Any] = {"cells": len(found), "unknown": int((found == UNKNOWN).sum())}
    made["cells_per_label"] = {str(k): int(v) for k, v in found.value_counts().items()}
    if options.label_key in adata.obs and not adata.obs[options.label_key].isna().all():
        known = ~adata.obs[options.label_key].isna().to_numpy()
        made |= scores(adata.obs[options.label_key][known].astype(str).to_numpy(), found[known].to_numpy())
    return made


def figures(outcomes: Mapping[str, Outcome], options: Options) -> list[Any]:
    adata = outcomes[options.query].adata if options.query in outcomes else None
    if adata is None or options.key_added not in adata.obs:
        return []
    points = cells.embedding(adata, options.use_rep)
    points = points if points.shape[1] > 1 else np.column_stack([points, np.zeros(len(points))])
    found = adata.obs[options.key_added].astype(str).tolist()
    own = options.label_key if options.label_key != options.key_added else ""
    known = ~adata.obs[own].isna().to_numpy() if own in adata.obs else np.zeros(len(found), bool)
    truth = adata.obs[own][known].astype(str).tolist() if known.any() else []
    order = [str(n) for n in np.unique([*found, *truth])]  # the same colours in both figures
    title = f"Cells of {options.query} by mapped label"
    made = [draw.embedding(points, found, title=title, about="Mapped cells", order=order)]
    if truth:
        title = f"Cells of {options.query} by their own label"
        made.append(draw.embedding(points[known], truth, title=title, order=order))
        mapped = [f for f, k in zip(found, known, strict=True) if k]
        title = "Own against mapped labels"
        made.append(draw.confusion(truth, mapped, title=title, rows="own label", columns="mapped label"))
    return made


WORKFLOW = Workflow(
    name="map-labels",
    summary="Label one site's cells by nearest references at other sites, without revealing them.",
    options=Options,
    modes=modes_of("map-labels"),
    site=site,
    coordinator=assist,
    auxiliary=assist,
    check=check,
    brings=check_references,
    reads=lambda options, site: ("use_rep",) if site == options.query else ("use_rep", "label_key"),
    writes=("obs[{key_added!r}]",),
    check_study=check_study,
    figures=figures,
    warnings=warnings,
    retired={"round_to": "cell numbers are rounded up to an eighth of their power of two"},
)
