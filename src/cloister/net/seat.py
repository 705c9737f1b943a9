"""Seat: a study as one of its parties sees it. What every workflow is handed as `study`.

`take_part` is the whole life of a party in one run, and the same in rehearsal, in a process of its own and on FLARE:
sit down, do the workflow's part, and leave with a result and a receipt, or abort by name and leave with the receipt of
what had been sent until then.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from cloister._version import __version__
from cloister.crypto.agreement import Identity
from cloister.crypto.entropy import Entropy
from cloister.errors import CloisterError, ProtocolAbort
from cloister.net.channel import Event, Link, Session
from cloister.net.mailbox import Mailbox
from cloister.net.receipts import Entry, Receipt
from cloister.study import Party, Role, Study

if TYPE_CHECKING:
    from anndata import AnnData

SIGNED = "receipt"


@dataclass
class Outcome:
    """What a party takes away."""

    adata: AnnData | None = None
    result: dict[str, Any] = field(default_factory=dict)  # plain values for reports: edges, scores, counts
    receipt: Receipt | None = None
    cost: dict[str, float] = field(default_factory=dict)
    model: Any = None


class Seat:
    """One party's place in a study."""

    def __init__(
        self, session: Session, identity: Identity, entropy: Entropy, consent: frozenset[str] | None = None
    ) -> None:
        self._session, self._identity, self._entropy, self._consent = session, identity, entropy, consent
        self.study, self.me = session.study, session.me

    @property
    def role(self) -> Role:
        return self.study.parties[self.me]

    @property
    def receipt(self) -> Receipt:
        return self._session.receipt

    def consents(self, what: str) -> bool:
        """Whether this party's own settings allow it; in a rehearsal everybody does unless it says otherwise."""
        return self._consent is None or what in self._consent

    def rng(self, label: str = "") -> np.random.Generator:
        """Statistical randomness of this party, reproducible from the study's seed. Never for secrets."""
        words = [self.study.seed & 0xFFFFFFFF, *f"{self.me}/{label}".encode()]
        return np.random.default_rng(words)

    def run(self, role: Callable[..., Any], params: Any, *inputs: Any) -> Any:
        """Agree with everyone on `params`, then play `role` to its end and return what this party may learn.

        A role gets `entropy`, `identity`, `rng` or `consent` if its signature names them.
        """
        wanted = inspect.signature(role).parameters
        consent = frozenset(("open-model", "validation")) if self._consent is None else self._consent
        offered = {"entropy": self._entropy, "identity": self._identity, "rng": self.rng(), "consent": consent}
        extras = {name: value for name, value in offered.items() if name in wanted}

        async def whole() -> Any:
            ch = await self._session.open_run(type(params).__module__.rpartition(".")[2], params)
            return await role(ch, params, *inputs, **extras)

        return self._session.drive(whole())


def take_part(
    study: Study,
    me: Party,
    link: Link,
    mailbox: Mailbox,
    adata: AnnData | Callable[[], AnnData] | None,
    *,
    part: Callable[[Seat, AnnData | None], Outcome],
    reveals: Mapping[str, str] | None = None,
    identity: Identity | None = None,
    entropy: Entropy | None = None,
    on_event: Callable[[Event], None] | None = None,
    on_receipt: Callable[[Receipt], None] | None = None,
    consent: frozenset[str] | None = None,
) -> Outcome:
    """Play one party's part in one run, whatever carries the frames.

    `adata` may be a function that reads the cells: then the others know meanwhile that this party is at work.
    `part` is the workflow's code for a party; `reveals` the `Reveals` of its protocols, its own first, for the receipt.
    `consent` names what this party's own settings allow beyond running; None stands for everything.
    `on_receipt` gets the receipt however the run ends. Any error is told to the peers as an abort, and raised here.
    """
    texts = (reveals or {}).values()
    entropy = entropy or Entropy()
    identity = identity or Identity.create(entropy)
    receipt = Receipt(
        {
            "study": study.name,
            "study_digest": study.digest.hex(),
            "party": me,
            "role": study.parties[me],
            "workflow": study.workflow,
            "mode": study.mode,
            "version": __version__,
            "parameters": dict(study.parameters),
            "parties": dict(study.parties),
            "reveals": next(iter(texts), ""),
            "also_reveals": dict(list((reveals or {}).items())[1:]),
            "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        }
    )
    session = Session(study, me, link, mailbox, receipt, nonce=entropy.bytes, on_event=on_event)
    wall, cpu = time.perf_counter(), time.thread_time()

    def end(status: str) -> None:
        receipt.close(status, lambda head: (identity.public, identity.sign(SIGNED, head)))
        session.close()
        if on_receipt is not None:
            on_receipt(receipt)

    try:
        adata = adata() if callable(adata) else adata
        before = _places(adata)
        outcome = part(Seat(session, identity, entropy, consent), adata)
        outcome.cost = {
            "bytes": session.sent_bytes,
            "messages": session.sent_messages,
            "rounds": session.rounds,
            "seconds": time.perf_counter() - wall,
            "cpu_seconds": time.thread_time() - cpu,
        }
        for place in sorted(_places(outcome.adata) - before):
            receipt.add(Entry("written", study.workflow, "-", place, me, 0, ""))
    except BaseException as e:
        named = f"{e.protocol} {e.line} {e.code}" if isinstance(e, ProtocolAbort) else type(e).__name__
        try:
            session.abort(e)
        finally:
            end(f"aborted: {named}")
        raise
    outcome.receipt = receipt
    end("done")
    if outcome.adata is not None:
        from cloister.cells.tables import attach_receipt

        attach_receipt(outcome.adata, study.workflow, receipt.brief())
    return outcome


def _places(adata: Any) -> set[str]:
    """Where an AnnData holds something, by name: what is new after a run is the result that was written."""
    found: set[str] = set()
    for slot in ("obs", "var", "obsm", "layers", "uns"):
        keys = {str(k) for k in getattr(adata, slot, ())} - {"cloister"}
        found |= {f"{slot}[{k!r}]" for k in keys}
    kept = getattr(adata, "uns", {}).get("cloister", {})
    return found | {f"uns['cloister'][{k!r}]" for k in (kept if isinstance(kept, Mapping) else ())}


def root_cause(errors: dict[Party, BaseException]) -> BaseException:
    """The error that made the others fail: a party's own before one that it heard of."""

    def order(e: BaseException) -> int:
        if isinstance(e, ProtocolAbort):
            return (4 if e.code in ("finished", "lost", "timeout", "too-few") else 2) + e.heard
        return 1 if isinstance(e, CloisterError) else 0

    return min(errors.values(), key=order)
