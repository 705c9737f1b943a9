"""Checked sum: all sites receive the sum of their vectors, and abort if the coordinator publishes another one.

    L1   u       t_u = β_u + Σ_j α_j x_uj mod 2^128    α, β from a secret of the sites and this sum's id
    L2   u, S    secure sum of (x_u, t_u), `wide`      all sites or none, t = n of `secure_sum`
         S ⇒ u   z = Σ_u x_u, t = Σ_u t_u mod 2^128
    L3   u       t = Σ_u β_u + Σ_j α_j z_j mod 2^128   otherwise abort: the sum was changed

The tag is affine, one-time, and in a ring larger than a word (`sum_tags`): a coordinator that publishes any z' ≠ z
with any tag is detected by each site except with probability 2^-64. Two sites that finish hold the same z. A protocol
in which anything else follows from the coordinator ends with `same_view`.

Reveals
-------
coordinator, site : z, the sum over all sites. With two sites: the other's vector, by subtraction.
malicious coordinator : the same. It cannot make a site accept another sum, so it cannot choose what the sites compute
    from it. It can end the run.
one malicious site : z, of which its own part is whatever it likes: checks of ranges are the caller's. It cannot make
    two honest sites accept different sums. A tag that does not fit its vector ends the run for all.
coordinator with k sites : the sum over the others. With one site it has α and β, and can make the rest accept any sum.

Assumes
-------
What the secure sum assumes with t = n: a site that drops out ends the run. The sum of all vectors does not wrap, as
signed integers of 64 bits; if it does, the run ends. One sum per channel (`Channel.claim`): its key is bound to the
channel's id.

Cost
----
A secure sum of m + 2 words to all; one expansion of m words, and 32 floating point operations a word and tag.

References
----------
[BIK+17] the sum. The check is the one-time affine tag of [CW81], which adds up as those of [BDOZ11], with one key for
all sites. Lines numbered here; the security argument is docs/security/checked_sum.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from cloister.arrays import U64
from cloister.crypto.agreement import Identity, bind, hkdf
from cloister.crypto.entropy import Entropy
from cloister.crypto.sum_tags import WORDS, check_tag, tag, tag_key
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
        return secure_sum.Params(self.sites, self.coordinator, self.length + WORDS, len(self.sites), to_all=True)


def ideal(params: Params, xs: Mapping[Party, tuple[U64, bytes]]) -> dict[Party, U64]:
    total: U64 = np.sum(np.stack([x for x, _ in xs.values()]), axis=0, dtype=np.uint64)
    return dict.fromkeys((params.coordinator, *xs), total)


def roles(params: Params) -> dict[Party, object]:
    return {params.coordinator: coordinator} | dict.fromkeys(params.sites, site)


def cost(params: Params) -> dict[Party, tuple[int, int]]:
    return secure_sum.cost(params.sum)


async def site(ch: Channel, params: Params, x: U64, secret: bytes, *, entropy: Entropy, identity: Identity) -> U64:
    """Be u; `secret` is known to all sites and to nobody else."""
    key = tag_key(hkdf(secret, bind(NAME, ch.run_id)), len(params.sites), params.length)
    words = np.concatenate([x, tag(x, key, params.sites.index(ch.me))])  # L1
    opened = await secure_sum.contributor(ch, params.sum, words, entropy=entropy, identity=identity, wide=True)  # L2
    if opened is None or set(opened.survivors) != set(params.sites):
        raise ProtocolAbort(NAME, "L2", "survivors", "the sum is not of all sites")
    z, t = opened.z[: params.length].copy(), opened.z[params.length :]
    if not check_tag(z, t, key):
        why = "the coordinator changed the sum, or a site's tag does not fit its vector, or the sum wrapped"
        raise ProtocolAbort(NAME, "L3", "changed", why)
    return z


async def coordinator(ch: Channel, params: Params) -> U64:
    """Be S."""
    return (await secure_sum.aggregator(ch, params.sum, wide=True)).z[: params.length].copy()  # L2
