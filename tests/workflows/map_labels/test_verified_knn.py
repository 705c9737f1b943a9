"""Verified k-NN, the questions that every protocol is asked; lies are in sharing/test_verified.py."""

import dataclasses
from pathlib import Path

import knn_cases
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from knn_cases import ASK, NAMES, agree

from cloister.errors import DataError, ParameterError
from cloister.study import Party
from cloister.testing import (
    Case,
    check_abort,
    check_cost,
    check_ideal,
    check_no_errors,
    check_vectors,
    check_view,
    run_protocol,
    transcript,
    values,
)
from cloister.workflows.map_labels import verified_knn
from cloister.workflows.map_labels.nearest_labels import UNKNOWN

VECTORS = Path(__file__).parents[2] / "vectors" / "verified_knn.json"


def case(*args, **options):
    c = knn_cases.case(*args, **options)
    return Case(verified_knn.Params(c.params), c.inputs)


@settings(max_examples=8, deadline=None)
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
    check_ideal(verified_knn, [c], agree=agree)


@pytest.mark.parametrize(
    "computing",
    [(ASK, "basel", "lugano"), ("hub", "vienna", "ask"), ("basel", "lugano", "vienna"), ("hub", "aux", "basel")],
)
def test_any_three_may_compute(computing):
    c = case(rows=(30, 20, 25), computing=tuple(map(Party, computing)), share=True, threshold=1.0)
    check_ideal(verified_knn, [c], agree=agree)


def test_batches_give_the_same():
    c = case(m=11, rows=(40, 30), batch=200)
    assert c.params.terms.step < 5
    check_ideal(verified_knn, [c], agree=agree)


def test_large_proofs_are_made_without_waiting(monkeypatch):
    from cloister.mpc.three_party import verified

    c = case(m=30, rows=(90, 70))
    monkeypatch.setattr(verified, "PENDING", 4096)
    check_ideal(verified_knn, [c], agree=agree)


def test_vectors():
    check_vectors(verified_knn, case(m=2, rows=(4, 3), pads=1, k=2), VECTORS)


def test_the_portable_loops_send_the_same_bytes(monkeypatch):
    """What a party with another processor says is the same, word for word."""
    from cloister.mpc.crypto import gf64, gf64_portable

    for name in ("gram_bits", "gram_field", "fold_bits", "fold_field", "dot", "weigh_rows", "scatter_weights"):
        monkeypatch.setattr(gf64, name, getattr(gf64_portable, name))
    check_vectors(verified_knn, case(m=2, rows=(4, 3), pads=1, k=2), VECTORS)
    check_ideal(verified_knn, [case(m=12, rows=(50, 40))], agree=agree)


def test_view_does_not_depend_on_the_inputs():
    check_view(verified_knn, case(rows=(9, 8), seed=1, threshold=1.0), case(rows=(9, 8), seed=2, threshold=1.0))


def test_cost():
    check_cost(verified_knn, case(m=30, rows=(9, 8), share=True, threshold=1.0))
    check_cost(verified_knn, case(m=30, rows=(7, 6, 5), k=4, computing=tuple(map(Party, ("hub", "basel", "lugano")))))
    check_cost(verified_knn, case(m=200, rows=(9, 8), k=1, labels=2))


def test_expected_cost_of_long_rows():
    c = case(m=60, rows=(700, 800), k=5)
    run = run_protocol(verified_knn, c)
    check_no_errors(run)
    sent = sum(row[2] for rows in transcript(run).values() for row in rows)
    promised = sum(size for _, size in verified_knn.cost(c.params).values())
    assert 0.7 * promised < sent < 1.4 * promised


@pytest.mark.parametrize("kind", ["drop", "swap", "truncate", "kill"])
def test_abort(kind):
    c = case(m=2, rows=(4, 3), pads=1, k=2)
    wanted = verified_knn.ideal(c.params, c.inputs)[ASK]

    def survived(run):
        agree(values(run)[ASK], wanted)

    messages = [("basel", "ask", n) for n in ("Key", "Gate", "Hopped", "Open", "Folded", "Seed")]
    messages += [("ask", "basel", "Sum"), ("lugano", "ask", "Coefficients"), ("ask", "lugano", "Point")]
    messages = [(s, to, f"verified.{n}") for s, to, n in messages]
    sent = {(p, to, n) for p, rows in transcript(run_protocol(verified_knn, c)).items() for n, to, _ in rows}
    messages = [m for m in messages if m in sent]
    assert len(messages) >= 6
    check_abort(verified_knn, c, survived=survived, kinds=[kind], messages=messages)


def test_vote_ties_go_to_the_earlier_label():
    x = np.array([[0.0, 1], [0, -1], [1, 0], [-1, 0]])
    base = case(m=1, rows=(2, 2), dims=2, labels=3, pads=0, k=4, share=True)
    inputs = {ASK: (np.zeros((1, 2)),), NAMES[0]: (x[:2], np.array([2, 1])), NAMES[1]: (x[2:], np.array([1, 2]))}
    mapped = values(run_protocol(verified_knn, Case(base.params, inputs)))[ASK]
    assert mapped.labels.tolist() == [1]
    assert mapped.votes.tolist() == [2]


def test_far_cells_are_unknown_and_say_nothing_else():
    base = case(m=2, rows=(3, 3), dims=2, labels=2, pads=0, k=3, share=True, threshold=1.0)
    near = np.array([[0.0, 0.1], [0, 0.2], [0, 0.3]])
    inputs = {
        ASK: (np.array([[0.0, 0.0], [3.0, 3.0]]),),
        NAMES[0]: (near, np.array([1, 1, 1])),
        NAMES[1]: (near + 0.01, np.array([1, 1, 0])),
    }
    mapped = values(run_protocol(verified_knn, Case(base.params, inputs)))[ASK]
    assert mapped.labels.tolist() == [1, UNKNOWN]
    assert mapped.votes.tolist() == [3, 0]


def test_receipts_name_everything_that_is_opened():
    run = run_protocol(verified_knn, case(m=3, rows=(9, 8)))
    for receipt in run.receipts.values():
        opened = {(e.protocol, e.line, e.name, e.to) for e, _ in receipt.entries if e.kind == "opened"}
        assert {(p, line) for p, line, *_ in opened} == {("verified", "V6"), ("verified_knn", "L8")}
        assert {to for p, *_, to in opened if p == "verified_knn"} == {ASK}


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
    run = run_protocol(verified_knn, c, timeout=1.0)
    assert isinstance(run.errors[ASK], DataError)
    assert text in str(run.errors[ASK])
    assert not [r for r in transcript(run)[ASK] if not r[0].startswith("channel.")]


@pytest.mark.parametrize(("dims", "bits"), [(1, 64), (3, 40), (200, 40), (200, 64), (3000, 32), (3000, 64)])
def test_squares_of_rows_that_pass_never_wrap(dims, bits):
    params = verified_knn.Params(dataclasses.replace(knn_cases.case(bits=bits).params, dims=dims))
    assert dims * (2 << params.reach.bit_length()) ** 2 < 1 << 63


def test_too_many_dimensions_are_refused():
    core = dataclasses.replace(knn_cases.case().params, dims=1 << 22)
    with pytest.raises(ParameterError, match="do not resolve"):
        verified_knn.Params(core)
