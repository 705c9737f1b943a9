"""Session: a study as one of its parties sees it. What every workflow is handed, and roles are run from.

`open_session` is the whole life of a party in one run, the same in rehearsal, in a process of its own and on FLARE: it
leaves with a receipt of what was sent and of the protocols that ran, or aborts by name and leaves with the receipt of
what had been sent until then. `take_part` does a workflow's part from such a session.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast

import numpy as np

from cloister._version import __version__
from cloister.cells.progress import told_to
from cloister.cells.tables import attach_receipt, places, used_cells
from cloister.disclosure import Thresholds
from cloister.mpc import session as mpc
from cloister.mpc.crypto import cores
from cloister.mpc.crypto.agreement import Identity
from cloister.mpc.crypto.entropy import Entropy
from cloister.mpc.net.channel import Endpoint, Link
from cloister.mpc.net.events import Event
from cloister.mpc.net.mailbox import Mailbox
from cloister.mpc.net.receipts import Entry, Receipt
from cloister.mpc.session import SIGNED, party_rng, root_cause
from cloister.study import Agreement, Party, Study

if TYPE_CHECKING:
    from anndata import AnnData

__all__ = ["SIGNED", "Outcome", "RemoteSession", "Session", "open_session", "party_rng", "root_cause", "take_part"]


@dataclass
class Outcome:
    """What a party has at the end."""

    adata: AnnData | None = None
    result: dict[str, Any] = field(default_factory=dict)  # plain values for reports: edges, scores, counts
    receipt: Receipt | None = None
    cost: dict[str, float] = field(default_factory=dict)
    model: Any = None
    files: dict[str, bytes] | None = None  # further files, where another process has made them from the model already


class RemoteSession(Protocol):
    """A site's place in a study whose runs happen in another process, which holds its keys (`cl.join`)."""

    study: Study
    me: Party

    def take_part(self, adata: AnnData) -> Outcome:
        """Bring these cells to the study's next run; what came of it here, with the model if there is one."""


class Session(mpc.Session):
    """One party's place in a study: what was agreed, this site's own limits, and the way to run roles."""

    def __init__(
        self,
        study: Study,
        endpoint: Endpoint,
        context: mpc.Context,
        floors: Mapping[str, int] | None = None,
        charge: Callable[[bytes, int, str], None] | None = None,
    ) -> None:
        super().__init__(endpoint, context)
        self._charge = charge  # the site's budget between machines; a rehearsal has none
        self.consent = context.consent
        self.floors = dict(floors or {})  # this site's own minimum group sizes, which raise those of the study
        self.study, self.mode = study, study.mode

    def context(self) -> mpc.Context:
        return replace(self._context, rng=self.rng())

    def thresholds(self, **agreed: int) -> Thresholds:
        """Minimum group sizes for what this site adds to opened sums: those agreed, raised by the site's own."""
        return Thresholds(**agreed).raised(self.floors)

    def charge_queries(self, querier: Party, cells: int) -> None:
        """Count query cells against this site's budget for the querier's identity key; raises if it is spent."""
        if self._charge is not None:
            self._charge(self.study.keys[querier], cells, querier)

    def note(self, kind: str, what: str) -> None:
        """Enter into the receipt what does not travel: the cells that were used, privacy that was spent."""
        self.receipt.add(Entry(kind, self.study.workflow, "-", what, self.me, 0, ""))

    def rng(self, label: str = "") -> np.random.Generator:
        """Statistical randomness of this party, reproducible from the study's seed. Never for secrets."""
        return party_rng(self.study.seed, self.me, label)


def _header(study: Study, me: Party, reveals: Mapping[str, str], approval: Mapping[str, Any] | None) -> dict[str, Any]:
    """What a receipt says before the first entry: who computes what with whom, why, and by whose leave."""
    return {
        "study": study.name,
        "study_digest": study.digest.hex(),
        **({"step": study.place, "whole_study": study.whole.digest.hex()} if study.at else {}),
        "party": me,
        "role": study.parties[me],
        "workflow": study.workflow,
        "mode": study.mode,
        "version": __version__,
        "parameters": dict(study.parameters),
        "counted": "donors" if "donor_key" in study.parameters else "cells",  # what floors and limits are about
        "parties": dict(study.parties),
        **({"governance": dict(study.governance)} if study.governance else {}),
        **({"approval": dict(approval)} if approval else {}),
        "protocols": list(reveals),  # that were declared; those that ran stand at the end
        "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


@contextlib.contextmanager
def open_session(
    study: Study,
    me: Party,
    link: Link,
    mailbox: Mailbox,
    *,
    consent: frozenset[str] = frozenset(),
    floors: Mapping[str, int] | None = None,
    charge: Callable[[bytes, int, str], None] | None = None,
    reveals: Mapping[str, str] | None = None,
    identity: Identity | None = None,
    entropy: Entropy | None = None,
    on_event: Callable[[Event], None] | None = None,
    on_receipt: Callable[[Receipt], None] | None = None,
    approval: Mapping[str, Any] | None = None,
    journal: Path | None = None,
    agreement: Agreement | None = None,
) -> Iterator[Session]:
    """A party's place in one run, whatever carries the frames; it ends with the block.

    `consent` names what this party's own settings allow beyond taking part; `floors` raises minimum group sizes,
    `charge` counts query cells of a querier against this site's budget.
    `reveals` holds the `Reveals` of every protocol that the study may run; the receipt ends with those of the protocols
    that did. `on_receipt` gets it however the run ends. `approval` is who allowed the run here, and on which cells.
    `journal` is a file in which every entry stands before its message leaves. Any error is told to the peers as an
    abort, and raised here. `agreement` is what the parties compare first, where that is more than the study.
    """
    with mpc.open_session(
        agreement or study.agreement,
        me,
        link,
        mailbox,
        identity=identity,
        entropy=entropy,
        consent=consent,
        header=_header(study, me, reveals or {}, approval),
        reveals=reveals,
        make=lambda endpoint, context: Session(study, endpoint, context, floors, charge),
        on_event=on_event,
        on_receipt=on_receipt,
        journal=journal,
    ) as session:
        yield cast(Session, session)


def take_part(
    study: Study,
    me: Party,
    link: Link,
    mailbox: Mailbox,
    adata: AnnData | Callable[[], AnnData] | None,
    *,
    part: Callable[[Session, AnnData | None], Outcome],
    consent: frozenset[str] = frozenset(),
    **place: Any,
) -> Outcome:
    """One party's whole part in one run: sit down, do `part`, and leave with a result and a receipt.

    `adata` may be a function that reads the cells: then the others know meanwhile that this party is at work.
    `part` is the workflow's code for a party; for the other arguments see `open_session`.
    """
    wall, cpu = time.perf_counter(), cores.cpu_seconds()
    with open_session(study, me, link, mailbox, consent=consent, **place) as session:
        endpoint = session._endpoint
        with told_to(endpoint.tell_pass):
            adata = adata() if callable(adata) else adata
            if hasattr(adata, "n_obs"):
                session.note("used", used_cells(adata, study.parameters.get("donor_key")))
            before = places(adata)
            outcome = part(session, adata)
        outcome.receipt = session.receipt
        outcome.cost = {
            "bytes": endpoint.sent_bytes,
            "messages": endpoint.sent_messages,
            "rounds": endpoint.rounds,
            "seconds": time.perf_counter() - wall,
            "cpu_seconds": cores.cpu_seconds() - cpu,
        }
        for place_written in sorted(places(outcome.adata) - before):
            session.note("written", place_written)
    if outcome.adata is not None:
        attach_receipt(outcome.adata, study.label, outcome.receipt.brief())
    return outcome
