"""The verb for cells that come after a run: place them in the integrated space or on the map. Nothing is sent."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from cloister.cli.console import out
from cloister.errors import UsageError

FLAG = " "  # an option that takes no value


def place(
    model: Annotated[Path, typer.Argument(help="File model.npz from integrate or shared-map.")],
    data: Annotated[Path, typer.Argument(metavar="CELLS", help="File of the cells to place.")],
    path: Annotated[Path, typer.Option("--out", help="File for the placed cells.")],
    like: Annotated[
        Path | None, typer.Option(help="File of this site's cells from the run; needed if CELLS has counts only.")
    ] = None,
    layer: Annotated[str | None, typer.Option(help="Layer with the counts, with --like; X by default.")] = None,
    library_key: Annotated[str | None, typer.Option(help="Column of obs with library sizes, with --like.")] = None,
    batch_key: Annotated[
        str | None, typer.Option(help="Column of obs with batches; that of the run by default.")
    ] = None,
    new_batch: Annotated[  # noqa: FBT002
        bool, typer.Option("--new-batch", metavar=FLAG, help="Treat these cells as one batch that was not in the run.")
    ] = False,
    key_added: Annotated[
        str | None, typer.Option(help="Key of obsm for the result; X_integrated or X_shared_map by default.")
    ] = None,
) -> None:
    """Place new cells among integrated ones, or on a common map. Nothing that is there moves, and nothing is sent."""
    from cloister.cells.files import read_cells, write_cells
    from cloister.workflows.saved_models import load_model
    from cloister.workflows.saved_models.integration import Integration
    from cloister.workflows.saved_models.shared_map import SharedMap
    from cloister.workflows.shared_pca.workflow import place_in_space

    if path.exists() and path.samefile(data):
        raise UsageError(f"--out {path} is the file of the cells; name another")
    placing = load_model(model)
    if not isinstance(placing, Integration | SharedMap):
        raise UsageError(f"{model} is a model that labels cells: use `cloister predict`")
    if isinstance(placing, SharedMap) and (like or layer or library_key or batch_key or new_batch):
        raise UsageError(f"{model} is a map, which needs cells in adata.obsm[{placing.use_rep!r}] and no other option")
    key = key_added or ("X_integrated" if isinstance(placing, Integration) else "X_shared_map")
    adata = read_cells(data)
    if like is not None:
        run = read_cells(like)
        place_in_space(adata, run, key=placing.use_rep, layer=layer, library_key=library_key)
    if isinstance(placing, Integration):
        placed = placing.transform(adata, batch_key=batch_key, new_batch=new_batch, key_added=key)
    else:
        placed = placing.place(adata, key_added=key)
    write_cells(adata, path)
    out.print(f"written: {path}, obsm['{key}'] of {len(placed)} cells", markup=False)
