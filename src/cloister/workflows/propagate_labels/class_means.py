"""Class means: every site learns the mean direction of each class's labelled points over all sites, the server nothing.

    M1   u       T_c = Σ v/|v| over its labelled points of class c, in fixed point; 0 for classes with fewer than m
                 labels at all sites together
    M2   u ↔ S   Σ_u (T_u + r_u), r_u from the secret that the sites share (`secure_sum` to all)
    M3   u       T = that sum - Σ_u r_u, over the sites that stayed; M_c = T_c / |T_c|

With few labels a class has too few points in the graph for them to travel far; its mean is then the better witness. A
site adds to what the graph says of a point how near the point is to every mean (`closeness`).

Reveals
-------
server : nothing; it sees a sum under a mask that it does not know. With one site: what that site learns.
site : T, for every class with at least m labels. With two labels of a class of which one is its own, or with two sites,
    the direction of the other's point, or of their sum. With m labels, the mean of the m - 1 others at the least.

Assumes
-------
What `secure_sum` assumes, and so not (a), (b), (c), (f) of the server: it may have other means come out, and labels
that follow from them. A site's points are its word.

Cost
----
A secure sum of C d words.

References
----------
[RLM+17] Rebuffi et al., iCaRL, CVPR 2017, eq. 2: nearest mean of unit vectors. Lines numbered here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from cloister.arrays import F64, I64, U64
from cloister.errors import ParameterError, ProtocolAbort
from cloister.models import graph
from cloister.mpc.crypto.agreement import Identity, bind, hkdf
from cloister.mpc.crypto.entropy import Entropy
from cloister.mpc.crypto.fixed_point import FixedPoint
from cloister.mpc.crypto.prg import expand
from cloister.mpc.net.channel import Channel
from cloister.mpc.sums import secure_sum
from cloister.study import Party

NAME = "class_means"
SHARPNESS = 10.0  # τ: how much nearer a mean must be to count


@dataclass(frozen=True, slots=True)
class Params:
    sites: tuple[Party, ...]
    server: Party
    counts: tuple[int, ...]  # labels of each class, over all sites
    width: int  # d
    least: int = 2  # m

    def __post_init__(self) -> None:
        if len(self.sites) < 2 or len(self.counts) < 2 or self.width < 1 or self.least < 2:
            raise ParameterError("class means need two sites, two classes, and two labels of a class or more")

    @property
    def sums(self) -> secure_sum.Params:
        return secure_sum.Params(self.sites, self.server, len(self.counts) * self.width, to_all=True)

    @property
    def code(self) -> FixedPoint:
        return FixedPoint(24, 2.0**28, len(self.sites))


def ideal(params: Params, xs: Mapping[Party, tuple[F64, I64, bytes]]) -> dict[Party, F64 | None]:
    """A site gives the directions of its labelled points, their classes, and the common secret."""
    total: F64 = np.sum([sums_of(params, v, y) for v, y, _ in xs.values()], axis=0)
    found: dict[Party, F64 | None] = dict.fromkeys(xs, total)
    return found | {params.server: None}


def roles(params: Params) -> dict[Party, object]:
    return {params.server: server} | dict.fromkeys(params.sites, site)


def cost(params: Params) -> dict[Party, tuple[int, int]]:
    return secure_sum.cost(params.sums)


# ---- local steps -----------------------------------------------------------------------------------------------------


def directions(vectors: F64) -> F64:
    """Rows of length one; zeros stay."""
    length = np.linalg.norm(vectors, axis=1, keepdims=True)
    made: F64 = np.divide(vectors, length, out=np.zeros_like(vectors), where=length > 0)
    return made


def sums_of(params: Params, v: F64, y: I64) -> F64:
    """M1: (C, d)."""
    total: F64 = graph.one_hot(y, len(params.counts)).T @ v
    total[np.asarray(params.counts) < params.least] = 0.0
    return total


def closeness(v: F64, sums: F64, own: I64 | None = None) -> F64:
    """How near each direction is to every class's mean, adding up to one; 0 for classes without a mean.

    With `own`, the classes of these points, which are part of the sums, each point is taken out of its class's first.
    """
    near = np.empty((len(v), len(sums)))
    for c, total in enumerate(sums):
        rest = total - np.where(own == c, 1.0, 0.0)[:, None] * v if own is not None else total[None, :]
        rest = np.where(np.linalg.norm(rest, axis=1, keepdims=True) > 1e-3, rest, 0.0)
        near[:, c] = (v * directions(rest)).sum(axis=1)
    there = np.linalg.norm(sums, axis=1) > 0
    if not there.any():
        return np.zeros_like(near)
    weight = np.where(there, np.exp(SHARPNESS * (near - near[:, there].max(axis=1, keepdims=True))), 0.0)
    share: F64 = weight / weight.sum(axis=1, keepdims=True)
    return share


# ---- roles -----------------------------------------------------------------------------------------------------------


async def site(
    ch: Channel, params: Params, v: F64, y: I64, secret: bytes, *, entropy: Entropy, identity: Identity
) -> F64:
    """Hold directions of labelled points, their classes, and 32 bytes that all sites know and the server does not."""

    def mask(u: Party) -> U64:
        return expand(hkdf(secret, bind(NAME, ch.run_id, u.encode())), params.sums.length)

    words = params.code.encode(sums_of(params, v, y).ravel()) + mask(ch.me)  # M1
    total = await secure_sum.contributor(ch.sub("sum"), params.sums, words, entropy=entropy, identity=identity)  # M2
    assert total is not None
    masks = np.sum([mask(u) for u in total.survivors], axis=0, dtype=np.uint64)
    sums = params.code.decode(total.z - masks).reshape(-1, params.width)  # M3
    most = np.where(np.asarray(params.counts) < params.least, 0, params.counts)
    if np.any(np.linalg.norm(sums, axis=1) > most + 1e-3):
        raise ProtocolAbort(NAME, "M3", "mismatch", "means that so few points of length one cannot have")
    return sums


async def server(ch: Channel, params: Params) -> None:
    await secure_sum.aggregator(ch.sub("sum"), params.sums)  # M2
