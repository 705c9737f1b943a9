"""Label the cells of one site by their nearest neighbours in references that stay at the others (`map-labels`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from cloister.cells import tables as cells
from cloister.errors import DataError, ParameterError
from cloister.net.seat import Outcome, Seat
from cloister.protocols.knn import mapping_terms, plain_knn, private_knn, published_knn, verified_knn
from cloister.study import Party, Study
from cloister.workflows import Workflow

if TYPE_CHECKING:
    from anndata import AnnData

UNKNOWN = "unknown"


@dataclass(frozen=True)
class Options:
    query: str = field(default="", metadata={"help": "the site whose cells are labelled; all others offer references"})
    label_key: str = field(default="cell_type", metadata={"help": "column of obs with the references' labels"})
    use_rep: str = field(default="X_pca", metadata={"help": "embedding in obsm, in one space at all sites"})
    n_neighbors: int = field(default=10, metadata={"help": "neighbours that vote"})
    key_added: str = field(default="mapped", metadata={"help": "name of the column that is written"})
    share: bool = field(default=False, metadata={"help": "also tell the querier the share of votes of each label"})
    max_distance: float | None = field(
        default=None, metadata={"help": "cells farther than this from every reference are called unknown"}
    )
    labels: tuple[str, ...] = field(
        default=(), metadata={"help": "the agreed vocabulary; by default all label names the sites announce"}
    )
    bound: float | None = field(
        default=None, metadata={"help": "largest Euclidean norm of a cell; by default found under sharing"}
    )
    precision: int = field(
        default=40, metadata={"help": "bits of a distance with its label under sharing; 32 is faster, 64 finer"}
    )
    prototypes: int = field(
        default=0, metadata={"help": "replace each site's references by so many means per label; 0 keeps the cells"}
    )
    round_to: int = field(
        default=0, metadata={"help": "announce cell numbers rounded up to a multiple of this; 0: to an eighth"}
    )
    computing: tuple[str, ...] = field(
        default=(), metadata={"help": "the three parties that compute; by default the querier and two more"}
    )

    def __post_init__(self) -> None:
        if self.n_neighbors < 1:
            raise ParameterError(f"option 'n_neighbors' must be at least 1, found {self.n_neighbors}")
        if self.precision not in range(24, 65):
            raise ParameterError(f"option 'precision' must be from 24 to 64, found {self.precision}")
        if self.prototypes < 0 or self.round_to < 0:
            raise ParameterError("options 'prototypes' and 'round_to' must not be negative")
        for key in ("bound", "max_distance"):
            value = getattr(self, key)
            if value is not None and not value > 0:
                raise ParameterError(f"option '{key}' must be above 0, found {value}")
        if len(set(self.labels)) != len(self.labels):
            raise ParameterError("option 'labels' names a label twice")
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


def map_labels(
    adata: AnnData,
    study: Seat,
    *,
    query: str,
    label_key: str = "cell_type",
    use_rep: str = "X_pca",
    n_neighbors: int = 10,
    key_added: str = "mapped",
    share: bool = False,
    max_distance: float | None = None,
    labels: Sequence[str] = (),
    bound: float | None = None,
    precision: int = 40,
    prototypes: int = 0,
    round_to: int = 0,
    computing: Sequence[str] = (),
    copy: bool = False,
) -> AnnData | None:
    """Label cells by their nearest neighbours in references that stay at other sites.

    Parameters
    ----------
    adata
        Cells to label. `adata.obsm[use_rep]` must lie in the space of the references.
    query
        The site that asks; the same at all parties, as all options are.
    label_key
        Column of `obs` that holds the references' labels.
    n_neighbors
        Neighbours that vote.
    share
        Whether you also learn the share of votes that each label got.
    max_distance
        Cells farther than this from every reference are called ``unknown``.
    labels
        The vocabulary; by default all label names that the sites announce.
    bound
        Largest Euclidean norm of a cell; by default it is found under sharing, to a quarter of a power of two.
    precision
        Bits of a distance with its label under sharing; 32 is faster, 64 finer.
    prototypes
        Replace each site's references by at most so many means per label.
    round_to
        Announce numbers of cells rounded up to a multiple of this; by default to an eighth of their power of two.
    computing
        The three parties that compute; by default the querier and two more.

    Returns
    -------
    `None`, or a labelled copy if `copy=True`. Sets the following fields:

    `adata.obs[key_added]` : :class:`pandas.Series`
        The label most of the `n_neighbors` nearest references carry (``category``), or ``unknown``.
    `adata.obs[f"{key_added}_share"]` : :class:`pandas.Series`
        The share of neighbours that carry it (``float``), if `share`.
    `adata.uns["cloister"]["map-labels"]` : :class:`str`
        The receipt, one JSON string.

    Reveals
    -------
    hardened : you learn the labels, and rounded numbers of cells; nobody learns anything about a cell, even if one
        party lies. Any two of the three computing parties together could see everything.
    semi-honest : the same as long as all three computing parties follow the protocol; one that does not can read
        labels and embeddings. It costs about half.
    published : the same, and everyone learns the true numbers of cells.
    plain : all sites and the coordinator see your embeddings; the coordinator can compute many references.
    """
    chosen = Options(
        query,
        label_key,
        use_rep,
        n_neighbors,
        key_added,
        share,
        max_distance,
        tuple(labels),
        bound,
        precision,
        prototypes,
        round_to,
        tuple(computing),
    )
    if study.me != chosen.query:
        raise ParameterError(f"'{study.me}' offers references in this study, '{chosen.query}' asks: use offer_labels")
    adata = adata.copy() if copy else adata
    check(adata, chosen)
    x = cells.embedding(adata, chosen.use_rep)
    found, labels = _play(study, chosen, x, None)
    names = np.array([*labels, UNKNOWN], dtype=object)
    share = None if found.votes is None else found.votes / chosen.n_neighbors
    cells.write_labels(adata, chosen.key_added, names[found.labels], share)
    return adata if copy else None


def offer_labels(adata: AnnData, study: Seat, **options: Any) -> None:
    """Let another site's cells be labelled by the labelled cells of this one, which stay here.

    Takes the same options as `map_labels`, and writes nothing. Cells without a label are left out.

    Reveals
    -------
    As `map_labels`; of your cells, only their rounded number and, unless a vocabulary is agreed, your label names.
    """
    chosen = Options(**{name: tuple(x) if isinstance(x, list) else x for name, x in options.items()})
    if study.me == chosen.query:
        raise ParameterError(f"'{study.me}' asks in this study, it offers nothing: use map_labels")
    check(adata, chosen)
    x, names = references(adata, chosen)
    if chosen.prototypes:
        x, names = metacells(x, names, chosen.prototypes, study.rng("prototypes"))
    _play(study, chosen, x, names)


def references(adata: AnnData, options: Options) -> tuple[Any, Any]:
    """Rows and label names of the labelled cells."""
    cells.check_cells(adata, use_rep=options.use_rep, label_key=options.label_key)
    column = adata.obs[options.label_key]
    known = ~column.isna().to_numpy()
    names = column[known].astype(str).to_numpy()
    if options.labels:
        strange = ~np.isin(names, options.labels)
        if strange.any():
            raise DataError(
                f"{int(strange.sum())} cells carry {len(set(names[strange]))} label(s) in"
                f" adata.obs[{options.label_key!r}] that are not among the {len(options.labels)} of the study's"
                " vocabulary; rename them, or agree on a longer list: labels="
            )
    return cells.embedding(adata, options.use_rep)[known], names


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


def assist(study: Seat, options: Options) -> None:
    """The part of a party without cells."""
    _play(study, options, None, None)


def _play(study: Seat, options: Options, x: Any, names: Any) -> tuple[Any, tuple[str, ...]]:
    """All parties: agree on the terms, then on the labels."""
    plan, query, hub = study.study, Party(options.query), study.study.coordinator
    computing = computing_parties(plan, query, options.computing)
    sites = tuple(p for p in plan.sites if p != query)
    agreed = mapping_terms.Params(
        hub, query, sites, computing, options.n_neighbors, options.labels, options.bound or 0.0, plan.auxiliaries
    )
    if x is None:
        role = mapping_terms.coordinator if study.me == hub else mapping_terms.helper
        terms = study.run(role, agreed)
    else:
        step = options.round_to if plan.mode in ("hardened", "semi-honest") else 1
        own = () if names is None or options.labels else tuple(sorted({str(n) for n in names}))
        norm = float(np.sqrt((x**2).sum(1).max()))
        mine = mapping_terms.Holding(x.shape[1], len(x), mapping_terms.rounded(len(x), step), norm, own)
        _check_bound(norm, options)
        terms = study.run(mapping_terms.owner, agreed, mine)
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
        options.max_distance or 0.0,
    )
    module, params = protocol_of(plan, core)
    if x is None:
        if plan.mode == "plain":
            return study.run(module.coordinator if study.me == hub else _idle, params), terms.labels
        return study.run(module.helper, params), terms.labels
    if names is None:
        return study.run(module.querier, params, x), terms.labels
    order = {name: i for i, name in enumerate(terms.labels)}
    return study.run(module.holder, params, x, np.array([order[n] for n in names])), terms.labels


async def _idle(ch: Any, params: Any) -> None:
    """A party that neither holds nor computes."""


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
    x = cells.embedding(adata, options.use_rep)
    _check_bound(float(np.sqrt((x**2).sum(1).max())), options)
    notes = []
    if options.use_rep == "X_pca":
        notes.append("X_pca must be one space for all sites, not each site's own PCA; shared-pca makes such a space")
    return notes


# ---- the workflow ----------------------------------------------------------------------------------------------------


def part(study: Seat, adata: AnnData | None, options: Options) -> Outcome:
    computing = computing_parties(study.study, Party(options.query), options.computing)
    told: dict[str, Any] = {"computing": list(computing), "note": who_computes(study.study, computing)}
    if study.role != "site":
        assist(study, options)
        return Outcome(None, told)
    if adata is None:
        raise DataError("a site needs cells; name them with --data")
    if study.me != options.query:
        offer_labels(adata, study, **vars(options))
        return Outcome(adata, told)
    map_labels(adata, study, **vars(options))
    return Outcome(adata, told | summary(adata, options))


def warnings(study: Study, options: Options) -> list[str]:
    """Who computes, before anything starts."""
    if not options.query:
        raise ParameterError("'map-labels' needs the option 'query': name the site whose cells are labelled")
    if study.mode == "plain":
        return []
    return [who_computes(study, computing_parties(study, Party(options.query), options.computing))]


def summary(adata: AnnData, options: Options) -> dict[str, Any]:
    """What the querier may want to see first; with its own labels, if it has any, how often they agree."""
    found = adata.obs[options.key_added].astype(str)
    made: dict[str, Any] = {"cells": len(found), "unknown": int((found == UNKNOWN).sum())}
    made["cells_per_label"] = {str(k): int(v) for k, v in found.value_counts().items()}
    if options.label_key in adata.obs and not adata.obs[options.label_key].isna().all():
        from cloister.workflows.mapping_baselines import scores

        known = ~adata.obs[options.label_key].isna().to_numpy()
        made |= scores(adata.obs[options.label_key][known].astype(str).to_numpy(), found[known].to_numpy())
    return made


def figures(outcomes: Mapping[str, Outcome], options: Options) -> list[Any]:
    from cloister.report import figures as draw

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
    summary="Label one site's cells by the nearest references of all the others, which nobody shows.",
    options=Options,
    protocols={
        "hardened": "verified_knn",
        "semi-honest": "private_knn",
        "published": "published_knn",
        "plain": "plain_knn",
    },
    part=part,
    check=check,
    figures=figures,
    warnings=warnings,
)
