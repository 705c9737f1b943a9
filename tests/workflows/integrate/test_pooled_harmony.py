"""Pooled Harmony equals Harmony written out over the pooled cells; one liar, few cells, and cells that come later."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from cloister.disclosure import Rows, Thresholds
from cloister.errors import DataError, ParameterError, ProtocolAbort
from cloister.models.harmony import (
    EVERYTHING,
    OWN_STEPS,
    STEPS,
    Part,
    Points,
    Settings,
    replay,
    replay_new_batch,
    unit,
)
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
from cloister.workflows.integrate.harmony_steps import FAINT, GRID, STARTS, Cells, Params
from old_steps import harmony_floors, harmony_rounding

HUB = Party("hub")
SITES = A, B, C = tuple(map(Party, "abc"))
VECTORS = Path(__file__).parents[2] / "vectors"
SHORT = {"clusters": 4, "rounds": 2, "updates": 1, "sweeps": 2}
TINY = {"size": 50, "d": 2, "clusters": 2, "rounds": 1, "updates": 1, "sweeps": 1}


def cells(rng, n, d=4, shift=2.0, batches=1, donors=0, thresholds=None):
    """Three kinds of cells, and a shift of its own for every batch."""
    kinds = 6 * np.eye(3, d)[rng.integers(0, 3, n)]
    batch = np.arange(n) % batches
    moves = rng.normal(0, shift, (batches, d))
    donor = rng.integers(0, donors, n) if donors else None
    x = kinds + moves[batch] + rng.normal(0, 0.5, (n, d))
    return Cells(x, batch, donor, "ab12", thresholds or Thresholds())


def case(seed=0, n=3, size=70, batches=1, donors=0, d=4, thresholds=None, named=False, **options):
    rng = np.random.default_rng(seed)
    params = Params(SITES[:n], HUB, "X_a", Settings(**SHORT | {"donors": named} | options))
    how = {"batches": batches, "donors": donors, "thresholds": thresholds}
    return Case(params, {u: (cells(rng, size + 10 * i, d, **how),) for i, u in enumerate(SITES[:n])})


def agree(found, ideal):
    np.testing.assert_allclose(found.moved, ideal.moved, atol=1e-4)  # 24 bits, some rounds later
    np.testing.assert_allclose(found.trail.centroids, ideal.trail.centroids, atol=1e-4)
    np.testing.assert_allclose(found.mixing.pooled, ideal.mixing.pooled, atol=1e-4)
    np.testing.assert_allclose(found.mixing.after, ideal.mixing.after, atol=1e-4)
    assert np.abs(found.picture.counts - ideal.picture.counts).sum() <= 2  # a cell at the edge of a place
    assert found.sums == ideal.sums


def harmony(s, sites, lam_least=1e-3):
    """Harmony written out over pooled cells: one matrix R, ridge regressions as matrices, every site a batch."""
    X = np.concatenate(sites)
    b = np.repeat(np.arange(len(sites)), [len(x) for x in sites])
    N, N_b, d = len(X), np.bincount(b), X.shape[1]
    Z, Phi = unit(X), np.eye(len(sites))[b]
    alone = Z  # of the cells on their own way, which no sum is over
    values, vectors = np.linalg.eigh(Z.T @ Z / N)
    root = vectors @ np.diag(np.sqrt(np.maximum(values, 1e-9))) @ vectors.T
    Y = unit(np.random.default_rng([s.seed, 20]).normal(size=(s.n_clusters(N, len(sites)), d)) @ root)
    log, design = np.zeros((len(Y), len(sites))), np.column_stack([np.ones(N), Phi])

    def soft(at=None):
        a = np.exp(-2 * (1 - (Z if at is None else at) @ Y.T) / s.sigma) * np.exp(log).T[b]
        return a / a.sum(axis=1, keepdims=True)

    def solved(R, mass):
        lam = np.maximum(s.ridge * (mass * N_b / N), lam_least)
        A = design.T @ (R * design) + np.diag([0, *lam])
        return np.linalg.solve(A, design.T @ (R * X)), lam

    def mean(Y):
        total = soft().T @ Z
        return np.where(np.linalg.norm(total, axis=1, keepdims=True) > FAINT, unit(total), Y)

    def balance(steps, at=None):  # at the mass that clusters have now
        nonlocal log
        T = soft().sum(axis=0)
        for _ in range(steps):
            there, E = soft(at).T @ Phi, np.outer(T, N_b / N)
            wanted = s.theta * np.log((2 * E + 1) / (there + E + 1))
            log = log + 2 / (2 + s.theta) * (wanted - log)

    for _ in range(STARTS):
        Y = mean(Y)
    for _ in range(s.rounds):
        for _ in range(s.updates):
            Y = mean(Y)
            for _ in range(s.sweeps):
                balance(STEPS)
        T, R = soft().sum(axis=0), soft()
        kept = log
        groups, anchors = X.copy(), []
        for k in range(len(Y)):
            W, lam = solved(R[:, [k]], T[k])
            n = R[:, k] @ Phi
            if np.sum(lam * n / (n + lam)) <= FAINT:
                anchors.append(None)
                continue
            anchors.append(W[0])
            groups -= R[:, [k]] * (Phi @ W[1:])
        balance(OWN_STEPS, alone)  # of single cells, and their regression at given anchors
        own, cells = soft(alone), X.copy()
        for k in [k for k in range(len(Y)) if anchors[k] is not None]:
            n, S = own[:, k] @ Phi, (own[:, [k]] * Phi).T @ X
            lam = np.maximum(s.ridge * (T[k] * N_b / N), lam_least)
            cells -= own[:, [k]] * (Phi @ ((S - n[:, None] * anchors[k]) / (n + lam)[:, None]))
        log, Z, alone = kept, unit(groups), unit(cells)
    return np.split(cells, np.cumsum(N_b)[:-1])


@pytest.mark.parametrize("options", [{}, {"theta": 1.0, "ridge": 0.5}, {"n": 2, "sweeps": 3}])
def test_equals_harmony_of_the_pooled_cells(options):
    """With every cell a group, the sums give what one matrix over all cells gives."""
    c = case(thresholds=EVERYTHING, **options)
    found = pooled_harmony.ideal(c.params, plain_inputs(c))
    pooled = harmony(c.params.settings, [x.x for (x,) in c.inputs.values()])
    for u, wanted in zip(c.params.sites, pooled, strict=True):
        np.testing.assert_allclose(found[u].moved, wanted, atol=1e-8)


@pytest.mark.parametrize(
    "options",
    [{}, {"n": 2}, {"batches": 3}, {"donors": 6, "named": True}, {"clusters": 0}, {"thresholds": EVERYTHING}],
    ids=["plain", "two-sites", "batches", "donors", "own-number", "single-cells"],
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
    c = case(rounds=3, updates=2, sweeps=4)
    s = c.params.settings
    found = pooled_harmony.ideal(c.params, plain_inputs(c))[HUB]
    assert found.sums == 16 + s.rounds * (s.updates * (1 + s.sweeps) + 2)
    assert len(pooled_harmony.lengths(c.params, 240, 4)) == found.sums


def test_sites_are_mixed_afterwards():
    c = case(size=150, clusters=12, rounds=4)
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
            seen.append(mine.copy())
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


def old_part(x, seed=1, **settings):
    """The step before groups: sums of cells, closed by leverage and rounded to half a cell."""
    none = np.zeros(len(x), np.int64)
    return harmony_rounding.Part(harmony_rounding.Settings(**settings), x, none, 1, None, (seed,), Thresholds())


def part_at(c, u, Y):
    """A site's part, looking at centroids that an attacker chose."""
    part = harmony_steps.part_of(c.params, c.inputs[u][0], Y.shape[1])
    part.shown.look(Y)
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
    shown = part_at(c, A, Y).shown
    mass = shown.mass(np.ones((1, 4)))[0]
    assert mass.sum() == pytest.approx(len(x))  # whatever r
    assert mass[3] < 0.1 or mass[3] > 9.9  # a group is there as a whole, or not


def test_G4_the_cell_of_a_suppressed_cluster_has_no_complement():
    """Attack: Σz less the centroids that are shown is the suppressed cell."""
    c, Y = rare(1)
    x = c.inputs[A][0].x
    R = harmony_floors.responsibilities(c.params.settings, x, Y)
    rest = harmony_floors.moments(x)[0] - harmony_floors.centroids(R, x).sum(axis=0)
    assert unit(rest[None])[0] @ unit(x[:1])[0] > 0.99
    shown = part_at(c, A, Y).shown
    near = shown.near(np.ones((1, 4)))
    np.testing.assert_allclose(near.sum(axis=0), shown.size @ unit(shown.x), atol=1e-9)
    assert (unit(shown.x) @ unit(x[:1])[0]).max() < 0.3  # and no group lies in its direction


def crossing(Y, z, k, j, step=1e-7):
    """Two sets of centroids between which a point at z changes from cluster k to j, and hardly anything else."""
    low, high = 0.0, 4.0
    for _ in range(60):
        t = (low + high) / 2
        moved = unit(Y[[j]] + t * z)
        low, high = (t, high) if (moved @ z)[0] < Y[k] @ z else (low, t)
    sides = []
    for t in (low * (1 - step), high * (1 + step)):
        one = Y.copy()
        one[j] = unit(Y[[j]] + t * z)[0]
        sides.append(one)
    return sides


def pairs_of_sums(centroids_at, z, d, pairs, K=6, seed=0):
    """The attack of the review: pairs of sums of directions between which one point alone changes clusters."""
    rng, guess = np.random.default_rng(seed), np.zeros(d)
    for _ in range(pairs):
        Y = unit(rng.normal(size=(K, d)))
        order = np.argsort(-(Y @ z))
        k, j = int(order[0]), int(order[1])
        before, after = (centroids_at(side) for side in crossing(Y, z, k, j))
        guess += (after - before)[j] - (after - before)[k]
    length = np.linalg.norm(guess)
    return guess / length if length > 1e-9 else guess


def test_one_cell_that_alone_changes_clusters_between_fifteen_pairs_of_sums():
    """Attack: read from the step before, whose rounding averages out; no sum of the new one changes."""
    rng = np.random.default_rng(3)
    x, hard = rng.normal(size=(868, 30)), 1e-9  # σ: every cell in one cluster
    old = old_part(x, clusters=6, sigma=hard, blocks=1)
    new = Part(Settings(clusters=6, sigma=hard), x, np.zeros(868, np.int64), 1, Rows(868))
    found, kept = [], []
    for i in rng.choice(868, 8, replace=False):
        z = unit(x[i : i + 1])[0]

        def at(Y):
            old.start(6)
            old.assign(Y, None)
            return old.centroids()

        def groups_at(Y):
            new.shown.look(Y)
            return new.shown.near(np.ones((1, 6)))

        found.append(pairs_of_sums(at, z, 30, 15) @ z)
        kept.append(pairs_of_sums(groups_at, z, 30, 15) @ z)
    assert np.median(found) > 0.9
    assert np.max(np.abs(kept)) < 0.5  # at most a group's mean, by chance; mostly nothing changes at all
    assert np.median(np.abs(kept)) == 0.0


def test_the_same_attack_on_a_group_gives_its_mean_and_no_more():
    """An attacker that knows a group's mean already can ask for it; all of its cells change sides with it."""
    rng = np.random.default_rng(3)
    x = rng.normal(size=(400, 10))
    part = Part(Settings(clusters=6, sigma=1e-9), x, np.zeros(400, np.int64), 1, Rows(400))

    def at(Y):
        part.shown.look(Y)
        return part.shown.near(np.ones((1, 6)))

    z = unit(part.shown.x[4:5])[0]
    assert pairs_of_sums(at, z, 10, 1) @ z > 1 - 1e-9
    assert part.shown.size.min() >= 10


@pytest.mark.parametrize("donors", [0, 5])
def test_all_that_is_opened_is_a_function_of_groups(donors):
    """Other cells behind the same groups: every sum of a run is the same, whatever centroids others bring about."""
    c = case(batches=2, donors=donors, named=donors > 0)
    mine, rng = c.inputs[A][0], np.random.default_rng(0)
    part = harmony_steps.part_of(c.params, mine, 4)
    other = harmony_steps.part_of(c.params, mine, 4)
    other.cells = Points(c.params.settings, rng.normal(size=(31, 4)), np.ones(31), rng.integers(0, 2, 31), 2)
    steps, twin = (harmony_steps.integrate(one, 2) for one in (part, other))
    ask, again, seen = next(steps), next(twin), 0
    while True:
        np.testing.assert_array_equal(ask.mine, again.mine)
        assert ask.part.cells >= 10
        assert ask.part.donors is None if not donors else ask.part.donors >= 3
        seen += 1
        total = 2 * ask.mine
        if ask.line in ("L4", "L5"):  # the other party bends centroids as it likes
            total = total + rng.normal(0, 20, total.shape)
        try:
            ask, again = steps.send(total), twin.send(total)
        except StopIteration:
            break
    assert seen == 16 + c.params.settings.rounds * 5


@pytest.mark.parametrize("donors", [0, 5])
def test_groups_are_of_one_batch_and_of_enough_cells_and_donors(donors):
    for seed in range(10):
        c = case(seed=seed, donors=donors, named=donors > 0, batches=2)
        mine = c.inputs[A][0]
        part = harmony_steps.part_of(c.params, mine, 4)
        codes = part.groups.codes
        for k in range(len(part.groups)):
            assert np.sum(codes == k) == part.shown.size[k] >= 10
            assert set(mine.batch[codes == k]) == {part.shown.batch[k]}
            if donors:
                assert len(set(mine.donor[codes == k])) >= 3


@pytest.mark.parametrize(("thresholds", "read"), [(EVERYTHING, True), (None, False)])
def test_a_site_that_bends_a_centroid_towards_a_cell_does_not_read_it(monkeypatch, thresholds, read):
    """Attack: site c pulls a cluster to where a cell may lie, and takes its own part out of the next sum."""
    c, cell = odd_one_out(thresholds=thresholds, rounds=1, updates=3)
    seen, real = [], harmony_steps.Course.add

    def bent(self, line, what, mine, reach=0.0):
        lies = line == "L5" and len(self.part.cells.x) == 80
        if lies:
            mine = mine.copy()
            mine[0] = 0.9 * reach * unit(cell[None])[0]
        total = yield from real(self, line, what, mine, reach)
        if lies:
            seen.append(total[0] - mine[0])
        return total

    monkeypatch.setattr(harmony_steps.Course, "add", bent)
    pooled_harmony.ideal(c.params, plain_inputs(c))
    others = seen[-1]
    if read:
        assert closest([others[None]], cell) > 0.999
        assert 0.3 < np.linalg.norm(others) < 1.1  # that cell alone, in one cluster or shared by two
    else:
        assert np.linalg.norm(others) < 1e-3 or closest([others[None]], cell) < 0.5


def test_F8_a_cell_that_is_alone_in_its_direction_is_not_in_second_moments():
    """Attack: Σzzᵀ less what is known has that cell as an eigenvector."""
    c, _ = rare(1, size=200)
    x = c.inputs[A][0].x
    x[1:, 5] = 0.0
    _, old = harmony_floors.moments(x)
    np.testing.assert_allclose(old[5, 5], unit(x[:1])[0, 5] ** 2)
    shown = harmony_steps.part_of(c.params, c.inputs[A][0], 6).shown
    z = unit(shown.x)
    new = z.T @ (shown.size[:, None] * z)
    assert new[5, 5] < 0.2  # its group's length in that direction; the cell counts at its group's distance
    assert new[0, 0] > 1.0


def test_an_outlying_cell_does_not_show_in_its_group():
    """A mean that one far cell dominates would show that cell; clipped, it counts as far as half of its group."""
    rng = np.random.default_rng(0)
    x = rng.normal([5, 0, 0, 0], 0.3, (60, 4))
    far = x.copy()
    far[7] = [5, 0, 0, 300.0]
    groups = harmony_steps.part_of(case().params, Cells(far, np.zeros(60, np.int64)), 4)
    mine = int(groups.groups.codes[7])
    plain = groups.groups.means(far)
    assert unit(plain)[mine, 3] > 0.9  # the mean as it is
    assert np.abs(groups.shown.x[:, 3]).max() < np.abs(x[:, 3]).max()


def test_one_person_is_not_shown_however_many_cells_she_has():
    rng = np.random.default_rng(0)
    x = np.concatenate([rng.normal([5, 0], 0.1, (100, 2)), rng.normal([0, 5], 0.1, (20, 2))])
    donor = np.concatenate([np.arange(100) % 4, np.full(20, 4)])
    for named, wanted in ((True, False), (False, True)):
        params = Params(SITES, HUB, "X", Settings(donors=named))
        shown = harmony_steps.part_of(params, Cells(x, np.zeros(120, np.int64), donor), 2).shown
        assert bool((unit(shown.x)[:, 1] > 0.9).any()) == wanted


def test_a_batch_without_a_group_adds_nothing_and_moves_all_the_same():
    c = case(size=80, clusters=4, rounds=3)
    mine = c.inputs[A][0]
    few = dataclasses.replace(
        mine, x=mine.x + np.where(np.arange(80) < 6, 3.0, 0.0)[:, None], batch=(np.arange(80) < 6) * 1
    )
    c = Case(c.params, {**c.inputs, A: (few,)})
    part = harmony_steps.part_of(c.params, few, 4)
    assert part.shown.sizes.tolist() == [74.0, 0.0]
    assert part.apart.tolist() == [False, True]
    found = pooled_harmony.ideal(c.params, plain_inputs(c))
    assert found[HUB].trail.cells == 74 + 90 + 100
    assert np.linalg.norm(found[A].moved[:6] - few.x[:6], axis=1).min() > 0.1


def test_places_of_the_picture_hold_whole_groups():
    """All cells of groups are counted, so that the number of all says nothing about places with few."""
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


def test_receipts_state_the_smallest_group():
    c = case(donors=6, named=True)
    run = run_protocol(pooled_harmony, c)
    check_no_errors(run)
    for u in SITES:
        smallest = run.receipts[u].smallest_group
        assert smallest["cells"] >= 10
        assert smallest["donors"] >= 3


# ---- theta -----------------------------------------------------------------------------------------------------------


def two_batches(d=3):
    rng = np.random.default_rng(0)
    x = np.concatenate([rng.normal([3, 0, 0], 1.0, (60, d)), rng.normal([0, 3, 0], 1.0, (20, d))])
    return x, (np.arange(80) >= 50) * 1


@pytest.mark.parametrize("theta", [1.0, 2.0, 6.0, 20.0])
def test_penalties_come_to_rest_at_any_theta(theta):
    """All cells at once with the whole penalty, as one block did before, never come to rest at a large theta."""
    x, batch = two_batches()
    points = Points(Settings(theta=theta), x, np.ones(80), batch, 2)
    points.look(np.eye(3))
    total, p, last = points.mass(np.ones((2, 3))).sum(axis=0), np.ones((2, 3)), np.ones((2, 3))
    for _ in range(200):
        last, p = p, points.balance(80, total, p, 1)
    assert np.abs(np.log(p / last)).max() < 1e-4
    E = points.expected(80, total)
    q = np.ones((2, 3))
    for _ in range(200):
        before, q = q, ((E + 1) / (points.mass(q) + 1)) ** theta
    if theta >= 6:
        assert np.abs(np.log(q / before)).max() > 0.5


def test_more_theta_never_mixes_clusters_less():
    x, batch = two_batches()
    uneven = []
    for theta in (0.0, 1.0, 2.0, 4.0, 6.0, 10.0):
        points = Points(Settings(theta=theta), x, np.ones(80), batch, 2)
        points.look(np.eye(3))
        p = np.ones((2, 3))
        for _ in range(60):
            p = points.balance(80, points.mass(p).sum(axis=0), p, 5)
        there = points.mass(p)
        E = points.expected(80, there.sum(axis=0))
        uneven.append(float((there * np.log(there / E)).sum()))
    assert np.all(np.diff(uneven) < 0)


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
        ("L7", lambda x: x * 1.01, "a mass"),  # more than it claimed
        ("L8", lambda x: np.where(np.arange(x.size) % 5 == 4, -0.9 * x - 30, 5000 * x + 1), "anchor"),
    ],
)
def test_impossible_sums_of_a_lying_site_end_the_run(monkeypatch, line, change, who):
    real = harmony_steps.Course.add

    def lies(self, at, what, mine, reach=0.0):
        if at == line and len(self.part.cells.x) == 80:  # site b
            mine = np.clip(change(mine.ravel()), -reach or -np.inf, reach or np.inf).reshape(mine.shape)
        return (yield from real(self, at, what, mine, reach))

    monkeypatch.setattr(harmony_steps.Course, "add", lies)
    run = run_protocol(pooled_harmony, case(), timeout=3.0)
    errors = [run.errors[p] for p in (HUB, A, C) if p in run.errors]
    assert {e.code for e in errors if not getattr(e, "heard", False)} == {"absurd"}
    assert any(who in str(e) or "larger than" in str(e) for e in errors), errors


@pytest.mark.parametrize(("claimed", "code"), [(2000, "claims"), (3000, "claims"), (-100, "counts"), (100, "counts")])
def test_a_site_that_claims_other_cells_than_it_announced_ends_the_run(monkeypatch, claimed, code):
    real = harmony_steps.Course.add

    def lies(self, at, what, mine, reach=0.0):
        if at == "L2" and len(self.part.cells.x) == 80:  # site b
            mine = mine + np.array([claimed, 0])
        return (yield from real(self, at, what, mine, reach))

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
                ideal = module.ideal(lie.case.params, plain_inputs(lie.case))
                np.testing.assert_allclose(one.moved, ideal[p].moved, atol=1e-3)
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
    run = run_protocol(pooled_harmony, case(named=True), timeout=2.0)
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


@pytest.mark.parametrize(
    "options", [{"clusters": 1}, {"rounds": 0}, {"sweeps": 0}, {"sigma": 0.0}, {"theta": -1.0}, {"ridge": 0.0}]
)
def test_bad_settings(options):
    with pytest.raises(ParameterError, match="Harmony needs"):
        Settings(**options)


def test_bad_parties():
    with pytest.raises(ParameterError, match="at least two sites"):
        Params((A,), HUB, "X")
