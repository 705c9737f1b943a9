"""The page as HTML: what runs, what waits for a word, what is left, what was. Every text is escaped by `tag`."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence

from cloister import governance, workflows
from cloister._version import __version__
from cloister.deploy.kit import CONSENTS_SET
from cloister.errors import CloisterError, ReceiptError
from cloister.mpc.crypto.agreement import check_signature
from cloister.mpc.net.receipts import Receipt
from cloister.page.state import SHOWN, Past, Stage, State
from cloister.rehearsal.progress import Standing
from cloister.report.learned import in_short
from cloister.report.page import shown_options
from cloister.report.parts import Html, count, facts, join, names, seconds, size, table, tag
from cloister.report.provenance import signed_rows, terms_rows
from cloister.session import SIGNED
from cloister.study import Study

BADGES: dict[Stage, tuple[str, str]] = {
    "asks": ("the other parties approve the studies of this one", "good"),
    "waits": ("waits for your approval", "warn"),
    "approved": ("approved", "good"),
    "refused": ("refused", "bad"),
    "withdrawn": ("approval withdrawn", "bad"),
    "ended": ("past its last day", "bad"),
}
DONE = {
    "approved": "The study is approved.",
    "refused": "The study is declined, and the decision is stored.",
    "halted": "Halted: every run here was stopped.",
}


def page(title: str, *content: object) -> str:
    """A whole page around its content."""
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("title", title),
        tag("link", rel="stylesheet", href="/style.css"),
        tag("script", src="/page.js", defer=True),
    )
    skip = tag("a", "Skip to the content", href="#main", class_="skip")
    foot = f"Cloister {__version__}, at {time.strftime('%Y-%m-%d %H:%M:%S UTC', time.gmtime())}."
    footer = tag("footer", tag("p", foot, " Served by this machine to itself; nothing is loaded from elsewhere."))
    return f"<!doctype html>\n{tag('html', head, tag('body', skip, *content, footer), lang='en')}\n"


def notice(title: str, text: str) -> str:
    """A page that only says one thing."""
    back = tag("p", tag("a", "To the page of this party", href="/"))
    return page(title, tag("header", tag("h1", title)), tag("main", tag("p", text), back, id="main", tabindex="-1"))


def home(
    state: State, form: str, who: str, *, done: str = "", error: str = "", known: bool = False, decides: bool = True
) -> str:
    """The page of a party. `form` goes into every form; `who` is its reader, `known` if by a log-in of his own."""
    study, me = state.kit.study, state.kit.me
    word, colour = BADGES[state.stage]
    badge = tag("span", word, class_=f"badge {colour}")
    lead = f"{me}, {state.kit.role} of the study, {_connected(state)}."
    back = tag("p", tag("a", "All studies of this page", href="/")) if state.base else None
    header = tag("header", back, tag("div", tag("h1", f"{me}: {study.name}"), badge, class_="title"), tag("p", lead))
    boxes = [
        tag("div", tag("p", text), class_=f"box {kind}", role=role)
        for text, kind, role in (
            (DONE.get(done, ""), "good", "status"),
            (error, "bad", "alert"),
            (state.trouble, "bad", "alert"),
            *((_twice(party, *seen), "bad", "alert") for party, seen in state.twice.items()),
        )
        if text
    ]
    anew = tag("a", "Reload the page", href=f"{state.base}/")
    stale = tag("p", "The state has changed since. ", anew, id="stale", hidden=True)
    halt = _halt(state, form, who) if decides else None
    now_part = tag("article", tag("h2", "Now"), _now_box(state), stale, halt)
    asked = "What is approved" if state.stage == "approved" else "What is to be approved"
    asked = "What this party asks for" if state.kit.role == "coordinator" else asked
    decide = _decide(state, form, who, known=known) if decides else None
    parts = [
        tag("article", tag("h2", "Why, and on what grounds"), _purpose(study)),
        tag("article", tag("h2", asked), *_study(state), decide),
        now_part,
    ]
    main = tag(
        "main",
        *boxes,
        *(sorted(parts, key=lambda part: part is not now_part) if state.running else parts),
        tag("article", tag("h2", "What is left"), _left(state)) if state.kit.role != "coordinator" else None,
        tag("article", tag("h2", "Runs so far"), _past(state)),
        tag("article", tag("h2", "Decisions so far"), _history(state)) if state.kit.role != "coordinator" else None,
        id="main",
        tabindex="-1",
    )
    return page(f"{me}: {study.name}", header, main)


def overview(states: Sequence[State | tuple[str, str]], who: str) -> str:
    """All studies of a page, those that wait for a decision first."""
    order = ["waits", "approved", "asks", "withdrawn", "refused", "ended"]
    seen = sorted((s for s in states if isinstance(s, State)), key=lambda s: (order.index(s.stage), s.kit.study.name))
    cards = []
    for state in seen:
        study = state.kit.study
        word, colour = BADGES[state.stage]
        title = tag("h2", tag("a", f"{state.kit.me}: {study.name}", href=f"{state.base}/"))
        head = tag("div", title, tag("span", word, class_=f"badge {colour}"), class_="title")
        told = [tag("p", s.words if s is not None else "A run begins.") for s in state.running.values()]
        purpose = study.governance.get("purpose", "The study file names no purpose.")
        what = ", then ".join(f"{part.workflow}, mode {part.mode}" for part in study.parts)
        quiet = tag("p", f"{what}; {_connected(state)}; {count(len(state.past), 'run')} so far", class_="quiet")
        cards.append(tag("article", head, tag("p", purpose), *told, quiet))
    for path, why in (s for s in states if not isinstance(s, State)):
        cards.append(tag("article", tag("h2", path), tag("div", tag("p", why), class_="box bad", role="alert")))
    waiting = sum(s.stage == "waits" for s in seen)
    lead = f"{count(len(cards), 'study').replace('studys', 'studies')}, {waiting or 'none'} waiting for a decision."
    header = tag("header", tag("h1", "Studies"), tag("p", lead, f" You are logged in as {who}." if who else ""))
    return page("Studies", header, tag("main", *cards, id="main", tabindex="-1"))


def _twice(party: str, when: float, where: str) -> str:
    at = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(when))
    return (
        f"{party} was connected twice at {at}, from {where}: two services use its kit. Ask that party to stop one of"
        " them. If it runs only one, somebody else has its kit: stop the study and agree on new keys."
    )


def _connected(state: State) -> str:
    if not state.serving:
        return "its service is not running"
    if state.kit.role != "coordinator":
        return "connected to the coordinator" if state.connected else "not connected to the coordinator"
    return f"connected to {names(state.connected)}"


# ---- what runs now ---------------------------------------------------------------------------------------------------


def _now_box(state: State) -> Html:
    hint = tag("noscript", tag("p", "Without JavaScript this part does not update; reload the page.", class_="quiet"))
    where = f"{state.base}/now"
    return join((tag("div", now(state.running), id="now", data_state=state.mark, data_from=where), hint))


def now(running: Mapping[str, Standing | None]) -> Html:
    """What runs, as it is asked for once a second."""
    if not running:
        return tag("p", "Nothing is running.")
    return join(_one(run[:8], standing) for run, standing in running.items())


def _one(run: str, standing: Standing | None) -> Html:
    if standing is None:
        return join((tag("h3", f"Run {run}"), tag("p", "It begins.")))
    bar = None
    if standing.fraction is not None:
        done, of = standing.fraction
        bar = tag("progress", max=of, value=done, aria_label=f"How far run {run} is")
    rows = {"Sent": size(standing.sent), "Last message": standing.doing}
    return join((tag("h3", f"Run {run}"), tag("p", standing.words, class_="lead"), bar, facts(rows.items())))


def _halt(state: State, form: str, who: str) -> Html:
    takes = ", and withdraws the approval" if state.stage == "approved" else ""
    button = tag("button", "Halt", type="submit", class_="halt")
    what = f" stops every run here at once{takes}."
    return tag("form", _hidden(state, form, by=who), button, what, method="post", action=f"{state.base}/halt")


def _hidden(state: State, form: str, **more: str) -> Html:
    fields = {"form": form, "study": state.kit.study.digest.hex(), **more}
    return join(tag("input", type="hidden", name=k, value=v) for k, v in fields.items())


# ---- the study -------------------------------------------------------------------------------------------------------


def _purpose(study: Study) -> Html:
    """Why, on what legal basis, and for how long; what is missing is named."""
    said = {"purpose": "none is named", "legal_basis": "none is named", "retention": "nothing is agreed on"}
    rows = governance.in_words({**said, **study.governance})
    first = [governance.FIELDS[key] for key in said]
    return facts(sorted(rows, key=lambda row: first.index(row[0]) if row[0] in first else len(first)))


def _study(state: State) -> list[object]:
    study, entry = state.kit.study, state.approval
    parts: list[object] = []
    if entry is not None and entry.withdrawn:
        parts.append(tag("p", f"{'Refused' if entry.refused else 'Withdrawn'} on {entry.withdrawn}."))
    elif entry is not None:
        data = f", on {entry.data.words}" if entry.data is not None else ""
        parts.append(tag("p", f"Approved by {entry.by} on {entry.when}{data}"))
    parts += [_part(part) for part in study.parts]
    if rows := _own(state):
        parts += [tag("h3", "On what terms here"), facts(rows)]
    if state.unseen:
        text = CONSENTS_SET.format(", ".join(state.unseen))
        parts.append(tag("div", tag("p", text[0].upper() + text[1:]), class_="box warn", role="alert"))
    parts.append(tag("details", tag("summary", "The study in full"), _agreed(study), open=state.stage == "waits"))
    return parts


def _own(state: State) -> list[tuple[str, object]]:
    """The terms that count now, with the cells that a run would use; and where they differ from what was approved."""
    rows: list[tuple[str, object]] = [(title, text) for title, text in terms_rows(state.terms) if title != "File"]
    if file := state.terms.get("file"):
        cells = state.cells
        if state.approval is not None and state.approval.data is not None:
            cells = state.approval.data.words
        rows = [("File", tag("code", str(file))), *([("Cells in it", cells)] if cells else []), *rows]
    if state.approval is not None and state.approval.terms and not state.approval.withdrawn:
        before = dict(terms_rows(state.approval.terms))
        for title, text in terms_rows(state.terms):
            if before.get(title, text) != text:
                rows.append((f"{title}, when it was approved", before[title]))
    return rows


def _part(part: Study) -> Html:
    """One workflow of the study, with its "In short"."""
    try:
        summary, short = workflows.get(part.workflow).summary, in_short(part.workflow, part.mode)
    except CloisterError as e:
        summary, short = str(e), None
    title = f"{part.place}: {part.workflow}" if part.place else part.workflow
    box = tag("div", tag("h4", "In short"), short, class_="box short") if short is not None else None
    return join((tag("h3", f"{title}, mode {part.mode}"), tag("p", summary), box))


def _agreed(study: Study) -> Html:
    rows: list[tuple[str, object]] = [("Digest", tag("code", study.digest.hex()))]
    for role, title in {"site": "Sites", "coordinator": "Coordinator", "auxiliary": "Auxiliary servers"}.items():
        if members := [p for p, r in study.parties.items() if r == role]:
            rows.append((title, names(sorted(members))))
    for part in study.parts:
        rows.append((f"Options of {part.label}" if part.at else "Options", shown_options(part)))
    try:
        rows += [("Note", note) for note in workflows.warnings_of(study)]
    except CloisterError as e:
        rows.append(("Note", str(e)))
    return facts(rows)


def _decide(state: State, form: str, who: str, *, known: bool) -> Html | None:
    if state.stage not in ("waits", "refused", "withdrawn"):
        return None
    cells = " on the cells that local/site.toml names" if state.kit.role == "site" else ""
    name = tag("input", id="by", name="by", value=who, maxlength=200, autocomplete="name")
    read = tag("input", type="checkbox", id="read", name="read", value="yes", required=True)
    refuse = tag("button", "Refuse", type="submit", formaction=f"{state.base}/refuse", formnovalidate=True)
    return tag(
        "form",
        _hidden(state, form),
        tag("p", f"You decide as {who}.") if known else tag("p", tag("label", "Who decides ", for_="by"), name),
        tag("p", read, tag("label", f" I have read who learns what, and allow it{cells}.", for_="read")),
        tag(
            "p",
            tag("button", "Approve", type="submit", class_="approve"),
            " ",
            None if state.stage == "refused" else refuse,
        ),
        tag(
            "p",
            "The cells are read to compute their fingerprint, which takes some time for large files.",
            class_="quiet",
        ),
        method="post",
        action=f"{state.base}/approve",
    )


# ---- what is left, and what was --------------------------------------------------------------------------------------


def _left(state: State) -> Html:
    if not state.left:
        return tag("p", "No information.")
    rows = [
        [row.what, _rest(row.left), f"{row.spent:g}", "no limit" if row.most is None else f"{row.most:g}"]
        for row in state.left
    ]
    return table("Remaining limits and budget", ["what", "left", "spent", "allowed"], rows, hide=True)


def _rest(left: float | None) -> Html | str:
    return tag("strong", "none", class_="flag bad") if left == 0 else "–" if left is None else f"{left:g}"


def _past(state: State) -> Html:
    if not state.past:
        return tag("p", "No run has ended here yet.")
    rows = []
    for run in state.past[:SHOWN]:
        link = tag("a", run.when, href=f"{state.base}/runs/{run.name}")
        sent = size(run.ended.cost.get("bytes", 0)) if run.ended.cost else "–"
        rows.append([link, _status(run), sent, len(run.receipts)])
    shown = table("Runs that ended here, the latest first", ["began", "ended", "sent", "receipts"], rows, hide=True)
    more = len(state.past) - SHOWN
    return join(
        (shown, tag("p", f"{more} older ones are in the results folder.", class_="quiet") if more > 0 else None)
    )


def _status(run: Past) -> Html:
    colour = {"done": "good", "refused": "warn"}.get(run.ended.status, "bad")
    return tag("span", run.ended.status, class_=f"badge {colour}")


def _history(state: State) -> Html:
    if not state.history.decisions:
        return tag("p", "Nobody has decided anything here yet.")
    items = []
    for d in reversed(state.history.decisions[-SHOWN:]):
        colour = "good" if d.what == "approved" else "bad"
        head = tag("p", tag("span", d.what, class_=f"badge {colour}"), f" by {d.by}, {d.when}")
        user = "" if d.user == d.by else f" (as user {d.user})"
        on = f", on {d.on}" if d.on else ""
        rest = tag("p", f"Study '{d.study}' ({d.digest[:16]}…){on}. By {d.how}{user}.", class_="quiet")
        items.append(tag("li", head, rest))
    shown = tag("ol", *items, class_="history", reversed=True)
    broken = None
    if not state.history.whole:
        text = "A line of local/decisions.jsonl was changed or removed: this list is not what was written."
        broken = tag("div", tag("p", text), class_="box bad", role="alert")
    return join((broken, shown))


def one_run(run: Past, key: bytes, base: str = "") -> str:
    """A run that has ended: how, and what its receipts say, checked now."""
    title, ended = f"Run of {run.when}", run.ended
    rows: list[tuple[str, object]] = [("How it ended", _status(run)), ("Folder", tag("code", str(run.folder)))]
    if ended.error:
        rows.append(("Why", str(ended.error.get("text", ""))))
        if origin := ended.error.get("origin"):
            rows.append(("It began at", str(origin)))
        if step := ended.error.get("next"):
            rows.append(("What to do", str(step)))
    if ended.cost:
        took = f"{size(ended.cost.get('bytes', 0))} sent in {seconds(ended.cost.get('seconds', 0.0))}"
        rows.append(("Cost", took))
    rows += [(party, word) for party, word in ended.parties.items()]
    report = tag("a", "The whole report", href=f"{base}/runs/{run.name}/report") if run.reportable else None
    receipts = [_receipt(run, i, key, base) for i in range(len(run.receipts))]
    if not receipts:
        receipts = [tag("p", "There is no receipt: nothing was sent.")]
    back = tag("a", "All of this party", href=f"{base}/")
    main = tag(
        "main", tag("article", facts(rows), tag("p", report) if report else None), *receipts, id="main", tabindex="-1"
    )
    return page(title, tag("header", tag("p", back), tag("h1", title)), main)


def _receipt(run: Past, i: int, key: bytes, base: str) -> Html:
    path = run.receipts[i]
    step = path.parent.name if path.parent != run.folder else ""
    title = tag("h2", f"Receipt{f' of {step}' if step else ''}")
    link = tag("p", tag("a", "The receipt itself", href=f"{base}/runs/{run.name}/receipt/{i}"))
    try:
        receipt = Receipt.load(path)
        receipt.check(lambda public, head, signature: check_signature(public, SIGNED, head, signature))
        if receipt.signature.get("public") != key.hex():
            raise ReceiptError("the receipt is whole, but signed with another key than this kit's")
        brief = json.loads(receipt.brief())
    except CloisterError as e:
        return tag("article", title, tag("div", tag("p", str(e)), class_="box bad"), link)
    genuine = tag("p", "The hash chain is complete and signed with this kit's key.", class_="box good")
    sent = [
        [row["name"], row["to"], row["count"], size(row["bytes"])] for row in brief["summary"] if row["kind"] == "sent"
    ]
    shown = table("What was sent", ["message", "to", "times", "bytes"], sent) if sent else tag("p", "Nothing was sent.")
    return tag("article", title, genuine, facts(signed_rows(brief)), shown, link)
