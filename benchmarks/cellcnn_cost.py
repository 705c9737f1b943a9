"""What encrypted CellCnn training costs (see cellcnn.py): local iteration, refresh, keys, growth."""

from __future__ import annotations

import functools
import resource
import time
from dataclasses import replace

import numpy as np

from cloister.models import cellcnn

RATES = {"learning_rate": 0.1, "momentum": 0.9, "interval": 3.0}


class Bench:
    """One party's work, timed with a key that this process holds alone; the arithmetic is the same."""

    def __init__(self, config, parameters=None, parties=3):
        from cloister.mpc.crypto.ckks import scheme as ckks
        from cloister.mpc.crypto.entropy import Entropy
        from cloister.workflows.train_cellcnn import cellcnn_circuit as circuit

        self.config, self.ckks, self.circuit, self.entropy = config, ckks, circuit, Entropy()
        self.P = parameters or circuit.choose_ring(config, parties)
        self.L = None if parameters else circuit.Layout(config, self.P, parties)  # of our circuit
        self.c = ckks.context(self.P)
        self.secret, self.public = ckks.own_key(self.P, self.entropy)
        self.relin = self.switching(self.c.ring.multiply(self.secret.ntt, self.secret.ntt))
        self.keys = {}

    def switching(self, target, galois=0):
        c, r, P = self.c, self.c.ring, self.P
        K, prg = len(c.primes), self.entropy.prg()
        a = np.stack([r.uniform(prg, K) for _ in range(P.digits)])
        b = []
        for d in range(P.digits):
            e = r.add_product(r.error(prg, K), a[d], self.secret.ntt, sign=-1)
            b.append(c.bases.known_share(e, target, d))
        return self.ckks.SwitchingKey(np.stack(b), a, galois)

    def rotation(self, steps):
        if steps not in self.keys:
            r, g = self.c.ring, self.c.galois(steps)
            turned = r.forward(r.of_small(r.rotate_coefficients(self.secret.coefficients, g), len(self.c.primes)))
            self.keys[steps] = self.switching(turned, g)
        return self.keys[steps]

    def local_iteration(self, repeat=3, clock=time.process_time):
        """Seconds of CPU, or of another clock, for one batch: from [M] to [Z], as it leaves the site."""
        config, L, c = self.config, self.L, self.c
        rng = np.random.default_rng(0)
        X = rng.normal(0, 0.3, (config.batch, config.markers))
        Y = cellcnn.one_hot(rng.integers(0, config.classes, config.batch), config.classes)
        M = cellcnn.initial(config).M
        cts = [c.encrypt(self.public, L.model_slots(M, g), self.P.top, self.P.scale, self.entropy) for g in L.groups]
        keys = {s: self.rotation(s) for s in L.rotations}

        def once():
            for ct, group in zip(cts, L.groups, strict=True):
                made = [
                    self.circuit.gradient(L, ct, X[at : at + L.I], Y[at : at + L.I, list(group)], self.relin, keys)
                    for at in range(0, config.batch, L.I)
                ]
                c.rerandomise(self.public, functools.reduce(c.add, made), self.entropy)

        return timed(once, repeat, clock)


def timed(action, repeat=3, clock=time.process_time):
    found = []
    for _ in range(repeat):
        began = clock()
        action()
        found.append(clock() - began)
    return min(found)


class Played:
    """A protocol among threads of this process: what came out, and CPU seconds and bytes of every party."""

    def __init__(self, module, params, inputs, timeout=3600):
        from cloister.testing import Case, check_no_errors, run_protocol, values

        began = time.perf_counter()
        run = run_protocol(module, Case(params, inputs), timeout=timeout)
        check_no_errors(run)
        self.wall, self.values = time.perf_counter() - began, values(run)
        self.cpu = {p: o.cost["cpu_seconds"] for p, o in run.outcomes.items()}
        self.sent = {p: sum(e.bytes for e, _ in r.entries if e.kind == "sent") / 1e6 for p, r in run.receipts.items()}

    def site(self):
        """Seconds and megabytes of a site, mean over them; the hub's seconds."""
        sites = [p for p in self.cpu if p != "hub"]
        return (
            float(np.mean([self.cpu[p] for p in sites])),
            float(np.mean([self.sent[p] for p in sites])),
            self.cpu["hub"],
        )


def parties(count):
    from cloister.study import Party

    return tuple(Party(f"site-{i}") for i in range(count)), Party("hub")


def refresh_cost(bench, count):
    """One step's three refreshes: seconds and megabytes of a site, seconds of the aggregator."""
    from cloister.mpc.threshold_ckks import collective_refresh as cr
    from cloister.workflows.train_cellcnn import encrypted_training as et
    from cloister.workflows.train_cellcnn.training_refreshes import refreshes

    names, hub = parties(count)
    todo = refreshes(et.Params(names, hub, bench.P, bench.config))
    secrets = {p: bench.ckks.Secret.draw(bench.P, bench.entropy) for p in names}
    zero, found = np.zeros(bench.P.slots), []
    for name in ("gradient", "update", "product"):
        r = todo[name]
        cts = [bench.c.encrypt(bench.public, zero, bench.P.base, s, bench.entropy) for s in r.params.scales]
        inputs = {hub: (cts, r.maps)} | {p: (s, r.maps) for p, s in secrets.items()}
        inputs[names[0]] = (*inputs[names[0]], cts)
        found.append(Played(cr, r.params, inputs).site())
    return np.sum(found, axis=0)


def key_cost(bench, count=3):
    from cloister.mpc.threshold_ckks import collective_key, collective_relin, collective_rotation, key_switch

    names, hub = parties(count)
    secrets = {p: bench.ckks.Secret.draw(bench.P, bench.entropy) for p in names}
    own = {p: (s,) for p, s in secrets.items()}
    found = {}
    for module, extra in ((collective_key, {}), (collective_relin, {}), (collective_rotation, {"steps": (1,)})):
        found[module.NAME] = Played(module, module.Params(names, hub, bench.P, **extra), own).site()
    c, P = bench.c, bench.P
    ct = c.encrypt(bench.public, np.zeros(P.slots), P.base, P.scale, bench.entropy)
    (c0, c1), _ = c.raw(ct)
    params = key_switch.Params(names, names[0], P, P.base, P.scale, bench.L.query_noise)
    inputs = {p: (s, c1) for p, s in secrets.items()} | {names[0]: (secrets[names[0]], c1, c0)}
    played = Played(key_switch, params, inputs)
    found[key_switch.NAME] = (played.cpu[names[1]], played.sent[names[1]], 0.0)
    return found


def cost(args):
    from cellcnn_published import published_iteration, rings

    from cloister.mpc.crypto import cores

    rows = []
    base = cellcnn.Config(markers=38, filters=8, classes=2, batch=100, steps=400, **RATES)
    bench = Bench(base, parties=10)
    P = bench.P
    rows.append(f"ring 2^{P.degree.bit_length() - 1}, {len(P.bits)} primes, {sum(P.bits)} bits, scale 2^{P.scale_bits}")
    local = bench.local_iteration(2 if args.quick else 5)
    wall = bench.local_iteration(2 if args.quick else 10, time.perf_counter)
    rows.append(
        f"local iteration, n=100 m=38 h=8 o=2: {local:.2f} s CPU, {wall:.3f} s by the clock on {cores.count()} core(s)"
    )
    for name, ring in rings(base, 3).items():
        if args.quick and name != "scale 2^50":
            continue
        theirs = published_iteration(base, Bench, ring, repeat=1)
        rows.append(
            f"the published circuit, same library, {name}, {len(ring.bits)} primes: {theirs:.2f} s CPU;"
            f" ours is {local / theirs:.2f} of it"
        )
    for n in (3,) if args.quick else (3, 5, 10):
        seconds, size, hub = refresh_cost(bench, n)
        rows.append(
            f"three refreshes of a step, N={n}: {seconds:.2f} s CPU and {size:.1f} MB sent per site, {hub:.2f} s at the"
            f" aggregator; a whole step {local + seconds:.2f} s and {step_bytes(bench, n):.1f} MB per site"
        )
    for name, (seconds, size, hub) in key_cost(bench).items():
        rows.append(f"{name}, N=3: {seconds:.2f} s CPU and {size:.1f} MB sent per site, {hub:.2f} s at the aggregator")
    rows.append(f"switching keys of a training: {1 + len(bench.L.rotations)}")
    growth = [("n", 200), ("n", 400), ("m", 16), ("m", 128), ("h", 32), ("h", 64), ("o", 4)]
    names = {"n": "batch", "m": "markers", "h": "filters", "o": "classes"}
    for axis, value in growth[:1] if args.quick else growth:
        other = Bench(replace(base, **{names[axis]: value}))
        rows.append(
            f"{names[axis]} = {value}: {other.local_iteration(1):.2f} s CPU per local iteration,"
            f" {len(other.L.groups)} x {other.L.chunks} ciphertexts, {step_bytes(other, 3):.1f} MB per site and step"
        )
        del other
    rows.append(f"memory of this process: {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6:.1f} GB at most")
    return rows


def step_bytes(bench, count):
    """Megabytes that a site sends in a step, from the protocol's own account (the tests hold it to the receipts)."""
    from cloister.workflows.train_cellcnn import encrypted_training as et

    names, hub = parties(count)
    sizes = [
        et.cost(et.Params(names, hub, bench.P, replace(bench.config, steps=steps)))[names[0]][1] for steps in (1, 2)
    ]
    return (sizes[1] - sizes[0]) / 1e6
