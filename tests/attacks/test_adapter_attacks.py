"""Attacks on the training of adapt-model: each succeeds against the step as it was, not against that of hardened mode.

The inputs of the adapter are taps, so taps of single samples are what G1 and G5 read; the provider knows which model
computed them. G1: one malicious site steers the adapter. G5: the coordinator has a state evaluated by different sites.
"""

import dataclasses
import itertools

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("numba")

from cloister.cells import demo as demo_data  # noqa: E402
from cloister.errors import RefusedError  # noqa: E402
from cloister.models import polynomial  # noqa: E402
from cloister.models.learner import Table  # noqa: E402
from cloister.mpc.crypto.entropy import Entropy  # noqa: E402
from cloister.mpc.crypto.owner_ckks import scheme  # noqa: E402
from cloister.mpc.net import wire  # noqa: E402
from cloister.mpc.sums.packed_words import gaussian  # noqa: E402
from cloister.papers.attacks import gradient_tail  # noqa: E402
from cloister.rehearsal.rehearsal import rehearse, run_parties  # noqa: E402
from cloister.rehearsal.run import workflow_part  # noqa: E402
from cloister.study import Party  # noqa: E402
from cloister.workflows.adapt_model import model_card  # noqa: E402
from cloister.workflows.adapt_model import workflow as adapt_model  # noqa: E402
from cloister.workflows.adapt_model.checkpoint import Taps  # noqa: E402
from cloister.workflows.adapt_model.inference import fingerprint, inputs_of  # noqa: E402
from cloister.workflows.adapt_model.training import learner_of  # noqa: E402
from old_steps import fedavg_round  # noqa: E402

UNITS = 8  # of the default adapter
ROUNDS = 40


def setting(mode, seed=0):
    """360 samples with one tap of 20 numbers at each of three sites, of which every second trains; default options."""
    rng, sites = np.random.default_rng(seed), demo_data.demo_sites()
    labels = tuple(sorted({str(v) for a in sites.values() for v in a.obs["cell_type"]}))
    options = adapt_model.in_mode(adapt_model.Options(), mode)
    taps, learners = {}, {}
    for name, a in sites.items():
        at = rng.permutation(a.n_obs)[:360]
        taps[name] = np.asarray(a.obsm["X_pca"], np.float32)[at]
        codes = np.array([labels.index(str(v)) for v in a.obs["cell_type"]])[at]
        codes[1::2] = -1
        table = Table(torch.from_numpy(taps[name][:, None]))
        learners[name] = learner_of(options, (1, taps[name].shape[1]), labels, table, codes, [], name, seed)
    return options, taps, learners


@dataclasses.dataclass(frozen=True)
class Attacker(gradient_tail.Attacker):
    """Also opens the second layer, which begins at zero, so that gradients reach the first."""

    def wanted(self, t, directions):
        theta = super().wanted(t, directions)
        start = self.hidden * (self.inputs + 1)
        theta[start : start + self.hidden * self.inputs] = 0.5 * (-1.0) ** np.arange(self.hidden * self.inputs)
        return theta


def attacked(mode, step_of, seed=0, level=0.999, **how):
    """How many taps of others are read (cosine above `level`): of 360 that train, and of 360 that do not."""
    options, taps, learners = setting(mode, seed)
    me, *others = taps
    own = taps[me].astype(float)
    attacker = Attacker(learners[me].first.double().numpy(), UNITS, own.shape[1], own, seed=seed, **how)
    seen = gradient_tail.readings(attacker, step_of(options, [learners[u] for u in others]), ROUNDS)
    return tuple(
        gradient_tail.read_cells(seen, np.concatenate([taps[u][i::2] for u in others]).astype(float), own, level)[0]
        for i in (0, 1)
    )


def old_step(options, learners):
    """The attacker claims nine times the samples of the others, and its update is within the bound."""

    def step(theta, wanted, t):
        deltas = [one.train(theta.astype(np.float32), t, options.lr)[0] for one in learners]
        n = [one.cells for one in learners]
        others = fedavg_round.mean_update([*deltas, np.zeros(len(theta))], [*n, 9 * sum(n)], 4.0)
        mine = np.clip((wanted - theta - others) / 0.9, -4.0, 4.0)
        return others, theta + others + 0.9 * mine

    return step


def new_step(noise=None):
    """An attacker that chooses every step as it likes, within the rate; it can only do less."""

    def step_of(options, learners):
        z = options.dp_noise if noise is None else noise

        def step(theta, wanted, t):
            g = np.sum([one.gradient(theta.astype(np.float32), t, 1.0).sum for one in learners], axis=0)
            g = g + gaussian(Entropy(), len(g), z) if z else g
            return g, theta + np.clip(wanted - theta, -options.lr, options.lr)

        return step

    return step_of


@pytest.fixture
def trained(tmp_path):
    """Run `stage=train` on stored taps, in a mode; returns the run and what travelled, by name."""
    sites = {p: a[:24].copy() for p, a in demo_data.demo_sites().items()}
    encoder = polynomial.Encoder.load(demo_data.demo_encoder())

    def call(mode, **more):
        told = model_card.told_by(encoder, scheme.SMALL)
        folder, frames = tmp_path / mode, []
        folder.mkdir()
        for name, a in sites.items():
            x = inputs_of(a, encoder.card)
            taps = polynomial.taps_of(encoder, polynomial.hidden(encoder, x))
            Taps(folder / f"{name}.taps.npz", fingerprint(x, told, mode)).add(taps, None)
        options = {"model": str(demo_data.demo_encoder()), "ring": "small", "stage": "train", "taps": str(folder)}
        run = rehearse(
            "adapt-model", sites, mode=mode, rounds=3, on_frame=frames.append, timeout=5.0, **options, **more
        )
        return run, frames

    return call


def test_g1_a_site_that_steers_the_adapter_reads_taps_of_others():
    """A tap that does not train is read by chance only: at this cosine none is."""
    for seed in (0, 1):
        trains, does_not = attacked("published", old_step, seed, 0.998, fall=0.3)
        assert trains >= 4
        assert does_not == 0
        assert attacked("hardened", new_step(), seed, 0.998, fall=0.3) == (0, 0)


def test_g5_a_state_that_is_evaluated_by_different_sites_is_solved_for_one_site():
    options, _, learners = setting("published")
    theta = np.zeros(learners["basel"].size, np.float32)
    pairs = list(itertools.combinations(learners, 2))
    sums = []
    for t, pair in enumerate(pairs):  # three tasks with the same state, three lists of sites
        deltas = [learners[u].train(theta, t, options.lr)[0] for u in pair]
        sums.append(fedavg_round.mean_update(deltas, [learners[u].cells for u in pair], 4.0))
    matrix = np.array([[u in pair for u in learners] for pair in pairs], float)
    for u, one in zip(learners, np.linalg.solve(matrix, np.array(sums)), strict=True):
        truth = learners[u].train(theta, 9, options.lr)[0]
        assert one @ truth / np.linalg.norm(one) / np.linalg.norm(truth) > 0.95


def named(frames):
    return {frame.name for frame in map(wire.unpack, frames) if frame.kind == "data"}


def test_g5_no_message_of_hardened_training_carries_a_model_or_names_a_round(trained):
    states = {f"federated_training.{name}" for name in ("Task", "Weights", "Model")}
    _, frames = trained("published")
    assert states <= named(frames)  # the coordinator sends the state of every round, and chooses it
    run, frames = trained("hardened")
    own = {name for name in named(frames) if "training" in name}
    assert own == {f"checked_training.{name}" for name in ("Brings", "Vocabulary", "Ready")}
    model = run.model
    weights = np.concatenate([p.detach().numpy().ravel() for p in model.module.parameters()])
    moved = weights - np.concatenate([p.detach().numpy().ravel() for p in first_of(model).parameters()])
    for kind in (np.float32, np.float64):  # neither the weights nor what was learned on top of the first ones
        for x in (weights, moved):
            assert not any(x.astype(kind)[:8].tobytes() in frame for frame in frames)
    for site in ("basel", "lugano", "vienna"):
        entries = [e for e, _ in run.receipts[site].entries if e.protocol == "checked_training"]
        opened = [e.name for e in entries if e.kind == "opened"]
        assert len(opened) == len(set(opened)) == 3 + 4  # every step once, and four scores
    assert len({run.outcomes[site].model.to_bytes() for site in ("basel", "lugano", "vienna")}) == 1


def first_of(model):
    from cloister.models.adapter import make

    return make(model.module.config)


def test_exact_sums_are_refused_before_anything_is_sent(trained):
    run, _ = trained("hardened", dp_noise=0.0)  # everyone consents in a rehearsal
    again = run_parties(
        run.study, dict.fromkeys(run.study.parties, workflow_part), run.data, consent={Party("lugano"): frozenset()}
    )
    assert isinstance(again.errors["lugano"], RefusedError)
    assert "exact-updates" in str(again.errors["lugano"])
    assert {e.name for e, _ in again.receipts["lugano"].entries if e.kind == "sent"} <= {"channel.Abort"}
