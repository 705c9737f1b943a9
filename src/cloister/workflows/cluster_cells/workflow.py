"""Cluster the cells of all sites together: Leiden on shared prototypes, applied at each site (`cluster-cells`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from cloister.cells import tables as cells
from cloister.cells.spaces import space_of
from cloister.errors import MissingExtra, ParameterError
from cloister.session import Outcome, RemoteSession, Session
from cloister.workflows import Workflow
from cloister.workflows.cluster_cells import common_clusters, shared_prototypes
from cloister.workflows.cluster_cells.common_clusters import Clusters
from cloister.workflows.cluster_cells.figures import figures
from cloister.workflows.modes import modes_of
from cloister.workflows.options import check_min_donors, option

if TYPE_CHECKING:
    from anndata import AnnData


@dataclass(frozen=True)
class Options:
    use_rep: str = option("X_integrated", "embedding in obsm, one space for all sites")
    resolution: float = option(1.0, "resolution of Leiden, as in scanpy: larger gives more clusters")
    n_neighbors: int = option(15, "neighbours of a point in the graph, the point included, as in scanpy")
    n_prototypes: int = option(1000, "largest number of prototypes")
    min_cells: int = option(10, "smallest number of a site's own cells behind any opened number", opens=True)
    donor_key: str | None = option(None, "column of obs with donors; without it, cells are counted")
    min_donors: int = option(
        3, "smallest number of a site's own donors behind any opened number, with donor_key", opens=True
    )
    label_key: str = option(
        "cell_type", "column of obs that is set against the clusters in the figures, if it exists", drawn=True
    )
    key_added: str = option("cluster", "name in obs")

    def __post_init__(self) -> None:
        if not self.resolution > 0:
            raise ParameterError(f"option 'resolution' must be above 0, found {self.resolution}")
        if not 2 <= self.n_neighbors <= 200:
            raise ParameterError(f"option 'n_neighbors' must be from 2 to 200, found {self.n_neighbors}")
        if not 2 <= self.n_prototypes <= 10_000:
            raise ParameterError(f"option 'n_prototypes' must be from 2 to 10000, found {self.n_prototypes}")
        if self.min_cells < 2:
            raise ParameterError(f"option 'min_cells' must be at least 2, found {self.min_cells}")
        check_min_donors(self.min_donors)


def cluster_cells(adata: AnnData, session: Session | RemoteSession, *, copy: bool = False) -> AnnData | None:
    """Cluster cells together with those of all other sites, so that cluster 3 is the same at every site.

    Parameters
    ----------
    adata
        Cells in one space that all sites share, such as that of `integrate`. Nothing else of them is read.
    session
        This site's place in a study of `cluster-cells`; the study says the options.

    Returns
    -------
    `None`, or an annotated copy if `copy=True`. Sets the following fields:

    `adata.obs[key_added]` : categorical
        `"0"`, `"1"`, …: the largest cluster over all sites first. A site may lack some.
    `adata.obs[key_added + "_votes"]` : float
        The share of the nearest points that are in that cluster.
    `adata.uns[key_added]` : dict
        `resolution`, `modularity`, and `sizes`: cells of each cluster over all sites, about.
    """
    adata, _ = WORKFLOW.at_site(adata, session, copy=copy)
    return adata if copy else None


def site(session: Session, adata: AnnData, options: Options) -> Outcome:
    mine = shared_prototypes.Cells(
        cells.embedding(adata, options.use_rep),
        None if options.donor_key is None else cells.donor_codes(adata, options.donor_key),
        space_of(adata, options.use_rep),
        session.thresholds(min_cells=options.min_cells, min_donors=options.min_donors),
    )
    found = session.run(common_clusters.site, params_of(session, options), mine)
    result = summary(found)
    write(adata, options, found, result)
    return Outcome(adata, result)


def coordinator(session: Session, options: Options) -> Outcome:
    """Add up what the sites send, and find the clusters."""
    return Outcome(None, summary(session.run(common_clusters.coordinator, params_of(session, options))))


def params_of(session: Session, options: Options) -> common_clusters.Params:
    base = shared_prototypes.Params(
        session.sites, session.coordinator, options.use_rep, options.n_prototypes, options.min_cells, options.min_donors
    )
    return common_clusters.Params(base, options.resolution, options.n_neighbors, session.study.seed)


def summary(found: Clusters) -> dict[str, Any]:
    total = float(found.prototypes.cells.sum())
    shares = np.bincount(found.codes, minlength=len(found)) / len(found.codes)
    return {
        "clusters": len(found),
        "cells": int(total),
        "sizes": {str(k): round(float(share) * total) for k, share in enumerate(shares)},
        "prototypes": len(found.prototypes),
        "modularity": found.modularity,
        "sums": len(found.prototypes.trail),
    }


def write(adata: AnnData, options: Options, found: Clusters, result: dict[str, Any]) -> None:
    names = [str(k) for k in range(len(found))]
    adata.obs[options.key_added] = pd.Categorical.from_codes(found.cells, names)
    adata.obs[f"{options.key_added}_votes"] = found.votes
    adata.uns[options.key_added] = {
        "resolution": options.resolution,
        "modularity": found.modularity,
        "sizes": np.array([result["sizes"][name] for name in names]),
    }


def check(adata: AnnData, options: Options) -> list[str]:
    """Raise `DataError` if these cells cannot take part; return what the user should know."""
    try:
        import igraph  # noqa: F401
    except ImportError:
        raise MissingExtra("igraph", "cluster") from None
    x = cells.embedding(adata, options.use_rep)
    notes = []
    if options.donor_key is not None:
        donors = cells.donor_codes(adata, options.donor_key)
        if len(np.unique(donors)) < options.min_donors:
            notes.append(
                f"fewer than min_donors = {options.min_donors} donors here: this site adds nothing, and receives the"
                " clusters"
            )
    if len(x) < options.min_cells:
        notes.append(
            f"fewer than min_cells = {options.min_cells} cells here: this site adds nothing, and receives the clusters"
        )
    if not space_of(adata, options.use_rep):
        notes.append(
            f"adata.uns[{options.use_rep!r}] does not say what made the embedding: whether all sites have the same "
            "space cannot be checked"
        )
    return notes


WORKFLOW = Workflow(
    name="cluster-cells",
    summary="Cluster all sites' cells together: Leiden on shared prototypes, from secure sums.",
    options=Options,
    modes=modes_of("cluster-cells"),
    site=site,
    coordinator=coordinator,
    check=check,
    figures=figures,
    writes=("obs[{key_added!r}]",),
)
