"""The end of an encrypted training that all agreed to open: every weight several times, refreshed, audited, opened.

all     refresh ([A]) → every weight several times
all     `threshold_decrypt`, once per part → all sites and S
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from cloister.arrays import F64
from cloister.crypto.ckks import scheme as ckks
from cloister.crypto.entropy import Entropy
from cloister.errors import ProtocolAbort
from cloister.models import cellcnn
from cloister.net.channel import Channel
from cloister.protocols.cellcnn.cellcnn_circuit import VALUE_BITS
from cloister.protocols.cellcnn.training_keys import NAME, Keys
from cloister.protocols.cellcnn.training_refreshes import refreshes
from cloister.protocols.ckks import collective_refresh, threshold_decrypt

if TYPE_CHECKING:
    from cloister.protocols.cellcnn.encrypted_training import Params


def part_params(params: Params, part: int) -> threshold_decrypt.Params:
    return threshold_decrypt.Params(
        params.holders,
        params.aggregator,
        params.ckks,
        f"the trained model (part {part + 1} of {params.layout.archives})",
        params.ckks.base,
        params.ckks.scale,
        params.layout.noise,
    )


def check_weights(w: cellcnn.Weights) -> cellcnn.Weights:
    """Raise unless these are the weights of a training that converged: W, V, M and momenta within their bounds."""
    largest = max(float(np.abs(x).max()) for x in (w.W, w.V, w.vW, w.vV))
    if not largest <= 2.0**VALUE_BITS:
        raise ProtocolAbort(
            NAME, "L5", "diverged", "the opened weights are beyond ±64: the training diverged, or was spoilt"
        )
    return w


def weights_of(params: Params, opened: Sequence[F64]) -> cellcnn.Weights:
    return check_weights(params.layout.unarchive(params.layout.mean_of_copies(list(opened))))


async def open_at_site(
    ch: Channel,
    params: Params,
    keys: Keys,
    archive: list[ckks.Cipher] | None,
    *,
    entropy: Entropy,
    consent: frozenset[str],
) -> cellcnn.Weights:
    """A site's part; `archive` is [A] at the auditor and None elsewhere."""
    c, refresh, sub = ckks.context(params.ckks), refreshes(params)["opening"], ch.sub("opening")
    keys.spend(params.layout.archives)
    copies = await collective_refresh.holder(sub, refresh.params, keys.share, refresh.maps, archive, entropy=entropy)
    opened = []
    for a in range(params.layout.archives):
        c1, c0 = collective_refresh.common(sub, refresh.params, a), None if copies is None else c.raw(copies[a])[0][0]
        what, part = part_params(params, a), ch.sub(f"open/{a}")
        opened.append(await threshold_decrypt.holder(part, what, keys.share, c1, c0, entropy=entropy, consent=consent))
    return weights_of(params, opened)


async def open_at_aggregator(ch: Channel, params: Params, archive: list[ckks.Cipher]) -> cellcnn.Weights:
    refresh = refreshes(params)["opening"]
    copies = await collective_refresh.aggregator(ch.sub("opening"), refresh.params, archive, refresh.maps)
    opened = [
        await threshold_decrypt.aggregator(ch.sub(f"open/{a}"), part_params(params, a), ct)
        for a, ct in enumerate(copies)
    ]
    return weights_of(params, opened)
