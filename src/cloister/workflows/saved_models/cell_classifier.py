"""A trained linear classifier at work on new cells: `CellClassifier`, what `train-classifier` gives."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import scipy.sparse

from cloister import files
from cloister.arrays import F64, Array
from cloister.cells import tables as cells
from cloister.cells.genes import GeneIdKind, check_unique, gene_names, match_genes, plain_name
from cloister.cells.missing_genes import fill_missing
from cloister.cells.spaces import check_space
from cloister.errors import DataError
from cloister.models.linear import LinearModel
from cloister.workflows.shared_pca import shared_pca

if TYPE_CHECKING:
    from anndata import AnnData

UNKNOWN = "unknown"


@dataclass(frozen=True)
class CellClassifier:
    """Labels for cells that nobody has labelled yet.

    >>> model = CellClassifier.load("model.npz")
    >>> labels = model.predict(adata)
    """

    model: LinearModel

    @property
    def labels(self) -> tuple[str, ...]:
        return self.model.labels

    @property
    def genes(self) -> tuple[str, ...]:
        return self.model.genes

    @property
    def digest(self) -> str:
        return self.model.digest

    def predict_proba(
        self, adata: AnnData, *, layer: str | None = None, library_key: str | None = None, adapt: bool = False
    ) -> F64:
        """The probability of every label for every cell, (n_cells, n_labels)."""
        return self.model.probabilities(self.inputs(adata, layer=layer, library_key=library_key), adapt=adapt)

    def predict(
        self,
        adata: AnnData,
        *,
        layer: str | None = None,
        library_key: str | None = None,
        adapt: bool = False,
        unknown: bool = True,
        majority_over: str | None = None,
        key_added: str | None = None,
    ) -> Array:
        """One label per cell.

        Parameters
        ----------
        adata
            Cells with the genes (or the embedding) that the model was trained on, in any order. A few genes may be
            missing: above 5 % of the model's weight that is logged, above 30 % it is an error.
        layer, library_key
            The layer that holds counts, and a column of `obs` with library sizes, as in training.
        adapt
            Align all these cells together with those of training first. Helps where they were measured otherwise, and
            makes a cell's label depend on the others beside it; for some hundred cells or more.
        unknown
            Call cells `unknown` that are not typical of any label, by the level that held-out cells gave. Models of
            `solver="logistic"`: cells whose most probable label is below a probability.
        majority_over
            A column of `obs` with clusters: every cell gets the most frequent label of its cluster.
        key_added
            Also write `adata.obs[key_added]` and `adata.obs[f"{key_added}_confidence"]`.
        """
        if majority_over is not None and majority_over not in adata.obs:
            raise DataError(f"adata.obs[{majority_over!r}] is missing; cluster the cells first, or name another column")
        x = self.inputs(adata, layer=layer, library_key=library_key)
        p = self.model.probabilities(x, adapt=adapt)
        labels = label_cells(p, self.labels, 0.0)
        if unknown:
            labels[self.model.is_unknown(x, p, adapt=adapt)] = UNKNOWN
        if majority_over is not None:
            labels = majority(labels, adata.obs[majority_over])
        if key_added is not None:
            cells.write_labels(adata, key_added, labels, p.max(axis=1), share_name="confidence")
        return labels

    def inputs(self, adata: AnnData, *, layer: str | None = None, library_key: str | None = None) -> Any:
        """The cells as the model takes them in; other genes, values or spaces than it knows are errors."""
        model = self.model
        if model.use_rep is not None:
            check_space(adata, model.use_rep, model.space)
            x = cells.embedding(adata, model.use_rep)
            if x.shape[1] != len(model.coefficients):
                raise DataError(
                    f"adata.obsm[{model.use_rep!r}] has {x.shape[1]} columns; the model was trained on "
                    f"{len(model.coefficients)}"
                )
            return x
        layer, library_key = self._as_in_training(adata, layer, library_key)
        cells.check_cells(adata, layer=layer)
        found = cells.expression_kind(adata, layer)
        if found != model.kind:
            raise DataError(f"the model was trained on {model.kind} values, found {found} values; pass layer=")
        return self._expression(adata, layer, library_key)

    def _as_in_training(
        self, adata: AnnData, layer: str | None, library_key: str | None
    ) -> tuple[str | None, str | None]:
        """Layer (if it is there) and library sizes that the model was trained with, where none is named."""
        used, sizes = self.model.origin.get("layer"), self.model.origin.get("library_key")
        if layer is None and used is not None and used in cells.layer_names(adata):
            layer = used
        if library_key is None and sizes is not None:
            if sizes not in adata.obs:
                raise DataError(
                    f"the model was trained with library sizes, and adata.obs[{sizes!r}] is missing; add it, or name"
                    " the column that holds them with library_key="
                )
            library_key = sizes
        return layer, library_key

    def _expression(self, adata: AnnData, layer: str | None, library_key: str | None) -> Any:
        model = self.model
        if model.names == "index":
            names = [plain_name(str(name)) for name in adata.var_names]
        else:
            names = gene_names(adata.var, cast(GeneIdKind, model.names))
        check_unique(names, "Gene names")
        needed = model.common if model.kind == "counts" and library_key is None else model.genes
        weights = dict(zip(model.genes, np.abs(model.coefficients).sum(axis=1).tolist(), strict=True))
        known, rows = fill_missing(names, cells.rows_of(adata, layer), needed, weights)
        library = None
        if library_key is not None:
            if library_key not in adata.obs:
                raise DataError(f"adata.obs[{library_key!r}] is missing; pass the column with the library sizes")
            library = np.asarray(adata.obs[library_key], dtype=np.float64)
        like = shared_pca.Params((), "", model.kind, 2, 1, model.target_sum)  # type: ignore[arg-type]
        here = shared_pca.Cells(known, rows, library)
        chosen = match_genes(list(needed), list(model.genes))
        parts = shared_pca.normalised(like, here, needed, len(needed), of_model=True)
        y = scipy.sparse.vstack([y[:, chosen] for y in parts], "csr")
        y.data = np.log1p(y.data)
        return y

    def to_bytes(self) -> bytes:
        return self.model.to_bytes()

    def save(self, path: str | Path) -> Path:
        return files.write(path, self.to_bytes())

    @classmethod
    def load(cls, path: str | Path) -> CellClassifier:
        try:
            data = Path(path).read_bytes()
        except OSError:
            raise DataError(f"there is no model file at {path}") from None
        return cls(LinearModel.from_bytes(data, str(path)))

    def with_origin(self, **origin: Any) -> CellClassifier:
        return CellClassifier(replace(self.model, origin={**self.model.origin, **origin}))

    def __repr__(self) -> str:
        what = f"{len(self.genes)} genes" if self.genes else f"'{self.model.use_rep}'"
        return f"<CellClassifier of {len(self.labels)} labels from {what}, {self.digest[:12]}>"


def label_cells(p: F64, labels: tuple[str, ...], level: float) -> Array:
    called: Array = np.array(labels, dtype=object)[p.argmax(axis=1)]
    called[p.max(axis=1) < level] = UNKNOWN
    return called


def majority(labels: Array, clusters: Any) -> Array:
    """The most frequent label of every cluster, of equally frequent ones the first by name; alone without a cluster."""
    voted = labels.copy()
    names = np.asarray(clusters.astype(object).where(clusters.notna(), None), dtype=object)
    for cluster in {name for name in names if name is not None}:
        at = np.flatnonzero(names == cluster)
        counts = Counter(labels[at])
        voted[at] = min(counts, key=lambda name: (-counts[name], name))
    return voted
