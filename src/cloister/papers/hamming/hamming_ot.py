"""Hamming distances of two sites by oblivious transfer (engine `ot`): SHADE, with one transfer for all points of one.

    L1   R ↔ S   a correlated transfer for point x of R and bit l: choice x_l, differences 1 - 2y_l for the points of S
    L2   S       its share: Σ_l y_l - Σ_l m_l        for every pair (x, y), modulo 2^κ
    L3   R       its share: Σ_l (m_l + x_l (1 - 2y_l))
         so that the shares add up to Σ_l (y_l + x_l (1 - 2y_l)) = Σ_l x_l ⊕ y_l

Shares are modulo a power of two above L: modulo L, as printed, a point and its antipode would look identical. The
printed protocol makes a transfer for every pair and bit; here one for every point of R and bit carries a vector.
R is the site with fewer points.

Reveals
-------
each site : a share that is uniform by itself; how many points the other has.
who carries the frames : nothing.

Assumes
-------
What `oblivious_transfer` assumes. A site that lies changes its own summand, which is its word, and learns nothing.

Cost
----
With n_R ≤ n_S: 16 n_R L bytes from R, 2 n_R n_S L from S (4 n_R n_S L above L = 2^14); base transfers 4 kB.

References
----------
[BCP13] Bringer, Chabanne, Patey, SHADE, FC 2013.  [SYL24] section 3.2, OT-based. Lines numbered here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from cloister.arrays import U8
from cloister.mpc.crypto import oblivious_transfer as transfer
from cloister.mpc.crypto.entropy import Entropy
from cloister.mpc.crypto.replicated import Words
from cloister.mpc.net.channel import Channel
from cloister.papers.hamming import oblivious_transfer
from cloister.study import Party
from cloister.workflows.propagate_labels import shared_codes
from cloister.workflows.propagate_labels.shared_codes import Pair, ring_of

NAME = "hamming_ot"
BATCH = 1 << 24  # words of corrections at once


@dataclass(frozen=True, slots=True)
class Params(Pair):
    @property
    def receiver(self) -> Party:
        return self.fewer

    @property
    def sender(self) -> Party:
        return self.other

    @property
    def dtype(self) -> np.dtype[Any]:
        return np.dtype("<u2" if ring_of(self.bits).bits <= 16 else "<u4")

    @property
    def step(self) -> int:
        """Points of R in one batch."""
        return max(1, BATCH // (self.bits * self.size(self.sender)))


ideal = shared_codes.pair_ideal


def roles(params: Params) -> dict[Party, Any]:
    return {params.first: share, params.second: share}


def cost(params: Params) -> dict[Party, tuple[int, int]]:
    n_r, n_s, L = params.size(params.receiver), params.size(params.sender), params.bits
    batches = [min(params.step, n_r - start) for start in range(0, n_r, params.step)]
    up = sum(16 * transfer.extended(count * L) + 8 * (transfer.BASE + 1) for count in batches)
    down = n_r * n_s * L * params.dtype.itemsize + oblivious_transfer.SEED * len(batches)
    return {
        params.sender: (1 + 2 * len(batches), 4096 + down),
        params.receiver: (1 + 2 * len(batches), 32 + up),
    }


async def share(ch: Channel, params: Params, packed: U8, *, entropy: Entropy) -> Words:
    """Either part; returns this site's summand (n_me, n_other) of the distances modulo 2^κ."""
    params.check_codes(ch.me, packed)
    return await (_receive if ch.me == params.receiver else _send)(ch, params, packed, entropy)


async def _send(ch: Channel, params: Params, packed: U8, entropy: Entropy) -> Words:
    n_r, ring, dtype = params.size(params.receiver), ring_of(params.bits), params.dtype
    link = await oblivious_transfer.Sender.meet(ch, params.receiver, entropy)
    y = np.unpackbits(packed, axis=1)  # (n_S, L)
    delta = (1 - 2 * y.astype(np.int8)).T.astype(dtype)  # (L, n_S)
    ones = y.sum(axis=1, dtype=dtype)
    out = np.empty((len(packed), n_r), dtype)
    for start in range(0, n_r, params.step):
        count = min(params.step, n_r - start)
        base = await link.transfer(np.tile(delta, (count, 1)))  # L1
        sums = base.reshape(count, params.bits, -1).sum(axis=1, dtype=dtype)
        out[:, start : start + count] = (ones[None, :] - sums).T  # L2
    return out.astype(ring.dtype)


async def _receive(ch: Channel, params: Params, packed: U8, entropy: Entropy) -> Words:
    n_s, ring, dtype = params.size(params.sender), ring_of(params.bits), params.dtype
    link = await oblivious_transfer.Receiver.meet(ch, params.sender, entropy)
    out = np.empty((len(packed), n_s), dtype)
    for start in range(0, len(packed), params.step):
        x = np.unpackbits(packed[start : start + params.step], axis=1)
        got = await link.transfer(x.reshape(-1), n_s, dtype)  # L1
        out[start : start + len(x)] = got.reshape(len(x), params.bits, n_s).sum(axis=1, dtype=dtype)  # L3
    return out.astype(ring.dtype)
