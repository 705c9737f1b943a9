"""A folder of .fcs files with a table of donors."""

import numpy as np
import pytest

from cloister.cells.cytometry import marker_name
from cloister.cells.files import open_cells, read_cells
from cloister.errors import DataError

pytest.importorskip("anndata")
PANEL = {"a.fcs": ["", "", "CD3", "HLA-DR"], "b.fcs": ["", "", "145Nd_HLA DR", "CD3(Nd142)Dd"]}
CHANNELS = {"a.fcs": ["Time", "FSC-A", "Nd142Di", "Nd145Di"], "b.fcs": ["Time", "FSC-A", "Nd145Di", "Nd142Di"]}


def write(folder, table="file,donor,condition\na.fcs,d1,case\nb.fcs,d2,control\n", panel=PANEL):
    flowio = pytest.importorskip("flowio")
    for name, markers in panel.items():
        with (folder / name).open("wb") as file:
            flowio.create_fcs(file, np.arange(12.0), CHANNELS[name], opt_channel_names=markers)
    (folder / "donors.csv").write_text(table)
    return folder


def test_files_become_one_table_whose_columns_are_markers(tmp_path):
    adata = open_cells(write(tmp_path))
    assert list(adata.var_names) == ["CD3", "HLA-DR"]
    np.testing.assert_array_equal(adata.X[:3], [[2, 3], [6, 7], [10, 11]])
    np.testing.assert_array_equal(
        adata.X[3:], [[3, 2], [7, 6], [11, 10]]
    )  # the other panel has them the other way round
    assert adata.obs["donor"].tolist() == ["d1"] * 3 + ["d2"] * 3
    assert adata.obs["condition"].tolist() == ["case"] * 3 + ["control"] * 3
    assert adata.obs_names.is_unique
    (tmp_path / "markers.txt").write_text("hla-dr\n")
    assert list(read_cells(tmp_path).var_names) == ["hla-dr"]


@pytest.mark.parametrize(
    ("label", "channel", "name"),
    [
        ("176Yb_CD57", "Yb176Di", "CD57"),
        ("CD57 (Yb176)Dd", "Yb176Di", "CD57"),
        ("Ki67", "Dy162Di", "Ki67"),
        ("B220", "BV421-A", "B220"),
        ("CD45RA", "FITC-A", "CD45RA"),
        ("Yb176Di", "Yb176Di", ""),
        ("FSC-A", "FSC-A", ""),
        ("", "Time", ""),
    ],
)
def test_what_a_cytometer_wrote_is_read_as_a_marker(label, channel, name):
    assert marker_name(label, channel) == name


@pytest.mark.parametrize(
    ("table", "says"),
    [
        ("file,condition\na.fcs,case\n", "'file' and 'donor'"),
        ("file,donor\na.fcs,d1\na.fcs,d2\n", r"line 3 names a\.fcs again"),
        ("file,donor\na.fcs,\n", "line 2 has an empty"),
        ("file,donor\na.fcs,d1,more\n", "line 2 has an empty or surplus"),
        ("file,donor\n../a.fcs,d1\n", "file of this folder"),
        ("file,donor\nc.fcs,d1\n", r"c\.fcs does not exist"),
    ],
)
def test_a_table_says_what_is_wrong(tmp_path, table, says):
    with pytest.raises(DataError, match=says):
        read_cells(write(tmp_path, table))


def test_panels_that_differ_and_damaged_files_are_named(tmp_path):
    write(tmp_path, panel=PANEL | {"b.fcs": ["", "", "HLA-DR", "CD4"]})
    with pytest.raises(DataError, match=r"b\.fcs has no marker 'CD3'.*markers\.txt"):
        read_cells(tmp_path)
    (tmp_path / "markers.txt").write_text("HLA-DR\n")
    assert list(read_cells(tmp_path).var_names) == ["HLA-DR"]
    (tmp_path / "markers.txt").write_text("CD19\n")
    with pytest.raises(DataError, match="no marker 'CD19'"):
        read_cells(tmp_path)
    (tmp_path / "markers.txt").unlink()
    (tmp_path / "b.fcs").write_bytes((tmp_path / "b.fcs").read_bytes()[:300])
    with pytest.raises(DataError, match=r"b\.fcs cannot be read as FCS"):
        read_cells(tmp_path)


def test_a_folder_without_the_table_is_no_file_of_cells(tmp_path):
    with pytest.raises(DataError, match="must be one of"):
        read_cells(tmp_path)
