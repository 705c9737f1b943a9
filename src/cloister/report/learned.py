"""The part of the report on who learned what: in short, then in the words of the protocols that ran."""

from __future__ import annotations

import ast
import functools
import re
from importlib import resources
from types import SimpleNamespace
from typing import Any

from cloister import workflows
from cloister.errors import CloisterError
from cloister.protocols import FOLDERS
from cloister.report.in_short import in_short
from cloister.report.parts import Html, count, join, names, size, tag
from cloister.run.facts import abort_of, receipts_of, rows_of
from cloister.run.rehearsal import Run
from cloister.study import Study


def short(run: Run) -> Html | None:
    """The first thing to read: what stays, who learns what, in plain words; in full it stands further down."""
    rows = in_short(run.study.workflow, run.study.mode, run.study.parameters)
    if not rows:
        return None
    sent = sum(r["bytes"] for p in run.study.sites for r in _sent(run, p))
    told = f"All sites together sent {size(sent)}. In full: what each party learned, below."
    return tag(
        "div",
        tag("h3", "In short" if abort_of(run) is None else "In short: what a whole run tells"),
        tag("dl", *(join((tag("dt", who), tag("dd", sentence(what)))) for who, what in rows), class_="meta"),
        tag("p", told, class_="quiet"),
        class_="box short",
    )


def _sent(run: Run, party: str) -> list[dict[str, Any]]:
    return [r for r in rows_of(run.receipts[party]) if r["kind"] == "sent"] if party in run.receipts else []


def learned(run: Run) -> Html:
    texts: dict[str, list[str]] = {}
    for party, receipt in receipts_of(run).items():
        texts.setdefault(str(receipt.header.get("reveals", "")), []).append(party)
    parts: list[Html] = []
    if abort_of(run) is not None:
        parts.append(tag("p", "The run was aborted, so they learned at most this:"))
    if not texts:
        parts.append(tag("p", "No receipt is here, so nothing can be said."))
    for text, who in texts.items():
        note = None if len(texts) == 1 else tag("p", f"As the receipt of {names(who)} says:", class_="quiet")
        parts += [p for p in (note, _reveals(text, run.study)) if p is not None]
    try:
        main = workflows.get(run.study.workflow).protocols.get(run.study.mode, "")
    except CloisterError:
        main = ""
    used = dict.fromkeys(
        r["protocol"] for x in receipts_of(run).values() for r in rows_of(x) if r["kind"] in ("sent", "opened")
    )
    others = [(p, workflows.section(SimpleNamespace(__doc__=doc_of(p)), "Reveals")) for p in used if p != main]  # type: ignore[arg-type]
    inner = [join((tag("h4", tag("code", p)), _reveals(text, run.study))) for p, text in others if text]
    if inner:
        one = len(inner) == 1
        ran = f"On the way, {count(len(inner), 'more protocol')} ran."
        told = f"{ran} {'It reveals' if one else 'They reveal'} this, and nothing else:"
        summary = f"What {names(p for p, t in others if t)} reveal{'s' if one else ''}"
        parts += [tag("p", told), tag("details", tag("summary", summary), *inner)]
    if run.receipts:
        parts.append(
            tag("p", "Everybody, and who carries the messages, also sees their names, sizes and times.", class_="quiet")
        )
    return join(parts)


def _reveals(text: str, study: Study) -> Html:
    """`Reveals`, one entry per party or role, each with its text."""
    entries: list[tuple[str, list[str]]] = []
    for line in text.splitlines():
        found = re.match(r"(\S[^:]*?) : (.*)", line)
        if found:
            entries.append((found[1], [found[2]]))
        elif entries and line.strip():
            entries[-1][1].append(line.strip())
        elif line.strip():
            entries.append(("", [line.strip()]))
    if not entries:
        return tag("p", "The receipts carry no text on this.")
    rows = []
    for who, lines in entries:
        members = members_of(who, study)
        label = [sentence(who)] + ([f" ({names(members)})"] if members and members != [who] else [])
        rows.append(join((tag("dt", *label) if who else None, tag("dd", sentence(" ".join(lines))))))
    return tag("dl", *rows, class_="learned")


def members_of(who: str, study: Study) -> list[str]:
    """The parties that a protocol's word for a role stands for here; none if a word stands for something else."""
    query = [p for p in study.sites if p == study.parameters.get("query")]
    known = {word: [study.coordinator] for word in ("coordinator", "server", "aggregator", "principal", "provider")}
    known |= {word: list(study.sites) for word in ("site", "client", "contributor", "holder", "owner")}
    known |= {"querier": query, "auxiliary": list(study.auxiliaries)}
    words = [known.get(word, []) for word in who.split(", ")]
    return [str(p) for p in dict.fromkeys(p for group in words for p in group)] if all(words) else []


def sentence(text: str) -> Html:
    """With a capital letter, unless it begins with a symbol: `z, the sum` stays. What is in backticks becomes code."""
    text = text[:1].upper() + text[1:] if re.match(r"(a |[a-z]{2,}\b)", text) else text
    return join(tag("code", part) if i % 2 else part for i, part in enumerate(text.split("`")))


@functools.cache
def doc_of(protocol: str) -> str:
    """Docstring of a protocol file, read without importing it: the name may come from a file."""
    if not re.fullmatch(r"[a-z][a-z0-9_]*", protocol):
        return ""
    for folder in FOLDERS:
        source = resources.files("cloister") / "protocols" / folder / f"{protocol}.py"
        if source.is_file():
            return ast.get_docstring(ast.parse(source.read_text(encoding="utf-8"))) or ""
    return ""
