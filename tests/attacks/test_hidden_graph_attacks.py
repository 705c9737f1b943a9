"""G2, G3, N3 and the reconstruction of vectors: each succeeds on the old step and fails in mode hardened.

The old steps still exist as modes semi-honest and published: `chosen_settings` and `shared_scores` with a matrix S that
the coordinator chooses, the graph that it sees, and the engine `he`. Mode hardened used them before.
"""

import numpy as np
import pytest

from cloister.errors import ParameterError
from cloister.papers.attacks import propagation as attack
from cloister.papers.hamming import hamming_he
from cloister.study import Party
from cloister.testing import Case, check_no_errors, run_protocol, values
from cloister.workflows.fine_tune import pseudo_labels
from cloister.workflows.propagate_labels import (
    chosen_settings,
    private_propagation,
    shared_scores,
    verified_propagation,
)
from cloister.workflows.propagate_labels.propagation_terms import Params

HUB = Party("hub")
SITES = tuple(map(Party, ("basel", "lugano", "vienna")))
SENDS = {"common_seed", "point_roster", "attempts", "channel"}  # protocols in which the coordinator sends something


def points(per_site=20, d=6, classes=3, labelled=0.6, seed=0, **options):
    rng = np.random.default_rng(seed)
    inputs = {}
    for u in SITES:
        y = rng.integers(0, classes, per_site)
        labels = [f"type {c}" if rng.random() < labelled else None for c in y]
        labels[:classes] = [f"type {c}" for c in range(classes)]
        inputs[u] = (rng.normal(size=(per_site, d)), labels)
    return Case(Params(SITES, HUB, **{"bits": 256, "n_neighbors": 4, **options}), inputs)


# ---- G2: labels from hit counts --------------------------------------------------------------------------------------


def test_g2_chosen_hit_counts_reveal_labels_in_the_old_step():
    """S is zero but for one cell's own entry, another cell for every setting: the class with a hit is its label."""
    rng = np.random.default_rng(1)
    y = {u: rng.integers(0, 3, 16) for u in SITES}
    counts = np.bincount(np.concatenate(list(y.values())), minlength=3)
    usual = chosen_settings.Setting(5, 1.0, 0.9, balance=False)
    terms = chosen_settings.Params(SITES, HUB, 256, usual, 3)
    own = {u: 16 * i + np.arange(16) for i, u in enumerate(SITES)}
    rows = terms.scores(dict.fromkeys(SITES, 16))
    targets = [(SITES[1], i) for i in range(min(16, len(terms.spreads)))]
    S = np.zeros((sum(rows.sizes), 48), np.int32)
    for number, (u, i) in enumerate(targets):
        block = SITES.index(u) * rows.sizes[0] + number * terms.rows(16)
        S[block + i, own[u][i]] = 1 << 20
    columns = {u: S[:, own[u]] for u in SITES}

    async def malicious(ch, params, keys, mine, counts, *, entropy, identity):
        await ch.broadcast(params.sites, chosen_settings.Labelled(dict.fromkeys(params.sites, 16)))
        await shared_scores.server(ch.sub("scores"), rows, columns, entropy=entropy, identity=identity)
        total = await chosen_settings.secure_sum.aggregator(ch.sub("hits"), params.sums)
        return total.z.reshape(-1, params.classes)

    inputs = {HUB: (np.zeros((48, 5), np.int64), own, counts)} | {u: (y[u], counts) for u in SITES}
    run = run_protocol(chosen_settings, Case(terms, inputs), roles={HUB: malicious}, timeout=10.0)
    hits = values(run)[HUB]
    found = [int(np.argmax(hits[number * len(terms.forms)])) for number in range(len(targets))]
    assert found == [int(y[u][i]) for u, i in targets]


def test_g2_in_hardened_the_coordinator_chooses_nothing_and_receives_an_index():
    c = points(choose=True)
    run = run_protocol(verified_propagation, c)
    check_no_errors(run)
    sent = {e.name.partition(".")[0] for e, _ in run.receipts[HUB].entries if e.kind == "sent"}
    assert sent <= SENDS | {"verified"}  # of `verified` only its key
    assert {e.name for e, _ in run.receipts[HUB].entries if e.kind == "sent" and e.protocol == "verified"} <= {
        "verified.Key"
    }
    received = {e.name for e, _ in run.receipts[HUB].entries if e.kind == "received" and e.protocol == "verified"}
    assert received == {"verified.Key", "verified.Open"}
    opened = {e.name for r in run.receipts.values() for e, _ in r.entries if e.kind == "opened" and e.to == HUB}
    assert opened == {"index of a setting"}


# ---- G3: one label for all unlabelled cells --------------------------------------------------------------------------


def one_target(monkeypatch, target):
    """The coordinator's S gives the label of one cell to every cell."""

    def chosen(W, alpha, labelled, own, rows):
        return {
            u: np.tile(np.where(mine == target, 1 << 20, 0).astype(np.int32), (len(rows), 1)) for u, mine in own.items()
        }

    monkeypatch.setattr(private_propagation, "_columns", chosen)


@pytest.mark.parametrize("target", [21, 22, 41])
def test_g3_all_pseudo_labels_are_one_cells_label_in_the_old_step_only(target, monkeypatch):
    c = points()
    names = [n for u in SITES for n in c.inputs[u][1]]
    one_target(monkeypatch, target)
    old = values(run_protocol(private_propagation, c))
    assert {name for u in SITES for name in old[u].names} == {names[target]}
    new = values(run_protocol(verified_propagation, c))
    assert len({name for u in SITES for name in new[u].names}) == 3


def test_g3_semi_supervised_training_uses_the_hidden_graph():
    hardened = pseudo_labels.Pseudo("xclp", private=True)
    assert hardened.protocol() is verified_propagation
    for wrong in ({"engine": "he"}, {"balance": True}):
        with pytest.raises(ParameterError, match="mode"):
            pseudo_labels.Pseudo("xclp", private=True, **wrong)
        pseudo_labels.Pseudo("xclp", private=False, **wrong)


# ---- N3: a public key of zeros ---------------------------------------------------------------------------------------


def test_n3_a_public_key_of_zeros_reveals_codes_in_the_old_step():
    """The second polynomial of an answer is then s(X) times that of the query, plus noise: s(X) are the code's bits."""
    pytest.importorskip("seal")
    from cloister.mpc.crypto import bfv_matmul as he

    K, M = Party("attacker"), Party("honest")
    params = hamming_he.Params(K, M, 2, 4, 256)
    codes = np.random.default_rng(0).integers(0, 256, (4, 32), np.uint8)
    plan, seen = params.plan, []
    n, k, T = plan.scheme.degree, len(plan.scheme.primes) - 1, 1 << 30

    async def attacker(ch, params, packed, *, entropy):
        public = bytearray(he.Key(plan.scheme).public)
        body = 2 * (k + 1) * n * 8
        public[-body:] = bytes(body)
        await ch.send(M, hamming_he.Key(bytes(public)))
        query = bytearray(he.encrypt(plan, he.Key(plan.scheme).public, np.zeros((256, 2), np.int64))[0])
        words = np.frombuffer(query, np.uint64, count=2 * k * n, offset=len(query) - 2 * k * n * 8).reshape(2, k, n)
        words[:] = 0
        words[1, :, 0] = T
        await hamming_he._send(ch, M, hamming_he.Codes, [bytes(query)] * plan.sent)
        seen.extend(await hamming_he._recv(ch, M, hamming_he.Masked, plan.returned))

    case = Case(params, {K: (np.zeros((2, 32), np.uint8),), M: (codes,)})
    run = run_protocol(hamming_he, case, roles={K: attacker}, timeout=20.0)
    assert M in run.outcomes
    first = int(he._engine(plan.scheme)[1].first_context_data().parms().coeff_modulus()[0].value())
    places = [np.flatnonzero(he._factor(plan, np.eye(1, 256, i, dtype=np.int64))) for i in range(256)]
    right = 0
    for row, ct in enumerate(seen):
        cipher = bytes(ct) if not hasattr(ct, "to_string") else ct.to_string()
        raw = np.frombuffer(cipher, np.uint64, count=k * n, offset=len(cipher) - k * n * 8).reshape(k, n)[0]
        value = raw.astype(np.int64)
        value = np.where(value > first // 2, value - first, value)
        s = np.rint(value / T).astype(np.int64)
        one = he._factor(plan, np.ones((1, 256), np.int64)).astype(np.int64)
        sign = np.where(one >> (plan.scheme.plain_bits - 1) & 1, -1, 1)
        bits = np.array([s[p[0]] * sign[p[0]] < 0 for p in places])
        right += int((bits == np.unpackbits(codes[row]).astype(bool)).sum())
    assert right == 4 * 256


@pytest.mark.parametrize("engine", ["he", "ot"])
def test_n3_hardened_refuses_the_engine_before_anything_is_sent(engine):
    with pytest.raises(ParameterError, match=f"'hamming' is '{engine}'"):
        verified_propagation.check_params(points(engine=engine).params)


# ---- vectors from what the coordinator and one site hold -------------------------------------------------------------


def test_coordinator_and_one_site_rebuild_vectors_from_the_old_graph_only():
    """Eight dimensions: the graph gives directions; without it, the best guess is the mean of the site's own points."""
    c = points(per_site=60, d=8, n_neighbors=5, bits=1024, seed=3)
    truth = np.concatenate([c.inputs[u][0] for u in SITES])
    known, rest = np.arange(60), np.arange(60, 180)
    (old,) = values(run_protocol(private_propagation, c))[HUB]
    rebuilt = attack.rebuild_vectors(attack.paths(old.keys, 1024), known, truth[known])
    assert np.median(attack.hits(rebuilt, truth)[rest]) > 0.5
    run = run_protocol(verified_propagation, c)
    (new,), mine = values(run)[HUB], values(run)[SITES[0]]
    assert new.keys is new.distances is new.labelled is None
    best = []
    for label in np.unique(mine.label):  # what is left: own points, and the labels that these got
        mean = c.inputs[SITES[0]][0][mine.label == label].mean(axis=0)
        best.append(np.median(attack.hits(np.tile(mean / np.linalg.norm(mean), (180, 1)), truth)[rest]))
    assert max(np.abs(best)) < 0.2
