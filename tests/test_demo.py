"""The demo's table: every row whole, every attack a figure beside what guessing gives; the quick demos are played."""

import re

import pytest

from cloister import demo
from cloister.demo import labels, models, rows

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


def test_each_site_has_labelled_what_it_knows_and_cells_for_scores_train_nowhere():
    sites, truth, held, seen = rows.hide_labels(0.2, rows.KNOWN)
    kinds = set().union(*(set(t) for t in truth.values()))
    assert kinds == {kind for known in rows.KNOWN.values() for kind in known}  # each is known to somebody
    for p, a in sites.items():
        assert a.obs["cell_type"].notna().to_numpy().tolist() == seen[p].tolist()
        assert not (seen[p] & held[p]).any()
        assert set(truth[p][seen[p]]) <= set(rows.KNOWN[p])
        assert 0.1 < held[p].mean() < 0.3
        assert len(truth[p]) == a.n_obs


def number(text):
    return float(text.rstrip("%"))


def check_together_is_better(lines):
    """Working together visibly helps in every row that has a figure: by a point, or by 0.01 of a share."""
    for row in lines:
        federated, alone = row[4:6]
        if federated != "–" and row[1] in ("hardened", "plain"):
            assert number(federated) >= number(alone) + (1.0 if "%" in federated else 0.01), row[:6]


def test_fine_tuning_together_names_what_a_site_has_never_labelled():
    pytest.importorskip("torch")
    lines = models.fine_tune(None)[1]
    check_rows(lines)
    check_together_is_better(lines)
    assert number(lines[0][4]) > number(lines[0][5]) + 20  # 88.7 % beside 42.3 %


@pytest.mark.slow
def test_the_whole_demo(tmp_path):
    pytest.importorskip("seal")
    pytest.importorskip("torch")
    said = []
    table, page = demo.run_demo(tmp_path, say=said.append)
    check_rows(table[1:])
    check_together_is_better(table[1:])
    assert len(table) - 1 == 20
    assert page.exists()
