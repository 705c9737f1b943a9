"""Where rows begin and end on a grid: two questions open the two cells, and nothing else."""

import numpy as np
import pytest

from cloister.protocols.forest.node_ranges import Grid, find_ranges
from cloister.protocols.sums.tally import Plain, answer_plainly

NODES = 200


class Noting(Plain):
    def __init__(self):
        self.answers = []

    async def test(self, count, length, least, most, proofs=0):
        bits = await super().test(count, length, least, most, proofs)
        assert bits.shape == (length,)
        self.answers.append(bits)
        return bits


def ask(grid, which, along):
    tally = Noting()
    found = answer_plainly(find_ranges(tally, grid, NODES, 3, lambda: grid.ends(which, along, NODES)))
    return found, np.concatenate(tally.answers)


@pytest.mark.parametrize("cells", [2, 3, 4, 5, 16, 63, 64, 65, 128, 512])
def test_the_ends_of_the_rows_are_found_on_any_grid(cells):
    rng = np.random.default_rng(cells)
    grid = Grid(cells, 10.0)
    which, along = rng.integers(0, NODES, 700), rng.normal(0, 3, 700)
    low, high = grid.ends(which, along, NODES)
    full = high >= 0
    assert 0 < (~full).sum() < NODES
    (first, last), answers = ask(grid, which, along)
    np.testing.assert_array_equal(first[full], low[full])
    np.testing.assert_array_equal(last[full], high[full])
    assert (first[~full] >= last[~full]).all()  # nothing there: not a range
    assert len(answers) <= NODES * 2 * (grid.stride + grid.strides - 2)


def test_the_answers_depend_on_the_two_ends_alone():
    """Rows between the ends of a node may lie anywhere, and be as many as they like."""
    rng = np.random.default_rng(0)
    grid = Grid(64, 10.0)
    ends = np.sort(rng.normal(0, 3, (NODES, 2)), axis=1)
    between = ends[:, :1] + (ends[:, 1:] - ends[:, :1]) * rng.random((NODES, 5))
    alone = ask(grid, np.repeat(np.arange(NODES), 2), ends.ravel())[1]
    crowd = ask(grid, np.repeat(np.arange(NODES), 7), np.concatenate([ends, between], axis=1).ravel())[1]
    np.testing.assert_array_equal(alone, crowd)
    other = ask(grid, np.repeat(np.arange(NODES), 2), ends.ravel() + 0.4)[1]
    assert (other != alone).any()
