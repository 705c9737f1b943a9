"""Attacks by two runs on the same donors: each gives single donors by subtraction, and the second run is rejected."""

import contextlib
import dataclasses
import json
import stat

import numpy as np
import pandas as pd
import pytest
from anndata import AnnData

from cloister.cells.demo import demo_sites
from cloister.cells.donors import donor_ids
from cloister.cells.files import write_cells
from cloister.deploy.approval.answered_donors import FILE, AnsweredDonors
from cloister.deploy.kit import Kit
from cloister.disclosure import DonorTable, Thresholds
from cloister.errors import ParameterError, RefusedError
from cloister.study import Party, Study
from cloister.workflows.find_programs import common_programs as programs
from cloister.workflows.find_programs import workflow as find_programs
from cloister.workflows.model_outcome import pooled_outcomes as protocol
from cloister.workflows.model_outcome import workflow as model_outcome
from cloister.workflows.model_outcome.features import samples_of

LEAST = Thresholds(10, 3)
N = 30


@pytest.fixture
def answered(tmp_path):
    return AnsweredDonors(tmp_path)


def donors(seed=0, n=N):
    rng = np.random.default_rng(seed)
    return pd.DataFrame(
        {
            "age": rng.normal(60, 8, n),
            "male": (np.arange(n) % 2).astype(float),
            "z": rng.normal(size=n),
            "y": rng.normal(10, 3, n),
            "count": rng.poisson(4, n).astype(float),
            "died": (rng.random(n) < 0.6).astype(int),
            "days": rng.permutation(1500)[:n] + 1,
        },
        index=[f"d{i}" for i in range(n)],
    )


def cells_of(table):
    obs = table.loc[table.index.repeat(12)].copy()
    obs["donor"] = obs.index
    obs.index = [f"{d}-{i}" for i, d in enumerate(obs["donor"])]
    return AnnData(np.zeros((len(obs), 1)), obs=obs)


def run(table, model="linear", outcome_key="y", **options):
    """What a run answers about these donors, and what the site adds to each sum."""
    chosen = model_outcome.Options(model=model, outcome_key=outcome_key, donor_key="donor", **options)
    mine, _ = model_outcome.donors_of(cells_of(table), chosen)
    params = model_outcome.params_of((Party("a"), Party("b")), Party("hub"), chosen)
    side, state = protocol.Side(params, mine), protocol.State(params)
    lines = [line for line, *_ in protocol.lengths_of(params)]
    return model_outcome.answered_of(mine, chosen, params), side.part(0, lines[0], state).values


def named(table, ids):
    """Rows of the donors that the record knows by a hash of their cells' names."""
    adata = cells_of(table)
    samples = samples_of(adata, "donor")
    of = dict(zip(donor_ids(adata, samples.of_cell, samples.names), samples.names, strict=True))
    return [of[i] for i in ids]


def admit(answered, table, study="one", least=LEAST):
    answered.admit(table, study, least)


def test_the_same_run_and_runs_with_parts_of_its_formula_are_answered(answered):
    table = donors()
    for features in (("age", "male"), ("age", "male"), ("male",)):
        admit(answered, run(table, features=features)[0])
    assert len(answered._load()) == 2
    assert stat.S_IMODE((answered.folder / FILE).stat().st_mode) == 0o600
    stored = (answered.folder / FILE).read_text()
    assert "d7" not in [*json.loads(stored)[0]["donors"]]
    assert str(table.age.iloc[7])[:6] not in stored


def test_a_block_with_one_donor_of_a_level(answered):
    """A covariate that one donor lacks leaves out a block of three, of whom one is male: Σ male y loses its outcome."""
    exact = refused = 0
    for seed in range(12):
        table = donors(seed)
        table.loc[f"d{seed}", "z"] = np.nan
        one, first = run(table, features=("male",))
        two, second = run(table, features=("male", "z"))
        gone = named(table, {*one.donors} - {*two.donors})
        assert len(gone) >= 3
        if len(alone := [d for d in gone if table.male[d] == 1]) != 1:
            continue
        men = [table.male[named(table, t.donors)].sum() for t in (one, two)]
        with_y = [v[3 + u] + m * v[2] / v[0] for v, m, u in ((first, men[0], 1), (second, men[1], 3))]
        exact += abs(with_y[0] - with_y[1] - table.y[alone[0]]) < 1e-9
        part = AnsweredDonors(answered.folder / str(seed))
        part.folder.mkdir()
        admit(part, one)
        with pytest.raises(RefusedError, match="those with one value of 'male' differ by|another value"):
            admit(part, two)
        refused += 1
    assert exact >= 1
    assert refused >= exact


def test_a_value_that_only_one_of_two_runs_moved(answered):
    """Another covariate, and the leverage of one donor is above the bound: the difference of XᵀX has rank one."""
    single = 0
    for seed in range(40):
        table = donors(seed, n=24)
        one, first = run(table, features=("age", "male"))
        two, second = run(table, features=("age", "male", "z"))
        moved = np.flatnonzero(
            (one.columns["age"] != two.columns["age"]) | (one.columns["male"] != two.columns["male"])
        )
        part = AnsweredDonors(answered.folder / str(seed))
        part.folder.mkdir()
        admit(part, one)
        expected = (
            pytest.raises(RefusedError, match="another value") if 0 < len(moved) < 3 else contextlib.nullcontext()
        )
        with expected:
            admit(part, two)
        if len(moved) != 1:
            continue
        full = protocol.full(second[3:9], 3)[:2, :2] - protocol.full(first[3:6], 2)
        values, vectors = np.linalg.eigh(full)
        x = one.columns["age"], one.columns["male"]
        apart = np.array([c[moved[0]] - np.delete(c, moved[0]).mean() for c in x])
        near = abs(vectors[:, np.argmax(np.abs(values))] @ apart) / np.linalg.norm(apart)
        single += near > 0.999  # the donor's features, up to their scale
    assert single > 3


@pytest.mark.parametrize("model", ["km", "cox"])
def test_a_horizon_a_day_later(answered, model):
    """Curves to each day: the sum of events goes up on the days on which single donors have theirs."""
    table, some = donors(), {} if model == "km" else {"features": ("age",)}
    days = np.sort(table.days[table.died == 1].to_numpy())[10:14]

    def with_horizon(day):
        return run(table, model, "died", time_key="days", horizon=float(day), intervals=24, **some)

    def events(values):
        return values[24:48].sum() if model == "km" else values[1]

    for day in days:
        assert round(events(with_horizon(day + 1)[1]) - events(with_horizon(day)[1])) == 1
    admit(answered, with_horizon(days[0])[0])
    admit(answered, with_horizon(days[0])[0])
    with pytest.raises(RefusedError, match="times 'days' of 'died' differ"):
        admit(answered, with_horizon(days[0] + 1)[0])


def test_another_column_in_which_the_outcome_of_one_donor_differs(answered):
    table = donors()
    table["again"] = table.y
    table.loc["d3", "again"] += 1.0
    admit(answered, run(table, features=("age",))[0])
    with pytest.raises(RefusedError, match="'outcome again' has another value than 'outcome y' in 1 donor"):
        admit(answered, run(table, outcome_key="again", features=("age",))[0])


def test_the_number_of_columns_over_all_runs_is_limited(answered):
    """Attack: who knows the features has one equation for the outcomes from each column of any run."""
    table, rng = donors(), np.random.default_rng(1)
    for i in range(40):
        table[f"g{i}"] = rng.uniform(-1, 1, N)
    known, equations = [], []
    for i in range(0, 30, 3):
        features = tuple(f"g{k}" for k in range(i, i + 3))
        _, values = run(table, features=features)
        mine = run(table, features=features)[0].columns
        for k, f in enumerate(features):
            known.append(mine[f] - mine[f].mean())
            equations.append(values[9 + k])
    found = np.linalg.lstsq(np.array(known), np.array(equations), rcond=None)[0]
    np.testing.assert_allclose(
        found, (table.y - table.y.mean())[named(table, run(table, features=("g0",))[0].donors)], atol=1e-6
    )
    for i in range(0, 15, 3):
        one = run(table, features=tuple(f"g{k}" for k in range(i, i + 3)))[0]
        one = dataclasses.replace(one, columns={})
        if i < 12:
            admit(answered, one)
            continue
        with pytest.raises(RefusedError, match="together would relate 15 columns to outcomes, more than the 14"):
            admit(answered, one)
    admit(answered, run(table, features=("g30",))[0], least=None)  # a person allowed it


def test_each_negative_binomial_run_counts_anew(answered):
    """Attack: the extra variance is chosen by others, so each run weighs the same donors in another way."""
    one, _ = run(donors(), "negbin", "count", features=("age", "z"))
    for _ in range(7):
        admit(answered, one)
    with pytest.raises(RefusedError, match="together would relate 16 columns"):
        admit(answered, one)


def test_a_program_after_another_min_cells(answered):
    """A donor that lacks a type in the second run: Σ n x̄ differs by its expression less the mean of the others."""
    rng = np.random.default_rng(0)
    x = np.abs(rng.normal(2, 1, (N, 2, 20)))
    names = tuple(f"d{i}" for i in range(N))
    both = programs.Profiles(tuple(map(str, range(20))), x, np.ones((N, 2), bool), np.full(N, 80), LEAST, names)
    less = dataclasses.replace(both, present=both.present.copy())
    less.present[4, 1] = False
    chosen = find_programs.Options(label_key="t", donor_key="d", labels=("A", "B"), center="all")
    params = find_programs.params_of((), Party("hub"), chosen)
    first, second = (programs.Side(params, p, p.names).means().values[22:42] for p in (both, less))
    found = first - second + second / N
    assert np.corrcoef(found, x[4, 1])[0, 1] > 0.99
    admit(answered, find_programs.answered_of(both, chosen))
    admit(answered, find_programs.answered_of(both, chosen))
    with pytest.raises(RefusedError, match="differ since study 'one'"):
        admit(answered, find_programs.answered_of(less, chosen))


def test_another_column_that_names_the_donors_changes_nothing(answered):
    """Attack: by other names, blocks were divided anew, and the donors of earlier runs were not known again."""
    table = donors()
    table.loc["d4", "z"] = np.nan
    adata = cells_of(table)
    adata.obs["patient"] = "p" + adata.obs["donor"].str[1:].astype(int).mul(7).mod(31).astype(str)
    tables = []
    for key in ("donor", "patient"):
        chosen = model_outcome.Options(model="linear", outcome_key="y", donor_key=key, features=("age", "z"))
        mine, _ = model_outcome.donors_of(adata, chosen)
        params = model_outcome.params_of((Party("a"), Party("b")), Party("hub"), chosen)
        tables.append(model_outcome.answered_of(mine, chosen, params))
    assert sorted(tables[0].donors) == sorted(tables[1].donors)
    admit(answered, tables[0])
    admit(answered, tables[1])


def test_a_kit_compares_donors_unless_the_approval_allows_small_changes(tmp_path):
    pytest.importorskip("nvflare")
    from cloister.deploy.provision import provision

    parties = {"hub": "coordinator", "basel": "site", "lugano": "site", "vienna": "site"}
    study = Study("small", "bin-values", parties, network={"host": "localhost", "port": 18779})
    kit = Kit.open(provision(study, tmp_path)["basel"])
    write_cells(demo_sites()["basel"], kit.path / "cells.h5ad")
    names = tuple("abcdefgh")
    table = DonorTable(names, {"y": np.arange(8.0)}, {})
    other = DonorTable(names, {"y": np.array([9.0, 1, 2, 3, 4, 5, 6, 7])}, {})
    kit.approve("Ann")
    kit.admit_donors(kit.policy(), table)
    with pytest.raises(RefusedError, match="in 1 donor.*--allow-small-change"):
        kit.admit_donors(kit.policy(), other)
    kit.approve("Ann", small_change=True)
    kit.admit_donors(kit.policy(), other)


def test_other_donors_are_not_compared(answered):
    table = donors()
    admit(answered, run(table, features=("age",))[0])
    table.index = [f"other{i}" for i in range(N)]
    table["age"] += 1.0
    admit(answered, run(table, features=("age",))[0])


def test_damaged_records_stop_a_run(answered):
    one = DonorTable(("a",), {}, {})
    admit(answered, one)
    (answered.folder / FILE).write_text("[{}]")
    with pytest.raises(ParameterError, match="is damaged"):
        admit(answered, one)


@pytest.mark.parametrize("workflow", [model_outcome, find_programs])
def test_sites_compare_before_the_first_message(workflow):
    """`site` hands its donors to the session, which may raise, and only then runs the protocol."""
    calls = []

    class Fake:
        sites, coordinator = (Party("a"), Party("b")), Party("hub")

        def thresholds(self, **agreed):
            return Thresholds(**agreed)

        def admit_donors(self, table):
            calls.append(table)
            raise RefusedError("no")

        def run(self, *args):
            raise AssertionError("the protocol began")

    adata = cells_of(donors())
    adata.obs["t"] = np.arange(adata.n_obs) % 2
    adata.X = np.ones((adata.n_obs, 1))
    if workflow is model_outcome:
        options = workflow.Options(model="linear", outcome_key="y", donor_key="donor", features=("age",))
    else:
        options = workflow.Options(label_key="t", donor_key="donor", labels=("0", "1"), min_cells=2)
    with pytest.raises(RefusedError, match="no"):
        workflow.site(Fake(), adata, options)
    assert len(calls[0].donors) == N
