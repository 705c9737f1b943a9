"""Every site computes the model from checked sums; what a cell can change of a sum is bounded, and noise covers it."""

import hashlib
from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from cloister.disclosure import Thresholds
from cloister.errors import DataError, ParameterError, PeerLost, ProtocolAbort, RefusedError
from cloister.mpc.crypto.entropy import Entropy
from cloister.mpc.sums import common_seed
from cloister.rehearsal.rehearsal import Fault
from cloister.study import Party
from cloister.testing import Case, check_no_errors, check_vectors, check_view, run_protocol, transcript, values
from cloister.workflows.fine_tune import checked_training
from cloister.workflows.fine_tune.checked_training import Params
from cloister.workflows.fine_tune.checked_training import Path as Way
from cloister.workflows.fine_tune.pseudo_labels import Pseudo
from cloister.workflows.fine_tune.training_parts import Offer
from cloister.workflows.options import privacy_budget

VECTORS = Path(__file__).parents[2] / "vectors" / "checked_training.json"
HUB = Party("hub")
D = 4


@dataclass
class Clipped:
    sum: np.ndarray
    loss: float
    cells: int
    donor: np.ndarray | None = None
    left_out: int = 0


class Softmax:
    """Multinomial regression: small enough to check by hand."""

    def __init__(self, x, y, labels, salt="", donor=None):
        self.x, self.y, self.k, self.donor = x, np.array([labels.index(v) for v in y]), len(labels), donor
        self.size = self.trainable = D * self.k
        self.held = np.arange(len(x)) % 4 == 0
        self.digest = hashlib.sha256(f"softmax {D} {self.k} {salt}".encode()).digest()

    def _probabilities(self, theta, at):
        z = self.x[at] @ theta.astype(np.float64).reshape(D, self.k)
        e = np.exp(z - z.max(axis=1, keepdims=True))
        return e / e.sum(axis=1, keepdims=True)

    def group(self, *, held_out):
        at = self.held if held_out else ~self.held
        return self.y[at], None if self.donor is None else self.donor[at]

    def keep_held_out(self, keep):
        stays = ~self.held
        stays[np.flatnonzero(self.held)[keep]] = True
        self.x, self.y, self.held = self.x[stays], self.y[stays], self.held[stays]
        self.donor = None if self.donor is None else self.donor[stays]

    def gradient(self, theta, t, clip, keep):
        at = np.flatnonzero(~self.held)[keep]
        p = self._probabilities(theta, at)
        loss = float(-np.log(p[np.arange(len(p)), self.y[at]] + 1e-300).sum())
        p[np.arange(len(p)), self.y[at]] -= 1
        each = (self.x[at][:, :, None] * p[:, None, :]).reshape(len(p), -1)
        each /= np.maximum(clip, np.linalg.norm(each, axis=1, keepdims=True))
        return Clipped(each.sum(axis=0), loss, len(p), None if self.donor is None else self.donor[at])

    def score(self, theta):
        p, y = self._probabilities(theta, self.held), self.y[self.held]
        counts = np.zeros((self.k, self.k))
        np.add.at(counts, (y, p.argmax(axis=1)), 1)
        return counts, float(-np.log(p[np.arange(len(y)), y] + 1e-300).sum())


def case(n=3, seed=0, tweak=None, cells=120, thresholds=None, **options):
    rng = np.random.default_rng(seed)
    centres = np.random.default_rng(7).normal(0, 1.5, (3, D))
    sites = tuple(Party(f"site-{i}") for i in range(n))
    inputs = {}
    for i, u in enumerate(sites):
        y = rng.integers(0, 3, cells + 8 * i)
        x = centres[y] + rng.normal(0, 0.6, (len(y), D))
        names, more = ["abc"[k] for k in y], (tweak or {}).get(u, {})

        def build(labels, x=x, names=names, more=more):
            return Softmax(x, names, list(labels), **more)

        inputs[u] = (Offer("four numbers", ("a", "b", "c"), build, thresholds),)
    return Case(Params(sites, HUB, "softmax", **{"rounds": 5, "rate": 0.2} | options), inputs)


NOISY = {"noise": 2.0, "epsilon": 3.0, "delta": 1e-5}


class Steady:
    """Adds the same sixteenths everywhere, so that every machine computes the same bytes."""

    trainable, size, digest = 5, 5, bytes(32)

    def __init__(self, number):
        self.number = number

    def group(self, *, held_out):
        return np.arange(20) % 2, None

    def keep_held_out(self, keep):
        assert keep.all()

    def gradient(self, theta, t, clip, keep):
        return Clipped((np.arange(5) - 2.0 + self.number + t) / 16, 8.0, 20)

    def score(self, theta):
        return np.array([[8.0, 2.0], [self.number, 10.0 - self.number]]), 3.0


def steady_case():
    sites = tuple(Party(f"site-{i}") for i in range(3))
    inputs = {u: (Offer("numbers", ("a", "b"), lambda _, i=i: Steady(i)),) for i, u in enumerate(sites)}
    return Case(Params(sites, HUB, "steady", rounds=2), inputs)


def test_vectors():
    check_vectors(checked_training, steady_case(), VECTORS)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"n": 2},
        {"steps": 3, "rounds": 2},
        {"schedule": "cosine"},
        {"schedule": "step", "decay_at": (1, 3), "factor": 0.5},
        {"weight_decay": 0.1},
        {"clip": 0.3},
    ],
    ids=str,
)
def test_equals_the_same_steps_in_one_place(options):
    c = case(score_every=0, **options)
    run = run_protocol(checked_training, c)
    check_no_errors(run)
    wanted = checked_training.ideal(c.params, {u: x[0] for u, x in c.inputs.items()})[HUB]
    found = values(run)
    np.testing.assert_allclose(found[HUB].theta, wanted, atol=1e-5)  # sums on a grid of 2^-26
    assert np.abs(wanted).max() > 0.2
    for u in c.params.sites:
        np.testing.assert_array_equal(found[u].theta, found[HUB].theta)
        assert found[u].history == found[HUB].history


@pytest.mark.parametrize("metric", ["accuracy", "loss", "balanced_accuracy", "macro_f1"])
def test_scores_are_those_of_all_held_out_cells_and_choose_the_round(metric):
    c = case(metric=metric, n=2, rounds=6, rate=0.5, cells=240)  # ten and more held-out cells of each label
    run = run_protocol(checked_training, c)
    check_no_errors(run)
    found = values(run)[HUB]
    learners = [x[0].build(("a", "b", "c")) for x in c.inputs.values()]
    counts = sum(one.score(np.zeros(12, np.float32))[0] for one in learners)
    assert found.history[0]["cells"] == counts.sum()
    assert found.history[0]["accuracy"] == pytest.approx(np.trace(counts) / counts.sum())
    assert found.history[-1]["accuracy"] > found.history[0]["accuracy"]
    assert found.history[1]["train_loss"] < found.history[0]["train_loss"]
    values_of = [row[metric] for row in found.history]
    assert found.history[found.best_round][metric] == (min if metric == "loss" else max)(values_of)


def test_early_stop_and_few_held_out_cells():
    c = case(rounds=30, rate=3.0, patience=2)
    assert len(values(run_protocol(checked_training, c))[HUB].history) < 30
    few = values(run_protocol(checked_training, case(min_scored=10**6)))[HUB]
    assert few.best_round == 5


def test_no_message_carries_a_model_a_round_or_a_number_of_cells():
    run = run_protocol(checked_training, case(labels=("a", "b", "c")))
    sent = {row[0] for rows in transcript(run).values() for row in rows}
    ours = {name for name in sent if name.startswith("checked_training.")}
    assert ours == {f"checked_training.{kind}" for kind in ("Brings", "Vocabulary", "Ready")}
    names = {f.name for kind in ("Brings", "Vocabulary", "Ready") for f in fields(getattr(checked_training, kind))}
    assert names == {"shape", "labels", "labelled", "digest", "size"}


def test_view_does_not_depend_on_the_cells():
    vocabulary = ("a", "b", "c")
    check_view(checked_training, case(seed=1, labels=vocabulary), case(seed=2, labels=vocabulary))


@pytest.mark.parametrize(("name", "nth"), [("Masked", 0), ("Masked", 2), ("Confirm", 0), ("Key", 0)])
def test_a_dropout_ends_the_run_for_all(name, nth):
    c = case(n=4)
    fault = Fault("kill", c.params.sites[1], HUB, name, nth=nth)
    run = run_protocol(checked_training, c, faults=[fault], timeout=2.0)
    assert run.outcomes == {}
    opened = [e.name for e, _ in run.receipts[HUB].entries if e.kind == "opened" and e.protocol == "checked_training"]
    assert len(opened) <= 2  # those before; no sum of fewer sites


def test_another_architecture_or_input_is_named():
    run = run_protocol(checked_training, case(n=4, tweak={"site-2": {"salt": "deeper"}}), timeout=2.0)
    assert "site-2 has another architecture" in str(run.errors[HUB])
    c = case()
    u = Party("site-1")
    c.inputs[u] = (Offer("five numbers", c.inputs[u][0].labels, c.inputs[u][0].build),)
    assert "site-1 has another kind of input" in str(run_protocol(checked_training, c, timeout=2.0).errors[HUB])


@pytest.mark.parametrize(("labels", "text"), [(("a", "b"), "not in the study's vocabulary"), (None, "no cell")])
def test_labels_that_do_not_fit(labels, text):
    c = case(labels=labels or ())
    if labels is None:
        c.inputs[Party("site-1")] = (Offer("four numbers", (), c.inputs[Party("site-1")][0].build),)
    run = run_protocol(checked_training, c, timeout=2.0)
    assert isinstance(run.errors["site-1"], DataError)
    assert text in str(run.errors["site-1"])


# ---- thresholds, consent ---------------------------------------------------------------------------------------------


def test_exact_sums_need_every_sites_consent():
    c = case()

    async def without(ch, params, offer, *, entropy, identity):
        return await checked_training.site(
            ch, params, offer, entropy=entropy, identity=identity, consent=frozenset({"open-model"})
        )

    run = run_protocol(checked_training, c, roles={Party("site-1"): without}, timeout=2.0)
    assert isinstance(run.errors["site-1"], RefusedError)
    assert "exact-updates" in str(run.errors["site-1"])
    sent = [row[0] for row in transcript(run)["site-1"] if not row[0].startswith("channel.")]
    assert sent == []
    noisy = run_protocol(checked_training, case(**NOISY), roles={Party("site-1"): without})
    check_no_errors(noisy)


def test_without_noise_labels_of_few_cells_do_not_train_and_the_receipt_states_the_smallest_group():
    c = case()
    u = Party("site-0")
    rng = np.random.default_rng(3)
    names = ["a"] * 60 + ["b"] * 60 + ["c"] * 8
    x = rng.normal(0, 1, (128, D))

    def build(labels):
        return Softmax(x, names, list(labels))

    c.inputs[u] = (Offer("four numbers", ("a", "b", "c"), build),)
    run = run_protocol(checked_training, c)
    check_no_errors(run)
    assert "6 cells of labels with fewer than 10 cells" in values(run)[u].notes[0]
    assert run.receipts[u].smallest_group["cells"] >= 10
    noisy = run_protocol(checked_training, Case(case(**NOISY).params, c.inputs))
    assert values(noisy)[u].notes == ()  # the noise covers rare labels


def test_a_site_of_few_cells_is_refused_before_its_first_sum():
    c = case(cells=8)
    run = run_protocol(checked_training, c, timeout=2.0)
    assert isinstance(run.errors["site-0"], DataError)
    assert "min_cells = 10" in str(run.errors["site-0"])
    raised = case(thresholds=Thresholds(min_cells=1000))
    assert "min_cells = 1000" in str(run_protocol(checked_training, raised, timeout=2.0).errors["site-0"])


@pytest.mark.parametrize("options", [{}, {**NOISY, "score_every": 0}], ids=["exact", "noise"])
def test_few_donors_are_refused(options):
    donor = np.arange(120) % 2
    run = run_protocol(checked_training, case(tweak={"site-0": {"donor": donor}}, unit="donor", **options), timeout=2.0)
    assert "min_donors = 3" in str(run.errors["site-0"])


# ---- what a step can do ----------------------------------------------------------------------------------------------


@given(
    hnp.arrays(np.float64, (6, 7), elements=st.floats(-1e12, 1e12)),
    st.floats(1e-4, 1.0),
)
def test_no_sum_moves_a_weight_by_more_than_the_rate(sums, rate):
    way = Way.begin(7)
    for g in sums:
        before = way.theta.copy()
        way.advance(g, rate, 0.0)
        assert np.all(np.isfinite(way.theta))
        assert np.abs(way.theta - before).max() <= rate * (1 + 1e-9)


def test_the_length_of_a_sum_does_not_count():
    rng = np.random.default_rng(0)
    sums = rng.normal(0, 1, (5, 9))
    ways = [Way.begin(9), Way.begin(9)]
    for i, g in enumerate(sums):
        ways[0].advance(g, 0.1, 0.0)
        ways[1].advance(g * 10.0 ** (3 * i), 0.1, 0.0)
    np.testing.assert_allclose(ways[0].theta, ways[1].theta, atol=1e-12)


# ---- noise -----------------------------------------------------------------------------------------------------------


def test_noise_of_all_sites_but_one_has_the_agreed_width():
    params = case(n=4, **NOISY).params
    zeros = np.zeros(60_000)
    one = params.code.decode(checked_training.words_of(params, params.code, zeros, Entropy()))
    assert one.std() * np.sqrt(3) == pytest.approx(2.0, rel=0.02)
    exact = checked_training.words_of(case().params, params.code, zeros, Entropy())
    assert not exact.any()


def test_with_noise_every_opened_number_has_some_and_the_receipt_states_the_budget():
    c = case(rounds=1, **NOISY)
    runs = [run_protocol(checked_training, c) for _ in range(2)]
    rows = [values(run)[HUB].history for run in runs]
    assert rows[0][0]["accuracy"] != rows[1][0]["accuracy"]
    assert "train_loss" not in rows[0][0]
    assert values(runs[0])[HUB].best_round == 1
    opened = [
        e.name for e, _ in runs[0].receipts[HUB].entries if e.kind == "opened" and e.protocol == "checked_training"
    ]
    assert len(opened) == 3  # two scores, one step
    assert all("(3, 1e-05)-private per cell" in name for name in opened)


def test_openings_count_the_sums_that_one_cell_is_in():
    assert checked_training.openings(20, 1, 1) == 21  # of a held-out cell
    assert checked_training.openings(20, 5, 1) == 100  # of a training cell
    assert checked_training.openings(20, 1, 0) == 20
    assert checked_training.openings(20, 1, 7) == 20


def test_the_budget_is_that_of_opacus():
    accountants = pytest.importorskip("opacus.accountants")
    for noise, sums in ((5.0, 21), (1.0, 3), (0.7, 20)):
        accountant = accountants.RDPAccountant()
        accountant.history = [(noise, 1.0, sums)]
        orders = [1 + x / 20 for x in range(1, 400)] + [float(x) for x in range(21, 512)]
        wanted = accountant.get_epsilon(1e-5, alphas=orders)
        assert wanted <= privacy_budget(noise, 1e-5, sums) <= wanted + 0.01


@pytest.mark.parametrize(
    "options",
    [
        {"rounds": 0},
        {"steps": 0},
        {"schedule": "step"},
        {"metric": "auc"},
        {"rate": 0.0},
        {"clip": 0.0},
        {"noise": -1.0},
        {"unit": "site"},
        {"patience": 2, "score_every": 0},
        {"noise": 1.0, "patience": 2},
        {"noise": 1.0, "metric": "macro_f1"},
        {"noise": 1.0, "pseudo": Pseudo("xclp")},
        {"noise": 1.0, "unit": "donor"},
        {"noise": 1.0, "pseudo": Pseudo("client")},
    ],
)
def test_bad_parameters(options):
    with pytest.raises(ParameterError):
        case(**options)


# ---- what a site checks ----------------------------------------------------------------------------------------------


def test_label_names_that_do_not_go_together():
    def brought(*labels):
        return {u: checked_training.Brings("x", own, True) for u, own in zip(case().params.sites, labels, strict=False)}

    for labels, code in (
        ((("p", "q"), ("P", "q")), "spelling"),
        ((("p", "q"), ("r", "s")), "foreign-labels"),
        ((("p",), ("p",)), "labels"),
    ):
        with pytest.raises(ProtocolAbort) as found:
            checked_training.vocabulary(case().params, brought(*labels))
        assert (found.value.line, found.value.code) == ("L1", code)


@pytest.mark.parametrize(
    ("labels", "labelled"),
    [
        (("a", "b"), None),  # one of mine is missing
        (("a", "b", "c", "c"), None),
        (("a", "b", "c"), ("site-0", "site-1")),  # not all
        (("a", "b", "c"), ("site-0", "site-1", "site-2", "else")),
    ],
)
def test_a_wrong_vocabulary_is_noticed_before_any_sum(labels, labelled):
    c = case()
    sites = c.params.sites

    async def role(ch, params, *, entropy, identity):
        await ch.gather(sites, checked_training.Brings)
        await ch.broadcast(sites, checked_training.Vocabulary(labels, tuple(map(Party, labelled or sites))))
        await ch.gather(sites, checked_training.Ready)

    run = run_protocol(checked_training, c, roles={HUB: role}, timeout=2.0)
    own = [run.errors[u] for u in sites if not run.errors[u].heard]
    assert own
    assert all((e.line, e.code) == ("L2", "labels") for e in own)


async def goes_on_without_one(ch, params, *, entropy, identity):
    """A coordinator that does not mind who is missing."""
    sites = params.sites
    brought = await ch.gather(sites, checked_training.Brings)
    await ch.broadcast(sites, checked_training.Vocabulary(("a", "b", "c"), sites))
    ready = await ch.gather(sites, checked_training.Ready)
    seeds = common_seed.Params(sites, HUB, everyone=True)
    same = (brought[sites[0]].shape, ready[sites[0]].digest)
    await common_seed.coordinator(ch.sub("seed", (seeds, same)), common_seed.Params(sites, HUB))
    await ch.gather(sites[:3], checked_training.Ready)


@pytest.mark.parametrize("role", [checked_training.coordinator, goes_on_without_one])
def test_a_site_that_is_missing_from_the_seed_ends_the_run(role):
    """Four sites; a sum is over all of them, so training is of all or of none."""
    c = case(n=4)
    fault = Fault("kill", Party("site-3"), HUB, "Confirm")
    run = run_protocol(checked_training, c, faults=[fault], roles={HUB: role}, timeout=2.0)
    assert run.outcomes == {}
    if role is checked_training.coordinator:
        assert isinstance(run.errors[HUB], PeerLost)
        assert "site-3" in str(run.errors[HUB])
    else:
        own = [run.errors[u] for u in c.params.sites[:3] if not run.errors[u].heard]
        assert own
        assert all((e.protocol, e.line, e.code) == ("common_seed", "L6", "split-view") for e in own)
