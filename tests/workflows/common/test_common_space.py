from pathlib import Path
from types import SimpleNamespace

import pytest

from cloister.study import Party
from cloister.testing import Case, check_abort, check_cost, check_ideal, check_lies, check_vectors, run_protocol, values
from cloister.workflows.common import common_space
from cloister.workflows.common.common_space import Params

HUB, SITES = Party("hub"), tuple(map(Party, ("a", "b", "c")))
VECTORS = Path(__file__).parents[2] / "vectors" / "common_space.json"


def case(*digests):
    return Case(Params(SITES, HUB, "X_pca"), {u: (d,) for u, d in zip(SITES, digests, strict=True)})


def same(value, ideal):
    assert value == ideal


def test_ideal():
    check_ideal(common_space, [case("12", "12", "12"), case("", "", "")], agree=same)


def test_vectors():
    check_vectors(common_space, case("12", "12", "12"), VECTORS)


def test_cost():
    module = SimpleNamespace(__name__="common_space", roles=common_space.roles, cost=lambda p: common_space.cost(p, 2))
    check_cost(module, case("12", "12", "12"))


def test_abort():
    def survived(run):
        assert values(run)[HUB] == "12"

    check_abort(common_space, case("12", "12", "12"), survived=survived, kinds=["drop", "truncate", "kill"])


@pytest.mark.parametrize(
    ("digests", "who", "how"),
    [
        (("12", "12", "34"), "c", "another model"),
        (("34", "12", "12"), "a", "another model"),
        (("12", "", "12"), "b", "does not say"),
    ],
)
def test_whoever_differs_is_named(digests, who, how):
    run = run_protocol(common_space, case(*digests), timeout=3.0)
    assert run.errors[HUB].code == "other-space"
    assert f"'X_pca' of {who} " in str(run.errors[HUB])
    assert how in str(run.errors[HUB])
    assert set(run.errors) == {HUB, *SITES}


def test_one_liar():
    def right(lie, ended):
        assert set(ended.values()) <= {"12"}

    lies = check_lies(common_space, [case("12", "12", "12")], right=right)
    assert lies.tried >= 3
