"""What encrypted CellCnn training costs (see cellcnn.py): local iteration, refresh, keys, whole trainings, growth."""

from __future__ import annotations

import resource
import time
from dataclasses import replace

import numpy as np

from cloister.models import cellcnn

RATES = {"learning_rate": 0.1, "momentum": 0.9, "interval": 3.0}


class Bench:
    """One party's work, timed with a key that this process holds alone; the arithmetic is the same."""

    def __init__(self, config, parameters=None, parties=3):
        from cloister.crypto import ckks
        from cloister.crypto.entropy import Entropy
        from cloister.protocols import cellcnn_circuit as circuit

        self.config, self.ckks, self.circuit, self.entropy = config, ckks, circuit, Entropy()
        self.P = parameters or circuit.choose_ring(config, parties)
        self.L = circuit.Layout(config, self.P, parties)  # of our circuit
        self.c = ckks.context(self.P)
        self.secret, self.public = ckks.own_key(self.P, self.entropy)
        self.relin = self.switching(self.c.ring.multiply(self.secret.ntt, self.secret.ntt))
        self.keys = {}

    def switching(self, target, galois=0):
        c, r, P = self.c, self.c.ring, self.P
        K, prg = len(c.primes), self.entropy.prg()
        a = np.stack([r.uniform(prg, K) for _ in range(P.top)])
        b = []
        for d in range(P.top):
            e = r.add_product(r.error(prg, K), a[d], self.secret.ntt, sign=-1)
            b.append(r.add_multiple(e, target, c.primes[-1], d))
        return c.load_key(self.ckks.SwitchingKey(np.stack(b), a, galois))

    def rotation(self, steps):
        if steps not in self.keys:
            r, g = self.c.ring, self.c.galois(steps)
            turned = r.forward(r.of_small(r.rotate_coefficients(self.secret.coefficients, g), len(self.c.primes)))
            self.keys[steps] = self.switching(turned, g)
        return self.keys[steps]

    def local_iteration(self, repeat=3):
        """Seconds of CPU for one batch: from [M] to [Z]."""
        config, L, c = self.config, self.L, self.c
        rng = np.random.default_rng(0)
        X = rng.normal(0, 0.3, (config.batch, config.markers))
        Y = cellcnn.one_hot(rng.integers(0, config.classes, config.batch), config.classes)
        M = cellcnn.initial(config).M
        cts = [c.encrypt(self.public, L.model_slots(M, g), self.P.top, self.P.scale, self.entropy) for g in L.groups]
        keys = {s: self.rotation(s) for s in L.rotations}

        def once():
            for ct, group in zip(cts, L.groups, strict=True):
                for at in range(0, config.batch, L.I):
                    part = slice(at, at + L.I)
                    self.circuit.gradient(L, ct, X[part], Y[part][:, list(group)], self.relin, keys)

        return timed(once, repeat)


def timed(action, repeat=3):
    found = []
    for _ in range(repeat):
        began = time.process_time()
        action()
        found.append(time.process_time() - began)
    return min(found)


def refresh_cost(bench, parties):
    """CPU seconds of one site's three refresh shares of a step, and of the aggregator's part; bytes of a site."""
    from cloister.protocols import collective_refresh as cr
    from cloister.protocols import encrypted_training as et
    from cloister.protocols.training_refreshes import refreshes
    from cloister.study import Party
    from cloister.testing import Case, check_no_errors, run_protocol

    names = tuple(Party(f"site-{i}") for i in range(parties))
    params = et.Params(names, Party("hub"), bench.P, bench.config)
    total = {"all": 0.0, "bytes": 0}
    secrets = {p: bench.ckks.Secret.draw(bench.P, bench.entropy) for p in names}
    c = bench.c
    for name in ("gradient", "update", "product"):
        todo = refreshes(params)[name]
        zero = np.zeros(bench.P.slots)
        cts = [c.encrypt(bench.public, zero, bench.P.base, s, bench.entropy) for s in todo.params.scales]
        inputs = {Party("hub"): (cts, todo.maps)} | {p: (s, todo.maps, cr.Ledger()) for p, s in secrets.items()}
        began = time.process_time()
        run = run_protocol(cr, Case(todo.params, inputs), timeout=600)
        total["all"] += time.process_time() - began
        check_no_errors(run)
        total["bytes"] += sum(e.bytes for e, _ in run.receipts[names[0]].entries if e.kind == "sent")
    return total


def key_cost(bench):
    from cloister.protocols import collective_key, collective_relin, collective_rotation
    from cloister.study import Party
    from cloister.testing import Case, check_no_errors, run_protocol

    names = (Party("site-0"), Party("site-1"))
    secrets = {p: (bench.ckks.Secret.draw(bench.P, bench.entropy),) for p in names}
    found = {}
    for module, extra in ((collective_key, {}), (collective_relin, {}), (collective_rotation, {"steps": (1,)})):
        began = time.process_time()
        run = run_protocol(module, Case(module.Params(names, Party("hub"), bench.P, **extra), secrets), timeout=600)
        check_no_errors(run)
        size = sum(e.bytes for e, _ in run.receipts["site-0"].entries if e.kind == "sent")
        found[module.NAME] = (time.process_time() - began, size / 1e6)
    return found


def cost(args):
    rows = []
    base = cellcnn.Config(markers=38, filters=8, classes=2, batch=100, steps=400, **RATES)
    bench = Bench(base)
    P = bench.P
    rows.append(f"ring 2^{P.degree.bit_length() - 1}, {len(P.bits)} primes, {sum(P.bits)} bits, scale 2^{P.scale_bits}")
    local = bench.local_iteration(1 if args.quick else 3)
    rows.append(f"local iteration, n=100 m=38 h=8 o=2: {local:.2f} s CPU")
    from cellcnn_published import published_iteration, rings

    for name, ring in rings(base, 3).items():
        if args.quick and name != "scale 2^50":
            continue
        theirs = published_iteration(base, Bench, ring, repeat=1)
        rows.append(
            f"the published circuit, same library, {name}, {len(ring.bits)} primes: {theirs:.2f} s CPU;"
            f" ours is {local / theirs:.2f} of it"
        )
    for n in (2, 3) if args.quick else (3, 5, 10):
        r = refresh_cost(bench, n)
        rows.append(
            f"three refreshes of a step, N={n}: {r['all']:.2f} s CPU of all parties and the aggregator,"
            f" {r['bytes'] / 1e6:.1f} MB sent per site"
        )
    per_step = local + r["all"] / (n + 1)
    for name, (seconds, size) in key_cost(bench).items():
        rows.append(f"{name}, two sites and aggregator: {seconds:.2f} s CPU, {size:.1f} MB sent per site")
    steps = 20 * 1000 // 100
    rows.append(
        f"the paper's training (10 parties x 1000 samples, 20 epochs, {steps} steps): about"
        f" {per_step * steps / 60:.1f} min of CPU per party, refreshes counted as shared evenly; the paper: 20 min"
    )
    growth = [("n", 200), ("n", 400), ("m", 16), ("m", 128), ("h", 32), ("h", 64), ("o", 4)]
    names = {"n": "batch", "m": "markers", "h": "filters", "o": "classes"}
    for axis, value in growth[:1] if args.quick else growth:
        other = Bench(replace(base, **{names[axis]: value}))
        rows.append(
            f"{names[axis]} = {value}: {other.local_iteration(1):.2f} s CPU per local iteration,"
            f" {len(other.L.groups)} x {other.L.chunks} ciphertexts"
        )
        del other
    rows.append(f"memory of this process: {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6:.1f} GB at most")
    return rows


# ---- whole trainings -------------------------------------------------------------------------------------------------


def encrypted_training(config, batches, *, open_model=True):
    """One encrypted training among threads; returns the hub's result, seconds, and bytes that a site sent."""
    from cloister.protocols import cellcnn_circuit
    from cloister.protocols import encrypted_training as et
    from cloister.study import Party
    from cloister.testing import Case, check_no_errors, run_protocol, values

    names = tuple(Party(f"site-{i}") for i in range(len(batches)))
    ring = cellcnn_circuit.choose_ring(config, len(names))
    params = et.Params(names, Party("hub"), ring, config, open_model=open_model)
    began = time.perf_counter()
    run = run_protocol(et, Case(params, dict(zip(names, batches, strict=True))), timeout=3600)
    check_no_errors(run)
    wall = time.perf_counter() - began
    sent = sum(e.bytes for e, _ in run.receipts["site-0"].entries if e.kind == "sent")
    return values(run)[Party("hub")], wall, sent


def paper(args):
    """Ten sites, m = 32, batches of 100: 20 of the paper's 200 steps, all parties on this machine."""
    steps, sites = (2, 3) if args.quick else (20, 10)
    config = cellcnn.Config(markers=32, filters=8, classes=2, batch=100, steps=steps, **RATES)
    rng, batches = np.random.default_rng(0), []
    for _ in range(sites):
        y = rng.integers(0, 2, (steps, 100))
        X = rng.normal(0, 1, (steps, 100, 32))
        X[..., 0] += 1.5 * y - 0.7
        batches.append((X, cellcnn.one_hot(y, 2)))
    twin = cellcnn.train(config, batches)
    began = time.process_time()
    done, wall, sent = encrypted_training(config, batches)
    cpu = time.process_time() - began
    error = max(np.abs(getattr(done.weights, k) - getattr(twin, k)).max() for k in ("W", "V"))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    return [
        f"{sites} sites x {steps} steps, m=32 h=8 n=100, keys and opening included: {cpu:.0f} s CPU for all parties and"
        f" {wall:.0f} s wall; {sent / 1e6:.0f} MB sent per site; largest difference to the twin {error:.1e};"
        f" {peak:.1f} GB of memory at most"
    ]
