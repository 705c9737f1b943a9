"""Draw the cells of all sites on one map: UMAP of shared prototypes, applied at each site (`shared-map`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from cloister.cells import tables as cells
from cloister.cells.spaces import space_of
from cloister.errors import ParameterError
from cloister.session import Outcome, RemoteSession, Session
from cloister.workflows import Workflow
from cloister.workflows.cluster_cells import shared_prototypes
from cloister.workflows.modes import modes_of
from cloister.workflows.options import check_min_donors, option
from cloister.workflows.saved_models.shared_map import SharedMap
from cloister.workflows.shared_map import common_map
from cloister.workflows.shared_map.common_map import Map
from cloister.workflows.shared_map.figures import figures

if TYPE_CHECKING:
    from anndata import AnnData


@dataclass(frozen=True)
class Options:
    use_rep: str = option("X_integrated", "embedding in obsm, one space for all sites")
    n_neighbors: int = option(15, "neighbours of a point in UMAP, as in scanpy: more show larger structure")
    min_dist: float = option(0.5, "smallest distance of points in UMAP, 0 to 1, as in scanpy")
    own_neighbors: int = option(
        15, "own nearest cells that draw a cell, at sites of 20,000 cells or fewer; 0: the map alone places it"
    )
    n_prototypes: int = option(1000, "largest number of prototypes")
    min_cells: int = option(10, "smallest number of a site's own cells behind any opened number", opens=True)
    donor_key: str | None = option(None, "column of obs with donors; without it, cells are counted")
    min_donors: int = option(
        3, "smallest number of a site's own donors behind any opened number, with donor_key", opens=True
    )
    label_key: str = option(
        "cell_type", "column of obs that colours own cells in the figures, if it exists", drawn=True
    )
    key_added: str = option("X_shared_map", "name in obsm and uns")

    def __post_init__(self) -> None:
        if not 2 <= self.n_neighbors <= 200:
            raise ParameterError(f"option 'n_neighbors' must be from 2 to 200, found {self.n_neighbors}")
        if not 0 <= self.min_dist <= 1:
            raise ParameterError(f"option 'min_dist' must be from 0 to 1, found {self.min_dist}")
        if not 0 <= self.own_neighbors <= 200:
            raise ParameterError(f"option 'own_neighbors' must be from 0 to 200, found {self.own_neighbors}")
        if not 2 <= self.n_prototypes <= 10_000:
            raise ParameterError(f"option 'n_prototypes' must be from 2 to 10000, found {self.n_prototypes}")
        if self.min_cells < 2:
            raise ParameterError(f"option 'min_cells' must be at least 2, found {self.min_cells}")
        check_min_donors(self.min_donors)


def shared_map(adata: AnnData, session: Session | RemoteSession, *, copy: bool = False) -> Any:
    """Place cells on one UMAP of all sites' cells, so that a place of the map means the same at every site.

    Parameters
    ----------
    adata
        Cells in one space that all sites share, such as that of `integrate`. Nothing else of them is read.
    session
        This site's place in a study of `shared-map`; the study says the options.

    Returns
    -------
    The model (`SharedMap`), with which cells that come later are placed by `place`; or `(adata, model)` if
    `copy=True`. Sets the following fields:

    `adata.obsm[key_added]` : array (n_cells, 2)
        Positions on the map. `cl.pl.embedding` draws them.
    `adata.uns[key_added]` : dict
        `density`, shares of all sites' cells in the places of a grid over `span`; `cells`, how many cells these are;
        `space`, the digest of the map.
    """
    adata, outcome = WORKFLOW.at_site(adata, session, copy=copy)
    return (adata, outcome.model) if copy else outcome.model


def site(session: Session, adata: AnnData, options: Options) -> Outcome:
    mine = shared_prototypes.Cells(
        cells.embedding(adata, options.use_rep),
        None if options.donor_key is None else cells.donor_codes(adata, options.donor_key),
        space_of(adata, options.use_rep),
        session.thresholds(min_cells=options.min_cells, min_donors=options.min_donors),
    )
    found = session.run(common_map.site, params_of(session, options), mine)
    model = model_of(session, options, found, mine.space)
    model.write(adata, options.key_added, found.cells)
    return Outcome(adata, summary(found), model=model)


def coordinator(session: Session, options: Options) -> Outcome:
    """Add up what the sites send, and fit the map."""
    found = session.run(common_map.coordinator, params_of(session, options))
    return Outcome(None, summary(found))


def params_of(session: Session, options: Options) -> common_map.Params:
    base = shared_prototypes.Params(
        session.sites, session.coordinator, options.use_rep, options.n_prototypes, options.min_cells, options.min_donors
    )
    return common_map.Params(base, options.n_neighbors, options.min_dist, session.study.seed, options.own_neighbors)


def model_of(session: Session, options: Options, found: Map, source: str) -> SharedMap:
    origin = {"study": session.study.name, "sites": [*session.sites], "cells": int(found.prototypes.cells.sum())}
    return SharedMap(found.points, found.positions, options.use_rep, source, origin)


def summary(found: Map) -> dict[str, Any]:
    return {
        "cells": int(found.prototypes.cells.sum()),
        "prototypes": len(found.prototypes),
        "points": len(found.points),
        "sums": len(found.prototypes.trail),
    }


def check(adata: AnnData, options: Options) -> list[str]:
    """Raise `DataError` if these cells cannot take part; return what the user should know."""
    x = cells.embedding(adata, options.use_rep)
    notes = []
    if options.donor_key is not None:
        donors = cells.donor_codes(adata, options.donor_key)
        if len(np.unique(donors)) < options.min_donors:
            notes.append(
                f"fewer than min_donors = {options.min_donors} donors here: this site adds nothing, and receives the"
                " map"
            )
    if len(x) < options.min_cells:
        notes.append(
            f"fewer than min_cells = {options.min_cells} cells here: this site adds nothing, and receives the map"
        )
    if not space_of(adata, options.use_rep):
        notes.append(
            f"adata.uns[{options.use_rep!r}] does not say what made the embedding: whether all sites have the same "
            "space cannot be checked"
        )
    return notes


def files(outcome: Outcome) -> dict[str, bytes]:
    return {} if outcome.model is None else {"model.npz": outcome.model.to_bytes()}


WORKFLOW = Workflow(
    name="shared-map",
    summary="Draw all sites' cells on one UMAP: fitted on shared prototypes from secure sums, applied at each site.",
    options=Options,
    modes=modes_of("shared-map"),
    site=site,
    coordinator=coordinator,
    check=check,
    files=files,
    model=("model.npz", lambda path, options: SharedMap.load(path)),
    figures=figures,
    writes=("obsm[{key_added!r}]", "uns[{key_added!r}]"),
)
