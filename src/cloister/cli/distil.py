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
        Path,
        typer.Argument(
            help="File or folder of a ViT from timm, torchvision or Hugging Face (.safetensors, .pt, .npz)."
        ),
    ],
    data: Annotated[
        Path,
        typer.Argument(metavar="DATA", help="File of auxiliary images, one per row of X (height x width x channels)."),
    ],
    path: Annotated[Path, typer.Option("--out", help="File for the served model.")] = Path("model.npz"),
    label_key: Annotated[
        str | None, typer.Option(help="Column of obs with labels; without it, the images count as out of domain.")
    ] = None,
    attention: Annotated[str, typer.Option(help="Attention polynomial: quadratic or taylor.")] = "quadratic",
    degree: Annotated[int, typer.Option(help="Degree of Taylor's exp.")] = 6,
    epochs: Annotated[int, typer.Option(help="Epochs of each of the two stages.")] = 15,
    tune_epochs: Annotated[int, typer.Option(help="Epochs of tuning the teacher on the labels first; 0 for none.")] = 5,
    again: Annotated[
        int, typer.Option(help="Repetitions under a stronger penalty while values leave their intervals.")
    ] = 3,
    batch_size: Annotated[int, typer.Option(help="Images per step.")] = 16,
    rate: Annotated[float, typer.Option(help="Learning rate of the teacher and of stage 1.")] = 1e-4,
    last_rate: Annotated[float, typer.Option(help="Learning rate of stage 2.")] = 1e-5,
    decay: Annotated[float, typer.Option(help="Final learning rate of a stage, as a fraction of its first.")] = 0.1,
    penalty: Annotated[
        float, typer.Option(help="Weight of the penalty for values near the ends of their intervals.")
    ] = 1.0,
    rank: Annotated[int, typer.Option(help="Number of values that a site receives at a tap.")] = 8,
    validation: Annotated[float, typer.Option(help="Fraction of the images held out for validation.")] = 0.1,
    heads: Annotated[
        int | None, typer.Option(help="Attention heads of the teacher; by default from its size or config.json.")
    ] = None,
    eps: Annotated[float | None, typer.Option(help="Epsilon of its LayerNorm; the library's by default.")] = None,
    mean: Annotated[
        str | None,
        typer.Option(help="Mean of its training images: one number, or one per channel (0.485,0.456,0.406)."),
    ] = None,
    std: Annotated[
        str | None, typer.Option(help="Standard deviation of its training images, in the same form.")
    ] = None,
    device: Annotated[str, typer.Option(help="Device: cpu or gpu.")] = "cpu",
    seed: Annotated[int, typer.Option(help="Seed of the order of images.")] = 0,
    page: Annotated[
        Path | None, typer.Option("--report", help="File for the page of figures; beside the model by default.")
    ] = None,
    as_json: AsJson = False,  # noqa: FBT002
    quiet: Quiet = False,  # noqa: FBT002
) -> None:
    """Distil a ViT into the polynomial model that adapt-model runs.

    Nothing is sent.
    """
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
