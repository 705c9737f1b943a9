"""The report: what was computed, with whom, what left each building and what each party learned, on one page.

    write_report("report.html", [run])          # or run.report("report.html"), or `cloister report results`

The page needs nothing but itself: style and figures are inside, no script runs, and its Content-Security-Policy lets
no request leave it. What it says about messages comes from the receipts, whose chains and signatures are checked while
it is written; what they say about the protocols comes from the docstrings of the version that is installed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from cloister import errors, files, workflows
from cloister._version import __version__
from cloister.errors import CloisterError, DiskError
from cloister.rehearsal.record import Abort, Record, plain
from cloister.report import sections
from cloister.report.learned import learned, short
from cloister.report.parts import Html, count, document, escape, facts, join, names, size, table, tag, value
from cloister.report.provenance import signed
from cloister.study import Study
from cloister.workflows.options import options_in

Rows = Sequence[Mapping[str, Any]] | Sequence[Sequence[Any]]  # dicts, or lists of which the first is the header

MODES = {
    "hardened": "hardened: the protocols that Cloister recommends",
    "semi-honest": "semi-honest: cheaper, and safe only if every party follows the protocol",
    "published": "published: as in the paper, with its leaks; for comparison",
    "plain": "plain: without protection; for comparison",
}
CODES = {
    "timeout": "a party was silent for too long",
    "lost": "the connection to a party was lost",
    "finished": "a party had ended already",
    "too-few": "too few parties remained",
    "malformed": "a message was malformed",
    "mismatch": "the parties had not agreed on the same study, version or options",
    "replay": "a message was received twice",
    "gap": "a message is missing",
    "unexpected": "an unexpected message was received",
    "dropped": "the others continued without this party",
    "bad-signature": "a signature did not verify",
    "nothing-done": "no party obtained a result",
}


def write_report(
    path: str | Path,
    runs: Sequence[Record],
    *,
    title: str = "Cloister report",
    about: str = "",
    table: Rows | Mapping[str, Rows] | None = None,
    baselines: Mapping[str, Rows] | None = None,
) -> Path:
    """Write one self-contained page about `runs`.

    Parameters
    ----------
    path
        The HTML file; it appears complete or not at all.
    about
        What the runs are about, in a few sentences below the title.
    table
        A comparison for the top of the page: dictionaries, or lists of which the first is the header; or several such
        tables by their captions.
    baselines
        The same for single runs, by workflow (`"bin-values"`) or workflow and mode (`"bin-values/hardened"`).
    """
    path = Path(path)
    text = report_text(runs, title=title, about=about, table=table, baselines=baselines)
    try:
        return files.write(path, text)  # for its owner only, as the figures in it are
    except OSError as e:
        raise DiskError(f"{path} cannot be written ({e.strerror or type(e).__name__})") from None


def report_text(
    runs: Sequence[Record],
    *,
    title: str = "Cloister report",
    about: str = "",
    table: Rows | Mapping[str, Rows] | None = None,
    baselines: Mapping[str, Rows] | None = None,
) -> str:
    """The page that `write_report` writes."""
    return _page(list(runs), (title, about), table, baselines or {})


def _page(
    runs: list[Record], words: tuple[str, str], rows: Rows | Mapping[str, Rows] | None, baselines: Mapping[str, Rows]
) -> str:
    title, about = words
    done = sum(run.abort is None for run in runs)
    summary = f"{count(len(runs), 'run')}: {done} completed" + (
        f", {len(runs) - done} aborted." if done < len(runs) else "."
    )
    lead = tag("p", summary + _not_begun(runs), class_="lead")
    header = tag("header", tag("h1", title), lead, *([tag("p", about)] if about else []))
    links = [tag("a", "Comparison", href="#comparison")] if rows else []
    links += [tag("a", _heading(run), href=f"#run-{i}") for i, run in enumerate(runs, 1)]
    links.append(tag("a", "How to read this page", href="#how"))
    nav = tag("nav", tag("ul", *(tag("li", link) for link in links)), aria_label="On this page")
    compared = None
    if rows:
        tables = rows if isinstance(rows, Mapping) else {"All runs side by side": rows}
        parts = [_rows(caption, some) for caption, some in tables.items()]
        compared = tag("section", tag("h2", "Comparison", id="comparison"), *parts)
    articles = [_run(run, i, baselines, unfold=len(runs) <= 2) for i, run in enumerate(runs, 1)]
    main = tag("main", compared, *articles, _how(), id="main", tabindex="-1")
    return document(title, header, nav, main)


def _rows(caption: str, rows: Rows) -> Html:
    first = rows[0]
    if isinstance(first, Mapping):
        columns = list(dict.fromkeys(str(k) for row in rows for k in row))
        return table(caption, columns, [[plain(row.get(c)) for c in columns] for row in rows])  # type: ignore[union-attr]
    return table(caption, [str(c) for c in first], [[plain(x) for x in row] for row in rows[1:]])


def _heading(run: Record) -> str:
    return _title(run.study) + (" (aborted)" if run.abort is not None else "")


def _title(study: Study) -> str:
    step = f"Step {study.at} of {len(study.steps)}: " if study.at else ""
    name = f"{study.label}: " if study.label != study.workflow else ""
    return f"{step}{name}{study.workflow}, {study.mode}"


def _not_begun(runs: list[Record]) -> str:
    """The steps that did not come to their turn, in words."""
    study = runs[0].study if runs else None
    if study is None or any(not run.study.at or run.study.whole.digest != study.whole.digest for run in runs):
        return ""
    missing = [part.label for part in study.whole.parts if part.label not in {run.study.label for run in runs}]
    return f" Not begun: {names(missing)}." if missing else ""


# ---- one run ---------------------------------------------------------------------------------------------------------


def _run(run: Record, i: int, baselines: Mapping[str, Rows], *, unfold: bool) -> Html:
    study, abort = run.study, run.abort
    badge = (
        tag("span", "completed", class_="badge good") if abort is None else tag("span", "aborted", class_="badge bad")
    )
    title = tag("div", tag("h2", _title(study), id=f"run-{i}"), badge, class_="title")
    against = [
        _rows(f"{study.workflow}, {study.mode}, compared", baselines[key])
        for key in (study.workflow, f"{study.workflow}/{study.mode}")
        if baselines.get(key)
    ]
    return tag(
        "article",
        title,
        tag("p", _summary(study), class_="lead"),
        _abort_box(abort, run) if abort is not None else _missing_box(run),
        *sections.findings(run),
        *sections.figures(run),
        *((tag("h3", "Compared"), *against, *_provider_box(baselines.get(study.workflow))) if against else ()),
        short(run),
        *(tag("div", tag("p", "Note: ", note, "."), class_="box warn") for note in workflows.warnings_of(study)),
        _facts(run),
        tag("h3", "What was agreed and approved"),
        signed(run),
        tag("h3", "What left each building"),
        tag(
            "div",
            *(sections.card(run, p) for p in (*study.sites, study.coordinator, *study.auxiliaries)),
            class_="cards",
        ),
        sections.purposes(run, unfold=unfold),
        tag("h3", "What each party learned"),
        learned(run),
        *sections.results(run),
        tag("h3", "What it cost"),
        sections.cost(run),
        _folded("The messages, one by one", sections.messages(run, abort), unfold=unfold),
        _folded("Receipts", sections.receipts(run), unfold=unfold),
        aria_labelledby=f"run-{i}",
    )


def _provider_box(rows: Rows | None) -> list[Html]:
    """A warning if the table of `adapt-model` says that no provider is needed."""
    from cloister.papers.baselines.adaptation import WITHOUT, without_provider

    ways = {str(row["way"]): row for row in rows or () if isinstance(row, Mapping) and "way" in row}
    if not {"together", *WITHOUT} <= ways.keys():
        return []
    warning = without_provider(ways)
    return [tag("div", tag("p", "Note: ", warning, "."), class_="box warn")] if warning else []


def _folded(title: str, content: Html, *, unfold: bool) -> Html:
    return tag("details", tag("summary", tag("h3", title)), content, class_="part", open=unfold)


def _summary(study: Study) -> str:
    try:
        return workflows.get(study.workflow).summary
    except CloisterError:
        return f"A workflow that this version of Cloister ({__version__}) does not know."


def _abort_box(abort: Abort, run: Record) -> Html:
    where = f"{abort.protocol} {abort.line}".removesuffix(" -")
    who = abort.party or "all parties"
    place = f"in the computation at {who}" if abort.protocol == "local" else f"at {where}"
    unknown = "see the error that was shown there" if abort.protocol == "local" else "a check failed"
    why = CODES.get(abort.code) or errors.CODES.get(abort.code, unknown)
    sent = sum(r["bytes"] for p in run.receipts for r in run.rows(p) if r["kind"] == "sent")
    got = f"{names(sorted(run.outcomes))} had come to a result." if run.outcomes else "Nobody got a result."
    return tag(
        "div",
        tag(
            "p",
            tag("strong", f"This run was aborted {place}: "),
            f"{why} (",
            tag("code", abort.code),
            f"), noticed by {who}.",
            f" It began at {abort.origin} ({errors.in_words(abort.reason)})." if abort.origin not in ("", who) else "",
        ),
        tag("p", f"{got} Until then {size(sent)} had been sent; the receipts below list all of it."),
        class_="box bad",
    )


def _missing_box(run: Record) -> Html | None:
    gone = [p for p in run.study.parties if run.status(p).startswith("aborted")]
    if not gone:
        return None
    text = f"{names(gone)} dropped out on the way; the others went on and completed the run without."
    return tag("div", tag("p", text), class_="box warn")


def _facts(run: Record) -> Html:
    study = run.study
    rows: list[tuple[str, object]] = [("Study", study.name), ("Mode", MODES.get(study.mode, study.mode))]
    if began := run.started:
        rows.append(("Started", tag("time", began.replace("T", " ").replace("Z", " UTC"), datetime=began)))
    versions = sorted({str(r.header.get("version", "?")) for r in run.receipts.values()})
    version = f"Cloister {', '.join(versions) or 'unknown'}"
    if set(versions) - {__version__}:
        version += f"; what is said here about its protocols comes from Cloister {__version__}"
    rows.append(("Version", version))
    for role, plural in {"site": "Sites", "coordinator": "Coordinator", "auxiliary": "Auxiliary servers"}.items():
        if who := [p for p, r in study.parties.items() if r == role]:
            rows.append((plural, names(sorted(who))))
    rows.append(("Options", shown_options(study)))
    if counted := {str(r.header["counted"]) for r in run.receipts.values() if "counted" in r.header}:
        rows.append(("Counted", f"{' or '.join(sorted(counted))}: this is what floors and limits are about"))
    return facts(rows)


def shown_options(study: Study) -> Html:
    """The options of a workflow as the study sets them, or as they are by default."""
    given = dict(study.parameters)
    try:
        known = {f.name: f for f in options_in(workflows.get(study.workflow).options, study.mode)}
    except CloisterError:
        known = {}
    rows = {name: given.get(name, f.default) for name, f in known.items()} | given
    rows = {k: v for k, v in rows.items() if v is not dataclasses.MISSING}
    return (
        join((tag("code", f"{k} = {'none' if v is None else value(plain(v))}") for k, v in rows.items()), ", ")
        if rows
        else escape("none")
    )


def _how() -> Html:
    words = {
        "Message": "Data that one party sends to another. The receipt stores its name, size and hash.",
        "Protocol, protocol line": "The agreed procedure, one file each, and the numbered line of its description that"
        " sends the message. Cryptographers check these lines against the published papers.",
        "Opened": "A protected value (masked, encrypted or shared) was revealed to a party. The receipt stores what"
        " it was and for whom, never the value.",
        "Learned": "Everything that a party can compute from a run, by the description of its protocol, also if some"
        " parties collude.",
        "Collude": "Parties secretly combine everything that they received.",
        "Receipt": "A party's own record of everything that it sent and opened, signed with its key.",
        "Hardened, published": "The same analysis with the protocols that Cloister recommends, and as in its paper."
        " The published one leaks more and is for comparison.",
    }
    rows = (join((tag("dt", k), tag("dd", v))) for k, v in words.items())
    return tag("section", tag("h2", "How to read this page", id="how"), tag("dl", *rows, class_="learned"))
