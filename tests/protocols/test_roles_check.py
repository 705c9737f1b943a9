"""Every role calls its checks: the coordinator, or a site, says one impossible thing, and the others name the line."""

from dataclasses import replace

import numpy as np
import pytest
from liars import Says, answers

from cloister.errors import DataError
from cloister.mpc.sums import (
    checked_sum,
    common_seed,
    consistency_check,
    count_tests,
    pooled_quantiles,
    pooled_scaling,
    secure_sum,
)
from cloister.papers import federated_training, row_sums
from cloister.study import Party
from cloister.testing import Case, run_protocol
from cloister.workflows.common import common_genes, common_space
from cloister.workflows.find_outliers import counted_forest
from cloister.workflows.fine_tune.training_parts import Offer
from cloister.workflows.shared_pca import shared_pca

HUB = Party("hub")
SITES = A, B, C = tuple(map(Party, "abc"))
STRANGER = Party("x")


def codes(*lie):
    return {(line, code) for _, line, code in answers(*lie, timeout=3.0).values()}


def summed(to_all=False):
    return Case(secure_sum.Params(SITES, HUB, 2, to_all=to_all), {u: (np.zeros(2, np.uint64),) for u in SITES})


def table():
    rng = np.random.default_rng(0)
    params = counted_forest.Params(SITES, HUB, trees=2, sample=32, min_cells=4)
    return Case(params, {u: ("table", ["x", "y"], rng.normal(size=(20, 2))) for u in SITES})


def count_case():
    params = count_tests.Params(SITES, HUB, 3, 4, 60)
    return Case(params, dict.fromkeys(SITES, (np.ones(3, np.int64), bytes(32))))


def rows():
    rng = np.random.default_rng(0)
    return Case(pooled_scaling.Params(SITES, HUB, 2), {u: (rng.normal(3, 1, (20, 2)),) for u in SITES})


def cells():
    rng = np.random.default_rng(9)
    weights, names = rng.gamma(1.0, 3.0, 12), tuple(f"G{i:02d}" for i in range(12))
    xs = {u: (shared_pca.Cells(names, rng.poisson(weights, (60, 12)).astype(float)),) for u in SITES}
    return Case(shared_pca.Params(SITES, HUB, n_top_genes=6, n_components=2), xs)


def quantiles():
    rng = np.random.default_rng(0)
    params = pooled_quantiles.Params(SITES, HUB, 4, True, cells=2, parts=64)
    return Case(params, {u: (rng.integers(1, 60, 30).astype(float),) for u in SITES})


def genes():
    return Case(common_genes.Params(SITES, HUB), dict.fromkeys(SITES, ("counts", ["g1", "g2", "g3"])))


def seeds():
    return Case(common_seed.Params(SITES, HUB), {})


def matrices():
    return Case(row_sums.Params(SITES, (1, 1, 1), HUB, 1), {u: (np.zeros((3, 1), np.uint64),) for u in SITES})


class Pupil:
    size, digest, cells = 4, bytes(32), 30

    def train(self, theta, t, rate):
        return np.full(4, 0.1), 0.5

    def score(self, theta):
        return np.array([[9.0, 1.0], [2.0, 8.0]]), 4.0


def training():
    inputs = {u: (Offer("x", ("p", "q"), lambda labels: Pupil()),) for u in SITES}
    return Case(federated_training.Params(SITES, HUB, "pupil", rounds=1), inputs)


def first(keys, **changes):
    """A map of messages in which those of one party are changed."""
    return {u: replace(m, **changes) if u == B else m for u, m in keys.items()}


noise = np.random.default_rng(1).integers(0, 2**64, 10_000, dtype=np.uint64)
SAYS = [  # protocol, case, liar, message, change, nth, line and code that somebody must name
    (
        common_space,
        lambda: Case(common_space.Params(SITES, HUB, "X_pca"), dict.fromkeys(SITES, ("12",))),
        HUB,
        common_space.Agreed,
        lambda m: replace(m, digest="34"),
        None,
        ("L2", "other-space"),
    ),
    (
        consistency_check,
        lambda: Case(consistency_check.Params(SITES, HUB), {}),
        HUB,
        consistency_check.Signatures,
        lambda m: replace(m, signatures=m.signatures | {B: m.signatures[A]}),  # A's in place of B's
        None,
        ("V2", "signature"),
    ),
    (
        secure_sum,
        summed,
        HUB,
        secure_sum.Survivors,
        lambda m: replace(m, parties=(A, B, STRANGER)),
        None,
        ("L6", "survivors"),
    ),
    (secure_sum, summed, HUB, secure_sum.Survivors, lambda m: replace(m, parties=(A, A, B)), None, ("L6", "survivors")),
    (secure_sum, summed, HUB, secure_sum.Survivors, lambda m: replace(m, parties=(A, B)), None, ("L6", "survivors")),
    (
        secure_sum,
        summed,
        HUB,
        secure_sum.Roster,
        lambda m: replace(m, keys=m.keys | {STRANGER: m.keys[A]}),
        None,
        ("L2", "roster"),
    ),
    (
        secure_sum,
        summed,
        HUB,
        secure_sum.Vouches,
        lambda m: replace(m, signatures=m.signatures | {STRANGER: b""}),
        None,
        ("L8", "split-view"),
    ),
    (
        secure_sum,
        summed,
        HUB,
        secure_sum.SharesFor,
        lambda m: replace(m, sealed=m.sealed | {STRANGER: b""}),
        None,
        ("L4", "shares"),
    ),
    (secure_sum, summed, HUB, secure_sum.SharesFor, lambda m: replace(m, sealed={}), None, ("L4", "shares")),
    (secure_sum, summed, A, secure_sum.Shares, lambda m: replace(m, sealed={B: m.sealed[B]}), None, ("L3", "shares")),
    (secure_sum, summed, A, secure_sum.Unmask, lambda m: replace(m, seed_shares={}), None, None),
    (
        row_sums,
        matrices,
        HUB,
        row_sums.Keys,
        lambda m: replace(m, keys=first(m.keys, signature=bytes(64))),
        None,
        ("L2", "signature"),
    ),
    (row_sums, matrices, A, row_sums.MaskedRows, lambda m: replace(m, rows=m.rows[:1]), None, ("L3", "malformed")),
    (
        common_seed,
        seeds,
        HUB,
        common_seed.Roster,
        lambda m: replace(m, keys=first(m.keys, signature=bytes(64))),
        None,
        ("L2", "signature"),
    ),
    (common_seed, seeds, HUB, common_seed.PartsFor, lambda m: replace(m, sealed={}), None, ("L4", "parts")),
    (
        common_seed,
        seeds,
        HUB,
        common_seed.PartsFor,
        lambda m: replace(m, sealed=m.sealed | {STRANGER: b""}),
        None,
        ("L4", "parts"),
    ),
    (common_seed, seeds, HUB, common_seed.Confirms, lambda m: replace(m, confirms={}), None, ("L6", "split-view")),
    (common_seed, seeds, A, common_seed.Parts, lambda m: replace(m, sealed={B: m.sealed[B]}), None, ("L3", "parts")),
    (common_genes, genes, HUB, common_genes.Common, lambda m: replace(m, names=b"g1\ng9"), None, ("L2", "genes")),
    (common_genes, genes, HUB, common_genes.Common, lambda m: replace(m, kind="log"), None, ("L2", "mixed-values")),
    (common_genes, genes, A, common_genes.Measured, lambda m: replace(m, kind="log"), None, ("L1", "mixed-values")),
    (common_genes, genes, A, common_genes.Measured, lambda m: replace(m, names=b"h1"), None, ("L1", "no-common-genes")),
    (
        pooled_quantiles,
        quantiles,
        HUB,
        pooled_quantiles.Refine,
        lambda m: replace(m, cells=np.array([-1])),
        None,
        ("L2", "cells"),
    ),
    (
        pooled_quantiles,
        quantiles,
        HUB,
        pooled_quantiles.Edges,
        lambda m: replace(m, edges=-m.edges),
        None,
        ("L4", "edges"),
    ),
    (
        pooled_quantiles,
        quantiles,
        HUB,
        pooled_quantiles.Edges,
        lambda m: replace(m, again=True),
        None,
        ("L4", "restarts"),
    ),
    (
        pooled_quantiles,
        quantiles,
        A,
        secure_sum.MaskedInput,
        lambda m: replace(m, y=noise[: len(m.y)]),
        0,
        ("L1", "damaged"),
    ),
    (
        pooled_quantiles,
        quantiles,
        A,
        secure_sum.MaskedInput,
        lambda m: replace(m, y=noise[: len(m.y)]),
        1,
        ("L3", "damaged"),
    ),
    (shared_pca, cells, HUB, shared_pca.Chosen, lambda m: replace(m, deviation=-m.deviation), None, ("L4", "genes")),
    (
        shared_pca,
        cells,
        HUB,
        shared_pca.Components,
        lambda m: replace(m, components=m.components * 2),
        None,
        ("L6", "components"),
    ),
    (shared_pca, cells, A, secure_sum.MaskedInput, lambda m: replace(m, y=noise[: len(m.y)]), 0, ("L3", "damaged")),
    (shared_pca, cells, A, secure_sum.MaskedInput, lambda m: replace(m, y=noise[: len(m.y)]), 1, ("L5", "damaged")),
    (pooled_scaling, rows, HUB, checked_sum.Total, lambda m: replace(m, z=m.z * np.uint64(0)), None, ("L4", "changed")),
    (counted_forest, table, HUB, checked_sum.Total, lambda m: replace(m, z=m.z * np.uint64(0)), 2, ("L4", "changed")),
    (
        federated_training,
        training,
        HUB,
        federated_training.Vocabulary,
        lambda m: replace(m, labels=("p",)),
        None,
        ("L2", "labels"),
    ),
    (
        federated_training,
        training,
        HUB,
        federated_training.Vocabulary,
        lambda m: replace(m, labelled=()),
        None,
        ("L2", "labels"),
    ),
    (federated_training, training, HUB, federated_training.Task, lambda m: replace(m, total=1.0), None, ("L5", "task")),
    (
        federated_training,
        training,
        HUB,
        federated_training.Weights,
        lambda m: replace(m, theta=m.theta + 1),
        None,
        ("L5", "weights"),
    ),
    (
        federated_training,
        training,
        HUB,
        federated_training.Model,
        lambda m: replace(m, theta=m.theta + 1e9),
        None,
        ("L10", "weights"),
    ),
    (
        federated_training,
        training,
        A,
        secure_sum.MaskedInput,
        lambda m: replace(m, y=noise[: len(m.y)]),
        0,
        ("L4", "damaged"),
    ),
    (
        federated_training,
        training,
        A,
        secure_sum.MaskedInput,
        lambda m: replace(m, y=noise[: len(m.y)]),
        1,
        ("L6", "damaged"),
    ),
    (
        federated_training,
        training,
        A,
        secure_sum.MaskedInput,
        lambda m: replace(m, y=noise[: len(m.y)]),
        2,
        ("L9", "damaged"),
    ),
    (
        federated_training,
        training,
        A,
        federated_training.Brings,
        lambda m: replace(m, shape="y"),
        None,
        ("L1", "mismatch"),
    ),
    (
        federated_training,
        training,
        A,
        federated_training.Ready,
        lambda m: replace(m, digest=b"y"),
        None,
        ("L3", "mismatch"),
    ),
]


@pytest.mark.parametrize(
    "row", SAYS, ids=[f"{row[0].__name__.rpartition('.')[2]}-{row[3].__name__}-{i}" for i, row in enumerate(SAYS)]
)
def test_an_impossible_message_is_named(row):
    module, case, liar, kind, change, nth, wanted = row
    found = codes(module, case(), liar, kind, change, nth)
    assert wanted is None or wanted in found, found


def test_a_site_checks_its_own_before_anything_is_sent():
    bad = [
        (pooled_quantiles, quantiles(), (np.array([-1.0]),)),
        (pooled_scaling, rows(), (np.full((3, 2), np.inf),)),
        (count_tests, count_case(), (np.full(3, 61), bytes(32))),
        (counted_forest, table(), ("table", ["x"], np.zeros((3, 2)))),
        (shared_pca, cells(), (shared_pca.Cells(("G00",), np.ones((3, 1))),)),
    ]
    for module, case, mine in bad:
        run = run_protocol(module, Case(case.params, {**case.inputs, A: mine}), timeout=2.0)
        assert isinstance(run.errors[A], DataError)
        sent = [e.name for e, _ in run.receipts[A].entries if e.kind == "sent"]
        assert {n for n in sent if not n.startswith("channel.")} == set()


def test_the_stage_changes_what_it_should():
    stage = Says(HUB, secure_sum.Vouch, lambda m: replace(m, signature=b"y"), 1)
    msg = secure_sum.Vouch(b"x")
    assert [stage.instead(A, msg)[0].signature for _ in range(3)] == [b"x", b"y", b"x"]
