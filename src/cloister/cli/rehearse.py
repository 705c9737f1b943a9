"""`cloister check` and `cloister rehearse`: a workflow or a study on files of this machine."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Column, Table

from cloister.cli.console import as_is, err, finish, finish_steps, in_words, out, progress, show_warnings, write_run
from cloister.cli.options import (
    FLAG,
    STUDY,
    AsJson,
    DataFiles,
    ModeName,
    OutFolder,
    Quiet,
    WorkflowName,
    as_flags,
    own_options,
    sites_of,
)
from cloister.errors import CloisterError, UsageError

if TYPE_CHECKING:
    from cloister.rehearsal.run import Run


MOST_SHOWN = 12  # groups of a column that a table lists; --json has more


def check(
    context: typer.Context,
    files: Annotated[list[Path], typer.Argument(help="Files of cells, of one site or several.")],
    workflow: Annotated[str | None, typer.Option("--for", help="Workflow or study.toml to check for.")] = None,
    as_json: AsJson = False,  # noqa: FBT002
) -> None:
    """Check whether files are ready for a workflow and fit together. Nothing is sent.

    Reports all problems of all files at once, columns and groups, what the workflow needs, and labels by
    site. For a study.toml, say whose file each is: basel=cells.h5ad, unless it is called basel.h5ad. Without --for,
    --label-key names the column of labels to compare.
    """
    from cloister.cells import tables as cells
    from cloister.cells.files import open_cells
    from cloister.cells.progress import told_to
    from cloister.errors import about
    from cloister.rehearsal.progress import passes_of

    words = [*map(str, files), *context.args]
    first = next((i for i, word in enumerate(words) if word.startswith("--")), len(words))
    if not first:
        raise UsageError(f"name the files first, then options: cloister check cells.h5ad {words[0]} ...")
    check_one, look_at_all, needs_of = _check_for(workflow, words[first:], context)
    summary: dict[str, Any] = {}
    together, problems = {}, []
    with progress(quiet=as_json) as tell:
        for word in words[:first]:
            site, _, path = _split_site(word) if workflow and workflow.endswith(STUDY) else ("", "", word)
            about_file = summary[path] = {}
            try:
                with told_to(passes_of(Path(path).name, tell)), about(path):
                    adata = together[site or path] = open_cells(path)
                    about_file |= cells.describe(adata)
                    if needs := needs_of(word, adata):
                        about_file["needs"] = needs
                    notes = check_one(word, adata)
            except UsageError:
                raise
            except CloisterError as error:
                about_file["problem"] = str(error)
                problems.append(error)
                continue
            if workflow:
                about_file["warnings"] = [*about_file.get("warnings", []), *notes]
    found = look_at_all(together) if len(together) > 1 else None
    if found is not None:
        told = [str(e) for e in problems]
        problems += [e for e in found.problems if not any(str(e) in text for text in told)]
        summary |= found.common
        if found.labels is not None:
            summary["labels"] = {name: dict(sites) for name, sites in found.labels.counts.items()}
            summary["suggested_labels"] = found.labels.suggested
        summary["notes"] = found.notes
    if problems:
        summary["problems"] = [str(e) for e in problems]
    if as_json:
        out.print_json(json.dumps(summary, default=str))
    else:
        _show_check(summary, [word if not workflow else _path_of(word, workflow) for word in words[:first]], found)
    if len(problems) == 1:
        raise problems[0]
    if problems:
        for e in problems:
            err.print(f"{type(e).__name__}: {as_flags(str(e), sys.argv)}", style="red", markup=False)
        err.print(f"{len(problems)} problems; not ready{f' for {workflow}' if workflow else ''}", style="red")
        raise typer.Exit(max(e.exit_code for e in problems))
    if not as_json:
        out.print("ready" + (f" for {workflow}" if workflow else ""), style="green")


def _split_site(word: str) -> tuple[str, str, str]:
    """Site and file of `basel=cells.h5ad`; an equals sign after a question mark belongs to the file's settings."""
    head, question, settings = word.partition("?")
    site, eq, path = head.rpartition("=")
    return site, eq, path + question + settings


def _path_of(word: str, workflow: str) -> str:
    return _split_site(word)[2] if workflow.endswith(STUDY) else word


def _show_check(summary: dict[str, Any], paths: list[str], found: Any) -> None:
    """Everything that `check` found, as tables."""
    for name in paths:
        table = Table(title=as_is(name), box=None, show_header=False, title_justify="left", title_style="bold")
        for key, value in summary[name].items():
            for title, text in _rows(key, value):
                table.add_row(title, as_is(text))
        out.print(table)
    if found is None:
        return
    if found.labels is not None and found.labels.counts:
        _show_labels(found.labels)
    for note in found.notes:
        out.print(f"note: {note}", style="yellow", markup=False)
    for key in ("genes_in_common", "labels_in_common"):
        if key in summary:
            out.print(f"{summary[key]} {key.replace('_', ' ')}")


def _rows(key: str, value: Any) -> list[tuple[str, str]]:
    if key == "groups":
        return [(f"groups in {column}", in_words(of)) for column, of in value.items() if len(of) <= MOST_SHOWN]
    return [(key.replace("_", " "), in_words(value))]


def _show_labels(labels: Any) -> None:
    """Labels by site with their cells, the terms of the Cell Ontology, and what could be written into the study."""
    sites = list(dict.fromkeys(site for counts in labels.counts.values() for site in counts))
    stems = [Path(site.partition("?")[0]).stem for site in sites]
    heads = stems if len(set(stems)) == len(stems) else sites
    table = Table("label", *(Column(as_is(head), justify="right") for head in heads), "ontology", "", box=None)
    same = {pair.name: pair for pair in labels.near}
    for name, counts in labels.counts.items():
        pair = same.get(name)
        remark = f"like '{pair.usual}'" if pair is not None else "one site only" if name in labels.single else ""
        cells = [str(counts.get(site, "")) for site in sites]
        table.add_row(as_is(name), *cells, labels.terms.get(name, ""), as_is(remark))
    out.print(table)
    if suggested := labels.suggested:
        from cloister.cells.ontology import cell_ontology

        merged = {pair.special for pair in labels.deeper}
        out.print("Nothing was renamed. To use one vocabulary, write into study.toml (or, at one site, site.toml):")
        out.print("  [labels]", markup=False)
        for name, label in suggested.items():
            remark = "   # less specific" if name in merged else ""
            out.print(f"  {json.dumps(name, ensure_ascii=False)} = {json.dumps(label, ensure_ascii=False)}{remark}",
                      markup=False)  # fmt: skip
        out.print("or let the names and synonyms of the Cell Ontology decide:")
        out.print(f'  [ontology]\n  version = "{cell_ontology().version}"', markup=False)


def _check_for(workflow: str | None, args: list[str], context: typer.Context) -> tuple[Any, Any, Any]:
    """Three functions: check a site's cells (returns warnings), look at all together, and say what is needed."""
    from cloister import workflows
    from cloister.cells import tables as cells
    from cloister.rehearsal.compatibility import look_together
    from cloister.study import Party, Study
    from cloister.workflows.pipeline import check_site, check_steps
    from cloister.workflows.site_labels import use_study_labels

    if workflow is None or not workflow.endswith(STUDY):
        found = workflows.get(workflow) if workflow else None
        if found is None:
            key = _label_key(args)
            own_options(args, None, context)
            if key is not None:
                return (
                    lambda word, adata: cells.check_cells(adata, label_key=key) and [],
                    lambda a: look_together(a, label_key=key),
                    lambda word, adata: _needs_of_all(adata),
                )
            return lambda word, adata: cells.check_cells(adata) and [], look_together, lambda w, a: _needs_of_all(a)
        given = own_options(args, found, context)
        options = workflows.options_of(found, {**found.stand_in, **given})
        return (
            lambda word, adata: found.check(adata, options),
            lambda a: look_together(a, found, options),
            lambda word, adata: _needs(found, options, "", adata),
        )
    if args:
        raise UsageError(f"{workflow} says its options itself; found {args[0]}")
    study = Study.load(workflow)
    checked = check_steps(study)
    _, first, options = checked[0]  # later steps work on what this one gives
    labelled = next(((w, o) for _, w, o in checked if getattr(o, "label_key", None)), (first, options))

    def site_of(word: str) -> Party:
        site = Party(_split_site(word)[0] or Path(word.partition("?")[0]).stem)
        if site not in study.sites:
            raise UsageError(f"'{site}' is not a site of {workflow}; say whose file it is: {study.sites[0]}={word}")
        return site

    def ready(word: str, adata: Any) -> list[str]:
        site = site_of(word)
        renamed = [f"labels renamed: {note}" for note in use_study_labels(study, adata)]
        return [*renamed, *check_site(study, site, adata)]

    def look(loaded: Any) -> Any:
        found = look_together(loaded, first, options)
        if labelled[0] is not first and found.labels is None:
            from cloister.rehearsal.compatibility import look_at_labels

            look_at_labels(found, loaded, labelled[1])
        return found

    return ready, look, lambda word, adata: _needs(first, options, site_of(word), adata)


def _label_key(args: list[str]) -> str | None:
    """Take `--label-key NAME` out of the words of a check without a workflow."""
    for i, word in enumerate(args):
        if word == "--label-key" and i + 1 < len(args):
            key = args[i + 1]
            del args[i : i + 2]
            return key
        if word.startswith("--label-key="):
            del args[i]
            return word.partition("=")[2]
    return None


def _needs(workflow: Any, options: Any, site: str, adata: Any) -> list[str]:
    """What a workflow reads of a site's cells, and whether it is there; with the options that name it."""
    from cloister.cells.tables import places
    from cloister.workflows.pipeline import SLOTS

    here, found = places(adata), []
    for key in dict.fromkeys((*workflow.reads(options, site), "label_key")):
        name = getattr(options, key, None)
        if not hasattr(options, key) or (key, name) == ("use_rep", "X"):
            continue
        flag = f"--{key.replace('_', '-')}"
        if name is None:
            found.append(f"{flag}: none")
            continue
        place = f"{SLOTS.get(key, 'obs')}[{name!r}]"
        found.append(f"{flag} {name}: {'found' if place in here else f'{place} is missing'}")
    return found


def _needs_of_all(adata: Any) -> dict[str, str]:
    """For every workflow with its usual options, what of these cells is missing."""
    from cloister import workflows
    from cloister.cells.tables import places
    from cloister.workflows.pipeline import needed

    here, found = places(adata), {}
    for name in workflows.names():
        try:
            each = workflows.get(name)
            required = [f for f in dataclasses.fields(each.options) if f.default is dataclasses.MISSING]
            options = workflows.options_of(each, {**{f.name: "" for f in required}, **each.stand_in})
            missing = sorted(needed(each, options, "") - here)
        except CloisterError:
            continue  # its options need more than a file; cloister explain lists them
        flags = [f"--{f.name.replace('_', '-')}" for f in required]
        parts = [f"{', '.join(missing)} missing"] if missing else []
        found[name] = "; ".join([*parts, *([f"needs {', '.join(flags)}"] if flags else [])]) or "nothing missing"
    return found


def rehearse(
    context: typer.Context,
    workflow: WorkflowName,
    study: Annotated[Path | None, typer.Argument(help="Study file with options and mode.")] = None,
    data: DataFiles = None,
    mode: ModeName = None,
    seed: Annotated[
        int | None, typer.Option(help="Seed of statistical randomness; keys and masks never depend on it.")
    ] = None,
    folder: OutFolder = None,
    processes: Annotated[  # noqa: FBT002
        bool, typer.Option("--processes", metavar=FLAG, help="Run every party in a process of its own.")
    ] = False,
    timeout: Annotated[
        float | None, typer.Option(help="Seconds without a message after which a party counts as dropped out.")
    ] = None,
    colluders: Annotated[
        int | None, typer.Option(help="Number of sites that may collude with a malicious coordinator.")
    ] = None,
    replace: Annotated[  # noqa: FBT002
        bool, typer.Option("--replace", metavar=FLAG, help="Overwrite an earlier run in --out.")
    ] = False,
    as_json: AsJson = False,  # noqa: FBT002
    quiet: Quiet = False,  # noqa: FBT002
) -> None:
    """Run all parties of a study here, each with only its own file.

    The workflow's own options follow, as --n-bins 51; `cloister explain bin-values` lists them. A study.toml in place
    of the workflow's name is rehearsed as it stands, all its steps one after the other.
    """
    from cloister import workflows
    from cloister.rehearsal.rehearsal import check_sites
    from cloister.rehearsal.rehearsal import plan as plan_study
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
    if study is not None:
        kept = {key: getattr(agreed, key) for key in ("governance", "labels", "ontology")}
        planned = dataclasses.replace(planned, **kept)
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
    from cloister.rehearsal.rehearsal import rehearse_study

    show_warnings(study)
    if folder is not None:
        from cloister.rehearsal.results import check_folder

        check_folder(folder, study)
    with progress(quiet=quiet or as_json) as tell:
        run = rehearse_study(study, files, processes=processes, inplace=True, on_event=tell)
        written = write_run(run, folder, tell) if folder is not None else []
    finish(run, folder, written, as_json=as_json)


def _rehearse_whole(
    study: Any, data: list[str] | None, folder: Path | None, *, processes: bool, as_json: bool, quiet: bool
) -> None:
    """A study as it stands, with the parties that it names."""
    from cloister.rehearsal.rehearsal import check_sites, rehearse_steps
    from cloister.rehearsal.results import check_folder, clear_steps, save_run, step_folder
    from cloister.workflows.pipeline import check_steps

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
