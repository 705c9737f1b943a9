import numpy as np
import pandas as pd
import pytest

import cloister as cl
from cloister.errors import CloisterError, DataError, ParameterError, PeerLost, ProtocolAbort
from cloister.papers.baselines.mapping import linear_label, nearest_label, scores
from cloister.rehearsal.rehearsal import Fault, plan, run_parties
from cloister.session import Outcome, Session
from cloister.workflows.map_labels import mapping_terms, verified_knn, workflow

OPTIONS = {"query": "vienna", "label_key": "cell_type", "use_rep": "X_pca", "n_neighbors": 10}


@pytest.fixture(scope="module")
def sites():
    """A hundred cells of each of the demo's sites."""
    return {name: adata[::4].copy() for name, adata in cl.demo_sites().items()}


@pytest.fixture(scope="module")
def pooled(sites):
    return cl.mapping_baselines(sites, query="vienna", use_rep="X_pca")


def mapped(run, key="mapped"):
    return run.data["vienna"].obs[key].astype(str).to_numpy()


@pytest.mark.parametrize("mode", ["hardened", "plain"])
def test_equals_pooled_nearest_neighbours_where_the_vote_is_clear(sites, pooled, mode):
    run = cl.rehearse("map-labels", data=sites, mode=mode, **OPTIONS)
    clear = ~pooled["pooled k-NN"]["ties"]
    assert clear.mean() > 0.8
    np.testing.assert_array_equal(mapped(run)[clear], pooled["pooled k-NN"]["labels"][clear])
    assert run.results["vienna"]["accuracy"] == pytest.approx((mapped(run) == sites["vienna"].obs["cell_type"]).mean())
    assert "mapped" not in run.data["basel"].obs


def test_published_equals_hardened(sites):
    few = {name: adata[:24].copy() for name, adata in sites.items()}
    found = [mapped(cl.rehearse("map-labels", data=few, mode=m, **OPTIONS)) for m in ("hardened", "published")]
    np.testing.assert_array_equal(*found)


def test_semi_honest_equals_hardened_and_says_what_it_is(sites):
    few = {name: adata[:40].copy() for name, adata in sites.items()}
    runs = {m: cl.rehearse("map-labels", data=few, mode=m, **OPTIONS) for m in ("hardened", "semi-honest")}
    np.testing.assert_array_equal(*map(mapped, runs.values()))
    sent = {m: {e.protocol for e, _ in run.receipts["vienna"].entries if e.kind == "sent"} for m, run in runs.items()}
    assert {"mapping_terms", "verified", "verified_knn"} <= sent["hardened"]
    assert "replicated" not in sent["hardened"]
    assert "replicated" in sent["semi-honest"]


@pytest.mark.slow
def test_processes_give_the_same(sites):
    few = {name: adata[:40].copy() for name, adata in sites.items()}
    one, two = (cl.rehearse("map-labels", data=few, processes=p, share=True, **OPTIONS) for p in (False, True))
    np.testing.assert_array_equal(mapped(one), mapped(two))
    share = two.data["vienna"].obs["mapped_share"]
    assert share.between(0.1, 1.0).all()


def test_two_sites_compute_with_the_coordinator_and_are_told_so(sites):
    two = {name: sites[name] for name in ("basel", "vienna")}
    run = cl.rehearse("map-labels", data=two, share=True, max_distance=1.0, **OPTIONS)
    assert run.results["basel"]["computing"] == ["vienna", "basel", "coordinator"]
    assert "only two sites" in run.results["vienna"]["note"]
    unknown = mapped(run) == "unknown"
    assert unknown.all()  # nothing is that near
    assert (run.data["vienna"].obs["mapped_share"] == 0).all()


@pytest.mark.parametrize("mode", ["hardened", "semi-honest"])
def test_cells_of_a_type_that_no_reference_has_are_unknown(mode):
    """Attack on the labels: without a distance that fits, all of them are called something; with it, nearly none."""
    few = {name: adata[:: 3 if name == "vienna" else 1].copy() for name, adata in cl.demo_sites().items()}
    absent = (few["vienna"].obs["cell_type"] == "endothelial").to_numpy()
    for name in ("basel", "lugano"):
        few[name] = few[name][few[name].obs["cell_type"] != "endothelial"].copy()
    before, after = (
        mapped(cl.rehearse("map-labels", data=few, mode=mode, known_share=s, **OPTIONS)) for s in (0, 0.95)
    )
    assert absent.sum() >= 15
    assert not np.any(before == "unknown")
    assert np.mean(after[absent] == "unknown") > 0.9
    assert np.mean(after[~absent] == "unknown") < 0.1
    np.testing.assert_array_equal(after[after != "unknown"], before[after != "unknown"])


def test_a_distance_is_found_or_given_and_the_user_hears_of_it(sites):
    from cloister.workflows import warnings_of

    with pytest.raises(ParameterError, match="pass one of them"):
        cl.rehearse("map-labels", data=sites, known_share=0.9, max_distance=3.0, **OPTIONS)
    with pytest.raises(ParameterError, match="mode 'plain' does not choose max_distance"):
        cl.rehearse("map-labels", data=sites, mode="plain", known_share=0.9, **OPTIONS)
    told = warnings_of(plan("map-labels", ["basel", "vienna"], options={"query": "vienna"}))
    assert any("known_share" in note for note in told)
    told = warnings_of(plan("map-labels", ["basel", "vienna"], options={"query": "vienna", "known_share": 0.9}))
    assert not any("no reference has" in note for note in told)


def test_query_cells_are_charged_at_every_site_with_references_before_these_are_used(sites, monkeypatch):
    """F7: budgets count cells; what is charged is the announced number, of which no more can be labelled."""
    charged = []
    monkeypatch.setattr(
        Session, "charge_queries", lambda session, who, cells: charged.append((str(session.me), str(who), cells))
    )
    cl.rehearse("map-labels", data=sites, **OPTIONS)
    n = mapping_terms.rounded(sites["vienna"].n_obs)
    assert sorted(charged) == [(p, "vienna", n) for p in sorted(sites) if p != "vienna"]
    used = []

    def refuse(session, who, cells):
        raise ParameterError("the budget is spent")

    monkeypatch.setattr(Session, "charge_queries", refuse)
    monkeypatch.setattr(verified_knn, "holder", lambda *args, **more: used.append(args))
    with pytest.raises(ParameterError, match="the budget is spent"):
        cl.rehearse("map-labels", data=sites, timeout=3.0, **OPTIONS)
    assert not used


def test_who_computes_is_said_before_the_start():
    from cloister.workflows import warnings_of

    (*_, note) = warnings_of(plan("map-labels", ["basel", "vienna"], options={"query": "vienna"}))
    assert "vienna, basel and coordinator compute" in note
    assert "only two sites" in note
    (*_, note) = warnings_of(plan("map-labels", ["basel", "lugano", "vienna"], options={"query": "vienna"}))
    assert "any two of them together could see everything" in note


def test_any_three_and_more_sites(sites):
    four = {**sites, "zurich": sites["basel"][::2].copy()}
    one = cl.rehearse("map-labels", data=four, computing=("coordinator", "zurich", "lugano"), **OPTIONS)
    two = cl.rehearse("map-labels", data=four, mode="plain", **OPTIONS)
    assert one.results["zurich"]["computing"] == ["coordinator", "zurich", "lugano"]
    # zurich repeats cells of basel: the answer is the same in every mode
    np.testing.assert_array_equal(mapped(one), mapped(two))


def test_an_agreed_vocabulary_and_bound_show_less(sites):
    labels = tuple(sorted({c for a in sites.values() for c in a.obs["cell_type"].astype(str)}))
    run = cl.rehearse("map-labels", data=sites, labels=labels, bound=60.0, **OPTIONS)
    base = cl.rehearse("map-labels", data=sites, **OPTIONS)
    np.testing.assert_array_equal(mapped(run), mapped(base))
    opened = {(e.line, e.name) for e, _ in run.receipts["basel"].entries if e.kind == "opened"}
    assert not any("norm" in name for _, name in opened)


def test_cells_without_a_label_are_left_out(sites, pooled):
    changed = {name: adata.copy() for name, adata in sites.items()}
    column = changed["basel"].obs["cell_type"].astype(object)
    column[::2] = None
    changed["basel"].obs["cell_type"] = pd.Categorical(column)
    run = cl.rehearse("map-labels", data=changed, **OPTIONS)
    wanted = cl.mapping_baselines(changed, query="vienna", use_rep="X_pca")["pooled k-NN"]
    np.testing.assert_array_equal(mapped(run)[~wanted["ties"]], wanted["labels"][~wanted["ties"]])


def test_prototypes_are_fewer_and_nearly_as_good(sites):
    whole = cl.rehearse("map-labels", data=sites, n_neighbors=3, query="vienna", use_rep="X_pca")
    few = cl.rehearse("map-labels", data=sites, n_neighbors=3, query="vienna", use_rep="X_pca", prototypes=3)
    assert few.results["vienna"]["accuracy"] > whole.results["vienna"]["accuracy"] - 0.15
    assert sum(c["bytes"] for c in few.cost.values()) < sum(c["bytes"] for c in whole.cost.values())
    x, names = workflow.references(sites["basel"], workflow.Options("vienna", use_rep="X_pca"))
    rows, labels = workflow.metacells(x, names, 3, np.random.default_rng(0))
    assert pd.Series(labels).value_counts().max() == 3
    assert set(labels) == set(names)
    assert len(rows) == len(labels)


def test_functions_at_a_site_and_receipts(sites):
    run = cl.rehearse("map-labels", data=sites, **OPTIONS)
    opened = {(e.protocol, e.line, e.to) for e, _ in run.receipts["vienna"].entries if e.kind == "opened"}
    assert ("verified_knn", "L8", "vienna") in opened
    assert not [x for x in opened if x[0] == "verified_knn" and x[2] != "vienna"]
    run.receipts["vienna"].check()


# ---- baselines -------------------------------------------------------------------------------------------------------


def test_baselines(sites, pooled):
    assert list(pooled) == ["basel alone", "lugano alone", "pooled k-NN", "pooled logistic regression"]
    assert all(0.5 < row["accuracy"] <= 1 and 0.2 < row["macro_f1"] <= 1 for row in pooled.values())
    assert pooled["pooled k-NN"]["accuracy"] >= min(pooled[f"{s} alone"]["accuracy"] for s in ("basel", "lugano"))


def test_the_linear_baseline_leaves_components_their_weight():
    """Components of a PCA whose last ones are noise: scaled to unit variance, as once here, they drown the first."""
    from sklearn.linear_model import LogisticRegression

    rng = np.random.default_rng(1)
    centres = np.zeros((4, 60))
    centres[:, :3] = rng.normal(0, 2, (4, 3))
    noise = np.r_[np.ones(3), np.full(57, 0.05)]
    y, z = rng.integers(0, 4, 80), rng.integers(0, 4, 1000)
    x, q = (centres[k] + rng.normal(0, 1, (len(k), 60)) * noise for k in (y, z))
    ours = np.mean(linear_label(q, x, y) == z)
    assert ours == pytest.approx(LogisticRegression(max_iter=5000).fit(x, y).score(q, z), abs=0.005)
    scaled = linear_label((q - x.mean(0)) / x.std(0), (x - x.mean(0)) / x.std(0), y)
    assert ours > np.mean(scaled == z) + 0.02


def test_baselines_against_scikit_learn():
    from sklearn.linear_model import LogisticRegression
    from sklearn.metrics import f1_score
    from sklearn.neighbors import KNeighborsClassifier

    rng = np.random.default_rng(0)
    centres = rng.normal(0, 1.2, (4, 6))
    y, z = rng.integers(0, 4, 300), rng.integers(0, 4, 200)
    x, q = centres[y] + rng.normal(0, 1, (300, 6)), centres[z] + rng.normal(0, 1, (200, 6))
    names, truth = np.array(list("abcd"))[y], np.array(list("abcd"))[z]
    found, ties = nearest_label(q, x, names, 7)
    wanted = KNeighborsClassifier(7).fit(x, names).predict(q)
    np.testing.assert_array_equal(found[~ties], wanted[~ties])
    model = LogisticRegression(C=1.0, max_iter=2000).fit(x, names)
    assert (linear_label(q, x, names) == model.predict(q)).mean() > 0.99
    assert scores(truth, found)["macro_f1"] == pytest.approx(f1_score(truth, found, average="macro"))


def test_baselines_say_what_they_need(sites):
    with pytest.raises(ParameterError, match="at least one other"):
        cl.mapping_baselines({"vienna": sites["vienna"]}, query="vienna", use_rep="X_pca")
    with pytest.raises(DataError, match="label_key="):
        cl.mapping_baselines(sites, query="vienna", label_key="kind", use_rep="X_pca")


# ---- bad input -------------------------------------------------------------------------------------------------------


def spoil(sites, site, change):
    changed = {name: adata.copy() for name, adata in sites.items()}
    change(changed[site])
    return changed


def narrow(adata):
    adata.obsm["X_pca"] = adata.obsm["X_pca"][:, :5]


def poke(adata):
    adata.obsm["X_pca"] = np.where(np.arange(len(adata.obsm["X_pca"]))[:, None] == 0, np.nan, adata.obsm["X_pca"])


def forget(adata):
    adata.obs["cell_type"] = pd.Categorical([None] * adata.n_obs, categories=["a"])


@pytest.mark.parametrize(
    ("site", "change", "options", "text"),
    [
        ("basel", narrow, {}, "different widths (basel 5, lugano"),
        ("basel", poke, {}, "has missing or infinite values"),
        ("vienna", poke, {}, "has missing or infinite values"),
        ("basel", forget, {}, "holds no label"),
        ("basel", lambda a: None, {"labels": ("T", "AT1")}, "are not among the 2 of the study's vocabulary"),
        ("basel", lambda a: None, {"n_neighbors": 5000}, "n_neighbors=5000 is more than"),
        ("basel", lambda a: None, {"bound": 0.5}, "farther from the origin than bound=0.5"),
        ("basel", lambda a: a.obsm.pop("X_pca"), {}, "is missing; there is"),
        ("basel", lambda a: a.obs.pop("cell_type"), {}, "is missing; there is"),
        ("basel", lambda a: None, {"query": "geneva"}, "'geneva' is not a party of this study"),
        ("basel", lambda a: None, {"query": "coordinator"}, "must name a site"),
        ("basel", lambda a: None, {"query": ""}, "needs the option 'query'"),
        ("basel", lambda a: None, {"computing": ("basel", "basel", "vienna")}, "three different parties"),
        ("basel", lambda a: None, {"computing": ("basel", "nobody", "vienna")}, "'nobody' is not a party"),
        ("basel", lambda a: None, {"precision": 99}, "from 24 to 64"),
        ("basel", lambda a: None, {"labels": ("T", "T")}, "names a label twice"),
        ("basel", lambda a: None, {"mode": "published", "share": True}, "use mode='hardened'"),
    ],
)
def test_bad_input_is_one_clear_sentence(sites, site, change, options, text):
    changed = spoil(sites, site, change)
    with pytest.raises(CloisterError) as caught:
        cl.rehearse("map-labels", data=changed, timeout=5.0, **{**OPTIONS, **options})
    assert text in str(caught.value)
    assert isinstance(caught.value, ProtocolAbort) == (change is narrow)  # which shows only when all have said theirs


def test_a_site_named_twice_is_refused():
    with pytest.raises(ParameterError, match="two parties are called 'basel'"):
        plan("map-labels", ["basel", "basel", "vienna"], options={"query": "vienna"})


def test_a_lost_site_is_named_and_nothing_is_written(sites):
    data = {name: adata.copy() for name, adata in sites.items()}
    run = cl.rehearse(
        "map-labels", data=data, timeout=1.5, check=False, faults=[Fault("kill", "lugano", None, "Hopped")], **OPTIONS
    )
    assert not run.outcomes
    assert isinstance(run.errors["vienna"], PeerLost | ProtocolAbort)
    assert "lugano" in str(run.errors["basel"]) + str(run.errors["vienna"])
    assert all("mapped" not in adata.obs for adata in data.values())
    assert run.receipts["vienna"].status.startswith("aborted")


def test_one_function_serves_the_site_that_asks_and_those_that_offer(sites):
    study = plan("map-labels", sites, options=OPTIONS)
    labelled = {}

    def part(session, adata):
        if session.role != "site":
            return workflow.assist(session, workflow.Options(**OPTIONS))
        labelled[session.me] = cl.map_labels(adata, session, copy=True)
        return Outcome()

    run = run_parties(study, dict.fromkeys(study.parties, part), sites)
    assert run.errors == {}
    assert [site for site, a in labelled.items() if "mapped" in a.obs] == [OPTIONS["query"]]
    assert not any("mapped" in a.obs for a in sites.values())


def test_a_seat_of_another_study_is_refused(sites):
    study = plan("bin-values", sites)

    def part(session, adata):
        cl.map_labels(adata, session)

    run = run_parties(study, dict.fromkeys(study.parties, part), sites)
    assert "this is a study of 'bin-values', not of 'map-labels'" in str(run.errors["basel"])


def test_figures(sites):
    pytest.importorskip("matplotlib")
    run = cl.rehearse("map-labels", data=sites, **OPTIONS)
    drawn = workflow.figures(run.outcomes, workflow.Options(**OPTIONS))
    assert [f["title"] for f in drawn][-1] == "Own against mapped labels"
    assert len(drawn) == 3
    assert all(f["png"][:4] == b"\x89PNG" for f in drawn)
