import logging
from types import SimpleNamespace

import numpy as np
import pytest
import scipy.sparse

from cloister.errors import DataError
from cloister.workflows.common import gene_moments
from cloister.workflows.common.gene_moments import Cells

COUNTS = SimpleNamespace(kind="counts", target_sum=1e4)


def cells(n=40, g=50, seed=0):
    x = np.random.default_rng(seed).poisson(1.0, (n, g)).astype(float)
    x[:, 0] += 1
    return Cells(tuple(f"G{i:02d}" for i in range(g)), scipy.sparse.csr_matrix(x))


def values(mine, common, **options):
    return np.concatenate([y.toarray() for y in gene_moments.normalised(COUNTS, mine, common, len(common), **options)])


@pytest.mark.parametrize("sparse", [True, False])
def test_common_genes_choose_columns_and_change_no_value(sparse):
    mine = cells()
    mine = mine if sparse else Cells(mine.names, mine.x.toarray())
    every, few = values(mine, mine.names), values(mine, mine.names[5:9])
    np.testing.assert_array_equal(few, every[:, 5:9])
    np.testing.assert_allclose(every.sum(axis=1), 1e4)
    sums = [gene_moments.moments(COUNTS, mine, names)[1:].reshape(4, -1) for names in (mine.names, mine.names[5:9])]
    np.testing.assert_array_equal(sums[1], sums[0][:, 5:9])


def test_cells_of_a_model_are_normalised_over_its_genes():
    mine = cells()
    placed = values(mine, mine.names[:9], of_model=True)
    np.testing.assert_allclose(placed.sum(axis=1), 1e4)
    more = Cells((*mine.names, "extra"), scipy.sparse.hstack([mine.x, np.full((40, 1), 500.0)], format="csr"))
    np.testing.assert_allclose(values(more, mine.names[:9], of_model=True), placed)


def test_whether_a_library_is_too_small_does_not_depend_on_the_common_genes():
    mine = cells()
    library = np.asarray(mine.x.sum(axis=1)).ravel()
    library[3] -= 1
    with pytest.raises(DataError, match="more counts than its library size"):
        values(Cells(mine.names, mine.x, library), mine.names[:2])


def test_a_site_is_warned_if_the_common_genes_carry_few_of_its_counts(caplog):
    mine = cells()
    with caplog.at_level(logging.WARNING, logger="cloister"):
        gene_moments.warn_of_share(COUNTS, mine, mine.names[:40])
        assert not caplog.records
        gene_moments.warn_of_share(COUNTS, mine, mine.names[:10])
    assert "10 genes in common carry 2" in caplog.text
    assert "files with these genes only" in caplog.text
