"""What an owner of encrypted inference can still shift unnoticed, and how far that moves what it reads.

    python benchmarks/passing_lies.py            quadratic attention, ring 8192, two blocks of 5 tokens x 16 features
    python benchmarks/passing_lies.py --quick    one block of 3 x 8
    python benchmarks/passing_lies.py --bound    what taps and checks hold, were no lie found out (`lying_owner`)

First what ties cost in bytes, and what passes in a block of that size: the largest lie in one coefficient of one answer
that the check of `tied_answers` lets pass whatever was drawn, as a share of the largest coefficient that a value may
have. Then, of every opening of a small model with random weights, how far such a lie moves a tap, over the width of the
noise that covers a tap's coefficients. Above 1 it shows; log2(1 + that) bounds the bits of one coefficient. It is
measured on lies that are so many times larger that they show, with the check ignored and nothing flooded.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "src"))
sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))

from encoders import Sums, quadratic_shape, shifted, tiny, untied

from cloister.mpc.crypto.owner_ckks import scheme
from cloister.mpc.crypto.owner_ckks.packed_refresh import dropped
from cloister.mpc.crypto.owner_ckks.smallness_check import ROOM, SENT
from cloister.study import Party
from cloister.testing import Case, run_protocol, values
from cloister.workflows.adapt_model import encrypted_inference as inference
from cloister.workflows.adapt_model import leakage_bound
from cloister.workflows.adapt_model.answer_integrity import REACH, Tie
from cloister.workflows.adapt_model.block_messages import traffic
from cloister.workflows.adapt_model.block_plan import checked, plan
from cloister.workflows.adapt_model.packing import Packing, packings

HUB, ANN = Party("hub"), Party("ann")
P = scheme.QUADRATIC
MOST = 1 << 20  # times larger than what passes: beyond, a lie counts as unseen


def passing(tie, openings, i):
    """The largest lie, in units of an answer."""
    keep = checked(P)
    most = math.ldexp(dropped(P, keep, SENT), ROOM) * dropped(P, openings[i].back, keep)
    return most / tie.weights[i] / REACH


def largest(how):
    """Coefficient of an answer."""
    return 2 * math.ldexp(how.factor, -how.shift) * 2.0**how.message_bits


class Liar:
    """Adds an integer to the constant term of the first answer to one opening."""

    def __init__(self):
        self.at, self.lie, self.honest = -1, 0, scheme.OwnerKey.refresh
        liar = self

        def refresh(key, cts, how, seed, entropy):
            return liar.refresh(key, cts, how, seed, entropy)

        scheme.OwnerKey.refresh = refresh

    def start(self, at, lie):
        self.at, self.lie, self.told, self.watch = at, lie, 0, Sums()

    def refresh(self, key, cts, how, seed, entropy):
        first = self.watch.left == 0
        sums = self.watch.follow(cts, how)
        mine = first and not sums and self.told == self.at
        self.told += sums
        if not mine:
            return self.honest(key, cts, how, seed, entropy)
        return shifted(key, cts, how, seed, entropy, {(0, 0): self.lie})


def without_flooding():
    flood = scheme.Evaluator.flood
    scheme.Evaluator.flood = lambda self, cts, bits, primes, entropy: flood(self, cts, 4, primes, entropy)


def moves(encoder):
    """One row for each opening."""
    s = encoder.shape
    planned = plan(s, P)
    two = np.random.default_rng(1).uniform(-1, 1, (2, s.tokens - 1, s.inputs))
    x = np.resize(two, (P.slots, *two.shape[1:]))
    case = Case(inference.Params((ANN,), HUB, s, P), {HUB: (encoder,), ANN: (x,)})
    liar = Liar()

    def taps(at=-1, lie=0):
        liar.start(at, lie)
        run = run_protocol(inference, case, timeout=600.0)
        return None if run.errors else values(run)[ANN]

    base = np.stack([taps() for _ in range(4)])
    mean, noise = base.mean(axis=0), float(base.std(axis=0).max())
    (_, tap), *_ = planned.taps
    width = math.ldexp(1.0, tap.flood_bits) / tap.scale
    print(f"  noise of a tap without lies {noise:.1e}; flooding {width:.1e} a coefficient", file=sys.stderr, flush=True)
    number = 0
    for layer in range(s.depth):
        openings = planned.openings_of(layer)
        tie = Tie.of(P, openings)
        for i, how in enumerate(openings):
            lie, times, off = passing(tie, openings, i), 64, 0.0
            while off <= 20 * noise and times < MOST:  # or until it spoils the batch
                found = taps(number, round(lie * 16 * times))
                if found is None:
                    break
                times, off = 16 * times, float(np.abs(found - mean).max())
            yield {
                "block": layer + 1, "opening": how.label, "values": how.count,
                "passes_log2": round(math.log2(lie / largest(how)), 1), "times": times,
                "moves_over_flooding": float(f"{off / times / width:.2g}"), "seen": off > 20 * noise,
            }  # fmt: skip
            number += 1


def price():
    """Bytes of the sums, over all others; what passes in a block."""
    for tokens, width, heads, depth in ((65, 192, 3, 6), (197, 768, 12, 12)):
        shape = quadratic_shape(tokens, width, heads, depth)
        for packed in packings(shape, P):
            planned = plan(shape, P, 1, packed)
            (_, down, up), (_, d, u) = traffic(planned.openings), traffic(planned.openings, controls=0)
            of_block = planned.openings_of(depth - 2)
            tie, passes = Tie.of(P, of_block), {}
            for i, how in enumerate(of_block):
                here = math.log2(passing(tie, of_block, i) / largest(how))
                passes[how.label] = round(max(passes.get(how.label, -99.0), here), 1)
            yield {
                "tokens": tokens, "width": width, "blocks": depth, "tokens_in_a_ciphertext": packed,
                "more_bytes_percent": round(100 * ((down + up) / (d + u) - 1), 2), "passes_log2": passes,
            }  # fmt: skip


def bound():
    """Of whole models: bits of a batch and of a sample, by packing."""
    vits = ((65, 192, 3, 6, (3, 6), 8), (65, 192, 3, 6, (3, 6), 32), (197, 768, 12, 12, (3, 6, 9, 12), 8))
    for tokens, width, heads, depth, taps, rank in vits:
        for attention, crypto in (("taylor", scheme.STANDARD), ("quadratic", P)):
            shape = quadratic_shape(tokens, width, heads, depth, attention=attention)
            shape = dataclasses.replace(shape, inputs=48 if tokens == 65 else 768, taps=taps, rank=rank)
            for packed in (Packing(shape, crypto, one) for one in packings(shape, crypto)):
                bits, many = leakage_bound.batch_bits(packed), packed.samples
                yield {
                    "tokens": tokens, "width": width, "attention": attention, "taps": len(taps), "rank": rank,
                    "batch": many, "mbit": round(bits / 1e6, 2), "kbit_a_sample": round(bits / many / 1e3, 1),
                }  # fmt: skip
            print(f"  {leakage_bound.exposure(shape, crypto, 1 << 16)}", file=sys.stderr, flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--bound", action="store_true")
    args = parser.parse_args()
    if args.bound:
        for row in bound():
            print(json.dumps(row))
        return
    quick = args.quick
    small = {"tokens": 3, "width": 8, "heads": 2, "hidden": 16, "depth": 1, "taps": (1,)}
    larger = {"tokens": 5, "width": 16, "heads": 2, "hidden": 32, "depth": 2, "taps": (2,)}
    encoder, _ = tiny(attention="quadratic", **(small if quick else larger))
    for row in price():
        print(json.dumps(row), flush=True)
    untied(pytest.MonkeyPatch())
    without_flooding()
    for row in moves(encoder):
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
