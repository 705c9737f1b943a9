"""Attacks on fine-tune: each succeeds against the step as it was, and not against the one of hardened mode.

G1: one malicious site steers the network and reads other sites' cells. G5: the coordinator has a state evaluated by
different sites, and solves for one. G8: the first task claims a late round, and so a far model.
"""

import itertools

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from cloister.cells import demo as demo_data  # noqa: E402
from cloister.errors import ProtocolAbort  # noqa: E402
from cloister.models.classifier import Blueprint, make  # noqa: E402
from cloister.models.learner import Learner, Recipe, Table  # noqa: E402
from cloister.mpc.crypto.entropy import Entropy  # noqa: E402
from cloister.mpc.sums import checked_sum, common_seed  # noqa: E402
from cloister.mpc.sums.packed_words import gaussian  # noqa: E402
from cloister.papers.attacks import gradient_tail  # noqa: E402
from cloister.study import Party  # noqa: E402
from cloister.testing import Case, run_protocol  # noqa: E402
from cloister.workflows.fine_tune import checked_training  # noqa: E402
from cloister.workflows.fine_tune.training_parts import Offer  # noqa: E402
from old_steps import fedavg_round  # noqa: E402

HIDDEN = 128


def setting(seed):
    """360 cells at each of three sites, the network of the default options."""
    rng = np.random.default_rng(seed)
    sites = demo_data.demo_sites()
    labels = tuple(sorted({str(v) for a in sites.values() for v in a.obs["cell_type"]}))
    cells, learners = {}, {}
    for name, a in sites.items():
        at = rng.permutation(a.n_obs)[:360]
        cells[name] = np.asarray(a.obsm["X_pca"], np.float32)[at]
        codes = np.array([labels.index(str(v)) for v in a.obs["cell_type"]])[at]
        blueprint = Blueprint("mlp", cells[name].shape[1], hidden=(HIDDEN,), dropout=0.1, seed=seed)
        learners[name] = Learner(
            make(blueprint, labels), len(labels), Recipe(5, 64, seed=seed), Table(torch.from_numpy(cells[name])), codes,
            [], describe="", site=name,
        )  # fmt: skip
    return cells, learners


def attacked(seed, step_of, *, rounds=20, **how):
    cells, learners = setting(seed)
    me, *others = cells
    first = learners[me].first.double().numpy()
    own = cells[me].astype(float)
    attacker = gradient_tail.Attacker(first, HIDDEN, own.shape[1], own, seed=seed, **how)
    seen = gradient_tail.readings(attacker, step_of([learners[u] for u in others]), rounds)
    honest = np.concatenate([cells[u] for u in others]).astype(float)
    return [gradient_tail.read_cells(seen, honest, own, level) for level in (0.99, 0.9)]


def old_step(learners):
    """The attacker claims nine times the cells of the others, and its update is within the bound."""

    def step(theta, wanted, t):
        deltas = [one.train(theta.astype(np.float32), t, 3e-3)[0] for one in learners]
        n = [one.cells for one in learners]
        others = fedavg_round.mean_update([*deltas, np.zeros(len(theta))], [*n, 9 * sum(n)], 4.0)
        mine = np.clip((wanted - theta - others) / 0.9, -4.0, 4.0)
        return others, theta + others + 0.9 * mine

    return step


def new_step(noise, rate=0.03):
    """An attacker that chooses every step as it likes, within the rate; it can only do less."""

    def step_of(learners):
        def step(theta, wanted, t):
            g = np.sum([one.gradient(theta.astype(np.float32), t, 1.0).sum for one in learners], axis=0)
            g = g + gaussian(Entropy(), len(g), noise) if noise else g
            return g, theta + np.clip(wanted - theta, -rate, rate)

        return step

    return step_of


def test_g1_a_site_that_steers_the_network_reads_cells_of_others():
    (close, beyond), _ = attacked(0, old_step)
    assert beyond >= 20  # of 720 cells; none of the attacker's own is as close to these
    (noisy, more), (near, _) = attacked(0, new_step(5.0))
    assert noisy <= 2
    assert more == 0
    (known, _), (own_near, _) = attacked(0, lambda learners: guess_by_own(0))
    assert near < own_near / 2  # its own cells say more about those of the others
    assert known < close


def guess_by_own(seed):
    """The attacker's own cells in place of readings."""
    cells, _ = setting(seed)
    own = next(iter(cells.values()))
    padded = np.zeros((HIDDEN * 3, own.shape[1]))
    padded[: len(own)] = own

    def step(theta, wanted, t):
        part = padded[HIDDEN * (t % 3) : HIDDEN * (t % 3 + 1)]
        out = np.zeros(len(theta))
        out[: part.size] = part.ravel()
        return out, theta

    return step


def test_g1_clipping_without_noise_is_not_enough_so_it_needs_consent():
    """Exact sums within the rate still show cells beyond the attacker's own; that is why sites must consent."""
    found = [attacked(0, new_step(0.0), scale=scale)[0][1] for scale in (1.0, 2.0)]
    assert max(found) >= 5


def stalled(present, claim=5e10, size=40, steps=20, noise=5.0):
    """What an attacker sees of one cell whose gradient it knows, if it keeps the model where it is.

    It adds so much to one entry that all others are small beside the length of the sum, and so do not move.
    """
    path, seen = checked_training.Path.begin(size), []
    gradient = np.zeros(size)
    gradient[1] = present  # one cell, clipped
    for _ in range(steps):
        others = gradient + gaussian(Entropy(), size, noise)
        seen.append(others[1])
        path.advance(others + claim * np.eye(size)[0], 0.03, 0.0)
    return np.mean(seen), np.abs(path.theta[1:]).max()


def test_g1_a_model_that_stands_still_gives_what_the_accountant_says():
    """The attacker averages the noise over all steps: one cell shifts the mean by sqrt(20) / 5 deviations, not more."""
    with_cell, without = (np.array([stalled(present) for _ in range(400)]) for present in (1.0, 0.0))
    assert max(with_cell[:, 1].max(), without[:, 1].max()) < 0.01  # a step moves by 0.03, if it is free
    deviation = np.sqrt((with_cell[:, 0].var() + without[:, 0].var()) / 2)
    shift = (with_cell[:, 0].mean() - without[:, 0].mean()) / deviation
    assert 0.6 < shift < np.sqrt(20) / 5 + 0.3  # the attack is as good as the bound, and no better


def test_g1_standing_still_between_readings_does_not_help():
    """Ten steps at each of two states: noise of 5 / sqrt(10), and no cell is read."""
    (close, beyond), (near, _) = attacked(0, new_step(5.0 / np.sqrt(10), rate=0.3), rounds=2)
    assert close <= 2
    assert beyond == 0
    (_, _), (own_near, _) = attacked(0, lambda learners: guess_by_own(0))
    assert near < own_near


# ---- G5 --------------------------------------------------------------------------------------------------------------


def test_g5_a_state_that_is_evaluated_by_different_sites_is_solved_for_one_site():
    _, learners = setting(0)
    theta = np.zeros(learners["basel"].size)
    pairs = list(itertools.combinations(learners, 2))
    cells = {u: one.cells for u, one in learners.items()}
    sums = []
    for t, pair in enumerate(pairs):  # three tasks with the same state, three lists of sites
        deltas = [learners[u].train(theta.astype(np.float32), t, 3e-3)[0] for u in pair]
        sums.append(fedavg_round.mean_update(deltas, [cells[u] for u in pair], 4.0))
    matrix = np.array([[u in pair for u in learners] for pair in pairs], float)
    solved = np.linalg.solve(matrix, np.array(sums))
    for u, one in zip(learners, solved, strict=True):
        truth = learners[u].train(theta.astype(np.float32), 9, 3e-3)[0]
        assert one @ truth / np.linalg.norm(one) / np.linalg.norm(truth) > 0.95


SITES, HUB = tuple(Party(u) for u in ("basel", "lugano", "vienna")), Party("hub")


def training():
    _, learners = setting(0)
    labels = tuple(f"label {i}" for i in range(next(iter(learners.values())).labels))
    inputs = {u: (Offer("x", labels, lambda _, u=u: learners[u]),) for u in SITES}
    return Case(checked_training.Params(SITES, HUB, "mlp", rounds=3, labels=labels, score_every=0), inputs)


def begun(then):
    """A coordinator that is honest up to the first step."""

    async def role(ch, params, *, entropy, identity):
        brought = await ch.gather(SITES, checked_training.Brings)
        await ch.broadcast(SITES, checked_training.Vocabulary(params.labels, SITES))
        ready = await ch.gather(SITES, checked_training.Ready)
        same = (brought[SITES[0]].shape, ready[SITES[0]].digest)
        seeds = common_seed.Params(SITES, HUB, everyone=True)
        await common_seed.coordinator(ch.sub("seed", (seeds, same)), seeds)
        sums = params.sum(ready[SITES[0]].size + 2)
        return await then(ch, params, sums, same)

    return role


async def leaves_one_out(ch, params, sums, same):
    """It publishes the sum of two sites; the masks of the third are left in it."""
    step = ch.sub("step/0/0", (sums, same))
    inputs = await step.gather(SITES, checked_sum.Masked, y=(sums.words,))
    await step.broadcast(SITES, checked_sum.Total(inputs[SITES[0]].y + inputs[SITES[1]].y))
    return await step.gather(SITES, checked_sum.Masked, y=(sums.words,))


async def calls_one_dropped(ch, params, sums, same):
    """It names two sites only in the agreement on keys of the sum."""
    fewer = checked_sum.Params(SITES[:2], HUB, sums.length)
    return await checked_sum.coordinator(ch.sub("step/0/0", (fewer, same)), fewer)


async def repeats_a_step(ch, params, sums, same):
    step = ch.sub("step/0/0", (sums, same))
    return [await checked_sum.coordinator(step, sums) for _ in range(2)]


@pytest.mark.parametrize("then", [leaves_one_out, calls_one_dropped, repeats_a_step])
def test_g5_no_sum_of_fewer_sites_and_no_state_twice(then):
    run = run_protocol(checked_training, training(), roles={HUB: begun(then)}, timeout=2.0)
    assert HUB not in run.outcomes
    assert all(isinstance(run.errors[u], ProtocolAbort) for u in SITES)
    for u in SITES:
        opened = [e.name for e, _ in run.receipts[u].entries if e.kind == "opened" and e.protocol == "checked_training"]
        assert len(opened) == (then is repeats_a_step)  # the first, honest one


# ---- G8 --------------------------------------------------------------------------------------------------------------


def test_g8_a_first_task_of_a_late_round_let_a_far_model_pass():
    assert fedavg_round.check_task(19, None, 20)
    assert fedavg_round.reach(19, 4.0) > 150
    path = checked_training.Path.begin(4)  # no message names a round or a state; the first step is the first
    path.advance(np.full(4, 1e30), 0.03, 0.0)
    assert path.s == 1
    assert np.abs(path.theta).max() <= 0.03 * (1 + 1e-9)
