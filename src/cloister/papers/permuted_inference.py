"""Permuted inference, as published: block by block under encryption, each block's output opened to the owner.

    L1  u → P   b, seed, n              as in `encrypted_inference`; here every sample has ciphertexts of its own
    L2  u → P   [x_i]                   for every sample i
    per block l:
        P, u    [b_l]                   blinded refreshes within the block, as in `encrypted_inference` L3 and L4
    L3  P → u   [b_l] in the order Π_l  re-randomised, not masked: u opens all T·d activations of every sample
    L4  u → P   [b_l] afresh            P undoes Π_l
    L5  P → u   Π_{l-1}^{-1}·Π_l        for l ≥ 2
    L6  P → u   Π_L                     u has the labels, and gradients need them beside the samples they belong to

The paper calls the relative orders harmless. They link b_{l-1} and b_l of every sample, so an owner fits each block by
regression (`attacks.block_regression` does it); with L6, also to its own samples.

Reveals
-------
owner : every activation b_1 … b_L of all its samples, linked over the blocks: the model, as well as regression fits.
    **The provider's model is not private in this mode.**
provider : how many samples each owner brings. Not the samples.

Assumes
-------
Semi-honest parties; ring learning with errors at 128 bits. At least two samples, or there is nothing to permute.

Cost
----
As `encrypted_inference`, times the number of samples: slots are left empty, since only whole ciphertexts can be
permuted without rotations. T·d ciphertexts more per block and sample.

References
----------
[BlindFed] double-blind federated adaptation, section 3.2, equations 3 to 7; lines numbered here.
"""

from __future__ import annotations

import asyncio
import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from cloister.arrays import F64, I64, U32
from cloister.errors import DataError, ParameterError, ProtocolAbort
from cloister.models.polynomial import Encoder, Shape, check_inputs, hidden
from cloister.mpc.crypto.entropy import Entropy
from cloister.mpc.crypto.owner_ckks import scheme as block
from cloister.mpc.crypto.owner_ckks.scheme import OwnerKey, Parameters
from cloister.mpc.net.channel import Channel
from cloister.mpc.net.wire import message
from cloister.study import Party
from cloister.workflows.adapt_model import encrypted_inference
from cloister.workflows.adapt_model.batch_roles import OwnerSide, ProviderSide
from cloister.workflows.adapt_model.block_circuit import Circuit
from cloister.workflows.adapt_model.block_messages import Key, key_shapes, parts, powers, read, seed_of, traffic
from cloister.workflows.adapt_model.block_plan import Plan, plan
from cloister.workflows.adapt_model.block_values import Values
from cloister.workflows.common.query_ledger import Ledger

NAME = "permuted_inference"
LIFT = 20  # bits by which activations are multiplied before they are re-randomised


@dataclass(frozen=True, slots=True)
class Params:  # public
    owners: tuple[Party, ...]
    provider: Party
    shape: Shape
    crypto: Parameters
    budget: int = 1 << 16

    def __post_init__(self) -> None:
        _ = self.inside
        if self.shape.attention != "taylor":
            raise ParameterError("published mode opens every block, as the paper does: export with attention 'taylor'")

    @property
    def inside(self) -> encrypted_inference.Params:
        """Of the refreshes within a block."""
        return encrypted_inference.Params(self.owners, self.provider, self.shape, self.crypto, self.budget)

    @property
    def primes(self) -> int:
        """Of what is opened."""
        need = self.crypto.scale_bits + LIFT + math.ceil(math.log2(self.shape.x_bound)) + 2
        return next(k for k in range(1, self.crypto.count + 1) if block.room(self.crypto, k) >= need)


@message("L3")
class Output:  # P → u
    c: U32  # (n, 2, k, tight)


@message("L4")
class Again:  # u → P
    c0: U32  # (n, K, tight)
    seed: bytes


@message("L5")
class Relative:  # P → u
    order: I64  # (n,)


@message("L6")
class Order:  # P → u
    order: I64  # (n,)


def ideal(params: Params, inputs: Mapping[Party, Any]) -> dict[Party, F64 | None]:
    """All activations, to the owner of the samples."""
    encoder: Encoder = inputs[params.provider].rounded(params.crypto.weight_bits)
    given: dict[Party, F64 | None] = {params.provider: None}
    return given | {u: np.stack(hidden(encoder, _samples(inputs[u]))[1:], axis=1) for u in params.owners}


def _samples(x: Any) -> F64:
    return np.asarray(x[0] if isinstance(x, tuple) else x)


def roles(params: Params) -> dict[Party, object]:
    return {params.provider: provider} | dict.fromkeys(params.owners, owner)


def cost(params: Params, samples: int = 2) -> dict[Party, tuple[int, int]]:
    """Messages and payload, where every owner brings so many samples."""
    p, s, n = params.crypto, params.shape, samples
    one, inputs, values = p.tight * 4, (s.tokens - 1) * s.inputs, s.tokens * s.width
    every = [h for block in blocks_of(s, p) for h in block.openings]
    trips, sent, back = traffic(every, controls=0)
    trips += s.depth * len(parts(values))
    whole = 1 + powers(every) * p.count + n * (inputs + s.depth * values)
    down = n * (sent + s.depth * values * 2 * params.primes)
    owner_sends = 1 + n * (len(parts(inputs)) + trips), (whole * p.count + n * back) * one
    u = len(params.owners)
    provider_sends = u * (n * trips + s.depth), u * (down * one + 8 * n * s.depth)
    return {params.provider: provider_sends} | dict.fromkeys(params.owners, owner_sends)


def blocks_of(shape: Shape, params: Parameters) -> list[Plan]:
    """Round trips of the embedding and each block, for one sample: no taps."""
    whole = [plan(dataclasses.replace(shape, depth=d, taps=(d,)), params, 0) for d in range(1, shape.depth + 1)]
    out, before = [], 0
    for p in whole:
        rounds = p.rounds[:-1]  # without the tap's own refresh
        out.append(Plan(rounds[before:], ()))
        before = len(rounds)
    return out


def shuffle(n: int, entropy: Entropy) -> Any:
    """A uniform permutation from secret randomness (Fisher-Yates)."""
    order = np.arange(n)
    for i in range(n - 1, 0, -1):
        j = entropy.integer_below(i + 1)
        order[i], order[j] = order[j], order[i]
    return order


def check_order(order: Any, n: int, line: str) -> None:
    if sorted(order.tolist()) != list(range(n)):
        raise ProtocolAbort(NAME, line, "malformed", "an order that is not a permutation of the samples")


async def owner(ch: Channel, params: Params, inputs: F64, *, entropy: Entropy) -> F64:
    """The part of u. Returns what it sees, (n, L, T, d), in the order of its samples."""
    check_inputs(params.shape, inputs)
    n, s, p = len(inputs), params.shape, params.crypto
    if n < 2:
        raise DataError("published mode permutes samples, so it needs at least two; found one. Use mode hardened")
    key, P = OwnerKey(p, entropy), params.provider
    side = OwnerSide(ch.sub(str(ch.me)), params.inside, key, entropy)
    mine = side.ch
    planned = blocks_of(s, p)
    await side.send_key([h for one in planned for h in one.openings], n)  # L1
    for x in inputs:
        await side.send_inputs(np.repeat(x.reshape(-1, 1), p.slots, axis=1))  # L2
    seen, orders = [], []
    for number, rounds in enumerate(planned):
        for _ in range(n):
            for openings in rounds.rounds:
                for how in openings:
                    await side.answer(how, controls=0)
        hidden = np.empty((n, s.tokens * s.width))
        for i in range(n):
            for part in parts(s.tokens * s.width):
                count = part.stop - part.start
                m = await mine.recv(P, Output, c=(count, 2, params.primes, p.tight))  # L3
                opened = key.read(read(p, m.c, "L3", P), math.ldexp(p.scale, LIFT), 1)[:, 0]
                if not float(np.abs(opened).max()) <= 2 * s.x_bound:
                    raise ProtocolAbort(
                        NAME, "L3", "range", "activations left their interval; samples unlike the model's own"
                    )
                hidden[i, part] = opened
                seed = entropy.bytes(32)
                again = key.encrypt(np.repeat(opened[:, None], p.slots, axis=1), seed, entropy)
                await mine.send(P, Again(block.pack_words(p, again), seed))  # L4
        what = f"all activations of block {number + 1} for {n} samples"
        seen.append(mine.reveal(hidden, to=ch.me, line="L3", what=what, protocol=NAME))
        if number:
            relative = (await mine.recv(P, Relative, order=(n,))).order  # L5
            check_order(relative, n, "L5")
            orders.append(relative)
    last = (await mine.recv(P, Order, order=(n,))).order  # L6
    check_order(last, n, "L6")
    return linked(seen, orders, last).reshape(n, s.depth, s.tokens, s.width)


def linked(seen: list[F64], relative: list[Any], last: Any) -> F64:
    """Activations in the order of the samples, (n, L, ·): seen[l][i] belongs to sample Π_l[i]."""
    order, back = last, []
    for l in range(len(seen) - 1, -1, -1):  # noqa: E741
        rows = np.empty_like(seen[l])
        rows[order] = seen[l]
        back.append(rows)
        if l:
            before = np.empty_like(order)
            before[relative[l - 1]] = order  # row i of block l is row relative[i] of block l-1
            order = before
    return np.stack(back[::-1], axis=1)


async def provider(
    ch: Channel, params: Params, encoder: Encoder, ledger: Ledger | None = None, *, entropy: Entropy
) -> dict[Party, int]:
    """The part of P. Returns how many samples each owner brought."""
    if encoder.shape != params.shape:
        raise ParameterError("the model has another shape than was announced")
    p, s, rounded, ledger = params.crypto, params.shape, encoder.rounded(params.crypto.weight_bits), ledger or Ledger()

    async def serve(u: Party) -> int:
        mine = ch.sub(str(u))
        planned = blocks_of(s, p)
        key = await mine.recv(u, Key, **key_shapes(p, [h for one in planned for h in one.openings]))  # L1
        n = key.batches
        if n < 2:
            raise ProtocolAbort(NAME, "L1", "too-few", f"'{u}' brings {n} sample(s); two are needed to permute")
        ledger.admit(u, n, params.budget)
        side = ProviderSide(mine, params.inside, u, key, entropy, tied=False)
        circuit = Circuit(s, p, side.refresh, rounded, side.ev, (), side.pool)
        xs = [await side.inputs((s.tokens - 1) * s.inputs) for _ in range(n)]  # L2
        before: Any = None
        for layer in range(s.depth):
            ch.step(f"{u}: block {layer + 1} of {s.depth}, {n} samples", protocol=NAME, line="L3")
            for i in range(n):
                circuit.follow(planned[layer].openings)
                x = await circuit.embed(xs[i]) if layer == 0 else xs[i]
                xs[i] = await circuit.block(x, layer)
            order = shuffle(n, entropy)
            for i in order:
                for part in parts(xs[i].n):
                    lifted = side.ev.combine([(1 << LIFT, xs[i].get(range(part.start, part.stop), params.primes))])
                    c = side.ev.flood(lifted, LIFT, params.primes, entropy)
                    await mine.send(u, Output(side.ev.host(c)))  # L3
            for i in order:
                shelf = side.pool.shelf(xs[i].n, 2, p.count, p.degree)
                for part in parts(xs[i].n):
                    m = await mine.recv(u, Again, c0=(part.stop - part.start, p.count, p.tight))  # L4
                    shelf.put(part.start, block.expand(p, read(p, m.c0, "L4", u), seed_of(m.seed, "L4", u)))
                xs[i] = Values(xs[i].n, 2, p.scale, shelf.read, p.count)
            mine.record_opening(to=u, line="L3", what=f"all activations of block {layer + 1}", protocol=NAME)
            if before is not None:
                at = np.empty_like(before)
                at[before] = np.arange(n)
                await mine.send(u, Relative(at[order]))  # L5
            before = order
        await mine.send(u, Order(before))  # L6
        return n

    counts = await asyncio.gather(*(serve(u) for u in params.owners))
    return dict(zip(params.owners, counts, strict=True))
