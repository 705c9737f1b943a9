"""SealedLink: frames between two parties, over a relay that neither has to trust.

The carriers pass what one site sends to another through the coordinator's machine. So every pair of parties agrees on a
key of its own for each run, signed with the identities in `study.toml`, and the relay only sees sizes and times:

    G1  u → v   pk_u, s_u, sign_u(run, u, pk_u, s_u)     pk_u fresh for this run; s_u about earlier ones (R1)
    G2  v → u   pk_v, s_v, sign_v(run, v, pk_v, s_v)     the answer to G1
    G3  both    k_uv = KA(sk_u, pk_v; run)
    G4  u → v   i, seal(k_uv, batch_i; aad = (u, v, i))  i = 0, 1, 2, ...; answered, at most `WINDOW` on their way

A batch whose answer is lost is sent again, byte for byte, and taken in once, in its turn. Large frames travel in
pieces, and pulses pass them on the way, so that a slow line is not taken for a dead party. A party is lost when the
relay has had no connection to it for a while, when its service says that the run's process is gone, or when it has not
answered anything for the study's `timeout`. Before its greeting, its service counts too: a process may take `JOIN`
seconds to come up, but not where nobody is left to start it, nor where it came and ended. All lines lead through the
coordinator's machine: where that is out of reach, it is named, and not the parties behind it.

Reveals
-------
relay : who talks to whom, when, and how many bytes; the statements about earlier runs.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from cloister.errors import ParameterError, ProtocolAbort, WireError
from cloister.mpc.crypto.agreement import Identity, agree, bind, check_signature, key_pair, seal, unseal
from cloister.mpc.crypto.entropy import Entropy
from cloister.mpc.net import values, wire
from cloister.mpc.net.mailbox import Failure, Mailbox
from cloister.mpc.net.multiplex import Mailboxes
from cloister.study import Party, Study

GREETING, BATCH, PING = b"G", b"B", b"P"
WHOLE, PART, LAST = 0, 1, 2
TAKEN, REFUSED = b"+", b"-"
HEADER = 5  # bytes before each piece: kind, length
WINDOW = 8  # batches on their way to one party
LEAST, MOST = 1 << 16, 1 << 19  # bytes of a batch; it grows while the line is fast
AWAY = 2 / 3  # of the study's timeout: 40 s by default, so that a line may be down for half a minute
SETTLE = 2.0  # seconds in which a greeting may overtake the word that nobody is there yet
JOIN = 120.0  # seconds that a party waits for the others' processes to come up
PULSE = 256  # a pulse is shorter than this

Ask = Callable[[Party, bytes, float], bytes]  # (to, request, seconds) → answer; raises Unreachable or TimeoutError


class Unreachable(Exception):
    """The relay has no connection to that party's process at the moment."""


class Absent(Unreachable):
    """Nor to the service that would start it."""


class Over(Unreachable):
    """The service is there, and has no process for this run: not yet, or no longer."""


class Ended(Over):
    """No longer: it had one."""


class Lost(Exception):
    """Nothing more can be sent to that party."""


@dataclass
class _Peer:
    """What is kept for one other party; `turn` guards the outgoing half, `lock` the incoming one."""

    key: bytes | None = None
    public: bytes = b""
    statement: bytes = b""
    ready: threading.Event = field(default_factory=threading.Event)
    lost: bool = False
    # outgoing
    turn: threading.Condition = field(default_factory=threading.Condition)
    frames: deque[bytes] = field(default_factory=deque)
    at: int = 0  # bytes of the first frame that are already sent
    pulse: bytes | None = None
    room: int = LEAST
    # incoming
    lock: threading.Condition = field(default_factory=threading.Condition)
    due: int = 0  # the next batch
    parts: bytearray = field(default_factory=bytearray)


class SealedLink:
    """One party's links to all others in one run; a `cloister.mpc.net.channel.Link`.

    Parameters
    ----------
    run
        A name that all parties know this run by and no other run has.
    ask
        Carries a request to a party and brings its answer. The party's transport hands the request to `answer`,
        with the sender that it believes in; a wrong belief is found out here.
    statement
        What this party tells every other one with its greeting (`cloister.deploy.course`); `statements` are theirs.
    """

    def __init__(
        self,
        study: Study,
        me: Party,
        run: str,
        identity: Identity,
        mailbox: Mailbox | Mailboxes,
        ask: Ask,
        entropy: Entropy,
        statement: bytes = b"",
    ) -> None:
        if missing := [p for p in study.parties if p not in study.keys]:
            raise ParameterError(f"study.toml: [keys] has none for {', '.join(missing)}; run: cloister provision")
        self._study, self._me, self._run, self._mailbox, self._ask = study, me, run.encode(), mailbox, ask
        self._entropy, self._keys = entropy, key_pair(entropy)
        said = identity.sign("greeting", self._said(me, self._keys.public, statement))
        self._greeting = self._keys.public + said + statement
        self._peers = {p: _Peer() for p in study.parties if p != me}
        self._reply = min(5.0, study.timeout / 4)  # seconds to wait for one answer
        self.away = study.timeout * AWAY  # seconds without a connection that are forgiven
        self._closing, self._end = False, float("inf")
        self._pumps = [threading.Thread(target=self._pump, args=(p,), name=f"to-{p}", daemon=True) for p in self._peers]

    def start(self) -> None:
        """Greet everyone; call this once `answer` can be reached."""
        for pump in self._pumps:
            pump.start()

    def meet(self, seconds: float = JOIN) -> tuple[Party, ...]:
        """Wait until everyone is there, or `seconds`; returns who is missing, and gives these up."""
        end = time.monotonic() + seconds
        for peer in self._peers.values():
            while not peer.ready.wait(min(0.5, max(0.0, end - time.monotonic()))):
                if time.monotonic() > end or self._study.coordinator in self._mailbox.failed:
                    break  # who is not here by then does not come; nor is there a run without the coordinator
        missing = tuple(p for p, peer in self._peers.items() if peer.key is None)
        for p in missing:
            self._lose(p, f"it did not come within {seconds:g} s")
        return missing

    def post(self, to: Party, frame: bytes, tag: bytes = b"") -> None:
        """Queue a frame, behind a `tag` that the other end's mailbox knows what to do with."""
        peer = self._peers[to]
        with peer.turn:
            if peer.lost or self._closing:
                return
            if len(frame) < PULSE and wire.unpack(frame).kind == "pulse":
                peer.pulse = tag + frame  # a newer one says more than an older one
            else:
                peer.frames.append(tag + frame if tag else frame)
            peer.turn.notify()

    def close(self) -> None:
        """Send what is queued, as long as the others take it, and stop."""
        self._closing = True
        self._wake()
        for pump in self._pumps:
            if pump.is_alive():
                pump.join()

    def stop(self, why: str, code: str = "stopped", seconds: float = 3.0) -> None:
        """Expect nothing more from anyone, since this party is stopped; there are `seconds` left to tell them."""
        self._end = time.monotonic() + seconds
        for p in self._peers:
            self._mailbox.fail(p, Failure("local", "-", code, why, origin=self._me, began=code))

    def give_up(self, party: Party, why: str) -> None:
        """Nothing will come from `party`, nor need anything go there."""
        self._lose(party, why)

    def lost(self, party: Party) -> bool:
        return self._peers[party].lost

    @property
    def statements(self) -> dict[Party, bytes]:
        """What those who have greeted told of earlier runs."""
        return {p: peer.statement for p, peer in self._peers.items() if peer.key is not None}

    # -- incoming --------------------------------------------------------------------------------------------------

    def answer(self, sender: Party, request: bytes) -> bytes:
        """Take in what a party asks; called from the transport's threads."""
        peer, kind, rest = self._peers.get(sender), request[:1], request[1:]
        if peer is None:
            return REFUSED
        if kind == PING:
            return TAKEN
        try:
            if kind == GREETING:
                self._learn(sender, rest)  # G1
                return self._greeting  # G2
            if kind == BATCH:
                return self._in_turn(sender, peer, int.from_bytes(rest[:8], "big"), rest[8:])  # G4
        except ProtocolAbort:  # forged or altered on the way; the honest sender tries again
            return REFUSED
        return REFUSED

    def _learn(self, sender: Party, greeting: bytes) -> bytes:
        public, signature, statement = greeting[:32], greeting[32:96], greeting[96:]
        check_signature(self._study.keys[sender], "greeting", self._said(sender, public, statement), signature)
        peer = self._peers[sender]
        with peer.lock:
            if peer.key is None:
                pair = sorted((self._me, sender))
                peer.key = agree(self._keys, public, bind("link", self._run, *(p.encode() for p in pair)))  # G3
                peer.public, peer.statement = public, statement
            elif (peer.public, peer.statement) != (public, statement):
                raise ProtocolAbort("link", "G1", "replay", f"'{sender}' greets twice with different keys")
        peer.ready.set()
        return peer.key

    def _in_turn(self, sender: Party, peer: _Peer, i: int, box: bytes) -> bytes:
        if peer.key is None or i >= peer.due + WINDOW:
            return REFUSED
        if i < peer.due:
            return TAKEN  # its answer was lost
        batch = unseal(peer.key, box, self._aad(sender, self._me, i))
        with peer.lock:
            if not peer.lock.wait_for(lambda: i <= peer.due, self._reply):
                return REFUSED  # one before it is missing
            if i == peer.due:
                self._take_in(sender, peer, batch)
                peer.due += 1
                peer.lock.notify_all()
        return TAKEN

    def _take_in(self, sender: Party, peer: _Peer, batch: bytes) -> None:
        try:
            for kind, piece in _pieces(batch):
                if kind == WHOLE:
                    self._mailbox.put(sender, piece)
                elif self._mailbox.hold(sender, len(piece)):
                    peer.parts += piece
                    if len(peer.parts) > values.MAX_FRAME:
                        raise WireError("a frame that is too long")
                    if kind == LAST:
                        frame = self._all_parts(sender, peer)
                        self._mailbox.put(sender, frame)
                else:
                    self._all_parts(sender, peer)
        except WireError as e:  # the seal is its own, so this is what it wants to say
            self._all_parts(sender, peer)
            self._mailbox.fail(sender, Failure("link", "G4", "malformed", f"from '{sender}': {e}", own=True))

    def _all_parts(self, sender: Party, peer: _Peer) -> bytes:
        frame, peer.parts = bytes(peer.parts), bytearray()
        self._mailbox.release(sender, len(frame))
        return frame

    # -- outgoing --------------------------------------------------------------------------------------------------

    def _pump(self, to: Party) -> None:
        """Greet one party, then carry to it what is posted until the end."""
        peer = self._peers[to]
        try:
            key = self._learn(to, self._insist(to, GREETING + self._greeting, JOIN, Absent))  # G1, G2
        except Lost as e:
            self._lose(to, str(e))
            return
        except ProtocolAbort as e:
            self._lose(to, f"its key is not the one in study.toml ({e.code})")
            return
        i, free = 0, threading.BoundedSemaphore(WINDOW)
        with ThreadPoolExecutor(WINDOW, f"to-{to}") as others:
            while not peer.lost and (batch := self._next(peer)) is not None:
                request = BATCH + i.to_bytes(8, "big") + seal(key, batch, self._aad(self._me, to, i), self._entropy)
                i += 1
                if peer.frames:  # do not wait for its answer
                    free.acquire()
                    others.submit(self._carry, to, peer, request).add_done_callback(lambda _: free.release())
                else:
                    self._carry(to, peer, request)

    def _carry(self, to: Party, peer: _Peer, request: bytes) -> None:
        """One batch, until it is taken in."""
        began = time.monotonic()
        try:
            self._insist(to, request, self._study.timeout)  # G4
        except Lost as e:
            self._lose(to, str(e))
        fast = time.monotonic() - began < self._reply / 4
        peer.room = min(2 * peer.room, MOST) if fast else max(peer.room // 2, LEAST)

    def _insist(self, to: Party, request: bytes, patience: float, fatal: type[Unreachable] = Unreachable) -> bytes:
        """Ask until there is an answer; `Lost` after `patience` seconds, or after `away` seconds of `fatal`."""
        began, gone, over = time.monotonic(), None, None
        while time.monotonic() < self._end and not self._peers[to].lost:
            if self._closing and self._peers[to].key is None:
                break  # it never came
            try:
                answer = self._ask(to, request, self._reply)
                if answer != REFUSED:
                    return answer
                gone = None
            except Unreachable as e:
                if isinstance(e, Ended) or (isinstance(e, Over) and fatal is Unreachable):
                    raise Lost("its process ended") from None
                if isinstance(e, Over) and self._peers[to].key is not None:  # it greeted: it had a process
                    over = over or time.monotonic()
                    if time.monotonic() - over > SETTLE:
                        raise Lost("its process ended") from None
                gone = (gone or time.monotonic()) if isinstance(e, fatal) else None
                if gone and time.monotonic() - gone > self.away:
                    raise Lost("its process or its connection ended") from None
            except TimeoutError:
                gone = None
            if time.monotonic() - began > patience:
                raise Lost(f"it has not answered for {patience:g} s")
            time.sleep(0.2)
        raise Lost("the link is closed")

    def _next(self, peer: _Peer) -> bytes | None:
        """What to send now: the pulse, and as much of the queue as there is room for. None at the end."""
        with peer.turn:
            while not (peer.frames or peer.pulse):
                if self._closing or peer.lost:
                    return None
                peer.turn.wait()
            parts: list[bytes] = []
            if peer.pulse is not None:
                parts += _piece(WHOLE, peer.pulse)
                peer.pulse = None
            room = peer.room
            while peer.frames and room > 0:
                frame = peer.frames[0]
                part = frame[peer.at : peer.at + room]
                peer.at += len(part)
                room -= len(part) + HEADER
                last = peer.at == len(frame)
                parts += _piece(LAST if last else PART, part)
                if last:
                    peer.frames.popleft()
                    peer.at = 0
            return b"".join(parts)

    def _lose(self, party: Party, why: str) -> None:
        peer = self._peers[party]
        with peer.turn:
            peer.lost = True
            peer.frames.clear()
            peer.turn.notify()
        peer.ready.set()  # nobody need wait for it
        hub = self._study.coordinator
        if party != hub and self._me != hub and not self._closing and self._relay_gone():
            failure = Failure(
                "channel", "-", "lost", f"'{hub}' dropped out: its connection ended", origin=hub, began="lost"
            )
            self._mailbox.fail(party, failure)
        else:
            self._mailbox.gone(party, why)

    def _relay_gone(self) -> bool:
        """Whether the coordinator's machine, which all lines lead through, is out of reach."""
        try:
            self._ask(self._study.coordinator, PING, 2.0)
        except Absent:
            return True
        except (Unreachable, TimeoutError):
            pass
        return False

    def _wake(self) -> None:
        for peer in self._peers.values():
            with peer.turn:
                peer.turn.notify()

    def _said(self, who: Party, public: bytes, statement: bytes) -> bytes:
        return bind("greeting", self._run, who.encode(), public, statement)

    def _aad(self, sender: Party, to: Party, i: int) -> bytes:
        return bind("batch", self._run, sender.encode(), to.encode(), i.to_bytes(8, "big"))


def _piece(kind: int, data: bytes) -> tuple[bytes, bytes]:
    return bytes((kind,)) + len(data).to_bytes(HEADER - 1, "big"), data


def _pieces(batch: bytes) -> Iterator[tuple[int, bytes]]:
    at = 0
    while at < len(batch):
        size = int.from_bytes(batch[at + 1 : at + HEADER], "big")
        end = at + HEADER + size
        if end > len(batch) or batch[at] > LAST:
            raise WireError("a batch that is not a list of pieces")
        yield batch[at], batch[at + HEADER : end]
        at = end
