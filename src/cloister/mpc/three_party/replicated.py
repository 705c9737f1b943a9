"""Three-party replicated sharing: what three parties compute on values that none of them sees.

    R1   i ↔ j    pk_i, σ_i                 X25519 keys, signed; link keys for both directions, and k_i of i and i - 1
    R2   input    a computing owner i: x_i = F(k_i), x_{i+1} = x - x_i, x_{i+2} = 0; x_{i+1} goes to i + 1
                  any other owner: x_0, x_1 from seeds sent once, x_2 = x - x_0 - x_1 to the two that hold it
    R3   reshare  z_0 + z_1 + z_2 = z, every z_i masked by F(k_i) - F(k_{i+1}); z_i goes to i - 1
    R4   pair     1 and 2 hold z = s_1 + s_2: z_0 = F(k_0), z_1 = F(k_1), and 1 ↔ 2: s_1 - z_1, s_2 - z_0 give z_2
    R5   digits   x = u + v, u = x_0 + x_1 known to 0, v = x_2 known to 1 and 2. 0 → 1: monomials of u ⊕ F(k_0)
    R6   shuffle  2 → 0: z_2; 0, 1 permute by F(k_1); 0 → 2: s_0 - ρ; 1, 2 permute by F(k_2); 1 → 0: s_1 - ρ';
                  2, 0 permute by F(k_0); 2 → 1: v = s_2 + ρ'', and u = s_0 - ρ'' stays at 0 (ρ from the pair's key)
    R7   open     to one computing party: the one component it lacks, from i - 1; to another party: u from 0, v from 1
    R8   open     to all three: i → i + 1 the component that i + 1 lacks

Who holds what: party i of 0, 1, 2 holds the components i and i + 1 of every value, so any two know it and one knows
nothing. What is sent, all three together, for a ring of κ bits:

    operation              bits sent per entry                                        rounds
    input                  κ (computing owner), 2κ (any other)                        1
    add, public factor     0                                                          0
    mul, matmul            3κ per entry of the result, whatever the inner length      1
    less, msb              about 4κ                                                   2 + κ/3, or 2 + log2(κ/3) at 6κ
    equality               about 5κ                                                   2 + log2(κ/3)
    bits (lowest L)        6L                                                         1 + L
    inject                 3κ'  into a ring of κ' bits                                2
    one-hot min            about 4κ + 9κ per entry                                    (4 + κ/3) · log2 n + log2 n
    shuffle                4κ                                                         4
    smallest k of n        4κ' + (1.05 to 1.5)(4κ' + 3), with κ' = κ + log2 n         some (3 + κ'/3) · 5
    open                   κ to a computing party, 2κ to another; 3 per bit to all    1

`smallest_k` shuffles every row by a permutation that nobody knows and then *opens the outcome of comparisons*. Before
the shuffle the number of its column is put below every key, so no two keys of a row are equal and, after the shuffle,
they stand in uniformly random order whatever they are: which comparisons are made and how they end is what a sort of
random numbers would give, and says nothing about the keys. (Equal keys that were told apart by their shuffled place
would show: they alone would always come in the order of their places.) No value has to be selected under sharing, which
is where most of the bytes go otherwise.

Reveals
-------
computing party : nothing but what a protocol opens; of rows that are selected from, their number and length, and the
    order in which a uniform shuffle put them. With a second computing party: everything.
owner of an input, who carries the frames : nothing; every word is under a key of its sender and its receiver.

Assumes
-------
Semi-honest parties; no two of the three computing parties collude; Ed25519 keys of all members in the study. Lies of a
computing party are not noticed, by (a), (b), (c) or (f), and can read what is shared (`verified` closes it).

References
----------
[AFL+16] Araki et al., CCS 2016.  [MR18] Mohassel, Rindal, CCS 2018.  [AHI+22] Asharov et al., CCS 2022: sorting by
opened comparisons after a shuffle.  [HKI+12] Hamada et al., ICISC 2012: the same, first.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from cloister.arrays import I64, U8, Index
from cloister.errors import ParameterError
from cloister.mpc.crypto import replicated as local
from cloister.mpc.crypto.agreement import Identity, agree, key_pair
from cloister.mpc.crypto.entropy import Entropy
from cloister.mpc.crypto.prg import Prg
from cloister.mpc.crypto.replicated import Ring, Shared, Words, join
from cloister.mpc.net import wire
from cloister.mpc.net.channel import Channel
from cloister.mpc.net.wire import message
from cloister.mpc.parties import Party
from cloister.mpc.sums.signatures import check_signed
from cloister.mpc.three_party import selection

__all__ = [
    "Bits",
    "Digits",
    "Hop",
    "Input",
    "Key",
    "Open",
    "OpenAll",
    "Pair",
    "Reshare",
    "Shared",
    "Split",
    "Trio",
    "join",
]
DEEP = 1 << 16  # comparisons at once from which bytes count more than rounds
NAME = "replicated"
PART = 1 << 26  # bytes of one message at most; more travels in several
Local = Callable[[Words, Words], Words]


@message("R1", protocol=NAME)
class Key:  # every computing party ↔ every member
    pk: bytes
    signature: bytes


@message("R2", protocol=NAME)
class Input:
    data: U8


@message("R3", protocol=NAME)
class Reshare:
    data: U8


@message("R4", protocol=NAME)
class Pair:
    data: U8


@message("R7", protocol=NAME)
class Open:
    data: U8


@message("R8", protocol=NAME)
class OpenAll:
    data: U8


@dataclass(frozen=True, slots=True)
class Bits:
    """Shared bits of n values, as planes: components a, b of shape (..., ⌈n/8⌉)."""

    n: int
    a: U8
    b: U8

    def __getitem__(self, index: Any) -> Bits:
        return Bits(self.n, self.a[index], self.b[index])

    def __xor__(self, other: Bits) -> Bits:
        return Bits(self.n, self.a ^ other.a, self.b ^ other.b)


@dataclass(frozen=True, slots=True)
class Split:
    """A value x = u + v as R5 wants it: `word` is u at party 0, v at parties 1 and 2."""

    ring: Ring
    word: Words


def signed_key(run_id: bytes, party: Party, pk: bytes) -> bytes:
    return wire.canonical([run_id, party, pk])


def link_context(run_id: bytes, purpose: str, sender: Party, to: Party) -> bytes:
    return wire.canonical([NAME, purpose, run_id, sender, to])


@message("R5")
class Digits:
    data: U8


@message("R6")
class Hop:
    data: U8


class Trio:
    """One member's end of a three-party computation. `rank` is 0, 1, 2, or None for a member that only gives or gets.

    All members call the same operations in the same order. Every method that is `async` sends something.
    """

    def __init__(self, ch: Channel, computing: tuple[Party, Party, Party], entropy: Entropy) -> None:
        self.ch, self.computing, self._entropy = ch, computing, entropy
        self.rank = computing.index(ch.me) if ch.me in computing else None
        self._out: dict[Party, Prg] = {}
        self._in: dict[Party, Prg] = {}
        self._k: dict[int, Prg] = {}  # k_i and k_{i+1} at party i, from `meet`
        self._seeds: dict[Party, tuple[Prg | None, Prg | None]] = {}  # of owners that do not compute

    # -- R1 --------------------------------------------------------------------------------------------------------

    @classmethod
    async def meet(
        cls,
        ch: Channel,
        computing: tuple[Party, Party, Party],
        others: Iterable[Party] = (),
        *,
        entropy: Entropy,
        identity: Identity,
    ) -> Self:
        """Agree on link keys and on k_0, k_1, k_2; `others` give inputs or get results without computing."""
        if len(set(computing)) != 3:
            raise ParameterError(f"three different computing parties are needed, found {', '.join(computing)}")
        trio = cls(ch, computing, entropy)
        others = tuple(p for p in others if p not in computing)
        peers = [p for p in (computing if trio.rank is None else (*computing, *others)) if p != ch.me]
        keys = key_pair(entropy)
        mine = Key(keys.public, identity.sign(f"{NAME}/key", signed_key(ch.run_id, ch.me, keys.public)))
        await ch.scatter(peers, mine)  # R1
        for p, theirs in (await ch.gather(peers, Key)).items():
            data = signed_key(ch.run_id, p, theirs.pk)
            check_signed(ch, p, f"{NAME}/key", data, theirs.signature, protocol=NAME, line="R1")
            trio._out[p] = Prg(agree(keys, theirs.pk, link_context(ch.run_id, "link", ch.me, p)))
            trio._in[p] = Prg(agree(keys, theirs.pk, link_context(ch.run_id, "link", p, ch.me)))
            for i in range(3):  # k_i belongs to i and i - 1
                if {p, ch.me} == {computing[i], computing[i - 1]}:
                    context = link_context(ch.run_id, f"k{i}", computing[i], computing[i - 1])
                    trio._k[i] = Prg(agree(keys, theirs.pk, context))
        for owner in others:
            await trio._share_seeds(owner)
        return trio

    async def _share_seeds(self, owner: Party) -> None:
        """R2: an owner that does not compute gives one seed to 0 and 2, another one to 0 and 1."""
        p0, p1, p2 = self.computing
        if self.ch.me == owner:
            seeds = [self._entropy.bytes(32), self._entropy.bytes(32)]
            self._seeds[owner] = (Prg(seeds[0]), Prg(seeds[1]))
            for to, gets in ((p0, (0, 1)), (p1, (1,)), (p2, (0,))):
                await self._send(to, Input, np.frombuffer(b"".join(seeds[i] for i in gets), np.uint8))
        elif self.rank == 0:
            raw = (await self._recv(owner, Input, 64)).tobytes()
            self._seeds[owner] = (Prg(raw[:32]), Prg(raw[32:]))
        elif self.rank is not None:
            seed = Prg((await self._recv(owner, Input, 32)).tobytes())
            self._seeds[owner] = (None, seed) if self.rank == 1 else (seed, None)

    # -- words on the wire: every byte under the key of its link -----------------------------------------------------

    async def _send(self, to: Party, kind: Callable[[U8], Any], data: U8) -> None:
        for start in range(0, max(1, data.size), PART):
            part = data[start : start + PART]
            await self.ch.send(to, kind(part ^ self._out[to].uint8(part.size)))

    async def _recv(self, sender: Party, kind: type[Any], size: int) -> U8:
        out = np.empty(size, np.uint8)
        for start in range(0, max(1, size), PART):
            part = out[start : start + PART]
            message = await self.ch.recv(sender, kind, data=(part.size,))
            np.bitwise_xor(message.data, self._in[sender].uint8(part.size), out=part)
        return out

    async def _send_words(self, to: int, kind: Callable[[U8], Any], ring: Ring, words: Words) -> None:
        await self._send(self.computing[to % 3], kind, ring.to_bytes(words))

    async def _recv_words(self, sender: int, kind: type[Any], ring: Ring, shape: tuple[int, ...]) -> Words:
        data = await self._recv(self.computing[sender % 3], kind, math.prod(shape) * ring.size)
        return ring.from_bytes(data, shape)

    @property
    def _i(self) -> int:
        if self.rank is None:
            raise ParameterError(f"'{self.ch.me}' is none of the three computing parties")
        return self.rank

    @property
    def _own(self) -> Prg:
        """F(k_i), which i - 1 draws from too."""
        return self._k[self._i]

    @property
    def _next(self) -> Prg:
        """F(k_{i+1}), which i + 1 draws from too."""
        return self._k[(self._i + 1) % 3]

    # -- R2: inputs --------------------------------------------------------------------------------------------------

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
            await self._send_words(i + 1, Input, ring, x - first)
            return Shared(ring, first, x - first)
        if i == (o + 1) % 3:
            return Shared(ring, await self._recv_words(o, Input, ring, shape), zero)
        return Shared(ring, zero, ring.draw(self._next, shape))

    async def _input_from_outside(
        self, owner: Party, x: Words | None, shape: tuple[int, ...], ring: Ring
    ) -> Shared | None:
        if x is None and self.rank is None:
            return None
        first, second = (ring.draw(s, shape) if s is not None else None for s in self._seeds[owner])
        if x is not None and first is not None and second is not None:
            third = ring.to_bytes(x - first - second)
            for to in (1, 2):
                await self._send(self.computing[to], Input, third)
            return None
        if first is not None and second is not None:
            return Shared(ring, first, second)
        third_word = ring.from_bytes(await self._recv(owner, Input, math.prod(shape) * ring.size), shape)
        if second is not None:
            return Shared(ring, second, third_word)
        if first is not None:
            return Shared(ring, third_word, first)
        raise ParameterError(f"'{owner}' has given no seeds")

    def constant(self, values: np.ndarray[Any, Any], ring: Ring) -> Shared:
        """Share public integers: component 0, held by parties 0 and 2."""
        return local.constant(values, ring, self._i)

    # -- R7, R8: opening ---------------------------------------------------------------------------------------------

    async def open(
        self, x: Shared | None, shape: tuple[int, ...], ring: Ring, *, to: Party, protocol: str, line: str, what: str
    ) -> I64 | None:
        """Open a shared array to one member, as signed integers; everyone else gets None."""
        size = math.prod(shape) * ring.size
        self.ch.record_opening(to=to, line=line, what=what, protocol=protocol)
        if to in self.computing:
            if x is None:
                return None
            i, o = self._i, self.computing.index(to)
            if i == (o + 2) % 3:
                await self._send_words(o, Open, ring, x.a)
            if i != o:
                return None
            return ring.decode(x.a + x.b + await self._recv_words(o + 2, Open, ring, shape))
        if self.ch.me == to:
            parts = [await self._recv(p, Open, size) for p in self.computing[:2]]
            u, v = (ring.from_bytes(part, shape) for part in parts)
            return ring.decode(u + v)
        if x is not None and self.rank in (0, 1):
            await self._send(to, Open, ring.to_bytes(x.a + x.b if self.rank == 0 else x.b))
        return None

    async def open_bits(self, x: Bits, *, protocol: str, line: str, what: str) -> U8:
        """Open one plane to the three computing parties, as n bytes of 0 or 1."""
        i = self._i
        await self._send(self.computing[(i + 1) % 3], OpenAll, x.a.reshape(-1))
        missing = await self._recv(self.computing[(i + 2) % 3], OpenAll, x.a.size)
        plane = self.ch.reveal(
            x.a ^ x.b ^ missing.reshape(x.a.shape), to=self.computing, line=line, what=what, protocol=protocol
        )
        return local.unpack(plane.reshape(-1), x.n)

    # -- R3: products ------------------------------------------------------------------------------------------------

    def _zero(self, shape: tuple[int, ...], ring: Ring) -> Words:
        return ring.draw(self._own, shape) - ring.draw(self._next, shape)

    def product(self, x: Shared, y: Shared, f: Local = np.multiply) -> Words:
        """Masked summand of f(x, y) at this party; f is linear in both arguments."""
        z = f(x.a, y.a + y.b) + f(x.b, y.a)
        return z + self._zero(tuple(z.shape), x.ring)

    async def reshare(self, z: Words, ring: Ring) -> Shared:
        i = self._i
        await self._send_words(i + 2, Reshare, ring, z)
        return Shared(ring, z, await self._recv_words(i + 1, Reshare, ring, tuple(z.shape)))

    async def mul(self, x: Shared, y: Shared, f: Local = np.multiply) -> Shared:
        return await self.reshare(self.product(x, y, f), x.ring)

    def matmul_summand(self, x: Shared, y: Shared) -> Words:
        """Masked summand of x @ y at this party: one product of twice the inner length."""
        z = local.matmul(np.concatenate([x.a, x.b], axis=-1), np.concatenate([y.a + y.b, y.a], axis=-2), x.ring.bits)
        return z + self._zero(tuple(z.shape), x.ring)

    async def matmul(self, x: Shared, y: Shared) -> Shared:
        return await self.reshare(self.matmul_summand(x, y), x.ring)

    async def times_transposed(self, q: Shared, r: Shared) -> Shared:
        """Q rᵀ for shared q (m, d), r (n, d)."""
        return await self.matmul(q, r.map(lambda w: np.ascontiguousarray(w.T)))

    async def _and(self, x: Bits, y: Bits, add: U8 | None = None) -> Bits:
        """AND, plus bits of which parties 1 and 2 hold XOR shares."""
        i = self._i
        z = (x.a & (y.a ^ y.b)) ^ (x.b & y.a)
        z ^= self._own.uint8(z.shape)
        z ^= self._next.uint8(z.shape)
        if add is not None and i != 0:
            z ^= add
        await self._send(self.computing[(i + 2) % 3], Reshare, z.reshape(-1))
        other = await self._recv(self.computing[(i + 1) % 3], Reshare, z.size)
        return Bits(x.n, z, other.reshape(z.shape))

    # -- R4: from shares of 1 and 2 ------------------------------------------------------------------------------------

    async def _pair_bits(self, z: U8 | None, shape: tuple[int, ...], n: int) -> Bits:
        if self._i == 0:
            return Bits(n, self._own.uint8(shape), self._next.uint8(shape))
        one = self._own.uint8(shape) if self._i == 1 else self._next.uint8(shape)
        mine = one if z is None else z ^ one
        peer = self.computing[3 - self._i]
        await self._send(peer, Pair, mine.reshape(-1))
        third = mine ^ (await self._recv(peer, Pair, mine.size)).reshape(shape)
        return Bits(n, one, third) if self._i == 1 else Bits(n, third, one)

    async def _pair_words(self, z: Words | None, shape: tuple[int, ...], ring: Ring) -> Shared:
        if self._i == 0 or z is None:
            return Shared(ring, ring.draw(self._own, shape), ring.draw(self._next, shape))
        one = ring.draw(self._own if self._i == 1 else self._next, shape)
        mine, peer = z - one, 3 - self._i
        await self._send_words(peer, Pair, ring, mine)
        third = mine + await self._recv_words(peer, Pair, ring, shape)
        return Shared(ring, one, third) if self._i == 1 else Shared(ring, third, one)

    # -- R5: carries ---------------------------------------------------------------------------------------------------

    def split(self, x: Shared) -> Split:
        return Split(x.ring, (x.a + x.b, x.b, x.a)[self._i])

    async def join_split(self, x: Split) -> Shared:
        """Back to components: x_0 = F(k_0), x_1 = u - x_0, x_2 = v."""
        i, ring, shape = self._i, x.ring, tuple(x.word.shape)
        if i == 0:
            first = ring.draw(self._own, shape)
            await self._send_words(1, Digits, ring, x.word - first)
            return Shared(ring, first, x.word - first)
        if i == 1:
            return Shared(ring, await self._recv_words(0, Digits, ring, shape), x.word)
        return Shared(ring, x.word, ring.draw(self._next, shape))

    async def _monomials(self, u: U8 | None, widths: Sequence[int], n: int) -> list[U8]:
        """R5: per digit, this party's share of the monomials of u; party 0 holds none."""
        sizes = [2**w - 1 for w in widths]
        shape = (sum(sizes), local.plane_bytes(n))
        if self._i == 0 and u is not None:
            cuts = np.cumsum([0, *widths])
            whole = np.concatenate([local.monomials(u[s:e]) for s, e in itertools.pairwise(cuts)])
            whole ^= self._own.uint8(shape)
            await self._send(self.computing[1], Digits, whole.reshape(-1))
            return []
        if self._i == 1:
            share = (await self._recv(self.computing[0], Digits, math.prod(shape))).reshape(shape)
        else:
            share = self._next.uint8(shape)
        return np.split(share, np.cumsum(sizes)[:-1].tolist())

    async def _msb(self, x: Split) -> Bits:
        """The sign bits of x: carry into the top bit of u + v, plus the two top bits."""
        ring, n = x.ring, x.word.size
        widths = [*local.digit_widths(ring.bits - 1), 1]
        bits = local.planes(x.word, 0, ring.bits)
        m = await self._monomials(bits if self._i == 0 else None, widths, n)
        digits = len(widths) - 1
        g = p = top = None
        if m:
            cuts = np.cumsum([0, *widths])
            v = [bits[s:e] for s, e in itertools.pairwise(cuts)]
            g = np.stack([local.generate(m[j], v[j]) for j in range(digits)])
            top = m[-1][0] ^ v[-1][0] if self._i == 1 else m[-1][0]
            g[-1] ^= top
            p = [local.propagate(m[j], v[j], constant=self._i == 1) for j in range(1, digits)]
        return await (self._ripple if n >= DEEP else self._tree)(g, p, digits, n)

    async def _ripple(self, g: U8 | None, p: list[U8] | None, digits: int, n: int) -> Bits:
        """c_{j+1} = g_j ⊕ p_j c_j, digit by digit: fewest bytes."""
        rows = [g[0], *p] if g is not None and p is not None else None
        first = await self._pair_bits(np.stack(rows) if rows is not None else None, (digits, local.plane_bytes(n)), n)
        c = first[0]
        for j in range(1, digits):
            c = await self._and(first[j], c, add=None if g is None else g[j])
        return c

    async def _tree(self, g: U8 | None, p: list[U8] | None, digits: int, n: int) -> Bits:
        """Neighbours merged, (g, p) ∘ (g', p') = (g ⊕ p g', p p'): fewest rounds. The lowest p is never used."""
        rows = np.concatenate([g, *[q[None] for q in p]]) if g is not None and p is not None else None
        size = local.plane_bytes(n)
        both = await self._pair_bits(rows, (2 * digits - 1, size), n)
        carry, pass_on = both[:digits], both[digits:]
        pass_on = Bits(n, *(np.concatenate([np.zeros((1, size), np.uint8), w]) for w in (pass_on.a, pass_on.b)))
        while len(carry.a) > 1:
            h, odd = len(carry.a) // 2, len(carry.a) % 2  # an odd one out stays on top
            low, high = slice(0, 2 * h, 2), slice(1, 2 * h, 2)
            left = Bits(n, *(np.concatenate([w[high], w[high][1:]]) for w in (pass_on.a, pass_on.b)))
            right = Bits(
                n,
                *(np.concatenate([c[low], w[low][1:]]) for c, w in ((carry.a, pass_on.a), (carry.b, pass_on.b))),
            )
            joined = await self._and(left, right)
            merged = carry[high] ^ joined[:h]
            kept = [np.concatenate([w[:1] * 0, w[h:]]) for w in (joined.a, joined.b)]
            tops = [w[2 * h :] if odd else w[:0] for w in (carry.a, carry.b, pass_on.a, pass_on.b)]
            carry = Bits(n, np.concatenate([merged.a, tops[0]]), np.concatenate([merged.b, tops[1]]))
            pass_on = Bits(n, np.concatenate([kept[0], tops[2]]), np.concatenate([kept[1], tops[3]]))
        return carry[0]

    async def negative(self, x: Shared) -> Bits:
        """Whether each entry is below zero."""
        return await self._msb(self.split(x))

    async def less(self, x: Shared, y: Shared) -> Bits:
        """Whether x < y, entry by entry; their difference must fit the ring."""
        return await self.negative(x - y)

    async def equal(self, x: Shared, y: Shared) -> Bits:
        """Whether x = y: u = -v, so all bits of u and v - 1 differ."""
        ring, n = x.ring, x.a.size
        word = self.split(x - y).word
        widths = local.digit_widths(ring.bits)
        bits = local.planes(word if self._i == 0 else word - ring.dtype.type(1), 0, ring.bits)
        m = await self._monomials(bits if self._i == 0 else None, widths, n)
        rows = None
        if m:
            cuts = np.cumsum([0, *widths])
            rows = np.stack(
                [local.propagate(m[j], bits[cuts[j] : cuts[j + 1]], constant=self._i == 1) for j in range(len(widths))]
            )
        p = await self._pair_bits(rows, (len(widths), local.plane_bytes(n)), n)
        while len(p.a) > 1:
            h = len(p.a) // 2
            halves = await self._and(p[:h], p[h : 2 * h])
            p = Bits(n, *(np.concatenate([c, w[2 * h :]]) for c, w in ((halves.a, p.a), (halves.b, p.b))))
        return p[0]

    async def low_bits(self, x: Shared, count: int) -> Bits:
        """The lowest `count` bits as planes (count, ...), by a ripple of one-bit digits."""
        n = x.a.size
        bits = local.planes(self.split(x).word, 0, count)
        m = await self._monomials(bits if self._i == 0 else None, [1] * count, n)
        sums = g = None
        if m:
            share = np.concatenate(m)
            g = share & bits
            sums = share ^ bits if self._i == 1 else share
        p = await self._pair_bits(sums, (count, local.plane_bytes(n)), n)
        if count == 1:
            return p
        zero = Bits(n, np.zeros_like(p.a[0]), np.zeros_like(p.b[0]))
        rows, c = [p[0]], zero
        for j in range(count - 1):
            c = await self._and(p[j], c, add=None if g is None else g[j])
            rows.append(p[j + 1] ^ c)
        return Bits(n, np.stack([r.a for r in rows]), np.stack([r.b for r in rows]))

    def flip(self, x: Bits) -> Bits:
        """NOT: component 0, held by parties 0 and 2."""
        ones = np.uint8(255)
        return Bits(x.n, x.a ^ ones if self._i == 0 else x.a, x.b ^ ones if self._i == 2 else x.b)

    async def both(self, x: Bits, y: Bits) -> Bits:
        return await self._and(x, y)

    async def inject(self, x: Bits, shape: tuple[int, ...], ring: Ring) -> Shared:
        """Bits as numbers 0 and 1: d = x_0 ⊕ x_1 known to 0, e = x_2 known to 1 and 2, x = e + (1 - 2e) d."""
        rows = math.prod(x.a.shape[:-1])
        wide = (rows, x.n)

        def numbers(planes: U8) -> Words:
            bits = np.unpackbits(planes.reshape(rows, -1), axis=1, count=x.n, bitorder="little")
            return bits.astype(ring.dtype)

        if self._i == 0:
            d = numbers(x.a ^ x.b)
            await self._send_words(1, Digits, ring, d - ring.draw(self._own, wide))
            z = None
        else:
            e = numbers(x.b if self._i == 1 else x.a)
            one, two = ring.dtype.type(1), ring.dtype.type(2)
            if self._i == 1:
                z = e + (one - two * e) * await self._recv_words(0, Digits, ring, wide)
            else:
                z = (one - two * e) * ring.draw(self._next, wide)
        return (await self._pair_words(z, wide, ring)).reshape(*shape)

    # -- choices -------------------------------------------------------------------------------------------------------

    async def smaller(self, x: Shared, y: Shared) -> tuple[Shared, Shared]:
        """(c, min): c = 1 where x is taken, which is where x ≤ y."""
        c = await self.inject(self.flip(await self.less(y, x)), x.shape, x.ring)
        return c, y + await self.mul(c, x - y)

    async def onehot_min(self, x: Shared) -> tuple[Shared, Shared]:
        """The smallest entry along the last axis, and its place as a one-hot row; of equal ones the first.

        A tournament of neighbours, so that the left one is always the earlier; its results then go down the tree.
        """
        taken = []
        while x.shape[-1] > 1:
            h = x.shape[-1] // 2
            c, best = await self.smaller(x[..., 0 : 2 * h : 2], x[..., 1 : 2 * h : 2])
            taken.append(c)
            x = join([best, x[..., 2 * h :]], axis=-1)
        place = self.constant(np.ones(x.shape, np.int64), x.ring)
        for c in reversed(taken):
            h = c.shape[-1]
            left = await self.mul(c, place[..., :h])
            right = place[..., :h] - left
            mixed = left.map(lambda w: np.empty((*w.shape[:-1], 2 * w.shape[-1]), w.dtype))
            for out, one, two in ((mixed.a, left.a, right.a), (mixed.b, left.b, right.b)):
                out[..., 0::2], out[..., 1::2] = one, two
            place = join([mixed, place[..., h:]], axis=-1)
        return x[..., 0], place

    async def onehot_max(self, x: Shared) -> tuple[Shared, Shared]:
        """The largest entry along the last axis, and its place; of equal ones the first."""
        best, place = await self.onehot_min(x.times(-1))
        return best.times(-1), place

    # -- R6: smallest k by a shuffle and opened comparisons ------------------------------------------------------------

    async def shuffle(self, z: Words, ring: Ring) -> Split:
        """Permute every row of a matrix, given by masked summands (see `product`), so that nobody knows how."""
        i, shape = self._i, tuple(z.shape)

        def permuted(w: Words, key: Prg) -> Words:
            return np.take_along_axis(w, local.permutations(key, *shape), axis=1)

        if i == 0:
            z = z + await self._recv_words(2, Hop, ring, shape)
            z = permuted(z, self._next) - ring.draw(self._next, shape)
            await self._send_words(2, Hop, ring, z)
            z = permuted(await self._recv_words(1, Hop, ring, shape), self._own) - ring.draw(self._own, shape)
        elif i == 1:
            z = permuted(z, self._own) + ring.draw(self._own, shape)
            z = permuted(z, self._next) - ring.draw(self._next, shape)
            await self._send_words(0, Hop, ring, z)
            z = await self._recv_words(2, Hop, ring, shape)
        else:
            await self._send_words(0, Hop, ring, z)
            z = permuted(await self._recv_words(0, Hop, ring, shape), self._own) + ring.draw(self._own, shape)
            z = permuted(z, self._next) + ring.draw(self._next, shape)
            await self._send_words(1, Hop, ring, z)
        return Split(ring, z)

    async def smallest_k(self, z: Words, ring: Ring, k: int) -> Shared:
        """The k smallest entries of every row, ascending, of equal ones the earlier; z as for `shuffle`.

        Each comes as entry · 2^b + column in the ring of `numbered_ring`: what is opened shows no ties.
        """
        rows, n = z.shape
        if not 1 <= k <= n:
            raise ParameterError(f"the {k} smallest of {n} entries do not exist")
        wide = local.numbered_ring(ring, n)
        z = z.astype(wide.dtype) << wide.dtype.type(wide.bits - ring.bits)  # modulo 2^(κ+b), since z is modulo 2^κ
        if self._i == 0:
            z = z + np.arange(n, dtype=wide.dtype)
        flat = (await self.shuffle(z, wide)).word.reshape(-1)

        async def less(i: Index, j: Index) -> U8:
            """Open whether entry i comes before entry j of its row."""
            sign = await self._msb(Split(wide, flat[i] - flat[j]))
            return await self.open_bits(sign, protocol=NAME, line="R6", what="order of shuffled entries")

        place = await selection.smallest(less, rows, n, k)
        return await self.join_split(Split(wide, flat[place]))
