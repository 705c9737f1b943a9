"""Spaces: the digest of what made an embedding, kept in `uns` beside it, so that two spaces are not taken for one."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from cloister.errors import DataError

if TYPE_CHECKING:
    from anndata import AnnData


def digest_of(*parts: Any) -> str:
    """One text for arrays, numbers and names, in this order."""
    h = hashlib.sha256()
    for part in parts:
        if isinstance(part, np.ndarray):
            data = np.ascontiguousarray(part.astype("<f8") if part.dtype.kind in "fiub" else part.astype("U"))
            head = f"{data.dtype.str}{data.shape}".encode()
            h.update(len(head).to_bytes(4, "big") + head + data.tobytes())
        else:
            text = json.dumps(part, sort_keys=True, default=str).encode()
            h.update(len(text).to_bytes(4, "big") + text)
    return h.hexdigest()


def space_of(adata: AnnData, use_rep: str | None) -> str:
    """The digest of what made `adata.obsm[use_rep]`; empty where nobody wrote one down."""
    notes = adata.uns.get(use_rep) if use_rep is not None else None
    if isinstance(notes, str):
        try:
            notes = json.loads(notes)
        except ValueError:
            return ""
    if isinstance(notes, Mapping):
        digest = notes.get("space", "")
        return str(digest) if isinstance(digest, str | np.str_) else ""
    return ""


def edges_of(adata: AnnData) -> str:
    """The digest of the bin edges that these cells were digitised by; empty where there are none."""
    edges = dict(adata.uns.get("cloister", {})).get("bin_edges")
    return "" if edges is None else digest_of(np.asarray(edges, dtype=np.float64))


def check_space(adata: AnnData, use_rep: str, wanted: str) -> None:
    """Raise unless the embedding was made by what `wanted` is the digest of; an empty one fits any."""
    found = space_of(adata, use_rep)
    if wanted and found != wanted:
        here = f"comes from another model ({found[:12]}…)" if found else "does not say what made it"
        raise DataError(
            f"adata.obsm[{use_rep!r}] {here}, the space of training was {wanted[:12]}…; embed the cells with the same "
            "loadings or checkpoint"
        )
