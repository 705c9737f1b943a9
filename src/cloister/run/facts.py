"""What a run says about itself: how it ended and where, its messages summed up, its figures. For files and reports."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cloister import workflows
from cloister.errors import MissingExtra, ProtocolAbort
from cloister.net.receipts import Receipt
from cloister.net.seat import root_cause
from cloister.report.figures import Figure
from cloister.run.rehearsal import Run
from cloister.study import Party

PNG = b"\x89PNG\r\n\x1a\n"


@dataclass(frozen=True)
class Drawn:
    """The figures of a run, or a sentence on why some are missing."""

    figures: tuple[Figure, ...] = ()
    note: str = ""


@dataclass
class Flow:
    """All messages of one name, summed up: who sent how many to whom."""

    protocol: str
    line: str
    name: str
    pairs: dict[tuple[str, str], tuple[int, int]] = field(default_factory=dict)  # (from, to) → messages, bytes

    @property
    def key(self) -> tuple[str, str, str]:
        return self.protocol, self.line, self.name

    def add(self, sender: str, to: str, count: int, size: int) -> None:
        had = self.pairs.get((sender, to), (0, 0))
        self.pairs[sender, to] = had[0] + count, had[1] + size


@dataclass(frozen=True)
class Abort:
    """Where a run ended before its result. The local sentence of the error is left out: this may be passed on."""

    party: str
    protocol: str
    line: str
    code: str


@dataclass
class SavedRun(Run):
    """A run read back from its folder: everything but the cells."""

    version: str = ""
    drawn: Drawn = field(default_factory=Drawn)
    flows: list[Flow] = field(default_factory=list)
    folder: Path | None = None


def abort_of(run: Run) -> Abort | None:
    """The party and the place where a run broke off; None if it was completed."""
    if not run.errors:
        return None if run.outcomes else Abort("", "local", "-", "nothing-done")
    cause = root_cause({Party(p): e for p, e in run.errors.items()})
    party = next(p for p, e in run.errors.items() if e is cause)
    if isinstance(cause, ProtocolAbort):
        return Abort(party, cause.protocol, cause.line, cause.code)
    return Abort(party, "local", "-", type(cause).__name__)


def status_of(run: Run, party: str) -> str:
    """`done`, `aborted: where`, or `unknown` if neither a result nor a receipt of that party is here."""
    receipt = run.receipts.get(party)
    if party in run.outcomes:
        return "done"
    if receipt is not None and receipt.status != "running":
        return receipt.status
    error = run.errors.get(party)
    if isinstance(error, ProtocolAbort):
        return f"aborted: {error.protocol} {error.line} {error.code}"
    return "unknown" if error is None else f"aborted: {type(error).__name__}"


def receipts_of(run: Run) -> dict[str, Receipt]:
    """Receipts in the order of the study, not in that in which threads ended."""
    order = [*run.study.parties, *sorted(run.receipts)]
    return {p: run.receipts[p] for p in order if p in run.receipts}


def rows_of(receipt: Receipt) -> list[dict[str, Any]]:
    """The receipt summed up; once, as some protocols send hundreds of thousands of messages."""
    kept = vars(receipt).get("_rows")
    if kept is None or kept[0] != len(receipt.entries):
        kept = vars(receipt)["_rows"] = len(receipt.entries), receipt.summary()
    rows: list[dict[str, Any]] = kept[1]
    return rows


def flows_of(run: Run) -> list[Flow]:
    """Messages by name, in the order in which they first occurred.

    Numbers come from the senders' receipts. What absent parties sent is known from what the others received.
    """
    seen = run.flows if isinstance(run, SavedRun) else _flows_of_events(run)
    found = {flow.key: Flow(*flow.key) for flow in seen or _flows_of_receipts(run)}
    for flow in seen:
        for (sender, to), (count, size) in flow.pairs.items():
            if sender not in run.receipts:
                found[flow.key].add(sender, to, count, size)
    for party, receipt in receipts_of(run).items():
        for row in rows_of(receipt):
            if row["kind"] == "sent":
                key = (row["protocol"], row["line"], row["name"])
                found.setdefault(key, Flow(*key)).add(party, row["to"], row["count"], row["bytes"])
    return [flow for flow in found.values() if flow.pairs]


def _flows_of_receipts(run: Run) -> list[Flow]:
    """Names only, where no events were kept: protocols as the parties came to them, then by line."""
    keys: set[tuple[str, str, str]] = set()
    rank: dict[str, int] = {}
    for receipt in receipts_of(run).values():
        sent = [(r["protocol"], r["line"], r["name"]) for r in rows_of(receipt) if r["kind"] == "sent"]
        for i, protocol in enumerate(dict.fromkeys(key[0] for key in sent)):
            rank[protocol] = min(i, rank.get(protocol, i))
        keys.update(sent)

    def order(key: tuple[str, str, str]) -> tuple[int, str, int, tuple[str, str, str]]:
        digits = re.search(r"\d+", key[1])
        return rank[key[0]], key[0], int(digits[0]) if digits else 0, key

    return [Flow(*key) for key in sorted(keys, key=order)]


def _flows_of_events(run: Run) -> list[Flow]:
    flows: dict[tuple[str, str, str], Flow] = {}
    senders = {e.party for e in run.events if e.kind == "sent"}
    for e in run.events:
        if e.kind == "sent":
            sender, to = e.party, e.peer
        elif e.kind == "received" and e.peer not in senders:
            sender, to = Party(e.peer), e.party
        else:
            continue
        flows.setdefault((e.protocol, e.line, e.name), Flow(e.protocol, e.line, e.name)).add(sender, to, 1, e.bytes)
    return list(flows.values())


def figures_of(run: Run) -> Drawn:
    """The workflow's figures; drawn once. A figure that fails leaves a note, never a run without its page."""
    if isinstance(run, SavedRun):
        return run.drawn
    if "_drawn" not in vars(run):
        vars(run)["_drawn"] = _draw(run)
    drawn: Drawn = vars(run)["_drawn"]
    return drawn


def _draw(run: Run) -> Drawn:
    if abort_of(run) is not None:
        return Drawn()
    try:
        workflow, options = workflows.check_plan(run.study)
        made = workflow.figures(run.outcomes, options) if workflow.figures is not None else []
        figures = tuple(Figure(title=str(f["title"]), alt=str(f["alt"]), png=bytes(f["png"])) for f in made)
    except MissingExtra as e:
        return Drawn(note=f"The figures are missing: {e}")
    except Exception as e:
        return Drawn(note=f"The figures are missing: drawing them failed ({type(e).__name__}).")
    if not all(f["png"].startswith(PNG) for f in figures):
        return Drawn(note="The figures are missing: what was drawn is no PNG image.")
    return Drawn(figures)


def started_of(run: Run) -> str | None:
    """When the first of the parties began, as its receipt says."""
    times = sorted(str(r.header["started"]) for r in run.receipts.values() if r.header.get("started"))
    return times[0] if times else None


def plain(x: Any) -> Any:
    """JSON's own kinds: arrays become lists, numbers that are none become null, anything else its text."""
    if x is None or isinstance(x, str | bool):
        return x
    if isinstance(x, Mapping):
        return {str(k): plain(v) for k, v in x.items()}
    if hasattr(x, "tolist"):  # NumPy arrays and scalars
        return plain(x.tolist())
    if isinstance(x, int):
        return x
    if isinstance(x, float):
        return x if math.isfinite(x) else None
    if isinstance(x, Iterable) and not isinstance(x, bytes):
        return [plain(v) for v in x]
    return str(x)
