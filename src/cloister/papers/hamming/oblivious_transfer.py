"""Correlated oblivious transfer: for a choice x_t and a difference δ_t, R learns m_t + x_t δ_t, and S the random m_t.

    O1   R → S   A                            base transfers, roles turned round: R is their sender
    O2   S → R   R_0, …, R_127                for the bits of a secret s
    O3   R → S   u                            extension: rows t_t at R, q_t = t_t ⊕ x_t s at S
         S → R   a seed; R → S: x̃, t̃           that one x went into all columns of u [KOS15]
    O4   S → R   d_t = m_t + δ_t - F(t, q_t ⊕ s), with m_t = F(t, q_t)    mod 2^w
    O5   R       F(t, t_t) + x_t d_t = m_t + x_t δ_t

m_t and δ_t are vectors: one transfer serves all of the sender's points. O3 to O5 repeat for as many batches as wanted.

Reveals
-------
sender : nothing about the choices, malicious or not.
receiver : m_t + x_t δ_t, which is uniform; nothing about δ_t. If it lies in O3, it is found out, or has guessed a bit
    of s for every column in which it lies, and those bits tell it nothing about δ_t.
who carries the frames : nothing.

Assumes
-------
One of the two may lie: O3 is checked, and what the sender says in O4 is its δ_t. The computational Diffie-Hellman
problem in the group of Ed25519, with the hash as a random oracle [CO15]; AES as an ideal permutation [GKWY20].

Cost
----
Once: 3 scalar products per base transfer at S and 1 at R, 4 kB. Per transfer: 16 bytes R → S, and one word per entry of
δ_t S → R. Per batch: 128 to 191 transfers more, 1 kB, and one round for the check.

References
----------
[CO15], [IKNP03], [GKWY20], [KOS15], see `crypto.oblivious_transfer`.  [ALSZ13] Asharov et al., CCS 2013: correlated
transfers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, final

import numpy as np

from cloister.arrays import U8, U64, Array
from cloister.errors import ParameterError, ProtocolAbort
from cloister.mpc.crypto import oblivious_transfer as local
from cloister.mpc.crypto.entropy import Entropy
from cloister.mpc.net import wire
from cloister.mpc.net.channel import Channel
from cloister.mpc.net.wire import message
from cloister.study import Party

NAME = "oblivious_transfer"
SEED = 32
Words = Array  # uint16 or uint32


@dataclass(frozen=True, slots=True)
class Params:
    sender: Party
    receiver: Party
    count: int  # transfers, a multiple of 8
    width: int  # words of each
    word: int = 2  # bytes of a word

    def __post_init__(self) -> None:
        if self.sender == self.receiver or self.width < 1 or self.word not in (2, 4):
            raise ParameterError("a transfer needs two parties, and words of 2 or 4 bytes")
        local.check_count(self.count)

    @property
    def dtype(self) -> np.dtype[Any]:
        return np.dtype(f"<u{self.word}")


@message("O1")
class BaseOffer:  # R → S
    point: bytes


@message("O2")
class BaseReplies:  # S → R
    points: tuple[bytes, ...]


@message("O3")
class Extension:  # R → S
    u: U8  # (128, m'/8)


@message("O3")
class Challenge:  # S → R
    seed: bytes


@message("O3")
class Answer:  # R → S
    sums: U64  # (129,)


@message("O4")
class Corrections:  # S → R
    data: U8  # (m · width · word,)


def ideal(params: Params, xs: Mapping[Party, Any]) -> dict[Party, Words]:
    """For m = 0: what the parties hold differs by what the choices say; see the tests."""
    x, delta = np.asarray(xs[params.receiver]), np.asarray(xs[params.sender])
    return {params.sender: np.zeros_like(delta), params.receiver: x[:, None].astype(delta.dtype) * delta}


def roles(params: Params) -> dict[Party, object]:
    return {params.sender: sender, params.receiver: receiver}


def cost(params: Params) -> dict[Party, tuple[int, int]]:
    down = local.BASE * local.POINT + params.count * params.width * params.word
    up = local.POINT + 16 * local.extended(params.count) + 8 * (local.BASE + 1)
    return {params.sender: (3, down + SEED), params.receiver: (3, up)}


def _context(ch: Channel) -> bytes:
    return wire.canonical([NAME, ch.run_id])


@final
class Sender:
    """S, for any number of batches."""

    def __init__(self, ch: Channel, peer: Party, extension: local.ExtensionSender, entropy: Entropy) -> None:
        self._ch, self._peer, self._extension, self._entropy = ch, peer, extension, entropy
        self._pads, self._done = local.Pads(_context(ch)), 0

    @classmethod
    async def meet(cls, ch: Channel, peer: Party, entropy: Entropy) -> Sender:
        offer = (await ch.recv(peer, BaseOffer)).point  # O1
        s = entropy.prg().bits(local.BASE)
        replies, chosen = local.base_receive(offer, s, _context(ch), entropy)
        await ch.send(peer, BaseReplies(tuple(replies)))  # O2
        return cls(ch, peer, local.ExtensionSender(s, chosen), entropy)

    async def transfer(self, delta: Words) -> Words:
        """δ (m, width) → m (m, width)."""
        m, width = delta.shape
        local.check_count(m)
        u = (await self._ch.recv(self._peer, Extension, u=(local.BASE, local.extended(m) // 8))).u  # O3
        q = self._extension.extend(u, m)
        seed = self._entropy.bytes(SEED)
        await self._ch.send(self._peer, Challenge(seed))
        self._extension.check(seed, (await self._ch.recv(self._peer, Answer, sums=(local.BASE + 1,))).sums)
        base: Words = self._pads.pad(q, self._done, width, delta.dtype)
        d = base + delta - self._pads.pad(q ^ self._extension.s, self._done, width, delta.dtype)
        await self._ch.send(self._peer, Corrections(np.ascontiguousarray(d).view(np.uint8).reshape(-1)))  # O4
        self._done += m
        return base


@final
class Receiver:
    """R, for any number of batches."""

    def __init__(self, ch: Channel, peer: Party, extension: local.ExtensionReceiver, entropy: Entropy) -> None:
        self._ch, self._peer, self._extension, self._entropy = ch, peer, extension, entropy
        self._pads, self._done = local.Pads(_context(ch)), 0

    @classmethod
    async def meet(cls, ch: Channel, peer: Party, entropy: Entropy) -> Receiver:
        base = local.BaseSender(entropy)
        await ch.send(peer, BaseOffer(base.point))  # O1
        replies = (await ch.recv(peer, BaseReplies)).points  # O2
        if len(replies) != local.BASE:
            raise ProtocolAbort(NAME, "O2", "malformed", f"{len(replies)} base transfers, {local.BASE} were due")
        return cls(ch, peer, local.ExtensionReceiver(*base.keys(list(replies), _context(ch))), entropy)

    async def transfer(self, choices: U8, width: int, dtype: np.dtype[Any]) -> Words:
        """X (m,) → m + x δ (m, width)."""
        m = len(choices)
        u, t = self._extension.extend(choices, self._entropy)
        await self._ch.send(self._peer, Extension(u))  # O3
        seed = (await self._ch.recv(self._peer, Challenge)).seed
        if len(seed) != SEED:
            raise ProtocolAbort(NAME, "O3", "malformed", f"a seed has {SEED} bytes, found {len(seed)}")
        await self._ch.send(self._peer, Answer(self._extension.answer(seed)))
        data = (await self._ch.recv(self._peer, Corrections, data=(m * width * dtype.itemsize,))).data  # O4
        d: Words = np.ascontiguousarray(data).view(dtype).reshape(m, width)
        out: Words = self._pads.pad(t, self._done, width, dtype) + choices[:, None].astype(dtype) * d  # O5
        self._done += m
        return out


async def sender(ch: Channel, params: Params, delta: Words, *, entropy: Entropy) -> Words:
    if delta.shape != (params.count, params.width) or delta.dtype != params.dtype:
        raise ParameterError(f"expected differences {(params.count, params.width)}, found {delta.shape} {delta.dtype}")
    return await (await Sender.meet(ch, params.receiver, entropy)).transfer(delta)


async def receiver(ch: Channel, params: Params, choices: U8, *, entropy: Entropy) -> Words:
    if choices.shape != (params.count,) or (choices > 1).any():
        raise ParameterError(f"expected {params.count} choices of 0 or 1, found shape {choices.shape}")
    return await (await Receiver.meet(ch, params.sender, entropy)).transfer(choices, params.width, params.dtype)
