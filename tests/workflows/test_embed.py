import numpy as np
import pytest

pytest.importorskip("torch")

from cloister.cells import demo as demo_data
from cloister.cells import tables as cells
from cloister.errors import DataError, ParameterError
from cloister.models.scgpt import Config, ScGPT
from cloister.workflows.embed import embed

SMALL = Config(width=32, heads=4, hidden=32, layers=2, max_length=64)


@pytest.fixture(scope="module")
def adata():
    return demo_data.demo_sites()["basel"][:40].copy()


@pytest.fixture(scope="module")
def folder(adata, tmp_path_factory):
    path = tmp_path_factory.mktemp("checkpoint")
    ScGPT.random([*adata.var_names[::2], "OTHER"], SMALL).save(path)
    return path


def test_writes_unit_vectors_and_says_what_made_them(adata, folder):
    out = embed(adata, folder, copy=True)
    assert "X_scGPT" not in adata.obsm
    assert out.obsm["X_scGPT"].shape == (40, 32)
    np.testing.assert_allclose(np.linalg.norm(out.obsm["X_scGPT"], axis=1), 1, atol=1e-6)
    said = out.uns["X_scGPT"]
    assert said["genes_known"] == len(adata.var_names[::2])
    assert said["digest"] == ScGPT.load(folder).digest
    assert said["cls_value"] == -2.0


def test_repeats_and_does_not_depend_on_order_or_batches(adata, folder):
    first = embed(adata, folder, copy=True).obsm["X_scGPT"]
    order = np.random.default_rng(0).permutation(adata.n_obs)
    second = embed(adata[order].copy(), folder, batch_size=7, copy=True).obsm["X_scGPT"]
    np.testing.assert_allclose(first[order], second, atol=1e-6)
    other = embed(adata, folder, seed=1, copy=True).obsm["X_scGPT"]
    assert np.abs(first - other).max() > 1e-4


def test_dense_sparse_and_symbols_in_a_column(adata, folder):
    first = embed(adata, folder, copy=True).obsm["X_scGPT"]
    dense = adata.copy()
    dense.X = np.asarray(dense.X.todense())
    dense.var["symbol"] = dense.var_names
    dense.var_names = [f"ENSG{i:011d}" for i in range(dense.n_vars)]
    second = embed(dense, folder, gene_key="symbol", copy=True).obsm["X_scGPT"]
    np.testing.assert_allclose(first, second, atol=1e-6)
    with pytest.raises(DataError, match="knows 0 of"):
        embed(dense, folder)


def test_shared_bins(adata, folder):
    with_bins = adata.copy()
    with_bins.layers["binned"] = cells.map_values(adata, lambda v, _: np.clip(v, 1, 50), None, np.int32)
    out = embed(with_bins, folder, layer="binned", binning="none", copy=True)
    assert out.uns["X_scGPT"]["binning"] == "none"
    assert np.isfinite(out.obsm["X_scGPT"]).all()


def test_random_weights_only_if_asked_for(adata):
    model = ScGPT.random(list(adata.var_names), SMALL)
    with pytest.raises(ParameterError, match="random weights"):
        embed(adata, model)
    out = embed(adata, model, allow_random=True, copy=True)
    assert out.uns["X_scGPT"]["trained"] is False


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        ({"layer": "raw"}, DataError, "'raw'] is missing"),
        ({"gene_key": "symbol"}, DataError, "'symbol'] is missing"),
        ({"binning": "global"}, ParameterError, "binning"),
        ({"batch_size": 0}, ParameterError, "batch_size"),
        ({"device": "abacus"}, ParameterError, "abacus"),
    ],
)
def test_bad_input(adata, folder, options, kind, message):
    with pytest.raises(kind, match=message):
        embed(adata, folder, **options)


def test_a_symbol_that_stands_twice(adata, folder):
    twice = adata.copy()
    twice.var["symbol"] = [twice.var_names[0]] * 2 + list(twice.var_names[2:])
    with pytest.raises(DataError, match="same gene symbol"):
        embed(twice, folder, gene_key="symbol")


# ---- one space for all -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def spaces():
    """Sites in one shared PCA, but for basel, whose cells lie in another: turned by a run with two of the sites."""
    from cloister.rehearsal.rehearsal import rehearse

    sites = {s: a[:120].copy() for s, a in demo_data.demo_sites().items()}
    one = rehearse("shared-pca", sites, n_top_genes=100, n_components=5).data
    other = rehearse("shared-pca", {s: sites[s] for s in ("basel", "lugano")}, n_top_genes=90, n_components=5).data
    return {**one, "basel": other["basel"]}


@pytest.mark.parametrize(
    ("workflow", "options"),
    [
        ("map-labels", {"query": "vienna", "mode": "plain"}),
        ("propagate-labels", {"bits": 256}),
        ("find-outliers", {"trees": 2, "sample": 32}),
        ("fine-tune", {"rounds": 1, "hidden": (4,)}),
        ("train-classifier", {"l2": 0.1}),
    ],
)
def test_two_spaces_abort_by_name(spaces, workflow, options):
    """Before, cells of two spaces were compared without a word."""
    from cloister.errors import ProtocolAbort
    from cloister.rehearsal.rehearsal import rehearse

    mixed = spaces
    with pytest.raises(ProtocolAbort) as stop:
        rehearse(workflow, mixed, use_rep="X_shared_pca", **options)
    assert "basel" in str(stop.value)
    assert stop.value.code in ("other-space", "mismatch")
