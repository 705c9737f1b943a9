"""`cloister check` and `cloister rehearse`: a workflow or a study on files of this machine."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from cloister.cli.console import as_is, finish, finish_steps, in_words, out, progress, show_warnings, write_run
from cloister.cli.options import (
    FLAG,
    STUDY,
    AsJson,
    DataFiles,
    ModeName,
    OutFolder,
    Quiet,
    WorkflowName,
    own_options,
    sites_of,
)
from cloister.errors import UsageError

if TYPE_CHECKING:
    from cloister.run.run import Run


def check(
    context: typer.Context,
    files: Annotated[list[Path], typer.Argument(help="Files of one or more sites.")],
    workflow: Annotated[str | None, typer.Option("--for", help="Workflow, or study.toml, to check for.")] = None,
    as_json: AsJson = False,  # noqa: FBT002
) -> None:
    """Say whether a file is ready for a workflow, and whether several fit together. Nothing is sent.

    For a study.toml, say whose file each is: basel=cells.h5ad, unless it is called basel.h5ad.
    """
    from cloister.cells import tables as cells
    from cloister.cells.files import open_cells
    from cloister.cells.pace import told_to
    from cloister.errors import about
    from cloister.run.progress import passes_of

    words = [*map(str, files), *context.args]
    first = next((i for i, word in enumerate(words) if word.startswith("--")), len(words))
    if not first:
        raise UsageError(f"name the files first, then options: cloister check cells.h5ad {words[0]} ...")
    check_one, check_all = _check_for(workflow, words[first:], context)
    summary: dict[str, Any] = {}
    loaded, together = {}, {}
    with progress(quiet=as_json) as tell:
        for word in words[:first]:
            site, _, path = word.rpartition("=") if workflow and workflow.endswith(STUDY) else ("", "", word)
            with told_to(passes_of(Path(path).name, tell)), about(path):
                adata = loaded[path] = together[site or path] = open_cells(path)
                summary[path] = cells.describe(adata)
                notes = check_one(word, adata)
            if workflow:
                summary[path]["warnings"] = [*summary[path].get("warnings", []), *notes]
    if len(loaded) > 1:
        summary |= check_all(together)
    if as_json:
        out.print_json(json.dumps(summary, default=str))
        return
    for name in loaded:
        table = Table(title=as_is(name), box=None, show_header=False, title_justify="left", title_style="bold")
        for key, value in summary[name].items():
            table.add_row(key.replace("_", " "), as_is(in_words(value)))
        out.print(table)
    if "genes_in_common" in summary:
        out.print(f"{summary['genes_in_common']} genes in common")
    if "labels_in_common" in summary:
        out.print(f"{summary['labels_in_common']} labels in common")
    out.print("ready" + (f" for {workflow}" if workflow else ""), style="green")


def _check_for(workflow: str | None, args: list[str], context: typer.Context) -> tuple[Any, Any]:
    """What looks at a site's cells, `(word of the command line, cells) → warnings`, and at all together."""
    from cloister import workflows
    from cloister.cells import tables as cells
    from cloister.run.together import check_together
    from cloister.study import Party, Study
    from cloister.workflows.steps import check_site, check_steps

    if workflow is None or not workflow.endswith(STUDY):
        found = workflows.get(workflow) if workflow else None
        given = own_options(args, found, context)
        if found is None:
            return lambda word, adata: cells.check_cells(adata) and [], check_together
        options = workflows.options_of(found, {**found.stand_in, **given})
        return lambda word, adata: found.check(adata, options), lambda a: check_together(a, found, options)
    if args:
        raise UsageError(f"{workflow} says its options itself; found {args[0]}")
    study = Study.load(workflow)
    _, first, options = check_steps(study)[0]  # later steps work on what this one gives

    def ready(word: str, adata: Any) -> list[str]:
        site = Party(word.rpartition("=")[0] or Path(word).stem)
        if site not in study.sites:
            raise UsageError(f"'{site}' is no site of {workflow}; say whose file it is: {study.sites[0]}={word}")
        return check_site(study, site, adata)

    return ready, lambda loaded: check_together(loaded, first, options)


def rehearse(
    context: typer.Context,
    workflow: WorkflowName,
    study: Annotated[Path | None, typer.Argument(help="study.toml with options and mode; optional.")] = None,
    data: DataFiles = None,
    mode: ModeName = None,
    seed: Annotated[int | None, typer.Option(help="Of the statistical part.")] = None,
    folder: OutFolder = None,
    processes: Annotated[bool, typer.Option("--processes", metavar=FLAG, help="One process per party.")] = False,  # noqa: FBT002
    timeout: Annotated[float | None, typer.Option(help="Seconds of silence before a party is given up.")] = None,
    colluders: Annotated[int | None, typer.Option(help="Sites that may help a lying coordinator.")] = None,
    replace: Annotated[bool, typer.Option("--replace", metavar=FLAG, help="Replace an earlier run in --out.")] = False,  # noqa: FBT002
    as_json: AsJson = False,  # noqa: FBT002
    quiet: Quiet = False,  # noqa: FBT002
) -> None:
    """Run all parties of a study on this machine, each with its own file only.

    The workflow's own options follow, as --n-bins 51; `cloister explain bin-values` lists them. A study.toml in place
    of the workflow's name is rehearsed as it stands, all its steps one after the other.
    """
    from cloister import workflows
    from cloister.run.rehearsal import check_sites
    from cloister.run.rehearsal import plan as plan_study
    from cloister.study import Study

    plan: dict[str, Any] = {"mode": "hardened", "seed": 0, "timeout": 60.0}
    asked = {"mode": mode, "seed": seed, "timeout": timeout, "colluders": colluders}
    own: dict[str, Any] = {k: v for k, v in asked.items() if v is not None}
    given: dict[str, Any] = {}
    extra = list(context.args)
    if study is not None and str(study).startswith("--"):
        extra.insert(0, str(study))
        study = None
    if workflow.endswith(STUDY):
        if study is not None or extra or own:
            found = [*map(str, filter(None, (study,))), *extra, *(f"--{k}" for k in own)][0]
            raise UsageError(f"{workflow} says its workflow, mode and options itself; found {found}")
        if folder is not None:
            _check_free(folder, replace=replace)
        _rehearse_whole(Study.load(workflow), data, folder, processes=processes, as_json=as_json, quiet=quiet)
        return
    if study is not None:
        agreed = Study.load(study)
        if agreed.workflow != workflow:
            raise UsageError(f"{study} is a study of {_what(agreed)}, not of '{workflow}'")
        plan |= {k: getattr(agreed, k) for k in ("mode", "seed", "timeout", "colluders")}
        given |= dict(agreed.parameters)
        check_sites(agreed, sites_of(data))
    given |= own_options(extra, workflows.get(workflow), context)
    files = sites_of(data)
    planned = plan_study(workflow, files, options=given, **(plan | own))
    planned = planned if study is None else dataclasses.replace(planned, governance=agreed.governance)
    if folder is not None:
        _check_free(folder, replace=replace)
    _rehearse_one(planned, files, folder, processes=processes, as_json=as_json, quiet=quiet)


def _check_free(folder: Path, *, replace: bool) -> None:
    """Raise if an earlier run left its results there, unless they are to be replaced."""
    if not replace and [*folder.glob("run.json"), *folder.glob("[0-9][0-9]-*/run.json")]:
        raise UsageError(f"{folder} holds the results of an earlier run; name another folder, or pass --replace")


def _what(study: Any) -> str:
    return f"'{study.workflow}'" if not study.steps else f"{len(study.steps)} steps"


def _rehearse_one(
    study: Any, files: dict[str, Path], folder: Path | None, *, processes: bool, as_json: bool, quiet: bool
) -> None:
    from cloister.run.rehearsal import rehearse_study

    show_warnings(study)
    if folder is not None:
        from cloister.run.results import check_folder

        check_folder(folder, study)
    with progress(quiet=quiet or as_json) as tell:
        run = rehearse_study(study, files, processes=processes, inplace=True, on_event=tell)
        written = write_run(run, folder, tell) if folder is not None else []
    finish(run, folder, written, as_json=as_json)


def _rehearse_whole(
    study: Any, data: list[str] | None, folder: Path | None, *, processes: bool, as_json: bool, quiet: bool
) -> None:
    """A study as it stands, with the parties that it names."""
    from cloister.run.rehearsal import check_sites, rehearse_steps
    from cloister.run.results import check_folder, clear_steps, save_run, step_folder
    from cloister.workflows.steps import check_steps

    files = sites_of(data)
    check_sites(study, files)
    check_steps(study)
    if not study.steps:
        _rehearse_one(study, files, folder, processes=processes, as_json=as_json, quiet=quiet)
        return
    show_warnings(study)
    if folder is not None:
        for part in study.parts:
            check_folder(step_folder(folder, part), study)
        clear_steps(folder)
    written: list[str] = []

    def keep(run: Run) -> None:
        if folder is not None:
            written.extend(map(str, save_run(run, step_folder(folder, run.study), on_event=tell)))

    with progress(quiet=quiet or as_json) as tell:
        series = rehearse_steps(study, files, processes=processes, inplace=True, on_event=tell, on_step=keep)
    finish_steps(series, folder, written, as_json=as_json)
