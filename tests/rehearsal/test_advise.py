"""`cl.advise`: what is held out, how ways are compared, what is recommended."""

import json

import numpy as np
import pytest

pytest.importorskip("numba")

import cloister as cl
from cloister.errors import DataError, ParameterError
from cloister.papers.baselines.own_features import chosen_penalty, onto_rows, own_features, own_labels
from cloister.rehearsal import advise
from cloister.rehearsal.advise import RANK, WAYS, Way, advice_from, hidden_kinds, standard_error, weights_of
from cloister.study import Step, Study

PARTIES = {"hub": "coordinator", "basel": "site", "lugano": "site", "vienna": "site"}


def way(name):
    return Way(name, rank=(RANK[name][0],), held_out=200)


def compared(**right):
    """Advice from what ways got right, given as numbers of 200 cells; each errs on other cells."""
    drawn = {name.replace("_", "-"): count for name, count in right.items()}
    rows = {n: np.random.default_rng(i).permutation(200) < count for i, (n, count) in enumerate(drawn.items())}
    return advice_from({n: way(n) for n in rows}, rows, np.ones(200), None, 1000)


def test_the_least_revealing_way_within_the_noise_is_recommended():
    found = compared(alone=100, map_labels=179, train_classifier=180)
    assert (found.best, found.recommended) == ("train-classifier", "map-labels")
    assert not found.alone_is_enough
    assert "reveals less" in found.reason
    assert [w.name for w in found.ways] == ["alone", "map-labels", "train-classifier"]


def test_alone_is_enough_if_it_is_as_good():
    found = compared(alone=179, map_labels=178, train_classifier=180)
    assert found.alone_is_enough
    assert found.reason.startswith("work alone")
    found = compared(alone=180, train_classifier=170)
    assert found.alone_is_enough
    assert "has the highest accuracy" in found.reason


def test_a_way_that_is_behind_by_more_than_the_noise_is_not():
    """One standard error of the difference: of pairs, so that cells that both get right do not count."""
    right = {
        "alone": np.arange(200) < 170,
        "map-labels": np.arange(200) < 178,
        "train-classifier": np.arange(200) < 180,
    }
    found = advice_from({n: way(n) for n in right}, right, np.ones(200), None, 1000)
    assert found.recommended == "train-classifier"
    d = np.array([1.0] * 2 + [0.0] * 198)
    assert found.way("map-labels").error == pytest.approx(d.std() / np.sqrt(200))
    assert found.way("map-labels").behind == pytest.approx(0.01)


def test_donors_are_drawn_and_not_cells():
    d, weights = np.repeat([1.0, 0.0, 0.0, 0.0], 50), np.ones(200)
    of_cells, of_donors = standard_error(d, weights), standard_error(d, weights, np.repeat(list("abcd"), 50))
    assert of_donors == pytest.approx(of_cells * np.sqrt(50))


def test_a_way_that_cannot_run_is_named_and_no_way_is_an_error():
    found = advice_from(
        {"alone": way("alone"), "map-labels": Way("map-labels", problem="too few")}, {"alone": np.ones(200)},
        np.ones(200), None, 1,
    )  # fmt: skip
    assert found.recommended == "alone"
    assert not found.way("map-labels").as_good
    assert "not evaluated: too few" in str(found)
    with pytest.raises(DataError, match="no way could be evaluated"):
        advice_from({"alone": Way("alone", problem="x")}, {}, np.ones(1), None, 1)


def test_every_way_has_a_rank_and_a_reason():
    assert set(WAYS) | {"shared-pca"} == set(RANK)
    assert advise.ranks(("shared-pca", "map-labels"), {}) == (4, 1)
    assert advise.ranks(("fine-tune",), {"dp_noise": 0.0}) == (advise.NOT_NOISY,)
    order = sorted(WAYS, key=lambda w: RANK[w][0])
    assert order[0] == "alone"
    assert order[-1] == "train-classifier"


def test_kinds_are_held_out_where_unlabelled_cells_look_like_those_of_others():
    truth = {
        "basel": np.repeat(np.array(["a", "b", "c", ""], object), 40),
        "lugano": np.repeat(np.array(["b", "c", "d"], object), 40),
    }
    rng = np.random.default_rng(0)
    assert hidden_kinds(truth, {"basel": 0.0, "lugano": 0.0}, rng) == {"basel": (), "lugano": ()}
    found = hidden_kinds(truth, {"basel": 0.5, "lugano": 0.0}, rng)
    assert found["lugano"] == ()
    assert found["basel"] in (("b",), ("c",))  # one stays in common
    weights = weights_of(np.array([True] * 10 + [False] * 30), 0.5)
    assert weights[:10].sum() == pytest.approx(20)
    assert weights.sum() == pytest.approx(40)


def test_own_features_and_penalty_are_chosen_without_the_scored_cells():
    sites = cl.demo_sites()
    x = own_features(sites)
    assert {s: len(v) for s, v in x.items()} == {s: a.n_obs for s, a in sites.items()}
    rng, n = np.random.default_rng(0), 30
    r, names = rng.normal(size=(n, 80)), np.repeat(["a", "b", "c"], 10)
    r[names == "a", 0] += 6
    r[names == "b", 1] += 6
    q, rows = onto_rows(r[:4], r)
    np.testing.assert_allclose(q, rows[:4], atol=1e-9)
    np.testing.assert_allclose(rows @ rows.T, r @ r.T, atol=1e-8)
    assert chosen_penalty(r, names) in (300.0, 30.0, 3.0)
    assert (own_labels(r, r, names) == names).mean() > 0.9
    assert set(own_labels(r, r[:0], names[:0])) == {""}


@pytest.mark.parametrize(
    ("change", "found"),
    [
        ({"held_out": 1.5}, "held_out must be above 0 and below 1"),
        ({"n_cells": -1}, "n_cells must be at least 0"),
        ({"ways": ("alone",)}, "at least two ways"),
        ({"ways": ("alone", "magic")}, "there is no way 'magic'"),
        ({"study": "no-such"}, "there is no study 'no-such'"),
        ({"label_key": "nothing"}, r"adata.obs\['nothing'\] is missing"),
        ({"held_out": 0.01}, "at least 30 are needed"),
        ({"data": {}}, "two sites or more"),
    ],
)
def test_bad_input_is_one_sentence(change, found):
    given = {"study": "map-labels", "data": cl.demo_sites(), **change}
    with pytest.raises((ParameterError, DataError), match=found) as e:
        cl.advise(given.pop("study"), given.pop("data"), **given)
    assert "\n" not in str(e.value)


def test_a_study_without_labels_is_refused():
    study = Study("s", "shared-pca", PARTIES)
    with pytest.raises(ParameterError, match="no step of the study 's' reads labels"):
        cl.advise(study, cl.demo_sites())
    with pytest.raises(ParameterError, match="no cells for 'vienna'"):
        cl.advise(Study("s", "train-classifier", PARTIES), {k: v for k, v in cl.demo_sites().items() if k != "vienna"})


def test_alone_a_classifier_and_a_space_that_is_there():
    """Three ways on the demo's sites; given objects are left as they were."""
    sites = cl.demo_sites()
    before = {s: set(a.obs) for s, a in sites.items()}
    options = {"label_key": "cell_type", "use_rep": "X_pca"}
    study = Study("s", "", PARTIES, steps=(Step("propagate-labels", options=options),))
    found = cl.advise(study, sites, ways=("alone", "train-classifier", "fine-tune"), n_cells=300)
    assert {s: set(a.obs) for s, a in sites.items()} == before
    assert found.held_out >= 100
    assert [w.name for w in found.ways] == ["alone", "fine-tune", "train-classifier"]
    for each in found.ways:
        assert not each.problem, each
        assert each.accuracy > 0.5
        assert each.accuracy == pytest.approx(each.correct / each.held_out)
    assert found.way("alone").bytes == 0
    assert found.way("fine-tune").steps == ("fine-tune",)  # the space was there
    assert found.way("train-classifier").bytes > 100_000
    assert any("mean of each label's cells" in what for _, _, what in found.way("train-classifier").learns)
    plain = json.loads(json.dumps(found.to_dict()))
    assert plain["recommended"] == found.recommended
    assert plain["rule"] in str(found)


def test_sites_that_know_different_kinds():
    """Labels of some kinds are held out as a whole where that is possible, and else alone is not evaluated."""
    sites = cl.demo_sites()
    kinds = sorted(set(sites["basel"].obs["cell_type"].astype(str)))
    for i, a in enumerate(sites.values()):
        known = a.obs["cell_type"].astype(str).isin([k for j, k in enumerate(kinds) if j % 3 != i])
        a.obs["known"] = a.obs["cell_type"].astype(object).where(known)
    found = cl.advise("train-classifier", sites, label_key="known", ways=("alone", "train-classifier"))
    assert max(found.share.values()) > 0.5
    assert any(found.hidden.values())
    assert "look like kinds that only others have labelled" in found.rule
    assert found.recommended == "train-classifier"
    assert "it cannot name them alone" in found.way("alone").problem  # at vienna no kind can be held out
