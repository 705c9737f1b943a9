"""The Cell Ontology: what laboratories write is found, types of different depth meet at a common one."""

import pytest

from cloister.cells.ontology import CellOntology, Term, accuracy_by_distance, cell_ontology, check_version
from cloister.errors import DataError, ParameterError

T, CD4, CD8, B, NK = "CL:0000084", "CL:0000624", "CL:0000625", "CL:0000236", "CL:0000623"

SMALL = CellOntology(
    "test",
    {
        key: Term(key, name, synonyms, parents)
        for key, name, synonyms, parents in [
            ("CL:0", "cell", (), ()),
            ("CL:1", "leukocyte", ("white cell",), ("CL:0",)),
            ("CL:2", "T cell", ("T-cell", "thymocyte-like"), ("CL:1",)),
            ("CL:3", "B cell", ("thymocyte-like",), ("CL:1",)),
            ("CL:4", "CD4 T cell", (), ("CL:2",)),
            ("CL:5", "T cell, human", (), ("CL:2",)),
        ]
    },
    {"CL:9": "CL:2"},
)


@pytest.mark.parametrize(
    ("name", "key"),
    [
        *((name, CD4) for name in ("CD4 T cells", "T_CD4", "CD4+ T", "CD4 T-cells", "CD4-positive, alpha-beta T cell")),
        *((name, T) for name in ("T", "t_cell", "T lymphocytes", "CL:0000084", "cl_0000084")),
        *((name, NK) for name in ("NK", "nk cells", "Natural Killer", "CD56+ NK")),
        *((name, B) for name in ("B", "bcells", "B Cells")),
        ("FCGR3A+ Monocytes", "CL:0000875"),
        ("CD16 Mono", "CL:0000875"),
        ("CD14+ Monocytes", "CL:0001054"),
        ("DC", "CL:0000451"),
        ("dendritic cell, human", "CL:0000451"),
        ("pDC", "CL:0000784"),
        ("MK", "CL:0000556"),
        ("Tregs", "CL:0000815"),
        ("type II pneumocyte", "CL:0002063"),
        ("AT2", "CL:0002063"),
        ("fibroblast of lung", "CL:0002553"),
        ("lung fibroblasts", "CL:0002553"),
        *((name, None) for name in ("alpha", "beta", "NK/NKT", "basophil/mast", "CL:9999999", "", "CD34+")),
    ],
)
def test_what_laboratories_write_is_found(name, key):
    assert cell_ontology().find(name) == key


def test_a_name_of_several_terms_is_not_found():
    assert SMALL.find("thymocyte-like") is None
    assert SMALL.find("white cells") == "CL:1"
    assert SMALL.find("CL:9") == "CL:2"  # a term that has a successor
    assert SMALL.find("T") == "CL:2"  # of two with the same words, the one that includes the other


def test_types_meet_at_the_nearest_common_one():
    assert SMALL.common_ancestor(["CL:4", "CL:3"]) == "CL:1"
    assert SMALL.common_ancestor(["CL:4", "CL:2"]) == "CL:2"
    assert SMALL.distance("CL:4", "CL:3") == 3
    assert SMALL.distance("CL:4", "CL:4") == 0
    assert SMALL.nearest("CL:4", ["CL:0", "CL:1"]) == "CL:1"
    assert SMALL.nearest("CL:3", ["CL:2"]) is None
    with pytest.raises(DataError, match="'CL:7' is not a term"):
        SMALL.ancestors("CL:7")
    cl = cell_ontology()
    assert cl.name(cl.common_ancestor([CD4, T])) == "T cell"
    assert cl.includes(T, CD8)
    assert not cl.includes(CD8, T)


def test_every_term_leads_to_the_root():
    cl = cell_ontology()
    assert len(cl.terms) > 3000
    assert all("CL:0000000" in cl.ancestors(key) for key in cl.terms)
    assert all(parent in cl.terms for term in cl.terms.values() for parent in term.parents)


def test_accuracy_by_distance():
    truth = ["CD4 T cell", "CD4 T cell", "CD4 T cell", "CD4 T cell", "B cell", "odd", "odd", None]
    called = ["CD4 T cell", "T cell", "B cell", "unknown", "leukocyte", "odd", "B cell", "B cell"]
    found = accuracy_by_distance(truth, called, SMALL)
    assert {key: round(7 * value) for key, value in found.items()} == {
        **{"0": 2, "1": 2, "3": 1, "above": 2, "no term": 1, "unknown": 1},
    }
    assert accuracy_by_distance([], [], SMALL) == {}


def test_a_study_fixes_the_release():
    check_version(cell_ontology().version)
    with pytest.raises(ParameterError, match=r"version is '2020-01-01', and this version of Cloister comes with"):
        check_version("2020-01-01")
