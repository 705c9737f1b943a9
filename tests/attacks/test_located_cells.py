"""Labels of crafted points reveal distances to cells of other sites: what mode hardened admits to leak (G6)."""

import numpy as np
import pytest

from cloister.models import graph
from cloister.papers.attacks import propagation as attack
from cloister.study import Party
from cloister.testing import Case, check_no_errors, run_protocol, values
from cloister.workflows.propagate_labels import verified_propagation
from cloister.workflows.propagate_labels.propagation_terms import Params

BITS, K, TYPES = 4096, 5, 5
HUB, SITES = Party("hub"), tuple(map(Party, ("basel", "lugano", "zurich")))


class Others:
    """Cells of the other sites, a third labelled, and what one run of the functionality tells a site about its own."""

    def __init__(self, d, seed, n=300):
        self.rng = np.random.default_rng(seed)
        self.centres = self.rng.normal(size=(TYPES, d)) * 1.5
        self.y = self.rng.integers(0, TYPES, n)
        cells = self.centres[self.y] + self.rng.normal(size=(n, d))
        self.cells = cells / np.linalg.norm(cells, axis=1, keepdims=True)
        self.labels = np.where(self.rng.random(n) < 0.3, self.y, -1)
        self.runs = self.points = 0

    def inside(self, anchors, radii, reach):
        planes = graph.hyperplanes(self.rng.bytes(32), BITS, self.cells.shape[1])
        probes = [attack.probe(a, r, reach, planes, K, self.rng) for a, r in zip(anchors, radii, strict=True)]
        packed = np.concatenate([graph.codes(self.cells, planes), *probes])
        y = np.concatenate([self.labels, np.tile([-1] * K + [TYPES] * (K + 1), len(probes))])
        near = graph.split_keys(graph.nearest(packed, K), len(packed))[0]
        label, _ = graph.decide_walk(graph.walk_twice(near, y, TYPES + 1, graph.Walk.of(K, 0.9)))
        self.runs, self.points = self.runs + 1, self.points + len(packed) - len(self.cells)
        return label[len(self.cells) :: 2 * K + 1] != TYPES


@pytest.mark.parametrize("seed", range(3))
def test_eleven_points_reveal_whether_a_cell_is_near_a_vector(seed):
    """Ten cells of others, and ten vectors at 25 degrees from the nearest cell: is one within 12 degrees?"""
    others = Others(20, seed)
    rng, near = np.random.default_rng(seed), others.cells[:10]
    far = []
    while len(far) < 10:
        v = rng.normal(size=20)
        v /= np.linalg.norm(v)
        if (others.cells @ v).max() < np.cos(np.radians(25)):
            far.append(v)
    found = others.inside([*near, *far], np.full(20, BITS * 12 / 180), BITS * 12 / 180)
    assert others.points == 220
    assert found.tolist() == [True] * 10 + [False] * 10


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_nine_runs_locate_a_cell_of_another_site(seed):
    """20 dimensions, starting at the mean of a type; fewer points than the usual `query_cells`."""
    others = Others(20, seed)
    found = attack.locate(others.inside, others.centres[others.y[0]], BITS, others.rng)
    print(f"cosine {(others.cells @ found).max():.4f}, {others.runs} runs, {others.points} points")
    assert (others.cells @ found).max() > 0.99
    assert others.runs == 9
    assert others.points < 20_000


def test_the_protocol_gives_the_same_answers(monkeypatch):
    """One probe at a cell of another site, one far from all, sent by a site that otherwise follows the protocol."""
    others, k, bits = Others(6, 1, 24), 3, 512
    rng = np.random.default_rng(1)
    far = -others.cells.mean(axis=0)
    anchors, radius = [others.cells[0], far / np.linalg.norm(far)], bits * 10 / 180
    made, inputs = graph.codes, {}
    for i, u in enumerate(SITES[:2]):
        mine = slice(12 * i, 12 * (i + 1))
        inputs[u] = (others.cells[mine], [f"type {c}" for c in others.y[mine]])
    zeros = np.ones((2 * (2 * k + 1), 6))
    inputs[SITES[2]] = (zeros, ([None] * k + ["own"] * (k + 1)) * 2)

    def crafted(vectors, planes):
        if vectors is not zeros:
            return made(vectors, planes)
        return np.concatenate([attack_probe(a, planes) for a in anchors])

    def attack_probe(a, planes):
        monkeypatch.setattr(graph, "codes", made)
        try:
            return attack.probe(a, radius, radius, planes, k, rng)
        finally:
            monkeypatch.setattr(graph, "codes", crafted)

    monkeypatch.setattr(graph, "codes", crafted)
    run = run_protocol(verified_propagation, Case(Params(SITES, HUB, bits=bits, n_neighbors=k), inputs))
    check_no_errors(run)
    found = values(run)[SITES[2]].names
    assert found[0] == f"type {others.y[0]}"
    assert found[2 * k + 1] == "own"
