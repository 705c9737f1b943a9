"""How the command line reads words: the options that verbs share, and those of the workflows.

Here and in the verbs, what a verb needs is imported when it runs: `cloister --help` answers at once.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import re
import typing
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from cloister.errors import UsageError

FLAG = " "  # an option that takes no value
STUDY = ".toml"  # what stands in place of a workflow's name ends so if it is a study
OPEN = {"allow_extra_args": True, "ignore_unknown_options": True}  # a workflow's own options follow the verb's
WorkflowName = Annotated[
    str, typer.Argument(help="Name of a workflow (`cloister explain` lists them), or a study.toml.")
]
DataFiles = Annotated[
    list[str] | None, typer.Option("--data", metavar="SITE=FILE", help="File of a site's cells; give it once per site.")
]
ModeName = Annotated[
    str | None, typer.Option(metavar="MODE", help="Mode: hardened (default), or another that the workflow has.")
]
OutFolder = Annotated[
    Path | None, typer.Option("--out", metavar="FOLDER", help="Folder for results, receipts and the report.")
]
AsJson = Annotated[bool, typer.Option("--json", metavar=FLAG, help="Print one JSON object instead of text.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", metavar=FLAG, help="No progress bars.")]


def sites_of(data: list[str] | None) -> dict[str, Path]:
    files: dict[str, Path] = {}
    for item in data or []:
        site, eq, path = item.partition("=")
        if not eq or not site or not path:
            raise UsageError(f"--data needs site=file, found '{item}'")
        if site in files:
            raise UsageError(f"two sites are called '{site}'; every site needs a name of its own")
        files[site] = Path(path)
    if not files:
        raise UsageError("no data: name each site's file with --data site=file")
    return files


def own_options(args: list[str], workflow: Any, context: Any = None) -> dict[str, Any]:
    """Read `--n-bins 51` and the like into the workflow's options; names a misspelt option of the verb itself."""
    hints = typing.get_type_hints(workflow.options) if workflow is not None else {}
    known = {f.name for f in dataclasses.fields(workflow.options)} if workflow is not None else set()
    check_flags(args, known, context)
    given: dict[str, Any] = {}
    left = list(args)
    while left:
        word = left.pop(0)
        if not word.startswith("--"):
            raise UsageError(f"'{word}' is not an option; options look like --{next(iter(sorted(known)), 'name')}")
        name, eq, value = word[2:].partition("=")
        key = name.replace("-", "_")
        hint = str(hints.get(key, ""))
        if key.startswith("no_") and key[3:] in known:
            given[key[3:]] = False
        elif hint in ("<class 'bool'>", "bool") and not eq and (not left or left[0].startswith("--")):
            given[key] = True
        else:
            if not eq:
                if not left:
                    raise UsageError(f"--{name} needs a value")
                value = left.pop(0)
            given[key] = literal(value, hints.get(key))
    return given


def check_flags(args: list[str], known: set[str], context: Any) -> None:
    """Raise if a word looks more like an option of the verb than like one of the workflow's."""
    verbs = [o for p in context.command.params for o in p.opts if o.startswith("--")] if context is not None else []
    ours = ["--" + name.replace("_", "-") for name in known]
    for word in (w.partition("=")[0] for w in args if w.startswith("--")):
        if word in ours or (word.startswith("--no-") and "--" + word[5:] in ours):
            continue
        close = difflib.get_close_matches(word, [*ours, *verbs], n=1)
        if close or not known:
            hint = f"did you mean {close[0]}?" if close else f"known are {', '.join(verbs)}"
            more = "" if known else "; a workflow's own options need --for WORKFLOW"
            raise UsageError(f"there is no option {word}; {hint}{more if not close else ''}")


def as_flags(text: str, words: Sequence[str]) -> str:
    """A sentence about options in Python's spelling (`use_rep=`), in that of the command line: `--use-rep`."""
    from cloister import workflows

    named = next((word for word in words if word in workflows.names()), None)
    known = {f.name for f in dataclasses.fields(workflows.get(named).options)} if named else set()

    def flag(match: re.Match[str]) -> str:
        name, value = match[1], match[2]
        if name not in known:
            return match[0]
        return f"--{name.replace('_', '-')}" + (f" {value}" if value not in ("", "true") else "")

    return re.sub(r"(?<![\w'-])([a-z]\w*)=('[^']*'|[\w.]*\w|)", flag, text)


def literal(text: str, hint: Any) -> Any:
    """The value a word on the command line stands for, by the type its option has."""
    from cloister.workflows.options import alternatives

    kinds = alternatives(hint)
    if type(None) in kinds and text.lower() in ("none", ""):
        return None
    for kind in kinds:
        if typing.get_origin(kind) is tuple:
            inner = typing.get_args(kind)[0]
            return [literal(part, inner) for part in text.split(",") if part]
    for kind in (int, float):
        if kind in kinds:
            with contextlib.suppress(ValueError):
                return kind(text)
    if bool in kinds and text.lower() in ("true", "false"):
        return text.lower() == "true"
    return text
