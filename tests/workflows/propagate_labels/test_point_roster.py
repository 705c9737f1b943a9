from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cloister.errors import DataError, ParameterError
from cloister.study import Party
from cloister.testing import Case, check_abort, check_cost, check_ideal, check_vectors, check_view, run_protocol, values
from cloister.workflows.propagate_labels import point_roster
from cloister.workflows.propagate_labels.point_roster import Params, Roster

HUB = Party("hub")
SEED = bytes(range(32))


def case(names=(("a", "b"), (), ("c",)), counts=(5, 6, 7), width=4, classes=()):
    sites = tuple(Party(f"site-{i}") for i in range(len(names)))
    inputs = {u: (n, width, tuple(k), SEED) for u, n, k in zip(sites, counts, names, strict=False)}
    return Case(Params(sites, HUB, classes), inputs)


def agree(found, ideal):
    assert found == ideal


@settings(max_examples=10, deadline=None)
@given(names=st.lists(st.lists(st.text("äb\U0001f9a0", max_size=8), max_size=4), min_size=2, max_size=4))
def test_ideal(names):
    names = [[*own, "one", *(["two"] if i == 0 else [])] if own or i == 0 else own for i, own in enumerate(names)]
    check_ideal(point_roster, [case(names, range(1, 9))], agree=agree)


def test_ideal_with_agreed_classes():
    check_ideal(point_roster, [case(classes=("c", "b", "a"))], agree=agree)


def test_vectors():
    check_vectors(point_roster, case(), Path(__file__).parents[2] / "vectors" / "point_roster.json")


def test_view_cost_and_sealing():
    check_view(point_roster, case(), case(names=(("other", "names"), ("x",), ())))
    check_cost(point_roster, case())
    c = case(names=(("a secret name",), ("b",), ()))
    run = run_protocol(point_roster, c)
    assert values(run)[HUB] == Roster(c.params.sites, (5, 6, 7), (), 4)


def survived(run):
    got = {values(run)[p] for p in run.outcomes if p != HUB}
    assert len(got) <= 1
    assert all(len(r.sites) >= 2 for r in got)


@pytest.mark.parametrize("kind", ["drop", "delay", "duplicate", "swap", "truncate", "kill"])
def test_abort_or_survive(kind):
    c = case(names=(("a", "b"), ("a", "b"), ("a", "b")))
    messages = [("site-1", HUB, "point_roster.Points"), (HUB, "site-1", "point_roster.AllPoints")]
    assert check_abort(point_roster, c, survived=survived, kinds=[kind], messages=messages) == 2


def test_a_strange_seed_is_noticed():
    c = case()
    c.inputs[Party("site-1")] = (6, 4, ("x",), bytes(32))
    run = run_protocol(point_roster, c, timeout=1.0)
    assert {e.code for u, e in run.errors.items() if u != HUB} == {"names"}


def test_refusals():
    with pytest.raises(DataError, match="is this a column of labels"):
        point_roster.pack_names(str(i) * 10 for i in range(200_000))
    for sites, classes in ((("a",), ()), (("a", "a"), ()), (("a", "hub"), ()), (("a", "b"), ("x",))):
        with pytest.raises(ParameterError):
            Params(tuple(map(Party, sites)), HUB, classes)
    run = run_protocol(point_roster, case(names=(("a",), ("z",)), classes=("a", "b")), timeout=1.0)
    assert isinstance(run.errors["site-1"], DataError)
