"""The verb of a provider: from a ViT's checkpoint to the model that it serves. Nothing is sent."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from cloister.cli.console import as_is, err, out
from cloister.cli.options import AsJson, Quiet
from cloister.errors import ParameterError, UsageError


def distil(
    teacher: Annotated[
        Path, typer.Argument(help="A ViT of timm, torchvision or Hugging Face: .safetensors, .pt, .npz, or its folder.")
    ],
    data: Annotated[
        Path, typer.Argument(metavar="DATA", help="Auxiliary images: rows of X, height x width x channels.")
    ],
    path: Annotated[Path, typer.Option("--out", help="Where to write the model that is served.")] = Path("model.npz"),
    label_key: Annotated[str | None, typer.Option(help="Column of obs with labels; without: out of domain.")] = None,
    attention: Annotated[str, typer.Option(help="quadratic, or taylor.")] = "quadratic",
    degree: Annotated[int, typer.Option(help="Of Taylor's exp.")] = 6,
    epochs: Annotated[int, typer.Option(help="Of each of the two stages.")] = 15,
    tune_epochs: Annotated[int, typer.Option(help="Of the teacher on the labels, before; 0 leaves it as it is.")] = 5,
    again: Annotated[int, typer.Option(help="Turns under a stronger penalty, if it leaves its intervals.")] = 3,
    batch_size: Annotated[int, typer.Option(help="Images a step.")] = 16,
    rate: Annotated[float, typer.Option(help="Of the teacher and of stage 1.")] = 1e-4,
    last_rate: Annotated[float, typer.Option(help="Of stage 2.")] = 1e-5,
    decay: Annotated[float, typer.Option(help="What is left of a rate at the end of its stage.")] = 0.1,
    penalty: Annotated[float, typer.Option(help="Weight of values that are about to leave their intervals.")] = 1.0,
    rank: Annotated[int, typer.Option(help="Numbers that a site reads at a tap.")] = 8,
    validation: Annotated[float, typer.Option(help="Share of the images that is kept for judging.")] = 0.1,
    heads: Annotated[int | None, typer.Option(help="Of the teacher, where neither size nor config.json says.")] = None,
    eps: Annotated[float | None, typer.Option(help="Of its LayerNorm, if not the library's own.")] = None,
    mean: Annotated[
        str | None, typer.Option(help="Of the images it was trained on: one number or 0.485,0.456,0.406.")
    ] = None,
    std: Annotated[str | None, typer.Option(help="Their deviation, likewise.")] = None,
    device: Annotated[str, typer.Option(help="cpu, or gpu.")] = "cpu",
    seed: Annotated[int, typer.Option(help="Of the order of images.")] = 0,
    page: Annotated[
        Path | None, typer.Option("--report", help="The page of figures; beside the model by default.")
    ] = None,
    as_json: AsJson = False,  # noqa: FBT002
    quiet: Quiet = False,  # noqa: FBT002
) -> None:
    """Make the model that adapt-model runs from a ViT. Nothing is sent."""
    given = dict(locals())
    page = page or path.with_suffix(".html")
    for name, file in (("--out", path), ("--report", page)):
        if file.is_dir() or not file.parent.is_dir():
            raise UsageError(f"{name} {file} must be a file in a folder that is there")
        if file.exists() and any(p.exists() and file.samefile(p) for p in (teacher, data)):
            raise UsageError(f"{name} {file} is the teacher or the data; name another")
    from cloister.cells.files import read_cells
    from cloister.provider.distil import Settings, distil_images
    from cloister.provider.report import write_page

    own = ("teacher", "data", "path", "page", "as_json", "quiet", "mean", "std")
    settings = Settings(
        **{k: v for k, v in given.items() if k not in own}, mean=_numbers("--mean", mean), std=_numbers("--std", std)
    )
    adata = read_cells(data)
    made = distil_images(adata, teacher, settings, lambda text: None if quiet else err.print(text, markup=False))
    write_page(page, made, settings, f"Distillation of {teacher.name}")
    if made.encoder is None:
        raise ParameterError(f"the student is refused, and no model was written: {made.refusal}. More on {page}")
    from cloister import files

    files.write(path, made.encoder.to_bytes())
    _tell(made, path, page, as_json=as_json)


def _numbers(name: str, text: str | None) -> tuple[float, ...] | None:
    if text is None:
        return None
    try:
        return tuple(float(v) for v in text.split(","))
    except ValueError:
        raise UsageError(f"{name} is one number, or one per channel with commas between, found '{text}'") from None


def _tell(made: Any, path: Path, page: Path, *, as_json: bool) -> None:
    if as_json:
        told = {"model": str(path), "page": str(page), "accuracy": made.accuracy, "agreement": made.agreement}
        told["ranges"] = [[r.block, r.what, r.low, r.high] for r in made.rows]
        out.print_json(json.dumps(told))
        return
    table = Table("model", "right", "as the teacher", box=None)
    for name in dict.fromkeys([*made.accuracy, *made.agreement]):
        shares = (f"{d[name]:.1%}" if name in d else "–" for d in (made.accuracy, made.agreement))
        table.add_row(as_is(name), *shares)
    out.print(table)
    out.print(f"written: {path} and {page}", markup=False)
