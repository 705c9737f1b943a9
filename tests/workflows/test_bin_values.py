import json

import numpy as np
import pytest
from anndata import AnnData
from scipy import sparse

from cloister import workflows
from cloister.cells import demo as demo_data
from cloister.cells import tables as cells
from cloister.cells import values as cell_values
from cloister.cells.files import read_cells, write_cells
from cloister.errors import DataError, ParameterError, ProtocolAbort
from cloister.rehearsal.rehearsal import Fault, plan, rehearse, run_parties
from cloister.rehearsal.results import save_run
from cloister.session import Outcome
from cloister.workflows.bin_values.workflow import Options, bin_values, check, coordinator, digitise, spread

NAMES = ("basel", "lugano", "vienna", "bern", "zug")
GENES = 60


def adata(X, genes=None):
    made = AnnData(X)
    made.var_names = list(genes) if genes is not None else [f"G{i}" for i in range(X.shape[1])]
    made.obs_names = [f"c{i}" for i in range(X.shape[0])]
    return made


def counts(n=120, seed=0, depth=1.0, genes=GENES):
    rng = np.random.default_rng(seed)
    rates = rng.lognormal(-0.5, 1.5, genes) * depth
    return rng.poisson(rates, (n, genes)).astype(np.float32)


def log_values(X):
    """Counts per ten thousand, log1p, in single precision: what scanpy leaves, with all its ties."""
    total = np.maximum(X.sum(1, keepdims=True), 1)
    return np.log1p(X / total * 1e4).astype(np.float32)


def count_sites(sizes=(120, 200, 50), form=sparse.csr_matrix):
    return {s: adata(form(counts(n, seed=i, depth=i + 1))) for i, (s, n) in enumerate(zip(NAMES, sizes, strict=False))}


def values_of(x, layer=None):
    return np.concatenate([*cells.nonzero_values(x, layer)])


def dense(M):
    return M.toarray() if sparse.issparse(M) else np.asarray(M)


def pooled_bins(data, n_bins, layer=None, min_count=10):
    """What one would do with all cells in one place: zeros stay 0, others by the quantiles of all non-zero values.

    The outermost quantiles are the `min_count`-th smallest and largest value. Bins are a range: where several edges are
    equal, a value may be in any bin between them.
    """
    everything = np.sort(np.concatenate([values_of(a, layer) for a in data.values()]))
    edges = np.quantile(everything, np.linspace(0, 1, n_bins - 1))
    edges = np.clip(edges, everything[min_count - 1], everything[-min_count])
    bins = {}
    for site, a in data.items():
        X = dense(a.X if layer is None else a.layers[layer]).astype(np.float64)
        last = np.clip(np.digitize(X, edges), 1, n_bins - 1)
        first = np.minimum(np.digitize(X, edges, right=True) + 1, last)
        bins[site] = np.where(X == 0, 0, first), np.where(X == 0, 0, last)
    return edges, bins


def nearly_all(data, n_bins, layer=None):
    """All but four values per edge are in the same bin: what runs of ten values per site cost."""
    return 1 - 4 * n_bins / sum(len(values_of(a, layer)) for a in data.values())


def share_equal(run, bins, key="binned"):
    same = total = 0
    for site, (first, last) in bins.items():
        found = dense(run.data[site].layers[key][:])
        same += int(np.sum((first <= found) & (found <= last) & (last > 0)))
        total += int(np.sum(last > 0))
        assert np.array_equal(found == 0, last == 0)
    return same / total


# ---- hardened: as if all values lay in one place ---------------------------------------------------------------------


@pytest.mark.parametrize("n_bins", [3, 51, 200])
def test_counts_are_binned_as_in_one_place(n_bins):
    data = count_sites()
    run = rehearse("bin-values", data, n_bins=n_bins)
    edges, bins = pooled_bins(data, n_bins)
    assert share_equal(run, bins) >= min(0.999, nearly_all(data, n_bins))
    for site in data:
        found = run.data[site].uns["cloister"]["bin_edges"]
        assert run.results["coordinator"]["bin_edges"] == found.tolist()
        assert (found == edges).sum() >= 0.9 * len(edges) - 1  # numbers that ten values share stay as they are
        np.testing.assert_allclose(found[:-1], edges[:-1], rtol=0.05)


def test_log_values_with_ties_in_single_precision():
    data = {s: adata(sparse.csr_matrix(log_values(counts(n, seed=i, depth=i + 1)))) for i, (s, n) in SIZES}
    run = rehearse("bin-values", data)
    assert share_equal(run, pooled_bins(data, 51)[1]) >= nearly_all(data, 51)


SIZES = list(enumerate(zip(NAMES, (120, 200, 50, 30, 400), strict=True)))


def test_heterogeneous_sites_of_very_different_size():
    """Five log-normal sites of which the largest holds a hundred times the smallest."""
    rng = np.random.default_rng(1)
    data = {}
    for (_, (site, _)), n, mu, sigma in zip(
        SIZES, (20, 60, 300, 1000, 2000), (-1, 2, 0, 0.5, 1), (0.5, 1.5, 1.0, 0.2, 0.8), strict=True
    ):
        X = rng.lognormal(mu, sigma, (n, GENES)).astype(np.float32)
        X[rng.random(X.shape) < 0.6] = 0
        data[site] = adata(sparse.csr_matrix(X))
    run = rehearse("bin-values", data)
    edges, bins = pooled_bins(data, 51)
    assert share_equal(run, bins) >= nearly_all(data, 51)
    np.testing.assert_allclose(run.results["coordinator"]["bin_edges"][1:-1], edges[1:-1], rtol=5e-3)
    published = rehearse("bin-values", data, mode="published")
    assert share_equal(published, bins) < 0.9  # which is why the default is another


def test_the_shipped_cells():
    data = demo_data.demo_sites()
    run = rehearse("bin-values", data)
    assert share_equal(run, pooled_bins(data, 51)[1]) >= 0.999


@pytest.mark.parametrize("donors", [{}, {"donor_key": "donor"}])
@pytest.mark.parametrize("digits", [0, 2])
def test_few_and_many_different_values_are_counted_alike(digits, donors, monkeypatch):
    """From a table of how often each value occurs, and read again; with values of one person held to a range."""
    of = log_values if digits else np.asarray
    data = one_person({s: adata(of(counts(n, seed=i, depth=i + 1))) for i, (s, n) in SIZES[:3]})
    for a in data.values():
        a.X = sparse.csr_matrix(np.round(a.X, digits))
    found = []
    for most in (1 << 16, 3):
        monkeypatch.setattr("cloister.mpc.sums.value_counts.MOST", most)
        assert all((cells.survey(a).table is None) == (most == 3) for a in data.values())
        run = rehearse("bin-values", data, **donors)
        found.append({p: run.results[p] for p in ("coordinator", *data)})
    assert found[0] == found[1]


@pytest.mark.slow
def test_many_values():
    rng = np.random.default_rng(0)
    data = {s: adata(rng.gamma(2, 1 + i, (20_000, 50)).astype(np.float32)) for i, s in enumerate(NAMES[:3])}
    run = rehearse("bin-values", data)
    assert share_equal(run, pooled_bins(data, 51)[1]) >= 0.999


# ---- published: its formula ------------------------------------------------------------------------------------------


def test_published_is_its_formula_to_the_last_bit():
    data = count_sites()
    run = rehearse("bin-values", data, mode="published", n_bins=11)
    top, cells_in_all = np.zeros(10), 0
    for a in data.values():
        top = top + a.n_obs * np.quantile(values_of(a), np.linspace(0, 1, 10))
        cells_in_all += a.n_obs
    edges = top / cells_in_all
    for site, a in data.items():
        np.testing.assert_array_equal(run.data[site].uns["cloister"]["bin_edges"], edges)
        X = dense(a.X)
        last = np.where(X == 0, 0, np.clip(np.digitize(X, edges), 1, 10))
        first = np.minimum(np.digitize(X, edges, right=True) + 1, last)
        found = dense(run.data[site].layers["binned"])
        assert np.all((first <= found) & (found <= last))


# ---- what is written -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", [sparse.csr_matrix, sparse.csc_matrix, np.asarray])
def test_the_layer_is_of_whole_numbers_and_stored_as_the_input(form):
    run = rehearse("bin-values", count_sites(form=form), n_bins=20)
    reference = rehearse("bin-values", count_sites(), n_bins=20)
    for site, a in run.data.items():
        binned = a.layers["binned"]
        assert np.issubdtype(binned.dtype, np.integer)
        assert getattr(binned, "format", None) == getattr(a.X, "format", None)
        assert 0 <= binned.min() <= binned.max() <= 19
        np.testing.assert_array_equal(dense(binned), dense(reference.data[site].layers["binned"]))


def test_explicit_zeros_stay_zero_and_do_not_count():
    data = count_sites()
    stored = {}
    for site, a in data.items():
        X = a.X.copy()
        X.data[::7] = 0
        with_zeros = adata(X)
        assert with_zeros.X.nnz == a.X.nnz  # the zeros are stored
        stored[site] = with_zeros
    run = rehearse("bin-values", stored)
    assert share_equal(run, pooled_bins(stored, 51)[1]) >= 0.999
    for site, a in stored.items():
        assert np.all(dense(run.data[site].layers["binned"])[dense(a.X) == 0] == 0)


def test_cells_on_disk(tmp_path):
    data, backed = count_sites(), {}
    for site, a in data.items():
        write_cells(a, tmp_path / f"{site}.h5ad")
        backed[site] = read_cells(tmp_path / f"{site}.h5ad", backed=True)
    run = rehearse("bin-values", backed)
    assert share_equal(run, pooled_bins(data, 51)[1]) >= 0.999


def test_another_layer_and_another_name():
    data = count_sites()
    for a in data.values():
        a.layers["log"] = sparse.csr_matrix(log_values(dense(a.X)))
    run = rehearse("bin-values", data, layer="log", key_added="bins", n_bins=21)
    bins = pooled_bins(data, 21, "log")[1]
    for a in run.data.values():
        assert "binned" not in a.layers
    assert share_equal(run, bins, "bins") >= nearly_all(data, 21, "log")


def test_uns_survives_a_file(tmp_path):
    run = rehearse("bin-values", count_sites())
    for site, a in run.data.items():
        write_cells(a, tmp_path / f"{site}.h5ad")
        again = read_cells(tmp_path / f"{site}.h5ad")
        assert again.uns["cloister"].keys() == {"bin_edges", "genes_in_common", "bin-values"}
        np.testing.assert_array_equal(again.uns["cloister"]["bin_edges"], a.uns["cloister"]["bin_edges"])
        assert int(again.uns["cloister"]["genes_in_common"]) == GENES
        brief = json.loads(again.uns["cloister"]["bin-values"])
        assert brief["head"] == run.receipts[site].head
        assert brief["parameters"] == {}
        np.testing.assert_array_equal(dense(again.layers["binned"]), dense(a.layers["binned"]))
        assert np.issubdtype(again.layers["binned"].dtype, np.integer)


def test_what_left_a_site_is_masked_and_what_was_written_is_noted():
    run = rehearse("bin-values", count_sites())
    rows = run.receipts["basel"].summary()
    sent = {r["name"] for r in rows if r["kind"] == "sent" and not r["name"].startswith("channel.")}
    assert sent == {
        "common_genes.Measured",
        "same_view.Signature",
        *(f"secure_sum.{n}" for n in ("Keys", "Shares", "MaskedInput", "Vouch", "Unmask")),
    }
    written = {r["name"] for r in rows if r["kind"] == "written"}
    assert {"layers['binned']", "uns['cloister']['bin_edges']"} <= written
    published = rehearse("bin-values", count_sites(), mode="published").receipts["basel"].summary()
    assert "averaged_quantiles.Local" in {r["name"] for r in published}


def test_the_function_works_on_a_seat_and_can_copy():
    data = count_sites()
    study = plan("bin-values", data, options={"n_bins": 9})
    made = {}

    def part(session, a):
        if session.role == "coordinator":
            return coordinator(session, Options(n_bins=9))
        made[session.me] = bin_values(a, session, copy=True)  # n_bins as the study says
        return Outcome()

    run = run_parties(study, dict.fromkeys(study.parties, part), data)
    assert run.errors == {}
    assert not any("binned" in a.layers for a in data.values())
    assert max(a.layers["binned"].max() for a in made.values()) == 8


def test_digitise_by_hand():
    edges = np.array([1.0, 2.0, 2.0, 5.0])
    values = np.array([0.5, 1, 1.9, 2, 4.9, 5, 9])
    np.testing.assert_array_equal(digitise(values, edges, np.full(7, 0.99)), [1, 1, 1, 3, 3, 4, 4])
    np.testing.assert_array_equal(digitise(values, edges, np.zeros(7)), [1, 1, 1, 2, 3, 4, 4])


def test_ties_are_spread_over_their_bins_as_in_scgpt():
    """scGPT draws a bin for a value that equals several edges, between the first and the last of their bins."""
    edges = np.array([1.0, 1.0, 1.0, 1.0, 3.0])
    values = np.repeat([1.0, 2.0, 3.0], 8000)
    found = digitise(values, edges, spread(np.arange(24_000, dtype=np.uint64), 5))
    low, high = np.digitize(values, edges, right=True), np.digitize(values, edges)
    drawn = np.ceil(np.random.default_rng(0).random(len(values)) * (low - high) + high).astype(int)  # its formula
    for value in (1.0, 2.0, 3.0):
        ours, theirs = (np.bincount(x[values == value], minlength=6) for x in (found, drawn))
        np.testing.assert_allclose(ours, theirs, atol=250)
        assert np.array_equal(ours > 0, theirs > 0)


def test_no_edge_is_the_smallest_or_largest_value_of_all():
    """One cell with a value of its own at either end: its values were the outermost edges, and are no edge any more."""
    data = {s: adata(log_values(counts(n, seed=i, depth=i + 1))) for i, (s, n) in SIZES[:3]}
    data["lugano"].X[7, 3], data["lugano"].X[7, 4] = 1234.5, 1.2345e-3
    everything = np.sort(np.concatenate([values_of(a) for a in data.values()]))
    old = np.quantile(everything, [0, 1])
    assert old.tolist() == [np.float32(1.2345e-3), 1234.5]  # what everybody was told
    for k in (10, 25):
        edges = np.array(rehearse("bin-values", data, min_count=k).results["coordinator"]["bin_edges"])
        inner = everything[1:-1]
        assert inner[0] / 2 < edges[0]
        assert edges[-1] < 2 * inner[-1]
        assert not np.isclose(edges[:, None], [1234.5, 1.2345e-3], rtol=1e-3).any()
    with pytest.raises(ParameterError, match="'min_count' must be at least 2"):
        rehearse("bin-values", data, min_count=1)


def one_person(data, site="lugano", cells_of=30):
    """One donor of a site has more values of his own at either end than `min_count` asks for."""
    for a in data.values():
        a.obs["donor"] = [f"d{i % 6}" for i in range(a.n_obs)]
    rows = np.flatnonzero(data[site].obs["donor"] == "d2")[:cells_of]
    X = data[site].X
    X[rows, 3], X[rows, 4] = 1234.5, 1.2345e-3
    return data


@pytest.mark.parametrize("form", [sparse.csr_matrix, sparse.csc_matrix, np.asarray])
def test_no_edge_is_a_value_of_fewer_donors_than_the_floor(form):
    """Counting values, thirty of one person make an edge, which is that person's value; counting donors, none is."""
    data = one_person({s: adata(log_values(counts(n, seed=i, depth=i + 1))) for i, (s, n) in SIZES[:3]})
    for a in data.values():
        a.X = form(a.X)
    counting_cells = rehearse("bin-values", data)
    by_cells = np.array(counting_cells.results["coordinator"]["bin_edges"])
    np.testing.assert_allclose(by_cells[[0, -1]], [1.2345e-3, 1234.5], rtol=1e-5)  # the attack: everybody knows them
    for floor in (2, 3, 6):
        run = rehearse("bin-values", data, donor_key="donor", min_donors=floor)
        edges = np.array(run.results["coordinator"]["bin_edges"])
        assert edges[-1] < 100  # not near that person's values
        assert edges[0] > 0.1
        np.testing.assert_allclose(edges[5:-5], by_cells[5:-5], rtol=0.02)
        top = dense(run.data["lugano"].layers["binned"])[dense(data["lugano"].X) > 1000]
        assert set(top) == {50}  # these values stay in the last bin


def test_values_of_donors_in_published_mode_are_held_to_the_floor_too():
    data = one_person({s: adata(log_values(counts(n, seed=i, depth=i + 1))) for i, (s, n) in SIZES[:3]})
    sent = [rehearse("bin-values", data, mode="published", **more) for more in ({}, {"donor_key": "donor"})]
    tops = [run.results["coordinator"]["bin_edges"][-1] for run in sent]
    assert tops[0] > 100 > tops[1]


def test_a_site_whose_donors_have_no_values_is_refused():
    data = count_sites()
    for a in data.values():
        a.obs["donor"] = np.resize(["a", "b", "c", "d"], a.n_obs)
    silent = data["basel"].obs["donor"].isin(["b", "c", "d"]).to_numpy()
    data["basel"].X = sparse.csr_matrix(dense(data["basel"].X) * ~silent[:, None])
    with pytest.raises(DataError, match="values of 1 donors here, fewer than min_donors = 3"):
        rehearse("bin-values", data, donor_key="donor")


@pytest.mark.parametrize("form", [sparse.csr_matrix, sparse.csc_matrix, np.asarray])
@pytest.mark.parametrize("processes", [False, True])
def test_streamed_from_disk_the_result_is_the_same_and_nothing_is_loaded(form, processes, tmp_path, monkeypatch):
    if processes and form is not sparse.csr_matrix:
        pytest.skip("once is enough")
    data = count_sites(form=form)
    monkeypatch.setitem(cell_values.blocks.__kwdefaults__, "entries", 700)
    paths = {}
    for site, a in data.items():
        a.layers["kept"] = a.X.copy()
        write_cells(a, paths.setdefault(site, tmp_path / f"{site}.h5ad"))
    monkeypatch.setattr("cloister.cells.files.IN_MEMORY", 0)
    run, loaded = rehearse("bin-values", paths, processes=processes), rehearse("bin-values", data)
    save_run(run, tmp_path / "out")
    for site, a in loaded.data.items():
        here = run.data[site]
        assert cells.is_on_disk(here.X)
        back = read_cells(tmp_path / "out" / f"{site}.h5ad")
        for layers in (here.layers, back.layers):
            np.testing.assert_array_equal(dense(layers["binned"][:]), dense(a.layers["binned"]))
            np.testing.assert_array_equal(dense(layers["kept"][:]), dense(a.X))
        assert back.layers["binned"].dtype == a.layers["binned"].dtype
        np.testing.assert_array_equal(back.uns["cloister"]["bin_edges"], a.uns["cloister"]["bin_edges"])
        np.testing.assert_array_equal(dense(back.X), dense(a.X))


# ---- bad input -------------------------------------------------------------------------------------------------------


def broken(change):
    def make(data):
        X = dense(data["lugano"].X).copy()
        change(X)
        return data | {"lugano": adata(X)}

    return make


def set_at(value):
    def change(X):
        X[3, 4] = value

    return change


BAD = {
    "NaN": (broken(set_at(np.nan)), "missing or infinite"),
    "infinite": (broken(set_at(np.inf)), "missing or infinite"),
    "negative": (broken(set_at(-1)), "negative values"),
    "scaled": (broken(lambda X: np.subtract(X, X.mean(0), out=X)), "negative values"),
    "all zero": (broken(lambda X: np.multiply(X, 0, out=X)), "0 non-zero values, fewer than 200"),
    "empty": (lambda d: d | {"lugano": d["lugano"][:0].copy()}, "Expected cells and genes"),
    "too few values": (lambda d: d | {"lugano": d["lugano"][:2].copy()}, "fewer than 200"),
    "duplicate genes": (lambda d: d | {"lugano": adata(d["lugano"].X, ["G"] * GENES)}, "unique"),
    "taken": (lambda d: taken(d), r"uns\['cloister'\] is taken"),
}


def taken(data):
    data["lugano"].uns["cloister"] = "mine"
    return data


@pytest.mark.filterwarnings("ignore:.*names are not unique")
@pytest.mark.parametrize("what", BAD)
def test_bad_cells_are_refused_by_site_and_reason_before_anything_is_sent(what, monkeypatch):
    make, said = BAD[what]
    monkeypatch.setattr("cloister.rehearsal.rehearsal.run_parties", lambda *a, **k: pytest.fail("something was sent"))
    with pytest.raises(DataError, match=f"site 'lugano': .*{said}"):
        rehearse("bin-values", make(count_sites()))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"n_bins": 2}, "'n_bins' must be between 3 and"),
        ({"n_bins": 10**6}, "'n_bins' must be between 3 and"),
        ({"min_values": 0}, "'min_values' must be at least 1"),
        ({"layer": "x", "key_added": "x"}, "'key_added' must name another layer"),
        ({"key_added": ""}, "'key_added' must name"),
    ],
)
def test_bad_options(options, said):
    with pytest.raises(ParameterError, match=said):
        rehearse("bin-values", count_sites(), **options)


def test_no_genes_in_common():
    data = count_sites()
    data["lugano"].var_names = [f"H{i}" for i in range(GENES)]
    with pytest.raises(ProtocolAbort, match="no gene in common") as e:
        rehearse("bin-values", data)
    assert e.value.code == "no-common-genes"


def test_counts_at_one_site_and_log_values_at_another():
    data = count_sites()
    data["lugano"] = adata(log_values(dense(data["lugano"].X)))
    with pytest.raises(ProtocolAbort, match="basel: counts, lugano: log, vienna: counts") as e:
        rehearse("bin-values", data)
    assert e.value.code == "mixed-values"


def test_a_fraction_among_counts_leaves_them_counts():
    """SoupX, alevin and RSEM write such counts; logarithms at one site are still rejected."""
    data = count_sites(sizes=(120, 9000, 50), form=np.asarray)
    data["lugano"].X[4567, 33] = 0.5
    assert len(rehearse("bin-values", data).results["basel"]["bin_edges"]) == 50
    data["lugano"].X = np.log1p(data["lugano"].X)
    with pytest.raises(ProtocolAbort, match="lugano: log"):
        rehearse("bin-values", data)


@pytest.mark.parametrize("value", [1e-9, 1e9])
def test_values_out_of_range_are_refused(value):
    data = {s: adata(log_values(dense(a.X))) for s, a in count_sites().items()}
    data["lugano"].X[0, 0] = value
    with pytest.raises(DataError, match="values must lie between"):
        rehearse("bin-values", data, timeout=20.0)


def test_one_site_is_refused_and_two_are_warned_of():
    data = count_sites()
    with pytest.raises(ParameterError, match="at least 2 sites"):
        rehearse("bin-values", {"basel": data["basel"]})
    two = {s: data[s] for s in ("basel", "lugano")}
    run = rehearse("bin-values", two)
    assert share_equal(run, pooled_bins(two, 51)[1]) == 1.0
    assert any("two sites only" in note for note in workflows.warnings_of(run.study))


def test_check_says_nothing_about_good_cells():
    assert check(count_sites()["basel"], Options()) == []


# ---- a site that drops out -------------------------------------------------------------------------------------------

STEPS = [
    ("Measured", 0),
    ("Keys", 0),
    ("Shares", 0),
    ("MaskedInput", 0),
    ("Vouch", 0),
    ("Unmask", 0),
    ("Keys", 1),
    ("MaskedInput", 1),
    ("Unmask", 1),
]


@pytest.mark.parametrize(("name", "nth"), STEPS)
def test_a_site_that_dies_is_left_out_and_the_others_are_binned(name, nth):
    data = count_sites()
    faults = [Fault("kill", "lugano", "coordinator", name, nth)]
    run = rehearse("bin-values", data, faults=faults, check=False, timeout=1.5)
    assert run.errors == {}
    assert run.data.keys() == {"basel", "vienna"}
    left = {s: a for s, a in data.items() if s != "lugano"}
    counted = data if (name, nth) == ("Unmask", 1) else left  # its input was in when it died
    edges, _ = pooled_bins(counted, 51)
    for a in run.data.values():
        np.testing.assert_allclose(a.uns["cloister"]["bin_edges"], edges, rtol=0.03)


@pytest.mark.parametrize(("name", "code"), [("Measured", "lost"), ("Local", "timeout")])
def test_in_published_mode_a_missing_site_ends_the_run_by_name(name, code):
    faults = [Fault("kill", "lugano", "coordinator", name)]
    run = rehearse("bin-values", count_sites(), mode="published", faults=faults, check=False, timeout=1.5)
    assert run.errors.keys() == {"coordinator", "basel", "vienna"}
    assert {e.code for e in run.errors.values()} == {code}
    assert {e.protocol for e in run.errors.values()} == {"averaged_quantiles"}


def test_a_silent_site_is_told_that_the_others_went_on():
    faults = [Fault("drop", "lugano", "coordinator", "MaskedInput")]
    run = rehearse("bin-values", count_sites(), faults=faults, check=False, timeout=1.5)
    assert {p: e.code for p, e in run.errors.items()} == {"lugano": "dropped"}
