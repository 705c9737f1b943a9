import dataclasses
import math
from pathlib import Path

import numpy as np
import pytest
import scipy.sparse

from cloister.errors import DataError, ParameterError, PeerLost, ProtocolAbort
from cloister.mpc.crypto.entropy import Entropy
from cloister.mpc.crypto.prg import Prg
from cloister.study import Party
from cloister.testing import (
    Case,
    Fault,
    check_ideal,
    check_lies,
    check_no_errors,
    check_vectors,
    run_protocol,
    transcript,
    values,
)
from cloister.workflows.train_classifier import logistic_terms, noisy_logistic
from cloister.workflows.train_classifier.logistic_terms import Labelled
from cloister.workflows.train_classifier.noisy_logistic import Params, noisy_words, units_of, update_of
from cloister.workflows.train_classifier.openings import Start

HUB, SITES = Party("hub"), tuple(map(Party, ("a", "b", "c")))
VECTORS = Path(__file__).parents[2] / "vectors" / "noisy_logistic.json"
SILENT = 1e-9  # so little noise that sums are those of `ideal`


def case(seed=0, noise=SILENT, rounds=3, donors=True, g=12, sites=SITES, **options):
    rng = np.random.default_rng(seed)
    kinds = rng.gamma(1.0, 2.0, g) * np.exp(rng.normal(0, 0.8, (3, g)))
    base = logistic_terms.Params(sites, HUB, penalties=(1e-2,), held_out=False, n_top_genes=g, **options)
    inputs = {}
    for i, u in enumerate(sites):
        n = 60 + 10 * i
        codes = rng.integers(0, 3, n)
        labels = tuple(None if rng.random() < 0.1 else f"type {k}" for k in codes)
        x = scipy.sparse.csr_matrix(rng.poisson(kinds[codes]).astype(np.float64))
        genes = tuple(f"G{j:02d}" for j in range(g))
        donor = rng.integers(0, 4, n) if donors else None
        inputs[u] = (Labelled(genes, x, labels, np.zeros(n, bool), None, "", donor),)
    return Case(Params(base, rounds, noise, 1.0, 1.5, 1e-5, donors), inputs)


def agree(fitted, ideal):
    assert (fitted.labels, fitted.genes, fitted.openings) == (ideal.labels, ideal.genes, ideal.openings)
    # fixed point and 1e-9 of noise, made larger by local steps that stop before their minimum: 1.6e-3 at most, 12 runs
    np.testing.assert_allclose(fitted.coefficients, ideal.coefficients, atol=2e-2)
    np.testing.assert_allclose(fitted.intercept, ideal.intercept, atol=2e-2)
    assert fitted.cells == {}
    assert fitted.centers is None


@pytest.mark.parametrize("donors", [True, False], ids=["donors", "sites"])
def test_without_noise_it_is_the_mean_of_clipped_updates(donors):
    check_ideal(noisy_logistic, [case(donors=donors)], agree=agree)


def test_an_embedding_instead_of_genes():
    c = case(embedding="X_a")
    inputs = {
        u: (dataclasses.replace(m, names=(), x=np.log1p(m.x.toarray())[:, :6], space="ab"),)
        for u, (m,) in c.inputs.items()
    }
    check_ideal(noisy_logistic, [Case(c.params, inputs)], agree=agree)


def test_vectors():
    """Of sites without labels: noise alone, since the last bits of a local fit are each machine's own."""
    c = case(rounds=2, g=4, noise=1e-6, labels=("type 0", "type 1"))
    bare = {u: (dataclasses.replace(m, labels=(None,) * len(m.labels)),) for u, (m,) in c.inputs.items()}
    check_vectors(noisy_logistic, Case(c.params, bare), VECTORS)


@pytest.mark.parametrize("nth", [0, 2])
def test_a_site_that_dies_ends_the_run_by_name(nth):
    """At the first sum and in the midst of the rounds: receipts say what was opened, and nobody has a model."""
    run = run_protocol(noisy_logistic, case(g=4), faults=[Fault("kill", SITES[0], HUB, "Masked", nth=nth)], timeout=1.5)
    assert not run.outcomes
    assert isinstance(run.errors[HUB], PeerLost)
    for u in (HUB, *SITES[1:]):
        assert isinstance(run.errors[u], ProtocolAbort)
        opened = [e for e, _ in run.receipts[u].entries if e.kind == "opened" and e.protocol == "noisy_logistic"]
        assert len(opened) == nth


def test_it_learns_from_many_donors():
    c = case(rounds=6)
    run = run_protocol(noisy_logistic, c)
    check_no_errors(run)
    fitted = values(run)[HUB]
    right = []
    for (mine,) in c.inputs.values():
        x = logistic_terms.chosen_values(c.params.base, mine, fitted.common, np.arange(len(fitted.genes)))
        called = np.array(fitted.labels)[np.asarray(x @ fitted.coefficients + fitted.intercept).argmax(axis=1)]
        right += [a == b for a, b in zip(called, mine.labels, strict=True) if b is not None]
    assert np.mean(right) > 0.85


def test_nothing_is_opened_but_noisy_sums_and_the_receipt_says_what_they_are_worth():
    run = run_protocol(noisy_logistic, case(noise=1.0))
    check_no_errors(run)
    for receipt in run.receipts.values():
        opened = [e.name for e, _ in receipt.entries if e.kind == "opened" and e.protocol == "noisy_logistic"]
        assert len(opened) == 4
        assert all("with noise" in name and "(1.5, 1e-05)-private per donor over all sums" in name for name in opened)
    sent = {row[0].partition(".")[0] for p, rows in transcript(run).items() if p != HUB for row in rows}
    assert sent == {"channel", "common_genes", "common_seed", "common_labels", "same_view", "checked_sum"}


def test_every_party_has_the_same_model():
    run = run_protocol(noisy_logistic, case(noise=0.5))
    check_no_errors(run)
    models = list(values(run).values())
    assert all(np.array_equal(m.coefficients, models[0].coefficients) for m in models)


def test_a_site_without_labels_adds_noise_alone():
    c = case(donors=False)
    u = SITES[1]
    bare = dataclasses.replace(c.inputs[u][0], labels=(None,) * len(c.inputs[u][0].labels))
    without = Case(c.params, {**c.inputs, u: (bare,)})
    check_ideal(noisy_logistic, [without], agree=agree)


# ---- noise -----------------------------------------------------------------------------------------------------------


def drawn(params, total, sensitivity, seed):
    entropy = Entropy(Prg(seed.to_bytes(32, "big")).bytes)
    return params.code(sensitivity).decode(noisy_words(params, total, sensitivity, entropy))


@pytest.mark.parametrize("clip", [1.0, 0.25])
def test_the_noise_of_all_but_one_site_is_z_times_the_clip(clip):
    """Attack: a site takes its own share of the noise away. What the others drew is what ε was worked out for."""
    params = dataclasses.replace(case(noise=1.3).params, clip=clip)
    others = sum(drawn(params, np.zeros(20_000), clip, seed) for seed in range(len(SITES) - 1))
    assert abs(others.std() / (1.3 * clip) - 1) < 0.03  # 20,000 draws: 0.5 % at one standard deviation


def test_no_donor_counts_for_more_than_the_clip():
    """A donor of one cell with huge counts, and one of a thousand cells: neither moves the sum further than C."""
    c = case()
    start = Start(c.inputs[SITES[0]][0].names, ("type 0", "type 1", "type 2"), 0)
    mine = c.inputs[SITES[0]][0]
    wild = dataclasses.replace(mine, x=mine.x * 1e6)
    for held in (mine, wild):
        for rows in units_of(c.params, held, start):
            delta = update_of(c.params, rows, np.zeros((13, 3)))
            assert np.linalg.norm(delta) <= 1.0 + 1e-9


def guesses(noise, tries=400):
    """Who knows every other donor subtracts them, and says whether the last one's cells are of type 0 or of type 1."""
    c = case(noise=noise)
    mine = c.inputs[SITES[0]][0]
    start, theta = Start(mine.names, ("type 0", "type 1", "type 2"), 0), np.zeros((13, 3))
    worlds = []
    for label in ("type 0", "type 1"):
        labels = tuple(label if d == 0 else name for d, name in zip(mine.donors, mine.labels, strict=True))
        units = list(units_of(c.params, dataclasses.replace(mine, labels=labels), start))
        worlds.append([update_of(c.params, rows, theta).ravel() for rows in units])
    others = np.sum(worlds[0][1:], axis=0)
    apart = worlds[1][0] - worlds[0][0]
    right = 0
    for i in range(tries):
        truth = i % 2
        parts = [drawn(c.params, np.sum(worlds[truth], axis=0), 1.0, 10 * i)]  # this site's; the others' noise besides
        parts += [drawn(c.params, np.zeros(theta.size), 1.0, 10 * i + 1)]
        left = np.sum(parts, axis=0) - others - worlds[0][0]
        right += int((left @ apart > apart @ apart / 2) == bool(truth))
    return right / tries


def test_a_donors_diagnosis_is_read_without_noise_and_hardly_with_it():
    assert guesses(SILENT) == 1.0
    with_noise = guesses(3.0)
    most = 0.5 * (
        1 + math.erf(2.0 / (2 * 3.0) / math.sqrt(2))
    )  # updates 2C apart, noise of 3C: the best guess there is
    assert with_noise <= most + 3 * 0.5 / math.sqrt(400)


def test_the_number_of_donors_has_noise():
    run = run_protocol(noisy_logistic, case(noise=2.0))
    check_no_errors(run)
    lines = [e.line for e, _ in run.receipts[HUB].entries if e.kind == "opened" and e.protocol == "noisy_logistic"]
    assert lines == ["L2", "L4", "L4", "L4"]


@pytest.mark.slow
def test_one_liar():
    c, twin = (case(seed=s, rounds=1, g=4, donors=False) for s in (1, 2))
    ideals = [noisy_logistic.ideal(x.params, {u: m for u, (m,) in x.inputs.items()})[HUB] for x in (c, twin)]

    def right(lie, ended):
        for fitted in ended.values():
            if lie.liar == HUB:
                agree(fitted, min(ideals, key=lambda m: float(np.abs(m.coefficients - fitted.coefficients).max())))
            else:
                assert np.all(np.isfinite(fitted.coefficients))

    lies = check_lies(noisy_logistic, [c, twin], right=right)
    assert lies.tried > 10
    assert lies.aborted > 3


# ---- bad input -------------------------------------------------------------------------------------------------------


def test_donors_that_are_not_named():
    c = case()
    u = SITES[0]
    run = run_protocol(
        noisy_logistic,
        Case(c.params, {**c.inputs, u: (dataclasses.replace(c.inputs[u][0], donors=None),)}),
        timeout=2.0,
    )
    assert isinstance(run.errors[u], DataError)
    assert "donor_key=" in str(run.errors[u])


def test_more_genes_than_agreed_abort_by_name():
    c = case()
    params = dataclasses.replace(c.params, base=dataclasses.replace(c.params.base, n_top_genes=11))
    run = run_protocol(noisy_logistic, Case(params, c.inputs), timeout=2.0)
    assert run.errors[HUB].code == "genes"
    assert "12 genes in common, more than n_top_genes=11" in str(run.errors[HUB])


@pytest.mark.parametrize(
    ("change", "of_base"),
    [({"noise": 0.0}, {}), ({"clip": 0.0}, {}), ({"rounds": 0}, {}), ({}, {"balance": 1.0})],
)
def test_bad_parameters(change, of_base):
    params = case().params
    with pytest.raises(ParameterError):
        dataclasses.replace(params, base=dataclasses.replace(params.base, **of_base), **change)
