"""A common map: what one place would compute, few cells, one malicious party. UMAP itself is in `test_shared_map.py`.

Here principal components stand in the place of UMAP, which takes seconds; the protocol does not look into the map.
"""

from types import SimpleNamespace

import numpy as np
import pytest

from cloister.errors import ParameterError, ProtocolAbort
from cloister.models import umap_map
from cloister.mpc.net.channel import Channel
from cloister.study import Party
from cloister.testing import Case, check_cost, check_ideal, check_lies, plain_inputs, run_protocol, transcript, values
from cloister.workflows.cluster_cells import shared_prototypes
from cloister.workflows.cluster_cells.shared_prototypes import Cells
from cloister.workflows.shared_map import common_map

HUB = Party("hub")
SITES = A, B, C = tuple(map(Party, "abc"))


@pytest.fixture(autouse=True)
def flat(monkeypatch):
    monkeypatch.setattr(umap_map, "check_umap", lambda: None)
    monkeypatch.setattr(umap_map, "fitted", lambda points, *_: umap_map.principal(points))


def case(seed=0, sizes=(60, 80, 100), n=3, **options):
    rng = np.random.default_rng(seed)
    base = shared_prototypes.Params(SITES[:n], HUB, "X_a", 8)
    cells = {}
    for u, size in zip(SITES[:n], sizes, strict=False):
        x = 6 * np.eye(3, 4)[np.arange(size) % 3] + rng.normal(0, 1, (size, 4))
        cells[u] = (Cells(x, None, "ab12"),)
    return Case(common_map.Params(base, **{"n_neighbors": 10} | options), cells)


def agree(found, ideal):
    np.testing.assert_allclose(found.points, ideal.points, atol=1e-6)
    np.testing.assert_allclose(found.positions, ideal.positions, atol=1e-5)
    np.testing.assert_allclose(found.cells, ideal.cells, atol=1e-4)


@pytest.mark.parametrize("options", [{}, {"n": 2}, {"sizes": (60, 80, 4)}], ids=["plain", "two-sites", "4 cells"])
def test_roles_give_what_one_place_gives(options):
    check_ideal(common_map, [case(seed=2, **options)], agree=agree)


def test_points_are_as_many_as_cells_and_at_most_so_many(monkeypatch):
    c = case()
    found = next(iter(shared_prototypes.ideal(c.params.base, plain_inputs(c)).values()))
    assert len(common_map.drawn(c.params, found)) == 240
    monkeypatch.setattr(common_map, "MOST", 100)
    points = common_map.drawn(c.params, found)
    assert len(points) == 100
    np.testing.assert_array_equal(points, points.astype(np.float32))


def test_without_enough_cells_there_is_no_map():
    run = run_protocol(common_map, case(sizes=(5, 5, 4)), timeout=5.0)
    assert {e.code for e in run.errors.values() if isinstance(e, ProtocolAbort)} == {"too-few-cells"}


@pytest.mark.parametrize("n", [2, 3])
def test_cost(n):
    c = case(n=n)
    found = next(iter(shared_prototypes.ideal(c.params.base, plain_inputs(c)).values()))
    points = len(common_map.drawn(c.params, found))
    priced = SimpleNamespace(
        __name__="common_map",
        roles=common_map.roles,
        cost=lambda params: common_map.cost(params, 4, list(found.trail), points, len("ab12")),
    )
    check_cost(priced, c)


def test_no_value_leaves_but_masked():
    run = run_protocol(common_map, case())
    sent = {row[0] for p, rows in transcript(run).items() if p != HUB for row in rows}
    assert sent == {
        "channel.Hello",
        "common_space.Space",
        "same_view.Signature",
        *(f"common_seed.{m}" for m in ("Key", "Parts", "Confirm")),
        "checked_sum.Masked",
    }


# ---- one malicious party ---------------------------------------------------------------------------------------------


def right(lie, found):
    """One map for all that keeps neighbours."""
    assert len({v.positions.tobytes() for v in found.values()}) <= 1
    for v in found.values():
        flat = umap_map.recall(v.points, umap_map.principal(v.points), 10)
        assert umap_map.recall(v.points, v.positions, 10) >= 0.9 * common_map.PART * flat, lie


def test_lies():
    tiny = {"sizes": (30, 30, 30)}
    cases = [case(**tiny), case(seed=4, **tiny)]
    lies = check_lies(common_map, cases, right=right, only=lambda lie: lie.name.startswith("common_map"))
    assert lies.tried >= 3
    assert lies.aborted >= 2


@pytest.mark.parametrize(
    ("change", "code"),
    [
        (lambda y: np.random.default_rng(0).permutation(y), "neighbours"),
        (lambda y: np.zeros_like(y), "neighbours"),
        (lambda y: y * np.inf, "positions"),
        (lambda y: y * np.nan, "positions"),
        (lambda y: y * 1e9, "positions"),
        (lambda y: y[1:], "positions"),
        (lambda y: np.concatenate([y, y], axis=1), "positions"),
    ],
)
def test_a_coordinator_that_sends_another_map_ends_the_run(monkeypatch, change, code):
    real = Channel.broadcast

    async def lying(ch, to, msg):
        if isinstance(msg, common_map.Positions):
            msg = common_map.Positions(change(msg.y))
        await real(ch, to, msg)

    monkeypatch.setattr(Channel, "broadcast", lying)
    with np.errstate(invalid="ignore"):
        run = run_protocol(common_map, case(sizes=(90, 90, 90)), timeout=5.0)
    assert {e.code for p, e in run.errors.items() if p != HUB} == {code}
    assert not set(values(run)) & set(SITES)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"n_neighbors": 1}, "n_neighbors"),
        ({"n_neighbors": 201}, "n_neighbors"),
        ({"min_dist": 1.5}, "min_dist"),
        ({"own_neighbors": -1}, "own_neighbors"),
    ],
)
def test_parameters(options, says):
    with pytest.raises(ParameterError, match=says):
        case(**options)
