"""The demo's table: every row whole, every attack a figure beside what guessing gives; the quick demos are played."""

import re

import pytest

from cloister import demo
from cloister.demo import labels, rows

CONTROL = re.compile(r"\((guessing|shuffled): \d")


def check_rows(lines):
    for row in lines:
        assert len(row) == len(demo.HEADER)
        attack = row[demo.HEADER.index("attack")]
        assert re.search(r"\d", attack), f"{row[:2]}: no figure in '{attack}'"
        assert CONTROL.search(attack), f"{row[:2]}: nothing to hold '{attack}' against"
        assert len(attack) <= 110


@pytest.mark.parametrize("play", [labels.map_labels, labels.propagate_labels])
def test_quick_demos(play):
    runs, lines = play(None)
    assert {run.study.mode for run in runs} <= {row[1] for row in lines}
    check_rows(lines)


def test_every_workflow_that_joins_sites_has_a_demo():
    from cloister import workflows

    apart = {"embed", "predict-cellcnn", "serve-model"}  # local, and what is done with a trained model
    assert set(demo.DEMOS) == set(workflows.SHIPPED) - apart


def test_hidden_labels_are_told_apart_from_those_that_train():
    sites, truth, held = rows.hide_labels(0.2)
    for p, a in sites.items():
        assert a.obs["cell_type"].isna().to_numpy().tolist() == held[p].tolist()
        assert 0.1 < held[p].mean() < 0.3
        assert len(truth[p]) == a.n_obs


@pytest.mark.slow
def test_the_whole_demo(tmp_path):
    pytest.importorskip("seal")
    pytest.importorskip("torch")
    said = []
    table, page = demo.run_demo(tmp_path, say=said.append)
    check_rows(table[1:])
    assert len(table) - 1 == 17
    assert page.exists()
