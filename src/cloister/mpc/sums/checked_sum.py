"""Checked sum: all sites receive the sum of their vectors, and abort if the coordinator publishes another one.

    L1   u       t_u = β_u + Σ_j α_j x_uj mod 2^128            α, β from Ξ and the id of this sum
    L2   u → S   y_u = (x_u, t_u) + Σ_{v<u} PRG(p_uv) - Σ_{v>u} PRG(p_uv)
                                                               p_uv = HKDF(k_uv, id of this sum)
    L3   S ⇒ u   z = Σ_u x_u, t = Σ_u t_u mod 2^128            Σ_u y_u, in which the masks cancel
    L4   u       t = Σ_u β_u + Σ_j α_j z_j mod 2^128           otherwise abort: the sum was changed

Ξ and the keys k_uv of each two sites come from one `common_seed` for all sums of an attempt. A sum therefore takes one
message up and one down. The two words of a tag are one number modulo 2^128 in every addition.

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
A `common_seed` of all sites. No dropouts: without the vector of every site the masks do not cancel, and the run ends.
The sum of all vectors does not wrap, as signed integers of 64 bits; if it does, the run ends. One sum per channel
(`Channel.claim`): keys and masks are bound to the channel's id.

Cost
----
Per site: 1 message up, 1 down, of m + 2 words each; n expansions of m words, and 32 floating point operations a word
and tag. Coordinator: n additions of m words.

References
----------
[BIK+17] Bonawitz et al., CCS 2017, section 4.0.1: pairwise masks that cancel; the keys are agreed on once, and the mask
of a sum is a pseudorandom function of its id [KDK11, Kursawe et al., PETS 2011]. Dropouts need the second mask and the
recovery of `secure_sum`. The check is the one-time affine tag of [CW81], which adds up as those of [BDOZ11], with one
key for all sites. Lines numbered here; the security argument is docs/security/checked_sum.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from cloister.arrays import U64
from cloister.errors import ParameterError, ProtocolAbort
from cloister.mpc.crypto.agreement import bind, hkdf
from cloister.mpc.crypto.sum_tags import WORDS, TagKey, check_tag, tag, tag_key
from cloister.mpc.net.channel import Channel
from cloister.mpc.net.wire import message
from cloister.mpc.parties import Party
from cloister.mpc.sums.common_seed import Seed
from cloister.mpc.sums.secure_sum import add, add_pads

NAME = "checked_sum"


@dataclass(frozen=True, slots=True)
class Params:
    sites: tuple[Party, ...]
    coordinator: Party
    length: int  # m

    def __post_init__(self) -> None:
        n = len(self.sites)
        if n < 2 or len(set(self.sites)) != n or self.coordinator in self.sites:
            raise ParameterError(f"a checked sum needs at least two sites, all different; found {n}")
        if self.length < 1:
            raise ParameterError(f"a checked sum needs at least one word per vector, found {self.length}")

    @property
    def words(self) -> int:
        return self.length + WORDS


@message("L2")
class Masked:  # u → S
    y: U64  # (m + 2,)


@message("L3")
class Total:  # S → u
    z: U64  # (m + 2,), the sum and its tag


def ideal(params: Params, xs: Mapping[Party, tuple[U64, Seed]]) -> dict[Party, U64]:
    total: U64 = np.sum(np.stack([x for x, _ in xs.values()]), axis=0, dtype=np.uint64)
    return dict.fromkeys((params.coordinator, *xs), total)


def roles(params: Params) -> dict[Party, object]:
    return {params.coordinator: coordinator} | dict.fromkeys(params.sites, site)


def cost(params: Params) -> dict[Party, tuple[int, int]]:
    n, size = len(params.sites), 8 * params.words
    return {params.coordinator: (n, n * size)} | dict.fromkeys(params.sites, (1, size))


def key_of(params: Params, run_id: bytes, seed: Seed) -> TagKey:
    """α and β of the sum with this id."""
    return tag_key(hkdf(seed.secret, bind(NAME, run_id)), len(params.sites), params.length)


def masked(params: Params, run_id: bytes, u: Party, words: U64, seed: Seed) -> U64:
    """L2: the words of u with a mask for each other site; the masks of all sites add up to zero."""
    if not set(params.sites) <= {u, *seed.pairs}:
        raise ProtocolAbort(NAME, "L2", "sites", "not all sites have agreed on keys, so the sum is not of all sites")
    y = words.copy()
    others = [v for v in params.sites if v != u]
    add_pads(y, u, {v: hkdf(seed.pairs[v], bind(f"{NAME}/mask", run_id)) for v in others}, wide=True)
    return y


async def site(ch: Channel, params: Params, x: U64, seed: Seed) -> U64:
    """Be u, with what u holds since `common_seed`."""
    if x.shape != (params.length,) or x.dtype != np.uint64:
        raise ParameterError(f"expected {params.length} words of uint64, found {x.dtype} of shape {x.shape}")
    ch.claim(NAME)
    key = key_of(params, ch.run_id, seed)
    words = np.concatenate([x, tag(x, key, params.sites.index(ch.me))])  # L1
    await ch.send(params.coordinator, Masked(masked(params, ch.run_id, ch.me, words, seed)))  # L2
    total = (await ch.recv_broadcast(params.coordinator, Total, z=(params.words,))).z  # L3
    z, t = total[: params.length].copy(), total[params.length :]
    if not check_tag(z, t, key):  # L4
        why = "the coordinator changed the sum, or a site's tag or mask does not fit, or the sum wrapped"
        raise ProtocolAbort(NAME, "L4", "changed", why)
    return z


async def coordinator(ch: Channel, params: Params) -> U64:
    """Be S."""
    inputs = await ch.gather(params.sites, Masked, y=(params.words,))  # L2
    total = np.zeros(params.words, np.uint64)
    for m in inputs.values():
        add(total, m.y, wide=True)
    what = f"sum of {len(params.sites)} vectors of {params.length}"
    total = ch.reveal(total, to=(ch.me, *params.sites), line="L3", what=what, protocol=NAME)
    await ch.broadcast(params.sites, Total(total))  # L3
    return total[: params.length].copy()
