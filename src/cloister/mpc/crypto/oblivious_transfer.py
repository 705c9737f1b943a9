"""Arithmetic of oblivious transfer that needs no other party: base transfers, and their extension to millions.

    base        sender a, A = aG; receiver R = bG + cA; keys H(i, A, R, aR) and H(i, A, R, aR - aA); of these the
                receiver knows H(i, A, R, bA), which is the one that c chooses [CO15]
    extension   128 base transfers with the roles turned round: the receiver holds k0_i, k1_i, the sender s and k_{s_i};
                u_i = G(k0_i) ⊕ G(k1_i) ⊕ x goes to the sender, and row t of the transposed streams is, at the receiver,
                t_t, and at the sender q_t = t_t ⊕ x_t s [IKNP03]
    check       the receiver adds at least 128 random choices. The sender draws weights ε for the words of a column,
                after u; the receiver says x̃ = Σ ε_w x_w and t̃_i = Σ ε_w t_{i,w} over GF(2^64) for all columns i, and
                the sender checks t̃_i ⊕ s_i x̃ = Σ ε_w q_{i,w}: for all i only if one x went into all u_i
    pads        F(t, y) for y = q_t, q_t ⊕ s at the sender and t_t at the receiver: as long as asked for

F is the hash π(π(y) ⊕ (t, block)) ⊕ π(y), TMMO of [GKWY20], with π = AES-128 under a public key that is bound to the
run: correlation robust if π is an ideal permutation. The group is that of Ed25519, through libsodium (PyNaCl); G is
AES-256 in counter mode (`prg`). A receiver that uses different choices in c columns passes the check with probability
2^-c (it has to guess c bits of s) and 2^-64; what it says in the check is hidden by the random choices.

References
----------
[CO15] Chou, Orlandi, LATINCRYPT 2015.  [IKNP03] Ishai, Kilian, Nissim, Petrank, CRYPTO 2003.
[GKWY20] Guo, Katz, Wang, Yu, IEEE S&P 2020, section 7.4.  [KOS15] Keller, Orsini, Scholl, CRYPTO 2015: the check.
[Roy22] Roy, CRYPTO 2022, section 4: the check by columns and a universal hash, which is the one used here.
"""

from __future__ import annotations

import hashlib
from typing import Any, final

import numpy as np
import numpy.typing as npt
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

from cloister.arrays import U8, U64, Array
from cloister.errors import MissingExtra, ParameterError, ProtocolAbort
from cloister.mpc.crypto import gf64
from cloister.mpc.crypto.agreement import bind
from cloister.mpc.crypto.entropy import Entropy, check_entropy
from cloister.mpc.crypto.prg import Prg

BASE = 128  # base transfers: bits of s, and of security
POINT = 32  # bytes
EXTRA = 128  # random choices that hide the others in the check
NAME = "oblivious_transfer"


def _group() -> Any:
    try:
        from nacl import bindings
    except ImportError:
        raise MissingExtra("PyNaCl", "ot") from None
    return bindings


def _scalar(entropy: Entropy) -> bytes:
    reduced: bytes = _group().crypto_core_ed25519_scalar_reduce(entropy.bytes(64))
    return reduced


def check_point(point: bytes, line: str) -> bytes:
    """Raise unless these bytes are a point of the prime-order group."""
    if len(point) != POINT or not _group().crypto_core_ed25519_is_valid_point(point):
        raise ProtocolAbort(NAME, line, "bad-key", "expected a point of the group, found something else")
    return point


def _key(context: bytes, i: int, *points: bytes) -> bytes:
    return hashlib.sha256(bind("base-transfer", context, i.to_bytes(4, "big"), *points)).digest()


# ---- base transfers --------------------------------------------------------------------------------------------------


@final
class BaseSender:
    """Knows both keys of every base transfer."""

    __slots__ = ("_a", "point")

    def __init__(self, entropy: Entropy) -> None:
        check_entropy(entropy)
        self._a = _scalar(entropy)
        self.point: bytes = _group().crypto_scalarmult_ed25519_base_noclamp(self._a)  # A

    def keys(self, replies: list[bytes], context: bytes) -> tuple[list[bytes], list[bytes]]:
        g, A = _group(), self.point
        aA = g.crypto_scalarmult_ed25519_noclamp(self._a, A)
        first, second = [], []
        for i, R in enumerate(replies):
            aR = g.crypto_scalarmult_ed25519_noclamp(self._a, check_point(R, "O2"))
            first.append(_key(context, i, A, R, aR))
            second.append(_key(context, i, A, R, g.crypto_core_ed25519_sub(aR, aA)))
        return first, second


def base_receive(A: bytes, choices: U8, context: bytes, entropy: Entropy) -> tuple[list[bytes], list[bytes]]:
    """Replies R_i, and the key that each choice gives."""
    check_entropy(entropy)
    g = _group()
    check_point(A, "O1")
    replies, keys = [], []
    for i, c in enumerate(choices):
        b = _scalar(entropy)
        plain = g.crypto_scalarmult_ed25519_base_noclamp(b)
        shifted = g.crypto_core_ed25519_add(A, plain)  # both are computed, whatever c is
        R = (plain, shifted)[int(c)]
        replies.append(R)
        keys.append(_key(context, i, A, R, g.crypto_scalarmult_ed25519_noclamp(b, A)))
    return replies, keys


# ---- extension -------------------------------------------------------------------------------------------------------


def transpose(rows: U8) -> U8:
    """Bits (128, m/8) to (m, 16), in pieces that stay in the cache."""
    m = rows.shape[1] * 8
    out = np.empty((m, BASE // 8), np.uint8)
    for c in range(0, rows.shape[1], 1024):
        bits = np.unpackbits(rows[:, c : c + 1024], axis=1, bitorder="little")
        out[8 * c : 8 * c + bits.shape[1]] = np.packbits(bits.T, axis=1, bitorder="little")
    return out


def check_count(m: int) -> None:
    if m < 1 or m % 8:
        raise ParameterError(f"transfers come in multiples of 8, found {m}")


def extended(m: int) -> int:
    """Choices of one batch with those that hide them, in whole words."""
    return -(-m // 64) * 64 + EXTRA


def weigh(columns: U8, seed: bytes) -> U64:
    """Σ ε_w c_w of every column, over GF(2^64)."""
    words = np.ascontiguousarray(columns).view(np.uint64)
    eps = Prg(seed).uint64(words.shape[1])
    return np.array([gf64.dot(column, eps) for column in words], np.uint64)


@final
class ExtensionReceiver:
    __slots__ = ("_columns", "_first", "_second")

    def __init__(self, first: list[bytes], second: list[bytes]) -> None:
        self._first, self._second = [Prg(k) for k in first], [Prg(k) for k in second]

    def extend(self, choices: U8, entropy: Entropy) -> tuple[U8, U8]:
        """U (128, m'/8) for the sender, and rows t_t (m, 16)."""
        m = len(choices)
        check_count(m)
        extra = entropy.prg().bits(extended(m) - m)
        x = np.packbits(np.concatenate([choices, extra]), bitorder="little")
        t = np.stack([p.uint8(len(x)) for p in self._first])
        u = np.stack([p.uint8(len(x)) for p in self._second])
        u ^= t
        u ^= x
        self._columns = np.vstack([x[None], t])
        return u, transpose(t)[:m]

    def answer(self, seed: bytes) -> U64:
        """X̃, and t̃ of all columns, of the last batch."""
        return weigh(self._columns, seed)


@final
class ExtensionSender:
    __slots__ = ("_chosen", "_columns", "_s", "s")

    def __init__(self, s: U8, chosen: list[bytes]) -> None:
        self._s, self._chosen = s, [Prg(k) for k in chosen]
        self.s: U8 = np.packbits(s, bitorder="little")  # (16,)

    def extend(self, u: U8, m: int) -> U8:
        """Rows q_t (m, 16) from the receiver's u."""
        q = np.stack([p.uint8(u.shape[1]) for p in self._chosen])
        q ^= u * self._s[:, None]
        self._columns = q
        return transpose(q)[:m]

    def check(self, seed: bytes, answer: U64) -> None:
        """Raise unless the receiver used the same choices in all columns of the last batch."""
        x, t = answer[0], answer[1:]
        if (t ^ x * self._s.astype(np.uint64) != weigh(self._columns, seed)).any():
            raise ProtocolAbort(NAME, "O3", "mismatch", "the receiver's choices differ between columns")


@final
class Pads:
    """F(t, y): pads of any length for rows y that are numbered t."""

    __slots__ = ("_aes",)

    def __init__(self, context: bytes) -> None:
        key = hashlib.sha256(bind("pads", context)).digest()[:16]
        self._aes = Cipher(algorithms.AES(key), modes.ECB()).encryptor()

    def _permute(self, blocks: U64) -> U64:
        return np.frombuffer(self._aes.update(np.ascontiguousarray(blocks).view(np.uint8).data), np.uint64).reshape(
            blocks.shape
        )

    def pad(self, rows: U8, first: int, width: int, dtype: npt.DTypeLike) -> Array:
        """(m, width) words for rows numbered first, first + 1, ..."""
        item = np.dtype(dtype).itemsize
        count = -(-width * item // 16)
        y = self._permute(np.ascontiguousarray(rows).view(np.uint64))  # (m, 2)
        tweak = np.empty((len(rows), count, 2), np.uint64)
        tweak[..., 0] = y[:, None, 0] ^ (np.uint64(first) + np.arange(len(rows), dtype=np.uint64))[:, None]
        tweak[..., 1] = y[:, None, 1] ^ np.arange(count, dtype=np.uint64)[None, :]
        out = self._permute(tweak) ^ y[:, None, :]
        return out.reshape(len(rows), count * 2).view(dtype)[:, :width]
