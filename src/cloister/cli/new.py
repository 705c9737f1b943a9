"""`cloister new study`: a study to begin with, written from a template."""

from __future__ import annotations

import json
import re
from importlib import resources
from pathlib import Path
from typing import Annotated

import typer

from cloister import files
from cloister.cli.console import out
from cloister.errors import DiskError, UsageError
from cloister.study import PARTY, parse_study
from cloister.workflows.pipeline import check_steps

TEMPLATES = {
    "atlas": "one atlas of all sites' cells: quality, genes, shared space, integration, clusters, markers, map"
}


def new(
    what: Annotated[str, typer.Argument(metavar="WHAT", help="Kind of file to write; always study.")],
    template: Annotated[str, typer.Option(help="Template to write: atlas.")] = "atlas",
    sites: Annotated[
        list[str] | None,
        typer.Option("--site", help="Name of a site; repeat for each. By default basel, lugano and vienna."),
    ] = None,
    path: Annotated[Path, typer.Option("--out", help="File for the study.")] = Path("study.toml"),
) -> None:
    """Write a study.toml from a template.

    An existing file is not overwritten.
    """
    if what != "study":
        raise UsageError(f"'{what}' cannot be written; use cloister new study")
    if path.exists():
        raise UsageError(f"{path} exists; name another file with --out")
    text = study_of(template, sites or [])
    try:
        files.write(path, text.encode(), private=False)
    except OSError as e:
        raise DiskError(f"{path} cannot be written ({e.strerror or type(e).__name__})") from None
    out.print(str(path), markup=False)
    out.print(f"see what each step does:  cloister explain {path}", markup=False)


def study_of(template: str, sites: list[str]) -> str:
    """The text of a template with these sites, checked as a study."""
    if template not in TEMPLATES:
        raise UsageError(f"there is no template '{template}'; there is {', '.join(TEMPLATES)}")
    text = (resources.files("cloister") / "data" / f"{template}.toml").read_text(encoding="utf-8")
    if sites:
        if len({*sites}) < len(sites):
            raise UsageError("each --site needs a name of its own")
        rows = "".join(f'{site if PARTY.fullmatch(site) else json.dumps(site)} = "site"\n' for site in sites)
        text = re.sub(r'(?:^[\w-]+ = "site"\n)+', lambda _: rows, text, count=1, flags=re.MULTILINE)
    check_steps(parse_study(text, f"the template '{template}'"))
    return text
