import numpy as np
import pandas as pd
import pytest

from cloister.cells.genes import (
    FewGenes,
    gene_id_kind,
    gene_names,
    genes_in_common,
    match_genes,
    organism_of,
    plain_name,
)
from cloister.errors import DataError

TP53, CD3E, CD19 = "ENSG00000141510", "ENSG00000198851", "ENSG00000177455"


@pytest.mark.parametrize(
    ("name", "plain"),
    [
        (f"{TP53}.18", TP53),
        (f" {TP53} ", TP53),
        ("ENSMUSG00000059552.14", "ENSMUSG00000059552"),
        ("ENSG00000182378.15_PAR_Y", "ENSG00000182378_PAR_Y"),
        ("AL627309.1", "AL627309.1"),  # a symbol may end like a version
        ("ENSA", "ENSA"),  # a symbol may begin like an id
        ("Cd3e", "Cd3e"),
    ],
)
def test_plain_name(name, plain):
    assert plain_name(name) == plain


@pytest.mark.parametrize(
    ("names", "kind"),
    [
        ([TP53, f"{CD3E}.3", CD19], "ensembl"),
        (["TP53", "CD3E", "ENSA"], "symbol"),
        ([TP53, "CD3E"], "mixed"),
        ([f"g{i}" for i in range(19)] + [TP53], "symbol"),  # a few unnamed genes do not make it mixed
        ([], "symbol"),
    ],
)
def test_gene_id_kind(names, kind):
    assert gene_id_kind(names) == kind


def test_match_genes_reorders_and_ignores_versions():
    assert match_genes(["CD3E", "TP53", "CD19"], ["CD19", "CD3E"]).tolist() == [2, 0]
    assert match_genes([f"{TP53}.1", f"{CD3E}.2"], [f"{CD3E}.9", TP53]).tolist() == [1, 0]


@pytest.mark.parametrize("column", ["gene_symbol", "gene_symbols", "feature_name", "gene_name"])
def test_match_genes_uses_the_other_kind_of_name(column):
    names = ["TP53", np.nan, "CD19"]
    by_id = pd.DataFrame({column: names}, index=[TP53, CD3E, CD19])
    assert match_genes(by_id, ["CD19", "TP53"]).tolist() == [2, 0]
    assert match_genes(by_id, [CD3E]).tolist() == [1]
    by_symbol = pd.DataFrame({"gene_ids": [f"{TP53}.4", f"{CD19}.4"]}, index=["TP53", "CD19"])
    assert match_genes(by_symbol, [CD19, TP53]).tolist() == [1, 0]


def test_match_genes_names_what_is_missing():
    agreed = [f"g{i}" for i in range(9)]
    with pytest.raises(DataError, match=r"7 of 9 agreed genes are missing \('g2', .*'g6', \.\.\.\)") as caught:
        match_genes(["g0", "g1"], agreed)
    assert "g7" not in str(caught.value)
    with pytest.raises(DataError, match="the study uses Ensembl ids and this file symbols"):
        match_genes(["TP53"], [TP53])


def test_match_genes_refuses_what_is_ambiguous():
    twice = pd.DataFrame({"gene_symbol": ["TP53", "TP53", "CD19"]}, index=[TP53, CD3E, CD19])
    with pytest.raises(DataError, match=r"1 agreed genes stand for several columns here \('TP53'\)"):
        match_genes(twice, ["TP53", "CD19"])
    assert match_genes(twice, ["CD19"]).tolist() == [2]
    with pytest.raises(DataError, match="same gene"):
        match_genes(twice, [CD19, "CD19"])
    with pytest.raises(DataError, match="agreed gene names must be unique"):
        match_genes(["a", "b"], ["a", "a"])


def test_gene_names_finds_the_kind_the_study_uses():
    var = pd.DataFrame({"feature_name": ["TP53", "CD19"]}, index=[f"{TP53}.1", f"{CD19}.1"])
    assert gene_names(var, "ensembl") == [TP53, CD19]
    assert gene_names(var, "symbol") == ["TP53", "CD19"]
    with pytest.raises(DataError, match="named by Ensembl ids"):
        gene_names(["unheard-of"], "ensembl")


def test_names_are_translated_where_a_file_lacks_them():
    assert gene_names(["TP53", "CD3E", "CD19"], "ensembl") == [TP53, CD3E, CD19]
    assert gene_names([f"{TP53}.4", CD3E, CD19], "symbol") == ["TP53", "CD3E", "CD19"]
    mixed = ["TP53", CD3E, "CD19", f"{TP53[:-3]}999", "panel-7"]
    assert gene_names(mixed, "symbol") == ["TP53", "CD3E", "CD19", f"{TP53[:-3]}999", "panel-7"]
    assert gene_names(mixed, "ensembl") == [TP53, CD3E, CD19, f"{TP53[:-3]}999", "panel-7"]
    assert gene_names(["Cd3e", "Cd19", "Trp53"], "ensembl")[0].startswith("ENSMUSG")
    assert gene_names(["CD3E", CD3E, "CD19"], "ensembl") == ["CD3E", CD3E, CD19]  # the same gene twice: both stay


def test_symbols_of_earlier_releases_become_the_current_ones():
    assert gene_names(["GNB2L1", "ATPIF1", "IGJ", "CD19"], "symbol") == ["RACK1", "ATP5IF1", "JCHAIN", "CD19"]
    assert gene_names(["GNB2L1", "RACK1", "CD19"], "symbol") == ["GNB2L1", "RACK1", "CD19"]
    assert gene_names(["GNB2L1", "IGJ", "CD19"], "ensembl") == [gene_names(["RACK1"], "ensembl")[0], *gene_names(
        ["JCHAIN"], "ensembl"), CD19]  # fmt: skip


@pytest.mark.parametrize(
    ("names", "organism"),
    [(["CD3E", "TP53", "AL627309.1"], "human"), (["Cd3e", "Trp53", "H2-Ab1"], "mouse"), ([TP53], "human"),
     (["ENSMUSG00000059552"], "mouse"), (["CD3E", "Cd3e"], None), ([], None), (["0", "1"], None)],
)  # fmt: skip
def test_organism_by_case_and_id(names, organism):
    assert organism_of(names) == organism


def test_few_genes_in_common_name_site_and_cause():
    many = [f"GENE{i}" for i in range(3000)]
    with pytest.raises(FewGenes, match=r"only 12 genes in common, fewer than 200; 'bern' has 12 and .* bring all") as e:
        genes_in_common({"basel": many, "bern": many[:12], "usz": many})
    assert e.value.site == "bern"
    assert len(genes_in_common({"basel": many[:12], "bern": many[:12]})) == 12  # every site keeps these only
    assert len(genes_in_common({"basel": many[:60], "bern": many[:20]}, notes=[])) == 20  # panels
    assert len(genes_in_common({"basel": many, "bern": many[:12]}, least=10, notes=[])) == 12


def test_less_than_half_in_common_is_noted_with_its_cause(caplog):
    many = [f"GENE{i}" for i in range(3000)]
    notes = []
    genes_in_common({"basel": many, "bern": many[:1000], "usz": many}, notes=notes)
    assert len(notes) == 1
    assert "only 1000 genes are in common" in notes[0]
    assert "'bern': it has 1000 genes only" in notes[0]
    half = [f"ENSG{i:011d}" if i % 3 else name for i, name in enumerate(many)]
    genes_in_common({"basel": many, "bern": half, "usz": many})
    assert "'bern': it uses Ensembl ids and symbols side by side and the others symbols" in caplog.text
    mouse = [name.capitalize() if i % 10 else name for i, name in enumerate(many)]
    with pytest.raises(DataError, match="human"):
        genes_in_common({"basel": many[1:10], "bern": mouse[1:10]})
    notes.clear()
    genes_in_common({"basel": many, "bern": mouse, "usz": many}, notes=notes, least=0)
    assert "those of mouse, the others' as those of human" in notes[0]


def test_genes_in_common_does_not_depend_on_the_order_of_sites():
    lists = {"basel": ["c", "a", "b", f"{TP53}.1"], "lugano": ["b", "c", TP53], "vienna": [f"{TP53}.2", "c", "b"]}
    common = genes_in_common(lists)
    assert common == genes_in_common(dict(reversed(lists.items()))) == sorted([TP53, "b", "c"])
    assert genes_in_common([["2", "10"], ["2", "10"]]) == ["2", "10"]  # nothing to settle, nothing moved


def test_genes_in_common_says_why_there_are_none():
    with pytest.raises(DataError, match="basel seems to use Ensembl ids and vienna symbols"):
        genes_in_common({"basel": [TP53], "vienna": ["TP53"]})
    with pytest.raises(DataError, match="upper and lower case"):
        genes_in_common({"basel": ["CD3E"], "vienna": ["Cd3e"]})
    with pytest.raises(DataError, match="same species"):
        genes_in_common({"basel": ["CD3E"], "vienna": ["CD19"]})
    with pytest.raises(DataError, match="gene names of vienna must be unique"):
        genes_in_common({"basel": ["CD3E"], "vienna": ["CD3E", "CD3E"]})
    with pytest.raises(DataError, match="at least one site"):
        genes_in_common({})
