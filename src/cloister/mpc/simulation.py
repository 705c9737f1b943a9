"""Run a protocol among parties that are threads of this process, over memory instead of a network.

run = simulate(my_protocol, params, {"basel": (x,), "lugano": (y,)})
run.values["hub"]           # what the coordinator's role returned
run.receipts["basel"]       # what basel sent, to whom, and what it opened
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from cloister.mpc.crypto import cores
from cloister.mpc.crypto.agreement import Identity
from cloister.mpc.crypto.entropy import Entropy
from cloister.mpc.net.events import Event, ignore_errors
from cloister.mpc.net.mailbox import Mailbox
from cloister.mpc.net.memory_transport import Fault, Killed, MemoryLink, Wires
from cloister.mpc.net.receipts import Receipt
from cloister.mpc.parties import Agreement, Party, Role
from cloister.mpc.session import open_session, root_cause


@dataclass(frozen=True)
class Ended:
    """What a role returned, and what that cost: bytes, messages, rounds, seconds, cpu_seconds."""

    value: Any
    cost: dict[str, float]


@dataclass
class Simulation:
    """What became of each party."""

    agreement: Agreement
    outcomes: dict[Party, Ended] = field(default_factory=dict)  # of parties that finished
    errors: dict[Party, BaseException] = field(default_factory=dict)
    receipts: dict[Party, Receipt] = field(default_factory=dict)
    events: list[Event] = field(default_factory=list)

    @property
    def values(self) -> dict[Party, Any]:
        return {p: ended.value for p, ended in self.outcomes.items()}

    @property
    def cost(self) -> dict[Party, dict[str, float]]:
        return {p: ended.cost for p, ended in self.outcomes.items()}

    def check(self) -> Simulation:
        """Raise what made a party fail, if one did."""
        if self.errors:
            raise root_cause(self.errors)
        return self


def agreement_of(roles: Iterable[Party], *, timeout: float = 30.0, colluders: int = 0) -> Agreement:
    """The first party coordinates; the others are sites."""
    names = list(roles)
    parties: dict[Party, Role] = {p: "site" if i else "coordinator" for i, p in enumerate(names)}
    return Agreement(parties, timeout=timeout, colluders=colluders)


def simulate(
    protocol: Any,
    params: Any,
    inputs: Mapping[Party, Sequence[Any]],
    *,
    roles: Mapping[Party, Callable[..., Any]] | None = None,
    agreement: Agreement | None = None,
    with_keys: Callable[[Agreement, Mapping[Party, bytes]], Agreement] = Agreement.with_keys,
    faults: Iterable[Fault] = (),
    entropy: Callable[[Party], Entropy] | None = None,
    consent: Mapping[Party, frozenset[str]] | None = None,
    reveals: Mapping[str, str] | None = None,
    timeout: float = 30.0,
    colluders: int = 0,
    on_event: Callable[[Event], None] | None = None,
    on_frame: Callable[[bytes], None] | None = None,
) -> Simulation:
    """Run every role of `protocol` with its inputs; errors of single parties stay in the result.

    Parameters
    ----------
    protocol
        A module, or anything else, with `roles(params)`: party → coroutine function, the coordinator first.
    inputs
        Party → what its role takes after the channel and the parameters.
    roles
        Instead of those of the protocol.
    faults
        What happens to messages on the way.
    entropy
        Party → its randomness; by default that of the operating system.
    on_frame
        Gets every frame as it is delivered, as a wiretapper would.
    """
    chosen = {**protocol.roles(params), **(roles or {})}
    agreement = agreement or agreement_of(chosen, timeout=timeout, colluders=colluders)
    sources = {p: entropy(p) if entropy else Entropy() for p in agreement.parties}
    identities = {p: Identity.create(sources[p]) for p in agreement.parties}
    agreed = with_keys(agreement, {p: i.public for p, i in identities.items()})
    boxes = {p: Mailbox(p) for p in agreed.parties}

    def deliver(sender: Party, to: Party, frame: bytes) -> None:
        if on_frame is not None:
            on_frame(frame)
        boxes[to].put(sender, frame)

    run, lock, listener = Simulation(agreed), threading.Lock(), ignore_errors(on_event)
    wires = Wires(deliver, faults)

    def note(event: Event) -> None:
        with lock:
            run.events.append(event)
        listener(event)

    def play(p: Party) -> None:
        wall, cpu = time.perf_counter(), cores.cpu_seconds()
        try:
            with open_session(
                agreed,
                p,
                MemoryLink(p, wires),
                boxes[p],
                identity=identities[p],
                entropy=sources[p],
                consent=(consent or {}).get(p, frozenset()),
                reveals=reveals,
                on_event=note,
                on_receipt=lambda receipt: run.receipts.__setitem__(p, receipt),
            ) as session:
                value = session.run(chosen[p], params, *inputs.get(p, ()))
                spent = {"seconds": time.perf_counter() - wall, "cpu_seconds": cores.cpu_seconds() - cpu}
                ended = Ended(value, {**session.cost, **spent})
            run.outcomes[p] = ended
        except BaseException as e:
            run.errors[p] = e

    threads = [threading.Thread(target=play, args=(p,), name=p, daemon=True) for p in agreed.parties]
    for thread in threads:
        thread.start()
    for thread in threads:
        while thread.is_alive():  # in slices, so that Ctrl-C gets through
            thread.join(0.2)
    run.errors = {p: e for p, e in run.errors.items() if not isinstance(e, Killed)}
    run.outcomes = {p: run.outcomes[p] for p in agreed.parties if p in run.outcomes}  # in their order,
    run.receipts = {p: run.receipts[p] for p in agreed.parties if p in run.receipts}  # whoever was first
    return run
