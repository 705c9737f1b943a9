"""Put the cells of all sites into one space, the PCA of all of them together (`shared-pca`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from cloister.cells import tables as cells
from cloister.cells.genes import check_unique, gene_names, plain_name
from cloister.cells.spaces import digest_of
from cloister.errors import DataError, ParameterError
from cloister.net.seat import Outcome, Seat
from cloister.protocols.sums import shared_pca as protocol
from cloister.workflows import Workflow

if TYPE_CHECKING:
    from anndata import AnnData


@dataclass(frozen=True)
class Options:
    n_components: int = field(default=50, metadata={"help": "components of the shared space"})
    n_top_genes: int = field(default=2000, metadata={"help": "highly variable genes it is made of"})
    layer: str | None = field(default=None, metadata={"help": "layer that holds the values; X by default"})
    kind: Literal["counts", "log"] = field(default="counts", metadata={"help": "what every site holds"})
    names: Literal["index", "symbol", "ensembl"] = field(
        default="index", metadata={"help": "gene names to match by: as they stand, or symbols or Ensembl ids from var"}
    )
    library_key: str | None = field(
        default=None, metadata={"help": "column of obs with each cell's library size; the sum of common genes if none"}
    )
    target_sum: float = field(default=1e4, metadata={"help": "counts per cell after normalisation"})
    scale: bool = field(default=True, metadata={"help": "divide genes by their pooled deviation"})
    max_value: float = field(default=10.0, metadata={"help": "clip scaled values here"})
    min_cells: int = field(default=50, metadata={"help": "least number of cells a site must hold"})
    key_added: str = field(default="X_shared_pca", metadata={"help": "name in obsm"})

    def __post_init__(self) -> None:
        if not 1 <= self.n_components < self.n_top_genes:
            raise ParameterError(
                f"option 'n_components' must be at least 1 and below n_top_genes, found {self.n_components} of"
                f" {self.n_top_genes}"
            )
        if self.n_top_genes > 10_000:
            raise ParameterError(f"option 'n_top_genes' must be at most 10000, found {self.n_top_genes}")
        if not self.target_sum > 0 or not self.max_value > 0 or self.min_cells < 2:
            raise ParameterError("options 'target_sum' and 'max_value' must be above 0, 'min_cells' at least 2")


def shared_pca(
    adata: AnnData,
    study: Seat,
    *,
    n_components: int = 50,
    n_top_genes: int = 2000,
    layer: str | None = None,
    kind: Literal["counts", "log"] = "counts",
    names: Literal["index", "symbol", "ensembl"] = "index",
    library_key: str | None = None,
    target_sum: float = 1e4,
    scale: bool = True,
    max_value: float = 10.0,
    min_cells: int = 50,
    key_added: str = "X_shared_pca",
    copy: bool = False,
) -> AnnData | None:
    """Put cells into the principal components of all sites' cells together.

    Normalisation, choice of genes, scaling and components are those that scanpy computes on the pooled cells. It
    corrects no batch effect: a site's cells lie where they would in a plain pooled PCA, apart from others' if they
    were measured differently.

    Parameters
    ----------
    adata
        Raw counts (or log values with `kind="log"`, at every site alike), sparse or dense.
    library_key
        A column of `adata.obs` with each cell's library size, for files cut to some genes.

    Returns
    -------
    `None`, or an annotated copy if `copy=True`. Sets the following fields:

    `adata.obsm[key_added]` : array (n_cells, n_components)
        The cells in the shared space.
    `adata.varm[key_added]` : array (n_genes, n_components)
        The components; zero for genes that were not chosen.
    `adata.uns[key_added]` : dict
        `variance`, `variance_ratio`, and `genes`, `mean`, `deviation`, `center` in the components' order.

    Reveals
    -------
    coordinator : over all sites together, cells, mean and variance per gene, covariance of the chosen genes; which
        genes each site measured.
    sites : chosen genes with pooled mean and deviation, the components, the number of cells in all.
    """
    adata = adata.copy() if copy else adata
    options = Options(
        n_components,
        n_top_genes,
        layer,
        kind,
        names,
        library_key,
        target_sum,
        scale,
        max_value,
        min_cells,
        key_added,
    )
    check(adata, options)
    space, scores = study.run(protocol.site, params_of(study, options), cells_of(adata, options))
    scaling = [kind, target_sum, scale, max_value]
    write_space(adata, key_added, space, scores, own_names(adata, options), scaling)
    return adata if copy else None


def offer_shared_pca(study: Seat, options: Options) -> protocol.Space:
    """The coordinator's half: add up what the sites send and hand the components out."""
    space: protocol.Space = study.run(protocol.coordinator, params_of(study, options))
    return space


def params_of(study: Seat, options: Options) -> protocol.Params:
    return protocol.Params(
        study.study.sites,
        study.study.coordinator,
        options.kind,
        options.n_top_genes,
        options.n_components,
        options.target_sum,
        options.scale,
        options.max_value,
        options.min_cells,
    )


def own_names(adata: AnnData, options: Options) -> list[str]:
    if options.names == "index":
        return [plain_name(str(name)) for name in adata.var_names]
    return gene_names(adata.var, options.names)


def cells_of(adata: AnnData, options: Options) -> protocol.Cells:
    matrix = adata.X if options.layer is None else adata.layers[options.layer]
    if adata.isbacked:
        matrix = matrix[:]
    library = None
    if options.library_key is not None:
        library = np.asarray(adata.obs[options.library_key], dtype=np.float64)
    return protocol.Cells(tuple(own_names(adata, options)), matrix, library)


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
    cells.check_cells(adata, layer=options.layer)
    found = cells.expression_kind(adata, options.layer)
    if found != options.kind:
        fix = "pass layer= with raw counts, or kind='log' at every site" if options.kind == "counts" else "pass layer="
        raise DataError(f"expected {options.kind} values, found {found} values; {fix}")
    names = own_names(adata, options)
    check_unique(names, "Gene names")
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


def part(study: Seat, adata: AnnData | None, options: Options) -> Outcome:
    if study.role == "site":
        if adata is None:
            raise DataError("a site needs cells; name them with --data")
        shared_pca(adata, study, **vars(options))
        return Outcome(adata, _figures_of(adata.uns[options.key_added]))
    if study.role == "coordinator":
        space = offer_shared_pca(study, options)
        return Outcome(
            None,
            _figures_of(
                {
                    "variance": space.variance,
                    "variance_ratio": space.variance / space.total_variance,
                    "genes": space.genes,
                    "cells": space.cells,
                }
            ),
        )
    return Outcome()


def _figures_of(found: Any) -> dict[str, Any]:
    return {
        "cells": int(found["cells"]),
        "genes": len(found["genes"]),
        "variance_ratio": [float(v) for v in found["variance_ratio"]],
    }


def figures(outcomes: Mapping[str, Outcome], options: Options) -> list[Any]:
    """The cells that are here in the first two components, by site; how much each component explains."""
    from cloister.report.figures import curves, embedding

    here = {s: o.adata for s, o in outcomes.items() if o.adata is not None and options.key_added in o.adata.obsm}
    made: list[Any] = []
    if here and options.n_components > 1:
        points = np.concatenate([a.obsm[options.key_added][:, :2] for a in here.values()])
        of = [site for site, a in here.items() for _ in range(a.n_obs)]
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
    summary="Put all sites' cells into one space: the PCA of all of them together, from secure sums.",
    options=Options,
    protocols={"hardened": "shared_pca"},
    part=part,
    check=check,
    figures=figures,
)
