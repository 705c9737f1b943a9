"""Studies of several steps: whether each has what it needs, asked before the first one sends anything.

What a step writes at a site (embeddings, layers, columns, files) is there for the later ones. An option that names a
file takes one of an earlier step as `"step:NAME/FILE"`, as in `adapter = "step:adapt-model/adapter.npz"`.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cloister.cells.tables import places
from cloister.errors import DataError, ParameterError, about
from cloister.study import Party, Study
from cloister.workflows import Workflow, check_plan

if TYPE_CHECKING:
    from anndata import AnnData

SLOTS = {
    "layer": "layers",
    "use_rep": "obsm",
    "genes_key": "var",
}  # what an option of that name is a key of; any other, of obs
FILE = "step:"


def check_steps(study: Study) -> list[tuple[Study, Workflow, Any]]:
    """Every part of a study with its workflow and options, or the error that names the step and what is wrong in it."""
    if study.at:
        return check_steps(study.whole)[study.at - 1 : study.at]
    checked: list[tuple[Study, Workflow, Any]] = []
    written: dict[tuple[Party, str], str] = {}
    for part in study.parts:
        with named(part):
            workflow, options = check_plan(part)
            for key, (step, file) in _files(options).items():
                _check_file(key, step, file, checked)
            for site in study.sites:
                for place in given(workflow, options, site):
                    if (first := written.setdefault((site, place), part.label)) != part.label:
                        raise ParameterError(
                            f"steps '{first}' and '{part.label}' both write adata.{place}; give one of them another"
                            " key_added"
                        )
        checked.append((part, workflow, options))
    return checked


def check_site(study: Study, site: Party, adata: AnnData) -> list[str]:
    """Raise `DataError` if a step needs what neither these cells nor an earlier step gives; return what to know.

    Cells are checked as the workflow does it, but for steps that work on what an earlier one writes: those are looked
    at when their turn comes.
    """
    notes: list[str] = []
    here, earlier = places(adata), set[str]()
    for part, workflow, options in check_steps(study):
        with named(part):
            wanted = needed(workflow, options, site)
            if part.at and (missing := wanted - here - earlier):
                raise DataError(f"it needs adata.{min(missing)}, which neither these cells nor an earlier step has")
            if not wanted & earlier:
                notes += [note for note in workflow.check_at(site, adata, options) if note not in notes]
        earlier |= given(workflow, options, site)
    return notes


def named(part: Study) -> AbstractContextManager[None]:
    """Let an error say in which step it was."""
    return about(part.place)


def needed(workflow: Workflow, options: Any, site: str) -> set[str]:
    """Places of an AnnData that a site's part reads, besides X."""
    wanted = {key: getattr(options, key, None) for key in workflow.reads(options, site)}
    return {
        f"{SLOTS.get(key, 'obs')}[{name!r}]" for key, name in wanted.items() if name and (key, name) != ("use_rep", "X")
    }


def given(workflow: Workflow, options: Any, site: str) -> set[str]:
    """Places that a site's part writes; where one site asks, only that one gets anything."""
    if getattr(options, "query", site) not in ("", site):
        return set()
    made = {template.format(**vars(options)) for template in workflow.writes}
    return {place for place in made if "[None]" not in place}


# ---- files -----------------------------------------------------------------------------------------------------------


def _files(options: Any) -> dict[str, tuple[str, str]]:
    """Option → step and file, for every option that names a file of an earlier step."""
    found = {k: v.removeprefix(FILE) for k, v in vars(options).items() if isinstance(v, str) and v.startswith(FILE)}
    return {key: (step, file) for key, (step, _, file) in ((k, v.partition("/")) for k, v in found.items())}


def _check_file(key: str, step: str, file: str, earlier: list[tuple[Study, Workflow, Any]]) -> None:
    for part, workflow, _ in earlier:
        if part.label == step:
            made = workflow.model[0] if workflow.model is not None else "no file"
            if file != made:
                raise ParameterError(f"option '{key}' names {file!r} of step '{step}', which gives {made}")
            return
    raise ParameterError(f"option '{key}' names a file of step '{step}', and no earlier step is called so")


def with_files(options: Any, me: str, folders: Mapping[str, Path]) -> Any:
    """The options with this party's own files in place of `step:NAME/FILE`; `folders` holds those of earlier steps."""
    paths = {key: str(folders[step] / f"{me}.{file}") for key, (step, file) in _files(options).items()}
    return replace(options, **paths) if paths else options


def uses_files(study: Study) -> bool:
    """Whether a step takes a file of an earlier one."""
    return any(_files(options) for _, _, options in check_steps(study))
