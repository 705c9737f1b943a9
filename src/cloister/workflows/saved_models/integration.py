"""An integration at work on cells that come later: `Integration`, what `integrate` gives. Nobody else moves."""

from __future__ import annotations

import io
import json
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from cloister import files
from cloister.arrays import F64, Array
from cloister.cells import tables as cells
from cloister.cells.spaces import check_space
from cloister.errors import CloisterError, DataError
from cloister.models.harmony import Settings, Shifts, Trail, replay, replay_new_batch

if TYPE_CHECKING:
    from anndata import AnnData

FORMAT = "cloister-integration/2"
WHOLE = "(all)"  # the name of the only batch of a site that named none
ARRAYS = {"trail": ("centroids", "masses", "anchors", "known"), "own": ("penalties", "shifts")}


@dataclass(frozen=True)
class Integration:
    """Where clusters lay in every round of a run, and how this site's batches were moved.

    >>> model = Integration.load("model.npz")
    >>> model.transform(adata)                    # sets adata.obsm["X_integrated"]
    """

    settings: Settings
    trail: Trail
    own: Shifts
    batches: tuple[str, ...]  # of this site
    batch_key: str | None
    use_rep: str
    source: str  # digest of the space that cells come in
    space: str  # digest of the space that they are put into
    least: int  # cells of a new batch
    origin: dict[str, Any] = field(default_factory=dict)  # study, sites, sums

    def __post_init__(self) -> None:
        rounds, K, d = self.trail.centroids.shape
        B = len(self.batches)
        fit = self.trail.masses.shape == self.trail.known.shape == (rounds, K)
        fit = fit and self.trail.anchors.shape == (rounds, K, d)
        fit = fit and self.own.penalties.shape == (rounds, B, K) and self.own.shifts.shape == (rounds, B, K, d)
        numbers = (self.trail.centroids, self.trail.masses, self.trail.anchors, self.own.penalties, self.own.shifts)
        if not fit or not all(np.all(np.isfinite(x)) for x in numbers):
            raise DataError("clusters and batches of this integration do not fit together")

    def transform(
        self,
        adata: AnnData,
        *,
        batch_key: str | None = None,
        new_batch: bool = False,
        key_added: str = "X_integrated",
    ) -> F64:
        """Place cells among those of the run, which stay where they are.

        Parameters
        ----------
        adata
            Cells in the space that the run began with, `adata.obsm[model.use_rep]`.
        batch_key
            Column of `obs` with each cell's batch; that of the run by default. A cell of a batch that took part at this
            site is placed by what was learned there, whoever comes with it. The cells of any other batch are placed
            together, and have to be some dozens.
        new_batch
            All these cells are of one batch that took no part, whatever it is called.
        key_added
            Name in `obsm`; `uns` gets the digest of the space under the same name.
        """
        check_space(adata, self.use_rep, self.source)
        x = cells.embedding(adata, self.use_rep)
        if x.shape[1] != self.trail.centroids.shape[2]:
            d = self.trail.centroids.shape[2]
            raise DataError(f"adata.obsm[{self.use_rep!r}] has {x.shape[1]} columns; the run had {d}")
        names = np.full(len(x), "") if new_batch else batch_names(adata, batch_key or self.batch_key)
        known = {} if new_batch else {name: i for i, name in enumerate(self.batches)}
        codes = np.array([known.get(name, -1) for name in names], np.int64)
        others = {str(name): np.flatnonzero(names == name) for name in np.unique(names[codes < 0])}
        for name, at in others.items():
            if len(at) < self.least:
                raise DataError(
                    f"batch '{name}' took no part and has {len(at)} cells; a new batch needs at least {self.least}"
                )
        placed = x.copy()
        placed[codes >= 0] = replay(self.settings, self.trail, self.own, x[codes >= 0], codes[codes >= 0])
        for at in others.values():
            placed[at] = replay_new_batch(self.settings, self.trail, x[at])
        adata.obsm[key_added] = placed
        adata.uns[key_added] = {"space": self.space}
        return placed

    def shared(self) -> Integration:
        """The model without what is this site's own: for a site that took no part, whose cells are a new batch."""
        rounds, K, d = self.trail.centroids.shape
        none = Shifts(np.zeros((rounds, 0, K)), np.zeros((rounds, 0, K, d)))
        return replace(self, own=none, batches=())

    def to_bytes(self) -> bytes:
        """One `.npz` with a JSON text and arrays; nothing in it could run code."""
        names = ("batches", "batch_key", "use_rep", "source", "space", "least", "origin")
        meta = {name: getattr(self, name) for name in names}
        meta |= {"format": FORMAT, "settings": asdict(self.settings), "cells": self.trail.cells}
        arrays = {name: getattr(getattr(self, part), name) for part, some in ARRAYS.items() for name in some}
        out = io.BytesIO()
        np.savez_compressed(out, meta=np.frombuffer(json.dumps(meta).encode(), np.uint8), **arrays)
        return out.getvalue()

    def save(self, path: str | Path) -> Path:
        return files.write(path, self.to_bytes())

    @classmethod
    def load(cls, path: str | Path) -> Integration:
        try:
            with files.load_arrays(path) as kept:
                meta = json.loads(kept["meta"].tobytes())
                trail = Trail(int(meta.pop("cells")), *(kept[name] for name in ARRAYS["trail"]))
                own = Shifts(*(kept[name] for name in ARRAYS["own"]))
            if meta.pop("format") != FORMAT:
                raise DataError("another format")
            settings = Settings(**meta.pop("settings"))
            return cls(settings, trail, own, **(meta | {"batches": tuple(meta["batches"])}))
        except OSError:
            raise DataError(f"there is no model file at {path}") from None
        except CloisterError as e:
            raise DataError(f"{path} is not an integration of Cloister: {e}") from None
        except Exception as e:  # every way in which a file can be wrong
            raise DataError(f"{path} is not an integration of Cloister ({type(e).__name__})") from None

    def __repr__(self) -> str:
        _, K, d = self.trail.centroids.shape
        return (
            f"<Integration of {self.trail.cells} cells, {K} clusters in {d} columns, {len(self.batches)} batches here>"
        )


def batch_names(adata: AnnData, batch_key: str | None) -> Array:
    """The batch of every cell; all in one where no column is named."""
    if batch_key is None:
        return np.full(adata.n_obs, WHOLE)
    if batch_key not in adata.obs:
        there = ", ".join(repr(str(key)) for key in adata.obs) or "none"
        raise DataError(f"adata.obs[{batch_key!r}] is missing; there is {there}. Pass one of these as batch_key=.")
    column = adata.obs[batch_key]
    if (unnamed := int(column.isna().sum())) > 0:
        raise DataError(f"adata.obs[{batch_key!r}] names no batch for {unnamed} cells; fill it or remove these cells.")
    return np.asarray(column.astype(str), dtype="U")
