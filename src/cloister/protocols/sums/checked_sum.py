"""Checked sum: all sites learn the sum of their vectors, and notice if the coordinator tells them another one.

    L1   u       t_u = Σ_j α_j x_uj mod p     α from a secret of the sites (`common_seed`) and this sum's id
    L2   u, S    secure sum of (x_u, t_u), to all: z, t     all sites or none, t = n of `secure_sum`
    L3   u       Σ_j α_j z_j = t mod p        else abort: the sum was changed

Reveals
-------
coordinator, site : z, the sum over all sites. With two sites: the other's vector, by subtraction.
lying coordinator : the same. It cannot tell the sites another sum, so it cannot choose what they compute from it.
one lying site : z, of which its own part is whatever it likes.
coordinator with k sites : the sum over the others. With one site it has α too, and can tell the rest any sum.

Assumes
-------
What the secure sum assumes with t = n: a site that stops ends the run. The sum of all vectors does not wrap, as signed
integers of 64 bits.

Cost
----
A secure sum of m + 2 words to all.

References
----------
[BIK+17] the sum. The check is the linear tag of [BDOZ11], with one key for all. Lines numbered here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from cloister.arrays import U64
from cloister.crypto.agreement import Identity, bind, hkdf
from cloister.crypto.entropy import Entropy
from cloister.crypto.sum_tags import check_tag, tag
from cloister.errors import ProtocolAbort
from cloister.net.channel import Channel
from cloister.protocols.sums import secure_sum
from cloister.study import Party

NAME = "checked_sum"


@dataclass(frozen=True, slots=True)
class Params:
    sites: tuple[Party, ...]
    coordinator: Party
    length: int  # m

    @property
    def sum(self) -> secure_sum.Params:
        return secure_sum.Params(self.sites, self.coordinator, self.length + 2, len(self.sites), to_all=True)


def ideal(params: Params, xs: Mapping[Party, tuple[U64, bytes]]) -> dict[Party, U64]:
    total: U64 = np.sum(np.stack([x for x, _ in xs.values()]), axis=0, dtype=np.uint64)
    return dict.fromkeys((params.coordinator, *xs), total)


def roles(params: Params) -> dict[Party, object]:
    return {params.coordinator: coordinator} | dict.fromkeys(params.sites, site)


def cost(params: Params) -> dict[Party, tuple[int, int]]:
    return secure_sum.cost(params.sum)


async def site(ch: Channel, params: Params, x: U64, secret: bytes, *, entropy: Entropy, identity: Identity) -> U64:
    """Be u; `secret` is known to all sites and to nobody else."""
    key = hkdf(secret, bind(NAME, ch.run_id))
    words = np.concatenate([x, tag(x, key)])  # L1
    opened = await secure_sum.contributor(ch, params.sum, words, entropy=entropy, identity=identity)  # L2
    if opened is None or set(opened.survivors) != set(params.sites):
        raise ProtocolAbort(NAME, "L2", "survivors", "the sum is not of all sites")
    z, tags = opened.z[: params.length].copy(), opened.z[params.length :]
    if not check_tag(z, tags, key):
        raise ProtocolAbort(NAME, "L3", "changed", "the coordinator told another sum than that of the sites")
    return z


async def coordinator(ch: Channel, params: Params) -> U64:
    """Be S."""
    return (await secure_sum.aggregator(ch, params.sum)).z[: params.length].copy()  # L2
