"""Put the cells of all sites into one space, the PCA of all of them together (`shared-pca`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, cast

import numpy as np
import scipy.sparse

from cloister.cells import tables as cells
from cloister.cells.genes import GeneIdKind, check_unique, gene_names, plain_name
from cloister.cells.missing_genes import fill_missing
from cloister.cells.spaces import digest_of
from cloister.errors import DataError, ParameterError
from cloister.report.figures import curves, embedding
from cloister.session import Outcome, RemoteSession, Session
from cloister.workflows import Workflow
from cloister.workflows.modes import modes_of
from cloister.workflows.options import check_min_donors, option
from cloister.workflows.shared_pca import shared_pca as protocol

if TYPE_CHECKING:
    from anndata import AnnData

TARGET_SUM, MAX_VALUE = 1e4, 10.0  # counts per cell after normalisation; where scaled values are clipped
POINTS = 20_000  # cells of a site that are drawn, at most


@dataclass(frozen=True)
class Options:
    n_components: int = option(50, "number of components of the shared space")
    n_top_genes: int = option(2000, "number of highly variable genes")
    genes_key: str | None = option(
        None, "column of var that is true for the genes to use, such as 'highly_variable'; by default all compete"
    )
    layer: str | None = option(None, "layer with the values; X by default")
    kind: Literal["counts", "log"] = option("counts", "values at every site: raw counts or log-normalised")
    names: Literal["index", "symbol", "ensembl"] = option(
        "index", "gene names to match by: var_names, or symbols or Ensembl ids from var"
    )
    library_key: str | None = option(
        None, "column of obs with library sizes; by default the sum over all genes of the file"
    )
    scale: bool = option(default=True, help="divide each gene by its pooled standard deviation")
    min_cells: int = option(50, "minimum number of cells at a site")
    donor_key: str | None = option(None, "column of obs with donor names; without it, thresholds count cells only")
    min_donors: int = option(
        3, "minimum number of a site's own donors behind each of its sums; needs donor_key", opens=True
    )
    min_expressing: int = option(
        10,
        "minimum number of a site's own cells that express a gene; with fewer, the gene counts as zero at that site",
        opens=True,
    )
    key_added: str = option("X_shared_pca", "key of obsm for the result")

    def __post_init__(self) -> None:
        if not 1 <= self.n_components < self.n_top_genes:
            raise ParameterError(
                f"option 'n_components' must be at least 1 and below n_top_genes, found {self.n_components} of"
                f" {self.n_top_genes}"
            )
        if self.n_top_genes > 10_000:
            raise ParameterError(f"option 'n_top_genes' must be at most 10000, found {self.n_top_genes}")
        if self.min_cells < 2:
            raise ParameterError(f"option 'min_cells' must be at least 2, found {self.min_cells}")
        check_min_donors(self.min_donors)
        if self.min_expressing < 2:
            raise ParameterError(f"option 'min_expressing' must be at least 2, found {self.min_expressing}")


def shared_pca(adata: AnnData, session: Session | RemoteSession, *, copy: bool = False) -> AnnData | None:
    """Put cells into the principal components of all sites' cells together.

    Normalisation, choice of genes, scaling and components are those that scanpy computes on the pooled cells. It
    corrects no batch effect: a site's cells lie where they would in a plain pooled PCA, apart from others' if they
    were measured differently.

    Parameters
    ----------
    adata
        Raw counts (or log values with `kind="log"`, at every site alike), sparse or dense.
    session
        This site's place in a study of `shared-pca`, from `cl.join(kit)`; the study says the options.

    Returns
    -------
    `None`, or an annotated copy if `copy=True`. Sets the following fields:

    `adata.obsm[key_added]` : array (n_cells, n_components)
        The cells in the shared space.
    `adata.varm[key_added]` : array (n_genes, n_components)
        The components; zero for genes that were not chosen.
    `adata.uns[key_added]` : dict
        `variance`, `variance_ratio`, and `genes`, `mean`, `deviation`, `center` in the components' order; and what
        else `place_in_space` needs for cells that come later.
    """
    adata, _ = WORKFLOW.at_site(adata, session, copy=copy)
    return adata if copy else None


def site(session: Session, adata: AnnData, options: Options) -> Outcome:
    mine = cells_of(adata, options.names, options.layer, options.library_key, options.genes_key)
    if options.donor_key is not None:
        mine = replace(mine, donor=cells.donor_codes(adata, options.donor_key))
    own = session.thresholds(min_cells=options.min_expressing, min_donors=options.min_donors)
    space, scores = session.run(protocol.site, params_of(session, options), mine, own)
    scaling = [options.kind, TARGET_SUM, options.scale, MAX_VALUE]
    write_space(adata, options.key_added, space, scores, own_names(adata, options.names), scaling)
    read = dict(zip(("kind", "target_sum", "scale", "max_value"), scaling, strict=True))
    adata.uns[options.key_added] |= {"common": np.array(space.common, dtype=object), "names": options.names, **read}
    if options.genes_key is not None:
        adata.uns[options.key_added]["genes_key"] = options.genes_key
    return Outcome(adata, summary(space))


def coordinator(session: Session, options: Options) -> Outcome:
    """Add up what the sites send, and hand the components out."""
    return Outcome(None, summary(session.run(protocol.coordinator, params_of(session, options))))


def summary(space: protocol.Space) -> dict[str, Any]:
    ratio = space.variance / space.total_variance
    return {"cells": int(space.cells), "genes": len(space.genes), "variance_ratio": [float(v) for v in ratio]}


def params_of(session: Session, options: Options) -> protocol.Params:
    return protocol.Params(
        session.sites,
        session.coordinator,
        options.kind,
        options.n_top_genes,
        options.n_components,
        TARGET_SUM,
        options.scale,
        MAX_VALUE,
        options.min_cells,
        options.min_expressing,
        options.min_donors,
    )


def own_names(adata: AnnData, names: str) -> list[str]:
    if names == "index":
        return [plain_name(str(name)) for name in adata.var_names]
    return gene_names(adata.var, cast(GeneIdKind, names))


def cells_of(
    adata: AnnData, names: str, layer: str | None, library_key: str | None, genes_key: str | None = None
) -> protocol.Cells:
    library = None if library_key is None else np.asarray(adata.obs[library_key], dtype=np.float64)
    rows, own = cells.rows_of(adata, layer), own_names(adata, names)
    if genes_key is None:
        return protocol.Cells(tuple(own), rows, library)
    if library is None and cells.expression_kind(adata, layer) == "counts":
        library = np.maximum(library_sizes(adata, layer), 1.0)  # over all genes, before some are chosen
    keep = np.flatnonzero(np.asarray(adata.var[genes_key], dtype=bool))
    chosen = scipy.sparse.vstack([part[:, keep] for _, part in cells.chunks(adata, layer)]).tocsr()
    return protocol.Cells(tuple(own[i] for i in keep), chosen, library)


def library_sizes(adata: AnnData, layer: str | None) -> Any:
    return np.concatenate([np.asarray(part.sum(axis=1)).ravel() for _, part in cells.chunks(adata, layer)])


def place_in_space(
    adata: AnnData,
    like: AnnData,
    *,
    key: str = "X_shared_pca",
    layer: str | None = None,
    library_key: str | None = None,
) -> None:
    """Put cells that come later into the space that a run of `shared-pca` made. Nothing is sent, and nobody moves.

    Parameters
    ----------
    adata
        Counts or log values, as in the run, with the genes that the sites had in common. A few may be missing: above
        5 % of the space's weight that is logged, above 30 % it is an error.
    like
        This site's cells of the run, with the space in `varm[key]` and `uns[key]`.
    layer, library_key
        As in the run.

    Returns
    -------
    Nothing. Sets `adata.obsm[key]`, and in `adata.uns[key]` the digest of the space.
    """
    told = like.uns.get(key, {})
    if key not in like.varm or "common" not in told:
        raise DataError(f"the cells of the run do not hold the space '{key}'; run shared-pca, and pass its result")
    found = cells.expression_kind(adata, layer)
    if found != told["kind"]:
        raise DataError(f"the space was made of {told['kind']} values, found {found} values; pass layer=")
    mine = cells_of(adata, str(told["names"]), layer, library_key)
    if "genes_key" in told and library_key is None and found == "counts":
        mine = replace(mine, library=np.maximum(library_sizes(adata, layer), 1.0))
    check_unique(list(mine.names), "Gene names")
    at = {name: i for i, name in enumerate(own_names(like, str(told["names"])))}
    genes = tuple(map(str, told["genes"]))
    V = np.asarray(like.varm[key])[[at[name] for name in genes]]
    weights = dict(zip(genes, np.abs(V).sum(axis=1).tolist(), strict=True))
    names, rows = fill_missing(mine.names, mine.x, list(map(str, told["common"])), weights, "space")
    mine = protocol.Cells(names, rows, mine.library)
    mean, deviation, center, variance = (np.asarray(told[x]) for x in ("mean", "deviation", "center", "variance"))
    common = tuple(map(str, told["common"]))
    space = protocol.Space(genes, mean, deviation, center, V, variance, 0.0, int(told["cells"]), common)
    scaling = (float(told["target_sum"]), bool(told["scale"]), float(told["max_value"]))
    params = protocol.Params((), "", str(told["kind"]), len(genes), V.shape[1], *scaling)  # type: ignore[arg-type]
    adata.obsm[key] = protocol.place(params, space, mine)
    adata.uns[key] = {"space": str(told["space"])}


def write_space(
    adata: AnnData, key: str, space: protocol.Space, scores: Any, names: list[str], scaling: list[Any]
) -> None:
    at = {name: i for i, name in enumerate(names)}
    components = np.zeros((adata.n_vars, space.components.shape[1]))
    components[[at[name] for name in space.genes]] = space.components
    adata.obsm[key] = scores
    adata.varm[key] = components
    adata.uns[key] = {
        "variance": space.variance,
        "variance_ratio": space.variance / space.total_variance,
        "genes": np.array(space.genes, dtype=object),
        "mean": space.mean,
        "deviation": space.deviation,
        "center": space.center,
        "cells": space.cells,
        "space": digest_of(list(space.genes), space.mean, space.deviation, space.center, space.components, scaling),
    }


def check(adata: AnnData, options: Options) -> list[str]:
    """Raise `DataError` if these cells cannot take part; return what the user should know."""
    cells.check_donors(adata, options.donor_key, options.min_donors)
    seen = cells.check_cells(adata, layer=options.layer)
    assert seen is not None
    found = seen.kind
    if found != options.kind:
        fix = "pass layer= with raw counts, or kind='log' at every site" if options.kind == "counts" else "pass layer="
        raise DataError(f"expected {options.kind} values, found {found} values; {fix}")
    names = own_names(adata, options.names)
    check_unique(names, "Gene names")
    if options.genes_key is not None:
        if options.genes_key not in adata.var or adata.var[options.genes_key].dtype.kind not in "bO":
            raise DataError(
                f"adata.var[{options.genes_key!r}] must be there, and true or false for every gene; the workflow"
                " choose-genes writes 'highly_variable'"
            )
        kept = int(np.asarray(adata.var[options.genes_key], dtype=bool).sum())
        if kept <= options.n_components:
            raise DataError(
                f"adata.var[{options.genes_key!r}] names {kept} genes, which give no {options.n_components} components;"
                " pass a smaller n_components="
            )
    if adata.n_vars <= options.n_components:
        raise DataError(f"{adata.n_vars} genes give no {options.n_components} components; pass a smaller n_components=")
    if adata.n_obs < options.min_cells:
        raise DataError(
            f"{adata.n_obs} cells, fewer than {options.min_cells}: sums over so few come close to single cells; "
            "leave this site out, or lower min_cells= if all agree"
        )
    if options.library_key is not None:
        if options.library_key not in adata.obs:
            raise DataError(f"adata.obs[{options.library_key!r}] is missing; pass the column with the library sizes")
        sizes = np.asarray(adata.obs[options.library_key], dtype=np.float64)
        if not np.all(sizes > 0):  # NaN is not above 0
            raise DataError(f"adata.obs[{options.library_key!r}] must be above 0 for every cell")
    notes = ["a shared PCA corrects no batch effect: sites that measured differently stay apart"]
    if options.n_top_genes > adata.n_vars:
        notes.append(f"only {adata.n_vars} genes here, fewer than n_top_genes={options.n_top_genes}: all may be used")
    return notes


def figures(outcomes: Mapping[str, Outcome], options: Options) -> list[Any]:
    """The cells that are here in the first two components, by site; how much each component explains."""
    here = {s: o.adata for s, o in outcomes.items() if o.adata is not None and options.key_added in o.adata.obsm}
    made: list[Any] = []
    if here and options.n_components > 1:
        some = {s: np.linspace(0, a.n_obs - 1, min(a.n_obs, POINTS)).astype(int) for s, a in here.items()}
        points = np.concatenate([a.obsm[options.key_added][some[s], :2] for s, a in here.items()])
        of = [site for site in here for _ in some[site]]
        made.append(embedding(points, of, title="Cells in the shared space, by site", order=list(here)))
    ratio: list[float] = next(
        (o.result["variance_ratio"] for o in outcomes.values() if "variance_ratio" in o.result), []
    )
    if len(ratio):
        shares = {"this one": ratio, "up to this one": np.cumsum(ratio).tolist()}
        made.append(curves(shares, title="Variance explained", xlabel="component", ylabel="share of the variance"))
    return made


WORKFLOW = Workflow(
    name="shared-pca",
    summary="Embed all sites' cells in one space: the PCA of all cells, from secure sums.",
    options=Options,
    modes=modes_of("shared-pca"),
    site=site,
    coordinator=coordinator,
    check=check,
    reads=lambda options, site: ("layer", "genes_key", "donor_key", "library_key"),
    writes=("obsm[{key_added!r}]", "uns[{key_added!r}]"),
    figures=figures,
    retired={"target_sum": "it is 10,000, as in scanpy", "max_value": "it is 10, as in scanpy's scale"},
)
