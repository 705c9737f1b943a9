"""A whole encrypted block on a graphics card, both roles on it: time, traffic, memory, error, and where the time goes.

    python benchmarks/block_gpu.py                       65 x 192, ring 8192, 4096 samples, on a card
    python benchmarks/block_gpu.py --attention quadratic [--tokens 197 --width 768 --heads 12] [--where]
    python benchmarks/block_gpu.py --attention quadratic --samples 32 --blocks 6    tokens share ciphertexts
    python benchmarks/block_gpu.py --attention quadratic --tokens 197 --width 768 --heads 12 --blocks 12 --samples 1 32
    python benchmarks/block_gpu.py --quick               17 x 64 on a card; without one, a tiny block on the CPU
    python benchmarks/block_gpu.py --device cpu          the same code on the CPU

Random weights; a full batch of activations, encrypted by the owner at the block's door: a few samples, again and
again. More samples than a batch holds take several batches, one after the other.
Messages are handed over as they are and counted.
Every opening has its secret sums (`tied_answers`), which both
sides compare after each block, as in a run: a block whose answers do not add up ends the benchmark. The first run warms
the card up, the second is reported; the result is compared with the plain student on some tokens, features and samples.
What does not fit on the card lies in the host's memory; how much that will be is said first. With `--where` there is
one run more, in which the card is waited for after every operation, so that all seconds have a name. Needs NumPy, and
on a card PyTorch and CuPy; not numba.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import contextlib
import json
import math
import os
import platform
import resource
import sys
import time
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", str(os.cpu_count()))
os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")  # blocks as large as half a card

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1] / "src"))
sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))
sys.path.insert(0, str(Path(__file__).parent))

from block_cost import macs, of_block
from encoders import one

from cloister.errors import ParameterError
from cloister.models import polynomial
from cloister.mpc.crypto.entropy import Entropy
from cloister.mpc.crypto.owner_ckks import rotations, scheme, smallness_check
from cloister.provider.gpu import cuda_device, devices
from cloister.workflows.adapt_model import block_plan as circuit
from cloister.workflows.adapt_model.answer_integrity import Sums, Tie, Ties
from cloister.workflows.adapt_model.block_messages import powers, together
from cloister.workflows.adapt_model.block_values import Values
from cloister.workflows.adapt_model.packing import cheapest

SAMPLES = 32  # that fill the batch, and are compared with the plain student


def encoder_of(tokens, width, heads, attention, depth=1):
    """Random weights of that shape, and samples; scores so small that one of the first seeds keeps its intervals."""
    for seed in range(20):
        with contextlib.suppress(ParameterError):
            return one(tokens=tokens, inputs=2, width=width, heads=heads, hidden=4 * width, seed=seed, steps=7,
                       root_steps=5, rank=min(8, width), query=0.3 * (width // heads) ** -0.5, attention=attention,
                       samples=SAMPLES, depth=depth, taps=(depth,))  # fmt: skip
    raise SystemExit("no random encoder of that shape keeps its intervals")


class Clock:
    """Seconds by what was done: of the card by its own events; of a CPU those that this process had of it."""

    def __init__(self, device):
        self.spent, self.marks, self.on_card = collections.Counter(), [], device == "gpu"

    @contextlib.contextmanager
    def __call__(self, what):
        before = self.now()
        yield
        self.marks.append((what, before, self.now()))

    def now(self):
        if not self.on_card:
            return time.process_time()
        import torch

        mark = torch.cuda.Event(enable_timing=True)
        mark.record()
        return mark

    def settle(self):
        """Wait for the card, and add up."""
        if self.on_card:
            import torch

            torch.cuda.synchronize()
        for what, a, b in self.marks:
            self.spent[what] += a.elapsed_time(b) / 1e3 if self.on_card else b - a
        self.marks.clear()
        return time.monotonic() if self.on_card else time.process_time()


class Stack:
    """Seconds by what was done, with the card waited for; what is done within something is its own."""

    def __init__(self, device):
        self.spent, self.on_card, self.within, self.last = collections.Counter(), device == "gpu", ["other"], 0.0
        self.idle = True  # until the run that is watched

    @contextlib.contextmanager
    def __call__(self, what):
        if self.idle:
            yield
            return
        self.settle()
        self.within.append(what)
        try:
            yield
        finally:
            self.settle()
            self.within.pop()

    def settle(self):
        if self.on_card:
            import torch

            torch.cuda.synchronize()
        now = time.monotonic() if self.on_card else time.process_time()
        self.spent[self.within[-1]] += now - self.last if self.last else 0.0
        self.last = now
        return now


class Watched:
    """An evaluator, a pool or a shelf whose every call is on the clock."""

    def __init__(self, what, clock, name):
        self._what, self._clock, self._name = what, clock, name

    def __getattr__(self, name):
        found = getattr(self._what, name)
        if not callable(found):
            return found

        def timed(*args, **options):
            with self._clock(f"{self._name}: {name}"):
                out = found(*args, **options)
            return Watched(out, self._clock, "shelf") if name == "shelf" else out

        return timed


class Sides:
    """A provider and an owner on one device; arrays are handed over, and counted as messages."""

    def __init__(self, crypto, device, at_once=0, *, where=False):
        self.crypto, self.entropy, self.device = crypto, Entropy(), device
        self.key = owner_key(crypto, device, self.entropy)
        self.ev = devices.evaluator(device, crypto, self.key.b, self.key.seed)
        self.at_once = at_once or self.ev.at_once
        self.ring = self.ev.ring
        self.pool, self.clock, self.traffic = self.ev.pool(), Clock(device), collections.Counter()
        self.ties = Ties(self.ev, None, self.entropy)  # of the block at hand
        if where:
            self.clock = Stack(device)
            self.ev, self.pool = Watched(self.ev, self.clock, "card"), Watched(self.pool, self.clock, "pool")

    def encrypted(self, x):
        """Values (n, samples), again and again up to a whole batch, on a shelf."""
        p, step = self.crypto, max(32, self.at_once // 2)
        again = np.arange(p.slots) % x.shape[1]  # as they are, if they fill it
        shelf = self.pool.shelf(len(x), 2, p.count, p.degree, fresh=True)
        for lo in range(0, len(x), step):
            seed = self.entropy.bytes(32)
            c0 = self.key.encrypt(x[lo : lo + step][:, again], seed, self.entropy)
            shelf.put(lo, self.ev.expand(c0, seed), seed)
        return Values(len(x), 2, p.scale, shelf.read, p.count)

    def hand_keys(self, openings, packed=1):
        """Switching keys, as many as that plan needs: their size in MB."""
        seed = self.entropy.bytes(32)
        keys = self.key.switching(powers(openings) + 2, seed, self.entropy, packed)
        self.ev.accept(keys, seed)
        return keys.size * self.crypto.bits / 8e6

    async def refresh(self, groups):
        e, back, clock = self.entropy, [], self.clock
        for how, take in groups:
            shelf = self.pool.shelf(how.count, 2, how.back, self.crypto.degree, fresh=True)
            back.append(shelf.read)
            step = together(how, self.at_once)
            messages = [slice(lo, min(how.count, lo + step)) for lo in range(0, how.count, step)]
            sums = Sums(self.ev, messages, e)
            for part in messages:
                lo, count, seed = part.start, part.stop - part.start, e.bytes(32)
                with clock(f"provider: {how.label}"):
                    some = take(range(lo, part.stop), how.primes)
                with clock("provider: ties"):
                    sums.add(lo, some)
                fresh = self.round_trip(some, how, seed)
                del some
                with clock("provider: ties"):
                    sums.answered(lo, fresh)
                shelf.put(lo, fresh[:count], seed)
                whole = 2 * how.primes + 2 * how.back  # both polynomials of every value each way, with all its primes
                self.traffic.update(opened=count, whole=count * whole * self.crypto.degree * 4)
                del fresh
            answers = self.round_trip(sums.controls, how, e.bytes(32))
            with clock("provider: ties"):
                self.ties.add(sums.off(answers))
        return back

    def round_trip(self, cts, how, seed):
        """Masked, opened, encrypted afresh, and without the mask."""
        e, masks, clock = self.entropy, self.entropy.bytes(32), self.clock
        with clock("provider: blind"):
            sent = self.packed(self.ev.blind(cts, how, masks, e))
        with clock("owner: refresh"):
            c0 = self.packed(self.key.refresh(self.unpacked(sent), how, seed, e))
        self.traffic.update(down=sent.nbytes, up=c0.nbytes + 32)
        with clock("provider: unblind"):
            return self.ev.unblind(self.unpacked(c0), seed, how, masks)

    def agree(self, openings):
        """What both sides do after a block; ends the benchmark if answers do not add up."""
        with self.clock("comparison"):
            sent, masks = self.ties.open(Tie.of(self.crypto, openings))
            h = smallness_check.shifts(masks)
            w = smallness_check.uncover(self.key, sent) if self.device == "cpu" else self.read_check(sent)
            mine = smallness_check.Leaves((smallness_check.cells(w, 0), smallness_check.cells(w, 1)), self.entropy)
            if not smallness_check.opens(mine.seal, mine.open(h), h, smallness_check.cells(masks, h)):
                raise SystemExit("answers do not add up")
        tight = sent.nbytes * self.crypto.bits // 32
        self.traffic.update(down=tight + 64 + h.nbytes, up=32 + h.size * (smallness_check.SALT + smallness_check.LEAF))

    def read_check(self, sent):
        words = cuda_device.host(self.ring.words(self.key.opened(cuda_device.put(sent))))
        return np.stack([smallness_check.joined(x) for x in words])

    def packed(self, x):
        """As on the wire, but where it lies."""
        return self.ring.tight(x) if self.device == "gpu" else self.ev.host(x)

    def unpacked(self, words):
        return self.ring.loose(words) if self.device == "gpu" else self.ev.put(words)


def owner_key(crypto, device, entropy):
    if device == "cpu":
        return scheme.OwnerKey(crypto, entropy)
    from cloister.provider.gpu import gpu

    return gpu.OwnerKey(crypto, entropy)


def memory(device, *, reset=False):
    """Peak GiB: of the card's, or of this process."""
    if device == "cpu":
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    import torch

    if reset:
        torch.cuda.reset_peak_memory_stats()
    return torch.cuda.max_memory_allocated() / 2**30


def sizes(s, crypto):
    """GiB of the largest arrays of a block at full batch, kept whole; of fresh ones half may do (`gpu_shelf`)."""
    one, values = crypto.degree * 4 / 2**30, s.tokens * s.width
    found = {f"{h.label}": h.count * 2 * h.back * one for h in of_block(s, crypto) if h.count >= values}
    x = crypto.count - 2 if s.attention == "quadratic" else crypto.count
    return {k: round(v, 1) for k, v in ({"activations": values * 2 * x * one} | found).items()}


def blocks(sides, encoder, flat, packed=1):
    """All blocks on values (T·d, samples), or (2·d, slots): their result, and the seconds of the whole."""
    s, crypto = encoder.shape, sides.crypto
    x = sides.encrypted(flat)
    planned = of_block(s, crypto, packed=packed)
    run = circuit.circuit_of(s, packed)(s, crypto, sides.refresh, encoder, sides.ev, planned, sides.pool)
    x = asyncio.run(run.enter(x))
    sides.ties.clear()
    sides.clock.settle()
    spent, traffic = sides.clock.spent.copy(), sides.traffic.copy()  # before this batch: entering is no block's
    began = sides.clock.settle()
    for layer in range(s.depth):
        x = asyncio.run(run.block(x, layer))
        sides.agree(planned[layer * len(planned) // s.depth :][: len(planned) // s.depth])
    took = sides.clock.settle() - began
    return x, took, sides.clock.spent - spent, sides.traffic - traffic


def laid_out(b0, packed, crypto):
    """Activations (samples, T, d) as ciphertexts hold them; in places without a token, those of another one."""
    if packed == 1:
        return np.ascontiguousarray(b0.reshape(len(b0), -1).T)
    tokens = np.repeat(b0[:, :1], packed, axis=1), b0[:, 1 + np.arange(packed) % (b0.shape[1] - 1)]
    return np.concatenate([rotations.spread(np.ascontiguousarray(x.transpose(2, 1, 0)), crypto.degree) for x in tokens])


def read_back(sides, out, s, packed, samples):
    """(Some tokens, some features, what was found of them (samples, tokens, features))."""
    features = list(range(0, s.width, max(1, s.width // 16)))
    if packed == 1:
        tokens = sorted({0, s.tokens // 2, s.tokens - 1})
        found = [
            sides.key.read(out.get([t * s.width + f for f in features], out.k), out.scale, samples) for t in tokens
        ]
        return tokens, features, np.stack(found).transpose(2, 0, 1)
    at, rows = rotations.slots(sides.crypto.degree, packed), []
    for row in range(2):
        cts = out.get([row * s.width + f for f in features], out.k)
        rows.append(sides.key.read(cts, out.scale, sides.crypto.slots)[:, at])
    whole = np.concatenate([rows[0][:, :1], rows[1][:, : s.tokens - 1]], axis=1)  # (features, T, samples)
    return list(range(s.tokens)), features, whole.transpose(2, 1, 0)[:samples]


def several(crypto, device, tokens, width, heads, repeats, at_once, attention, samples, depth, *, where):
    """A row for each number of samples, of one model."""
    encoder, x = encoder_of(tokens, width, heads, attention, depth)
    encoder = encoder.rounded(crypto.weight_bits)
    s = encoder.shape
    polynomial.check_ranges(encoder, x)
    print(f"  the random model keeps its intervals; GiB {sizes(s, crypto)}", file=sys.stderr, flush=True)
    exact = b0 = polynomial.embed(encoder, x)
    for layer in range(depth):
        exact = polynomial.run_block(s, encoder.blocks[layer], exact, layer)
    for number in samples or [0]:
        sides = Sides(crypto, device, at_once, where=where)
        yield measure(sides, encoder, b0, exact, repeats, number, where=where)
        del sides


def measure(sides, encoder, b0, exact, repeats, samples, *, where):
    """So many samples in as many batches as they need; each batch holds others, and is compared with the student."""
    s, crypto, depth = encoder.shape, sides.crypto, encoder.shape.depth
    packed = cheapest(s, crypto, samples).tokens if samples else 1
    n = crypto.slots // packed
    count = -(-samples // n) if samples else 1
    at_hand = [np.arange(i * n, i * n + min(n, samples or n)) % len(b0) for i in range(count)]
    planned = circuit.plan(s, crypto, 0, packed)
    keys = sides.hand_keys(planned.openings, packed)
    memory(sides.device, reset=True)
    wall, square, norm, spent, traffic = 0.0, 0.0, 0.0, collections.Counter(), collections.Counter()
    for number in range(repeats + where):
        if number == repeats:
            sides.clock.idle = False
        total, spent, traffic, square, norm = 0.0, collections.Counter(), collections.Counter(), 0.0, 0.0
        for which in at_hand:
            out, took, its, sent = blocks(sides, encoder, laid_out(b0[which], packed, crypto), packed)
            total, spent, traffic = total + took, spent + its, traffic + sent
            at, features, found = read_back(sides, out, s, packed, min(len(which), len(b0)))
            right = exact[which[: len(found)]][:, at][:, :, features]
            square, norm = square + float(((found - right) ** 2).sum()), norm + float((right**2).sum())
            del out  # it may be half of the host's memory
        wall = total if number < repeats else wall
        print(f"  {total:.2f} s{', watched' if number == repeats else ''}", file=sys.stderr, flush=True)
    peak, per = memory(sides.device), samples or n
    down, up = (traffic[way] / 1e6 for way in ("down", "up"))
    each = wall / per / depth
    return {
        "tokens": s.tokens, "width": s.width, "heads": s.heads, "blocks": depth, "attention": s.attention,
        "ring": crypto.degree, "tokens_in_a_ciphertext": packed, "batch": n, "batches": count, "samples": per,
        "device": sides.device,
        "rounds_per_block": (len(planned.rounds) - (1 if s.attention == "quadratic" else 2)) / depth,
        "s": round(wall, 3), "ms_per_sample_and_block": round(each * 1e3, 4),
        "ns_per_mac": round(each / macs(s) * 1e9, 4), "MB_down": round(down, 1), "MB_up": round(up, 1),
        "MB_without_savings": round(traffic["whole"] / 1e6, 1),
        "MB_per_sample_and_block": round((down + up) / per / depth, 3), "openings": traffic["opened"],
        "MB_switching_keys": round(keys, 2), "modulus_bits": crypto.count * crypto.bits,
        "s_per_sample_at_Gbit": {
            f"{rate:g}": round((wall + (down + up + keys) * 8e-3 / rate) / per, 3) for rate in (0.1, 1.0, 10.0)
        },
        "peak_GiB": round(peak, 1), "relative_error": float(f"{math.sqrt(square / norm):.2e}"),
        "seconds_by_step": {k: round(v, 4) for k, v in spent.most_common()},
    }  # fmt: skip


def rates():
    """Millions of transforms a second, and GB/s of the two streams, on the card."""
    import torch

    from cloister.provider.gpu import gpu_ring

    ring, n = gpu_ring.ring_on_card(scheme.STANDARD), 2048
    k, degree, found = scheme.STANDARD.count, scheme.STANDARD.degree, {}
    x = ring.uniform(bytes(32), n, k)
    cases = {
        "forward_M_per_s": (lambda: ring.forward(x), n * k / 1e6),
        "opened_M_per_s": (lambda: ring.opened(x.view(n, 1, k, degree), None), n * k / 1e6),
        "uniform_GB_per_s": (lambda: ring.uniform(bytes(32), n, k), n * k * degree * 8 / 1e9),
        "noise_GB_per_s": (lambda: ring.noise(bytes(32), n, k, 1), n * k * degree * 8 / 1e9),
    }
    for name, (work, amount) in cases.items():
        work()
        torch.cuda.synchronize()
        began = time.monotonic()
        for _ in range(5):
            work()
        torch.cuda.synchronize()
        found[name] = round(5 * amount / (time.monotonic() - began), 1)
    return found


def machine(device):
    return cuda_device.name() if device == "gpu" else f"{platform.machine()}, {os.cpu_count()} cores"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("gpu", "cpu"), help="default: a card if there is one")
    parser.add_argument("--quick", action="store_true", help="a smaller block")
    parser.add_argument("--tokens", type=int, default=0)
    parser.add_argument("--width", type=int, default=0)
    parser.add_argument("--heads", type=int, default=0)
    parser.add_argument("--attention", choices=polynomial.ATTENTION, default="taylor")
    parser.add_argument("--repeats", type=int, default=0, help="default: 2 on a card, 1 elsewhere")
    parser.add_argument("--samples", type=int, nargs="+", help="one row for each; default: a batch of all slots")
    parser.add_argument("--blocks", type=int, default=1)
    parser.add_argument("--where", action="store_true", help="name all seconds")
    parser.add_argument("--at-once", type=int, default=0, help="ciphertexts that are computed together")
    args = parser.parse_args()
    device = args.device or ("cpu" if cuda_device.why_not() else "gpu")
    devices.check(device)
    small = device == "cpu" and args.quick
    shape = (3, 8, 2) if small else (17, 64, 1) if args.quick else (65, 192, 3)
    tokens, width, heads = (
        given or own for given, own in zip((args.tokens, args.width, args.heads), shape, strict=True)
    )
    crypto = scheme.SMALL if small else scheme.STANDARD
    crypto = scheme.QUADRATIC if args.attention == "quadratic" else crypto
    repeats = args.repeats or (1 if device == "cpu" else 2)
    print(f"machine: {machine(device)}", flush=True)
    if device == "gpu":
        print(json.dumps(rates()), flush=True)
    shape = tokens, width, heads, repeats, args.at_once, args.attention, args.samples, args.blocks
    for found in several(crypto, device, *shape, where=args.where):
        print(json.dumps(found, indent=1), flush=True)


if __name__ == "__main__":
    main()
