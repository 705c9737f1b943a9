"""Verified three-party sharing: what `replicated` does, with one of the three parties free to lie.

    V1   keys      every link sealed; k_i common to i and i - 1                                   (`sealed_links`)
    V2   input     a computing owner i: x_i = F(k_i), x_{i+1} = x - x_i to i + 1, x_{i+2} = 0
                   any other owner: x_0, x_1 from seeds sent once, x_2 to the two that hold it; the three compare hashes
    V3   product   z_j = q_j (r_j + r_{j+1}) + q_{j+1} r_j + w_j + F(k_j) - F(k_{j+1}) to j - 1
    V4   gate      the same for bits, with & and ⊕
    V5   bits      of x: u = x_0 + x_1, known to 0, in two XOR shares: F(k_0), and the rest to 1; then u + x_2 by gates
    V6   shuffle   three hops, p = 0, 1, 2 with q = p + 1 and t = p + 2: p, q draw π, ρ, ρ' from their key;
                   p → t: π(x_p) ⊕ ρ, q → t: π(x_t) ⊕ ρ', and both know π(x_q) ⊕ ρ ⊕ ρ'
    V7-V12         everything sent so far is proved                                               (`verification`)
    V13  open      the word that a party lacks, from one holder; its hash from the other
    V14  numbers   of bits x = t + t' + 3 x_2, given as in V2: d = x_0 ⊕ x_1 by 0, t = d_1 ⊕ (x_2, ..., x_2) by 1,
                   t' = d_0 ⊕ (x_2, ..., x_2) by 2

Component i of every value is at parties i and i - 1. What is opened, and when, is as in `replicated`: rows are
shuffled by a permutation that nobody knows, and the outcome of comparisons is opened. Each such step is proved
*before* it is opened, since a wrong comparison would tell something about what is compared.

    operation              bits sent per entry, all three                      rounds
    product                3κ                                                  1
    chain of products      3κ for each entry of a result; one proof for all    1 each
    bits                   κ + 3 (κ - 1), or about κ + 3κ log2 κ               κ, or 2 + log2 κ
    numbers of bits        3κ                                                  2
    one-hot rows           3 for each entry of a row, or a little more         about log2 log2 n
    less                   3κ, or about 6κ                                     κ, or 8 + log2 (κ/8)
    shuffle                6κ                                                  3
    proof                  some 100 kB                                         5 to 11
    open                   3 to all                                            1

Reveals
-------
computing party, honest or not : nothing but what a protocol opens; of rows that are selected from, their number and
    length, and the order in which a uniform shuffle put them. With a second computing party: everything.
owner of an input, who carries the frames : nothing.

Assumes
-------
At most one party departs from the protocol, in any way; then the others end with the right result or with an abort that
does not depend on anyone's values. A party that lies passes one proof with probability below 2^-55. No two of the three
computing parties collude; AES, SHA-256 and X25519. An owner may give any value of the ring: ranges are checked by who
needs them (`check_small`). Who lied is not said: a verifier that rejects for no reason looks the same.

References
----------
[AFL+16] Araki et al., CCS 2016.  [BBC+19], [BGIN20] proofs, see `crypto.share_proofs`.  [LN17] Lindell, Nof, CCS 2017:
security up to additive errors, and why checking before opening suffices.  [AHI+22] Asharov et al., CCS 2022: shuffles.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from cloister.arrays import I64, U8, U64, Index
from cloister.errors import ParameterError
from cloister.mpc.crypto import gf64
from cloister.mpc.crypto import replicated as local
from cloister.mpc.crypto.agreement import Identity
from cloister.mpc.crypto.entropy import Entropy
from cloister.mpc.crypto.prg import Prg
from cloister.mpc.crypto.replicated import Ring, Shared, Words
from cloister.mpc.crypto.share_proofs import ROWS, digest, raw, words
from cloister.mpc.net.channel import Channel
from cloister.mpc.net.wire import message
from cloister.mpc.parties import Party
from cloister.mpc.three_party import selection
from cloister.mpc.three_party.folding import HASH, Hop, reject
from cloister.mpc.three_party.packing import packed, packed_size, planes_of, unpacked
from cloister.mpc.three_party.sealed_links import NAME, Links
from cloister.mpc.three_party.verification import PENDING, Proofs

__all__ = ["Verified", "XorShares", "planes_of", "stacked", "together", "zeros"]
DEEP = 1 << 16  # comparisons at once from which bytes count more than rounds
WIDE = 1 << 12  # words at once up to which the bits of sums are found in few rounds
DIGIT, LONG = 3, 8  # bits of a digit in a comparison of few rounds, of short and of long words
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

    def __init__(self, engine: Verified, q: Shared, *, diagonal: bool) -> None:
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


@message("V5", protocol=NAME)
class Sum:
    data: U8


@message("V6", protocol=NAME)
class Hopped:
    data: U8


@message("V14", protocol=NAME)
class Number:
    data: U8


class Verified:
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

    # -- V5: bits ------------------------------------------------------------------------------------------------------

    def _sum_known_to_first(self, x: Shared) -> Words:
        return x.a + x.b

    async def bits(self, x: Shared, *, few_rounds: bool | None = None) -> XorShares:
        """All bits of shared words, as planes (κ, ⌈n/64⌉), lowest first; few words in few rounds unless stated."""
        i, n, count = self.links.i, x.a.size, x.ring.bits
        k_a, k_b = planes_of(x.a, count), planes_of(x.b, count)
        none = np.zeros_like(k_a)
        if i == 0:
            m_0 = self._own.uint64(k_a.shape)
            m_1 = planes_of(self._sum_known_to_first(x), count) ^ m_0
            await self.links.send(self.links.next, Sum, raw(m_1))  # V5
            s, v = XorShares(m_0, m_1), XorShares(none, none)
            self.proofs.add_carries(0, (m_0, k_a), (m_1, k_b))
        elif i == 1:
            data = (await self.links.gather(Sum, {self.links.prev: 8 * k_a.size}))[self.links.prev]
            m_1 = words(data).reshape(k_a.shape)
            s, v = XorShares(m_1, k_b), XorShares(none, k_b)
            self.proofs.add_carries(0, None, (m_1, k_a))
        else:
            m_0 = self._next.uint64(k_a.shape)
            s, v = XorShares(k_a, m_0), XorShares(k_a, none)
            self.proofs.add_carries(0, (m_0, k_b), None)
        quick = n <= WIDE if few_rounds is None else few_rounds
        return s ^ await (self._prefix(s, v) if quick else self._ripple(s, v))

    async def add(self, x: XorShares, y: XorShares) -> XorShares:
        """The sum of XOR-shared numbers, planes (κ, ...) lowest first, modulo 2^κ."""
        s = x ^ y
        return s ^ await self._prefix(s, y)

    async def check_small(self, x: Shared, owner: Party, count: int, *, line: str) -> XorShares:
        """Let the run go on only if all words of an input lie in [0, 2^count); returns their planes (count, ⌈n/64⌉).

        An owner that computes proves it by itself: it gives shares of the lowest bits, the others are 0, and these must
        be the bits of x_i + x_{i+1}. Of any other owner the three find the bits.
        """
        if owner not in self.computing:
            planes = await self.bits(x)
            await self.check_zero(planes[count:], line, f"'{owner}' gave words that are out of range, or")
            return planes[:count]
        i, o = self.links.i, self.computing.index(owner)
        held = tuple(planes_of(w, x.ring.bits) for w in (x.a, x.b))
        shape = (count, held[0].shape[1])
        none = np.zeros(shape, np.uint64)

        def filled(low: U64) -> U64:
            out = np.zeros((x.ring.bits, shape[1]), np.uint64)
            out[:count] = low
            return out

        if i == o:
            first = self._own.uint64(shape)
            second = planes_of(x.a + x.b, count) ^ first
            await self.links.send(self.links.next, Sum, raw(second))  # V5
            self.proofs.add_carries(o, (filled(first), held[0]), (filled(second), held[1]))
            return XorShares(first, second)
        if i == (o + 1) % 3:
            second = words((await self.links.gather(Sum, {owner: 8 * count * shape[1]}))[owner]).reshape(shape)
            self.proofs.add_carries(o, None, (filled(second), held[0]))
            return XorShares(second, none)
        first = self._next.uint64(shape)
        self.proofs.add_carries(o, (filled(first), held[1]), None)
        return XorShares(none, first)

    # -- V14: bits as numbers ------------------------------------------------------------------------------------------

    def _number(self, w: Words) -> Words:
        return w

    async def inject(self, x: XorShares, ring: Ring) -> Shared:
        """XOR-shared bits, planes (..., w), as numbers 0 and 1 of a ring, (..., 64 w).

        0 knows d = x_0 ⊕ x_1 and gives it as d_0 + d_1. With e = x_2, known to 1 and 2, x = d ⊕ e = e + (1 - 2e) d.
        Since -d_k = ¬d_k + 1, x = t + t' + 3e with t = d_1 ⊕ (e, ..., e), given by 1, and t' = d_0 ⊕ (e, ..., e), given
        by 2. Each of d, t, t' is the XOR of two words, one held by the first verifier of its owner and one by the
        second. So it is proved as the bits of a sum are.
        """
        shape, width = (*x.shape[:-1], 64 * x.shape[-1]), x.a.size
        flat, count = x.reshape(-1), ring.bits
        size = packed_size(64 * width, ring)

        def planes(w: Words) -> U64:
            return planes_of(w, count)

        def lowest(plane: U64) -> U64:
            out = np.zeros((count, width), np.uint64)
            out[0] = plane
            return out

        def everywhere(plane: U64) -> U64:
            return np.broadcast_to(plane, (count, width))

        def turned(w: Words, plane: U64) -> Words:
            return w ^ -ones_of(plane, ring)

        def read(data: U8) -> Words:
            return unpacked(data, ring, (64 * width,))

        i, links = self.links.i, self.links
        own, following = ring.draw(self._own, (64 * width,)), ring.draw(self._next, (64 * width,))
        if i == 0:
            d_1 = self._number(ones_of(flat.a ^ flat.b, ring) - own)
            await links.send(links.next, Number, packed(d_1, ring))
            got = read((await links.gather(Number, {links.prev: size}))[links.prev])
            self.proofs.add_carries(0, (lowest(flat.a), planes(own)), (lowest(flat.b), planes(d_1)))
            self.proofs.add_carries(1, (planes(d_1), planes(following)), None)
            self.proofs.add_carries(2, None, (planes(own), planes(got)))
            return Shared(ring, got, following).reshape(*shape)
        if i == 1:
            d_1 = read((await links.gather(Number, {links.prev: size}))[links.prev])
            t_2 = self._number(turned(d_1, flat.b) - own)
            await links.send(links.next, Number, packed(t_2, ring))
            self.proofs.add_carries(0, None, (lowest(flat.a), planes(d_1)))
            self.proofs.add_carries(1, (planes(d_1), planes(own)), (everywhere(flat.b), planes(t_2)))
            self.proofs.add_carries(2, (everywhere(flat.b), planes(following)), None)
            last = t_2 + following + ring.dtype.type(3) * ones_of(flat.b, ring)
            return Shared(ring, own, last).reshape(*shape)
        t_0 = self._number(turned(following, flat.a) - own)
        await links.send(links.next, Number, packed(t_0, ring))
        got = read((await links.gather(Number, {links.prev: size}))[links.prev])
        self.proofs.add_carries(0, (lowest(flat.b), planes(following)), None)
        self.proofs.add_carries(1, None, (everywhere(flat.a), planes(got)))
        self.proofs.add_carries(2, (everywhere(flat.a), planes(own)), (planes(following), planes(t_0)))
        last = got + own + ring.dtype.type(3) * ones_of(flat.a, ring)
        return Shared(ring, last, t_0).reshape(*shape)

    async def one_hot(self, bits: XorShares, count: int) -> XorShares:
        """Numbers below `count`, planes (b, ...) lowest first, as rows of bits (count, ...)."""
        if len(bits) == 1:
            return stacked([self.flip(bits[0]), bits[0]])[:count]
        h = len(bits) // 2
        low = await self.one_hot(bits[:h], 1 << h)
        high = await self.one_hot(bits[h:], -(-count >> h))
        rows = np.arange(count)
        return await self.gate(high[rows >> h], low[rows & ((1 << h) - 1)])

    async def _ripple(self, s: XorShares, v: XorShares) -> XorShares:
        """Carries into every bit of u + v, s = u ⊕ v: c' = v ⊕ s (c ⊕ v); fewest bytes."""
        c = zeros(s.shape[1:])
        rows = [c]
        for b in range(len(s) - 1):
            c = v[b] ^ await self.gate(s[b], c ^ v[b])
            rows.append(c)
        return stacked(rows)

    async def _prefix(self, s: XorShares, v: XorShares) -> XorShares:
        """The same in few rounds: (g, p) ∘ (g', p') = (g ⊕ p g', p p') over all prefixes."""
        count = len(s) - 1
        if count == 0:
            return zeros(s.shape)
        g, p, reach = v[:count] ^ await self.gate(s[:count], v[:count]), s[:count], 1
        while reach < count:
            high = np.array([b for b in range(count) if b & reach])  # takes in the block below
            low = (high & ~(2 * reach - 1)) + reach - 1
            both = await self.gate(together([p[high], p[high]]), together([g[low], p[low]]))
            g, p = _put(g, high, g[high] ^ both[: len(high)]), _put(p, high, both[len(high) :])
            reach *= 2
        return together([zeros((1, *s.shape[1:])), g])

    # -- comparisons ---------------------------------------------------------------------------------------------------

    async def less(self, x: XorShares, y: XorShares, *, few_rounds: bool) -> XorShares:
        """Whether x < y, of planes (κ, ...), as one plane: c' = c ⊕ d (c ⊕ y) from the lowest bit, d = x ⊕ y."""
        d = x ^ y
        digit = (LONG if len(d) > 24 else DIGIT) if few_rounds else len(d)
        starts = list(range(0, len(d), digit))
        c: list[XorShares] = [zeros(d.shape[1:])] * len(starts)
        p: list[XorShares] = [self.flip(d[start]) for start in starts]  # all bits of the digit are equal
        for step in range(min(digit, len(d))):
            here = [k for k, start in enumerate(starts) if start + step < len(d)]
            pairs = [(d[starts[k] + step], c[k] ^ y[starts[k] + step]) for k in here]
            longer = [k for k in here if step and k]  # p of the lowest digit is never used
            pairs += [(p[k], self.flip(d[starts[k] + step])) for k in longer]
            out = await self.gate(stacked([one for one, _ in pairs]), stacked([two for _, two in pairs]))
            for place, k in enumerate(here):
                c[k] = c[k] ^ out[place]
            for place, k in enumerate(longer, len(here)):
                p[k] = out[place]
        while len(c) > 1:  # (c, p) ∘ (c', p') = (c ⊕ p c', p p'), neighbours at a time
            h = len(c) // 2
            pairs = [(p[2 * k + 1], c[2 * k]) for k in range(h)] + [(p[2 * k + 1], p[2 * k]) for k in range(1, h)]
            out = await self.gate(stacked([one for one, _ in pairs]), stacked([two for _, two in pairs]))
            odd = slice(2 * h, None)
            c = [c[2 * k + 1] ^ out[k] for k in range(h)] + c[odd]
            p = [p[0]] + [out[h + k - 1] for k in range(1, h)] + p[odd]
        return c[0]

    async def choose(self, where: XorShares, x: XorShares, y: XorShares) -> XorShares:
        """X where the plane says so, else y; of planes (rows, ...)."""
        return y ^ await self.gate(x ^ y, where.wide(len(x)))

    # -- V6: shuffles --------------------------------------------------------------------------------------------------

    def _hop(self, x: U64, perm: Index, mask: U64) -> U64:
        return np.take_along_axis(x, perm, axis=1) ^ mask

    async def shuffle(self, x: XorShares, bits: int) -> XorShares:
        """Permute every row of a matrix of words so that nobody knows how."""
        i, shape = self.links.i, (x.shape[0], x.shape[1])
        held: dict[int, U64] = {i: x.a, (i + 1) % 3: x.b}
        del x
        for p in range(3):
            held = await (self._receive_hop if i == (p + 2) % 3 else self._make_hop)(p, held, shape, Ring(bits))
            await self.prove_large()  # what a hop leaves to be proved takes as much memory as the words
        return XorShares(held[i], held[(i + 1) % 3])

    async def _make_hop(self, p: int, held: dict[int, U64], shape: tuple[int, int], ring: Ring) -> dict[int, U64]:
        """At p and q."""
        i, q, t = self.links.i, (p + 1) % 3, (p + 2) % 3
        mask = np.uint64((1 << ring.bits) - 1)
        key = self._next if i == p else self._own  # k_q
        perm = local.permutations(key, *shape)
        rho, other_rho = key.uint64(shape) & mask, key.uint64(shape) & mask
        common = np.take_along_axis(held[q], perm, axis=1) ^ rho ^ other_rho
        mine, moved = (p, rho) if i == p else (t, other_rho)
        y = self._hop(held[mine], perm, moved)
        await self.links.send(self.computing[t], Hopped, packed(y, ring))
        small = perm.astype(np.uint32)
        if i == p:
            self.proofs.add_hop(Hop(p, shape, small, held[p], None, other_rho, None))
        else:
            self.proofs.add_hop(Hop(p, shape, small, None, held[t], None, rho))
        return {q: common, mine: y}

    async def _receive_hop(self, p: int, held: dict[int, U64], shape: tuple[int, int], ring: Ring) -> dict[int, U64]:
        """At t."""
        q, t = (p + 1) % 3, (p + 2) % 3
        size = packed_size(math.prod(shape), ring)
        data = await self.links.gather(Hopped, {self.computing[p]: size, self.computing[q]: size})
        y_p, y_t = (unpacked(data[self.computing[k]], ring, shape).astype(np.uint64) for k in (p, q))
        self.proofs.add_hop(Hop(p, shape, None, held[p], held[t], y_p, y_t))
        return {p: y_p, t: y_t}

    async def smallest_k(self, keys: Shared, k: int, *, signed: bool = True) -> XorShares:
        """The k smallest entries of every row, ascending, of equal ones the earlier, as XOR-shared words.

        Each stands above the number of its column. The highest bit of signed entries is turned over, so that none is
        negative.
        """
        rows, n = keys.shape
        if not 1 <= k <= n:
            raise ParameterError(f"the {k} smallest of {n} entries do not exist")
        low, count = local.index_bits(n), keys.ring.bits
        wide = count + low
        planes = await self.bits(keys)
        del keys
        await self.prove_large()
        if signed:
            top = np.zeros(planes.shape, np.uint64)
            top[-1] = ~np.uint64(0)
            planes = planes ^ self.public(top)
        x = planes.map(lambda w: gf64.to_words(w)[: rows * n].reshape(rows, n) << np.uint64(low))
        numbers = np.broadcast_to(np.arange(n, dtype=np.uint64), (rows, n))
        x, planes = x ^ self.public(numbers), zeros((0,))
        held = [x]
        del x
        flat = (await self.shuffle(held.pop(), wide)).reshape(-1)

        async def less(i: Index, j: Index) -> U8:
            """Open whether entry i comes before entry j of its row."""
            one, two = (flat[place].map(lambda w: planes_of(w, wide)) for place in (i, j))
            before = await self.less(one, two, few_rounds=i.size < DEEP)
            plane = await self.open_all(before[None], line="V6", what="order of shuffled entries")
            return np.unpackbits(raw(plane), count=i.size, bitorder="little")

        place = await selection.smallest(less, rows, n, k)
        return flat[place]


def _put(x: XorShares, rows: Index, y: XorShares) -> XorShares:
    out = x.map(np.copy)
    out.a[rows], out.b[rows] = y.a, y.b
    return out
