import dataclasses
from pathlib import Path

import numpy as np
import pytest

from cloister.disclosure import Thresholds
from cloister.errors import DataError, ParameterError, ProtocolAbort
from cloister.study import Party
from cloister.testing import (
    Case,
    check_ideal,
    check_lies,
    check_no_errors,
    check_vectors,
    run_protocol,
    transcript,
    values,
)
from cloister.workflows.find_programs import common_programs as protocol
from cloister.workflows.find_programs.common_programs import Params, Profiles

HUB = Party("hub")
VECTORS = Path(__file__).parents[2] / "vectors" / "common_programs.json"
NONE = Thresholds(1, 1)


def case(seed=0, sites=3, n=18, genes=30, thresholds=None, **options):
    """Two planted programs over two cell types; a few donors lack a type."""
    rng = np.random.default_rng(seed)
    names = [Party(f"site-{i}") for i in range(sites)]
    planted = np.random.default_rng(99).normal(0, 1, (2, 2, genes)) * (np.arange(genes) < 8)
    inputs = {}
    for u in names:
        scores = rng.normal(0, [2.0, 1.2], (n, 2))
        x = (
            2
            + np.einsum("nk,ktg->ntg", scores, planted)
            + rng.normal(0, 0.3, (n, 2, genes))
            + rng.normal(0, 0.5, genes)
        )
        present = np.ones((n, 2), bool)
        present[:2, 1] = False
        labels = tuple(f"G{g:02d}" for g in range(genes))
        inputs[u] = (Profiles(labels, x, present, np.full(n, 80), thresholds or Thresholds()),)
    params = Params(tuple(names), HUB, ("B", "T"), **({"programs": 2, "columns": 20} | options))
    return Case(params, inputs), planted


def plain(c):
    return {u: mine for u, (mine,) in c.inputs.items()}


def agree(found, ideal):
    assert (found.donors, found.genes) == (ideal.donors, ideal.genes)
    np.testing.assert_array_equal(found.columns, ideal.columns)
    for name in ("mean", "loadings", "explained"):
        np.testing.assert_allclose(getattr(found, name), getattr(ideal, name), atol=1e-8)
    assert (found.scores is None) == (ideal.scores is None)
    if ideal.scores is not None:
        np.testing.assert_allclose(found.scores, ideal.scores, atol=1e-7)


@pytest.mark.parametrize("within", [True, False])
def test_equals_the_ideal(within):
    check_ideal(protocol, [case(within=within)[0]], agree=agree)


def test_programs_are_those_that_were_planted():
    c, planted = case(n=40, columns=60)
    found = protocol.ideal(c.params, plain(c))[HUB]
    truth = planted.reshape(2, -1)[:, found.columns].T
    cosines = np.linalg.svd(np.linalg.qr(truth)[0].T @ found.loadings)[1]
    assert cosines.min() > 0.96
    assert found.explained[0] > found.explained[1] > 0.05


def test_without_groups_it_is_the_pca_of_the_pooled_donors():
    c, _ = case(thresholds=NONE, within=False, columns=60)
    found = protocol.ideal(c.params, plain(c))[HUB]
    rows = []
    for mine in plain(c).values():
        x = mine.x.copy()
        x[:2, 1] = x[2:, 1].mean(axis=0)  # stands in for who lacks the type
        rows.append(x.reshape(len(x), -1))
    x = np.concatenate(rows)
    _, size, right = np.linalg.svd(x - x.mean(axis=0), full_matrices=False)
    np.testing.assert_allclose(np.abs((right[:2] @ found.loadings).diagonal()), 1, atol=1e-9)
    np.testing.assert_allclose(found.explained, size[:2] ** 2 / np.sum(size**2), rtol=1e-9)


def test_scores_stay_and_what_is_sent_is_masked():
    c, _ = case()
    run = run_protocol(protocol, c)
    check_no_errors(run)
    assert values(run)[HUB].scores is None
    assert values(run)[c.params.sites[0]].scores.shape == (18, 2)
    sent = {row[0] for p, rows in transcript(run).items() if p != HUB for row in rows}
    assert sent == {
        "channel.Hello",
        "common_genes.Measured",
        "same_view.Signature",
        *(f"common_seed.{m}" for m in ("Key", "Parts", "Confirm")),
        "checked_sum.Masked",
    }


def test_cost():
    c, _ = case()
    run = run_protocol(protocol, c)
    names = len("\n".join(next(iter(plain(c).values())).names))
    for party, (messages, payload) in protocol.cost(c.params, 30, names, names).items():
        rows = [r for r in transcript(run)[party] if not r[0].startswith("channel.")]
        assert len(rows) == messages
        assert payload <= sum(n for _, _, n in rows) <= payload + 400 * messages


def test_vectors(monkeypatch):
    """What is added is rounded to 16 bits first: another processor's last digits must not change what is masked."""
    for name in ("means", "moments"):
        exact = getattr(protocol.Side, name)
        monkeypatch.setattr(
            protocol.Side, name, lambda *a, exact=exact: exact(*a).map(lambda x: np.round(x * 2**16) / 2**16)
        )
    check_vectors(protocol, case(genes=8, columns=6)[0], VECTORS)


def test_every_contribution_rests_on_groups():
    """Whatever columns the others make the protocol choose: a function of group means over three donors or more."""
    c, _ = case()
    mine = next(iter(plain(c).values()))
    side = protocol.Side(c.params, mine, mine.names)
    sizes = np.bincount(side.groups.codes[side.groups.codes >= 0])
    assert sizes.min() >= 3
    chosen = protocol.Chosen(mine.names, 54, np.array([0, 7, 40]), np.full(3, 1e3))
    for part in (side.means(), side.moments(chosen)):
        assert part.donors >= 3
        assert part.cells >= 3 * 80
    again = dataclasses.replace(mine, x=mine.x.copy())
    one, *_, other = np.flatnonzero(side.groups.codes == 0)
    shift = np.zeros(mine.x.shape[1:])
    shift[0, 0] = 1e-6  # so small that the groups stay
    again.x[one], again.x[other] = mine.x[one] + shift, mine.x[other] - shift
    moved = protocol.Side(c.params, again, mine.names)
    assert np.array_equal(moved.groups.codes, side.groups.codes)
    np.testing.assert_allclose(moved.moments(chosen).values, side.moments(chosen).values, atol=1e-9)


def test_a_cell_type_of_few_donors_adds_nothing():
    c, _ = case()
    u = c.params.sites[0]
    mine = dataclasses.replace(plain(c)[u], present=plain(c)[u].present.copy())
    mine.present[2:, 1] = False  # nobody has it
    side = protocol.Side(c.params, mine, mine.names)
    part = side.means().values
    assert part[:2].tolist() == [18.0, 0.0]
    assert not part[2 + 30 : 2 + 60].any()
    found = protocol.ideal(c.params, plain(c) | {u: mine})
    assert found[u].scores.shape == (18, 2)


# ---- attacks ---------------------------------------------------------------------------------------------------------


def added(c, mine):
    """All that a site adds, for columns of others' choice."""
    side = protocol.Side(c.params, mine, mine.names)
    columns = np.arange(side.x.shape[1])
    chosen = protocol.Chosen(mine.names, 54, columns, np.zeros(len(columns)))
    return np.concatenate([side.means().values, side.moments(chosen).values])


def test_the_only_donor_of_a_group_with_a_cell_type_does_not_show():
    """Attack: absent donors have the site's mean m, so a group of three with one present gave x = 3 x̄ - 2 m."""
    found = 0
    for seed in range(6):
        c, _ = case(seed=seed)
        mine = next(iter(plain(c).values()))
        few = dataclasses.replace(mine, present=mine.present.copy())
        few.present[:, 1] = np.random.default_rng(seed).random(18) < 0.6
        side = protocol.Side(dataclasses.replace(c.params, within=False), few, few.names)
        table = side.table.reshape(len(side.groups), 2, -1)[:, 1]
        has = np.array([few.present[side.groups.codes == g, 1].sum() for g in range(len(side.groups))])
        alone = has < 3
        found += int(((has > 0) & alone).any())
        others = np.average(table[~alone], axis=0, weights=side.size[~alone]) if (~alone).any() else np.zeros(30)
        np.testing.assert_allclose(table[alone], np.broadcast_to(others, table[alone].shape), atol=1e-9)
    assert found > 2


def test_a_gene_that_one_donor_expresses_does_not_show():
    """Attack without a deviation: Σ n x̄ of a gene that is zero in all others is that donor's expression."""
    c, _ = case()
    mine = next(iter(plain(c).values()))
    none = dataclasses.replace(mine, x=mine.x.copy())
    none.x[:, 0, 5] = 0.0
    one = dataclasses.replace(none, x=none.x.copy())
    one.x[7, 0, 5] = 6.0
    np.testing.assert_allclose(added(c, one), added(c, none), atol=1e-9)


def test_a_rare_gene_of_one_donor_in_a_group_does_not_show():
    """The group's mean hardly moves with that donor's value, where it would move by one over the group's size."""
    found = 0
    for seed in range(6):
        c, _ = case(seed=seed)
        params, mine = dataclasses.replace(c.params, within=False), next(iter(plain(c).values()))
        rng = np.random.default_rng(seed)
        rare = dataclasses.replace(mine, x=mine.x.copy())
        rare.x[:, 0, 8:] *= rng.random((18, 22)) < 0.2
        rare.x[:, 0, 8:] = np.abs(rare.x[:, 0, 8:])
        side = protocol.Side(params, rare, rare.names)
        for g in range(len(side.groups)):
            at = np.flatnonzero(side.groups.codes == g)
            for gene in range(8, 30):
                shown = at[rare.x[at, 0, gene] > 0]
                if len(shown) != 1 or 2 * (rare.x[:, 0, gene] > 0).sum() >= 18:
                    continue
                again = dataclasses.replace(rare, x=rare.x.copy())
                again.x[shown[0], 0, gene] += 1e-5
                moved = protocol.Side(params, again, rare.names)
                if np.array_equal(moved.groups.codes, side.groups.codes):
                    found += 1
                    assert abs(moved.table[g, gene] - side.table[g, gene]) < 0.05 * 1e-5
    assert found > 20


def test_expression_far_from_all_others_does_not_show():
    c, _ = case()
    mine = next(iter(plain(c).values()))
    parts = []
    for value in (1e3, 1e6):
        far = dataclasses.replace(mine, x=mine.x.copy())
        far.x[7, 0, 0] = value
        parts.append(added(c, far))
    np.testing.assert_allclose(*parts, rtol=1e-6, atol=1e-6)


def test_groups_do_not_depend_on_genes_in_common():
    """Attack: another list of genes in a second run would divide the donors anew, so that two runs isolate one."""
    c, _ = case()
    mine = next(iter(plain(c).values()))
    whole, some = (protocol.Side(c.params, mine, names).groups.codes for names in (mine.names, mine.names[10:]))
    np.testing.assert_array_equal(whole, some)


def test_what_is_refused():
    c, _ = case()
    mine = next(iter(plain(c).values()))
    two = dataclasses.replace(mine, x=mine.x[:2], present=mine.present[:2], cells=mine.cells[:2])
    with pytest.raises(DataError, match="2 donors here, fewer than min_donors = 3"):
        protocol.check_site(c.params, two)
    with pytest.raises(DataError, match="no cell type has enough cells"):
        protocol.check_site(c.params, dataclasses.replace(mine, present=np.zeros_like(mine.present)))
    with pytest.raises(ParameterError, match="1 to 20 programs"):
        dataclasses.replace(c.params, programs=21)
    flat = {u: dataclasses.replace(p, x=np.ones_like(p.x)) for u, p in plain(c).items()}
    with pytest.raises(ProtocolAbort, match="columns vary"):
        protocol.ideal(c.params, flat)


def test_lies():
    c, _ = case(seed=1, genes=8, columns=6)
    twin, _ = case(seed=2, genes=8, columns=6)

    def right(lie, ended):
        for u, found in ended.items():
            if lie.liar == HUB or lie.letter == "j":
                agree(found, protocol.ideal(lie.case.params, plain(lie.case))[u])
            else:
                assert np.all(np.isfinite(found.loadings))

    lies = check_lies(protocol, [c, twin], right=right)
    assert lies.tried > 8
    assert lies.aborted > 5


def test_membership_shows_less_than_in_sums_over_donors():
    """Attack of arXiv 2606.24938: who knows a profile asks how much of it lies in the span of what was opened."""
    rng, found = np.random.default_rng(0), {"donors": [], "groups": []}
    for seed in range(6):
        c, _ = case(seed=seed, n=30, columns=60)
        u = c.params.sites[0]
        mine = plain(c)[u]
        half = rng.permutation(30)
        held = {
            k: dataclasses.replace(mine, x=mine.x[at], present=np.ones((15, 2), bool), cells=mine.cells[at])
            for k, at in (("in", half[:15]), ("out", half[15:]))
        }
        for name, thresholds in (("donors", NONE), ("groups", Thresholds())):
            side = protocol.Side(c.params, dataclasses.replace(held["in"], thresholds=thresholds), mine.names)
            _, size, right = np.linalg.svd(side.table, full_matrices=False)
            basis = right[size > 1e-9 * size[0]].T
            other = held["out"].x.reshape(15, -1) - held["in"].x.reshape(15, -1).mean(axis=0)
            one, two = (np.square(x @ basis).sum(axis=1) / np.square(x).sum(axis=1) for x in (side.x, other))
            found[name].append(np.mean(one[:, None] > two[None]))
    assert np.mean(found["donors"]) > 0.99
    assert np.mean(found["groups"]) < 0.9
