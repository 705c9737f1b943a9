import dataclasses

import anndata as ad
import numpy as np
import pytest

import cloister as cl
from cloister.cells import demo as demo_data
from cloister.errors import DataError, ParameterError, ProtocolAbort
from cloister.models import graph
from cloister.rehearsal.rehearsal import Fault, plan, rehearse
from cloister.workflows import check_plan, get, options_of, warnings_of
from cloister.workflows.propagate_labels import chosen_settings
from cloister.workflows.propagate_labels.workflow import Options, summary, who_computes

SMALL = {"label_key": "some", "use_rep": "X_pca", "bits": 512, "timeout": 30.0}


def hide(sites, share, seed=0, without=()):
    """Keep a share of the labels as `some`; sites in `without` keep none."""
    rng = np.random.default_rng(seed)
    for name, adata in sites.items():
        keep = rng.random(adata.n_obs) < (0 if name in without else share)
        adata.obs["some"] = adata.obs["cell_type"].astype(object).where(keep)
    return sites


@pytest.fixture(scope="module")
def sites():
    few = {
        name: a[np.random.default_rng(1).permutation(a.n_obs)[:70]].copy() for name, a in demo_data.demo_sites().items()
    }
    return hide(few, 0.3, without=["vienna"])


@pytest.fixture(scope="module", params=["hardened", "published"])
def run(request, sites):
    seeds, made = [], graph.hyperplanes
    graph.hyperplanes = lambda seed, *a: (seeds.append(seed), made(seed, *a))[1]
    try:
        found = rehearse("propagate-labels", sites, mode=request.param, **SMALL)
    finally:
        graph.hyperplanes = made
    found.seed = seeds[0]
    return found


def clear(sites, seed, mode, key="some"):
    """The pooled computation, with everything in one place."""
    classes = sorted({x for a in sites.values() for x in a.obs[key].dropna()})
    x = np.vstack([a.obsm["X_pca"] for a in sites.values()])
    y = np.array([classes.index(n) if isinstance(n, str) else -1 for a in sites.values() for n in a.obs[key]])
    owner = np.repeat(np.arange(len(sites)), [a.n_obs for a in sites.values()])
    packed = graph.codes(x.astype(np.float64), graph.hyperplanes(seed, 512, x.shape[1]))
    if mode == "hardened":
        near = graph.split_keys(graph.nearest(packed, Options.n_neighbors), len(y))[0]
        how = graph.Walk.of(Options.n_neighbors, Options.alpha)
        label, level = graph.decide_walk(graph.walk_twice(near, y, len(classes), how))
        return classes, label, graph.level_confidence(label, level, len(classes))
    usual = {name: getattr(Options, name) for name in ("n_neighbors", "alpha", "power", "balance")}
    found = graph.propagate(packed, y, n_classes=len(classes), sites=owner, **usual)
    return classes, found.label, found.confidence


def test_equals_the_pooled_propagation(sites, run):
    classes, label, confidence = clear(dict(sorted(sites.items())), run.seed, run.study.mode)
    at = 0
    for _, adata in sorted(run.data.items()):
        cut = slice(at, at + adata.n_obs)
        at += adata.n_obs
        given = ~adata.obs["some"].isna().to_numpy()
        names = [classes[i] if i >= 0 else None for i in label[cut]]
        wanted = np.where(given, adata.obs["some"], np.array(names, object))
        got = adata.obs["propagated"].astype(object).where(~adata.obs["propagated"].isna(), None)
        np.testing.assert_array_equal(got.to_numpy(), wanted)
        np.testing.assert_array_equal(adata.obs["propagated_confidence"], np.where(given, 1.0, confidence[cut]))


def test_a_site_without_labels_gets_good_ones(run):
    adata = run.data["vienna"]
    known = ~adata.obs["propagated"].isna()
    assert (
        adata.obs["propagated"][known].astype(str) == adata.obs["cell_type"][known].astype(str)
    ).mean() > 0.45  # guessing: 0.35
    assert adata.obs["propagated_confidence"].between(0, 1).all()


def test_it_is_said_who_computes_and_what_left(run):
    assert run.results["basel"]["note"].startswith("basel, lugano and vienna compute")
    told = run.results["vienna"]
    assert told["cells"] == 70
    assert told["labelled"] == 0
    assert sum(told["cells_per_label"].values()) == 70 - told["unreached"]
    assert run.results["coordinator"]["cells"] == 210
    assert "cloister" in run.data["basel"].uns
    assert "propagate-labels" in run.data["basel"].uns["cloister"]
    opened = {e.to for e, _ in run.receipts["coordinator"].entries if e.kind == "opened"}
    assert ("coordinator" in opened) == (run.study.mode == "published")


def test_figures(run):
    pytest.importorskip("matplotlib")
    workflow = get("propagate-labels")
    made = workflow.figures(run.outcomes, options_of(workflow, run.study.parameters))
    assert len(made) == 4
    assert all(f["png"].startswith(b"\x89PNG") for f in made)


def test_two_sites_and_the_coordinator_compute(sites):
    two = {name: sites[name] for name in ("basel", "lugano")}
    found = rehearse("propagate-labels", two, **SMALL)
    assert "coordinator holds no cells and computes because there are only two sites" in found.results["basel"]["note"]
    assert "coordinator" in who_computes(found.study)
    assert [x for x in warnings_of(found.study) if "any two of them together could see codes and labels" in x]
    assert not [x for x in warnings_of(plan("propagate-labels", sites)) if "compute" in x]


@pytest.mark.parametrize("hamming", ["ot", "he"])
def test_other_engines(sites, hamming):
    few = {name: a[:12].copy() for name, a in sites.items()}
    for a in few.values():
        a.obs["some"] = ["one", "two", None] * 4
    options = {**SMALL, "bits": 64, "n_neighbors": 3, "hamming": hamming}
    with pytest.raises(ParameterError, match=f"option 'hamming' is '{hamming}'.*use hamming=mpc, or mode semi-honest"):
        rehearse("propagate-labels", few, **options)
    found = rehearse("propagate-labels", few, mode="published", **options)
    assert set(found.data["basel"].obs["propagated"].dropna()) <= {"one", "two"}


def test_a_site_that_leaves(sites):
    fault = Fault("kill", "basel", None, "verified.Hopped")
    found = rehearse("propagate-labels", sites, faults=[fault], **{**SMALL, "timeout": 3.0})
    assert set(found.data) == {"lugano", "vienna"}
    assert found.results["coordinator"]["sites"] == ["lugano", "vienna"]


def blob(direction, n=12, label=None, d=6, seed=0):
    x = np.random.default_rng(seed).normal(scale=0.01, size=(n, d))
    x[:, direction] += 1
    adata = ad.AnnData(x.copy())
    adata.obsm["X_pca"] = x
    adata.obs["some"] = np.array([label] * n, object)
    return adata


def test_a_component_without_labels_is_counted_in_a_warning():
    data = {"a": blob(0, label="x"), "b": blob(1, label="y"), "c": blob(2)}
    found = rehearse("propagate-labels", data, n_neighbors=3, **SMALL)
    told, obs = found.results["c"], found.data["c"].obs
    assert told["unreached"] == 12
    assert "12 of 12 cells are in parts of the graph without any label" in told["warning"]
    assert obs["propagated"].isna().all()
    assert (obs["propagated_confidence"] == 0).all()


def test_relabel_overrules_a_lonely_label():
    data = {"a": blob(0, label="x"), "b": blob(1, label="y")}
    data["a"].obs.iloc[0, data["a"].obs.columns.get_loc("some")] = "y"
    for relabel, wanted in ((False, "y"), (True, "x")):
        found = rehearse("propagate-labels", data, n_neighbors=3, relabel=relabel, **SMALL)
        assert found.data["a"].obs["propagated"].iloc[0] == wanted


def test_missing_column_means_no_labels():
    data = {"a": blob(0, label="x"), "b": blob(1, label="y"), "c": blob(0, seed=3)}
    del data["c"].obs["some"]
    found = rehearse("propagate-labels", data, n_neighbors=3, **SMALL)
    assert (found.data["c"].obs["propagated"] == "x").all()
    notes = get("propagate-labels").check(data["c"], Options(label_key="some", use_rep="X_pca"))
    assert any("all cells count as unlabelled" in n for n in notes)


# ---- bad input -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "error", "said"),
    [
        (lambda d: d["a"].obsm.update(X_pca=np.ones((12, 5))), ProtocolAbort, "equally wide at all sites"),
        (lambda d: d["a"].obsm.pop("X_pca"), DataError, "site 'a': .*is missing"),
        (lambda d: d["a"].obsm.update(X_pca=np.full((12, 6), np.nan)), DataError, "missing or infinite"),
        (lambda d: [a.obs.pop("some") for a in d.values()], ProtocolAbort, "no site has a label"),
        (lambda d: d["b"].obs.__setitem__("some", "x"), ProtocolAbort, "all labels are the same"),
    ],
)
def test_bad_data(change, error, said):
    data = {"a": blob(0, label="x"), "b": blob(1, label="y")}
    change(data)
    with pytest.raises(error, match=said):
        rehearse("propagate-labels", data, n_neighbors=3, **SMALL)


def test_more_neighbours_than_cells():
    with pytest.raises(ParameterError, match="only 24 points in all; lower n_neighbors="):
        rehearse("propagate-labels", {"a": blob(0, label="x"), "b": blob(1, label="y")}, n_neighbors=24, **SMALL)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"bits": 100}, "option 'bits' must be a multiple of 8"),
        ({"alpha": 1.5}, "option 'alpha'"),
        ({"n_neighbors": 0}, "option 'n_neighbors'"),
        ({"hamming": "none"}, "'hamming' must be one of"),
        ({"classes": ["x"]}, "option 'classes'"),
        ({"key_added": "cell_type"}, "option 'key_added'"),
        ({"groups": 0}, "option 'groups'"),
    ],
)
def test_bad_options(options, said):
    with pytest.raises(ParameterError, match=said):
        check_plan(plan("propagate-labels", ["a", "b"], options=options))


def test_a_label_outside_the_agreed_classes():
    data = {"a": blob(0, label="x"), "b": blob(1, label="y")}
    with pytest.raises(DataError, match="not among the 2 agreed classes"):
        rehearse("propagate-labels", data, classes=("x", "z"), **SMALL)


def test_who_has_all_labels_is_told_that_there_were_none_to_give(sites):
    adata = sites["basel"].copy()
    adata.obs["propagated"] = adata.obs["cell_type"]
    adata.obs["propagated_confidence"] = 1.0
    workflow = get("propagate-labels")
    options = options_of(workflow, {"label_key": "cell_type", "use_rep": "X_pca"})
    assert "already" in summary(adata, options)["warning"]
    assert "warning" not in summary(adata, dataclasses.replace(options, relabel=True))


def test_settings_are_chosen_and_said(sites, monkeypatch):
    monkeypatch.setattr(chosen_settings, "ALPHAS", (0.9,))
    found = rehearse("propagate-labels", sites, mode="semi-honest", choose=True, alpha=0.999, n_neighbors=5, **SMALL)
    result = found.results["basel"]
    assert result["chosen"] == found.results["vienna"]["chosen"]
    assert result["chosen"]["alpha"] in (0.9, 0.999)
    assert result["usual_balanced_accuracy"] <= result["balanced_accuracy"] <= 1
    assert f"balanced accuracy {result['balanced_accuracy']:.3f} on labels left out" in result["choice"]


def test_hardened_chooses_alpha_and_steps_and_opens_no_counts(sites):
    found = rehearse("propagate-labels", sites, choose=True, **SMALL)
    chosen = found.results["basel"]["chosen"]
    assert chosen == found.results["vienna"]["chosen"] == found.results["coordinator"]["chosen"]
    assert chosen["alpha"] in (0.5, 0.9, 0.99)
    assert "balanced_accuracy" not in found.results["basel"]
    assert "labelled" not in found.results["coordinator"]
    for options in ({"balance": True}, {"class_means": 1.0}):
        with pytest.raises(ParameterError, match="leave it out, or use mode semi-honest"):
            rehearse("propagate-labels", sites, **options, **SMALL)


def test_class_means_reach_every_cell_and_are_bounded(sites):
    run = rehearse("propagate-labels", sites, mode="published", class_means=0.5, **SMALL)
    for name, adata in run.data.items():
        assert adata.obs["propagated"].notna().all(), name
        assert (adata.obs["propagated_confidence"] > 0).all()
        given = adata.obs["some"].notna()
        assert (adata.obs["propagated"][given].astype(str) == adata.obs["some"][given].astype(str)).all()
    for bad in ({"class_means": -1.0}, {"class_means": 65.0}, {"class_means_from": 1}):
        with pytest.raises(ParameterError, match="class_means"):
            rehearse("propagate-labels", sites, **{**SMALL, **bad})


def test_baselines(sites):
    table = cl.propagation_baselines(sites, label_key="some", truth_key="cell_type", bits=512)
    assert set(table) == {
        "each site alone", "pooled propagation", "pooled propagation as published", "FedAvg", "pooled 1-NN",
        "pooled 5-NN", "pooled logistic regression",
    }  # fmt: skip
    assert (table["each site alone"]["labels"]["vienna"] == None).all()  # noqa: E711  it has no labels
    assert table["pooled propagation"]["accuracy"] > table["each site alone"]["accuracy"]
    assert all(row["balanced_accuracy"] <= row["accuracy"] for row in table.values())  # rare types are harder
    means = cl.propagation_baselines(sites, label_key="some", truth_key="cell_type", bits=512, class_means=0.5)
    assert (means["pooled propagation"]["labels"]["vienna"] != None).all()  # noqa: E711  a mean reaches every cell
    with pytest.raises(ParameterError, match="two sites"):
        cl.propagation_baselines(dict(list(sites.items())[:1]), label_key="some", truth_key="cell_type")
    with pytest.raises(DataError, match="truth_key="):
        cl.propagation_baselines(sites, label_key="some", truth_key="type")
