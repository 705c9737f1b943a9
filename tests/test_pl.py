"""`cl.pl`: figures of runs, cells and files; one colour per label; errors that say what exists."""

import subprocess
import sys

import numpy as np
import pandas as pd
import pytest
from anndata import AnnData

import cloister as cl
from cloister.errors import DataError, ParameterError
from cloister.mpc.parties import Party
from cloister.rehearsal.results import save_run
from cloister.report.figures import COLOURS, QUIET, tone
from cloister.study import Study

pytest.importorskip("matplotlib")
from matplotlib.colors import to_hex

GENES = ["CD3E", "MS4A1", "LYZ", "NKG7"]


def site(seed, n=60, kinds=("B", "T", "mono"), shift=0.0):
    rng = np.random.default_rng(seed)
    code = rng.integers(len(kinds), size=n)
    centres = {"B": (0, 8), "T": (8, 0), "mono": (-8, -8), "plasma": (8, 8)}
    points = np.array([centres[kinds[k]] for k in code]) + rng.normal(size=(n, 2)) + shift
    obs = pd.DataFrame(
        {
            "cell_type": pd.Categorical([kinds[k] for k in code]),
            "cluster": pd.Categorical([str(k) for k in code], categories=[str(k) for k in range(12)]),
            "donor": [f"d{seed}-{i % 3}" for i in range(n)],
            "score": rng.random(n),
        },
        index=[f"{seed}-{i}" for i in range(n)],
    )
    a = AnnData(rng.poisson(2.0, (n, 4)).astype(np.float32), obs=obs, var=pd.DataFrame(index=GENES))
    a.obsm["X_shared_pca"], a.obsm["X_integrated"] = points, points - shift
    rows = [
        (k, g, 9.0 - i - j, 0.01, 0.02, 2.0 - i, 0.8, 0.2)
        for i, k in enumerate(("2", "10"))
        for j, g in enumerate(GENES)
    ]
    columns = ["label", "gene", "t", "p", "fdr", "log_fold_change", "fraction", "fraction_rest"]
    a.uns["markers"] = pd.DataFrame(rows, columns=columns)
    rows = [
        (t, "case vs control", g, 1.5 - j, 10.0 ** -(4 - j), [0.01, 0.3][t == "B"])
        for t in "BT"
        for j, g in enumerate(GENES)
    ]
    expression = pd.DataFrame(rows, columns=["cell_type", "contrast", "gene", "log_fold_change", "p", "fdr"])
    a.uns["groups"] = {"expression": expression, "summary": "{}"}
    return a


@pytest.fixture
def data():
    return {"basel": site(1), "lugano": site(2, kinds=("B", "T")), "vienna": site(3, shift=3.0)}


def legend_of(figure):
    """Label → colour, over the legends of all panels."""
    found = {}
    for axis in figure.axes:
        if (legend := axis.get_legend()) is not None:
            for text, handle in zip(legend.get_texts(), legend.legend_handles, strict=True):
                found[text.get_text().strip()] = to_hex(
                    handle.get_facecolor()[0] if np.ndim(handle.get_facecolor()) == 2 else handle.get_facecolor()
                )
    return found


DRAW = {
    "embedding": lambda x, **how: cl.pl.embedding(x, color="cell_type", **how),
    "numbers": lambda x, **how: cl.pl.embedding(x, color="score", **how),
    "by site": lambda x, **how: cl.pl.embedding(x, color="cluster", by_site=True, **how),
    "composition": lambda x, **how: cl.pl.composition(x, "cell_type", by="donor", **how),
    "confusion": lambda x, **how: cl.pl.confusion(x, "cell_type", "cluster", **how),
    "mixing": lambda x, **how: cl.pl.mixing(x, n_neighbors=5, by="donor", **how),
    "violin": lambda x, **how: cl.pl.violin(x, **how),
    "dotplot": lambda x, **how: cl.pl.dotplot(x, **how),
    "volcano": lambda x, **how: cl.pl.volcano(x, **how),
}


@pytest.mark.parametrize("name", DRAW)
@pytest.mark.parametrize("kind", ["png", "svg", "pdf"])
def test_every_figure_is_written_in_three_formats(name, kind, data, tmp_path):
    path = tmp_path / f"figure.{kind}"
    figure = DRAW[name](data, save=path)
    assert path.read_bytes().startswith({"png": b"\x89PNG", "svg": b"<?xml", "pdf": b"%PDF"}[kind])
    assert figure._repr_png_().startswith(b"\x89PNG")  # for a notebook


@pytest.mark.parametrize("name", DRAW)
def test_cells_may_be_a_run_one_site_a_file_or_a_folder(name, data, tmp_path):
    study = Study("three", "cluster-cells", {Party("hub"): "coordinator", **{Party(s): "site" for s in data}})
    run = cl.Run(study, {Party(s): _outcome(a) for s, a in data.items()})
    save_run(run, tmp_path / "results")
    for source in (run, data["basel"], tmp_path / "results" / "basel.h5ad", str(tmp_path / "results")):
        assert DRAW[name](source).axes
    assert DRAW[name]({"basel": tmp_path / "results" / "basel.h5ad"}).axes


def _outcome(adata):
    from cloister.session import Outcome

    return Outcome(adata, {})


def test_a_folder_of_steps_gives_the_cells_of_the_last(data, tmp_path):
    study = Study("three", "cluster-cells", {Party("hub"): "coordinator", **{Party(s): "site" for s in data}})
    for step, mark in (("01-first", "x"), ("02-last", "y")):
        for a in data.values():
            a.obs["mark"] = mark
        save_run(cl.Run(study, {Party(s): _outcome(a) for s, a in data.items()}), tmp_path / step)
    labels = [t.get_text() for t in cl.pl.composition(tmp_path, "mark").axes[0].get_legend().get_texts()]
    assert labels == ["y"]
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="holds no cells of a run"):
        cl.pl.composition(tmp_path / "empty", "mark")


# ---- colours ---------------------------------------------------------------------------------------------------------


def test_a_label_has_one_colour_at_all_sites_and_in_all_figures(data):
    want = {"B": COLOURS[0].lower(), "mono": COLOURS[1].lower(), "T": COLOURS[2].lower()}
    assert {k: v.lower() for k, v in cl.pl.palette(data, "cell_type").items()} == want
    assert legend_of(cl.pl.composition(data, "cell_type")) == want
    assert legend_of(cl.pl.embedding(data, color="cell_type")) == want
    figure = cl.pl.embedding(data, color="cell_type", by_site=True)
    colours = {}
    for axis in figure.axes:
        for drawn in axis.collections:
            if drawn.get_label() in want and len(drawn.get_offsets()):
                colours.setdefault(drawn.get_label(), set()).add(to_hex(drawn.get_facecolor()[0]))
    assert colours == {k: {v} for k, v in want.items()}


def test_a_site_that_lacks_a_type_has_the_colours_of_the_study_with_labels(data):
    whole, alone = cl.pl.palette(data, "cell_type"), cl.pl.palette(data["lugano"], "cell_type")
    assert alone["T"] != whole["T"]  # mono is missing there
    assert cl.pl.palette(data["lugano"], "cell_type", labels=[*whole]) == whole
    some = legend_of(cl.pl.composition(data["lugano"], "cell_type", labels=[*whole]))
    assert some["T"] == whole["T"].lower()
    # common clusters are known at every site, whether it has cells of them or not
    assert cl.pl.palette(data["lugano"], "cluster") == cl.pl.palette(data, "cluster")


def test_labels_are_sorted_as_people_do_and_forty_look_different():
    names = [str(k) for k in range(40)]
    assert cl.pl._sorted(["10", "2", "(none)", "c", "B", "a", "T 12", "T 3", "²", "1a"]) == [
        *("1a", "2", "10", "a", "B", "c", "T 3", "T 12", "²", "(none)"),
    ]
    assert cl.pl._sorted(names[::-1]) == names
    assert len({tone(i) for i in range(100)}) == 100
    assert len({tone(i)[0] for i in range(30)}) == 30


def test_cells_without_a_label_are_grey(data):
    data["basel"].obs["cell_type"] = data["basel"].obs["cell_type"].astype(object).where(np.arange(60) > 20, None)
    assert legend_of(cl.pl.composition(data, "cell_type"))["(none)"] == QUIET


# ---- what the figures say --------------------------------------------------------------------------------------------


def test_composition_draws_shares_of_each_row(data):
    axis = cl.pl.composition(data, "cell_type").axes[0]
    widths = {}
    for group in axis.containers:
        widths[group.get_label()] = [bar.get_width() for bar in group]
    for i, a in enumerate(data.values()):
        share = (a.obs["cell_type"] == "T").mean()
        assert widths["T"][i] == pytest.approx(share)
        assert sum(w[i] for w in widths.values()) == pytest.approx(1.0)
    assert [t.get_text() for t in axis.get_yticklabels()] == ["basel (60)", "lugano (60)", "vienna (60)"]
    assert len(cl.pl.composition(data, "cell_type", by="donor").axes[0].get_yticks()) == 9


def test_confusion_is_a_share_of_rows_on_one_list_of_labels_or_two(data):
    for a in data.values():
        a.obs["mapped"] = a.obs["cell_type"].astype(str).replace({"mono": "plasma"})
    axis = cl.pl.confusion(data, "cell_type", "mapped").axes[0]
    rows, columns = ([t.get_text() for t in ticks()] for ticks in (axis.get_yticklabels, axis.get_xticklabels))
    assert rows == columns == ["B", "mono", "plasma", "T"]
    shares = axis.images[0].get_array()
    assert shares[1, 2] == 1.0
    assert shares[0, 0] == shares[3, 3] == 1.0
    assert not shares[2].any()  # nobody has that label
    other = cl.pl.confusion(data, "cell_type", "cluster").axes[0]
    assert other.images[0].get_array().shape == (3, 3)
    assert [t.get_text() for t in other.get_xticklabels()] == ["0", "1", "2"]


def test_mixing_is_near_zero_where_sites_are_mixed_and_signed_where_they_are_not(data):
    same = {s: site(i, n=300) for i, s in enumerate("abc")}
    mixed = cl.pl.mixing(same, "X_integrated").axes[0].images[0].get_array()
    assert np.abs(mixed).max() < 0.3
    for i, a in enumerate(same.values()):
        a.obsm["X_apart"] = a.obsm["X_integrated"] + 100.0 * i
    apart = cl.pl.mixing(same, "X_apart").axes[0].images[0].get_array()
    assert np.allclose(np.diag(apart), np.log2(3), atol=1e-6)
    assert apart[~np.eye(3, dtype=bool)].max() < -5
    # cells that lie at one point are neighbours of each other, and never of themselves
    for a in same.values():
        a.obsm["X_flat"] = np.zeros((300, 2))
    assert np.isfinite(cl.pl.mixing(same, "X_flat").axes[0].images[0].get_array()).all()


def test_violins_use_obs_and_count_where_it_has_nothing(data):
    first = cl.pl.violin(data, "total_counts", log=False).axes[0]
    medians = sorted(seg[0][1] for c in first.collections[1::2] for seg in [c.get_segments()[0]])
    assert medians == sorted(float(np.median(a.X.sum(axis=1))) for a in data.values())
    for a in data.values():
        a.obs["total_counts"] = 7.0
    flat = cl.pl.violin(data, "total_counts", log=False).axes[0]
    assert {c.get_segments()[0][0][1] for c in flat.collections} == {7.0}  # a line, where all cells are alike


def test_markers_are_drawn_in_the_order_of_labels_asked_for(data):
    axis = cl.pl.dotplot(data, n_genes=2).axes[0]
    assert [t.get_text() for t in axis.get_yticklabels()] == ["2", "10"]
    assert [t.get_text() for t in axis.get_xticklabels()] == GENES  # a gene stands under one label
    axis = cl.pl.dotplot(data, labels=["10"]).axes[0]
    assert [t.get_text() for t in axis.get_yticklabels()] == ["10"]


def test_a_marker_that_no_other_cell_expresses_has_the_strongest_colour(data):
    table = data["basel"].uns["markers"]
    table.loc[0, "log_fold_change"] = np.nan  # as find-markers writes an infinite one
    dots = cl.pl.dotplot(data).axes[0].collections[0]
    assert dots.get_array()[0] == dots.get_clim()[1]
    assert dots.get_sizes()[0] == pytest.approx(72.0)


def test_volcano_takes_the_comparison_in_which_most_differs(data, tmp_path):
    assert "T: 4 of 4 genes differ" in cl.pl.volcano(data).axes[0].get_title()
    assert "B: 0 of 4" in cl.pl.volcano(data, cell_type="B").axes[0].get_title()
    table = data["basel"].uns["groups"]["expression"]
    table.to_csv(tmp_path / "basel.expression.csv", index=False)
    for source in (table, tmp_path / "basel.expression.csv"):
        assert "T: 4 of 4" in cl.pl.volcano(source).axes[0].get_title()


# ---- errors ----------------------------------------------------------------------------------------------------------

WRONG = {
    "adata.obs['type'] of site 'basel' is missing; there is 'cell_type', 'cluster', 'donor', 'score'": lambda d: (
        cl.pl.composition(d, "type")
    ),
    "adata.obs['age'] of site 'basel' is missing": lambda d: cl.pl.embedding(d, color="age"),
    "adata.obs['pct'] of site 'basel' is missing": lambda d: cl.pl.violin(d, ["pct"]),
    "adata.obs['donor'] holds no numbers": lambda d: cl.pl.violin(d, "donor"),
    "adata.obsm['X_umap'] of site 'basel' is missing; there is 'X_shared_pca', 'X_integrated'": lambda d: (
        cl.pl.embedding(d, "X_umap")
    ),
    "components must be two numbers from 1 to 2, found (1, 3)": lambda d: cl.pl.embedding(d, components=(1, 3)),
    "adata.uns['best'] is missing; there is 'groups', 'markers'. The workflow find-markers": lambda d: cl.pl.dotplot(
        d, key="best"
    ),
    "the table has no label 'NK'; there is '2', '10'": lambda d: cl.pl.dotplot(d, labels=["NK"]),
    "the table has no column 'cell_type'; there is 'label'": lambda d: cl.pl.volcano(d, key="markers"),
    "the table has no cell_type 'NK'; there is 'B', 'T'": lambda d: cl.pl.volcano(d, cell_type="NK"),
    "needs cells of two values of 'site', and there is only 'cells'": lambda d: cl.pl.mixing(d["basel"]),
    "n_neighbors must be from 1 to 179, found 0": lambda d: cl.pl.mixing(d, n_neighbors=0),
    "save must end in .png, .svg, .pdf, found 'x.gif'": lambda d: cl.pl.embedding(d, save="x.gif"),
    "expected a run, an AnnData, a dict of them by site, or a path, found int": lambda d: cl.pl.embedding(3),
    "the dict of sites is empty": lambda d: cl.pl.embedding({}),
}


@pytest.mark.parametrize("says", WRONG)
def test_an_error_is_one_sentence_that_says_what_exists(says, data):
    with pytest.raises((DataError, ParameterError)) as caught:
        WRONG[says](data)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_folder_that_is_not_there_cannot_be_written_to(data, tmp_path):
    with pytest.raises(DataError, match="cannot be written"):
        cl.pl.embedding(data, save=tmp_path / "no" / "x.png")


# ---- scanpy's names --------------------------------------------------------------------------------------------------


def test_scanpys_names_are_the_workflows():
    assert cl.pp.highly_variable_genes is cl.choose_genes
    assert cl.pp.pca is cl.tl.pca is cl.shared_pca
    assert cl.tl.leiden is cl.cluster_cells
    assert cl.tl.rank_genes_groups is cl.find_markers
    for module in (cl.pp, cl.tl):
        for name, workflow in module.NAMES.items():
            assert getattr(module, name) is getattr(module, workflow) is getattr(cl, workflow)
            assert {name, workflow} <= set(dir(module))
    with pytest.raises(AttributeError, match=r"module 'cloister.tl' has no 'tsne'; it has .*leiden"):
        cl.tl.tsne


def test_the_modules_are_imported_when_used():
    code = (
        "import sys, cloister as cl, cloister.pp\n"
        "cl.tl, cl.pp\n"
        "heavy = {'anndata', 'pandas', 'matplotlib', 'cloister.pl', 'cloister.workflows'}\n"
        "print(sorted(heavy & set(sys.modules)))\n"
        "import cloister.pl\n"
        "print('matplotlib' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout.split("\n")[:2] == ["[]", "False"]
