"""The record of a run: who took part, what each party took away, and what was sent, wherever the parties were."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from cloister import workflows
from cloister.errors import CloisterError, DataError, MissingExtra, ProtocolAbort, about, origin_of, reason_of
from cloister.mpc.net.events import Event
from cloister.mpc.net.receipts import Receipt
from cloister.session import Outcome, root_cause
from cloister.study import Party, Study
from cloister.workflows.findings import sentences

if TYPE_CHECKING:
    from anndata import AnnData

PNG = b"\x89PNG\r\n\x1a\n"


@dataclass(frozen=True)
class Figure:
    title: str
    alt: str
    png: bytes


@dataclass(frozen=True)
class Drawing:
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

    party: str  # that noticed
    protocol: str
    line: str
    code: str
    origin: str = ""  # the party where it began
    reason: str = ""  # one word


@dataclass
class Record:
    """What came of a run: of a rehearsal, of one party's part between machines, or read back from its folder."""

    study: Study
    outcomes: dict[str, Outcome] = field(default_factory=dict)
    errors: dict[str, BaseException] = field(default_factory=dict)
    receipts: dict[str, Receipt] = field(default_factory=dict)
    events: list[Event] = field(default_factory=list)
    version: str = ""  # of Cloister, if the receipts do not say
    drawing: Drawing | None = None  # None until somebody asks
    saved_flows: list[Flow] | None = None  # of a run that was read back, instead of events
    _rows: dict[str, tuple[int, list[dict[str, Any]]]] = field(default_factory=dict, repr=False)

    def __repr__(self) -> str:
        """One line, as a notebook shows it."""
        sent = sum(r["bytes"] for p in self.receipts for r in self.rows(p) if r["kind"] == "sent")
        ended = f"stopped at {', '.join(self.errors)}" if self.errors else "done"
        who = f"{len(self.study.sites)} sites"
        what = f"{self.study.place}: " if self.study.at else ""
        return f"<Run of {what}{self.study.workflow}, {self.study.mode}: {who}, {ended}, {sent / 1e6:.2f} MB sent>"

    @property
    def data(self) -> dict[str, AnnData]:
        return {p: o.adata for p, o in self.outcomes.items() if o.adata is not None}

    @property
    def cost(self) -> dict[str, dict[str, float]]:
        return {p: o.cost for p, o in self.outcomes.items()}

    @property
    def results(self) -> dict[str, dict[str, Any]]:
        return {p: o.result for p, o in self.outcomes.items()}

    @property
    def model(self) -> Any:
        return next((o.model for o in self.outcomes.values() if o.model is not None), None)

    # ---- how it ended ------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Raise the error that made the run fail, if one did."""
        if self.errors:
            cause = root_cause({Party(p): e for p, e in self.errors.items()})
            party = next(p for p, e in self.errors.items() if e is cause)
            with about(f"'{party}'" if isinstance(cause, DataError) else ""):
                raise cause

    @property
    def abort(self) -> Abort | None:
        """The party and the place where the run broke off; None if it was completed."""
        if not self.errors:
            return None if self.outcomes else Abort("", "local", "-", "nothing-done")
        cause = root_cause({Party(p): e for p, e in self.errors.items()})
        party = next(p for p, e in self.errors.items() if e is cause)
        began = origin_of(cause, party), reason_of(cause)
        if isinstance(cause, ProtocolAbort):
            return Abort(party, cause.protocol, cause.line, cause.code, *began)
        return Abort(party, "local", "-", type(cause).__name__, *began)

    @property
    def origins(self) -> dict[str, tuple[str, str]]:
        """Of every party that failed: where it says that it began, and the reason in one word."""
        return {p: (origin_of(e, p), reason_of(e)) for p, e in self.errors.items()}

    @property
    def whole(self) -> bool:
        """Whether every party came to its end."""
        return not self.errors and self.outcomes.keys() >= self.study.parties.keys()

    def status(self, party: str) -> str:
        """`done`, `aborted: where`, or `unknown` if neither a result nor a receipt of that party is here."""
        receipt = self.receipts.get(party)
        if party in self.outcomes:
            return "done"
        if receipt is not None and receipt.status != "running":
            return receipt.status
        error = self.errors.get(party)
        if isinstance(error, ProtocolAbort):
            return f"aborted: {error.protocol} {error.line} {error.code}"
        return "unknown" if error is None else f"aborted: {type(error).__name__}"

    @property
    def started(self) -> str | None:
        """When the first of the parties began, as its receipt says."""
        return min((str(r.header["started"]) for r in self.receipts.values() if r.header.get("started")), default=None)

    # ---- what was sent -----------------------------------------------------------------------------------------------

    @property
    def parties(self) -> list[str]:
        """Whose receipts are here, in the order of the study, not in that in which threads ended."""
        return [p for p in dict.fromkeys((*self.study.parties, *sorted(self.receipts))) if p in self.receipts]

    def rows(self, party: str) -> list[dict[str, Any]]:
        """A receipt summed up; kept, as some protocols send hundreds of thousands of messages."""
        if party not in self.receipts:
            return []
        receipt = self.receipts[party]
        if self._rows.get(party, (-1,))[0] != len(receipt.entries):
            self._rows[party] = len(receipt.entries), receipt.summary()
        return self._rows[party][1]

    def flows(self) -> list[Flow]:
        """Messages by name, in the order in which they first occurred.

        Numbers come from the senders' receipts. What absent parties sent is known from what the others received.
        """
        seen = self.saved_flows if self.saved_flows is not None else _flows_of_events(self.events)
        flows = {flow.key: Flow(*flow.key) for flow in seen or self._flows_of_receipts()}
        for flow in seen:
            for (sender, to), (count, size) in flow.pairs.items():
                if sender not in self.receipts:
                    flows[flow.key].add(sender, to, count, size)
        for party in self.parties:
            for row in self.rows(party):
                if row["kind"] == "sent":
                    key = (row["protocol"], row["line"], row["name"])
                    flows.setdefault(key, Flow(*key)).add(party, row["to"], row["count"], row["bytes"])
        return [flow for flow in flows.values() if flow.pairs]

    def _flows_of_receipts(self) -> list[Flow]:
        """Names only, where no events were kept: protocols as the parties came to them, then by line."""
        keys: set[tuple[str, str, str]] = set()
        rank: dict[str, int] = {}
        for party in self.parties:
            sent = [(r["protocol"], r["line"], r["name"]) for r in self.rows(party) if r["kind"] == "sent"]
            for i, protocol in enumerate(dict.fromkeys(key[0] for key in sent)):
                rank[protocol] = min(i, rank.get(protocol, i))
            keys.update(sent)

        def order(key: tuple[str, str, str]) -> tuple[int, str, int, tuple[str, str, str]]:
            digits = re.search(r"\d+", key[1])
            return rank[key[0]], key[0], int(digits[0]) if digits else 0, key

        return [Flow(*key) for key in sorted(keys, key=order)]

    # ---- what it looks like ------------------------------------------------------------------------------------------

    @property
    def findings(self) -> list[str]:
        """What was found, in sentences; none of a run that failed."""
        if self.abort is not None:
            return []
        try:
            workflow, options = workflows.check_plan(self.study)
            return sentences(workflow, self.results, options)
        except (CloisterError, KeyError, TypeError, ValueError, AttributeError):  # of another version
            return []

    def draw(self) -> Drawing:
        """The workflow's figures; drawn once. A figure that fails leaves a note, never a run without its page."""
        if self.drawing is None:
            self.drawing = self._draw()
        return self.drawing

    def _draw(self) -> Drawing:
        if self.abort is not None:
            return Drawing()
        try:
            workflow, options = workflows.check_plan(self.study)
            drawn = workflow.figures(self.outcomes, options) if workflow.figures is not None else []
            figures = tuple(Figure(str(f["title"]), str(f["alt"]), bytes(f["png"])) for f in drawn)
        except MissingExtra as e:
            return Drawing(note=f"The figures are missing: {e}")
        except Exception as e:
            return Drawing(note=f"The figures are missing: drawing them failed ({type(e).__name__}).")
        if not all(f.png.startswith(PNG) for f in figures):
            return Drawing(note="The figures are missing: what was drawn is not a PNG image.")
        return Drawing(figures)


def _flows_of_events(events: Iterable[Event]) -> list[Flow]:
    flows: dict[tuple[str, str, str], Flow] = {}
    events = list(events)
    senders = {e.party for e in events if e.kind == "sent"}
    for e in events:
        if e.kind == "sent":
            sender, to = e.party, e.peer
        elif e.kind == "received" and e.peer not in senders:
            sender, to = Party(e.peer), e.party
        else:
            continue
        flows.setdefault((e.protocol, e.line, e.name), Flow(e.protocol, e.line, e.name)).add(sender, to, 1, e.bytes)
    return list(flows.values())


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
