"""Verbs between machines: `cloister provision`, `site`, `run`, `attach`, `cancel`, `halt`, `status`, `page`."""

from __future__ import annotations

import functools
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cloister.cli.console import err, out, progress, show_warnings
from cloister.cli.options import FLAG, STUDY, AsJson, Quiet, WorkflowName
from cloister.errors import UsageError
from cloister.report.parts import size

if TYPE_CHECKING:
    from cloister.deploy.kit import Kit
    from cloister.deploy.party import Ended


def provision(
    study: Annotated[Path, typer.Argument(help="Study with the coordinator's host and port under [network].")],
    folder: Annotated[Path, typer.Option("--out", help="Folder for the kits, one per party.")] = Path("kits"),
) -> None:
    """Make a start-up kit with certificates for every party of a study."""
    from cloister.deploy.provision import provision as make
    from cloister.study import Study
    from cloister.workflows.pipeline import check_steps

    agreed = Study.load(study)
    check_steps(agreed)
    show_warnings(agreed)
    for party, kit in make(agreed, folder).items():
        out.print(f"{party}: {kit}", markup=False)


def site(
    kit: Annotated[Path, typer.Argument(help="Start-up kit of this party.")],
    approve: Annotated[  # noqa: FBT002
        bool, typer.Option("--approve", metavar=FLAG, help="Approve the kit's study on this site's cells, and stop.")
    ] = False,
    refuse: Annotated[  # noqa: FBT002
        bool,
        typer.Option("--refuse", metavar=FLAG, help="Record that the kit's study was reviewed and declined, and stop."),
    ] = False,
    by: Annotated[
        str, typer.Option(help="With --approve or --refuse: name of the reviewer; the login name by default.")
    ] = "",
    data: Annotated[
        Path | None, typer.Option(help="With --approve: file of cells; that of site.toml by default.")
    ] = None,
    small_change: Annotated[  # noqa: FBT002
        bool,
        typer.Option(
            "--allow-small-change",
            metavar=FLAG,
            help="With --approve: allow cells that differ from an earlier run's by fewer than min_cells or min_donors.",
        ),
    ] = False,
    page: Annotated[  # noqa: FBT002
        bool,
        typer.Option(
            "--page",
            metavar=FLAG,
            help="Serve a page on this machine with current runs, studies to decide on, and halt.",
        ),
    ] = False,
    port: Annotated[int | None, typer.Option(help="With --page: TCP port; 8642 by default.")] = None,
    log: Annotated[
        str, typer.Option(help="Format of log lines: text, json, or journal (fields of journald).")
    ] = "text",
) -> None:
    """Start a party and wait for runs; Ctrl-C stops it."""
    if approve and refuse:
        raise UsageError("--approve or --refuse, not both")
    if (page and (approve or refuse)) or (port is not None and not page):
        raise UsageError("--page is for a party that starts, and --port for --page")
    if approve or refuse:
        from cloister.deploy.kit import Kit

        if approve:
            _show_approved(_asked(Kit.open(kit)), by, data, small_change=small_change)
        else:
            _show_refused(_asked(Kit.open(kit)), by, data)
        return
    if by or data is not None or small_change:
        raise UsageError(
            "--by, --data and --allow-small-change need --approve; a service reads its cells from local/site.toml"
        )
    from cloister.deploy.logs import HOW, HOWS
    from cloister.deploy.start import start_party

    if log not in HOWS:
        raise UsageError(f"--log must be one of {', '.join(HOWS)}, found {log!r}")
    os.environ[HOW] = log  # for the processes of runs, too
    if not page:
        start_party(kit)
    from cloister.page.server import PORT, beside

    start_party(kit, functools.partial(beside, port=PORT if port is None else port))


def page(
    kits: Annotated[list[Path], typer.Argument(help="Kits of parties on this machine, one for each study.")],
    port: Annotated[int | None, typer.Option(help="TCP port on 127.0.0.1; 8642 by default.")] = None,
    add_user: Annotated[str, typer.Option(help="Add a user to these kits, print a token, and stop.")] = "",
    remove_user: Annotated[str, typer.Option(help="Remove a user from these kits, and stop.")] = "",
    look: Annotated[bool, typer.Option("--look", metavar=FLAG, help="With --add-user: may look, not decide.")] = False,  # noqa: FBT002
    sso: Annotated[  # noqa: FBT002
        bool, typer.Option("--sso", metavar=FLAG, help="With --add-user: named by the log-in proxy, without a token.")
    ] = False,
) -> None:
    """Serve one page for several studies, or manage its users."""
    from cloister.deploy.kit import Kit
    from cloister.page import users

    if (add_user and remove_user) or ((look or sso) and not add_user):
        raise UsageError("--add-user or --remove-user, not both; --look and --sso are for --add-user")
    opened = [Kit.open(kit) for kit in kits]
    token = "" if sso else users.new_token()  # one for all studies of the page
    for kit in opened if add_user or remove_user else ():
        if remove_user:
            users.remove(kit, remove_user)
            out.print(f"{kit.me}: {remove_user} is not a user of its page any more", markup=False)
        else:
            users.add(kit, add_user, token, decides=not look)
            what = "may look" if look else "may look and decide"
            proxy = f"; the log-in proxy's secret is in {kit.path / users.SECRET}" if sso else ""
            out.print(f"{kit.me}: {add_user} {what}{proxy}", markup=False, soft_wrap=True)
    if add_user or remove_user:
        if add_user and token:
            out.print(f"token: {token}", markup=False, soft_wrap=True)
        return
    from cloister.deploy.start import wait_for_stop
    from cloister.page.server import PORT, beside

    with beside([kit.path for kit in opened], PORT if port is None else port):
        wait_for_stop()


def status(
    kit: Annotated[Path, typer.Argument(help="This party's start-up kit.")],
    as_json: AsJson = False,  # noqa: FBT002
    prometheus: Annotated[  # noqa: FBT002
        bool, typer.Option("--prometheus", metavar=FLAG, help="Print metrics in the text format of Prometheus.")
    ] = False,
) -> None:
    """Show what a party's service does now, and its last error."""
    from cloister.deploy import status as shown
    from cloister.deploy.control_socket import status_of
    from cloister.deploy.kit import Kit

    opened = Kit.open(kit)
    now = status_of(opened)
    if prometheus:
        print(shown.metrics((opened, now)), end="")
    elif as_json:
        facts = {"party": opened.me, "role": opened.role, "study": opened.study.name}
        facts |= {"digest": opened.study.digest.hex(), "decision": opened.decision}
        print(json.dumps({**facts, **shown.to_json(now)}, indent=1))
    else:
        for title, text in shown.lines(opened, now):
            out.print(f"{title:9} {text}", markup=False, soft_wrap=True)
    if not now.running:
        raise typer.Exit(3)  # for whoever asks by a program, as a container's probe


def _asked(kit: Kit) -> Kit:
    if kit.role == "coordinator":
        raise UsageError(f"{kit.me} is the coordinator; the other parties approve or decline its studies")
    return kit


def _show_refused(kit: Kit, by: str, data: Path | None) -> None:
    if data is not None:
        raise UsageError("--data is for --approve; nothing is read of cells that are not allowed")
    entry = kit.refuse(by)
    out.print(f"refused: study {kit.study.name!r} ({kit.study.digest.hex()})", markup=False)
    out.print(f"  by {entry.by}, {entry.when}", markup=False)


def _show_approved(kit: Kit, by: str, data: Path | None, *, small_change: bool = False) -> None:
    from cloister import governance
    from cloister.deploy.kit import CONSENTS_SET
    from cloister.report.provenance import terms_rows

    unseen = kit.unseen_consents(kit.policy())
    entry, study = kit.approve(by, data, small_change=small_change), kit.study
    asked = ", then ".join(f"{part.workflow}, mode {part.mode}" for part in study.parts)
    out.print(f"approved: {asked}, study {study.name!r} ({study.digest.hex()})", markup=False)
    for title, text in governance.in_words(study.governance):
        out.print(f"  {title}: {text}", markup=False)
    out.print(f"  by {entry.by}, {entry.when}" + (f", on {entry.data.words}" if entry.data else ""), markup=False)
    for title, text in terms_rows(entry.terms):
        out.print(f"  {title}: {text}", markup=False)
    if unseen:
        out.print(f"  {CONSENTS_SET.format(', '.join(unseen))}", style="yellow", markup=False)
    if entry.small_change:
        out.print("  runs are allowed although few cells may differ from those of an earlier run", markup=False)


def halt(
    kit: Annotated[Path, typer.Argument(help="Start-up kit of this party.")],
    by: Annotated[str, typer.Option(help="Name of the person who halts; the login name by default.")] = "",
) -> None:
    """Stop every run at this party now and withdraw its approval."""
    from cloister.deploy.approval.halting import halt as stop

    done = stop(kit, by)
    out.print("the approval is withdrawn" if done.withdrawn else "there was no approval to withdraw")
    told = f"{done.runs} run(s) stopped" if done.running else "no service is running here, so no run is"
    out.print(told, markup=False)


def run(
    workflow: WorkflowName,
    study: Annotated[Path | None, typer.Argument(help="Study file that all parties agreed on.")] = None,
    me: Annotated[str, typer.Option("--as", help="Name of this party in the study.")] = "",
    data: Annotated[Path | None, typer.Option(help="File of this site's cells; that of site.toml by default.")] = None,
    path: Annotated[Path | None, typer.Option("--out", help="File for the cells with results.")] = None,
    kit: Annotated[
        Path | None, typer.Option(help="Start-up kit of this party; kits/PARTY beside the study by default.")
    ] = None,
    detached: Annotated[  # noqa: FBT002
        bool,
        typer.Option("--detach", metavar=FLAG, help="Return at once; the run goes on. See attach, status and cancel."),
    ] = False,
    anew: Annotated[  # noqa: FBT002
        bool,
        typer.Option(
            "--anew", metavar=FLAG, help="As coordinator: begin with the first step, whatever all have finished."
        ),
    ] = False,
    as_json: AsJson = False,  # noqa: FBT002
    quiet: Quiet = False,  # noqa: FBT002
) -> None:
    """Take part in one run between machines; as coordinator, start it."""
    from cloister.deploy.join import attend, check_same_study, conduct, detach, take_away
    from cloister.deploy.kit import Kit
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

    if anew and opened.role != "coordinator":
        raise UsageError(f"--anew is for the coordinator {agreed.coordinator}, and {me} is a {opened.role}")
    if detached:
        if path is not None:
            raise UsageError("--out needs the run's end; with --detach, the cells are in the folder of the run")
        detach(home, data, say=say, anew=anew)
        return
    with progress(quiet=quiet or as_json) as tell:
        if opened.role == "coordinator":
            ended = conduct(home, say=say, on_event=tell, anew=anew)
        else:
            ended = attend(home, data, say=say, on_event=tell)
    if path is not None:
        take_away(ended, path)
    _show_ended(ended, as_json=as_json)


def attach(
    kit: Annotated[Path, typer.Argument(help="Start-up kit of this party.")],
    as_json: AsJson = False,  # noqa: FBT002
    quiet: Quiet = False,  # noqa: FBT002
) -> None:
    """Follow the current run of a party; Ctrl-C does not stop it."""
    from cloister.deploy.control_socket import watch_run

    with progress(quiet=quiet or as_json) as tell:
        ended = watch_run(kit, on_event=tell)
    _show_ended(ended, as_json=as_json)


def cancel(kit: Annotated[Path, typer.Argument(help="Start-up kit of this party.")]) -> None:
    """Stop the runs at this party; its approval stays."""
    from cloister.deploy.control_socket import cancel as stop

    out.print(f"{stop(kit)} run(s) stopped", markup=False)


def _show_ended(ended: Ended, *, as_json: bool) -> None:
    import dataclasses

    if as_json:
        out.print_json(json.dumps(dataclasses.asdict(ended), default=str))
        return
    sent = size(ended.cost.get("bytes", 0))
    out.print(f"{ended.status}: sent {sent} in {ended.cost.get('seconds', 0):.1f} s; see {ended.folder}", markup=False)
    for party, word in ended.parties.items():
        out.print(f"  {party}: {word}", markup=False)
