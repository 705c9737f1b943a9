"""Move the cells of all sites until batches mix: Harmony from secure sums (`integrate`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from cloister.arrays import F64, Array
from cloister.cells import tables as cells
from cloister.cells.spaces import digest_of, space_of
from cloister.errors import DataError, ParameterError
from cloister.models.harmony import Settings
from cloister.models.mixing_scores import batch_asw, clisi, ilisi, label_asw
from cloister.papers import federated_harmony
from cloister.session import Outcome, RemoteSession, Session
from cloister.workflows import Workflow
from cloister.workflows.integrate import pooled_harmony
from cloister.workflows.integrate.figures import colours_of, joint_space, mixing_bars
from cloister.workflows.integrate.harmony_steps import WIDEST, Cells, Integrated, Params
from cloister.workflows.modes import modes_of
from cloister.workflows.options import check_min_donors, option
from cloister.workflows.saved_models.integration import Integration, batch_names

if TYPE_CHECKING:
    from anndata import AnnData

NEIGHBOURS, SAMPLE = 10, 2000  # of a cell among the site's own, and of how many cells
FEW = 30  # cells of a batch


@dataclass(frozen=True)
class Options:
    use_rep: str = option("X_shared_pca", "embedding in obsm to begin with, one space for all sites")
    batch_key: str | None = option(None, "column of obs with batches; a site is one if none")
    n_clusters: int = option(0, "number of clusters; 0: a twentieth of the cells of a mean site, 2 to 100")
    theta: float = option(2.0, "strength of mixing")
    sigma: float = option(0.1, "softness of clusters", retired=True)
    ridge: float = option(0.06, "caution with which batches are moved")
    rounds: int = option(3, "corrections")
    updates: int = option(1, "number of cluster updates per correction", retired=True)
    sweeps: int = option(3, "number of sums of cluster sizes per update, at which batches are balanced", retired=True)
    min_cells: int = option(50, "smallest number of cells of a site")
    min_cluster_cells: int = option(10, "smallest number of similar cells of a site whose mean may enter a sum")
    donor_key: str | None = option(None, "column of obs with donors; without it, cells are counted")
    min_donors: int = option(3, "smallest number of donors of such a group, with donor_key")
    max_share: float = option(0.9, "largest share of all cells that one site may claim; 1 disables the bound")
    label_key: str = option("cell_type", "column of obs that colours own cells in the picture", drawn=True)
    key_added: str = option("X_integrated", "name in obsm")

    def __post_init__(self) -> None:
        if self.n_clusters < 0 or self.n_clusters == 1 or self.n_clusters > 1000:
            raise ParameterError(f"option 'n_clusters' must be 0, or from 2 to 1000, found {self.n_clusters}")
        for name in ("rounds", "updates", "sweeps"):
            if not 1 <= getattr(self, name) <= 50:
                raise ParameterError(f"option '{name}' must be from 1 to 50, found {getattr(self, name)}")
        if not (self.sigma > 0 and self.ridge > 0 and self.theta >= 0):
            raise ParameterError("options 'sigma' and 'ridge' must be above 0, 'theta' not negative")
        if self.min_cells < 2 or self.min_cluster_cells < 2:
            raise ParameterError("options 'min_cells' and 'min_cluster_cells' must be at least 2")
        if not 0 < self.max_share <= 1:
            raise ParameterError(f"option 'max_share' must lie between 0 and 1, found {self.max_share}")
        check_min_donors(self.min_donors)


def integrate(adata: AnnData, session: Session | RemoteSession, *, copy: bool = False) -> Any:
    """Move cells so that those of all sites and batches lie together, kind by kind.

    Parameters
    ----------
    adata
        Cells in one space that all sites share, such as that of `shared_pca`. Nothing else of them is read.
    session
        This site's place in a study of `integrate`; the study says the options.

    Returns
    -------
    The model (`Integration`), with which cells that come later are placed by `transform`; or `(adata, model)` if
    `copy=True`. Sets the following fields:

    `adata.obsm[key_added]` : array (n_cells, n_columns)
        The cells where they lie now.
    `adata.uns[key_added]` : dict
        `space`, the digest of the space; `cells`, how many lie in it; how far sites were mixed before and after; the
        picture's axes, and how many cells of other sites lie in each place of it.
    """
    adata, outcome = WORKFLOW.at_site(adata, session, copy=copy)
    return (adata, outcome.model) if copy else outcome.model


def site(session: Session, adata: AnnData, options: Options) -> Outcome:
    names = batch_names(adata, options.batch_key)
    batches, codes = np.unique(names, return_inverse=True)
    mine = Cells(
        cells.embedding(adata, options.use_rep),
        codes.astype(np.int64),
        None if options.donor_key is None else cells.donor_codes(adata, options.donor_key),
        space_of(adata, options.use_rep),
        session.thresholds(min_cells=options.min_cluster_cells, min_donors=options.min_donors),
    )
    protocol = federated_harmony if session.mode == "published" else pooled_harmony
    found: Integrated = session.run(protocol.site, params_of(session, options), mine)
    model = model_of(session, options, found, tuple(map(str, batches)), mine.space)
    result = summary(found) | own_mixing(found, model.batches, mine.x, codes)
    result["scores_here"] = scores(adata, options.label_key, mine.x, found.moved, codes)
    write(adata, options.key_added, found, model.space, result)
    return Outcome(adata, result, model=model)


def coordinator(session: Session, options: Options) -> Outcome:
    """Add up what the sites send, and follow the clusters."""
    protocol = federated_harmony if session.mode == "published" else pooled_harmony
    return Outcome(None, summary(session.run(protocol.coordinator, params_of(session, options))))


def settings_of(session: Session, options: Options) -> Settings:
    return Settings(
        options.n_clusters,
        options.sigma,
        options.theta,
        options.ridge,
        options.rounds,
        options.updates,
        options.sweeps,
        options.donor_key is not None,
        session.study.seed,
    )


def params_of(session: Session, options: Options) -> Params:
    settings = settings_of(session, options)
    return Params(session.sites, session.coordinator, options.use_rep, settings, options.min_cells, options.max_share)


def model_of(
    session: Session, options: Options, found: Integrated, batches: tuple[str, ...], source: str
) -> Integration:
    settings = settings_of(session, options)
    origin = {"study": session.study.name, "study_digest": session.study.digest.hex(), "sites": list(session.sites)}
    return Integration(
        settings,
        found.trail,
        found.own,
        batches,
        options.batch_key,
        options.use_rep,
        source,
        digest_of("integrate", source, asdict(settings), found.digest),
        options.min_cells,
        origin | {"sums": found.sums},
    )


def summary(found: Integrated) -> dict[str, Any]:
    expected, before, after = found.mixing.pooled
    return {
        "cells": found.trail.cells,
        "clusters": int(found.trail.masses.shape[1]),
        "sums": found.sums,
        "own_site": {"before": before, "after": after, "if_mixed": expected},
    }


def own_mixing(found: Integrated, batches: tuple[str, ...], x: F64, codes: Array) -> dict[str, Any]:
    """What only this site knows: how far its own cells, and its batches, are mixed with the others."""

    def row(expected: float, before: float, after: float) -> dict[str, float]:
        return {"before": float(before), "after": float(after), "if_mixed": float(expected)}

    m = found.mixing
    result: dict[str, Any] = {"own_site_here": row(*m.site)}
    if len(batches) > 1:
        result["own_batch_here"] = {
            name: row(*three) for name, *three in zip(batches, m.expected, m.before, m.after, strict=True)
        }
        shares = np.bincount(codes, minlength=len(batches)) / len(codes)
        near = own_neighbours(x, codes), own_neighbours(found.moved, codes)
        result["neighbours_of_own_batch"] = row(float(np.square(shares).sum()), *near)
    return result


def scores(adata: AnnData, label_key: str, before: F64, after: F64, codes: Array) -> dict[str, dict[str, float]]:
    """LISI and silhouette widths of this site's own cells, of which some are evenly chosen, before and after."""
    some = np.unique(np.linspace(0, len(codes) - 1, min(len(codes), SAMPLE)).astype(int))
    batch, found = codes[some].astype(np.int64), {}
    if len(np.unique(batch)) > 1:
        found["ilisi"] = {"before": ilisi(before[some], batch), "after": ilisi(after[some], batch)}
    if label_key in adata.obs:
        named = adata.obs[label_key].notna().to_numpy()[some]
        some, batch = some[named], batch[named]
        label = np.unique(adata.obs[label_key].astype(str).to_numpy()[some], return_inverse=True)[1].astype(np.int64)
        if len(np.unique(label)) > 1:
            found["clisi"] = {"before": clisi(before[some], label), "after": clisi(after[some], label)}
            found["label_asw"] = {"before": label_asw(before[some], label), "after": label_asw(after[some], label)}
            if len(np.unique(batch)) > 1:
                both = batch_asw(before[some], batch, label), batch_asw(after[some], batch, label)
                found["batch_asw"] = dict(zip(("before", "after"), both, strict=True))
    return found


def own_neighbours(x: F64, codes: Array) -> float:
    """Share of a cell's nearest cells of this site that are of its batch; over some cells, evenly chosen."""
    from scipy.spatial import cKDTree

    some = np.unique(np.linspace(0, len(x) - 1, min(len(x), SAMPLE)).astype(int))
    near = cKDTree(x[some]).query(x[some], min(NEIGHBOURS + 1, len(some)))[1][:, 1:]
    return float(np.mean(codes[some][near] == codes[some][:, None]))


def write(adata: AnnData, key: str, found: Integrated, space: str, result: Mapping[str, Any]) -> None:
    picture = found.picture
    adata.obsm[key] = found.moved
    adata.uns[key] = {
        "space": space,
        "cells": found.trail.cells,
        "mixing": {name: dict(result[name]) for name in ("own_site", "own_site_here")},
        "axes": picture.axes,
        "center": picture.center,
        "span": picture.span,
        "others": np.maximum(picture.counts - picture.own, 0.0),
    }


def check(adata: AnnData, options: Options) -> list[str]:
    """Raise `DataError` if these cells cannot take part; return what the user should know."""
    cells.check_donors(adata, options.donor_key, options.min_donors)
    columns = cells.embedding(adata, options.use_rep).shape[1]
    if not 2 <= columns <= WIDEST:
        raise DataError(f"adata.obsm[{options.use_rep!r}] has {columns} columns; from 2 to {WIDEST} are needed")
    if adata.n_obs < options.min_cells:
        raise DataError(
            f"{adata.n_obs} cells, fewer than {options.min_cells}: sums over so few come close to single cells; "
            "leave this site out, or lower min_cells= if all agree"
        )
    notes = []
    if not space_of(adata, options.use_rep):
        notes.append(
            f"adata.uns[{options.use_rep!r}] does not say what made the embedding: whether all sites have the same "
            "space cannot be checked"
        )
    names, sizes = np.unique(batch_names(adata, options.batch_key), return_counts=True)
    if len(few := names[sizes < FEW]):
        notes.append(f"{len(few)} batches have fewer than {FEW} cells (e.g. '{few[0]}'): too few to be moved well")
    return notes


def files(outcome: Outcome) -> dict[str, bytes]:
    return {} if outcome.model is None else {"model.npz": outcome.model.to_bytes()}


def figures(outcomes: Mapping[str, Outcome], options: Options) -> list[Any]:
    """How far sites were mixed; and at every site that is here, its own cells among the others' density."""
    drawn = [mixing_bars(outcomes)] if any("own_site" in o.result for o in outcomes.values()) else []
    here = {s: o.adata for s, o in outcomes.items() if o.adata is not None and options.key_added in o.adata.uns}
    key, label_key, batch_key = options.key_added, options.label_key, options.batch_key
    coloured = {str(n) for s, a in here.items() for n in colours_of(a, s, label_key, batch_key)}
    places = {name: i for i, name in enumerate(sorted(coloured))}
    return drawn + [joint_space(s, a, key, label_key, batch_key, places) for s, a in here.items()]


WORKFLOW = Workflow(
    name="integrate",
    summary="Integrate batches of all sites with Harmony, from secure sums.",
    options=Options,
    modes=modes_of("integrate"),
    site=site,
    coordinator=coordinator,
    check=check,
    files=files,
    model=("model.npz", lambda path, options: Integration.load(path)),
    figures=figures,
    writes=("obsm[{key_added!r}]", "uns[{key_added!r}]"),
    retired={"blocks": "a round balances all clusters at once; use sweeps for the number of balancing steps"},
)
