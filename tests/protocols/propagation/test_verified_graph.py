"""The verified graph: right, as dear as it says, and a liar in any of its steps is caught."""

import sys
from pathlib import Path

import numpy as np
import pytest

from cloister.errors import ProtocolAbort
from cloister.protocols.propagation import private_graph, verified_graph
from cloister.study import Party
from cloister.testing import (
    Case,
    check_cost,
    check_ideal,
    check_no_errors,
    check_vectors,
    check_view,
    run_protocol,
    same_array,
    values,
)

sys.path.insert(0, str(Path(__file__).parents[1]))
from liars import counting, liar, play

HUB = Party("hub")
SITES = tuple(map(Party, ("basel", "lugano", "vienna", "zurich")))
VECTORS = Path(__file__).parents[2] / "vectors" / "verified_graph.json"


def case(sizes=(6, 5, 4), bits=64, seed=0, k=3, engine="mpc"):
    rng = np.random.default_rng(seed)
    sites = SITES[: len(sizes)]
    params = private_graph.Params(sites, tuple(sizes), bits, HUB, k, engine)
    return Case(
        params, {u: (rng.integers(0, 256, (n, bits // 8), np.uint8),) for u, n in zip(sites, sizes, strict=True)}
    )


@pytest.mark.parametrize(
    ("sizes", "engine"),
    [((6, 5, 4), "mpc"), ((9, 7), "mpc"), ((5, 4, 3, 6), "mpc"), ((6, 5, 4), "ot"), ((6, 5), "ot"), ((3, 2, 3), "he")],
)
def test_ideal(sizes, engine):
    check_ideal(verified_graph, [case(sizes, engine=engine)], agree=same_array)


def test_in_blocks_of_rows(monkeypatch):
    monkeypatch.setattr(private_graph, "BLOCK", 40)
    check_ideal(verified_graph, [case()], agree=same_array)


def test_equals_the_semi_honest_graph():
    c = case((20, 30, 25), 256, k=5)
    one, two = (run_protocol(m, c) for m in (private_graph, verified_graph))
    check_no_errors(two)
    np.testing.assert_array_equal(values(one)[HUB], values(two)[HUB])


@pytest.mark.parametrize("sizes", [(9, 8, 7), (9, 8), (6, 5, 4, 3)])
def test_cost(sizes):
    check_cost(verified_graph, case(sizes, 512))


def test_view():
    check_view(verified_graph, case(seed=1), case(seed=2))


def test_vectors():
    check_vectors(verified_graph, case((3, 2, 3)), VECTORS)


def caught(c, party, engine, lied):
    clean, opened = play(verified_graph, c)
    check_no_errors(clean)
    run, seen = play(verified_graph, c, party, engine)
    assert lied
    assert any(isinstance(e, ProtocolAbort) and e.protocol == "verified" for p, e in run.errors.items() if p != party)
    assert HUB not in run.outcomes
    for p in seen:
        if p != party:
            assert all(np.array_equal(a, b) for a, b in zip(seen[p], opened[p], strict=False))


@pytest.mark.parametrize(
    ("sizes", "party", "kind", "at"),
    [
        ((6, 5, 4), "lugano", "product", 0),
        ((6, 5, 4), "basel", "gate", 3),
        ((6, 5, 4), "vienna", "hop", 1),
        ((6, 5), "hub", "gate", 8),  # with two sites the server computes
        ((6, 5), "hub", "product", 0),
        ((6, 5, 4), "basel", "Open", 0),
    ],
)
def test_a_lie_is_caught_before_a_distance_is_opened(sizes, party, kind, at):
    def change(z):
        z.reshape(-1)[0] ^= z.dtype.type(1)

    caught(case(sizes), Party(party), *liar(kind, at, change))


def test_a_wrong_word_of_the_graph_is_caught():
    engine, seen = counting()
    play(verified_graph, case(), Party("vienna"), engine)
    check = liar("Open", seen["Open"] - 1, lambda z: z.__setitem__(-1, z[-1] ^ 1))
    caught(case(), Party("vienna"), *check)


@pytest.mark.parametrize(("sizes", "party"), [((6, 5, 4), "lugano"), ((4, 3, 3, 3), "zurich"), ((6, 5), "basel")])
@pytest.mark.parametrize("value", [2, 1 << 6, -1])
def test_codes_that_are_no_bits_are_caught(sizes, party, value, monkeypatch):
    """Other words than bits would make distances wrap, and the graph a picture of the bits of the others' codes."""
    c = case(sizes)
    unpack = np.unpackbits

    def bent(packed, **options):
        bits = unpack(packed, **options)
        if packed is c.inputs[Party(party)][0]:
            bits = bits.astype(np.int64)
            bits[0, 0] = value
            bits = bits.view(np.uint64)
        return bits

    monkeypatch.setattr(np, "unpackbits", bent)
    run = run_protocol(verified_graph, c, timeout=10.0)
    monkeypatch.undo()
    assert HUB not in run.outcomes
    assert any(isinstance(e, ProtocolAbort) and e.protocol == "verified" for p, e in run.errors.items() if p != party)
    old = run_protocol(private_graph, c, timeout=10.0)
    check_no_errors(old)
