import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
from outcome_cases import HUB, NONE, case, plain, site

from cloister.disclosure import Contribution
from cloister.errors import DataError, ParameterError, ProtocolAbort
from cloister.rehearsal.rehearsal import Fault
from cloister.testing import (
    Case,
    check_ideal,
    check_lies,
    check_no_errors,
    check_vectors,
    run_protocol,
    transcript,
    values,
)
from cloister.workflows.common.bounded_values import shares_of
from cloister.workflows.model_outcome import pooled_outcomes as protocol
from cloister.workflows.model_outcome.baselines import pooled
from cloister.workflows.model_outcome.workflow import blocks_of

VECTORS = Path(__file__).parents[2] / "vectors"
ANSWERS = json.loads((VECTORS / "outcomes.json").read_text(encoding="utf-8"))
MODELS = ("linear", "logistic", "poisson", "negbin", "cox")


def agree(found, ideal):
    assert (found.donors, found.openings) == (ideal.donors, ideal.openings)
    for a, b in zip(found.fits, ideal.fits, strict=True):
        for name in ("coefficients", "covariance", "dispersion", "concordance", "calibration", "explained"):
            np.testing.assert_allclose(getattr(a, name), getattr(b, name), rtol=1e-7, atol=1e-8)
    if ideal.curves is not None:
        for name in ("at_risk", "events", "survival", "error", "test", "stratified"):
            np.testing.assert_allclose(getattr(found.curves, name), getattr(ideal.curves, name), rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("model", [*MODELS, "km"])
def test_equals_the_ideal(model):
    check_ideal(protocol, [case(model)], agree=agree)


@pytest.mark.parametrize("model", MODELS)
def test_the_pooled_fit_equals_the_reference(model):
    """What cohorts are compared with: statsmodels' and lifelines' coefficients and errors on the pooled donors."""
    c = case(model, thresholds=NONE, seed=7, p=3)
    (fit,) = pooled(c.params, plain(c)).fits
    np.testing.assert_allclose(fit.coefficients, ANSWERS[model]["coefficients"], rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(np.sqrt(np.diag(fit.covariance)), ANSWERS[model]["errors"], rtol=1e-6)


@pytest.mark.parametrize("model", MODELS)
def test_default_thresholds_stay_close_to_the_reference(model):
    """One step from each site's own point: within 0.9 standard errors; linear models exactly."""
    c = case(model, seed=7, p=3)
    run = run_protocol(protocol, c)
    check_no_errors(run)
    for found in values(run).values():
        (fit,) = found.fits
        errors = np.array(ANSWERS[model]["errors"])
        apart = np.abs(fit.coefficients - ANSWERS[model]["coefficients"]) / errors
        assert apart.max() < (1e-6 if model == "linear" else 0.9)
        np.testing.assert_allclose(np.sqrt(np.diag(fit.covariance)), errors, rtol=1e-6 if model == "linear" else 0.2)


def test_curves_equal_lifelines():
    c = case("km", thresholds=NONE, seed=7)
    curves = protocol.ideal(c.params, plain(c))[HUB].curves
    for a, name in enumerate(c.params.arms):
        np.testing.assert_allclose(curves.survival[a], ANSWERS["km"]["survival"][name], atol=1e-9)
    np.testing.assert_allclose(curves.test[0], ANSWERS["km"]["chi_square"], rtol=1e-9)


@pytest.mark.parametrize("model", ["logistic", "poisson", "negbin", "cox"])
def test_the_fit_stays_close_to_that_of_the_donors(model):
    """Four sites of 40, ten cohorts, in errors of the pooled fit. A level with small cells costs more than a number."""
    apart, wider = [], []
    for seed in range(10):
        c = case(model, seed=seed, sites=4)
        (a,), (b,) = protocol.ideal(c.params, plain(c))[HUB].fits, pooled(c.params, plain(c)).fits
        errors = np.sqrt(np.diag(b.covariance))
        apart.append((a.coefficients - b.coefficients) / errors)
        wider.append((np.sqrt(np.diag(a.covariance)) / errors)[0])
    number, level = np.sqrt(np.nanmean(np.square(apart), axis=0))
    assert number < 0.35
    assert level < 1.6
    assert 0.9 < np.mean(wider) < 1.1


def test_a_regression_for_each_feature_is_that_of_a_run_of_its_own():
    c = case("logistic", p=3, fits=((0, 2), (1, 2)))
    found = protocol.ideal(c.params, plain(c))[HUB]
    assert [f.columns for f in found.fits] == [(0, 2), (1, 2)]
    alone = Case(dataclasses.replace(c.params, fits=((0, 2),)), c.inputs)
    one = protocol.ideal(alone.params, plain(alone))[HUB]
    np.testing.assert_allclose(found.fits[0].coefficients, one.fits[0].coefficients, rtol=1e-9)
    wide = case("logistic", n=9, p=4)
    with pytest.raises(DataError, match="9 donors here for 4 features"):
        protocol.ideal(wide.params, plain(wide))


def test_all_parties_have_the_same_and_send_only_masked_words():
    run = run_protocol(protocol, case("cox"))
    check_no_errors(run)
    first, *rest = values(run).values()
    assert all(np.array_equal(first.fits[0].coefficients, other.fits[0].coefficients) for other in rest)
    sent = {row[0] for p, rows in transcript(run).items() if p != HUB for row in rows}
    assert sent == {
        "channel.Hello",
        "same_view.Signature",
        *(f"common_seed.{m}" for m in ("Key", "Parts", "Confirm")),
        "checked_sum.Masked",
    }


def test_cost_and_view_do_not_depend_on_the_donors():
    for model in ("cox", "linear", "km"):
        one, other = (run_protocol(protocol, case(model, seed=s)) for s in (0, 1))
        sizes = [
            {p: [r for r in rows if not r[0].startswith("channel.")] for p, rows in transcript(r).items()}
            for r in (one, other)
        ]
        assert {p: [(m, n) for m, _, n in rows] for p, rows in sizes[0].items()} == {
            p: [(m, n) for m, _, n in rows] for p, rows in sizes[1].items()
        }
        for party, (messages, payload) in protocol.cost(case(model).params).items():
            rows = sizes[0][party]
            assert len(rows) == messages
            assert payload <= sum(n for _, _, n in rows) <= payload + 400 * messages


def test_vectors(monkeypatch):
    """What is added is rounded to 16 bits first: another processor's last digits must not change what is masked."""
    exact = protocol.Side.part
    monkeypatch.setattr(
        protocol.Side, "part", lambda *a: exact(*a).map(lambda x: np.round(np.asarray(x, float) * 2**16) / 2**16)
    )
    check_vectors(protocol, case("linear", seed=1), VECTORS / "pooled_outcomes.json")


# ---- what is refused -------------------------------------------------------------------------------------------------


def test_two_donors_are_refused_before_anything_is_sent():
    c = case("logistic", n=2)
    with pytest.raises(DataError, match="2 donors here, fewer than 6"):
        protocol.check_site(c.params, next(iter(plain(c).values())))
    with pytest.raises(DataError, match="5 donors here, fewer than 6"):
        protocol.check_site(case("linear", n=5).params, site(np.random.default_rng(0), "linear", 5))


def test_one_event_is_refused():
    c = case("cox")
    inputs = {u: (dataclasses.replace(d, y=np.zeros_like(d.y)),) for u, (d,) in c.inputs.items()}
    first = c.params.sites[0]
    one = np.zeros(40)
    one[3] = 1
    inputs[first] = (dataclasses.replace(inputs[first][0], y=one),)
    with pytest.raises(ProtocolAbort, match="no site has min_donors donors with the outcome"):
        protocol.ideal(c.params, {u: d for u, (d,) in inputs.items()})


def test_a_hospital_without_events_adds_nothing_to_the_coefficients():
    for model in ("cox", "logistic", "poisson"):
        c = case(model, sites=4)
        last = c.params.sites[-1]
        xs = plain(c) | {last: dataclasses.replace(plain(c)[last], y=np.zeros(40))}
        with_it = protocol.ideal(c.params, xs)[HUB].fits[0].coefficients
        params = dataclasses.replace(c.params, sites=c.params.sites[:-1])
        without = protocol.ideal(params, {u: d for u, d in xs.items() if u != last})[HUB].fits[0].coefficients
        np.testing.assert_allclose(with_it, without, rtol=1e-9)


def test_separated_outcomes_are_named():
    c = case("logistic", seed=3)
    xs = {u: dataclasses.replace(d, y=(d.x[:, 0] > 3).astype(float)) for u, d in plain(c).items()}
    with pytest.raises(ProtocolAbort, match="separated by the features"):
        protocol.ideal(c.params, {u: dataclasses.replace(d, thresholds=NONE) for u, d in xs.items()})


def test_columns_that_are_combinations_of_others_are_named():
    for model in ("linear", "poisson"):
        c = case(model, p=2)
        xs = {u: dataclasses.replace(d, x=np.stack([d.x[:, 0], 2 * d.x[:, 0]], axis=1)) for u, d in plain(c).items()}
        with pytest.raises(ProtocolAbort, match=r"'x0'.*'x1'"):
            protocol.ideal(c.params, xs)


def test_a_constant_feature_is_named():
    c = case("logistic")
    xs = {u: dataclasses.replace(d, x=np.stack([d.x[:, 0], np.ones(40)], axis=1)) for u, d in plain(c).items()}
    found = protocol.ideal(c.params, xs)[HUB]
    assert any("'x1' is not estimated" in note for note in found.notes)
    (fit,) = found.fits
    assert np.isfinite(fit.coefficients).tolist() == [True, False]
    assert np.isnan(fit.covariance[1]).all()
    with pytest.raises(ProtocolAbort, match="no site has"):
        protocol.ideal(c.params, {u: dataclasses.replace(d, x=np.ones((40, 2))) for u, d in plain(c).items()})


def test_parameters_are_checked():
    for wrong, words in (
        ({"model": "probit"}, "model must be"),
        ({"min_donors": 1}, "min_donors must be at least 2"),
        ({"intervals": 1}, "at least two intervals"),
        ({"fits": ((0, 9),)}, "at least one of the columns"),
    ):
        with pytest.raises(ParameterError, match=words):
            dataclasses.replace(case("cox").params, **wrong)


# ---- attacks ---------------------------------------------------------------------------------------------------------


def parts_of(params, mine, dispersion=0.0):
    """All numbers that a site adds, at coefficients of one."""
    side, state = protocol.Side(params, mine), protocol.State(params)
    state.dispersion, state.betas = dispersion, [np.ones(len(f)) for f in params.fits]
    return [side.part(i, line, state) for i, (line, _, _) in enumerate(protocol.lengths_of(params))]


def same(params, one, other, rtol=1e-9):
    for a, b in zip(parts_of(params, one), parts_of(params, other), strict=True):
        np.testing.assert_allclose(a.values, b.values, rtol=rtol, atol=1e-9)


def without(mine, i):
    return dataclasses.replace(
        mine,
        **{
            name: None if getattr(mine, name) is None else np.delete(getattr(mine, name), i, axis=0)
            for name in ("x", "y", "cells", "interval", "exposure", "arm", "block")
        },
    )


def rare_feature(model, rng):
    """Sixty donors; eight have the second feature, of whom the first alone has the first."""
    x = np.zeros((60, 2))
    x[:, 0] = np.arange(60) % 2 == 0
    x[[0, 1, 3, 5, 7, 9, 11, 13], 1] = rng.uniform(5, 9, 8)
    y = (rng.random(60) < 0.5).astype(float) if model in ("logistic", "cox") else rng.poisson(3, 60).astype(float)
    return protocol.Donors(x, y, np.full(60, 20), rng.integers(0, 24, 60) if model == "cox" else None)


@pytest.mark.parametrize("model", MODELS)
def test_the_only_donor_with_two_features_is_left_out(model):
    """Attack without a deviation: Σ x₁ x₂ is the value of the one donor that has both features."""
    c, mine = case(model), rare_feature(model, np.random.default_rng(1))
    same(c.params, mine, without(mine, 0))
    more = dataclasses.replace(mine, x=mine.x.copy())
    more.x[[2, 4], 1] = 6.0  # three donors with both
    assert len(protocol.prepared(c.params, more).at) == 60


def test_the_only_donor_of_a_level_is_left_out():
    c, rng = case("logistic", p=1), np.random.default_rng(0)
    x = np.zeros((40, 1))
    x[[3, 9], 0] = 1.0
    x[20:, 0] = 2.0
    mine = protocol.Donors(x, (rng.random(40) < 0.5).astype(float), np.full(40, 20))
    same(c.params, mine, without(mine, [3, 9]))


@pytest.mark.parametrize("model", ["logistic", "cox"])
def test_a_level_in_which_one_donor_has_the_outcome_is_projected_out(model):
    """The cell (level, event) has one donor: numbers do not change when the event moves to another donor with it."""
    c, rng = case(model), np.random.default_rng(3)
    x = np.stack([rng.normal(size=40), np.arange(40) % 4 == 0], axis=1).astype(float)
    y = (rng.random(40) < 0.5).astype(float)
    y[x[:, 1] > 0] = 0.0
    y[8] = 1.0
    mine = protocol.Donors(x, y, np.full(40, 20), rng.integers(0, 24, 40) if model == "cox" else None)
    ready = protocol.prepared(c.params, mine)
    assert ready.open.tolist() == [True, False]
    assert not ready.x[:, 1].any()
    assert abs(np.corrcoef(ready.x[:, 0], x[ready.at, 1])[0, 1]) < 0.1
    _, _, C0, C1, _, K01, K11 = parts_of(c.params, mine)[1].values
    assert (C1, K01, K11) == (0.0, 0.0, 0.0)
    assert C0 != 0


@pytest.mark.parametrize("model", ["logistic", "cox", "poisson"])
def test_a_site_with_fewer_events_than_donors_needed_adds_nothing(model):
    """The score of a single event is that donor's features less a mean."""
    c = case(model)
    mine = dataclasses.replace(plain(c)[c.params.sites[0]], y=np.zeros(40))
    mine.y[[4, 7]] = 1.0
    if model == "cox":
        mine.interval[[4, 7]] = 0
    parts = parts_of(c.params, mine)
    assert not any(part.values.any() for part in parts)
    assert all(part.donors is None for part in parts)


@pytest.mark.parametrize("model", MODELS)
def test_a_feature_far_from_all_others_does_not_show(model):
    """A donor at 10³ or 10⁶ deviations adds what one at the bound adds."""
    rng, c = np.random.default_rng(0), case(model, p=1)
    x = rng.normal(size=(40, 1))
    x[7] = 1e3
    y = (rng.random(40) < 0.5).astype(float) if model in ("cox", "logistic") else rng.poisson(3, 40).astype(float)
    near = protocol.Donors(x, y, np.full(40, 20), rng.integers(0, 24, 40) if model == "cox" else None)
    far = dataclasses.replace(near, x=np.where(np.arange(40)[:, None] == 7, 1e6, x))
    same(c.params, near, far, rtol=1e-6)
    assert shares_of(protocol.prepared(c.params, far).x).max() <= 1 / 3


@pytest.mark.parametrize("model", ["linear", "poisson", "negbin"])
def test_an_outcome_far_from_all_others_does_not_show(model):
    """Σ (y - ȳ)² is that of one donor whose count is far from all others."""
    rng, c = np.random.default_rng(0), case(model, p=1)
    y = rng.poisson(3, 40).astype(float)
    y[7] = 5000.0
    near = protocol.Donors(rng.normal(size=(40, 1)), y, np.full(40, 20))
    far = dataclasses.replace(near, y=np.where(np.arange(40) == 7, 5e7, y))
    same(c.params, near, far, rtol=1e-6)


@pytest.mark.parametrize("model", ["cox", "km"])
def test_a_time_far_from_all_others_does_not_show(model):
    rng, c = np.random.default_rng(0), case(model, p=1)
    interval = rng.integers(4, 10, 40)
    interval[[5, 6, 8]] = 11
    near = protocol.Donors(
        rng.normal(size=(40, len(c.params.columns))),
        (rng.random(40) < 0.5).astype(float),
        np.full(40, 20),
        interval,
        arm=np.zeros(40, np.int64),
    )
    near.interval[7] = 20
    far = dataclasses.replace(near, interval=np.where(np.arange(40) == 7, 23, near.interval))
    same(c.params, near, far)


def test_every_risk_set_has_enough_donors():
    rng = np.random.default_rng(0)
    for _ in range(20):
        y, interval = (rng.random(15) < 0.6).astype(float), rng.integers(0, 40, 15)
        after, ends = protocol.followed(y, interval, 3)
        for t in ends[after > 0]:
            assert (ends >= t).sum() >= 3
        assert (after <= y).all()


@pytest.mark.parametrize("model", ["linear", "logistic", "poisson"])
def test_one_large_exposure_is_left_out(model):
    """Attack: the information with exposures as weights is the scatter around one donor's features."""
    rng, c = np.random.default_rng(3), case(model)
    exposure = np.ones(40)
    exposure[5] = 5000.0
    y = (rng.random(40) < 0.5).astype(float) if model == "logistic" else rng.poisson(3, 40).astype(float)
    mine = protocol.Donors(rng.normal(size=(40, 2)), y, np.full(40, 20), exposure=exposure)
    same(c.params, mine, without(mine, 5))


def factor(sizes, rng):
    """Indicators of all levels but the first."""
    level = np.repeat(np.arange(len(sizes)), sizes)
    return (level[:, None] == np.arange(1, len(sizes))).astype(float), rng.normal(10, 3, len(level))


@pytest.mark.parametrize("few", [1, 2])
def test_the_rare_reference_of_a_factor_is_left_out(few):
    """Attack: with three other levels no pair of columns shows it. Σ y less the sums of the levels was Σ y of one donor
    (by a residue of 4e-10 in its leverage, to 2e-6 of its value) or of two (exactly)."""
    x, y = factor((few, 5, 5, 5), np.random.default_rng(0))
    c, mine = case("linear", p=3), protocol.Donors(x, y, np.full(len(y), 20))
    assert protocol.prepared(c.params, mine).at.tolist() == list(range(few, len(y)))
    same(c.params, mine, without(mine, list(range(few))))


def test_an_event_of_one_donor_in_the_reference_of_a_factor_does_not_show():
    """Attack: Σ y less the sums of the other levels counts the events of the reference."""
    x, _ = factor((12, 12, 12), np.random.default_rng(0))
    y = (np.arange(36) % 2).astype(float)
    y[:12] = 0.0
    y[3] = 1.0
    for model in ("logistic", "linear", "cox"):
        c = case(model, p=2)
        interval = np.arange(36) % 20 if model == "cox" else None
        ready = protocol.prepared(c.params, protocol.Donors(x, y, np.full(36, 20), interval))
        assert ready.open.sum() == 1  # the other level is compared with the rest


@pytest.mark.parametrize("few", [1, 2, 3])
def test_a_direction_of_few_donors_leaves_nothing_in_the_sums(few):
    """Attack: a donor that alone spans a direction kept 4e-10 of it, which divided out gave its outcome to 1 %."""
    rng, n = np.random.default_rng(0), 16
    x = rng.normal(size=(n, 3))
    x[few:, 2] = x[few:, 0] - 2 * x[few:, 1]
    near = protocol.bounded(x, 3)
    apart = near[:, 2] - near[:, 0] + 2 * near[:, 1]
    apart = np.abs(apart - np.median(apart))
    assert np.square(apart).max() <= 0.5 * np.square(apart).sum() + 1e-6 or apart.max() < 1e-12


@pytest.mark.parametrize("model", ["poisson", "negbin"])
def test_one_count_is_not_most_of_the_sum_where_logarithms_spread_widely(model):
    """Attack: bounds on logarithms alone left one donor 79 % of Σ y, which L2 opens."""
    rng, c = np.random.default_rng(0), case(model, p=1)
    largest = 0.0
    for _ in range(20):
        y = np.rint(np.exp(rng.normal(3, 2, 30)))
        y[0] = 60000.0
        ready = protocol.prepared(c.params, protocol.Donors(rng.normal(size=(30, 1)), y, np.full(30, 20)))
        if ready.donors:
            largest = max(largest, ready.y.max() / ready.y.sum())
            assert shares_of(ready.y[:, None]).max() <= 1 / 3 + 1e-9
    assert 0.1 < largest < 0.42


def test_one_count_among_low_ones_is_not_the_extra_variance():
    """Attack: of four large counts three are in one group, so Σ (y - m)² was that of the fourth, to 1 %."""
    rng = np.random.default_rng(0)
    y = rng.poisson(1.0, 30).astype(float)
    y[[0, 1, 2, 3]] = 900.0, 901.0, 899.0, 500.0
    near = np.repeat(np.arange(10), 3)
    before, after = (protocol.outcomes.extra_variance(y, near, None, least)[0] for least in (1, 3))
    assert abs(np.sqrt(1.5 * before) - 500.0) < 6
    assert after < 0.01 * before
    usual = rng.poisson(5.0, 30).astype(float)
    np.testing.assert_array_equal(*(protocol.outcomes.extra_variance(usual, near, None, k) for k in (1, 3)))


@pytest.mark.parametrize("model", ["poisson", "negbin"])
def test_exposures_leave_no_donor_more_than_half_of_the_information(model):
    """Attack: halving b does not help where exposures are the weights at b = 0; one donor had up to 85 %."""
    some = 0
    for seed in range(40):
        rng = np.random.default_rng(seed)
        n, p = (12, 2) if seed % 2 else (24, 3)
        exposure = np.exp(rng.normal(0, 1.5, n))
        y = rng.poisson(3 * exposure).astype(float)
        c = case(model, p=p)
        mine = protocol.Donors(rng.normal(size=(n, p)), y, np.full(n, 20), exposure=exposure)
        ready = protocol.prepared(c.params, mine)
        if not ready.donors:
            continue
        for dispersion in (0.0,) if model == "poisson" else (0.0, 1.0, 100.0):
            (own,) = protocol.own_fits(c.params, ready, dispersion, 3)
            some += own.information.any()
            w = ready.exposure if dispersion == 0 else None
            assert w is None or protocol.leverage_of(ready.x, w).max() <= 0.5 + 1e-6
    assert some > 10


def test_an_entry_of_two_columns_can_rest_on_one_donor():
    """Open finding: both columns have a few large values and noise, not zeros, and one donor is large in both. What is
    left of its product after the bounds is the entry; with exact zeros the donor is left out."""
    rng, n = np.random.default_rng(1), 12
    x = rng.normal(size=(n, 2)) * 0.01
    x[[0, 1, 2], 0] += rng.uniform(4, 6, 3)
    x[[0, 3, 4], 1] += rng.uniform(4, 6, 3)
    y = rng.normal(size=n)
    c = case("linear")
    ready = protocol.prepared(c.params, protocol.Donors(x, y, np.full(n, 20)))
    products = np.abs(ready.x[:, 0] * ready.x[:, 1])
    assert products[0] > 0.95 * products.sum()
    zeros = dataclasses.replace(protocol.Donors(np.where(x > 1, x, 0.0), y, np.full(n, 20)))
    assert 0 not in protocol.prepared(c.params, zeros).at


def test_what_a_site_adds_rests_on_enough_donors_whatever_its_features():
    """Levels, zeros, integers and heavy tails: cells, parts of squares, leverage and risk sets are bounded."""
    used = closed = 0
    for seed in range(60):
        rng = np.random.default_rng(seed)
        n, p = int(rng.integers(12, 60)), int(rng.integers(1, 5))
        columns = [
            rng.standard_t(1.5, n),
            (rng.random(n) < rng.uniform(0.05, 0.5)).astype(float),
            np.where(rng.random(n) < 0.8, 0.0, rng.uniform(1, 9, n)),
            rng.integers(50, 60, n).astype(float),
        ]
        model = MODELS[seed % 5]
        x = np.stack(columns[:p], axis=1)
        y = rng.poisson(1.0, n).astype(float) if model in ("poisson", "negbin") else rng.integers(0, 2, n).astype(float)
        c = case(model, p=p)
        mine = protocol.Donors(x, y, np.full(n, 20), rng.integers(0, 24, n) if model == "cox" else None)
        if n < 2 * (p + 1):
            continue
        ready = protocol.prepared(c.params, mine)
        if not ready.donors:
            assert not any(part.values.any() for part in parts_of(c.params, mine))
            continue
        used += 1
        closed += not ready.open.all()
        free = ready.x[:, ready.open]
        assert shares_of(free).max() <= 1 / 3 + 1e-9
        assert protocol.leverage_of(free).max() <= 0.5 + 1e-6
        for i in range(p):
            for j in range(i + 1):
                codes = [protocol.levels_of(x[ready.at, k], 3) for k in (i, j)]
                assert not protocol.rare(*codes, 3).any()
            if (
                ready.open[i]
                and model in ("logistic", "cox")
                and len(np.unique(codes := protocol.levels_of(x[ready.at, i], 3))) > 1
            ):
                cells = np.unique(np.stack([codes, ready.y]), axis=1, return_counts=True)[1]
                assert cells.min() >= 3
        for own in protocol.own_fits(c.params, ready, 0.5, 3):
            assert own.table.n.min() >= 3
        for part in parts_of(c.params, mine):
            assert isinstance(part, Contribution)
            assert part.donors >= 3
    assert used > 20
    assert closed > 3


def test_the_largest_part_of_a_site_in_its_own_weights_is_bounded():
    """The information has weights of the likelihood: at steep coefficients few donors would have all of it."""
    c, rng = case("poisson", p=1), np.random.default_rng(2)
    x = rng.normal(size=(30, 1))
    y = np.rint(np.exp(3 * x[:, 0])).clip(0, 60)
    ready = protocol.prepared(c.params, protocol.Donors(x, y, np.full(30, 20)))
    steep = protocol.outcomes.grouped(protocol.standardised(ready.x), ready.y, np.arange(len(ready.y)))
    b = np.array([4.0])
    found = protocol.outcomes.evaluate("poisson", steep, b)
    assert protocol.heaviest(c.params, steep, found, 0.0) > 0.5
    (own,) = protocol.own_fits(c.params, ready, 0.0, 3)
    assert own.information[0, 0] > 0


def test_what_others_send_changes_nothing_but_the_place_of_ranges():
    """A malicious site chooses coefficients at L4 by its part of L3; donors enter there as groups made before."""
    for model in ("cox", "logistic", "poisson"):
        c = case(model, n=60)
        mine = plain(c)[c.params.sites[0]]
        seen = []
        for aim in (np.zeros(2), np.array([50.0, -3.0])):
            side, state = protocol.Side(c.params, mine), protocol.State(c.params)
            state.donors, state.total = 1e9, 7.0
            fits = side.part(1, "L3", state).values
            state.betas = [aim]
            side.part(2, "L4", state)
            seen.append((fits, side.own[0].table.x.copy(), side.own[0].table.n.copy()))
        for a, b in zip(*seen, strict=True):
            np.testing.assert_array_equal(a, b)
        assert seen[0][2].min() >= 3


def test_groups_and_features_leave_no_donor_much_leverage():
    """Outcomes enter sums with the features and, at L4, with groups by prediction: in both no donor stands out."""
    several = 0
    for seed in range(20):
        c = case("logistic", seed=seed, n=50, p=3, fits=((0, 2), (1, 2)))
        ready = protocol.prepared(c.params, plain(c)[c.params.sites[0]])
        columns = ready.x
        for f in c.params.fits:
            own, codes = protocol.own_fit(c.params, ready, f, 0.0, 3, columns)
            columns = np.hstack([columns, (codes[:, None] == np.arange(1, codes.max() + 1)).astype(float)])
            several += codes.max() > 0
            for g in range(len(own.table)):
                assert 3 <= own.table.y[g] <= own.table.n[g] - 3
        assert protocol.leverage_of(columns).max() <= 0.5 + 1e-6
    assert several > 10


def test_two_runs_with_other_features_differ_in_whole_blocks():
    """Attack: a covariate that one donor lacks, in a second run; the difference of the sums would be that donor."""
    rng = np.random.default_rng(0)
    names = [f"donor-{i}" for i in range(25)]
    everyone = blocks_of(names, np.ones(25, bool), 3)
    assert np.bincount(everyone).min() >= 3
    used = []
    for _ in range(30):
        there = rng.random(25) < 0.9
        block = blocks_of(names, there, 3)
        assert np.array_equal(block[block >= 0], everyone[block >= 0])
        x = np.stack([rng.normal(size=25), rng.random(25) < 0.15], axis=1).astype(float)
        at = protocol.common_donors(x, 3, block=block)
        assert there[at].all()
        used.append(np.isin(np.arange(25), at))
    for one in used:
        for other in used:
            assert (one != other).sum() == 0 or (one != other).sum() >= 3
    assert len({tuple(u) for u in used}) > 5


def test_blocks_of_two_runs_with_other_min_donors_are_nested():
    """Attack: blocks of three and of four by the same hash differed in one or two donors in half of the cases."""
    for n in (3, 7, 12, 20, 31, 60):
        names = [f"d{i}" for i in range(n)]
        for i in range(n):
            left_out = [blocks_of(names, np.arange(n) != i, least) < 0 for least in (2, 3, 4, 5, 7, 12)]
            for one in left_out:
                for other in left_out:
                    assert (one != other).sum() == 0 or (one != other).sum() >= 3


def test_curves_rest_on_runs():
    c = case("km", n=21)
    for mine in plain(c).values():
        _, _, events, runs = protocol.runs_of(c.params, mine)
        assert runs.donors.min() >= 3
        for r in range(len(runs)):
            assert len(np.unique(events[runs.codes == r])) == 1  # each has the run's share
    for part in parts_of(c.params, plain(c)[c.params.sites[0]]):
        assert part.donors >= 3


def test_runs_keep_times_that_enough_donors_share():
    interval = np.array([1, 1, 1, 2, 9, 9, 9, 9, 10, 20, 20])
    assert protocol.runs_in(interval, 3).tolist() == [0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2]
    assert protocol.runs_in(np.array([3, 4]), 3).tolist() == [-1, -1]
    assert protocol.runs_in(np.arange(7), 1).tolist() == list(range(7))


@pytest.mark.parametrize("model", ["linear", "poisson"])
def test_lies(model):
    c, twin = (case(model, seed=s, n=24, p=1) for s in (5, 6))

    def right(lie, ended):
        for found in ended.values():
            if lie.liar == HUB or lie.letter == "j":
                agree(found, protocol.ideal(lie.case.params, plain(lie.case))[HUB])
            else:
                assert all(np.all(np.isfinite(f.coefficients)) for f in found.fits)
        first, *rest = ended.values() if ended else [None]
        assert all(np.array_equal(first.fits[0].coefficients, o.fits[0].coefficients) for o in rest)

    lies = check_lies(protocol, [c, twin], right=right)
    assert lies.tried > 8
    assert lies.aborted > 5


def test_a_site_that_dies_ends_the_run_by_name():
    c = case("cox")
    faults = [Fault("kill", c.params.sites[0], HUB, "Masked", nth=2)]
    run = run_protocol(protocol, c, faults=faults, timeout=1.5)
    assert not values(run)
    assert all(e.code for e in run.errors.values())
