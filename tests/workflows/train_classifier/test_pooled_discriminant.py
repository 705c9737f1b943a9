import dataclasses
import itertools
from pathlib import Path

import numpy as np
import pytest
import scipy.sparse
import scipy.special
from tests.old_steps import label_sums, logistic_path

from cloister.disclosure import Contribution, Thresholds, effective_sizes
from cloister.errors import DataError, ParameterError
from cloister.models import discriminant, logistic
from cloister.models.discriminant import SETTINGS, Setting
from cloister.models.linear import folds_of
from cloister.models.logistic import Memory, Metric, Problem, Rows
from cloister.mpc.sums import checked_sum
from cloister.rehearsal.rehearsal import Fault
from cloister.study import Party
from cloister.testing import (
    Case,
    check_ideal,
    check_lies,
    check_no_errors,
    check_vectors,
    check_view,
    run_protocol,
    transcript,
    values,
)
from cloister.workflows.train_classifier import logistic_terms, pooled_discriminant
from cloister.workflows.train_classifier.logistic_terms import Labelled
from cloister.workflows.train_classifier.openings import Openings, Start, begin_site
from cloister.workflows.train_classifier.pooled_discriminant import GRID, UNIT, Params, Part

HUB = Party("hub")
VECTORS = Path(__file__).parents[2] / "vectors" / "pooled_discriminant.json"


def cells(rng, kinds, n, genes, unlabelled=0.1, donors=0):
    codes = rng.integers(0, len(kinds), n)
    x = rng.poisson(kinds[codes] * rng.uniform(0.5, 2.0, (n, 1))).astype(np.float64)
    labels = tuple(None if rng.random() < unlabelled else f"type {k}" for k in codes)
    whose = rng.integers(0, donors, n) if donors else None
    fold = folds_of(codes, 3, rng)
    return Labelled(genes, scipy.sparse.csr_matrix(x), labels, np.zeros(n, bool), donors=whose, fold=fold)


def case(seed=0, n=3, g=60, K=3, spread=0.6, size=90, donors=0, settings=SETTINGS, unlabelled=0.1, **options):
    rng = np.random.default_rng(seed)
    kinds = rng.gamma(0.6, 2.0, g) * np.exp(rng.normal(0, spread, (K, g)))
    genes = tuple(f"G{i:03d}" for i in range(g))
    names = [Party(f"site-{i}") for i in range(n)]
    inputs = {u: (cells(rng, kinds, size + 20 * i, genes, unlabelled, donors),) for i, u in enumerate(names)}
    base = logistic_terms.Params(tuple(names), HUB, **{"n_top_genes": 30, "penalties": (1.0,)} | options)
    return Case(Params(base, settings), inputs)


def embedded(seed=0, **options):
    c = case(seed, **options)
    place = np.random.default_rng(seed).normal(0, 1, (60, 7))
    inputs = {
        u: (dataclasses.replace(mine, names=(), x=np.log1p(mine.x.toarray()) @ place, space="ab12"),)
        for u, (mine,) in c.inputs.items()
    }
    return Case(dataclasses.replace(c.params, base=dataclasses.replace(c.params.base, embedding="X_a")), inputs)


def changed(c, u, **changes):
    return Case(c.params, {**c.inputs, u: (dataclasses.replace(c.inputs[u][0], **changes),)})


def agree(fitted, ideal):
    assert (fitted.genes, fitted.common, fitted.labels) == (ideal.genes, ideal.common, ideal.labels)
    assert (fitted.cells, fitted.left_out, fitted.openings) == (ideal.cells, ideal.left_out, ideal.openings)
    if fitted.setting == ideal.setting:  # counts are rounded by chance, so that the choice may differ
        np.testing.assert_allclose(fitted.coefficients, ideal.coefficients, atol=1e-9)
        np.testing.assert_allclose(fitted.centers, ideal.centers, atol=1e-7)
    np.testing.assert_allclose(fitted.typical.coefficients, ideal.typical.coefficients, atol=1e-9)
    assert abs(fitted.level - ideal.level) <= 0.5


# ---- the five questions ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [{}, {"n": 2}, {"donors": 4}, {"held_out": False}, {"settings": (Setting(0.0, 0.1, 1.0),)}],
    ids=["settings", "two-sites", "donors", "no-held-out", "one-setting"],
)
def test_equals_the_sums_in_one_place(options):
    check_ideal(pooled_discriminant, [case(seed=3, **options)], agree=agree)


def test_an_embedding_instead_of_genes():
    check_ideal(pooled_discriminant, [embedded()], agree=agree)


def test_vectors():
    check_vectors(pooled_discriminant, case(n=2, g=8, size=60, n_top_genes=4, held_out=False), VECTORS)


def test_view_depends_on_sizes_and_not_on_cells():
    check_view(pooled_discriminant, case(seed=1), case(seed=2))


def test_cost():
    c = case(seed=1)
    run = run_protocol(pooled_discriminant, c)
    check_no_errors(run)
    names = len("\n".join(c.inputs[c.params.base.sites[0]][0].names))
    for party, (messages, payload) in pooled_discriminant.cost(c.params, 3, 60, 25, names, names).items():
        rows = [r for r in transcript(run)[party] if not r[0].startswith("channel.")]
        assert len(rows) == messages
        total = sum(size for _, _, size in rows)
        assert payload <= total <= payload + 400 * messages + 0.02 * payload


@pytest.mark.parametrize("nth", [0, 1, 2])
def test_a_site_that_stops_ends_the_run_by_name(nth):
    c = case()
    fault = Fault("kill", c.params.base.sites[0], HUB, "Masked", nth=nth)
    run = run_protocol(pooled_discriminant, c, faults=[fault], timeout=1.5)
    assert not values(run)
    assert all(e.code for e in run.errors.values())


def test_one_malicious_party():
    same = {"size": 100, "unlabelled": 0.0}
    c, twin = (case(seed=s, g=20, n_top_genes=10, held_out=False, **same) for s in (5, 6))
    ideals = [pooled_discriminant.ideal(x.params, {u: m for u, (m,) in x.inputs.items()})[HUB] for x in (c, twin)]

    def right(lie, ended):
        for fitted in ended.values():
            if lie.liar == HUB:
                assert any(
                    np.allclose(fitted.intercept, i.intercept, atol=1e-9) for i in ideals if i.genes == fitted.genes
                )
            else:
                assert np.all(np.isfinite(fitted.coefficients))

    lies = check_lies(pooled_discriminant, [c, twin], right=right)
    assert lies.tried > 10
    assert lies.aborted > 5


def test_nothing_leaves_but_masked_or_pooled():
    run = run_protocol(pooled_discriminant, case())
    sent = {row[0] for p, rows in transcript(run).items() if p != HUB for row in rows}
    assert sent == {
        "channel.Hello",
        "announced_counts.Count",
        "common_genes.Measured",
        "common_labels.Brings",
        "same_view.Signature",
        *(f"common_seed.{m}" for m in ("Key", "Parts", "Confirm")),
        "checked_sum.Masked",
    }


def test_every_party_has_the_same_model_and_the_receipt_has_the_smallest_groups():
    run = run_protocol(pooled_discriminant, case())
    check_no_errors(run)
    models = list(values(run).values())
    assert all(np.array_equal(m.coefficients, models[0].coefficients) for m in models)
    assert models[0].openings == 5
    for u in run.agreement.sites:
        lines = {e.line: e.name for e, _ in run.receipts[u].entries if e.kind == "contributed"}
        assert set(lines) == {"L4", "L5", "L6", "L7"}
        for text in lines.values():
            assert int(text.split("cells ")[-1].split()[0]) >= 10


def test_a_site_without_labels_adds_nothing_and_has_the_model():
    c = case(n=4)
    u = c.params.base.sites[1]
    without = changed(c, u, labels=(None,) * len(c.inputs[u][0].labels))
    run = run_protocol(pooled_discriminant, without)
    check_no_errors(run)
    others = sum(name is not None for v, (m,) in c.inputs.items() if v != u for name in m.labels)
    assert sum(values(run)[u].cells.values()) == others


# ---- thresholds at each site -----------------------------------------------------------------------------------------


class Recorder:
    """What every site adds to the sums, by the number of its cells and the line."""

    def __init__(self, monkeypatch):
        self.parts, self.called = {}, {}
        for line, name in (("L4", "first"), ("L5", "second"), ("L6", "residuals"), ("L7", "third")):
            monkeypatch.setattr(Part, name, self.wrapped(line, getattr(Part, name)))

    def wrapped(self, line, step):
        def record(part, *args):
            contribution = step(part, *args)
            self.parts[len(part.mine.labels), line] = (part, contribution)
            self.called[len(part.mine.labels), line] = (line, *args)
            return contribution

        return record


def test_a_rare_label_of_a_site_is_left_out_there_by_name_and_has_no_complement(monkeypatch):
    """Nine cells of a label at one site: not named, not counted, and in no total, though other sites have the label."""
    c = case(seed=4)
    u = c.params.base.sites[0]
    mine = c.inputs[u][0]
    seen = itertools.count()
    labels = tuple(None if n == "type 2" and next(seen) >= 9 else n for n in mine.labels)
    c = changed(c, u, labels=labels)
    assert c.inputs[u][0].excluded == {"type 2": 9}
    record = Recorder(monkeypatch)
    run = run_protocol(pooled_discriminant, c)
    check_no_errors(run)
    part, first = record.parts[len(labels), "L4"]
    assert part.mine.own_labels == ("type 0", "type 1")
    at = values(run)[HUB].labels.index("type 2")
    K, g = 3, 60
    counts, sums, squares = first.values[:K], first.values[K : K + K * g].reshape(K, g), first.values[K + K * g :]
    assert counts[at] == 0
    assert not sums[at].any()
    log = np.vstack([x.toarray() for x in logistic_terms.log_values(c.params.base, mine, mine.names)])
    rows = np.array([n in ("type 0", "type 1") for n in labels])
    filled = effective_sizes(log[rows]) >= 10
    np.testing.assert_allclose(squares, (log[rows] ** 2).sum(axis=0) * filled)  # no more than these labels' cells


@pytest.mark.parametrize("donors", [0, 4])
def test_every_number_of_a_site_rests_on_enough_of_its_cells_and_donors(monkeypatch, donors):
    """Sparse cells: each entry that is not zero has ten own cells behind it, of three own donors."""
    c = case(seed=7, donors=donors, size=150)
    for u, (mine,) in list(c.inputs.items()):
        x = mine.x.copy()
        x.data = np.where(np.random.default_rng(1).random(len(x.data)) < 0.25, x.data, 0)
        x.eliminate_zeros()
        c = changed(c, u, x=x)
    record = Recorder(monkeypatch)
    run = run_protocol(pooled_discriminant, c)
    check_no_errors(run)
    suppressed = 0
    for (_, line), (part, contribution) in record.parts.items():
        mine, keep = part.mine, part.keep
        whose = mine.donors[keep] if donors else np.arange(keep.sum())
        least = 3 if donors else 10
        log = np.vstack([x.toarray() for x in logistic_terms.log_values(c.params.base, mine, mine.names)])[keep]
        if line == "L4":
            K, g = part.classes, log.shape[1]
            for k, j in itertools.product(range(K), range(g)):
                filled = log[:, j] != 0
                enough = effective_sizes(log[:, [j]])[0] >= 10 and len(set(whose[filled])) >= least
                value = contribution.values[K + k * g + j]
                assert enough or value == 0
                suppressed += not enough and log[part.codes == k, j].any()
        else:  # whole groups of one label
            groups = part.similar
            assert (groups.codes >= 0).all()
            for at in range(len(groups)):
                inside = groups.codes == at
                assert inside.sum() == groups.cells[at] >= 10
                assert len(set(whose[inside])) >= least
                assert len(set(part.codes[inside])) == 1
            assert (contribution.cells, contribution.donors) == (
                groups.cells.min(),
                groups.donors.min() if donors else None,
            )
    assert suppressed > 50


def test_too_few_labelled_cells_add_nothing(monkeypatch):
    c = case(seed=4)
    u = c.params.base.sites[0]
    mine = c.inputs[u][0]
    c = changed(c, u, labels=tuple(n if i < 49 else None for i, n in enumerate(mine.labels)))
    record = Recorder(monkeypatch)
    run = run_protocol(pooled_discriminant, c)
    check_no_errors(run)
    for line in ("L4", "L5", "L6", "L7"):
        assert not record.parts[len(mine.labels), line][1].values.any()


def test_second_moments_are_those_of_rounded_sums_of_groups(monkeypatch):
    """With more genes than groups, any combination that isolates something isolates a group, never a cell."""
    c = case(seed=8, g=200, size=60, n=2, n_top_genes=150)
    record = Recorder(monkeypatch)
    run = run_protocol(pooled_discriminant, c)
    check_no_errors(run)
    part, second = record.parts[60, "L5"]
    h = len(values(run)[HUB].genes)
    between = pooled_discriminant.square(second.values, h)
    sums = part.whole.means * part.whole.cells[:, None]
    steps = sums / part.scale / 4
    np.testing.assert_allclose(steps, np.rint(steps), atol=1e-9)
    plain = (sums.T / part.whole.cells) @ sums
    off = ~np.eye(h, dtype=bool)
    np.testing.assert_allclose(between[off], plain[off])
    np.testing.assert_allclose(between.diagonal(), part.squares[at_of(part, values(run)[HUB].genes)])
    x = np.vstack([b.toarray() for b in logistic_terms.log_values(c.params.base, part.mine, part.start.common)])
    assert leverage(x[part.keep][:, :50]).max() > 0.9  # the old step: cells themselves
    member = np.eye(len(part.similar))[part.similar.codes]
    assert leverage(member).max() <= 0.1 + 1e-9


def leverage(x):
    """Of each cell in the space of all combinations of columns: 1 if one of these is that cell."""
    return np.square(np.linalg.qr(x)[0]).sum(axis=1)


def at_of(part, genes):
    return [part.start.common.index(g) for g in genes]


def test_right_answers_depend_on_groups_alone(monkeypatch):
    """L6 and L7 read no cell: without the cells the numbers are the same."""
    record = Recorder(monkeypatch)
    check_no_errors(run_protocol(pooled_discriminant, case(seed=8)))
    (part, before), third = record.parts[90, "L7"], Part.third
    _, terms, course = record.called[90, "L7"]
    part.mine = dataclasses.replace(part.mine, x=None)
    assert np.array_equal(third(part, terms, course).values, before.values)
    last = dataclasses.replace(course, points=course.points[:-1])  # where the last residuals were taken
    assert np.array_equal(Part.residuals(part, terms, last).values, record.parts[90, "L6"][1].values)
    n = len(SETTINGS)
    assert (before.values[1 : 1 + n] <= before.values[0]).all()
    assert before.values[0] > 0


def test_sums_of_groups_add_up_to_the_rounded_sum_of_their_label():
    rng = np.random.default_rng(0)
    sums, label = rng.gamma(1.0, 5.0, (40, 30)), rng.integers(0, 3, 40)
    steps = pooled_discriminant.stepwise(sums, label, 4.0)
    assert not np.any(steps % 4)
    assert np.abs(steps - sums).max() <= 4
    for k in range(3):
        np.testing.assert_array_equal(steps[label == k].sum(axis=0), np.rint(sums[label == k].sum(axis=0) / 4) * 4)


def test_expected_right_answers_are_about_those_of_the_cells():
    """Groups and their scatter in place of cells, for cells with normal scatter."""
    rng = np.random.default_rng(1)
    centres = rng.normal(0, 0.6, (3, 8))
    codes = rng.integers(0, 3, 3000)
    x = centres[codes] + rng.normal(0, 1, (3000, 8))
    fit = discriminant.Statistics.of(x[:1500], codes[:1500], 3)
    held, at = x[1500:], codes[1500:]
    order = np.lexsort((held[:, 0], at))[: 1500 // 10 * 10].reshape(-1, 10)
    means = held[order].mean(axis=1)
    within = np.square(held[order] - means[:, None]).mean(axis=(0, 1))
    groups = pooled_discriminant.Grouped(at[order[:, 0]], np.full(len(order), 10), means, within)
    answers = pooled_discriminant.score(fit, SETTINGS, groups, [], spread=1e-9, aligned=False)
    z = discriminant.Solver(fit, 1e-9).fit(SETTINGS[2]).scores(held)
    assert abs(answers.right[2] / answers.cells - np.mean(z.argmax(axis=1) == at)) < 0.06
    assert np.all(np.diff(answers.below) >= 0)


def test_a_site_raises_its_own_thresholds():
    c = case(seed=4)
    u = c.params.base.sites[0]
    strict = changed(c, u, thresholds=Thresholds(40, 3))
    assert set(strict.inputs[u][0].excluded) == {"type 0", "type 1", "type 2"}
    run = run_protocol(pooled_discriminant, strict)
    check_no_errors(run)
    others = sum(name is not None for v, (m,) in c.inputs.items() if v != u for name in m.labels)
    assert sum(values(run)[HUB].cells.values()) == others


# ---- attacks: succeed against the old step, fail against the new one -------------------------------------------------


class Malicious(Part):
    """A site that adds whatever it likes: its sums times a factor, some of them moved."""

    factor, moved = 1e5, 0.0

    def first(self):
        honest = super().first()
        K = self.classes
        values = honest.values * self.factor
        values[:K] = honest.values[:K]  # as announced
        values[K : K + 5] += self.moved
        values[-self.x_columns() :] *= self.factor  # so that squares allow these sums
        self.sums = self.sums * self.factor
        return Contribution(values, 1, None)

    def x_columns(self):
        return len(self.start.common)

    def second(self, terms):
        honest = super().second(terms)
        values = honest.values.copy()
        at = np.cumsum(np.r_[0, np.arange(len(terms.at), 1, -1)])
        values[at] = terms.squares
        return Contribution(values, 1, None)


def malicious(factor, moved):
    kind = type("Steered", (Malicious,), {"factor": factor, "moved": moved})

    async def role(ch, params, mine, *, entropy, identity):
        mine = mine.open_labels(params.base.min_cells)
        start = await begin_site(ch, params.base, mine, entropy=entropy, identity=identity)
        openings = Openings(ch, pooled_discriminant.NAME, params.base, params.openings, entropy, identity, start.seed)
        return await pooled_discriminant.follow(openings, params, start, kind(params, start, mine))

    return role


def test_f3_no_party_chooses_what_the_others_add(monkeypatch):
    """New step: whatever one site claims, the others add the same numbers at L4, and plain second moments at L5."""
    c = case(seed=9)
    bad = c.params.base.sites[0]
    added = []
    for role in (None, malicious(1e5, 0.0), malicious(1e3, 1e6)):
        with monkeypatch.context() as m:
            record = Recorder(m)
            run_protocol(pooled_discriminant, c, roles={} if role is None else {bad: role}, timeout=5.0)
        added.append(record.parts)
    honest, reached = {n for n, _ in added[0]} - {len(c.inputs[bad][0].labels)}, 0
    for n in honest:
        first = [parts[n, "L4"][1].values for parts in added]
        assert all(np.array_equal(first[0], other) for other in first[1:])
        for parts in added:
            if (n, "L5") not in parts:
                continue
            reached += 1
            part, second = parts[n, "L5"]
            h = part.whole.means.shape[1]
            plain = (part.whole.means.T * part.whole.cells) @ part.whole.means
            off = np.triu(np.ones((h, h), bool), 1)
            np.testing.assert_allclose(pooled_discriminant.square(second.values, h)[off], plain[off])
    assert reached > 2  # also with a malicious site


def rare_cells(g=1200):
    """Ten cells of a small label beside 290 others; 300 genes are rare."""
    rng, n = np.random.default_rng(0), 300
    rate = rng.gamma(0.5, 1.0, g) * 3
    rate[:300] = rng.uniform(0.02, 0.08, 300)
    x = rng.poisson(rate * rng.uniform(0.5, 2, (n, 1))).astype(float)
    return x, tuple(f"G{i:04d}" for i in range(g)), tuple("rare" if i < 10 else "large" for i in range(n))


def counted_cells(part, x, common):
    """The sums of rare genes at L4, and how often these tell whether 1, 2, or 3 or more of the ten cells have one."""
    sums = part.first().values[2 : 2 + 2 * len(common)].reshape(2, -1)[1, :300]
    cells = (x[:10, :300] > 0).sum(axis=0)
    among = part.shown[:300] & (cells > 0)
    assert set(np.unique(sums % 4)) == {0.0}
    return sums, np.mean((np.searchsorted([2, 10, 18], sums) == np.minimum(cells, 3))[among])


def test_a_list_of_rare_genes_changes_no_value_of_another_site():
    """Attack: one site names 300 rare genes as all that it measured, so that others normalise cells over these.

    A cell that has such a gene then had a log value of about 6 instead of 2, and sums of a label of ten cells in
    multiples of 4 told how many of its cells have the gene, for more than 95 % of genes. Cells are now normalised over
    all genes of their own site, so the sums of these genes are the same whatever another site names.
    """
    x, names, labels = rare_cells()
    base = logistic_terms.Params((Party("a"), Party("b")), HUB, n_top_genes=30, penalties=(1.0,))
    mine = Labelled(names, scipy.sparse.csr_matrix(x), labels, np.zeros(len(x), bool)).open_labels(base.min_cells)
    found = {}
    for what, common in (("all", names), ("chosen", names[:300])):
        part = Part(Params(base), Start(common, ("large", "rare"), 0), mine)
        found[what], right = counted_cells(part, x, common)
        assert right < 0.7
    np.testing.assert_array_equal(found["all"], found["chosen"])
    over_these = dataclasses.replace(mine, names=names[:300], x=scipy.sparse.csr_matrix(x[:, :300]))
    before = Part(Params(base), Start(names[:300], ("large", "rare"), 0), over_these)  # normalised as it was
    assert counted_cells(before, x, names[:300])[1] > 0.95


def steer(minimise, memory, rows, mean, targets):
    """A party that dictates all sums leads a fit to chosen points; yields these and the honest cells' gradients."""
    h, K = rows.x.shape[1], 2
    problem = Problem(1e-4, float(len(rows)), np.eye(h), 0.0)
    work = minimise(problem, np.zeros((h + 1, K)), memory, most=500, tolerance=0.0)
    next(work)
    size = K * (h + 1)
    hessian = np.eye(size)[np.triu_indices(size)] * problem.total
    metric = Metric.of(hessian / problem.total, problem.basis, K, problem.penalty, 0.0)
    ridge = np.full((h + 1, 1), problem.penalty)
    ridge[-1] = 0.0
    ask, loss = work.send(hessian), 0.0
    for target in targets:
        step = target - ask.theta
        along = [memory.direction(e.reshape(step.shape), metric, ridge).ravel() for e in np.eye(size)]
        full = np.linalg.lstsq(np.column_stack(along), step.ravel(), rcond=None)[0].reshape(step.shape)
        loss -= 1e15  # claims that the loss falls, so that every step is taken
        ask = work.send((loss, (full - ridge * ask.theta) * problem.total))
        if ask.curvature:
            ask = work.send(hessian)
        yield ask.theta, logistic.gradient_sums(rows, ask.theta, mean)[1]


def isolated(x, seen):
    """Cells that the difference of two gradients shows."""
    found = 0
    for (_, before), (_, after) in itertools.pairwise(seen):
        found += any(np.abs(x - s * (before - after)[:-1, 0]).max(axis=1).min() < 1e-4 for s in (1, -1))
    return found


def saturated(rows, mean, direction, cuts):
    """Points at which a cell counts fully or not at all, by the side of a cut that it lies on."""
    points = []
    for cut in cuts:
        theta = np.zeros((rows.x.shape[1] + 1, 2))
        theta[:-1, 0], theta[-1, 0] = 1e5 * direction, -1e5 * cut
        points.append(theta)
    return points


def test_f3_the_old_path_isolates_cells_and_the_new_one_does_not_get_there():
    rng = np.random.default_rng(3)
    x = rng.normal(0, 1, (60, 12))
    rows, mean = Rows(x, rng.integers(0, 2, 60), np.ones(60)), np.zeros(12)
    direction = rng.normal(0, 1, 12)
    order = np.sort(x @ direction)
    targets = saturated(rows, mean, direction, (order[1:] + order[:-1]) / 2)
    assert isolated(x, list(steer(logistic_path.minimise, logistic_path.Memory(), rows, mean, targets))) > 20
    seen = []
    with pytest.raises(ParameterError, match="no convex loss"):
        seen.extend(steer(logistic.minimise, Memory(), rows, mean, targets))
    assert isolated(x, seen) == 0


def test_f5_all_scores_of_the_only_cell_of_a_label(monkeypatch):
    """A site with eight cells of a label subtracts its part from the sums; the ninth is another site's only one."""
    rng = np.random.default_rng(0)
    z = {"malicious": rng.normal(0, 1, (40, 3)), "honest": rng.normal(0, 1, (60, 3))}
    codes = {"malicious": np.repeat([0, 1, 2], [16, 16, 8]), "honest": np.repeat([0, 1, 2], [30, 29, 1])}
    counts = sum(np.bincount(c, minlength=3) for c in codes.values())
    assert 2 in label_sums.kept_labels(counts)
    total = sum(label_sums.score_sums(z[s], codes[s], 3) for s in z)
    recovered = (total - label_sums.score_sums(z["malicious"], codes["malicious"], 3))[2]
    np.testing.assert_allclose(recovered, z["honest"][-1], atol=1e-12)  # the old step: all K scores

    c = case(seed=2, K=2, unlabelled=0.0)
    honest, other = c.params.base.sites[:2]
    for u, count in ((honest, 1), (other, 20)):
        labels = tuple("rare" if i < count else n for i, n in enumerate(c.inputs[u][0].labels))
        c = changed(c, u, labels=labels)
    record = Recorder(monkeypatch)
    run = run_protocol(pooled_discriminant, c)
    check_no_errors(run)
    at = values(run)[HUB].labels.index("rare")
    _, first = record.parts[len(c.inputs[honest][0].labels), "L4"]
    assert first.values[at] == 0
    assert not first.values[3 + at * 60 : 3 + (at + 1) * 60].any()
    assert values(run)[HUB].cells["rare"] == 20


def test_a_gene_of_one_cell_does_not_show_that_cell_in_the_second_moments(monkeypatch):
    """Row g of Σ l lᵀ is l_g times the cell itself, where one cell alone expresses gene g."""
    c = case(seed=6)
    u = c.params.base.sites[0]
    x = c.inputs[u][0].x.tolil()
    x[:, 0] = 0
    cell = next(i for i, n in enumerate(c.inputs[u][0].labels) if n is not None)
    x[cell, 0] = 7
    c = changed(c, u, x=scipy.sparse.csr_matrix(x))
    mine = c.inputs[u][0]
    log = np.vstack([b.toarray() for b in logistic_terms.log_values(c.params.base, mine, mine.names)])
    row = label_sums.second_moments(log)[0]
    np.testing.assert_allclose(row / log[cell, 0], log[cell], atol=1e-9)  # the old step: the whole cell
    record = Recorder(monkeypatch)
    check_no_errors(run_protocol(pooled_discriminant, c))
    part, first = record.parts[len(mine.labels), "L4"]
    K = part.classes
    assert not first.values[K : K + K * 60].reshape(K, 60)[:, 0].any()
    assert not part.second(dataclasses.replace(_terms(part), at=np.arange(60))).values[:60].any()


def _terms(part):
    K = part.classes
    return pooled_discriminant.Terms(
        np.arange(60), part.start.labels, np.arange(K), (), np.ones(K), np.zeros((K, 60)), np.zeros(60)
    )


def test_the_digits_of_a_sum_do_not_encode_the_counts_of_its_cells():
    """Ten cells with known library sizes: with all digits each sum has one solution, rounded to a quarter hundreds."""
    rng = np.random.default_rng(0)
    library = rng.integers(900, 6000, 10)
    values_of = np.log1p(1e4 * np.arange(3)[:, None] / library)  # (counts, cells)
    halves = [
        np.array(
            [sum(values_of[k, i] for k, i in zip(ks, at, strict=True)) for ks in itertools.product(range(3), repeat=5)]
        )
        for at in (range(5), range(5, 10))
    ]
    every = np.sort(np.add.outer(*halves).ravel())  # all 3^10 sums
    decoded, ambiguous = 0, []
    for _ in range(50):
        counts = np.minimum(rng.poisson(0.4, 10), 2)
        x = values_of[counts, np.arange(10)][:, None]
        exact = label_sums.label_sums(x, np.zeros(10, int), 1)[0, 0]
        rounded = np.rint(x.sum() * UNIT) / UNIT
        decoded += np.searchsorted(every, exact + 1e-9) - np.searchsorted(every, exact - 1e-9) == 1
        ambiguous.append(np.searchsorted(every, rounded + 0.5 / UNIT) - np.searchsorted(every, rounded - 0.5 / UNIT))
    assert decoded > 45
    assert np.median(ambiguous) > 100


def small_label(rng, genes=2000):
    """Log values of ten cells of one label; the first has the largest library."""
    library = np.array([12000, *rng.integers(1500, 4000, 9)])
    counts = rng.poisson(library[:, None] * rng.gamma(0.3, 1.0, genes) / 12000)
    return np.log1p(1e4 * counts / library[:, None])


def smallest_level(sums):
    """Genes with the smallest sum that is not zero: to the attacker, those of the cell with the largest library."""
    return np.flatnonzero(sums == sums[sums > 0].min())


def test_sums_of_a_small_label_do_not_show_the_cell_with_the_largest_library():
    """In quarters, hundreds of genes of one of ten cells can be told by their sum alone; in multiples of 4 none can."""
    x = small_label(np.random.default_rng(0))
    codes = np.zeros(len(x), np.int64)
    old = smallest_level(label_sums.quarter_sums(x, codes, 1)[0])
    assert len(old) > 100
    assert np.all((x[:, old] > 0).sum(axis=0) == 1)  # each is the value of one cell,
    assert np.all(x[0, old] > 0)  # the same one

    labels = ("small",) * 10 + ("other",) * 60
    rest = np.log1p(np.random.default_rng(1).poisson(1.0, (60, x.shape[1])))
    names = tuple(f"G{i:04d}" for i in range(x.shape[1]))
    mine = Labelled(names, scipy.sparse.csr_matrix(np.vstack([x, rest])), labels, np.zeros(70, bool))
    base = logistic_terms.Params((Party("a"), Party("b")), HUB, kind="log", penalties=(1.0,))
    part = Part(Params(base), Start(names, ("other", "small"), 0), mine)
    sums = part.first().values[2 : 2 + 2 * len(names)].reshape(2, -1)[1]
    assert not np.any(sums % 4)
    new = smallest_level(sums)
    owners = x[:, new].argmax(axis=0)
    assert np.bincount(owners, minlength=10).max() < len(new) / 2  # not one cell's genes
    assert np.abs(sums - x.sum(axis=0))[part.shown].max() <= 2 + 1e-9
    assert part.shown.sum() > 500


def steered(target_value=5.0, expressing=1, n=60, farthest=0.0):
    """L6 of an honest site where another one makes typicality a function of one gene, of which it claims all variance.

    Cells of label "a" express gene 0 in `expressing` cells, those of "b" do not.
    """
    rng = np.random.default_rng(2)
    x = rng.uniform(0.5, 1.5, (2 * n, 6))
    x[:, 0] = 0.0
    x[:expressing, 0] = target_value
    x[0, 0] = max(x[0, 0], farthest)
    labels = ("a",) * n + ("b",) * n
    names = tuple(f"G{i}" for i in range(6))
    mine = Labelled(names, scipy.sparse.csr_matrix(x), labels, np.zeros(2 * n, bool), fold=np.arange(2 * n) % 3)
    base = logistic_terms.Params((Party("u"), Party("v")), HUB, kind="log", penalties=(1.0,))
    params, start = Params(base), Start(names, ("a", "b"), 0)
    part = Part(params, start, mine)
    first = part.first().map(pooled_discriminant.words_for(params)).values.view(np.int64)
    K, g = 2, 6
    claim = np.zeros(K + (K + 1) * g)
    claim[:K] = n, n
    claim[K] = 8.0 * n  # gene 0 in "a"
    claim[K + K * g :] = [72.0 * n, *[1e6 * n] * (g - 1)]  # other genes vary so much that they do not count
    total = first + pooled_discriminant.words_for(params)(claim).view(np.int64)
    terms = pooled_discriminant.terms_of(params, start, total)
    second = part.second(terms).map(pooled_discriminant.words_for(params)).values.view(np.int64)
    products = np.diag(claim[K + K * g :][terms.at])[np.triu_indices(len(terms.at))]
    claimed = pooled_discriminant.words_for(params)(products).view(np.int64)
    statistics = pooled_discriminant.statistics_of(params, terms, second + claimed)
    return part, terms, statistics


def test_a_gene_that_few_cells_express_is_not_scored():
    """A site claims all variance of a gene, so that scores show the one cell of another site that expresses it."""
    seen, seen_at_l6 = [], []
    for value in (4.0, 4.3):
        part, terms, statistics = steered(value)
        at = list(terms.at).index(0)
        old = part.columns(terms.at).toarray().astype(np.float64)
        assert old[:, at].max() == pytest.approx(value)  # what L6 scored, without the threshold
        assert not part.whole.means[:, at].any()
        course = pooled_discriminant.Course.of(part.params, statistics)
        for _ in range(part.params.refined):
            residuals = part.residuals(terms, course)
            seen_at_l6.append(tuple(residuals.values))
            course.take(residuals.map(pooled_discriminant.words_for(part.params)).values.view(np.int64))
        seen.append(tuple(part.third(terms, course).values))
    assert seen[0] == seen[1]
    assert seen_at_l6[:2] == seen_at_l6[2:]


def test_a_gene_that_one_of_many_cells_dominates_is_left_out():
    """Twelve cells express the gene, one far more than the others: effectively fewer than ten."""
    part, _, _ = steered(1.0, expressing=12)
    assert part.shown[0]
    far, _, _ = steered(1.0, expressing=12, farthest=7.0)
    assert not far.shown[0]


def test_a_cell_far_from_all_others_is_not_the_first_axis_of_an_embedding(monkeypatch):
    c = embedded(seed=3, unlabelled=0.0)
    u = c.params.base.sites[0]
    mine = c.inputs[u][0]
    far = np.random.default_rng(0).normal(0, 1, 7)
    x = mine.x - np.median(mine.x, axis=0)
    x[0] = 40 * np.linalg.norm(x, axis=1).max() * far / np.linalg.norm(far)
    c = changed(c, u, x=x)
    record = Recorder(monkeypatch)
    check_no_errors(run_protocol(pooled_discriminant, c))
    part, second = record.parts[len(mine.labels), "L5"]

    def axis(gram):
        return abs(np.linalg.eigh(gram)[1][:, -1] @ far) / np.linalg.norm(far)

    assert axis(label_sums.second_moments(x)) > 0.999  # the old step: that cell
    assert axis(pooled_discriminant.square(second.values, 7)) < 0.9
    held = part.mine.x[part.keep]
    distance = np.sort(np.linalg.norm(held - np.median(x, axis=0), axis=1))
    np.testing.assert_allclose(distance[-10:], distance[-1])


# ---- bad input, absurd sums ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "step", "change"),
    [
        ("L4", "first", lambda v: v * -1.0),
        ("L4", "first", lambda v: np.concatenate([v[:3] * 0 + 1, v[3:] * 1e3])),
        ("L5", "second", lambda v: v * 3.0),
        ("L6", "residuals", lambda v: v + 1e6),
        ("L6", "residuals", lambda v: v + 10 * np.resize([1.0, -1.0], len(v)) * np.abs(v).max()),
        ("L7", "third", lambda v: np.concatenate([v[:1] * 0, v[1:] + 100_000])),
    ],
)
def test_sums_of_no_cells_end_the_run(line, step, change, monkeypatch):
    honest = getattr(Part, step)

    def invented(part, *args):
        contribution = honest(part, *args)
        return contribution.map(change) if len(part.mine.labels) == 90 else contribution

    monkeypatch.setattr(Part, step, invented)
    if line == "L4":  # so that the sums of the others do not outweigh it
        keep = Labelled.open_labels
        monkeypatch.setattr(Labelled, "open_labels", lambda m, least: keep(m, least if len(m.labels) == 90 else 10**9))
    run = run_protocol(pooled_discriminant, case(), timeout=5.0)
    assert not values(run)
    assert {(run.errors[u].line, run.errors[u].code) for u in run.agreement.parties} == {(line, "absurd")}


def test_a_coordinator_cannot_change_a_sum():
    class Changing:
        def __init__(self, ch):
            self.ch = ch

        def __getattr__(self, name):
            return getattr(self.ch, name)

        def sub(self, *args, **more):
            return Changing(self.ch.sub(*args, **more))

        async def broadcast(self, to, msg):
            if isinstance(msg, checked_sum.Total):
                msg = checked_sum.Total(msg.z + np.uint64(1 << 20))
            await self.ch.broadcast(to, msg)

        async def scatter(self, to, msg=None):
            each = dict(to) if msg is None else dict.fromkeys(to, msg)
            wrong = {
                u: checked_sum.Total(m.z + np.uint64(1 << 20)) if isinstance(m, checked_sum.Total) else m
                for u, m in each.items()
            }
            await self.ch.scatter(wrong)

    async def coordinator(ch, params):
        return await pooled_discriminant.coordinator(Changing(ch), params)

    c = case()
    run = run_protocol(pooled_discriminant, c, roles={HUB: coordinator}, timeout=5.0)
    assert {run.errors[u].code for u in c.params.base.sites} == {"changed"}


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
    u = c.params.base.sites[0]
    run = run_protocol(pooled_discriminant, Case(c.params, {**c.inputs, u: (change(c.inputs[u][0]),)}), timeout=2.0)
    assert isinstance(run.errors[u], DataError)
    assert message in str(run.errors[u])


def test_one_label_with_enough_cells_is_too_few():
    c = case(K=1)
    run = run_protocol(pooled_discriminant, c, timeout=2.0)
    assert run.errors[HUB].code == "labels"


def test_a_site_that_claims_nearly_all_cells_is_named():
    c = case(size=60)
    u = c.params.base.sites[2]
    many = changed(c, u, x=scipy.sparse.vstack([c.inputs[u][0].x] * 20).tocsr(), labels=c.inputs[u][0].labels * 20,
                   held=np.tile(c.inputs[u][0].held, 20), fold=np.tile(c.inputs[u][0].fold, 20))  # fmt: skip
    run = run_protocol(pooled_discriminant, many, timeout=5.0)
    assert not values(run)
    assert {e.code for e in run.errors.values()} == {"claims"}
    assert "'site-2' claims more than max_share=0.9" in str(run.errors[HUB])
    check_no_errors(
        run_protocol(pooled_discriminant, Case(dataclasses.replace(many.params, max_share=1.0), many.inputs))
    )


def test_there_must_be_a_setting():
    with pytest.raises(ParameterError, match="at least one setting"):
        case(settings=())


def test_the_level_lets_a_fraction_of_right_answers_fall_below():
    params = case().params
    n = len(SETTINGS)
    below = np.zeros(len(GRID), np.int64)
    below[30:] = 50  # 5 %
    below[40:] = 500
    counts = np.concatenate([[1000], np.full(n, 900), [1000], below, [500], np.full(n, 450), [455, 480]])
    choice = pooled_discriminant.choose(params, counts)
    assert (choice.setting, choice.level) == (0, GRID[39])
    assert choice.shares[0] == (SETTINGS[0].name, 0.9)
    assert choice.shares[-1] == (f"{SETTINGS[0].name}, 2 logistic steps", 0.96)
    assert choice.own == n + 1  # two steps: more than a standard error above all others
    counts[-1] = 452
    assert pooled_discriminant.choose(params, counts).own == 0
    counts[: 1 + n] = 0  # one site has all the labels
    assert pooled_discriminant.choose(params, counts).shares[0] == (SETTINGS[0].name, 0.9)
    assert pooled_discriminant.choose(params, counts * 0) == pooled_discriminant.Choice(0, 0, GRID[0], ())


def test_a_logistic_step_is_that_of_the_cells_where_groups_hold_one_cell_each():
    """Against Newton's method with the bound of its curvature, written out over cells."""
    rng = np.random.default_rng(0)
    x, codes = rng.normal(0, 1, (300, 6)) + 1.0, rng.integers(0, 3, 300)
    x[:, :3] += np.eye(3)[codes]
    statistics = discriminant.Statistics.of(x, codes, 3)
    solver = discriminant.Solver(statistics, 0.05)
    linear = solver.fit(SETTINGS[0])
    residual = discriminant.residuals(linear, x, codes, np.ones(300, np.int64), np.zeros(6))
    found = solver.step(linear, residual, 300.0)
    z = (x - x.mean(axis=0)) / np.sqrt(x.var(axis=0) + 0.05)
    p = scipy.special.softmax(linear.scores(x), axis=1)
    weights = linear.coefficients * np.sqrt(x.var(axis=0) + 0.05)[:, None]
    gradient = z.T @ (np.eye(3)[codes] - p) / 300 - discriminant.DECAY * weights
    curvature = discriminant.CURVATURE * z.T @ z / 300 + discriminant.DECAY * np.eye(6)
    right = weights + np.linalg.solve(curvature, gradient)
    np.testing.assert_allclose(found.coefficients * np.sqrt(x.var(axis=0) + 0.05)[:, None], right, atol=1e-9)

    def loss(linear):
        return -np.log(scipy.special.softmax(linear.scores(x), axis=1)[np.arange(300), codes]).mean()

    assert loss(found) < loss(linear)


def test_of_settings_that_score_alike_the_first_is_taken():
    assert discriminant.choose_setting([891.0, 900.0, 895.0], 1000.0) == 0  # one standard error is 9.5
    assert discriminant.choose_setting([880.0, 900.0, 895.0], 1000.0) == 1
