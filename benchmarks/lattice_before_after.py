"""What withstanding one liar costs: encrypted training, prediction and an encoder's block beside the commit before.

    python benchmarks/lattice_before_after.py             three sites, 38 markers, 8 filters, batches of 100;
                                                          a block of 5 tokens x 16 features in the standard ring
    python benchmarks/lattice_before_after.py --quick     two sites, 3 markers, 2 filters, batches of 12;
                                                          a block of 3 tokens x 8 features in the small ring
    python benchmarks/lattice_before_after.py --only block

The commit before (754d8c9) is checked out into a temporary worktree and measured by the same code in a process of its
own, one after the other, on one thread. Seconds are CPU of a party's own thread.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import platform
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np

BEFORE = "5a0c885"
HERE = Path(__file__).resolve()


def find(name):
    """A protocol file, in today's folders or in yesterday's."""
    today = ("workflows.train_cellcnn", "workflows.predict_cellcnn", "workflows.adapt_model")
    for folder in (*today, "protocols.cellcnn", "protocols.ckks", "protocols.inference", "protocols"):
        try:
            return importlib.import_module(f"cloister.{folder}.{name}")
        except ModuleNotFoundError:
            continue
    raise ModuleNotFoundError(name)


def played(module, params, inputs):
    """What came out, and per party (CPU seconds, megabytes sent)."""
    from cloister.testing import Case, check_no_errors, run_protocol, values

    run = run_protocol(module, Case(params, inputs), timeout=3600)
    check_no_errors(run)
    sent = {p: sum(e.bytes for e, _ in r.entries if e.kind == "sent") / 1e6 for p, r in run.receipts.items()}
    every = [e for r in run.receipts.values() for e, _ in r.entries if e.kind == "sent"]
    received = {p: sum(e.bytes for e in every if e.to == p) / 1e6 for p in run.receipts}
    return values(run), {p: (o.cost["cpu_seconds"], sent[p], received[p]) for p, o in run.outcomes.items()}


def training(count, config, steps):
    """Cost of one step (the difference between trainings), of keys and first step, of a prediction."""
    from cloister.models import cellcnn
    from cloister.study import Party

    et, circuit, op = find("encrypted_training"), find("cellcnn_circuit"), find("oblivious_prediction")
    sites, hub = tuple(Party(f"site-{i}") for i in range(count)), Party("hub")
    config = replace(config, steps=steps)
    ring = circuit.choose_ring(config, count)
    rng, data = np.random.default_rng(0), {}
    for p in sites:
        y = rng.integers(0, config.classes, (steps, config.batch))
        X = rng.normal(0, 0.5, (steps, config.batch, config.markers))
        X[..., 0] += 1.5 * y - 0.7
        data[p] = (X, cellcnn.one_hot(y, config.classes))
    found = {}
    for n in (1, 1, steps):  # the first compiles
        short = replace(config, steps=n)
        params = et.Params(sites, hub, ring, short)
        found[n] = played(et, params, {p: (X[:n], Y[:n]) for p, (X, Y) in data.items()})
    kept, whole = found[steps]
    first = found[1][1]
    step = {p: [(b - a) / (steps - 1) for a, b in zip(first[p], whole[p], strict=True)] for p in whole}
    X = rng.uniform(-2, 2, (20, config.markers))
    ask = op.Params(sites, hub, sites[1], ring, config, 1)
    _, query = played(op, ask, {p: (kept[p],) for p in (hub, *sites)} | {sites[1]: (kept[sites[1]], X)})
    return {
        "ring": f"degree {ring.degree}, {len(ring.bits)} primes, {sum(ring.bits)} bits, scale 2^{ring.scale_bits}",
        "keys and first step": first,
        "step": step,
        "prediction of 20 samples": query,
    }


def inference(*, quick):
    """Cost of one batch through a block, keys included, and of its parts that a second batch has, too."""
    import cloister
    from cloister.study import Party

    sys.path.insert(0, str(Path(cloister.__file__).parents[2] / "tests" / "support"))
    encoders = importlib.import_module("encoders")
    for name in ("owner_ckks.scheme", "block"):
        try:
            crypto = importlib.import_module(f"cloister.mpc.crypto.{name}")
            break
        except ModuleNotFoundError:
            continue
    ring = crypto.SMALL if quick else crypto.STANDARD
    sizes = {} if quick else {"tokens": 5, "width": 16, "heads": 2, "hidden": 32, "rank": 4}
    encoder, x = encoders.tiny(**sizes)
    ei, owner, hub = find("encrypted_inference"), Party("owner"), Party("hub")
    params = ei.Params((owner,), hub, encoder.shape, ring)
    for _ in range(2):  # the first compiles
        _, cost = played(ei, params, {hub: (encoder,), owner: (x[:64],)})
    about = f"degree {ring.degree}, {ring.count} primes of {ring.bits} bits, scale 2^{ring.scale_bits}"
    return {"block's ring": about, "a block, one batch": cost}


def measure(args):
    if args.only == "block":
        return print(json.dumps(inference(quick=args.quick)))
    from cloister.models import cellcnn

    config = cellcnn.Config(markers=38, filters=8, classes=2, batch=100, learning_rate=0.1, momentum=0.9)
    if args.quick:
        config = replace(config, markers=3, filters=2, batch=12)
    found = training(2 if args.quick else 3, config, 2 if args.quick else 4)
    if args.only is None:
        found |= inference(quick=args.quick)
    return print(json.dumps(found))


def child(source, args):
    env = dict(os.environ, PYTHONPATH=str(source), OMP_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1", NUMBA_NUM_THREADS="1")
    command = [sys.executable, str(HERE), "--measure", *(["--quick"] if args.quick else [])]
    command += ["--only", args.only] if args.only else []
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stderr[-2000:])
    return json.loads(done.stdout.splitlines()[-1])


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--only", choices=["training", "block"])
    parser.add_argument("--measure", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        return measure(args)
    with tempfile.TemporaryDirectory() as folder:
        old = Path(folder) / "before"
        git = ["git", "-C", str(HERE.parents[1]), "worktree"]
        subprocess.run([*git, "add", "--detach", "-q", str(old), BEFORE], check=True)
        try:
            before, after = child(old / "src", args), child(HERE.parents[1] / "src", args)
        finally:
            subprocess.run([*git, "remove", "--force", str(old)], check=True)
    report(before, after)
    return None


def report(before, after):
    print(f"{platform.processor() or platform.machine()}, one thread; before: {BEFORE}")
    for ring in ("ring", "block's ring"):
        if ring in after:
            print(f"{ring} before: {before[ring]}; after: {after[ring]}")
    print(f"{'':26s}{'party':12s}{'CPU s':>16s}{'MB sent':>20s}{'MB received':>20s}")
    for what in ("keys and first step", "step", "prediction of 20 samples", "a block, one batch"):
        if what not in after:
            continue
        sites = [p for p in after[what] if p != "hub"]
        rows = {"auditor": sites[:1], "other sites": sites[1:], "all sites": sites, "hub": ["hub"]}
        rows = {"owner": sites, "provider": ["hub"]} if sites == ["owner"] else rows
        for name, who in rows.items():
            cells = []
            for k in range(3):
                a, b = (float(np.mean([side[what][p][k] for p in who])) for side in (before, after))
                cells.append(f"{a:.2f} → {b:.2f} ({b / a:.2f}x)" if a > 1e-9 else f"{a:.2f} → {b:.2f}")
            print(f"{what:26s}{name:12s}" + "".join(f"{c:>22s}" for c in cells))


if __name__ == "__main__":
    main()
