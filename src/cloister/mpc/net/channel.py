"""Channel: how a role talks to other parties, and the only way it can.

    async def contributor(ch, params, x, *, entropy):
        await ch.send(params.aggregator, Key(pk))
        keys = await ch.recv(params.aggregator, Keys)

`send`, `recv`, `gather` and `scatter` move messages; `broadcast` and `recv_broadcast` move what all recipients must be
told alike; `reveal` marks the places where a protected value becomes plain.
A transport (memory, processes, FLARE) only carries frames between parties it has authenticated: a `Link` to post to,
and a `Mailbox` (in mailbox.py) that it fills. Everything else is here, the same for all of them:

- *Agreement.* Before a run, every party tells the coordinator the digest of its study, of the protocol and of its
  public parameters, and gets everyone's back (H1, H2). Any difference aborts. The run id hashes all of that and a
  nonce of every party, so no two runs have the same.
- *Order.* Data frames carry the run id, the sub-protocol's scope and a sequence number. A replay, a swap or a
  duplicate aborts, as does a frame that is no message or comes from somebody else than it says.
- *One view.* What is told by `broadcast` enters the transcript of the channel, and the transcript enters the id of
  every later sub-channel (transcript.py): parties that were told different things cannot finish a later step together.
  The receipt keeps the hash of every message received, and of every broadcast in a form that is the same for all.
- *Time.* Every party sends a pulse every few seconds, from a thread, which says whether it is computing, waiting, or
  waiting but ready to go on without whoever is missing; waiting.py says when a wait has ended.
- *Aborts.* A party that fails tells all others `(protocol, line, code)`; if it fails because another one did, also
  which one, and that one's code. Nothing else.

Reveals
-------
every party, and who carries the frames : names, sizes and times of messages; whether a party is computing.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import re
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping
from typing import Any, Protocol, TypeVar

from cloister._version import WIRE_VERSION
from cloister.disclosure import Contribution
from cloister.errors import LEFT, ParameterError, PeerLost, ProtocolAbort, WireError, blame, code_of
from cloister.mpc.net import wire
from cloister.mpc.net.events import Event, ignore_errors
from cloister.mpc.net.mailbox import COMPUTING, PATIENT, WAITING, Failure, Mailbox
from cloister.mpc.net.receipts import Entry, Receipt
from cloister.mpc.net.transcript import Transcript
from cloister.mpc.net.waiting import Bell, Wait
from cloister.mpc.net.wire import Frame, Shape, message
from cloister.mpc.parties import Agreement, Party

T = TypeVar("T")
NO_RUN = bytes(16)
BUSY = 0.1  # fraction of a processor from which a party that waits is at work, too: a computation in short pieces
NAME = "channel"


class Link(Protocol):
    """What a transport offers to one party."""

    def post(self, to: Party, frame: bytes) -> None:
        """Queue a frame and return at once. Thread-safe. Failures surface as `Mailbox.gone`."""

    def close(self) -> None: ...


class Endpoint:
    """One party's session in one study: owns its link, its mailbox, its pulse and its receipt."""

    def __init__(
        self,
        agreement: Agreement,
        me: Party,
        link: Link,
        mailbox: Mailbox,
        receipt: Receipt,
        *,
        nonce: Callable[[int], bytes],
        on_event: Callable[[Event], None] | None = None,
    ) -> None:
        self.agreement, self.me, self.mailbox, self.receipt = agreement, me, mailbox, receipt
        self.peers = tuple(p for p in agreement.parties if p != me)
        self.runs = 0
        self.sent_bytes = self.sent_messages = self.rounds = 0
        self.claimed: set[tuple[str, bytes]] = set()  # protocols whose keys depend on a channel's id, by that id
        self.packed: tuple[Any, wire.Packed] | None = None  # a message that goes to many just now, and its body
        self._link, self._nonce, self._on_event = link, nonce, ignore_errors(on_event)
        self._seq: dict[tuple[Party, str], int] = defaultdict(int)
        self.bell = Bell()  # rings when something changed in the mailbox
        self.waits = {False: 0, True: 0}  # open waits, by whether they go on without the missing
        self._ticked = time.monotonic()
        self._closing = threading.Event()
        self._beat = min(2.0, agreement.timeout / 8)
        self.poll = self._beat / 2
        self._pulse = threading.Thread(target=self._keep_pulse, name=f"pulse-{me}", daemon=True)
        self._pulse.start()

    # -- life ------------------------------------------------------------------------------------------------------

    def _keep_pulse(self) -> None:
        arrived, used = 0, time.process_time()
        while not self._closing.wait(self._beat):
            stuck = time.monotonic() - self._ticked > 2 * self._beat  # the loop is blocked: local computation
            waiting = PATIENT if self.waits[True] else WAITING if self.waits[False] else COMPUTING
            before, arrived = arrived, self.mailbox.progress
            earlier, used = used, time.process_time()
            at_work = stuck or arrived != before or used - earlier > max(0.05, BUSY * self._beat)
            for p in self.peers:
                self._post(p, self._frame("pulse", p, body=COMPUTING if at_work else waiting))

    def _post(self, to: Party, frame: bytes) -> None:
        """Post what must not fail: a pulse, an abort, a farewell. A broken link shows in the mailbox."""
        with contextlib.suppress(Exception):
            self._link.post(to, frame)

    def _frame(self, kind: wire.Kind, to: Party, body: Any) -> bytes:
        return wire.pack(Frame(kind, NO_RUN, "", self.me, to, 0, kind, body))

    def drive(self, role: Coroutine[Any, Any, T]) -> T:
        """Run a role to its end on an event loop of its own, so that the call works in scripts and notebooks alike."""
        box: list[T] = []
        errors: list[BaseException] = []

        def work() -> None:
            try:
                box.append(asyncio.run(self._watched(role)))
            except BaseException as e:
                errors.append(e)

        try:
            asyncio.get_running_loop()
        except RuntimeError:
            work()
        else:
            thread = threading.Thread(target=work, name=f"role-{self.me}")
            thread.start()
            thread.join()
        if errors:
            raise errors[0]
        return box[0]

    async def _watched(self, role: Coroutine[Any, Any, T]) -> T:
        loop = asyncio.get_running_loop()
        self.mailbox.on_change(lambda: self.bell.ring_from_a_thread(loop))
        ticker = asyncio.create_task(self._tick())
        try:
            return await role
        finally:
            ticker.cancel()
            self.mailbox.on_change(lambda: None)

    async def _tick(self) -> None:
        while True:
            self._ticked = time.monotonic()
            await asyncio.sleep(self.poll)

    def abort(self, e: BaseException) -> None:
        """Tell every peer that this party stops, and where; nothing about why beyond one word, and where it began."""
        self._find_origin(e)
        where = [e.protocol, e.line, e.code] if isinstance(e, ProtocolAbort) else ["local", "-", code_of(e)]
        first = [e.origin, e.began] if isinstance(e, ProtocolAbort) and e.origin != self.me else []
        for p in self.peers:
            data = self._frame("abort", p, where + first)
            self._record_sent(where[0], where[1], "channel.Abort", p, data)
            self._post(p, data)

    def _find_origin(self, e: BaseException) -> None:
        """Where an error began: as it says itself; where parties are missing, with the first that went; else here."""
        if code_of(e) in LEFT and isinstance(e, ProtocolAbort):
            for p, failure in self.mailbox.failed.items():
                if failure.code != "finished":
                    blame(e, failure.origin or p, failure.began or failure.code)
        blame(e, self.me, code_of(e))

    def close(self) -> None:
        if not self._closing.is_set():
            self._closing.set()
            for p in self.peers:
                self._post(p, self._frame("bye", p, body=None))
            self._pulse.join(timeout=5)
            self._link.close()

    # -- runs ------------------------------------------------------------------------------------------------------

    async def open_run(self, protocol: str, params: Any) -> Channel:
        """Agree on study, version and parameters with everyone, and on a run id that is new."""
        self.runs += 1
        mine = Hello(WIRE_VERSION, self.agreement.digest, wire.digest(protocol, params), self._nonce(16))
        lobby = Channel(self, f"hello/{self.runs}", NO_RUN)
        return Channel(self, str(self.runs), await _agree(lobby, mine, self.peers, first=self.runs == 1))

    # -- frames ----------------------------------------------------------------------------------------------------

    def post(self, to: Party, scope: str, run: bytes, msg: Any) -> None:
        spec = type(msg).__message__
        if to not in self.agreement.parties or to == self.me:
            raise ParameterError(f"{spec.name} cannot go to '{to}': not another party of the study")
        seq = self._seq[to, scope]
        self._seq[to, scope] += 1
        body = self.packed[1] if self.packed is not None and self.packed[0] is msg else wire.to_fields(msg)
        data = wire.pack(Frame("data", run[:16], scope, self.me, to, seq, spec.name, body))
        self._record_sent(spec.protocol, spec.line, spec.name, to, data, scope)
        self._link.post(to, data)

    def _record_sent(self, protocol: str, line: str, name: str, to: str, data: bytes, scope: str = "") -> None:
        self.receipt.add(Entry("sent", protocol, line, name, to, len(data), hashlib.sha256(data).hexdigest(), scope))
        self.sent_bytes += len(data)
        self.sent_messages += 1
        self.tell("sent", protocol, line, name, to, len(data))

    def record_told(self, spec: wire.Spec, sender: Party, scope: str, content: bytes) -> None:
        """A broadcast: the hash of its content, which is the same in the receipts of all who were told the same."""
        self.receipt.add(Entry("told", spec.protocol, spec.line, spec.name, sender, 0, content.hex(), scope))

    def tell(
        self, kind: str, protocol: str, line: str, name: str, peer: str = "", size: int = 0, done: int = 0, of: int = 0
    ) -> None:
        now = (self.sent_bytes, self.rounds, done, of)
        self._on_event(Event(self.me, kind, protocol, line, name, peer, size, *now))

    def tell_pass(self, stage: str, what: str, done: int, of: int) -> None:
        """How far a pass over this party's cells is."""
        self.tell("step", stage, "-", what, done=done, of=of)


class Channel:
    """One party's end of one protocol run."""

    def __init__(self, endpoint: Endpoint, scope: str, run_id: bytes, above: Transcript | None = None) -> None:
        self._endpoint, self.scope, self.run_id = endpoint, scope, run_id
        self.me, self.agreement = endpoint.me, endpoint.agreement
        self.transcript = Transcript(run_id, above)

    def sub(self, label: str, params: Any = None, *, apart: bool = False) -> Channel:
        """A channel for a sub-protocol: its own run id, bound to its label, public parameters and what was told so far.

        What is told in it binds the later sub-channels of this one too, unless it stands `apart`: for a step in which
        not all parties of this channel take part, or which may be given up and begun again.
        """
        told = [self.transcript.digest] if self.transcript.digest else []
        run_id = wire.digest("sub", self.run_id, label, params, *told)
        return type(self)(self._endpoint, f"{self.scope}/{label}", run_id, None if apart else self.transcript)

    def claim(self, protocol: str) -> None:
        """Use the id of this channel for the keys and signatures of one protocol run; a second use is an error here."""
        if (protocol, self.run_id) in self._endpoint.claimed:
            raise ParameterError(f"a second {protocol} under the id of channel '{self.scope}'; open a sub-channel")
        self._endpoint.claimed.add((protocol, self.run_id))

    async def send(self, to: Party, msg: Any) -> None:
        self._endpoint.post(to, self.scope, self.run_id, msg)

    async def scatter(self, to: Iterable[Party] | Mapping[Party, Any], msg: Any = None) -> None:
        """One message to many, or a map party → message."""
        each = to if msg is None and isinstance(to, Mapping) else dict.fromkeys(to, msg)
        self._endpoint.packed = None if msg is None else (msg, wire.pack_body(msg))
        try:
            for party, one in each.items():
                await self.send(party, one)
        finally:
            self._endpoint.packed = None

    async def broadcast(self, to: Iterable[Party], msg: Any) -> None:
        """One message to many, who must all be told the same: it enters the transcript."""
        await self.scatter(to, msg)
        self._absorb(self.me, msg)

    async def recv_broadcast(self, sender: Party, kind: type[T], *, aside: bool = False, **shapes: Shape) -> T:
        """The next message of `sender`, which it must have told all others alike: it enters the transcript."""
        msg = (await self.gather((sender,), kind, quorum=None, aside=aside, **shapes))[sender]
        self._absorb(sender, msg)
        return msg

    def _absorb(self, sender: Party, msg: Any) -> None:
        spec = type(msg).__message__
        content = wire.digest(spec.name, wire.to_fields(msg))
        self.transcript.absorb(sender, content)
        self._endpoint.record_told(spec, sender, self.scope, content)

    async def recv(self, sender: Party, kind: type[T], **shapes: Shape) -> T:
        """The next message of `sender`, which must be a `kind`; every array in it has the stated shape."""
        return (await self.gather((sender,), kind, quorum=None, aside=False, **shapes))[sender]

    async def gather(
        self,
        senders: Iterable[Party],
        kind: type[T],
        *,
        quorum: int | None = None,
        aside: bool = False,
        **shapes: Shape,
    ) -> dict[Party, T]:
        """The next message of each sender, in their order.

        Without `quorum`, all must answer. With it, parties that stop or stay silent are left out, as long as `quorum`
        of them answer; who is left out gets an abort, and nothing more from it is read.

        A wait `aside` stands beside a computation: it does not make this party's pulses report that it is waiting.
        """
        senders = tuple(senders)
        if strangers := [p for p in senders if p == self.me or p not in self.agreement.parties]:
            raise ParameterError(f"nothing can come from '{strangers[0]}': not another party of the study")
        got: dict[Party, T] = {}
        silent = ""
        endpoint, box, spec = self._endpoint, self._endpoint.mailbox, kind.__message__  # type: ignore[attr-defined]
        wait = Wait(self.agreement, box, senders, endpoint.poll, quorum=quorum is not None)
        endpoint.waits[quorum is not None] += not aside
        endpoint.rounds += 1
        try:
            while True:
                seen, failures = endpoint.bell.rung, {}
                for party in tuple(wait.pending):
                    failures[party] = box.failed.get(party)  # first: what it sent before that is in the queue by now
                    if (item := box.take(party, self.scope)) is not None:
                        wait.arrived(party)
                        try:
                            got[party] = self._open(party, *item, kind, shapes)
                        except ProtocolAbort as e:
                            if quorum is None:
                                raise
                            self.dismiss(party, e.code)
                if box.fatal is not None:
                    raise ProtocolAbort(spec.protocol, spec.line, box.fatal.code, box.fatal.detail)
                if not wait.pending and (quorum is None or len(got) >= quorum):
                    break
                wait.tick()
                for party in tuple(wait.pending):
                    over = wait.over(party)
                    if lost := _lost(party, failures[party], over, spec, self.agreement):
                        if quorum is None:
                            raise lost
                        if over and failures[party] is None:
                            silent = f"; nothing came {over}"
                        wait.pending.remove(party)
                        self.dismiss(party, why=f"nothing came from it {over}" if over else "left out of this run")
                if quorum is not None and (left := len(got) + len(wait.pending)) < quorum:
                    out = ", ".join(f"'{p}'" for p in senders if p not in got and p not in wait.pending)
                    why = f"{left} of {len(senders)} parties are left without {out}, {quorum} are needed{silent}."
                    raise PeerLost(spec.protocol, spec.line, "too-few", f"{why} Start a new run.")
                if wait.pending:
                    await endpoint.bell.wait(seen, endpoint.poll)
        finally:
            endpoint.waits[quorum is not None] -= not aside
        return {p: got[p] for p in senders if p in got}

    def _open(
        self, party: Party, frame: Frame, size: int, sha256: str, kind: type[T], shapes: Mapping[str, Shape]
    ) -> T:
        spec = kind.__message__  # type: ignore[attr-defined]
        if frame.run != self.run_id[:16]:
            why = f"'{party}' is in another run, or has other parameters"
            raise ProtocolAbort(spec.protocol, spec.line, "mismatch", why)
        if frame.name != spec.name:
            why = f"expected {spec.name} from '{party}', found another message"
            raise ProtocolAbort(spec.protocol, spec.line, "unexpected", why)
        try:
            msg = wire.from_fields(kind, frame.body)
            wire.check_shapes(msg, shapes)
        except WireError as e:
            raise ProtocolAbort(spec.protocol, spec.line, "malformed", f"from '{party}': {e}") from None
        self._endpoint.receipt.add(
            Entry("received", spec.protocol, spec.line, spec.name, party, size, sha256, self.scope)
        )
        self._endpoint.tell("received", spec.protocol, spec.line, spec.name, party, size)
        return msg

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Let pulses report that this party waits, while a wait `aside` is all that is left to do."""
        self._endpoint.waits[False] += 1
        try:
            yield
        finally:
            self._endpoint.waits[False] -= 1

    def dismiss(self, party: Party, code: str = "dropped", why: str = "left out of this run") -> None:
        """Go on without `party`: tell it so, or what was wrong with what it sent, and read nothing more from it.

        `why` is the end of a sentence for this party's own people.
        """
        box = self._endpoint.mailbox
        failure, first = box.failed.get(party), box.ignore(party)
        if failure is None or (failure.own and first):
            box.gone(party, why)
            data = self._endpoint._frame("abort", party, ["channel", "-", failure.code if failure else code])
            self._endpoint._record_sent("channel", "-", "channel.Abort", party, data)
            self._endpoint._post(party, data)

    def lost(self, party: Party) -> bool:
        """Whether `party` has stopped, as far as this one knows."""
        return self.stopped(party) is not None

    def stopped(self, party: Party) -> Failure | None:
        """Why `party` has stopped, as far as this one knows."""
        return self._endpoint.mailbox.failed.get(party)

    def reveal(self, x: T, *, to: Party | Iterable[Party], line: str, what: str, protocol: str) -> T:
        """Mark that a protected value becomes plain here; the receipt keeps what and for whom, never the value."""
        self.record_opening(to=to, line=line, what=what, protocol=protocol)
        return x

    def record_opening(self, *, to: Party | Iterable[Party], line: str, what: str, protocol: str) -> None:
        """Keep that a value becomes plain for somebody by what this party does, where it is not plain here itself."""
        for party in (to,) if isinstance(to, str) else tuple(to):
            self._endpoint.receipt.add(Entry("opened", protocol, line, what, party, 0, ""))
            self._endpoint.tell("opened", protocol, line, what, party)

    def contribute(self, part: Contribution, *, line: str, what: str, protocol: str) -> Any:
        """The values of a contribution to an opened sum; the receipt records the smallest group behind them."""
        sizes = {"cells": part.cells, "donors": part.donors, "withheld": part.withheld or None}
        text = " | ".join([what, *(f"{name} {size}" for name, size in sizes.items() if size is not None)])
        self._endpoint.receipt.add(Entry("contributed", protocol, line, text, self.me, 0, ""))
        return part.values

    def step(self, name: str, *, protocol: str, line: str) -> None:
        """Tell the progress bar what is being computed here; "round 3 of 10" in the name is how far that is."""
        counted = re.search(r"\b(\d+) of (\d+)\b", name)
        done, of = map(int, counted.groups()) if counted else (0, 0)
        self._endpoint.tell("step", protocol, line, name, done=done, of=of)


def _lost(
    party: Party, failure: Failure | None, over: str, spec: wire.Spec, agreement: Agreement
) -> ProtocolAbort | None:
    """Why nothing more is expected of `party`: it failed, or the wait for it is `over`."""
    if failure is not None:
        if failure.own:
            return ProtocolAbort(spec.protocol, spec.line, failure.code, failure.detail)
        if failure.code in ("lost", "finished", "stopped"):
            lost: ProtocolAbort = PeerLost(spec.protocol, spec.line, failure.code, failure.detail)
        else:
            lost = ProtocolAbort(failure.protocol, failure.line, failure.code, failure.detail)
            lost.heard = True
        known = failure.origin in agreement.parties
        blame(lost, failure.origin if known else party, failure.began if known else failure.code)
        return lost
    if over:
        why = f"nothing from '{party}' {over}. Start a new run; the masks of this one are spent."
        lost = PeerLost(spec.protocol, spec.line, "timeout", why)
        blame(lost, party, "timeout")
        return lost
    return None


# ---- hello: H1 u → S, version, digests of agreement, protocol and parameters, nonce; H2 S ⇒ u, everyone's H1 ---------


@message("H1", protocol=NAME)
class Hello:  # every party → coordinator
    version: str
    study: bytes  # digest
    params: bytes  # digest of protocol name and public parameters
    nonce: bytes


@message("H2", protocol=NAME)
class Welcome:  # coordinator → every party
    hellos: dict[Party, Hello]


async def _agree(lobby: Channel, mine: Hello, peers: Iterable[Party], *, first: bool) -> bytes:
    """H1, H2: the id of the run."""
    hub = lobby.agreement.coordinator
    if lobby.me == hub:
        # the first time everyone must be there, but for servers that have no part in this workflow and leave at once;
        # later on, who has dropped out since is left out
        spare = set(lobby.agreement.auxiliaries) - {hub}
        needed = [p for p in peers if p not in spare]
        hellos = {hub: mine, **await lobby.gather(needed, Hello, quorum=None if first else 1)}
        hellos |= await lobby.gather([p for p in peers if p in spare], Hello, quorum=0)  # H1
        await lobby.broadcast([p for p in hellos if p != hub], Welcome(hellos))  # H2
        check_hellos(hellos, hub, lobby.agreement)  # after it, so that everyone can say who differs
    else:
        await lobby.send(hub, mine)  # H1
        hellos = {Party(p): h for p, h in (await lobby.recv_broadcast(hub, Welcome)).hellos.items()}  # H2
        known = {hub, lobby.me} <= hellos.keys() <= set(lobby.agreement.parties)
        if not known or hellos[lobby.me].nonce != mine.nonce:
            raise ProtocolAbort(NAME, "H2", "mismatch", "the coordinator repeats another hello than was sent")
        check_hellos(hellos, lobby.me, lobby.agreement)
    nonces = {p: h.nonce for p, h in hellos.items()}
    return wire.digest("run", mine.study, mine.params, mine.version, nonces)


def check_hellos(hellos: Mapping[Party, Hello], me: Party, agreement: Agreement | None = None) -> None:
    """Raise unless all parties agreed on the same things as `me`; who is at another step receives that."""
    mine = hellos[me]
    for p, h in hellos.items():
        if agreement is not None and h.study != mine.study and (place := agreement.places.get(h.study, "")):
            why = f"'{p}' is at {place}, and '{me}' at {agreement.place}; nothing was sent"
            raise ProtocolAbort(NAME, "H2", "order", why)
    for field, what in {
        "version": "another version of Cloister",
        "study": "another study file",
        "params": "other options for this workflow",
    }.items():
        others = [p for p, h in hellos.items() if getattr(h, field) != getattr(mine, field)]
        if others:
            names = ", ".join(sorted(others))
            raise ProtocolAbort(NAME, "H2", "mismatch", f"{names} came with {what} than {me}; nothing was sent")
    if any(len(h.nonce) != 16 for h in hellos.values()):
        raise ProtocolAbort(NAME, "H2", "malformed", "a nonce that is not 16 bytes")
