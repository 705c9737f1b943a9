"""Labels with their levels: what is read, what travels, what is written."""

import numpy as np
import pandas as pd
import pytest
from anndata import AnnData

from cloister.cells.demo import demo_sites
from cloister.cells.files import read_cells, write_cells
from cloister.cells.labels import labels_of, split_label, write_labels
from cloister.cells.tables import check_cells
from cloister.errors import DataError, ParameterError
from cloister.rehearsal.rehearsal import rehearse

IDS = {"T": "CL:0000084", "B": "CL:0000236", "AT2": None}


def made(names=("T", "B", None, "AT2", "T")):
    adata = AnnData(np.ones((len(names), 2)))
    adata.obs["cell_type"] = pd.Categorical(names)
    adata.obs["level_1"] = ["Immune" if n in ("T", "B") else "Epithelial" for n in names]
    adata.obs["ontology_id"] = [IDS.get(n) for n in names]
    return adata


def test_labels_without_levels_are_their_names():
    assert labels_of(made(), "cell_type") == ("T", "B", None, "AT2", "T")
    assert labels_of(made(), "nothing") == (None,) * 5
    numbers = made()
    numbers.obs["cell_type"] = [1.0, np.nan, 2.0, 2.0, 1.0]
    assert labels_of(numbers, "cell_type") == ("1.0", None, "2.0", "2.0", "1.0")


def test_levels_go_with_the_name_and_come_back_as_columns():
    labels = labels_of(made(), "cell_type", ("level_1", "ontology_id"))
    assert labels[0] == "T ‹level_1=Immune · ontology_id=CL:0000084›"
    assert labels[2] is None
    assert labels[3] == "AT2 ‹level_1=Epithelial›"  # it has no id
    adata = AnnData(np.ones((5, 2)))
    write_labels(adata, "mapped", labels, np.arange(5) / 5)
    assert adata.obs["mapped"].astype(object).where(adata.obs["mapped"].notna(), None).tolist() == [
        "T",
        "B",
        None,
        "AT2",
        "T",
    ]
    assert adata.obs["mapped_level_1"].tolist()[:2] == ["Immune", "Immune"]
    assert adata.obs["mapped_ontology_id"].isna().tolist() == [False, False, True, True, False]
    assert adata.obs["mapped_share"].tolist() == [0.0, 0.2, 0.4, 0.6, 0.8]


@pytest.mark.parametrize("label", ["T", "T ‹", "a=b", "NK cell (CD16 high)", "x›", "‹x›", ""])
def test_names_that_have_no_levels_stay_as_they_are(label):
    assert split_label(label) == (label, {})


def test_an_id_may_hold_an_equals_sign():
    adata = made()
    adata.obs["ontology_id"] = "http://purl.org/x?a=b"
    label = labels_of(adata, "cell_type", ("ontology_id",))[0]
    assert split_label(label) == ("T", {"ontology_id": "http://purl.org/x?a=b"})


def test_what_cannot_be_a_level():
    with pytest.raises(DataError, match=r"obs\['level_9'\] is missing"):
        labels_of(made(), "cell_type", ("level_9",))
    twice = made()
    twice.obs["level_1"] = ["Immune", "Immune", "Immune", "Epithelial", "Lymphoid"]
    with pytest.raises(DataError, match=r"obs\['level_1'\] holds 2 values for the label 'T'.* a label has one"):
        labels_of(twice, "cell_type", ("level_1",))
    marked = made()
    marked.obs["level_1"] = "a · b"
    with pytest.raises(DataError, match="which mark levels; rename it"):
        labels_of(marked, "cell_type", ("level_1",))
    with pytest.raises(DataError, match="Expected 5 labels"):
        write_labels(made(), "mapped", ["T"])


def test_a_written_file_keeps_them(tmp_path):
    adata = made()
    write_labels(adata, "mapped", labels_of(adata, "cell_type", ("level_1", "ontology_id")))
    write_cells(adata, tmp_path / "a.h5ad")
    back = read_cells(tmp_path / "a.h5ad")
    check_cells(back, label_key="mapped")
    assert back.obs["mapped_ontology_id"].astype(object).dropna().tolist() == ["CL:0000084", "CL:0000236", "CL:0000084"]


# ---- in the workflows ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def atlas():
    """The demo sites, with a coarser level and an id for every cell type."""
    sites = demo_sites()
    kinds = sorted({str(x) for a in sites.values() for x in a.obs["cell_type"]})
    for a in sites.values():
        names = a.obs["cell_type"].astype(str)
        a.obs["compartment"] = [f"compartment {kinds.index(n) % 3}" for n in names]
        a.obs["cell_type_ontology_term_id"] = [f"CL:{kinds.index(n):07d}" for n in names]
    return sites, kinds


LEVELS = ("compartment", "cell_type_ontology_term_id")


def check_written(adata, key, kinds):
    found = adata.obs[key].astype(str)
    assert set(found) <= {*kinds, "unknown"}
    known = (found != "unknown").to_numpy()
    ids = [f"CL:{kinds.index(n):07d}" for n in found[known]]
    assert adata.obs[f"{key}_cell_type_ontology_term_id"][known].tolist() == ids
    assert adata.obs[f"{key}_compartment"][known].tolist() == [f"compartment {int(i[3:]) % 3}" for i in ids]
    assert adata.obs[f"{key}_compartment"][~known].isna().all()


def test_map_labels_maps_all_levels_at_once(atlas):
    sites, kinds = atlas
    options = {"query": "basel", "use_rep": "X_pca", "n_neighbors": 5, "mode": "plain"}
    plain = rehearse("map-labels", sites, **options).data["basel"]
    run = rehearse("map-labels", sites, levels=LEVELS, **options)
    found = run.data["basel"]
    check_written(found, "mapped", kinds)
    assert (found.obs["mapped"].astype(str) == plain.obs["mapped"].astype(str)).all()
    assert run.results["basel"]["accuracy"] > 0.5  # against the names of its own column


def test_train_classifier_keeps_levels_in_the_model(atlas, tmp_path):
    sites, kinds = atlas
    size = {"use_rep": "X_pca", "validation": 0.0}
    run = rehearse("train-classifier", sites, levels=LEVELS, **size)
    check_written(run.data["lugano"], "predicted", kinds)
    again = sites["vienna"].copy()
    run.model.predict(again, unknown=False, key_added="later")
    check_written(again, "later", kinds)


@pytest.mark.parametrize(("options", "says"), [
    ({"levels": ("cell_type",)}, "beside 'label_key', each once"),
    ({"levels": ("a", "a")}, "beside 'label_key', each once"),
    ({"levels": ("a",), "labels": ("T", "B")}, "give either 'labels' or 'levels'"),
])  # fmt: skip
@pytest.mark.parametrize("workflow", ["map-labels", "train-classifier"])
def test_levels_that_are_none(workflow, options, says, atlas):
    more = {"query": "basel"} if workflow == "map-labels" else {}
    with pytest.raises(ParameterError, match=says):
        rehearse(workflow, atlas[0], **options, **more)
