"""The sixth question to the protocols on shares and transfers.

Verified ones end with a right result or a named abort. Semi-honest and published ones, and those that take a server's
last word of a sum until the next step, say under *Assumes*, by letter, which lies they do not notice; and they still
end in time, by name. `benchmarks/lies.py` asks all of them, every lie.
"""

import sys
from pathlib import Path

import numpy as np
import pytest
from knn_cases import ASK, agree
from knn_cases import case as knn_case

from cloister.models import graph
from cloister.papers import label_propagation, plain_knn, published_knn
from cloister.papers.hamming import hamming_mpc, oblivious_transfer, secure_hamming
from cloister.study import Party
from cloister.testing import Case, Lies, check_lies
from cloister.workflows.map_labels import mapping_terms, private_knn, verified_knn
from cloister.workflows.propagate_labels import (
    chosen_settings,
    class_means,
    point_roster,
    private_graph,
    private_propagation,
    shared_scores,
    verified_propagation,
)
from cloister.workflows.propagate_labels.propagation_terms import Params as PropagationParams

HUB = Party("hub")
SITES = tuple(map(Party, ("basel", "lugano", "vienna")))
S, R = Party("sender"), Party("receiver")
KNN = knn_case(m=2, rows=(4, 3), pads=1, k=2)
UNPADDED = knn_case(m=2, rows=(4, 3), pads=0, k=2)


def codes(module, **options):
    rng = np.random.default_rng(0)
    params = module.Params(SITES, (3, 2, 3), 64, HUB, **options)
    return Case(params, {u: (rng.integers(0, 256, (n, 8), np.uint8),) for u, n in zip(SITES, (3, 2, 3), strict=True)})


def scores():
    rng = np.random.default_rng(0)
    labelled = dict(zip(SITES, (1, 1, 0), strict=True))
    rows = {u: rng.integers(0, 1 << 24, (6, n), np.int32) for u, n in labelled.items()}
    inputs = {HUB: (rows,)} | {u: (rng.integers(0, 2, n),) for u, n in labelled.items()}
    return Case(shared_scores.Params(SITES, (2, 2, 2), HUB, 2), inputs)


def points():
    rng = np.random.default_rng(0)
    labels = {"basel": ["one", "two", None], "lugano": [None, "one", None], "vienna": ["two", None, None]}
    inputs = {u: (rng.normal(size=(3, 4)), labels[u]) for u in SITES}
    return Case(PropagationParams(SITES, HUB, bits=64, n_neighbors=2), inputs)


def apart():
    """Two groups of points in opposite directions, a label of each at every site."""
    rng, x = np.random.default_rng(0), np.zeros((4, 4))
    x[:, 0] = [1, -1, 1, -1]
    inputs = {u: (x + 0.01 * rng.normal(size=x.shape), ["one", "two", None, None]) for u in SITES}
    return Case(PropagationParams(SITES, HUB, bits=64, n_neighbors=2), inputs)


def terms():
    def holding(rows, norm, names):
        return mapping_terms.LocalInput(4, rows, mapping_terms.rounded(rows, 0), norm, names)

    given = {ASK: holding(9, 4.1, ()), SITES[0]: holding(70, 0.3, ("a", "b")), SITES[1]: holding(2, 7.9, ("c",))}
    return Case(mapping_terms.Params(HUB, ASK, SITES[:2], (ASK, *SITES[:2]), 3), {p: (h,) for p, h in given.items()})


def transfer():
    rng = np.random.default_rng(0)
    params = oblivious_transfer.Params(S, R, 16, 3, 2)
    delta = rng.integers(0, 1 << 16, (16, 3)).astype(params.dtype)
    return Case(params, {S: (delta,), R: (rng.integers(0, 2, 16).astype(np.uint8),)})


def roster():
    inputs = {u: (n, 4, ("one", "two"), bytes(range(32))) for u, n in zip(SITES, (5, 6, 7), strict=True)}
    return Case(point_roster.Params(SITES, HUB), inputs)


def choice():
    """Four labelled points a site."""
    keys = graph.nearest(np.random.default_rng(0).integers(0, 256, (12, 8), np.uint8), 3)
    own, y, counts = np.split(np.arange(12), 3), np.arange(4) % 2, np.array([6, 6])
    params = chosen_settings.Params(SITES, HUB, 64, chosen_settings.Setting(3, 4.0, 0.5, balance=False), 2)
    inputs = {HUB: (keys, dict(zip(SITES, own, strict=True)), counts)} | {u: (y, counts) for u in SITES}
    return Case(params, inputs)


def means():
    v, y = class_means.directions(np.random.default_rng(0).normal(size=(3, 4))), np.array([0, 1, 1])
    return Case(class_means.Params(SITES, HUB, (3, 6), 4), {u: (v, y, bytes(range(32))) for u in SITES})


# ---- what a right result is ------------------------------------------------------------------------------------------


def right_labels(cases):
    """Only the querier has a result, and its labels are those of its cells if others lie."""

    def right(lie, found):
        if ASK in found and lie.liar != ASK:
            agree(found[ASK], verified_knn.ideal(cases[0].params, cases[0].inputs)[ASK])

    return right


def right_hidden(cases):
    """Two groups of points far apart: under any hyperplanes, every point gets the label of its group."""

    def right(lie, found):
        for u, labels in found.items():
            if u not in (HUB, lie.liar):
                assert [labels.classes[i] for i in labels.label] == ["one", "two", "one", "two"]
                assert (labels.confidence > 0.8).all()

    return right


def right_terms(cases):
    """Right for what the liar may say of itself, or everyone stops."""
    wanted = mapping_terms.ideal(cases[0].params, {p: x[0] for p, x in cases[0].inputs.items()})[HUB]

    def right(lie, found):
        for p, terms in found.items():
            assert terms == wanted or lie.name == "mapping_terms.Announcement", f"{p}: {terms}"
        assert len(set(map(str, found.values()))) <= 1, "the honest parties go on with different terms"

    return right


def right_transfer(cases):
    """What the sender says in O4 is its input; all else is checked or sealed in the group."""
    wanted = oblivious_transfer.ideal(cases[0].params, {p: x[0] for p, x in cases[0].inputs.items()})

    def right(lie, found):
        if lie.name != "oblivious_transfer.Corrections" and {S, R} <= found.keys():
            np.testing.assert_array_equal(found[R] - found[S], wanted[R] - wanted[S])

    return right


def right_roster(cases):
    def right(lie, found):
        honest = [r for p, r in found.items() if p != HUB]
        if lie.letter != "a":  # of the same roster for all; a different one for one of them binds what follows
            assert len({r.sizes for r in honest}) <= 1

    return right


def right_choice(cases):
    """Hits are their site's word and the graph the server's; whatever is chosen, all honest parties go on with it."""

    def right(lie, found):
        assert len(set(map(str, found.values()))) <= 1, {p: c.setting for p, c in found.items()}

    return right


def right_means(cases):
    """A liar's points are its word: they move a sum by at most twice its labels, for all sites alike."""
    params, inputs = cases[0].params, dict(cases[0].inputs)
    honest = class_means.ideal(params, inputs)[SITES[0]]

    def right(lie, found):
        sums = [z for p, z in found.items() if p not in (HUB, lie.liar)]
        for one in sums:
            np.testing.assert_array_equal(one, sums[0])
            assert np.linalg.norm(one - honest, axis=1).max() <= 2 * max(params.counts)

    return right


def anything(cases):
    return lambda lie, found: None


VERIFIED = {
    "verified_knn": (verified_knn, [Case(verified_knn.Params(KNN.params), KNN.inputs)], right_labels, {}),
    "verified_propagation": (verified_propagation, [apart()], right_hidden, {}),
    "mapping_terms": (mapping_terms, [terms()], right_terms, {}),
    "oblivious_transfer": (oblivious_transfer, [transfer()], right_transfer, {}),
    "point_roster": (point_roster, [roster()], right_roster, {}),
}
COMPUTING = {"querier": "abcf", "holder": "abcf", "helper": "abcf"}
SERVED = {"site": "abcf", "server": "abcf"}
SEMI_HONEST = {
    "private_knn": (private_knn, [KNN], anything, COMPUTING),
    "published_knn": (
        published_knn,
        [Case(published_knn.Params(UNPADDED.params), UNPADDED.inputs)],
        anything,
        COMPUTING,
    ),
    "plain_knn": (
        plain_knn,
        [Case(plain_knn.Params(KNN.params, HUB), KNN.inputs)],
        anything,
        {"querier": "abcf", "holder": "abcf", "coordinator": "abcf"},
    ),
    "private_graph": (private_graph, [codes(private_graph, n_neighbors=2)], anything, SERVED),
    "hamming_mpc": (hamming_mpc, [codes(hamming_mpc)], anything, SERVED),
    "secure_hamming": (secure_hamming, [codes(secure_hamming, engine="mpc")], anything, SERVED),
    "shared_scores": (shared_scores, [scores()], anything, SERVED),
    "label_propagation": (label_propagation, [points()], anything, SERVED),
    "private_propagation": (private_propagation, [points()], anything, SERVED),
    "class_means": (class_means, [means()], right_means, {"server": "abcf"}),
    "chosen_settings": (chosen_settings, [choice()], right_choice, {"server": "a"}),
}


def single_bits(*, full=False, count=1000, seed=8, **_):
    """One bit of anything that a party of `verified_knn` computes or says, at random."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "mpc" / "three_party"))
    from test_verified import check_random_lies

    tried = count if full else 12
    harmless = check_random_lies(tried, seed)
    return Lies(tried, tried - harmless, harmless, 0)


QUESTIONS = VERIFIED | SEMI_HONEST | {"verified, single bits": single_bits}
SEALED = {"verified_knn": "abe", "verified_propagation": "ab"}  # what the quick tests ask of them


def ask(name, **options):
    if name == "verified, single bits":
        return single_bits(**options)
    module, cases, right, assumes = QUESTIONS[name]
    return check_lies(module, cases, right=right(cases), assumes=assumes, **options)


@pytest.mark.parametrize("name", VERIFIED)
def test_one_lie_per_kind_of_message(name):
    """Frames are sealed: whatever is changed in one, repeated or moved ends the run."""
    found = ask(name, timeout=1.0, only=lambda lie: lie.letter in SEALED.get(name, "abcdef"))
    assert found.tried >= 4
    assert not found.assumed


@pytest.mark.slow
@pytest.mark.parametrize("name", VERIFIED)
def test_every_lie(name):
    found = ask(name, full=True, timeout=4.0, within=40.0)
    assert found.tried >= 8
    assert not found.assumed


@pytest.mark.slow
@pytest.mark.parametrize("name", SEMI_HONEST)
def test_semi_honest_protocols_say_what_they_do_not_notice(name):
    assert ask(name, full=name == "chosen_settings", timeout=1.0).assumed > 0


@pytest.mark.slow
def test_a_thousand_single_bits():
    assert single_bits(full=True).right < 100
