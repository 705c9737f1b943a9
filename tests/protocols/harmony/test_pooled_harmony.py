"""Pooled Harmony equals Harmony written out over the pooled cells; one liar, few cells, and cells that come later."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from cloister.errors import DataError, ParameterError, ProtocolAbort
from cloister.models.harmony import Settings, replay, replay_new_batch, unit
from cloister.protocols.harmony import federated_harmony, harmony_steps, pooled_harmony
from cloister.protocols.harmony.harmony_steps import GRID, STARTS, Cells, Params
from cloister.protocols.sums import checked_sum, secure_sum
from cloister.run.rehearsal import Fault
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

HUB = Party("hub")
SITES = A, B, C = tuple(map(Party, "abc"))
VECTORS = Path(__file__).parents[2] / "vectors"
SHORT = {"clusters": 4, "rounds": 2, "updates": 1, "blocks": 2}
TINY = {"size": 50, "d": 2, "clusters": 2, "rounds": 1, "updates": 1, "blocks": 1}


def cells(rng, n, d=4, shift=2.0, batches=1, donors=0):
    """Three kinds of cells, and a shift of its own for every batch."""
    kinds = 6 * np.eye(3, d)[rng.integers(0, 3, n)]
    batch = np.arange(n) % batches
    moves = rng.normal(0, shift, (batches, d))
    donor = rng.integers(0, donors, n) if donors else None
    return Cells(kinds + moves[batch] + rng.normal(0, 0.5, (n, d)), batch, donor, "ab12")


def case(seed=0, n=3, size=70, batches=1, donors=0, d=4, **options):
    rng = np.random.default_rng(seed)
    params = Params(SITES[:n], HUB, "X_a", Settings(**SHORT | options))
    return Case(
        params, {u: (cells(rng, size + 10 * i, d, batches=batches, donors=donors),) for i, u in enumerate(SITES[:n])}
    )


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
    Y = unit(np.random.default_rng([s.seed, 20]).normal(size=(s.n_clusters(N), d)) @ root)
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
    c = case(least=0, **options)
    found = pooled_harmony.ideal(c.params, plain_inputs(c))
    pooled = harmony(c.params.settings, [x.x for (x,) in c.inputs.values()], c.params.sites)
    for u, wanted in zip(c.params.sites, pooled, strict=True):
        np.testing.assert_allclose(found[u].moved, wanted, atol=1e-8)


@pytest.mark.parametrize(
    "options",
    [{}, {"n": 2}, {"batches": 3}, {"donors": 6, "least_donors": 2}, {"clusters": 0, "least": 0}],
    ids=["plain", "two-sites", "batches", "donors", "own-number"],
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
        "common_space.Space",
        "same_view.Signature",
        *(f"common_seed.{m}" for m in ("Key", "Parts", "Confirm")),
        *(f"secure_sum.{m}" for m in ("Keys", "Shares", "MaskedInput", "Vouch", "Unmask")),
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
    c = case(size=150, clusters=12, rounds=4, updates=3, least=5)
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

    def watched(self, line, what, mine, reach=0.0):
        if module is federated_harmony and line in ("L4", "L5"):
            seen.append(mine.copy())
        total = yield from real(self, line, what, mine, reach)
        if line in ("L4", "L5"):
            seen.append(total.copy())
        return total

    return seen, watched


def closest(seen, direction):
    rows = np.concatenate(seen)
    rows = rows[np.linalg.norm(rows, axis=1) > 1e-3]
    return float((unit(rows) @ unit(direction[None])[0]).max())


@pytest.mark.parametrize(
    ("module", "least", "read"), [(federated_harmony, 5, True), (pooled_harmony, 0, True), (pooled_harmony, 5, False)]
)
def test_a_cell_that_is_alone_in_its_cluster_is_kept_back(monkeypatch, module, least, read):
    """Attack: a centroid of one cell is that cell. It is read as published, and from sums that keep nothing back."""
    c, cell = odd_one_out(least=least)
    seen, watched = watching(module)
    monkeypatch.setattr(harmony_steps.Course, "add", watched)
    run = run_protocol(module, c)
    check_no_errors(run)
    likeness = closest(seen, cell)
    assert likeness > 0.999 if read else likeness < 0.95


def test_a_site_adds_nothing_to_a_cluster_that_it_has_few_cells_in():
    """Whatever the others claim, also a liar that says that it has a thousand there."""
    c, cell = odd_one_out(least=5)
    part = harmony_steps.part_of(c.params, A, c.inputs[A][0], 6)
    Y = unit(np.concatenate([np.eye(6)[:3], cell[None]]))
    part.start(4)
    part.assign(Y, None)
    mass = part.mass_by_group()
    assert 0.9 < mass[:, 3].sum() < 5
    assert part.shown(mass).tolist() == [True, True, True, False]
    lam = np.ones((1, 4))
    assert not part.anchor_sums(mass, part.regress(Y, np.ones((1, 4))), lam)[3].any()


@pytest.mark.parametrize(("least", "read"), [(0, True), (5, False)])
def test_a_site_that_bends_a_centroid_towards_a_cell_does_not_read_it(monkeypatch, least, read):
    """Attack: site c pulls a cluster to where a cell may lie, and takes its own part out of the next sum."""
    c, cell = odd_one_out(least=least, rounds=1, updates=3)
    seen, real = [], harmony_steps.Course.add

    def bent(self, line, what, mine, reach=0.0):
        lies = line == "L5" and len(self.part.x) == 80
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
        assert np.linalg.norm(others) < 1e-9


def test_one_person_is_kept_back_however_many_cells_she_has():
    rng = np.random.default_rng(0)
    x = np.concatenate([rng.normal([5, 0], 0.1, (30, 2)), rng.normal([0, 5], 0.1, (30, 2))])
    donor = np.concatenate([np.arange(30) % 3, np.full(30, 3)])
    params = Params(SITES, HUB, "X", Settings(least=5, least_donors=2))
    part = harmony_steps.part_of(params, A, Cells(x, np.zeros(60, np.int64), donor), 2)
    part.start(2)
    part.assign(np.eye(2), None)
    assert part.shown(part.mass_by_group()).tolist() == [True, False]
    without = harmony_steps.part_of(Params(SITES, HUB, "X", Settings(least=5)), A, Cells(x, np.zeros(60, np.int64)), 2)
    without.start(2)
    without.assign(np.eye(2), None)
    assert without.shown(without.mass_by_group()).tolist() == [True, True]


def test_small_batches_stand_together():
    """Ten batches of two cells each: none is shown alone, all of them as one."""
    rng = np.random.default_rng(0)
    x = rng.normal([5, 0], 0.1, (20, 2))
    params = Params(SITES, HUB, "X", Settings(least=5))
    Y, lam = np.array([[1.0, 0.0]]), np.ones((10, 1))
    part = harmony_steps.part_of(params, A, Cells(x, np.arange(20) % 10), 2)
    part.start(1)
    s = part.regress(Y, np.ones((10, 1)))
    found = part.anchor_sums(part.mass_by_group(), s, lam)
    wanted = (10 / 30) * np.concatenate([x.sum(axis=0), [20.0]])  # one batch of twenty, with λ = 10
    np.testing.assert_allclose(found[0], wanted, rtol=1e-3)


def test_places_with_few_cells_are_empty_in_the_picture():
    c = case(size=200, least=5)
    found = pooled_harmony.ideal(c.params, plain_inputs(c))
    picture = found[HUB].picture
    shown = np.zeros(GRID * GRID)
    for u in SITES:
        places = picture.places(found[u].moved)
        own = np.bincount(places[places >= 0], minlength=GRID * GRID)
        assert (own[own > 0] < 5).any()
        shown += np.where(own >= 5, own, 0)
    np.testing.assert_array_equal(picture.counts.ravel(), shown)
    assert shown.sum() > 100


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
        if isinstance(msg, secure_sum.Total):
            self.seen[0] += 1
            if self.seen[0] > 2:
                msg = secure_sum.Total(msg.z + np.uint64(1))
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
        ("L2", lambda x: -3 * np.abs(x) - 1000, "number of cells"),
        ("L5", lambda x: x + 1e6, "larger than"),
        ("L6", lambda x: x - 500.0, "a mass"),
        ("L7", lambda x: x - 500.0, "a mass"),
        ("L8", lambda x: np.where(np.arange(x.size) % 5 == 4, -0.9 * x - 30, 50 * x + 1), "anchor"),
    ],
)
def test_impossible_sums_of_a_lying_site_end_the_run(monkeypatch, line, change, who):
    real = harmony_steps.Course.add

    def lies(self, at, what, mine, reach=0.0):
        if at == line and len(self.part.x) == 80:  # site b
            mine = np.clip(change(mine.ravel()), -reach or -np.inf, reach or np.inf).reshape(mine.shape)
        return (yield from real(self, at, what, mine, reach))

    monkeypatch.setattr(harmony_steps.Course, "add", lies)
    run = run_protocol(pooled_harmony, case(), timeout=3.0)
    errors = [run.errors[p] for p in (HUB, A, C) if p in run.errors]
    assert {e.code for e in errors if not getattr(e, "heard", False)} == {"absurd"}
    assert any(who in str(e) or "larger than" in str(e) for e in errors), errors


def right_of(c):
    wanted = plain_inputs(c)

    def right(lie, found):
        for p, one in found.items():
            assert np.all(np.isfinite(one.moved))
            if p in wanted:
                assert one.moved.shape == wanted[p].x.shape
            if lie.letter == "j":  # other inputs: the result of these inputs
                ideal = pooled_harmony.ideal(lie.case.params, plain_inputs(lie.case))
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
    lies = check_lies(federated_harmony, [c, twin], right=right_of(c), assumes=AS_PUBLISHED, timeout=1.0)
    assert lies.tried > 5


@pytest.mark.slow
@pytest.mark.parametrize(("module", "assumes"), [(pooled_harmony, {}), (federated_harmony, AS_PUBLISHED)])
def test_lies_in_every_message(module, assumes):
    c, twin = case(**TINY), case(seed=4, **TINY)
    lies = check_lies(module, [c, twin], right=right_of(c), assumes=assumes, full=True, timeout=4.0, within=40.0)
    print(f"\n{module.__name__}: {lies}")
    assert lies.tried > 50
    assert lies.aborted > 10


def test_a_site_that_stops_ends_the_run():
    run = run_protocol(pooled_harmony, case(), faults=[Fault("kill", "b", HUB, "MaskedInput")], timeout=1.0)
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
    run = run_protocol(pooled_harmony, case(least_donors=2), timeout=2.0)
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
