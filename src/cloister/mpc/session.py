"""Session: one party's place in a run, from which it runs roles of protocols.

`open_session` is the whole life of a party in a run: it ends with a receipt of what was sent and of the protocols that
ran. An error is sent to the peers as an abort, by name, and raised here.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from cloister.errors import LEFT, CloisterError, ProtocolAbort, origin_of
from cloister.mpc.crypto.agreement import Identity
from cloister.mpc.crypto.entropy import Entropy
from cloister.mpc.net.channel import Endpoint, Link
from cloister.mpc.net.events import Event
from cloister.mpc.net.journal import Journal
from cloister.mpc.net.mailbox import Mailbox
from cloister.mpc.net.receipts import Receipt
from cloister.mpc.net.wire import protocol_of
from cloister.mpc.parties import Agreement, Party, Role

SIGNED = "receipt"


def party_rng(seed: int, party: str, label: str = "") -> np.random.Generator:
    """Statistical randomness of a party, reproducible from a public seed. Never for secrets."""
    return np.random.default_rng([seed & 0xFFFFFFFF, *f"{party}/{label}".encode()])


@dataclass(frozen=True)
class Context:
    """What a party brings to its roles beside their inputs: secrets, its key, and what its own settings allow."""

    entropy: Entropy
    identity: Identity
    rng: np.random.Generator
    consent: frozenset[str] = frozenset()

    def arguments_of(self, role: Callable[..., Any]) -> dict[str, Any]:
        """The keyword-only parameters of a role that are called `context`, or as a field of it."""
        offered = {"context": self, **{name: getattr(self, name) for name in self.__dataclass_fields__}}
        wanted = inspect.signature(role).parameters
        return {name: value for name, value in offered.items() if name in wanted}


class Session:
    """One party's place in a run: who it is, what was agreed, and the way to run a role of a protocol."""

    def __init__(self, endpoint: Endpoint, context: Context) -> None:
        self._endpoint, self._context = endpoint, context
        self.agreement, self.me = endpoint.agreement, endpoint.me
        self.sites, self.coordinator = self.agreement.sites, self.agreement.coordinator
        self.role: Role = self.agreement.parties[self.me]
        self.protocols: dict[str, None] = {}  # whose roles this party ran, in their order

    @property
    def receipt(self) -> Receipt:
        return self._endpoint.receipt

    @property
    def cost(self) -> dict[str, float]:
        """What this party has sent, and how often it has waited for others."""
        ends = self._endpoint
        return {"bytes": ends.sent_bytes, "messages": ends.sent_messages, "rounds": ends.rounds}

    def context(self) -> Context:
        """What the next role gets."""
        return self._context

    def run(self, role: Callable[..., Any], params: Any, *inputs: Any) -> Any:
        """Agree with everyone on `params`, then run `role` to its end and return what this party may learn."""
        self.protocols[protocol_of(role.__module__)] = None

        async def whole() -> Any:
            ch = await self._endpoint.open_run(protocol_of(type(params).__module__), params)
            return await role(ch, params, *inputs, **self.context().arguments_of(role))

        return self._endpoint.drive(whole())

    def attend(self, params: Any) -> None:
        """Agree with everyone on `params`, as a party that has no part in what follows."""

        async def greet() -> None:
            await self._endpoint.open_run(protocol_of(type(params).__module__), params)

        self._endpoint.drive(greet())


@contextlib.contextmanager
def open_session(
    agreement: Agreement,
    me: Party,
    link: Link,
    mailbox: Mailbox,
    *,
    identity: Identity | None = None,
    entropy: Entropy | None = None,
    rng: np.random.Generator | None = None,
    consent: frozenset[str] = frozenset(),
    header: Mapping[str, Any] | None = None,
    reveals: Mapping[str, str] | None = None,
    make: Callable[[Endpoint, Context], Session] = Session,
    on_event: Callable[[Event], None] | None = None,
    on_receipt: Callable[[Receipt], None] | None = None,
    journal: Path | None = None,
) -> Iterator[Session]:
    """A party's session in one run, whatever carries the frames; it ends with the block.

    Parameters
    ----------
    consent
        Names what this party's own settings allow beyond taking part.
    header
        First lines of the receipt; by default the parties and the digest of the agreement.
    reveals
        The `Reveals` of every protocol that may run; the receipt ends with those of the protocols that did.
    make
        A kind of `Session`.
    on_receipt
        Gets the receipt however the run ends.
    journal
        A file in which every entry stands before its message leaves.
    """
    entropy = entropy or Entropy()
    identity = identity or Identity.create(entropy)
    stored = Journal(journal) if journal is not None else None
    if header is None:
        header = {"party": me, "parties": dict(agreement.parties), "study_digest": agreement.digest.hex()}
    receipt = Receipt(dict(header), stored)
    endpoint = Endpoint(agreement, me, link, mailbox, receipt, nonce=entropy.bytes, on_event=on_event)
    session = make(endpoint, Context(entropy, identity, rng if rng is not None else party_rng(0, me), consent))

    def end(status: str) -> None:
        if stored is not None:
            stored.begin_end()
        if reveals is not None:
            receipt.add_reveals({**session.protocols, **dict.fromkeys(receipt.protocols)}, reveals)
        receipt.close(status, lambda head: (identity.public, identity.sign(SIGNED, head)))
        endpoint.close()
        if on_receipt is not None:
            on_receipt(receipt)

    try:
        yield session
    except BaseException as e:
        where = f"{e.protocol} {e.line} {e.code}" if isinstance(e, ProtocolAbort) else type(e).__name__
        try:
            endpoint.abort(e)
        finally:
            end(f"aborted: {where}")
        raise
    end("done")


def root_cause(errors: Mapping[Party, BaseException]) -> BaseException:
    """The error that made the others fail: a party's own before one that it received, and before another's."""

    def order(party: Party) -> tuple[int, bool]:
        e = errors[party]
        rank = 1 if isinstance(e, CloisterError) else 0
        if isinstance(e, ProtocolAbort):
            rank = (4 if e.code in LEFT else 2) + e.heard
        return rank, origin_of(e, party) != party

    return errors[min(errors, key=order)]
