"""The refreshes of an encrypted training, by name: public, the same at all parties.

gradient   [Σ Z_i] → [Z]                        summed over samples and averaged
update     [Z ⊙ W], [Z ⊙ V], [A] → [A'], [W'], [V']
product    [W' ⊙ V'] → [M']
sealed     the same after the last step, flooded: [M'] answers queries, and keeps nothing of the noise of its making
norm       [W ⊙ W], [V ⊙ V] → [Σ W² + Σ V²], at every slot
opening    [A] → W and V, every entry several times
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np

from cloister.mpc.crypto.ckks import scheme as ckks
from cloister.mpc.crypto.rns.slots import SlotMap, make_map
from cloister.mpc.threshold_ckks import collective_refresh
from cloister.workflows.train_cellcnn.cellcnn_circuit import Layout, all_maps, product_scale
from cloister.workflows.train_cellcnn.training_terms import Terms

STAGES = ("gradient", "update", "product")  # of one step
NORM = 64.0  # the largest norm of W and V together that is opened


@dataclass(frozen=True)
class Refresh:
    params: collective_refresh.Params
    maps: list[SlotMap]


@functools.lru_cache(maxsize=4)
def norm_maps(L: Layout) -> list[SlotMap]:
    """(Σ W² + Σ V²) / 64, at every slot: below 64 like whatever else is refreshed."""
    c, S = L.config, L.ckks.slots
    at = [L.at(j, 0, f) for j in range(c.markers) for f in range(c.filters)]
    for g, group in enumerate(L.groups):
        at += [(1 + g) * S + L.at(0, k, f) for k in range(len(group)) for f in range(c.filters)]
    return [make_map([(np.arange(S), np.array(at), 1 / NORM)], S, real=True)]


def refreshes(params: Terms) -> dict[str, Refresh]:
    c, P, L = ckks.context(params.ckks), params.ckks, params.layout
    G, one, product = len(L.groups), L.ladder.one, product_scale(c)
    shapes: dict[str, tuple[list[float], list[int]]] = {
        "gradient": ([P.scale] * G, [one] * G),
        "update": ([product] * (2 * G) + [P.scale] * L.archives, [P.base] * L.archives + [one] * (1 + G)),
        "product": ([product] * G, [P.top] * G),
        "sealed": ([product] * G, [P.top] * G),
        "norm": ([product] * (1 + G), [P.base]),
        "opening": ([P.scale] * L.openings, [P.base] * L.openings),
    }
    by_name = {}
    for name, (scales, outputs) in shapes.items():
        maps = norm_maps(L) if name == "norm" else all_maps(L)["product" if name == "sealed" else name]
        by_name[name] = Refresh(
            collective_refresh.Params(
                params.holders,
                params.aggregator,
                P,
                tuple(scales),
                tuple(outputs),
                tuple(m.digest for m in maps),
                L.value_bits,
                ckks.flood_bits(P, L.factor_noise) if name == "sealed" else 0,
            ),
            maps,
        )
    return by_name
