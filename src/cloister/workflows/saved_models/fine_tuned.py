"""A classifier that `fine-tune` trained, at work on AnnData: labels and features of new cells."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from cloister import files
from cloister.arrays import F64, Array
from cloister.cells import tables as cells
from cloister.cells.spaces import check_space, edges_of, space_of
from cloister.errors import DataError, MissingExtra
from cloister.models.classifier import Tokens
from cloister.models.learner import Table, augment_by
from cloister.models.scgpt import ScGPT, tokenize
from cloister.workflows.saved_models.cell_classifier import label_cells, majority
from cloister.workflows.saved_models.gene_tokens import csr_rows, gene_tokens

if TYPE_CHECKING:
    from anndata import AnnData

    from cloister.models.learner import Examples
    from cloister.models.scgpt import ScGPT

try:
    from cloister.models.classifier import Network
except ImportError:
    raise MissingExtra("torch", "models") from None


@dataclass(frozen=True)
class Inputs:
    """How cells become what a network takes in; it stands in the model file."""

    model: str  # "mlp" | "scgpt" | "cnn" | "resnet" | "vit"
    use_rep: str | None = None
    layer: str | None = None
    binning: str = "cell"  # of scgpt: by each cell's own quantiles, or "none": the values are bins
    gene_key: str | None = None
    image_shape: tuple[int, ...] = ()
    rotation: float = 0.0  # degrees, in training
    seed: int = 0
    space: str = ""  # digest of what made the embedding
    edges: str = ""  # digest of the bin edges

    @classmethod
    def of(cls, adata: AnnData, **fields: Any) -> Inputs:
        """With the digests of these cells' space and bin edges."""
        plain = cls(**fields)
        space = space_of(adata, plain.use_rep) if plain.model == "mlp" else ""
        return dataclasses.replace(plain, space=space, edges=edges_of(adata) if plain.binned else "")

    @property
    def binned(self) -> bool:
        return self.model == "scgpt" and self.binning == "none"

    def check(self, adata: AnnData) -> None:
        """Raise unless these cells are in the same space, or in the same bins, as those of training."""
        if self.model == "mlp" and self.use_rep is not None:
            check_space(adata, self.use_rep, self.space)
        if self.binned and self.edges != edges_of(adata):
            raise DataError(
                f"the values in {self.layer or 'X'} come from other bin edges than those of training; bin the cells "
                "with the study's edges (adata.uns['cloister']['bin_edges'])"
            )

    def examples(self, adata: AnnData, loaded: ScGPT | None = None) -> Examples:
        import torch

        if self.model == "mlp":
            return Table(torch.from_numpy(cells.embedding(adata, self.use_rep).astype(np.float32)))
        if self.model in ("cnn", "resnet", "vit"):
            h, w, c = self.image_shape
            if math.prod(self.image_shape) != adata.n_vars:
                raise DataError(f"images of {self.image_shape} have {h * w * c} values, X {adata.n_vars}")
            x = cells.embedding(adata, None).astype(np.float32)
            x = x / (255.0 if x.max() > 1.5 else 1.0) - 0.5
            images = torch.from_numpy(x.reshape(-1, h, w, c)).permute(0, 3, 1, 2).contiguous()
            return Table(images, augment_by(self.rotation))
        if loaded is None:
            raise DataError("this model stands on an scGPT checkpoint; pass pretrained= with its folder")
        cells.check_cells(adata, layer=self.layer, need_names=self.gene_key is None)
        matrix = cells.loaded(adata, self.layer)
        ids, names = gene_tokens(adata, self.gene_key, loaded), [str(name) for name in adata.obs_names]
        return Tokens(
            tokenize(csr_rows(matrix), ids, names, loaded, binned=self.binned, cls_value=0.0, seed=self.seed), loaded
        )


@dataclass(frozen=True)
class FineTuned:
    """A trained network, and how cells go into it.

    >>> model = FineTuned.load("model.npz")
    >>> labels = model.predict(adata)
    """

    network: Network
    inputs: Inputs
    pretrained: ScGPT | None = None

    @property
    def labels(self) -> tuple[str, ...]:
        return self.network.labels

    @property
    def module(self) -> Any:
        return self.network.module

    @property
    def digest(self) -> str:
        return self.network.digest

    def predict_proba(self, adata: AnnData) -> F64:
        """The probability of every label for every cell, (n_cells, n_labels)."""
        return np.asarray(self.network.probabilities(self._examples(adata)))

    def predict(
        self,
        adata: AnnData,
        *,
        layer: str | None = None,
        unknown: bool = True,
        majority_over: str | None = None,
        key_added: str | None = None,
    ) -> Array:
        """One label per cell, as `CellClassifier.predict`; `unknown` has no level here and calls no cell so."""
        if layer is not None and layer != self.inputs.layer:
            raise DataError(f"the model was trained on {self.inputs.layer or 'X'}, not on layer '{layer}'")
        if majority_over is not None and majority_over not in adata.obs:
            raise DataError(f"adata.obs[{majority_over!r}] is missing; cluster the cells first, or name another column")
        p = self.predict_proba(adata)
        labels = label_cells(p, self.labels, 0.0)
        if majority_over is not None:
            labels = majority(labels, adata.obs[majority_over])
        if key_added is not None:
            cells.write_labels(adata, key_added, labels, p.max(axis=1), share_name="confidence")
        return labels

    def features(self, adata: AnnData) -> F64:
        """What the last layer sees of every cell, (n_cells, width): an embedding that all sites share."""
        return np.asarray(self.network.features(self._examples(adata)))

    def _examples(self, adata: AnnData) -> Examples:
        self.inputs.check(adata)
        examples = self.inputs.examples(adata, self.pretrained)
        wanted = self.network.blueprint.inputs
        if self.inputs.model == "mlp" and examples.x.shape[1] != wanted:  # type: ignore[attr-defined]
            where = f"adata.obsm[{self.inputs.use_rep!r}]" if self.inputs.use_rep else "adata.X"
            found = examples.x.shape[1]  # type: ignore[attr-defined]
            raise DataError(f"{where} has {found} columns; the model was trained on {wanted}")
        return examples

    def to_bytes(self) -> bytes:
        return self.network.to_bytes(dataclasses.asdict(self.inputs))

    def save(self, path: str | Path) -> Path:
        return files.write(path, self.to_bytes())

    @classmethod
    def load(cls, path: str | Path, pretrained: ScGPT | str | Path | None = None) -> FineTuned:
        """Read a model file; `pretrained` is the checkpoint, or its folder, that a tuned scGPT stands on."""
        loaded = ScGPT.load(pretrained) if isinstance(pretrained, str | Path) else pretrained
        network, fields = Network.load(path, loaded)
        try:
            inputs = Inputs(**{**fields, "image_shape": tuple(fields["image_shape"])})
        except (TypeError, KeyError):
            raise DataError(f"{path} does not say how cells go into it; train it again with this version") from None
        return cls(network, inputs, loaded)
