"""Fingerprint: by what cells are known again, without showing them.

Counts, and two hashes: of the matrix with the names of its cells and genes, and of the columns, layers and embeddings
that an analysis reads beside it. The matrix is read in blocks, so a large file is never loaded; a sparse and a dense
matrix of the same values are the same, one that is stored by gene is another than one that is stored by cell.
"""

from __future__ import annotations

import ast
import dataclasses
import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from cloister.arrays import I64, U64
from cloister.cells.donors import donors
from cloister.cells.values import blocks, chunks, is_on_disk, is_sparse, matrix_of, where_is, x_of

if TYPE_CHECKING:
    from anndata import AnnData

PLACE = re.compile(r"(obs|obsm|layers)\[(.+)\]")


@dataclass(frozen=True)
class Fingerprint:
    """What cells are: how many, of how many persons, and the hashes of their values."""

    cells: int
    genes: int
    donors: int | None  # None where the study names no column for them
    matrix: str  # SHA-256 of X and of the names of cells and genes: the same under every study
    read: str  # SHA-256 of what a study reads beside X

    @classmethod
    def load(cls, raw: Mapping[str, Any]) -> Fingerprint:
        return cls(**{f.name: raw[f.name] for f in dataclasses.fields(cls)})

    @property
    def words(self) -> str:
        of = "" if self.donors is None else f" of {self.donors} donors"
        return f"{self.cells} cells{of}, {self.genes} genes, matrix {self.matrix[:16]}…"

    def difference(self, other: Fingerprint) -> str:
        """What is not the same in the other one, in words; empty if nothing is."""
        for what in ("cells", "genes", "donors"):
            mine, found = getattr(self, what), getattr(other, what)
            if mine != found:
                return f"{mine} {what} then, {found} now"
        if self.matrix != other.matrix:
            return "other values in adata.X, or other names"
        return "" if self.read == other.read else "other labels, columns, layers or embeddings"


@dataclass(frozen=True)
class RowPrints:
    """A keyed fingerprint of every cell's name and values, and of its donor: whoever lacks the key learns nothing."""

    name: U64  # (n,)
    value: U64  # (n,)
    donor: U64 | None = None  # (n,)
    pattern: U64 | None = None  # (n,), of the names of the genes that are not zero, in any order and of any size
    columns: Mapping[str, U64] = dataclasses.field(default_factory=dict)  # of columns of obs, (n,) each

    @classmethod
    def of(cls, adata: AnnData, key: bytes, donor_key: str | None = None, columns: Iterable[str] = ()) -> RowPrints:
        """The fingerprints of all cells; `columns` are those of obs that the study reads."""
        own = cls._of_cells(adata, key, donor_key)
        return dataclasses.replace(own, columns=cls.of_columns(adata, key, columns))

    def only(self, at: I64) -> RowPrints:
        """Those of some cells, without columns."""
        donor, pattern = (None if x is None else x[at] for x in (self.donor, self.pattern))
        return RowPrints(self.name[at], self.value[at], donor, pattern)

    def positions(self, names: Iterable[Any], key: bytes) -> I64 | None:
        """Where the cells of these names stand here; None if one is missing, or a name occurs twice."""
        wanted = _keyed_names(names, key, b"name")
        order = np.argsort(self.name, kind="stable")
        at = np.minimum(np.searchsorted(self.name[order], wanted), max(len(order) - 1, 0))
        if not len(order) or len(np.unique(wanted)) != len(wanted) or (self.name[order][at] != wanted).any():
            return None
        found: I64 = order[at]
        return found

    @staticmethod
    def of_columns(adata: AnnData, key: bytes, columns: Iterable[str]) -> dict[str, U64]:
        return {name: _keyed_names(adata.obs[name], key, b"column") for name in sorted({*columns}) if name in adata.obs}

    @classmethod
    def _of_cells(cls, adata: AnnData, key: bytes, donor_key: str | None) -> RowPrints:
        names = _keyed_names(adata.obs_names, key, b"name")
        donor = None
        if donor_key is not None and donor_key in adata.obs:
            donor = _keyed_names(adata.obs[donor_key].astype(str), key, b"donor")
        if x_of(adata) is None:
            return cls(names, names, donor)
        value, pattern = np.zeros(adata.n_obs, np.uint64), np.zeros(adata.n_obs, np.uint64)
        genes = _keyed_names(adata.var_names, key, b"gene")
        for rows, block in chunks(adata):
            block.eliminate_zeros()
            block.sort_indices()
            below = np.concatenate([np.zeros(1, np.uint64), np.cumsum(genes[block.indices], dtype=np.uint64)])
            pattern[rows] = below[block.indptr[1:]] - below[block.indptr[:-1]]
            places, data = block.indices.astype("<i8"), block.data.astype("<f8")
            for i, (start, end) in enumerate(pairwise(block.indptr), rows.start):
                value[i] = _keyed(key, b"value", places[start:end].tobytes() + data[start:end].tobytes())
        return cls(names, value, donor, pattern)


def _keyed_names(names: Iterable[Any], key: bytes, kind: bytes) -> U64:
    return np.array([_keyed(key, kind, str(x).encode()) for x in names], np.uint64)


def _keyed(key: bytes, kind: bytes, content: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(content, digest_size=8, key=key, person=kind).digest(), "little")


def fingerprint(adata: AnnData, places: Iterable[str] = (), donor_key: str | None = None) -> Fingerprint:
    """The fingerprint of cells; `places` are what is read beside X, as "obs['cell_type']". What is missing is skipped.

    An earlier step of a study may give it.
    """
    matrix = hashlib.sha256()
    _add_names(matrix, adata.obs_names)
    _add_names(matrix, adata.var_names)
    if x_of(adata) is not None:
        _add_matrix(matrix, matrix_of(adata, None), where_is(None))
    read = hashlib.sha256()
    for place in sorted(places):
        if (found := PLACE.fullmatch(place)) is None:
            continue
        slot, key = found[1], ast.literal_eval(found[2])
        if key not in getattr(adata, slot):
            continue
        _add_names(read, [place])
        if slot == "obs":
            column = adata.obs[key]
            _add_names(read, [None if gone else x for x, gone in zip(column, column.isna(), strict=True)])
        elif slot == "layers":
            _add_matrix(read, matrix_of(adata, key), where_is(key))
        else:
            _add_matrix(read, np.asarray(_plain(adata.obsm[key])), f"adata.{place}")
            if isinstance(about := adata.uns.get(key), Mapping) and "space" in about:  # which space it is in
                _add_names(read, [about["space"]])
    persons = donors(adata, donor_key) if donor_key is not None and donor_key in adata.obs else None
    return Fingerprint(adata.n_obs, adata.n_vars, persons, matrix.hexdigest(), read.hexdigest())


def _add_names(digest: Any, names: Iterable[Any]) -> None:
    digest.update(json.dumps([None if x is None else str(x) for x in names]).encode())


def _add_matrix(digest: Any, matrix: Any, where: str) -> None:
    from scipy import sparse

    by_column = getattr(matrix, "format", None) == "csc"
    digest.update(json.dumps([*map(int, matrix.shape), by_column]).encode())
    for _, block in blocks(matrix, where):
        some = (block if is_on_disk(matrix) else block.copy()) if is_sparse(block) else sparse.csr_matrix(block)
        some.eliminate_zeros()
        for part in (np.diff(some.indptr).astype("<i8"), some.indices.astype("<i8"), some.data.astype("<f8")):
            digest.update(part.tobytes())


def _plain(x: Any) -> Any:
    return x.toarray() if is_sparse(x) else x
