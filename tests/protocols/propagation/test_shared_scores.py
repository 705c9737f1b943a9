"""Shared scores: Z = S Y, and labels that the server and one site cannot read."""

import sys
from pathlib import Path

import numpy as np
import pytest

from cloister.errors import ProtocolAbort
from cloister.models import graph
from cloister.protocols.propagation import shared_scores
from cloister.study import Party
from cloister.testing import (
    FRAMING,
    Case,
    check_ideal,
    check_no_errors,
    check_vectors,
    check_view,
    run_protocol,
    same_array,
    transcript,
    values,
)

sys.path.insert(0, str(Path(__file__).parents[1]))
from liars import liar, play

HUB = Party("hub")
SITES = tuple(map(Party, ("basel", "lugano", "vienna", "zurich")))
VECTORS = Path(__file__).parents[2] / "vectors" / "shared_scores.json"


def case(sizes=(6, 5, 4), labelled=(3, 0, 2), classes=3, seed=0, **options):
    rng = np.random.default_rng(seed)
    sites, n = SITES[: len(sizes)], sum(sizes)
    S = {u: rng.integers(0, 1 << 24, (n, m), np.int32) for u, m in zip(sites, labelled, strict=True)}
    y = {u: (rng.integers(0, classes, m),) for u, m in zip(sites, labelled, strict=True)}
    return Case(shared_scores.Params(sites, tuple(sizes), HUB, classes, **options), {HUB: (S,)} | y)


CASES = [
    ((6, 5, 4), (3, 0, 2)),
    ((6, 5), (3, 4)),
    ((3, 2, 2, 4), (2, 2, 0, 17)),
]


@pytest.mark.parametrize("verified", [False, True])
@pytest.mark.parametrize(("sizes", "labelled"), CASES)
def test_ideal(sizes, labelled, verified):
    check_ideal(shared_scores, [case(sizes, labelled, verified=verified)], agree=same_array)


@pytest.mark.parametrize("verified", [False, True])
def test_in_blocks_of_rows(verified, monkeypatch):
    monkeypatch.setattr(shared_scores, "BLOCK", 64)
    check_ideal(shared_scores, [case(verified=verified)], agree=same_array)


@pytest.mark.parametrize("verified", [False, True])
@pytest.mark.parametrize(("sizes", "labelled"), CASES)
def test_cost(sizes, labelled, verified):
    c = case(sizes, labelled, verified=verified)
    run = run_protocol(shared_scores, c)
    check_no_errors(run)
    promised = shared_scores.cost(c.params, dict(zip(c.params.sites, labelled, strict=True)))
    for party, (messages, payload) in promised.items():
        rows = [r for r in transcript(run)[party] if not r[0].startswith("channel.")]
        assert len(rows) == messages, party
        assert payload <= sum(size for *_, size in rows) <= payload + FRAMING * messages


def test_view():
    check_view(shared_scores, case(seed=1), case(seed=2))


def test_vectors():
    check_vectors(shared_scores, case((2, 2, 2), (1, 1, 0), 2), VECTORS)


def shares_of(c, owner, monkeypatch):
    """What every computing party holds of one owner's labels: {party: its two components of three}."""
    held = {}
    for name in ("Trio", "Verified"):
        made = getattr(shared_scores, name)

        class Watching(made):
            async def input(self, who, x, shape, ring, made=made, **more):
                part = await made.input(self, who, x, shape, ring, **more)
                if who == owner and part is not None:
                    held[self.ch.me] = (part.a.copy(), part.b.copy())
                return part

        monkeypatch.setattr(shared_scores, name, Watching)
    check_no_errors(run_protocol(shared_scores, c))
    monkeypatch.undo()
    return held


def check_uniform(seen):
    """Over runs with the same labels: one of the two components is anything, the other 0 by rule or anything."""
    words = np.stack([np.concatenate([w.reshape(-1) for w in parts]) for parts in seen]).astype(np.float64) / 2**32
    varying = words[:, words.std(axis=0) > 0]
    assert varying.shape[1] in (words.shape[1] // 2, words.shape[1])
    assert abs(varying.mean() - 0.5) < 0.07  # seven standard deviations
    assert abs(varying.std() - 12**-0.5) < 0.05


def test_the_server_and_one_site_do_not_read_labels(monkeypatch):
    """S4: the server had every label under a key of every site. Now it and a site hold two shares of three, uniform."""
    seen = []
    for _ in range(10):
        c = case((4, 4, 64), (4, 4, 64), 2, seed=1)
        held = shares_of(Case(unverified(c.params), c.inputs), "vienna", monkeypatch)
        assert HUB not in held
        seen.append(held["lugano"])
    check_uniform(seen)


@pytest.mark.parametrize("verified", [False, True])
def test_with_two_sites_nobody_reads_labels_alone_but_the_server_and_a_site_do(verified, monkeypatch):
    """The server computes as third: no party holds all components, any two do. `Reveals` and a warning say it."""
    c = case((4, 64), (4, 64), 2, seed=1, verified=verified)
    runs = [shares_of(c, "lugano", monkeypatch) for _ in range(10)]
    assert all(set(held) == {"basel", "lugano", HUB} for held in runs)
    check_uniform([held[HUB] for held in runs])
    check_uniform([held["basel"] for held in runs])
    (first, second), (third, again) = runs[0]["basel"], runs[0][HUB]  # x0, x1 and x2, x0
    np.testing.assert_array_equal(first, again)
    labels = graph.one_hot(c.inputs[Party("lugano")][0], 2)
    np.testing.assert_array_equal(first + second + third, labels)


def unverified(params):
    return shared_scores.Params(params.sites, params.sizes, params.server, params.classes, verified=False)


@pytest.mark.parametrize(
    ("party", "kind", "at"), [("basel", "product", 0), ("lugano", "Open", 0), ("vienna", "Gate", 0)]
)
def test_lies_of_a_computing_party_are_caught(party, kind, at):
    def change(z):
        z.reshape(-1)[0] ^= z.dtype.type(1)

    c = case((6, 5, 4, 3), (3, 0, 2, 4))
    engine, lied = liar(kind, at, change)
    run, _ = play(shared_scores, c, Party(party), engine)
    assert lied
    assert any(isinstance(e, ProtocolAbort) and e.protocol == "verified" for p, e in run.errors.items() if p != party)
    wanted = shared_scores.ideal(c.params, {p: x[0] for p, x in c.inputs.items()})
    for p, scores in values(run).items():
        if p not in (party, HUB):
            np.testing.assert_array_equal(scores, wanted[p])


@pytest.mark.parametrize("party", ["basel", "zurich"])
@pytest.mark.parametrize("value", [2, -1, "two"])
def test_labels_that_are_none_are_caught(party, value, monkeypatch):
    """Other rows than zeros with a one would weigh more than a label, or tell a site what it may not know."""
    c = case((6, 5, 4, 3), (3, 2, 2, 4))
    one_hot = graph.one_hot
    mine = c.inputs[Party(party)][0]

    def bent(labels, n_classes):
        rows = one_hot(labels, n_classes)
        if len(labels) == 16 and np.array_equal(labels[: len(mine)], mine) and (labels[len(mine) :] < 0).all():
            rows[0] = 1 if value == "two" else value
        return rows

    monkeypatch.setattr(shared_scores.graph, "one_hot", bent)
    run = run_protocol(shared_scores, c, timeout=10.0)
    assert not {p for p in run.outcomes if p not in (party, HUB)}  # the server only gives
    assert any(isinstance(e, ProtocolAbort) and e.protocol == "verified" for p, e in run.errors.items() if p != party)
