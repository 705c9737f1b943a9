"""What one encrypted block costs: part `cost` of `adaptation.py`, and the block of 65 tokens x 192 features by itself.

    python benchmarks/block_cost.py                      65 x 192, ring 8192, 4096 samples: a quarter of an hour
    python benchmarks/block_cost.py --tokens 17 --width 64 --heads 1 [--attention quadratic]

Times are CPU seconds of one thread, provider and owner apart; both run here, in turn, on real ciphertexts. Random
weights, activations encrypted by the owner at the block's door. The result is compared with the plain student's on
some tokens and samples.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import json
import os
import platform
import resource
import sys
import time
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1] / "src"))
sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))

from encoders import one

from cloister.errors import ParameterError
from cloister.models import polynomial
from cloister.mpc.crypto.entropy import Entropy
from cloister.mpc.crypto.owner_ckks import scheme as block
from cloister.mpc.crypto.owner_ckks.ciphertext_store import Pool
from cloister.workflows.adapt_model import block_plan as circuit
from cloister.workflows.adapt_model.block_messages import parts, powers
from cloister.workflows.adapt_model.block_values import Values

PUBLISHED = (
    136.0 / (197 * 12 * 768**2 + 2 * 197**2 * 768) * 1e9
)  # ns per MAC: a ViT-Base block, later version of the paper


def macs(s) -> int:
    """Multiply-accumulates of one block and sample."""
    return s.tokens * (4 * s.width**2 + 2 * s.width * s.hidden) + 2 * s.tokens**2 * s.width


def encoder_of(tokens, width, heads, inputs=2, seed=0, attention="taylor"):
    for at in range(seed, seed + 50):
        try:
            return one(tokens=tokens, inputs=inputs, width=width, heads=heads, hidden=4 * width, seed=at, steps=7,
                       root_steps=5, rank=min(8, width), query=0.55 * (width // heads) ** -0.5,
                       attention=attention)[0]  # fmt: skip
        except ParameterError:
            continue
    raise SystemExit("no random encoder of that shape keeps its intervals")


class Sides:
    """A provider and an owner in one process, with a clock for each."""

    def __init__(self, crypto, memory=1 << 30):
        self.crypto, self.entropy = crypto, Entropy()
        self.key = block.OwnerKey(crypto, self.entropy)
        self.ev = block.Evaluator(crypto, self.key.b, self.key.seed)
        self.pool = Pool(memory)
        self.spent, self.traffic = collections.Counter(), collections.Counter()
        self.began = time.monotonic()
        self.held = 0  # bytes of the largest message and its answer: what an owner must hold

    def clock(self, what, f, *args):
        began = time.thread_time()
        out = f(*args)
        self.spent[what] += time.thread_time() - began
        return out

    def encrypted(self, x):
        """Values (n, samples) on a shelf."""
        p = self.crypto
        shelf = self.pool.shelf(len(x), 2, p.count, p.degree)
        for part in parts(len(x)):
            seed = self.entropy.bytes(32)
            c0 = self.clock("owner: first encryption", self.key.encrypt, x[part], seed, self.entropy)
            shelf.put(part.start, block.expand(p, c0, seed))
        return Values(len(x), 2, p.scale, shelf.read, p.count)

    def hand_keys(self, openings):
        """Switching keys, as many as that plan needs."""
        seed = self.entropy.bytes(32)
        self.ev.accept(self.key.switching(powers(openings) + 2, seed, self.entropy), seed)

    async def refresh(self, groups):
        e, back = self.entropy, []
        for how, take in groups:
            began = time.monotonic()
            shelf = self.pool.shelf(how.count, 2, how.back, self.crypto.degree)
            back.append(shelf.read)
            for lo in range(0, how.count, how.group):
                ids = range(lo, min(how.count, lo + how.group))
                some = self.clock(f"compute for {how.label}", take, ids, how.primes)
                for part in parts(len(some)):
                    masks, seed = e.bytes(32), e.bytes(32)
                    count = part.stop - part.start
                    sent = self.ev.host(self.clock("blind", self.ev.blind, some[part], how, masks, e))
                    c0 = self.clock("owner: refresh", self.key.refresh, self.ev.put(sent), how, seed, e)
                    fresh = self.clock("unblind", self.ev.unblind, c0, seed, how, masks)
                    self.clock("shelf", shelf.put, lo + part.start, fresh[:count])
                    c0 = self.ev.host(c0)
                    self.traffic.update(down=sent.nbytes, up=c0.nbytes + 32, opened=count)
                    self.held = max(self.held, sent.nbytes + c0.nbytes)
            if time.monotonic() - began > 10:
                done = {k: round(v, 1) for k, v in self.spent.items()} | dict(self.traffic)
                print(
                    f"  {time.monotonic() - self.began:6.0f} s: {how.label} {json.dumps(done)}",
                    file=sys.stderr,
                    flush=True,
                )
        return back


def of_block(s, crypto, out=0, packed=1):
    """The openings of one block: without the embedding, which quadratic attention does not open, and the tap."""
    every = circuit.plan(s, crypto, out, packed).openings
    return every[0 if s.attention == "quadratic" else 1 : -1]


def encrypted_block(
    crypto, tokens, width, heads=2, checked=(0,), samples=256, memory=1 << 30, out=0, attention="taylor"
):
    """One block of random weights on a full batch, against the plain student on some tokens and samples.

    With `out`, only so many tokens come out of it (attending to all): a stretch of a block that is too long to run.
    """
    encoder = encoder_of(tokens, width, heads, attention=attention).rounded(crypto.weight_bits)
    s, n = encoder.shape, crypto.slots
    x = np.random.default_rng(1).uniform(-1, 1, (n, tokens - 1, s.inputs))
    for start in range(0, n, 256):
        polynomial.check_ranges(encoder, x[start : start + 256])
    b0 = polynomial.embed(encoder, x)
    exact = polynomial.run_block(s, encoder.blocks[0], b0[:samples], 0)
    sides = Sides(crypto, memory)
    sides.hand_keys(circuit.plan(s, crypto, out).openings)
    planned = of_block(s, crypto, out)
    run = circuit.circuit_of(s)(s, crypto, sides.refresh, encoder, sides.ev, planned, sides.pool)
    v0 = asyncio.run(run.enter(sides.encrypted(np.ascontiguousarray(b0.reshape(n, -1).T))))
    del b0, x
    first = sides.spent.pop("owner: first encryption")
    began, wall = time.thread_time(), time.monotonic()
    b1 = asyncio.run(run.block(v0, 0, out))
    total, wall = time.thread_time() - began, time.monotonic() - wall
    error, size = 0.0, 0.0
    for t in checked:
        ids = range(t * width, (t + 1) * width)
        found = sides.key.read(b1.get(ids, b1.k), b1.scale, samples).T
        error += float(((found - exact[:, t]) ** 2).sum())
        size += float((exact[:, t] ** 2).sum())
    owner, down, up = sides.spent["owner: refresh"], sides.traffic["down"], sides.traffic["up"]
    largest = {k: round(v, 1) for k, v in sides.spent.most_common(12)}
    sides.spent.clear()
    return {
        "tokens": tokens, "tokens_out": out or tokens, "width": width, "heads": heads, "attention": attention,
        "ring": crypto.degree, "batch": n,
        "relative_error": float(f"{np.sqrt(error / size):.2e}"),
        "provider_ms_per_sample": round((total - owner) / n * 1e3, 2),
        "owner_ms_per_sample": round(owner / n * 1e3, 2),
        "ns_per_mac": round(total / n / macs(s) * 1e9, 2),
        "MB_down_per_sample": round(down / n / 1e6, 3), "MB_up_per_sample": round(up / n / 1e6, 3),
        "owner_first_encryption_ms_per_sample": round(first / n * 1e3, 2),
        "owner_holds_MB": round(sides.held / 1e6, 1),
        "openings": sides.traffic["opened"],
        "peak_GB_both_sides": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, 2),
        "cpu_s": round(total, 1), "wall_s": round(wall, 1), "seconds_by_step": largest,
    }  # fmt: skip


# ---- small batches: slots as features, with rotations ---------------------------------------------------------------


def diagonals(w, size, slots):
    """The non-zero diagonals k of a matrix that holds w once in every `size` slots: y_i = Σ_k diagonal_k[i]·x_{i+k}."""
    out, inside = {}, np.arange(slots) % size
    padded = np.zeros((size, size))
    padded[: w.shape[0], : w.shape[1]] = w
    for k in range(1 - size, size):
        column = inside + k
        good = (column >= 0) & (column < size)
        values = np.where(good, padded[inside, np.clip(column, 0, size - 1)], 0.0)
        if values.any():
            out[k] = values
    return out


class Rotations:
    """A linear layer by diagonals in SEAL, baby steps and giant steps: one ciphertext holds slots/size tokens."""

    def __init__(self, w, degree=8192, bits=(40, 30, 30, 30, 30, 40), baby=16):
        import seal

        self.size, self.slots, self.baby, self.scale = 1 << (max(w.shape) - 1).bit_length(), degree // 2, baby, 2.0**30
        p = seal.EncryptionParameters(seal.scheme_type.ckks)
        p.set_poly_modulus_degree(degree)
        p.set_coeff_modulus(seal.CoeffModulus.Create(degree, list(bits)))
        ctx = seal.SEALContext(p, expand_mod_chain=True, sec_level=seal.sec_level_type.tc128)
        maker, self.keys = seal.KeyGenerator(ctx), seal.GaloisKeys()
        giants = range(-self.size, self.size, baby)
        steps = sorted({*range(1, baby), *(g for g in giants if g)})
        maker.create_galois_keys(steps, self.keys)
        self.enc, self.dec = seal.Encryptor(ctx, maker.create_public_key()), seal.Decryptor(ctx, maker.secret_key())
        self.ev, self.coder = seal.Evaluator(ctx), seal.CKKSEncoder(ctx)
        found = diagonals(w, self.size, self.slots)
        self.plain = {
            g: [
                self.coder.encode(np.roll(found[g + b], g), self.scale) if g + b in found else None for b in range(baby)
            ]
            for g in giants
        }

    def __call__(self, ct):
        ev = self.ev
        turned = [ct] + [ev.rotate_vector(ct, b, self.keys) for b in range(1, self.baby)]
        total = None
        for g, row in self.plain.items():
            part = None
            for x, p in zip(turned, row, strict=True):
                if p is not None:
                    y = ev.multiply_plain(x, p)
                    part = y if part is None else ev.add(part, y)
            if part is None:
                continue
            part = ev.rotate_vector(part, g, self.keys) if g else part
            total = part if total is None else ev.add(total, part)
        return total


def small_batches(tokens=65, width=192, batches=(1, 16, 64, 200, 4096)):
    """The linear layers of one block, CPU seconds a batch: ours, at the price of 4096, and SEAL with rotations."""
    rng = np.random.default_rng(0)
    w = rng.normal(0, width**-0.5, (width, width))
    layer = Rotations(w)
    x = rng.normal(size=(layer.slots // layer.size, width))
    packed = np.zeros((len(x), layer.size))
    packed[:, :width] = x
    ct = layer.enc.encrypt(layer.coder.encode(packed.reshape(-1), layer.scale))
    began = time.thread_time()
    y = layer(ct)
    seals = time.thread_time() - began
    found = np.asarray(layer.coder.decode(layer.dec.decrypt(y))).reshape(packed.shape)[:, :width]
    assert np.abs(found - x @ w.T).max() < 1e-2, np.abs(found - x @ w.T).max()
    sides, ours = Sides(block.STANDARD), 0.0
    c = np.ascontiguousarray(sides.encrypted(rng.normal(size=(8, block.STANDARD.slots))).get(range(8), 6))
    for outs, ins, polys in ((3 * width, width, 2), (width, width, 4), (4 * width, width, 2), (width, 4 * width, 3)):
        ints = np.rint(rng.normal(0, ins**-0.5, (outs, ins)) * 2**13).astype(np.int64)
        pieces = np.ascontiguousarray(np.concatenate([c, c], axis=1)[np.arange(ins) % 8, :polys])
        began = time.thread_time()
        sides.ev.linear(ints, pieces)
        ours += (time.thread_time() - began) * tokens
    held = layer.slots // layer.size
    rows = [
        {"batch": b, "ours_s": round(ours, 1), "rotations_s": round(-(-b * tokens // held) * 12 * seals, 1)}
        for b in batches
    ]
    even = ours / (12 * seals * tokens / held)
    return rows, {"SEAL_ms_per_192x192_layer": round(seals * 1e3, 1), "tokens_a_ciphertext": held,
                  "even_at_samples": round(even)}  # fmt: skip


def machine() -> str:
    return f"{platform.machine()}, {os.cpu_count()} cores, one thread, load {os.getloadavg()[0]:.1f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=65)
    parser.add_argument("--width", type=int, default=192)
    parser.add_argument("--heads", type=int, default=3)
    parser.add_argument("--ring", choices=("small", "standard"), default="standard")
    parser.add_argument("--attention", choices=polynomial.ATTENTION, default="taylor")
    parser.add_argument("--out", type=int, default=0, help="only so many tokens come out")
    args = parser.parse_args()
    crypto = {"small": block.SMALL, "standard": block.STANDARD}[args.ring]
    crypto = block.QUADRATIC if args.attention == "quadratic" else crypto
    checked = sorted({0, args.tokens // 2, args.tokens - 1})
    if args.out:
        checked = range(args.out)
    found = encrypted_block(
        crypto, args.tokens, args.width, args.heads, checked, out=args.out, attention=args.attention
    )
    print(f"machine: {machine()}")
    print(json.dumps(found | {"published_ns_per_mac": round(PUBLISHED, 1)}, indent=1))


if __name__ == "__main__":
    main()
