import hashlib
import itertools
from pathlib import Path

import numpy as np
import pytest

from cloister.errors import DataError, ParameterError, ProtocolAbort
from cloister.mpc.crypto.entropy import Entropy
from cloister.papers import federated_training
from cloister.papers.federated_training import Params
from cloister.rehearsal.rehearsal import Fault
from cloister.study import Party
from cloister.testing import Case, check_no_errors, check_vectors, check_view, run_protocol, transcript, values
from cloister.workflows.fine_tune.pseudo_labels import Pseudo
from cloister.workflows.fine_tune.training_parts import Offer, State, better, from_curves, metrics, to_curves
from cloister.workflows.fine_tune.training_terms import NAME, TAIL, choose_clients, update_words, weight_of

VECTORS = Path(__file__).parents[1] / "vectors" / "federated_training.json"
HUB = Party("hub")
D = 4


class Softmax:
    """Multinomial regression by full-batch gradient steps: a learner small enough to check by hand."""

    def __init__(self, x, y, labels, salt="", nan_at=None):
        self.x, self.y, self.k = x, np.array([labels.index(v) for v in y]), len(labels)
        self.size, self.cells, self.nan_at = D * self.k, len(x), nan_at
        self.digest = hashlib.sha256(f"softmax {D} {self.k} {salt}".encode()).digest()

    def _probabilities(self, theta):
        z = self.x @ theta.astype(np.float64).reshape(D, self.k)
        e = np.exp(z - z.max(axis=1, keepdims=True))
        return e / e.sum(axis=1, keepdims=True)

    def train(self, theta, t, rate):
        w = theta.astype(np.float64)
        for _ in range(3):
            p = self._probabilities(w)
            p[np.arange(len(self.y)), self.y] -= 1
            w = w - rate * (self.x.T @ p).ravel() / len(self.y)
        delta = w - theta
        if self.nan_at == t:
            delta[0] = np.nan
        return delta, self.score(w)[1] / len(self.y)

    def score(self, theta):
        p = self._probabilities(theta)
        counts = np.zeros((self.k, self.k))
        np.add.at(counts, (self.y, p.argmax(axis=1)), 1)
        return counts, float(-np.log(p[np.arange(len(self.y)), self.y] + 1e-300).sum())


def case(n=3, seed=0, tweak=None, kinds="abc", **options):
    rng = np.random.default_rng(seed)
    centres = np.random.default_rng(7).normal(0, 1.5, (3, D))
    sites = tuple(Party(f"site-{i}") for i in range(n))
    inputs = {}
    for i, u in enumerate(sites):
        y = rng.integers(0, len(kinds), 20 + 7 * i)
        x = centres[y] + rng.normal(0, 1, (len(y), D))
        names = [kinds[k] for k in y]
        more = (tweak or {}).get(u, {})

        def build(labels, x=x, names=names, more=more):
            return Softmax(x, names, list(labels), **more)

        inputs[u] = (Offer("four numbers", tuple(sorted(set(names))), build),)
    return Case(Params(sites, HUB, "softmax", **({"rounds": 4, "rate": 0.5} | options)), inputs)


class Semi(Softmax):
    """The same, taught further labels in every round: keeps what it was taught for a look."""

    def __init__(self, x, y, labels, **more):
        known = [v for v in y if v is not None]
        super().__init__(x[[v is not None for v in y]], known or [labels[0]], labels, **more)
        self.all_x, self.given = x, np.array([-1 if v is None else labels.index(v) for v in y])
        self.taught, self.cells = [], len(x)
        if not known:
            self.x, self.y = x[:0], np.zeros(0, int)

    def embed(self, theta):
        return self.all_x.astype(np.float64), self.given

    def teach(self, codes, confidence):
        self.taught.append((np.array(codes), np.array(confidence)))

    def teach_itself(self, theta, source, **form):
        self.teach(np.full(len(self.given), -1), np.zeros(len(self.given)))

    def train(self, theta, t, rate):
        if self.taught:
            codes, sure = self.taught[-1]
            use = (codes >= 0) & (sure > 0.2)
            self.x, self.y = self.all_x[use], codes[use]
        return super().train(theta, t, rate) if len(self.y) else (np.zeros(self.size), 0.0)


class Steady:
    """Learns the same sixteenths everywhere: every machine computes the same bytes."""

    size, cells, digest = 5, 8, bytes(32)

    def __init__(self, number):
        self.number = number

    def train(self, theta, t, rate):
        return (np.arange(5) - 2.0 + self.number + t) / 16, 0.5

    def score(self, theta):
        return np.array([[4.0, 1.0], [self.number, 2.0]]), 3.0


def steady_case():
    sites = tuple(Party(f"site-{i}") for i in range(4))
    inputs = {u: (Offer("numbers", ("a", "b"), lambda _, i=i: Steady(i)),) for i, u in enumerate(sites)}
    return Case(Params(sites, HUB, "steady", rounds=2, clients=3), inputs)


def offers(c):
    return {u: x[0] for u, x in c.inputs.items()}


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"n": 2},
        {"n": 5, "clients": 2},
        {"weighting": "plain"},
        {"schedule": "cosine"},
        {"labels": ("c", "b", "a", "z")},
    ],
    ids=["cells", "two", "sampled", "plain", "cosine", "vocabulary"],
)
def test_equals_plain_averaging(options):
    c = case(score_every=0, **options)  # unscored: the last model is the result
    run = run_protocol(federated_training, c)
    check_no_errors(run)
    wanted = federated_training.ideal(c.params, offers(c))[HUB]
    found = values(run)
    resolution = c.params.code(c.params.clients or len(c.params.sites)).resolution
    # half a step per site and round, divided by the weight; float32 on the way down
    np.testing.assert_allclose(found[HUB].theta, wanted, atol=40 * resolution + 1e-6)
    assert np.abs(wanted).max() > 0.05
    for u in c.params.sites:
        np.testing.assert_array_equal(found[u].theta, found[HUB].theta)
        assert found[u].labels == found[HUB].labels
        assert found[u].history == found[HUB].history


def test_the_curves_are_those_of_the_pooled_validation_cells():
    c = case(rounds=3)
    run = run_protocol(federated_training, c)
    history = values(run)[HUB].history
    learners = [o.build(("a", "b", "c")) for o in offers(c).values()]
    counts = sum(learner.score(np.zeros(12, np.float32))[0] for learner in learners)
    assert history[0]["accuracy"] == pytest.approx(np.trace(counts) / counts.sum())
    assert [row["round"] for row in history] == [0, 1, 2, 3]
    assert history[-1]["accuracy"] > history[0]["accuracy"]
    assert history[-1]["train_loss"] < history[0]["train_loss"] if "train_loss" in history[-1] else True
    assert history[1]["train_loss"] < history[0]["train_loss"]


def test_vectors():
    check_vectors(federated_training, steady_case(), VECTORS)


def test_metrics_by_hand():
    found = metrics(np.array([[3.0, 1, 0], [0, 2, 0], [0, 0, 0]]), 12.0)
    assert found["accuracy"] == pytest.approx(5 / 6)
    assert found["macro_f1"] == pytest.approx((6 / 7 + 4 / 5) / 2)
    assert found["loss"] == pytest.approx(2.0)
    assert better("loss", found) == -2.0
    assert better("accuracy", metrics(np.zeros((2, 2)), 0.0)) == -np.inf


def test_early_stop_keeps_the_best():
    c = case(rounds=30, rate=3000.0, patience=2, bound=50.0)  # so large that it swings
    found = values(run_protocol(federated_training, c))[HUB]
    scores = [row["accuracy"] for row in found.history]
    assert found.best_round == int(np.argmax(scores))
    assert len(scores) < 30


def test_view_does_not_depend_on_the_cells():
    vocabulary = ("a", "b", "c")
    check_view(federated_training, case(seed=1, labels=vocabulary), case(seed=2, labels=vocabulary))


def test_only_sums_and_public_things_leave_a_site():
    run = run_protocol(federated_training, case(labels=("a", "b", "c")))
    sent = {row[0] for p, rows in transcript(run).items() if p != HUB for row in rows}
    assert sent == {
        "channel.Hello",
        "federated_training.Brings",
        "federated_training.Ready",
        "same_view.Signature",
        *(f"secure_sum.{m}" for m in ("Keys", "Shares", "MaskedInput", "Vouch", "Unmask")),
    }


def test_bytes_of_a_round_are_what_cost_says():
    sizes = {}
    for rounds in (2, 4):
        c = case(rounds=rounds)
        rows = transcript(run_protocol(federated_training, c))["site-0"]
        sizes[rounds] = (sum(r[2] for r in rows), len(rows))
    per_round = (sizes[4][0] - sizes[2][0]) / 2
    messages = (sizes[4][1] - sizes[2][1]) / 2
    said = federated_training.cost(c.params, 12, 3)["up"]
    assert said <= per_round <= said + 400 * messages


@pytest.mark.parametrize("name", ["MaskedInput", "Unmask", "Keys"])
@pytest.mark.parametrize("nth", [1, 3])
def test_a_site_that_dies_is_left_out_of_later_rounds(name, nth):
    c = case(n=4)
    gone = c.params.sites[1]
    run = run_protocol(federated_training, c, faults=[Fault("kill", gone, HUB, name, nth=nth)], timeout=3.0)
    check_no_errors(run)
    found = values(run)
    assert set(found) == {HUB, *c.params.sites} - {gone}
    assert found[HUB].history[-2]["clients"] == 3
    assert found[HUB].history[-1]["accuracy"] > 0.5


def test_too_few_left_is_a_named_abort():
    c = case(n=4)
    faults = [Fault("kill", u, HUB, "MaskedInput", nth=2) for u in c.params.sites[:2]]
    run = run_protocol(federated_training, c, faults=faults, timeout=2.0)
    assert HUB in run.errors
    assert run.errors[HUB].code == "too-few"


@pytest.mark.parametrize("kind", ["drop", "truncate", "duplicate", "swap"])
@pytest.mark.parametrize("message", ["Brings", "Vocabulary", "Ready", "Task", "Model"])
def test_lost_or_damaged_messages(kind, message):
    c = case(rounds=2)
    up = message in ("Brings", "Ready")
    fault = Fault(kind, "site-1" if up else HUB, HUB if up else "site-1", message)
    run = run_protocol(federated_training, c, faults=[fault], timeout=0.8)
    if HUB in values(run):
        assert np.all(np.isfinite(values(run)[HUB].theta))
    else:
        assert isinstance(run.errors[HUB], ProtocolAbort)


def test_an_update_that_is_no_number_is_left_out_and_only_its_site_hears_of_it():
    c = case(tweak={"site-1": {"nan_at": 1}}, rounds=3)
    run = run_protocol(federated_training, c)
    check_no_errors(run)
    found = values(run)
    assert np.all(np.isfinite(found[HUB].theta))
    assert "round 2: your update was no number" in found["site-1"].notes[0]
    assert [found[u].notes for u in ("site-0", "site-2")] == [(), ()]
    clean = run_protocol(federated_training, case(rounds=3))
    assert transcript(run) == transcript(clean)  # nobody else can tell
    assert all("no number" not in str(e) for r in run.receipts.values() for e, _ in r.entries)


def test_clipping_is_told_to_the_site():
    c = case(bound=1e-3)
    found = values(run_protocol(federated_training, c))
    assert "clipped to ±0.001" in found["site-0"].notes[0]
    assert np.abs(found[HUB].theta).max() <= 4e-3 + 1e-6


def test_other_architecture_is_named():
    run = run_protocol(federated_training, case(n=4, tweak={"site-2": {"salt": "deeper"}}), timeout=2.0)
    assert run.errors[HUB].code == "mismatch"
    assert "site-2 came with another architecture" in str(run.errors[HUB])


def test_other_input_is_named():
    c = case()
    u = Party("site-1")
    c.inputs[u] = (Offer("five numbers", *(getattr(c.inputs[u][0], k) for k in ("labels", "build"))),)
    run = run_protocol(federated_training, c, timeout=2.0)
    assert "site-1 came with another kind of input" in str(run.errors[HUB])


@pytest.mark.parametrize(("labels", "message"), [(("a", "b"), "not in the study's vocabulary"), (None, "no cell")])
def test_labels_that_do_not_fit(labels, message):
    c = case(labels=labels or ())
    if labels is None:
        c.inputs[Party("site-1")] = (Offer("four numbers", (), c.inputs[Party("site-1")][0].build),)
    run = run_protocol(federated_training, c, timeout=2.0)
    assert isinstance(run.errors["site-1"], DataError)
    assert message in str(run.errors["site-1"])


class Memory:
    def __init__(self, stop_after=None):
        self.kept, self.stop_after = None, stop_after

    def save(self, state):
        import copy

        self.kept = copy.deepcopy(state)
        if state.t == self.stop_after:
            raise KeyboardInterrupt  # the coordinator's machine goes away

    def load(self):
        return self.kept


@pytest.mark.parametrize("options", [{}, {"clients": 2, "n": 5, "schedule": "cosine"}])
def test_goes_on_from_a_checkpoint_to_the_same_model(options):
    c = case(rounds=5, resume=True, **options)

    def with_store(store):
        async def role(ch, params, *, entropy, identity):
            return await federated_training.coordinator(ch, params, store, entropy=entropy, identity=identity)

        return run_protocol(federated_training, c, roles={HUB: role}, timeout=2.0)

    straight = values(with_store(Memory()))[HUB]
    store = Memory(stop_after=3)
    with pytest.raises(AssertionError):
        check_no_errors(with_store(store))
    assert store.kept.t == 3
    store.stop_after = None
    resumed = with_store(store)
    check_no_errors(resumed)
    np.testing.assert_array_equal(values(resumed)[HUB].theta, straight.theta)
    assert [row["round"] for row in values(resumed)[HUB].history] == list(range(6))


def test_a_checkpoint_of_another_training_is_refused():
    store = Memory()
    store.kept = State(b"other", 2, np.zeros(12), np.zeros(12))

    async def role(ch, params, *, entropy, identity):
        return await federated_training.coordinator(ch, params, store, entropy=entropy, identity=identity)

    run = run_protocol(federated_training, case(), roles={HUB: role}, timeout=2.0)
    assert isinstance(run.errors[HUB], ParameterError)


# ---- pseudo-labels ---------------------------------------------------------------------------------------------------


def semi_case(source="xclp", private=True, **options):
    """Three sites; the last has no label at all, the others one in four."""
    rng = np.random.default_rng(5)
    centres = 6.0 * np.eye(3, D)  # far apart: random signs of four numbers are coarse
    sites = tuple(Party(f"site-{i}") for i in range(3))
    inputs, truth, built = {}, {}, {}
    for i, u in enumerate(sites):
        y = rng.integers(0, 3, 24)
        x = centres[y] + rng.normal(0, 0.5, (24, D))
        names = ["abc"[k] if i < 2 and n % 4 == 0 else None for n, k in enumerate(y)]

        def build(labels, x=x, names=names, u=u):
            built[u] = Semi(x, names, list(labels))
            return built[u]

        truth[u] = y
        inputs[u] = (Offer("four numbers", tuple(sorted({n for n in names if n is not None})), build),)
    pseudo = Pseudo(source, bits=256, n_neighbors=8, private=private, **options)
    params = Params(sites, HUB, "softmax", rounds=2, rate=0.5, weighting="plain", score_every=0, pseudo=pseudo)
    return Case(params, inputs), truth, built


@pytest.mark.parametrize("private", [False, True], ids=["published", "hardened"])
def test_labels_reach_a_site_that_has_none(private):
    if private:
        pytest.importorskip("seal", reason="encrypted labels are an extra")
    c, truth, built = semi_case(private=private)
    run = run_protocol(federated_training, c, timeout=120.0)
    check_no_errors(run)
    for u in c.params.sites:
        assert len(built[u].taught) == 2
        codes, sure = built[u].taught[-1]
        assert np.mean(codes == truth[u]) > 0.9
        assert sure.min() >= 0
        assert sure.max() <= 1
    assert values(run)[HUB].history[0]["clients"] == 3


@pytest.mark.parametrize("source", ["client", "network"])
def test_other_sources_send_nothing(source):
    c, _, built = semi_case(source)
    run = run_protocol(federated_training, c, timeout=30.0)
    check_no_errors(run)
    assert all(len(one.taught) == 2 for one in built.values())
    sent = {row[0].partition(".")[0] for rows in transcript(run).values() for row in rows}
    assert sent == {"channel", "federated_training", "same_view", "secure_sum"}


def test_warm_rounds_are_for_sites_with_labels():
    c, _, built = semi_case("network", warm=1)
    run = run_protocol(federated_training, c, timeout=30.0)
    assert [row["clients"] for row in values(run)[HUB].history] == [2, 3]
    assert all(len(one.taught) == 1 for one in built.values())


def test_a_share_of_every_round_has_labels():
    sites = tuple(Party(f"site-{i:02d}") for i in range(20))
    owners = set(sites[:10])
    params = Params(sites, HUB, "", rounds=50, clients=5, pseudo=Pseudo("network"))
    counts = []
    for t in range(50):
        chosen = federated_training.choose_clients(params, sites, t, owners)
        assert len(set(chosen)) == 5
        counts.append(len(owners & set(chosen)))
    assert set(counts) == {2, 3}
    few = federated_training.choose_clients(params, sites, 0, {sites[3]})
    assert sites[3] in few


def test_bad_sources():
    with pytest.raises(ParameterError):
        Pseudo("oracle")
    with pytest.raises(ParameterError, match="go around"):
        case(noise=1.0, weighting="plain", score_every=0, pseudo=Pseudo("xclp"))


# ---- noise -----------------------------------------------------------------------------------------------------------

PRIVATE = {"weighting": "plain", "score_every": 0, "clip": 0.1, "epsilon": 3.0, "delta": 1e-5}


def test_noise_has_the_agreed_width_and_the_receipt_says_so():
    c = case(n=4, rounds=1, rate=1e-9, noise=2.0, **PRIVATE)  # next to nothing is learned: what is left is noise
    draws = np.concatenate([values(run_protocol(federated_training, c))[HUB].theta for _ in range(24)])
    wanted = 2.0 * 0.1 * np.sqrt(4 / 3) / 4  # each of 4 adds z²C²/3; the mean divides by 4
    assert draws.std() == pytest.approx(wanted, rel=0.25)  # 288 draws: six deviations
    run = run_protocol(federated_training, c)
    said = [e.name for e, _ in run.receipts[HUB].entries if e.kind == "opened"]
    assert any("(3, 1e-05)-private per site" in text for text in said)
    sent = [row[0] for row in transcript(run)["site-0"]]
    assert sent.count("secure_sum.MaskedInput") == 1  # no count of cells, no score


def test_updates_are_clipped_to_their_norm_under_noise():
    c = case(rounds=1, rate=100.0, noise=1e-9, **PRIVATE)
    theta = values(run_protocol(federated_training, c))[HUB].theta
    assert np.linalg.norm(theta) <= 0.1 + 1e-6


@pytest.mark.parametrize(
    "options",
    [
        {"rounds": 0},
        {"clients": 1},
        {"clients": 9},
        {"weighting": "median"},
        {"schedule": "step"},
        {"metric": "auc"},
        {"rate": 0.0},
        {"bound": -1.0},
        {"noise": 1.0},
        {"noise": 1.0, "weighting": "plain"},
        {"patience": 2, "score_every": 0},
    ],
)
def test_bad_parameters(options):
    with pytest.raises(ParameterError):
        case(**options)


@pytest.mark.parametrize("before", [True, False], ids=["with sums of weights", "now"])
def test_a_coordinator_cannot_solve_for_the_cells_of_a_site(monkeypatch, before):
    """Attack: with other sites in every round, sums of weights, as they were once opened, subtract to each one's."""
    seen, kept, words_of = [], federated_training.mean_update, federated_training.update_words

    def note(params, pool, clients, size, words, survivors):
        seen.append(TAIL.decode(words[-2:].copy())[0])
        return kept(params, pool, clients, size, words, survivors)

    def with_weights(params, clients, delta, weight, loss, entropy):
        words, told = words_of(params, clients, delta, weight, loss, entropy)
        return np.concatenate([words[:-2], TAIL.encode(np.array([weight])), words[-1:]]), told

    monkeypatch.setattr(federated_training, "mean_update", note)
    if before:
        monkeypatch.setattr(federated_training, "update_words", with_weights)
    c = case(n=4, clients=3, rounds=8, score_every=0, weighting="cells")
    run = run_protocol(federated_training, c)
    check_no_errors(run)
    sites = c.params.sites
    chosen = [choose_clients(c.params, sites, t, sites) for t in range(8)]
    rounds = np.array([[u in clients for u in sites] for clients in chosen], float)
    solved = np.linalg.lstsq(rounds, np.array(seen), rcond=None)[0]
    cells = np.array([20, 27, 34, 41])
    told = np.abs(solved * cells.sum() - cells).max() < 0.01
    assert told == before
    if not before:
        np.testing.assert_array_equal(seen, 3.0)  # the number of sites, which is public
        opened = [e.name for e, _ in run.receipts[HUB].entries if e.kind == "opened" and e.protocol == NAME]
        assert not any("weight" in name for name in opened)


def test_where_some_train_no_site_counts_for_more_than_twice_the_mean():
    params = case(n=4, clients=2).params
    assert weight_of(params, 4, 4, 90, 100.0) == 0.9
    assert weight_of(params, 4, 2, 90, 100.0) == 0.5
    assert weight_of(params, 4, 2, 10, 100.0) == 0.1
    everyone = np.mean([4 / 2 * sum(weight_of(params, 4, 2, n, 100.0) for n in pair)
                        for pair in itertools.combinations((10, 20, 30, 40), 2)])  # fmt: skip
    assert everyone == pytest.approx(1.0)  # right on average over the draws of sites


def test_balanced_accuracy_counts_labels_alike():
    found = metrics(np.array([[90.0, 10.0, 0.0], [6.0, 4.0, 0.0], [0.0, 0.0, 0.0]]), 11.0)
    assert found["accuracy"] == pytest.approx(94 / 110)
    assert found["balanced_accuracy"] == pytest.approx((0.9 + 0.4) / 2)
    assert from_curves(to_curves([found]))[0]["balanced_accuracy"] == pytest.approx(0.65)
    run = run_protocol(federated_training, case(metric="balanced_accuracy", rounds=3))
    check_no_errors(run)
    rows = [row for row in values(run)[HUB].history if "balanced_accuracy" in row]
    best = max(rows, key=lambda row: (row["balanced_accuracy"], -row["loss"]))  # of equals the lower loss
    assert values(run)[HUB].best_round == best["round"]


def test_few_validation_cells_choose_no_round_and_stop_nothing():
    enough, few = (
        values(run_protocol(federated_training, case(rounds=4, patience=1, min_scored=least)))[HUB]
        for least in (0, 10**6)
    )
    assert enough.best_round == max(enough.history, key=lambda row: (row["accuracy"], -row["loss"]))["round"]
    assert few.best_round == 4
    assert len(few.history) == 5


def test_epsilon_compares_a_site_with_none_as_assumes_says():
    """Clipped updates lie within C of zero, and up to 2C from each other."""
    params = case(noise=1e-9, **PRIVATE).params
    far = np.full(6, 5.0)
    one, two = (params.code(3).decode(update_words(params, 3, x, 1.0, 0.0, Entropy())[0][:-2], 6) for x in (far, -far))
    assert np.linalg.norm(one) == pytest.approx(params.clip, rel=1e-6)
    assert np.linalg.norm(one - two) == pytest.approx(2 * params.clip, rel=1e-6)
    assert "may be 2C away, for which ε is that of z/2" in federated_training.__doc__
