"""Choose highly variable genes within the batches of all sites, as Seurat v3 does (`choose-genes`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from cloister.cells import tables as cells
from cloister.cells.genes import check_unique, plain_name
from cloister.errors import DataError, ParameterError
from cloister.session import Outcome, RemoteSession, Session
from cloister.workflows import Workflow
from cloister.workflows.choose_genes import variable_genes as protocol
from cloister.workflows.choose_genes.figures import figures
from cloister.workflows.choose_genes.variable_genes import Chosen
from cloister.workflows.common import gene_moments
from cloister.workflows.modes import modes_of
from cloister.workflows.options import check_min_donors, option
from cloister.workflows.saved_models.integration import batch_names
from cloister.workflows.shared_pca.workflow import own_names

if TYPE_CHECKING:
    from anndata import AnnData


@dataclass(frozen=True)
class Options:
    n_top_genes: int = option(2000, "genes to choose")
    batch_key: str | None = option(None, "column of obs with batches; a site is one if none")
    layer: str | None = option(None, "layer that holds raw counts; X by default")
    names: Literal["index", "symbol", "ensembl"] = option(
        "index", "gene names to match by: as they stand, or symbols or Ensembl ids from var"
    )
    min_batch_cells: int = option(50, "smallest number of cells of a batch that takes part")
    min_cells: int = option(10, "smallest number of a batch's cells that express a gene with a rank", opens=True)
    donor_key: str | None = option(None, "column of obs that names each cell's donor; without it, cells are counted")
    min_donors: int = option(
        3, "smallest number of a batch's donors that express a gene with a rank, with donor_key", opens=True
    )
    key_added: str = option("highly_variable", "name in var")

    def __post_init__(self) -> None:
        if not 2 <= self.n_top_genes <= 20_000:
            raise ParameterError(f"option 'n_top_genes' must be from 2 to 20000, found {self.n_top_genes}")
        if self.min_cells < 2 or self.min_batch_cells < self.min_cells:
            raise ParameterError("option 'min_cells' must be at least 2, and 'min_batch_cells' no less than that")
        check_min_donors(self.min_donors)


def choose_genes(adata: AnnData, session: Session | RemoteSession, *, copy: bool = False) -> AnnData | None:
    """Choose the genes that vary most within the batches of all sites, in the style of Seurat v3.

    In each batch, genes are ranked by their variance beside that of genes with the same mean. Genes that rank high in
    most batches are chosen, so differences between batches choose none.

    Parameters
    ----------
    adata
        Raw counts, sparse or dense.
    session
        This site's place in a study of `choose-genes`; the study says the options.

    Returns
    -------
    `None`, or an annotated copy if `copy=True`. Sets the following fields:

    `adata.var[key_added]` : bool
        Whether the gene is chosen; the same genes at every site.
    `adata.var[key_added + "_nbatches"]`, `adata.var[key_added + "_rank"]` : float
        In how many batches the gene is among the first, and its mean rank there; NaN where it is in none.
    """
    adata, _ = WORKFLOW.at_site(adata, session, copy=copy)
    return adata if copy else None


def site(session: Session, adata: AnnData, options: Options) -> Outcome:
    donor = None if options.donor_key is None else cells.donor_codes(adata, options.donor_key)
    names = own_names(adata, options.names)
    mine = protocol.Cells(
        gene_moments.Cells(tuple(names), cells.rows_of(adata, options.layer), None, donor),
        np.unique(batch_names(adata, options.batch_key), return_inverse=True)[1].astype(np.int64),
        session.thresholds(min_cells=options.min_cells, min_donors=options.min_donors),
    )
    found = session.run(protocol.site, params_of(session, options), mine)
    write(adata, options.key_added, names, found)
    return Outcome(adata, summary(found))


def coordinator(session: Session, options: Options) -> Outcome:
    """Add up the ranks, and choose."""
    return Outcome(None, summary(session.run(protocol.coordinator, params_of(session, options))))


def params_of(session: Session, options: Options) -> protocol.Params:
    return protocol.Params(
        session.sites,
        session.coordinator,
        options.n_top_genes,
        options.min_batch_cells,
        options.min_cells,
        options.min_donors,
    )


def write(adata: AnnData, key: str, names: list[str], found: Chosen) -> None:
    at = {name: i for i, name in enumerate(names)}
    place = np.array([at[plain_name(name)] for name in found.genes])
    picked, batches, rank = np.zeros(adata.n_vars, bool), np.zeros(adata.n_vars), np.full(adata.n_vars, np.nan)
    picked[place], batches[place] = found.chosen, found.batches
    rank[place] = np.where(np.isfinite(found.rank), found.rank, np.nan)
    adata.var[key], adata.var[f"{key}_nbatches"], adata.var[f"{key}_rank"] = picked, batches, rank


def summary(found: Chosen) -> dict[str, Any]:
    picked = found.batches[found.chosen].astype(int)
    order = np.lexsort((found.rank, -found.batches))[:20]
    return {
        "genes": len(found.genes),
        "chosen": int(found.chosen.sum()),
        "batches": found.all_batches,
        "chosen_by_batches": {str(k): int((picked == k).sum()) for k in range(1, found.all_batches + 1)},
        "first": [found.genes[i] for i in order if found.chosen[i]],
    }


def check(adata: AnnData, options: Options) -> list[str]:
    """Raise `DataError` if these cells cannot take part; return what the user should know."""
    cells.check_donors(adata, options.donor_key, options.min_donors)
    seen = cells.check_cells(adata, layer=options.layer)
    assert seen is not None
    if seen.kind != "counts":
        raise DataError(f"expected counts, found {seen.kind} values; pass layer= with raw counts")
    check_unique(own_names(adata, options.names), "Gene names")
    names, sizes = np.unique(batch_names(adata, options.batch_key), return_counts=True)
    notes = []
    if len(few := names[sizes < options.min_batch_cells]):
        notes.append(
            f"{len(few)} batches have fewer than {options.min_batch_cells} cells (e.g. '{few[0]}'): they rank no genes"
        )
    if options.n_top_genes >= adata.n_vars:
        notes.append(
            f"only {adata.n_vars} genes here, no more than n_top_genes={options.n_top_genes}: all may be chosen"
        )
    return notes


WORKFLOW = Workflow(
    name="choose-genes",
    summary="Choose the genes that vary most within the batches of all sites, from one secure sum of ranks.",
    options=Options,
    modes=modes_of("choose-genes"),
    site=site,
    coordinator=coordinator,
    check=check,
    figures=figures,
    writes=("var[{key_added!r}]",),
)
