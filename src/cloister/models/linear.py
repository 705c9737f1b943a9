"""A linear classifier of cells, and its file: genes, labels, coefficients, and where they come from."""

from __future__ import annotations

import hashlib
import io
import json
import math
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from cloister import files
from cloister.arrays import F64, I64, Bits
from cloister.errors import DataError
from cloister.models import logistic

FORMAT = "cloister-classifier/1"  # `unknown` by probability
WITH_TYPICALITY = "cloister-classifier/2"
STEP = 1 << 14  # cells at a time


@dataclass(frozen=True)
class LinearModel:
    """Labels from log values of genes, or from an embedding."""

    labels: tuple[str, ...]  # (K,)
    coefficients: F64  # W, (h, K)
    intercept: F64  # (K,)
    genes: tuple[str, ...] = ()  # (h,); empty for an embedding
    common: tuple[str, ...] = ()  # genes over which cells that are labelled are normalised
    kind: str = "counts"  # or "log": what cells have to hold
    names: str = "index"  # or "symbol", "ensembl": how genes are matched
    target_sum: float = 1e4
    use_rep: str | None = None  # the embedding
    space: str = ""  # digest of what made it
    level: float = 0.0  # below this probability, or typicality where there is one, a label is `unknown`
    centers: F64 | None = None  # (K, K): mean score of each label's cells in training
    origin: dict[str, Any] = field(default_factory=dict)  # study, sites, penalty, openings, ε, ...
    typical: F64 | None = None  # (h + 1, K): coefficients and intercepts of typicality
    typical_centers: F64 | None = None  # (K, K): mean typicality of each label's cells in training

    def __post_init__(self) -> None:
        h, K = self.coefficients.shape
        if len(self.labels) != K or self.intercept.shape != (K,) or (self.genes and len(self.genes) != h):
            raise DataError("coefficients, labels and genes of this classifier do not fit together")
        if self.centers is not None and self.centers.shape != (K, K):
            raise DataError("labels and their centers in this classifier do not fit together")
        if (self.typical is None) != (self.typical_centers is None):
            raise DataError("typicality in this classifier lacks its coefficients or its centers")
        shapes = [a.shape for a in (self.typical, self.typical_centers) if a is not None]
        if shapes and shapes != [(h + 1, K), (K, K)]:
            raise DataError("labels and their typicality in this classifier do not fit together")
        if not all(np.all(np.isfinite(a)) for a in self._arrays().values()):
            raise DataError("a coefficient of this classifier is not a finite number")

    def _arrays(self) -> dict[str, F64]:
        names = ("coefficients", "intercept", "centers", "typical", "typical_centers")
        return {name: array for name in names if (array := getattr(self, name)) is not None}

    def scores(self, x: Any) -> F64:
        """(n, K) of cells (n, h), CSR or dense."""
        return _product(x, self.coefficients, self.intercept)

    def probabilities(self, x: Any, *, adapt: bool = False) -> F64:
        """(n, K) of cells (n, h), CSR or dense; with `adapt`, aligned with the cells of training as a whole."""
        z = self.scores(x)
        if adapt:
            if self.centers is None:
                raise DataError("this model does not say where its labels lie, so cells cannot be aligned with them")
            z = logistic.align(z, self.centers)
        return logistic.probabilities(z)

    def is_unknown(self, x: Any, p: F64, *, adapt: bool = False) -> Bits:
        """Which of these cells, with probabilities `p`, are of no type that the model knows."""
        if self.typical is None or self.typical_centers is None:
            unsure: Bits = p.max(axis=1) < self.level
            return unsure
        typicality = _product(x, self.typical[:-1], self.typical[-1])
        if adapt:
            typicality = logistic.align(typicality, self.typical_centers)
        far: Bits = typicality.max(axis=1, initial=-np.inf) < self.level
        return far

    def moved_to(self, x: Any, codes: I64) -> LinearModel:
        """The model for cells that were measured like these labelled ones: their labels have their usual mean scores.

        The shift is the mean over labels of how far the label's cells here are from its center. It stays here.
        """
        here = [k for k in range(len(self.labels)) if np.count_nonzero(codes == k) >= logistic.ALIGN_CELLS]
        if not here or self.centers is None:
            return self

        def shift(values: F64, centers: F64) -> F64:
            away: F64 = np.mean([values[codes == k].mean(axis=0) - centers[k] for k in here], axis=0)
            return away

        moved = replace(self, intercept=self.intercept - shift(self.scores(x), self.centers))
        if self.typical is None or self.typical_centers is None:
            return moved
        typical = self.typical.copy()
        typical[-1] -= shift(_product(x, typical[:-1], typical[-1]), self.typical_centers)
        return replace(moved, typical=typical)

    @property
    def digest(self) -> str:
        """Of everything that decides a label."""
        h = hashlib.sha256(json.dumps(self._meta(), sort_keys=True).encode())
        for array in self._arrays().values():
            h.update(np.ascontiguousarray(array, dtype="<f8").tobytes())
        return h.hexdigest()

    def _meta(self) -> dict[str, Any]:
        names = ("labels", "genes", "common", "kind", "names", "target_sum", "use_rep", "space", "level")
        return {"format": FORMAT if self.typical is None else WITH_TYPICALITY} | {
            name: getattr(self, name) for name in names
        }

    def to_bytes(self) -> bytes:
        """One `.npz` with a JSON text and some arrays; nothing in it could run code."""
        meta = self._meta() | {"origin": self.origin, "digest": self.digest}
        out = io.BytesIO()
        text = np.frombuffer(json.dumps(meta).encode(), np.uint8)
        arrays: dict[str, Any] = self._arrays()
        np.savez_compressed(out, meta=text, **arrays)
        return out.getvalue()

    @classmethod
    def from_bytes(cls, data: bytes, where: str) -> LinearModel:
        try:
            with files.load_arrays(data, where) as kept:
                arrays = {name: kept[name] for name in kept.files}
            meta = json.loads(arrays["meta"].tobytes())
            if meta.pop("format") not in (FORMAT, WITH_TYPICALITY):
                raise DataError(f"{where} is of another version of Cloister")
            digest = meta.pop("digest")
            for name in ("labels", "genes", "common"):
                meta[name] = tuple(str(x) for x in meta[name])
            meta |= {name: np.asarray(a, dtype=np.float64) for name, a in arrays.items() if name != "meta"}
            model = cls(**meta)
        except DataError:
            raise
        except Exception as e:  # every way in which a file can be wrong
            raise DataError(f"{where} is not a classifier of Cloister ({type(e).__name__})") from None
        if model.digest != digest:
            raise DataError(f"{where} was changed after it was written: its digest does not fit")
        return model


def _product(x: Any, coefficients: F64, intercept: F64) -> F64:
    """Some cells at a time."""
    parts = [np.asarray(x[start : start + STEP] @ coefficients) + intercept for start in range(0, x.shape[0], STEP)]
    return np.concatenate(parts) if parts else np.zeros((0, len(intercept)))


def folds_of(codes: I64, folds: int, rng: np.random.Generator) -> I64:
    """A fold 0, 1, … for every cell, so that every label's cells are spread over all of them."""
    fold = np.zeros(len(codes), np.int64)
    for code in np.unique(codes):
        at = np.flatnonzero(codes == code)
        fold[rng.permutation(at)] = (np.arange(len(at)) + rng.integers(folds)) % folds
    return fold


def hold_out(codes: I64, share: float, rng: np.random.Generator) -> I64:
    """Positions of the validation cells: a share of every label's cells, rounded; few cells all train."""
    held = []
    for code in np.unique(codes[codes >= 0]):
        at = np.flatnonzero(codes == code)
        count = min(math.floor(share * len(at) + 0.5), len(at) - 1)
        held.append(rng.permutation(at)[:count])
    return np.sort(np.concatenate(held)) if held else np.zeros(0, np.int64)
