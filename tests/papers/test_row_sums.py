from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cloister.errors import ParameterError
from cloister.papers import row_sums
from cloister.papers.row_sums import Params
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
    run_protocol,
    same_array,
    values,
)

VECTORS = Path(__file__).parents[1] / "vectors" / "row_sums.json"
HUB = Party("hub")


def case(sizes=(2, 3, 1), width=4, seed=0):
    rng = np.random.default_rng(seed)
    names = tuple(Party(f"site-{i}") for i in range(len(sizes)))
    inputs = {u: (rng.integers(0, 2**64, (sum(sizes), width), dtype=np.uint64),) for u in names}
    return Case(Params(names, sizes, HUB, width), inputs)


def agree(found, ideal):
    if isinstance(found, tuple):  # the server: who took part
        assert ideal is None
    else:
        same_array(found, ideal)


def check_rows(c, run):
    """Everyone who finished holds its rows of the sum over those the server names."""
    got = values(run)
    took_part = got[HUB]
    wanted = row_sums.ideal(c.params, {u: c.inputs[u][0] for u in took_part})
    for u, found in got.items():
        if u != HUB:
            np.testing.assert_array_equal(found, wanted[u])


@settings(max_examples=12, deadline=None)
@given(sizes=st.lists(st.integers(1, 5), min_size=2, max_size=5), width=st.integers(1, 4), seed=st.integers(0, 999))
def test_ideal(sizes, width, seed):
    check_ideal(row_sums, [case(tuple(sizes), width, seed)], agree=agree)


def test_vectors():
    check_vectors(row_sums, case(), VECTORS)


def test_view():
    check_view(row_sums, case(seed=1), case(seed=2))


def test_cost():
    check_cost(row_sums, case((30, 20, 50), 7))


@pytest.mark.parametrize("kind", ["drop", "delay", "duplicate", "swap", "truncate", "kill"])
def test_abort_or_survive(kind):
    c = case()
    messages = [
        ("site-1", "hub", "row_sums.Key"),
        ("site-1", "hub", "row_sums.MaskedRows"),
        ("hub", "site-1", "row_sums.Keys"),
        ("hub", "site-1", "row_sums.Sums"),
    ]
    assert check_abort(row_sums, c, survived=lambda run: check_rows(c, run), kinds=[kind], messages=messages) == 4


@pytest.mark.parametrize("name", ["Key", "MaskedRows"])
def test_two_of_five_drop_and_fresh_masks_are_drawn(name):
    c = case((2, 1, 3, 2, 1))
    gone = c.params.sites[1::2]
    run = run_protocol(row_sums, c, faults=[Fault("kill", u, HUB, name) for u in gone], timeout=2.0)
    check_no_errors(run)
    assert set(values(run)[HUB]) == set(c.params.sites) - set(gone)
    check_rows(c, run)
    entries = [e for e, _ in run.receipts["site-0"].entries if e.name == "row_sums.MaskedRows"]
    assert len(entries) == (1 if name == "Key" else 2)
    assert len({e.sha256 for e in entries}) == len(entries)


def test_a_restart_leaves_out_the_rows_of_who_left():
    """With them, the masks would cancel there and the server could read the sum: nobody keeps a part of it back."""
    c = case((2, 3, 1))
    sent = []

    async def watching(ch, params):
        sub = ch.sub

        def spied(label, params=None):
            inner = sub(label, params)
            gather = inner.gather

            async def spy(senders, kind, **kw):
                got = await gather(senders, kind, **kw)
                if kind is row_sums.MaskedRows:
                    sent.append({u: len(m.rows) for u, m in got.items()})
                return got

            inner.gather = spy
            return inner

        ch.sub = spied
        return await row_sums.server(ch, params)

    faults = [Fault("kill", "site-1", HUB, "MaskedRows")]
    run = run_protocol(row_sums, c, roles={HUB: watching}, faults=faults, timeout=2.0)
    check_no_errors(run)
    assert sent == [{"site-0": 4, "site-2": 5}, {"site-0": 1, "site-2": 2}]


def test_too_few_is_a_named_abort():
    c = case()
    faults = [Fault("kill", u, HUB, "MaskedRows") for u in c.params.sites[:2]]
    run = run_protocol(row_sums, c, faults=faults, timeout=1.0)
    assert {e.code for e in run.errors.values()} == {"too-few"}


async def swaps_keys(ch, params):
    from cloister.mpc.crypto.agreement import key_pair
    from cloister.mpc.crypto.entropy import Entropy

    turn = ch.sub("attempt-0")
    keys = await turn.gather(params.sites, row_sums.Key)
    first = params.sites[0]
    forged = {**keys, first: row_sums.Key(key_pair(Entropy()).public, keys[first].signature)}
    await turn.scatter(params.sites, row_sums.Keys(forged))
    return await turn.gather(params.sites, row_sums.MaskedRows, rows=(None, params.width))


def test_swapped_keys_are_refused():
    c = case()
    run = run_protocol(row_sums, c, roles={HUB: swaps_keys}, timeout=1.0)
    assert {run.errors[u].code for u in c.params.sites} <= {"roster", "signature"}


@pytest.mark.parametrize("bad", [(("a",), (1,)), (("a", "a"), (1, 1)), (("a", "hub"), (1, 1)), (("a", "b"), (1, 0))])
def test_bad_parameters(bad):
    with pytest.raises(ParameterError):
        Params(tuple(map(Party, bad[0])), bad[1], HUB, 2)
