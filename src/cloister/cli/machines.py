"""Verbs between machines: `cloister provision`, `site`, `run`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from cloister.cli.console import err, out, progress, show_warnings
from cloister.cli.options import FLAG, STUDY, AsJson, Quiet, WorkflowName
from cloister.errors import UsageError
from cloister.report.parts import size


def provision(
    study: Annotated[Path, typer.Argument(help="The study; it needs a host and a port for the coordinator.")],
    folder: Annotated[Path, typer.Option("--out", help="Folder for the kits; one per party.")] = Path("kits"),
) -> None:
    """Make a start-up kit with certificates for every party of a study."""
    from cloister.runtime.provision import provision as make
    from cloister.study import Study
    from cloister.workflows.steps import check_steps

    agreed = Study.load(study)
    check_steps(agreed)
    show_warnings(agreed)
    for party, kit in make(agreed, folder).items():
        out.print(f"{party}: {kit}", markup=False)


def site(
    kit: Annotated[Path, typer.Argument(help="This party's start-up kit.")],
    approve: Annotated[  # noqa: FBT002
        bool, typer.Option("--approve", metavar=FLAG, help="Approve the kit's study, and stop.")
    ] = False,
) -> None:
    """Start a party (site, coordinator or auxiliary server) and wait for runs; Ctrl-C stops it."""
    if approve:
        from cloister.runtime.kit import Kit

        out.print(f"approved: {Kit.open(kit).approve()}", markup=False)
        return
    from cloister.runtime.start import start_party

    start_party(kit)


def run(
    workflow: WorkflowName,
    study: Annotated[
        Path | None, typer.Argument(help="The study that all parties agreed on, after its workflow's name or alone.")
    ] = None,
    me: Annotated[str, typer.Option("--as", help="Which party of the study this is.")] = "",
    data: Annotated[Path | None, typer.Option(help="This site's cells, for this run.")] = None,
    path: Annotated[Path | None, typer.Option("--out", help="Where to write the cells with results.")] = None,
    kit: Annotated[Path | None, typer.Option(help="This party's kit; kits/PARTY beside the study by default.")] = None,
    as_json: AsJson = False,  # noqa: FBT002
    quiet: Quiet = False,  # noqa: FBT002
) -> None:
    """Take part in one run between machines; as the coordinator, start it."""
    import dataclasses

    from cloister.runtime.attend import attend, check_same_study, conduct, take_away
    from cloister.runtime.kit import Kit
    from cloister.study import Study

    if study is None:
        if not workflow.endswith(STUDY):
            raise UsageError(f"which study? cloister run {workflow} study.toml --as PARTY")
        study = Path(workflow)
    elif workflow.endswith(STUDY):
        raise UsageError(f"two studies, {workflow} and {study}; name one")
    if not me:
        raise UsageError("which party of the study is this? name it with --as")
    agreed = Study.load(study)
    if not workflow.endswith(STUDY) and agreed.workflow != workflow:
        what = f"{len(agreed.steps)} steps" if agreed.steps else f"'{agreed.workflow}'"
        raise UsageError(f"{study} is a study of {what}, not of '{workflow}'")
    home = kit or study.parent / "kits" / me
    opened = Kit.open(home)
    if opened.me != me:
        raise UsageError(f"{home} is the kit of '{opened.me}', not of '{me}'")
    check_same_study(opened, agreed)

    def say(text: str) -> None:
        err.print(text, markup=False)

    with progress(quiet=quiet or as_json) as tell:
        if opened.role == "coordinator":
            ended = conduct(home, say=say, on_event=tell)
        else:
            ended = attend(home, data, say=say, on_event=tell)
    if path is not None:
        take_away(ended, path)
    if as_json:
        out.print_json(json.dumps(dataclasses.asdict(ended), default=str))
        return
    sent = size(ended.cost.get("bytes", 0))
    out.print(f"{ended.status}: sent {sent} in {ended.cost.get('seconds', 0):.1f} s; see {ended.folder}", markup=False)
    for party, word in ended.parties.items():
        out.print(f"  {party}: {word}", markup=False)
