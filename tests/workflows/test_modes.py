"""What is declared about every mode is true: it runs no protocol that `data/modes.toml` does not name.

Each workflow is rehearsed in each mode here; conftest.py asks the same of every other run under this folder.
"""

import dataclasses
from importlib.util import find_spec

import numpy as np
import pandas as pd
import pytest

from cloister import protocols, workflows
from cloister.mpc.net.receipts import UNDECLARED
from cloister.rehearsal.rehearsal import plan, rehearse, run_parties
from cloister.study import Study
from cloister.workflows.modes import LEAVES, STAYS, Mode

ad = pytest.importorskip("anndata")

SITES = ("basel", "lugano", "vienna")
SLOW = pytest.mark.slow
NEEDS_UMAP = pytest.mark.skipif(find_spec("umap") is None, reason="the extra `map`")


def cells(seed, n=60, genes=6):
    """Counts, an embedding in one space, cell types, donors of two classes."""
    rng = np.random.default_rng(seed)
    kind = np.arange(n) % 2
    a = ad.AnnData(rng.poisson(3 + 2 * kind[:, None], (n, genes)).astype(np.float32))
    a.var_names = [f"G{i}" for i in range(genes)]
    a.obs_names = [f"{seed}-{i}" for i in range(n)]
    a.obsm["X_pca"] = rng.normal(3 * kind[:, None], 1, (n, 4))
    a.obs["cell_type"] = np.where(kind, "T", "B")
    a.obs["donor"] = [f"d{seed}-{i % 8}" for i in range(n)]
    a.obs["condition"] = np.where(kind, "case", "control")
    return a


def sites(names=SITES):
    return {name: cells(i) for i, name in enumerate(names)}


def partly_labelled():
    data = sites()
    for a in data.values():
        a.obs["cell_type"] = pd.Series(a.obs["cell_type"]).where(np.arange(a.n_obs) % 3 == 0)
    return data


def provider(folder):
    pytest.importorskip("torch")
    pytest.importorskip("numba")
    from encoders import tiny

    encoder, _ = tiny(tokens=3, inputs=4, depth=1, taps=(1,), rank=4, exp_degree=2, steps=2, root_steps=3)
    card = {"kind": "images", "height": 2, "width": 4, "channels": 1, "patch": 2, "mean": 0.5, "std": 0.5}
    dataclasses.replace(encoder, card=card).save(folder / "model.npz")
    return {"model": str(folder / "model.npz"), "ring": "small", "timeout": 300.0}


def images(n):
    data = {}
    for i, name in enumerate(("basel", "lugano")):
        rng = np.random.default_rng(i)
        data[name] = ad.AnnData(rng.uniform(0, 1, (n, 8)).astype(np.float32))
        data[name].obs["cell_type"] = ["bright", "dark"] * (n // 2)
    return data


TRAINING = {"n_filters": 2, "n_cells": 20, "n_inputs": 8, "batch": 4, "n_steps": 1, "timeout": 300.0}
XCLP = {"use_rep": "X_pca", "semi_supervised": True, "rounds": 2, "bits": 256, "n_neighbors": 3, "hidden": (4,)}
GRAPH = {"use_rep": "X_pca", "bits": 256, "n_neighbors": 3}
OUTCOME = {"model": "logistic", "outcome_key": "condition", "event": "case", "donor_key": "donor", "min_cells": 5}
OUTCOME |= {"features": ("gene:G0",)}
CASES = [
    ("bin-values", "hardened", {"n_bins": 5}),
    ("bin-values", "published", {"n_bins": 5}),
    ("find-outliers", "hardened", {"trees": 2, "sample": 32}),
    pytest.param("find-outliers", "published", {"trees": 2, "sample": 32, "standardise": True}, marks=SLOW),
    ("quality-control", "hardened", {"doublet_rate": 0.0}),
    ("choose-genes", "hardened", {"n_top_genes": 4}),
    ("shared-pca", "hardened", {"n_components": 2, "n_top_genes": 5}),
    ("integrate", "hardened", {"use_rep": "X_pca", "n_clusters": 3, "rounds": 1, "updates": 1, "sweeps": 2}),
    ("integrate", "published", {"use_rep": "X_pca", "n_clusters": 3, "rounds": 1, "updates": 1, "sweeps": 2}),
    ("cluster-cells", "hardened", {"use_rep": "X_pca", "n_prototypes": 6, "resolution": 0.3}),
    pytest.param("shared-map", "hardened", {"use_rep": "X_pca", "n_prototypes": 6}, marks=NEEDS_UMAP),
    ("find-markers", "hardened", {"label_key": "cell_type", "donor_key": "donor"}),
    ("compare-groups", "hardened", {"groups": ("control", "case"), "donor_key": "donor", "min_cells": 5}),
    ("model-outcome", "hardened", OUTCOME),
    ("find-programs", "hardened", {"donor_key": "donor", "labels": ("B", "T"), "n_programs": 1, "min_cells": 1}),
    ("train-classifier", "hardened", {"n_top_genes": 5, "min_label_cells": 5}),
    ("train-classifier", "semi-honest", {"solver": "logistic", "n_top_genes": 5, "l2": 0.1, "min_label_cells": 5}),
    ("train-classifier", "hardened", {"l2": 0.1, "validation": 0.0, "dp_noise": 1.0, "dp_rounds": 1}),
    ("map-labels", "hardened", {"query": "basel", "use_rep": "X_pca", "n_neighbors": 3}),
    ("map-labels", "hardened", {"query": "basel", "use_rep": "X_pca", "n_neighbors": 3, "known_share": 0.5}),
    ("map-labels", "semi-honest", {"query": "basel", "use_rep": "X_pca", "n_neighbors": 3, "known_share": 0.5}),
    ("map-labels", "published", {"query": "basel", "use_rep": "X_pca", "n_neighbors": 3}),
    ("map-labels", "plain", {"query": "basel", "use_rep": "X_pca", "n_neighbors": 3}),
    *(
        (
            "propagate-labels",
            mode,
            {"use_rep": "X_pca", "bits": 256, "n_neighbors": 3, "hamming": engine, "balance": True},
        )
        for mode in ("semi-honest", "published")
        for engine in ("mpc", "ot", "he")
    ),
    ("propagate-labels", "hardened", {**GRAPH, "choose": True}),
    ("fine-tune", "hardened", XCLP),
    ("fine-tune", "published", XCLP),
    ("train-cellcnn", "plain", {**TRAINING, "hold_out": 3}),
    pytest.param("train-cellcnn", "hardened", {**TRAINING, "open_model": True}, marks=SLOW),
    pytest.param("train-cellcnn", "published", {**TRAINING, "open_model": True}, marks=SLOW),
    pytest.param("predict-cellcnn", "hardened", {"query": "basel"}, marks=SLOW),
    ("adapt-model", "hardened", {"rounds": 1, "labels": ("bright", "dark")}),
    pytest.param("adapt-model", "published", {"rounds": 1}, marks=SLOW),
    ("serve-model", "hardened", {}),
    pytest.param("serve-model", "published", {}, marks=SLOW),
]


def rehearsed(name, mode, options, folder):
    if name in ("adapt-model", "serve-model"):
        options, n = options | provider(folder), 12 if mode == "hardened" else 8  # at least ten train in hardened mode
        adapted = rehearse(
            "adapt-model", images(n), mode=mode, **(options if name == "adapt-model" else options | {"rounds": 1})
        )
        if name == "adapt-model":
            return adapted
        adapted.model.save(folder / "adapter.npz")
        return rehearse(name, images(n), mode=mode, adapter=str(folder / "adapter.npz"), **options)
    if name in ("train-cellcnn", "predict-cellcnn"):
        pytest.importorskip("seal")
    if name == "predict-cellcnn":
        rehearse("train-cellcnn", sites(SITES[:2]), **TRAINING, keep=str(folder))
        return rehearse(name, sites(SITES[:2]), keep=str(folder), timeout=300.0, **options)
    if name == "train-cellcnn":
        data = sites(SITES[:2])
        for a in data.values():
            a.obs["donor"] = [f"d{i % 12}" for i in range(a.n_obs)]  # six of each class
        return rehearse(name, data, mode=mode, keep=str(folder) if mode != "plain" else "", **options)
    data = partly_labelled() if name in ("propagate-labels", "fine-tune") else sites()
    if name == "find-programs":  # donors with cells of both types
        for a in data.values():
            a.obs["donor"] = [f"d{i // 2 % 6}" for i in range(a.n_obs)]
    return rehearse(name, data, mode=mode, timeout=300.0, **options)


@pytest.mark.parametrize(("name", "mode", "options"), CASES)
def test_what_runs_was_declared_and_stands_in_every_receipt(name, mode, options, tmp_path):
    run = rehearsed(name, mode, options, tmp_path)
    declared = workflows.reveals(run.study)
    assert set(declared) <= set(workflows.get(name).mode(mode).protocols)
    ran = {p for receipt in run.receipts.values() for p in receipt.reveals}
    assert ran <= set(declared)
    assert next(iter(declared)) in ran
    for party, receipt in run.receipts.items():
        assert UNDECLARED not in receipt.reveals.values(), party
        assert set(receipt.protocols) <= set(receipt.reveals)
        assert receipt.header["protocols"] == list(declared)
        assert receipt.reveals == {p: protocols.section(p, "Reveals") for p in receipt.reveals}
        assert all(receipt.reveals.values()), f"{party}: a protocol that ran does not say what it reveals"


def test_every_workflow_and_mode_is_rehearsed_here():
    tried = {tuple(getattr(case, "values", case)[:2]) for case in CASES}
    assert tried == {(name, mode) for name in workflows.SHIPPED for mode in workflows.get(name).modes}


def test_every_mode_says_who_learns_what_and_names_protocols_that_exist():
    for name in workflows.SHIPPED:
        for mode, declared in workflows.get(name).modes.items():
            assert declared.learns[0][0] == STAYS, (name, mode)
            assert len(declared.learns) > 1
            assert all(what.endswith(".") and len(what) < 200 for _, what in declared.learns)
            assert all(protocols.section(p, "Reveals") for p in declared.protocols), (name, mode)
            assert set(declared.only_if) <= set(declared.protocols)
            known = {f.name for f in dataclasses.fields(workflows.get(name).options)}
            assert {o.partition("=")[0] for options in declared.only_if.values() for o in options} <= known


def test_where_cells_leave_split_masked_or_encrypted_it_is_said():
    """By the protocols that a mode runs: these take a site's cells in shares, under a mask or under a key."""
    takes = {"replicated", "verified", "encrypted_inference", "permuted_inference", "oblivious_prediction"}
    for name in workflows.SHIPPED:
        for mode, declared in workflows.get(name).modes.items():
            if mode != "plain":  # which says that it shows them
                said = [who for who, _ in declared.learns][1] == LEAVES
                assert said == bool(takes & {*declared.protocols}), (name, mode)


def test_options_narrow_what_may_run():
    mode = Mode(("a", "b", "c"), only_if={"b": ("flag",), "c": ("kind=x", "flag")})
    options = dataclasses.make_dataclass("Options", ["flag", "kind"])
    assert mode.may_run(options(False, "y")) == ("a",)
    assert mode.may_run(options(False, "x")) == ("a", "c")
    assert mode.may_run(options(True, "y")) == ("a", "b", "c")


def test_an_aborted_run_tells_of_the_protocols_until_then():
    from cloister.rehearsal.rehearsal import Fault

    run = rehearse("bin-values", sites(), n_bins=5, timeout=3, faults=[Fault("truncate", name="Common")], check=False)
    assert run.errors
    assert list(run.receipts["basel"].reveals) == ["common_genes"]


def test_a_study_of_a_test_leaves_no_reveals():
    study = Study("n", "none", {"hub": "coordinator", "a": "site", "b": "site"})
    from cloister.session import Outcome

    run = run_parties(study, dict.fromkeys(study.parties, lambda session, adata: Outcome()), {})
    assert all(r.reveals == {} for r in run.receipts.values())


def test_plain_training_says_so_before_it_starts_and_in_its_receipt(caplog):
    run = rehearse("train-cellcnn", sites(), mode="plain", **TRAINING)
    assert "every site's gradient" in caplog.text
    assert "mode 'plain'" in caplog.text
    header, reveals = run.receipts["basel"].header, run.receipts["basel"].reveals
    assert header["mode"] == "plain"
    assert "every site's gradient in every step" in reveals["clear_training"]
    assert "encrypted_training" not in reveals
    with pytest.raises(Exception, match="no option 'encrypted' any more: training in the clear is mode 'plain'"):
        rehearse("train-cellcnn", sites(), encrypted=False, **TRAINING)


def test_a_plan_has_the_servers_that_its_mode_needs():
    assert plan("find-outliers", SITES, mode="published").auxiliaries == ("auxiliary",)
    assert plan("find-outliers", SITES).auxiliaries == ()
