"""Cases for the protocols of the mapping: blobs of points, one per label, spread over sites."""

import numpy as np

from cloister.study import Party
from cloister.testing import Case
from cloister.workflows.map_labels.private_knn import Params

ASK = Party("ask")
NAMES = tuple(map(Party, ("basel", "lugano", "vienna", "zurich")))
HUB = Party("hub")


def case(m=5, rows=(9, 8), dims=3, labels=3, seed=0, computing=None, pads=2, bound=8.0, repeat=1, **options):
    """Blobs, one per label; `repeat` makes every reference occur several times."""
    rng = np.random.default_rng(seed)
    centres = rng.normal(0, 1.5, (labels, dims))
    sites = NAMES[: len(rows)]

    def draw(n):
        y = rng.integers(0, labels, n)
        return np.clip(centres[y] + rng.normal(0, 0.8, (n, dims)), -4, 4), y

    inputs = {ASK: (draw(m)[0],)}
    for site, n in zip(sites, rows, strict=True):
        x, y = draw(-(-n // repeat))
        inputs[site] = (np.repeat(x, repeat, axis=0)[:n], np.repeat(y, repeat)[:n])
    if computing is None:
        computing = (ASK, *sites)[:3] if len(sites) > 1 else (ASK, *sites, HUB)
    params = Params(
        ASK,
        sites,
        computing,
        m + pads,
        tuple(n + pads for n in rows),
        dims,
        tuple(f"type {i}" for i in range(labels)),
        bound,
        **{"k": 3, **options},
    )
    return Case(params, inputs)


def agree(found, ideal):
    if ideal is None:
        assert found is None
        return
    np.testing.assert_array_equal(found.labels, ideal.labels)
    assert (found.votes is None) == (ideal.votes is None)
    if ideal.votes is not None:
        np.testing.assert_array_equal(found.votes, ideal.votes)
