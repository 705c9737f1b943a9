"""Every check of a site, with exactly one thing wrong: each condition has to stop what no other one stops.

What is signed is signed when a test runs, and not before, so that a weakened signature is weak on both sides.
"""

import asyncio
import functools
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from cloister.errors import DataError, ProtocolAbort
from cloister.mpc.crypto import shamir
from cloister.mpc.crypto.agreement import Identity, key_pair
from cloister.mpc.crypto.entropy import Entropy
from cloister.mpc.net import wire
from cloister.mpc.sums import (
    common_seed,
    consistency_check,
    pooled_quantiles,
    pooled_scaling,
    retry_without_dropouts,
    secure_sum,
    signatures,
)
from cloister.mpc.sums.value_counts import Table
from cloister.papers import row_sums
from cloister.study import Party
from cloister.workflows.common import common_genes
from cloister.workflows.find_outliers import counted_forest
from cloister.workflows.fine_tune import training_terms
from cloister.workflows.fine_tune.pseudo_labels import Pseudo
from cloister.workflows.shared_pca import shared_pca

HUB = Party("hub")
SITES = A, B, C, D, E = tuple(map(Party, "abcde"))
PEOPLE = {u: Identity.create(Entropy()) for u in SITES}
CH = SimpleNamespace(
    me=A,
    run_id=bytes(range(32)),
    agreement=SimpleNamespace(keys={u: p.public for u, p in PEOPLE.items()}, quorum=lambda n: n // 2 + 1),
)


def refused(code, check, *args):
    with pytest.raises(ProtocolAbort) as e:
        check(*args)
    assert e.value.code == code
    assert e.value.line


# ---- secure sum ------------------------------------------------------------------------------------------------------

SUM = secure_sum.Params(SITES, HUB, 3)


def sum_keys(u, signer=None, run_id=CH.run_id, c=None, s=None):
    c, s = c or key_pair(Entropy()).public, s or key_pair(Entropy()).public
    signature = PEOPLE[signer or u].sign("secure_sum/keys", secure_sum.signed_keys(run_id, u, c, s))
    return secure_sum.Keys(c, s, signature)


@functools.cache
def roster():
    return {u: sum_keys(u) for u in SITES}


def test_a_good_roster_passes():
    secure_sum.check_roster(SUM, CH, roster(), roster()[A], SITES)
    secure_sum.check_roster(SUM, CH, {u: roster()[u] for u in (A, B, C)}, roster()[A], (A, B, C))


@pytest.mark.parametrize(
    ("change", "code"),
    [
        (lambda: {Party("x"): roster()[B]}, "roster"),
        (lambda: {B: replace(roster()[B], c_pk=roster()[C].c_pk)}, "roster"),
        (lambda: {B: sum_keys(B, c=roster()[C].c_pk)}, "roster"),  # signed by itself, but another's key
        (lambda: {B: sum_keys(B, s=roster()[C].s_pk)}, "roster"),
        (lambda: {A: sum_keys(A)}, "roster"),
        (lambda: {B: sum_keys(B, signer=C)}, "signature"),  # nothing else is wrong with it
        (lambda: {B: sum_keys(B, run_id=bytes(32))}, "signature"),
        (
            lambda: {A: replace(roster()[A], signature=roster()[B].signature)},
            "signature",
        ),  # my keys, and not my signature
    ],
)
def test_a_roster_with_one_thing_wrong(change, code):
    refused(code, secure_sum.check_roster, SUM, CH, roster() | change(), roster()[A], SITES)


def test_a_roster_that_is_short_or_calls_back_who_was_left_out():
    refused("roster", secure_sum.check_roster, SUM, CH, {u: roster()[u] for u in (A, B)}, roster()[A], SITES)
    refused("roster", secure_sum.check_roster, SUM, CH, roster(), roster()[A], (A, B, C, D))
    refused("roster", secure_sum.check_roster, SUM, CH, {u: roster()[u] for u in (B, C, D)}, roster()[A], SITES)


@pytest.mark.parametrize("survivors", [(A, B, C, E), (A, B, C, C), (A, B), (B, C, D)])
def test_survivors_with_one_thing_wrong(survivors):
    secure_sum.check_survivors(SUM, A, (A, B, C), (A, B, C, D))
    refused("survivors", secure_sum.check_survivors, SUM, A, survivors, (A, B, C, D))


def test_fewer_shares_than_t_open_nothing():
    shares = shamir.share(bytes(range(32)), SUM.t, [SUM.point(u) for u in SITES], Entropy())
    answers = {u: secure_sum.Unmask({B: shares[SUM.point(u)]}, {}) for u in (A, B, C)}
    assert secure_sum._combine(SUM, answers, B, "seed_shares") == bytes(range(32))
    silent = answers | {C: secure_sum.Unmask({}, {})}
    refused("shares", secure_sum._combine, SUM, silent, B, "seed_shares")


def test_who_has_no_key_in_the_study_is_named():
    check = functools.partial(signatures.check_signed, protocol="secure_sum", line="L2")
    check(CH, B, "c", b"data", PEOPLE[B].sign("c", b"data"))
    refused("no-key", check, CH, Party("x"), "c", b"data", PEOPLE[B].sign("c", b"data"))


# ---- row sums --------------------------------------------------------------------------------------------------------

ROWS = row_sums.Params(SITES, (1,) * 5, HUB, 1)


def row_key(u, signer=None, run_id=CH.run_id, pk=None):
    pk = pk or key_pair(Entropy()).public
    return row_sums.Key(pk, PEOPLE[signer or u].sign("row_sums", row_sums.signed(run_id, u, pk)))


@functools.cache
def row_keys():
    return {u: row_key(u) for u in SITES}


@pytest.mark.parametrize(
    ("keys", "before", "code"),
    [
        (lambda: row_keys() | {Party("x"): row_keys()[B]}, None, "roster"),
        (lambda: {A: row_keys()[A]}, None, "roster"),
        (lambda: {u: row_keys()[u] for u in (B, C)}, None, "roster"),
        (lambda: row_keys() | {A: row_key(A)}, None, "roster"),
        (lambda: row_keys() | {B: row_key(B, pk=row_keys()[C].pk)}, None, "roster"),
        (lambda: row_keys() | {B: row_key(B, signer=C)}, None, "signature"),
        (lambda: row_keys() | {B: row_key(B, run_id=bytes(32))}, None, "signature"),
        (lambda: row_keys(), set(SITES), "restart"),
        (lambda: {u: row_keys()[u] for u in (A, B, C)}, {A, B, D, E}, "restart"),
    ],
)
def test_row_keys_with_one_thing_wrong(keys, before, code):
    row_sums.check_keys(ROWS, CH, row_keys(), row_keys()[A].pk, None)
    row_sums.check_keys(ROWS, CH, {u: row_keys()[u] for u in (A, B)}, row_keys()[A].pk, {A, B, C})
    refused(code, row_sums.check_keys, ROWS, CH, keys(), row_keys()[A].pk, before)


# ---- common seed -----------------------------------------------------------------------------------------------------

SEED = common_seed.Params(SITES, HUB)


def seed_key(u, signer=None, run_id=CH.run_id, pk=None):
    pk = pk or key_pair(Entropy()).public
    return common_seed.Key(pk, PEOPLE[signer or u].sign("common_seed", wire.canonical([run_id, u, pk])))


@functools.cache
def seed_keys():
    return {u: seed_key(u) for u in SITES}


@pytest.mark.parametrize(
    ("keys", "code"),
    [
        (lambda: seed_keys() | {Party("x"): seed_keys()[B]}, "roster"),
        (lambda: {u: seed_keys()[u] for u in (A, B)}, "roster"),
        (lambda: {u: seed_keys()[u] for u in (B, C, D)}, "roster"),
        (lambda: seed_keys() | {A: seed_key(A)}, "roster"),
        (lambda: seed_keys() | {B: seed_key(B, pk=seed_keys()[C].pk)}, "roster"),
        (lambda: seed_keys() | {B: seed_key(B, signer=C)}, "signature"),
        (lambda: seed_keys() | {B: seed_key(B, run_id=bytes(32))}, "signature"),
    ],
)
def test_seed_keys_with_one_thing_wrong(keys, code):
    common_seed.check_roster(SEED, CH, seed_keys(), seed_keys()[A].pk)
    refused(code, common_seed.check_roster, SEED, CH, keys(), seed_keys()[A].pk)


def confirm(u, tag=b"tag", signer=None, run_id=CH.run_id):
    data = common_seed.signed_tag(run_id, u, tag)
    return common_seed.Confirm(tag, PEOPLE[signer or u].sign("common_seed/confirm", data))


@functools.cache
def confirmed():
    return {u: confirm(u) for u in SITES}


@pytest.mark.parametrize(
    ("confirms", "code"),
    [
        (lambda: {u: confirmed()[u] for u in (A, B)}, "split-view"),
        (lambda: {u: confirmed()[u] for u in (B, C, D)}, "split-view"),
        (lambda: confirmed() | {B: confirm(B, tag=b"other")}, "split-view"),
        (lambda: confirmed() | {B: confirm(B, signer=C)}, "signature"),
        (lambda: confirmed() | {B: confirm(B, run_id=bytes(32))}, "signature"),
        (lambda: confirmed() | {B: replace(confirm(B, tag=b"other"), tag=b"tag")}, "signature"),
    ],
)
def test_confirmations_with_one_thing_wrong(confirms, code):
    common_seed.check_confirms(SEED, CH, confirmed(), confirmed()[A])
    refused(code, common_seed.check_confirms, SEED, CH, confirms(), confirmed()[A])


# ---- attempts, genes, quantiles --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sites", "before", "code"),
    [
        ((A, B, B), None, "restart"),
        ((B, C), None, "dropped"),
        ((A, B, C), (A, B, C), "restart"),
        ((A, B, D), (A, B, C, E), "restart"),
        ((A, B, C, D), (A, B), "restart"),
    ],
)
def test_lists_of_attempts_with_one_thing_wrong(sites, before, code):
    retry_without_dropouts.check_list(A, SITES, None)
    retry_without_dropouts.check_list(A, (A, B), SITES)
    refused(code, retry_without_dropouts.check_list, A, sites, before)


@pytest.mark.parametrize("common", [(), ("g1", "g1"), ("g1", "g9")])
def test_common_genes_with_one_thing_wrong(common):
    common_genes.check_common(("g1", "g2"), ["g1", "g2", "g3"])
    refused("genes", common_genes.check_common, common, ["g1", "g2", "g3"])


QUANTILES = pooled_quantiles.Params(SITES, HUB, 3, False, cells=1)


@pytest.mark.parametrize("edges", [[1, np.nan, 2], [1, np.inf, np.inf], [2, 1, 1], [1, 1, 2.001], [1, 1]])
def test_edges_with_one_thing_wrong(edges):
    own = np.array([1.0, 1.0, 2.0])
    pooled_quantiles.check_edges(own.copy(), own)
    refused("edges", pooled_quantiles.check_edges, np.array(edges, float), own)


def test_counts_that_are_none():
    pooled_quantiles.check_counts(np.array([3, 2**47], np.uint64), "L1")
    refused("damaged", pooled_quantiles.check_counts, np.array([3, 2**48], np.uint64), "L1")


# ---- scaling, components, leaves -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rows", "there", "total"),
    [
        (9, [9, 9], [1.0, 1.0]),  # fewer than mine
        (3 << 32, [9, 9], [1.0, 1.0]),
        (20, [-1, 9], [0.0, 1.0]),
        (20, [21, 9], [1.0, 1.0]),
        (20, [20, 9], [1.0, 9.5]),
        (20, [20, 9], [-21.0, 1.0]),
        (20, [20, 9], [np.nan, 1.0]),
    ],
)
def test_sums_of_scaling_with_one_thing_wrong(rows, there, total):
    pooled_scaling.check_sums(10, 20, np.array([20, 9]), np.array([-20.0, 9.0]), 5)
    refused("damaged", pooled_scaling.check_sums, 10, rows, np.array(there), np.array(total), 5)


PCA = shared_pca.Params(SITES, HUB, n_top_genes=6, n_components=2)
CHOSEN = shared_pca.Chosen(np.arange(4), np.ones(4), np.ones(4), 50)


@pytest.mark.parametrize(
    "change",
    [
        {"at": np.array([0, 2, 1, 3])},
        {"at": np.array([0, 1, 1, 3])},
        {"at": np.array([-1, 1, 2, 3])},
        {"at": np.array([0, 1, 2, 9])},
        {"at": np.arange(2), "mean": np.ones(2), "deviation": np.ones(2)},
        {"mean": np.ones(5)},
        {"mean": np.array([1, np.nan, 1, 1])},
        {"mean": np.array([1, 1.001, 1, 1])},
        {"deviation": np.array([1, 0.0, 1, 1])},
        {"deviation": np.array([1, np.nan, 1, 1])},
        {"deviation": np.ones(3)},
        {"cells": 51},
    ],
)
def test_chosen_genes_with_one_thing_wrong(change):
    shared_pca.check_chosen(replace(CHOSEN), CHOSEN)
    refused("genes", shared_pca.check_chosen, replace(CHOSEN, **change), CHOSEN)


SPACE = shared_pca.Components(np.eye(4)[:, :2], np.array([2.0, 1.0]), np.zeros(4), 3.75, 50)


@pytest.mark.parametrize(
    "change",
    [
        {"components": np.eye(4)[:, :2] * 1.1},
        {"components": np.eye(4)[:, [0, 0]]},
        {"components": np.full((4, 2), np.nan)},
        {"variance": np.array([1.0, 2.0])},
        {"variance": np.array([2.0, -1.0])},
        {"variance": np.array([4.0, 3.0])},
        {"variance": np.array([np.inf, 1.0])},
        {"components": np.eye(4)[:, [0, 2]], "variance": np.array([2.0, 0.5])},  # not the largest
        {"components": np.eye(4)[:, 1:3], "variance": np.array([1.0, 0.5])},
        {"total_variance": 5.1},
        {"center": np.full(4, 0.1)},
        {"center": np.full(4, np.nan)},
        {"total_variance": np.nan},
        {"cells": 49},
    ],
)
def test_components_with_one_thing_wrong(change):
    sums = 50, np.zeros(4), np.diag([2.0, 1.0, 0.5, 0.25])
    shared_pca.check_components(PCA, SPACE, *sums)
    refused("components", shared_pca.check_components, PCA, replace(SPACE, **change), *sums)


@pytest.mark.parametrize("wrong", ["none", "cells", "many", "sign", "log", "square", "spread"])
def test_moments_with_one_thing_wrong(wrong):
    """Ten cells: sums of y, y², l, l² of two genes."""
    sums = [np.array([20.0, 5.0]), np.array([50.0, 9.0]), np.array([8.0, 3.0]), np.array([9.0, 2.0])]
    cells = {"cells": 0, "many": 1 << 60}.get(wrong, 10)
    place, value = {"sign": (1, -5.0), "log": (2, 1e6), "square": (3, 1e6), "spread": (1, 30.0)}.get(wrong, (0, 20.0))
    sums[place][0] = value
    if wrong == "none":
        shared_pca.check_moments(PCA, cells, *sums)
    else:
        refused("damaged", shared_pca.check_moments, PCA, cells, *sums)


@pytest.mark.parametrize("wrong", ["none", "few", "many", "sum", "product"])
def test_products_with_one_thing_wrong(wrong):
    n = {"few": 1.0, "many": 51.0}.get(wrong, 40.0)
    most = (40 + PCA.beyond) * 10.0
    total, product = most + 1.5 if wrong == "sum" else 3.0, 10 * most + 2 if wrong == "product" else 20.0
    words = np.array([n, total, 1.0, product, 1.0, 9.0])
    if wrong == "few":
        words[1:] = 0.0
    if wrong == "none":
        shared_pca.check_products(PCA, 50, words, 2)
    else:
        refused("damaged", shared_pca.check_products, PCA, 50, words, 2)


# ---- training --------------------------------------------------------------------------------------------------------

TRAINING = training_terms.Params(SITES, HUB, "model", rounds=5)
BEFORE = training_terms.Task(1, (A, B, C, D), (A, B, C, D), False, 200.0, b"")
TASK = training_terms.Task(2, (A, B, C), (A, B, C), False, 200.0, b"")


@pytest.mark.parametrize(
    "change",
    [
        {"t": 1},
        {"t": 3},  # a round is left out
        {"t": 6},
        {"live": (A, B, C, E), "clients": (A, B, C, E)},  # e was gone
        {"live": (A, B, C, Party("x")), "clients": (A, B, C, Party("x"))},
        {"live": (A, B), "clients": (A, B)},
        {"live": (A, B, B), "clients": (A, B, B)},
        {"live": (B, C, D), "clients": (B, C, D)},
        {"clients": (A, B)},
        {"clients": (A, B, C, D)},
        {"clients": ()},
        {"total": 29.0},
        {"total": np.nan},
        {"total": 1e15},
        {"total": 201.0},
        {"end": True},  # with clients
    ],
)
def test_tasks_with_one_thing_wrong(change):
    check = training_terms.check_task
    check(TRAINING, A, TASK, BEFORE, 30, SITES)
    check(TRAINING, A, replace(TASK, end=True, clients=()), BEFORE, 30, SITES)
    check(replace(TRAINING, rounds=2), A, replace(TASK, t=2, clients=()), BEFORE, 30, SITES)
    refused("task", check, TRAINING, A, replace(TASK, **change), BEFORE, 30, SITES)


def test_the_clients_of_a_round_are_those_of_the_seed_and_of_who_has_labels():
    params = replace(TRAINING, clients=2, pseudo=Pseudo("network", warm=1), resume=True)
    chosen = training_terms.choose_clients(params, SITES, 3, (A, B))
    task = training_terms.Task(3, SITES, chosen, False, 200.0, b"")
    training_terms.check_task(params, A, task, None, 30, (A, B))
    for other in ((A, B), (A, C), (B, C), (C, D)):
        if other != chosen:
            refused("task", training_terms.check_task, params, A, replace(task, clients=other), None, 30, (A, B))
    few = replace(TRAINING, clients=4)
    assert few.min_clients == 3


@pytest.mark.parametrize("theta", [np.zeros(3), np.full(4, np.nan), np.full(4, 17.0), np.full(4, -17.0), np.ones(4)])
def test_weights_with_one_thing_wrong(theta):
    good = np.full(4, 15.9, np.float32)
    training_terms.check_weights(TRAINING, good, wire.digest("theta", good), 2, 4, "L5")  # two rounds of ±4, twice
    theta = theta.astype(np.float32)
    told = good if theta[0] == 1 else theta  # the last one is sound, but not what was told
    refused("weights", training_terms.check_weights, TRAINING, theta, wire.digest("theta", told), 2, 4, "L5")


@pytest.mark.parametrize(
    ("labels", "labelled", "mine"),
    [
        (("p",), SITES, ("p", "q")),
        (("p", "q", "q"), SITES, ("p", "q")),
        (("p", "q"), (A, B), ("p", "q")),  # everybody has labels
        (("p", "q"), (*SITES, Party("x")), ("p", "q")),
    ],
)
def test_vocabularies_with_one_thing_wrong(labels, labelled, mine):
    check, agreed = training_terms.check_vocabulary, training_terms.Vocabulary(("p", "q"), SITES)
    check(TRAINING, A, agreed, ("p", "q"))
    refused("labels", check, TRAINING, A, training_terms.Vocabulary(labels, labelled), mine)
    fixed = replace(TRAINING, labels=("p", "q"))
    refused("labels", check, fixed, A, training_terms.Vocabulary(("q", "p"), SITES), mine)
    some = replace(TRAINING, pseudo=Pseudo("network"))
    check(some, A, training_terms.Vocabulary(("p", "q"), (A, B)), ("p", "q"))
    check(some, C, training_terms.Vocabulary(("p", "q"), (A, B)), ())
    refused("labels", check, some, A, training_terms.Vocabulary(("p", "q"), (B,)), ("p", "q"))
    refused("labels", check, some, C, training_terms.Vocabulary(("p", "q"), SITES), ())


def test_sums_of_training_with_one_thing_wrong():
    training_terms.check_total(90.0, "L4", 5)
    for cells in (-1.0, 1e15, np.nan):
        refused("damaged", training_terms.check_total, cells, "L4", 5)
    good = np.array([[9.0, 1.0], [0.0, 5.0]])
    training_terms.check_scores(good, 4.0, 5)
    for counts, loss in ((good, -1.0), (good, 1e9), (good, np.nan), (-good, 4.0), (good * 1e14, 4.0)):
        refused("damaged", training_terms.check_scores, counts, loss, 5)


def test_a_mean_update_that_no_sites_have():
    def words(delta, count, loss):
        code, tail = TRAINING.code(3), training_terms.TAIL
        return np.concatenate([code.encode(np.array(delta)), tail.encode(np.array([count, loss]))])

    mean, _ = training_terms.mean_update(TRAINING, 3, 3, 2, words([1.0, -2.0], 2.0, 0.2), 3)  # two of three
    np.testing.assert_allclose(mean, [1.5, -3.0], atol=1e-6)
    assert training_terms.mean_update(TRAINING, 3, 3, 2, words([0.0, 0.0], 0.0, 0.0), 3)[0].sum() == 0
    for given in (([1.0, -2.2], 0.5, 0.2), ([1.0, 1.0], -0.5, 0.2), ([1.0, 1.0], 3.5, 0.2), ([1.0, 1.0], 1.0, -1.0)):
        refused("damaged", training_terms.mean_update, TRAINING, 3, 3, 2, words(*given), 3)


# ---- the same view ---------------------------------------------------------------------------------------------------


def test_too_few_signatures_do_not_make_one_view():
    """Each signature fits; there are only not enough of them, or mine is missing, or one is of a stranger."""
    from cloister.mpc.testing.lies import Lie, Stage
    from cloister.testing import Case, run_protocol

    def hub(pick):
        async def liar(ch, params):
            step = ch.sub("same-view")
            got = await step.gather(params.sites, consistency_check.Signature)
            for u in params.sites:
                chosen = {v: got[v].signature for v in params.sites if pick(u, v)}
                await step.send(u, consistency_check.Signatures(chosen))

        return liar

    case = Case(consistency_check.Params(SITES, HUB), {})
    for pick in (lambda u, v: v in (A, u), lambda u, v: v != u):
        stage = Stage(Lie("-", HUB, "-"))
        roles = consistency_check.roles(case.params) | {HUB: hub(pick)}
        run = run_protocol(consistency_check, case, roles={p: stage.role(p, r) for p, r in roles.items()}, timeout=2.0)
        assert {run.errors[u].code for u in SITES} == {"split-view"}


# ---- a site's own data -----------------------------------------------------------------------------------------------

OWN = {
    "pooled_scaling": lambda **kit: pooled_scaling.site(
        None, pooled_scaling.Params(SITES, HUB, 2), np.array([[1.0, np.inf]]), **kit
    ),
    "counted_forest": lambda **kit: counted_forest.site(
        None, counted_forest.Params(SITES, HUB), "table", ["x"], np.array([[1.0], [np.inf]]), **kit
    ),
    "pooled_quantiles": lambda **kit: pooled_quantiles.site(None, QUANTILES, np.array([1.0, -1.0]), **kit),
    "pooled_quantiles, counted": lambda **kit: pooled_quantiles.site(
        None, QUANTILES, Table(np.array([-1.0, 1.0]), np.array([1, 1])), **kit
    ),
}


@pytest.mark.parametrize("name", OWN)
def test_a_site_refuses_what_cannot_be_added_before_it_sends_anything(name):
    """There is no channel that anything could be sent on."""
    with pytest.raises(DataError):
        asyncio.run(OWN[name](entropy=Entropy(), identity=PEOPLE[A]))


def test_one_label_is_nothing_to_learn():
    brings = training_terms.Brings("x", ("p",), True)
    refused("labels", training_terms.vocabulary, TRAINING, {A: brings, B: brings})
