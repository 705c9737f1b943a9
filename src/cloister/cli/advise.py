"""`cloister advise`: which workflow should label these cells, by a rehearsal of each on held-out labels."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from cloister.cli.console import as_is, out, progress
from cloister.cli.options import FLAG, AsJson, DataFiles, Quiet, sites_of
from cloister.errors import DiskError
from cloister.report.parts import size

if TYPE_CHECKING:
    from cloister.rehearsal.advise import Advice


def advise(
    study: Annotated[str, typer.Argument(help="study.toml, or a workflow that labels cells.")],
    data: DataFiles = None,
    label_key: Annotated[str, typer.Option(help="Column of obs with labels; else the study's.")] = "",
    model: Annotated[Path | None, typer.Option(help="File of a provider's model, for adapt-model.")] = None,
    held_out: Annotated[float, typer.Option(help="Fraction of labels to hold out.")] = 0.2,
    n_cells: Annotated[int, typer.Option("--cells", help="Most cells taken of a site; 0 for all.")] = 1000,
    seed: Annotated[int, typer.Option(help="Seed of held-out cells and runs.")] = 0,
    path: Annotated[Path | None, typer.Option("--out", help="File for the advice as JSON.")] = None,
    learns: Annotated[  # noqa: FBT002
        bool, typer.Option("--learns", metavar=FLAG, help="Also print what each party would learn.")
    ] = False,
    as_json: AsJson = False,  # noqa: FBT002
    quiet: Quiet = False,  # noqa: FBT002
) -> None:
    """Recommend a workflow to label cells, by held-out labels.

    Rehearses the ways and takes the least revealing one that is as good as the best. Nothing is sent.
    """
    from cloister.rehearsal.advise import advise as rehearse_ways

    files = sites_of(data)
    with progress(quiet=quiet or as_json) as tell:
        found = rehearse_ways(
            study, files, label_key=label_key, model=model, held_out=held_out, n_cells=n_cells, seed=seed,
            on_event=tell,
        )  # fmt: skip
    text = json.dumps(found.to_dict())
    if path is not None:
        try:
            path.write_text(json.dumps(found.to_dict(), indent=1) + "\n", encoding="utf-8")
        except OSError as e:
            raise DiskError(f"{path} cannot be written ({e.strerror or type(e).__name__})") from None
    if as_json:
        out.print_json(text)
        return
    show(found, learns=learns)


def show(found: Advice, *, learns: bool) -> None:
    table = Table("way", "accuracy", "behind", "± error", "sent", "CPU-s", "rounds", "what is revealed", box=None)
    for way in found.ways:
        if way.problem:
            table.add_row(as_is(way.name), "–", "–", "–", "–", "–", "–", as_is(f"not evaluated: {way.problem}"))
            continue
        figures = f"{way.accuracy:.3f}", f"{way.behind:.3f}", f"{way.error:.3f}"
        cost = size(way.bytes), f"{way.cpu_seconds:.1f}", str(way.rounds)
        mark = " *" if way.as_good else ""
        table.add_row(as_is(way.name + mark), *figures, *cost, as_is(way.why))
    out.print(table)
    out.print("* as good as the best within the noise")
    if learns:
        for way in found.ways:
            for step, who, what in way.learns:
                out.print(f"{way.name}, {step}. {who}: {what}", markup=False)
    out.print(f"\nRecommended: {found.reason}.", markup=False)
    out.print(found.rule, markup=False)
