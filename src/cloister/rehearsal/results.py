"""Results: what came of a run, as files in a folder, and back.

    results/
        run.json                 study, versions, how it ended, and per party: status, cost, results, file names
        basel.receipt.json       what basel sent and opened; one per party that is here
        basel.h5ad               basel's annotated cells              ┐
        basel.<name>             further files of the workflow        │ only of a run that was completed
        figure-1-<title>.png     figures, described in figures.json   ┘

A study of several steps has a folder for each in it, `01-shared-pca`, `02-map-labels`, ..., and one page for all.

Everything is written to a hidden folder first and moved to its place when it is whole; `run.json` goes away first
and comes last, so a folder without it holds nothing to rely on. An aborted run leaves receipts, and `run.json` with the
place of the abort. The files are for their owner's eyes (0600).
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import uuid
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cloister import files, workflows
from cloister._version import __version__
from cloister.cells.files import read_cells, write_cells
from cloister.cells.progress import told_to
from cloister.errors import CloisterError, DataError, DiskError, ProtocolAbort, ReceiptError, blame
from cloister.mpc.net.events import Event, ignore_errors
from cloister.mpc.net.receipts import Receipt
from cloister.rehearsal.progress import passes_of
from cloister.rehearsal.record import PNG, Abort, Drawing, Figure, Flow, plain
from cloister.rehearsal.run import Run
from cloister.session import Outcome
from cloister.study import Study, format_study, parse_study

if TYPE_CHECKING:
    from anndata import AnnData

FORMAT = "cloister-run/1"
FIGURES = "cloister-figures/1"
PLAIN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}")


# ---- to files --------------------------------------------------------------------------------------------------------


def check_folder(folder: str | Path, study: Study) -> None:
    """Raise `DataError` if saving a run of `study` in `folder` would overwrite what is not of an earlier run."""
    folder = Path(folder)
    if not folder.exists():
        return
    if not folder.is_dir():
        raise DataError(f"{folder} is a file; name a folder for the results")
    ours = set(_named_files(folder))
    for party in study.parties:
        if (folder / f"{party}.h5ad").exists() and f"{party}.h5ad" not in ours:
            raise DataError(
                f"{folder / f'{party}.h5ad'} is there and is not of an earlier run; results would overwrite it:"
                " choose another folder"
            )


def step_folder(folder: Path, part: Study) -> Path:
    """Where a part of a study goes: a step into a folder of its own."""
    return folder / f"{part.at:02d}-{part.label}" if part.at else folder


def clear_steps(folder: Path) -> None:
    """Remove what the steps of an earlier run left in `folder`, by their own lists; anything else stays."""
    for place in folder.glob("[0-9][0-9]-*/run.json") if folder.is_dir() else ():
        for name in (*_named_files(place.parent), "run.json"):
            (place.parent / name).unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            place.parent.rmdir()


def save_run(run: Run, folder: str | Path, *, on_event: Callable[[Event], None] | None = None) -> list[Path]:
    """Write a run's receipts, results, figures and `run.json` into `folder`; returns the files.

    Files of an earlier run in the same folder are replaced. Nothing appears half-written. `on_event` hears how far it
    is.
    """
    on_event = ignore_errors(on_event)
    folder = Path(folder)
    check_folder(folder, run.study)
    new = not folder.exists()
    staging = (folder.parent if new else folder) / f".{folder.name}.{uuid.uuid4().hex}.part"
    try:
        staging.mkdir(parents=True)
        names = _fill(run, staging, on_event)
        if new:
            os.rename(staging, folder)
        else:
            old = _named_files(folder)
            (folder / "run.json").unlink(missing_ok=True)
            for name in (*old, "report.html") if old else ():  # the page told of the earlier run
                (folder / name).unlink(missing_ok=True)
            for name in names:  # run.json is the last
                os.replace(staging / name, folder / name)
    except OSError as e:
        raise DiskError(f"{folder} cannot be written ({e.strerror or type(e).__name__})") from None
    except DataError as e:
        e.args = (str(e).replace(str(staging), str(folder)),)  # the place that its owner knows
        raise
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return [folder / name for name in names]


def _fill(run: Run, staging: Path, on_event: Callable[[Event], None]) -> list[str]:
    """Write everything into an empty folder; returns the names, `run.json` last."""
    abort = run.abort
    names: list[str] = []
    parties: dict[str, dict[str, Any]] = {}
    for party, role in run.study.parties.items():
        outcome, receipt = run.outcomes.get(party), run.receipts.get(party)
        entry = parties[party] = {"role": role, "status": run.status(party)}
        if receipt is not None:
            entry["receipt"] = f"{party}.receipt.json"
            receipt.save(staging / entry["receipt"])
            names.append(entry["receipt"])
        if outcome is None or abort is not None:
            continue
        entry["cost"], entry["result"] = plain(outcome.cost), plain(outcome.result)
        with told_to(passes_of(party, on_event)):
            written = _write_outcome(run, party, outcome, staging)
        entry["files"] = written
        names += written
    with told_to(passes_of("report", on_event)):
        drawn = run.draw()
    figure_rows = []
    for i, figure in enumerate(drawn.figures, 1):
        slug = re.sub(r"[^a-z0-9]+", "-", figure.title.lower()).strip("-")[:60] or "figure"
        row = {"file": f"figure-{i}-{slug}.png", "title": figure.title, "alt": figure.alt}
        files.write(staging / row["file"], figure.png)
        figure_rows.append(row)
    if figure_rows or drawn.note:
        names += [row["file"] for row in figure_rows]
        _write_json(staging / "figures.json", {"format": FIGURES, "figures": figure_rows, "note": drawn.note})
        names.append("figures.json")
    whole = {
        "format": FORMAT,
        "version": _version(run),
        "status": "done" if abort is None else "aborted",
        "abort": None if abort is None else vars(abort),
        "study": format_study(run.study),
        "parties": parties,
        "messages": [
            {"protocol": f.protocol, "line": f.line, "name": f.name, "from": s, "to": t, "count": n, "bytes": b}
            for f in run.flows()
            for (s, t), (n, b) in f.pairs.items()
        ],
        "files": names,
    }
    _write_json(staging / "run.json", whole)
    return [*names, "run.json"]


def _write_outcome(run: Run, party: str, outcome: Outcome, staging: Path) -> list[str]:
    names = []
    if outcome.adata is not None:
        names.append(f"{party}.h5ad")
        write_cells(outcome.adata, staging / names[-1], private=True)
    return names + write_files(run, party, staging)


def write_files(run: Run, party: str, folder: Path) -> list[str]:
    """Write the further files of a party's result, its model for example; returns their names."""
    names = []
    outcome = run.outcomes[party]
    try:
        further = workflows.get(run.study.workflow).files
    except CloisterError:
        further = None
    made = outcome.files
    if made is None:
        made = further(outcome) if further is not None else {}
    for name, content in made.items():
        if not PLAIN_NAME.fullmatch(name):
            raise DataError(f"a workflow may not write a file called {name!r}; use letters, digits, '.', '-', '_'")
        names.append(f"{party}.{name}")
        files.write(folder / names[-1], content)
    return names


def _version(run: Run) -> str:
    versions = {str(r.header.get("version", "")) for r in run.receipts.values()} - {""}
    return min(versions) if versions else run.version or __version__


def _named_files(folder: Path) -> list[str]:
    """What an earlier run wrote, by its own list; nothing outside the folder, whatever the list says."""
    try:
        raw = json.loads((folder / "run.json").read_text(encoding="utf-8"))
        names = raw["files"] if raw["format"] == FORMAT else []
        return [n for n in names if isinstance(n, str) and PLAIN_NAME.fullmatch(n)]
    except (OSError, ValueError, KeyError, TypeError):
        return []


def _write_json(path: Path, x: Any) -> None:
    text = json.dumps(x, indent=1, ensure_ascii=False, allow_nan=False) + "\n"
    files.write(path, text.encode("utf-8", "replace"))


# ---- from files ------------------------------------------------------------------------------------------------------


def load_runs(folder: str | Path) -> list[Run]:
    """Every run in `folder`: its own `run.json`, or those of its sub-folders, oldest first."""
    folder = Path(folder)
    if not folder.is_dir():
        raise DataError(f"there is no folder {folder}; name one that a run wrote with --out")
    if (folder / "run.json").exists():
        return [load_run(folder)]
    places = sorted(p.parent for p in folder.glob("*/run.json") if not p.parent.name.startswith("."))
    if not places:
        raise DataError(
            f"{folder} holds no run.json, nor do its sub-folders; name a folder that a run wrote with --out"
        )
    return sorted((load_run(p) for p in places), key=lambda run: run.started or "")


def load_run(folder: str | Path) -> Run:
    """One run from the folder that `save_run` wrote."""
    folder = Path(folder)
    try:
        raw = json.loads((folder / "run.json").read_text(encoding="utf-8"))
        if raw["format"] != FORMAT:
            raise DataError(f"{folder / 'run.json'} is of another format; this version reads {FORMAT}")
        run = Run(parse_study(raw["study"], "the study in run.json"), version=str(raw["version"]))
        for party, entry in raw["parties"].items():
            if party not in run.study.parties:
                raise DataError(f"{folder / 'run.json'} describes '{party}', who is not in its study")
            if "receipt" in entry:
                run.receipts[party] = _receipt(folder, party)
            if "cost" in entry:
                cost = {str(k): float(v or 0) for k, v in entry["cost"].items()}
                run.outcomes[party] = Outcome(None, dict(entry["result"]), run.receipts.get(party), cost)
        if raw["abort"] is not None:
            told = {k: str(raw["abort"].get(k, "")) for k in ("origin", "reason")}
            place = Abort(**{k: str(raw["abort"][k]) for k in ("party", "protocol", "line", "code")}, **told)
            run.outcomes = {}
            run.errors[place.party] = ProtocolAbort(place.protocol, place.line, place.code)
            blame(run.errors[place.party], place.origin, place.reason)
        run.saved_flows = _read_flows(raw["messages"])
        run.drawing = _read_figures(folder)
    except OSError as e:
        raise DataError(f"{folder / 'run.json'} cannot be read ({e.strerror or type(e).__name__})") from None
    except (ValueError, KeyError, TypeError, AttributeError) as e:
        raise DataError(
            f"{folder / 'run.json'} is damaged ({type(e).__name__}); make it anew by running the study again"
        ) from None
    return run


def load_cells(folder: str | Path) -> dict[str, AnnData]:
    """The sites' annotated cells of the run in `folder`, X left on disk; of several steps, those of the last."""
    folder = Path(folder)
    places = [folder] if (folder / "run.json").exists() else sorted(p.parent for p in folder.glob("*/run.json"))
    found: dict[str, AnnData] = {}
    for place in reversed(places):
        found = found or {
            s: read_cells(place / f"{s}.h5ad", backed=True) for s in load_run(place).study.sites if _has(place, s)
        }
    if not found:
        raise DataError(f"{folder} holds no cells of a run; name a folder that a run wrote with --out")
    return found


def _has(folder: Path, site: str) -> bool:
    return (folder / f"{site}.h5ad").is_file()


def _receipt(folder: Path, party: str) -> Receipt:
    try:
        receipt = Receipt.load(folder / f"{party}.receipt.json")
        if any(type(v) is not (int if k == "bytes" else str) for e, _ in receipt.entries for k, v in asdict(e).items()):
            raise ReceiptError("an entry holds something else than texts and a number of bytes")
        return receipt
    except ReceiptError as e:
        raise DataError(f"the receipt of '{party}' is missing or damaged: {e}") from None


def _read_flows(rows: list[dict[str, Any]]) -> list[Flow]:
    flows: dict[tuple[str, str, str], Flow] = {}
    for r in rows:
        key = (str(r["protocol"]), str(r["line"]), str(r["name"]))
        flows.setdefault(key, Flow(*key)).add(str(r["from"]), str(r["to"]), int(r["count"]), int(r["bytes"]))
    return list(flows.values())


def _read_figures(folder: Path) -> Drawing:
    path = folder / "figures.json"
    if not path.exists():
        return Drawing()
    raw = json.loads(path.read_text(encoding="utf-8"))
    figures, missing = [], []
    for row in raw["figures"]:
        name = str(row["file"])
        if not (PLAIN_NAME.fullmatch(name) and name.startswith("figure-") and name.endswith(".png")):
            raise DataError(f"{path} names {name!r}, which is not a figure-*.png")
        png = (folder / name).read_bytes() if (folder / name).is_file() else b""
        if png.startswith(PNG):
            figures.append(Figure(str(row["title"]), str(row["alt"]), png))
        else:
            missing.append(name)
    note = str(raw.get("note", ""))
    if missing:
        note = f"{note} Not in the folder any more, or damaged: {', '.join(missing)}.".strip()
    return Drawing(tuple(figures), note)
