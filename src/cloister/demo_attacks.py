"""What the demo's parties could make of what they are shown: attacks of `cloister.attacks`, on the demo's own data.

Where a mode opens a value that no file keeps (masked rows, a forest, distances), it is computed here in the clear by
the functions that the protocol itself uses; the tests of the protocols hold the two equal.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np


def rows_unmasked(rows: Mapping[str, Any]) -> str:
    """Published find-outliers: the principal server with a few rows of one client."""
    from cloister.attacks import masked_rows
    from cloister.crypto.entropy import Entropy
    from cloister.protocols import masked_forest

    parts = [np.asarray(a.X, dtype=np.float64) for a in rows.values()]
    X = np.concatenate(parts)
    known = X.shape[1] + 1
    masked = np.rint(X @ masked_forest.masking_matrix(Entropy().bytes(32), X.shape[1], 10.0) * 2**20) / 2**20
    found = masked_rows.unmask(masked, masked_rows.solve_mask(masked[:known], X[:known]))
    others = slice(len(parts[0]), None)
    right = np.abs(found - X)[others].max(axis=1) < 0.01
    return f"{right.mean():.0%} of others' rows, from {known} known ones"


def rows_rebuilt(rows: Mapping[str, Any]) -> str:
    """Hardened find-outliers: a site with the forest it is handed, against as many blind guesses."""
    from cloister.attacks import opened_forest
    from cloister.protocols import counted_forest, pooled_scaling
    from cloister.study import Party

    X = np.concatenate([np.asarray(a.X, dtype=np.float64) for a in rows.values()])
    rng = np.random.default_rng(0)
    scaling = pooled_scaling.scaling_of(X)
    Z = scaling.apply(X)
    params = counted_forest.Params(tuple(map(Party, rows)), Party("coordinator"))
    _, geometry, outline = counted_forest.grow_plainly(params, scaling, Z, bytes(32), rng)
    view = opened_forest.view(params, outline, geometry.splits, geometry.axes, len(Z), Z.shape[1])
    guess = opened_forest.rebuild(view, most=2000, rng=rng)
    share, alone = opened_forest.rebuilt(Z, guess, within=0.2)
    luck, _ = opened_forest.rebuilt(Z, opened_forest.lucky(Z, max(len(guess), 1), rng), within=0.2)
    return f"{share:.0%} of {alone} lone rows (guessing: {luck:.0%})"


def points_and_labels(
    vectors: Mapping[str, Any], given: Mapping[str, Any], bits: int, neighbours: int = 10
) -> dict[str, str]:
    """propagate-labels: vectors that server and first site rebuild together, labels that the first site solves for."""
    from cloister.attacks import propagation as attack
    from cloister.models import graph

    names = [*vectors]
    V = np.concatenate([vectors[p] for p in names])
    labels = np.concatenate([np.asarray(given[p], dtype=object) for p in names])
    classes = sorted({x for x in labels if x is not None})
    numbers = np.array([-1 if x is None else classes.index(x) for x in labels])
    codes = graph.codes(V, graph.hyperplanes(bytes(32), bits, V.shape[1]))
    H = graph.hamming(codes, codes)
    keys = graph.smallest(H, 0, neighbours)
    own = len(vectors[names[0]])
    known, rest = np.arange(own), np.arange(own, len(V))

    def cosine(similar: Any) -> float:
        return float(np.median(attack.hits(attack.rebuild_vectors(similar, known, V[known]), V)[rest]))

    labelled = np.flatnonzero(numbers >= 0)
    mine, others = labelled[labelled < own], labelled[labelled >= own]
    W = graph.adjacency(keys, bits)
    S = np.concatenate([block for _, block in graph.influence(W, 0.99, labelled, labelled)], axis=1)
    scores = S.astype(np.int64) @ graph.one_hot(numbers[labelled], len(classes))
    at = {int(point): i for i, point in enumerate(labelled)}
    columns = S[np.ix_(labelled, [at[int(i)] for i in mine])]
    places = np.array([at[int(i)] for i in mine]), np.array([at[int(i)] for i in others])
    chance = np.bincount(numbers[others]).max() / len(others)

    def solved(seen: Any) -> float:
        guess = attack.solve_labels(seen, scores[mine], places[0], numbers[mine], places[1])
        return float(np.mean(guess == numbers[others]))

    seen = cosine(attack.cosines(H, bits))
    return {
        "published": f"vectors to cosine {seen:.2f}; {solved(columns):.0%} of others' labels",
        "hardened": f"vectors to cosine {cosine(attack.paths(keys, bits)):.2f} by server and a site; labels as guessed "
        f"({solved(None):.0%}; most frequent: {chance:.0%})",
    }


def block_fitted(adata: Any) -> str:
    """Published adapt-model: a site fits a block of the encoder from activations of mixtures of its own cells."""
    from cloister.attacks.block_regression import fit_block
    from cloister.demo_data import demo_encoder
    from cloister.models import polynomial
    from cloister.models.student import cell_inputs
    from cloister.workflows.adapt_model import inputs_of

    encoder = polynomial.Encoder.load(demo_encoder())
    own, rng, n = inputs_of(adata, encoder.card)[..., 0], np.random.default_rng(0), 2000
    i, j = rng.integers(0, len(own), (2, n))
    w = rng.random((n, 1))
    mixed = cell_inputs(w * own[i] + (1 - w) * own[j])
    before, after = (np.asarray(b).reshape(n, -1) for b in polynomial.hidden(encoder, mixed)[1:3])
    return f"block 2 of the model, R² {fit_block(before, after, components=10):.2f}"
