from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from knn_cases import ASK, NAMES, agree, case

from cloister.errors import DataError, ParameterError
from cloister.mpc.three_party.replicated import Trio
from cloister.rehearsal.rehearsal import Fault
from cloister.study import Party
from cloister.testing import (
    Case,
    check_abort,
    check_cost,
    check_ideal,
    check_no_errors,
    check_vectors,
    check_view,
    fixed_entropy,
    run_protocol,
    transcript,
    values,
)
from cloister.workflows.map_labels import nearest_labels, private_knn
from cloister.workflows.map_labels.nearest_labels import UNKNOWN

VECTORS = Path(__file__).parents[2] / "vectors" / "private_knn.json"


@settings(max_examples=12, deadline=None)
@given(
    m=st.integers(1, 6),
    rows=st.lists(st.integers(1, 40), min_size=1, max_size=4),
    labels=st.integers(1, 6),
    k=st.integers(1, 5),
    bits=st.sampled_from([32, 40, 57, 64]),
    share=st.booleans(),
    threshold=st.sampled_from([0.0, 0.9, 50.0]),
    repeat=st.integers(1, 4),
    seed=st.integers(0, 999),
)
def test_ideal(m, rows, labels, k, bits, share, threshold, repeat, seed):
    c = case(m, rows, 3, labels, seed, repeat=repeat, k=min(k, sum(rows)), bits=bits, share=share, threshold=threshold)
    check_ideal(private_knn, [c], agree=agree)


def test_ideal_is_pooled_nearest_neighbours():
    """Against scikit-learn, where no vote is a tie."""
    from sklearn.neighbors import NearestNeighbors

    c = case(m=200, rows=(150, 200, 90), dims=6, labels=5, k=10, bound=20.0, bits=50)
    x = np.concatenate([c.inputs[s][0] for s in c.params.sites])
    y = np.concatenate([c.inputs[s][1] for s in c.params.sites])
    near = y[NearestNeighbors(n_neighbors=10).fit(x).kneighbors(c.inputs[ASK][0], return_distance=False)]
    votes = np.stack([(near == i).sum(1) for i in range(5)], axis=1)
    clear = np.sort(votes, axis=1)[:, -1] > np.sort(votes, axis=1)[:, -2]
    found = private_knn.ideal(c.params, c.inputs)[ASK].labels
    assert clear.sum() > 150
    np.testing.assert_array_equal(found[clear], votes.argmax(1)[clear])


@pytest.mark.parametrize(
    "computing",
    [(ASK, "basel", "lugano"), ("hub", "vienna", "ask"), ("basel", "lugano", "vienna"), ("hub", "aux", "basel")],
)
def test_any_three_may_compute(computing):
    c = case(rows=(30, 20, 25), computing=tuple(map(Party, computing)), share=True)
    check_ideal(private_knn, [c], agree=agree)


def test_batches_give_the_same():
    c = case(m=11, rows=(40, 30), batch=200)
    assert c.params.step < 5
    check_ideal(private_knn, [c], agree=agree)


def test_vectors():
    check_vectors(private_knn, case(m=2, rows=(4, 3), pads=1, k=2), VECTORS)


def test_view_does_not_depend_on_the_inputs():
    check_view(private_knn, case(rows=(9, 8), seed=1, threshold=1.0), case(rows=(9, 8), seed=2, threshold=1.0))


def test_view_is_the_same_for_fewer_cells_than_announced():
    full, few = case(m=5, rows=(9, 8), pads=0), case(m=3, rows=(6, 5), pads=0)
    few = Case(full.params, few.inputs)
    check_view(private_knn, full, few)
    check_ideal(private_knn, [few], agree=agree)


def test_cost():
    check_cost(private_knn, case(m=30, rows=(9, 8), share=True, threshold=1.0))
    check_cost(private_knn, case(m=30, rows=(7, 6, 5), k=4, computing=tuple(map(Party, ("hub", "basel", "lugano")))))


def test_expected_cost_of_long_rows():
    c = case(m=60, rows=(700, 800), k=5)
    run = run_protocol(private_knn, c)
    check_no_errors(run)
    found = sum(row[2] for rows in transcript(run).values() for row in rows)
    promised = sum(size for _, size in private_knn.cost(c.params).values())
    assert 0.7 * promised < found < 1.4 * promised


@pytest.mark.parametrize("kind", ["drop", "swap", "truncate", "kill"])
def test_abort(kind):
    c = case(m=2, rows=(4, 3), pads=1, k=2)
    wanted = private_knn.ideal(c.params, c.inputs)[ASK]

    def survived(run):
        agree(values(run)[ASK], wanted)

    messages = [("basel", "ask", n) for n in ("Key", "Input", "Reshare", "Hop", "OpenAll")]
    messages += [("lugano", "basel", "Pair"), ("ask", "basel", "Digits"), ("lugano", "ask", "Open")]
    messages = [(s, to, f"replicated.{n}") for s, to, n in messages]
    sent = {(p, to, n) for p, rows in transcript(run_protocol(private_knn, c)).items() for n, to, _ in rows}
    messages = [m for m in messages if m in sent]
    assert len(messages) >= 6
    check_abort(private_knn, c, survived=survived, kinds=[kind], messages=messages)


def test_a_site_that_dies_is_named():
    c = case(m=2, rows=(4, 3), pads=1, k=2)
    run = run_protocol(private_knn, c, faults=[Fault("kill", "lugano", None, "Hop")], timeout=1.0)
    assert values(run) == {}
    assert all("lugano" in str(run.errors[p]) or run.errors[p].code for p in (ASK, NAMES[0]))


# ---- ties and duplicates -------------------------------------------------------------------------------------------


def test_duplicates_and_order_do_not_change_the_answer():
    c = case(m=8, rows=(20, 16), labels=4, k=5, seed=3, repeat=5, pads=0)
    first = values(run_protocol(private_knn, c))[ASK].labels
    swapped = {p: (x[0][::-1], *[y[::-1] for y in x[1:]]) if p != ASK else x for p, x in c.inputs.items()}
    np.testing.assert_array_equal(values(run_protocol(private_knn, Case(c.params, swapped)))[ASK].labels, first)
    np.testing.assert_array_equal(private_knn.ideal(c.params, c.inputs)[ASK].labels, first)


def test_vote_ties_go_to_the_earlier_label():
    x = np.array([[0.0, 1], [0, -1], [1, 0], [-1, 0]])
    base = case(m=1, rows=(2, 2), dims=2, labels=3, pads=0, k=4, share=True)
    inputs = {ASK: (np.zeros((1, 2)),), NAMES[0]: (x[:2], np.array([2, 1])), NAMES[1]: (x[2:], np.array([1, 2]))}
    found = values(run_protocol(private_knn, Case(base.params, inputs)))[ASK]
    assert found.labels.tolist() == [1]
    assert found.votes.tolist() == [2]


def test_far_cells_are_unknown_and_say_nothing_else():
    base = case(m=2, rows=(3, 3), dims=2, labels=2, pads=0, k=3, share=True, threshold=1.0)
    near = np.array([[0.0, 0.1], [0, 0.2], [0, 0.3]])
    inputs = {
        ASK: (np.array([[0.0, 0.0], [3.0, 3.0]]),),
        NAMES[0]: (near, np.array([1, 1, 1])),
        NAMES[1]: (near + 0.01, np.array([1, 1, 0])),
    }
    found = values(run_protocol(private_knn, Case(base.params, inputs)))[ASK]
    assert found.labels.tolist() == [1, UNKNOWN]
    assert found.votes.tolist() == [3, 0]


# ---- what is opened ------------------------------------------------------------------------------------------------


def test_receipts_name_everything_that_is_opened():
    c = case(m=3, rows=(9, 8))
    run = run_protocol(private_knn, c)
    for receipt in run.receipts.values():
        opened = {(e.protocol, e.line, e.name, e.to) for e, _ in receipt.entries if e.kind == "opened"}
        assert {(p, line) for p, line, *_ in opened} == {("replicated", "R6"), ("private_knn", "L8")}
        assert {to for p, *_, to in opened if p == "private_knn"} == {ASK}


@pytest.mark.parametrize("labels", [1, 3])
def test_what_is_opened_says_nothing_about_a_vote(labels, monkeypatch):
    """L6 with k = 3: all six orders of the neighbours as often, whether a vote is unanimous or not."""
    seen = []
    original = Trio.open_bits

    async def spy(self, bits, **words):
        found = await original(self, bits, **words)
        if self.rank == 0:
            seen.append(found)
        return found

    monkeypatch.setattr(Trio, "open_bits", spy)
    c = case(m=1500, rows=(12, 10), labels=labels, pads=0, k=3)
    check_no_errors(run_protocol(private_knn, c, entropy=fixed_entropy("vote")))
    orders = np.unique(seen[-1].reshape(1500, 3) @ (1, 2, 4), return_counts=True)[1]
    assert len(orders) == 6
    assert ((orders - 250) ** 2 / 250).sum() < 36  # chi-square with 5 degrees of freedom: P = 1e-6


# ---- bad input -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"k": 100}, "n_neighbors=100 is more than the"),
        ({"bits": 15}, "do not resolve"),
        ({"labels": 1000, "bits": 18}, "do not resolve"),
        ({"computing": (ASK, ASK, NAMES[0])}, "three different"),
        ({"bound": float("nan")}, "finite"),
        ({"threshold": -1.0}, "finite"),
    ],
)
def test_bad_parameters(change, text):
    with pytest.raises(ParameterError, match=text):
        case(**change)


@pytest.mark.parametrize(
    ("spoil", "text"),
    [
        (lambda x: x * 100, "the bound agreed"),
        (lambda x: np.where(x == x[0, 0], np.nan, x), "the bound agreed"),
        (lambda x: x[:, :2], "rows of 3 numbers"),
        (lambda x: np.repeat(x, 9, axis=0), "rows that were announced"),
    ],
)
def test_bad_input_raises_before_anything_is_sent(spoil, text):
    c = case()
    c.inputs[ASK] = (spoil(c.inputs[ASK][0]),)
    run = run_protocol(private_knn, c, timeout=1.0)
    assert isinstance(run.errors[ASK], DataError)
    assert text in str(run.errors[ASK])
    assert not [r for r in transcript(run)[ASK] if not r[0].startswith("channel.")]


def test_labels_outside_the_vocabulary():
    c = case()
    x, y = c.inputs[NAMES[0]]
    c.inputs[NAMES[0]] = (x, y + 7)
    assert "label of the vocabulary" in str(run_protocol(private_knn, c, timeout=1.0).errors[NAMES[0]])


def test_the_scale_uses_the_ring_and_never_leaves_it():
    for bits in (32, 40, 64):
        p = case(bits=bits).params
        assert p.ring.bits == min(bits, 64 - 5)  # the number of one of 21 references stands below a key
        assert (4 * p.norm**2 + 2) << p.label_bits <= 1 << (p.ring.bits - 1)
        assert (4 * (p.norm + 2) ** 2 + 2) << p.label_bits > 1 << (p.ring.bits - 1)
        x = np.full((1, 3), p.bound / np.sqrt(3)) * (1 - 1e-12)
        assert (nearest_labels.encode(p, x) ** 2).sum() <= p.norm**2
