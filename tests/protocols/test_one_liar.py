"""The sixth question to every hardened protocol of sums, forests and training: one liar, one message at a time."""

from types import SimpleNamespace

import numpy as np
import pytest

from cloister.mpc.crypto import paillier
from cloister.mpc.sums import (
    common_seed,
    consistency_check,
    count_tests,
    pooled_quantiles,
    pooled_scaling,
    retry_without_dropouts,
    secure_sum,
)
from cloister.papers import averaged_quantiles, federated_training, masked_forest, private_slots, row_sums
from cloister.study import Party
from cloister.testing import Case, check_lies
from cloister.workflows.common import common_genes
from cloister.workflows.find_outliers import counted_forest
from cloister.workflows.fine_tune import checked_training
from cloister.workflows.fine_tune.training_parts import Offer
from cloister.workflows.shared_pca import shared_pca

HUB, AUX = Party("hub"), Party("aux")
SITES = tuple(map(Party, ("a", "b", "c")))
SECRET = bytes(range(32))


def alike(found, part=lambda value: value):
    """Everyone honest who finished has the same."""
    rows = [np.asarray(part(v), dtype=object if isinstance(part(v), bytes | tuple | str) else None) for v in found]
    for row in rows[1:]:
        np.testing.assert_array_equal(row, rows[0])


def random(shape=(), seed=0, low=0, high=100):
    return np.random.default_rng(seed).integers(low, high, shape)


# ---- what each protocol is given, and what is right ------------------------------------------------------------------


def sum_case(seed, **options):
    xs = {u: (random(4, seed + i).astype(np.uint64),) for i, u in enumerate(SITES)}
    return Case(secure_sum.Params(SITES, HUB, 4, **options), xs)


def right_sum(cases):
    """The sum of whoever it is said to be of, at all who learn it; where the liar is in it, the rest plus something."""

    def right(lie, found):
        have = [v for v in found.values() if v is not None]
        for value in have:
            assert len(value.survivors) >= 2
            if lie.liar not in value.survivors:
                possible = [np.sum([c.inputs[u][0] for u in value.survivors], axis=0) for c in (*cases, lie.case)]
                assert any(np.array_equal(value.z, z) for z in possible)
        alike(have, lambda v: v.z)

    return right


def lists(lie, found):
    """Whose data may be in: that of all sites, or of all but one that lies, is said to be gone, or stopped by name."""
    gone = {lie.liar, lie.to, *(set(SITES) - found.keys())} & set(SITES)
    return [SITES, *(tuple(v for v in SITES if v != u) for u in sorted(gone))]


def equal(found, wanted):
    return np.array_equal(found, wanted)


def close(found, wanted):
    return np.shape(found) == np.shape(wanted) and np.allclose(found, wanted, rtol=1e-5, atol=1e-7)


def on_a_grid(found, wanted):
    """Within a step of the fine grid of `values_of`."""
    return np.allclose(found, wanted, rtol=0.02)


def computed(module, part=lambda value: value, agree=equal, of=lambda inputs: inputs[0], mixed=None, loose=None):
    """What every honest site has is `ideal` of all sites, or of all but one (`lists`).

    Where a site that goes between two sums is in the first only, `mixed` is the part that is of one set of sites. Where
    the resolution depends on the values, `loose` compares results of other inputs.
    """

    def question(cases):
        def right(lie, found):
            between = lie.letter == "d" or set(SITES) - found.keys()  # somebody may have gone between two sums
            compared = mixed if mixed and between else part
            have = {u: compared(v) for u, v in found.items() if u != HUB and v is not None}
            sets = lists(lie, found)
            for u, value in have.items():
                ideals = [
                    module.ideal(c.params, {v: of(c.inputs[v]) for v in s})
                    for c in ((lie.case,) if lie.letter == "j" else cases)
                    for s in sets
                    if u in s
                ]
                fits = loose if loose and lie.letter == "j" else agree
                assert any(fits(value, compared(ideal[u])) for ideal in ideals), f"{lie}: '{u}' has a wrong result"

        return right

    return question


def right_list(cases):
    """All take part, or all but one; the same for everyone."""

    def right(lie, found):
        sets = lists(lie, found)
        assert all(tuple(sites) in sets for sites in found.values())
        alike(list(found.values()))

    return right


def right_training(cases):
    """θ is the mean of the updates of all, round by round, or of those who were left."""

    def right(lie, found):
        pupils = {u: offer.build(()) for u, (offer,) in cases[0].inputs.items()}
        means = [np.mean([pupils[u].delta for u in s], axis=0) for s in lists(lie, found)]
        for u, value in found.items():
            assert value.best_round == 2, "the score grows with every round"
            possible = [first + second for first in means for second in means]
            assert any(np.allclose(value.theta, theta, atol=1e-4) for theta in possible), f"{lie}: '{u}'"

    return right


def right_forest(cases):
    """Sites that finish have the same forest."""

    def right(lie, found):
        have = [v for p, v in found.items() if p != HUB]
        alike(have, lambda v: np.concatenate([np.nan_to_num(s.cut) for s in v.forests[0].steps]))
        alike(have, lambda v: v.scaling.scale)

    return right


def anything(cases):
    """Where nothing is returned, or all that may be wrong is assumed: that everyone ends, by name, is enough."""
    return lambda lie, found: None


def same(part):
    return lambda lie, found: alike([v for p, v in found.items() if v is not None and p != HUB], part)


class Pupil:
    size, digest, cells = 4, bytes(32), 30

    def __init__(self, seed):
        self.delta = np.random.default_rng(seed).normal(0, 0.3, 4)

    def train(self, theta, t, rate):
        return self.delta + 0.0 * theta, 0.5

    def score(self, theta):
        right = 10 * (1 - np.exp(-np.abs(theta).sum()))  # better with every round
        return np.round(np.array([[100 * right, 1000 - 100 * right], [0, 1000.0]])), 4.0


class Clipper:
    """Adds its own vector in every step; twenty cells of two labels train, and as many are held out."""

    size, trainable, digest, cells = 4, 4, bytes(32), 20

    def __init__(self, seed):
        self.sum, self.loss, self.donor, self.left_out = np.random.default_rng(seed).normal(0, 3, 4), 9.0, None, 0

    def group(self, *, held_out):
        return np.arange(20) % 2, None

    def keep_held_out(self, keep):
        assert keep.all()

    def gradient(self, theta, t, clip, keep):
        return self

    def score(self, theta):
        right = np.round(10 * (1 - np.exp(-np.abs(theta).sum())))  # better with every round
        return np.array([[right, 10 - right], [0, 10.0]]), 20.0 - right


def clipped_training(seed):
    inputs = {u: (Offer("x", ("p", "q"), lambda labels, k=seed + i: Clipper(k)),) for i, u in enumerate(SITES)}
    return Case(checked_training.Params(SITES, HUB, "clipper", rounds=2, rate=0.1), inputs)


def right_clipped(cases):
    """All sites have the same θ: two steps of Adam along the sum of all, with any vector of the malicious site."""

    def right(lie, found):
        have = {u: v for u, v in found.items() if u != HUB}
        alike(list(have.values()), lambda v: v.theta)
        assert all(np.abs(v.theta).max() <= 0.2 * (1 + 1e-6) for v in have.values())
        if lie.liar == HUB:
            possible = [checked_training.ideal(c.params, {u: x[0] for u, x in c.inputs.items()})[HUB] for c in cases]
            for u, value in have.items():
                assert any(np.allclose(value.theta, theta, atol=1e-6) for theta in possible), f"{lie}: '{u}'"

    return right


def training(seed):
    inputs = {u: (Offer("x", ("p", "q"), lambda labels, k=seed + i: Pupil(k)),) for i, u in enumerate(SITES)}
    return Case(federated_training.Params(SITES, HUB, "pupil", rounds=2), inputs)


def cells(seed):
    rng = np.random.default_rng(9)
    weights = rng.gamma(1.0, 3.0, 12)
    names = tuple(f"G{i:02d}" for i in range(12))
    rng = np.random.default_rng(seed)
    xs = {u: (shared_pca.Cells(names, rng.poisson(weights, (60, 12)).astype(float)),) for u in SITES}
    return Case(shared_pca.Params(SITES, HUB, n_top_genes=6, n_components=2), xs)


def table(seed, **options):
    rng = np.random.default_rng(seed)
    params = counted_forest.Params(SITES, HUB, trees=2, sample=64, min_cells=4, **options)  # all rows in every tree
    return Case(params, {u: ("table", ["x", "y"], rng.normal(size=(20, 2))) for u in SITES})


def masked(seed):
    rng = np.random.default_rng(seed)
    params = masked_forest.Params(SITES, HUB, AUX, trees=2, sample=16, key_bits=1024, contamination=0.1)
    return Case(params, {u: (["x", "y"], rng.normal(size=(20, 2))) for u in SITES})


def values_of(seed):
    rng = np.random.default_rng(seed)
    params = pooled_quantiles.Params(SITES, HUB, 4, True, cells=2, parts=64)
    return Case(params, {u: (rng.integers(1, 60, 30).astype(float),) for u in SITES})


def rows_of(seed):
    rng = np.random.default_rng(seed)
    return Case(pooled_scaling.Params(SITES, HUB, 2), {u: (rng.normal(3, 1, (20, 2)),) for u in SITES})


def counts_case(seed, proofs):
    xs = {u: (random(12, seed + i, 0, 4), SECRET) for i, u in enumerate(SITES)}
    return Case(count_tests.Params(SITES, HUB, 12, 4, 60, proofs), xs)


def matrix(seed):
    xs = {u: (random((6, 2), seed + i).astype(np.uint64),) for i, u in enumerate(SITES)}
    return Case(row_sums.Params(SITES, (1, 2, 3), HUB, 2), xs)


def local_quantiles(seed):
    rng = np.random.default_rng(seed)
    params = averaged_quantiles.Params(SITES, HUB, 4)
    return Case(params, {u: (rng.integers(1, 60, 30).astype(float), 30) for u in SITES})


async def lead(ch, params):
    async def step(inner, sites):
        return sites

    return (await retry_without_dropouts.lead(ch, SITES, 2, step))[1]


async def follow(ch, params):
    async def step(inner, sites):
        return sites

    return (await retry_without_dropouts.follow(ch, HUB, step))[1]


ATTEMPTS = SimpleNamespace(
    __name__="attempts",
    __doc__=retry_without_dropouts.__doc__,
    roles=lambda params: {HUB: lead} | dict.fromkeys(SITES, follow),
)


def bits_of(value):
    """Of an answer, or of `ideal`."""
    return getattr(value, "bits", value)


names = [f"G{i}" for i in range(6)]
genes = Case(common_genes.Params(SITES, HUB), {u: ("counts", names[: 6 - i]) for i, u in enumerate(SITES)})
QUESTIONS = {
    "secure_sum": (secure_sum, [sum_case(0), sum_case(7)], right_sum, {}),
    "secure_sum to all": (
        secure_sum,
        [sum_case(0, to_all=True), sum_case(7, to_all=True)],
        right_sum,
        {"aggregator": "abcf"},
    ),
    "row_sums": (
        row_sums,
        [matrix(0), matrix(7)],
        computed(row_sums),
        {"server": "abcf", "site": "bcf"},
    ),
    "same_view": (
        consistency_check,
        [Case(consistency_check.Params(SITES, HUB), {})],
        lambda c: lambda lie, found: None,
        {},
    ),
    "attempts": (ATTEMPTS, [Case((), {})], right_list, {}),
    "common_seed": (common_seed, [Case(common_seed.Params(SITES, HUB), {})], lambda c: same(lambda v: v.secret), {}),
    "common_genes": (
        common_genes,
        [genes],
        computed(common_genes, lambda v: list(v.names), of=lambda inputs: inputs),
        {"coordinator": "abcd", "site": "b"},
    ),
    "count_tests": (
        count_tests,
        [counts_case(0, 0), counts_case(7, 0)],
        computed(count_tests, bits_of),
        {"coordinator": "abcf", "site": "bcf"},
    ),
    "count_tests proved": (
        count_tests,
        [counts_case(0, 1), counts_case(7, 1)],
        computed(count_tests, bits_of),
        {"coordinator": "abcf", "site": "bcf"},
    ),
    "pooled_scaling": (
        pooled_scaling,
        [rows_of(0)],
        computed(pooled_scaling, lambda v: [*v.mean, *v.scale, v.rows], close, mixed=lambda v: v.mean),
        {"site": "bcf"},
    ),
    "pooled_quantiles": (
        pooled_quantiles,
        [values_of(0)],
        computed(pooled_quantiles, agree=close, loose=on_a_grid),
        {"coordinator": "bcf", "site": "bcf"},
    ),
    "shared_pca": (
        shared_pca,
        [cells(0)],
        computed(shared_pca, lambda v: [*v[0].variance, *v[0].mean], close, mixed=lambda v: v[0].mean),
        {"coordinator": "bcf", "site": "bcf"},
    ),
    "counted_forest": (
        counted_forest,
        [table(0)],
        right_forest,
        {"site": "bcf"},
    ),
    "averaged_quantiles": (
        averaged_quantiles,
        [local_quantiles(0)],
        computed(averaged_quantiles, agree=close, of=lambda inputs: inputs),
        {"coordinator": "abcf", "site": "bcf"},
    ),
    "private_slots": (
        private_slots,
        [Case(private_slots.Params(SITES, HUB, key_bits=1024), {u: (10 + i, 3) for i, u in enumerate(SITES)})],
        anything,
        {"auxiliary": "abcf", "client": "bcf"},
    ),
    "masked_forest": (
        masked_forest,
        [masked(0)],
        anything,
        {"principal": "abcf", "auxiliary": "abcf", "client": "bcf"},
    ),
    "checked_training": (
        checked_training,
        [clipped_training(0), clipped_training(7)],
        right_clipped,
        {},
    ),
    "federated_training": (
        federated_training,
        [training(0)],
        right_training,
        {"coordinator": "bcf", "site": "bcf"},
    ),
}


@pytest.fixture(autouse=True)
def _short_keys(monkeypatch):
    monkeypatch.setattr(paillier, "LEAST_BITS", 1024)


def ask(name, **options):
    module, cases, right, assumes = QUESTIONS[name]
    return check_lies(module, cases, right=right(cases), assumes=assumes, **options)


LONG = {"private_slots", "masked_forest"}  # published modes, with Paillier keys


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] * (n in LONG)) for n in QUESTIONS])
def test_one_lie_per_kind_of_message(name):
    found = ask(name, timeout=3.0)
    assert found.tried >= 2
    assert found.aborted + found.right + found.assumed == found.tried


@pytest.mark.slow
@pytest.mark.parametrize("name", QUESTIONS)
def test_every_lie(name):
    found = ask(name, full=True, timeout=4.0, within=40.0)
    print(f"\n{name}: {found}")
    assert found.tried >= 4
