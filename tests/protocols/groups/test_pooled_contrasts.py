import dataclasses
import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))
from group_cases import CASES, HUB, case, plain, same_as_limma, stored

from cloister.errors import DataError, ParameterError, ProtocolAbort
from cloister.models import voom
from cloister.protocols.groups import contrast_steps, contrast_terms, pooled_contrasts
from cloister.protocols.groups.contrast_terms import Bulk, Params, part_of
from cloister.run.rehearsal import Fault
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

VECTORS = Path(__file__).parents[2] / "vectors" / "pooled_contrasts.json"


def agree(found, ideal):
    assert found.left_out.keys() == ideal.left_out.keys()
    assert [r.label for r in found.results] == [r.label for r in ideal.results]
    for mine, theirs in zip(found.results, ideal.results, strict=True):
        assert (mine.names, mine.donors, mine.df) == (theirs.names, theirs.donors, theirs.df)
        np.testing.assert_allclose(mine.average, theirs.average, rtol=1e-9)
        for a, b in zip(mine.tested, theirs.tested, strict=True):
            np.testing.assert_allclose(a.effect, b.effect, rtol=1e-8, atol=1e-9)
            np.testing.assert_allclose(np.log(a.p), np.log(b.p), rtol=1e-7, atol=1e-9)
            np.testing.assert_allclose(a.fdr, b.fdr, rtol=1e-6)
        if theirs.shares is not None:
            np.testing.assert_allclose(mine.shares, theirs.shares, rtol=1e-9)


@pytest.mark.parametrize("name", CASES)
def test_equals_limma(name):
    """limma's own answers, stored: coefficients, log p, false discovery rates and priors to 1e-6."""
    c, answer = stored(name)
    (ideal,) = pooled_contrasts.ideal(c.params, plain(c))[HUB].results
    same_as_limma(ideal, answer, c.params)
    run = run_protocol(pooled_contrasts, c)
    check_no_errors(run)
    for found in values(run).values():
        (result,) = found.results
        same_as_limma(result, answer, c.params)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"sites": 2, "block": "donor", "per_group": (3, 3)},
        {"covariates": True, "per_group": (4, 4), "labels": ("B",)},
        {"per_group": (3, 2, 3), "contrasts": ((2, 1), (1, 0)), "normalise": "library", "transform": "asin"},
    ],
    ids=["types and shares", "pairs", "covariates", "three groups"],
)
def test_equals_the_pooled_fit(options):
    check_ideal(pooled_contrasts, [case(seed=3, **options)], agree=agree)


def test_vectors(monkeypatch):
    """What is added is rounded to 16 bits first: another processor's last digits must not change what is masked."""
    exact = pooled_contrasts.pack
    monkeypatch.setattr(pooled_contrasts, "pack", lambda *args: np.round(exact(*args) * 2**16) / 2**16)
    c = case(seed=1, g=12, labels=("B", "T"), per_group=(2, 2), min_donors=2)
    check_vectors(pooled_contrasts, c, VECTORS)


def test_planted_genes_come_out_and_others_do_not():
    c = case(seed=5, per_group=(12, 12), g=200, labels=())
    (result,) = pooled_contrasts.ideal(c.params, plain(c))[HUB].results
    found = {result.names[i] for i in np.flatnonzero(result.tested[0].fdr < 0.05)}
    planted = {f"G{i:03d}" for i in range(20)} & set(result.names)
    assert len(found & planted) >= 0.8 * len(planted)
    assert len(found - planted) <= 0.1 * len(found)


def test_every_party_has_the_same_and_counts_the_openings():
    run = run_protocol(pooled_contrasts, case())
    check_no_errors(run)
    all_found = list(values(run).values())
    first = all_found[0].results[0].tested[0].p
    assert all(np.array_equal(found.results[0].tested[0].p, first) for found in all_found)
    for party, receipt in run.receipts.items():
        opened = [e for e, _ in receipt.entries if e.kind == "opened" and e.protocol == "pooled_contrasts"]
        assert len(opened) == all_found[0].openings == 8
        assert {e.to for e in opened} == {party}


def test_no_value_leaves_but_masked_or_pooled():
    run = run_protocol(pooled_contrasts, case())
    sent = {row[0] for p, rows in transcript(run).items() if p != HUB for row in rows}
    assert sent == {
        "channel.Hello",
        "common_genes.Measured",
        "pooled_contrasts.Brings",
        "same_view.Signature",
        *(f"common_seed.{m}" for m in ("Key", "Parts", "Confirm")),
        *(f"secure_sum.{m}" for m in ("Keys", "Shares", "MaskedInput", "Vouch", "Unmask")),
    }


def test_cost():
    c = case(seed=1)
    run = run_protocol(pooled_contrasts, c)
    check_no_errors(run)
    lengths = []
    for e, _ in run.receipts[HUB].entries:
        if e.kind == "opened" and e.protocol == "secure_sum" and e.to == HUB:
            lengths.append(int(e.name.rpartition(" ")[2]) - 2)
    names = len("\n".join(next(iter(plain(c).values())).names))
    for party, (messages, payload) in pooled_contrasts.cost(c.params, lengths, names, names).items():
        rows = [r for r in transcript(run)[party] if not r[0].startswith("channel.")]
        assert len(rows) == messages
        total = sum(size for _, _, size in rows)
        assert payload <= total <= payload + 400 * messages + 0.02 * payload


# ---- attacks ---------------------------------------------------------------------------------------------------------


def opened_sums(c, step_name):
    """What one opening of a run shows, as numbers of the first table; and the run's first table after it."""
    shown = {}
    look = pooled_contrasts.take

    def take(step, tables, total):
        if step.line == step_name:
            shown["sums"], at = [], 0
            for shape in step.shapes(tables[0]):
                size = int(np.prod(shape))
                shown["sums"].append(total[at : at + size].reshape(shape))
                at += size
            shown["table"] = tables[0]
        look(step, tables, total)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pooled_contrasts, "take", take)
        check_no_errors(run_protocol(pooled_contrasts, c))
    return shown["sums"], shown["table"]


def lonely(c, group=1):
    """The same case, with a single donor of a group at the last site."""
    u = c.params.sites[-1]
    mine = c.inputs[u][0]
    keep = np.flatnonzero((mine.group != group) | (np.cumsum(mine.group == group) == 1))
    bulks = {k: Bulk(np.arange(len(keep)), b.counts[keep]) for k, b in mine.bulks.items()}
    cells = {k: n[keep] for k, n in mine.cells.items()}
    less = dataclasses.replace(mine, donor=mine.donor[keep], group=mine.group[keep], bulks=bulks, cells=cells)
    return Case(c.params, {**c.inputs, u: (less,)}), u


def rebuilt(c, last):
    """Attack: all other sites take their own part from Σ y by group; what is left is the last site's."""
    sums, table = opened_sums(c, "L9")
    others = [part_of(c.params, d, "", table.names, composition=False) for u, d in plain(c).items() if u != last]
    own = np.sum([contrast_steps.plain(table, part)[0][0] for part in others], axis=0)
    mine = part_of(c.params, plain(c)[last], "", table.names, composition=False)
    return sums[0][0] - own, mine, table


def test_the_only_donor_of_a_group_at_a_site_would_be_read_by_the_others_and_is_left_out(monkeypatch):
    c, last = lonely(case(seed=8, labels=(), block="none"))
    with monkeypatch.context() as patch:  # the step without the rule
        patch.setattr(contrast_terms, "SITE_DONORS", 1)
        left, mine, table = rebuilt(c, last)
        truth = table.values(mine)[0][mine.group == 1][0]
        np.testing.assert_allclose(left, truth, atol=1e-6)  # that donor's own expression, every gene
    left, mine, _ = rebuilt(c, last)
    assert not np.any(mine.group == 1)
    np.testing.assert_allclose(left, 0.0, atol=1e-6)


def test_the_level_of_a_site_would_be_opened_by_a_column_for_it_and_is_not():
    """Attack: with a column per site in X, an entry of Xᵀy is the sum over that site's donors."""
    c = case(seed=9, labels=())
    sums, table = opened_sums(c, "L9")
    parts = [part_of(c.params, d, "", table.names, composition=False) for d in plain(c).values()]
    y = np.concatenate([table.values(p)[0] for p in parts])
    X = np.concatenate([table.design(p) for p in parts])
    site = np.repeat(np.arange(len(parts)), [len(p.group) for p in parts])
    wide = np.hstack([X, np.eye(len(parts))[site]])
    naive = voom.sums_of(wide, y, np.full(len(y), -1))
    np.testing.assert_allclose(naive.xy[1] / naive.xx[1, 1, 0], y[site == 0].mean(axis=0))  # the attack succeeds
    moved = y + np.array([3.0, -2.0, -1.0])[site][:, None]  # other levels of the sites, the same sum over all
    for values_of in (y, moved):
        within = voom.sums_of(X, values_of, site)
        np.testing.assert_allclose(within.xy, sums[0], atol=1e-8)
        np.testing.assert_allclose(within.yy, sums[1], atol=1e-8)
        np.testing.assert_allclose(values_of.sum(axis=0), sums[2], atol=1e-8)


def test_a_covariate_that_marks_one_donor_is_refused():
    """Attack: a number that is 1 for one donor and 0 for all others makes Xᵀy that donor's expression."""
    c = case(seed=4, labels=(), per_group=(4, 4), block="none")
    params = dataclasses.replace(c.params, covariates=("mark",))
    marks = {u: np.zeros(len(d.group)) for u, d in plain(c).items()}
    u = params.sites[1]
    marks[u][3] = 1.0
    inputs = {v: (dataclasses.replace(d, covariates=(marks[v],)),) for v, d in plain(c).items()}
    run = run_protocol(pooled_contrasts, Case(params, inputs), timeout=3.0)
    assert not values(run)
    assert run.errors[u].code == "one-donor"
    named = {v: (dataclasses.replace(d, covariates=(tuple(map(str, marks[v])),)),) for v, d in plain(c).items()}
    run = run_protocol(pooled_contrasts, Case(params, named), timeout=3.0)
    assert "fewer than 3 donors have '1.0' as their 'mark'" in str(run.errors[HUB])
    inputs[u] = (dataclasses.replace(inputs[u][0], covariates=()),)
    run = run_protocol(pooled_contrasts, Case(params, inputs), timeout=3.0)
    assert isinstance(run.errors[u], DataError)


def within_one_site(c, level, differs):
    """A covariate that is a level of its own at every site, but for some donors of the first site."""
    params = dataclasses.replace(c.params, covariates=("machine",))
    inputs = {}
    for i, (u, d) in enumerate(plain(c).items()):
        values_of = np.full(len(d.group), float(level * i))
        if i < 2:
            values_of[: differs[i]] += 1.0
        inputs[u] = (dataclasses.replace(d, covariates=(values_of,)),)
    return Case(params, inputs)


def test_a_column_that_varies_at_one_site_would_open_that_sites_own_sums():
    """Attack: levels of sites are taken out, so only the site at which a covariate varies is left in its Xᵀy."""
    c = within_one_site(case(seed=4, labels=(), per_group=(4, 4)), 5, (4, 0))
    table, _, sums = before(c, "take_plain", checked=False)
    mine = part_of(c.params, plain(c)[c.params.sites[0]], "", table.names, composition=False)
    y = table.values(mine)[0]
    np.testing.assert_allclose(sums[0][1], (table.design(mine)[:, 1] - table.design(mine)[:, 1].mean()) @ y)
    assert "'machine' differs at one site only: its sums would be that site's own" in why(c)


def test_a_column_that_one_donor_sets_within_its_site_is_refused():
    """The same with one donor at each of two sites, far less at the second: over all sites the number is quite even."""
    c = within_one_site(case(seed=4, labels=(), per_group=(4, 4)), 5, (1, 0))
    u = c.params.sites[1]
    other = c.inputs[u][0]
    values_of = other.covariates[0].copy()
    values_of[0] += 0.1
    c = Case(c.params, {**c.inputs, u: (dataclasses.replace(other, covariates=(values_of,)),)})
    run = run_protocol(pooled_contrasts, c, timeout=3.0)
    assert not values(run)
    assert run.errors[c.params.sites[0]].code == "one-donor"


def test_what_is_opened_is_the_sum_of_what_all_sites_have():
    c = case(seed=6, labels=())
    sums, table = opened_sums(c, "L10")
    parts = [part_of(c.params, d, "", table.names, composition=False) for d in plain(c).values()]
    for opened, own in zip(sums, zip(*(contrast_steps.weighted(table, p) for p in parts), strict=True), strict=True):
        np.testing.assert_allclose(opened, np.sum(own, axis=0), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("nth", [0, 5])
def test_a_site_that_dies_ends_the_run_by_name(nth):
    c = case(g=20, labels=())
    faults = [Fault("kill", c.params.sites[0], HUB, "MaskedInput", nth=nth)]
    run = run_protocol(pooled_contrasts, c, faults=faults, timeout=1.5)
    assert not values(run)
    assert all(e.code for e in run.errors.values())


def ask_liars(**how):
    c, twin = (case(seed=s, g=30, labels=(), per_group=(2, 2), min_donors=2) for s in (5, 6))

    def right(lie, ended):
        for found in ended.values():
            if lie.liar == HUB or lie.letter == "j":
                agree(found, pooled_contrasts.ideal(lie.case.params, plain(lie.case))[HUB])
            else:
                assert all(np.all(np.isfinite(t.p)) for r in found.results for t in r.tested)

    return check_lies(pooled_contrasts, [c, twin], right=right, **how)


def test_one_liar():
    lies = ask_liars()
    assert lies.tried > 12
    assert lies.aborted > 8


@pytest.mark.slow
def test_one_liar_in_every_message():
    lies = ask_liars(full=True, timeout=4.0, within=40.0)
    print(f"\npooled_contrasts: {lies}")
    assert lies.tried > 100
    assert lies.aborted > 60


def before(c, name, checked=True):
    """The table as all know it before a step, the step, and what all sites together add in it."""
    names = next(iter(plain(c).values())).names
    brought = {u: pooled_contrasts.Brings((), d.levels()) for u, d in plain(c).items()}
    (table,) = pooled_contrasts.tables_of(c.params, names, pooled_contrasts.agree(c.params, brought))
    parts = [part_of(c.params, d, "", names, composition=False) for d in plain(c).values()]
    for step in contrast_steps.STEPS:
        sums = [np.sum(s, axis=0) for s in zip(*(step.local(table, p) for p in parts), strict=True)]
        if step.take.__name__ == name:
            return table, step, sums
        step.take(table, sums)
        if not checked:
            table.left_out = ""
    raise AssertionError(name)


ABSURD = {
    "take_census": [(0, -1.0), (0, 1e9), (1, 0.5), (2, -3.0)],
    "take_detected": [(0, -1.0), (0, 19.0), (0, 0.25)],
    "take_zeros": [(0, -1.0), (0, 19.0)],
    "take_logs": [(0, 1e5), (0, np.nan)],
    "take_factors": [(0, -1e5), (0, np.inf)],
    "take_design": [(0, 1e15), (0, np.nan), (1, -1.0), (1, 0.5), (1, 4.0)],
    "take_plain": [(0, 1e15), (1, np.nan), (2, np.inf)],
    "take_weighted": [(0, -1.0), (1, 1e17), (2, np.nan)],
}


@pytest.mark.parametrize(("name", "at", "value"), [(n, *row) for n, rows in ABSURD.items() for row in rows])
def test_a_sum_that_no_donors_have_ends_the_run(name, at, value):
    """What a site that lies about its part can make of a sum."""
    table, step, sums = before(case(seed=1, labels=(), g=30), name)
    wrong = [s.copy() for s in sums]
    wrong[at].flat[0] = value
    with pytest.raises(ProtocolAbort) as stopped:
        step.take(table, wrong)
    assert (stopped.value.line, stopped.value.code) == (step.line, "absurd")


@pytest.mark.parametrize(
    "change",
    [
        lambda a: dataclasses.replace(a, labels=a.labels[1:]),
        lambda a: dataclasses.replace(a, labels=a.labels[::-1]),
        lambda a: dataclasses.replace(a, levels=(a.levels[0], a.levels[1][:1])),
        lambda a: dataclasses.replace(a, levels=a.levels[:1]),
    ],
    ids=["a type less", "another order", "a level less", "a covariate less"],
)
def test_a_vocabulary_that_lacks_a_name_ends_the_run(change, monkeypatch):
    look = pooled_contrasts.agree
    monkeypatch.setattr(pooled_contrasts, "agree", lambda *args: change(look(*args)))
    run = run_protocol(pooled_contrasts, case(covariates=True, g=20, per_group=(4, 4)), timeout=2.0)
    assert not values(run)
    assert {run.errors[u].code for u in run.study.sites} & {"names"}


# ---- floors, and what cannot be compared -----------------------------------------------------------------------------


def moved(c, groups_at):
    """The same donors with other groups: site → group of each donor."""
    inputs = {}
    for u, mine in plain(c).items():
        group = np.array(groups_at[u])
        inputs[u] = (dataclasses.replace(mine, donor=np.arange(len(group)), group=group),)
    return Case(c.params, inputs)


def why(c):
    run = run_protocol(pooled_contrasts, c, timeout=3.0)
    assert not values(run)
    return str(run.errors[HUB])


def test_too_few_donors():
    assert "4 donors of 'control' at sites with at least 2 of them; 5 are needed" in why(
        case(sites=2, per_group=(2, 2), labels=(), min_donors=5)
    )


def test_a_group_at_one_site_only():
    a, b, d = (Party(f"site-{i}") for i in range(3))
    c = moved(case(labels=()), {a: [0, 0, 0, 1, 1, 1], b: [0] * 6, d: [0] * 6})
    assert "all donors of 'mild' are at one site: the group cannot be told from the site" in why(c)


def test_groups_that_never_meet():
    names = [Party(f"site-{i}") for i in range(4)]
    c = moved(case(sites=4, labels=()), {u: [i % 2] * 6 for i, u in enumerate(names)})
    assert "'mild' and another group are together within no site" in why(c)


def test_a_covariate_that_is_the_same_for_all_and_one_that_is_the_group():
    c = case(labels=(), per_group=(3, 3))
    params = dataclasses.replace(c.params, covariates=("x",))
    for values_of, text in (
        (lambda d: np.full(len(d.group), 7.0), "'x' differs within no site; leave this covariate out"),
        (lambda d: d.group.astype(float), "cannot be told apart: the design has too low a rank"),
    ):
        inputs = {u: (dataclasses.replace(d, covariates=(values_of(d),)),) for u, d in plain(c).items()}
        assert text in why(Case(params, inputs))


def test_a_number_at_one_site_and_a_name_at_another():
    c = case(labels=())
    params = dataclasses.replace(c.params, covariates=("x",))
    inputs = {u: (dataclasses.replace(d, covariates=(d.group + np.arange(6.0),)),) for u, d in plain(c).items()}
    u = params.sites[1]
    inputs[u] = (dataclasses.replace(inputs[u][0], covariates=(tuple("abcabc"),)),)
    assert "is a number at one site and a name at another" in why(Case(params, inputs))


def test_a_site_with_other_covariates_is_named():
    params = case(covariates=True, g=20).params
    brought = {u: pooled_contrasts.Brings((), ((), ("f", "m"))) for u in params.sites}
    assert pooled_contrasts.agree(params, brought).levels == ((), ("f", "m"))
    brought[params.sites[1]] = pooled_contrasts.Brings((), ((),))
    with pytest.raises(ProtocolAbort, match="site-1 brings other covariates") as stopped:
        pooled_contrasts.agree(params, brought)
    assert stopped.value.code == "covariates"


@pytest.mark.parametrize(
    ("theirs", "code"), [(("B cell", "t_cell"), "spelling"), (("glia", "neuron"), "foreign-labels")]
)
def test_a_site_with_other_names_of_types_is_named(theirs, code):
    params = dataclasses.replace(case(g=20).params, labels=None)
    brought = {u: pooled_contrasts.Brings(("B cell", "T cell"), ()) for u in params.sites}
    assert pooled_contrasts.agree(params, brought).labels == ("B cell", "T cell")
    brought[params.sites[1]] = pooled_contrasts.Brings(theirs, ())
    with pytest.raises(ProtocolAbort, match="site-1") as stopped:
        pooled_contrasts.agree(params, brought)
    assert (stopped.value.code, stopped.value.origin) == (code, "site-1")


def test_a_cell_type_that_few_have_is_left_out_and_the_others_are_compared():
    c = case(seed=2)
    inputs = dict(c.inputs)
    for u in c.params.sites[1:]:
        mine = inputs[u][0]
        inputs[u] = (dataclasses.replace(mine, bulks={"B": mine.bulks["B"]}, cells={"B": mine.cells["B"]}),)
    run = run_protocol(pooled_contrasts, Case(c.params, inputs))
    check_no_errors(run)
    found = values(run)[HUB]
    assert [r.label for r in found.results] == ["B", "composition"]
    assert "all donors of 'control' are at one site" in found.left_out["T"]


def test_a_constant_gene_keeps_its_row_and_is_said():
    c = case(seed=2, labels=(), block="none", normalise="library")
    inputs = {}
    for u, mine in plain(c).items():
        counts = mine.bulks[""].counts.copy()
        counts[:, 0] = 50.0
        counts[:, -1] += 20_000 - counts.sum(axis=1)  # equal libraries: the first gene is the same everywhere
        inputs[u] = (dataclasses.replace(mine, bulks={"": Bulk(mine.bulks[""].rows, counts)}),)
    run = run_protocol(pooled_contrasts, Case(c.params, inputs))
    check_no_errors(run)
    (result,) = values(run)[HUB].results
    at = result.names.index("G000")
    assert abs(result.tested[0].effect[at]) < 1e-9
    assert result.tested[0].p[at] > 0.99
    assert any("do not vary beyond the design" in note for note in result.notes)


def test_no_gene_in_every_donor():
    c = case(seed=2, labels=(), g=40)
    inputs = {}
    for u, mine in plain(c).items():
        counts = mine.bulks[""].counts.copy()
        counts[np.arange(40) % len(counts), np.arange(40)] = 0.0
        inputs[u] = (dataclasses.replace(mine, bulks={"": Bulk(mine.bulks[""].rows, counts)}),)
    bare = Case(dataclasses.replace(c.params, min_donors=2, min_count=2.0), inputs)
    run = run_protocol(pooled_contrasts, bare)
    check_no_errors(run)
    (result,) = values(run)[HUB].results
    assert any("normalised by library size only" in note for note in result.notes)
    agree(values(run)[HUB], pooled_contrasts.ideal(bare.params, plain(bare))[HUB])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m: dataclasses.replace(m, donor=m.donor[:-1]), "one entry per sample"),
        (lambda m: dataclasses.replace(m, group=m.group + 1), "none of the groups"),
        (lambda m: dataclasses.replace(m, donor=np.zeros_like(m.donor)), "add those of the same donor and group up"),
        (lambda m: dataclasses.replace(m, donor=m.donor % 3), "several groups, which are no independent samples"),
        (lambda m: dataclasses.replace(m, bulks={"": Bulk(m.bulks[""].rows, -m.bulks[""].counts - 1)}), "at least 0"),
    ],
)
def test_bad_input_is_named_to_the_site(change, message):
    c = case(labels=(), g=20)
    u = c.params.sites[0]
    run = run_protocol(pooled_contrasts, Case(c.params, {**c.inputs, u: (change(c.inputs[u][0]),)}), timeout=2.0)
    assert isinstance(run.errors[u], DataError)
    assert message in str(run.errors[u])


@pytest.mark.parametrize(
    "options",
    [
        {"groups": ("a",)},
        {"groups": ("a", "a")},
        {"contrasts": ((1, 1),)},
        {"contrasts": ((2, 0),)},
        {"contrasts": ()},
        {"block": "batch"},
        {"min_donors": 1},
    ],
)
def test_bad_params(options):
    with pytest.raises(ParameterError):
        Params((Party("a"), Party("b")), HUB, **({"groups": ("x", "y")} | options))
