import io
import json
from pathlib import Path

import anndata as ad
import numpy as np
import pytest
from sklearn.linear_model import LogisticRegression

from cloister.cells import demo as demo_data
from cloister.cells import tables as cells
from cloister.cells.stored import open_stored
from cloister.errors import DataError, ParameterError, ProtocolAbort, RefusedError
from cloister.models.discriminant import SETTINGS, Solver, Statistics
from cloister.models.linear import LinearModel
from cloister.rehearsal.rehearsal import rehearse
from cloister.workflows.common import gene_moments
from cloister.workflows.saved_models import load_model
from cloister.workflows.saved_models.cell_classifier import CellClassifier, majority
from cloister.workflows.train_classifier import pooled_logistic
from cloister.workflows.train_classifier.workflow import Options, check

SIZE = {"n_top_genes": 100}
LOGISTIC = {"solver": "logistic", "mode": "semi-honest", "n_top_genes": 150, "l2": 1e-2}
PRIVATE = {"l2": 1e-2, "validation": 0.0, "dp_noise": 1.0}
OLD_MODEL = Path(__file__).parents[1] / "old_models" / "classifier_v1.npz"  # of solver="logistic", the only one then


@pytest.fixture(scope="module")
def sites():
    """Six types, each with ten cells or more at every site that has it: fewer coefficients, faster tests."""
    out = {}
    for name, a in demo_data.demo_sites().items():
        common = ["macrophage", "endothelial", "T", "AT2", "monocyte", "NK/NKT"]
        counts = a.obs["cell_type"].value_counts()
        out[name] = a[a.obs["cell_type"].isin([k for k in common if counts[k] >= 10])].copy()
    return out


@pytest.fixture(scope="module")
def run(sites):
    return rehearse("train-classifier", sites, **SIZE)


@pytest.fixture(scope="module")
def iterative(sites):
    return rehearse("train-classifier", sites, **LOGISTIC)


def pooled(sites, genes):
    x = ad.concat(list(sites.values())).to_df().astype(np.float64)
    x = np.log1p(1e4 * x.div(x.sum(axis=1), axis=0))[list(genes)].to_numpy()
    y = np.concatenate([a.obs["cell_type"].astype(str) for a in sites.values()])
    return x, y


def fit_pooled(x, y, balance=0.0):
    """scikit-learn at the same penalty; a label with n cells counts n^(1 - balance)."""
    _, at, counts = np.unique(y, return_inverse=True, return_counts=True)
    weights = (counts ** -float(balance))[at]
    oracle = LogisticRegression(C=1 / (LOGISTIC["l2"] * len(y)), tol=1e-10, max_iter=100_000)
    return oracle.fit(x, y, sample_weight=weights * len(y) / weights.sum())


def accuracy(adata, truth, key="predicted"):
    return float(np.mean(adata.obs[key].astype(str).to_numpy() == truth.obs["cell_type"].astype(str).to_numpy()))


def test_logistic_equals_scikit_learn_on_the_pooled_cells(sites, iterative):
    model = iterative.model
    x, y = pooled(sites, model.genes)
    oracle = fit_pooled(x, y)
    assert list(oracle.classes_) == list(model.labels)
    np.testing.assert_allclose(model.model.coefficients.T, oracle.coef_, atol=1e-4)  # the figure
    everyone = np.concatenate([iterative.data[s].obs["predicted"].astype(str) for s in sites])
    assert np.mean(everyone == oracle.predict(x)) > 0.998
    said = iterative.results["coordinator"]
    assert (said["solver"], said["converged"]) == ("logistic", True)
    assert said["openings"] <= 200


@pytest.mark.slow
def test_the_path_chooses_a_penalty_on_held_out_cells(sites):
    run = rehearse("train-classifier", sites, mode="semi-honest", solver="logistic", n_top_genes=100)
    said = run.results["coordinator"]
    assert len(said["path"]) == 7
    assert said["penalty"] in [row[0] for row in said["path"]]
    assert said["converged"]
    assert 0 < said["level"] < 1


def test_logistic_needs_the_consent_of_every_site_and_its_own_mode(sites):
    with pytest.raises(ParameterError, match="solver='logistic' without dp_noise runs in mode 'semi-honest'"):
        rehearse("train-classifier", sites, **{**LOGISTIC, "mode": "hardened"})
    with pytest.raises(ParameterError, match="solver='statistics' runs in mode 'hardened'"):
        rehearse("train-classifier", sites, mode="semi-honest")
    with pytest.raises(RefusedError, match='does not consent to opening gradients .* add "iterative-fit"'):
        pooled_logistic.check_consent(frozenset({"open-model"}))


def test_equals_discriminants_of_the_pooled_cells(sites, run):
    """The model is that of counts, means and second moments of all cells together, up to the rounding of sums."""
    model, chosen = run.model, run.results["coordinator"]["setting"]
    x, y = pooled(sites, model.genes)
    labels, codes = np.unique(y, return_inverse=True)
    assert list(labels) == list(model.labels)
    setting = next(s for s in SETTINGS if s.name == chosen)
    linear = Solver(Statistics.of(x, codes, len(labels))).fit(setting)
    z = x @ linear.coefficients + linear.intercept
    assert np.mean(labels[z.argmax(axis=1)] == labels[model.model.scores(x).argmax(axis=1)]) > 0.99
    assert (
        np.corrcoef(z.ravel(), model.model.scores(x).ravel())[0, 1] > 0.95
    )  # sums are rounded, rare pairs of genes are left out


def test_writes_labels_and_says_how_it_went(sites, run):
    a = run.data["basel"]
    assert accuracy(a, sites["basel"]) > 0.95
    assert a.obs["predicted_confidence"].between(0, 1).all()
    said = json.loads(a.uns["predicted"])
    assert said == {**run.results["coordinator"], **{k: said[k] for k in ("unsure", "too_rare_here")}}
    assert 0 < said["unsure"] < 0.15 * a.n_obs
    assert (said["openings"], said["solver"]) == (5, "statistics")
    assert said["accuracy"] > 0.9
    steps = {f"{SETTINGS[0].name}, 1 logistic step", f"{SETTINGS[0].name}, 2 logistic steps"}
    assert set(said["settings"]) == {s.name for s in SETTINGS} | steps


def test_rare_labels_are_left_out_by_name_at_their_site():
    sites = demo_data.demo_sites()
    run = rehearse("train-classifier", sites, **SIZE)
    for name, a in sites.items():
        counts = a.obs["cell_type"].value_counts()
        assert run.results[name]["too_rare_here"] == {k: n for k, n in counts.items() if 0 < n < 10}
    notes = check(sites["vienna"], Options())
    assert any("left out here, fewer than 10 cells: 'AT1' (6 cells)" in note for note in notes)
    donors = {s: a.copy() for s, a in sites.items()}
    for a in donors.values():
        a.obs["person"] = np.where(a.obs["cell_type"] == "macrophage", "one", np.arange(a.n_obs) % 5)
    notes = check(donors["vienna"], Options(donor_key="person"))
    assert any("fewer than 10 cells or 3 donors" in note and "'macrophage'" in note for note in notes)
    strict = rehearse("train-classifier", donors, donor_key="person", **SIZE)
    assert "macrophage" not in strict.results["coordinator"]["labels"]
    assert "macrophage" in strict.results["basel"]["too_rare_here"]


@pytest.mark.parametrize("missing", ["column", pytest.param("values", marks=pytest.mark.slow)])
def test_a_site_without_labels_gets_labels(sites, missing):
    bare = {s: a.copy() for s, a in sites.items()}
    if missing == "column":
        del bare["vienna"].obs["cell_type"]
    else:
        bare["vienna"].obs["cell_type"] = np.nan
    run = rehearse("train-classifier", bare, **SIZE)
    assert accuracy(run.data["vienna"], sites["vienna"]) > 0.9
    rare = sum(n for s in ("basel", "lugano") for n in run.results[s]["too_rare_here"].values())
    assert run.results["vienna"]["cells"] == sum(sites[s].n_obs for s in ("basel", "lugano")) - rare
    contributed = [e.name for e, _ in run.receipts["vienna"].entries if e.kind == "contributed"]
    assert len(contributed) == 5
    assert not any("cells 1" in name.partition("|")[2] for name in contributed)  # nothing of vienna is behind them


def test_a_model_file_labels_new_cells(sites, run, tmp_path):
    path = run.model.save(tmp_path / "model.npz")
    back = load_model(path)
    assert isinstance(back, CellClassifier)
    assert back.digest == run.model.digest
    assert back.model.origin["sites"] == ["basel", "lugano", "vienna"]
    assert "epsilon" in back.model.origin
    shuffled = sites["vienna"][:, np.random.default_rng(0).permutation(sites["vienna"].n_vars)].copy()
    labels = back.predict(shuffled, unknown=False, key_added="called")
    assert list(labels) == list(run.model.predict(sites["vienna"], unknown=False))
    assert np.mean(labels == run.data["vienna"].obs["predicted"].astype(str)) > 0.97  # there by its own labels, too
    assert {"called", "called_confidence"} <= set(shuffled.obs)


def test_an_old_model_file_still_labels_cells():
    model = load_model(OLD_MODEL)
    assert model.digest == "1c7a7b0e197c0f2698920c6c025c1eb4e40ac92dd4b29f0685b6bd551e862723"
    a = demo_data.demo_sites()["vienna"]
    a = a[a.obs["cell_type"].isin(["T", "AT2"])][:12, :40].copy()
    expected = ["T", "AT2", "T", "AT2", "AT2", "AT2", "T", "AT2", "T", "T", "AT2", "AT2"]
    assert list(model.predict(a)) == expected
    assert list(model.predict(a, adapt=True)) == expected
    assert LinearModel.from_bytes(model.to_bytes(), "here").digest == model.digest


def test_cells_that_are_typical_of_no_label_are_unknown(sites, run):
    model = run.model
    labels = model.predict(sites["vienna"])
    assert 0 < np.mean(labels == "unknown") < 0.12
    noise = sites["vienna"].copy()
    noise.X = np.random.default_rng(0).poisson(0.2, noise.shape).astype(np.float32)
    assert np.mean(model.predict(noise) == "unknown") > 0.8


def test_a_type_that_nobody_trained_on_is_unknown(sites):
    without = {s: a[a.obs["cell_type"] != "endothelial"].copy() for s, a in sites.items()}
    model = rehearse("train-classifier", without, unknown_share=0.05).model
    new = np.concatenate([model.predict(a[a.obs["cell_type"] == "endothelial"].copy()) for a in sites.values()])
    known = np.concatenate([model.predict(a) for a in without.values()])
    assert np.mean(new == "unknown") > 0.4
    assert np.mean(known == "unknown") < 0.08


def test_unsure_cells_of_the_logistic_solver_are_unknown_by_probability(sites, iterative):
    model = iterative.model
    confidence = model.predict_proba(sites["vienna"]).max(axis=1)
    np.testing.assert_array_equal(model.predict(sites["vienna"]) == "unknown", confidence < model.model.level)


def test_cells_that_were_measured_otherwise_are_aligned(sites, run):
    """A site whose counts of some genes are systematically lower: alignment wins back most of what that costs."""
    rng = np.random.default_rng(0)
    biased, model = sites["vienna"].copy(), run.model
    loss = np.where(np.isin(biased.var_names, rng.choice(model.genes, 80, replace=False)), 0.03, 1.0)
    biased.X = rng.binomial(np.asarray(biased.X.todense()).astype(int), loss).astype(np.float32)
    truth = biased.obs["cell_type"].astype(str).to_numpy()
    plain, aligned = (np.mean(model.predict(biased, unknown=False, adapt=a) == truth) for a in (False, True))
    assert aligned > plain + 0.02
    own, same = (np.mean(model.predict(sites["basel"], unknown=False, adapt=a) == sites["basel"].obs["cell_type"])
                 for a in (False, True))  # fmt: skip
    assert same > own - 0.02


def test_clusters_vote(sites, run):
    a = sites["vienna"].copy()
    a.obs["cluster"] = a.obs["cell_type"].astype(str).to_numpy()
    a.obs.iloc[:3, a.obs.columns.get_loc("cluster")] = np.nan
    single = run.model.predict(a, unknown=False)
    voted = run.model.predict(a, majority_over="cluster", unknown=False)
    for cluster in a.obs["cluster"].dropna().unique():
        at = (a.obs["cluster"] == cluster).to_numpy()
        names, counts = np.unique(single[at], return_counts=True)
        assert set(voted[at]) == {names[counts.argmax()]}
    np.testing.assert_array_equal(voted[:3], single[:3])
    assert list(majority(np.array(["b", "a"], dtype=object), a.obs["cluster"].iloc[3:5].replace(".*", "x", regex=True)))
    with pytest.raises(DataError, match="'leiden'] is missing"):
        run.model.predict(a, majority_over="leiden")


def test_other_genes_values_and_files_are_refused_by_name(sites, run, tmp_path):
    a = sites["vienna"]
    with pytest.raises(DataError, match=r"400 of the 600 genes of the model are not here .*, more than 30%"):
        run.model.predict(a[:, ~a.var_names.isin(run.model.model.common[:400])].copy())
    logged = a.copy()
    logged.X = np.log1p(logged.X.toarray() if hasattr(logged.X, "toarray") else logged.X)
    with pytest.raises(DataError, match="trained on counts values, found log values"):
        run.model.predict(logged)
    with pytest.raises(DataError, match="there is no model file"):
        load_model(tmp_path / "none.npz")
    (tmp_path / "rubbish.npz").write_bytes(b"PK rubbish")
    with pytest.raises(DataError, match="not a model file of Cloister"):
        load_model(tmp_path / "rubbish.npz")
    content = run.model.to_bytes()
    changed = LinearModel.from_bytes(content, "here")
    changed.coefficients[0, 0] += 1e-3
    forged = changed.to_bytes()
    with np.load(io.BytesIO(content)) as old, np.load(io.BytesIO(forged)) as new:
        arrays = {name: new[name] for name in new.files if name != "meta"}
        np.savez(tmp_path / "forged.npz", meta=old["meta"], **arrays)
    with pytest.raises(DataError, match="changed after it was written"):
        load_model(tmp_path / "forged.npz")


def test_library_sizes_from_a_column(sites):
    sized = {s: a.copy() for s, a in sites.items()}
    for a in sized.values():
        a.obs["size"] = np.asarray(a.X.sum(axis=1)).ravel() * 2.0
    run = rehearse("train-classifier", sized, library_key="size", **SIZE)
    few = sized["vienna"][:, list(run.model.genes)].copy()  # the other genes are not needed then
    labels = run.model.predict(few, library_key="size", unknown=False)
    assert np.mean(labels == run.data["vienna"].obs["predicted"].astype(str)) > 0.97


def test_an_embedding_and_its_space(sites):
    shared = rehearse("shared-pca", sites, n_top_genes=200, n_components=12).data
    run = rehearse("train-classifier", shared, use_rep="X_shared_pca")
    assert accuracy(run.data["vienna"], sites["vienna"]) > 0.9
    other = rehearse("shared-pca", {s: sites[s] for s in ("basel", "lugano")}, n_top_genes=180, n_components=12).data
    assert run.model.predict(shared["basel"]).shape == (shared["basel"].n_obs,)
    with pytest.raises(DataError, match="comes from another model"):
        run.model.predict(other["basel"])
    mixed = {"basel": other["basel"], "lugano": shared["lugano"], "vienna": shared["vienna"]}
    with pytest.raises(ProtocolAbort, match="basel came with 'X_shared_pca' of another model"):
        rehearse("train-classifier", mixed, use_rep="X_shared_pca")


@pytest.mark.parametrize(("weight", "balance"), [pytest.param("root", 0.5, marks=pytest.mark.slow), ("balanced", 1.0)])
def test_class_weights_favour_rare_labels(sites, weight, balance):
    run = rehearse("train-classifier", sites, class_weight=weight, **LOGISTIC)
    x, y = pooled(sites, run.model.genes)
    oracle = fit_pooled(x, y, balance)
    np.testing.assert_allclose(run.model.model.coefficients.T, oracle.coef_, atol=1e-4)


def test_result_survives_a_file(run, tmp_path):
    cells.write_cells(run.data["lugano"], tmp_path / "a.h5ad")
    back = cells.read_cells(tmp_path / "a.h5ad")
    assert json.loads(back.uns["predicted"])["labels"] == list(run.model.labels)


def test_figures(run):
    pytest.importorskip("matplotlib")
    drawn = run.draw()
    assert not drawn.note
    assert [f.title.partition(",")[0] for f in drawn.figures] == [f"Labels of {s}" for s in run.data]


def test_noise_for_donors_and_what_it_is_worth_in_model_and_receipt(sites, tmp_path):
    held = {s: a.copy() for s, a in sites.items()}
    for a in held.values():
        a.obs["person"] = np.arange(a.n_obs) % 20
    noise = {"use_rep": "X_pca", **PRIVATE, "dp_rounds": 3}
    run = rehearse("train-classifier", held, donor_key="person", **noise)
    private = run.results["vienna"]["privacy"]
    assert private["protects"] == "all cells of one donor, against none"
    assert 5 < private["epsilon"] < 15  # four sums with noise 1: √(2·4·ln 1e5) + 2 and a little
    assert run.model.model.origin["epsilon"] == private["epsilon"]
    assert load_model(run.model.save(tmp_path / "m.npz")).model.origin["epsilon"] == private["epsilon"]
    opened = [e.name for e, _ in run.receipts["basel"].entries if e.kind == "opened" and e.protocol == "noisy_logistic"]
    assert len(opened) == 4
    assert all(f"({private['epsilon']:g}, 1e-05)-private per donor" in name for name in opened)
    assert accuracy(run.data["vienna"], sites["vienna"]) > 0.6
    assert run.results["vienna"]["cells_per_label"] == {}
    with pytest.raises(DataError, match="does not say where its labels lie"):
        run.model.predict(held["vienna"], adapt=True)
    whole = rehearse("train-classifier", held, **noise).results["basel"]["privacy"]
    assert whole["protects"] == "all cells of one site, against none"
    assert whole["epsilon"] < private["epsilon"]  # one sum less


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        ({"validation": 0.2}, ParameterError, "set validation=0"),
        ({"l2": None}, ParameterError, "without held-out cells|pass l2="),
        ({"class_weight": "balanced"}, ParameterError, "class_weight='none'"),
        ({"dp_delta": 1.0}, ParameterError, "dp_delta"),
        ({"donor_key": "nobody"}, DataError, "'nobody'] is missing"),
        ({"use_rep": None}, DataError, "no gene is chosen by its variance"),
    ],
)
def test_bad_input_with_noise(sites, options, kind, message):
    noise = {"use_rep": "X_pca", **PRIVATE, "n_top_genes": 150}
    with pytest.raises(kind, match=message):
        rehearse("train-classifier", sites, **{**noise, **options})


def test_cells_on_disk_give_the_same_model(sites, tmp_path, monkeypatch):
    """Files that stay on disk, read some cells at a time: nowhere is a whole matrix asked for."""
    import cloister.cells.values as values

    for name, a in sites.items():
        cells.write_cells(a, tmp_path / f"{name}.h5ad")
    stored = {name: open_stored(tmp_path / f"{name}.h5ad", None) for name in sites}
    fixed = {**SIZE, "validation": 0.0}  # else counts, which are rounded by chance, choose the setting
    run = rehearse("train-classifier", sites, **fixed)
    monkeypatch.setattr(gene_moments, "BLOCK", 30_000)  # fifty cells
    monkeypatch.setattr(values, "loaded", lambda *_: pytest.fail("the whole matrix was loaded"))
    monkeypatch.setattr(cells, "loaded", lambda *_: pytest.fail("the whole matrix was loaded"))
    read = []
    look = values.Rows.__getitem__
    monkeypatch.setattr(values.Rows, "__getitem__", lambda rows, at: read.append(at.stop - at.start) or look(rows, at))
    again = rehearse("train-classifier", stored, **fixed)
    assert max(read) <= 50
    np.testing.assert_allclose(again.model.model.coefficients, run.model.model.coefficients, atol=1e-9)
    assert list(again.data["vienna"].obs["predicted"]) == list(run.data["vienna"].obs["predicted"])


@pytest.mark.parametrize(
    ("change", "options", "kind", "message"),
    [
        (lambda a: setattr(a, "X", a.X.astype(np.float64) * 0.5), {}, DataError, "expected counts values, found log"),
        (lambda a: None, {"kind": "log"}, DataError, "expected log values, found counts"),
        (lambda a: None, {"library_key": "depth"}, DataError, "'depth'] is missing"),
        (lambda a: None, {"use_rep": "X_none"}, DataError, "'X_none'"),
        (lambda a: None, {"labels": ("T", "AT2")}, DataError, "not in the study's vocabulary"),
        (lambda a: None, {"min_cells": 10_000}, DataError, "fewer than 10000"),
        (lambda a: None, {**LOGISTIC, "l2": None, "validation": 0.0}, ParameterError, "pass l2="),
        (lambda a: None, {"l2": -1.0}, ParameterError, "'l2' must be above 0"),
        (lambda a: None, {"donor_key": "nobody"}, DataError, "'nobody'] is missing"),
        (lambda a: None, {"min_label_cells": 1}, ParameterError, "min_label_cells"),
        (lambda a: None, {"validation": 1.0}, ParameterError, "validation"),
        (lambda a: None, {"n_top_genes": 1}, ParameterError, "n_top_genes"),
        (lambda a: None, {**LOGISTIC, "max_openings": 5}, ParameterError, "openings"),
        (lambda a: a._inplace_subset_obs(np.arange(10)), {}, DataError, "site 'basel'"),
    ],
)
def test_bad_input(sites, change, options, kind, message):
    bad = {p: a.copy() for p, a in sites.items()}
    change(bad["basel"])
    with pytest.raises(kind, match=message):
        rehearse("train-classifier", bad, **{**SIZE, **options})


def test_nobody_has_labels(sites):
    with pytest.raises(ProtocolAbort, match="two are needed"):
        rehearse("train-classifier", sites, label_key="none", **SIZE)
