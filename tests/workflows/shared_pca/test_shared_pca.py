from types import SimpleNamespace

import numpy as np
import pytest
import scipy.sparse
from scipy.linalg import subspace_angles

from cloister.errors import DataError, ParameterError
from cloister.mpc.crypto.entropy import Entropy
from cloister.rehearsal.rehearsal import Fault
from cloister.study import Party
from cloister.testing import (
    Case,
    check_abort,
    check_cost,
    check_ideal,
    check_no_errors,
    check_view,
    run_protocol,
    transcript,
    values,
)
from cloister.workflows.common import common_genes
from cloister.workflows.shared_pca import shared_pca
from cloister.workflows.shared_pca.shared_pca import Cells, Params

HUB = Party("hub")


def counts(rng, n, g):
    """Cells of three kinds, so that the first components are well apart from the rest."""
    base = rng.gamma(0.6, 2.0, g)
    kinds = np.array([base * np.exp(rng.normal(0, 1.0, g)) for _ in range(3)])
    return rng.poisson(kinds[rng.integers(0, 3, n)] * rng.uniform(0.5, 2.0, (n, 1))).astype(np.float64)


def case(seed=0, n=3, g=60, sparse=True, **options):
    rng = np.random.default_rng(seed)
    names = [Party(f"site-{i}") for i in range(n)]
    sizes = [70 + 20 * i for i in range(n)]
    x = counts(rng, sum(sizes), g)
    genes = np.array([f"G{i:03d}" for i in range(g)])
    inputs, start = {}, 0
    for i, (u, size) in enumerate(zip(names, sizes, strict=True)):
        keep = rng.permutation(g) if options.pop("shuffle", True) else np.arange(g)
        keep = keep[keep != i]  # every site lacks one gene of its own
        part = x[start : start + size][:, keep]
        inputs[u] = (Cells(tuple(genes[keep]), scipy.sparse.csr_matrix(part) if sparse else part),)
        start += size
    chosen = {"n_top_genes": 30, "n_components": 5} | options
    return Case(Params(tuple(names), HUB, **chosen), inputs)


def same_space(found, ideal):
    assert found.genes == ideal.genes
    assert found.common == ideal.common
    assert found.cells == ideal.cells
    np.testing.assert_allclose(found.mean, ideal.mean, atol=1e-9)  # 2^-40 per site and gene
    np.testing.assert_allclose(found.deviation, ideal.deviation, atol=1e-6)
    np.testing.assert_allclose(found.variance, ideal.variance, atol=1e-8)
    assert subspace_angles(found.components, ideal.components).max() < 1e-6


def agree(found, ideal):
    if isinstance(ideal, tuple):
        same_space(found[0], ideal[0])
        np.testing.assert_allclose(found[1], ideal[1], atol=1e-5)
    else:
        same_space(found, ideal)


@pytest.mark.parametrize(
    "options",
    [{}, {"n": 2, "sparse": False}, {"n": 5, "scale": False}, {"max_value": 2.0}, {"n_top_genes": 500}],
    ids=["three", "two-dense", "five-unscaled", "clipped", "all-genes"],
)
def test_ideal(options):
    check_ideal(shared_pca, [case(seed=3, **options)], agree=agree)


def test_log_values():
    c = case(seed=4, kind="log")
    inputs = {}
    for u, (mine,) in c.inputs.items():
        x = mine.x.astype(np.float64)
        x.data = np.log1p(x.data)
        inputs[u] = (Cells(mine.names, x),)
    check_ideal(shared_pca, [Case(c.params, inputs)], agree=agree)


def test_view_does_not_depend_on_the_values():
    check_view(shared_pca, case(seed=1, shuffle=False), twin(case(seed=1, shuffle=False)))


def twin(c):
    """The same genes and number of cells, other values."""
    rng = np.random.default_rng(99)
    inputs = {}
    for u, (mine,) in c.inputs.items():
        inputs[u] = (Cells(mine.names, scipy.sparse.csr_matrix(counts(rng, *mine.x.shape))),)
    return Case(c.params, inputs)


def test_cost():
    c = case(n=4)
    common = [f"G{i:03d}" for i in range(4, 60)]
    own = len(common_genes.join([f"G{i:03d}" for i in range(59)]))
    with_sizes = SimpleNamespace(
        __name__="shared_pca",
        roles=shared_pca.roles,
        cost=lambda params: shared_pca.cost(params, len(common), own),
    )
    check_cost(with_sizes, c)


def test_no_value_leaves_but_masked_or_pooled():
    run = run_protocol(shared_pca, case())
    check_no_errors(run)
    sent = {row[0] for p, rows in transcript(run).items() if p != HUB for row in rows}
    assert sent == {
        "channel.Hello",
        "common_genes.Measured",
        "same_view.Signature",
        "attempts.Report",
        "checked_sum.Masked",
        *(f"common_seed.{m}" for m in ("Key", "Parts", "Confirm")),
    }


def survivors_are_right(c):
    def check(run):
        found = values(run)[HUB]
        seen = [u for u in c.params.sites if u in values(run)]
        assert found.cells >= sum(c.inputs[u][0].x.shape[0] for u in seen[:2])
        assert np.all(np.isfinite(found.components))

    return check


@pytest.mark.parametrize("kind", ["drop", "truncate", "kill", "duplicate"])
def test_abort_or_survive(kind):
    c = case()
    messages = [
        ("site-1", "hub", "common_genes.Measured"),
        ("site-1", "hub", "checked_sum.Masked"),
        ("hub", "site-1", "shared_pca.Chosen"),
        ("hub", "site-1", "shared_pca.Components"),
    ]
    assert check_abort(shared_pca, c, survived=survivors_are_right(c), kinds=[kind], messages=messages) == 4


@pytest.mark.parametrize("nth", [0, 1], ids=["before the moments", "between the sums"])
def test_a_site_that_dies_is_left_out(nth):
    c = case(n=4)
    gone = c.params.sites[0]
    run = run_protocol(shared_pca, c, faults=[Fault("kill", gone, HUB, "Masked", nth=nth)], timeout=3.0)
    check_no_errors(run)
    found = values(run)[HUB]
    rest = {u: x for u, (x,) in c.inputs.items() if u != gone}
    assert found.cells == sum(x.x.shape[0] for x in rest.values())
    assert rest.keys() <= values(run).keys()
    if nth == 0:  # genes were agreed with the dead site too; moments and covariance are the survivors'
        common = set(found.common)
        at = {u: [i for i, g in enumerate(x.names) if g in common] for u, x in rest.items()}
        library = {u: np.asarray(x.x.sum(axis=1)).ravel() for u, x in rest.items()}
        keep = {u: Cells(tuple(x.names[i] for i in at[u]), x.x[:, at[u]], library[u]) for u, x in rest.items()}
        same_space(found, shared_pca.ideal(c.params, keep)[HUB])


def test_scores_puts_later_cells_into_the_same_place():
    c = case()
    run = run_protocol(shared_pca, c)
    for u, (space, placed) in ((u, v) for u, v in values(run).items() if u != HUB):
        np.testing.assert_allclose(shared_pca.place(c.params, space, c.inputs[u][0]), placed, atol=1e-12)


def test_large_sums_keep_their_small_digits():
    x = np.array([2.0**51 + 0.125, 3.0000000001, 0.0])
    words = shared_pca.split_sum(x, 2, Entropy()) + shared_pca.split_sum(x, 2, Entropy())
    np.testing.assert_allclose(shared_pca.join_sum(words), 2 * x, rtol=1e-15, atol=1e-12)
    with pytest.raises(DataError, match="too large"):
        shared_pca.split_sum(np.array([2.0**53]), 2, Entropy())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m: Cells(m.names, m.x[:10]), "fewer than 50"),
        (lambda m: Cells(m.names, m.x, np.zeros(m.x.shape[0])), "library sizes"),
        (lambda m: Cells(m.names, m.x, np.full(m.x.shape[0], 1e-3)), "more counts than"),
    ],
)
def test_bad_input_is_named_to_the_site(change, message):
    c = case()
    u = c.params.sites[0]
    bad = Case(c.params, {**c.inputs, u: (change(c.inputs[u][0]),)})
    run = run_protocol(shared_pca, bad, timeout=2.0)
    assert isinstance(run.errors[u], DataError)
    assert message in str(run.errors[u])


def test_no_gene_in_common_is_a_named_abort():
    c = case()
    u = c.params.sites[0]
    mine = c.inputs[u][0]
    other = Cells(tuple(f"other-{g}" for g in mine.names), mine.x)
    run = run_protocol(shared_pca, Case(c.params, {**c.inputs, u: (other,)}), timeout=2.0)
    assert run.errors[HUB].code == "no-common-genes"


@pytest.mark.parametrize(
    ("code", "rows", "genes"), [("too-few-cells", 3, 40), ("too-few-genes", 70, 4)], ids=["cells", "genes"]
)
def test_fewer_cells_or_genes_than_components_are_a_named_abort(code, rows, genes):
    c = case(sparse=False, n_components=20 if code == "too-few-cells" else 5, min_cells=1, min_expressing=2)
    kept = tuple(f"G{i:03d}" for i in range(10, 10 + genes))
    few = {u: (Cells(kept, m.x[:rows, [m.names.index(g) for g in kept]] + 1.0),) for u, (m,) in c.inputs.items()}
    run = run_protocol(shared_pca, Case(c.params, few), timeout=2.0)
    assert run.errors[HUB].code == code


@pytest.mark.parametrize(
    "options", [{"kind": "scaled"}, {"n_components": 0}, {"n_components": 30}, {"target_sum": 0.0}, {"max_value": -1.0}]
)
def test_bad_parameters(options):
    with pytest.raises(ParameterError):
        case(**options)


@pytest.mark.parametrize("sites", [2, 3, 1000])
def test_sums_in_two_words_do_not_tell_how_often_fractions_passed_one(sites):
    """1.5 is 0.75 twice, or 1.5 and nothing: only the first carries, and that must not show."""
    m = 4000
    both, one = np.full((sites, m), 0.0), np.full((sites, m), 0.0)
    both[:2], one[0] = 0.75, 1.5
    seen = []
    for parts in (both, one):
        words = sum(shared_pca.split_sum(part, sites, Entropy()) for part in parts)
        np.testing.assert_array_equal(shared_pca.join_sum(words), 1.5)
        seen.append((words[m:] >> np.uint64(40)).astype(np.float64))  # whole part of the sum of fractions
    spread = np.sqrt(sites / 12) * 2.0 ** (23 - sites.bit_length())
    assert min(s.std() for s in seen) > 0.9 * spread  # against a difference of 1
    assert abs(seen[0].mean() - seen[1].mean()) < 6 * spread * np.sqrt(2 / m)
