"""Class means: sums of directions that the sites learn, and the server does not."""

from pathlib import Path

import numpy as np
import pytest

from cloister.errors import ParameterError, ProtocolAbort
from cloister.study import Party
from cloister.testing import (
    Case,
    check_abort,
    check_cost,
    check_ideal,
    check_lies,
    check_no_errors,
    check_vectors,
    check_view,
    run_protocol,
    values,
)
from cloister.workflows.propagate_labels import class_means

HUB, SITES = Party("hub"), tuple(map(Party, ("basel", "lugano", "vienna")))
VECTORS = Path(__file__).parents[2] / "vectors" / "class_means.json"
SECRET = bytes(range(32))


def case(labelled=(3, 0, 4), d=4, classes=3, seed=0, least=2, counts=None):
    rng = np.random.default_rng(seed)
    y = [rng.integers(0, classes, m) if counts is None else np.array(c, int)
         for m, c in zip(labelled, counts or labelled, strict=True)]  # fmt: skip
    v = [class_means.directions(rng.normal(size=(len(k), d))) for k in y]
    found = np.bincount(np.concatenate(y), minlength=classes)
    params = class_means.Params(SITES, HUB, tuple(found.tolist()), d, least)
    return Case(params, {u: (a, b, SECRET) for u, a, b in zip(SITES, v, y, strict=True)})


SAME = ((0, 1, 1), (), (0, 1, 2, 2))  # classes by site


def agree(found, ideal):
    if ideal is None:
        assert found is None
    else:
        np.testing.assert_allclose(found, ideal, atol=1e-6)


def test_ideal():
    check_ideal(class_means, [case(), case((5, 2, 1), 2, 2, seed=1), case(least=3, seed=2)], agree=agree)


def test_view():
    check_view(class_means, case(counts=SAME), case(counts=SAME, seed=5))


def test_vectors():
    check_vectors(class_means, case(counts=SAME), VECTORS)


def test_cost():
    check_cost(class_means, case(counts=SAME))


def test_abort():
    whole = case(counts=SAME)
    right = [class_means.ideal(whole.params, {u: x for u, x in whole.inputs.items() if u != gone})["vienna"]
             for gone in (None, "basel")]  # fmt: skip

    def survived(run):  # the means of all, or of all but the one that is gone
        for party, found in values(run).items():
            assert party == HUB or any(np.allclose(found, r, atol=1e-6) for r in right)

    messages = [("basel", "hub", "secure_sum.MaskedInput")]
    check_abort(class_means, whole, survived=survived, messages=messages)


def test_one_lie():
    whole = case(counts=SAME)
    honest = class_means.ideal(whole.params, dict(whole.inputs))["basel"]

    def right(lie, found):
        """The liar's own points are its word: they move a sum by at most two, and all who finish have the same."""
        sums = [found[u] for u in SITES if u in found and u != lie.liar]
        for one in sums:
            np.testing.assert_array_equal(one, sums[0])
            assert np.linalg.norm(one - honest, axis=1).max() <= 2 * max(whole.params.counts)

    assumed, only = {"server": "abcf"}, {"only": lambda lie: lie.letter in "ab"}
    assert check_lies(class_means, [whole], right=right, assumes=assumed, timeout=1.0, **only).tried > 5


def test_the_server_sees_noise_and_rare_classes_stay_closed():
    """The attack: read the means off the opened sum. It works without the mask, and not with it."""
    one = case(counts=SAME, seed=3)
    seen = []
    real = class_means.secure_sum.aggregator

    async def watched(*args, **options):
        seen.append(await real(*args, **options))
        return seen[-1]

    def cosine(words):
        sums = one.params.code.decode(words).reshape(-1, one.params.width)
        truth = class_means.ideal(one.params, dict(one.inputs))["basel"]
        return abs(float((sums * truth).sum() / np.linalg.norm(sums) / np.linalg.norm(truth)))

    plain = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(class_means.secure_sum, "aggregator", watched)
        for masked in (True, False):
            if not masked:
                patch.setattr(class_means, "expand", lambda key, length: np.zeros(length, np.uint64))
            for _ in range(4 if masked else 1):
                check_no_errors(run_protocol(class_means, one))
            plain.append([cosine(total.z) for total in seen])
            seen.clear()
    assert min(plain[1]) > 0.999
    assert max(plain[0]) < 0.99  # of twelve numbers at random: median 0.2; a new run has a new mask
    assert len(set(plain[0])) == 4
    few = case(counts=((0, 0, 1), (0,), (1, 0, 2)), least=3)  # 4, 2 and 1 labels
    sums = values(run_protocol(class_means, few))["basel"]
    assert np.linalg.norm(sums[0]) > 0
    np.testing.assert_array_equal(sums[1:], 0)


def test_two_labels_show_the_other_point():
    """What `Reveals` says: with one of two labels of a class, a site has the other's direction; with least=3, none."""
    for least, hidden in ((2, False), (3, True)):
        c = case(counts=((0, 1), (), (0, 1, 1)), least=least)
        mine, theirs = c.inputs["basel"][0], c.inputs["vienna"][0]
        rest = values(run_protocol(class_means, c))["basel"][0] - mine[0]
        assert np.allclose(rest, theirs[0], atol=1e-6) is not hidden


def test_closeness_leaves_a_point_out_of_its_own_mean():
    rng = np.random.default_rng(0)
    v, y = class_means.directions(rng.normal(size=(12, 3))), np.arange(12) % 3
    params = class_means.Params(SITES, HUB, (4, 4, 4), 3)
    sums = class_means.sums_of(params, v, y)
    near = class_means.closeness(v, sums, y)
    np.testing.assert_allclose(near.sum(axis=1), 1)
    for i in range(12):
        kept = np.delete(np.arange(12), i)
        wanted = class_means.closeness(v[i : i + 1], class_means.sums_of(params, v[kept], y[kept]))
        np.testing.assert_allclose(near[i], wanted[0])
    sums[1] = 0  # too few labels
    assert not class_means.closeness(v, sums)[:, 1].any()
    assert not class_means.closeness(v, np.zeros((3, 3))).any()


def test_impossible_means_are_refused(monkeypatch):
    one = case(counts=SAME)
    monkeypatch.setattr(class_means, "sums_of", lambda params, v, y: np.full((3, 4), 40.0))
    run = run_protocol(class_means, one)
    assert {e.code for e in run.errors.values() if isinstance(e, ProtocolAbort)} >= {"mismatch"}
    with pytest.raises(ParameterError, match="two labels"):
        class_means.Params(SITES, HUB, (3, 3), 2, least=1)
