"""The stages of an encrypted step: the polynomial they compute, what their roundings weigh, which rings carry them."""

import numpy as np
import pytest

pytest.importorskip("numba")

from cloister.errors import ParameterError
from cloister.models import cellcnn
from cloister.mpc.crypto.ckks import scheme as ckks
from cloister.mpc.crypto.entropy import Entropy
from cloister.workflows.train_cellcnn import cellcnn_circuit
from cloister.workflows.train_cellcnn.level_schedule import Ladder, chain

SMALL = chain(8192, scale_bits=56, value_bits=3, parties=3)
LARGE = [chain(16384, scale_bits=bits, parties=3) for bits in (80, 88, 92, 96)]


@pytest.mark.parametrize("params", [SMALL, *LARGE])
@pytest.mark.parametrize("interval", [1.0, 3.0, 8.0])
def test_scales_are_balanced_and_fit_their_primes(params, interval):
    ladder = Ladder(params, interval)
    (k_u, k_b, k_q, k_z), (d1, d2, d3) = ladder.primes, ladder.spent
    assert (k_u - d1, k_b - d2, k_q - d3, k_u + 1) == (k_b, k_q, k_z, params.top)
    b, w = params.level_bits, ladder.square_bits
    room = [sum(params.bits[:k]) for k in range(params.top + 1)]
    assert w + d1 * b < room[k_u]  # U² before it is rescaled
    assert 2 * w < room[k_b]
    assert params.scale_bits + d3 * b < room[k_q]
    assert ladder.z_noise <= min(ladder.weights(w + step) for step in (-2.0, -0.25, 0.25, 2.0))
    assert ladder.z_noise < 1024  # small primes leave U less to spare; `Layout.noise` counts it


@pytest.mark.parametrize("interval", [1.0, 3.0])
def test_the_quintic_is_the_error_of_the_twin(interval):
    c5, p, q = Ladder(SMALL, interval).quintic
    u, Y = np.linspace(-4, 4, 50), np.zeros((50, 1))
    _, c1, _, c3, c = cellcnn.error_polynomial(interval, Y)
    np.testing.assert_allclose(c5 * u * ((u * u + p) ** 2 + q), c1 * u + c3 * u**3 + c * u**5, atol=1e-12)


def test_other_chains_are_refused():
    with pytest.raises(ParameterError, match="level primes"):
        Ladder(ckks.choose(4, 8192, scale_bits=50, value_bits=3, parties=3), 3.0)
    with pytest.raises(ParameterError, match="no room"):
        chain(8192, scale_bits=80, parties=3)


def test_noise_of_a_gradient_stays_below_its_bound():
    """Two encryptions of one model: what their gradients differ by is noise, since everything else is the same."""
    config = cellcnn.Config(markers=3, filters=2, batch=12)
    L, c, entropy = cellcnn_circuit.Layout(config, SMALL, 1), ckks.context(SMALL), Entropy()
    secret, public = ckks.own_key(SMALL, entropy)
    r, s = c.ring, secret.ntt

    def switching(target, galois=0):
        prg, K = entropy.prg(), len(c.primes)
        a = np.stack([r.uniform(prg, K) for _ in range(SMALL.digits)])
        b = [
            c.bases.known_share(r.add_product(r.error(prg, K), a[d], s, sign=-1), target, d)
            for d in range(SMALL.digits)
        ]
        return ckks.SwitchingKey(np.stack(b), a, galois)

    def turned(steps):
        g = c.galois(steps)
        small = r.of_small(r.rotate_coefficients(secret.coefficients, g), len(c.primes))
        return switching(r.forward(small), g)

    rng = np.random.default_rng(0)
    X, M = rng.uniform(-4, 4, (12, 3)), rng.uniform(-0.6, 0.6, (3, 2))
    Y = cellcnn.one_hot(rng.integers(0, 2, 12), 2)
    relin, rotation = switching(r.multiply(s, s)), {steps: turned(steps) for steps in L.rotations}
    plain = []
    for _ in range(2):
        model = c.encrypt(public, L.model_slots(M, (0, 1)), SMALL.top, SMALL.scale, entropy)
        raw, _ = c.raw(cellcnn_circuit.gradient(L, model, X, Y, relin, rotation))
        plain.append(r.add_product(raw[0], raw[1], s))
    slots = c.decode(plain[0], SMALL.scale)
    E = cellcnn.gradient(cellcnn.Config(markers=3, filters=2, batch=1), M, X[:1], Y[:1])
    np.testing.assert_allclose([slots[L.at(j, k, 0)] for j in range(3) for k in range(2)], E.ravel(), atol=1e-7)
    high, _ = r.lift(r.backward(r.subtract(plain[0], plain[1])))
    assert 1 < high.std() / np.sqrt(2) < L.ladder.z_noise * ckks.rounding_noise(SMALL, 1)
