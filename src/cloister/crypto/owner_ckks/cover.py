"""A small message under a mask of which its reader finds the higher part, and so shows that the message was small.

    cover     ⌊c / D⌉ + z·2^32 + y at few primes, re-randomised; z uniform, y uniform in [2^30, 3·2^30)
    uncover   z, the higher word, if the message was below 2^30; if it was 2^32 or more, another number

Between the two it depends on y. Who reads learns one bit of a message at most, as long as it finds z: y + message lies
within 2^32 then, and y is uniform on half as much.
"""

from __future__ import annotations

import numpy as np

from cloister.arrays import U32
from cloister.crypto.entropy import Entropy
from cloister.crypto.owner_ckks.pairs import pairs_of
from cloister.crypto.owner_ckks.scheme import Cts, Evaluator, OwnerKey, modulus, ring_of


def cover(ev: Evaluator, cts: Cts, keep: int, entropy: Entropy) -> tuple[Cts, U32]:
    """What is sent of ciphertexts (n, 2, k, N), and z, (n, N)."""
    r, prg, N = ev.ring, entropy.prg(), ev.params.degree
    out = np.empty((len(cts), 2, keep, N), np.uint32)
    high = prg.below(modulus(ev.params, keep) >> 32, (len(cts), N)).astype(np.uint32)
    for i, ct in enumerate(cts.copy()):
        ev.rerandomise(ct, prg)
        low = np.uint32(1 << 30) + (prg.uint32(N) >> np.uint32(1))
        for h in range(2):
            out[i, h] = pairs_of(ev.params).drop(r.backward(ct[h]), keep)
        r.add_words(out[i, 0], np.stack([low, high[i]]))
        for h in range(2):
            r.forward(out[i, h])
    return out, high


def uncover(key: OwnerKey, cts: Cts) -> U32:
    return np.stack([ring_of(key.params).to_words(key._opened(ct))[1] for ct in cts])
