"""Whole encrypted CellCnn trainings and queries, all parties on this machine (see cellcnn.py)."""

from __future__ import annotations

import resource
from dataclasses import replace

import numpy as np
from cellcnn_cost import RATES, Played, parties

from cloister.models import cellcnn


def encrypted_training(config, batches, *, open_model=True):
    """One encrypted training among threads."""
    from cloister.workflows.train_cellcnn import cellcnn_circuit
    from cloister.workflows.train_cellcnn import encrypted_training as et

    names, hub = parties(len(batches))
    ring = cellcnn_circuit.choose_ring(config, len(names))
    params = et.Params(names, hub, ring, config, open_model=open_model)
    return Played(et, params, dict(zip(names, batches, strict=True)))


def paper(args):
    """Ten sites, m = 32, batches of 100: the paper's 200 steps (or `--steps`), all parties on this machine."""
    steps, sites = (2, 3) if args.quick else (args.steps or 200, 10)
    whole = cellcnn.Config(markers=32, filters=8, classes=2, batch=100, steps=steps, **RATES)
    batches = made_up(whole, sites)
    first = encrypted_training(replace(whole, steps=1), [(X[:1], Y[:1]) for X, Y in batches])  # keys and opening
    played = encrypted_training(whole, batches)
    twin, found = cellcnn.train(whole, batches), played.values["hub"].weights
    error = difference(found, twin)
    (few, few_mb, few_hub), (many, many_mb, many_hub) = first.site(), played.site()
    step, step_mb, step_hub = ((b - a) / (steps - 1) for a, b in ((few, many), (few_mb, many_mb), (few_hub, many_hub)))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    return [
        f"{sites} sites x {steps} steps, m=32 h=8 n=100: {many:.0f} s CPU and {many_mb:.0f} MB sent per site,"
        f" {many_hub:.0f} s CPU at the aggregator; {played.wall:.0f} s wall for all on this machine",
        f"of which per step: {step:.2f} s CPU and {step_mb:.1f} MB per site, {step_hub:.2f} s at the aggregator;"
        f" keys, first step and opening: {few:.1f} s and {few_mb:.0f} MB per site",
        f"minutes of CPU: {many / 60:.1f} per site, {many_hub / 60:.1f} at the aggregator; 200 steps (20 epochs of 1000"
        f" inputs) at this rate {(few + 199 * step) / 60:.1f} per site; the paper: 20 min",
        f"largest difference to the twin {error:.1e}; {peak:.1f} GB of memory at most for all {sites + 1} parties",
    ]


def made_up(config, sites, seed=0):
    """Batches of every site in which the first markers tell the classes apart."""
    rng, batches = np.random.default_rng(seed), []
    for _ in range(sites):
        y = rng.integers(0, config.classes, (config.steps, config.batch))
        X = rng.normal(0, 1, (config.steps, config.batch, config.markers))
        for k in range(config.classes):
            X[..., k] += 1.5 * (y == k) - 0.7
        batches.append((X, cellcnn.one_hot(y, config.classes)))
    return batches


def difference(found, twin):
    return max(np.abs(getattr(found, k) - getattr(twin, k)).max() for k in ("W", "V"))


def sites(args):
    """18,000 inputs in all, one epoch in batches of 100 a site: fewer steps with more sites (the paper's Fig. 5A)."""
    rows, total = [], 1800 if args.quick else 18000
    for n in (3,) if args.quick else (2, 3, 6, 10, 15):
        steps = -(-total // (100 * n))
        config = cellcnn.Config(markers=32, filters=8, classes=2, batch=100, steps=steps, **RATES)
        batches = made_up(config, n)
        played = encrypted_training(config, batches)
        seconds, size, hub = played.site()
        error = difference(played.values["hub"].weights, cellcnn.train(config, batches))
        rows.append(
            f"N={n}: {steps} steps, {seconds:.0f} s CPU and {size:.0f} MB sent per site, {hub:.0f} s CPU at the"
            f" aggregator, {played.wall:.0f} s wall for all on this machine; difference to the twin {error:.1e}"
        )
        print("  " + rows[-1], flush=True)
    return rows


def predict(args):
    """An encrypted query of 20 samples to three sites, by the number of markers (the paper's Table 1)."""
    from cloister.workflows.predict_cellcnn import oblivious_prediction
    from cloister.workflows.train_cellcnn import cellcnn_circuit
    from cloister.workflows.train_cellcnn import encrypted_training as et

    rows = []
    for m in (16,) if args.quick else (16, 32, 64, 128):
        config = cellcnn.Config(markers=m, filters=8, classes=2, batch=100, steps=1, **RATES)
        names, hub = parties(3)
        ring = cellcnn_circuit.choose_ring(config, 3)
        batches = dict(zip(names, made_up(config, 3), strict=True))
        trained = Played(et, et.Params(names, hub, ring, config), batches).values
        asked = oblivious_prediction.Params(names, hub, names[1], ring, config, 1)
        X = np.random.default_rng(1).uniform(-2, 2, (20, m))
        played = Played(
            oblivious_prediction,
            asked,
            {p: (trained[p],) for p in (hub, names[0], names[2])} | {names[1]: (trained[names[1]], X)},
        )
        rows.append(
            f"m={m}, 20 samples: {played.cpu[names[1]]:.2f} s CPU and {played.sent[names[1]]:.1f} MB at the querier,"
            f" {played.cpu[names[0]]:.2f} s at another site, {played.cpu[hub]:.2f} s at the coordinator,"
            f" {played.wall:.1f} s wall"
        )
        print("  " + rows[-1], flush=True)
    return rows


def classes(args):
    """Three classes on generated inputs: the encrypted model beside the clear twin."""
    steps = 2 if args.quick else 20
    config = cellcnn.Config(markers=16, filters=8, classes=3, batch=100, steps=steps, **RATES)
    batches = made_up(config, 3)
    played, twin = encrypted_training(config, batches), cellcnn.train(config, batches)
    opened = played.values["hub"].weights
    X, Y = made_up(replace(config, steps=1, batch=2000), 1, seed=7)[0]
    right = [(cellcnn.predict(cellcnn.logits(w, X[0])) == Y[0].argmax(axis=1)).mean() for w in (opened, twin)]
    seconds, size, _ = played.site()
    return [
        f"three classes, three sites, {steps} steps: {right[0]:.3f} of 2000 new inputs right (twin {right[1]:.3f}),"
        f" difference to the twin {difference(opened, twin):.1e}; {seconds:.0f} s CPU and {size:.0f} MB sent per site"
    ]
