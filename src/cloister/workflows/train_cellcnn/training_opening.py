"""The end of an encrypted training that all agreed to open: its norm first, then every weight several times.

S, v    [W ⊙ W], [V ⊙ V]
all     refresh (these) → [Σ W² + Σ V²], audited; `threshold_decrypt` → all: beyond 64², nothing else is opened
all     refresh ([A]) → every entry of W and V several times, audited; momenta stay encrypted
all     `threshold_decrypt`, once per part → all sites and S

Weights of a training that diverged are no sums that could be told: they went round, and what is left of them depends on
single samples. The norm is a number that the opened weights would tell anyway.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from cloister.arrays import F64
from cloister.errors import ProtocolAbort
from cloister.models import cellcnn
from cloister.mpc.crypto.ckks import scheme as ckks
from cloister.mpc.crypto.entropy import Entropy
from cloister.mpc.crypto.rns.ring import SIGMA
from cloister.mpc.net.channel import Channel
from cloister.mpc.threshold_ckks import collective_refresh, threshold_decrypt
from cloister.workflows.train_cellcnn.cellcnn_circuit import VALUE_BITS, Layout
from cloister.workflows.train_cellcnn.training_keys import NAME, Keys
from cloister.workflows.train_cellcnn.training_refreshes import NORM, refreshes
from cloister.workflows.train_cellcnn.training_state import State
from cloister.workflows.train_cellcnn.training_terms import Terms


def part_params(params: Terms, part: int) -> threshold_decrypt.Params:
    return threshold_decrypt.Params(
        params.holders,
        params.aggregator,
        params.ckks,
        f"the trained model (part {part + 1} of {params.layout.openings})",
        params.ckks.base,
        params.ckks.scale,
        params.layout.noise,
    )


def norm_noise(L: Layout) -> float:
    """Standard deviation of the norm's noise: it stands at every slot, and so in one coefficient. |W, V| below 64."""
    rounding = ckks.rounding_noise(L.ckks, L.parties) * math.sqrt(L.numbers) / NORM
    spread = math.hypot(2 * L.noise, rounding) * math.sqrt(L.ckks.degree)
    return math.hypot(spread, 3 * SIGMA * math.sqrt(L.parties))


def norm_params(params: Terms) -> threshold_decrypt.Params:
    P, what = params.ckks, "the sum of the trained model's squared weights"
    return threshold_decrypt.Params(
        params.holders, params.aggregator, P, what, P.base, P.scale, norm_noise(params.layout)
    )


def check_norm(slots: F64) -> None:
    """Raise unless these slots, all alike but for their floods, hold the norm of weights within ±64."""
    if not -1 <= float(slots.mean()) <= NORM:  # what went round may be negative
        raise ProtocolAbort(NAME, "L5", "diverged", "the training diverged, or was spoilt: no weight was opened")


def check_weights(w: cellcnn.Weights) -> cellcnn.Weights:
    """Raise unless these are the weights of a training that converged: W and V within their bounds."""
    largest = max(float(np.abs(x).max()) for x in (w.W, w.V))
    if not largest <= 2.0**VALUE_BITS:
        raise ProtocolAbort(
            NAME, "L5", "diverged", "the opened weights are beyond ±64: the training diverged, or was spoilt"
        )
    return w


def weights_of(params: Terms, opened: Sequence[F64]) -> cellcnn.Weights:
    return check_weights(params.layout.opened_weights(params.layout.mean_of_copies(list(opened))))


async def open_at_site(
    ch: Channel,
    params: Terms,
    keys: Keys,
    state: State | None,
    *,
    entropy: Entropy,
    consent: frozenset[str],
) -> cellcnn.Weights:
    """A site's part; `state` is that of the last step at the auditor, and None elsewhere."""
    c, todo = ckks.context(params.ckks), refreshes(params)

    async def opened(name: str, cts: list[ckks.Cipher] | None, parts: Sequence[threshold_decrypt.Params]) -> list[F64]:
        refresh, sub, found = todo[name], ch.sub(name), []
        keys.spend(len(parts))
        made = await collective_refresh.holder(sub, refresh.params, keys.share, refresh.maps, cts, entropy=entropy)
        for a, what in enumerate(parts):
            c1, c0 = collective_refresh.common(sub, refresh.params, a), None if made is None else c.raw(made[a])[0][0]
            part = ch.sub(f"{name}/{a}")
            found.append(
                await threshold_decrypt.holder(part, what, keys.share, c1, c0, entropy=entropy, consent=consent)
            )
        return found

    (norm,) = await opened("norm", None if state is None else state.squares(c, keys.relin), [norm_params(params)])
    check_norm(norm)
    parts = [part_params(params, a) for a in range(params.layout.openings)]
    archive = None if state is None else state.archive[: len(parts)]
    return weights_of(params, await opened("opening", archive, parts))


async def open_at_aggregator(ch: Channel, params: Terms, keys: Keys, state: State) -> cellcnn.Weights:
    todo = refreshes(params)

    async def opened(name: str, cts: list[ckks.Cipher], parts: Sequence[threshold_decrypt.Params]) -> list[F64]:
        made = await collective_refresh.aggregator(ch.sub(name), todo[name].params, cts, todo[name].maps)
        each = zip(parts, made, strict=True)
        return [
            await threshold_decrypt.aggregator(ch.sub(f"{name}/{a}"), what, ct) for a, (what, ct) in enumerate(each)
        ]

    (norm,) = await opened("norm", state.squares(ckks.context(params.ckks), keys.relin), [norm_params(params)])
    check_norm(norm)
    parts = [part_params(params, a) for a in range(params.layout.openings)]
    return weights_of(params, await opened("opening", state.archive[: len(parts)], parts))
