"""Runs on cells that differ in only a few from those of earlier runs are rejected."""

import stat

import numpy as np
import pytest
from anndata import AnnData
from scipy import sparse

from cloister.cells.demo import demo_sites
from cloister.cells.files import read_cells, write_cells
from cloister.cells.fingerprint import RowPrints
from cloister.deploy.approval import own_cells
from cloister.deploy.approval.differencing import AnsweredCells
from cloister.deploy.kit import Kit
from cloister.disclosure import Thresholds
from cloister.errors import ParameterError, RefusedError
from cloister.study import Step, Study

pytest.importorskip("nvflare")
from cloister.deploy.provision import provision

LEAST = Thresholds(10, 3)


@pytest.fixture
def cells():
    rng = np.random.default_rng(3)
    adata = AnnData(sparse.csr_matrix(rng.poisson(1.0, (200, 30)).astype(float)))
    adata.obs_names = [f"cell{i}" for i in range(200)]
    adata.obs["donor"] = [f"d{i % 20}" for i in range(200)]
    return adata


@pytest.fixture
def answered(tmp_path):
    return AnsweredCells(tmp_path)


def run(answered, adata, name, donor_key=None):
    answered.check(adata, name, donor_key, LEAST)
    answered.admit(adata, name, donor_key, "study", LEAST)


def test_the_same_cells_may_be_used_again(answered, cells):
    run(answered, cells, "a")
    run(answered, cells, "a")
    run(answered, cells[::-1].copy(), "b")  # in another order


@pytest.mark.parametrize("fewer", [1, 9])
def test_a_few_cells_less_or_more_are_rejected(answered, cells, fewer):
    run(answered, cells, "a")
    with pytest.raises(RefusedError, match=f"differ from those of study 'study' .* by {fewer} cell.s., fewer than 10"):
        run(answered, cells[fewer:].copy(), "b")
    run(answered, cells[10:].copy(), "c")


def test_a_few_changed_values_are_rejected(answered, cells):
    run(answered, cells, "a")
    cells.X = cells.X + sparse.csr_matrix(([1.0], ([4], [4])), cells.shape)
    with pytest.raises(RefusedError, match="by 2 cell"):  # the row as it was and as it is
        run(answered, cells, "b")


def test_other_values_under_the_same_names_are_known_again(answered, cells):
    run(answered, cells, "a")
    cells.X = cells.X * 0.5
    with pytest.raises(RefusedError, match="by 1 cell"):
        run(answered, cells[1:].copy(), "b")
    run(answered, cells, "c")


def test_renamed_cells_are_known_again(answered, cells):
    run(answered, cells, "a")
    cells.obs_names = [f"other{i}" for i in range(200)]
    with pytest.raises(RefusedError, match="by 1 cell"):
        run(answered, cells[1:].copy(), "b")


def test_many_cells_of_two_donors_are_two_persons(answered, cells):
    run(answered, cells, "a", "donor")
    with pytest.raises(RefusedError, match="by 20 cell.s. of 2 donor"):
        run(answered, cells[~cells.obs["donor"].isin(["d0", "d1"])].copy(), "b", "donor")
    run(answered, cells[~cells.obs["donor"].isin(["d0", "d1", "d2"])].copy(), "c", "donor")


def test_three_runs_cannot_be_combined_to_isolate_a_cell(answered, cells):
    """Every pair differs in a hundred cells; all minus the first half minus the second half is one cell."""
    run(answered, cells[:100].copy(), "a")
    run(answered, cells[101:].copy(), "b")
    with pytest.raises(RefusedError, match=r"this run and 2 earlier one.s. rests on about 1 cell"):
        run(answered, cells, "c")
    run(answered, cells[:120].copy(), "d")


def test_three_runs_cannot_be_combined_to_the_sum_of_two_cells(answered, cells):
    """{X, a}, {Y, b} and X ∪ Y: no single atom is a combination, and two by two they differ in many cells."""
    run(answered, cells[:51].copy(), "a")
    run(answered, cells[100:151].copy(), "b")
    with pytest.raises(RefusedError, match=r"this run and 2 earlier one.s. rests on about 2 cell"):
        run(answered, cells[np.r_[0:50, 100:150]].copy(), "c")


def test_cells_that_were_renamed_and_normalised_in_another_order_of_genes_are_known_again(answered, cells):
    run(answered, cells, "a")
    other = cells[:, ::-1].copy()
    other.X = sparse.csr_matrix(np.log1p(other.X.toarray() / other.X.toarray().sum(axis=1, keepdims=True)))
    other.obs_names = [f"other{i}" for i in range(200)]
    with pytest.raises(RefusedError, match="by 1 cell"):
        run(answered, other[1:].copy(), "b")
    run(answered, other, "c")


def test_patterns_that_are_alike_in_most_cells_are_not_compared(answered):
    """A panel of markers that are all above zero, apart from three cells; then other cells of other donors."""
    rng = np.random.default_rng(1)
    one, two = (AnnData(1 + rng.random((50, 20))) for _ in range(2))
    one.X[:3, 0] = 0.0
    one.obs_names, two.obs_names = ([f"{name}{i}" for i in range(50)] for name in "ab")
    run(answered, one, "a")
    run(answered, two, "b")


def test_one_of_two_equal_cells_is_a_cell(answered, cells):
    """Renamed, so that only values are known again."""
    twice = AnnData(sparse.vstack([cells.X, cells.X[:20]]).tocsr())
    twice.obs_names = [f"cell{i}" for i in range(220)]
    run(answered, twice, "a")
    twice.obs_names = [f"other{i}" for i in range(220)]
    with pytest.raises(RefusedError, match="by 1 cell"):
        run(answered, twice[:219].copy(), "b")


def test_a_study_that_names_no_donors_does_not_hide_that_one_is_missing(answered, cells):
    cells.obs["donor"] = [f"d{i // 20}" for i in range(200)]
    run(answered, cells, "a")
    with pytest.raises(RefusedError, match="by 20 cell.s. of 1 donor"):
        run(answered, cells[20:].copy(), "b", "donor")


def test_two_runs_that_begin_at_the_same_time_are_compared(answered, cells):
    """Both were checked before either was stored."""
    answered.check(cells, "a", None, LEAST)
    answered.check(cells[1:].copy(), "b", None, LEAST)
    answered.admit(cells, "a", None, "study", LEAST)
    with pytest.raises(RefusedError, match="by 1 cell"):
        answered.admit(cells[1:].copy(), "b", None, "study", LEAST)


def test_fingerprints_without_their_key_end_in_one_sentence(answered, cells, tmp_path):
    run(answered, cells, "a")
    (tmp_path / "answered.key").unlink()
    with pytest.raises(ParameterError, match="answered.key is missing"):
        run(answered, cells[1:].copy(), "b")


def test_records_of_earlier_versions_are_read(answered, cells, tmp_path):
    """Without patterns."""
    run(answered, cells, "a")
    path = tmp_path / "answered.npz"
    stored = dict(np.load(path))
    del stored["pattern0"]
    stored["index"] = np.frombuffer(stored["index"].tobytes().replace(b', "patterns": true', b""), np.uint8)
    np.savez(path, **stored)
    with pytest.raises(RefusedError, match="by 1 cell"):
        run(answered, cells[1:].copy(), "b")


def test_names_and_values_are_stored_only_under_a_private_key(answered, cells, tmp_path):
    run(answered, cells, "a")
    for name in ("answered.key", "answered.npz"):
        assert stat.S_IMODE((tmp_path / name).stat().st_mode) == 0o600
    one, two = (RowPrints.of(cells, bytes([k]) * 32) for k in (1, 2))
    assert not np.isin(one.name, two.name).any()
    assert b"cell17" not in (tmp_path / "answered.npz").read_bytes()


def test_a_damaged_record_ends_in_one_sentence(answered, cells, tmp_path):
    run(answered, cells, "a")
    (tmp_path / "answered.npz").write_bytes(b"nothing")
    with pytest.raises(ParameterError, match="cells of earlier runs are unknown"):
        run(answered, cells, "b")


def test_a_kit_rejects_small_changes_unless_the_approval_allows_them(tmp_path):
    parties = {"hub": "coordinator", "basel": "site", "lugano": "site", "vienna": "site"}
    study = Study("small", "bin-values", parties, network={"host": "localhost", "port": 18777})
    kit = Kit.open(provision(study, tmp_path)["basel"])
    file = kit.path / "cells.h5ad"
    write_cells(demo_sites()["basel"], file)
    kit.approve("Ann")
    kit.count_run(kit.policy(), read_cells(file))
    write_cells(read_cells(file)[1:].copy(), file)
    with pytest.raises(RefusedError, match="by 1 cell.*--allow-small-change"):
        kit.approve("Ann")
    entry = kit.approve("Ann", small_change=True)
    assert entry.record["small_change"] is True
    kit.count_run(kit.policy(), read_cells(file))
    assert len(kit.answered(kit.policy())._load()) == 2


def with_labels(adata, labels):
    adata = adata.copy()
    adata.obs["cell_type"] = labels
    return adata


@pytest.fixture
def labels():
    return np.repeat(["B", "T", "NK"], [60, 80, 60]).astype(object)


def run_labelled(answered, adata, name):
    answered.check(adata, name, None, LEAST, ["cell_type"])
    answered.admit(adata, name, None, "study", LEAST, ["cell_type"])


def test_a_few_relabelled_cells_are_rejected(answered, cells, labels):
    run_labelled(answered, with_labels(cells, labels), "a")
    run_labelled(answered, with_labels(cells, labels), "a")
    other = labels.copy()
    other[:3] = "T"
    with pytest.raises(RefusedError, match="3 cell.s. have another 'cell_type' since study 'study'"):
        run_labelled(answered, with_labels(cells, other), "a")
    other[:12] = "T"
    run_labelled(answered, with_labels(cells, other), "a")


def test_a_group_that_a_single_new_cell_joins_is_rejected(answered, cells, labels):
    """Twelve cells more, but one of them alone in its group: sums per label differ by that cell."""
    run_labelled(answered, with_labels(cells, labels)[:-12].copy(), "a")
    labels[-1] = "B"
    with pytest.raises(RefusedError, match="one group of 'cell_type' differs by 1 cell"):
        run_labelled(answered, with_labels(cells, labels), "b")


def test_columns_of_two_studies_are_compared_only_where_both_read_them(answered, cells, labels):
    run(answered, cells, "a")
    run_labelled(answered, with_labels(cells, labels), "a")
    run(answered, cells, "a")


def as_step(answered, adata, labels, name, study="study", matrix="a"):
    """A run of two steps: the second one reads labels that the first one wrote."""
    answered.admit(adata, matrix, None, study, LEAST)
    adata = adata.copy()
    adata.obs[name] = labels
    answered.admit_step(adata, matrix, study, LEAST, [name], [name])


def test_labels_that_a_step_made_are_compared_whatever_they_are_called(answered, cells, labels):
    """The second study calls its clusters otherwise; one cell is on the other side of a border."""
    as_step(answered, cells, labels, "cluster", "first")
    as_step(answered, cells, labels, "leiden", "second")
    as_step(answered, cells, np.char.add("c", labels.astype(str)), "leiden2")  # the same groups
    other = labels.copy()
    other[0] = "T"
    with pytest.raises(
        RefusedError, match="a group of 'kmeans' differs from one of 'cluster' of study 'first' .* by 1 c"
    ):
        as_step(answered, cells, other, "kmeans")
    other[:10] = "T"
    as_step(answered, cells, other, "kmeans")


def test_labels_of_the_file_and_of_a_step_are_compared(answered, cells, labels):
    run_labelled_groups(answered, with_labels(cells, labels), "a")
    other = labels.copy()
    other[59] = "T"
    with pytest.raises(RefusedError, match="differs from one of 'cell_type' .* by 1 cell"):
        as_step(answered, cells, other, "cluster")


def run_labelled_groups(answered, adata, matrix, donor_key=None):
    answered.admit(adata, matrix, donor_key, "study", LEAST, ["cell_type"], ["cell_type"])


def test_a_union_of_groups_less_another_group_is_a_group(answered, cells):
    """Other clusters are split in the second run, and the border around both moves past one cell."""
    first = np.repeat(["1", "2", "3", "4"], [40, 40, 60, 60]).astype(object)
    second = np.repeat(["1", "2", "3", "4"], [20, 61, 59, 60]).astype(object)
    second[-20:] = "3"
    as_step(answered, cells, first, "a")
    with pytest.raises(RefusedError, match="a combination of groups of 'b' and of 1 column.* rests on about 1 cell"):
        as_step(answered, cells, second, "b")
    as_step(answered, cells, np.repeat(["1", "2", "3"], [20, 75, 105]).astype(object), "b")


def test_small_labels_together_are_a_group(answered, cells):
    """`find-markers` adds them up as "others" if they reach the thresholds together."""
    first = np.repeat(["B", "T", "x", "y"], [90, 90, 8, 12]).astype(object)
    first[188:194] = "z"  # y has six then
    as_step(answered, cells, first, "a")
    second = first.copy()
    second[185], second[0] = "B", "z"
    second[60:90] = "T"
    with pytest.raises(RefusedError, match="differs from one of 'a' .* by 2 cell"):
        as_step(answered, cells, second, "b")


def test_a_step_that_leaves_out_a_few_cells_is_rejected(answered, cells, labels):
    answered.admit(cells, "a", None, "study", LEAST)
    with pytest.raises(RefusedError, match="differ from those of study 'study' .* by 3 cell"):
        answered.admit_step(cells[3:].copy(), "a", "study", LEAST, [], [])
    answered.admit_step(cells[10:].copy(), "a", "study", LEAST, [], [])
    with pytest.raises(RefusedError, match="by 1 cell"):
        answered.admit_step(cells[11:].copy(), "a", "study", LEAST, [], [])
    renamed = cells.copy()
    renamed.obs_names = [f"other{i}" for i in range(200)]
    with pytest.raises(RefusedError, match="added or renamed"):
        answered.admit_step(renamed, "a", "study", LEAST, [], [])


def test_groups_that_differ_in_many_cells_of_two_donors_are_rejected(answered, cells, labels):
    cells.obs["donor"] = [f"d{i // 10}" for i in range(200)]
    run_labelled_groups(answered, with_labels(cells, labels), "a", "donor")
    other = labels.copy()
    other[:20] = "T"  # two donors
    with pytest.raises(RefusedError, match="by 20 cell"):
        as_step(answered, cells, other, "cluster")
    other[:30] = "T"
    as_step(answered, cells, other, "cluster")


def test_groups_of_renamed_cells_are_compared(answered, cells, labels):
    run_labelled_groups(answered, with_labels(cells, labels), "a")
    cells.obs_names = [f"other{i}" for i in range(200)]
    labels[0] = "T"
    cells.obs["cluster"] = labels
    with pytest.raises(RefusedError, match="a group of 'cluster' differs from one of 'cell_type' .* by 1 cell"):
        answered.admit(cells, "b", None, "study", LEAST, ["cluster"], ["cluster"])


def test_columns_of_records_of_earlier_versions_count_as_groups(answered, cells, labels, tmp_path):
    run_labelled_groups(answered, with_labels(cells, labels), "a")
    path = tmp_path / "answered.npz"
    stored = dict(np.load(path))
    stored["index"] = np.frombuffer(stored["index"].tobytes().replace(b', "groups": ["cell_type"]', b""), np.uint8)
    np.savez(path, **stored)
    labels[0] = "T"
    with pytest.raises(RefusedError, match="by 1 cell"):
        as_step(answered, cells, labels, "cluster")


def test_columns_that_are_only_drawn_or_not_made_yet_are_not_compared():
    parties = {"hub": "coordinator", "basel": "site", "lugano": "site", "vienna": "site"}
    steps = (
        Step("cluster-cells", options={"use_rep": "X_pca", "donor_key": "donor"}, name="clusters"),
        Step("find-markers", options={"label_key": "cluster", "donor_key": "donor"}, name="markers"),
    )
    study = Study("two", "", parties, steps=steps)
    assert {"cell_type", "cluster"} <= own_cells.columns_named(study)
    assert {"cell_type", "cluster"}.isdisjoint(own_cells.columns_read(study))
    last = study.parts[1]
    assert {"cluster", "donor"} <= own_cells.columns_read(last)
    assert "donor" not in own_cells.columns_read(last, grouped=True)
    assert "cluster" in own_cells.columns_read(last, grouped=True)
