"""The published CellCnn circuit timed beside ours (see cellcnn.py): one local iteration of PriCell's algorithm 1."""

from __future__ import annotations

import time

import numpy as np

from cloister.models import cellcnn
from cloister.mpc.crypto.ckks import scheme as ckks
from cloister.mpc.crypto.entropy import Entropy
from cloister.papers import published_circuit, published_training


class OneKey(dict):
    """Every rotation uses one key: results are wrong, times are right, and thirty keys need not be made."""

    def __init__(self, bench, rotation, conjugate):
        super().__init__()
        self.rotation, self.conjugate = rotation, conjugate

    def __missing__(self, steps):
        return self.conjugate if steps == published_circuit.CONJUGATE else self.rotation


class TimedOps(published_circuit.CipherOps):
    def rotate(self, x, steps):
        return super().rotate(x, steps if steps == published_circuit.CONJUGATE else 1)


def published_iteration(config, make, parameters, repeat=2):
    """Seconds of CPU for forward and backward pass on one batch, the refresh between them left out."""
    bench = make(config, parameters)
    P, c = bench.P, bench.c
    L = published_circuit.Layout(config, P.slots, 3)
    ops = TimedOps(P, bench.relin, OneKey(bench, bench.rotation(1), bench.rotation(0)))
    rng = np.random.default_rng(0)
    X = rng.normal(0, 0.3, (config.batch, config.markers))
    Y = cellcnn.one_hot(rng.integers(0, config.classes, config.batch), config.classes)
    w, low = cellcnn.initial(config), P.primes_at(published_training.START)
    C, W = (c.encrypt(bench.public, v, low, P.scale, Entropy()) for v in (L.conv_slots(w.W), L.dense_slots(w.V)))
    D = c.encrypt(bench.public, np.zeros(P.slots), P.primes_at(published_circuit.LEVELS), P.scale, Entropy())
    found = []
    for _ in range(repeat):
        began = time.process_time()
        published_circuit.forward(ops, L, C, W, W, C, X)
        published_circuit.backward(ops, L, D, X, Y)
        found.append(time.process_time() - began)
    return min(found)


def rings(config, parties):
    """The paper's single-prime scale, and a two-prime one as ours has."""
    return {
        "scale 2^50": published_training.choose_ring(parties),
        "scale 2^80": ckks.choose(published_circuit.LEVELS, 16384, scale_bits=80, parties=parties),
    }
