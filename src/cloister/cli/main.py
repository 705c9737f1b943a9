"""The command line: verbs, named options, files in and files out. Each verb is a thin coat on a public function.

Exit codes: 0 done, 1 data or parameters, 2 usage, 3 a peer or the network, 4 a check failed and the run aborted.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text

from cloister._version import __version__
from cloister.cli import machines
from cloister.cli.advise import advise
from cloister.cli.console import as_is, err, explain_mode, explain_study, out, progress
from cloister.cli.distil import distil
from cloister.cli.new import new
from cloister.cli.options import FLAG, OPEN, STUDY, AsJson, ModeName, Quiet, as_flags
from cloister.cli.place import place
from cloister.cli.predict import embed, predict
from cloister.cli.receipt import receipt
from cloister.cli.rehearse import check, rehearse
from cloister.errors import CloisterError, UsageError

app = typer.Typer(
    name="cloister",
    help="Analyse single-cell data together while every cell stays at home.",
    epilog="Start with:  cloister demo   or   cloister explain bin-values",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def main() -> None:
    """Run the command line; every error is one sentence and an exit code."""
    try:
        code = app(standalone_mode=False)  # typer.Exit comes back as a number
        sys.exit(code if isinstance(code, int) else 0)
    except CloisterError as e:
        err.print(f"{type(e).__name__}: {as_flags(str(e), sys.argv)}", style="red", markup=False)
        sys.exit(e.exit_code)
    except KeyboardInterrupt:
        err.print("stopped")
        sys.exit(130)
    except Exception as e:
        code = getattr(e, "exit_code", None)
        if code is None:
            err.print(f"this is a bug in Cloister: {type(e).__name__}; set CLOISTER_DEBUG=1 to see where")
            if "CLOISTER_DEBUG" in os.environ:
                raise
            sys.exit(1)
        text = e.format_message() if hasattr(e, "format_message") else str(e)
        if text:
            verb = next((word for word in sys.argv[1:] if not word.startswith("-")), "")
            known = verb in {c.name or getattr(c.callback, "__name__", "") for c in app.registered_commands}
            more = f"; see cloister {verb} --help" if known and text.startswith("Missing") else ""
            err.print(f"UsageError: {text.rstrip('.') if more else text}{more}", style="red", markup=False)
        sys.exit(code)


def _version(value: bool) -> None:  # noqa: FBT001
    if value:
        out.print(f"cloister {__version__}")
        raise typer.Exit


@app.callback()
def _top(
    version: Annotated[  # noqa: FBT002
        bool, typer.Option("--version", callback=_version, is_eager=True, metavar=FLAG, help="Print the version.")
    ] = False,
) -> None:
    """Analyse single-cell data together while every cell stays at home."""


# ---- before anything runs --------------------------------------------------------------------------------------------


@app.command(epilog="Example:  cloister explain bin-values --mode published")
def explain(
    workflow: Annotated[
        str | None, typer.Argument(help="Name of a workflow, or a study.toml; all workflows by default.")
    ] = None,
    mode: ModeName = None,
) -> None:
    """Explain a workflow: result, who learns what, cost and options. Nothing is sent."""
    import dataclasses

    from cloister import workflows
    from cloister.workflows.options import listed_options

    if workflow is None:
        table = Table("workflow", "what it does", "modes", box=None)
        for name in workflows.names():
            each = workflows.get(name)
            table.add_row(name, each.summary, ", ".join(each.modes))
        out.print(table)
        return
    if workflow.endswith(STUDY):
        explain_study(workflow, mode)
        return
    chosen = workflows.get(workflow)
    for one in [mode] if mode else chosen.modes:
        explain_mode(workflow, one, chosen.mode(one))
    table = Table("option", "default", "meaning", box=None)
    for f in listed_options(chosen.options):
        modes = f.metadata.get("modes", ())
        if mode and modes and mode not in modes:
            continue
        default = "required" if f.default is dataclasses.MISSING else str(f.default)
        only = f"mode {' and '.join(modes)} only: " if modes and not mode else ""
        table.add_row("--" + f.name.replace("_", "-"), as_is(default), as_is(only + f.metadata["help"]))
    out.print(table)


app.command(epilog="Example:  cloister new study --template atlas --site basel --site lugano --site vienna")(new)
app.command(context_settings=OPEN, epilog="Example:  cloister check cells.h5ad --for bin-values")(check)


# ---- runs ------------------------------------------------------------------------------------------------------------


app.command(
    context_settings=OPEN,
    epilog="Example:  cloister rehearse bin-values --data a=a.h5ad --data b=b.h5ad --data c=c.h5ad --out results",
)(rehearse)


app.command(epilog="Example:  cloister advise study.toml --data a=a.h5ad --data b=b.h5ad --data c=c.h5ad")(advise)


# ---- after a run -----------------------------------------------------------------------------------------------------

app.command(epilog="Example:  cloister receipt basel.receipt.json --verify   or   A.json B.json --compare")(receipt)


@app.command(epilog="Example:  cloister report results")
def report(
    folder: Annotated[Path, typer.Argument(help="Folder of results, as written by rehearse or run.")],
    path: Annotated[
        Path | None, typer.Option("--out", help="File for the report; report.html in the folder by default.")
    ] = None,
) -> None:
    """Write the report of a results folder again."""
    from cloister.rehearsal.results import load_runs
    from cloister.report.page import write_report

    runs = load_runs(folder)
    title = runs[0].study.name if runs[0].study.at else "Cloister report"
    written = write_report(path or folder / "report.html", runs, title=title)
    out.print(str(written), markup=False)


@app.command(epilog="Example:  cloister demo --out demo")
def demo(
    folder: Annotated[Path, typer.Option("--out", help="Folder for the report.")] = Path("demo"),
    only_cells: Annotated[  # noqa: FBT002
        bool, typer.Option("--cells", metavar=FLAG, help="Only write the files of three small sites, and run nothing.")
    ] = False,
    quiet: Quiet = False,  # noqa: FBT002
) -> None:
    """Run every workflow on the cells of three hospitals; write report.html."""
    from cloister.demo import run_demo, write_sites
    from cloister.demo.rows import halves

    if folder.exists() and not folder.is_dir():
        raise UsageError(f"{folder} is a file; name a folder with --out")
    if only_cells:
        for file in write_sites(folder):
            out.print(str(file), markup=False)
        return

    with progress(quiet=quiet) as tell:
        table, path = run_demo(folder, on_event=tell, say=lambda text: err.print(text, markup=False))
    for half in halves(table).values():
        shown = Table(*half[0], box=None, pad_edge=False, collapse_padding=True)
        for row in half[1:]:
            shown.add_row(*map(as_is, row))
        out.print(shown, "")
    out.print("Attacks read what these runs sent and opened; in brackets, what guessing gives. Where no message")
    out.print("holds what a mode opens, it is worked out in the clear by the functions of the protocol.")
    out.print(f"open {path}", markup=False)


app.command(epilog="Example:  cloister predict results/basel.model.npz new.h5ad --out labelled.h5ad")(predict)
app.command(epilog="Example:  cloister place results/basel.model.npz new.h5ad --out placed.h5ad")(place)
app.command(epilog="Example:  cloister embed checkpoint/ cells.h5ad --out embedded.h5ad")(embed)
app.command(epilog="Example:  cloister distil vit.safetensors images.npz --label-key y --out model.npz")(distil)


# ---- between machines ------------------------------------------------------------------------------------------------

app.command(epilog="Example:  cloister provision study.toml --out kits")(machines.provision)
app.command(epilog="Example:  cloister site kits/basel --approve   then   cloister site kits/basel")(machines.site)
app.command(epilog="Example:  cloister halt kits/basel")(machines.halt)
app.command(epilog="Example:  cloister status kits/basel")(machines.status)
app.command(epilog="Example:  cloister attach kits/hub")(machines.attach)
app.command(epilog="Example:  cloister cancel kits/hub")(machines.cancel)
app.command(epilog="Example:  cloister page kits/basel other/kits/basel")(machines.page)
app.command(epilog="Example:  cloister run bin-values study.toml --as basel --data a.h5ad --out a.binned.h5ad")(
    machines.run
)


@app.command(epilog="Example:  cloister doctor --kit kits/basel")
def doctor(
    kit: Annotated[Path | None, typer.Option(help="Start-up kit to check as well.")] = None,
    as_json: AsJson = False,  # noqa: FBT002
) -> None:
    """Check this installation, and a kit. Nothing is changed or sent."""
    import dataclasses

    from cloister.cli.doctor import examine

    findings = list(examine(kit))
    if as_json:
        out.print_json(json.dumps([dataclasses.asdict(f) for f in findings]))
    else:
        table = Table(box=None, show_header=False)
        colours = {"ok": "green", "note": "yellow", "wrong": "red"}
        for f in findings:
            table.add_row(f.name, Text(f.state, style=colours[f.state]), as_is(f.detail))
        out.print(table)
    if any(f.state == "wrong" for f in findings):
        raise typer.Exit(1)


if __name__ == "__main__":
    main()
