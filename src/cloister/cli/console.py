"""What the command line shows: modes, progress, tables, receipts for people."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from cloister.report.parts import size

if TYPE_CHECKING:
    from cloister.mpc.net.events import Event
    from cloister.rehearsal.run import Run, Series
    from cloister.study import Study
    from cloister.workflows.modes import Mode

out = Console(highlight=False, soft_wrap=True)
err = Console(stderr=True, highlight=False, soft_wrap=True)


# ---- words out -------------------------------------------------------------------------------------------------------


def show_warnings(study: Study) -> None:
    """Check a study, and say what its parties should hear before they start."""
    from cloister import workflows

    for note in workflows.warnings_of(study):
        err.print(f"note: {note}", style="yellow", markup=False)


def explain_mode(workflow: str, name: str, mode: Mode) -> None:
    """What a mode computes, who learns what in short and in full, and what else it may run on the way."""
    from cloister import protocols

    main, *others = mode.protocols
    out.print(f"[bold]{workflow}[/bold] · mode [bold]{name}[/bold]\n")
    out.print(protocols.docstring(main).partition("\n\n")[0], markup=False)
    if mode.learns:
        out.print("\n[bold]In short[/bold]")
        for who, what in mode.learns:
            out.print(f"{who}: {what}", markup=False)
    for title in ("Reveals", "Assumes", "Cost", "References"):
        if text := protocols.section(main, title):
            out.print(f"\n[bold]{title}[/bold]")
            out.print(text, markup=False)
    for protocol in others:
        options = " or ".join(mode.only_if.get(protocol, ()))
        out.print(f"\n[bold]{protocol}[/bold], {f'only with {options}' if options else 'on the way'}, reveals")
        out.print(protocols.section(protocol, "Reveals"), markup=False)
    out.print()


def explain_study(path: str, mode: str | None) -> None:
    """The steps of a study in their order, what each takes from earlier ones, and what its mode reveals."""
    from cloister import governance
    from cloister.errors import UsageError
    from cloister.study import Study
    from cloister.workflows.pipeline import check_steps, given, needed

    if mode is not None:
        raise UsageError(f"{path} says its modes itself; leave --mode out")
    study = Study.load(path)
    out.print(f"[bold]study[/bold] {study.name}, {len(study.parts)} step(s), digest {study.digest.hex()}")
    for title, text in governance.in_words(study.governance):
        out.print(f"{title}: {text}", markup=False)
    out.print(*([] if study.governance else ["purpose, legal basis, permit and expiry are not written in it"]))
    for name, label in study.labels.items():
        out.print(f"renames the label '{name}' to '{label}' at every site", markup=False)
    if study.ontology:
        terms = ", ".join(study.ontology.get("terms", ()))
        merged = f"; labels below these become these: {terms}" if terms else ""
        out.print(f"labels become names of the Cell Ontology {study.ontology['version']}{merged}", markup=False)
    checked, made = check_steps(study), dict[str, str]()
    for part, workflow, options in checked:
        wanted = {place for site in study.sites for place in needed(workflow, options, site)}
        taken = [f"{place} from '{made[place]}'" for place in sorted(wanted) if place in made]
        written = {place for site in study.sites for place in given(workflow, options, site)}
        made |= dict.fromkeys(written, part.label)
        out.print(f"{part.place or part.label}: {workflow.summary}", markup=False)
        for what, places in {"takes": taken, "writes": sorted(written)}.items():
            if places:
                out.print(f"  {what} {', '.join(places)}", markup=False)
    out.print()
    for part, workflow, _ in checked:
        explain_mode(part.workflow, part.mode, workflow.mode(part.mode))


# ---- tables out ------------------------------------------------------------------------------------------------------


def as_is(x: object) -> Text:
    """A table's cell that comes from a file or an option: brackets in it are brackets, not markup."""
    return Text(str(x))


def in_words(value: Any) -> str:
    """A value of `describe` for people."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.1%}"
    if isinstance(value, dict):
        return ", ".join(k if v is None else f"{k} ({v})" for k, v in value.items()) or "none"
    if isinstance(value, list | tuple):
        return ", ".join(map(str, value)) or "none"
    return str(value)


@contextlib.contextmanager
def progress(*, quiet: bool = False) -> Iterator[Callable[[Event], None] | None]:
    """One line per party: what it does, how far that is, rounds, bytes sent, time left. None in a pipe."""
    if quiet or not err.is_terminal:
        yield None
        return
    from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    from cloister.rehearsal.progress import Watch

    columns = (
        SpinnerColumn(),
        TextColumn("{task.fields[party]:<12}", markup=False),
        TextColumn("{task.description:<36}", markup=False),
        BarColumn(12),
        TextColumn("{task.fields[count]:<12}", markup=False),
        TextColumn("{task.fields[told]:<22}", markup=False),
        TextColumn("{task.fields[left]:<20}", markup=False),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=err, transient=True) as bar:
        lines: dict[str, Any] = {}
        watch = Watch()

        def tell(event: Event) -> None:
            if event.party not in lines:
                lines[event.party] = bar.add_task("", total=None, party=event.party, count="", told="", left="")
            now = watch.hear(event)
            told = f"{now.rounds} rounds, {size(now.sent)}" if now.rounds or now.sent else ""
            words: dict[str, Any] = {"count": now.count, "told": told, "left": now.time_left}
            line, doing = lines[event.party], now.doing[:36]
            bar.update(line, total=now.of or None, completed=now.done, description=doing, **words)

        yield tell


def write_run(run: Run, folder: Path, on_event: Callable[[Event], None] | None = None) -> list[str]:
    """Write what a run gave, and the page about it; returns the files."""
    from cloister.rehearsal.progress import passes_of
    from cloister.rehearsal.results import save_run
    from cloister.report.page import write_report

    written = [str(p) for p in save_run(run, folder, on_event=on_event)]
    tell = passes_of("report", on_event) or (lambda *_: None)
    tell("report", "page", 1, 2)
    written.append(str(write_report(folder / "report.html", [run])))
    tell("report", "page", 2, 2)
    return written


def finish(run: Run, folder: Path | None, written: list[str], *, as_json: bool) -> None:
    """Say what a run gave and cost, and where it was written; raise what went wrong."""
    if as_json:
        out.print_json(json.dumps({**_summary(run), "files": written}, default=str))
    if run.errors:
        if not as_json:
            show_origins(run)
            if folder is not None:
                err.print(f"receipts of what was sent until then, and report.html, are in {folder}", markup=False)
        run.check()
    if as_json:
        return
    show_cost(run)
    if folder is not None:
        out.print(f"results, receipts and report.html are in {folder}", markup=False)


def _summary(run: Run) -> dict[str, Any]:
    return {
        "workflow": run.study.workflow,
        "mode": run.study.mode,
        "cost": run.cost,
        "findings": run.findings,
        "results": run.results,
        "errors": {p: str(e) for p, e in run.errors.items()},
        "origins": {p: {"origin": origin, "reason": reason} for p, (origin, reason) in run.origins.items()},
    }


def show_origins(run: Run) -> None:
    """How a run that failed ended at each party: why, and where that began."""
    for party in run.study.parties:
        origin, reason = run.origins.get(party, ("", run.status(party)))
        where = "" if not origin else ", here" if origin == party else f", at {origin}"
        err.print(f"{party}: {reason}{where}", markup=False)


def show_cost(run: Run) -> None:
    """What a run found, and what it cost each party."""
    findings = run.findings
    for line in findings or headlines(run):
        out.print(line, markup=False)
    table = Table("party", "role", "messages", "sent", "rounds", "seconds", box=None)
    for party, role in run.study.parties.items():
        cost = run.cost[party]
        sent = size(cost["bytes"])
        table.add_row(party, role, f"{cost['messages']:.0f}", sent, f"{cost['rounds']:.0f}", f"{cost['seconds']:.2f}")
    out.print(table)


def finish_steps(series: Series, folder: Path | None, written: list[str], *, as_json: bool) -> None:
    """Write the page of all steps, say what each cost, and raise what went wrong."""
    if folder is not None:
        written = [*written, str(series.report(folder / "report.html"))]
    if as_json:
        steps = {name: _summary(run) for name, run in series.runs.items()}
        told = {"study": series.study.name, "steps": steps, "failed": series.failed, "files": written}
        out.print_json(json.dumps(told, default=str))
    else:
        for run in series.runs.values():
            if run.whole:
                out.print(f"{run.study.place}: {run.study.workflow}, {run.study.mode}", style="bold", markup=False)
                show_cost(run)
        where = "" if folder is None else f" is in {folder}, a folder for each step, and report.html"
        if series.failed:
            show_origins(series.runs[series.failed])
        if series.failed and folder is not None:
            err.print(f"what was done before '{series.failed}' failed{where}", markup=False)
        elif folder is not None:
            out.print(f"what each step gave{where}", markup=False)
    series.check()


def headlines(run: Run) -> list[str]:
    """What came out, a line for the parties that have the same: single numbers only, the rest is in the report."""
    from cloister.rehearsal.record import plain
    from cloister.report.parts import names, value

    lines: dict[str, list[str]] = {}
    for party, results in run.results.items():
        numbers = {k: plain(v) for k, v in results.items()}
        parts = [f"{k} {value(v, k)}" for k, v in numbers.items() if isinstance(v, int | float)]
        if parts:
            lines.setdefault(", ".join(parts), []).append(party)
    return [f"{names(who)}: {parts}" for parts, who in lines.items()]


def show_receipt(brief: dict[str, Any]) -> None:
    from cloister.report.provenance import signed_rows

    step = f", {brief['step']}, whole study {brief['whole_study'][:16]}…" if "step" in brief else ""
    out.print(f"{brief['workflow']} ({brief['mode']}) in study {brief['study']}{step}", style="bold", markup=False)
    out.print(
        f"party {brief['party']} · {brief['started']} · Cloister {brief['version']} · {brief['status']}", markup=False
    )
    out.print("with " + ", ".join(f"{p} ({r})" for p, r in brief["parties"].items()), markup=False)
    if "counted" in brief:
        out.print(f"minimum group sizes and limits count {brief['counted']}", markup=False)
    for title, text in signed_rows(brief):
        out.print(f"{title}: {text}", markup=False)
    table = Table("what left", "line", "to", "times", "bytes", box=None)
    for row in brief["summary"]:
        if row["kind"] == "sent":
            facts = (row["name"], row["line"], row["to"], row["count"], size(row["bytes"]))
            table.add_row(*map(as_is, facts))
    out.print(table)
    opened = [row for row in brief["summary"] if row["kind"] == "opened"]
    for row in opened:
        out.print(
            f"opened to {row['to']} ({row['protocol']} {row['line']}): {row['name']} × {row['count']}", markup=False
        )
    for name, text in brief["reveals"].items():
        out.print(f"\n{name} ran, and reveals", style="bold", markup=False)
        out.print(text, markup=False)
    out.print(
        f"\n{brief['entries']} entries, head {brief['head'][:16]}…, key {brief.get('public', '')[:16]}…", markup=False
    )
