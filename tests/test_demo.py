"""The demo's table: every row whole, every attack a figure beside what guessing gives; the quick demos are played."""

import logging
import re

import numpy as np
import pytest

from cloister import demo
from cloister.demo import labels, models
from cloister.demo.story import HELD, KNOWN, Story, panel

CONTROL = re.compile(r"\((guessing|shuffled): \d")


def check_rows(lines):
    for row in lines:
        assert len(row) == len(demo.HEADER)
        attack = row[demo.HEADER.index("attack")]
        assert re.search(r"\d", attack), f"{row[:2]}: no figure in '{attack}'"
        assert CONTROL.search(attack), f"{row[:2]}: nothing to hold '{attack}' against"
        assert len(attack) <= 110


@pytest.fixture(scope="module")
def story():
    """The demo's, with fewer cells of each donor."""
    return Story.draw(n_cells=60)


@pytest.mark.parametrize("play", [labels.map_labels, labels.propagate_labels])
def test_quick_demos(play, story):
    runs, lines = play(story, None)
    assert {run.study.mode for run in runs} <= {row[1] for row in lines}
    check_rows(lines)
    check_together_is_better(lines)


def test_every_workflow_that_joins_sites_has_a_demo():
    from cloister import workflows

    apart = {"embed", "predict-cellcnn", "serve-model"}  # local, and what is done with a trained model
    assert set(demo.DEMOS) == set(workflows.SHIPPED) - apart


def test_each_site_has_labelled_what_it_knows_and_cells_for_scores_train_nowhere(story):
    kinds = set().union(*(set(t) for t in story.truth.values()))
    assert kinds <= {kind for known in KNOWN.values() for kind in known}  # each is known to somebody
    for p, a in story.sites.items():
        assert not (story.seen[p] & story.held[p]).any()
        assert set(story.truth[p][story.seen[p]]) <= set(KNOWN[p])
        np.testing.assert_array_equal(a.obs["cell_type"].astype(object)[story.seen[p]], story.truth[p][story.seen[p]])
        assert abs(story.held[p].mean() - HELD) < 0.13  # six standard deviations
        assert set(a.obs) == {"donor", "condition", "age", "cell_type"}  # nothing tells what is to be found


def test_the_story_is_told_in_figures_of_its_own(story):
    assert story.about.startswith("3 hospitals, 36 donors, 2160 lung cells. ")
    for word in ("simulated", "no seed was picked by what comes out"):
        assert word in story.about
    for play in demo.DEMOS.values():
        assert 20 < len(play.__doc__.partition("\n")[0]) < 130  # a row of the report


def test_one_set_of_cells_goes_through_the_story_and_its_files(story, tmp_path):
    again = Story.draw(n_cells=60)
    again.write(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"{p}.h5ad" for p in story.sites]
    for p, a in again.sites.items():
        assert (a.X != story.sites[p].X).nnz == 0
        assert list(a.obs["cell_type"].astype(str)) == list(story.sites[p].obs["cell_type"].astype(str))
    assert {p: a.obs_names.tolist() for p, a in story.integrated.items()} == {
        p: a.obs_names.tolist() for p, a in story.sites.items()
    }


def test_other_donors_have_the_same_disease_and_the_clone_changes_nobody_else():
    from cloister.cells.demo import demo_cohort

    first, grown, others = (demo_cohort(2, 40, **how) for how in ({}, {"clone": 0.5}, {"seed": 7}))
    for p, a in first.items():
        assert a.var["planted"].equals(others[p].var["planted"])
        assert (a.X != others[p].X).nnz > 0
        clone = grown[p].obs.pop("clone").to_numpy()
        assert a.obs.equals(grown[p].obs)
        changed = np.asarray((a.X != grown[p].X).sum(axis=1)).ravel() > 0
        np.testing.assert_array_equal(changed, clone)
        assert 0.2 < clone.mean() < 0.8 if p == "vienna" else clone.mean() < 0.25


def test_a_panel_has_its_genes_and_each_site_has_taken_its_mean_off(story):
    genes = tuple(story.sites["basel"].var_names[[5, 2]])
    for p, a in panel(story.sites, genes).items():
        assert tuple(a.var_names) == genes
        assert a.n_obs == story.sites[p].n_obs
        np.testing.assert_allclose(a.X.mean(axis=0), 0, atol=1e-4)
    later = panel({p: a[:1].copy() for p, a in story.sites.items()}, genes, like=story.sites)
    np.testing.assert_allclose(later["basel"].X, panel(story.sites, genes)["basel"].X[:1], atol=1e-5)


def number(text):
    return float(text.rstrip("%"))


def check_together_is_better(lines):
    """Working together visibly helps in every row that has a figure: by a point, or by 0.01 of a share."""
    for row in lines:
        alone, together = row[3:5]
        if together != "–" and row[1] in ("hardened", "plain"):
            assert number(together) >= number(alone) + (1.0 if "%" in together else 0.01), row[:6]


def test_fine_tuning_together_names_what_a_site_has_never_labelled(story):
    pytest.importorskip("torch")
    lines = models.fine_tune(story, None)[1]
    check_rows(lines)
    check_together_is_better(lines)
    assert number(lines[0][4]) > number(lines[0][3]) + 20


@pytest.mark.slow
def test_the_whole_demo(tmp_path):
    pytest.importorskip("seal")
    pytest.importorskip("torch")
    said = []
    table, page = demo.run_demo(tmp_path, say=said.append)
    check_rows(table[1:])
    check_together_is_better(table[1:])
    assert len(table) - 1 == 21
    text = page.read_text()
    assert all(word in text for word in ("no seed was picked", "What is measured", "a clone grows"))
    assert (tmp_path / "sites" / "vienna.h5ad").exists()


def test_a_warning_is_told_once_and_again_in_the_next_workflow(caplog):
    log = logging.getLogger("cloister")
    for _ in range(2):
        with demo.told_once():
            for text in ("one", "two", "one", "one"):
                log.warning(text)
    log.warning("one")
    assert [r.getMessage() for r in caplog.records] == ["one", "two", "one", "two", "one"]
