import dataclasses
from pathlib import Path

import pytest

from cloister.errors import DataError
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
    values,
)
from cloister.workflows.train_classifier import common_labels
from cloister.workflows.train_classifier.common_labels import Agreed, Own, Params, allowed

HUB, SITES = Party("hub"), tuple(map(Party, ("a", "b", "c")))
VECTORS = Path(__file__).parents[2] / "vectors" / "common_labels.json"


def case(lists=(("B", "T"), ("NK", "T"), ()), space="ab12", **options):
    owns = [Own(space, 7 if space else 0, tuple(labels), 100 if labels else 0) for labels in lists]
    return Case(
        Params(SITES, HUB, "X_a" if space else "", **options), dict(zip(SITES, ((o,) for o in owns), strict=True))
    )


def agree(found, ideal):
    assert dataclasses.astuple(found) == dataclasses.astuple(ideal)


def test_ideal():
    check_ideal(common_labels, [case(), case(space=""), case(labels=("T", "NK", "B", "mast"))], agree=agree)


def test_vectors():
    check_vectors(common_labels, case(), VECTORS)


def test_view_does_not_depend_on_labels_that_the_study_lists():
    listed = {"labels": ("T", "NK", "B")}
    check_view(common_labels, case(**listed), case((("NK",), (), ("B", "T")), **listed))
    with pytest.raises(AssertionError, match="depend on the inputs"):
        check_view(common_labels, case(), case((("B",), ("T",), ())))


def test_abort():
    def survived(run):
        assert values(run)[HUB].labels == ("B", "NK", "T")

    messages = [("a", "hub", "common_labels.Brings"), ("hub", "a", "common_labels.Agreed")]
    check_abort(common_labels, case(), survived=survived, messages=messages)


def test_cost():
    check_cost(common_labels, case())


def test_one_liar():
    def right(lie, ended):
        for agreed in ended.values():
            assert list(agreed.labels) == sorted(set(agreed.labels))

    check_lies(
        common_labels,
        [case(), case((("B", "NK"), ("T",), ("NK",)))],
        right=right,
        assumes={"coordinator": "abcdf", "site": "bc"},
    )


def test_the_minority_is_named():
    c = case()
    for other in (Own("cd34", 7, ("B",)), Own("ab12", 5, ("B",))):
        run = run_protocol(common_labels, Case(c.params, {**c.inputs, SITES[1]: (other,)}), timeout=2.0)
        assert run.errors[HUB].code == "mismatch"
        assert "b came with 'X_a' of another model" in str(run.errors[HUB])


def test_one_label_is_too_few():
    run = run_protocol(common_labels, case((("T",), ("T",), ())), timeout=2.0)
    assert "1 label(s) together" in str(run.errors[HUB])


def test_a_label_outside_the_study_is_named_at_home_and_nothing_is_sent():
    run = run_protocol(common_labels, case((("B", "T"), ("mast",), ()), labels=("B", "T")), timeout=2.0)
    assert isinstance(run.errors[SITES[1]], DataError)
    assert "'mast'" in str(run.errors[SITES[1]])
    assert not [e for e, _ in run.receipts[SITES[1]].entries if e.kind == "sent" and e.protocol == "common_labels"]


@pytest.mark.parametrize(
    "told",
    [
        Agreed("ab12", 7, ("B", "NK"), 100),  # lacks a label
        Agreed("ab12", 7, ("T", "NK", "B"), 100),  # not in order
        Agreed("ab12", 7, ("B", "B", "NK", "T"), 100),
        Agreed("cd34", 7, ("B", "NK", "T"), 100),
        Agreed("ab12", 7, ("B", "NK", "T"), 101),  # more genes than the site's cells allow
        Agreed("ab12", 7, ("B", "NK", "T"), 0),
    ],
)
def test_a_site_refuses_what_cannot_be(told):
    async def coordinator(ch, params):
        await ch.gather(params.sites, common_labels.Brings)
        await ch.broadcast(params.sites, told)

    run = run_protocol(common_labels, case(), roles={HUB: coordinator}, timeout=2.0)
    assert run.errors[SITES[0]].code in ("labels", "mismatch", "genes")


def test_a_coordinator_that_adds_to_the_list_of_the_study_is_found():
    async def coordinator(ch, params):
        agreed = dataclasses.replace(params, labels=("B", "NK", "T", "mast"))
        return await common_labels.coordinator(ch, agreed)

    run = run_protocol(common_labels, case(labels=("B", "NK", "T")), roles={HUB: coordinator}, timeout=2.0)
    assert {run.errors[u].code for u in SITES} == {"labels"}


def test_sites_announce_a_size_rounded_down_and_the_smallest_counts():
    assert [allowed(n) for n in (24, 25, 99, 100, 1234)] == [0, 25, 75, 100, 1000]
    c = case()
    owns = {
        u: (dataclasses.replace(own, genes=g),) for (u, (own,)), g in zip(c.inputs.items(), (300, 75, 0), strict=True)
    }
    run = run_protocol(common_labels, Case(c.params, owns))
    assert {agreed.genes for agreed in values(run).values()} == {75}
