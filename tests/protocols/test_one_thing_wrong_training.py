"""Classifiers, forests and training by sums: one number, name or party is wrong, and who checks it names the line."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from liars import own_aborts

from cloister.errors import ProtocolAbort
from cloister.papers import federated_training
from cloister.study import Party
from cloister.testing import Case, run_protocol
from cloister.workflows.find_outliers import counted_forest
from cloister.workflows.fine_tune import training_terms
from cloister.workflows.fine_tune.pseudo_labels import Pseudo
from cloister.workflows.train_classifier import logistic_terms

HUB = Party("hub")
SITES = A, B, C, D, E = tuple(map(Party, "abcde"))


def refused(code, line, check, *args):
    with pytest.raises(ProtocolAbort) as e:
        check(*args)
    assert (e.value.code, e.value.line) == (code, line)


# ---- logistic regression ---------------------------------------------------------------------------------------------

TERMS = logistic_terms.Params(SITES, HUB, embedding="X_pca", min_label_cells=5)
SUMS = np.array([20.0, 3.0, 4.0, 9.0, 8.0])  # cells, sums of two columns, of their squares
COUNTS = np.array([6, 4, 2, 3, 2, 1])  # of three labels: trained on, held out


@pytest.mark.parametrize(
    ("sums", "counts", "code"),
    [
        (SUMS * [0.05, 1, 1, 1, 1], COUNTS * 0, "absurd"),  # a single cell
        (SUMS, -COUNTS, "absurd"),
        (SUMS, COUNTS * 2, "absurd"),  # more labels than cells
        (SUMS * [1, np.nan, 1, 1, 1], COUNTS, "absurd"),
        (SUMS, np.array([9, 3, 2, 3, 1, 1]), "labels"),  # one label with five cells
        (SUMS * [1, 0, 0, 0, 0], COUNTS, "absurd"),  # all values are 0
    ],
)
def test_sums_of_cells_with_one_thing_wrong(sums, counts, code):
    good = logistic_terms.terms_of(TERMS, SUMS, COUNTS, ("p", "q", "r"))
    assert (good.labels, good.left_out) == (("p", "q"), ("r",))
    refused(code, "L4", logistic_terms.terms_of, TERMS, sums, counts, ("p", "q", "r"))


# ---- forest ----------------------------------------------------------------------------------------------------------


def test_rows_that_are_all_alike_are_named_by_everyone():
    params = counted_forest.Params(SITES[:3], HUB, trees=2, sample=32, min_cells=4)
    rows = dict.fromkeys(SITES[:3], ("table", ["x", "y"], np.ones((20, 2))))
    found = own_aborts(run_protocol(counted_forest, Case(params, rows), timeout=10.0))
    assert found[HUB] == ("counted_forest", "L3", "constant")


# ---- training --------------------------------------------------------------------------------------------------------

TRAINING = training_terms.Params(SITES, HUB, "model", rounds=5)


def test_labels_that_do_not_go_together():
    def brought(*labels):
        return {u: training_terms.Brings("x", own, True) for u, own in zip(SITES, labels, strict=False)}

    check = training_terms.vocabulary
    assert check(TRAINING, brought(("p", "q"), ("q", "r"))) == ("p", "q", "r")
    refused("spelling", "L1", check, TRAINING, brought(("p", "q"), ("P", "q")))
    refused("foreign-labels", "L1", check, TRAINING, brought(("p", "q"), ("r", "s")))


def test_a_round_of_fewer_sites_than_a_sum_may_have():
    """Two of five have labels, and the round is for them alone: their sum would be that of too few."""
    params = replace(TRAINING, pseudo=Pseudo("network", warm=3), resume=True)
    task = training_terms.Task(1, SITES, (A, B), False, 200.0, b"")
    assert training_terms.choose_clients(params, SITES, 1, (A, B)) == (A, B)
    refused("task", "L5", training_terms.check_task, params, A, task, None, 30, (A, B))
    three = replace(task, clients=(A, B, C))
    training_terms.check_task(params, A, three, None, 30, (A, B, C))


def test_a_minority_of_sites_does_not_go_on():
    def left(*gone):
        return federated_training._live(SimpleNamespace(lost=lambda u: u in gone), TRAINING)

    assert left(A, B) == (C, D, E)
    refused("too-few", "L5", left, A, B, C)
