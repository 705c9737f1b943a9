import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
from outcome_cases import HUB, NONE, case, plain, site

from cloister.disclosure import Contribution, Thresholds
from cloister.errors import DataError, ParameterError, ProtocolAbort
from cloister.mpc.sums import checked_sum, common_seed
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
from cloister.workflows.common.gene_moments import join_sum, split_sum
from cloister.workflows.model_outcome import pooled_outcomes as protocol

VECTORS = Path(__file__).parents[2] / "vectors"
ANSWERS = json.loads((VECTORS / "outcomes.json").read_text(encoding="utf-8"))
MODELS = ("linear", "logistic", "poisson", "negbin", "cox")


def agree(found, ideal):
    assert (found.donors, found.groups, found.inside, found.openings) == (
        ideal.donors,
        ideal.groups,
        ideal.inside,
        ideal.openings,
    )
    for a, b in zip(found.fits, ideal.fits, strict=True):
        for name in ("coefficients", "covariance", "dispersion", "concordance", "calibration", "explained"):
            np.testing.assert_allclose(getattr(a, name), getattr(b, name), rtol=1e-7, atol=1e-8)
    if ideal.curves is not None:
        for name in ("at_risk", "events", "survival", "error", "test", "stratified"):
            np.testing.assert_allclose(getattr(found.curves, name), getattr(ideal.curves, name), rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("model", [*MODELS, "km"])
def test_equals_the_ideal(model):
    check_ideal(protocol, [case(model, rounds=8 if model != "negbin" else 15)], agree=agree)


@pytest.mark.parametrize("model", MODELS)
def test_nothing_hidden_equals_the_reference(model):
    """Groups of one donor: statsmodels' and lifelines' coefficients and errors on the pooled donors, to 1e-6."""
    c = case(model, thresholds=NONE, seed=7, p=3, rounds=40)
    run = run_protocol(protocol, c)
    check_no_errors(run)
    for found in values(run).values():
        (fit,) = found.fits
        np.testing.assert_allclose(fit.coefficients, ANSWERS[model]["coefficients"], rtol=1e-6, atol=1e-6)
        np.testing.assert_allclose(np.sqrt(np.diag(fit.covariance)), ANSWERS[model]["errors"], rtol=1e-6)


def test_a_linear_model_is_exact_with_the_default_thresholds():
    """Its sums are fixed, so nothing has to be grouped; here no donor has too much leverage."""
    c = case("linear", seed=7, p=3)
    found = protocol.ideal(c.params, plain(c))[HUB]
    assert found.donors == 120
    np.testing.assert_allclose(found.fits[0].coefficients, ANSWERS["linear"]["coefficients"], rtol=1e-9)


def test_curves_equal_lifelines():
    c = case("km", thresholds=NONE, seed=7)
    curves = protocol.ideal(c.params, plain(c))[HUB].curves
    for a, name in enumerate(c.params.arms):
        np.testing.assert_allclose(curves.survival[a], ANSWERS["km"]["survival"][name], atol=1e-9)
    np.testing.assert_allclose(curves.test[0], ANSWERS["km"]["chi_square"], rtol=1e-9)


@pytest.mark.parametrize("model", ["logistic", "poisson", "negbin", "cox"])
def test_groups_stay_close_to_the_donors(model):
    """Two features, four sites of 40: in the mean of ten cohorts half an error apart, errors 15 % wider."""
    apart, wider = [], []
    for seed in range(10):
        c = case(model, seed=seed, sites=4)
        whole = Case(c.params, {u: (dataclasses.replace(d, thresholds=NONE),) for u, (d,) in c.inputs.items()})
        (a,), (b,) = (protocol.ideal(c.params, plain(x))[HUB].fits for x in (c, whole))
        errors = np.sqrt(np.diag(b.covariance))
        apart.append(np.sqrt(np.mean(np.square((a.coefficients - b.coefficients) / errors))))
        wider.append(np.mean(np.sqrt(np.diag(a.covariance)) / errors))
    assert np.mean(apart) < (0.6 if model == "cox" else 0.5)
    assert 0.95 < np.mean(wider) < 1.15


def test_a_regression_for_each_feature_shares_the_groups():
    c = case("logistic", p=3, fits=((0, 2), (1, 2)))
    found = protocol.ideal(c.params, plain(c))[HUB]
    assert [f.columns for f in found.fits] == [(0, 2), (1, 2)]
    alone = Case(dataclasses.replace(c.params, fits=((0, 2),)), c.inputs)
    one = protocol.ideal(alone.params, plain(alone))[HUB]
    np.testing.assert_allclose(found.fits[0].coefficients, one.fits[0].coefficients, rtol=1e-9)


def test_all_parties_have_the_same_and_send_only_masked_words():
    run = run_protocol(protocol, case("cox", rounds=6))
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
        one, other = (run_protocol(protocol, case(model, seed=s, rounds=6)) for s in (0, 1))
        sizes = [
            {p: [r for r in rows if not r[0].startswith("channel.")] for p, rows in transcript(r).items()}
            for r in (one, other)
        ]
        assert {p: [(m, n) for m, _, n in rows] for p, rows in sizes[0].items()} == {
            p: [(m, n) for m, _, n in rows] for p, rows in sizes[1].items()
        }
        for party, (messages, payload) in protocol.cost(case(model, rounds=6).params).items():
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
    with pytest.raises(ProtocolAbort, match="1 events at all sites together"):
        protocol.ideal(c.params, {u: d for u, (d,) in inputs.items()})


def test_a_hospital_without_events_adds_nothing_to_the_coefficients():
    for model in ("cox", "logistic", "poisson"):
        c = case(model, sites=4)
        last = c.params.sites[-1]
        xs = plain(c) | {last: dataclasses.replace(plain(c)[last], y=np.zeros(40))}
        with_it = protocol.ideal(c.params, xs)[HUB].fits[0].coefficients
        params = dataclasses.replace(c.params, sites=c.params.sites[:-1])
        without = protocol.ideal(params, {u: d for u, d in xs.items() if u != last})[HUB].fits[0].coefficients
        np.testing.assert_allclose(with_it, without, rtol=1e-6)


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
    with pytest.raises(ProtocolAbort, match="'x1' does not vary"):
        protocol.ideal(c.params, xs)


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


def far_case(thresholds):
    """Two sites; one donor of the second lies far out, as donors do."""
    c = case("poisson", seed=5, sites=2, n=30, thresholds=thresholds)
    attacker, honest = c.params.sites
    inputs = {u: (dataclasses.replace(d, exposure=None),) for u, d in plain(c).items()}
    mine = inputs[honest][0]
    x = mine.x.copy()
    x[7, 0] = x[:, 0].max() + 2.0
    inputs[honest] = (dataclasses.replace(mine, x=x),)
    return Case(c.params, inputs), attacker, honest


def read_by_steering(c, attacker, aim):
    """A malicious site sets coefficients by its part of the sums, and reads the other site's score at zero and far out.

    Far out the score is Σ x y - Y x_i, with i the row farthest in that direction; at zero it is Σ x y - Y mean(x).
    """
    seen = []

    async def steering(ch, params, mine, *, entropy, identity):
        pair = common_seed.Params(params.sites, params.coordinator, everyone=True)
        seed = await common_seed.site(ch.sub("seed", pair), pair, entropy=entropy, identity=identity)
        state, side = protocol.State(params), protocol.Side(params, mine)
        for number, (line, _, length) in enumerate(protocol.lengths_of(params)):
            own = side.part(number, line, state).values.astype(float)
            if line == "L4":  # with this information, a step towards the aim
                own = np.concatenate([[0.0], 1e7 * (aim - state.betas[0]), protocol.upper(1e7 * np.eye(2))])
            p = checked_sum.Params(params.sites, params.coordinator, 2 * length)
            words = split_sum(own, len(params.sites), entropy)
            total = join_sum(await checked_sum.site(ch.sub(f"sum/{number + 1}", (p, line)), p, words, seed))
            seen.append((line, state.betas[0].copy(), total - own, state.center, state.scale))
            state.take(number, line, total)

    roles = {u: (steering if u == attacker else protocol.site) for u in c.params.sites}
    run_protocol(
        protocol, c, roles=roles | {c.params.coordinator: protocol.coordinator}
    )  # ends in an abort: "separated"
    others = seen[0][2]  # of the honest site: donors, Σ x, Σ x xᵀ, Σ y
    rounds = [s for s in seen if s[0] == "L4"]
    (_, _, first, _, scale), (_, reached, far, _, _) = rounds[0], rounds[-1]
    np.testing.assert_allclose(reached, aim, atol=1e-3)
    return (first[1:3] - far[1:3]) / others[-1] * scale + others[1:3] / others[0]


AIM = np.array([9.0, 0.0])


def test_exact_likelihood_gives_a_donor_away():
    """Attack: where the likelihood is that of the donors, one steered run gives the donor that lies farthest out."""
    c, attacker, honest = far_case(NONE)
    np.testing.assert_allclose(read_by_steering(c, attacker, AIM), plain(c)[honest].x[7], atol=1e-3)


def test_a_steered_path_gives_a_group_and_no_donor():
    """The same attack on the protocol: what comes out is a mean over three donors or more."""
    c, attacker, honest = far_case(Thresholds())
    read, mine = read_by_steering(c, attacker, AIM), plain(c)[honest]
    table = protocol.arranged(c.params, mine).table
    assert table.n.min() >= 3
    assert np.abs(table.x - read).max(axis=1).min() < 0.1
    assert np.abs(mine.x - read).max(axis=1).min() > 0.3 or np.abs(mine.x[7] - read).max() > 1.0


def test_no_combination_comes_close_to_one_donor():
    """Groups and differences within them, as columns: no donor has a leverage above 1/3, whatever the features."""
    rng = np.random.default_rng(0)
    some = large = 0
    for seed in range(40):
        n, p = int(rng.integers(6, 80)), int(rng.integers(1, 4))
        x = np.random.default_rng(seed).standard_t(2 if seed % 2 else 30, size=(n, p))
        x[:, 0] = np.round(x[:, 0])
        params = dataclasses.replace(case("logistic").params, columns=tuple("abc"[:p]), fits=(tuple(range(p)),))
        mine = protocol.Donors(x, (rng.random(n) < 0.5).astype(float), np.full(n, 20))
        made = protocol.arranged(params, mine)
        z = protocol.standardised(x)
        D = protocol.deviations(z, made.kept)
        inside = (made.groups.codes[:, None] == np.arange(len(made.groups))).astype(float)
        left, size, _ = np.linalg.svd(np.hstack([inside, D]), full_matrices=False)
        h = np.square(left[:, size > 1e-9 * size.max()]).sum(axis=1)
        assert h.max() <= 1 / 3 + 1e-6
        assert made.donors >= 3 * (1 - 1e-6)
        some += (made.kept >= 0).any()
        large += made.large >= 0
    assert some > 10
    assert large > 5


@pytest.mark.parametrize(("model", "far"), [("logistic", 60.0), ("poisson", 8.0)])
def test_one_exact_evaluation_is_withheld_where_a_donor_stands_out(model, far):
    """A site of 60 adds its donors' own likelihood at moderate coefficients, and that of its tables at steered ones."""
    c = case(model, n=60, p=1, seed=2)
    mine = dataclasses.replace(plain(c)[c.params.sites[0]], exposure=None)
    side, state = protocol.Side(c.params, mine), protocol.State(c.params)
    made = side.arranged
    assert made.large >= 0
    state.center, state.scale = mine.x.mean(axis=0), mine.x.std(axis=0)
    for beta, withheld in ((0.1, False), (0.5, False), (far, True)):
        state.betas = [np.array([beta])]
        assert (side._effective(state, state.betas) < 3) == withheld
        part = side.part(0, "L5", state)
        assert part.donors >= 3
        own = protocol.outcomes.evaluate(c.params.likelihood, side._each_at(state, (0,)), state.betas[0])
        table = protocol.outcomes.evaluate(c.params.likelihood, side._scaled(state), state.betas[0])
        K = made.inside.information[0, 0] / state.scale[0] ** 2
        of_tables = table.score[0] + made.inside.score[0] / state.scale[0] - K * beta
        np.testing.assert_allclose(part.values[1], of_tables if withheld else own.score[0], rtol=1e-9)


def rare_feature(model, rng):
    """Sixty donors; eight have the second feature, of whom the first alone is above the middle of the first feature."""
    x = np.zeros((60, 2))
    x[:, 0] = np.where(np.arange(60) % 2 == 0, 1.0, -1.0) + 0.05 * rng.normal(size=60)
    x[[0, 1, 3, 5, 7, 9, 11, 13], 1] = rng.uniform(5, 9, 8)
    y = (rng.random(60) < 0.5).astype(float) if model == "logistic" else rng.poisson(3, 60).astype(float)
    return protocol.Donors(x, y, np.full(60, 20))


def test_steered_weights_do_not_pick_the_only_donor_with_a_feature(monkeypatch):
    """Attack on L5: expected outcomes are spread over thirty donors, of whom one has the second feature."""
    c, mine = case("poisson"), rare_feature("poisson", np.random.default_rng(0))
    side, state = protocol.Side(c.params, mine), protocol.State(c.params)
    assert side.arranged.large >= 0
    state.betas = [np.array([5.0, 0.0])]

    def read():
        _, _, score, _, _, J = side.part(0, "L5", state).values
        first = (mine.x.T @ mine.y)[1] - score  # Σ m x; the sum of x y is in F_u and T_u
        return (J + first**2 / mine.y.sum()) / first

    now = read()
    assert side._effective(state, state.betas) == 0
    monkeypatch.setattr(protocol, "MOST", 1.0)
    assert side._effective(state, state.betas) >= 3  # the weights alone say nothing
    assert read() == pytest.approx(mine.x[0, 1], rel=1e-3)
    assert abs(now - mine.x[0, 1]) > 0.5


def test_weights_that_leave_donors_to_the_last_digits_are_withheld(monkeypatch):
    """Where those with large weights lack a feature, a weight of 1e-23 still shows: the attacker chooses the scale."""
    c, mine = case("logistic"), rare_feature("logistic", np.random.default_rng(0))
    x = np.stack([np.sign(mine.x[:, 0]), mine.x[:, 1]], axis=1)
    x[0, 0] = -0.8
    mine = dataclasses.replace(mine, x=x, y=(np.arange(60) % 3 == 0).astype(float))
    side, state = protocol.Side(c.params, mine), protocol.State(c.params)
    assert side.arranged.large >= 0
    state.betas = [np.array([30.0, 0.0])]
    assert side._effective(state, state.betas) == 0
    monkeypatch.setattr(protocol, "FLAT", np.inf)
    assert side._effective(state, state.betas) >= 3  # its column is taken for rounding
    (m,) = side._expected(state, state.betas)
    part = m[side.row] * x[:, 1]
    assert part[0] > 0.9 * part.sum()


def test_what_a_range_expects_rests_on_enough_donors():
    """Attack on L6: at steep coefficients the lowest range expects what one donor of it does."""
    rng, withheld, shown = np.random.default_rng(0), 0, 0
    c = case("logistic", p=1)
    for _ in range(30):
        mine = protocol.Donors(rng.normal(size=(50, 1)), (rng.random(50) < 0.5).astype(float), np.full(50, 20))
        side, state = protocol.Side(c.params, mine), protocol.State(c.params)
        if side.arranged.large < 0:
            continue
        state.moments = np.eye(1)
        state.first, state.betas = [np.array([0.5])], [np.array([float(rng.uniform(0.5, 7))])]
        (ranges,), donors = side._ranges(state)
        assert (donors > 0) == bool(side.part(0, "L6", state).donors)
        if donors == 0:
            withheld += 1
            continue
        (m,) = side._expected(state, state.betas)
        rows, inside = side.row, side.inside
        for b in range(protocol.BINS):
            part = m[rows] * inside * (ranges[rows] == b)
            if part.any():
                shown += 1
                assert np.square(part).max() / np.square(part).sum() <= 1 / 3 + 1e-9
    assert withheld > 3
    assert shown > 10


@pytest.mark.parametrize("model", ["poisson", "negbin"])
def test_one_large_exposure_is_no_centre(model):
    """Attack: differences within a group are from a mean with exposures as weights, so from one donor's features."""
    rng, c = np.random.default_rng(3), case(model)
    exposure = np.ones(40)
    exposure[5] = 5000.0
    y = rng.poisson(3, 40).astype(float)
    y[5] = 9000.0
    mine = protocol.Donors(rng.normal(size=(40, 2)), y, np.full(40, 20), exposure=exposure)
    made = protocol.arranged(c.params, mine)
    for g in np.unique(made.kept[made.kept >= 0]):
        share = np.square(exposure[made.kept == g])
        assert share.max() / share.sum() <= 1 / 3 + 1e-9
    assert (made.kept >= 0).sum() > 20
    everyone = np.zeros(40, np.int64)
    exposed = protocol.outcomes.within(c.params.likelihood, mine.x, y, everyone, everyone, exposure)
    d = mine.x - mine.x[5]
    np.testing.assert_allclose(
        exposed.information / exposed.information[0, 0], d.T @ d / (d[:, 0] @ d[:, 0]), atol=0.02
    )  # of one group: the scatter around donor 5


def test_open_sums_of_products_show_a_feature_that_one_donor_has():
    """No attack is needed, and nothing prevents it: of the donors with one feature a single one has the other."""
    for model, line in (("logistic", "L2"), ("linear", "L3")):
        c, mine = case(model), rare_feature(model, np.random.default_rng(1))
        mine = dataclasses.replace(mine, x=np.stack([(mine.x[:, 0] > 0).astype(float), mine.x[:, 1]], axis=1))
        part = protocol.Side(c.params, mine).part(0, line, protocol.State(c.params))
        product = part.values[4] if model == "logistic" else part.values[8] + part.values[3] * part.values[4] / 60
        assert product == pytest.approx(mine.x[0, 1])
        assert part.donors >= 3


def test_open_a_group_mean_is_a_third_of_a_donor_far_from_all():
    rng, c = np.random.default_rng(0), case("cox", p=1)
    x = rng.normal(size=(40, 1))
    x[7] = 1000.0
    mine = protocol.Donors(x, (rng.random(40) < 0.5).astype(float), np.full(40, 20), rng.integers(0, 24, 40))
    table = protocol.arranged(c.params, mine).table
    far = int(np.argmax(table.x[:, 0]))
    assert table.n[far] >= 3
    assert table.x[far, 0] * table.n[far] == pytest.approx(1000.0, rel=0.02)


def test_open_sums_of_squares_show_an_outcome_far_from_all():
    rng = np.random.default_rng(0)
    y = rng.poisson(3, 40).astype(float)
    y[7] = 5000.0
    mine = protocol.Donors(rng.normal(size=(40, 1)), y, np.full(40, 20))
    c = case("linear", p=1)
    values = protocol.Side(c.params, mine).part(0, "L3", protocol.State(c.params)).values
    assert np.sqrt(values[-1] * 40 / 39) == pytest.approx(5000.0, rel=0.01)


@pytest.mark.parametrize("model", ["cox", "negbin"])
def test_other_models_never_evaluate_donors(model):
    c = case(model, n=100, p=1)
    assert protocol.arranged(c.params, plain(c)[c.params.sites[0]]).large < 0


def test_linear_sums_rest_on_enough_donors():
    """Donors that stand out have the mean features of a group; the coefficients stay unbiased."""
    rng, grouped = np.random.default_rng(1), 0
    c = case("linear")
    for _ in range(20):
        x = rng.standard_t(3, size=(40, 2))
        mine = protocol.Donors(x, x @ [1.0, 2.0], np.full(40, 20))
        made = protocol.arranged(c.params, mine)
        soft = protocol.softened(x, made.groups, made.kept)
        X = np.hstack([np.ones((40, 1)), soft])
        h = np.einsum("ip,pq,iq->i", X, np.linalg.inv(X.T @ X), X)
        assert h.max() <= 1 / 3 + 1e-6
        assert made.donors >= 3 * (1 - 1e-6)
        np.testing.assert_allclose(np.linalg.lstsq(X, mine.y)[0], [0, 1, 2], atol=0.3)
        grouped += not np.allclose(soft, x)
    assert grouped > 5


def test_tables_are_made_before_the_first_message():
    """What others send changes neither the groups nor the sums within them."""
    c = case("cox")
    mine = plain(c)[c.params.sites[0]]
    side = protocol.Side(c.params, mine)
    before = side.arranged.table.x.copy(), side.arranged.groups.codes.copy()
    state = protocol.State(c.params)
    state.center, state.scale, state.betas = np.array([1e3, -5.0]), np.array([1e-3, 7.0]), [np.array([5.0, -3.0])]
    state.first = state.betas
    for line in ("L2", "L3", "L4", "L5", "L6"):
        side.part(0, line, state)
    assert np.array_equal(side.arranged.table.x, before[0])
    assert np.array_equal(side.arranged.groups.codes, before[1])


def test_times_are_shared_by_enough_donors():
    rng = np.random.default_rng(0)
    for _ in range(20):
        interval = rng.integers(0, 30, 25)
        counts = np.bincount(protocol.moved(interval, Thresholds()))
        assert counts[counts > 0].min() >= 3
    c = case("km", n=21)
    for mine in plain(c).values():
        here, interval, events, runs = protocol.runs_of(c.params, mine)
        assert runs.donors.min() >= 3
        for r in range(len(runs)):
            at = runs.codes == r
            assert len(np.unique(events[at])) == 1  # each has the run's share
            assert events[at].sum() == pytest.approx(mine.y[here][at].sum())
            swapped = mine.interval[here].copy()
            one, *_, other = np.flatnonzero(at)
            swapped[[one, other]] = swapped[[other, one]]  # who of a run comes first does not show
            again = dataclasses.replace(mine, interval=swapped) if len(here) == len(mine.y) else None
            if again is not None:
                part = protocol.Side(c.params, again).part(0, "L8", protocol.State(c.params))
                whole = protocol.Side(c.params, mine).part(0, "L8", protocol.State(c.params))
                np.testing.assert_allclose(part.values, whole.values, atol=1e-9)


def test_runs_keep_times_that_enough_donors_share():
    interval = np.array([1, 1, 1, 2, 9, 9, 9, 9, 10, 20, 20])
    assert protocol.runs_in(interval, 3).tolist() == [0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2]
    assert protocol.runs_in(np.array([3, 4]), 3).tolist() == [-1, -1]
    assert protocol.runs_in(np.arange(7), 1).tolist() == list(range(7))


def test_every_contribution_names_its_donors():
    for model in ("linear", "logistic", "poisson", "negbin", "cox", "km"):
        c = case(model)
        side, state = protocol.Side(c.params, plain(c)[c.params.sites[0]]), protocol.State(c.params)
        state.first = state.betas
        for number, (line, _, length) in enumerate(protocol.lengths_of(c.params)):
            part = side.part(number, line, state)
            assert isinstance(part, Contribution)
            assert len(part.values) == length
            assert part.donors >= 3


@pytest.mark.parametrize(("model", "rounds"), [("linear", 1), ("poisson", 7)])
def test_lies(model, rounds):
    c, twin = (case(model, seed=s, n=24, p=1, rounds=rounds) for s in (5, 6))

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
    faults = [Fault("kill", c.params.sites[0], HUB, "Masked", nth=3)]
    run = run_protocol(protocol, c, faults=faults, timeout=1.5)
    assert not values(run)
    assert all(e.code for e in run.errors.values())
