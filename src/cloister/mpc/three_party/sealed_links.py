"""Sealed links of verified sharing: keys between the members, and messages that nobody in between can change.

    V1   i ↔ j    pk_i, σ_i      X25519 keys, signed. A key for each direction of every link, and k_i of i and i - 1

Every message is a box under the key of its direction (AES-256-GCM), numbered and bound to its kind; one that was
altered, repeated or moved ends the run.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Self

import numpy as np
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from cloister.arrays import U8
from cloister.errors import ParameterError, ProtocolAbort
from cloister.mpc.crypto.agreement import Identity, KeyPair, agree, bind, hkdf, key_pair
from cloister.mpc.crypto.entropy import Entropy
from cloister.mpc.crypto.prg import Prg
from cloister.mpc.net import wire
from cloister.mpc.net.channel import Channel
from cloister.mpc.net.wire import message
from cloister.mpc.parties import Party
from cloister.mpc.sums.signatures import check_signed

NAME = "verified"
PART = 1 << 26  # bytes of one message at most; more travels in several
TAG = 16


@message("V1", protocol=NAME)
class Key:  # every computing party ↔ every member
    pk: bytes
    signature: bytes


def signed_key(run_id: bytes, party: Party, pk: bytes) -> bytes:
    return wire.canonical([NAME, run_id, party, pk])


def context(run_id: bytes, purpose: str, sender: Party, to: Party) -> bytes:
    return wire.canonical([NAME, purpose, run_id, sender, to])


def parts(size: int) -> list[int]:
    """The sizes in which so many bytes travel."""
    return [min(PART, size - start) for start in range(0, max(1, size), PART)]


class Box:
    """One direction of a link."""

    def __init__(self, key: bytes) -> None:
        self._cipher, self._count = AESGCM(key), 0

    def _nonce(self) -> bytes:
        self._count += 1
        return self._count.to_bytes(12, "big")

    def seal(self, data: U8, kind: str) -> U8:
        return np.frombuffer(
            self._cipher.encrypt(self._nonce(), np.ascontiguousarray(data).data, kind.encode()), np.uint8
        )

    def unseal(self, box: U8, kind: str) -> U8:
        return np.frombuffer(
            self._cipher.decrypt(self._nonce(), np.ascontiguousarray(box).data, kind.encode()), np.uint8
        )


class Links:
    """One member's ends of all links. `rank` is 0, 1, 2, or None for a member that only gives or gets.

    `prev` and `next` are the two other computing parties, i - 1 and i + 1.
    """

    def __init__(self, ch: Channel, computing: tuple[Party, Party, Party], entropy: Entropy) -> None:
        self.ch, self.computing, self.entropy = ch, computing, entropy
        self.rank = computing.index(ch.me) if ch.me in computing else None
        self._out: dict[Party, Box] = {}
        self._in: dict[Party, Box] = {}
        self._common: dict[int, bytes] = {}  # k_i and k_{i+1} at party i

    @classmethod
    async def meet(
        cls,
        ch: Channel,
        computing: tuple[Party, Party, Party],
        others: Iterable[Party],
        *,
        entropy: Entropy,
        identity: Identity,
    ) -> Self:
        """V1: agree on all keys; `others` give inputs or get results without computing."""
        if len(set(computing)) != 3:
            raise ParameterError(f"three different computing parties are needed, found {', '.join(computing)}")
        links = cls(ch, computing, entropy)
        peers = [p for p in (*computing, *(() if links.rank is None else others)) if p != ch.me]
        keys = key_pair(entropy)
        mine = Key(keys.public, identity.sign(f"{NAME}/key", signed_key(ch.run_id, ch.me, keys.public)))
        await ch.scatter(peers, mine)  # V1
        for p, theirs in (await ch.gather(peers, Key)).items():
            data = signed_key(ch.run_id, p, theirs.pk)
            check_signed(ch, p, f"{NAME}/key", data, theirs.signature, protocol=NAME, line="V1")
            links._agree(p, keys, theirs.pk)
        return links

    def _agree(self, p: Party, keys: KeyPair, pk: bytes) -> None:
        run_id, me = self.ch.run_id, self.ch.me
        self._out[p] = Box(agree(keys, pk, context(run_id, "link", me, p)))
        self._in[p] = Box(agree(keys, pk, context(run_id, "link", p, me)))
        for i in range(3):  # k_i belongs to i and i - 1
            if {p, me} == {self.computing[i], self.computing[i - 1]}:
                self._common[i] = agree(keys, pk, context(run_id, f"k{i}", self.computing[i], self.computing[i - 1]))

    def stream(self, i: int, purpose: str) -> Prg:
        """F(k_i) for one purpose: the same at parties i and i - 1."""
        return Prg(hkdf(self._common[i % 3], bind(NAME, purpose.encode())))

    @property
    def i(self) -> int:
        if self.rank is None:
            raise ParameterError(f"'{self.ch.me}' is none of the three computing parties")
        return self.rank

    @property
    def prev(self) -> Party:
        return self.computing[self.i - 1]

    @property
    def next(self) -> Party:
        return self.computing[(self.i + 1) % 3]

    async def send(self, to: Party, kind: Any, data: U8) -> None:
        start = 0
        for size in parts(data.size):
            box = self._out[to].seal(data[start : start + size], kind.__message__.name)
            await self.ch.send(to, kind(box))
            start += size

    async def gather(self, kind: Any, sizes: Mapping[Party, int]) -> dict[Party, U8]:
        """One message of each sender, of so many bytes; those of all arrive in one round."""
        spec, left = kind.__message__, {p: parts(size) for p, size in sizes.items()}
        pieces: dict[Party, list[U8]] = {p: [] for p in sizes}
        while left:
            for p, boxed in (await self.ch.gather(list(left), kind, data=(None,))).items():
                size = left[p].pop(0)
                if boxed.data.size != size + TAG:
                    sizes_differ = f"{boxed.data.size - TAG} bytes from '{p}', expected {size}"
                    raise ProtocolAbort(NAME, spec.line, "malformed", sizes_differ)
                try:
                    pieces[p].append(self._in[p].unseal(boxed.data, spec.name))
                except InvalidTag:
                    raise ProtocolAbort(NAME, spec.line, "bad-box", f"a message of '{p}' was altered") from None
            left = {p: rest for p, rest in left.items() if rest}
        return {p: got[0] if len(got) == 1 else np.concatenate(got) for p, got in pieces.items()}

    async def exchange(
        self, kind: Any, to_prev: U8 | None, to_next: U8 | None, from_prev: int | None, from_next: int | None
    ) -> tuple[U8, U8]:
        """One round among the three; a size of None means that nothing comes from there."""
        for to, data in ((self.prev, to_prev), (self.next, to_next)):
            if data is not None:
                await self.send(to, kind, data)
        sizes = {p: size for p, size in ((self.prev, from_prev), (self.next, from_next)) if size is not None}
        got = await self.gather(kind, sizes)
        none = np.empty(0, np.uint8)
        return got.get(self.prev, none), got.get(self.next, none)
