"""Pooled Harmony equals Harmony written out over the pooled cells; one liar, few cells, and cells that come later."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from cloister.disclosure import Thresholds
from cloister.errors import DataError, ParameterError, ProtocolAbort
from cloister.models.harmony import EVERYTHING, Settings, replay, replay_new_batch, unit
from cloister.mpc.sums import announced_counts, checked_sum
from cloister.papers import federated_harmony
from cloister.rehearsal.rehearsal import Fault
from cloister.study import Party
from cloister.testing import (
    Case,
    check_ideal,
    check_lies,
    check_no_errors,
    check_vectors,
    plain_inputs,
    run_protocol,
    transcript,
    values,
)
from cloister.workflows.integrate import harmony_steps, pooled_harmony
from cloister.workflows.integrate.harmony_steps import GRID, STARTS, Cells, Params
from old_steps import harmony_floors

HUB = Party("hub")
SITES = A, B, C = tuple(map(Party, "abc"))
VECTORS = Path(__file__).parents[2] / "vectors"
SHORT = {"clusters": 4, "rounds": 2, "updates": 1, "blocks": 2}
TINY = {"size": 50, "d": 2, "clusters": 2, "rounds": 1, "updates": 1, "blocks": 1}


def cells(rng, n, d=4, shift=2.0, batches=1, donors=0, thresholds=None):
    """Three kinds of cells, and a shift of its own for every batch."""
    kinds = 6 * np.eye(3, d)[rng.integers(0, 3, n)]
    batch = np.arange(n) % batches
    moves = rng.normal(0, shift, (batches, d))
    donor = rng.integers(0, donors, n) if donors else None
    x = kinds + moves[batch] + rng.normal(0, 0.5, (n, d))
    return Cells(x, batch, donor, "ab12", thresholds or Thresholds())


def case(seed=0, n=3, size=70, batches=1, donors=0, d=4, thresholds=None, **options):
    rng = np.random.default_rng(seed)
    params = Params(SITES[:n], HUB, "X_a", Settings(**SHORT | options))
    how = {"batches": batches, "donors": donors, "thresholds": thresholds}
    return Case(params, {u: (cells(rng, size + 10 * i, d, **how),) for i, u in enumerate(SITES[:n])})


def agree(found, ideal):
    np.testing.assert_allclose(found.moved, ideal.moved, atol=1e-4)  # 24 bits, some rounds later
    np.testing.assert_allclose(found.trail.centroids, ideal.trail.centroids, atol=1e-4)
    np.testing.assert_allclose(found.mixing.pooled, ideal.mixing.pooled, atol=1e-4)
    np.testing.assert_allclose(found.mixing.after, ideal.mixing.after, atol=1e-4)
    assert np.abs(found.picture.counts - ideal.picture.counts).sum() <= 2  # a cell at the edge of a place
    assert found.sums == ideal.sums


def harmony(s, sites, seeds, lam_least=1e-3):
    """Harmony of [KMF+19] over pooled cells: one matrix R, ridge regressions as matrices, every site a batch."""
    X = np.concatenate(sites)
    b = np.repeat(np.arange(len(sites)), [len(x) for x in sites])
    N, N_b, d = len(X), np.bincount(b), X.shape[1]
    Z = unit(X)
    values, vectors = np.linalg.eigh(Z.T @ Z / N)
    root = vectors @ np.diag(np.sqrt(np.maximum(values, 1e-9))) @ vectors.T
    Y = unit(np.random.default_rng([s.seed, 20]).normal(size=(s.n_clusters(N, len(sites)), d)) @ root)
    Phi = np.eye(len(sites))[b]

    def soft(at, penalty=1.0):
        a = np.exp(-2 * (1 - Z[at] @ Y.T) / s.sigma) * penalty
        return a / a.sum(axis=1, keepdims=True)

    everything = np.arange(N)
    for _ in range(STARTS):
        Y = unit(soft(everything).T @ Z)
    R = soft(everything)
    starts = np.cumsum([0, *N_b])
    orders = [np.array_split(np.random.default_rng([s.seed, *u.encode()]).permutation(len(x)), s.blocks)
              for u, x in zip(seeds, sites, strict=True)]  # fmt: skip

    def penalty(mass, at):
        E = np.outer(mass.sum(axis=1), N_b / N)
        return (((E + 1) / (mass + 1)) ** s.theta)[:, b[at]].T

    for _ in range(s.rounds):
        for _ in range(s.updates):
            Y = unit(R.T @ Z)
            for j in range(s.blocks):
                at = np.concatenate([starts[i] + order[j] for i, order in enumerate(orders)])
                rest = np.setdiff1d(everything, at)
                R[at] = soft(at, penalty(R[rest].T @ Phi[rest], at))
        mass = R.T @ Phi
        R = soft(everything, penalty(mass, everything))
        moved = X.copy()
        design = np.column_stack([np.ones(N), Phi])
        for k in range(len(Y)):
            lam = np.diag([0, *np.maximum(s.ridge * (mass[k].sum() * N_b / N), lam_least)])
            W = np.linalg.solve(design.T @ (R[:, [k]] * design) + lam, design.T @ (R[:, [k]] * X))
            W[0] = 0
            moved -= R[:, [k]] * (design @ W)
        Z = unit(moved)
    return np.split(moved, starts[1:-1])


@pytest.mark.parametrize("options", [{}, {"theta": 1.0, "ridge": 0.5}, {"n": 2, "blocks": 3}])
def test_equals_harmony_of_the_pooled_cells(options):
    """With nothing kept back, the sums give what one matrix over all cells gives."""
    c = case(thresholds=EVERYTHING, **options)
    found = pooled_harmony.ideal(c.params, plain_inputs(c))
    pooled = harmony(c.params.settings, [x.x for (x,) in c.inputs.values()], c.params.sites)
    for u, wanted in zip(c.params.sites, pooled, strict=True):
        np.testing.assert_allclose(found[u].moved, wanted, atol=1e-8)


@pytest.mark.parametrize(
    "options",
    [{}, {"n": 2}, {"batches": 3}, {"donors": 6, "least_donors": 3}, {"clusters": 0}, {"thresholds": EVERYTHING}],
    ids=["plain", "two-sites", "batches", "donors", "own-number", "all-open"],
)
def test_roles_give_what_one_place_gives(options):
    check_ideal(pooled_harmony, [case(seed=2, **options)], agree=agree)


def test_every_party_knows_the_same_and_moves_its_own():
    c = case()
    found = values(run_protocol(pooled_harmony, c))
    assert len({one.digest for one in found.values()}) == 1
    assert len(found[HUB].moved) == 0
    for u, (mine,) in c.inputs.items():
        assert found[u].moved.shape == mine.x.shape
        np.testing.assert_array_equal(found[u].picture.counts, found[HUB].picture.counts)
    other = values(run_protocol(pooled_harmony, case(seed=1)))
    assert other[A].digest != found[A].digest


def test_vectors():
    check_vectors(pooled_harmony, case(**TINY), VECTORS / "pooled_harmony.json")


def test_no_value_leaves_but_masked():
    run = run_protocol(pooled_harmony, case())
    sent = {row[0] for p, rows in transcript(run).items() if p != HUB for row in rows}
    assert sent == {
        "channel.Hello",
        "announced_counts.Count",
        "common_space.Space",
        "same_view.Signature",
        *(f"common_seed.{m}" for m in ("Key", "Parts", "Confirm")),
        "checked_sum.Masked",
    }


@pytest.mark.parametrize("module", [pooled_harmony, federated_harmony], ids=["pooled", "federated"])
def test_cost(module):
    c = case(batches=2)
    run = run_protocol(module, c)
    check_no_errors(run)
    n = sum(len(x.x) for (x,) in c.inputs.values())
    for party, (messages, payload) in module.cost(c.params, n, 4, len("ab12")).items():
        rows = [r for r in transcript(run)[party] if not r[0].startswith("channel.")]
        assert len(rows) == messages
        assert payload <= sum(size for _, _, size in rows) <= payload + 400 * messages


def test_the_number_of_sums_is_what_the_docstring_says():
    c = case(rounds=3, updates=2, blocks=4)
    s = c.params.settings
    found = pooled_harmony.ideal(c.params, plain_inputs(c))[HUB]
    assert found.sums == 16 + s.rounds * (s.updates * (1 + s.blocks) + 2)
    assert len(pooled_harmony.lengths(c.params, 240, 4)) == found.sums


def test_sites_are_mixed_afterwards():
    c = case(size=150, clusters=12, rounds=4, updates=3)
    found = pooled_harmony.ideal(c.params, plain_inputs(c))
    expected, before, after = found[HUB].mixing.pooled
    assert before > expected + 0.1
    assert after < expected + 0.02
    for u in SITES:
        assert found[u].mixing.site[2] < found[u].mixing.site[1]


# ---- few cells -------------------------------------------------------------------------------------------------------


def odd_one_out(**options):
    """One cell at site a, in a direction that no other cell has."""
    c = case(size=60, d=6, clusters=8, **options)
    mine = c.inputs[A][0]
    x = mine.x.copy()
    x[7] = [0, 0, 0, 0, 0, 9.0]
    return Case(c.params, {**c.inputs, A: (dataclasses.replace(mine, x=x),)}), x[7]


def watching(module):
    """What the coordinator sees of centroids: sums over all sites, and as published those of each site."""
    seen = []
    real = harmony_steps.Course.add

    def watched(self, line, what, mine, *more):
        if module is federated_harmony and line in ("L4", "L5"):
            seen.append(mine.values.copy())
        total = yield from real(self, line, what, mine, *more)
        if line in ("L4", "L5"):
            seen.append(total.copy())
        return total

    return seen, watched


def closest(seen, direction):
    rows = np.concatenate(seen)
    rows = rows[np.linalg.norm(rows, axis=1) > 1e-3]
    return float((unit(rows) @ unit(direction[None])[0]).max())


@pytest.mark.parametrize(
    ("module", "thresholds", "read"),
    [(federated_harmony, None, True), (pooled_harmony, EVERYTHING, True), (pooled_harmony, None, False)],
)
def test_a_cell_that_is_alone_in_its_cluster_is_not_shown(monkeypatch, module, thresholds, read):
    """Attack: a centroid of one cell is that cell. It is read as published, and from sums without thresholds."""
    c, cell = odd_one_out(thresholds=thresholds)
    seen, watched = watching(module)
    monkeypatch.setattr(harmony_steps.Course, "add", watched)
    run = run_protocol(module, c)
    check_no_errors(run)
    likeness = closest(seen, cell)
    assert likeness > 0.999 if read else likeness < 0.95


def part_at(c, u, Y, penalty=None):
    """A site's part, with its cells assigned to clusters that an attacker chose."""
    part = harmony_steps.part_of(c.params, u, c.inputs[u][0], Y.shape[1])
    part.start(len(Y))
    part.assign(Y, penalty)
    return part


def rare(r, size=60):
    """Site a has r cells in a direction that no other cell has."""
    c = case(size=size, d=6, clusters=8)
    mine = c.inputs[A][0]
    x = mine.x.copy()
    x[:r] = np.random.default_rng(1).normal([0, 0, 0, 0, 0, 9.0], 0.05, (r, 6))
    Y = unit(np.concatenate([np.eye(6)[:3], [[0, 0, 0, 0, 0, 1.0]]]))
    return Case(c.params, {**c.inputs, A: (dataclasses.replace(mine, x=x),)}), Y


@pytest.mark.parametrize("r", [0, 1, 2, 3, 4])
def test_G4_the_mass_of_a_suppressed_cluster_has_no_complement(r):
    """Attack: another site subtracts its part; rows of R add up to 1, so the suppressed mass is n less the others."""
    c, Y = rare(r)
    x = c.inputs[A][0].x
    old = harmony_floors.masses(harmony_floors.responsibilities(c.params.settings, x, Y))
    assert old[3] == 0.0
    assert abs(len(x) - old.sum() - r) < 0.3  # how many cells the suppressed cluster has
    part = part_at(c, A, Y)
    part.settle()
    shown = part.contribution(part.told_mass())
    assert shown.values[3] == 0.0
    assert shown.values.sum() == pytest.approx(len(x))  # whatever r
    assert shown.cells >= 10


def test_G4_the_cell_of_a_suppressed_cluster_has_no_complement():
    """Attack: Σz less the centroids that are shown is the suppressed cell."""
    c, Y = rare(1)
    x = c.inputs[A][0].x
    R = harmony_floors.responsibilities(c.params.settings, x, Y)
    rest = harmony_floors.moments(x)[0] - harmony_floors.centroids(R, x).sum(axis=0)
    assert unit(rest[None])[0] @ unit(x[:1])[0] > 0.99
    part = part_at(c, A, Y)
    part.settle()
    near = part.contribution(part.near.sum(axis=0)).values
    np.testing.assert_allclose(near.sum(axis=0), unit(x).sum(axis=0), atol=1e-9)  # and Σz is not opened besides


@pytest.mark.parametrize("donors", [0, 5])
def test_whatever_centroids_and_penalties_others_choose(donors):
    """Open clusters have effective sizes of at least 10 cells and 3 donors; all cells are in open ones, or none is."""
    rng, seen = np.random.default_rng(0), 0
    for seed in range(40):
        c = case(seed=seed, d=4, clusters=6, donors=donors, least_donors=3 if donors else 0, batches=2)
        Y = unit(rng.normal(size=(6, 4)) + (rng.random() < 0.5) * c.inputs[A][0].x[rng.integers(70)])
        part = part_at(c, A, Y, rng.lognormal(0, 2, (2, 6)))
        without = [None, 0, 1][seed % 3]
        part.settle(without)
        R = np.zeros((70, 6))
        for j in range(2):
            for at, _, piece in part.of_block(j):
                R[at] = piece
        R = R * part.open
        R /= np.maximum(R.sum(axis=1, keepdims=True), 1e-300)
        rest = [j for j in range(2) if j != without]
        np.testing.assert_allclose(part.told[rest].sum(axis=(0, 1)), part.told_mass(without))
        np.testing.assert_allclose(part.told_mass(), R.sum(axis=0), atol=1e-9)
        if without is not None:
            R = np.delete(R, part.cells_of[without], axis=0)
        squares = np.square(R[:, part.open])
        assert np.all(squares.max(axis=0, initial=0.0) <= squares.sum(axis=0) / 10 * (1 + 1e-6))
        if donors and part.open.any():
            donor = np.delete(part.rows.donor, part.cells_of[without]) if without is not None else part.rows.donor
            by = np.stack([R[donor == u][:, part.open].sum(axis=0) for u in np.unique(donor)])
            assert np.all(np.square(by).max(axis=0) <= np.square(by).sum(axis=0) / 3 * (1 + 1e-6))
        seen += int((~part.open).any())
    assert seen > 10


@pytest.mark.parametrize(("thresholds", "read"), [(EVERYTHING, True), (None, False)])
def test_a_site_that_bends_a_centroid_towards_a_cell_does_not_read_it(monkeypatch, thresholds, read):
    """Attack: site c pulls a cluster to where a cell may lie, and takes its own part out of the next sum."""
    c, cell = odd_one_out(thresholds=thresholds, rounds=1, updates=3)
    seen, real = [], harmony_steps.Course.add

    def bent(self, line, what, mine, reach=0.0, grain=0.0):
        lies = line == "L5" and len(self.part.x) == 80
        if lies:
            values = mine.values.copy()
            values[0] = 0.9 * reach * unit(cell[None])[0]
            mine = mine.map(lambda _: values)
        total = yield from real(self, line, what, mine, reach, grain)
        if lies:
            seen.append(total[0] - np.rint(mine.values[0] * 2) / 2 if grain and not read else total[0] - mine.values[0])
        return total

    monkeypatch.setattr(harmony_steps.Course, "add", bent)
    pooled_harmony.ideal(c.params, plain_inputs(c))
    others = seen[-1]
    if read:
        assert closest([others[None]], cell) > 0.999
        assert 0.3 < np.linalg.norm(others) < 1.1  # that cell alone, in one cluster or shared by two
    else:
        assert np.linalg.norm(others) < 1e-9


def test_F8_a_cell_that_is_alone_in_its_direction_is_not_in_second_moments():
    """Attack: Σzzᵀ less what is known has that cell as an eigenvector."""
    c, _ = rare(1, size=200)
    x = c.inputs[A][0].x
    x[1:, 5] = 0.0
    _, old = harmony_floors.moments(x)
    np.testing.assert_allclose(old[5, 5], unit(x[:1])[0, 5] ** 2)
    part = harmony_steps.part_of(c.params, A, c.inputs[A][0], 6)
    upper = np.zeros((6, 6))
    shown = harmony_steps.second_moments(part)
    upper[np.triu_indices(6)] = shown.values
    assert upper[5, 5] == 0.0
    assert upper[0, 0] > 1.0
    assert shown.cells >= 10


def test_no_cell_dominates_second_moments_in_any_direction():
    rng = np.random.default_rng(0)
    for seed in range(20):
        x = rng.standard_t(2, (200, 6)) * rng.lognormal(0, 2, 6)
        c = case(d=6)
        part = harmony_steps.part_of(c.params, A, Cells(x, np.zeros(200, np.int64)), 6)
        G = np.zeros((6, 6))
        G[np.triu_indices(6)] = harmony_steps.second_moments(part).values
        G = G + np.triu(G, 1).T
        if G.any():
            values_, vectors = np.linalg.eigh(G)
            u = vectors[:, values_ > 1e-9 * values_[-1]]
            z = unit(x)
            inside = np.linalg.norm(z - z @ u @ u.T, axis=1) < 1e-9
            h = np.square(z[inside] @ u / np.sqrt(values_[values_ > 1e-9 * values_[-1]])).sum(axis=1)
            assert np.sort(h)[: int(np.trace(G) + 0.5)].max() <= 0.1 + 1e-5, seed


def test_one_person_is_not_shown_however_many_cells_she_has():
    rng = np.random.default_rng(0)
    x = np.concatenate([rng.normal([5, 0], 0.1, (100, 2)), rng.normal([0, 5], 0.1, (20, 2))])
    donor = np.concatenate([np.arange(100) % 4, np.full(20, 4)])
    for least, wanted in ((3, [True, False]), (0, [True, True])):
        params = Params(SITES, HUB, "X", Settings(least_donors=least))
        part = harmony_steps.part_of(params, A, Cells(x, np.zeros(120, np.int64), donor), 2)
        part.start(2)
        part.assign(np.eye(2), None)
        part.settle()
        assert part.open.tolist() == wanted


def test_a_batch_of_one_cell_does_not_dominate_an_anchor():
    """A small batch has the largest weight λ / (n + λ) per cell."""
    rng = np.random.default_rng(0)
    x = rng.normal([5, 0], 0.1, (40, 2))
    params = Params(SITES, HUB, "X", Settings())
    for lam, shown in ((1.0, True), (0.001, False)):  # nothing but the single cell is left where λ is small
        part = harmony_steps.part_of(params, A, Cells(x, (np.arange(40) == 7) * 1), 2)
        part.start(1)
        s = part.regress(np.array([[1.0, 0.0]]), np.ones((2, 1)))
        sums = part.anchor_sums(part.mass_by_group(), s, np.array([[lam * 40], [lam * 40]]))
        assert bool(sums.values.any()) == shown


def test_places_with_few_cells_join_others_in_the_picture():
    """All cells are counted, so that the number of all says nothing about places with few."""
    c = case(size=200)
    found = pooled_harmony.ideal(c.params, plain_inputs(c))
    picture = found[HUB].picture
    for u in SITES:
        places = picture.places(found[u].moved)
        old = harmony_floors.places(places, GRID * GRID)
        assert len(found[u].moved) - old.sum() > 0  # how many cells lie alone, or outside
        own = found[u].picture.own
        assert own.sum() == len(found[u].moved)
        assert own[own > 0].min() >= 10
    np.testing.assert_array_equal(picture.counts, sum(found[u].picture.own for u in SITES))


def test_what_a_site_adds_is_rounded():
    """Sums that differ by one cell differ by no more than a rounding in most entries."""
    run = run_protocol(pooled_harmony, case())
    check_no_errors(run)
    seen = []
    real = harmony_steps.Course.add

    def watched(self, line, what, mine, reach=0.0, grain=0.0):
        total = yield from real(self, line, what, mine, reach, grain)
        if line in ("L4", "L5", "L6", "L7"):
            seen.append(total)
        return total

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(harmony_steps.Course, "add", watched)
        pooled_harmony.ideal(case().params, plain_inputs(case()))
    assert all(np.array_equal(total * 2, np.rint(total * 2)) for total in seen)


def test_receipts_state_the_smallest_group():
    c = case(donors=6, least_donors=3)
    run = run_protocol(pooled_harmony, c)
    check_no_errors(run)
    for u in SITES:
        smallest = run.receipts[u].smallest_group
        assert smallest["cells"] >= 10
        assert smallest["donors"] >= 3


# ---- cells that come later -------------------------------------------------------------------------------------------


def test_a_later_cell_of_a_known_batch_lies_where_the_run_would_have_put_it():
    c = case(batches=2, rounds=3)
    found = pooled_harmony.ideal(c.params, plain_inputs(c))[B]
    mine = c.inputs[B][0]
    again = replay(c.params.settings, found.trail, found.own, mine.x, mine.batch)
    np.testing.assert_allclose(again, found.moved, atol=1e-12)
    alone = replay(c.params.settings, found.trail, found.own, mine.x[5:6], mine.batch[5:6])
    np.testing.assert_allclose(alone, found.moved[5:6], atol=1e-12)  # whoever comes with it


def test_a_new_batch_finds_its_kinds():
    """A fourth batch, far off, lands nearer to cells of its kinds than it was."""
    c = case(size=200, rounds=4, updates=3)
    found = pooled_harmony.ideal(c.params, plain_inputs(c))
    rng = np.random.default_rng(5)
    kind = rng.integers(0, 3, 150)
    x = 6 * np.eye(3, 4)[kind] + rng.normal(0, 2.0, 4) + rng.normal(0, 0.5, (150, 4))
    placed = replay_new_batch(c.params.settings, found[A].trail, x)
    others = np.concatenate([found[u].moved for u in SITES])

    def gap(y):  # from each cell to the nearest of the others
        return np.mean([np.linalg.norm(others - one, axis=1).min() for one in y])

    assert gap(placed) < 0.7 * gap(x)


# ---- liars -----------------------------------------------------------------------------------------------------------


class Changed:
    """A coordinator's channel that adds one to every total from the third sum on."""

    def __init__(self, ch, seen=None):
        self.ch, self.seen = ch, [0] if seen is None else seen

    def __getattr__(self, name):
        return getattr(self.ch, name)

    def sub(self, *args, **more):
        return Changed(self.ch.sub(*args, **more), self.seen)

    async def broadcast(self, to, msg):
        if isinstance(msg, checked_sum.Total):
            self.seen[0] += 1
            if self.seen[0] > 2:
                msg = checked_sum.Total(msg.z + np.uint64(1))
        await self.ch.broadcast(to, msg)


def test_a_coordinator_that_bends_centroids_is_found_out():
    c = case()

    async def lying(ch, params):
        return await pooled_harmony.coordinator(Changed(ch), params)

    run = run_protocol(pooled_harmony, c, roles={HUB: lying}, timeout=3.0)
    assert {run.errors[u].code for u in SITES if not run.errors[u].heard} == {"changed"}
    assert {run.errors[u].protocol for u in SITES if not run.errors[u].heard} == {checked_sum.NAME}


@pytest.mark.parametrize(
    ("line", "change", "who"),
    [
        ("L2", lambda x: x * [1, -30] - [0, 1e6], "number of cells"),
        ("L5", lambda x: x + 1e6, "larger than"),
        ("L6", lambda x: x - 500.0, "a mass"),
        ("L7", lambda x: x - 500.0, "a mass"),
        ("L8", lambda x: np.where(np.arange(x.size) % 5 == 4, -0.9 * x - 30, 5000 * x + 1), "anchor"),
    ],
)
def test_impossible_sums_of_a_lying_site_end_the_run(monkeypatch, line, change, who):
    real = harmony_steps.Course.add

    def lies(self, at, what, mine, reach=0.0, grain=0.0):
        if at == line and len(self.part.x) == 80:  # site b
            shape = mine.values.shape
            mine = mine.map(lambda x: np.clip(change(x.ravel()), -reach or -np.inf, reach or np.inf).reshape(shape))
        return (yield from real(self, at, what, mine, reach, grain))

    monkeypatch.setattr(harmony_steps.Course, "add", lies)
    run = run_protocol(pooled_harmony, case(), timeout=3.0)
    errors = [run.errors[p] for p in (HUB, A, C) if p in run.errors]
    assert {e.code for e in errors if not getattr(e, "heard", False)} == {"absurd"}
    assert any(who in str(e) or "larger than" in str(e) for e in errors), errors


@pytest.mark.parametrize(("claimed", "code"), [(2000, "claims"), (3000, "claims"), (-100, "counts"), (100, "counts")])
def test_a_site_that_claims_other_cells_than_it_announced_ends_the_run(monkeypatch, claimed, code):
    real = harmony_steps.Course.add

    def lies(self, at, what, mine, reach=0.0, grain=0.0):
        if at == "L2" and len(self.part.x) == 80:  # site b
            mine = mine.map(lambda x: x + np.array([claimed, 0]))
        return (yield from real(self, at, what, mine, reach, grain))

    monkeypatch.setattr(harmony_steps.Course, "add", lies)
    if code == "claims":
        announce = announced_counts.announce
        monkeypatch.setattr(announced_counts, "announce", lambda ch, p, n: announce(ch, p, n + claimed * (n == 80)))
    run = run_protocol(pooled_harmony, case(), timeout=3.0)
    assert {e.code for p, e in run.errors.items() if p != B} == {code}
    assert code == "counts" or "'b' claims more than max_share=0.9" in str(run.errors[A])


def right_of(c, module=pooled_harmony):
    wanted = plain_inputs(c)

    def right(lie, found):
        for p, one in found.items():
            assert np.all(np.isfinite(one.moved))
            if p in wanted:
                assert one.moved.shape == wanted[p].x.shape
            if lie.letter == "j":  # other inputs: the result of these inputs
                ideal = pooled_harmony.ideal(lie.case.params, plain_inputs(lie.case))
                atol = 1e-3 if module is pooled_harmony else 0.05  # published sums are not rounded
                np.testing.assert_allclose(one.moved, ideal[p].moved, atol=atol)
        assert len({one.digest for one in found.values()}) <= 1

    return right


def test_lies():
    c, twin = case(**TINY), case(seed=4, **TINY)
    lies = check_lies(pooled_harmony, [c, twin], right=right_of(c))
    assert lies.tried > 10
    assert lies.aborted > 5


AS_PUBLISHED = {"coordinator": "bcf", "site": "bcf"}


def test_lies_as_published():
    c, twin = case(**TINY), case(seed=4, **TINY)
    lies = check_lies(
        federated_harmony, [c, twin], right=right_of(c, federated_harmony), assumes=AS_PUBLISHED, timeout=1.0
    )
    assert lies.tried > 5


@pytest.mark.slow
@pytest.mark.parametrize(("module", "assumes"), [(pooled_harmony, {}), (federated_harmony, AS_PUBLISHED)])
def test_lies_in_every_message(module, assumes):
    c, twin = case(**TINY), case(seed=4, **TINY)
    lies = check_lies(
        module, [c, twin], right=right_of(c, module), assumes=assumes, full=True, timeout=4.0, within=40.0
    )
    print(f"\n{module.__name__}: {lies}")
    assert lies.tried > 50
    assert lies.aborted > 10


def test_a_site_that_stops_ends_the_run():
    run = run_protocol(pooled_harmony, case(), faults=[Fault("kill", "b", HUB, "Masked")], timeout=1.0)
    assert set(run.errors) >= {HUB, A, C}


# ---- bad input -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m: dataclasses.replace(m, x=m.x[:10], batch=m.batch[:10]), "fewer than 50"),
        (lambda m: dataclasses.replace(m, batch=m.batch[1:]), "one batch"),
        (lambda m: dataclasses.replace(m, x=m.x * np.nan), "missing or infinite"),
        (lambda m: dataclasses.replace(m, x=m.x[:, :1]), "2 to 4096 columns"),
    ],
)
def test_bad_input_is_named_before_anything_is_sent(change, message):
    c = case()
    run = run_protocol(pooled_harmony, Case(c.params, {**c.inputs, A: (change(c.inputs[A][0]),)}), timeout=2.0)
    assert isinstance(run.errors[A], DataError)
    assert message in str(run.errors[A])
    sent = {e.name for e, _ in run.receipts[A].entries if e.kind == "sent"}
    assert {name for name in sent if not name.startswith("channel.")} == set()


@pytest.mark.parametrize("agreed", ["", "ab12", "ab12/", "ab12/1", "ab12/99999", "ab12/-3", "ab12/1e3"])
def test_columns_that_no_embedding_has(agreed):
    with pytest.raises(ProtocolAbort, match="no embedding of 2 to 4096 columns"):
        pooled_harmony.columns_in(agreed)


def test_donors_are_asked_for_where_they_count():
    run = run_protocol(pooled_harmony, case(least_donors=3), timeout=2.0)
    assert "counts donors" in str(run.errors[A])


@pytest.mark.parametrize("other", [{"space": "cd34"}, {"x": None}], ids=["space", "columns"])
def test_another_space_is_named(other):
    c = case()
    mine = c.inputs[B][0]
    other = {"x": mine.x[:, :3]} if "x" in other else other
    run = run_protocol(
        pooled_harmony, Case(c.params, {**c.inputs, B: (dataclasses.replace(mine, **other),)}), timeout=2.0
    )
    assert "'X_a' of b comes from another model" in str(run.errors[HUB])


@pytest.mark.parametrize("options", [{"clusters": 1}, {"rounds": 0}, {"sigma": 0.0}, {"theta": -1.0}, {"ridge": 0.0}])
def test_bad_settings(options):
    with pytest.raises(ParameterError, match="Harmony needs"):
        Settings(**options)


def test_bad_parties():
    with pytest.raises(ParameterError, match="at least two sites"):
        Params((A,), HUB, "X")
