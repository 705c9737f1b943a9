"""Taylor's exp of the degrees of the paper's Table 5, under encryption, on scores near both ends of its interval."""

import numpy as np
import pytest

pytest.importorskip("numba")
from encoders import tiny

from cloister.errors import ParameterError
from cloister.models import polynomial
from cloister.mpc.crypto.owner_ckks import scheme as block
from cloister.papers import permuted_inference
from cloister.study import Party
from cloister.testing import Case, check_ideal
from cloister.workflows.adapt_model import encrypted_inference

HUB, ANN = Party("hub"), Party("ann")


def wide(degree):
    """A block whose scores come near to 3.5 and, where the degree allows it, to -3.5."""
    return tiny(tokens=2, inputs=1, width=4, heads=1, hidden=2, rank=1, exp_degree=degree, steps=2, root_steps=2,
                query=1.1)  # fmt: skip


@pytest.mark.parametrize("degree", [8, *(pytest.param(d, marks=pytest.mark.slow) for d in (10, 12, 14)), 16])
@pytest.mark.parametrize("module", [encrypted_inference, permuted_inference])
def test_an_exp_of_high_degree_is_the_plain_one(module, degree):
    encoder, inputs = wide(degree)
    low, high = polynomial.measure(encoder, inputs).seen["scores", 0]
    assert max(-low, high) > 2  # where degree 2 would be wrong by a third and more
    params = module.Params((ANN,), HUB, encoder.shape, block.STANDARD, 1 << 16)

    def agree(found, exact):
        if exact is not None:
            np.testing.assert_allclose(found, exact, atol=4e-2)  # flooding: a deviation of some 0.005

    check_ideal(module, [Case(params, {HUB: (encoder,), ANN: (inputs[:3],)})], agree=agree, timeout=300.0)


def test_odd_degrees_and_larger_ones_are_refused():
    for degree in (3, 0, 18):
        with pytest.raises(ParameterError, match="an even degree from 2 to 16"):
            polynomial.Shape(3, 2, 8, 2, 8, 1, exp_degree=degree)
