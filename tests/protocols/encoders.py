"""Tiny encoders with random weights whose values keep their intervals."""

import dataclasses

import numpy as np

from cloister.models import polynomial as poly


def tiny(norm="pre", tokens=3, inputs=2, width=8, heads=2, hidden=8, depth=1, taps=(1,), rank=2, seed=0, **more):
    """A calibrated encoder, and 256 inputs for it."""
    rng = np.random.default_rng(seed)
    d, f = width, hidden

    def g(*shape):
        return rng.normal(0, 1 / np.sqrt(shape[-1]), shape)

    def block():
        qkv = g(3 * d, d)
        qkv[:d] *= 0.5
        post = {"gain1": 1 + 0.1 * g(d), "shift1": 0.1 * g(d), "gain2": 1 + 0.1 * g(d), "shift2": 0.1 * g(d)}
        return poly.Block(
            qkv, 0.1 * g(3 * d), 0.6 * g(d, d), 0.1 * g(d), g(f, d), 0.1 * g(f) + 1.17, 0.15 * g(d, f), 0.1 * g(d),
            **(post if norm == "post" else {}),
        )  # fmt: skip

    shape = poly.Shape(
        tokens, inputs, d, heads, f, depth, norm=norm, taps=taps, rank=rank, **({"steps": 3, "root_steps": 4} | more)
    )
    blocks = tuple(block() for _ in range(depth))
    zero = np.zeros((len(taps), rank, d)), np.zeros((len(taps), rank))
    encoder = poly.Encoder(shape, 0.5 * g(d, inputs), rng.normal(0, 1, (tokens, d)), blocks, *zero)
    x = rng.uniform(-1, 1, (256, tokens - 1, inputs))
    encoder = poly.fit_projections(poly.calibrate(encoder, x), x)
    poly.check_ranges(encoder, x)
    return encoder, x


def shape_with(encoder, **changes):
    return dataclasses.replace(encoder, shape=dataclasses.replace(encoder.shape, **changes))
