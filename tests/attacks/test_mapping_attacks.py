"""References rebuilt from what a mapping shows: distances give them away, labels do not."""

import re

import numpy as np
import pytest

import cloister as cl
from cloister.cells import tables as cells
from cloister.demo import attacks
from cloister.mpc.crypto.replicated import Ring
from cloister.papers import plain_knn
from cloister.papers.attacks import trilateration
from cloister.papers.attacks.sent import Sent
from cloister.rehearsal.rehearsal import rehearse


def attacked(mode):
    """References rebuilt, of how many, and by guessing, from a run of that mode."""
    sites = {p: a[::2].copy() for p, a in cl.demo_sites().items()}
    sent = Sent(plain_knn.Queries, plain_knn.Nearest)
    run = rehearse("map-labels", sites, mode=mode, query="vienna", use_rep="X_pca", on_frame=sent)
    x = {p: cells.embedding(a, "X_pca") for p, a in sites.items()}
    text = attacks.references_rebuilt(sent, x, "vienna", run.data["vienna"].obs["mapped"].to_numpy())
    return {p: len(v) for p, v in x.items()}, *map(int, re.findall(r"\d+", text))


@pytest.mark.parametrize(("mode", "bites"), [("plain", True), ("hardened", False)])
def test_a_run_gives_references_away_in_plain_mode_only(mode, bites):
    sizes, hits, of, luck = attacked(mode)
    assert of == sizes["basel"] + sizes["lugano"]
    assert hits > 0.05 * of if bites else hits <= luck
    assert luck <= 0.01 * of


def test_the_querier_reads_references_where_shares_are_not_random(monkeypatch):
    monkeypatch.setattr(Ring, "draw", lambda self, prg, shape: np.zeros(shape, self.dtype))
    sizes, hits, _, luck = attacked("hardened")
    assert hits == sizes["basel"] + sizes["lugano"]
    assert luck == 0


def test_labels_alone_find_references_only_where_they_lie_on_top_of_the_queries():
    """The attack is no dead letter: it finds the mean of a tight cluster of queries that share a label."""
    rng = np.random.default_rng(0)
    centres = 10 * rng.normal(size=(5, 3))
    labels = np.repeat(np.arange(5), 20)
    queries = centres[labels] + 1e-3 * rng.normal(size=(100, 3))
    guesses = trilateration.among_labels(queries, labels)
    assert trilateration.hits(guesses, centres, within=0.01) == 5
    assert trilateration.hits(trilateration.among_labels(queries, rng.permutation(labels)), centres, within=0.001) < 5
    assert trilateration.hits(guesses, centres + 1.0, within=0.01) == 0
