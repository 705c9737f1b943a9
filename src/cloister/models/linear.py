"""A linear classifier of cells, and its file: genes, labels, coefficients, and where they come from."""

from __future__ import annotations

import hashlib
import io
import json
import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from cloister import files
from cloister.arrays import F64, I64
from cloister.errors import DataError
from cloister.models import logistic

FORMAT = "cloister-classifier/1"
STEP = 1 << 14  # cells at a time


@dataclass(frozen=True)
class LinearModel:
    """Labels from log values of genes, or from an embedding."""

    labels: tuple[str, ...]  # (K,)
    coefficients: F64  # W, (h, K)
    intercept: F64  # (K,)
    genes: tuple[str, ...] = ()  # (h,); empty for an embedding
    common: tuple[str, ...] = ()  # genes over which cells are normalised
    kind: str = "counts"  # or "log": what cells have to hold
    names: str = "index"  # or "symbol", "ensembl": how genes are matched
    target_sum: float = 1e4
    use_rep: str | None = None  # the embedding
    space: str = ""  # digest of what made it
    level: float = 0.0  # below it a label is `unknown`
    centers: F64 | None = None  # (K, K): mean score of each label's cells in training
    origin: dict[str, Any] = field(default_factory=dict)  # study, sites, penalty, openings, ε, ...

    def __post_init__(self) -> None:
        h, K = self.coefficients.shape
        if len(self.labels) != K or self.intercept.shape != (K,) or (self.genes and len(self.genes) != h):
            raise DataError("coefficients, labels and genes of this classifier do not fit together")
        if self.centers is not None and self.centers.shape != (K, K):
            raise DataError("labels and their centers in this classifier do not fit together")
        if not (np.all(np.isfinite(self.coefficients)) and np.all(np.isfinite(self.intercept))):
            raise DataError("a coefficient of this classifier is no number")

    def probabilities(self, x: Any, *, adapt: bool = False) -> F64:
        """(n, K) of cells (n, h), CSR or dense; with `adapt`, aligned with the cells of training as a whole."""
        parts = [
            np.asarray(x[start : start + STEP] @ self.coefficients) + self.intercept
            for start in range(0, x.shape[0], STEP)
        ]
        z = np.concatenate(parts) if parts else np.zeros((0, len(self.labels)))
        if adapt:
            if self.centers is None:
                raise DataError("this model does not say where its labels lie, so cells cannot be aligned with them")
            z = logistic.align(z, self.centers)
        return logistic.probabilities(z)

    @property
    def digest(self) -> str:
        """Of everything that decides a label."""
        h = hashlib.sha256(json.dumps(self._meta(), sort_keys=True).encode())
        for array in (self.coefficients, self.intercept, *([] if self.centers is None else [self.centers])):
            h.update(np.ascontiguousarray(array, dtype="<f8").tobytes())
        return h.hexdigest()

    def _meta(self) -> dict[str, Any]:
        names = ("labels", "genes", "common", "kind", "names", "target_sum", "use_rep", "space", "level")
        return {"format": FORMAT} | {name: getattr(self, name) for name in names}

    def to_bytes(self) -> bytes:
        """One `.npz` with a JSON text and two arrays; nothing in it could run code."""
        meta = self._meta() | {"origin": self.origin, "digest": self.digest}
        out = io.BytesIO()
        text = np.frombuffer(json.dumps(meta).encode(), np.uint8)
        more: dict[str, Any] = {} if self.centers is None else {"centers": self.centers}
        np.savez_compressed(out, meta=text, coefficients=self.coefficients, intercept=self.intercept, **more)
        return out.getvalue()

    @classmethod
    def from_bytes(cls, data: bytes, where: str) -> LinearModel:
        try:
            with files.load_arrays(data, where) as kept:
                arrays = {name: kept[name] for name in kept.files}
            meta = json.loads(arrays["meta"].tobytes())
            if meta.pop("format") != FORMAT:
                raise DataError(f"{where} is of another version of Cloister")
            digest = meta.pop("digest")
            for name in ("labels", "genes", "common"):
                meta[name] = tuple(str(x) for x in meta[name])
            meta |= {name: np.asarray(a, dtype=np.float64) for name, a in arrays.items() if name != "meta"}
            model = cls(**meta)
        except DataError:
            raise
        except Exception as e:  # every way in which a file can be wrong
            raise DataError(f"{where} is no classifier of Cloister ({type(e).__name__})") from None
        if model.digest != digest:
            raise DataError(f"{where} was changed after it was written: its digest does not fit")
        return model


def hold_out(codes: I64, share: float, rng: np.random.Generator) -> I64:
    """Positions of the validation cells: a share of every label's cells, rounded; few cells all train."""
    held = []
    for code in np.unique(codes[codes >= 0]):
        at = np.flatnonzero(codes == code)
        count = min(math.floor(share * len(at) + 0.5), len(at) - 1)
        held.append(rng.permutation(at)[:count])
    return np.sort(np.concatenate(held)) if held else np.zeros(0, np.int64)
