"""Quality control of the cells of all sites: common cut-offs, and doublet scores (`quality-control`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from cloister.arrays import F64, Bits
from cloister.cells import tables as cells
from cloister.cells.genes import check_unique
from cloister.disclosure import Rows, Thresholds
from cloister.errors import DataError, ParameterError
from cloister.session import Outcome, RemoteSession, Session
from cloister.study import Study
from cloister.workflows import Workflow
from cloister.workflows.common import gene_moments
from cloister.workflows.modes import modes_of
from cloister.workflows.options import option
from cloister.workflows.quality_control import cell_quality as protocol
from cloister.workflows.quality_control.cell_quality import MEASURES, SCORE, Quality
from cloister.workflows.quality_control.figures import figures
from cloister.workflows.shared_pca.workflow import own_names

if TYPE_CHECKING:
    from anndata import AnnData

KEY = "quality_control"
COLUMNS = {"counts": "total_counts", "genes": "n_genes_by_counts", "mito": "pct_counts_mt"}  # scanpy's names
SCORES = "doublet_score"


@dataclass(frozen=True)
class Options:
    layer: str | None = option(None, "layer that holds raw counts; X by default")
    cutoff: float = option(
        5.0, "distance of cut-offs from the pooled median, in median absolute deviations; below 0.5, a quantile"
    )
    mito_prefix: str = option("MT-", "prefix of the names of mitochondrial genes, in upper or lower case")
    doublet_rate: float = option(0.06, "expected fraction of doublets; 0 disables doublet scores")
    drop: bool = option(
        default=False, help="remove cells that fail or are predicted doublets; at a site where these are too few, none"
    )
    donor_key: str | None = option(None, "column of obs that names each cell's donor; without it, cells are counted")

    def __post_init__(self) -> None:
        if not (0 < self.cutoff < 0.5 or 1 <= self.cutoff <= 100):
            raise ParameterError(
                "option 'cutoff' must be from 1 to 100 (median absolute deviations), or above 0 and below 0.5 (a"
                f" quantile), found {self.cutoff}"
            )
        if not 0 <= self.doublet_rate <= 0.5:
            raise ParameterError(f"option 'doublet_rate' must be from 0 to 0.5, found {self.doublet_rate}")
        if not self.mito_prefix:
            raise ParameterError("option 'mito_prefix' must not be empty; a prefix that no gene has disables it")


def quality_control(adata: AnnData, session: Session | RemoteSession, *, copy: bool = False) -> AnnData | None:
    """Flag cells of poor quality by cut-offs that all sites share, and score doublets.

    Cut-offs are those of the pooled cells, on counts, genes and the mitochondrial share. A doublet score is Scrublet's,
    in the principal components of all sites' cells.

    Parameters
    ----------
    adata
        Raw counts, sparse or dense.
    session
        This site's place in a study of `quality-control`; the study says the options.

    Returns
    -------
    `None`, or an annotated copy if `copy=True`. Sets the following fields:

    `adata.obs["total_counts"]`, `["n_genes_by_counts"]`, `["pct_counts_mt"]` : float
        As `scanpy.pp.calculate_qc_metrics`. The last one is missing where no gene has the prefix.
    `adata.obs["qc_pass"]` : bool
        Whether all three are within the cut-offs.
    `adata.obs["doublet_score"]` : float, `adata.obs["predicted_doublet"]` : bool
        A score in (0, 1), and whether it is above the threshold of all sites.
    `adata.uns["quality_control"]` : dict
        `cutoffs`, `threshold` of doublet scores, `sites`, and histograms by site.
    """
    adata, _ = WORKFLOW.at_site(adata, session, copy=copy)
    return adata if copy else None


def site(session: Session, adata: AnnData, options: Options) -> Outcome:
    donor = None if options.donor_key is None else cells.donor_codes(adata, options.donor_key)
    least = session.thresholds(min_cells=Thresholds().min_cells, min_donors=Thresholds().min_donors)
    measured = measures(adata, options)
    mine = protocol.Cells(
        gene_moments.Cells(tuple(own_names(adata, "index")), cells.rows_of(adata, options.layer), None, donor),
        measured,
        least,
    )
    found = session.run(protocol.site, params_of(session, options), mine)
    write(adata, session, found, measured)
    result = summary(session, found)
    keep = adata.obs["qc_pass"].to_numpy(bool)
    result["failed"] = int((~keep).sum())
    if len(found.scores):
        doublet = adata.obs["predicted_doublet"].to_numpy(bool)
        result["predicted_doublets"] = int(doublet.sum())
        keep = keep & ~doublet
    if options.drop:
        result["dropped"] = drop(adata, keep, Rows(adata.n_obs, donor, least))
    return Outcome(adata, result)


def coordinator(session: Session, options: Options) -> Outcome:
    """Add up the histograms and what the space needs."""
    return Outcome(None, summary(session, session.run(protocol.coordinator, params_of(session, options))))


def params_of(session: Session, options: Options) -> protocol.Params:
    return protocol.Params(
        session.sites,
        session.coordinator,
        options.cutoff,
        options.doublet_rate,
        min_cells=Thresholds().min_cells,
        min_donors=Thresholds().min_donors,
        seed=session.study.seed,
    )


def mitochondrial(adata: AnnData, prefix: str) -> Bits:
    return np.array([str(name).upper().startswith(prefix.upper()) for name in adata.var_names], bool)


def measures(adata: AnnData, options: Options) -> F64:
    """Counts, genes and mitochondrial share in per cent of each cell, (n, 3); the last is NaN without such genes."""
    of = mitochondrial(adata, options.mito_prefix)
    found = np.full((adata.n_obs, len(MEASURES)), np.nan)
    for part, block in cells.chunks(adata, options.layer):
        total = np.asarray(block.sum(axis=1)).ravel()
        found[part, 0], found[part, 1] = total, np.asarray((block > 0).sum(axis=1)).ravel()
        if of.any():
            found[part, 2] = 100 * np.asarray(block[:, of].sum(axis=1)).ravel() / np.maximum(total, 1e-12)
    return found


def write(adata: AnnData, session: Session, found: Quality, measured: F64) -> None:
    for m, column in zip(MEASURES, measured.T, strict=True):
        adata.obs[COLUMNS[m.name]] = column
    adata.obs["qc_pass"] = protocol.passes(found.cutoffs, measured)
    if len(found.scores):
        adata.obs[SCORES] = found.scores
        adata.obs["predicted_doublet"] = found.scores > found.threshold
    adata.uns[KEY] = {
        "sites": np.array([str(p) for p in session.sites]),
        "cutoffs": {COLUMNS[name]: np.array(limits) for name, limits in found.cutoffs.items()},
        "threshold": found.threshold,
        "histograms": {
            name: found.histograms[m.name]
            for m, name in ((*((m, COLUMNS[m.name]) for m in MEASURES), (SCORE, SCORES)))
            if m.name in found.histograms
        },
    }


def drop(adata: AnnData, keep: Bits, rows: Rows) -> int:
    """Remove the other cells, and return how many; none unless both parts are empty or large enough.

    Sums over the cells before and after this step differ by the cells that are removed.
    """
    parts = rows.groups(keep.astype(np.int64), 2)
    if not np.all(parts.open | parts.empty) or not keep.any():
        return 0
    adata._inplace_subset_obs(keep)
    return int((~keep).sum())


def summary(session: Session, found: Quality) -> dict[str, Any]:
    result: dict[str, Any] = {
        "cells": {str(p): int(n) for p, n in zip(session.sites, found.cells, strict=True)},
        "cutoffs": {COLUMNS[name]: [round(v, 4) for v in limits] for name, limits in found.cutoffs.items()},
    }
    if np.isfinite(found.threshold):
        result["doublet_threshold"] = found.threshold
    return result


def check(adata: AnnData, options: Options) -> list[str]:
    """Raise `DataError` if these cells cannot take part; return what the user should know."""
    least = Thresholds()
    cells.check_donors(adata, options.donor_key, least.min_donors)
    seen = cells.check_cells(adata, layer=options.layer)
    assert seen is not None
    if seen.kind != "counts":
        raise DataError(f"expected counts, found {seen.kind} values; pass layer= with raw counts")
    check_unique(own_names(adata, "index"), "Gene names")
    if adata.n_obs < least.min_cells:
        raise DataError(
            f"{adata.n_obs} cells, fewer than {least.min_cells}: sums over so few come close to single cells; leave"
            " this site out"
        )
    if options.doublet_rate and adata.n_vars <= protocol.N_COMPONENTS:
        raise DataError(
            f"{adata.n_vars} genes are too few for doublet scores, which need more than {protocol.N_COMPONENTS}; pass"
            " doublet_rate=0"
        )
    notes = []
    if not mitochondrial(adata, options.mito_prefix).any():
        notes.append(
            f"no gene name begins with '{options.mito_prefix}': this site has no mitochondrial share, and no cut-off"
            " on it"
        )
    if options.doublet_rate and adata.n_obs < protocol.FILL:
        notes.append(
            f"fewer than {protocol.FILL} cells: doublet scores here also use cells drawn from prototypes of all sites"
        )
    return notes


def warnings(study: Study, options: Options) -> list[str]:
    """What is open in the security argument, before the run."""
    return [
        "drop: another party can move cut-offs so that two runs drop cells which differ in one, and sums of later steps"
        " then show it; drop cells of one file once, and save them (docs/security/cell_quality.md, open finding)"
    ][: options.drop]


WORKFLOW = Workflow(
    name="quality-control",
    summary="Flag cells of poor quality by cut-offs of all sites' cells, and score doublets, from secure sums.",
    options=Options,
    modes=modes_of("quality-control"),
    site=site,
    coordinator=coordinator,
    check=check,
    figures=figures,
    warnings=warnings,
    writes=(
        "obs['total_counts']",
        "obs['n_genes_by_counts']",
        "obs['pct_counts_mt']",
        "obs['qc_pass']",
        "obs['doublet_score']",
        "obs['predicted_doublet']",
        "uns['quality_control']",
    ),
)
