"""One malicious party: it follows its protocol except for one message, or one input. The mechanics of `check_lies`.

    (a)  sends one recipient something else than the others
    (b)  changes what it sends, for all recipients alike
    (c)  sends what it sent in another run
    (d)  claims that a party dropped out that did not
    (e)  sends a message twice
    (f)  sends what belongs to another message: to another recipient, earlier, or in another field
    (g)  scales a message by 0, -1 or 2: all its arrays, tags included, or one field alone
    (h)  adds the prime of a field to a word
    (i)  replays its own earlier message of this run, or sends what it received as its own
    (j)  uses other inputs: its own, inflated a thousandfold, negated or zeroed
    (k)  contributes something else to an opened sum: its own part, inflated, negated or zeroed (`Channel.contribute`)

(g) and (h) are special cases of (b), or of (a) where one recipient alone gets the change; (k) is one of (b), and (i) is
one of (f). A protocol that does not withstand the general case is not expected to withstand the special one.

The malicious party is as strong as it can be made without knowing the protocol: its frames carry whatever run id their
recipient waits for, and it reads whatever it receives, so that only signatures, sealed boxes, masks and checks of the
protocol itself can stop it. With (j) it still runs its own role, and so the checks of its own input: what these reject
is rejected there. With (k) it passes them.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import scipy.sparse

from cloister.errors import CloisterError
from cloister.mpc.net.channel import Channel, Endpoint
from cloister.mpc.net.transcript import Transcript
from cloister.mpc.parties import Party

LETTERS = "abcdefghijk"
GENERAL = {"g": "b", "h": "b", "i": "f", "k": "b"}  # the letter of which another one is a special case
FACTORS = (0, -1, 2)  # (g)
PRIMES = ((1 << 61) - 1, (1 << 89) - 1)  # (h)
INPUTS = {"inflated": 1000, "negated": -1, "zeroed": 0}  # (j), (k)
LATE = 5.0  # seconds that a liar waits for a party which has not come to a scope yet
Said = dict[tuple[Party, Party, str], list[Any]]  # sender, recipient, name → messages in order


@dataclasses.dataclass(frozen=True, slots=True)
class Lie:
    """What is done to the `nth` message of a name; with (d), to the message that is said never to have come."""

    letter: str
    liar: Party
    name: str
    to: Party | None = None  # (a), (g), (h): who alone receives it; (d): who is said to have dropped out
    field: str = ""  # (a), (b), (g), (h): which field is changed; (g): empty for all arrays of the message
    way: int = 0  # and how: of `changes`, FACTORS, PRIMES; (i): 0 own earlier, 1 received; (j), (k): of INPUTS
    nth: int = 0
    case: Any = dataclasses.field(default=None, compare=False, repr=False)  # that was run; with (j), with other inputs

    @property
    def general(self) -> str:
        """The letter that has to be assumed for this lie to be assumed."""
        if self.letter in "gh" and self.to is not None:
            return "a"
        return GENERAL.get(self.letter, self.letter)

    def __str__(self) -> str:
        if self.letter in "jk":
            return f"({self.letter}) '{self.liar}' {self.name} {list(INPUTS)[self.way]}, number {self.nth}"
        where = f" {self.field}#{self.way}" if self.field or self.letter in "gi" else ""
        return f"({self.letter}) '{self.liar}' {self.name}{where}, number {self.nth}" + (f", {self.to}" * bool(self.to))


# ---- other things to say ---------------------------------------------------------------------------------------------


def changes(value: Any) -> list[Any]:
    """Other values of the same type, the mildest first."""
    if isinstance(value, np.ndarray):
        return _changed_arrays(value)
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int):
        return [value + 1]
    if isinstance(value, float):
        return [value + 1.0, float("nan"), 1e15]
    if isinstance(value, str):
        return [value + "x"]
    if isinstance(value, bytes):
        return [bytes([value[0] ^ 1]) + value[1:]] if value else []
    if isinstance(value, tuple):
        shorter = [value[:-1]] if value else []
        return shorter + [(*value[:-1], other) for other in (changes(value[-1])[:1] if value else [])]
    if isinstance(value, dict) and value:
        key = min(value)
        without = {k: v for k, v in value.items() if k != key}
        return [value | {key: other} for other in changes(value[key])[:1]] + [without]
    if hasattr(value, "__message__"):
        return [dataclasses.replace(value, **{name: other}) for name, other in _first_changes(value)]
    return []


def _changed_arrays(value: Any) -> list[Any]:
    if not value.size:
        return []
    ways = [1.0, float("nan"), 1e15] if value.dtype.kind == "f" else [1]
    made = []
    for way in ways:
        other = value.copy()
        with np.errstate(over="ignore"):
            other.flat[0] += other.dtype.type(way)
        made.append(other)
    return made


def _first_changes(msg: Any) -> Iterator[tuple[str, Any]]:
    for field in dataclasses.fields(msg):
        for other in changes(getattr(msg, field.name))[:1]:
            yield field.name, other


def borrowed(msg: Any, others: list[Any]) -> Any:
    """The same kind of message with another one's content, or with two of its own fields exchanged; None if neither."""
    for other in others:
        if not _same(other, msg):
            return other
    values = {f.name: getattr(msg, f.name) for f in dataclasses.fields(msg)}
    names = list(values)
    for i, first in enumerate(names):
        for second in names[i + 1 :]:
            if type(values[first]) is type(values[second]) and not _equal(values[first], values[second]):
                return dataclasses.replace(msg, **{first: values[second], second: values[first]})
    return None


def _same(a: Any, b: Any) -> bool:
    return all(_equal(getattr(a, f.name), getattr(b, f.name)) for f in dataclasses.fields(a))


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, np.ndarray) and isinstance(b, np.ndarray):
        return a.shape == b.shape and bool(np.all(a == b))
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_equal(a[k], b[k]) for k in a)
    if isinstance(a, tuple) and isinstance(b, tuple):
        return len(a) == len(b) and all(map(_equal, a, b))
    if hasattr(a, "__message__") and type(a) is type(b):
        return _same(a, b)
    return bool(a == b)


# ---- scaled values, primes, replays, other inputs --------------------------------------------------------------------


def scaled(value: Any, factor: int, *, counts: bool = False) -> Any:
    """Every array and every float in a value times a factor, words modulo 2^64; with `counts`, integers too."""
    if isinstance(value, np.ndarray) and value.dtype.kind in "iuf":
        with np.errstate(all="ignore"):
            return value * (value.dtype.type(factor) if value.dtype.kind == "f" else _word(factor, value.dtype))
    if scipy.sparse.issparse(value):
        return type(value)(value * value.dtype.type(factor))
    if isinstance(value, float):
        return value * factor
    if counts and isinstance(value, int) and not isinstance(value, bool):
        return value * factor
    if isinstance(value, tuple) and not hasattr(value, "_fields"):
        return tuple(scaled(v, factor, counts=counts) for v in value)
    if isinstance(value, dict):
        return {k: scaled(v, factor, counts=counts) for k, v in value.items()}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [f.name for f in dataclasses.fields(value) if f.init]
        try:
            return dataclasses.replace(value, **{n: scaled(getattr(value, n), factor, counts=counts) for n in names})
        except (CloisterError, ArithmeticError, ValueError):
            return value  # such values cannot be built, so nobody can send them
    return value


def _word(value: int, dtype: np.dtype[Any]) -> Any:
    """An integer modulo the size of a word."""
    return np.array([value % (1 << 8 * dtype.itemsize)], f"u{dtype.itemsize}").view(dtype)[0]


def plus_prime(value: Any, prime: int) -> Any:
    """An array of words with a prime added to its first; None if it is no such array."""
    if not isinstance(value, np.ndarray) or value.dtype.kind not in "iu" or value.dtype.itemsize < 8 or not value.size:
        return None
    other = value.copy()
    other.reshape(-1)[:1] += _word(prime, value.dtype)
    return other


def received_as_own(msg: Any, received: list[Any]) -> Any:
    """A message of this kind from another party; or `msg` with an array or bytes received; None if neither exists."""
    for other in received:
        if type(other) is type(msg) and not _same(other, msg):
            return other
    values = [v for other in received for v in _leaves(other)]
    for field in dataclasses.fields(msg):
        mine = getattr(msg, field.name)
        for other in values:
            if _alike(mine, other) and not _equal(mine, other):
                return dataclasses.replace(msg, **{field.name: other})
    return None


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, np.ndarray | bytes):
        yield value
    elif isinstance(value, dict):
        for v in value.values():
            yield from _leaves(v)
    elif isinstance(value, tuple):
        for v in value:
            yield from _leaves(v)
    elif dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            yield from _leaves(getattr(value, field.name))


def _alike(a: Any, b: Any) -> bool:
    if isinstance(a, np.ndarray) and isinstance(b, np.ndarray):
        return bool(a.shape == b.shape and a.dtype == b.dtype)
    return isinstance(a, bytes) and isinstance(b, bytes) and len(a) == len(b) > 0


# ---- parties that are watched, and one that lies ---------------------------------------------------------------------


class Stage:
    """One run in which every party's channels are known, and one party may lie."""

    def __init__(
        self,
        lie: Lie | None = None,
        earlier: Said | None = None,
        scale: Callable[[Any, int], Any] = scaled,
    ) -> None:
        self.lie, self.earlier, self.scale = lie, earlier or {}, scale
        self.received: list[Any] = []  # by the malicious party
        self.contributed: dict[Party, list[str]] = defaultdict(list)  # party → what it added to opened sums, in order
        self.ids: dict[tuple[Party, str], bytes] = {}  # what each party takes for the id of a scope
        self.said: Said = defaultdict(list)
        self.ended: set[Party] = set()
        self.lied = lie is not None and lie.letter == "j"

    def role(self, me: Party, role: Callable[..., Any]) -> Callable[..., Any]:
        """The role on a channel of this stage."""
        kind = self._channel(lying=self.lie is not None and me == self.lie.liar)

        @functools.wraps(role)
        async def staged(ch: Channel, *args: Any, **kwargs: Any) -> Any:
            try:
                return await role(kind(ch._endpoint, ch.scope, ch.run_id), *args, **kwargs)
            finally:
                self.ended.add(me)

        return staged

    def _channel(self, *, lying: bool) -> type[Channel]:
        stage = self

        class Watched(Channel):
            def __init__(self, endpoint: Endpoint, scope: str, run_id: bytes, above: Transcript | None = None) -> None:
                super().__init__(endpoint, scope, run_id, above)
                stage.ids[endpoint.me, scope] = run_id

            async def send(self, to: Party, msg: Any) -> None:
                stage.said[self.me, to, type(msg).__message__.name].append(msg)
                await super().send(to, msg)

            def contribute(self, part: Any, **what: Any) -> Any:
                stage.contributed[self.me].append(f"{what['protocol']} {what['line']}")
                return super().contribute(part, **what)

        class Liar(Watched):
            async def send(self, to: Party, msg: Any) -> None:
                run_id = await stage.id_at(to, self.scope) or self.run_id
                for one in stage.instead(to, msg):
                    self._endpoint.post(to, self.scope, run_id, one)

            def _open(self, party: Party, frame: Any, *rest: Any) -> Any:
                msg = super()._open(party, dataclasses.replace(frame, run=self.run_id[:16]), *rest)
                stage.received.append(msg)
                return msg

            def contribute(self, part: Any, **what: Any) -> Any:
                return stage.other_part(super().contribute(part, **what))

            async def gather(self, senders: Any, kind: Any, **options: Any) -> Any:
                stage.drop(self, kind)
                return await super().gather(senders, kind, **options)

        return Liar if lying else Watched

    async def id_at(self, party: Party, scope: str) -> bytes | None:
        """The id under which `party` waits in this scope, as soon as it has come that far; None if it does not."""
        end = time.monotonic() + LATE
        while (party, scope) not in self.ids and party not in self.ended and time.monotonic() < end:
            await asyncio.sleep(0.005)
        return self.ids.get((party, scope))

    def instead(self, to: Party, msg: Any) -> list[Any]:
        """What the liar posts in place of `msg`."""
        lie, name = self.lie, type(msg).__message__.name
        assert lie is not None
        so_far = self.said[lie.liar, to, name]
        so_far.append(msg)
        if name != lie.name or len(so_far) - 1 != lie.nth or lie.letter in "djk":
            return [msg]
        if lie.letter in "ab":
            other = self._changed(msg) if lie.letter == "b" or to == lie.to else None
        elif lie.letter == "c":
            kept = self.earlier.get((lie.liar, to, name), [])
            other = kept[lie.nth] if lie.nth < len(kept) and not _same(kept[lie.nth], msg) else None
        elif lie.letter == "e":
            self.lied = True
            return [msg, msg]
        elif lie.letter in "gh":
            other = self._special(msg) if lie.to in (None, to) else None
        elif lie.letter == "i":
            own = [m for m in so_far[:-1] if not _same(m, msg)][:1]
            other = received_as_own(msg, self.received) if lie.way else next(iter(own), None)
        else:
            to_others = [m for (_, p, n), ms in self.said.items() if n == name and p != to for m in ms]
            of_others = [ms[-1] for (p, _, n), ms in self.earlier.items() if n == name and p != lie.liar]
            other = borrowed(msg, [*to_others, *so_far[:-1], *of_others])
        self.lied = self.lied or other is not None
        return [msg if other is None else other]

    def _changed(self, msg: Any) -> Any:
        assert self.lie is not None
        others = changes(getattr(msg, self.lie.field))
        if self.lie.way >= len(others):
            return None
        return dataclasses.replace(msg, **{self.lie.field: others[self.lie.way]})

    def other_part(self, values: Any) -> Any:
        """(k): what the malicious party adds in place of `values`."""
        lie = self.lie
        assert lie is not None
        if lie.letter != "k" or len(self.contributed[lie.liar]) - 1 != lie.nth:
            return values
        self.lied = True
        return scaled(values, list(INPUTS.values())[lie.way])

    def _special(self, msg: Any) -> Any:
        """(g), (h)."""
        lie = self.lie
        assert lie is not None
        if lie.letter == "h":
            field: Any = plus_prime(getattr(msg, lie.field), PRIMES[lie.way])
            return None if field is None else dataclasses.replace(msg, **{lie.field: field})
        factor = FACTORS[lie.way]
        if lie.field:
            other = scaled(getattr(msg, lie.field), factor, counts=True)
            other = dataclasses.replace(msg, **{lie.field: other})
        else:
            other = self.scale(msg, factor)
        return None if _same(other, msg) else other

    def drop(self, ch: Channel, kind: Any) -> None:
        """(d): at this message, the liar treats a party as gone, without a word to it."""
        lie = self.lie
        assert lie is not None
        if lie.letter == "d" and kind.__message__.name == lie.name and not self.lied:
            assert lie.to is not None
            self.lied = True
            box = ch._endpoint.mailbox
            box.ignore(lie.to)
            box.gone(lie.to, "it is said to have dropped out")


# ---- all lies of a protocol ------------------------------------------------------------------------------------------


def all_lies(
    said: Said,
    liars: Mapping[Party, Any],
    inputs: Iterable[Party] = (),
    contributed: Mapping[Party, list[str]] | None = None,
) -> Iterator[Lie]:
    """Every lie of these parties, by what was said in an honest run; the first of each letter is the mildest.

    `inputs` are the parties that have inputs to change, `contributed` what each added to opened sums.
    """
    for liar in liars:
        heard: dict[str, list[Party]] = defaultdict(list)
        received = [m for (_, to, _), msgs in said.items() if to == liar for m in msgs]
        for (sender, to, name), msgs in said.items():
            if sender == liar:
                heard[name].append(to)
            elif to == liar and msgs:
                yield Lie("d", liar, name, to=sender)
        for name, recipients in heard.items():
            msgs = said[liar, recipients[0], name]
            one = recipients[-1] if len(recipients) > 1 else None
            for nth in sorted({0, len(msgs) - 1}):
                for field in dataclasses.fields(msgs[nth]):
                    for way in range(len(changes(getattr(msgs[nth], field.name)))):
                        yield Lie("b", liar, name, None, field.name, way, nth)
                        if one:
                            yield Lie("a", liar, name, one, field.name, way, nth)
                for letter in "cef":
                    yield Lie(letter, liar, name, nth=nth)
                yield from _special_lies(liar, name, one, msgs[nth], nth)
                if nth and not _same(msgs[0], msgs[nth]):
                    yield Lie("i", liar, name, nth=nth)
                if received_as_own(msgs[nth], received) is not None:
                    yield Lie("i", liar, name, way=1, nth=nth)
        if liar in inputs:
            for way in range(len(INPUTS)):
                yield Lie("j", liar, "inputs", way=way)
        lines = (contributed or {}).get(liar, [])
        for nth, line in enumerate(lines):
            if line not in lines[:nth] or line not in lines[nth + 1 :]:  # the first and the last of each line
                for way in range(len(INPUTS)):
                    yield Lie("k", liar, line, way=way, nth=nth)


def _special_lies(liar: Party, name: str, one: Party | None, msg: Any, nth: int) -> Iterator[Lie]:
    """(g) and (h) that change this message, to all recipients and to one."""
    for way, factor in enumerate(FACTORS):
        names = ["", *(f.name for f in dataclasses.fields(msg))]
        whole = scaled(msg, factor)
        for field in names:
            value = whole if not field else scaled(getattr(msg, field), factor, counts=True)
            if not _equal(value, getattr(msg, field) if field else msg):
                yield Lie("g", liar, name, None, field, way, nth)
                if one:
                    yield Lie("g", liar, name, one, field, way, nth)
    for field in (f.name for f in dataclasses.fields(msg)):
        for way, prime in enumerate(PRIMES):
            if plus_prime(getattr(msg, field), prime) is not None:
                yield Lie("h", liar, name, None, field, way, nth)
                if one:
                    yield Lie("h", liar, name, one, field, way, nth)


def one_of_each(lies: Iterator[Lie]) -> Iterator[Lie]:
    """What a test has time for.

    Per malicious party and message one lie of (a) to (f), with the letters in turn, and one of (g), with factors and
    recipients in turn; per malicious party one of (h), both of (i), and one of (j). None of (k).
    """
    plain: dict[tuple[Party, str], list[Lie]] = defaultdict(list)
    special: dict[tuple[Party, str, str], list[Lie]] = defaultdict(list)
    for lie in lies:
        if lie.letter in "abcdef":
            plain[lie.liar, lie.name].append(lie)
        elif lie.letter == "k":
            continue
        elif lie.letter == "g":
            special[lie.liar, "g", lie.name].append(lie)
        else:
            special[lie.liar, lie.letter, str(lie.way) if lie.letter == "i" else ""].append(lie)
    for turn, choices in enumerate(plain.values()):
        letters = [x for x in LETTERS if any(lie.letter == x for lie in choices)]
        yield next(lie for lie in choices if lie.letter == letters[turn % len(letters)])
    for turn, choices in enumerate(special.values()):
        whole = [lie for lie in choices if lie.letter != "g" or not lie.field] or choices
        yield whole[(5 * turn + len(whole) - 1) % len(whole)]
