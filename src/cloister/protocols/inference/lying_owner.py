"""What an owner can carry off that answers whatever it likes: a bound in bits. Local steps of `encrypted_inference`.

Nothing ties an owner's answers to what it was sent (docs/decisions/0011). What it opens is uniform whatever it answers,
but for the taps. A tap has N coefficients modulo Q, under noise that is uniform on 2^(flood + 1) of these numbers:
however its message was made, it tells log2 Q - flood - 1 bits at most. `Tap.lift` keeps that to what features within
their bound need.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from cloister.crypto.owner_ckks.scheme import Parameters, modulus
from cloister.models.polynomial import Shape
from cloister.protocols.inference.block_plan import Tap, tap_of


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
    batches = -(-budget // params.slots)
    return Exposure(weights(shape), params.weight_bits, batches, batch_bits(shape, params))


def batch_bits(shape: Shape, params: Parameters) -> float:
    """All that the taps of one batch can tell, in bits."""
    taps = (tap_of(shape, params, number) for number in range(len(shape.taps)))
    return sum(shape.rank * params.degree * coefficient_bits(params, tap) for tap in taps)


def coefficient_bits(params: Parameters, tap: Tap) -> float:
    return math.log2(modulus(params, tap.primes)) - tap.flood_bits - 1


def weights(shape: Shape) -> int:
    """How many numbers the model consists of."""
    d, f = shape.width, shape.hidden
    block = 4 * d * (d + 1) + f * (d + 1) + d * (f + 1) + (4 * d if shape.norm == "post" else 0)
    return d * (shape.inputs + shape.tokens) + shape.depth * block + len(shape.taps) * shape.rank * (d + 1)
