"""`cloister predict`: label new cells with a model that was trained together. Nothing is sent."""

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
    model: Annotated[Path, typer.Argument(help="A model.npz of train-classifier or fine-tune.")],
    data: Annotated[Path, typer.Argument(metavar="CELLS", help="The cells to label.")],
    path: Annotated[Path | None, typer.Option("--out", help="Where to write the labelled cells.")] = None,
    layer: Annotated[str | None, typer.Option(help="Layer that holds the values, as in training.")] = None,
    library_key: Annotated[str | None, typer.Option(help="Column of obs with library sizes.")] = None,
    majority_over: Annotated[str | None, typer.Option(help="Column of obs with clusters, to vote in.")] = None,
    no_unknown: Annotated[  # noqa: FBT002
        bool, typer.Option("--no-unknown", metavar=FLAG, help="Label every cell, however unsure.")
    ] = False,
    pretrained: Annotated[Path | None, typer.Option(help="Folder of the checkpoint under a tuned scGPT.")] = None,
    key_added: Annotated[str, typer.Option(help="Column of obs with the labels.")] = "predicted",
    as_json: Annotated[  # noqa: FBT002
        bool, typer.Option("--json", metavar=FLAG, help="Print one JSON object instead of text.")
    ] = False,
) -> None:
    """Label cells with a trained model: adds a column of labels and one of confidence. Nothing is sent."""
    from cloister.cells.files import read_cells, write_cells
    from cloister.workflows.cell_classifier import CellClassifier
    from cloister.workflows.trained_models import load_model

    if path is not None and path.exists() and path.samefile(data):
        raise UsageError(f"--out {path} is the file of the cells; name another")
    trained = load_model(model, pretrained)
    adata = read_cells(data)
    given: dict[str, Any] = {"layer": layer, "majority_over": majority_over, "unknown": not no_unknown}
    if isinstance(trained, CellClassifier):
        given["library_key"] = library_key
    elif library_key is not None:
        raise UsageError("--library-key is for models of train-classifier")
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
