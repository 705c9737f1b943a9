"""Pooled accuracy: how often each of several models is right on inputs that the sites held out.

    L1  i ⇄ S   z = secure sum of (r_i1, …, r_ik, n_i)      r_ij right answers of model j on the n_i inputs of site i
    L2  all     z_j / z_{k+1}                               the share of all held-out inputs

Reveals
-------
coordinator, site : right answers of each model, and the number of inputs, over the sites that stayed; who they are.
    With n - 1 colluding sites: the last one's.

Assumes
-------
What `secure_sum` assumes.

Cost
----
That of a secure sum of k + 1 words.

References
----------
[AC17] Arvaniti, Claassen, Nature Communications 2017: several networks, the best by validation accuracy.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from cloister.arrays import F64, I64, U64
from cloister.crypto.agreement import Identity
from cloister.crypto.entropy import Entropy
from cloister.errors import DataError
from cloister.net.channel import Channel
from cloister.protocols.sums import secure_sum
from cloister.study import Party

NAME = "pooled_accuracy"


@dataclass(frozen=True, slots=True)
class Params:
    sites: tuple[Party, ...]
    coordinator: Party
    models: int  # k

    @property
    def sum(self) -> secure_sum.Params:
        return secure_sum.Params(self.sites, self.coordinator, self.models + 1, to_all=True)


def ideal(params: Params, counts: Mapping[Party, I64]) -> dict[Party, F64]:
    return dict.fromkeys((params.coordinator, *counts), shares(np.sum([*counts.values()], axis=0).astype(np.uint64)))


def roles(params: Params) -> dict[Party, object]:
    return {params.coordinator: coordinator} | dict.fromkeys(params.sites, site)


def cost(params: Params) -> dict[Party, tuple[int, int]]:
    return secure_sum.cost(params.sum)


def shares(z: U64) -> F64:
    """L2."""
    return z[:-1] / max(1, int(z[-1]))


async def site(ch: Channel, params: Params, counts: I64, *, entropy: Entropy, identity: Identity) -> F64:
    """`counts` are the right answers of every model, and the number of inputs."""
    if counts.shape != (params.models + 1,) or counts.min() < 0 or counts.max() > counts[-1]:
        raise DataError(f"expected right answers of {params.models} models and the number of inputs, none above it")
    words = counts.astype(np.uint64)
    summed = await secure_sum.contributor(ch.sub("sum"), params.sum, words, entropy=entropy, identity=identity)  # L1
    assert summed is not None
    return shares(summed.z)


async def coordinator(ch: Channel, params: Params) -> F64:
    z = (await secure_sum.aggregator(ch.sub("sum"), params.sum)).z  # L1
    what = f"right answers of {params.models} models"
    return shares(ch.reveal(z, to=(ch.me, *params.sites), line="L2", what=what, protocol=NAME))
