"""What an owner can carry off that answers whatever it likes: a bound in bits. Local steps of `encrypted_inference`.

What an owner opens is uniform whatever it answers, but for the taps. Before each there is a check that lets only lies
of little more than noise pass (`tied_answers`); this is what taps could hold if none were ever found out. A tap has N
coefficients modulo Q, under noise that is uniform on 2^(flood + 1) of these numbers: however its message was made, it
tells log2 Q - flood - 1 bits at most. `Tap.lift` keeps that to what features within their bound need. Where P tokens
share ciphertexts, what is read is a sum over their slots (`grid_circuit.added_up`): it has N / P coefficients, and the
others nothing but noise. Such batches hold 1 / P as many samples.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from cloister.models.polynomial import Shape
from cloister.mpc.crypto.owner_ckks.scheme import Parameters, modulus
from cloister.workflows.adapt_model.block_messages import CONTROLS
from cloister.workflows.adapt_model.block_plan import Tap, tap_of
from cloister.workflows.adapt_model.packing import Packing, packings


@dataclass(frozen=True, slots=True)
class Exposure:
    """Of one model, to one owner that spends its whole budget on lies."""

    weights: int
    weight_bits: int
    batches: int
    bits: float  # of one batch

    @property
    def readable(self) -> int:
        """How many weights that could be at most."""
        return min(self.weights, math.floor(self.batches * self.bits / self.weight_bits))

    def __str__(self) -> str:
        return (
            f"a site that lies could read {self.readable:,} of {self.weights:,} weights at most: {self.batches}"
            f" batches, {self.bits / 1e6:.2g} Mbit each, {self.weight_bits} bits a weight"
        )


def exposure(shape: Shape, params: Parameters, budget: int) -> Exposure:
    """With the packing that tells most."""
    found = [
        Exposure(weights(shape), params.weight_bits, p.batches(budget), batch_bits(p))
        for p in (Packing(shape, params, tokens) for tokens in packings(shape, params))
    ]
    return max(found, key=lambda one: one.batches * one.bits)


def batch_bits(packed: Packing) -> float:
    """All that the taps and checks of one batch can tell, in bits."""
    shape, params, n = packed.shape, packed.crypto, packed.crypto.degree // packed.tokens
    taps = (tap_of(shape, params, number, packed.tokens) for number in range(len(shape.taps)))
    over = shape.depth * CONTROLS * params.degree  # of the checks of all blocks, a bit a coefficient each
    return over + sum(shape.rank * n * coefficient_bits(params, tap) for tap in taps)


def coefficient_bits(params: Parameters, tap: Tap) -> float:
    return math.log2(modulus(params, tap.primes)) - tap.flood_bits - 1


def weights(shape: Shape) -> int:
    """How many numbers the model consists of."""
    d, f = shape.width, shape.hidden
    block = 4 * d * (d + 1) + f * (d + 1) + d * (f + 1) + (4 * d if shape.norm == "post" else 0)
    return d * (shape.inputs + shape.tokens) + shape.depth * block + len(shape.taps) * shape.rank * (d + 1)
