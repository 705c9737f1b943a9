"""Parties that depart from a protocol: one that says something else in one message, and engines of verified sharing
that change one thing they compute or say, and go on with it."""

from __future__ import annotations

import collections
import contextlib

import numpy as np

from cloister.errors import ProtocolAbort
from cloister.mpc.crypto import gf64
from cloister.mpc.testing.lies import Lie, Stage
from cloister.mpc.three_party import folding
from cloister.mpc.three_party.verified import Verified
from cloister.testing import fixed_entropy, run_protocol

ONE = np.uint64(1)


class Says(Stage):
    """One party that says `change(message)` in place of every message of one class; or of the nth, or to one party."""

    def __init__(self, liar, kind, change, nth=None, only_to=None):
        super().__init__(Lie("-", liar, "-"))
        self.kind, self.change, self.nth, self.only_to, self.seen = kind, change, nth, only_to, {}

    def instead(self, to, msg):
        if not isinstance(msg, self.kind) or self.only_to not in (None, to):
            return [msg]
        self.seen[to] = self.seen.get(to, -1) + 1
        self.lied = True
        return [self.change(msg) if self.nth in (None, self.seen[to]) else msg]


def own_aborts(run, liar=None):
    """Who stopped by itself, and where: (protocol, line, code) by party. Who only heard of it does not count."""
    errors = {p: e for p, e in run.errors.items() if p != liar and isinstance(e, ProtocolAbort) and not e.heard}
    return {p: (e.protocol, e.line, e.code) for p, e in errors.items()}


def answers(module, case, liar, kind, change, nth=None, *, only_to=None, timeout=10.0):
    """What the others make of it when one party says something else (`Says`)."""
    stage = Says(liar, kind, change, nth, only_to)
    roles = {p: stage.role(p, r) for p, r in module.roles(case.params).items()}
    run = run_protocol(module, case, roles=roles, timeout=timeout)
    assert stage.lied, "nothing was said that could be changed"
    return own_aborts(run, liar)


class Liar(Verified):
    """Changes the `at`-th value of one kind by `change(array)`, in place; honest where `change` is None.

    Kinds are what a party computes, sends and keeps (`gate`, `product`, `chain`, `sum`, `number`, `hop`), and what it
    only says: the names of messages.
    """

    kind, at, change = "", 0, None
    lied = None  # a list that gets an entry for every lie

    def __init__(self, links):
        super().__init__(links)
        self._count = collections.Counter()
        send = links.send

        async def say(to, kind, data):
            name = kind.__name__
            await send(to, kind, self._maybe(name, data))

        links.send = say

    def _maybe(self, kind, value):
        count, self._count[kind] = self._count[kind], self._count[kind] + 1
        if kind != self.kind or count != self.at:
            return value
        changed = value.copy()
        type(self).change(changed)
        self.lied.append(kind)
        return changed

    def _gate_summand(self, x, y, masks):
        return self._maybe("gate", super()._gate_summand(x, y, masks))

    def _summand(self, q, r, w):
        return self._maybe("product", super()._summand(q, r, w))

    def _chained(self, z):
        return self._maybe("chain", super()._chained(z))

    def _sum_known_to_first(self, x):
        return self._maybe("sum", super()._sum_known_to_first(x))

    def _number(self, w):
        return self._maybe("number", super()._number(w))

    def _hop(self, x, perm, mask):
        return self._maybe("hop", super()._hop(x, perm, mask))


def liar(kind, at, change):
    """An engine that lies once, and the list in which it says so."""
    lied = []
    return type("OneLie", (Liar,), {"kind": kind, "at": at, "change": staticmethod(change), "lied": lied}), lied


def counting():
    """An honest engine, and how many values of each kind it has."""
    seen = collections.Counter()

    class Counting(Liar):
        def _maybe(self, kind, value):
            seen[kind] += 1
            return value

    return Counting, seen


@contextlib.contextmanager
def replaced(*places):
    """Replace attributes, (object, name, value) each, for a while."""
    old = [(where, name, getattr(where, name)) for where, name, _ in places]
    try:
        for where, name, value in places:
            setattr(where, name, value)
        yield
    finally:
        for where, name, value in old:
            setattr(where, name, value)


def play(module, case, party=None, engine=None, *, timeout=20.0, seed="lies"):
    """Run with one party's engine replaced; returns the run, and what was opened among the three, by party."""
    opened = collections.defaultdict(list)

    class Spy:
        @staticmethod
        async def meet(ch, *args, **kwargs):
            cls = engine if engine is not None and ch.me == party else Verified
            trio = await cls.meet(ch, *args, **kwargs)
            open_all = trio.open_all

            async def spy(x, **words):
                plane = await open_all(x, **words)
                opened[ch.me].append(plane.copy())
                return plane

            trio.open_all = spy
            return trio

    with replaced((module, "Verified", Spy)):
        run = run_protocol(module, case, timeout=timeout, entropy=fixed_entropy(seed))
    return run, opened


class Drawn:
    """A stream that keeps what was drawn from it."""

    def __init__(self, prg):
        self.prg, self.drawn = prg, []

    def uint64(self, shape):
        self.drawn.append(self.prg.uint64(shape))
        return self.drawn[-1]


def times(x, y):
    return gf64.times(np.array([x], np.uint64), np.array([y], np.uint64))[0]


def forger(rank, levels, points=None):
    """Lies in its first gate, and mends the coefficient that is checked in so many folds, as well as can be done.

    With `points`, all those that it will be given, the forgery has the true value there, and passes. Returns the
    engine, the folding, and the list of lies; the folding collects honest points in `seen`.
    """
    lied = []

    class Forger(Liar):
        def _gate_summand(self, x, y, masks):
            z = super()._gate_summand(x, y, masks)
            if not lied and levels:
                lied.append("gate")
                lied.append(self.proofs.statement.equations["P"].rest)  # where the equation will stand
                z = z.copy()
                z.reshape(-1)[0] ^= ONE
            return z

    class Folding(folding.Folding):
        level = None  # how often this proof was mended

        async def _fold_bits(self, *, masked):
            if self.links.rank == rank and len(lied) == 2:
                self.level = 0
                self.challenge = self.challenge | {"P": Drawn(self.challenge["P"])}
            await super()._fold_bits(masked=masked)

        def _first_error(self):
            """The weight of the equation that does not hold, in its lowest bit."""
            equations, (eps, eta) = self.statement.equations["P"], self.challenge["P"].drawn[:2]
            width = -(-equations.rest // 256) * 8
            block, t = divmod(lied[1], width)
            weight = eps[equations.words // 32 + t]
            return times(weight, gf64.powers(eta[0], 32)[block])

        async def _point(self, coefficients, rows):
            if self.level is not None:
                self.error = self._first_error() if self.level == 0 else self.error
                if self.level < levels:
                    coefficients = coefficients.copy()
                    coefficients[rows - 1] ^= self.error
                    if points is not None and self.level == 0:
                        there = points[len(Folding.seen)]
                        coefficients[0] ^= times(self.error, gf64.powers(there, rows)[-1])
                self.level += 1
                if points is not None:
                    self.level = levels
            point = await super()._point(coefficients, rows)
            if self.links.rank == rank:
                Folding.seen.append(point["P"])
            if self.level is not None:
                self.error = times(self.error, gf64.powers(point["P"], rows)[-1])
                lied.append("coefficient")
            return point

    Folding.seen = []
    return Forger, Folding, lied
