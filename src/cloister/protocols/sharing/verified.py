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

Component i of every value is at parties i and i - 1. What is opened, and when, is as in `replicated`: rows are shuffled
by nobody's permutation, and the outcome of comparisons is opened. Each such step is proved *before* it is opened, since
a wrong comparison would tell something about what is compared.

    operation              bits sent per entry, all three                      rounds
    product                3κ                                                  1
    bits                   κ + 3 (κ - 1), or about κ + 3κ log2 κ               κ, or 2 + log2 κ
    less                   3κ, or about 6κ                                     κ, or 6 + log2 (κ/6)
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
does not depend on anyone's values. A party that lies passes one proof with probability below 2^-56. No two of the three
computing parties collude; AES, SHA-256 and X25519. An owner may give any value of the ring: ranges are checked by who
needs them (`check_small`). Who lied is not said: a verifier that rejects for no reason looks the same.

References
----------
[AFL+16] Araki et al., CCS 2016.  [BBC+19], [BGIN20] proofs, see `crypto.share_proofs`.  [LN17] Lindell, Nof, CCS 2017:
security up to additive errors, and why checking before opening suffices.  [AHI+22] Asharov et al., CCS 2022: shuffles.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from cloister.crypto import gf64
from cloister.crypto import replicated as local
from cloister.crypto.agreement import Identity
from cloister.crypto.entropy import Entropy
from cloister.crypto.prg import U8, U64, Prg
from cloister.crypto.replicated import Index, Ring, Shared, Words
from cloister.crypto.share_proofs import ROWS, digest, raw, words
from cloister.errors import ParameterError
from cloister.net.channel import Channel
from cloister.net.wire import message
from cloister.protocols.sharing import selection
from cloister.protocols.sharing.sealed_links import NAME, Links
from cloister.protocols.sharing.verification import HASH, PENDING, Hop, Proofs, reject
from cloister.study import Party

DEEP = 1 << 16  # comparisons at once from which bytes count more than rounds
WIDE = 1 << 12  # words at once up to which the bits of sums are found in few rounds
DIGIT, LONG = 3, 6  # bits of a digit in a comparison of few rounds, of short and of long words
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


@message("V5", protocol=NAME)
class Sum:
    data: U8


@message("V6", protocol=NAME)
class Hopped:
    data: U8


@message("V13", protocol=NAME)
class Open:
    data: U8


@dataclass(frozen=True, slots=True)
class Xored:
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

    def map(self, f: Callable[[U64], U64]) -> Xored:
        return Xored(f(self.a), f(self.b))

    def __getitem__(self, index: Any) -> Xored:
        return self.map(lambda w: w[index])

    def __xor__(self, other: Xored) -> Xored:
        return Xored(self.a ^ other.a, self.b ^ other.b)

    def reshape(self, *shape: int) -> Xored:
        return self.map(lambda w: w.reshape(shape))

    def wide(self, rows: int) -> Xored:
        """One plane as often as there are rows."""
        return self.map(lambda w: np.broadcast_to(w, (rows, *w.shape)))


def together(xs: Sequence[Xored]) -> Xored:
    return Xored(np.concatenate([x.a for x in xs]), np.concatenate([x.b for x in xs]))


def stacked(xs: Sequence[Xored]) -> Xored:
    return Xored(np.stack([x.a for x in xs]), np.stack([x.b for x in xs]))


def planes_of(x: Words, rows: int) -> U64:
    """Bits 0..rows-1 of all words, one plane each."""
    flat = np.zeros(-(-x.size // 64) * 64, np.uint64)
    flat[: x.size] = x.reshape(-1)
    planes: U64 = gf64.to_planes(flat, rows)
    return planes


def zeros(shape: tuple[int, ...]) -> Xored:
    return Xored(np.zeros(shape, np.uint64), np.zeros(shape, np.uint64))


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
        if (x is not None) != (self.ch.me == owner):
            raise ParameterError(f"the values of an input belong to its owner '{owner}' and to nobody else")
        if x is not None and (x.shape != shape or x.dtype != ring.dtype):
            raise ParameterError(f"expected an input of shape {shape} in {ring.dtype}, found {x.shape} in {x.dtype}")
        if owner not in self.computing:
            return await self._input_from_outside(owner, x, shape, ring)
        if self.rank is None:
            return None
        i, o, zero = self.rank, self.computing.index(owner), np.zeros(shape, ring.dtype)
        if x is not None:
            first = ring.draw(self._own, shape)
            await self.links.send(self.links.next, Input, ring.to_bytes(x - first))
            return Shared(ring, first, x - first)
        if i == (o + 1) % 3:
            data = (await self.links.gather(Input, {owner: math.prod(shape) * ring.size}))[owner]
            return Shared(ring, ring.from_bytes(data, shape), zero)
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
            rest = ring.to_bytes(x - parts[0] - parts[1])
            for to in self.computing[1:]:
                await self.links.send(to, Input, rest)
            return None
        held: list[Words | None] = [*parts, None]
        if self.rank != 0:
            data = (await self.links.gather(Input, {owner: math.prod(shape) * ring.size}))[owner]
            held[2] = ring.from_bytes(data, shape)
        a, b = held[self.links.i], held[(self.links.i + 1) % 3]
        assert a is not None and b is not None
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
        encoded = np.asarray(values).astype(np.int64).view(np.uint64).astype(ring.dtype)
        zero = np.zeros_like(encoded)
        return Shared(ring, encoded if self.links.i == 0 else zero, encoded if self.links.i == 2 else zero)

    def public(self, x: U64) -> Xored:
        """Public words, XOR-shared alike."""
        zero = np.zeros_like(x)
        return Xored(x if self.links.i == 0 else zero, x if self.links.i == 2 else zero)

    def flip(self, x: Xored) -> Xored:
        """NOT."""
        return Xored(~x.a if self.links.i == 0 else x.a, ~x.b if self.links.i == 2 else x.b)

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
        size = shape[0] * shape[1] * ring.size
        from_prev, from_next = await self.links.exchange(
            Product, ring.to_bytes(z), ring.to_bytes(correction), ROWS * ROWS * ring.size, size
        )
        other = ring.from_bytes(from_next, shape)
        left = other - following if w is None else other - w.b[None] - following
        self.proofs.add_product(q, r, left, own, masks, ring.from_bytes(from_prev, (ROWS, ROWS)).astype(np.uint64))
        return Shared(ring, z, other)

    # -- V4: gates -----------------------------------------------------------------------------------------------------

    def _gate_summand(self, x: Xored, y: Xored, masks: U64) -> U64:
        return (x.a & (y.a ^ y.b)) ^ (x.b & y.a) ^ masks

    async def gate(self, x: Xored, y: Xored) -> Xored:
        """AND, word by word."""
        own, following = self._own.uint64(x.shape), self._next.uint64(x.shape)
        z = self._gate_summand(x, y, own ^ following)
        _, data = await self.links.exchange(Gate, raw(z), None, None, 8 * z.size)
        received = words(data).reshape(z.shape)
        self.proofs.add_gates((x.a, x.b), (y.a, y.b), received, own, following)
        return Xored(z, received)

    async def all_of(self, xs: Xored) -> Xored:
        """AND over the first axis, halves at a time."""
        while len(xs) > 1:
            h = len(xs) // 2
            xs = together([await self.gate(xs[:h], xs[h : 2 * h]), xs[2 * h :]])
        return xs[0]

    # -- V5: bits ------------------------------------------------------------------------------------------------------

    def _sum_known_to_first(self, x: Shared) -> Words:
        return x.a + x.b

    async def bits(self, x: Shared) -> Xored:
        """All bits of shared words, as planes (κ, ⌈n/64⌉), lowest first."""
        i, n, count = self.links.i, x.a.size, x.ring.bits
        k_a, k_b = planes_of(x.a, count), planes_of(x.b, count)
        none = np.zeros_like(k_a)
        if i == 0:
            m_0 = self._own.uint64(k_a.shape)
            m_1 = planes_of(self._sum_known_to_first(x), count) ^ m_0
            await self.links.send(self.links.next, Sum, raw(m_1))  # V5
            s, v = Xored(m_0, m_1), Xored(none, none)
            self.proofs.add_carries(0, (m_0, k_a), (m_1, k_b))
        elif i == 1:
            data = (await self.links.gather(Sum, {self.links.prev: 8 * k_a.size}))[self.links.prev]
            m_1 = words(data).reshape(k_a.shape)
            s, v = Xored(m_1, k_b), Xored(none, k_b)
            self.proofs.add_carries(0, None, (m_1, k_a))
        else:
            m_0 = self._next.uint64(k_a.shape)
            s, v = Xored(k_a, m_0), Xored(k_a, none)
            self.proofs.add_carries(0, (m_0, k_b), None)
        carries = await (self._prefix(s, v) if n <= WIDE else self._ripple(s, v))
        return s ^ carries

    async def _ripple(self, s: Xored, v: Xored) -> Xored:
        """Carries into every bit of u + v, s = u ⊕ v: c' = v ⊕ s (c ⊕ v); fewest bytes."""
        c = zeros(s.shape[1:])
        rows = [c]
        for b in range(len(s) - 1):
            c = v[b] ^ await self.gate(s[b], c ^ v[b])
            rows.append(c)
        return stacked(rows)

    async def _prefix(self, s: Xored, v: Xored) -> Xored:
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

    async def less(self, x: Xored, y: Xored, *, few_rounds: bool) -> Xored:
        """Whether x < y, of planes (κ, ...), as one plane: c' = c ⊕ d (c ⊕ y) from the lowest bit, d = x ⊕ y."""
        d = x ^ y
        digit = (LONG if len(d) > 24 else DIGIT) if few_rounds else len(d)
        starts = list(range(0, len(d), digit))
        c: list[Xored] = [zeros(d.shape[1:])] * len(starts)
        p: list[Xored] = [self.flip(d[start]) for start in starts]  # all bits of the digit are equal
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

    async def choose(self, where: Xored, x: Xored, y: Xored) -> Xored:
        """X where the plane says so, else y; of planes (rows, ...)."""
        return y ^ await self.gate(x ^ y, where.wide(len(x)))

    # -- V6: shuffles --------------------------------------------------------------------------------------------------

    def _hop(self, x: U64, perm: Index, mask: U64) -> U64:
        return np.take_along_axis(x, perm, axis=1) ^ mask

    async def shuffle(self, x: Xored, bits: int) -> Xored:
        """Permute every row of a matrix of words so that nobody knows how."""
        i, ring, shape = self.links.i, Ring(bits), (x.shape[0], x.shape[1])
        mask, size = np.uint64((1 << bits) - 1), math.prod(shape) * Ring(bits).size
        held: dict[int, U64] = {i: x.a, (i + 1) % 3: x.b}
        for p in range(3):
            q, t = (p + 1) % 3, (p + 2) % 3
            if i == t:
                data = await self.links.gather(Hopped, {self.computing[p]: size, self.computing[q]: size})
                y_p, y_t = (ring.from_bytes(data[self.computing[k]], shape).astype(np.uint64) for k in (p, q))
                self.proofs.add_hop(Hop(p, shape, None, held[p], held[t], y_p, y_t))
                held = {p: y_p, t: y_t}
                continue
            key = self._next if i == p else self._own  # k_q
            perm = local.permutations(key, *shape)
            rho, other_rho = key.uint64(shape) & mask, key.uint64(shape) & mask
            common = np.take_along_axis(held[q], perm, axis=1) ^ rho ^ other_rho
            mine, moved = (p, rho) if i == p else (t, other_rho)
            y = self._hop(held[mine], perm, moved)
            await self.links.send(self.computing[t], Hopped, ring.to_bytes(y))
            small = perm.astype(np.uint32)
            if i == p:
                self.proofs.add_hop(Hop(p, shape, small, held[p], None, other_rho, None))
            else:
                self.proofs.add_hop(Hop(p, shape, small, None, held[t], None, rho))
            held = {q: common, mine: y}
        return Xored(held[i], held[(i + 1) % 3])

    async def smallest_k(self, keys: Shared, k: int) -> Xored:
        """The k smallest entries of every row, ascending, of equal ones the earlier, as XOR-shared words.

        Each stands above the number of its column, and its highest bit is turned over, so that it is never negative.
        """
        rows, n = keys.shape
        if not 1 <= k <= n:
            raise ParameterError(f"the {k} smallest of {n} entries do not exist")
        low, count = local.index_bits(n), keys.ring.bits
        wide = count + low
        planes = await self.bits(keys)
        await self._prove_large()
        top = np.zeros(planes.shape, np.uint64)
        top[-1] = ~np.uint64(0)
        planes = planes ^ self.public(top)
        x = planes.map(lambda w: gf64.to_words(w)[: rows * n].reshape(rows, n) << np.uint64(low))
        numbers = np.broadcast_to(np.arange(n, dtype=np.uint64), (rows, n))
        flat = (await self.shuffle(x ^ self.public(numbers), wide)).reshape(-1)
        await self._prove_large()

        async def less(i: Index, j: Index) -> U8:
            """Open whether entry i comes before entry j of its row."""
            one, two = (flat[place].map(lambda w: planes_of(w, wide)) for place in (i, j))
            before = await self.less(one, two, few_rounds=i.size < DEEP)
            plane = await self.open_all(before[None], line="V6", what="order of shuffled entries")
            return np.unpackbits(raw(plane), count=i.size, bitorder="little")

        place = await selection.smallest(less, rows, n, k)
        return flat[place]

    async def _prove_large(self) -> None:
        if self.proofs.pending >= PENDING:
            await self.proofs.verify()

    # -- V13: openings -------------------------------------------------------------------------------------------------

    async def check_zero(self, x: Xored, line: str, what: str) -> None:
        """Reject unless all shared words are 0; nothing else is shown."""
        await self.proofs.verify()
        theirs, _ = await self.links.exchange(Open, None, digest(x.a), HASH, None)
        if (theirs != digest(x.a ^ x.b)).any():
            reject(line, what)

    async def open_all(self, x: Xored, *, line: str, what: str, protocol: str = NAME) -> U64:
        """Open planes to the three computing parties."""
        await self.proofs.verify()
        size = 8 * x.a.size
        missing, vouched = await self.links.exchange(Open, digest(x.b), raw(x.a), size, HASH)
        plane = self._checked(words(missing).reshape(x.shape), vouched)
        return self.ch.reveal(x.a ^ x.b ^ plane, to=self.computing, line=line, what=what, protocol=protocol)

    async def open_to(
        self, x: Xored | None, shape: tuple[int, ...], *, to: Party, line: str, what: str, protocol: str
    ) -> U64 | None:
        """Open planes to one member; everyone else gets None."""
        if x is not None:
            await self.proofs.verify()
        self.ch.reveal(None, to=to, line=line, what=what, protocol=protocol)
        if to not in self.computing:
            return await self._open_outside(x, shape, to)
        if x is None:
            return None
        if self.ch.me == to:
            got = await self.links.gather(Open, {self.links.prev: 8 * math.prod(shape), self.links.next: HASH})
            missing = self._checked(words(got[self.links.prev]).reshape(shape), got[self.links.next])
            return x.a ^ x.b ^ missing
        await self.links.send(to, Open, raw(x.a) if to == self.links.next else digest(x.b))
        return None

    async def _open_outside(self, x: Xored | None, shape: tuple[int, ...], to: Party) -> U64 | None:
        """Component i from i, and its hash from i - 1."""
        if x is not None:
            await self.links.send(to, Open, np.concatenate([digest(x.b), raw(x.a)]))
            return None
        if self.ch.me != to:
            return None
        got = await self.links.gather(Open, dict.fromkeys(self.computing, HASH + 8 * math.prod(shape)))
        parts = [words(got[p][HASH:]).reshape(shape) for p in self.computing]
        for i in range(3):
            self._checked(parts[i], got[self.computing[i - 1]][:HASH])
        return parts[0] ^ parts[1] ^ parts[2]

    def _checked(self, x: U64, vouched: U8) -> U64:
        if (digest(x) != vouched).any():
            reject("V13", "an opened word differs between its two holders")
        return x


def _put(x: Xored, rows: Index, y: Xored) -> Xored:
    out = x.map(np.copy)
    out.a[rows], out.b[rows] = y.a, y.b
    return out
