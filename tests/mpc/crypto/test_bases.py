"""Arithmetic between bases of primes against big integers, and key switching against Microsoft SEAL."""

import math

import numpy as np
import pytest

pytest.importorskip("numba")

from cloister.errors import ParameterError
from cloister.mpc.crypto.ckks import parameters
from cloister.mpc.crypto.ckks import scheme as ckks
from cloister.mpc.crypto.entropy import Entropy
from cloister.mpc.crypto.prg import Prg
from cloister.mpc.crypto.rns.bases import bases, digits_of
from cloister.mpc.crypto.rns.ring import Ring, ring

N = 1024
P = ckks.Parameters(
    16384, base=3, base_bits=40, levels=3, per_level=1, level_bits=40, specials=2
)  # three digits of two


def found(bits, count, degree):
    q, out = (1 << bits) // (2 * degree) * 2 * degree + 1, []
    while len(out) < count:
        q -= 2 * degree
        if parameters.is_prime(q):
            out.append(q)
    return tuple(out)


def key_for(c, secret, target, galois=0):
    prg, K = Entropy().prg(), len(c.primes)
    a = np.stack([c.ring.uniform(prg, K) for _ in range(c.params.digits)])
    b = [c.ring.add_product(c.ring.error(prg, K), a[d], secret.ntt, sign=-1) for d in range(c.params.digits)]
    return ckks.SwitchingKey(np.stack([c.bases.known_share(x, target, d) for d, x in enumerate(b)]), a, galois)


def relin_key(c, secret):
    return key_for(c, secret, c.ring.multiply(secret.ntt, secret.ntt))


def rotation_key(c, secret, steps):
    g = c.galois(steps)
    turned = c.ring.rotate_coefficients(secret.coefficients, g)
    return key_for(c, secret, c.ring.forward(c.ring.of_small(turned, len(c.primes))), g)


@pytest.fixture(scope="module")
def c():
    return ckks.context(P)


@pytest.fixture(scope="module")
def own():
    return ckks.own_key(P, Entropy())


def values(seed):
    return np.random.default_rng(seed).normal(size=P.slots)


# ---- transforms in doubles -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("degree", "bits"), [(512, 50), (1024, 50), (2048, 30), (8192, 48)])
def test_transforms_in_doubles_are_those_in_integers(degree, bits):
    """The largest residues in every place, and random ones, at the largest primes allowed."""
    q = found(bits, 2, degree)
    real, whole = Ring(degree, q), Ring(degree, q, narrow=False)
    assert real.narrow
    assert not whole.narrow
    extreme = np.stack([np.full(degree, p - 1, np.uint64) for p in q])
    for a in (extreme, real.uniform(Prg(bytes(32)), 2), real.zeros(2)):
        np.testing.assert_array_equal(real.forward(a.copy()), whole.forward(a.copy()))
        np.testing.assert_array_equal(real.backward(a.copy()), whole.backward(a.copy()))
        np.testing.assert_array_equal(
            real.add_product(a.copy(), a, extreme, sign=-1), whole.add_product(a.copy(), a, extreme, sign=-1)
        )


def test_primes_are_prime_different_and_have_roots():
    q = ckks.context(P).primes
    assert len(set(q)) == len(q)
    assert [p.bit_length() for p in q] == list(P.bits)
    assert all(p % (2 * P.degree) == 1 and pow(3, p - 1, p) == 1 for p in q)
    small = [n for n in range(3, 2000, 2) if parameters.is_prime(n)]
    assert small == [n for n in range(3, 2000, 2) if all(n % d for d in range(3, math.isqrt(n) + 1, 2))]
    for pseudo in (3215031751, 3474749660383, 341550071728321, 561, 2**49 + 1):  # strong pseudoprimes to few bases
        assert not parameters.is_prime(pseudo)
    with pytest.raises(ParameterError, match="not enough primes"):
        parameters.chain_primes(ckks.Parameters(32768, base=20, base_bits=20, levels=1, per_level=1, level_bits=20))


# ---- between bases ---------------------------------------------------------------------------------------------------


def test_division_rounds_to_the_nearest_integer():
    q = found(48, 4, N)
    r, b = Ring(N, q), bases(Ring(N, q), 1)
    rng = np.random.default_rng(1)
    Q, D = math.prod(q), q[2] * q[3]
    wanted = [int.from_bytes(rng.bytes(24), "big") % Q - Q // 2 for _ in range(N - 2)] + [0, -1]
    rows = r.forward(np.array([[v % p for v in wanted] for p in q], np.uint64))
    halves = r.lift_exact(r.backward(b.rescaled(rows[None], 2)[0]))
    Q2 = q[0] * q[1]
    for v, h in zip(wanted, halves, strict=True):
        off = abs(v - h * D) % (Q2 * D)
        assert min(off, Q2 * D - off) <= D // 2 + D // 2**40  # ties may go either way


def test_digits_are_the_centred_parts_of_a_polynomial(c):
    k = 5
    x = c.ring.uniform(Prg(b"d" * 32), k)
    got = c.bases.digits(c.ring.forward(x.copy())).copy()
    rows = [*range(k), *range(P.top, len(c.primes))]
    for d, part in enumerate(digits_of(k, P.specials)):
        sub = ring(P.degree, tuple(c.primes[i] for i in part))
        small = sub.lift_exact(x[part.start : part.stop][:, :50])
        for at, j in enumerate(rows):
            one = ring(P.degree, (c.primes[j],))
            words = np.array([int(v) % c.primes[j] for v in got[d, at]], np.uint64)[None]
            assert [int(v) for v in one.backward(words)[0][:50]] == [v % c.primes[j] for v in small]


# ---- evaluation against SEAL -----------------------------------------------------------------------------------------


class Seal:
    """SEAL with the same data primes and one special prime, and its secret as ours."""

    def __init__(self, c):
        self.seal = seal = pytest.importorskip("seal")
        p = seal.EncryptionParameters(seal.scheme_type.ckks)
        p.set_poly_modulus_degree(P.degree)
        p.set_coeff_modulus([seal.Modulus(q) for q in c.primes[: P.top + 1]])
        self.context = seal.SEALContext(p, expand_mod_chain=True, sec_level=seal.sec_level_type.tc128)
        self.maker = seal.KeyGenerator(self.context)
        self.coder, self.ev = seal.CKKSEncoder(self.context), seal.Evaluator(self.context)
        raw = self.maker.secret_key().to_string()
        rows = np.frombuffer(raw[-(P.top + 1) * P.degree * 8 :], np.uint64).reshape(-1, P.degree)
        first = c.ring.backward(rows[:1].copy())[0].astype(np.int64)
        self.secret = ckks.Secret(P, np.where(first > 1, first - c.primes[0], first))
        np.testing.assert_array_equal(self.secret.ntt[: P.top + 1], rows)

    def encrypt(self, x):
        return self.seal.Encryptor(self.context, self.maker.create_public_key()).encrypt(self.coder.encode(x, P.scale))

    def decrypt(self, ct):
        return np.asarray(self.coder.decode(self.seal.Decryptor(self.context, self.maker.secret_key()).decrypt(ct)))

    def ours(self, ct):
        blob, k = ct.to_string(), ct.coeff_modulus_size()
        polys = np.frombuffer(blob[-2 * k * P.degree * 8 :], np.uint64).reshape(2, k, -1).copy()
        return ckks.Cipher(polys, float(ct.scale()))

    def theirs(self, ct, like):
        """One of ours, with the header of one of theirs."""
        blob = like.to_string()
        made = self.context.from_cipher_str(blob[: len(blob) - ct.polys.nbytes] + ct.polys.tobytes())
        made.scale(ct.scale)
        return made


def test_seal_opens_what_we_encrypt_and_evaluate_and_the_other_way(c):
    """Rotations and rescaled products of SEAL's own ciphertexts, by its keys and by ours: equal, no more noise."""
    them = Seal(c)
    x, y = values(6), values(7)
    ct, other = them.encrypt(x), them.encrypt(y)
    np.testing.assert_allclose(c.decrypt(them.secret.ntt, them.ours(ct)), x, atol=1e-6)
    public = c.ring.error(Entropy().prg(), P.top)
    a = c.ring.uniform(Entropy().prg(), P.top)
    public = ckks.PublicKey(c.ring.add_product(public, a, them.secret.ntt, sign=-1), a)
    np.testing.assert_allclose(
        them.decrypt(them.theirs(c.encrypt(public, x, P.top, P.scale, Entropy()), ct)), x, atol=1e-6
    )

    galois, relin = them.seal.GaloisKeys(), them.maker.create_relin_keys()
    them.maker.create_galois_keys([3], galois)
    turned = them.ev.rotate_vector(ct, 3, galois)
    product = them.ev.rescale_to_next(them.ev.relinearize(them.ev.multiply(ct, other), relin))
    own_turned = c.rotate(them.ours(ct), 3, rotation_key(c, them.secret, 3))
    own_product = c.times(them.ours(ct), them.ours(other), relin_key(c, them.secret))
    for mine, yours, wanted in ((own_turned, turned, np.roll(x, -3)), (own_product, product, x * y)):
        assert mine.scale == pytest.approx(float(yours.scale()), rel=1e-12)
        np.testing.assert_allclose(them.decrypt(them.theirs(mine, yours)), wanted, atol=3e-5)
        np.testing.assert_allclose(c.decrypt(them.secret.ntt, them.ours(yours)), wanted, atol=3e-5)
        error = [np.std(c.decrypt(them.secret.ntt, ct) - wanted) for ct in (mine, them.ours(yours))]
        assert error[0] < 1.2 * error[1]  # 8192 slots: one percent of standard error each


def test_products_and_rotations_decrypt_to_what_they_should(c, own):
    secret, public = own
    x, y = values(1), values(2)
    relin = relin_key(c, secret)
    ct, other = (c.encrypt(public, v, P.top, P.scale, Entropy()) for v in (x, y))
    for k in range(P.top, P.base, -1):  # every number of digits, whole or not
        product = c.times(c.drop(ct, k), c.drop(other, k), relin)
        np.testing.assert_allclose(c.decrypt(secret.ntt, product), x * y, atol=3e-5)
    for steps in (1, 5, -3):
        turned = c.rotate(ct, steps, rotation_key(c, secret, steps))
        np.testing.assert_allclose(c.decrypt(secret.ntt, turned), np.roll(x, -steps), atol=1e-6)
    with pytest.raises(ParameterError, match="rotation by 2"):
        c.rotate(ct, 2, rotation_key(c, secret, 1))


def test_hoisted_rotations_are_the_sum_of_single_ones(c, own):
    secret, public = own
    x = values(3)
    ct, keys = c.encrypt(public, x, P.top, P.scale, Entropy()), [rotation_key(c, secret, s) for s in (4, 8, 12)]
    together = c.decrypt(secret.ntt, c.add_rotations(ct, keys))
    np.testing.assert_allclose(together, sum(np.roll(x, -s) for s in (0, 4, 8, 12)), atol=3e-6)


def test_conjugation_turns_the_imaginary_parts(c, own):
    secret, public = own
    x, y = values(4), values(5)
    both = c.encode(x + 1j * y, P.top, P.scale)
    ct = c.encrypt(public, np.zeros(P.slots), P.top, P.scale, Entropy())
    c.ring.add(ct.polys[0], both.residues)
    real = c.add(ct, c.rotate(ct, 0, rotation_key(c, secret, 0)))
    np.testing.assert_allclose(c.decrypt(secret.ntt, real), 2 * x, atol=3e-6)


def noise(c, secret, ct, exact):
    """Coefficients of what a ciphertext holds beside the exact plaintext."""
    m = c.ring.add_product(ct.polys[0].copy(), ct.polys[1], secret.ntt[: ct.primes])
    return np.array([float(v) for v in c.ring.lift_exact(c.ring.backward(c.ring.subtract(m, exact)))[:400]])


def test_noise_of_a_switch_is_what_the_parameters_say(c, own):
    """A fresh encryption rotated: its noise grows by rounding and by the digits' errors over P, and no more."""
    secret, _ = own
    zero = ckks.Cipher(np.zeros((2, P.top, P.degree), np.uint64), P.scale)
    zero.polys[1] = c.ring.uniform(Entropy().prg(), P.top)
    zero.polys[0] = c.ring.add_product(c.ring.zeros(P.top), zero.polys[1], secret.ntt, sign=-1)  # no noise at all
    turned = c.rotate(zero, 7, rotation_key(c, secret, 7))
    found = noise(c, secret, turned, c.ring.zeros(P.top)).std()
    said = ckks.rounding_noise(P, 1)
    assert 0.7 * said < found < 1.3 * said  # 400 coefficients: 3.5 % of standard error
