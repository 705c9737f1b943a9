"""The old step of `checked_sum`: linear tags without an additive key, modulo a prime below 2^64 (finding F1)."""

from __future__ import annotations

import numpy as np

from cloister.arrays import U64
from cloister.errors import ProtocolAbort
from cloister.mpc.crypto.agreement import bind, hkdf
from cloister.mpc.crypto.prg import expand
from cloister.mpc.sums import checked_sum

PRIME = MODULUS = (1 << 61) - 1
HALF = 31
_P, _32, _29, _61, _3 = (np.uint64(v) for v in (PRIME, 32, 29, 61, 3))
_LOW32, _LOW29 = np.uint64((1 << 32) - 1), np.uint64((1 << 29) - 1)


def tag(x: U64, key: bytes) -> U64:
    """The tag of a vector of signed 64-bit integers, as two words."""
    value = _dot(_fold(expand(key, len(x))), _residues(x))
    return np.array([value >> HALF, value & ((1 << HALF) - 1)], dtype=np.uint64)


def check_tag(total: U64, tags: U64, key: bytes) -> bool:
    """Whether `tags`, the sum of the summands' tags, is the tag of `total`."""
    high, low = (int(word) for word in tags)
    return ((high << HALF) + low) % PRIME == _dot(_fold(expand(key, len(total))), _residues(total)) % PRIME


def _residues(x: U64) -> U64:
    signed = x.view(np.int64)
    return np.where(signed < 0, _P - _fold((-signed).view(np.uint64)), _fold(x))


def _fold(x: U64) -> U64:
    """Modulo p, up to p itself."""
    once = (x >> _61) + (x & _P)
    return (once >> _61) + (once & _P)


def _dot(a: U64, b: U64) -> int:
    """Σ a_j b_j mod p, by halves of 32 bits: 2^61 is 1 and 2^64 is 8 modulo p."""
    a1, a0, b1, b0 = a >> _32, a & _LOW32, b >> _32, b & _LOW32
    middle = a1 * b0 + a0 * b1  # below 2^62
    parts = ((a1 * b1) << _3) + (middle >> _29) + ((middle & _LOW29) << _32) + _fold(a0 * b0)
    product = _fold(parts)
    return (int((product >> _32).sum()) * (1 << 32) + int((product & _LOW32).sum())) % PRIME


# ---- the roles of checked_sum with these tags ------------------------------------------------------------------------


async def site(ch, params, x, seed):
    key = hkdf(seed.secret, bind(checked_sum.NAME, ch.run_id))
    words = checked_sum.masked(params, ch.run_id, ch.me, np.concatenate([x, tag(x, key)]), seed)
    await ch.send(params.coordinator, checked_sum.Masked(words))
    total = (await ch.recv_broadcast(params.coordinator, checked_sum.Total, z=(params.words,))).z
    z, tags = total[: params.length].copy(), total[params.length :]
    if not check_tag(z, tags, key):
        raise ProtocolAbort(checked_sum.NAME, "L4", "changed", "the coordinator told another sum")
    return z


coordinator = checked_sum.coordinator
