"""The affine tags modulo 2^89 - 1, whose two words the secure sum added separately: sums of words carry."""

from __future__ import annotations

import numpy as np

from cloister.errors import ProtocolAbort
from cloister.mpc.crypto.agreement import bind, hkdf
from cloister.mpc.crypto.prg import Prg
from cloister.mpc.sums import checked_sum, secure_sum

PRIME, HALF = (1 << 89) - 1, 44


def split(value):
    return np.array([value % PRIME >> HALF, value % PRIME & ((1 << HALF) - 1)], np.uint64)


def exact(alpha, x):
    """Σ_j α_j x_j as an integer."""
    return sum(int(a) * int(v) for a, v in zip(alpha, x.view(np.int64), strict=True))


class Key:
    def __init__(self, key, summands, length):
        stream = Prg(key)
        self.beta = [int.from_bytes(stream.bytes(24), "little") % PRIME for _ in range(summands)]
        self.alpha = stream.uint64(length)

    def tag(self, x, u):
        return split(self.beta[u] + exact(self.alpha, x))

    def accepts(self, z, sums):
        high, low = (int(w) for w in sums)
        return np.array_equal(split((high << HALF) + low), split(sum(self.beta) + exact(self.alpha, z)))


def key_of(ch, params, secret):
    return Key(hkdf(secret, bind(checked_sum.NAME, ch.run_id)), len(params.sites), params.length)


def sums(params):
    return secure_sum.Params(params.sites, params.coordinator, params.words, len(params.sites), to_all=True)


async def site(ch, params, x, seed, *, entropy, identity):
    key = key_of(ch, params, seed.secret)
    words = np.concatenate([x, key.tag(x, params.sites.index(ch.me))])
    opened = await secure_sum.contributor(ch, sums(params), words, entropy=entropy, identity=identity)
    z, t = opened.z[: params.length].copy(), opened.z[params.length :]
    if not key.accepts(z, t):
        raise ProtocolAbort(checked_sum.NAME, "L3", "changed", "")
    return z


async def coordinator(ch, params):
    return (await secure_sum.aggregator(ch, sums(params))).z[: params.length].copy()
