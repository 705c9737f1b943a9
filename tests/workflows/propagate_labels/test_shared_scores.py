"""Shared scores: Z = S Y, and labels that the server and one site cannot read."""

from pathlib import Path

import numpy as np
import pytest

from cloister.models import graph
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
)
from cloister.workflows.propagate_labels import shared_scores

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


@pytest.mark.parametrize(("sizes", "labelled"), CASES)
def test_ideal(sizes, labelled):
    check_ideal(shared_scores, [case(sizes, labelled)], agree=same_array)


def test_in_blocks_of_rows(monkeypatch):
    monkeypatch.setattr(shared_scores, "BLOCK", 64)
    check_ideal(shared_scores, [case()], agree=same_array)


@pytest.mark.parametrize(("sizes", "labelled"), CASES)
def test_cost(sizes, labelled):
    c = case(sizes, labelled)
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
    made = shared_scores.Trio

    class Watching(made):
        async def input(self, who, x, shape, ring, **more):
            part = await made.input(self, who, x, shape, ring, **more)
            if who == owner and part is not None:
                held[self.ch.me] = (part.a.copy(), part.b.copy())
            return part

    monkeypatch.setattr(shared_scores, "Trio", Watching)
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
        held = shares_of(c, "vienna", monkeypatch)
        assert HUB not in held
        seen.append(held["lugano"])
    check_uniform(seen)


def test_with_two_sites_nobody_reads_labels_alone_but_the_server_and_a_site_do(monkeypatch):
    """The server computes as third: no party holds all components, any two do. `Reveals` and a warning say it."""
    c = case((4, 64), (4, 64), 2, seed=1)
    runs = [shares_of(c, "lugano", monkeypatch) for _ in range(10)]
    assert all(set(held) == {"basel", "lugano", HUB} for held in runs)
    check_uniform([held[HUB] for held in runs])
    check_uniform([held["basel"] for held in runs])
    (first, second), (third, again) = runs[0]["basel"], runs[0][HUB]  # x0, x1 and x2, x0
    np.testing.assert_array_equal(first, again)
    labels = graph.one_hot(c.inputs[Party("lugano")][0], 2)
    np.testing.assert_array_equal(first + second + third, labels)
