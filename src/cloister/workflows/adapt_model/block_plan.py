"""The plan of an encrypted encoder: all round trips, counted by its circuit before anything is sent."""

from __future__ import annotations

import dataclasses
import functools
import math
from dataclasses import dataclass
from typing import Any

from cloister.errors import ParameterError
from cloister.models.polynomial import Shape
from cloister.mpc.crypto.entropy import Entropy
from cloister.mpc.crypto.owner_ckks.scheme import FLOOD_BITS, KEEP, Opening, Parameters, primes_for, room
from cloister.workflows.adapt_model.block_circuit import Circuit
from cloister.workflows.adapt_model.block_values import Cts, Values
from cloister.workflows.adapt_model.grid_circuit import GridCircuit
from cloister.workflows.adapt_model.quadratic_circuit import QuadraticCircuit

TAP_PRECISION = 10  # bits of what is read; the flooding covers all below


def checked(params: Parameters) -> int:
    """Primes at which answers are compared (`tied_answers`): every answer has one more at least."""
    return min(params.count - 1, KEEP + 1)


def circuit_of(shape: Shape, tokens: int = 1) -> type[Circuit]:
    """By the kind of attention, and how many tokens share a ciphertext."""
    if tokens > 1:
        return GridCircuit
    return QuadraticCircuit if shape.attention == "quadratic" else Circuit


@dataclass(frozen=True, slots=True)
class Tap:
    """How the owner reads one tap."""

    block: int
    primes: int
    lift: int  # bits by which it is multiplied, until it fills the modulus: what is larger than it may be goes round
    scale: float  # and flood_bits: after that
    flood_bits: int
    bound: float  # of a feature, from the calibration


@dataclass(frozen=True, slots=True)
class Plan:
    """All round trips of one batch: per round the openings; after some, a tap."""

    rounds: tuple[tuple[Opening, ...], ...]
    taps: tuple[tuple[int, Tap], ...]  # (rounds done before it, how it is read)
    blocks: tuple[int, ...] = ()  # rounds done after each block and its tap

    @property
    def openings(self) -> list[Opening]:
        return self.openings_after(0)

    def openings_of(self, layer: int) -> list[Opening]:
        """Those of one block, counted from 0, with what comes before the first."""
        first = self.blocks[layer - 1] if layer else 0
        return [h for r in self.rounds[first : self.blocks[layer]] for h in r]

    def openings_after(self, block: int) -> list[Opening]:
        """Those that are left when so many blocks are done."""
        return [h for r in self.rounds[self.blocks[block - 1] if block else 0 :] for h in r]


def tap_of(shape: Shape, params: Parameters, number: int, tokens: int = 1) -> Tap:
    """Where P tokens share ciphertexts, their slots are added up: N / P coefficients, a switching key's noise."""
    scale = tokens * math.ldexp(params.scale * params.weight_scale, circuit_of(shape, tokens).tap_bits)
    bound = shape.tap_bound(number)
    noise = math.log2(6 * 3.2 * bound * params.weight_scale * math.sqrt(shape.width) * tokens)
    if tokens > 1:
        digits = math.sqrt(params.count * params.degree / 12)
        noise = max(noise, math.log2(6 * 3.2 * digits * tokens) + params.bits)
    flood = math.floor(math.log2(scale)) - TAP_PRECISION - (params.degree // tokens).bit_length() // 2
    if flood < noise + FLOOD_BITS:
        raise ParameterError("a tap cannot be flooded by 40 bits at this scale; use a smaller width or weight scale")
    need = math.ceil(math.log2(scale * bound)) + 2  # what lies beyond the bound shows, up to four times
    primes = primes_for(params, need)
    if not primes:
        raise ParameterError("a tap does not fit into the modulus; use more primes")
    lift = room(params, primes) - need
    return Tap(shape.taps[number], primes, lift, math.ldexp(scale, lift), flood + lift, bound)


def flooded(ev: Any, y: Values, tap: Tap, entropy: Entropy) -> Cts:
    """What is sent to be read at a tap."""
    lifted = ev.combine([(1 << tap.lift, y.get(range(y.n), tap.primes))])
    return ev.flood(lifted, tap.flood_bits, tap.primes, entropy)


@functools.lru_cache(maxsize=32)
def plan(shape: Shape, params: Parameters, last: int = 1, tokens: int = 1) -> Plan:
    """All round trips of one batch. Of the last block only the first `last` tokens come out: taps read no others."""
    rounds: list[tuple[Opening, ...]] = []
    taps: list[tuple[int, Tap]] = []
    blocks: list[int] = []

    async def count(parts: list[tuple[Opening, Any]]) -> list[Any]:
        rounds.append(tuple(h for h, _ in parts))
        return [None] * len(parts)

    c = circuit_of(shape, tokens)(shape, params, count)

    async def whole() -> None:
        x = await c.embed(Values(shape.inputs * (shape.tokens - 1 if tokens == 1 else 1), 2, params.scale))
        for layer in range(shape.depth):
            x = await c.block(x, layer, last if layer + 1 == shape.depth else 0)
            if layer + 1 in shape.taps:
                number = shape.taps.index(layer + 1)
                tap = tap_of(shape, params, number, tokens)
                c.require(await c.tap(x, number), tap.primes)
                taps.append((len(rounds), tap))
            blocks.append(len(rounds))

    coroutine = whole()
    try:
        coroutine.send(None)
    except StopIteration:
        need = iter(c.need)
        planned = [tuple(dataclasses.replace(h, back=max(checked(params) + 1, next(need))) for h in r) for r in rounds]
        return Plan(tuple(planned), tuple(taps), tuple(blocks))
    raise RuntimeError("counting waits for nobody")


def used(shape: Shape, params: Parameters, last: int = 1, tokens: int = 1) -> dict[str, Any]:
    """The depth budget in figures: openings, ciphertexts, and the least hiding."""
    every = plan(shape, params, last, tokens).openings
    return {
        "tokens_in_a_ciphertext": tokens,
        "rounds": len(plan(shape, params, last, tokens).rounds),
        "ciphertexts": sum(h.count for h in every),
        "hiding": min(h.hiding for h in every),
        "largest_message_bits": max(h.message_bits for h in every),
        "modulus_bits": params.count * params.bits,
    }
