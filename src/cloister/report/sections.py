"""Sections of the report on one run: what left, figures, messages, cost, receipts."""

from __future__ import annotations

import dataclasses
from typing import Any

from cloister import protocols
from cloister.errors import CloisterError, ReceiptError
from cloister.mpc.crypto.agreement import check_signature
from cloister.mpc.net.receipts import Receipt
from cloister.rehearsal.record import Abort, Record, plain
from cloister.report.learned import sentence
from cloister.report.parts import (
    Html,
    bars,
    count,
    escape,
    join,
    names,
    pictures,
    seconds,
    sequence,
    size,
    table,
    tag,
    value,
)
from cloister.session import SIGNED
from cloister.study import Study

ABORT = "channel.Abort"
MOST_OPENED = 5  # kinds of values in a card
FIXED = {
    "channel": (
        "Greetings",
        "version, fingerprints of study and options, and a random number, before each part. No data.",
    ),
    "abort": ("Notices of abort", "the place in the protocol and one word on what happened."),
}
ROLES = {
    "site": "holds cells",
    "coordinator": "holds no cells, brings the sites together",
    "auxiliary": "holds no cells, helps to compute",
}


def card(run: Record, party: str) -> Html:
    role = run.study.parties[party]  # type: ignore[index]
    status, receipt = run.status(party), run.receipts.get(party)
    badge = None
    if status == "unknown" and run.abort is not None and receipt is not None:
        badge = tag("span", "no result", class_="badge bad")
    elif status not in ("done", "unknown"):
        badge = tag("span", "stopped", class_="badge bad")
    head = tag(
        "h4",
        party,
        " ",
        tag("span", f"({ROLES[role] if party == role else f'{role}, {ROLES[role]}'})", class_="role"),
        " ",
        badge,
    )
    if receipt is None:
        return tag("div", head, tag("p", f"The receipt of {party} is not here; it stays with {party}."), class_="card")
    sent, opened = ([r for r in run.rows(party) if r["kind"] == kind] for kind in ("sent", "opened"))
    number, total = sum(r["count"] for r in sent), sum(r["bytes"] for r in sent)
    to = names(dict.fromkeys(r["to"] for r in sent))
    sentence = f"Sent {count(number, 'message')}, {size(total)} in all, to {to}" + ("." if not sent else ":")
    parts = {key: [r for r in sent if _part(r) == key] for key in dict.fromkeys(map(_part, sent))}
    items = [
        tag("li", f"{_purpose(key)[0]}: {count(sum(r['count'] for r in rows), 'message')}, ", _bytes(rows))
        for key, rows in parts.items()
    ]
    written = [r["name"] for r in run.rows(party) if r["kind"] == "written"]
    return tag(
        "div",
        head,
        tag("p", sentence if sent else "Sent nothing."),
        tag("ul", *items) if items else None,
        *_opened(party, opened),
        tag("p", tag("strong", "Written here: "), join((tag("code", w) for w in written), ", ")) if written else None,
        class_="card",
    )


def _part(row: dict[str, Any]) -> str:
    return "abort" if row["name"] == ABORT else str(row["protocol"])


def _bytes(rows: list[dict[str, Any]]) -> str:
    return size(sum(r["bytes"] for r in rows))


def _opened(party: str, rows: list[dict[str, Any]]) -> list[Html]:
    """What this party made plain, each kind of value once, with everybody it was for."""
    if not rows:
        return [tag("p", tag("strong", "Opened: "), "no protected value was made plain here.")]
    values: dict[tuple[str, str, str, int], list[str]] = {}
    for r in rows:
        values.setdefault((r["name"], r["protocol"], r["line"], r["count"]), []).append(r["to"])
    parts = []
    for (name, protocol, line, times), to in list(values.items())[:MOST_OPENED]:
        others = [p for p in to if p != party]
        whom = " and ".join(("for itself",) * (party in to) + (f"to {names(others)}",) * bool(others))
        text = f"{name}, {whom}" + (f", {times} times" if times > 1 else "")
        place = join((" (", tag("code", f"{protocol} {line}"), ")"))
        parts.append(tag("li", tag("span", text, class_="flag warn" if others else None), place))
    if len(values) > MOST_OPENED:
        parts.append(tag("li", f"and {len(values) - MOST_OPENED} more, in the tables below"))
    return [tag("p", tag("strong", "Opened:")), tag("ul", *parts)]


def purposes(run: Record, *, unfold: bool) -> Html | None:
    """What the messages are for, once for all parties."""
    sent = [r for p in run.parties for r in run.rows(p) if r["kind"] == "sent"]
    listed = [(key, *_purpose(key)) for key in sorted(dict.fromkeys(map(_part, sent)), key=lambda key: key == "abort")]
    rows = [
        join(
            (
                tag("dt", name, *(() if key in FIXED else (" (", tag("code", f"{key}.py"), ")"))),
                tag("dd", sentence(text)),
            )
        )
        for key, name, text in listed
        if text
    ]
    if not rows:
        return None
    return tag("details", tag("summary", "Purpose of these messages"), tag("dl", *rows, class_="learned"), open=unfold)


def _purpose(part: str) -> tuple[str, str]:
    """Name and explanation of what a protocol is for, from the first sentence of its file, `Name: text`."""
    if part in FIXED:
        return FIXED[part]
    name, colon, text = " ".join(protocols.docstring(part).partition("\n\n")[0].split()).partition(": ")
    return (name, text) if colon else (part, name)


# ---- figures, results, messages, cost, receipts ----------------------------------------------------------------------


def findings(run: Record) -> list[Html]:
    found = run.findings
    return [tag("h3", "What was found"), tag("ul", *(tag("li", line) for line in found))] if found else []


def figures(run: Record) -> list[Html]:
    drawn = run.draw()
    if not drawn.figures and not drawn.note:
        return []
    parts = [tag("h3", "Figures")]
    held = [p for p in run.study.sites if p in run.outcomes]
    if drawn.figures and held:
        note = f"Drawn from results of {names(held)} on this machine. Review them before you share this page."
        parts.append(tag("p", note, class_="quiet"))
    if drawn.figures:
        parts.append(pictures(dataclasses.asdict(f) for f in drawn.figures))
    if drawn.note:
        parts.append(tag("div", tag("p", drawn.note), class_="box warn"))
    return parts


def results(run: Record) -> list[Html]:
    by_value: dict[tuple[str, str], list[str]] = {}
    for party in run.study.parties:
        for key, x in (run.outcomes[party].result if party in run.outcomes else {}).items():
            by_value.setdefault((str(key), result(plain(x), str(key))), []).append(party)
    if not by_value:
        return []
    everyone = [p for p in run.study.parties if p in run.outcomes]
    keys = list(dict.fromkeys(k for k, _ in by_value))
    rows = []
    for (k, x), who in sorted(by_value.items(), key=lambda item: keys.index(item[0][0])):
        whom = "all sites" if who == [p for p in everyone if p in run.study.sites] != [] else names(who)
        where = None if who == everyone else tag("span", f" at {whom}", class_="quiet")
        rows.append((join((k.replace("_", " "), where)), x))
    return [tag("h3", "Results in numbers"), table("Results by party", ("result", "value"), rows, hide=True)]


def result(x: Any, key: str) -> Html:
    """One result: rows of the same things become a table, anything else a line of text."""
    if isinstance(x, list) and len(x) > 1 and all(isinstance(row, dict) and row for row in x):
        columns = list(dict.fromkeys(str(k) for row in x for k in row))
        if len(columns) <= 8 and len(x) <= 200:
            rows = [[row.get(c) for c in columns] for row in x]
            return table(key.replace("_", " "), [c.replace("_", " ") for c in columns], rows, hide=True)
    return escape(value(x, key))


def messages(run: Record, abort: Abort | None) -> Html:
    flows = [f for f in run.flows() if f.name != ABORT]
    if not flows and abort is None:
        return tag("p", "No message was sent.")
    kinds = f"{count(len(flows), 'kind')} of messages between {count(len(run.study.parties), 'party')}".replace(
        "partys", "parties"
    )
    legend = (
        "Time runs downwards. A dot sends, an arrowhead receives, a diamond does both; to the right stand the number of"
        " messages and their mean size. What repeats is drawn once, where it first occurs. The labels are the line"
        " numbers of the protocol file above them."
    )
    rows = [
        (f"{f.name.rpartition('.')[2]}", f"{f.protocol} {f.line}", s, t, n, size(b))
        for f in flows
        for (s, t), (n, b) in f.pairs.items()
    ]
    columns = ("message", "protocol line", "from", "to", "messages", "bytes")
    return join(
        (
            tag(
                "figure",
                sequence(run.study, flows, abort, title=f"Sequence of messages: {kinds}"),
                tag("p", legend),
            ),
            tag(
                "details",
                tag("summary", "The same as a table"),
                table("All messages, summed up by name", columns, rows),
            ),
            *(_party_table(p, run.rows(p)) for p in run.study.parties if p in run.receipts),
        )
    )


def _party_table(party: str, rows: list[dict[str, Any]]) -> Html:
    sent = [
        (r["name"].rpartition(".")[2], f"{r['protocol']} {r['line']}", r["to"], r["count"], size(r["bytes"]))
        for r in rows
        if r["kind"] == "sent"
    ]
    opened = [
        (r["name"], f"{r['protocol']} {r['line']}", "itself" if r["to"] == party else r["to"], r["count"])
        for r in rows
        if r["kind"] == "opened"
    ]
    columns = ("message", "protocol line", "to", "messages", "bytes")
    parts = [table(f"Messages that {party} sent, from its receipt", columns, sent)] if sent else []
    if opened:
        parts.append(table(f"What {party} opened", ("what", "protocol line", "for", "times"), opened))
    note = (
        f"{party}: {count(sum(r[3] for r in sent), 'message')} sent, {count(sum(r[3] for r in opened), 'value')} opened"
    )
    return (
        tag("details", tag("summary", note), *parts) if parts else tag("p", f"{party} sent nothing and opened nothing.")
    )


def cost(run: Record) -> Html:
    sent = {p: float(sum(r["bytes"] for r in run.rows(p) if r["kind"] == "sent")) for p in run.receipts} | {
        p: c["bytes"] for p, c in run.cost.items() if "bytes" in c
    }
    order = [p for p in run.study.parties if p in sent]
    times = {p: c for p, c in run.cost.items() if "seconds" in c}
    first = bars("Bytes sent", [(p, sent[p], None, size(sent[p])) for p in order], empty="Nothing was sent.")
    rows = [
        (
            p,
            c["seconds"],
            c.get("cpu_seconds"),
            f"{seconds(c['seconds'])}, computing {seconds(c.get('cpu_seconds', 0))}",
        )
        for p, c in ((p, times[p]) for p in run.study.parties if p in times)
    ]
    second = bars(
        "Seconds, of which computing (inner bar)", rows, empty="Not measured: the run did not come to its end."
    )
    parts: list[Html] = [tag("div", first, second, class_="pair")]
    if times:
        columns = ("party", "bytes sent", "messages sent", "rounds", "time", "computing")
        cells = [
            (p, size(c.get("bytes", 0)), int(c.get("messages", 0)), int(c.get("rounds", 0)), seconds(c["seconds"]),
             seconds(c.get("cpu_seconds", 0)))
            for p, c in ((p, times[p]) for p in run.study.parties if p in times)
        ]  # fmt: skip
        parts.append(tag("details", tag("summary", "Cost as a table"), table("Cost by party", columns, cells)))
    return join(parts)


def receipts(run: Record) -> Html:
    rows = []
    for party in run.study.parties:
        receipt = run.receipts.get(party)
        if receipt is None:
            rows.append((party, "not here", "", "", ""))
            continue
        good, verdict = _check(run.study, party, receipt)
        badge = tag("span", verdict, class_=f"badge {'good' if good else 'bad'}")
        rows.append((party, run.status(party), f"{len(receipt.entries):,}", badge, tag("code", receipt.head[:16])))
    note = (
        "Each receipt is a chain in which every message that was sent and every value that was opened has its entry; a"
        " later change breaks the chain or the signature. `cloister receipt FILE --verify` checks the files themselves."
    )
    columns = ("party", "ended", "entries", "checked", "last hash, first 16 digits")
    return join((tag("p", sentence(note)), table("Receipts by party", columns, rows, hide=True)))


def _check(study: Study, party: str, receipt: Receipt) -> tuple[bool, str]:
    """Whether the chain holds, belongs to this study, and was signed with the key that the study names."""
    public = study.keys.get(party)  # type: ignore[call-overload]

    def signed(claimed: bytes, head: bytes, signature: bytes) -> None:
        if public is not None and claimed != public:
            raise ReceiptError("signed with another key than the study names")
        check_signature(claimed, SIGNED, head, signature)

    try:
        receipt.check(signed)
    except ReceiptError as e:
        return False, f"NOT GENUINE: {e}"
    except (CloisterError, ValueError, KeyError):
        return False, "NOT GENUINE: the signature is wrong"
    if receipt.header.get("party") != party or receipt.header.get("study_digest") != study.digest.hex():
        return False, "NOT OF THIS RUN: it names another study or party"
    return True, "intact and signed" if public is not None else "intact; signed, but the study names no key"
