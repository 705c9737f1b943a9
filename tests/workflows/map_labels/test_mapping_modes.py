"""The other two modes of the mapping, and the terms that come before it."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest
from knn_cases import ASK, HUB, NAMES, agree, case

from cloister.errors import DataError, ParameterError
from cloister.mpc.three_party import replicated
from cloister.papers import plain_knn, published_knn
from cloister.papers.attacks import trilateration
from cloister.study import Party
from cloister.testing import (
    Case,
    check_abort,
    check_cost,
    check_ideal,
    check_no_errors,
    check_vectors,
    check_view,
    run_protocol,
    transcript,
    values,
)
from cloister.workflows.map_labels import mapping_terms, nearest_labels, private_knn

VECTORS = Path(__file__).parents[2] / "vectors"


def plain(**options):
    c = case(pads=options.pop("pads", 2), **options)
    return Case(plain_knn.Params(c.params, HUB), c.inputs)


def published(**options):
    c = case(pads=0, **{"m": 3, "rows": (7, 6), **options})
    return Case(published_knn.Params(c.params), c.inputs)


# ---- plain ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"share": True, "threshold": 0.9}, {"rows": (1, 2, 40), "k": 7}, {"bits": 64}])
def test_plain_ideal(options):
    check_ideal(plain_knn, [plain(seed=s, **options) for s in range(3)], agree=agree)


def test_plain_view_cost_and_vectors():
    check_view(plain_knn, plain(seed=1), plain(seed=2))
    check_cost(plain_knn, plain(share=True))
    check_vectors(plain_knn, plain(m=2, rows=(4, 3)), VECTORS / "plain_knn.json")


@pytest.mark.parametrize("kind", ["drop", "swap", "truncate", "kill"])
def test_plain_abort(kind):
    c = plain(m=2, rows=(4, 3))
    messages = [("basel", "hub", "plain_knn.Nearest"), ("hub", "lugano", "plain_knn.Chosen")]
    messages += [("ask", "hub", "plain_knn.Queries"), ("lugano", "hub", "plain_knn.Votes")]
    check_abort(plain_knn, c, survived=lambda run: None, kinds=[kind], messages=messages)


def test_the_coordinator_of_a_plain_mapping_holds_no_cells():
    with pytest.raises(ParameterError, match="holds no cells"):
        plain_knn.Params(case().params, NAMES[0])


# ---- published -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"rows": (2, 9, 5), "k": 4}, {"labels": 1}, {"bits": 64, "repeat": 3}])
def test_published_ideal(options):
    check_ideal(published_knn, [published(seed=s, **options) for s in range(2)], agree=agree)


def test_published_equals_hardened_and_plain_without_ties():
    c = case(m=25, rows=(20, 15, 12), dims=4, labels=3, k=5, pads=0, seed=5)
    one = values(run_protocol(private_knn, c))[ASK].labels
    two = values(run_protocol(published_knn, Case(published_knn.Params(c.params), c.inputs)))[ASK].labels
    three = values(run_protocol(plain_knn, Case(plain_knn.Params(c.params, HUB), c.inputs)))[ASK].labels
    np.testing.assert_array_equal(one, three)
    np.testing.assert_array_equal(one, two)  # continuous values: no ties in distance


def test_published_batches(monkeypatch):
    monkeypatch.setattr(published_knn, "BATCH", 16)
    c = published(m=5, rows=(7, 6))
    assert c.params.step == 2
    check_ideal(published_knn, [c], agree=agree)


def test_published_view_cost_and_vectors():
    check_view(published_knn, published(seed=1), published(seed=2))
    check_cost(published_knn, published(m=9, rows=(9, 8)))
    check_vectors(published_knn, published(m=1, rows=(2, 2), k=2, labels=2), VECTORS / "published_knn.json")


@pytest.mark.parametrize("kind", ["drop", "truncate", "kill"])
def test_published_abort(kind):
    c = published(m=1, rows=(2, 2), k=1, labels=2)
    messages = [("basel", "ask", "verified.Gate"), ("lugano", "ask", "replicated.Open")]
    check_abort(published_knn, c, survived=lambda run: None, kinds=[kind], messages=messages)


def test_published_says_what_it_lacks():
    with pytest.raises(ParameterError, match="mode='hardened'"):
        published(share=True)


def test_masks_of_ties_must_be_one_hot(monkeypatch):
    """Algorithm 5 asks for one-hot masks: a mask of every equal minimum makes one wrong neighbour of two references."""
    c = published(m=12, rows=(12, 12), labels=4, k=3, repeat=3, seed=4)
    wanted = published_knn.ideal(c.params, c.inputs)[ASK].labels
    np.testing.assert_array_equal(values(run_protocol(published_knn, c))[ASK].labels, wanted)

    real = replicated.Trio.onehot_min

    async def every_minimum(trio, x):
        """A mask that is not one-hot: every entry that equals the least one."""
        least, place = await real(trio, x)
        if x.ring != c.params.distances:
            return least, place
        wide = least.map(lambda w: np.broadcast_to(w[..., None], x.shape))
        return least, await trio.inject(await trio.equal(x, wide), x.shape, x.ring)

    monkeypatch.setattr(replicated.Trio, "onehot_min", every_minimum)
    spoiled = values(run_protocol(published_knn, c))[ASK].labels
    assert (spoiled != wanted).mean() > 0.2


def test_published_shows_how_many_cells_a_site_has_and_hardened_does_not():
    """Anyone who sees the sizes of a site's inputs divides by the width."""

    def counted(module, c, core):
        rows = transcript(run_protocol(module, c))["lugano"]
        return max(size for name, _, size in rows if name == "replicated.Input") // (core.dims * core.ring.size)

    found = {}
    for n in (40, 50):
        c = case(m=2, rows=(9, n), dims=40, pads=0, k=2, bound=30.0)
        found["published", n] = counted(published_knn, Case(published_knn.Params(c.params), c.inputs), c.params)
        padded = dataclasses.replace(c.params, rows=tuple(map(mapping_terms.rounded, c.params.rows)))
        found["hardened", n] = counted(private_knn, Case(padded, c.inputs), padded)
    assert found["published", 50] - found["published", 40] in (9, 10, 11)
    assert found["hardened", 50] == found["hardened", 40]


# ---- trilateration ---------------------------------------------------------------------------------------------------


def spied(module, c):
    """Run, and keep every array that the coordinator receives."""
    seen = []

    async def watching(ch, params, **extras):
        gather = ch.gather

        def keep(got):
            seen.extend(got.values())
            return got

        async def spy(senders, kind, **kw):
            return keep(await gather(senders, kind, **kw))

        ch.gather = spy
        return await module.roles(params)[HUB](ch, params, **extras)

    async def plain_role(ch, params):
        return await watching(ch, params)

    async def secret_role(ch, params, *, entropy, identity):
        return await watching(ch, params, entropy=entropy, identity=identity)

    role = plain_role if module is plain_knn else secret_role
    run = run_protocol(module, c, roles={HUB: role})
    check_no_errors(run)
    return seen


def test_trilateration_works_on_plain_and_has_nothing_to_work_on_in_hardened():
    dims, n, m, k = 4, 60, 200, 10
    hardened = case(m=m, rows=(n,), dims=dims, k=k, pads=0, computing=(ASK, NAMES[0], HUB))
    truth = nearest_labels.encode(hardened.params, hardened.inputs[NAMES[0]][0]).astype(float)
    q = nearest_labels.encode(hardened.params, hardened.inputs[ASK][0]).astype(float)

    seen = spied(plain_knn, Case(plain_knn.Params(hardened.params, HUB), hardened.inputs))
    queries = next(x.q for x in seen if isinstance(x, plain_knn.Queries))
    near = next(x for x in seen if isinstance(x, plain_knn.Nearest))
    view = trilateration.View(queries.astype(float), near.rows, near.d2.astype(float))
    hits = trilateration.rebuilt(view, truth, within=0.5)
    assert hits > n / 2

    seen = spied(private_knn, hardened)
    assert not [x for x in seen if hasattr(x, "rows") or hasattr(x, "d2")]
    words = np.concatenate([x.data for x in seen if isinstance(x, replicated.Hop)])
    ring = hardened.params.ring
    values_ = ring.from_bytes(words, (words.size // ring.size,)).astype(float)[: m * n].reshape(m, n)
    # give the attacker the queries and the numbers of the nearest references too: the words say nothing about them
    distances = np.take_along_axis(values_, near.rows, axis=1)
    assert trilateration.rebuilt(trilateration.View(q, near.rows, distances), truth, within=0.5) == 0


# ---- terms -----------------------------------------------------------------------------------------------------------


def holding(rows=5, norm=3.0, width=4, names=("a", "b"), step=0):
    return mapping_terms.LocalInput(width, rows, mapping_terms.rounded(rows, step), norm, names)


def term_case(k=3, coordinator_computes=False, holdings=None, **options):
    owners = (ASK, *NAMES[:2])
    given = holdings or {
        ASK: holding(9, 4.1, names=()),
        NAMES[0]: holding(70, 0.3),
        NAMES[1]: holding(2, 7.9, names=("c",)),
    }
    computing = (HUB, *owners[:2]) if coordinator_computes else owners
    params = mapping_terms.Params(HUB, ASK, owners[1:], computing, k, **options)
    return Case(params, {p: (h,) for p, h in given.items()})


def same(found, ideal):
    assert found == ideal


@pytest.mark.parametrize("coordinator_computes", [False, True])
@pytest.mark.parametrize("options", [{}, {"labels": ("x", "y"), "bound": 10.0}])
def test_terms(options, coordinator_computes):
    c = term_case(coordinator_computes=coordinator_computes, **options)
    check_ideal(mapping_terms, [c], agree=same)
    check_cost(mapping_terms, c)
    found = values(run_protocol(mapping_terms, c))[HUB]
    assert found.rows == (128, 64)
    assert found.queries == 64
    assert found.labels == options.get("labels", ("a", "b", "c"))
    assert 7.9 <= found.bound <= 10.0


def test_terms_view_and_vectors():
    other = {ASK: holding(11, 1.1, names=()), NAMES[0]: holding(80, 9.0), NAMES[1]: holding(6, 0.01, names=("d",))}
    check_view(mapping_terms, term_case(), term_case(holdings=other))
    check_vectors(mapping_terms, term_case(), VECTORS / "mapping_terms.json")


@pytest.mark.parametrize("kind", ["drop", "truncate", "kill"])
def test_terms_abort(kind):
    messages = [("basel", "hub", "mapping_terms.Announcement"), ("hub", "ask", "mapping_terms.Announced")]
    messages += [("basel", "ask", "verified.Gate")]
    check_abort(mapping_terms, term_case(), survived=lambda run: None, kinds=[kind], messages=messages)


def test_terms_that_differ_end_the_run():
    """A coordinator that tells one site of fewer references: the keys of the three do not fit together."""

    async def equivocal(ch, params, *, entropy, identity):
        broadcast = ch.broadcast

        async def tell(to, said):
            first, *rest = to
            other = dataclasses.replace(said, rows={p: n + 64 * (p != first) for p, n in said.rows.items()})
            await broadcast(rest, said)
            await ch.send(first, other)

        ch.broadcast = tell
        return await mapping_terms.coordinator(ch, params, entropy=entropy, identity=identity)

    run = run_protocol(mapping_terms, term_case(), roles={HUB: equivocal}, timeout=2.0)
    assert not set(run.outcomes) - {HUB}


def test_a_coordinator_that_changes_an_announcement_is_noticed():
    async def bent(ch, params, *, entropy, identity):
        broadcast = ch.broadcast

        async def tell(to, said):
            await broadcast(to, dataclasses.replace(said, rows={p: n + 64 for p, n in said.rows.items()}))

        ch.broadcast = tell
        return await mapping_terms.coordinator(ch, params, entropy=entropy, identity=identity)

    run = run_protocol(mapping_terms, term_case(), roles={HUB: bent}, timeout=2.0)
    assert ("mapping_terms", "T2") in {(e.protocol, e.line) for p, e in run.errors.items() if p != HUB}


def test_too_few_references_are_refused_by_all():
    run = run_protocol(mapping_terms, term_case(k=73))
    assert {type(e) for e in run.errors.values()} == {DataError}
    assert all("n_neighbors=73 is more than" in str(e) for e in run.errors.values())
    check_no_errors(run_protocol(mapping_terms, term_case(k=72)))


def test_different_widths_are_refused_by_name():
    given = {ASK: holding(9, names=()), NAMES[0]: holding(width=5), NAMES[1]: holding()}
    run = run_protocol(mapping_terms, term_case(holdings=given), timeout=2.0)
    assert "different widths (ask 4, basel 5, lugano 4)" in str(run.errors[HUB])


def test_no_label_at_all():
    given = {ASK: holding(9, names=()), NAMES[0]: holding(names=()), NAMES[1]: holding(names=())}
    run = run_protocol(mapping_terms, term_case(holdings=given), timeout=2.0)
    assert "no site has a label" in str(run.errors[HUB])


@pytest.mark.parametrize(
    ("norm", "text"), [(float("nan"), "missing or infinite"), (float("inf"), "missing or infinite"), (1e300, "longer")]
)
def test_norms_that_do_not_work(norm, text):
    with pytest.raises(DataError, match=text):
        mapping_terms.exponent(norm)


def test_rounding():
    assert [mapping_terms.rounded(n) for n in (1, 64, 65, 1000, 6000)] == [64, 64, 128, 1024, 6144]
    assert mapping_terms.rounded(7, 1) == 7
    for norm in (1e-90, 0.3, 1.0, 7.9, 8.0, 1e60):
        e = mapping_terms.exponent(norm)
        assert norm <= mapping_terms.bound_of(e) <= max(1.2 * norm, 1e-70)


def test_party_names_are_checked():
    with pytest.raises(ParameterError, match="three different"):
        mapping_terms.Params(HUB, ASK, NAMES[:1], (HUB, ASK, ASK), 3)
    with pytest.raises(ParameterError, match="not from the querier"):
        mapping_terms.Params(HUB, ASK, (ASK,), (HUB, ASK, Party("x")), 3)
