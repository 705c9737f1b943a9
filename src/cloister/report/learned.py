"""The part of the report on who learned what: in short, then in the words of the protocols that ran."""

from __future__ import annotations

import re

from cloister import workflows
from cloister.rehearsal.record import Record
from cloister.report.parts import Html, count, facts, join, names, size, tag
from cloister.study import Study


def short(run: Record) -> Html | None:
    """The first thing to read: what stays, who learns what, in plain words; in full it stands further down."""
    rows = in_short(run.study.workflow, run.study.mode)
    if rows is None:
        return None
    sites = [p for p in run.study.sites if p in run.receipts]
    here = sites or run.parties  # whose receipts this page has: of a run between machines, one
    sent = sum(r["bytes"] for p in here for r in run.rows(p) if r["kind"] == "sent")
    who = "All sites together" if sites == list(run.study.sites) else names(here) or "No party with a receipt here"
    whole = f"{who} sent {size(sent)}. In full: what each party learned, below."
    return tag(
        "div",
        tag("h3", "In short" if run.abort is None else "In short: what a whole run reveals"),
        rows,
        tag("p", whole, class_="quiet"),
        class_="box short",
    )


def in_short(workflow: str, mode: str) -> Html | None:
    """Who learns what of a mode, before or after it runs; None where that is not written down."""
    rows = workflows.learns(workflow, mode)
    if not rows:
        return None
    return facts((who, sentence(what)) for who, what in rows)


def learned(run: Record) -> Html:
    """`Reveals` of the protocols that ran, as the signed receipts tell."""
    ran: dict[str, str] = {}
    for party in run.parties:
        ran |= {p: text for p, text in run.receipts[party].reveals.items() if p not in ran}
    parts: list[Html] = []
    if run.abort is not None:
        parts.append(tag("p", "The run was aborted, so the parties learned at most this:"))
    if not ran:
        parts.append(tag("p", "No receipt here names a protocol, so it is unknown what was learned."))
        return join(parts)
    (main, text), *others = ran.items()
    parts += [tag("p", "The protocol ", tag("code", main), " reveals:"), _reveals(text, run.study)]
    if inner := [join((tag("h4", tag("code", p)), _reveals(text, run.study))) for p, text in others if text]:
        one = len(inner) == 1
        more = f"On the way, {count(len(inner), 'more protocol')} ran."
        sentence = f"{more} {'It reveals' if one else 'They reveal'} this, and nothing else:"
        summary = f"What {names(p for p, t in others if t)} reveal{'s' if one else ''}"
        parts += [tag("p", sentence), tag("details", tag("summary", summary), *inner)]
    parts.append(
        tag(
            "p",
            "All parties, and the network that carries the messages, also see their names, sizes and times.",
            class_="quiet",
        )
    )
    return join(parts)


def _reveals(text: str, study: Study) -> Html:
    """`Reveals`, one entry per party or role, each with its text."""
    entries: list[tuple[str, list[str]]] = []
    for line in text.splitlines():
        pair = re.match(r"(\S[^:]*?) : (.*)", line)
        if pair:
            entries.append((pair[1], [pair[2]]))
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
