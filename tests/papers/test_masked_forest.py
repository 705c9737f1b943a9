"""The five questions. Vectors are left out: the primes are OpenSSL's, so no transcript repeats."""

import numpy as np
import pytest

from cloister.errors import DataError, ParameterError
from cloister.mpc.crypto import paillier
from cloister.papers import masked_forest
from cloister.papers.masked_forest import Params
from cloister.study import Party
from cloister.testing import FRAMING, Case, check_abort, check_no_errors, check_view, run_protocol, transcript, values
from cloister.workflows.common import common_genes

P, A = Party("principal"), Party("auxiliary")
SITES = tuple(Party(f"site-{i}") for i in range(3))
NAMES = ["a", "b", "c"]


@pytest.fixture(autouse=True)
def _short_keys(monkeypatch):
    """1024 bits here, so that the tests are about the protocol; the key size has tests of its own."""
    monkeypatch.setattr(paillier, "LEAST_BITS", 1024)


def rows(n=60, seed=0):
    rng = np.random.default_rng(seed)
    X = rng.normal(size=(n, 3)) * [1.0, 50.0, 0.02] + [0.0, 1000.0, 3.0]
    X[:4] += np.array([8.0, 400.0, 0.16]) * rng.choice([-1, 1], (4, 3))
    return X


def case(X=None, cuts=(20, 29), seed=0, **options):
    X = rows(seed=seed) if X is None else X
    params = Params(SITES, P, A, **{"trees": 20, "key_bits": 1024, "contamination": 0.1, **options})
    return Case(params, {u: (NAMES, part) for u, part in zip(SITES, np.split(X, cuts), strict=True)})


def check_found(c, run):
    """Every client's rows stand in its slots at P, masked, and it gets back what P computed for these."""
    seen = values(run)[P]
    parts = {u: c.inputs[u][1] for u in SITES}
    assert values(run)[A] == len(seen.masked[0]) == sum(map(len, parts.values()))
    for u in SITES:
        got = values(run)[u]
        for r in range(c.params.repeats):
            M = masked_forest.masking_matrix(got.seed, 3, c.params.stretch, r)
            if not c.params.standardise:
                np.testing.assert_allclose(seen.masked[r][got.slots[r]], parts[u] @ M, atol=1e-6)
            np.testing.assert_array_equal(got.flags[r], seen.flags[r][got.slots[r]])
            if got.scores is not None:
                np.testing.assert_array_equal(got.scores[r], seen.scores[r][got.slots[r]])
    return seen


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"give": "flags", "forest": "extended"},
        {"give": "regions", "repeats": 2},
        {"contamination": None, "threshold": 0.6, "repeats": 2},
        {"standardise": True, "give": "regions", "forest": "extended"},
    ],
)
def test_ideal(options):
    c = case(**options)
    run = run_protocol(masked_forest, c)
    check_no_errors(run)
    seen = check_found(c, run)
    rng = np.random.default_rng([0, *b"principal/"])  # what a session hands to P
    scores, flags = masked_forest.ideal(c.params, seen.masked[0], rng)
    np.testing.assert_array_equal(scores, seen.scores[0])
    np.testing.assert_array_equal(flags, seen.flags[0])
    if c.params.give == "scores":
        assert values(run)[SITES[0]].everyone.shape == (c.params.repeats, 60)
    else:
        assert values(run)[SITES[0]].scores is None
    if c.params.standardise:
        X = np.concatenate([x for _, x in c.inputs.values()])
        Z = (X - X.mean(axis=0)) / X.std(axis=0)
        got = values(run)[SITES[0]]
        M = masked_forest.masking_matrix(got.seed, 3, 10.0)
        np.testing.assert_allclose(got.masked @ np.linalg.inv(M), Z[:20], rtol=1e-6, atol=1e-6)  # one word: 2e-3


def test_slots_hide_the_owner_and_differ_between_repeats():
    run = run_protocol(masked_forest, case(repeats=2))
    check_no_errors(run)
    slots = values(run)[SITES[0]].slots
    assert (np.diff(slots[0]) != 1).any()
    assert set(slots[0]) != set(slots[1])


def test_the_mask_is_two_rotations_and_a_stretch():
    for stretch in (1.5, 100.0):
        M = masked_forest.masking_matrix(bytes(32), 6, stretch)
        singular = np.linalg.svd(M)[1]
        assert (singular > 1).all()
        assert (singular < stretch).all()
        assert not np.allclose(M, masked_forest.masking_matrix(bytes(31) + b"1", 6, stretch))
    angles = [masked_forest.masking_matrix(bytes([i]) * 32, 2, 1.000001) for i in range(200)]
    assert abs(np.mean([np.linalg.det(m) > 0 for m in angles]) - 0.5) < 0.15  # uniform over all rotations
    assert abs(np.mean([m[0, 0] for m in angles])) < 0.15


def test_noise_hides_the_rows_exactly():
    """W_i alone is uniform: the same law for rows of zeros and for rows at the bound."""
    params = case().params
    for x in (0.0, 1e9):
        W = masked_forest.mask(params, np.full((500, 3), x), np.arange(500), 500, bytes(range(32)))
        top = np.bincount((W >> np.uint64(60)).astype(int).ravel(), minlength=16)
        assert ((top - 1500 / 16) ** 2 / (1500 / 16)).sum() < 45  # df 15


def test_view():
    check_view(masked_forest, case(seed=1), case(seed=2))
    check_view(masked_forest, case(seed=1), case(seed=1, cuts=(1, 40)))


@pytest.mark.parametrize("options", [{}, {"give": "flags", "standardise": True, "repeats": 2}])
def test_cost(options):
    c = case(**options)
    run = run_protocol(masked_forest, c)
    check_no_errors(run)
    sizes = {u: len(x) for u, (_, x) in c.inputs.items()}
    names = len(common_genes.join(NAMES))
    for party, (messages, payload) in masked_forest.cost(c.params, sizes, 3, names).items():
        sent = [r for r in transcript(run)[party] if not r[0].startswith("channel.")]
        assert len(sent) == messages
        assert payload <= sum(r[2] for r in sent) <= payload + FRAMING * messages + 0.02 * payload


UP = [("site-1", "principal", "common_genes.Measured"), ("site-1", "auxiliary", "masked_forest.NoiseKey")]
UP += [("site-1", "principal", "masked_forest.Noisy"), ("auxiliary", "principal", "masked_forest.Noise")]
DOWN = [("principal", "site-1", "common_genes.Common"), ("principal", "site-1", "masked_forest.Scores")]


@pytest.mark.parametrize(
    "kind", ["truncate", *(pytest.param(k, marks=pytest.mark.slow) for k in ("drop", "duplicate", "swap", "kill"))]
)
def test_any_loss_aborts_by_name(kind):
    c = case(trees=5)
    done = check_abort(masked_forest, c, survived=lambda run: None, kinds=[kind], messages=UP + DOWN, timeout=1.5)
    assert done == 6


def test_no_client_talks_to_another():
    run = run_protocol(masked_forest, case())
    for u in SITES:
        assert {e.to for e, _ in run.receipts[u].entries if e.kind == "sent"} <= {P, A}


def test_fewer_rows_than_the_sample_and_constant_columns():
    X = rows(40)
    X[:, 2] = 5.0
    c = case(X, cuts=(1, 20), sample=256)
    run = run_protocol(masked_forest, c)
    check_no_errors(run)
    check_found(c, run)


def test_bad_input():
    for options in ({"stretch": 1.0}, {"threshold": 0.5}, {"contamination": None}):
        with pytest.raises(ParameterError):
            case(**options)
    X = rows()
    X[3, 1] = np.nan
    run = run_protocol(masked_forest, case(X), timeout=1.0)
    assert isinstance(run.errors[SITES[0]], DataError)
    run = run_protocol(masked_forest, case(rows() * 1e12), timeout=1.0)
    assert any("bound" in str(e) for e in run.errors.values())


@pytest.mark.slow
def test_with_keys_of_full_length(monkeypatch):
    monkeypatch.setattr(paillier, "LEAST_BITS", 3072)
    c = case(key_bits=3072)
    run = run_protocol(masked_forest, c)
    check_no_errors(run)
    check_found(c, run)
    with pytest.raises(ParameterError, match="3072"):
        paillier.generate(1024)
