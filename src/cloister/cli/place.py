"""The verb for cells that come after an integration: place them among those of the run. Nothing is sent."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from cloister.cli.console import out
from cloister.errors import UsageError

FLAG = " "  # an option that takes no value


def place(
    model: Annotated[Path, typer.Argument(help="A model.npz of integrate.")],
    data: Annotated[Path, typer.Argument(metavar="CELLS", help="The cells to place.")],
    path: Annotated[Path, typer.Option("--out", help="Where to write the placed cells.")],
    like: Annotated[Path | None, typer.Option(help="This site's cells of the run, if CELLS hold counts only.")] = None,
    layer: Annotated[str | None, typer.Option(help="Layer that holds the counts; with --like.")] = None,
    library_key: Annotated[str | None, typer.Option(help="Column of obs with library sizes; with --like.")] = None,
    batch_key: Annotated[str | None, typer.Option(help="Column of obs with batches; that of the run if none.")] = None,
    new_batch: Annotated[  # noqa: FBT002
        bool, typer.Option("--new-batch", metavar=FLAG, help="These cells are one batch that took no part.")
    ] = False,
    key_added: Annotated[str, typer.Option(help="Name in obsm.")] = "X_integrated",
) -> None:
    """Place cells that came later among integrated ones, which stay where they are. Nothing is sent."""
    from cloister.cells.files import read_cells, write_cells
    from cloister.workflows.saved_models.integration import Integration
    from cloister.workflows.shared_pca.workflow import place_in_space

    if path.exists() and path.samefile(data):
        raise UsageError(f"--out {path} is the file of the cells; name another")
    integration = Integration.load(model)
    adata = read_cells(data)
    if like is not None:
        run = read_cells(like)
        place_in_space(adata, run, key=integration.use_rep, layer=layer, library_key=library_key)
    placed = integration.transform(adata, batch_key=batch_key, new_batch=new_batch, key_added=key_added)
    write_cells(adata, path)
    out.print(f"written: {path}, obsm['{key_added}'] of {len(placed)} cells", markup=False)
