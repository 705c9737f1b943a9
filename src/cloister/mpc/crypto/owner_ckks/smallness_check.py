"""Whether a message that its reader alone can open is small, told to the one who sent it: a mask, and its leading part.

    cover     ⌊c / D⌉ + M at two primes, re-randomised; M uniform modulo Q, so the reader sees uniform numbers
    cells     ⌊(W + h·2^21) / 2^22⌋ of what is read, W, and of M: the same where the message is below 2^20, if the
              shift h (0 or 1) was chosen so that M lies no nearer than 2^20 to the edge of its cell

The reader commits itself to the cells for both shifts (`Leaves`) before it is told h: what it could find out from how
W lies in a cell would come too late. h tells it one bit a coefficient of the message at most. It opens the cells for h,
and no others: the one who sent knows these already, if the message is small.
"""

from __future__ import annotations

import hashlib
import hmac
from typing import final

import numpy as np

from cloister.arrays import U8, U64
from cloister.mpc.crypto.entropy import Entropy
from cloister.mpc.crypto.owner_ckks.packed_refresh import pairs_of
from cloister.mpc.crypto.owner_ckks.scheme import Cts, Evaluator, OwnerKey, modulus, random_below, ring_of

SENT = 2  # primes
CELL = 22  # bits
ROOM = CELL - 2  # of a message that is small
SALT, LEAF = 16, 32  # bytes


def cover(ev: Evaluator, cts: Cts, entropy: Entropy) -> tuple[Cts, U64]:
    """What is sent of ciphertexts (n, 2, k, N), and M, (n, N)."""
    r, prg, N = ev.ring, entropy.prg(), ev.params.degree
    out, masks = np.empty((len(cts), 2, SENT, N), np.uint32), np.empty((len(cts), N), np.uint64)
    for i, ct in enumerate(cts.copy()):
        ev.rerandomise(ct, prg)
        for h in range(2):
            out[i, h] = pairs_of(ev.params).drop(r.backward(ct[h]), SENT)
        words = random_below(prg, modulus(ev.params, SENT), N)
        r.add_words(out[i, 0], words)
        for h in range(2):
            r.forward(out[i, h])
        masks[i] = joined(words)
    return out, masks


def uncover(key: OwnerKey, cts: Cts) -> U64:
    """W, (n, N)."""
    return np.stack([joined(ring_of(key.params).to_words(key._opened(ct))) for ct in cts])


def joined(words: np.ndarray) -> U64:
    low, high = words.astype(np.uint64)
    return np.asarray(low | high << np.uint64(32))


def shifts(masks: U64) -> U8:
    """The shift of every mask."""
    within = masks & np.uint64((1 << CELL) - 1)
    return np.asarray((within < 1 << ROOM) | (within >= 3 << ROOM), np.uint8)


def cells(x: U64, h: U8 | int) -> U64:
    """Where x lies, on the grid for h."""
    return np.asarray((x + (np.asarray(h, np.uint64) << np.uint64(CELL - 1))) >> np.uint64(CELL))


@final
class Leaves:
    """A commitment to numbers, two at every place, of which one each is opened."""

    __slots__ = ("_leaves", "_salts")

    def __init__(self, numbers: tuple[U64, U64], entropy: Entropy) -> None:
        flat = [np.ascontiguousarray(x, "<u8").reshape(-1) for x in numbers]
        salts = np.frombuffer(entropy.prg().bytes(2 * len(flat[0]) * SALT), np.uint8)
        self._salts = salts.reshape(2, len(flat[0]), SALT)
        self._leaves = np.stack([leaves(s, x) for s, x in zip(self._salts, flat, strict=True)])

    def __repr__(self) -> str:
        return "Leaves(...)"

    @property
    def seal(self) -> bytes:
        return root(self._leaves)

    def open(self, which: U8) -> tuple[U8, U8]:
        """Salts of the numbers that are opened, and leaves of the others."""
        at, which = np.arange(which.size), which.reshape(-1).astype(np.intp)
        return self._salts[which, at], self._leaves[1 - which, at]


def opens(seal: bytes, opened: tuple[U8, U8], which: U8, numbers: U64) -> bool:
    """Whether a commitment holds these numbers at the places `which`."""
    salts, others = opened
    n = which.size
    if salts.shape != (n, SALT) or others.shape != (n, LEAF):
        return False
    at, which = np.arange(n), which.reshape(-1).astype(np.intp)
    both = np.empty((2, n, LEAF), np.uint8)
    both[which, at] = leaves(salts, np.ascontiguousarray(numbers, "<u8").reshape(-1))
    both[1 - which, at] = others
    return hmac.compare_digest(seal, root(both))


def leaves(salts: U8, numbers: U64) -> U8:
    rows = np.concatenate([salts, numbers[:, None].view(np.uint8)], axis=1).tobytes()
    size, sha = SALT + 8, hashlib.sha256
    joined = b"".join([sha(rows[i : i + size]).digest() for i in range(0, len(rows), size)])
    return np.frombuffer(joined, np.uint8).reshape(-1, LEAF)


def root(both: U8) -> bytes:
    return hashlib.sha256(b"cloister cells of a cover\0" + both.tobytes()).digest()
