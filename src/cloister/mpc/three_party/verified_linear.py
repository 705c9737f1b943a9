"""The linear part of `verified`: inputs, products, gates and openings. Lines V1 to V4 and V13."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from cloister.arrays import I64, U8, U64
from cloister.mpc.crypto import replicated as local
from cloister.mpc.crypto.agreement import Identity
from cloister.mpc.crypto.entropy import Entropy
from cloister.mpc.crypto.prg import Prg
from cloister.mpc.crypto.replicated import Ring, Shared, Words
from cloister.mpc.crypto.share_proofs import ROWS, digest, raw, words
from cloister.mpc.net.channel import Channel
from cloister.mpc.net.wire import message
from cloister.mpc.three_party.folding import HASH, reject
from cloister.mpc.three_party.packing import packed, packed_size, unpacked
from cloister.mpc.three_party.sealed_links import NAME, Links
from cloister.mpc.three_party.verification import PENDING, Proofs
from cloister.study import Party

SEED = 32


@message("V2", protocol=NAME)
class Seeds:  # an owner that does not compute → 0, 1, 2
    data: U8


@message("V2", protocol=NAME)
class Input:
    data: U8


@message("V2", protocol=NAME)
class Same:  # i → i - 1: the hash of what both got
    data: U8


@message("V2", protocol=NAME)
class Coin:
    data: U8


@message("V3", protocol=NAME)
class Product:
    data: U8


@message("V4", protocol=NAME)
class Gate:
    data: U8


@message("V13", protocol=NAME)
class Open:
    data: U8


@dataclass(frozen=True, slots=True)
class XorShares:
    """One party's two components of XOR-shared words: a = x_i, b = x_{i+1}.

    Planes are such words too: row b of (rows, ⌈n/64⌉) holds bit b of n entries, 64 of them a word.
    """

    a: U64
    b: U64

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.a.shape)

    def __len__(self) -> int:
        return len(self.a)

    def __iter__(self) -> Iterator[U64]:
        return iter((self.a, self.b))

    def map(self, f: Callable[[U64], U64]) -> XorShares:
        return XorShares(f(self.a), f(self.b))

    def __getitem__(self, index: Any) -> XorShares:
        return self.map(lambda w: w[index])

    def __xor__(self, other: XorShares) -> XorShares:
        return XorShares(self.a ^ other.a, self.b ^ other.b)

    def reshape(self, *shape: int) -> XorShares:
        return self.map(lambda w: w.reshape(shape))

    def wide(self, rows: int) -> XorShares:
        """One plane as often as there are rows."""
        return self.map(lambda w: np.broadcast_to(w, (rows, *w.shape)))


def together(xs: Sequence[XorShares]) -> XorShares:
    return XorShares(np.concatenate([x.a for x in xs]), np.concatenate([x.b for x in xs]))


def stacked(xs: Sequence[XorShares]) -> XorShares:
    return XorShares(np.stack([x.a for x in xs]), np.stack([x.b for x in xs]))


def ones_of(planes: U64, ring: Ring) -> Words:
    """Planes as words 0 and 1 of a ring, 64 for each word of planes."""
    bits = np.unpackbits(raw(planes), bitorder="little").astype(ring.dtype)
    return bits.reshape(*planes.shape[:-1], 64 * planes.shape[-1])


def zeros(shape: tuple[int, ...]) -> XorShares:
    return XorShares(np.zeros(shape, np.uint64), np.zeros(shape, np.uint64))


class Chain:
    """The products q x_1, q x_2, ... of one shared factor, where x_t may depend on the products before it.

    They are proved as one product q (x_1, x_2, ...) after the chain ends, so that q is mixed once. With `diagonal`,
    q (d,) stands for a diagonal matrix: row i of x times q_i. Nothing can be opened before the chain ends.
    """

    def __init__(self, engine: VerifiedLinear, q: Shared, *, diagonal: bool) -> None:
        self._engine, self._q, self._diagonal = engine, q, diagonal
        self._right: list[Shared] = []
        self._left: list[Words] = []
        self._masks: list[Words] = []
        engine.proofs.unfinished += 1

    def _summand(self, x: Shared) -> Words:
        q, both = self._q, x.a + x.b
        if self._diagonal:
            scaled: Words = q.a[:, None] * both + q.b[:, None] * x.a
            return scaled
        return local.word_matmul(q.a, both) + local.word_matmul(q.b, x.a)

    async def step(self, x: Shared) -> Shared:
        """Q x for shared x (d, c)."""
        engine, ring = self._engine, x.ring
        shape = (self._q.shape[0], x.shape[1])
        own, following = ring.draw(engine._own, shape), ring.draw(engine._next, shape)
        z = engine._chained(self._summand(x)) + own - following
        size = packed_size(math.prod(shape), ring)
        _, data = await engine.links.exchange(Product, packed(z, ring), None, None, size)
        other = unpacked(data, ring, shape)
        self._right.append(x)
        self._left.append(other - following)
        self._masks.append(own)
        return Shared(ring, z, other)

    async def end(self) -> None:
        """Hand over what the proof of all products needs."""
        engine, q = self._engine, self._q
        r = local.join(self._right, axis=1).map(lambda w: np.ascontiguousarray(w.T))
        masks, correction = engine.proofs.correction(r.shape[1])
        sent = q.ring.to_bytes(correction)
        data, _ = await engine.links.exchange(Product, None, sent, ROWS * ROWS * q.ring.size, None)
        sum_right = q.ring.from_bytes(data, (ROWS, ROWS)).astype(np.uint64)
        left, own = np.concatenate(self._left, axis=1), np.concatenate(self._masks, axis=1)
        engine.proofs.add_product(q, r, left, own, masks, sum_right, diagonal=self._diagonal)
        engine.proofs.unfinished -= 1


class VerifiedLinear:
    """One member's end of a verified computation. Members that do not compute only give inputs and get results.

    All members call the same operations in the same order. Every method that is `async` sends something.
    """

    def __init__(self, links: Links) -> None:
        self.links, self.ch, self.computing, self.rank = links, links.ch, links.computing, links.rank
        self._coins: dict[int, Prg] = {}
        self._given: dict[Party, list[Prg | None]] = {}
        if self.rank is not None:
            self._own, self._next = links.stream(links.i, "shares"), links.stream(links.i + 1, "shares")
            self.proofs = Proofs(links)

    @classmethod
    async def meet(
        cls,
        ch: Channel,
        computing: tuple[Party, Party, Party],
        members: Iterable[Party] = (),
        *,
        entropy: Entropy,
        identity: Identity,
    ) -> Self:
        others = tuple(p for p in members if p not in computing)
        return cls(await Links.meet(ch, computing, others, entropy=entropy, identity=identity))  # V1

    # -- V2: inputs ----------------------------------------------------------------------------------------------------

    async def input(self, owner: Party, x: Words | None, shape: tuple[int, ...], ring: Ring) -> Shared | None:
        """Share what `owner` holds; the others pass None. Members that do not compute get None back."""
        local.check_input(x, shape, ring, owner, mine=self.ch.me == owner)
        if owner not in self.computing:
            return await self._input_from_outside(owner, x, shape, ring)
        if self.rank is None:
            return None
        i, o, zero = self.rank, self.computing.index(owner), np.zeros(shape, ring.dtype)
        if x is not None:
            first = ring.draw(self._own, shape)
            await self.links.send(self.links.next, Input, packed(x - first, ring))
            return Shared(ring, first, x - first)
        if i == (o + 1) % 3:
            data = (await self.links.gather(Input, {owner: packed_size(math.prod(shape), ring)}))[owner]
            return Shared(ring, unpacked(data, ring, shape), zero)
        return Shared(ring, zero, ring.draw(self._next, shape))

    async def _input_from_outside(
        self, owner: Party, x: Words | None, shape: tuple[int, ...], ring: Ring
    ) -> Shared | None:
        if x is None and self.rank is None:
            return None
        if owner not in self._given:
            await self._share_seeds(owner)
        seeds = self._given[owner]
        parts = [None if prg is None else ring.draw(prg, shape) for prg in seeds]
        if x is not None and parts[0] is not None and parts[1] is not None:
            rest = packed(x - parts[0] - parts[1], ring)
            for to in self.computing[1:]:
                await self.links.send(to, Input, rest)
            return None
        held: list[Words | None] = [*parts, None]
        if self.rank != 0:
            data = (await self.links.gather(Input, {owner: packed_size(math.prod(shape), ring)}))[owner]
            held[2] = unpacked(data, ring, shape)
        a, b = held[self.links.i], held[(self.links.i + 1) % 3]
        assert a is not None
        assert b is not None
        await self._compare(ring.to_bytes(a), ring.to_bytes(b))
        return Shared(ring, a, b)

    async def _share_seeds(self, owner: Party) -> None:
        """An owner that does not compute gives one seed to 0 and 2, another one to 0 and 1."""
        if self.ch.me == owner:
            seeds = [self.links.entropy.bytes(SEED), self.links.entropy.bytes(SEED)]
            for to, gets in zip(self.computing, ((0, 1), (1,), (0,)), strict=True):
                await self.links.send(to, Seeds, np.frombuffer(b"".join(seeds[k] for k in gets), np.uint8))
            self._given[owner] = [Prg(seed) for seed in seeds]
            return
        data = (await self.links.gather(Seeds, {owner: 2 * SEED if self.rank == 0 else SEED}))[owner].tobytes()
        if self.rank == 0:
            self._given[owner] = [Prg(data[:SEED]), Prg(data[SEED:])]
        else:
            self._given[owner] = [None, Prg(data)] if self.rank == 1 else [Prg(data), None]

    async def _compare(self, a: U8, b: U8) -> None:
        """Whether the two holders of every component were given the same."""
        _, theirs = await self.links.exchange(Same, digest(a), None, None, HASH)
        if (theirs != digest(b)).any():
            reject("V2", "an owner gave two parties different words, or")

    async def coin(self, owner: Party) -> Prg:
        """Public randomness that `owner` could not foresee when it shared: from the key of two others."""
        i, o = self.links.i, self.computing.index(owner) if owner in self.computing else 1
        if i == o:
            got = await self.links.gather(Coin, {self.links.prev: SEED, self.links.next: SEED})
            seed, other = got[self.links.prev].tobytes(), got[self.links.next].tobytes()
            if seed != other:
                reject("V2", "two parties gave different coins")
            return Prg(seed)
        if o not in self._coins:
            self._coins[o] = self.links.stream(o + 2, "coins")
        seed = self._coins[o].bytes(SEED)
        await self.links.send(self.computing[o], Coin, np.frombuffer(seed, np.uint8))
        return Prg(seed)

    def constant(self, values: np.ndarray[Any, Any], ring: Ring) -> Shared:
        """Share public integers: component 0, held by parties 0 and 2."""
        return local.constant(values, ring, self.links.i)

    def public(self, x: U64) -> XorShares:
        """Public words, XOR-shared alike."""
        zero = np.zeros_like(x)
        return XorShares(x if self.links.i == 0 else zero, x if self.links.i == 2 else zero)

    def flip(self, x: XorShares) -> XorShares:
        """NOT."""
        return XorShares(~x.a if self.links.i == 0 else x.a, ~x.b if self.links.i == 2 else x.b)

    # -- V3: products --------------------------------------------------------------------------------------------------

    def _summand(self, q: Shared, r: Shared, w: Shared | None) -> Words:
        left = np.concatenate([q.a, q.b], axis=1)
        z = local.matmul(left, np.concatenate([(r.a + r.b).T, r.a.T], axis=0), q.ring.bits)
        return z if w is None else z + w.a[None]

    async def product(self, q: Shared, r: Shared, w: Shared | None = None) -> Shared:
        """Q rᵀ + w for shared q (m, d), r (n, d) and w (n,)."""
        ring, shape = q.ring, (q.shape[0], r.shape[0])
        masks, correction = self.proofs.correction(q.shape[1])
        own, following = ring.draw(self._own, shape), ring.draw(self._next, shape)
        z = self._summand(q, r, w) + own - following
        size = packed_size(shape[0] * shape[1], ring)
        from_prev, from_next = await self.links.exchange(
            Product, packed(z, ring), ring.to_bytes(correction), ROWS * ROWS * ring.size, size
        )
        other = unpacked(from_next, ring, shape)
        left = other - following if w is None else other - w.b[None] - following
        self.proofs.add_product(q, r, left, own, masks, ring.from_bytes(from_prev, (ROWS, ROWS)).astype(np.uint64))
        return Shared(ring, z, other)

    def _chained(self, z: Words) -> Words:
        return z

    def chain(self, q: Shared, *, diagonal: bool = False) -> Chain:
        """Products of one shared factor with several others, one after the other; `Chain.end` before any opening."""
        return Chain(self, q, diagonal=diagonal)

    # -- V4: gates -----------------------------------------------------------------------------------------------------

    def _gate_summand(self, x: XorShares, y: XorShares, masks: U64) -> U64:
        z: U64 = (x.a & (y.a ^ y.b)) ^ (x.b & y.a) ^ masks
        return z

    async def gate(self, x: XorShares, y: XorShares) -> XorShares:
        """AND, word by word."""
        own, following = self._own.uint64(x.shape), self._next.uint64(x.shape)
        z = self._gate_summand(x, y, own ^ following)
        _, data = await self.links.exchange(Gate, raw(z), None, None, 8 * z.size)
        received = words(data).reshape(z.shape)
        self.proofs.add_gates((x.a, x.b), (y.a, y.b), received, own, following)
        return XorShares(z, received)

    async def prove_large(self) -> None:
        """Prove what waits, if it is much: it takes memory."""
        if self.proofs.pending >= PENDING:
            await self.proofs.verify()

    async def all_of(self, xs: XorShares) -> XorShares:
        """AND over the first axis, halves at a time."""
        while len(xs) > 1:
            h = len(xs) // 2
            xs = together([await self.gate(xs[:h], xs[h : 2 * h]), xs[2 * h :]])
        return xs[0]

    # -- V13: openings -------------------------------------------------------------------------------------------------

    async def check_zero(self, x: XorShares, line: str, what: str) -> None:
        """Reject unless all shared words are 0; nothing else is shown."""
        await self.proofs.verify()
        theirs, _ = await self.links.exchange(Open, None, digest(x.a), HASH, None)
        if (theirs != digest(x.a ^ x.b)).any():
            reject(line, what)

    async def open_all(self, x: XorShares, *, line: str, what: str, protocol: str = NAME) -> U64:
        """Open planes to the three computing parties."""
        await self.proofs.verify()
        size = 8 * x.a.size
        missing, vouched = await self.links.exchange(Open, digest(x.b), raw(x.a), size, HASH)
        plane = words(self._checked(missing, vouched)).reshape(x.shape)
        return self.ch.reveal(x.a ^ x.b ^ plane, to=self.computing, line=line, what=what, protocol=protocol)

    async def open_to(
        self, x: XorShares | None, shape: tuple[int, ...], *, to: Party, line: str, what: str, protocol: str
    ) -> U64 | None:
        """Open planes, or other XOR-shared words, to one member; everyone else gets None."""
        held = None if x is None else (raw(x.a), raw(x.b))
        parts = await self._open(held, 8 * math.prod(shape), to=to, line=line, what=what, protocol=protocol)
        if parts is None:
            return None
        out: U64 = np.bitwise_xor.reduce([words(part) for part in parts]).reshape(shape)
        return out

    async def open(
        self, x: Shared | None, shape: tuple[int, ...], ring: Ring, *, to: Party, protocol: str, line: str, what: str
    ) -> I64 | None:
        """Open a shared array to one member, as signed integers; everyone else gets None."""
        held = None if x is None else (ring.to_bytes(x.a), ring.to_bytes(x.b))
        parts = await self._open(held, math.prod(shape) * ring.size, to=to, line=line, what=what, protocol=protocol)
        if parts is None:
            return None
        first, second, third = (ring.from_bytes(part, shape) for part in parts)
        return ring.decode(first + second + third)

    async def _open(
        self, held: tuple[U8, U8] | None, size: int, *, to: Party, line: str, what: str, protocol: str
    ) -> list[U8] | None:
        """The three components, at `to`: from a computing party the one that it lacks, and its hash from another."""
        if held is not None:
            await self.proofs.verify()
        self.ch.record_opening(to=to, line=line, what=what, protocol=protocol)
        if to not in self.computing:
            return await self._open_outside(held, size, to)
        if held is None:
            return None
        if self.ch.me == to:
            got = await self.links.gather(Open, {self.links.prev: size, self.links.next: HASH})
            return [*held, self._checked(got[self.links.prev], got[self.links.next])]
        await self.links.send(to, Open, held[0] if to == self.links.next else digest(held[1]))
        return None

    async def _open_outside(self, held: tuple[U8, U8] | None, size: int, to: Party) -> list[U8] | None:
        """Component i from i, and its hash from i - 1."""
        if held is not None:
            await self.links.send(to, Open, np.concatenate([digest(held[1]), held[0]]))
            return None
        if self.ch.me != to:
            return None
        got = await self.links.gather(Open, dict.fromkeys(self.computing, HASH + size))
        return [self._checked(got[p][HASH:], got[self.computing[i - 1]][:HASH]) for i, p in enumerate(self.computing)]

    def _checked(self, x: U8, vouched: U8) -> U8:
        if (digest(x) != vouched).any():
            reject("V13", "an opened word differs between its two holders")
        return x
