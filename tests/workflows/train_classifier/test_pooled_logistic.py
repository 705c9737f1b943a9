import dataclasses

import numpy as np
import pytest
import scipy.sparse

from cloister.errors import DataError, ParameterError
from cloister.models import logistic
from cloister.mpc.sums import checked_sum
from cloister.rehearsal.rehearsal import Fault
from cloister.study import Party
from cloister.testing import Case, check_ideal, check_lies, check_no_errors, run_protocol, transcript, values
from cloister.workflows.train_classifier import logistic_terms, pooled_logistic
from cloister.workflows.train_classifier.logistic_terms import Labelled, Params, choose_penalty, unknown_level

HUB = Party("hub")
SHORT = {"penalties": (3e-2, 1e-2), "n_top_genes": 40}


def cells(rng, kinds, n, genes, unlabelled=0.1):
    codes = rng.integers(0, len(kinds), n)
    x = rng.poisson(kinds[codes] * rng.uniform(0.5, 2.0, (n, 1))).astype(np.float64)
    labels = tuple(None if rng.random() < unlabelled else f"type {k}" for k in codes)
    return Labelled(genes, scipy.sparse.csr_matrix(x), labels, rng.random(n) < 0.25)


def case(seed=0, n=3, g=60, K=3, spread=0.35, **options):
    rng = np.random.default_rng(seed)
    kinds = rng.gamma(0.6, 2.0, g) * np.exp(rng.normal(0, spread, (K, g)))
    genes = tuple(f"G{i:03d}" for i in range(g))
    names = [Party(f"site-{i}") for i in range(n)]
    inputs = {u: (cells(rng, kinds, 80 + 20 * i, genes),) for i, u in enumerate(names)}
    return Case(Params(tuple(names), HUB, **(SHORT | options)), inputs)


def embedded(seed=0, **options):
    c = case(seed, **options)
    rng = np.random.default_rng(seed)
    place = rng.normal(0, 1, (60, 7))
    inputs = {
        u: (dataclasses.replace(mine, names=(), x=np.log1p(mine.x.toarray()) @ place, space="ab12"),)
        for u, (mine,) in c.inputs.items()
    }
    return Case(dataclasses.replace(c.params, embedding="X_a"), inputs)


def plain(c):
    return {u: mine for u, (mine,) in c.inputs.items()}


def agree(fitted, ideal):
    assert fitted.genes == ideal.genes
    assert fitted.common == ideal.common
    assert (fitted.labels, fitted.left_out, fitted.cells) == (ideal.labels, ideal.left_out, ideal.cells)
    assert fitted.penalty == ideal.penalty
    assert fitted.converged
    np.testing.assert_allclose(fitted.coefficients, ideal.coefficients, atol=1e-4)  # the figure
    np.testing.assert_allclose(fitted.intercept, ideal.intercept, atol=2e-3)  # sums of these over μ
    np.testing.assert_allclose(fitted.centers, ideal.centers, atol=5e-3)  # sums of coefficients over genes
    assert abs(fitted.level - ideal.level) <= 0.15  # the path stops earlier than a tight fit


@pytest.mark.parametrize(
    "options",
    [{}, {"n": 2}, {"balance": 0.5, "K": 4}, {"penalties": (1e-3,)}, {"penalties": (1e-2,), "held_out": False}],
    ids=["path", "two-sites", "root", "one-penalty", "no-held-out"],
)
def test_equals_the_pooled_fit(options):
    check_ideal(pooled_logistic, [case(seed=3, **options)], agree=agree)


def test_an_embedding_instead_of_genes():
    check_ideal(pooled_logistic, [embedded()], agree=agree)


def test_log_values_to_any_base():
    """Logarithms to base 2 of deep libraries: undone, their squares would not fit into a sum."""
    c = case(kind="log")
    inputs = {}
    for u, (mine,) in c.inputs.items():
        x = mine.x.copy()
        x.data = np.log2(1 + 4000 * x.data)
        inputs[u] = (dataclasses.replace(mine, x=x),)
    assert max(m.x.max() for (m,) in inputs.values()) > 14
    check_ideal(pooled_logistic, [Case(c.params, inputs)], agree=agree)


def test_every_party_has_the_same_model_and_counts_the_openings():
    run = run_protocol(pooled_logistic, case())
    check_no_errors(run)
    models = list(values(run).values())
    assert all(np.array_equal(m.coefficients, models[0].coefficients) for m in models)
    for party, receipt in run.receipts.items():
        opened = [e for e, _ in receipt.entries if e.kind == "opened" and e.protocol == "pooled_logistic"]
        assert len(opened) == models[0].openings <= 200
        assert {e.to for e in opened} == {party}
        assert opened[-1].name.endswith(f"opening {len(opened)} of at most 200")


def test_openings_end_at_the_limit():
    c = case(penalties=(1e-4,), held_out=False, openings=14, tolerance=1e-12)
    run = run_protocol(pooled_logistic, c)
    check_no_errors(run)
    fitted = values(run)[HUB]
    assert (fitted.openings, fitted.converged) == (14, False)


def test_a_site_without_labels_adds_nothing_and_has_the_model():
    c = case(n=4)
    u = c.params.sites[1]
    bare = dataclasses.replace(c.inputs[u][0], labels=(None,) * len(c.inputs[u][0].labels))
    without = Case(c.params, {**c.inputs, u: (bare,)})
    run = run_protocol(pooled_logistic, without)
    check_no_errors(run)
    ideal = pooled_logistic.ideal(c.params, plain(without))[HUB]
    agree(values(run)[u], ideal)
    labelled = sum(name is not None for v, mine in plain(c).items() if v != u for name in mine.labels)
    assert sum(ideal.cells.values()) == labelled


def test_no_value_leaves_but_masked_or_pooled():
    run = run_protocol(pooled_logistic, case())
    sent = {row[0] for p, rows in transcript(run).items() if p != HUB for row in rows}
    assert sent == {
        "channel.Hello",
        "common_genes.Measured",
        "common_labels.Brings",
        "same_view.Signature",
        *(f"common_seed.{m}" for m in ("Key", "Parts", "Confirm")),
        "checked_sum.Masked",
    }


def test_cost():
    c = case(seed=1)
    run = run_protocol(pooled_logistic, c)
    check_no_errors(run)
    site = c.params.sites[0]
    lengths = []
    for e, _ in run.receipts[HUB].entries:
        if e.kind == "opened" and e.protocol == "checked_sum" and e.to == HUB:
            lengths.append(int(e.name.rpartition(" ")[2]) - 2)
    names = len("\n".join(c.inputs[site][0].names))
    for party, (messages, payload) in pooled_logistic.cost(c.params, lengths, names, names).items():
        rows = [r for r in transcript(run)[party] if not r[0].startswith("channel.")]
        assert len(rows) == messages
        total = sum(size for _, _, size in rows)
        assert payload <= total <= payload + 400 * messages + 0.02 * payload


# ---- attacks ---------------------------------------------------------------------------------------------------------


def rare(c, count):
    """The same case, with `count` cells of a label that no other cell has, at one site."""
    u = c.params.sites[0]
    mine = c.inputs[u][0]
    labels = tuple("rare" if i < count else name for i, name in enumerate(mine.labels))
    held = np.asarray(mine.held).copy()
    held[:count] = False
    return Case(c.params, {**c.inputs, u: (dataclasses.replace(mine, labels=labels, held=held),)})


def test_a_label_of_one_cell_would_be_read_from_the_first_gradient_and_is_left_out():
    """Attack: at θ = 0 the gradients of two labels differ by the sum over one's cells minus that over the other's."""
    c = rare(case(seed=2, penalties=(1e-2,), held_out=False), 1)
    site = c.params.sites[0]
    pool = plain(c)
    common = next(iter(pool.values())).names

    def opened_at_zero(least):
        params = dataclasses.replace(c.params, min_label_cells=2)
        names = tuple(name for mine in pool.values() for name in mine.labels)
        vocabulary = tuple(sorted({n for n in names if n is not None}))
        sums = np.sum([logistic_terms.moments(params, mine, common) for mine in pool.values()], axis=0)
        counts = logistic_terms.label_counts(
            logistic_terms.label_codes(names, vocabulary), np.zeros(len(names), bool), len(vocabulary)
        )
        if least == 1:  # the step without the rule
            counts = counts + (counts == 1)
        terms = logistic_terms.terms_of(params, sums, counts, vocabulary)
        parts = [logistic_terms.chosen_values(params, mine, common, terms.at) for mine in pool.values()]
        x = scipy.sparse.vstack(parts).toarray().astype(np.float64)
        cells = logistic_terms.Cells(x, logistic_terms.label_codes(names, terms.labels), np.zeros(len(names), bool))
        rows = cells.rows(terms, everything=True)
        zero = np.zeros((len(terms.at) + 1, len(terms.labels)))
        return terms, rows, logistic.gradient_sums(rows, zero, terms.mean)[1]

    terms, rows, g = opened_at_zero(least=1)
    k, n = terms.labels.index("rare"), len(rows)
    everybody = (rows.x - terms.mean).sum(axis=0) / len(terms.labels)  # p is 1/K for every cell
    target = rows.x[rows.codes == k][0]
    # Σ over all cells of x - μ is public: it is n times the difference of two pooled means
    guess = everybody - g[:-1, k] + terms.mean
    np.testing.assert_allclose(guess, target, atol=1e-6)  # the cell itself
    assert n == sum(name is not None for name in (x for m in pool.values() for x in m.labels))

    run = run_protocol(pooled_logistic, c)
    check_no_errors(run)
    for fitted in values(run).values():
        assert "rare" not in fitted.labels
        assert fitted.left_out == ()  # the site has not even named it
    assert site in values(run)


def test_enough_cells_of_a_label_are_trained_on():
    run = run_protocol(pooled_logistic, rare(case(seed=2), 12))
    check_no_errors(run)
    assert "rare" in values(run)[HUB].labels


class Liar:
    """A coordinator's channel that changes the totals it tells, from the `after`th on, for some or for all."""

    def __init__(self, ch, change, only=None, after=0, seen=None):
        self.ch, self.change, self.only, self.after = ch, change, only, after
        self.seen = [0] if seen is None else seen

    def __getattr__(self, name):
        return getattr(self.ch, name)

    def sub(self, *args, **more):
        return Liar(self.ch.sub(*args, **more), self.change, self.only, self.after, self.seen)

    async def scatter(self, to, msg=None):
        await self.ch.scatter(self._each(to, msg))

    async def broadcast(self, to, msg):
        each = self._each(to, msg)
        if len({id(m) for m in each.values()}) == 1:
            await self.ch.broadcast(to, next(iter(each.values())))
        else:
            await self.ch.scatter(each)
            self.ch._absorb(self.ch.me, msg)

    def _each(self, to, msg):
        each = dict(to) if msg is None else dict.fromkeys(to, msg)
        if not isinstance(next(iter(each.values())), checked_sum.Total):
            return each
        self.seen[0] += 1
        if self.seen[0] <= self.after:
            return each
        wrong = {id(m): checked_sum.Total(self.change(m.z)) for m in each.values()}
        return {u: wrong[id(m)] if self.only in (None, u) else m for u, m in each.items()}


@pytest.mark.parametrize("after", [0, 2, 5], ids=["moments", "sketch", "gradient"])
@pytest.mark.parametrize("only", [None, Party("site-1")], ids=["told all", "told one"])
def test_a_coordinator_cannot_choose_a_point(after, only):
    """It tells a gradient of its own, all sites alike or one: nobody goes on to the point that would follow."""

    async def coordinator(ch, params):
        return await pooled_logistic.coordinator(Liar(ch, lambda z: z + np.uint64(1 << 30), only, after), params)

    c = case()
    run = run_protocol(pooled_logistic, c, roles={HUB: coordinator}, timeout=5.0)
    cheated = c.params.sites if only is None else (only,)
    assert {run.errors[u].code for u in cheated} == {"changed"}
    assert not set(c.params.sites) & set(values(run))


def test_with_plain_sums_it_could(monkeypatch):
    """The same lie without the check of checked_sum: every site computes at the point that the coordinator chose."""
    monkeypatch.setattr(checked_sum, "check_tag", lambda *_: True)
    points = []
    look = logistic.gradient_sums
    monkeypatch.setattr(logistic, "gradient_sums", lambda r, t, m: points.append(t.copy()) or look(r, t, m))
    c = case(penalties=(1e-2,), held_out=False)

    def steer(z):
        z = z.copy()
        z[1:40] += np.uint64(1 << 45)
        return z

    async def coordinator(ch, params):
        return await pooled_logistic.coordinator(Liar(ch, steer, None, 4), params)

    run_protocol(pooled_logistic, c, roles={HUB: coordinator}, timeout=5.0)
    honest = len(points)
    assert honest >= 2 * len(c.params.sites)
    assert max(np.abs(t).max() for t in points) > 0


@pytest.mark.parametrize("nth", [0, 3])
def test_a_site_that_dies_ends_the_run_by_name(nth):
    c = case()
    run = run_protocol(
        pooled_logistic, c, faults=[Fault("kill", c.params.sites[0], HUB, "Masked", nth=nth)], timeout=1.5
    )
    assert not values(run)
    assert all(e.code for e in run.errors.values())


@pytest.mark.parametrize(("line", "counts"), [("L8", "right_answers"), ("L9", "answers_by_probability")])
@pytest.mark.parametrize("more", [1000, -1000])
def test_a_site_that_invents_answers_ends_the_run(line, counts, more, monkeypatch):
    """One site counts answers on held-out cells that nobody has, or takes away what the others count."""
    honest = getattr(logistic_terms.Cells, counts)

    def invented(cells, *args):
        return honest(cells, *args) + (more if len(cells.held) == 80 else 0)

    monkeypatch.setattr(logistic_terms.Cells, counts, invented)
    run = run_protocol(pooled_logistic, case(), timeout=5.0)
    assert not values(run)
    assert {(run.errors[u].line, run.errors[u].code) for u in run.agreement.parties} == {(line, "absurd")}


def test_a_sketch_of_nothing_ends_the_run(monkeypatch):
    """Sites whose labelled cells do not vary, or that add zeros, give no directions to go along."""
    monkeypatch.setattr(logistic, "sketch_sums", lambda rows, mean, along: np.zeros(along.shape))
    monkeypatch.setattr(logistic_terms.Terms, "rank", 8)  # fewer directions than genes
    run = run_protocol(pooled_logistic, case(), timeout=5.0)
    assert not values(run)
    assert {(run.errors[u].line, run.errors[u].code) for u in run.agreement.parties} == {("L5", "absurd")}


def test_one_liar():
    c, twin = (case(seed=s, n=3, g=20, penalties=(1e-1,), held_out=False, n_top_genes=20) for s in (5, 6))

    def right(lie, ended):
        for fitted in ended.values():
            if lie.liar == HUB or lie.letter == "j":
                agree(fitted, pooled_logistic.ideal(lie.case.params, plain(lie.case))[HUB])
            else:
                assert np.all(np.isfinite(fitted.coefficients))

    lies = check_lies(pooled_logistic, [c, twin], right=right)
    assert lies.tried > 15
    assert lies.aborted > 10


# ---- bad input -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m: dataclasses.replace(m, x=m.x[:10], labels=m.labels[:10], held=m.held[:10]), "fewer than 50"),
        (lambda m: dataclasses.replace(m, labels=m.labels[:-1]), "one per cell"),
        (lambda m: dataclasses.replace(m, library=np.full(m.x.shape[0], 1e-3)), "more counts than"),
    ],
)
def test_bad_input_is_named_to_the_site(change, message):
    c = case()
    u = c.params.sites[0]
    bad = Case(c.params, {**c.inputs, u: (change(c.inputs[u][0]),)})
    run = run_protocol(pooled_logistic, bad, timeout=2.0)
    assert isinstance(run.errors[u], DataError)
    assert message in str(run.errors[u])


def test_labels_that_the_study_does_not_list():
    run = run_protocol(pooled_logistic, case(labels=("type 0", "type 1")), timeout=2.0)
    assert all("vocabulary" in str(run.errors[u]) for u in run.agreement.sites)


def test_two_spaces_abort_by_name():
    c = embedded()
    u = c.params.sites[2]
    for other in (
        dataclasses.replace(c.inputs[u][0], space="cd34"),
        dataclasses.replace(c.inputs[u][0], x=c.inputs[u][0].x[:, :5]),
    ):
        run = run_protocol(pooled_logistic, Case(c.params, {**c.inputs, u: (other,)}), timeout=2.0)
        assert run.errors[HUB].code == "mismatch"
        assert str(u) in str(run.errors[HUB])


def test_nobody_has_labels():
    c = case()
    bare = {u: (dataclasses.replace(m, labels=(None,) * len(m.labels)),) for u, (m,) in c.inputs.items()}
    run = run_protocol(pooled_logistic, Case(c.params, bare), timeout=2.0)
    assert run.errors[HUB].code == "labels"


@pytest.mark.parametrize(
    "options",
    [
        {"penalties": ()},
        {"penalties": (1e-2, 1e-1)},
        {"penalties": (0.0,)},
        {"held_out": False},
        {"openings": 10},
        {"tolerance": 0.0},
        {"min_label_cells": 1},
        {"balance": 1.5},
    ],
)
def test_bad_parameters(options):
    with pytest.raises(ParameterError):
        case(**options)


def test_the_penalty_is_the_best_on_all_and_on_each_label_of_equals_the_largest():
    assert choose_penalty([(1.0, 0.90, 0.50), (0.1, 0.94, 0.80), (0.01, 0.95, 0.78)]) == 1
    assert choose_penalty([(1.0, 0.90, 0.80), (0.1, 0.95, 0.80), (0.01, 0.95, 0.80)]) == 1
    assert choose_penalty([(1.0, 1.0, 1.0), (0.1, 1.0, 1.0)]) == 0


def test_the_level_lets_a_share_of_the_right_answers_fall_below():
    counts = np.zeros(200, dtype=np.int64)
    counts[40], counts[60], counts[90] = 1, 4, 95
    assert unknown_level(counts, 0.0) == 0.40
    assert unknown_level(counts, 0.01) == 0.60
    assert unknown_level(counts, 0.05) == 0.90
    assert unknown_level(np.zeros(200, dtype=np.int64), 0.05) == 0.0
