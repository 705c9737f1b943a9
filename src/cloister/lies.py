"""One liar: a party that follows its protocol but for one message. The mechanics of `testing.check_lies`.

    (a)  tells one recipient something else than the others
    (b)  changes what it says, to all recipients alike
    (c)  says what it said in another run
    (d)  claims that a party dropped out that did not
    (e)  says something twice
    (f)  says what belongs to another message: to another recipient, earlier, or in another field

The liar is as strong as it can be made without knowing the protocol: its frames carry whatever run id their recipient
waits for, and it reads whatever it gets, so that only signatures, sealed boxes, masks and checks of the protocol itself
can stop it.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from cloister.net.channel import Channel, Session
from cloister.net.transcript import Transcript
from cloister.study import Party

LETTERS = "abcdef"
LATE = 5.0  # seconds that a liar waits for a party which has not come to a scope yet
Said = dict[tuple[Party, Party, str], list[Any]]  # sender, recipient, name → messages in order


@dataclasses.dataclass(frozen=True, slots=True)
class Lie:
    """What is done to the `nth` message of a name; with (d), to the message that is said never to have come."""

    letter: str
    liar: Party
    name: str
    to: Party | None = None  # (a): who is told something else; (d): who is said to be gone
    field: str = ""  # (a), (b): which field is changed
    way: int = 0  # and how, of `changes`
    nth: int = 0

    def __str__(self) -> str:
        where = f" {self.field}#{self.way}" if self.field else ""
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


# ---- parties that are watched, and one that lies ---------------------------------------------------------------------


class Stage:
    """One run in which every party's channels are known, and one party may lie."""

    def __init__(self, lie: Lie | None = None, earlier: Said | None = None) -> None:
        self.lie, self.earlier = lie, earlier or {}
        self.ids: dict[tuple[Party, str], bytes] = {}  # what each party takes for the id of a scope
        self.said: Said = defaultdict(list)
        self.ended: set[Party] = set()
        self.lied = False

    def role(self, me: Party, role: Callable[..., Any]) -> Callable[..., Any]:
        """The role on a channel of this stage."""
        kind = self._channel(lying=self.lie is not None and me == self.lie.liar)

        @functools.wraps(role)
        async def staged(ch: Channel, *args: Any, **kwargs: Any) -> Any:
            try:
                return await role(kind(ch._session, ch.scope, ch.run_id), *args, **kwargs)
            finally:
                self.ended.add(me)

        return staged

    def _channel(self, *, lying: bool) -> type[Channel]:
        stage = self

        class Watched(Channel):
            def __init__(self, session: Session, scope: str, run_id: bytes, above: Transcript | None = None) -> None:
                super().__init__(session, scope, run_id, above)
                stage.ids[session.me, scope] = run_id

            async def send(self, to: Party, msg: Any) -> None:
                stage.said[self.me, to, type(msg).__message__.name].append(msg)
                await super().send(to, msg)

        class Liar(Watched):
            async def send(self, to: Party, msg: Any) -> None:
                run_id = await stage.id_at(to, self.scope) or self.run_id
                for one in stage.instead(to, msg):
                    self._session.post(to, self.scope, run_id, one)

            def _open(self, party: Party, frame: Any, *rest: Any) -> Any:
                return super()._open(party, dataclasses.replace(frame, run=self.run_id[:16]), *rest)

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
        if name != lie.name or len(so_far) - 1 != lie.nth or lie.letter == "d":
            return [msg]
        if lie.letter in "ab":
            other = self._changed(msg) if lie.letter == "b" or to == lie.to else None
        elif lie.letter == "c":
            kept = self.earlier.get((lie.liar, to, name), [])
            other = kept[lie.nth] if lie.nth < len(kept) and not _same(kept[lie.nth], msg) else None
        elif lie.letter == "e":
            self.lied = True
            return [msg, msg]
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

    def drop(self, ch: Channel, kind: Any) -> None:
        """(d): at this message, the liar treats a party as gone, without a word to it."""
        lie = self.lie
        assert lie is not None
        if lie.letter == "d" and kind.__message__.name == lie.name and not self.lied:
            assert lie.to is not None
            self.lied = True
            box = ch._session.mailbox
            box.ignore(lie.to)
            box.gone(lie.to, "it is said to have dropped out")


# ---- all lies of a protocol ------------------------------------------------------------------------------------------


def all_lies(said: Said, liars: Mapping[Party, Any]) -> Iterator[Lie]:
    """Every lie of these parties, by what was said in an honest run; the first of each letter is the mildest."""
    for liar in liars:
        heard: dict[str, list[Party]] = defaultdict(list)
        for (sender, to, name), msgs in said.items():
            if sender == liar:
                heard[name].append(to)
            elif to == liar and msgs:
                yield Lie("d", liar, name, to=sender)
        for name, recipients in heard.items():
            msgs = said[liar, recipients[0], name]
            for nth in sorted({0, len(msgs) - 1}):
                for field in dataclasses.fields(msgs[nth]):
                    for way in range(len(changes(getattr(msgs[nth], field.name)))):
                        yield Lie("b", liar, name, None, field.name, way, nth)
                        if len(recipients) > 1:
                            yield Lie("a", liar, name, recipients[-1], field.name, way, nth)
                for letter in "cef":
                    yield Lie(letter, liar, name, nth=nth)


def one_of_each(lies: Iterator[Lie]) -> Iterator[Lie]:
    """Per liar and message one lie, with the letters in turn: what a test has time for."""
    of_message: dict[tuple[Party, str], list[Lie]] = defaultdict(list)
    for lie in lies:
        of_message[lie.liar, lie.name].append(lie)
    for turn, choices in enumerate(of_message.values()):
        letters = [x for x in LETTERS if any(lie.letter == x for lie in choices)]
        yield next(lie for lie in choices if lie.letter == letters[turn % len(letters)])
