"""The block's arithmetic beside SEAL's: same key, same ciphertexts, the same residues, and SEAL opens our results."""

import dataclasses

import numpy as np
import pytest

pytest.importorskip("numba")
pytest.importorskip("seal")
import seal

from cloister.mpc.crypto.entropy import Entropy
from cloister.mpc.crypto.owner_ckks import scheme as block

P, E = block.STANDARD, Entropy()
K = P.count - 1  # SEAL keeps the last prime for its keys
SCALE = 2.0**22


class Seal:
    def __init__(self):
        p = seal.EncryptionParameters(seal.scheme_type.ckks)
        p.set_poly_modulus_degree(P.degree)
        p.set_coeff_modulus([seal.Modulus(q) for q in block.primes_of(P)])
        self.context = seal.SEALContext(p, expand_mod_chain=True, sec_level=seal.sec_level_type.tc128)
        assert self.context.parameters_set()
        maker = seal.KeyGenerator(self.context)
        self.coder, self.ev = seal.CKKSEncoder(self.context), seal.Evaluator(self.context)
        self.encryptor = seal.Encryptor(self.context, maker.create_public_key())
        self.decryptor = seal.Decryptor(self.context, maker.secret_key())
        self.secret = self.residues(maker.secret_key().to_string(), 1, P.count)[0]
        public = self.residues(maker.create_public_key().to_string(), 2, P.count)
        self.public = public

    @staticmethod
    def residues(blob, polys, k):
        found = np.frombuffer(blob[-polys * k * P.degree * 8 :], np.uint64).reshape(polys, k, P.degree)
        return found.astype(np.uint32)

    def raw(self, ct):
        assert ct.coeff_modulus_size() == K
        return self.residues(ct.to_string(), ct.size(), K)

    def encrypt(self, x):
        return self.encryptor.encrypt(self.coder.encode(x, SCALE))

    def times(self, ct, weight):
        return self.ev.multiply_plain(ct, self.coder.encode(weight, 2.0**13))

    def ours(self, raw, like):
        """Our residues in the coat of one of SEAL's ciphertexts."""
        blob = like.to_string()
        head = blob[: len(blob) - raw.size * 8]
        return self.context.from_cipher_str(head + raw.astype(np.uint64).tobytes())

    def opened(self, ct):
        return np.asarray(self.coder.decode(self.decryptor.decrypt(ct)))


@pytest.fixture(scope="module")
def s():
    return Seal()


@pytest.fixture(scope="module")
def key(s):
    """Our owner's key, with SEAL's secret in it."""
    made = block.OwnerKey(P, E)
    made._powers[:] = [(s.secret, block.ring_of(P).quotients(s.secret))]
    return made


@pytest.fixture(scope="module")
def ev(s):
    made = block.Evaluator(P, s.public[0], E.bytes(32))
    r = block.ring_of(P)
    made._a = (s.public[1], r.quotients(s.public[1]))
    return made


def test_every_operation_gives_the_residues_that_seal_gives(s, ev):
    rng = np.random.default_rng(0)
    x, y, z = rng.normal(size=(3, P.slots))
    a, b, c = (s.encrypt(v) for v in (x, y, z))
    A, B, C = (s.raw(v)[None] for v in (a, b, c))
    ab = s.ev.multiply(a, b)
    both = {
        "sum": (s.ev.add(a, b), ev.combine([(1, A), (1, B)])),
        "difference": (s.ev.sub(a, b), ev.combine([(1, A), (-1, B)])),
        "product": (ab, ev.products(A, B)),
        "product of three": (s.ev.multiply(ab, c), ev.products(ev.products(A, B), C)),
        "sum of products": (
            s.ev.add(ab, s.ev.multiply(a, c)), ev.dot(np.concatenate([A, A]), np.concatenate([B, C]))[None],
        ),
        "times a number": (s.ev.multiply_plain(a, s.coder.encode(3.0, SCALE)), ev.combine([(3 << 22, A)])),
        "linear": (
            s.ev.sub(s.times(a, 5.0), s.times(b, 7.0)),
            ev.linear(np.array([[5 << 13, -7 << 13]]), np.concatenate([A, B])),
        ),
        "plus a number": (s.ev.add_plain(a, s.coder.encode(0.5, SCALE)), ev.combine([(1, A)], 0.5 * SCALE)),
    }  # fmt: skip
    for name, (theirs, found) in both.items():
        np.testing.assert_array_equal(found[0], s.raw(theirs), err_msg=name)


def test_seal_opens_what_we_computed_and_we_open_what_seal_computed(s, key, ev):
    rng = np.random.default_rng(1)
    x, y = rng.normal(size=(2, P.slots))
    a, b = s.encrypt(x), s.encrypt(y)
    theirs = s.ev.multiply(a, b)
    found = ev.products(s.raw(a)[None], s.raw(b)[None])[0]
    again = ev.rerandomise(found.copy(), E.prg())
    assert (again != found).mean() > 0.99
    for raw in (found, again):
        # what the factors open to, noise and all: encryption's noise has long tails, a product adds next to none
        np.testing.assert_allclose(s.opened(s.ours(raw, theirs)), s.opened(a) * s.opened(b), atol=3e-5)
    ours, seals = key.open(found), key.open(s.raw(theirs))
    np.testing.assert_array_equal(ours, seals)


def test_seal_opens_a_blinded_refresh(s, key, ev):
    """A product of SEAL's, refreshed by our two sides, opened by SEAL: the same values, at another scale."""
    x, y = np.random.default_rng(2).uniform(-1, 1, (2, P.slots))
    a, b = s.encrypt(x), s.encrypt(y)
    theirs = s.ev.multiply(a, b)
    how = dataclasses.replace(block.opening(P, "t", 1, 3, SCALE**2, 1.0, SCALE), back=K)
    seed, masks = E.bytes(32), E.bytes(32)
    keys = E.bytes(32)
    ev.accept(key.switching(3, keys, E), keys)
    raw = np.ascontiguousarray(s.raw(theirs)[None, :, : how.primes])
    c0 = key.refresh(ev.blind(raw, how, masks, E), how, seed, E)
    fresh = ev.unblind(c0, seed, how, masks)[0]
    np.testing.assert_allclose(s.opened(s.ours(fresh, s.encrypt(x))), s.opened(a) * s.opened(b), atol=1e-3)
