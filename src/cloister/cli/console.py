"""What the command line shows and how it reads words: options, progress, tables, receipts for people."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from cloister.errors import UsageError
from cloister.report.parts import size

if TYPE_CHECKING:
    from cloister.run.run import Run
    from cloister.study import Study
    from cloister.workflows.modes import Mode

out = Console(highlight=False, soft_wrap=True)
err = Console(stderr=True, highlight=False, soft_wrap=True)


# ---- words in --------------------------------------------------------------------------------------------------------


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
    """Read `--n-bins 51` and the like into the workflow's options; a slip in one of the verb's own is told as that."""
    import dataclasses
    import typing

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
    import difflib

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
    """A sentence that names options as Python has them (`use_rep=`), for who typed `words`: `--use-rep`."""
    import dataclasses
    import re

    from cloister import workflows

    named = next((word for word in words if word in workflows.names()), None)
    known = {f.name for f in dataclasses.fields(workflows.get(named).options)} if named else set()

    def flag(found: re.Match[str]) -> str:
        name, value = found[1], found[2]
        if name not in known:
            return found[0]
        return f"--{name.replace('_', '-')}" + (f" {value}" if value not in ("", "true") else "")

    return re.sub(r"(?<![\w'-])([a-z]\w*)=('[^']*'|[\w.]*\w|)", flag, text)


def literal(text: str, hint: Any) -> Any:
    """The value a word on the command line stands for, by the type its option has."""
    import types
    import typing

    kinds = typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else (hint,)
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
def progress(*, quiet: bool) -> Iterator[Any]:
    """One line per party: where it is in the protocol, and how much it has sent."""
    if quiet or not err.is_terminal:
        yield None
        return
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (
        SpinnerColumn(),
        TextColumn("{task.fields[party]:<14}"),
        TextColumn("{task.description:<44}"),
        TextColumn("{task.fields[size]:>10}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=err, transient=True) as bar:
        lines: dict[str, Any] = {}

        def tell(event: Any) -> None:
            if event.party not in lines:
                lines[event.party] = bar.add_task("", total=None, party=event.party, size="")
            what = f"{event.protocol} {event.line} {event.name.rpartition('.')[2]}"
            bar.update(lines[event.party], description=what[:44], size=size(event.total))

        yield tell


def finish(run: Run, folder: Path | None, *, as_json: bool) -> None:
    """Write what a run gave, say what it cost, and raise what went wrong."""
    written: list[str] = []
    if folder is not None:
        from cloister.report.page import write_report
        from cloister.run.results import save_run

        written = [str(p) for p in save_run(run, folder)]
        written.append(str(write_report(folder / "report.html", [run])))
    if as_json:
        told = {
            "workflow": run.study.workflow,
            "mode": run.study.mode,
            "cost": run.cost,
            "results": run.results,
            "errors": {p: str(e) for p, e in run.errors.items()},
            "files": written,
        }
        out.print_json(json.dumps(told, default=str))
    if run.errors:
        if folder is not None and not as_json:
            err.print(f"receipts of what was sent until then, and report.html, are in {folder}", markup=False)
        run.check()
    if as_json:
        return
    table = Table("party", "role", "messages", "sent", "rounds", "seconds", box=None)
    for party, role in run.study.parties.items():
        cost = run.cost[party]
        sent = size(cost["bytes"])
        table.add_row(party, role, f"{cost['messages']:.0f}", sent, f"{cost['rounds']:.0f}", f"{cost['seconds']:.2f}")
    out.print(table)
    for line in headlines(run):
        out.print(line, markup=False)
    if folder is not None:
        out.print(f"results, receipts and report.html are in {folder}", markup=False)


def headlines(run: Run) -> list[str]:
    """What came out, a line for the parties that have the same: single numbers only, the rest is in the report."""
    from cloister.report.parts import names, value
    from cloister.run.run import plain

    lines: dict[str, list[str]] = {}
    for party, results in run.results.items():
        numbers = {k: plain(v) for k, v in results.items()}
        told = [f"{k} {value(v, k)}" for k, v in numbers.items() if isinstance(v, int | float)]
        if told:
            lines.setdefault(", ".join(told), []).append(party)
    return [f" {names(who)}: {told}" for told, who in lines.items()]


def show_receipt(brief: dict[str, Any]) -> None:
    out.print(f"{brief['workflow']} ({brief['mode']}) in study {brief['study']}", style="bold", markup=False)
    out.print(
        f"party {brief['party']} · {brief['started']} · Cloister {brief['version']} · {brief['status']}", markup=False
    )
    out.print("with " + ", ".join(f"{p} ({r})" for p, r in brief["parties"].items()), markup=False)
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
