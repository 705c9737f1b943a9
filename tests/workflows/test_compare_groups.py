import dataclasses
import json
import re
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

import cloister as cl
from cloister.cells import files
from cloister.cells.bulks import add_up
from cloister.cells.values import chunks, is_on_disk
from cloister.errors import DataError, ParameterError
from cloister.rehearsal.check_disclosure import check_disclosure
from cloister.rehearsal.rehearsal import rehearse
from cloister.rehearsal.results import save_run
from cloister.workflows.compare_groups.workflow import Options, check, donors_of

DATA = Path(__file__).parents[2].parent / "shared" / "data"
BASE = {"groups": ("control", "case"), "donor_key": "donor"}
TYPES = BASE | {"label_key": "cell_type"}


@pytest.fixture(scope="module")
def sites():
    return cl.demo_cohort()


@pytest.fixture(scope="module")
def run(sites):
    return rehearse("compare-groups", sites, **TYPES)


@pytest.fixture(scope="module")
def baselines(sites):
    return cl.group_baselines(sites, **TYPES)


def planted(sites):
    var = next(iter(sites.values())).var
    return set(var.index[var["planted"]])


def test_is_close_to_the_pooled_donors(run, baselines):
    """Samples of a site have one weight per gene where a donor would stand out, and rare cell types are left out.

    So are genes with few counts at a site, which changes the trend of the others: 0.06 in the median log10 p.
    """
    for name, keys, effect in (
        ("expression", ["cell_type", "contrast", "gene"], "log_fold_change"),
        ("composition", ["contrast", "cell_type"], "effect"),
    ):
        for adata in run.data.values():
            found, wanted = (t.set_index(keys) for t in (adata.uns["groups"][name], baselines["pooled"][name]))
            assert len(found) > 10
            wanted = wanted.loc[found.index]
            assert np.abs(found[effect] - wanted[effect]).max() < 0.2
            assert np.abs(np.log10(found["p"]) - np.log10(wanted["p"])).median() < 0.08


def test_equals_the_pooled_donors_where_nothing_is_excluded():
    """Forty donors of each group at each site: to 1e-8 in genes whose samples have weights of their own everywhere."""
    sites = {p: a for p, a in cl.demo_cohort(per_site=80, n_cells=40, planted=10).items() if p != "vienna"}

    def compared(sites):
        run = rehearse("compare-groups", sites, **BASE)
        wanted = cl.group_baselines(sites, **BASE)["pooled"]["expression"].set_index("gene")
        return run.data["basel"].uns["groups"]["expression"].set_index("gene"), wanted

    found, wanted = compared(sites)
    few = wanted.index.difference(found.index)  # genes with few counts at a site
    assert len(few) < 0.15 * len(wanted)
    found, wanted = compared({p: a[:, ~a.var_names.isin(few)].copy() for p, a in sites.items()})
    assert set(found.index) == set(wanted.index)
    apart = np.abs(found["log_fold_change"] - wanted.loc[found.index, "log_fold_change"])
    assert (apart < 1e-8).mean() > 0.3
    assert apart.max() < 0.08


def test_what_was_planted_comes_out_and_more_of_it_than_alone(sites, run, baselines):
    def hits(table):
        part = table[(table["cell_type"] == "macrophage") & (table["fdr"] < 0.05)]
        return len(planted(sites) & set(part["gene"])), len(set(part["gene"]) - planted(sites))

    together, wrong = hits(run.data["basel"].uns["groups"]["expression"])
    alone = [hits(baselines[f"{site} alone"]["expression"])[0] for site in sites]
    assert together > max(alone)
    assert together >= 15
    assert wrong <= 3
    shares = run.data["basel"].uns["groups"]["composition"]
    assert "T" in shares[shares["fdr"] < 0.05]["cell_type"].tolist()[:1]
    assert shares.iloc[0]["effect"] < 0
    assert shares.iloc[0]["share"] < shares.iloc[0]["share_before"]


def test_every_party_is_told_the_same_and_why_types_are_left_out(run):
    told = run.results["coordinator"]
    for p, result in run.results.items():
        own = {k: v for k, v in result.items() if k != "excluded_here"}
        assert own == told
        assert p == "coordinator" or json.loads(run.data[p].uns["groups"]["summary"]) == result
    assert any("fewer than 3" in text for text in run.results["basel"]["excluded_here"])
    assert told["left_out"]["T"] == "0 donors of 'control' at sites that have enough of them; 3 are needed"
    assert told["tables"][-1]["of"] == "composition"
    assert told["tables"][0]["donors"].keys() == {"control", "case"}


def test_results_are_saved_with_tables_and_figures(run, tmp_path):
    pytest.importorskip("matplotlib")
    names = {p.name for p in save_run(run, tmp_path / "out")}
    assert {"basel.expression.csv", "basel.composition.csv", "coordinator.expression.csv"} <= names
    table = pd.read_csv(tmp_path / "out" / "coordinator.expression.csv")
    assert list(table)[:4] == ["cell_type", "contrast", "gene", "log_fold_change"]
    again = files.read_cells(tmp_path / "out" / "basel.h5ad").uns["groups"]
    pd.testing.assert_frame_equal(again["expression"], run.data["basel"].uns["groups"]["expression"], check_dtype=False)
    drawn = json.loads((tmp_path / "out" / "figures.json").read_text())["figures"]
    assert drawn[0]["title"] == "macrophage: case vs control"
    assert re.search(r"\d+ differ at a false discovery rate of 0.05: ", drawn[0]["alt"])
    assert "cell types differ: T" in drawn[-1]["alt"]


def test_one_table_of_all_cells_with_covariates_and_no_blocks(sites):
    options = BASE | {"covariates": ("age",), "block": "none"}
    with pytest.raises(DataError, match="no table is left to which this site may add"):
        rehearse("compare-groups", sites, **options)  # twelve donors are too few for three columns
    sites = cl.demo_cohort(per_site=24, n_cells=40)
    run = rehearse("compare-groups", sites, **options)
    found = run.data["vienna"].uns["groups"]
    wanted = cl.group_baselines(sites, **options)["pooled"]["expression"].set_index("gene")
    assert set(found["expression"]["cell_type"]) == {""}
    assert len(found["composition"]) == 0
    table = found["expression"].set_index("gene")
    assert np.abs(table["log_fold_change"] - wanted.loc[table.index, "log_fold_change"]).median() < 0.05


def test_pairs_within_donors(sites):
    """Every donor in both groups: the design of a treated and an untreated sample of the same persons."""
    paired = {}
    for site, adata in sites.items():
        a = adata[adata.obs["condition"] == "control"].copy()
        a.obs["condition"] = np.where(np.arange(a.n_obs) % 2, "case", "control")
        up = np.flatnonzero(a.obs["condition"] == "case")
        x = a.X.tolil()
        x[up, 7] = x[up, 7].toarray() + 3
        a.X = x.tocsr()
        paired[site] = a
    with pytest.raises(DataError, match="pass block='donor' to compare them within donors"):
        rehearse("compare-groups", paired, **BASE)
    run = rehearse("compare-groups", paired, **BASE, block="donor")
    table = run.data["basel"].uns["groups"]["expression"]
    assert table.iloc[0]["gene"] == paired["basel"].var_names[7]
    assert table.iloc[0]["fdr"] < 1e-3
    assert (table["fdr"].iloc[1:] > 0.05).all()


def test_three_groups_and_chosen_contrasts(sites):
    three = {}
    for site, adata in cl.demo_cohort(per_site=12).items():
        a = adata.copy()
        number = a.obs["donor"].str.rpartition("-")[2].astype(int)
        a.obs["condition"] = np.array(["control", "mild", "severe"])[(number.to_numpy() - 1) // 4]
        three[site] = a
    options = BASE | {"groups": ("control", "mild", "severe"), "contrasts": ("severe vs mild",)}
    table = rehearse("compare-groups", three, **options).data["basel"].uns["groups"]["expression"]
    assert set(table["contrast"]) == {"severe vs mild"}


def test_cells_on_disk_give_the_same(sites, tmp_path, monkeypatch):
    monkeypatch.setitem(chunks.__kwdefaults__, "entries", 20_000)
    monkeypatch.setattr("cloister.cells.files.IN_MEMORY", 0)
    for site, adata in sites.items():
        files.write_cells(adata, tmp_path / f"{site}.h5ad")
    opened = {site: files.open_cells(tmp_path / f"{site}.h5ad") for site in sites}
    assert all(is_on_disk(a.X) for a in opened.values())
    run = rehearse("compare-groups", opened, **TYPES)
    held = rehearse("compare-groups", sites, **TYPES)
    pd.testing.assert_frame_equal(*(r.data["basel"].uns["groups"]["expression"] for r in (run, held)))


def test_cells_are_added_up_in_chunks(sites, monkeypatch):
    adata = sites["basel"]
    codes = np.random.default_rng(0).integers(-1, 5, adata.n_obs)
    whole = np.stack([np.asarray(adata.X[codes == k].sum(axis=0)).ravel() for k in range(5)])
    np.testing.assert_array_equal(add_up(adata, codes, 5), whole)
    monkeypatch.setitem(chunks.__kwdefaults__, "entries", 7 * adata.n_vars)
    np.testing.assert_array_equal(add_up(adata, codes, 5), whole)


def test_donors_are_what_a_group_by_gives(sites):
    adata = sites["lugano"]
    mine = donors_of(adata, Options(**TYPES))
    keys = adata.obs[["cell_type", "donor"]].astype(str)
    frame = pd.DataFrame(adata.X.toarray(), index=pd.MultiIndex.from_frame(keys))
    sums, sizes = frame.groupby(level=[0, 1]).sum(), frame.groupby(level=[0, 1]).size()
    donors = np.unique(adata.obs["donor"])
    for label, bulk in mine.bulks.items():
        here = [donors[mine.donor[i]] for i in bulk.rows]
        assert here == [d for d in donors if sizes.get((label, d), 0) >= 10]
        for d, counts in zip(here, bulk.counts, strict=True):
            np.testing.assert_array_equal(counts, sums.loc[(label, d)])


@pytest.mark.parametrize(
    ("change", "options", "message"),
    [
        (lambda a: a.obs.drop(columns="condition"), {}, "adata.obs['condition'] is missing"),
        (lambda a: a.obs.drop(columns="donor"), {}, "adata.obs['donor'] is missing"),
        (lambda a: a.obs.assign(condition="other"), {}, "is of control, case"),
        (
            lambda a: a.obs.assign(donor=a.obs["condition"]),
            {},
            "no table is left to which this site may add (all cells: 1 donor of group 'case': fewer than 3)",
        ),
        (lambda a: a.obs, {"block": "donor"}, "no donor here has cells in two groups"),
        (lambda a: a.obs.assign(age=np.nan), {"covariates": ("age",)}, "adata.obs['age'] is missing for some cells"),
        (
            lambda a: a.obs.assign(age=np.arange(a.n_obs)),
            {"covariates": ("age",)},
            "differs between cells of one donor",
        ),
        (lambda a: a.obs, {"label_key": "cell_type", "labels": ("T", "B")}, "are not in the study's list"),
    ],
)
def test_bad_cells_are_named_before_anything_is_sent(sites, change, options, message):
    bad = sites["basel"].copy()
    bad.obs = change(bad)
    with pytest.raises(DataError, match=re.escape(message)):
        check(bad, Options(**(BASE | options)))


def test_values_that_are_no_counts(sites):
    bad = sites["basel"].copy()
    bad.X = bad.X.log1p()
    with pytest.raises(DataError, match="expected raw counts, found log values"):
        check(bad, Options(**BASE))
    assert check(bad, Options(**(TYPES | {"compare": "composition"}))) == []


def test_what_the_user_should_know(sites):
    few = sites["basel"].copy()
    few.obs["condition"] = few.obs["condition"].astype(str).where(few.obs["donor"] != "basel-1", "none")
    few.obs["condition"] = few.obs["condition"].where(few.obs["donor"] != "basel-3", "none")
    notes = check(few, Options(**TYPES))
    assert "320 cells are of none of the groups, and left out" in notes
    assert any(re.search(r"left out \d donors? of group '(control|case)': fewer than 3", note) for note in notes)
    assert any("fewer than min_cells=10 cells of a type" in note for note in notes)


@pytest.mark.parametrize(
    "options",
    [
        {"groups": ("a",)},
        {"groups": ("a vs b", "c")},
        {"compare": "composition"},
        {"covariates": ("donor",)},
        {"contrasts": ("case vs other",)},
        {"fdr": 0.0},
        {"min_donors": 1},
    ],
)
def test_bad_options(options):
    with pytest.raises(ParameterError):
        Options(**(BASE | options))


def test_too_few_donors_over_all_sites(sites):
    with pytest.raises(DataError, match="6 donors of group 'case': fewer than 10"):
        rehearse("compare-groups", sites, **BASE, min_donors=10)


def test_options_are_plain():
    assert dataclasses.asdict(Options(**BASE))["key_added"] == "groups"
    assert Options(**BASE).contrast_names() == ["case vs control"]


def one_group(a):
    """What an attacker makes of its donors: a level that few others have, and libraries of another size."""
    made = a.copy()
    made.obs["machine"] = np.where(made.obs["donor"].str.endswith(("-1", "-2")), "new", "old")
    made.X = made.X * 1000
    return made


def test_what_a_site_discloses_is_based_on_enough_donors(sites):
    marked = {p: a.copy() for p, a in sites.items()}
    for p, a in marked.items():
        new = ("-1",) if p == "basel" else ("-1", "-2", "-3", "-4")
        a.obs["machine"] = np.where(a.obs["donor"].str.endswith(new), "new", "old")
    for options in ({}, {"covariates": ("machine",)}, {"block": "none"}):
        seen = check_disclosure("compare-groups", marked, "basel", attacks=[one_group], **TYPES | options)
        assert seen.donors >= 3
        assert seen.cells >= 30


@pytest.mark.skipif(not DATA.exists(), reason="the shared data are not here")
def test_interferon_genes_come_out_of_stimulated_blood():
    """Cells of two batches, drawn into generated donors: the answer to interferon is known."""
    import anndata as ad

    whole = ad.read_h5ad(DATA / "scrna" / "pbmc_federation.h5ad")
    whole = whole[whole.obs["study"].astype(str).str.contains("kang", case=False)][::2].copy()
    rng = np.random.default_rng(0)
    whole.obs["condition"] = np.where(whole.obs["batch"] == "kang_stim", "stimulated", "control")
    number = rng.integers(0, 12, whole.n_obs)
    whole.obs["donor"] = [f"{c}-{i}" for c, i in zip(whole.obs["condition"], number, strict=True)]
    sites = {s: whole[number % 3 == k].copy() for k, s in enumerate(("basel", "lugano", "vienna"))}
    options = {"groups": ("control", "stimulated"), "donor_key": "donor", "label_key": "cell_type"}
    run = rehearse(
        "compare-groups", sites, **options, compare="expression", labels=tuple(np.unique(whole.obs["cell_type"]))
    )
    table = run.data["basel"].uns["groups"]["expression"]
    for label in ("CD14 Mono", "CD4 T", "B"):
        first = table[table["cell_type"] == label].head(25)
        assert {"ISG15", "IFIT3", "IFI6", "MX1"} <= set(first["gene"]), label
        assert (first["fdr"] < 1e-3).all()
