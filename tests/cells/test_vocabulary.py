"""Labels of several sites side by side, and the maps that make one vocabulary of them."""

import numpy as np
import pandas as pd
import pytest
from anndata import AnnData

from cloister.cells.labels import write_labels
from cloister.cells.names import label_words
from cloister.cells.ontology import cell_ontology
from cloister.cells.vocabulary import Rules, compare_labels, rename_labels
from cloister.errors import ParameterError, ProtocolAbort
from cloister.rehearsal.rehearsal import rehearse
from cloister.study import format_study, parse_study

VERSION = cell_ontology().version


def made(names, genes=40, seed=0):
    rng = np.random.default_rng(seed)
    adata = AnnData(rng.poisson(2.0, (len(names), genes)).astype(np.float32))
    adata.var_names = [f"GENE{i}" for i in range(genes)]
    adata.obs["cell_type"] = pd.Categorical(names)
    kinds = np.array([[name in ("B", "B cells", "cluster 2")] for name in names])
    adata.obsm["X_pca"] = rng.normal(size=(len(names), 3)) + 8.0 * kinds
    return adata


@pytest.mark.parametrize(
    ("one", "other"),
    [("CD4 T cells", "T_CD4"), ("CD4+ T", "CD4-positive, alpha-beta T cell"), ("NK cells", "natural killer"),
     ("CD14 Mono", "CD14+ Monocytes"), ("γδ T", "gamma-delta T cell"), ("Type II pneumocyte", "pneumocyte type 2"),
     ("naiveT", "T naive")],
)  # fmt: skip
def test_names_of_the_same_words(one, other):
    assert label_words(one) == label_words(other)


@pytest.mark.parametrize(
    ("one", "other"),
    [("CD4 T", "CD8 T"), ("CD25- T", "CD25+ T"), ("type 1", "type 2"), ("NK/NKT", "NKT"), ("CD14 low", "CD14"),
     ("naive B", "memory B"), ("cluster 1", "cluster 11"), ("b🦠", "b"), ("", "🦠"), ("+", "-"), ("T*", "T")],
)  # fmt: skip
def test_names_of_other_words(one, other):
    assert label_words(one) != label_words(other)


def test_labels_side_by_side():
    found = compare_labels({
        "USZ": {"T cell": 5, "Megakaryocyte": 9, "B": 8},
        "basel": {"T_CD4": 19, "Megakaryocite": 7, "NK cells": 4, "B": 8},
        "bern": {"CD4 T cells": 20, "natural killer cell": 3, "B": 8},
    })  # fmt: skip
    pairs = {pair.name: (pair.usual, pair.sure) for pair in found.near}
    assert pairs == {
        "T_CD4": ("CD4 T cells", True),
        "natural killer cell": ("NK cells", True),
        "Megakaryocite": ("Megakaryocyte", False),
    }
    assert found.single == {"T cell": "USZ"}
    assert found.counts["CD4 T cells"] == {"bern": 20}
    assert [(pair.special, pair.general) for pair in found.deeper] == [("CD4 T cells", "T cell")]
    assert found.suggested == {
        "T_CD4": "T cell", "CD4 T cells": "T cell", "natural killer cell": "NK cells",
    }  # fmt: skip


def test_a_site_with_both_names_means_two_labels():
    found = compare_labels({"a": {"T": 3, "T cell": 4}, "b": {"T": 5}})
    assert not found.near


def test_rules_rename_and_keep_the_original():
    adata = made(["T_CD4", "t_cd4 ", "B", None, "B"])
    rules = Rules(agreed={"T_CD4": "CD4 T cells"})
    changed = rename_labels(adata, ["cell_type", "missing"], rules)
    assert changed == {"cell_type": {"T_CD4": "CD4 T cells", "t_cd4 ": "CD4 T cells"}}
    assert adata.obs["cell_type"].astype(object).tolist()[:3] == ["CD4 T cells", "CD4 T cells", "B"]
    assert adata.obs["cell_type"].isna().tolist() == [False, False, False, True, False]
    assert adata.obs["cell_type_original"].astype(object).tolist()[:2] == ["T_CD4", "t_cd4 "]
    assert rename_labels(adata, ["cell_type"], rules) == {}  # once is enough
    assert adata.obs["cell_type_original"].astype(object).tolist()[0] == "T_CD4"


def test_the_ontology_names_labels_and_merges_only_at_listed_terms():
    rules = Rules(version=VERSION)
    assert rules.apply("T_CD4") == "CD4-positive, alpha-beta T cell"
    assert rules.apply("mystery") == "mystery"
    merged = Rules(version=VERSION, terms=("T cell", "CL:0000236"))
    assert merged.apply("CD8+ T") == "T cell"
    assert merged.apply("memory B") == "B cell"
    assert merged.apply("NK") == "natural killer cell"  # below no term: its own name
    own = Rules(own={"cluster 3": "NK"}, agreed={"natural killer cell": "killers"}, version=VERSION)
    assert own.apply("cluster 3") == "killers"


def test_maps_that_contradict_themselves():
    with pytest.raises(ParameterError, match="renames 'a' to 'b' and 'b' to 'c'"):
        Rules(agreed={"a": "b", "b": "c"})
    with pytest.raises(ParameterError, match="holds lines as"):
        Rules(own={"a": " "})
    with pytest.raises(ParameterError, match="'nonsense' is not a term"):
        Rules(version=VERSION, terms=("nonsense",))
    with pytest.raises(ParameterError, match="terms need a version"):
        Rules(terms=("T cell",))


def test_ids_are_written_where_all_labels_are_terms():
    adata = made(["T", "B", "T"])
    write_labels(adata, "mapped", ["T cell", "unknown", None])
    assert adata.obs["mapped_ontology_id"].astype(object).tolist()[0] == "CL:0000084"
    assert adata.obs["mapped_ontology_id"].isna().tolist() == [False, True, True]
    write_labels(adata, "other", ["T cell", "B", None])
    assert "other_ontology_id" not in adata.obs


# ---- in a study ------------------------------------------------------------------------------------------------------

TEXT = f"""
name = "s"
workflow = "train-classifier"
[parameters]
use_rep = "X_pca"
min_cells = 5
l2 = 0.01
validation = 0.0
[parties]
hub = "coordinator"
basel = "site"
bern = "site"
usz = "site"
[labels]
"cluster 2" = "B cell"
[ontology]
version = "{VERSION}"
"""


def three_sites():
    return {
        "basel": made(["T_CD4", "B"] * 30, seed=1),
        "bern": made(["CD4 T cells", "cluster 2"] * 30, seed=2),
        "usz": made(["CD4+ T", "B cells"] * 30, seed=3),
    }


def test_a_study_keeps_its_maps():
    study = parse_study(TEXT)
    assert parse_study(format_study(study)) == study
    assert study.labels == {"cluster 2": "B cell"}
    for wrong, says in [
        ('[labels]\n"a" = 3', "holds lines as"),
        ('[ontology]\nrelease = "x"', "unknown key 'release'"),
        ("[ontology]\nterms = []", "needs the release"),
        ('[ontology]\nversion = "x"\nterms = 3', "must be a list of names"),
        ("labels = 3", "must be a table"),
    ]:
        head = TEXT.partition("[labels]")[0]
        text = f"{wrong}\n{head}" if wrong.startswith("labels") else head + wrong
        with pytest.raises(ParameterError, match=says):
            parse_study(text)


@pytest.mark.parametrize("processes", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_three_vocabularies_become_one(processes, caplog):
    study, sites = parse_study(TEXT), three_sites()
    run = rehearse(study, sites, processes=processes)
    assert sorted(run.results["basel"]["labels"]) == ["B cell", "CD4-positive, alpha-beta T cell"]
    found = run.data["bern"].obs
    assert set(found["cell_type_original"]) == {"CD4 T cells", "cluster 2"}
    assert set(found["predicted_ontology_id"]) == {"CL:0000236", "CL:0000624"}
    assert set(sites["bern"].obs["cell_type"]) == {"CD4 T cells", "cluster 2"}  # the caller's are as they were
    assert "site 'bern': labels renamed" in caplog.text


def test_without_maps_the_run_stops_and_names_both_spellings():
    options = {"use_rep": "X_pca", "min_cells": 5, "l2": 0.01, "validation": 0.0}
    run = rehearse("train-classifier", three_sites(), check=False, **options)
    assert {reason for _, reason in run.origins.values()} == {"spelling"}
    assert isinstance(run.errors["coordinator"], ProtocolAbort)


def test_a_study_of_another_release_is_refused():
    study = parse_study(TEXT.replace(VERSION, "2019-01-01"))
    with pytest.raises(ParameterError, match="comes with the Cell Ontology"):
        rehearse(study, three_sites())
