from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("nacl")

from cloister.errors import ParameterError
from cloister.papers.hamming import oblivious_transfer as ot
from cloister.study import Party
from cloister.testing import (
    Case,
    check_abort,
    check_cost,
    check_no_errors,
    check_vectors,
    check_view,
    run_protocol,
    values,
)

S, R = Party("sender"), Party("receiver")


def case(count=16, width=3, word=2, seed=0):
    rng = np.random.default_rng(seed)
    params = ot.Params(S, R, count, width, word)
    delta = rng.integers(0, 1 << (8 * word), (count, width)).astype(params.dtype)
    return Case(params, {S: (delta,), R: (rng.integers(0, 2, count).astype(np.uint8),)})


def check(c, run):
    got = values(run)
    if {S, R} <= got.keys():
        wanted = ot.ideal(c.params, {p: x[0] for p, x in c.inputs.items()})
        np.testing.assert_array_equal(got[R] - got[S], wanted[R] - wanted[S])


@settings(max_examples=10, deadline=None)
@given(count=st.integers(1, 30), width=st.integers(1, 20), word=st.sampled_from([2, 4]), seed=st.integers(0, 99))
def test_ideal(count, width, word, seed):
    c = case(8 * count, width, word, seed)
    run = run_protocol(ot, c)
    check_no_errors(run)
    check(c, run)


def test_vectors():
    check_vectors(ot, case(8, 2), Path(__file__).parents[2] / "vectors" / "oblivious_transfer.json")


def test_view_and_cost():
    check_view(ot, case(seed=1), case(seed=2))
    check_cost(ot, case(800, 5))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["drop", "delay", "duplicate", "swap", "truncate", "kill"])
def test_abort(kind):
    c = case()
    assert check_abort(ot, c, survived=lambda run: check(c, run), kinds=[kind], timeout=1.0) >= 4


def test_batches_use_fresh_pads():
    delta = np.ones((8, 2), np.uint16)

    async def sender(ch, params, x, *, entropy):
        link = await ot.Sender.meet(ch, R, entropy)
        return [await link.transfer(delta) for _ in range(2)]

    async def receiver(ch, params, x, *, entropy):
        link = await ot.Receiver.meet(ch, S, entropy)
        return [await link.transfer(np.ones(8, np.uint8), 2, delta.dtype) for _ in range(2)]

    module = SimpleNamespace(__name__="oblivious_transfer", roles=lambda _: {S: sender, R: receiver})
    run = run_protocol(module, Case(case().params, {S: (None,), R: (None,)}))
    check_no_errors(run)
    sent, got = values(run)[S], values(run)[R]
    for m, x in zip(sent, got, strict=True):
        np.testing.assert_array_equal(x - m, delta)
    assert (sent[0] != sent[1]).any()


@pytest.mark.parametrize("options", [{"count": 7}, {"count": 0}, {"width": 0}, {"word": 3}])
def test_bad_parameters(options):
    with pytest.raises(ParameterError):
        ot.Params(S, R, **{"count": 8, "width": 1, **options})
