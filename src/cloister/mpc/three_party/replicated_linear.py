"""The linear part of `replicated`: keys and links, inputs and openings, sums and products. Lines R1 to R4, R7, R8."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from cloister.arrays import I64, U8
from cloister.errors import ParameterError
from cloister.mpc.crypto import replicated as local
from cloister.mpc.crypto.agreement import Identity, agree, key_pair
from cloister.mpc.crypto.entropy import Entropy
from cloister.mpc.crypto.prg import Prg
from cloister.mpc.crypto.replicated import Ring, Shared, Words
from cloister.mpc.net import wire
from cloister.mpc.net.channel import Channel
from cloister.mpc.net.wire import message
from cloister.mpc.sums.signatures import check_signed
from cloister.study import Party

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


class Linear:
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
