"""The sixth question to the semi-honest and published protocols on shares: which lies they do not notice, by letter.

What they say under *Assumes* is all that they may get wrong; and they still end in time, by name.
"""

import sys
from pathlib import Path

import numpy as np
import pytest

from cloister.protocols.hamming import hamming_mpc
from cloister.protocols.knn import plain_knn, private_knn, published_knn
from cloister.protocols.propagation import point_roster, private_graph
from cloister.study import Party
from cloister.testing import Case, check_lies

sys.path.insert(0, str(Path(__file__).parent))
from knn_cases import case as knn_case

HUB = Party("hub")
SITES = tuple(map(Party, ("basel", "lugano", "vienna")))


def codes(module, **options):
    rng = np.random.default_rng(0)
    params = module.Params(SITES, (3, 2, 3), 64, HUB, **options)
    return Case(params, {u: (rng.integers(0, 256, (n, 8), np.uint8),) for u, n in zip(SITES, (3, 2, 3), strict=True)})


KNN = knn_case(m=2, rows=(4, 3), pads=1, k=2)
WHERE = {"querier": "abcf", "holder": "abcf", "helper": "abcf"}
SEMI_HONEST = {
    "private_knn": (private_knn, KNN, WHERE),
    "published_knn": (published_knn, Case(published_knn.Params(KNN.params), KNN.inputs), WHERE),
    "plain_knn": (
        plain_knn,
        Case(plain_knn.Params(KNN.params, HUB), KNN.inputs),
        {"querier": "abcf", "holder": "abcf", "coordinator": "abcf"},
    ),
    "private_graph": (private_graph, codes(private_graph, n_neighbors=2), {"site": "abcf", "server": "abcf"}),
    "hamming_mpc": (hamming_mpc, codes(hamming_mpc), {"site": "abcf", "server": "abcf"}),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", list(SEMI_HONEST))
def test_semi_honest_protocols_say_what_they_do_not_notice(name):
    module, case, assumes = SEMI_HONEST[name]
    lies = check_lies(module, [case], right=lambda lie, found: None, assumes=assumes, timeout=1.0)
    assert lies.assumed > 0


def test_the_roster_is_the_same_for_all():
    """A server that tells sites different rosters is noticed by the transcript; other lies by the seal."""
    inputs = {u: (n, 4, ("one", "two"), bytes(range(32))) for u, n in zip(SITES, (5, 6, 7), strict=True)}

    def right(lie, found):
        honest = [r for p, r in found.items() if p != HUB]
        if lie.letter != "a":  # of the same roster for all; a different one for one of them binds what follows
            assert len({r.sizes for r in honest}) <= 1

    lies = check_lies(point_roster, [Case(point_roster.Params(SITES, HUB), inputs)], right=right, timeout=1.0)
    assert lies.tried >= 4
