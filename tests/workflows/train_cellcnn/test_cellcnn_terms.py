"""Names of markers and classes, and the clear twin between parties."""

import itertools
from pathlib import Path

import numpy as np
import pytest

from cloister.disclosure import constant
from cloister.errors import DataError, ProtocolAbort
from cloister.models import cellcnn
from cloister.papers import clear_training
from cloister.study import Party
from cloister.testing import (
    Case,
    check_abort,
    check_cost,
    check_ideal,
    check_lies,
    check_vectors,
    check_view,
    run_protocol,
)
from cloister.workflows.train_cellcnn import cellcnn_terms, pooled_counts

HUB, SITES = Party("hub"), tuple(Party(f"site-{i}") for i in range(3))
VECTORS = Path(__file__).parents[2] / "vectors"
CONFIG = cellcnn.Config(markers=4, filters=2, classes=2, batch=5, steps=3)


def terms_case():
    markers = ["CD3", "CD4", "CD57"]
    given = {u: (markers[i:] + markers[:i], ["case"] if i else ["case", "control"]) for i, u in enumerate(SITES)}
    return Case(cellcnn_terms.Params(SITES, HUB), given)


def training_case(seed=0):
    rng = np.random.default_rng(seed)
    shape = (CONFIG.steps, CONFIG.batch)
    given = {u: (rng.normal(size=(*shape, 4)), cellcnn.one_hot(rng.integers(0, 2, shape), 2)) for u in SITES}
    return Case(clear_training.Params(SITES, HUB, CONFIG), given)


def same_terms(found, ideal):
    assert found == ideal


def same_weights(found, ideal):
    for name in ("W", "V", "vW", "vV"):
        np.testing.assert_allclose(getattr(found.weights, name), getattr(ideal.weights, name), atol=1e-12)
    assert found.step == ideal.step
    assert found.losses == pytest.approx(ideal.losses)


@pytest.mark.parametrize(
    ("module", "case", "agree"),
    [(cellcnn_terms, terms_case, same_terms), (clear_training, training_case, same_weights)],
    ids=["terms", "training"],
)
def test_ideal_vectors_and_abort(module, case, agree):
    check_ideal(module, [case()], agree=agree)
    check_vectors(module, case(), VECTORS / f"{module.NAME}.json")
    name = "Names" if module is cellcnn_terms else "Gradient"
    messages = [("site-1", "hub", f"{module.NAME}.{name}")]
    assert check_abort(module, case(), survived=lambda run: None, messages=messages) == 6


def test_view_and_cost():
    check_view(clear_training, training_case(1), training_case(2))
    check_cost(clear_training, training_case())


def stopping_case(seed):
    """Labels that have nothing to do with the inputs: the validation error soon grows."""
    config, rng = (
        cellcnn.Config(markers=4, filters=2, batch=5, steps=30, learning_rate=0.5),
        np.random.default_rng(seed),
    )
    shape = (config.steps, config.batch)

    def labelled(*shape):
        return rng.normal(size=(*shape, 4)), cellcnn.one_hot(rng.integers(0, 2, shape), 2)

    given = {u: (*labelled(*shape), labelled(5)) for u in SITES}
    return Case(clear_training.Params(SITES, HUB, config, validate_every=2, patience=2), given)


def test_training_stops_where_validation_errors_grow_and_at_the_same_step_everywhere():
    cases = [stopping_case(seed) for seed in range(3)]
    check_ideal(clear_training, cases, agree=same_weights)
    found = [clear_training.ideal(c.params, {u: v for u, v in c.inputs.items() if u in SITES})[HUB] for c in cases]
    assert min(t.step for t in found) < 30
    for t in found:
        assert t.step == 30 or sorted(t.losses, key=t.losses.get)[0] == t.step - 4  # two validations ago


def test_when_validations_stop_a_training():
    assert not cellcnn.stops({}, 1)
    assert not cellcnn.stops({2: 0.3, 4: 0.2}, 1)
    assert cellcnn.stops({2: 0.2, 4: 0.2}, 1)  # no better
    assert not cellcnn.stops({2: 0.2, 4: 0.3}, 2)
    assert cellcnn.stops({4: 0.25, 2: 0.2, 6: 0.21}, 2)
    assert not cellcnn.stops({2: 0.2, 4: 0.3, 6: 0.4}, 0)  # never


def test_a_missing_marker_and_a_single_class_are_named():
    told = {u: cellcnn_terms.Names(("CD3", "CD4"), ("case", "control")) for u in SITES}
    with pytest.raises(ProtocolAbort, match=r"CD4.*site-2"):
        cellcnn_terms.combine({**told, SITES[2]: cellcnn_terms.Names(("CD3",), ("case",))})
    with pytest.raises(ProtocolAbort, match="two classes"):
        cellcnn_terms.combine({u: cellcnn_terms.Names(("CD3",), ("case",)) for u in SITES})


def counts_case(seed=0):
    rng = np.random.default_rng(seed)
    params = pooled_counts.Params(SITES, HUB, (2, 3), "counts")
    return Case(params, {u: (constant(rng.integers(0, 20, (2, 3)), "random"),) for u in SITES})


def test_counts_are_pooled_and_no_sites_own_is_sent():
    def same(found, ideal):
        np.testing.assert_array_equal(found, ideal)

    check_ideal(pooled_counts, [counts_case(s) for s in range(3)], agree=same)
    check_vectors(pooled_counts, counts_case(), VECTORS / "pooled_counts.json")
    check_view(pooled_counts, counts_case(1), counts_case(2))
    check_cost(pooled_counts, counts_case())
    messages = [("site-1", "hub", "secure_sum.MaskedInput")]
    check_abort(pooled_counts, counts_case(), survived=lambda run: None, messages=messages)


def possible_counts(lie, values):
    """Whoever finished has the sum of some honest sites' tables and of one that the liar could have counted."""
    honest = [x[0].values for u, x in counts_case().inputs.items() if u != lie.liar]
    sums = [sum(part) for k in range(len(honest) + 1) for part in itertools.combinations(honest, k)]
    for found in values.values():
        rest = [found - total for total in sums]
        assert any((r >= 0).all() and (r <= pooled_counts.MOST).all() for r in rest)


def test_one_liar_shifts_pooled_counts_by_what_it_could_have_counted_or_ends_them():
    lies = check_lies(
        pooled_counts, [counts_case()], right=possible_counts, assumes={"coordinator": "bcf"}, timeout=1.0
    )
    assert lies.tried >= 10
    assert lies.aborted >= 5


@pytest.mark.parametrize("z", [[2**60], [2**64 - 1], [3 * 2**40 + 1]])
def test_sums_that_no_counts_have_are_refused(z):
    params = pooled_counts.Params(SITES, HUB, (1,), "counts")
    with pytest.raises(ProtocolAbort, match="beyond what sites can count"):
        pooled_counts.counts(params, np.array(z, np.uint64))
    assert pooled_counts.counts(params, np.array([3 * 2**40], np.uint64)) == [3 * 2**40]


@pytest.mark.parametrize("counts", [[[1, 2, 3]], [[1, 2, 3], [0, -1, 0]], [[1, 2, 3], [0, 2**41, 0]]])
def test_counts_that_no_site_can_have_are_refused_before_anything_is_sent(counts):
    case = counts_case()
    case.inputs[SITES[0]] = (constant(np.array(counts), "made up"),)
    run = run_protocol(pooled_counts, case, timeout=5)
    assert isinstance(run.errors[SITES[0]], DataError)
    assert not [e for e in run.events if e.party == SITES[0] and e.kind == "sent" and "secure_sum" in e.name]
