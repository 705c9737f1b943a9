"""Pooled counts: everyone learns the sum of tables of counts, and no site's own.

    L1  i ⇄ S   z = secure sum of t_i        a table of every site's: donors to train on, or right and wrong answers
    L2  all     z
    L3  i, S    all sites received the same z     (same_view)

t_i is a `disclosure.Contribution`: every entry that is not zero is based on at least `min_donors` of the site's own
donors and `min_cells` of their cells, whatever the other parties send.

Reveals
-------
coordinator, site : the sum of the tables over the sites that stayed, and who they are. `train-cellcnn` sums
    - for a preset that draws per donor: the number of donors to train on;
    - with donors held out: how many inputs, and how many donors, of each class every model takes for each class.
    With n - 1 colluding sites, or with two sites: the last one's table. A row of it counts the held-out donors of one
    class, at least `min_donors` of them, by predicted class. If all of these are predicted alike, the row tells the
    prediction of each.

Assumes
-------
What `secure_sum` assumes; a site may count wrongly, and so shift the sums by what it could have counted. Sums that no
counts can have end the run. Lies that are not noticed: (b), (c), (f) of the coordinator, another sum that counts could
have, sent to all sites alike.

Cost
----
That of a secure sum of as many words as the table has, and of the comparison.

References
----------
[AC17] Arvaniti, Claassen, Nature Communications 2017: several networks, the best by validation accuracy.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from cloister.arrays import I64, U64, Array
from cloister.disclosure import Contribution
from cloister.errors import DataError, ParameterError, ProtocolAbort
from cloister.mpc.crypto.agreement import Identity
from cloister.mpc.crypto.entropy import Entropy
from cloister.mpc.net.channel import Channel
from cloister.mpc.sums import consistency_check, secure_sum
from cloister.study import Party

NAME = "pooled_counts"
MOST = 2**40  # of one count


@dataclass(frozen=True, slots=True)
class Params:
    sites: tuple[Party, ...]
    coordinator: Party
    shape: tuple[int, ...]
    what: str  # is counted, for the receipt

    def __post_init__(self) -> None:
        if not self.shape or min(self.shape) < 1:
            raise ParameterError(f"a table of counts has at least one entry, found shape {self.shape}")

    @property
    def sum(self) -> secure_sum.Params:
        return secure_sum.Params(self.sites, self.coordinator, math.prod(self.shape), to_all=True)

    @property
    def view(self) -> consistency_check.Params:
        return consistency_check.Params(self.sites, self.coordinator)


def ideal(params: Params, tables: Mapping[Party, Contribution]) -> dict[Party, I64]:
    return dict.fromkeys((params.coordinator, *tables), np.sum([t.values for t in tables.values()], axis=0))


def roles(params: Params) -> dict[Party, object]:
    return {params.coordinator: coordinator} | dict.fromkeys(params.sites, site)


def cost(params: Params) -> dict[Party, tuple[int, int]]:
    parts = secure_sum.cost(params.sum), consistency_check.cost(params.view)
    return {u: (sum(p[u][0] for p in parts), sum(p[u][1] for p in parts)) for u in parts[0]}


def counts(params: Params, z: U64) -> I64:
    """The sums as a table; raises where no counts of the sites add up to them."""
    if z.max() > np.uint64(MOST * len(params.sites)):
        raise ProtocolAbort(NAME, "L2", "counts", "the sums are beyond what sites can count: one of them, or S, lied")
    return np.asarray(z.astype(np.int64).reshape(params.shape), np.int64)


def encode(params: Params, table: Array) -> U64:
    if table.shape != params.shape or table.min() < 0 or table.max() > MOST:
        raise DataError(f"expected counts of shape {params.shape}, none below 0, found shape {table.shape}")
    return np.asarray(table.astype(np.uint64).ravel(), np.uint64)


async def site(ch: Channel, params: Params, table: Contribution, *, entropy: Entropy, identity: Identity) -> I64:
    part = table.map(lambda counts: encode(params, counts))
    words = ch.contribute(part, protocol=NAME, line="L1", what=params.what)
    summed = await secure_sum.contributor(ch.sub("sum"), params.sum, words, entropy=entropy, identity=identity)  # L1
    assert summed is not None
    total = counts(params, summed.z)  # L2
    await consistency_check.site(ch, params.view, identity=identity)  # L3
    return total


async def coordinator(ch: Channel, params: Params) -> I64:
    z = (await secure_sum.aggregator(ch.sub("sum"), params.sum)).z  # L1
    total = counts(params, ch.reveal(z, to=(ch.me, *params.sites), line="L2", what=params.what, protocol=NAME))  # L2
    await consistency_check.coordinator(ch, params.view)  # L3
    return total
