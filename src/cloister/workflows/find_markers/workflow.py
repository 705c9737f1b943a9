"""Find marker genes of every label against the rest, over the cells and donors of all sites (`find-markers`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import pandas as pd

from cloister.cells import tables as cells
from cloister.cells.genes import check_unique, readable, with_symbols
from cloister.errors import DataError, ParameterError
from cloister.session import Outcome, RemoteSession, Session
from cloister.workflows import Workflow
from cloister.workflows.common import gene_moments
from cloister.workflows.find_markers import pooled_markers as protocol
from cloister.workflows.find_markers.figures import figures
from cloister.workflows.find_markers.pooled_markers import Markers
from cloister.workflows.modes import modes_of
from cloister.workflows.options import check_min_donors, option
from cloister.workflows.shared_pca.workflow import own_names

if TYPE_CHECKING:
    from anndata import AnnData

NAMED = 10  # markers of a label in the result


@dataclass(frozen=True)
class Options:
    label_key: str = option("cluster", "column of obs with clusters or cell types, of one vocabulary at all sites")
    labels: tuple[str, ...] = option((), "all names of labels; collected from the sites if none")
    layer: str | None = option(None, "layer that holds the values; X by default")
    kind: Literal["counts", "log"] = option("counts", "values at every site: raw counts or log-normalised")
    names: Literal["index", "symbol", "ensembl"] = option(
        "index", "gene names to match by: as they stand, or symbols or Ensembl ids from var"
    )
    library_key: str | None = option(
        None, "column of obs with library sizes; by default the sum over all genes of the file"
    )
    target_sum: float = option(1e4, "counts per cell after normalisation", retired=True)
    min_cells: int = option(10, "smallest number of a site's own cells behind any opened number", opens=True)
    donor_key: str | None = option(None, "column of obs with donors; with it, labels are compared over donors as well")
    min_donors: int = option(
        3, "smallest number of a site's own donors behind any opened number, with donor_key", opens=True
    )
    key_added: str = option("markers", "name in uns")

    def __post_init__(self) -> None:
        if not self.target_sum > 0:
            raise ParameterError(f"option 'target_sum' must be above 0, found {self.target_sum}")
        if self.min_cells < 2:
            raise ParameterError(f"option 'min_cells' must be at least 2, found {self.min_cells}")
        if len(set(self.labels)) != len(self.labels) or len(self.labels) == 1:
            raise ParameterError("option 'labels' needs at least two names, each once")
        check_min_donors(self.min_donors)


def find_markers(adata: AnnData, session: Session | RemoteSession, *, copy: bool = False) -> AnnData | None:
    """Find the genes by which cells of each label differ from all others, over all sites.

    Over cells, figures are those of `scanpy.tl.rank_genes_groups` with a t-test on the pooled cells. Over donors, each
    donor's cells of the label are compared with the same donor's other cells.

    Parameters
    ----------
    adata
        Raw counts (or log values with `kind="log"`, at every site alike), with labels in `obs[label_key]`.
    session
        This site's place in a study of `find-markers`; the study says the options.

    Returns
    -------
    `None`, or an annotated copy if `copy=True`. Sets the following fields:

    `adata.uns[key_added]` : :class:`pandas.DataFrame`
        A row per label and gene, best first: `t`, `p`, `fdr`, `log_fold_change` (base 2), `fraction` and
        `fraction_rest` of cells that express the gene; with donors `donors`, `donor_change` (mean log2 ratio),
        `donor_t`, `donor_p`, `donor_fdr`.
    """
    adata, _ = WORKFLOW.at_site(adata, session, copy=copy)
    return adata if copy else None


def site(session: Session, adata: AnnData, options: Options) -> Outcome:
    library = None if options.library_key is None else np.asarray(adata.obs[options.library_key], dtype=np.float64)
    donor = None if options.donor_key is None else cells.donor_codes(adata, options.donor_key)
    mine = protocol.Cells(
        gene_moments.Cells(tuple(own_names(adata, options.names)), cells.rows_of(adata, options.layer), library, donor),
        cells.labels_of(adata, options.label_key),
        session.thresholds(min_cells=options.min_cells, min_donors=options.min_donors),
    )
    found = session.run(protocol.site, params_of(session, options), mine)
    adata.uns[options.key_added] = table_of(found)
    return Outcome(adata, summary(found))


def coordinator(session: Session, options: Options) -> Outcome:
    """Add up what the sites send, and compare the labels."""
    return Outcome(None, summary(session.run(protocol.coordinator, params_of(session, options))))


def params_of(session: Session, options: Options) -> protocol.Params:
    return protocol.Params(
        session.sites,
        session.coordinator,
        options.kind,
        options.target_sum,
        options.labels,
        options.donor_key is not None,
        options.min_cells,
        options.min_donors,
    )


def table_of(found: Markers) -> pd.DataFrame:
    """A row per label and gene, by label and falling t."""
    K, g = len(found.labels), len(found.genes)
    columns: dict[str, Any] = {
        "label": pd.Categorical(np.repeat(np.array(found.labels, object), g), list(found.labels)),
        "gene": np.tile(np.array(found.genes, object), K),
    }
    for name in ("t", "p", "fdr", "log_fold_change", "fraction", "fraction_rest"):
        columns[name] = getattr(found, name).ravel()
    if found.donors.any():
        columns["donors"] = np.repeat(found.donors, g).astype(int)
        for name in ("donor_change", "donor_t", "donor_p", "donor_fdr"):
            columns[name] = getattr(found, name).ravel()
    table = pd.DataFrame(columns)
    table = table[table["t"].notna()].sort_values(["label", "t"], ascending=[True, False], kind="stable")
    table = table.reset_index(drop=True)
    table.index = table.index.astype(str)  # as AnnData files have it
    return with_symbols(table)


def summary(found: Markers) -> dict[str, Any]:
    best: dict[str, list[str]] = {}
    genes = readable(found.genes)
    for k, name in enumerate(found.labels):
        if found.cells[k]:
            order = np.argsort(-found.t[k], kind="stable")[:NAMED]
            best[name] = [genes[i] for i in order if found.t[k, i] > 0]
    result: dict[str, Any] = {
        "genes": len(found.genes),
        "cells": {name: int(n) for name, n in zip(found.labels, found.cells, strict=True) if n},
        "markers": best,
        "left_out": [name for name, n in zip(found.labels, found.cells, strict=True) if not n],
    }
    if found.donors.any():
        there = np.nan_to_num(found.donor_fdr, nan=1.0) < 0.05
        result["donors"] = {name: int(n) for name, n in zip(found.labels, found.donors, strict=True) if n}
        result["over_donors"] = {
            name: int((there[k] & (found.donor_change[k] > 0)).sum()) for k, name in enumerate(found.labels)
        }
    return result


def check(adata: AnnData, options: Options) -> list[str]:
    """Raise `DataError` if these cells cannot take part; return what the user should know."""
    cells.check_donors(adata, options.donor_key, options.min_donors)
    seen = cells.check_cells(adata, layer=options.layer, label_key=options.label_key)
    assert seen is not None
    if seen.kind != options.kind:
        fix = "pass layer= with raw counts, or kind='log' at every site" if options.kind == "counts" else "pass layer="
        raise DataError(f"expected {options.kind} values, found {seen.kind} values; {fix}")
    check_unique(own_names(adata, options.names), "Gene names")
    names = [name for name in cells.labels_of(adata, options.label_key) if name is not None]
    if options.labels and (unknown := sorted(set(names) - set(options.labels))):
        raise DataError(
            f"{len(unknown)} label(s) in adata.obs[{options.label_key!r}] are not in the study's vocabulary (e.g."
            f" '{unknown[0]}'); rename or remove them, or agree on a longer list of labels"
        )
    kinds, sizes = np.unique(names, return_counts=True)
    if options.library_key is not None and (
        options.library_key not in adata.obs
        or not np.all(np.asarray(adata.obs[options.library_key], dtype=np.float64) > 0)
    ):
        raise DataError(f"adata.obs[{options.library_key!r}] must be there, and above 0 for every cell")
    notes = []
    if len(few := kinds[sizes < options.min_cells]):
        notes.append(
            f"{len(few)} label(s) have fewer than {options.min_cells} cells here (e.g. '{few[0]}'): these are only"
            " part of the rest"
        )
    if options.donor_key is None:
        notes.append("without donor_key, cells count as samples: p values are far too small, and only rank genes")
    return notes


WORKFLOW = Workflow(
    name="find-markers",
    summary="Find marker genes of clusters or cell types over all sites' cells and donors, from one secure sum.",
    options=Options,
    modes=modes_of("find-markers"),
    site=site,
    coordinator=coordinator,
    check=check,
    figures=figures,
    reads=lambda options, site: ("layer", "label_key", "donor_key", "library_key"),
    writes=("uns[{key_added!r}]",),
)
