"""All modes of label propagation: exactness, dropout at every stage, refusals. Attacks are in tests/attacks."""

import dataclasses

import numpy as np
import pytest

from cloister.errors import DataError, ParameterError, ProtocolAbort
from cloister.models import graph
from cloister.mpc.sums import common_seed
from cloister.papers import label_propagation
from cloister.rehearsal.rehearsal import Fault
from cloister.study import Party
from cloister.testing import Case, check_no_errors, check_view, run_protocol, values
from cloister.workflows.propagate_labels import chosen_settings, private_propagation, verified_propagation
from cloister.workflows.propagate_labels.propagation_terms import Params

HUB = Party("hub")
MODES = [label_propagation, private_propagation, verified_propagation]
OPEN = [label_propagation, private_propagation]  # the server sees distances or the graph


def case(sizes=(14, 12, 10, 9), classes=3, labelled=0.4, seed=0, d=5, **options):
    """Sites with points around common centres; a random part is labelled. The last site has no labels at all."""
    rng = np.random.default_rng(seed)
    centres = 2.5 * rng.normal(size=(classes, d))
    names = tuple(Party(f"site-{i}") for i in range(len(sizes)))
    inputs = {}
    for i, (u, n) in enumerate(zip(names, sizes, strict=True)):
        y = rng.integers(0, classes, n)
        share = 0 if i == len(sizes) - 1 else labelled
        inputs[u] = (
            centres[y] + rng.normal(size=(n, d)),
            [f"type {c}" if rng.random() < share else None for c in y],
        )
    for u, c in zip(names[:1] * classes, range(classes), strict=True):  # every class has a label somewhere
        inputs[u][1][c] = f"type {c}"
    return Case(Params(names, HUB, **{"bits": 256, "n_neighbors": 4, **options}), inputs)


@pytest.fixture
def seeds(monkeypatch):
    """Secret seeds of the hyperplanes, in the order in which they were used."""
    seen = []
    made = graph.hyperplanes
    monkeypatch.setattr(graph, "hyperplanes", lambda seed, *a: (seen.append(seed), made(seed, *a))[1])
    return seen


def wanted(module, c, seed, *, without=(), unlabelled=()):
    inputs = {
        u: (v, [None] * len(v) if u in unlabelled else labels)
        for u, (v, labels) in c.inputs.items()
        if u not in without
    }
    return module.ideal(c.params, inputs, seed)


def check_labels(found, ideal, *, exact=True):
    assert found.classes == ideal.classes
    np.testing.assert_array_equal(found.label, ideal.label)
    if exact:
        np.testing.assert_array_equal(found.scores, ideal.scores)
        np.testing.assert_array_equal(found.confidence, ideal.confidence)
    else:
        np.testing.assert_allclose(found.confidence, ideal.confidence, atol=1e-5)


# ---- exactness -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("module", MODES)
@pytest.mark.parametrize("sizes", [(14, 12), (14, 12, 10), (14, 5, 1, 9)])
def test_equals_the_clear_computation_to_the_last_bit(module, sizes, seeds):
    c = case(sizes)
    run = run_protocol(module, c)
    check_no_errors(run)
    ideal = wanted(module, c, seeds[0])
    for u in c.params.sites:
        check_labels(values(run)[u], ideal[u])


@pytest.mark.parametrize("module", OPEN)
@pytest.mark.parametrize("engine", ["ot", "he"])
def test_the_other_engines_too(module, engine, seeds):
    c = case((6, 5, 4), engine=engine)
    run = run_protocol(module, c)
    check_no_errors(run)
    ideal = wanted(module, c, seeds[0])
    for u in c.params.sites:
        check_labels(values(run)[u], ideal[u])


def test_the_server_never_learns_the_seed_and_what_it_learns():
    c = case()
    for module in MODES:
        run = run_protocol(module, c)
        check_no_errors(run)
        (served,) = values(run)[HUB]
        assert (served.distances is None) == (module is not label_propagation)
        assert (served.keys is None) == (module is not private_propagation)
        assert (served.labelled is None) == (module is verified_propagation)


@pytest.mark.parametrize("module", OPEN)
def test_balanced(module, seeds):
    c = case((14, 12, 10), balance=True)
    run = run_protocol(module, c)
    check_no_errors(run)
    ideal = wanted(module, c, seeds[0])
    for u in c.params.sites:
        check_labels(values(run)[u], ideal[u])
    found = values(run)[Party("site-0")]
    assert (found.confidence != graph.decide(found.scores)[1]).any()
    opened = {e.name for e, _ in run.receipts[HUB].entries if e.kind == "opened"}
    assert "sum of 3 vectors of 3" in opened


@pytest.mark.parametrize("module", OPEN)
def test_settings_are_chosen_by_labels_that_are_left_out(module, seeds, monkeypatch):
    monkeypatch.setattr(chosen_settings, "ALPHAS", (0.5,))
    monkeypatch.setattr(chosen_settings, "POWERS", (4.0,))
    c = case((14, 12, 10), alpha=0.999, choose=True)
    run = run_protocol(module, c)
    check_no_errors(run)
    ideal = wanted(module, c, seeds[0])
    for u in c.params.sites:
        found = values(run)[u]
        check_labels(found, ideal[u])
        assert found.choice == ideal[u].choice == values(run)[HUB][0].choice
    assert len(found.choice.tried) == 6  # the usual, k = 3 and 4; with balance and without
    assert found.choice.accuracy == dict(found.choice.tried)[found.choice.setting]
    opened = {e.name for e, _ in run.receipts[HUB].entries if e.kind == "opened"}
    assert {"sum of 3 vectors of 3", "sum of 3 vectors of 21"} <= opened  # labels by class; hits of six settings
    scores = {e.to for e, _ in run.receipts[HUB].entries if e.kind == "opened" and e.name.startswith("scores of")}
    assert scores == set(c.params.sites)  # each site's own, and none to the server


@pytest.mark.parametrize(("sizes", "options"), [((40, 30, 70), {}), ((60, 80), {"alpha": 0.5, "n_neighbors": 2})])
def test_hardened_opens_only_the_index_of_a_setting(sizes, options, seeds):
    c = case(sizes, choose=True, **options)
    run = run_protocol(verified_propagation, c)
    check_no_errors(run)
    ideal = wanted(verified_propagation, c, seeds[0])
    for u in c.params.sites:
        check_labels(values(run)[u], ideal[u])
        assert values(run)[u].choice == ideal[u].choice == values(run)[HUB][0].choice
    opened = [e for r in run.receipts.values() for e, _ in r.entries if e.kind == "opened"]
    assert {e.name for e in opened if e.to == HUB and e.protocol == "verified_propagation"} == {"index of a setting"}
    for u in c.params.sites:
        mine = {e.name for e in opened if e.to == u and e.protocol == "verified_propagation"}
        assert mine == {"index of a setting", f"labels and levels of {len(c.inputs[u][1])} points"}


def test_a_setting_is_chosen_if_it_predicts_more_labels():
    """Two lines of points, labels at their ends and in the middle: a short walk misses what a long one finds."""
    rng = np.random.default_rng(0)
    near = np.array([[i - 1 if i % 40 else i + 1, i + 1 if i % 40 < 39 else i - 1] for i in range(80)])
    y, fold = np.repeat([0, 1], 40), rng.integers(0, 4, 80)
    y[rng.permutation(80)[:60]] = -1
    walks = [graph.Walk(2, 0.9, 1), graph.Walk(2, 0.9, 8)]
    assert verified_propagation.predicted(walks, near, y, fold, 2) == 1
    assert verified_propagation.predicted(walks[::-1], near, y, fold, 2) == 0
    assert verified_propagation.predicted([walks[1], walks[1]], near, y, fold, 2) == 0  # of equal ones the usual


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"engine": "he"}, "'hamming' is 'he'.*hamming=mpc, or mode semi-honest or published"),
        ({"engine": "ot"}, "'hamming' is 'ot'"),
        ({"balance": True}, "'balance' opens counts"),
        ({"class_means": 1.0}, "'class_means' opens counts or means"),
    ],
)
def test_hardened_refuses_what_it_does_not_compute_under_sharing(options, said):
    c = case((6, 5, 4), **options)
    with pytest.raises(ParameterError, match=said):
        verified_propagation.check_params(c.params)
    run = run_protocol(verified_propagation, c, timeout=5.0)
    assert not values(run)
    assert not [e for r in run.receipts.values() for e, _ in r.entries if e.name.startswith(("verified.", "hamming"))]


def test_after_an_opening_nothing_starts_again():
    """A coordinator that reports a dropout after results were opened would have sites learn them for fewer sites."""
    c = case((9, 8, 7, 6))
    fault = Fault("kill", "site-3", HUB, "attempts.Report")
    run = run_protocol(verified_propagation, c, faults=[fault], timeout=2.0)
    assert {run.errors[u].code for u in ("site-0", "site-1", "site-2")} == {"repeated"}
    assert not {p for p in values(run) if p != "site-3"}


@pytest.mark.parametrize("k", [1, 3, 5, 20])
@pytest.mark.parametrize("hubs", [1, 4])
def test_no_score_wraps_whatever_the_graph(k, hubs):
    """All points have the same neighbours, which therefore are hubs; and a ring of points."""
    n, rng = 300, np.random.default_rng(0)
    how = graph.Walk.of(k, 0.9)
    assert how.ring_bits <= graph.RING_BITS
    star = np.array([[j + (j >= i) for j in range(k)] for i in range(n)])
    ring = np.array([[(i + j) % n for j in range(1, k + 1)] for i in range(n)])
    crowd = np.where(rng.random((n, 1)) < 0.5 / hubs, star, ring)
    for near in (star, ring, crowd):
        y = rng.integers(-1, 2, n)
        exact = graph.walk(near, y, 2, how).astype(object)
        assert max(exact.sum(axis=1)) < 1 << how.ring_bits
        assert min(exact.reshape(-1)) >= 0


def test_a_choice_needs_evidence_and_counts_that_can_be_true():
    usual = chosen_settings.Setting(3, 1.0, 0.9, balance=False)
    terms = chosen_settings.Params((Party("a"), Party("b")), HUB, 256, usual, 2)
    settings, counts = len(terms.settings), np.array([20, 20])
    hits = np.full((settings + 1, 2), 10, np.uint64)
    hits[-1] = 20

    def told(row):
        changed = hits.copy()
        changed[5] = row
        return chosen_settings.best(terms, changed.reshape(-1), counts)

    assert told([13, 13]).setting == usual  # less than two standard errors of 0.078: the best of many is lucky
    assert told([18, 18]).setting == terms.settings[5]
    assert told([18, 18]).accuracy == pytest.approx(0.9)
    with pytest.raises(ProtocolAbort, match="more labels were reported correct than there are"):
        told([21, 0])
    means = chosen_settings.Params((Party("a"), Party("b")), HUB, 256, dataclasses.replace(usual, class_means=1.0), 2)
    more = np.full((len(means.settings) + 1, 2), 10, np.uint64)
    more[1], more[2], more[-1] = 12, 9, 20  # without means a little better, by 1.3 errors: enough, for one of three
    assert chosen_settings.best(means, more.reshape(-1), counts).setting == usual
    more[1] = [11, 10]  # by a third of one
    assert chosen_settings.best(means, more.reshape(-1), counts).setting.class_means == 1.0
    alone = chosen_settings.best(
        terms, hits.reshape(-1) * 0, np.array([1, 1])
    )  # a single label of a class tells nothing
    assert alone.setting == usual
    assert np.isnan(alone.accuracy)


def test_hits_of_single_points_are_not_opened(monkeypatch):
    """The attack: a site takes its own hits from the sum, and reads off which setting tells another's label right."""
    sites, counts = (Party("a"), Party("b")), np.array([5, 2, 2, 1])
    terms = chosen_settings.Params(sites, HUB, 256, chosen_settings.Setting(3, 1.0, 0.9, balance=False), 4)
    y = {"a": np.array([0, 0, 0, 1, 2]), "b": np.array([0, 0, 1, 2, 3])}
    rng = np.random.default_rng(0)
    scores = {u: rng.integers(0, 9, (terms.scores({s: 16 for s in sites}).sizes[0], 4)) for u in sites}
    secret = chosen_settings.hits(terms, scores["b"], y["b"], counts).reshape(-1, 4)

    def others():  # what a is left with
        both = sum(chosen_settings.hits(terms, scores[u], y[u], counts) for u in sites)
        return (both - chosen_settings.hits(terms, scores["a"], y["a"], counts)).reshape(-1, 4)

    found = others()
    np.testing.assert_array_equal(found, secret)
    np.testing.assert_array_equal(found[:, 2:], 0)  # classes 1 and 2 as one, four labels; class 3 not at all
    assert found[-1].tolist() == [2, 2, 0, 0]
    np.testing.assert_array_equal(chosen_settings.pools(np.array([9, 2, 1, 0])), [0, -1, -1, -1])
    np.testing.assert_array_equal(chosen_settings.pools(np.array([2, 9, 2, 2])), [0, 1, 0, 0])
    monkeypatch.setattr(chosen_settings, "FEWEST", 2)  # as it was: one row is one point of b
    bare = others()
    assert bare[-1].tolist() == [2, 1, 1, 0]
    assert set(bare[:-1, 1]) == {0, 1}


@pytest.mark.parametrize("module", OPEN)
def test_class_means_help_and_are_opened_to_sites_alone(module, seeds):
    c = case((14, 12, 10), class_means=2.0)
    run = run_protocol(module, c)
    check_no_errors(run)
    ideal = wanted(module, c, seeds[0])
    plain = wanted(module, case((14, 12, 10)), seeds[0])
    for u in c.params.sites:
        found = values(run)[u]
        np.testing.assert_array_equal(found.label, ideal[u].label)
        np.testing.assert_allclose(found.confidence, ideal[u].confidence, atol=1e-4)  # means in fixed point
        np.testing.assert_array_equal(found.scores, plain[u].scores)  # the graph says what it said
    assert (found.confidence != plain[u].confidence).any()
    opened = [e for e, _ in run.receipts[HUB].entries if e.kind == "opened"]
    assert any(e.protocol == "secure_sum" for e in opened)


def test_class_means_are_weighed_by_labels_that_are_left_out(seeds, monkeypatch):
    monkeypatch.setattr(chosen_settings, "ALPHAS", (0.5,))
    monkeypatch.setattr(chosen_settings, "POWERS", (4.0,))
    c = case((14, 12, 10), alpha=0.999, choose=True, class_means=1.0)
    run = run_protocol(private_propagation, c)
    check_no_errors(run)
    ideal = wanted(private_propagation, c, seeds[0])
    for u in c.params.sites:
        assert values(run)[u].choice.setting == ideal[u].choice.setting
        np.testing.assert_array_equal(values(run)[u].label, ideal[u].label)
    weights = {s.class_means for s, _ in values(run)[u].choice.tried}
    assert weights == {0.0, 1.0, 4.0}


@pytest.mark.parametrize("module", MODES)
def test_many_sites_in_groups(module, seeds, monkeypatch):
    monkeypatch.setattr(common_seed, "hkdf", lambda *a, **k: bytes(range(32)))
    c = case((6, 5, 7, 6, 5), groups=2, n_neighbors=3)
    for u, (_, labels) in c.inputs.items():
        labels[:2] = ["type 0", "type 1"] if u != "site-4" else [None, None]
    run = run_protocol(module, c)
    check_no_errors(run)
    ideal = module.ideal(c.params, c.inputs, seeds[0])
    for u in c.params.sites:
        check_labels(values(run)[u], ideal[u])
    assert values(run)[Party("site-0")].sites == ("site-0", "site-2", "site-4")
    assert [s.sites for s in values(run)[HUB]] == [("site-0", "site-2", "site-4"), ("site-1", "site-3")]


def test_agreed_classes_are_not_exchanged(seeds):
    c = case(classes=3)
    c = Case(Params(c.params.sites, HUB, 256, 4, classes=("type 2", "type 1", "type 0", "other")), c.inputs)
    run = run_protocol(label_propagation, c)
    check_no_errors(run)
    assert values(run)[Party("site-0")].classes == ("type 2", "type 1", "type 0", "other")


def test_view_of_the_published_protocol():
    first, second = case(seed=1), case(seed=1)
    for u, (v, labels) in second.inputs.items():
        second.inputs[u] = (v[::-1] * -2, ["type 0" if n == "type 1" else n and "type 1" for n in labels])
    for c in (first, second):
        for _, labels in c.inputs.values():
            labels[:] = [n and n.replace("2", "0") for n in labels]
    check_view(label_propagation, first, second)


# ---- dropout at each of the five stages ------------------------------------------------------------------------------

EARLY = ["common_seed.Key", "common_seed.Confirm", "point_roster.Points"]
DURING = ["replicated.Key", "replicated.Input", "replicated.Reshare"]
VERIFIED = ["verified.Key", "verified.Input", "verified.Hopped"]


def leaving():
    """Who leaves at which message; site-0 is one of the three that compute, site-3 only gives its codes."""
    fast = {(label_propagation, "point_roster.Points", "site-3"), (verified_propagation, "verified.Hopped", "site-0")}
    for module in MODES:
        for name in (*EARLY, *(VERIFIED if module is verified_propagation else DURING)):
            for gone in ("site-0", "site-3"):
                if (name, gone) not in (("replicated.Reshare", "site-3"), ("verified.Hopped", "site-3")):
                    marks = () if (module, name, gone) in fast else pytest.mark.slow
                    yield pytest.param(module, name, gone, marks=marks)


@pytest.mark.parametrize(("module", "name", "gone"), list(leaving()))
def test_before_and_during_the_distances_it_is_as_if_absent(module, name, gone, seeds):
    c = case()
    c.inputs[Party("site-1")][1][:3] = ["type 0", "type 1", "type 2"]  # all classes, whoever leaves
    run = run_protocol(module, c, faults=[Fault("kill", gone, None, name)], timeout=2.0)
    check_no_errors(run)
    ideal = wanted(module, c, seeds[-1], without=[gone])
    for u, found in values(run).items():
        if u not in (HUB, gone):
            assert gone not in found.sites
            check_labels(found, ideal[u])
    assert set(values(run)) == {HUB, *c.params.sites} - {gone}


@pytest.mark.slow
def test_two_leave_one_after_the_other_and_the_server_becomes_third(seeds):
    c = case((14, 12, 10, 9))
    c.inputs[Party("site-2")][1][:3] = ["type 0", "type 1", "type 2"]
    faults = [
        Fault("kill", "site-0", None, "replicated.Reshare"),
        Fault("kill", "site-1", None, "replicated.Key", nth=5),
    ]
    run = run_protocol(private_propagation, c, faults=faults, timeout=2.0)
    check_no_errors(run)
    ideal = wanted(private_propagation, c, seeds[-1], without=["site-0", "site-1"])
    for u in ("site-2", "site-3"):
        assert values(run)[u].sites == ("site-2", "site-3")
        check_labels(values(run)[u], ideal[u])


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["ot", "he"])
def test_during_the_distances_of_two_sites(engine, seeds):
    c = case((6, 5, 4), engine=engine)
    c.inputs[Party("site-0")][1][:3] = ["type 0", "type 1", "type 2"]
    name = {"ot": "Corrections", "he": "Masked"}[engine]
    run = run_protocol(label_propagation, c, faults=[Fault("kill", "site-1", None, name)], timeout=3.0)
    faults = [e for r in run.receipts.values() for e, _ in r.entries if e.name == "attempts.Go"]
    check_no_errors(run)
    assert len(faults) > 0
    ideal = wanted(label_propagation, c, seeds[-1], without=["site-1"] if "site-1" not in values(run) else [])
    for u, found in values(run).items():
        if u != HUB:
            check_labels(found, ideal[u])


@pytest.mark.parametrize(
    ("module", "name"),
    [
        (label_propagation, "label_propagation.Labelled"),
        (private_propagation, "propagation_terms.Labelled"),
    ],
)
def test_before_the_sums_it_counts_as_unlabelled(module, name, seeds):
    c = case()
    c.inputs[Party("site-0")][1][:3] = ["type 0", "type 1", "type 2"]
    run = run_protocol(module, c, faults=[Fault("kill", "site-1", HUB, name)], timeout=2.0)
    check_no_errors(run)
    ideal = wanted(module, c, seeds[0], unlabelled=["site-1"])
    for u in ("site-0", "site-2", "site-3"):
        found = values(run)[u]
        assert "site-1" in found.sites  # its points are in the graph
        check_labels(found, ideal[u])


@pytest.mark.parametrize("name", [pytest.param("row_sums.Key", marks=pytest.mark.slow), "row_sums.MaskedRows"])
def test_within_the_sums_they_are_begun_again(name, seeds):
    c = case()
    c.inputs[Party("site-0")][1][:3] = ["type 0", "type 1", "type 2"]
    run = run_protocol(label_propagation, c, faults=[Fault("kill", "site-1", HUB, name)], timeout=2.0)
    check_no_errors(run)
    ideal = wanted(label_propagation, c, seeds[0], unlabelled=["site-1"])
    for u in ("site-0", "site-2", "site-3"):
        check_labels(values(run)[u], ideal[u], exact=False)  # S was scaled for its labels, too


@pytest.mark.parametrize(("module", "name"), [(label_propagation, "row_sums.Sums")])
def test_later_it_only_misses_its_own_labels(module, name, seeds):
    c = case()
    run = run_protocol(module, c, faults=[Fault("truncate", HUB, "site-1", name)], timeout=2.0)
    assert set(run.errors) == {"site-1"}
    ideal = wanted(module, c, seeds[0])
    for u in ("site-0", "site-2", "site-3"):
        check_labels(values(run)[u], ideal[u])


@pytest.mark.parametrize("module", MODES)
def test_one_site_left_is_a_named_abort(module):
    c = case((9, 8))
    name = "verified.Gate" if module is verified_propagation else "replicated.Reshare"
    run = run_protocol(module, c, faults=[Fault("kill", "site-1", None, name)], timeout=1.0)
    assert set(run.errors) == {HUB, "site-0"}
    assert run.errors[HUB].code == "too-few"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["replicated.Input", "attempts.Go", "attempts.Report", "row_sums.MaskedRows"])
@pytest.mark.parametrize("kind", ["drop", "truncate", "duplicate"])
def test_a_broken_link_ends_by_name_or_goes_on_without_the_party(kind, name, seeds):
    c = case((9, 8, 7))
    c.inputs[Party("site-0")][1][:3] = ["type 0", "type 1", "type 2"]
    sender = HUB if name == "attempts.Go" else "site-1"
    to = "site-1" if name == "attempts.Go" else None
    run = run_protocol(label_propagation, c, faults=[Fault(kind, sender, to, name)], timeout=1.5)
    for e in run.errors.values():
        assert isinstance(e, ProtocolAbort)
        assert all((e.protocol, e.line, e.code))
    for u, found in values(run).items():
        if u != HUB:
            gone = set(c.params.sites) - set(found.sites)
            ideals = [wanted(label_propagation, c, seeds[-1], without=gone, unlabelled=x) for x in ((), ["site-1"])]
            assert any((i[u].label == found.label).all() for i in ideals)


# ---- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("module", MODES)
def test_rows_of_different_width(module):
    c = case((9, 8))
    c.inputs[Party("site-1")] = (np.ones((8, 4)), [None] * 8)
    run = run_protocol(module, c, timeout=3.0)
    assert {e.code for e in run.errors.values()} == {"width"}
    assert "5 at 'site-0', 4 at 'site-1'" in str(run.errors["site-0"])


@pytest.mark.parametrize(("label", "code"), [(None, "no-labels"), ("only one", "one-class")])
def test_no_labels_or_one_class(label, code):
    c = case((9, 8))
    for v, labels in c.inputs.values():
        labels[:] = [label] * len(v)
    run = run_protocol(label_propagation, c, timeout=3.0)
    assert {run.errors[u].code for u in c.params.sites} == {code}


@pytest.mark.parametrize("module", OPEN)
def test_no_labels_among_agreed_classes(module):
    c = case((9, 8))
    c = Case(Params(c.params.sites, HUB, 256, 4, classes=("a", "b")), c.inputs)
    for v, labels in c.inputs.values():
        labels[:] = [None] * len(v)
    run = run_protocol(module, c, timeout=3.0)
    assert run.errors[HUB].code == "no-labels"


def test_more_neighbours_than_points():
    run = run_protocol(label_propagation, case((5, 4), n_neighbors=9), timeout=3.0)
    assert all(isinstance(e, ParameterError) for e in run.errors.values())
    assert set(run.errors) == {HUB, "site-0", "site-1"}


@pytest.mark.parametrize(
    "change",
    [
        lambda v, y: (v.astype(np.float32), y),
        lambda v, y: (v[:, 0], y),
        lambda v, y: (np.where(v > 1, np.nan, v), y),
        lambda v, y: (v, y[:-1]),
        lambda v, y: (v[:0], []),
    ],
)
def test_bad_points_are_refused_before_anything_is_sent(change):
    c = case((9, 8))
    c.inputs[Party("site-0")] = change(*c.inputs[Party("site-0")])
    run = run_protocol(label_propagation, c, timeout=1.0)
    assert isinstance(run.errors["site-0"], DataError)
    sent = [e.name for e, _ in run.receipts["site-0"].entries if e.kind == "sent"]
    assert set(sent) == {"channel.Hello", "channel.Abort"}


@pytest.mark.parametrize(
    "options",
    [
        {"bits": 100},
        {"n_neighbors": 0},
        {"alpha": 1.0},
        {"engine": "x"},
        {"classes": ("a",)},
        {"classes": ("a", "a")},
        {"groups": 3},
    ],
)
def test_bad_parameters(options):
    with pytest.raises(ParameterError):
        Params((Party("a"), Party("b"), Party("c"), Party("d")), HUB, **options)


@pytest.mark.parametrize("gone", ["site-1", "site-3"])
def test_within_the_scores_they_are_begun_again(gone, seeds):
    """Its points are in the graph; its labels are as if it had none."""
    c = case()
    c.inputs[Party("site-0")][1][:3] = ["type 0", "type 1", "type 2"]
    keys = 4 if gone == "site-1" else 3  # of the graph; then come those of the scores
    faults = [Fault("kill", gone, None, "replicated.Key", nth=keys)]
    run = run_protocol(private_propagation, c, faults=faults, timeout=2.0)
    check_no_errors(run)
    ideal = wanted(private_propagation, c, seeds[0], unlabelled=[gone])
    for u in {"site-0", "site-1", "site-2", "site-3"} - {gone}:
        labels = values(run)[u]
        assert gone in labels.sites
        check_labels(labels, ideal[u])


def test_within_the_choice_it_is_begun_again(monkeypatch):
    """Who leaves then has no say in the choice, and its labels are as if it had none."""
    monkeypatch.setattr(chosen_settings, "ALPHAS", (0.5,))
    monkeypatch.setattr(chosen_settings, "POWERS", (4.0,))
    c = case(choose=True)
    c.inputs[Party("site-0")][1][:3] = ["type 0", "type 1", "type 2"]
    run = run_protocol(
        private_propagation, c, faults=[Fault("kill", "site-3", None, "replicated.Key", nth=3)], timeout=2.0
    )  # three keys are of the graph
    check_no_errors(run)
    (served,) = values(run)[HUB]
    assert set(served.finished) == {"site-0", "site-1", "site-2"}
    for u in served.finished:
        assert "site-3" in values(run)[u].sites
        assert values(run)[u].choice == served.choice
    assert len(served.choice.tried) == 6
