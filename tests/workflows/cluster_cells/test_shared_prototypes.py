"""Shared prototypes and common clusters: what one place would compute, few cells, one malicious party."""

import dataclasses
import itertools
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import scipy.sparse
from anndata import AnnData

from cloister.deploy.approval.differencing import AnsweredCells
from cloister.disclosure import Contribution, Thresholds
from cloister.errors import DataError, ParameterError, ProtocolAbort, RefusedError
from cloister.mpc.net.channel import Channel
from cloister.mpc.sums import checked_sum
from cloister.rehearsal.rehearsal import Fault
from cloister.study import Party
from cloister.testing import (
    Case,
    check_cost,
    check_ideal,
    check_lies,
    check_no_errors,
    check_vectors,
    plain_inputs,
    run_protocol,
    transcript,
    values,
)
from cloister.workflows.cluster_cells import common_clusters, shared_prototypes
from cloister.workflows.cluster_cells.shared_prototypes import Cells, Own, Params
from cloister.workflows.common import gene_moments
from cloister.workflows.find_markers import pooled_markers

pytest.importorskip("igraph", reason="the extra `cluster`")

HUB = Party("hub")
SITES = A, B, C = tuple(map(Party, "abc"))
VECTORS = Path(__file__).parents[2] / "vectors"


def cells(rng, n, d=3, donors=0, thresholds=None):
    kind = np.arange(n) % 3
    x = 6 * np.eye(3, d)[kind] + rng.normal(0, 1.0, (n, d))
    return Cells(x, rng.integers(0, donors, n) if donors else None, "ab12", thresholds or Thresholds())


def case(seed=0, n=3, sizes=(60, 80, 100), donors=0, d=3, **options):
    rng = np.random.default_rng(seed)
    params = Params(SITES[:n], HUB, "X_a", **{"n_prototypes": 8} | options)
    return Case(params, {u: (cells(rng, size, d, donors),) for u, size in zip(SITES[:n], sizes, strict=False)})


def clusters(c, **options):
    return Case(common_clusters.Params(c.params, **{"resolution": 0.3, "n_neighbors": 10} | options), c.inputs)


def agree(found, ideal):
    np.testing.assert_array_equal(found.cells, ideal.cells)
    np.testing.assert_allclose(found.mean, ideal.mean, atol=1e-9)
    np.testing.assert_allclose(found.variance, ideal.variance, atol=1e-8)
    assert found.trail == ideal.trail


@pytest.mark.parametrize(
    "options",
    [{}, {"n": 2}, {"donors": 7}, {"n_prototypes": 200}, {"sizes": (60, 80, 4)}, {"d": 1}],
    ids=["plain", "two-sites", "donors", "all", "a site with 4 cells", "one column"],
)
def test_roles_give_what_one_place_gives(options):
    check_ideal(shared_prototypes, [case(seed=2, **options)], agree=agree)


def test_prototypes_are_the_means_of_their_cells():
    c = case()
    found = next(iter(shared_prototypes.ideal(c.params, plain_inputs(c)).values()))
    x = np.concatenate([m.x for (m,) in c.inputs.values()])
    assert found.cells.sum() == len(x)
    np.testing.assert_allclose(found.cells @ found.mean / len(x), x.mean(axis=0), atol=0.15)  # of clipped groups
    spread = found.cells @ (found.variance + found.mean**2) / len(x)
    np.testing.assert_allclose(spread, np.square(x).mean(axis=0), rtol=0.1)
    assert 4 <= len(found) <= 8
    near = np.sqrt(np.square(x[:, None] - found.mean).sum(axis=2)).min(axis=1)
    assert near.mean() < 2.0  # kinds are 8.5 apart


def test_vectors():
    check_vectors(shared_prototypes, case(sizes=(30, 30, 30), n_prototypes=3), VECTORS / "shared_prototypes.json")


@pytest.mark.parametrize("n", [2, 3])
def test_cost(n):
    c = case(n=n)
    found = next(iter(shared_prototypes.ideal(c.params, plain_inputs(c)).values()))
    priced = SimpleNamespace(
        __name__="shared_prototypes",
        roles=shared_prototypes.roles,
        cost=lambda params: shared_prototypes.cost(params, 3, list(found.trail), len("ab12")),
    )
    check_cost(priced, c)
    points = SimpleNamespace(
        __name__="common_clusters",
        roles=common_clusters.roles,
        cost=lambda params: common_clusters.cost(params, 3, list(found.trail), int(found.cells.sum()), len("ab12")),
    )
    check_cost(points, clusters(c))


def test_no_value_leaves_but_masked():
    run = run_protocol(common_clusters, clusters(case()))
    check_no_errors(run)
    sent = {row[0] for p, rows in transcript(run).items() if p != HUB for row in rows}
    assert sent == {
        "channel.Hello",
        "common_space.Space",
        "same_view.Signature",
        *(f"common_seed.{m}" for m in ("Key", "Parts", "Confirm")),
        "checked_sum.Masked",
    }


# ---- clusters --------------------------------------------------------------------------------------------------------


def alike(found, ideal):
    np.testing.assert_array_equal(found.codes, ideal.codes)
    np.testing.assert_array_equal(found.cells, ideal.cells)
    np.testing.assert_allclose(found.votes, ideal.votes)


def test_every_party_has_the_clusters_of_one_place():
    c = clusters(case(seed=3), resolution=0.1)
    check_ideal(common_clusters, [c], agree=alike)
    found = common_clusters.ideal(c.params, plain_inputs(c))
    for u in SITES:
        assert len(found[u]) == 3
        kind = np.arange(len(found[u].cells)) % 3
        for k in range(3):
            own = np.bincount(found[u].cells[kind == k], minlength=3)
            assert own.max() >= 0.9 * own.sum()
    assert len({tuple(np.bincount(found[u].cells[::3], minlength=3) > 10) for u in SITES}) == 1  # one name for a kind


def test_a_site_with_too_few_cells_adds_nothing_and_has_the_clusters():
    c = clusters(case(sizes=(60, 80, 4)))
    found = common_clusters.ideal(c.params, plain_inputs(c))
    assert found[C].prototypes.cells.sum() == 140
    assert len(found[C].cells) == 4
    few = clusters(case(sizes=(5, 5, 4)))
    run = run_protocol(common_clusters, few, timeout=5.0)
    assert {e.code for e in run.errors.values() if isinstance(e, ProtocolAbort)} == {"too-few-cells"}


def test_points_stand_for_cells_and_are_bounded(monkeypatch):
    c = clusters(case())
    found = next(iter(shared_prototypes.ideal(c.params.base, plain_inputs(c)).values()))
    points = common_clusters.drawn(c.params, found)
    assert len(points) == 240
    monkeypatch.setattr(common_clusters, "MOST", 100)
    assert len(common_clusters.drawn(c.params, found)) == 100
    np.testing.assert_allclose(points.mean(axis=0), found.cells @ found.mean / 240, atol=0.3)


# ---- few cells -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("donors", [0, 5])
def test_whatever_prototypes_others_choose_a_sum_is_one_of_whole_groups(donors):
    """Attack: means that isolate one cell. Its whole group answers, and its complement is groups as well."""
    c = case(donors=donors)
    mine = c.inputs[A][0]
    x = mine.x.copy()
    x[7] = [0, 0, 60.0]
    mine = dataclasses.replace(mine, x=x)
    own = Own.of(c.params, mine)
    assert own.size.min() >= 10
    assert own.size.sum() == 60 if not donors else own.size.sum() > 45
    for means in (np.array([[0, 0, 60.0], [0, 0, 0]]), np.array([[0, 0, 33.0], [0, 0, 0], [0, 0, 61.0]])):
        part = own.sums(means)
        assert part.cells >= 10
        assert part.donors is None if not donors else part.donors >= 3
        sizes = part.values.reshape(len(means), -1)[:, 0]
        assert all(size == 0 or size >= 10 for size in sizes)
        assert np.abs(own.mean).max() < 15  # the cell at 60 bends no mean far


def test_a_sites_own_thresholds_can_only_raise_those_of_the_study():
    c = case()
    mine = c.inputs[C][0]
    assert Own.of(c.params, dataclasses.replace(mine, thresholds=Thresholds(25, 3))).size.min() >= 25
    assert Own.of(c.params, dataclasses.replace(mine, thresholds=Thresholds(2, 3))).size.min() >= 10
    assert not len(Own.of(c.params, dataclasses.replace(mine, thresholds=Thresholds(101, 3))).size)


# ---- one malicious party ---------------------------------------------------------------------------------------------

TINY = {"sizes": (30, 30, 30), "n_prototypes": 3}


def right_prototypes(cases):
    def right(lie, found):
        have = {u: v for u, v in found.items() if v is not None}
        assert len({v.mean.tobytes() for v in have.values()}) <= 1
        if lie.liar == HUB:
            possible = [next(iter(shared_prototypes.ideal(c.params, plain_inputs(c)).values())) for c in cases]
            for v in have.values():
                assert any(v.mean.shape == p.mean.shape and np.allclose(v.mean, p.mean) for p in possible), lie
        if lie.letter == "j":
            wanted = next(iter(shared_prototypes.ideal(lie.case.params, plain_inputs(lie.case)).values()))
            for v in have.values():
                np.testing.assert_allclose(v.mean, wanted.mean, atol=1e-6)

    return right


def test_lies():
    cases = [case(**TINY), case(seed=4, **TINY)]
    lies = check_lies(shared_prototypes, cases, right=right_prototypes(cases))
    assert lies.tried > 10
    assert lies.aborted > 5


@pytest.mark.slow
def test_lies_in_every_message():
    cases = [case(**TINY), case(seed=4, **TINY)]
    lies = check_lies(shared_prototypes, cases, right=right_prototypes(cases), full=True, timeout=4.0, within=40.0)
    print(f"\nshared_prototypes: {lies}")
    assert lies.tried > 30


def right_clusters(lie, found):
    """One partition for all, about as good as the best."""
    assert len({v.codes.tobytes() for v in found.values()}) <= 1
    for v in found.values():
        graph = common_clusters.graph_of(lie.case.params, v.points)
        best = common_clusters.leiden.partition(graph, lie.case.params.resolution, 0, 3)
        quality = common_clusters.leiden.modularity
        assert quality(graph, v.codes, 0.3) >= quality(graph, best, 0.3) - 1.5 * common_clusters.SLACK, lie


def test_lies_about_clusters():
    cases = [clusters(case(**TINY)), clusters(case(seed=4, **TINY))]
    only = ("common_clusters",)
    lies = check_lies(common_clusters, cases, right=right_clusters, only=lambda lie: lie.name.startswith(only))
    assert lies.tried >= 4
    assert lies.aborted >= 3


@pytest.mark.parametrize(
    ("change", "code"),
    [
        (lambda codes: np.arange(len(codes)) % 3, "modularity"),
        (lambda codes: np.zeros_like(codes), "modularity"),
        (lambda codes: codes - 1, "labels"),
        (lambda codes: codes * 2, "labels"),
        (lambda codes: codes[1:], "labels"),
    ],
)
def test_a_coordinator_that_sends_other_clusters_ends_the_run(monkeypatch, change, code):
    real = Channel.broadcast

    async def lying(ch, to, msg):
        if isinstance(msg, common_clusters.Labels):
            msg = common_clusters.Labels(change(msg.codes))
        await real(ch, to, msg)

    monkeypatch.setattr(Channel, "broadcast", lying)
    run = run_protocol(common_clusters, clusters(case(sizes=(90, 90, 90))), timeout=5.0)
    assert {e.code for p, e in run.errors.items() if p != HUB} == {code}
    assert not set(values(run)) & set(SITES)


def test_a_border_that_moves_past_one_cell_between_two_runs_is_rejected(tmp_path):
    """Of partitions that a site accepts, two differ by one of its cells, and its markers in both by that cell.

    A coordinator can choose them. So the site compares the groups before it answers with the second ones.
    """
    c = clusters(case(seed=3, sizes=(300, 300, 300)), resolution=0.1)
    found = common_clusters.ideal(c.params, plain_inputs(c))[HUB]
    graph, x = common_clusters.graph_of(c.params, found.points), c.inputs[C][0].x
    first, second = (found.points[found.codes == k].mean(axis=0) for k in (0, 1))
    toward = np.argsort(np.where(found.codes == 0, (first - found.points) @ (second - first), np.inf))
    own = []
    for points in range(24):
        codes = found.codes.copy()
        codes[toward[:points]] = 1
        common_clusters.check_labels(c.params, graph, codes)
        own.append(common_clusters.clusters_of(c.params, found.prototypes, found.points, graph, codes, x).cells)
    moved = [np.flatnonzero(a != b) for a, b in itertools.pairwise(own)]
    step = next(i for i, cells in enumerate(moved) if len(cells) == 1)
    counts = scipy.sparse.csr_matrix(np.random.default_rng(1).poisson(4.0, (300, 6)).astype(float))
    holds = gene_moments.Cells(tuple("ABCDEF"), counts)
    params, names = pooled_markers.Params(SITES, HUB), ("0", "1", "2")
    log = []
    for codes in own[step : step + 2]:
        mine = pooled_markers.Cells(holds, tuple(str(k) for k in codes))
        part = pooled_markers.contribution(params, mine, tuple("ABCDEF"), names)
        assert part.cells >= 10
        log.append(part.values[4 + 24 : 4 + 48].reshape(4, 6)[1])
    cell = counts[moved[step][0]].toarray()[0]
    np.testing.assert_allclose(log[1] - log[0], np.log1p(1e4 * cell / cell.sum()), atol=0.26)

    answered, site = AnsweredCells(tmp_path), AnnData(counts, obs={"site": "c"})
    for run, codes in enumerate(own[step : step + 2]):  # the steps of two studies, which name their clusters otherwise
        answered.admit(site, "cells", None, f"study {run}", Thresholds())
        site.obs[name := f"clusters {run}"] = codes.astype(str)
        with (
            pytest.raises(RefusedError, match="differs from one of 'clusters 0' .* by 1 cell") if run else nullcontext()
        ):
            answered.admit_step(site, "cells", f"study {run}", Thresholds(), [name], [name])


@pytest.mark.parametrize("factor", [-1.0, 0.0, -1000.0, 1e9])
def test_sums_that_no_cells_give_move_prototypes_and_nothing_else(monkeypatch, factor):
    """One malicious site among three. What the honest sites add rests on whole groups all the same."""
    real, seen = Own.sums, []

    def lying(self, means):
        part = real(self, means)
        if self.size.sum() == 80:
            return part.map(lambda x: factor * x)
        seen.append(part)
        return part

    monkeypatch.setattr(Own, "sums", lying)
    run = run_protocol(common_clusters, clusters(case()), timeout=5.0)
    found = values(run)
    assert all(e.code in ("too-few-cells", "modularity") for e in run.errors.values() if isinstance(e, ProtocolAbort))
    assert all(np.all(np.isfinite(v.points)) for v in found.values())
    assert all(part.cells >= 10 for part in seen)


def test_a_changed_sum_is_noticed(monkeypatch):
    c = case(**TINY)
    fault = Fault("truncate", "hub", "a", "Total")
    run = run_protocol(shared_prototypes, c, faults=[fault], timeout=2.0)
    assert A in run.errors
    assert checked_sum.NAME in {e.protocol for e in run.errors.values() if isinstance(e, ProtocolAbort)}


def test_a_site_that_stops_ends_the_run():
    run = run_protocol(shared_prototypes, case(), faults=[Fault("kill", "b", HUB, "Masked")], timeout=1.0)
    assert set(run.errors) >= {HUB, A, C}


# ---- bad input -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m: dataclasses.replace(m, x=m.x * np.nan), "missing or infinite"),
        (lambda m: dataclasses.replace(m, x=m.x[:, :0]), "1 to 1024 columns"),
        (lambda m: dataclasses.replace(m, x=np.zeros((50, 1025))), "1 to 1024 columns"),
    ],
)
def test_bad_cells(change, message):
    c = case()
    with pytest.raises(DataError, match=message):
        shared_prototypes.check_site(change(c.inputs[A][0]))


@pytest.mark.parametrize(
    "make",
    [
        lambda: Params(SITES[:1], HUB, "x"),
        lambda: Params(SITES, A, "x"),
        lambda: Params(SITES, HUB, "x", n_prototypes=1),
        lambda: common_clusters.Params(Params(SITES, HUB, "x"), resolution=0.0),
        lambda: common_clusters.Params(Params(SITES, HUB, "x"), n_neighbors=1),
    ],
)
def test_bad_parameters(make):
    with pytest.raises(ParameterError):
        make()


def test_contributions_come_from_groups_alone():
    part = Own.of(case().params, case().inputs[A][0]).sums(np.zeros((1, 3)))
    assert isinstance(part, Contribution)
    assert part.cells >= 10
