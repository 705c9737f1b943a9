"""A common map at work on cells that come later: `SharedMap`, what `shared-map` gives. Nobody else moves."""

from __future__ import annotations

import io
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from cloister import files
from cloister.arrays import F64
from cloister.cells import tables as cells
from cloister.cells.spaces import check_space, digest_of
from cloister.errors import CloisterError, DataError
from cloister.models import umap_map

if TYPE_CHECKING:
    from anndata import AnnData

FORMAT = "cloister-shared-map/1"
BINS = 80  # of the density, per axis


@dataclass(frozen=True)
class SharedMap:
    """Points that stand for the cells of all sites, and where they are on the map.

    >>> model = SharedMap.load("model.npz")
    >>> model.place(adata)                        # sets adata.obsm["X_shared_map"]
    """

    points: F64  # (M, d)
    positions: F64  # (M, 2)
    use_rep: str
    source: str  # digest of the space that cells come in
    origin: dict[str, Any] = field(default_factory=dict)  # study, sites, cells

    def __post_init__(self) -> None:
        M = len(self.points)
        if self.points.ndim != 2 or not M or self.positions.shape != (M, 2):
            raise DataError("points and positions of this map do not fit together")
        if not np.all(np.isfinite(self.points)) or not np.all(np.isfinite(self.positions)):
            raise DataError("points or positions of this map are not finite")

    def place(self, adata: AnnData, *, own_neighbors: int = 0, key_added: str = "X_shared_map") -> F64:
        """Place cells on the map: `adata.obsm[key_added]` of two columns, and notes in `uns`. Nothing is sent.

        The cells have to be in the space of the run, `adata.obsm[model.use_rep]`. By default each is placed by itself;
        with `own_neighbors`, as many nearest cells of `adata` draw it as well, as in the run.
        """
        check_space(adata, self.use_rep, self.source)
        x = cells.embedding(adata, self.use_rep)
        if x.shape[1] != self.points.shape[1]:
            raise DataError(
                f"adata.obsm[{self.use_rep!r}] has {x.shape[1]} columns; the run had {self.points.shape[1]}"
            )
        self.write(adata, key_added, placed := umap_map.place(x, self.points, self.positions, own=own_neighbors))
        return placed

    def write(self, adata: AnnData, key: str, placed: F64) -> None:
        adata.obsm[key] = placed
        adata.uns[key] = {
            "space": self.digest,
            "use_rep": self.use_rep,
            "cells": int(self.origin.get("cells", 0)),
            "span": self.span,
            "density": umap_map.density(self.positions, self.span, BINS),
        }

    @property
    def span(self) -> F64:
        """The part of the plane where the points are, ((x from, to), (y from, to))."""
        low, high = self.positions.min(axis=0), self.positions.max(axis=0)
        room = 0.04 * np.maximum(high - low, 1e-9)
        span: F64 = np.stack([low - room, high + room], axis=1)
        return span

    @property
    def digest(self) -> str:
        return digest_of(self.points, self.positions)

    def to_bytes(self) -> bytes:
        """One `.npz` with a JSON text and arrays; nothing in it could run code."""
        meta = {"format": FORMAT, "use_rep": self.use_rep, "source": self.source, "origin": self.origin}
        out = io.BytesIO()
        np.savez_compressed(
            out,
            meta=np.frombuffer(json.dumps(meta).encode(), np.uint8),
            points=self.points.astype(np.float32),
            positions=self.positions,
        )
        return out.getvalue()

    def save(self, path: str | Path) -> Path:
        return files.write(path, self.to_bytes())

    @classmethod
    def load(cls, path: str | Path) -> SharedMap:
        try:
            with files.load_arrays(path) as stored:
                meta = json.loads(stored["meta"].tobytes())
                points, positions = (stored[name].astype(np.float64) for name in ("points", "positions"))
            if meta.pop("format") != FORMAT:
                raise DataError("another format")
            return cls(points, positions, **meta)
        except OSError:
            raise DataError(f"there is no model file at {path}") from None
        except CloisterError as e:
            raise DataError(f"{path} is not a map of Cloister: {e}") from None
        except Exception as e:  # every way in which a file can be wrong
            raise DataError(f"{path} is not a map of Cloister ({type(e).__name__})") from None

    def __repr__(self) -> str:
        return f"<SharedMap of {len(self.points)} points in {self.points.shape[1]} columns>"
