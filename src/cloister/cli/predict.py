"""Verbs for models that were trained together: label new cells, embed them. Nothing is sent."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from cloister.cli.console import as_is, out
from cloister.errors import UsageError

FLAG = " "  # an option that takes no value


def predict(
    model: Annotated[Path, typer.Argument(help="File model.npz from train-classifier or fine-tune.")],
    data: Annotated[Path, typer.Argument(metavar="CELLS", help="File of the cells to label.")],
    path: Annotated[Path | None, typer.Option("--out", help="File for the labelled cells.")] = None,
    layer: Annotated[str | None, typer.Option(help="Layer with the values, as in training.")] = None,
    library_key: Annotated[str | None, typer.Option(help="Column of obs with library sizes.")] = None,
    majority_over: Annotated[
        str | None, typer.Option(help="Column of obs with clusters; cells of a cluster get its most frequent label.")
    ] = None,
    adapt: Annotated[  # noqa: FBT002
        bool, typer.Option("--adapt", metavar=FLAG, help="Align these cells with the training cells first.")
    ] = False,
    no_unknown: Annotated[  # noqa: FBT002
        bool, typer.Option("--no-unknown", metavar=FLAG, help="Label every cell, also uncertain ones.")
    ] = False,
    pretrained: Annotated[
        Path | None, typer.Option(help="Folder of the checkpoint that a tuned scGPT started from.")
    ] = None,
    key_added: Annotated[str, typer.Option(help="Column of obs for the labels.")] = "predicted",
    as_json: Annotated[  # noqa: FBT002
        bool, typer.Option("--json", metavar=FLAG, help="Print one JSON object instead of text.")
    ] = False,
) -> None:
    """Label cells with a trained model, with a confidence for each.

    Nothing is sent.
    """
    from cloister.cells.files import read_cells, write_cells
    from cloister.workflows.saved_models import load_model
    from cloister.workflows.saved_models.cell_classifier import CellClassifier
    from cloister.workflows.saved_models.integration import Integration
    from cloister.workflows.saved_models.shared_map import SharedMap

    if path is not None and path.exists() and path.samefile(data):
        raise UsageError(f"--out {path} is the file of the cells; name another")
    trained = load_model(model, pretrained)
    if isinstance(trained, Integration):
        raise UsageError(f"{model} is a model of integrate, which labels nothing: use `cloister place`")
    if isinstance(trained, SharedMap):
        raise UsageError(f"{model} is a model of shared-map, which labels nothing: use `cloister place`")
    adata = read_cells(data)
    given: dict[str, Any] = {"layer": layer, "majority_over": majority_over, "unknown": not no_unknown}
    if isinstance(trained, CellClassifier):
        given |= {"library_key": library_key, "adapt": adapt}
    elif library_key is not None or adapt:
        raise UsageError("--library-key and --adapt are for models of train-classifier")
    labels = trained.predict(adata, key_added=key_added, **given)
    if path is not None:
        write_cells(adata, path)
    counts = dict(Counter(map(str, labels)).most_common())
    if as_json:
        told = {"model": trained.digest, "cells": len(labels), "labels": counts, "file": path and str(path)}
        out.print_json(json.dumps(told))
        return
    table = Table("label", "cells", box=None)
    for name, count in counts.items():
        table.add_row(as_is(name), str(count))
    out.print(table)
    if path is not None:
        out.print(f"written: {path}, obs['{key_added}'] and obs['{key_added}_confidence']", markup=False)


def embed(
    model: Annotated[Path, typer.Argument(help="File model.npz from fine-tune, or folder of a checkpoint.")],
    data: Annotated[Path, typer.Argument(metavar="CELLS", help="File of the cells to embed.")],
    path: Annotated[Path, typer.Option("--out", help="File for the cells with their embedding.")],
    layer: Annotated[str | None, typer.Option(help="Layer with the values; X by default.")] = None,
    gene_key: Annotated[str | None, typer.Option(help="Column of var with gene symbols.")] = None,
    binned: Annotated[bool, typer.Option("--binned", metavar=FLAG, help="Treat the values as bins.")] = False,  # noqa: FBT002
    pretrained: Annotated[
        Path | None, typer.Option(help="Folder of the checkpoint that a tuned scGPT started from.")
    ] = None,
    key_added: Annotated[str, typer.Option(help="Key of obsm for the result.")] = "X_embedded",
) -> None:
    """Embed cells with a pretrained or trained model. Nothing is sent."""
    from cloister.cells.files import read_cells, write_cells
    from cloister.workflows.embed import embed as embed_cells

    if path.exists() and path.samefile(data):
        raise UsageError(f"--out {path} is the file of the cells; name another")
    if not model.exists():
        raise UsageError(f"there is no model at {model}")
    adata = read_cells(data)
    embed_cells(
        adata,
        model,
        layer=layer,
        gene_key=gene_key,
        binning="none" if binned else "cell",
        pretrained=pretrained,
        key_added=key_added,
    )
    write_cells(adata, path)
    out.print(f"written: {path}, obsm['{key_added}'] of {adata.obsm[key_added].shape[1]} columns", markup=False)
