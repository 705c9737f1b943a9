"""Tiny encoders with random weights whose values keep their intervals."""

import contextlib
import dataclasses

import numpy as np

from cloister.errors import ParameterError, ProtocolAbort
from cloister.models import polynomial as poly
from cloister.mpc.crypto.owner_ckks import scheme
from cloister.mpc.crypto.owner_ckks.packed_refresh import pairs_of
from cloister.workflows.adapt_model import batch_roles
from cloister.workflows.adapt_model.block_messages import chunks, pairs


def one(
    norm="pre",
    tokens=3,
    inputs=2,
    width=8,
    heads=2,
    hidden=8,
    depth=1,
    taps=(1,),
    rank=2,
    seed=0,
    query=0.35,
    samples=256,
    **more,
):
    rng = np.random.default_rng(seed)
    d, f = width, hidden

    def g(*shape):
        return rng.normal(0, 1 / np.sqrt(shape[-1]), shape)

    def block():
        qkv = g(3 * d, d)
        qkv[:d] *= query
        post = {"gain1": 1 + 0.1 * g(d), "shift1": 0.1 * g(d), "gain2": 1 + 0.1 * g(d), "shift2": 0.1 * g(d)}
        return poly.Block(
            qkv, 0.1 * g(3 * d), 0.6 * g(d, d), 0.1 * g(d), g(f, d), 0.1 * g(f) + 1.17, 0.15 * g(d, f), 0.1 * g(d),
            offset=3.0 + 0.2 * np.arange(heads) if more.get("attention") == "quadratic" else np.zeros(0),
            **(post if norm == "post" else {}),
        )  # fmt: skip

    shape = poly.Shape(
        tokens, inputs, d, heads, f, depth, norm=norm, taps=taps, rank=rank, **({"steps": 3, "root_steps": 4} | more)
    )
    blocks = tuple(block() for _ in range(depth))
    zero = np.zeros((len(taps), rank, d)), np.zeros((len(taps), rank))
    encoder = poly.Encoder(shape, 0.5 * g(d, inputs), rng.normal(0, 1, (tokens, d)), blocks, *zero)
    x = rng.uniform(-1, 1, (samples, tokens - 1, inputs))
    encoder = poly.fit_projections(poly.calibrate(encoder, x), x)
    poly.check_ranges(encoder, x)
    return encoder, x


def tiny(*args, seed=0, **options):
    """The first calibrated encoder from that seed on that keeps its intervals, and 256 inputs for it."""
    for at in range(seed, seed + 99):
        try:
            return one(*args, seed=at, **options)
        except ParameterError:
            continue
    raise AssertionError("no such encoder")


def shape_with(encoder, **changes):
    changes = ({"tap_bounds": ()} if "taps" in changes else {}) | changes
    return dataclasses.replace(encoder, shape=dataclasses.replace(encoder.shape, **changes))


def micro(**more):
    """As little as a block can be: its messages are few, and the same on every processor."""
    little = {"exp_degree": 2, "steps": 1, "root_steps": 1, "tokens": 2}
    encoder, _ = tiny(inputs=1, width=4, heads=1, hidden=2, rank=1, seed=0, **(little | more))
    sign = np.where(encoder.projections.sum(axis=2) < 0, -1.0, 1.0)  # LAPACKs choose it differently
    turned = dataclasses.replace(
        encoder, projections=encoder.projections * sign[..., None], centres=encoder.centres * sign
    )
    return coarse(turned)


def coarse(x):
    """To six digits: what is fitted differs in the last ones between processors."""
    if isinstance(x, float):
        return float(f"{x:.6g}")
    if isinstance(x, np.ndarray) and x.dtype.kind == "f":
        return np.round(x, 6)
    if isinstance(x, tuple):
        return tuple(coarse(one) for one in x)
    if dataclasses.is_dataclass(x):
        return dataclasses.replace(x, **{f.name: coarse(getattr(x, f.name)) for f in dataclasses.fields(x)})
    return x


def quadratic_shape(tokens=65, width=192, heads=3, depth=1, norm="pre", attention="quadratic"):
    """Of no model: what a plan needs to know."""
    parts = {"variances": (4.0,) * (2 * depth), "means": (20.0 if attention == "quadratic" else 1.0,) * depth}
    return poly.Shape(
        tokens, 48, width, heads, 4 * width, depth, norm, taps=(depth,), rank=32, attention=attention,
        sum_bound=8.0 if attention == "quadratic" else 0.0, **parts,
    )  # fmt: skip


class Sums:
    """Tells messages of values from that with their sums, which follows them (`tied_answers`)."""

    def __init__(self):
        self.left = 0

    def follow(self, cts, how):
        """Whether these are sums; to be asked of every message once."""
        if self.left < 0:
            self.left = 0
            return True
        self.left = (self.left or sum(pairs(part) for part in chunks(how))) - len(cts)
        self.left = self.left or -1
        return False


def shifted(key, cts, how, seed, entropy, lies):
    """Answers to an opening as an honest owner gives them, but for integers: {(value, coefficient): integer}."""
    p, mask, secret, out = key.params, scheme.Halves(seed), entropy.prg(), []
    r = scheme.ring_of(p)
    opened = [half for ct in cts for half in pairs_of(p).halves(r.to_words(key._opened(ct)))]
    for i, value in enumerate(opened):
        m = r.add_words(np.zeros((how.back, p.degree), np.uint32), scheme.times_shift(value, how))
        for (which, at), lie in lies.items():
            if which == i:
                m[:, at] = [(int(x) + lie) % q for x, q in zip(m[:, at], r.primes[: how.back], strict=True)]
        out.append(key.hide(m, mask, secret))
    return np.stack(out)


def untied(monkeypatch):
    """The step as it was before answers were tied: whatever the sums say, both sides go on."""
    for side in (batch_roles.OwnerSide, batch_roles.ProviderSide):

        async def agree(self, *args, honest=side.agree):
            await honest(self, *args)
            return True

        monkeypatch.setattr(side, "agree", agree)

    async def check_keys(self, keys, tokens, honest=batch_roles.ProviderSide.check_keys):
        with contextlib.suppress(ProtocolAbort):
            await honest(self, keys, tokens)

    monkeypatch.setattr(batch_roles.ProviderSide, "check_keys", check_keys)


def both(w):
    """The two values of a pair, from its coefficients."""
    back = np.concatenate([w[:1], -w[:0:-1]])  # conjugated
    imaginary, half = (w - back) / 2, len(w) // 2
    return (w + back) / 2, np.concatenate([imaginary[half:], -imaginary[:half]])
