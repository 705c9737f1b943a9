"""What a querier from outside is told of a model, by whom, and if all agree."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from cloister.errors import ParameterError, ProtocolAbort, RefusedError
from cloister.models import cellcnn
from cloister.study import Party
from cloister.testing import Case, check_abort, check_ideal, check_lies, check_vectors, check_view, run_protocol
from cloister.workflows.predict_cellcnn import cellcnn_card
from cloister.workflows.predict_cellcnn.cellcnn_card import Told

HUB, SITES, ASKS = Party("hub"), tuple(Party(f"site-{i}") for i in range(2)), Party("researcher")
CONFIG = cellcnn.Config(markers=2, filters=2)
VECTORS = Path(__file__).parents[2] / "vectors" / "cellcnn_card.json"


def told(mean=0.5, weights=None, **changed):
    model = cellcnn.Model(
        replace(CONFIG, **changed),
        ("CD3", "CD57"),
        ("case", "control"),
        5.0,
        np.array([mean, 1.0]),
        np.ones(2),
        weights,
    )
    return Told(model, validated=False)


def case(hub=None, site=None):
    params = cellcnn_card.Params(SITES, HUB, ASKS)
    return Case(params, {HUB: (hub or told(),), SITES[0]: (told(),), SITES[1]: (site or told(),), ASKS: ()})


def test_the_querier_is_told_all_but_the_weights():
    def same(found, ideal):
        assert (found is None) == (ideal is None)
        if found is not None:
            assert found.model.to_json() == ideal.model.to_json()
            assert found.model.weights is None

    opened = told(weights=cellcnn.initial(CONFIG))
    check_ideal(cellcnn_card, [case(), case(hub=opened, site=opened)], agree=same)
    check_view(cellcnn_card, case(), case(hub=opened))
    assert check_abort(
        cellcnn_card, case(), survived=lambda run: None, messages=[("hub", "site-1", "cellcnn_card.Card")]
    )


def the_card_or_none(lie, values):
    """A querier that finished was told the model's card; sites return nothing."""
    found = values.get(ASKS)
    if lie.letter == "j" and lie.liar == HUB:
        return  # the card of another model: what the coordinator sends is its input
    assert found is None or found.model.to_json() == told().model.to_json()


def test_vectors_and_one_liar():
    check_vectors(cellcnn_card, case(), VECTORS)
    lies = check_lies(cellcnn_card, [case()], right=the_card_or_none, assumes={"coordinator": "ab"}, full=True)
    assert lies.tried >= 4


@pytest.mark.parametrize("lie", [told(mean=0.6), told(filters=3), replace(told(), validated=True)])
def test_a_card_that_is_not_the_models_is_noticed_by_the_sites(lie):
    run = run_protocol(cellcnn_card, case(hub=lie), timeout=5)
    assert {run.errors[i].code for i in SITES} == {"differs"}


def test_a_card_that_is_none():
    with pytest.raises(ProtocolAbort, match="no card"):
        cellcnn_card.read_card(cellcnn_card.Card("{}", validated=False))


def test_who_trained_is_no_outsider_and_who_does_not_consent_says_so():
    with pytest.raises(ParameterError, match="took part"):
        cellcnn_card.Params(SITES, HUB, SITES[0])
    with pytest.raises(RefusedError, match="outside-query"):
        cellcnn_card.check_consent(frozenset({"open-model"}))
