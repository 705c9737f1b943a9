"""One space: whether the cells of all sites may be compared, asked before they are."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cloister.cells.spaces import space_of
from cloister.session import Session
from cloister.workflows.common import common_space

if TYPE_CHECKING:
    from anndata import AnnData


def note_on_space(use_rep: str | None) -> list[str]:
    """What a user should know about an embedding that every scanpy file has on its own."""
    if use_rep != "X_pca":
        return []
    return ["X_pca is one space of all sites only if they computed it together; scanpy's is each file's own"]


def agree_on_space(session: Session, use_rep: str | None, adata: AnnData | None = None) -> None:
    """Every party calls this first, a site with its cells; embeddings of different models end the run by name."""
    if use_rep in (None, "X"):
        return
    params = common_space.Params(session.sites, session.coordinator, str(use_rep))
    if adata is not None:
        session.run(common_space.site, params, space_of(adata, use_rep))
    elif session.role == "coordinator":
        session.run(common_space.coordinator, params)
    else:
        session.attend(params)
