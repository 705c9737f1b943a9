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
  waiting but ready to go on without whoever is missing. A wait ends when the awaited party is silent for `timeout`
  seconds, when for `timeout` seconds nobody at all was computing (or about to go on), or after `patience` seconds
  whatever happens. A long computation at one party therefore trips nobody's timeout. While a party is falling silent,
  idleness does not count: whoever waits for that party has to notice first, or the others would blame each other.
- *Aborts.* A party that fails tells all others `(protocol, line, code)` and nothing else.

Reveals
-------
every party, and who carries the frames : names, sizes and times of messages; whether a party is computing.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import hashlib
import logging
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Coroutine, Iterable, Mapping
from typing import Any, Protocol, TypeVar

from cloister._version import __version__
from cloister.errors import ParameterError, PeerLost, ProtocolAbort, WireError
from cloister.net import wire
from cloister.net.mailbox import COMPUTING, PATIENT, WAITING, Failure, Mailbox
from cloister.net.receipts import Entry, Receipt
from cloister.net.transcript import Transcript
from cloister.net.wire import Frame, Shape, message
from cloister.study import Party, Study

T = TypeVar("T")
NO_RUN = bytes(16)


class Link(Protocol):
    """What a transport offers to one party."""

    def post(self, to: Party, frame: bytes) -> None:
        """Queue a frame and return at once. Thread-safe. Failures surface as `Mailbox.gone`."""

    def close(self) -> None: ...


@dataclasses.dataclass(frozen=True, slots=True)
class Event:
    """Something a progress bar may show; all of it public."""

    party: Party
    kind: str  # "sent" | "received" | "opened" | "step"
    protocol: str
    line: str
    name: str
    peer: str
    bytes: int
    total: int  # bytes this party has sent so far


def harmless(on_event: Callable[[Event], None] | None) -> Callable[[Event], None]:
    """A listener that stops listening at its first error: no progress bar ends a run between hospitals."""
    listener = [on_event] if on_event is not None else []

    def tell(event: Event) -> None:
        try:
            for each in listener:
                each(event)
        except Exception as e:
            listener.clear()
            logging.getLogger("cloister").warning("progress is no longer shown: %s", type(e).__name__)

    return tell


class Session:
    """One party's seat in one study: owns its link, its mailbox, its pulse and its receipt."""

    def __init__(
        self,
        study: Study,
        me: Party,
        link: Link,
        mailbox: Mailbox,
        receipt: Receipt,
        *,
        nonce: Callable[[int], bytes],
        on_event: Callable[[Event], None] | None = None,
    ) -> None:
        self.study, self.me, self.mailbox, self.receipt = study, me, mailbox, receipt
        self.peers = tuple(p for p in study.parties if p != me)
        self.runs = 0
        self.sent_bytes = self.sent_messages = self.rounds = 0
        self._link, self._nonce, self._on_event = link, nonce, harmless(on_event)
        self._seq: dict[tuple[Party, str], int] = defaultdict(int)
        self.arrivals = 0  # how often something changed in the mailbox
        self._waiters: set[asyncio.Future[None]] = set()
        self._waits = {False: 0, True: 0}  # open waits, by whether they go on without the missing
        self._ticked = time.monotonic()
        self._closing = threading.Event()
        self._beat = min(2.0, study.timeout / 8)
        self._pulse = threading.Thread(target=self._keep_pulse, name=f"pulse-{me}", daemon=True)
        self._pulse.start()

    # -- life ------------------------------------------------------------------------------------------------------

    def _keep_pulse(self) -> None:
        while not self._closing.wait(self._beat):
            stuck = time.monotonic() - self._ticked > 2 * self._beat  # the loop is blocked: local computation
            waiting = PATIENT if self._waits[True] else WAITING if self._waits[False] else COMPUTING
            for p in self.peers:
                self._post(p, self._frame("pulse", p, body=COMPUTING if stuck else waiting))

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
        self.mailbox.on_change(lambda: _call(loop, self._notice))
        ticker = asyncio.create_task(self._tick())
        try:
            return await role
        finally:
            ticker.cancel()
            self.mailbox.on_change(lambda: None)

    async def _tick(self) -> None:
        while True:
            self._ticked = time.monotonic()
            await asyncio.sleep(self._beat / 2)

    def abort(self, e: BaseException) -> None:
        """Tell every peer that this party stops, and where; nothing about why beyond one word."""
        where = (e.protocol, e.line, e.code) if isinstance(e, ProtocolAbort) else ("local", "-", type(e).__name__)
        for p in self.peers:
            data = self._frame("abort", p, list(where))
            self._record_sent(where[0], where[1], "channel.Abort", p, data)
            self._post(p, data)

    def close(self) -> None:
        if not self._closing.is_set():
            self._closing.set()
            for p in self.peers:
                self._post(p, self._frame("bye", p, body=None))
            self._pulse.join(timeout=5)
            self._link.close()

    # -- runs ------------------------------------------------------------------------------------------------------

    async def open_run(self, protocol: str, params: Any) -> Channel:
        """H1, H2: agree on study, version and parameters with everyone, and on a run id that is new."""
        self.runs += 1
        hello = Hello(__version__, self.study.digest, wire.digest(protocol, params), self._nonce(16))
        lobby = Channel(self, f"hello/{self.runs}", NO_RUN)
        hub = self.study.coordinator
        if self.me == hub:
            # the first time everyone must be there, but for servers that have no part in this workflow and leave at
            # once; later on, who has dropped out since is left out
            spare = set(self.study.auxiliaries) - {hub}
            quorum = None if self.runs == 1 else 1
            hellos = {hub: hello, **await lobby.gather([p for p in self.peers if p not in spare], Hello, quorum=quorum)}
            hellos |= await lobby.gather([p for p in self.peers if p in spare], Hello, quorum=0)  # H1
            await lobby.broadcast([p for p in hellos if p != hub], Welcome(hellos))  # H2
            check_hellos(hellos, hub, self.study)  # after it, so that everyone can say who differs
        else:
            await lobby.send(hub, hello)  # H1
            hellos = {Party(p): h for p, h in (await lobby.recv_broadcast(hub, Welcome)).hellos.items()}  # H2
            known = {hub, self.me} <= hellos.keys() <= set(self.study.parties)
            if not known or hellos[self.me].nonce != hello.nonce:
                raise ProtocolAbort("channel", "H2", "mismatch", "the coordinator repeats another hello than was sent")
            check_hellos(hellos, self.me, self.study)
        nonces = {p: h.nonce for p, h in hellos.items()}
        return Channel(self, str(self.runs), wire.digest("run", hello.study, hello.params, hello.version, nonces))

    # -- frames ----------------------------------------------------------------------------------------------------

    def post(self, to: Party, scope: str, run: bytes, msg: Any) -> None:
        spec = type(msg).__message__
        if to not in self.study.parties or to == self.me:
            raise ParameterError(f"{spec.name} cannot go to '{to}': not another party of the study")
        seq = self._seq[to, scope]
        self._seq[to, scope] += 1
        data = wire.pack(Frame("data", run[:16], scope, self.me, to, seq, spec.name, wire.to_fields(msg)))
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

    def tell(self, kind: str, protocol: str, line: str, name: str, peer: str = "", size: int = 0) -> None:
        self._on_event(Event(self.me, kind, protocol, line, name, peer, size, self.sent_bytes))

    def _notice(self) -> None:
        self.arrivals += 1
        for waiter in self._waiters:
            _finish(waiter)

    async def wait(self, seen: int, seconds: float) -> None:
        """Until more has arrived than `seen`, or `seconds`."""
        if self.arrivals != seen:
            return
        loop = asyncio.get_running_loop()
        waiter = loop.create_future()
        self._waiters.add(waiter)
        alarm = loop.call_later(seconds, _finish, waiter)
        try:
            await waiter
        finally:
            alarm.cancel()
            self._waiters.discard(waiter)


def _finish(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)


def _call(loop: asyncio.AbstractEventLoop, f: Callable[[], None]) -> None:
    with contextlib.suppress(RuntimeError):  # the loop has ended; nobody waits
        loop.call_soon_threadsafe(f)


@dataclasses.dataclass(frozen=True, slots=True)
class _Clock:
    """What was heard of a party when last looked, and for how long nothing new came."""

    heard: int
    silent: float


class Channel:
    """One party's end of one protocol run."""

    def __init__(self, session: Session, scope: str, run_id: bytes, above: Transcript | None = None) -> None:
        self._session, self.scope, self.run_id = session, scope, run_id
        self.me, self.study = session.me, session.study
        self.transcript = Transcript(run_id, above)

    def sub(self, label: str, params: Any = None, *, apart: bool = False) -> Channel:
        """A channel for a sub-protocol: its own run id, bound to its label, public parameters and what was told so far.

        What is told in it binds the later sub-channels of this one too, unless it stands `apart`: for a step in which
        not all parties of this channel take part, or which may be given up and begun again.
        """
        told = [self.transcript.digest] if self.transcript.digest else []
        run_id = wire.digest("sub", self.run_id, label, params, *told)
        return type(self)(self._session, f"{self.scope}/{label}", run_id, None if apart else self.transcript)

    async def send(self, to: Party, msg: Any) -> None:
        self._session.post(to, self.scope, self.run_id, msg)

    async def scatter(self, to: Iterable[Party] | Mapping[Party, Any], msg: Any = None) -> None:
        """One message to many, or a map party → message."""
        each = to if msg is None and isinstance(to, Mapping) else dict.fromkeys(to, msg)
        for party, one in each.items():
            await self.send(party, one)

    async def broadcast(self, to: Iterable[Party], msg: Any) -> None:
        """One message to many, who must all be told the same: it enters the transcript."""
        await self.scatter(to, msg)
        self._absorb(self.me, msg)

    async def recv_broadcast(self, sender: Party, kind: type[T], **shapes: Shape) -> T:
        """The next message of `sender`, which it must have told all others alike: it enters the transcript."""
        msg = await self.recv(sender, kind, **shapes)
        self._absorb(sender, msg)
        return msg

    def _absorb(self, sender: Party, msg: Any) -> None:
        spec = type(msg).__message__
        content = wire.digest(spec.name, wire.to_fields(msg))
        self.transcript.absorb(sender, content)
        self._session.record_told(spec, sender, self.scope, content)

    async def recv(self, sender: Party, kind: type[T], **shapes: Shape) -> T:
        """The next message of `sender`, which must be a `kind`; every array in it has the stated shape."""
        return (await self.gather((sender,), kind, quorum=None, **shapes))[sender]

    async def gather(
        self, senders: Iterable[Party], kind: type[T], *, quorum: int | None = None, **shapes: Shape
    ) -> dict[Party, T]:
        """The next message of each sender, in their order.

        Without `quorum`, all must answer. With it, parties that stop or stay silent are left out, as long as `quorum`
        of them answer; who is left out gets an abort, and nothing more from it is read.
        """
        senders = tuple(senders)
        if strangers := [p for p in senders if p == self.me or p not in self.study.parties]:
            raise ParameterError(f"nothing can come from '{strangers[0]}': not another party of the study")
        got: dict[Party, T] = {}
        pending = dict.fromkeys(senders, _Clock(-1, 0.0))
        session, box, spec = self._session, self._session.mailbox, kind.__message__  # type: ignore[attr-defined]
        poll = session._beat / 2
        waited = idle = 0.0
        active = (COMPUTING,) if quorum is not None else (COMPUTING, PATIENT)
        busy, last = -1, time.monotonic()
        session._waits[quorum is not None] += 1
        session.rounds += 1
        try:
            while True:
                seen, failures = session.arrivals, {}
                for party in tuple(pending):
                    failures[party] = box.failed.get(party)  # first: what it sent before that is in the queue by now
                    if (item := box.take(party, self.scope)) is not None:
                        del pending[party]
                        idle = 0.0
                        try:
                            got[party] = self._open(party, *item, kind, spec, shapes)
                        except ProtocolAbort as e:
                            if quorum is None:
                                raise
                            self.dismiss(party, e.code)
                if box.fatal is not None:
                    raise ProtocolAbort(spec.protocol, spec.line, box.fatal.code, box.fatal.detail)
                if not pending and (quorum is None or len(got) >= quorum):
                    break
                now = time.monotonic()
                tick, last = min(now - last, 2 * poll), now  # a frozen process counts as one poll, not as silence
                waited += tick
                before, busy = busy, sum(box.busy[state] for state in active)
                fading = box.fading(now, self.study.timeout / 2, 2 * self.study.timeout)
                idle = 0.0 if busy != before else idle if fading else idle + tick
                for party, clock in tuple(pending.items()):
                    heard = box.heard[party]
                    pending[party] = clock = _Clock(heard, 0.0 if heard != clock.heard else clock.silent + tick)
                    if lost := self._lost(party, failures[party], clock, idle, waited, spec):
                        if quorum is None:
                            raise lost
                        del pending[party]
                        self.dismiss(party)
                left = len(got) + len(pending)
                if quorum is not None and left < quorum:
                    raise PeerLost(
                        spec.protocol,
                        spec.line,
                        "too-few",
                        f"{left} of {len(senders)} parties are left, {quorum} are needed. Start a new run.",
                    )
                if pending:
                    await session.wait(seen, poll)
        finally:
            session._waits[quorum is not None] -= 1
        return {p: got[p] for p in senders if p in got}

    def _lost(
        self, party: Party, failure: Failure | None, clock: _Clock, idle: float, waited: float, spec: wire.Spec
    ) -> ProtocolAbort | None:
        timeout, patience = self.study.timeout, self.study.patience
        if failure is not None:
            if failure.own:
                return ProtocolAbort(spec.protocol, spec.line, failure.code, failure.detail)
            if failure.code in ("lost", "finished"):
                return PeerLost(spec.protocol, spec.line, failure.code, failure.detail)
            told = ProtocolAbort(failure.protocol, failure.line, failure.code, failure.detail)
            told.heard = True
            return told
        if clock.silent > timeout or idle > timeout or waited > patience:
            limit = patience if waited > patience else timeout
            return PeerLost(
                spec.protocol,
                spec.line,
                "timeout",
                f"nothing from '{party}' for {limit:g} s. Start a new run; the masks of this one are spent.",
            )
        return None

    def _open(
        self,
        party: Party,
        frame: Frame,
        size: int,
        sha256: str,
        kind: type[T],
        spec: wire.Spec,
        shapes: Mapping[str, Shape],
    ) -> T:
        if frame.run != self.run_id[:16]:
            raise ProtocolAbort(
                spec.protocol, spec.line, "mismatch", f"'{party}' is in another run, or has other parameters"
            )
        if frame.name != spec.name:
            raise ProtocolAbort(
                spec.protocol,
                spec.line,
                "unexpected",
                f"expected {spec.name} from '{party}', found another message",
            )
        try:
            msg = wire.from_fields(kind, frame.body)
            wire.check_shapes(msg, shapes)
        except WireError as e:
            raise ProtocolAbort(spec.protocol, spec.line, "malformed", f"from '{party}': {e}") from None
        self._session.receipt.add(
            Entry("received", spec.protocol, spec.line, spec.name, party, size, sha256, self.scope)
        )
        self._session.tell("received", spec.protocol, spec.line, spec.name, party, size)
        return msg

    def dismiss(self, party: Party, code: str = "dropped") -> None:
        """Go on without `party`: tell it so, or what was wrong with what it sent, and read nothing more from it."""
        box = self._session.mailbox
        failure, first = box.failed.get(party), box.ignore(party)
        if failure is None or (failure.own and first):
            box.gone(party, "left out of this run")
            data = self._session._frame("abort", party, ["channel", "-", failure.code if failure else code])
            self._session._record_sent("channel", "-", "channel.Abort", party, data)
            self._session._post(party, data)

    def lost(self, party: Party) -> bool:
        """Whether `party` has stopped, as far as this one knows."""
        return party in self._session.mailbox.failed

    def reveal(self, x: T, *, to: Party | Iterable[Party], line: str, what: str, protocol: str) -> T:
        """Mark that a protected value becomes plain here; the receipt keeps what and for whom, never the value."""
        self.record_opening(to=to, line=line, what=what, protocol=protocol)
        return x

    def record_opening(self, *, to: Party | Iterable[Party], line: str, what: str, protocol: str) -> None:
        """Keep that a value becomes plain for somebody by what this party does, where it is not plain here itself."""
        for party in (to,) if isinstance(to, str) else tuple(to):
            self._session.receipt.add(Entry("opened", protocol, line, what, party, 0, ""))
            self._session.tell("opened", protocol, line, what, party)

    def step(self, name: str, *, protocol: str, line: str) -> None:
        """Tell the progress bar what is being computed here."""
        self._session.tell("step", protocol, line, name)


# ---- the hello before every run --------------------------------------------------------------------------------------


@message("H1")
class Hello:  # every party → coordinator
    version: str
    study: bytes  # digest
    params: bytes  # digest of protocol name and public parameters
    nonce: bytes


@message("H2")
class Welcome:  # coordinator → every party
    hellos: dict[Party, Hello]


def check_hellos(hellos: Mapping[Party, Hello], me: Party, study: Study | None = None) -> None:
    """Raise unless all parties agreed on the same things as `me`; who is at another step of `study` is told so."""
    mine = hellos[me]
    for p, h in hellos.items():
        if study is not None and h.study != mine.study and (place := study.place_of(h.study)):
            why = f"'{p}' is at {place}, and '{me}' at {study.place}; nothing was sent"
            raise ProtocolAbort("channel", "H2", "order", why)
    for field, what in {
        "version": "another version of Cloister",
        "study": "another study file",
        "params": "other options for this workflow",
    }.items():
        others = [p for p, h in hellos.items() if getattr(h, field) != getattr(mine, field)]
        if others:
            raise ProtocolAbort(
                "channel",
                "H2",
                "mismatch",
                f"{', '.join(sorted(others))} came with {what} than {me}; nothing was sent",
            )
    if any(len(h.nonce) != 16 for h in hellos.values()):
        raise ProtocolAbort("channel", "H2", "malformed", "a nonce that is not 16 bytes")
